# SPDX-License-Identifier: Apache-2.0
"""Sinks: kernels of no shipped spec, values that no case has, and faults that cases find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from fmha_gen.build import render
from fmha_gen.evidence.rehearsal import Rehearsal, schedules
from fmha_gen.ops.cases import Case
from fmha_gen.planning import plan

from .rehearsals import damaged, findings, rehearsals, written

SCHEDULE = schedules(0)[0]
SPEC = "{{arch: {}, op: fmha_fwd, dtype: {}, head_dim: {}, sink: true, {}}}"
SPECS = {
    "packed": SPEC.format(
        *("sm90", "bf16", 128),
        "heads: {q_per_kv: 8}, pack_gqa: true, lse: true, tile: {q: 64, kv: 128}",
    ),
    "packed, O from registers": SPEC.format(
        *("sm90", "fp16", 256), "heads: {q_per_kv: 16}, pack_gqa: true"
    ),
    "heads of a cluster": SPEC.format(
        *("sm90", "bf16", 64),
        "heads: {q_per_kv: 8}, cluster: [1, 2], multicast: kv, seqlen: {q: 200, kv: 160}",
    ),
    "a tile for each CTA": SPEC.format(
        *("sm100", "bf16", 64), "mask: causal, schedule: single, lse: true"
    ),
    "a tile for each CTA, fixed": SPEC.format(
        *("sm100", "fp16", 128), "seqlen: {q: 200, kv: 256}, schedule: single"
    ),
    "one reference for all rows": SPEC.format(
        *("sm90", "bf16", 64), "softcap: 50, mask: causal, lse: true"
    ),
    "capped": SPEC.format(
        *("sm100", "bf16", 64), "softcap: 30, mask: causal, lse: true"
    ),
    "a pair": SPEC.format(
        *("sm100", "bf16", 128), "cluster: [2, 1], cta_group: 2, lse: true"
    ),
}

SM90, SM100 = "sm90_d64_bf16_causal_gqa8_sink_lse", "sm100_d64_bf16_causal_gqa8_sink"
FAULTS = {
    "a sink is scaled": (SM90, "sinks", "sinks[r] * LOG2_E", "sinks[r] * scale_log2"),
    "a sink is in base 2": (SM90, "sinks", "sinks[r] * LOG2_E", "sinks[r]"),
    "heads have the first one's": (SM90, "sinks", "[mSink[head]]", "[mSink[0]]"),
    "LSE has no sink": (SM90, "sinks", "lse = log_add_exp(lse, sinks[r])", "pass"),
    "LSE overflows": (SM90, "sinks", "fmin(x, y) - largest", "fmax(x, y)"),
    "two of -inf are NaN": (SM90, "sinks_alone", "select_(x == y,", "select_(x > y,"),
    "a row without keys is NaN": (
        *(SM90, "sinks_alone", "fmax(reference, LEAST_MAX)"),
        "fmax(reference, -Float32.inf)",
    ),
    "O has no sink": (SM100, "sinks", "row.sum + weight", "row.sum"),
    "a sink is of the tile before": (
        *(SM100, "sinks", "\n        q_tile, sink_head", "\n        q_tile, _"),
    ),
}


def made(folder: Path, text: str) -> Path:
    """The kernel of a spec's text."""
    planned = plan.resolve(support.load_text(text))
    return written(folder, render.render_kernel(planned))


@pytest.mark.parametrize("name", support.rotated(SPECS, 2))
def test_sinks_of_all_levels(name: str, tmp_path: Path) -> None:
    path = made(tmp_path, SPECS[name])
    _, ready = rehearsals(path, {"sinks", "sinks_steep", "sinks_alone"})
    assert len(ready) == 3
    assert [each.run(SCHEDULE).findings for each in ready] == [[]] * 3


@pytest.mark.parametrize("fault", support.rotated(FAULTS, 3))
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    stem, tag, right, wrong = FAULTS[fault]
    found = findings(damaged(tmp_path, stem, right, wrong), tag)
    assert any("of out: " in each or "of lse: " in each for each in found), found


def results(kernel: Rehearsal) -> dict[str, Any]:
    """The outputs' bits."""
    kernel.run(SCHEDULE)
    return {x.name: x.view.copy() for x in kernel.problem.outputs}


@pytest.mark.parametrize("stem", [SM90, SM100])
def test_values_that_are_no_numbers(stem: str, tmp_path: Path) -> None:
    """-inf is no sink, bit for bit; beside +inf no key counts; NaN is in its head alone."""
    case = Case("values", 2, 1, 70, 40, sm_count=1)  # some rows see no key
    path = support.GENERATED / f"{stem}.py"
    spec = (support.SPECS / f"{stem}.yaml").read_text(encoding="utf-8")
    _, (kernel,) = rehearsals(path, cases=[case])
    _, (without,) = rehearsals(
        made(tmp_path, spec.replace("sink: true\n", "")), cases=[case]
    )
    expected = results(without)
    sinks = kernel.problem["sink"].view.view(np.float32)
    sinks[:] = -np.inf
    found = results(kernel)
    for name, bits in expected.items():
        assert np.array_equal(found[name], bits)

    sinks[3], sinks[5] = np.nan, np.inf
    kernel.run(SCHEDULE)
    out = kernel.problem["out"].numbers().transpose(2, 0, 1, 3)
    assert np.isnan(out[3]).all() and (out[5] == 0).all()
    others = [0, 1, 2, 4, 6, 7]
    found = {x.name: x.view for x in kernel.problem.outputs}
    assert np.array_equal(found["out"][:, :, others], expected["out"][:, :, others])
    if "lse" in found:
        lse = kernel.problem["lse"].numbers()
        assert np.isnan(lse[:, 3]).all() and np.isposinf(lse[:, 5]).all()
        assert np.array_equal(found["lse"][:, others], expected["lse"][:, others])


def test_a_row_without_a_key_has_the_sink_itself() -> None:
    case = Case("values", 1, 1, 40, 7, sm_count=1)
    _, (kernel,) = rehearsals(support.GENERATED / f"{SM90}.py", cases=[case])
    results(kernel)
    rows = kernel.problem["lse"].numbers()[0, :, :33]
    assert (rows == kernel.problem["sink"].numbers()[:, None]).all()
    assert (kernel.problem["out"].numbers()[0, :33] == 0).all()
