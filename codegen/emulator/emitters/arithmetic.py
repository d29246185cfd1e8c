# SPDX-License-Identifier: Apache-2.0
"""Arithmetic, logic and comparisons.

Floating point: ptxas may contract `mul` and `add` without `.rn` to one fused operation. The
model rounds twice, as the PTX reads, or once wherever it may (see `contraction`): a kernel whose
result depends on the choice beyond rounding is not right.
"""

from __future__ import annotations

from ..ptx import Immediate, Instruction, Pair
from .dtypes import BITS, INTEGERS, UNTYPED, numpy_name, unsigned
from .emitter import Emitter, UnsupportedInstruction, dtype_of, emits

_ROUNDINGS = ("rn", "rm")


_FLOATS = {
    "f32": ("f32", "float32"),
    "f32x2": ("u64", "float32"),
    "f16x2": ("u32", "float16"),
    "bf16x2": ("u32", "uint16"),
}
"""By type: the dtype of its registers, and of the floats in them; of bf16 their bits."""
_HALVES = {"f16x2": "f16", "bf16x2": "bf16"}


@emits("add", "sub", modifiers=f"rn rm ftz {' '.join(_FLOATS)} {INTEGERS}")
@emits("mul", modifiers=f"lo hi wide rn rm ftz {' '.join(_FLOATS)} {INTEGERS}")
def _arithmetic(emitter: Emitter, instruction: Instruction) -> None:
    if instruction.modifiers[-1] in _FLOATS:
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
    dtype = unsigned(dtype_of(instruction))
    first, second = (emitter.value(source, dtype) for source in sources)
    sign = {"add": "+", "sub": "-"}[instruction.opcode]
    emitter.assign(destination, f"{first} {sign} {second}", dtype)


def _floats(emitter: Emitter, instruction: Instruction) -> list[str]:
    """The sources as arrays of floats: 128 lanes of `.f32`, of pairs 256."""
    held, kind = _FLOATS[instruction.modifiers[-1]]
    unpack = "" if held == "f32" else f".view(np.{kind})"
    return [emitter.value(source, held) + unpack for source in instruction.operands[1:]]


def _assign_floats(emitter: Emitter, instruction: Instruction, expression: str) -> None:
    """Writes floats of the dtype and the shape that `_floats` gives."""
    held, _ = _FLOATS[instruction.modifiers[-1]]
    if held != "f32":
        expression = f"({expression}).view(np.{numpy_name(held)})"
    emitter.assign(instruction.operands[0], expression, held)


def _half(instruction: Instruction) -> str:
    """What `numerics` calls the type of its halves; empty for others."""
    return _HALVES.get(instruction.modifiers[-1], "")


def _rounding(instruction: Instruction) -> str:
    """rn or rm, of an instruction that may have that, `.ftz` and a type; rn by default.

    Halves are rounded to nearest, and not flushed here.
    """
    options = list(instruction.modifiers[:-1])
    rounding = options.pop(0) if options and options[0] in _ROUNDINGS else "rn"
    halves = bool(_half(instruction))
    if options not in ([], ["ftz"]) or (halves and (options or rounding == "rm")):
        raise UnsupportedInstruction(instruction)
    return rounding


def _float_arithmetic(emitter: Emitter, instruction: Instruction) -> None:
    opcode = instruction.opcode
    flushes = instruction.has("ftz")
    fused = emitter.program.contractions.get(emitter.index)
    if fused is not None:
        _fused_sum(emitter, instruction, *fused)
        return
    first, second = _floats(emitter, instruction)
    if flushes:
        first, second = f"numerics.ftz({first})", f"numerics.ftz({second})"
    if _rounding(instruction) == "rm":
        expression = f"numerics.{opcode}_rm({first}, {second})"
    elif half := _half(instruction):
        expression = f"numerics.{opcode}_{half}({first}, {second})"
    else:
        sign = {"add": "+", "sub": "-", "mul": "*"}[opcode]
        expression = f"{first} {sign} {second}"
    if flushes:
        expression = f"numerics.ftz({expression})"
    _assign_floats(emitter, instruction, expression)


def _fused_sum(
    emitter: Emitter, instruction: Instruction, product: int, place: int
) -> None:
    """A sum whose source `place` is the product of that index, rounded once."""
    factors = _floats(emitter, emitter.program.instructions[product])
    addend = _floats(emitter, instruction)[1 - place]
    half = _half(instruction)
    negative = "numerics.neg_bf16({})" if half == "bf16" else "-{}"
    if instruction.opcode == "sub" and place == 0:
        addend = negative.format(addend)
    elif instruction.opcode == "sub":
        factors[0] = negative.format(factors[0])
    values = [*factors, addend]
    if instruction.has("ftz"):
        values = [f"numerics.ftz({value})" for value in values]
    function = f"fma_{half}" if half else "fma32"
    expression = f"numerics.{function}({', '.join(values)})"
    if instruction.has("ftz"):
        expression = f"numerics.ftz({expression})"
    _assign_floats(emitter, instruction, expression)


_PARTS = ("lo", "hi", "wide")


def _product(emitter: Emitter, instruction: Instruction) -> tuple[str, str]:
    """The part of a*b that `.lo`, `.hi` or `.wide` names, and its dtype."""
    dtype = dtype_of(instruction)
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
        if instruction.has("wide"):
            raise UnsupportedInstruction(instruction)
        return f"numerics.high_{dtype}({first}, {second})", dtype
    wide = f"{dtype[0]}{2 * BITS[dtype]}"
    product = f"{first}.astype(np.{numpy_name(wide)}) * {second}"
    if instruction.has("wide"):
        return product, wide
    return f"(({product}) >> {BITS[dtype]}).astype(np.{numpy_name(dtype)})", dtype


