# SPDX-License-Identifier: Apache-2.0
"""Which sums a compiler may fuse with the product that they add.

PTX lets ptxas contract `mul` and `add` or `sub` of floats to one fused operation, rounded once,
when neither names a rounding; `.rn` forbids it. Both are legal: a kernel has to hold with either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .ptx import Address, Instruction, Module, Operand, Pair, Register, Vector

_FREE = (
    *(("f32",), ("ftz", "f32"), ("f32x2",), ("ftz", "f32x2")),
    *(("f16x2",), ("bf16x2",)),
)
"""Modifiers that leave the rounding to the compiler."""
_ENDS = ("bra", "ret", "exit")


@dataclass(frozen=True)
class _Product:
    index: int
    block: int
    versions: Mapping[str, int]
    """Of its destination and its factors: how often each had been written after it."""


def contractions(module: Module) -> dict[int, tuple[int, int]]:
    """Each sum that becomes a fused multiply-add: (its product, the source 0 or 1 that it is).

    By the indices of the instructions. Of a sum of two products the first is fused. A product may
    have other uses, and is as far away as its factors are still what they were: everywhere when
    they are written once, else in its block.
    """
    instructions = module.instructions
    starts = set(module.labels.values())
    writes = Counter(name for each in instructions for name in _written(each))
    versions: Counter[str] = Counter()
    products: dict[str, _Product] = {}
    found: dict[int, tuple[int, int]] = {}
    block = 0
    for index, instruction in enumerate(instructions):
        block += index in starts
        if _leaves_rounding(instruction, "add", "sub"):
            for place, source in enumerate(instruction.operands[1:]):
                product = products.get(next(_names([source]), ""))
                if product is None:
                    continue
                names = product.versions
                unchanged = block == product.block and all(
                    versions[name] == version for name, version in names.items()
                )
                alike = instructions[product.index].modifiers == instruction.modifiers
                if alike and (unchanged or all(writes[name] == 1 for name in names)):
                    found[index] = product.index, place
                    break
        versions.update(_written(instruction))
        if _leaves_rounding(instruction, "mul") and instruction.guard is None:
            names = dict.fromkeys(_names(instruction.operands), 0)
            known = {name: versions[name] for name in names}
            (destination,) = _written(instruction)
            products[destination] = _Product(index, block, known)
        block += instruction.opcode in _ENDS
    return found


def _leaves_rounding(instruction: Instruction, *opcodes: str) -> bool:
    return instruction.opcode in opcodes and instruction.modifiers in _FREE


def _written(instruction: Instruction) -> list[str]:
    """Registers that an instruction writes, or that it may: its first operand is no address."""
    first = instruction.operands[:1]
    return [] if isinstance(next(iter(first), None), Address) else list(_names(first))


def _names(operands: Iterable[Operand]) -> Iterator[str]:
    for operand in operands:
        if isinstance(operand, Register):
            yield operand.name
        elif isinstance(operand, Vector):
            yield from _names(operand.elements)
        elif isinstance(operand, Pair):
            yield from _names((operand.first, operand.second))
