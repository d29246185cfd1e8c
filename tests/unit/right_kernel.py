# SPDX-License-Identifier: Apache-2.0
"""A right kernel in NumPy: KV blocks from the last one on, 16-bit P and O, all else in fp32."""

from __future__ import annotations

import math

import numpy as np
from fmha_gen.evidence.tensors import FROM_BITS, TO_BITS
from fmha_gen.ops.masks import Lengths
from fmha_gen.ops.reference import Attention


def rounded(dtype, x):
    """float32 values of a 16-bit type."""
    return FROM_BITS[dtype](TO_BITS[dtype](np.asarray(x, np.float32)))


def compute(q, k, v, *, scale, mask, dtype, tile=64, slack=8.0):
    """O and LSE in float64, of values that the 16-bit type has. slack: [log2] of the reference."""
    batch, q_len, heads, _ = q.shape
    kv_len, group = k.shape[1], heads // k.shape[2]
    out = np.zeros((batch, q_len, heads, v.shape[-1]))
    lse = np.full((batch, heads, q_len), -math.inf)
    seen = mask.visible(range(q_len), Lengths(q_len, kv_len))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        for b, head in np.ndindex(batch, heads):
            found = _one_head(
                *(q[b, :, head], k[b, :, head // group], v[b, :, head // group]),
                *(seen, scale, dtype, tile, slack),
            )
            out[b, :, head], lse[b, head] = found
    return Attention(out, lse)


def _one_head(q, k, v, seen, scale, dtype, tile, slack):
    zero = np.float32(0)
    to_log2 = np.float32(scale * math.log2(math.e))
    rows = len(q)
    total, sums = np.zeros(rows, np.float32), np.zeros((rows, v.shape[-1]), np.float32)
    reference = np.full(rows, -np.inf, np.float32)
    for start in range((len(k) - 1) // tile * tile, -1, -tile):
        some = slice(start, start + tile)
        scores = np.where(seen[:, some], q @ k[some].T, -np.inf).astype(np.float32)
        largest = np.maximum(scores.max(1), reference)
        moves = ~((largest - reference) * to_log2 <= np.float32(slack))
        new = np.where(moves, largest, reference)
        factor = np.where(
            np.isinf(reference), zero, np.exp2((reference - new) * to_log2)
        )
        near = np.where(np.isinf(new), zero, new)
        p = np.exp2((scores - near[:, None]) * to_log2)
        total = total * factor + p.sum(1)
        sums = sums * factor[:, None] + rounded(dtype, p) @ v[some]
        reference = new
    there = total > 0
    divisor = np.where(there, total, np.float32(1))
    lse = reference * np.float32(scale) + np.log(divisor)
    return rounded(dtype, sums / divisor[:, None]), np.where(there, lse, -np.inf)
