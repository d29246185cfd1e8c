# SPDX-License-Identifier: Apache-2.0
"""What one run measured: cells, who was fastest in each, and the same as JSON and in a record."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from . import draws
from .problems import Problem, problem_for
from .timing import BURST, GRAPH, REGIMES, SUSTAINED, Round, Timing

OURS = "ours"  # the fastest of our kernels, where one line stands for all of them
FA4 = "fa4"

# family -> contender -> problem -> seconds per launch
Lines = dict[str, dict[str, dict[Problem, float]]]


class Best(NamedTuple):
    """The fastest peer. name: who, or ``1.13 fa4`` for a peer known from elsewhere only."""

    name: str
    tflops: float


@dataclass
class Cell:
    """One problem and everyone who was to compute it.

    ours: our kernels, by stem. best_over_fa4: see `grid`. missing: why a contender has no timing,
    or a peer none of the ways that it has. beside: our kernels that do the same work on tensors of
    another layout, by stem, and that layout; they are no peers.
    """

    problem: Problem
    ours: list[str]
    best_over_fa4: float | None = None
    timings: dict[str, Timing] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)

    def tflops(self, name: str, regime: str = GRAPH) -> float | None:
        """Of the median round; None for a contender without a timing."""
        if name not in self.timings:
            return None
        return self.problem.flops / self.timings[name].seconds(regime) / 1e12

    def tb_per_s(self, name: str, regime: str = GRAPH) -> float | None:
        """Of K and V, each read once, in the median round; None for one without a timing."""
        if name not in self.timings:
            return None
        return self.problem.kv_bytes / self.timings[name].seconds(regime) / 1e12

    @property
    def peers(self) -> list[str]:
        """Those with a timing."""
        known = {*self.ours, *self.beside}
        return [name for name in self.timings if name not in known]

    def fastest(self, layout: str = "") -> str | None:
        """Our kernel with the highest graph TFLOPS, of those beside with another layout."""
        beside = [stem for stem, known in self.beside.items() if known == layout]
        timed = [x for x in (beside if layout else self.ours) if x in self.timings]
        return max(timed, key=lambda stem: self.tflops(stem) or 0, default=None)

    def best_peer(self, regime: str = GRAPH) -> Best | None:
        """The fastest of the peers, or what `best_over_fa4` makes of FA4, which is of graphs."""
        found = [Best(name, self.tflops(name, regime) or 0) for name in self.peers]
        if regime == GRAPH and self.best_over_fa4 and FA4 in self.timings:
            known = self.best_over_fa4 * (self.tflops(FA4) or 0)
            found.append(Best(f"{self.best_over_fa4:g} {FA4}", known))
        return max(found, key=lambda best: best.tflops, default=None)

    def over_best(self, stem: str, regime: str = GRAPH) -> float | None:
        """Our kernel's speed over the best peer's; None without either."""
        ours, best = self.tflops(stem, regime), self.best_peer(regime)
        return None if ours is None or best is None else ours / best.tflops


@dataclass(frozen=True)
class Machine:
    """Where a run took place."""

    gpu: str
    driver: str
    multiprocessors: int
    versions: Mapping[str, str | int | None]


@dataclass
class Report:
    """One run. peers: those asked for. matmul: of the bf16 product, before and after all cells."""

    machine: Machine
    peers: Sequence[str]
    rounds: int
    matmul_flops: float
    cells: list[Cell]
    matmul: dict[str, Timing] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def regimes(self) -> list[str]:
        """Those in which everyone was timed."""
        taken = (name for one in self.matmul.values() for name in one.rounds)
        return list(dict.fromkeys(taken))

    def matmul_tflops(self, when: str, regime: str = GRAPH) -> float:
        """Of the median round ``before`` or ``after``."""
        return self.matmul_flops / self.matmul[when].seconds(regime) / 1e12


class Summary(NamedTuple):
    """Of the fastest of our kernels over the best peer in each cell that has both, as graphs."""

    cells: int
    mean: float  # geometric
    least: float
    least_at: Cell


def summary(cells: Iterable[Cell]) -> Summary | None:
    """None when no cell has one of ours and a peer."""
    ratios = []
    for cell in cells:
        stem = cell.fastest()
        ratio = cell.over_best(stem) if stem else None
        if ratio is not None:
            ratios.append((ratio, cell))
    if not ratios:
        return None
    least, least_at = min(ratios, key=lambda pair: pair[0])
    mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
    return Summary(len(ratios), mean, least, least_at)


def lines(cells: Iterable[Cell]) -> Lines:
    """Seconds per launch, as graphs, along each family of problems; our fastest as `OURS`.

    A problem with and without LSE is the same here; of two timings the faster counts.
    """
    found: Lines = {}
    for cell in cells:
        problem = cell.problem.without_lse
        for name, timing in cell.timings.items():
            if name in cell.beside:  # its own problems are of another family
                continue
            contender = OURS if name in cell.ours else name
            line = found.setdefault(problem.family, {}).setdefault(contender, {})
            seconds = timing.seconds(GRAPH)
            line[problem] = min(seconds, line.get(problem, seconds))
    return found


# --- JSON and record ----------------------------------------------------------------------


def as_json(report: Report) -> dict[str, Any]:
    """All rounds of everyone, and the figures that the table shows; plain data."""
    return {
        "gpu": report.machine.gpu,
        "driver": report.machine.driver,
        "multiprocessors": report.machine.multiprocessors,
        "versions": dict(report.machine.versions),
        "peers": list(report.peers),
        "rounds": report.rounds,
        "matmul_flops": report.matmul_flops,
        "matmul": {
            when: _timing_json(timing, report.matmul_flops)
            for when, timing in report.matmul.items()
        },
        "cells": [_cell_json(cell) for cell in report.cells],
        "notes": report.notes,
    }


def _cell_json(cell: Cell) -> dict[str, Any]:
    best = cell.best_peer()
    return {
        "problem": asdict(cell.problem),
        **_drawn(cell.problem),
        "flops": cell.problem.flops,
        **_of_sequences(cell.problem),
        "ours": cell.ours,
        **({"beside": cell.beside} if cell.beside else {}),
        "contenders": {
            name: _timing_json(timing, cell.problem.flops)
            for name, timing in cell.timings.items()
        },
        "best_over_fa4": cell.best_over_fa4,
        "best_peer": best and best._asdict(),
        "over_best": {stem: cell.over_best(stem) for stem in cell.ours},
        "missing": cell.missing,
    }


def _drawn(problem: Problem) -> dict[str, Any]:
    """What its mask reads and how long its sequences are, if anything is said of it."""
    found = draws.drawn_of(problem)
    return {"drawn": found} if found else {}


def _of_sequences(problem: Problem) -> dict[str, Any]:
    """The bytes of K and V, for TB/s."""
    return {"kv_bytes": problem.kv_bytes} if problem.sequences else {}


def _timing_json(timing: Timing, flops: float) -> dict[str, Any]:
    return {
        "error": timing.error,
        **({"way": timing.way} if timing.way else {}),
        "host_seconds": timing.host_seconds(),
        "bare_host_seconds": timing.bare_host_seconds,
        "regimes": {
            regime: {
                "tflops": flops / timing.seconds(regime) / 1e12,
                "rounds": [asdict(one) for one in rounds],
            }
            for regime, rounds in timing.rounds.items()
        },
    }


def from_json(found: Mapping[str, Any]) -> Report:
    """The run that `as_json` described. Raises KeyError or TypeError for anything else."""
    machine = Machine(
        *(found[name] for name in ("gpu", "driver", "multiprocessors", "versions"))
    )
    cells = [
        Cell(
            _problem(cell["problem"]),
            cell["ours"],
            cell["best_over_fa4"],
            {name: _timing(timing) for name, timing in cell["contenders"].items()},
            cell["missing"],
            # Runs of before there were packed sequences have none.
            cell.get("beside", {}),
        )
        for cell in found["cells"]
    ]
    return Report(
        machine,
        found["peers"],
        found["rounds"],
        found["matmul_flops"],
        cells,
        {when: _timing(timing) for when, timing in found["matmul"].items()},
        found["notes"],
    )


def _problem(found: Mapping[str, Any]) -> Problem:
    counts = {name: found[name] for name in ("batch", "heads", "q", "kv")}
    if "spec" in found:
        drawn = {name: found[name] for name in draws.FIELDS if name in found}
        return Problem(found["spec"], **counts, **drawn)
    # Runs of before decision 0046 name what a problem has.
    sides = {side: found.get(f"window_{side}") for side in ("left", "right")}
    spec = {
        **{"op": "fmha_fwd", "dtype": found["dtype"]},
        "head_dim": {"qk": found["d_qk"], "v": found["d_v"]},
        "q_per_kv": found["heads"] // found["kv_heads"],
        "mask": "causal" if found["causal"] else "none",
        "window": {side: "none" if n is None else n for side, n in sides.items()},
        "lse": found["lse"],
        **{name: found[name] for name in ("softcap", "sink") if found.get(name)},
    }
    return problem_for(spec, **counts)


def _timing(found: Mapping[str, Any]) -> Timing:
    rounds = {
        regime: [
            Round(
                one["seconds"],
                tuple(one["sm_clock_mhz"]),
                tuple(one["power_watts"]),
                one["host_seconds"],
            )
            for one in of_regime["rounds"]
        ]
        for regime, of_regime in found["regimes"].items()
    }
    # Runs of before there was such a figure have none.
    more = (found.get("bare_host_seconds"), found.get("way", ""))
    return Timing(found["error"], rounds, *more)


def benchmarked(report: Report, stem: str) -> dict[str, Any] | None:
    """The rung's object of a record; None unless it ran in every cell and regime, beside a peer.

    TFLOPS, and MHz of the SM clock as the median over the cells.
    """
    cells = [cell for cell in report.cells if stem in cell.ours]
    if not cells or any(stem not in cell.timings or not cell.peers for cell in cells):
        return None
    if report.regimes != [*REGIMES]:
        return None
    machine = report.machine
    return {
        "gpu": machine.gpu,
        "driver": machine.driver,
        "versions": dict(machine.versions),
        "rounds": report.rounds,
        "clocks": {
            regime: _median_clock([cell.timings[stem] for cell in cells], regime)
            for regime in (GRAPH, BURST, SUSTAINED)
        },
        "matmul_graph_tflops": {
            when: _figure(report.matmul_tflops(when)) for when in report.matmul
        },
        "cells": [
            {
                "batch": cell.problem.batch,
                "heads": cell.problem.heads,
                "kv_heads": cell.problem.kv_heads,
                "q": cell.problem.q,
                "kv": cell.problem.kv,
                "visible": _figure(cell.problem.visible),
                "mask": cell.problem.mask,
                **_drawn(cell.problem),
                **_of_sequences(cell.problem),
                **_figures(cell, stem),
                "peers": {name: _figures(cell, name) for name in cell.peers},
                **_beside(cell),
            }
            for cell in cells
        ],
    }


def _beside(cell: Cell) -> dict[str, Any]:
    """Our kernels of other layouts that were timed with it, if any."""
    timed = {x: layout for x, layout in cell.beside.items() if x in cell.timings}
    figures = {x: {"layout": of, **_figures(cell, x)} for x, of in timed.items()}
    return {"beside": figures} if figures else {}


def _figures(cell: Cell, name: str) -> dict[str, Any]:
    timing = cell.timings[name]
    found = {
        f"{regime}_tflops": _figure(cell.problem.flops / timing.seconds(regime) / 1e12)
        for regime in REGIMES
    }
    host = timing.host_seconds()
    assert host is not None, "a record has all regimes"
    way = {"way": timing.way} if timing.way else {}
    return {**found, "host_us": _figure(host * 1e6), **way}


def _median_clock(timings: Sequence[Timing], regime: str) -> int | None:
    found = [timing.sm_clock_mhz(regime) for timing in timings]
    known = [clock for clock in found if clock is not None]
    return round(statistics.median(known)) if known else None


def _figure(value: float) -> float:
    """Three significant digits: more would only change from run to run."""
    return float(f"{value:.3g}")
