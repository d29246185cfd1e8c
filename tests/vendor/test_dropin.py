# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's, vLLM's and SGLang's functions: each argument of each is honoured or refused."""

from __future__ import annotations

import importlib
import inspect
import math
from types import ModuleType
from typing import Any

import pytest

from .standins import expected, imported, packed, source_of, tensors

torch = pytest.importorskip("torch", reason="the adapters are for PyTorch's tensors")

CAUSAL: dict[str, Any] = {"q_per_kv": 2, "mask": "causal"}
LSE: dict[str, Any] = CAUSAL | {"lse": True}
PAGE: dict[str, Any] = {"kv": {"paged": {"page": 16}}}
W7: dict[str, Any] = {"window": {"left": 7, "right": "none"}}
SPECS: dict[str, dict[str, Any]] = {
    f"{layout}_{name}": fields | more | {"batch": batch}
    for layout, batch, more in (
        ("dense", "dense", {}),
        ("packed", "varlen", {}),
        ("paged", "varlen", PAGE),
    )
    for name, fields in {
        "full": {"q_per_kv": 2},
        "lse": LSE,
        "pack": LSE | {"pack_gqa": True},
        "w7": LSE | W7,
        "cap30": LSE | {"softcap": 30.0},
        "sink": LSE | {"sink": True},
    }.items()
}
ADAPTERS = ("flash_attention", "sglang", "vllm")

