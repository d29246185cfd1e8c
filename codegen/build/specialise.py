# SPDX-License-Identifier: Apache-2.0
"""Specialises a rendered kernel: folds what the spec decides, drops what nothing reads.

A template is Python once it is rendered. What a spec decides is an ordinary ``if CAUSAL:`` or
``a if LSE else b`` on flags, which are upper case and stand for a bool or a number. This folds
them, puts the bodies of ``@inline`` functions in place of their calls, and then drops, until
nothing changes: parameters that nothing reads with their arguments, trailing arguments that equal
the default, fields that nothing reads, functions, classes and imports that nothing uses. Off means
gone. Comments stay with the statement that they stand above or beside.

It works on the statements at the top of a file, each of which is folded once, however many kernels
have it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from ..errors import CheckFailed
from ..ops import FUNCTIONS, HELPERS

Flag = bool | int | float | str
Flags = Mapping[str, Flag]

OMIT: Final = "OMIT"  # the value of an argument that is left out
ONCE: Final = "ONCE"  # the test of a loop, or an `if`, whose body stands for it
INLINE: Final = "inline"  # the decorator of functions that their calls are replaced by
# What is called from outside, and functions that are handed on as values.
ENTRIES: Final = (
    frozenset({"__all__", "compile", "launch", "SPEC"}) | FUNCTIONS | HELPERS
)
_KEPT_PIECES: Final = 8192
# Behind a constant: names in it are used, since a reader checks it.
_FORMULA: Final = re.compile(r"#(?: \[[^\]]*\])? = (.*)")
# A test at the top of a file.
_BLOCK: Final = re.compile(r"^(if|while) ", re.MULTILINE)
_INDENT: Final = " " * 4
_GOES_ON: Final = re.compile(r"(elif|else|except|finally)\b")
_DOCSTRING: Final = re.compile(r'(?:#.*\n)*"""[^"]*(?:"{1,2}[^"]+)*"""\n')
# What of a string, or of anything that is not usual, could begin a line.
_OPEN: Final = re.compile(r"\\\n|'''|;$|^[^\s\w#@)\]}]", re.MULTILINE)
# A call's result, unpacked.
_UNPACKED: Final = re.compile(r"^ *\w+, [\w, ]+ = .*\(", re.MULTILINE)
_NAME: Final = re.compile(r"[A-Z][A-Z0-9_]*")


class FoldError(CheckFailed):
    """A text that cannot be specialised. code: the line of it that is to blame."""

    def __init__(self, message: str, code: str = "") -> None:
        """See the class."""
        super().__init__(f"{message}: {code}" if code else message)
        self.code = code


def specialise(text: str, flags: Flags, numbers: Flags) -> str:
    """Return the text that is left of a module's once its flags are known.

    flags: by name; none is left in the text. numbers: constants of the module, which tests may
    read, too. Raises FoldError for text that is no Python, and for flags that would be left: in
    tests that read names of the module, too, and outside of tests.
    """
    pieces = _pieces(text, flags, numbers)
    for piece in pieces:
        if left := [name for name in _NAME.findall(piece) if name in flags]:
            _name_left(piece, left)
    pieces = _inlined(pieces)
    kept = ENTRIES | numbers.keys()
    while (pruned := _pruned(pieces, kept)) != pieces:
        pieces = pruned
    return "".join(pieces)


def folded(text: str, flags: Flags, numbers: Flags) -> str:
    """Return a text of which the tests are folded and nothing else, of a template alone, say."""
    return "".join(_pieces(text, flags, numbers))


def _pieces(text: str, flags: Flags, numbers: Flags) -> list[str]:
    """The statements at the top, folded."""
    pieces: list[str] = []
    for whole in _split(text):
        found = _folded(whole, _known(whole, flags, numbers))
        # Only what stood under a test at the top can be several statements now, or none.
        pieces += _split(found) if _BLOCK.search(whole) else [found]
    return pieces


def _known(piece: str, flags: Flags, numbers: Flags) -> tuple[tuple[str, Flag], ...]:
    """What the tests of a piece read, flags and numbers: it decides what is left of it."""
    read = set().union(*_tests(piece))
    found = {
        name: known[name] for known in (numbers, flags) for name in read & known.keys()
    }
    return tuple(sorted(found.items()))


@functools.lru_cache(_KEPT_PIECES)
def _tests(piece: str) -> tuple[frozenset[str], ...]:
    """The names that each test of a piece reads, where it only reads constants."""
    found = []
    for node in ast.walk(_parsed(piece)):
        if isinstance(node, (ast.If, ast.IfExp)):
            names = _constants(node.test)
            if names:
                found.append(names)
    return tuple(found)


def _constants(test: ast.expr) -> frozenset[str]:
    """The names of an expression of upper-case names and numbers; empty for any other."""
    names = set()
    for node in ast.walk(test):
        if isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
            return frozenset()
        if isinstance(node, ast.Name):
            names.add(node.id)
    return frozenset(names if all(map(_NAME.fullmatch, names)) else ())


def _name_left(piece: str, left: Sequence[str]) -> None:
    """Raise for the first line of code, not of comments and strings, that names a flag."""
    for node in ast.walk(_parsed(piece)):
        if isinstance(node, ast.Name) and node.id in left:
            line = piece.splitlines()[node.lineno - 1].strip()
            raise FoldError(f"{node.id} cannot be folded here", line)


@functools.lru_cache(_KEPT_PIECES)
def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = (getattr(error, "text", "") or "").strip()
        raise FoldError(f"rendered text is not Python: {error}", line) from error


@functools.lru_cache(_KEPT_PIECES)
def _split(text: str) -> tuple[str, ...]:
    """The statements at the top, each with the lines above it; what is behind them belongs to the
    last."""
    lines = re.findall(r".*\n|.+\Z", text)

    def until(ends: Sequence[int]) -> tuple[str, ...]:
        bounds = zip([0, *ends], [*ends[:-1], len(lines)], strict=False)
        return tuple("".join(lines[start:end]) for start, end in bounds)

    if ends := _ends(text):
        pieces = until(ends)
        with contextlib.suppress(FoldError):
            if all(len(_parsed(piece).body) == 1 for piece in pieces):
                return pieces
    ends = [node.end_lineno or 0 for node in _parsed(text).body]
    return until(ends) if ends else (text,)


def _ends(text: str) -> list[int]:
    """The last lines of the statements at the top, or nothing where that takes a parser.

    A parser takes most of the time that a module costs whose pieces are all known. A line that
    begins with a name begins a statement, unless decorators or a string are above it.
    """
    docstring = _DOCSTRING.match(text)
    first = docstring.end() if docstring else 0
    if _OPEN.search(text, first):
        return []
    ends = [text.count("\n", 0, first)] if docstring else []
    number, is_decorated, last = text.count("\n", 0, first), False, 0
    for line in text[first:].splitlines():
        number += 1
        names = line[:1].isalpha() or line[:1] == "_"
        if names and not is_decorated and not _GOES_ON.match(line):
            ends += [last] if last else []
        if line[:1] == "@" and not is_decorated:
            ends += [last] if last else []
        if line and line[:1] != "#":
            is_decorated, last = line[:1] == "@", number
    return [*ends, last] if last else ends


# --- edits --------------------------------------------------------------------------------


class _Text:
    """A piece, where its nodes are in it, and what replaces some of them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines: list[str] = re.findall(r".*\n|.+\Z", text)
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """The place of a line and a column as `ast` counts them, the latter in bytes."""
        text = self.lines[line - 1]
        if not text.isascii():
            column = len(text.encode()[:column].decode())
        return self._starts[line - 1] + column

    def start_of(self, line: int) -> int:
        """The place where a line begins, counted from 1."""
        return self._starts[line - 1]

    def span(self, node: _Spanned) -> tuple[int, int]:
        """Where a node begins and ends, without parentheses around it."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self.at(node.lineno, node.col_offset),
            self.at(node.end_lineno, node.end_col_offset),
        )

    def first_line(self, node: ast.stmt) -> int:
        """The line that a statement begins in, with its decorators and the comments above it."""
        decorators = getattr(node, "decorator_list", [])
        line: int = min([node.lineno, *(each.lineno for each in decorators)])
        while line > 1 and self.lines[line - 2].lstrip().startswith("#"):
            line -= 1
        return line

    def edited(self, start: int, end: int, edits: Sequence[_Edit]) -> str:
        """The text from one place to another with the edits in it, which do not overlap."""
        parts = []
        for edit in sorted(edits):
            parts += [self.text[start : edit.start], edit.text]
            start = edit.end
        return "".join([*parts, self.text[start:end]])


class _Edit(NamedTuple):
    """Text for what is from one place to another."""

    start: int
    end: int
    text: str


class _Spanned(Protocol):
    """What `ast` says of an expression's or a statement's place."""

    lineno: int
    col_offset: int
    end_lineno: int | None
    end_col_offset: int | None


_ATOM: Final = 100
_BINDS: Final[Mapping[type, int]] = {
    **dict.fromkeys((ast.NamedExpr, ast.Lambda, ast.IfExp), 0),
    **{ast.Or: 2, ast.And: 3, ast.Not: 4, ast.Compare: 6, ast.BitOr: 10},
    **{ast.BitXor: 20, ast.BitAnd: 30, ast.LShift: 40, ast.RShift: 40},
    **{ast.Add: 50, ast.Sub: 50, ast.Mult: 60, ast.Div: 60, ast.FloorDiv: 60},
    **{ast.Mod: 60, ast.MatMult: 60, ast.UnaryOp: 70, ast.Pow: 80},
}


def _binding(node: ast.AST) -> int:
    """How closely an expression binds: as the grammar orders operators."""
    if isinstance(node, (ast.BinOp, ast.BoolOp)):
        return _BINDS[type(node.op)]
    if isinstance(node, ast.UnaryOp):
        return _BINDS.get(type(node.op), _BINDS[ast.UnaryOp])
    return _BINDS.get(type(node), _ATOM)


def _least(parent: ast.AST, node: ast.AST) -> int:
    """How closely an operand must bind to stand where a node stands without parentheses."""
    if isinstance(parent, ast.BinOp):
        return _binding(parent) + (node is parent.right)
    if isinstance(parent, (ast.Compare, ast.BoolOp)):
        return _binding(parent) + 1
    if isinstance(parent, ast.UnaryOp):
        return _binding(parent)
    is_value = (
        isinstance(parent, (ast.Attribute, ast.Subscript)) and node is parent.value
    )
    is_called = isinstance(parent, ast.Call) and node is parent.func
    return _ATOM if is_value or is_called else 0


def _in_place(
    text: _Text, parent: ast.AST, node: ast.expr, new: str, binding: int
) -> _Edit:
    """The edit that puts an expression in place of a node, in parentheses where it needs them."""
    start, end = text.span(node)
    before, after = text.text[:start].rstrip(), text.text[end:].lstrip()
    is_own = before.endswith("(") and after.startswith(")")
    if is_own and isinstance(parent, ast.Call) and node is not parent.func:
        is_own = before[:-1].rstrip()[-1:] in ("(", ",", "=", "*")  # not the call's
    if is_own:
        start, end = len(before) - 1, len(text.text) - len(after) + 1
    if binding < _least(parent, node) or ("\n" in new and is_own):
        new = f"({new})"
    return _Edit(start, end, new)


# --- folding ------------------------------------------------------------------------------


@functools.lru_cache(_KEPT_PIECES)
def _folded(piece: str, known: tuple[tuple[str, Flag], ...]) -> str:
    if not known:
        return piece
    fold = _Fold(piece, dict(known))
    return fold.text.edited(0, len(piece), fold.edits(_parsed(piece)))


class _Fold:
    """Folds the tests that only read what is known."""

    def __init__(self, piece: str, known: Flags) -> None:
        self.text, self._known = _Text(piece), known

    def edits(self, node: ast.AST) -> list[_Edit]:
        """What changes below a node."""
        return [
            edit
            for child in ast.iter_child_nodes(node)
            for edit in self._edits_of(node, child)
        ]

    def _edits_of(self, parent: ast.AST, node: ast.AST) -> list[_Edit]:
        if isinstance(node, ast.If) and self._value(node.test) is not None:
            return [self._statement(node)]
        if isinstance(node, (ast.If, ast.While)) and self._is_once(node):
            return [self._statement(node)]
        if isinstance(node, ast.IfExp) and self._value(node.test) is not None:
            new, binding = self._expression(node)
            return [_in_place(self.text, parent, node, new, binding)]
        if isinstance(node, ast.Call) and any(map(self._is_gone, _arguments(node))):
            return [self._call(node)]
        return self.edits(node)

    def _value(self, test: ast.expr) -> bool | None:
        """What a test comes to; None where that is not known."""
        names = _constants(test)
        if not names or not names <= self._known.keys():
            return None
        code = compile(ast.Expression(test), "<flags>", "eval")
        return bool(eval(code, {}, dict(self._known)))

    def _expression(self, node: ast.expr) -> tuple[str, int]:
        """The text of an expression, and how closely that binds."""
        node = self._chosen(node)
        edits = self._edits_of(ast.Expr(node), node)
        return self.text.edited(*self.text.span(node), edits), _binding(node)

    def _chosen(self, node: ast.expr) -> ast.expr:
        """The branch that is left of an expression."""
        while isinstance(node, ast.IfExp) and self._value(node.test) is not None:
            node = node.body if self._value(node.test) else node.orelse
        return node

    def _is_once(self, node: ast.If | ast.While) -> bool:
        return _is_name(self._chosen(node.test), ONCE)

    def _is_gone(self, argument: ast.expr | ast.keyword) -> bool:
        """Whether an argument's value is OMIT, once it is folded."""
        value = argument.value if isinstance(argument, ast.keyword) else argument
        return _is_name(self._chosen(value), OMIT)

    def _call(self, node: ast.Call) -> _Edit:
        told = []
        for each in _arguments(node):
            if not self._is_gone(each):
                value = each.value if isinstance(each, ast.keyword) else each
                new, _ = self._expression(value)
                told.append(_argument(each, new))
        return _arguments_edit(self.text, node, told, self.edits(node.func))

    def _statement(self, node: ast.If | ast.While) -> _Edit:
        """A block whose test is known, with the comments above it where all of it goes."""
        text = self.text
        start = text.start_of(node.lineno)
        end = text.start_of((node.end_lineno or 0) + 1)
        if end < len(text.text):
            after = text.lines[node.end_lineno or 0]
            if re.match(rf" {{{node.col_offset + 1},}}#", after):
                raise FoldError("a comment ends a block that is folded", after.strip())
        new = self._block(node)
        if not new:
            start = text.start_of(text.first_line(node))
        elif _line_of(text, node).startswith("elif"):  # behind a test that is not known
            inner = textwrap.indent(new, _INDENT)
            new = f"{' ' * node.col_offset}else:\n{inner}"
        return _Edit(start, end, new)

    def _block(self, node: ast.If | ast.While) -> str:
        """The lines of a block that are left."""
        text, chosen = self.text, node.body
        if isinstance(node, ast.If) and not (
            self._is_once(node) or self._value(node.test)
        ):
            chosen = node.orelse
        if not chosen:
            return ""
        first = chosen[0]
        if chosen is node.orelse and _line_of(text, first).startswith("elif"):
            assert isinstance(first, ast.If)
            if self._value(first.test) is None:
                raise FoldError("this follows a test of flags", _line_of(text, first))
            return self._block(first)
        if first.lineno == node.lineno:
            raise FoldError("a block begins on its test's line", _line_of(text, node))
        keyword = re.compile(rf" {{{node.col_offset}}}(elif|else)\b")
        line = self._header(node, keyword, first if chosen is node.orelse else None)
        last = chosen[-1].end_lineno or 0
        while last < (node.end_lineno or 0) and not keyword.match(text.lines[last]):
            last += 1  # comments
        edits = [
            edit
            for each in chosen
            for edit in (
                [self._without_pass(each)]
                if isinstance(each, ast.Pass)
                else self._edits_of(node, each)
            )
        ]
        found = text.edited(text.start_of(line + 1), text.start_of(last + 1), edits)
        indent = first.col_offset - node.col_offset
        return re.sub(rf"^ {{{indent}}}", "", found, flags=re.MULTILINE)

    def _header(
        self, node: ast.If | ast.While, keyword: re.Pattern[str], after: ast.stmt | None
    ) -> int:
        """The last line of a block's test; of the `else` before a statement, if there is one."""
        lines = self.text.lines
        if after is not None:
            numbers = range(after.lineno - 1, node.lineno, -1)
            return next(n for n in numbers if keyword.match(lines[n - 1]))
        numbers = range(node.test.end_lineno or 0, len(lines))
        return next(n for n in numbers if re.search(r":\s*(#.*)?$", lines[n - 1]))

    def _without_pass(self, node: ast.Pass) -> _Edit:
        text = self.text
        return _Edit(text.start_of(node.lineno), text.start_of(node.lineno + 1), "")


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _line_of(text: _Text, node: ast.stmt) -> str:
    return text.lines[node.lineno - 1].strip()


def _arguments(node: ast.Call) -> list[ast.expr | ast.keyword]:
    return [*node.args, *node.keywords]


def _argument(node: ast.expr | ast.keyword, value: str) -> str:
    """An argument of a call with this value."""
    if isinstance(node, ast.keyword):
        return f"{node.arg}={value}" if node.arg else f"**{value}"
    return value


def _arguments_edit(
    text: _Text, node: ast.Call, told: Sequence[str], func: Sequence[_Edit]
) -> _Edit:
    """A call with these arguments, which end with a comma if they did."""
    start, end = text.span(node)
    place, func_end = text.span(node.func)
    called = text.edited(place, func_end, func)
    has_comma = text.text[:end][:-1].rstrip().endswith(",")
    comma = "," if has_comma and told else ""
    return _Edit(start, end, f"{called}({', '.join(told)}{comma})")


# --- functions in place of their calls ----------------------------------------------------


def _inlined(pieces: Sequence[str]) -> list[str]:
    """Without the inline functions; their calls are their one expression."""
    bodies = {}
    kept = []
    for piece in pieces:
        if f"@{INLINE}\n" not in piece:
            kept.append(piece)
            continue
        (node,) = _parsed(piece).body
        assert isinstance(node, ast.FunctionDef)
        bodies[node.name] = piece
    while True:
        called = [
            tuple((n, b) for n, b in bodies.items() if n in names)
            for names in (_facts(piece).called for piece in kept)
        ]
        if not any(called):
            return kept
        kept = [
            _with_bodies(piece, found) if found else piece
            for piece, found in zip(kept, called, strict=True)
        ]


@functools.lru_cache(_KEPT_PIECES)
def _with_bodies(piece: str, bodies: tuple[tuple[str, str], ...]) -> str:
    text, functions = _Text(piece), {name: _Inline.of(body) for name, body in bodies}

    def edits(parent: ast.AST, node: ast.AST) -> list[_Edit]:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in functions
        ):
            new, binding = functions[node.func.id].call(text, node)
            return [_in_place(text, parent, node, new, binding)]
        return [e for child in ast.iter_child_nodes(node) for e in edits(node, child)]

    module = _parsed(piece)
    return text.edited(0, len(piece), edits(module, module))


