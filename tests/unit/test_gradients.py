# SPDX-License-Identifier: Apache-2.0
"""The gradients by definition: against differences and autograd, and what their bounds refuse."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
from fmha_gen.ops import gradients
from fmha_gen.ops.backward import BACKWARD, forward_of
from fmha_gen.ops.compare import judge_rows
from fmha_gen.ops.masks import MASKS, Lengths, window
from fmha_gen.ops.operation import Given
from fmha_gen.ops.reference import attention
from fmha_gen.ops.scores import TANH_UNIT, capped
from hypothesis import example, given, settings
from hypothesis import strategies as st
from right_gradients import (
    DAMAGES,
    DAMAGES_OF_CAPS,
    compute,
    forward,
    in_steps,
    in_strips,
)
from right_kernel import rounded

NAMES = ("dq", "dk", "dv")


def random_inputs(seed, batch, rows, keys, heads, kv_heads, d_qk, d_v, dtype="bf16"):
    """q, k, v and dO."""
    random = np.random.default_rng(seed)
    shapes = (
        *((batch, rows, heads, d_qk), (batch, keys, kv_heads, d_qk)),
        *((batch, keys, kv_heads, d_v), (batch, rows, heads, d_v)),
    )
    return [rounded(dtype, random.standard_normal(x, np.float32)) for x in shapes]


# --- the definition -------------------------------------------------------------------------


CAPS = (None, 1.5, 30.0)
WINDOW = window(3, 4)
SEEN = {**MASKS, "window": WINDOW}
each_cap = pytest.mark.parametrize("cap", CAPS)


@each_cap
@pytest.mark.parametrize("mask", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize(("rows", "keys"), [(17, 17), (17, 9), (5, 17), (1, 1)])
def test_differences_of_the_forward_pass(mask, rows, keys, cap):
    """Central differences of sum(dO * O), whose error is step^2 of a third derivative."""
    inputs = random_inputs(rows, 1, rows, keys, 4, 2, 32, 16)
    *qkv, dout = (x.astype(np.float64) for x in inputs)
    scale, step = 32**-0.5, 2.0**-12
    found = gradients.gradients(*qkv, dout, scale=scale, mask=mask, cap=cap)
    options = {"scale": scale, "mask": mask, "score": capped(cap)}

    def loss():
        return (dout * attention(*qkv, **options).out).sum()

    random = np.random.default_rng(7)
    for x, gradient in zip(qkv, found, strict=True):
        assert gradient.shape == x.shape
        for _ in range(40):
            place = tuple(random.integers(0, x.shape))
            before = x[place]
            sides = []
            for side in (step, -step):
                x[place] = before + side
                sides.append(loss())
            x[place] = before
            difference = (sides[0] - sides[1]) / (2 * step)
            assert gradient[place] == pytest.approx(difference, rel=1e-5, abs=1e-6)


@each_cap
@pytest.mark.parametrize("mask", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize("rows", [5, 33, 40])
def test_autograd(mask, rows, cap):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    inputs = random_inputs(rows, 2, rows, 33, 6, 2, 24, 16)
    q, k, v, dout = (torch.from_numpy(x).double() for x in inputs)
    for x in (q, k, v):
        x.requires_grad_()
    wide_k, wide_v = (x.repeat_interleave(3, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, wide_k) * 0.2
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    seen = torch.from_numpy(mask.visible(range(rows), Lengths(rows, 33)))
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, wide_v)
    wanted = torch.autograd.grad(out, (q, k, v), dout)
    found = gradients.gradients(*inputs, scale=0.2, mask=mask, cap=cap)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other.nan_to_num(0.0), rtol=1e-9, atol=1e-11)


@each_cap
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_blocks_of_rows_change_nothing(monkeypatch, mask, cap):
    inputs = random_inputs(0, 2, 19, 11, 4, 2, 8, 16)
    options = {"scale": 1.0, "mask": mask, "cap": cap}
    whole = gradients.truth(*inputs, **options, dtype="fp16")
    exact = gradients.gradients(*inputs, **options)
    monkeypatch.setitem(gradients.BLOCK_SCORES, "numpy", 3 * 11)
    parts = gradients.truth(*inputs, **options, dtype="fp16")
    for name in NAMES:
        one, other = getattr(whole, name), getattr(parts, name)
        np.testing.assert_allclose(getattr(exact, name), one.exact, rtol=1e-12)
        for a, b in zip(one[:3], other[:3], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-15)


def test_kv_heads_that_are_not_wanted_may_be_left_out():
    inputs = random_inputs(0, 2, 8, 5, 4, 2, 8, 8)
    options = {"scale": 1.0, "mask": MASKS["none"]}
    whole = gradients.gradients(*inputs, **options)
    wanted = np.zeros((2, 8, 4), np.bool_)
    wanted[1, 3, 2] = True  # of the second KV head
    some = gradients.gradients(*inputs, **options, wanted=wanted)
    for one, other, heads in zip(some, whole, (slice(2, 4), 1, 1), strict=True):
        np.testing.assert_array_equal(one[1, :, heads], other[1, :, heads])
        assert np.isnan(one[0]).all() and np.isnan(one[1, :, 0]).all()


def test_rows_without_keys_and_keys_without_rows_are_0_and_nothing_else_is_right():
    inputs = random_inputs(3, 1, 9, 4, 2, 1, 8, 8)
    truth = gradients.truth(*inputs, scale=0.3, mask=MASKS["causal"], dtype="bf16")
    assert (truth.dq.exact[:, :5] == 0).all() and (truth.dq.bound[:, :5] == 0).all()
    assert (truth.dq.bound[:, 5:] > 0).all()
    assert (truth.dk.bound > 0).all() and (truth.dv.bound > 0).all()
    found = truth.dq.exact.copy()
    found[0, 2, 1, 3] = 1e-30
    verdict = judge_rows("dq", found, truth.dq, alike=False)
    assert verdict.finding.startswith("row 2 of head 1, batch 0 of dq: wrong")


# --- what the bounds take and refuse --------------------------------------------------------

KINDS = [
    *((512, 512, "none", "bf16", 1.0, 1), (512, 512, "causal", "bf16", 1.0, 2)),
    *((512, 512, "none", "fp16", 1.0, 1), (300, 201, "causal", "fp16", 1.0, 3)),
    *((512, 256, "none", "bf16", 8.0, 1), (256, 512, "causal", "fp16", 8.0, 1)),
]


def call(rows, keys, mask, dtype, steep, group, seed=0, head_dim=128):
    inputs = random_inputs(seed, 1, rows, keys, 2 * group, 2, head_dim, head_dim, dtype)
    options = {"scale": steep * head_dim**-0.5, "mask": MASKS[mask]}
    return inputs, {**options, "dtype": dtype}


def verdicts(inputs, options, found):
    truth = gradients.truth(*inputs, **options)
    return truth, {
        name: judge_rows(name, found[name], getattr(truth, name), alike=False)
        for name in NAMES
    }


@pytest.mark.parametrize(("rows", "keys", "mask", "dtype", "steep", "group"), KINDS)
def test_right_kernels_hold_and_bounds_are_within_those_of_16_bit_steps(
    rows, keys, mask, dtype, steep, group
):
    """1.5 times as wrong as a computation whose every step is rounded: by norm over a case."""
    inputs, options = call(rows, keys, mask, dtype, steep, group)
    given = forward(*inputs[:3], **options)
    steps = in_steps(*inputs, **options)
    for packed in (False, True)[: 1 + (dtype == "bf16")]:
        found = compute(*inputs, *given, **options, packed=packed)
        truth, judged = verdicts(inputs, options, found)
        for name, verdict in judged.items():
            assert verdict.finding == "" and 0.1 < verdict.of_bound < 0.8, name
    for name in NAMES:
        of = getattr(truth, name)
        error = np.linalg.norm(steps[name] - of.exact)
        allowed = np.linalg.norm(of.rms) + np.linalg.norm(of.shift)
        assert allowed < 1.5 * error, (name, allowed / error)


LONG = ((64, 4096, "none", "bf16", 1.0, 1), (64, 16384, "none", "bf16", 1.0, 1))


@pytest.mark.parametrize(
    ("rows", "keys", "mask", "dtype", "steep", "group"),
    [*(kind for kind in KINDS if kind[3] == "bf16"), *LONG],
)
def test_sums_in_fp16_hold_and_are_within_16_bit_steps(
    rows, keys, mask, dtype, steep, group
):
    """And dK and dV are what they are without."""
    inputs, options = call(rows, keys, mask, dtype, steep, group)
    given = forward(*inputs[:3], **options)
    steps = in_steps(*inputs, **options)
    found = compute(*inputs, *given, **options, packed=True, sums_in="fp16")
    truth, judged = verdicts(inputs, {**options, "half_sums": True}, found)
    assert [each.finding for each in judged.values()] == [""] * 3
    error, of_steps = (np.linalg.norm(x["dq"] - truth.dq.exact) for x in (found, steps))
    assert error < of_steps
    allowed = np.linalg.norm(truth.dq.rms) + np.linalg.norm(truth.dq.shift)
    assert allowed < 1.5 * of_steps
    plain = gradients.truth(*inputs, **options)
    assert (truth.dq.rms >= plain.dq.rms).all() and plain.dq.reordered is None
    np.testing.assert_array_equal(truth.dv.rms, plain.dv.rms)


def test_sums_in_8_bits_are_found():
    inputs, options = call(*LONG[1])
    given = forward(*inputs[:3], **options)
    found = compute(*inputs, *given, **options, packed=True, sums_in="bf16")
    _, judged = verdicts(inputs, {**options, "half_sums": True}, found)
    assert judged["dq"].finding and not judged["dk"].finding


@pytest.mark.parametrize("keys", [4096, 16384])
@pytest.mark.parametrize("strips", [1, 16])
def test_where_values_drift_sums_in_fp16_hold_and_are_exact_in_strips(keys, strips):
    """Of dS of a row the first half adds what the second one takes away, times a mean of K."""
    inputs, options = call(64, keys, "none", "bf16", 1.0, 1)
    half = np.where(np.arange(keys) < keys // 2, -0.5, 0.5)[:, None, None]
    inputs[1:3] = [
        rounded("bf16", x + of) for x, of in zip(inputs[1:3], (0.5, half), strict=True)
    ]
    given = forward(*inputs[:3], **options)
    halves = {"sums_in": "fp16", "strips": strips}
    found = compute(*inputs, *given, **options, packed=True, **halves)
    truth, judged = verdicts(
        inputs, {**options, "half_sums": True, "strips": strips}, found
    )
    assert judged["dq"].finding == "" and judged["dq"].of_bound < 0.8
    plain = compute(*inputs, *given, **options, packed=True)
    wrong, right = (np.linalg.norm(x["dq"] - truth.dq.exact) for x in (found, plain))
    assert (wrong > 1.3 * right) == (strips == 1)


@pytest.mark.parametrize("tiles", [1, 5, 16, 17, 35, 1000])
def test_strips_take_turns(tiles):
    assert gradients.in_strips(tiles, 16) == in_strips(tiles, 16)
    assert gradients.in_strips(tiles, 1) == list(range(tiles))


def of_lengths(*of_heads):
    """A call whose rows of dO have lengths: of each query head one for each 128 rows."""
    group = len(of_heads)
    inputs, options = call(
        128 * len(of_heads[0]), 1000, "none", "bf16", 1.0, group, head_dim=64
    )
    for head, lengths in enumerate(of_heads):
        for block, length in enumerate(lengths):
            rows = slice(128 * block, 128 * (block + 1))
            inputs[3][:, rows, head::group] *= np.float32(length)
    return inputs, options


@pytest.mark.parametrize("damage", ["", "no factor of short blocks"])
def test_blocks_that_are_far_shorter_have_a_scale_of_their_own(damage):
    inputs, options = of_lengths((1.0, 2.0**-14, 2.0**-22))
    given = forward(*inputs[:3], **options)
    options_of_halves = {"packed": True, "sums_in": "fp16", "damage": damage}
    found = compute(*inputs, *given, **options, **options_of_halves)
    _, judged = verdicts(inputs, {**options, "half_sums": True}, found)
    assert bool(judged["dq"].finding) == bool(damage)
    assert damage or judged["dq"].of_bound < 0.8


def test_a_query_head_has_the_scale_of_its_group():
    inputs, options = of_lengths((64.0, 64.0), (1.0, 2.0**-4))
    given = forward(*inputs[:3], **options)
    found = compute(*inputs, *given, **options, packed=True, sums_in="fp16")
    _, judged = verdicts(inputs, {**options, "half_sums": True}, found)
    assert judged["dq"].finding == "" and judged["dq"].of_bound < 0.8


def test_sums_of_rows_that_are_short_beside_others_have_the_error_of_those():
    """One scale for all: a row of which little is left may be wrong by a step of it."""
    inputs, options = call(64, 300, "none", "bf16", 1.0, 1)
    inputs[3][:, ::2] *= 2.0**-24
    given = forward(*inputs[:3], **options)
    found = compute(*inputs, *given, **options, packed=True, sums_in="fp16")
    _, judged = verdicts(inputs, {**options, "half_sums": True}, found)
    assert judged["dq"].finding == ""
    _, judged = verdicts(inputs, options, found)
    assert judged["dq"].finding.startswith("row 0 of head 0, batch 0")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("cap", "steep"), [(0.5, 1.0), (10, 1.0), (50, 1.0), (50, 30.0), (1000, 1.0)]
)
def test_right_kernels_of_capped_scores_hold(cap, steep, dtype):
    """With tangents as wrong as PTX allows; with those of 12 bits, as measured, within 1.5 times
    the error of steps in 16 bits (decisions 0006 and 0041)."""
    inputs, options = call(256, 200, "causal", dtype, steep, 1)
    options["cap"] = cap
    given = forward(*inputs[:3], **options)
    steps = in_steps(*inputs, **options)
    for packed in (False, True)[: 1 + (dtype == "bf16")]:
        found = compute(*inputs, *given, **options, packed=packed)
        _, judged = verdicts(inputs, options, found)
        assert [each.finding for each in judged.values()] == [""] * 3
        of_12_bits = {**options, "packed": packed, "tanh_unit": TANH_UNIT / 2}
        found = compute(*inputs, *given, **of_12_bits)
        truth, judged = verdicts(inputs, options, found)
        for name in NAMES:
            assert judged[name].of_bound < 0.8, name
            exact = getattr(truth, name).exact
            error, of_steps = (np.linalg.norm(x[name] - exact) for x in (found, steps))
            assert error < 1.5 * of_steps, (name, error / of_steps)


def test_a_cap_that_no_score_comes_near_changes_little():
    inputs, options = call(70, 50, "causal", "bf16", 1.0, 2)
    plain, far = (
        gradients.truth(*inputs, **options, cap=cap) for cap in (None, 1_000_000)
    )
    for name in NAMES:
        one, other = getattr(plain, name), getattr(far, name)
        np.testing.assert_allclose(other.exact, one.exact, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(other.rms, one.rms, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("damage", DAMAGES_OF_CAPS)
def test_damage_of_capped_scores_is_found(damage, dtype):
    inputs, options = call(150, 130, "causal", dtype, 1.0, 2, head_dim=64)
    options["cap"] = 2.0
    given = forward(*inputs[:3], **options)
    found = compute(*inputs, *given, **options, damage=damage)
    _, judged = verdicts(inputs, options, found)
    wrong = {name for name, verdict in judged.items() if verdict.finding}
    assert wrong == ({"dq", "dk"} if "slope" in damage else {*NAMES})


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 70),
    keys=st.integers(1, 70),
    group=st.integers(1, 3),
    mask=st.sampled_from([*MASKS]),
    dtype=st.sampled_from(["bf16", "fp16"]),
    steep=st.sampled_from([2.0**-10, 1.0, 30.0, 1e3]),
    head_dim=st.sampled_from([32, 64, 256]),
    cap=st.sampled_from([None, 0.001, 1.0, 30.0, 1e6]),
)
@example(23, 53, 23, 2, "causal", "bf16", 1.0, 32, 0.001)  # D's error, times a slope's
@settings(max_examples=60, deadline=None)
def test_a_right_kernel_is_never_refused(
    seed, rows, keys, group, mask, dtype, steep, head_dim, cap
):
    inputs, options = call(rows, keys, mask, dtype, steep, group, seed, head_dim)
    options["cap"] = cap
    given = forward(*inputs[:3], **options)
    packed = dtype == "bf16" and seed % 2 == 0
    found = compute(*inputs, *given, **options, packed=packed)
    _, judged = verdicts(inputs, options, found)
    assert [each.finding for each in judged.values()] == [""] * 3


OF = {
    "dK without scale": "dk",
    "dQ scaled twice": "dq",
    "dQ misses a KV tile": "dq",
    "dQ adds a KV tile twice": "dq",
    "dV misses a row block": "dv",
    "dK of the first head of a group alone": "dk",
    "a row beyond the last one": "dv",
    "dV of dS": "dv",
    "dS in 5 bits": "dq dk",
    **dict.fromkeys(("D left out", "D of the next row"), "dq dk"),
    "V of the next KV head": "dq dk",
}
"""The outputs that a damage is seen in; all where it is not among these."""


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(damage, dtype):
    inputs, options = call(150, 130, "causal", dtype, 1.0, 2, head_dim=64)
    given = forward(*inputs[:3], **options)
    found = compute(*inputs, *given, **options, damage=damage)
    _, judged = verdicts(inputs, options, found)
    wrong = {name for name, verdict in judged.items() if verdict.finding}
    assert wrong == {*OF.get(damage, "dq dk dv").split()}


def test_an_element_a_row_and_a_head_that_are_wrong_are_named():
    inputs, options = call(70, 40, "none", "bf16", 1.0, 2)
    given = forward(*inputs[:3], **options)
    right = compute(*inputs, *given, **options)
    truth, _ = verdicts(inputs, options, right)
    one = {name: x.copy() for name, x in right.items()}
    one["dk"][0, 7, 1, 5] += 10 * truth.dk.rms[0, 7, 1, 5]
    _, judged = verdicts(inputs, options, one)
    finding = judged["dk"].finding
    assert finding.startswith("row 7 of head 1, batch 0 of dk: wrong; dk[0, 7, 1, 5]")
    assert judged["dq"].finding == judged["dv"].finding == ""
    noise = np.random.default_rng(1).choice([-3.0, 3.0], right["dv"].shape)
    _, judged = verdicts(
        inputs, options, {**right, "dv": right["dv"] + noise * truth.dv.rms}
    )
    assert "of dv: its mean square error is" in judged["dv"].finding
    right["dq"][0, 3, 1, 2] = math.nan
    _, judged = verdicts(inputs, options, right)
    assert judged["dq"].finding == "row 3 of head 1, batch 0 of dq: NaN"


def test_one_row_that_has_all_the_error_is_no_lottery():
    """dO is 0 but in one row: of a head's mean square error nothing else is a part."""
    for seed in range(30):
        inputs, options = call(65, 33, "none", "bf16", 1.0, 1, seed, 64)
        inputs[3][:, np.arange(65) != seed] = 0
        given = forward(*inputs[:3], **options)
        found = compute(*inputs, *given, **options, packed=True)
        _, judged = verdicts(inputs, options, found)
        assert [each.finding for each in judged.values()] == [""] * 3


