# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of packed bf16: each number rounded once, from the exact one by search."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import numpy as np
import pytest
from fmha_gen.emulator import numerics
from fmha_gen.emulator.emitters import UnsupportedInstruction
from fmha_gen.emulator.lanes import LANES
from hypothesis import given, settings
from hypothesis import strategies as st

from .kernels import execute, value

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BITS = st.integers(0, 2**16 - 1)
INFINITY, NAN, SIGN = 0x7F80, 0x7FFF, 0x8000
POSITIVE = [
    Fraction(float(x))
    for x in (np.arange(INFINITY, dtype=np.uint32) << np.uint32(16)).view(np.float32)
]
"""Finite numbers that are not negative, by their bits."""
OVERFLOW = POSITIVE[-1] + (POSITIVE[-1] - POSITIVE[-2]) / 2

OPERATIONS = {
    "add": (numerics.add_bf16, lambda a, b, c: a + b),
    "sub": (numerics.sub_bf16, lambda a, b, c: a - b),
    "mul": (numerics.mul_bf16, lambda a, b, c: a * b),
    "fma": (numerics.fma_bf16, lambda a, b, c: a * b + c),
}


def number(bits: int) -> float:
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


def nearest(exact: Fraction) -> int:
    """The bits of the nearest number, ties to even."""
    sign, size = (SIGN if exact < 0 else 0), abs(exact)
    if size >= OVERFLOW:
        return sign | INFINITY
    place = bisect.bisect_right(POSITIVE, size) - 1
    if place == len(POSITIVE) - 1:
        return sign | place
    below, above = size - POSITIVE[place], POSITIVE[place + 1] - size
    up = above < below or (above == below and place % 2 == 1)
    return sign | place + up


def check(name: str, *given: int) -> None:
    """given: bits of a, b and c, which is none of the operands of some."""
    function, exactly = OPERATIONS[name]
    operands = given[: 3 if name == "fma" else 2]
    got = int(function(*(np.array([x], np.uint16) for x in operands))[0])
    numbers = [number(x) for x in (*operands, 0)[:3]]
    wide = exactly(*map(np.float64, numbers))
    if not all(map(math.isfinite, numbers)):  # as float64 has it, which is no number
        assert got == (
            NAN if math.isnan(wide) else (SIGN if wide < 0 else 0) | INFINITY
        )
        return
    if exact := exactly(*map(Fraction, numbers)):
        assert got == nearest(exact), [hex(x) for x in operands]
    else:  # a zero by the rules of signs, which float64 has, too
        assert got == (SIGN if math.copysign(1, wide) < 0 else 0)


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=500, deadline=None)
@given(a=BITS, b=BITS, c=BITS)
def test_of_any_numbers(name, a, b, c):
    check(name, a, b, c)


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=500, deadline=None)
@given(a=BITS, scale=st.integers(-12, 12), b=BITS, away=st.integers(-20, 20), c=BITS)
def test_of_numbers_of_like_size(name, a, scale, b, away, c):
    """Sums of which both operands count, and products about the smallest numbers."""
    a, b = a & 0x807F, b & 0x807F
    low = 1 if name in ("mul", "fma") else 127
    first, second = ((127 - scale) << 7, (low + abs(scale)) << 7)
    third = max(low + away, 0) << 7
    check(name, a | first, b | second, c & 0x807F | third)


@pytest.mark.parametrize("name", OPERATIONS)
def test_at_the_edges(name):
    edges = (
        *(0, 0x8000, 1, 0x8001, 0x007F, 0x0080, 0x8080, 0x3F7F, 0x3F80, 0x3F81),
        *(0xBF80, 0x3F00, 0x3B80, 0x0040, 0x1FC0, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80),
        *(0x7FC0, 0xFFC1, 0x7F81),
    )
    for a in edges:
        for b in edges:
            for c in edges if name == "fma" else (0,):
                check(name, a, b, c)


