# SPDX-License-Identifier: Apache-2.0
"""Global and shared memory: bytes at addresses, accessed by all lanes of a warpgroup at once.

Addresses are int64 arrays with one byte address per lane, values unsigned arrays as wide as the
access. A lane that a mask leaves out is neither read nor checked. An access outside every buffer,
or at an address that is not a multiple of its size, raises MemoryFault and changes nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .lanes import WARP, WARPS, Mask

I64 = NDArray[np.int64]
Values = NDArray[Any]

RESERVED = 1024  # [bytes] the system's, at the start of each CTA's shared memory
SHARED_LIMIT = 232448
"""[bytes] of dynamic shared memory that one CTA may have on sm_90 and sm_100."""
PARAM_WINDOW = 1 << 60
"""Generic address of the parameter space: no buffer may lie there."""
POISON = 0xFF  # bytes that nobody wrote: a NaN in every float format

ALIGNMENT = 16  # [bytes] of the rows of what TMA and vector loads read
MATRIX_ROWS = 8  # of a matrix of ldmatrix and stmatrix
ROW_BYTES = 16  # of such a row: eight 16-bit elements

_TYPE: dict[int, type[np.unsignedinteger[Any]]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}


class MemoryFault(Exception):
    """An access that the device would refuse, or that would hit what is not the kernel's."""

    def __init__(self, space: str, address: int, nbytes: int, reason: str) -> None:
        super().__init__(f"{nbytes} bytes of {space} memory at {address:#x}: {reason}")
        self.space = space
        self.address = address
        self.nbytes = nbytes
        self.reason = reason


def _active(addresses: I64, mask: Mask | None) -> I64:
    return addresses if mask is None else addresses[mask]


def _check_alignment(space: str, addresses: I64, nbytes: int) -> None:
    misaligned = addresses & (nbytes - 1)
    if misaligned.any():
        address = int(addresses[np.argmax(misaligned != 0)])
        raise MemoryFault(
            space, address, nbytes, "not a multiple of the size of the access"
        )


