# SPDX-License-Identifier: Apache-2.0
"""Bulk stores and reductions of a warpgroup, and the groups in which lanes wait for them.

A store reads shared memory and writes global memory at one moment here; a reduction reads at one
moment and adds later, element by element (see `additions`). Who waits for the reads alone knows of
nothing that was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .additions import Addition
from .checks import HAPPENED, Clock, Operation
from .lanes import LANES, WARP, WARP_MASKS, Lanes, Mask, some, warps_of
from .parts import Box, Part, Run, note
from .report import Fault, Kind

if TYPE_CHECKING:
    from .warpgroup import Warp, Warpgroup


@dataclass(eq=False)
class BulkStore:
    """A bulk store or reduction that may still be reading shared memory, or writing."""

    operation: Operation | None
    line: int
    lanes: Mask
    """Who issued it, and may commit it and wait for it."""
    read: bool = False
    written: bool = False


@dataclass(eq=False)
class StoreGroup:
    """What lanes committed together."""

    lanes: Mask
    """Those that have not waited for it in the way that they last wait for one."""
    stores: list[BulkStore]
    known: Mask
    """Those that have waited for its reads."""

    @property
    def waited(self) -> bool:
        """Whether all of them have waited for its reads."""
        return not some(self.lanes & ~self.known)


class BulkStores:
    """What these instructions do; generated code calls the public methods."""

    def __init__(self, group: Warpgroup) -> None:
        self._group = group

    def lines(self, warp: Warp) -> list[int]:
        """[PTX lines] of a warp's stores that it did not wait for."""
        groups = [group.stores for group in warp.store_groups if not group.waited]
        return [
            store.line for stores in [*groups, warp.open_stores] for store in stores
        ]

    def store(
        self,
        index: int,
        described: Lanes,
        coordinates: Sequence[Lanes],
        base: Lanes,
        offset: int,
        mask: Mask,
    ) -> None:
        """cp.async.bulk.tensor from shared memory."""
        for number, box, address, issuers in self._boxes(
            index, described, coordinates, base, offset, mask
        ):
            self._group.machine.count("tensor stores", 1)
            self._issue(index, number, box, address, issuers, adds=False)

    def reduce(
        self,
        index: int,
        described: Lanes,
        coordinates: Sequence[Lanes],
        base: Lanes,
        offset: int,
        mask: Mask,
    ) -> None:
        """cp.reduce.async.bulk.tensor, which adds."""
        for number, box, address, issuers in self._boxes(
            index, described, coordinates, base, offset, mask
        ):
            self._group.machine.count("tensor reductions", 1)
            self._issue(index, number, box, address, issuers, adds=True)

    def reduce_run(
        self,
        index: int,
        target_base: Lanes,
        target_offset: int,
        base: Lanes,
        offset: int,
        nbytes: Lanes,
        mask: Mask,
    ) -> None:
        """cp.reduce.async.bulk, which adds, by each lane."""
        issued: set[tuple[int, int, int]] = set()
        for lane in np.flatnonzero(mask).tolist():
            number = lane // WARP
            self._group.here(index, number)
            run = Run(int(target_base[lane]) + target_offset, int(nbytes[lane]))
            address = int(base[lane]) + offset
            if (number, run.address, address) in issued:
                message = "several lanes of the warp issue the same reduction"
                self._group.machine.report(Kind.TMA, message)
            issued.add((number, run.address, address))
            self._group.machine.count("bulk reductions", 1)
            issuer: Mask = np.arange(LANES) == lane
            self._issue(index, number, run, address, issuer, adds=True)

    def _boxes(
        self,
        index: int,
        described: Lanes,
        coordinates: Sequence[Lanes],
        base: Lanes,
        offset: int,
        mask: Mask,
    ) -> Iterator[tuple[int, Box, int, Mask]]:
        """What lanes issue: the warp, a box, the shared address, and who does.

        The hardware issues it once per warp, from uniform registers, even without an election:
        lanes of a warp with the same operands are one here.
        """
        issued: dict[tuple[Any, ...], list[int]] = {}
        for lane in np.flatnonzero(mask).tolist():
            where = tuple(int(axis[lane]) for axis in coordinates)
            key = (lane // WARP, int(described[lane]), int(base[lane]), where)
            issued.setdefault(key, []).append(lane)
        for (number, address, place, where), lanes in issued.items():
            self._group.here(index, number)
            box = Box(self._group.machine.tensor_map(address), where)
            box.check(self._group.machine)
            yield number, box, place + offset, np.isin(np.arange(LANES), lanes)

    def _issue(
        self,
        index: int,
        number: int,
        part: Part,
        address: int,
        issuers: Mask,
        *,
        adds: bool,
    ) -> None:
        """Lanes of a warp store a part from a shared address, or add it."""
        cta, place = self._group.cluster.locate(address)
        if cta is not self._group.cta:
            raise Fault(Kind.TMA, "a TMA store from another CTA's shared memory")
        warp = self._group.warps[number]
        component = self._group.cluster.components.stores(warp.serial)
        operation = self._group.start(number, component, issuers)
        store = BulkStore(operation, self._group.line, issuers)
        warp.open_stores.append(store)
        work = self._work(index, number, part, place, store, adds)
        self._group.cluster.pending.store(work)

    def _work(
        self,
        index: int,
        number: int,
        part: Part,
        place: int,
        store: BulkStore,
        adds: bool,
    ) -> Callable[[], None]:
        def complete() -> None:
            self._group.here(index, number)
            machine, cta = self._group.machine, self._group.cta
            if adds:
                touched, found = part.sum(machine, cta, place)
            else:
                assert isinstance(part, Box)
                touched, found = part.store(machine, cta, place), None
            self._note(number, part, touched, store, adds)
            store.read = True
            machine.stir()
            if found is None:
                store.written = True
            else:
                addition = Addition(found, lambda: self._arrive(store))
                self._group.cluster.pending.landing.add(addition)
            self._group.cluster.progress += 1

        return complete

    def _arrive(self, store: BulkStore) -> None:
        """All that a reduction adds is there."""
        store.written = True
        self._group.machine.stir()
        self._group.cluster.progress += 1

    def _note(
        self, number: int, part: Part, touched: range, store: BulkStore, adds: bool
    ) -> None:
        """Checks what a store reads and what it does to global memory."""
        operation, shadow = store.operation, self._group.cta.shadow
        if operation is None or shadow is None:
            return
        what = "bulk reduction" if adds else "TMA store"
        shadow.read(
            slice(touched.start // 4, -(-touched.stop // 4)),
            *(operation.component, operation.epoch, operation.clock, what),
        )
        writes = self._group.cluster.components.writes(self._group.warps[number].serial)
        action = "reduce" if adds else "write"
        note(part, self._group.machine, operation, writes, action, what)

    def commit(self, index: int, mask: Mask) -> None:
        """cp.async.bulk.commit_group: of each lane a group, of what it issued."""
        for number in warps_of(mask):
            warp = self._group.warps[number]
            mine = [store for store in warp.open_stores if some(store.lanes & mask)]
            warp.open_stores = [
                store for store in warp.open_stores if not some(store.lanes & mask)
            ]
            for store in mine:
                store.lanes = store.lanes & mask
            lanes = mask & WARP_MASKS[number]
            nobody = np.zeros_like(lanes)
            warp.store_groups.append(StoreGroup(lanes, mine, nobody))

    def wait(self, index: int, count: int, read: bool, mask: Mask) -> Mask | None:
        """Gate of cp.async.bulk.wait_group: at most `count` groups of each lane are in flight.

        Lanes have groups of their own: who waits for those of others waits for nothing. Who passes
        knows that the reads are over and, unless it waits for these alone, that all is written.
        """
        passed = []
        for number in warps_of(mask):
            warp = self._group.warps[number]
            mine = [group for group in warp.store_groups if some(group.lanes & mask)]
            over = mine[: max(0, len(mine) - count)]
            stores = [store for group in over for store in group.stores]
            if not all(store.read if read else store.written for store in stores):
                continue
            self._learn(warp, number, over, read, mask)
            if not read or not self._group.program.waits_for_writes:
                for group in over:
                    group.lanes = group.lanes & ~mask
                warp.store_groups = [
                    group for group in warp.store_groups if some(group.lanes)
                ]
            passed.append(number)
        self._group.hold(lambda: "its bulk stores")
        return self._group.only(passed, mask)

    def _learn(
        self, warp: Warp, number: int, over: list[StoreGroup], read: bool, mask: Mask
    ) -> None:
        """Lanes of a warp know of the reads of these groups, or of the writes, too."""
        for group in over:
            learning = mask & ~group.known if read else mask
            group.known = group.known | mask
            for store in group.stores:
                if warp.agent is None or store.operation is None or not some(learning):
                    continue
                clock = store.operation.clock
                if not read:
                    clock = self._written(warp, store.operation)
                waiting = self._group.lanes(number, store.lanes & learning)
                warp.agent.acquire(clock, waiting)

    def _written(self, warp: Warp, operation: Operation) -> Clock:
        """What who knows that an operation has written knows."""
        clock: Clock = operation.clock.copy()
        writes = self._group.cluster.components.writes(warp.serial)
        clock[HAPPENED, writes] = operation.epoch
        return clock
