# SPDX-License-Identifier: Apache-2.0
"""Arithmetic as PTX defines it, on whole arrays of lanes.

Float functions take and return float32 arrays, integer functions uint32 arrays (a register is bits;
the suffix says how they are read) but for `_u64` and `_i64`, conversions to a narrow format return
its bits. Arithmetic of halves is on float16 arrays, or on the bits of bf16; of `.f16x2` and
`.bf16x2` there are two for each lane. Overflows are infinities and invalid operations NaN, as on
the device, of which numpy warns: run all of this under `np.errstate(all="ignore")`, as the machine
does. To do so in every function would take longer than some of them do.

The approximations (`ex2`, `lg2`, `rcp`, `tanh`) return the correctly rounded value. PTX only bounds
their error and the device is within that bound on either side, so two results of the same
instruction may differ by `EX2_ERROR`, `LG2_ERROR`, `RCP_ERROR` or `TANH_ERROR`: compare with
tolerances, never bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

CANONICAL_NAN = np.uint32(0x7FFFFFFF)  # what float32 instructions return
NAN_16 = np.uint16(0x7FFF)  # and conversions to bf16 and f16
NAN_8 = np.uint16(0x7F)  # and conversions to e4m3 and e5m2

EX2_ERROR = 2.0**-22  # [relative] ex2.approx.ftz.f32
LG2_ERROR = 2.0**-22  # [absolute in 0.5 to 2, relative elsewhere] lg2.approx.ftz.f32
RCP_ERROR = 2.0**-23  # [relative: 1 ulp] rcp.approx.ftz.f32
TANH_ERROR = 2.0**-11  # [relative] tanh.approx.f32

_SMALLEST_NORMAL = np.float32(2.0**-126)
_SIGN = np.uint32(0x80000000)
_INFINITY = np.uint32(0x7F800000)
_FIRST_NORMAL = np.uint32(0x00800000)
_NORMALS = _INFINITY - _FIRST_NORMAL  # how many positive ones there are
_ALL_ONES = np.uint32(0xFFFFFFFF)

# Bits of a float64: the 29 that a float32 does not keep, and what they are at a midpoint.
_DROPPED = np.uint64((1 << 29) - 1)
_MIDPOINT = np.uint64(1 << 28)


# -- conversions


def bf16_rn(x: F32) -> U16:
    """cvt.rn.bf16.f32: to nearest, ties to even; subnormals are kept, a NaN is 0x7fff."""
    bits = x.view(np.uint32)
    # Adding just less than half an ulp, or half of one when the result would be odd, carries into
    # the upper half exactly when rounding up does; from the largest finite it carries to infinity.
    rounded = bits >> 16
    rounded &= 1
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= 16
    result: U16 = rounded.astype(np.uint16)
    nan = x != x
    return np.where(nan, NAN_16, result) if nan.any() else result


def bf16x2_rn(high: F32, low: F32) -> U32:
    """cvt.rn.bf16x2.f32 d, high, low."""
    return bf16_rn(_pairs(high, low)).view(np.uint32)


def f16x2_rn(high: F32, low: F32) -> U32:
    """cvt.rn.f16x2.f32 d, high, low."""
    return f16_rn(_pairs(high, low)).view(np.uint32)


def bf16x2_rn_relu(high: F32, low: F32) -> U32:
    """cvt.rn.relu.bf16x2.f32 d, high, low."""
    return _relu(bf16_rn(_pairs(high, low))).view(np.uint32)


def f16x2_rn_relu(high: F32, low: F32) -> U32:
    """cvt.rn.relu.f16x2.f32 d, high, low."""
    return _relu(f16_rn(_pairs(high, low))).view(np.uint32)


def _relu(halves: U16) -> U16:
    """What has a sign as +0: negative numbers and -0, for a NaN has none after a conversion."""
    return np.where(halves >> 15, np.uint16(0), halves)


def e4m3x2_rn_satfinite(high: F32, low: F32) -> U16:
    """cvt.rn.satfinite.e4m3x2.f32 d, high, low."""
    return _joined(e4m3_rn_satfinite(_pairs(high, low)))


def e5m2x2_rn_satfinite(high: F32, low: F32) -> U16:
    """cvt.rn.satfinite.e5m2x2.f32 d, high, low."""
    return _joined(e5m2_rn_satfinite(_pairs(high, low)))


def e4m3x2_rn_satfinite_f16x2(halves: U32) -> U16:
    """cvt.rn.satfinite.e4m3x2.f16x2 d, a."""
    return _joined(e4m3_rn_satfinite(f16x2_to_f32(halves)))


def f16x2_to_f32(halves: U32) -> F32:
    """Both values of each lane, the lower half first. Exact."""
    return f16_to_f32(np.ascontiguousarray(halves).view(np.uint16))


def _pairs(high: F32, low: F32) -> F32:
    """Both values of each lane, the lower half first: one conversion serves them all."""
    shape = np.broadcast(high, low).shape
    pairs = np.empty((*shape, 2), np.float32)
    pairs[..., 0], pairs[..., 1] = low, high
    return pairs.reshape(*shape[:-1], -1)


def _joined(halves: U16) -> U16:
    """Pairs of 8-bit values as 16 bits."""
    return halves.astype(np.uint8).view(np.uint16)


def bf16_to_f32(bits: U16) -> F32:
    """Exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f16_rn(x: F32) -> U16:
    """cvt.rn.f16.f32: to nearest, ties to even; above 65519.99 infinity, a NaN is 0x7fff."""
    return np.where(x != x, NAN_16, x.astype(np.float16).view(np.uint16))


