# SPDX-License-Identifier: Apache-2.0
"""wgmma: matrix descriptors, operands in shared memory and in registers, and the product.

A warpgroup's 128 lanes hold an accumulator of 64 rows; warp w has the rows 16 w to 16 w + 15.
Lane (w, g, q), that is 32 w + 4 g + q, has of these the rows g and g + 8, and of each eight columns
2 q and 2 q + 1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import numerics
from .accumulation import multiply_add
from .lanes import WARPS
from .memory import SharedMemory
from .numerics import F32, U32
from .tma import swizzle

I64 = NDArray[np.int64]

ROWS = 64  # of A and of the accumulator
GROUPS = 8  # of four lanes in a warp
QUAD = 4  # lanes that share a row
INSTRUCTION_BYTES = 32  # of a row of A or B that one instruction multiplies

_ROW = 8  # rows (K-major) or columns (MN-major) of a core matrix
_CHUNK = 16  # [bytes] of such a row
_SWIZZLE_BITS = {0: 0, 1: 3, 2: 2, 3: 1}
"""Of the descriptor's field, to tma.swizzle's argument."""
_PERIOD = 1024  # [bytes] after which every swizzle repeats


class DescriptorError(ValueError):
    """A matrix descriptor or an instruction shape that the model does not know."""


@dataclass(frozen=True)
class Descriptor:
    """A matrix in shared memory, all fields in bytes but the swizzle."""

    start: int
    leading: int  # leading dimension byte offset
    stride: int  # stride dimension byte offset
    swizzle_bits: int  # 0: none, 1: 32-byte, 2: 64-byte, 3: 128-byte

    @classmethod
    def decode(cls, bits: int) -> Descriptor:
        """Read the 64 bits; DescriptorError for a base offset, which is not modelled."""
        if bits >> 49 & 7:
            raise DescriptorError(f"matrix descriptor {bits:#018x} has a base offset")
        return cls(
            start=(bits & 0x3FFF) << 4,
            leading=(bits >> 16 & 0x3FFF) << 4,
            stride=(bits >> 32 & 0x3FFF) << 4,
            swizzle_bits=_SWIZZLE_BITS[bits >> 62 & 3],
        )

    def encode(self) -> int:
        """The 64 bits."""
        field = {bits: code for code, bits in _SWIZZLE_BITS.items()}[self.swizzle_bits]
        return (
            self.start >> 4
            | (self.leading >> 4) << 16
            | (self.stride >> 4) << 32
            | field << 62
        )


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


def check_alignment(descriptor: int) -> None:
    """DescriptorError unless a matrix begins where its swizzle does, base offset being 0.

    That is a multiple of the bytes after which the swizzle repeats, and what the descriptor has
    moved along the first row, for a later k.
    """
    matrix = Descriptor.decode(descriptor)
    if not matrix.swizzle_bits:
        return
    row = _CHUNK << matrix.swizzle_bits
    astray = matrix.start % (_ROW * row) // row
    if astray:
        raise DescriptorError(
            f"a matrix at {matrix.start:#x}, in row {astray} of its {row}-byte swizzle, which "
            f"repeats every {_ROW * row} bytes: its base offset cannot be 0"
        )


def shared_addresses(
    descriptor: int, rows: int, k: int, element_size: int, transposed: bool
) -> I64:
    """Byte address of each element of an operand, [rows, k]; rows are M of A and N of B.

    `transposed` is the instruction's flag: false for K-major (k contiguous), true for MN-major.
    """
    start = Descriptor.decode(descriptor).start
    phase = start % _PERIOD
    relative = _relative(
        descriptor & ~0x3FFF | phase >> 4, rows, k, element_size, transposed
    )
    return relative + (start - phase)


@functools.lru_cache(maxsize=512)
def _relative(
    descriptor: int, rows: int, k: int, element_size: int, transposed: bool
) -> I64:
    matrix = Descriptor.decode(descriptor)
    row = np.arange(rows, dtype=np.int64)[:, None]
    column = np.arange(k, dtype=np.int64)[None, :]
    layout = _mn_major if transposed else _k_major
    return swizzle(
        matrix.start + layout(matrix, row, column, element_size), matrix.swizzle_bits
    )


def _k_major(matrix: Descriptor, row: I64, k: I64, size: int) -> I64:
    """Eight rows are one core matrix tall; with a swizzle its row is as long as the swizzle."""
    if matrix.swizzle_bits:
        pitch = _CHUNK << matrix.swizzle_bits
        return row % _ROW * pitch + row // _ROW * matrix.stride + k * size
    per_chunk = _CHUNK // size
    return (
        row % _ROW * _CHUNK
        + row // _ROW * matrix.stride
        + k % per_chunk * size
        + k // per_chunk * matrix.leading
    )


def _mn_major(matrix: Descriptor, row: I64, k: I64, size: int) -> I64:
    """Rows and k change places, and where there is no swizzle the two offsets do too."""
    span = (_CHUNK << matrix.swizzle_bits) // size  # rows that are contiguous
    along_rows, along_k = matrix.leading, matrix.stride
    if not matrix.swizzle_bits:
        along_rows, along_k = along_k, along_rows
    return (
        row % span * size
        + row // span * along_rows
        + k % _ROW * (_CHUNK << matrix.swizzle_bits)
        + k // _ROW * along_k
    )


@functools.lru_cache(maxsize=512)
def _relative_index(
    descriptor: int, rows: int, k: int, element_size: int, transposed: bool
) -> I64:
    return _relative(descriptor, rows, k, element_size, transposed) // element_size


@functools.lru_cache(maxsize=512)
def _relative_words(
    descriptor: int, rows: int, k: int, element_size: int, transposed: bool
) -> I64:
    addresses = _relative(descriptor, rows, k, element_size, transposed)
    return np.unique(addresses >> 2)


def shared_words(
    descriptor: int, rows: int, k: int, element_size: int, transposed: bool
) -> I64:
    """The 4-byte words that an operand lies in: sorted word numbers (address >> 2), each once."""
    phase = descriptor & _PHASE
    key = descriptor & ~0x3FFF | phase
    words = _relative_words(key, rows, k, element_size, transposed)
    return words + ((descriptor & 0x3FFF) - phase) * 4


_PHASE = (_PERIOD >> 4) - 1  # of the start field, which counts 16 bytes


def gather(
    shared: SharedMemory,
    descriptor: int,
    rows: int,
    k: int,
    dtype: str,
    transposed: bool,
) -> F32:
    """An operand from shared memory, [rows, k]. IndexError when it reaches beyond its end."""
    size = numerics.ELEMENT_SIZE[dtype]
    phase = descriptor & _PHASE
    key = descriptor & ~0x3FFF | phase
    index = _relative_index(key, rows, k, size, transposed)
    first = ((descriptor & 0x3FFF) - phase) * _CHUNK // size
    # A view from there on saves adding it to every index.
    return numerics.TO_F32[dtype](shared.words[size][first:][index])


def instruction_k(dtype: str) -> int:
    """K of one instruction: 16 for 16-bit elements, 32 for 8-bit and 8 for 32-bit ones."""
    return INSTRUCTION_BYTES // numerics.ELEMENT_SIZE[dtype]


def fragment_a(registers: Sequence[U32], dtype: str) -> F32:
    """A from four registers of 128 lanes, [64, k].

    Register 2 h + i of lane (w, g, q) holds, of row 16 w + 8 i + g, the 4 bytes at 16 h + 4 q.
    """
    size = numerics.ELEMENT_SIZE[dtype]
    if len(registers) != 4:
        raise DescriptorError(f"A in {len(registers)} registers")
    words = np.stack(registers).reshape(2, 2, WARPS, GROUPS, QUAD)  # (h, i, w, g, q)
    ordered = np.ascontiguousarray(words.transpose(2, 1, 3, 0, 4))  # (w, i, g, h, q)
    elements = ordered.view({1: np.uint8, 2: np.uint16}[size])
    return numerics.TO_F32[dtype](elements.reshape(ROWS, instruction_k(dtype)))


def accumulator_matrix(registers: Sequence[NDArray[Any]]) -> F32:
    """The accumulator as [64, N] from its N / 2 registers of 128 lanes.

    Register 4 j + 2 i + p of lane (w, g, q) is element [16 w + 8 i + g, 8 j + 2 q + p].
    """
    columns = len(registers) * 2
    held = np.stack(registers).view(np.float32)
    held = held.reshape(columns // 8, 2, 2, WARPS, GROUPS, QUAD)  # (j, i, p, w, g, q)
    matrix: F32 = held.transpose(3, 1, 4, 0, 5, 2).reshape(ROWS, columns)
    return matrix


def accumulator_registers(matrix: F32) -> list[U32]:
    """The inverse of `accumulator_matrix`."""
    columns = matrix.shape[1]
    split = matrix.reshape(
        WARPS, 2, GROUPS, columns // 8, QUAD, 2
    )  # (w, i, g, j, q, p)
    held = split.transpose(3, 1, 5, 0, 2, 4).reshape(columns // 2, -1)
    return list(held.view(np.uint32))


def multiply(
    shape: tuple[int, int, int],
    a: F32,
    b: F32,
    accumulator: Sequence[U32],
    *,
    dtypes: tuple[str, str] = ("bf16", "bf16"),
    scale_d: bool = True,
    scale_a: int = 1,
    scale_b: int = 1,
) -> list[U32]:
    """One wgmma.mma_async of shape (64, N, k) with a [64, k] and b [N, k]: the new accumulator.

    dtypes: of a and b, of which depends how products are added. `scale_d` false overwrites the
    accumulator instead of adding to it.
    """
    m, n, k = shape
    if m != ROWS or n % 8 or not 8 <= n <= 256:
        raise DescriptorError(f"no wgmma has the shape m{m}n{n}k{k}")
    if a.shape != (m, k) or b.shape != (n, k) or len(accumulator) != n // 2:
        raise DescriptorError(f"operands do not have the shape m{m}n{n}k{k}")
    a = a if scale_a == scale_b else -a
    c = accumulator_matrix(accumulator) if scale_d else None
    return accumulator_registers(multiply_add(a, b, c, dtypes))
