# SPDX-License-Identifier: Apache-2.0
"""Runs launches in their order: clusters one after another, the CTAs of a cluster together.

Clusters whose CTAs wait for each other through global memory run together, too.
"""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import tma
from .accumulation import Accumulation
from .additions import Sum, add_lanes, check_writable
from .cluster import Cluster, Cta
from .global_shadow import GlobalShadow
from .knowledge import Known
from .lanes import LANES, WARP
from .lower import Program
from .memory import (
    PARAM_WINDOW,
    RESERVED,
    SHARED_LIMIT,
    GlobalMemory,
    MemoryFault,
)
from .ptx import Instruction
from .report import NAMELESS, Event, Fault, Finding, Kind, Names, Report
from .scheduler import Landing, Order, Schedule
from .tcgen05 import DescriptorError as TensorDescriptorError
from .tma import MAP_ALIGNMENT, MAP_BYTES, TensorMap, TensorMapError
from .together import Together
from .wgmma import DescriptorError
from .writes import Writer, Writes

if TYPE_CHECKING:
    from .launch import Launch

REGISTER_FILE = 65536  # [registers of an SM]
LARGEST_ALLOCATION = 255  # [registers of a thread], before setmaxnreg
MAX_STEPS = 200_000_000
"""[warp instructions] after which a run that still goes on is called a livelock."""


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
    resident: int | None = None,
    ordered_sums: bool = False,
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
    of wgmmas with 8-bit operands. `resident`: how many clusters run at a time; None: all of a
    launch whose kernel loads what others store meanwhile, and one of others. `ordered_sums`: two
    additions of floats to one number in no order are a finding. Raises KeyError for a launch of a
    kernel that is not among the programs.
    """
    machine = Machine(
        *(programs, memory, schedule or Schedule(), checks),
        *(timeline, max_steps, tiles or {}, names or {}),
        accumulation=accumulation,
        ordered_sums=ordered_sums,
    )
    for launch in launches:
        if not machine.run(launch, clusters, resident):
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
        ordered_sums: bool = False,
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
        self.global_shadow = (
            GlobalShadow(self.report, ordered_sums=ordered_sums) if checks else None
        )
        self.writes = Writes()
        self.landing = Landing(schedule, self.rng)
        """Additions of clusters that are over."""
        self.released: dict[int, Known] = {}
        """By the address of a word of global memory, what it hands over to who acquires it."""
        self.watching: set[Cluster] = set()
        """Clusters in which somebody waits until something is written."""
        self.statistics: Counter[str] = Counter()
        self.steps = 0
        self.index = 0
        """The instruction that runs, for findings."""
        self.actor = (0, 0)
        """(cta, warp) that runs it."""
        self._params: dict[tuple[int, str], NDArray[Any]] = {}
        self._maps: dict[int, TensorMap] = {}

    def run(
        self,
        launch: Launch,
        clusters: Collection[int] | None = None,
        resident: int | None = None,
    ) -> bool:
        """Runs these clusters of a launch, or every one; False when a finding stopped it."""
        self._begin(launch)
        problem = self._refusal()
        if problem:
            self.findings.add(Kind.UNSUPPORTED, problem)
            return False
        chosen = [
            first
            for number, first in self._in_order()
            if clusters is None or number in clusters
        ]
        if resident is None:
            resident = len(chosen) if self.program.polls else 1
        with np.errstate(all="ignore"):
            if not self._run_clusters(deque(chosen), resident):
                return False
            self.landing.settle()
        return True

    def stir(self) -> None:
        """Something was written to global memory: who waits for that looks again."""
        for cluster in self.watching:
            cluster.progress += 1
        self.watching.clear()

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

        Sums depend on who adds first, so a random order takes them as they come. But where CTAs
        wait for each other, those of lower numbers begin first.
        """
        numbered = list(enumerate(self._first_ctas()))
        anyhow = self.program.adds and not self.program.polls
        if anyhow and self.schedule.order is not Order.ROUND_ROBIN:
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

    def _run_clusters(
        self, waiting: deque[tuple[int, int, int]], resident: int
    ) -> bool:
        """Runs clusters, so many at a time; False when a finding stopped it."""
        together = Together(self, waiting, resident)
        try:
            together.run()
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

    def copy_shared(
        self, cta: Cta, begin: int, nbytes: int, receivers: Sequence[Cta], place: int
    ) -> None:
        """A bulk copy completes: bytes of a CTA, into the same place of each receiver."""
        for receiver in receivers:
            moved = cta.shared.bytes[begin : begin + nbytes]
            receiver.shared.bytes[place : place + nbytes] = moved

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
