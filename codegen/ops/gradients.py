# SPDX-License-Identifier: Apache-2.0
"""The gradient of attention by definition in float64, and how far from it a right kernel can be.

With S = scale Q K^T, P = softmax(S), O = P V, dP = dO V^T and D = rowsum(dO * O), a row's own:
dS = P * (dP - D), dQ = scale dS K, dK = scale dS^T Q and dV = P^T dO, where dK and dV sum over the
query heads of a KV head. Shapes are those of `reference`; dO is as O. A row that sees no key adds
nothing and its dQ is 0, and so are dK and dV of a key that no row sees.
With a cap S = cap tanh(scale Q K^T / cap), of which dS has a factor, the slope 1 - (S / cap)^2.

A kernel is given O in 16 bits, whose rounding moves D of a row, and LSE in fp32. It rounds P,
dP - D and dS to 16 bits. These errors are random; fp32's are bounded as those of the forward pass
are (decision 0026).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from .masks import Lengths, Mask
from .reference import (
    BLOCK_SCORES,
    PARTIAL_SIGMAS,
    ROUNDINGS,
    SCORE_ROUNDINGS,
    SCORE_STEP,
    SIGMAS,
    SUM_UNIT,
    Array,
    Bounded,
    Rounding,
    namespace,
    score_unit,
)
from .scores import LAST_PLACE, capped_with_error, float64
from .scores import like as _like

# Of dS to 16 bits: of bf16 a kernel may multiply P and dP - D in 16 bits, and round the product.
# fp16 overflows where dP - D is beyond 65504, so its product is that of fp32.
ROUNDINGS_OF_DS: Final[Mapping[str, int]] = {"bf16": 3, "fp16": 1}
# fp32 flushes smaller numbers, of P above all: many of them are nothing beside this.
LEAST: Final = 2.0**-120
# Natural log: of an error of a score at most, which is beyond all use before.
MOST_ERROR: Final = 80.0
# Keys of a KV tile, whose dQ is one term of a sum in fp16. What 1 stands for there: of the product
# of the largest norms of rows of dO, K and V so much, and at least so much.
KEYS_OF_TERM: Final = 128
LEAST_SCALED: Final = 2.0**-10
# Rows of the largest block; how much longer than its longest row of dO others may be whose scale it
# has.
ROWS_OF_BLOCK: Final = 128
SHORTER: Final = 2.0**7
LEAST_SCALE: Final = 2.0**-60


class Gradients(NamedTuple):
    """dq: as q. dk: as k. dv: as v. All in float64."""

    dq: Array
    dk: Array
    dv: Array


class Truth(NamedTuple):
    """`Gradients` with what each element of a right kernel's result may be off by."""

    dq: Bounded
    dk: Bounded
    dv: Bounded


def gradients(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    *,
    scale: float,
    mask: Mask,
    cap: float | None = None,
    wanted: Array | None = None,
) -> Gradients:
    """The exact gradients. wanted: bool [batch, q, heads] of rows of dQ.

    KV heads of which no row is wanted may be left NaN, which saves the time for them.
    """
    made = Gradients(*(_empty(x) for x in (q, k, v)))
    inputs = _Inputs(q, k, v, dout, scale, mask, cap, wanted)
    for keys in inputs.kv_heads():
        sums = [0.0, 0.0]
        for rows in inputs.rows(keys):
            w, ds = rows.weights, rows.weights * rows.bends * rows.slopes
            made.dq[rows.place] = scale * (ds @ keys.k)
            sums[0] = sums[0] + scale * (ds.swapaxes(0, 1) @ rows.q)
            sums[1] = sums[1] + w.swapaxes(0, 1) @ rows.dout
        made.dk[keys.place], made.dv[keys.place] = sums
    return made


