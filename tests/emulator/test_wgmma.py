# SPDX-License-Identifier: Apache-2.0
"""Descriptors, fragments and products against the tables of the PTX manual, element by element."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator import numerics, wgmma
from fmha_gen.emulator.memory import RESERVED, SharedMemory
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LANES = 128


def swizzled(address: int, bits: int) -> int:
    """Address bits 4, 5, 6 get bits 7, 8, 9 added to them, as many as the swizzle has."""
    for bit in range(bits):
        if address >> (7 + bit) & 1:
            address = address ^ 1 << (4 + bit)
    return address


def k_major_address(start, rows_apart, row, k, size, bits):
    """A tile of rows as long as the swizzle, in groups of eight rows."""
    width = 16 << bits
    group, inside = divmod(row, 8)
    return swizzled(start + group * rows_apart + inside * width + k * size, bits)


def mn_major_address(start, leading, stride, row, k, size, bits):
    """The same tile turned: its rows hold consecutive MN, eight k make a group."""
    width = 16 << bits
    across, inside = divmod(row * size, width)
    group, line = divmod(k, 8)
    return swizzled(
        start + across * leading + group * stride + line * width + inside, bits
    )


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2])
@settings(max_examples=25, deadline=None)
@given(
    start=st.integers(64, 8000),
    stride=st.integers(1, 256),
    rows=st.sampled_from([8, 64, 256]),
)
def test_k_major(bits, size, start, stride, rows):
    start, stride = start * 16, stride * 16
    k = 32 // size
    descriptor = wgmma.Descriptor(start, 16, stride, bits).encode()
    got = wgmma.shared_addresses(descriptor, rows, k, size, False)
    want = [
        [k_major_address(start, stride, r, c, size, bits) for c in range(k)]
        for r in range(rows)
    ]
    assert got.tolist() == want


@pytest.mark.parametrize("bits", [1, 2, 3])
@settings(max_examples=25, deadline=None)
@given(
    start=st.integers(64, 8000),
    leading=st.integers(1, 512),
    stride=st.integers(1, 256),
    rows=st.sampled_from([8, 64, 256]),
)
def test_mn_major(bits, start, leading, stride, rows):
    start, leading, stride = start * 16, leading * 16, stride * 16
    descriptor = wgmma.Descriptor(start, leading, stride, bits).encode()
    got = wgmma.shared_addresses(descriptor, rows, 16, 2, True)
    want = [
        [mn_major_address(start, leading, stride, r, c, 2, bits) for c in range(16)]
        for r in range(rows)
    ]
    assert got.tolist() == want


def test_unswizzled_core_matrices():
    """Eight rows of 16 bytes lie together; K-major the leading offset is the next 16 bytes of k."""
    leading, stride = 0x500, 0x80
    descriptor = wgmma.Descriptor(0x800, leading, stride, 0).encode()
    got = wgmma.shared_addresses(descriptor, 64, 16, 2, False)
    for row in range(64):
        for k in range(16):
            core = k // 8 * leading + row // 8 * stride
            assert got[row, k] == 0x800 + core + row % 8 * 16 + k % 8 * 2
    turned = wgmma.shared_addresses(descriptor, 64, 16, 2, True)
    for row in range(64):
        for k in range(16):
            core = k // 8 * leading + row // 8 * stride
            assert turned[row, k] == 0x800 + core + k % 8 * 16 + row % 8 * 2


def test_descriptor_fields():
    bits = 0x4000_0040_0001_0000 | 0x1234 >> 4
    matrix = wgmma.Descriptor.decode(bits)
    assert matrix == wgmma.Descriptor(
        start=0x1230, leading=16, stride=1024, swizzle_bits=3
    )
    assert matrix.encode() == bits
    swizzles = [wgmma.Descriptor.decode(code << 62).swizzle_bits for code in range(4)]
    assert swizzles == [0, 3, 2, 1]
    with pytest.raises(wgmma.DescriptorError, match="base offset"):
        wgmma.Descriptor.decode(1 << 49)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "e4m3", "e5m2"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("start", [0x400, 0x420, 0x7C0, 0x2460])
def test_gather_takes_what_the_addresses_say(dtype, transposed, start):
    size = numerics.ELEMENT_SIZE[dtype]
    shared = SharedMemory(RESERVED + 65536)
    rng = np.random.default_rng(0)
    shared.bytes[:] = rng.integers(0, 256, len(shared.bytes))
    descriptor = wgmma.Descriptor(start, 4096, 1024, 3).encode()
    k = wgmma.instruction_k(dtype)
    got = wgmma.gather(shared, descriptor, 64, k, dtype, transposed)
    addresses = wgmma.shared_addresses(descriptor, 64, k, size, transposed)
    bits = shared.bytes.view({1: np.uint8, 2: np.uint16}[size])
    want = numerics.TO_F32[dtype](
        np.array([[bits[a // size] for a in row] for row in addresses])
    )
    assert got.view(np.uint32).tolist() == want.view(np.uint32).tolist()
    words = wgmma.shared_words(descriptor, 64, k, size, transposed)
    assert words.tolist() == sorted({int(a) // 4 for a in addresses.reshape(-1)})


def test_gather_beyond_the_end():
    descriptor = wgmma.Descriptor(RESERVED, 16, 1024, 3).encode()
    with pytest.raises(IndexError):
        wgmma.gather(SharedMemory(RESERVED + 4096), descriptor, 64, 16, "bf16", False)


# -- fragments


def accumulator_place(register: int, lane: int) -> tuple[int, int]:
    """Row and column of register d<i> of a thread, as in the manual's figure for D."""
    warp, thread = divmod(lane, 32)
    row = 16 * warp + thread // 4 + (8 if register % 4 >= 2 else 0)
    column = 8 * (register // 4) + thread % 4 * 2 + (register & 1)
    return row, column


@pytest.mark.parametrize("n", [8, 16, 64, 128, 256])
def test_accumulator_fragments(n):
    rng = np.random.default_rng(n)
    matrix = rng.standard_normal((64, n)).astype(np.float32)
    registers = wgmma.accumulator_registers(matrix)
    assert len(registers) == n // 2
    for i, register in enumerate(registers):
        assert (register.shape, register.dtype) == ((LANES,), np.uint32)
        for lane, got in enumerate(register.view(np.float32)):
            assert got == matrix[accumulator_place(i, lane)]
    assert np.array_equal(wgmma.accumulator_matrix(registers), matrix)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "e4m3", "e5m2"])
