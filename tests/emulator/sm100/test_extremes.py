# SPDX-License-Identifier: Apache-2.0
"""sm100 kernels where fp32 is coarse or has no number: far scores and NaN, in the emulator."""

from __future__ import annotations

import numpy as np
import pytest
import support
from fmha_gen.build import captures, kernel_text
from fmha_gen.build.calls import arguments
from fmha_gen.emulator.lower import lower_kernels
from fmha_gen.evidence import rehearsal, tensors
from fmha_gen.ops import cases

# Causal rows of bf16, full ones of fp16; both write LSE.
KERNELS = ("sm100_d128_bf16_causal_gqa4_lse", "sm100_d128_fp16_full_lse")
HALF_ULP = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # [of the value]
SCHEDULE = rehearsal.schedules(0)[0]
ROWS, KEYS = 40, 384
# Scaled scores of a row are up to 1.5 * 2^30, of the next one half of that, down to 2^-2.
SIZES = np.exp2(15.0 - np.arange(ROWS) % 33)
LEVELS = np.array([-1.5, -1.0, 1.0, 1.25, 1.5])  # which keys take, in any order
LAST_PLACES = np.array(
    [0, 1, 1, 2, 3, 8]
)  # of fp32, that a key's score lies above its level
LARGE_DIMS = 8


def make(stem, fill):
    """The kernel and a problem whose Q, K and V are what `fill` makes of random ones."""
    path = support.GENERATED / f"{stem}.py"
    constants = kernel_text.read_constants(path.read_text(encoding="utf-8"))
    spec, tiles = constants["SPEC"], cases.tiles_of(constants)
    case = cases.Case("extreme", 1, 1, ROWS, KEYS, sm_count=1)
    problem = tensors.make_problem(spec, tiles, case)
    values = [tensors.FROM_BITS[spec["dtype"]](x.view) for x in problem.inputs]
    for tensor, changed in zip(problem.inputs, fill(*values), strict=True):
        tensor.view[...] = tensors.TO_BITS[spec["dtype"]](changed)
    call = arguments(spec, case)
    text, (called,) = captures.capture(path, [call], arch="sm100")
    programs = lower_kernels(text)
    return rehearsal.Rehearsal(spec, tiles, programs, case, problem, called.launched)


def outputs(kernel):
    """O and LSE as the last run left them."""
    out = tensors.FROM_BITS[kernel.spec["dtype"]](kernel.problem["out"].view)
    return out, kernel.problem["lse"].view.view(np.float32).copy()


def far_scores(q, k, v):
    """Scores that fp32 holds exactly, however they are added up."""
    random = np.random.default_rng(7)
    q, k = np.zeros_like(q), np.zeros_like(k)
    q[..., :LARGE_DIMS] = SIZES[:, None, None]
    k[..., :LARGE_DIMS] = 2.0**15 * random.choice(LEVELS, k.shape[:3])[..., None]
    # 2^-8 is a last place of 2^15.
    q[..., LARGE_DIMS] = 2.0**-7 * SIZES[:, None]
    k[..., LARGE_DIMS] = 2.0**-1 * LARGE_DIMS * random.choice(LAST_PLACES, k.shape[:3])
    return q, k, v


@pytest.mark.parametrize("stem", KERNELS)
def test_scores_are_right_whatever_their_size(stem):
    """Where a reference is rounded by many powers of two, and beyond FAR_REFERENCE."""
    kernel = make(stem, far_scores)
    truth = kernel.truth()
    assert kernel.run(SCHEDULE).findings == []
    # In each row: P, which may be no power of two, and O are rounded; the polynomial's error.
    error = np.abs(outputs(kernel)[0] - truth.out).max(axis=(0, 2, 3))
    allowed = 2 * HALF_ULP[kernel.spec["dtype"]] + 1.1e-4
    largest = np.abs(tensors.FROM_BITS[kernel.spec["dtype"]](kernel.problem["v"].view))
    assert (error <= allowed * largest.max()).all()


def nan_in_a_query(q, k, v):
    q[0, 3, 0, 5] = np.nan
    return q, k, v


def nan_in_a_key(q, k, v):
    # A column whose exponential is by the polynomial, in the second block that is taken.
    k[0, 128, 0, 5] = np.nan
    return q, k, v


@pytest.mark.parametrize("stem", KERNELS)
@pytest.mark.parametrize(
    ("fill", "rows"), [(nan_in_a_query, [3]), (nan_in_a_key, range(ROWS))]
)
def test_a_nan_reaches_the_rows_that_see_it_and_no_other(stem, fill, rows):
    whole, damaged = make(stem, lambda *values: values), make(stem, fill)
    assert whole.run(SCHEDULE).findings == []
    damaged.run(SCHEDULE)
    seen = np.zeros(ROWS, np.bool_)
    seen[list(rows)] = True
    heads = [0] if fill is nan_in_a_query else range(whole.spec["q_per_kv"])
    for found, expected in zip(outputs(damaged), outputs(whole), strict=True):
        rows_first = found.shape[1] == ROWS
        for head in range(whole.spec["q_per_kv"]):
            index = (0, slice(None), head) if rows_first else (0, head)
            is_nan = np.isnan(found[index]).reshape(ROWS, -1)
            of_head = seen if head in heads else np.zeros_like(seen)
            assert (is_nan == of_head[:, None]).all()
            same = found[index] == expected[index]
            assert same[~of_head].all()
