# SPDX-License-Identifier: Apache-2.0
"""Candidates on a GPU: checked by `trial`, timed by `worker`, both in processes of their own."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from ..bench.problems import Problem
from ..build.kernel_text import read_constants
from ..build.toolchain import COMPILE_SECONDS
from ..errors import CheckFailed, EnvironmentProblem
from ..evidence import validate
from ..host.executor import Executor, Task
from ..host.processes import Ending, Event, Worker, of_kind, ran, run_worker
from ..ops.cases import REPEATS, Case, cases_for, tiles_of, work_tiles
from .journal import Heat

WHOLE_SECONDS = 3600  # of a heat; each turn has a limit of its own
REQUEST = "request.json"
MACHINE = ""  # has the turn when no contender has


def worker_command(request: Path, events: Path, options: Sequence[str]) -> list[str]:
    """The process of one heat."""
    module = f"{__package__}.worker"
    return [sys.executable, "-m", module, str(request), str(events), *options]


@dataclass(frozen=True)
class OneGpu:
    """See `halving.Gpu`. texts: by contender; limit: seconds to check or time one once."""

    texts: Mapping[str, str]
    problems: Sequence[Problem]
    limit: int
    executor: Executor  # on one GPU
    checker: Worker = validate.worker_command
    worker: Worker = worker_command

    def check(self, names: Sequence[str]) -> Generator[tuple[str, str], None, None]:
        """See halving.Gpu."""
        tasks = []
        for name in names:
            text = self.texts[name]
            options = [x for case in check_cases(text) for x in ("--case", case)]
            timeout = COMPILE_SECONDS + self.limit
            arguments = (self.checker, {file_of(name): text}, timeout, options)
            tasks.append(Task(file_of(name), run_worker, arguments))
        with closing(self.executor.run(tasks, gpu=True)) as results:
            for number, result in results:
                path = Path(file_of(names[number]))
                found = validate.judge(path, *ran(result), driver="", case="")
                yield names[number], "; ".join(
                    f"{x.case}: {x.text}" for x in found.findings
                )

    def race(self, names: Sequence[str], rounds: int) -> Heat:
        """See halving.Gpu."""
        request = {
            "contenders": {name: file_of(name) for name in names},
            "problems": [asdict(problem) for problem in self.problems],
            "rounds": rounds,
            "limit": self.limit,
        }
        files = {REQUEST: json.dumps(request)}
        files |= {file_of(name): self.texts[name] for name in names}
        task = Task("heat", run_worker, (self.worker, files, WHOLE_SECONDS))
        with closing(self.executor.run([task], gpu=True)) as results:
            ((_, result),) = results
        return judge(names, *ran(result))


def file_of(name: str) -> str:
    """The file of a contender: its stem is a module's name."""
    return f"kernel_{name}.py"


def check_cases(text: str) -> list[str]:
    """Of the cases of validate: the largest ragged one, and the fullest one that is repeated."""
    constants = read_constants(text)
    spec, tiles = constants["SPEC"], tiles_of(constants)
    cases = cases_for(spec, tiles)
    ragged = max(filter(_is_plain, cases), key=lambda case: case.work)
    repeated = (case for case in cases if not case.emulated and case.repeats == REPEATS)
    fullest = max(repeated, key=lambda case: (work_tiles(case, spec, tiles), case.work))
    return list(dict.fromkeys([ragged.name, fullest.name]))


def _is_plain(case: Case) -> bool:
    """Whether all but its lengths is ordinary."""
    ordinary = case.layout == "own" and case.data == "normal"
    return ordinary and case.scale_factor == 1.0 and case.repeats < REPEATS


def judge(names: Sequence[str], found: Sequence[Event], ending: Ending) -> Heat:
    """From a process's events to a heat: the contender whose turn was the last is to blame.

    Raises EnvironmentProblem when no contender had a turn then, CheckFailed when the process died
    before the first of them.
    """
    if of_kind(found, "end"):
        rounds = {
            event["problem"]: event["rounds"] for event in of_kind(found, "rounds")
        }
        return Heat(names, rounds)
    turns = of_kind(found, "turn")
    if not turns:
        raise CheckFailed(f"the timing process failed: {ending.problem}")
    last = turns[-1]
    if failed := of_kind(found, "failed"):
        why = failed[-1]["why"]
    elif ending.status in (None, -signal.SIGALRM):
        why = f"hung: more than {last['limit']} s"
    else:
        why = f"crashed: {ending.problem or 'stopped early'}"
    why = f"{last['doing']}: {why}"
    if last["who"] == MACHINE:
        raise EnvironmentProblem(why)
    return Heat(names, rejected={last["who"]: why})
