# SPDX-License-Identifier: Apache-2.0
"""Packed sequences and pages: peers and kernels of other layouts get what our kernel gets."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from .model import error_of, launch_of
from .test_lengths import packed

torch = pytest.importorskip(
    "torch", reason="PyTorch is missing: pip install 'fmha-gen[torch]'"
)

from fmha_gen.bench import contenders, fa3, layouts  # noqa: E402
from fmha_gen.bench.problems import DENSE, PACKED, POOLS, Problem  # noqa: E402
from fmha_gen.ops import operation_of  # noqa: E402
from fmha_gen.ops.operation import Given  # noqa: E402

MIXED = "3/40+0/7+33+2/64+17+1/16+5/5"
RANDOM = "6x1:70/70:99"
KINDS: dict[str, dict[str, Any]] = {
    "packed": {},
    "page 16": {"paged": 16},
    "page 32": {"paged": 32, "pool": "nhd"},
}
WINDOW = {"window": {"left": 9, "right": "none"}}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny, and other tests run beside these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def kernel(spec: dict[str, Any], *, swaps: bool = False) -> Any:
    """Our kernel on the CPU, by definition. swaps: it takes lengths of K from the next sequence."""

    def fmha(q: Any, k: Any, v: Any, **by_name: Any) -> Any:
        operation = operation_of(spec)
        assert [*by_name] == [x.name for x in operation.inputs(spec) if x.when]
        if swaps:
            for name in {"seqused_k", "cu_seqlens_k"} & by_name.keys():
                by_name[name] = by_name[name].flip(0)
        inputs = {"q": q, "k": k, "v": v, **by_name}
        found = operation.exact(Given(spec, inputs, q.shape[-1] ** -0.5))
        outputs = tuple(found[x.name].to(q.dtype) for x in operation.outputs(spec))
        return outputs if len(outputs) > 1 else outputs[0]

    return SimpleNamespace(SPEC=spec, fmha=fmha)


class Attention:
    """FlashAttention's varlen functions, by a definition of their own. calls: what they got."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        *,
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool,
        cu_seqlens_k: Any = None,
        seqused_k: Any = None,
        page_table: Any = None,
        window_size: Any = (-1, -1),
        softcap: float = 0.0,
        return_lse: bool = False,
    ) -> Any:
        given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q}
        given["seqused_k"] = seqused_k
        self.calls.append(
            given | {"cu_seqlens_k": cu_seqlens_k, "page_table": page_table}
        )
        assert (
            (cu_seqlens_k is None)
            == (seqused_k is not None)
            == (page_table is not None)
        )
        out = torch.full((*q.shape[:2], v.shape[-1]), float("nan"))
        group = q.shape[1] // k.shape[-2]
        for i, (first, end) in enumerate(itertools.pairwise(cu_seqlens_q.tolist())):
            if page_table is None:
                begin, stop = cu_seqlens_k[i : i + 2].tolist()
                keys, values = k[begin:stop], v[begin:stop]
            else:
                pages, stop = page_table[i].long(), int(seqused_k[i])
                keys, values = (x[pages].flatten(0, 1)[:stop] for x in (k, v))
            assert end - first <= max_seqlen_q and len(keys) <= max_seqlen_k
            at = torch.arange(end - first)[:, None] + len(keys) - (end - first)
            seen = torch.arange(len(keys)) <= at
            if not causal:
                seen = torch.ones_like(seen)
            if window_size[0] not in (None, -1):
                seen &= torch.arange(len(keys)) >= at - window_size[0]
            heads = (x.repeat_interleave(group, 1).float() for x in (keys, values))
            by_head = [x.transpose(0, 1) for x in heads]
            scores = q[first:end].transpose(0, 1).float() @ by_head[0].mT
            scores = scores * q.shape[-1] ** -0.5
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0)
            out[first:end] = (weights @ by_head[1]).transpose(0, 1)
        return out.to(q.dtype)


