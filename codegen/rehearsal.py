# SPDX-License-Identifier: Apache-2.0
"""One kernel in the emulator: every case under every schedule, in a process of its own.

``python -m fmha_gen.rehearsal KERNEL.py EVENTS [--schedules N] [--case NAME] [--completion NAME]
[--seed N] [--timeline] [--python PATH --dsl VERSION]`` appends one JSON object per line to
EVENTS: ``environment`` when this machine cannot, ``unknown_case`` for a wrong NAME, ``refused``
when the kernel cannot run; else ``kernel``, ``start`` before a run, ``run`` after one,
``timeline`` if asked for, ``end``.
PATH: an interpreter whose DSL, of that VERSION, compiles the kernel in place of ours.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import captures, toolchain
from .cases import Case, Tiles, cases_for, tiles_of
from .compare import judge_lse, judge_output, same_bits
from .emulator import lower, machine, ptx, timeline
from .emulator.launch import CaptureError, Launch
from .emulator.lower import UnsupportedInstruction
from .emulator.report import Event
from .emulator.scheduler import Completion, Order, Schedule
from .errors import EnvironmentProblem
from .reference import Truth, truth
from .tensors import FROM_BITS, NAN16, NAN32, Problem, arguments, make_problem, scale_of
from .toolchain import Compiler

# In the order in which the random schedules take them.
COMPLETIONS = (
    Completion.RANDOM,
    Completion.LATE,
    Completion.LOADS_EARLY_MMAS_LATE,
    Completion.EAGER,
)

# Runs a module; tests put something else in its place.
Run = Callable[..., machine.RunResult]


@dataclass
class RunEvent:
    """What one case showed under one schedule; it held when there are no findings.

    of_bound, lse_of_bound: the largest error of out and lse over what it may be; absolute,
    lse_absolute: the largest errors. rows: of the output that were written and compared, of_rows:
    those that there are; fewer only when not all clusters ran.
    """

    case: str
    schedule: str
    of_bound: float = math.nan
    absolute: float = math.nan
    lse_of_bound: float | None = None
    lse_absolute: float | None = None
    rows: int = 0
    of_rows: int = 0
    steps: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)


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


def name_of(schedule: Schedule) -> str:
    """For people and records: the completion, and the seed of a random order."""
    name = schedule.completion.value
    if schedule.order is Order.ROUND_ROBIN:
        return name
    return f"{name}-{schedule.seed}"


def read_constants(text: str) -> dict[str, Any]:
    """A generated module's constants, SPEC among them: top-level names with literal values.

    The text is not executed, so that this needs no DSL.
    """
    found: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue  # an expression, such as the DSL's type of DTYPE
    return found


@dataclass(frozen=True)
class Rehearsal:
    """A kernel that is ready to run a case."""

    spec: Mapping[str, Any]
    tiles: Tiles
    program: lower.Program
    case: Case
    problem: Problem
    launch: Launch
    truths: dict[bytes, Truth] = field(default_factory=dict, repr=False, compare=False)

    def truth(self, wanted: NDArray[np.bool_] | None = None) -> Truth:
        """What the outputs must be close to, in wanted rows (bool [batch, q, heads]) at least."""
        key = b"" if wanted is None else wanted.tobytes()
        if key not in self.truths:
            dtype = self.spec["dtype"]
            q, k, v = (FROM_BITS[dtype](x.view) for x in self.problem.inputs)
            self.truths[key] = truth(
                *(q, k, v),
                scale=scale_of(self.spec, self.case),
                causal=self.spec["mask"] == "causal",
                dtype=dtype,
                wanted=wanted,
            )
        return self.truths[key]

    def run(
        self,
        schedule: Schedule,
        *,
        run: Run = machine.run,
        events: list[Event] | None = None,
    ) -> RunEvent:
        """Run under one schedule and compare. events: receives the timeline's."""
        result = RunEvent(self.case.name, name_of(schedule))
        for output in self.problem.outputs:
            output.poison()
        begin = time.perf_counter()
        try:
            ran = self._execute(schedule, run, events)
        except UnsupportedInstruction as error:
            result.findings.append(str(error))
            return result
        result.seconds = time.perf_counter() - begin
        result.steps = ran.steps
        result.findings += map(str, ran.findings)
        self._compare(result)
        return result

    def _execute(
        self, schedule: Schedule, run: Run, events: list[Event] | None
    ) -> machine.RunResult:
        return run(
            self.program,
            self.launch,
            self.problem.memory(),
            schedule=schedule,
            clusters=self.case.clusters,
            timeline=events,
            tiles=self._tiles_of_tensors(),
        )

    def _tiles_of_tensors(self) -> dict[int, tuple[int, ...]]:
        """By address, what a tile takes of dimensions 0 (of a head) and 1 (rows) of a tensor.

        Where heads are packed, those of a group are dimension 1 of the queries, and rows come next.
        The CTAs of a cluster load parts of a KV tile, and work on query tiles beyond the last row
        while another one has rows; nothing else reaches outside.
        """
        problem = self.problem
        queries, keys = (problem.q, problem.out), (problem.k, problem.v)
        group = (1,) if self.tiles.packed > 1 else ()
        return {
            tensor.address: (1, *rows)
            for tensors, rows in (
                (queries, (*group, self.tiles.cluster_rows)),
                (keys, (self.tiles.kv,)),
            )
            for tensor in tensors
        }

    def _compare(self, result: RunEvent) -> None:
        out, lse = self.problem.out.view, self.problem.lse
        written: NDArray[np.bool_] | None = None
        result.rows = result.of_rows = math.prod(out.shape[:3])
        if self.case.clusters is not None:
            written = (out != NAN16).any(-1)
            result.rows = int(written.sum())
            if not result.rows:
                result.findings.append("no row of out was written")
                return
        truth = self.truth(written)
        values = FROM_BITS[self.spec["dtype"]](out).astype(np.float64)
        verdict = judge_output(values, truth, written)
        result.of_bound, result.absolute = verdict.of_bound, verdict.absolute
        found = [verdict.finding]
        if lse is not None:
            found += self._compare_lse(result, truth, lse.view, written)
        found += [output.outside() for output in self.problem.outputs]
        result.findings += filter(None, found)

    def _compare_lse(
        self,
        result: RunEvent,
        truth: Truth,
        bits: NDArray[Any],
        written: NDArray[np.bool_] | None,
    ) -> Iterator[str]:
        if written is not None:
            written = written.swapaxes(1, 2)
            if ((bits != NAN32) & ~written).any():
                yield "lse was written in rows where out was not"
        values = np.ascontiguousarray(bits).view(np.float32).astype(np.float64)
        verdict = judge_lse(values, truth, written)
        result.lse_of_bound, result.lse_absolute = verdict.of_bound, verdict.absolute
        yield verdict.finding


