# SPDX-License-Identifier: Apache-2.0
"""Windows in the emulator: alone and with what else a spec may say, and faults at their edges."""

from __future__ import annotations

from pathlib import Path

import pytest
from fmha_gen.evidence.rehearsal import schedules
from support import kernel_text, rotated

from .rehearsals import emulated_cases, findings, rehearsals, tag_of, written

HEAD = "op: fmha_fwd\ndtype: bf16\nhead_dim: 64\n"
SM90 = f"arch: sm90\n{HEAD}tile: {{q: 128, kv: 64}}\n"
SM100 = f"arch: sm100\n{HEAD}"
CAUSAL = "mask: causal\nwindow: {{left: {}}}\n"
# Edges far enough apart that masked blocks have one of them, and edges that meet in a block.
FAR, NEAR = CAUSAL.format(300), CAUSAL.format(40)
KERNELS = {
    "sm90, far": (f"{SM90}{FAR}lse: true\n", ("long_kv", "left_of_some")),
    "sm90, near": (f"{SM90}{NEAR}lse: true\n", ("left_1", "short_kv")),
    "sm90, as many keys as a block": (SM90 + CAUSAL.format(63), ("left_62",)),
    "sm90, a key more than a block": (SM90 + CAUSAL.format(64), ("left_63",)),
    "sm90, its own key alone": (SM90 + CAUSAL.format(0), ("left_2",)),
    "sm90, left alone": (f"{SM90}window: {{left: 70}}\n", ("left_1", "short_kv")),
    "sm90, right alone": (f"{SM90}window: {{right: 70}}\n", ("late", "half")),
    "sm90, packed multicast": (
        f"{SM90}{NEAR}heads: {{q_per_kv: 4}}\npack_gqa: true\ncluster: [2, 1]\n"
        "multicast: kv\n",
        ("left_2", "edge"),
    ),
    "sm90, heads of a cluster": (
        f"{SM90}window: {{left: 100, right: 9}}\nheads: {{q_per_kv: 2}}\n"
        "cluster: [1, 2]\nmulticast: k\n",
        ("left_63",),
    ),
    "sm90, K of one block": (f"{SM90}{NEAR}seqlen: {{kv: 60}}\n", ("ragged",)),
    "sm100, far": (
        f"{SM100}window: {{left: 500, right: 9}}\nlse: true\n",
        ("long_kv", "late"),
    ),
    "sm100, near, single": (
        f"{SM100}{NEAR}schedule: single\nlse: true\n",
        ("left_127", "short_kv"),
    ),
    "sm100, multicast": (
        f"{SM100}{FAR}cluster: [2, 1]\nmulticast: kv\n",
        ("left_1",),
    ),
    "sm100, pair": (
        "arch: sm100\nop: fmha_fwd\ndtype: bf16\nhead_dim: 128\n"
        f"{NEAR}cluster: [2, 1]\ncta_group: 2\n",
        ("left_2",),
    ),
}
FAULTS = {  # kernel, case, what stands there once, what stands there then
    "rows see a tile of keys more": (
        *("sm90, far", "long_kv"),
        *("% 2 >= unseen", "% 2 >= unseen - 64"),
    ),
    "a key too many": ("sm90, near", "left_1", "% 2 >= unseen", "% 2 >= unseen - 1"),
    "a key is lost": (
        *("sm100, near, single", "left_127"),
        *(
            "in_word = cutlass.min(cutlass.max(begin",
            "in_word = cutlass.min(cutlass.max(1 + begin",
        ),
    ),
    "the first block is left out": (
        *("sm100, far", "left_1"),
        *("Range(first, cutlass", "Range(first + 1, cutlass"),
    ),
    "the last block is left out": (
        *("sm90, far", "long_kv"),
        *(
            "first, cutlass.max(end, first + 1)",
            "first, cutlass.max(end - 1, first + 1)",
        ),
    ),
    "blocks at the left edge are whole": (
        "sm90, far",
        "left_1",
        "left = ",
        "left = 0 * ",
    ),
    "blocks at the right edge are whole": (
        *("sm100, far", "late"),
        *("common.end // TILE_KV", "(common.end + 127) // TILE_KV"),
    ),
    "the best row is taken for the worst, left": (
        *("sm90, far", "left_1"),
        *("end_position - 1 - WINDOW_LEFT", "first_position - WINDOW_LEFT"),
    ),
    "the worst row is taken for the best, left": (
        *("sm90, far", "long_kv"),
        *(
            "first_key = first_position - WINDOW_LEFT",
            "first_key = end_position - 1 - WINDOW_LEFT",
        ),
    ),
    "the best row is taken for the worst, right": (
        *("sm100, far", "left_64"),
        *(
            "end = first_position + 1 + WINDOW_RIGHT",
            "end = end_position + WINDOW_RIGHT",
        ),
    ),
    "the worst row is taken for the best, right": (
        *("sm100, far", "long_kv"),
        *(
            "end_key = end_position + WINDOW_RIGHT",
            "end_key = first_position + 1 + WINDOW_RIGHT",
        ),
    ),
}


@pytest.mark.parametrize("kernel", rotated(KERNELS, 5))
def test_a_window_is_what_rows_see(kernel: str, tmp_path: Path) -> None:
    spec, tags = KERNELS[kernel]
    path = written(tmp_path, kernel_text(spec))
    cases = [case for case in emulated_cases(path) if tag_of(case) in tags]
    assert {*map(tag_of, cases)} == {*tags}
    for ready in rehearsals(path, cases=cases)[1]:
        assert ready.run(schedules(0)[0]).findings == []


@pytest.mark.parametrize("fault", rotated(FAULTS, 4))
def test_a_fault_at_an_edge_is_found(fault: str, tmp_path: Path) -> None:
    kernel, tag, right, wrong = FAULTS[fault]
    text = kernel_text(KERNELS[kernel][0])
    assert text.count(right) == 1
    told = findings(written(tmp_path, text.replace(right, wrong)), tag)
    assert any("of out: " in each for each in told), told


@pytest.mark.parametrize("head", [SM90, SM100])
def test_a_window_that_hides_no_key_of_a_call_changes_no_bit(
    head: str, tmp_path: Path
) -> None:
    found = []
    for name, more in (("plain", "mask: causal\n"), ("wide", CAUSAL.format(5000))):
        path = written(tmp_path, kernel_text(f"{head}{more}lse: true\n"), name)
        (case,) = (each for each in emulated_cases(path) if tag_of(each) == "ragged")
        (ready,) = rehearsals(path, cases=[case])[1]
        assert ready.run(schedules(0)[0]).findings == []
        found.append([output.numbers().tobytes() for output in ready.problem.outputs])
    assert found[0] == found[1]


def test_causal_is_a_window_with_nothing_on_the_right() -> None:
    texts = [
        kernel_text(SM90 + more).partition("DTYPE = ")[2]
        for more in (NEAR, "window: {left: 40, right: 0}\n")
    ]
    assert texts[0] == texts[1]
