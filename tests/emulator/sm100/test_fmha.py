# SPDX-License-Identifier: Apache-2.0
"""A generated sm100 kernel, damaged: a case shows it (../test_shipped_kernels.py: whole ones)."""

from __future__ import annotations

import pytest
import support
from fmha_gen.evidence import rehearsal

from tests.emulator.rehearsals import damaged, tagged

DAMAGED = "sm100_d128_bf16_causal_gqa4_lse"
SCHEDULES = rehearsal.schedules(2)
DAMAGE = {  # the case that shows it, the text, what is there instead
    "mask": ("ragged", "Int64(-1) << in_word", "Int64(-2) << in_word"),
    "rescale": (
        "strided",
        "vote_any_sync(factor != 1.0)",
        "vote_any_sync(factor < 0.0)",
    ),
    "slice of V": ("ragged", "TILE_KV), (0, None)", "TILE_KV), (None, 0)"),
    "wait::st of P": (
        "ragged",
        "cute.arch.fence_view_async_tmem_store()\n            before_signal()",
        "before_signal()",
    ),
    "wait::st of the tail of P": (
        "ragged",
        "cute.arch.fence_view_async_tmem_store()\n    before_signal()\n    pipes",
        "before_signal()\n    pipes",
    ),
    "fence before P": ("ragged", "before_signal()\n            pipes.s", "pipes.s"),
    "fence after the wait for O": (
        "strided",
        'in tensor memory."""\n    after_wait()',
        'in tensor memory."""',
    ),
    "wait for the tail of P": ("ragged", "pipes.tail.consumer_wait(p_state)", "pass"),
    "wait for room in sO": (
        "short_kv",
        "pipes.out.producer_acquire(out_state)",
        "pass",
    ),
}


@pytest.mark.parametrize("name", support.rotated(DAMAGE, 4))
def test_damage_is_noticed(tmp_path, name):
    tag, right, wrong = DAMAGE[name]
    (kernel,) = tagged(damaged(tmp_path, DAMAGED, right, wrong), [tag])
    assert any(kernel.run(schedule).findings for schedule in SCHEDULES)
