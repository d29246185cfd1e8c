# SPDX-License-Identifier: Apache-2.0
"""The grammar of expressions: a tree with types, or a refusal with its column.

Python's own parser reads the text, and a closed table says which of its nodes are the language's::

    truth = int CMP int | truth and truth | truth or truth | not truth
    int   = NUMBER | name | name[axis, ...] | - int | int (+ | - | *) int | int (// | %) NUMBER
          | min(int, ...) | max(int, ...) | abs(int)
    CMP   = < | <= | > | >= | == | !=
    real  = NUMBER | s | int | - real | real (+ | - | *) real | real / NUMBER | tanh(real)
          | softcap(real, NUMBER) | where(truth, real, real) | min, max, abs as above

A mask is a truth, a score is real; s is softmax_scale * QK^T, and its numbers may have a fraction.
Names are the axes of a score and the lengths (`NAMES`), and what a spec declares in ``params``. An
integer has 32 bits on the device: `check_range` holds every subterm to that.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NoReturn

from ..errors import quoted

Type = Literal["int", "truth", "real"]
Range = tuple[int, int]

MAX_SEQLEN: Final = 1 << 24
LONGEST: Final = 400  # [characters] of an expression
DEEPEST: Final = 40  # nested terms
INT32: Final[Range] = (-(1 << 31), (1 << 31) - 1)
LARGEST_REAL: Final = (
    1e30  # of a number in a score: products of some are far within fp32
)
_COUNT: Final[Range] = (0, (1 << 16) - 1)  # of batches and of heads

NAMES: Final[Mapping[str, tuple[str, Range]]] = {
    "q": ("the query's place among the keys", (1 - MAX_SEQLEN, MAX_SEQLEN - 1)),
    "kv": ("the key", (0, MAX_SEQLEN - 1)),
    "row": ("the query: q + seqlen_q - seqlen_kv", (0, MAX_SEQLEN - 1)),
    "b": ("the batch", _COUNT),
    "h": ("the query head", _COUNT),
    "h_kv": ("the KV head", _COUNT),
    "seqlen_q": ("queries", (1, MAX_SEQLEN)),
    "seqlen_kv": ("keys", (1, MAX_SEQLEN)),
}
"""What each name means, and the values that it can have."""

AXES: Final = ("b", "h", "h_kv", "row", "kv")
"""Names that a tensor can be indexed by."""

SCORE: Final = "s"
"""The name of a score: softmax_scale * QK^T, in natural logarithms."""


class ExpressionError(ValueError):
    """What is wrong with an expression. code: of `errors.CODES`; column: in the text, from 0."""

    def __init__(self, code: str, column: int, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.column, self.message, self.hint = code, column, message, hint


@dataclass(frozen=True)
class Param:
    """A declared input: a scalar, or a tensor with these axes. monotone: rises along row.

    range: of int32; real is fp32.
    """

    axes: tuple[str, ...] = ()
    range: Range = INT32
    monotone: bool = False
    type: Type = "int"


@dataclass(frozen=True)
class Number:
    """A whole number."""

    value: int
    column: int = field(default=0, compare=False)
    type: Type = field(default="int", init=False, compare=False)


@dataclass(frozen=True)
class Real:
    """A number with a fraction or an exponent."""

    value: float
    column: int = field(default=0, compare=False)
    type: Type = field(default="real", init=False, compare=False)


@dataclass(frozen=True)
class Name:
    """An axis, a length, a scalar, or with axes an element of a tensor."""

    name: str
    axes: tuple[str, ...] = ()
    column: int = field(default=0, compare=False)
    type: Type = "int"


@dataclass(frozen=True)
class Term:
    """An operator of `_OPERATORS` or a function of `_FUNCTIONS`, and what it is applied to."""

    operator: str
    operands: tuple[Node, ...]
    column: int = field(default=0, compare=False)

    @property
    def type(self) -> Type:
        """Of the value."""
        if self.operator in _TRUTHS:
            return "truth"
        is_real = self.operator in _REALS or any(
            x.type == "real" for x in self.operands
        )
        return "real" if is_real else "int"


Node = Number | Real | Name | Term

COMPARISONS: Final = ("<", "<=", ">", ">=", "==", "!=")
_TRUTHS: Final = (*COMPARISONS, "and", "or", "not")
_REALS: Final = ("/", "tanh", "softcap", "where")
_OF_SCORES: Final = {"tanh": 1, "softcap": 2, "where": 3}
_FUNCTIONS: Final[Mapping[str, int | None]] = {  # operands; None: two or more
    **{"min": None, "max": None, "abs": 1}
}
_NAMED: Final = {*_FUNCTIONS, *_OF_SCORES}
_OPERATORS: Final[Mapping[type[ast.AST], str]] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"},
    **{
        ast.Lt: "<",
        ast.LtE: "<=",
        ast.Gt: ">",
        ast.GtE: ">=",
        ast.Eq: "==",
        ast.NotEq: "!=",
    },
    **{ast.And: "and", ast.Or: "or", ast.Not: "not", ast.USub: "-"},
}
_MEANT: Final[Mapping[type[ast.AST], tuple[str, str]]] = {
    ast.BitAnd: ("&", "write and"),
    ast.BitOr: ("|", "write or"),
    ast.Invert: ("~", "write not"),
    ast.Div: ("/", "write //, which rounds down"),
    ast.Pow: ("**", "write the product"),
    ast.IfExp: ("if", "write and, or, not"),
    ast.Attribute: ("a dot", "names have none"),
}


def parse(
    text: str, params: Mapping[str, Param] | None = None, *, type: Type = "truth"
) -> Node:
    """Return the tree of an expression; raises ExpressionError."""
    if len(text) > LONGEST:
        message = f"has {len(text)} characters, of at most {LONGEST}"
        raise ExpressionError("FG211", LONGEST, message)
    for column, character in enumerate(text):
        if not " " <= character <= "~":
            raise ExpressionError(
                "FG211", column, f"{quoted(character)} is not part of the language"
            )
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        column = (getattr(error, "offset", None) or len(text)) - 1
        raise ExpressionError("FG211", column, "is not an expression") from None
    start, functions = len(text) - len(text.lstrip()), dict(_FUNCTIONS)
    if type == "real":
        functions |= _OF_SCORES
    reader = _Reader(text, start, params or {}, functions)
    return reader.read(body, type)


class _Reader:
    """Turns Python's nodes into the language's."""

    def __init__(
        self,
        text: str,
        start: int,
        params: Mapping[str, Param],
        functions: Mapping[str, int | None],
    ) -> None:
        self.text, self.start, self.params, self.depth = text, start, params, 0
        self.functions = functions
        self.of_scores = functions.keys() > _FUNCTIONS.keys()
        # What an operator takes that whole numbers and real ones have.
        self.number_type: Type = "real" if self.of_scores else "int"

    def refuse(
        self, node: ast.AST, code: str, message: str, hint: str = ""
    ) -> NoReturn:
        raise ExpressionError(code, self.column(node), message, hint)

    def column(self, node: ast.AST) -> int:
        return self.start + int(getattr(node, "col_offset", 0))

    def source(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text.strip(), node) or ""

    def read(self, node: ast.expr, wanted: Type) -> Node:
        """The tree of a node that must have a type."""
        self.depth += 1
        if self.depth > DEEPEST:
            self.refuse(node, "FG211", f"has more than {DEEPEST} nested terms")
        found = self.convert(node)
        self.depth -= 1
        if found.type != wanted and (found.type, wanted) != ("int", "real"):
            whole = "a whole number" if self.of_scores else "a number"
            says = {"int": whole, "truth": "a truth value", "real": "a number"}
            if wanted == "int" and found.type == "real":
                says["real"] = "a number with a fraction"
            message = f"{says[found.type]} stands where {says[wanted]} is needed"
            self.refuse(node, "FG213", message)
        return found

    def convert(self, node: ast.expr) -> Node:
        column = self.column(node)
        match node:
            case ast.Constant():
                return self.number(node)
            case ast.Name():
                return self.name(node, node.id, ())
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                items = index.elts if isinstance(index, ast.Tuple) else [index]
                return self.name(node, name, [self.axis(item) for item in items])
            case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                values = node.values if isinstance(node, ast.BoolOp) else [node.operand]
                operator = _OPERATORS[type(node.op)]
                read = [self.read(value, "truth") for value in values]
                return Term(operator, tuple(flattened(operator, read)), column)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return Term("-", (self.read(operand, self.number_type),), column)
            case ast.BinOp(left=left, op=ast.Div(), right=right) if self.of_scores:
                found = Term(
                    "/", (self.read(left, "real"), self.read(right, "real")), column
                )
                return self.divides(right, found)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                wanted = (
                    "int"
                    if isinstance(op, (ast.FloorDiv, ast.Mod))
                    else self.number_type
                )
                operands = self.read(left, wanted), self.read(right, wanted)
                found = Term(_OPERATORS[type(op)], operands, column)
                return self.divides(right, found)
            case ast.Compare(left=left, ops=ops, comparators=rights):
                if len(ops) > 1:
                    for side in (left, *rights):  # & and | bind tighter than <=
                        if isinstance(side, ast.BinOp) and type(side.op) in _MEANT:
                            self.unknown(side)
                    hint = "write one comparison at a time, joined by and"
                    self.refuse(rights[1], "FG211", "two comparisons in a row", hint)
                if type(ops[0]) in _OPERATORS:
                    operands = self.read(left, "int"), self.read(rights[0], "int")
                    return Term(_OPERATORS[type(ops[0])], operands, column)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self.call(node, name, args)
        self.unknown(node)

    def number(self, node: ast.Constant) -> Number | Real:
        text = self.source(node)
        if self.of_scores and re.fullmatch(r"\d+\.\d+(e-?\d+)?|\d+e-?\d+", text):
            if not float(text) <= LARGEST_REAL:
                self.refuse(node, "FG216", f"{text} is more than {LARGEST_REAL:g}")
            return Real(float(text), self.column(node))
        if not re.fullmatch(r"0|[1-9]\d*", text):
            self.refuse(
                node, "FG211", f"{quoted(text)} is not a whole number in decimal"
            )
        value = int(text)
        if value > INT32[1]:
            self.refuse(node, "FG216", f"{text} is more than 32 bits hold")
        return Number(value, self.column(node))

    def name(self, node: ast.expr, name: str, axes: Sequence[str]) -> Name:
        column, param = self.column(node), self.params.get(name)
        if name == SCORE and param is None and not axes:
            if not self.of_scores:
                self.refuse(
                    node, "FG213", "a mask cannot read scores", "write where() in score"
                )
            return Name(name, (), column, "real")
        if param is None and name not in NAMES:
            known = [*[SCORE] * self.of_scores, *NAMES, *self.params]
            close = difflib.get_close_matches(name, known, n=1)
            message = f"unknown name {quoted(name)}; known: {', '.join(known)}"
            hint = f"did you mean {close[0]}?" if close else ""
            raise ExpressionError("FG212", column, message, hint)
        needed = param.axes if param else ()
        if tuple(axes) != needed:
            whole = f"{name}[{', '.join(needed)}]" if needed else name
            message = (
                f"{name} has {len(needed) or 'no'} axes"
                if len(needed) != 1
                else f"{name} has one axis"
            )
            raise ExpressionError("FG218", column, message, f"write {whole}")
        return Name(name, needed, column, param.type if param else "int")

    def axis(self, node: ast.expr) -> str:
        if not (isinstance(node, ast.Name) and node.id in AXES):
            message = "a tensor is indexed by its axes alone"
            self.refuse(
                node, "FG218", message, f"write {', '.join(AXES[:-1])} or {AXES[-1]}"
            )
        return node.id

    def divides(self, node: ast.expr, found: Term) -> Term:
        divisor = found.operands[1]
        if found.operator in ("//", "%") and not (
            isinstance(divisor, Number) and divisor.value
        ):
            message = "the divisor must be a positive whole number, written out"
            self.refuse(node, "FG218", message)
        if found.operator == "/" and not (
            isinstance(divisor, Number | Real) and divisor.value
        ):
            self.refuse(
                node, "FG218", "the divisor must be a positive number, written out"
            )
        return found

    def call(self, node: ast.expr, name: str, args: Sequence[ast.expr]) -> Term:
        if name not in self.functions:
            known = ", ".join(self.functions)
            self.refuse(
                node, "FG212", f"unknown function {quoted(name)}; known: {known}"
            )
        count = self.functions[name]
        if len(args) != count if count else len(args) < 2:
            words = {1: "one argument", 2: "two arguments", 3: "three arguments"}
            needs = words[count] if count else "two arguments or more"
            self.refuse(node, "FG218", f"{name} takes {needs}")
        wanted: list[Type] = [self.number_type] * len(args)
        if name == "where":
            wanted[0] = "truth"
        operands = tuple(map(self.read, args, wanted))
        if name == "softcap" and not (
            isinstance(operands[1], Number | Real) and operands[1].value
        ):
            self.refuse(
                args[1], "FG218", "a cap must be a positive number, written out"
            )
        return Term(name, operands, self.column(node))

    def unknown(self, node: ast.expr) -> NoReturn:
        for kind in (getattr(node, "op", node), node):
            if type(kind) in _MEANT:
                sign, hint = _MEANT[type(kind)]
                left = getattr(node, "left", None)
                begin = (
                    self.column(left) + len(self.source(left))
                    if left
                    else self.column(node)
                )
                column = self.text.find(sign, begin) if left else begin
                message = f"{sign} is not part of the language"
                raise ExpressionError("FG211", column, message, hint)
        self.refuse(node, "FG211", "is not part of the language")


def flattened(operator: str, nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield the operands of nested terms of an operator that may be written without parentheses."""
    for node in nodes:
        if isinstance(node, Term) and node.operator == operator != "not":
            yield from node.operands
        else:
            yield node


