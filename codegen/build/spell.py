# SPDX-License-Identifier: Apache-2.0
"""Spells a score as lines of the DSL: what templates place where a kernel computes one."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

from ..expressions.language import NAMES, SCORE, Name, Node, Number, Real, Term, names_in, text_of

_DEEPEST: Final = 2  # operators inside one another on a line
_NEGATED: Final = {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "=="}
_SUM, _PRODUCT, _SIGN, _ATOM = range(4)  # the operators that bind least come first
_BINDS: Final = {"+": _SUM, "-": _SUM, "*": _PRODUCT, "//": _PRODUCT, "%": _PRODUCT}


def as_written(node: Node | None) -> str:
    """Return an expression as a spec has it; nothing for none."""
    return text_of(node) if node else ""


def names_of_rows(node: Node | None) -> list[str]:
    """Return the names that it reads and that are the same along a row, sorted."""
    return sorted(names_in(node) & NAMES.keys() - {"kv"}) if node else []


def lines(node: Node | None) -> list[str]:
    """Return assignments of what is nested deeper than two operators, then a return statement."""
    speller = _Speller()
    value = speller.real(node).text if node else "0.0"
    return [*speller.lines, f"return {value}"]


class _Spelt(NamedTuple):
    """A subterm's text. depth: of operators in it."""

    text: str
    depth: int = 0
    binds: int = _ATOM


class _Speller:
    """Spells subterms, and keeps the lines that have to come before them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def named(self, text: str) -> _Spelt:
        self.lines.append(f"part_{len(self.lines) + 1} = {text}")
        return _Spelt(f"part_{len(self.lines)}")

    def operand(self, node: Node, binds: int = _SUM, *, real: bool = False) -> _Spelt:
        """What an operator that binds so takes: a name where it is deep, or in parentheses."""
        found = self.real(node) if real else self.spelt(node)
        if found.depth >= _DEEPEST:
            return self.named(found.text)
        if found.binds < binds:
            return _Spelt(f"({found.text})", found.depth)
        return found

    def named_operand(self, node: Node) -> str:
        """A name, for what stands in a line twice."""
        found = self.operand(node, real=node.type == "real")
        return found.text if found.text.isidentifier() else self.named(found.text).text

    def real(self, node: Node) -> _Spelt:
        """As fp32."""
        match node:
            case Number(value=value) | Real(value=value):
                return _Spelt(repr(float(value)))
        found = self.spelt(node)
        if node.type == "real":
            return found
        return _Spelt(f"Float32({found.text})", found.depth)

    def call(self, function: str, *operands: _Spelt, options: str = "") -> _Spelt:
        arguments = ", ".join(each.text for each in operands)
        return _Spelt(f"{function}({arguments}{options})", 1 + max(x.depth for x in operands))

    def tanh(self, operand: _Spelt) -> _Spelt:
        return self.call("cute.math.tanh", operand, options=", fastmath=True")

    def binary(self, sign: str, left: _Spelt, right: _Spelt) -> _Spelt:
        depth = 1 + max(left.depth, right.depth)
        return _Spelt(f"{left.text} {sign} {right.text}", depth, _BINDS.get(sign, _SUM))

    def spelt(self, node: Node) -> _Spelt:
        is_real = node.type == "real"
        match node:
            case Number(value=value) | Real(value=value):
                return _Spelt(repr(value))
            case Name(name=name, axes=axes):
                return _Spelt(_name(name, axes))
            case Term(operator="not", operands=(operand,)):
                return self.spelt(_negated(operand))
            case Term(operator="and" | "or" as sign, operands=operands):
                joint = " & " if sign == "and" else " | "
                found = [self.operand(each) for each in operands]
                text = joint.join(f"({each.text})" for each in found)
                return _Spelt(text, 1 + max(each.depth for each in found))
            case Term(operator="where", operands=(condition, *values)):
                found = [self.operand(condition)]
                for each in values:
                    spelt = self.operand(each, real=True)
                    is_number = isinstance(each, Number | Real)
                    found.append(self.call("Float32", spelt) if is_number else spelt)
                return self.call("cutlass.select_", *found)
            case Term(operator="tanh", operands=(operand,)):
                return self.tanh(self.operand(operand, real=True))
            case Term(operator="softcap", operands=(operand, cap)):
                inner, limit = self.operand(operand, _PRODUCT, real=True), self.real(cap)
                scaled = self.binary("*", inner, _Spelt(f"(1.0 / {limit.text})"))
                return self.binary("*", limit, self.tanh(self.named(scaled.text)))
            case Term(operator="abs", operands=(operand,)):
                x = self.named_operand(operand)
                function = "cute.arch.fmax" if is_real else "cutlass.max"
                return self.call(function, _Spelt(x), _Spelt(f"-{x}"))
            case Term(operator="min" | "max" as function, operands=operands):
                found = [self.operand(each, real=is_real) for each in operands]
                name = f"cute.arch.f{function}" if is_real else f"cutlass.{function}"
                return functools.reduce(functools.partial(self.call, name), found)
            case Term(operator="-", operands=(operand,)):
                inner = self.operand(operand, _SIGN, real=is_real)
                return _Spelt(f"-{inner.text}", 1 + inner.depth, _SIGN)
            case Term(operator="/", operands=(left, right)):
                inverse = _Spelt(f"(1.0 / {self.real(right).text})")
                return self.binary("*", self.operand(left, _PRODUCT, real=True), inverse)
            case Term(operator=sign, operands=(left, right)):
                binds = _BINDS.get(sign, _SUM)
                first = self.operand(left, binds, real=is_real)
                return self.binary(sign, first, self.operand(right, binds + 1, real=is_real))
        raise AssertionError(node)


def _name(name: str, axes: tuple[str, ...]) -> str:
    """An axis, a length, s, or what a call brings: slopes, and params, which are in `Problem`."""
    if name == SCORE or name in NAMES:
        return name
    found = f"m{name.capitalize()}" if name == "slopes" else f"problem.{name}"
    return f"{found}[{', '.join(axes)}]" if axes else found


def _negated(node: Node) -> Node:
    """A truth value that is true where this one is not, without `not`."""
    assert isinstance(node, Term)
    if node.operator == "not":
        return node.operands[0]
    if node.operator in _NEGATED:
        return Term(_NEGATED[node.operator], node.operands)
    other = "or" if node.operator == "and" else "and"
    return Term(other, tuple(_negated(each) for each in node.operands))
