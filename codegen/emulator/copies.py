# SPDX-License-Identifier: Apache-2.0
"""Bulk copies of a warpgroup: issued by its lanes, complete when the schedule says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .checks import Operation
from .lanes import (
    LANES,
    ONE_LANE,
    RANK_SHIFT,
    WARP,
    WARP_MASKS,
    WARPS,
    Lanes,
    Mask,
    some,
    warps_of,
)
from .parts import Box, Part, Run
from .report import Fault, Kind

if TYPE_CHECKING:
    from .machine import Cta
    from .warpgroup import Warp, Warpgroup


@dataclass(eq=False)
class BulkStore:
    """A TMA store that may still be reading shared memory."""

    operation: Operation | None
    line: int
    lanes: Mask
    """Who issued it, and may commit it and wait for it."""
    done: bool = False


@dataclass(eq=False)
class StoreGroup:
    """What lanes committed together."""

    lanes: Mask
    stores: list[BulkStore]


class Copies:
    """What `cp.async.bulk` instructions do; generated code calls the public methods."""

    def __init__(self, group: Warpgroup) -> None:
        self._group = group

    def lines(self, warp: Warp) -> list[int]:
        """[PTX lines] of a warp's stores that it did not wait for."""
        return [
            store.line
            for stores in [*(g.stores for g in warp.store_groups), warp.open_stores]
            for store in stores
        ]

    def load(
        self,
        index: int,
        base: Lanes,
        offset: int,
        described: Lanes,
        coordinates: Sequence[Lanes],
        barrier_base: Lanes,
        barrier_offset: int,
        targets: Lanes | None,
        pair: bool,
        mask: Mask,
    ) -> None:
        """cp.async.bulk.tensor into shared memory, by each lane; pair: `.cta_group::2`."""
        for lane in np.flatnonzero(mask).tolist():
            self._group.here(index, lane // WARP)
            tensor_map = self._group.machine.tensor_map(int(described[lane]))
            box = Box(tensor_map, tuple(int(axis[lane]) for axis in coordinates))
            self._check_box(box)
            self._group.machine.count("tensor loads", 1)
            bits = None if targets is None else int(targets[lane])
            barrier = int(barrier_base[lane]) + barrier_offset
            self._load(index, lane, box, int(base[lane]) + offset, barrier, bits, pair)

    def load_run(
        self,
        index: int,
        base: Lanes,
        offset: int,
        source_base: Lanes,
        source_offset: int,
        nbytes: Lanes,
        barrier_base: Lanes,
        barrier_offset: int,
        targets: Lanes | None,
        mask: Mask,
    ) -> None:
        """cp.async.bulk into shared memory, by each lane."""
        for lane in np.flatnonzero(mask).tolist():
            self._group.here(index, lane // WARP)
            run = Run(int(source_base[lane]) + source_offset, int(nbytes[lane]))
            self._group.machine.count("bulk loads", 1)
            bits = None if targets is None else int(targets[lane])
            barrier = int(barrier_base[lane]) + barrier_offset
            self._load(index, lane, run, int(base[lane]) + offset, barrier, bits, False)

    def _load(
        self,
        index: int,
        lane: int,
        part: Part,
        target: int,
        barrier_address: int,
        bits: int | None,
        pair: bool,
    ) -> None:
        """One lane issues a load of a part to a shared address. bits: of the multicast's CTAs."""
        cta, place = self._group.cluster.locate(target)
        owner, barrier_place = self._group.cluster.locate(barrier_address)
        receivers = self._receivers(cta, owner, bits, pair)
        for _, signalled in receivers:
            self._group.mbarriers.find(
                signalled.rank << RANK_SHIFT | barrier_place,
                lane // WARP,
                ONE_LANE[lane],
                copies=True,
            )
        barrier = self._group.cluster.mbarrier(owner.rank << RANK_SHIFT | barrier_place)
        warp = self._group.warps[lane // WARP]
        operation = self._start(warp, barrier.component, ONE_LANE[lane])
        self._group.cluster.pending.load(
            self._load_work(
                *(index, lane // WARP, part, place),
                *(barrier_place, receivers, operation),
            )
        )

    def _check_box(self, box: Box) -> None:
        """A load of zeros, or a store of nothing, for which no ragged tile is the reason."""
        machine, tensor_map = self._group.machine, box.tensor_map
        astray = tensor_map.astray(
            box.coordinates, machine.tiles.get(tensor_map.address, ())
        )
        if astray:
            machine.report(Kind.OUT_OF_BOUNDS, astray)

    def _receivers(
        self, cta: Cta, owner: Cta, bits: int | None, pair: bool
    ) -> list[tuple[Cta, Cta]]:
        """Each CTA that gets the data, and the one whose mbarrier is told of its bytes.

        Without a multicast these are the CTAs of the two addresses: the same one, or in the same
        pair. With one, each CTA's own mbarrier is told, or of its pair the one that is even or
        odd as the owner of the mbarrier's address is.
        """
        ctas = self._group.cluster.ctas
        if pair and len(ctas) % 2:
            raise Fault(Kind.TMA, f"a copy for CTA pairs in a cluster of {len(ctas)}")
        if bits is None:
            if cta.rank != owner.rank and not (pair and cta.rank ^ owner.rank == 1):
                raise Fault(
                    Kind.TMA,
                    f"a copy into cta {cta.rank} that signals an mbarrier of cta {owner.rank}",
                )
            return [(cta, owner)]
        ranks = self.ranks(bits, Kind.TMA)
        if pair:
            return [(ctas[rank], ctas[rank & ~1 | owner.rank & 1]) for rank in ranks]
        return [(ctas[rank], ctas[rank]) for rank in ranks]

    def ranks(self, bits: int, kind: Kind) -> list[int]:
        """The CTAs of a multicast mask; Fault of this kind when it names none or others."""
        count = len(self._group.cluster.ctas)
        if not bits or bits >> count:
            raise Fault(kind, f"a multicast mask of {bits:#x} in a cluster of {count}")
        return [rank for rank in range(count) if bits >> rank & 1]

    def _start(self, warp: Warp, component: int, mask: Mask) -> Operation | None:
        """What the lanes of a mask issue."""
        if warp.agent is None:
            return None
        acting = self._group.lanes(warp.number % WARPS, mask)
        return self._group.cluster.streams.start(
            component, [warp.agent], self._group.line, acting
        )

    def _load_work(
        self,
        index: int,
        number: int,
        part: Part,
        place: int,
        barrier_place: int,
        receivers: list[tuple[Cta, Cta]],
        operation: Operation | None,
    ) -> Callable[[], None]:
        def complete() -> None:
            self._group.here(index, number)
            machine = self._group.machine
            nbytes, touched = part.load(machine, [cta for cta, _ in receivers], place)
            machine.count("load bytes", nbytes)
            self._note_global(part, operation, stored=False)
            for cta, signalled in receivers:
                if cta.exited:
                    raise Fault(
                        Kind.OUTSTANDING,
                        f"a TMA load into cta {cta.rank}, which exited",
                    )
                if operation is not None and cta.shadow is not None:
                    cta.shadow.write(
                        slice(touched.start // 4, -(-touched.stop // 4)),
                        operation.component,
                        operation.epoch,
                        operation.clock,
                        operation.line,
                        "TMA load",
                    )
                barrier = self._group.cluster.mbarrier(
                    signalled.rank << RANK_SHIFT | barrier_place
                )
                if operation is not None:
                    signal = (operation.epoch, operation.line)
                    barrier.last_signals[operation.component] = signal
                barrier.complete(nbytes, operation.clock if operation else None)
            self._group.cluster.progress += 1

        return complete

    def store(
        self,
        index: int,
        described: Lanes,
        coordinates: Sequence[Lanes],
        base: Lanes,
        offset: int,
        mask: Mask,
    ) -> None:
        """cp.async.bulk.tensor from shared memory.

        The hardware issues it once per warp, from uniform registers, even without an election:
        lanes of a warp with the same operands are one store here.
        """
        issued: dict[tuple[Any, ...], list[int]] = {}
        for lane in np.flatnonzero(mask).tolist():
            where = tuple(int(axis[lane]) for axis in coordinates)
            key = (lane // WARP, int(described[lane]), int(base[lane]), where)
            issued.setdefault(key, []).append(lane)
        for (number, _, _, where), lanes in issued.items():
            lane = lanes[0]
            warp = self._group.warps[number]
            self._group.here(index, number)
            issuers: Mask = np.isin(np.arange(LANES), lanes)
            box = Box(self._group.machine.tensor_map(int(described[lane])), where)
            self._check_box(box)
            cta, place = self._group.cluster.locate(int(base[lane]) + offset)
            if cta is not self._group.cta:
                raise Fault(Kind.TMA, "a TMA store from another CTA's shared memory")
            operation = self._start(
                warp, self._group.cluster.components.stores(warp.serial), issuers
            )
            store = BulkStore(operation, self._group.line, issuers)
            warp.open_stores.append(store)
            self._group.machine.count("tensor stores", 1)
            self._group.cluster.pending.store(
                self._store_work(index, lane // WARP, box, place, store)
            )

    def _store_work(
        self,
        index: int,
        number: int,
        box: Box,
        place: int,
        store: BulkStore,
    ) -> Callable[[], None]:
        def complete() -> None:
            self._group.here(index, number)
            touched = self._group.machine.store_box(
                box.tensor_map, box.coordinates, self._group.cta, place
            )
            operation, shadow = store.operation, self._group.cta.shadow
            if operation is not None and shadow is not None:
                shadow.read(
                    slice(touched.start // 4, -(-touched.stop // 4)),
                    operation.component,
                    operation.epoch,
                    operation.clock,
                    "TMA store",
                )
            self._note_global(box, operation, stored=True)
            store.done = True
            self._group.cluster.progress += 1

        return complete

    def _note_global(
        self, part: Part, operation: Operation | None, *, stored: bool
    ) -> None:
        """Checks what a copy touches of global memory."""
        machine = self._group.machine
        shadow = machine.global_shadow
        if operation is None or shadow is None:
            return
        place = part.place(machine, stored=stored)
        if place is None:
            return
        note, what = (
            (shadow.write, "TMA store") if stored else (shadow.read, "TMA load")
        )
        clock, line = operation.clock, operation.line
        note(place, operation.component, operation.epoch, clock, line, what)

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
            warp.store_groups.append(StoreGroup(mask & WARP_MASKS[number], mine))

    def wait(self, index: int, count: int, read: bool, mask: Mask) -> Mask | None:
        """Gate of cp.async.bulk.wait_group: at most `count` groups of each lane are in flight.

        Lanes have groups of their own: who waits for those of others waits for nothing. A store has
        read and written at the same moment here, so `.read` makes no difference. Who passes knows
        that the reads are over: the stores' clocks are acquired.
        """
        passed = []
        for number in warps_of(mask):
            warp = self._group.warps[number]
            mine = [group for group in warp.store_groups if some(group.lanes & mask)]
            over = mine[: max(0, len(mine) - count)]
            if all(store.done for group in over for store in group.stores):
                for group in over:
                    for store in group.stores:
                        waiting = self._group.lanes(number, store.lanes & mask)
                        if warp.agent and store.operation:
                            warp.agent.acquire(store.operation.clock, waiting)
                warp.store_groups = [
                    group for group in warp.store_groups if group not in over
                ]
                passed.append(number)
        self._group.hold(lambda: "its bulk stores")
        return self._group.only(passed, mask)
