# SPDX-License-Identifier: Apache-2.0
"""Kernels of 8 bits run and hold their bounds; what is damaged in one is noticed.

Instructions of 8 bits have their own tests (`test_e4m3.py`), bounds in `tests/unit/test_e4m3.py`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fmha_gen.build import engine
from fmha_gen.evidence.rehearsal import Rehearsal, schedules
from fmha_gen.evidence.tensors import NAN8
from fmha_gen.ops.cases import Case
from fmha_gen.ops.e4m3 import natural_v, permute_v
from fmha_gen.ops.paged import slots_of
from fmha_gen.ops.varlen import rows_of
from numpy.typing import NDArray

from tests import support
from tests.linear_exp import o_of

from .rehearsals import (
    damaged,
    emulated_cases,
    findings,
    rehearsals,
    tag_of,
    tagged,
    written,
)

STEM = "sm90_d128_e4m3_permuted_full"
LINEAR = "sm90_d128_e4m3_permuted_linear_full"
LINEAR_CAUSAL = "sm90_d128_e4m3_permuted_linear_causal"
WITH_LSE = "sm90_d128_e4m3_causal_lse"
PACKED_ROWS = "sm90_d128_e4m3_linear_causal_varlen"
PAGED = "sm90_d128_e4m3_linear_causal_gqa4_page16_varlen"
LINEAR_64 = "sm90_d64_e4m3_permuted_linear_full"
SLICED = "sm90_d256_e4m3_permuted_linear_full"
ROWS = "sm90_d96_e4m3_linear_causal"
ON_SM100 = "sm100_d128_e4m3_full"
ON_SM100_WITH_LSE = "sm100_d128_e4m3_causal_lse"
PACKS = "S[r, c + n] for n in range(PACKED)"
WAIT = "            cute.arch.cp_async_bulk_wait_group(0, read=True)\n"
FENCE = '    cute.arch.fence_proxy("async.shared", space="cta")\n\n\ndef make_ring'
STAGES = "in cutlass.range_constexpr(V_STAGES):"
SUM = "rows_and_columns(acc_O)[r, HEAD_DIM_V // QUAD]"
GOES_ON = "Boolean(i % FLUSH_BLOCKS != 0)"
FLUSH = "    if i % FLUSH_BLOCKS == FLUSH_BLOCKS - 1:\n        add_part(mma)\n"
REFERENCE = "shift * scale_log2 - (P_OFFSET - headroom)"
NO_KEYS = (
    "        if problem.seqlen_kv == 0:\n"
    "            mma.acc_O.fill(0.0)  # the row that it loaded may be NaN\n"
)
ADD = "        add_part(mma)\n"
SCALE_PART = "        scale_row(part_O, r, factor)\n"
FIRST = "    2.0  # [log2: of a tile's first reference"
PLACE = "place + first // PACKED,"
CHANGE = " * tile_scale + (offset - row.offset)"
DIFFERENCE = "references = (-reference, -reference)"
LSE = "lse = row.reference * tile_scale - row.offset"
ROWS_OF_SM90 = "arch: sm90\nop: fmha_fwd\ndtype: e4m3\n"
OF_SM90 = ROWS_OF_SM90 + "v_layout: permuted\n"
OF_SM100 = "arch: sm100\nop: fmha_fwd\ndtype: e4m3\n"

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
    "a part that keeps its scale": ("rising", SCALE_PART, ""),
    "a stage without ones": (
        "rising",
        STAGES,
        STAGES.replace("V_STAGES", "V_STAGES - 1"),
    ),
    "ones without a fence": ("ragged", FENCE, "\n\ndef make_ring"),
    "a column of V for the sums": (
        "ragged",
        SUM,
        SUM.replace("QUAD]", "QUAD - 1]"),
    ),
    "sums of the other row": ("ragged", SUM, SUM.replace("[r,", "[1 - r,")),
    "a part that goes on after its flush": (
        "rising",
        GOES_ON,
        "Boolean(i != 0)",
    ),
    "a part that begins anew before its flush": (
        "rising",
        GOES_ON,
        GOES_ON.replace("!=", "=="),
    ),
    "a flush of the first block of two": (
        "rising",
        FLUSH,
        FLUSH.replace("FLUSH_BLOCKS - 1", "0"),
    ),
    "a first slack that the reference has not": (
        "rising",
        REFERENCE,
        REFERENCE.replace("(P_OFFSET - headroom)", "P_OFFSET"),
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


LINEAR_DAMAGES = {
    "codes up to that of NaN": (
        "rising",
        "AT_1 = 3.316998481750488e-06 ",
        "AT_1 = 3.3974647521972656e-06 ",
    ),
    "codes below 0": (
        "ragged",
        "cvt.rn.relu.f16x2.f32 low",
        "cvt.rn.f16x2.f32 low",
    ),
    "nine codes from a power to the next": (
        "ragged",
        "OCTAVE = 4.76837158203125e-07 ",
        "OCTAVE = 5.364418029785156e-07 ",
    ),
    "seven codes from a power to the next": (
        "exact",
        "OCTAVE = 4.76837158203125e-07 ",
        "OCTAVE = 4.172325134277344e-07 ",
    ),
    "codes in another order": ("ragged", "0x6420", "0x6240"),
    "a slack of two powers": ("rising", "RESCALE_SLACK = 0.8 ", "RESCALE_SLACK = 2.0 "),
    "a first slack that the reference has not": (
        "rising",
        REFERENCE,
        REFERENCE.replace("(P_OFFSET - headroom)", "P_OFFSET"),
    ),
    "a part that keeps its scale": ("rising", SCALE_PART, ""),
}
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
# S and a part of O share registers.
OVERLAID = "head_dim: 256\ntile: {q: 128, kv: 128}\n"
FIRST_SLICE = (
    "    issue_pv(mma, v_state.index, 0)\n"
    "    cute.arch.barrier_arrive(**turn_of(mma.warpgroup_idx + 1))\n"
)
SLICES = (
    "    for n in cutlass.range_constexpr(PV_SLICES):\n"
    "        add_slice(mma, v_state.index, n)\n"
)
NEXT_S = (
    "    rings.k.consumer_wait(k_state, rings.k.consumer_try_wait(k_state))\n"
    "    acc_S = issue_qk(mma, q_state.index, k_state.index)\n"
)
FREE_V = "    rings.v.consumer_release(v_state)\n"
FREE_K = "    rings.k.consumer_release(k_state)\n"
S_IS_THERE = "    warpgroup.wait_group(0)\n"
WAITS_FOR_SLICE = "    warpgroup.wait_group(0)\n    part = part_of(mma, n)\n"
DAMAGES_OF_OVERLAID = {
    "a slice that is not added": (
        *("exact", SLICES + NEXT_S),
        SLICES.replace("(PV_SLICES)", "(1)") + NEXT_S,
    ),
    "a slice that is not over": (
        *("exact", WAITS_FOR_SLICE),
        WAITS_FOR_SLICE.partition("\n")[2],
    ),
    "a first slice whose place is the last one's": (
        "exact",
        "mma.acc_O.iterator + first",
        "mma.acc_O.iterator + first // 2",
    ),
    "columns of the first slice for the last": (
        "exact",
        "rings.sV.iterator + n * PV_COLUMNS * V_SWIZZLE",
        "rings.sV.iterator",
    ),
    "S before the last slice is in O": (
        *("exact", SLICES + NEXT_S),
        SLICES.replace("(PV_SLICES)", "(1)")
        + NEXT_S
        + "    add_slice(mma, v_state.index, 1)\n",
    ),
    "P of no block before the last slice": (
        *("exact", WAITS_FOR_SLICE),
        f"    cute.recast_tensor(mma.tOrP, Int32).fill(0)\n{WAITS_FOR_SLICE}",
    ),
    "V's stage is free before the last slice": (
        *("waves", SLICES + NEXT_S + FREE_V),
        FREE_V + SLICES + NEXT_S,
    ),
    "K's stage is free before S is there": (
        *("waves", FREE_V + S_IS_THERE + FREE_K),
        FREE_V + FREE_K + S_IS_THERE,
    ),
    "a turn that is passed on twice": (
        "waves",
        FIRST_SLICE,
        FIRST_SLICE + FIRST_SLICE.partition("\n")[2],
    ),
    "a turn that is not passed on": (
        "exact",
        FIRST_SLICE,
        FIRST_SLICE.partition("\n")[0] + "\n",
    ),
    "O that keeps its scale": ("rising", "        scale_row(acc_O, r, factor)\n", ""),
    "a branch that is taken": ("exact", 'f" {number + 2};"', '" 1;"'),
}
BLOCKS = "head_dim: 128\nv_layout: permuted\n"
BLOCKS_WITH_LSE = "head_dim: 128\nmask: causal\nlse: true\n"
BLOCKS_64 = "head_dim: 64\nmask: causal\n"
DAMAGES_OF_BLOCKS = {
    "K's factor is that of the block before": (
        *(BLOCKS, "descales", "tile_scale, batch, head, blocks - 2 - i"),
        "tile_scale, batch, head, blocks - 1 - i",
    ),
    "V's factor is that of the next block": (
        *(BLOCKS, "descales", "factor_of_v(descales, batch, head, blocks - 1 - i)"),
        "factor_of_v(descales, batch, head, blocks - 2 - i)",
    ),
    "the last V's factor is the first one's": (
        *(BLOCKS, "descales", "factor_of_v(descales, batch, head, 0)"),
        "factor_of_v(descales, batch, head, blocks - 1)",
    ),
    "row sums have V's factor, too": (
        *(BLOCKS, "descales", "v_scale if i < HEAD_DIM_V // 2 else 1.0"),
        "v_scale",
    ),
    "a tile has the factor of the tile before": (
        *(BLOCKS_WITH_LSE, "descales", "next_batch, next_head, next_q_tile\n"),
        "batch, head, q_tile\n",
    ),
    "a warpgroup has the factor of the first": (
        *(BLOCKS_64, "ragged", "q_tile * TILE_Q + warpgroup_idx * WARPGROUP_ROWS"),
        "q_tile * TILE_Q",
    ),
    "a factor behind the last one": (
        *(BLOCKS_64, "far", "cutlass.min(row, problem.seqlen_q - 1)"),
        "row",
    ),
    "a slack of two powers": (
        *(BLOCKS_WITH_LSE, "rising", "LIMIT_BITS = 1091357900 "),
        "LIMIT_BITS = 1092616192 ",
    ),
    "an LSE with P's offset": (
        *(BLOCKS_WITH_LSE, "ragged", "stats.shift[r] - P_OFFSET + "),
        "stats.shift[r] + ",
    ),
    "a far row's first block is not renewed": (
        *(BLOCKS, "logits_1e4", "stats.limit[r] == NO_LIMIT"),
        "stats.limit[r] == NO_LIMIT + 1",
    ),
    "a far row's P with what fp32 has rounded": (
        *(BLOCKS_WITH_LSE, "all_1e4_steep", "select_(far, largest, (stats"),
        "select_(far, Float32(0.0), (stats",
    ),
    "a row without keys keeps a reference": (
        *(BLOCKS_WITH_LSE, "ragged", "select_(largest > LEAST_MAX,"),
        "select_(largest >= LEAST_MAX,",
    ),
}
MEET = "            cute.arch.sync_warp()\n"
DAMAGES_OF_ROWS = {
    "all squares in the place of the first": (
        "ragged",
        "along(target, key, V_ROWS, V_SWIZZLE)",
        "target",
    ),
    "odd columns in the place of even ones": (
        "ragged",
        "even = cutlass.select_(lower, Int32(EVEN_BYTES), Int32(ODD_BYTES))",
        "even = cutlass.select_(lower, Int32(ODD_BYTES), Int32(EVEN_BYTES))",
    ),
    "V^T without a fence": (
        "ragged",
        f'            cute.arch.fence_proxy("async.shared", space="cta")\n{MEET}',
        MEET,
    ),
    "a stage of V^T that is not free": (
        "waves",
        "            rings.v.sync_object_empty.wait(v_state.index, v_state.phase)\n",
        "",
    ),
    "rows that are not there": (
        "ragged",
        "            rings.rows.consumer_wait(rows_state)\n",
        "",
    ),
}
SM100_DAMAGES = {
    "P where 16 bits have it": (ON_SM100, "ragged", PLACE, "place + first // 2,"),
    "a slack of two powers": (
        *(ON_SM100, "rising", "RESCALE_SLACK = 0.8 "),
        "RESCALE_SLACK = 2.0 ",
    ),
    "an offset of none": (ON_SM100, "ragged", "P_OFFSET = 8.0 ", "P_OFFSET = 2.0 "),
    "V without its factor": (
        *(ON_SM100, "descales", "v_descale * cute.arch.rcp_approx(row_sum)"),
        "cute.arch.rcp_approx(row_sum)",
    ),
    "scores without Q's factor": (
        *(ON_SM100, "descales", " * descales.q[batch, head]"),
        "",
    ),
    "a first offset that O keeps": (ON_SM100, "rising", CHANGE, " * tile_scale"),
    "a reference that is rounded": (
        *(ON_SM100, "all_1e4_steep", DIFFERENCE),
        f"shift, reference = shift - reference * scale, Float32(0.0)\n    {DIFFERENCE}",
    ),
    "an LSE with P's offset": (
        *(ON_SM100_WITH_LSE, "ragged", LSE),
        LSE.replace(" - row.offset", ""),
    ),
}
PACKED_DAMAGES = {
    "V's factor is the first sequence's": (
        *(PACKED_ROWS, "descales", "descales.v[problem.sequence, head]"),
        "descales.v[0, head]",
    ),
    "scores have the factors of the tile before": (
        *(PACKED_ROWS, "descales", "more, next_problem.sequence,"),
        "more, problem.sequence,",
    ),
    "V is that of the next sequence, too": (
        *(PACKED_ROWS, "mixed", "partition_rows(v, rings.sRows, head, end, rows)"),
        "partition_rows(v, rings.sRows, head, v.tensor.shape[3] - 1, rows)",
    ),
    "a work tile that a transposing warp may still read": (
        *(PACKED_ROWS, "tiles", "TILE_RELEASES = 11 "),
        "TILE_RELEASES = 10 ",
    ),
    "both warps load the first half": (
        *(PAGED, "pages", "cute.arch.warp_idx()) - 1) * V_BOXES"),
        "cute.arch.warp_idx()) - 1) * 0",
    ),
    "rows are transposed that are on their way": (
        *(PAGED, "pages", "state_at(rows_user, ROWS_STAGES, before + i - 1)"),
        "state_at(rows_user, ROWS_STAGES, before + i)",
    ),
    "each tile begins with the first stage": (
        *(PAGED, "pages", "        before += blocks\n"),
        "",
    ),
    "V of another block": (
        *(
            PAGED,
            "steep",
            "                    blocks - 1 - i,\n                    head // Q_PER_KV",
        ),
        "                    i,\n                    head // Q_PER_KV",
    ),
}
# All eight rows below V^T are ones. P of a first reference has a limit that is lower by as much. Of
# two offsets the one is as good as the other, as row sums have it, too, while no code is NaN.
NO_DAMAGES = {
    "another column of ones": (STEM, "ragged", SUM, SUM.replace("QUAD]", "QUAD + 1]")),
    "a headroom of three powers": (STEM, "rising", FIRST, FIRST.replace("2", "3", 1)),
    "a code less": (
        *(LINEAR, "rising", "AT_1 = 3.316998481750488e-06 "),
        "AT_1 = 3.2573938369750976e-06 ",
    ),
}


@pytest.mark.parametrize("name", support.rotated(DAMAGES, 2))
def test_a_damage_is_noticed(name: str, tmp_path: Path) -> None:
    tag, right, wrong = DAMAGES[name]
    assert findings(damaged(tmp_path, STEM, right, wrong), tag)


@pytest.mark.parametrize("name", support.rotated(LINEAR_DAMAGES, 1))
def test_a_damage_of_the_line_is_noticed(name: str, tmp_path: Path) -> None:
    tag, right, wrong = LINEAR_DAMAGES[name]
    assert findings(damaged(tmp_path, LINEAR, right, wrong), tag)


@pytest.mark.parametrize("name", support.rotated(DAMAGES_OF_SLICES, 1))
def test_a_damage_of_slices_is_noticed(name: str, tmp_path: Path) -> None:
    tag, right, wrong = DAMAGES_OF_SLICES[name]
    assert findings(damaged(tmp_path, SLICED, right, wrong), tag)


@pytest.mark.parametrize("name", support.rotated(DAMAGES_OF_OVERLAID, 1))
def test_a_damage_of_shared_registers_is_noticed(name: str, tmp_path: Path) -> None:
    tag, right, wrong = DAMAGES_OF_OVERLAID[name]
    text = support.kernel_text(f"{OF_SM90}{OVERLAID}exp: linear\n")
    assert text.count(right) == 1, right
    assert findings(written(tmp_path, text.replace(right, wrong)), tag)


def test_when_the_turn_passes_on_is_order_alone(tmp_path: Path) -> None:
    """MMAs of both warpgroups may be queued: no result depends on it."""
    text = support.kernel_text(f"{OF_SM90}{OVERLAID}exp: linear\n")
    issue, turn, _ = FIRST_SLICE.split("\n")
    assert text.count(FIRST_SLICE) == 1
    text = text.replace(FIRST_SLICE, f"{turn}\n{issue}\n")
    assert findings(written(tmp_path, text), "waves") == []


@pytest.mark.parametrize("name", support.rotated(DAMAGES_OF_ROWS, 1))
def test_a_damage_of_transposing_is_noticed(name: str, tmp_path: Path) -> None:
    tag, right, wrong = DAMAGES_OF_ROWS[name]
    assert findings(damaged(tmp_path, ROWS, right, wrong), tag)


@pytest.mark.parametrize("name", support.rotated(DAMAGES_OF_BLOCKS, 1))
def test_a_damage_of_factors_by_block_is_noticed(name: str, tmp_path: Path) -> None:
    fields, tag, right, wrong = DAMAGES_OF_BLOCKS[name]
    text = support.kernel_text(f"{ROWS_OF_SM90}{fields}descale: block\n")
    assert text.count(right) == 1, right
    assert findings(written(tmp_path, text.replace(right, wrong)), tag)


@pytest.mark.parametrize("name", support.rotated(SM100_DAMAGES, 2))
def test_a_damage_on_sm100_is_noticed(name: str, tmp_path: Path) -> None:
    stem, tag, right, wrong = SM100_DAMAGES[name]
    assert findings(damaged(tmp_path, stem, right, wrong), tag)


@pytest.mark.parametrize("name", support.rotated(PACKED_DAMAGES, 1))
def test_a_damage_of_packed_sequences_is_noticed(name: str, tmp_path: Path) -> None:
    stem, tag, right, wrong = PACKED_DAMAGES[name]
    assert findings(damaged(tmp_path, stem, right, wrong), tag)


@functools.cache
def undisturbed(path: Path) -> tuple[Rehearsal, NDArray[Any]]:
    """A kernel that has run a case of several sequences, and O as it was then."""
    tag = "outside" if "_page" in path.stem else "mixed"
    (kernel,) = tagged(path, [tag])
    kernel.run(schedules(0)[0])
    return kernel, kernel.problem["out"].view.copy()


def entered(path: Path, poisoned: int) -> bool:
    """Whether others' bits change where all of a sequence is NaN."""
    kernel, before = undisturbed(path)
    rows, saved = rows_of(kernel.case), []
    own: Any = rows[poisoned].kv
    if "_page" in path.stem:
        own = slots_of(kernel.spec, kernel.case)[poisoned]
    for name in "kv":
        view = kernel.problem[name].view
        saved.append((view, view[own].copy()))
        view[own] = NAN8
    kernel.run(schedules(0)[0])
    out = kernel.problem["out"].view
    changed = [(before[each.q] != out[each.q]).any() for each in rows]
    for view, numbers in saved:
        view[own] = numbers
    assert changed.pop(poisoned)
    return any(changed)


