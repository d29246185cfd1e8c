# SPDX-License-Identifier: Apache-2.0
"""Charts of measurements: TFLOPS over sequence length, beside peers, and over the best peer.

Contenders differ in marker, dash or hatch as well as in grey, so that all print in black and white.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import EnvironmentProblem, UsageProblem
from ..host import files
from .problems import Problem
from .results import OURS, Lines, Report, lines

SUFFIXES: Final = (".png", ".svg")
DPI: Final = 160
PANEL_INCHES: Final = (2.3, 2.1)
TITLE_CHARACTERS: Final = 31  # of a line above a panel
MARGIN_INCHES: Final = 0.7  # for what stands above and below all panels
MOST_COLUMNS: Final = 5  # then a page's width is full
ROWS_INCHES: Final = 3.9  # the width of a chart of rows, which fits a phone
ROW_INCHES: Final = 0.17
MASKS: Final = ("none", "causal")  # from the top, before all others
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
        ("flash", "0.5", (0, (1, 3)), "P", {}),
        ("flex", "0.5", (0, (6, 1, 1, 1, 1, 1)), "v", {}),
    )
}

BARS: Final = {  # colour and hatch
    OURS: ("0.35", ""),
    "fa4": ("0.75", "///"),
    "fa3": ("0.75", "..."),
    "cudnn": ("white", ""),
    "flash": ("white", "..."),
    "flex": ("white", "///"),
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
    require_matplotlib("--plot")


def require_matplotlib(what: str) -> None:
    """Raise EnvironmentProblem when ``what`` cannot be drawn because matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise EnvironmentProblem(
            f"{what} needs matplotlib: pip install 'fmha-gen[plot]'"
        )