# --- NumPy and PyTorch, and the operation ---------------------------------------------------


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@each_cap
def test_numpy_and_pytorch_agree(mask, dtype, cap):
    torch = importlib.import_module("torch") if _has_torch() else None
    if torch is None:
        pytest.skip("needs PyTorch: pip install 'fmha-gen[torch]'")
    inputs = random_inputs(1, 2, 21, 13, 6, 2, 24, 16, dtype)
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    tensors = [torch.from_numpy(x).to(kinds[dtype]) for x in inputs]
    options = {"scale": 0.2, "mask": mask, "dtype": dtype, "cap": cap}
    ours, theirs = gradients.truth(*inputs, **options), gradients.truth(
        *tensors, **options
    )
    for name in NAMES:
        pair = zip(getattr(ours, name)[:3], getattr(theirs, name)[:3], strict=True)
        for one, other in pair:
            assert other.dtype == torch.float64
            np.testing.assert_allclose(other.numpy(), one, rtol=1e-8, atol=1e-11)
    _, judged = verdicts(inputs, options, {n: getattr(ours, n).exact for n in NAMES})
    assert all(each.of_bound == 0 for each in judged.values())
    for name in NAMES:
        of = getattr(theirs, name)
        spoiled = of.exact + 9 * of.rms + 1e-3
        verdict = judge_rows(name, spoiled, of, alike=False)
        assert verdict.finding


