# SPDX-License-Identifier: Apache-2.0
"""A module to basic blocks, and each block to a generated Python function for 128 lanes.

A register is a numpy array of 128 lanes, rebound and never written in place. Every register has
one *home* dtype, the view that most instructions want of its bits: most reads need no `.view`.

A block's function exists in two forms: `whole`, when all live lanes of the warpgroup run it, and
`masked`, when results must be merged into the lanes that do. Both are generated on first use: most
blocks never need their masked form, and blocks that a launch never reaches are never generated.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import numerics
from .batches import batched
from .codes import coded
from .contraction import contractions
from .emitters import Emitter, UnsupportedInstruction
from .emitters.dtypes import DTYPES, ONES, unsigned
from .emitters.emitter import is_special
from .emitters.tcgen05 import check_cta_groups
from .gates import (
    ALIGNED_NONE,
    alignment,
    is_addition,
    is_gate,
    is_poll,
    is_signal,
    orders_global_memory,
    waits_for_writes,
)
from .lanes import IN_FLIGHT, LANES
from .ptx import (
    Address,
    Instruction,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    SharedVariable,
    Symbol,
    Vector,
    parse_kernels,
)
from .wgmma import Mma

__all__ = ["Block", "Program", "UnsupportedInstruction", "lower", "lower_kernels"]

BlockFunction = Callable[[Any, list[Any], Any], Any]
"""`(warpgroup, registers, mask)`; a gate returns the lanes that may pass."""


@dataclass
class Block:
    """Straight-line code: instructions `begin` to `end`, the branch that ends it excluded."""

    index: int
    begin: int
    end: int
    aligned: int
    """Which lanes must arrive together: any, whole warps, or the whole warpgroup."""
    gated: bool
    """Whether the first instruction can hold lanes back."""
    target: int = -1
    """Block that the branch at the end goes to; -1 without one."""
    exits: bool = False
    predicate: int = -1
    """Register slot of the branch's or exit's guard; -1 when it has none."""
    negated: bool = False
    weight: int = 0
    """[PTX instructions]"""


class Program:
    """A lowered module: blocks, and their functions as they are asked for."""

    def __init__(
        self, module: Module, *, turns: bool = True, contract: bool = False
    ) -> None:
        """turns: whether a block ends after what other warps can see; see `gates.is_signal`."""
        self.module = module
        self.contractions = contractions(module) if contract else {}
        """Each sum that is fused with its product: (index of that, the source that it is)."""
        self.coded = coded(module)
        """The bytes that each `prmt` takes for e4m3 codes: (source, half)."""
        self.instructions = module.instructions
        self.slots: dict[str, int] = {}
        self.homes: list[str] = []
        self.mmas: dict[int, Mma] = {}
        self.accumulators: set[int] = set()
        """Slots that some product accumulates into."""
        self.tensor = any(i.opcode == "tcgen05" for i in module.instructions)
        """Whether it uses tensor memory."""
        self.adds = any(map(is_addition, module.instructions))
        """Whether its CTAs add to global memory."""
        self.orders = any(map(orders_global_memory, module.instructions))
        """Whether something orders its accesses to global memory."""
        self.polls = any(map(is_poll, module.instructions))
        """Whether CTAs wait for each other through global memory."""
        self.waits_for_writes = any(map(waits_for_writes, module.instructions))
        """Whether it waits until bulk stores have written, not only until they have read."""
        self.params = {param.name: param.offset for param in module.params}
        self.shared, self.static_shared_bytes = _place_shared(module.shared)
        self._namespace: dict[str, Any] = {
            "np": np,
            "numerics": numerics,
            "where": np.where,
            "concatenate": np.concatenate,
            "IN_FLIGHT": IN_FLIGHT,
        }
        self._constants: dict[tuple[int, str], str] = {}
        self._functions: dict[tuple[int, str], BlockFunction] = {}
        self._collect_registers()
        self.blocks = _split_blocks(self, turns)
        self._check_opcodes()

    def whole(self, block: Block) -> BlockFunction:
        """The block's function for all live lanes."""
        return self._function(block, "whole")

    def masked(self, block: Block) -> BlockFunction:
        """The block's function for the lanes of a mask."""
        return self._function(block, "masked")

    def gate(self, block: Block) -> BlockFunction:
        """The function that says which lanes pass the block's first instruction."""
        return self._function(block, "gate")

    def poisoned_registers(self) -> list[Any]:
        """Registers as a warpgroup starts: floats are NaN, integers far from any address."""
        poison = {
            "bool": np.zeros(LANES, np.bool_),
            "f32": np.full(LANES, np.nan, np.float32),
            **{
                name: np.full(LANES, 0x7FC0DEADDEAD7FC0 & ONES[name], DTYPES[name])
                for name in ("u16", "u32", "u64")
            },
        }
        poison["i32"] = poison["u32"].view(np.int32)
        return [poison[home] for home in self.homes]

    def source(self, block: Block, form: str = "whole") -> str:
        """The generated Python of a block, for reading."""
        return "\n".join(self._generate(block, form))

    def constant(self, value: int, dtype: str) -> str:
        """The name of a 128-lane constant with these bits."""
        key = (value & ONES[dtype], dtype)
        name = self._constants.get(key)
        if name is None:
            name = self._constants[key] = f"K{len(self._constants)}"
            bits = np.full(LANES, key[0], DTYPES[unsigned(dtype)])
            array = bits if dtype != "bool" else bits.astype(np.bool_)
            self._namespace[name] = array.view(DTYPES[dtype])
            self._namespace[name].flags.writeable = False
        return name

    def bind(self, name: str, make: Callable[[], Any]) -> str:
        """Gives generated code a name for a value, made once; returns the name."""
        if name not in self._namespace:
            self._namespace[name] = make()
        return name

    def _bind_constants(self, expression: str) -> str:
        """A name for an expression of constants."""
        name = f"C_{hashlib.sha256(expression.encode()).hexdigest()}"
        return self.bind(name, lambda: eval(expression, self._namespace))

    def _function(self, block: Block, form: str) -> BlockFunction:
        key = (block.index, form)
        function = self._functions.get(key)
        if function is None:
            code = self.source(block, form)
            exec(
                compile(code, f"<{form} block {block.index}>", "exec"), self._namespace
            )
            function = self._functions[key] = self._namespace.pop("block")
        return function

    def _generate(self, block: Block, form: str) -> list[str]:
        emitter = Emitter(self, masked=form == "masked")
        first = block.begin
        if form == "gate":
            emitter.emit(first, gate=True)
        else:
            for index in range(first + (1 if block.gated else 0), block.end):
                emitter.emit(index)
            if block.gated:
                emitter.lines[:0] = _after_gate(self, first, masked=form == "masked")
        body = batched(emitter.lines, self.homes, self._bind_constants) or ["pass"]
        return ["def block(ctx, R, mask):", *(f"    {line}" for line in body)]

    def _collect_registers(self) -> None:
        """Gives every register a slot and the home dtype that most of its uses want."""
        votes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for instruction in self.instructions:
            wanted = _wanted(instruction)
            for register in _registers(instruction):
                if not is_special(register.name):
                    votes[register.name][wanted] += 1
        accumulators = {
            register.name
            for instruction in self.instructions
            if instruction.opcode == "wgmma" and instruction.has("mma_async")
            for register in _registers_of(instruction.operands[0])
        }
        for name, counts in votes.items():
            kind = self.module.register_type(name)
            self.slots[name] = len(self.homes)
            if name in accumulators:
                self.accumulators.add(self.slots[name])
                self.homes.append("f32")
            elif kind == "b32":
                # Untyped uses (`mov.b32`) do not vote.
                typed = {dtype: counts[dtype] for dtype in ("u32", "i32", "f32")}
                self.homes.append(max(typed, key=lambda dtype: typed[dtype]))
            else:
                self.homes.append({"pred": "bool", "b16": "u16", "b64": "u64"}[kind])

    def _check_opcodes(self) -> None:
        """Refuses the module now, not when a launch first reaches the instruction."""
        check_cta_groups(self.instructions)
        for block in self.blocks:
            emitter = Emitter(self, masked=False)
            for index in range(block.begin, block.end):
                if index == block.begin and block.gated:
                    emitter.emit(index, gate=True)
                else:
                    emitter.emit(index)


