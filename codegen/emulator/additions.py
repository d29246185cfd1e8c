# SPDX-License-Identifier: Apache-2.0
"""Atomic additions to global memory: numbers are added one after another, in an order given.

Floats are rounded to nearest after each addition. Subnormals are zeros of their sign, those in
memory too, as the device has it for `.f32` in global memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .lanes import Lanes, Mask
from .memory import Buffer, GlobalMemory, MemoryFault
from .numerics import ftz

I64 = NDArray[np.int64]

KINDS: dict[str, Any] = {
    "f32": np.float32,
    "u32": np.uint32,
    "s32": np.uint32,
    "u64": np.uint64,
}
"""By PTX type, numpy's: sums of signed integers are the same bits."""


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


def add_lanes(
    memory: GlobalMemory,
    addresses: I64,
    kind: str,
    values: Sequence[Lanes],
    mask: Mask,
    order: NDArray[np.intp],
) -> list[Lanes]:
    """`red` and `atom`: adds one value per lane to each of neighbouring words.

    kind: of KINDS. order: of all lanes. Returns what was there before, zero where masked out.
    """
    dtype = np.dtype(KINDS[kind])
    width = dtype.itemsize
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
            given = each.view(dtype)[lanes]
            found[number][lanes] = add(words, places + number, given)
    return found
