# SPDX-License-Identifier: Apache-2.0
"""`exp: linear` and `linear16`: the field, and that lines hold what the reference asks.

P is that of tests/linear_exp.py, with the constants of kernels that are shipped.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import support
from fmha_gen.emulator import numerics
from fmha_gen.errors import SpecError
from fmha_gen.ops import operation_of
from fmha_gen.ops.e4m3 import permute_v
from fmha_gen.ops.operation import Given
from fmha_gen.ops.reference import LINEAR_ERROR, Truth
from fmha_gen.spec import model

from tests.linear_exp import F32, codes_of, o_of

STEM = "sm90_d64_e4m3_linear_full"
KERNEL = support.constants(STEM)
OF_16 = support.constants("sm90_d64_e4m3_permuted_linear16_causal")
SPEC = {**KERNEL["SPEC"], "v_layout": "permuted"}
LINE = ("OCTAVE", "AT_1", "STEP_BITS")  # constants of it
LEAST = 2.0**-24  # of fp16, of which lines count multiples
DIM = 64
ROWS = 256
SCALE = DIM**-0.5
NAN = 127  # in e4m3, the code behind that of 448
MOST = 1.5  # of the definition's error, root mean square

LINEAR = (
    "arch: sm90\nop: fmha_fwd\ndtype: e4m3\nhead_dim: 64\nv_layout: permuted\n"
    "exp: linear\n"
)


# --- the field ----------------------------------------------------------------------------


def refusals(text: str, stem: str = "kernel") -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as raised:
        model.loads(Path(f"{stem}.yaml"), text)
    return [(each.message, each.hint or "") for each in raised.value.diagnostics]


def test_sums_before_rounding_are_refused_beside_it() -> None:
    ((message, hint),) = refusals(f"{LINEAR}lse: true\n")
    assert "exp: linear has no sum of P before its rounding" in message
    assert hint == "leave out exp, or lse"
    model.loads(Path("kernel.yaml"), f"{LINEAR}lse: false\n")
    exact = LINEAR.replace("linear", "exact")
    model.loads(Path("kernel.yaml"), f"{exact}lse: true\n")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bits_are_refused_beside_it(dtype: str) -> None:
    text = LINEAR.replace("e4m3", dtype).replace("permuted", "rows")
    ((message, hint),) = refusals(text)
    assert message == f"exp: linear is not generated for dtype: {dtype}"
    assert hint == "set exp: exact"
    model.loads(Path("kernel.yaml"), text.replace("exp: linear", "exp: exact"))


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        *(
            (word, "write linear or linear16")
            for word in ("schraudolph", "fast", "approximate")
        ),
        ("linear_fp16", "write linear16"),
        *((word, "write exact") for word in ("mufu", "ex2", "default")),
    ],
)
def test_other_words_for_its_values(word: str, hint: str) -> None:
    assert hint in refusals(LINEAR.replace("exp: linear", f"exp: {word}"))[0][1]


@pytest.mark.parametrize("key", ["exp2", "exp2_impl", "exponential", "softmax_exp"])
def test_other_words_for_its_key(key: str) -> None:
    hint = refusals(LINEAR.replace("exp: linear", f"{key}: linear"))[0][1]
    assert hint.startswith("write exp: linear, linear16 or exact, of dtype: e4m3")


def test_a_name_that_says_linear_is_true() -> None:
    stem = "sm90_d64_e4m3_linear_full"
    assert model.loads(Path(f"{stem}.yaml"), LINEAR).spec.exp == "linear"
    ((message, hint),) = refusals(LINEAR.replace("exp: linear\n", ""), stem)
    assert message == "the name says linear, but exp is exact"
    assert "sm90_d64_e4m3_full.yaml" in hint


@pytest.mark.parametrize("stem", [x for x in support.SHIPPED if "_e4m3_" in x])
def test_the_header_says_it(stem: str) -> None:
    text = (support.GENERATED / f"{stem}.py").read_text("utf-8")
    title = text.splitlines()[1]
    arch, _ = stem.split("_", 1)
    assert title.startswith(f'"""FMHA forward for {arch}: head_dim ')
    for exp in ("linear", "linear16"):
        is_it = support.constants(stem)["SPEC"].get("exp") == exp
        assert (f", {exp} exp, " in title) == is_it == (f"_{exp}_" in stem)


# --- P's codes ----------------------------------------------------------------------------


class Drawn(NamedTuple):
    q: F32
    k: F32
    v: F32
    truth: Truth


@cache
def drawn(sigma: float, keys: int, mean: float, exp: str) -> Drawn:
    """A head in e4m3, with what O may be. sigma: of K; mean: of V."""
    random = np.random.default_rng(0)
    q, k, v = (
        numerics.e4m3_to_f32(
            numerics.e4m3_rn_satfinite(x.astype(np.float32)).astype(np.uint8)
        )
        for x in (
            random.standard_normal((1, ROWS, 1, DIM)),
            random.standard_normal((1, keys, 1, DIM)) * sigma,
            random.standard_normal((1, keys, 1, DIM)) + mean,
        )
    )
    inputs = {"q": q, "k": k, "v": permute_v(v)}
    spec = {**SPEC, "exp": exp}
    truth = operation_of(spec).truth(Given(spec, inputs, SCALE))
    return Drawn(q[0, :, 0], k[0, :, 0], v[0, :, 0], truth)


