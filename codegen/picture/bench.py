# SPDX-License-Identifier: Apache-2.0
"""The cells of a benchmark: TFLOPS of the kernel beside its peers', a group of bars for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .svg import Panel, circle, line, rect, text

WIDTH: Final = 372.0
_TOP: Final = 30.0
_BAR: Final = 13.0
_LENGTH: Final = 250.0  # of the longest bar
_NAMES: Final = 226.0  # the width of kernels' names
_ROW: Final = 16.0
_KINDS: Final = ("mma", "math", "tma", "v")  # the kernel, then its peers

Cell = Mapping[str, Any]


def best_peer(cell: Cell) -> tuple[str, float]:
    """The fastest of the peers that were timed in the same run, and its TFLOPS by graph."""
    name = max(cell["peers"], key=lambda peer: cell["peers"][peer]["graph_tflops"])
    return name, cell["peers"][name]["graph_tflops"]


def ratio(cell: Cell) -> float:
    """How many times as fast as its best peer the kernel was, by graph."""
    return float(cell["graph_tflops"] / best_peer(cell)[1])


def problem(cell: Cell) -> str:
    """The problem of a cell, in short."""
    heads = str(cell["heads"])
    if cell["kv_heads"] != cell["heads"]:
        heads += f"/{cell['kv_heads']}"
    length = (
        str(cell["q"]) if cell["q"] == cell["kv"] else f"{cell['q']} x {cell['kv']}"
    )
    return f"batch {cell['batch']}, heads {heads}, length {length}"


def bench(cells: Sequence[Cell]) -> Panel:
    """A bar for each contender of each cell, from zero, with its TFLOPS."""
    title = "TFLOPS by CUDA graph"
    body = [text(0, 16, title, "head")]
    most = max(tflops for cell in cells for _, tflops in _contenders(cell))
    y = _TOP
    for cell in cells:
        body.append(text(0, y + 12, problem(cell), "strong"))
        body.append(text(WIDTH, y + 12, f"{ratio(cell):.2f} x best", "mono", "end"))
        y += 18
        contenders = _contenders(cell)
        for kind, (name, tflops) in zip(_KINDS, contenders, strict=False):
            length = tflops / most * _LENGTH
            body.append(rect(0, y, length, _BAR - 2, f"box {kind}"))
            body.append(text(length + 6, y + 9, f"{tflops:.0f} {name}", "small"))
            y += _BAR
        y += 8
    words = "; ".join(
        f"{problem(cell)}: "
        + ", ".join(f"{name} {tflops:.0f}" for name, tflops in _contenders(cell))
        for cell in cells
    )
    return Panel(title, f"{words}.", WIDTH, y, tuple(body))


def speeds(kernels: Mapping[str, Sequence[Cell]]) -> Panel:
    """A line for each kernel: a dot for each problem, at the ratio to its best peer there."""
    title = "Times as fast as the best peer"
    ratios = {stem: [ratio(cell) for cell in cells] for stem, cells in kernels.items()}
    every = [each for found in ratios.values() for each in found]
    first, last = math.floor(min(*every, 1.0) * 10), math.ceil(max(*every, 1.0) * 10)
    last = max(last, first + 1)
    left, right = _NAMES, WIDTH - 8

    def x(value: float) -> float:
        return left + (value * 10 - first) / (last - first) * (right - left)

    bottom = _TOP + 24 + _ROW * len(ratios)
    body = [text(0, 16, title, "head")]
    for tenth in range(first, last + 1):
        kind = "arrow" if tenth == 10 else "rule"
        body.append(line([(x(tenth / 10), _TOP + 16), (x(tenth / 10), bottom)], kind))
        if tenth % 2 == 0:
            label = f"{tenth / 10:.1f}"
            body.append(text(x(tenth / 10), _TOP + 11, label, "small", "middle"))
    for number, (stem, found) in enumerate(ratios.items()):
        y = _TOP + 30 + _ROW * number
        body.append(text(0, y + 3, stem, "small"))
        body += [circle(x(each), y, 3) for each in found]
    words = "; ".join(
        f"{stem}: " + ", ".join(f"{each:.2f}" for each in found)
        for stem, found in ratios.items()
    )
    return Panel(title, f"{words}.", WIDTH, bottom + 6, tuple(body))


def _contenders(cell: Cell) -> list[tuple[str, float]]:
    peers = [(name, of["graph_tflops"]) for name, of in sorted(cell["peers"].items())]
    return [("ours", cell["graph_tflops"]), *peers]
