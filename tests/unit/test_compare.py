# SPDX-License-Identifier: Apache-2.0
"""The verdict on a result: what is wrong in one row is named, and a right kernel is not refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fmha_gen.ops.cases import STEEP, Case, Tiles
from fmha_gen.ops.compare import (
    judge_lse,
    judge_output,
    nearly_same,
    outside_touched,
    rows_named,
    same_bits,
)
from fmha_gen.ops.inputs import values
from fmha_gen.ops.masks import MASKS
from fmha_gen.ops.reference import Bounded, Truth, attention, truth
from hypothesis import event, given, settings, target
from hypothesis import strategies as st
from right_kernel import compute, rounded

SHAPE = (2, 5, 3, 4)  # batch, rows, heads, columns


def some_truth(rms=0.125, shift=0.0):
    """O and LSE of 1, with the same bounds everywhere: 8 times 1/8 of O."""
    rows = (SHAPE[0], SHAPE[2], SHAPE[1])
    out, lse = np.ones(SHAPE), np.ones(rows)
    return Truth(out, lse, out * rms, out * shift, lse * 0.25, out * rms**2)


@pytest.mark.parametrize(
    ("off", "holds"), [(0.0, True), (0.999, True), (-0.999, True), (1.001, False)]
)
def test_each_element_has_a_bound(off, holds):
    expected = some_truth()
    out = expected.out.copy()
    out[1, 3, 2, 1] += off
    verdict = judge_output(out, expected)
    assert (verdict.finding == "") is holds
    assert verdict.of_bound == pytest.approx(abs(off))
    assert verdict.absolute == pytest.approx(abs(off))
    if not holds:
        assert verdict.finding == (
            "row 3 of head 2, batch 1 of out: wrong; "
            "out[1, 3, 2, 1] is 2.001 instead of 1 +- 1"
        )


def test_scores_may_shift_a_result():
    expected = some_truth(shift=1.0)
    assert judge_output(expected.out + 0.9, expected).finding == ""
    assert judge_output(expected.out + 2.1, expected).finding


def test_rows_and_heads_are_counted():
    wrong = np.zeros(SHAPE[:3], np.bool_)
    wrong[1, 2, 0] = True
    assert rows_named(wrong) == "row 2 of head 0, batch 1"
    wrong[0, 0:3, 1] = wrong[0, 4, 1] = True
    assert rows_named(wrong) == (
        "row 0 of head 1, batch 0 and 4 more (rows 0 to 2, 4 in 2 heads)"
    )


def test_a_head_that_is_off_everywhere_by_little_is_named():
    """Each element is within its bound, but of 4000 none is as it should be."""
    out, lse = np.ones((1, 1000, 2, 4)), np.ones((1, 2, 1000))
    expected = Truth(out, lse, out * 0.125, out * 0.0, lse, out * 0.125**2)
    noise = np.random.default_rng(0).uniform(-1, 1, out.shape) * 0.125 * math.sqrt(3)
    assert judge_output(out + noise, expected).finding == ""
    noise[:, :, 1] *= 2
    verdict = judge_output(out + noise, expected)
    assert verdict.finding.startswith("head 1 of batch 0 of out: its mean square error")
    assert verdict.of_bound > 1


@pytest.mark.parametrize(("of_definition", "holds"), [(1.5, True), (1.7, False)])
def test_errors_are_held_to_those_of_the_definition(of_definition, holds):
    """Of P in 8 bits, where rounding may explain far more, and each element is within its bound."""
    out, lse = np.ones((1, 4000, 2, 64)), np.ones((1, 2, 4000))
    by_definition = 0.01
    bounds = (out * 0.125, out * 0.0, lse, out * by_definition**2)
    expected = Truth(out, lse, *bounds)
    noise = np.random.default_rng(0).choice([-1.0, 1.0], out.shape) * by_definition
    assert judge_output(out + noise, expected).finding == ""
    noise[:, :, 1] *= of_definition
    verdict = judge_output(out + noise, expected)
    assert (verdict.of_bound <= 1) is holds
    assert (verdict.finding == "") is holds
    if not holds:
        head = "head 1 of batch 0 of out: its mean square error"
        assert verdict.finding.startswith(head)
    in_16_bits = expected._replace(defined=expected.rms**2)
    assert judge_output(out + noise, in_16_bits).finding == ""
    assert judge_output(out + noise, in_16_bits).of_bound < 0.2


def test_few_rows_may_be_off_by_more_than_the_definition():
    """As of the expectation: a row alone has a chance to."""
    out, lse = np.ones((1, 1, 1, 64)), np.ones((1, 1, 1))
    expected = Truth(out, lse, out * 0.125, out * 0.0, lse, out * 0.01**2)
    assert judge_output(out + 3 * 0.01, expected).finding == ""
    assert judge_output(out + 20 * 0.01, expected).finding


def test_what_scores_shift_is_not_the_definitions():
    out, lse = np.ones((1, 4000, 1, 8)), np.ones((1, 1, 4000))
    expected = Truth(out, lse, out * 0.125, out * 0.0, lse, out * 0.01**2)
    assert judge_output(out + 0.05, expected).finding
    shifted = expected._replace(shift=out * 0.05)
    assert judge_output(out + 0.05, shifted).finding == ""


def test_only_wanted_rows_are_held_to_the_definition():
    out, lse = np.ones((1, 4000, 1, 8)), np.ones((1, 1, 4000))
    expected = Truth(out, lse, out * 0.125, out * 0.0, lse, out * 0.01**2)
    off = out.copy()
    off[:, 2000:] += 0.05
    wanted = np.ones((1, 4000, 1), np.bool_)
    assert judge_output(off, expected, wanted).finding
    wanted[:, 2000:] = False
    assert judge_output(off, expected, wanted).finding == ""


def test_output_must_be_exact_where_only_one_value_is_right():
    nothing = some_truth(rms=0.0)
    assert judge_output(nothing.out, nothing).of_bound == 0
    out = nothing.out.copy()
    out[0, 1, 2, 3] += 1e-30 + 2.0**-52
    verdict = judge_output(out, nothing)
    assert verdict.of_bound == math.inf
    assert verdict.finding.startswith("row 1 of head 2, batch 0 of out: wrong")


@pytest.mark.parametrize("wrong", [math.inf, -math.inf])
def test_infinite_output_is_an_error(wrong):
    expected = some_truth()
    out = expected.out.copy()
    out[0, 4, 1, 0] = wrong
    assert judge_output(out, expected).finding.startswith("row 4 of head 1, batch 0")


def test_nan_in_output_is_named():
    expected = some_truth()
    out = expected.out.copy()
    out[1, 0, 2, 3] = math.nan
    verdict = judge_output(out, expected)
    assert verdict.finding == "row 0 of head 2, batch 1 of out: NaN"
    assert verdict.of_bound == math.inf


def test_only_wanted_rows_are_judged():
    expected = some_truth()
    wanted = np.zeros(SHAPE[:3], np.bool_)
    wanted[0, 2:4] = True
    out, lse = expected.out.copy(), expected.lse.copy()
    for bad in (math.nan, 100.0):
        out[1], lse[1] = bad, bad
        assert judge_output(out, expected, wanted).finding == ""
        assert judge_lse(lse, expected, wanted.swapaxes(1, 2)).finding == ""
        out[0, 2, 1, 0], lse[0, 1, 2] = bad, bad
        for finding in (
            judge_output(out, expected, wanted).finding,
            judge_lse(lse, expected, wanted.swapaxes(1, 2)).finding,
        ):
            assert finding.startswith("row 2 of head 1, batch 0")
        out[0, 2, 1, 0], lse[0, 1, 2] = 1.0, 1.0


@pytest.mark.parametrize(
    ("off", "holds"), [(0.0, True), (0.249, True), (-0.249, True), (0.251, False)]
)
def test_each_lse_has_a_bound(off, holds):
    expected = some_truth()
    lse = expected.lse.copy()
    lse[1, 2, 3] += off
    verdict = judge_lse(lse, expected)
    assert (verdict.finding == "") is holds
    assert verdict.of_bound == pytest.approx(abs(off) * 4)
    assert verdict.absolute == pytest.approx(abs(off))
    if not holds:
        assert verdict.finding == (
            "row 3 of head 2, batch 1 of lse: wrong; "
            "lse[1, 2, 3] is 1.251 instead of 1 +- 0.25"
        )


@pytest.mark.parametrize("given", [1.0, -1e30, math.inf])
def test_lse_is_minus_infinity_where_no_key_is_seen(given):
    expected = some_truth()
    expected.lse[0, 1, 2] = -math.inf
    assert judge_lse(expected.lse, expected).of_bound == 0
    lse = expected.lse.copy()
    lse[0, 1, 2] = given
    text = "row 2 of head 1, batch 0 of lse: not -inf exactly where a row sees no key"
    assert judge_lse(lse, expected).finding == text


def test_lse_is_minus_infinity_nowhere_else():
    expected = some_truth()
    for bad in (-math.inf, math.inf):
        lse = expected.lse.copy()
        lse[1, 0, 4] = bad
        assert judge_lse(lse, expected).finding.startswith("row 4 of head 0, batch 1")


def test_nan_in_lse_is_named():
    expected = some_truth()
    lse = expected.lse.copy()
    lse[1, 2, 0] = math.nan
    assert judge_lse(lse, expected).finding == "row 0 of head 2, batch 1 of lse: NaN"


# --- right kernels, and those that lose a key ---------------------------------------------

KINDS = (
    *("normal", "edges", "peaks", "huge_key", "second_rows", "negative"),
    *("rising_9", "rising_11", "rising_20", "future"),
    *("first_at_minus_inf", "all_at_minus_inf"),
)
TILES = Tiles(64, 64, (1, 1))


def inputs(data, dtype, mask, q_len, kv_len, head_dim, name):
    """Of a case with two heads that share a KV head."""
    spec = {
        "op": "fmha_fwd",
        "dtype": dtype,
        "q_per_kv": 2,
        "head_dim": {"qk": head_dim, "v": head_dim},
        "mask": mask,
        "lse": False,
    }
    case = Case(name, 1, 1, q_len, kv_len, data=data)
    made = values(spec, TILES, case)
    return [rounded(dtype, made[name]) for name in ("q", "k", "v")]


@given(
    data=st.sampled_from(KINDS),
    dtype=st.sampled_from(["bf16", "fp16"]),
    mask=st.sampled_from(["none", "causal"]),
    q_len=st.integers(1, 130),
    kv_len=st.integers(1, 400),
    head_dim=st.sampled_from([32, 64, 128, 256]),
    scale=st.sampled_from([1.0, 1.3, STEEP, 2.0**-10, 1e4]),
    slack=st.sampled_from([0.0, 8.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=120, deadline=None)
def test_a_right_kernel_is_not_refused(
    data, dtype, mask, q_len, kv_len, head_dim, scale, slack, seed
):
    made = inputs(data, dtype, mask, q_len, kv_len, head_dim, f"right {seed}")
    options = {
        "scale": scale * head_dim**-0.5,
        "mask": MASKS[mask],
        "dtype": dtype,
    }
    found = compute(*made, **options, slack=slack)
    expected = truth(*made, **options)
    out, lse = judge_output(found.out, expected), judge_lse(found.lse, expected)
    event(f"{math.ceil(out.of_bound * 10) / 10:.1f} of the bound")
    target(max(out.of_bound, lse.of_bound))
    assert (out.finding, lse.finding) == ("", "")


@given(
    dtype=st.sampled_from(["bf16", "fp16"]),
    keys=st.integers(2, 500),
    head_dim=st.sampled_from([64, 128, 256]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_a_lost_key_of_one_row_is_noticed(dtype, keys, head_dim, seed):
    """The key that has a row's largest weight; of random keys an average one is noticed as often
    as `test_how_many_lost_keys_are_noticed` says."""
    random = np.random.default_rng(seed)
    shapes = ((1, 64, 1, head_dim), *[(1, keys, 1, head_dim)] * 2)
    q, k, v = (rounded(dtype, random.standard_normal(s, np.float32)) for s in shapes)
    options = {"scale": head_dim**-0.5, "mask": MASKS["none"]}
    expected = truth(q, k, v, **options, dtype=dtype)
    out = compute(q, k, v, **options, dtype=dtype).out
    row = int(random.integers(64))
    largest = int((k[0, :, 0] @ q[0, row, 0]).argmax())
    rest = [np.delete(x, largest, axis=1) for x in (k, v)]
    out[0, row] = compute(q[:, row : row + 1], *rest, **options, dtype=dtype).out[0, 0]
    finding = judge_output(out, expected).finding
    assert finding.startswith(f"row {row} of head 0, batch 0 of out: wrong")


@pytest.mark.parametrize(
    ("dtype", "keys", "least"),
    [("bf16", 128, 0.9), ("bf16", 500, 0.8), ("fp16", 128, 1.0), ("fp16", 500, 0.99)],
)
def test_how_many_lost_keys_are_noticed(dtype, keys, least):
    """Any of a row's random keys, by O alone."""
    random = np.random.default_rng(keys)
    shapes = ((1, 4, 1, 128), *[(1, keys, 1, 128)] * 2)
    q, k, v = (rounded(dtype, random.standard_normal(s, np.float32)) for s in shapes)
    options = {"scale": 128**-0.5, "mask": MASKS["none"]}
    expected = truth(q, k, v, **options, dtype=dtype)
    noticed = []
    for lost in range(keys):
        rest = [np.delete(x, lost, axis=1) for x in (k, v)]
        error = np.abs(attention(q, *rest, **options).out - expected.out)
        noticed += (error > expected.out_bound).any(-1).ravel().tolist()
    assert np.mean(noticed) >= least