@pytest.mark.parametrize(
    ("stem", "poisoned"), [(PACKED_ROWS, 0), (PACKED_ROWS, 2), (PAGED, 0)]
)
def test_no_value_of_a_sequence_enters_another(stem: str, poisoned: int) -> None:
    assert not entered(support.GENERATED / f"{stem}.py", poisoned)


@pytest.mark.parametrize("wrong", [ADD, NO_KEYS + ADD], ids=["never", "too early"])
def test_o_without_keys_is_cleared_once_its_part_was_added(
    wrong: str, tmp_path: Path
) -> None:
    """The fourth sequence has no keys, and loads the last row of the third."""
    assert entered(damaged(tmp_path, PACKED_ROWS, ADD + NO_KEYS, wrong), 2)


@pytest.mark.parametrize("name", support.rotated(NO_DAMAGES, 1))
def test_what_is_as_good_is_not(name: str, tmp_path: Path) -> None:
    stem, tag, right, wrong = NO_DAMAGES[name]
    assert not findings(damaged(tmp_path, stem, right, wrong), tag)


@pytest.mark.parametrize("stem", support.rotated([STEM, LINEAR], 1))
def test_sums_that_stay_in_the_tensor_cores_are_noticed(
    stem: str, tmp_path: Path
) -> None:
    """By V whose mean is not the same throughout, or row sums would lose as much."""
    text = (support.GENERATED / f"{stem}.py").read_text("utf-8")
    assert text.count(FLUSH) == text.count(GOES_ON) == 1
    wrong = text.replace(FLUSH, "").replace(GOES_ON, "Boolean(i != 0)")
    (found,) = findings(written(tmp_path, wrong, stem), "mean_v")
    assert "its mean square error" in found


