# SPDX-License-Identifier: Apache-2.0
"""Atomic additions to global memory: `red` and `atom`."""

from __future__ import annotations

from ..additions import KINDS, ROUNDED
from ..ptx import Instruction, Operand
from .dtypes import PTX_TYPES, unsigned
from .emitter import Emitter, UnsupportedInstruction, elements, emits

_SCOPES = "gpu sys"
_CACHE_HINT = "L2::cache_hint"
_PAIR = "f16x2"


@emits(
    "red",
    modifiers=f"relaxed release {_SCOPES} global add noftz v2 v4 {_CACHE_HINT} "
    f"{' '.join(KINDS)}",
)
def _reduce(emitter: Emitter, instruction: Instruction) -> None:
    address, values, *hint = instruction.operands
    emitter.lines.append(_addition(emitter, instruction, address, values, hint))


@emits(
    "atom",
    modifiers=f"relaxed acquire release acq_rel {_SCOPES} global add f32 u32 s32",
)
def _fetch(emitter: Emitter, instruction: Instruction) -> None:
    destination, address, value = instruction.operands
    call = _addition(emitter, instruction, address, value, [])
    emitter.lines.append(f"found = {call}")
    dtype = PTX_TYPES[instruction.modifiers[-1]]
    held = dtype if dtype == "f32" else unsigned(dtype)
    emitter.assign(destination, "found[0]", held)


def _addition(
    emitter: Emitter,
    instruction: Instruction,
    address: Operand,
    values: Operand,
    hint: list[Operand],
) -> str:
    """The call."""
    kind = instruction.modifiers[-1]
    if not instruction.has("global", "add") or kind not in KINDS:
        raise UnsupportedInstruction(instruction, "it is no addition to .global")
    if instruction.has(_CACHE_HINT) != (len(hint) == 1):
        raise emitter.unsupported("its operands")
    count = 4 if instruction.has("v4") else 2 if instruction.has("v2") else 1
    added = elements(values)
    if len(added) != count or (count > 1 and kind not in ROUNDED):
        raise emitter.unsupported(f"{len(added)} values")
    if instruction.has("noftz") != (kind == _PAIR):
        raise emitter.unsupported("subnormals that become zero, or do not")
    dtype = "u32" if kind == _PAIR else PTX_TYPES[kind]
    given = ", ".join(emitter.value(value, dtype) for value in added)
    where = emitter.address(address)
    acquires = instruction.has("acquire") or instruction.has("acq_rel")
    releases = instruction.has("release") or instruction.has("acq_rel")
    order = str(acquires), str(releases)
    return emitter.call("atomics.add", where, repr(kind), f"({given},)", *order)
