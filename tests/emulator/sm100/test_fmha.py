# SPDX-License-Identifier: Apache-2.0
"""The generated sm100 kernels, in a few cases of those that their records speak of, and damaged."""

from __future__ import annotations

import pytest
import support
from fmha_gen.evidence import rehearsal

from tests.emulator.rehearsals import check_launches, damaged, tagged

DAMAGED = "sm100_d128_bf16_causal_gqa4_lse"
SCHEDULES = rehearsal.schedules(2)
# Several KV blocks and work tiles per CTA, with tails; a key so large that the reference moves;
# rows without a key and work tiles of one block.
CASES = ("ragged", "strided", "short_kv")
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


@pytest.mark.parametrize("stem", support.sample("sm100"))
def test_shipped_kernel_holds(stem):
    """Each case under two schedules; what the record has took every case and five."""
    kernels = tagged(support.GENERATED / f"{stem}.py", CASES)
    assert kernels
    check_launches(stem, kernels)
    for place, kernel in enumerate(kernels):
        for schedule in (SCHEDULES[1], SCHEDULES[3 + place % 2]):
            assert kernel.run(schedule).findings == [], schedule


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_noticed(tmp_path, name):
    tag, right, wrong = DAMAGE[name]
    (kernel,) = tagged(damaged(tmp_path, DAMAGED, right, wrong), [tag])
    assert any(kernel.run(schedule).findings for schedule in SCHEDULES)
