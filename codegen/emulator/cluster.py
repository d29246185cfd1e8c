# SPDX-License-Identifier: Apache-2.0
"""A cluster as it runs: its CTAs with their memories and barriers, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .agents import Agent
from .barriers import ClusterBarrier, MBarrier, NamedBarrier
from .checks import GRANULE, HAPPENED, SEEN, Components, Shadow, Streams
from .lanes import (
    ALL,
    LANES,
    NONE,
    OFFSET_MASK,
    RANK_SHIFT,
    WARP,
    WARP_MASKS,
    WARPS,
    warps_of,
)
from .lower import Block
from .memory import SharedMemory
from .report import Event, Fault, Kind
from .scheduler import Order, Pending, Turns
from .tensor_memory import GRANULES, TensorMemory
from .timeline import most_telling
from .warpgroup import Warp, Warpgroup

if TYPE_CHECKING:
    from .machine import Machine

LONGEST_POLLING = 100_000
"""[warp instructions] of such silence as below after which late work completes and a victim is let
go though somebody can go on: it may be polling for what they do."""
LONGEST_SILENCE = 1_000_000
"""[warp instructions] of a cluster without an arrival, a completed copy or product or an exit: then
it is called one. Seconds of our time, and far more than lies between two of these."""


class Cta:
    """One CTA: its shared memory and the barriers in it."""

    def __init__(
        self, cluster: Cluster, rank: int, index: tuple[int, int, int]
    ) -> None:
        launch = cluster.machine.launch
        program = cluster.machine.program
        self.cluster = cluster
        self.rank = rank
        self.index = index
        self.block = launch.block
        self.threads = int(np.prod(launch.block))
        self.groups_per_cta = -(-self.threads // LANES)
        size = program.static_shared_bytes + launch.smem_bytes
        self.shared = SharedMemory(size)
        self.shadow: Shadow | None = None
        if cluster.machine.checks:
            granules = -(-size // GRANULE)
            self.shadow = Shadow(
                *(granules, cluster.components, cluster.machine.report),
                tile=lambda granule: cluster.machine.names.tile(GRANULE * granule),
            )
        self.tensor_memory = TensorMemory()
        self.tensor_shadow: Shadow | None = None
        if cluster.machine.checks and program.tensor:
            self.tensor_shadow = Shadow(
                GRANULES,
                cluster.components,
                cluster.machine.report,
                space="tensor memory",
                readers=cluster.components.tensor_readers,
                row=SEEN,
            )
        self.mbarriers: dict[int, MBarrier] = {}
        self.visits: dict[int, tuple[int, int]] = {}
        """Clock component of each warp of another CTA that accessed this CTA's shared memory, to
        the epoch and PTX line of the last access: it must happen before the CTA exits."""
        self.named: dict[int, NamedBarrier] = {}
        warps = -(-self.threads // WARP)
        self.free_registers = 0
        """Those that setmaxnreg gave back: a CTA has what its launch gave it, not the SM's rest."""
        self.warps_left = warps
        self.groups: list[Warpgroup] = []

    @property
    def exited(self) -> bool:
        """Whether none of its warps is left."""
        return self.warps_left == 0

    def special_registers(self, group: int) -> dict[str, NDArray[np.uint32]]:
        """Special registers of a warpgroup's lanes, by their names without the `%`."""
        launch = self.cluster.machine.launch
        grid, size = launch.grid, launch.cluster

        def same(value: int) -> NDArray[np.uint32]:
            return np.full(LANES, value, np.uint32)

        thread = np.arange(LANES, dtype=np.uint32) + np.uint32(LANES * group)
        x, y, z = self.block
        found = {
            "tid.x": thread % x,
            "tid.y": thread // x % y,
            "tid.z": thread // (x * y) % z,
            "laneid": thread % WARP,
            "warpid": thread // WARP,
            "smid": same(0),
            "cluster_ctarank": same(self.rank),
            "cluster_nctarank": same(int(np.prod(size))),
        }
        for axis, name in enumerate("xyz"):
            found[f"ntid.{name}"] = same(self.block[axis])
            found[f"ctaid.{name}"] = same(self.index[axis])
            found[f"nctaid.{name}"] = same(grid[axis])
            found[f"clusterid.{name}"] = same(self.index[axis] // size[axis])
            found[f"nclusterid.{name}"] = same(grid[axis] // size[axis])
            found[f"cluster_ctaid.{name}"] = same(self.index[axis] % size[axis])
            found[f"cluster_nctaid.{name}"] = same(size[axis])
        return found


class Cluster:
    """The CTAs that run together."""

    def __init__(self, machine: Machine, first: tuple[int, int, int]) -> None:
        launch = machine.launch
        self.machine = machine
        self.first = first
        self.turns = Turns(machine.schedule.order, machine.rng)
        self.progress = 0
        """Counts everything that could let somebody else go on."""
        self._heard = 0
        """The progress that there was at the last look,"""
        self._heard_at = 0
        """and the steps when it changed."""
        self._steps = 0
        """[warp instructions] of this cluster."""
        self.timed = machine.timeline is not None and first == (0, 0, 0)
        size = launch.cluster
        threads = int(np.prod(launch.block))
        groups = -(-threads // LANES) * int(np.prod(size))
        self.components = Components(
            *(groups * WARPS, groups, int(np.prod(size))),
            tensor=machine.program.tensor,
            ordered=machine.program.orders,
        )
        self.number = 0
        """Among all clusters of a run, in the order of their begins."""
        if machine.global_shadow is not None:
            self.number = machine.global_shadow.begin(self.components)
            self.knowledge = machine.global_shadow.knowledge
        self.streams = Streams(self.components)
        self.barrier = ClusterBarrier(groups * WARPS)
        self.pending = Pending(machine.schedule, machine.rng)
        self.ctas: list[Cta] = []
        for z in range(size[2]):
            for y in range(size[1]):
                for x in range(size[0]):
                    place = (first[0] + x, first[1] + y, first[2] + z)
                    self.ctas.append(Cta(self, len(self.ctas), place))
        self.groups: list[Warpgroup] = []
        self._victim: Warpgroup | None = None
        self._blocks_left = 0
        """[blocks] that the victim runs before there is another one."""
        for cta in self.ctas:
            cta.groups = [
                Warpgroup(self, cta, number) for number in range(cta.groups_per_cta)
            ]
            self.groups += cta.groups

    def agent(self, warp: int) -> Agent | None:
        """What a warp knows; None when nothing is checked."""
        return Agent(self.components, warp) if self.machine.checks else None

    @property
    def over(self) -> bool:
        """Whether every warp has exited."""
        return not any(group.strands for group in self.groups)

    def enter(self) -> None:
        """What is accessed from now on this cluster accesses."""
        if (shadow := self.machine.global_shadow) is not None:
            shadow.enter(self.number, self.components)

    def advance(self) -> bool:
        """Lets every warpgroup have a turn; False when nobody can go on. Raises Fault."""
        turns = self.turns
        live = [group for group in self.groups if group.strands]
        self._starve(live, turns)
        before = self.progress
        ran = 0
        for position in turns.arrange(len(live)):
            ran += live[position].run(turns)
        self.pending.turn()
        silent = self._steps - self._heard_at
        if self.progress != before or (ran and silent < LONGEST_POLLING):
            return True
        if self.pending.force() or self._catch_up():
            return True
        if ran:
            self._blocks_left = 0
            return True
        return self._relieve(turns)

    def state(self) -> tuple[int, ...]:
        """What tells whether something has changed since another look."""
        return self.progress, *(group.state() for group in self.groups)

    def poll_again(self) -> bool:
        """Lets those load a word once more who wait for it to change; False when there are none."""
        return sum(group.poll_again() for group in self.groups) > 0

    def waiting(self) -> list[str]:
        """Where everybody is and what they wait for."""
        return [line for group in self.groups for line in group.waiting()]

    def _starve(self, live: list[Warpgroup], turns: Turns) -> None:
        """Chooses another victim when the order wants one and there is none, or it is over."""
        if turns.order is not Order.STARVATION:
            return
        if self._victim is not None:
            if self._victim.strands and self._blocks_left > 0:
                return
            self._victim.starve(NONE)
        victim = turns.victim(len(live), WARPS)
        self._victim = live[victim.position]
        self._victim.starve(ALL if victim.warp is None else WARP_MASKS[victim.warp])
        self._blocks_left = victim.blocks

    def _catch_up(self) -> bool:
        """Lets one warp that stays behind go on; False when there is none."""
        if self._victim is not None:
            return False
        behind = [(group, warp) for group in self.groups for warp in group.starved]
        if not behind:
            return False
        group, warp = self.machine.rng.choice(behind)
        group.release(warp)
        return True

    def _relieve(self, turns: Turns) -> bool:
        """Lets the victim run a block; False when there is none or when it cannot either."""
        self._blocks_left -= 1
        return self._victim is not None and self._victim.run_starved(turns)

    def ran(self, group: Warpgroup, block: Block, mask: NDArray[np.bool_]) -> None:
        """Counts a block that some lanes ran."""
        begin = self.machine.steps
        warps = warps_of(mask)
        weight = block.weight * len(warps)
        self.machine.steps = begin + weight
        if self.progress != self._heard:
            self._heard, self._heard_at = self.progress, self._steps
        self._steps += weight
        silent = self._steps - self._heard_at > LONGEST_SILENCE
        if silent or self.machine.steps > self.machine.max_steps:
            group.here(block.begin, warps[0] % WARPS)
            why = f"nothing but this for {LONGEST_SILENCE} instructions"
            if not silent:
                why = f"still running after {begin} instructions"
            raise Fault(Kind.LIVELOCK, f"{why} under {self.machine.schedule}")
        if self.timed and group.cta.rank == 0:
            self._time(group, block, warps, begin)

    def _time(
        self, group: Warpgroup, block: Block, warps: tuple[int, ...], begin: int
    ) -> None:
        timeline = self.machine.timeline
        assert timeline is not None
        instructions = self.machine.program.instructions[block.begin : block.end]
        if not instructions:
            return
        chosen = most_telling(instructions)
        end = self.machine.steps
        for warp in warps:
            number = group.warps[warp].number
            timeline.append(
                Event(
                    *(group.cta.rank, number, chosen.name, chosen.line, begin, end),
                    self.machine.launch.kernel,
                )
            )

    def locate(self, address: int) -> tuple[Cta, int]:
        """The CTA that a shared address lies in, and the offset there; raises Fault."""
        rank = address >> RANK_SHIFT
        if not 0 <= rank < len(self.ctas):
            raise Fault(
                Kind.OUT_OF_BOUNDS,
                f"shared address {address:#x} of no CTA of the cluster",
            )
        return self.ctas[rank], address & OFFSET_MASK

    def pair(self, cta: Cta, size: int) -> list[Cta]:
        """The CTAs of a CTA's group of 1 or 2, the even one first; Fault when its peer lacks."""
        if size == 1:
            return [cta]
        first = cta.rank & ~1
        if first + 1 >= len(self.ctas):
            raise Fault(Kind.TCGEN05, f"cta {cta.rank} has no peer in its cluster")
        return self.ctas[first : first + 2]

    def mbarrier(self, address: int) -> MBarrier:
        """The mbarrier at a shared address; raises Fault when there is none that can be used."""
        cta, place = self.locate(address)
        barrier = cta.mbarriers.get(place)
        if cta.exited:
            raise Fault(
                Kind.BARRIER, f"an mbarrier of cta {cta.rank}, which has exited"
            )
        if barrier is None:
            raise Fault(Kind.BARRIER, f"no mbarrier was initialised at {place:#x}")
        return barrier

    def exit(self, group: Warpgroup, warp: Warp) -> None:
        """A warp's last lane has left."""
        group.cta.warps_left -= 1
        if group.cta.exited:
            self._check_exit(group.cta)
        self.barrier.exit(warp.serial)
        for line, message in group.outstanding(warp):
            role = self.machine.names.role(warp.number)
            where = f"cta {group.cta.rank} warp {warp.number}{role}"
            self.machine.findings.add(Kind.OUTSTANDING, message, line=line, where=where)

    def _check_exit(self, cta: Cta) -> None:
        """Who uses a CTA's shared memory must do so before the CTA's last warp exits.

        And it must have deallocated its tensor memory.
        """
        for allocation in cta.tensor_memory.allocations:
            self.machine.findings.add(
                Kind.TENSOR_MEMORY,
                f"the CTA exits with {allocation.columns} columns of tensor memory allocated",
                line=allocation.line,
                where=f"cta {cta.rank}",
            )
        agents = [warp.agent for group in cta.groups for warp in group.warps]
        clocks = [agent.latest()[HAPPENED] for agent in agents if agent is not None]
        if not clocks:
            return
        known = np.max(clocks, axis=0)

        def check(kind: Kind, last: Mapping[int, tuple[int, int]], what: str) -> None:
            for component, (epoch, line) in last.items():
                if known[component] < epoch:
                    who = self.components.name(component)
                    product = self.components.is_product(component)
                    self.machine.findings.add(
                        Kind.OUTSTANDING if product else kind,
                        f"nothing makes cta {cta.rank} stay until {who} has {what} here",
                        line=line,
                        where=f"cta {cta.rank}",
                    )

        check(Kind.RACE, cta.visits, "accessed its shared memory")
        for barrier in cta.mbarriers.values():
            check(Kind.BARRIER, barrier.last_signals, "signalled its mbarrier")

    def finish(self) -> None:
        """Every warp has exited."""
        self.machine.landing.under_way += self.pending.landing.under_way
        if self.pending.outstanding:
            self.machine.findings.add(
                Kind.OUTSTANDING,
                "a CTA exits while asynchronous operations that nobody waited for are in flight",
            )
        for cta in self.ctas:
            for _, barrier in sorted(cta.mbarriers.items()):
                if barrier.transactions:
                    self.machine.findings.add(
                        Kind.BARRIER,
                        f"{barrier.name} ends with {barrier.transactions} bytes expected",
                        where=f"cta {cta.rank}",
                    )
