# SPDX-License-Identifier: Apache-2.0
"""Contenders on the GPU: checked, then timed in turn, in a process that may hang or crash.

``python -m fmha_gen.tune.worker REQUEST.json EVENTS`` appends one JSON object per line to EVENTS:
``start`` (``who``, ``phase``) before whatever may fail, ``rejected`` (``who``, ``why``, ``wrong``:
whether by what it computes) after it did, ``rounds`` (``problem``, ``rounds``) for every problem,
``end``; ``environment`` when the machine is what fails. A phase that takes longer than the
request's limit ends the process by SIGALRM, which needs no cooperation of an interpreter that
waits for the GPU.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import trial
from ..bench import contenders, timing
from ..bench.cuda import CudaDevice
from ..bench.problems import Problem
from ..cases import REPEATS, Case, cases_for, tiles_of, work_tiles
from ..errors import one_line
from ..files import open_plain
from ..gpu import find_gpu, visible
from ..processes import Event
from ..toolchain import COMPILE_SECONDS
from .arena import MACHINE, WHOLE_SECONDS
from .rounds import play

NOBODY = (MACHINE, "a heat")  # who does what between phases


@dataclass(frozen=True)
class Request:
    """What to do. contenders: files by name; check: those to hold against float64 first.

    limit: seconds for a phase on the GPU. lock: of the GPU, see `gpu_lock`.
    """

    arch: str
    contenders: Mapping[str, str]
    check: Sequence[str]
    problems: Sequence[Mapping[str, Any]]
    rounds: int
    limit: int
    lock: str


@dataclass(frozen=True)
class Gpu:
    """The parts of a GPU that work; tests put models in their place."""

    checks: trial.Device
    clock: timing.Device
    gauge: timing.Gauge
    name: str = "cuda"  # of a torch.device


class Wrong(Exception):
    """A contender that computes something else; its text says where."""


class Session:
    """One heat. ``who``: the contender that whatever happens now is about, or `MACHINE`."""

    def __init__(
        self, request: Request, gpu: Gpu, report: Callable[[Event], None]
    ) -> None:
        self._request = request
        self._gpu = gpu
        self._report = report
        self._who, self._doing = NOBODY

    @contextmanager
    def _gpu_taken(self) -> Iterator[None]:
        """Within it no other process of this user computes on the GPU."""
        with self._phase(MACHINE, "wait for the GPU", WHOLE_SECONDS):
            # The folder is everybody's: what lies there may be a link to somebody's file.
            path = Path(self._request.lock)
            lock = os.fdopen(open_plain(path, os.O_RDWR | os.O_CREAT), "rb")
            if os.fstat(lock.fileno()).st_uid != os.geteuid():
                raise OSError(f"{path}: another user's; delete it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        with lock:
            yield

    def run(self) -> None:
        """Check and time the contenders; the first one that fails ends it, and is reported."""
        try:
            kernels = self._load()
            with self._gpu_taken(), torch.no_grad():
                for name in self._request.check:
                    with self._phase(name, "check"):
                        check(kernels[name], self._gpu.checks)
                for problem in self._request.problems:
                    self._play(Problem(**problem), kernels)
        except Exception as failure:  # of GPU, DSL or check
            wrong = isinstance(failure, Wrong)
            why = str(failure) if wrong else one_line(failure)
            if self._who == MACHINE:
                message = f"{self._doing}: {why}"
                self._report({"event": "environment", "message": message})
            else:
                found = {"who": self._who, "why": why, "wrong": wrong}
                self._report({"event": "rejected", **found})
        else:
            self._report({"event": "end"})

    @contextmanager
    def _phase(self, name: str, phase: str, limit: int = 0) -> Iterator[None]:
        limit = limit or self._request.limit
        self._who, self._doing = name, phase
        self._report({"event": "start", "who": name, "phase": phase, "limit": limit})
        signal.alarm(limit)
        try:
            yield
        finally:
            signal.alarm(0)
        self._who, self._doing = NOBODY

    def _load(self) -> dict[str, Any]:
        kernels = {}
        for name, path in self._request.contenders.items():
            with self._phase(name, "compile", COMPILE_SECONDS):
                kernels[name] = trial.load_kernel(Path(path))
                kernels[name].compile()
        return kernels

    def _play(self, problem: Problem, kernels: Mapping[str, Any]) -> None:
        with self._phase(MACHINE, f"inputs of {problem}"):
            inputs = contenders.make_inputs(problem, self._gpu.name)
        ready = {}
        for name, kernel in kernels.items():
            with self._phase(name, str(problem)):
                launch = contenders.ours(kernel, inputs)
                if name in self._request.check:
                    check_problem(launch, problem, inputs)
                ready[name] = timing.prepare(launch, self._gpu.clock)

        def take(name: str) -> float:
            with self._phase(name, str(problem)):
                taken = timing.graph_round(
                    ready[name], self._gpu.clock, self._gpu.gauge
                )
            return taken.seconds

        dice = random.Random(f"{timing.SEED} {problem} {' '.join(ready)}")
        rounds = list(play(list(ready), take, self._request.rounds, dice))
        self._report({"event": "rounds", "problem": str(problem), "rounds": rounds})


def check(kernel: Any, device: trial.Device) -> None:
    """Raise Wrong when a kernel is wrong in one of its `check_cases`."""
    for case in check_cases(kernel):
        result = trial.check_case(kernel, case, device)
        if result.findings:
            raise Wrong(f"wrong: {case.name}: {result.findings[0]}")


def check_cases(kernel: Any) -> tuple[Case, ...]:
    """Of the cases of validate: the largest ragged one, and the fullest one that is repeated."""
    tiles = tiles_of(trial.vars_of(kernel))
    cases = cases_for(kernel.SPEC, tiles)
    ragged = max(filter(_is_plain, cases), key=lambda case: case.work)
    repeated = (case for case in cases if not case.emulated and case.repeats == REPEATS)
    most = max(
        repeated, key=lambda case: (work_tiles(case, kernel.SPEC, tiles), case.work)
    )
    return tuple(dict.fromkeys([ragged, most]))


def _is_plain(case: Case) -> bool:
    """Whether all but its lengths is ordinary."""
    ordinary = case.layout == "own" and case.data == "normal"
    return ordinary and case.scale_factor == 1.0 and case.repeats < REPEATS


def check_problem(
    launch: timing.Launch, problem: Problem, inputs: contenders.Inputs
) -> None:
    """Raise Wrong when a kernel computes something else where it is timed."""
    error = contenders.error_of(launch, problem, inputs)
    if not error <= contenders.WRONG:
        raise Wrong(f"wrong: {problem}: relative error {error:.3g}")


def gpu_lock() -> Path:
    """The lock that processes take in turn, so that nobody computes while another one is timed.

    It is of the machine, not of a run: two runs on one GPU take turns as well.
    """
    device = re.sub(r"\W", "-", visible())
    return Path(tempfile.gettempdir(), f"fmha-gen-{os.getuid()}-gpu-{device}.lock")


def read_request(file: Path) -> Request:
    """The request in a file, beside which the contenders lie."""
    found = json.loads(file.read_text(encoding="utf-8"))
    contenders = {
        name: str(file.parent / kernel) for name, kernel in found["contenders"].items()
    }
    return Request(**{**found, "contenders": contenders, "lock": str(gpu_lock())})


def run_here(request: Request, report: Callable[[Event], None]) -> None:
    """Run on this machine's GPU, or report why it cannot."""
    if problem := trial.environment_problem(request.arch):
        report({"event": "environment", "message": problem})
        return
    gpu = Gpu(trial.CudaDevice(), CudaDevice(), find_gpu())
    Session(request, gpu, report).run()


def main(request: str, events: str) -> None:
    """Entry point of the process."""
    with Path(events).open("a", encoding="utf-8") as file:

        def report(event: Event) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()  # a crash must not take the last one along

        run_here(read_request(Path(request)), report)


if __name__ == "__main__":
    main(*sys.argv[1:])
