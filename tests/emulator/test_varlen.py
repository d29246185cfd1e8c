# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: kernels of no shipped spec, sequences apart, and faults that cases find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

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
from fmha_gen.ops.cases import Case, relaunched, tiles_of, walks_for
from fmha_gen.ops.varlen import rows_of
from fmha_gen.planning import plan

from .rehearsals import captured, damaged, findings, rehearsals, tag_of, tagged, written

SCHEDULE = schedules(0)[0]
SPEC = "{{arch: sm90, op: fmha_fwd, dtype: bf16, batch: varlen, head_dim: {}, {}}}"
SPECS = {
    "O from registers": SPEC.format(256, "mask: causal, lse: true"),
    "a window and sinks": SPEC.format(
        128, "mask: causal, window: {left: 100}, sink: true, lse: true"
    ),
    "a softcap": SPEC.format(128, "mask: causal, softcap: 30"),
    "ALiBi of groups": SPEC.format(
        128, "mask: causal, alibi: true, heads: {q_per_kv: 2}, lse: true"
    ),
    "a mask with two edges": SPEC.format(64, "mask: 'kv // 96 == q // 96'"),
    "packed heads, O from registers": SPEC.format(
        64, "heads: {q_per_kv: 4}, pack_gqa: true, lse: true, tile: {q: 64, kv: 128}"
    ),
    "packed heads": SPEC.format(
        128, "mask: causal, heads: {q_per_kv: 8}, pack_gqa: true, sink: true, lse: true"
    ),
    "scores one by one": SPEC.format(64, "score: s - abs(q - kv) / 9, lse: true"),
}
SPEC_100 = SPEC.replace("sm90", "sm100")
SPECS |= {
    "sm100, a window and sinks": SPEC_100.format(
        64, "mask: causal, window: {left: 100}, sink: true, lse: true"
    ),
    "sm100, a softcap": SPEC_100.format(
        "{qk: 192, v: 128}", "mask: causal, softcap: 30"
    ),
    "sm100, ALiBi of groups": SPEC_100.format(
        128, "mask: causal, alibi: true, heads: {q_per_kv: 2}, lse: true"
    ),
    "sm100, a mask with two edges": SPEC_100.format(
        96, "mask: 'kv // 96 == q // 96', sink: true"
    ),
    "sm100, blocks of 64 keys": SPEC_100.format(128, "tile: {kv: 64}, lse: true"),
    "sm100, keys apart": SPEC_100.format(
        64, "mask: 'kv <= q and (kv < 4 or q - kv < 128)', lse: true"
    ),
    "sm100, scores one by one": SPEC_100.format(
        64, "score: s - abs(q - kv) / 9, lse: true"
    ),
}

STEM = "sm90_d128_bf16_causal_varlen_lse"
STEM_100 = "sm100_d128_bf16_causal_varlen_lse"
# A fault may be a loop; right kernels need 700,000 steps at most.
MOST_STEPS = 3_000_000

