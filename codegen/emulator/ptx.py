# SPDX-License-Identifier: Apache-2.0
"""PTX text to instructions: scopes, labels, registers, operands, guards and source lines.

Only what compilers emit for kernels is read: a module has `.entry` and no `.func`.
Names declared inside braces (inline assembly) are renamed apart from those of other scopes:
`P1` of the third scope becomes `P1@3`.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias


class PtxError(ValueError):
    """The text is not PTX that this parser reads; names the line."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"PTX line {line}: {message}")
        self.line = line


@dataclass(frozen=True)
class Register:
    """A register by its (renamed) name, special registers included."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A constant: the bits of a float or the value of an integer, which may be negative."""

    value: int
    is_float: bool = False


@dataclass(frozen=True)
class Symbol:
    """A parameter, a shared variable or a label, with a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """`[base+offset]`; a tensor address `[map, {x, y}]` has coordinates."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] | None = None


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """`d|p`: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Negated:
    """`!p`, a predicate read negated."""

    register: Register


Operand: TypeAlias = "Register | Immediate | Symbol | Address | Vector | Pair | Negated"

SINK = Register("_")
"""The destination that nobody reads."""


@dataclass(frozen=True)
class Guard:
    """`@p` or `@!p` in front of an instruction."""

    register: Register
    negated: bool


@dataclass(frozen=True)
class Instruction:
    """One statement of the body."""

    opcode: str
    """The first word: `mbarrier`."""
    modifiers: tuple[str, ...]
    """The words after it: `("try_wait", "parity", "shared", "b64")`."""
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int
    """[PTX line, 1-based]"""
    source: str = ""
    """`file:line` of the source language, when the PTX has `.loc`."""

    @property
    def name(self) -> str:
        """Opcode and modifiers as PTX writes them."""
        return ".".join((self.opcode, *self.modifiers))

    def has(self, *modifiers: str) -> bool:
        """Whether every one of the modifiers is there."""
        return all(modifier in self.modifiers for modifier in modifiers)


@dataclass(frozen=True)
class Param:
    """A kernel parameter; `offset` is where it lies in the parameter space."""

    name: str
    size: int
    align: int
    offset: int


@dataclass(frozen=True)
class SharedVariable:
    """A `.shared` variable; the dynamic one has size 0."""

    name: str
    size: int
    align: int


@dataclass(frozen=True)
class Module:
    """One kernel of a PTX module. Its instructions keep the lines that they have there."""

    name: str
    target: str
    params: tuple[Param, ...]
    shared: tuple[SharedVariable, ...]
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    """Label to the index of the instruction that follows it."""
    registers: Mapping[str, str]
    """Register name, or the prefix of a family such as `%r`, to its type: pred, b16, b32, b64."""
    required_threads: tuple[int, int, int] | None
    """`.reqntid`."""
    param_bytes: int = field(default=0)

    def register_type(self, name: str) -> str:
        """The declared type of a register; raises KeyError for one that was not declared."""
        exact = self.registers.get(name)
        return exact if exact is not None else self.registers[name.rstrip("0123456789")]


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_LINE_DIRECTIVE = re.compile(r"\.(loc|file)\b[^\n]*")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_SPACE = re.compile(r"\s*")
_GUARD = re.compile(r"@(!?)(\S+)\s+")
_OPCODE = re.compile(r"[a-z][\w.:]*")
_NAME = re.compile(r"%?[A-Za-z_$][\w$]*(?:\.[a-z]\w*)?$")
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$")
_OFFSET = re.compile(r"(.+?)\s*\+\s*(-?(?:0x[0-9a-fA-F]+|\d+))$", re.S)
_FLOAT32 = re.compile(r"0[fF]([0-9a-fA-F]{8})$")
_FLOAT64 = re.compile(r"0[dD]([0-9a-fA-F]{16})$")
_SHARED = re.compile(
    r"^\s*(?:\.(?:extern|visible|weak|common)\s+)*\.shared\s+(?:\.align\s+(\d+)\s+)?"
    r"\.([a-z]+)(\d+)\s+([\w$]+)\s*(?:\[(\d*)\])?",
    re.M,
)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[a-z]+)(?P<bits>\d+)\s+"
    r"(?:\.ptr(?:\s+\.\w+(?:\s+\d+)?)*\s+)?(?P<name>[\w$]+)\s*(?:\[(?P<count>\d+)\])?$"
)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)", re.S)
_REQUIRED_THREADS = re.compile(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")


def parse(text: str) -> Module:
    """The kernel of a module that has exactly one; raises PtxError."""
    first, *others = parse_kernels(text).values()
    if others:
        line = others[0].instructions[0].line
        raise PtxError(line, f"{1 + len(others)} kernels in the module, not one")
    return first


def parse_kernels(text: str) -> dict[str, Module]:
    """The kernels of a module by name, in its order; raises PtxError where there is none."""
    # Comments go, line breaks stay: every offset keeps its line.
    text = _COMMENT.sub(lambda match: "\n" * match.group().count("\n"), text)
    entries = list(_ENTRY.finditer(text))
    if not entries:
        raise PtxError(1, "no kernel in the module")
    kernels = [_kernel(text, entry) for entry in entries]
    return {kernel.name: kernel for kernel in kernels}


def _kernel(text: str, entry: re.Match[str]) -> Module:
    begin = text.index("{", entry.end())
    body = _Body(text, begin + 1)
    body.read()
    labels = body.resolve_labels()
    params, param_bytes = _params(text, entry)
    target = re.search(r"\.target\s+(\w+)", text)
    threads = _REQUIRED_THREADS.search(text, entry.end(), begin)
    return Module(
        name=entry.group(1),
        target=target.group(1) if target else "",
        params=params,
        shared=tuple(_shared_variables(text, text[begin : body.position])),
        instructions=tuple(body.instructions),
        labels=labels,
        registers=body.registers,
        required_threads=(
            tuple(int(extent or 1) for extent in threads.groups())  # type: ignore[arg-type]
            if threads
            else None
        ),
        param_bytes=param_bytes,
    )


def sources(plain: Module, located: Module) -> dict[int, str]:
    """PTX line of a kernel to `file:line` of its source, by the same kernel's with `.loc`.

    Empty unless both are the same instructions.
    """
    if [i.name for i in plain.instructions] != [i.name for i in located.instructions]:
        return {}
    pairs = zip(plain.instructions, located.instructions, strict=True)
    return {ours.line: theirs.source for ours, theirs in pairs if theirs.source}


def _params(text: str, entry: re.Match[str]) -> tuple[tuple[Param, ...], int]:
    params: list[Param] = []
    end = 0
    for piece in entry.group(2).split(","):
        if not piece.strip():
            continue
        match = _PARAM.match(piece.strip())
        if match is None:
            line = text.count("\n", 0, entry.start()) + 1
            raise PtxError(line, f"parameter not understood: {piece.strip()}")
        size = int(match["bits"]) // 8
        align = int(match["align"] or size)
        size *= int(match["count"] or 1)
        offset = -(-end // align) * align
        params.append(Param(match["name"], size, align, offset))
        end = offset + size
    return tuple(params), end


def _shared_variables(text: str, body: str) -> list[SharedVariable]:
    """The module's that a kernel names: each kernel has shared memory of its own."""
    found = []
    for match in _SHARED.finditer(text):
        if not re.search(rf"(?<![\w$]){re.escape(match[4])}(?![\w$])", body):
            continue
        width = int(match[3]) // 8
        count = 1 if match[5] is None else int(match[5] or 0)
        found.append(SharedVariable(match[4], width * count, int(match[1] or width)))
    return found


