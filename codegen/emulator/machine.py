# SPDX-License-Identifier: Apache-2.0
"""Runs launches in their order: clusters one after another, the CTAs of a cluster together."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import tma
from .accumulation import Accumulation
from .additions import Sum, add_lanes, check_writable
from .agents import Agent
from .barriers import ClusterBarrier, MBarrier, NamedBarrier
from .checks import GRANULE, HAPPENED, SEEN, Components, Shadow, Streams
from .global_shadow import GlobalShadow
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
from .lower import Block, Program
from .memory import (
    PARAM_WINDOW,
    RESERVED,
    SHARED_LIMIT,
    GlobalMemory,
    MemoryFault,
    SharedMemory,
)
from .ptx import Instruction
from .report import NAMELESS, Event, Fault, Finding, Kind, Names, Report
from .scheduler import Landing, Order, Pending, Schedule, Turns
from .tcgen05 import DescriptorError as TensorDescriptorError
from .tensor_memory import GRANULES, TensorMemory
from .timeline import most_telling
from .tma import MAP_ALIGNMENT, MAP_BYTES, TensorMap, TensorMapError
from .warpgroup import Warp, Warpgroup
from .wgmma import DescriptorError
from .writes import Writer, Writes

if TYPE_CHECKING:
    from .launch import Launch

REGISTER_FILE = 65536  # [registers of an SM]
LARGEST_ALLOCATION = 255  # [registers of a thread], before setmaxnreg
MAX_STEPS = 200_000_000
"""[warp instructions] after which a run that still goes on is called a livelock."""
LONGEST_POLLING = 100_000
"""[warp instructions] of such silence as below after which late work completes and a victim is let
go though somebody can go on: it may be polling for what they do."""
LONGEST_SILENCE = 1_000_000
"""[warp instructions] of a cluster without an arrival, a completed copy or product or an exit: then
it is called one. Seconds of our time, and far more than lies between two of these."""


@dataclass(frozen=True)
class RunResult:
    """What a run found and how much it did."""

    findings: tuple[Finding, ...]
    steps: int
    """[warp instructions]"""
    statistics: Mapping[str, int] = field(default_factory=dict)
    writes: Writes = field(default_factory=Writes)
    """How often each byte of the writable buffers was written, and by whom."""


def run(
    programs: Mapping[str, Program],
    launches: Sequence[Launch],
    memory: GlobalMemory,
    *,
    schedule: Schedule | None = None,
    checks: bool = True,
    timeline: list[Event] | None = None,
    max_steps: int = MAX_STEPS,
    clusters: Collection[int] | None = None,
    tiles: Mapping[int, Sequence[int]] | None = None,
    names: Mapping[str, Names] | None = None,
    accumulation: Accumulation = Accumulation.DEVICE,
) -> RunResult:
    """Executes launches in their order; their results are in `memory` afterwards.

    `programs`: by the name of the kernel; each may be run many times. Stops at the first finding
    after which there is nothing sensible to execute. `timeline` receives what the warps of the
    first cluster's first CTA did in each launch. `max_steps`: of all launches together. `clusters`:
    of each launch only these run, numbered with x fastest, though the kernel sees the whole grid.
    `tiles`: for tensors of tensor maps, by address, the elements of a tile along each dimension,
    the contiguous one first. TMA fills with zeros in silence; a box that is wholly outside its
    tensor is only right in the ragged last tile of a dimension, and is a finding in dimensions
    without tiles. `names`: by kernel, what findings call barriers, tiles and warps. `accumulation`:
    of wgmmas with 8-bit operands. Raises KeyError for a launch of a kernel that is not among the
    programs.
    """
    machine = Machine(
        *(programs, memory, schedule or Schedule(), checks),
        *(timeline, max_steps, tiles or {}, names or {}),
        accumulation=accumulation,
    )
    for launch in launches:
        if not machine.run(launch, clusters):
            break
    statistics = dict(machine.statistics)
    return RunResult(tuple(machine.findings), machine.steps, statistics, machine.writes)


class Machine:
    """One run's state beyond its clusters. program, launch, names: those of the present launch."""

    program: Program
    launch: Launch
    names: Names
    initial_registers: int

    def __init__(
        self,
        programs: Mapping[str, Program],
        memory: GlobalMemory,
        schedule: Schedule,
        checks: bool,
        timeline: list[Event] | None,
        max_steps: int,
        tiles: Mapping[int, Sequence[int]],
        names: Mapping[str, Names],
        *,
        accumulation: Accumulation = Accumulation.DEVICE,
    ) -> None:
        self._programs = programs
        self._names = names
        self.accumulation = accumulation
        self.memory = memory
        self.schedule = schedule
        self.checks = checks
        self.timeline = timeline
        self.max_steps = max_steps
        self.tiles = tiles
        self.rng = random.Random(schedule.seed)
        self.leader = schedule.leader
        """The lane of a warp that elect.sync elects."""
        lanes = np.arange(LANES) % WARP
        self.elected = np.full(LANES, self.leader, np.uint32), lanes == self.leader
        """That lane, and the mask of those, when all lanes run."""
        self.findings = Report()
        self.global_shadow = GlobalShadow(self.report) if checks else None
        self.writes = Writes()
        self.landing = Landing(schedule, self.rng)
        """Additions of clusters that are over."""
        self.statistics: Counter[str] = Counter()
        self.steps = 0
        self.index = 0
        """The instruction that runs, for findings."""
        self.actor = (0, 0)
        """(cta, warp) that runs it."""
        self._params: dict[tuple[int, str], NDArray[Any]] = {}
        self._maps: dict[int, TensorMap] = {}

    def run(self, launch: Launch, clusters: Collection[int] | None = None) -> bool:
        """Runs these clusters of a launch, or every one; False when a finding stopped it."""
        self._begin(launch)
        problem = self._refusal()
        if problem:
            self.findings.add(Kind.UNSUPPORTED, problem)
            return False
        with np.errstate(all="ignore"):
            for number, first in self._in_order():
                chosen = clusters is None or number in clusters
                if chosen and not self._run_cluster(first):
                    return False
            self.landing.settle()
        return True

    def _begin(self, launch: Launch) -> None:
        self.launch = launch
        self.program = self._programs[launch.kernel]
        self.names = self._names.get(launch.kernel, NAMELESS)
        if len(self._programs) > 1:
            self.findings.kernel = launch.kernel
        if self.global_shadow is not None:
            self.global_shadow.launch(launch.stream, launch.programmatic)
        threads = int(np.prod(launch.block))
        allocation = REGISTER_FILE // threads // 8 * 8 if threads else 0
        self.initial_registers = min(LARGEST_ALLOCATION, allocation)
        self._params.clear()
        self._maps.clear()

    def _in_order(self) -> Sequence[tuple[int, tuple[int, int, int]]]:
        """Numbers and first CTAs of the clusters, x fastest.

        Sums depend on who adds first, so a random order takes them as they come.
        """
        numbered = list(enumerate(self._first_ctas()))
        if self.program.adds and self.schedule.order is not Order.ROUND_ROBIN:
            self.rng.shuffle(numbered)
        return numbered

    def _first_ctas(self) -> Iterator[tuple[int, int, int]]:
        """The first CTA of each cluster."""
        grid, size = self.launch.grid, self.launch.cluster
        for z in range(0, grid[2], size[2]):
            for y in range(0, grid[1], size[1]):
                for x in range(0, grid[0], size[0]):
                    yield x, y, z

    def _refusal(self) -> str:
        """Why the device would not launch this; empty when it would."""
        launch, module = self.launch, self.program.module
        if any(
            extent % size
            for extent, size in zip(launch.grid, launch.cluster, strict=True)
        ):
            return f"grid {launch.grid} is not a multiple of cluster {launch.cluster}"
        total = self.program.static_shared_bytes - RESERVED + launch.smem_bytes
        if total > SHARED_LIMIT:
            return f"{total} bytes of shared memory, more than {SHARED_LIMIT}"
        if module.required_threads not in (None, tuple(launch.block)):
            return f"block {launch.block} where the kernel requires {module.required_threads}"
        if len(launch.params) != module.param_bytes:
            return f"{len(launch.params)} bytes of parameters, not {module.param_bytes}"
        return ""

    def _run_cluster(self, first: tuple[int, int, int]) -> bool:
        cluster = Cluster(self, first)
        try:
            cluster.run()
        except Fault as fault:
            self.report(fault.kind, fault.message)
        except MemoryFault as memory_fault:
            outside = not re.search("multiple|aligned", memory_fault.reason)
            kind = Kind.OUT_OF_BOUNDS if outside else Kind.MISALIGNED
            self.report(kind, str(memory_fault))
        except TensorMapError as error:
            self.report(Kind.TMA, str(error))
        except DescriptorError as error:
            self.report(Kind.WGMMA, str(error))
        except TensorDescriptorError as error:
            self.report(Kind.TCGEN05, str(error))
        else:
            return True
        return False

    def report(self, kind: Kind, message: str) -> None:
        """Adds a finding about the instruction that runs."""
        instruction = self.program.instructions[self.index]
        cta, warp = self.actor
        where = f"cta {cta} warp {warp}{self.names.role(warp)}"
        if source := self.source(instruction):
            where += f", {source}"
        self.findings.add(
            kind, f"{instruction.name}: {message}", line=instruction.line, where=where
        )

    def source(self, instruction: Instruction) -> str:
        """`file:line` of an instruction's source, as far as anybody says."""
        return instruction.source or self.names.sources.get(instruction.line, "")

    def count(self, what: str, amount: int) -> None:
        """Adds to a statistic."""
        self.statistics[what] += amount

    def load_box(
        self,
        tensor_map: TensorMap,
        coordinates: Sequence[int],
        receivers: Sequence[Cta],
        place: int,
    ) -> tuple[int, range]:
        """A TMA load completes: as `tma.load`, into the same place of each CTA."""
        memories = [cta.shared for cta in receivers]
        return tma.load(tensor_map, coordinates, self.memory, memories, place)

    def load_run(
        self, address: int, nbytes: int, receivers: Sequence[Cta], place: int
    ) -> None:
        """A bulk load completes: the bytes at an address, into the same place of each CTA."""
        buffer, offset = self.memory.find(address, nbytes)
        for cta in receivers:
            moved = buffer.bytes[offset : offset + nbytes]
            cta.shared.bytes[place : place + nbytes] = moved

    def store_box(
        self, tensor_map: TensorMap, coordinates: Sequence[int], cta: Cta, place: int
    ) -> range:
        """A TMA store completes: as `tma.store`; its writes are counted."""
        touched = tma.store(tensor_map, coordinates, self.memory, cta.shared, place)
        part = tma.in_bounds(tensor_map, coordinates, self.memory, stored=True)
        if part is not None:
            self.writes.note(*part, self._who(cta))
        return touched

    def sum_of_box(
        self, tensor_map: TensorMap, coordinates: Sequence[int], cta: Cta, place: int
    ) -> tuple[range, Sum | None]:
        """A bulk reduction of a box reads shared memory: as `tma.summands`."""
        return tma.summands(tensor_map, coordinates, self.memory, cta.shared, place)

    def sum_of_run(self, address: int, nbytes: int, cta: Cta, place: int) -> Sum | None:
        """A bulk reduction reads float32 from shared memory, for the bytes at an address."""
        buffer, offset = self.memory.find(address, nbytes)
        check_writable(buffer, address, nbytes)
        return Sum.of_bytes(buffer, offset, cta.shared.bytes[place : place + nbytes])

    def store_lanes(
        self,
        cta: Cta,
        addresses: NDArray[np.int64],
        width: int,
        values: Sequence[NDArray[Any]],
        mask: NDArray[np.bool_],
    ) -> None:
        """st.global: as `GlobalMemory.store`; its writes are counted."""
        self.memory.store(addresses, width, values, mask)
        nbytes = width * len(values)
        for buffer, _, offsets in self.memory.split(addresses, nbytes, mask):
            self.writes.note(buffer, offsets // nbytes, nbytes, self._who(cta))

    def add_lanes(
        self,
        cta: Cta,
        addresses: NDArray[np.int64],
        kind: str,
        values: Sequence[NDArray[Any]],
        mask: NDArray[np.bool_],
    ) -> list[NDArray[Any]]:
        """red and atom: as `additions.add_lanes`, each warp's lanes in the schedule's order."""
        order = np.arange(LANES)
        if self.schedule.order is not Order.ROUND_ROBIN:
            order = np.array(self.rng.sample(range(LANES), LANES))
        return add_lanes(self.memory, addresses, kind, values, mask, order)

    def _who(self, cta: Cta) -> Writer:
        """Who writes to global memory now."""
        x, y, z = cta.index
        wide, high, _ = self.launch.grid
        line = self.program.instructions[self.index].line
        return Writer(x + wide * (y + high * z), self.actor[1], line)

    def param(self, offset: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """128 lanes of a parameter's value."""
        key = (offset, dtype.str)
        lanes = self._params.get(key)
        if lanes is None:
            raw = self.launch.params[offset : offset + dtype.itemsize]
            lanes = self._params[key] = np.full(
                LANES, np.frombuffer(raw, dtype)[0], dtype
            )
        return lanes

    def tensor_map(self, address: int) -> TensorMap:
        """The tensor map at a generic address, in the parameters or in global memory."""
        known = self._maps.get(address)
        if known is None:
            if address % MAP_ALIGNMENT:
                raise TensorMapError(
                    f"a tensor map at {address:#x}, not a multiple of {MAP_ALIGNMENT}"
                )
            offset = address - PARAM_WINDOW
            if 0 <= offset <= len(self.launch.params) - MAP_BYTES:
                raw = self.launch.params[offset : offset + MAP_BYTES]
            else:
                buffer, start = self.memory.find(address, MAP_BYTES)
                raw = buffer.bytes[start : start + MAP_BYTES].tobytes()
            known = self._maps[address] = TensorMap.decode(raw)
        return known


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
        self.progress = 0
        """Counts everything that could let somebody else go on."""
        self._heard = 0
        """The progress that there was at the last look,"""
        self._heard_at = machine.steps
        """and the steps when it changed."""
        self.timed = machine.timeline is not None and first == (0, 0, 0)
        size = launch.cluster
        threads = int(np.prod(launch.block))
        groups = -(-threads // LANES) * int(np.prod(size))
        self.components = Components(
            groups * WARPS, groups, int(np.prod(size)), tensor=machine.program.tensor
        )
        if machine.global_shadow is not None:
            machine.global_shadow.begin(self.components)
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

    def run(self) -> None:
        """Runs until every warp has exited; raises Fault."""
        turns = Turns(self.machine.schedule.order, self.machine.rng)
        while True:
            live = [group for group in self.groups if group.strands]
            if not live:
                break
            self._starve(live, turns)
            before = self.progress
            ran = 0
            for position in turns.arrange(len(live)):
                ran += live[position].run(turns)
            self.pending.turn()
            silent = self.machine.steps - self._heard_at
            if self.progress != before or (ran and silent < LONGEST_POLLING):
                continue
            if self.pending.force() or self._catch_up():
                continue
            if ran:
                self._blocks_left = 0
            elif not self._relieve(turns):
                self._deadlock(live)
                return
        self._finish()

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
        self.machine.steps = begin + block.weight * len(warps)
        if self.progress != self._heard:
            self._heard, self._heard_at = self.progress, begin
        silent = self.machine.steps - self._heard_at > LONGEST_SILENCE
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

    def _deadlock(self, live: list[Warpgroup]) -> None:
        lines = [line for group in live for line in group.waiting()]
        self.machine.findings.add(
            Kind.DEADLOCK,
            f"nobody can go on under {self.machine.schedule}\n  " + "\n  ".join(lines),
        )

    def _finish(self) -> None:
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