def test_fragments_of_a(dtype):
    size = numerics.ELEMENT_SIZE[dtype]
    per_register = 4 // size
    rng = np.random.default_rng(size)
    registers = [rng.integers(0, 2**32, LANES, dtype=np.uint32) for _ in range(4)]
    got = wgmma.fragment_a(registers, dtype)
    assert got.shape == (64, 32 // size)
    for index in range(4 * per_register):  # a<i>: the manual counts elements
        register, part = divmod(index, per_register)
        for lane in range(LANES):
            warp, thread = divmod(lane, 32)
            row = 16 * warp + thread // 4 + (8 if register % 2 else 0)
            column = (
                thread % 4 * per_register
                + part
                + (4 * per_register if register >= 2 else 0)
            )
            bits = (
                int(registers[register][lane]) >> 8 * size * part & (1 << 8 * size) - 1
            )
            kind = {1: np.uint8, 2: np.uint16}[size]
            want = numerics.TO_F32[dtype](np.array([bits], kind))[0]
            assert got[row, column] == want or (
                np.isnan(got[row, column]) and np.isnan(want)
            )
    with pytest.raises(wgmma.DescriptorError, match="3 registers"):
        wgmma.fragment_a(registers[:3], dtype)


# -- product


@pytest.mark.parametrize("scale_d", [False, True])
@pytest.mark.parametrize("scale_a", [1, -1])
@pytest.mark.parametrize("scale_b", [1, -1])
def test_multiply(scale_d, scale_a, scale_b):
    rng = np.random.default_rng(1)
    a = rng.integers(-8, 8, (64, 16)).astype(np.float32)
    b = rng.integers(-8, 8, (24, 16)).astype(np.float32)
    c = rng.integers(-8, 8, (64, 24)).astype(np.float32)
    registers = wgmma.accumulator_registers(c)
    got = wgmma.multiply(
        (64, 24, 16), a, b, registers, scale_d=scale_d, scale_a=scale_a, scale_b=scale_b
    )
    want = np.zeros((64, 24))
    for m in range(64):
        for n in range(24):
            want[m, n] = sum(scale_a * a[m, k] * scale_b * b[n, k] for k in range(16))
    if scale_d:
        want += c
    assert np.array_equal(wgmma.accumulator_matrix(got), want)
    assert np.array_equal(wgmma.accumulator_matrix(registers), c)


def test_overwriting_ignores_poison_and_adding_keeps_it():
    poison = [np.full(LANES, 0xFFFFFFFF, np.uint32)] * 4
    a, b = np.ones((64, 16), np.float32), np.ones((8, 16), np.float32)
    new = wgmma.multiply((64, 8, 16), a, b, poison, scale_d=False)
    assert (wgmma.accumulator_matrix(new) == 16).all()
    kept = wgmma.multiply((64, 8, 16), a, b, poison)
    assert np.isnan(wgmma.accumulator_matrix(kept)).all()


@pytest.mark.parametrize(
    "shape", [(64, 12, 16), (64, 264, 16), (64, 0, 16), (32, 8, 16)]
)
def test_shapes(shape):
    m, n, k = shape
    a, b = np.zeros((m, k), np.float32), np.zeros((n, k), np.float32)
    with pytest.raises(wgmma.DescriptorError, match=f"m{m}n{n}k{k}"):
        wgmma.multiply(shape, a, b, [np.zeros(LANES, np.uint32)] * (n // 2))
    with pytest.raises(wgmma.DescriptorError, match="operands"):
        wgmma.multiply((64, 16, 16), np.zeros((64, 16), np.float32), b, [])


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_a_matrix_begins_where_its_swizzle_does(bits):
    row = 16 << bits
    for start in (8 * row, 8 * row + row // 2, 24 * row):  # half a row: of a later k
        wgmma.check_alignment(wgmma.Descriptor(start, 16, 8 * row, bits).encode())
    for start in (9 * row, 8 * row - 16, 28 * row + row // 2):
        with pytest.raises(wgmma.DescriptorError, match=f"{row}-byte swizzle"):
            wgmma.check_alignment(wgmma.Descriptor(start, 16, 8 * row, bits).encode())
    wgmma.check_alignment(wgmma.Descriptor(9 * row, 16, 8 * row, 0).encode())
