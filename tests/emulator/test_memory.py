# SPDX-License-Identifier: Apache-2.0
"""Memory against a dictionary of bytes; faults by address, and nothing done before one."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator.memory import (
    POISON,
    RESERVED,
    GlobalMemory,
    MemoryFault,
    SharedMemory,
    load_matrices,
    store_matrices,
)
from hypothesis import given, settings
from hypothesis import strategies as st

LANES = np.arange(128, dtype=np.int64)
SIZE = 4096
TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def random_values(rng, width):
    return rng.integers(0, 256, 128 * width, dtype=np.uint8).view(TYPES[width])


@pytest.fixture
def shared():
    return SharedMemory(SIZE)


# -- shared memory


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.sampled_from([1, 2, 4, 8]),
    count=st.sampled_from([1, 2, 4]),
    masked=st.booleans(),
)
def test_shared_stores_and_loads_are_those_of_single_bytes(seed, width, count, masked):
    if width * count > 16:
        return
    rng = np.random.default_rng(seed)
    shared = SharedMemory(SIZE)
    nbytes = width * count
    slots = rng.integers(RESERVED // nbytes, SIZE // nbytes, 128)
    addresses = slots.astype(np.int64) * nbytes
    mask = rng.random(128) < 0.5 if masked else None
    values = [random_values(rng, width) for _ in range(count)]
    shared.store(addresses, width, values, mask)
    model = {}
    for lane in range(128):
        if mask is not None and not mask[lane]:
            continue
        for i, value in enumerate(values):
            for b, byte in enumerate(int(value[lane]).to_bytes(width, "little")):
                model[int(addresses[lane]) + i * width + b] = byte
    for address in range(SIZE):
        assert shared.bytes[address] == model.get(address, POISON)
    loaded = shared.load(addresses, width, count, mask)
    for lane in range(128):
        active = mask is None or mask[lane]
        for i, value in enumerate(loaded):
            start = int(addresses[lane]) + i * width
            want = [model[start + b] for b in range(width)] if active else [0] * width
            assert int(value[lane]) == int.from_bytes(want, "little")


@pytest.mark.parametrize("address", [0, RESERVED - 4, SIZE - 3, SIZE, -4, 1 << 40])
def test_shared_bounds(shared, address):
    addresses = np.full(128, RESERVED, np.int64)
    addresses[77] = address
    with pytest.raises(MemoryFault) as fault:
        shared.store(addresses, 4, [LANES.astype(np.uint32)])
    assert (fault.value.space, fault.value.address) == ("shared", address)
    assert (shared.bytes == POISON).all()
    with pytest.raises(MemoryFault):
        shared.load(addresses, 4, 1)
    without = LANES != 77
    shared.store(addresses, 4, [LANES.astype(np.uint32)], without)
    assert shared.load(addresses, 4, 1, without)[0][77] == 0


def test_shared_alignment_is_that_of_the_whole_vector(shared):
    addresses = RESERVED + 4 + LANES * 8
    shared.load(addresses, 4, 1)
    with pytest.raises(MemoryFault, match="not a multiple"):
        shared.load(addresses, 4, 2)


def test_a_masked_out_warpgroup_touches_nothing(shared):
    nobody = np.zeros(128, np.bool_)
    wild = np.full(128, -1, np.int64)
    shared.store(wild, 4, [LANES.astype(np.uint32)], nobody)
    assert not shared.load(wild, 4, 1, nobody)[0].any()
    assert (shared.bytes == POISON).all()


# -- ldmatrix


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transpose", [False, True])
def test_load_matrices_element_by_element(count, transpose):
    rng = np.random.default_rng(count)
    shared = SharedMemory(RESERVED + 4 * count * 128)
    shared.bytes[RESERVED:] = rng.integers(0, 256, 4 * count * 128)
    rows = RESERVED + 16 * rng.permutation(4 * count * 8).reshape(4, count * 8)
    addresses = np.full((4, 32), -5, np.int64)
    addresses[:, : count * 8] = rows
    mask = np.repeat([True, False, True, True], 32)
    loaded = load_matrices(
        shared, addresses.reshape(-1), count, mask, transpose=transpose
    )
    assert len(loaded) == count
    for warp, matrix, lane, half in np.ndindex(4, count, 32, 2):
        row, column = lane // 4, lane % 4 * 2 + half
        if transpose:
            row, column = column, row
        address = int(rows[warp, matrix * 8 + row]) + 2 * column
        want = int(shared.words[2][address // 2]) if warp != 1 else 0
        got = int(loaded[matrix][32 * warp + lane]) >> 16 * half & 0xFFFF
        assert got == want


# -- stmatrix


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transpose", [False, True])
def test_store_matrices_element_by_element(count, transpose):
    rng = np.random.default_rng(count)
    shared = SharedMemory(RESERVED + 4 * count * 128)
    # Rows anywhere, in no order; lanes that give no address hold nonsense.
    rows = RESERVED + 16 * rng.permutation(4 * count * 8).reshape(4, count * 8)
    addresses = np.full((4, 32), -5, np.int64)
    addresses[:, : count * 8] = rows
    registers = [random_values(rng, 4) for _ in range(count)]
    written = store_matrices(
        shared, addresses.reshape(-1), registers, transpose=transpose
    )
    assert sorted(written.tolist()) == sorted(rows.reshape(-1).tolist())
    for warp in range(4):
        for matrix in range(count):
            for lane in range(32):
                for half in range(2):
                    row, column = lane // 4, lane % 4 * 2 + half
                    if transpose:
                        row, column = column, row
                    address = int(rows[warp, matrix * 8 + row]) + 2 * column
                    want = (
                        int(registers[matrix][32 * warp + lane]) >> 16 * half & 0xFFFF
                    )
                    assert int(shared.words[2][address // 2]) == want


def test_store_matrices_by_some_warps():
    shared = SharedMemory(RESERVED + 4 * 128)
    addresses = RESERVED + 16 * (LANES // 32 * 8 + LANES % 8)
    some = LANES // 32 == 2
    written = store_matrices(shared, addresses, [LANES.astype(np.uint32)], some)
    assert written.tolist() == [RESERVED + 256 + 16 * row for row in range(8)]
    assert np.flatnonzero(shared.bytes != POISON).tolist() == list(
        range(RESERVED + 256, RESERVED + 384)
    )


def test_store_matrices_rows_are_aligned():
    shared = SharedMemory(SIZE)
    with pytest.raises(MemoryFault, match="not a multiple"):
        store_matrices(shared, RESERVED + 8 + 16 * LANES, [LANES.astype(np.uint32)])


# -- global memory


@pytest.fixture
def memory():
    memory = GlobalMemory()
    memory.add("second", 0x2000, np.arange(100, dtype=np.uint32))
    memory.add("first", 0x1000, np.arange(100, 200, dtype=np.uint32), writable=False)
    return memory


def test_find(memory):
    buffer, offset = memory.find(0x1000 + 396, 4)
    assert (buffer.name, offset) == ("first", 396)
    assert memory.find(0x2000, 400)[0].name == "second"
    for address, nbytes, reason in [
        (0x0FFF, 1, "1 bytes before first"),
        (0x1000 + 400, 4, "0 bytes after the end of first"),
        (0x1000 + 392, 16, "-8 bytes after the end of first"),
        (0x3000, 4, "3696 bytes after the end of second"),
    ]:
        with pytest.raises(MemoryFault) as fault:
            memory.find(address, nbytes)
        assert fault.value.reason == reason
    with pytest.raises(MemoryFault, match="no buffers"):
        GlobalMemory().find(0, 1)


def test_lanes_in_two_buffers(memory):
    addresses = np.where(LANES % 2, 0x1000, 0x2000) + 4 * (LANES // 2)
    (got,) = memory.load(addresses, 4, 1)
    assert np.array_equal(got, np.where(LANES % 2, 100, 0) + LANES // 2)


def test_a_buffer_is_the_array_that_was_given():
    array = np.zeros((16, 16), np.float32)
    memory = GlobalMemory()
    memory.add("out", 0x1000, array)
    memory.store(
        0x1000 + 8 * LANES, 4, [LANES.astype(np.uint32)] * 2, mask=LANES >= 126
    )
    assert array.view(np.uint32).reshape(-1)[252:].tolist() == [126, 126, 127, 127]
    assert not array.reshape(-1)[:252].any()


def test_the_highest_lane_wins():
    array = np.zeros(4, np.uint32)
    memory = GlobalMemory()
    memory.add("out", 0x1000, array)
    memory.store(np.full(128, 0x1004, np.int64), 4, [LANES.astype(np.uint32)])
    assert array.tolist() == [0, 127, 0, 0]


def test_global_faults_change_nothing(memory):
    second = memory.find(0x2000, 4)[0]
    before = second.bytes.copy()
    addresses = 0x2000 + 4 * (LANES % 100)
    for wrong, reason in [
        (0x5000, "after the end"),
        (0x2001, "multiple"),
        (0x1000, "read-only"),
    ]:
        addresses[100] = wrong
        with pytest.raises(MemoryFault, match=reason):
            memory.store(addresses, 4, [LANES.astype(np.uint32)])
        assert np.array_equal(second.bytes, before)
        memory.store(addresses, 4, [np.zeros(128, np.uint32)], LANES < 0)


def test_a_tail_narrower_than_the_access_can_be_read():
    memory = GlobalMemory()
    memory.add("odd", 0x1000, np.arange(7, dtype=np.uint8))
    assert memory.load(np.array([0x1004] * 128), 2, 1)[0][0] == 0x0504
    assert memory.load(np.array([0x1006] * 128), 1, 1)[0][0] == 6
    with pytest.raises(MemoryFault):
        memory.load(np.array([0x1004] * 128), 4, 1)


def test_buffers_are_contiguous_aligned_and_apart(memory):
    with pytest.raises(ValueError, match="overlaps buffer first"):
        memory.add("third", 0x1180, np.zeros(100, np.uint8))
    with pytest.raises(ValueError, match="overlaps buffer second"):
        memory.add("third", 0x1F00, np.zeros(257, np.uint8))
    with pytest.raises(ValueError, match="not contiguous"):
        memory.add("third", 0x4000, np.zeros((4, 4), np.uint8)[:, :2])
    with pytest.raises(ValueError, match="not aligned"):
        memory.add("third", 0x4008, np.zeros(4, np.uint8))
    memory.add("third", 0x1190, np.zeros(100, np.uint8))
