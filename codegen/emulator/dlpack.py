# SPDX-License-Identifier: Apache-2.0
"""Tensors that only say where they are: DLPack's structures over addresses that no memory backs.

`fmha` of a generated kernel takes them in the host process, as it takes anybody's tensors; those
of a stand-in for PyTorch have the methods of `torch.Tensor` that host code may ask for.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

CUDA = 2  # kDLCUDA
INT, UINT, FLOAT, BFLOAT = 0, 1, 2, 4  # kDLInt, kDLUInt, kDLFloat, kDLBfloat
FLOAT8_E4M3FN = 10  # kDLFloat8_e4m3fn
# name -> (code, bits)
TYPES = {
    **{"bf16": (BFLOAT, 16), "fp16": (FLOAT, 16)},
    **{"fp32": (FLOAT, 32), "int32": (INT, 32)},
    **{"e4m3": (FLOAT8_E4M3FN, 8), "uint8": (UINT, 8)},
}
_TORCH_NAMES = {
    **{"bf16": "bfloat16", "fp16": "float16"},
    **{"fp32": "float32", "int32": "int32"},
    **{"e4m3": "float8_e4m3fn", "uint8": "uint8"},
}
VERSION = (1, 1)
# A capsule holds the pointer to its name, so the names live as long as the module.
_NAME, _VERSIONED_NAME = b"dltensor", b"dltensor_versioned"
_API_NAME = b"dlpack_exchange_api"


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


# The structures of each capsule, by address: a consumer reads them until it calls the deleter,
# which may be after the tensor has gone. A capsule that is never consumed keeps its own.
_exported: dict[int, _Managed | _Versioned] = {}


def _release(address: int, exported: Any = _exported) -> None:
    exported.pop(address, None)


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_release)
# Consumers may call it while the interpreter ends and has dropped the names of this module.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_deleter))


class Tensor:
    """A tensor of a call; see `launch.tensor_at` for what describes it."""

    def __init__(self, told: Mapping[str, Any], device: int) -> None:
        """device: the CUDA device it is on unless `told` says another."""
        self.dtype = str(told["dtype"])
        self.address, self.byte_offset = told["address"], told["byte_offset"]
        self.shape, self._strides = tuple(told["shape"]), tuple(told["strides"])
        self.place: tuple[int, int] = tuple(told["device"] or (CUDA, device))

    @property
    def first(self) -> int:
        """The address of the first element."""
        return int(self.address + self.byte_offset)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Type and number."""
        return self.place

    def __dlpack__(
        self, *, max_version: tuple[int, int] | None = None, **_options: Any
    ) -> Any:
        """A capsule, versioned for whoever knows versions."""
        versioned = max_version is not None and max_version[0] >= VERSION[0]
        name = _VERSIONED_NAME if versioned else _NAME
        return _new_capsule(self.export(versioned), name, None)

    def export(self, versioned: bool) -> int:
        """The address of a managed tensor, whose consumer calls the deleter."""
        sizes = ctypes.c_int64 * len(self.shape)
        code, bits = TYPES[self.dtype]
        tensor = _Tensor(
            data=self.address,
            device=self.place,
            ndim=len(self.shape),
            code=code,
            bits=bits,
            lanes=1,
            shape=sizes(*self.shape),
            strides=sizes(*self._strides),
            byte_offset=self.byte_offset,
        )
        managed: _Managed | _Versioned
        if versioned:
            managed = _Versioned(version=VERSION, tensor=tensor)
        else:
            managed = _Managed(tensor=tensor)
        managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p)
        address = ctypes.addressof(managed)
        _exported[address] = managed
        return address


