# SPDX-License-Identifier: Apache-2.0
"""Every opcode's emitter, alone: a few instructions against numpy."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from fmha_gen.emulator import numerics
from fmha_gen.emulator.emitters import UnsupportedInstruction
from fmha_gen.emulator.lanes import LANES

from . import kernels
from .kernels import FIRST_INPUT, execute, tensor_map, value

RNG = np.random.default_rng(1)
WORDS = [RNG.integers(0, 1 << 32, LANES, dtype=np.uint32) for _ in range(3)]
for _lanes, _edges in zip(
    WORDS, ([0, 1, 1 << 31, 0xFFFFFFFF], [1, 0xFFFFFFFF, 2, 7]), strict=False
):
    _lanes[:4] = _edges
FLOATS = [(RNG.standard_normal(LANES) * 3).astype(np.float32) for _ in range(3)]
FLOATS[0][:8] = [np.nan, np.inf, -np.inf, 0, -0.0, 1e-40, 3e38, 1]
FLOATS[1][:8] = [1, 2, np.inf, -0.0, 0, 1e-40, 3e38, np.nan]
SHIFTS = np.arange(LANES, dtype=np.uint32) % 40


def signed(x):
    return x.view(np.int32)


def wide(x):
    return signed(x).astype(np.int64)


INTEGER = {
    "add.s32 %r20, %r10, %r11;": lambda a, b, c: a + b,
    "add.u32 %r20, %r10, -5;": lambda a, b, c: a - np.uint32(5),
    "sub.s32 %r20, %r10, %r11;": lambda a, b, c: a - b,
    "mul.lo.s32 %r20, %r10, %r11;": lambda a, b, c: a * b,
    "mul.hi.s32 %r20, %r10, %r11;": lambda a, b, c: (wide(a) * wide(b) >> 32).astype(
        np.int32
    ),
    "mul.hi.u32 %r20, %r10, %r11;": lambda a, b, c: (
        a.astype(np.uint64) * b.astype(np.uint64) >> np.uint64(32)
    ).astype(np.uint32),
    "mad.lo.s32 %r20, %r10, %r11, %r12;": lambda a, b, c: a * b + c,
    "mul.wide.s32 %rd20, %r10, %r11; cvt.u32.u64 %r20, %rd20;": lambda a, b, c: a * b,
    "mul.wide.s32 %rd20, %r10, %r11; shr.u64 %rd20, %rd20, 32; cvt.u32.u64 %r20, %rd20;": (
        lambda a, b, c: (wide(a) * wide(b) >> 32).astype(np.int32)
    ),
    "mov.b32 {%rs1, %rs2}, %r10; mul.wide.s16 %r20, %rs1, 43;": lambda a, b, c: (
        a.astype(np.uint16).view(np.int16).astype(np.int32) * 43
    ),
    "div.s32 %r20, %r10, %r11;": lambda a, b, c: np.trunc(
        signed(a) / signed(b).astype(np.float64)
    ).astype(np.int64),
    "rem.s32 %r20, %r10, %r11;": lambda a, b, c: np.fmod(wide(a), wide(b)),
    "div.u32 %r20, %r10, %r11;": lambda a, b, c: a // b,
    "rem.u32 %r20, %r10, %r11;": lambda a, b, c: a % b,
    "min.s32 %r20, %r10, %r11;": lambda a, b, c: np.minimum(signed(a), signed(b)),
    "max.s32 %r20, %r10, %r11;": lambda a, b, c: np.maximum(signed(a), signed(b)),
    "min.u32 %r20, %r10, %r11;": lambda a, b, c: np.minimum(a, b),
    "min.relu.s32 %r20, %r10, %r11;": lambda a, b, c: np.maximum(
        np.minimum(signed(a), signed(b)), 0
    ),
    "neg.s32 %r20, %r10;": lambda a, b, c: np.uint32(0) - a,
    "and.b32 %r20, %r10, %r11;": lambda a, b, c: a & b,
    "or.b32 %r20, %r10, 255;": lambda a, b, c: a | np.uint32(255),
    "xor.b32 %r20, %r10, %r11;": lambda a, b, c: a ^ b,
    "not.b32 %r20, %r10;": lambda a, b, c: ~a,
    "shl.b32 %r20, %r10, 7;": lambda a, b, c: a << np.uint32(7),
    "shl.b32 %r20, %r10, 32;": lambda a, b, c: a * np.uint32(0),
    "shr.u32 %r20, %r10, 31;": lambda a, b, c: a >> np.uint32(31),
    "shr.s32 %r20, %r10, 4;": lambda a, b, c: signed(a) >> 4,
    "shr.s32 %r20, %r10, 99;": lambda a, b, c: signed(a) >> 31,
    "cvt.s64.s32 %rd20, %r10; shr.u64 %rd20, %rd20, 32; cvt.u32.u64 %r20, %rd20;": (
        lambda a, b, c: signed(a) >> 31
    ),
    "cvt.u64.u32 %rd20, %r10; shr.u64 %rd20, %rd20, 32; cvt.u32.u64 %r20, %rd20;": (
        lambda a, b, c: a * np.uint32(0)
    ),
    "cvt.u16.u32 %rs1, %r10; cvt.s16.s8 %rs2, %rs1; mov.b32 %r20, {%rs1, %rs2};": (
        lambda a, b, c: (a & np.uint32(0xFFFF))
        | a.astype(np.uint8)
        .view(np.int8)
        .astype(np.int16)
        .view(np.uint16)
        .astype(np.uint32)
        << np.uint32(16)
    ),
    "mov.b32 {%rs1, %rs2}, %r10; add.s16 %rs3, %rs1, %rs2; sub.s16 %rs3, %rs3, 1; "
    "mov.b32 %r20, {%rs3, 0};": lambda a, b, c: (
        a.astype(np.uint16) + (a >> np.uint32(16)).astype(np.uint16) - np.uint16(1)
    ).astype(np.uint32),
    "mov.b32 {%rs1, %rs2}, %r10; shr.s16 %rs3, %rs1, 3; shr.u16 %rs4, %rs1, 3; "
    "mov.b32 %r20, {%rs3, %rs4};": lambda a, b, c: (
        (a.astype(np.uint16).view(np.int16) >> 3).view(np.uint16).astype(np.uint32)
        | (a.astype(np.uint16) >> 3).astype(np.uint32) << np.uint32(16)
    ),
    "mov.b64 %rd20, {%r10, %r11}; mov.b64 {_, %r20}, %rd20;": lambda a, b, c: b,
    "mov.b64 %rd20, {%r10, %r11}; shl.b64 %rd20, %rd20, 32; or.b64 %rd20, %rd20, 5; "
    "mov.b64 {%r21, %r22}, %rd20; add.u32 %r20, %r21, %r22;": lambda a, b, c: a
    + np.uint32(5),
    "mad.lo.s64 %rd20, %rd2, 0, 77; cvt.u32.u64 %r20, %rd20;": (
        lambda a, b, c: a * np.uint32(0) + np.uint32(77)
    ),
    "mov.u32 %r20, %laneid;": lambda a, b, c: np.arange(LANES) % 32,
    "mov.u32 %r20, %tid.x;": lambda a, b, c: np.arange(LANES),
    "mov.u32 %r20, %warpid;": lambda a, b, c: np.arange(LANES) // 32,
    "mov.u32 %r20, %ntid.x;": lambda a, b, c: a * np.uint32(0) + np.uint32(LANES),
    "mov.u32 %r20, WARP_SZ;": lambda a, b, c: a * np.uint32(0) + np.uint32(32),
    "mov.b32 %r20, smem;": lambda a, b, c: a * np.uint32(0) + np.uint32(1024),
    "setp.lt.s32 %p1, %r10, %r11; selp.b32 %r20, %r10, 7, %p1;": lambda a, b, c: np.where(
        signed(a) < signed(b), a, np.uint32(7)
    ),
    "setp.lt.u32 %p1, %r10, %r11; selp.b32 %r20, 1, 0, %p1;": lambda a, b, c: a < b,
    "setp.hs.u32 %p1, %r10, %r11; selp.b32 %r20, 1, 0, %p1;": lambda a, b, c: a >= b,
    "setp.eq.b32 %p1|%p2, %r10, 1; selp.b32 %r20, 1, 0, %p2;": lambda a, b, c: a != 1,
    "setp.gt.s32 %p2, %r12, 0; setp.ne.and.b32 %p1, %r10, 0, %p2; selp.b32 %r20, 1, 0, %p1;": (
        lambda a, b, c: (a != 0) & (signed(c) > 0)
    ),
    "setp.gt.s32 %p1, %r10, 0; setp.gt.s32 %p2, %r11, 0; and.pred %p3, %p1, %p2; "
    "or.pred %p4, %p1, %p2; not.pred %p3, %p3; xor.pred %p3, %p3, %p4; "
    "selp.b32 %r20, 1, 0, %p3;": lambda a, b, c: (
        ~((signed(a) > 0) & (signed(b) > 0)) ^ ((signed(a) > 0) | (signed(b) > 0))
    ),
    "mov.b32 %r20, 3; setp.gt.s32 %p1, %r10, 0; @%p1 mov.b32 %r20, 4; "
    "@!%p1 add.s32 %r20, %r20, 9;": (lambda a, b, c: np.where(signed(a) > 0, 4, 12)),
    "mov.pred %p1, -1; selp.b32 %r20, 1, 0, %p1;": lambda a, b, c: a * np.uint32(0)
    + np.uint32(1),
    "cvta.shared.u64 %rd20, %rd1; cvta.to.shared::cluster.u64 %rd21, %rd20; "
    "sub.s64 %rd21, %rd21, %rd1; cvt.u32.u64 %r20, %rd21;": lambda a, b, c: a
    * np.uint32(0),
    "mapa.shared::cluster.u32 %r20, %r1, 0;": lambda a, b, c: np.arange(LANES),
}


@pytest.mark.parametrize("body", INTEGER)
def test_integer(body):
    a, b, c = (words.copy() for words in WORDS)
    with np.errstate(all="ignore"):
        expected = np.asarray(INTEGER[body](a, b, c)).astype(np.int64).astype(np.uint32)
    np.testing.assert_array_equal(value(body, a, b, c), expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "shl.b32",
            lambda x, s: np.where(s > 31, 0, x.astype(np.uint64) << s).astype(
                np.uint32
            ),
        ),
        (
            "shr.u32",
            lambda x, s: np.where(s > 31, 0, x.astype(np.uint64) >> s).astype(
                np.uint32
            ),
        ),
        (
            "shr.s32",
            lambda x, s: (signed(x) >> np.minimum(s, 31).astype(np.int32)).view(
                np.uint32
            ),
        ),
    ],
)
def test_shift_by_a_register_clamps(kind, expected):
    a = WORDS[0].copy()
    result = value(f"{kind} %r20, %r10, %r11;", a, SHIFTS.copy())
    np.testing.assert_array_equal(result, expected(a, SHIFTS.astype(np.uint64)))


FLOAT = {
    "add.f32 %r20, %r10, %r11;": lambda a, b, c: a + b,
    "add.rn.f32 %r20, %r10, %r11;": lambda a, b, c: a + b,
    "mul.rn.f32 %r20, %r10, %r11;": lambda a, b, c: a * b,
    "sub.rn.f32 %r20, %r10, %r11;": lambda a, b, c: a - b,
    "mul.f32 %r20, %r10, 0f40400000;": lambda a, b, c: a * np.float32(3),
    "fma.rn.f32 %r20, %r10, %r11, %r12;": lambda a, b, c: (
        a.astype(np.longdouble) * b + c
    ).astype(np.float32),
    "div.rn.f32 %r20, %r10, %r11;": lambda a, b, c: a / b,
    "max.f32 %r20, %r10, %r11;": lambda a, b, c: np.fmax(a, b),
    "min.f32 %r20, %r10, %r11;": lambda a, b, c: np.fmin(a, b),
    "max.f32 %r20, %r10, %r11, %r12;": lambda a, b, c: np.fmax(np.fmax(a, b), c),
    "min.f32 %r20, %r10, %r11, %r12;": lambda a, b, c: np.fmin(np.fmin(a, b), c),
    "max.NaN.f32 %r20, %r10, %r11;": lambda a, b, c: np.maximum(a, b),
    "min.NaN.f32 %r20, %r10, %r11;": lambda a, b, c: np.minimum(a, b),
    "max.NaN.f32 %r20, %r12, %r11, %r10;": (
        lambda a, b, c: np.maximum(np.maximum(a, b), c)
    ),
    "abs.f32 %r20, %r10;": lambda a, b, c: np.abs(a),
    "neg.f32 %r20, %r10;": lambda a, b, c: -a,
    "mov.f32 %r20, 0f3F800000;": lambda a, b, c: np.ones_like(a),
    "setp.gt.f32 %p1, %r11, %r12; selp.f32 %r20, %r12, 0fFF800000, %p1;": (
        lambda a, b, c: np.where(b > c, c, np.float32(-np.inf))
    ),
    "cvt.rn.f32.s32 %r20, %r1;": lambda a, b, c: np.arange(LANES, dtype=np.float32),
}


@pytest.mark.parametrize("body", FLOAT)
def test_float(body):
    a, b, c = (lanes.copy() for lanes in FLOATS)
    with np.errstate(all="ignore"):
        expected = FLOAT[body](a, b, c)
    result = value(body, a, b, c).view(np.float32)
    np.testing.assert_array_equal(result, expected)


def down(exact):
    """The largest float32 that is not above a fraction."""
    rounded = np.float32(float(exact))
    while Fraction(float(rounded)) > exact:
        rounded = np.nextafter(rounded, np.float32(-np.inf))
    while Fraction(float(above := np.nextafter(rounded, np.float32(np.inf)))) <= exact:
        rounded = above
    return rounded


NUMBERS = [RNG.standard_normal(LANES).astype(np.float32) for _ in range(3)]
NUMBERS[0] *= np.float32(10.0) ** np.arange(-44, -44 + LANES // 2, 0.5)[:LANES]
NUMBERS[1][::3] = NUMBERS[0][::3]
NUMBERS[1][1::3] *= np.float32(1e-30)
ROUNDED_DOWN = {
    "add.rm.f32 %r20, %r10, %r11;": lambda a, b, c: a + b,
    "sub.rm.f32 %r20, %r10, %r11;": lambda a, b, c: a - b,
    "mul.rm.f32 %r20, %r10, %r11;": lambda a, b, c: a * b,
    "fma.rm.f32 %r20, %r10, %r11, %r12;": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize("body", ROUNDED_DOWN)
def test_rounding_down_is_exact(body):
    exact = [
        ROUNDED_DOWN[body](*map(Fraction, row))
        for row in zip(*(lanes.tolist() for lanes in NUMBERS), strict=True)
    ]
    expected = np.array([down(x) for x in exact], np.float32)
    result = value(body, *(lanes.copy() for lanes in NUMBERS)).view(np.float32)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (1.0, -1.0, -0.0),
        (0.0, 0.0, 0.0),
        (-0.0, 0.0, -0.0),
        (3e38, 3e38, np.finfo(np.float32).max),
        (-3e38, -3e38, -np.inf),
        (np.inf, 1.0, np.inf),
    ],
)
def test_rounding_down_at_the_edges(first, second, expected):
    a, b = (np.full(LANES, x, np.float32) for x in (first, second))
    result = value("add.rm.f32 %r20, %r10, %r11;", a, b).view(np.float32)
    np.testing.assert_array_equal(result, np.float32(expected))
    np.testing.assert_array_equal(np.signbit(result), np.signbit(expected))


PACKED = (
    "add.f32x2 add.rn.f32x2 add.rm.f32x2 sub.rn.f32x2 sub.rm.f32x2 mul.rn.f32x2 mul.rm.f32x2 "
    "add.rn.ftz.f32x2 fma.rn.f32x2 fma.rm.f32x2"
)


@pytest.mark.parametrize("opcode", PACKED.split())
def test_packed_floats_are_two_floats(opcode):
    """Of (a, b), (b, c) and (c, a): each half as the instruction for one float has it."""
    sources = ("%rd21", "%rd22", "%rd23")[: 3 if opcode.startswith("fma") else 2]
    body = f"""mov.b64 %rd21, {{%r10, %r11}}; mov.b64 %rd22, {{%r11, %r12}};
