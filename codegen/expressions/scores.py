# SPDX-License-Identifier: Apache-2.0
"""What becomes of a score: which of its terms are in the softmax's exponent, and in what way.

A score is a sum of products. Where ``s`` is in one of them, times a number above 0, the number
belongs to the softmax's scale. What does not read ``kv`` is the same for all keys of a row, and the
softmax does not see it: it is added to the LSE. What is left and is a multiple of ``kv`` is a line
along the keys, ``slope * (kv - q)`` but for another constant of the row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Final, Literal

from .language import (
    SCORE,
    ExpressionError,
    Name,
    Node,
    Number,
    Real,
    Term,
    names_in,
    text_of,
)

How = Literal["scaled", "sloped", "by_element"]

_Product = tuple[
    Node, ...
]  # of names and terms that are no sums, in the order of their text
_Sum = Mapping[_Product, float]

LEAST: Final = 1e-6  # of a factor: a scale may be its product
MOST: Final = 1e6
S: Final = Name(SCORE, type="real")
_Q, _KV = Name("q"), Name("kv")


@dataclass(frozen=True)
class Parts:
    """A score, as a kernel computes it.

    how: ``scaled``: factor * s; ``sloped``: factor * s + slope * (kv - q); ``by_element``: the
    expression itself. row: what is added to the LSE of a row alone; None for nothing.
    """

    how: How
    factor: float = 1.0
    slope: Node | None = None
    row: Node | None = None


def parts_of(tree: Node) -> Parts:
    """Return what a score comes to; raises ExpressionError where it does not depend on ``s``."""
    terms = _expanded(tree)
    with_s = {each: n for each, n in terms.items() if _reads(each, SCORE)}
    if not with_s:
        raise ExpressionError(
            "FG219", 0, "a score that does not depend on s is not generated"
        )
    factor = with_s.get((S,), 0.0)
    others = {each: n for each, n in terms.items() if each not in with_s}
    along = {each: n for each, n in others.items() if _reads(each, "kv")}
    slope = {_without_kv(each): n for each, n in along.items()}
    if (
        len(with_s) > 1
        or not LEAST <= factor <= MOST
        or any(_reads(each, "kv") for each in slope)
    ):
        return Parts("by_element")
    row: dict[_Product, float] = defaultdict(float)
    for each, n in others.items():
        if each not in along:
            row[each] += n
    for each, n in slope.items():
        row[_sorted((*each, _Q))] += n
    how: How = "sloped" if slope else "scaled"
    return Parts(how, factor, _node(slope), _node(row))


def _expanded(node: Node) -> _Sum:
    """A sum of products with their numbers, without those that are 0."""
    found: dict[_Product, float] = defaultdict(float)
    match node:
        case Number(value=value) | Real(value=value):
            found[()] += value
        case Term(operator="-", operands=(operand,)):
            for each, n in _expanded(operand).items():
                found[each] -= n
        case Term(operator="+" | "-" as sign, operands=(left, right)):
            for each, n in _expanded(left).items():
                found[each] += n
            for each, n in _expanded(right).items():
                found[each] += n if sign == "+" else -n
        case Term(operator="*", operands=(left, right)):
            for a, n in _expanded(left).items():
                for b, m in _expanded(right).items():
                    found[_sorted((*a, *b))] += n * m
        case Term(
            operator="/", operands=(left, Number(value=value) | Real(value=value))
        ):
            for each, n in _expanded(left).items():
                found[each] += n / value
        case _:
            found[(node,)] += 1.0
    return {each: n for each, n in found.items() if n}


def _sorted(factors: _Product) -> _Product:
    return tuple(sorted(factors, key=text_of))


def _reads(factors: _Product, name: str) -> bool:
    return any(name in names_in(each) for each in factors)


def _without_kv(factors: _Product) -> _Product:
    """One ``kv`` less; what is no multiple of it stays, and still reads it."""
    place = factors.index(_KV) if _KV in factors else len(factors)
    return factors[:place] + factors[place + 1 :]


def _node(terms: _Sum) -> Node | None:
    """A sum of products as an expression, what is added first; None for 0."""
    found: Node | None = None
    for factors, n in sorted(terms.items(), key=lambda each: each[1] < 0):
        if not n:
            continue
        in_fp32 = len(factors) > 1 and all(each.type == "int" for each in factors)
        numbers: list[Node] = (
            [Real(abs(n))] if in_fp32 else []
        )  # its product may need more bits
        if not in_fp32 and (abs(n) != 1 or not factors):
            numbers = [_number(abs(n))]
        product = reduce(lambda a, b: Term("*", (a, b)), [*numbers, *factors])
        if found is None:
            found = product if n > 0 else Term("-", (product,))
        else:
            found = Term("+" if n > 0 else "-", (found, product))
    return found


def _number(value: float) -> Node:
    return Number(int(value)) if value == int(value) and value < 2**24 else Real(value)
