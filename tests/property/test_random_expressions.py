# SPDX-License-Identifier: Apache-2.0
"""Random expressions: what is solved for kv, and masks, against the truth value of every score."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import support
from fmha_gen.expressions.language import ExpressionError, Param, parse, text_of
from fmha_gen.expressions.solve import direction, falling_comparison, solve
from fmha_gen.expressions.values import check_range, evaluate
from fmha_gen.ops.masks import ALL_KEYS, Lengths, Mask, of_text

LENGTHS = (1, 63, 64, 65, 127, 129, 300)
PARAMS = {
    "w": Param(range=(0, 400)),
    "prefix": Param(("b",), range=(0, 400)),
    "start": Param(("b", "row"), range=(0, 400), monotone=True),
    "doc": Param(("b", "kv"), range=(0, 9)),
}
SIDES = (
    "q",
    "kv",
    "q - kv",
    "kv - q",
    "q + kv",
    "q // 64",
    "kv // 48",
    "2 * kv",
    "kv % 5",
)
SIDES += (
    "(q - kv) % 8",
    "2 * q - 3 * kv",
    "abs(q - kv)",
    "max(q, kv - 9)",
    "min(kv, q // 2)",
)
SIDES += (
    "row",
    "w",
    "prefix[b]",
    "start[b, row]",
    "doc[b, kv]",
    "seqlen_kv - seqlen_q",
)
SIDES += ("(kv + 7) // 16 // 3", "-kv", "5 - 2 * (kv // 4)")


OWN_SIDES = [x for x in SIDES if not {"w", "["} & {*x}]  # of what a mask may read


def condition(dice: random.Random, depth: int = 0, sides: Sequence[str] = SIDES) -> str:
    """A truth value of the language."""
    kind = dice.random()
    if depth == 2 or kind < 0.4:
        left, right = dice.choice(sides), dice.choice(
            (*sides, *map(str, range(-90, 300, 30)))
        )
        return f"{left} {dice.choice(('<', '<=', '>', '>=', '==', '!='))} {right}"
    if kind < 0.9:
        both = (f"({condition(dice, depth + 1, sides)})" for _ in range(2))
        return dice.choice((" and ", " or ")).join(both)
    return f"not ({condition(dice, depth + 1, sides)})"


def values_of(dice: random.Random, q: int, kv: int) -> Mapping[str, Any]:
    """All names for the scores of batch 1: a row of the array is a query."""
    made = np.random.default_rng(dice.randrange(1 << 30))
    row = np.arange(q)[:, None]
    return {
        **{
            "row": row,
            "q": row + kv - q,
            "kv": np.arange(kv)[None],
            "b": 1,
            "h": 3,
            "h_kv": 0,
        },
        **{"seqlen_q": q, "seqlen_kv": kv, "w": dice.randrange(400)},
        "prefix": made.integers(0, 400, 2),
        "start": np.sort(made.integers(0, 400, (2, q)), axis=1),
        "doc": made.integers(0, 9, (2, kv)),
    }


@pytest.mark.parametrize("seed", range(30))
def test_ranges_hold_what_is_seen(seed: int) -> None:
    """Of 10 expressions at 49 pairs of lengths: the pieces together, or no less where not exact."""
    dice = random.Random(seed)
    solved = 0
    while solved < 10:
        text = condition(dice)
        tree = parse(text, PARAMS)
        assert parse(text_of(tree), PARAMS) == tree
        try:
            ranges = solve(tree, PARAMS)
        except ExpressionError as refusal:
            assert refusal.code == "FG215"
            continue
        solved += 1
        low, high = check_range(tree, PARAMS)
        assert (low, high) == (0, 1)
        for q in LENGTHS:
            for kv in LENGTHS:
                values = values_of(dice, q, kv)
                seen = np.broadcast_to(evaluate(tree, values), (q, kv))
                held = np.zeros((q, kv), bool)
                for piece in ranges.pieces:
                    first, end = piece.keys(values)
                    held |= (first <= values["kv"]) & (values["kv"] < end)
                wrong = held != seen if ranges.exact else seen & ~held
                assert not wrong.any(), (text, q, kv)
        for bound in {x for p in ranges.pieces for x in p.lower | p.upper}:
            sign = direction(bound.node(), PARAMS)
            assert sign is not None, text
            found = np.broadcast_to(evaluate(bound.node(), values), (q, 1))
            assert (np.diff(found, axis=0) * (sign or 1) >= 0).all()
            if not sign:
                assert (found == found[:1]).all()


def kind_of(mask: Mask) -> str:
    """Which of the forms of a mask it is."""
    if mask.tests is not None:
        return "tests"
    if not mask.gap.empty:
        return "a gap"
    return "one range" if mask != ALL_KEYS else "all keys"


@pytest.mark.parametrize("seed", support.rotated(range(30), 15))
def test_masks_are_what_their_expressions_say(seed: int) -> None:
    """Of 3 masks of each form at 49 pairs of lengths: rows, blocks of tiles of them, and pairs."""
    dice = random.Random(seed)
    left = {"one range": 3, "a gap": 3, "tests": 3}
    while any(left.values()):
        text = condition(dice, sides=OWN_SIDES)
        try:
            mask = of_text(text)
        except ExpressionError as refusal:
            assert refusal.code in ("FG215", "FG219")
            continue
        if mask.falls:
            where, bound = falling_comparison(parse(text), {})
            assert where.type == "truth" and direction(bound.node(), {}) == -1
        if not left.get(kind_of(mask)):
            continue
        left[kind_of(mask)] -= 1
        rows, tile_kv = dice.choice((1, 40, 64, 128)), dice.choice((16, 64, 100))
        for q in LENGTHS:
            for kv in LENGTHS:
                sizes = Lengths(q, kv)
                seen = np.broadcast_to(
                    evaluate(parse(text), values_of(dice, q, kv)), (q, kv)
                )
                assert (mask.visible(range(q), sizes) == seen).all(), (text, q, kv)
                halved = seen.sum() - mask.pairs(sizes)
                assert 0 <= halved <= seen.any(1).sum() / 2
                first = dice.randrange(0, q, rows)
                end = min(first + rows, q)
                blocks, of_tile = (
                    mask.key_blocks(first, end, sizes, tile_kv),
                    seen[first:end],
                )
                taken, whole = blocks.taken(), blocks.whole()
                assert len(taken) == blocks.total and {*whole} <= {*taken}
                for block in range(-(-kv // tile_kv)):
                    keys = of_tile[:, block * tile_kv : (block + 1) * tile_kv]
                    assert block in taken or not keys.any(), (text, sizes, first)
                    wrong = block in whole and not (
                        keys.all() and keys.shape[1] == tile_kv
                    )
                    assert not wrong, (text, sizes, first)
