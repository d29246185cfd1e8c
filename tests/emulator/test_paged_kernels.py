# SPDX-License-Identifier: Apache-2.0
"""Paged K and V: kernels of no shipped spec, pools apart, and faults that cases find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import support
from fmha_gen.build import render
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.emulator import ptx, walk
from fmha_gen.evidence.coverage import walked
from fmha_gen.evidence.rehearsal import Rehearsal, schedules
from fmha_gen.evidence.schedule_check import schedule_findings
from fmha_gen.evidence.tensors import NAN16, make_problem
from fmha_gen.ops.cases import relaunched, tiles_of, walks_for
from fmha_gen.ops.paged import slots_of
from fmha_gen.ops.varlen import rows_of
from fmha_gen.planning import plan

from .rehearsals import captured, damaged, findings, rehearsals, tag_of, tagged, written

SCHEDULE = schedules(0)[0]
SPEC = (
    "{{arch: sm90, op: fmha_fwd, dtype: bf16, batch: varlen, kv: {{paged: {{page: {}}}}},"
    " head_dim: {}, {}}}"
)
SPECS = {
    "boxes that are part of a page, a window and sinks": SPEC.format(
        48, 128, "mask: causal, window: {left: 100}, sink: true, lse: true"
    ),
    "pages longer than a KV tile": SPEC.format(528, 64, "mask: none, lse: true"),
    "pages of several KV tiles, other values": SPEC.format(
        256, "{qk: 192, v: 128}", "mask: causal"
    ),
    "packed heads, ALiBi": SPEC.format(
        64, 128, "mask: causal, alibi: true, heads: {q_per_kv: 8}, pack_gqa: true"
    ),
}
SPEC_100 = SPEC.replace("sm90", "sm100")
SPECS |= {
    "sm100, boxes that are part of a page, a window and sinks": SPEC_100.format(
        48, 64, "mask: causal, window: {left: 100}, sink: true, lse: true"
    ),
    "sm100, pages longer than a KV tile": SPEC_100.format(
        528, 96, "mask: none, lse: true"
    ),
    "sm100, pages of several KV tiles, other values": SPEC_100.format(
        256, "{qk: 192, v: 128}", "mask: causal"
    ),
    "sm100, keys apart": SPEC_100.format(
        64, 128, "mask: 'kv <= q and (kv < 4 or q - kv < 128)', heads: {q_per_kv: 8}"
    ),
}

STEM = "sm90_d128_bf16_causal_gqa4_page16_varlen_lse"
STEM_100 = "sm100_d128_bf16_causal_gqa4_page16_varlen_lse"
PAGE = "page_of_key = problem.block_table[problem.sequence, key // PAGE]"
MAP = "(row, 1, head, page, row)"
FAULTS = {
    "a table's row is the one before": (
        *("pages", "block_table[problem.sequence,"),
        "block_table[cutlass.max(problem.sequence - 1, 0),",
    ),
    "the rows of a table are side by side": (
        *("pages", PAGE),
        "table, width = problem.block_table, problem.block_table.shape[1]\n"
        "    table = cute.make_tensor(\n"
        "        table.iterator, cute.make_layout(table.shape, stride=(width, 1))\n"
        "    )\n"
        "    page_of_key = table[problem.sequence, key // PAGE]",
    ),
    "the page of the keys before": (
        *("pages", "key // PAGE]"),
        "cutlass.max(key // PAGE - 1, 0)]",
    ),
    "each box has the first one's page": (
        *("pages", "shuffle_sync(each, i) for each in places"),
        "shuffle_sync(each, 0) for each in places",
    ),
    "a page outside the pool is one of TMA's": (
        *(
            "outside",
            "page_of_key = cutlass.min(cutlass.max(page_of_key, 0), tma.tensor.shape[3] - 1)",
        ),
        "page_of_key = cutlass.max(page_of_key, 0)",
    ),
    "all of a page is in use": (
        *("pages", "cutlass.min(last_key + 1 - key + key % PAGE, PAGE)"),
        "Int32(PAGE)",
    ),
    "a row too many is in use": ("pages", "last_key + 1 - key", "last_key + 2 - key"),
    "boxes begin behind the last key": (
        *(
            "pages",
            "key = cutlass.min(first_key + cute.arch.lane_idx() * BOX_ROWS, last_key)",
        ),
        "key = first_key + cute.arch.lane_idx() * BOX_ROWS",
    ),
    "more keys than the table has": (
        "full",
        "seqused_k[at], 0), most)",
        "seqused_k[at], 0), most + 1)",
    ),
    "less keys than none": (
        *("mixed", "cutlass.max(problem.seqused_k[at], 0)"),
        "problem.seqused_k[at]",
    ),
    "maps begin a row late": ("pages", "(0, -PAGE, 0, 0)", "(0, 1 - PAGE, 0, 0)"),
    "no page is in use to its end": (
        "pages",
        "heads, pages, PAGE + 1)",
        "heads, pages, PAGE)",
    ),
    "pages are side by side": ("cache", MAP, "(row, 1, head, PAGE * row, row)"),
    "heads are side by side": ("far", MAP, "(row, 1, head_dim, page, row)"),
    "V is K": ("pages", "pages_tma(load, v)", "pages_tma(load, k)"),
}


FAULTS_100 = {
    "V is in the stages of K": (
        *("pages", "            kv_state.advance()  # K's\n"),
        "",
    ),
    "K is in every stage": (
        *("pages", "            kv_state.advance()  # V's\n"),
        "",
    ),
    "boxes begin behind the last key": FAULTS["boxes begin behind the last key"],
    "a row too many is in use": FAULTS["a row too many is in use"],
    "each box has the first one's page": FAULTS["each box has the first one's page"],
    "a box is where the one before it was": (
        *("pages", "boxes[None, None, i, state.index]"),
        "boxes[None, None, i // 2, state.index]",
    ),
    "heads are side by side": FAULTS["heads are side by side"],
    "V is K": FAULTS["V is K"],
    "K is of the query's head": (
        "pages",
        "load_pages(k, sK, pipes.kv, kv_state, block, head // Q_PER_KV, problem)",
        "load_pages(k, sK, pipes.kv, kv_state, block, head, problem)",
    ),
}


@pytest.mark.parametrize("name", support.rotated(SPECS, 2))
def test_pages_beside_other_features(name: str, tmp_path: Path) -> None:
    planned = plan.resolve(support.load_text(SPECS[name]))
    path = written(tmp_path, render.render_kernel(planned))
    _, ready = rehearsals(path, {"mixed", "pages", "full", "outside", "padded"})
    assert len(ready) == 5
    assert [each.run(SCHEDULE).findings for each in ready] == [[]] * len(ready)


def run(kernel: Rehearsal) -> dict[str, np.ndarray]:
    kernel.run(SCHEDULE)
    return {x.name: x.view.copy() for x in kernel.problem.outputs}


@pytest.mark.parametrize("stem", support.rotated([STEM, STEM_100], 1))
def test_no_key_of_a_sequence_enters_another(stem: str) -> None:
    """All keys of a sequence are NaN, and the others' bits stay."""
    (kernel,) = tagged(support.GENERATED / f"{stem}.py", ["pages"])
    before, poisoned = run(kernel), 5
    own = slots_of(kernel.spec, kernel.case)[poisoned]
    for name in "kv":
        kernel.problem[name].view[own] = NAN16
    after = run(kernel)
    for number, rows in enumerate(rows_of(kernel.case)):
        same = (before["out"][rows.q] == after["out"][rows.q]).all()
        assert same == (number != poisoned), number
        assert same == (before["lse"][:, rows.q] == after["lse"][:, rows.q]).all()


