# SPDX-License-Identifier: Apache-2.0
"""One kernel in the emulator: every case under every schedule, in a process of its own.

``python -m fmha_gen.evidence.rehearsal KERNEL.py EVENTS [--schedules N] [--case NAME]
[--completion NAME] [--seed N] [--timeline] [--jobs N] [--python PATH --dsl VERSION]`` appends one
JSON object per line to EVENTS: ``environment`` when this machine cannot, ``unknown_case`` for a
wrong NAME, ``refused`` when the kernel cannot run; else ``kernel``, ``start`` before a run, ``run``
after one, ``timeline`` if asked for, ``end``.
PATH: an interpreter whose DSL, of that VERSION, compiles the kernel in place of ours.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..build import captures, device_code, toolchain
from ..build.calls import arguments, scale_of
from ..build.kernel_text import read_constants
from ..build.toolchain import Compiler
from ..emulator import lower, machine, ptx, timeline, walk
from ..emulator.launch import CaptureError, Launch
from ..emulator.lower import UnsupportedInstruction
from ..emulator.report import NAMELESS, Event, Names
from ..emulator.scheduler import Completion, Order, Schedule
from ..emulator.writes import Writes
from ..errors import EnvironmentProblem
from ..host.processes import take_in_turn
from ..ops import operation_of
from ..ops.cases import (
    FUSED,
    STEPS,
    STEPS_OF_BLOCK,
    WALK,
    Case,
    Tiles,
    cases_for,
    launches_for,
    share_that_runs,
    tiles_of,
    walks_for,
)
from ..ops.compare import Shown, nearly_same, same_bits
from ..ops.inputs import numbers_of
from ..ops.operation import Given
from ..ops.reference import Bounded
from .coverage import (
    count_of_rows,
    rows_stored,
    rows_to_store,
    tiles_of_case,
    walked,
    written_once,
)
from .finding_names import names_of
from .launches import is_main, launches_finding
from .schedule_check import refusal, schedule_findings
from .tensors import Problem, make_problem

# In the order in which the random schedules take them.
COMPLETIONS = (
    Completion.RANDOM,
    Completion.LATE,
    Completion.LOADS_EARLY_MMAS_LATE,
    Completion.EAGER,
)

MOST_BYTES = 2**28  # of a tensor
NONE_SMALL = "no case with the lengths of the spec is small enough for the emulator"

Tell = Callable[[str, Mapping[str, Any]], None]
# Runs a module; tests put something else in its place.
Run = Callable[..., machine.RunResult]


@dataclass
class RunEvent:
    """What one case showed under one schedule; it held when there are no findings.

    rows: of the output that were written and compared, of_rows: those that there are; fewer only
    when not all clusters ran.
    """

    case: str
    schedule: str
    shown: Shown = field(default_factory=Shown)
    rows: int = 0
    of_rows: int = 0
    steps: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        """As plain data."""
        own = {name: x for name, x in vars(self).items() if name != "shown"}
        return {**own, **self.shown.told()}


def event_of(spec: Mapping[str, Any], case: Case, schedule: str) -> RunEvent:
    """What a case showed before anything ran: of all outputs that the operation can have."""
    _, *others = operation_of(spec).writes
    shown = Shown(others=dict.fromkeys(x.name for x in others))
    return RunEvent(case.name, schedule, shown)


def schedules(
    randoms: int, *, completion: str | None = None, seed: int | None = None
) -> list[Schedule]:
    """The schedules of a case: every orderly one, and ``randoms`` random ones by their seeds.

    The random ones take the completions in turn, and every other one starves somebody. A
    completion or a seed asks for that one only.
    """
    if completion is not None or seed is not None:
        return [_schedule(Completion(completion or Completion.RANDOM), seed)]
    orderly = (Completion.EAGER, Completion.LATE, Completion.LOADS_EARLY_MMAS_LATE)
    return [_schedule(how, None) for how in orderly] + [
        _schedule(COMPLETIONS[number % len(COMPLETIONS)], number)
        for number in range(randoms)
    ]


def _schedule(completion: Completion, seed: int | None) -> Schedule:
    """Warpgroups take turns without a seed; with one, single warps run on or are held back."""
    if seed is None and completion is not Completion.RANDOM:
        return Schedule(0, Order.ROUND_ROBIN, completion)
    seed = seed or 0
    # Both orders meet every completion: 0 to 3 are one of each, 4 to 7 the other.
    starves = (seed + seed // len(COMPLETIONS)) % 2
    order = Order.STARVATION if starves else Order.RANDOM_WARPS
    return Schedule(seed, order, completion)


def name_of(schedule: Schedule, fused: bool = False) -> str:
    """For people and records: the completion, the seed of a random order, and the rounding."""
    name = schedule.completion.value
    if schedule.order is not Order.ROUND_ROBIN:
        name = f"{name}-{schedule.seed}"
    return f"{name}{FUSED}" if fused else name


Plan = tuple[Schedule, bool]
"""A schedule, and whether products and sums are fused in it."""


def with_roundings(chosen: Sequence[Schedule]) -> list[Plan]:
    """The schedules with both roundings in turn; a single one with both."""
    if len(chosen) == 1:
        return [(chosen[0], fused) for fused in (False, True)]
    return [(plan, number % 2 == 1) for number, plan in enumerate(chosen)]


def plans_of(case: Case, number: int, plans: Sequence[Plan]) -> Sequence[Plan]:
    """Those that a case runs under: all, or two, which differ from case to case.

    Of a case about function alone the schedule is no matter: others look for races. The two are
    neighbours, so that one of them is fused.
    """
    if case.timing or len(plans) < 2:
        return plans
    first = number % (len(plans) - 1)
    return plans[first : first + 2]


@dataclass(frozen=True)
class Rehearsal:
    """A kernel that is ready to run a case.

    programs: of its kernels, by name. launches: in their order. fused: the programs with each
    product and sum in one, as a compiler may make them; None: `programs`. names: for findings, by
    kernel. expected: bool [batch, q, heads], rows of out that are stored; None for all. max_steps:
    after which a run does not end; None: as the case's size says.
    """

    spec: Mapping[str, Any]
    tiles: Tiles
    programs: Mapping[str, lower.Program]
    case: Case
    problem: Problem
    launches: Sequence[Launch]
    fused: Mapping[str, lower.Program] | None = None
    names: Mapping[str, Names] = field(default_factory=dict)
    expected: NDArray[np.bool_] | None = None
    max_steps: int | None = None
    truths: dict[bytes, Any] = field(default_factory=dict, repr=False, compare=False)

    def truth(self, wanted: NDArray[np.bool_] | None = None) -> Any:
        """What the outputs must be close to, in wanted rows (bool [batch, q, heads]) at least."""
        key = b"" if wanted is None else wanted.tobytes()
        if key not in self.truths:
            self.truths[key] = operation_of(self.spec).truth(self._given(), wanted)
        return self.truths[key]

    def _given(self) -> Given:
        inputs: dict[str, Any] = {x.name: x.numbers() for x in self.problem.inputs}
        inputs |= numbers_of(self.spec, self.case)
        return Given(self.spec, inputs, scale_of(self.spec, self.case))

    def run(
        self,
        schedule: Schedule,
        *,
        fused: bool = False,
        run: Run = machine.run,
        events: list[Event] | None = None,
    ) -> RunEvent:
        """Run under one schedule and compare. events: receives the timeline's."""
        result = event_of(self.spec, self.case, name_of(schedule, fused))
        for written in self.problem.written:
            written.poison()
        begin = time.perf_counter()
        try:
            ran = self._execute(schedule, fused, run, events)
        except UnsupportedInstruction as error:
            result.findings.append(str(error))
            return result
        result.seconds = time.perf_counter() - begin
        result.steps = ran.steps
        result.findings += map(str, ran.findings)
        self._compare(result, ran.writes)
        return result

    def _execute(
        self, schedule: Schedule, fused: bool, run: Run, events: list[Event] | None
    ) -> machine.RunResult:
        return run(
            (fused and self.fused) or self.programs,
            self.launches,
            self.problem.memory(),
            schedule=schedule,
            clusters=self.case.clusters,
            timeline=events,
            tiles=tiles_of_case(self.tiles, self.spec, self.case),
            names=self.names,
            max_steps=self.max_steps or STEPS + STEPS_OF_BLOCK * self.case.blocks,
            ordered_sums=not operation_of(self.spec).unordered(self.spec),
        )

    def right(self, name: str) -> Bounded:
        """An output, with what its elements may be off by."""
        right: Bounded = getattr(self.truth(self._wanted()), name)
        return right

    def _wanted(self) -> NDArray[np.bool_] | None:
        """Rows that the clusters which run should store; None for all."""
        if self.expected is not None:
            return self.expected
        return rows_to_store(self.spec, self.case)

    def _compare(self, result: RunEvent, writes: Writes) -> None:
        operation, outputs = operation_of(self.spec), self.problem.outputs
        wanted = self._wanted()
        result.of_rows = count_of_rows(self.spec, self.case)
        result.rows = result.of_rows if wanted is None else int(wanted.sum())
        if result.rows == 0:
            result.findings.append(
                f"the clusters that ran store no row of {outputs[0].name}"
            )
        verdicts = operation.judge(
            self._given(),
            {output.name: output.numbers().astype(np.float64) for output in outputs},
            *(self.truth(wanted), self.tiles.kv, wanted),
        )
        result.shown.note(verdicts)
        for tensor, output in zip(operation.outputs(self.spec), outputs, strict=True):
            result.findings += written_once(output, tensor.kinds, wanted, writes)
            result.findings += filter(None, [verdicts[output.name].finding])
        outside = (written.outside() for written in self.problem.written)
        result.findings += filter(None, outside)


