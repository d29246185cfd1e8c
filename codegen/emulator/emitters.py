# SPDX-License-Identifier: Apache-2.0
"""The Python of each PTX instruction: one emitter per opcode, in a table.

An emitter reads an instruction's modifiers and operands and writes lines that work on 128 lanes at
once: arithmetic on numpy arrays, and calls of the warpgroup (`ctx`) for all that has effects beyond
registers. What it does not know it refuses with the PTX line; what has no effect in this model says
why. A register is `R[slot]`, an array of its *home* dtype (see `lower`).

Floating point: ptxas may contract `mul.f32` and `add.f32` without `.rn` to one fused operation. The
model rounds twice, as the PTX reads. PTX allows both; a kernel whose result depends on the choice
beyond rounding is not right, and the comparison with a float64 reference is what bounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .lanes import LANES, WARP
from .ptx import (
    SINK,
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
    Vector,
)

if TYPE_CHECKING:
    from .lower import Program

PARAM_WINDOW = 1 << 60
"""Generic address of the parameter space: no buffer may lie there."""


class UnsupportedInstruction(Exception):
    """The model has no meaning for this instruction; names the line and quotes the text."""

    def __init__(self, instruction: Instruction, why: str = "") -> None:
        text = f"PTX line {instruction.line}: {instruction.name} is not modelled"
        super().__init__(f"{text}: {why}" if why else text)
        self.line = instruction.line


ALIGNED_NONE, ALIGNED_WARP, ALIGNED_GROUP = range(3)


@dataclass(frozen=True)
class Mma:
    """The static part of a `wgmma.mma_async`."""

    n: int
    k: int
    dtype_a: str
    dtype_b: str
    accumulators: tuple[int, ...]
    """Register slots of D."""
    a_registers: tuple[int, ...]
    """Register slots of A; empty when A comes from shared memory."""
    negate_a: bool
    negate_b: bool
    transpose_a: bool
    transpose_b: bool


DTYPES: dict[str, Any] = {
    "bool": np.bool_,
    "u8": np.uint8,
    "i8": np.int8,
    "u16": np.uint16,
    "i16": np.int16,
    "u32": np.uint32,
    "i32": np.int32,
    "f32": np.float32,
    "u64": np.uint64,
    "i64": np.int64,
}
BITS = {name: np.dtype(dtype).itemsize * 8 for name, dtype in DTYPES.items()} | {
    "bool": 1
}
ONES = {name: (1 << bits) - 1 for name, bits in BITS.items()}
_TYPES = {
    "pred": "bool",
    **{f"{letter}{bits}": f"u{bits}" for letter in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    "f32": "f32",
}
"""PTX type to the dtype of its lanes."""

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


def unsigned(dtype: str) -> str:
    """The unsigned dtype of the same width."""
    return "u8" if dtype == "bool" else f"u{BITS[dtype]}"


def is_special(name: str) -> bool:
    """Whether a name is of a special register, or the sink."""
    return name == "_" or name[1:] in _SPECIAL


_GROUP_ALIGNED = frozenset(("fence", "mma_async", "commit_group"))  # of wgmma


def alignment(instruction: Instruction) -> int:
    """Which lanes must execute the instruction together."""
    if instruction.opcode == "wgmma" and instruction.modifiers[0] in _GROUP_ALIGNED:
        return ALIGNED_GROUP
    # Barriers count threads; here warps arrive whole, at `barrier` without `.aligned` too: its
    # lanes wait for the others of their warp first, which a deadlock would tell.
    collective = instruction.opcode in (
        "elect",
        "shfl",
        "vote",
        "stmatrix",
        "setmaxnreg",
    )
    barrier = instruction.opcode in ("bar", "barrier", "wgmma")
    tensor = instruction.opcode == "tcgen05" and instruction.has("sync")
    return ALIGNED_WARP if collective or barrier or tensor else ALIGNED_NONE


# --- the table -----------------------------------------------------------------------------

EmitterFunction = Callable[["Emitter", Instruction], None]


@dataclass(frozen=True)
class Entry:
    """What the table says of an opcode."""

    function: EmitterFunction
    """Writes the instruction's Python."""
    modifiers: frozenset[str]
    """All that the function reads, or knows to be without effect here."""


EMITTERS: dict[str, Entry] = {}
"""By opcode."""