def test_subnormal_products_are_kept():
    """2 ** -70 * 2 ** -60 is a subnormal number, and half of the smallest one is a tie."""
    small = np.array([(127 - 70) << 7, (127 - 74) << 7, (127 - 74) << 7], np.uint16)
    other = np.array([(127 - 60) << 7, (127 - 60) << 7, (127 - 60) << 7 | 1], np.uint16)
    product = numerics.mul_bf16(small, other)
    assert number(int(product[0])) == 2.0**-130
    assert product.tolist()[1:] == [
        0,
        1,
    ]  # the tie goes to zero, what is above does not


@pytest.mark.parametrize("away", [-30, -40, -120])
def test_fma_where_rounding_twice_goes_wrong(away):
    """A tie of bf16 and a little, which float32 takes for the tie, and float64 the last one."""
    little = (127 + away) << 7
    up = 0x3FC0, 0x3F81, little | SIGN  # 387 / 256, which as a tie goes up
    down = 0x3F8C, 0x3FB0, little  # 385 / 256, which as a tie goes down
    for a, b, c in (up, down):
        product = Fraction(number(a)) * Fraction(number(b))
        exact = product + Fraction(number(c))
        assert nearest(product) != nearest(exact)
        twice = np.float32(number(a)) * np.float32(number(b)) + np.float32(number(c))
        assert int(numerics.bf16_rn(np.array([twice], np.float32))[0]) != nearest(exact)
        check("fma", a, b, c)


BODIES = {
    "add.bf16x2 %r20, %r10, %r11;": "add",
    "add.rn.bf16x2 %r20, %r10, %r11;": "add",
    "sub.bf16x2 %r20, %r10, %r11;": "sub",
    "sub.rn.bf16x2 %r20, %r10, %r11;": "sub",
    "mul.bf16x2 %r20, %r10, %r11;": "mul",
    "mul.rn.bf16x2 %r20, %r10, %r11;": "mul",
    "fma.rn.bf16x2 %r20, %r10, %r11, %r12;": "fma",
}
WORDS = np.random.default_rng(8).integers(0, 1 << 32, (3, LANES), dtype=np.uint32)


@pytest.mark.parametrize("body", BODIES)
def test_each_half_is_computed_alone(body):
    function, _ = OPERATIONS[BODIES[body]]
    words = WORDS.copy()
    halves = [each.view(np.uint16) for each in words]
    expected = function(*halves[: 3 if "fma" in body else 2])
    result = value(body, *(each.copy() for each in words))
    np.testing.assert_array_equal(result.view(np.uint16), expected)


@pytest.mark.parametrize(
    "body",
    [
        "mul.rm.bf16x2 %r20, %r10, %r10;",
        "mul.rn.ftz.bf16x2 %r20, %r10, %r10;",
        "fma.rn.relu.bf16x2 %r20, %r10, %r10, %r10;",
        "mul.rn.bf16 %rs1, %rs2, %rs3;",
    ],
)
def test_forms_that_are_refused(body):
    with pytest.raises(UnsupportedInstruction):
        execute(body, WORDS[0].copy())


def test_sums_are_fused_with_products_where_no_rounding_is_named():
    """1 + 2 ** -6, whose square loses 2 ** -12 to rounding."""
    head = "mov.b32 %r4, 0x3F823F82; mov.b32 %r5, 0x3F843F84; mul.bf16x2 %r6, %r4, %r4;"
    lost = 2.0**-12

    def both(sum_: str) -> list[float]:
        found = []
        for contract in (False, True):
            result = value(f"{head} {sum_}", contract=contract).view(np.uint16)
            found.append(number(int(result[0])))
            assert (result == result[0]).all()
        return found

    assert both("sub.bf16x2 %r20, %r6, %r5;") == [0, lost]
    assert both("sub.bf16x2 %r20, %r5, %r6;") == [0, -lost]
    free = "xor.b32 %r5, %r5, 0x80008000; add.bf16x2 %r20, %r5, %r6;"
    assert both(free) == [0, lost]
    assert both(free.replace("add.", "add.rn.")) == [0, 0]
