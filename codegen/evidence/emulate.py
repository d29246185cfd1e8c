# SPDX-License-Identifier: Apache-2.0
"""Rung 3: run kernels on a model of PTX against float64, and record what held.

Function and synchronisation on a model: no timing, and no proof about silicon. Each kernel runs in
a process of its own (see rehearsal.py) with a time limit. No GPU and no driver is needed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from ..errors import CheckFailed, EnvironmentProblem, UsageProblem
from ..host import files, tools
from ..host.executor import HERE, Executor, Task
from ..host.processes import Ending, Event, Ran, Worker, of_kind, ran, run_worker
from ..ops.cases import FUSED, WALK
from . import evaluation
from .evaluation import (
    DEFAULT_OUT,
    Finding,
    Worst,
    cells_of_others,
    columns_of_others,
    evaluate,
    finite,
    kernel_files,
    progress_bar,
    worst_of,
)

RUNG = "emulated"
RUNGS_ABOVE = ()  # hardware's word stands without the model's
DEFAULT_TIMEOUT = 900.0  # [s] for one kernel; all cases and schedules take about 30
_WHO = re.compile(r" \[[^\]]*\]$")  # at the end of the emulator's findings
HOST = "launch"  # of a kernel, before its first case


@dataclass(frozen=True)
class Outcome:
    """What one kernel showed. result: the rung's object, None when it was not earned."""

    kernel: Path
    cases: int
    schedules: int
    steps: int
    seconds: float
    worst: Worst
    findings: tuple[Finding, ...]
    replays: Mapping[Finding, str]  # the options that show it again
    result: Mapping[str, Any] | None

    @property
    def stem(self) -> str:
        """The kernel's name."""
        return self.kernel.stem


@dataclass(frozen=True)
class Choice:
    """What to run. A case, completion or seed replays, a timeline shows: nothing is recorded."""

    schedules: int = 2
    case: str | None = None
    completion: str | None = None
    seed: int | None = None
    timeline: Path | None = None

    @property
    def recorded(self) -> bool:
        """Whether this is the whole of what the rung asks for."""
        chosen = (self.case, self.completion, self.seed, self.timeline)
        return all(option is None for option in chosen) and self.schedules > 0

    @property
    def options(self) -> list[str]:
        """For the process."""
        found = [f"--schedules={self.schedules}"]
        for name in ("case", "completion", "seed"):
            if (value := getattr(self, name)) is not None:
                found.append(f"--{name}={value}")
        if self.timeline is not None:
            found.append("--timeline")
        return found


def worker_command(kernel: Path, events: Path, options: Sequence[str]) -> list[str]:
    """The process that runs one kernel in the emulator."""
    module = f"{__package__}.rehearsal"
    return [sys.executable, "-m", module, str(kernel), str(events), *options]


def run(
    paths: Sequence[str | Path],
    *,
    out: Path = DEFAULT_OUT,
    choice: Choice = Choice(),
    executor: Executor = HERE,
    timeout: float = DEFAULT_TIMEOUT,
    as_json: bool = False,
) -> list[Outcome]:
    """Emulate kernels, print a table (or JSON) and write the records of those that passed.

    paths: kernels, specs (meaning ``out/<stem>.py``) or folders of either. timeout: seconds per
    kernel. Raises CheckFailed when anything did not hold, EnvironmentProblem when this machine
    cannot compile the kernels, or not run them in time.
    """
    kernels = kernel_files(paths, out)
    if choice.timeline is not None and len(kernels) > 1:
        raise UsageProblem(f"a timeline is of one kernel, these are {len(kernels)}")
    tools.require_dsl()
    with progress_bar("emulate", len(kernels)) as advance:
        outcomes = emulate(
            kernels, choice=choice, executor=executor, timeout=timeout, progress=advance
        )
    if as_json:
        print(as_json_text(outcomes))
    else:
        evaluation.print_table(lambda plain: table(outcomes, plain=plain))
        if choice.timeline is not None:
            print(
                f"{choice.timeline}: one case under one schedule, replayed; nothing is"
                " recorded"
            )
    if text := failures(outcomes):
        raise CheckFailed(text)
    return outcomes


