# SPDX-License-Identifier: Apache-2.0
"""Scores of -inf, in the blocks that a kernel takes first, last or only: P is 0, not NaN."""

from __future__ import annotations

import numpy as np
import pytest
import support
from fmha_gen.build import captures, kernel_text
from fmha_gen.build.calls import arguments
from fmha_gen.emulator.lower import lower_kernels
from fmha_gen.evidence import rehearsal, tensors
from fmha_gen.ops.cases import Case

# Without a mask, with a tail of K and without; causal, whose masks are -inf too. O from registers
# and by TMA; LSE or none; halves and blocks of a tile.
KERNELS = (
    "sm90_d64_bf16_full_s512",
    "sm90_d96_fp16_full",
    "sm90_d128_bf16_full_gqa8_pack_lse",
    "sm90_d256_fp16_full_c2x1_lse",
    "sm90_d64_bf16_causal_lse",
    "sm90_d128_bf16_causal_s1024",
    "sm100_d128_fp16_full_lse",
    "sm100_d128_bf16_full_q1000_single_lse",
    "sm100_d128_fp16_full_c2x1_cta2",
    "sm100_d128_bf16_causal_gqa4_lse",
)
BLOCKS = 3
SCHEDULE = rehearsal.schedules(0)[0]


def hidden_keys(kv: int, block: int) -> list[np.ndarray]:
    """For each KV head, which keys have scores of -inf: blocks are taken from the end on."""
    keys = np.arange(kv)
    blocks = keys // block
    return [
        blocks == blocks[-1],  # the first block taken
        blocks < blocks[-1],  # all but that
        blocks >= 0,
        blocks % 2 == 0,
        keys % 3 != 0,
    ]


def make(stem: str) -> rehearsal.Rehearsal:
    path = support.GENERATED / f"{stem}.py"
    constants = kernel_text.read_constants(path.read_text(encoding="utf-8"))
    spec, tiles = constants["SPEC"], rehearsal.tiles_of(constants)
    wanted = {"q": 40, "kv": (BLOCKS - 1) * tiles.kv + 16}
    q, kv = (
        rows if spec["seqlen"][side] == "dynamic" else spec["seqlen"][side]
        for side, rows in wanted.items()
    )
    hidden = hidden_keys(kv, tiles.kv)
    case = Case("infinite", 1, len(hidden), q, kv, sm_count=tiles.ctas)
    problem = tensors.make_problem(spec, tiles, case)
    q_values, k_values = (
        tensors.FROM_BITS[spec["dtype"]](x.view) for x in problem.inputs[:2]
    )
    q_values[..., 0] = 1.0
    for head, keys in enumerate(hidden):
        k_values[:, keys, head, 0] = -np.inf
    for tensor, values in zip(problem.inputs, (q_values, k_values), strict=False):
        tensor.view[...] = tensors.TO_BITS[spec["dtype"]](values)
    call = arguments(spec, case)
    text, (called,) = captures.capture(path, [call], arch=spec["arch"])
    programs = lower_kernels(text)
    return rehearsal.Rehearsal(spec, tiles, programs, case, problem, called.launched)


@pytest.mark.parametrize("stem", KERNELS)
def test_keys_of_minus_infinity_weigh_nothing(stem: str) -> None:
    kernel = make(stem)
    truth = kernel.truth()
    assert np.isfinite(truth.out).all()
    assert np.isneginf(truth.lse).any()  # of rows all of whose scores are -inf
    assert kernel.run(SCHEDULE).findings == []
