# SPDX-License-Identifier: Apache-2.0
"""Arithmetic against exact rationals: a float is a fraction, and rounding has one definition."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from fmha_gen.emulator import numerics
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MAX_F32 = Fraction(2**24 - 1) * 2**104
U32 = st.integers(0, 2**32 - 1)


def f32(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def value(pattern: int) -> float:
    """A float32 by its bits, through struct and not numpy."""
    return struct.unpack("<f", struct.pack("<I", pattern))[0]


def rounded(exact: Fraction, precision: int, lowest: int) -> Fraction:
    """To nearest, ties to even: `precision` bits, and none below 2 ** lowest."""
    if exact == 0:
        return exact
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    while Fraction(2) ** exponent > magnitude:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** max(exponent - precision + 1, lowest)
    quotient = magnitude / unit
    whole = quotient.numerator // quotient.denominator
    rest = quotient - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    return whole * unit * (1 if exact > 0 else -1)


def decoded(code: int, exponent_bits: int, mantissa_bits: int) -> Fraction | None:
    """A narrow float by the book; None at the largest exponent, for infinities and NaNs."""
    bias = (1 << exponent_bits - 1) - 1
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    if exponent == (1 << exponent_bits) - 1:
        return None
    if exponent == 0:
        return sign * Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
    significand = 1 + Fraction(mantissa, 1 << mantissa_bits)
    return sign * significand * Fraction(2) ** (exponent - bias)


# -- conversions


@pytest.mark.parametrize(
    "convert, exponent_bits, mantissa_bits",
    [
        (numerics.bf16_to_f32, 8, 7),
        (numerics.f16_to_f32, 5, 10),
        (numerics.e5m2_to_f32, 5, 2),
    ],
)
def test_widening_every_code(convert, exponent_bits, mantissa_bits):
    bits = 1 + exponent_bits + mantissa_bits
    kind = np.uint16 if bits == 16 else np.uint8
    values = convert(np.arange(1 << bits).astype(kind))
    for code, got in enumerate(values.tolist()):
        want = decoded(code, exponent_bits, mantissa_bits)
        if want is not None:
            assert Fraction(got) == want, hex(code)
        elif code & (1 << mantissa_bits) - 1:
            assert math.isnan(got), hex(code)
        else:
            assert math.isinf(got) and (got < 0) == bool(code >> bits - 1), hex(code)


def test_widening_every_e4m3_code():
    for code, got in enumerate(numerics.e4m3_to_f32(np.arange(256)).tolist()):
        if code & 0x7F == 0x7F:
            assert math.isnan(got)
            continue
        # No infinity: the largest exponent counts like the others. Decode with one bit more of
        # exponent, then undo the other bias.
        wide = decoded((code & 0x80) << 1 | code & 0x7F, 5, 3)
        assert wide is not None
        assert Fraction(got) == wide * 2 ** (15 - 7), hex(code)
        assert math.copysign(1, got) == (-1 if code & 0x80 else 1)


NARROW = [
    # function, code to value, precision, exponent of the smallest subnormal, largest code, NaN
    (numerics.bf16_rn, numerics.bf16_to_f32, 8, -133, 0x7F80, 0x7FFF, 16),
    (numerics.f16_rn, numerics.f16_to_f32, 11, -24, 0x7C00, 0x7FFF, 16),
    (numerics.e4m3_rn_satfinite, numerics.e4m3_to_f32, 4, -9, 0x7E, 0x7F, 8),
    (numerics.e5m2_rn_satfinite, numerics.e5m2_to_f32, 3, -16, 0x7B, 0x7F, 8),
]


def narrowed(
    pattern: int, decode, precision: int, lowest: int, largest: int, width: int
) -> int:
    """The code that a float32 rounds to: the definition, with the code found by search."""
    x = value(pattern)
    sign = pattern >> 31 << width - 1
    limit = float(decode(np.array([largest]))[0])  # infinity, or the largest finite
    if math.isinf(x):
        return sign | largest
    exact = rounded(Fraction(abs(x)), precision, lowest)
    if math.isinf(limit):
        below = Fraction(float(decode(np.array([largest - 1]))[0]))
        if exact > below:
            return sign | largest
    else:
        exact = min(exact, Fraction(limit))
    low, high = 0, largest
    while low < high:
        middle = (low + high) // 2
        if Fraction(float(decode(np.array([middle]))[0])) < exact:
            low = middle + 1
        else:
            high = middle
    return sign | low


@pytest.mark.parametrize("narrow", NARROW, ids=lambda narrow: narrow[0].__name__)
@settings(max_examples=300, deadline=None)
@given(pattern=U32)
def test_narrowing_any_float(narrow, pattern):
    convert, widen, precision, lowest, largest, nan, width = narrow
    kind = np.uint16 if width == 16 else np.uint8
    got = int(convert(f32(pattern))[0])
    if math.isnan(value(pattern)):
        assert got == nan
        return

    def decode(codes):
        return widen(codes.astype(kind))

    assert got == narrowed(pattern, decode, precision, lowest, largest, width)


@pytest.mark.parametrize("narrow", NARROW, ids=lambda narrow: narrow[0].__name__)
def test_narrowing_codes_their_midpoints_and_the_neighbours_of_those(narrow):
    """Exhaustive where it matters: between any two codes lies one tie, and it goes to the even."""
    convert, widen, _, _, largest, _, width = narrow
    kind = np.uint16 if width == 16 else np.uint8
    codes = np.arange(largest).astype(kind)
    values = widen(codes)
    assert np.array_equal(convert(values), codes)
    assert np.array_equal(convert(-values), codes.astype(np.uint16) | 1 << width - 1)
    finite = widen(codes[:-1]).astype(np.float64)
    middle = ((finite + values[1:].astype(np.float64)) / 2).astype(np.float32)
    lower, upper = codes[:-1].astype(np.uint16), codes[1:].astype(np.uint16)
    even = np.where(lower % 2 == 0, lower, upper)
    exact = middle.astype(np.float64) * 2 == finite + values[1:].astype(np.float64)
    assert exact.sum() >= len(middle) - 128  # all but some subnormal bf16
    assert np.array_equal(convert(middle)[exact], even[exact])
    above = np.nextafter(middle, np.float32(np.inf))
    below = np.nextafter(middle, np.float32(0))
    assert np.array_equal(convert(above)[exact], upper[exact])
    assert np.array_equal(convert(below)[exact], lower[exact])


@pytest.mark.parametrize(
    ("dtype", "convert", "widen", "unit"),
    [
        ("e4m3", numerics.e4m3_rn_satfinite, numerics.e4m3_to_f32, 32.0),
        ("e5m2", numerics.e5m2_rn_satfinite, numerics.e5m2_to_f32, 8192.0),
    ],
)
def test_what_saturates_is_what_rounds_to_more_than_there_is(
    dtype, convert, widen, unit
):
    """Around the largest finite number; unit: of its last place, and of the next ones' if any."""
    largest = np.float32(numerics.LARGEST[dtype])
    finite = widen(np.arange(256).astype(np.uint8))
    assert finite[np.isfinite(finite)].max() == largest
    edge = np.float32(largest + unit / 2)
    x = [largest, np.nextafter(edge, np.float32(0)), edge]
    x = np.array([*x, np.nextafter(edge, np.float32(np.inf)), 3e38, np.inf], np.float32)
    with np.errstate(invalid="ignore"):
        unbounded = np.rint(x.astype(np.float64) / unit) * unit  # ties go to the even
    want = unbounded > largest
    assert want[0] == want[1] == 0 and want[3:].all()
    assert numerics.saturates(x, dtype).tolist() == want.tolist()
    assert numerics.saturates(-x, dtype).tolist() == want.tolist()
    assert (widen(convert(x)) == largest).all()
    assert not numerics.saturates(np.array([np.nan], np.float32), dtype).any()
    assert not numerics.saturates(finite, dtype)[np.isfinite(finite)].any()


