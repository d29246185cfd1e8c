# SPDX-License-Identifier: Apache-2.0
"""The table of kernels by versions of the DSL: on a terminal, in a Markdown file, as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from .. import evaluation, files
from ..errors import CheckFailed
from .cells import Cell
from .environments import Environment

BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->\n"


def show(cells: Sequence[Cell]) -> None:
    """Print a row per kernel, a column per version."""
    titles, rows = _table(cells)
    columns: dict[str, Literal["left", "right"]] = dict.fromkeys(titles, "left")
    evaluation.print_table(lambda plain: evaluation.table(columns, rows, plain=plain))


def write(file: Path, cells: Sequence[Cell], found: Sequence[Environment]) -> None:
    """Put the table between the marks of a Markdown file, and the data into a .json beside it.

    Raises CheckFailed when the file is not there or has no marks.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckFailed(f"{file}: cannot be read: {error.strerror}") from error
    if (text.count(BEGIN), text.count(END)) != (1, 1):
        raise CheckFailed(f"{file}: no place between {BEGIN.strip()} and {END.strip()}")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    table = f"{before}{BEGIN}{markdown(cells)}{END}{after}"
    data = json.dumps(to_json(cells, found), indent=1, sort_keys=True)
    files.replace(file, table.encode())
    files.replace(file.with_suffix(".json"), f"{data}\n".encode(), follow=False)


def markdown(cells: Sequence[Cell]) -> str:
    """The table as Markdown, with what the emulator said in its cells."""
    titles, rows = _table(cells)
    named = [[f"`{kernel}`", *cells_of_it] for kernel, *cells_of_it in rows]
    lines = [titles, ["---"] * len(titles), *named]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_json(cells: Sequence[Cell], found: Sequence[Environment]) -> dict[str, Any]:
    """What a test can hold other versions against."""
    return {
        "environments": {
            environment.dsl: {
                "python": environment.python,
                "distributions": dict(environment.distributions),
            }
            for environment in found
        },
        "cells": [
            {
                "kernel": cell.kernel,
                "dsl": cell.dsl,
                "verdict": cell.kind.value,
                "details": list(cell.details),
                "emulated": cell.emulated,
                "ptx_sha256": cell.report and cell.report.ptx_sha256,
            }
            for cell in cells
        ],
    }


def _table(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    versions = list(dict.fromkeys(cell.dsl for cell in cells))
    kernels = list(dict.fromkeys(cell.kernel for cell in cells))
    texts = {(cell.kernel, cell.dsl): _text(cell) for cell in cells}
    rows = [
        [kernel, *(texts[kernel, version] for version in versions)]
        for kernel in kernels
    ]
    return ["kernel", *versions], rows


def _text(cell: Cell) -> str:
    return f"{cell.brief}; emulated" if cell.emulated else cell.brief
