# SPDX-License-Identifier: Apache-2.0
"""Bulk loads of a warpgroup: issued by its lanes, complete when the schedule says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .checks import HAPPENED, Operation
from .lanes import (
    ONE_LANE,
    RANK_SHIFT,
    WARP,
    Lanes,
    Mask,
)
from .parts import Box, Part, Run, SharedRun, note
from .report import Fault, Kind

if TYPE_CHECKING:
    from .cluster import Cta
    from .warpgroup import Warpgroup


class Copies:
    """What `cp.async.bulk` into shared memory does; generated code calls the public methods."""

    def __init__(self, group: Warpgroup) -> None:
        self._group = group

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
            box.check(self._group.machine)
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

    def send(
        self,
        index: int,
        base: Lanes,
        offset: int,
        source_base: Lanes,
        source_offset: int,
        nbytes: Lanes,
        barrier_base: Lanes,
        barrier_offset: int,
        mask: Mask,
    ) -> None:
        """cp.async.bulk from this CTA's shared memory into one of the cluster's, by each lane."""
        for lane in np.flatnonzero(mask).tolist():
            self._group.here(index, lane // WARP)
            address = int(source_base[lane]) + source_offset
            cta, begin = self._group.cluster.locate(address)
            if cta is not self._group.cta:
                raise Fault(Kind.TMA, "a bulk copy from another CTA's shared memory")
            warp = self._group.warps[lane // WARP]
            component = self._group.cluster.components.stores(warp.serial)
            reading = self._group.start(lane // WARP, component, ONE_LANE[lane])
            part = SharedRun(cta, begin, int(nbytes[lane]), reading)
            self._group.machine.count("bulk copies", 1)
            barrier = int(barrier_base[lane]) + barrier_offset
            self._load(
                index, lane, part, int(base[lane]) + offset, barrier, None, False
            )

    def _load(
        self,
        index: int,
        lane: int,
        part: Part | SharedRun,
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
        operation = self._group.start(lane // WARP, barrier.component, ONE_LANE[lane])
        if isinstance(part, SharedRun) and part.reading is not None:
            assert operation is not None
            # Who waits for the copy knows that its source has been read.
            operation.clock[HAPPENED, part.reading.component] = part.reading.epoch
        self._group.cluster.pending.load(
            self._load_work(
                *(index, lane // WARP, part, place),
                *(barrier_place, receivers, operation),
            )
        )

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

    def _load_work(
        self,
        index: int,
        number: int,
        part: Part | SharedRun,
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
            what = "bulk copy" if isinstance(part, SharedRun) else "TMA load"
            if isinstance(part, SharedRun):
                part.note(what)
            elif operation is not None:
                note(part, machine, operation, operation.component, "read", what)
            for cta, signalled in receivers:
                if cta.exited:
                    raise Fault(
                        Kind.OUTSTANDING,
                        f"a {what} into cta {cta.rank}, which exited",
                    )
                if operation is not None and cta.shadow is not None:
                    cta.shadow.write(
                        slice(touched.start // 4, -(-touched.stop // 4)),
                        operation.component,
                        operation.epoch,
                        operation.clock,
                        operation.line,
                        what,
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
