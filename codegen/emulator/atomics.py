# SPDX-License-Identifier: Apache-2.0
"""Atomic and strong accesses to global memory as lanes use them, and what these hand over.

A release hands over what its lanes know, to who acquires the word (see `knowledge`). Additions do
not end what a release has begun: who acquires their sum acquires what every one of them released. A
fence makes of a relaxed store or addition after it a release, of a relaxed load before it an
acquisition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .additions import ROUNDED
from .agents import Agent
from .checks import HAPPENED
from .knowledge import NOTHING, Known, joined
from .lanes import WARP_MASKS, Lanes, Mask, some, warps_of

if TYPE_CHECKING:
    from .warpgroup import Warpgroup


class Atomics:
    """What these instructions do; generated code calls the public methods."""

    def __init__(self, group: Warpgroup) -> None:
        self._group = group
        self._fenced: dict[int, tuple[Mask, Known]] = {}
        """By warp, the lanes of its last fence, and what they knew then."""
        self._loaded: dict[int, list[tuple[Mask, Known]]] = {}
        """By warp, what its lanes loaded without acquiring it."""

    def add(
        self,
        index: int,
        base: Lanes,
        offset: int,
        kind: str,
        values: Sequence[Lanes],
        acquires: bool,
        releases: bool,
        mask: Mask,
    ) -> list[Lanes]:
        """red.add and atom.add: a value of a PTX type per lane to each of neighbouring words.

        Lanes take their turns as the schedule says. Returns what was there before.
        """
        self._group.here(index, warps_of(mask)[0] if some(mask) else 0)
        machine = self._group.machine
        addresses = base.astype(np.int64) + offset
        found = machine.add_lanes(self._group.cta, addresses, kind, values, mask)
        machine.stir()
        if (shadow := machine.global_shadow) is not None:
            nbytes = values[0].itemsize * len(values)
            what = machine.program.instructions[index].opcode
            note = partial(shadow.reduce, rounds=kind in ROUNDED)
            self._group.transfers.note_global(
                index, addresses, nbytes, mask, note, what
            )
        if machine.program.orders and (kind not in ROUNDED or acquires or releases):
            self._read(addresses, acquires, mask)
            self._written(addresses, releases, mask, adds=True)
        return found

    def load(
        self,
        index: int,
        base: Lanes,
        offset: int,
        width: int,
        acquires: bool,
        mask: Mask,
    ) -> Lanes:
        """ld.relaxed and ld.acquire: a value of `width` bytes per lane."""
        self._group.here(index, warps_of(mask)[0] if some(mask) else 0)
        addresses = base.astype(np.int64) + offset
        (value,) = self._group.machine.memory.load(addresses, width, 1, mask)
        if (shadow := self._group.machine.global_shadow) is not None:
            note, what = shadow.read_strongly, "ld"
            self._group.transfers.note_global(index, addresses, width, mask, note, what)
        self._read(addresses, acquires, mask)
        return value

    def store(
        self,
        index: int,
        base: Lanes,
        offset: int,
        width: int,
        value: Lanes,
        releases: bool,
        mask: Mask,
    ) -> None:
        """st.relaxed and st.release: a value of `width` bytes per lane."""
        if not some(mask):
            return
        self._group.here(index, warps_of(mask)[0])
        addresses, machine = base.astype(np.int64) + offset, self._group.machine
        machine.store_lanes(self._group.cta, addresses, width, [value], mask)
        machine.stir()
        if (shadow := machine.global_shadow) is not None:
            note, what = shadow.write_strongly, "st"
            self._group.transfers.note_global(index, addresses, width, mask, note, what)
        self._written(addresses, releases, mask, adds=False)

    def fence(self, index: int, mask: Mask) -> None:
        """fence.acq_rel and fence.sc: what was loaded before is acquired, what is known is held."""
        for number, agent in self._agents(mask):
            lanes = mask & WARP_MASKS[number]
            for loaded, known in self._loaded.pop(number, []):
                self._gain(number, agent, known, loaded & lanes)
            self._fenced[number] = lanes, self._known(number, agent, lanes)

    # --- what words hand over ----------------------------------------------------------------

    def _agents(self, mask: Mask) -> Iterator[tuple[int, Agent]]:
        """The warps that have lanes in a mask, and what they know; none when nothing is checked."""
        for number in warps_of(mask):
            agent = self._group.warps[number].agent
            if agent is not None:
                yield number, agent

    def _read(self, addresses: NDArray[np.int64], acquires: bool, mask: Mask) -> None:
        """Lanes have read words, and acquire what was released to them."""
        released = self._group.machine.released
        for number, agent in self._agents(mask) if released else ():
            lanes = mask & WARP_MASKS[number]
            for address in np.unique(addresses[lanes]).tolist():
                known = released.get(address)
                if known is None:
                    continue
                chosen = lanes & (addresses == address)
                if acquires:
                    self._gain(number, agent, known, chosen)
                else:
                    self._loaded.setdefault(number, []).append((chosen, known))

    def _written(
        self,
        addresses: NDArray[np.int64],
        releases: bool,
        mask: Mask,
        *,
        adds: bool,
    ) -> None:
        """Lanes have written words, or added to them."""
        released = self._group.machine.released
        for number, agent in self._agents(mask):
            lanes = mask & WARP_MASKS[number]
            known = NOTHING
            if releases:
                known = self._known(number, agent, lanes)
            elif number in self._fenced and not some(lanes & ~self._fenced[number][0]):
                known = self._fenced[number][1]
            for address in np.unique(addresses[lanes]).tolist():
                before = released.pop(address, NOTHING) if adds else NOTHING
                if handed := joined(before, known):
                    released[address] = handed
                elif not adds:
                    released.pop(address, None)

    def _known(self, number: int, agent: Agent, lanes: Mask) -> Known:
        """What lanes of a warp know, of their own cluster and of others."""
        cluster = self._group.cluster
        clock = agent.release(self._group.lanes(number, lanes))
        others = cluster.knowledge.of(cluster.number, cluster.components, clock)
        return joined(others, {cluster.number: clock})

    def _gain(self, number: int, agent: Agent, known: Known, lanes: Mask) -> None:
        """Lanes of a warp learn what was handed over."""
        if not some(lanes):
            return
        cluster, acting = self._group.cluster, self._group.lanes(number, lanes)
        others = {key: clock for key, clock in known.items() if key != cluster.number}
        clock: Any = np.zeros_like(agent.clock)
        if others:
            warp = self._group.warps[number].serial
            epoch = cluster.knowledge.gain(cluster.number, warp, others)
            clock[HAPPENED, cluster.components.gains.start + warp] = epoch
        if (own := known.get(cluster.number)) is not None:
            np.maximum(clock, own, out=clock)
        agent.acquire(clock, acting)
