# SPDX-License-Identifier: Apache-2.0
"""Integer instructions of every type against numpy and Python's own integers."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator.lanes import LANES

from .kernels import execute

RNG = np.random.default_rng(2)
EDGES = [0, 1, -1, 2, 1 << 15, 1 << 31, 1 << 63, 0x7FFF, 0x7FFFFFFF, (1 << 63) - 1]
REGISTER = {8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}
THIRD = RNG.integers(0, 1 << 63, LANES, dtype=np.uint64)


def pairs():
    """Two inputs of 64 bits, in which edges meet edges."""
    edges = np.array([edge & (1 << 64) - 1 for edge in EDGES], np.uint64)
    first, second = (RNG.integers(0, 1 << 64, LANES, dtype=np.uint64) for _ in range(2))
    first[:100], second[:100] = np.repeat(edges, 10), np.tile(edges, 10)
    return first, second


def dtype_of(opcode):
    kind = opcode.rpartition(".")[2]
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")


def narrowed(bits, inputs):
    """PTX that puts the low bits of each input into registers 41, 42, ... of that width."""
    name = REGISTER[bits]
    move = "mov.b64" if bits == 64 else f"cvt.u{bits}.u64"
    return " ".join(f"{move} {name}{41 + i}, %rd{10 + i};" for i in range(inputs))


def result_of(body, bits, *inputs):
    """The 64 bits that register 20 of that width extends to by zeros."""
    name = REGISTER[bits]
    extend = "mov.b64" if bits == 64 else f"cvt.u64.u{bits}"
    body += f" {extend} %rd30, {name}20; st.global.b64 [%rd2], %rd30;"
    out = np.zeros(LANES, np.uint64)
    _, result = execute(body, *inputs, out=out, width=8)
    assert result.findings == ()
    return out


def exact(function, *sources):
    """The function of Python integers, in as many bits as 64."""
    columns = [source.tolist() for source in sources]
    lanes = [function(*row) & (1 << 64) - 1 for row in zip(*columns, strict=True)]
    return np.array(lanes, np.uint64)


BINARY = {
    "add.s16 add.u16 add.s32 add.u32 add.s64 add.u64": lambda a, b: a + b,
    "sub.s16 sub.u16 sub.s32 sub.u32 sub.s64 sub.u64": lambda a, b: a - b,
    "mul.lo.s16 mul.lo.u16 mul.lo.s32 mul.lo.u32 mul.lo.s64 mul.lo.u64": (
        lambda a, b: a * b
    ),
    "min.s16 min.u16 min.s32 min.u32 min.s64 min.u64": min,
    "max.s16 max.u16 max.s32 max.u32 max.s64 max.u64": max,
    "min.relu.s32": lambda a, b: max(min(a, b), 0),
    "max.relu.s32": lambda a, b: max(a, b, 0),
    "and.b16 and.b32 and.b64": lambda a, b: a & b,
    "or.b16 or.b32 or.b64": lambda a, b: a | b,
    "xor.b16 xor.b32 xor.b64": lambda a, b: a ^ b,
}
BINARY = {
    opcode: function for names, function in BINARY.items() for opcode in names.split()
}


@pytest.mark.parametrize("opcode", BINARY)
def test_two_sources(opcode):
    dtype = dtype_of(opcode)
    bits, name = 8 * dtype.itemsize, REGISTER[8 * dtype.itemsize]
    a, b = pairs()
    body = f"{narrowed(bits, 2)} {opcode} {name}20, {name}41, {name}42;"
    expected = exact(BINARY[opcode], a.astype(dtype), b.astype(dtype))
    expected &= np.uint64((1 << bits) - 1)
    np.testing.assert_array_equal(result_of(body, bits, a, b), expected)


PRODUCTS = (
    "mul.hi.s16 mul.hi.u16 mul.hi.s32 mul.hi.u32 mul.hi.s64 mul.hi.u64 mul.wide.s16 mul.wide.u16 "
    "mul.wide.s32 mul.wide.u32 mad.lo.s16 mad.lo.u16 mad.lo.s32 mad.lo.u32 mad.lo.s64 mad.lo.u64 "
    "mad.hi.s32 mad.hi.u32 mad.hi.s64 mad.hi.u64 mad.wide.s16 mad.wide.u16 mad.wide.s32 "
    "mad.wide.u32"
)


@pytest.mark.parametrize("opcode", PRODUCTS.split())
def test_parts_of_products(opcode):
    dtype = dtype_of(opcode)
    bits = 8 * dtype.itemsize
    name, kept = REGISTER[bits], 2 * bits if "wide" in opcode else bits
    a, b = pairs()
    addend = ""
    if opcode.startswith("mad"):
        addend = f", {REGISTER[kept]}45"
    convert = "mov.b64" if kept == 64 else f"cvt.u{kept}.u64"
    body = (
        f"{narrowed(bits, 2)} {convert} {REGISTER[kept]}45, %rd12; "
        f"{opcode} {REGISTER[kept]}20, {name}41, {name}42{addend};"
    )
    part = (lambda x: x >> bits) if ".hi." in opcode else (lambda x: x)
    expected = exact(
        lambda x, y, z: part(x * y) + (z if addend else 0),
        a.astype(dtype),
        b.astype(dtype),
        THIRD,
    )
    expected &= np.uint64((1 << kept) - 1)
    np.testing.assert_array_equal(result_of(body, kept, a, b, THIRD), expected)


@pytest.mark.parametrize("factor", (0x2492492492492493, -7, 1))
@pytest.mark.parametrize("opcode", ("mul.hi.s64", "mul.hi.u64"))
def test_upper_half_of_a_product_by_a_constant(opcode, factor):
    """As divisions by a constant have it."""
    dtype = dtype_of(opcode)
    a, b = pairs()
    body = f"{narrowed(64, 1)} {opcode} %rd20, %rd41, {factor};"
    if dtype == np.uint64:
        factor %= 1 << 64
    expected = exact(lambda x: x * factor >> 64, a.astype(dtype))
    np.testing.assert_array_equal(result_of(body, 64, a, b), expected)


UNARY = {
    "not.b16 not.b32 not.b64": lambda a: ~a,
    "neg.s32 neg.s64": lambda a: -a,
    "abs.s32 abs.s64": abs,
    "popc.b32": lambda a: a.bit_count(),
    "mov.b16 mov.s16 mov.u16 mov.b32 mov.s32 mov.u32 mov.b64 mov.s64 mov.u64": (
        lambda a: a
    ),
}
UNARY = {
    opcode: function for names, function in UNARY.items() for opcode in names.split()
}


@pytest.mark.parametrize("opcode", UNARY)
def test_one_source(opcode):
    dtype = dtype_of(opcode)
    bits, name = 8 * dtype.itemsize, REGISTER[8 * dtype.itemsize]
    a, _ = pairs()
    body = f"{narrowed(bits, 1)} {opcode} {name}20, {name}41;"
    expected = exact(UNARY[opcode], a.astype(dtype)) & np.uint64((1 << bits) - 1)
    np.testing.assert_array_equal(result_of(body, bits, a), expected)


SHIFTS = (
    "shl.b16 shl.b32 shl.b64 shr.b16 shr.b32 shr.b64 shr.u16 shr.u32 shr.u64 "
    "shr.s16 shr.s32 shr.s64"
)


@pytest.mark.parametrize("opcode", SHIFTS.split())
@pytest.mark.parametrize("amount", [0, 7, 15, 16, 31, 32, 63, 64, 99, "lanes"])
def test_shifts_clamp(opcode, amount):
    dtype = dtype_of(opcode)
    bits, name = 8 * dtype.itemsize, REGISTER[8 * dtype.itemsize]
    a, _ = pairs()
    amounts = np.arange(LANES) if amount == "lanes" else np.full(LANES, amount)
    given = "%r1" if amount == "lanes" else amount  # %r1 is the thread
    body = f"{narrowed(bits, 1)} "
    body += f"{opcode} {name}20, {name}41, {given};"
    shift = (lambda x, n: x << n) if opcode.startswith("shl") else (lambda x, n: x >> n)
    expected = exact(shift, a.astype(dtype), amounts) & np.uint64((1 << bits) - 1)
    np.testing.assert_array_equal(result_of(body, bits, a), expected)


SELECTIONS = (
    "selp.b16 selp.s16 selp.u16 selp.b32 selp.s32 selp.u32 selp.b64 selp.s64 selp.u64"
)


@pytest.mark.parametrize("opcode", SELECTIONS.split())
def test_selection(opcode):
    dtype = dtype_of(opcode)
    bits, name = 8 * dtype.itemsize, REGISTER[8 * dtype.itemsize]
    a, b = pairs()
    body = (
        f"setp.gt.u32 %p1, %r1, 40; {narrowed(bits, 2)} "
        f"{opcode} {name}20, {name}41, {name}42, %p1;"
    )
    expected = np.where(np.arange(LANES) > 40, a, b) & np.uint64((1 << bits) - 1)
    np.testing.assert_array_equal(result_of(body, bits, a, b), expected)


ORDERED = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
COMPARISONS = (
    "setp.eq.b16 setp.ne.b16 setp.eq.b32 setp.ne.b32 setp.eq.b64 setp.ne.b64 setp.lt.s16 "
    "setp.le.s16 setp.gt.s16 setp.ge.s16 setp.lt.u16 setp.le.u16 setp.lt.s32 setp.le.s32 "
    "setp.gt.s32 setp.ge.s32 setp.lo.u32 setp.ls.u32 setp.hi.u32 setp.hs.u32 setp.lt.s64 "
    "setp.ge.s64 setp.lt.u64 setp.gt.u64"
)
HOLDS = ORDERED | {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lo": ORDERED["lt"],
    "ls": ORDERED["le"],
    "hi": ORDERED["gt"],
    "hs": ORDERED["ge"],
}


@pytest.mark.parametrize("opcode", COMPARISONS.split())
def test_comparison(opcode):
    dtype = dtype_of(opcode)
    bits, name = 8 * dtype.itemsize, REGISTER[8 * dtype.itemsize]
    a, b = pairs()
    body = f"{narrowed(bits, 2)} {opcode} %p1, {name}41, {name}42; selp.b32 %r20, 1, 0, %p1;"
    holds = HOLDS[opcode.split(".")[1]](a.astype(dtype), b.astype(dtype))
    np.testing.assert_array_equal(result_of(body, 32, a, b), holds)


@pytest.mark.parametrize(
    ("opcode", "combined"),
    [
        ("setp.lt.and.s32", lambda holds, third: holds & third),
        ("setp.lt.or.s32", lambda holds, third: holds | third),
        ("setp.lt.xor.s32", lambda holds, third: holds ^ third),
    ],
)
def test_comparison_is_combined_with_a_predicate(opcode, combined):
    a, b = pairs()
    body = (
        f"setp.gt.u32 %p1, %r1, 40; {narrowed(32, 2)} "
        f"{opcode} %p2|%p3, %r41, %r42, %p1; selp.b32 %r20, 1, 0, %p2; "
        "selp.b32 %r21, 2, 0, %p3; or.b32 %r20, %r20, %r21;"
    )
    third = np.arange(LANES) > 40
    holds = a.astype(np.int32) < b.astype(np.int32)
    expected = combined(holds, third) + 2 * combined(~holds, third)
    np.testing.assert_array_equal(result_of(body, 32, a, b), expected)


CONVERSIONS = (
    "cvt.s8.s8 cvt.u8.s8 cvt.s16.s8 cvt.u16.s8 "
    "cvt.s32.s8 cvt.u32.s8 cvt.s64.s8 cvt.u64.s8 "
    "cvt.s8.u8 cvt.u8.u8 cvt.s16.u8 cvt.u16.u8 "
    "cvt.s32.u8 cvt.u32.u8 cvt.s64.u8 cvt.u64.u8 "
    "cvt.s8.s16 cvt.u8.s16 cvt.s16.s16 cvt.u16.s16 "
    "cvt.s32.s16 cvt.u32.s16 cvt.s64.s16 cvt.u64.s16 "
    "cvt.s8.u16 cvt.u8.u16 cvt.s16.u16 cvt.u16.u16 "
    "cvt.s32.u16 cvt.u32.u16 cvt.s64.u16 cvt.u64.u16 "
    "cvt.s8.s32 cvt.u8.s32 cvt.s16.s32 cvt.u16.s32 "
    "cvt.s32.s32 cvt.u32.s32 cvt.s64.s32 cvt.u64.s32 "
    "cvt.s8.u32 cvt.u8.u32 cvt.s16.u32 cvt.u16.u32 "
    "cvt.s32.u32 cvt.u32.u32 cvt.s64.u32 cvt.u64.u32 "
    "cvt.s8.s64 cvt.u8.s64 cvt.s16.s64 cvt.u16.s64 "
    "cvt.s32.s64 cvt.u32.s64 cvt.s64.s64 cvt.u64.s64 "
    "cvt.s8.u64 cvt.u8.u64 cvt.s16.u64 cvt.u16.u64 "
    "cvt.s32.u64 cvt.u32.u64 cvt.s64.u64 cvt.u64.u64 "
)


@pytest.mark.parametrize("opcode", CONVERSIONS.split())
def test_conversion_extends_by_the_source_and_keeps_the_low_bits(opcode):
    _, to, source = opcode.split(".")
    wide, narrow = int(to[1:]), int(source[1:])
    a, _ = pairs()
    have = dtype_of(f"cvt.{source}")
    body = (
        f"{narrowed(max(narrow, 16), 1)} {opcode} "
        f"{REGISTER[wide]}20, {REGISTER[narrow]}41;"
    )
    kept = a.astype(have).astype(dtype_of(f"cvt.{to}"))
    # An 8-bit result is extended to its 16-bit register by its own sign.
    register = kept.astype(f"{kept.dtype.kind}2") if wide == 8 else kept
    expected = register.astype(f"u{register.itemsize}").astype(np.uint64)
    np.testing.assert_array_equal(result_of(body, max(wide, 16), a), expected)