def panels(found: Lines) -> list[Panel]:
    """One for each family and batch * q, or batch, whichever more of its problems share."""
    drawn = []
    for contenders in found.values():
        problems = list(dict.fromkeys(p for line in contenders.values() for p in line))
        for shared, members in _runs(problems).items():
            points = {
                name: sorted(
                    (problem.length, problem.flops / seconds / 1e12)
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
    tokens = Counter(problem.tokens for problem in problems)
    batches = Counter(problem.batch for problem in problems)
    runs: dict[str, set[Problem]] = {}
    for problem in problems:
        total = problem.tokens
        if tokens[total] >= batches[problem.batch]:
            runs.setdefault(f"{total} tokens", set()).add(problem)
        else:
            runs.setdefault(f"batch {problem.batch}", set()).add(problem)
    return runs


def draw(report: Report, file: Path) -> None:
    """Write the picture of a run; see `require` for what must hold."""
    files.replace(file, image(figure_of(report), file.suffix[1:]))


def image(figure: Any, form: str) -> bytes:
    """A figure as ``png`` or ``svg``: the same bytes each time, with one version of matplotlib."""
    import matplotlib

    # Text stays text, ids stay the same, and neither date nor version is in it.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fmha-gen"}):
        unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        file = io.BytesIO()
        metadata = unsaid if form == "svg" else None
        figure.savefig(file, format=form, metadata=metadata)
    return file.getvalue()


def figure_of(report: Report) -> Any:
    """The picture of a run as a matplotlib Figure."""
    machine = report.machine
    taken = f"CUDA graphs, median of {report.rounds} rounds"
    where = f"{machine.gpu}, driver {machine.driver}, {taken}"
    return speeds(lines(report.cells), where)


def speeds(found: Lines, caption: str) -> Any:
    """TFLOPS over sequence length as a Figure: columns by head dim, rows by mask, one scale.

    Where a mask is neither causal nor none, panels follow one another instead.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    drawn = panels(found)
    rows = _rows(drawn)
    width = len(rows[0])
    size = (PANEL_INCHES[0] * width, PANEL_INCHES[1] * len(rows) + MARGIN_INCHES)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    axes = figure.subplots(len(rows), width, squeeze=False, sharey=True)
    for row, places in zip(rows, axes, strict=True):
        for place, panel in itertools.zip_longest(places, row):
            if panel:
                _draw_panel(place, panel)
            else:
                place.set_axis_off()
    axes[0, 0].set_ylim(bottom=0)  # of all; afterwards, as it ends the automatic top
    names = in_order({name for panel in drawn for name in panel.lines})
    figure.legend(
        handles=[Line2D([], [], **STYLES[name], label=name) for name in names],
        loc="outside upper center",
        ncols=min(2 * width, len(names)) or 1,
        frameon=False,
    )
    figure.supxlabel(f"sequence length (keys)\n{caption}", fontsize="small")
    figure.supylabel("TFLOPS", fontsize="small")
    return figure


def _rows(drawn: Sequence[Panel]) -> list[list[Panel | None]]:
    """Where panels stand; no row is longer than the first."""
    shown = {(panel.column, panel.mask): panel for panel in drawn}
    columns = sorted({panel.column for panel in drawn}, key=by_number)
    masks = sorted({panel.mask for panel in drawn}, key=_from_the_top)
    if {*masks} <= {*MASKS}:
        bands = _bands(columns)
        grid = [
            [shown.get((x, mask)) for x in band] for band in bands for mask in masks
        ]
        return grid or [[None]]
    return _bands(
        [shown[x, mask] for x in columns for mask in masks if (x, mask) in shown]
    )


def _bands(places: Sequence[Any]) -> list[list[Any]]:
    starts = range(0, len(places), MOST_COLUMNS)
    return [[*places[start : start + MOST_COLUMNS]] for start in starts]


def _from_the_top(mask: str) -> tuple[int, str]:
    return (MASKS.index(mask) if mask in MASKS else len(MASKS), mask)


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
    words = [f"{variant}, {panel.mask}"]
    if len(words[0]) > TITLE_CHARACTERS:
        words = [f"{variant},", panel.mask]
    lines = [textwrap.fill(each, TITLE_CHARACTERS) for each in (*words, shared)]
    place.set_title("\n".join(lines), fontsize="small")


def ratios(found: Mapping[str, Sequence[float]]) -> Any:
    """A Figure with a row for each kernel, by stem: a dot for each problem, at its ratio."""
    from matplotlib.figure import Figure

    size = (ROWS_INCHES, ROW_INCHES * len(found) + MARGIN_INCHES)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    place = figure.subplots()
    for stem, each in found.items():
        place.plot(each, [stem] * len(each), "o", color="black", fillstyle="none")
    place.axvline(1, color="black", linewidth=1)
    place.invert_yaxis()
    place.margins(y=0.5 / len(found))
    _clean(place, "x")
    return figure


def bars(found: Mapping[str, Mapping[str, float]]) -> Any:
    """A Figure of TFLOPS by problem and contender, ours first: a bar for each."""
    from matplotlib.figure import Figure

    every = [(problem, name) for problem, timed in found.items() for name in timed]
    height = ROW_INCHES * (len(every) + len(found)) + MARGIN_INCHES
    figure = Figure(figsize=(ROWS_INCHES, height), dpi=DPI, layout="constrained")
    place = figure.subplots()
    ticks: dict[str, float] = {}
    y = 0.0
    for problem, timed in found.items():
        ticks[problem] = y + (len(timed) + 1) / 2
        for name, tflops in timed.items():
            y += 1
            grey, hatch = BARS[name]
            bar = place.barh(y, tflops, 0.9, color=grey, edgecolor="black", hatch=hatch)
            place.bar_label(bar, [f"{tflops:.0f} {name}"], padding=3, fontsize=6)
        y += 1
    place.set_yticks(list(ticks.values()), list(ticks))
    place.invert_yaxis()
    place.margins(x=0.15, y=0.5 / (y + 1))
    _clean(place, "x")
    return figure


def _clean(place: Any, axis: str) -> None:
    place.tick_params(labelsize="x-small", left=False)
    place.grid(axis=axis, color="0.85", linewidth=0.6)
    place.set_axisbelow(True)
    place.spines[["top", "right", "left"]].set_visible(False)


def in_order(names: Iterable[str]) -> list[str]:
    """As in `STYLES`, so that ours is drawn first and named first."""
    known = set(names)
    return [name for name in STYLES if name in known]


def by_number(column: tuple[str, str]) -> tuple[list[tuple[int, str]], str]:
    """So that d64 comes before d128."""
    variant, shared = column
    parts = re.findall(r"(\D*)(\d*)", variant)
    return [(int(digits or 0), text) for text, digits in parts], shared


def _length(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count}"
