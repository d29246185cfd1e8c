# SPDX-License-Identifier: Apache-2.0
"""Capped scores in kernels that are not shipped, up to the end of what one reference can serve."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import support
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.evidence import rehearsal
from fmha_gen.ops.cases import Case

from .rehearsals import findings, rehearsals, tag_of, written

EAGER = rehearsal.schedules(0)[0]
BF16, FP16 = 87 * math.log(2) - 1e-13, 14 * math.log(2) - 1e-14  # the largest
SPECS = {
    "bf16, the largest": f"arch: sm90, dtype: bf16, head_dim: 64, softcap: {BF16!r},"
    " mask: causal, heads: {q_per_kv: 4}, pack_gqa: true, tile: {q: 64}",
    "bf16, beyond": "arch: sm90, dtype: bf16, head_dim: 64, softcap: 69, mask: causal, lse: true,"
    " window: {left: 100}",
    "fp16, the largest": f"arch: sm90, dtype: fp16, head_dim: 256, softcap: {FP16!r}",
    "fp16, beyond": "arch: sm90, dtype: fp16, head_dim: 96, softcap: 30, lse: true,"
    " cluster: [2, 1], multicast: kv",
    "one block": "arch: sm90, dtype: bf16, head_dim: 64, seqlen: 128, softcap: 30",
    "with an LSE": "arch: sm90, dtype: bf16, head_dim: 64, softcap: 30, mask: causal, lse: true",
    "a window": "arch: sm90, dtype: bf16, head_dim: 128, softcap: 50, window: {left: 70, right: 9}",
    "sm100, single": "arch: sm100, dtype: fp16, head_dim: 64, softcap: 69, mask: causal, lse: true,"
    " schedule: single, window: {left: 100}",
    "sm100, a pair": "arch: sm100, dtype: bf16, head_dim: 256, softcap: 50, mask: causal,"
    " cluster: [2, 1], cta_group: 2",
}
BOUNDED = {"bf16, the largest", "fp16, the largest", "one block", "a window"}
# At both ends of the cap; -inf in K; rows without a key; QK^T of 1e4 and next to nothing.
TAGS = ("saturated", "minus_inf", "all_minus_inf", "short_kv", "logits_1e4", "flat")
FAULTS = {
    "scores are not capped": (
        "sm90",
        "cute.math.tanh(acc_S[i] * cap_scale, fastmath=True)",
        "acc_S[i] * cap_scale",
    ),
    "masked before it is capped": (
        "sm90",
        "visible, S[r, c], -Float32.inf",
        "visible, S[r, c], -1.0",
    ),
    "exponents beyond what P takes": (
        "sm90",
        "cute.math.exp2(acc_S[i] * CAP_LOG2, ",
        "cute.math.exp2(acc_S[i] * CAP_LOG2 + 90.0, ",
    ),
    "a row's sum of its first keys only": (
        "sm90",
        "sum_atom.set(warpgroup.Field.ACCUMULATE, accumulate)",
        "sum_atom.set(warpgroup.Field.ACCUMULATE, Boolean(False))",
    ),
    "a polynomial without its last term": (
        "sm90",
        "for coefficient in EX2_POLYNOMIAL[1:]:",
        "for coefficient in EX2_POLYNOMIAL[1:3]:",
    ),
    "the cap is left out of the exponent": (
        "sm100",
        "scale, shift = CAP_LOG2",
        "scale, shift = 1.0",
    ),
}


def kernel(folder: Path, fields: str, *changes: tuple[str, str]) -> Path:
    text = support.kernel_text(f"{{op: fmha_fwd, {fields}}}")
    for right, wrong in changes:
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    return written(folder, text)


@pytest.mark.parametrize("name", support.rotated(SPECS, 3))
def test_what_touches_the_cap(name: str, tmp_path: Path) -> None:
    path = kernel(tmp_path, SPECS[name])
    constants = read_constants(path.read_text("utf-8"))
    assert ("RESCALE_SLACK" not in constants) is (name in BOUNDED)
    _, ready = rehearsals(path, ("ragged", *TAGS) if "window" in SPECS[name] else TAGS)
    assert "saturated" in {tag_of(each.case) for each in ready}
    for each in ready:
        assert each.run(EAGER).findings == [], each.case.name


@pytest.mark.parametrize("name", support.rotated(FAULTS, 2))
def test_a_fault_is_found(name: str, tmp_path: Path) -> None:
    arch, *change = FAULTS[name]
    fields = f"arch: {arch}, dtype: bf16, head_dim: 64, softcap: 30, mask: causal"
    path = kernel(tmp_path, fields, (change[0], change[1]))
    told = findings(path, "saturated")
    assert any("of out: " in each for each in told), told


def test_a_huge_cap_is_none_but_for_the_tangent(tmp_path: Path) -> None:
    """Metamorphic: what both kernels write of the same inputs, in the emulator's exact tangent."""
    outputs = []
    for softcap in ("1000000", "none"):
        fields = "arch: sm90, dtype: bf16, head_dim: 64, mask: causal, lse: true"
        path = kernel(tmp_path, f"{fields}, softcap: {softcap}")
        case = Case("huge", 1, 1, 70, 200, sm_count=1)
        _, (ready,) = rehearsals(path, cases=[case])
        assert ready.run(EAGER).findings == []
        outputs.append([np.array(each.view) for each in ready.problem.outputs])
    (out, lse), (plain_out, plain_lse) = outputs
    np.testing.assert_allclose(lse, plain_lse, rtol=2e-6, atol=2e-6)
    assert (out == plain_out).mean() > 0.98  # others are a last place of bf16 off
