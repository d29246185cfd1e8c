# SPDX-License-Identifier: Apache-2.0
"""The kernel that sm100's templates are to render, by hand: its cases, and damage to it."""

from __future__ import annotations

import pytest
from fmha_gen import captures, rehearsal, rehearsal_cases, tensors
from fmha_gen.emulator import ptx
from fmha_gen.emulator.lower import lower

from . import harness

STEM = "sm100_d128_bf16_causal_gqa4_lse"
SCHEDULES = rehearsal.schedules(2)
# Several KV blocks and work tiles per CTA, with tails; a key so large that its score cannot be
# scaled before the maximum is subtracted; rows without a key and work tiles of one block.
CASES = ("ragged", "strided", "short_kv")
DAMAGE = {  # the case that shows it, the text, what is there instead
    "mask": ("ragged", "seen - first, 0", "seen + 1 - first, 0"),
    "rescale": ("strided", "if cute.arch.vote_any_sync(factor != 1.0)", "if half < 0"),
    "slice of V": ("ragged", "TILE_KV), (0, None)", "TILE_KV), (None, 0)"),
    "wait::st of P": (
        "ragged",
        "cute.arch.fence_view_async_tmem_store()\n            pipes.s.consumer",
        "pipes.s.consumer",
    ),
    "wait for the tail of P": ("ragged", "pipes.tail.consumer_wait(p_state)", "pass"),
    "wait for a sum to be taken": (
        "short_kv",
        "pipes.stats.producer_acquire(stats_state)",
        "pass",
    ),
    "wait for a factor to be taken": (
        "ragged",
        "pipes.stats.producer_acquire(next_use(stats_state))",
        "pass",
    ),
    "wait for room in sO": (
        "short_kv",
        "pipes.out.producer_acquire(out_state)",
        "pass",
    ),
}


def rehearse(path, tag):
    """The kernel, ready to run the case whose name begins with this tag."""
    constants = rehearsal.read_constants(path.read_text(encoding="utf-8"))
    spec, tiles = constants["SPEC"], rehearsal.tiles_of(constants)
    cases = rehearsal_cases.cases_for(spec, tiles)
    (case,) = [case for case in cases if case.name.startswith(tag + "_")]
    problem = tensors.make_problem(spec, case)
    call = tensors.arguments(spec, case, problem)
    text, (launch,) = captures.capture(path, [call], arch=spec["arch"])
    program = lower(ptx.parse(text))
    return rehearsal.Rehearsal(spec, tiles, program, case, problem, launch)


@pytest.mark.parametrize("tag", CASES)
def test_it_is_right_under_every_schedule(tag):
    kernel = rehearse(harness.HERE / f"{STEM}.py", tag)
    truth = kernel.truth()
    for schedule in SCHEDULES:
        assert kernel.run(schedule, truth).findings == [], schedule


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_noticed(tmp_path, name):
    tag, right, wrong = DAMAGE[name]
    text = (harness.HERE / f"{STEM}.py").read_text(encoding="utf-8")
    assert text.count(right) == 1
    path = tmp_path / f"{STEM}.py"
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    kernel = rehearse(path, tag)
    truth = kernel.truth()
    assert any(kernel.run(schedule, truth).findings for schedule in SCHEDULES)