def test_so_they_are_where_fp32_has_the_row_sums(tmp_path: Path) -> None:
    text = (support.GENERATED / f"{WITH_LSE}.py").read_text("utf-8")
    begins = "        mma.acc_O.fill(-0.0)"
    for right, wrong in (
        ("    pack_p(mma, acc_S)\n    add_part(mma)\n", "    pack_p(mma, acc_S)\n"),
        ("tOrV, False)", "tOrV, True)"),
        (begins, f"        mma.part_O.fill(0.0)\n{begins}"),
    ):
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    (found,) = findings(written(tmp_path, text, WITH_LSE), "mean_v")
    assert "of out: wrong" in found


# Each case in which a damage is noticed.
UNDAMAGED = {
    f"{stem} {tag}": (stem, tag)
    for stem, tag in sorted(
        {(STEM, tag) for tag, _, _ in DAMAGES.values()}
        | {(LINEAR, tag) for tag, _, _ in LINEAR_DAMAGES.values()}
        | {(SLICED, tag) for tag, _, _ in DAMAGES_OF_SLICES.values()}
        | {(ROWS, tag) for tag, _, _ in DAMAGES_OF_ROWS.values()}
        | {(stem, tag) for stem, tag, _, _ in SM100_DAMAGES.values()}
        | {(stem, tag) for stem, tag, _, _ in PACKED_DAMAGES.values()}
        | {(stem, "mean_v") for stem in (STEM, LINEAR, WITH_LSE)}
    )
}


