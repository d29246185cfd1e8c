# SPDX-License-Identifier: Apache-2.0
"""The tensor memory accelerator: tensor maps, boxes, swizzles, loads and stores.

A tensor map describes a tensor of up to five dimensions in global memory, the first one contiguous,
and a box of it that one instruction moves. In shared memory a box is dense, its first dimension
fastest; a swizzle then permutes the 16-byte chunks of each 128-byte row by the row's own address.
Elements of a box that lie outside the tensor are zero when loaded and left alone when stored.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .additions import Sum, check_writable
from .memory import Buffer, GlobalMemory, MemoryFault, SharedMemory

I64 = NDArray[np.int64]

MAP_BYTES = 128  # of a tensor map, the first half of which says everything
MAP_ALIGNMENT = 64  # [bytes] that cuTensorMapEncodeTiled requires of its address
SHARED_ALIGNMENT = 128  # [bytes] of a box in shared memory
CHUNK = 16  # [bytes] that a swizzle keeps together, and that global strides are multiples of

# Bits of the data type field: (name, bytes).
_TYPES = {
    0: ("u8", 1),
    1: ("u16", 2),
    2: ("u32", 4),
    3: ("s32", 4),
    4: ("u64", 8),
    5: ("s64", 8),
    6: ("f16", 2),
    7: ("f32", 4),
    8: ("f32.ftz", 4),
    9: ("f64", 8),
    10: ("bf16", 2),
}
_VERSIONS = frozenset({0, 2})
"""As the driver encodes them, and as the DSL's host code does."""
_KNOWN_FLAGS = 0x003F_67FF
"""Version, rank, type, swizzle, bit 16 and the hints for L2 above it."""


class TensorMapError(ValueError):
    """A tensor map that says what this model does not know, or what the device would refuse."""