def emulate(
    kernels: Sequence[Path],
    *,
    choice: Choice = Choice(),
    executor: Executor = HERE,
    timeout: float = DEFAULT_TIMEOUT,
    worker: Worker = worker_command,
    progress: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """Run every kernel's process, and write the records of those that passed.

    Raises EnvironmentProblem as soon as a process says that its machine cannot compile its kernel.
    """

    each = executor.jobs_each(len(kernels))
    jobs = [f"--jobs={each}"] if each > 1 else []

    def ask(stem: str, text: str) -> Task[Ran]:
        files = {f"{stem}.py": text}
        options = [*choice.options, *jobs]
        return Task(stem, run_worker, (worker, files, timeout, options))

    def judged(kernel: Path, result: Ran | CheckFailed) -> Outcome:
        found, ending = ran(result)
        for event in of_kind(found, "timeline"):
            write_timeline(event["trace"], choice.timeline)
        return judge(kernel, found, ending, choice=choice)

    return evaluate(
        kernels,
        ask,
        judged,
        executor,
        gpu=False,
        rung=RUNG,
        above=RUNGS_ABOVE,
        recorded=choice.recorded,
        progress=progress,
    )


def write_timeline(trace: Mapping[str, Any], file: Path | None) -> None:
    """Write the trace that was asked for."""
    assert file is not None
    with files.writing(file):
        files.replace(file, (json.dumps(trace) + "\n").encode())


def judge(
    kernel: Path, found: Sequence[Event], ending: Ending, *, choice: Choice
) -> Outcome:
    """From the events of one process to a verdict; pure but for the exceptions of run."""
    for event in of_kind(found, "environment"):
        raise EnvironmentProblem(f"{kernel}: {event['message']}")
    for event in of_kind(found, "unknown_case"):
        names = ", ".join(event["names"])
        raise UsageProblem(f"{kernel}: no case {choice.case}; there are {names}")
    runs, ended = of_kind(found, "run"), of_kind(found, "end")
    cases = [name for about in of_kind(found, "kernel") for name in about["cases"]]
    order = {name: number for number, name in enumerate(cases)}
    runs.sort(key=lambda event: order.get(event["case"], -1))  # processes took turns
    replays = _findings(runs)
    if ending.status is None and not ending.lost and not replays:
        # A kernel that does not end is a finding of the emulator's own, after so many steps.
        raise EnvironmentProblem(
            f"{kernel}: this machine is too slow: the process {ending.problem}"
        )
    refused = of_kind(found, "refused")
    replays |= {Finding(HOST, event["message"]): "" for event in refused}
    if not refused and (ending.problem or not ended):
        text = ending.problem or "stopped before its last case"
        started = of_kind(found, "start")
        done = {(event["case"], event["schedule"]) for event in runs}
        unfinished = [e for e in started if (e["case"], e["schedule"]) not in done]
        if started:
            last = (unfinished or started)[-1]
            replays[Finding(last["case"], text)] = _replay_options(last)
        else:
            replays[Finding(HOST, text)] = ""

    outcome = Outcome(
        kernel=kernel,
        cases=len({event["case"] for event in runs}),
        schedules=len({event["schedule"] for event in runs} - {WALK}),
        steps=sum(event["steps"] for event in runs),
        seconds=sum(event["seconds"] for event in runs),
        worst=worst_of(runs),
        findings=tuple(replays),
        replays=replays,
        result=None,
    )
    if replays or not choice.recorded:
        return outcome
    (about,) = of_kind(found, "kernel")
    result = {
        "dsl": about["dsl"],
        "ptx_sha256": about["ptx_sha256"],
        "cases": outcome.cases,
        "walks": len([event for event in runs if event["schedule"] == WALK]),
        "not_walked": about["not_walked"],
        "schedules": ended[-1]["schedules"],
        **outcome.worst.to_json(),
        # Of what is too long some clusters run only: how much of the output they wrote.
        "rows_of_partial_cases": {
            event["case"]: [event["rows"], event["of_rows"]]
            for event in runs
            if event["rows"] < event["of_rows"]
        },
        "findings": [],
    }
    return replace(outcome, result=result)


def _findings(runs: Sequence[Event]) -> dict[Finding, str]:
    """Each finding once, at the first run that showed it, with the options that replay it.

    Runs that differ only in the warp that was first to show it showed the same.
    """
    shown: dict[str, list[tuple[str, Event]]] = {}
    for event in runs:
        for text in event["findings"]:
            shown.setdefault(_WHO.sub("", text), []).append((text, event))
    replays: dict[Finding, str] = {}
    for occurrences in shown.values():
        text, first = occurrences[0]
        counts = ", ".join(
            f"{len({event[what] for _, event in occurrences})} of "
            f"{len({event[what] for event in runs})} {what}s"
            for what in ("case", "schedule")
        )
        finding = Finding(first["case"], f"{text} (in {counts})")
        replays[finding] = _replay_options(first)
    return replays


def _replay_options(event: Event) -> str:
    if event["schedule"] == WALK:
        return f"--case {event['case']}"
    schedule = event["schedule"].removesuffix(FUSED)
    completion, _, seed = schedule.partition("-")
    found = f"--case {event['case']} --completion {completion}"
    return f"{found} --seed {seed}" if seed else found


Columns = Mapping[str, Literal["left", "right"]]
COLUMNS: Columns = {
    "kernel": "left",
    "cases": "right",
    "schedules": "right",
    "error": "right",  # over what it may be, at most 1
    "worst case": "left",
}
LAST_COLUMNS: Columns = {
    "steps": "right",
    "seconds": "right",
    "verdict": "left",
}


def table(outcomes: Sequence[Outcome], *, plain: bool) -> Table:
    """One row per kernel, with a column for the errors of each further output."""
    columns = {**COLUMNS, **columns_of_others(outcomes), **LAST_COLUMNS}
    rows = [_row(each, outcomes) for each in outcomes]
    return evaluation.table(columns, rows, plain=plain)


def _row(outcome: Outcome, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    worst = outcome.worst.first
    return (
        outcome.stem,
        str(outcome.cases),
        str(outcome.schedules),
        f"{worst['of_bound']:.2f}" if worst else "-",
        worst["case"] if worst else "-",
        *cells_of_others(outcome, outcomes),
        str(outcome.steps),
        f"{outcome.seconds:.1f}",
        _verdict(outcome),
    )


def _verdict(outcome: Outcome) -> str:
    if outcome.findings:
        return "FAILED"
    return RUNG if outcome.result else "held"


def failures(outcomes: Sequence[Outcome]) -> str:
    """Every finding with its kernel and case, and how to see it again; empty when all held."""
    return evaluation.failures(outcomes, _replay)


def _replay(outcome: Outcome, finding: Finding) -> str:
    options = outcome.replays[finding]
    return f"fmha-gen emulate {outcome.kernel} {options}".rstrip()


def as_json_text(outcomes: Sequence[Outcome]) -> str:
    """One object per kernel. An infinite ratio (only the reference is exact) becomes null."""
    objects = [
        {
            "kernel": outcome.stem,
            "verdict": _verdict(outcome).lower(),
            "cases": outcome.cases,
            "schedules": outcome.schedules,
            "steps": outcome.steps,
            "seconds": round(outcome.seconds, 2),
            **{k: finite(x) for k, x in outcome.worst.to_json().items()},
            "findings": [
                {**vars(finding), "replay": _replay(outcome, finding)}
                for finding in outcome.findings
            ],
            "result": outcome.result,
        }
        for outcome in outcomes
    ]
    return json.dumps(objects, indent=2, sort_keys=True, allow_nan=False)