@pytest.mark.parametrize("name", support.rotated(UNDAMAGED, 2))
def test_what_is_not_damaged_holds(name: str) -> None:
    stem, tag = UNDAMAGED[name]
    assert findings(support.GENERATED / f"{stem}.py", tag) == []


def ran(stem: str, case: Case, **codes: tuple[tuple[int, ...], int]) -> Rehearsal:
    """A kernel that has run a case. codes: by tensor, a place and the code that is put there."""
    kernel = of_case(stem, case)
    before = {}
    for name, (place, code) in codes.items():
        before[name] = kernel.problem[name].view[place]
        kernel.problem[name].view[place] = code
    kernel.run(schedules(0)[0])
    for name, (place, _) in codes.items():
        kernel.problem[name].view[place] = before[name]
    return kernel


@functools.cache
def of_case(stem: str, case: Case) -> Rehearsal:
    """One of our own cases of a kernel; all of them are captured by the same compile."""
    cases = [NAN, *LINES.values()]
    _, ready = rehearsals(support.GENERATED / f"{stem}.py", cases=cases)
    return ready[cases.index(case)]


NAN = Case("nan", batch=1, kv_heads=1, q=200, kv=300)
LINES = {
    steep: Case("line", batch=1, kv_heads=1, q=192, kv=700, scale_factor=steep)
    for steep in (1.0, 3.0)
}


