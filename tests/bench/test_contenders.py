# SPDX-License-Identifier: Apache-2.0
"""Everyone computes the same, called as their packages want it; tensors are on the CPU."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from .model import error_of, launch_of
from .test_problems import problem

torch = pytest.importorskip(
    "torch", reason="PyTorch is missing: pip install 'fmha-gen[torch]'"
)

from fmha_gen.bench import contenders, fa3  # noqa: E402
from fmha_gen.bench.cuda import CudaDevice  # noqa: E402
from fmha_gen.ops import masks  # noqa: E402
from fmha_gen.ops.e4m3 import natural_v, permute_v  # noqa: E402
from fmha_gen.ops.masks import MASKS  # noqa: E402
from fmha_gen.ops.reference import attention  # noqa: E402
from unit.fake_kernel import FakeKernel, spec  # noqa: E402


def asked(q: int = 48, *, causal: bool = True, lse: bool = True, **more: Any) -> Any:
    return problem(2, 4, 2, q, 48, 64, 32, causal=causal, lse=lse, **more)


PROBLEM = asked()


def exact(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
    found = attention(
        q, k, v, scale=q.shape[-1] ** -0.5, mask=MASKS["causal" if causal else "none"]
    )
    return found.out.to(q.dtype)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny, and other tests run beside these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Stands in for FlashAttention's packages and for cuDNN; what they were called with."""
    found: list[tuple[str, dict[str, Any]]] = []

    def fa4(q: Any, k: Any, v: Any, **options: Any) -> Any:
        found.append(("fa4", options))
        out = exact(q, k, v, causal=options["causal"])  # whatever the window is
        return (out, "lse") if options["return_lse"] else out

    def fa3(q: Any, k: Any, v: Any, **options: Any) -> Any:
        found.append(("fa3", options))
        return exact(q, k, v, causal=options["causal"])

    @contextlib.contextmanager
    def sdpa_kernel(backend: Any) -> Any:
        found.append(("backend", {"name": backend.name}))
        yield

    for name, function in (("flash_attn.cute", fa4), ("flash_attn_interface", fa3)):
        module = ModuleType(name)
        module.flash_attn_func = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("torch.nn.attention.sdpa_kernel", sdpa_kernel)
    return found


@pytest.mark.parametrize("name", ["cudnn", "fa3", "fa4"])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_every_peer_computes_the_problem(
    name: str, lse: bool, causal: bool, calls: list[Any]
) -> None:
    one = asked(lse=lse, causal=causal)
    inputs = contenders.make_inputs(one, "cpu")
    assert contenders.PEERS[name].refusal(one) == ""
    launch = launch_of(name, one, inputs)
    assert launch().shape == (2, 48, 4, 32)
    assert 0 < error_of(launch, one, inputs) < 0.005
    told = {
        "fa4": {"causal": causal, "return_lse": lse},
        "fa3": {"causal": causal, "softcap": 0.0},
        "cudnn": {"name": "CUDNN_ATTENTION"},
    }
    assert calls[-1][1] == told[name]


def test_a_window_is_handed_on_or_refused(calls: list[Any]) -> None:
    one = asked(window={"left": 9, "right": "none"})
    inputs = contenders.make_inputs(one, "cpu")
    for name, window in (("fa4", (9, None)), ("fa3", (9, -1))):
        launch_of(name, one, inputs)()
        assert calls[-1][1]["window_size"] == window
        assert calls[-1][1]["causal"]
    assert contenders.PEERS["cudnn"].refusal(one) == "takes no window"


