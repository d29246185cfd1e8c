# SPDX-License-Identifier: Apache-2.0
"""How a warpgroup's tensor cores add products to an accumulator.

Of 16-bit operands they keep more bits than a float32 has, and adding in float32 differs by a few
ulps of the largest addend. Of 8-bit operands Hopper keeps fewer. One wgmma adds the 32 products of
an element and its accumulator, a + b + ... + c, like this:

1. each addend's magnitude is cut off below 2**-13 of the largest exponent among them, where that of
   a product is the sum of its factors' and so may be one less than the product's own;
2. the sum of what is left is exact;
3. the result's magnitude is cut off to 13 bits behind the leading one: a float32 whose low 10 bits
   are 0.

Sums of positive products shrink: by half a unit of 2**-13 for each addend, 16 in a step, not by one
for each step.

Sources: P. Xie et al., "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores",
arXiv:2511.10909, which compared its models with the devices bit for bit (wgmma of e4m3 and e5m2: 13
fraction bits, results E8M13, both towards zero, K = 32 in one step). J. Zhang et al.,
"SageAttention2", arXiv:2411.10958, and DeepSeek-V3's report, arXiv:2412.19437, found the width
before. A product with a factor of 0 has no exponent here, as in the programs of the first. An H200
answers 30 micro-kernels with the bits of this model (decision 0057).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import numerics
from .numerics import F32

I16 = NDArray[np.int16]

FRACTION_BITS = (
    13  # that an addend keeps below the largest exponent, and a result behind its 1
)
LOST = 2.0**-FRACTION_BITS
"""[of the largest addend, or of the result: their power of two] less than this is lost by cutting
off one addend, or the result."""

_KEPT = np.uint32(0xFFFFFFFF << 23 - FRACTION_BITS & 0xFFFFFFFF)  # bits of a result
_NONE = -128
"""The exponent of a zero: less than that of any product."""
_LOWEST = -64
"""Exponents below are taken for this one: those of products are -32 at least, and where there is no
product but 0 nothing is aligned."""
_SMALLEST_NORMAL = {"e4m3": -6, "e5m2": -14}  # exponents: those of subnormals, too


class Accumulation(str, Enum):
    """What the model adds products of 8-bit operands with; those of 16-bit ones always in fp32."""

    DEVICE = "device"
    """As Hopper does: cut off to 13 bits (see the module)."""
    FP32 = "fp32"
    """In float32: what is left of an error is then the kernel's own."""


def multiply_add(
    a: F32,
    b: F32,
    c: F32 | None,
    dtypes: tuple[str, str],
    how: Accumulation = Accumulation.DEVICE,
) -> F32:
    """A times B transposed, plus C unless it is None: [M, N] of [M, k], [N, k] and [M, N].

    dtypes: of A's and of B's elements; both, or neither, are of 8 bits. Exact but for what
    `Accumulation` says; in fp32 a few ulps of the largest addend are lost to the order of the sum.
    """
    if how is Accumulation.FP32 or numerics.ELEMENT_SIZE[dtypes[0]] > 1:
        result: F32 = a @ b.T
        return result if c is None else c + result
    finite_a, finite_b = _finite_rows(a), _finite_rows(b)
    finite = finite_a & finite_b.T
    if c is not None:
        finite = finite & np.isfinite(c)
    if finite.all():
        return _cut_off(a, b, c, dtypes)
    # An infinity or a NaN is what it is in IEEE arithmetic.
    result = a @ b.T if c is None else c + a @ b.T
    zero = np.float32(0)
    a, b = np.where(finite_a, a, zero), np.where(finite_b, b, zero)
    c = None if c is None else np.where(np.isfinite(c), c, zero)
    return np.where(finite, _cut_off(a, b, c, dtypes), result)


def _finite_rows(x: F32) -> NDArray[np.bool_]:
    """[rows, 1]"""
    return np.isfinite(x).all(axis=1).reshape(-1, 1)


def _cut_off(a: F32, b: F32, c: F32 | None, dtypes: tuple[str, str]) -> F32:
    """`multiply_add` of finite numbers, as the device does it.

    Every step but the cuts is exact in float32: scaled to units of the last bit kept, an addend is
    less than 2**15, and there are 33.
    """
    # k first: then numpy works on whole matrices.
    left, right = (
        _exponents(x, _SMALLEST_NORMAL[dtype]).T
        for x, dtype in zip((a, b), dtypes, strict=True)
    )
    largest: I16 = (left[:, :, None] + right[:, None, :]).max(axis=0)
    only_zeros = largest < _LOWEST
    if c is not None:
        largest = np.maximum(largest, _exponents(c, -126))
    largest = np.maximum(largest, _LOWEST)
    unit = np.ldexp(np.float32(1), FRACTION_BITS - largest)
    addends = a.T[:, :, None] * b.T[:, None, :]
    addends *= unit
    total: F32 = np.trunc(addends, out=addends).sum(axis=0)
    if c is not None:
        total += np.trunc(c * unit)
    result = np.ldexp(total, largest - FRACTION_BITS)
    if c is not None and only_zeros.any():
        result = np.where(only_zeros, c + np.float32(0), result)
    kept: F32 = (result.view(np.uint32) & _KEPT).view(np.float32)
    return kept


def _exponents(x: NDArray[Any], smallest_normal: int) -> I16:
    """The power of two of each number's leading bit, that of zeros `_NONE`."""
    exponent = np.frexp(x)[1] - 1
    exponent = np.maximum(exponent, smallest_normal)
    return np.where(x == 0, _NONE, exponent).astype(np.int16)
