# SPDX-License-Identifier: Apache-2.0
"""Changes for people and for machines: what got worse first, then numbers, then the source.

One kernel has a table of every number that changed. Several have a line each, and the lines of
source that they share are shown once.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from .compare import (
    BUILD,
    CLASSES,
    OTHER,
    RENEWED_BY,
    RUNG,
    TOTAL,
    KernelChange,
    Regression,
    Row,
    Value,
)
from .kernels import KernelState
from .page import PAGES, Style, Text
from .source import Shared, shared, shown

_NAMES: Final = 3  # of kernels in a sentence
_PATHS: Final = 4  # that a command names one by one; for more it names their folder
_ABSENT: Final = "-"
# Groups of facts of which a reader wants to hear even where they did not change.
_KEPT: Final = ("resources", "proof")


def render(changes: Sequence[KernelChange], style: Style = "text") -> str:
    """The report as text for a terminal or as Markdown for a pull request; ends with a newline."""
    page = PAGES[style]()
    moved = [change for change in changes if change.kind != "same"]
    if not moved:
        return f"No difference in {_kernels(len(changes))}.\n"
    if len(moved) == 1 and moved[0].kind == "changed":
        blocks = _one(moved[0], len(changes) - 1, page)
    else:
        blocks = _many(changes, moved, page)
    return "\n\n".join(blocks) + "\n"


def to_json(changes: Sequence[KernelChange]) -> dict[str, Any]:
    """The whole comparison as plain data; `same` says whether nothing differs."""
    return {
        "same": all(change.kind == "same" for change in changes),
        "kernels": [_kernel_json(change) for change in changes],
    }


def _kernel_json(change: KernelChange) -> dict[str, Any]:
    due = change.validation
    return {
        "kernel": change.stem,
        "kind": change.kind,
        "code": change.code,
        "same_ptx": change.same_ptx,
        "before": change.before.origin if change.before else None,
        "after": change.after.origin if change.after else None,
        "regressions": [each.text for each in change.regressions],
        "validation": {
            "due": due.due,
            "reason": due.reason,
            "commands": list(due.commands),
        },
        "facts": [
            {
                "group": row.group,
                "kernel": row.kernel,
                "name": row.name,
                "before": row.before,
                "after": row.after,
            }
            for row in change.rows
        ],
        "source": [
            {
                "line": edit.line,
                "removed": list(edit.removed),
                "added": list(edit.added),
            }
            for edit in change.edits
        ],
    }


# --- one kernel ------------------------------------------------------------------


def _one(change: KernelChange, others: int, page: Text) -> Iterator[str]:
    before, after = change.before, change.after
    assert before is not None and after is not None
    title = page.title(f"{page.name(change.stem)}: {_verdict([change])}")
    same = f" No difference in {_kernels(others, 'other ')}." if others else ""
    yield f"{title}\n{_sides(before, after, page)}{_about_code(change)}{same}"
    if change.regressions:
        worse = page.bullets(each.text for each in change.regressions)
        yield f"{page.heading('Worse')}\n{worse}"
    due = change.validation
    head = page.heading("Validation due" if due.due else "No validation due")
    asked = f"\n{page.commands(due.commands)}" if due.commands else ""
    yield f"{head}: {due.reason}.{asked}"
    for kernel in dict.fromkeys(("", *(row.kernel for row in change.rows))):
        yield from _numbers(change, kernel, page)
    for words, found in (
        ("Same on both sides", _unchanged(change)),
        ("Measured on one side", _one_sided(change)),
    ):
        if said := "; ".join(found):
            yield page.sentence(f"{page.heading(words)}: {said}.")
    if change.edits:
        lines = list(shown(change.edits, before.lines))
        yield page.source(_limited(lines, page.source_limit))


def _numbers(change: KernelChange, kernel: str, page: Text) -> Iterator[str]:
    """What changed of one kernel; of the file where its name is empty, or the only kernel's."""
    before, after = change.before, change.after
    assert before is not None and after is not None
    units = {**before.units, **after.units}
    tables: list[Sequence[tuple[str, ...]]] = []
    numbers = [r for r in change.changed_rows if r.kernel == kernel and not r.loop]
    if numbers:
        cells = [(_with_unit(row, units), *_cells(row)) for row in numbers]
        tables.append([("", "before", "after"), *cells])
    loops = [
        row
        for row in change.rows
        if row.kernel == kernel and row.loop and not row.unknown
    ]
    if loops:
        tables.append(_loops(loops))
    if tables and kernel:
        yield page.heading(kernel)
    yield from map(page.table, tables)


def _sides(before: KernelState, after: KernelState, page: Text) -> str:
    """Where the two are from; names too, if they have two."""
    both = (
        f"{page.name(state.origin)}"
        + (f" ({state.stem})" if before.stem != after.stem else "")
        for state in (before, after)
    )
    return " -> ".join(both) + "."


