# SPDX-License-Identifier: Apache-2.0
"""Every opcode's emitter, alone: a few instructions against numpy."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from fmha_gen.emulator import numerics, ptx
from fmha_gen.emulator.emitters import EMITTERS, UnsupportedInstruction
from fmha_gen.emulator.lanes import LANES
from fmha_gen.emulator.lower import lower

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
    "sub.rn.f32 %r20, %r10, %r11;": lambda a, b, c: a - b,
    "mul.f32 %r20, %r10, 0f40400000;": lambda a, b, c: a * np.float32(3),
    "fma.rn.f32 %r20, %r10, %r11, %r12;": lambda a, b, c: (
        a.astype(np.longdouble) * b + c
    ).astype(np.float32),
    "div.rn.f32 %r20, %r10, %r11;": lambda a, b, c: a / b,
    "max.f32 %r20, %r10, %r11;": lambda a, b, c: np.fmax(a, b),
    "min.f32 %r20, %r10, %r11;": lambda a, b, c: np.fmin(a, b),
    "max.f32 %r20, %r10, %r11, %r12;": lambda a, b, c: np.fmax(np.fmax(a, b), c),
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


@pytest.mark.parametrize(
    ("comparison", "holds"),
    [
        ("eq", lambda a, b: a == b),
        ("ne", lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)),
        ("lt", lambda a, b: a < b),
        ("ge", lambda a, b: a >= b),
        ("equ", lambda a, b: (a == b) | np.isnan(a) | np.isnan(b)),
        ("neu", lambda a, b: a != b),
        ("ltu", lambda a, b: ~(a >= b)),
        ("leu", lambda a, b: ~(a > b)),
        ("gtu", lambda a, b: ~(a <= b)),
        ("geu", lambda a, b: ~(a < b)),
        ("nan", lambda a, b: np.isnan(a) | np.isnan(b)),
        ("num", lambda a, b: ~(np.isnan(a) | np.isnan(b))),
    ],
)
def test_float_comparison(comparison, holds):
    a, b = (lanes.copy() for lanes in FLOATS[:2])
    body = f"setp.{comparison}.f32 %p1, %r10, %r11; selp.b32 %r20, 1, 0, %p1;"
    np.testing.assert_array_equal(value(body, a, b), holds(a, b))


@pytest.mark.parametrize(
    ("opcode", "expected", "error"),
    [
        ("ex2.approx.ftz.f32", np.exp2, 2.0**-21),
        ("lg2.approx.ftz.f32", np.log2, 2.0**-21),
        ("rcp.approx.ftz.f32", np.reciprocal, 2.0**-22),
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


def test_packed_conversions_put_the_first_source_high():
    one, two = np.full(LANES, 1, np.float32), np.full(LANES, 2.5, np.float32)
    bf16 = value("cvt.rn.bf16x2.f32 %r20, %r10, %r11;", one, two)
    np.testing.assert_array_equal(bf16, 0x3F80_4020)
    f16 = value("cvt.rn.f16x2.f32 %r20, %r10, %r11;", one, two)
    np.testing.assert_array_equal(f16, 0x3C00_4100)
    body = "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r10, %r11; mov.b32 %r20, {%rs1, 0};"
    np.testing.assert_array_equal(value(body, one, two), 0x3842)


def test_float_to_integer_conversions():
    x = np.resize(np.float32([1.5, 2.5, -1.5, 3e9, -3e9, np.nan]), LANES).copy()
    rounded = value("cvt.rni.s32.f32 %r20, %r10;", x).view(np.int32)[:6]
    assert rounded.tolist() == [2, 2, -2, 2**31 - 1, -(2**31), 0]
    cut = value("cvt.rzi.s32.f32 %r20, %r10;", x).view(np.int32)[:3]
    assert cut.tolist() == [1, 2, -1]


# -- memory


def test_params_are_read_by_type():
    body = """