class Operators:
    """vLLM's library: attention by position, and metadata that it holds against the call."""

    forward = ("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    forward += ("max_seqlen_q", "max_seqlen_k", "page_table", "softmax_scale")
    forward += ("is_causal", "window_size_left", "window_size_right", "softcap")
    forward += ("scheduler_metadata", "num_splits")
    prepare = ("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads", "num_heads_k")
    prepare += ("headdim", "headdim_v", "qkv_dtype", "seqused_k", "cu_seqlens_q")
    prepare += ("cu_seqlens_k", "page_size", "max_seqlen_k_new", "is_causal")
    prepare += ("window_size_left", "window_size_right", "has_softcap", "num_splits")

    def __init__(self, attention: Attention) -> None:
        self.attention, self.prepared, self.splits = attention, 0, set[int]()
        self.fwd = SimpleNamespace(default=self._of(self.forward, self._forward))
        made = self._of(self.prepare, self._prepare)
        self.get_scheduler_metadata = SimpleNamespace(default=made)

    @staticmethod
    def _of(names: tuple[str, ...], function: Any) -> Any:
        class Operator:
            _schema = SimpleNamespace(
                arguments=[SimpleNamespace(name=n) for n in names]
            )

            def __call__(self, *values: Any) -> Any:
                return function(**dict(zip(names, values, strict=True)))

        return Operator()

    def _prepare(self, *, cu_seqlens_k: None, qkv_dtype: Any, **given: Any) -> Any:
        assert qkv_dtype == torch.bfloat16 and given["max_seqlen_k_new"] == 0
        self.prepared += 1
        return given

    def _forward(self, *, scheduler_metadata: Any, **given: Any) -> Any:
        assert given.pop("out") is None
        scale = given.pop("softmax_scale")
        assert scale == given["q"].shape[-1] ** -0.5
        if scheduler_metadata is not None:
            about, k = dict(scheduler_metadata), given["k"]
            assert about.pop("has_softcap") == bool(given["softcap"])
            assert about.pop("page_size") == (k.shape[1] if k.ndim == 4 else None)
            shapes = (*given["q"].shape[1:], k.shape[-2], given["v"].shape[-1])
            named = [about.pop(x) for x in ("num_heads", "headdim", "num_heads_k")]
            assert (*named, about.pop("headdim_v")) == shapes
            used = about.pop("seqused_k")
            if k.ndim == 3:
                assert torch.equal(used, given["cu_seqlens_k"].diff())
            else:
                assert used is given["seqused_k"]
            assert about.pop("batch_size") == len(used)
            assert about.pop("cu_seqlens_q") is given["cu_seqlens_q"]
            assert not about.pop("max_seqlen_k_new")
            assert about == {name: given[name] for name in about}
        self.splits.add(given.pop("num_splits"))
        sides = [given.pop(f"window_size_{side}") for side in ("left", "right")]
        return [
            self.attention(
                **given | {"causal": given.pop("is_causal")}, window_size=sides
            )
        ]


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Attention:
    """Stands in for FlashAttention-4's package and for vLLM's library of FlashAttention-3."""
    made = Attention()
    package = ModuleType("flash_attn.cute")
    package.flash_attn_varlen_func = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    monkeypatch.delitem(sys.modules, fa3.OWN, raising=False)
    monkeypatch.setitem(sys.modules, fa3.VLLM, ModuleType("vllm"))
    monkeypatch.setattr(fa3, "library", lambda: "library")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    made.operators = Operators(made)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", made.operators, raising=False)  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("fields", [{}, {"mask": "none"}, WINDOW, {"softcap": 3.0}])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_peers_get_what_our_kernel_gets(
    name: str, kind: str, fields: dict[str, Any], attention: Attention
) -> None:
    """The same tensors, so the same rows, lengths and pages; each way computes the problem."""
    for one in (
        packed(MIXED, **KINDS[kind], **fields),
        packed(RANDOM, 5, **KINDS[kind]),
    ):
        inputs = contenders.make_inputs(one, "cpu")
        assert contenders.PEERS[name].refusal(one) == ""
        right = contenders.right_of(one, inputs)
        ours: Any = SimpleNamespace(
            fmha=lambda q, k, v, **x: {"q": q, "k": k, "v": v, **x}
        )
        taken: Any = contenders.ours(ours, inputs)()
        for launch in contenders.PEERS[name].launches(one, inputs).values():
            assert 0 < right.error_of(launch) < 0.005
            given = attention.calls.pop()
            given["block_table"] = given.pop("page_table")
            there = {x: tensor for x, tensor in given.items() if tensor is not None}
            assert there.keys() == taken.keys()
            for x, tensor in there.items():
                assert tensor.data_ptr() == taken[x].data_ptr(), f"{x} is a copy"
                assert tensor.stride() == taken[x].stride()


