# SPDX-License-Identifier: Apache-2.0
"""The tables of decisions 0009 and 0027: ``python -m tests.mutation.table LOG`` prints Markdown."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fmha_gen.emulator.report import Kind

from . import function_campaign, function_survivors
from . import survivors as survived
from .campaign import KERNELS, NOT_A_KERNEL, SAME, read
from .function_mutants import CLASSES
from .survivors import Accepted

KINDS = {kind.value for kind in Kind}
COLUMNS = (
    "kernel",
    "damage to",
    "mutants",
    "no other kernel",
    "equivalent",
    "noticed",
    "survivors",
    "score",
)


def accepted_as(row: dict[str, Any]) -> Accepted | None:
    """Why a mutant may survive; None when it must be noticed."""
    is_function = row["kind"] == function_campaign.KIND
    reason = function_survivors.reason if is_function else survived.reason
    return reason(row["kernel"], row["kind"], row["name"])


def verdict(row: dict[str, Any]) -> str:
    """What became of a mutant: a word for the columns."""
    noticed = row["noticed"]
    if noticed is not None:
        unchanged = noticed.startswith(NOT_A_KERNEL) or noticed == SAME
        return "no other kernel" if unchanged else "noticed"
    accepted = accepted_as(row)
    if accepted is not None and accepted.verdict == "equivalent":
        return "equivalent"
    return "survivors"


def class_of(row: dict[str, Any]) -> str:
    """Of what a mutant damages; a damage to synchronisation has none."""
    return (
        row["name"].partition(":")[0] if row["kind"] == function_campaign.KIND else ""
    )


def line_of(kernel: str, kind: str, counts: Counter[str]) -> str:
    """One line of the table."""
    able = counts["noticed"] + counts["survivors"]
    cells = [
        kernel,
        kind,
        str(counts.total()),
        *(str(counts[word]) for word in COLUMNS[3:7]),
        f"{100 * counts['noticed'] / able:.1f} %" if able else "-",
    ]
    return f"| {' | '.join(cells)} |"


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line per kernel and kind, then the total."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---|---|" + "---:|" * (len(COLUMNS) - 2)
    total: Counter[str] = Counter()
    every = [(kind, kernel) for kind in ("ptx", "source") for kernel in KERNELS]
    every += [(function_campaign.KIND, kernel) for kernel in function_campaign.KERNELS]
    for kind, kernel in every:
        mine = [r for r in rows if (r["kernel"], r["kind"]) == (kernel, kind)]
        counts = Counter(map(verdict, mine))
        total += counts
        if mine:
            yield line_of(f"`{kernel}`", kind, counts)
    yield line_of("all", "", total)


def classes(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line per class of damage to the function; nothing for damage to synchronisation."""
    found = {name: [r for r in rows if class_of(r) == name] for name in CLASSES}
    if any(found.values()):
        yield f"| {' | '.join(('class', *COLUMNS[1:]))} |"
        yield "|---|---|" + "---:|" * (len(COLUMNS) - 2)
    for name, mine in found.items():
        if mine:
            yield line_of(name, function_campaign.KIND, Counter(map(verdict, mine)))


def survivors(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line for each mutant that nothing showed to be wrong, by the reason."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["noticed"] is None:
            accepted = accepted_as(row)
            why = "**Not explained.**"
            if accepted is not None:
                why = f"{accepted.verdict.capitalize()}: {accepted.reason}"
            where = f"`{row['kernel']}` line {row['line']}: `{row['name']}`"
            if row["kind"] == "ptx":
                where += f" of `{' '.join(row['before'].split())}`"
            found.setdefault(why, []).append(where)
    for why, places in found.items():
        yield f"- {why}"
        yield from (f"  - {place}" for place in places)


def kinds_of_findings(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How often each kind of finding was the first to show a mutant."""
    words: Counter[str] = Counter()
    for row in rows:
        if verdict(row) == "noticed":
            word = row["noticed"].split(": ")[1]
            words[word if word in KINDS else "wrong result"] += 1
    counts = ", ".join(f"{word} {count}" for word, count in words.most_common())
    yield f"First to show it: {counts}."


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.table")
    parser.add_argument("log", type=Path)
    rows = read(parser.parse_args().log)
    for part in (table, classes, kinds_of_findings, survivors):
        print("\n".join(part(rows)), end="\n\n")


if __name__ == "__main__":
    main()
