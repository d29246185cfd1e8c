# SPDX-License-Identifier: Apache-2.0
"""What a kernel refuses and what it launches, without a GPU: host memory poses as a device's."""

from __future__ import annotations

import ctypes
import importlib.util
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import GENERATED

BATCH, ROWS_Q, ROWS_KV, HEADS_KV, GROUP, HEAD_DIM = 2, 40, 24, 3, 4, 128

DYNAMIC = "sm90_d128_fp16_causal_lse_gqa4"
FIXED = "sm90_d128_fp16_full_c2x1_vmc_kv1000"


class Tensor:
    """A NumPy array that says it is on CUDA device 0."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (2, 0)) -> None:
        self.array, self.device, self.shape = array, device, array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **_: Any) -> Any:
        return self.array.__dlpack__()


def load(stem: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list]:
    """Return a shipped module that believes in a GPU, and the list of launches it makes."""
    path = folder / f"{stem}.py"
    path.write_bytes((GENERATED / path.name).read_bytes())
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    launches: list[tuple[Any, ...]] = []
    current = (module.cuda.CUresult.CUDA_SUCCESS, 0)
    monkeypatch.setattr(module.cuda, "cuCtxGetDevice", lambda: current)
    monkeypatch.setattr(module, "sm_count", lambda _device: 132)
    monkeypatch.setattr(module, "compile", lambda: lambda *args: launches.append(args))
    return module, launches


@pytest.fixture(params=[True, False], ids=["ffi", "no ffi"])
def kernel(request, tmp_path, monkeypatch) -> tuple[ModuleType, list]:
    module, launches = load(DYNAMIC, tmp_path, monkeypatch)
    monkeypatch.setattr(module, "HAS_FFI", request.param)
    return module, launches


def array(*shape: int, dtype: type = np.float16) -> np.ndarray:
    """An array at an address that TMA takes."""
    raw = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + raw.size - 64].view(dtype).reshape(shape)


def arguments() -> dict[str, Any]:
    """A call that is right."""
    heads = HEADS_KV * GROUP
    return {
        "q": Tensor(array(BATCH, ROWS_Q, heads, HEAD_DIM)),
        "k": Tensor(array(BATCH, ROWS_KV, HEADS_KV, HEAD_DIM)),
        "v": Tensor(array(BATCH, ROWS_KV, HEADS_KV, HEAD_DIM)),
        "out": Tensor(array(BATCH, ROWS_Q, heads, HEAD_DIM)),
        "lse": Tensor(array(BATCH, heads, ROWS_Q, dtype=np.float32)),
        "softmax_scale": 0.125,
    }


def call(kernel: Any, changed: dict[str, Any]) -> Any:
    given = arguments() | changed
    return kernel.fmha(given.pop("q"), given.pop("k"), given.pop("v"), **given)


Change = Callable[[np.ndarray], Any]


def unaligned(good: np.ndarray) -> np.ndarray:
    flat = array(good.size + 1, dtype=good.dtype.type)
    return flat[1:].reshape(good.shape)


def padded(good: np.ndarray) -> np.ndarray:
    """Heads 129 elements apart: no multiple of 16 bytes."""
    return array(*good.shape[:3], good.shape[3] + 1)[..., :-1]


TENSORS: dict[str, Change] = {
    "on the CPU": lambda good: Tensor(good, (1, 0)),
    "on another GPU": lambda good: Tensor(good, (2, 1)),
    "no tensor": lambda good: good.tolist(),
    "another dtype": lambda good: Tensor(good.astype(np.float64)),
    "head_dim not contiguous": lambda good: Tensor(
        array(*good.shape[:2], good.shape[3], good.shape[2]).swapaxes(2, 3)
    ),
    "strides that TMA cannot take": lambda good: Tensor(padded(good)),
    "misaligned": lambda good: Tensor(unaligned(good)),
    "a mode less": lambda good: Tensor(good[0]),
    "another head_dim": lambda good: Tensor(array(*good.shape[:3], 64)),
    "another number of heads": lambda good: Tensor(
        array(*good.shape[:2], good.shape[2] + 1, good.shape[3])
    ),
}


@pytest.mark.parametrize("argument", ["k", "v", "out"])
@pytest.mark.parametrize("what", TENSORS)
def test_bad_tensor(kernel: tuple[Any, list], what: str, argument: str) -> None:
    module, launches = kernel
    bad = TENSORS[what](arguments()[argument].array)
    # The number of query heads follows from K's: what is wrong is then Q's.
    named = "q" if (argument, what) == ("k", "another number of heads") else argument
    with pytest.raises(ValueError, match=f"^{named}: "):
        call(module, {argument: bad})
    assert launches == []


def test_query_heads_are_so_many_per_head_of_k(kernel: tuple[Any, list]) -> None:
    module, launches = kernel
    more = TENSORS["another number of heads"]
    changed = {name: more(arguments()[name].array) for name in ("k", "v")}
    with pytest.raises(
        ValueError, match=r"^q: needs .*\(2, 40, 16, 128\).* not .* 12, "
    ):
        call(module, changed)
    assert launches == []


@pytest.mark.parametrize("what", sorted(TENSORS.keys() - {"on another GPU"}))
def test_bad_q(kernel: tuple[Any, list], what: str) -> None:
    module, launches = kernel
    with pytest.raises(ValueError, match=r"^q: "):
        call(module, {"q": TENSORS[what](arguments()["q"].array)})
    assert launches == []


def test_the_others_follow_q_to_its_gpu(kernel: tuple[Any, list]) -> None:
    module, launches = kernel
    with pytest.raises(
        ValueError,
        match=r"^k: needs type, shape, device .*\(2, 1\)\), not .*\(2, 0\)\)$",
    ):
        call(module, {"q": Tensor(arguments()["q"].array, (2, 1))})
    assert launches == []


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_empty(kernel: tuple[Any, list], name: str) -> None:
    module, launches = kernel
    with pytest.raises(ValueError, match=f"^{name}: "):
        call(module, {name: Tensor(arguments()[name].array[:, :0])})
    assert launches == []


@pytest.mark.parametrize(
    "bad",
    [
        None,
        Tensor(array(BATCH, HEADS_KV * GROUP, ROWS_Q)),
        Tensor(array(BATCH, ROWS_Q, HEADS_KV * GROUP, dtype=np.float32)),
        Tensor(array(BATCH, HEADS_KV * GROUP, ROWS_Q, dtype=np.float32), (1, 0)),
    ],
    ids=["none", "fp16", "transposed", "on the CPU"],
)
def test_bad_lse(kernel: tuple[Any, list], bad: Any) -> None:
    """None is torch's to make up for; these tensors are not torch's."""
    module, launches = kernel
    with pytest.raises(ValueError, match=r"^lse: "):
        call(module, {"lse": bad})
    assert launches == []


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_scale(kernel: tuple[Any, list], scale: float) -> None:
    module, launches = kernel
    with pytest.raises(ValueError, match=r"^softmax_scale: "):
        call(module, {"softmax_scale": scale})
    assert launches == []


def test_another_length_than_the_fixed_one(tmp_path, monkeypatch) -> None:
    module, launches = load(FIXED, tmp_path, monkeypatch)
    q = Tensor(array(1, 8, 2, HEAD_DIM))
    for rows in (999, 1001):
        kv = Tensor(array(1, rows, 2, HEAD_DIM))
        with pytest.raises(
            ValueError,
            match=r"^k: needs type, shape, device .*\(1, 1000, 2, 128\), \(2, 0\)\), not",
        ):
            module.fmha(q, kv, kv, out=Tensor(array(1, 8, 2, HEAD_DIM)))
    with pytest.raises(TypeError, match="lse"):
        module.fmha(q, kv, kv, lse=q)
    assert launches == []


def test_a_right_call_is_launched_once_with_its_strides(
    kernel: tuple[Any, list],
) -> None:
    module, launches = kernel
    given = arguments()
    heads_first = array(BATCH, HEADS_KV * GROUP, ROWS_Q, HEAD_DIM)
    given["q"] = Tensor(
        heads_first.transpose(0, 2, 1, 3)
    )  # [b, h, s, d] storage, no copy
    assert call(module, given) is given["out"]
    ((*bound, scale, ctas, stream),) = launches
    assert (scale, ctas, int(stream)) == (0.125, 132, 0)
    tensors = [given[name].array for name in ("q", "k", "v", "out", "lse")]
    if module.HAS_FFI:  # reads tensors itself
        assert bound == [given[name] for name in ("q", "k", "v", "out", "lse")]
    else:
        assert [numbers(one, 3) for one in bound] == [told(x) for x in tensors]


def numbers(bound: Any, sizes: int) -> tuple[int, ...]:
    """What the DSL finds where an argument points: address, sizes and strides."""
    (pointer,) = bound.__c_pointers__()
    layout = f"P{sizes}i3q"
    return struct.unpack(layout, ctypes.string_at(pointer, struct.calcsize(layout)))


def told(x: np.ndarray) -> tuple[int, ...]:
    """What `launch` must be told of an array, of whose sizes none is fixed."""
    steps = [stride // x.itemsize for stride in x.strides[:3]]
    return (x.ctypes.data, *x.shape[:3], *steps)


def test_a_fixed_size_is_not_told(tmp_path, monkeypatch) -> None:
    module, launches = load(FIXED, tmp_path, monkeypatch)
    monkeypatch.setattr(module, "HAS_FFI", False)
    q, kv = (Tensor(array(2, rows, 3, HEAD_DIM)) for rows in (8, 1000))
    module.fmha(q, kv, kv, out=Tensor(array(2, 8, 3, HEAD_DIM)))
    ((told_q, told_k, *_),) = launches
    assert numbers(told_q, 3) == told(q.array)
    address, batch, _rows, heads, *steps = told(kv.array)
    assert numbers(told_k, 2) == (address, batch, heads, *steps)


def test_a_stride_that_is_never_stepped_over_may_be_anything(kernel) -> None:
    module, launches = kernel
    given = arguments()
    heads = HEADS_KV * GROUP
    odd = np.lib.stride_tricks.as_strided(
        array(1, ROWS_Q, heads, HEAD_DIM),
        strides=(2, heads * HEAD_DIM * 2, HEAD_DIM * 2, 2),
    )
    given |= {name: Tensor(given[name].array[:1]) for name in ("k", "v", "out", "lse")}
    call(module, given | {"q": Tensor(odd)})
    if not module.HAS_FFI:
        steps = numbers(launches[0][0], 3)[4:]
        assert steps == (8, heads * HEAD_DIM, HEAD_DIM)


# --- torch's tensors, by a stand-in --------------------------------------------------


class TorchTensor:
    """As much of torch.Tensor as `fmha` asks for; counts how often it is asked for DLPack."""

    dlpack_calls = 0

    def __init__(
        self, array: np.ndarray, cuda: bool = True, grad: bool = False
    ) -> None:
        self.array, self.is_cuda, self.requires_grad = array, cuda, grad
        self.shape, self.ndim = array.shape, array.ndim

    def numel(self) -> int:
        return self.array.size

    def stride(self) -> tuple[int, ...]:
        return tuple(n // self.array.itemsize for n in self.array.strides)

    def get_device(self) -> int:
        return 0 if self.is_cuda else -1

    def new_empty(self, *shape: int, dtype: Any = None) -> TorchTensor:
        return TorchTensor(array(*shape, dtype=dtype or self.array.dtype.type))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0) if self.is_cuda else (1, 0)

    def __dlpack__(self, **_: Any) -> Any:
        if self.requires_grad:
            raise BufferError("requires grad")
        TorchTensor.dlpack_calls += 1
        return self.array.__dlpack__()


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    stream = SimpleNamespace(cuda_stream=0x5EED)
    module = SimpleNamespace(
        Tensor=TorchTensor,
        float32=np.float32,
        cuda=SimpleNamespace(
            current_device=lambda: 0, current_stream=lambda _device: stream
        ),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 0x5EED + device),
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setattr(TorchTensor, "dlpack_calls", 0)
    return module


def torch_arguments() -> dict[str, Any]:
    given = arguments()
    return {name: TorchTensor(given[name].array) for name in ("q", "k", "v")}


def test_torch_gets_its_outputs_and_its_current_stream(kernel, torch) -> None:
    module, launches = kernel
    given = torch_arguments()
    out = module.fmha(**given)
    ((*bound, scale, _ctas, stream),) = launches
    if module.HAS_FFI:
        assert bound[:4] == [*given.values(), out]
        assert bound[4].shape == (BATCH, HEADS_KV * GROUP, ROWS_Q)
        assert bound[4].array.dtype == np.float32
        assert TorchTensor.dlpack_calls == 0, "asked for DLPack, which is slow"
    else:
        tensors = [x.array for x in (*given.values(), out)]
        assert [numbers(one, 3) for one in bound[:4]] == [told(x) for x in tensors]
        assert numbers(bound[4], 3)[1:4] == (BATCH, HEADS_KV * GROUP, ROWS_Q)
    assert scale == pytest.approx(HEAD_DIM**-0.5)
    assert int(stream) == 0x5EED
    module.fmha(**given, stream=SimpleNamespace(cuda_stream=7))
    module.fmha(**given, stream=0)
    del torch._C._cuda_getCurrentRawStream  # which is nobody's public name
    module.fmha(**given)
    assert [int(one[-1]) for one in launches[1:]] == [7, 0, 0x5EED]


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    "bad",
    [
        lambda good: TorchTensor(good, cuda=False),
        lambda good: TorchTensor(good, grad=True),
        lambda good: TorchTensor(good.astype(np.float32)),
        lambda good: TorchTensor(padded(good)),
        lambda good: TorchTensor(unaligned(good)),
        lambda good: TorchTensor(good[..., :64]),
        lambda good: TorchTensor(np.broadcast_to(good[:, :, :1], good.shape)),
    ],
    ids=["CPU", "gradient", "fp32", "padded", "unaligned", "head_dim", "expanded"],
)
def test_bad_torch_tensor(kernel, torch, monkeypatch, name: str, bad: Change) -> None:
    module, launches = kernel
    if module.HAS_FFI:
        monkeypatch.setattr(module, "compile", lambda: refuse)
    given = torch_arguments()
    with pytest.raises(ValueError, match=f"^{name}: "):
        module.fmha(**given | {name: bad(given[name].array)})
    assert launches == []


def refuse(*_: Any) -> None:
    """What TVM-FFI would say; `test_ffi_refusals` asks it."""
    raise ValueError("Mismatched Tensor on argument #0")


@pytest.mark.parametrize("name", ["q", "k"])
def test_empty_torch_tensors_never_reach_the_launch(kernel, torch, name: str) -> None:
    """Its host code would divide by their sizes."""
    module, launches = kernel
    given = torch_arguments()
    with pytest.raises(ValueError, match=f"^{name}: "):
        module.fmha(**given | {name: TorchTensor(given[name].array[:, :0])})
    assert launches == []


def test_what_a_launch_itself_raises_is_not_renamed(kernel, torch, monkeypatch) -> None:
    def launch(*_: Any) -> None:
        raise RuntimeError("no GPU")

    module, _ = kernel
    monkeypatch.setattr(module, "compile", lambda: launch)
    with pytest.raises(RuntimeError, match=r"^no GPU$"):
        module.fmha(**torch_arguments())


def test_tensors_of_others_beside_torch_s(kernel, torch) -> None:
    module, launches = kernel
    given = torch_arguments() | {"k": arguments()["k"]}
    module.fmha(**given)
    assert len(launches) == 1


# --- the GPU -------------------------------------------------------------------------


def test_torchs_q_must_be_on_torchs_current_device(kernel, torch) -> None:
    module, launches = kernel
    torch.cuda.current_device = lambda: 1
    with pytest.raises(ValueError, match=r"^q: is on device 0, which is not"):
        module.fmha(**torch_arguments())
    assert launches == []


def test_q_must_be_on_the_current_device(kernel, monkeypatch) -> None:
    module, launches = kernel
    for current in ((0, 1), (201, None)):  # another one, and no context
        result = module.cuda.CUresult(current[0])
        found = (result, current[1])
        monkeypatch.setattr(module.cuda, "cuCtxGetDevice", lambda found=found: found)
        with pytest.raises(ValueError, match=r"^q: is on device 0, which is not"):
            call(module, {})
    assert launches == []


def test_the_gpu_must_be_of_the_architecture(tmp_path, monkeypatch) -> None:
    module, _ = load(DYNAMIC, tmp_path, monkeypatch)
    monkeypatch.undo()  # the real sm_count
    attribute = module.cuda.CUdevice_attribute
    found = {
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 10,
        attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 148,
    }
    monkeypatch.setattr(
        module.cuda, "cuDeviceGetAttribute", lambda key, _device: (0, found[key])
    )
    with pytest.raises(ValueError, match=r"^q: is on a GPU of sm_10x, not sm_9x"):
        module.sm_count(0)
    found[attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] = 9
    assert module.sm_count(0) == 148  # the refusal was not remembered
