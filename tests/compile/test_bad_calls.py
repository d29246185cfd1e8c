# SPDX-License-Identifier: Apache-2.0
"""What a kernel refuses and what it launches, without a GPU: host memory poses as a device's."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import struct
import sys
from collections.abc import Callable, Iterator
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
    message = r"^q: k has 4 heads, so q needs 16 \(4 per KV head\), not 12$"
    with pytest.raises(ValueError, match=message):
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
        match=r"^k: needs type, shape, device .* cuda:1\), not .* cuda:0\)$",
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


@pytest.mark.parametrize(
    "scale", [0.0, -1.0, float("nan"), float("inf"), 1e-50, 1e-38, 1e38, 1e300]
)
def test_bad_scale(kernel: tuple[Any, list], scale: float) -> None:
    """The last four are 0 or infinite in fp32, or so is their multiple by log2(e)."""
    module, launches = kernel
    with pytest.raises(ValueError, match=r"^softmax_scale: must be positive, finite"):
        call(module, {"softmax_scale": scale})
    assert launches == []


@pytest.mark.parametrize("scale", [2.0**-126, 1e-30, 1, 2.0**126])
def test_extreme_scales(kernel: tuple[Any, list], scale: float) -> None:
    module, launches = kernel
    call(module, {"softmax_scale": scale})
    assert launches[0][-3] == scale


def test_another_length_than_the_fixed_one(tmp_path, monkeypatch) -> None:
    module, launches = load(FIXED, tmp_path, monkeypatch)
    q = Tensor(array(1, 8, 2, HEAD_DIM))
    for rows in (999, 1001):
        kv = Tensor(array(1, rows, 2, HEAD_DIM))
        with pytest.raises(
            ValueError,
            match=r"^k: needs type, shape, device .*\(1, 1000, 2, 128\), cuda:0\), not",
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


# --- what DLPack can say and NumPy does not ------------------------------------------


class Dlpack(Tensor):
    """A NumPy array whose DLPack says something else of it; there is no copy."""

    def __init__(
        self, good: np.ndarray, shape: tuple[int, ...] = (), **said: int
    ) -> None:
        super().__init__(good)
        self.said, self.shape = said, shape or good.shape

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, DLPACK_POINTER
        managed = DlTensor.from_address(pointer(capsule, b"dltensor"))
        for mode, size in enumerate(self.shape):
            managed.shape[mode] = size
        for field, value in self.said.items():
            setattr(managed, field, value)
        return capsule


DLPACK_POINTER = (ctypes.py_object, ctypes.c_char_p)


class DlTensor(ctypes.Structure):
    """As DLPack declares it."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def test_the_first_element_is_where_the_byte_offset_says(kernel) -> None:
    """The DSL's own view of a tensor leaves it out; TVM-FFI reads the tensor itself."""
    module, launches = kernel
    given = arguments()
    longer = array(BATCH + 1, ROWS_Q, HEADS_KV * GROUP, HEAD_DIM)
    skipped = longer[0].nbytes
    given["q"] = Dlpack(longer[:-1], byte_offset=skipped)
    call(module, given)
    if not module.HAS_FFI:
        assert numbers(launches[0][0], 3) == told(longer[1:])


def test_alignment_is_that_of_the_first_element(kernel) -> None:
    module, launches = kernel
    good = arguments()["q"].array
    with pytest.raises(ValueError, match=r"^q: empty, null or not aligned: "):
        call(module, {"q": Dlpack(good, byte_offset=8)})
    odd = Dlpack(good, data=good.ctypes.data - 8, byte_offset=8)
    call(module, {"q": odd})
    assert len(launches) == 1


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
def test_null_is_no_address(kernel, name: str) -> None:
    module, launches = kernel
    with pytest.raises(ValueError, match=f"^{name}: empty, null or not aligned: "):
        call(module, {name: Dlpack(arguments()[name].array, data=0)})
    assert launches == []


@pytest.mark.parametrize("rows", [2**31, 2**31 + 24, 2**32 + 24])
def test_sizes_that_32_bits_cannot_hold(kernel, rows: int) -> None:
    module, launches = kernel
    given = arguments()
    for name in ("k", "v"):
        shape = (BATCH, rows, HEADS_KV, HEAD_DIM)
        given[name] = Dlpack(given[name].array, shape)
    with pytest.raises(ValueError, match=r"^k: has a size from 2147483648 on: "):
        call(module, given)
    assert launches == []


@pytest.mark.parametrize(
    ("device", "words"),
    [((1, 0), "cpu"), ((3, 0), "cuda_host"), ((10, 0), "DLPack device 10")],
)
def test_devices_have_names(kernel, device: tuple[int, int], words: str) -> None:
    module, _ = kernel
    message = f"^q: is on {words}, needs a CUDA device$"
    with pytest.raises(ValueError, match=message):
        call(module, {"q": Tensor(arguments()["q"].array, device)})


def test_a_missing_dimension_is_counted(kernel) -> None:
    module, _ = kernel
    with pytest.raises(ValueError, match=r"^q: needs 4 dimensions, has 3$"):
        call(module, {"q": Tensor(arguments()["q"].array[0])})


# --- outputs have memory of their own ------------------------------------------------