class _Scope:
    """Names that braces declare."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.names: dict[str, str] = {}
        self.labels: dict[str, str] = {}


class _Body:
    """Reads a kernel's statements one after another."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position
        self.instructions: list[Instruction] = []
        self.registers: dict[str, str] = {}
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._scopes = [_Scope(0)]
        self._scope_count = 0
        self._labels: dict[str, int] = {}
        self._branches: list[tuple[int, tuple[_Scope, ...]]] = []
        self._cache: dict[str, Operand] = {}
        self._files = dict(_FILE.findall(text))  # they may come after the kernel
        self._source = ""

    def line_at(self, position: int) -> int:
        return bisect.bisect_left(self._newlines, position) + 1

    def read(self) -> None:
        """Reads up to the brace that closes the kernel."""
        text = self.text
        while True:
            space = _SPACE.match(text, self.position)
            assert space is not None  # it matches the empty string
            start = space.end()
            if start >= len(text):
                raise PtxError(
                    self.line_at(start), "the kernel's closing brace is missing"
                )
            if text[start] == "{":
                self._scope_count += 1
                self._scopes.append(_Scope(self._scope_count))
                self.position = start + 1
            elif text[start] == "}":
                self._scopes.pop()
                self.position = start + 1
                if not self._scopes:
                    return
            elif directive := _LINE_DIRECTIVE.match(text, start):
                self._line_directive(directive.group())
                self.position = directive.end()
            elif label := _LABEL.match(text, start):
                self._label(label.group(1))
                self.position = label.end()
            else:
                end = text.find(";", start)
                if end < 0:
                    raise PtxError(
                        self.line_at(start), "a statement without its semicolon"
                    )
                self._statement(text[start:end].strip(), start)
                self.position = end + 1

    def resolve_labels(self) -> dict[str, int]:
        """Makes the branches name labels by their scoped names; returns those."""
        for index, scopes in self._branches:
            instruction = self.instructions[index]
            (target,) = instruction.operands
            assert isinstance(target, (Symbol, Register))
            for scope in reversed(scopes):
                if target.name in scope.labels:
                    resolved = Symbol(scope.labels[target.name])
                    break
            else:
                raise PtxError(instruction.line, f"label not found: {target.name}")
            self.instructions[index] = Instruction(
                instruction.opcode,
                instruction.modifiers,
                (resolved,),
                instruction.guard,
                instruction.line,
                instruction.source,
            )
        return self._labels

    def _line_directive(self, text: str) -> None:
        directive, file, *rest = text.split()
        if directive == ".loc":
            self._source = f"{self._files.get(file, file)}:{rest[0]}"

    def _label(self, name: str) -> None:
        scope = self._scopes[-1]
        unique = f"{name}@{scope.number}" if scope.number else name
        scope.labels[name] = unique
        self._labels[unique] = len(self.instructions)

    def _statement(self, statement: str, start: int) -> None:
        if statement.startswith("."):
            if statement.startswith(".reg"):
                self._declare(statement, start)
            elif not statement.startswith(".pragma"):
                # `.pragma` advises the assembler; anything else would change what runs.
                raise PtxError(
                    self.line_at(start), f"directive not understood: {statement}"
                )
            return
        guard = None
        match = _GUARD.match(statement)
        position = 0
        if match:
            register = self._operand(match.group(2), start)
            assert isinstance(register, Register)
            guard = Guard(register, match.group(1) == "!")
            position = match.end()
        opcode = _OPCODE.match(statement, position)
        if opcode is None:
            raise PtxError(self.line_at(start), f"not an instruction: {statement}")
        name, *modifiers = re.split(r"\.", opcode.group())
        operands = tuple(
            self._operand(piece, start) for piece in _split(statement[opcode.end() :])
        )
        if name == "bra":
            self._branches.append((len(self.instructions), tuple(self._scopes)))
        self.instructions.append(
            Instruction(
                name,
                tuple(modifiers),
                operands,
                guard,
                self.line_at(start),
                self._source,
            )
        )

    def _declare(self, statement: str, start: int) -> None:
        match = re.match(r"\.reg\s+\.([a-z]+)(\d*)\s+(.*)", statement, re.S)
        if match is None:
            raise PtxError(
                self.line_at(start), f"declaration not understood: {statement}"
            )
        kind = "pred" if match[1] == "pred" else f"b{match[2]}"
        scope = self._scopes[-1]
        for piece in match[3].split(","):
            name = piece.strip()
            family = re.match(r"(%?[\w$]+)<(\d+)>$", name)
            suffix = f"@{scope.number}" if scope.number else ""
            if family and name.startswith("%") and scope.number == 0:
                self.registers[family[1]] = kind
                continue
            names = (
                [f"{family[1]}{i}" for i in range(int(family[2]))] if family else [name]
            )
            for declared in names:
                scope.names[declared] = declared + suffix
                self.registers[declared + suffix] = kind

    def _operand(self, text: str, start: int) -> Operand:
        """One operand. What does not name a register of a scope is parsed only once."""
        if any(scope.names for scope in self._scopes):
            return self._parse_operand(text, start)
        known = self._cache.get(text)
        if known is None:
            known = self._cache[text] = self._parse_operand(text, start)
        return known

    def _parse_operand(self, text: str, start: int) -> Operand:
        first = text[0]
        if first == "{":
            return Vector(
                tuple(self._operand(piece, start) for piece in _split(text[1:-1]))
            )
        if first == "[":
            return self._address(text[1:-1].strip(), start)
        if first == "!":
            negated = self._operand(text[1:].strip(), start)
            assert isinstance(negated, Register)
            return Negated(negated)
        if "|" in text:
            pieces = [self._operand(piece.strip(), start) for piece in text.split("|")]
            return Pair(*pieces)
        if match := _FLOAT32.match(text) or _FLOAT64.match(text):
            return Immediate(int(match[1], 16), is_float=True)
        if _INTEGER.match(text):
            return Immediate(int(text.rstrip("U"), 0))
        if match := _OFFSET.match(text):
            return Symbol(match[1], int(match[2], 0))
        if not _NAME.match(text):
            raise PtxError(self.line_at(start), f"operand not understood: {text}")
        if first == "%" or text == "_":
            return Register(text)
        for scope in reversed(self._scopes):
            if text in scope.names:
                return Register(scope.names[text])
        return Symbol(text)

    def _address(self, text: str, start: int) -> Address:
        pieces = _split(text)
        if len(pieces) == 2:
            coordinates = self._operand(pieces[1], start)
            assert isinstance(coordinates, Vector)
            base = self._operand(pieces[0], start)
            assert isinstance(base, (Register, Symbol, Immediate))
            return Address(base, 0, coordinates.elements)
        match = _OFFSET.match(text)
        base = self._operand(match[1] if match else text, start)
        if not isinstance(base, (Register, Symbol, Immediate)):
            raise PtxError(self.line_at(start), f"address not understood: [{text}]")
        return Address(base, int(match[2], 0) if match else 0)


def _split(text: str) -> list[str]:
    """Splits at commas outside braces and brackets."""
    if "{" not in text and "[" not in text:
        return [piece.strip() for piece in text.split(",")] if text.strip() else []
    pieces, depth, begin = [], 0, 0
    for match in re.finditer(r"[{}\[\],]", text):
        character = match.group()
        if character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
        elif depth == 0:
            pieces.append(text[begin : match.start()].strip())
            begin = match.end()
    last = text[begin:].strip()
    return [*pieces, last] if last else pieces