@pytest.mark.parametrize("steep", LINES)
def test_the_line_is_that_of_the_model(steep: float) -> None:
    """But for what tensor cores cut off PV: a third of P's error at most."""
    case = LINES[steep]
    kernel = ran(LINEAR_64, case)
    found, exact = kernel.problem["out"].numbers()[0, :, 0], kernel.truth().out[0, :, 0]
    q, k, v = (kernel.problem[name].numbers() for name in "qkv")
    rows = natural_v(v, case.kv) if kernel.spec["v_layout"] == "permuted" else v
    of_head = q[0, :, 0], k[0, :, 0], rows[0, :, 0]
    ours = o_of(support.constants(LINEAR_64), *of_head, 64**-0.5 * steep, cut_off=True)
    assert np.linalg.norm(found - ours) < np.linalg.norm(found - exact) / 3


def are_nan(stem: str, **codes: Any) -> NDArray[np.bool_]:
    """Which elements of O, [rows, head_dim], are NaN."""
    return np.isnan(ran(stem, NAN, **codes).problem["out"].numbers()[0, :, 0])


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("stem", [STEM, LINEAR_CAUSAL, ON_SM100])
def test_nan_in_a_query_is_in_its_row(stem: str, code: int) -> None:
    found = are_nan(stem, q=((0, 70, 0, 5), code))
    assert found[70].all() and found.sum() == 128


