# SPDX-License-Identifier: Apache-2.0
"""The table of kernels by versions of the DSL: on a terminal, in a Markdown file, as data."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ..errors import CheckFailed, EnvironmentProblem, UsageProblem
from ..evidence import evaluation
from ..host import files
from .cells import Cell
from .environments import Environment

DATA = ".json"  # ends the name of the data's file
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->\n"


def show(cells: Sequence[Cell]) -> None:
    """Print a row per kernel, a column per version."""
    titles, rows = _table(cells)
    columns: dict[str, Literal["left", "right"]] = dict.fromkeys(titles, "left")
    evaluation.print_table(lambda plain: evaluation.table(columns, rows, plain=plain))


def require_place(file: Path) -> None:
    """See that a table can be written there, before hours are spent on it.

    Raises UsageProblem, or CheckFailed for a file that is there and has no marks.
    """
    if file.suffix == DATA:
        raise UsageProblem(f"{file}: the data goes there; name a Markdown file")
    folder = file.parent
    if not folder.is_dir():
        raise UsageProblem(f"{folder}: no such folder")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise EnvironmentProblem(f"{file}: cannot write there: Permission denied")
    _around(file)


def write(file: Path, cells: Sequence[Cell], found: Sequence[Environment]) -> None:
    """Put the data into a .json beside a Markdown file, and the table between the file's marks.

    A file that is not there is made. Raises as `require_place`, then with the data written.
    """
    data = json.dumps(to_json(cells, found), indent=1, sort_keys=True)
    with files.writing(file):
        files.replace(file.with_suffix(DATA), f"{data}\n".encode(), follow=False)
        before, after = _around(file)
        table = f"{before}{BEGIN}{markdown(cells)}{END}{after}"
        files.replace(file, table.encode())


def _around(file: Path) -> tuple[str, str]:
    """What a Markdown file has before and after the table; nothing when it is not there."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return "", ""
    except (OSError, UnicodeDecodeError) as error:
        raise CheckFailed(f"{file}: cannot be read: {error}") from error
    if (text.count(BEGIN), text.count(END)) != (1, 1):
        raise CheckFailed(f"{file}: no place between {BEGIN.strip()} and {END.strip()}")
    before, _, rest = text.partition(BEGIN)
    return before, rest.partition(END)[2]


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
