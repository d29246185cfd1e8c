# SPDX-License-Identifier: Apache-2.0
"""The keys that a query sees, as bounds of ``kv``: what a truth value over ``kv`` comes to.

A tree becomes alternatives of atoms, comparisons ``form <= 0`` of forms that are affine in names
and in terms that are not. An atom with one ``kv`` in it, plain or divided by a number, is a bound
of it; bounds of one alternative are an intersection. What is no bound, or a bound of which nothing
says that it rises or falls with the row, stays a test of single scores: no visible key lies outside
of the bounds then, and `Ranges.exact` is false.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import prod
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from .language import (
    COMPARISONS,
    ExpressionError,
    Name,
    Node,
    Number,
    Param,
    Term,
    flattened,
    names_in,
    text_of,
    walk,
)
from .values import Values, evaluate

MOST_ALTERNATIVES: Final = 8
MOST_PIECES: Final = 2

Direction = Literal[-1, 0, 1]
Side = Literal["lower", "upper"]


@dataclass(frozen=True)
class Form:
    """``sum(coefficient * term) + constant``, terms in the order of their text."""

    terms: tuple[tuple[Node, int], ...] = ()
    constant: int = 0

    @classmethod
    def of(cls, coefficients: Mapping[Node, int], constant: int) -> Form:
        """Leave out what is multiplied by 0."""
        terms = [(term, n) for term, n in coefficients.items() if n]
        return cls(tuple(sorted(terms, key=lambda each: text_of(each[0]))), constant)

    def __add__(self, other: Form) -> Form:
        found = dict(self.terms)
        for term, n in other.terms:
            found[term] = found.get(term, 0) + n
        return Form.of(found, self.constant + other.constant)

    def __mul__(self, factor: int) -> Form:
        return Form.of(
            {term: n * factor for term, n in self.terms}, self.constant * factor
        )

    def __sub__(self, other: Form) -> Form:
        return self + other * -1

    def __floordiv__(self, divisor: int) -> Form:
        if all(n % divisor == 0 for _, n in self.terms):
            return Form.of(
                {t: n // divisor for t, n in self.terms}, self.constant // divisor
            )
        return Form.of({Term("//", (self.node(), Number(divisor))): 1}, 0)

    def plus(self, constant: int) -> Form:
        """Add a number."""
        return Form(self.terms, self.constant + constant)

    def node(self) -> Node:
        """As an expression: what is added first, then what is taken away, the constant last."""
        signed = sorted(self.terms, key=lambda each: each[1] < 0)
        parts: list[tuple[int, Node]] = [(n, term) for term, n in signed]
        if self.constant or not parts:
            parts.append((1 if self.constant >= 0 else -1, Number(abs(self.constant))))
        found: Node | None = None
        for n, term in parts:
            factor = abs(n)
            part = term if factor == 1 else Term("*", (Number(factor), term))
            if found is None:
                found = part if n > 0 else Term("-", (part,))
            else:
                found = Term("+" if n > 0 else "-", (found, part))
        assert found is not None
        return found


FIRST_KEY: Final = Form()
END_KEY: Final = Form.of({Name("seqlen_kv"): 1}, 0)
_ROW: Final = Form.of({Name("q"): 1, Name("seqlen_q"): 1, Name("seqlen_kv"): -1}, 0)


def form_of(node: Node) -> Form:
    """Return an integer as an affine form, with ``row`` said by ``q`` and the lengths."""
    match node:
        case Number(value=value):
            return Form((), value)
        case Name(name="row", axes=()):
            return _ROW
        case Term(operator="-", operands=(operand,)):
            return form_of(operand) * -1
        case Term(operator="+" | "-" as sign, operands=(left, right)):
            right_form = form_of(right)
            return form_of(left) + right_form * (1 if sign == "+" else -1)
        case Term(operator="*", operands=(left, right)):
            a, b = form_of(left), form_of(right)
            if not a.terms:
                return b * a.constant
            if not b.terms:
                return a * b.constant
            return Form.of({Term("*", (a.node(), b.node())): 1}, 0)
        case Term(operator="//", operands=(operand, Number(value=divisor))):
            return form_of(operand) // divisor
        case Term(operator="abs", operands=(operand,)):
            inside = form_of(operand)
            return Form.of({Term("max", (inside.node(), (inside * -1).node())): 1}, 0)
        case Term(operator=sign, operands=operands):
            simple = tuple(form_of(each).node() for each in operands)
            return Form.of({Term(sign, simple): 1}, 0)
        case _:
            return Form.of({node: 1}, 0)


@dataclass(frozen=True)
class Piece:
    """Keys from the greatest lower bound up to, not including, the least upper one."""

    lower: frozenset[Form]
    upper: frozenset[Form]

    def keys(self, values: Values) -> tuple[NDArray[Any], NDArray[Any]]:
        """The first key and the end for names that are integers or arrays."""
        first = [evaluate(bound.node(), values) for bound in self.lower]
        end = [evaluate(bound.node(), values) for bound in self.upper]
        return reduce(np.maximum, first), reduce(np.minimum, end)

    @property
    def empty(self) -> bool:
        """There is no key in it, whatever the row."""
        return any(_at_most(end - first) for end in self.upper for first in self.lower)


@dataclass(frozen=True)
class Gap:
    """Keys from the least bound of `first` up to, not including, the greatest of `end`."""

    first: frozenset[Form] = frozenset()
    end: frozenset[Form] = frozenset()

    @property
    def empty(self) -> bool:
        """There is no key in it, whatever the row: so it is without bounds."""
        return all(_at_most(end - first) for end in self.end for first in self.first)


NO_GAP: Final = Gap()


@dataclass(frozen=True)
class Ranges:
    """What a row sees: keys of one of the pieces, and all of them where exact."""

    pieces: tuple[Piece, ...]
    exact: bool


def solve(node: Node, params: Mapping[str, Param] | None = None) -> Ranges:
    """Return the keys of a truth value; raises ExpressionError for too many alternatives."""
    pieces, exact = _pieces(node, params or {})
    if len(pieces) > MOST_PIECES:
        if exact:
            message = (
                f"a query sees {len(pieces)} ranges of keys, of at most {MOST_PIECES}"
            )
            raise ExpressionError("FG215", node.column, message)
        pieces = [_hull(pieces)]
    return Ranges(tuple(pieces), exact)


def _pieces(node: Node, params: Mapping[str, Param]) -> tuple[list[Piece], bool]:
    """As few pieces as hold what is seen, and whether they hold no more."""
    pieces, exact = [], True
    for atoms in _alternatives(node, negated=False):
        lower, upper = {FIRST_KEY}, {END_KEY}
        for atom in atoms:
            side, bound = _bound(atom)
            if side is None or direction(bound.node(), params) is None:
                exact = False
                continue
            (lower if side == "lower" else upper).add(bound)
        pieces.append(Piece(strictest(lower, "lower"), strictest(upper, "upper")))
    return _merged([x for x in pieces if not x.empty] or pieces[:1], params), exact


def with_gap(pieces: Sequence[Piece]) -> tuple[Piece, Gap] | None:
    """Return one or two pieces as one with a gap; None where neither comes first for every row.

    Where only the first keys, or only the ends, are in a known order, the outer bound of both is
    the other one of the whole.
    """
    if len(pieces) == 1:
        return pieces[0], NO_GAP
    for low, high in (pieces, pieces[::-1]):
        rise = all(any(_at_most(x - y) for y in high.lower) for x in low.lower)
        ends = all(any(_at_most(x - y) for x in low.upper) for y in high.upper)
        if not rise and not ends:
            continue
        lower = low.lower if rise else _either(low.lower, high.lower, "min", "max")
        upper = high.upper if ends else _either(low.upper, high.upper, "max", "min")
        gap = Gap(low.upper - upper, high.lower - lower)
        return Piece(lower, upper), NO_GAP if gap.empty else gap
    return None


def tests_of(
    node: Node, ranges: Ranges, params: Mapping[str, Param] | None = None
) -> Node | None:
    """Return what is left to test of a truth value inside its ranges; None where it is exact.

    Of a conjunction, those of its sides that the ranges do not say.
    """
    assert isinstance(node, Term)
    if ranges.exact:
        return None
    sides = node.operands if node.operator == "and" else (node,)
    left = []
    for side in sides:
        pieces, exact = _pieces(side, params or {})
        if not exact or len(pieces) > len(ranges.pieces):
            left.append(side)
    return left[0] if len(left) == 1 else Term("and", tuple(left))


def without_not(node: Node, *, negated: bool = False) -> Node:
    """Return a truth value that says `not` by its comparisons."""
    match node:
        case Term(operator="not", operands=(operand,)):
            return without_not(operand, negated=not negated)
        case Term(operator="and" | "or" as joint, operands=operands):
            other = {"and": "or", "or": "and"}[joint] if negated else joint
            sides = [without_not(x, negated=negated) for x in operands]
            return Term(other, tuple(flattened(other, sides)))
        case Term(operator=sign, operands=operands) if negated:
            return Term(_NEGATED[sign], operands)
    return node


def direction(node: Node, params: Mapping[str, Param]) -> Direction | None:
    """Return whether an integer rises, falls or stays where the row rises; None: not known."""
    match node:
        case Number():
            return 0
        case Name(name=name, axes=axes):
            if name in ("q", "row"):
                return 1
            if "row" in axes:
                return 1 if params[name].monotone else None
            return 0 if "kv" not in axes else None
        case Term(operator="-", operands=(operand,)):
            return _turned(direction(operand, params))
        case Term(operator="-", operands=(left, right)):
            return _same([direction(left, params), _turned(direction(right, params))])
        case Term(operator="+" | "min" | "max", operands=operands):
            return _same([direction(each, params) for each in operands])
        case Term(operator="//", operands=(operand, _)):
            return direction(operand, params)
        case Term(operator="*", operands=(Number(), operand)):
            return direction(operand, params)
        case Term(operands=operands):
            moves = [direction(each, params) for each in operands]
            return 0 if moves == [0] * len(moves) else None
    raise AssertionError(node)


def falling_comparison(node: Node, params: Mapping[str, Param]) -> tuple[Node, Form]:
    """Return the first comparison with a bound that falls where the row rises, and that bound.

    It is there where a bound of the whole falls, which is one of a comparison or made of some.
    """
    return next(
        (each, bound)
        for each in walk(node)
        if isinstance(each, Term) and each.operator in COMPARISONS
        for atoms in _alternatives(each, negated=False)
        for side, bound in map(_bound, atoms)
        if side and direction(bound.node(), params) == -1
    )


def _turned(found: Direction | None) -> Direction | None:
    return None if found is None else (0, -1, 1)[found]


def _same(found: Sequence[Direction | None]) -> Direction | None:
    if None in found:
        return None
    moving = {each for each in found if each}
    return moving.pop() if len(moving) == 1 else None if moving else 0


def _alternatives(node: Node, *, negated: bool) -> list[tuple[Form, ...]]:
    """The disjunctive normal form, of atoms ``form <= 0``."""
    assert isinstance(node, Term)
    match node:
        case Term(operator="not", operands=(operand,)):
            return _alternatives(operand, negated=not negated)
        case Term(operator="and" | "or" as joint, operands=operands):
            sides = [_alternatives(each, negated=negated) for each in operands]
            union = (joint == "or") != negated
            count = (sum if union else prod)(len(side) for side in sides)
            if count > MOST_ALTERNATIVES:
                message = (
                    f"comes to {count} alternatives, of at most {MOST_ALTERNATIVES}"
                )
                raise ExpressionError("FG215", node.column, message)
            if union:
                return [atoms for side in sides for atoms in side]
            return [
                tuple(a for atoms in each for a in atoms) for each in product(*sides)
            ]
        case Term(operator=sign, operands=(left, right)):
            difference = form_of(left) - form_of(right)
            found = _NEGATED[sign] if negated else sign
            return [tuple(each) for each in _comparison(found, difference)]
    raise AssertionError(node)


_NEGATED: Final = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


def _comparison(sign: str, form: Form) -> list[list[Form]]:
    """``form sign 0`` as alternatives of forms that are at most 0."""
    other = form * -1
    match sign:
        case "<=":
            return _split(form)
        case "<":
            return _split(form.plus(1))
        case ">=":
            return _split(other)
        case ">":
            return _split(other.plus(1))
        case "==":
            return [a + b for a in _split(form) for b in _split(other)]
    return _split(form.plus(1)) + _split(other.plus(1))


def _split(form: Form) -> list[list[Form]]:
    """Without a minimum or maximum of keys: ``max(a, b) <= 0`` is ``a <= 0`` and ``b <= 0``."""
    for term, n in form.terms:
        if (
            isinstance(term, Term)
            and term.operator in ("min", "max")
            and _has_key(term)
        ):
            rest = form - Form.of({term: n}, 0)
            sides = [_split(rest + form_of(each) * n) for each in term.operands]
            if (term.operator == "max") == (n > 0):
                return [
                    [a for atoms in each for a in atoms] for each in product(*sides)
                ]
            return [atoms for side in sides for atoms in side]
    return [[form]]


def _has_key(node: Node) -> bool:
    return "kv" in names_in(node)


def _bound(atom: Form) -> tuple[Side | None, Form]:
    """Solve ``atom <= 0`` for the key: a first key, or the key after the last; None: no bound."""
    keys = [(term, n) for term, n in atom.terms if _has_key(term)]
    if len(keys) != 1:
        return None, atom
    ((term, n),) = keys
    rest = atom - Form.of({term: n}, 0)
    # n * term <= -rest: term is at most, or at least, this.
    limit = (rest * -1) // n if n > 0 else (rest.plus(-n - 1)) // -n
    match term:
        case Name(name="kv", axes=()):
            return ("upper", limit.plus(1)) if n > 0 else ("lower", limit)
        case Term(operator="//", operands=(operand, Number(value=divisor))):
            inside = form_of(operand)
            if n > 0:
                return _bound(inside - (limit * divisor).plus(divisor - 1))
            return _bound(limit * divisor - inside)
    return None, atom


def strictest(bounds: Iterable[Form], side: Side) -> frozenset[Form]:
    """Of bounds that follow from others, those others: less of them, and the same keys."""
    sign = 1 if side == "lower" else -1
    found: list[Form] = []
    for bound in sorted(bounds, key=lambda each: (text_of(each.node()))):
        if not any(_at_most((bound - other) * sign) for other in found):
            found = [x for x in found if not _at_most((x - bound) * sign)] + [bound]
    return frozenset(found)


def _at_most(form: Form) -> bool:
    """Whether a form is 0 at most, whatever its names: a quotient is near what was divided."""
    for term, n in form.terms:
        match term:
            case Term(operator="//", operands=(operand, Number(value=divisor))):
                if n % divisor == 0:
                    # divisor * (x // divisor) is at most x, and more than x - divisor.
                    rest = form - Form.of({term: n}, 0)
                    near = form_of(operand).plus(0 if n > 0 else 1 - divisor)
                    return _at_most(rest + near * (n // divisor))
    return not form.terms and form.constant <= 0


def _merged(pieces: Sequence[Piece], params: Mapping[str, Param]) -> list[Piece]:
    """The union, in the fewest pieces that equal bounds on a side make of it."""
    found: list[Piece] = []
    for piece in pieces:
        for i, other in enumerate(found):
            joint = _joint(piece, other)
            if joint and all(
                direction(each.node(), params) is not None
                for each in joint.lower | joint.upper
            ):
                return _merged(
                    [*found[:i], *found[i + 1 :], joint, *pieces[len(found) + 1 :]],
                    params,
                )
        found.append(piece)
    return found


def _joint(one: Piece, other: Piece) -> Piece | None:
    """One piece for two of which one holds the other, or that begin or end alike."""
    if one.lower <= other.lower and one.upper <= other.upper:
        return one
    if other.lower <= one.lower and other.upper <= one.upper:
        return other
    if one.lower == other.lower:
        return Piece(one.lower, _either(one.upper, other.upper, "max", "min"))
    if one.upper == other.upper:
        return Piece(_either(one.lower, other.lower, "min", "max"), one.upper)
    return None


def _either(
    one: frozenset[Form], other: frozenset[Form], outer: str, inner: str
) -> frozenset[Form]:
    """The bounds of both, and for those that differ a single one that is the looser."""
    common = one & other
    if common in (one, other):
        return common
    sides = [_joined(inner, one - common), _joined(inner, other - common)]
    return common | {form_of(_joined(outer, map(form_of, sides)))}


def _joined(function: str, forms: Iterable[Form]) -> Node:
    nodes = sorted({form.node() for form in forms}, key=text_of)
    return nodes[0] if len(nodes) == 1 else Term(function, tuple(nodes))


def _hull(pieces: Sequence[Piece]) -> Piece:
    """Bounds of all pieces: no key of one is outside."""
    lower = [form_of(_joined("max", each.lower)) for each in pieces]
    upper = [form_of(_joined("min", each.upper)) for each in pieces]
    return Piece(
        frozenset({form_of(_joined("min", lower))}),
        frozenset({form_of(_joined("max", upper))}),
    )
