# SPDX-License-Identifier: Apache-2.0
"""The source diff in pieces, so that a piece that many kernels share is shown once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

CONTEXT: Final = 1  # [lines] around a change: a report is not where one reviews


@dataclass(frozen=True)
class Edit:
    """Neighbouring lines that became others. line: of the first one before the change, from 1."""

    line: int
    removed: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def size(self) -> int:
        """How many lines are removed or added."""
        return len(self.removed) + len(self.added)

    @property
    def end(self) -> int:
        """The line behind those that are removed."""
        return self.line + len(self.removed)


@dataclass(frozen=True)
class Shared:
    """Edits that the same kernels have, where the first of them has them."""

    stems: tuple[str, ...]
    edits: tuple[Edit, ...]


def edits(before: Sequence[str], after: Sequence[str]) -> tuple[Edit, ...]:
    """What changed between two lists of lines; none when they are equal."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return tuple(
        Edit(first + 1, tuple(before[first:end]), tuple(after[new_first:new_end]))
        for tag, first, end, new_first, new_end in matcher.get_opcodes()
        if tag != "equal"
    )


def shared(kernels: Iterable[tuple[str, Sequence[Edit]]]) -> list[Shared]:
    """Group the edits of many kernels by who has them; what most kernels have comes first.

    kernels: name and edits of each. Two edits are the same when their lines are, whatever stands
    around them; a kernel's own name in them counts as a name.
    """
    holders: dict[tuple[str, ...], dict[str, Edit]] = {}
    for stem, found in kernels:
        for edit in found:
            holders.setdefault(_key(edit, stem), {}).setdefault(stem, edit)
    groups: dict[tuple[str, ...], list[Edit]] = {}
    for each in holders.values():
        groups.setdefault(tuple(sorted(each)), []).append(each[min(each)])
    result = [
        Shared(stems, tuple(sorted(found, key=lambda edit: edit.line)))
        for stems, found in groups.items()
    ]
    return sorted(result, key=lambda group: (-len(group.stems), group.stems))


def shown(found: Sequence[Edit], before: Sequence[str]) -> Iterator[str]:
    """Edits, by line, as a unified diff shows them, with lines of `before` around them."""
    done = 0  # lines of `before` that are shown or skipped
    for number, edit in enumerate(found):
        first = max(done, edit.line - 1 - CONTEXT)
        if number == 0 or first > done:
            yield f"@@ line {first + 1} @@"
        yield from _around(before[first : edit.line - 1])
        yield from (f"-{line}" for line in edit.removed)
        yield from (f"+{line}" for line in edit.added)
        following = found[number + 1].line - 1 if number + 1 < len(found) else None
        done = min(edit.end - 1 + CONTEXT, len(before))
        done = done if following is None else min(done, following)
        yield from _around(before[edit.end - 1 : done])


def _around(lines: Sequence[str]) -> Iterator[str]:
    return (f" {line}".rstrip() for line in lines)


def _key(edit: Edit, stem: str) -> tuple[str, ...]:
    name = re.compile(rf"\b{re.escape(stem)}\b")
    lines = (*edit.removed, "", *edit.added)
    return tuple(name.sub("*", line) for line in lines)
