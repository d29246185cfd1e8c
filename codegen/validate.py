# SPDX-License-Identifier: Apache-2.0
"""Rung 4: run kernels on this machine's GPU against float64, and record what held.

Each kernel runs in a process of its own (see trial.py) with a time limit, because a wrong kernel
may hang or take its process along. This process needs neither torch nor the DSL.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import records, tree
from .errors import CheckFailed, EnvironmentProblem
from .gpu import find_gpu
from .render import body_digest, stated_digests

Event = dict[str, Any]

RUNG = "validated"
RUNGS_ABOVE = ("benchmarked",)
DEFAULT_OUT = Path("generated")
DEFAULT_TIMEOUT = (
    300.0  # [s] for one kernel: imports, compile and all cases take about 30
)
SANITIZER_SLOWDOWN = 3  # more time for the same process under compute-sanitizer
SANITIZER = "compute-sanitizer"
SANITIZER_FOUND_ERRORS = 86  # the exit status that we ask it for
PHASES = ("import", "compile", "warm-up")  # of a process, before its first case
PLAIN_WIDTH = 200  # columns of a piped table
STDERR_LINES = 6  # of a crashed process, shown


@dataclass(frozen=True)
class Ending:
    """How a process ended. status: None when out of time; tail: the last lines it printed."""

    status: int | None
    tail: str
    timeout: float

    @property
    def problem(self) -> str:
        """What went wrong with the process itself, or nothing."""
        if self.status is None:
            return f"did not end within {self.timeout:g} s"
        if self.status < 0:
            return f"died of signal {-self.status}: {self.tail}"
        return f"ended with status {self.status}: {self.tail}" if self.status else ""


@dataclass(frozen=True)
class Finding:
    """One thing that did not hold. case: its name, or the phase the process was in."""

    case: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """What one kernel showed. result: the rung's object, None when it was not earned."""

    kernel: Path
    cases: int
    worst: Mapping[str, Any] | None
    lse_worst: Mapping[str, Any] | None
    repeats: int
    findings: tuple[Finding, ...]
    result: Mapping[str, Any] | None

    @property
    def stem(self) -> str:
        """The kernel's name."""
        return self.kernel.stem


# A process command for a kernel file, an events file and further options.
Worker = Callable[[Path, Path, Sequence[str]], list[str]]


def worker_command(kernel: Path, events: Path, options: Sequence[str]) -> list[str]:
    """The process that runs one kernel on the GPU."""
    module = f"{__package__}.trial"
    return [sys.executable, "-m", module, str(kernel.resolve()), str(events), *options]


