# SPDX-License-Identifier: Apache-2.0
"""Attention in NumPy, by definition: the truth in float64, and the error a kernel is allowed.

Shapes: q [batch, q, heads, qk], k [batch, kv, kv_heads, qk], v [batch, kv, kv_heads, v], all
float32 that hold 16-bit values. Causal is aligned bottom-right: query row i sees key j when
``j <= i + kv - q``. A row that sees no key has O = 0 and LSE = -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

BLOCK_ROWS = 512  # of Q at once: scores of 4096 keys are then 16 MiB


class Attention(NamedTuple):
    """``out``: [batch, q, heads, v]. ``lse``: [batch, heads, q], natural log. ``rounded``: as out.

    ``rounded`` is computed as kernels do it: P and O are rounded to 16 bits, sums are not. A row's
    largest P is 1 and so exact, which makes this the strictest of such references.
    """

    out: F64
    lse: F64
    rounded: F64


def attention(
    q: F32, k: F32, v: F32, *, scale: float, causal: bool, round16: Callable[[F32], F32]
) -> Attention:
    """All three results. round16: to the 16-bit type and back."""
    batch, q_len, heads, _ = q.shape
    group = heads // k.shape[2]
    out = np.empty((batch, q_len, heads, v.shape[-1]))
    rounded = np.empty_like(out)
    lse = np.empty((batch, heads, q_len))
    for b, head, rows in _blocks(batch, heads, q_len):
        keys, values = (x[b, :, head // group].astype(np.float64) for x in (k, v))
        scores = q[b, rows, head].astype(np.float64) @ keys.T * scale
        if causal:
            scores[~visible(q_len, len(keys), rows)] = -np.inf
        largest = scores.max(1, keepdims=True)
        seen = np.isfinite(largest)
        weights = np.exp(scores - np.where(seen, largest, 0.0))
        sums = weights.sum(1, keepdims=True)
        divisor = np.where(seen, sums, 1.0)
        out[b, rows, head] = weights @ values / divisor
        with np.errstate(divide="ignore"):
            lse[b, head, rows] = (largest + np.log(sums))[:, 0]
        weights16 = round16(weights.astype(np.float32)).astype(np.float64)
        product = (weights16 @ values / divisor).astype(np.float32)
        rounded[b, rows, head] = round16(product)
    return Attention(out, lse, rounded)


def visible(q_len: int, kv_len: int, rows: slice) -> NDArray[np.bool_]:
    """Which keys each of these query rows sees under the causal mask: [rows, kv_len]."""
    row = np.arange(q_len)[rows, None]
    return np.arange(kv_len)[None, :] <= row + (kv_len - q_len)


def _blocks(batch: int, heads: int, q_len: int) -> Iterator[tuple[int, int, Any]]:
    for b in range(batch):
        for head in range(heads):
            for start in range(0, q_len, BLOCK_ROWS):
                yield b, head, slice(start, min(start + BLOCK_ROWS, q_len))