def _about_code(change: KernelChange) -> str:
    ptx = " The device code is the same." if change.same_ptx else ""
    if change.code == "comments":
        return f" Only comments and docstrings differ.{ptx}"
    return f" The text is the same.{ptx}" if change.code == "same" else ptx


def _loops(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A loop per line, or two where it changed; a column for each class that any of them has."""
    found = {row.label for row in rows if row.before or row.after}
    labels = [label for label in (TOTAL, *CLASSES, OTHER) if label in found]
    lines = [("instructions in the loop", *labels)]
    for loop in dict.fromkeys(row.loop for row in rows):
        mine = {row.label: row for row in rows if row.loop == loop}
        before, after = (
            tuple(_shown(value) for value in values)
            for values in zip(
                *((mine[each].before, mine[each].after) for each in labels), strict=True
            )
        )
        if before == after:
            lines.append((f"{loop}, same", *after))
        else:
            lines += [(f"{loop}, before", *before), (f"{loop}, after", *after)]
    return lines


def _unchanged(change: KernelChange) -> Iterator[str]:
    """The facts that a reader looks for, where they are the same."""
    same = [
        row
        for row in change.rows
        if row.group in _KEPT and row.after is not None and row.before == row.after
    ]
    known = [f"{r.full_name} {_shown(r.after)}" for r in same if r.after != 0]
    if said := ", ".join(known):
        yield said
    if zero := ", ".join(row.full_name for row in same if row.after == 0):
        yield f"0: {zero}"


def _one_sided(change: KernelChange) -> Iterator[str]:
    """What one side was compiled to, where the other one was not."""
    if _compiled(change):
        return
    rows = [
        row
        for row in change.rows
        if row.unknown and (not row.loop or row.label == TOTAL)
    ]
    for side, values in (
        ("before", [(row.full_name, row.before) for row in rows]),
        ("after", [(row.full_name, row.after) for row in rows]),
    ):
        known = [
            f"{name} {_shown(value)}" for name, value in values if value is not None
        ]
        if known:
            yield f"{side}: {', '.join(known)}"


# --- several kernels -------------------------------------------------------------


def _many(
    changes: Sequence[KernelChange], moved: Sequence[KernelChange], page: Text
) -> Iterator[str]:
    yield page.title(f"{_counted(changes)}: {_verdict(moved)}")
    if any(change.regressions for change in moved):
        yield f"{page.heading('Worse')}\n{page.bullets(_worse(moved, page))}"
    due = [change for change in moved if change.validation.due]
    if due:
        head = f"{page.heading('Validation due')}: {_kernels(len(due))}"
        yield f"{head}\n{page.commands(_commands(due))}"
    everywhere = _everywhere(moved)
    if everywhere:
        said = ", ".join(map(_arrow, everywhere))
        yield page.sentence(f"{page.heading('In every changed kernel')}: {said}.")
    groups = shared((change.stem, change.edits) for change in moved)
    rows = []
    for change in sorted(moved, key=_worst_first):
        where = [
            f"D{n}" for n, each in enumerate(groups, 1) if change.stem in each.stems
        ]
        summary = _summary(change, set(everywhere))
        rows.append((page.name(change.stem), summary, ", ".join(where)))
    yield page.table([("kernel", "what changed", "source"), *rows])
    yield from _sources(groups, moved, page)


def _sources(
    groups: Sequence[Shared], changes: Sequence[KernelChange], page: Text
) -> Iterator[str]:
    """The source of each group, as its first kernel has it."""
    texts = {change.stem: change.before for change in changes}
    left = page.source_limit
    for number, group in enumerate(groups, 1):
        before = texts[group.stems[0]]
        assert before is not None  # a kernel that came has no edits
        lines = list(shown(group.edits, before.lines))
        head = f"{page.heading(f'D{number}')}: {_where(group, page)}"
        yield f"{head}\n{page.source(_limited(lines, left))}"
        left = None if left is None else max(0, left - len(lines))


def _where(group: Shared, page: Text) -> str:
    size = sum(edit.size for edit in group.edits)
    lines = f"{size} line{'' if size == 1 else 's'}"
    first = page.name(group.stems[0])
    if len(group.stems) == 1:
        return f"{lines} in {first}"
    return f"the same {lines} in {len(group.stems)} kernels, here as in {first}"


def _counted(changes: Sequence[KernelChange]) -> str:
    kinds = [change.kind for change in changes]
    parts = [
        f"{kinds.count(kind)} {kind}"
        for kind in ("changed", "added", "removed", "same")
        if kind in kinds
    ]
    return f"{_kernels(len(kinds))}, {', '.join(parts)}"


def _worse(changes: Sequence[KernelChange], page: Text) -> Iterator[str]:
    """What got worse, each once with the kernels where it did, the worst first."""
    holders: dict[Regression, list[str]] = {}
    for change in changes:
        for regression in change.regressions:
            holders.setdefault(regression, []).append(page.name(change.stem))
    for regression in sorted(holders, key=lambda each: each.severity):
        stems = holders[regression]
        more = f" and {len(stems) - _NAMES} more" if len(stems) > _NAMES else ""
        yield f"{', '.join(stems[:_NAMES])}{more}: {regression.text}"


def _worst_first(change: KernelChange) -> tuple[int, int, str]:
    severities = [regression.severity for regression in change.regressions]
    kind = ("changed", "added", "removed").index(change.kind)
    return min(severities, default=RUNG + 1), kind, change.stem


def _everywhere(changes: Sequence[KernelChange]) -> tuple[Row, ...]:
    """The facts that changed alike in every changed kernel, if there are several."""
    rows = [_told(change) for change in changes if change.kind == "changed"]
    if len(rows) < 2:
        return ()
    return tuple(row for row in rows[0] if all(row in other for other in rows[1:]))


def _summary(change: KernelChange, known: Container[Row]) -> str:
    """What a line of the table says; `known` is said elsewhere."""
    if change.kind != "changed":
        state = change.after or change.before
        assert state is not None
        shared_bytes = f"{state.shared_bytes} B of shared memory"
        return f"{change.kind}: {state.rung}, {shared_bytes}"
    parts = ["only comments"] if change.code == "comments" else []
    parts += ["same PTX"] if change.same_ptx else []
    parts += [_arrow(row) for row in _told(change) if row not in known]
    if parts:
        return ", ".join(parts)
    if change.after is not None and change.after.failures:
        return "does not build"
    return "source only" if change.edits else "nothing else"


def _told(change: KernelChange) -> list[Row]:
    """The changed facts, of a loop only how long it is."""
    return [row for row in change.changed_rows if not row.loop or row.label == TOTAL]


def _commands(changes: Sequence[KernelChange]) -> Iterator[str]:
    """Each command once, for all the kernels that need it, in the order to run them."""
    wanted: dict[str, list[str]] = {
        command: [] for command in (BUILD, *RENEWED_BY.values())
    }
    for change in changes:
        assert change.after is not None
        path = change.after.path
        for command in wanted:
            if command.format(path=path) in change.validation.commands:
                wanted[command].append(path)
    for command, paths in wanted.items():
        if paths:
            yield command.format(path=" ".join(_together(paths)))


def _together(paths: Sequence[str]) -> list[str]:
    if len(paths) <= _PATHS:
        return list(paths)
    return sorted({f"{PurePosixPath(path).parent}/" for path in paths})


# --- words -----------------------------------------------------------------------


def _verdict(changes: Sequence[KernelChange]) -> str:
    due = sum(change.validation.due for change in changes)
    worse = sum(_compiles_worse(change) for change in changes)
    unknown = sum(not _compiled(change) for change in changes)
    if len(changes) > 1:
        unsaid = f", {unknown} not compiled" if unknown else ""
        return f"{worse} compile worse{unsaid}, validation due for {due}"
    said = "compiles worse" if worse else "compiles no worse"
    if unknown and not worse:
        said = "not compiled"
    return f"{said}, {'validation due' if due else 'no validation due'}"


def _compiles_worse(change: KernelChange) -> bool:
    return any(regression.severity < RUNG for regression in change.regressions)


def _compiled(change: KernelChange) -> bool:
    """Whether each side that is there is compiled; a kernel that went needs no compile."""
    if change.after is None:
        return True
    sides = [state for state in (change.before, change.after) if state is not None]
    return all(state.compiled is not None for state in sides)


def _kernels(count: int, which: str = "") -> str:
    return f"{count} {which}kernel{'' if count == 1 else 's'}"


def _with_unit(row: Row, units: Mapping[str, str]) -> str:
    known = row.group == "plan" and row.name in units
    return f"{row.name} [{units[row.name]}]" if known else row.name


def _arrow(row: Row) -> str:
    before, after = _cells(row)
    name = f"{row.loop} loop" if row.loop else row.name
    kernel = f"{row.kernel}: " if row.kernel else ""
    return f"{kernel}{name} {before} -> {after}"


def _cells(row: Row) -> tuple[str, str]:
    return _shown(row.before), _shown(row.after)


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return _ABSENT if value is None else str(value)


def _limited(lines: Sequence[str], limit: int | None) -> list[str]:
    if limit is None or len(lines) <= limit:
        return list(lines)
    left_out = len(lines) - limit
    return [*lines[:limit], f"... {left_out} more lines: fmha-gen diff shows all"]
