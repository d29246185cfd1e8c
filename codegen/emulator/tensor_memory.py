# SPDX-License-Identifier: Apache-2.0
"""Tensor memory of one CTA: 128 lanes of 512 columns of 32 bits, and how warps address it.

An address has the lane in its upper half and the column in its lower half. The content is kept by
columns: what an instruction moves of one column is contiguous, as a register of 128 lanes is.

Sources: PTX ISA 9.7.16 (tensor memory, its allocation, the data movement shapes).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .lanes import LANES, WARP, WARPS
from .numerics import U32
from .report import Fault, Kind

I64 = NDArray[np.int64]

COLUMNS = 512  # of 32 bits
UNIT = 32  # [columns] of which allocations are multiples
POISON = np.uint32(0xFFFFFFFF)  # a NaN in every float format, however it is packed

HALF = WARP // 2  # lanes: some shapes and layouts use only half of each warp's
GRANULES = (WARPS, COLUMNS, 2)
"""Of the race check: one column of half a warp's lanes each."""


def split_address(address: int) -> tuple[int, int]:
    """The lane and the column of an address."""
    return address >> 16 & 0xFFFF, address & 0xFFFF


def granules(
    first: int, count: int, *, quadrant: int | None = None, half: int | None = None
) -> tuple[slice, slice, slice]:
    """Those of `count` columns, for the lanes of one warp or all, and one half of them or both."""
    return _one(quadrant), slice(first, first + count), _one(half)


def _one(place: int | None) -> slice:
    """A place of an axis; None: all."""
    return slice(None) if place is None else slice(place, place + 1)


@dataclass(frozen=True)
class Allocation:
    """Columns that tcgen05.alloc gave away."""

    first: int
    columns: int
    line: int
    """[PTX line] of the tcgen05.alloc."""


@dataclass(frozen=True)
class Request:
    """A tcgen05.alloc or .dealloc that a warp has come to; in a CTA pair a warp of each must."""

    warp: int
    columns: int
    first: int | None
    """What to deallocate; None allocates."""
    granted: int | None = None
    """The first column, once it is done."""


class TensorMemory:
    """The content of one CTA's tensor memory, and who allocated which columns."""

    def __init__(self) -> None:
        self.words = np.full((COLUMNS, LANES), POISON, np.uint32)
        """[column, lane]"""
        self.floats = self.words.view(np.float32)
        self.allocations: list[Allocation] = []
        self.relinquished = False
        self.requests: dict[bool, Request] = {}
        """The one tcgen05.alloc (false) and the one .dealloc (true) that are under way."""
        self._largest = COLUMNS

    def check_request(self, columns: int) -> None:
        """Raises Fault for a tcgen05.alloc that is against the rules."""
        if columns & (columns - 1) or not UNIT <= columns <= COLUMNS:
            raise Fault(
                Kind.TENSOR_MEMORY,
                f"{columns} columns: not a power of two from {UNIT} to {COLUMNS}",
            )
        if self.relinquished:
            raise Fault(
                Kind.TENSOR_MEMORY,
                "allocates after the CTA has relinquished the permit",
            )
        if columns > self._largest:
            raise Fault(
                Kind.TENSOR_MEMORY,
                f"allocates {columns} columns after {self._largest}: must not increase",
            )

    def find_free(self, columns: int) -> int | None:
        """The lowest column from which on so many are free; None when there is none."""
        taken = np.zeros(COLUMNS, np.bool_)
        for allocation in self.allocations:
            taken[allocation.first : allocation.first + allocation.columns] = True
        for first in range(0, COLUMNS - columns + 1, UNIT):
            if not taken[first : first + columns].any():
                return first
        return None

    @property
    def free_columns(self) -> int:
        """How many nobody has allocated."""
        return COLUMNS - sum(allocation.columns for allocation in self.allocations)

    def allocate(self, first: int, columns: int, line: int) -> None:
        """Gives columns away."""
        self.allocations.append(Allocation(first, columns, line))
        self._largest = columns

    def release(self, first: int, columns: int) -> None:
        """Takes an allocation back, and what it held; Fault unless it is exactly one."""
        kept = [a for a in self.allocations if (a.first, a.columns) != (first, columns)]
        if len(kept) == len(self.allocations):
            raise Fault(
                Kind.TENSOR_MEMORY,
                f"deallocates {columns} columns at {first}, which is no allocation",
            )
        self.allocations = kept
        self.words[first : first + columns] = POISON

    def check_columns(self, first: int, count: int, what: str) -> None:
        """Raises Fault unless columns lie in one allocation."""
        for allocation in self.allocations:
            begin, end = allocation.first, allocation.first + allocation.columns
            if begin <= first and first + count <= end:
                return
        raise Fault(
            Kind.OUT_OF_BOUNDS,
            f"{what} in columns {first} to {first + count - 1} of tensor memory, which no "
            "allocation holds",
        )