mov.b64 %rd23, {{%r12, %r10}};
{opcode} %rd20, {', '.join(sources)}; mov.b64 {{%r20, %r21}}, %rd20;"""
    single = opcode.replace("f32x2", "f32")
    for half, order in (
        ("%r20", ("%r10", "%r11", "%r12")),
        ("%r21", ("%r11", "%r12", "%r10")),
    ):
        lanes = [lanes.copy() for lanes in (*FLOATS[:2], NUMBERS[0])]
        alone = f"{single} %r20, {', '.join(order[: len(sources)])};"
        expected = value(alone, *lanes)
        result = value(body, *lanes, register=half)
        np.testing.assert_array_equal(
            result.view(np.float32), expected.view(np.float32)
        )


@pytest.mark.parametrize(
    ("opcode", "holds"),
    [
        ("setp.eq.f32", lambda a, b: a == b),
        ("setp.ne.f32", lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)),
        ("setp.lt.f32", lambda a, b: a < b),
        ("setp.le.f32", lambda a, b: a <= b),
        ("setp.gt.f32", lambda a, b: a > b),
        ("setp.ge.f32", lambda a, b: a >= b),
        ("setp.equ.f32", lambda a, b: (a == b) | np.isnan(a) | np.isnan(b)),
        ("setp.neu.f32", lambda a, b: a != b),
        ("setp.ltu.f32", lambda a, b: ~(a >= b)),
        ("setp.leu.f32", lambda a, b: ~(a > b)),
        ("setp.gtu.f32", lambda a, b: ~(a <= b)),
        ("setp.geu.f32", lambda a, b: ~(a < b)),
        ("setp.nan.f32", lambda a, b: np.isnan(a) | np.isnan(b)),
        ("setp.num.f32", lambda a, b: ~(np.isnan(a) | np.isnan(b))),
    ],
)
def test_float_comparison(opcode, holds):
    a, b = (lanes.copy() for lanes in FLOATS[:2])
    body = f"{opcode} %p1, %r10, %r11; selp.b32 %r20, 1, 0, %p1;"
    np.testing.assert_array_equal(value(body, a, b), holds(a, b))


@pytest.mark.parametrize(
    ("opcode", "expected", "error"),
    [
        ("ex2.approx.ftz.f32", np.exp2, 2.0**-21),
        ("lg2.approx.ftz.f32", np.log2, 2.0**-21),
        ("rcp.approx.ftz.f32", np.reciprocal, 2.0**-22),
        ("tanh.approx.f32", np.tanh, 2.0**-22),
    ],
)
def test_approximations(opcode, expected, error):
    a = np.abs(FLOATS[2]) + np.float32(1.5)
    result = value(f"{opcode} %r20, %r10;", a).view(np.float32)
    np.testing.assert_allclose(result, expected(a.astype(np.float64)), rtol=error)


def test_ftz_flushes():
    tiny = np.full(LANES, 1e-39, np.float32)
    result = value("mul.ftz.f32 %r20, %r10, 0f3F000000;", tiny)
    np.testing.assert_array_equal(result, 0)
    kept = value("mul.f32 %r20, %r10, 0f3F000000;", tiny).view(np.float32)
    np.testing.assert_array_equal(kept, tiny / 2)
    # Sources are flushed too: ten of these would be a normal number.
    tiny = np.full(LANES, 1e-38, np.float32)
    for opcode in ("add.ftz.f32", "sub.ftz.f32"):
        result = value(f"{opcode} %r20, %r10, 0f80000000;", tiny)
        np.testing.assert_array_equal(result, 0)
    result = value("mul.ftz.f32 %r20, %r10, 0f41200000;", tiny)
    np.testing.assert_array_equal(result, 0)


def test_packed_conversions_put_the_first_source_high():
    one, two = np.full(LANES, 1, np.float32), np.full(LANES, 2.5, np.float32)
    bf16 = value("cvt.rn.bf16x2.f32 %r20, %r10, %r11;", one, two)
    np.testing.assert_array_equal(bf16, 0x3F80_4020)
    f16 = value("cvt.rn.f16x2.f32 %r20, %r10, %r11;", one, two)
    np.testing.assert_array_equal(f16, 0x3C00_4100)
    body = "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r10, %r11; mov.b32 %r20, {%rs1, 0};"
    np.testing.assert_array_equal(value(body, one, two), 0x3842)
    body = "cvt.rn.satfinite.e5m2x2.f32 %rs1, %r10, %r11; mov.b32 %r20, {%rs1, 0};"
    np.testing.assert_array_equal(value(body, one, two), 0x3C41)


def test_packed_conversions_with_relu():
    x = np.resize(
        np.float32([-1, -0.0, np.nan, -np.inf, 7e4, 3e-8, -1e-7, 2.5]), LANES
    ).copy()
    want = [0, 0, 0x7FFF, 0, 0x7C00, 1, 0, 0x4100]
    high = value("cvt.rn.relu.f16x2.f32 %r20, %r10, 0f3F800000;", x)
    assert high[:8].tolist() == [code << 16 | 0x3C00 for code in want]
    low = value("cvt.rn.relu.f16x2.f32 %r20, 0f3F800000, %r10;", x)
    assert low[:8].tolist() == [code | 0x3C000000 for code in want]
    low = value("cvt.rn.relu.bf16x2.f32 %r20, 0fBF800000, %r10;", x)
    assert low[:4].tolist() == [0, 0, 0x7FFF, 0] and low[7] == 0x4020


HALVES = {
    "add.f16x2 %r20, %r10, %r11;": lambda a, b, c: a + b,
    "add.rn.f16x2 %r20, %r10, %r11;": lambda a, b, c: a + b,
    "sub.rn.f16x2 %r20, %r10, %r11;": lambda a, b, c: a - b,
    "mul.rn.f16x2 %r20, %r10, %r11;": lambda a, b, c: a * b,
    "fma.rn.f16x2 %r20, %r10, %r11, %r12;": lambda a, b, c: (
        (a.astype(np.float64) * b + c).astype(np.float16)
    ),
}


@pytest.mark.parametrize("body", HALVES)
def test_packed_halves(body):
    """Of any bits: numpy's halves, but every NaN is 0x7fff."""
    with np.errstate(all="ignore"):
        halves = HALVES[body](*(words.view(np.float16) for words in WORDS))
    expected = np.where(np.isnan(halves), np.uint16(0x7FFF), halves.view(np.uint16))
    result = value(body, *(words.copy() for words in WORDS))
    np.testing.assert_array_equal(result.view(np.uint16), expected)


