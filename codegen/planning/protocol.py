# SPDX-License-Identifier: Apache-2.0
"""Who does what in which order: roles, their steps and barriers, and the loads of a cluster.

Blocks are numbered in the order they are taken: n is this one, n-1 the one before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

# What executes a step: TMA, the tensor cores, the threads themselves, or nothing: a mere wait.
Unit = Literal["tma", "mma", "math", "wait"]


@dataclass(frozen=True)
class Wait:
    """A barrier that a step waits for; `of` tells its uses apart: a half, a tensor, a warpgroup.

    earlier: what it waits for was signalled before this phase, in an earlier block or tile.
    arrivals: threads that arrive by waiting, at a barrier that counts those too.
    """

    barrier: str
    of: str = ""
    earlier: bool = False
    arrivals: int = 0

    @property
    def place(self) -> str:
        """The barrier, and which of its uses."""
        return _place(self.barrier, self.of)

    @property
    def label(self) -> str:
        """The place, and what arrives by waiting there."""
        return f"{self.place} +{self.arrivals}" if self.arrivals else self.place


@dataclass(frozen=True)
class Signal:
    """What a step does to a barrier once it is done.

    arrivals: of this role, in one CTA. tx_bytes: those that TMA writes meanwhile. ctas: how many
    CTAs arrive alike, or, of bytes, write a part each.
    """

    barrier: str
    arrivals: int
    of: str = ""
    tx_bytes: int = 0
    ctas: int = 1

    @property
    def place(self) -> str:
        """The barrier, and which of its uses."""
        return _place(self.barrier, self.of)

    @property
    def total(self) -> int:
        """Arrivals of all CTAs; bytes come without."""
        return self.arrivals if self.tx_bytes else self.arrivals * self.ctas

    @property
    def label(self) -> str:
        """The lines as one."""
        return (" with " if self.tx_bytes else " ").join(self.lines)

    @property
    def lines(self) -> tuple[str, ...]:
        """Where it arrives and how often; of how many CTAs; with how many bytes."""
        first = f"{self.place} +{self.arrivals}"
        if self.tx_bytes:
            of = f" of {self.ctas} CTAs" if self.ctas > 1 else ""
            return first, f"{self.tx_bytes} B{of}"
        return (first, f"x {self.ctas} CTAs") if self.ctas > 1 else (first,)


@dataclass(frozen=True)
class Step:
    """What a role does between waiting and signalling, in the order of the kernel.

    issues: the asynchronous work that it starts; a later step `retires` it. Both by name.
    """

    text: str
    unit: Unit
    waits: tuple[Wait, ...] = ()
    signals: tuple[Signal, ...] = ()
    issues: str = ""
    retires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lane:
    """The steps of one role: of its warps, each of whose threads has so many registers."""

    role: str
    warps: str
    registers: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Phase:
    """A part of the kernel that repeats: all roles, side by side."""

    title: str
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class Load:
    """What one CTA loads of a tile of Q, K or V, and which CTAs receive it.

    rows and columns: (first, count) inside the `tile`, which is (rows, columns) of all CTAs.
    """

    tensor: str
    cta: int
    tile: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]
    receivers: tuple[int, ...]
    nbytes: int

    @property
    def part(self) -> str:
        """What of the tile it is: its rows or its columns, or all of it."""
        if self.rows[1] < self.tile[0]:
            return f"rows {self.span}"
        if self.columns[1] < self.tile[1]:
            return f"columns {self.span}"
        return "its own tile" if self.tensor == "Q" else "the tile"

    @property
    def span(self) -> str:
        """The first and the last row, or the first and the last column where all rows are in it."""
        whole = self.rows[1] == self.tile[0]
        first, count = self.columns if whole else self.rows
        return f"{first}-{first + count - 1}"

    @property
    def words(self) -> str:
        """Who loads what for whom."""
        to = " and ".join(map(str, self.receivers))
        return f"CTA {self.cta} loads {self.tensor}, {self.part}, for CTA {to}"


def find_tile() -> Step:
    """A work tile of packed sequences; the stage was freed a ring before."""
    free = Wait("tile_empty", earlier=True)
    return Step("find a work tile", "math", (free,), (Signal("tile_full", 1),))


def take_tile(warps: int) -> Step:
    """The next work tile, found while this one was computed, is taken by so many warps."""
    ready, freed = Wait("tile_full", earlier=True), Signal("tile_empty", warps)
    return Step("take the next work tile", "wait", (ready,), (freed,))


def _place(barrier: str, of: str) -> str:
    return f"{barrier}[{of}]" if of else barrier


_Mark = TypeVar("_Mark", Wait, Signal)


@dataclass(frozen=True)
class Arrow:
    """A signal and what waits for it in the same phase; steps are (lane, step) by number."""

    signal: Signal
    source: tuple[int, int]
    wait: Wait
    target: tuple[int, int]


def arrows(phase: Phase) -> tuple[Arrow, ...]:
    """Pair each lane's signals at a barrier with each lane's waits there, in order.

    Signals that only an earlier or a later phase is about are in no arrow.
    """
    signals = [
        found
        for number, lane in enumerate(phase.lanes)
        for found in _counted(number, lane, lambda step: step.signals)
    ]
    return tuple(
        Arrow(signal, source, wait, target)
        for number, lane in enumerate(phase.lanes)
        for place, wait, target in _counted(number, lane, _waits_here)
        for signalled, signal, source in signals
        if place == signalled
    )


def _waits_here(step: Step) -> tuple[Wait, ...]:
    return tuple(wait for wait in step.waits if not wait.earlier)


def _counted(
    number: int, lane: Lane, marks: Callable[[Step], tuple[_Mark, ...]]
) -> Iterator[tuple[tuple[str, int], _Mark, tuple[int, int]]]:
    """Yield ((place, how often it came before in the lane), wait or signal, step)."""
    seen: Counter[str] = Counter()
    for index, step in enumerate(lane.steps):
        for mark in marks(step):
            yield (mark.place, seen[mark.place]), mark, (number, index)
            seen[mark.place] += 1