def rehearse(
    rehearsal: Rehearsal,
    plans: Sequence[Plan],
    tell: Tell,
    *,
    run: Run = machine.run,
    events: list[Event] | None = None,
) -> None:
    """One case under every schedule; a kernel's bits depend on the rounding only, but for outputs
    whose sums have no order.
    """
    first: dict[bool, tuple[str, list[NDArray[Any]]]] = {}
    operation, spec = operation_of(rehearsal.spec), rehearsal.spec
    unordered = operation.unordered(spec)
    for plan, fused in plans:
        name = name_of(plan, fused)
        tell("start", {"case": rehearsal.case.name, "schedule": name})
        result = rehearsal.run(plan, fused=fused, run=run, events=events)
        found = [output.view.copy() for output in rehearsal.problem.outputs]
        if fused in first and not result.findings:
            other, bits_before = first[fused]
            what = f"from the schedule {other}"
            for output, bits, expected in zip(
                rehearsal.problem.outputs, found, bits_before, strict=True
            ):
                if output.name in unordered:
                    numbers = output.of_bits(bits), output.of_bits(expected)
                    of_type = output.placed.dtype, rehearsal.right(output.name)
                    text = nearly_same(output.name, what, *numbers, *of_type)
                else:
                    text = same_bits(output.name, what, bits, expected)
                if text:
                    result.findings.append(text)
        first.setdefault(fused, (name, found))
        tell("run", result.told())


