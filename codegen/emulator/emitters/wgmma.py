# SPDX-License-Identifier: Apache-2.0
"""Matrix products of a warpgroup."""

from __future__ import annotations

from ..ptx import Instruction, Operand, Register, Vector
from ..wgmma import Mma, instruction_k
from .emitter import Emitter, UnsupportedInstruction, elements, emits

_DEPTH = {kind: instruction_k(kind) for kind in ("f16", "bf16", "e4m3", "e5m2")}
_SHAPES = {f"m64n{n}k{k}": (n, k) for n in range(8, 257, 8) for k in (16, 32)}


@emits(
    "wgmma",
    modifiers="fence commit_group wait_group mma_async sync aligned f32 "
    f"{' '.join(_DEPTH)} {' '.join(_SHAPES)}",
)
def _wgmma(emitter: Emitter, instruction: Instruction) -> None:
    action = instruction.modifiers[0]
    if action == "fence":
        emitter.lines.append(emitter.call("products.fence"))
    elif action == "commit_group":
        emitter.lines.append(emitter.call("products.commit"))
    elif action == "wait_group":
        count = str(emitter.immediate(instruction.operands[0]))
        if emitter.gate:
            emitter.lines.append(f"return {emitter.call('products.wait', count)}")
    elif action == "mma_async":
        mma, a, b, scale = _mma(emitter, instruction)
        emitter.program.mmas[emitter.index] = mma
        emitter.lines.append(emitter.call("products.issue", a, b, scale))
    else:
        raise UnsupportedInstruction(instruction)


def _mma(emitter: Emitter, instruction: Instruction) -> tuple[Mma, str, str, str]:
    """The product's static part, and expressions for A, B's descriptor and scale-d."""
    if len(instruction.modifiers) != 7:
        raise UnsupportedInstruction(instruction)
    shape, kind_d, kind_a, kind_b = instruction.modifiers[3:]
    if kind_d != "f32":
        raise UnsupportedInstruction(instruction)
    n, k = _SHAPES[shape]
    destination, a, b, scale, *immediates = instruction.operands
    slots = tuple(_slot(emitter, element) for element in elements(destination))
    if {k} != {_DEPTH[kind_a], _DEPTH[kind_b]} or len(slots) != n // 2:
        raise emitter.unsupported("a shape that wgmma does not have")
    flags = [emitter.immediate(operand) for operand in immediates]
    from_registers = isinstance(a, Vector)
    transposes = flags[2:]
    if len(flags) < 2 or len(transposes) > (1 if from_registers else 2):
        raise emitter.unsupported("its immediate operands")
    if transposes and k != _DEPTH["f16"]:
        raise emitter.unsupported("8-bit operands are K-major, both of them")
    a_slots = (
        tuple(_slot(emitter, element) for element in elements(a))
        if from_registers
        else ()
    )
    if from_registers and len(a_slots) != 4:
        raise emitter.unsupported("A is four registers")
    mma = Mma(
        n,
        k,
        kind_a,
        kind_b,
        slots,
        a_slots,
        negate_a=flags[0] == -1,
        negate_b=flags[1] == -1,
        transpose_a=bool(transposes[0]) if len(transposes) == 2 else False,
        transpose_b=bool(transposes[-1]) if transposes else False,
    )
    if from_registers:
        values = ", ".join(emitter.value(element, "u32") for element in elements(a))
        first = f"({values},)"
    else:
        first = emitter.value(a, "u64")
    return mma, first, emitter.value(b, "u64"), emitter.value(scale, "bool")


def _slot(emitter: Emitter, operand: Operand) -> int:
    if not isinstance(operand, Register):
        raise emitter.unsupported("an element that is not a register")
    return emitter.program.slots[operand.name]
