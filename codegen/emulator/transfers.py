# SPDX-License-Identifier: Apache-2.0
"""Shared and global memory as lanes use it: ld, st, ldmatrix, stmatrix, and their proxy fence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .agents import Agent
from .checks import EVERY, GRANULE, HAPPENED, MIXED, granules_of
from .global_shadow import Accessor, Place
from .lanes import (
    LANES,
    OFFSET_MASK,
    RANK_SHIFT,
    WARP,
    WARP_MASKS,
    Lanes,
    Mask,
    some,
    warps_of,
)
from .memory import load_matrices, store_matrices
from .report import Fault, Kind

if TYPE_CHECKING:
    from .cluster import Cta
    from .warpgroup import Warpgroup


class Transfers:
    """What these instructions do; generated code calls the public methods."""

    def __init__(self, group: Warpgroup) -> None:
        self._group = group

    def _shared(
        self, addresses: Lanes, offset: int, remote: bool, mask: Mask
    ) -> list[tuple[Cta, NDArray[np.int64], Mask]]:
        """Whose shared memory lanes access, at which offsets, and which lanes that are.

        remote: whether the instruction may access another CTA's, as `.shared::cluster` does.
        """
        wide = addresses.astype(np.int64) + offset
        ranks = wide >> RANK_SHIFT
        places: NDArray[np.int64] = wide & OFFSET_MASK
        if (ranks[mask] == self._group.cta.rank).all():
            return [(self._group.cta, places, mask)]
        if not remote:
            raise Fault(Kind.OUT_OF_BOUNDS, "a shared address that is not this CTA's")
        parts = []
        for rank in np.unique(ranks[mask]).tolist():
            cta = self._group.cluster.locate(rank << RANK_SHIFT)[0]
            if cta.exited:
                raise Fault(
                    Kind.OUT_OF_BOUNDS,
                    f"shared memory of cta {cta.rank}, which has exited",
                )
            parts.append((cta, places, mask & (ranks == rank)))
        return parts

    def load_shared(
        self,
        index: int,
        base: Lanes,
        offset: int,
        width: int,
        count: int,
        remote: bool,
        mask: Mask,
    ) -> list[Lanes]:
        """ld.shared: `count` values of `width` bytes per lane."""
        self._group.here(index, warps_of(mask)[0] if some(mask) else 0)
        values: list[Lanes] = []
        for cta, addresses, lanes in self._shared(base, offset, remote, mask):
            loaded = cta.shared.load(addresses, width, count, lanes)
            if values:  # of another CTA; what a part leaves out is zero in it
                loaded = [a | b for a, b in zip(values, loaded, strict=True)]
            values = loaded
            shadow = cta.shadow
            if shadow is None:
                continue
            for number in warps_of(lanes):
                agent = self._agent(index, number)
                chosen = lanes & WARP_MASKS[number]
                touched = granules_of(addresses[chosen], width * count)
                acting = self._group.lanes(number, lanes)
                actor = agent.actor(acting)
                shadow.read(
                    *(touched, actor, agent.epoch, agent.knows(acting)),
                    "ld.shared",
                    reader=(agent, _lanes_of(chosen, width * count)),
                )
                self._visit(cta, agent, actor)
        return values

    def store_shared(
        self,
        index: int,
        base: Lanes,
        offset: int,
        width: int,
        values: Sequence[Lanes],
        remote: bool,
        mask: Mask,
        for_all: Mask | None = None,
    ) -> None:
        """st.shared: values of `width` bytes per lane; for_all: lanes whose common store it is."""
        if not some(mask):
            return
        self._group.here(index, warps_of(mask)[0])
        for cta, addresses, lanes in self._shared(base, offset, remote, mask):
            cta.shared.store(addresses, width, values, lanes)
            nbytes = width * len(values)
            whose = None if for_all is None else (for_all, MIXED)
            self._note_writes(index, cta, addresses, nbytes, lanes, "st.shared", whose)

    def _visit(self, cta: Cta, agent: Agent, actor: int) -> None:
        """Notes an access to another CTA's shared memory: that CTA must stay until then."""
        if cta is not self._group.cta:
            cta.visits[actor] = (agent.epoch, self._group.line)

    def load_matrix(
        self,
        index: int,
        base: Lanes,
        offset: int,
        count: int,
        trans: bool,
        mask: Mask,
    ) -> list[Lanes]:
        """ldmatrix by whole warps."""
        self._group.here(index, warps_of(mask)[0] if some(mask) else 0)
        ((cta, addresses, _),) = self._shared(base, offset, False, mask)
        values = load_matrices(cta.shared, addresses, count, mask, transpose=trans)
        if (shadow := cta.shadow) is not None:
            # Lane 8 m + r names row r of matrix m; the other lanes' addresses are not read.
            rows = mask & (np.arange(LANES) % WARP < 8 * count)
            for number in warps_of(mask):
                agent = self._agent(index, number)
                touched = granules_of(addresses[rows & WARP_MASKS[number]], 16)
                acting = self._group.lanes(number, mask)
                shadow.read(
                    *(touched, agent.actor(acting), agent.epoch, agent.knows(acting)),
                    "ldmatrix",
                    reader=(agent, EVERY),
                )
        return values

    def store_matrix(
        self,
        index: int,
        base: Lanes,
        offset: int,
        values: Sequence[Lanes],
        trans: bool,
        mask: Mask,
    ) -> None:
        """stmatrix by whole warps."""
        if not some(mask):
            return
        self._group.here(index, warps_of(mask)[0])
        ((cta, addresses, _),) = self._shared(base, offset, False, mask)
        store_matrices(cta.shared, addresses, values, mask, transpose=trans)
        # Lane 8 m + r names row r of matrix m; the other lanes' addresses are not read.
        rows = mask & (np.arange(LANES) % WARP < 8 * len(values))
        self._note_writes(index, cta, addresses, 16, rows, "stmatrix", (mask, EVERY))

    def _note_writes(
        self,
        index: int,
        cta: Cta,
        addresses: Lanes,
        nbytes: int,
        mask: Mask,
        what: str,
        collective: tuple[Mask, int] | None = None,
    ) -> None:
        """Checks what lanes write.

        collective: the lanes that do so together, at the addresses of some, and who they are to
        other lanes: EVERY, or MIXED when all of them may use it at once.
        """
        shadow = cta.shadow
        if shadow is None:
            return
        for number in warps_of(mask):
            agent = self._agent(index, number)
            chosen = mask & WARP_MASKS[number]
            touched = granules_of(addresses[chosen], nbytes)
            together, lanes = collective or (mask, _lanes_of(chosen, nbytes))
            acting = self._group.lanes(number, together)
            actor = agent.actor(acting)
            clock, line = agent.knows(acting), self._group.line
            shadow.write(touched, actor, agent.epoch, clock, line, what, lanes=lanes)
            self._visit(cta, agent, actor)

    def load_global(
        self, index: int, base: Lanes, offset: int, width: int, count: int, mask: Mask
    ) -> list[Lanes]:
        """ld.global: `count` values of `width` bytes per lane."""
        self._group.here(index, warps_of(mask)[0] if some(mask) else 0)
        addresses = base.astype(np.int64) + offset
        values = self._group.machine.memory.load(addresses, width, count, mask)
        if (shadow := self._group.machine.global_shadow) is not None:
            nbytes = width * count
            self.note_global(index, addresses, nbytes, mask, shadow.read, "ld.global")
        return values

    def store_global(
        self,
        index: int,
        base: Lanes,
        offset: int,
        width: int,
        values: Sequence[Lanes],
        mask: Mask,
    ) -> None:
        """st.global: values of `width` bytes per lane."""
        if not some(mask):
            return
        self._group.here(index, warps_of(mask)[0])
        addresses = base.astype(np.int64) + offset
        self._group.machine.store_lanes(self._group.cta, addresses, width, values, mask)
        self._group.machine.stir()
        if (shadow := self._group.machine.global_shadow) is not None:
            nbytes = width * len(values)
            self.note_global(index, addresses, nbytes, mask, shadow.write, "st.global")

    def note_global(
        self,
        index: int,
        addresses: Lanes,
        nbytes: int,
        mask: Mask,
        note: Callable[[Place, Accessor], None],
        what: str,
    ) -> None:
        """Tells one of the methods of the global shadow what lanes touch of global memory."""
        for number in warps_of(mask):
            agent = self._agent(index, number)
            lanes = mask & WARP_MASKS[number]
            acting = self._group.lanes(number, mask)
            actor, clock = agent.actor(acting), agent.knows(acting)
            for buffer, _, offsets in self._group.machine.memory.split(
                addresses, nbytes, lanes
            ):
                place = Place(buffer, offsets // nbytes, nbytes)
                note(place, Accessor(actor, agent.epoch, clock, self._group.line, what))

    def _agent(self, index: int, warp: int) -> Agent:
        self._group.here(index, warp)
        agent = self._group.warps[warp].agent
        assert agent is not None  # there is a shadow, so there are agents
        return agent

    def wait_for_launches(self, index: int, mask: Mask) -> None:
        """griddepcontrol.wait: the launches before are over, and all that they wrote is visible."""
        shadow = self._group.machine.global_shadow
        if shadow is None:
            return
        shadow.wait()
        for number in warps_of(mask):
            agent = self._agent(index, number)
            over = np.zeros_like(agent.clock)
            over[HAPPENED, self._group.cluster.components.launches] = 1
            agent.acquire(over, self._group.lanes(number, mask))

    def fence_async(self, index: int, rows: Sequence[int], mask: Mask) -> None:
        """fence.proxy.async: generic writes up to here become visible to copies and products.

        rows: of the clocks, FENCED for shared memory and GLOBAL for global memory.
        """
        for number in warps_of(mask):
            agent = self._group.warps[number].agent
            for row in rows if agent else ():
                assert agent is not None
                agent.fence_async(row, self._group.lanes(number, mask))


def _lanes_of(mask: Mask, nbytes: int) -> Any:
    """The lane of a warp that accesses each granule; MIXED where lanes may share one."""
    if nbytes < GRANULE:
        return MIXED
    lanes = np.flatnonzero(mask) % WARP
    return np.repeat(lanes, nbytes // GRANULE).astype(np.int8)