@emits("mad", modifiers=f"lo hi wide {INTEGERS}")
def _multiply_add(emitter: Emitter, instruction: Instruction) -> None:
    expression, dtype = _product(emitter, instruction)
    addend = emitter.value(instruction.operands[3], dtype)
    emitter.assign(instruction.operands[0], f"{expression} + {addend}", dtype)


@emits("fma", modifiers=f"rn rm bf16 f16 {' '.join(_FLOATS)}")
def _fused_multiply_add(emitter: Emitter, instruction: Instruction) -> None:
    kind = instruction.modifiers[-1]
    if instruction.modifiers == ("rn", "f32", kind) and kind in _HALVES.values():
        _fused_of_halves(emitter, instruction)
        return
    if kind not in _FLOATS:
        raise UnsupportedInstruction(instruction)
    function = {"rn": "fma32", "rm": "fma_rm"}[_rounding(instruction)]
    if half := _half(instruction):
        function = f"fma_{half}"
    values = ", ".join(_floats(emitter, instruction))
    _assign_floats(emitter, instruction, f"numerics.{function}({values})")


def _fused_of_halves(emitter: Emitter, instruction: Instruction) -> None:
    """Factors of 16 bits, which sm_100 multiplies in fp32 as they are, and an fp32 addend."""
    destination, *factors, addend = instruction.operands
    wide = f"numerics.{instruction.modifiers[-1]}_to_f32({{}})"
    values = [wide.format(emitter.value(factor, "u16")) for factor in factors]
    values.append(emitter.value(addend, "f32"))
    emitter.assign(destination, f"numerics.fma32({', '.join(values)})", "f32")


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


@emits("min", "max", modifiers=f"relu NaN f32 {INTEGERS}")
def _extremum(emitter: Emitter, instruction: Instruction) -> None:
    destination, *sources = instruction.operands
    dtype = dtype_of(instruction)
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
    dtype = dtype_of(instruction)
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


@emits("tanh", modifiers="approx f32")
def _hyperbolic_tangent(emitter: Emitter, instruction: Instruction) -> None:
    if instruction.modifiers != ("approx", "f32"):
        raise UnsupportedInstruction(instruction)
    destination, source = instruction.operands
    value = emitter.value(source, "f32")
    emitter.assign(destination, f"numerics.tanh_approx({value})", "f32")


@emits("and", "or", "xor", modifiers=f"pred {UNTYPED}")
def _bitwise(emitter: Emitter, instruction: Instruction) -> None:
    destination, *sources = instruction.operands
    dtype = dtype_of(instruction)
    sign = {"and": "&", "or": "|", "xor": "^"}[instruction.opcode]
    first, second = (emitter.value(source, dtype) for source in sources)
    emitter.assign(destination, f"{first} {sign} {second}", dtype)


@emits("not", modifiers=f"pred {UNTYPED}")
def _not(emitter: Emitter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    dtype = dtype_of(instruction)
    emitter.assign(destination, f"~{emitter.value(source, dtype)}", dtype)


@emits("prmt", modifiers="b32")
def _permute_bytes(emitter: Emitter, instruction: Instruction) -> None:
    destination, *sources = instruction.operands
    for place, half in emitter.program.coded.get(emitter.index, ()):
        wrong = f"numerics.miscoded({emitter.value(sources[place], 'u32')}, {half})"
        emitter.lines.append(f"if {wrong}.any(): {emitter.call('miscoded', wrong)}")
    first, second, selector = (emitter.value(source, "u32") for source in sources)
    function = "prmt"
    if isinstance(sources[2], Immediate):
        function, selector = "prmt_by", str(sources[2].value & 0xFFFF)
    emitter.assign(
        destination, f"numerics.{function}({first}, {second}, {selector})", "u32"
    )


@emits("popc", modifiers="b32")
def _count_bits(emitter: Emitter, instruction: Instruction) -> None:
    destination, source = instruction.operands
    value = emitter.value(source, "u32")
    bits = f"np.unpackbits(np.ascontiguousarray({value}).view(np.uint8).reshape(-1, 4), axis=1)"
    emitter.assign(destination, f"{bits}.sum(axis=1, dtype=np.uint32)", "u32")


@emits("shl", modifiers=UNTYPED)
@emits("shr", modifiers=f"{UNTYPED} {INTEGERS}")
def _shift(emitter: Emitter, instruction: Instruction) -> None:
    destination, source, amount = instruction.operands
    dtype = dtype_of(instruction)
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
    expression = (
        f"{value} {sign} np.minimum({lanes}, {clamp}).astype(np.{numpy_name(dtype)})"
    )
    if sign == "<<" or dtype[0] == "u":
        zero = emitter.program.constant(0, dtype)
        expression = f"where({lanes} > {clamp}, {zero}, {expression})"
    emitter.assign(destination, expression, dtype)


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
    modifiers=f"{' '.join((*_COMPARISONS, *_UNORDERED))} nan num and or xor f32 "
    f"{UNTYPED} {INTEGERS}",
)
def _compare(emitter: Emitter, instruction: Instruction) -> None:
    destination, *sources = instruction.operands
    dtype = dtype_of(instruction)
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
