# SPDX-License-Identifier: Apache-2.0
"""Backward kernels in NumPy: right, wrong in a named way, or in the steps of 16-bit PyTorch."""

from __future__ import annotations

import itertools
import math

import numpy as np
from fmha_gen.ops.masks import MASKS, Lengths
from fmha_gen.ops.reference import attention
from fmha_gen.ops.scores import TANH_UNIT, capped
from right_kernel import rounded

TILE = 64  # keys
TERM = 128  # keys whose dQ is added at a time, where sums are rounded
LARGEST = 12  # exponent of the largest norms' product, scaled
SHORTER = 6  # exponents that a block may be shorter without a factor
ROWS = 64
DAMAGES = (
    "dK without scale",
    "dQ scaled twice",
    "dQ misses a KV tile",
    "dQ adds a KV tile twice",
    "dV misses a row block",
    "D left out",
    "D of the next row",
    "P not normalised",
    "LSE in base 2",
    "LSE of the next head",
    "no mask",
    "top-left mask",
    "dK of the first head of a group alone",
    "a row beyond the last one",
    "dV of dS",
    "V of the next KV head",
    "dS in 5 bits",
)
DAMAGES_OF_CAPS = (
    "no cap",
    "slope left out",
    "slope of the exponent",
    "scores capped at dS alone",
)


def forward(q, k, v, *, scale, mask, dtype, cap=None):
    """O and LSE as a kernel is given them."""
    found = attention(q, k, v, scale=scale, mask=mask, score=capped(cap))
    return rounded(dtype, found.out), found.lse.astype(np.float32)


def compute(
    q,
    k,
    v,
    dout,
    out,
    lse,
    *,
    scale,
    mask,
    dtype,
    cap=None,
    packed=False,
    damage="",
    tanh_unit=TANH_UNIT,
    sums_in="",
    strips=1,
) -> dict[str, np.ndarray]:
    """dQ, dK, dV as a kernel makes them: 16-bit P and dS, all else in fp32. packed: dS is the
    rounded product of a rounded P and a rounded dP - D. tanh_unit: of a tangent's error, at most.
    sums_in: the 16-bit type of sums of dQ. strips: of KV tiles, which take turns in these.
    """
    random = np.random.default_rng(11)
    batch, rows, heads, _ = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    made = {"dq": np.zeros(q.shape, np.float32)}
    made |= {"dk": np.zeros(k.shape, np.float32), "dv": np.zeros(v.shape, np.float32)}
    lengths = Lengths(rows, keys)
    if damage == "top-left mask" and mask is MASKS["causal"]:
        seen = np.tri(rows, keys, dtype=bool)
    else:
        seen = mask.visible(range(rows), lengths)
    if damage == "no mask":
        seen = np.ones_like(seen)
    scale = np.float32(scale)
    for b, head in np.ndindex(batch, heads):
        shared = head // group
        of_v = (shared + (damage == "V of the next KV head")) % kv_heads
        of_k, of_v = k[b, :, shared], v[b, :, of_v]
        of_q, of_o = q[b, :, head], dout[b, :, head]
        of_lse = lse[b, (head + (damage == "LSE of the next head")) % heads][:, None]
        if damage == "LSE in base 2":
            of_lse = of_lse / np.float32(math.log(2))
        sums = (of_o * out[b, :, head]).sum(-1, keepdims=True)
        if damage == "D left out":
            sums = sums * 0
        if damage == "D of the next row":
            sums = np.roll(sums, 1, 0)
        with np.errstate(all="ignore"):
            scores, slope = of_q @ of_k.T * scale, np.float32(1)
            if cap is not None:
                off = random.uniform(-tanh_unit, tanh_unit, scores.shape)
                tangents = np.tanh(scores / np.float32(cap)) * (1 + off)
                tangents = np.clip(tangents, -1, 1).astype(np.float32)
                slope = 1 - tangents * tangents
                if damage == "slope of the exponent":
                    slope = slope * np.float32(cap)
                if damage not in ("no cap", "scores capped at dS alone"):
                    scores = np.float32(cap) * tangents
                if damage in ("no cap", "slope left out"):
                    slope = np.float32(1)
            scores = np.where(seen, scores, -np.inf)
            near = np.where(np.isinf(of_lse), 0, of_lse)
            p = np.exp((scores - near).astype(np.float32))
        p = np.where(np.isinf(of_lse), 0, p).astype(np.float32)
        if damage == "P not normalised":
            p = p * np.float32(1.03)
        in_16 = rounded(dtype, p)
        slopes = (of_o @ of_v.T - sums).astype(np.float32)
        bent = p * slope
        if packed:
            ds = rounded(dtype, rounded(dtype, bent) * rounded(dtype, slopes))
        else:
            ds = rounded(dtype, bent * slopes)
        if damage == "dS in 5 bits":
            ds = np.ldexp(np.round(np.ldexp(np.frexp(ds)[0], 5)), np.frexp(ds)[1] - 5)
        of_dq = ds
        if damage == "dQ misses a KV tile":
            of_dq = ds.copy()
            of_dq[:, TILE : 2 * TILE] = 0
        if damage == "dQ adds a KV tile twice":
            of_dq = ds.copy()
            of_dq[:, :TILE] *= 2
        factor = scale * scale if damage == "dQ scaled twice" else scale
        if sums_in:
            of_group = dout[b, :, shared * group : (shared + 1) * group]
            norms = [np.linalg.norm(x, axis=-1).max() for x in (of_group, of_k, of_v)]
            factors = of_blocks(of_o, norms[0], damage)
            of_dq = summed(of_dq, of_k, math.prod(norms), factors, sums_in, strips)
        else:
            of_dq = of_dq @ of_k
        made["dq"][b, :, head] = factor * of_dq
        if damage != "dK of the first head of a group alone" or head % group == 0:
            of_dk = np.float32(1) if damage == "dK without scale" else scale
            made["dk"][b, :, shared] += of_dk * (ds.T @ of_q)
        of_dv = ds if damage == "dV of dS" else in_16
        some = slice(ROWS if damage == "dV misses a row block" else 0, None)
        made["dv"][b, :, shared] += of_dv[some].T @ of_o[some]
        if damage == "a row beyond the last one":
            made["dv"][b, 0, shared] += 0.1  # of a row of dO that holds something
    return {name: rounded(dtype, x) for name, x in made.items()}