@pytest.mark.parametrize("stem", [STEM, LINEAR_CAUSAL, ON_SM100])
def test_nan_in_a_key_is_in_the_rows_that_see_it(stem: str) -> None:
    found = are_nan(stem, k=((0, 150, 0, 5), 0xFF))
    first = 50 if stem == LINEAR_CAUSAL else 0  # whose last key it is
    assert found[first:].all() and not found[:first].any()


@pytest.mark.parametrize("stem", [STEM, LINEAR_CAUSAL, ON_SM100])
def test_nan_in_v_is_in_its_column_of_all_rows_of_the_tile(stem: str) -> None:
    """P is 0 where a row does not see the key, as most of the last tile do not see key 280."""
    key = 280
    place: tuple[int, ...] = (0, key, 0, 9)
    if support.constants(stem)["SPEC"].get("v_layout") == "permuted":
        places = permute_v(np.arange(1, NAN.kv + 1).reshape(1, -1, 1, 1))
        place = (0, 0, 9, int(np.flatnonzero(places[0, 0, 0] == key + 1)[0]))
    found = are_nan(stem, v=(place, 0x7F))
    first = (
        128 if stem == LINEAR_CAUSAL else 0
    )  # the other tile's last block ends before
    assert found[first:, 9].all() and found.sum() == len(found[first:])


