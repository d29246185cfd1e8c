# SPDX-License-Identifier: Apache-2.0
"""Tensor maps that the DSL's host code encoded, and boxes moved element by element."""

from __future__ import annotations

import itertools
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from fmha_gen.emulator.memory import (
    POISON,
    RESERVED,
    GlobalMemory,
    MemoryFault,
    SharedMemory,
)
from fmha_gen.emulator.tma import TensorMap, TensorMapError, load, store, swizzle
from hypothesis import given, settings
from hypothesis import strategies as st

MAPS = json.loads((Path(__file__).parent / "data" / "tensor_maps.json").read_text())
BY_NAME = {entry["name"]: entry for entry in MAPS}
ADDRESS = 0x7F0000001000
TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def raw(words: list[str], rest: bytes = b"\xa5") -> bytes:
    """The second half of a map is whatever was on the host's stack."""
    return struct.pack("<8Q", *(int(word, 16) for word in words)) + rest * 64


# -- boxes that nothing meant


@given(st.data())
def test_a_box_is_astray_when_it_meets_no_tile(data):
    """Against every element of the box, in a tensor whose extents are rounded up to tiles."""
    entry = BY_NAME["bf16 128B"]
    decoded = TensorMap.decode(raw(entry["words"]))
    tiles = [data.draw(st.integers(1, 300)) for _ in range(decoded.rank - 1)]
    where = [
        data.draw(st.integers(-2 * edge, extent + 300))
        for edge, extent in zip(decoded.box, decoded.dimensions, strict=True)
    ]
    filled = [
        math.ceil(extent / tile) * tile
        for extent, tile in zip(decoded.dimensions, [*tiles, 1], strict=True)
    ]
    meets = all(
        any(0 <= index < end for index in range(start, start + edge))
        for start, edge, end in zip(where, decoded.box, filled, strict=True)
    )
    assert bool(decoded.astray(where, tiles)) != meets


# -- decoding


@pytest.mark.parametrize(
    "entry", [m for m in MAPS if m["name"] != "narrow"], ids=lambda m: m["name"]
)
def test_decode(entry):
    decoded = TensorMap.decode(raw(entry["words"]))
    assert decoded.address == ADDRESS
    assert decoded.element_size == entry["element_size"]
    assert decoded.dimensions == tuple(entry["dimensions"])
    assert decoded.strides == tuple(entry["strides"])
    assert decoded.box == tuple(entry["box"])
    assert decoded.swizzle_bits == entry["swizzle"]
    assert decoded.box_bytes == int(np.prod(entry["box"])) * entry["element_size"]


@pytest.mark.parametrize(
    "name, element_type", [("bf16 128B", "bf16"), ("store", "f16"), ("1d", "f16")]
)
def test_element_type(name, element_type):
    assert TensorMap.decode(raw(BY_NAME[name]["words"])).element_type == element_type


@pytest.mark.parametrize(
    "word, bits, message",
    [
        (1, 0xF, "unknown flags"),  # version 2 becomes 13
        (1, 1 << 11, "unknown flags"),
        (1, 1 << 31, "unknown flags"),
        (1, 4 << 4, "6 dimensions"),
        (1, 7 << 7, "element type"),  # 10 becomes 13
        (0, 8, "not 16-byte aligned"),
        (3, 1 << 50, "unknown fields"),
        (6, 1 << 40, "unknown fields"),
        (7, 1 << 33, "unknown fields"),
        (
            6,
            0x20 << 56,
            "not modelled",
        ),  # a row of 32 elements under the 128-byte swizzle
        (6, 0x40 << 56, "do not fit"),
        (6, 0x01 << 56, "multiple of 16"),
    ],
)
def test_what_decode_refuses(word, bits, message):
    words = [int(w, 16) for w in BY_NAME["bf16 128B"]["words"]]
    words[word] ^= bits
    with pytest.raises(TensorMapError, match=message):
        TensorMap.decode(struct.pack("<8Q", *words) + bytes(64))


def test_rows_narrower_than_their_swizzle():
    with pytest.raises(TensorMapError, match="not modelled"):
        TensorMap.decode(raw(BY_NAME["narrow"]["words"]))
    with pytest.raises(TensorMapError, match="128 bytes, not 64"):
        TensorMap.decode(bytes(64))


# -- swizzle


