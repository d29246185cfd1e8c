# SPDX-License-Identifier: Apache-2.0
"""Kernels of 8 bits run and hold their bounds; what is damaged in one is noticed.

Instructions of 8 bits have their own tests (`test_e4m3.py`), bounds in `tests/unit/test_e4m3.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fmha_gen.build import engine
from fmha_gen.evidence.rehearsal import schedules

from tests import support

from .rehearsals import damaged, findings, rehearsals, tagged

STEM = "sm90_d128_e4m3_full"
PACKS = "S[r, c + n] for n in range(PACKED)"
WAIT = "            cute.arch.cp_async_bulk_wait_group(0, read=True)\n"
BASE = "arch: sm90\nop: fmha_fwd\ndtype: e4m3\nv_layout: permuted\n"

DAMAGES = {
    "keys in natural order": (
        "ragged",
        PACKS,
        PACKS.replace("range(PACKED)", "(0, 2, 1, 3)"),
    ),
    "a slack of two powers": ("rising", "RESCALE_SLACK = 0.8 ", "RESCALE_SLACK = 2.0 "),
    "an offset of none": ("ragged", "P_OFFSET = 8.0 ", "P_OFFSET = 0.0 "),
    "V without its factor": (
        *("descales", "descale * cute.arch.rcp_approx(row_sum)"),
        "cute.arch.rcp_approx(row_sum)",
    ),
    "scores without K's factor": ("descales", " * descales.k[batch, head]", ""),
    "the scale of the first tile": (
        *("descales", "        scale_log2 = next_scale_log2\n"),
        "",
    ),
    "O's buffer before O has left": ("tiles", WAIT, "            pass\n"),
    "a part that keeps its scale": (
        *("rising", "        scale_row(part_O, r, factor)\n"),
        "",
    ),
    "O of the tile before": (
        "tiles",
        "        mma.acc_O.fill(-0.0)  # to which any part adds up to itself\n",
        "",
    ),
    "a block of V behind its own": (
        *("exact", "v.atom, tVgV[None, block + 1], tVsV"),
        "v.atom, tVgV[None, block + 1 - block % 2], tVsV",
    ),
}


SLICED = "sm90_d256_e4m3_linear_full"
DAMAGES_OF_SLICES = {
    "a slice that keeps its scale": ("rising", "        stats.late[r] = factor\n", ""),
    "a last block's slices with a factor of another's": (
        "rising",
        "        for r in cutlass.range_constexpr(ROWS_PER_THREAD):\n"
        "            stats.late[r] = Float32(1.0)\n",
        "",
    ),
    "a slice that is not over": (
        "exact",
        "    warpgroup.wait_group(0)\n    O, part",
        "    O, part",
    ),
    "another slice's columns": (
        "exact",
        "issue_pv(mma, v_stage, n + 1)",
        "issue_pv(mma, v_stage, n)",
    ),
}


@pytest.mark.parametrize("name", DAMAGES_OF_SLICES)
def test_a_damage_of_slices_is_noticed(name: str, tmp_path: Path) -> None:
    tag, right, wrong = DAMAGES_OF_SLICES[name]
    assert findings(damaged(tmp_path, SLICED, right, wrong), tag)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_is_noticed(name: str, tmp_path: Path) -> None:
    tag, right, wrong = DAMAGES[name]
    assert findings(damaged(tmp_path, STEM, right, wrong), tag)


@pytest.mark.parametrize("tag", sorted({tag for tag, _, _ in DAMAGES.values()}))
def test_what_is_not_damaged_holds(tag: str) -> None:
    for kernel in tagged(support.GENERATED / f"{STEM}.py", [tag]):
        assert kernel.run(schedules(0)[0]).findings == []


@pytest.mark.parametrize(
    "fields",
    [
        "head_dim: 64\nheads: {q_per_kv: 8}\nlse: true\nseqlen: {kv: 1000}\n",
        "head_dim: 128\nout_dtype: fp16\nmask: causal\nlse: true\nheads: {q_per_kv: 4}\n"
        "descale: head\n",
        "head_dim: 128\nmask: causal\nwindow: {left: 255}\ndescale: head\n",
        "head_dim: 128\ntile: {q: 128, kv: 128}\nstages: {q: 1}\ndescale: head\n",
        "head_dim: 64\nheads: {q_per_kv: 4}\npack_gqa: true\nmask: causal\ndescale: head\n",
        "head_dim: 64\nheads: {q_per_kv: 3}\npack_gqa: true\nlse: true\n",
        "head_dim: 256\nmask: causal\nlse: true\ndescale: head\n",
    ],
    ids=["gqa", "fp16", "window", "one_q_stage", "pack", "pack_3", "slices"],
)
def test_kernels_that_are_not_shipped(fields: str, tmp_path: Path) -> None:
    specs, made = tmp_path / "specs", tmp_path / "generated"
    specs.mkdir()
    (specs / "kernel.yaml").write_text(BASE + fields, "utf-8")
    built = engine.build([specs], made)
    assert built.failures == ()
    tags = ["ragged", "strided", "waves", "rising", "short_kv", "descales", "plain"]
    _, ready = rehearsals(made / "kernel.py", tags)
    assert len(ready) >= len(tags) - 2
    for kernel in ready:
        assert kernel.run(schedules(0)[0]).findings == []
