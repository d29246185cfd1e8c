# SPDX-License-Identifier: Apache-2.0
"""Block lists: kernels of no shipped spec, lists that no case has, and faults that cases find."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fmha_gen.build import captures
from fmha_gen.build.calls import arguments
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.evidence.rehearsal import Rehearsal, schedules
from fmha_gen.ops import lists
from fmha_gen.ops.cases import Case
from fmha_gen.ops.lists import Drawn
from support import GENERATED, kernel_text, rotated

from .rehearsals import damaged, emulated_cases, findings, rehearsals, tag_of, written

SCHEDULE = schedules(0)[0]
SM90, SM100 = (
    f"arch: {arch}\nop: fmha_fwd\nblocks: lists\n" for arch in ("sm90", "sm100")
)
SPECS = {
    "three warpgroups, GQA, LSE": (
        f"{SM90}dtype: fp16\nhead_dim: 64\nheads: {{q_per_kv: 4}}\nlse: true\n"
        "mask: 'kv <= q and kv // 96 == q // 96'\n"
    ),
    "one Q stage, a window": (
        f"{SM90}dtype: bf16\nhead_dim: 256\nwindow: {{left: 100, right: 30}}\nlse: true\n"
    ),
    "capped, sinks": (
        f"{SM90}dtype: bf16\nhead_dim: 64\nmask: causal\nsoftcap: 50\nsink: true\n"
    ),
    "K of one block": (
        f"{SM90}dtype: bf16\nhead_dim: 64\nmask: causal\nseqlen: {{q: 300, kv: 70}}\n"
    ),
    "fixed": f"{SM90}dtype: bf16\nhead_dim: 96\nseqlen: {{q: 256, kv: 512}}\n",
    "a tile for each CTA": (
        f"{SM100}dtype: bf16\nhead_dim: 64\nmask: causal\nschedule: single\nlse: true\n"
        "heads: {q_per_kv: 2}\nsink: true\n"
    ),
    "K and V of unlike widths": (
        f"{SM100}dtype: fp16\nhead_dim: {{qk: 192, v: 128}}\nwindow: {{left: 100}}\n"
    ),
    "sm100, K of one block": (
        f"{SM100}dtype: bf16\nhead_dim: 64\nseqlen: {{q: 300, kv: 70}}\nsoftcap: 30\n"
    ),
}

CAUSAL, FULL = "sm90_d128_bf16_causal_lists", "sm90_d128_bf16_full_lists"
BLACKWELL = "sm100_d128_bf16_full_lists"
FAULTS = {  # kernel, case, what stands there once, what stands there then
    "full blocks are masked": (
        *(CAUSAL, "lists_full", "mask_end(acc_S, block, problem)\n            retire"),
        "mask_block(acc_S, q_tile * TILE_Q + row, block, problem)\n            retire",
    ),
    "the first block is taken for a full one": (
        *(CAUSAL, "lists_mask", "if blocks.partial > 0:", "if blocks.partial > 9:"),
    ),
    "the first block is taken for a partial one": (
        *(CAUSAL, "lists_full", "if blocks.partial > 0:", "if blocks.partial >= 0:"),
    ),
    "a block has the number of the one before": (
        *(
            CAUSAL,
            "lists_mask",
            "block = block_at(blocks, 1)",
            "block = block_at(blocks, 0)",
        ),
    ),
    "a full list begins with its second block": (
        *(FULL, "lists_full", "full_kv_indices[number]", "full_kv_indices[number + 1]"),
    ),
    "partial blocks come twice": (
        *(
            FULL,
            "lists_partial",
            "= blocks.kv_indices[i]",
            "= blocks.kv_indices[i // 2]",
        ),
    ),
    "the end of K is not masked": (
        *(FULL, "lists_all", "if seen < TILE_KV:", "if seen < 0:"),
    ),
    "a key behind the end of K": (
        *(
            FULL,
            "lists_all",
            "seen = problem.seqlen_kv -",
            "seen = 1 + problem.seqlen_kv -",
        ),
    ),
    "an empty list has the last block": (
        *(FULL, "lists_none", "Int32(cute.size(blocks.kv_indices))"),
        "Int32(cute.size(blocks.kv_indices) - 1)",
    ),
    "all heads have the lists of the first": (
        *(FULL, "lists_full", "head = cutlass.min(head,", "head = cutlass.min(0,"),
    ),
    "all batches have the lists of the first": (
        *(FULL, "lists_full", "batch = cutlass.min(batch,", "batch = cutlass.min(0,"),
    ),
    "V of another block than K": (
        *(FULL, "lists_shuffled", "before, block = block, next_block"),
        "before, block = next_block, next_block",
    ),
    "sm100: the end of K is not masked": (
        *(BLACKWELL, "lists_all", "if seen < TILE_KV:", "if seen < 0:"),
    ),
    "sm100: blocks come twice": (
        *(BLACKWELL, "lists_shuffled", "full_kv_indices[number]"),
        "full_kv_indices[number // 2]",
    ),
}


@pytest.mark.parametrize("name", rotated(SPECS, 2))
def test_lists_beside_other_fields(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, kernel_text(SPECS[name]))
    tags = [f"lists_{kind}" for kind in ("shuffled", "some_tiles", "all", "behind")]
    cases = [case for case in emulated_cases(path) if tag_of(case) in tags]
    assert {*map(tag_of, cases)} == {*tags}
    for ready in rehearsals(path, cases=cases)[1]:
        assert ready.run(SCHEDULE).findings == [], ready.case


@pytest.mark.parametrize("fault", rotated(FAULTS, 3))
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    stem, tag, right, wrong = FAULTS[fault]
    found = findings(damaged(tmp_path, stem, right, wrong), tag)
    assert found, fault


def results(kernel: Rehearsal) -> dict[str, Any]:
    """The outputs' bits."""
    assert kernel.run(SCHEDULE).findings == []
    return {x.name: x.view.copy() for x in kernel.problem.outputs}


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_lists_of_the_mask_are_the_mask(arch: str, tmp_path: Path) -> None:
    """The last block first, as kernels without lists take them: bit for bit the same."""
    head = f"arch: {arch}\nop: fmha_fwd\ndtype: bf16\nhead_dim: 64\nmask: causal\nlse: true\n"
    case, found = Case("mask", 2, 1, 300, 333, sm_count=2), []
    for name, more in (("derived", ""), ("listed", "blocks: lists\n")):
        path = written(tmp_path, kernel_text(f"{head}{more}"), name)
        found.append(results(rehearsals(path, cases=[case])[1][0]))
    derived, listed = found
    assert all(np.array_equal(listed[name], bits) for name, bits in derived.items())


