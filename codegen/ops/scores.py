# SPDX-License-Identifier: Apache-2.0
"""The score of a query and a key as a spec says it, over arrays of NumPy or PyTorch in float64.

A score is an expression over ``s``, the scaled product of both, their places, their head and
tensors of the call (`fmha_gen.expressions`). Each subterm has the error that a kernel's fp32 makes
of it at most, from which the bounds of the reference follow.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..expressions.language import (
    NAMES,
    Name,
    Node,
    Number,
    Param,
    Real,
    Term,
    parse,
    text_of,
    walk,
)
from ..expressions.scores import Parts, S, parts_of
from . import params
from .masks import Lengths

Array = Any  # numpy.ndarray or torch.Tensor

LAST_PLACE: Final = 2.0**-23
# Of tanh.approx, and of the exponent that a capped score is turned into: fp32 rounds it, at most
# twice the cap in either direction, and the cap's product with log2(e).
TANH_UNIT: Final = 2.0**-11
CAP_UNIT: Final = 2.0**-22

ALIBI: Final = parse(
    "s + slopes[h] * (kv - q)", {"slopes": Param(("h",), type="real")}, type="real"
)
BIAS: Final = Term("+", (S, Name("bias", ("b", "h", "row", "kv"), type="real")))


class Place(NamedTuple):
    """The queries and keys of some scores, [heads, rows, keys].

    heads, of queries, and rows: numbers. group: query heads per KV head. tensors: by name, those
    that the score reads, with the axes of the call.
    """

    batch: int
    heads: NDArray[Any]
    rows: NDArray[Any]
    keys: NDArray[Any]
    group: int
    lengths: Lengths
    tensors: Mapping[str, Array]


@dataclass(frozen=True)
class Score:
    """What a score is. tree: over ``s``."""

    tree: Node = S
    parts: Parts = field(init=False)

    def __post_init__(self) -> None:
        """Find the parts."""
        object.__setattr__(self, "parts", parts_of(self.tree))

    @property
    def cap(self) -> float | None:
        """N of ``softcap(s, N)``; None of others."""
        match self.tree:
            case Term("softcap", (inner, Number(value) | Real(value))) if inner == S:
                return float(value)
        return None

    @property
    def tensors(self) -> set[str]:
        """The names of tensors and numbers of a call that it reads."""
        read = (x for x in walk(self.tree) if isinstance(x, Name) and x != S)
        return {x.name for x in read if x.axes or x.name not in NAMES}

    def value(self, products: Array, place: Place) -> Array:
        """Return the scores of ``s``, the products: float64 [heads, rows, keys]."""
        return products if self.tree == S else self.with_error(products, None, place)[0]

    def with_error(
        self, products: Array, error: Array | None, place: Place
    ) -> tuple[Array, Array]:
        """Return scores, and what they may be off by where the products are by ``error``."""
        whole = namespace(products).zeros_like(products)
        found = _Values(products, whole if error is None else error, place).of(
            self.tree
        )
        return found[0] + whole, found[1] + whole


class _Values:
    """Values and errors of the subterms of a score."""

    def __init__(self, products: Array, error: Array, place: Place) -> None:
        self.xp, self.products, self.error, self.place = (
            namespace(products),
            products,
            error,
            place,
        )

    def of(self, node: Node) -> tuple[Array, Array]:
        """Return a number's value and error; a truth value's error is 0."""
        zero = like(0.0, self.products)
        match node:
            case Number(value=value) | Real(value=value):
                return like(float(value), self.products), zero
            case Name():
                return (
                    (self.products, self.error)
                    if node == S
                    else (self.named(node), zero)
                )
            case Term(operator=operator, operands=operands):
                return self.term(operator, [self.of(each) for each in operands])

    def term(
        self, sign: str, operands: list[tuple[Array, Array]]
    ) -> tuple[Array, Array]:
        xp, (a, e) = self.xp, operands[0]
        values, errors = zip(*operands, strict=True)
        zero = like(0.0, self.products)
        match sign, values:
            case "-", (_,):
                return -a, e
            case "+" | "-", (_, b):
                rounding = LAST_PLACE * (xp.abs(a) + xp.abs(b))
                return (a + b if sign == "+" else a - b), e + errors[1] + rounding
            case "*", (_, b):
                f = errors[1]
                return a * b, xp.abs(a) * f + xp.abs(
                    b
                ) * e + e * f + LAST_PLACE * xp.abs(a * b)
            case "/", (_, b):
                return a / b, e / b + 2 * LAST_PLACE * xp.abs(a / b)
            case "tanh", _:
                return capped_with_error(a, e, like(1.0, a), 0.0)
            case "softcap", (_, b):
                return capped_with_error(a, e, b)
            case "where", (_, b, c):
                return xp.where(a, b, c), xp.where(a, errors[1], errors[2])
            case "min" | "max", _:
                pick = xp.minimum if sign == "min" else xp.maximum
                return reduce(pick, values), reduce(xp.maximum, errors)
            case "abs", _:
                return xp.abs(a), e
            case "not", _:
                return ~a, zero
            case "and", _:
                return reduce(lambda x, y: x & y, values), zero
            case "or", _:
                return reduce(lambda x, y: x | y, values), zero
            case "//", (_, b):
                return a // b, zero
            case "%", (_, b):
                return a % b, zero
            case _, (_, b):
                return _COMPARE[sign](a, b), zero
        raise AssertionError(sign)

    def named(self, node: Name) -> Array:
        """An axis, a length or a tensor, as [heads, rows, keys] has it."""
        at, (q_len, kv_len) = self.place, self.place.lengths
        rows, heads = at.rows[:, None], at.heads[:, None, None]
        known = {
            **{
                "row": rows,
                "q": rows + kv_len - q_len,
                "kv": at.keys,
                "b": np.asarray(at.batch),
            },
            **{"h": heads, "h_kv": heads // at.group},
            **{"seqlen_q": np.asarray(q_len), "seqlen_kv": np.asarray(kv_len)},
        }
        if node.axes:
            tensor = at.tensors[node.name]
            return float64(
                tensor[
                    tuple(
                        known[axis] if size > 1 else np.zeros_like(known[axis])
                        for axis, size in zip(node.axes, tensor.shape, strict=True)
                    )
                ]
            )
        return like(
            known[node.name] if node.name in known else at.tensors[node.name],
            self.products,
        )


_COMPARE: Final[Mapping[str, Any]] = {
    **{"<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b},
    **{">=": lambda a, b: a >= b, "==": lambda a, b: a == b, "!=": lambda a, b: a != b},
}
PLAIN: Final = Score()


def capped(cap: float | None) -> Score:
    """Return the score that a softcap makes; None: s itself."""
    return PLAIN if cap is None else Score(Term("softcap", (S, Real(float(cap)))))


def of_text(text: str, known: Mapping[str, Param] | None = None) -> Score:
    """Return the score of an expression; known: params that it may read. Raises ExpressionError."""
    return _of_text(text, (*(known or {}).items(),))


@cache
def _of_text(text: str, known: tuple[tuple[str, Param], ...]) -> Score:
    return Score(parse(text, dict(known), type="real"))


def bias_of(spec: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the shape and the element type of a SPEC's bias; None where it has none."""
    bias: Mapping[str, Any] | None = spec.get("bias")
    return None if bias is None or bias["dtype"] == "none" else bias


