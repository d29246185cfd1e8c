# SPDX-License-Identifier: Apache-2.0
"""As much of the CUDA driver as the micro-kernels need, through ctypes: no toolkit, no package."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kernels import THREADS, Bytes, Micro, Tensor

TYPES = {
    "u8": 0,
    "u16": 1,
    "u32": 2,
    "f16": 6,
    "f32": 7,
    "bf16": 9,
}  # CUtensorMapDataType
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ERROR_LOG, _ERROR_LOG_BYTES = 5, 6  # CU_JIT_ERROR_LOG_BUFFER and its size
_LOG_BYTES = 4096
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_GUARD = 4096  # [bytes] around a tensor, in which nothing may change

U64 = ctypes.c_uint64
Pointer = ctypes.c_uint64  # CUdeviceptr


class DriverError(Exception):
    """A call of the driver failed."""


class Device:
    """The first GPU, with its primary context current in this thread."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError("no NVIDIA driver on this machine") from error
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._device = device

    def name(self) -> str:
        """Of the GPU."""
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, ctypes.c_int(len(text)), self._device)
        return text.value.decode()

    def version(self) -> int:
        """Of the CUDA that the driver supports: 1000 x major + 10 x minor."""
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return version.value

    def run(self, micro: Micro) -> dict[str, NDArray[Any]]:
        """`output`; with a tensor also its `map` and, when the kernel changed it, its `tensor`."""
        kernel = self._kernel(micro.ptx, micro.smem_bytes)
        source = self._upload(micro.input)
        target = self._upload(np.full(micro.output_bytes, 0xA5, np.uint8))
        results: dict[str, NDArray[Any]] = {}
        raw = bytes(_MAP_BYTES)
        if micro.tensor is not None:
            guard = np.full(_GUARD, 0x5A, np.uint8)
            guarded = np.concatenate((guard, micro.tensor.content, guard))
            buffer = self._upload(guarded)
            raw = self.encode(micro.tensor, buffer.value + _GUARD)
            results["map"] = np.frombuffer(raw, np.uint8)
        self._launch(kernel, micro, source, target, raw)
        results["output"] = self._download(target, micro.output_bytes)
        if micro.tensor is not None:
            after = self._download(buffer, len(guarded))
            if (after[:_GUARD] != 0x5A).any() or (after[-_GUARD:] != 0x5A).any():
                raise DriverError(f"{micro.name} wrote outside its tensor")
            content = after[_GUARD:-_GUARD]
            if not np.array_equal(content, micro.tensor.content):
                results["tensor"] = content
        return results

    def encode(self, tensor: Tensor, address: int) -> bytes:
        """The tensor map that the driver makes."""
        rank = len(tensor.dimensions)
        room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        start = -(-ctypes.addressof(room) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        self._call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(start),
            ctypes.c_int(TYPES[tensor.element_type]),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(address),
            (U64 * rank)(*tensor.dimensions),
            (U64 * max(rank - 1, 1))(*tensor.strides),
            (ctypes.c_uint32 * rank)(*tensor.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            ctypes.c_int(0),  # not interleaved
            ctypes.c_int(_SWIZZLES[tensor.swizzle_bytes]),
            ctypes.c_int(0),  # no promotion in L2
            ctypes.c_int(0),  # zeros out of bounds
        )
        return ctypes.string_at(start, _MAP_BYTES)

    def _kernel(self, ptx: str, smem_bytes: int) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        log = ctypes.create_string_buffer(_LOG_BYTES)
        options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
        # The size is passed in the pointer itself.
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
        try:
            self._call(
                "cuModuleLoadDataEx",
                ctypes.byref(module),
                ctypes.c_char_p(ptx.encode()),
                ctypes.c_uint(2),
                options,
                values,
            )
        except DriverError as error:
            raise DriverError(
                f"{error}: {log.value.decode(errors='replace')}"
            ) from None
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"micro")
        self._call(
            "cuFuncSetAttribute",
            function,
            ctypes.c_int(_MAX_DYNAMIC_SHARED),
            ctypes.c_int(smem_bytes),
        )
        return function

    def _launch(
        self,
        kernel: ctypes.c_void_p,
        micro: Micro,
        source: Pointer,
        target: Pointer,
        raw: bytes,
    ) -> None:
        room = ctypes.create_string_buffer(raw, _MAP_BYTES)
        parameters = (ctypes.c_void_p * 3)(
            ctypes.addressof(source), ctypes.addressof(target), ctypes.addressof(room)
        )
        one = ctypes.c_uint(1)
        self._call(
            "cuLaunchKernel",
            kernel,
            *(ctypes.c_uint(micro.grid), one, one),
            *(ctypes.c_uint(THREADS), one, one),
            ctypes.c_uint(micro.smem_bytes),
            ctypes.c_void_p(None),
            parameters,
            ctypes.c_void_p(None),
        )
        self._call("cuCtxSynchronize")

    def _upload(self, content: Bytes) -> Pointer:
        """Never freed: the process ends soon."""
        content = np.ascontiguousarray(content)
        address = Pointer()
        self._call(
            "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(content.nbytes)
        )
        self._call(
            "cuMemcpyHtoD_v2",
            address,
            ctypes.c_void_p(content.ctypes.data),
            ctypes.c_size_t(content.nbytes),
        )
        return address

    def _download(self, address: Pointer, nbytes: int) -> Bytes:
        content = np.zeros(nbytes, np.uint8)
        self._call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(content.ctypes.data),
            address,
            ctypes.c_size_t(nbytes),
        )
        return content

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
            raise DriverError(
                f"{name}: {(text.value or b'unknown error').decode()} ({status})"
            )
