# SPDX-License-Identifier: Apache-2.0
"""Masks against brute force: what a row sees, and the KV blocks of a tile of rows."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.expressions.language import ExpressionError, parse
from fmha_gen.expressions.values import evaluate
from fmha_gen.ops import masks
from fmha_gen.ops.masks import ALL_KEYS, MASKS, Lengths, of_text, window
from hypothesis import given, settings
from hypothesis import strategies as st

lengths = st.builds(Lengths, st.integers(1, 90), st.integers(1, 90))
offsets = st.integers(-40, 40)
atoms = st.builds(
    "{} {} {} * {} + {} * seqlen_q + {} * seqlen_kv + {}".format,
    st.sampled_from(["kv", "kv // 7", "3 * kv"]),
    st.sampled_from(["<=", ">="]),
    st.integers(-2, 2),
    st.sampled_from(["q", "(q // 5)"]),
    *[st.integers(-1, 1)] * 2,
    offsets,
)
conjunctions = st.builds(" and ".join, st.lists(atoms, min_size=1, max_size=3))


def seen(text: str, sizes: Lengths) -> np.ndarray:
    """Bool [rows, kv], by the truth value of each score."""
    row, key = np.arange(sizes.q)[:, None], np.arange(sizes.kv)[None]
    place = {"q": row + sizes.kv - sizes.q, "row": row, "kv": key}
    values = {**place, "seqlen_q": sizes.q, "seqlen_kv": sizes.kv}
    return np.broadcast_to(evaluate(parse(text), values), (sizes.q, sizes.kv))


def of_window(left: int | None, right: int | None) -> str:
    """A window's expression."""
    sides = [f"q - kv <= {left}"] * (left is not None)
    sides += [f"kv - q <= {right}"] * (right is not None)
    return " and ".join(sides) or "0 <= kv"


windows = st.builds(of_window, st.none() | offsets, st.none() | offsets)


def groups(size: int, sizes: Lengths) -> list[tuple[int, int]]:
    """Of rows as kernels take them: the last one may reach beyond the end."""
    return [(first, first + size) for first in range(0, sizes.q, size)]


