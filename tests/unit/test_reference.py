# SPDX-License-Identifier: Apache-2.0
"""The one reference: against attention written out by loops, and NumPy against PyTorch."""

from __future__ import annotations

import importlib
import itertools
import math

import numpy as np
import pytest
from fmha_gen.ops import reference
from fmha_gen.ops.masks import MASKS
from fmha_gen.ops.scores import BIAS, Score
from hypothesis import given, settings
from hypothesis import strategies as st
from right_kernel import rounded


def biased(bias):
    return {"score": Score(BIAS), "tensors": {"bias": bias}}


def by_loops(q, k, v, scale, causal, sink=None, bias=None):
    batch, q_len, heads, _ = q.shape
    kv_len, kv_heads = k.shape[1:3]
    out = np.zeros((batch, q_len, heads, v.shape[-1]))
    lse = np.full((batch, heads, q_len), -math.inf)
    for b, head, row in np.ndindex(batch, heads, q_len):
        shared = head // (heads // kv_heads)
        keys = [j for j in range(kv_len) if not causal or j <= row + kv_len - q_len]
        added = np.zeros(kv_len) if bias is None else bias[b, head, row].astype(float)
        weights = [
            math.exp(
                scale * math.fsum(map(float, q[b, row, head] * k[b, j, shared]))
                + added[j]
            )
            for j in keys
        ]
        own = [] if sink is None else [math.exp(sink[head])]
        if total := math.fsum(weights + own):
            lse[b, head, row] = math.log(total)
            for weight, j in zip(weights, keys, strict=True):
                out[b, row, head] += weight / total * v[b, j, shared].astype(np.float64)
    return out, lse


def random_inputs(seed, batch, q_len, kv_len, heads, kv_heads, qk, v, dtype="bf16"):
    random = np.random.default_rng(seed)
    shapes = (
        (batch, q_len, heads, qk),
        (batch, kv_len, kv_heads, qk),
        (batch, kv_len, kv_heads, v),
    )
    return [
        rounded(dtype, random.standard_normal(shape, np.float32)) for shape in shapes
    ]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 3), (3, 5), (1, 1), (4, 4), (5, 1)])
def test_the_definition(mask, q_len, kv_len):
    q, k, v = random_inputs(q_len, 2, q_len, kv_len, 4, 2, 8, 6)
    out, lse = by_loops(q, k, v, 0.25, mask is MASKS["causal"])
    found = reference.attention(q, k, v, scale=0.25, mask=mask)
    bounded = reference.truth(q, k, v, scale=0.25, mask=mask, dtype="bf16")
    for one in (found, bounded):
        np.testing.assert_allclose(one.out, out, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(one.lse, lse, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 3), (3, 5), (1, 1)])
