# SPDX-License-Identifier: Apache-2.0
"""Barriers of threads as warps use them: the numbered ones of a CTA, and the cluster's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .barriers import NAMED_BARRIERS, NamedBarrier
from .lanes import WARP, Lanes, Mask, warps_of
from .report import Fault, Kind

if TYPE_CHECKING:
    from .warpgroup import Warpgroup


class ThreadBarriers:
    """What `bar` and `barrier` instructions do; generated code calls the public methods."""

    def __init__(self, group: Warpgroup) -> None:
        self._group = group

    def sync(
        self, index: int, number: Lanes, threads: Lanes | None, mask: Mask
    ) -> Mask | None:
        """Gate of bar.sync: each warp arrives once, then passes when the barrier opened."""
        warps = warps_of(mask)
        for warp in warps:
            state = self._group.warps[warp]
            if state.ticket is None:
                self._group.here(index, warp)
                barrier = self._named(int(number[WARP * warp]))
                state.ticket = self._enter(barrier, warp, threads, waits=True)
        passed = []
        for warp in warps:
            state = self._group.warps[warp]
            barrier = self._named(int(number[WARP * warp]))
            if state.ticket is not None and barrier.generation > state.ticket:
                state.ticket = None
                if state.agent:
                    state.agent.acquire(barrier.released)
                passed.append(warp)
            else:
                self._group.hold(barrier.state)
        return self._group.only(passed, mask)

    def meet(self, index: int, mask: Mask) -> None:
        """bar.warp.sync of all lanes of each warp."""
        for warp in warps_of(mask):
            agent = self._group.warps[warp].agent
            if agent is not None:
                agent.meet()

    def arrive(
        self, index: int, number: Lanes, threads: Lanes | None, mask: Mask
    ) -> None:
        """bar.arrive: each warp arrives and goes on."""
        for warp in warps_of(mask):
            self._group.here(index, warp)
            barrier = self._named(int(number[WARP * warp]))
            self._enter(barrier, warp, threads, waits=False)

    def _named(self, number: int) -> NamedBarrier:
        if number >= NAMED_BARRIERS:
            raise Fault(Kind.BARRIER, f"barrier {number} of {NAMED_BARRIERS}")
        known = self._group.cta.named.get(number)
        if known is None:
            name = self._group.machine.names.named_barrier(number)
            known = self._group.cta.named[number] = NamedBarrier(name)
        return known

    def _enter(
        self, barrier: NamedBarrier, warp: int, threads: Lanes | None, *, waits: bool
    ) -> int:
        state, cta = self._group.warps[warp], self._group.cta
        count = cta.threads if threads is None else int(threads[WARP * warp])
        self._group.cluster.progress += 1
        clock = state.agent.release() if state.agent else None
        return barrier.arrive(count, clock, waits=waits)

    def cluster_arrive(self, index: int, relaxed: bool, mask: Mask) -> None:
        """barrier.cluster.arrive: each warp arrives and goes on."""
        for number in warps_of(mask):
            warp = self._group.warps[number]
            self._group.here(index, number)
            if warp.cluster_ticket is not None:
                raise Fault(
                    Kind.BARRIER, "warp arrives at the cluster barrier without waiting"
                )
            clock = None
            if warp.agent:
                clock = (
                    warp.agent.release_published() if relaxed else warp.agent.release()
                )
            warp.cluster_ticket = self._group.cluster.barrier.arrive(warp.serial, clock)
            self._group.cluster.progress += 1

    def cluster_wait(self, index: int, mask: Mask) -> Mask | None:
        """Gate of barrier.cluster.wait."""
        barrier = self._group.cluster.barrier
        passed = []
        for number in warps_of(mask):
            warp = self._group.warps[number]
            self._group.here(index, number)
            if warp.cluster_ticket is None:
                raise Fault(
                    Kind.BARRIER, "warp waits at the cluster barrier without arriving"
                )
            if barrier.generation > warp.cluster_ticket:
                warp.cluster_ticket = None
                if warp.agent:
                    warp.agent.acquire(barrier.released)
                passed.append(number)
        self._group.hold(barrier.state)
        return self._group.only(passed, mask)
