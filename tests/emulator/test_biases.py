# SPDX-License-Identifier: Apache-2.0
"""Biases: kernels of no shipped spec, and faults that cases find."""

from __future__ import annotations

from pathlib import Path

import pytest
import support
from fmha_gen.build import render
from fmha_gen.evidence.rehearsal import schedules
from fmha_gen.planning import plan

from .rehearsals import damaged, findings, rehearsals, written

SCHEDULE = schedules(0)[0]
SPEC = "{{arch: {}, op: fmha_fwd, dtype: {}, head_dim: {}, {}}}"
KEYS = "bias: {shape: [b, 1, 1, kv], dtype: fp16}"
SPECS = {
    "of keys": SPEC.format(
        "sm90", "bf16", 128, f"{KEYS}, mask: causal, tile: {{kv: 80}}"
    ),
    "of keys, fp32": SPEC.format(
        *("sm90", "fp16", 64), "bias: {shape: [b, h, 1, kv], dtype: fp32}, lse: true"
    ),
    "fp32, groups and sinks": SPEC.format(
        *("sm90", "bf16", 128),
        "heads: {q_per_kv: 2}, bias: fp32, mask: causal, sink: true, lse: true",
    ),
    "a cluster, fixed": SPEC.format(
        *("sm90", "fp16", 96),
        "bias: {shape: [1, 1, q, kv], dtype: fp16}, cluster: [2, 1], multicast: kv,"
        " seqlen: {q: 200, kv: 160}",
    ),
    "heads of a cluster, a window": SPEC.format(
        *("sm90", "bf16", 64),
        "heads: {q_per_kv: 2}, bias: bf16, cluster: [1, 2], multicast: k,"
        " window: {left: 100, right: 20}",
    ),
    "a tile for each CTA": SPEC.format(
        "sm100", "fp16", 64, f"{KEYS}, mask: causal, lse: true, schedule: single"
    ),
    "sm100, fp32, groups and sinks": SPEC.format(
        *("sm100", "bf16", 64),
        "heads: {q_per_kv: 2}, bias: {shape: [1, h, q, kv], dtype: fp32},"
        " window: {left: 100, right: 20}, sink: true, lse: true",
    ),
    "a pair": SPEC.format(
        *("sm100", "bf16", 256), "bias: bf16, cluster: [2, 1], cta_group: 2"
    ),
    "sm100, a cluster, fixed": SPEC.format(
        *("sm100", "bf16", 64),
        "bias: bf16, cluster: [2, 1], multicast: kv, seqlen: {q: 300, kv: 290}",
    ),
}

SM90, SM100 = "sm90_d128_bf16_causal_bias", "sm100_d128_bf16_full_bias"
FAULTS = {
    "a bias is scaled": (
        *(SM90, "biases", "acc_S[2 * i + c] * scale + pair[c]"),
        "(acc_S[2 * i + c] + pair[c]) * scale",
    ),
    "pairs are swapped": (SM90, "biases", "+ pair[c]", "+ pair[1 - c]"),
    "heads have the first one's": (SM90, "biases", ", head, 0]", ", 0, 0]"),
    "warpgroups have the first one's": (
        *(SM90, "ragged", "q_tile * BIAS_STAGES + part"),
        "q_tile * BIAS_STAGES",
    ),
    "blocks have the first one's": (SM90, "ragged", "rows, block]", "rows, 0]"),
    "it is added before its load has landed": (
        *(SM90, "ragged", "    rings.bias.consumer_wait(stage)\n", ""),
    ),
    "batches have the first one's": (
        SM100,
        "strided",
        "bias.tensor[None, None, head, batch]",
        "bias.tensor[None, None, head, 0]",
    ),
    "halves have each other's": (
        *(SM100, "ragged", "bias_state = state_of_half(half, 0)"),
        "bias_state = state_of_half(1 - half, 0)",
    ),
    "sm100: it is added before its load has landed": (
        *(SM100, "ragged", "    pipes.bias.consumer_wait(state)\n", ""),
    ),
}


@pytest.mark.parametrize("name", support.rotated(SPECS, 3))
def test_biases_of_all_kinds(name: str, tmp_path: Path) -> None:
    planned = plan.resolve(support.load_text(SPECS[name]))
    path = written(tmp_path, render.render_kernel(planned))
    _, ready = rehearsals(path, {"biases", "biases_strided"})
    assert ready
    assert [each.run(SCHEDULE).findings for each in ready] == [[]] * len(ready)


@pytest.mark.parametrize("fault", support.rotated(FAULTS, 3))
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    stem, tag, right, wrong = FAULTS[fault]
    assert findings(damaged(tmp_path, stem, right, wrong), tag)