class Varlen:
    """Attention of packed sequences, as FlashAttention has it. calls: what it was given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> Any:
        self.calls.append(given)
        q, k, v = (given[name] for name in "qkv")
        edges = [given[f"cu_seqlens_{name}"] for name in "qk"]
        assert {each.dtype for each in edges} == {torch.int32}
        longest = [int(each.diff().max()) for each in edges]
        assert longest == [given["max_seqlen_q"], given["max_seqlen_k"]]
        sides = [None if n in (None, -1) else n for n in given.get("window_size", ())]
        mask = (
            masks.window(*(sides or (None, None)))
            & MASKS["causal" if given["causal"] else "none"]
        )
        out = torch.full((*q.shape[:2], v.shape[-1]), float("nan"))
        slices = [itertools.pairwise(each.tolist()) for each in edges]
        for rows, keys in zip(*slices, strict=True):
            of_q, of_k = slice(*rows), slice(*keys)
            if rows[0] < rows[1]:
                parts = (q[None, of_q], k[None, of_k], v[None, of_k])
                scale = q.shape[-1] ** -0.5
                out[of_q] = attention(*parts, scale=scale, mask=mask).out[0]
        return out.to(q.dtype)


@pytest.mark.parametrize("whose", ["fa4", "fa3", "fa3 of vLLM"])
@pytest.mark.parametrize(
    ("q", "fields"),
    [
        (48, {"causal": True}),
        (48, {}),
        (48, {"causal": True, "window": {"left": 5, "right": "none"}}),
        (48, {"causal": True, "window": {"left": "argument", "right": "none"}}),
        (20, {"causal": True}),  # some documents without a query
        (60, {"causal": True}),  # queries before the first key
    ],
)
def test_documents_are_packed_sequences(
    whose: str, q: int, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second batch is what errors are of; its documents are others than the first's."""
    ranges = {"documents": [3, 17], "window_left": [7, 7]}
    one = problem(2, 4, 2, q, 48, 64, 32, documents=True, ranges=ranges, **fields)
    first, second = one.drawn["documents"]
    assert first != second and len(second) > 2
    varlen = Varlen()
    name = "fa4" if whose == "fa4" else "fa3"
    for package in ("flash_attn.cute", "flash_attn_interface"):
        module = ModuleType(package)
        module.flash_attn_varlen_func = (  # type: ignore[attr-defined]
            lambda *, return_lse=False, **given: varlen(**given)
        )
        known = None if package == fa3.OWN and whose == "fa3 of vLLM" else module
        monkeypatch.setitem(sys.modules, package, known)
    if whose == "fa3 of vLLM":
        operators = SimpleNamespace(fwd=SimpleNamespace(default=OfVllm(varlen)))
        monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
        monkeypatch.setattr(torch.ops, "_vllm_fa3_C", operators, raising=False)
    else:
        assert contenders.PEERS[name].refusal(one) == ""
    inputs = contenders.make_inputs(one, "cpu")
    launch = launch_of(name, one, inputs)
    assert launch().shape == (2, q, 4, 32)
    assert 0 < error_of(launch, one, inputs) < 0.005
    assert varlen.calls[0]["q"].data_ptr() == inputs.q.data_ptr(), "copied"
    other = replace(one, seed=1)  # other documents
    given = contenders.make_inputs(other, "cpu")
    assert error_of(launch, other, given) > contenders.WRONG


class OfVllm:
    """The operator that vLLM's library has, by position."""

    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q")
    names += ("max_seqlen_k", "is_causal", "window_size_left", "window_size_right")
    _schema = SimpleNamespace(arguments=[SimpleNamespace(name=n) for n in names])

    def __init__(self, varlen: Varlen) -> None:
        self.varlen = varlen

    def __call__(self, *values: Any) -> list[Any]:
        given = dict(zip(self.names, values, strict=True))
        sides = [given.pop(f"window_size_{side}") for side in ("left", "right")]
        causal = given.pop("is_causal")
        return [self.varlen(**given, causal=causal, window_size=sides)]


# --- e4m3 ---------------------------------------------------------------------------------

PLAIN_E4M3 = {"dtype": "e4m3", "out_dtype": "bf16", "v_layout": "permuted"}
E4M3: dict[str, Any] = {**PLAIN_E4M3, "descale": "head"}


def in_8_bits(
    batch: int = 2, kv: int = 48, kv_heads: int = 2, fields: dict[str, Any] = E4M3
) -> Any:
    return problem(batch, 2 * kv_heads, kv_heads, 20, kv, 64, causal=True, **fields)


def test_inputs_in_8_bits() -> None:
    one = in_8_bits(kv=75)
    inputs = contenders.make_inputs(one, "cpu")
    assert {x.dtype for x in inputs.qkv} == {torch.float8_e4m3fn}
    assert tuple(inputs.v.shape) == (2, 2, 64, 80) and inputs.v.is_contiguous()
    v = natural_v(inputs.v, 75).float()
    assert torch.equal(permute_v(v), inputs.v.float()), "0 behind the last key"
    for x in (inputs.q.float(), inputs.k.float(), v):
        assert 0.9 < float(x.std()) < 1.1 and abs(float(x.mean())) < 0.1
    assert list(inputs.by_name) == [*fa3.DESCALES]
    for factors in inputs.by_name.values():
        assert tuple(factors.shape) == (2, 2) and factors.dtype == torch.float32
        assert 0.5 <= float(factors.min()) < float(factors.max()) < 1.5
    every = torch.cat([x.flatten() for x in inputs.by_name.values()])
    assert len(every.unique()) == len(every), "no two alike"
    again = contenders.make_inputs(one, "cpu")
    assert torch.equal(again.v.float(), inputs.v.float())
    plain = contenders.make_inputs(in_8_bits(fields=PLAIN_E4M3), "cpu")
    assert not plain.by_name


