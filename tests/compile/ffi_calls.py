# SPDX-License-Identifier: Apache-2.0
"""Run by the tests: what TVM-FFI's own code refuses of a compiled kernel, with no GPU.

Argument: the kernel's file, of dynamic lengths, fp16, four query heads per head of K, with LSE.
Prints JSON: by call, what `compile()` and `fmha` raised.
"""

import ctypes
import importlib.util
import json
import sys
from types import SimpleNamespace

FLOAT, CPU, CUDA = 2, 1, 2
BATCH, ROWS_Q, ROWS_KV, HEADS_KV, GROUP, HEAD_DIM = 2, 40, 24, 3, 4, 128


class DLTensor(ctypes.Structure):
    """As DLPack declares it, with what owns it."""

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
        ("owner", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Tensor:
    """Says that it lies on a GPU, as torch would; there is nothing at its address."""

    requires_grad = False
    free = 1 << 40  # the address of the next one, far from the one before

    def __init__(self, *shape, bits=16, device=(CUDA, 0), past=0, offset=0, pad=0):
        self.shape, self.ndim, self.device = shape, len(shape), device
        self.bits, self.address, self.offset, steps = bits, Tensor.free, offset, [1]
        self.address += past
        Tensor.free += 1 << 40
        for size in reversed(shape[1:]):
            steps.insert(0, steps[0] * size + (pad if len(steps) == 1 else 0))
        self.steps = tuple(steps)

    def stride(self):
        return self.steps

    def numel(self):
        return 1

    def data_ptr(self):
        return self.address + self.offset

    def element_size(self):
        return self.bits // 8

    @property
    def is_cuda(self):
        return self.device[0] == CUDA

    def get_device(self):
        return self.device[1]

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        sizes = ctypes.c_int64 * self.ndim
        self.arrays = (sizes(*self.shape), sizes(*self.steps))
        self.managed = DLTensor(
            data=self.address,
            device=self.device,
            ndim=self.ndim,
            code=FLOAT,
            bits=self.bits,
            lanes=1,
            shape=self.arrays[0],
            strides=self.arrays[1],
            byte_offset=self.offset,
        )
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_void_p,
        )
        return new(ctypes.addressof(self.managed), b"dltensor", None)


def good():
    heads = HEADS_KV * GROUP
    return {
        "q": Tensor(BATCH, ROWS_Q, heads, HEAD_DIM),
        "k": Tensor(BATCH, ROWS_KV, HEADS_KV, HEAD_DIM),
        "v": Tensor(BATCH, ROWS_KV, HEADS_KV, HEAD_DIM),
        "out": Tensor(BATCH, ROWS_Q, heads, HEAD_DIM),
        "lse": Tensor(BATCH, heads, ROWS_Q, bits=32),
    }


def bad_calls():
    """What is wrong -> the tensors of a call of which one is."""
    yield "nothing", good()
    q = good()["q"]
    yield "nothing: offset", good() | {"q": Tensor(*q.shape, past=-8, offset=8)}
    for name, tensor in good().items():
        shape, bits = tensor.shape, tensor.bits
        odd = 2 if bits == 32 else 8
        bad = {
            "type": Tensor(*shape, bits=48 - bits),
            "rank": Tensor(*shape[1:], bits=bits),
            "batch": Tensor(shape[0] + 1, *shape[1:], bits=bits),
            "rows": Tensor(*shape[:1], shape[1] + 1, *shape[2:], bits=bits),
            "last": Tensor(*shape[:-1], 64, bits=bits),
            "CPU": Tensor(*shape, bits=bits, device=(CPU, 0)),
            "GPU": Tensor(*shape, bits=bits, device=(CUDA, 1)),
            "address": Tensor(*shape, bits=bits, past=odd),
            "offset": Tensor(*shape, bits=bits, offset=odd),
        }
        if name != "lse":
            bad["padding"] = Tensor(*shape, pad=1)
        for what, wrong in bad.items():
            yield f"{name}: {what}", good() | {name: wrong}


def raised(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def main():
    spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
    kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    run, report = kernel.compile(), {}  # before TVM-FFI can meet our torch
    stream = SimpleNamespace(cuda_stream=0)
    current = SimpleNamespace(current_device=lambda: 0, current_stream=lambda _: stream)
    torch = SimpleNamespace(Tensor=Tensor, cuda=current, _C=None)
    sys.modules["torch"] = torch
    kernel.sm_count = lambda _device: 132
    for what, tensors in bad_calls():
        plain = kernel.is_plain(tensors["q"], tensors["k"], tensors.values())
        report[what] = {
            "plain": bool(plain),
            "ffi": raised(run, *tensors.values(), 1.0, 132, 0),
            "fmha": raised(kernel.fmha, **tensors),
        }
    print(json.dumps(report))


main()