@dataclass(frozen=True)
class _Inline:
    """An inline function: its parameters, and the expression that it returns."""

    name: str
    parameters: tuple[str, ...]
    text: _Text
    expression: ast.expr

    @classmethod
    @functools.lru_cache(_KEPT_PIECES)
    def of(cls, piece: str) -> _Inline:
        """Read its definition; FoldError where it is more than a docstring and a return."""
        (function,) = _parsed(piece).body
        assert isinstance(function, ast.FunctionDef)
        returned = function.body[-1]
        if not isinstance(returned, ast.Return) or returned.value is None:
            name = function.name
            raise FoldError(f"{name} is inline, so it only returns an expression")
        names = tuple(each.arg for each in function.args.args)
        return cls(function.name, names, _Text(piece), returned.value)

    def call(self, text: _Text, node: ast.Call) -> tuple[str, int]:
        """What a call of a text comes to, and how closely that binds."""
        if len(node.args) != len(self.parameters) or node.keywords:
            line = text.lines[node.lineno - 1].strip()
            raise FoldError(f"{self.name} takes {', '.join(self.parameters)}", line)
        values = dict(zip(self.parameters, node.args, strict=True))

        def edits(parent: ast.AST, part: ast.AST) -> list[_Edit]:
            if isinstance(part, ast.Name) and part.id in values:
                value = values[part.id]
                new = text.edited(*text.span(value), [])
                return [_in_place(self.text, parent, part, new, _binding(value))]
            return [
                e for child in ast.iter_child_nodes(part) for e in edits(part, child)
            ]

        found = edits(ast.Expr(self.expression), self.expression)
        new = self.text.edited(*self.text.span(self.expression), found)
        if isinstance(self.expression, ast.Name) and self.expression.id in values:
            return new, _binding(values[self.expression.id])
        return new, _binding(self.expression)


