# SPDX-License-Identifier: Apache-2.0
"""tcgen05.mma: descriptors, where A and D lie in tensor memory, and the product.

The data path layouts are those of PTX ISA 9.7.16.10.5, by their letters, for each of the CTAs:

- A (M = 256 of a CTA pair) and D (M = 128 of one CTA): 128 rows, row r in lane r.
- B (M = 128 of a CTA pair): 64 rows; lanes 0 to 63 have the first half of the columns of D, lanes
  64 to 127 the second. A in tensor memory is there twice, once for each half.
- F (M = 64 of one CTA): 64 rows, sixteen in the lower or the upper half of each warp's lanes.

In a CTA pair each CTA's shared memory holds its own rows of A and its half of the rows of B, the
even CTA the first. All matrices are at the same addresses in both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from . import numerics
from .lanes import LANES, WARP, WARPS
from .numerics import F32, U32
from .tensor_memory import HALF
from .wgmma import INSTRUCTION_BYTES, check_alignment, instruction_k
from .wgmma import DescriptorError as MisplacedMatrix

I64 = NDArray[np.int64]

KINDS: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
}
"""Element types by their code in the instruction descriptor."""
_UNMODELLED = {"f8f6f4": {3: "e2m3", 4: "e3m2", 5: "e2m1"}}

_LAYOUT_SHIFT = 61
_SWIZZLES = {0: 0, 2: 1, 4: 2, 6: 3}
"""A descriptor's layout field to that of wgmma: none, 128, 64 and 32 bytes."""
_OFFSETS = 0x3FFF_3FFF_3FFF
"""Start address and both byte offsets: where wgmma's descriptor has them, too."""


class DescriptorError(ValueError):
    """A descriptor or a shape that tcgen05.mma does not have, or that is not modelled."""


class Layout(Enum):
    """Where D's rows lie in a CTA's tensor memory; the value is PTX's letters."""

    FULL = "A, D"
    FOLDED = "B"
    HALF = "F"


@dataclass(frozen=True)
class Form:
    """What the instruction itself says of a product."""

    kind: str
    ctas: int
    """1 or 2: .cta_group."""
    a_in_tensor_memory: bool
    shift_d: int
    """D is scaled by 2 to the power of minus this before the product is added to it."""


@dataclass(frozen=True)
class Shape:
    """What an instruction descriptor says, and what follows from it."""

    m: int
    n: int
    dtype_a: str
    dtype_b: str
    negate: bool
    transpose_a: bool
    """Whether A is MN-major."""
    transpose_b: bool
    layout: Layout

    @property
    def k(self) -> int:
        """Elements of a row that one instruction multiplies."""
        return instruction_k(self.dtype_a)

    @property
    def columns(self) -> int:
        """Of D in the tensor memory of each CTA."""
        return self.n // 2 if self.layout is Layout.FOLDED else self.n

    @property
    def a_columns(self) -> int:
        """Of A in tensor memory, where elements are packed in 32 bits."""
        return INSTRUCTION_BYTES // 4


@functools.lru_cache(maxsize=256)
def decode(bits: int, form: Form) -> Shape:
    """Read an instruction descriptor; DescriptorError for what the form of product lacks."""
    if bits & 0b111:
        raise DescriptorError("a sparse product is not modelled")
    if bits & (1 << 3 | 1 << 6 | 1 << 23 | 1 << 29 | 3 << 30):
        raise DescriptorError(
            f"instruction descriptor {bits:#010x} has bits that must be 0"
        )
    if bits >> 4 & 3 != 1:
        raise DescriptorError("an accumulator other than f32 is not modelled")
    dtype_a, dtype_b = (_element_type(bits >> shift & 7, form) for shift in (7, 10))
    m, n = (bits >> 24 & 0x1F) << 4, (bits >> 17 & 0x3F) << 3
    transpose_a, transpose_b = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
    if (transpose_a or transpose_b) and form.kind == "tf32":
        # PTX has it for one swizzle only, 128 bytes in atoms of 32.
        raise DescriptorError("an MN-major tf32 matrix is not modelled")
    if transpose_a and form.a_in_tensor_memory:
        raise DescriptorError("A in tensor memory cannot be MN-major")
    layouts = {
        (64, 1): Layout.HALF,
        (128, 1): Layout.FULL,
        (128, 2): Layout.FOLDED,
        (256, 2): Layout.FULL,
    }
    layout = layouts.get((m, form.ctas))
    if layout is None:
        raise DescriptorError(f"no product of cta_group::{form.ctas} has M = {m}")
    step = _n_step(m, form, transpose_b and form.kind == "f8f6f4")
    if n % step or not step <= n <= 256:
        raise DescriptorError(
            f"N = {n}: not a multiple of {step} up to 256, as M = {m} here requires"
        )
    negate = bool(bits >> 13 & 1) != bool(bits >> 14 & 1)
    return Shape(m, n, dtype_a, dtype_b, negate, transpose_a, transpose_b, layout)


