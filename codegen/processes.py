# SPDX-License-Identifier: Apache-2.0
"""Processes that may hang or crash, and the events that they leave behind.

A process appends one JSON object per line to a file of its own; its ``event`` says what it is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]

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


# A process command for a kernel file, an events file and further options.
Worker = Callable[[Path, Path, Sequence[str]], list[str]]


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


def run_worker(
    children: Children,
    worker: Worker,
    kernel: Path,
    timeout: float,
    options: Sequence[str],
) -> tuple[list[Event], Ending]:
    """Run a kernel's process; return its events and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events.jsonl"
        command = worker(kernel, file, options)
        # Workers run side by side, and their small products only lose by threads.
        env = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
        ending = children.run(command, timeout=timeout, env=env)
        return read_events(file), ending


def read_events(file: Path) -> list[Event]:
    """All complete lines; a process that died may have left half a line."""
    if not file.exists():
        return []
    *lines, _rest = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


def of_kind(found: Iterable[Event], kind: str) -> list[Event]:
    """The events of one kind, in order."""
    return [event for event in found if event["event"] == kind]
