# SPDX-License-Identifier: Apache-2.0
"""A heat: kernels timed in turn by `bench`, in a process that may hang or crash.

``python -m fmha_gen.tune.worker REQUEST.json EVENTS`` appends one JSON object per line to EVENTS:
``turn`` (``who``, ``doing``, ``limit``) before anything that may fail, ``failed`` (``why``) after
it did, ``rounds`` (``problem``, ``rounds``) for every problem, ``end``. A turn that takes longer
than its limit in seconds ends the process by SIGALRM, which needs no cooperation of an interpreter
that waits for the GPU.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..bench.command import time_cell
from ..bench.cuda import CudaDevice
from ..bench.problems import Problem
from ..bench.results import Cell
from ..bench.timing import GRAPH, SEED, Gauge
from ..build.toolchain import COMPILE_SECONDS
from ..errors import one_line
from ..evidence.trial import load_kernel
from ..host.gpu import find_gpu
from ..host.processes import Event
from .gpu import MACHINE


class Failed(Exception):
    """A contender that does not run, or computes something else: it may have broken the GPU."""


def play(
    request: Mapping[str, Any],
    folder: Path,
    device: CudaDevice,
    gauge: Gauge,
    report: Callable[[Event], None],
) -> None:
    """Time a request's contenders, whose files lie in a folder, and report it as it happens."""

    def turn(doing: str, limit: int, who: str) -> None:
        report({"event": "turn", "who": who, "doing": doing, "limit": limit})
        signal.alarm(limit)

    try:
        kernels = {}
        for name, file in request["contenders"].items():
            turn("compile", COMPILE_SECONDS, name)
            kernels[name] = load_kernel(folder / file)
            kernels[name].compile()
        for one in request["problems"]:
            problem, limit = Problem(**one), request["limit"]
            turn(f"inputs of {problem}", limit, MACHINE)
            timed = partial(turn, str(problem), limit)
            rounds = race(problem, kernels, device, gauge, request["rounds"], timed)
            report({"event": "rounds", "problem": str(problem), "rounds": rounds})
    except Failed as failure:
        report({"event": "failed", "why": str(failure)})
    except Exception as failure:  # of GPU, DSL or kernel
        report({"event": "failed", "why": one_line(failure)})
    else:
        report({"event": "end"})
    finally:
        signal.alarm(0)


def race(
    problem: Problem,
    kernels: Mapping[str, Any],
    device: CudaDevice,
    gauge: Gauge,
    rounds: int,
    turn: Callable[[str], None],
) -> list[list[float]]:
    """Seconds per launch of every contender in every round; raises Failed for the first to fail."""
    cell = Cell(problem, list(kernels))

    def stop_after_failure(who: str | None) -> None:
        for why in cell.missing.values():
            raise Failed(why)
        if who is not None:
            turn(who)

    dice = random.Random(f"{SEED} {problem} {' '.join(kernels)}")
    time_cell(
        *(cell, kernels, (), device, gauge, rounds, dice),
        regimes=(GRAPH,),
        turn=stop_after_failure,
    )
    stop_after_failure(None)
    taken = [timing.rounds[GRAPH] for timing in cell.timings.values()]
    return [[one.seconds for one in each] for each in zip(*taken, strict=True)]


def main(request: str, events: str) -> None:
    """Entry point of the process."""
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    with Path(events).open("a", encoding="utf-8") as file, torch.no_grad():

        def report(event: Event) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()  # a crash must not take the last one along

        play(asked, Path(request).parent, CudaDevice(), find_gpu(), report)


if __name__ == "__main__":
    main(*sys.argv[1:])
