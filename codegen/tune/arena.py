# SPDX-License-Identifier: Apache-2.0
"""A GPU as the arena: every heat is a process, and what it left is a `Heat`.

First runs go side by side, since most of a process is imports and compiling, and take the GPU in
turn. Heats together have the machine for themselves.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from ..bench.problems import Problem
from ..errors import CheckFailed, EnvironmentProblem
from ..executor import Executor, Task
from ..processes import Ending, Event, Ran, Worker, of_kind, ran, run_worker
from .journal import Heat

# A process has a limit for each phase; this one is for what hangs before them or waits for the GPU.
WHOLE_SECONDS = 3600

REQUEST = "request.json"

MACHINE = ""  # who fails when no contender does


def worker_command(request: Path, events: Path, options: Sequence[str]) -> list[str]:
    """The process that plays one heat on the GPU."""
    module = f"{__package__}.worker"
    return [sys.executable, "-m", module, str(request), str(events), *options]


class Kernel(NamedTuple):
    """A contender's module: each has a name of its own, as modules need one."""

    name: str
    text: str


@dataclass(frozen=True)
class GpuArena:
    """See `search.Arena`. kernels: by contender; limit: seconds of a phase on the GPU."""

    arch: str
    kernels: Mapping[str, Kernel]
    problems: Sequence[Problem]
    limit: int
    executor: Executor  # on one GPU
    worker: Worker = worker_command

    def alone(
        self, incumbent: str, names: Sequence[str], rounds: int
    ) -> Generator[tuple[str, Heat], None, None]:
        """Each in a process of its own; whatever ends this early ends them all."""
        tasks = [
            self._heat(list(dict.fromkeys([incumbent, name])), [name], rounds)
            for name in names
        ]
        with closing(self.executor.run(tasks, gpu=True)) as results:
            for number, result in results:
                yield names[number], judge(*ran(result))

    def together(self, incumbent: str, names: Sequence[str], rounds: int) -> Heat:
        """All in one process; they were checked when they ran alone."""
        task = self._heat([incumbent, *names], [], rounds)
        with closing(self.executor.run([task], gpu=True)) as results:
            ((_, result),) = results
        return judge(*ran(result))

    def _heat(
        self, names: Sequence[str], check: Sequence[str], rounds: int
    ) -> Task[Ran]:
        request = {
            "arch": self.arch,
            "contenders": {name: f"{self.kernels[name].name}.py" for name in names},
            "check": check,
            "problems": [asdict(problem) for problem in self.problems],
            "rounds": rounds,
            "limit": self.limit,
        }
        kernels = [self.kernels[name] for name in names]
        files = {REQUEST: json.dumps(request)}
        files |= {f"{kernel.name}.py": kernel.text for kernel in kernels}
        return Task(names[-1], run_worker, (self.worker, files, WHOLE_SECONDS))


def judge(found: Sequence[Event], ending: Ending) -> Heat:
    """From a process's events to a heat.

    Raises EnvironmentProblem when this machine cannot run the kernels, CheckFailed when the process
    died before the first of them.
    """
    for event in of_kind(found, "environment"):
        raise EnvironmentProblem(event["message"])
    events = of_kind(found, "rejected")
    rejected = {event["who"]: event["why"] for event in events}
    lasting = all(event["wrong"] for event in events)
    if not rejected and not of_kind(found, "end"):
        started = of_kind(found, "start")
        if not started:
            raise CheckFailed(f"the timing process failed: {ending.problem}")
        last = started[-1]
        why = f"{_how(ending, last['limit'])} ({last['phase']})"
        if last["who"] == MACHINE:
            raise EnvironmentProblem(why)
        rejected[last["who"]], lasting = why, False
    played = {event["problem"]: event["rounds"] for event in of_kind(found, "rounds")}
    return Heat(played, rejected, lasting)


def _how(ending: Ending, limit: int) -> str:
    if ending.status == -signal.SIGALRM:
        return f"hung: more than {limit} s"
    if ending.status is None:
        return f"hung: {ending.problem}"
    return f"crashed: {ending.problem or 'stopped early'}"
