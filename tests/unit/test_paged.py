# SPDX-License-Identifier: Apache-2.0
"""Paged K and V: what is right for a call, and what the tensors of a case hold and where."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fmha_gen.ops import operation_of
from fmha_gen.ops.cases import Case, Tiles
from fmha_gen.ops.forward import FORWARD
from fmha_gen.ops.inputs import place_tensors, values
from fmha_gen.ops.operation import Given
from fmha_gen.ops.paged import PAGED_FORWARD, slots_of
from fmha_gen.ops.varlen import PACKED_FORWARD

PAGE, PAGES, BLOCKS, HEADS = 16, 5, 3, 4
SPEC: dict[str, Any] = {
    **{"op": "fmha_fwd", "arch": "sm90", "dtype": "bf16", "mask": "causal"},
    **{"head_dim": {"qk": 16, "v": 16}, "q_per_kv": 2, "lse": True, "sink": True},
    **{"seqlen": {"q": "dynamic", "kv": "dynamic"}, "batch": "varlen"},
    "kv": {"paged": {"page": PAGE}},
}
TILES = Tiles(128, 128, (1, 1))
FAR = 2**31 - 1
# By sequence: queries, seqused_k, its row of the table, and how many keys that means.
SEQUENCES = (
    (3, 20, (4, 1, -1), 20),
    (0, 9, (2, FAR, 7), 9),
    (4, -5, (0, 0, 0), 0),
    (6, 49, (1, 3, 0), 48),  # more than the table holds
    (2, FAR, (3, PAGES, -1), 48),  # outside the pool: its last page, its first
    (5, 2, (3, -7, FAR), 2),  # a page that others have, too
)


def called(library: str = "numpy") -> Given:
    """A call; NaN in each slot of the pool that no sequence uses, and in rows of Q of none."""
    random = np.random.default_rng(0)
    counts = [q for q, *_ in SEQUENCES]
    made: dict[str, Any] = {
        "q": random.normal(size=(sum(counts) + 2, HEADS, 16)),
        "k": random.normal(size=(PAGES, PAGE, HEADS // 2, 16)),
        "v": random.normal(size=(PAGES, PAGE, HEADS // 2, 16)),
        "cu_seqlens_q": np.cumsum([1, *counts], dtype=np.int32),
        "seqused_k": np.array([used for _, used, *_ in SEQUENCES], np.int32),
        "block_table": np.array([row for *_, row, _ in SEQUENCES], np.int32),
        "sink": random.normal(size=HEADS),
    }
    unused = np.ones((PAGES, PAGE), np.bool_)
    for _, _, row, kv in SEQUENCES:
        for key in range(kv):
            unused[min(max(row[key // PAGE], 0), PAGES - 1), key % PAGE] = False
    made["k"][unused] = made["v"][unused] = np.nan
    made["q"][[0, -1]] = np.nan
    if library == "torch":
        torch = importlib.import_module("torch")
        made = {name: torch.from_numpy(x) for name, x in made.items()}
    return Given(SPEC, made, 0.25)


def attention(given: Given) -> tuple[np.ndarray, np.ndarray]:
    """O and LSE in fp64, key by key; NaN in rows of no sequence."""
    read = {name: np.asarray(x) for name, x in given.inputs.items()}
    out = np.full(read["q"].shape, np.nan)
    lse = np.full(out.shape[1::-1], np.nan)
    row = 1
    for count, _, pages, kv in SEQUENCES:
        for number in range(count):
            for head in range(HEADS):
                sums, total = np.exp(read["sink"][head]), np.zeros(16)
                for key in range(max(number + kv - count + 1, 0)):
                    page = min(max(pages[key // PAGE], 0), PAGES - 1)
                    at = page, key % PAGE, head // 2
                    k, v = read["k"][at], read["v"][at]
                    weight = np.exp(given.scale * read["q"][row, head] @ k)
                    sums, total = sums + weight, total + weight * v
                out[row, head], lse[head, row] = total / sums, np.log(sums)
            row += 1
    return out, lse


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_each_key_is_the_row_of_its_page(library: str) -> None:
    pytest.importorskip(library)
    given = called(library)
    assert operation_of(SPEC) is PAGED_FORWARD
    found = {name: np.asarray(x) for name, x in PAGED_FORWARD.exact(given).items()}
    out, lse = attention(given)
    np.testing.assert_allclose(found["out"], out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found["lse"], lse, rtol=1e-12)


def judged(given: Given, outputs: dict[str, Any]) -> dict[str, str]:
    verdicts = PAGED_FORWARD.judge(given, outputs, PAGED_FORWARD.truth(given), 128)
    return {name: x.finding for name, x in verdicts.items() if x.finding}


def test_a_verdict_names_the_sequence() -> None:
    given = called()
    out, lse = attention(given)
    assert not judged(given, {"out": out, "lse": lse})
    out[10, 3] += 1.0
    found = judged(given, {"out": out, "lse": lse})
    assert "row 2 of head 3" in found["out"] and "sequence 2 of 5" in found["out"]


def case(**others: Any) -> Case:
    """Sequences of no key, of whole pages and of parts; three fill a page."""
    lengths = ((3, 20), (0, 33), (7, 0), (2, 48), (9, 1), (4, 16), (1, 0))
    pages = sum(-(-kv // PAGE) for _, kv in lengths) + 2
    made = Case("some", len(lengths), 2, 40, pages * PAGE, lengths=lengths)
    return replace(made, **others)


@pytest.mark.parametrize("pages", [0, -2])
def test_a_pool_is_nan_but_for_the_keys(pages: int) -> None:
    """pages: of the pool, more than that of `case`; with less some keys are outside."""
    some = case(kv=case().kv + (pages - 2) * PAGE * (pages < 0))
    made = values(SPEC, TILES, some)
    size, table = len(made["k"]), made["block_table"]
    used = np.zeros((size, PAGE), np.bool_)
    outside = 0
    for row, (_, kv) in zip(table, some.lengths, strict=True):
        for key in range(kv):
            at = row[key // PAGE]
            used[min(max(at, 0), size - 1), key % PAGE] = True
            outside += not 0 <= at < size
    assert (outside > 0) == (pages < 0)
    for name in "kv":
        assert (np.isfinite(made[name]) == used[..., None, None]).all()
    assert used[-1].any()
    assert pages < 0 or not used[-1].all(), "of the last page rows are left"
    assert pages < 0 or not used.any(axis=1).all(), "no page is without keys"
    assert not (np.diff(table[3][:3]) == 1).all(), "pages are in order"


def test_metadata_are_what_a_kernel_must_not_trust() -> None:
    made, lengths = values(SPEC, TILES, case()), [kv for _, kv in case().lengths]
    table, used = made["block_table"], made["seqused_k"].tolist()
    assert table.dtype == np.int32 and table.shape == (7, 3)
    assert used[2] == 0 and used[6] == -(2**31) and min(lengths) == 0
    assert used[3] == 48 and [used[0], *used[4:6]] == [20, 1, 16]
    behind = np.concatenate(
        [row[-(-kv // PAGE) :] for row, kv in zip(table, lengths, strict=True)]
    )
    assert {-1, FAR, len(made["k"]), 0} <= {*behind.tolist()}
    assert table[1, 0] == table[3, 0], "two sequences begin with one page"
    # A sequence that fills its row of the table has more keys than that.
    full = case(lengths=((3, 32), (1, 32), (2, 32), (1, 32)), batch=4)
    indices = PAGED_FORWARD.indices(SPEC, full)
    assert indices["seqused_k"].tolist() == [32, 33, FAR, 32]
    assert indices["block_table"].shape == (4, 2)


@pytest.mark.parametrize("layout", ["own", "bhsd", "mixed", "fused", "cache", "plain"])
def test_layouts_of_a_pool(layout: Any) -> None:
    placed = place_tensors(SPEC, case(layout=layout)).tensors
    k, v, table = placed["k"], placed["v"], placed["block_table"]
    page, row, head, one = k.strides
    assert one == 1 and not (page | row | head) % 8
    hnd = layout in ("bhsd", "fused")
    assert (head > row) == (v.strides[2] > v.strides[1]) == hnd or layout == "mixed"
    assert layout != "plain" or page == PAGE * 2 * 16
    if layout == "fused":  # vLLM's: a row of V beside each of K
        assert k.storage == v.storage == "kv" and k.strides == v.strides
        assert v.offset == k.offset + 16 and row == 32
    else:
        assert k.storage != v.storage
    assert table.strides[1] == 1
    assert layout == "plain" or table.strides[0] > table.shape[1]


def test_slots_of_far_pools_are_beyond_32_bits() -> None:
    placed = place_tensors(SPEC, case(layout="far")).tensors
    reach = [
        (x.shape[0] - 1) * x.strides[0] for x in (placed["v"], placed["block_table"])
    ]
    assert min(reach) > 2**31


def test_slots_are_those_of_the_table() -> None:
    table = PAGED_FORWARD.indices(SPEC, case())["block_table"]
    for row, slots, (_, kv) in zip(
        table, slots_of(SPEC, case()), case().lengths, strict=True
    ):
        assert slots.page.tolist() == [row[key // PAGE] for key in range(kv)]
        assert slots.row.tolist() == [key % PAGE for key in range(kv)]


def test_flops_are_those_of_packed_sequences() -> None:
    plain = {name: x for name, x in SPEC.items() if name not in ("batch", "kv")}
    lengths = [(q, kv) for q, kv in case().lengths if q and kv]
    alone = [FORWARD.flops(plain, Case("", 1, 2, *one)) for one in lengths]
    assert PAGED_FORWARD.flops(SPEC, case()) == sum(alone) > 0
    packed = {name: x for name, x in SPEC.items() if name != "kv"}
    assert PACKED_FORWARD.flops(packed, case()) == sum(alone)