def emits(
    *opcodes: str, modifiers: str
) -> Callable[[EmitterFunction], EmitterFunction]:
    """Registers the function that writes the Python of these opcodes with these modifiers."""

    def register(function: EmitterFunction) -> EmitterFunction:
        for opcode in opcodes:
            EMITTERS[opcode] = Entry(function, frozenset(modifiers.split()))
        return function

    return register


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
        entry.function(self, instruction)
        self.masked = merged

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
                    f".astype(np.{_np(dtype)})"
                    if BITS[dtype] != 32
                    else _view("u32", dtype)
                )
                return f"ctx.special[{operand.name[1:]!r}]{wide}"
            slot = program.slots[operand.name]
            if BITS[program.homes[slot]] != BITS[dtype]:
                raise self.unsupported(f"{operand.name} is not {BITS[dtype]} bits wide")
            return f"R[{slot}]{_view(program.homes[slot], dtype)}"
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
                return f"ctx.shared_address({offset}, np.{_np(dtype)})"
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
            expression = f"({expression}){_view(dtype, home)}"
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

    def only(self, instruction: Instruction, allowed: Iterable[str]) -> None:
        """Refuses modifiers that the table lists for other forms of the opcode."""
        for modifier in instruction.modifiers:
            if modifier not in allowed:
                raise UnsupportedInstruction(instruction, f".{modifier}")

    def unsupported(self, why: str) -> UnsupportedInstruction:
        """The error for the instruction that is being written."""
        return UnsupportedInstruction(self.program.instructions[self.index], why)


def _np(dtype: str) -> str:
    """The numpy name of a dtype."""
    return np.dtype(DTYPES[dtype]).name if dtype != "bool" else "bool_"


def _view(have: str, want: str) -> str:
    return "" if have == want else f".view(np.{_np(want)})"


def _dtype(instruction: Instruction) -> str:
    """The dtype of the last modifier."""
    name = instruction.modifiers[-1] if instruction.modifiers else ""
    if name not in _TYPES:
        raise UnsupportedInstruction(instruction, f"type .{name}")
    return _TYPES[name]


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.elements if isinstance(operand, Vector) else (operand,)


def _constant_value(emitter: Emitter, operand: Operand) -> int:
    if not isinstance(operand, Immediate):
        raise emitter.unsupported("an operand that is not a constant")
    return operand.value


_WHOLE = "s16 u16 s32 u32 s64 u64"
_BITS = "b16 b32 b64"
_ROUNDINGS = ("rn", "rm")


@emits("add", "sub", modifiers=f"rn rm ftz f32 f32x2 {_WHOLE}")
@emits("mul", modifiers=f"lo hi wide rn rm ftz f32 f32x2 {_WHOLE}")
def _arithmetic(emitter: Emitter, instruction: Instruction) -> None:
    if instruction.modifiers[-1] in ("f32", "f32x2"):
        _float_arithmetic(emitter, instruction)
        return
    if instruction.opcode == "mul":
        expression, dtype = _product(emitter, instruction)
        emitter.assign(instruction.operands[0], expression, dtype)
        return
    if len(instruction.modifiers) > 1:
        raise UnsupportedInstruction(instruction)
    destination, *sources = instruction.operands
    # Signed sums wrap the same way, and unsigned ones need fewer views.
    dtype = unsigned(_dtype(instruction))
    first, second = (emitter.value(source, dtype) for source in sources)
    sign = {"add": "+", "sub": "-"}[instruction.opcode]
    emitter.assign(destination, f"{first} {sign} {second}", dtype)


def _floats(emitter: Emitter, instruction: Instruction) -> list[str]:
    """The sources as float32 arrays: 128 lanes of `.f32`, 256 halves of `.f32x2`."""
    if instruction.modifiers[-1] == "f32":
        return [emitter.value(source, "f32") for source in instruction.operands[1:]]
    return [
        f"{emitter.value(source, 'u64')}.view(np.float32)"
        for source in instruction.operands[1:]
    ]


def _assign_floats(emitter: Emitter, instruction: Instruction, expression: str) -> None:
    """Writes a float32 array of the shape that `_floats` gives."""
    if instruction.modifiers[-1] == "f32":
        emitter.assign(instruction.operands[0], expression, "f32")
    else:
        packed = f"({expression}).view(np.uint64)"
        emitter.assign(instruction.operands[0], packed, "u64")


def _rounding(instruction: Instruction) -> str:
    """rn or rm, of an instruction that may have that, `.ftz` and a type; rn by default."""
    options = list(instruction.modifiers[:-1])
    rounding = options.pop(0) if options and options[0] in _ROUNDINGS else "rn"
    if options not in ([], ["ftz"]):
        raise UnsupportedInstruction(instruction)
    return rounding


