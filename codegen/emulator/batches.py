# SPDX-License-Identifier: Apache-2.0
"""Lines of a generated block that do the same to other registers, as one line for all of them.

Unrolled code repeats itself: a tile of S is 64 times the same few instructions, and numpy takes
longer to begin on 128 lanes than to work on them. Lines of one pattern of which none needs
another's result become one line on an array `[lines, lanes]`. Nothing moves across a line that does
more than to assign an expression of registers to a register. A check of registers may wait for
lines after it that leave these alone: code that checks what it just computed has batches, too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

FEWEST = 4
"""Lines that are worth a batch: gathering operands and handing results out takes about two."""

_ASSIGNMENT = re.compile(r"R\[(\d+)\] = (.*)")
_CHECK = re.compile(
    r"if (R\[\d+\] is IN_FLIGHT|numerics\.(?P<late>saturates\w*|miscoded)\()"
)
"""A line that only looks at registers, and reports; late: of values, and these may come later."""
_VALUE = re.compile(r"R\[(\d+)\]|\bK\d+\b")
_NAME = re.compile(r"\b[A-Za-z_][\w.]*")
_BY_LANE = re.compile(
    r"where|mask|view|astype|np\.(bool_|u?int\d+|float\d+|maximum|minimum)|numerics\.\w+"
)
"""Names in expressions that mean the same for every lane, however many axes there are before."""


@dataclass(frozen=True)
class Assignment:
    """A line `R[slot] = expression`."""

    line: str
    slot: int
    pattern: str
    """The expression with `{}` for each register and constant."""
    values: tuple[str, ...]
    """These, in their order."""

    @classmethod
    def parse(cls, line: str) -> Assignment | None:
        """None for a line that does something else; a copy keeps the very array, and is one."""
        found = _ASSIGNMENT.fullmatch(line)
        if found is None or "{" in line:
            return None
        values = tuple(value[0] for value in _VALUE.finditer(found[2]))
        pattern = _VALUE.sub("{}", found[2])
        by_lane = all(_BY_LANE.fullmatch(name) for name in _NAME.findall(pattern))
        return cls(line, int(found[1]), pattern, values) if by_lane else None

    @property
    def reads(self) -> set[int]:
        """The slots of the registers in it."""
        return {int(value[2:-1]) for value in self.values if value.startswith("R")}


def batched(
    lines: Sequence[str], homes: Sequence[str], bind: Callable[[str], str]
) -> list[str]:
    """A block's lines with the same effect, in batches where there are some.

    homes: dtypes by slot. bind: gives an expression that has no registers a name for its value.
    """
    done: list[str] = []
    segment: list[Assignment] = []
    written: set[int] = set()
    waiting: list[str] = []  # checks, and what they look at
    looked_at: set[int] = set()

    def close() -> None:
        done.extend(_Segment(segment, homes, bind).lines())
        done.extend(waiting)
        for each in (segment, written, waiting, looked_at):
            each.clear()

    for line in lines:
        assignment = Assignment.parse(line)
        if assignment is not None:
            if assignment.slot in looked_at:
                close()
            segment.append(assignment)
            written.add(assignment.slot)
            continue
        check = _CHECK.match(line)
        looks_at = set(map(int, re.findall(r"R\[(\d+)\]", line)))
        if check and not waiting and written.isdisjoint(looks_at):
            done.append(line)  # of what the segment finds there, not of what it writes
        elif check and check["late"]:
            waiting.append(line)
            looked_at |= looks_at
        else:
            close()
            done.append(line)
    close()
    return done


@dataclass
class _Segment:
    """Assignments with nothing in between."""

    assignments: Sequence[Assignment]
    homes: Sequence[str]
    bind: Callable[[str], str]
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Where registers are beside others: the number of an array, and the row in it."""
    arrays: int = 0

    def lines(self) -> Iterator[str]:
        """Levels of lines that do not need each other, one after another."""
        levels: defaultdict[int, list[Assignment]] = defaultdict(list)
        for assignment, level in zip(self.assignments, self._levels(), strict=True):
            levels[level].append(assignment)
        for _, ready in sorted(levels.items()):
            groups: defaultdict[object, list[Assignment]] = defaultdict(list)
            for each in ready:
                read = tuple(
                    self.homes[int(x[2:-1])] if x[0] == "R" else "" for x in each.values
                )
                groups[each.pattern, read, self.homes[each.slot]].append(each)
            for group in groups.values():
                several = len({each.values for each in group}) > 1
                if len(group) >= FEWEST and several and group[0].pattern != "{}":
                    yield from self._batch(group)
                else:
                    for each in group:
                        self.rows.pop(f"R[{each.slot}]", None)
                        yield each.line

    def _levels(self) -> Iterator[int]:
        """Of each assignment: above what it reads and overwrites, and above who reads that."""
        written: dict[int, int] = {}
        read: dict[int, int] = {}
        for each in self.assignments:
            reads = each.reads
            below = [written.get(slot, -1) for slot in reads]
            below += [written.get(each.slot, -1), read.get(each.slot, -1)]
            level = max(below) + 1
            for slot in reads:
                read[slot] = max(read.get(slot, -1), level)
            written[each.slot] = level
            yield level

    def _batch(self, group: Sequence[Assignment]) -> Iterator[str]:
        operands = []
        for values in zip(*(each.values for each in group), strict=True):
            if len(set(values)) == 1:
                operands.append(values[0])
            elif any(value.startswith("K") for value in values):
                operands.append(self.bind(_rows(values)))
            else:
                there = self._there(values)
                if there is None:
                    there = self._keep(values)
                    yield f"{there} = {_rows(values)}"
                operands.append(there)
        targets = [f"R[{each.slot}]" for each in group]
        name = self._keep(targets)
        yield f"{name} = {group[0].pattern.format(*operands)}"
        yield f"{', '.join(targets)} = {name}"

    def _keep(self, values: Sequence[str]) -> str:
        """A name for an array that has these registers in its rows."""
        self.arrays += 1
        self.rows.update(
            {value: (self.arrays, row) for row, value in enumerate(values)}
        )
        return f"B{self.arrays}"

    def _there(self, values: Sequence[str]) -> str | None:
        """The rows of an array that has these registers at equal distances; None without one."""
        array, first = self.rows.get(values[0], (0, 0))
        step = self.rows.get(values[1], (0, 0))[1] - first
        wanted = [(array, first + step * number) for number in range(len(values))]
        if not step or [self.rows.get(value) for value in values] != wanted:
            return None
        end = wanted[-1][1] + (1 if step > 0 else -1)
        return f"B{array}[{first}:{end if end >= 0 else ''}:{step}]"


def _rows(values: Sequence[str]) -> str:
    return f"concatenate(({', '.join(values)})).reshape({len(values)}, -1)"
