# SPDX-License-Identifier: Apache-2.0
"""The table of emitters, and what writes a block's function with them.

An emitter reads an instruction's modifiers and operands and writes lines that work on 128 lanes at
once: arithmetic on numpy arrays, and calls of the warpgroup (`ctx`) for all that has effects beyond
registers. What it does not know it refuses with the PTX line; what has no effect in this model says
why. A register is `R[slot]`, an array of its *home* dtype (see `lower`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..gates import ALIGNED_GROUP, alignment
from ..lanes import WARP
from ..memory import PARAM_WINDOW
from ..ptx import (
    SINK,
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Register,
    Symbol,
    Vector,
)
from .dtypes import BITS, PTX_TYPES, numpy_name, view

if TYPE_CHECKING:
    from ..lower import Program


class UnsupportedInstruction(Exception):
    """The model has no meaning for this instruction; names the line and quotes the text."""

    def __init__(self, instruction: Instruction, why: str = "") -> None:
        text = f"PTX line {instruction.line}: {instruction.name} is not modelled"
        super().__init__(f"{text}: {why}" if why else text)
        self.line = instruction.line


EmitterFunction = Callable[["Emitter", Instruction], None]


@dataclass(frozen=True)
class Entry:
    """What the table says of an opcode."""

    function: EmitterFunction
    """Writes the instruction's Python."""
    modifiers: frozenset[str]
    """All that the function reads, or knows to be without effect here."""


EMITTERS: dict[str, Entry] = {}
"""By opcode; filled by the modules of this package."""


def emits(
    *opcodes: str, modifiers: str
) -> Callable[[EmitterFunction], EmitterFunction]:
    """Registers the function that writes the Python of these opcodes with these modifiers."""

    def register(function: EmitterFunction) -> EmitterFunction:
        for opcode in opcodes:
            EMITTERS[opcode] = Entry(function, frozenset(modifiers.split()))
        return function

    return register


