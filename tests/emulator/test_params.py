# SPDX-License-Identifier: Apache-2.0
"""Masks that read inputs, in the emulator: with what else a spec may say, and with faults."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import support
from fmha_gen.evidence.rehearsal import schedules
from fmha_gen.ops.cases import Case
from support import kernel_text

from .rehearsals import emulated_cases, findings, rehearsals, tag_of, written

SCHEDULE = schedules(0)[0]
HEAD = "op: fmha_fwd\ndtype: bf16\nhead_dim: 64\n"
SM90 = f"arch: sm90\n{HEAD}tile: {{q: 128, kv: 64}}\n"
SM100 = f"arch: sm100\n{HEAD}"
DOCUMENTS = "mask: causal\ndocuments: true\n"
KERNELS = {
    "documents": SM90 + DOCUMENTS,
    "documents, both ends": f"{SM90}documents: true\nlse: true\n",
    "documents, packed": f"{SM90}{DOCUMENTS}heads: {{q_per_kv: 4}}\npack_gqa: true\n",
    "documents, cluster": f"{SM90}{DOCUMENTS}cluster: [2, 1]\nmulticast: kv\n",
    "documents, fixed": f"{SM90}{DOCUMENTS}seqlen: {{q: 200, kv: 333}}\n",
    "documents, window": f"{SM90}{DOCUMENTS}window: {{left: 70}}\nsink: true\n",
    "prefix": f"{SM90}mask: causal\nprefix: true\nsoftcap: 30\n",
    "prefix, O from registers": (
        "arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 256\nmask: causal\nprefix: true\n"
    ),
    "window": f"{SM90}window: {{left: argument, right: argument}}\n",
    "by KV head": (
        f"{SM90}heads: {{q_per_kv: 2}}\ncluster: [1, 2]\nmulticast: kv\n"
        "params: {first: {shape: [h_kv, b], dtype: int32}, more: int32}\n"
        "mask: 'kv <= q + more and kv >= first[h_kv, b]'\n"
    ),
    "sm100, by head": (
        f"{SM100}heads: {{q_per_kv: 2}}\nlse: true\n"
        "params: {w: {shape: [h], dtype: int32}}\nmask: 'kv <= q and q - kv <= w[h]'\n"
    ),
    "sm100, documents, single": f"{SM100}{DOCUMENTS}schedule: single\n",
    "sm100, documents, pair": (
        f"{SM100}documents: true\ncluster: [2, 1]\ncta_group: 2\n".replace("64", "128")
    ),
    "sm100, prefix": f"{SM100}mask: causal\nprefix: true\n",
}
TAGS = {f"params_{kind}" for kind in ("some", "least", "most", "on_tiles")}
FAULTS = {  # kernel, case, what stands there, what stands there then
    "another batch's documents": (
        *("documents", "params_some"),
        *(
            "problem.document_start[batch, position]",
            "problem.document_start[0, position]",
        ),
    ),
    "a document too early": (
        *("documents", "params_some"),
        *(
            "problem.document_start[batch, position]",
            "(problem.document_start[batch, position] - 1)",
        ),
    ),
    "documents of the tile before": (
        *("documents", "params_some"),
        *(
            "load_edges(edges, next_q_tile * TILE_Q + row",
            "load_edges(edges, q_tile * TILE_Q + row",
        ),
    ),
    "blocks by the last row": (
        *("documents", "params_some"),
        *("keys_from(first_position", "keys_from(end_position - 1"),
    ),
    "whole blocks by the first row": (
        *("documents", "params_on_tiles"),
        *("keys_from(end_position - 1", "keys_from(first_position"),
    ),
    "rows beyond the last one": (
        *("documents", "params_some"),
        *("cutlass.min(position, problem.seqlen_q - 1)", "position"),
    ),
    "tiles beyond the last one": (
        *("documents", "far"),
        *("cutlass.min(tile, problem.num_tiles - 1)", "tile"),
    ),
    "the end by the first row": (
        *("documents, both ends", "params_least"),
        *(
            "end_key = keys_before(end_position",
            "end_key = keys_before(first_position + 1",
        ),
    ),
    "a prefix too short": (
        *("prefix", "params_some"),
        *("problem.prefix[batch]", "(problem.prefix[batch] - 1)"),
    ),
}


@pytest.mark.parametrize("kernel", support.rotated(KERNELS, 4))
def test_a_mask_reads_its_inputs(kernel: str, tmp_path: Path) -> None:
    path = written(tmp_path, kernel_text(KERNELS[kernel]))
    cases = [case for case in emulated_cases(path) if tag_of(case) in TAGS]
    assert {*map(tag_of, cases)} == TAGS
    for ready in rehearsals(path, cases=cases)[1]:
        assert ready.run(SCHEDULE).findings == []


@pytest.mark.parametrize("fault", support.rotated(FAULTS, 5))
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    kernel, tag, right, wrong = FAULTS[fault]
    text = kernel_text(KERNELS[kernel])
    assert text.count(right) == 1
    assert findings(written(tmp_path, text.replace(right, wrong)), tag)


def bits(path: Path, case: Case) -> np.ndarray[object, np.dtype[np.uint16]]:
    """O of a case under one schedule."""
    _, (ready,) = rehearsals(path, cases=[case])
    assert ready.run(SCHEDULE).findings == []
    return ready.problem.outputs[0].view.copy()


def test_inputs_that_hide_nothing_give_the_bits_of_causal(tmp_path: Path) -> None:
    """One document, a prefix of 0 and a window as long as K: each computes what causal does."""
    case = Case("alike", 2, 1, 200, 260, sm_count=2)
    causal = bits(written(tmp_path, kernel_text(f"{SM90}mask: causal\n")), case)
    for more, kind in (
        ("documents: true\n", "most"),
        ("prefix: true\n", "least"),
        ("window: {left: argument}\n", "most"),
    ):
        path = written(tmp_path, kernel_text(f"{SM90}mask: causal\n{more}"))
        same = dataclasses.replace(case, params=kind)
        assert np.array_equal(bits(path, same), causal), more


def test_a_word_is_the_kernel_of_its_expression() -> None:
    said = ("mask: causal\nchunk: 96\n", "mask: 'kv <= q and kv // 96 == q // 96'\n")
    one, other = (support.load_text(SM90 + each) for each in said)
    assert one.digest == other.digest
    assert kernel_text(SM90 + said[0]) == kernel_text(SM90 + said[1])
