# SPDX-License-Identifier: Apache-2.0
"""Moves, selections and conversions of values, and of addresses between state spaces."""

from __future__ import annotations

from ..ptx import Immediate, Instruction, Operand, Register, Vector
from .dtypes import BITS, INTEGERS, PTX_TYPES, UNTYPED, numpy_name, unsigned, view
from .emitter import Emitter, UnsupportedInstruction, dtype_of, emits, is_special


@emits("mov", modifiers=f"pred f32 {UNTYPED} {INTEGERS}")
def _move(emitter: Emitter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    dtype = dtype_of(instruction)
    if isinstance(destination, Vector):
        parts = destination.elements
        narrow = f"u{BITS[dtype] // len(parts)}"
        wide = unsigned(dtype)
        for number, part in enumerate(parts):
            whole = emitter.value(source, wide)
            if number:
                bits = emitter.program.constant(number * BITS[narrow], wide)
                whole = f"({whole} >> {bits})"
            emitter.assign(part, f"{whole}.astype(np.{numpy_name(narrow)})", narrow)
    elif isinstance(source, Vector):
        parts = source.elements
        narrow = f"u{BITS[dtype] // len(parts)}"
        wide = unsigned(dtype)
        # The first part is the lowest.
        joined = " | ".join(
            f"{emitter.value(part, narrow)}.astype(np.{numpy_name(wide)})"
            + (
                f" << {emitter.program.constant(number * BITS[narrow], wide)}"
                * bool(number)
            )
            for number, part in enumerate(parts)
        )
        emitter.assign(destination, joined, wide)
    else:
        home = emitter.home(destination)
        if BITS[home] == BITS[dtype]:
            dtype = home  # bits move as they are
        if dtype == "f32" and isinstance(source, Immediate):
            emitter.assign(
                destination, emitter.program.constant(source.value, "f32"), "f32"
            )
        else:
            emitter.assign(destination, emitter.value(source, dtype), dtype)


@emits("selp", modifiers=f"f32 {UNTYPED} {INTEGERS}")
def _select(emitter: Emitter, instruction: Instruction) -> None:
    destination, first, second, predicate = instruction.operands
    dtype = dtype_of(instruction)
    home = emitter.home(destination)
    dtype = home if BITS[home] == BITS[dtype] else dtype

    def bits(operand: Operand) -> str:
        if isinstance(operand, Immediate):
            return emitter.program.constant(operand.value, dtype)
        return emitter.value(operand, dtype)

    condition = emitter.value(predicate, "bool")
    emitter.assign(
        destination, f"where({condition}, {bits(first)}, {bits(second)})", dtype
    )


_INTEGER_ROUNDINGS = ("rni", "rzi", "rmi", "rpi")
# Two values in a register: each half or a quarter of 32 bits.
_HALVES = ("bf16x2", "f16x2")
_QUARTERS = ("e4m3x2", "e5m2x2")
_SIXTEEN_BITS = ("bf16", "f16")


@emits(
    "cvt",
    modifiers=f"rn relu satfinite {' '.join(_INTEGER_ROUNDINGS)} {' '.join(_HALVES)} "
    f"{' '.join(_QUARTERS)} {' '.join(_SIXTEEN_BITS)} f32 s8 u8 {INTEGERS}",
)
def _convert(emitter: Emitter, instruction: Instruction) -> None:
    destination, *sources = instruction.operands
    *options, to, source_type = instruction.modifiers
    if to in _HALVES and source_type == "f32" and options in (["rn"], ["rn", "relu"]):
        high, low = (emitter.value(source, "f32") for source in sources)
        function = "_".join((to, *options))
        emitter.assign(destination, f"numerics.{function}({high}, {low})", "u32")
    elif to in _QUARTERS and source_type == "f32" and options == ["rn", "satfinite"]:
        high, low = (emitter.value(source, "f32") for source in sources)
        dtype = to.removesuffix("x2")
        for value in dict.fromkeys((high, low)):
            clipped = f"numerics.saturates({value}, {dtype!r})"
            told = emitter.call("saturated", clipped, repr(dtype))
            emitter.lines.append(f"if {clipped}.any(): {told}")
        packed = f"numerics.{to}_rn_satfinite({high}, {low})"
        emitter.assign(destination, packed, "u16")
    elif (to, source_type) == ("e4m3x2", "f16x2") and options == ["rn", "satfinite"]:
        halves = emitter.value(sources[0], "u32")
        clipped = f"numerics.saturates_f16x2({halves}, 'e4m3')"
        told = emitter.call("saturated", clipped, "'e4m3'")
        emitter.lines.append(f"if {clipped}.any(): {told}")
        packed = f"numerics.e4m3x2_rn_satfinite_f16x2({halves})"
        emitter.assign(destination, packed, "u16")
    elif to in _SIXTEEN_BITS and source_type == "f32" and options == ["rn"]:
        value = emitter.value(sources[0], "f32")
        emitter.assign(destination, f"numerics.{to}_rn({value})", "u16")
    elif to == "f32" and source_type in _SIXTEEN_BITS and not options:
        value = emitter.value(sources[0], "u16")
        emitter.assign(destination, f"numerics.{source_type}_to_f32({value})", "f32")
    elif to == "f32" and source_type in ("s32", "u32") and options == ["rn"]:
        value = emitter.value(sources[0], PTX_TYPES[source_type])
        emitter.assign(destination, f"{value}.astype(np.float32)", "f32")
    elif (
        to in ("s32", "u32")
        and source_type == "f32"
        and len(options) == 1
        and options[0] in _INTEGER_ROUNDINGS
    ):
        value = emitter.value(sources[0], "f32")
        emitter.assign(
            destination, f"numerics.f32_to_{to}({value}, {options[0]!r})", "u32"
        )
    elif to[0] in "us" and source_type[0] in "us" and not options:
        _convert_integer(emitter, destination, sources[0], to, source_type)
    else:
        raise UnsupportedInstruction(instruction)


def _convert_integer(
    emitter: Emitter, destination: Operand, source: Operand, to: str, source_type: str
) -> None:
    have, want = PTX_TYPES[source_type], PTX_TYPES[to]
    # A register may be wider than the type that is read from it: its low bits count.
    held = max(16, BITS[have])
    if isinstance(source, Register) and not is_special(source.name):
        held = max(held, BITS[emitter.home(source)])
    value = emitter.value(source, f"u{held}")
    if BITS[have] < held:
        value = f"{value}.astype(np.{numpy_name(unsigned(have))})"
    value += view(unsigned(have), have)
    # An 8-bit result lies in a 16-bit register, extended by its sign.
    kept = want if BITS[want] >= 16 else f"{want[0]}16"
    if BITS[want] < 16:
        value = f"{value}.astype(np.{numpy_name(want)})"
    emitter.assign(destination, f"{value}.astype(np.{numpy_name(kept)})", kept)


@emits(
    "cvta",
    modifiers="to param shared shared::cta shared::cluster global u64",
)
def _convert_address(emitter: Emitter, instruction: Instruction) -> None:
    # One numbering serves all spaces here: parameters, shared and global memory do not overlap,
    # and shared addresses carry the CTA's rank. So a generic address is the address.
    destination, source = instruction.operands
    emitter.assign(destination, emitter.value(source, "u64"), "u64")


@emits("mapa", modifiers="shared::cluster u32 u64")
def _map_address(emitter: Emitter, instruction: Instruction) -> None:
    destination, address, rank = instruction.operands
    dtype = dtype_of(instruction)
    values = emitter.value(address, dtype), emitter.value(rank, "u32")
    emitter.assign(destination, emitter.call("map_address", *values), dtype)