@pytest.mark.parametrize("stem", support.rotated([STEM, STEM_100], 1))
def test_a_launch_serves_other_lengths_and_tables(stem: str) -> None:
    """Between two runs nothing changes but what the tensors hold."""
    (kernel,) = tagged(support.GENERATED / f"{stem}.py", ["pages"])
    before, other = run(kernel), relaunched(kernel.case)
    problem = make_problem(kernel.spec, kernel.tiles, other)
    assert {x.name: x.placed for x in problem.inputs} == {
        x.name: x.placed for x in kernel.problem.inputs
    }
    assert (problem["block_table"].view != kernel.problem["block_table"].view).any()
    again = replace(kernel, case=other, problem=problem, truths={})
    assert again.run(SCHEDULE).findings == []
    assert (problem["out"].view != before["out"]).any()


WALKED = {
    "": ("", ""),
    "K is of the block behind": (
        "k_state,\n                block,\n",
        "k_state,\n                block + 1,\n",
    ),
    "each box has the first one's page": (
        "shuffle_sync(each, i) for each in places",
        "shuffle_sync(each, 0) for each in places",
    ),
    "a box a row late": (
        "domain_offset((row, 0), tma",
        "domain_offset((row + 1, 0), tma",
    ),
}


WALKED_100 = {
    **WALKED,
    "K is of the block behind": (
        "load_pages(k, sK, pipes.kv, kv_state, block,",
        "load_pages(k, sK, pipes.kv, kv_state, block + 1,",
    ),
}


@pytest.mark.parametrize("stem", [STEM, STEM_100])
@pytest.mark.parametrize("fault", support.rotated(WALKED, 2))
def test_a_walk_finds_a_fault_of_the_schedule(
    stem: str, fault: str, tmp_path: Path
) -> None:
    """The first of them is none."""
    path = support.GENERATED / f"{stem}.py"
    if fault:
        faults = WALKED if stem == STEM else WALKED_100
        path = damaged(tmp_path, stem, *faults[fault])
    constants = read_constants(path.read_text(encoding="utf-8"))
    spec, tiles = constants["SPEC"], tiles_of(constants)
    (case,) = (each for each in walks_for(spec, tiles) if tag_of(each) == "sms_7")
    text, (called,) = captured(path, [case])
    (launch,) = called.launched
    seen = walked(constants, case, launch, walk.prepare(ptx.parse(text)))
    assert bool(schedule_findings(seen, tiles, spec, case)) == bool(fault)


@pytest.mark.parametrize("fault", support.rotated(FAULTS, 2))
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    tag, right, wrong = FAULTS[fault]
    assert findings(damaged(tmp_path, STEM, right, wrong), tag)


@pytest.mark.parametrize("fault", support.rotated(FAULTS_100, 2))
def test_a_fault_on_blackwell_is_found(fault: str, tmp_path: Path) -> None:
    tag, right, wrong = FAULTS_100[fault]
    assert findings(damaged(tmp_path, STEM_100, right, wrong), tag)
