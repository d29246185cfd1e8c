# SPDX-License-Identifier: Apache-2.0
"""What every generated file must keep, checked on its final text.

Numbers live in the constants block, where each derived one repeats its formula and is checked
against it; nothing is unused; the file stands on the standard library, `cuda` and `cutlass`.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

from ..ops import FUNCTIONS, HELPERS
from .render import body_digest, stated_digests

SPDX = "# SPDX-License-Identifier: Apache-2.0"
CONSTANTS_MARK = (
    "# --- constants"  # starts the comment line above each part of the block
)
IMPORTS = frozenset({"cuda", "cutlass", "tvm_ffi"})  # beside the standard library
IMPORTS_IN_FUNCTIONS = frozenset({"torch"})
FORBIDDEN_NAMES: Mapping[str, str] = {
    "_mlir": "is private to the DSL",
    "const_expr": "decides at trace time what the generator has decided already",
}
# Used by the file's readers.
PUBLIC = (
    frozenset({"SPEC", "__all__", "compile"})
    | FUNCTIONS
    | HELPERS
    | {f"{x}_check" for x in FUNCTIONS}
)
SAME_EVERYWHERE = frozenset({"launch"})  # functions called alike in every file

# Numbers that say where, not how many: modes of a layout, the first and the last, halves and pairs.
STRUCTURAL_INTS = frozenset({0, 1, 2, 3, 4})
STRUCTURAL_FLOATS = frozenset({0.0, 1.0})

# Functions of the SPEC's expressions, and those that know an argument by its place.
_WITH_NUMBERS = (
    *("keys_before", "keys_from", "gap_from", "gap_before", "sees"),
    *("score_of", "slope_of", "row_term"),
    *("check_tensors", "clashes"),
)
_CONSTANT = re.compile(r"[A-Z][A-Z0-9_]*")
# `# [unit] = formula  (note)`: each part is optional, two spaces come before the note.
_COMMENT = re.compile(
    r"#\s*(?:\[[^\]]*\]\s*)?(?:=\s*(?P<formula>.*?)\s*(?:\s{2}\(.*\))?)?$"
)
_FORMULA_NODES = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Call,
    ast.Attribute,
    ast.Subscript,
    ast.Tuple,
    ast.Name,
    ast.Constant,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.expr_context,
)
_FORMULA_NAMES = {
    "abs": abs,
    "float": float,
    "int": int,
    "max": max,
    "min": min,
    "math": math,
}

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_NodeT = TypeVar("_NodeT", bound=ast.AST)
_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


@dataclass(frozen=True, order=True)
class Finding:
    """One rule that the file breaks; line from 1."""

    line: int
    message: str


class _Nodes:
    """All nodes of a tree by their type: rules look at few of them, and a walk takes long."""

    def __init__(self, tree: ast.AST) -> None:
        self._of_type: dict[type, list[Any]] = {}
        todo = [tree]
        for node in todo:  # which grows meanwhile
            self._of_type.setdefault(type(node), []).append(node)
            todo += _children(node)

    def of(self, one: type[_NodeT]) -> list[_NodeT]:
        """The nodes of this very type."""
        return self._of_type.get(one, [])

    @property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions with a name."""
        return [*self.of(ast.FunctionDef), *self.of(ast.AsyncFunctionDef)]


def _children(node: ast.AST) -> list[ast.AST]:
    """The nodes directly below one, contexts left out."""
    found: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            found += [each for each in value if isinstance(each, ast.AST)]
        elif isinstance(value, ast.AST) and name != "ctx":
            found.append(value)
    return found


def lint(text: str) -> list[Finding]:
    """All findings, by line; empty for a file that may be shipped."""
    findings = [*_text(text), *_digest(text)]
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return sorted(
            [*findings, Finding(error.lineno or 1, f"does not parse: {error.msg}")]
        )
    lines = text.splitlines()
    nodes = _Nodes(tree)
    constants = _constants(tree, lines)
    findings += _imports(nodes)
    findings += _names(nodes)
    findings += _symbols(nodes)
    findings += _unused(tree, nodes, _used_in_formulas(constants, lines))
    findings += _numbers(tree, nodes, constants)
    findings += _formulas(constants, lines)
    return sorted(set(findings))