def _has_torch():
    return importlib.util.find_spec("torch") is not None


SPEC = {
    **{"name": "x", "arch": "sm90", "op": "fmha_bwd", "dtype": "bf16"},
    **{"head_dim": {"qk": 24, "v": 16}, "seqlen": {"q": "dynamic", "kv": "dynamic"}},
    **{"q_per_kv": 3, "mask": "causal", "deterministic": False},
}


def test_the_operation_judges_each_output_where_rows_are_wanted():
    inputs = random_inputs(5, 2, 20, 12, 6, 2, 24, 16)
    options = {"scale": 0.2, "mask": MASKS["causal"], "dtype": "bf16"}
    out, lse = forward(*inputs[:3], **options)
    named = dict(zip(("q", "k", "v", "dout"), inputs, strict=True))
    given = Given(SPEC, {**named, "out": out, "lse": lse}, 0.2)
    found = compute(*inputs, out, lse, **options)
    judged = BACKWARD.judge(given, found, BACKWARD.truth(given), 64)
    assert [*judged] == [*NAMES]
    assert all(x.finding == "" and 0 < x.of_bound < 1 for x in judged.values())
    exact = BACKWARD.exact(given)
    assert [exact[name].shape for name in NAMES] == [found[n].shape for n in NAMES]
    wanted = np.zeros((2, 20, 6), np.bool_)
    wanted[1, 15:, 4] = True  # a row of the second KV head
    truth = BACKWARD.truth(given, wanted)
    spoiled = {name: x.copy() for name, x in found.items()}
    spoiled["dq"][0, 3, 0] = math.nan
    spoiled["dk"][:, 0, 0] = 99.0
    judged = BACKWARD.judge(given, spoiled, truth, 64, wanted)
    assert all(x.finding == "" for x in judged.values())
    spoiled["dk"][1, 0, 1] = 99.0
    judged = BACKWARD.judge(given, spoiled, truth, 64, wanted)
    assert judged["dk"].finding.startswith("row 0 of head 1, batch 1 of dk: wrong")


def test_flops_are_those_of_five_products():
    class Sizes:
        batch, kv_heads, q, kv = 2, 3, 64, 64

    spec = {**SPEC, "mask": "none", "head_dim": {"qk": 128, "v": 128}}
    whole = BACKWARD.flops(spec, Sizes)
    assert whole == 10 * 2 * 9 * 64 * 64 * 128
    assert BACKWARD.flops({**spec, "mask": "causal"}, Sizes) == whole / 2


def test_the_forward_pass_of_a_spec():
    forward_spec = forward_of(SPEC)
    assert forward_spec["op"] == "fmha_fwd" and forward_spec["lse"] is True
    assert "deterministic" not in forward_spec
    assert forward_spec["mask"] == "causal"
