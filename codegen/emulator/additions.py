# SPDX-License-Identifier: Apache-2.0
"""Atomic additions to global memory: numbers are added one after another, in an order given.

Those of a bulk reduction are under way from when it has read shared memory. The schedule says when
each of them arrives, in no order, among those of others.

Floats are rounded to nearest after each addition. Subnormals of `.f32` are zeros of their sign,
those in memory too, as the device has it in global memory; `.noftz.f16x2` keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .lanes import Lanes, Mask
from .memory import Buffer, GlobalMemory, MemoryFault
from .numerics import ftz

I64 = NDArray[np.int64]

KINDS: dict[str, Any] = {
    "f32": np.float32,
    "f16x2": np.float16,
    "u32": np.uint32,
    "s32": np.uint32,
    "u64": np.uint64,
}
"""By PTX type, numpy's of a word: sums of signed integers are the same bits."""
ROUNDED = frozenset(("f32", "f16x2"))
"""Of these, those whose sums depend on their order."""


def check_writable(buffer: Buffer, address: int, nbytes: int) -> None:
    """MemoryFault for what no kernel may write."""
    if not buffer.writable:
        raise MemoryFault("global", address, nbytes, f"{buffer.name} is read-only")


def add(words: NDArray[Any], places: I64, values: NDArray[Any]) -> NDArray[Any]:
    """Adds each value to the word at its place, and returns what it found there.

    Several for one place are added in the order in which they stand.
    """
    found = np.empty_like(values)
    rest = np.arange(len(places))
    while len(rest):
        _, first = np.unique(places[rest], return_index=True)
        now = rest[first]
        found[now] = words[places[now]]
        words[places[now]] = _sum(found[now], values[now])
        rest = np.delete(rest, first)
    return found


def _sum(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    if first.dtype == np.float32:
        return ftz(ftz(first) + ftz(second))
    total: NDArray[Any] = first + second
    return total


@dataclass(frozen=True)
class Sum:
    """What a bulk reduction adds: each value to the word of global memory at its place."""

    words: NDArray[Any]
    places: I64
    values: NDArray[Any]

    @classmethod
    def of_bytes(cls, buffer: Buffer, offset: int, content: NDArray[np.uint8]) -> Sum:
        """Floats that are bytes, to those of a buffer from an offset on."""
        values = content.view(np.float32).copy()
        places = offset // values.itemsize + np.arange(len(values), dtype=np.int64)
        return cls(buffer.words[values.itemsize].view(np.float32), places, values)


@dataclass(eq=False)
class Addition:
    """A sum under way. arrived: is called once all of it is there."""

    sum: Sum
    arrived: Callable[[], None]
    order: list[int] = field(default_factory=list)
    """Of the values, from the last on; empty when the order is theirs."""
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.sum.values)

    def land(self, count: int) -> None:
        """Adds this many more of the values, or all that are left."""
        begin = max(0, self.left - count)
        chosen: Any = slice(begin, self.left)
        if self.order:
            chosen = np.array(self.order[begin : self.left], np.int64)
        # The places differ, so all are added at once.
        words, places = self.sum.words, self.sum.places[chosen]
        words[places] = _sum(words[places], self.sum.values[chosen])
        self.left = begin
        if not begin:
            self.arrived()


def add_lanes(
    memory: GlobalMemory,
    addresses: I64,
    kind: str,
    values: Sequence[Lanes],
    mask: Mask,
    order: NDArray[np.intp],
) -> list[Lanes]:
    """`red` and `atom`: adds one value per lane to each of neighbouring words, two if it is packed.

    kind: of KINDS. order: of all lanes. Returns what was there before, zero where masked out.
    """
    dtype = np.dtype(KINDS[kind])
    width = dtype.itemsize
    packed = values[0].itemsize // width
    words_of = [each.view(dtype).reshape(-1, packed) for each in values]
    values = [each[:, i] for each in words_of for i in range(packed)]
    nbytes = width * len(values)
    parts = memory.split(addresses, nbytes, mask)
    for buffer, lanes, _ in parts:
        check_writable(buffer, int(addresses[lanes[0]]), nbytes)
    rank = np.argsort(order)
    found = [np.zeros(len(addresses), dtype) for _ in values]
    for buffer, lanes, offsets in parts:
        turns = np.argsort(rank[lanes])
        lanes, places = lanes[turns], offsets[turns] // width
        words = buffer.words[width].view(dtype)
        for number, each in enumerate(values):
            given = each[lanes]
            found[number][lanes] = add(words, places + number, given)
    return found
