# SPDX-License-Identifier: Apache-2.0
"""The reference of the emulator against attention written out by loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fmha_gen import numpy_attention
from fmha_gen.emulator.numerics import bf16_rn, bf16_to_f32, f16_rn, f16_to_f32

ROUND = {
    "bf16": lambda x: bf16_to_f32(bf16_rn(x)),
    "fp16": lambda x: f16_to_f32(f16_rn(x)),
}


def by_loops(q, k, v, scale, causal):
    batch, q_len, heads, _ = q.shape
    kv_len, kv_heads = k.shape[1:3]
    out = np.zeros((batch, q_len, heads, v.shape[-1]))
    lse = np.full((batch, heads, q_len), -math.inf)
    for b, head, row in np.ndindex(batch, heads, q_len):
        shared = head // (heads // kv_heads)
        keys = [j for j in range(kv_len) if not causal or j <= row + kv_len - q_len]
        weights = [
            math.exp(scale * sum(map(float, q[b, row, head] * k[b, j, shared])))
            for j in keys
        ]
        if keys:
            total = math.fsum(weights)
            lse[b, head, row] = math.log(total)
            for weight, j in zip(weights, keys, strict=True):
                out[b, row, head] += weight / total * v[b, j, shared].astype(np.float64)
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 3), (3, 5), (1, 1), (4, 4)])
@pytest.mark.parametrize("dtype", ROUND)
def test_the_definition(causal, q_len, kv_len, dtype):
    random = np.random.default_rng(q_len)
    # Small integers: products and sums of scores are then exact in float32 as well.
    q, k = (
        random.integers(-2, 3, shape).astype(np.float32)
        for shape in ((2, q_len, 4, 8), (2, kv_len, 2, 8))
    )
    v = ROUND[dtype](random.standard_normal((2, kv_len, 2, 6), np.float32))
    out, lse = by_loops(q, k, v, 0.25, causal)
    found = numpy_attention.attention(
        q, k, v, scale=0.25, causal=causal, round16=ROUND[dtype]
    )
    np.testing.assert_allclose(found.out, out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found.lse, lse, rtol=1e-12, atol=1e-14)
    error = np.linalg.norm(found.rounded - out)
    if kv_len > 1:
        assert 0 < error < {"bf16": 1e-2, "fp16": 1e-3}[dtype] * np.linalg.norm(out)
    np.testing.assert_array_equal(
        ROUND[dtype](found.rounded.astype(np.float32)), found.rounded
    )


def test_blocks_of_rows_change_nothing(monkeypatch):
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 9, 1, 8), np.float32) for _ in range(3))
    options = {"scale": 1.0, "causal": True, "round16": ROUND["bf16"]}
    whole = numpy_attention.attention(q, k, v, **options)
    monkeypatch.setattr(numpy_attention, "BLOCK_ROWS", 4)
    for one, other in zip(
        whole, numpy_attention.attention(q, k, v, **options), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-12)
