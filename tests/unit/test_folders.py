# SPDX-License-Identifier: Apache-2.0
"""Which folder of the package imports which: what decision 0037 lists, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import support

CODE = support.ROOT / "codegen"
DECISION = CODE / "decisions" / "0037-folders.md"
TOP = {"__init__", "cli", "errors", "verify"}


def listed() -> dict[str, set[str]]:
    """Each folder, in the order of the list, and what it imports."""
    (block,) = re.findall(r"```text\n(.*?)```", DECISION.read_text(), re.S)
    lines = (line.partition(":") for line in block.splitlines())
    return {folder: set(imported.split()) for folder, _, imported in lines}


def imported(module: Path) -> Iterator[str]:
    """The folders and modules at the top that a module imports when it runs."""
    inside = module.relative_to(CODE).parts[:-1]
    tree = ast.parse(module.read_text())
    for_types = {
        id(node)
        for each in ast.walk(tree)
        if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"
        for node in ast.walk(each)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in for_types:
            continue
        assert (node.module or "").partition(".")[0] != "fmha_gen", module
        if node.level:
            above = inside[: len(inside) - node.level + 1]
            path = [*above, *(node.module.split(".") if node.module else [])]
            yield from path[:1] or (each.name for each in node.names)


def test_folders_import_what_is_listed() -> None:
    found: dict[str, set[str]] = {folder: set() for folder in listed()}
    for module in CODE.rglob("*.py"):
        if module.parent != CODE:
            folder = module.relative_to(CODE).parts[0]
            found[folder] |= set(imported(module)) - {folder, "errors"}
    assert found == listed()


def test_no_folder_imports_one_below_it() -> None:
    above = {"verify"}
    for folder, wanted in listed().items():
        assert wanted <= above, folder
        above.add(folder)


def test_few_modules_are_at_the_top() -> None:
    assert {module.stem for module in CODE.glob("*.py")} == TOP
    for module in ("errors", "verify"):
        assert not [*imported(CODE / f"{module}.py")]
