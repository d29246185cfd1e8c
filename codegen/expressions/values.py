# SPDX-License-Identifier: Apache-2.0
"""The value of an expression over arrays of integers, and the range that it cannot leave."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .language import (
    INT32,
    NAMES,
    ExpressionError,
    Name,
    Node,
    Number,
    Param,
    Range,
    Term,
    text_of,
)

Values = Mapping[str, ArrayLike]

_COMPUTE: Final[Mapping[str, Callable[..., Any]]] = {
    **{"+": operator.add, "*": operator.mul, "//": np.floor_divide, "%": np.mod},
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"==": operator.eq, "!=": operator.ne, "not": np.logical_not, "abs": np.abs},
    "and": lambda *each: reduce(np.logical_and, each),
    "or": lambda *each: reduce(np.logical_or, each),
    "min": lambda *each: reduce(np.minimum, each),
    "max": lambda *each: reduce(np.maximum, each),
    "-": lambda first, *others: first - others[0] if others else -first,
}


def evaluate(node: Node, values: Values) -> NDArray[Any]:
    """Return the value for names that are integers or arrays, which are broadcast.

    A tensor of params is an array by its axes, indexed by the values of their names.
    """
    match node:
        case Number(value=value):
            return np.asarray(value, np.int64)
        case Name(name=name, axes=axes):
            found = np.asarray(values[name], np.int64)
            return (
                found[tuple(np.asarray(values[axis]) for axis in axes)]
                if axes
                else found
            )
        case Term(operator=sign, operands=operands):
            return np.asarray(
                _COMPUTE[sign](*(evaluate(each, values) for each in operands))
            )
    raise TypeError(f"{text_of(node)} is no whole number")


def check_range(node: Node, params: Mapping[str, Param]) -> Range:
    """Return the least and greatest value of an integer, or (0, 1) of a truth value.

    Raises ExpressionError where a subterm may leave 32 bits. Sound, and exact for forms that read
    each name once. A real number has no range: (0, 0).
    """
    match node:
        case Number(value=value):
            return value, value
        case Name(name=name, type="int"):
            return params[name].range if name in params else NAMES[name][1]
        case Term(operator=sign, operands=operands):
            ranges = [check_range(each, params) for each in operands]
            if node.type == "real":
                return 0, 0
            found = _range(sign, ranges)
            if node.type == "truth":
                return 0, 1
            for value in found:
                if not INT32[0] <= value <= INT32[1]:
                    message = (
                        f"{text_of(node)} may be {value}, which 32 bits do not hold"
                    )
                    raise ExpressionError("FG216", node.column, message)
            return found
    return 0, 0


def _range(sign: str, ranges: list[Range]) -> Range:
    (low, high), *others = ranges
    if sign == "-" and not others:
        return -high, -low
    if sign == "abs":
        return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(
            abs(low), abs(high)
        )
    if sign in ("min", "max"):
        pick = min if sign == "min" else max
        return pick(each[0] for each in ranges), pick(each[1] for each in ranges)
    if sign == "%":
        divisor = others[0][0]
        same = low // divisor == high // divisor
        return (low % divisor, high % divisor) if same else (0, divisor - 1)
    if sign in ("+", "-", "*", "//"):
        compute = _COMPUTE[sign]
        found = [int(compute(a, b)) for a in (low, high) for b in others[0]]
        return min(found), max(found)
    return 0, 1