def holds(
    sigma: float,
    keys: int,
    mean: float = 0.0,
    clamp: bool = True,
    exp: str = "linear",
    **wrong: float,
) -> bool:
    """Whether each element is within its bound and the head's error within the definition's.

    wrong: constants of the kernel that are others.
    """
    q, k, v, truth = drawn(sigma, keys, mean, exp)
    line = {name: OF_16[name] for name in LINE} if exp == "linear16" else {}
    made = o_of({**KERNEL, **line, **wrong}, q, k, v, SCALE, clamp=clamp)
    error = made[None, :, None] - truth.out
    squares = np.sum(error**2) <= MOST**2 * np.sum(truth.defined)
    return bool(squares and (np.abs(error) <= truth.out_bound).all())


SIGMAS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("keys", [1, 40, 300, 1000, 4096])
@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_line_holds(sigma: float, keys: int, mean: float) -> None:
    assert holds(sigma, keys, mean)


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("keys", [1, 40, 1000, 4096])
@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_line_of_halves_holds(sigma: float, keys: int, mean: float) -> None:
    assert holds(sigma, keys, mean, exp="linear16")


def test_steep_scores_of_many_keys_are_what_the_line_of_halves_is_for() -> None:
    """P below 2^-6 are 3 % of the weight here: codes on a line lose most of them."""
    random = np.random.default_rng(0)
    rows, keys = 64, 131_072
    q, k, v = (
        numerics.e4m3_to_f32(
            numerics.e4m3_rn_satfinite(x.astype(np.float32)).astype(np.uint8)
        )
        for x in (
            random.standard_normal((rows, DIM)),
            random.standard_normal((keys, DIM)) * 3,
            random.standard_normal((keys, DIM)),
        )
    )
    scores = q @ k.T * SCALE
    weights = np.exp(scores - scores.max(1, keepdims=True), dtype=np.float64)
    exact = weights @ v / weights.sum(1, keepdims=True)
    codes, halves = (
        float(np.sqrt(np.mean((o_of(line, q, k, v, SCALE) - exact) ** 2)))
        for line in (KERNEL, KERNEL | {name: OF_16[name] for name in LINE})
    )
    assert halves < 0.6 * codes


@pytest.mark.parametrize("slope", [7, 9])
@pytest.mark.parametrize("sigma", SIGMAS[1:-1])
def test_another_slope_does_not(sigma: float, slope: int) -> None:
    assert not holds(sigma, 1000, OCTAVE=slope * LEAST)


@pytest.mark.parametrize("sigma", SIGMAS[3:])
def test_codes_below_zero_do_not(sigma: float) -> None:
    """They are the last bits of what is below 1024: any codes, of NaN among them."""
    assert not holds(sigma, 1000, clamp=False)
    assert holds(0.1, 1000, clamp=False)  # where there are none


@pytest.mark.parametrize("sigma", [1.0, 3.0])
def test_an_offset_of_none_does_not(sigma: float) -> None:
    assert not holds(sigma, 4096, P_OFFSET=0)


def largest_code(**wrong: float) -> int:
    """Of P at the slack, which is as large as it gets."""
    number = {**KERNEL, **wrong}
    exponent = number["P_OFFSET"] + number["RESCALE_SLACK"]
    on_line = number["OCTAVE"] * exponent + number["AT_1"]
    return int(codes_of(np.array([on_line], np.float32))[0])


def test_the_largest_code_is_that_of_448() -> None:
    assert largest_code() == NAN - 1
    first = KERNEL["FIRST_HEADROOM"]
    wider = KERNEL["RESCALE_SLACK"] + first
    assert largest_code(P_OFFSET=8 - first, RESCALE_SLACK=wider) == NAN - 1


def test_an_offset_of_a_code_more_is_nan() -> None:
    more = KERNEL["AT_1"] + LEAST
    assert largest_code(AT_1=more) == NAN
    assert not holds(1.0, 4096, AT_1=more)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_an_offset_of_a_code_less_cancels(sigma: float) -> None:
    """All weights are smaller by as much, their sum is too, and the line's shape repeats."""
    assert holds(sigma, 1000, AT_1=KERNEL["AT_1"] - LEAST)


def test_how_far_the_line_is_from_powers_of_two() -> None:
    """Between codes, so without their rounding: LINEAR_ERROR is its standard deviation at least."""
    fraction = np.arange(1, 2**16) / 2**16
    of_line = (1 + fraction) / np.exp2(fraction)
    of_line = of_line / of_line.mean()
    assert np.std(of_line) < LINEAR_ERROR < np.ptp(of_line)
    assert abs(of_line - 1).max() < 0.04