@dataclass(frozen=True)
class TensorMap:
    """What a tensor map says. Dimension 0 is the contiguous one; strides are in bytes."""

    address: int
    element_type: str
    element_size: int  # [bytes]
    dimensions: tuple[int, ...]  # [elements]
    strides: tuple[int, ...]  # [bytes], strides[0] == element_size
    box: tuple[int, ...]  # [elements]
    swizzle_bits: int  # 0: none, 1: 32-byte, 2: 64-byte, 3: 128-byte

    @classmethod
    def decode(cls, raw: bytes) -> TensorMap:
        """Read the 128 bytes that a kernel gets; TensorMapError when they make no sense."""
        if len(raw) != MAP_BYTES:
            raise TensorMapError(f"a tensor map has {MAP_BYTES} bytes, not {len(raw)}")
        words = struct.unpack("<8Q", raw[:64])
        flags = words[1] & 0xFFFFFFFF
        if flags & 15 not in _VERSIONS or flags & ~_KNOWN_FLAGS:
            raise TensorMapError(f"unknown flags in a tensor map: {flags:#010x}")
        if words[3] >> 48 or words[6] >> 32 & 0xFFFFFF or words[7] >> 32:
            raise TensorMapError(
                "a tensor map with element strides or other unknown fields"
            )
        rank = (flags >> 4 & 7) + 1
        if rank > 5:
            raise TensorMapError(f"a tensor map of {rank} dimensions")
        code = flags >> 7 & 15
        if code not in _TYPES:
            raise TensorMapError(f"unknown element type {code} in a tensor map")
        name, size = _TYPES[code]
        low = (
            words[1] >> 32,
            words[2] & 0xFFFFFFFF,
            words[2] >> 32,
            words[3] & 0xFFFFFFFF,
        )
        high = [words[3] >> (32 + 4 * i) & 15 for i in range(4)]
        strides = [(h << 32 | s) * CHUNK for h, s in zip(high, low, strict=True)]
        limits = (words[4], words[4] >> 32, words[5], words[5] >> 32, words[6])
        edges = (words[6] >> 56, *(words[7] >> 8 * i & 0xFF for i in range(4)))
        decoded = cls(
            address=words[0],
            element_type=name,
            element_size=size,
            dimensions=tuple((limit & 0xFFFFFFFF) + 1 for limit in limits[:rank]),
            strides=(size, *strides[: rank - 1]),
            box=tuple(edge + 1 for edge in edges[:rank]),
            swizzle_bits=flags >> 13 & 3,
        )
        decoded._check()
        return decoded

    @property
    def rank(self) -> int:
        """How many dimensions, 1 to 5."""
        return len(self.box)

    @functools.cached_property
    def elements(self) -> int:
        """Of a box."""
        return int(np.prod(self.box))

    @functools.cached_property
    def box_bytes(self) -> int:
        """Of a box in shared memory; out-of-bounds elements count, for mbarriers too."""
        return self.elements * self.element_size

    @functools.cached_property
    def relative_offsets(self) -> I64:
        """Of each element of a box, dimension 0 fastest, from the box's first one. [bytes]"""
        offsets = np.zeros(1, np.int64)
        for edge, stride in zip(self.box, self.strides, strict=True):
            steps = np.arange(edge, dtype=np.int64) * stride
            offsets = (steps[:, None] + offsets).reshape(-1)
        return offsets

    def astray(self, coordinates: Sequence[int], tiles: Sequence[int]) -> str:
        """Why no element of a box can have been meant; empty when some lie in a tile of the tensor.

        tiles: [elements] along each dimension that the tensor is cut into, the last of them ragged;
        a box may lie in its part beyond the end. 1, as in dimensions without one, allows none.
        """
        for axis, (start, edge, limit) in enumerate(
            zip(coordinates, self.box, self.dimensions, strict=True)
        ):
            tile = tiles[axis] if axis < len(tiles) else 1
            if start + edge <= 0 or start >= -(-limit // tile) * tile:
                return (
                    f"a box at {tuple(coordinates)} is wholly outside the tensor: dimension "
                    f"{axis} has {limit} elements"
                    + (f" in tiles of {tile}" * (tile > 1))
                )
        return ""

    def swizzle(self, addresses: I64) -> I64:
        """Where the bytes of a dense box go: shared-memory byte addresses in and out."""
        return swizzle(addresses, self.swizzle_bits)

    def _check(self) -> None:
        """The rules of cuTensorMapEncodeTiled that a kernel's maps could break."""
        inner = self.box[0] * self.element_size
        span = 16 << self.swizzle_bits
        if self.address % CHUNK:
            raise TensorMapError(
                f"the tensor's address {self.address:#x} is not 16-byte aligned"
            )
        if inner % CHUNK:
            raise TensorMapError(
                f"the box's rows of {inner} bytes are not a multiple of {CHUNK}"
            )
        if self.swizzle_bits and inner > span:
            raise TensorMapError(
                f"rows of {inner} bytes do not fit the {span}-byte swizzle"
            )
        if self.swizzle_bits and inner < span:
            raise TensorMapError(
                f"rows of {inner} bytes, narrower than their {span}-byte swizzle, are not modelled"
            )


def swizzle(addresses: I64, bits: int) -> I64:
    """XOR the chunk number (address bits 4 to 6) with as many bits of the 128-byte row number."""
    if bits == 0:
        return addresses
    return addresses ^ ((addresses >> 7 & (1 << bits) - 1) << 4)


def load(
    tensor_map: TensorMap,
    coordinates: Sequence[int],
    memory: GlobalMemory,
    targets: Sequence[SharedMemory],
    smem_address: int,
) -> tuple[int, range]:
    """Move a box to the same address of each target: (bytes that each received, bytes written).

    Those are one range: a swizzle permutes only inside 128-byte rows. MemoryFault when the box does
    not fit there or what lies in bounds is not in one buffer. For a box that is wholly outside the
    H200 reads where the map begins, so that has to be in a buffer.
    """
    region = _region(tensor_map, targets, smem_address)
    _check_start(tensor_map, coordinates)
    part = _clip(tensor_map, coordinates)
    moved = _moved(tensor_map, part.granule, smem_address % _PERIOD)
    if part.empty:
        memory.find(tensor_map.address, tensor_map.element_size)
        block = np.zeros(len(moved.offsets), _WORD[part.granule])
    elif part.full and not memory.strided(tensor_map.address + part.low):
        buffer, base = memory.find(tensor_map.address + part.low, part.high - part.low)
        first = (base - part.low + part.first) // part.granule
        block = buffer.words[part.granule][moved.permuted + first]
    else:
        buffer, words = _words_in_bounds(tensor_map, part, moved, memory)
        source = buffer.words[part.granule]
        dense = np.zeros(moved.shape, source.dtype)
        dense[part.slices] = source[words]
        block = dense.reshape(-1)[moved.permutation]
    for target in targets:
        target.words[part.granule][_words(region, part.granule)] = block
    return len(region), region


def store(
    tensor_map: TensorMap,
    coordinates: Sequence[int],
    memory: GlobalMemory,
    shared: SharedMemory,
    smem_address: int,
) -> range:
    """Move a box from shared memory; the bytes read there, of which those out of bounds go nowhere.

    Along dimension 0 the H200 drops whole chunks of 16 bytes: what follows the last element up to
    the end of its chunk is written. `load` fills with zeros from the very element.

    MemoryFault as for `load`, and when the tensor is in a read-only buffer.
    """
    found = _stored(tensor_map, coordinates, memory, shared, smem_address)
    if found is None:
        return _region(tensor_map, [shared], smem_address)
    region, buffer, words, dense = found
    buffer.words[dense.itemsize][words] = dense
    return region


def _stored(
    tensor_map: TensorMap,
    coordinates: Sequence[int],
    memory: GlobalMemory,
    shared: SharedMemory,
    smem_address: int,
) -> tuple[range, Buffer, I64, NDArray[Any]] | None:
    """Bytes of shared memory, and words of a buffer with what of a box belongs there, if any."""
    region = _region(tensor_map, [shared], smem_address)
    _check_start(tensor_map, coordinates)
    if min(coordinates) < 0:
        problem = f"a store at the negative coordinates {tuple(coordinates)}"
        raise MemoryFault("global", tensor_map.address, tensor_map.box_bytes, problem)
    part = _clip(tensor_map, coordinates, whole_chunks=True)
    if part.empty:
        return None
    moved = _moved(tensor_map, part.granule, smem_address % _PERIOD)
    buffer, words = _words_in_bounds(tensor_map, part, moved, memory)
    check_writable(buffer, tensor_map.address + part.low, part.high - part.low)
    block = shared.words[part.granule][_words(region, part.granule)]
    # The permutation is its own inverse: it XORs a column number with what the row number gives.
    dense = block[moved.permutation].reshape(moved.shape)[part.slices]
    return region, buffer, words, dense


def summands(
    tensor_map: TensorMap,
    coordinates: Sequence[int],
    memory: GlobalMemory,
    shared: SharedMemory,
    smem_address: int,
) -> tuple[range, Sum | None]:
    """What a reduction of a box adds to a tensor of float32: the bytes read, and None for nothing.

    Out of bounds is what is so for `store`, and the faults are the same.
    """
    if tensor_map.element_type not in ("f32", "f32.ftz"):
        raise TensorMapError(
            f"additions to a tensor of {tensor_map.element_type} are not modelled"
        )
    found = _stored(tensor_map, coordinates, memory, shared, smem_address)
    if found is None:
        return _region(tensor_map, [shared], smem_address), None
    region, buffer, words, dense = found
    values = np.ascontiguousarray(dense).reshape(-1).view(np.float32)
    count = dense.itemsize // values.itemsize
    places = words.reshape(-1, 1) * count + np.arange(count, dtype=np.int64)
    return region, Sum(buffer.words[4].view(np.float32), places.reshape(-1), values)


def in_bounds(
    tensor_map: TensorMap,
    coordinates: Sequence[int],
    memory: GlobalMemory,
    *,
    stored: bool,
) -> tuple[Buffer, I64, int] | None:
    """What of a box is in its tensor, and written when it is stored: words of a buffer.

    Returns the buffer, the numbers of the words, and their width in bytes; None when there are
    none. MemoryFault as for `load`.
    """
    part = _clip(tensor_map, coordinates, whole_chunks=stored)
    if part.empty:
        return None
    moved = _moved(tensor_map, part.granule, 0)
    buffer, words = _words_in_bounds(tensor_map, part, moved, memory)
    return buffer, words.reshape(-1), part.granule


def _words_in_bounds(
    tensor_map: TensorMap, part: _Part, moved: _Moved, memory: GlobalMemory
) -> tuple[Buffer, I64]:
    """The buffer of what is in bounds of a box, and the numbers of its words, in the box's shape.

    MemoryFault when that is not in one buffer.
    """
    low = tensor_map.address + part.low
    offsets = moved.offsets.reshape(moved.shape)[part.slices]
    strided = memory.strided(low)
    if strided is None:
        buffer, base = memory.find(low, part.high - part.low)
        words: I64 = offsets + (base - part.low + part.first) // part.granule
        return buffer, words
    # Dimension 0 is contiguous: where its first granules are says all.
    rows = tensor_map.address + part.first + offsets[..., 0] * part.granule
    nbytes = offsets.shape[-1] * part.granule
    inside, starts = strided.locate(rows.reshape(-1), nbytes)
    if not inside.all():
        memory.find(int(rows.reshape(-1)[np.argmin(inside)]), nbytes)  # raises
    columns = np.arange(offsets.shape[-1], dtype=np.int64)
    return strided, starts.reshape(rows.shape)[..., None] // part.granule + columns


_PERIOD = 1024  # [bytes] after which every swizzle repeats
_WIDEST = 8  # [bytes] moved as one number where everything is aligned to that
_WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _region(
    tensor_map: TensorMap, targets: Sequence[SharedMemory], smem_address: int
) -> range:
    for target in targets:
        target.check_region(smem_address, tensor_map.box_bytes, SHARED_ALIGNMENT)
    return range(smem_address, smem_address + tensor_map.box_bytes)


def _check_start(tensor_map: TensorMap, coordinates: Sequence[int]) -> None:
    """Rules that the H200 answers with an illegal instruction (tests/hardware/micro)."""
    if coordinates[0] * tensor_map.element_size % CHUNK:
        problem = f"the box starts at element {coordinates[0]}, not at a multiple of {CHUNK} bytes"
        raise MemoryFault("global", tensor_map.address, tensor_map.box_bytes, problem)


def _words(region: range, granule: int) -> slice:
    return slice(region.start // granule, region.stop // granule)


@dataclass(frozen=True)
class _Part:
    """What of a box is in bounds: itself a box. Offsets are from the tensor's address, in bytes."""

    first: int  # of the box's first element, in bounds or not
    low: int  # of the first byte in bounds
    high: int  # after the last one
    granule: int  # [bytes] moved at once: no granule is half in bounds
    slices: tuple[slice, ...]
    """Of a box as [outer dimension, ..., granules of dimension 0]."""
    full: bool
    empty: bool


def _clip(
    tensor_map: TensorMap, coordinates: Sequence[int], *, whole_chunks: bool = False
) -> _Part:
    first = low = high = 0
    full = True
    bounds = []
    limits = list(tensor_map.dimensions)
    if whole_chunks:
        per_chunk = CHUNK // tensor_map.element_size
        limits[0] = -(-limits[0] // per_chunk) * per_chunk
    for c, edge, limit, stride in zip(
        coordinates,
        tensor_map.box,
        limits,
        tensor_map.strides,
        strict=True,
    ):
        start, stop = max(0, -c), min(edge, limit - c)
        full = full and start == 0 and stop == edge
        bounds.append((start, max(stop, start)))
        first += c * stride
        low += (c + start) * stride
        high += (c + stop - 1) * stride
    size = tensor_map.element_size
    inner_start, inner_stop = (bound * size for bound in bounds[0])
    aligned = not (coordinates[0] * size | inner_start | inner_stop) % _WIDEST
    granule = _WIDEST if aligned else size
    bounds[0] = (inner_start // granule, inner_stop // granule)
    return _Part(
        first=first,
        low=low,
        high=high + size,
        granule=granule,
        slices=tuple(slice(*bound) for bound in reversed(bounds)),
        full=full,
        empty=any(start == stop for start, stop in bounds),
    )


@dataclass(frozen=True)
class _Moved:
    """Where the granules of a box go, for one placement in the swizzle's period."""

    shape: tuple[int, ...]
    """Outer dimension first; the last entry is granules of dimension 0."""
    offsets: NDArray[np.int64]  # [granules] in global memory from the box's first one
    permutation: NDArray[np.int64]  # dense granule <-> granule of the region
    permuted: NDArray[np.int64]  # offsets in the order of shared memory


@functools.lru_cache(maxsize=256)
def _moved(tensor_map: TensorMap, granule: int, phase: int) -> _Moved:
    per_granule = granule // tensor_map.element_size
    offsets = tensor_map.relative_offsets[::per_granule] // granule
    addresses = phase + np.arange(0, tensor_map.box_bytes, granule, dtype=np.int64)
    permutation = (tensor_map.swizzle(addresses) - phase) // granule
    inner = tensor_map.box[0] // per_granule
    return _Moved(
        shape=(*reversed(tensor_map.box[1:]), inner),
        offsets=offsets,
        permutation=permutation,
        permuted=offsets[permutation],
    )