def _registers(instruction: Instruction) -> Iterator[Register]:
    if instruction.guard:
        yield instruction.guard.register
    for operand in instruction.operands:
        yield from _registers_of(operand)


def _registers_of(operand: Operand) -> Iterator[Register]:
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from _registers_of(element)
    elif isinstance(operand, Pair):
        yield from _registers_of(operand.first)
        yield from _registers_of(operand.second)
    elif isinstance(operand, Negated):
        yield operand.register
    elif isinstance(operand, Address):
        yield from _registers_of(operand.base)
        for coordinate in operand.coordinates or ():
            yield from _registers_of(coordinate)


def _wanted(instruction: Instruction) -> str:
    """The view of its 32-bit registers that an instruction wants, for the vote on homes."""
    if instruction.opcode in ("ld", "st", "mbarrier", "cp", "mapa"):
        return "u32"
    if instruction.opcode == "tcgen05" and instruction.modifiers[0] in ("ld", "st"):
        return ""
    last = instruction.modifiers[-1] if instruction.modifiers else ""
    if last == "f32":
        return "f32"
    if last == "s32" and instruction.opcode in (
        "min",
        "max",
        "setp",
        "div",
        "rem",
        "shr",
    ):
        return "i32"
    return "" if instruction.opcode in ("mov", "selp", "shfl") else "u32"