@pytest.mark.parametrize(
    ("instruction", "to_bits", "wide"),
    [
        (
            "fma.rn.f32.bf16 %r20, %rs1, %rs2, %r11;",
            lambda x: (x.view(np.uint32) >> 16).astype(np.uint16),
            lambda bits: (bits.astype(np.uint32) << 16).view(np.float32),
        ),
        (
            "fma.rn.f32.f16 %r20, %rs1, %rs2, %r11;",
            lambda x: x.astype(np.float16).view(np.uint16),
            lambda bits: bits.view(np.float16).astype(np.float32),
        ),
    ],
    ids=["bf16", "f16"],
)
def test_halves_are_multiplied_in_fp32(instruction, to_bits, wide):
    """As sm_100 does: the product is exact, and its sum with an fp32 is rounded once."""
    halves = to_bits(RNG.uniform(-4, 4, (2, LANES)).astype(np.float32))
    c = RNG.uniform(-1, 1, LANES).astype(np.float32)
    packed = halves[0] | halves[1].astype(np.uint32) << 16
    a, b = (wide(each).astype(np.longdouble) for each in halves)
    expected = (a * b + c).astype(np.float32).view(np.uint32)
    body = f"mov.b32 {{%rs1, %rs2}}, %r10; {instruction}"
    np.testing.assert_array_equal(value(body, packed, c.view(np.uint32)), expected)


