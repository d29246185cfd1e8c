# SPDX-License-Identifier: Apache-2.0
"""Data races and missing proxy fences by happens-before, in shared and in tensor memory.

Agents are warps: lanes of one warp are ordered by their program. The vector clocks have components
for what each warp's lanes do (the generic proxy), for each warp's bulk stores, for each warpgroup's
or (tcgen05) each warp's matrix products, for each warp's tcgen05.ld and its tcgen05.st, and for the
loads that complete on each mbarrier. A clock has three rows, `[3, components]`:

- HAPPENED: everything of that component up to the epoch happened before;
- FENCED: generic writes of that component up to the epoch are visible to the asynchronous proxy,
  because a `fence.proxy.async` lies on the way here (of the writer or of anyone after it);
- PUBLISHED: mbarrier initialisations up to the epoch are visible (`fence.mbarrier_init`).

An arrival releases the warp's clock, a successful wait acquires what was released. A copy or
product starts with its issuer's clock; who waits for it acquires its component's epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .report import Kind

Clock = NDArray[np.int64]
HAPPENED, FENCED, PUBLISHED = range(3)

GRANULE = 4  # [bytes]
NOBODY = -1


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
    for what they load from tensor memory and store there.
    """

    def __init__(
        self, warps: int, groups: int, ctas: int, *, tensor: bool = False
    ) -> None:
        self.warps = warps
        self.ctas = ctas
        self._tensor = tensor
        self._issuers = warps if tensor else groups
        accesses = warps if tensor else 0
        self._tensor_loads = 2 * warps + self._issuers
        self._tensor_stores = self._tensor_loads + accesses
        self._loads = self._tensor_stores + accesses
        self.shared_readers = slice(0, self._tensor_loads)
        """Components that read shared memory."""
        self.tensor_readers = slice(2 * warps, self._tensor_stores)
        """Components that read tensor memory."""
        self.count = self._loads + LOADS * ctas
        self._mbarriers = 0

    def stores(self, warp: int) -> int:
        """The component of a warp's bulk stores."""
        return self.warps + warp

    def products(self, issuer: int) -> int:
        """The component of the matrix products of a warpgroup, or of a warp for tcgen05."""
        return 2 * self.warps + issuer

    def tensor_loads(self, warp: int) -> int:
        """The component of a warp's tcgen05.ld."""
        return self._tensor_loads + warp

    def tensor_stores(self, warp: int) -> int:
        """The component of a warp's tcgen05.st."""
        return self._tensor_stores + warp

    def loads(self) -> int:
        """The component of the loads that complete on an mbarrier: a new one for each mbarrier.

        Loads complete in any order; those of one mbarrier are waited for together.
        """
        self._mbarriers += 1
        return self._loads + (self._mbarriers - 1) % (LOADS * self.ctas)

    def is_generic(self, component: Any) -> Any:
        """Whether a component (or each of an array) is what lanes do."""
        return component < self.warps

    def is_product(self, component: int) -> bool:
        """Whether a component is somebody's matrix products."""
        return 2 * self.warps <= component < self._tensor_loads

    def name(self, component: int) -> str:
        """Who a component is, for messages."""
        if component >= self._loads:
            return "a TMA load"
        if self.is_product(component) and not self._tensor:
            number = component - 2 * self.warps
            cta, group = divmod(number, self._issuers // self.ctas)
            return f"cta {cta} warpgroup {group}'s wgmma"
        cta, warp = divmod(component % self.warps, self.warps // self.ctas)
        return f"cta {cta} warp {warp}" + _ACTIONS[component // self.warps]


_ACTIONS = ("", "'s TMA store", "'s tcgen05.mma", "'s tcgen05.ld", "'s tcgen05.st")
"""What a warp does, in the order of its components."""


class Agent:
    """What one warp knows."""

    def __init__(self, components: Components, warp: int) -> None:
        self.warp = warp
        self.clock: Clock = np.zeros((3, components.count), np.int64)
        self.clock[HAPPENED, warp] = 1

    @property
    def epoch(self) -> int:
        """Where the warp is in its own component."""
        return int(self.clock[HAPPENED, self.warp])

    def advance(self) -> None:
        """What the warp does from here on was not released yet."""
        self.clock[HAPPENED, self.warp] += 1

    def release(self) -> Clock:
        """The clock to hand to others."""
        clock: Clock = self.clock.copy()
        self.advance()
        return clock

    def release_published(self) -> Clock:
        """What a relaxed arrival hands over: only the published initialisations."""
        clock = np.zeros_like(self.clock)
        clock[PUBLISHED] = self.clock[PUBLISHED]
        return clock

    def acquire(self, clock: Clock | None) -> None:
        """Learns what was released."""
        if clock is not None:
            np.maximum(self.clock, clock, out=self.clock)

    def learn(self, component: int, epoch: int) -> None:
        """Knows that a component has done all up to this epoch."""
        self.clock[HAPPENED, component] = max(self.clock[HAPPENED, component], epoch)

    def fence_async(self) -> None:
        """All that happened before is visible to the asynchronous proxy from here on."""
        np.maximum(self.clock[FENCED], self.clock[HAPPENED], out=self.clock[FENCED])
        self.advance()

    def fence_initialisations(self) -> None:
        """The warp's mbarrier initialisations are visible to whom it signals from here on."""
        self.clock[PUBLISHED, self.warp] = self.clock[HAPPENED, self.warp]
        self.advance()

    def knows_initialisation(self, warp: int, epoch: int) -> bool:
        """Whether an mbarrier that a warp initialised at its epoch can be used."""
        return bool(
            max(self.clock[HAPPENED, warp], self.clock[PUBLISHED, warp]) >= epoch
        )

    def copies_know_initialisation(self, warp: int, epoch: int) -> bool:
        """The same for a copy, which is of the asynchronous proxy and needs a fence."""
        return bool(max(self.clock[FENCED, warp], self.clock[PUBLISHED, warp]) >= epoch)


class Streams:
    """Starts the asynchronous operations of a cluster: each component counts its own."""

    def __init__(self, components: Components) -> None:
        self._epochs = np.zeros(components.count, np.int64)

    def last(self, component: int) -> int:
        """The epoch of the component's last operation."""
        return int(self._epochs[component])

    def count(self, component: int) -> int:
        """The epoch of an operation that starts now."""
        self._epochs[component] += 1
        return int(self._epochs[component])

    def start(self, component: int, agents: list[Agent], line: int) -> Operation:
        """An operation that these warps issue together."""
        epoch = self.count(component)
        clock = agents[0].release()
        for agent in agents[1:]:
            np.maximum(clock, agent.release(), out=clock)
        clock[HAPPENED, component] = epoch
        return Operation(component, epoch, clock, line)


Granules = Any
"""An index of granules: a slice or an int array."""


class Shadow:
    """Who touched each granule of a CTA's memory last.

    Shared memory unless told otherwise: `space` is its name, `readers` the components that may read
    it. `report(kind, message)` is told what is wrong.
    """

    def __init__(
        self,
        granules: int,
        components: Components,
        report: Callable[[Kind, str], None],
        *,
        space: str = "shared memory",
        readers: slice | None = None,
    ) -> None:
        self._components = components
        self._report = report
        self._space = space
        self._readers = readers or components.shared_readers
        self._writer = np.full(granules, NOBODY, np.int16)
        self._written = np.zeros(granules, np.int32)
        self._line = np.zeros(granules, np.int32)
        # Reads stay when a write follows: what is ordered after the write is ordered after them.
        rows = self._readers.stop - self._readers.start
        self._read = np.zeros((rows, granules), np.int32)
        self._seen: set[int] = set()
        """Readers that ever read: few of those there are."""

    def read(
        self, granules: Granules, component: int, epoch: int, clock: Clock, what: str
    ) -> None:
        """Checks and notes a read."""
        writer = self._writer[granules]
        if (writer == NOBODY).any():
            self._report(
                Kind.READ_BEFORE_WRITE, f"{what} reads {self._space} that nobody wrote"
            )
        self._check_writes(granules, writer, component, clock, f"{what} reads")
        self._read[component - self._readers.start, granules] = epoch
        self._seen.add(component)

    def write(
        self,
        granules: Granules,
        component: int,
        epoch: int,
        clock: Clock,
        line: int,
        what: str,
    ) -> None:
        """Checks and notes a write."""
        self._check_writes(
            granules, self._writer[granules], component, clock, f"{what} writes"
        )
        for reader in sorted(self._seen):
            read = self._read[reader - self._readers.start, granules]
            if (read > clock[HAPPENED, reader]).any():
                self._report(
                    Kind.RACE,
                    f"{what} writes {self._space} that {self._components.name(reader)} may still "
                    "be reading",
                )
                break
        self._writer[granules] = component
        self._written[granules] = epoch
        self._line[granules] = line

    def forget(self, granules: Granules) -> None:
        """Starts anew: nobody has touched this memory."""
        self._writer[granules] = NOBODY
        self._written[granules] = 0
        self._read[:, granules] = 0

    def _check_writes(
        self, granules: Granules, writer: Any, component: int, clock: Clock, what: str
    ) -> None:
        """A write must have happened before, and be fenced if it was generic and this is not."""
        written = self._written[granules]
        # Nobody (-1) reads the last component's clock; its epoch 0 is below every clock.
        unordered = clock[HAPPENED, writer] < written
        if unordered.any():
            who, line = self._culprit(granules, writer, unordered)
            self._report(
                Kind.RACE,
                f"{what} {self._space} that {who} writes (line {line}) in no order",
            )
        elif not self._components.is_generic(component):
            unfenced = self._components.is_generic(writer) & (
                clock[FENCED, writer] < written
            )
            if unfenced.any():
                who, line = self._culprit(granules, writer, unfenced)
                self._report(
                    Kind.PROXY_FENCE,
                    f"{what} {self._space} that {who} wrote (line {line}) with no "
                    "fence.proxy.async in between",
                )

    def _culprit(self, granules: Granules, writer: Any, wrong: Any) -> tuple[str, int]:
        first = int(np.argmax(wrong))
        who = self._components.name(int(writer[first]))
        return who, int(self._line[granules][first])


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