def f16_to_f32(bits: U16) -> F32:
    """Exact."""
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


def e4m3_rn_satfinite(x: F32) -> U16:
    """cvt.rn.satfinite.e4m3.f32 in the low byte: beyond +-448 the largest finite, a NaN is 0x7f."""
    return _narrow(x, mantissa_bits=3, bias=7, largest=LARGEST["e4m3"])


def e5m2_rn_satfinite(x: F32) -> U16:
    """cvt.rn.satfinite.e5m2.f32 in the low byte: beyond +-57344 that, a NaN is 0x7f."""
    return _narrow(x, mantissa_bits=2, bias=15, largest=LARGEST["e5m2"])


def e4m3_to_f32(bits: NDArray[Any]) -> F32:
    """Exact; the two codes with all bits but the sign set are NaN."""
    values: F32 = _E4M3[bits]
    return values


def e5m2_to_f32(bits: NDArray[Any]) -> F32:
    """Exact: an e5m2 is the upper byte of an f16."""
    values: F32 = _E5M2[bits]
    return values


LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
"""Finite numbers of the 8-bit formats."""
SATURATES_ABOVE = {
    # The midpoint between the largest finite number and where the next one would be; a tie goes to
    # the even code, which is 448's but not 57344's.
    "e4m3": np.float32(464),
    "e5m2": np.nextafter(np.float32(61440), np.float32(0)),
}
"""[magnitude] beyond which `.satfinite` makes of a number the largest finite one, and rounding to
nearest would not."""


def saturates(x: F32, dtype: str) -> NDArray[np.bool_]:
    """Where a conversion to an 8-bit float clips, infinities too; a NaN stays one."""
    clipped: NDArray[np.bool_] = np.abs(x) > SATURATES_ABOVE[dtype]
    return clipped


def saturates_f16x2(halves: U32, dtype: str) -> NDArray[np.bool_]:
    """Where a conversion of two halves to 8-bit floats clips one of them."""
    clipped = saturates(f16x2_to_f32(halves), dtype)
    return clipped[..., ::2] | clipped[..., 1::2]


def miscoded(word: U32, half: int) -> NDArray[np.bool_]:
    """Where a half, 0 for the lower one, does not have an e4m3 number's code in its low byte.

    Bits from 0 to 0x7e are the codes of 0 to 448. One more is a NaN's code, then come negative
    numbers, from 0x100 on it starts over. A NaN has a NaN's code, as it has to.
    """
    bits = word.view(np.uint16)[..., half::2]
    wrong: NDArray[np.bool_] = bits > _LARGEST_CODE
    if wrong.any():
        wrong &= bits & np.uint16(0x7FFF) <= _INFINITY_16
    return wrong


