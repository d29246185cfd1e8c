# SPDX-License-Identifier: Apache-2.0
"""What `fmha-gen emulate` finds of a damaged kernel: its worker, stopped at the first finding."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmha_gen.emulator.launch import open_host_program
from fmha_gen.errors import EnvironmentProblem
from fmha_gen.evidence import emulate
from fmha_gen.host import cache

# First the cheapest schedule, which shows most. What is wrong under no order of the warps but
# another one is a matter of synchronisation, which has a campaign of its own.
STAGES = (("--completion=eager",), ("--completion=random", "--seed=1"))
POLL = 0.1  # [s]


@dataclass(frozen=True)
class Judgement:
    """noticed: the first finding, None when all cases held.

    same: its PTX is the one that was given. refused: it did not compile, or its host code refused
    a case.
    """

    noticed: str | None = None
    same: bool = False
    refused: bool = False


def judge(
    text: str, name: str, *, timeout: float, whole: str | None = None
) -> Judgement:
    """Emulate a kernel's text under a name, case by case. timeout: seconds for a stage.

    whole: the sha256 of a PTX that need not run. What is cached goes away with the call. Raises
    EnvironmentProblem where this machine cannot tell.
    """
    with tempfile.TemporaryDirectory(prefix="fmha-gen-mutant-") as folder:
        kernel = Path(folder) / f"{name}.py"
        kernel.write_text(text, encoding="utf-8")
        environment = os.environ | {cache.ENVIRONMENT: str(Path(folder) / "cache")}
        found = Judgement()
        for number, options in enumerate(STAGES):
            events = Path(folder) / f"events{number}"
            child = _events(kernel, events, options, environment, timeout)
            with contextlib.closing(child):
                found = _first(child, whole)
            if found != Judgement():
                break
        return found


def require_compiles(text: str, name: str, arch: str) -> None:
    """Raises CaptureError when a kernel's text does not compile. arch: as the DSL says it."""
    with tempfile.TemporaryDirectory(prefix="fmha-gen-mutant-") as folder:
        kernel = Path(folder) / f"{name}.py"
        kernel.write_text(text, encoding="utf-8")
        with open_host_program(kernel, arch=arch):
            pass


def _first(events: Iterable[dict[str, Any]], whole: str | None) -> Judgement:
    """The first event that decides."""
    compiled = False
    for event in events:
        what = event["event"]
        if what == "kernel":
            compiled = True
            if event["ptx_sha256"] == whole:
                return Judgement(same=True)
        elif what == "environment":
            raise EnvironmentProblem(event["message"])
        elif what in ("refused", "problem"):
            last = event["message"].strip().split("\n")[-1]
            return Judgement(f"{what}: {last}", refused=not compiled)
        elif what == "run" and event["findings"]:
            first = event["findings"][0].split("\n")[0]
            return Judgement(f"{event['case']} {event['schedule']}: {first}")
    return Judgement()


def _events(
    kernel: Path,
    events: Path,
    options: Sequence[str],
    environment: dict[str, str],
    timeout: float,
) -> Generator[dict[str, Any]]:
    """The worker's events as they come; who stops listening ends it.

    A last one of our own tells that it crashed or ran out of time.
    """
    events.touch()
    with tempfile.TemporaryFile() as printed, events.open(encoding="utf-8") as file:
        child = subprocess.Popen(
            emulate.worker_command(kernel, events, options),
            stdout=printed,
            stderr=printed,
            env=environment,
            start_new_session=True,
        )
        try:
            end, begun = time.monotonic() + timeout, ""
            while True:
                over = child.poll() is not None or time.monotonic() > end
                begun += file.read()
                *lines, begun = begun.split("\n")
                for event in map(json.loads, lines):
                    yield event
                    if event["event"] == "end":
                        return
                if over:
                    break
                time.sleep(POLL)
            printed.seek(0)
            last = printed.read().decode(errors="replace").strip().split("\n")[-1]
            why = f"ended with status {child.poll()}: {last}"
            if child.poll() is None:
                why = f"did not end within {timeout:g} s"
            yield {"event": "problem", "message": why}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
