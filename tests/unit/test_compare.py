# SPDX-License-Identifier: Apache-2.0
"""The maths of a verdict, on arrays small enough to see; each check is seen to fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fmha_gen.compare import (
    judge_lse,
    judge_output,
    outside_touched,
    relative_error,
    same_bits,
)

REFERENCE = np.array([[3.0, 0.0], [0.0, 4.0]])
SIXTEEN = REFERENCE + np.array([[0.05, 0.0], [0.0, 0.0]])  # 1 % of ||REFERENCE|| = 5


def test_relative_error_is_of_the_norms() -> None:
    assert relative_error(SIXTEEN, REFERENCE) == pytest.approx(0.01)
    assert relative_error(REFERENCE, REFERENCE * 0) == 5


@pytest.mark.parametrize(
    ("off", "holds"), [(0.0, True), (0.0749, True), (0.0751, False), (9.0, False)]
)
def test_output_may_have_one_and_a_half_times_the_error_of_16_bits(
    off: float, holds: bool
) -> None:
    verdict = judge_output(
        REFERENCE + np.array([[0.0, 0.0], [0.0, off]]), REFERENCE, SIXTEEN
    )
    assert (verdict.finding == "") is holds
    assert verdict.ratio == pytest.approx(off / 0.05)


def test_output_must_be_exact_where_16_bits_are() -> None:
    assert judge_output(REFERENCE, REFERENCE, REFERENCE).finding == ""
    assert judge_output(REFERENCE, REFERENCE, REFERENCE).ratio == 0
    verdict = judge_output(REFERENCE * (1 + 1e-9), REFERENCE, REFERENCE)
    assert verdict.ratio == math.inf
    assert "1.5 x 0.000e+00" in verdict.finding


def test_the_rounding_of_the_float64_truth_is_no_error() -> None:
    assert judge_output(REFERENCE * (1 + 1e-14), REFERENCE, REFERENCE).ratio == 0
    zero = REFERENCE * 0
    assert judge_output(zero + 1e-30, zero, zero).finding


def test_output_must_be_zero_where_the_reference_is() -> None:
    zero = REFERENCE * 0
    assert judge_output(zero, zero, zero).finding == ""
    assert judge_output(zero + 1e-30, zero, zero).finding.startswith(
        "no row sees a key, but"
    )


@pytest.mark.parametrize("wrong", [math.inf, -math.inf])
def test_infinite_output_is_an_error(wrong: float) -> None:
    assert judge_output(
        np.where(REFERENCE == 3, wrong, REFERENCE), REFERENCE, SIXTEEN
    ).finding


def test_nan_in_output_is_unwritten() -> None:
    out = np.where(REFERENCE == 4, math.nan, REFERENCE)
    assert (
        judge_output(out, REFERENCE, SIXTEEN).finding
        == "1 of 4 elements of out are NaN"
    )


LSE = np.array([2.0, 1000.0, -math.inf, -0.5])


@pytest.mark.parametrize(
    ("row", "off", "holds"),
    [
        (0, 0.00099, True),
        (0, 0.00101, False),  # the absolute bound, below 10
        (1, 0.099, True),
        (1, -0.101, False),  # the relative bound, above 10
        (3, -0.00101, False),
    ],
)
def test_lse_holds_absolutely_or_relatively(row: int, off: float, holds: bool) -> None:
    lse = LSE.copy()
    lse[row] += off
    verdict = judge_lse(lse, LSE)
    assert (verdict.finding == "") is holds
    assert verdict.absolute == pytest.approx(abs(off))
    assert (verdict.of_tolerance <= 1) is holds


def test_lse_is_minus_infinity_where_no_key_is_seen_and_only_there() -> None:
    assert judge_lse(LSE, LSE).of_tolerance == 0
    text = "lse is not -inf exactly where a row sees no key"
    assert judge_lse(np.where(-math.inf == LSE, -1e30, LSE), LSE).finding == text
    assert judge_lse(np.where(LSE == 2.0, -math.inf, LSE), LSE).finding == text
    assert judge_lse(np.where(LSE == 2.0, math.inf, LSE), LSE).finding
    nothing = np.array([-math.inf])
    assert judge_lse(nothing, nothing).finding == ""


def test_nan_in_lse_is_unwritten() -> None:
    lse = np.where(LSE == 2.0, math.nan, LSE)
    assert judge_lse(lse, LSE).finding == "1 of 4 elements of lse are NaN"


def test_bits_are_compared_as_integers() -> None:
    before = np.array([0.0, math.nan, 1.0], dtype=np.float32).view(np.int32)
    assert same_bits("out", "in launch 2", before.copy(), before) == ""
    after = np.array([-0.0, math.nan, 1.0], dtype=np.float32).view(np.int32)
    assert (
        same_bits("out", "in launch 2", after, before)
        == "1 of 3 elements of out differ in launch 2"
    )


def test_guards_are_everything_outside_the_view() -> None:
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