def overlaps() -> Iterator[tuple[str, dict[str, Any], str]]:
    """What is wrong -> the arguments that are, and what the message says."""
    heads, given = HEADS_KV * GROUP, arguments()
    q, out, lse = (given[name].array for name in ("q", "out", "lse"))
    yield "out is q", {"q": q, "out": q}, "out: shares memory with q"
    fused = array(BATCH, ROWS_Q + 1, heads, HEAD_DIM)
    yield (
        "out begins in q",
        {"q": fused[:, :-1], "out": fused[:, 1:]},
        "out: shares memory with q",
    )
    kv = array(BATCH, ROWS_Q, heads, HEAD_DIM)
    yield (
        "out holds v",
        {"out": kv, "v": kv[:, :ROWS_KV, :HEADS_KV]},
        "out: shares memory with v",
    )
    yield (
        "lse is in out",
        {
            "out": out,
            "lse": out.reshape(-1)[: 2 * lse.size].view(np.float32).reshape(lse.shape),
        },
        "lse: shares memory with out",
    )
    yield (
        "lse is in k",
        {
            "k": (big := array(BATCH, ROWS_KV, 2 * HEADS_KV, HEAD_DIM))[
                ..., :HEADS_KV, :
            ],
            "lse": big.reshape(-1)[: 2 * lse.size].view(np.float32).reshape(lse.shape),
        },
        "lse: shares memory with k",
    )
    for name, shape, strides in (
        ("out", out.shape, (0, heads * HEAD_DIM, HEAD_DIM, 1)),
        ("out", out.shape, (ROWS_Q * heads * HEAD_DIM, HEAD_DIM, HEAD_DIM, 1)),
        ("out", out.shape, (ROWS_Q * heads * HEAD_DIM, heads * HEAD_DIM, 64, 1)),
        ("lse", lse.shape, (0, ROWS_Q, 1)),
        ("lse", lse.shape, (heads * ROWS_Q, 0, 1)),
        ("lse", lse.shape, (heads * ROWS_Q, ROWS_Q, 0)),
        ("lse", lse.shape, (heads * ROWS_Q, 1, 1)),
    ):
        storage = given[name].array
        steps = tuple(step * storage.itemsize for step in strides)
        view = np.lib.stride_tricks.as_strided(storage, shape, steps)
        words = "has elements that share memory"
        if name == "out" and 0 in strides:
            words = "empty, null or not aligned"
        yield f"{name} with strides {strides}", {name: view}, f"{name}: {words}"


OVERLAPS = list(overlaps())


@pytest.mark.parametrize(
    ("changed", "message"),
    [each[1:] for each in OVERLAPS],
    ids=[each[0] for each in OVERLAPS],
)
def test_outputs_that_share_memory(kernel, torch, changed, message: str) -> None:
    module, launches = kernel
    for kind in (Tensor, TorchTensor):
        given = {name: kind(x.array) for name, x in tensors_of(arguments())}
        given |= {name: kind(x) for name, x in changed.items()}
        with pytest.raises(ValueError, match=f"^{message}"):
            call(module, given)
    assert launches == []


def apart() -> Iterator[tuple[str, dict[str, Any]]]:
    """Layouts whose memory interleaves without being shared."""
    heads, given = HEADS_KV * GROUP, arguments()
    lse = given["lse"].array
    packed = array(BATCH, ROWS_Q, 2 * heads, HEAD_DIM)
    yield "out beside q in a row", {
        "q": packed[:, :, :heads],
        "out": packed[:, :, heads:],
    }
    turned = array(BATCH, ROWS_Q, heads, 2 * HEAD_DIM)
    yield "out beside q in a head", {
        "out": turned[..., :HEAD_DIM],
        "q": turned[..., HEAD_DIM:],
    }
    rows = array(BATCH, 2, heads, ROWS_Q, HEAD_DIM).transpose(1, 0, 3, 2, 4)
    yield "out beside q in a batch", {"q": rows[0], "out": rows[1]}
    row = array(BATCH, ROWS_Q, heads * (HEAD_DIM + 8))
    split = heads * HEAD_DIM
    yield "lse behind out in a row", {
        "out": row[..., :split].reshape(BATCH, ROWS_Q, heads, HEAD_DIM),
        "lse": row.view(np.float32)[..., split // 2 :][..., :heads].transpose(0, 2, 1),
    }
    for order in itertools.permutations(range(3)):
        shape = tuple(lse.shape[mode] + 3 for mode in order)
        back = tuple(order.index(mode) for mode in range(3))
        wide = array(*shape, dtype=np.float32).transpose(back)
        yield f"lse in the order {order}", {
            "lse": wide[: lse.shape[0], : lse.shape[1], : lse.shape[2]]
        }
    yield "lse backwards", {"lse": lse[:, ::-1, ::-1]}


APART = dict(apart())


@pytest.mark.parametrize("what", APART)
def test_outputs_may_lie_between_other_tensors(kernel, torch, what: str) -> None:
    module, launches = kernel
    changed = APART[what]
    for kind in (Tensor, TorchTensor):
        given = {name: kind(x.array) for name, x in tensors_of(arguments())}
        call(module, given | {name: kind(x) for name, x in changed.items()})
    assert len(launches) == 2
    if module.HAS_FFI:  # read once, by the others' call
        assert TorchTensor.dlpack_calls == 0


def tensors_of(given: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((name, x) for name, x in given.items() if isinstance(x, Tensor))


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

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def element_size(self) -> int:
        return self.array.itemsize

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
