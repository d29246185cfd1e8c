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

from . import numerics, tma, wgmma
from .barriers import MBarrier, NamedBarrier
from .checks import Agent, Clock, Operation, granules_of
from .emitters import ALIGNED_GROUP, LANES, WARP, WARPS, Mma
from .lower import Block
from .memory import SharedMemory, store_matrices
from .report import Fault, Kind
from .scheduler import Turns

if TYPE_CHECKING:
    from .machine import Cluster, Cta

Lanes = NDArray[Any]
Mask = NDArray[np.bool_]

ALL: Mask = np.ones(LANES, np.bool_)
NONE: Mask = np.zeros(LANES, np.bool_)
_LEADERS: Mask = np.arange(LANES) % WARP == 0
_WARP_MASKS = [np.arange(LANES) // WARP == warp for warp in range(WARPS)]
_IN_FLIGHT = np.full(LANES, np.nan, np.float32)
"""What accumulators hold between their product and the wait for it."""

RANK_SHIFT = 24
"""Shared addresses carry the CTA's rank in its cluster above this bit."""
OFFSET_MASK = (1 << RANK_SHIFT) - 1


def _warps_of(mask: Mask) -> list[int]:
    """The warps, 0 to 3, that have a lane in the mask."""
    warps: list[int] = np.flatnonzero(mask.reshape(WARPS, WARP).any(axis=1)).tolist()
    return warps


def _spread(per_warp: Any) -> Mask:
    """One value per warp to one per lane."""
    return np.repeat(np.asarray(per_warp, np.bool_), WARP)


@dataclass(eq=False)
class BulkStore:
    """A TMA store that may still be reading shared memory."""

    operation: Operation | None
    line: int
    done: bool = False


@dataclass(eq=False)
class Accumulator:
    """Registers that products in flight accumulate into, as a matrix [64, N]."""

    slots: tuple[int, ...]
    matrix: Any = None
    in_flight: int = 0


@dataclass(eq=False)
class Product:
    """A matrix product that may still be reading shared memory and registers."""

    accumulator: Accumulator
    operation: Operation | None
    line: int
    done: bool = False


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
    failed_wait: tuple[int, int, int] | None = None
    """(block, address, parity) of the wait that was false the last time."""


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
        self.phase_complete: Mask = NONE
        self._holds: dict[int, tuple[int, int]] = {}
        self._reasons: dict[int, Callable[[], str]] = {}
        self._moves = 0
        self._block = 0
        self._products: list[Product] = []
        self._product_groups: list[list[Product]] = []
        self._accumulators: dict[tuple[int, ...], Accumulator] = {}
        self._retired: Clock | None = None
        """What a wait for the products that are over acquires."""
        self._fenced: list[Any] | None = None
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
        if block.aligned:
            missing = self.live & ~mask
            if missing.any():
                if block.aligned == ALIGNED_GROUP:
                    self._reasons[block.index] = (
                        lambda: "the other warps of its warpgroup"
                    )
                    return None
                apart = missing.reshape(WARPS, WARP).any(axis=1)
                running = mask & ~_spread(apart)
                if not running.any():
                    self._reasons[block.index] = lambda: "the other lanes of its warp"
                    return None
        if block.aligned < ALIGNED_GROUP:
            lone = turns.lone_warp(_warps_of(running))
            if lone is not None:
                alone = self._pass(block, running & _WARP_MASKS[lone])
                if alone is not None:
                    return alone
        return self._pass(block, running)

    def _pass(self, block: Block, mask: Mask) -> Mask | None:
        """The lanes that the block's gate lets pass."""
        if not block.gated:
            return mask
        self._block = block.index
        passed: Mask | None = self.program.gate(block)(self, self.registers, mask)
        return passed if passed is not None and passed.any() else None

    def _run(self, block: Block, mask: Mask, running: Mask) -> None:
        whole = running is self.live or bool((running == self.live).all())
        program = self.program
        function = program.whole(block) if whole else program.masked(block)
        function(self, self.registers, running)
        self._moves += 1
        self.cluster.ran(self, block, running)
        rest = mask & ~running if running is not mask else NONE
        del self.strands[block.index]
        if rest is not NONE and rest.any():
            self.strands[block.index] = rest
        if block.predicate < 0:
            taken, falls = running, NONE
            if not block.exits and block.target < 0:
                taken, falls = NONE, running
        else:
            predicate = self.registers[block.predicate]
            taken = running & (~predicate if block.negated else predicate)
            falls = running & ~taken
        if taken is not NONE and taken.any():
            if block.exits:
                self._exit(taken)
            else:
                self._arrive(block.target, running if not falls.any() else taken)
        if falls is not NONE and falls.any():
            self._arrive(block.index + 1, running if not taken.any() else falls)

    def _arrive(self, place: int, mask: Mask) -> None:
        if place >= len(self.program.blocks):
            raise Fault(Kind.UNSUPPORTED, "the kernel runs past its last instruction")
        there = self.strands.get(place)
        self.strands[place] = mask if there is None else there | mask

    def _exit(self, mask: Mask) -> None:
        self.live = self.live & ~mask
        self.cluster.progress += 1
        for index in _warps_of(mask):
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
                self.warps[index].number for index in _warps_of(self.strands[place])
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

    def _here(self, index: int, warp: int) -> None:
        """Says which instruction of which warp is being executed, for findings."""
        self.machine.index = index
        self.machine.actor = (self.cta.rank, self.warps[warp].number)

    def _hold(self, reason: Callable[[], str]) -> None:
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
            self._here(index, _warps_of(mask)[0])
            raise Fault(
                Kind.OUT_OF_BOUNDS, "mapa to a rank that the cluster does not have"
            )
        result: Lanes = (address & np.uint32(OFFSET_MASK)) | (
            rank << np.uint32(RANK_SHIFT)
        )
        return result

    def elect(self, index: int, mask: Mask) -> tuple[Lanes, Mask]:
        """The lowest lane of each warp among those that run."""
        if mask.all():
            return np.zeros(LANES, np.uint32), _LEADERS
        lanes = mask.reshape(WARPS, WARP)
        leader = lanes.argmax(axis=1)
        elected = np.zeros((WARPS, WARP), np.bool_)
        elected[np.arange(WARPS), leader] = True
        return np.repeat(leader.astype(np.uint32), WARP), (elected & lanes).reshape(-1)

    def vote_any(self, index: int, predicate: Mask, mask: Mask) -> Mask:
        """Whether the predicate holds in any lane of the warp."""
        return _spread((predicate & mask).reshape(WARPS, WARP).any(axis=1))

    def vote_all(self, index: int, predicate: Mask, mask: Mask) -> Mask:
        """Whether the predicate holds in every lane of the warp."""
        return _spread((predicate | ~mask).reshape(WARPS, WARP).all(axis=1))

    def vote_ballot(self, index: int, predicate: Mask, mask: Mask) -> Lanes:
        """One bit per lane of the warp."""
        bits = np.packbits(
            (predicate & mask).reshape(WARPS, WARP), axis=1, bitorder="little"
        )
        return np.repeat(bits.view(np.uint32).reshape(-1), WARP)

    # --- memory -------------------------------------------------------------------------------

    def _shared(self, addresses: Lanes, offset: int, mask: Mask) -> NDArray[np.int64]:
        """Lanes' offsets in this CTA's shared memory."""
        wide = addresses.astype(np.int64) + offset
        rank = wide >> RANK_SHIFT
        if (rank[mask] != self.cta.rank).any():
            raise Fault(Kind.OUT_OF_BOUNDS, "a shared address that is not this CTA's")
        local: NDArray[np.int64] = wide & OFFSET_MASK
        return local

    def load_shared(
        self, index: int, base: Lanes, offset: int, width: int, count: int, mask: Mask
    ) -> list[Lanes]:
        """ld.shared: `count` values of `width` bytes per lane."""
        self._here(index, _warps_of(mask)[0] if mask.any() else 0)
        addresses = self._shared(base, offset, mask)
        values = self.cta.shared.load_vector(addresses, width, count, mask)
        shadow = self.cta.shadow
        if shadow is not None:
            for number in _warps_of(mask):
                agent = self._agent(index, number)
                lanes = addresses[mask & _WARP_MASKS[number]]
                touched = granules_of(lanes, width * count)
                shadow.read(touched, agent.warp, agent.epoch, agent.clock, "ld.shared")
        return values

    def store_shared(
        self,
        index: int,
        base: Lanes,
        offset: int,
        width: int,
        values: Sequence[Lanes],
        mask: Mask,
    ) -> None:
        """st.shared: values of `width` bytes per lane."""
        if not mask.any():
            return
        self._here(index, _warps_of(mask)[0])
        addresses = self._shared(base, offset, mask)
        self.cta.shared.store_vector(addresses, width, values, mask)
        self._note_writes(index, addresses, width * len(values), mask, "st.shared")

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
        if not mask.any():
            return
        self._here(index, _warps_of(mask)[0])
        addresses = self._shared(base, offset, mask)
        store_matrices(self.cta.shared, addresses, values, mask, transpose=trans)
        # Lane 8 m + r names row r of matrix m; the other lanes' addresses are not read.
        rows = mask & (np.arange(LANES) % WARP < 8 * len(values))
        self._note_writes(index, addresses, 16, rows, "stmatrix")

    def _note_writes(
        self, index: int, addresses: Lanes, nbytes: int, mask: Mask, what: str
    ) -> None:
        shadow = self.cta.shadow
        if shadow is None:
            return
        for number in _warps_of(mask):
            agent = self._agent(index, number)
            touched = granules_of(addresses[mask & _WARP_MASKS[number]], nbytes)
            shadow.write(touched, agent.warp, agent.epoch, agent.clock, self.line, what)

    def load_global(
        self, index: int, base: Lanes, offset: int, width: int, count: int, mask: Mask
    ) -> list[Lanes]:
        """ld.global: `count` values of `width` bytes per lane."""
        self._here(index, _warps_of(mask)[0] if mask.any() else 0)
        addresses = base.astype(np.int64) + offset
        return self.machine.memory.load_vector(addresses, width, count, mask)

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
        if not mask.any():
            return
        self._here(index, _warps_of(mask)[0])
        addresses = base.astype(np.int64) + offset
        self.machine.memory.store_vector(addresses, width, values, mask)

    def _agent(self, index: int, warp: int) -> Agent:
        self._here(index, warp)
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
            self._here(index, lane // WARP)
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
            self._here(index, lane // WARP)
            self._mbarrier(int(base[lane]) + offset, self.warps[lane // WARP])
            cta, place = self.cluster.locate(int(base[lane]) + offset)
            del cta.mbarriers[place]

    def _mbarrier(self, address: int, warp: Warp, *, copies: bool = False) -> MBarrier:
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
        mask: Mask,
    ) -> None:
        """mbarrier.arrive, .arrive.expect_tx and .expect_tx by each lane.

        count and transactions are lanes, or one number for all.
        """
        lanes = np.flatnonzero(mask)
        if not lanes.size:
            return
        clocks = {}
        for number in _warps_of(mask):
            agent = self.warps[number].agent
            clocks[number] = agent.release() if agent else None
        for lane in lanes.tolist():
            warp = lane // WARP
            self._here(index, warp)
            barrier = self._mbarrier(int(base[lane]) + offset, self.warps[warp])
            arrivals = count if isinstance(count, int) else int(count[lane])
            expected = (
                transactions
                if isinstance(transactions, int)
                else int(transactions[lane])
            )
            # An expect_tx alone releases nothing: it only moves the count.
            barrier.arrive(arrivals, expected, clocks[warp] if arrivals else None)
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
        warps = _warps_of(mask)
        self._here(index, warps[0])
        if parity > 1:
            raise Fault(Kind.BARRIER, f"a wait for parity {parity}")
        barrier = self.cluster.mbarrier(address)
        if self.cluster.locate(address)[0] is not self.cta:
            raise Fault(Kind.BARRIER, "a wait on an mbarrier of another CTA")
        complete = barrier.passed(parity)
        key = (self._block, address, parity)
        passed = mask
        for number in warps:
            warp = self.warps[number]
            self._here(index, number)
            self._mbarrier(address, warp)
            if complete:
                warp.failed_wait = None
                if warp.agent:
                    warp.agent.acquire(barrier.released)
            elif polls or warp.failed_wait != key:
                warp.failed_wait = key
            else:
                passed = passed & ~_WARP_MASKS[number]
        if not complete:

            def reason() -> str:
                return (
                    f"mbarrier {address & OFFSET_MASK:#x} parity {parity} "
                    f"({barrier.pending} of {barrier.count} arrivals and "
                    f"{barrier.transactions} bytes are missing)"
                )

            self._hold(reason)
        self.phase_complete = ALL if complete else NONE
        return passed

    def barrier_sync(
        self, index: int, number: Lanes, threads: Lanes | None, mask: Mask
    ) -> Mask | None:
        """Gate of bar.sync: each warp arrives once, then passes when the barrier opened."""
        warps = _warps_of(mask)
        for warp in warps:
            state = self.warps[warp]
            if state.ticket is None:
                self._here(index, warp)
                barrier = self._named(int(number[WARP * warp]))
                state.ticket = self._enter(barrier, warp, threads)
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
                self._hold(
                    lambda barrier=barrier: (  # type: ignore[misc]
                        f"barrier {barrier.number} "
                        f"({barrier.arrived} of {barrier.expected} threads are there)"
                    )
                )
        return self._only(passed, mask)

    def barrier_arrive(
        self, index: int, number: Lanes, threads: Lanes | None, mask: Mask
    ) -> None:
        """bar.arrive: each warp arrives and goes on."""
        for warp in _warps_of(mask):
            self._here(index, warp)
            self._enter(self._named(int(number[WARP * warp])), warp, threads)

    def _named(self, number: int) -> NamedBarrier:
        if number > 15:
            raise Fault(Kind.BARRIER, f"barrier {number} of 16")
        return self.cta.named.setdefault(number, NamedBarrier(number))

    def _enter(self, barrier: NamedBarrier, warp: int, threads: Lanes | None) -> int:
        state = self.warps[warp]
        count = self.cta.threads if threads is None else int(threads[WARP * warp])
        self.cluster.progress += 1
        clock = state.agent.release() if state.agent else None
        return barrier.arrive(count, clock)

    def _only(self, warps: list[int], mask: Mask) -> Mask | None:
        if not warps:
            return None
        return mask & _spread([warp in warps for warp in range(WARPS)])

    def cluster_arrive(self, index: int, relaxed: bool, mask: Mask) -> None:
        """barrier.cluster.arrive: each warp arrives and goes on."""
        for number in _warps_of(mask):
            warp = self.warps[number]
            self._here(index, number)
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
        for number in _warps_of(mask):
            warp = self.warps[number]
            self._here(index, number)
            if warp.cluster_ticket is None:
                raise Fault(
                    Kind.BARRIER, "warp waits at the cluster barrier without arriving"
                )
            if barrier.generation > warp.cluster_ticket:
                warp.cluster_ticket = None
                if warp.agent:
                    warp.agent.acquire(barrier.released)
                passed.append(number)
        self._hold(
            lambda: (
                "the cluster barrier "
                f"({len(barrier.arrived)} of {barrier.warps} warps are there)"
            )
        )
        return self._only(passed, mask)

    def fence_proxy_async(self, index: int, mask: Mask) -> None:
        """fence.proxy.async: generic writes up to here become visible to copies and products."""
        for number in _warps_of(mask):
            agent = self.warps[number].agent
            if agent:
                agent.fence_async()

    def fence_mbarrier_init(self, index: int, mask: Mask) -> None:
        """fence.mbarrier_init: initialisations up to here become visible to the cluster."""
        for number in _warps_of(mask):
            agent = self.warps[number].agent
            if agent:
                agent.fence_initialisations()

    def set_max_registers(
        self, index: int, direction: str, count: int, mask: Mask
    ) -> Mask | None:
        """Gate of setmaxnreg: .dec gives registers back, .inc waits until there are enough."""
        if count % 8 or not 24 <= count <= 256:
            self._here(index, _warps_of(mask)[0])
            raise Fault(Kind.REGISTERS, f"setmaxnreg of {count} registers")
        passed = []
        for number in _warps_of(mask):
            warp = self.warps[number]
            self._here(index, number)
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
        self._hold(
            lambda: (
                f"{count} registers per thread ({self.cta.free_registers} of the CTA's are free)"
            )
        )
        return self._only(passed, mask)

    # --- copies -------------------------------------------------------------------------------

    def tensor_load(
        self,
        index: int,
        base: Lanes,
        offset: int,
        described: Lanes,
        coordinates: Sequence[Lanes],
        barrier_base: Lanes,
        barrier_offset: int,
        targets: Lanes | None,
        mask: Mask,
    ) -> None:
        """cp.async.bulk.tensor into shared memory, by each lane."""
        for lane in np.flatnonzero(mask).tolist():
            warp = self.warps[lane // WARP]
            self._here(index, lane // WARP)
            cta, place = self.cluster.locate(int(base[lane]) + offset)
            owner, barrier_place = self.cluster.locate(
                int(barrier_base[lane]) + barrier_offset
            )
            tensor_map = self.machine.tensor_map(int(described[lane]))
            where = [int(axis[lane]) for axis in coordinates]
            if targets is None:
                receivers = [(cta, owner)]
            else:
                ranks = self._ranks(int(targets[lane]))
                receivers = [
                    (self.cluster.ctas[rank], self.cluster.ctas[rank]) for rank in ranks
                ]
            for _, signalled in receivers:
                self._mbarrier(
                    signalled.rank << RANK_SHIFT | barrier_place, warp, copies=True
                )
            barrier = self.cluster.mbarrier(owner.rank << RANK_SHIFT | barrier_place)
            operation = self._issue_copy(warp, barrier.component)
            self.machine.count("tensor loads", 1)
            self.cluster.pending.load(
                self._load_work(
                    index,
                    lane // WARP,
                    tensor_map,
                    where,
                    place,
                    barrier_place,
                    receivers,
                    operation,
                )
            )

    def _ranks(self, bits: int) -> list[int]:
        count = len(self.cluster.ctas)
        if not bits or bits >> count:
            raise Fault(
                Kind.TMA, f"a multicast mask of {bits:#x} in a cluster of {count}"
            )
        return [rank for rank in range(count) if bits >> rank & 1]

    def _issue_copy(self, warp: Warp, component: int) -> Operation | None:
        if warp.agent is None:
            return None
        return self.cluster.streams.start(component, [warp.agent], self.line)

    def _load_work(
        self,
        index: int,
        number: int,
        tensor_map: tma.TensorMap,
        coordinates: list[int],
        place: int,
        barrier_place: int,
        receivers: list[tuple[Cta, Cta]],
        operation: Operation | None,
    ) -> Callable[[], None]:
        def complete() -> None:
            self._here(index, number)
            memories = [cta.shared for cta, _ in receivers]
            nbytes, touched = tma.load(
                tensor_map, coordinates, self.machine.memory, memories, place
            )
            self.machine.count("tensor load bytes", nbytes)
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
                barrier = self.cluster.mbarrier(
                    signalled.rank << RANK_SHIFT | barrier_place
                )
                barrier.complete(nbytes, operation.clock if operation else None)
            self.cluster.progress += 1

        return complete

    def tensor_store(
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
        issued = set()
        for lane in np.flatnonzero(mask).tolist():
            warp = self.warps[lane // WARP]
            self._here(index, lane // WARP)
            where = tuple(int(axis[lane]) for axis in coordinates)
            key = (warp.number, int(described[lane]), int(base[lane]), where)
            if key in issued:
                continue
            issued.add(key)
            tensor_map = self.machine.tensor_map(int(described[lane]))
            cta, place = self.cluster.locate(int(base[lane]) + offset)
            if cta is not self.cta:
                raise Fault(Kind.TMA, "a TMA store from another CTA's shared memory")
            operation = self._issue_copy(
                warp, self.cluster.components.stores(warp.serial)
            )
            store = BulkStore(operation, self.line)
            warp.open_stores.append(store)
            self.machine.count("tensor stores", 1)
            self.cluster.pending.store(
                self._store_work(index, lane // WARP, tensor_map, where, place, store)
            )

    def _store_work(
        self,
        index: int,
        number: int,
        tensor_map: tma.TensorMap,
        coordinates: tuple[int, ...],
        place: int,
        store: BulkStore,
    ) -> Callable[[], None]:
        def complete() -> None:
            self._here(index, number)
            touched = tma.store(
                tensor_map, coordinates, self.machine.memory, self.cta.shared, place
            )
            operation, shadow = store.operation, self.cta.shadow
            if operation is not None and shadow is not None:
                shadow.read(
                    slice(touched.start // 4, -(-touched.stop // 4)),
                    operation.component,
                    operation.epoch,
                    operation.clock,
                    "TMA store",
                )
            store.done = True
            self.cluster.progress += 1

        return complete

    def bulk_commit(self, index: int, mask: Mask) -> None:
        """cp.async.bulk.commit_group, one group per warp."""
        for number in _warps_of(mask):
            warp = self.warps[number]
            warp.store_groups.append(warp.open_stores)
            warp.open_stores = []

    def bulk_wait(self, index: int, count: int, read: bool, mask: Mask) -> Mask | None:
        """Gate of cp.async.bulk.wait_group: at most `count` groups of the warp are in flight.

        A store has read and written at the same moment here, so `.read` makes no difference. Who
        passes knows that the reads are over: the stores' clocks are acquired.
        """
        passed = []
        for number in _warps_of(mask):
            warp = self.warps[number]
            over = warp.store_groups[: len(warp.store_groups) - count]
            if all(store.done for group in over for store in group):
                for group in over:
                    for store in group:
                        if warp.agent and store.operation:
                            warp.agent.acquire(store.operation.clock)
                del warp.store_groups[: len(over)]
                passed.append(number)
        self._hold(lambda: "its bulk stores")
        return self._only(passed, mask)

    # --- matrix products ----------------------------------------------------------------------

    def wgmma_fence(self, index: int, mask: Mask) -> None:
        """wgmma.fence: registers as they are now may be read by products."""
        self._fenced = self.registers.copy()

    def wgmma(self, index: int, a: Any, b: Lanes, scale_d: Mask, mask: Mask) -> None:
        """wgmma.mma_async of the whole warpgroup: issues the product."""
        self._here(index, 0)
        mma = self.program.mmas[index]
        accumulator = self._accumulator(mma)
        operation = None
        if self.cta.shadow is not None:
            agents = [warp.agent for warp in self.warps if warp.agent is not None]
            component = self.cluster.components.products(self.serial)
            operation = self.cluster.streams.start(component, agents, self.line)
        product = Product(accumulator, operation, self.line)
        self._products.append(product)
        accumulate = bool(scale_d[0])
        if (not mma.a_registers and (a != a[0]).any()) or (b != b[0]).any():
            raise Fault(Kind.WGMMA, "a matrix descriptor that differs between lanes")
        first = a if mma.a_registers else int(a[0])
        work = self._product_work(index, mma, first, int(b[0]), accumulate, product)
        self.machine.count("products", 1)
        self.cluster.pending.product(self.serial, work)

    def _accumulator(self, mma: Mma) -> Accumulator:
        """The accumulator of a product that is being issued; checks its registers' fence."""
        fenced, registers = self._fenced, self.registers
        accumulator = self._accumulators.get(mma.accumulators)
        touched = mma.a_registers if accumulator else mma.a_registers + mma.accumulators
        if fenced is None or any(
            registers[slot] is not fenced[slot] for slot in touched
        ):
            self.machine.report(
                Kind.WGMMA,
                "registers of the product were written after the last wgmma.fence",
            )
        if accumulator is None:
            busy = {slot for other in self._accumulators for slot in other}
            if not busy.isdisjoint(mma.accumulators):
                raise Fault(
                    Kind.WGMMA, "accumulators overlap those of a product in flight"
                )
            accumulator = Accumulator(mma.accumulators)
            accumulator.matrix = [registers[slot] for slot in mma.accumulators]
            for slot in mma.accumulators:
                registers[slot] = _IN_FLIGHT
            self._accumulators[mma.accumulators] = accumulator
        accumulator.in_flight += 1
        return accumulator

    def _product_work(
        self, index: int, mma: Mma, a: Any, b: int, accumulate: bool, product: Product
    ) -> Callable[[], None]:
        held = [self.registers[slot] for slot in mma.a_registers]

        def complete() -> None:
            self._here(index, 0)
            if any(
                self.registers[s] is not h
                for s, h in zip(mma.a_registers, held, strict=True)
            ):
                self.machine.report(
                    Kind.WGMMA,
                    "A's registers were written while the product was in flight",
                )
            memory = self.cta.shared
            if mma.a_registers:
                left = wgmma.fragment_a(a, mma.dtype_a)
            else:
                left = self._operand(
                    memory, a, wgmma.ROWS, mma.dtype_a, mma.transpose_a, mma, product
                )
            right = self._operand(
                memory, b, mma.n, mma.dtype_b, mma.transpose_b, mma, product
            )
            result = wgmma.product(
                left,
                right,
                scale_a=-1 if mma.negate_a else 1,
                scale_b=-1 if mma.negate_b else 1,
            )
            accumulator = product.accumulator
            if accumulate:
                if isinstance(accumulator.matrix, list):
                    accumulator.matrix = wgmma.accumulator_matrix(accumulator.matrix)
                with np.errstate(all="ignore"):
                    result = accumulator.matrix + result
            accumulator.matrix = result
            accumulator.in_flight -= 1
            product.done = True
            self.cluster.progress += 1

        return complete

    def _operand(
        self,
        memory: SharedMemory,
        descriptor: int,
        rows: int,
        dtype: str,
        transposed: bool,
        mma: Mma,
        product: Product,
    ) -> Any:
        """A matrix in shared memory, [rows, k]; the read is checked."""
        operation, shadow = product.operation, self.cta.shadow
        if operation is not None and shadow is not None:
            size = numerics.ELEMENT_SIZE[dtype]
            words = wgmma.shared_words(descriptor, rows, mma.k, size, transposed)
            if 4 * int(words[-1]) >= memory.size:
                raise Fault(
                    Kind.OUT_OF_BOUNDS, "a matrix that reaches beyond shared memory"
                )
            shadow.read(
                words, operation.component, operation.epoch, operation.clock, "wgmma"
            )
        return wgmma.gather(memory, descriptor, rows, mma.k, dtype, transposed)

    def wgmma_commit(self, index: int, mask: Mask) -> None:
        """wgmma.commit_group."""
        self._product_groups.append(self._products)
        self._products = []

    def wgmma_wait(self, index: int, count: int, mask: Mask) -> Mask | None:
        """Gate of wgmma.wait_group: at most `count` groups are in flight.

        A product is of all four warps, so what one warp sees complete is complete for all.
        """
        groups = self._product_groups
        over = groups[: max(0, len(groups) - count)]
        if not all(product.done for group in over for product in group):
            self._hold(lambda: "its matrix products")
            return None
        self._retire(over)
        for number in _warps_of(mask):
            agent = self.warps[number].agent
            if agent:
                agent.acquire(self._retired)
        return mask

    def _retire(self, groups: list[list[Product]]) -> None:
        """Gives accumulators of complete products back to the registers."""
        kept = self._product_groups[len(groups) :]
        running = {
            id(p.accumulator) for group in [*kept, self._products] for p in group
        }
        for group in groups:
            for product in group:
                accumulator = product.accumulator
                if (
                    id(accumulator) in running
                    or accumulator.slots not in self._accumulators
                ):
                    continue
                del self._accumulators[accumulator.slots]
                values = wgmma.accumulator_registers(
                    np.ascontiguousarray(accumulator.matrix)
                )
                for slot, value in zip(accumulator.slots, values, strict=True):
                    self.registers[slot] = value.view(np.float32)
        for group in groups:
            if group and group[-1].operation:
                self._retired = group[-1].operation.clock  # products complete in order
        self._product_groups = kept

    def outstanding(self, warp: Warp) -> list[tuple[int, str]]:
        """What a warp leaves behind when it exits: (PTX line, what)."""
        found = [
            (store.line, "the warp exits without waiting for this bulk store")
            for group in [*warp.store_groups, warp.open_stores]
            for store in group
        ]
        groups = [*self._product_groups, self._products]
        if not self.live.any():
            found += [
                (product.line, "the warpgroup exits without waiting for this product")
                for group in groups
                for product in group
            ]
        return found
