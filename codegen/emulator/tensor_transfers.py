# SPDX-License-Identifier: Apache-2.0
"""Tensor memory as warps use it: tcgen05.alloc, .dealloc, .ld, .st and .wait.

A tcgen05.ld has its value at once: PTX ISA 9.7.16.6.4.5 promises that true register dependencies
are respected, so reading the registers early is right. It promises nothing about memory: only
tcgen05.wait::ld orders the read before what follows, and only tcgen05.wait::st makes a store
visible, to the same warp too. Until then the epochs of a warp's loads and stores are unknown to the
warp itself, and whoever touches those columns in spite of that, races.

An mbarrier, a barrier or a cluster barrier then hands the knowledge on, to who has fenced it as PTX
ISA 9.7.16.6.4 shows: tcgen05.fence::before_thread_sync of the thread that signals, unless it is a
tcgen05.commit, and tcgen05.fence::after_thread_sync of the one that waited. Those between the two,
who only pass on what they heard, need no fence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .checks import SEEN, SENT, Granules
from .lanes import LANES, LEADERS, WARP, WARP_MASKS, Lanes, Mask, warps_of
from .report import Fault, Kind
from .tensor_memory import (
    HALF,
    Movement,
    Request,
    TensorMemory,
    granules,
    load,
    split_address,
    store,
)

if TYPE_CHECKING:
    from .warpgroup import Warpgroup


class TensorTransfers:
    """What these instructions do; generated code calls the public methods."""

    def __init__(self, group: Warpgroup) -> None:
        self._group = group

    # --- allocation ---------------------------------------------------------------------------

    def alloc(
        self,
        index: int,
        ctas: int,
        base: Lanes,
        offset: int,
        columns: Lanes,
        mask: Mask,
    ) -> Mask | None:
        """Gate of tcgen05.alloc: waits for free columns, and for the peer CTA's warp if paired."""
        passed = []
        for number in warps_of(mask):
            self._group.here(index, number)
            count = self._uniform(columns, number, "a number of columns")
            memory = self._group.cta.tensor_memory
            memory.check_request(count)
            first = self._collective(number, ctas, count, None)
            if first is None:
                continue
            address = np.full(LANES, first, np.uint32)
            leader = WARP_MASKS[number] & LEADERS
            self._group.transfers.store_shared(
                *(index, base, offset, 4, [address], False, leader),
                for_all=WARP_MASKS[number],
            )
            passed.append(number)
        free = self._group.cta.tensor_memory.free_columns
        self._group.hold(
            lambda: f"columns of tensor memory ({free} are free)"
            + (", or its peer CTA's warp" if ctas == 2 else "")
        )
        return self._group.only(passed, mask)

    def dealloc(
        self, index: int, ctas: int, address: Lanes, columns: Lanes, mask: Mask
    ) -> Mask | None:
        """Gate of tcgen05.dealloc, by any warp; waits for the peer CTA's warp if paired."""
        passed = []
        for number in warps_of(mask):
            self._group.here(index, number)
            count = self._uniform(columns, number, "a number of columns")
            lane, first = split_address(self._uniform(address, number, "an address"))
            if lane:
                raise Fault(Kind.TENSOR_MEMORY, f"deallocates from lane {lane} on")
            if self._collective(number, ctas, count, first) is not None:
                self._forget(number, first, count)
                passed.append(number)
        self._group.hold(lambda: "its peer CTA's warp")
        return self._group.only(passed, mask)

    def relinquish(self, index: int, mask: Mask) -> None:
        """tcgen05.relinquish_alloc_permit."""
        self._group.cta.tensor_memory.relinquished = True

    def _uniform(self, values: Lanes, number: int, what: str) -> int:
        """The value that all lanes of a warp must agree on."""
        lanes = values[WARP * number : WARP * (number + 1)]
        if (lanes != lanes[0]).any():
            raise Fault(
                Kind.TENSOR_MEMORY, f"{what} that differs between lanes of a warp"
            )
        return int(lanes[0])

    def _collective(
        self, number: int, ctas: int, columns: int, first: int | None
    ) -> int | None:
        """Allocates, or deallocates from `first` on; returns the first column once that is done.

        Of a CTA pair each has to ask for it; the one that comes second does it for both.
        """
        cta, cluster = self._group.cta, self._group.cluster
        memories = [other.tensor_memory for other in cluster.pair(cta, ctas)]
        kind = first is not None
        mine = cta.tensor_memory.requests.setdefault(
            kind, Request(number, columns, first)
        )
        if mine.warp != number:
            return None  # another warp of this CTA came first
        granted = mine.granted
        if granted is None:
            requests = [memory.requests.get(kind) for memory in memories]
            for request in requests:
                if request is None or request.granted is not None:
                    return None
                if (request.columns, request.first) != (columns, first):
                    raise Fault(
                        Kind.TENSOR_MEMORY, "the CTAs of a pair do not ask for the same"
                    )
            granted = self._carry_out(memories, columns, first)
            if granted is None:
                return None
            for memory in memories:
                request = memory.requests[kind]
                memory.requests[kind] = replace(request, granted=granted)
            cluster.progress += 1
        del cta.tensor_memory.requests[kind]
        return granted

    def _carry_out(
        self, memories: list[TensorMemory], columns: int, first: int | None
    ) -> int | None:
        if first is None:
            # Of a pair both allocate and deallocate together, so both have the same columns free.
            found = memories[0].find_free(columns)
            if found is not None:
                for memory in memories:
                    memory.allocate(found, columns, self._group.line)
            return found
        for memory in memories:
            memory.release(first, columns)
        return first

    def _forget(self, number: int, first: int, columns: int) -> None:
        """What is deallocated must not be in use: it is as if the warp wrote it."""
        agent, shadow = self._group.warps[number].agent, self._group.cta.tensor_shadow
        if agent is None or shadow is None:
            return
        place = granules(first, columns)
        what = "tcgen05.dealloc"
        # It is synchronous: of the fences it needs only those of others, before they signalled.
        clock = agent.view().copy()
        np.maximum(clock[SEEN], clock[SENT], out=clock[SEEN])
        line = self._group.line
        shadow.write(place, agent.warp, agent.epoch, clock, line, what)
        shadow.forget(place)

    # --- loads and stores ---------------------------------------------------------------------

    def load(
        self, index: int, base: Lanes, offset: int, moved: Movement, mask: Mask
    ) -> Lanes:
        """tcgen05.ld of the warps in the mask: the registers, [registers, 128]."""
        words = self._group.cta.tensor_memory.words
        places = []
        for number in warps_of(mask):
            lane, column = self._place(index, number, base, offset, moved, "loads")
            self._note_load(number, lane, column, moved)
            places.append((number, lane, column))
        first = places[0][2] if places else 0
        if moved.whole_columns and all(column == first for _, _, column in places):
            # Lanes of other warps get values, too; nobody merges them into registers.
            registers: Lanes = words[first : first + moved.registers].copy()
            return registers
        registers = np.zeros((moved.registers, LANES), np.uint32)
        for number, lane, column in places:
            part = slice(WARP * number, WARP * (number + 1))
            registers[:, part] = load(words, moved, column, lane)
        return registers

    def store(
        self,
        index: int,
        base: Lanes,
        offset: int,
        moved: Movement,
        values: Sequence[Lanes],
        mask: Mask,
    ) -> None:
        """tcgen05.st of the warps in the mask."""
        words = self._group.cta.tensor_memory.words
        places = []
        for number in warps_of(mask):
            lane, column = self._place(index, number, base, offset, moved, "stores")
            self._note_store(number, lane, column, moved)
            places.append((number, lane, column))
        first = places[0][2] if places else 0
        together = len(places) == LANES // WARP
        if together and moved.whole_columns and all(c == first for _, _, c in places):
            np.stack(values, out=words[first : first + moved.registers])
            return
        for number, lane, column in places:
            part = slice(WARP * number, WARP * (number + 1))
            store(words, moved, column, lane, [value[part] for value in values])

    def _place(
        self,
        index: int,
        number: int,
        base: Lanes,
        offset: int,
        moved: Movement,
        what: str,
    ) -> tuple[int, int]:
        """The lane and column of a warp's access; Fault for what it may not touch."""
        self._group.here(index, number)
        address = self._uniform(base, number, "an address") + offset
        lane, column = split_address(address)
        lowest = WARP * number
        if lane != lowest and not (moved.half and lane == lowest + HALF):
            raise Fault(
                Kind.TENSOR_MEMORY,
                f"{what} lanes from {lane} on, but warp {self._group.warps[number].number} has "
                f"lanes {lowest} to {lowest + WARP - 1}",
            )
        for start, count in moved.spans:
            self._group.cta.tensor_memory.check_columns(column + start, count, what)
        return lane, column

    def _note_load(self, number: int, lane: int, column: int, moved: Movement) -> None:
        agent, shadow = self._group.warps[number].agent, self._group.cta.tensor_shadow
        if agent is None or shadow is None:
            return
        cluster = self._group.cluster
        component = cluster.components.tensor_loads(agent.warp)
        epoch = cluster.streams.count(component)
        for place in _touched(number, lane, column, moved):
            shadow.read(place, component, epoch, agent.view(), "tcgen05.ld")

    def _note_store(self, number: int, lane: int, column: int, moved: Movement) -> None:
        agent, shadow = self._group.warps[number].agent, self._group.cta.tensor_shadow
        if agent is None or shadow is None:
            return
        cluster = self._group.cluster
        component = cluster.components.tensor_stores(agent.warp)
        epoch = cluster.streams.count(component)
        line = self._group.line
        for place in _touched(number, lane, column, moved):
            shadow.write(place, component, epoch, agent.view(), line, "tcgen05.st")

    def wait_loads(self, index: int, mask: Mask) -> None:
        """tcgen05.wait::ld: the warp's loads have happened."""
        self._wait(self._group.cluster.components.tensor_loads, mask)

    def wait_stores(self, index: int, mask: Mask) -> None:
        """tcgen05.wait::st: the warp's stores have happened."""
        self._wait(self._group.cluster.components.tensor_stores, mask)

    def fence_before(self, index: int, mask: Mask) -> None:
        """tcgen05.fence::before_thread_sync."""
        for number in warps_of(mask):
            agent = self._group.warps[number].agent
            if agent is not None:
                agent.fence_before(self._group.lanes(number, mask))

    def fence_after(self, index: int, mask: Mask) -> None:
        """tcgen05.fence::after_thread_sync."""
        for number in warps_of(mask):
            agent = self._group.warps[number].agent
            if agent is not None:
                agent.fence_after(self._group.lanes(number, mask))

    def _wait(self, component_of: Callable[[int], int], mask: Mask) -> None:
        for number in warps_of(mask):
            agent = self._group.warps[number].agent
            if agent is not None:
                component = component_of(agent.warp)
                agent.learn(component, self._group.cluster.streams.last(component))


def _touched(number: int, lane: int, column: int, moved: Movement) -> list[Granules]:
    half = lane % WARP // HALF if moved.half else None
    return [
        granules(column + start, count, quadrant=number, half=half)
        for start, count in moved.spans
    ]