FAULTS = {
    "a length is the next sequence's": (
        *("mixed", "end_kv - begin_kv, end_q"),
        "end_kv - begin_kv + 1, end_q",
    ),
    "maps begin a row late": ("mixed", "(-total, 0, 0)", "(1 - total, 0, 0)"),
    "no sequence ends with the tensor": ("plain", "total + 1)", "total)"),
    "a sequence without tiles before it is taken": (
        *("padded", "(through <= tile)"),
        "(through < tile)",
    ),
    "tiles of a lane count before it": (
        *("mixed", "place = tile - (through - equal * problem.heads)"),
        "place = tile - through",
    ),
    "a lane's own tiles do not count": (
        *("mixed", "sum_through(equal, lane))"),
        "sum_through(equal, lane) - equal)",
    ),
    "tiles of higher levels do not count": (
        *("levels", "(sum_of_lanes(longer) + sum_through(equal, lane))"),
        "sum_through(equal, lane)",
    ),
    "a tile is of the level below": (
        *("levels", "level = cutlass.select_(tile < through, middle, level)"),
        "level = cutlass.select_(tile < through - 1, middle, level)",
    ),
    "query tiles without keys are in no level": (
        *(
            "few_keys",
            "return cutlass.select_(level > 0, longer, tiles_of_head(sequence))",
        ),
        "return longer",
    ),
    "the first group is taken again": (
        *("sequences_70", "group, before = group + WARP, before + tiles"),
        "group, before = Int32(0), before + tiles",
    ),
    "a search does not know the tiles before its group": (
        *("sequences_70", "wave * width + place, group, before, problem"),
        "wave * width + place, group, Int32(0), problem",
    ),
    "a work tile is overwritten": (
        *("mixed", "    ring.pipe.producer_acquire(state)\n"),
        "",
    ),
    "a work tile is read before it is there": (
        *("mixed", "    ring.pipe.consumer_wait(state)\n"),
        "",
    ),
    "the warp that loads does not free work tiles": (
        *("mixed", "TILE_RELEASES = 9"),
        "TILE_RELEASES = 8",
    ),
    "a sequence without keys has no block": (
        *("mixed", "return cutlass.max(end, 1)"),
        "return end",
    ),
    "a sequence without keys loads what is behind it": (
        *("mixed", "rows = cutlass.max(problem.seqlen_kv, 1)"),
        "rows = problem.seqlen_kv",
    ),
    "a CTA without a tile goes on": (
        *("idle", "more = tile < before + tiles"),
        "more = tile <= before + tiles",
    ),
    "offsets beyond the tensor": (
        *(
            "outside",
            "end = cutlass.min(cutlass.max(cu_seqlens[number + 1], begin), total)",
        ),
        "end = cu_seqlens[number + 1]",
    ),
    "an end before its begin": (
        *("falling", "cutlass.max(cu_seqlens[number + 1], begin)"),
        "cutlass.max(cu_seqlens[number + 1], 0)",
    ),
    "O ends where K does": (
        *("mixed", "end, seqlen_q = problem.end_q, problem.seqlen_q"),
        "end, seqlen_q = problem.end_kv, problem.seqlen_q",
    ),
    "LSE is from the tensor's first row on": (
        *("mixed", "begin = problem.end_q - problem.seqlen_q"),
        "begin = Int32(0)",
    ),
    "O is stored with the next tile's sequence": (
        *("mixed", "store_o(out, sO, mma, q_tile, head, problem, warp_idx)"),
        "store_o(out, sO, mma, q_tile, head, next_problem, warp_idx)",
    ),
    "the first tile waits for what is not loaded": (
        "idle",
        "if more:\n            attend(",
        "if more | True:\n            attend(",
    ),
}


NEXT = "q_tile, _, more, problem = take_tile(ring, tile_state, problem)"
FAULTS_100 = {
    "half of a tile behind its sequence is loaded": (
        *("mixed", "cutlass.max(left, 1)"),
        "left",
    ),
    "both halves of Q are the first": (
        "mixed",
        "q_tile * HALVES + half) * HALF_ROWS\n        mQ",
        "q_tile * HALVES) * HALF_ROWS\n        mQ",
    ),
    "a sequence without keys loads what is behind it": (
        *("mixed", "cutlass.max(problem.seqlen_kv, 1)"),
        "problem.seqlen_kv",
    ),
    "whether there are keys is the next tile's": (
        *("mixed", f"has_keys = problem.seqlen_kv > 0\n        {NEXT}"),
        f"{NEXT}\n        has_keys = problem.seqlen_kv > 0",
    ),
    "how many blocks there are is the next tile's": (
        "mixed",
        f"several = blocks > 1\n        {NEXT}",
        f"{NEXT}\n        several = key_blocks((q_tile + 1) * TILE_Q, problem) > 1",
    ),
    "maps begin a row late": ("mixed", "(-total, 0, 0)", "(1 - total, 0, 0)"),
    "no sequence ends with the tensor": ("plain", "total + 1)", "total)"),
    "V is as far from its end as Q": (
        *("mixed", "rows_before(v.tensor, head, end, rows, 1)"),
        "rows_before(v.tensor, head, end, problem.seqlen_q, 1)",
    ),
    "O ends where K does": (
        *("mixed", "out.tensor, head, problem.end_q, problem.seqlen_q"),
        "out.tensor, head, problem.end_kv, problem.seqlen_q",
    ),
    "LSE is from the tensor's first row on": (
        *("mixed", "at = problem.end_q - problem.seqlen_q + first_row + lane"),
        "at = first_row + lane",
    ),
    "rows of the next sequence have an LSE": (
        *("mixed", "if first_row + lane < problem.seqlen_q:"),
        "if first_row + lane <= problem.seqlen_q:",
    ),
    "a CTA without a tile goes on": FAULTS["a CTA without a tile goes on"],
    "a work tile is read before it is there": (
        FAULTS["a work tile is read before it is there"]
    ),
}


