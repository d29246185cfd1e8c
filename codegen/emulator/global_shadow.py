# SPDX-License-Identifier: Apache-2.0
"""Data races on global memory: who touched each byte last, and whether that happened before.

Inside a cluster the clocks of `checks` say what happened before what. Clusters of a launch run in
no order: what one of them writes no other one may touch. Launches of one stream run one after the
other, a programmatic one from where it waits; those of two streams run in no order. Buffers that
cannot be written are not looked at.
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


class GlobalShadow:
    """The last write and the last read of each byte, by all clusters of all launches.

    `report(kind, message)` is told what is wrong. Of several reads only the last one is known: a
    write that races with an earlier one may go unseen.
    """

    def __init__(self, report: Callable[[Kind, str], None]) -> None:
        self._report = report
        self._launches: list[_Launch] = []
        self._cluster = 0
        self._components: Components | None = None
        self._accesses: list[_Access] = []
        """Number n of the arrays below is access n - 1; 0 is nobody's."""
        self._writes: dict[int, NDArray[np.int32]] = {}
        self._reads: dict[int, NDArray[np.int32]] = {}

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
    ) -> None:
        """Checks and notes a read."""
        if not place.buffer.writable:
            return
        if place.buffer.uninitialised:
            written = self._bytes(self._writes, place)[place.words] > 0
            if not written.all():
                self._report(
                    Kind.READ_BEFORE_WRITE,
                    f"{what} reads bytes of {place.buffer.name} that no launch wrote",
                )
        self._check(self._writes, place, clock, f"{what} reads", "writes")
        self._note(self._reads, place, component, epoch, line)

    def write(
        self,
        place: Place,
        component: int,
        epoch: int,
        clock: Clock,
        line: int,
        what: str,
    ) -> None:
        """Checks and notes a write."""
        self._check(self._writes, place, clock, f"{what} writes", "writes")
        self._check(self._reads, place, clock, f"{what} writes", "reads")
        self._note(self._writes, place, component, epoch, line)

    def _check(
        self,
        before: dict[int, NDArray[np.int32]],
        place: Place,
        clock: Clock,
        what: str,
        did: str,
    ) -> None:
        """What was done before to these bytes must have happened before."""
        if place.buffer.address not in before:
            return
        numbers = self._bytes(before, place)[place.words]
        if not numbers.any():
            return
        for number in np.unique(numbers[numbers > 0]).tolist():
            access = self._accesses[number - 1]
            whose = access.who
            launch = self._launches[-1]
            if access.launch is not launch:
                if self._is_over(access.launch.number, clock):
                    continue
                same_stream = access.launch.stream == launch.stream
                state = "that may still run" if same_stream else "on another stream"
                whose += f" of a launch {state}"
            elif access.cluster != self._cluster:
                whose += " of another cluster"
            elif clock[HAPPENED, access.component] >= access.epoch:
                continue
            self._report(
                Kind.RACE,
                f"{what} bytes of {place.buffer.name} that {whose} {did} "
                f"(line {access.line}) in no order",
            )

    def _is_over(self, number: int, clock: Clock) -> bool:
        """Whether who knows this knows that an earlier launch is over."""
        assert self._components is not None  # a cluster runs
        launch = self._launches[-1]
        waited = clock[HAPPENED, self._components.launches] > 0
        return number in launch.over or (bool(waited) and number in launch.awaited)

    def _note(
        self,
        arrays: dict[int, NDArray[np.int32]],
        place: Place,
        component: int,
        epoch: int,
        line: int,
    ) -> None:
        assert self._components is not None  # a cluster runs
        name = self._components.name(component)
        access = self._launches[-1], self._cluster, component, epoch, line, name
        self._accesses.append(_Access(*access))
        self._bytes(arrays, place)[place.words] = len(self._accesses)

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