def _place_shared(variables: Sequence[SharedVariable]) -> tuple[dict[str, int], int]:
    """Offsets of the shared variables: static ones first, then the dynamic one.

    The first KiB of a CTA's shared memory belongs to the system, as on the hardware.
    """
    placed: dict[str, int] = {}
    end = 1024
    for variable in sorted(variables, key=lambda variable: variable.size == 0):
        end = -(-end // variable.align) * variable.align
        placed[variable.name] = end
        end += variable.size
    return placed, end


def _split_blocks(program: Program, turns: bool) -> list[Block]:
    instructions = program.instructions
    labels = program.module.labels
    leaders = {0, *labels.values()}
    for index, instruction in enumerate(instructions):
        signal = turns and is_signal(instruction)
        if signal or instruction.opcode in ("bra", "ret", "exit"):
            leaders.add(index + 1)
        if is_gate(instruction):
            leaders.add(index)
    blocks: list[Block] = []
    begin, aligned = 0, ALIGNED_NONE
    bounds = []  # (begin, alignment) of each block
    for index, instruction in enumerate(instructions):
        needed = alignment(instruction)
        if index in leaders or needed > aligned:
            if index > begin:
                bounds.append((begin, aligned))
            # A block is aligned from its first instruction or not at all: waiting earlier than
            # the instruction that needs it could wait for what the lanes themselves must do.
            begin, aligned = index, needed
    if len(instructions) > begin:
        bounds.append((begin, aligned))
    index_of = {}
    ends = [begin for begin, _ in bounds[1:]] + [len(instructions)]
    for number, ((begin, aligned), end) in enumerate(zip(bounds, ends, strict=True)):
        index_of[begin] = number
        gated = is_gate(instructions[begin])
        blocks.append(Block(number, begin, end, aligned, gated, weight=end - begin))
    for block in blocks:
        last = instructions[block.end - 1]
        if last.opcode not in ("bra", "ret", "exit"):
            continue
        block.end -= 1
        if last.guard:
            block.predicate = program.slots[last.guard.register.name]
            block.negated = last.guard.negated
        if last.opcode == "bra":
            (label,) = last.operands
            assert isinstance(label, Symbol)
            target = labels[label.name]
            if target not in index_of:
                raise UnsupportedInstruction(last, "it leaves the kernel's code")
            block.target = index_of[target]
        else:
            block.exits = True
    return blocks


def _after_gate(program: Program, index: int, *, masked: bool) -> list[str]:
    """What a gate's instruction does once its lanes have passed: waits and loads have a result."""
    instruction = program.instructions[index]
    if instruction.opcode not in ("mbarrier", "ld"):
        return []
    emitter = Emitter(program, masked=masked)
    emitter.emit(index)
    return emitter.lines


def lower(module: Module, *, turns: bool = True, contract: bool = False) -> Program:
    """Splits a module into blocks; raises UnsupportedInstruction for what the model lacks.

    turns: see Program. contract: whether products are fused with the sums that add them wherever
    PTX leaves that to the compiler, or nowhere.
    """
    return Program(module, turns=turns, contract=contract)


def lower_kernels(text: str, *, contract: bool = False) -> dict[str, Program]:
    """The programs of a PTX text by the names of its kernels; raises PtxError, or as `lower`."""
    kernels = parse_kernels(text).items()
    return {name: lower(module, contract=contract) for name, module in kernels}