def of_spec(spec: Mapping[str, Any]) -> Score:
    """Return the score of a SPEC: of the one field that it has for it, else s itself."""
    if bias_of(spec):
        return Score(BIAS)
    if spec.get("alibi"):
        return Score(ALIBI)
    if (text := spec.get("score", "none")) != "none":
        return of_text(text, params.of_scores(spec))
    cap = spec.get("softcap", "none")
    return PLAIN if cap == "none" else capped(cap)


def word_of(spec: Mapping[str, Any]) -> str:
    """Return what the score of a SPEC is called; nothing for s itself."""
    score = of_spec(spec)
    if score.cap is not None:
        return f"softcap {score.cap:g}"
    if spec.get("alibi"):
        return "ALiBi"
    if bias := bias_of(spec):
        return f"{bias['dtype']} bias [{', '.join(map(str, bias['shape']))}]"
    return "" if score is PLAIN else f"score {text_of(score.tree)}"


def capped_with_error(
    products: Array, error: Array, cap: Array | float, unit: float = CAP_UNIT
) -> tuple[Array, Array]:
    """cap * tanh(products / cap), and its error where the products are off by ``error``.

    unit: of the cap, what is lost where the exponent is made.
    """
    xp = namespace(products)
    signs = (-1, 0, 1)
    low, middle, high = (cap * xp.tanh((products + s * error) / cap) for s in signs)
    moved = xp.where(high - middle > middle - low, high - middle, middle - low)
    return middle, moved + TANH_UNIT * xp.abs(middle) + unit * cap


def namespace(x: Array) -> ModuleType:
    """Return the module that has the functions of an array: numpy or torch."""
    return importlib.import_module(type(x).__module__.partition(".")[0])


def float64(x: Array) -> Array:
    """Return an array in float64, where it is."""
    return x.astype(np.float64) if isinstance(x, np.ndarray) else x.double()


def like(value: Any, x: Array) -> Array:
    """Return a number or a NumPy array as float64, where x is."""
    return (
        np.asarray(value, np.float64)
        if isinstance(x, np.ndarray | np.generic)
        else x.new_tensor(value)
    )