# --- what nothing reads -------------------------------------------------------------------


@dataclass(frozen=True)
class _Parameter:
    name: str
    default: str | None  # as `ast.unparse` has it
    is_read: bool


@dataclass(frozen=True)
class _Facts:
    """What a statement at the top defines and uses.

    names: how often each is read, in all. called: how often each is called, or
    an attribute of it read. starred:
    what is called with stars. attributes: those that are read of anything. parameters: of a
    function. fields: of a class.
    """

    defines: tuple[str, ...] = ()
    names: Mapping[str, int] = field(default_factory=dict)
    called: Mapping[str, int] = field(default_factory=dict)
    starred: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    parameters: tuple[_Parameter, ...] | None = None
    fields: tuple[str, ...] | None = None
    public: frozenset[str] = frozenset()  # by __all__


@functools.lru_cache(_KEPT_PIECES)
def _facts(piece: str) -> _Facts:
    names: dict[str, int] = {}
    called: dict[str, int] = {}
    attributes, starred = set(), set()
    own = _locals(piece)
    for part in ast.walk(_parsed(piece)):
        if isinstance(part, ast.Name) and part.id in own:
            continue
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            names[part.id] = names.get(part.id, 0) + 1
        elif isinstance(part, ast.Attribute):
            attributes.add(part.attr)
            if isinstance(part.value, ast.Name) and part.value.id not in own:
                called[part.value.id] = called.get(part.value.id, 0) + 1
        elif (
            isinstance(part, ast.Call)
            and isinstance(part.func, ast.Name)
            and part.func.id not in own
        ):
            stars = any(isinstance(each, ast.Starred) for each in part.args)
            if stars or not all(each.arg for each in part.keywords):
                starred.add(part.func.id)
            called[part.func.id] = called.get(part.func.id, 0) + 1
    defines: tuple[str, ...] = ()
    parameters = fields = None
    public: frozenset[str] = frozenset()
    body = _parsed(piece).body
    node = body[0] if len(body) == 1 else None
    if isinstance(node, ast.FunctionDef):
        defines, parameters = (node.name,), _parameters(node)
    elif isinstance(node, ast.ClassDef):
        defines = (node.name,)
        fields = tuple(
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        )
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        defines = tuple(
            alias.asname or alias.name.partition(".")[0] for alias in node.names
        )
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        defines = (node.targets[0].id,)
        if formula := _FORMULA.search(piece):
            for name in re.findall(r"\b[A-Z]\w+", formula[1]):
                names[name] = names.get(name, 0) + 1
        if defines == ("__all__",):
            public = frozenset((*defines, *ast.literal_eval(node.value)))
    return _Facts(
        *(defines, names, called, frozenset(starred), frozenset(attributes)),
        *(parameters, fields, public),
    )


