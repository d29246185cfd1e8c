# SPDX-License-Identifier: Apache-2.0
"""The sm100 softmax on paper: references that are rounded, over the range of fp32.

A row is worked through in NumPy in the kernel's operations, rounded as they round, and held against
float64. The constants are those of the shipped kernels.
"""

from __future__ import annotations

import numpy as np
import pytest
import support
from fmha_gen.build import kernel_text
from fmha_gen.evidence import tensors

KERNEL = support.GENERATED / "sm100_d128_bf16_causal_gqa4_lse.py"
CONSTANTS = kernel_text.read_constants(KERNEL.read_text(encoding="utf-8"))
FAR = np.float32(CONSTANTS["FAR_REFERENCE"])
SLACK = np.float32(CONSTANTS["RESCALE_SLACK"])
UNSET = np.float32(CONSTANTS["NO_REFERENCE"])
HALF_ULP = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # [of the value]
HALF_TINY = {
    "bf16": 0.0,
    "fp16": 2.0**-25,
}  # half of the least number: P has no smaller steps
BLOCK, BLOCKS, ROWS = 16, 6, 4000
KEYS = BLOCK * BLOCKS
NEIGHBOUR = (
    2.0**-16
)  # the most that a key's P can be, beyond FAR, if it is not the largest


def fma(a, b, c):
    """a * b + c rounded once; the product of two floats is exact in float64."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


def is_near(reference):
    return (reference < FAR) & (reference > -FAR)


def kernel_rows(scores, scale, values, dtype):
    """(O, LSE in log2, largest P) of rows, block by block; scale: [rows, 1]."""
    exponents = np.frexp(scale)[1]
    power = np.ldexp(np.float32(1), exponents)
    power = power.astype(np.float32)  # above the scale: a mantissa of frexp is below 1
    rows = len(scores)
    reference = np.full((rows, 1), UNSET, np.float32)
    row_sum, out = np.zeros((rows, 1), np.float32), np.zeros((rows, 1))
    highest = np.zeros((rows, 1))
    for block in range(BLOCKS):
        s = scores[:, block * BLOCK : (block + 1) * BLOCK]
        v = values[:, block * BLOCK : (block + 1) * BLOCK]
        largest = s.max(1, keepdims=True)
        near, far = largest * scale, largest * power
        largest = np.where(is_near(near), near, far)
        new = np.where(largest - reference <= SLACK, reference, largest)
        factor = np.exp2(reference - new)
        factor = np.where(reference == UNSET, np.float32(1), factor)
        used = np.where(is_near(new), scale, power)
        p = np.exp2(fma(s, used, -new))
        p16 = tensors.FROM_BITS[dtype](tensors.TO_BITS[dtype](p)).astype(np.float64)
        row_sum = (row_sum * factor + p.sum(1, keepdims=True)).astype(np.float32)
        out = out * factor + (p16 * v).sum(1, keepdims=True)
        highest = np.maximum(highest * factor, p16.max(1, keepdims=True))
        reference = new
    scaled_back = np.where(is_near(reference), reference, reference * (scale / power))
    divisor = np.where(row_sum == 0, np.float32(1), row_sum)
    return out / divisor, scaled_back + np.log2(row_sum), highest


def true_rows(scores, scale, values):
    scaled = scores.astype(np.float64) * scale.astype(np.float64)
    largest = scaled.max(1, keepdims=True)
    weights = np.exp2(scaled - np.where(np.isfinite(largest), largest, 0.0))
    sums = weights.sum(1, keepdims=True)
    out = (weights * values).sum(1, keepdims=True) / np.where(sums == 0, 1, sums)
    return out, largest + np.log2(sums)


def spread(random):
    """Scores of one size, of either sign."""
    return random.standard_normal((ROWS, KEYS))


def neighbours(random):
    """Scores that differ by a few last places, from a level per block."""
    levels = 1 + random.integers(0, 3, (ROWS, BLOCKS, 1)) * 2.0**-22
    return (
        levels + random.integers(-4, 5, (ROWS, BLOCKS, BLOCK)) * 2.0**-23
    ).reshape(ROWS, KEYS)


def ties(random):
    """The same score throughout."""
    return np.broadcast_to(random.uniform(1, 2, (ROWS, 1)), (ROWS, KEYS))


def steps(random):
    """Levels of very different sizes, block by block, with a few last places within."""
    sizes = np.exp2(random.integers(-12, 1, (ROWS, BLOCKS, 1)))
    return (neighbours(random).reshape(ROWS, BLOCKS, BLOCK) * sizes).reshape(ROWS, KEYS)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [spread, neighbours, ties, steps])
@pytest.mark.parametrize("low_high", [(-20, 20), (20, 24), (24, 32), (32, 104)])
def test_rows_are_right_whatever_the_size_of_their_scores(dtype, kind, low_high):
    random = np.random.default_rng([abs(x) for x in low_high])
    scale = np.exp2(random.uniform(-20, 1, (ROWS, 1))).astype(np.float32)
    size = np.exp2(random.uniform(*low_high, (ROWS, 1))) / scale
    size *= random.choice([-1, 1], (ROWS, 1))
    with np.errstate(all="ignore"):
        scores = (kind(random) * size).astype(np.float32)
        hidden = random.integers(0, BLOCKS, (ROWS, 1)) * BLOCK  # of the first blocks
        hidden[: ROWS // 2] = 0
        scores[np.arange(KEYS) < hidden] = -np.inf
        scores[-1] = -np.inf  # sees no key
        fits = np.abs(scores * scale).max(1, where=np.isfinite(scores), initial=0)
        assert (fits < 2.0**127).all()
        values = random.uniform(-1, 1, scores.shape)
        out, lse, highest = kernel_rows(scores, scale, values, dtype)
        expected, expected_lse = true_rows(scores, scale, values)
    is_far = np.abs(expected_lse) > FAR / 2
    allowed = 2.0**-20 + HALF_ULP[dtype] + KEYS * NEIGHBOUR * is_far
    allowed = allowed + KEYS * HALF_TINY[dtype] / np.where(highest == 0, 1, highest)
    assert (np.abs(out - expected) <= allowed).all()
    assert (out[-1], lse[-1]) == (0, -np.inf)
    assert (np.abs(lse - expected_lse)[:-1] <= 1e-5 + 2.0**-22 * np.abs(lse[:-1])).all()
    # P and the row's largest P fit in 16 bits, with room for its precision.
    assert (highest[:-1] >= 2.0**-9).all() and (highest < 2.0**13).all()
