# SPDX-License-Identifier: Apache-2.0
"""Bulk copies: of boxes by the tensor memory accelerator, and of runs of bytes."""

from __future__ import annotations

from dataclasses import replace

from ..ptx import Address, Instruction
from .emitter import Emitter, UnsupportedInstruction, emits

_CACHE_HINT = "L2::cache_hint"
_BARRIER = "mbarrier::complete_tx::bytes"
_SHARED = ("shared::cta", "shared::cluster")
_REDUCES = ("global", "shared::cta", "bulk_group", "add")
_REDUCTION = ("reduce", "async", "bulk", *_REDUCES, "f32")
_TENSOR_REDUCTION = (
    *("reduce", "async", "bulk", "tensor", *_REDUCES, "tile"),
    *(f"{rank}d" for rank in range(1, 6)),
)


@emits(
    "cp",
    modifiers="async bulk tensor 1d 2d 3d 4d 5d tile global shared::cta shared::cluster "
    f"multicast::cluster cta_group::1 cta_group::2 {_BARRIER} bulk_group "
    f"{_CACHE_HINT} commit_group wait_group read reduce add f32",
)
def _bulk_copy(emitter: Emitter, instruction: Instruction) -> None:
    modifiers = instruction.modifiers
    if modifiers[0] == "reduce":
        _reduction(emitter, instruction)
        return
    if modifiers[:2] != ("async", "bulk"):
        raise UnsupportedInstruction(instruction)
    if modifiers[2] == "commit_group":
        emitter.lines.append(emitter.call("bulk_stores.commit"))
    elif modifiers[2] == "wait_group":
        count = str(emitter.immediate(instruction.operands[0]))
        read = str(instruction.has("read"))
        if emitter.gate:
            call = emitter.call("bulk_stores.wait", count, read)
            emitter.lines.append(f"return {call}")
    elif modifiers[2] == "tensor":
        _tensor_copy(emitter, instruction)
    elif modifiers[2] in _SHARED and modifiers[3:5] == ("global", _BARRIER):
        _load_run(emitter, instruction)
    elif modifiers[2:] == ("shared::cluster", "shared::cta", _BARRIER):
        _send_run(emitter, instruction)
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


def _send_run(emitter: Emitter, instruction: Instruction) -> None:
    target, source, nbytes, barrier = instruction.operands
    call = emitter.call(
        "copies.send",
        emitter.address(target),
        emitter.address(source),
        emitter.value(nbytes, "u32"),
        emitter.address(barrier),
    )
    emitter.lines.append(call)


def _tensor_copy(emitter: Emitter, instruction: Instruction) -> None:
    rank = instruction.modifiers[3]
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
        action = "reduce" if instruction.has("add") else "store"
        call = emitter.call(
            f"bulk_stores.{action}", *described, emitter.address(operands[1])
        )
    emitter.lines.append(call)


def _reduction(emitter: Emitter, instruction: Instruction) -> None:
    """Floats of shared memory are added to global memory."""
    modifiers = instruction.modifiers
    if modifiers[1:3] != ("async", "bulk") or not instruction.has(*_REDUCES):
        raise UnsupportedInstruction(instruction)
    if instruction.has("tensor"):
        emitter.only(instruction, (*_TENSOR_REDUCTION, _CACHE_HINT))
        _tensor_copy(emitter, replace(instruction, modifiers=modifiers[1:]))
        return
    emitter.only(instruction, (*_REDUCTION, _CACHE_HINT))
    if modifiers[-1] != "f32":
        raise UnsupportedInstruction(instruction, "it adds no .f32")
    operands = list(instruction.operands)
    if instruction.has(_CACHE_HINT):
        operands.pop()
    target, source, nbytes = operands
    call = emitter.call(
        "bulk_stores.reduce_run",
        emitter.address(target),
        emitter.address(source),
        emitter.value(nbytes, "u32"),
    )
    emitter.lines.append(call)