def _n_step(m: int, form: Form, eight_bit_transposed: bool) -> int:
    """What N is a multiple of.

    PTX ISA, tables of shapes and of 8-bit transposed B; CUTLASS is stricter when A is in tensor
    memory (SM100_MMA_F16BF16_TS and its kin), and so is this.
    """
    step = 8 * form.ctas
    if eight_bit_transposed or (form.a_in_tensor_memory and m != 64):
        step *= 2
    return step


def _element_type(code: int, form: Form) -> str:
    known = KINDS[form.kind]
    if code not in known:
        name = _UNMODELLED.get(form.kind, {}).get(code)
        raise DescriptorError(
            f"element type {name} is not modelled"
            if name
            else f"kind::{form.kind} has no element type {code}"
        )
    return known[code]


def shared_matrix(bits: int) -> int:
    """The wgmma descriptor of the same matrix in shared memory.

    Layouts and offsets mean the same there; only how the swizzle is encoded differs. Raises
    DescriptorError.
    """
    if bits >> 46 & 7 != 1:
        raise DescriptorError(f"matrix descriptor {bits:#018x} is not of version 1")
    if bits >> 49 & 7:
        raise DescriptorError(f"matrix descriptor {bits:#018x} has a base offset")
    if bits >> 52 & 1:
        raise DescriptorError(
            f"matrix descriptor {bits:#018x}: an absolute leading offset is not modelled"
        )
    layout = bits >> _LAYOUT_SHIFT
    if layout == 1:
        raise DescriptorError("a 128-byte swizzle of 32-byte atoms is not modelled")
    if layout not in _SWIZZLES:
        raise DescriptorError(f"matrix descriptor {bits:#018x}: no layout is {layout}")
    matrix = bits & _OFFSETS | _SWIZZLES[layout] << 62
    try:
        check_alignment(matrix)
    except MisplacedMatrix as error:
        raise DescriptorError(str(error)) from None
    return matrix


def rows_in_cta(shape: Shape, form: Form) -> int:
    """Rows of A and D of each CTA."""
    return shape.m // form.ctas


@functools.lru_cache(maxsize=8)
def lanes_of(layout: Layout, upper: bool) -> I64:
    """The lanes that a CTA's matrix uses; `upper`: layout F in the upper half of each warp's."""
    if layout is not Layout.HALF:
        return np.arange(LANES)
    first = HALF if upper else 0
    return (WARP * np.arange(WARPS)[:, None] + first + np.arange(HALF)).reshape(-1)


def tensor_operand(words: U32, shape: Shape, column: int, upper: bool) -> F32:
    """A from tensor memory, [lanes, k]: for layout B the rows are there twice."""
    cells = words[column : column + shape.a_columns]
    if shape.layout is Layout.HALF:
        cells = cells[:, lanes_of(shape.layout, upper)]
    packed = np.ascontiguousarray(cells.T)
    element = {1: np.uint8, 2: np.uint16, 4: np.uint32}
    size = numerics.ELEMENT_SIZE[shape.dtype_a]
    return numerics.TO_F32[shape.dtype_a](packed.view(element[size]))


def product(shape: Shape, a: F32, b: F32) -> F32:
    """One CTA's part of A B, [columns, lanes], from A [rows or lanes, k] and B [N, k].

    As for wgmma, sums are in float32 and in an order that need not be the device's.
    """
    if shape.layout is Layout.FOLDED:
        lower, upper = np.split(b, 2)
        first, second = (a, a) if len(a) == LANES // 2 else np.split(a, 2)
        result: F32 = np.concatenate((lower @ first.T, upper @ second.T), axis=1)
    else:
        result = b @ a.T
    return -result if shape.negate else result


def accumulate(
    floats: F32,
    shape: Shape,
    column: int,
    upper: bool,
    result: F32,
    scale: float | None,
) -> None:
    """Writes a product to D, [column, lane], after adding D times `scale` to it unless None."""
    columns = slice(column, column + shape.columns)
    if shape.layout is Layout.HALF:
        lanes = lanes_of(shape.layout, upper)
        block = floats[columns]
        if scale is not None:
            result = block[:, lanes] * np.float32(scale) + result
        block[:, lanes] = result
    elif scale is None:
        floats[columns] = result
    elif scale == 1:
        floats[columns] += result
    else:
        floats[columns] = floats[columns] * np.float32(scale) + result
