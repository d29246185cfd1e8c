# SPDX-License-Identifier: Apache-2.0
"""Bulk copies: of boxes by the tensor memory accelerator, and of runs of bytes."""

from __future__ import annotations

from ..ptx import Address, Instruction
from .emitter import Emitter, UnsupportedInstruction, emits

_CACHE_HINT = "L2::cache_hint"
_BARRIER = "mbarrier::complete_tx::bytes"
_SHARED = ("shared::cta", "shared::cluster")


@emits(
    "cp",
    modifiers="async bulk tensor 1d 2d 3d 4d 5d tile global shared::cta shared::cluster "
    f"multicast::cluster cta_group::1 cta_group::2 {_BARRIER} bulk_group "
    f"{_CACHE_HINT} commit_group wait_group read",
)
def _bulk_copy(emitter: Emitter, instruction: Instruction) -> None:
    modifiers = instruction.modifiers
    if modifiers[:2] != ("async", "bulk"):
        raise UnsupportedInstruction(instruction)
    if modifiers[2] == "commit_group":
        emitter.lines.append(emitter.call("copies.commit"))
    elif modifiers[2] == "wait_group":
        count = str(emitter.immediate(instruction.operands[0]))
        read = str(instruction.has("read"))
        if emitter.gate:
            emitter.lines.append(f"return {emitter.call('copies.wait', count, read)}")
    elif modifiers[2] == "tensor":
        _tensor_copy(emitter, instruction)
    elif modifiers[2] in _SHARED and modifiers[3:5] == ("global", _BARRIER):
        _load_run(emitter, instruction)
    else:
        raise UnsupportedInstruction(instruction)


def _load_run(emitter: Emitter, instruction: Instruction) -> None:
    operands = list(instruction.operands)
    if instruction.has(_CACHE_HINT):
        operands.pop()  # caches are not modelled
    target, source, nbytes, barrier, *targets = operands
    if len(targets) != instruction.has("multicast::cluster"):
        raise emitter.unsupported("its operands")
    call = emitter.call(
        "copies.load_run",
        emitter.address(target),
        emitter.address(source),
        emitter.value(nbytes, "u32"),
        emitter.address(barrier),
        emitter.value(targets[0], "u16") if targets else "None",
    )
    emitter.lines.append(call)


def _tensor_copy(emitter: Emitter, instruction: Instruction) -> None:
    modifiers = instruction.modifiers
    rank = modifiers[3]
    operands = list(instruction.operands)
    if instruction.has(_CACHE_HINT):
        operands.pop()  # caches are not modelled
    load = instruction.has(_BARRIER)
    tensor = operands[1] if load else operands[0]
    if not isinstance(tensor, Address) or tensor.coordinates is None or tensor.offset:
        raise UnsupportedInstruction(instruction, "its tensor operand")
    if len(tensor.coordinates) != int(rank[0]):
        raise UnsupportedInstruction(instruction, "coordinates of another rank")
    coordinates = ", ".join(emitter.value(axis, "i32") for axis in tensor.coordinates)
    described = emitter.value(tensor.base, "u64"), f"({coordinates},)"
    if load:
        targets = emitter.value(operands[3], "u16") if len(operands) > 3 else "None"
        call = emitter.call(
            "copies.load",
            emitter.address(operands[0]),
            *described,
            emitter.address(operands[2]),
            targets,
            str(instruction.has("cta_group::2")),
        )
    else:
        call = emitter.call("copies.store", *described, emitter.address(operands[1]))
    emitter.lines.append(call)