def test_an_error_in_8_bits_may_be_that_of_p() -> None:
    one = problem(1, 2, 2, 300, 300, 64, **E4M3)
    inputs = contenders.make_inputs(one, "cpu")
    truth = one.operation.truth(inputs.given(one))
    error = float(truth.defined.sum().sqrt() / truth.out.norm())
    assert contenders.WRONG < error < contenders.wrong_from(one) / 2
    assert contenders.wrong_from(PROBLEM) == contenders.WRONG


def test_the_bare_callable_is_given_bytes() -> None:
    one = in_8_bits()
    inputs = contenders.make_inputs(one, "cpu")
    calls: list[Any] = []
    out = torch.empty(2, 20, 4, 64, dtype=torch.bfloat16)
    kernel: Any = SimpleNamespace(
        fmha=lambda *tensors, **named: out,
        compile=lambda: lambda *arguments: calls.append(arguments),
        sm_count=lambda device: 132,
    )
    contenders.bare(kernel, inputs)()
    ((*tensors, scale, processors),) = calls
    assert [x.dtype for x in tensors[:3]] == [torch.uint8] * 3
    given = zip(tensors, (*inputs.qkv, *inputs.by_name.values(), out), strict=True)
    assert all(x.data_ptr() == y.data_ptr() for x, y in given)
    assert (scale, processors) == (64**-0.5, 132)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kv", [1, 16, 21, 48])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_rows_of_v_are_contiguous(batch: int, kv: int, kv_heads: int) -> None:
    one = in_8_bits(batch, kv, kv_heads)
    inputs = contenders.make_inputs(one, "cpu")
    v = contenders._with_rows_of_v(one, inputs).v
    assert tuple(v.shape) == (batch, kv, kv_heads, 64)
    row = kv_heads * 64
    assert v.stride() == (kv * row, row, 64, 1)
    assert v.flatten(0, 1).stride() == (row, 64, 1)
    assert torch.equal(v.float(), natural_v(inputs.v, kv).float())