def test_fa3_has_several_ways(attention: Any) -> None:
    one = packed("4x1/40", paged=16)
    inputs = contenders.make_inputs(one, "cpu")
    launches = contenders.fa3(one, inputs)
    ways = [
        "in one piece",
        "in one piece, metadata",
        "own splits",
        "own splits, metadata",
    ]
    assert [*launches] == ways
    operators = attention.operators
    assert operators.prepared == 0  # a failure of metadata is of their ways alone
    for launch in launches.values():
        launch()
        launch()
    assert (operators.prepared, operators.splits) == (2, {0, 1})


@pytest.mark.parametrize("kind", KINDS)
def test_another_problem_is_found_in_any_sequence(
    kind: str, attention: Attention
) -> None:
    """A few rows of many, and those of less weight than others: single queries on many keys."""
    one = packed("2x900+1/900+400", **KINDS[kind])
    inputs = contenders.make_inputs(one, "cpu")
    right = contenders.right_of(one, inputs)
    out = contenders.fa4(one, inputs)()
    assert right.error_of(lambda: out) < 0.005
    for row in (0, 1800, 1801, 2200):
        wrong = out.clone()
        wrong[row] = wrong[row] * 1.2 if row == 1800 else wrong[row] + 1.0
        assert right.error_of(lambda wrong=wrong: wrong) > contenders.WRONG
    wrong = out.clone()
    wrong[5, -1, 0] = float("nan")
    assert not right.error_of(lambda: wrong) <= contenders.WRONG
    with pytest.raises(RuntimeError, match=r"returned \[2201, 4, 31\] instead of"):
        right.error_of(lambda: out[..., :31])


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_got_other_lengths_is_found(
    kind: str, attention: Attention
) -> None:
    one, other = (packed("5x40:80", seed, **KINDS[kind]) for seed in (0, 1))
    inputs, others = (contenders.make_inputs(each, "cpu") for each in (one, other))
    for name in ("fa3", "fa4"):
        launch = launch_of(name, other, others)
        try:
            error = error_of(launch, one, inputs)
        except RuntimeError as failure:
            assert "instead of" in str(failure)
        else:
            assert error > contenders.WRONG
    same = packed("+".join(f"{q}" for q, _ in one.lengths[::-1]), **KINDS[kind])
    launch = contenders.fa4(same, contenders.make_inputs(same, "cpu"))
    assert error_of(launch, one, inputs) > contenders.WRONG


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_our_kernels(kind: str, lse: bool) -> None:
    one = packed(MIXED, lse=lse, **KINDS[kind])
    inputs = contenders.make_inputs(one, "cpu")
    spec = {**one.spec, "arch": "sm90"}
    launch = contenders.ours(kernel(spec), inputs)
    assert 0 < error_of(launch, one, inputs) < 0.005
    wrong = contenders.ours(kernel(spec, swaps=True), inputs)
    assert error_of(wrong, one, inputs) > contenders.WRONG
    calls: list[Any] = []
    module: Any = kernel(spec)
    module.compile = lambda: lambda *arguments: calls.append(arguments)
    module.sm_count = lambda device: 132
    contenders.bare(module, inputs)()
    ((*tensors, scale, processors),) = calls
    shapes = [x.shape(spec, one) for x in one.operation.tensors(spec)]
    assert [tuple(x.shape) for x in tensors] == shapes
    assert (scale, processors) == (64**-0.5, 132)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("page", [16, 48])
