# SPDX-License-Identifier: Apache-2.0
"""Processes that may hang or crash, and the events that they leave behind.

A process appends one JSON object per line to a file of its own; its ``event`` says what it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CheckFailed

Event = dict[str, Any]

TAIL_LINES = 6  # of a crashed process, shown
_PR_SET_PDEATHSIG = 1
# Becomes the command, which ends when we do, however early: it may import for seconds, and would
# then keep the GPU busy while the next run is timed there. What prctl asks for survives execve.
_BOUND = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() != int(sys.argv[1]):  # we ended before it asked
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Ending:
    """How a process ended. status: None when out of time; timeout: seconds.

    lost: why it did not run at all.
    """

    status: int | None
    printed: str
    timeout: float
    lost: str = ""

    @property
    def tail(self) -> str:
        """The last lines that it printed."""
        # Without the lines that underline a part of the line above.
        lines = [line.strip() for line in self.printed.splitlines()]
        lines = [line for line in lines if line.strip("^~")]
        return " | ".join(lines[-TAIL_LINES:])

    @property
    def problem(self) -> str:
        """What went wrong with the process itself, or nothing."""
        if self.lost:
            return self.lost
        if self.status is None:
            return f"did not end within {self.timeout:g} s"
        if self.status < 0:
            return f"died of signal {-self.status}: {self.tail}"
        return f"ended with status {self.status}: {self.tail}" if self.status else ""


Ran = tuple[list[Event], Ending]

# A process command for a kernel file, an events file and further options.
Worker = Callable[[Path, Path, Sequence[str]], list[str]]


class Children:
    """Processes that all end with us."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str],
        cwd: Path | None = None,
    ) -> Ending:
        """Run one to its end or to its time limit; it cannot outlive this call."""
        with tempfile.TemporaryFile() as printed:
            with self._lock:
                if self._closed:
                    return Ending(None, "", 0)
                child = subprocess.Popen(
                    [sys.executable, "-ISc", _BOUND, str(os.getpid()), *command],
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
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
            return Ending(status, printed.read().decode(errors="replace"), timeout)

    def kill(self) -> None:
        """End those that run, and start no more."""
        with self._lock:
            self._closed = True
            for child in self._live:
                _kill(child)


def take_in_turn(todo: Sequence[Callable[[], None]], jobs: int) -> None:
    """Do each, in copies of this process that take the next one as they get free.

    jobs: how many copies; with one this process does all. What they should leave behind they write
    to files. The copies end with this process; where one fails, so does this one. It has no threads
    that matter.
    """
    jobs = min(jobs, len(todo))
    if jobs <= 1:
        for each in todo:
            each()
        return
    fork = multiprocessing.get_context("fork")
    taken, parent = fork.Value("q", 0), os.getpid()

    def take() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        while os.getppid() == parent:
            with taken.get_lock():
                number = taken.value
                taken.value += 1
            if number >= len(todo):
                return
            todo[number]()

    children = [fork.Process(target=take) for _ in range(jobs)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    for child in children:
        if child.exitcode:
            sys.exit(f"a process of {jobs} ended with status {child.exitcode}")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started, which may outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


_current: ContextVar[Children | None] = ContextVar("children", default=None)


@contextlib.contextmanager
def ending_with(children: Children) -> Iterator[None]:
    """Within, `run` starts processes that whoever has ``children`` can end."""
    token = _current.set(children)
    try:
        yield
    finally:
        _current.reset(token)


def run(
    command: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str],
    cwd: Path | None = None,
) -> Ending:
    """Run a process to its end or to its time limit in seconds; it cannot outlive this call."""
    children = _current.get() or Children()
    return children.run(command, timeout=timeout, env=env, cwd=cwd)


def run_worker(
    worker: Worker,
    files: Mapping[str, str],
    timeout: float,
    options: Sequence[str] = (),
    env: Mapping[str, str] = {},
) -> Ran:
    """Run the process of the first of these files, which are given as texts by name.

    env: added to that of this process. Returns its events and how it ended.
    """
    with tempfile.TemporaryDirectory(prefix="fmha-gen-") as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        log = Path(folder) / "events.jsonl"
        command = worker(Path(folder, next(iter(files))), log, options)
        # Workers run side by side, and their small products only lose by threads.
        env = {"OPENBLAS_NUM_THREADS": "1", **os.environ, **env}
        ending = run(command, timeout=timeout, env=env)
        # The folder has another name each time.
        printed = ending.printed.replace(f"{folder}{os.sep}", "")
        return read_events(log), replace(ending, printed=printed)


def ran(result: Ran | CheckFailed) -> Ran:
    """What a process left, or why it never ran as the only thing that is known."""
    if isinstance(result, CheckFailed):
        return [], Ending(None, "", 0, lost=str(result))
    return result


def read_events(file: Path) -> list[Event]:
    """All complete lines; a process that died may have left half a line."""
    if not file.exists():
        return []
    *lines, _rest = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


def of_kind(found: Iterable[Event], kind: str) -> list[Event]:
    """The events of one kind, in order."""
    return [event for event in found if event["event"] == kind]