class OfVllmIn8Bits:
    """The operator of vLLM's library, which takes factors: [batch, KV heads] each."""

    names = (*"qkv", "cu_seqlens_q", "cu_seqlens_k", "is_causal", *fa3.DESCALES)
    _schema = SimpleNamespace(arguments=[SimpleNamespace(name=n) for n in names])

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *values: Any) -> list[Any]:
        given = dict(zip(self.names, values, strict=True))
        self.calls.append(given)
        q, k, v = (given[name] for name in "qkv")
        if any(x.stride(-1) != 1 for x in (q, k, v)):
            raise RuntimeError("Input tensor must have contiguous last dimension")
        out = torch.empty(q.shape, dtype=torch.bfloat16)
        edges = [given[f"cu_seqlens_{name}"].tolist() for name in "qk"]
        pairs = zip(*map(itertools.pairwise, edges), strict=True)
        for b, (rows, keys) in enumerate(pairs):
            places = (slice(*rows), slice(*keys), slice(*keys))
            parts = []
            for x, place, name in zip((q, k, v), places, fa3.DESCALES, strict=True):
                factors = given[name][b].repeat_interleave(
                    x.shape[1] // k.shape[1], dim=0
                )
                parts.append((x[place].double() * factors[:, None])[None])
            mask = MASKS["causal" if given["is_causal"] else "none"]
            found = attention(*parts, scale=q.shape[-1] ** -0.5, mask=mask)
            out[places[0]] = found.out[0].bfloat16()
        return [out]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "fields",
    [E4M3, PLAIN_E4M3, {**E4M3, "v_layout": "rows"}],
    ids=["descales", "plain", "rows"],
)
def test_fa3_of_vllm_takes_v_as_rows_and_factors(
    batch: int, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = in_8_bits(batch, fields=fields)
    operator = OfVllmIn8Bits()
    operators = SimpleNamespace(fwd=SimpleNamespace(default=operator))
    monkeypatch.setitem(sys.modules, fa3.OWN, None)
    monkeypatch.setitem(sys.modules, fa3.VLLM, ModuleType(fa3.VLLM))
    monkeypatch.setattr(fa3, "library", lambda: "library")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", operators, raising=False)
    inputs = contenders.make_inputs(one, "cpu")
    launch = launch_of("fa3", one, inputs)
    assert launch().shape == (batch, 20, 4, 64)
    assert 0 < error_of(launch, one, inputs) < 0.005
    call, *_ = operator.calls
    assert call["q"].data_ptr() == inputs.q.data_ptr(), "copied"
    assert call["v"].dtype == torch.float8_e4m3fn
    for name in fa3.DESCALES:
        if fields is PLAIN_E4M3:
            assert call[name].tolist() == [[1.0] * 2] * batch
        else:
            assert call[name] is inputs.by_name[name]
    if fields is E4M3:
        wrong = {**inputs.by_name, "v_descale": inputs.by_name["k_descale"]}
        other = launch_of("fa3", one, inputs._replace(by_name=wrong))
        assert error_of(other, one, inputs) > contenders.wrong_from(one)


def test_who_takes_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in (fa3.VLLM, "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    one = in_8_bits()
    said = {name: peer.refusal(one) for name, peer in contenders.PEERS.items()}
    unequal = "takes no e4m3, no causal mask of unequal lengths"
    no = "takes no e4m3"
    assert said == {
        **{"cudnn": unequal, "flash": unequal},
        **{"fa3": "", "fa4": no, "flex": no},
    }
    monkeypatch.setitem(sys.modules, fa3.OWN, ModuleType(fa3.OWN))
    assert contenders.PEERS["fa3"].refusal(one) == no, "its own package"


def test_who_takes_no_documents_or_prefix_says_so(calls: list[Any]) -> None:
    refused = {
        "cudnn": {"documents": "takes no documents", "prefix": "takes no prefix"},
        "fa3": {"documents": "", "prefix": "takes no prefix"},
        "fa4": {"documents": "", "prefix": "takes no prefix"},
        "flex": {"documents": "", "prefix": ""},
    }
    for name, reasons in refused.items():
        for field, reason in reasons.items():
            one = asked(48, **{field: True})
            assert contenders.PEERS[name].refusal(one) == reason
    chunks = {"mask": "kv <= q and kv // 32 == q // 32", "documents": True}
    reason = "takes no mask expression beside documents, no documents"
    assert contenders.PEERS["cudnn"].refusal(asked(**chunks)) == reason
    assert contenders.PEERS["flex"].refusal(asked(**chunks)) == ""
    read = {"start": {"shape": ["row"], "dtype": "int32", "monotone": "row"}}
    tensor = asked(mask="kv <= q and start[row] <= kv", params=read)
    assert contenders.PEERS["fa4"].refusal(tensor) == "takes no params"


def test_our_kernel_is_given_what_its_mask_reads() -> None:
    ranges = {"documents": [3, 17], "window_left": [7, 7]}
    fields = {"documents": True, "window": {"left": "argument", "right": "none"}}
    one = asked(ranges=ranges, **fields)
    inputs = contenders.make_inputs(one, "cpu")
    start, left = inputs.by_name.values()
    assert (start.dtype, start.shape, left) == (torch.int32, (2, 48), 7)
    for fault, right in (("", True), ("takes the next batch's documents", False)):
        launch = contenders.ours(FakeKernel(spec(**one.spec), fault), inputs)
        error = error_of(launch, one, inputs)
        assert (error < 0.005) if right else (error > contenders.WRONG)
    calls: list[Any] = []
    kernel: Any = SimpleNamespace(
        fmha=lambda *tensors, **named: inputs.v,
        compile=lambda: lambda *arguments: calls.append(arguments),
        sm_count=lambda device: 132,
    )
    contenders.bare(kernel, inputs)()
    ((*tensors, scale, number, processors),) = calls
    assert [x is y for x, y in zip(tensors[3:], (start, inputs.v), strict=True)]
    assert (scale, number, processors) == (64**-0.5, 7, 132)


def test_sinks_reach_those_who_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    one = asked(sink=True)
    inputs = contenders.make_inputs(one, "cpu")
    assert inputs.sink is not None and inputs.sink.dtype == torch.float32
    assert torch.equal(inputs.sink.bfloat16().float(), inputs.sink)
    kernel = FakeKernel(spec(**one.spec))
    assert error_of(contenders.ours(kernel, inputs), one, inputs) < 0.005
    ignored = FakeKernel(spec(**one.spec), "ignores the sink")
    launch = contenders.ours(ignored, inputs)
    assert error_of(launch, one, inputs) > contenders.WRONG

    def fa4(*tensors: Any, learnable_sink: Any, **options: Any) -> Any:
        assert learnable_sink.dtype == torch.bfloat16
        return kernel.fmha(*tensors, sink=learnable_sink.float())

    for name, function in (("flash_attn.cute", fa4), ("flash_attn_interface", fa4)):
        module = ModuleType(name)
        module.flash_attn_func = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    launch = contenders.fa4(one, inputs)
    assert error_of(launch, one, inputs) < 0.005
    for peer in ("cudnn", "fa3"):  # FlashAttention-3's own package
        assert contenders.PEERS[peer].refusal(one) == "takes no sink"


def test_lists_reach_our_kernel_and_those_who_take_them() -> None:
    listed = {"blocks": "lists", "tile": {"q": 64, "kv": 64}}
    one = problem(2, 4, 2, 200, 200, 64, 32, causal=True, **listed)
    inputs = contenders.make_inputs(one, "cpu")
    assert {x.dtype for x in inputs.by_name.values()} == {torch.int32}
    for fault, right in (("", True), ("loses a block", False)):
        launch = contenders.ours(FakeKernel(spec(**one.spec), fault), inputs)
        error = error_of(launch, one, inputs)
        assert (error < 0.005) if right else (error > contenders.WRONG)
    for name, peer in contenders.PEERS.items():
        assert ("takes no blocks" in peer.refusal(one)) == (name != "flex")


def test_slopes_are_those_of_models() -> None:
    inputs = contenders.make_inputs(asked(alibi=True), "cpu")
    assert inputs.by_name["slopes"].tolist() == [2**-2, 2**-4, 2**-6, 2**-8]


def test_a_wrong_mask_or_a_late_nan_is_an_error(calls: list[Any]) -> None:
    inputs = contenders.make_inputs(PROBLEM, "cpu")
    launch = contenders.fa4(asked(causal=False), inputs)
    assert error_of(launch, PROBLEM, inputs) > contenders.WRONG
    out = contenders.fa4(PROBLEM, inputs)()
    out[-1, -1, -1, -1] = float("nan")
    error = error_of(lambda: out, PROBLEM, inputs)
    assert not error <= contenders.WRONG


def test_cudnn_has_no_bottom_right_mask(calls: list[Any]) -> None:
    refusal = "takes no causal mask of unequal lengths"
    assert contenders.PEERS["cudnn"].refusal(asked(16)) == refusal
    assert contenders.PEERS["cudnn"].refusal(asked(16, causal=False)) == ""
    assert contenders.PEERS["fa4"].refusal(asked(16)) == ""


def test_ours_is_called_through_its_public_entry() -> None:
    inputs = contenders.make_inputs(PROBLEM, "cpu")
    for returned in (inputs.v, (inputs.v, inputs.q)):  # with lse, a tuple
        kernel: Any = SimpleNamespace(fmha=lambda *tensors, returned=returned: returned)
        assert contenders.ours(kernel, inputs)() is inputs.v


def test_the_bare_callable_is_told_of_every_tensor() -> None:
    inputs = contenders.make_inputs(PROBLEM, "cpu")
    outputs = (torch.empty_like(inputs.q), torch.empty(1))
    calls: list[Any] = []
    kernel: Any = SimpleNamespace(
        fmha=lambda *tensors: outputs,
        compile=lambda: lambda *arguments: calls.append(arguments),
        sm_count=lambda device: 132,
    )
    contenders.bare(kernel, inputs)()
    ((q, k, v, out, lse, scale, processors),) = calls
    sink = torch.zeros(4)
    kernel.fmha = lambda *tensors, sink: outputs
    contenders.bare(kernel, inputs._replace(by_name={"sink": sink}))()
    assert calls.pop()[3] is sink
    assert (q, k, v) == inputs.qkv
    assert (out is outputs[0]) and (lse is outputs[1])
    assert processors == 132
    assert scale == pytest.approx(inputs.q.shape[3] ** -0.5)


def test_inputs_are_the_same_whoever_asks() -> None:
    one, two = (contenders.make_inputs(PROBLEM, "cpu") for _ in range(2))
    assert [tuple(x.shape) for x in one.qkv] == [
        (2, 48, 4, 64),
        (2, 48, 2, 64),
        (2, 48, 2, 32),
    ]
    assert all(torch.equal(a, b) for a, b in zip(one.qkv, two.qkv, strict=True))
    assert {x.dtype for x in one.qkv} == {torch.bfloat16}
    assert 0.9 < float(one.q.float().std()) < 1.1


def test_the_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    flops = contenders.MATMUL_FLOPS
    assert flops == 2 * 8192**3
    monkeypatch.setattr(contenders, "MATMUL_SIZE", 32)
    found = contenders.matmul("cpu")()
    assert (found.shape, found.dtype) == ((32, 32), torch.bfloat16)
    assert 4 < float(found.float().std()) < 8  # sqrt(32)


def test_versions_name_what_is_not_installed_too() -> None:
    found = contenders.versions()
    assert {"dsl", "torch", "cuda", "cudnn", "fa3", "fa4"} == found.keys()
    assert found["torch"] == torch.__version__ and found["fa3"] is None


# --- the CUDA device ----------------------------------------------------------------------


class Event:
    """Stands in for `torch.cuda.Event`; the n-th record is at n ms."""

    clock = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        Event.clock += 1
        self.at = Event.clock

    def query(self) -> bool:
        return self.at < 3

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_the_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    @contextlib.contextmanager
    def capturing(graph: Any) -> Any:
        log.append("capture")
        yield
        log.append("captured")

    graph = SimpleNamespace(replay=lambda: log.append("replay"))
    for name, value in {
        "Event": Event,
        "CUDAGraph": lambda: graph,
        "graph": capturing,
        "_sleep": lambda cycles: log.append(cycles > 1e5),
        "synchronize": lambda: log.append("synchronize"),
        "get_device_properties": lambda name: SimpleNamespace(
            multi_processor_count=132
        ),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    device = CudaDevice()
    replay = device.capture(lambda: log.append("launch"), 3)
    replay()
    device.hold()
    device.synchronize()
    assert log == [
        "capture",
        *["launch"] * 3,
        "captured",
        "replay",
        True,
        "synchronize",
    ]
    device.start()
    device.stop()
    assert device.finished()
    assert device.elapsed() == pytest.approx(1e-3)
    device.stop()
    assert not device.finished()
    assert device.multiprocessors == 132
    begin = device.now()
    device.sleep(0.01)
    assert device.now() - begin >= 0.01


def test_fa3_of_vllm_is_called_with_packed_sequences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "vllm" / fa3.LIBRARY
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "vllm" / "__init__.py").write_text(
        "raise ImportError('not to be imported')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q")
    names += ("max_seqlen_k", "softmax_scale", "is_causal", "num_splits", "softcap")
    names += ("window_size_left", "window_size_right")
    names += ("s_aux",)
    calls: list[dict[str, Any]] = []

    class Operator:
        _schema = SimpleNamespace(arguments=[SimpleNamespace(name=n) for n in names])

        def __call__(self, *values: Any) -> list[torch.Tensor]:
            calls.append(dict(zip(names, values, strict=True)))
            q, v = values[0], values[2]
            return [torch.zeros(*q.shape[:2], v.shape[2])]

    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    operators = SimpleNamespace(fwd=SimpleNamespace(default=Operator()))
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", operators, raising=False)
    inputs = contenders.make_inputs(PROBLEM, "cpu")
    one = asked(window={"left": 9, "right": 0}, softcap=30.0)
    found = fa3.launches(one, *inputs.qkv, {"sink": torch.ones(4)})[""]()
    assert loaded == [str(library)]
    assert found.shape == (*inputs.q.shape[:3], inputs.v.shape[3])
    (call,) = calls
    batch, rows, heads, dim = inputs.q.shape
    assert call["q"].shape == (batch * rows, heads, dim)
    assert call["q"].data_ptr() == inputs.q.data_ptr(), "copied"
    assert call["cu_seqlens_q"].tolist() == [0, rows, 2 * rows]
    assert (call["max_seqlen_q"], call["num_splits"], call["out"]) == (rows, 1, None)
    assert call["s_aux"].dtype == torch.bfloat16 and call["s_aux"].tolist() == [1] * 4
    assert call["is_causal"] is True and call["softcap"] == 30.0
    assert (call["window_size_left"], call["window_size_right"]) == (9, -1)