def main(arguments_given: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m fmha_gen.evidence.rehearsal")
    parser.add_argument("kernel", type=Path)
    parser.add_argument("events", type=Path)
    parser.add_argument("--schedules", type=int, default=1)
    parser.add_argument("--case")
    parser.add_argument("--completion", choices=[how.value for how in Completion])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--python")
    parser.add_argument("--dsl")
    options = parser.parse_args(arguments_given)

    with options.events.open("ab", buffering=0) as file:

        def tell(event: str, data: Mapping[str, Any]) -> None:
            # At once, and at the end: processes that take cases in turn share the file.
            file.write((json.dumps({"event": event, **data}) + "\n").encode())

        try:
            _rehearse_kernel(options, tell)
        except EnvironmentProblem as error:
            tell("environment", {"message": str(error)})
        except (CaptureError, ptx.PtxError, UnsupportedInstruction) as failure:
            tell("refused", {"message": str(failure)})


def _rehearse_kernel(options: argparse.Namespace, tell: Tell) -> None:
    source = options.kernel.read_text(encoding="utf-8")
    constants = read_constants(source)
    spec, tiles = constants["SPEC"], tiles_of(constants)
    cases = [case for case in cases_for(spec, tiles) if case.emulated]
    walks = list(walks_for(spec, tiles))
    if options.case is not None:
        names = [case.name for case in (*cases, *walks)]
        cases, walks = (
            [case for case in some if case.name == options.case]
            for some in (cases, walks)
        )
        if not cases + walks:
            tell("unknown_case", {"names": names})
            return
    if not cases + walks:
        tell("refused", {"message": f"{NONE_SMALL}; nothing was run"})
        return
    chosen = schedules(
        options.schedules, completion=options.completion, seed=options.seed
    )
    plans = with_roundings(chosen)
    if options.timeline:
        cases, plans, walks = cases[:1], plans[:1], []
    if too_large := [text for case in cases if (text := _too_large(spec, case))]:
        tell("refused", {"message": too_large[0]})
        return
    left = {
        case.name: text
        for case in walks
        if (text := refusal(tiles, spec, case, share_that_runs(case, spec, tiles)))
    }
    walks = [case for case in walks if case.name not in left]
    compiler = (
        Compiler(options.python, options.dsl)
        if options.python
        else toolchain.own_compiler()
    )
    launched = (*cases, *walks, *launches_for(spec, tiles))
    text, called = captures.checked(
        options.kernel,
        [arguments(spec, case, tiles) for case in launched],
        arch=spec["arch"],
        compiler=compiler,
    )
    for case, launches in zip(launched, called, strict=True):
        if finding := launches_finding(launches, tiles, spec, case):
            raise CaptureError(f"{case.name}: {finding}")
    code = device_code.digest(text)
    about = {"dsl": compiler.dsl, "ptx_sha256": code, "not_walked": left}
    tell("kernel", {**about, "cases": [case.name for case in (*walks, *cases)]})
    programs, fused = (lower.lower_kernels(text, contract=c) for c in (False, True))
    lines = Lines(lambda: captures.sources(options.kernel, text, arch=spec["arch"]))
    told = replace(names_of(source), sources=lines)
    # Of several kernels the header and the storage are the main one's.
    of_others = replace(NAMELESS, sources=lines)
    names_of_all = {x: told if is_main(x, spec) else of_others for x in programs}
    walks_of = functools.cache(lambda: walk.prepare(ptx.parse(text)))
    events: list[Event] | None = [] if options.timeline else None

    def walk_case(case: Case, launches: Sequence[Launch]) -> None:
        tell("start", {"case": case.name, "schedule": WALK})
        (launch,) = launches
        tell("run", _walk(constants, case, launch, walks_of(), told).told())

    def run_case(number: int, case: Case, launches: Sequence[Launch]) -> None:
        expected = None
        if case.clusters is not None:
            (launch,) = launches
            seen = walked(constants, case, launch, walks_of())
            expected = rows_stored(seen, spec, case)
        problem = make_problem(spec, tiles, case)
        rehearse(
            Rehearsal(
                *(spec, tiles, programs, case, problem, launches),
                *(fused, names_of_all, expected),
            ),
            plans_of(case, number, plans),
            tell,
            events=events,
        )

    todo = [
        functools.partial(walk_case, case, launches)
        for case, launches in zip(walks, called[len(cases) :], strict=False)
    ]
    todo += [
        functools.partial(run_case, number, case, launches)
        for number, (case, launches) in enumerate(zip(cases, called, strict=False))
    ]
    take_in_turn(todo, 1 if options.timeline else options.jobs)
    if events is not None:
        trace = timeline.chrome_trace(events, title=f"{spec['name']}: {cases[0].name}")
        tell("timeline", {"trace": trace})
    tell("end", {"schedules": [name_of(*plan) for plan in plans]})


class Lines(Mapping[int, str]):
    """Lines of a kernel's text by those of its PTX, found when the first one is asked for."""

    def __init__(self, find: Callable[[], dict[int, str]]) -> None:
        self._find = functools.cache(find)

    def __getitem__(self, line: int) -> str:
        return self._find()[line]

    def __iter__(self) -> Iterator[int]:
        return iter(self._find())

    def __len__(self) -> int:
        return len(self._find())


def _walk(
    constants: Mapping[str, Any],
    case: Case,
    launch: Launch,
    program: lower.Program,
    names: Names,
) -> RunEvent:
    """What the schedule of all CTAs showed."""
    begin = time.perf_counter()
    seen = walked(constants, case, launch, program, names)
    spec = constants["SPEC"]
    findings = schedule_findings(seen, tiles_of(constants), spec, case)
    of_rows = rows = count_of_rows(spec, case)
    if case.clusters is not None and not findings:
        rows = int(rows_stored(seen, spec, case).sum())
    return replace(
        event_of(spec, case, WALK),
        rows=rows,
        of_rows=of_rows,
        steps=seen.steps,
        seconds=time.perf_counter() - begin,
        findings=findings,
    )


def _too_large(spec: Mapping[str, Any], case: Case) -> str:
    """Why a case is not emulated; empty when it is."""
    most = max(operation_of(spec).nbytes(spec, case).values())
    if most <= MOST_BYTES:
        return ""
    return (
        f"seqlen {case.q} x {case.kv} is too long for the emulator: a tensor of {most} bytes "
        f"is more than {MOST_BYTES}; nothing was run"
    )


if __name__ == "__main__":
    main()