def test_a_sink_is_in_the_sum(mask, q_len, kv_len):
    q, k, v = random_inputs(q_len, 2, q_len, kv_len, 4, 2, 8, 6)
    sink = np.array([-1.0, 0.5, 3.0, -np.inf], np.float32)
    out, lse = by_loops(q, k, v, 0.25, mask is MASKS["causal"], sink)
    options = {"scale": 0.25, "mask": mask, "sink": sink}
    found = reference.attention(q, k, v, **options)
    bounded = reference.truth(q, k, v, **options, dtype="bf16")
    for one in (found, bounded):
        np.testing.assert_allclose(one.out, out, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(one.lse, lse, rtol=1e-12, atol=1e-14)
    without = reference.truth(q, k, v, scale=0.25, mask=mask, dtype="bf16")
    for values, as_before in zip(bounded, without, strict=True):
        axis = 2 if values.ndim == 4 else 1  # the head whose sink is none
        np.testing.assert_allclose(
            np.take(values, 3, axis), np.take(as_before, 3, axis), rtol=1e-6, atol=5e-7
        )


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", [*itertools.product((1, 2), (1, 4), (1, 5))])
def test_a_bias_is_added_before_the_mask(mask, shape):
    q, k, v = random_inputs(7, 2, 5, 5, 4, 2, 8, 6)
    bias = np.random.default_rng(8).standard_normal((*shape, 5)).astype(np.float32)
    bias[..., 2] = -np.inf
    whole = np.broadcast_to(bias, (2, 4, 5, 5))
    out, lse = by_loops(q, k, v, 0.25, mask is MASKS["causal"], bias=whole)
    if shape[2] == 5 and mask is MASKS["causal"]:
        bias[:, :, np.triu(np.ones((5, 5), bool), 1)] = np.nan
    options = {"scale": 0.25, "mask": mask, **biased(bias)}
    found = reference.attention(q, k, v, **options)
    bounded = reference.truth(q, k, v, **options, dtype="bf16")
    for one in (found, bounded):
        np.testing.assert_allclose(one.out, out, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(one.lse, lse, rtol=1e-12, atol=1e-14)
    without = reference.truth(q, k, v, scale=0.25, mask=mask, dtype="bf16")
    assert bounded.shift.max() < 2 * without.shift.max()


def test_a_bias_that_hides_keys_costs_no_accuracy():
    """The least float in place of -inf: a key without weight, whose size is in no bound."""
    q, k, v = random_inputs(9, 1, 5, 8, 1, 1, 8, 6)
    bias = np.zeros((1, 1, 5, 8), np.float32)
    options = {"scale": 0.25, "mask": MASKS["none"], "dtype": "bf16"}
    bounds = []
    for hidden in (-np.inf, np.finfo(np.float32).min):
        bias[..., 3:5] = hidden
        bounds.append(reference.truth(q, k, v, **biased(bias), **options))
    for one, other in zip(*bounds, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    bias[...] = np.finfo(np.float32).min  # of all keys: as if of none
    whole = reference.truth(q, k, v, **biased(bias), **options)
    assert np.isfinite(whole.out).all() and (whole.lse < -1e38).all()


def test_sinks_that_are_no_numbers_and_sinks_alone():
    q, k, v = random_inputs(0, 1, 5, 3, 4, 2, 8, 6)
    sink = np.array([np.inf, np.nan, -2.0, 1000.0], np.float32)
    options = {"scale": 0.25, "mask": MASKS["causal"], "sink": sink, "dtype": "bf16"}
    found = reference.truth(q, k, v, **options)
    assert (found.out[:, :, 0] == 0).all() and np.isposinf(found.lse[:, 0]).all()
    assert np.isnan(found.out[:, 2:, 1]).all() and np.isnan(found.lse[:, 1]).all()
    assert (found.out[:, :2, 2:] == 0).all(), "rows that see no key"
    assert (found.out_bound[:, :2, 2:] == 0).all(), "only 0 is right"
    assert (found.lse[:, 2:, :2] == sink[2:, None]).all()
    assert (found.out[:, :, 3] == 0).all() and (found.lse[:, 3] == 1000).all()


def test_a_key_of_minus_infinity_has_no_weight():
    q, k, v = random_inputs(0, 1, 3, 4, 1, 1, 8, 8)
    q[..., 0] = 1.0
    without = reference.attention(q, k[:, :3], v[:, :3], scale=1.0, mask=MASKS["none"])
    k[:, 3, :, 0] = -np.inf
    found = reference.truth(q, k, v, scale=1.0, mask=MASKS["none"], dtype="bf16")
    np.testing.assert_allclose(found.out, without.out, rtol=1e-12)
    np.testing.assert_allclose(found.lse, without.lse, rtol=1e-12)
    k[..., 0] = -np.inf
    found = reference.truth(q, k, v, scale=1.0, mask=MASKS["none"], dtype="bf16")
    assert (found.out == 0).all() and (found.lse == -np.inf).all()
    assert (found.out_bound == 0).all(), "only 0 is right"


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_blocks_of_rows_change_nothing(monkeypatch, mask):
    inputs = random_inputs(0, 2, 9, 11, 4, 2, 8, 8)
    options = {"scale": 1.0, "mask": mask, "dtype": "bf16"}
    whole = reference.truth(*inputs, **options)
    monkeypatch.setattr(reference, "BLOCK_SCORES", {"numpy": 4 * 22})
    parts = reference.truth(*inputs, **options)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-15)


def test_rows_that_are_not_wanted_may_be_left_out(monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_SCORES", {"numpy": 2 * 5})
    inputs = random_inputs(0, 2, 8, 5, 2, 2, 8, 8)
    options = {"scale": 1.0, "mask": MASKS["none"], "dtype": "fp16"}
    whole = reference.truth(*inputs, **options)
    wanted = np.zeros((2, 8, 2), np.bool_)
    wanted[1, 3, 1] = True
    found = reference.truth(*inputs, **options, wanted=wanted)
    np.testing.assert_array_equal(found.out[wanted], whole.out[wanted])
    np.testing.assert_array_equal(found.rms[wanted], whole.rms[wanted])
    assert np.isnan(found.out[0]).all() and np.isnan(found.out[1, :, 0]).all()


# --- what a right kernel may be off by ----------------------------------------------------


def test_scores_that_fp32_cannot_tell_apart_leave_either_key():
    """Of two keys a kernel may take either where the error of their scores hides which is first."""
    q = np.full((1, 1, 1, 64), 1e4, np.float32)
    k = np.full((1, 2, 1, 64), 1e4, np.float32)
    k[0, 1, 0, 0] *= 1 - 2.0**-8  # of 64: a score lower by 4e5, and an error of 6e3
    v = np.array([1.0, -1.0], np.float32).reshape(1, 2, 1, 1) * np.ones(8, np.float32)
    options = {"mask": MASKS["none"], "dtype": "bf16"}
    told_apart = reference.truth(q, k, v, scale=1.0, **options)
    assert (told_apart.out_bound < 0.1).all()
    k[0, 1, 0, 0] = 1e4 * (1 - 2.0**-15)  # 3e3: float64 tells them apart, fp32 may not
    hidden = reference.truth(q, k, v, scale=1.0, **options)
    assert (hidden.out == 1.0).all()
    assert (hidden.out_bound >= 2.0).all()
    assert (hidden.lse_bound < 1e-4 * np.abs(hidden.lse)).all()


@given(
    seed=st.integers(0, 2**32 - 1),
    head_dim=st.sampled_from([16, 64, 128, 256]),
    log_scale=st.floats(-6.0, 6.0),
)
@settings(max_examples=60, deadline=None)
def test_wrong_scores_stay_within_the_shift(seed, head_dim, log_scale):
    """Scores that are all off by what fp32 may make of them, to either side at random."""
    random = np.random.default_rng(seed)
    scale = 10.0**log_scale
    q, k, v = random_inputs(seed, 1, 3, 9, 1, 1, head_dim, 5)
    truth = reference.truth(q, k, v, scale=scale, mask=MASKS["none"], dtype="bf16")
    scores = (q[0, :, 0].astype(np.float64) @ k[0, :, 0].T.astype(np.float64)) * scale
    error = np.linalg.norm(q[0, :, 0], axis=-1)[:, None] * np.linalg.norm(
        k[0, :, 0], axis=-1
    )
    error = error * scale * reference.score_unit(head_dim)
    off = scores + error * random.choice([-1.0, 1.0], scores.shape)
    largest = off.max(-1, keepdims=True)
    weights = np.exp(off - largest)
    total = weights.sum(-1, keepdims=True)
    moved = np.abs(weights / total @ v[0, :, 0] - truth.out[0, :, 0])
    assert (moved <= truth.shift[0, :, 0] + 1e-12).all()
    lse = (largest + np.log(total))[:, 0]
    assert (np.abs(lse - truth.lse[0, 0]) <= truth.lse_bound[0, 0]).all()


# --- NumPy and PyTorch --------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32 - 1),
    q_len=st.integers(1, 40),
    kv_len=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    mask=st.sampled_from([*MASKS.values()]),
    dtype=st.sampled_from(["bf16", "fp16"]),
    magnitude=st.sampled_from([1.0, 30.0, 1e4]),
    minus_inf=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_numpy_and_pytorch_agree(
    seed, q_len, kv_len, kv_heads, group, mask, dtype, magnitude, minus_inf
):
    pytest.importorskip("torch", reason="needs PyTorch: pip install 'fmha-gen[torch]'")
    torch = importlib.import_module("torch")
    heads = kv_heads * group
    inputs = random_inputs(seed, 2, q_len, kv_len, heads, kv_heads, 24, 16, dtype)
    if minus_inf:
        inputs[0][..., 0] = 1.0
        inputs[1][:, :: 1 + seed % 3, :, 0] = -np.inf
    options = {"scale": 0.2 * magnitude, "mask": mask}
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    tensors = [torch.from_numpy(x).to(kinds[dtype]) for x in inputs]
    pairs = [
        (
            reference.attention(*inputs, **options),
            reference.attention(*tensors, **options),
        ),
        (
            reference.truth(*inputs, **options, dtype=dtype),
            reference.truth(*tensors, **options, dtype=dtype),
        ),
    ]
    for ours, theirs in pairs:
        for name, one, other in zip(ours._fields, ours, theirs, strict=True):
            assert other.dtype == torch.float64
            # The difference of two squares, of which a root is taken, may have lost its digits.
            limits = {"atol": 1e-6} if name == "shift" else {"atol": 1e-11}
            np.testing.assert_allclose(other.numpy(), one, rtol=1e-8, **limits)


def test_an_exponential_by_a_polynomial_widens_the_bounds_by_its_error():
    """Of two keys of a row of 24 one has a weight that is too large by as much."""
    error = reference.POLYNOMIAL_ERROR
    q, k, v = random_inputs(3, 1, 1, 2, 1, 1, 64, 24)
    options = {"scale": 0.125, "mask": MASKS["none"], "dtype": "fp16"}
    exact = reference.truth(q, k, v, **options)
    wide = reference.truth(q, k, v, **options, exp_error=error)
    weights = np.exp(0.125 * (q[0, 0, 0] @ k[0, :, 0].T).astype(np.float64))
    lse = np.log(weights.sum())
    weights[1] *= 1 + error
    assert abs(np.log(weights.sum()) - lse) > exact.lse_bound[0, 0, 0]
    assert abs(np.log(weights.sum()) - lse) <= wide.lse_bound[0, 0, 0]
    assert (exact.out_bound < wide.out_bound).all()
    assert (wide.out_bound < 1.5 * exact.out_bound).all()