@pytest.mark.parametrize(
    "body",
    [
        "add.rm.f16x2 %r20, %r10, %r10;",
        "add.rn.ftz.f16x2 %r20, %r10, %r10;",
        "fma.rm.f16x2 %r20, %r10, %r10, %r10;",
        "mov.b32 {%rs1, %rs2}, %r10; fma.rm.f32.bf16 %r20, %rs1, %rs2, %r10;",
        "mov.b32 {%rs1, %rs2}, %r10; fma.rn.bf16 %rs1, %rs1, %rs2, %rs1;",
        "cvt.relu.rn.f16x2.f32 %r20, %r10, %r10;",
        "cvt.rn.relu.f16.f32 %rs1, %r10;",
        "cvt.rn.relu.s32.f32 %r20, %r10;",
    ],
)
def test_forms_of_halves_that_are_refused(body):
    with pytest.raises(UnsupportedInstruction):
        execute(body, WORDS[0].copy())


def test_e4m3_codes_by_the_bits_of_halves():
    """As inline assembly has it: the half next to t * 2^-24 has t's code as bits, ties to even."""
    body = """{ .reg .b32 low, high;
cvt.rn.relu.f16x2.f32 low, %r11, %r10; cvt.rn.relu.f16x2.f32 high, %r13, %r12;
prmt.b32 %r20, low, high, 0x6420; }"""
    t = RNG.uniform(-20, 126.5, (4, LANES)).astype(np.float32)
    t[:, :8] = [0, -0.0, 0.5, 1.5, 125.5, 126.5, -np.inf, 1e-30]
    codes = np.rint(np.maximum(t, 0)).astype(np.uint8)
    t *= np.float32(2.0**-24)
    expected = codes.T.reshape(-1).view(np.uint32)
    np.testing.assert_array_equal(value(body, *t), expected)
    t[2] = np.nan
    assert (value(body, *t) >> 16 & 0xFF == 0xFF).all()  # a NaN's code


def test_e4m3_of_two_halves():
    """All halves that nothing clips, NaN too, each beside another: as their fp32 values round."""
    halves = np.arange(2**16, dtype=np.uint16)
    halves = halves[~(np.abs(halves.view(np.float16)) > 464)]
    of_halves = "cvt.rn.satfinite.e4m3x2.f16x2 %rs1, %r10; mov.b32 %r20, {%rs1, 0};"
    of_floats = "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r11, %r10; mov.b32 %r20, {%rs1, 0};"
    for start in range(0, len(halves) - 1, LANES):
        low = np.resize(halves[start : start + LANES], LANES)
        high = np.roll(low, 1)
        words = (low | high.astype(np.uint32) << 16).view(np.float32)
        floats = (x.view(np.float16).astype(np.float32) for x in (low, high))
        right = value(of_floats, *floats)
        np.testing.assert_array_equal(value(of_halves, words), right)


@pytest.mark.parametrize("shift", [0, 16])
def test_a_half_that_e4m3_clips_is_reported(shift):
    body = "cvt.rn.satfinite.e4m3x2.f16x2 %rs1, %r10; mov.b32 %r20, {%rs1, 0};"
    for half, clips in ((464.0, False), (464.5, True), (-465.0, True), (np.inf, True)):
        word = np.uint32(np.float16(half).view(np.uint16)) << np.uint32(shift)
        _, result = execute(body, np.full(LANES, word, np.uint32).view(np.float32))
        assert bool(result.findings) == clips, half


def test_conversions_of_one_value_to_16_bits_and_back():
    third = np.full(LANES, 1 / 3, np.float32)
    for narrow, widen, bits in (
        ("cvt.rn.bf16.f32 %rs1, %r10;", "cvt.f32.bf16 %r20, %rs1;", 0x3EAB),
        ("cvt.rn.f16.f32 %rs1, %r10;", "cvt.f32.f16 %r20, %rs1;", 0x3555),
    ):
        body = f"{narrow} mov.b32 %r20, {{%rs1, 0}};"
        np.testing.assert_array_equal(value(body, third), bits)
        back = value(f"{narrow} {widen}", third).view(np.float32)
        assert 0 < abs(back[0] - third[0]) < 2.0**-9 and (back == back[0]).all()


def test_float_to_integer_conversions():
    x = np.resize(np.float32([1.5, 2.5, -1.5, 3e9, -3e9, np.nan]), LANES).copy()
    rounded = value("cvt.rni.s32.f32 %r20, %r10;", x).view(np.int32)[:6]
    assert rounded.tolist() == [2, 2, -2, 2**31 - 1, -(2**31), 0]
    cut = value("cvt.rzi.s32.f32 %r20, %r10;", x).view(np.int32)[:3]
    assert cut.tolist() == [1, 2, -1]
    floor = value("cvt.rmi.s32.f32 %r20, %r10;", x).view(np.int32)[:3]
    assert floor.tolist() == [1, 2, -2]
    ceiling = value("cvt.rpi.u32.f32 %r20, %r10;", x)[:6]
    assert ceiling.tolist() == [2, 3, 0, 3_000_000_000, 0, 0]


def test_integer_to_float_conversions():
    a = WORDS[0].copy()
    result = value("cvt.rn.f32.u32 %r20, %r10;", a).view(np.float32)
    np.testing.assert_array_equal(result, a.astype(np.float32))
    result = value("cvt.rn.f32.s32 %r20, %r10;", a).view(np.float32)
    np.testing.assert_array_equal(result, signed(a).astype(np.float32))


# -- memory