def _text(text: str) -> Iterator[Finding]:
    lines = text.split("\n")
    if lines[0] != SPDX:
        yield Finding(1, f"first line is not {SPDX!r}")
    if lines[-1] != "":
        yield Finding(len(lines), "no newline at the end")
    for number, line in enumerate(lines, start=1):
        if "\t" in line:
            yield Finding(number, "tab")
        if line != line.rstrip():
            yield Finding(number, "space at the end of the line")


def _assigns(statement: ast.stmt, name: str) -> TypeGuard[ast.Assign]:
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == name
        for target in statement.targets
    )


def _digest(text: str) -> Iterator[Finding]:
    stated = stated_digests(text)
    if stated is None:
        yield Finding(1, "header has no digest line")
    elif stated.body != body_digest(text):
        yield Finding(1, "body digest in the header is not the body's")


def _imports(nodes: _Nodes) -> Iterator[Finding]:
    functions = [
        (each.lineno, each.end_lineno or each.lineno) for each in nodes.functions
    ]
    imported = [
        (node.lineno, [alias.name for alias in node.names])
        for node in nodes.of(ast.Import)
    ]
    for node in nodes.of(ast.ImportFrom):
        module = (node.module or "") if node.level == 0 else "."
        imported.append((node.lineno, [module]))
    for line, modules in imported:
        allowed = IMPORTS | sys.stdlib_module_names
        if any(first <= line <= last for first, last in functions):
            allowed |= IMPORTS_IN_FUNCTIONS
        for module in modules:
            if module.split(".")[0] not in allowed:
                yield Finding(line, f"imports {module}")


def _names(nodes: _Nodes) -> Iterator[Finding]:
    used = [(node.lineno, node.id) for node in nodes.of(ast.Name)]
    used += [(node.lineno, node.attr) for node in nodes.of(ast.Attribute)]
    for alias in nodes.of(ast.alias):
        used += [(alias.lineno, name) for name in alias.name.split(".")]
    for node in nodes.of(ast.ImportFrom):
        used += [(node.lineno, name) for name in (node.module or "").split(".")]
    for line, name in used:
        if name in FORBIDDEN_NAMES:
            yield Finding(line, f"{name} {FORBIDDEN_NAMES[name]}")


def _symbols(nodes: _Nodes) -> Iterator[Finding]:
    for node in (*nodes.functions, *nodes.of(ast.ClassDef)):
        if "cutlass" in node.name.lower():
            yield Finding(
                node.lineno, f"{node.name}: a symbol must not hold the word cutlass"
            )


def _unused(
    tree: ast.Module, nodes: _Nodes, in_formulas: frozenset[str]
) -> Iterator[Finding]:
    """Names that a scope binds and nothing reads, in it or below. `_` marks a name as ignored.

    A constant that only the formula of another one reads is used: it explains that one.
    """
    loaded = _loaded(tree)
    anywhere = loaded[tree] | {node.attr for node in nodes.of(ast.Attribute)}
    for scope, here in loaded.items():
        # Members of a class are reached as attributes, from anywhere.
        read = anywhere if isinstance(scope, ast.ClassDef) else here
        for name, line, kind in _bindings(scope):
            public = isinstance(scope, ast.Module) and name in PUBLIC | in_formulas
            if name not in read and not name.startswith("_") and not public:
                yield Finding(line, f"{kind} {name} is not used")


def _loaded(tree: ast.Module) -> dict[_Scope, set[str]]:
    """The names that each scope reads, in it or below."""
    found: dict[_Scope, set[str]] = {}

    def look(node: ast.AST, names: set[str]) -> None:
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                names.add(node.id)
            return
        inner = names
        if isinstance(node, _Scope):
            inner = found[node] = set()
        for child in _children(node):
            look(child, inner)
        if inner is not names:
            names |= inner

    look(tree, set())
    return found