@settings(deadline=None, max_examples=150)
@given(windows | conjunctions, lengths, st.integers(1, 40), st.integers(1, 40))
def test_no_block_is_wrong(text: str, sizes: Lengths, rows: int, tile_kv: int) -> None:
    mask, truth = of_text(text), seen(text, sizes)
    first_rows, end_rows = zip(*groups(rows, sizes), strict=True)
    every = mask.key_blocks(first_rows, end_rows, sizes, tile_kv)
    for number, (first_row, end_row) in enumerate(groups(rows, sizes)):
        blocks = masks.KeyBlocks(*(int(each[number]) for each in every))
        assert 0 <= blocks.first <= blocks.whole_first <= blocks.whole_end <= blocks.end
        visible = truth[first_row:end_row]
        for block in range(-(-sizes.kv // tile_kv)):
            keys = visible[:, block * tile_kv : (block + 1) * tile_kv]
            if not blocks.first <= block < blocks.end:
                assert not keys.any()
            if blocks.whole_first <= block < blocks.whole_end:
                assert keys.all() and keys.shape[1] == tile_kv


@settings(deadline=None, max_examples=150)
@given(windows, lengths, st.integers(1, 40), st.integers(1, 40))
def test_no_block_is_taken_in_vain(
    text: str, sizes: Lengths, rows: int, tile_kv: int
) -> None:
    """The ranges are tight for windows, of whose rows each sees a key."""
    mask, truth = of_text(text), seen(text, sizes)
    for first_row, end_row in groups(rows, sizes):
        visible = truth[first_row:end_row]
        if end_row > sizes.q or not visible.any(1).all():
            continue
        blocks = mask.key_blocks(first_row, end_row, sizes, tile_kv)
        some, whole = [], []
        for block in range(-(-sizes.kv // tile_kv)):
            keys = visible[:, block * tile_kv : (block + 1) * tile_kv]
            some += [block] * bool(keys.any())
            whole += [block] * bool(keys.all() and keys.shape[1] == tile_kv)
        assert (blocks.first, blocks.end) == (some[0], some[-1] + 1)
        assert [*range(blocks.whole_first, blocks.whole_end)] == whole


@settings(deadline=None, max_examples=100)
@given(windows | conjunctions, lengths)
def test_rows_see_what_the_expression_says(text: str, sizes: Lengths) -> None:
    mask, expected = of_text(text), seen(text, sizes)
    assert (mask.visible(range(sizes.q), sizes) == expected).all()
    counted = mask.pairs(sizes)
    assert counted <= expected.sum() <= counted + expected.any(1).sum() / 2
    assert counted == expected.sum() or mask.right_edges


def test_one_mask_has_one_form() -> None:
    assert (
        window(None, None) == MASKS["none"] == ALL_KEYS == of_text("kv < seqlen_kv + 3")
    )
    assert (
        window(None, 0)
        == MASKS["causal"]
        == of_text("not kv > q")
        == of_text("q - kv >= 0")
    )
    assert window(None, 0) & window(9, 30) == window(9, 0) == window(9, 0) & ALL_KEYS
    assert of_text("kv <= q") == of_text("kv < q + 1") != of_text("kv <= q + 1")
    chunk = of_text("kv <= q and kv // 64 == q // 64")
    assert chunk == of_text("kv <= q and kv >= q // 64 * 64")
    assert chunk == of_text("kv <= q and kv // 64 >= q // 64")


def test_a_mask_is_told_by_its_edges() -> None:
    assert [str(mask) for mask in MASKS.values()] == ["", "kv <= q"]
    assert str(window(1023, 0)) == "q - 1023 <= kv <= q"
    assert str(window(None, 3)) == "kv <= q + 3"
    assert str(window(-2, None)) == "q + 2 <= kv"
    assert (
        str(of_text("kv <= q and kv // 64 == q // 64")) == "64 * (q // 64) <= kv <= q"
    )
    assert str(of_text("kv <= q and 2 * kv >= q and kv > q - 99")) == (
        "max((q + 1) // 2, q - 98) <= kv <= q"
    )
    edges = [(each.left, each.right) for each in (window(9, 0), of_text("2 * kv <= q"))]
    assert edges == [(9, 0), (None, None)]


@pytest.mark.parametrize(
    "text", ["kv <= h", "kv >= 9 and kv < 20 or kv <= q and kv > q - 5"]
)
def test_what_no_kernel_has_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        of_text(text)
    assert caught.value.code == "FG219"


def test_two_ranges_are_one_with_a_gap() -> None:
    found = of_text("kv <= q and (q - kv < 1024 or kv < 4)")
    assert str(found) == "kv <= q and not 4 <= kv <= q - 1024"
    assert found == of_text("kv <= q and (kv < 4 or kv > q - 1024)")
    assert (found.right, found.left, found.reach, found.uneven) == (
        0,
        None,
        1023,
        False,
    )
    # Ranges that overlap or touch for every query are one.
    for touching in (
        "kv <= q and (kv > q - 9 or kv < q - 5)",
        "kv <= q and (kv > q or kv < q + 1)",
    ):
        assert of_text(touching) == MASKS["causal"]
    assert (
        str(of_text("kv <= q or kv == q + 9"))
        == "kv <= q + 9 and not q + 1 <= kv <= q + 8"
    )


def test_what_ranges_do_not_say_is_tested() -> None:
    dilated = of_text("kv <= q and q - kv < 99 and (q - kv) % 4 == 0")
    assert dilated.tests == parse("(q - kv) % 4 == 0")
    assert (dilated.left, dilated.right) == (98, 0)
    assert str(dilated) == "q - 98 <= kv <= q where (q - kv) % 4 == 0"
    either = of_text("not (kv > q or not (kv % 3 == 0 or q > 5))")
    assert str(either) == "kv <= q where kv % 3 == 0 or q > 5"
