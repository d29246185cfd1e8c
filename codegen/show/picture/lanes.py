# SPDX-License-Identifier: Apache-2.0
"""Roles side by side, their steps from top to bottom, with an arrow for each barrier.

Rows are an order, not time: a step is below all that it waits for. Above a step is what it waits
for, below it what it signals; a circle stands for an earlier or a later block or tile.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ...planning.protocol import Arrow, Lane, Phase, Step, arrows
from .svg import Panel, Point, arrow, circle, line, rect, text, upright, width_of

_HEADER: Final = 92.0  # where the first row is, under the title and the roles
_LINE: Final = 13.0  # of small text
_TEXT_LINE: Final = 15.0
_WRAP: Final = 19  # characters of a step's text
_STUB: Final = 13.0  # from a circle to its step
_ENTRY: Final = 16.0  # from where an arrow turns to the step it goes to
_TRACK: Final = 6.0
_FLIGHT: Final = 14.0  # the width of what runs
_LEAST_WIDTH: Final = 440.0  # of the legend

_At = tuple[int, int]  # lane, step

_LEGEND: Final = (
    ("tma", "TMA"),
    ("mma", "tensor cores"),
    ("math", "threads"),
    ("wait", "waits only"),
)


def lanes(phase: Phase) -> Panel:
    """A lane for each role, a box for each step."""
    drawing = _Drawing(phase)
    return Panel(
        phase.title, _words(phase), drawing.width, drawing.height, tuple(drawing.body())
    )


def _words(phase: Phase) -> str:
    told = []
    for lane in phase.lanes:
        steps = ", ".join(step.text for step in lane.steps) or "nothing"
        told.append(f"{lane.role} ({lane.warps}): {steps}")
    return ". ".join(told) + "."


@dataclass(frozen=True)
class _Row:
    """Where the parts of a row are: tracks of arrows, then waits, box and signals of its steps."""

    top: float
    box: float
    box_height: float
    bottom: float


@dataclass(frozen=True)
class _Column:
    """Where a lane is, and the steps in it."""

    start: float
    left: float
    right: float
    end: float


class _Drawing:
    """Rows, columns and tracks of a phase, and its shapes."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self._arrows = arrows(phase)
        self._row = rows(phase)
        self._verticals, self._channels = self._routes()
        self._rows = self._make_rows()
        self._columns = self._make_columns()
        self.width = max(self._columns[-1].end, _LEAST_WIDTH)
        self.height = self._rows[-1].bottom + 34

    def body(self) -> Iterator[str]:
        """Yield all shapes: bands first, then arrows, boxes, the legend."""
        characters = int(self.width / width_of("x", "head"))
        for number, words in enumerate(textwrap.wrap(self._phase.title, characters)):
            yield text(0, 14 + 15 * number, words, "head")
        bottom = self._rows[-1].bottom
        for column in self._columns[::2]:
            yield rect(column.start, 36, column.end - column.start, bottom - 36, "band")
        for each in self._arrows:
            yield from arrow(self._path(each))
        for number, lane in enumerate(self._phase.lanes):
            yield from self._lane(number, lane)
        yield from self._legend(bottom + 20)

    def _routes(
        self,
    ) -> tuple[
        Mapping[tuple[_At, str], tuple[int, int]], Mapping[tuple[_At, str], int]
    ]:
        """Tracks: for each signal (gutter, track) beside its lane, for each wait over its row.

        Gutter i is left of lane i. All arrows of a signal share its track.
        """
        verticals: dict[tuple[_At, str], tuple[int, int]] = {}
        channels: dict[tuple[_At, str], int] = {}
        beside: Counter[int] = Counter()
        over: Counter[int] = Counter()
        for each in self._arrows:
            signal = (each.source, each.signal.place)
            if signal not in verticals:
                gutter = each.source[0] + self._to_the_right(each)
                verticals[signal] = (gutter, beside[gutter])
                beside[gutter] += 1
            wait = (each.target, each.wait.place)
            if wait not in channels:
                row = self._row[each.target]
                channels[wait] = over[row]
                over[row] += 1
        return verticals, channels

    def _to_the_right(self, each: Arrow) -> bool:
        return each.target[0] > each.source[0]

    def _make_rows(self) -> list[_Row]:
        found: list[_Row] = []
        top = _HEADER
        for number in range(1 + max(self._row.values())):
            steps = [self._step(at) for at, row in self._row.items() if row == number]
            tracks = sum(self._row[at] == number for at, _ in self._channels)
            waits = max(len(step.waits) for step in steps)
            signals = max(len(_signals(step)) for step in steps)
            lines = max(len(_wrapped(step.text)) for step in steps)
            box = top + 6 + tracks * _TRACK + waits * _LINE + 3
            height = lines * _TEXT_LINE + 8
            for first, name in self._ends_in(number):
                # As long as its name.
                start = found[first].box if first < number else box
                height = max(height, start + width_of(name, "small") + 8 - box)
            bottom = box + height + 3 + signals * _LINE + 4
            found.append(_Row(top, box, height, bottom))
            top = bottom
        return found

    def _ends_in(self, row: int) -> Iterator[tuple[int, str]]:
        """What is known to be over in a row: the row where it was issued, its name."""
        for number, lane in enumerate(self._phase.lanes):
            issued = {x.issues: i for i, x in enumerate(lane.steps) if x.issues}
            for index, step in enumerate(lane.steps):
                if self._row[number, index] == row:
                    for name in step.retires:
                        yield self._row[number, issued[name]], name

    def _make_columns(self) -> list[_Column]:
        """Lanes from left to right, each with the gutter left of it; the last with both."""
        found = []
        x = 0.0
        last = len(self._phase.lanes) - 1
        for number, lane in enumerate(self._phase.lanes):
            left = x + self._gutter(number)
            right = left + max(
                _lane_width(lane), *(_width(step) for step in lane.steps), 0.0
            )
            flights = _FLIGHT * sum(bool(step.issues) for step in lane.steps)
            end = right + flights
            if number == last:
                end += self._gutter(number + 1)
            found.append(_Column(x, left, right, end))
            x = end
        return found

    def _gutter(self, number: int) -> float:
        """Room for tracks between what belongs to the lanes at both sides."""
        tracks = sum(gutter == number for gutter, _ in self._verticals.values())
        ends = (number > 0) + (number < len(self._phase.lanes))
        return (_ENTRY + 8) * ends + tracks * _TRACK

    def _track(self, gutter: int, track: int) -> float:
        """The x of a track."""
        first = self._columns[gutter - 1].end if gutter else 0.0
        if gutter == len(self._columns):
            last = self._columns[-1]
            first = last.end - self._gutter(gutter)
        return first + (_ENTRY + 8) * (gutter > 0) + (track + 0.5) * _TRACK

    def _step(self, at: _At) -> Step:
        return self._phase.lanes[at[0]].steps[at[1]]

    def _signal_y(self, at: _At, place: str) -> float:
        """Of the first line about a signal."""
        lines = 0
        for signal in self._step(at).signals:
            if signal.place == place:
                break
            lines += len(signal.lines)
        row = self._rows[self._row[at]]
        return row.box + row.box_height + 3 + lines * _LINE + 7

    def _wait_y(self, at: _At, place: str) -> float:
        places = [wait.place for wait in self._step(at).waits]
        row = self._rows[self._row[at]]
        return row.box - 3 - (len(places) - places.index(place)) * _LINE + 6

    def _leaves_left(self, at: _At, place: str) -> bool:
        """A signal goes to a lane at the left."""
        return self._verticals.get((at, place), (at[0] + 1, 0))[0] == at[0]

    def _comes_from_right(self, at: _At, place: str) -> bool:
        """What a step waits for comes from a lane at the right, or from its own."""
        sources = {
            a.source[0] for a in self._arrows if (a.target, a.wait.place) == (at, place)
        }
        return bool(sources) and min(sources) >= at[0]

    def _right(self, lane: int) -> float:
        """Of a lane's steps and of what runs beside them."""
        flights = sum(bool(step.issues) for step in self._phase.lanes[lane].steps)
        return self._columns[lane].right + flights * _FLIGHT

    def _path(self, each: Arrow) -> list[Point]:
        """From the signal along its lane, over the row of the target, to its wait."""
        signal, wait = (each.source, each.signal.place), (each.target, each.wait.place)
        source, target = self._columns[each.source[0]], self._columns[each.target[0]]
        out = source.left if self._leaves_left(*signal) else source.right
        along = self._track(*self._verticals[signal])
        over = (
            self._rows[self._row[each.target]].top + 5 + self._channels[wait] * _TRACK
        )
        start, end = self._signal_y(*signal), self._wait_y(*wait)
        number = self._step(each.target).waits.index(each.wait)
        if self._comes_from_right(*wait):
            tip = target.right + 1
            turn = self._right(each.target[0]) + _ENTRY + 4 - 4 * number
        else:
            tip = target.left - 1
            turn = target.left - _ENTRY - 4 + 4 * number
        return [
            (out, start),
            (along, start),
            (along, over),
            (turn, over),
            (turn, end),
            (tip, end),
        ]

    def _lane(self, number: int, lane: Lane) -> Iterator[str]:
        column = self._columns[number]
        yield text(column.left, 54, lane.role, "strong")
        yield text(column.left, 69, lane.warps, "small muted")
        yield text(column.left, 82, f"{lane.registers} registers", "small muted")
        for index, step in enumerate(lane.steps):
            yield from self._cell((number, index), step)
        yield from self._flights(number, lane)

    def _cell(self, at: _At, step: Step) -> Iterator[str]:
        row, column = self._rows[self._row[at]], self._columns[at[0]]
        left, right = column.left, column.right
        for wait in step.waits:
            y = self._wait_y(at, wait.place)
            if self._comes_from_right(at, wait.place):
                yield text(right - 3, y + 3, wait.label, "small", "end")
            else:
                yield text(left + 3, y + 3, wait.label, "small")
            if wait.earlier:
                yield from arrow([(left - _STUB, y), (left - 1, y)])
                yield circle(left - _STUB, y, 2.5)
        yield rect(left, row.box, right - left, row.box_height, f"box {step.unit}")
        lines = _wrapped(step.text)
        y = row.box + (row.box_height - len(lines) * _TEXT_LINE) / 2 + 11
        for index, words in enumerate(lines):
            middle = (left + right) / 2
            yield text(middle, y + index * _TEXT_LINE, words, "strong", "middle")
        yield from self._signals(at, step)

    def _signals(self, at: _At, step: Step) -> Iterator[str]:
        column = self._columns[at[0]]
        for signal in step.signals:
            y = self._signal_y(at, signal.place)
            to_left = self._leaves_left(at, signal.place)
            for index, words in enumerate(signal.lines):
                if to_left:
                    yield text(column.left + 3, y + 3 + index * _LINE, words, "small")
                else:
                    x = column.right - 3
                    yield text(x, y + 3 + index * _LINE, words, "small", "end")
            if (at, signal.place) not in self._verticals:
                end = self._right(at[0]) + _STUB
                yield line([(column.right, y), (end - 2.5, y)], "arrow")
                yield circle(end, y, 2.5)

    def _flights(self, number: int, lane: Lane) -> Iterator[str]:
        """Bars from where work is issued to where it is known to be over."""
        column = self._columns[number]
        retired = {
            name: index
            for index, step in enumerate(lane.steps)
            for name in step.retires
        }
        issued = [
            (step.issues, index) for index, step in enumerate(lane.steps) if step.issues
        ]
        for track, (name, index) in enumerate(issued):
            first = self._rows[self._row[number, index]]
            last = self._rows[self._row[number, retired[name]]]
            top, bottom = first.box, last.box + last.box_height
            x = column.right + track * _FLIGHT
            kind = f"box {lane.steps[index].unit}"
            yield rect(x + 2, top, _FLIGHT - 3, bottom - top, kind)
            words = f"{name} runs"
            if width_of(words, "small") > bottom - top - 8:
                words = name
            yield upright(x + 4, top + 4, words, "small")

    def _legend(self, y: float) -> Iterator[str]:
        x = 0.0
        for kind, words in _LEGEND:
            yield rect(x, y - 10, 14, 12, f"box {kind}")
            yield text(x + 19, y, words)
            x += 28 + width_of(words, "text")
        yield circle(x + 4, y - 4, 2.5)
        yield text(x + 12, y, "earlier, later")