RELU = [
    (numerics.f16x2_rn_relu, numerics.f16x2_rn),
    (numerics.bf16x2_rn_relu, numerics.bf16x2_rn),
]


@pytest.mark.parametrize(("clamped", "plain"), RELU)
@settings(max_examples=300, deadline=None)
@given(high=U32, low=U32)
def test_relu_of_any_pair(clamped, plain, high, low):
    """Each half by itself: negative numbers and -0 are +0, all else is as without."""
    bits = int(plain(f32(high), f32(low))[0])
    want = 0
    for half in (bits & 0xFFFF, bits & 0xFFFF0000):
        want |= 0 if half & 0x80008000 else half
    assert int(clamped(f32(high), f32(low))[0]) == want


def test_relu_at_the_edges():
    cases = {
        0x80000000: 0,  # -0
        0x80000001: 0,  # rounds to -0
        0xFF800000: 0,  # -inf
        0xBF800000: 0,
        0x7FC00000: 0x7FFF,
        0xFFC00001: 0x7FFF,  # a NaN with a sign, and one that signals
        0xFF800001: 0x7FFF,
        0x7F800000: 0x7C00,
        0x477FEFFF: 0x7BFF,  # below 65520, and the tie, which goes to infinity
        0x477FF000: 0x7C00,
        0xC77FF000: 0,
        0x33000000: 0,  # 2 ** -25, a tie of 0 and the smallest subnormal
        0x33000001: 1,
        0x33C00000: 2,  # 1.5 of the smallest, to the even
        0x387FC000: 0x03FF,  # the largest subnormal
        0x3F801000: 0x3C00,  # ties beside 1, both to the even
        0x3F803000: 0x3C02,
    }
    for pattern, want in cases.items():
        one = f32(0x3F800000)
        assert int(numerics.f16x2_rn_relu(f32(pattern), one)[0]) == want << 16 | 0x3C00
        assert int(numerics.f16x2_rn_relu(one, f32(pattern))[0]) == want | 0x3C000000


