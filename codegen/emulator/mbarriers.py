# SPDX-License-Identifier: Apache-2.0
"""The mbarriers of a cluster as lanes use them: init, inval, arrive, expect_tx and waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .barriers import MBarrier
from .lanes import (
    ALL,
    LANES,
    NONE,
    ONE_LANE,
    RANK_SHIFT,
    WARP,
    WARP_MASKS,
    Lanes,
    Mask,
    warps_of,
)
from .report import Fault, Kind

if TYPE_CHECKING:
    from .warpgroup import Warpgroup


class MBarriers:
    """What `mbarrier` instructions do; generated code calls the public methods."""

    def __init__(self, group: Warpgroup) -> None:
        self._group = group
        self.phase_complete: Mask = NONE
        """The result of the last wait."""
        self._waits: dict[tuple[int, int, int], int] = {}
        """Numbers the waits that were false, by (block, address, parity)."""
        self._failed = np.zeros(LANES, np.int64)
        """The wait that was false the last time, for each lane; 0: none."""

    def init(
        self, index: int, base: Lanes, offset: int, count: Lanes, mask: Mask
    ) -> None:
        """mbarrier.init by each lane."""
        for lane in np.flatnonzero(mask).tolist():
            warp = self._group.warps[lane // WARP]
            self._group.here(index, lane // WARP)
            cta, place = self._group.cluster.locate(int(base[lane]) + offset)
            cta.shared.check_region(place, 8, 8)
            epoch, initialiser = 0, warp.serial
            if warp.agent:
                epoch = warp.agent.epoch
                alone = self._group.lanes(lane // WARP, ONE_LANE[lane])
                initialiser = warp.agent.actor(alone)
            component = self._group.cluster.components.loads()
            name = self._group.machine.names.barrier(place)
            cta.mbarriers[place] = MBarrier(
                int(count[lane]), initialiser, epoch, component, name
            )
            self._group.cluster.progress += 1

    def invalidate(self, index: int, base: Lanes, offset: int, mask: Mask) -> None:
        """mbarrier.inval by each lane."""
        for lane in np.flatnonzero(mask).tolist():
            self._group.here(index, lane // WARP)
            self.find(int(base[lane]) + offset, lane // WARP, ONE_LANE[lane])
            cta, place = self._group.cluster.locate(int(base[lane]) + offset)
            del cta.mbarriers[place]

    def find(
        self, address: int, number: int, mask: Mask, *, copies: bool = False
    ) -> MBarrier:
        """The mbarrier at an address that lanes of a warp, or a copy that they issue, use."""
        barrier = self._group.cluster.mbarrier(address)
        self._check_visible(barrier, number, mask, copies)
        return barrier

    def _check_visible(
        self, barrier: MBarrier, number: int, mask: Mask, copies: bool
    ) -> None:
        """The initialisation of an mbarrier must be visible to who uses it, once and for all."""
        warp = self._group.warps[number]
        agent = warp.agent
        if agent is None:
            return
        who = (
            2 * warp.serial + copies,
            mask[WARP * number : WARP * (number + 1)].tobytes(),
        )
        if who in barrier.known:
            return
        known = (
            agent.copies_know_initialisation if copies else agent.knows_initialisation
        )
        lanes = self._group.lanes(number, mask)
        if known(barrier.initialiser, barrier.initialised, lanes):
            barrier.known.add(who)
            return
        what = "the copy" if copies else "this warp"
        self._group.machine.report(
            Kind.BARRIER,
            f"{barrier.name}, whose initialisation need not be visible to {what} yet",
        )

    def arrive(
        self,
        index: int,
        base: Lanes,
        offset: int,
        count: Any,
        transactions: Any,
        remote: bool,
        mask: Mask,
    ) -> None:
        """mbarrier.arrive, .arrive.expect_tx and .expect_tx by each lane.

        count and transactions are lanes, or one number for all. remote: whether the mbarrier may
        be another CTA's, as `.shared::cluster` says.
        """
        cluster = self._group.cluster
        there = base[mask]
        together = not np.count_nonzero(there != there[:1])  # at one mbarrier
        for number in warps_of(mask):
            warp = self._group.warps[number]
            self._group.here(index, number)
            agent = warp.agent
            # Together, so that arrivals of one instruction that fall into two phases are too many
            # for the first: who waits for it would otherwise wait for a part of the warp.
            of_warp = there[:1] if together else base[mask & WARP_MASKS[number]]
            for address in (of_warp if together else np.unique(of_warp)).tolist():
                chosen = mask if together else mask & (base == address)
                barrier = self.find(address + offset, number, chosen)
                away = cluster.locate(address + offset)[0] is not self._group.cta
                if away and not remote:
                    raise Fault(
                        Kind.BARRIER,
                        "an mbarrier of another CTA, without .shared::cluster",
                    )
                if away and agent:
                    signal = cluster.components.signals(warp.serial)
                    epoch = cluster.streams.count(signal)
                    agent.count_signal(signal, epoch)
                    barrier.last_signals[signal] = (epoch, self._group.line)
                clock = None
                if agent:
                    clock = agent.release(self._group.lanes(number, chosen))
                arrivals = _total(count, number, chosen)
                # An expect_tx alone releases nothing: it only moves the count.
                barrier.arrive(
                    arrivals,
                    _total(transactions, number, chosen),
                    clock if arrivals else None,
                )
                cluster.progress += 1

    def wait(
        self,
        index: int,
        base: Lanes,
        offset: int,
        parity: Lanes,
        polls: bool,
        mask: Mask,
    ) -> Mask | None:
        """Gate of try_wait and test_wait with a parity; the result is `phase_complete`.

        A wait may come back false: the first time it does. A try_wait that is repeated at the same
        place is held back until the phase completes, as the hardware may; a test_wait never is.
        """
        first = int(mask.argmax())
        other = (base != base[first]) | (parity != parity[first])
        if not np.count_nonzero(mask & other):
            return self._wait_together(
                index, int(base[first]) + offset, int(parity[first]), polls, mask
            )
        result = np.zeros(LANES, np.bool_)
        passed = np.zeros(LANES, np.bool_)
        pairs = {
            (int(base[lane]), int(parity[lane]))
            for lane in np.flatnonzero(mask).tolist()
        }
        for address, phase in sorted(pairs):
            lanes = mask & (base == address) & (parity == phase)
            part = self._wait_together(index, address + offset, phase, polls, lanes)
            if part is not None:
                passed |= part
                result |= part & self.phase_complete
        self.phase_complete = result
        return passed

    def _wait_together(
        self, index: int, address: int, parity: int, polls: bool, mask: Mask
    ) -> Mask | None:
        """The same for lanes that wait for the same phase of the same mbarrier."""
        warps = warps_of(mask)
        self._group.here(index, warps[0])
        if parity > 1:
            raise Fault(Kind.BARRIER, f"a wait for parity {parity}")
        barrier = self._group.cluster.mbarrier(address)
        if address >> RANK_SHIFT != self._group.cta.rank:
            raise Fault(Kind.BARRIER, "a wait on an mbarrier of another CTA")
        complete = barrier.passed(parity)
        key = (self._group.block, address, parity)
        wait = self._waits.setdefault(key, len(self._waits) + 1)
        passed: Mask | None = mask
        for number in warps:
            self._group.here(index, number)
            self._check_visible(barrier, number, mask, False)
            agent = self._group.warps[number].agent
            if complete and agent is not None:
                agent.acquire(barrier.released, self._group.lanes(number, mask))
        if not complete and not polls:
            fresh = warps_of(mask & (self._failed != wait))
            if len(fresh) < len(warps):
                passed = self._group.only(fresh, mask)
        if passed is not None:
            self._failed[passed] = 0 if complete else wait
        if not complete:

            def reason() -> str:
                return (
                    f"{barrier.name} parity {parity} "
                    f"({barrier.pending} of {barrier.count} arrivals and "
                    f"{barrier.transactions} bytes are missing)"
                )

            self._group.hold(reason)
        self.phase_complete = ALL if complete else NONE
        return passed

    def fence_init(self, index: int, mask: Mask) -> None:
        """fence.mbarrier_init: initialisations up to here become visible to the cluster."""
        for number in warps_of(mask):
            agent = self._group.warps[number].agent
            if agent:
                agent.fence_initialisations(self._group.lanes(number, mask))


def _total(amount: Any, number: int, mask: Mask) -> int:
    """Of a warp's lanes in the mask; amount: of each lane, or one number for all."""
    part = mask[WARP * number : WARP * (number + 1)]
    if isinstance(amount, int):
        return amount * part.tobytes().count(1)
    return int(amount[WARP * number : WARP * (number + 1)][part].sum(dtype=np.int64))
