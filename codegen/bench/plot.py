# SPDX-License-Identifier: Apache-2.0
"""A picture of a run: TFLOPS over sequence length, columns by head dim, rows by mask.

Contenders differ in marker and dash as well as in grey, so that it prints in black and white.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from .. import files
from ..errors import EnvironmentProblem, UsageProblem
from .problems import Problem
from .results import OURS, Lines, Report, lines

SUFFIXES: Final = (".png", ".svg")
DPI: Final = 160
PANEL_INCHES: Final = (2.3, 2.1)
MARGIN_INCHES: Final = 0.7  # for what stands above and below all panels
MOST_COLUMNS: Final = 5  # then a page's width is full
MASKS: Final = ("none", "causal")  # from the top
STYLES: Final[dict[str, dict[str, Any]]] = {
    name: {
        "color": color,
        "linestyle": dash,
        "marker": marker,
        "markersize": 4.5,
        **more,
    }
    for name, color, dash, marker, more in (
        (OURS, "black", "-", "o", {"linewidth": 2.2, "zorder": 3}),
        ("fa4", "0.25", "--", "s", {}),
        ("fa3", "0.25", "-.", "D", {}),
        ("cudnn", "0.5", ":", "^", {}),
    )
}


class Panel(NamedTuple):
    """One small multiple. column: (variant, what its problems share). lines: by contender."""

    column: tuple[str, str]
    mask: str
    lines: dict[str, list[tuple[int, float]]]  # (length, TFLOPS)


def require(file: Path) -> None:
    """Raise, before anything is timed, when no picture can be drawn into this file."""
    if file.suffix not in SUFFIXES:
        raise UsageProblem(
            f"--plot {file}: the name must end in {' or '.join(SUFFIXES)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise EnvironmentProblem(
            "--plot needs matplotlib: pip install 'fmha-gen[plot]'"
        )


def panels(found: Lines) -> list[Panel]:
    """One for each family and batch * q, or batch, whichever more of its problems share."""
    drawn = []
    for contenders in found.values():
        problems = list(dict.fromkeys(p for line in contenders.values() for p in line))
        for shared, members in _runs(problems).items():
            points = {
                name: sorted(
                    (problem.kv, problem.flops / seconds / 1e12)
                    for problem, seconds in line.items()
                    if problem in members
                )
                for name, line in contenders.items()
            }
            known = {name: line for name, line in points.items() if line}
            one = next(iter(members))
            drawn.append(Panel((one.variant, shared), one.mask, known))
    return drawn


def _runs(problems: Sequence[Problem]) -> dict[str, set[Problem]]:
    """Problems that belong on one line: few lines with many problems each."""
    tokens = Counter(problem.batch * problem.q for problem in problems)
    batches = Counter(problem.batch for problem in problems)
    runs: dict[str, set[Problem]] = {}
    for problem in problems:
        total = problem.batch * problem.q
        if tokens[total] >= batches[problem.batch]:
            runs.setdefault(f"{total} tokens", set()).add(problem)
        else:
            runs.setdefault(f"batch {problem.batch}", set()).add(problem)
    return runs


def draw(report: Report, file: Path) -> None:
    """Write the picture; see `require` for what must hold."""
    import matplotlib

    # Text stays text, and ids stay the same from run to run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fmha-gen"}):
        undated = {"Date": None} if file.suffix == ".svg" else None
        image = io.BytesIO()
        figure_of(report).savefig(image, format=file.suffix[1:], metadata=undated)
    files.replace(file, image.getvalue())


def figure_of(report: Report) -> Any:
    """The picture as a matplotlib Figure."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    drawn = panels(lines(report.cells))
    shown = {(panel.column, panel.mask): panel for panel in drawn}
    masks = [mask for mask in MASKS if any(mask == panel.mask for panel in drawn)]
    columns = sorted({panel.column for panel in drawn}, key=by_number)
    width = max(1, min(MOST_COLUMNS, len(columns)))
    bands = [columns[i : i + width] for i in range(0, len(columns), width)]
    rows = [(band, mask) for band in bands for mask in masks] or [([], "")]

    size = (PANEL_INCHES[0] * width, PANEL_INCHES[1] * len(rows) + MARGIN_INCHES)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    axes = figure.subplots(len(rows), width, squeeze=False, sharey=True)
    for (band, mask), places in zip(rows, axes, strict=True):
        for place, column in itertools.zip_longest(places, band):
            if panel := shown.get((column, mask)):
                _draw_panel(place, panel)
            else:
                place.set_axis_off()
    axes[0, 0].set_ylim(bottom=0)  # of all; afterwards, as it ends the automatic top
    names = in_order({name for panel in drawn for name in panel.lines})
    figure.legend(
        handles=[Line2D([], [], **STYLES[name], label=name) for name in names],
        loc="outside upper center",
        ncols=len(STYLES),
        frameon=False,
    )
    machine = report.machine
    figure.supxlabel(
        f"sequence length (keys)\n{machine.gpu}, driver {machine.driver}, CUDA graphs, "
        f"median of {report.rounds} rounds",
        fontsize="small",
    )
    figure.supylabel("TFLOPS", fontsize="small")
    return figure


def _draw_panel(place: Any, panel: Panel) -> None:
    for name in in_order(panel.lines):
        lengths, speeds = zip(*panel.lines[name], strict=True)
        place.plot(lengths, speeds, label=name, **STYLES[name])
    ticks = sorted({length for line in panel.lines.values() for length, _ in line})
    place.set_xscale("log", base=2)
    place.set_xticks(ticks, [_length(tick) for tick in ticks], fontsize="x-small")
    place.minorticks_off()
    place.tick_params(axis="y", labelsize="x-small")
    place.grid(axis="y", color="0.85", linewidth=0.6)
    place.spines[["top", "right"]].set_visible(False)
    variant, shared = panel.column
    place.set_title(f"{variant}, {panel.mask}\n{shared}", fontsize="small")


def in_order(names: Iterable[str]) -> list[str]:
    """As in `STYLES`, so that ours is drawn first and named first."""
    known = set(names)
    return [name for name in STYLES if name in known]


def order(panel: Panel) -> tuple[Any, ...]:
    """By column, then from the top."""
    return *by_number(panel.column), MASKS.index(panel.mask)


def by_number(column: tuple[str, str]) -> tuple[list[tuple[int, str]], str]:
    """So that d64 comes before d128."""
    variant, shared = column
    parts = re.findall(r"(\D*)(\d*)", variant)
    return [(int(digits or 0), text) for text, digits in parts], shared


def _length(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count}"
