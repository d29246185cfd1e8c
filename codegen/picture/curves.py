# SPDX-License-Identifier: Apache-2.0
"""TFLOPS over sequence length: a line for each contender.

Contenders differ in dash and marker, not in colour, so that it prints in black and white.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from .svg import Panel, Point, circle, line, polygon, text, width_of

WIDTH: Final = 364.0
_LEFT: Final = 34.0
_TOP: Final = 48.0
_BOTTOM: Final = 208.0
_MARK: Final = 3.5  # [pixels] from a marker's centre to its edge
_SAMPLE: Final = 26.0  # of a line in the legend
_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)

Line = Sequence[tuple[int, float]]  # (length, TFLOPS), by length


class Style(NamedTuple):
    """kind: of the line; corners: of its markers, on a circle around the point; none is a disc."""

    kind: str
    corners: tuple[float, ...] = ()  # [degrees]


_OURS: Final = Style("curve ours")
_PEERS: Final = (
    Style("curve dashed", (45, 135, 225, 315)),
    Style("curve dashdot", (0, 90, 180, 270)),
    Style("curve dotted", (30, 150, 270)),
)


def draw(title: str, lines: Mapping[str, Line], top: float) -> Panel:
    """A picture from zero to `top` TFLOPS. lines: by contender, ours first."""
    lengths = sorted({length for line_ in lines.values() for length, _ in line_})
    step = _step(top)
    most = math.ceil(top / step) * step
    first, last = math.log2(lengths[0]), math.log2(lengths[-1])
    right = WIDTH - 12

    def x(length: float) -> float:
        if first == last:
            return (_LEFT + right) / 2
        return (
            _LEFT
            + 8
            + (math.log2(length) - first) / (last - first) * (right - _LEFT - 8)
        )

    def y(tflops: float) -> float:
        return _BOTTOM - tflops / most * (_BOTTOM - _TOP)

    body = [text(0, 14, title, "strong")]
    for number in range(round(most / step) + 1):
        body.append(line([(_LEFT, y(number * step)), (right, y(number * step))]))
        label = f"{number * step:g}"
        body.append(text(_LEFT - 5, y(number * step) + 3, label, "small", "end"))
    free = -math.inf
    for length in lengths:
        label = f"{length // 1024}k" if length % 1024 == 0 else f"{length}"
        half = width_of(label, "small") / 2
        if x(length) - half > free:
            body.append(text(x(length), _BOTTOM + 13, label, "small", "middle"))
            free = x(length) + half + 2
    place = 0.0
    for number, (name, points) in enumerate(lines.items()):
        style = _PEERS[(number - 1) % len(_PEERS)] if number else _OURS
        body += _curve([(place, 32), (place + _SAMPLE, 32)], style, [place + 13])
        body.append(text(place + _SAMPLE + 5, 35, name, "small"))
        place += _SAMPLE + 5 + width_of(name, "small") + 12
        body += _curve([(x(length), y(tflops)) for length, tflops in points], style)
    words = "; ".join(
        f"{name}: "
        + ", ".join(f"{tflops:.0f} at {length}" for length, tflops in points)
        for name, points in lines.items()
    )
    return Panel(title, f"TFLOPS. {words}.", WIDTH, _BOTTOM + 20, tuple(body))


def _curve(
    points: Sequence[Point], style: Style, marks: Sequence[float] | None = None
) -> list[str]:
    """A line, and a marker at each of its points, or at each x of `marks` at its first height."""
    places = points if marks is None else [(mark, points[0][1]) for mark in marks]
    return [line(points, style.kind), *(_marker(place, style) for place in places)]


def _marker(place: Point, style: Style) -> str:
    x, y = place
    if not style.corners:
        return circle(x, y, _MARK, "tip")
    corners = [math.radians(degrees) for degrees in style.corners]
    return polygon(
        [
            (x + _MARK * 1.2 * math.cos(corner), y + _MARK * 1.2 * math.sin(corner))
            for corner in corners
        ],
        "open",
    )


def _step(top: float) -> float:
    """A round distance of rules, of which there are about four."""
    size = 10.0 ** math.floor(math.log10(top / 4))
    return next(step * size for step in _STEPS if top / (step * size) <= 5)