@pytest.mark.parametrize("bits", [0, 1, 2, 3])
def test_swizzle_by_bits(bits):
    """The manual's tables: which 16-byte chunk of a 128-byte row comes where in the next rows."""
    rows = {
        0: ["01234567"],
        1: ["01234567", "10325476"],
        2: ["01234567", "10325476", "23016745", "32107654"],
        3: [
            *("01234567", "10325476", "23016745", "32107654"),
            *("45670123", "54761032", "67452301", "76543210"),
        ],
    }[bits]
    addresses = np.arange(8192, dtype=np.int64)
    got = swizzle(addresses, bits)
    for address in range(0, 8192, 16):
        row, chunk = divmod(address // 16, 8)
        place = rows[row % len(rows)].index(str(chunk))
        want = row * 128 + place * 16
        assert got[address : address + 16].tolist() == list(range(want, want + 16))


# -- boxes


def small_maps(draw):
    rank = draw(st.integers(1, 5))
    size = draw(st.sampled_from([1, 2, 4, 8]))
    swizzle_bits = draw(st.sampled_from([0, 1, 2, 3]))
    row = 16 << swizzle_bits if swizzle_bits else 16 * draw(st.integers(1, 9))
    box = [row // size] + [draw(st.integers(1, 5)) for _ in range(rank - 1)]
    dimensions = [draw(st.integers(1, 40))] + [
        draw(st.integers(1, 9)) for _ in range(rank - 1)
    ]
    strides, extent = [size], dimensions[0] * size
    for dimension in dimensions[1:]:
        stride = -(-extent // 16) * 16 + 16 * draw(st.integers(0, 2))
        strides.append(stride)
        extent = stride * dimension
    return TensorMap(
        ADDRESS,
        "any",
        size,
        tuple(dimensions),
        tuple(strides),
        tuple(box),
        swizzle_bits,
    )


@st.composite
def cases(draw, stored=False):
    tensor_map = small_maps(draw)
    inner, *outer = (
        draw(st.integers(0 if stored else -edge - 1, limit + 1))
        for edge, limit in zip(tensor_map.box, tensor_map.dimensions, strict=True)
    )
    per_chunk = 16 // tensor_map.element_size
    coordinates = (inner // per_chunk * per_chunk, *outer)
    return tensor_map, coordinates, RESERVED + 128 * draw(st.integers(0, 9))


def elements(tensor_map, coordinates, whole_chunks=False):
    """(place in the dense box, offset in the tensor or None) of each element, by counting."""
    limits = list(tensor_map.dimensions)
    if whole_chunks:
        per_chunk = 16 // tensor_map.element_size
        limits[0] = math.ceil(limits[0] / per_chunk) * per_chunk
    ranges = [range(edge) for edge in reversed(tensor_map.box)]
    for place, reverse in enumerate(itertools.product(*ranges)):
        index = [c + i for c, i in zip(coordinates, reversed(reverse), strict=True)]
        inside = all(0 <= i < limit for i, limit in zip(index, limits, strict=True))
        offset = sum(i * s for i, s in zip(index, tensor_map.strides, strict=True))
        yield place, offset if inside else None


def extent(tensor_map):
    last = sum(
        (d - 1) * s
        for d, s in zip(tensor_map.dimensions, tensor_map.strides, strict=True)
    )
    return last + tensor_map.element_size


@settings(max_examples=150, deadline=None)
@given(case=cases(), seed=st.integers(0, 1000))
def test_load_element_by_element(case, seed):
    tensor_map, coordinates, smem = case
    size = tensor_map.element_size
    tensor = np.random.default_rng(seed).integers(
        1, 256, extent(tensor_map), dtype=np.uint8
    )
    memory = GlobalMemory()
    memory.add("tensor", ADDRESS, tensor, writable=False)
    targets = [SharedMemory(smem + tensor_map.box_bytes + 64) for _ in range(2)]
    nbytes, region = load(tensor_map, coordinates, memory, targets, smem)
    assert nbytes == tensor_map.box_bytes
    assert region == range(smem, smem + nbytes)
    for target in targets:
        for place, offset in elements(tensor_map, coordinates):
            address = int(tensor_map.swizzle(np.array([smem + place * size]))[0])
            got = target.bytes[address : address + size].tolist()
            assert got == (
                [0] * size
                if offset is None
                else tensor[offset : offset + size].tolist()
            )
        outside = np.delete(target.bytes, np.arange(region.start, region.stop))
        assert (outside == POISON).all()


@settings(max_examples=150, deadline=None)
@given(case=cases(stored=True), seed=st.integers(0, 1000))
def test_store_element_by_element(case, seed):
    tensor_map, coordinates, smem = case
    size = tensor_map.element_size
    tensor = np.zeros(
        extent(tensor_map) + 16, np.uint8
    )  # the last chunk may reach beyond
    want = tensor.copy()
    memory = GlobalMemory()
    memory.add("tensor", ADDRESS, tensor)
    shared = SharedMemory(smem + tensor_map.box_bytes)
    shared.bytes[:] = np.random.default_rng(seed).integers(1, 256, len(shared.bytes))
    region = store(tensor_map, coordinates, memory, shared, smem)
    assert region == range(smem, smem + tensor_map.box_bytes)
    for place, offset in elements(tensor_map, coordinates, whole_chunks=True):
        if offset is not None:
            address = int(tensor_map.swizzle(np.array([smem + place * size]))[0])
            want[offset : offset + size] = shared.bytes[address : address + size]
    assert np.array_equal(tensor, want)


def test_starts_that_the_device_refuses():
    """The H200 answers each with an illegal instruction."""
    tensor_map = TensorMap(ADDRESS, "f16", 2, (64, 32), (2, 128), (64, 8), 3)
    memory, shared = GlobalMemory(), SharedMemory(RESERVED + tensor_map.box_bytes)
    memory.add("tensor", ADDRESS, np.zeros(64 * 32 * 2, np.uint8))
    for coordinates in ((4, 0), (-3, 0)):
        with pytest.raises(MemoryFault, match="not at a multiple of 16 bytes"):
            load(tensor_map, coordinates, memory, [shared], RESERVED)
        with pytest.raises(MemoryFault, match="not at a multiple of 16 bytes"):
            store(tensor_map, coordinates, memory, shared, RESERVED)
    load(tensor_map, (-8, -2), memory, [shared], RESERVED)
    for coordinates in ((-8, 0), (0, -2)):
        with pytest.raises(MemoryFault, match="negative coordinates"):
            store(tensor_map, coordinates, memory, shared, RESERVED)


# -- faults


@pytest.fixture
def tile():
    return TensorMap(ADDRESS, "bf16", 2, (64, 100), (2, 128), (64, 8), 3)


def test_the_place_in_shared_memory(tile):
    memory = GlobalMemory()
    memory.add("tensor", ADDRESS, np.zeros(12800, np.uint8))
    shared = SharedMemory(RESERVED + 2048)
    load(tile, (0, 0), memory, [shared], RESERVED + 1024)
    for address, reason in [
        (RESERVED + 64, "not aligned to 128"),
        (RESERVED + 1024 + 128, "outside"),
        (RESERVED - 128, "outside"),
    ]:
        with pytest.raises(MemoryFault, match=reason):
            load(tile, (0, 0), memory, [shared], address)
        with pytest.raises(MemoryFault, match=reason):
            store(tile, (0, 0), memory, shared, address)


def test_a_tensor_beyond_its_buffer(tile):
    """The map claims 100 rows, the buffer has 96: boxes that reach beyond them are found out."""
    memory = GlobalMemory()
    memory.add("tensor", ADDRESS, np.zeros(96 * 128, np.uint8))
    shared = SharedMemory(RESERVED + 1024)
    load(tile, (0, 88), memory, [shared], RESERVED)
    with pytest.raises(MemoryFault, match="after the end of tensor"):
        load(tile, (0, 92), memory, [shared], RESERVED)
    with pytest.raises(MemoryFault, match="after the end of tensor"):
        store(tile, (0, 92), memory, shared, RESERVED)
    load(
        tile, (0, 100), memory, [shared], RESERVED
    )  # all out of bounds: nothing is read
    assert not shared.bytes[RESERVED:].any()


def test_stores_respect_read_only_buffers(tile):
    memory = GlobalMemory()
    memory.add("tensor", ADDRESS, np.zeros(12800, np.uint8), writable=False)
    with pytest.raises(MemoryFault, match="read-only"):
        store(tile, (0, 0), memory, SharedMemory(RESERVED + 1024), RESERVED)