def of_blocks(dout, longest, damage):
    """Of each row, [rows, 1]: the factor of its block, of far shorter rows than the longest."""
    factors = np.ones((len(dout), 1), np.float32)
    for begin in range(0, len(dout), ROWS):
        block = slice(begin, begin + ROWS)
        own = np.linalg.norm(dout[block], axis=-1).max() or longest
        shorter = math.floor(math.log2(longest / own)) if longest else 0
        if shorter > SHORTER and damage != "no factor of short blocks":
            factors[block] = 2.0**shorter
    return factors


def in_strips(tiles, strips):
    """One of each strip after the other; NumPy, too, makes the first ones longer."""
    of_strips = np.array_split(np.arange(tiles), strips)
    turns = itertools.zip_longest(*of_strips)
    return [int(tile) for turn in turns for tile in turn if tile is not None]


def summed(ds, k, longest, factors, dtype, strips):
    """dS K, scaled so that a type of 16 bits has room for it, whose sums are rounded to that."""
    scale = 2.0 ** (LARGEST - math.ceil(math.log2(longest or 1.0))) * factors
    total = 0.0
    for tile in in_strips(math.ceil(len(k) / TERM), strips):
        some = slice(tile * TERM, (tile + 1) * TERM)
        total = rounded(dtype, total + rounded(dtype, scale * (ds[:, some] @ k[some])))
    return total / scale


def in_steps(q, k, v, dout, *, scale, mask, dtype, cap=None) -> dict[str, np.ndarray]:
    """The same where every step is rounded, as PyTorch does in the 16-bit type (decision 0006)."""
    batch, rows, heads, _ = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    made = {"dq": np.zeros(q.shape), "dk": np.zeros(k.shape), "dv": np.zeros(v.shape)}
    seen = mask.visible(range(rows), Lengths(rows, keys))

    def r(x):
        return rounded(dtype, x)

    for b, head in np.ndindex(batch, heads):
        shared = head // group
        of_k, of_v = k[b, :, shared], v[b, :, shared]
        of_q, of_o = q[b, :, head], dout[b, :, head]
        scores, slope = r(r(of_q @ of_k.T) * np.float32(scale)), np.float32(1)
        if cap is not None:
            tangents = r(np.tanh(r(scores / np.float32(cap))))
            scores, slope = r(tangents * np.float32(cap)), r(1 - r(tangents * tangents))
        scores = np.where(seen, scores, -np.inf)
        largest = scores.max(-1, keepdims=True)
        p = np.exp(scores - np.where(np.isinf(largest), 0, largest))
        total = p.sum(-1, keepdims=True)
        p = r(p / np.where(total > 0, total, 1))
        dp = r(of_o @ of_v.T)
        ds = r(p * (dp - (p * dp).sum(-1, keepdims=True)))
        ds = r((ds if cap is None else r(ds * slope)) * np.float32(scale))
        made["dq"][b, :, head] = r(ds @ of_k)
        made["dk"][b, :, shared] += r(ds.T @ of_q)
        made["dv"][b, :, shared] += r(p.T @ of_o)
    return {name: r(x) for name, x in made.items()}
