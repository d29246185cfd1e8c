# SPDX-License-Identifier: Apache-2.0
"""Clusters, pairs and larger heads: what `test_fmha` does, and damage to what they add to it."""

from __future__ import annotations

import pytest
from fmha_gen import rehearsal

from . import harness
from .test_fmha import rehearse

MULTICAST = "sm100_d128_bf16_causal_gqa4_c2x1_kvmc_lse"
PAIR = "sm100_d128_bf16_causal_gqa4_c2x1_cta2_lse"
D192 = "sm100_d192x128_bf16_causal_gqa4_lse"
D192_PAIR = "sm100_d192x128_bf16_causal_gqa4_c2x1_cta2_lse"
D256 = "sm100_d256_bf16_causal_gqa4_c2x1_cta2_lse"
SCHEDULES = rehearsal.schedules(1)
# A tile beyond the end beside one with rows; blocks that the second CTA's rows see and the first's
# do not; tails, with rows that see nothing.
CASES = [
    (MULTICAST, "odd_tiles"),
    (PAIR, "half"),
    (D192, "ragged"),
    (D192_PAIR, "short_kv"),
    (D256, "ragged"),
]
CLUSTER_BLOCKS = """count_blocks(
            (q_tile // CLUSTER_SIZE + 1) * TILE_Q * CLUSTER_SIZE, problem
        )"""
KV_TAIL = "    pipes.kv.producer_tail(kv_state)\n"
DAMAGE = {  # the kernel, the case that shows it, the text, what is there instead
    "commits of one CTA": (
        MULTICAST,
        "ragged",
        "KV_RELEASES = 2",
        "KV_RELEASES = 1",
    ),
    "mask": (MULTICAST, "ragged", "(0, rank, 0, 0), 1)", "(0, rank, 0, 0), 2)"),
    "slice of the cluster": (
        MULTICAST,
        "ragged",
        "atom, rank, cute.make_layout(slices)",
        "atom, rank * 0, cute.make_layout(slices)",
    ),
    "blocks of the own row": (
        MULTICAST,
        "half",
        CLUSTER_BLOCKS,
        "count_blocks((q_tile + 1) * TILE_Q, problem)",
    ),
    "tail": (MULTICAST, "one_key", KV_TAIL, ""),
    "bytes of one CTA": (PAIR, "one_key", "KV_TX_BYTES = 32768", "KV_TX_BYTES = 16384"),
    "threads of one CTA": (PAIR, "one_key", "O_RELEASES = 256", "O_RELEASES = 128"),
    "slice of Q": (PAIR, "ragged", "get_slice(half)", "get_slice(rank)"),
    "slice of V": (PAIR, "ragged", "pv_mma().get_slice(rank)", "pv_mma().get_slice(0)"),
    "leader": (PAIR, "one_key", "while more & (rank == 0):", "while more:"),
    "end": (
        PAIR,
        "one_key",
        "    cute.arch.cluster_arrive()\n    cute.arch.cluster_wait()\n",
        "    cute.arch.sync_threads()\n",
    ),
    "bytes of V": (D192, "one_key", "tVsV, V_TX_BYTES)", "tVsV)"),
    "step of V": (D192, "ragged", "stride=KV_STAGE)", "stride=TILE_KV * HEAD_DIM_V)"),
    "wait for PV": (
        D256,
        "strided",
        "            pipes.o.consumer_wait(o_state)\n            # The",
        "            # The",
    ),
    "stage of P": (
        D256,
        "ragged",
        "mma.tStS[None, None, None, s_stage].iterator",
        "mma.tStS.iterator",
    ),
}


@pytest.mark.parametrize("stem, tag", CASES)
def test_it_is_right_under_every_schedule(stem, tag):
    kernel = rehearse(harness.HERE / f"{stem}.py", tag)
    truth = kernel.truth()
    for schedule in SCHEDULES:
        assert kernel.run(schedule, truth).findings == [], schedule


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_noticed(tmp_path, name):
    stem, tag, right, wrong = DAMAGE[name]
    text = (harness.HERE / f"{stem}.py").read_text(encoding="utf-8")
    assert right in text
    path = tmp_path / f"{stem}.py"
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    kernel = rehearse(path, tag)
    truth = kernel.truth()
    assert any(kernel.run(schedule, truth).findings for schedule in SCHEDULES)