def test_params_are_read_by_type():
    body = """
ld.param.b32 %r21, [k_param_1]; ld.param.u16 %r22, [k_param_1+2]; add.u32 %r20, %r21, %r22;"""
    expected = (FIRST_INPUT & 0xFFFFFFFF) + (FIRST_INPUT >> 16 & 0xFFFF)
    np.testing.assert_array_equal(value(body, WORDS[0].copy()), expected)
    body = "ld.param.v2.b32 {%r21, %r20}, [k_param_1];"
    np.testing.assert_array_equal(value(body, WORDS[0].copy()), FIRST_INPUT >> 32)


def test_params_of_bytes_and_vectors():
    body = "ld.param.b8 %rs1, [k_param_1+3]; mov.b32 %r20, {%rs1, 0};"
    expected = FIRST_INPUT >> 24 & 0xFF
    np.testing.assert_array_equal(value(body, WORDS[0].copy()), expected)
    body = """ld.param.v2.b8 {%rs1, %rs2}, [k_param_1+2]; ld.param.v4.b32
{%r21, %r22, %r23, %r24}, [k_param_0]; mov.b32 %r20, {%rs2, 0}; add.u32 %r20, %r20, %r23;"""
    expected += FIRST_INPUT & 0xFFFFFFFF
    np.testing.assert_array_equal(value(body, WORDS[0].copy()), expected)


LOADS = (
    "ld.global.b8 ld.global.u8 ld.global.s8 ld.global.b16 ld.global.u16 ld.global.s16 "
    "ld.global.b32 ld.global.u32 ld.global.s32 ld.global.b64 ld.global.u64 ld.global.s64"
)


@pytest.mark.parametrize("opcode", LOADS.split())
def test_loads_extend(opcode):
    """By the sign where the type has one, to the width of the register."""
    kind = opcode.rpartition(".")[2]
    size = int(kind[1:]) // 8
    data = RNG.integers(0, 256, LANES * 8, dtype=np.uint8)
    body = f"""ld.param.b64 %rd5, [k_param_1]; mul.wide.u32 %rd6, %r1, {size};
add.s64 %rd5, %rd5, %rd6; {opcode} %rd7, [%rd5]; st.global.b64 [%rd2], %rd7;"""
    out = np.zeros(LANES, np.uint64)
    _, result = execute(body, data, out=out, width=8)
    assert result.findings == ()
    held = data.view(f"{'i' if kind[0] == 's' else 'u'}{size}")[:LANES]
    np.testing.assert_array_equal(out.view(np.int64), held.astype(np.int64))


STORES = (
    "st.shared.b8 st.shared.s8 st.shared.u8 st.shared.b16 st.shared.s16 st.shared.u16 "
    "st.shared.b32 st.shared.s32 st.shared.u32 st.shared::cta.f32 st.shared.b64 st.shared.s64 "
    "st.shared.u64"
)


@pytest.mark.parametrize("opcode", STORES.split())
def test_stores_keep_the_low_bits(opcode):
    size = int(opcode.rpartition(".")[2][1:]) // 8
    source = {1: "%rs1", 2: "%rs1", 4: "%r10", 8: "%rd6"}[size]
    body = f"""mov.b32 %r30, smem; mul.lo.s32 %r31, %r1, 8; add.s32 %r30, %r30, %r31;
st.shared.b64 [%r30], 0; cvt.u16.u32 %rs1, %r10; mov.b64 %rd6, {{%r10, 0}};
{opcode} [%r30], {source}; ld.shared::cta.f32 %r20, [%r30];"""
    a = WORDS[0].copy()
    mask = np.uint32((1 << 8 * min(size, 4)) - 1)
    np.testing.assert_array_equal(value(body, a), a & mask)


def test_global_vectors_and_narrow_loads():
    data = RNG.integers(0, 1 << 32, 4 * LANES, dtype=np.uint32)
    body = """
ld.param.b64 %rd5, [k_param_1]; mul.wide.u32 %rd6, %r1, 16; add.s64 %rd5, %rd5, %rd6;
ld.global.v4.b32 {%r21, %r22, _, %r24}, [%rd5];
ld.global.s8 %r25, [%rd5+11];
xor.b32 %r20, %r21, %r22; xor.b32 %r20, %r20, %r24; xor.b32 %r20, %r20, %r25;"""
    a, b, c, d = data.reshape(LANES, 4).T
    signs = (c >> 24).astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32)
    np.testing.assert_array_equal(value(body, data), a ^ b ^ d ^ signs)


def test_shared_store_and_load():
    body = """
mov.b32 %r30, smem; shl.b32 %r31, %r1, 3; add.s32 %r30, %r30, %r31;
st.shared.v2.b32 [%r30], {%r10, %r11};
bar.sync 0;
xor.b32 %r31, %r31, 1016; mov.b32 %r32, smem; add.s32 %r32, %r32, %r31;
ld.shared.b32 %r20, [%r32+4];"""
    a, b = WORDS[0].copy(), WORDS[1].copy()
    np.testing.assert_array_equal(value(body, a, b), b[::-1])


def test_guarded_store_leaves_other_lanes():
    out, _ = execute("setp.lt.u32 %p1, %r1, 5; @%p1 st.global.b32 [%rd2], 9;")
    assert out[:6].tolist() == [9, 9, 9, 9, 9, 0]


def test_store_matrix():
    body = """
mov.b32 %r30, smem; shl.b32 %r31, %r1, 4; add.s32 %r31, %r30, %r31;
stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r31], {%r10, %r10, %r10, %r10};
bar.sync 0;
shl.b32 %r32, %r1, 4; add.s32 %r32, %r30, %r32; ld.shared.b32 %r20, [%r32];"""
    # Each warp's lane l gives row l: row r of a matrix starts with what lane 4 r holds.
    a = WORDS[0].copy()
    lane = np.arange(LANES)
    expected = a[lane // 32 * 32 + 4 * (lane % 8)]
    np.testing.assert_array_equal(value(body, a), expected)


def test_store_matrix_transposed():
    """Two matrices whose rows lanes 0 to 15 name; element (r, c) is 8 r + c, the second + 64."""
    body = """
mov.b32 %r30, smem; shl.b32 %r31, %r1, 4; add.s32 %r31, %r30, %r31;
and.b32 %r32, %r1, 31; shl.b32 %r32, %r32, 1; mul.lo.s32 %r33, %r32, 65537;
add.s32 %r33, %r33, 65536; add.s32 %r34, %r33, 4194368;
stmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 [%r31], {%r33, %r34};
bar.warp.sync -1; ld.shared.b16 %rs1, [%r31+6]; mov.b32 %r20, {%rs1, 0};"""
    written = np.arange(LANES) % 32 < 16
    out, _ = execute(
        f"{body} and.b32 %r35, %r1, 31; setp.lt.u32 %p1, %r35, 16; "
        "@%p1 st.global.b32 [%rd2], %r20;"
    )
    row = np.arange(LANES) % 32
    expected = np.where(written, 8 * 3 + row % 8 + 64 * (row // 8), 0)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("instruction", "matrix"),
    [
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r20}, [%r31];", 0),
        ("ldmatrix.sync.aligned.m8n8.x2.shared::cta.b16 {%r33, %r20}, [%r31];", 1),
        (
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r33, %r34, %r35, %r20}, [%r31];",
            3,
        ),
    ],
)
def test_load_matrix(instruction, matrix):
    """Lane l names row l; of a matrix lane 4 r + c gets word c of row r. The last one is kept."""
    body = f"""
mov.b32 %r30, smem; shl.b32 %r31, %r1, 4; add.s32 %r31, %r30, %r31;
st.shared.v4.b32 [%r31], {{%r10, %r11, %r11, %r10}};
bar.sync 0; {instruction}"""
    a, b = WORDS[0].copy(), WORDS[1].copy()
    lane = np.arange(LANES)
    row = lane // 32 * 32 + 8 * matrix + lane % 32 // 4
    expected = np.where(np.isin(lane % 4, (0, 3)), a[row], b[row])
    np.testing.assert_array_equal(value(body, a, b), expected)