_LARGEST_CODE = np.uint16(0x7E)  # of e4m3
_INFINITY_16 = np.float16(np.inf).view(np.uint16)


def _narrow(x: F32, *, mantissa_bits: int, bias: int, largest: float) -> U16:
    """Round to an 8-bit float, ties to even; every step but the rounding is exact."""
    invalid = x != x
    magnitude = np.minimum(
        np.abs(np.where(invalid, np.float32(0), x)), np.float32(largest)
    )
    _, exponent = np.frexp(magnitude)  # magnitude = [0.5, 1) * 2 ** exponent
    exponent = np.where(magnitude == 0, 1 - bias, np.maximum(exponent - 1, 1 - bias))
    # In units of the last place: a subnormal has no leading one, so its biased exponent, 1, counts
    # for nothing; a carry out of the mantissa moves on to the next exponent by itself.
    units = np.rint(np.ldexp(magnitude, mantissa_bits - exponent)).astype(np.int64)
    codes = ((exponent + bias - 1) << mantissa_bits) + units
    signed = codes | np.where(np.signbit(x), 0x80, 0)
    result: U16 = np.where(invalid, NAN_8, signed.astype(np.uint16))
    return result


def _e4m3_values() -> F32:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    subnormal = exponent == 0
    significand = np.where(subnormal, mantissa, mantissa + 8) / 8
    values = np.ldexp(significand, np.where(subnormal, 1, exponent) - 7)
    values[(codes & 0x7F) == 0x7F] = np.nan
    values[codes >= 0x80] *= -1
    narrow: F32 = values.astype(np.float32)
    return narrow


_E4M3 = _e4m3_values()
_E5M2 = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)


def tf32_to_f32(bits: U32) -> F32:
    """What a product reads of a float32: the low 13 bits are not there."""
    kept: U32 = bits & np.uint32(0xFFFFE000)
    return kept.view(np.float32)


TO_F32: dict[str, Callable[[NDArray[Any]], F32]] = {
    "bf16": bf16_to_f32,
    "f16": f16_to_f32,
    "e4m3": e4m3_to_f32,
    "e5m2": e5m2_to_f32,
    "tf32": tf32_to_f32,
}
ELEMENT_SIZE = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1, "tf32": 4}  # [bytes]


def f32_to_s32(x: F32, rounding: str) -> U32:
    """cvt.{rni,rzi,rmi,rpi}.s32.f32: out of range saturates, a NaN is 0."""
    return _to_integer(x, rounding, -(2**31), 2**31 - 1)


def f32_to_u32(x: F32, rounding: str) -> U32:
    """cvt.{rni,rzi,rmi,rpi}.u32.f32: out of range saturates, a NaN is 0."""
    return _to_integer(x, rounding, 0, 2**32 - 1)


