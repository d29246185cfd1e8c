# SPDX-License-Identifier: Apache-2.0
"""How the five products of a backward kernel follow from one another: operands, P, dS and dQ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...planning.kernel_plan import KernelPlan
from .. import backward
from .svg import Panel, arrow, rect, text

WIDTH: Final = 700.0
_BOX: Final = (200.0, 46.0)
_COLUMNS: Final = (0.0, 250.0, 500.0)
_ROWS: Final = (48.0, 136.0, 224.0, 312.0, 400.0)

# (column, row): look, what it is, and what is said of it.
_Boxes = dict[tuple[int, int], tuple[str, str, str]]


def products(plan: KernelPlan) -> Panel:
    """From shared memory at the top, by where products are summed, to global memory."""
    places = backward.places(plan)
    title = "The five products, and where P, dS and dQ go"
    shapes = {
        each.name.partition(" ")[0]: " x ".join(map(str, each.shape))
        for each in backward.products(plan)
    }
    boxes: _Boxes = {
        (0, 0): ("k", f"K, Q, {backward.statistic(plan)}", "sK, sQ, sStatS"),
        (1, 0): ("v", "V, dO, -D", "sV, sdO, sStatD"),
        (2, 0): ("k", "K, transposed", "sK"),
        (0, 1): ("s", "S^T, then P^T = exp2", shapes["S^T"]),
        (1, 1): ("p", "dP^T, then dS^T = P dP", shapes["dP^T"]),
        (2, 1): ("p", "dS, transposed", places.ds),
        (0, 2): ("mma", "dV += P^T dO", shapes["dV"]),
        (1, 2): ("mma", "dK += dS^T Q", shapes["dK"]),
        (2, 2): ("mma", "dQ = dS K", shapes["dQ"]),
        (0, 3): ("other", "dV", "by TMA, once per tile"),
        (1, 3): ("other", "dK, scaled", "by TMA, once per tile"),
        (2, 3): ("other", "sums of dQ, fp32", "red.add, in every step"),
        (2, 4): ("other", "dQ, scaled", "by the third kernel"),
    }
    body = [text(0, 16, title, "head")]
    for (column, row), (kind, name, more) in boxes.items():
        x, y = _COLUMNS[column], _ROWS[row]
        body += [
            rect(x, y, *_BOX, f"box {kind}"),
            text(x + 8, y + 19, name, "strong"),
            text(x + 8, y + 36, more, "small"),
        ]
    for source, target, words in _ARROWS:
        body += _between(source, target, places.p if words == "P" else words)
    top = "top row, " if " and " in places.shared else "top row and "
    body.append(text(0, 440, f"shared memory: {top}{places.shared}", "small muted"))
    results = f"{places.results}: the next two rows"
    body.append(text(0, 454, results, "small muted"))
    body.append(text(0, 468, "global memory: below them", "small muted"))
    words = "; ".join(f"{name}: {more}" for _, name, more in boxes.values())
    return Panel(title, f"{words}.", WIDTH, 476.0, tuple(body))


_ARROWS: Final = (
    ((0, 0), (0, 1), ""),
    ((1, 0), (1, 1), ""),
    ((0, 1), (1, 1), "P"),
    ((0, 1), (0, 2), "16 bits"),
    ((1, 1), (1, 2), "16 bits"),
    ((1, 1), (2, 1), "dS"),
    ((2, 1), (2, 2), ""),
    ((0, 2), (0, 3), ""),
    ((1, 2), (1, 3), ""),
    ((2, 2), (2, 3), ""),
    ((2, 3), (2, 4), ""),
)


def _between(
    source: tuple[int, int], target: tuple[int, int], words: str
) -> Iterator[str]:
    """To the right or down, with a word beside it."""
    width, height = _BOX
    x, y = _COLUMNS[source[0]], _ROWS[source[1]]
    if source[1] == target[1]:
        points: Sequence[tuple[float, float]] = (
            (x + width, y + height / 2),
            (_COLUMNS[target[0]], y + height / 2),
        )
        middle = (x + width + _COLUMNS[target[0]]) / 2
        yield text(middle, y + height / 2 - 6, words, "small", "middle")
    else:
        middle = x + width / 2
        points = ((middle, y + height), (middle, _ROWS[target[1]]))
        yield text(middle + 6, y + height + 24, words, "small")
    yield from arrow(points)