def rehearse(
    rehearsal: Rehearsal,
    plans: Sequence[Schedule],
    tell: Callable[[str, Mapping[str, Any]], None],
    *,
    run: Run = machine.run,
    events: list[Event] | None = None,
) -> None:
    """One case under every schedule; a kernel's bits do not depend on the schedule."""
    first: list[NDArray[Any]] = []
    for plan in plans:
        tell("start", {"case": rehearsal.case.name, "schedule": name_of(plan)})
        result = rehearsal.run(plan, run=run, events=events)
        found = [output.view.copy() for output in rehearsal.problem.outputs]
        if first and not result.findings:
            what = f"from the schedule {name_of(plans[0])}"
            for output, bits, expected in zip(
                rehearsal.problem.outputs, found, first, strict=True
            ):
                if text := same_bits(output.name, what, bits, expected):
                    result.findings.append(text)
        first = first or found
        tell("run", asdict(result))


def main(arguments_given: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m fmha_gen.rehearsal")
    parser.add_argument("kernel", type=Path)
    parser.add_argument("events", type=Path)
    parser.add_argument("--schedules", type=int, default=1)
    parser.add_argument("--case")
    parser.add_argument("--completion", choices=[how.value for how in Completion])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--python")
    parser.add_argument("--dsl")
    options = parser.parse_args(arguments_given)

    with options.events.open("a", encoding="utf-8") as file:

        def tell(event: str, data: Mapping[str, Any]) -> None:
            file.write(json.dumps({"event": event, **data}) + "\n")
            file.flush()

        constants = read_constants(options.kernel.read_text(encoding="utf-8"))
        spec = constants["SPEC"]
        tiles = tiles_of(constants)
        cases = tuple(case for case in cases_for(spec, tiles) if case.emulated)
        if options.case is not None:
            chosen = [case for case in cases if case.name == options.case]
            if not chosen:
                names = [case.name for case in cases]
                tell("unknown_case", {"names": names})
                return
            cases = tuple(chosen)
        plans = schedules(
            options.schedules, completion=options.completion, seed=options.seed
        )
        if options.timeline:
            cases, plans = cases[:1], plans[:1]
        problems = [make_problem(spec, tiles, case) for case in cases]
        calls = [
            arguments(spec, case, problem)
            for case, problem in zip(cases, problems, strict=True)
        ]
        try:
            compiler = (
                Compiler(options.python, options.dsl)
                if options.python
                else toolchain.own_compiler()
            )
            text, launches = captures.checked(
                options.kernel, calls, arch=spec["arch"], compiler=compiler
            )
        except EnvironmentProblem as error:
            tell("environment", {"message": str(error)})
            return
        except CaptureError as failure:
            tell("refused", {"message": str(failure)})
            return
        ptx_sha256 = hashlib.sha256(text.encode()).hexdigest()
        tell("kernel", {"dsl": compiler.dsl, "ptx_sha256": ptx_sha256})
        try:
            program = lower.lower(ptx.parse(text))
        except (ptx.PtxError, UnsupportedInstruction) as failure:
            tell("refused", {"message": str(failure)})
            return
        events: list[Event] | None = [] if options.timeline else None
        for case, problem, launch in zip(cases, problems, launches, strict=True):
            rehearse(
                Rehearsal(spec, tiles, program, case, problem, launch),
                plans,
                tell,
                events=events,
            )
        if events is not None:
            trace = timeline.chrome_trace(
                events, title=f"{spec['name']}: {cases[0].name}"
            )
            tell("timeline", {"trace": trace})
        tell("end", {"schedules": [name_of(plan) for plan in plans]})


if __name__ == "__main__":
    main()