def truth(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    *,
    scale: float,
    mask: Mask,
    dtype: str,
    rounds_p: bool = False,
    half_sums: bool = False,
    strips: int = 1,
    cap: float | None = None,
    wanted: Array | None = None,
) -> Truth:
    """The exact gradients and bounds for a kernel whose O and gradients have the 16-bit ``dtype``.

    O and LSE that it is given are the exact ones, rounded. rounds_p: dS is made of P in 16 bits,
    whatever the type. half_sums: dQ is summed in fp16, of KV tiles of so many strips in turn.
    wanted: as of `gradients`.
    """
    made = Truth(*(Bounded(*(_empty(x) for _ in range(3))) for x in (q, k, v)))
    if half_sums:
        made = made._replace(dq=made.dq._replace(reordered=_empty(q)))
    inputs, xp = _Inputs(q, k, v, dout, scale, mask, cap, wanted), namespace(q)
    of_ds = max(ROUNDINGS_OF_DS[dtype], 2 if rounds_p else 1)
    of = _Rounded(ROUNDINGS[dtype], of_ds)
    for keys in inputs.kv_heads():
        of_k, of_v = _Sums(), _Sums()
        for rows in inputs.rows(keys):
            w, seen = rows.weights, rows.seen
            bent = w * rows.bends
            ds = bent * rows.slopes
            errors = _errors(rows, keys, inputs, of)
            of_q = _Sums()
            of_q.add(ds, errors.of_ds, errors.shift, seen, keys.k)
            # One error of D is that of all keys of a row.
            of_d = xp.abs(bent @ keys.k) + errors.bent @ xp.abs(keys.k)
            of_q.variance = of_q.variance + errors.of_sums * of_d**2
            of_halves = None
            if half_sums:
                longest = inputs.longest_of_rows(keys, *rows.place[1:])
                of_halves = _of_halves(ds, keys, longest, strips)
                of_q.variance = of_q.variance + of_halves
            of_q.put(made.dq, rows.place, inputs.scale, keys.k.shape[0], of.unit)
            if of_halves is not None and made.dq.reordered is not None:
                moved = 2 * SIGMAS * inputs.scale * xp.sqrt(of_halves)
                made.dq.reordered[rows.place] = moved
            of_pairs = errors.of_ds + errors.of_sums * (bent + errors.bent) ** 2
            of_k.add(*_turned(ds, of_pairs, errors.shift, seen), rows.q)
            of_v.add(*_turned(w, errors.of_p, errors.shift_of_p, seen), rows.dout)
        count = q.shape[1] * inputs.group
        least = (
            LEAST * max(1.0, LEAST_SCALED * inputs.longest(keys))
            if half_sums
            else LEAST
        )
        of_k.put(made.dk, keys.place, inputs.scale, count, of.unit, least)
        of_v.put(made.dv, keys.place, 1.0, count, of.unit, least)
    return made


_Four = tuple[Array, Array, Array, Array]


def _turned(exact: Array, variance: Array, shift: Array, seen: Array) -> _Four:
    exact, variance = exact.swapaxes(0, 1), variance.swapaxes(0, 1)
    return exact, variance, shift.swapaxes(0, 1), seen.swapaxes(0, 1)


class _Rounded(NamedTuple):
    """To 16 bits: its unit, and how often dS is."""

    unit: Rounding
    of_ds: int


class _Keys(NamedTuple):
    """Of one KV head: k [kv, d_qk], v [kv, d_v], and where dK and dV go."""

    batch: int
    head: int
    k: Array
    v: Array
    place: tuple[Any, ...]


class _Rows(NamedTuple):
    """Some rows of a query head: q [rows, d_qk], dout and out [rows, d_v], lse and sums [rows, 1],
    the others [rows, kv].
    """

    q: Array
    dout: Array
    out: Array
    lse: Array  # -inf where there is no key
    sums: Array  # D
    seen: Array  # 1.0 or 0.0
    products: Array  # scale Q K^T
    weights: Array  # P
    bends: Array  # of S by these products: 1.0 without a cap
    slopes: Array  # dP - D
    place: tuple[Any, ...]