# --- bits and guards ----------------------------------------------------------------------


def test_bits_are_compared_as_integers():
    before = np.array([0.0, math.nan, 1.0], dtype=np.float32).view(np.int32)
    assert same_bits("out", "in launch 2", before.copy(), before) == ""
    after = np.array([-0.0, math.nan, 1.0], dtype=np.float32).view(np.int32)
    assert (
        same_bits("out", "in launch 2", after, before)
        == "1 of 3 elements of out differ in launch 2"
    )


@pytest.mark.parametrize(
    ("shift", "holds"), [(0.0, False), (1e-5, False), (2.0**-9, True)]
)
def test_sums_in_another_order_differ_by_what_cancels(shift, holds):
    """A small result of large terms is off by a last place of these, not of its own."""
    expected = np.full((1, 64, 1, 64), 2.0**-8)
    found = expected.copy()
    found[0, 3, 0, 5] += 2.0**-10
    right = Bounded(expected, np.zeros_like(found), np.full(found.shape, shift))
    text = nearly_same("dq", "in launch 2", found, expected, "bf16", right)
    assert text == (
        "" if holds else "1 elements of dq differ in launch 2 by more than a last place"
    )


def test_sums_in_fp16_differ_by_more_and_more_often():
    expected = np.full((1, 64, 1, 64), 1.0)
    found = expected + 2.0**-6
    zeros = np.zeros_like(found)

    def told(reordered):
        right = Bounded(expected, zeros, zeros, reordered=reordered)
        return nearly_same("dq", "in launch 2", found, expected, "bf16", right)

    assert told(None) == "4096 of 4096 elements of dq differ in launch 2"
    assert told(zeros + 2.0**-7) == ""
    few = told(zeros)
    assert few == "4096 elements of dq differ in launch 2 by more than a last place"


def test_guards_are_everything_outside_the_view():
    storage = np.full((4, 5), 7)
    inside = np.zeros((4, 5), dtype=bool)
    inside[1:-1, 1:-1] = True
    storage[inside] = 3
    assert outside_touched("out", storage, inside, 7) == ""
    storage[2, 4] = 8
    finding = outside_touched("out", storage, inside, 7)
    assert (
        finding
        == "1 elements outside out were written, one at [2, 4] of its storage [4, 5]"
    )