def test_load_matrix_transposed():
    """Lane l names row l; element (r, c) of matrix m is 64 m + 8 r + c, 256 more in each warp."""
    body = """
mov.b32 %r30, smem; shl.b32 %r31, %r1, 4; add.s32 %r31, %r30, %r31;
shl.b32 %r32, %r1, 3; mul.lo.s32 %r33, %r32, 65537; add.s32 %r33, %r33, 65536;
add.s32 %r34, %r33, 131074; add.s32 %r35, %r34, 131074; add.s32 %r36, %r35, 131074;
st.shared.v4.b32 [%r31], {%r33, %r34, %r35, %r36}; bar.sync 0;
ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r33, %r34, %r20, %r35}, [%r31];"""
    lane = np.arange(LANES)
    first = 256 * (lane // 32) + 64 * 2 + 8 * (2 * (lane % 4)) + lane % 32 // 4
    np.testing.assert_array_equal(value(body), first | (first + 8) << 16)


def permuted(a, b, selector):
    """prmt.b32 byte by byte."""
    result = np.zeros(LANES, np.uint32)
    held = np.stack([a, b], axis=1).view(np.uint8)
    for lane, place in np.ndindex(LANES, 4):
        nibble = int(selector[lane]) >> 4 * place & 15
        byte = int(held[lane, nibble & 7])
        if nibble & 8:
            byte = 255 * (byte >> 7)
        result[lane] |= np.uint32(byte << 8 * place)
    return result


def test_permuted_bytes():
    a, b, selector = (words.copy() for words in WORDS)
    got = value("prmt.b32 %r20, %r10, %r11, %r12;", a, b, selector)
    np.testing.assert_array_equal(got, permuted(a, b, selector))
    for fixed_selector in (0x6420, 0x0123, 0x89AB, 0xFEDC, 0x73C8, -1):
        fixed = value(f"prmt.b32 %r20, %r10, %r11, {fixed_selector};", a, b)
        selectors = np.full(LANES, fixed_selector & 0xFFFF, np.uint32)
        np.testing.assert_array_equal(fixed, permuted(a, b, selectors))
    fixed = value("prmt.b32 %r20, %r10, 305419896, 0x7531U;", a)
    second = np.full(LANES, 305419896, np.uint32)
    np.testing.assert_array_equal(
        fixed, permuted(a, second, np.full(LANES, 0x7531, np.uint32))
    )


WITHOUT_EFFECT = (
    "prefetch.tensormap [%rd1];",
    "prefetch.param.tensormap [k_param_0];",
    "griddepcontrol.wait;",
    "griddepcontrol.launch_dependents;",
    "bar.warp.sync -1;",
    "tcgen05.fence::before_thread_sync;",
    "tcgen05.fence::after_thread_sync;",
)


@pytest.mark.parametrize("instruction", WITHOUT_EFFECT)
def test_no_effect(instruction):
    np.testing.assert_array_equal(value(f"{instruction} mov.b32 %r20, 5;"), 5)


# -- warps


def test_elect_picks_one_lane_of_each_warp():
    body = "elect.sync %r21|%p1, -1; selp.b32 %r20, 1, 0, %p1;"
    result = value(body)
    assert result.reshape(4, 32).sum(axis=1).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("opcode", "lane", "clamp", "source"),
    [
        ("shfl.sync.bfly.b32", 1, 31, lambda lane: lane ^ 1),
        ("shfl.sync.idx.b32", 3, 31, lambda lane: lane // 32 * 32 + 3),
        ("shfl.sync.idx.b32", 3, 0x181F, lambda lane: lane // 8 * 8 + 3),
        (
            "shfl.sync.up.b32",
            2,
            0,
            lambda lane: np.where(lane % 32 < 2, lane, lane - 2),
        ),
        (
            "shfl.sync.down.b32",
            2,
            31,
            lambda lane: np.where(lane % 32 > 29, lane, lane + 2),
        ),
    ],
)
def test_shuffle(opcode, lane, clamp, source):
    a = WORDS[0].copy()
    expected = a[source(np.arange(LANES))]
    body = f"{opcode} %r20, %r10, {lane}, {clamp}, -1;"
    np.testing.assert_array_equal(value(body, a), expected)
    body = f"mov.b32 %r31, {lane}; {opcode} %r20|%p1, %r10, %r31, {clamp}, -1;"
    np.testing.assert_array_equal(value(body, a), expected)


def test_votes_are_per_warp():
    head = "setp.lt.u32 %p1, %r1, 40;"
    tail = "selp.b32 %r20, 1, 0, %p2;"

    def per_warp(body):
        return value(body).reshape(4, 32)[:, 7].tolist()

    assert per_warp(f"{head} vote.sync.any.pred %p2, %p1, -1; {tail}") == [1, 1, 0, 0]
    assert per_warp(f"{head} vote.sync.all.pred %p2, %p1, -1; {tail}") == [1, 0, 0, 0]
    assert per_warp(f"{head} vote.sync.all.pred %p2, !%p1, -1; {tail}") == [0, 0, 1, 1]
    body = f"{head} vote.sync.ballot.b32 %r20, %p1, -1;"
    assert per_warp(body) == [0xFFFFFFFF, 0xFF, 0, 0]


@pytest.mark.parametrize(
    ("opcode", "dtype", "reduce"),
    [
        ("redux.sync.add.s32", np.int32, np.add.reduce),
        ("redux.sync.add.u32", np.uint32, np.add.reduce),
        ("redux.sync.min.s32", np.int32, np.min),
        ("redux.sync.max.s32", np.int32, np.max),
        ("redux.sync.min.u32", np.uint32, np.min),
        ("redux.sync.max.u32", np.uint32, np.max),
    ],
)
def test_reductions_are_per_warp(opcode, dtype, reduce):
    a = WORDS[0].copy()
    sums = [reduce(warp.astype(np.int64)) for warp in a.view(dtype).reshape(4, 32)]
    expected = np.repeat(np.array(sums).astype(dtype).view(np.uint32), 32)
    found = value(f"{opcode} %r20, %r10, -1;", a)
    np.testing.assert_array_equal(found, expected)
    assert value("redux.sync.add.s32 %r20, 3, -1;").tolist() == [96] * LANES
    body = f"mov.b32 %r31, -1; {opcode} %r20, %r10, %r31;"
    np.testing.assert_array_equal(value(body, a), expected)


def test_divergent_lanes_come_together_again():
    body = """
mov.b32 %r20, 0; setp.lt.u32 %p1, %r1, 45; @%p1 bra THEN;
add.s32 %r20, %r20, 1; bra AFTER;
THEN: add.s32 %r20, %r20, 10;
AFTER: shfl.sync.bfly.b32 %r21, %r20, 16, 31, -1; add.s32 %r20, %r20, %r21;"""
    each = np.where(np.arange(LANES) < 45, 10, 1)
    np.testing.assert_array_equal(value(body), each + each[np.arange(LANES) ^ 16])


def test_loop_with_lanes_that_leave_at_different_times():
    body = """
mov.b32 %r20, 0; and.b32 %r21, %r1, 7;
LOOP: add.s32 %r20, %r20, %r21; sub.s32 %r21, %r21, 1; setp.gt.s32 %p1, %r21, 0; @%p1 bra LOOP;"""
    n = np.arange(LANES) & 7
    np.testing.assert_array_equal(value(body), n * (n + 1) // 2)


def test_lanes_that_return_early():
    out, _ = execute("setp.gt.u32 %p1, %r1, 9; @%p1 ret; st.global.b32 [%rd2], 1;")
    assert out.sum() == 10


def test_setmaxnreg_is_bookkeeping():
    body = """
setmaxnreg.dec.sync.aligned.u32 40; setmaxnreg.inc.sync.aligned.u32 240; mov.b32 %r20, 1;"""
    np.testing.assert_array_equal(value(body), 1)


def test_a_block_smaller_than_a_warpgroup():
    out, result = execute("st.global.b32 [%rd2], %r1;", threads=40)
    assert result.findings == ()
    assert out.tolist() == list(range(40))


NAMED = (
    ("bar.sync 3, 128;", "bar.arrive 3, 128;"),
    ("barrier.sync 3, 128;", "barrier.arrive 3, 128;"),
    ("barrier.cta.sync.aligned 3, 128;", "barrier.cta.arrive.aligned 3, 128;"),
)


@pytest.mark.parametrize(("sync", "arrive"), NAMED)
def test_named_barriers(sync, arrive):
    """Warps 0 and 1 tell warps 2 and 3, which wait, that they have stored."""
    body = f"""
mov.b32 %r30, smem; and.b32 %r31, %r1, 63; shl.b32 %r31, %r31, 2; add.s32 %r30, %r30, %r31;
mov.b32 %r20, 0; setp.gt.u32 %p1, %r1, 63; @%p1 bra CONSUMER;
st.shared.b32 [%r30], %r1; {arrive} bra DONE;
CONSUMER: {sync} ld.shared.b32 %r20, [%r30];
DONE:"""
    lanes = np.arange(LANES)
    np.testing.assert_array_equal(value(body), np.where(lanes > 63, lanes - 64, 0))


# -- barriers, copies and products that work; `test_checks` has those that do not

COPY = """
mov.b32 %r30, smem; setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r30], 1;
fence.mbarrier_init.release.cluster;
READY: bar.sync 0;
mov.b64 %rd5, k_param_2; cvta.param.u64 %rd6, %rd5;
@%p1 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%r30], 512;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
  [%r30+1024], [%rd6, {0, %r40}], [%r30];
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r30], 0, 1000000;
@!%p2 bra WAIT;
shl.b32 %r31, %r1, 2; add.s32 %r31, %r31, %r30;
ld.shared.b32 %r20, [%r31+1024];
"""


def test_tensor_load():
    data = np.arange(64 * 8, dtype=np.uint32)
    maps = (tensor_map(FIRST_INPUT, (16, 32), (16, 8)),)
    result = value("mov.b32 %r40, 2;" + COPY, data, maps=maps)
    np.testing.assert_array_equal(result, data[32 : 32 + LANES])


@pytest.mark.parametrize(
    "opcode",
    [
        "cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint",
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".cta_group::1",
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes",
    ],
)
def test_tensor_load_of_each_rank(opcode):
    """A box of 8 elements in dimension 0, where the tensor ends, and of 2 in the others."""
    rank = int(opcode.split(".")[4][0])
    dims, box = (32, 3, 4, 2, 3)[:rank], (8, 2, 2, 2, 2)[:rank]
    data = np.arange(np.prod(dims), dtype=np.uint32)
    maps = (tensor_map(FIRST_INPUT, dims, box),)
    nbytes = 32 << rank - 1
    corner = ("24", "1", "2", "0", "1")[:rank]
    hint = ", %rd9" if "cache_hint" in opcode else ""
    body = COPY.replace(", 512;", f", {nbytes};").replace(
        COPY[COPY.index("cp.async") : COPY.index("WAIT:")],
        f"{opcode} [%r30+1024], [%rd6, {{{', '.join(corner)}}}], [%r30]{hint};\n",
    )
    body = body.replace(
        "shl.b32 %r31, %r1, 2;",
        f"and.b32 %r31, %r1, {nbytes // 4 - 1}; " "shl.b32 %r31, %r31, 2;",
    )
    tensor = data.reshape(dims[::-1])
    where = [slice(int(c), int(c) + b) for c, b in zip(corner, box, strict=True)]
    expected = np.resize(tensor[tuple(where[::-1])].reshape(-1), LANES)
    np.testing.assert_array_equal(value(body, data, maps=maps), expected)


def test_tensor_load_outside_is_zero():
    data = np.arange(64 * 8, dtype=np.uint32)
    maps = (tensor_map(FIRST_INPUT, (16, 32), (16, 8)),)
    result = value("mov.b32 %r40, -3;" + COPY, data, maps=maps)
    np.testing.assert_array_equal(
        result, np.concatenate([np.zeros(48), data[: LANES - 48]])
    )


def test_tensor_store():
    body = """
mov.b32 %r30, smem; shl.b32 %r31, %r1, 2; add.s32 %r31, %r31, %r30;
st.shared.b32 [%r31], %r10;
fence.proxy.async.shared::cta; bar.sync 0;
mov.b64 %rd5, k_param_2;
setp.gt.u32 %p1, %r1, 31; @%p1 bra DONE;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd5, {0, 0}], [%r30];
cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
DONE:"""
    out = np.zeros(LANES, np.uint32)
    a = WORDS[0].copy()
    maps = (tensor_map(kernels.OUT, (16, 8), (16, 8)),)
    _, result = execute(body, a, out=out, maps=maps)
    assert result.findings == ()
    assert result.statistics["tensor stores"] == 1  # 32 lanes, one store
    np.testing.assert_array_equal(out, a)


PRODUCT = """
mov.b32 %r30, smem; shl.b32 %r31, %r1, 4; add.s32 %r31, %r31, %r30;
ld.param.b64 %rd5, [k_param_1]; mul.wide.u32 %rd6, %r1, 16; add.s64 %rd5, %rd5, %rd6;
ld.global.v4.b32 {%r32, %r33, %r34, %r35}, [%rd5];
st.shared.v4.b32 [%r31], {%r32, %r33, %r34, %r35};
setp.gt.u32 %p1, %r1, 15; @%p1 bra READY;
ld.global.v4.b32 {%r32, %r33, %r34, %r35}, [%rd5+2048];
st.shared.v4.b32 [%r31+2048], {%r32, %r33, %r34, %r35};
READY: fence.proxy.async; bar.sync 0;
mov.b64 %rd7, 68720001088; mov.b64 %rd8, 68720001216;
mov.b32 %r50, 0; mov.b32 %r51, 0; mov.b32 %r52, 0; mov.b32 %r53, 0; mov.pred %p2, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
  {%r50, %r51, %r52, %r53}, %rd7, %rd8, %p2, 1, 1, 0, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
  {%r50, %r51, %r52, %r53}, %rd7, %rd8, 1, -1, 1, 0, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
  {%r50, %r51, %r52, %r53}, %rd7, %rd8, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
"""


def cores(x):
    """Eight rows of eight elements are a core matrix; two of them along k, then eight rows on."""
    return x.reshape(-1, 8, 2, 8).transpose(0, 2, 1, 3).reshape(-1)


def test_product_from_shared_memory():
    a = RNG.integers(-4, 5, (64, 16)).astype(np.float32)
    b = RNG.integers(-4, 5, (8, 16)).astype(np.float32)
    bits = np.concatenate([cores(a), cores(b)]).view(np.uint32) >> np.uint32(16)
    data = bits.astype(np.uint16).view(np.uint32)
    assert 68720001088 == (1024 >> 4) | (128 >> 4) << 16 | (256 >> 4) << 32
    result = value(PRODUCT, data, register="%r51").view(np.float32)
    lane = np.arange(LANES)
    row = lane // 32 * 16 + lane % 32 // 4
    np.testing.assert_array_equal(result, (a @ b.T)[row, lane % 4 * 2 + 1])


NARROW = {"e4m3": numerics.e4m3_rn_satfinite, "e5m2": numerics.e5m2_rn_satfinite}


@pytest.mark.parametrize(
    "opcode",
    [
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e5m2",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e4m3",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e5m2",
    ],
)
@pytest.mark.parametrize("a_in_registers", [False, True])
def test_product_of_8_bit_floats(opcode, a_in_registers):
    a = RNG.integers(-4, 5, (64, 32)).astype(np.float32)
    b = RNG.integers(-4, 5, (8, 32)).astype(np.float32)
    kinds = opcode.split(".")[-2:]
    held = [x.reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3).reshape(-1) for x in (a, b)]
    body = PRODUCT.replace(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16", opcode
    ).replace("1, 0, 0;", "1;")
    if a_in_registers:
        fragments = np.zeros((LANES, 4, 4), np.float32)
        for lane in range(LANES):
            warp, group, quad = lane // 32, lane % 32 // 4, lane % 4
            for i in range(4):
                row, column = 16 * warp + 8 * (i % 2) + group, 16 * (i // 2) + 4 * quad
                fragments[lane, i] = a[row, column : column + 4]
        held[0] = fragments.reshape(-1)
        body = from_registers(body)
    bits = [NARROW[kind](x) for kind, x in zip(kinds, held, strict=True)]
    data = np.concatenate(bits).astype(np.uint8).view(np.uint32)
    result = value(body, data, register="%r51").view(np.float32)
    lane = np.arange(LANES)
    row = lane // 32 * 16 + lane % 32 // 4
    np.testing.assert_array_equal(result, (a @ b.T)[row, lane % 4 * 2 + 1])


@pytest.mark.parametrize("flags", [", 0, 0;", ", 1, 0;", ", 0, 1;"])
def test_8_bit_operands_have_no_other_major(flags):
    """Not even by a flag that says K-major: the instruction has none."""
    opcode = "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3"
    wide = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
    body = PRODUCT.replace(wide, opcode).replace(", 0, 0;", flags)
    data = np.zeros(1024, np.uint32)
    with pytest.raises(UnsupportedInstruction, match="K-major"):
        execute(body, data)


def test_product_of_16_bit_floats():
    a = RNG.integers(-4, 5, (64, 16)).astype(np.float16)
    b = RNG.integers(-4, 5, (8, 16)).astype(np.float16)
    data = np.concatenate([cores(a), cores(b)]).view(np.uint32)
    opcode = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
    body = PRODUCT.replace(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16", opcode
    )
    result = value(body, data, register="%r51").view(np.float32)
    lane = np.arange(LANES)
    row = lane // 32 * 16 + lane % 32 // 4
    np.testing.assert_array_equal(result, (a @ b.T)[row, lane % 4 * 2 + 1])


@pytest.mark.parametrize("n", range(8, 257, 8))
@pytest.mark.parametrize("kind", ["bf16", "e5m2"])
def test_product_of_each_width(kind, n):
    """Every accumulator of every thread, of random matrices of small integers."""
    k = {"bf16": 16, "e5m2": 32}[kind]
    a = RNG.integers(-4, 5, (64, k)).astype(np.float32)
    b = RNG.integers(-4, 5, (n, k)).astype(np.float32)
    width = k // 2  # of a core matrix
    held = [
        x.reshape(-1, 8, 2, width).transpose(0, 2, 1, 3).reshape(-1) for x in (a, b)
    ]
    flat = np.concatenate(held)
    narrow = {"bf16": numerics.bf16_rn(flat), "e5m2": NARROW["e5m2"](flat).astype("u1")}
    data = narrow[kind].view(np.uint32)
    copies = "".join(
        f"""setp.lt.u32 %p1, %r1, {data.size // 4 - start};
@%p1 ld.global.v4.b32 {{%r32, %r33, %r34, %r35}}, [%rd5+{16 * start}];
@%p1 st.shared.v4.b32 [%r31+{16 * start}], {{%r32, %r33, %r34, %r35}};"""
        for start in range(0, data.size // 4, LANES)
    )
    registers = [f"%r{100 + i}" for i in range(n // 2)]
    transposes = ", 0, 0" if kind == "bf16" else ""
    stores = "".join(
        f"st.global.b32 [%rd2+{512 * i}], {register};"
        for i, register in enumerate(registers)
    )
    body = f"""
mov.b32 %r30, smem; shl.b32 %r31, %r1, 4; add.s32 %r31, %r31, %r30;
ld.param.b64 %rd5, [k_param_1]; mul.wide.u32 %rd6, %r1, 16; add.s64 %rd5, %rd5, %rd6;
{copies}
fence.proxy.async; bar.sync 0; mov.b64 %rd7, 68720001088; mov.b64 %rd8, 68720001216;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind}
  {{{', '.join(registers)}}}, %rd7, %rd8, 0, 1, 1{transposes};
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
{stores}"""
    out = np.zeros((n // 2, LANES), np.float32)
    _, result = execute(body, data, out=out)
    assert result.findings == ()
    i, lane = np.arange(n // 2)[:, None], np.arange(LANES)
    row = lane // 32 * 16 + lane % 32 // 4 + 8 * (i // 2 % 2)
    column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
    np.testing.assert_array_equal(out, (a @ b.T)[row, column])


def from_registers(body):
    """A product whose A each thread loads into four registers."""
    body = body.replace("%rd7, %rd8, ", "{%r60, %r61, %r62, %r63}, %rd8, ")
    loaded = "ld.global.v4.b32 {%r32, %r33, %r34, %r35}, [%rd5];"
    kept = "ld.global.v4.b32 {%r60, %r61, %r62, %r63}, [%rd5];"
    return body.replace(loaded, loaded + kept, 1)


def test_product_with_a_in_registers():
    a = RNG.integers(-4, 5, (64, 16)).astype(np.float32)
    b = RNG.integers(-4, 5, (8, 16)).astype(np.float32)
    fragments = np.zeros((LANES, 4, 2), np.float32)
    for lane in range(LANES):
        warp, group, quad = lane // 32, lane % 32 // 4, lane % 4
        for i in range(4):
            row, column = 16 * warp + 8 * (i % 2) + group, 8 * (i // 2) + 2 * quad
            fragments[lane, i] = a[row, column : column + 2]
    bits = np.concatenate([fragments.reshape(-1), cores(b)]).view(
        np.uint32
    ) >> np.uint32(16)
    body = from_registers(PRODUCT).replace(
        ", 0, 0;", ", 0;"
    )  # only B can be transposed
    result = value(body, bits.astype(np.uint16).view(np.uint32), register="%r51").view(
        np.float32
    )
    lane = np.arange(LANES)
    row = lane // 32 * 16 + lane % 32 // 4
    np.testing.assert_array_equal(result, (a @ b.T)[row, lane % 4 * 2 + 1])
