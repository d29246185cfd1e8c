# SPDX-License-Identifier: Apache-2.0
"""Scores of -inf, in the blocks that a kernel takes first, last or only: P is 0, not NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import support
from fmha_gen.evidence import rehearsal, tensors

from .rehearsals import emulated_cases, rehearsals, tag_of

# Without a mask, with a tail of K and without; causal, whose masks are -inf too. O from registers
# and by TMA; LSE or none; packed rows, halves and blocks of a tile.
KERNELS = (
    "sm90_d64_bf16_full_s1024",
    "sm90_d256_bf16_full",
    "sm90_d128_bf16_causal_lse",
    "sm90_d128_bf16_causal_gqa8_pack_t64x128",
    "sm100_d128_bf16_full_q1000_single_lse",
    "sm100_d128_bf16_causal_gqa4_lse",
    "sm100_d128_bf16_causal_gqa4_c2x1_cta2_lse",
)
SCHEDULE = rehearsal.schedules(0)[0]


def hidden_keys(kv: int, block: int) -> list[np.ndarray]:
    """Which keys have scores of -inf: blocks are taken from the end on."""
    keys = np.arange(kv)
    blocks = keys // block
    return [
        blocks == blocks[-1],  # the first block taken
        blocks < blocks[-1],  # all but that
        blocks >= 0,
        blocks % 2 == 0,
        keys % 3 != 0,
    ]


@pytest.mark.parametrize("stem", support.rotated(KERNELS, 1))
def test_keys_of_minus_infinity_weigh_nothing(stem: str) -> None:
    path = support.GENERATED / f"{stem}.py"
    (ragged,) = (each for each in emulated_cases(path) if tag_of(each) == "ragged")
    _, (kernel,) = rehearsals(path, cases=[replace(ragged, data="normal")])
    dtype = kernel.spec["dtype"]
    q, k = kernel.problem.inputs[:2]
    q_values, k_values = (tensors.FROM_BITS[dtype](x.view) for x in (q, k))
    q_values[..., 0] = 1.0
    q.view[...] = tensors.TO_BITS[dtype](q_values)
    unseen = []
    for keys in hidden_keys(ragged.kv, kernel.tiles.kv):
        hidden = k_values.copy()
        hidden[:, keys, :, 0] = -np.inf
        k.view[...] = tensors.TO_BITS[dtype](hidden)
        fresh = replace(kernel, truths={})
        truth = fresh.truth()
        assert np.isfinite(truth.out).all()
        unseen.append(np.isneginf(truth.lse).all())
        assert fresh.run(SCHEDULE).findings == []
    assert unseen[2] and not all(unseen)