NOT_SHIPPED = {
    "gqa": OF_SM90 + "head_dim: 64\nheads: {q_per_kv: 8}\nlse: true\n"
    "seqlen: {kv: 1000}\n",
    "fp16": OF_SM90 + "head_dim: 128\nout_dtype: fp16\nmask: causal\nlse: true\n"
    "heads: {q_per_kv: 4}\ndescale: head\n",
    "window": OF_SM90 + "head_dim: 128\nmask: causal\nwindow: {left: 255}\n"
    "descale: head\n",
    "one_q_stage": OF_SM90 + "head_dim: 128\ntile: {q: 128, kv: 128}\n"
    "stages: {q: 1}\ndescale: head\n",
    "pack": OF_SM90 + "head_dim: 64\nheads: {q_per_kv: 4}\npack_gqa: true\n"
    "mask: causal\ndescale: head\n",
    "pack_3": OF_SM90 + "head_dim: 64\nheads: {q_per_kv: 3}\npack_gqa: true\n"
    "lse: true\n",
    "slices": OF_SM90 + "head_dim: 256\nmask: causal\nlse: true\ndescale: head\n",
    "overlaid": OF_SM90 + OVERLAID + "exp: linear\ndescale: head\n",
    "overlaid_lse": OF_SM90 + OVERLAID + "mask: causal\nlse: true\n",
    # With exp: linear ptxas serialises it, whatever the groups and the output.
    "overlaid_window": OF_SM90 + OVERLAID + "mask: causal\n"
    "window: {left: 300}\nheads: {q_per_kv: 8}\npack_gqa: true\nout_dtype: fp16\n",
    "overlaid_rows": ROWS_OF_SM90 + OVERLAID + "mask: causal\nlse: true\n"
    "descale: head\n",
    "blocks_gqa": OF_SM90 + "head_dim: 64\nheads: {q_per_kv: 4}\nlse: true\n"
    "descale: block\n",
    "blocks_window": ROWS_OF_SM90 + "head_dim: 128\nmask: causal\n"
    "window: {left: 300}\nheads: {q_per_kv: 2}\ndescale: block\n",
    "blocks_one_q_stage": ROWS_OF_SM90 + "head_dim: 128\nmask: causal\nlse: true\n"
    "tile: {q: 128, kv: 64}\nstages: {q: 1}\ndescale: block\n",
    "blocks_fixed": ROWS_OF_SM90 + "head_dim: 96\nout_dtype: fp16\n"
    "seqlen: {q: 300, kv: 290}\ndescale: block\n",
    "blocks_wide": ROWS_OF_SM90 + "head_dim: {qk: 192, v: 128}\nmask: causal\n"
    "lse: true\ndescale: block\n",
    "rows_pack": ROWS_OF_SM90 + "head_dim: 96\nheads: {q_per_kv: 4}\n"
    "pack_gqa: true\nlse: true\n",
    "rows_slices": ROWS_OF_SM90 + "head_dim: 256\nmask: causal\nlse: true\n"
    "descale: head\n",
    "sm100_single": OF_SM100 + "head_dim: 64\nout_dtype: fp16\nmask: causal\n"
    "lse: true\nschedule: single\ndescale: head\n",
    "sm100_window": OF_SM100 + "head_dim: 128\nheads: {q_per_kv: 4}\nlse: true\n"
    "tile: {kv: 64}\nwindow: {left: 500, right: 9}\ndescale: head\n",
    "sm100_fixed": OF_SM100 + "head_dim: 128\nseqlen: {kv: 290}\n"
    "schedule: single\ntile: {kv: 96}\n",
}
TAGS = ("ragged", "strided", "waves", "rising", "short_kv", "descales", "plain")
PACKED = ROWS_OF_SM90 + "batch: varlen\n"
PACKED_NOT_SHIPPED = {
    "plain": PACKED + "head_dim: 64\nout_dtype: fp16\nexp: linear\n",
    "gqa": PACKED + "head_dim: 64\nmask: causal\nlse: true\nheads: {q_per_kv: 8}\n"
    "descale: head\nkv: {paged: {page: 48}}\n",
    "one_q_stage": PACKED + "head_dim: 128\nmask: causal\nwindow: {left: 255}\n"
    "exp: linear\nstages: {q: 1}\nkv: {paged: {page: 528}}\n",
    "overlaid": PACKED + OVERLAID + "lse: true\nkv: {paged: {page: 16}}\n",
}
PACKED_TAGS = ("mixed", "padded", "outside", "rising", "descales", "pages", "full")