def test_numbers_behind_the_counts_are_not_used() -> None:
    case = Case("mask", 1, 2, 300, 500, sm_count=2, lists=Drawn("some_tiles", "h"))
    _, (kernel,) = rehearsals(GENERATED / f"{CAUSAL}.py", cases=[case])
    before = results(kernel)["out"]
    for counts, indices in zip(lists.NAMES[::2], lists.NAMES[1::2], strict=True):
        numbers = kernel.problem[indices].view
        listed = np.arange(numbers.shape[-1]) < kernel.problem[counts].view[..., None]
        numbers[...] = np.where(listed, numbers, 0x7FFFFFFF)
    assert np.array_equal(results(kernel)["out"], before)


WRONG = {  # what a tensor of a call is instead, and how it is refused
    "other blocks": (
        *("kv_indices", {"shape": [2, 2, 3, 4]}),
        r"kv_indices: is for \[3, 4\] blocks, but q and k make \[3, 3\]: set BLOCK_SIZE="
        r"\(128, 128\)",
    ),
    "lists of more heads": (
        *("kv_indices", {"shape": [2, 3, 3, 3]}),
        r"kv_indices: is for 2 batches and 3 heads, but q has 2 and 2; 1 stands for all",
    ),
    "counts of fewer tiles": ("kv_num_blocks", {"shape": [2, 2, 2]}, "kv_"),
    "more full blocks": (
        "full_kv_indices",
        {"shape": [2, 2, 3, 4]},
        "full_kv_indices: ",
    ),
    "counts are no integers": (
        "full_kv_num_blocks",
        {"dtype": "fp32"},
        "full_kv_num_blocks: ",
    ),
    "no dimension for batches": (
        *("kv_indices", {"shape": [2, 3, 3], "strides": [9, 3, 1]}),
        "kv_indices: needs 4 dimensions",
    ),
}


def test_lists_that_do_not_fit_are_refused() -> None:
    path = GENERATED / f"{CAUSAL}.py"
    spec = read_constants(path.read_text(encoding="utf-8"))["SPEC"]
    case, calls = Case("misuse", 2, 2, 300, 333, sm_count=2), []
    for name, changes, _ in WRONG.values():
        made = copy.deepcopy(arguments(spec, case))
        made["tensors"][name] |= changes
        calls.append(made)
    shared = replace(case, lists=Drawn("mask", ""))
    _, called = captures.capture(path, [*calls, arguments(spec, shared)], arch="sm90")
    *refused, right = called
    assert right.launches and not right.refusal
    for (_, _, message), found in zip(WRONG.values(), refused, strict=True):
        assert not found.launches and re.match(message, found.refusal), found.refusal