def _bindings(scope: _Scope) -> Iterator[tuple[str, int, str]]:
    """(name, line, kind) of what this scope itself binds, not the scopes inside it."""
    called_alike = getattr(scope, "name", "") in SAME_EVERYWHERE
    if isinstance(scope, _Function) and not called_alike:
        a = scope.args
        for argument in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]:
            if argument is not None and argument.arg not in {"self", "cls"}:
                yield argument.arg, argument.lineno, "argument"
    todo: list[ast.AST] = (
        list(scope.body) if isinstance(scope.body, list) else [scope.body]
    )
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            yield node.name, node.lineno, kind
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno, "name"
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno, "name"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if getattr(node, "module", None) != "__future__":
                    yield alias.asname or alias.name.split(".")[
                        0
                    ], node.lineno, "import"
        todo += _children(node)


def _constants(tree: ast.Module, lines: list[str]) -> list[ast.Assign]:
    """The assignments of the constants block.

    The block starts below the first line with CONSTANTS_MARK and ends at the first statement that
    is not `NAME = ...`.
    """
    marks = [
        number
        for number, line in enumerate(lines, 1)
        if line.startswith(CONSTANTS_MARK)
    ]
    block: list[ast.Assign] = []
    for node in tree.body:
        if not marks or node.lineno < marks[0]:
            continue
        if not (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
            and _CONSTANT.fullmatch(node.targets[0].id)
            and node.targets[0].id not in PUBLIC
        ):
            break
        block.append(node)
    return block


def _numbers(
    tree: ast.Module, nodes: _Nodes, constants: list[ast.Assign]
) -> Iterator[Finding]:
    """Number literals outside the constants block, the SPEC and some functions."""
    exempt: set[int] = set()
    for statement in tree.body:
        is_exempt = isinstance(statement, ast.FunctionDef) and statement.name in _WITH_NUMBERS
        if is_exempt or _assigns(statement, "SPEC") or statement in constants:
            exempt |= {id(child) for child in ast.walk(statement)}
    for node in nodes.of(ast.Constant):
        if id(node) in exempt:
            continue
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float | complex):
            continue
        allowed = STRUCTURAL_INTS if isinstance(value, int) else STRUCTURAL_FLOATS
        if value not in allowed:
            yield Finding(node.lineno, f"number {value!r} outside the constants block")


def _formulas(constants: list[ast.Assign], lines: list[str]) -> Iterator[Finding]:
    """Each constant is a literal, and equals the formula beside it over the names above it."""
    known: dict[str, object] = {}
    for node in constants:
        target = node.targets[0]
        assert isinstance(target, ast.Name)
        try:
            value = ast.literal_eval(node.value)
        except ValueError:
            yield Finding(node.lineno, f"{target.id} is not a literal")
            continue
        comment = _comment(node, lines)
        match = _COMMENT.fullmatch(comment) if comment else None
        if comment and match is None:
            yield Finding(
                node.lineno, f"{target.id}: comment is not '# [unit] = formula'"
            )
        elif match and match.group("formula"):
            formula = match.group("formula")
            try:
                result = _evaluate(formula, known)
            except Exception as error:  # whatever a wrong formula raises is a finding
                yield Finding(node.lineno, f"{target.id}: formula {formula!r}: {error}")
            else:
                if result != value or type(result) is not type(value):
                    yield Finding(
                        node.lineno,
                        f"{target.id} is {value!r}, its formula gives {result!r}",
                    )
        known[target.id] = value


def _used_in_formulas(constants: list[ast.Assign], lines: list[str]) -> frozenset[str]:
    """Names in the formulas beside the constants, as far as they look like constants."""
    formulas = (_COMMENT.fullmatch(_comment(node, lines)) for node in constants)
    text = " ".join(match.group("formula") or "" for match in formulas if match)
    return frozenset(re.findall(r"\b[A-Z][A-Z0-9_]*\b", text))


def _comment(node: ast.Assign, lines: list[str]) -> str:
    """What follows an assignment on its last line; column offsets count UTF-8 bytes."""
    last = lines[(node.end_lineno or node.lineno) - 1].encode()
    return last[node.end_col_offset or 0 :].decode().strip()


def _evaluate(formula: str, known: Mapping[str, object]) -> object:
    tree = ast.parse(formula, mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _FORMULA_NODES):
            raise ValueError(f"{type(node).__name__} is not allowed")
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id == "math"
        ):
            raise ValueError("attributes of math only")
    return eval(
        compile(tree, "formula", "eval"),
        {"__builtins__": {}, **_FORMULA_NAMES, **known},
    )
