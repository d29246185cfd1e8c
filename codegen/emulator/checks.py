# SPDX-License-Identifier: Apache-2.0
"""Data races and missing fences by happens-before, in shared and in tensor memory.

Agents are warps, whose lanes know of each other what `agents` says. The vector clocks have
components for what each warp's lanes do (the generic proxy) and for what one of them does alone,
for each warp's bulk stores, as they read and as they write, for each warpgroup's or (tcgen05) each
warp's matrix products, for each warp's tcgen05.ld and its tcgen05.st, for each warp's signals to
other CTAs, for the loads that complete on each mbarrier, and for what each warp has gained from
other clusters (see `knowledge`). A clock has these rows, `[rows, components]`, the last two only in
kernels that use tensor memory, and GLOBAL in these and where something orders global memory:

- HAPPENED: everything of that component up to the epoch happened before;
- FENCED: generic writes of that component up to the epoch are visible to the asynchronous proxy,
  because a `fence.proxy.async` lies on the way here (of the writer or of anyone after it);
- PUBLISHED: mbarrier initialisations up to the epoch are visible (`fence.mbarrier_init`);
- GLOBAL: as FENCED, for global memory, of which there are other fences;
- SENT: accesses to tensor memory up to the epoch come before what was signalled, because of a
  `tcgen05.fence::before_thread_sync` or a tcgen05.commit;
- SEEN: the thread's own accesses to tensor memory come after them, because of a
  `tcgen05.fence::after_thread_sync`. This row stays with the thread.

An arrival releases the clock of those that arrive, a successful wait acquires what was released. A
copy or product starts with its issuer's clock; who waits for it acquires its component's epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .report import Kind

if TYPE_CHECKING:
    from .agents import Agent, Some

Clock = NDArray[np.int64]
HAPPENED, FENCED, PUBLISHED, GLOBAL, SENT, SEEN = range(6)

GRANULE = 4  # [bytes]
NOBODY = -1
MIXED, EVERY = -1, -2
"""In place of a lane: more than one of which nothing is asked, and the whole warp."""


def join(first: Clock | None, second: Clock | None) -> Clock | None:
    """The clock of who knows both; None knows nothing."""
    if first is None or second is None:
        return second if first is None else first
    joined: Clock = np.maximum(first, second)
    return joined


@dataclass(frozen=True)
class Operation:
    """An asynchronous operation: its component, its place there, and what happened before it."""

    component: int
    epoch: int
    clock: Clock
    line: int


LOADS = 32
"""Components of a CTA's loads: one for each of its mbarriers. More of them share components, which
can only hide a race between two loads."""


class Components:
    """Numbers the components of a cluster's clocks; who writes and never reads comes last.

    `tensor`: the kernel has tcgen05 instructions. Then warps issue products, and have components
    for what they load from tensor memory and store there. `ordered`: it has instructions that order
    accesses to global memory.
    """

    def __init__(
        self,
        warps: int,
        groups: int,
        ctas: int,
        *,
        tensor: bool = False,
        ordered: bool = False,
    ) -> None:
        self.warps = warps
        self.ctas = ctas
        self._tensor = tensor
        self.rows = PUBLISHED + 1
        """Of a clock."""
        if tensor or ordered:
            self.rows = SEEN + 1 if tensor else GLOBAL + 1
        self._issuers = warps if tensor else groups
        accesses = warps if tensor else 0
        self._products = 3 * warps
        self._tensor_loads = self._products + self._issuers
        self._tensor_stores = self._tensor_loads + accesses
        self._signals = self._tensor_stores + accesses
        self._writes = self._signals + warps
        self._loads = self._writes + warps
        self.generic = slice(0, 2 * warps)
        """Components of what lanes do."""
        self.shared_readers = slice(0, self._tensor_loads)
        """Components that read shared memory."""
        self.tensor_readers = slice(self._products, self._tensor_stores)
        """Components that read tensor memory."""
        self.launches = self._loads + LOADS * ctas
        """Component of the launches that griddepcontrol.wait waits for: over at epoch 1."""
        self.gains = slice(self.launches + 1, self.launches + 1 + ordered * warps)
        """Components of what each warp has gained."""
        self.count = self.gains.stop
        self._mbarriers = 0

    def alone(self, warp: int) -> int:
        """The component of what one lane of a warp does alone."""
        return self.warps + warp

    def stores(self, warp: int) -> int:
        """The component of a warp's bulk stores."""
        return 2 * self.warps + warp

    def writes(self, warp: int) -> int:
        """The component of what a warp's bulk stores do to global memory, after they have read."""
        return self._writes + warp

    def products(self, issuer: int) -> int:
        """The component of the matrix products of a warpgroup, or of a warp for tcgen05."""
        return self._products + issuer

    def tensor_loads(self, warp: int) -> int:
        """The component of a warp's tcgen05.ld."""
        return self._tensor_loads + warp

    def tensor_stores(self, warp: int) -> int:
        """The component of a warp's tcgen05.st."""
        return self._tensor_stores + warp

    def own_tensor(self, warp: int) -> list[int]:
        """The components of what a warp loads from tensor memory and stores there."""
        if not self._tensor:
            return []
        return [self.tensor_loads(warp), self.tensor_stores(warp)]

    def signals(self, warp: int) -> int:
        """The component of a warp's arrivals at mbarriers of other CTAs."""
        return self._signals + warp

    def loads(self) -> int:
        """The component of the loads that complete on an mbarrier: a new one for each mbarrier.

        Loads complete in any order; those of one mbarrier are waited for together.
        """
        self._mbarriers += 1
        return self._loads + (self._mbarriers - 1) % (LOADS * self.ctas)

    def is_generic(self, component: Any) -> Any:
        """Whether a component (or each of an array) is what lanes do."""
        return component < 2 * self.warps

    def is_product(self, component: int) -> bool:
        """Whether a component is somebody's matrix products."""
        return self._products <= component < self._tensor_loads

    def name(self, component: int) -> str:
        """Who a component is, for messages."""
        if component >= self._loads:
            return "a TMA load"
        if self.is_product(component) and not self._tensor:
            number = component - self._products
            cta, group = divmod(number, self._issuers // self.ctas)
            return f"cta {cta} warpgroup {group}'s wgmma"
        first, action = max(
            (first, action) for first, action in self._actions() if first <= component
        )
        cta, warp = divmod(component - first, self.warps // self.ctas)
        return f"cta {cta} warp {warp}{action}"

    def _actions(self) -> list[tuple[int, str]]:
        """What warps do: the first component of each, and its name after the warp's."""
        of_tensor = [
            (self._products, "'s tcgen05.mma"),
            (self._tensor_loads, "'s tcgen05.ld"),
            (self._tensor_stores, "'s tcgen05.st"),
        ]
        return [
            (0, ""),
            (self.warps, " (one lane)"),
            (2 * self.warps, "'s TMA store"),
            *(of_tensor if self._tensor else ()),  # else they have no components
            (self._signals, "'s arrival"),
            (self._writes, "'s TMA store"),
        ]


class Streams:
    """Starts the asynchronous operations of a cluster: each component counts its own."""

    def __init__(self, components: Components) -> None:
        self._components = components
        self._epochs = np.zeros(components.count, np.int64)

    def last(self, component: int) -> int:
        """The epoch of the component's last operation."""
        return int(self._epochs[component])

    def count(self, component: int) -> int:
        """The epoch of an operation that starts now."""
        self._epochs[component] += 1
        return int(self._epochs[component])

    def start(
        self, component: int, agents: list[Agent], line: int, lanes: Some = None
    ) -> Operation:
        """An operation that these warps, or these lanes of one warp, issue together."""
        epoch = self.count(component)
        clock = agents[0].issue(lanes)
        for agent in agents[1:]:
            np.maximum(clock, agent.issue(), out=clock)
        clock[HAPPENED, component] = epoch
        if self._components.rows > SEEN:
            clock[SEEN, component] = epoch  # what one warp issues is in order
        return Operation(component, epoch, clock, line)


Granules = Any
"""An index of granules: a slice, a tuple of them for memory of several axes, or an int array."""


def _rows(numbers: NDArray[Any], granules: Granules) -> Any:
    """An index of these rows and granules of an array [rows, *granules]."""
    if isinstance(granules, tuple):
        return numbers, *granules
    return (
        (numbers, granules)
        if isinstance(granules, slice)
        else (numbers[:, None], granules)
    )


class Shadow:
    """Who touched each granule of a CTA's memory last.

    `granules`: how many there are, along each axis. Shared memory unless told otherwise: `space` is
    its name, `readers` the components that may read it, `row` the one of a clock that has to know
    of an access, too, `tile` names what a granule belongs to. `report(kind, message)` is told what
    is wrong.
    """

    def __init__(
        self,
        granules: int | tuple[int, ...],
        components: Components,
        report: Callable[[Kind, str], None],
        *,
        space: str = "shared memory",
        readers: slice | None = None,
        row: int = HAPPENED,
        tile: Callable[[int], str] = lambda granule: "",
    ) -> None:
        self._tile = tile
        self._components = components
        self._row = row
        self._report = report
        self._space = space
        self._readers = readers or components.shared_readers
        self._writer = np.full(granules, NOBODY, np.int16)
        self._written = np.zeros(granules, np.int32)
        self._line = np.zeros(granules, np.int32)
        self._lane = np.full(granules, MIXED, np.int8)
        # Reads stay when a write follows: what is ordered after the write is ordered after them.
        rows = self._readers.stop - self._readers.start
        self._read = np.zeros((rows, *self._writer.shape), np.int32)
        # A clock that knows a component's last access anywhere knows all: then no granule is asked.
        self._last_read = np.zeros(rows, np.int64)
        self._last_written = np.zeros(components.count, np.int64)

    def read(
        self,
        granules: Granules,
        component: int,
        epoch: int,
        clock: Clock,
        what: str,
        *,
        reader: tuple[Agent, Any] | None = None,
    ) -> None:
        """Checks and notes a read; reader: the warp, and the lane that reads each granule."""
        writer = self._writer[granules]
        if (writer == NOBODY).any():
            place = self._place(granules, writer == NOBODY)
            self._report(
                Kind.READ_BEFORE_WRITE, f"{what} reads {place} that nobody wrote"
            )
        self._check_writes(granules, writer, component, clock, f"{what} reads")
        if reader is not None:
            self._check_lanes(granules, writer, *reader, f"{what} reads")
        number = component - self._readers.start
        self._read[number][granules] = epoch
        self._last_read[number] = max(int(self._last_read[number]), epoch)

    def write(
        self,
        granules: Granules,
        component: int,
        epoch: int,
        clock: Clock,
        line: int,
        what: str,
        *,
        lanes: Any = MIXED,
    ) -> None:
        """Checks and notes a write; lanes: the lane that writes each granule, or MIXED."""
        self._check_writes(
            granules, self._writer[granules], component, clock, f"{what} writes"
        )
        self._check_reads(granules, clock, what)
        self._writer[granules] = component
        self._written[granules] = epoch
        self._line[granules] = line
        self._lane[granules] = lanes
        self._last_written[component] = max(int(self._last_written[component]), epoch)

    def forget(self, granules: Granules) -> None:
        """Starts anew: nobody has touched this memory."""
        self._writer[granules] = NOBODY
        self._written[granules] = 0
        for read in self._read:
            read[granules] = 0

    def _check_reads(self, granules: Granules, clock: Clock, what: str) -> None:
        """What is overwritten must have been read before."""
        known = clock[:, self._readers]
        late = (self._last_read > known[HAPPENED]) | (
            self._last_read > known[self._row]
        )
        numbers = late.nonzero()[0]
        if not len(numbers):
            return
        read = self._read[_rows(numbers, granules)].reshape(len(numbers), -1)
        for row, kind in ((HAPPENED, Kind.RACE), (self._row, Kind.TCGEN05)):
            early = read > known[row, numbers, None]
            if not early.any():
                continue
            first = int(early.any(axis=1).argmax())
            reader = int(numbers[first]) + self._readers.start
            why = "may still be reading"
            if row != HAPPENED:
                why = f"read, {_unfenced(clock, reader, read[first])}"
            who = self._components.name(reader)
            place = self._place(granules, early[first])
            self._report(kind, f"{what} writes {place} that {who} {why}")
            return

    def _check_writes(
        self, granules: Granules, writer: Any, component: int, clock: Clock, what: str
    ) -> None:
        """A write must have happened before, and be fenced if it was generic and this is not."""
        asynchronous = self._row == HAPPENED and not self._components.is_generic(
            component
        )
        if self._knows_writes(clock, asynchronous):
            return
        written = self._written[granules]
        # Nobody (-1) reads the last component's clock; its epoch 0 is below every clock.
        unordered = clock[HAPPENED, writer] < written
        if unordered.any():
            who, line = self._culprit(granules, writer, unordered)
            place = self._place(granules, unordered)
            self._report(
                Kind.RACE,
                f"{what} {place} that {who} writes (line {line}) in no order",
            )
            return
        if self._row != HAPPENED:
            unseen = clock[self._row, writer] < written
            if unseen.any():
                who, line = self._culprit(granules, writer, unseen)
                place = self._place(granules, unseen)
                why = _unfenced(clock, writer, written)
                self._report(
                    Kind.TCGEN05,
                    f"{what} {place} that {who} wrote (line {line}), {why}",
                )
        elif asynchronous:
            unfenced = self._components.is_generic(writer) & (
                clock[FENCED, writer] < written
            )
            if unfenced.any():
                who, line = self._culprit(granules, writer, unfenced)
                place = self._place(granules, unfenced)
                self._report(
                    Kind.PROXY_FENCE,
                    f"{what} {place} that {who} wrote (line {line}) with no "
                    "fence.proxy.async in between",
                )

    def _knows_writes(self, clock: Clock, asynchronous: bool) -> bool:
        """Whether this clock knows, and has fenced, all that was ever written here."""
        last = self._last_written
        if (last > clock[HAPPENED]).any():
            return False
        if asynchronous:
            generic = self._components.generic
            return not (last[generic] > clock[FENCED, generic]).any()
        return self._row == HAPPENED or not (last > clock[self._row]).any()

    def _place(self, granules: Granules, wrong: Any) -> str:
        """The memory, and the tile in it that the first of these granules belongs to."""
        numbers = np.arange(self._writer.size).reshape(self._writer.shape)[granules]
        number = int(numbers.reshape(-1)[np.argmax(wrong)])
        return f"{self._space}{self._tile(number)}"

    def _check_lanes(
        self, granules: Granules, writer: Any, agent: Agent, lanes: Any, what: str
    ) -> None:
        """What another lane of the same warp wrote needs a meeting of both in between."""
        new = np.zeros(len(writer), np.bool_)
        for component, met in agent.meetings():
            new |= (writer == component) & (self._written[granules] > met)
        if not new.any():
            return
        wrote = self._lane[granules]
        wrong = new & (wrote != lanes) & (wrote != MIXED)
        if wrong.any():
            _, line = self._culprit(granules, writer, wrong)
            place = self._place(granules, wrong)
            self._report(
                Kind.RACE,
                f"{what} {place} that another lane of the warp wrote (line {line}) with "
                "no bar.warp.sync in between",
            )

    def _culprit(self, granules: Granules, writer: Any, wrong: Any) -> tuple[str, int]:
        first = int(np.argmax(wrong))
        who = self._components.name(int(writer.reshape(-1)[first]))
        return who, int(self._line[granules].reshape(-1)[first])


def _unfenced(clock: Clock, component: Any, epoch: Any) -> str:
    """Which fence of tensor memory lacks between an access and the one that has this clock."""
    if len(clock) <= SENT or (clock[SENT, component] < epoch).any():
        return "with no tcgen05.fence::before_thread_sync or commit after it"
    return "with no tcgen05.fence::after_thread_sync since"


def granules_of(addresses: Any, nbytes: int) -> Any:
    """The granules of accesses of `nbytes` at byte addresses, as a flat index."""
    first = np.asarray(addresses) // GRANULE
    count = max(1, nbytes // GRANULE)
    if count == 1:
        return first.reshape(-1)
    return (first[..., None] + np.arange(count)).reshape(-1)


def region(addresses: Any, nbytes: int) -> Granules:
    """The granules of scattered elements of `nbytes`; a slice when they fill a whole range."""
    low, high = int(addresses.min()), int(addresses.max()) + nbytes
    if high - low == addresses.size * nbytes:
        return slice(low // GRANULE, -(-high // GRANULE))
    return np.unique(addresses // GRANULE)
