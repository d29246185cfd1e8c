# SPDX-License-Identifier: Apache-2.0
"""One warpgroup: 128 lanes, their registers, where they are, and what their instructions do.

Generated code (see `lower`) calls the methods of Warpgroup with the index of the instruction first
and the lanes that run it last. A method of a *gate*, an instruction that can hold lanes back,
returns the lanes that pass, or None; it is asked again later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .barriers import MBarrier, NamedBarrier
from .checks import HAPPENED, Agent, granules_of
from .copies import BulkStore, Copies
from .gates import ALIGNED_GROUP
from .global_shadow import Place
from .lanes import (
    ALL,
    LANES,
    LEADERS,
    NONE,
    OFFSET_MASK,
    RANK_SHIFT,
    WARP,
    WARP_MASKS,
    WARPS,
    Lanes,
    Mask,
    some,
    spread,
    warps_of,
)
from .lower import Block
from .memory import store_matrices
from .products import Products
from .report import Fault, Kind
from .scheduler import Turns
from .tensor_products import TensorProducts
from .tensor_transfers import TensorTransfers

if TYPE_CHECKING:
    from .machine import Cluster, Cta


@dataclass(eq=False)
class Warp:
    """What each warp of a warpgroup has for itself."""

    number: int
    """In its CTA."""
    serial: int
    """In its cluster: its component of the clocks."""
    agent: Agent | None
    registers: int
    """[per thread] that setmaxnreg left it."""
    open_stores: list[BulkStore] = field(default_factory=list)
    store_groups: list[list[BulkStore]] = field(default_factory=list)
    ticket: int | None = None
    """Generation of the named barrier that it arrived at and waits for."""
    cluster_ticket: int | None = None


class Warpgroup:
    """128 lanes that run generated code together as long as they are at the same place."""

    def __init__(self, cluster: Cluster, cta: Cta, number: int) -> None:
        machine = cluster.machine
        self.machine = machine
        self.cluster = cluster
        self.cta = cta
        self.serial = cta.rank * cta.groups_per_cta + number
        self.program = machine.program
        self.registers = machine.program.poisoned_registers()
        self.special = cta.special_registers(number)
        first = WARPS * number
        threads = cta.threads
        self.live: Mask = np.arange(LANES) + LANES * number < threads
        self.warps = [
            Warp(
                first + warp,
                cta.rank * WARPS * cta.groups_per_cta + first + warp,
                cluster.agent(cta.rank * WARPS * cta.groups_per_cta + first + warp),
                machine.initial_registers,
            )
            for warp in range(WARPS)
        ]
        self.strands: dict[int, Mask] = {0: self.live}
        self._starved: Mask = NONE
        self.phase_complete: Mask = NONE
        self._waits: dict[tuple[int, int, int], int] = {}
        """Numbers the waits that were false, by (block, address, parity)."""
        self._failed = np.zeros(LANES, np.int64)
        """The wait that was false the last time, for each lane; 0: none."""
        self._holds: dict[int, tuple[int, int]] = {}
        self._reasons: dict[int, Callable[[], str]] = {}
        self._moves = 0
        self._block = 0
        self.copies = Copies(self)
        self.products = Products(self)
        self.tensor_products = TensorProducts(self)
        self.tensor_transfers = TensorTransfers(self)
        if not self.live.all():
            for warp in self.warps:
                if not self.live[WARP * (warp.number - first)]:
                    cluster.barrier.exited.add(warp.serial)

    # --- running ------------------------------------------------------------------------------

    def run(self, turns: Turns) -> int:
        """Runs until everything is held back or the turn is over; returns the blocks run."""
        ran = 0
        for _ in range(turns.length()):
            if not self.strands or not self._step(turns):
                break
            ran += 1
        return ran

    def starve(self, lanes: Mask) -> None:
        """Holds these lanes back, whole warps, except in `run_starved`."""
        self._starved = lanes
        self._holds.clear()

    def run_starved(self, turns: Turns) -> bool:
        """Runs one block without regard to who is starved; False when that changes nothing."""
        starved = self._starved
        self.starve(NONE)
        ran = bool(self.strands) and self._step(turns)
        self.starve(starved)
        return ran

    def _step(self, turns: Turns) -> bool:
        """Runs one block of one strand; False when every strand is held back."""
        places = sorted(self.strands)
        first = turns.pick(len(places))
        for place in places[first:] + places[:first]:
            mask = self.strands[place]
            block = self.program.blocks[place]
            now = (self.cluster.progress, self._moves)
            if self._holds.get(place) == now:
                continue  # nothing has changed since it was held back
            running = self._may_run(block, mask, turns)
            if running is None:
                self._holds[place] = now
                continue
            self._holds.pop(place, None)
            self._run(block, mask, running)
            return True
        return False

    def _may_run(self, block: Block, mask: Mask, turns: Turns) -> Mask | None:
        """The lanes of a strand that run its block now."""
        running = mask
        if self._starved is not NONE:
            running = mask & ~self._starved
            whole = block.aligned < ALIGNED_GROUP or bool((running == mask).all())
            if not whole or not some(running):
                return None
        if block.aligned:
            missing = self.live & ~mask
            if some(missing):
                if block.aligned == ALIGNED_GROUP:
                    self._reasons[block.index] = (
                        lambda: "the other warps of its warpgroup"
                    )
                    return None
                apart = missing.reshape(WARPS, WARP).any(axis=1)
                running = running & ~spread(apart)
                if not some(running):
                    self._reasons[block.index] = lambda: "the other lanes of its warp"
                    return None
        if block.gated and block.aligned < ALIGNED_GROUP:
            lone = turns.lone_warp(warps_of(running))
            if lone is not None:
                alone = self._pass(block, running & WARP_MASKS[lone])
                if alone is not None:
                    return alone
        return self._pass(block, running)

    def _pass(self, block: Block, mask: Mask) -> Mask | None:
        """The lanes that the block's gate lets pass."""
        if not block.gated:
            return mask
        self._block = block.index
        passed: Mask | None = self.program.gate(block)(self, self.registers, mask)
        return passed if passed is not None and some(passed) else None

    def _run(self, block: Block, mask: Mask, running: Mask) -> None:
        whole = running is self.live or bool((running == self.live).all())
        program = self.program
        function = program.whole(block) if whole else program.masked(block)
        function(self, self.registers, running)
        self._moves += 1
        self.cluster.ran(self, block, running)
        rest = mask & ~running if running is not mask else NONE
        del self.strands[block.index]
        if rest is not NONE and some(rest):
            self.strands[block.index] = rest
        if block.predicate < 0:
            taken, falls = running, NONE
            if not block.exits and block.target < 0:
                taken, falls = NONE, running
        else:
            predicate = self.registers[block.predicate]
            taken = running & (~predicate if block.negated else predicate)
            falls = running & ~taken
        if taken is not NONE and some(taken):
            if block.exits:
                self._exit(taken)
            else:
                self._arrive(block.target, running if not some(falls) else taken)
        if falls is not NONE and some(falls):
            self._arrive(block.index + 1, running if not some(taken) else falls)

    def _arrive(self, place: int, mask: Mask) -> None:
        if place >= len(self.program.blocks):
            raise Fault(Kind.UNSUPPORTED, "the kernel runs past its last instruction")
        there = self.strands.get(place)
        self.strands[place] = mask if there is None else there | mask

    def _exit(self, mask: Mask) -> None:
        self.live = self.live & ~mask
        self.cluster.progress += 1
        for index in warps_of(mask):
            if not self.live[WARP * index : WARP * (index + 1)].any():
                self.cluster.exit(self, self.warps[index])

    @property
    def line(self) -> int:
        """The PTX line of the instruction that runs."""
        return self.program.instructions[self.machine.index].line

    def waiting(self) -> list[str]:
        """Where each strand is and what it waits for, one line each."""
        lines = []
        for place in sorted(self.strands):
            instruction = self.program.instructions[self.program.blocks[place].begin]
            warps = [
                self.warps[index].number for index in warps_of(self.strands[place])
            ]
            names = (
                f"warp {warps[0]}"
                if len(warps) == 1
                else f"warps {warps[0]} to {warps[-1]}"
            )
            source = f" ({instruction.source})" if instruction.source else ""
            reason = self._reasons.get(place)
            lines.append(
                f"cta {self.cta.rank} {names} at PTX line {instruction.line}{source}: "
                f"{instruction.name} waits for {reason() if reason else 'its turn'}"
            )
        return lines

    def here(self, index: int, warp: int) -> None:
        """Says which instruction of which warp is being executed, for findings."""
        self.machine.index = index
        self.machine.actor = (self.cta.rank, self.warps[warp].number)

    def hold(self, reason: Callable[[], str]) -> None:
        """Says what the lanes that a gate holds back wait for, should they wait for ever."""
        self._reasons[self._block] = reason

    # --- values -------------------------------------------------------------------------------

    def param(self, offset: int, dtype: Any) -> Lanes:
        """A parameter's bytes at an offset, the same for all lanes."""
        return self.machine.param(offset, np.dtype(dtype))

    def shared_address(self, offset: int, dtype: Any) -> Lanes:
        """The address of a shared variable of this CTA."""
        return np.full(LANES, self.cta.rank << RANK_SHIFT | offset, dtype)

    def map_address(self, index: int, address: Lanes, rank: Lanes, mask: Mask) -> Lanes:
        """mapa: the address of the same variable in the CTA of a rank."""
        if (rank[mask] >= len(self.cluster.ctas)).any():
            self.here(index, warps_of(mask)[0])
            raise Fault(
                Kind.OUT_OF_BOUNDS, "mapa to a rank that the cluster does not have"
            )
        local = address & address.dtype.type(OFFSET_MASK)
        result: Lanes = local | rank.astype(address.dtype) << RANK_SHIFT
        return result

    def elect(self, index: int, mask: Mask) -> tuple[Lanes, Mask]:
        """The lowest lane of each warp among those that run."""
        if mask.all():
            return np.zeros(LANES, np.uint32), LEADERS
        lanes = mask.reshape(WARPS, WARP)
        leader = lanes.argmax(axis=1)
        elected = np.zeros((WARPS, WARP), np.bool_)
        elected[np.arange(WARPS), leader] = True
        return np.repeat(leader.astype(np.uint32), WARP), (elected & lanes).reshape(-1)

    def vote_any(self, index: int, predicate: Mask, mask: Mask) -> Mask:
        """Whether the predicate holds in any lane of the warp."""
        return spread((predicate & mask).reshape(WARPS, WARP).any(axis=1))

    def vote_all(self, index: int, predicate: Mask, mask: Mask) -> Mask:
        """Whether the predicate holds in every lane of the warp."""
        return spread((predicate | ~mask).reshape(WARPS, WARP).all(axis=1))

    def vote_ballot(self, index: int, predicate: Mask, mask: Mask) -> Lanes:
        """One bit per lane of the warp."""
        bits = np.packbits(
            (predicate & mask).reshape(WARPS, WARP), axis=1, bitorder="little"
        )
        return np.repeat(bits.view(np.uint32).reshape(-1), WARP)

    # --- memory -------------------------------------------------------------------------------

    def _shared(
        self, addresses: Lanes, offset: int, remote: bool, mask: Mask
    ) -> list[tuple[Cta, NDArray[np.int64], Mask]]:
        """Whose shared memory lanes access, at which offsets, and which lanes that are.

        remote: whether the instruction may access another CTA's, as `.shared::cluster` does.
        """
        wide = addresses.astype(np.int64) + offset
        ranks = wide >> RANK_SHIFT
        places: NDArray[np.int64] = wide & OFFSET_MASK
        if (ranks[mask] == self.cta.rank).all():
            return [(self.cta, places, mask)]
        if not remote:
            raise Fault(Kind.OUT_OF_BOUNDS, "a shared address that is not this CTA's")
        parts = []
        for rank in np.unique(ranks[mask]).tolist():
            cta = self.cluster.locate(rank << RANK_SHIFT)[0]
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
        self.here(index, warps_of(mask)[0] if some(mask) else 0)
        values: list[Lanes] = []
        for cta, addresses, lanes in self._shared(base, offset, remote, mask):
            loaded = cta.shared.load_vector(addresses, width, count, lanes)
            if values:  # of another CTA; what a part leaves out is zero in it
                loaded = [a | b for a, b in zip(values, loaded, strict=True)]
            values = loaded
            shadow = cta.shadow
            if shadow is None:
                continue
            for number in warps_of(lanes):
                agent = self._agent(index, number)
                touched = granules_of(
                    addresses[lanes & WARP_MASKS[number]], width * count
                )
                shadow.read(touched, agent.warp, agent.epoch, agent.clock, "ld.shared")
                self._visit(cta, agent)
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
    ) -> None:
        """st.shared: values of `width` bytes per lane."""
        if not some(mask):
            return
        self.here(index, warps_of(mask)[0])
        for cta, addresses, lanes in self._shared(base, offset, remote, mask):
            cta.shared.store_vector(addresses, width, values, lanes)
            nbytes = width * len(values)
            self._note_writes(index, cta, addresses, nbytes, lanes, "st.shared")

    def _visit(self, cta: Cta, agent: Agent) -> None:
        """Notes an access to another CTA's shared memory: that CTA must stay until then."""
        if cta is not self.cta:
            cta.visits[agent.warp] = (agent.epoch, self.line)

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
        self.here(index, warps_of(mask)[0])
        ((cta, addresses, _),) = self._shared(base, offset, False, mask)
        store_matrices(cta.shared, addresses, values, mask, transpose=trans)
        # Lane 8 m + r names row r of matrix m; the other lanes' addresses are not read.
        rows = mask & (np.arange(LANES) % WARP < 8 * len(values))
        self._note_writes(index, cta, addresses, 16, rows, "stmatrix")

    def _note_writes(
        self,
        index: int,
        cta: Cta,
        addresses: Lanes,
        nbytes: int,
        mask: Mask,
        what: str,
    ) -> None:
        shadow = cta.shadow
        if shadow is None:
            return
        for number in warps_of(mask):
            agent = self._agent(index, number)
            touched = granules_of(addresses[mask & WARP_MASKS[number]], nbytes)
            shadow.write(touched, agent.warp, agent.epoch, agent.clock, self.line, what)
            self._visit(cta, agent)

    def load_global(
        self, index: int, base: Lanes, offset: int, width: int, count: int, mask: Mask
    ) -> list[Lanes]:
        """ld.global: `count` values of `width` bytes per lane."""
        self.here(index, warps_of(mask)[0] if some(mask) else 0)
        addresses = base.astype(np.int64) + offset
        values = self.machine.memory.load_vector(addresses, width, count, mask)
        self._note_global(index, addresses, width * count, mask, stored=False)
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
        self.here(index, warps_of(mask)[0])
        addresses = base.astype(np.int64) + offset
        self.machine.memory.store_vector(addresses, width, values, mask)
        self._note_global(index, addresses, width * len(values), mask, stored=True)

    def _note_global(
        self, index: int, addresses: Lanes, nbytes: int, mask: Mask, *, stored: bool
    ) -> None:
        """Checks what lanes touch of global memory."""
        shadow = self.machine.global_shadow
        if shadow is None:
            return
        note, what = (
            (shadow.write, "st.global") if stored else (shadow.read, "ld.global")
        )
        for number in warps_of(mask):
            agent = self._agent(index, number)
            lanes = mask & WARP_MASKS[number]
            for buffer, _, offsets in self.machine.memory.split(
                addresses, nbytes, lanes
            ):
                place = Place(buffer, offsets // nbytes, nbytes)
                note(place, agent.warp, agent.epoch, agent.clock, self.line, what)

    def _agent(self, index: int, warp: int) -> Agent:
        self.here(index, warp)
        agent = self.warps[warp].agent
        assert agent is not None  # there is a shadow, so there are agents
        return agent

    # --- barriers -----------------------------------------------------------------------------

    def mbarrier_init(
        self, index: int, base: Lanes, offset: int, count: Lanes, mask: Mask
    ) -> None:
        """mbarrier.init by each lane."""
        for lane in np.flatnonzero(mask).tolist():
            warp = self.warps[lane // WARP]
            self.here(index, lane // WARP)
            cta, place = self.cluster.locate(int(base[lane]) + offset)
            cta.shared.check_region(place, 8, 8)
            epoch = warp.agent.epoch if warp.agent else 0
            component = self.cluster.components.loads()
            cta.mbarriers[place] = MBarrier(
                int(count[lane]), warp.serial, epoch, component
            )
            self.cluster.progress += 1

    def mbarrier_invalidate(
        self, index: int, base: Lanes, offset: int, mask: Mask
    ) -> None:
        """mbarrier.inval by each lane."""
        for lane in np.flatnonzero(mask).tolist():
            self.here(index, lane // WARP)
            self.mbarrier(int(base[lane]) + offset, self.warps[lane // WARP])
            cta, place = self.cluster.locate(int(base[lane]) + offset)
            del cta.mbarriers[place]

    def mbarrier(self, address: int, warp: Warp, *, copies: bool = False) -> MBarrier:
        """The mbarrier at an address that a warp, or a copy that it issues, uses."""
        barrier = self.cluster.mbarrier(address)
        if warp.agent is not None:
            known = (
                warp.agent.copies_know_initialisation
                if copies
                else warp.agent.knows_initialisation
            )
            if not known(barrier.initialiser, barrier.initialised):
                who = "the copy" if copies else "this warp"
                self.machine.report(
                    Kind.BARRIER,
                    f"an mbarrier whose initialisation need not be visible to {who} yet",
                )
        return barrier

    def mbarrier_arrive(
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
        for warp in warps_of(mask):
            self.here(index, warp)
            agent = self.warps[warp].agent
            clock = agent.release() if agent else None
            lanes = np.flatnonzero(mask[WARP * warp : WARP * (warp + 1)]) + WARP * warp
            # Together, so that arrivals of one instruction that fall into two phases are too many
            # for the first: who waits for it would otherwise wait for a part of the warp.
            for address in np.unique(base[lanes]).tolist():
                arriving = lanes[base[lanes] == address]
                barrier = self.mbarrier(address + offset, self.warps[warp])
                away = self.cluster.locate(address + offset)[0] is not self.cta
                if away and not remote:
                    raise Fault(
                        Kind.BARRIER,
                        "an mbarrier of another CTA, without .shared::cluster",
                    )
                if away and clock is not None:
                    serial = self.warps[warp].serial
                    epoch = int(clock[HAPPENED, serial])
                    barrier.last_signals[serial] = (epoch, self.line)
                arrivals = _total(count, arriving)
                # An expect_tx alone releases nothing: it only moves the count.
                barrier.arrive(
                    arrivals,
                    _total(transactions, arriving),
                    clock if arrivals else None,
                )
                self.cluster.progress += 1

    def mbarrier_wait(
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
        same = (base == base[first]) & (parity == parity[first])
        if not (mask & ~same).any():
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
        self.here(index, warps[0])
        if parity > 1:
            raise Fault(Kind.BARRIER, f"a wait for parity {parity}")
        barrier = self.cluster.mbarrier(address)
        if self.cluster.locate(address)[0] is not self.cta:
            raise Fault(Kind.BARRIER, "a wait on an mbarrier of another CTA")
        complete = barrier.passed(parity)
        key = (self._block, address, parity)
        wait = self._waits.setdefault(key, len(self._waits) + 1)
        passed = mask
        for number in warps:
            warp = self.warps[number]
            self.here(index, number)
            self.mbarrier(address, warp)
            if complete:
                if warp.agent:
                    warp.agent.acquire(barrier.released)
            elif not polls and (self._failed[mask & WARP_MASKS[number]] == wait).all():
                passed = passed & ~WARP_MASKS[number]
        self._failed[passed] = 0 if complete else wait
        if not complete:

            def reason() -> str:
                return (
                    f"mbarrier {address & OFFSET_MASK:#x} parity {parity} "
                    f"({barrier.pending} of {barrier.count} arrivals and "
                    f"{barrier.transactions} bytes are missing)"
                )

            self.hold(reason)
        self.phase_complete = ALL if complete else NONE
        return passed

    def barrier_sync(
        self, index: int, number: Lanes, threads: Lanes | None, mask: Mask
    ) -> Mask | None:
        """Gate of bar.sync: each warp arrives once, then passes when the barrier opened."""
        warps = warps_of(mask)
        for warp in warps:
            state = self.warps[warp]
            if state.ticket is None:
                self.here(index, warp)
                barrier = self._named(int(number[WARP * warp]))
                state.ticket = self._enter(barrier, warp, threads, waits=True)
        passed = []
        for warp in warps:
            state = self.warps[warp]
            barrier = self._named(int(number[WARP * warp]))
            if state.ticket is not None and barrier.generation > state.ticket:
                state.ticket = None
                if state.agent:
                    state.agent.acquire(barrier.released)
                passed.append(warp)
            else:
                self.hold(
                    lambda barrier=barrier: (  # type: ignore[misc]
                        f"barrier {barrier.number} "
                        f"({barrier.arrived} of {barrier.expected} threads are there)"
                    )
                )
        return self.only(passed, mask)

    def barrier_arrive(
        self, index: int, number: Lanes, threads: Lanes | None, mask: Mask
    ) -> None:
        """bar.arrive: each warp arrives and goes on."""
        for warp in warps_of(mask):
            self.here(index, warp)
            barrier = self._named(int(number[WARP * warp]))
            self._enter(barrier, warp, threads, waits=False)

    def _named(self, number: int) -> NamedBarrier:
        if number > 15:
            raise Fault(Kind.BARRIER, f"barrier {number} of 16")
        return self.cta.named.setdefault(number, NamedBarrier(number))

    def _enter(
        self, barrier: NamedBarrier, warp: int, threads: Lanes | None, *, waits: bool
    ) -> int:
        state = self.warps[warp]
        count = self.cta.threads if threads is None else int(threads[WARP * warp])
        self.cluster.progress += 1
        clock = state.agent.release() if state.agent else None
        return barrier.arrive(count, clock, waits=waits)

    def only(self, warps: list[int], mask: Mask) -> Mask | None:
        """The lanes of these warps, None when there are no such warps."""
        if not warps:
            return None
        return mask & spread([warp in warps for warp in range(WARPS)])

    def cluster_arrive(self, index: int, relaxed: bool, mask: Mask) -> None:
        """barrier.cluster.arrive: each warp arrives and goes on."""
        for number in warps_of(mask):
            warp = self.warps[number]
            self.here(index, number)
            if warp.cluster_ticket is not None:
                raise Fault(
                    Kind.BARRIER, "warp arrives at the cluster barrier without waiting"
                )
            clock = None
            if warp.agent:
                clock = (
                    warp.agent.release_published() if relaxed else warp.agent.release()
                )
            warp.cluster_ticket = self.cluster.barrier.arrive(warp.serial, clock)
            self.cluster.progress += 1

    def cluster_wait(self, index: int, mask: Mask) -> Mask | None:
        """Gate of barrier.cluster.wait."""
        barrier = self.cluster.barrier
        passed = []
        for number in warps_of(mask):
            warp = self.warps[number]
            self.here(index, number)
            if warp.cluster_ticket is None:
                raise Fault(
                    Kind.BARRIER, "warp waits at the cluster barrier without arriving"
                )
            if barrier.generation > warp.cluster_ticket:
                warp.cluster_ticket = None
                if warp.agent:
                    warp.agent.acquire(barrier.released)
                passed.append(number)
        self.hold(
            lambda: (
                "the cluster barrier "
                f"({len(barrier.arrived)} of {barrier.warps} warps are there)"
            )
        )
        return self.only(passed, mask)

    def fence_proxy_async(self, index: int, mask: Mask) -> None:
        """fence.proxy.async: generic writes up to here become visible to copies and products."""
        for number in warps_of(mask):
            agent = self.warps[number].agent
            if agent:
                agent.fence_async()

    def fence_mbarrier_init(self, index: int, mask: Mask) -> None:
        """fence.mbarrier_init: initialisations up to here become visible to the cluster."""
        for number in warps_of(mask):
            agent = self.warps[number].agent
            if agent:
                agent.fence_initialisations()

    def set_max_registers(
        self, index: int, direction: str, count: int, mask: Mask
    ) -> Mask | None:
        """Gate of setmaxnreg: .dec gives registers back, .inc waits until there are enough."""
        if count % 8 or not 24 <= count <= 256:
            self.here(index, warps_of(mask)[0])
            raise Fault(Kind.REGISTERS, f"setmaxnreg of {count} registers")
        passed = []
        for number in warps_of(mask):
            warp = self.warps[number]
            self.here(index, number)
            more = count - warp.registers
            if (more > 0) == (direction == "dec") and more:
                self.machine.report(
                    Kind.REGISTERS,
                    f"setmaxnreg.{direction} from {warp.registers} to {count} registers",
                )
            if WARP * more > self.cta.free_registers:
                continue
            self.cta.free_registers -= WARP * more
            warp.registers = count
            self.cluster.progress += 1
            passed.append(number)
        self.hold(
            lambda: (
                f"{count} registers per thread ({self.cta.free_registers} of the CTA's are free)"
            )
        )
        return self.only(passed, mask)

    def outstanding(self, warp: Warp) -> list[tuple[int, str]]:
        """What a warp leaves behind when it exits: (PTX line, what)."""
        found = [
            (store.line, "the warp exits without waiting for this bulk store")
            for group in [*warp.store_groups, warp.open_stores]
            for store in group
        ]
        untracked = self.tensor_products.untracked(warp)
        if untracked is not None:
            message = "the warp exits with a product that no tcgen05.commit tracks"
            found.append((untracked, message))
        if not self.live.any():
            found += [
                (line, "the warpgroup exits without waiting for this product")
                for line in self.products.lines()
            ]
        return found


def _total(amount: Any, lanes: NDArray[Any]) -> int:
    """Of these lanes; amount: of each lane, or one number for all."""
    if isinstance(amount, int):
        return amount * len(lanes)
    return int(amount[lanes].sum(dtype=np.int64))
