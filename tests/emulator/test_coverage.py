# SPDX-License-Identifier: Apache-2.0
"""Who stores which rows, of kernels whose stores were damaged: what is wrong is named."""

from __future__ import annotations

from fmha_gen.build import captures
from fmha_gen.build.calls import arguments
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.emulator import ptx, walk
from fmha_gen.evidence.coverage import walked
from fmha_gen.evidence.rehearsal import schedules
from fmha_gen.ops.cases import tiles_of, walks_for

from tests.emulator.rehearsals import damaged, tagged

STEM = "sm90_d64_bf16_full"
STORE = "        cute.copy(out.atom, tOsO, tOgO[None, q_tile * WARPGROUPS + mma.warpgroup_idx])\n"


def findings(folder, right, wrong):
    """Of the case `ragged` of a damaged kernel."""
    (kernel,) = tagged(damaged(folder, STEM, right, wrong), ["ragged"])
    return kernel.run(schedules(0)[0]).findings


def test_a_tile_that_is_stored_twice_is_named_though_its_values_are_right(tmp_path):
    race, text = findings(tmp_path, STORE, STORE + STORE)
    assert race.startswith("race: ") and "TMA store writes bytes of out" in race
    assert text.startswith("row 0 of head 0, batch 0 and ")
    assert "of out: written 2 times, by cta 0, warp " in text


def test_a_tile_in_another_ones_place_is_named_on_both_sides(tmp_path):
    wrong = STORE.replace("+ mma.warpgroup_idx", "+ 0 * mma.warpgroup_idx")
    found = findings(tmp_path, STORE, wrong)
    assert any("of out: not written" in text for text in found)
    assert any("of out: written 3 times, by cta 0" in text for text in found)


def test_a_scheduler_that_does_not_end_is_found_in_seconds(tmp_path):
    """It counts work tiles in 16 bits, of which there are more."""
    place = "wave * width + place"
    path = damaged(tmp_path, STEM, f"tile = {place}", f"tile = ({place}) & 0xFFFF")
    constants = read_constants(path.read_text(encoding="utf-8"))
    spec = constants["SPEC"]
    (case,) = (
        case
        for case in walks_for(spec, tiles_of(constants))
        if case.name.startswith("many_tiles")
    )
    code, (called,) = captures.capture(path, [arguments(spec, case)], arch="sm90")
    (launch,) = called.launched
    seen = walked(constants, case, launch, walk.prepare(ptx.parse(code)))
    (finding,) = seen.findings
    assert "still running after" in str(finding)
    assert seen.steps < 10_000_000
