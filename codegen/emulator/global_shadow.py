# SPDX-License-Identifier: Apache-2.0
"""Data races on global memory: who touched each byte last, and whether that happened before.

Inside a cluster the clocks of `checks` say what happened before what. Clusters of a launch run in
no order: what one of them writes no other one may touch. Launches of one stream run one after the
other, a programmatic one from where it waits; those of two streams run in no order. Buffers that
cannot be written are not looked at.

Strong accesses (`red`, `atom`, `ld` and `st` with a scope, bulk reductions) may meet each other in
no order; a weak one, which `ld` and `st` are without, may meet neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import HAPPENED, Clock, Components
from .memory import Buffer
from .report import Kind

WIDEST = 32  # [bytes] of one access by one lane


@dataclass(frozen=True)
class Place:
    """Bytes of a buffer: those of its words of `width` bytes that `words` numbers."""

    buffer: Buffer
    words: Any
    width: int


@dataclass
class _Launch:
    """A launch, by its number. over: the launches that are over when it starts; awaited: those that
    are once it has waited, which some thread of it does or not.
    """

    number: int
    stream: int
    over: frozenset[int]
    awaited: frozenset[int] = frozenset()
    waits: bool = False


@dataclass(frozen=True)
class _Access:
    launch: _Launch
    cluster: int
    component: int
    epoch: int
    line: int
    who: str
    did: str
    """What it does to bytes, as messages say it."""
    strong: bool


class GlobalShadow:
    """The last write and the last read of each byte, by all clusters of all launches.

    `report(kind, message)` is told what is wrong. Of reads and of reductions all are known that are
    in no order: who overwrites what was read, or reads a sum, has to know of each.
    """

    def __init__(self, report: Callable[[Kind, str], None]) -> None:
        self._report = report
        self._launches: list[_Launch] = []
        self._cluster = 0
        self._components: Components | None = None
        self._accesses: list[tuple[_Access, ...]] = []
        """Number n of the arrays below is entry n - 1; 0 is nobody's."""
        self._writes: dict[int, NDArray[np.int32]] = {}
        """By the buffer's address: of each byte the last write, or the reductions since."""
        self._reads: dict[int, NDArray[np.int32]] = {}
        self._strong_reads: dict[int, NDArray[np.int32]] = {}

    def launch(self, stream: int, programmatic: bool) -> None:
        """Accesses of another launch follow.

        stream: a raw handle. programmatic: whether it may start before the one before it is over.
        """
        number = len(self._launches)
        earlier = [each for each in self._launches if each.stream == stream]
        launch = _Launch(number, stream, frozenset(each.number for each in earlier))
        if programmatic and earlier:
            last = earlier[-1]
            launch.over = last.over
            launch.awaited = last.over | {last.number}
            if last.waits:  # else it may have ended before those did
                launch.awaited |= last.awaited
        self._launches.append(launch)

    def wait(self) -> None:
        """A thread waits for what the launch may have overtaken."""
        self._launches[-1].waits = True

    def begin(self, components: Components) -> None:
        """Another cluster's accesses follow."""
        self._cluster += 1
        self._components = components

    def read(
        self,
        place: Place,
        component: int,
        epoch: int,
        clock: Clock,
        line: int,
        what: str,
        *,
        strong: bool = False,
    ) -> None:
        """Checks and notes a read."""
        if not place.buffer.writable:
            return
        self._check_written(place, f"{what} reads")
        self._check(self._writes, place, clock, f"{what} reads", strong)
        notes = self._strong_reads if strong else self._reads
        access = self._access(component, epoch, line, "reads", strong)
        self._note_beside(notes, place, access, clock)

    def write(
        self,
        place: Place,
        component: int,
        epoch: int,
        clock: Clock,
        line: int,
        what: str,
        *,
        strong: bool = False,
    ) -> None:
        """Checks and notes a write."""
        for before in (self._writes, self._reads, self._strong_reads):
            self._check(before, place, clock, f"{what} writes", strong)
        access = self._access(component, epoch, line, "writes", strong)
        if strong:
            self._note_beside(self._writes, place, access, clock)
        else:
            self._bytes(self._writes, place)[place.words] = self._number((access,))

    def reduce(
        self,
        place: Place,
        component: int,
        epoch: int,
        clock: Clock,
        line: int,
        what: str,
    ) -> None:
        """Checks and notes an atomic read, addition and write."""
        self._check_written(place, f"{what} adds to")
        for before in (self._writes, self._reads):
            self._check(before, place, clock, f"{what} adds to", True)
        access = self._access(component, epoch, line, "adds to", True)
        self._note_beside(self._writes, place, access, clock)

    def _note_beside(
        self,
        notes: dict[int, NDArray[np.int32]],
        place: Place,
        access: _Access,
        clock: Clock,
    ) -> None:
        """Notes a read, or a strong write, beside those of which it does not know.

        Who must know of all has to know of these, and of this one, which knows of the others. A
        weak write stays: who is strong need not know of this one, but of that.
        """
        noted = self._bytes(notes, place)
        numbers = noted[place.words]
        for number in np.unique(numbers).tolist():
            known = self._accesses[number - 1] if number else ()
            others = (
                each
                for each in known
                if self._unordered(each, clock)
                or (notes is self._writes and not each.strong)
            )
            numbers[numbers == number] = self._number((*others, access))
        noted[place.words] = numbers

    def _check_written(self, place: Place, what: str) -> None:
        """What is read of a buffer without content a kernel must have written."""
        if not place.buffer.uninitialised:
            return
        if not (self._bytes(self._writes, place)[place.words] > 0).all():
            self._report(
                Kind.READ_BEFORE_WRITE,
                f"{what} bytes of {place.buffer.name} that no launch wrote",
            )

    def _check(
        self,
        before: dict[int, NDArray[np.int32]],
        place: Place,
        clock: Clock,
        what: str,
        strong: bool,
    ) -> None:
        """What was done before to these bytes must have happened before."""
        if place.buffer.address not in before:
            return
        numbers = self._bytes(before, place)[place.words]
        if not numbers.any():
            return
        for number in np.unique(numbers[numbers > 0]).tolist():
            for access in self._accesses[number - 1]:
                if strong and access.strong:
                    continue
                if whose := self._unordered(access, clock):
                    self._report(
                        Kind.RACE,
                        f"{what} bytes of {place.buffer.name} that {whose} {access.did} "
                        f"(line {access.line}) in no order",
                    )

    def _unordered(self, access: _Access, clock: Clock) -> str:
        """Whose access it is, when who knows this does not know of it; else empty."""
        launch = self._launches[-1]
        if access.launch is not launch:
            if self._is_over(access.launch.number, clock):
                return ""
            same_stream = access.launch.stream == launch.stream
            state = "that may still run" if same_stream else "on another stream"
            return f"{access.who} of a launch {state}"
        if access.cluster != self._cluster:
            return f"{access.who} of another cluster"
        known = clock[HAPPENED, access.component] >= access.epoch
        return "" if known else access.who

    def _is_over(self, number: int, clock: Clock) -> bool:
        """Whether who knows this knows that an earlier launch is over."""
        assert self._components is not None  # a cluster runs
        launch = self._launches[-1]
        waited = clock[HAPPENED, self._components.launches] > 0
        return number in launch.over or (bool(waited) and number in launch.awaited)

    def _access(
        self, component: int, epoch: int, line: int, did: str, strong: bool
    ) -> _Access:
        assert self._components is not None  # a cluster runs
        return _Access(
            *(self._launches[-1], self._cluster, component, epoch, line),
            *(self._components.name(component), did, strong),
        )

    def _number(self, accesses: tuple[_Access, ...]) -> int:
        """What stands for these accesses in the arrays."""
        self._accesses.append(accesses)
        return len(self._accesses)

    def _bytes(
        self, arrays: dict[int, NDArray[np.int32]], place: Place
    ) -> NDArray[np.int32]:
        """An array's entries of a buffer, one row for each word."""
        buffer = place.buffer
        entries = arrays.get(buffer.address)
        if entries is None:
            size = -(-len(buffer.bytes) // WIDEST) * WIDEST
            entries = arrays[buffer.address] = np.zeros(size, np.int32)
        return entries.reshape(-1, place.width)