def test_pages_hold_the_rows_of_packed_keys(page: int, pool: str) -> None:
    one = packed(MIXED, paged=page, pool=pool)
    inputs = contenders.make_inputs(one, "cpu")
    known = contenders.make_inputs(one.packed, "cpu")
    assert inputs.k.shape == (one.kv // page, page, 2, 64)
    assert inputs.v.shape == (one.kv // page, page, 2, 32)
    beside = (
        inputs.k.untyped_storage().data_ptr() == inputs.v.untyped_storage().data_ptr()
    )
    assert beside == (pool == "vllm")
    if beside:
        assert inputs.v.data_ptr() - inputs.k.data_ptr() == 64 * 2
        assert inputs.k.stride() == (2 * page * 96, 96, page * 96, 1)
    table, used = inputs.by_name["block_table"], inputs.by_name["seqused_k"]
    assert used.tolist() == [kv for _, kv in one.lengths]
    taken = [
        row[: -(-kv // page)].tolist()
        for row, kv in zip(table, used.tolist(), strict=True)
    ]
    flat = [*itertools.chain(*taken)]
    assert sorted(flat) == [*range(one.kv // page)] != flat, "not shuffled"
    assert not any(row[len(own) :].any() for row, own in zip(table, taken, strict=True))
    first = 0
    for own, kv in zip(taken, used.tolist(), strict=True):
        for x, right in zip(inputs.qkv[1:], known.qkv[1:], strict=True):
            assert torch.equal(x[own].flatten(0, 1)[:kv], right[first : first + kv])
            assert (
                not x[own].flatten(0, 1)[kv:].any()
            )  # finite, as FlashAttention-4 wants it
        first += kv
    again = contenders.beside(one, inputs, PACKED)
    assert [*again.by_name] == ["cu_seqlens_q", "cu_seqlens_k"]
    for x, right in zip(
        (*again.qkv, *again.by_name.values()),
        (*known.qkv, *known.by_name.values()),
        strict=True,
    ):
        assert torch.equal(x, right) and x.dtype == right.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_other_layouts_do_the_same_work(kind: str) -> None:
    one = packed("3x20/50", sink=True, **KINDS[kind])
    inputs = contenders.make_inputs(one, "cpu")
    right = contenders.right_of(one, inputs)
    ours = contenders.ours(kernel({**one.spec, "arch": "sm90"}), inputs)()
    spec = {x: said for x, said in one.spec.items() if x not in ("batch", "kv")}
    spec |= {"arch": "sm90", "seqlen": {"q": "dynamic", "kv": "dynamic"}}
    for layout, more in ((PACKED, {"batch": "varlen"}), (DENSE, {})):
        if kind == "packed" == layout:
            continue
        given = contenders.beside(one, inputs, layout)
        launch = contenders.as_packed(
            contenders.ours(kernel(spec | more), given), layout
        )
        assert right.error_of(launch) < 0.005
        assert torch.equal(launch(), ours)
        copied = layouts.laid_out(one, inputs.given(one), layout)
        assert copied["q"].data_ptr() == inputs.q.data_ptr()
    assert given.q.shape == (3, 20, 4, 64) and given.v.shape == (3, 50, 2, 32)
    assert [*given.by_name] == ["sink"]


def test_who_cannot_do_packed_sequences_says_so(attention: Attention) -> None:
    one, paged = packed(MIXED), packed(MIXED, paged=16)
    strange = packed(MIXED, mask="kv <= q and kv // 32 == q // 32")
    refusals = {
        name: [peer.refusal(each) for each in (one, paged, strange)]
        for name, peer in contenders.PEERS.items()
    }
    unequal, expression = (
        "takes no causal mask of unequal lengths",
        "mask expression of packed",
    )
    of_torch = [
        f"{unequal}, no packed sequences",
        f"{unequal}, no packed sequences, no paged K and V",
        f"takes no {expression} sequences, no packed sequences",
    ]
    assert refusals == {
        **{"cudnn": of_torch, "flash": of_torch},
        "fa3": ["", "", f"takes no {expression} sequences"],
        "fa4": ["", "", f"takes no {expression} sequences"],
        "flex": ["", "takes no paged K and V", ""],
    }
    own = contenders.Peer(
        {"torch": contenders.PEERS["fa3"].packages[fa3.OWN]}, contenders.fa3
    )
    assert own.refusal(paged) == "takes no paged K and V"
    equal = packed("2x40")
    assert contenders.PEERS["cudnn"].refusal(equal) == "takes no packed sequences"


def test_fa3_s_own_package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(fa3.OWN)
    module.flash_attn_varlen_func = Attention()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fa3.OWN, module)
    one = packed(MIXED)
    inputs = contenders.make_inputs(one, "cpu")
    (launch,) = contenders.PEERS["fa3"].launches(one, inputs).values()
    assert 0 < error_of(launch, one, inputs) < 0.005


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask": "none"},
        WINDOW,
        {"mask": "kv <= q and kv // 32 == q // 32", "lse": True},
        {"mask": "kv <= q and q - kv < 64 and (q - kv) % 4 == 0"},
        {"alibi": True, "softcap": 2.0},
        {"sink": True, "score": "s + 0.125 * min(row, seqlen_kv - kv)"},
    ],
)
def test_flex_has_masks_and_scores_of_each_sequence(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    one: Problem = packed("40+70/90+20/75+33", **fields)
    inputs = contenders.make_inputs(one, "cpu")
    assert contenders.PEERS["flex"].refusal(one) == ""
    launch = launch_of("flex", one, inputs)
    assert 0 < error_of(launch, one, inputs) < 0.005
    other = packed("70/90+40+20/75+33", **fields)  # other lengths in the same tensors
    given = contenders.make_inputs(other, "cpu")
    assert error_of(launch, other, given) > contenders.WRONG