def _locals(piece: str) -> set[str]:
    """The names that a function binds, which are not those of the module in it."""
    return {
        part.arg if isinstance(part, ast.arg) else part.id
        for node in _parsed(piece).body
        if isinstance(node, ast.FunctionDef)
        for part in ast.walk(node)
        if isinstance(part, ast.arg)
        or (isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
    }


def _parameters(node: ast.FunctionDef) -> tuple[_Parameter, ...] | None:
    """A function's parameters; None where it takes any number."""
    told = node.args
    if told.vararg or told.kwarg or told.posonlyargs:
        return None
    read = {
        part.id
        for each in node.body
        for part in ast.walk(each)
        if isinstance(part, ast.Name)
    }
    defaults = [
        *[None] * (len(told.args) - len(told.defaults)),
        *told.defaults,
        *told.kw_defaults,
    ]
    return tuple(
        _Parameter(
            each.arg, ast.unparse(default) if default else None, each.arg in read
        )
        for each, default in zip([*told.args, *told.kwonlyargs], defaults, strict=True)
    )


@dataclass(frozen=True)
class _Callee:
    """What changes in the calls of a function or a class: parameters or fields by place."""

    name: str
    names: tuple[str, ...]
    gone: frozenset[str]
    defaults: tuple[str | None, ...]


def _pruned(pieces: Sequence[str], kept: frozenset[str]) -> list[str]:
    """The pieces after one round."""
    facts = [_facts(piece) for piece in pieces]
    names, called = (
        _sum(each.names for each in facts),
        _sum(each.called for each in facts),
    )
    attributes = frozenset().union(*(each.attributes for each in facts))
    starred = frozenset().union(*(each.starred for each in facts))
    kept = kept.union(*(each.public for each in facts))
    callees: dict[str, _Callee] = {}
    for each in facts:
        for name in set(each.defines) - starred:
            if each.fields is not None:
                gone = frozenset(each.fields) - attributes
                if len(gone) == len(each.fields):  # it goes itself once it is not used
                    gone = frozenset()
                callees[name] = _Callee(name, each.fields, gone, ())
            elif each.parameters is not None and name not in kept:
                if names.get(name, 0) != called.get(name, 0):
                    continue  # handed on as a value
                told = tuple(p.name for p in each.parameters)
                gone = frozenset(p.name for p in each.parameters if not p.is_read)
                defaults = tuple(p.default for p in each.parameters)
                callees[name] = _Callee(name, told, gone, defaults)
    return [
        _without_targets(after)
        for piece, about in zip(pieces, facts, strict=True)
        if (after := _without(piece, about, names, kept, callees))
    ]


@functools.lru_cache(_KEPT_PIECES)
def _without_targets(piece: str) -> str:
    """A piece with `_` for what nothing reads of what a call returns, or of a loop."""
    if not _UNPACKED.search(piece):
        return piece
    module = _parsed(piece)
    read = {
        part.id
        for part in ast.walk(module)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    }
    read |= {
        part.target.id
        for part in ast.walk(module)
        if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name)
    }
    text = _Text(piece)
    edits = [
        _Edit(*text.span(target), "_")
        for part in ast.walk(module)
        if isinstance(part, ast.Assign)
        and isinstance(part.value, ast.Call)
        and isinstance(part.targets[0], ast.Tuple)
        for target in part.targets[0].elts
        if isinstance(target, ast.Name) and target.id not in {*read, "_"}
    ]
    edits += [
        _Edit(*text.span(part.target), "_")
        for part in ast.walk(module)
        if isinstance(part, ast.For)
        and isinstance(part.target, ast.Name)
        and part.target.id not in {*read, "_"}
    ]
    return text.edited(0, len(piece), edits) if edits else piece


