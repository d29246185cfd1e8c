# SPDX-License-Identifier: Apache-2.0
"""Rung 4: run kernels on this machine's GPU against float64, and record what held.

Each kernel runs in a process of its own (see trial.py) with a time limit, because a wrong kernel
may hang or take its process along. This process needs neither torch nor the DSL.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from ..errors import CheckFailed, EnvironmentProblem, UsageProblem
from ..host.executor import HERE, Executor, Task
from ..host.gpu import find_gpu
from ..host.processes import Ending, Event, Ran, Worker, of_kind, ran, run_worker
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

RUNG = "validated"
RUNGS_ABOVE = ("benchmarked",)
DEFAULT_TIMEOUT = (
    300.0  # [s] for one kernel: imports, compile and all cases take about 30
)
SANITIZER_SLOWDOWN = 3  # more time for the same process under compute-sanitizer
SANITIZER = "compute-sanitizer"
MEMCHECK = "memcheck"  # its tool, and how its findings begin
SANITIZER_FOUND_ERRORS = 86  # the exit status that we ask it for
PHASES = ("import", "compile")  # of a process, before its first case


@dataclass(frozen=True)
class Outcome:
    """What one kernel showed. result: the rung's object, None when it was not earned."""

    kernel: Path
    cases: int
    worst: Worst
    repeats: int
    findings: tuple[Finding, ...]
    result: Mapping[str, Any] | None

    @property
    def stem(self) -> str:
        """The kernel's name."""
        return self.kernel.stem


def worker_command(kernel: Path, events: Path, options: Sequence[str]) -> list[str]:
    """The process that runs one kernel on the GPU."""
    module = f"{__package__}.trial"
    return [sys.executable, "-m", module, str(kernel), str(events), *options]


def run(
    paths: Sequence[str | Path],
    *,
    out: Path = DEFAULT_OUT,
    executor: Executor = HERE,
    timeout: float = DEFAULT_TIMEOUT,
    sanitizer: bool = False,
    case: str | None = None,
    as_json: bool = False,
) -> list[Outcome]:
    """Validate kernels, print a table (or JSON) and write the records of those that passed.

    paths: kernels, specs (meaning ``out/<stem>.py``) or folders of either. timeout: seconds per
    kernel. case: replay only this one, and record nothing. Raises CheckFailed when anything did not
    hold, EnvironmentProblem when this machine cannot run the kernels.
    """
    kernels = kernel_files(paths, out)
    with progress_bar("validate", len(kernels)) as advance:
        outcomes = validate(
            kernels,
            executor=executor,
            timeout=timeout,
            sanitizer=sanitizer,
            case=case,
            progress=advance,
        )
    if as_json:
        print(as_json_text(outcomes))
    else:
        evaluation.print_table(lambda plain: table(outcomes, plain=plain))
    if text := failures(outcomes):
        raise CheckFailed(text)
    return outcomes


def require_gpu(*, sanitizer: bool = False) -> str:
    """The driver's version; EnvironmentProblem when this machine lacks what validation needs."""
    driver = find_gpu().driver
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentProblem("PyTorch is missing: pip install 'fmha-gen[torch]'")
    if sanitizer and shutil.which(SANITIZER) is None:
        raise EnvironmentProblem(
            f"{SANITIZER} is not on PATH; it comes with the CUDA toolkit"
        )
    return driver


