# SPDX-License-Identifier: Apache-2.0
"""What a run prints: everyone's speed, what tiles cost, how fast the card was, who is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

from rich.table import Table

from ..evidence import evaluation
from . import draws
from .overhead import Fit
from .problems import LAYOUTS
from .results import Cell, Report, summary
from .timing import EAGER, GRAPH, SUSTAINED, Timing

Justify = Literal["left", "right"]

BACKWARD_FLOPS: Final = (
    "FLOPs of a backward pass are those of its five products, for everyone: 2 * batch * heads"
    " * scores * (3 * d_qk + 2 * d_v), of the scores that count, which is"
    " 10 * batch * heads * s^2 * d, half when causal"
)


def print_report(report: Report, fits: Sequence[Fit]) -> None:
    """Print all of it; without colours and line breaks when it is not a terminal."""
    evaluation.print_table(lambda plain: speeds(report, plain=plain))
    if fits:
        print("\nmodel: T = t0 + tiles * (n + c) * flops of a block / A, per launch")
        evaluation.print_table(lambda plain: overheads(fits, plain=plain))
    print()
    for line in closing_lines(report):
        print(line)


def speeds(report: Report, *, plain: bool) -> Table:
    """One row per kernel and problem, TFLOPS: as graphs everyone, in other regimes our kernel.

    ``/best``: over the best peer in that regime. packed, dense: our fastest kernel on the same rows
    without pages, or as a batch of one length, and ours over it, as graphs. host us: a call of
    ``fmha``/of what ``compile()`` returns, in eager rounds. MHz and W: of our sustained round.
    """
    columns: dict[str, Justify] = {"kernel": "left", "problem": "left"}
    columns |= dict.fromkeys((GRAPH, *report.peers), "right")
    columns |= {"best peer": "left", "/best": "right"}
    for layout in beside(report):
        columns |= {layout: "right", f"/{layout}": "right"}
    for regime in beside_graph(report):
        columns |= {regime: "right", f"{regime} /best": "right"}
    if EAGER in report.regimes:
        columns["host us"] = "right"
    if SUSTAINED in report.regimes:
        columns |= {"MHz": "right", "W": "right"}
    rows = [_row(report, cell, stem) for cell in report.cells for stem in cell.ours]
    return evaluation.table(columns, rows, plain=plain)


def beside_graph(report: Report) -> list[str]:
    """The other regimes of a run."""
    return [regime for regime in report.regimes if regime != GRAPH]


def beside(report: Report) -> list[str]:
    """The layouts of our kernels that some cell has beside its own."""
    found = {layout for cell in report.cells for layout in cell.beside.values()}
    return [layout for layout in LAYOUTS if layout in found]


def _row(report: Report, cell: Cell, stem: str) -> list[str]:
    best = cell.best_peer()
    row = [stem, str(cell.problem)]
    row += [_number(cell.tflops(name), 0) for name in (stem, *report.peers)]
    row += [best.name if best else "-", _number(cell.over_best(stem), 2)]
    for layout in beside(report):
        other = cell.tflops(cell.fastest(layout) or "")
        ours = cell.tflops(stem)
        ratio = ours / other if ours and other else None
        row += [_number(other, 0), _number(ratio, 2)]
    for regime in beside_graph(report):
        row.append(_number(cell.tflops(stem, regime), 0))
        row.append(_number(cell.over_best(stem, regime), 2))
    timing = cell.timings.get(stem)
    if EAGER in report.regimes:
        row.append(_host_times(timing) if timing else "-")
    if SUSTAINED in report.regimes:
        row.append(_number(timing.sm_clock_mhz(SUSTAINED) if timing else None, 0))
        row.append(_number(timing.power_watts(SUSTAINED) if timing else None, 0))
    return row


def _host_times(timing: Timing) -> str:
    calls = (timing.host_seconds(), timing.bare_host_seconds)
    return "/".join(_number(x * 1e6, 1) for x in calls if x is not None)


def overheads(fits: Sequence[Fit], *, plain: bool) -> Table:
    """One row per family and contender; see `overhead`."""
    columns: dict[str, Justify] = {
        "problems": "left",
        "contender": "left",
        "A TFLOPS": "right",
        "c blocks": "right",
        "c us": "right",
        "t0 us": "right",
        "worst residual": "right",
        "fitted": "right",
    }
    rows = [
        (
            fit.family,
            fit.contender,
            f"{fit.loop_tflops:.0f}",
            f"{fit.tile_blocks:.2f}",
            f"{fit.tile_seconds * 1e6:.2f}",
            "in c" if fit.launch_seconds is None else f"{fit.launch_seconds * 1e6:.1f}",
            f"{fit.worst:+.1%}",
            f"{sum(p.fitted for p in fit.points)} of {len(fit.points)}",
        )
        for fit in fits
    ]
    return evaluation.table(columns, rows, plain=plain)


def closing_lines(report: Report) -> Iterator[str]:
    """The summary, the matrix product, then notes, and who is missing where and why."""
    if found := summary(report.cells):
        at = found.least_at.problem
        yield (
            f"fastest of ours over the best peer, {found.cells} problems: geometric mean "
            f"{found.mean:.3f}, least {found.least:.3f} at {at.family} {at}"
        )
    if any(cell.problem.backward for cell in report.cells):
        yield BACKWARD_FLOPS
    for when in report.matmul:
        figures = ", ".join(
            f"{regime} {report.matmul_tflops(when, regime):.0f}"
            for regime in report.regimes
        )
        yield f"8192^3 bf16 matrix product {when} all problems, TFLOPS: {figures}"
    for problem in dict.fromkeys(cell.problem for cell in report.cells):
        if draws.is_random(problem.ranges, problem.sequences):
            drawn = draws.summary(problem)
            yield f"drawn for {problem.family} {problem}: {drawn}"
    for cell in report.cells:
        yield from _of_cell(cell)
    yield from report.notes
    reasons: dict[tuple[str, str], list[Cell]] = {}
    for cell in report.cells:
        for name, reason in cell.missing.items():
            reasons.setdefault((name, reason), []).append(cell)
    for (name, reason), cells in reasons.items():
        first = f"{cells[0].problem.family} {cells[0].problem}"
        more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        yield f"no {name} for {first}{more}: {reason}"


def _of_cell(cell: Cell) -> Iterator[str]:
    """TB/s where time is that of loading K and V, and the ways of peers that have several."""
    where = f"{cell.problem.family} {cell.problem}"
    if cell.timings and cell.problem.is_decoding:
        speeds = ", ".join(
            f"{name} {_number(cell.tb_per_s(name), 2)}" for name in cell.timings
        )
        yield f"TB/s of K and V, {where}: {speeds}"
    ways = ", ".join(
        f"{name} {timing.way}" for name, timing in cell.timings.items() if timing.way
    )
    if ways:
        yield f"fastest of several ways, {where}: {ways}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
