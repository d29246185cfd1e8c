# SPDX-License-Identifier: Apache-2.0
"""Which bytes a kernel takes for e4m3 codes of numbers that it rounded to halves.

The bits of a half below 2^-13 count multiples of the least one, 2^-24. So a conversion of
`code * 2^-24` rounds to a code, and `prmt` collects the low bytes of two conversions. Nothing
clips: from 127 on the byte is a NaN's code or another number's, and products of it may be finite.
"""

from __future__ import annotations

from .ptx import Immediate, Instruction, Module, Operand, Register, Vector


def coded(module: Module) -> dict[int, tuple[tuple[int, int], ...]]:
    """By the index of each `prmt` that takes such bytes: (its source 0 or 1, the half of that).

    A byte is such a code if it is the low one of a half, the upper one is left behind, and what
    wrote the register last, in the order of the text, was a conversion to `.f16x2`. With the
    selector in a register there is no telling.
    """
    halves: set[str] = set()  # registers that hold results
    found = {}
    for index, instruction in enumerate(module.instructions):
        if instruction.opcode == "prmt":
            taken = _codes(instruction, halves)
            if taken:
                found[index] = taken
        results = _is_result(instruction, halves)
        for operand in instruction.operands[:1]:
            for name in _names(operand):
                (halves.add if results else halves.discard)(name)
    return found


def _codes(instruction: Instruction, halves: set[str]) -> tuple[tuple[int, int], ...]:
    _, *sources, selector = instruction.operands
    if not isinstance(selector, Immediate):
        return ()
    taken = {selector.value >> shift & 15 for shift in range(0, 16, 4)}
    places = sorted(
        (byte // 4, byte % 4 // 2)
        for byte in taken
        if byte < 8 and byte % 2 == 0 and byte + 1 not in taken
    )
    return tuple(
        (source, half)
        for source, half in places
        if not halves.isdisjoint(_names(sources[source]))
    )


def _is_result(instruction: Instruction, halves: set[str]) -> bool:
    """Whether an instruction leaves converted halves in what it writes."""
    if instruction.opcode == "mov":
        return not halves.isdisjoint(_names(instruction.operands[1]))
    return instruction.opcode == "cvt" and instruction.has("f16x2")


def _names(operand: Operand) -> list[str]:
    """Registers that an operand is, or is made of."""
    parts = operand.elements if isinstance(operand, Vector) else (operand,)
    return [part.name for part in parts if isinstance(part, Register)]