_SPECIAL = frozenset(
    [f"{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
    + [
        f"cluster{name}.{axis}"
        for name in ("id", "_ctaid", "_nctaid")
        for axis in "xyz"
    ]
    + [f"nclusterid.{axis}" for axis in "xyz"]
    + ["laneid", "warpid", "smid", "cluster_ctarank", "cluster_nctarank"]
)


def is_special(name: str) -> bool:
    """Whether a name is of a special register, or the sink."""
    return name == "_" or name[1:] in _SPECIAL


@dataclass
class Emitter:
    """Writes the lines of one block's function."""

    program: Program
    masked: bool
    lines: list[str] = field(default_factory=list)
    index: int = 0
    """Of the instruction that is being written."""
    mask: str = "mask"
    """The Python name of the lanes that the instruction runs for."""
    gate: bool = False
    reads: set[int] = field(default_factory=set)
    """Accumulators' slots that the instruction reads."""
    known: set[int] = field(default_factory=set)
    """Those of which the block has asked before whether their product is over."""

    def emit(self, index: int, *, gate: bool = False) -> None:
        """Writes one instruction."""
        instruction = self.program.instructions[index]
        self.index = index
        self.gate = gate
        entry = EMITTERS.get(instruction.opcode)
        if entry is None:
            raise UnsupportedInstruction(instruction)
        for modifier in instruction.modifiers:
            if modifier not in entry.modifiers:
                raise UnsupportedInstruction(instruction, f".{modifier}")
        merged = self.masked
        if instruction.guard is None:
            self.mask = "mask"
        else:
            if gate or alignment(instruction) == ALIGNED_GROUP:
                raise UnsupportedInstruction(instruction, "it is guarded")
            slot = self.program.slots[instruction.guard.register.name]
            invert = "~" if instruction.guard.negated else ""
            self.lines.append(f"guard = {invert}R[{slot}] & mask")
            self.mask, self.masked = "guard", True
        self.reads.clear()
        before = len(self.lines)
        entry.function(self, instruction)
        self.lines[before:before] = self._await_accumulators()
        if instruction.opcode == "wgmma":
            self.known.clear()
        self.masked = merged

    def _await_accumulators(self) -> list[str]:
        """What finds an instruction that reads accumulators of a product in flight."""
        fresh = sorted(self.reads - self.known)
        if not fresh:
            return []
        if self.mask == "mask":
            self.known |= self.reads
        early = " or ".join(f"R[{slot}] is IN_FLIGHT" for slot in fresh)
        return [f"if {early}: {self.call('products.read_early')}"]

    def home(self, operand: Operand) -> str:
        """The dtype that a destination is kept in."""
        if not isinstance(operand, Register):
            raise self.unsupported("its destination is not a register")
        return self.program.homes[self.program.slots[operand.name]]

    def value(self, operand: Operand, dtype: str) -> str:
        """A Python expression for the operand's 128 lanes as this dtype."""
        program = self.program
        if isinstance(operand, Register):
            if operand.name[1:] in _SPECIAL:
                wide = (
                    f".astype(np.{numpy_name(dtype)})"
                    if BITS[dtype] != 32
                    else view("u32", dtype)
                )
                return f"ctx.special[{operand.name[1:]!r}]{wide}"
            slot = program.slots[operand.name]
            if slot in program.accumulators:
                self.reads.add(slot)
            if BITS[program.homes[slot]] != BITS[dtype]:
                raise self.unsupported(f"{operand.name} is not {BITS[dtype]} bits wide")
            return f"R[{slot}]{view(program.homes[slot], dtype)}"
        if isinstance(operand, Negated):
            return f"~{self.value(operand.register, dtype)}"
        if isinstance(operand, Immediate):
            if dtype == "bool":
                return program.constant(int(operand.value != 0), dtype)
            if dtype == "f32" and not operand.is_float:
                raise self.unsupported("an integer where a float belongs")
            return program.constant(operand.value, dtype)
        if isinstance(operand, Symbol):
            if operand.name == "WARP_SZ":
                return program.constant(WARP, dtype)
            if operand.name in program.params:
                address = PARAM_WINDOW + program.params[operand.name] + operand.offset
                return program.constant(address, dtype)
            if operand.name in program.shared:
                offset = program.shared[operand.name] + operand.offset
                return f"ctx.shared_address({offset}, np.{numpy_name(dtype)})"
        raise self.unsupported("an operand that has no value here")

    def assign(self, destination: Operand, expression: str, dtype: str) -> None:
        """Writes an expression of this dtype to the lanes of a register."""
        if destination == SINK:
            return
        home = self.home(destination)
        if BITS[home] != BITS[dtype]:
            raise self.unsupported(f"its destination is not {BITS[dtype]} bits wide")
        assert isinstance(destination, Register)
        slot = self.program.slots[destination.name]
        if home != dtype:
            expression = f"({expression}){view(dtype, home)}"
        if self.masked:
            expression = f"where({self.mask}, {expression}, R[{slot}])"
        self.lines.append(f"R[{slot}] = {expression}")

    def call(self, method: str, *arguments: str) -> str:
        """A call of the warpgroup's method, which is told the instruction and the lanes."""
        return f"ctx.{method}({', '.join((str(self.index), *arguments, self.mask))})"

    def address(self, operand: Operand) -> str:
        """Two arguments for the address of `[base+offset]`: the lanes' base, and the offset."""
        if not isinstance(operand, Address) or operand.coordinates is not None:
            raise self.unsupported("an operand that is not an address")
        base = operand.base
        dtype = "u32"
        if isinstance(base, Register) and self.home(base) == "u64":
            dtype = "u64"
        return f"{self.value(base, dtype)}, {operand.offset}"

    def immediate(self, operand: Operand) -> int:
        """The value of a constant operand."""
        if not isinstance(operand, Immediate):
            raise self.unsupported("an operand that is not a constant")
        return operand.value

    def check_members(self, operand: Operand) -> None:
        """Refuses member masks other than the whole warp: lanes are held until all are there."""
        found = self._moved(operand) if isinstance(operand, Register) else operand
        if not isinstance(found, Immediate) or found.value & 0xFFFFFFFF != 0xFFFFFFFF:
            raise self.unsupported("a member mask other than the whole warp")

    def _moved(self, register: Register) -> Operand | None:
        """What a register is set to by the one instruction that writes it, if that is a `mov`."""
        writers = [x for x in self.program.instructions if register in x.operands[:1]]
        one = writers[0] if len(writers) == 1 else None
        return (
            one.operands[1] if one and one.opcode == "mov" and not one.guard else None
        )

    def only(self, instruction: Instruction, allowed: Iterable[str]) -> None:
        """Refuses modifiers that the table lists for other forms of the opcode."""
        for modifier in instruction.modifiers:
            if modifier not in allowed:
                raise UnsupportedInstruction(instruction, f".{modifier}")

    def unsupported(self, why: str) -> UnsupportedInstruction:
        """The error for the instruction that is being written."""
        return UnsupportedInstruction(self.program.instructions[self.index], why)


def dtype_of(instruction: Instruction) -> str:
    """The dtype of the last modifier."""
    name = instruction.modifiers[-1] if instruction.modifiers else ""
    if name not in PTX_TYPES:
        raise UnsupportedInstruction(instruction, f"type .{name}")
    return PTX_TYPES[name]


def elements(operand: Operand) -> tuple[Operand, ...]:
    """Of a vector operand; any other is its own only element."""
    return operand.elements if isinstance(operand, Vector) else (operand,)