_BINDS: Final = {"or": 1, "and": 2, "not": 3, **dict.fromkeys(COMPARISONS, 4)} | {
    **dict.fromkeys("+-", 5),
    **dict.fromkeys(("*", "/", "//", "%"), 6),
}
_NEGATION: Final = 7
_ATOM: Final = 8


def text_of(node: Node) -> str:
    """Return an expression as it is written, with no parenthesis that it does not need."""
    return _written(node)[0]


def _written(node: Node) -> tuple[str, int]:
    match node:
        case Number(value=value) | Real(value=value):
            return repr(value), _ATOM if value >= 0 else _NEGATION
        case Name(name=name, axes=axes):
            return f"{name}[{', '.join(axes)}]" if axes else name, _ATOM
        case Term(operator=operator, operands=operands) if operator in _NAMED:
            return f"{operator}({', '.join(map(text_of, operands))})", _ATOM
        case Term(operator="-", operands=(operand,)):
            return f"-{_inside(operand, _NEGATION)}", _NEGATION
        case Term(operator="not", operands=(operand,)):
            return f"not {_inside(operand, _BINDS['not'])}", _BINDS["not"]
        case Term(operator=operator, operands=(first, *others)):
            binds = _BINDS[operator]
            # A comparison holds no other; the rest are read from the left.
            left = _inside(first, binds + (operator in COMPARISONS))
            rights = [
                _inside(other, binds + (operator not in ("and", "or")))
                for other in others
            ]
            return f" {operator} ".join([left, *rights]), binds
    raise AssertionError(node)


def _inside(node: Node, binds: int) -> str:
    text, own = _written(node)
    return text if own >= binds else f"({text})"


def walk(node: Node) -> Iterator[Node]:
    """Yield a tree's nodes, the root first."""
    yield node
    if isinstance(node, Term):
        for operand in node.operands:
            yield from walk(operand)


def names_in(node: Node) -> set[str]:
    """Return the names that a tree reads, indices included."""
    found = [each for each in walk(node) if isinstance(each, Name)]
    return {name for each in found for name in (each.name, *each.axes)}