def rows(phase: Phase) -> dict[_At, int]:
    """A row for each step: after all it waits for, and as late as those it is for let it.

    A step that none of the phase is for stays as early as it can.
    """
    after: dict[_At, set[_At]] = {
        (number, index): {(number, index - 1)} if index else set()
        for number, lane in enumerate(phase.lanes)
        for index in range(len(lane.steps))
    }
    for each in arrows(phase):
        after[each.target].add(each.source)
    early: dict[_At, int] = {}

    def place(at: _At) -> int:
        if at not in early:
            early[at] = 1 + max((place(before) for before in after[at]), default=-1)
        return early[at]

    for at in after:
        place(at)
    late = dict(early)
    for at in sorted(after, key=lambda each: early[each], reverse=True):
        used_by = [late[other] for other, before in after.items() if at in before]
        late[at] = min(used_by) - 1 if used_by else early[at]
    return late


def _wrapped(words: str) -> list[str]:
    return textwrap.wrap(words, _WRAP, break_on_hyphens=False)


def _signals(step: Step) -> list[str]:
    return [words for signal in step.signals for words in signal.lines]


def _width(step: Step) -> float:
    """Of a step's cell: its box and the text over and under it."""
    strong = max(width_of(words, "strong") for words in _wrapped(step.text)) + 12
    small = [*(wait.label for wait in step.waits), *_signals(step)]
    return max([strong, *(width_of(words, "small") + 6 for words in small)])


def _lane_width(lane: Lane) -> float:
    """Of what a lane is called."""
    small = max(lane.warps, f"{lane.registers} registers", key=len)
    return max(width_of(lane.role, "strong"), width_of(small, "small"))
