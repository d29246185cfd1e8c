# SPDX-License-Identifier: Apache-2.0
"""Attention in PyTorch, by definition: the truth in float64, and the error a kernel is allowed.

Shapes: q [batch, q, heads, qk], k [batch, kv, kv_heads, qk], v [batch, kv, kv_heads, v]; heads is a
multiple of kv_heads. Causal is aligned bottom-right: query row i sees key j when
``j <= i + kv - q``. A row that sees no key has O = 0 and LSE = -inf.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional

BLOCK_SCORES = (
    2**26
)  # scores held at once: 512 MiB in float64, and a few copies of them


class Attention(NamedTuple):
    """``out``: [batch, q, heads, v]. ``lse``: [batch, heads, q], natural logarithm."""

    out: torch.Tensor
    lse: torch.Tensor


class SixteenBit(NamedTuple):
    """``out`` in the 16-bit dtype, and how it was computed: ``steps``, ``sdpa`` or ``rounding``."""

    out: torch.Tensor
    method: str


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    dtype: torch.dtype = torch.float64,
) -> Attention:
    """Every step (scores, scale, mask, softmax, weighted sum) done and rounded in ``dtype``."""
    batch, q_len, heads, _ = q.shape
    kv_len, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    out = torch.empty(batch, q_len, heads, v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.empty(batch, heads, q_len, dtype=dtype, device=q.device)
    rows = min(q_len, max(1, BLOCK_SCORES // (group * kv_len)))
    step = max(1, BLOCK_SCORES // (group * kv_len * rows))
    for b in range(batch):
        for first in range(0, kv_heads, step):
            some = slice(first, min(first + step, kv_heads))
            shared = slice(some.start * group, some.stop * group)
            keys = _heads_first(k[b, :, some], group, dtype)
            values = _heads_first(v[b, :, some], group, dtype)
            for start in range(0, q_len, rows):
                block = slice(start, min(start + rows, q_len))
                queries = _heads_first(q[b, block, shared], 1, dtype)
                scores = (queries @ keys.mT) * scale
                if causal:
                    seen = visible(q_len, kv_len, q.device, block)
                    scores.masked_fill_(~seen, -math.inf)
                weights = scores.softmax(-1)
                if causal:
                    weights.masked_fill_(
                        ~seen.any(-1, keepdim=True), 0.0
                    )  # softmax of nothing is NaN
                out[b, block, shared] = (weights @ values).transpose(0, 1)
                lse[b, shared, block] = scores.logsumexp(-1)
    return Attention(out, lse)


def sixteen_bit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    truth: torch.Tensor,
) -> SixteenBit:
    """The same computation in the inputs' dtype.

    Where its scores overflow, PyTorch's own scaled_dot_product_attention in that dtype; where that
    overflows too, ``truth`` rounded.
    """
    out = attention(q, k, v, scale=scale, causal=causal, dtype=q.dtype).out
    if bool(out.isfinite().all()):
        return SixteenBit(out, "steps")
    out = _fused(q, k, v, scale=scale, causal=causal)
    if bool(out.isfinite().all()):
        return SixteenBit(out, "sdpa")
    return SixteenBit(truth.to(q.dtype), "rounding")


def visible(
    q_len: int, kv_len: int, device: torch.device, rows: slice = slice(None)
) -> torch.Tensor:
    """Which keys each of these query rows sees under the causal mask: bool [rows, kv_len]."""
    row = torch.arange(q_len, device=device)[rows, None]
    return torch.arange(kv_len, device=device)[None, :] <= row + (kv_len - q_len)


def _heads_first(x: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, heads, d] to [heads * group, rows, d]."""
    return x.to(dtype).transpose(0, 1).repeat_interleave(group, dim=0)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool
) -> torch.Tensor:
    group = q.shape[2] // k.shape[2]
    keys, values = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    seen = visible(q.shape[1], k.shape[1], q.device) if causal else None
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=seen, scale=scale
    )
    if seen is not None:
        out = out.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return out.transpose(1, 2)
