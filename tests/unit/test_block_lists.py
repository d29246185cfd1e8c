# SPDX-License-Identifier: Apache-2.0
"""Block lists: what they hold, what rows see by them, and how many pairs that is."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from fmha_gen.ops import lists, masks, operation_of
from fmha_gen.ops.lists import AXES, NAMES, PATTERNS, Drawn, Lists
from fmha_gen.ops.masks import Lengths
from fmha_gen.ops.reference import attention

TILE = (32, 16)
SPEC: dict[str, Any] = {
    **{"op": "fmha_fwd", "arch": "sm90", "dtype": "bf16", "mask": "causal"},
    **{"head_dim": {"qk": 64, "v": 32}, "q_per_kv": 2, "lse": True},
    **{"blocks": "lists", "tile": {"q": TILE[0], "kv": TILE[1]}},
}


class Call(NamedTuple):
    """Counts of a call."""

    q: int = 150
    kv: int = 123
    batch: int = 2
    kv_heads: int = 1
    lists: Drawn = Drawn("some", "bh")


def seen_by_definition(tensors: Any, call: Call) -> Any:
    """[batch, heads, q, kv], element by element, from the tensors alone."""
    counts, numbers, full_counts, full_numbers = (tensors[name] for name in NAMES)
    seen = np.zeros((call.batch, 2 * call.kv_heads, call.q, call.kv), np.bool_)
    for b, h, row, key in np.ndindex(seen.shape):
        at = min(b, len(counts) - 1), min(h, counts.shape[1] - 1), row // TILE[0]
        full = key // TILE[1] in full_numbers[at][: full_counts[at]]
        partial = key // TILE[1] in numbers[at][: counts[at]]
        seen[b, h, row, key] = full or (partial and key <= row + call.kv - call.q)
    return seen


@pytest.mark.parametrize("number", range(len(PATTERNS)))
def test_rows_see_what_the_lists_and_the_mask_say(number: int) -> None:
    pattern, axes = [*PATTERNS][number], AXES[number % len(AXES)]
    call = Call(lists=Drawn(pattern, axes))
    tensors, mask = lists.draw(SPEC, call), masks.of_spec(SPEC)
    assert [*tensors] == [*NAMES] and all(x.dtype == np.int32 for x in tensors.values())
    shape = 2 if "b" in axes else 1, 2 if "h" in axes else 1, 5, 8
    assert [x.shape for x in tensors.values()] == [shape[:3], shape] * 2
    found, expected = lists.of_tensors(SPEC, tensors), seen_by_definition(tensors, call)
    assert found is not None
    rows, lengths = np.arange(call.q), Lengths(call.q, call.kv)
    for batch in range(call.batch):
        seen = found.visible(mask.visible(rows, lengths), batch, slice(0, 2), rows)
        assert (np.broadcast_to(seen, expected[batch].shape) == expected[batch]).all()
    # Of FLOPs, half of the key on the diagonal is counted in a partial block.
    pairs = found.pairs(mask, lengths).mean() * call.batch * 2
    assert expected.sum() - expected[:, :, :, 0].size <= pairs <= expected.sum()


def test_patterns_are_what_they_are_called() -> None:
    def drawn(pattern: str, mask: str = "causal") -> Lists:
        found = lists.of_case(SPEC | {"mask": mask}, Call(lists=Drawn(pattern, "bh")))
        assert found is not None
        return found

    assert not drawn("none").full.any() and not drawn("none").partial.any()
    assert drawn("all").full.all()
    assert not drawn("full").partial.any() and not drawn("partial").full.any()
    one = drawn("one")
    assert ((one.full | one.partial).sum(-1) == 1).all()
    some = drawn("some_tiles")
    empty = ~(some.full | some.partial).any(-1)
    assert empty.any() and not empty.all()
    half = drawn("half", "none")
    assert ((half.full | half.partial).sum(-1) == 4).all()  # of 8
    call = Call(lists=Drawn("behind", "bh"))
    tensors = lists.draw(SPEC, call)
    assert (tensors["full_kv_indices"][tensors["full_kv_num_blocks"] > 0] == 8).any()
    shuffled = lists.draw(SPEC, call._replace(lists=Drawn("shuffled", "bh")))
    many = shuffled["kv_num_blocks"] > 2
    assert (np.diff(shuffled["kv_indices"][many][:, :3]) < 0).any()


def test_lists_are_ordered_as_flex_attention_orders_them() -> None:
    """What `create_block_mask` gave for a causal mask of 1000 rows and 700 keys, 128x64."""
    partial, full = masks.of_text("kv <= row").block_kinds(Lengths(1000, 700), 128, 64)
    # There a block is cut where it reaches beyond the last row, too.
    full = full & (np.arange(8) < 7)[:, None]
    made = lists.of_kinds((partial & ~full)[None, None], full[None, None])
    assert made["kv_num_blocks"].tolist() == [[[2, 2, 2, 2, 2, 1, 1, 11]]]
    assert made["full_kv_num_blocks"].tolist() == [[[0, 2, 4, 6, 8, 10, 10, 0]]]
    assert made["kv_indices"][0, 0, 1].tolist() == [2, 3, 0, 1, 4, 5, 6, 7, 8, 9, 10]
    assert made["full_kv_indices"][0, 0, 3].tolist() == [*range(11)]


def test_flops_are_those_of_the_pairs_that_are_seen() -> None:
    operation, call = operation_of(SPEC), Call(256, 256, lists=Drawn("half", ""))
    full = {**SPEC, "mask": "none"}
    half = operation.flops(full, call)
    del full["blocks"]
    assert half == operation.flops(full, call) / 2
    by_mask = operation.flops(SPEC, call._replace(lists=Drawn("mask", "b")))
    plain = {name: value for name, value in SPEC.items() if name != "blocks"}
    assert by_mask == operation.flops(plain, call)


@pytest.mark.parametrize("mask", ["kv <= q", "q - kv <= 40", "kv // 50 == q // 50"])
def test_pairs_of_blocks_are_all_pairs(mask: str) -> None:
    one, lengths = masks.of_text(mask), Lengths(150, 123)
    rows, keys = np.array([0, 32, 64, 150]), np.array([0, 16, 100, 123])
    blocks = one.pairs_of_blocks(lengths, rows, keys)
    assert blocks.shape == (3, 3) and blocks.sum() == one.pairs(lengths)


def test_the_reference_takes_lists() -> None:
    call, random = Call(
        q=70, kv=60, lists=Drawn("some_tiles", "h")
    ), np.random.default_rng(5)
    tensors = lists.draw(SPEC, call)
    q, k, v = (
        random.standard_normal(shape)
        for shape in ((2, 70, 2, 8), (2, 60, 1, 8), (2, 60, 1, 4))
    )
    found = attention(
        *(q, k, v),
        scale=0.3,
        mask=masks.of_spec(SPEC),
        lists=lists.of_tensors(SPEC, tensors),
    )
    seen = seen_by_definition(tensors, call)
    assert (~seen.any(-1)).any()  # rows without a key
    scores = np.where(seen, np.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * 0.3, -np.inf)
    weights = np.exp(scores)
    total = weights.sum(-1, keepdims=True)
    out = np.einsum(
        "bhqk,bkd->bqhd", weights / np.where(total > 0, total, 1), v[:, :, 0]
    )
    assert np.allclose(found.out, out, atol=1e-12)
    with np.errstate(divide="ignore"):
        assert np.allclose(found.lse, np.log(total[..., 0]), atol=1e-12)


def test_a_block_mask_of_flex_attention_is_taken_as_it_is() -> None:
    flex = pytest.importorskip(
        "torch.nn.attention.flex_attention",
        reason="needs PyTorch: pip install 'fmha-gen[torch]'",
    )
    made = flex.create_block_mask(
        lambda b, h, q, kv: kv <= q + b,
        2,
        None,
        150,
        150,
        device="cpu",
        BLOCK_SIZE=TILE,
    )
    tensors = {name: getattr(made, name).numpy() for name in NAMES}
    call = Call(150, 150, lists=Drawn("mask", "b"))
    assert [x.shape for x in tensors.values()] == [
        x.shape for x in lists.draw(SPEC, call).values()
    ]
    found = lists.of_tensors(SPEC, tensors)
    assert found is not None
    rows = np.arange(150)
    seen = found.visible(rows[None] <= rows[:, None], 0, slice(0, 1), rows)
    assert (seen[0] == (rows[None] <= rows[:, None])).all()
