# SPDX-License-Identifier: Apache-2.0
"""Capped scores on paper: how far tanh.approx may move O and LSE, and rows without references.

Rows are worked through in NumPy as the sm90 kernels round them. With the largest error of tanh that
PTX declares, of the sign that does most harm, they are held to the bounds of the reference; with a
tangent of 12 bits, whose error is as large but the same for the same score, to one and a half times
the error of a computation in 16 bits throughout.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import support
from fmha_gen.emulator.numerics import TANH_ERROR
from fmha_gen.evidence import tensors
from fmha_gen.ops import reference
from fmha_gen.ops.masks import MASKS
from fmha_gen.ops.scores import capped
from fmha_gen.planning import plan
from hypothesis import given, settings
from hypothesis import strategies as st

F32 = np.float32
HEAD_DIM, ROWS, KEYS = 64, 40, 300
OF_16_BITS = 1.5  # times its error, by norm
POLYNOMIAL = (0.05500893, 0.242211, 0.69328293, 1.0)  # EX2_POLYNOMIAL of the kernels
# Of ln 2: the rule of `is_bounded` admits it, or the number before it.
LIMIT = {"bf16": 87, "fp16": 14}
LARGEST = {dtype: limit * math.log(2) for dtype, limit in LIMIT.items()}


def constants(dtype: str, softcap: float) -> dict[str, Any]:
    """Those of a plan, and whether its rows need no reference, under "bounded"."""
    text = f"{{arch: sm90, op: fmha_fwd, dtype: {dtype}, head_dim: 64, softcap: {softcap!r}}}"
    made = plan.resolve(support.load_text(text))
    numbers = {number.name: number.value for number in (*made.chosen, *made.derived)}
    return {**numbers, "bounded": made.context["bounded"]}


def by_polynomial(exponents: np.ndarray) -> np.ndarray:
    """2^x as the FMA units make it, step by step in fp32."""
    whole = np.rint(exponents).astype(F32)
    fraction = (exponents.astype(F32) - whole).astype(F32)
    power = F32(POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        power = (power * fraction + F32(coefficient)).astype(F32)
    return np.ldexp(power, whole.astype(np.int32))


def in_16_bits(dtype: str, x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # of scores in fp16
        return tensors.FROM_BITS[dtype](tensors.TO_BITS[dtype](x.astype(F32)))


def worst(tanh: np.ndarray, harm: np.ndarray) -> np.ndarray:
    """As far off as PTX lets it be, such that it moves the first column of O."""
    return tanh * (1 + TANH_ERROR * harm * np.sign(tanh))


def of_12_bits(tanh: np.ndarray) -> np.ndarray:
    """Truncated: off by less than TANH_ERROR, as a function of the score."""
    mantissa, exponent = np.frexp(tanh)
    return np.ldexp(np.trunc(mantissa * 2**12) / 2**12, exponent)


def kernel_rows(q, k, v, scale, softcap, dtype, approximated):
    """(O, LSE) of all rows; LSE is None where a kernel has none."""
    numbers = constants(dtype, softcap)
    log2 = F32(numbers["CAP_LOG2"])
    products = (q.astype(np.float64) @ k.T.astype(np.float64)).astype(F32)
    tanh = np.tanh((products * F32(scale / softcap)).astype(np.float64))
    tanh = approximated(tanh).astype(F32)
    row = F32(0) if numbers["bounded"] else tanh.max(1, keepdims=True) * log2
    exponents = (np.float64(tanh) * log2 - row).astype(F32)
    p = np.exp2(exponents)
    if numbers["bounded"]:
        p[:, ::2] = by_polynomial(exponents[:, ::2])
    p16 = in_16_bits(dtype, p)
    assert np.isfinite(p16).all()
    if numbers["bounded"]:
        assert (np.abs(p16 / p - 1) <= reference.ROUNDINGS[dtype].unit * 1.01).all()
    total = (p16 if numbers["bounded"] else p).sum(1, keepdims=True, dtype=F32)
    assert np.isfinite(total).all() and (total > 0).all()
    out = in_16_bits(dtype, (p16 @ v) / total)
    lse = (row + np.log2(total))[:, 0] * math.log(2)
    return out, None if numbers["bounded"] else lse


def rows_in_16_bits(q, k, v, scale, softcap, dtype):
    """Every step rounded to the type, but for the tangent, which fp32 computes."""

    def of(x):
        return in_16_bits(dtype, x)

    scores = of(of((q.astype(np.float64) @ k.T.astype(np.float64)) * scale) / softcap)
    scores = of(softcap * of(np.tanh(scores)))
    weights = np.exp(scores.astype(np.float64) - scores.max(1, keepdims=True))
    return of(of(weights / weights.sum(1, keepdims=True)) @ v)


@settings(deadline=None, max_examples=40)
@given(
    dtype=st.sampled_from(["bf16", "fp16"]),
    softcap=st.sampled_from([1.0, 10.0, 30.0, 50.0, 1000.0, "largest"]),
    factor=st.sampled_from([2.0**-10, 1.0, 30.0, 1e4]),
    level=st.sampled_from([0.0, 6.0, -6.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_errors_are_within_the_bounds(dtype, softcap, factor, level, seed):
    softcap = LARGEST[dtype] if softcap == "largest" else softcap
    random = np.random.default_rng(seed)
    q, k, v = (
        in_16_bits(dtype, random.standard_normal((rows, HEAD_DIM), F32))
        for rows in (ROWS, KEYS, KEYS)
    )
    q[:, 0], k[:, 0] = 1.0, in_16_bits(dtype, F32(level * 8) + 0 * k[:, 0])
    scale = factor / 8
    batched = [x[None, :, None] for x in (q, k, v)]
    given_ = {"scale": scale, "mask": MASKS["none"], "score": capped(softcap)}
    error = reference.POLYNOMIAL_ERROR
    truth = reference.truth(*batched, dtype=dtype, exp_error=error, **given_)
    exact = truth.out[0, :, 0]
    harm = np.sign(v[:, 0][None] - exact[:, :1])
    given_rows = (q, k, v, scale, softcap, dtype)
    out, lse = kernel_rows(*given_rows, lambda tanh: worst(tanh, harm))
    assert (np.abs(out - exact) <= truth.out_bound[0, :, 0]).all()
    if lse is not None:
        assert (np.abs(lse - truth.lse[0, 0]) <= truth.lse_bound[0, 0]).all()
    out, _ = kernel_rows(*given_rows, of_12_bits)
    of_16_bits = rows_in_16_bits(*given_rows)
    error, allowed = (np.linalg.norm(x - exact) for x in (out, of_16_bits))
    if (
        factor <= 30 and level == 0
    ):  # else 16 bits hold the scores exactly: all are at the cap
        assert error <= OF_16_BITS * allowed


@pytest.mark.parametrize(("dtype", "cap"), LARGEST.items())
def test_references_begin_where_the_range_of_p_ends(dtype: str, cap: float) -> None:
    """At the largest cap, one last place above it, and where P is at the ends of its range."""
    while cap / math.log(2) > LIMIT[dtype]:
        cap = math.nextafter(cap, 0)
    numbers = constants(dtype, cap)
    assert numbers["bounded"]
    beyond = math.nextafter(cap, math.inf)
    while beyond / math.log(2) <= LIMIT[dtype]:
        beyond = math.nextafter(beyond, math.inf)
    assert beyond - cap < 1e-12
    assert not constants(dtype, beyond)["bounded"]
    largest = (1 + TANH_ERROR) * numbers["CAP_LOG2"]
    most_v, least_v, keys = 65504.0, 2.0**-14, 2.0**24
    if dtype == "fp16":
        assert 2.0**largest < 65504
        step = 2.0**-24  # of fp16 below 2^-13, so P is rounded as where it is normal
        assert largest < 14.01 and step / 2 / 2.0**-largest < 2.0**-10.98
    else:
        assert 2.0**largest * keys * most_v < 2.0**128
        assert 2.0**-largest * least_v > 2.0**-126
