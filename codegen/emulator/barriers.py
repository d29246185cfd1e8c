# SPDX-License-Identifier: Apache-2.0
"""mbarriers, named barriers and the cluster barrier: who arrived and what that releases.

Each barrier carries the clock (see `checks`) of everybody who arrived; who passes it acquires that.
Misuse raises Fault: there is no right way to go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .checks import Clock, join
from .lanes import WARP
from .report import Fault, Kind

NAMED_BARRIERS = 16  # of a CTA
LARGEST_COUNT = (1 << 20) - 1
"""Of pending arrivals, and of transactions in either direction."""


@dataclass(eq=False)
class MBarrier:
    """An mbarrier object in shared memory."""

    count: int
    initialiser: int
    """Clock component of the warp, or of the one lane, that initialised it."""
    initialised: int
    """Its epoch then."""
    component: int
    """Clock component of the loads that complete here."""
    name: str = "mbarrier"
    pending: int = 0
    transactions: int = 0
    """[bytes expected and not yet complete; negative while completions run ahead]"""
    phase: int = 0
    """Parity of the phase that is not complete yet."""
    clock: Clock | None = None
    released: Clock | None = None
    """What a waiter acquires: the clock when the last phase completed."""
    known: set[tuple[int, bytes]] = field(default_factory=set)
    """Who may use it from now on, as its initialisation is visible there: see MBarriers.find."""
    last_signals: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Clock component of each that signals it from outside the CTA's lanes (warps of other CTAs,
    copies), to the epoch and PTX line of the last signal: it must happen before the CTA exits."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= LARGEST_COUNT:
            raise Fault(
                Kind.BARRIER, f"{self.name} initialised with a count of {self.count}"
            )
        self.pending = self.count

    def arrive(self, count: int, transactions: int, clock: Clock | None) -> None:
        """Expects `transactions` more bytes, then arrives `count` times."""
        self.transactions += transactions
        self.pending -= count
        if self.pending < 0:
            raise Fault(
                Kind.BARRIER,
                f"{self.name} over-arrived: {-self.pending} arrivals more than its count of "
                f"{self.count} in one phase",
            )
        self._update(clock)

    def complete(self, nbytes: int, clock: Clock | None) -> None:
        """`nbytes` of an asynchronous copy have arrived."""
        self.transactions -= nbytes
        self._update(clock)

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is complete."""
        return self.phase != parity

    def _update(self, clock: Clock | None) -> None:
        if abs(self.transactions) > LARGEST_COUNT:
            raise Fault(
                Kind.BARRIER,
                f"{self.name}: transaction count of {self.transactions} bytes",
            )
        self.clock = join(self.clock, clock)
        if self.pending == 0 and self.transactions == 0:
            self.phase ^= 1
            self.pending = self.count
            self.released = self.clock


@dataclass(eq=False)
class NamedBarrier:
    """A barrier of `bar` and `barrier`: warps arrive whole, a warp may arrive more than once."""

    name: str
    expected: int = 0
    """[threads]"""
    generation: int = 0
    """How often it completed."""
    arrived: int = 0
    """[threads] of this generation."""
    awaited: bool = False
    """Whether one of them waits."""
    clock: Clock | None = None
    released: Clock | None = None

    def arrive(self, threads: int, clock: Clock | None, *, waits: bool) -> int:
        """One warp arrives at a barrier of `threads`; returns the generation it belongs to.

        waits: whether it stays until the barrier opens. One that opens for nobody has lost a wait:
        its arrivals were meant for warps that did not come.
        """
        if threads <= 0 or threads % WARP:
            raise Fault(Kind.BARRIER, f"{self.name} of {threads} threads")
        if not self.arrived:
            self.expected = threads
        elif self.expected != threads:
            raise Fault(
                Kind.BARRIER,
                f"{self.name} of {self.expected} threads met one of {threads}",
            )
        self.arrived += WARP
        self.awaited |= waits
        self.clock = join(self.clock, clock)
        generation = self.generation
        if self.arrived == self.expected:
            if not self.awaited:
                raise Fault(
                    Kind.BARRIER,
                    f"{self.name} of {threads} threads opens by arrivals alone, "
                    "nobody waits for it",
                )
            self.generation += 1
            self.arrived = 0
            self.awaited = False
            self.released, self.clock = self.clock, None
        return generation

    def state(self) -> str:
        """Who is there, for those who wait for the others."""
        return f"{self.name} ({self.arrived} of {self.expected} threads are there)"


@dataclass(eq=False)
class ClusterBarrier:
    """The barrier of all warps of a cluster; warps that exited count as arrived."""

    warps: int
    generation: int = 0
    arrived: set[int] = field(default_factory=set)
    exited: set[int] = field(default_factory=set)
    clock: Clock | None = None
    released: Clock | None = None

    def arrive(self, warp: int, clock: Clock | None) -> int:
        """One warp arrives; returns the generation that it belongs to."""
        if warp in self.arrived:
            raise Fault(
                Kind.BARRIER,
                "warp arrives twice at the cluster barrier before it opens",
            )
        self.arrived.add(warp)
        self.clock = join(self.clock, clock)
        generation = self.generation
        self._update()
        return generation

    def exit(self, warp: int) -> None:
        """One warp will never come again."""
        self.exited.add(warp)
        if self.arrived:
            self._update()

    def _update(self) -> None:
        if len(self.arrived | self.exited) == self.warps:
            self.generation += 1
            self.arrived.clear()
            self.released, self.clock = self.clock, None

    def state(self) -> str:
        """Who is there, for those who wait for the others."""
        return (
            f"the cluster barrier ({len(self.arrived)} of {self.warps} warps are there)"
        )