class _ExchangeApi(ctypes.Structure):
    """DLPackExchangeAPI: how TVM-FFI takes a tensor, and asks for the stream to run it on."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
        ("to_object", ctypes.c_void_p),
        ("view_of_object", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    )


_Out = ctypes.POINTER(ctypes.c_void_p)
_current_streams: dict[int, int] = {}  # raw handles by device: of the stand-in in use


def _from_object(tensor: Tensor, out: Any) -> int:
    out[0] = tensor.export(versioned=True)
    return 0


def _current_stream(_kind: int, device: int, out: Any) -> int:
    out[0] = _current_streams.get(device, 0)
    return 0


_from_object_c = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, _Out)(_from_object)
_current_stream_c = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, _Out)(
    _current_stream
)
_api = _ExchangeApi(
    version=VERSION,
    from_object=ctypes.cast(_from_object_c, ctypes.c_void_p),
    current_stream=ctypes.cast(_current_stream_c, ctypes.c_void_p),
)


class TorchTensor(Tensor):
    """Poses as a `torch.Tensor`, whose data pointer holds the offset already.

    Of 8-bit floats the method `__dlpack__` refuses, as PyTorch's does up to 2.9; TVM-FFI takes them
    by the exchange API, and anybody takes their view as uint8.
    """

    __dlpack_c_exchange_api__ = _new_capsule(ctypes.addressof(_api), _API_NAME, None)
    requires_grad = False

    def __init__(
        self,
        told: Mapping[str, Any],
        device: int,
        allocate: Callable[[tuple[int, ...], str], Mapping[str, Any]],
    ) -> None:
        """allocate: shape, dtype -> what describes a new tensor."""
        first = {"address": told["address"] + told["byte_offset"], "byte_offset": 0}
        super().__init__({**told, **first}, device)
        self._allocate = allocate
        self.ndim = len(self.shape)
        self.itemsize = TYPES[self.dtype][1] // 8
        self.is_cuda = self.place[0] == CUDA
        self.device = SimpleNamespace(
            type="cuda" if self.is_cuda else "cpu", index=self.place[1]
        )

    def __dlpack__(self, **options: Any) -> Any:
        """As of any tensor; BufferError for 8-bit floats."""
        if self.dtype == "e4m3":
            raise BufferError("float8 types are not supported by dlpack")
        return super().__dlpack__(**options)

    def view(self, dtype: str) -> TorchTensor:
        """The same bytes as elements of another type of the same size."""
        if TYPES[dtype][1] != TYPES[self.dtype][1]:
            raise RuntimeError(f"a view of {self.dtype} as {dtype}, of another size")
        told = {
            "dtype": dtype,
            "address": self.first,
            "byte_offset": 0,
            "shape": self.shape,
            "strides": self._strides,
            "device": self.place,
        }
        return TorchTensor(told, self.place[1], self._allocate)

    def stride(self, mode: int | None = None) -> Any:
        """[elements], of all modes or of one."""
        return self._strides if mode is None else self._strides[mode]

    def size(self, mode: int | None = None) -> Any:
        """[elements], of all modes or of one."""
        return self.shape if mode is None else self.shape[mode]

    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """[bytes]."""
        return self.itemsize

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.first

    def get_device(self) -> int:
        """The number of its device."""
        return self.place[1]

    def new_empty(self, *shape: Any, dtype: str | None = None) -> TorchTensor:
        """A contiguous tensor beside this one, of its type or another."""
        first, *others = shape
        alone = not others and not isinstance(first, int)
        sizes = tuple(first if alone else shape)
        told = self._allocate(sizes, dtype or self.dtype)
        return TorchTensor(told, self.place[1], self._allocate)


def torch_module(device: int, stream: int) -> ModuleType:
    """A stand-in for PyTorch, whose current device and stream are these."""
    torch: Any = ModuleType("torch")
    torch.Tensor = TorchTensor
    for name, theirs in _TORCH_NAMES.items():
        setattr(torch, theirs, name)
    torch.cuda = SimpleNamespace(current_device=lambda: device)
    _current_streams.clear()
    _current_streams[device] = stream
    found: ModuleType = torch
    return found


@contextmanager
def replaced(mapping: Any, name: str, value: Any) -> Iterator[None]:
    """A mapping with another value, or with none, where `value` is None, until the end."""
    known = mapping.get(name)
    mapping.pop(name, None)
    if value is not None:
        mapping[name] = value
    try:
        yield
    finally:
        mapping.pop(name, None)
        if known is not None:
            mapping[name] = known
