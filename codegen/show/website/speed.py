# SPDX-License-Identifier: Apache-2.0
"""The page about speed: what the kernels' records say, as `bench --plot` draws one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...bench import plot
from ...bench.problems import Problem, problem_for
from ...bench.results import OURS, Lines
from .kernels import Cell, Kernel
from .pages import Charts


@dataclass
class Machine:
    """Kernels that were timed on one GPU, by one driver, beside the same peers.

    tflops: by problem and contender, by CUDA graph, the fastest timing of each; ours: the stem
    of the kernel that the fastest of ours is.
    """

    title: str
    absent: list[str]
    tflops: dict[Problem, dict[str, float]] = field(default_factory=dict)
    ours: dict[Problem, str] = field(default_factory=dict)

    def add(self, kernel: Kernel, timed: Mapping[str, Any]) -> None:
        """Take what the record of one of the kernels says of this machine."""
        for cell in timed["cells"]:
            problem = _problem(kernel, cell)
            known = self.tflops.setdefault(problem, {})
            if cell["graph_tflops"] > known.get(OURS, 0.0):
                self.ours[problem] = kernel.stem
            timed = {name: peer["graph_tflops"] for name, peer in cell["peers"].items()}
            for name, tflops in {**timed, OURS: cell["graph_tflops"]}.items():
                known[name] = max(tflops, known.get(name, 0.0))

    @property
    def peers(self) -> list[str]:
        """Who was timed beside ours."""
        names = {name for timed in self.tflops.values() for name in timed}
        return sorted(names - {OURS})


def sections(kernels: Sequence[Kernel], charts: Charts) -> list[dict[str, Any]]:
    """What the template reads: for each machine its chart, and a row for each problem."""
    machines: dict[str, Machine] = {}
    for kernel in kernels:
        for timed in kernel.runs:
            title = ", ".join(_title(timed))
            absent = sorted(n for n, v in timed["versions"].items() if v is None)
            machines.setdefault(title, Machine(title, absent)).add(kernel, timed)
    return [
        {
            "title": machine.title,
            "absent": machine.absent,
            "pictures": [
                charts.add(
                    f"speed{number}.svg",
                    f"TFLOPS over sequence length, {machine.title}: the table has the figures",
                    plot.speeds(_lines(machine), "CUDA graphs"),
                )
            ],
            "peers": machine.peers,
            "rows": list(_rows(machine)),
        }
        for number, machine in enumerate(machines.values(), start=1)
    ]


def _title(timed: Mapping[str, Any]) -> Iterator[str]:
    yield timed["gpu"]
    yield f"driver {timed['driver']}"
    for name, version in sorted(timed["versions"].items()):
        if version is not None:
            yield f"{name} {version}"


def _problem(kernel: Kernel, cell: Cell) -> Problem:
    """With and without LSE it is the same here, as in the plot of a run."""
    spec = kernel.plan.context["spec"]
    counts = {name: cell[name] for name in ("batch", "heads", "q", "kv")}
    drawn = cell.get("drawn", {})
    more = {name: drawn[name] for name in ("ranges", "seed") if name in drawn}
    return problem_for(spec, **counts, **more).without_lse


def _lines(machine: Machine) -> Lines:
    lines: Lines = {}
    for problem, timed in machine.tflops.items():
        for name, tflops in timed.items():
            line = lines.setdefault(problem.family, {}).setdefault(name, {})
            line[problem] = problem.flops / tflops / 1e12
    return lines


def _rows(machine: Machine) -> Iterator[dict[str, Any]]:
    def place(problem: Problem) -> tuple[Any, ...]:
        tokens = problem.batch * problem.q
        return plot.by_number((problem.family, "")), tokens, problem.kv

    for problem in sorted(machine.tflops, key=place):
        timed = machine.tflops[problem]
        best = max(tflops for name, tflops in timed.items() if name != OURS)
        yield {
            "problem": f"{problem.variant}, {problem}",
            "ours": f"{timed[OURS]:.0f}",
            "peers": [
                f"{timed[name]:.0f}" if name in timed else "-" for name in machine.peers
            ],
            "ratio": f"{timed[OURS] / best:.2f}",
            "stem": machine.ours[problem],
        }
