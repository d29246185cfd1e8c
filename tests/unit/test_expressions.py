# SPDX-License-Identifier: Apache-2.0
"""The grammar of expressions: what is refused, where and how; what is solved, in words."""

from __future__ import annotations

import pytest
from fmha_gen.expressions.language import (
    ExpressionError,
    Param,
    names_in,
    parse,
    text_of,
)
from fmha_gen.expressions.solve import solve
from fmha_gen.expressions.values import check_range

PARAMS = {
    "w": Param(range=(1, 1 << 20)),
    "prefix": Param(("b",), range=(0, 1 << 20)),
    "start": Param(("b", "row"), monotone=True),
    "doc": Param(("b", "kv")),
}
REFUSED = [
    ("kv <= q < 5", "FG211", 10, "two comparisons in a row"),
    ("kv == q & 1", "FG211", 8, "& is not part of the language"),
    ("(kv) / 2 < q", "FG211", 5, "/ is not part of the language"),
    ("kv <= q if q else kv < 3", "FG211", 0, "if is not part of the language"),
    ("kv.x <= q", "FG211", 0, "a dot is not part of the language"),
    ("kv <= 'q'", "FG211", 6, "\"'q'\" is not a whole number in decimal"),
    ("kv <= 0x10", "FG211", 6, '"0x10" is not a whole number in decimal'),
    ("kv <= 1.5", "FG211", 6, '"1.5" is not a whole number in decimal'),
    ("kv <= True", "FG211", 6, '"True" is not a whole number in decimal'),
    ("kv <= 1_0", "FG211", 6, '"1_0" is not a whole number in decimal'),
    ("kv <=", "FG211", 4, "is not an expression"),
    ("  kv is q", "FG211", 2, "is not part of the language"),
    ("kv <= q\u2009+ 1", "FG211", 7, '"\\u2009" is not part of the language'),
    ("lambda: q", "FG211", 0, "is not part of the language"),
    ("min(q, *kv) < 1", "FG211", 7, "is not part of the language"),
    ("kv <= qq", "FG212", 6, 'unknown name "qq"; known: q, kv, row'),
    ("kv <= pow(q, 2)", "FG212", 6, 'unknown function "pow"; known: min, max, abs'),
    ("kv", "FG213", 0, "a number stands where a truth value is needed"),
    ("kv + (q < 3) < 9", "FG213", 6, "a truth value stands where a number is needed"),
    ("kv <= q and q", "FG213", 12, "a number stands where a truth value is needed"),
    ("not q", "FG213", 4, "a number stands where a truth value is needed"),
    ("q // 0 < kv", "FG218", 5, "the divisor must be a positive whole number"),
    ("q % -4 < kv", "FG218", 4, "the divisor must be a positive whole number"),
    ("q // w < kv", "FG218", 5, "the divisor must be a positive whole number"),
    ("start[row] < kv", "FG218", 0, "start has 2 axes"),
    ("w[b] < kv", "FG218", 0, "w has no axes"),
    ("prefix < kv", "FG218", 0, "prefix has one axis"),
    ("doc[b, kv + 1] < 3", "FG218", 7, "a tensor is indexed by its axes alone"),
    ("abs(q, kv) < 3", "FG218", 0, "abs takes one argument"),
    ("min(q) < 3", "FG218", 0, "min takes two arguments or more"),
    ("kv <= 3000000000", "FG216", 6, "3000000000 is more than 32 bits hold"),
]


@pytest.mark.parametrize(("text", "code", "column", "message"), REFUSED)
def test_refusals_name_the_column(
    text: str, code: str, column: int, message: str
) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text, PARAMS)
    error = caught.value
    assert (error.code, error.column) == (code, column)
    assert error.message.startswith(message)


def test_length_and_depth_have_limits() -> None:
    parse("kv <= q" + " " * 393, PARAMS)
    with pytest.raises(ExpressionError, match="401 characters, of at most 400"):
        parse("kv <= q" + " " * 394, PARAMS)
    parse("not " * 38 + "kv <= q", PARAMS)
    with pytest.raises(ExpressionError, match="more than 40 nested terms"):
        parse("not " * 39 + "kv <= q", PARAMS)
    parse("(" * 190 + "kv <= q" + ")" * 190, PARAMS)


@pytest.mark.parametrize(
    "text",
    [
        "kv <= q and (q - kv < 1024 or kv < 4)",
        "not (kv <= q and q < 3)",
        "q - (kv - 1) <= 2 * (q + 1)",
        "-(q + 1) < -kv",
        "max(q, kv) // 2 % 3 == start[b, row]",
        "(q - 1) * (kv + 1) < 4",
    ],
)
def test_an_expression_is_written_as_it_reads(text: str) -> None:
    assert text_of(parse(text, PARAMS)) == text


def test_names_in_an_expression_are_those_of_indices_too() -> None:
    assert names_in(parse("start[b, row] <= kv", PARAMS)) == {"start", "b", "row", "kv"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1000 * q < kv", 16777215000), ("kv - 200 * seqlen_kv < 0", 3355443200)],
)
def test_a_subterm_may_not_leave_32_bits(text: str, value: int) -> None:
    with pytest.raises(ExpressionError, match=str(value)) as caught:
        check_range(parse(text), {})
    assert caught.value.code == "FG216"


@pytest.mark.parametrize(
    ("text", "pieces", "exact"),
    [
        ("kv <= q", [("0", "q + 1, seqlen_kv")], True),
        ("not q < kv", [("0", "q + 1, seqlen_kv")], True),
        ("abs(q - kv) <= 9", [("0, q - 9", "q + 10, seqlen_kv")], True),
        ("kv < prefix[b] or kv <= q", [("0", "max(prefix[b], q + 1), seqlen_kv")], True),
        ("kv // 64 == q // 64", [("0, 64 * (q // 64)", "64 * (q // 64) + 64, seqlen_kv")], True),
        ("2 * kv <= q", [("0", "q // 2 + 1, seqlen_kv")], True),
        ("kv != q", [("0", "q, seqlen_kv"), ("0, q + 1", "seqlen_kv")], True),
        ("kv <= q and (q - kv) % 4 == 0", [("0", "q + 1, seqlen_kv")], False),
        ("kv <= q and doc[b, kv] == 3", [("0", "q + 1, seqlen_kv")], False),
        # Which of the two is greater changes along the rows.
        ("kv <= q or q + kv < 9", [("0", "q + 1, seqlen_kv"), ("0", "-q + 9, seqlen_kv")], True),
    ],
)  # fmt: skip
def test_bounds_of_the_key(
    text: str, pieces: list[tuple[str, str]], exact: bool
) -> None:
    found = solve(parse(text, PARAMS), PARAMS)
    sides = [
        tuple(
            ", ".join(sorted(text_of(bound.node()) for bound in side))
            for side in (piece.lower, piece.upper)
        )
        for piece in found.pieces
    ]
    assert (sorted(sides), found.exact) == (sorted(pieces), exact)


def test_too_many_alternatives_are_refused() -> None:
    nine = " or ".join(f"kv == q - {10 * n}" for n in range(9))
    with pytest.raises(ExpressionError, match="9 alternatives, of at most 8") as caught:
        solve(parse(nine))
    assert caught.value.code == "FG215"
    three = " or ".join(f"kv == q - {10 * n}" for n in range(3))
    with pytest.raises(ExpressionError, match="3 ranges of keys, of at most 2"):
        solve(parse(three))