@dataclass(frozen=True)
class _Inputs:
    """Of a call."""

    q: Array
    k: Array
    v: Array
    dout: Array
    scale: float
    mask: Mask
    cap: float | None
    wanted: Array | None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return int(self.q.shape[2] // self.k.shape[2])

    def longest(self, keys: _Keys) -> float:
        """The largest norms of rows of dO, of all query heads, K and V, multiplied."""
        group = slice(keys.head * self.group, (keys.head + 1) * self.group)
        dout = float64(self.dout[keys.batch, :, group])
        largest = (float((x * x).sum(-1).max()) for x in (dout, keys.k, keys.v))
        return math.sqrt(math.prod(largest))

    def longest_of_rows(self, keys: _Keys, some: slice, head: int) -> Array:
        """The same for the scale of each of some rows, [rows, 1]: no more than SHORTER times as
        long as with the longest row of dO in their block.
        """
        dout, xp = float64(self.dout[keys.batch, :, head]), namespace(self.q)
        squares = (dout * dout).sum(-1)
        of_rows = _like(0.0, squares) * squares
        for begin in range(0, dout.shape[0], ROWS_OF_BLOCK):
            block = slice(begin, begin + ROWS_OF_BLOCK)
            of_rows[block] = squares[block].max()
        of_keys = [float((x * x).sum(-1).max()) for x in (keys.k, keys.v)]
        of_rows = SHORTER * xp.sqrt(of_rows[some, None] * math.prod(of_keys))
        return xp.minimum(of_rows, _like(self.longest(keys), of_rows))

    def kv_heads(self) -> Iterator[_Keys]:
        """KV heads of which some row is wanted."""
        for batch in range(self.q.shape[0]):
            for head in range(self.k.shape[2]):
                heads = slice(head * self.group, (head + 1) * self.group)
                wanted = self.wanted
                if wanted is not None and not bool(wanted[batch, :, heads].any()):
                    continue
                place = (batch, slice(None), head)
                k, v = float64(self.k[place]), float64(self.v[place])
                yield _Keys(batch, head, k, v, place)

    def rows(self, keys: _Keys) -> Iterator[_Rows]:
        """All rows of all query heads of a KV head."""
        q_len, kv_len = self.q.shape[1], self.k.shape[1]
        lengths = Lengths(q_len, kv_len)
        step = max(1, BLOCK_SCORES[namespace(self.q).__name__] // kv_len)
        for head in range(keys.head * self.group, (keys.head + 1) * self.group):
            mask = self.mask.at(keys.batch, head, keys.head)
            for start in range(0, q_len, step):
                some = slice(start, min(start + step, q_len))
                seen = mask.visible(np.arange(q_len)[some], lengths)
                yield self._some(keys, (keys.batch, some, head), seen)

    def _some(self, keys: _Keys, place: tuple[Any, ...], visible: Any) -> _Rows:
        xp = namespace(self.q)
        q, dout = float64(self.q[place]), float64(self.dout[place])
        products = (q @ keys.k.swapaxes(0, 1)) * self.scale
        scores, bends = products, _like(1.0, products)
        if self.cap is not None:
            tangents = xp.tanh(products / self.cap)
            scores, bends = self.cap * tangents, 1.0 - tangents * tangents
        seen = _like(visible, scores) * _like(1.0, scores)
        scores = xp.where(seen > 0, scores, _like(-math.inf, scores))
        largest = xp.amax(scores, -1, keepdims=True)
        shift = xp.where(largest == -math.inf, _like(0.0, scores), largest)
        weights = xp.exp(scores - shift)
        total = weights.sum(-1, keepdims=True)
        divisor = xp.where(total > 0, total, _like(1.0, total))
        weights = weights / divisor
        lse = largest + xp.log(divisor)
        out = weights @ keys.v
        sums = (dout * out).sum(-1, keepdims=True)
        slopes = dout @ keys.v.swapaxes(0, 1) - sums
        of_scores = (products, weights, bends, slopes)
        return _Rows(q, dout, out, lse, sums, seen, *of_scores, place)


class _Errors(NamedTuple):
    """[rows, kv]: variances of dS and of P in 16 bits, and what fp32 may make of them, to one side.

    of_sums: the variance of D, by O's rounding, [rows, 1]. bent: of P times what a cap leaves of a
    slope, which D's error is multiplied by.
    """

    of_ds: Array
    of_p: Array
    of_sums: Array
    shift: Array
    shift_of_p: Array
    bent: Array


def _errors(rows: _Rows, keys: _Keys, inputs: _Inputs, of: _Rounded) -> _Errors:
    xp, w, x = namespace(rows.q), rows.weights, rows.slopes
    lse = xp.where(rows.lse > -math.inf, rows.lse, _like(0.0, rows.lse))
    unit = score_unit(rows.q.shape[-1])
    partial = inputs.scale * _partial(rows.q, keys.k)
    if inputs.cap is None:
        # A score may start at -LSE, and dP at -D, in accumulators to which products are added.
        error = unit * (partial + xp.abs(lse)) + SUM_UNIT
        of_bend = _like(0.0, error)
    else:
        moved = capped_with_error(rows.products, unit * partial, inputs.cap)[1]
        error = moved + SCORE_ROUNDINGS * LAST_PLACE * xp.abs(lse) + SUM_UNIT
        tangents, moved = xp.sqrt(1.0 - rows.bends), moved / inputs.cap
        of_bend = (2.0 * tangents + moved) * moved + 2.0 * LAST_PLACE
    error = xp.where(error < MOST_ERROR, error, _like(MOST_ERROR, error))
    factor = xp.expm1(error)
    elements = rows.dout.shape[-1]
    partial = _partial(rows.dout, keys.v) + xp.abs(rows.sums)
    of_x = score_unit(elements) * partial
    added = xp.abs(rows.dout * rows.out).sum(-1, keepdims=True)
    of_x = of_x + elements * LAST_PLACE * added
    # An error that is uniform in [-unit, unit] has the variance unit^2 / 3.
    u, floor = of.unit.unit**2 / 3, of.unit.floor**2 / 3
    ds = w * rows.bends * x
    of_ds = of.of_ds * u * ds * ds + floor * rows.seen
    if of.of_ds > 1:
        of_ds = of_ds + floor * x * x * rows.seen
    rounded = u * rows.out * rows.out + floor
    return _Errors(
        of_ds,
        u * w * w + floor * rows.seen,
        (rows.dout * rows.dout * rounded).sum(-1, keepdims=True),
        w
        * (
            rows.bends * (xp.abs(x) * factor + (1.0 + factor) * of_x)
            + (1.0 + factor) * (xp.abs(x) + of_x) * of_bend
        ),
        w * factor,
        (1.0 + factor) * w * of_bend,
    )


def in_strips(tiles: int, strips: int) -> list[int]:
    """The order of a head's KV tiles where so many strips of neighbours, the first ones by a tile
    longer, take turns; of one strip, rising.
    """
    each, longer = divmod(tiles, strips)
    of_turns = (divmod(turn, strips) for turn in range(tiles))
    return [strip * each + min(strip, longer) + place for place, strip in of_turns]


def _of_halves(ds: Array, keys: _Keys, longest: Array, strips: int) -> Array:
    """The variance of dQ by sums in fp16, whose terms are of KV tiles, as of a row's sums.

    longest: see `_Inputs.longest_of_rows`. Terms are scaled by it and rounded, as each sum is: of
    tiles in their order, that turned round, or a random one, whose sums are those and random
    besides.
    """
    xp, half, count = namespace(ds), ROUNDINGS["fp16"], keys.k.shape[0]
    partial, largest, squares, added = 0.0 * (ds @ keys.k), 0.0, 0.0, 0
    sums = []
    for tile in in_strips(math.ceil(count / KEYS_OF_TERM), strips):
        some = slice(tile * KEYS_OF_TERM, (tile + 1) * KEYS_OF_TERM)
        term = ds[:, some] @ keys.k[some]
        partial, squares, added = partial + term, squares + term * term, added + 1
        sums.append(partial)
    for each in sums:
        of_both = xp.maximum(xp.abs(each), xp.abs(partial - each))
        largest = xp.maximum(of_both, _like(largest, of_both))
    step = half.floor * xp.maximum(LEAST_SCALED * longest, _like(LEAST_SCALE, longest))
    squared = largest * largest + squares
    return ((added + 1) * half.unit**2 * squared + added * step * step) / 3


class _Sums:
    """Of products with rows of a factor: [rows of the result, elements]."""

    def __init__(self) -> None:
        self.exact: Array = 0.0
        self.variance: Array = 0.0
        self.shift: Array = 0.0
        self.squares: Array = 0.0
        self.sizes: Array = 0.0
        self.seen: Array = 0.0

    def add(
        self,
        exact: Array,
        variance: Array,
        shift: Array,
        seen: Array,
        factor: Array,
    ) -> None:
        """All but the last: [rows, terms]; factor: [terms, elements]."""
        squared, size = factor * factor, namespace(factor).abs(factor)
        self.exact = self.exact + exact @ factor
        self.variance = self.variance + variance @ squared
        self.shift = self.shift + shift @ size
        self.squares = self.squares + (exact * exact) @ squared
        self.sizes = self.sizes + seen @ size
        self.seen = self.seen + seen.sum(-1, keepdims=True)

    def put(
        self,
        made: Bounded,
        place: tuple[Any, ...],
        scale: float,
        terms: int,
        of: Rounding,
        least: float = LEAST,
    ) -> None:
        """The result of so many terms, scaled and rounded to 16 bits. least: of a P that counts."""
        xp = namespace(self.exact)
        exact = scale * self.exact
        there = xp.where(self.seen > 0, _like(1.0, exact), _like(0.0, exact))
        variance = scale * scale * self.variance
        variance = variance + (of.unit**2 * exact * exact + of.floor**2) / 3
        # Sums in fp32, each of which loses a last place of what there is by then.
        partial = xp.abs(exact) + PARTIAL_SIGMAS * scale * xp.sqrt(self.squares)
        steps = math.ceil(terms / SCORE_STEP) + 1
        shift = scale * self.shift + steps * LAST_PLACE * partial
        shift = shift + least * (1.0 + scale * self.sizes)
        made.exact[place] = exact
        made.rms[place] = xp.sqrt(variance) * there
        made.shift[place] = shift * there


def _partial(a: Array, b: Array) -> Array:
    """Of the products of rows, how large a sum of some of their terms may be."""
    xp, turned = namespace(a), b.swapaxes(0, 1)
    deviations = xp.sqrt((a * a) @ (turned * turned))
    return xp.abs(a @ turned) + PARTIAL_SIGMAS * deviations


def _empty(x: Array) -> Array:
    """NaN in float64, as large as a tensor and where it is."""
    xp = namespace(x)
    options = {"device": x.device} if xp.__name__ == "torch" else {}
    return xp.full(tuple(x.shape), math.nan, dtype=xp.float64, **options)