ld.param.b32 %r21, [k_param_1]; ld.param.u16 %r22, [k_param_1+2]; add.u32 %r20, %r21, %r22;"""
    expected = (FIRST_INPUT & 0xFFFFFFFF) + (FIRST_INPUT >> 16 & 0xFFFF)
    np.testing.assert_array_equal(value(body, WORDS[0].copy()), expected)
    body = "ld.param.v2.b32 {%r21, %r20}, [k_param_1];"
    np.testing.assert_array_equal(value(body, WORDS[0].copy()), FIRST_INPUT >> 32)


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


def test_prefetch_does_nothing():
    np.testing.assert_array_equal(
        value("prefetch.tensormap [%rd1]; mov.b32 %r20, 5;"), 5
    )


# -- warps


def test_elect_picks_one_lane_of_each_warp():
    body = "elect.sync %r21|%p1, -1; selp.b32 %r20, 1, 0, %p1;"
    result = value(body)
    assert result.reshape(4, 32).sum(axis=1).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("mode", "lane", "clamp", "source"),
    [
        ("bfly", 1, 31, lambda lane: lane ^ 1),
        ("idx", 3, 31, lambda lane: lane // 32 * 32 + 3),
        ("idx", 3, 0x181F, lambda lane: lane // 8 * 8 + 3),
        ("up", 2, 0, lambda lane: np.where(lane % 32 < 2, lane, lane - 2)),
        ("down", 2, 31, lambda lane: np.where(lane % 32 > 29, lane, lane + 2)),
    ],
)
def test_shuffle(mode, lane, clamp, source):
    a = WORDS[0].copy()
    expected = a[source(np.arange(LANES))]
    body = f"shfl.sync.{mode}.b32 %r20, %r10, {lane}, {clamp}, -1;"
    np.testing.assert_array_equal(value(body, a), expected)
    body = (
        f"mov.b32 %r31, {lane}; shfl.sync.{mode}.b32 %r20|%p1, %r10, %r31, {clamp}, -1;"
    )
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


def test_product_of_8_bit_floats():
    a = RNG.integers(-4, 5, (64, 32)).astype(np.float32)
    b = RNG.integers(-4, 5, (8, 32)).astype(np.float32)
    flat = np.concatenate(
        [x.reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3).reshape(-1) for x in (a, b)]
    )
    data = numerics.e4m3_rn_satfinite(flat).astype(np.uint8).view(np.uint32)
    body = PRODUCT.replace("k16.f32.bf16.bf16", "k32.f32.e4m3.e4m3").replace(
        "1, 0, 0;", "1;"
    )
    result = value(body, data, register="%r51").view(np.float32)
    lane = np.arange(LANES)
    row = lane // 32 * 16 + lane % 32 // 4
    np.testing.assert_array_equal(result, (a @ b.T)[row, lane % 4 * 2 + 1])


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
    body = PRODUCT.replace("%rd7, %rd8, ", "{%r60, %r61, %r62, %r63}, %rd8, ")
    loaded = "ld.global.v4.b32 {%r32, %r33, %r34, %r35}, [%rd5];"
    kept = "ld.global.v4.b32 {%r60, %r61, %r62, %r63}, [%rd5];"
    body = body.replace(loaded, loaded + kept, 1)
    body = body.replace(", 0, 0;", ", 0;")  # only B can be transposed
    result = value(body, bits.astype(np.uint16).view(np.uint32), register="%r51").view(
        np.float32
    )
    lane = np.arange(LANES)
    row = lane // 32 * 16 + lane % 32 // 4
    np.testing.assert_array_equal(result, (a @ b.T)[row, lane % 4 * 2 + 1])


# -- the table


def test_every_emitter_is_tested():
    source = (
        Path(__file__).read_text()
        + Path(__file__).with_name("test_checks.py").read_text()
    )
    missing = [opcode for opcode in EMITTERS if not re.search(rf"\b{opcode}\.", source)]
    assert missing == []


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("frob.b32 %r1, %r2;", "frob.b32 is not modelled"),
        ("add.rz.f32 %r1, %r2, %r3;", "add.rz.f32 is not modelled: .rz"),
        (
            "ex2.approx.f32 %r1, %r2;",
            "ex2.approx.f32 is not modelled: only .approx.ftz.f32 is",
        ),
        (
            "shfl.sync.idx.b32 %r1, %r2, 0, 31, 255;",
            "shfl.sync.idx.b32 is not modelled: a member mask other than the whole warp",
        ),
        ("add.s64 %r1, %r2, %r3;", "add.s64 is not modelled: %r2 is not 64 bits wide"),
        (
            "tcgen05.shift.cta_group::1.down [%r1];",
            "tcgen05.shift.cta_group::1.down is not modelled",
        ),
    ],
)
def test_unknown_instructions_name_the_line(instruction, message):
    module = ptx.parse(kernels.text(f"\n{instruction}"))
    with pytest.raises(UnsupportedInstruction) as caught:
        lower(module)
    assert str(caught.value) == f"PTX line {kernels.LINES_BEFORE + 1}: {message}"
