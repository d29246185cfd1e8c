# SPDX-License-Identifier: Apache-2.0
"""Who wrote what: how often each byte of global memory was written in a run, and by which CTAs.

Atomic additions are not counted: many are made to one sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .memory import Buffer

WIDEST = 32  # [bytes] of one access by one lane
_MOST = 255


@dataclass(frozen=True)
class Writer:
    """A CTA by its number in the grid, x fastest; its warp, and the PTX line."""

    cta: int
    warp: int
    line: int

    def __str__(self) -> str:
        return f"cta {self.cta}, warp {self.warp}, line {self.line}"


class Writes:
    """Of a run, for each buffer that was written."""

    def __init__(self) -> None:
        self._counts: dict[int, NDArray[np.uint8]] = {}
        """By the buffer's address: of each byte, and up to `WIDEST` more."""
        self._log: dict[int, list[tuple[Any, int, Writer]]] = {}
        """(words, their width in bytes, who), in the order of the writes."""

    def note(self, buffer: Buffer, words: Any, width: int, who: Writer) -> None:
        """Words of `width` bytes of a buffer, each at most once, were written."""
        counts = self._counts.get(buffer.address)
        if counts is None:
            size = -(-len(buffer.bytes) // WIDEST) * WIDEST
            counts = self._counts[buffer.address] = np.zeros(size, np.uint8)
            self._log[buffer.address] = []
        rows = counts.reshape(-1, width)
        before = rows[words]
        rows[words] = before + (before < _MOST)
        self._log[buffer.address].append((words, width, who))

    def counts(self, address: int, like: NDArray[Any]) -> NDArray[np.uint8]:
        """How often each element of an array was written, shaped as the array; at most 255.

        address: of the buffer that the (contiguous) array is. Of an element's bytes the one that
        was written most often counts; one that was written in parts is written by each.
        """
        counts = self._counts.get(address)
        if counts is None:
            return np.zeros(like.shape, np.uint8)
        of_bytes = counts[: like.nbytes].reshape(*like.shape, like.itemsize)
        most: NDArray[np.uint8] = of_bytes.max(axis=-1)
        return most

    def writers(self, address: int, offset: int) -> Iterator[Writer]:
        """Who wrote a byte of the buffer at an address, in order."""
        for words, width, who in self._log.get(address, ()):
            if (np.asarray(words) == offset // width).any():
                yield who
