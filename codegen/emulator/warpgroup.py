# SPDX-License-Identifier: Apache-2.0
"""One warpgroup: 128 lanes, their registers, where they are, and which of them run next.

Generated code (see `lower`) calls methods of Warpgroup, and of the objects in it that each carry
out the instructions of one concept, with the index of the instruction first and the lanes that run
it last. A method of a *gate*, an instruction that can hold lanes back, returns the lanes that pass,
or None; it is asked again later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from . import numerics
from .agents import Agent, Some
from .atomics import Atomics
from .bulk_stores import BulkStore, BulkStores, StoreGroup
from .checks import Operation
from .copies import Copies
from .gates import ALIGNED_GROUP
from .lanes import (
    ALL,
    LANES,
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
from .mbarriers import MBarriers
from .polls import Polls
from .products import Products
from .report import Fault, Kind
from .scheduler import Turns
from .tensor_products import TensorProducts
from .tensor_transfers import TensorTransfers
from .thread_barriers import ThreadBarriers
from .transfers import Transfers

if TYPE_CHECKING:
    from .cluster import Cluster, Cta


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
    store_groups: list[StoreGroup] = field(default_factory=list)
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
        self.live: Mask = np.arange(LANES) + LANES * number < cta.threads
        self._born = self.live
        self.warps = [
            Warp(
                number=WARPS * number + warp,
                serial=WARPS * self.serial + warp,
                agent=cluster.agent(WARPS * self.serial + warp),
                registers=machine.initial_registers,
            )
            for warp in range(WARPS)
        ]
        self.strands: dict[int, Mask] = {0: self.live}
        self._starved: Mask = NONE
        self._holds: dict[int, tuple[int, int]] = {}
        """By block, the cluster's progress and the group's moves when it was held back last; 0
        moves where only progress can change that."""
        self._reasons: dict[int, Callable[[], str]] = {}
        self._moves = 1
        self.block = 0
        """The block whose gate is asked."""
        self.transfers = Transfers(self)
        self.atomics = Atomics(self)
        self.polls = Polls(self)
        self.mbarriers = MBarriers(self)
        self.thread_barriers = ThreadBarriers(self)
        self.copies = Copies(self)
        self.bulk_stores = BulkStores(self)
        self.products = Products(self)
        self.tensor_products = TensorProducts(self)
        self.tensor_transfers = TensorTransfers(self)
        if not self.live.all():
            for index, warp in enumerate(self.warps):
                if not self.live[WARP * index]:
                    cluster.barrier.exited.add(warp.serial)

    # --- running ------------------------------------------------------------------------------

    def run(self, turns: Turns) -> int:
        """Runs until everything is held back or the turn is over; returns the blocks run."""
        ran = 0
        for _ in range(turns.length()):
            if not self.strands or not self._step(turns):
                break
            ran += 1
        if self.strands and ran and (staying := turns.staying(warps_of(self.live))):
            chosen = spread([warp in staying for warp in range(WARPS)])
            self.starve(self._starved | chosen)
        return ran

    @property
    def starved(self) -> tuple[int, ...]:
        """The warps that are held back though they may be able to go on."""
        return warps_of(self._starved)

    def starve(self, lanes: Mask) -> None:
        """Holds these lanes back, whole warps and no others, except in `run_starved`."""
        self._starved = lanes if some(lanes) else NONE
        self._holds.clear()

    def release(self, warp: int) -> None:
        """No longer starves this warp."""
        self.starve(self._starved & ~WARP_MASKS[warp])

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
            progress = self.cluster.progress
            if self._holds.get(place) in ((progress, self._moves), (progress, 0)):
                continue  # nothing has changed since it was held back
            running = self._may_run(block, mask, turns)
            if running is None:
                whole = block.gated and not block.aligned and self._starved is NONE
                self._holds[place] = progress, 0 if whole else self._moves
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
            whole = block.aligned < ALIGNED_GROUP or running.tobytes() == mask.tobytes()
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
        self.block = block.index
        passed: Mask | None = self.program.gate(block)(self, self.registers, mask)
        return passed if passed is not None and some(passed) else None

    def _run(self, block: Block, mask: Mask, running: Mask) -> None:
        whole = running is self.live or running.tobytes() == self.live.tobytes()
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
        self._holds.pop(place, None)
        there = self.strands.get(place)
        self.strands[place] = mask if there is None else there | mask

    def _exit(self, mask: Mask) -> None:
        self.live = self.live & ~mask
        self.cluster.progress += 1
        for index in warps_of(mask):
            if not self.live[WARP * index : WARP * (index + 1)].any():
                self.cluster.exit(self, self.warps[index])

    def poll_again(self) -> bool:
        """Lets those load a word once more who wait for it to change; False when there are none."""
        self._holds.clear()
        return self.polls.forget()

    def state(self) -> int:
        """A hash of where the lanes are and of what is in the registers."""
        places = tuple((place, mask.tobytes()) for place, mask in self.strands.items())
        return hash((places, tuple(each.tobytes() for each in self.registers)))

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
            names += self.machine.names.role(warps[0])
            told = self.machine.source(instruction)
            source = f" ({told})" if told else ""
            reason = self._reasons.get(place)
            lines.append(
                f"cta {self.cta.rank} {names} at PTX line {instruction.line}{source}: "
                f"{instruction.name} waits for {reason() if reason else 'its turn'}"
            )
        return lines

    def outstanding(self, warp: Warp) -> list[tuple[int, str]]:
        """What a warp leaves behind when it exits: (PTX line, what)."""
        found = [
            (line, "the warp exits without waiting for this bulk store")
            for line in self.bulk_stores.lines(warp)
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

    # --- for those who carry out instructions ------------------------------------------------

    @property
    def line(self) -> int:
        """The PTX line of the instruction that runs."""
        return self.program.instructions[self.machine.index].line

    def here(self, index: int, warp: int) -> None:
        """Says which instruction of which warp is being executed, for findings."""
        self.machine.index = index
        self.machine.actor = (self.cta.rank, self.warps[warp].number)

    def lanes(self, warp: int, mask: Mask) -> Some:
        """Which lanes of a warp a mask has; None when it has all of them, those that left too."""
        if mask is self._born or mask is ALL:
            return None
        part = mask[WARP * warp : WARP * (warp + 1)]
        born = self._born[WARP * warp : WARP * (warp + 1)]
        return None if part.tobytes() == born.tobytes() else part

    def start(self, warp: int, component: int, mask: Mask) -> Operation | None:
        """What lanes of a warp issue; None when nothing is checked."""
        agent = self.warps[warp].agent
        if agent is None:
            return None
        acting = self.lanes(warp, mask)
        return self.cluster.streams.start(component, [agent], self.line, acting)

    def hold(self, reason: Callable[[], str]) -> None:
        """Says what the lanes that a gate holds back wait for, should they wait for ever."""
        self._reasons[self.block] = reason

    def only(self, warps: Sequence[int], mask: Mask) -> Mask | None:
        """The lanes of these warps, None when there are no such warps."""
        if not warps:
            return None
        return mask & spread([warp in warps for warp in range(WARPS)])

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
        """One lane of each warp among those that run: the schedule's, or else the lowest.

        PTX says only that the same members always elect the same one.
        """
        lanes = mask.reshape(WARPS, WARP)
        chosen = self.machine.leader
        if mask.all():
            return self.machine.elected
        leader = np.where(lanes[:, chosen], chosen, lanes.argmax(axis=1))
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

    # --- values -------------------------------------------------------------------------------

    def saturated(self, index: int, clipped: Mask, dtype: str, mask: Mask) -> None:
        """A conversion to an 8-bit float clipped a number in these lanes: it was not to happen."""
        warps = warps_of(clipped & mask)
        if warps:
            self.here(index, warps[0])
            largest = numerics.LARGEST[dtype]
            self.machine.report(
                Kind.SATURATION,
                f"a number beyond what {dtype} holds is clipped to {largest:g}",
            )

    def miscoded(self, index: int, wrong: Mask, mask: Mask) -> None:
        """In these lanes the low byte of a half was taken for an e4m3 number's code and is none."""
        warps = warps_of(wrong & mask)
        if warps:
            self.here(index, warps[0])
            self.machine.report(
                Kind.SATURATION,
                "a half that is not 1024 to 1150 has no e4m3 number's code in its low byte: "
                "beyond that it is NaN, or wraps around",
            )

    def trap(self, index: int, mask: Mask) -> None:
        """`trap`: the kernel ends with an error where any lane is left."""
        warps = warps_of(mask)
        if warps:
            self.here(index, warps[0])
            raise Fault(Kind.TRAP, "the kernel ends here with an error")

    # --- registers ----------------------------------------------------------------------------

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
