# SPDX-License-Identifier: Apache-2.0
"""Attention by definition in float64, and how far from it a right kernel can be.

One text for NumPy and for PyTorch, whose functions agree in all that is used here: the emulator
and the GPU are held against the same truth. Shapes: q [batch, q, heads, qk], k [batch, kv,
kv_heads, qk], v [batch, kv, kv_heads, v]; heads is a multiple of kv_heads. A row whose keys all
score -inf, or that sees none, has O = 0 and LSE = -inf.

A score may be -inf, and NaN or infinite where the mask hides the key.

A sink, [heads] in natural logarithms, is the score of one more key of every row of its head, whose
V is 0: a row that sees no other key has O = 0 and LSE = sink. With +inf all rows have O = 0.

What a kernel may be off by is derived in decision 0026. P and O are rounded to 16 bits; scores and
sums have fp32's errors, and scores under a softcap those of `tanh.approx` (decision 0041). In e4m3
the tensor cores cut sums off after 13 bits, and P is held against its definition as well (decisions
0057 and 0058).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .lists import Lists
from .masks import Lengths, Mask
from .scores import LAST_PLACE, PLAIN, Place, Score, float64
from .scores import Array as Array
from .scores import like as _like
from .scores import namespace as namespace

# Scores held at once; a few copies of them exist.
BLOCK_SCORES: Mapping[str, int] = {"numpy": 2**21, "torch": 2**24}

# An element's rounding errors are independent and each at most `unit` of its term: Hoeffding's
# inequality gives 2 exp(-SIGMAS^2 / 2) = 3e-14 for the chance that their sum is larger than this
# many of its standard deviations. A run has 10^6 elements, all validations together 10^11.
SIGMAS = 8.0
# Of fp32 scores. A product of head_dim terms is accumulated in steps of 16 with truncation, each of
# which loses at most a last place of a partial sum, and that is at most |q| |k|. Four more are lost
# where the score is scaled, the scale is rounded, and the reference is, in two blocks.
SCORE_STEP = 16
SCORE_ROUNDINGS = 4
# Of fp32 sums: ex2.approx and lg2.approx are good to 2^-22, and a thread adds a quarter of a row.
SUM_UNIT = 2.0**-21
ADD_UNIT = 2.0**-26
LSE_UNIT = 2.0**-22
EXPONENT_UNIT = (
    2.0**-22
)  # of a score and its row's largest, whose difference is an exponent
NO_WEIGHT = -1000.0  # natural log: of a key that adds nothing to a row
SINK_UNIT = 2.0**-22  # of a sink, by its scaling and the difference to the reference
LEAST_FACTOR = 2.0**-126  # of O, in fp32: what a sum above its inverse makes of P is 0
RESCALE_SLACK = 8  # log2: of P at most, where rows have references
POLYNOMIAL_ERROR = 1.1e-4  # of exp2, beyond that: of degree 3


@dataclass(frozen=True)
class Rounding:
    """Of a 16-bit type. unit: half a last place of 1. floor: half the smallest number above 0."""

    unit: float
    floor: float


ROUNDINGS: Mapping[str, Rounding] = {
    "bf16": Rounding(2.0**-8, 2.0**-134),
    "fp16": Rounding(2.0**-11, 2.0**-25),
    "e4m3": Rounding(2.0**-4, 2.0**-10),
}

# Of e4m3. P of a row's reference is 2^P_OFFSET, and the largest of a row up to 2^P_SLACK more: of
# what P has by definition these are the references, in powers of two below the row's largest score.
P_OFFSET = 8
P_SLACK = 0.8
REFERENCES = (0.0, 0.2, 0.4, 0.6, 0.8)
FIRST_HEADROOM = (
    2  # of a tile's first reference, which may be its last: P is that much less
)
# Where P's code is a straight line between powers of two, P is off by 2^-4 either way at most, and
# by 2^-5 on average; below 2^-6, where codes are numbers, by four of the least (`exp: linear`).
# A line of fp16, of which e4m3 is rounded, has these numbers right (`exp: linear16`).
LINEAR_ERROR = 2.0**-5
LINEAR_FLOOR = 2.0**-7
LEAST_EXPONENT = -6  # of a normal number
MANTISSA_BITS = 3
# A wgmma of 8 bits cuts each product off after 13 bits of the largest addend, which is the partial
# sum before long. Partial sums are that many of their standard deviations, beside the whole one.
CUT_OFF_UNIT = 2.0**-13
PARTIAL_SIGMAS = 3.0
FLUSHED_KEYS = 256  # after which sums of O go on in fp32
STEPS_OF_PRODUCTS = 1.0 / 16  # half a unit for each of 32 products, or one for all
LITTLE = 0.1  # of an error in a score, of which exp is nearly linear


class Attention(NamedTuple):
    """``out``: [batch, q, heads, v]. ``lse``: [batch, heads, q], natural logarithm."""

    out: Array
    lse: Array


class Bounded(NamedTuple):
    """An output with what its elements may be off by: [batch, rows, heads, elements].

    exact: in float64, NaN where nobody asked. rms: the standard deviation of the random error of a
    right kernel at most; shift: its largest error by scores and sums; both are 0 where only the
    exact value is right. defined: the mean square error by definition, where that is another one
    than rms's square. reordered: how far sums in fp16 may move it in another order, beside shift.
    """

    exact: Array
    rms: Array
    shift: Array
    defined: Array | None = None
    reordered: Array | None = None

    @property
    def bound(self) -> Array:
        """The largest error of each element."""
        return SIGMAS * self.rms + self.shift


class Truth(NamedTuple):
    """`Attention` with what each element of a right kernel's result may be off by.

    rms: as out, the standard deviation of its random error at most; shift: as out, the largest
    error by scores and sums; both are 0 where only the exact value is right. lse_bound: as lse.
    defined: as out, the mean square error of O by definition: exact scores and sums, P rounded, O
    rounded. Of P in 16 bits it is rms's square.
    """

    out: Array
    lse: Array
    rms: Array
    shift: Array
    lse_bound: Array
    defined: Array

    @property
    def rows(self) -> Bounded:
        """O with its bounds."""
        return Bounded(self.out, self.rms, self.shift, self.defined)

    @property
    def out_bound(self) -> Array:
        """The largest error of each element of out."""
        return self.rows.bound


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    mask: Mask,
    score: Score = PLAIN,
    tensors: Mapping[str, Array] | None = None,
    sink: Array | None = None,
    lists: Lists | None = None,
    wanted: Array | None = None,
) -> Attention:
    """The two results in float64. tensors: those that the score reads, by name.

    lists: the blocks whose keys are seen, all of them or those that the mask leaves. wanted: bool
    [batch, q, heads]; other rows may be left NaN, which saves the time for them.
    """
    out, lse = _empty(q, k, v, 2)
    options: dict[str, Any] = {"scale": scale, "mask": mask, "score": score}
    options |= {"tensors": tensors, "sink": sink, "lists": lists, "wanted": wanted}
    for place, rows, keys in _blocks(q, k, v, **options):
        out[place.out], lse[place.lse] = _out(rows, keys), _lse(rows)
    return Attention(out, lse)


def truth(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    mask: Mask,
    dtype: str,
    score: Score = PLAIN,
    tensors: Mapping[str, Array] | None = None,
    sink: Array | None = None,
    lists: Lists | None = None,
    dtype_of_p: str | None = None,
    exp: str = "exact",
    exp_error: float = 0.0,
    wanted: Array | None = None,
) -> Truth:
    """Results and bounds for a kernel whose O has the 16-bit ``dtype``.

    dtype_of_p: of Q, K, V and P, if not the same: e4m3. exp: of P in e4m3, the spec's; linear
    and linear16 are straight lines between powers of two. exp_error: of exp2, relative, beyond the
    hardware's: POLYNOMIAL_ERROR where a kernel has one. wanted: bool [batch, q, heads]; other rows
    may be left NaN, which saves the time for them.
    """
    of_o, of_p = ROUNDINGS[dtype], ROUNDINGS[dtype_of_p or dtype]
    in_8_bits = dtype_of_p == "e4m3"
    if exp != "exact":
        exp_error = LINEAR_ERROR
    if exp == "linear":
        of_p = replace(of_p, floor=LINEAR_FLOOR)
    made = _empty(q, k, v, 6)
    options: dict[str, Any] = {"scale": scale, "mask": mask, "score": score}
    options |= {"tensors": tensors, "sink": sink, "lists": lists, "wanted": wanted}
    for place, rows, keys in _blocks(q, k, v, **options):
        out, lse = _out(rows, keys), _lse(rows)
        roundings = _Roundings(of_o, of_p, in_8_bits)
        errors = _errors(rows, keys, out, lse, roundings, scale, score, exp_error)
        rms, shift, lse_bound = errors
        defined = rms * rms
        if in_8_bits:
            defined = _by_definition(rows, keys, out, of_o)
        found = out, lse, rms, shift, lse_bound, defined
        for array, values in zip(made, found, strict=True):
            array[place.out if array.ndim == 4 else place.lse] = values
    return Truth(*made)


class _Roundings(NamedTuple):
    """Of O and of P, and whether the products are of e4m3."""

    o: Rounding
    p: Rounding
    in_8_bits: bool


def score_unit(head_dim: int) -> float:
    """The largest error of a fp32 score over |q| |k| and the scale."""
    return (math.ceil(head_dim / SCORE_STEP) + SCORE_ROUNDINGS) * LAST_PLACE


class _Keys(NamedTuple):
    """Of one KV head, float64: [kv, d]; v has a row more, of zeros, where there are sinks."""

    k: Array
    v: Array


class _Rows(NamedTuple):
    """Some query rows of the heads that share a KV head: q [heads, rows, d], the others
    [heads, rows, kv] or, of a row, [heads, rows, 1]. weights sum to 1 where total is above 0.
    Of kv the last is the sink where there are sinks, [heads, 1, 1].
    """

    q: Array
    products: Array  # scale * q k, of which scores are made
    place: Place
    weights: Array
    logs: Array  # of the weights: those that float64 cannot hold are 0, but not far from others
    total: Array  # of exp(score - largest)
    largest: Array  # score, -inf where there is none
    sink: Array | None


class _Results(NamedTuple):
    """Where the results of some rows go."""

    out: tuple[Any, ...]
    lse: tuple[Any, ...]


def _empty(q: Array, k: Array, v: Array, count: int) -> list[Array]:
    """NaN for O, LSE, and then what else is of O's shape but the last, which is of LSE's."""
    xp = namespace(q)
    batch, q_len, heads, _ = q.shape
    shapes = [(batch, q_len, heads, v.shape[-1]), (batch, heads, q_len)]
    shapes += [shapes[0], shapes[0], shapes[1], shapes[0]]
    options = {"device": q.device} if xp.__name__ == "torch" else {}
    return [xp.full(s, math.nan, dtype=xp.float64, **options) for s in shapes[:count]]


def _blocks(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    mask: Mask,
    score: Score,
    tensors: Mapping[str, Array] | None,
    sink: Array | None = None,
    lists: Lists | None = None,
    wanted: Array | None = None,
) -> Iterator[tuple[_Results, _Rows, _Keys]]:
    xp = namespace(q)
    batch, q_len, heads, _ = q.shape
    kv_len, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    step = max(1, BLOCK_SCORES[xp.__name__] // (group * kv_len))
    for b in range(batch):
        for kv_head in range(kv_heads):
            shared = slice(kv_head * group, (kv_head + 1) * group)
            keys = _Keys(float64(k[b, :, kv_head]), float64(v[b, :, kv_head]))
            of_sink = None
            if sink is not None:
                of_sink = float64(sink[shared])[:, None, None]
                no_value = xp.zeros_like(keys.v[:1])
                keys = keys._replace(v=xp.concatenate((keys.v, no_value)))
            for start in range(0, q_len, step):
                some = slice(start, min(start + step, q_len))
                if wanted is not None and not bool(wanted[b, some, shared].any()):
                    continue
                queries = float64(q[b, some, shared]).swapaxes(0, 1)
                products = (queries @ keys.k.swapaxes(0, 1)) * scale
                lengths, at = Lengths(q_len, kv_len), np.arange(q_len)[some]
                of_group = np.arange(heads)[shared]
                place = Place(
                    *(b, of_group, at, np.arange(kv_len), group, lengths),
                    tensors=tensors or {},
                )
                scores = score.value(products, place)
                if mask.reads("h"):
                    seen = np.stack(
                        [mask.at(b, h, kv_head).visible(at, lengths) for h in of_group]
                    )
                else:
                    seen = mask.at(b, shared.start, kv_head).visible(at, lengths)
                if lists is not None:
                    seen = lists.visible(seen, b, shared, at)
                if not seen.all():
                    seen = _like(seen, scores)
                    scores = xp.where(seen > 0, scores, _like(-math.inf, scores))
                if of_sink is not None:
                    endless = of_sink == math.inf  # beside it no key counts
                    scores = xp.where(endless, _like(-math.inf, scores), scores)
                    logit = xp.where(endless, _like(0.0, scores), of_sink)
                    column = logit + xp.zeros_like(scores[..., :1])
                    scores = xp.concatenate((scores, column), -1)
                largest = xp.amax(scores, -1, keepdims=True)
                shift = xp.where(largest == -math.inf, _like(0.0, scores), largest)
                weights = xp.exp(scores - shift)
                total = weights.sum(-1, keepdims=True)
                divisor = xp.where(total > 0, total, _like(1.0, total))
                logs = scores - shift - xp.log(divisor)
                weights = weights / divisor
                if of_sink is not None:
                    largest = xp.where(endless, of_sink, largest)
                results = _Results((b, some, shared), (b, shared, some))
                rows = _Rows(
                    queries, products, place, weights, logs, total, largest, of_sink
                )
                yield results, rows, keys


def _out(rows: _Rows, keys: _Keys) -> Array:
    return (rows.weights @ keys.v).swapaxes(0, 1)


def _lse(rows: _Rows) -> Array:
    xp = namespace(rows.total)
    tiny = xp.where(rows.total > 0, rows.total, _like(1.0, rows.total))
    return (rows.largest + xp.log(tiny))[..., 0]  # -inf where there is no key


def _errors(
    rows: _Rows,
    keys: _Keys,
    out: Array,
    lse: Array,
    roundings: _Roundings,
    scale: float,
    score: Score,
    exp_error: float,
) -> tuple[Array, Array, Array]:
    """rms, shift and lse_bound of some rows."""
    xp = namespace(out)
    of_keys = rows.weights if rows.sink is None else rows.weights[..., :-1]
    seen = of_keys.sum(-1, keepdims=True) > 0
    seen = seen.swapaxes(0, 1) * _like(1.0, out)  # [rows, heads, 1]
    o, w, v2 = out.swapaxes(0, 1), rows.weights, keys.v * keys.v
    # An error that is uniform in [-unit, unit] has the variance unit^2 / 3.
    squares = (w * w) @ v2
    of_o, of_p, in_8_bits = roundings
    variance = (of_p.unit**2 * squares + of_o.unit**2 * (o * o)) / 3
    # exp2's are in the sum of P, too: what all of a row's share does not count.
    variance = variance + exp_error**2 * squares
    divisor = xp.where(rows.total > 0, rows.total, _like(1.0, rows.total))
    if in_8_bits:
        least = (
            of_p.floor * 2.0 ** (FIRST_HEADROOM - P_OFFSET) / divisor
        )  # half the least weight above 0
        variance = variance + (least * least * v2.sum(0) + of_o.floor**2) / 3
    else:
        variance = variance + of_p.floor**2 / 3 * (v2.sum(0) + 1.0)
    norms = xp.sqrt((keys.k * keys.k).sum(-1))
    norms = xp.where(xp.isfinite(norms), norms, _like(0.0, norms))  # -inf is exact
    lengths = xp.sqrt((rows.q * rows.q).sum(-1, keepdims=True))
    error = score_unit(keys.k.shape[-1]) * scale * lengths * norms
    if in_8_bits:
        cut, scattered = _cut_off_scores(rows, keys, scale)
        # Alike for scores that are alike, so that O sees a part: that of a step, not of a product.
        error = error + cut * STEPS_OF_PRODUCTS
        count = min(len(keys.v), FLUSHED_KEYS)
        cut_off, of_sums = _cut_off(count, o, w @ xp.abs(keys.v), squares)
        variance = variance + ((w * scattered) ** 2) @ (2.0 * v2) + of_sums**2
    if score is not PLAIN:
        scores, error = score.with_error(rows.products, error, rows.place)
        if score.cap is None:
            # Its exponent is a difference to what a score of the row was, rounded twice.
            far = xp.abs(scores) + xp.abs(rows.largest)
            error = error + EXPONENT_UNIT * xp.where(
                xp.isfinite(far), far, _like(0.0, far)
            )
    rms = xp.sqrt(variance).swapaxes(0, 1) * seen
    if rows.sink is not None:
        # Its exponent is the difference to a reference, which is off as scores are.
        finite = xp.where(xp.isfinite(rows.sink), rows.sink, _like(0.0, rows.sink))
        of_sink = xp.amax(error, -1, keepdims=True) + SINK_UNIT * xp.abs(finite)
        error = xp.concatenate((error, of_sink), -1)
    error = xp.where(rows.logs > -math.inf, error, _like(0.0, error))
    # A key whose weight no fp32 number holds has none, however large the error of its score.
    some = xp.where(rows.logs > NO_WEIGHT, error, _like(0.0, error))
    counts = rows.logs + error + xp.amax(some, -1, keepdims=True) > NO_WEIGHT
    error = xp.where(counts, error, _like(0.0, error))
    # A weight is off by a factor of exp(+-error), and by as much for the others' errors. It stays
    # below 1, and where errors are large one that is nearly 0 may become 1.
    most = xp.amax(error, -1, keepdims=True)
    is_small = most < 1.0
    little = xp.where(is_small, error, _like(0.0, error))
    factor = xp.exp(xp.where(is_small, most, _like(0.0, most)))
    exponent = rows.logs + error + most
    exponent = xp.where(exponent < 0, exponent, _like(0.0, exponent))
    moved = xp.where(is_small, w * xp.expm1(little) * factor, xp.exp(exponent))
    moved = xp.where(moved < 1.0, moved, _like(1.0, moved))
    mass = moved.sum(-1, keepdims=True)
    spread = moved @ v2 - 2.0 * o * (moved @ keys.v) + o * o * mass
    spread = xp.where(spread > 0, spread, _like(0.0, spread))
    moved = xp.sqrt(mass * spread).swapaxes(0, 1)  # Cauchy-Schwarz
    shift = moved + SUM_UNIT * xp.abs(out)
    if in_8_bits:
        # And weights that are 0 in e4m3, whose errors have one sign.
        lost = xp.where(w < 2.0 * least, w, _like(0.0, w))
        lost = xp.where(lost < least, lost, least + 0.0 * lost) @ xp.abs(keys.v)
        shift = shift + (cut_off + lost).swapaxes(0, 1)
    if rows.sink is not None:
        least = LEAST_FACTOR * 2.0**RESCALE_SLACK
        shift = shift + least * xp.abs(keys.v).sum(0)
    shift = shift * seen

    of_scores = xp.where(is_small, (w * error).sum(-1, keepdims=True) * factor, most)
    lse_bound = of_scores[..., 0] + SUM_UNIT + ADD_UNIT * keys.k.shape[0]
    lse_bound = lse_bound + exp_error
    if in_8_bits:
        scatter = xp.sqrt(((w * scattered) ** 2).sum(-1))
        lse_bound = lse_bound + (w * cut).sum(-1) + SIGMAS * scatter
    if rows.sink is not None:  # of the sum of both
        lse_bound = lse_bound + SUM_UNIT
    finite = xp.where(xp.isinf(lse), _like(0.0, lse), lse)
    lse_bound = lse_bound + LSE_UNIT * xp.abs(finite)
    return rms, shift, lse_bound


def _cut_off(
    count: int, whole: Array, magnitudes: Array, squares: Array
) -> tuple[Array, Array]:
    """What is cut off of a sum of products: toward 0, as far as they have one sign, half a unit
    each; and the standard deviation of what has either.

    whole, magnitudes, squares: the sums of products, of their magnitudes and of their squares.
    """
    xp = namespace(whole)
    some = xp.where(squares > 0, squares, _like(1.0, squares))
    # Small products lose no more than they are: as if there were so many, all alike.
    alike = 2.0 * magnitudes**2 / some
    alike = xp.where(alike < count, alike, count + 0.0 * alike)
    deviation, size = xp.sqrt(squares), xp.where(magnitudes > 0, magnitudes, some)
    share = xp.abs(whole) / size  # of one sign
    of_one_sign = alike * share * (xp.abs(whole) + deviation) * CUT_OFF_UNIT / 2
    partial = xp.abs(whole) + PARTIAL_SIGMAS * deviation
    return of_one_sign, xp.sqrt(alike / 3) * CUT_OFF_UNIT * partial


def _cut_off_scores(rows: _Rows, keys: _Keys, scale: float) -> tuple[Array, Array]:
    """Of scores: what has one sign, or is not little; and the standard deviation of the rest."""
    xp, transposed = namespace(rows.q), keys.k.swapaxes(0, 1)
    sums = xp.abs(rows.q) @ xp.abs(transposed), (rows.q**2) @ (transposed**2)
    count = rows.q.shape[-1]
    cut, scattered = _cut_off(count, rows.products / scale, *sums)
    cut, scattered = cut * scale, scattered * scale
    zero, is_little = xp.zeros_like(cut), PARTIAL_SIGMAS * scattered < LITTLE
    cut = cut + xp.where(is_little, zero, PARTIAL_SIGMAS * scattered)
    return cut, xp.where(is_little, scattered, zero)


def _by_definition(rows: _Rows, keys: _Keys, out: Array, of_o: Rounding) -> Array:
    """Mean square errors of O where P is rounded to e4m3 and nothing else but O is.

    The reference of a row may be up to the slack below its largest score: on average over some.
    """
    xp, exact = namespace(out), out.swapaxes(0, 1)
    divisor = xp.where(rows.total > 0, rows.total, _like(1.0, rows.total))
    squares = xp.zeros_like(exact)
    for below in REFERENCES:
        factor = 2.0 ** (P_OFFSET + below) * divisor
        found = in_e4m3(rows.weights * factor) @ keys.v / factor
        squares = squares + (found - exact) ** 2
    squares = squares / len(REFERENCES) + (of_o.unit * exact) ** 2 / 3
    return squares.swapaxes(0, 1)


def in_e4m3(x: Array) -> Array:
    """Numbers from 0 to 448 rounded to e4m3, to nearest, ties to even."""
    xp = namespace(x)
    _, exponents = xp.frexp(x)  # of mantissas from 0.5 on
    exponents = exponents - 1
    least = xp.zeros_like(exponents) + LEAST_EXPONENT
    exponents = xp.where(exponents > least, exponents, least) - MANTISSA_BITS
    step = xp.ldexp(xp.ones_like(x), exponents)
    return xp.round(x / step) * step
