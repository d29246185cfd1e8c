# SPDX-License-Identifier: Apache-2.0
"""The table of decision 0009: ``python -m tests.mutation.table LOG`` prints it as Markdown."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fmha_gen.emulator.report import Kind

from .campaign import KERNELS, NOT_A_KERNEL, SAME, read
from .survivors import reason

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


def verdict(row: dict[str, Any]) -> str:
    """What became of a mutant: a word for the columns."""
    noticed = row["noticed"]
    if noticed is not None:
        unchanged = noticed.startswith(NOT_A_KERNEL) or noticed == SAME
        return "no other kernel" if unchanged else "noticed"
    accepted = reason(row["kernel"], row["kind"], row["name"])
    if accepted is not None and accepted.verdict == "equivalent":
        return "equivalent"
    return "survivors"


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
    for kind in ("ptx", "source"):
        for kernel in KERNELS:
            mine = [r for r in rows if (r["kernel"], r["kind"]) == (kernel, kind)]
            counts = Counter(map(verdict, mine))
            total += counts
            if mine:
                yield line_of(f"`{kernel}`", kind, counts)
    yield line_of("all", "", total)


def survivors(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line for each mutant that nothing showed to be wrong, by the reason."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["noticed"] is None:
            accepted = reason(row["kernel"], row["kind"], row["name"])
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
    for part in (table, kinds_of_findings, survivors):
        print("\n".join(part(rows)), end="\n\n")


if __name__ == "__main__":
    main()
