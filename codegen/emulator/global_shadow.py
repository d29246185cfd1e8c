# SPDX-License-Identifier: Apache-2.0
"""Data races on global memory: who touched each byte last, and whether that happened before.

Inside a cluster the clocks of `checks` say what happened before what. Clusters of a launch run in
no order but what they hand over (see `knowledge`): what one of them writes no other one may touch
that does not know of it. Launches of one stream run one after the
other, a programmatic one from where it waits; those of two streams run in no order. Buffers that
cannot be written are not looked at.

Strong accesses (`red`, `atom`, `ld` and `st` with a scope, bulk reductions) may meet each other in
no order; a weak one, which `ld` and `st` are without, may meet neither. Where sums are said to be
ordered two additions of floats may not either: their order rounds the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .checks import GLOBAL, HAPPENED, Clock, Components
from .knowledge import NOTHING, Knowledge, Known
from .memory import Buffer
from .report import Kind

WIDEST = 32  # [bytes] of one access by one lane


@dataclass(frozen=True)
class Place:
    """Bytes of a buffer: those of its words of `width` bytes that `words` numbers."""

    buffer: Buffer
    words: Any
    width: int


class Accessor(NamedTuple):
    """Who accesses bytes, of the cluster that runs: a component of its clock, which is in an epoch;
    what it knows. line: of the instruction; what: what messages call that.
    """

    component: int
    epoch: int
    clock: Clock
    line: int
    what: str


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
    generic: bool
    """Whether lanes do it, and not a copy."""
    rounds: bool
    """Whether it adds floats."""


class GlobalShadow:
    """The last write and the last read of each byte, by all clusters of all launches.

    `report(kind, message)` is told what is wrong; `ordered_sums`: additions of floats in no order
    are. Of reads and of reductions all are known that are
    in no order: who overwrites what was read, or reads a sum, has to know of each.
    """

    def __init__(
        self, report: Callable[[Kind, str], None], *, ordered_sums: bool = False
    ) -> None:
        self._report = report
        self._ordered_sums = ordered_sums
        self.knowledge = Knowledge()
        self._launches: list[_Launch] = []
        self._cluster = self._clusters = 0
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

    def begin(self, components: Components) -> int:
        """Another cluster's accesses follow; its number."""
        self._clusters += 1
        self.enter(self._clusters, components)
        return self._clusters

    def enter(self, cluster: int, components: Components) -> None:
        """The accesses of a cluster follow that has begun."""
        self._cluster = cluster
        self._components = components

    def read(self, place: Place, by: Accessor) -> None:
        """Checks and notes a read."""
        self._read(place, by, False)

    def read_strongly(self, place: Place, by: Accessor) -> None:
        """The same of a read that may meet strong writes."""
        self._read(place, by, True)

    def _read(self, place: Place, by: Accessor, strong: bool) -> None:
        if not place.buffer.writable:
            return
        self._check_written(place, f"{by.what} reads")
        access = self._access(by, "reads", strong)
        self._check(self._writes, place, by.clock, f"{by.what} reads", access)
        notes = self._strong_reads if strong else self._reads
        self._note_beside(notes, place, access, by.clock)

    def write(self, place: Place, by: Accessor) -> None:
        """Checks and notes a write."""
        access = self._access(by, "writes", False)
        for before in (self._writes, self._reads, self._strong_reads):
            self._check(before, place, by.clock, f"{by.what} writes", access)
        self._bytes(self._writes, place)[place.words] = self._number((access,))

    def write_strongly(self, place: Place, by: Accessor) -> None:
        """The same of a write that may meet strong accesses."""
        access = self._access(by, "writes", True)
        for before in (self._writes, self._reads):
            self._check(before, place, by.clock, f"{by.what} writes", access)
        self._note_beside(self._writes, place, access, by.clock)

    def reduce(self, place: Place, by: Accessor, rounds: bool = True) -> None:
        """Checks and notes an atomic read, addition and write; rounds: of floats."""
        self._check_written(place, f"{by.what} adds to")
        access = self._access(by, "adds to", True, rounds)
        if rounds and self._ordered_sums and _repeats(place.words):
            told = f"bytes of {place.buffer.name} by several lanes, in no order"
            self._report(Kind.SUM_ORDER, f"{by.what} adds to {told}")
        for before in (self._writes, self._reads):
            self._check(before, place, by.clock, f"{by.what} adds to", access)
        self._note_beside(self._writes, place, access, by.clock)

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
        access: _Access,
    ) -> None:
        """What was done before to these bytes must have happened before this access.

        And be fenced, if it wrote, and lanes did and a copy does this.
        """
        if place.buffer.address not in before:
            return
        numbers = self._bytes(before, place)[place.words]
        if not numbers.any():
            return
        for number in np.unique(numbers[numbers > 0]).tolist():
            for other in self._accesses[number - 1]:
                whose = self._unordered(other, clock)
                kind, why = Kind.RACE, "in no order"
                if not whose and self._lacks_fence(other, access, clock):
                    kind, why = Kind.PROXY_FENCE, "with no fence.proxy.async in between"
                elif whose and self._ordered_sums and access.rounds and other.rounds:
                    kind = Kind.SUM_ORDER
                elif not whose or (access.strong and other.strong):
                    continue
                told = f"{whose or other.who} {other.did} (line {other.line}) {why}"
                self._report(kind, f"{what} bytes of {place.buffer.name} that {told}")

    def _lacks_fence(self, before: _Access, access: _Access, clock: Clock) -> bool:
        """Whether a copy touches what was written before it knew, but before no fence.

        What a copy of the same cluster wrote needs none: who waited for that issues this.
        """
        if (
            access.generic
            or before.did == "reads"
            or before.launch is not access.launch
        ):
            return False
        if before.cluster == access.cluster:
            fenced = clock[GLOBAL, before.component] if len(clock) > GLOBAL else 0
            return before.generic and bool(fenced < before.epoch)
        handed, fenced_here = self._others(clock, HAPPENED), self._others(clock, GLOBAL)
        return not (
            _knows(fenced_here, before, HAPPENED) or _knows(handed, before, GLOBAL)
        )

    def _unordered(self, access: _Access, clock: Clock) -> str:
        """Whose access it is, when who knows this does not know of it; else empty."""
        launch = self._launches[-1]
        if access.cluster != self._cluster and _knows(
            self._others(clock, HAPPENED), access, HAPPENED
        ):
            return ""
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

    def _others(self, clock: Clock, row: int) -> Known:
        """What who knows this knows of other clusters, or has fenced: HAPPENED or GLOBAL."""
        assert self._components is not None  # a cluster runs
        if len(clock) <= row:
            return NOTHING
        return self.knowledge.of(self._cluster, self._components, clock[row:])

    def _is_over(self, number: int, clock: Clock) -> bool:
        """Whether who knows this knows that an earlier launch is over."""
        assert self._components is not None  # a cluster runs
        launch = self._launches[-1]
        waited = clock[HAPPENED, self._components.launches] > 0
        return number in launch.over or (bool(waited) and number in launch.awaited)

    def _access(
        self, by: Accessor, did: str, strong: bool, rounds: bool = False
    ) -> _Access:
        assert self._components is not None  # a cluster runs
        return _Access(
            *(self._launches[-1], self._cluster, by.component, by.epoch, by.line),
            *(self._components.name(by.component), did, strong),
            generic=bool(self._components.is_generic(by.component)),
            rounds=rounds,
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


def _repeats(words: Any) -> bool:
    """Whether a word is named twice, of those that lanes number."""
    return isinstance(words, np.ndarray) and len(np.unique(words)) < words.size


def _knows(others: Known, access: _Access, row: int) -> bool:
    """Whether what is known of other clusters has an access of one of them in a row."""
    known = others.get(access.cluster)
    return known is not None and bool(known[row, access.component] >= access.epoch)