def _sum(counts: Iterator[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return total


def _without(
    piece: str,
    about: _Facts,
    names: Mapping[str, int],
    kept: frozenset[str],
    callees: Mapping[str, _Callee],
) -> str:
    """A piece without what nothing reads; empty when that is all of it."""
    unused = [
        name
        for name in about.defines
        if name not in kept and names.get(name, 0) == about.names.get(name, 0)
    ]
    if about.defines and len(unused) == len(about.defines):
        return ""
    if unused:
        return _without_imports(piece, tuple(unused))
    own = next((callees[n].gone for n in about.defines if n in callees), frozenset())
    concerned = tuple(
        callees[name]
        for name in sorted(about.called.keys() & callees.keys())
        if callees[name].gone or any(callees[name].defaults)
    )
    if not own and not _has_spare(piece, concerned):
        return piece
    return _edited(piece, own, concerned)


@functools.lru_cache(_KEPT_PIECES)
def _has_spare(piece: str, callees: tuple[_Callee, ...]) -> bool:
    """Whether a call has an argument that the callee does not need."""
    known = {callee.name: callee for callee in callees}
    for node in ast.walk(_parsed(piece)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            callee = known.get(node.func.id)
            if callee and not all(_needed(callee, _told(node))):
                return True
    return False


def _told(node: ast.Call) -> list[tuple[str | None, str]]:
    """A call's arguments, as keyword and value."""
    told: list[tuple[str | None, str]] = []
    told += [(None, ast.unparse(each)) for each in node.args]
    return told + [(each.arg, ast.unparse(each.value)) for each in node.keywords]


def _needed(callee: _Callee, told: Sequence[tuple[str | None, str]]) -> list[bool]:
    """Of a call's arguments, as keyword and value, whether each must stay."""
    needed = []
    for place, (keyword, value) in enumerate(told):
        name = keyword or callee.names[place]
        default = None
        if callee.defaults:
            default = callee.defaults[callee.names.index(name)]
        needed.append(name not in callee.gone and (default is None or value != default))
    # What stands before an argument that stays keeps its place, unless it is gone for all.
    last = max((n for n, (k, _) in enumerate(told) if not k and needed[n]), default=-1)
    return [
        need or (not k and n < last and (callee.names[n] not in callee.gone))
        for n, (need, (k, _)) in enumerate(zip(needed, told, strict=True))
    ]


@functools.lru_cache(_KEPT_PIECES)
def _without_imports(piece: str, unused: tuple[str, ...]) -> str:
    (node,) = _parsed(piece).body
    assert isinstance(node, ast.ImportFrom)
    names = [each for each in node.names if (each.asname or each.name) not in unused]
    told = ", ".join(ast.unparse(each) for each in names)
    text = _Text(piece)
    edit = _Edit(*text.span(node), f"from {node.module} import {told}")
    return text.edited(0, len(piece), [edit])


@functools.lru_cache(_KEPT_PIECES)
def _edited(piece: str, gone: frozenset[str], callees: tuple[_Callee, ...]) -> str:
    """A piece without these parameters or fields of its own, and without spare arguments."""
    text, known = _Text(piece), {callee.name: callee for callee in callees}

    def value(node: ast.expr) -> str:
        return text.edited(*text.span(node), edits(node))

    def edits(node: ast.AST) -> list[_Edit]:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            callee = known.get(node.func.id)
            needed = _needed(callee, _told(node)) if callee else []
            if not all(needed):
                told = [
                    _argument(e, value(e.value if isinstance(e, ast.keyword) else e))
                    for e, need in zip(_arguments(node), needed, strict=True)
                    if need
                ]
                return [_arguments_edit(text, node, told, ())]
        return [edit for child in ast.iter_child_nodes(node) for edit in edits(child)]

    (own,) = _parsed(piece).body if gone else (None,)
    found: list[_Edit] = []
    if isinstance(own, ast.FunctionDef):
        found = [_signature(text, own, gone)]
        for each in own.body:
            found += edits(each)
        return text.edited(0, len(piece), found)
    for part in ast.walk(own) if own else ():
        if isinstance(part, ast.AnnAssign) and ast.unparse(part.target) in gone:
            start, end = text.first_line(part), (part.end_lineno or 0) + 1
            found.append(_Edit(text.start_of(start), text.start_of(end), ""))
    return text.edited(0, len(piece), found or edits(_parsed(piece)))


def _signature(text: _Text, node: ast.FunctionDef, gone: frozenset[str]) -> _Edit:
    """A function's parameters without those that are gone; they end with a comma if they did."""
    told = node.args
    defaults = [*[None] * (len(told.args) - len(told.defaults)), *told.defaults]

    def said(each: ast.arg, default: ast.expr | None) -> str:
        start, end = text.span(each)
        return text.text[start : text.span(default)[1] if default else end]

    some, after = (
        [said(e, d) for e, d in zip(args, given, strict=True) if e.arg not in gone]
        for args, given in ((told.args, defaults), (told.kwonlyargs, told.kw_defaults))
    )
    start = text.text.index("(", text.at(node.lineno, node.col_offset))
    every: list[_Spanned] = [*told.args, *told.kwonlyargs, *told.defaults]
    every += [default for default in told.kw_defaults if default]
    last = max(text.span(each)[1] for each in every)
    end = text.text.index(")", last)
    has_comma = text.text[last:end].strip().startswith(",")
    params = [*some, *(["*"] if after else []), *after]
    comma = "," if has_comma and params else ""
    return _Edit(start, end + 1, f"({', '.join(params)}{comma})")
