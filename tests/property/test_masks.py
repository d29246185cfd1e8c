# SPDX-License-Identifier: Apache-2.0
"""Masks against brute force: what a row sees, and the KV blocks of a tile of rows."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.ops import masks
from fmha_gen.ops.masks import ALL_KEYS, MASKS, Affine, Lengths, Mask, kv, q, window
from hypothesis import given, settings
from hypothesis import strategies as st

lengths = st.builds(Lengths, st.integers(1, 90), st.integers(1, 90))
offsets = st.integers(-40, 40)
windows = st.builds(window, st.none() | offsets, st.none() | offsets)
bounds = st.builds(
    Affine,
    q=st.integers(-2, 2),
    seqlen_q=st.integers(-1, 1),
    seqlen_kv=st.integers(-1, 1),
    constant=offsets,
)


@st.composite
def conjunctions(draw: st.DrawFn) -> Mask:
    """Some atoms, of any directions."""
    mask = ALL_KEYS
    for bound in draw(st.lists(bounds, max_size=3)):
        mask &= kv <= bound if draw(st.booleans()) else kv >= bound
    return mask


def seen(mask: Mask, rows: range, sizes: Lengths) -> np.ndarray:
    """Bool [rows, kv], each bound by itself, element by element."""
    found = np.zeros((len(rows), sizes.kv), np.bool_)
    for i, row in enumerate(rows):
        position = row + sizes.kv - sizes.q
        values = {"q": position, "seqlen_q": sizes.q, "seqlen_kv": sizes.kv}

        def value(bound: Affine, values: dict[str, int] = values) -> int:
            return bound.constant + sum(
                getattr(bound, x) * n for x, n in values.items()
            )

        for key in range(sizes.kv):
            above = all(key >= value(bound) for bound in mask.lower)
            found[i, key] = above and all(key < value(bound) for bound in mask.upper)
    return found


def groups(size: int, sizes: Lengths) -> list[tuple[int, int]]:
    """Of rows as kernels take them: the last one may reach beyond the end."""
    return [(first, first + size) for first in range(0, sizes.q, size)]


@settings(deadline=None, max_examples=150)
@given(windows | conjunctions(), lengths, st.integers(1, 40), st.integers(1, 40))
def test_no_block_is_wrong(mask: Mask, sizes: Lengths, rows: int, tile_kv: int) -> None:
    first_rows, end_rows = zip(*groups(rows, sizes), strict=True)
    every = mask.key_blocks(first_rows, end_rows, sizes, tile_kv)
    for number, (first_row, end_row) in enumerate(groups(rows, sizes)):
        blocks = masks.KeyBlocks(*(int(each[number]) for each in every))
        assert 0 <= blocks.first <= blocks.whole_first <= blocks.whole_end <= blocks.end
        visible = seen(mask, range(first_row, min(end_row, sizes.q)), sizes)
        for block in range(-(-sizes.kv // tile_kv)):
            keys = visible[:, block * tile_kv : (block + 1) * tile_kv]
            if not blocks.first <= block < blocks.end:
                assert not keys.any()
            if blocks.whole_first <= block < blocks.whole_end:
                assert keys.all() and keys.shape[1] == tile_kv


@settings(deadline=None, max_examples=150)
@given(windows, lengths, st.integers(1, 40), st.integers(1, 40))
def test_no_block_is_taken_in_vain(
    mask: Mask, sizes: Lengths, rows: int, tile_kv: int
) -> None:
    """The ranges are tight for windows, of whose rows each sees a key."""
    for first_row, end_row in groups(rows, sizes):
        visible = seen(mask, range(first_row, end_row), sizes)
        if not visible.any(1).all():
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
@given(windows | conjunctions(), lengths)
def test_rows_see_what_the_atoms_say(mask: Mask, sizes: Lengths) -> None:
    rows = range(sizes.q)
    expected = seen(mask, rows, sizes)
    assert (mask.visible(rows, sizes) == expected).all()
    counted = mask.pairs(sizes)
    assert counted <= expected.sum() <= counted + expected.any(1).sum() / 2
    assert counted == expected.sum() or any(bound.q for bound in mask.upper)


def test_one_mask_has_one_form() -> None:
    assert window(None, None) == MASKS["none"] == ALL_KEYS
    assert window(None, 0) == MASKS["causal"]
    assert window(None, 0) & window(9, 30) == window(9, 0) == window(9, 0) & ALL_KEYS
    assert (kv < q + 1) == (kv <= q) == (q >= kv) == (q > kv - 1) != (kv <= q + 1)


def test_a_window_is_told_by_its_edges() -> None:
    assert [str(mask) for mask in MASKS.values()] == ["", "kv <= q"]
    assert str(window(1023, 0)) == "q - 1023 <= kv <= q"
    assert (
        str(window(None, 3)) == "kv <= q + 3" and str(window(-2, None)) == "q + 2 <= kv"
    )
    assert (window(9, 0).left, window(9, 0).right) == (9, 0)
    for other in (kv <= q + q, (kv <= q) & (kv <= q - masks.seqlen_q)):
        with pytest.raises(ValueError, match="no window"):
            print(other.right)


def test_what_is_no_bound_of_keys_is_refused() -> None:
    for form in (q - 5, kv + kv - q):
        with pytest.raises(ValueError, match="kv once"):
            form <= 0  # noqa: B015