@pytest.mark.parametrize("name", support.rotated(SPECS, 2))
def test_varlen_beside_other_features(name: str, tmp_path: Path) -> None:
    planned = plan.resolve(support.load_text(SPECS[name]))
    path = written(tmp_path, render.render_kernel(planned))
    _, ready = rehearsals(path, {"mixed", "few_keys", "sequences_33", "idle"})
    assert len(ready) == 4
    assert [each.run(SCHEDULE).findings for each in ready] == [[]] * len(ready)


def run(kernel: Rehearsal) -> dict[str, np.ndarray]:
    kernel.run(SCHEDULE)
    return {x.name: x.view.copy() for x in kernel.problem.outputs}


@pytest.mark.parametrize("stem", [STEM, STEM_100])
def test_a_launch_serves_other_lengths(stem: str) -> None:
    """Between two runs nothing changes but what the tensors hold."""
    (kernel,) = tagged(support.GENERATED / f"{stem}.py", ["mixed"])
    before = run(kernel)
    other = relaunched(kernel.case)
    problem = make_problem(kernel.spec, kernel.tiles, other)
    assert {x.name: x.placed for x in problem.inputs} == {
        x.name: x.placed for x in kernel.problem.inputs
    }
    again = replace(kernel, case=other, problem=problem, truths={})
    assert again.run(SCHEDULE).findings == []
    assert (problem["out"].view != before["out"]).any()


def entered(path: Path, poisoned: int) -> bool:
    """Whether others' bits change where all of a sequence is NaN."""
    (kernel,) = tagged(path, ["mixed"])
    before, rows = run(kernel), rows_of(kernel.case)
    own = rows[poisoned]
    for name, of in (("q", own.q), ("k", own.kv), ("v", own.kv)):
        kernel.problem[name].view[of] = NAN16
    after = run(kernel)
    assert (before["out"][own.q] != after["out"][own.q]).any()
    others = [each.q for number, each in enumerate(rows) if number != poisoned]
    return any(
        (before["out"][at] != after["out"][at]).any()
        or (before["lse"][:, at] != after["lse"][:, at]).any()
        for at in others
    )


@pytest.mark.parametrize("stem", [STEM, STEM_100])
@pytest.mark.parametrize("poisoned", support.rotated([0, 2], 1))
def test_no_value_of_a_sequence_enters_another(stem: str, poisoned: int) -> None:
    assert not entered(support.GENERATED / f"{stem}.py", poisoned)


ZEROS = {
    STEM: ("if problem.seqlen_kv == 0:", "if problem.seqlen_kv < 0:"),
    STEM_100: ("has_keys = problem.seqlen_kv > 0", "has_keys = problem.seqlen_kv >= 0"),
}


@pytest.mark.parametrize("stem", ZEROS)
def test_rows_without_keys_would_have_what_another_sequence_has(
    stem: str, tmp_path: Path
) -> None:
    """The fourth sequence has no keys, and loads the last row of the third."""
    assert entered(damaged(tmp_path, stem, *ZEROS[stem]), 2)


WALKED = {
    "a tile is dealt out twice": (
        "wave * width + place, group",
        "(wave * width + place) // 2, group",
    ),
    "K ends a row early": (
        "partition_rows(k, rings.sK, head, end, rows)",
        "partition_rows(k, rings.sK, head, end - 1, rows)",
    ),
    "Q is of the sequence before": (
        "rings.sQ, head, problem.end_q, problem.seqlen_q)",
        "rings.sQ, head, problem.end_q - problem.seqlen_q, problem.seqlen_q)",
    ),
    "rows behind an end are stored": ("(total, head_dim,", "(total + 1, head_dim,"),
}


WALKED_100 = {
    "a tile is dealt out twice": WALKED["a tile is dealt out twice"],
    "K ends a row early": (
        "rows_before(k.tensor, head, end, rows)",
        "rows_before(k.tensor, head, end - 1, rows)",
    ),
    "the last row of a tile, not of its sequence": (
        "problem.end_q, cutlass.max(left, 1))",
        "problem.end_q - cutlass.max(-left, 0), cutlass.max(left, 1))",
    ),
    "rows behind an end are stored": ("(total, head_dim,", "(total + 1, head_dim,"),
}