def run(
    paths: Sequence[str | Path],
    *,
    out: Path = DEFAULT_OUT,
    jobs: int = 2,
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
    driver = require_gpu(sanitizer=sanitizer)
    stderr = Console(stderr=True)
    with Progress(
        console=stderr, transient=True, disable=not stderr.is_terminal
    ) as bar:
        task = bar.add_task("validate", total=len(kernels))
        outcomes = validate(
            kernels,
            driver=driver,
            jobs=jobs,
            timeout=timeout,
            sanitizer=sanitizer,
            case=case,
            progress=lambda outcome: bar.advance(task),
        )
    if as_json:
        print(as_json_text(outcomes))
    else:
        print_table(outcomes)
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


def kernel_files(paths: Sequence[str | Path], out: Path = DEFAULT_OUT) -> list[Path]:
    """The kernels that paths stand for, by stem, once each. CheckFailed when there is none."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        for kernel in _kernels_of(path, out):
            if not kernel.is_file():
                hint = "" if kernel == path else f"; run: fmha-gen build {path}"
                raise CheckFailed(f"{kernel}: no such kernel{hint}")
            found.setdefault(kernel.resolve(), kernel)
    if not found:
        raise CheckFailed(f"no kernels in {', '.join(map(str, paths))}")
    return sorted(found.values(), key=lambda kernel: (kernel.stem, str(kernel)))


def _kernels_of(path: Path, out: Path) -> Iterator[Path]:
    if path.is_dir():
        for specs in sorted(path.glob("*.yaml")):
            yield out / f"{specs.stem}.py"
        for kernel in sorted(path.glob("*.py")):
            if stated_digests(kernel.read_text(encoding="utf-8")):
                yield kernel
    elif path.suffix in (".yaml", ".yml"):
        yield out / f"{path.stem}.py"
    else:
        yield path


def validate(
    kernels: Sequence[Path],
    *,
    driver: str,
    jobs: int,
    timeout: float,
    sanitizer: bool = False,
    case: str | None = None,
    worker: Worker = worker_command,
    progress: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """Run every kernel's process, ``jobs`` at a time, and write the records of those that passed.

    Raises EnvironmentProblem as soon as a process says that this machine cannot run its kernel.
    """
    children = Children()
    outcomes: list[Outcome] = []

    def one(kernel: Path) -> tuple[Outcome, str]:
        body = body_digest(kernel.read_text(encoding="utf-8"))
        found, ending = _events(
            children, worker, kernel, timeout, ["--case", case] if case else []
        )
        memcheck: Memcheck | None = None
        if sanitizer and case is None:
            memcheck = _memcheck(children, worker, kernel, timeout * SANITIZER_SLOWDOWN)
        outcome = judge(
            kernel, found, ending, driver=driver, memcheck=memcheck, case=case
        )
        return outcome, body

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        pending = [pool.submit(one, kernel) for kernel in kernels]
        try:
            for done in pending:
                outcome, body = done.result()
                if case is None:
                    write_record(outcome, body)
                progress(outcome)
                outcomes.append(outcome)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            children.kill()
            raise
    return outcomes


@dataclass(frozen=True)
class Memcheck:
    """One case under compute-sanitizer. ``problem`` is empty when it was clean."""

    case: str
    problem: str


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
    for event in _of(found, "environment"):
        raise EnvironmentProblem(f"{kernel}: {event['message']}")
    for event in _of(found, "unknown_case"):
        raise CheckFailed(
            f"{kernel}: no case {case}; there are {', '.join(event['names'])}"
        )
    cases = _of(found, "case")
    findings = [
        Finding(event["case"], text) for event in cases for text in event["findings"]
    ]
    findings += [
        Finding("misuse", f"{event['name']}: {event['finding']}")
        for event in _of(found, "misuse")
        if event["finding"]
    ]
    ended = _of(found, "end")
    if ending.problem or not ended or not (cases or case):
        started = _of(found, "start")
        phase = started[-1]["case"] if started else "import"
        findings.append(
            Finding(phase, ending.problem or "stopped before its last case")
        )
    if memcheck and memcheck.problem:
        findings.append(Finding(memcheck.case, f"memcheck: {memcheck.problem}"))

    # A NaN is a case that was refused: it has findings instead of numbers.
    judged = [event for event in cases if not math.isnan(event["ratio"])]
    worst = max(judged, key=lambda event: float(event["ratio"]), default=None)
    with_lse = [event for event in judged if event["lse_of_tolerance"] is not None]
    lse_worst = max(
        with_lse, key=lambda event: float(event["lse_of_tolerance"]), default=None
    )
    repeats = max((event["repeats"] for event in cases), default=0)
    outcome = Outcome(
        kernel=kernel,
        cases=len(cases),
        worst=worst
        and _rounded(worst, "case", "error", "reference_error", "ratio", "reference"),
        lse_worst=lse_worst
        and _rounded(lse_worst, "case", "lse_absolute", "lse_of_tolerance"),
        repeats=repeats,
        findings=tuple(findings),
        result=None,
    )
    if findings or case is not None:
        return outcome
    (machine,) = _of(found, "machine")
    result = {
        "gpu": machine["gpu"],
        "driver": driver,
        "dsl": machine["dsl"],
        "cases": len(cases),
        "misuses": len(_of(found, "misuse")),
        "worst": outcome.worst,
        "lse_worst": outcome.lse_worst,
        "lse_guards": ended[-1]["lse_guards"],
        "repeats": repeats,
        "sanitizer": memcheck
        and {"tool": "memcheck", "case": memcheck.case, "errors": 0},
    }
    return replace(outcome, result=result)


def write_record(outcome: Outcome, body: str) -> None:
    """Add the rung to the kernel's record; a kernel that failed loses it, and those above it.

    ``body``: the digest of the text that ran.
    """
    root, path = outcome.kernel.parent, records.path_of(outcome.stem)
    with tree.exclusive(root):
        tree.recover(root)
        record = records.load(root / path)
        if outcome.result is not None:
            record = records.merge_rung(
                record,
                kernel=outcome.stem,
                body_sha256=body,
                rung=RUNG,
                result=outcome.result,
            )
        elif record is not None:
            lower = {
                key: record[key] for key in record if key not in (RUNG, *RUNGS_ABOVE)
            }
            record = records.current(lower, kernel=outcome.stem, body_sha256=body)
        if record is not None:
            tree.apply(root, tree.compare(root, {path: records.dump(record)}, {}))


# --- processes ----------------------------------------------------------------------------


class Children:
    """Processes that all end with us."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def run(
        self, command: Sequence[str], *, timeout: float, env: Mapping[str, str]
    ) -> Ending:
        """Run one to its end or to its time limit; it cannot outlive this call."""
        with tempfile.TemporaryFile() as printed:
            with self._lock:
                if self._closed:
                    return Ending(None, "", 0)
                child = subprocess.Popen(
                    command,
                    stdout=printed,
                    stderr=printed,
                    env=env,
                    start_new_session=True,
                )
                self._live.add(child)
            status: int | None = None
            try:
                status = child.wait(timeout)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _kill(child)
                with self._lock:
                    self._live.discard(child)
            printed.seek(0)
            text = printed.read().decode(errors="replace")
        # Without the lines that underline a part of the line above.
        lines = [line.strip() for line in text.splitlines() if line.strip(" ^~")]
        return Ending(status, " | ".join(lines[-STDERR_LINES:]), timeout)

    def kill(self) -> None:
        """End those that run, and start no more."""
        with self._lock:
            self._closed = True
            for child in self._live:
                _kill(child)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _events(
    children: Children,
    worker: Worker,
    kernel: Path,
    timeout: float,
    options: Sequence[str],
) -> tuple[list[Event], Ending]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events.jsonl"
        command = worker(kernel, file, options)
        ending = children.run(command, timeout=timeout, env=os.environ)
        return read_events(file), ending


