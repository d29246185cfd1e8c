# SPDX-License-Identifier: Apache-2.0
"""This machine's GPU as the arena: every heat is a process, and what it left is a `Heat`.

First runs go side by side, since most of a process is imports and compiling, and take the GPU in
turn. Heats together have the machine for themselves.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..bench.problems import Problem
from ..errors import CheckFailed, EnvironmentProblem
from ..processes import Children, Ending, Event, Worker, of_kind, run_worker
from .journal import Heat

# A process has a limit for each of its phases; this one is for a process that hangs before them.
WHOLE_SECONDS = 3600.0

MACHINE = ""  # who fails when no contender does


def worker_command(request: Path, events: Path, options: Sequence[str]) -> list[str]:
    """The process that plays one heat on the GPU."""
    module = f"{__package__}.worker"
    return [sys.executable, "-m", module, str(request), str(events), *options]


@dataclass(frozen=True)
class GpuArena:
    """See `search.Arena`. files: kernels by contender; limit: seconds of a phase on the GPU."""

    arch: str
    files: Mapping[str, Path]
    problems: Sequence[Problem]
    limit: int
    jobs: int
    folder: Path  # for requests, and the lock of the GPU
    worker: Worker = worker_command
    children: Children = field(default_factory=Children)

    def alone(
        self, incumbent: str, names: Sequence[str], rounds: int
    ) -> Generator[tuple[str, Heat], None, None]:
        """Each in a process of its own; whatever ends this early ends them all."""
        with ThreadPoolExecutor(max(1, self.jobs)) as pool:
            pending = {
                pool.submit(
                    self._play, list(dict.fromkeys([incumbent, name])), [name], rounds
                ): name
                for name in names
            }
            try:
                for done in as_completed(pending):
                    yield pending[done], done.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.children.kill()
                raise

    def together(self, incumbent: str, names: Sequence[str], rounds: int) -> Heat:
        """All in one process; they were checked when they ran alone."""
        try:
            return self._play([incumbent, *names], [], rounds)
        except BaseException:
            self.children.kill()
            raise

    def _play(self, names: Sequence[str], check: Sequence[str], rounds: int) -> Heat:
        request = {
            "arch": self.arch,
            "contenders": {name: str(self.files[name]) for name in names},
            "check": check,
            "problems": [asdict(problem) for problem in self.problems],
            "rounds": rounds,
            "limit": self.limit,
            "lock": str(self.folder / "gpu.lock"),
        }
        with tempfile.NamedTemporaryFile(
            "w", dir=self.folder, suffix=".json", encoding="utf-8"
        ) as file:
            json.dump(request, file)
            file.flush()
            found, ending = run_worker(
                self.children, self.worker, Path(file.name), WHOLE_SECONDS, []
            )
        return judge(found, ending)


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
