# SPDX-License-Identifier: Apache-2.0
"""The page about speed: what the kernels' records say, a chart and a table for each kind.

A kind is what a mask hides and what is done to scores: causal and full masks are one, a window is
another, a window with sinks a third. A curve is of one head dim, one mask and one score.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...bench import draws, plot
from ...bench.problems import Problem, problem_for
from ...bench.results import OURS, Lines
from ...evidence import table
from .kernels import Cell, Kernel
from .pages import Charts

PLAIN: Final = "causal and full"
KINDS: Final[Mapping[str, str]] = {
    **{"op": "backward", "deterministic": "deterministic", "dq_sums": "dQ in fp16"},
    **{"batch": "packed sequences", "kv": "paged K and V"},
    **{"window": "windows", "documents": "documents", "prefix": "prefix"},
    **{"blocks": "block lists", "mask": "mask expressions", "softcap": "softcap"},
    **{"alibi": "ALiBi", "score": "score expressions", "bias": "bias", "sink": "sinks"},
}
"""What each field makes of a problem, in the page's order."""
_OF_OTHERS: Final = {"tile", "params"}  # of block lists, and of expressions
_OF_MASKS: Final = {"window", "documents", "prefix", "blocks"}


@dataclass
class Timed:
    """A problem, timed on one machine.

    visible: the share of the scores that FLOPs count. tflops: by contender, by CUDA graph, of each
    the fastest timing. ours: the stem of the kernel that the fastest of ours is.
    """

    problem: Problem
    visible: float
    tflops: dict[str, float] = field(default_factory=dict)
    ours: str = ""

    def add(self, stem: str, cell: Cell) -> None:
        """Take what the record of a kernel says of the problem."""
        if cell["graph_tflops"] > self.tflops.get(OURS, 0.0):
            self.ours = stem
        timed = {name: peer["graph_tflops"] for name, peer in cell["peers"].items()}
        for name, tflops in {**timed, OURS: cell["graph_tflops"]}.items():
            self.tflops[name] = max(tflops, self.tflops.get(name, 0.0))

    @property
    def best_peer(self) -> str:
        """The fastest of the peers."""
        peers = sorted(self.tflops.keys() - {OURS})
        return max(peers, key=lambda name: self.tflops[name])

    @property
    def ratio(self) -> float:
        """How many times as fast as the best peer the fastest of ours is."""
        return self.tflops[OURS] / self.tflops[self.best_peer]

    @property
    def seconds(self) -> float:
        """Of a launch of the fastest of ours."""
        flops = self.problem.flops * self.visible / self.problem.visible
        return flops / self.tflops[OURS] / 1e12


@dataclass
class Machine:
    """Kernels that were timed on one GPU, by one driver, beside the same peers."""

    title: str
    absent: list[str]
    timed: dict[Problem, Timed] = field(default_factory=dict)

    def add(self, kernel: Kernel, run: Mapping[str, Any]) -> None:
        """Take what the record of one of the kernels says of this machine."""
        for cell in run["cells"]:
            problem = _problem(kernel, cell)
            if problem not in self.timed:
                # Runs of before there was such a figure are of causal and full masks.
                visible = cell.get("visible") or problem.visible
                self.timed[problem] = Timed(problem, visible)
            self.timed[problem].add(kernel.stem, cell)

    @property
    def kinds(self) -> dict[str, list[Timed]]:
        """Its problems by kind, as the page has them."""
        found: dict[tuple[str, ...], list[Timed]] = {}
        for timed in sorted(self.timed.values(), key=_place):
            found.setdefault(kind_of(timed.problem), []).append(timed)
        in_order = sorted(found, key=lambda kind: [*map(_number, kind)])
        return {title_of(kind): found[kind] for kind in in_order}


def sections(kernels: Sequence[Kernel], charts: Charts) -> list[dict[str, Any]]:
    """What the template reads: for each machine its kinds, each with a chart and a table."""
    machines: dict[str, Machine] = {}
    for kernel in kernels:
        for timed in kernel.runs:
            title = ", ".join(_title(timed))
            absent = sorted(n for n, v in timed["versions"].items() if v is None)
            machines.setdefault(title, Machine(title, absent)).add(kernel, timed)
    numbers = itertools.count(1)
    return [
        {
            "title": machine.title,
            "absent": machine.absent,
            "kinds": [
                _section(f"speed{next(numbers)}", machine, kind, timed, charts)
                for kind, timed in machine.kinds.items()
            ],
        }
        for machine in machines.values()
    ]


def _section(
    name: str, machine: Machine, kind: str, timed: Sequence[Timed], charts: Charts
) -> dict[str, Any]:
    chart = plot.speeds(_lines(timed), "CUDA graphs")
    what = f"TFLOPS over sequence length, {kind}, {machine.title}"
    peers = sorted({name for each in timed for name in each.tflops} - {OURS})
    ratios = [each.ratio for each in timed]
    return {
        "name": name,
        "title": kind,
        "picture": charts.add(
            f"{name}.svg", f"{what}: the table has the figures", chart
        ),
        "count": len(ratios),
        "mean": f"{statistics.geometric_mean(ratios):.2f}",
        "least": f"{min(ratios):.2f}",
        "peers": peers,
        "rows": [_row(each, peers) for each in timed],
    }


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
    more = {name: drawn[name] for name in draws.FIELDS if name in drawn}
    return problem_for(spec, **counts, **more).without_lse


def kind_of(problem: Problem) -> tuple[str, ...]:
    """Fields that have a say in its mask and scores; none for causal and full masks alone."""
    fields = {*problem.further} - _OF_OTHERS
    band = problem.band
    if band is None and not fields & _OF_MASKS:
        fields.add("mask")
    elif band is not None and band.window:
        fields.add("window")
    return tuple(sorted(fields, key=_number))


def title_of(kind: Sequence[str]) -> str:
    """A kind in words, such as ``windows, sinks``."""
    return ", ".join(KINDS.get(name, name) for name in kind) or PLAIN


def _number(name: str) -> tuple[int, str]:
    """Where a field comes; one that is not known here is the last."""
    known = [*KINDS]
    return (known.index(name) if name in known else len(known)), name


def _place(timed: Timed) -> tuple[Any, ...]:
    problem = timed.problem
    return plot.by_number((problem.family, "")), problem.tokens, problem.length


def _lines(timed: Sequence[Timed]) -> Lines:
    lines: Lines = {}
    for each in timed:
        for name, tflops in each.tflops.items():
            line = lines.setdefault(each.problem.family, {}).setdefault(name, {})
            line[each.problem] = each.problem.flops / tflops / 1e12
    return lines


def _row(timed: Timed, peers: Sequence[str]) -> dict[str, Any]:
    return {
        "problem": f"{timed.problem.shape}, {timed.problem}",
        "visible": f"{timed.visible:.1%}",
        "microseconds": f"{timed.seconds * 1e6:.0f}",
        "ours": f"{timed.tflops[OURS]:.0f}",
        "peers": [
            f"{timed.tflops[name]:.0f}" if name in timed.tflops else table.NOTHING
            for name in peers
        ],
        "ratio": f"{timed.ratio:.2f} of {timed.best_peer}",
        "stem": timed.ours,
    }