# What every function honours: argument, value, the kernel, and what the reference is told.
HONOURED: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "causal": (False, "full", {"causal": False}),
    "window_size": ((7, 0), "w7", {"window": (7, 0)}),
    "softcap": (30.0, "cap30", {"softcap": 30.0}),
    "s_aux": (torch.linspace(-2, 3, 4).bfloat16(), "sink", {}),
    "sinks": (torch.linspace(-2, 3, 4), "sink", {}),
    "softmax_scale": (0.3, "lse", {"scale": 0.3}),
    "max_seqlen_q": (70, "pack", {}),
}
# What asks for nothing, and what it is ignored at: it cannot change a result of these kernels.
IGNORED: dict[str, Any] = {
    "deterministic": True,
    "num_splits": 32,
    "pack_gqa": True,
    "scheduler_metadata": torch.zeros(17, dtype=torch.int32),
    "q_descale": torch.ones(1, 1).expand(4, 2),
    "k_descale": torch.ones(1, 1).expand(4, 2),
    "v_descale": torch.ones(1, 1).expand(4, 2),
    "fa_version": 3,
    "ver": 4,
    "rotary_interleaved": False,
    "max_seqlen_k": 70,
    "cu_seqlens_k_new": torch.zeros(5, dtype=torch.int32),
}
SOMETHING = torch.zeros(4)
REFUSED: dict[str, Any] = {
    "dropout_p": 0.1,
    "sm_margin": 8,
    "attention_chunk": 128,
    "only_qv": True,
    "return_attn_probs": True,
    "cp_world_size": 2,
    "cp_rank": 1,
    "seqused_k": torch.zeros(4, dtype=torch.int32),
    **dict.fromkeys(
        (
            *("q_v", "qv", "alibi_slopes", "output_scale", "cp_tot_seqused_k"),
            *("mask_mod", "score_mod", "block_sparse_tensors", "aux_tensors"),
            *("aux_tensor_leading_dims", "dynamic_causal", "gather_kv_indices"),
            *("gather_kv_valid_length", "rel_bias", "rel_bias_prep_cache"),
            *("k", "v", "rotary_cos", "rotary_sin", "rotary_seqlens", "seqused_q"),
            *("cache_batch_idx", "cache_leftpad", "sfq", "sfk", "sfv"),
        ),
        SOMETHING,
    ),
}
# What the calls below give, or a test of its own looks at.
GIVEN = {
    *("q", "k", "v", "k_cache", "v_cache", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"),
    *("cache_seqlens", "block_table", "page_table", "out", "return_softmax_lse"),
    *("max_seqlen_q", "return_attn_probs"),
}

# In the order of the versions that the modules name.
ORDERS = {
    ("flash_attention", "flash_attn_func"): (
        "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
        " return_attn_probs"
    ),
    ("flash_attention", "flash_attn_varlen_func"): (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal"
        " window_size softcap alibi_slopes deterministic return_attn_probs block_table"
    ),
    ("flash_attention", "flash_attn_with_kvcache"): (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad"
        " block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes"
        " num_splits return_softmax_lse"
    ),
    ("vllm", "flash_attn_varlen_func"): (
        "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k seqused_k q_v dropout_p"
        " softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
        " block_table return_softmax_lse out scheduler_metadata q_descale k_descale v_descale"
        " num_splits output_scale fa_version s_aux cp_world_size cp_rank cp_tot_seqused_k mask_mod"
        " block_sparse_tensors aux_tensors aux_tensor_leading_dims dynamic_causal"
        " gather_kv_indices gather_kv_valid_length"
    ),
    ("sglang", "flash_attn_with_kvcache"): (
        "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad"
        " page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale"
        " v_descale softmax_scale causal window_size attention_chunk softcap rotary_interleaved"
        " scheduler_metadata num_splits pack_gqa only_qv sm_margin return_softmax_lse sinks"
        " score_mod aux_tensors sfq sfk sfv rel_bias rel_bias_prep_cache ver out max_seqlen_k"
        " mask_mod"
    ),
    ("sglang", "flash_attn_varlen_func"): (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k page_table"
        " softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap"
        " num_splits pack_gqa only_qv sm_margin return_softmax_lse sinks score_mod aux_tensors sfq"
        " sfk sfv rel_bias rel_bias_prep_cache ver out mask_mod"
    ),
}
FUNCTIONS = sorted(ORDERS)
Loaded = tuple[ModuleType, list[str]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("dropin")
    source = source_of(folder / "generated", SPECS)
    return imported(folder, tuple(SPECS), ADAPTERS, source)


@pytest.fixture
def calls(loaded: Loaded) -> list[str]:
    loaded[1].clear()
    return loaded[1]


def function(loaded: Loaded, adapter: str, name: str) -> Any:
    module = importlib.import_module(f"{loaded[0].__name__}.{adapter}_adapter")
    return getattr(module, name)


def call_of(
    adapter: str, name: str, page: int | None, dtype: Any = torch.bfloat16
) -> tuple[dict[str, Any], Any]:
    """The arguments of a call without options, and the tensors as `expected` takes them."""
    if name == "flash_attn_func":
        q, k, v = tensors(33, 40, heads=4, qk=64, v=64, dtype=dtype)
        starts = torch.tensor([0, 33, 66], dtype=torch.int32)
        ends = torch.tensor([0, 40, 80], dtype=torch.int32)
        flat = dict(zip("qkv", (x.flatten(0, 1) for x in (q, k, v)), strict=True))
        flat |= {"cu_seqlens_q": starts, "cu_seqlens_k": ends}
        return {"q": q, "k": k, "v": v}, flat
    given = packed(page=page, spare=0, dtype=dtype)
    asked = dict(given)
    if name == "flash_attn_with_kvcache":
        for ours, theirs in (("k", "k_cache"), ("v", "v_cache")):
            asked[theirs] = asked.pop(ours)
        asked["cache_seqlens"] = asked.pop("seqused_k")
        if adapter == "sglang":
            asked["page_table"] = asked.pop("block_table")
    else:
        asked |= {"max_seqlen_q": 2048, "max_seqlen_k": 2048}
        if adapter == "sglang" and page:
            asked["page_table"] = asked.pop("block_table")
        if page and adapter != "vllm":
            asked["cu_seqlens_k"] = None
    return asked, given


def layouts(name: str) -> list[tuple[str, int | None]]:
    if name == "flash_attn_func":
        return [("dense", None)]
    paged = [("paged", 16)]
    return paged if name == "flash_attn_with_kvcache" else [("packed", None), *paged]


@pytest.mark.parametrize(("adapter", "name"), FUNCTIONS)
def test_arguments_stand_in_the_order_of_the_original(
    loaded: Loaded, adapter: str, name: str
) -> None:
    parameters = inspect.signature(function(loaded, adapter, name)).parameters
    positional = [x for x, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    assert positional == ORDERS[adapter, name].split()
    untold = parameters.keys() - {*HONOURED, *IGNORED, *REFUSED, *GIVEN}
    assert not untold


@pytest.mark.parametrize(("adapter", "name"), FUNCTIONS)
def test_what_every_call_gives(
    loaded: Loaded, calls: list[str], adapter: str, name: str
) -> None:
    run = function(loaded, adapter, name)
    for layout, page in layouts(name):
        asked, given = call_of(adapter, name, page)
        wanted, logs = expected(given, causal=True)
        out = torch.full_like(asked["q"], math.nan)
        found = run(**asked, causal=True, out=out)
        assert calls.pop() in (f"{layout}_lse", f"{layout}_pack") and found is out
        close(out, wanted)
        returns_lse = "return_softmax_lse"
        if adapter == "flash_attention" and name != "flash_attn_with_kvcache":
            returns_lse = "return_attn_probs"
        found, lse, *rest = run(**asked, causal=True, **{returns_lse: True})
        assert torch.equal(found, out)
        assert rest == [None] * (returns_lse == "return_attn_probs")
        if layout == "dense":
            lse = lse.transpose(0, 1).flatten(1, 2)
        torch.testing.assert_close(lse.double(), logs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("adapter", "name"), FUNCTIONS)
def test_each_argument_that_is_honoured(
    loaded: Loaded, calls: list[str], adapter: str, name: str
) -> None:
    run = function(loaded, adapter, name)
    for argument in inspect.signature(run).parameters.keys() & HONOURED.keys():
        value, kernel, told = HONOURED[argument]
        for layout, page in layouts(name):
            asked, given = call_of(adapter, name, page)
            calls.clear()
            found = run(**{**asked, "causal": True, argument: value})
            if layout == "dense" and kernel == "lse":
                kernel = "pack"  # its sequences are known to be short
            assert calls == [f"{layout}_{kernel}"], argument
            sink = value.float() if argument in ("s_aux", "sinks") else None
            wanted, _ = expected(given, **{"causal": True, "sink": sink, **told})
            close(found, wanted)


@pytest.mark.parametrize(("adapter", "name"), FUNCTIONS)
def test_each_argument_that_cannot_change_a_result(
    loaded: Loaded, adapter: str, name: str
) -> None:
    run = function(loaded, adapter, name)
    parameters = inspect.signature(run).parameters
    for _, page in layouts(name):
        asked, _ = call_of(adapter, name, page)
        right = run(**asked, causal=True)
        for argument in parameters.keys() & IGNORED.keys():
            found = run(**{**asked, "causal": True, argument: IGNORED[argument]})
            assert torch.equal(found, right), argument
        may_be_none = {"window_size", "s_aux", "sinks", "softmax_scale", "alibi_slopes"}
        none: dict[str, Any] = dict.fromkeys(parameters.keys() & may_be_none)
        for off in ({"window_size": (-1, -1), "softcap": 0.0}, none):
            assert torch.equal(run(**asked, causal=True, **off), right)


@pytest.mark.parametrize(("adapter", "name"), FUNCTIONS)
def test_each_argument_that_is_refused(
    loaded: Loaded, calls: list[str], adapter: str, name: str
) -> None:
    run = function(loaded, adapter, name)
    for argument in inspect.signature(run).parameters.keys() & REFUSED.keys():
        (_, page), *_ = layouts(name)
        asked, _ = call_of(adapter, name, page)
        if argument in asked or (adapter, argument) == (
            "flash_attention",
            "return_attn_probs",
        ):
            continue
        with pytest.raises(NotImplementedError, match=rf"^{argument}: \w+.* \("):
            run(**asked, causal=True, **{argument: REFUSED[argument]})
        with pytest.raises(ValueError, match="window_left is 7, not 9"):
            run(**asked, causal=True, window_size=(9, 0))
    assert calls == []


def close(found: Any, wanted: Any) -> None:
    found = found.flatten(0, -3).double()
    torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-2)


def test_lengths_beside_one_another_are_refused(loaded: Loaded) -> None:
    vllm = function(loaded, "vllm", "flash_attn_varlen_func")
    asked, given = call_of("vllm", "flash_attn_varlen_func", 16)
    starts = given["cu_seqlens_q"]
    with pytest.raises(NotImplementedError, match=r"^cu_seqlens_k: beside block_table"):
        vllm(**asked, cu_seqlens_k=starts)
    with pytest.raises(
        NotImplementedError, match=r"^causal: one for all .* a bool \(a Tensor"
    ):
        vllm(**asked, causal=torch.ones(4))
    sglang = function(loaded, "sglang", "flash_attn_varlen_func")
    asked, _ = call_of("sglang", "flash_attn_varlen_func", 16)
    with pytest.raises(NotImplementedError, match=r"^cu_seqlens_k: beside page_table"):
        sglang(**asked | {"cu_seqlens_k": starts})
    sglang = function(loaded, "sglang", "flash_attn_with_kvcache")
    asked, _ = call_of("sglang", "flash_attn_with_kvcache", 16)
    with pytest.raises(NotImplementedError, match=r"^cache_seqlens: needs .* \(0\)"):
        sglang(**asked | {"cache_seqlens": 0})

    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        flash = function(loaded, "flash_attention", name)
        asked, _ = call_of("flash_attention", name, 16)
        with pytest.raises(NotImplementedError, match=r"^page_table: is block_table"):
            flash(**asked, page_table=asked["block_table"])


def test_vllm_s_cache_and_metadata(loaded: Loaded, calls: list[str]) -> None:
    """K and V side by side in rows of [blocks, kv_heads, block, 2 * head_dim], as views."""
    asked, given = call_of("vllm", "flash_attn_varlen_func", 16)
    rows = torch.cat([asked["k"], asked["v"]], -1).transpose(1, 2).contiguous()
    asked["k"], asked["v"] = rows.transpose(1, 2).split(64, -1)
    assert asked["k"].stride() == (2 * 16 * 128, 128, 16 * 128, 1)
    run = function(loaded, "vllm", "flash_attn_varlen_func")
    close(run(**asked, causal=True), expected(given, causal=True)[0])
    schedule = function(loaded, "vllm", "get_scheduler_metadata")
    assert schedule(batch_size=4, max_seqlen_q=1, page_size=16, num_splits=32) is None


def test_a_page_of_one_row_is_refused_with_what_there_is(loaded: Loaded) -> None:
    run = function(loaded, "sglang", "flash_attn_with_kvcache")
    asked, _ = call_of("sglang", "flash_attn_with_kvcache", 1)
    with pytest.raises(
        ValueError, match=r"page 1, mask causal; nearest:(?s:.*) page is 16, not 1"
    ):
        run(**asked, causal=True)


def test_lengths_from_offsets(loaded: Loaded) -> None:
    """FlashAttention 2 says the keys of paged sequences by cu_seqlens_k."""
    run = function(loaded, "flash_attention", "flash_attn_varlen_func")
    asked, given = call_of("flash_attention", "flash_attn_varlen_func", 16)
    ends = torch.tensor([0, 40, 49, 119, 119], dtype=torch.int32)
    assert torch.equal(ends.diff(), asked.pop("seqused_k"))
    found = run(**asked | {"cu_seqlens_k": ends}, causal=True)
    close(found, expected(given, causal=True)[0])


def test_transformers_finds_what_a_kernel_of_its_hub_may_have(loaded: Loaded) -> None:
    """By the names of arguments: what is not among them it would not ask for."""
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    wanted = {"dropout_p", "window_size", "deterministic", "softcap", "s_aux"}
    wanted |= {"max_seqlen_q", "max_seqlen_k", "block_table"}
    run = function(loaded, "flash_attention", "flash_attn_varlen_func")
    found = utils._lazy_define_process_function(run).keywords["supports_mapping"]
    assert wanted <= {name for name, has in found.items() if has}


@pytest.mark.parametrize("lengths", ["tensor", "number", None])
def test_a_cache_of_one_row_per_sequence(loaded: Loaded, lengths: str | None) -> None:
    run = function(loaded, "flash_attention", "flash_attn_with_kvcache")
    q, k, v = tensors(3, 48, heads=4, qk=64, v=64)
    used = {"tensor": [20, 48], "number": [20, 20], None: [48, 48]}[lengths]
    given = {
        "q": q.flatten(0, 1),
        "k": torch.cat([x[:n] for x, n in zip(k, used, strict=True)]),
        "v": torch.cat([x[:n] for x, n in zip(v, used, strict=True)]),
        "cu_seqlens_q": torch.tensor([0, 3, 6], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, used[0], sum(used)], dtype=torch.int32),
    }
    wanted, logs = expected(given, causal=True)
    told = {"tensor": torch.tensor(used, dtype=torch.int32), "number": 20, None: None}
    out = torch.zeros_like(q)
    found, lse = run(
        q,
        k,
        v,
        cache_seqlens=told[lengths],
        causal=True,
        return_softmax_lse=True,
        out=out,
    )
    assert found is out
    close(found, wanted)
    torch.testing.assert_close(
        lse.transpose(0, 1).flatten(1).double(), logs, atol=1e-3, rtol=1e-3
    )
    none = run(q[:, :0], k, v, cache_seqlens=told[lengths], causal=True)
    assert none.shape == (2, 0, *q.shape[2:])
    with pytest.raises(
        ValueError, match=r"^k_cache: has 47 keys, .* kernel for bf16: \[16\]"
    ):
        run(q, k[:, 1:], v[:, 1:])


def test_offsets_and_tables_of_a_cache_are_made_once(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for calls that are traced or captured, in which they would hold no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    run = function(loaded, "flash_attention", "flash_attn_with_kvcache")
    q, k, v = tensors(3, 48, heads=4, qk=64, v=64)
    count, counted = run.__globals__["count"], loaded[0].CONSTANTS
    counted.clear()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        run(*(mode.from_tensor(x) for x in (q, k, v)), causal=True)
    with monkeypatch.context() as capture:
        capture.setattr(torch.Tensor, "is_cuda", True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert count(7, 3, q).tolist() == [0, 3, 6]
    assert not counted
    first = run(q, k, v, causal=True)
    table, offsets = counted.values()
    assert table.tolist() == [0, 1, 2, 3, 4, 5] and offsets.tolist() == [0, 3, 6]
    assert torch.equal(run(q, k, v, causal=True), first)
    assert count(7, 3, q) is offsets and count(6, 1, k) is table
    assert torch.equal(run(q[:1], k[:1], v[:1], causal=True), first[:1])
    assert len(counted) == 4


@pytest.mark.parametrize(("adapter", "name"), FUNCTIONS)
def test_compile_takes_each_function(loaded: Loaded, adapter: str, name: str) -> None:
    run = function(loaded, adapter, name)
    asked, _ = call_of(adapter, name, layouts(name)[-1][1])
    names = [x for x, value in asked.items() if isinstance(value, torch.Tensor)]
    others = {x: value for x, value in asked.items() if x not in names}

    def layer(*given: Any) -> Any:
        return run(**dict(zip(names, given, strict=True)), **others, causal=True) * 2

    torch._dynamo.reset()
    given = [asked[x] for x in names]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), layer(*given))