def _memcheck(
    children: Children, worker: Worker, kernel: Path, timeout: float
) -> Memcheck:
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "events.jsonl", Path(folder) / "memcheck.log"
        command = [
            SANITIZER,
            *("--tool", "memcheck"),
            # Not the driver calls that a library tries and recovers from: the first one seen
            # was cuGetProcAddress for a symbol that the driver lacks.
            *("--report-api-errors", "no"),
            *("--error-exitcode", str(SANITIZER_FOUND_ERRORS)),
            *("--log-file", str(log)),
            *worker(kernel, file, ["--memcheck"]),
        ]
        # Without PyTorch's pool every tensor is an allocation of its own, and its end is watched.
        env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        ending = children.run(command, timeout=timeout, env=env)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return judge_memcheck(read_events(file), ending, text)


def judge_memcheck(found: Sequence[Event], ending: Ending, log: str) -> Memcheck:
    """Clean means: the case ran and held, the process ended well, the tool counted 0 errors."""
    started = _of(found, "start")
    case = started[-1]["case"] if started else "import"
    finished = _of(found, "case")
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


def read_events(file: Path) -> list[Event]:
    """All complete lines; a process that died may have left half a line."""
    if not file.exists():
        return []
    *lines, _rest = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


def _of(found: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in found if event["event"] == kind]


def _rounded(event: Event, *keys: str) -> dict[str, Any]:
    """Four significant digits: more would only change from run to run."""
    picked = {key.removeprefix("lse_"): event[key] for key in keys}
    return {
        k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in picked.items()
    }


# --- what the user sees -------------------------------------------------------------------


def print_table(outcomes: Sequence[Outcome]) -> None:
    """One row per kernel; without colours and lines when it is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH, no_color=True, highlight=False)
    console.print(table(outcomes, plain=not console.is_terminal))


def table(outcomes: Sequence[Outcome], *, plain: bool) -> Table:
    """error: over that of 16 bits, at most 1.5. lse: over what it may be, at most 1."""
    view = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=not plain)
    for column in (
        "kernel",
        "cases",
        "error",
        "worst case",
        "lse",
        "repeats",
        "memcheck",
        "verdict",
    ):
        number = column in ("cases", "error", "lse", "repeats")
        view.add_column(column, justify="right" if number else "left", no_wrap=True)
    for outcome in outcomes:
        worst, lse, result = outcome.worst, outcome.lse_worst, outcome.result
        view.add_row(
            outcome.stem,
            str(outcome.cases),
            f"{worst['ratio']:.2f}" if worst else "-",
            worst["case"] if worst else "-",
            f"{lse['of_tolerance']:.2f}" if lse else "-",
            str(outcome.repeats),
            "clean" if result and result["sanitizer"] else "-",
            "FAILED" if outcome.findings else RUNG if result else "held",
        )
    return view


def failures(outcomes: Sequence[Outcome]) -> str:
    """Every finding with its kernel and case, and how to see it again; empty when all held."""
    lines = []
    for outcome in outcomes:
        for case in dict.fromkeys(finding.case for finding in outcome.findings):
            texts = [
                finding.text for finding in outcome.findings if finding.case == case
            ]
            lines += [f"{outcome.kernel}: {case}: {text}" for text in texts]
            replay = "" if case in PHASES else f" --case {case}"
            lines.append(f"  replay: fmha-gen validate {outcome.kernel}{replay}")
    return "\n".join(lines)


def as_json_text(outcomes: Sequence[Outcome]) -> str:
    """One object per kernel. An infinite ratio (only the reference is exact) becomes null."""
    objects = [
        {
            "kernel": outcome.stem,
            "verdict": (
                "failed" if outcome.findings else RUNG if outcome.result else "held"
            ),
            "cases": outcome.cases,
            "worst": _finite(outcome.worst),
            "lse_worst": _finite(outcome.lse_worst),
            "repeats": outcome.repeats,
            "findings": [vars(finding) for finding in outcome.findings],
            "result": outcome.result,
        }
        for outcome in outcomes
    ]
    return json.dumps(objects, indent=2, sort_keys=True, allow_nan=False)


def _finite(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if values is None:
        return None
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