@dataclass(frozen=True, eq=False)
class Movement:
    """What tcgen05.ld and .st of one shape move, relative to the address, for one warp.

    Lane t's register i is the cell [columns[i, t], lanes[i, t]]. Packed, it is the low halves of
    that cell (its low half) and of the next column's.
    """

    columns: I64
    lanes: I64
    spans: tuple[tuple[int, int], ...]
    """(first, count) of the columns that it touches."""
    packed: bool
    half: bool
    """Whether it touches only 16 lanes."""

    @property
    def registers(self) -> int:
        """Of each thread."""
        return len(self.columns)

    @property
    def whole_columns(self) -> bool:
        """Whether register i is column i of the warp's lanes, as it is."""
        return not self.half and not self.packed


# Registers of one repetition, and the columns (of 32 bits) that it spans.
SHAPES = {
    "32x32b": (1, 1),
    "16x64b": (1, 2),
    "16x128b": (2, 4),
    "16x256b": (4, 8),
    "16x32bx2": (1, 1),
}


@functools.lru_cache(maxsize=256)
def movement(shape: str, repetitions: int, packed: bool, split: int) -> Movement:
    """The cells of one of the SHAPES; `split` is the second half's offset of .16x32bx2."""
    registers, width = SHAPES[shape]
    thread = np.arange(WARP)[None, :]
    part = np.arange(registers)[:, None]
    if shape == "32x32b":
        lanes, columns = thread, np.zeros_like(thread)
    elif shape == "16x32bx2":
        lanes, columns = thread % HALF, np.zeros_like(thread)
    elif shape == "16x64b":
        lanes, columns = thread // 4 + 8 * (thread % 2), thread // 2 % 2
    elif shape == "16x128b":
        lanes, columns = thread // 4 + 8 * part, thread % 4 + 0 * part
    else:
        lanes = thread // 4 + 8 * (part // 2)
        columns = 2 * (thread % 4) + part % 2
    repeated = np.arange(repetitions)[:, None, None] * width + columns
    scale = 2 if packed else 1
    all_columns = scale * repeated.reshape(-1, WARP)
    span = scale * width * repetitions
    spans: tuple[tuple[int, int], ...] = ((0, span),)
    if shape == "16x32bx2":
        all_columns = all_columns + split * (thread >= HALF)
        spans = ((0, span), (split, span))
    all_lanes = np.broadcast_to(lanes, (repetitions, *lanes.shape)).reshape(-1, WARP)
    return Movement(all_columns, all_lanes, spans, packed, shape != "32x32b")


def load(words: U32, moved: Movement, column: int, lane: int) -> U32:
    """The registers of a warp, [registers, 32], from cells [column, lane]."""
    columns, lanes = moved.columns + column, moved.lanes + lane
    values: U32 = words[columns, lanes]
    if moved.packed:
        high: U32 = words[columns + 1, lanes]
        values = values & np.uint32(0xFFFF) | high << np.uint32(16)
    return values


def store(
    words: U32, moved: Movement, column: int, lane: int, values: Sequence[U32]
) -> None:
    """Registers of a warp, 32 lanes each, to cells [column, lane].

    Unpacked 16-bit values lie in the low halves of their cells; the others become poison.
    """
    columns, lanes = moved.columns + column, moved.lanes + lane
    held = np.stack(values)
    if moved.packed:
        upper = np.uint32(0xFFFF0000)
        words[columns, lanes] = held | upper
        words[columns + 1, lanes] = held >> np.uint32(16) | upper
    else:
        words[columns, lanes] = held
