# SPDX-License-Identifier: Apache-2.0
"""A picture of a run: TFLOPS over sequence length, a panel per head dim and mask.

Contenders differ in marker and dash as well as in grey, so that it prints in black and white.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import CheckFailed, EnvironmentProblem
from .problems import Problem
from .results import OURS, Lines, Report, lines

SUFFIXES: Final = (".png", ".svg")
DPI: Final = 160
PANEL_INCHES: Final = (3.1, 2.3)
MOST_COLUMNS: Final = 4
STYLES: Final[dict[str, dict[str, Any]]] = {
    OURS: {
        "color": "black",
        "linestyle": "-",
        "marker": "o",
        "linewidth": 2.2,
        "zorder": 3,
    },
    "fa4": {"color": "0.25", "linestyle": "--", "marker": "s"},
    "fa3": {"color": "0.25", "linestyle": "-.", "marker": "D"},
    "cudnn": {"color": "0.5", "linestyle": ":", "marker": "^"},
}


class Panel(NamedTuple):
    """One small multiple. title: the family, and what does not vary. lines: (length, TFLOPS)s."""

    title: str
    lines: dict[str, list[tuple[int, float]]]


def require(file: Path) -> None:
    """Raise, before anything is timed, when no picture can be drawn into this file."""
    if file.suffix not in SUFFIXES:
        raise CheckFailed(
            f"--plot {file}: the name must end in {' or '.join(SUFFIXES)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise EnvironmentProblem(
            "--plot needs matplotlib: pip install 'fmha-gen[plot]'"
        )


def panels(found: Lines) -> list[Panel]:
    """By family, and by batch * q or by batch, whichever more of the family's problems share."""
    drawn = []
    for family, contenders in found.items():
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
            drawn.append(Panel(f"{family}, {shared}", known))
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
    from matplotlib.figure import Figure

    shown = panels(lines(report.cells))
    columns = min(MOST_COLUMNS, max(1, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    size = (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.7)
    # Text stays text and ids stay the same from run to run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fmha-gen"}):
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for place, panel in zip(axes, shown, strict=False):
            _draw_panel(place, panel)
        for place in axes[len(shown) :]:
            place.set_axis_off()
        names = _in_order({name for panel in shown for name in panel.lines})
        handles = [
            matplotlib.lines.Line2D([], [], markersize=4.5, **STYLES[name], label=name)
            for name in names
        ]
        figure.legend(
            handles=handles,
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
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _draw_panel(place: Any, panel: Panel) -> None:
    for name in _in_order(panel.lines):
        lengths, speeds = zip(*panel.lines[name], strict=True)
        place.plot(lengths, speeds, label=name, markersize=4.5, **STYLES[name])
    ticks = sorted({length for line in panel.lines.values() for length, _ in line})
    place.set_xscale("log", base=2)
    place.set_xticks(ticks, [_length(tick) for tick in ticks], fontsize="x-small")
    place.minorticks_off()
    place.set_ylim(bottom=0)
    place.tick_params(axis="y", labelsize="x-small")
    place.grid(axis="y", color="0.85", linewidth=0.6)
    place.spines[["top", "right"]].set_visible(False)
    place.set_title(panel.title, fontsize="small")


def _in_order(names: Iterable[str]) -> list[str]:
    """As in `STYLES`, so that ours is drawn first and named first."""
    known = set(names)
    return [name for name in STYLES if name in known]


def _length(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count}"