def test_pairs_put_their_first_operand_high():
    high, low = np.full(128, 1.5, np.float32), np.full(128, -2.0, np.float32)
    assert (numerics.bf16x2_rn(high, low) == 0x3FC0C000).all()
    assert (numerics.f16x2_rn(high, low) == 0x3E00C000).all()
    assert (numerics.e4m3x2_rn_satfinite(high, low) == 0x3CC0).all()
    assert (numerics.e5m2x2_rn_satfinite(high, low) == 0x3EC0).all()


@pytest.mark.parametrize(
    "rounding, expected",
    [
        ("rni", [0, 2, 2, -2, -2, 3]),
        ("rzi", [0, 1, 2, -1, -2, 2]),
        ("rmi", [0, 1, 2, -2, -3, 2]),
        ("rpi", [1, 2, 3, -1, -2, 3]),
    ],
)
def test_to_integer(rounding, expected):
    x = np.array([0.5, 1.5, 2.5, -1.5, -2.5, 2.75], np.float32)
    assert numerics.f32_to_s32(x, rounding).view(np.int32).tolist() == expected
    edge = np.array([np.nan, np.inf, -np.inf, 3e9, -3e9], np.float32)
    signed = numerics.f32_to_s32(edge, rounding).view(np.int32).tolist()
    assert signed == [0, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31)]
    assert numerics.f32_to_u32(edge, rounding).tolist() == [
        0,
        2**32 - 1,
        0,
        3000000000,
        0,
    ]


# -- float arithmetic


def fused(a: int, b: int, c: int) -> float | None:
    """a * b + c rounded once; None when an operand is not finite or the result is a zero."""
    x, y, z = value(a), value(b), value(c)
    if not all(map(math.isfinite, (x, y, z))):
        return None
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    result = rounded(exact, 24, -149)
    if result == 0:
        return None
    if abs(result) > MAX_F32:
        return math.inf if result > 0 else -math.inf
    return float(result)


@settings(max_examples=500, deadline=None)
@given(a=U32, b=U32, c=U32)
def test_fma_of_anything(a, b, c):
    want = fused(a, b, c)
    got = float(numerics.fma32(f32(a), f32(b), f32(c))[0])
    if want is not None:
        assert got == want