def _float_arithmetic(emitter: Emitter, instruction: Instruction) -> None:
    opcode = instruction.opcode
    first, second = _floats(emitter, instruction)
    flushes = instruction.has("ftz")
    if flushes:
        first, second = f"numerics.ftz({first})", f"numerics.ftz({second})"
    if _rounding(instruction) == "rm":
        expression = f"numerics.{opcode}_rm({first}, {second})"
    else:
        sign = {"add": "+", "sub": "-", "mul": "*"}[opcode]
        expression = f"{first} {sign} {second}"
    if flushes:
        expression = f"numerics.ftz({expression})"
    _assign_floats(emitter, instruction, expression)


_PARTS = ("lo", "hi", "wide")


def _product(emitter: Emitter, instruction: Instruction) -> tuple[str, str]:
    """The part of a*b that `.lo`, `.hi` or `.wide` names, and its dtype."""
    dtype = _dtype(instruction)
    if len(instruction.modifiers) != 2 or instruction.modifiers[0] not in _PARTS:
        raise UnsupportedInstruction(instruction)
    if instruction.has("lo"):
        dtype = unsigned(dtype)  # the low half is the same
    first, second = (
        emitter.value(source, dtype) for source in instruction.operands[1:3]
    )
    if instruction.has("lo"):
        return f"{first} * {second}", dtype
    if BITS[dtype] > 32:
        raise UnsupportedInstruction(instruction, "a product of more than 64 bits")
    wide = f"{dtype[0]}{2 * BITS[dtype]}"
    product = f"{first}.astype(np.{_np(wide)}) * {second}"
    if instruction.has("wide"):
        return product, wide
    return f"(({product}) >> {BITS[dtype]}).astype(np.{_np(dtype)})", dtype


@emits("mad", modifiers=f"lo hi wide {_WHOLE}")
def _multiply_add(emitter: Emitter, instruction: Instruction) -> None:
    expression, dtype = _product(emitter, instruction)
    addend = emitter.value(instruction.operands[3], dtype)
    emitter.assign(instruction.operands[0], f"{expression} + {addend}", dtype)


@emits("fma", modifiers="rn rm f32 f32x2")
def _fused_multiply_add(emitter: Emitter, instruction: Instruction) -> None:
    function = {"rn": "fma32", "rm": "fma_rm"}[_rounding(instruction)]
    values = ", ".join(_floats(emitter, instruction))
    _assign_floats(emitter, instruction, f"numerics.{function}({values})")


@emits("div", modifiers="rn f32 s32 u32")
@emits("rem", modifiers="s32 u32")
def _divide(emitter: Emitter, instruction: Instruction) -> None:
    destination, *sources = instruction.operands
    if instruction.modifiers == ("rn", "f32"):
        first, second = (emitter.value(source, "f32") for source in sources)
        emitter.assign(destination, f"{first} / {second}", "f32")
        return
    if instruction.modifiers not in (("s32",), ("u32",)):
        raise UnsupportedInstruction(instruction)
    function = f"{instruction.opcode}_{instruction.modifiers[0]}"
    values = ", ".join(emitter.value(source, "u32") for source in sources)
    emitter.assign(destination, f"numerics.{function}({values})", "u32")


@emits("min", "max", modifiers=f"relu NaN f32 {_WHOLE}")
def _extremum(emitter: Emitter, instruction: Instruction) -> None:
    destination, *sources = instruction.operands
    dtype = _dtype(instruction)
    options = instruction.modifiers[:-1]
    if options not in {"i32": [(), ("relu",)], "f32": [(), ("NaN",)]}.get(dtype, [()]):
        raise UnsupportedInstruction(instruction)
    opcode = instruction.opcode
    function = f"np.{opcode}imum"
    if dtype == "f32":
        function = f"numerics.{opcode}_{'nan_' if options else ''}f32"
    expression, *rest = (emitter.value(source, dtype) for source in sources)
    for value in rest:  # two or three of them
        expression = f"{function}({expression}, {value})"
    if "relu" in options:
        expression = f"np.maximum({expression}, {emitter.program.constant(0, dtype)})"
    emitter.assign(destination, expression, dtype)