_ROUNDINGS: dict[str, Callable[[F64], F64]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def _to_integer(x: F32, rounding: str, low: int, high: int) -> U32:
    whole = _ROUNDINGS[rounding](np.where(x != x, np.float32(0), x).astype(np.float64))
    # A negative int64 becomes its two's complement in the low 32 bits.
    return np.clip(whole, low, high).astype(np.int64).astype(np.uint32)


# -- float arithmetic


def ftz(x: F32) -> F32:
    """Subnormals as zeros of their sign."""
    return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def fma32(a: F32, b: F32, c: F32) -> F32:
    """fma.rn.f32: a * b + c, rounded once.

    The float64 product is exact. Rounding its sum with c to float64 and again to float32 differs
    from rounding once only where the float64 sum looks like a tie of float32 values and is not one.
    Then the sum is rounded to odd instead, which keeps a tie and its neighbours apart.
    """
    product: F64 = a.astype(np.float64) * b
    total: F64 = product + c
    result: F32 = total.astype(np.float32)
    bits = total.view(np.uint64)
    tie = (bits & _DROPPED) == _MIDPOINT
    # Below the normal range a float32 keeps fewer bits, and ties lie elsewhere. Twice the bits drop
    # the sign, and taking one off makes zero the largest of all.
    tiny = (bits << np.uint64(1)) - np.uint64(1) < _TWICE_SMALLEST_NORMAL
    if (tie | tiny).any():
        return _round_to_odd(product, c.astype(np.float64), total).astype(np.float32)
    return result


def add_rm(a: F32, b: F32) -> F32:
    """add.rm.f32: rounded towards minus infinity; an exact 0 of unlike signs is -0."""
    return _sum_rm(a.astype(np.float64), b.astype(np.float64))


def sub_rm(a: F32, b: F32) -> F32:
    """sub.rm.f32."""
    return add_rm(a, -b)


def mul_rm(a: F32, b: F32) -> F32:
    """mul.rm.f32."""
    return _down(a.astype(np.float64) * b)


def fma_rm(a: F32, b: F32, c: F32) -> F32:
    """fma.rm.f32: a * b + c, rounded once and towards minus infinity."""
    return _sum_rm(a.astype(np.float64) * b, c.astype(np.float64))


def _sum_rm(x: F64, y: F64) -> F32:
    total: F64 = x + y
    # An exact zero is +0 only where both are: to nearest, opposite numbers give +0 too.
    total = np.where((total == 0) & (np.signbit(x) | np.signbit(y)), -0.0, total)
    return _down(_round_to_odd(x, y, total))


def _down(exact: F64) -> F32:
    """The largest float32 that is not above what rounding to odd made of an exact result."""
    nearest: F32 = exact.astype(np.float32)
    above = nearest > exact
    if not above.any():
        return nearest
    return np.where(above, np.nextafter(nearest, np.float32(-np.inf)), nearest)


_TWICE_SMALLEST_NORMAL = np.float64(2.0**-126).view(np.uint64) << np.uint64(1)


def _round_to_odd(x: F64, y: F64, total: F64) -> F64:
    """x + y, where inexact the neighbour with an odd significand; total is x + y to nearest."""
    part = total - x
    error = (x - (total - part)) + (y - part)  # exact
    odd = (total.view(np.uint64) & np.uint64(1)).astype(bool)
    nudge = np.isfinite(total) & (error != 0) & ~odd
    return np.where(nudge, np.nextafter(total, np.copysign(np.inf, error)), total)


def add_f16(a: F16, b: F16) -> F16:
    """add.rn.f16: subnormals are kept, a NaN is 0x7fff.

    numpy rounds twice, to float32 first, which has more than twice as many bits: no difference.
    """
    return _canonical_16(a + b)


def sub_f16(a: F16, b: F16) -> F16:
    """sub.rn.f16, like `add_f16`."""
    return _canonical_16(a - b)


def mul_f16(a: F16, b: F16) -> F16:
    """mul.rn.f16, like `add_f16`."""
    return _canonical_16(a * b)


def fma_f16(a: F16, b: F16, c: F16) -> F16:
    """fma.rn.f16: a * b + c, rounded once; subnormals are kept, a NaN is 0x7fff.

    A float64 holds the product, and the sum unless that is infinite or c is 2 ** 30 times as large
    as the product: then it is far from a tie.
    """
    total: F64 = a.astype(np.float64) * b + c
    return _canonical_16(total.astype(np.float16))


def add_bf16(a: U16, b: U16) -> U16:
    """add.rn.bf16 of bits: subnormals are kept, a NaN is 0x7fff.

    Rounding to float32 first makes no difference: it has more than twice as many bits.
    """
    return bf16_rn(bf16_to_f32(a) + bf16_to_f32(b))


def sub_bf16(a: U16, b: U16) -> U16:
    """sub.rn.bf16, like `add_bf16`."""
    return bf16_rn(bf16_to_f32(a) - bf16_to_f32(b))


def mul_bf16(a: U16, b: U16) -> U16:
    """mul.rn.bf16, like `add_bf16`: a float32 holds all 16 bits of a product.

    But of those below half the smallest bf16, which are zeros either way.
    """
    return bf16_rn(bf16_to_f32(a) * bf16_to_f32(b))


def fma_bf16(a: U16, b: U16, c: U16) -> U16:
    """fma.rn.bf16: a * b + c, rounded once; subnormals are kept, a NaN is 0x7fff.

    The exact sum is rounded to odd, to a float64 and then to a float32, before it is rounded.
    """
    product: F64 = bf16_to_f32(a).astype(np.float64) * bf16_to_f32(b)
    addend = bf16_to_f32(c).astype(np.float64)
    exact = _round_to_odd(product, addend, product + addend)
    near: F32 = exact.astype(np.float32)
    odd = (near.view(np.uint32) & np.uint32(1)).astype(bool)
    nudge = np.isfinite(near) & (near != exact) & ~odd
    towards = np.where(exact > near, np.float32(np.inf), np.float32(-np.inf))
    return bf16_rn(np.where(nudge, np.nextafter(near, towards), near))


def neg_bf16(a: U16) -> U16:
    """The number of the other sign."""
    negative: U16 = a ^ np.uint16(0x8000)
    return negative


def _canonical_16(x: F16) -> F16:
    nan = x != x
    return np.where(nan, NAN_16.view(np.float16), x) if nan.any() else x


def max_f32(a: F32, b: F32) -> F32:
    """max.f32: a NaN yields to a number, two of them give the canonical one, and -0 < +0."""
    return _extreme(a, b, np.fmax, np.bitwise_and)


def min_f32(a: F32, b: F32) -> F32:
    """min.f32: a NaN yields to a number, two of them give the canonical one, and -0 < +0."""
    return _extreme(a, b, np.fmin, np.bitwise_or)


def max_nan_f32(a: F32, b: F32) -> F32:
    """max.NaN.f32: the canonical NaN as soon as one of them is a NaN."""
    return _extreme(a, b, np.maximum, np.bitwise_and)


def min_nan_f32(a: F32, b: F32) -> F32:
    """min.NaN.f32: the canonical NaN as soon as one of them is a NaN."""
    return _extreme(a, b, np.minimum, np.bitwise_or)


def _extreme(a: F32, b: F32, of_numbers: Any, of_zero_bits: Any) -> F32:
    result: F32 = of_numbers(a, b)
    magnitude = result.view(np.uint32) & ~_SIGN
    # Of zeros and NaNs alone: taking one off makes a zero the largest.
    if not (magnitude - np.uint32(1) >= _INFINITY).any():
        return result
    zero = (a == 0) & (b == 0)
    of_zeros = of_zero_bits(a.view(np.uint32), b.view(np.uint32))
    return _canonical(np.where(zero, of_zeros, result.view(np.uint32)).view(np.float32))


def ex2_approx_ftz(x: F32) -> F32:
    """ex2.approx.ftz.f32: 2 ** x, within EX2_ERROR; a subnormal x is 0, a subnormal result +0."""
    result: F32 = np.exp2(x.astype(np.float64)).astype(np.float32)
    # All positive normal numbers, in most calls. Zeros and subnormals wrap around.
    if not (result.view(np.uint32) - _FIRST_NORMAL >= _NORMALS).any():
        return result
    return _canonical(np.where(result < _SMALLEST_NORMAL, np.float32(0), result))


def lg2_approx_ftz(x: F32) -> F32:
    """lg2.approx.ftz.f32: within LG2_ERROR; a subnormal x is a zero (-inf), below zero is NaN."""
    return _canonical(np.log2(ftz(x).astype(np.float64)).astype(np.float32))


def rcp_approx_ftz(x: F32) -> F32:
    """rcp.approx.ftz.f32: 1 / x within RCP_ERROR; subnormal x and results are zeros of its sign."""
    return _canonical(ftz(np.float32(1) / ftz(x)))


def tanh_approx(x: F32) -> F32:
    """tanh.approx.f32: within TANH_ERROR; infinities give +-1, zeros and subnormals themselves."""
    return _canonical(np.tanh(x.astype(np.float64)).astype(np.float32))


def _canonical(x: F32) -> F32:
    return np.where(x != x, CANONICAL_NAN.view(np.float32), x)


# -- integer arithmetic


def prmt(a: U32, b: U32, selector: U32) -> U32:
    """prmt.b32 d, a, b, selector: each of four bytes is one of the eight of a and b.

    Nibble i of the selector says which byte i is, those of a first; with its highest bit set the
    byte is eight copies of that one's sign.
    """
    held = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    shape = np.broadcast(held, selector).shape
    result: U32 = np.zeros(shape, np.uint32)
    for place in range(0, 32, 8):
        nibble = selector >> np.uint32(place // 2) & np.uint32(0xF)
        number = (nibble & np.uint32(7)).astype(np.uint64)
        byte = (held >> number * np.uint64(8)).astype(np.uint8)
        signs = byte.view(np.int8) >> 7
        chosen = np.where(nibble >= 8, signs.view(np.uint8), byte)
        result |= chosen.astype(np.uint32) << np.uint32(place)
    return result


def prmt_by(a: U32, b: U32, selector: int) -> U32:
    """prmt.b32 with a selector that all lanes have: byte by byte as it is there."""
    held = a.view(np.uint8), b.view(np.uint8)
    result: U32 = np.empty(np.broadcast(a, b).shape, np.uint32)
    chosen = result.view(np.uint8)
    for place in range(4):
        nibble = selector >> 4 * place & 0xF
        byte = held[nibble >> 2 & 1][..., nibble & 3 :: 4]
        if nibble >= 8:
            byte = (byte.view(np.int8) >> 7).view(np.uint8)
        chosen[..., place::4] = byte
    return result


def high_u64(a: U64, b: U64) -> U64:
    """mul.hi.u64, by halves of 32 bits."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & low, b >> half, b & low
    first = a_high * b_low + (a_low * b_low >> half)
    second = a_low * b_high + (first & low)
    high: U64 = a_high * b_high + (first >> half) + (second >> half)
    return high


def high_i64(a: I64, b: I64) -> I64:
    """mul.hi.s64: a negative factor is 2^64 less than its bits read as unsigned."""
    of_a, of_b, none = a.view(np.uint64), b.view(np.uint64), np.uint64(0)
    high = high_u64(of_a, of_b)
    high = high - np.where(a < 0, of_b, none) - np.where(b < 0, of_a, none)
    signed: I64 = high.view(np.int64)
    return signed


# PTX leaves a division by zero open. The code that ptxas makes of it for sm_90 gives all ones, both
# as quotient and as remainder, and so does this.


def div_u32(a: U32, b: U32) -> U32:
    """div.u32."""
    zero = b == 0
    return np.where(zero, _ALL_ONES, a // np.where(zero, np.uint32(1), b))


def rem_u32(a: U32, b: U32) -> U32:
    """rem.u32."""
    zero = b == 0
    return np.where(zero, _ALL_ONES, a % np.where(zero, np.uint32(1), b))


def div_s32(a: U32, b: U32) -> U32:
    """div.s32: towards zero; the lowest number over -1 is itself."""
    quotient = div_u32(_magnitude(a), _magnitude(b))
    negative = ((a ^ b) & _SIGN).astype(bool) & (b != 0)
    return np.where(negative, np.uint32(0) - quotient, quotient)


def rem_s32(a: U32, b: U32) -> U32:
    """rem.s32: the sign of the dividend."""
    remainder = rem_u32(_magnitude(a), _magnitude(b))
    negative = (a & _SIGN).astype(bool) & (b != 0)
    return np.where(negative, np.uint32(0) - remainder, remainder)


def _magnitude(a: U32) -> U32:
    return np.where((a & _SIGN).astype(bool), np.uint32(0) - a, a)