@pytest.mark.parametrize(
    ("stem", "fault"),
    [
        *((STEM, fault) for fault in support.rotated(WALKED, 2)),
        *((STEM_100, fault) for fault in support.rotated(WALKED_100, 2)),
    ],
)
def test_a_walk_finds_a_fault_of_the_schedule(
    stem: str, fault: str, tmp_path: Path
) -> None:
    faults = WALKED if stem == STEM else WALKED_100
    assert walk_findings(damaged(tmp_path, stem, *faults[fault]))


@pytest.mark.parametrize(
    "name",
    [*("a window and sinks", "packed heads"), "sm100, a window and sinks"],
)
def test_a_walk_of_a_right_kernel_finds_nothing(name: str, tmp_path: Path) -> None:
    planned = plan.resolve(support.load_text(SPECS[name]))
    assert not walk_findings(written(tmp_path, render.render_kernel(planned)))


def walk_findings(path: Path) -> list[str]:
    constants, case, seen = walk_of(path, "sms_7")
    return schedule_findings(seen, tiles_of(constants), constants["SPEC"], case)


def walk_of(path: Path, tag: str) -> tuple[dict[str, Any], Case, walk.Walk]:
    constants = read_constants(path.read_text(encoding="utf-8"))
    spec, tiles = constants["SPEC"], tiles_of(constants)
    (case,) = (each for each in walks_for(spec, tiles) if tag_of(each) == tag)
    text, (called,) = captured(path, [case])
    (launch,) = called.launched
    seen = walked(constants, case, launch, walk.prepare(ptx.parse(text)))
    return constants, case, seen


@pytest.mark.parametrize(
    "stem", support.rotated([STEM, "sm90_d64_bf16_full_varlen", STEM_100], 1)
)
def test_tiles_with_most_keys_come_first(stem: str) -> None:
    """Of 32 sequences after 32, in waves of which odd ones go backwards."""
    constants, case, seen = walk_of(support.GENERATED / f"{stem}.py", "levels")
    loads, begins = seen.loads["q"], [each.q.start for each in rows_of(case)]
    order: list[list[tuple[int, int]]] = [[] for _ in range(case.sm_count)]
    for cta, (row, head, _) in zip(loads.cluster, loads.begin, strict=True):
        begin = max(each for each in begins if each <= row)
        first = (row - begin) % constants["TILE_Q"] == 0  # not a tile's second half
        if first and (row, head) not in order[cta][-1:]:  # a box for 64 columns each
            order[cta].append((row, head))
    assert order == dealt_out(case, begins, constants)


def dealt_out(
    case: Case, begins: list[int], constants: dict[str, Any]
) -> list[list[tuple[int, int]]]:
    """The first row and the head of each CTA's query tiles, in order."""
    rows, level = constants["TILE_Q"], constants.get("LEVEL_TILES")
    heads = range(case.kv_heads * constants["SPEC"]["q_per_kv"])
    tiles = []
    for number, (q, kv) in enumerate(case.lengths):
        count, keys = -(-q // rows), -(-kv // rows)
        for tile in range(count):
            seen = max(keys - (count - tile), 0) // level if level else max(keys, 1)
            at = begins[number] + tile * rows
            tiles += [(number // 32, -seen, number, head, -tile, at) for head in heads]
    found: list[list[tuple[int, int]]] = [[] for _ in range(case.sm_count)]
    for place, (*_, head, _, at) in enumerate(sorted(tiles)):
        wave, cta = divmod(place, case.sm_count)
        found[case.sm_count - 1 - cta if wave % 2 else cta].append((at, head))
    return found


@pytest.mark.parametrize("fault", support.rotated(FAULTS, 4))
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    tag, right, wrong = FAULTS[fault]
    assert findings(damaged(tmp_path, STEM, right, wrong), tag, MOST_STEPS)


@pytest.mark.parametrize("fault", support.rotated(FAULTS_100, 3))
def test_a_fault_on_blackwell_is_found(fault: str, tmp_path: Path) -> None:
    tag, right, wrong = FAULTS_100[fault]
    assert findings(damaged(tmp_path, STEM_100, right, wrong), tag)
