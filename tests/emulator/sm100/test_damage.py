# SPDX-License-Identifier: Apache-2.0
"""Generated sm100 kernels, clusters and pairs among them, damaged: a case shows it."""

from __future__ import annotations

import pytest
import support
from fmha_gen.evidence import rehearsal

from tests.emulator.rehearsals import damaged, tagged

PLAIN = "sm100_d128_bf16_causal_gqa4_lse"
MULTICAST = "sm100_d128_bf16_causal_gqa4_c2x1_kvmc_lse"
PAIR = "sm100_d128_bf16_causal_gqa4_c2x1_cta2_lse"
D192 = "sm100_d192x128_bf16_causal_lse"
D256 = "sm100_d256_bf16_causal_gqa4_c2x1_cta2_lse"
SCHEDULES = rehearsal.schedules(2)
CLUSTER_BLOCKS = "key_blocks((q_tile // CLUSTER_SIZE + 1) * CLUSTER_ROWS, problem)"
KV_TAIL = "    pipes.kv.producer_tail(kv_state)\n"
CLUSTER_BARRIER = "    cute.arch.cluster_arrive()\n    cute.arch.cluster_wait()\n"
DAMAGE = {  # the kernel, the case that shows it, the text, what is there instead
    "causal mask": (PLAIN, "ragged", "Int64(-1) << in_word", "Int64(-2) << in_word"),
    "rescale": (
        PLAIN,
        "strided",
        "vote_any_sync(factor != 1.0)",
        "vote_any_sync(factor < 0.0)",
    ),
    "slice of V, alone": (
        PLAIN,
        "ragged",
        "TILE_KV), (0, None)",
        "TILE_KV), (None, 0)",
    ),
    "wait::st of P": (
        PLAIN,
        "ragged",
        "cute.arch.fence_view_async_tmem_store()\n            before_signal()",
        "before_signal()",
    ),
    "wait::st of the tail of P": (
        PLAIN,
        "ragged",
        "cute.arch.fence_view_async_tmem_store()\n    before_signal()\n    pipes",
        "before_signal()\n    pipes",
    ),
    "fence before P": (
        PLAIN,
        "ragged",
        "before_signal()\n            pipes.s",
        "pipes.s",
    ),
    "fence after the wait for O": (
        PLAIN,
        "strided",
        'in tensor memory."""\n    after_wait()',
        'in tensor memory."""',
    ),
    "wait for the tail of P": (
        PLAIN,
        "ragged",
        "pipes.tail.consumer_wait(p_state)",
        "pass",
    ),
    "wait for room in sO": (
        PLAIN,
        "short_kv",
        "pipes.out.producer_acquire(out_state)",
        "pass",
    ),
    "commits": (MULTICAST, "ragged", "KV_RELEASES = 2", "KV_RELEASES = 1"),
    "mask": (MULTICAST, "ragged", "(0, rank, 0, 0), 1)", "(0, rank, 0, 0), 2)"),
    "slice": (MULTICAST, "ragged", "(atom, rank, cute", "(atom, rank * 0, cute"),
    "blocks": (
        MULTICAST,
        "half",
        CLUSTER_BLOCKS,
        "key_blocks((q_tile + 1) * TILE_Q, problem)",
    ),
    "tail": (MULTICAST, "one_key", KV_TAIL, ""),
    "bytes of both": (PAIR, "one_key", "K_TX_BYTES = 32768", "K_TX_BYTES = 16384"),
    "threads of both": (PAIR, "one_key", "O_RELEASES = 256", "O_RELEASES = 128"),
    "slice of Q": (PAIR, "ragged", "get_slice(half)", "get_slice(rank)"),
    "slice of V": (PAIR, "ragged", "pv_mma().get_slice(rank)", "pv_mma().get_slice(0)"),
    "leader": (PAIR, "one_key", "while more & (rank == 0):", "while more:"),
    "end": (PAIR, "one_key", CLUSTER_BARRIER, "    cute.arch.sync_threads()\n"),
    "bytes of V": (D192, "one_key", "tVsV, V_TX_BYTES)", "tVsV)"),
    "step of V": (D192, "ragged", "HEAD_DIM_QK)\n    v_tiles", "64)\n    v_tiles"),
    "wait for PV": (
        D256,
        "strided",
        "            pipes.o.consumer_wait(o_state)\n            # The",
        "            # The",
    ),
    "stage of P": (
        D256,
        "ragged",
        "None, p_state.index].iterator",
        "None, 0].iterator",
    ),
}


@pytest.mark.parametrize("name", support.rotated(DAMAGE, 5))
def test_damage_is_noticed(tmp_path, name):
    stem, tag, right, wrong = DAMAGE[name]
    path = damaged(tmp_path, stem, right, wrong, once=False)
    (kernel,) = tagged(path, [tag])
    assert any(kernel.run(schedule).findings for schedule in SCHEDULES)
