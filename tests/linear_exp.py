# SPDX-License-Identifier: Apache-2.0
"""A model in NumPy of the lines of kernels with `exp: linear` or `linear16`, without a mask.

Its sums are float64, of which nothing is cut off: what is left are P's codes and O's rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from fmha_gen.emulator import numerics
from fmha_gen.emulator.accumulation import multiply_add
from numpy.typing import NDArray

F32 = NDArray[np.float32]
MMA_K = 32  # elements
GROUP = 8  # rows of which one takes a new reference with the others


def codes_of(
    on_line: F32, step_bits: int | None = None, clamp: bool = True
) -> NDArray[np.uint8]:
    """What `pack_codes` makes: the last bits of fp16, not below 0; `pack_steps` with step_bits."""
    halves = on_line.astype(np.float16)
    if clamp:
        halves = np.maximum(halves, np.float16(0))
    bits = halves.view(np.uint16)
    if step_bits is None:
        return (bits & 0xFF).astype(np.uint8)
    return numerics.e4m3_rn_satfinite(numerics.f16_to_f32(bits << step_bits)).astype(
        np.uint8
    )


def products(q: F32, k: F32) -> F32:
    """Q K^T of e4m3, of which the tensor cores keep 13 bits after each MMA."""
    scores = None
    for first in range(0, q.shape[1], MMA_K):
        part = slice(first, first + MMA_K)
        scores = multiply_add(q[:, part], k[:, part], scores, ("e4m3", "e4m3"))
    assert scores is not None
    return scores


def o_of(
    constants: Mapping[str, Any],
    q: F32,
    k: F32,
    v: F32,
    scale: float,
    *,
    clamp: bool = True,
    cut_off: bool = False,
) -> NDArray[np.float64]:
    """O of a head, [seqlen, head_dim] as the others, block by block as the kernel goes.

    constants: the kernel's. clamp: whether codes below 0 are 0. cut_off: whether scores are, as the
    tensor cores do it.
    """
    number = {
        name: np.float32(constants[name])
        for name in ("OCTAVE", "AT_1", "P_OFFSET", "RESCALE_SLACK")
    }
    scale_log2 = np.float32(scale * np.log2(np.e))
    scores, tile = products(q, k) if cut_off else q @ k.T, constants["TILE_KV"]
    with_ones = np.concatenate((v, np.ones_like(v[:, :1])), 1).astype(np.float64)
    sums = np.zeros((len(q), with_ones.shape[1]))
    largest = np.full(len(q), -np.inf, np.float32)
    reference = limit = largest
    for block in reversed(range(-(-len(k) // tile))):
        keys = slice(block * tile, (block + 1) * tile)
        first = keys.stop >= len(k)
        headroom = np.float32(constants["FIRST_HEADROOM"] if first else 0.0)
        s = scores[:, keys]
        exceeds = (s.max(1) > limit) | first
        renewed = np.repeat(exceeds.reshape(-1, GROUP).any(1), GROUP)
        largest = np.where(renewed, np.maximum(largest, s.max(1)), largest)
        taken = largest * scale_log2 - (number["P_OFFSET"] - headroom)
        most = largest + (number["RESCALE_SLACK"] + headroom) / scale_log2
        if not first:
            sums *= np.exp2(np.where(renewed, reference - taken, 0))[:, None]
        reference = np.where(renewed, taken, reference)
        limit = np.where(renewed, np.where(most >= 0, most, -np.inf), limit)
        of_reference = number["OCTAVE"] * reference - number["AT_1"]
        on_line = s * (number["OCTAVE"] * scale_log2) - of_reference[:, None]
        codes = codes_of(on_line, constants.get("STEP_BITS"), clamp)
        p = numerics.e4m3_to_f32(codes).astype(np.float64)
        sums += p @ with_ones[keys]
    out = (sums[:, :-1] / sums[:, -1:]).astype(np.float32)
    return numerics.bf16_to_f32(numerics.bf16_rn(out)).astype(np.float64)