def validate(
    kernels: Sequence[Path],
    *,
    executor: Executor = HERE,
    timeout: float,
    sanitizer: bool = False,
    case: str | None = None,
    worker: Worker = worker_command,
    progress: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """Run every kernel's process, and write the records of those that passed.

    Raises EnvironmentProblem as soon as a machine says that it cannot run its kernel.
    """

    def ask(stem: str, text: str) -> Task[Tried]:
        arguments = (worker, stem, text, timeout, sanitizer, case)
        return Task(stem, try_kernel, arguments)

    def judged(kernel: Path, result: Tried | CheckFailed) -> Outcome:
        if isinstance(result, CheckFailed):
            result = Tried(ran(result), driver="")
        found, ending = result.ran
        return judge(
            *(kernel, found, ending),
            driver=result.driver,
            memcheck=result.memcheck,
            case=case,
        )

    return evaluate(
        kernels,
        ask,
        judged,
        executor,
        gpu=True,
        rung=RUNG,
        above=RUNGS_ABOVE,
        recorded=case is None,
        progress=progress,
    )


@dataclass(frozen=True)
class Memcheck:
    """One case under compute-sanitizer. ``problem`` is empty when it was clean."""

    case: str
    problem: str


@dataclass(frozen=True)
class Tried:
    """What a kernel's processes left on a machine with this driver."""

    ran: Ran
    driver: str
    memcheck: Memcheck | None = None


def try_kernel(
    worker: Worker,
    stem: str,
    text: str,
    timeout: float,
    sanitizer: bool,
    case: str | None,
) -> Tried:
    """Run a kernel's processes on this machine. Raises EnvironmentProblem when it cannot."""
    driver = require_gpu(sanitizer=sanitizer)
    files = {f"{stem}.py": text}
    found = run_worker(worker, files, timeout, ["--case", case] if case else [])
    memcheck: Memcheck | None = None
    if sanitizer and case is None:
        memcheck = _memcheck(worker, files, timeout * SANITIZER_SLOWDOWN)
    return Tried(found, driver, memcheck)


def judge(
    kernel: Path,
    found: Sequence[Event],
    ending: Ending,
    *,
    driver: str,
    memcheck: Memcheck | None = None,
    case: str | None = None,
) -> Outcome:
    """From the events of one process to a verdict; pure but for the exceptions of run."""
    for event in of_kind(found, "environment"):
        raise EnvironmentProblem(f"{kernel}: {event['message']}")
    for event in of_kind(found, "unknown_case"):
        raise UsageProblem(
            f"{kernel}: no case {case}; there are {', '.join(event['names'])}"
        )
    cases = of_kind(found, "case")
    findings = [
        Finding(event["case"], text) for event in cases for text in event["findings"]
    ]
    findings += [
        Finding("misuse", f"{event['name']}: {event['finding']}")
        for event in of_kind(found, "misuse")
        if event["finding"]
    ]
    ended = of_kind(found, "end")
    if ending.problem or not ended or not (cases or case):
        started = of_kind(found, "start")
        phase = started[-1]["case"] if started else "import"
        findings.append(
            Finding(phase, ending.problem or "stopped before its last case")
        )
    if memcheck and memcheck.problem:
        findings.append(Finding(memcheck.case, f"{MEMCHECK}: {memcheck.problem}"))

    repeats = max((event["repeats"] for event in cases), default=0)
    outcome = Outcome(
        kernel=kernel,
        cases=len(cases),
        worst=worst_of(cases),
        repeats=repeats,
        findings=tuple(findings),
        result=None,
    )
    if findings or case is not None:
        return outcome
    (machine,) = of_kind(found, "machine")
    code = [event["found"] for event in of_kind(found, "device_code")]
    result = {
        **(code[0] if code else {}),
        "gpu": machine["gpu"],
        "driver": driver,
        "dsl": machine["dsl"],
        "cases": len(cases),
        "misuses": len(of_kind(found, "misuse")),
        **outcome.worst.to_json(),
        "repeats": repeats,
        "sanitizer": memcheck
        and {"tool": MEMCHECK, "case": memcheck.case, "errors": 0},
    }
    return replace(outcome, result=result)


# --- processes ----------------------------------------------------------------------------


def _memcheck(worker: Worker, files: Mapping[str, str], timeout: float) -> Memcheck:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "memcheck.log"

        def watched(kernel: Path, events: Path, options: Sequence[str]) -> list[str]:
            return [
                SANITIZER,
                *("--tool", MEMCHECK),
                # Not the driver calls that a library tries and recovers from: the first one seen
                # was cuGetProcAddress for a symbol that the driver lacks.
                *("--report-api-errors", "no"),
                *("--error-exitcode", str(SANITIZER_FOUND_ERRORS)),
                *("--log-file", str(log)),
                *worker(kernel, events, options),
            ]

        # Without PyTorch's pool every tensor is an allocation of its own, and its end is watched.
        env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        found, ending = run_worker(watched, files, timeout, ["--memcheck"], env)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return judge_memcheck(found, ending, text)


def judge_memcheck(found: Sequence[Event], ending: Ending, log: str) -> Memcheck:
    """Clean means: the case ran and held, the process ended well, the tool counted 0 errors."""
    started = of_kind(found, "start")
    case = started[-1]["case"] if started else "import"
    finished = of_kind(found, "case")
    lines = [line.strip("= ") for line in log.splitlines() if line.strip("= ")]
    if ending.status == SANITIZER_FOUND_ERRORS:
        return Memcheck(case, " | ".join(lines[1:3] + lines[-1:]))
    if ending.problem:
        return Memcheck(case, ending.problem)
    if not finished or finished[-1]["findings"]:
        return Memcheck(
            case, "; ".join(finished[-1]["findings"]) if finished else "did not run"
        )
    if not any("ERROR SUMMARY: 0 errors" in line for line in lines):
        return Memcheck(case, "the tool did not say that it found 0 errors")
    return Memcheck(case, "")


# --- what the user sees -------------------------------------------------------------------


Columns = Mapping[str, Literal["left", "right"]]
COLUMNS: Columns = {
    "kernel": "left",
    "cases": "right",
    "error": "right",  # over what it may be, at most 1
    "worst case": "left",
}
LAST_COLUMNS: Columns = {
    "repeats": "right",
    "memcheck": "left",
    "verdict": "left",
}


def table(outcomes: Sequence[Outcome], *, plain: bool) -> Table:
    """One row per kernel, with a column for the errors of each further output."""
    columns = {**COLUMNS, **columns_of_others(outcomes), **LAST_COLUMNS}
    rows = [_row(each, outcomes) for each in outcomes]
    return evaluation.table(columns, rows, plain=plain)


def _row(outcome: Outcome, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    worst, result = outcome.worst.first, outcome.result
    return (
        outcome.stem,
        str(outcome.cases),
        f"{worst['of_bound']:.2f}" if worst else "-",
        worst["case"] if worst else "-",
        *cells_of_others(outcome, outcomes),
        str(outcome.repeats),
        "clean" if result and result["sanitizer"] else "-",
        "FAILED" if outcome.findings else RUNG if result else "held",
    )


def _replay(outcome: Outcome, finding: Finding) -> str:
    option = "" if finding.case in PHASES else f" --case {finding.case}"
    if finding.text.startswith(MEMCHECK):
        option = " --sanitizer"
    return f"fmha-gen validate {outcome.kernel}{option}"


def failures(outcomes: Sequence[Outcome]) -> str:
    """Every finding with its kernel and case, and how to see it again; empty when all held."""
    return evaluation.failures(outcomes, _replay)


def as_json_text(outcomes: Sequence[Outcome]) -> str:
    """One object per kernel. An infinite ratio (only the reference is exact) becomes null."""
    objects = [
        {
            "kernel": outcome.stem,
            "verdict": (
                "failed" if outcome.findings else RUNG if outcome.result else "held"
            ),
            "cases": outcome.cases,
            **{k: finite(x) for k, x in outcome.worst.to_json().items()},
            "repeats": outcome.repeats,
            "findings": [vars(finding) for finding in outcome.findings],
            "result": outcome.result,
        }
        for outcome in outcomes
    ]
    return json.dumps(objects, indent=2, sort_keys=True, allow_nan=False)