class SharedMemory:
    """Shared memory of one CTA: `size` bytes from address 0, the first KiB reserved.

    `bytes` (uint8) is the content, `words` the same by the width of access. Reading what nobody
    wrote is no fault: it gives NaN (and the shadow of `checks` tells).
    """

    def __init__(self, size: int) -> None:
        rounded = -(-size // 16) * 16
        self.size = size
        self.bytes = np.full(rounded, POISON, np.uint8)
        self.words = {width: self.bytes.view(kind) for width, kind in _TYPE.items()}

    def load(
        self, addresses: I64, width: int, count: int, mask: Mask | None = None
    ) -> list[Values]:
        """ld.shared: per lane `count` values of `width` (1, 2, 4, 8) bytes; 0 where masked out."""
        self._check(_active(addresses, mask), width * count)
        words = self.words[width]
        if mask is None:
            return [words[addresses // width + i] for i in range(count)]
        index = np.where(mask, addresses // width, 0)
        zero = words.dtype.type(0)
        return [np.where(mask, words[index + i], zero) for i in range(count)]

    def store(
        self,
        addresses: I64,
        width: int,
        values: Sequence[Values],
        mask: Mask | None = None,
    ) -> None:
        """st.shared: the highest lane wins where lanes collide."""
        active = _active(addresses, mask)
        self._check(active, width * len(values))
        words, index = self.words[width], active // width
        for i, value in enumerate(values):
            words[index + i] = _active(value, mask)

    def check_region(self, address: int, nbytes: int, alignment: int) -> None:
        """Raise MemoryFault unless a region lies in what is the kernel's, aligned."""
        if address % alignment:
            raise MemoryFault(
                "shared", address, nbytes, f"not aligned to {alignment} bytes"
            )
        if address < RESERVED or address + nbytes > self.size:
            raise MemoryFault("shared", address, nbytes, self._bounds())

    def _check(self, active: I64, nbytes: int) -> None:
        if not active.size:
            return
        low, high = int(active.min()), int(active.max())
        if low < RESERVED or high + nbytes > self.size:
            culprit = low if low < RESERVED else high
            raise MemoryFault("shared", culprit, nbytes, self._bounds())
        _check_alignment("shared", active, nbytes)

    def _bounds(self) -> str:
        return f"outside the kernel's bytes {RESERVED:#x} to {self.size:#x}"


def load_matrices(
    shared: SharedMemory,
    addresses: I64,
    count: int,
    mask: Mask,
    *,
    transpose: bool = False,
) -> list[Values]:
    """ldmatrix.m8n8.x1, .x2 and .x4 of 16-bit elements: `count` registers per lane.

    Of a warp, lane 8 m + r gives the address of row r of matrix m. Register m of lane 4 r + c gets
    the elements 2 c and 2 c + 1 of row r, or of column r when transposing.
    """
    lanes = np.arange(len(mask)) % WARP < MATRIX_ROWS * count
    words = np.stack(shared.load(addresses, 4, 4, mask & lanes))
    words = words.reshape(4, WARPS, WARP)[..., : MATRIX_ROWS * count]
    by_matrix = words.reshape(4, WARPS, count, MATRIX_ROWS).transpose(2, 1, 3, 0)
    if transpose:
        halves = np.ascontiguousarray(by_matrix).view(np.uint16).swapaxes(2, 3)
        by_matrix = np.ascontiguousarray(halves).view(np.uint32)
    return list(np.ascontiguousarray(by_matrix).reshape(count, -1))


def store_matrices(
    shared: SharedMemory,
    addresses: I64,
    registers: Sequence[Values],
    mask: Mask | None = None,
    *,
    transpose: bool = False,
) -> I64:
    """stmatrix.m8n8.x1, .x2 and .x4 of 16-bit elements, by each warp of which the mask has a lane.

    Of a warp, lane 8 m + r gives the address of row r of matrix m. Register m of lane 4 r + c holds
    the elements 2 c and 2 c + 1 of row r, or of column r when transposing. Returns the addresses of
    the rows written, 16 bytes each.
    """
    warps = (
        np.arange(WARPS)
        if mask is None
        else np.flatnonzero(mask.reshape(WARPS, -1).any(1))
    )
    count = len(registers)
    lanes = addresses.reshape(WARPS, WARP)[warps, : MATRIX_ROWS * count]
    rows = lanes.reshape(-1)  # (warp, matrix, row)
    held = np.stack(registers).reshape(count, WARPS, WARP)[:, warps].transpose(1, 0, 2)
    elements = (
        np.ascontiguousarray(held).view(np.uint16).reshape(-1, MATRIX_ROWS, MATRIX_ROWS)
    )
    if transpose:
        elements = elements.transpose(0, 2, 1)
    shared._check(rows, ROW_BYTES)
    index = rows[:, None] // 2 + np.arange(MATRIX_ROWS)
    shared.words[2][index] = elements.reshape(-1, MATRIX_ROWS)
    return rows


@dataclass(frozen=True)
class Buffer:
    """A named piece of global memory; `bytes` is a view of the array that was given.

    uninitialised: what a kernel reads of it, a kernel must have written before.
    """

    name: str
    address: int
    bytes: NDArray[np.uint8]
    writable: bool = True
    uninitialised: bool = False
    words: dict[int, Values] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A view per width of access; a tail shorter than the width is in none of them.
        views = {
            w: self.bytes[: len(self.bytes) // w * w].view(t) for w, t in _TYPE.items()
        }
        object.__setattr__(self, "words", views)

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.address + len(self.bytes)

    def locate(self, addresses: I64, nbytes: int) -> tuple[NDArray[np.bool_], I64]:
        """Which accesses lie in it, and at which of its bytes each begins."""
        offsets = addresses - self.address
        return (offsets >= 0) & (offsets + nbytes <= len(self.bytes)), offsets


@dataclass(frozen=True)
class StridedBuffer(Buffer):
    """A tensor whose elements lie anywhere: `bytes` has only them, close together.

    axes: of those that are not part of a run, the widest stride first, (bytes between two elements
    in the address space, elements, bytes between them in `bytes`). run: [bytes] that are neighbours
    in both.
    """

    axes: tuple[tuple[int, int, int], ...] = ()
    run: int = 0

    @property
    def end(self) -> int:
        """The address after the last byte."""
        steps = sum(stride * (size - 1) for stride, size, _ in self.axes)
        return self.address + steps + self.run

    def locate(self, addresses: I64, nbytes: int) -> tuple[NDArray[np.bool_], I64]:
        """Which accesses lie in one run of it, and at which byte of `bytes` each begins."""
        rest = addresses - self.address
        inside = rest >= 0
        offsets = np.zeros_like(rest)
        for stride, size, step in self.axes:
            index, rest = np.divmod(rest, stride)
            inside &= index < size
            offsets += index * step
        offsets += rest
        inside &= rest + nbytes <= self.run
        # What is aligned in the address space must be so in `bytes`, too: it is read as words.
        word = min(nbytes & -nbytes, max(_TYPE))
        if (offsets[inside] % word).any():
            raise ValueError(
                f"the elements of {self.name} are too close together for words of {word} bytes"
            )
        return inside, offsets


def _strided(
    name: str,
    address: int,
    array: NDArray[Any],
    shape: Sequence[int],
    address_strides: Sequence[int],
    writable: bool,
    uninitialised: bool,
) -> StridedBuffer:
    axes = sorted(
        (stride, size, step)
        for stride, size, step in zip(
            address_strides, shape, array.strides, strict=True
        )
        if size > 1
    )
    run = span = array.itemsize
    outer: list[tuple[int, int, int]] = []
    for stride, size, step in axes:
        if stride < span:
            raise ValueError(
                f"buffer {name}: a stride of {stride} bytes, smaller than the {span} bytes below it"
            )
        if stride == step == run and not outer:
            run *= size
        else:
            outer.append((stride, size, step))
        span = stride * (size - 1) + span
    flat = array.reshape(-1).view(np.uint8)
    kind = writable, uninitialised
    return StridedBuffer(name, address, flat, *kind, tuple(reversed(outer)), run)


class GlobalMemory:
    """Named buffers at addresses; there is nothing between them."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._starts: list[int] = []

    def add(
        self,
        name: str,
        address: int,
        array: NDArray[Any],
        *,
        writable: bool = True,
        uninitialised: bool = False,
    ) -> Buffer:
        """Put a contiguous array at an address that is a multiple of 16; stores write into it.

        uninitialised: a workspace or an output, of which a kernel reads only what one has written.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"buffer {name} is not contiguous")
        if address % 16:
            raise ValueError(f"buffer {name} is not aligned to 16 bytes: {address:#x}")
        flat = array.reshape(-1).view(np.uint8)
        return self._insert(Buffer(name, address, flat, writable, uninitialised))

    def add_strided(
        self,
        name: str,
        address: int,
        array: NDArray[Any],
        address_strides: Sequence[int],
        *,
        writable: bool = True,
        uninitialised: bool = False,
    ) -> Buffer:
        """Put element (i, j, ...) of a contiguous array at address + i address_strides[0] + ...

        The strides, in bytes, may be as large as one likes: nothing is between the elements, and
        who touches it gets a MemoryFault. Each must be at least what the smaller ones span.
        writable, uninitialised: as for `add`.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"buffer {name} is not contiguous")
        if address % array.itemsize:
            raise ValueError(f"buffer {name} is not aligned: {address:#x}")
        strides, kind, shape = address_strides, (writable, uninitialised), array.shape
        if not writable and (spare := -shape[-1] % (ALIGNMENT // array.itemsize)):
            # Rows are aligned in the address space, and read as words.
            array = np.pad(array, [*[(0, 0)] * (array.ndim - 1), (0, spare)])
        return self._insert(_strided(name, address, array, shape, strides, *kind))

    def _insert(self, buffer: Buffer) -> Buffer:
        place = bisect.bisect(self._starts, buffer.address)
        for other in self.buffers[max(place - 1, 0) : place + 1]:
            if buffer.address < other.end and other.address < buffer.end:
                raise ValueError(f"buffer {buffer.name} overlaps buffer {other.name}")
        self.buffers.insert(place, buffer)
        self._starts.insert(place, buffer.address)
        return buffer

    def find(self, address: int, nbytes: int) -> tuple[Buffer, int]:
        """The buffer that holds all of an access, and the offset in it; or MemoryFault."""
        place = bisect.bisect(self._starts, address) - 1
        if place >= 0:
            buffer = self.buffers[place]
            if isinstance(buffer, StridedBuffer):
                inside, offsets = buffer.locate(np.array([address]), nbytes)
                if inside[0]:
                    return buffer, int(offsets[0])
            elif address - buffer.address + nbytes <= len(buffer.bytes):
                return buffer, address - buffer.address
        raise MemoryFault("global", address, nbytes, self._nearest(place, address))

    def strided(self, address: int) -> StridedBuffer | None:
        """The buffer around an address if it is a strided one."""
        place = bisect.bisect(self._starts, address) - 1
        buffer = self.buffers[place] if place >= 0 else None
        if isinstance(buffer, StridedBuffer) and address < buffer.end:
            return buffer
        return None

    def load(
        self, addresses: I64, width: int, count: int, mask: Mask | None = None
    ) -> list[Values]:
        """ld.global: per lane `count` values of `width` (1, 2, 4, 8) bytes; 0 where masked out."""
        results = [np.zeros(addresses.shape, _TYPE[width]) for _ in range(count)]
        for buffer, lanes, index in self.split(addresses, width * count, mask):
            for i, result in enumerate(results):
                result[lanes] = buffer.words[width][index // width + i]
        return results

    def store(
        self,
        addresses: I64,
        width: int,
        values: Sequence[Values],
        mask: Mask | None = None,
    ) -> None:
        """st.global: the highest lane wins where lanes collide."""
        nbytes = width * len(values)
        parts = self.split(addresses, nbytes, mask)
        for buffer, lanes, _ in parts:
            if not buffer.writable:
                address = int(addresses[lanes[0]])
                raise MemoryFault(
                    "global", address, nbytes, f"{buffer.name} is read-only"
                )
        for buffer, lanes, index in parts:
            for i, value in enumerate(values):
                buffer.words[width][index // width + i] = value[lanes]

    def split(
        self, addresses: I64, nbytes: int, mask: Mask | None
    ) -> list[tuple[Buffer, NDArray[np.intp], I64]]:
        """Which lanes access which buffer, and at which byte of it; or MemoryFault."""
        lanes = np.arange(len(addresses)) if mask is None else np.flatnonzero(mask)
        _check_alignment("global", addresses[lanes], nbytes)
        parts = []
        while lanes.size:
            buffer, _ = self.find(int(addresses[lanes[0]]), nbytes)
            inside, offset = buffer.locate(addresses[lanes], nbytes)
            parts.append((buffer, lanes[inside], offset[inside]))
            lanes = lanes[~inside]
        return parts

    def _nearest(self, place: int, address: int) -> str:
        if not self.buffers:
            return "there are no buffers"
        before = self.buffers[max(place, 0)]
        if address < before.address:
            return f"{before.address - address} bytes before {before.name}"
        if address < before.end and isinstance(before, StridedBuffer):
            return (
                f"between the elements of {before.name}, or beyond the end of its run"
            )
        return f"{address - before.end} bytes after the end of {before.name}"
