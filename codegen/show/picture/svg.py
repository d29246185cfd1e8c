# SPDX-License-Identifier: Apache-2.0
"""A small writer of SVG: shapes and text by class, panels, and the style of all of them.

Text stays text, in fonts of the system; nothing has an id, so that many panels fit one page.
Lengths are in CSS pixels. The same calls give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from xml.sax.saxutils import escape, quoteattr

Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]

# Of the font's size: how wide a character may be. No browser is asked; wide fonts must fit, too.
MONO: Final = 0.61
SANS: Final = 0.6
BOLD: Final = 0.65
SIZES: Final = {
    "title": 18,
    "head": 14,
    "strong": 12,
    "text": 12,
    "mono": 11,
    "small": 10,
}

_HEAD: Final = 5.0  # of an arrow

STYLE: Final = """\
text { fill: #1a1a1a; font: 12px system-ui, "Segoe UI", "Noto Sans", sans-serif; }
.title { font-size: 18px; font-weight: 600; }
.head { font-size: 14px; font-weight: 600; }
.strong { font-weight: 600; }
.mono { font: 11px ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; }
.small { font: 10px ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; }
.muted { fill: #565656; }
.box { stroke: #333; stroke-width: 1; fill: #fff; }
.tma, .k { fill: #cfe2ff; }
.mma, .o { fill: #ffd9a8; }
.math, .other { fill: #e6e6e6; }
.v { fill: #c5efdc; }
.q { fill: #ddd0fb; }
.s { fill: #f3f0c2; }
.p { fill: #fbc9d4; }
.wait, .free { fill: #fff; stroke-dasharray: 4 3; }
.band { fill: #f6f6f6; }
.rule { stroke: #bbb; stroke-width: 1; fill: none; }
.arrow { stroke: #444; stroke-width: 1.2; fill: none; }
.tip { fill: #444; }
.open { stroke: #444; stroke-width: 1.2; fill: #fff; }
.page { fill: #fff; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8e8e8; }
  .muted { fill: #adadad; }
  .box { stroke: #b5b5b5; fill: #16181c; }
  .tma, .k { fill: #1d3f72; }
  .mma, .o { fill: #704705; }
  .math, .other { fill: #3c3f45; }
  .v { fill: #175239; }
  .q { fill: #47327c; }
  .s { fill: #55521b; }
  .p { fill: #742f41; }
  .wait, .free { fill: #16181c; }
  .band { fill: #1e2126; }
  .rule { stroke: #555; }
  .arrow { stroke: #bdbdbd; }
  .tip { fill: #bdbdbd; }
  .open { stroke: #bdbdbd; fill: #16181c; }
  .page { fill: #16181c; }
}
@media print {
  text, .muted { fill: #000; }
  .box, .arrow, .open { stroke: #000; }
  .tip { fill: #000; }
  .page, .band, .wait, .free, .open { fill: #fff; }
  .tma, .k { fill: #f2f2f2; }
  .mma, .o { fill: #d4d4d4; }
  .math, .other, .s { fill: #fff; }
  .v, .q { fill: #e4e4e4; }
  .p { fill: #c4c4c4; }
}
"""


@dataclass(frozen=True)
class Panel:
    """A picture of its own: what it is called, what it shows in words, how large it is."""

    title: str
    description: str
    width: float
    height: float
    body: tuple[str, ...]


def document(panel: Panel, *, style: bool = True) -> str:
    """Return an SVG element of a panel; `style` is for a file that stands alone."""
    width, height = _number(panel.width), _number(panel.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" role="img"'
        f" aria-label={quoteattr(panel.title)}>",
        f"<title>{escape(panel.title)}</title>",
        f"<desc>{escape(panel.description)}</desc>",
        *(
            [
                # Printed, it is one page, of whatever paper.
                f"<style>\n{STYLE}@page {{ size: {width}px {height}px; margin: 0; }}",
                "</style>",
                rect(0, 0, panel.width, panel.height, "page"),
            ]
            if style
            else []
        ),
        *panel.body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A rectangle; `kind` is its classes."""
    place = f'x="{_number(x)}" y="{_number(y)}"'
    size = f'width="{_number(width)}" height="{_number(height)}"'
    return f'<rect {place} {size} class="{kind}"/>'


def text(
    x: float, y: float, words: str, kind: str = "", anchor: Anchor = "start"
) -> str:
    """A line of text on the baseline y."""
    classes = f' class="{kind}"' if kind else ""
    anchored = f' text-anchor="{anchor}"' if anchor != "start" else ""
    place = f'x="{_number(x)}" y="{_number(y)}"'
    return f"<text {place}{classes}{anchored}>{escape(words)}</text>"


def upright(x: float, y: float, words: str, kind: str) -> str:
    """A line of text that goes down from (x, y), its letters to the right of x."""
    place = f'transform="translate({_number(x)} {_number(y)}) rotate(90)"'
    return f'<text {place} class="{kind}">{escape(words)}</text>'


def line(points: Sequence[Point], kind: str = "rule") -> str:
    """A line through points."""
    path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    return f'<polyline points="{path}" class="{kind}"/>'


def arrow(points: Sequence[Point]) -> tuple[str, str]:
    """A line with a tip at its last point, to which it comes from the left or along a diagonal."""
    (x0, y0), (x1, y1) = points[-2:]
    length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-6)
    dx, dy = (x1 - x0) / length * _HEAD, (y1 - y0) / length * _HEAD
    corners = (
        (x1, y1),
        (x1 - dx - dy / 2, y1 - dy + dx / 2),
        (x1 - dx + dy / 2, y1 - dy - dx / 2),
    )
    return line(points, "arrow"), polygon(corners, "tip")


def polygon(points: Sequence[Point], kind: str) -> str:
    """A closed shape; `kind` is its classes."""
    path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    return f'<polygon points="{path}" class="{kind}"/>'


def circle(x: float, y: float, radius: float, kind: str = "open") -> str:
    """A circle."""
    place = f'cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}"'
    return f'<circle {place} class="{kind}"/>'


def moved(x: float, y: float, body: Iterable[str]) -> tuple[str, ...]:
    """Shapes, moved."""
    return (f'<g transform="translate({_number(x)} {_number(y)})">', *body, "</g>")


def width_of(words: str, kind: str) -> float:
    """How wide a text may be, in the widest usual font. kind: a key of SIZES."""
    per_character = SANS if kind == "text" else BOLD
    if kind in ("mono", "small"):
        per_character = MONO
    return len(words) * SIZES[kind] * per_character


def _number(value: float) -> str:
    """At most one decimal."""
    return f"{value:.1f}".removesuffix(".0")
