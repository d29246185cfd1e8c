# SPDX-License-Identifier: Apache-2.0
"""Scores that are expressions: kernels of no shipped spec, what must not matter, faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import support
from fmha_gen.emulator.lower import lower_kernels
from fmha_gen.evidence.rehearsal import Rehearsal, schedules
from fmha_gen.evidence.tensors import TO_BITS
from fmha_gen.ops.cases import Case

from .rehearsals import findings, rehearsals, written

EAGER = schedules(0)[0]
PACKED = "heads: {q_per_kv: 8}, pack_gqa: true, tile: {q: 64, kv: 64}"
BY_ELEMENT = "score: 'where(kv < 4 or h == 1, s, max(s, -8) - 0.125 * abs(kv - q))'"
SPECS = {
    "ALiBi, packed": f"arch: sm90, dtype: fp16, head_dim: 128, alibi: true, lse: true, {PACKED}",
    "ALiBi, O from registers, sink": "arch: sm90, dtype: bf16, head_dim: 256, alibi: true,"
    " sink: true, mask: causal, lse: true",
    "ALiBi, window": "arch: sm90, dtype: bf16, head_dim: 64, alibi: true, lse: true,"
    " window: {left: 100, right: 30}",
    "ALiBi, a pair": "arch: sm100, dtype: bf16, head_dim: 128, alibi: true,"
    " mask: causal, cluster: [2, 1], cta_group: 2",
    "a factor and a row's constant": "arch: sm90, dtype: bf16, head_dim: 64, lse: true,"
    " score: 2 * s - row / 64, mask: causal",
    "a slope of all heads": "arch: sm100, dtype: bf16, head_dim: 64, lse: true,"
    " score: 0.5 * s + kv / 128, schedule: single",
    "by element, packed": f"arch: sm90, dtype: bf16, head_dim: 64, {BY_ELEMENT}, {PACKED}",
    "by element, sm100": f"arch: sm100, dtype: bf16, head_dim: 64, {BY_ELEMENT}, mask: causal,"
    " lse: true, sink: true",
    "inputs of a call": "arch: sm90, dtype: bf16, head_dim: 64, lse: true, params: {slope:"
    " {shape: [h], dtype: fp32}, shift: {shape: [b, row], dtype: int32}, heat: fp32},"
    " score: '(1 + heat) * s - slope[h] * abs(q - kv + shift[b, row])'",
    "a slope of a call, packed": "arch: sm90, dtype: fp16, head_dim: 128, params: {slope: {shape:"
    f" [b, h], dtype: fp32}}}}, score: '2 * s - slope[b, h] * (q - kv)', {PACKED}",
    "a row's constant of a call, sm100": "arch: sm100, dtype: bf16, head_dim: 64, lse: true,"
    " mask: causal, params: {bonus: {shape: [row, h_kv], dtype: fp32}, heat: fp32},"
    " heads: {q_per_kv: 2}, score: 's - heat * min(abs(q - kv), 40) + bonus[row, h_kv]'",
    "falls with s": "arch: sm90, dtype: bf16, head_dim: 64, score: 3 - s, lse: true",
}
TAGS = {"ragged", "slopes", "short_kv", "rising"}
ALIBI = "arch: {}, dtype: bf16, head_dim: 64, alibi: true, mask: causal, lse: true"
FAULTS = {
    "the slope of head 0": ("sm90", "mSlopes[h]", "mSlopes[0]"),
    "a slope in base 2": ("sm90", "slope * LOG2_E", "slope"),
    "a bias of the row before": (
        "sm90",
        "Float32(first_key - q)",
        "Float32(first_key - q - 1)",
    ),
    "a reference that stays": (
        "sm90",
        "largest > stats.limit[r]",
        "largest > 2139095040",
    ),
    "slopes of the tile before": (
        "sm90",
        "set_slopes(slopes, mSlopes, next_head)",
        "pass",
    ),
    "the number of head 0": (
        "sm90",
        "problem.slope[h]",
        "problem.slope[0]",
    ),
    "a row's number is the first one's": (
        "sm90",
        "problem.shift[b, row]",
        "problem.shift[b, 0]",
    ),
    "columns in another order": (
        "sm100",
        "Float32(column + i) + first",
        "Float32(column) + first",
    ),
    "a block's bias is the next one's": (
        "sm100",
        "block = Int32(blocks)",
        "block = Int32(blocks) + 1",
    ),
}


def kernel(folder: Path, fields: str, *changes: tuple[str, str]) -> Path:
    text = support.kernel_text(f"{{op: fmha_fwd, {fields}}}")
    for right, wrong in changes:
        assert text.count(right) >= 1, right
        text = text.replace(right, wrong)
    return written(folder, text)


def one(path: Path, case: Case) -> Rehearsal:
    _, (ready,) = rehearsals(path, cases=[case])
    return ready


def outputs(ready: Rehearsal) -> dict[str, np.ndarray]:
    """Their bits."""
    assert ready.run(EAGER).findings == []
    return {each.name: np.array(each.view) for each in ready.problem.outputs}


@pytest.mark.parametrize("name", support.rotated(SPECS, 4))
def test_scores_are_right(name: str, tmp_path: Path) -> None:
    _, ready = rehearsals(kernel(tmp_path, SPECS[name]), TAGS)
    assert len(ready) >= 3
    for each in ready:
        assert each.run(EAGER).findings == [], each.case.name


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    arch, *change = FAULTS[fault]
    reads_call = "problem." in change[0]
    fields = SPECS["inputs of a call"] if reads_call else ALIBI.format(arch)
    path = kernel(tmp_path, fields, (change[0], change[1]))
    told = findings(path, "strided" if reads_call else "slopes")
    assert any("of out: " in each or "of lse: " in each for each in told), told


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_slopes_of_zero_are_causal(arch: str, tmp_path: Path) -> None:
    """But for how a row is tested: P has the same exponents up to a last place of fp32."""
    case = Case("zero", 1, 2, 70, 300, sm_count=1)
    alibi = one(kernel(tmp_path, ALIBI.format(arch)), case)
    alibi.problem["slopes"].view.view(np.float32)[:] = 0
    plain = one(kernel(tmp_path, ALIBI.format(arch).replace("alibi: true, ", "")), case)
    found, expected = outputs(alibi), outputs(plain)
    assert (found["out"] == expected["out"]).mean() > 0.98
    lse = [each["lse"].view(np.float32) for each in (found, expected)]
    np.testing.assert_allclose(*lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("arch", "score"), [("sm90", "s"), ("sm100", "s"), ("sm90", "s + kv / 128")]
)
def test_a_constant_of_a_row_changes_the_lse_alone(
    arch: str, score: str, tmp_path: Path
) -> None:
    case = Case("row", 1, 2, 70, 300, sm_count=1)
    found = []
    for text in (score, f"{score} - row / 32"):
        fields = f"arch: {arch}, dtype: bf16, head_dim: 64, lse: true, mask: causal"
        found.append(outputs(one(kernel(tmp_path, f"{fields}, score: {text}"), case)))
    assert np.array_equal(found[0]["out"], found[1]["out"])
    lse = [each["lse"].view(np.float32) for each in found]
    rows = np.broadcast_to(np.arange(70) / 32, lse[0].shape)
    np.testing.assert_allclose(lse[0] - lse[1], rows, atol=1e-5)


@pytest.mark.parametrize("fields", [ALIBI.format("sm90"), SPECS["by element, sm100"]])
def test_keys_that_a_row_does_not_see(fields: str, tmp_path: Path) -> None:
    """The last key is seen by the last row alone: others are what they are without its value."""
    ready = one(kernel(tmp_path, fields), Case("hidden", 1, 1, 200, 200, sm_count=1))
    expected = outputs(ready)
    keys = ready.problem["k"].view
    for value in (np.nan, -np.inf):
        keys[:, -1] = TO_BITS["bf16"](np.full(keys[:, -1].shape, value, np.float32))
        ready.run(EAGER)
        for each in ready.problem.outputs:
            rows = (..., slice(0, 199), *[slice(None)] * (2 * (each.name == "out")))
            assert np.array_equal(each.view[rows], expected[each.name][rows]), each.name


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("fields", ["score: 's - 0.0625 * abs(kv - q)'", "bias: fp32"])
def test_huge_scores_that_are_equal_have_equal_weights(
    fields: str, fused: bool, tmp_path: Path
) -> None:
    """In all blocks alike, whichever products are fused with sums: fp32 has steps of 64 there."""
    fields = (
        f"arch: sm90, dtype: bf16, head_dim: 64, {fields}, seqlen: {{q: 40, kv: 384}}"
    )
    case = Case("huge", 1, 1, 40, 384, sm_count=1)
    text, (ready,) = rehearsals(kernel(tmp_path, fields), cases=[case])
    ready = replace(ready, fused=lower_kernels(text, contract=True))
    values = {
        "q": 1e4 * (1 + np.arange(40) / 64)[:, None, None],
        "k": 1e4,
        "v": (np.arange(384) // 128)[:, None, None],
        "bias": 0,
    }
    for each in ready.problem.inputs:
        drawn = np.broadcast_to(np.float32(values[each.name]), each.view.shape)
        each.view[...] = drawn if each.name == "bias" else TO_BITS["bf16"](drawn)
    ready.run(EAGER, fused=fused)
    (out,) = (each.view for each in ready.problem.outputs)
    assert np.array_equal(out, TO_BITS["bf16"](np.ones(out.shape, np.float32)))
