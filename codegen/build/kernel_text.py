# SPDX-License-Identifier: Apache-2.0
"""What a generated kernel's text says; it is read, not run, so that this needs no DSL."""

from __future__ import annotations

import ast
import hashlib
import json
import threading
from collections.abc import Iterator
from typing import Any, Final

from ..ops import FUNCTIONS, HELPERS

ENTRIES: Final = (*FUNCTIONS, *HELPERS, "compile")
DSL_DECORATORS: Final = frozenset({"jit", "kernel"})  # of cutlass.cute

# What a node says beside its meaning, or only to some versions of Python.
_LEFT_OUT: Final = frozenset({"ctx", "kind", "type_comment", "type_ignores"})


# In CPython 3.11 threads that parse at once share a depth, and fail by it (SystemError).
_PARSES: Final = threading.Lock()


def _parsed(text: str) -> ast.Module:
    with _PARSES:
        return ast.parse(text)


def read_constants(text: str) -> dict[str, Any]:
    """A generated module's constants, SPEC among them: top-level names with literal values.

    Raises SyntaxError.
    """
    found: dict[str, Any] = {}
    for node in _parsed(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue  # an expression, such as the DSL's type of DTYPE
    return found


def host_digest(text: str) -> str:
    """The sha256 of a kernel's host section, whatever its comments, docstrings and format.

    Those are the functions that a call of its entry runs in Python, with the constants and imports
    that they read. Functions of the DSL, `launch` with what it calls, are not among them: what they
    do is seen in what is launched. The digest is the same for every version of Python that can read
    the text. Raises SyntaxError.
    """
    tree = _parsed(text)
    named = {name: node for node in tree.body for name in _names(node)}
    # Statements that name nothing run at import.
    wanted = [node for node in tree.body if not [*_names(node)] and not _is_doc(node)]
    wanted += [named[name] for name in ENTRIES if name in named]
    found: list[ast.stmt] = []
    while wanted:
        node = wanted.pop()
        if node in found or _is_dsl(node):
            continue
        found.append(node)
        wanted += [
            named[part.id]
            for part in ast.walk(node)
            if isinstance(part, ast.Name) and part.id in named
        ]
    found.sort(key=lambda node: node.lineno)
    said = json.dumps([_said(node) for node in found])
    return hashlib.sha256(said.encode()).hexdigest()


def _names(node: ast.stmt) -> Iterator[str]:
    """What a top-level statement names."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Name):
                    yield part.id
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _is_dsl(node: ast.stmt) -> bool:
    """Whether the DSL compiles a function, so that Python does not run it at a call."""
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(each, ast.Attribute) and each.attr in DSL_DECORATORS
        for each in node.decorator_list
    )


def _is_doc(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _said(node: Any) -> Any:
    """A tree as plain data: the names of nodes and of fields that say something, and values."""
    if isinstance(node, ast.AST):
        fields = (
            [name, _said(value)]
            for name, value in sorted(ast.iter_fields(node))
            if value is not None and value != [] and name not in _LEFT_OUT
        )
        return [type(node).__name__, *fields]
    if isinstance(node, list):
        return [_said(each) for each in node if not _is_doc(each)]
    return repr(node)
