# SPDX-License-Identifier: Apache-2.0
"""Sums of 8-bit products against their definition in exact arithmetic, element by element."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from fmha_gen.emulator import numerics
from fmha_gen.emulator.accumulation import LOST, Accumulation, multiply_add
from hypothesis import given, settings
from hypothesis import strategies as st

from .kernels import execute

E4M3 = ("e4m3", "e4m3")
RNG = np.random.default_rng(11)
SMALLEST_NORMAL = {"e4m3": -6, "e5m2": -14}
FINITE = {
    "e4m3": [code for code in range(256) if code & 0x7F != 0x7F],
    "e5m2": [code for code in range(256) if code & 0x7C != 0x7C],
}
TO_F32 = {"e4m3": numerics.e4m3_to_f32, "e5m2": numerics.e5m2_to_f32}


def exponent(x: Fraction, smallest: int) -> int:
    """The power of two of the leading bit; of a subnormal that of the smallest normal."""
    power = 0
    while abs(x) >= Fraction(2) ** (power + 1):
        power += 1
    while abs(x) < Fraction(2) ** power and power > smallest:
        power -= 1
    return power


def cut(x: Fraction, unit: Fraction) -> Fraction:
    return unit * int(x / unit)  # `int` goes towards zero


def defined(a, b, c: float, dtypes: tuple[str, str]) -> float:
    """One element: rows of A and B, and the accumulator."""
    addends = [(Fraction(float(c)), exponent(Fraction(float(c)), -126))]
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        x, y = Fraction(x), Fraction(y)
        powers = (
            exponent(value, SMALLEST_NORMAL[kind])
            for value, kind in zip((x, y), dtypes, strict=True)
        )
        addends.append((x * y, sum(powers)))
    powers = [power for value, power in addends if value]
    if not powers:
        return 0.0
    unit = Fraction(2) ** (max(powers) - 13)
    total = sum(cut(value, unit) for value, _ in addends)
    return float(cut(total, Fraction(2) ** (exponent(total, -126) - 13)))


def bits(x) -> list[int]:
    return np.asarray(x, np.float32).view(np.uint32).tolist()


def rows(count: int):
    return st.lists(st.integers(0, 10**9), min_size=count, max_size=count)


@pytest.mark.parametrize("dtypes", [E4M3, ("e5m2", "e5m2"), ("e4m3", "e5m2")])
@settings(max_examples=150, deadline=None)
@given(rows(32), rows(32), st.integers(0, 2**32 - 1), st.integers(0, 32))
def test_any_element(dtypes, left, right, pattern, zeros):
    """Any codes, any accumulator, from none to all of the products zero."""
    c = np.array([pattern], np.uint32).view(np.float32)[0]
    if not abs(float(c)) < 2.0**120:  # beyond, sums overflow
        c = np.float32(pattern % 4096 - 2048) / 64
    a, b = (
        TO_F32[kind](np.array([FINITE[kind][x % len(FINITE[kind])] for x in held]))
        for kind, held in zip(dtypes, (left, right), strict=True)
    )
    a[:zeros] = 0
    got = multiply_add(a[None], b[None], np.full((1, 1), c), dtypes)
    assert float(got[0, 0]) == defined(a, b, float(c), dtypes)
    alone = multiply_add(a[None], b[None], None, dtypes)
    assert float(alone[0, 0]) == defined(a, b, 0.0, dtypes)


def random_codes(*shape: int) -> np.ndarray:
    """Values of e4m3, as normal deviates are spread."""
    values = RNG.standard_normal(shape).astype(np.float32)
    return numerics.e4m3_to_f32(numerics.e4m3_rn_satfinite(values))


def test_every_element_of_a_matrix():
    a, b = random_codes(64, 32), random_codes(24, 32)
    c = (RNG.standard_normal((64, 24)) * 9).astype(np.float32)
    got = multiply_add(a, b, c, E4M3)
    want = [[defined(a[i], b[j], c[i, j], E4M3) for j in range(24)] for i in range(64)]
    assert bits(got) == bits(want)
    # The cuts are seen: that is not what float32 makes of it.
    exact = multiply_add(a, b, c, E4M3, Accumulation.FP32)
    assert (got != exact).mean() > 0.9
    assert (np.abs(got - exact) <= 34 * LOST * 64).all()


def test_an_accumulator_alone_loses_its_low_bits():
    """Of zeros, the measurement by which the width was found first."""
    patterns = RNG.integers(0, 2**32, 4096, dtype=np.uint32)
    c = patterns.view(np.float32)[np.isfinite(patterns.view(np.float32))]
    c = c[: len(c) // 8 * 8].reshape(-1, 8)
    zeros = np.zeros((len(c), 32), np.float32), np.zeros((8, 32), np.float32)
    got = multiply_add(*zeros, c, E4M3)
    assert bits(got) == (c.view(np.uint32) & np.uint32(0xFFFFFC00)).tolist()


def test_what_is_exact_in_14_bits_stays():
    a = RNG.integers(-8, 9, (64, 32)).astype(np.float32)
    b = RNG.integers(-8, 9, (16, 32)).astype(np.float32)
    c = RNG.integers(-(2**12), 2**12, (64, 16)).astype(np.float32)
    assert np.array_equal(multiply_add(a, b, c, E4M3), c + a @ b.T)
    assert np.array_equal(multiply_add(a, b, None, E4M3), a @ b.T)


def test_the_order_along_k_does_not_matter():
    a, b = random_codes(64, 32), random_codes(8, 32)
    order = RNG.permutation(32)
    c = random_codes(64, 8) * np.float32(1.37)
    one = multiply_add(a, b, c, E4M3)
    assert bits(one) == bits(multiply_add(a[:, order], b[:, order], c, E4M3))
    assert bits(-one) == bits(multiply_add(-a, b, -c, E4M3))  # towards zero


def test_a_long_sum_shrinks():
    """Of positive products each loses half a unit of the sum on the average: 16 units a step.

    Without the cut before the sum it would be half a unit, and the shrinkage 0.2 % here.
    """
    values = numerics.e4m3_to_f32(
        numerics.e4m3_rn_satfinite(RNG.random((2, 64, 4096), np.float32))
    )
    c = None
    for step in range(0, 4096, 32):
        a, b = values[:, :, step : step + 32]
        c = multiply_add(a, b, c, E4M3)
    exact = values[0].astype(np.float64) @ values[1].T
    error = c / exact - 1
    assert error.max() < 0
    assert 0.05 < -error.mean() < 0.08


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@np.errstate(all="ignore")
def test_what_is_not_finite_stays_where_it_is(bad):
    a, b = random_codes(64, 32), random_codes(16, 32)
    c = random_codes(64, 16)
    clean = multiply_add(a, b, c, ("e5m2", "e5m2"))
    a[3, 7], b[5, 9], c[11, 13] = bad, bad, bad
    got = multiply_add(a, b, c, ("e5m2", "e5m2"))
    touched = np.zeros((64, 16), bool)
    touched[3], touched[:, 5], touched[11, 13] = True, True, True
    assert bits(got[~touched]) == bits(clean[~touched])
    assert not np.isfinite(got[touched]).any()
    assert math.isnan(got[3, 0]) == math.isnan(bad)


def test_wide_operands_are_added_in_fp32():
    a, b = random_codes(64, 16), random_codes(8, 16)
    c = (RNG.standard_normal((64, 8)) * 9).astype(np.float32)
    for how in Accumulation:
        got = multiply_add(a, b, c, ("bf16", "bf16"), how)
        assert bits(got) == bits(c + a @ b.T)


# Of ones: A and B of shared memory are the same 32 bytes a row. 1 + 2**-14 is the accumulator.
ONES = """
mov.b32 %r30, smem; shl.b32 %r31, %r1, 4; add.s32 %r31, %r31, %r30; mov.b32 %r32, 0x38383838;
st.shared.v4.b32 [%r31], {%r32, %r32, %r32, %r32}; fence.proxy.async; bar.sync 0;
mov.b64 %rd7, 68720001088; mov.b32 %r50, 0f3F800200; mov.b32 %r51, %r50;
mov.b32 %r52, %r50; mov.b32 %r53, %r50; mov.pred %p2, -1;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3
  {%r50, %r51, %r52, %r53}, %rd7, %rd7, %p2, 1, 1;
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
st.global.b32 [%rd2], %r51;"""


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, 33.0),
        ({"accumulation": Accumulation.DEVICE}, 33.0),
        ({"accumulation": Accumulation.FP32}, 33 + 2.0**-14),
    ],
)
def test_a_run_says_how(options, want):
    out, result = execute(ONES, **options)
    assert result.findings == ()
    assert (out.view(np.float32) == want).all()
