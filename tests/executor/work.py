# SPDX-License-Identifier: Apache-2.0
"""What tests have workers do; workers import this module."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fmha_gen.build import toolchain
from fmha_gen.errors import CheckFailed, EnvironmentProblem
from fmha_gen.host import processes

FAKE_PROCESS = Path(__file__).parents[1] / "unit" / "fake_trial.py"


def double(number: int) -> int:
    return 2 * number


def where() -> int:
    return os.getpid()


def logged(log: str, number: int, seconds: float) -> int:
    """Say who begins what, and take a while."""
    with Path(log).open("a") as file:
        file.write(f"{os.getpid()} {number}\n")
    time.sleep(seconds)
    return 2 * number


def fail(text: str) -> None:
    raise CheckFailed(text)


def lack(text: str) -> None:
    raise EnvironmentProblem(text)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(pid_file: str) -> int | None:
    """A process that does not end by itself."""
    code = f"import os, time; open({pid_file!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    return processes.run([sys.executable, "-c", code], timeout=60, env={}).status


def fake_process(kernel: Path, events: Path, options: Sequence[str]) -> list[str]:
    return [sys.executable, str(FAKE_PROCESS), str(kernel), str(events), *options]


def slow_compile(text: str, stem: str, arch: str) -> toolchain.CompileReport:
    """A compiler that refuses one kernel, and takes its time."""
    from engine import fake

    time.sleep(0.3)
    if stem == "refused":
        raise CheckFailed(f"{stem}: does not compile\n  ICE")
    return fake.report(registers=len(text) % 100)


HEAT = """
import json, os, sys
from pathlib import Path
request, events = map(Path, sys.argv[1:])
asked = json.loads(request.read_text())
texts = [request.with_name(file).read_text().strip() for file in asked["contenders"].values()]
problem = f"{'|'.join(texts)} on {os.getppid()}"
with events.open("a") as file:
    rounds = [[1.0] * len(texts)] * asked["rounds"]
    for event in ({"event": "rounds", "problem": problem, "rounds": rounds}, {"event": "end"}):
        print(json.dumps(event), file=file)
"""


def heat_process(request: Path, events: Path, options: Sequence[str]) -> list[str]:
    """Everyone takes the same time; the problem's name says what ran where."""
    return [sys.executable, "-c", HEAT, str(request), str(events)]