def run_some(path: Path, tags: tuple[str, ...], least: int) -> None:
    """Assert that three of a kernel's cases with these tags hold; it has so many at least."""
    cases = {tag_of(each): each for each in emulated_cases(path)}
    known = [tag for tag in tags if tag in cases]
    assert len(known) >= least
    chosen = [cases[tag] for tag in support.rotated(known, 3)]
    for kernel in rehearsals(path, cases=chosen)[1]:
        assert kernel.run(schedules(0)[0]).findings == [], kernel.case


@pytest.mark.parametrize("name", support.rotated(NOT_SHIPPED, 1))
def test_kernels_that_are_not_shipped(name: str, tmp_path: Path) -> None:
    specs, made = tmp_path / "specs", tmp_path / "generated"
    specs.mkdir()
    (specs / "kernel.yaml").write_text(NOT_SHIPPED[name], "utf-8")
    assert engine.build([specs], made).failures == ()
    run_some(made / "kernel.py", TAGS, 5)


@pytest.mark.parametrize("name", support.rotated(PACKED_NOT_SHIPPED, 1))
def test_packed_kernels_that_are_not_shipped(name: str, tmp_path: Path) -> None:
    text = support.kernel_text(PACKED_NOT_SHIPPED[name])
    run_some(written(tmp_path, text, "kernel"), PACKED_TAGS, 4)