@settings(max_examples=500, deadline=None)
@given(
    a=st.integers(1, 2**24 - 1),
    b=st.integers(1, 2**24 - 1),
    shift=st.integers(-130, 0),
    exponent=st.integers(-160, -60),
    sign=st.sampled_from([-1, 1]),
)
def test_fma_near_ties_and_subnormals(a, b, shift, exponent, sign):
    """Of addends far apart a float64 sum hides on which side of a tie it is."""
    x, y = math.ldexp(a, exponent // 2), math.ldexp(b, exponent - exponent // 2)
    z = sign * math.ldexp(1 + (a ^ b) % 2**23 / 2**23, exponent + 48 + shift)
    bits = [int(np.float32(v).view(np.uint32)) for v in (x, y, z)]
    want = fused(*bits)
    got = float(numerics.fma32(*(f32(b) for b in bits))[0])
    if want is not None:
        assert got == want


def test_fma_where_rounding_twice_goes_wrong():
    """The sum is 2^-70 below a tie, which float64 cannot tell from the tie itself."""
    a = np.array([2.0**-24 * (1 + 2.0**-23)], np.float32)
    b = np.array([1 - 2.0**-23], np.float32)
    c = np.array([1 + 2.0**-23], np.float32)
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert float(twice[0]) == 1 + 2.0**-22
    assert float(numerics.fma32(a, b, c)[0]) == 1 + 2.0**-23
    assert float(numerics.fma32(-a, b, -c)[0]) == -(1 + 2.0**-23)


# -- arithmetic of halves

HALF = st.integers(0, 2**16 - 1)


def f16(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint16).view(np.float16)


def half_bits(exact: Fraction) -> int:
    """What a number that is not 0 rounds to: the definition; a half is 11 bits."""
    sign = 0x8000 if exact < 0 else 0
    result = abs(rounded(exact, 11, -24))
    if result >= 65536:
        return sign | 0x7C00
    return sign | int(np.float16(float(result)).view(np.uint16))  # exact


IN_HALVES = {
    "add": (numerics.add_f16, lambda a, b, c: a + b),
    "sub": (numerics.sub_f16, lambda a, b, c: a - b),
    "mul": (numerics.mul_f16, lambda a, b, c: a * b),
    "fma": (numerics.fma_f16, lambda a, b, c: a * b + c),
}


def check_halves(name: str, a: int, b: int, c: int) -> None:
    function, exactly = IN_HALVES[name]
    operands = (a, b, c)[: 3 if name == "fma" else 2]
    got = int(function(*map(f16, operands)).view(np.uint16)[0])
    values = [decoded(bits, 5, 10) for bits in operands]
    if None in values:  # infinities and NaNs, which float64 computes alike
        x, y, z = (np.float64(f16(bits)[0]) for bits in (a, b, c))
        wide = exactly(x, y, z)
        want = 0x7FFF if math.isnan(wide) else int(np.float16(wide).view(np.uint16))
        assert got == want
        return
    exact = exactly(*values, *[0] * (3 - len(values)))
    if exact:
        assert got == half_bits(exact)
    else:  # a zero by the rules of signs, which float64 has, too
        wide = exactly(*(np.float64(f16(bits)[0]) for bits in (a, b, c)))
        assert got == (0x8000 if math.copysign(1, wide) < 0 else 0)


@pytest.mark.parametrize("name", IN_HALVES)
@settings(max_examples=500, deadline=None)
@given(a=HALF, b=HALF, c=HALF)
def test_arithmetic_of_any_halves(name, a, b, c):
    check_halves(name, a, b, c)


@pytest.mark.parametrize("name", IN_HALVES)
def test_arithmetic_of_halves_at_the_edges(name):
    edges = (
        *(0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x8400, 0x3BFF, 0x3C00, 0x3C01),
        *(0xBC00, 0x3800, 0x1400, 0x6400, 0x6401, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00),
        *(0x7E00, 0xFE01, 0x7C01),
    )
    with np.errstate(all="ignore"):
        for a in edges:
            for b in edges:
                for c in edges if name == "fma" else (0,):
                    check_halves(name, a, b, c)


def test_fma_of_halves_where_rounding_twice_goes_wrong():
    """Sums 2 ** -24 beside a tie of halves, which float32 takes for the tie."""
    for factors, addend, want in (
        ((3, 683 / 2048), 2.0**-24, 1 + 2.0**-10),  # 1 + 2 ** -11
        ((7, 293 / 2048), -(2.0**-24), 1 + 2.0**-10),  # 1 + 3 * 2 ** -11
    ):
        a, b, c = (np.array([x], np.float16) for x in (*factors, addend))
        assert (float(a[0]), float(b[0]), float(c[0])) == (*factors, addend)
        product = a.astype(np.float32) * b
        assert float((product + c).astype(np.float16)[0]) != want
        assert float(numerics.fma_f16(a, b, c)[0]) == want


def test_max_and_min():
    a = f32(0x7FC00001, 0x80000000, 0x00000000, 0xFF800000, 0x7FC00001, 0x3F800000)
    b = f32(0x3F800000, 0x00000000, 0x80000000, 0xFF800000, 0xFFC00000, 0x40000000)
    high = numerics.max_f32(a, b).view(np.uint32).tolist()
    assert high == [0x3F800000, 0, 0, 0xFF800000, 0x7FFFFFFF, 0x40000000]
    low = numerics.min_f32(a, b).view(np.uint32).tolist()
    assert low == [
        0x3F800000,
        0x80000000,
        0x80000000,
        0xFF800000,
        0x7FFFFFFF,
        0x3F800000,
    ]


def test_ex2():
    x = np.linspace(-125.9, 127.9, 4001).astype(np.float32)
    got = numerics.ex2_approx_ftz(x).astype(np.float64)
    want = np.array(
        [math.exp2(v) if hasattr(math, "exp2") else 2.0**v for v in x.tolist()]
    )
    assert np.abs(got / want - 1).max() <= 2.0**-24
    edge = f32(
        0x7F800000,
        0xFF800000,
        0x80000001,
        0x00000001,
        0xC2FD0000,
        0x7FC01234,
        0x43000000,
    )
    bits = numerics.ex2_approx_ftz(edge).view(np.uint32).tolist()
    assert bits == [0x7F800000, 0, 0x3F800000, 0x3F800000, 0, 0x7FFFFFFF, 0x7F800000]


def test_lg2():
    x = np.geomspace(1.2e-38, 3e38, 4001).astype(np.float32)
    got = numerics.lg2_approx_ftz(x).astype(np.float64)
    want = np.array([math.log2(v) for v in x.tolist()])
    assert np.abs(got - want).max() <= 2.0**-17  # half an ulp at 128
    assert (np.abs(got - want) <= np.abs(want) * 2.0**-24 + 1e-30).all()
    edge = f32(0x7F800000, 0x00000001, 0x80000000, 0xBF800000, 0x7FC01234, 0x3F800000)
    bits = numerics.lg2_approx_ftz(edge).view(np.uint32).tolist()
    assert bits == [0x7F800000, 0xFF800000, 0xFF800000, 0x7FFFFFFF, 0x7FFFFFFF, 0]


def test_tanh():
    x = np.concatenate([np.linspace(-12, 12, 4001), np.geomspace(1e-44, 1e4, 4001)])
    x = x.astype(np.float32)
    got = numerics.tanh_approx(x).astype(np.float64)
    want = np.array([math.tanh(v) for v in x.tolist()])
    assert (np.abs(got - want) <= np.abs(want) * 2.0**-24 + 2.0**-150).all()
    # Infinities, zeros and subnormals, as the PTX ISA has them; unlike ex2, nothing is flushed.
    edge = f32(
        *(0x7F800000, 0xFF800000, 0, 0x80000000, 0x00000001, 0x807FFFFF, 0x7FC01234)
    )
    bits = numerics.tanh_approx(edge).view(np.uint32).tolist()
    assert bits == [
        *(0x3F800000, 0xBF800000, 0, 0x80000000, 0x00000001, 0x807FFFFF, 0x7FFFFFFF)
    ]


def test_rcp():
    x = np.geomspace(1.2e-38, 8e37, 4001).astype(np.float32)
    got = numerics.rcp_approx_ftz(x)
    want = [float(rounded(1 / Fraction(v), 24, -149)) for v in x.tolist()]
    assert got.tolist() == want
    edge = f32(
        0x7F800000, 0xFF800000, 0x80000001, 0, 0x7F000000, 0xFF000000, 0x7FC01234
    )
    bits = numerics.rcp_approx_ftz(edge).view(np.uint32).tolist()
    # 2^127 has the subnormal reciprocal 2^-127
    assert bits == [0, 0x80000000, 0xFF800000, 0x7F800000, 0, 0x80000000, 0x7FFFFFFF]


def test_ftz_keeps_normals():
    x = f32(0x00800000, 0x807FFFFF, 0x007FFFFF, 0x7F800000, 0x80800000)
    bits = numerics.ftz(x).view(np.uint32).tolist()
    assert bits == [0x00800000, 0x80000000, 0, 0x7F800000, 0x80800000]


# -- integer arithmetic


def signed(pattern: int) -> int:
    return pattern - 2**32 if pattern >> 31 else pattern


@settings(max_examples=300, deadline=None)
@given(a=U32, b=U32 | st.integers(0, 5) | st.integers(2**32 - 5, 2**32 - 1))
def test_division(a, b):
    x, y = np.array([a], np.uint32), np.array([b], np.uint32)
    quotient, remainder = int(numerics.div_u32(x, y)[0]), int(numerics.rem_u32(x, y)[0])
    signed_quotient = int(numerics.div_s32(x, y)[0])
    signed_remainder = int(numerics.rem_s32(x, y)[0])
    if b == 0:
        assert (quotient, remainder) == (2**32 - 1, 2**32 - 1)
        assert (signed_quotient, signed_remainder) == (2**32 - 1, 2**32 - 1)
        return
    assert (quotient, remainder) == divmod(a, b)
    toward_zero = abs(signed(a)) // abs(signed(b))
    if (signed(a) < 0) != (signed(b) < 0):
        toward_zero = -toward_zero
    assert signed_quotient == toward_zero % 2**32
    assert signed_remainder == (signed(a) - toward_zero * signed(b)) % 2**32


def test_lowest_number_over_minus_one():
    x, y = np.array([2**31], np.uint32), np.array([2**32 - 1], np.uint32)
    assert int(numerics.div_s32(x, y)[0]) == 2**31
    assert int(numerics.rem_s32(x, y)[0]) == 0
