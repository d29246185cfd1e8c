# SPDX-License-Identifier: Apache-2.0
"""Shared memory of a CTA and tensor memory of an SM, to scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ...planning.kernel_plan import DevicePlan, Region
from .svg import Panel, line, rect, text, width_of

WIDTH: Final = 372.0
_TOP: Final = 58.0
_SCALE: Final = 480.0  # the height of all there is
_BAR: Final = (14.0, 96.0)  # left edge, width
_LEADER: Final = 24.0
_COLUMNS: Final = (190.0, 250.0, 262.0)  # ends of two numbers, start of the name
_ROW: Final = 15.0

# The look of a region or part by its first letters.
_KINDS: Final = {
    "sQ": "q",
    "sK": "k",
    "sV": "v",
    "sO": "o",
    "sdO": "o",
    "sdS": "p",
    "S of": "s",
    "P of": "p",
    "O": "o",
    "padding": "free",
}


@dataclass(frozen=True)
class _Part:
    """A part of a memory: where, how much of it, and what for."""

    start: int
    size: int
    name: str
    kind: str

    @property
    def end(self) -> int:
        return self.start + self.size

    def meets(self, other: _Part) -> bool:
        """They have something in common."""
        return self.start < other.end and other.start < self.end


def shared_memory(kernel: DevicePlan, limit: int) -> Panel | None:
    """The regions of a CTA's shared memory, a line for each stage; None where there are none.

    limit: [bytes]
    """
    if not kernel.smem:
        return None
    parts, used = list(_stages(kernel.smem)), kernel.smem_bytes
    if used < limit:
        parts.append(_Part(used, limit - used, "free", "free"))
    title = f"Shared memory: {used} of {limit} B"
    return _map(title, ("offset", "bytes"), parts, limit)


def tensor_memory(kernel: DevicePlan, limit: int) -> Panel | None:
    """S, P and O in tensor memory, from column 0 on; None where there is none.

    limit: [columns]
    """
    if not kernel.tmem:
        return None
    parts = [_Part(p.first, p.count, p.name, _kind(p.name)) for p in kernel.tmem]
    end = max(part.end for part in parts)
    if end < limit:
        parts.append(_Part(end, limit - end, "free", "free"))
    title = f"Tensor memory: {end} of {limit} columns"
    return _map(title, ("first", "columns"), parts, limit)


def _stages(regions: Sequence[Region]) -> Iterator[_Part]:
    start = 0
    for region in regions:
        kind = _kind(region.name)
        size = region.nbytes // region.stages
        for stage in range(region.stages):
            name = region.name
            if region.holds:
                name += f"[{stage}]: {region.holds}"
            if size:
                yield _Part(start, size, name, kind)
            start += size


def _kind(name: str) -> str:
    kinds = (kind for first, kind in _KINDS.items() if name.startswith(first))
    return next(kinds, "other")


def _map(
    title: str, heads: tuple[str, str], parts: Sequence[_Part], limit: int
) -> Panel:
    """All parts from top to bottom, each beside its numbers; a part over others is inset."""
    left, width = _BAR
    levels = _levels(parts)
    edges = [left + width * (1 - 0.5**level) for level in range(max(levels) + 1)]
    edges.append(left + width)
    first, second, name = _COLUMNS
    body = [
        text(0, 16, title, "head"),
        text(first, _TOP - 12, heads[0], "mono muted", "end"),
        text(second, _TOP - 12, heads[1], "mono muted", "end"),
    ]
    middles = [_TOP + (part.start + part.size / 2) * _SCALE / limit for part in parts]
    rows = _spread(middles)
    for index, (part, middle) in enumerate(zip(parts, middles, strict=True)):
        level = levels[index]
        x, right = edges[level], left + width
        if level and any(
            deeper > level and part.meets(over)
            for over, deeper in zip(parts, levels, strict=True)
        ):
            right = edges[level + 1]
        y, height = _TOP + part.start * _SCALE / limit, part.size * _SCALE / limit
        body.append(rect(x, y, right - x, height, f"box {part.kind}"))
        if level:
            letters = part.name.partition(" ")[0].partition("^")[0]
            body.append(text(x + 6, middle + 4, letters, "strong"))
        elif height >= _ROW:
            # A part that another one is in has its letter in what that leaves.
            short = part.name.partition(":")[0].partition(" ")[0]
            body.append(text(left + 6, y + 14, short, "mono"))
    for part, middle, row in zip(parts, middles, rows, strict=True):
        edge = left + width
        body.append(
            line(
                [
                    (edge, middle),
                    (edge + 6, middle),
                    (edge + _LEADER - 4, row),
                    (edge + _LEADER, row),
                ]
            )
        )
        body += [
            text(first, row + 4, str(part.start), "mono", "end"),
            text(second, row + 4, str(part.size), "mono", "end"),
            text(name, row + 4, part.name, "mono"),
        ]
    bottom = _TOP + _SCALE
    body.append(text(left, bottom + 14, str(limit), "mono muted"))
    words = "; ".join(f"{part.name} at {part.start}, {part.size}" for part in parts)
    told = f"To scale, from the top: {words}."
    longest = max(width_of(part.name, "mono") for part in parts)
    wide = max(WIDTH, name + longest)
    return Panel(title, told, wide, bottom + 24, tuple(body))


def _levels(parts: Sequence[_Part]) -> list[int]:
    """Of each part how many others, one over the other, it is over: those before it."""
    levels: list[int] = []
    for index, part in enumerate(parts):
        under = [levels[i] for i in range(index) if parts[i].meets(part)]
        levels.append(max(under, default=-1) + 1)
    return levels


def _spread(wanted: Sequence[float]) -> list[float]:
    """Rows as near to where they are wanted as their height lets, in the same order."""
    order = sorted(range(len(wanted)), key=lambda index: (wanted[index], index))
    placed: list[float] = []
    low, high = _TOP + _ROW / 2, _TOP + _SCALE - _ROW / 2
    for index in order:
        least = placed[-1] + _ROW if placed else low
        placed.append(max(wanted[index], least))
    limit = high
    for number in reversed(range(len(placed))):
        placed[number] = min(placed[number], limit)
        limit = placed[number] - _ROW
    rows = [0.0] * len(wanted)
    for index, row in zip(order, placed, strict=True):
        rows[index] = row
    return rows
