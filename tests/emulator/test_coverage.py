# SPDX-License-Identifier: Apache-2.0
"""Who stores which rows, of kernels whose stores were damaged: what is wrong is named."""

from __future__ import annotations

import support
from fmha_gen.rehearsal import schedules

from tests.emulator.rehearsals import tagged

STEM = "sm90_d64_bf16_full"
STORE = "        cute.copy(out.atom, tOsO, tOgO[None, q_tile * WARPGROUPS + mma.warpgroup_idx])\n"


def findings(folder, right, wrong):
    """Of the case `ragged` of a damaged kernel."""
    text = (support.GENERATED / f"{STEM}.py").read_text(encoding="utf-8")
    assert text.count(right) == 1
    path = folder / f"{STEM}.py"
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    (kernel,) = tagged(path, ["ragged"])
    return kernel.run(schedules(0)[0]).findings


def test_a_tile_that_is_stored_twice_is_named_though_its_values_are_right(tmp_path):
    (text,) = findings(tmp_path, STORE, STORE + STORE)
    assert text.startswith("row 0 of head 0, batch 0 and ")
    assert "of out: written 2 times, by cta 0, warp " in text


def test_a_tile_in_another_ones_place_is_named_on_both_sides(tmp_path):
    wrong = STORE.replace("+ mma.warpgroup_idx", "+ 0 * mma.warpgroup_idx")
    found = findings(tmp_path, STORE, wrong)
    assert any("of out: not written" in text for text in found)
    assert any("of out: written 3 times, by cta 0" in text for text in found)