@emits("abs", "neg", modifiers="f32 s32 s64")
def _sign(emitter: Emitter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    dtype = _dtype(instruction)
    operation = {"abs": "np.abs", "neg": "np.negative"}[instruction.opcode]
    emitter.assign(destination, f"{operation}({emitter.value(source, dtype)})", dtype)


@emits("ex2", "lg2", "rcp", modifiers="approx ftz f32")
def _approximate(emitter: Emitter, instruction: Instruction) -> None:
    if instruction.modifiers != ("approx", "ftz", "f32"):
        raise UnsupportedInstruction(instruction, "only .approx.ftz.f32 is")
    destination, source = instruction.operands
    value = emitter.value(source, "f32")
    emitter.assign(
        destination, f"numerics.{instruction.opcode}_approx_ftz({value})", "f32"
    )


@emits("and", "or", "xor", modifiers=f"pred {_BITS}")
def _bitwise(emitter: Emitter, instruction: Instruction) -> None:
    destination, *sources = instruction.operands
    dtype = _dtype(instruction)
    sign = {"and": "&", "or": "|", "xor": "^"}[instruction.opcode]
    first, second = (emitter.value(source, dtype) for source in sources)
    emitter.assign(destination, f"{first} {sign} {second}", dtype)


@emits("not", modifiers=f"pred {_BITS}")
def _not(emitter: Emitter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    dtype = _dtype(instruction)
    emitter.assign(destination, f"~{emitter.value(source, dtype)}", dtype)


@emits("shl", modifiers=_BITS)
@emits("shr", modifiers=f"{_BITS} {_WHOLE}")
def _shift(emitter: Emitter, instruction: Instruction) -> None:
    destination, source, amount = instruction.operands
    dtype = _dtype(instruction)
    bits = BITS[dtype]
    value = emitter.value(source, dtype)
    sign = "<<" if instruction.opcode == "shl" else ">>"
    # Amounts beyond the width give 0, or the sign: PTX clamps them, numpy must not see them.
    if isinstance(amount, Immediate):
        if 0 <= amount.value < bits:
            shift = emitter.program.constant(amount.value, dtype)
            emitter.assign(destination, f"{value} {sign} {shift}", dtype)
            return
        expression = emitter.program.constant(0, dtype)
        if sign == ">>" and dtype[0] == "i":
            expression = f"{value} >> {emitter.program.constant(bits - 1, dtype)}"
        emitter.assign(destination, expression, dtype)
        return
    clamp = emitter.program.constant(bits - 1, "u32")
    lanes = emitter.value(amount, "u32")
    expression = f"{value} {sign} np.minimum({lanes}, {clamp}).astype(np.{_np(dtype)})"
    if sign == "<<" or dtype[0] == "u":
        zero = emitter.program.constant(0, dtype)
        expression = f"where({lanes} > {clamp}, {zero}, {expression})"
    emitter.assign(destination, expression, dtype)


@emits("mov", modifiers=f"pred f32 {_BITS} {_WHOLE}")
def _move(emitter: Emitter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    dtype = _dtype(instruction)
    if isinstance(destination, Vector):
        parts = destination.elements
        narrow = f"u{BITS[dtype] // len(parts)}"
        whole = emitter.value(source, unsigned(dtype))
        emitter.lines.append(f"parts = {whole}.view(np.{_np(narrow)})")
        for number, part in enumerate(parts):
            # A copy: a strided view would be kept, and read, again and again.
            emitter.assign(part, f"parts[{number}::{len(parts)}].copy()", narrow)
    elif isinstance(source, Vector):
        parts = source.elements
        narrow = f"u{BITS[dtype] // len(parts)}"
        values = ", ".join(emitter.value(part, narrow) for part in parts)
        joined = (
            f"np.stack(({values}), axis=1).reshape(-1).view(np.{_np(unsigned(dtype))})"
        )
        emitter.assign(destination, joined, unsigned(dtype))
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


@emits("selp", modifiers=f"f32 {_BITS} {_WHOLE}")
def _select(emitter: Emitter, instruction: Instruction) -> None:
    destination, first, second, predicate = instruction.operands
    dtype = _dtype(instruction)
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


_COMPARISONS = {
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
    **{"lo": "<", "ls": "<=", "hi": ">", "hs": ">="},
}
_UNORDERED = {
    "equ": "!=",
    "neu": "==",
    "ltu": ">=",
    "leu": ">",
    "gtu": "<=",
    "geu": "<",
}
"""Comparison that is true for NaN, to the ordered one that it is the contrary of."""


@emits(
    "setp",
    modifiers=f"{' '.join((*_COMPARISONS, *_UNORDERED))} nan num and or xor f32 {_BITS} {_WHOLE}",
)
def _compare(emitter: Emitter, instruction: Instruction) -> None:
    destination, *sources = instruction.operands
    dtype = _dtype(instruction)
    comparison, *rest = instruction.modifiers
    if len(rest) > 2:
        raise UnsupportedInstruction(instruction)
    combination = rest[0] if len(rest) > 1 else ""
    first, second = (emitter.value(source, dtype) for source in sources[:2])
    if comparison in ("nan", "num") and dtype == "f32":
        expression = f"(np.isnan({first}) | np.isnan({second}))"
        expression = expression if comparison == "nan" else f"~{expression}"
    elif comparison == "ne" and dtype == "f32":
        # numpy's != is true for NaN, PTX's ordered .ne is not.
        expression = f"(({first} < {second}) | ({first} > {second}))"
    elif comparison == "neu" and dtype == "f32":
        expression = f"({first} != {second})"
    elif comparison == "equ" and dtype == "f32":
        expression = f"~(({first} < {second}) | ({first} > {second}))"
    elif comparison in _UNORDERED and dtype == "f32":
        expression = f"~({first} {_UNORDERED[comparison]} {second})"
    elif comparison in _COMPARISONS:
        expression = f"({first} {_COMPARISONS[comparison]} {second})"
    else:
        raise UnsupportedInstruction(instruction, f".{comparison}")
    third = emitter.value(sources[2], "bool") if combination else ""
    sign = {"and": "&", "or": "|", "xor": "^", "": ""}[combination]
    if isinstance(destination, Pair):
        # The second destination gets the contrary of the comparison, combined the same way.
        emitter.lines.append(f"holds = {expression}")
        emitter.assign(destination.first, f"holds {sign} {third}".strip(), "bool")
        emitter.assign(destination.second, f"~holds {sign} {third}".strip(), "bool")
        return
    emitter.assign(destination, f"{expression} {sign} {third}".strip(), "bool")


_INTEGER_ROUNDINGS = ("rni", "rzi", "rmi", "rpi")
_PACKED = {"bf16x2": "bf16_rn", "f16x2": "f16_rn"}


@emits(
    "cvt",
    modifiers=f"rn satfinite {' '.join(_INTEGER_ROUNDINGS)} {' '.join(_PACKED)} "
    f"e4m3x2 e5m2x2 f32 s8 u8 {_WHOLE}",
)
def _convert(emitter: Emitter, instruction: Instruction) -> None:
    destination, *sources = instruction.operands
    *options, to, source_type = instruction.modifiers
    if to in _PACKED and source_type == "f32" and options == ["rn"]:
        # The first source goes to the upper half.
        high, low = (emitter.value(source, "f32") for source in sources)
        rounded = f"numerics.{_PACKED[to]}"
        emitter.lines.append(f"low, high = {rounded}({low}), {rounded}({high})")
        packed = "np.stack((low, high), axis=1).reshape(-1).view(np.uint32)"
        emitter.assign(destination, packed, "u32")
    elif (
        to in ("e4m3x2", "e5m2x2")
        and source_type == "f32"
        and options == ["rn", "satfinite"]
    ):
        high, low = (emitter.value(source, "f32") for source in sources)
        rounded = f"numerics.{to[:4]}_rn_satfinite"
        emitter.assign(
            destination, f"{rounded}({low}) | {rounded}({high}) << np.uint16(8)", "u16"
        )
    elif to == "f32" and source_type in ("s32", "u32") and options == ["rn"]:
        value = emitter.value(sources[0], _TYPES[source_type])
        emitter.assign(destination, f"{value}.astype(np.float32)", "f32")
    elif (
        to in ("s32", "u32")
        and source_type == "f32"
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
    have, want = _TYPES[source_type], _TYPES[to]
    # A register may be wider than the type that is read from it: its low bits count.
    held = max(16, BITS[have])
    if isinstance(source, Register) and not is_special(source.name):
        held = max(held, BITS[emitter.home(source)])
    value = emitter.value(source, f"u{held}")
    if BITS[have] < held:
        value = f"{value}.astype(np.{_np(unsigned(have))})"
    value += _view(unsigned(have), have)
    # An 8-bit result lies in a 16-bit register, extended by its sign.
    kept = want if BITS[want] >= 16 else f"{want[0]}16"
    if BITS[want] < 16:
        value = f"{value}.astype(np.{_np(want)})"
    emitter.assign(destination, f"{value}.astype(np.{_np(kept)})", kept)


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
    dtype = _dtype(instruction)
    values = emitter.value(address, dtype), emitter.value(rank, "u32")
    emitter.assign(destination, emitter.call("map_address", *values), dtype)


# --- loads and stores -------------------------------------------------------------------------


_MEMORY = (
    f"shared shared::cta shared::cluster global v2 v4 f32 b8 s8 u8 {_BITS} {_WHOLE}"
)


@emits("ld", modifiers=f"param {_MEMORY}")
def _load(emitter: Emitter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    targets = _elements(destination)
    dtype = _dtype(instruction)
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
            value = f"ctx.param({begin + number * size}, np.{_np(dtype)})"
            _assign_loaded(emitter, target, value, dtype)
        return
    shape = str(BITS[dtype] // 8), str(len(targets))
    call = _access(emitter, instruction, "load", source, *shape)
    emitter.lines.append(f"loaded = {call}")
    for number, target in enumerate(targets):
        _assign_loaded(emitter, target, f"loaded[{number}]", dtype)


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
    return emitter.call(f"{action}_{space}", emitter.address(address), *arguments)


def _assign_loaded(emitter: Emitter, target: Operand, value: str, dtype: str) -> None:
    """Loads extend to the register's width: by the sign for signed types, else by zeros."""
    if target == SINK:
        return
    loaded = unsigned(dtype)
    home = emitter.home(target)
    if BITS[home] > BITS[dtype]:
        wide = f"{dtype[0]}{BITS[home]}"
        value = f"{value}{_view(loaded, dtype)}.astype(np.{_np(wide)})"
        emitter.assign(target, value, wide)
    else:
        emitter.assign(
            target,
            f"{value}{_view(loaded, dtype)}" if dtype != loaded else value,
            dtype,
        )


@emits("st", modifiers=_MEMORY)
def _store(emitter: Emitter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    dtype = unsigned(_dtype(instruction))
    values = []
    for element in _elements(source):
        if dtype == "u8":
            values.append(f"{emitter.value(element, 'u16')}.astype(np.uint8)")
        elif isinstance(element, Immediate):
            values.append(emitter.program.constant(element.value, dtype))
        else:
            values.append(emitter.value(element, dtype))
    stored = str(BITS[dtype] // 8), f"({', '.join(values)},)"
    emitter.lines.append(_access(emitter, instruction, "store", destination, *stored))


@emits(
    "stmatrix",
    modifiers="sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16",
)
def _store_matrix(emitter: Emitter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    values = ", ".join(emitter.value(element, "u32") for element in _elements(source))
    transposed = str(instruction.has("trans"))
    emitter.lines.append(
        emitter.call(
            "store_matrix", emitter.address(destination), f"({values},)", transposed
        )
    )


@emits("prefetch", modifiers="param tensormap")
def _prefetch(emitter: Emitter, instruction: Instruction) -> None:
    """No effect on values or order: caches are not modelled."""


# --- warps ------------------------------------------------------------------------------------


def _whole_warp(emitter: Emitter, operand: Operand) -> None:
    """Refuses member masks other than the whole warp: lanes are held until all are there."""
    if not isinstance(operand, Immediate) or operand.value & 0xFFFFFFFF != 0xFFFFFFFF:
        raise emitter.unsupported("a member mask other than the whole warp")


@emits("elect", modifiers="sync")
def _elect(emitter: Emitter, instruction: Instruction) -> None:
    destination, members = instruction.operands
    _whole_warp(emitter, members)
    if not isinstance(destination, Pair):
        raise emitter.unsupported("it needs d|p")
    emitter.lines.append(f"leader, elected = {emitter.call('elect')}")
    emitter.assign(destination.first, "leader", "u32")
    emitter.assign(destination.second, "elected", "bool")


@emits("shfl", modifiers="sync idx bfly up down b32")
def _shuffle(emitter: Emitter, instruction: Instruction) -> None:
    destination, value, lane, clamp, members = instruction.operands
    _whole_warp(emitter, members)
    mode = instruction.modifiers[1]
    if isinstance(lane, Immediate) and isinstance(clamp, Immediate):
        fixed = [np.full(LANES, operand.value, np.int32) for operand in (lane, clamp)]
        name = f"SHUFFLE_{mode}_{lane.value & 31}_{clamp.value & 0x1F1F}"
        sources = emitter.program.bind(name, lambda: shuffle_sources(mode, *fixed))
    else:
        function = emitter.program.bind("shuffle_sources", lambda: shuffle_sources)
        lanes = f"{emitter.value(lane, 'i32')}, {emitter.value(clamp, 'i32')}"
        sources = f"{function}({mode!r}, {lanes})"
    emitter.lines.append(f"source, inside = {sources}")
    first = destination.first if isinstance(destination, Pair) else destination
    home = emitter.home(first)
    held = emitter.value(value, home)
    emitter.lines.append(f"shuffled = {held}[source]")
    if isinstance(destination, Pair):
        emitter.assign(destination.second, "inside", "bool")
    emitter.assign(first, "shuffled", home)


def shuffle_sources(mode: str, lane: Any, clamp: Any) -> tuple[Any, Any]:
    """The lane that each of 128 lanes reads in a `shfl`, and whether it lies in the segment.

    lane and clamp are the PTX operands b and c, int32 [128].
    """
    own = np.arange(LANES, dtype=np.int32) % WARP
    base = np.arange(LANES, dtype=np.int32) - own
    segment, bound = (clamp >> 8) & 31, clamp & 31
    lowest = own & segment
    highest = lowest | (bound & ~segment)
    lane = lane & 31
    if mode == "up":
        source = own - lane
        inside = source >= highest
    else:
        source = {
            "down": own + lane,
            "bfly": own ^ lane,
            "idx": lowest | (lane & ~segment),
        }[mode]
        inside = source <= highest
    return base + np.where(inside, source, own), inside


@emits("vote", modifiers="sync any all ballot pred b32")
def _vote(emitter: Emitter, instruction: Instruction) -> None:
    destination, predicate, members = instruction.operands
    _whole_warp(emitter, members)
    mode, kind = instruction.modifiers[1:]
    value = emitter.value(predicate, "bool")
    emitter.assign(destination, emitter.call(f"vote_{mode}", value), _TYPES[kind])


@emits("setmaxnreg", modifiers="dec inc sync aligned u32")
def _set_registers(emitter: Emitter, instruction: Instruction) -> None:
    direction = instruction.modifiers[0]
    count = str(_constant_value(emitter, instruction.operands[0]))
    if emitter.gate:
        emitter.lines.append(
            f"return {emitter.call('set_max_registers', repr(direction), count)}"
        )


@emits("griddepcontrol", modifiers="wait launch_dependents")
def _grid_dependency(emitter: Emitter, instruction: Instruction) -> None:
    """No effect on one launch: no grid before it is still running, none after it waits."""


# --- barriers ---------------------------------------------------------------------------------


@emits("bar", modifiers="sync arrive warp")
@emits(
    "barrier",
    modifiers="sync arrive aligned cta cluster wait relaxed release acquire",
)
def _barrier(emitter: Emitter, instruction: Instruction) -> None:
    modifiers = instruction.modifiers
    if modifiers[0] == "cluster":
        if modifiers[1] == "arrive":
            relaxed = str(instruction.has("relaxed"))
            emitter.lines.append(emitter.call("cluster_arrive", relaxed))
        else:
            emitter.lines.append(f"return {emitter.call('cluster_wait')}")
        return
    if modifiers[:2] == ("warp", "sync"):
        # Its lanes are together when the block runs; warps are the agents of the race check.
        _whole_warp(emitter, instruction.operands[0])
        return
    barrier, *count = instruction.operands
    threads = emitter.value(count[0], "u32") if count else "None"
    arguments = emitter.value(barrier, "u32"), threads
    if instruction.has("sync"):
        emitter.lines.append(f"return {emitter.call('barrier_sync', *arguments)}")
    else:
        emitter.lines.append(emitter.call("barrier_arrive", *arguments))


@emits(
    "mbarrier",
    modifiers="init inval arrive expect_tx try_wait test_wait parity acquire release relaxed "
    "cta cluster shared shared::cta shared::cluster b64",
)
def _mbarrier(emitter: Emitter, instruction: Instruction) -> None:
    action = instruction.modifiers[0]
    operands = instruction.operands
    if action == "init":
        count = emitter.value(operands[1], "u32")
        emitter.lines.append(
            emitter.call("mbarrier_init", emitter.address(operands[0]), count)
        )
    elif action in ("try_wait", "test_wait"):
        if not instruction.has("parity"):
            raise UnsupportedInstruction(instruction, "a wait on a state")
        if emitter.gate:
            parity = emitter.value(operands[2], "u32")
            polls = str(action == "test_wait")
            call = emitter.call(
                "mbarrier_wait", emitter.address(operands[1]), parity, polls
            )
            emitter.lines.append(f"return {call}")
        else:
            emitter.assign(operands[0], "ctx.phase_complete", "bool")
    elif action in ("arrive", "expect_tx"):
        rest = list(operands)
        if not isinstance(rest[0], Address):
            # The state that arrive returns is opaque; only waits on a state could read it.
            rest.pop(0)
        expects = instruction.has("expect_tx")
        arrives = action == "arrive"
        count = emitter.value(rest[1], "u32") if len(rest) > 1 and not expects else "1"
        transactions = emitter.value(rest[1], "u32") if expects else "0"
        call = emitter.call(
            "mbarrier_arrive",
            emitter.address(rest[0]),
            count if arrives else "0",
            transactions,
            str(instruction.has("shared::cluster")),
        )
        emitter.lines.append(call)
    elif action == "inval":
        emitter.lines.append(
            emitter.call("mbarrier_invalidate", emitter.address(operands[0]))
        )
    else:
        raise UnsupportedInstruction(instruction)


@emits(
    "fence", modifiers="proxy async shared::cta global mbarrier_init release cluster"
)
def _fence(emitter: Emitter, instruction: Instruction) -> None:
    modifiers = instruction.modifiers
    if modifiers[:2] == ("proxy", "async"):
        # Without a space the fence covers all of them.
        if not instruction.has("global"):
            emitter.lines.append(emitter.call("fence_proxy_async"))
    elif modifiers == ("mbarrier_init", "release", "cluster"):
        emitter.lines.append(emitter.call("fence_mbarrier_init"))
    else:
        raise UnsupportedInstruction(instruction)


# --- asynchronous copies and matrix products --------------------------------------------------

_CACHE_HINT = "L2::cache_hint"


@emits(
    "cp",
    modifiers="async bulk tensor 1d 2d 3d 4d 5d tile global shared::cta shared::cluster "
    "multicast::cluster cta_group::1 cta_group::2 mbarrier::complete_tx::bytes bulk_group "
    f"{_CACHE_HINT} commit_group wait_group read",
)
def _bulk_copy(emitter: Emitter, instruction: Instruction) -> None:
    modifiers = instruction.modifiers
    if modifiers[:2] != ("async", "bulk"):
        raise UnsupportedInstruction(instruction)
    if modifiers[2] == "commit_group":
        emitter.lines.append(emitter.call("copies.commit"))
    elif modifiers[2] == "wait_group":
        count = str(_constant_value(emitter, instruction.operands[0]))
        read = str(instruction.has("read"))
        if emitter.gate:
            emitter.lines.append(f"return {emitter.call('copies.wait', count, read)}")
    elif modifiers[2] == "tensor":
        _tensor_copy(emitter, instruction)
    else:
        raise UnsupportedInstruction(instruction)


def _tensor_copy(emitter: Emitter, instruction: Instruction) -> None:
    modifiers = instruction.modifiers
    rank = modifiers[3]
    operands = list(instruction.operands)
    if instruction.has(_CACHE_HINT):
        operands.pop()  # caches are not modelled
    load = instruction.has("mbarrier::complete_tx::bytes")
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


_MMA_DEPTH = {"f16": 16, "bf16": 16, "e4m3": 32, "e5m2": 32}
_MMA_SHAPES = {f"m64n{n}k{k}": (n, k) for n in range(8, 257, 8) for k in (16, 32)}


@emits(
    "wgmma",
    modifiers="fence commit_group wait_group mma_async sync aligned f32 "
    f"{' '.join(_MMA_DEPTH)} {' '.join(_MMA_SHAPES)}",
)
def _wgmma(emitter: Emitter, instruction: Instruction) -> None:
    action = instruction.modifiers[0]
    if action == "fence":
        emitter.lines.append(emitter.call("products.fence"))
    elif action == "commit_group":
        emitter.lines.append(emitter.call("products.commit"))
    elif action == "wait_group":
        count = str(_constant_value(emitter, instruction.operands[0]))
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
    n, k = _MMA_SHAPES[shape]
    destination, a, b, scale, *immediates = instruction.operands
    slots = tuple(_slot(emitter, element) for element in _elements(destination))
    if {k} != {_MMA_DEPTH[kind_a], _MMA_DEPTH[kind_b]} or len(slots) != n // 2:
        raise emitter.unsupported("a shape that wgmma does not have")
    flags = [_constant_value(emitter, operand) for operand in immediates]
    from_registers = isinstance(a, Vector)
    transposes = flags[2:]
    if len(flags) < 2 or len(transposes) > (1 if from_registers else 2):
        raise emitter.unsupported("its immediate operands")
    a_slots = (
        tuple(_slot(emitter, element) for element in _elements(a))
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
        values = ", ".join(emitter.value(element, "u32") for element in _elements(a))
        first = f"({values},)"
    else:
        first = emitter.value(a, "u64")
    return mma, first, emitter.value(b, "u64"), emitter.value(scale, "bool")


def _slot(emitter: Emitter, operand: Operand) -> int:
    if not isinstance(operand, Register):
        raise emitter.unsupported("an element that is not a register")
    return emitter.program.slots[operand.name]
