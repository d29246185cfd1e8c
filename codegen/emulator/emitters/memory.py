# SPDX-License-Identifier: Apache-2.0
"""Loads and stores of parameters, shared and global memory."""

from __future__ import annotations

from ..ptx import SINK, Address, Immediate, Instruction, Operand, Symbol
from .dtypes import BITS, INTEGERS, UNTYPED, numpy_name, unsigned, view
from .emitter import Emitter, UnsupportedInstruction, dtype_of, elements, emits

_STRONG = frozenset(("acquire", "release", "relaxed", "volatile"))
_SCOPES = "gpu sys"
_MEMORY = (
    f"shared shared::cta shared::cluster global v2 v4 f32 b8 s8 u8 {UNTYPED} {INTEGERS}"
)


@emits("ld", modifiers=f"param {_MEMORY} acquire relaxed volatile {_SCOPES}")
def _load(emitter: Emitter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    targets = elements(destination)
    dtype = dtype_of(instruction)
    if not _STRONG.isdisjoint(instruction.modifiers):
        _load_strongly(emitter, instruction, dtype)
        return
    if instruction.modifiers[0] == "param":
        if not isinstance(source, Address) or not isinstance(source.base, Symbol):
            raise UnsupportedInstruction(instruction, "a parameter that is not named")
        begin = (
            emitter.program.params[source.base.name]
            + source.base.offset
            + source.offset
        )
        size = BITS[dtype] // 8
        for number, target in enumerate(targets):
            value = f"ctx.param({begin + number * size}, np.{numpy_name(dtype)})"
            _assign_loaded(emitter, target, value, dtype)
        return
    shape = str(BITS[dtype] // 8), str(len(targets))
    call = _access(emitter, instruction, "load", source, *shape)
    emitter.lines.append(f"loaded = {call}")
    for number, target in enumerate(targets):
        _assign_loaded(emitter, target, f"loaded[{number}]", dtype)


def _load_strongly(emitter: Emitter, instruction: Instruction, dtype: str) -> None:
    """A load that other CTAs' stores and additions may meet: a gate, for it may poll."""
    destination, source = instruction.operands
    width = _strong_width(emitter, instruction, dtype)
    address = emitter.address(source)
    if emitter.gate:
        call = emitter.call("polls.ask", address, width)
        emitter.lines.append(f"return {call}")
        return
    acquires = str(instruction.has("acquire"))
    call = emitter.call("atomics.load", address, width, acquires)
    emitter.lines.append(f"loaded = {call}")
    _assign_loaded(emitter, destination, "loaded", dtype)


def _strong_width(emitter: Emitter, instruction: Instruction, dtype: str) -> str:
    """[bytes] of a scalar in global memory, with a scope that other CTAs are in."""
    kind, space = instruction.modifiers[0], instruction.modifiers[-2]
    scopes = () if kind == "volatile" else (instruction.modifiers[1],)
    modifiers = (kind, *scopes, "global", instruction.modifiers[-1])
    known = space == "global" and set(scopes) <= set(_SCOPES.split())
    if instruction.modifiers != modifiers or not known or BITS[dtype] < 32:
        raise emitter.unsupported("it is no scalar in .global of scope .gpu")
    return str(BITS[dtype] // 8)


def _access(
    emitter: Emitter,
    instruction: Instruction,
    action: str,
    address: Operand,
    *arguments: str,
) -> str:
    """A call of `load_shared` and the like."""
    space = instruction.modifiers[0].partition("::")[0]
    if space == "shared":
        remote = str(instruction.has("shared::cluster"))
        arguments = *arguments, remote
    elif space != "global":
        raise UnsupportedInstruction(instruction, f".{space}")
    return emitter.call(
        f"transfers.{action}_{space}", emitter.address(address), *arguments
    )


def _assign_loaded(emitter: Emitter, target: Operand, value: str, dtype: str) -> None:
    """Loads extend to the register's width: by the sign for signed types, else by zeros."""
    if target == SINK:
        return
    loaded = unsigned(dtype)
    home = emitter.home(target)
    if BITS[home] > BITS[dtype]:
        wide = f"{dtype[0]}{BITS[home]}"
        value = f"{value}{view(loaded, dtype)}.astype(np.{numpy_name(wide)})"
        emitter.assign(target, value, wide)
    else:
        emitter.assign(
            target,
            f"{value}{view(loaded, dtype)}" if dtype != loaded else value,
            dtype,
        )


@emits("st", modifiers=f"{_MEMORY} release relaxed volatile {_SCOPES}")
def _store(emitter: Emitter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    dtype = unsigned(dtype_of(instruction))
    values = []
    for element in elements(source):
        if dtype == "u8":
            values.append(f"{emitter.value(element, 'u16')}.astype(np.uint8)")
        elif isinstance(element, Immediate):
            values.append(emitter.program.constant(element.value, dtype))
        else:
            values.append(emitter.value(element, dtype))
    if not _STRONG.isdisjoint(instruction.modifiers):
        width = _strong_width(emitter, instruction, dtype)
        (value,) = values
        address, releases = emitter.address(destination), instruction.has("release")
        call = emitter.call("atomics.store", address, width, value, str(releases))
        emitter.lines.append(call)
        return
    stored = str(BITS[dtype] // 8), f"({', '.join(values)},)"
    emitter.lines.append(_access(emitter, instruction, "store", destination, *stored))


@emits(
    "ldmatrix",
    modifiers="sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16",
)
def _load_matrix(emitter: Emitter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    targets = elements(destination)
    shape = str(len(targets)), str(instruction.has("trans"))
    call = emitter.call("transfers.load_matrix", emitter.address(source), *shape)
    emitter.lines.append(f"loaded = {call}")
    for number, target in enumerate(targets):
        _assign_loaded(emitter, target, f"loaded[{number}]", "u32")


@emits(
    "stmatrix",
    modifiers="sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16",
)
def _store_matrix(emitter: Emitter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    values = ", ".join(emitter.value(element, "u32") for element in elements(source))
    transposed = str(instruction.has("trans"))
    emitter.lines.append(
        emitter.call(
            "transfers.store_matrix",
            emitter.address(destination),
            f"({values},)",
            transposed,
        )
    )


@emits("prefetch", modifiers="param tensormap")
def _prefetch(emitter: Emitter, instruction: Instruction) -> None:
    """No effect on values or order: caches are not modelled."""
