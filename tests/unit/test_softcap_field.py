# SPDX-License-Identifier: Apache-2.0
"""The field `softcap`: what it takes, its words, and what follows from it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import support
from fmha_gen import features
from fmha_gen.bench.problems import problem_for
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.errors import SpecError
from fmha_gen.ops import reference
from fmha_gen.ops.masks import MASKS
from fmha_gen.ops.scores import capped
from fmha_gen.planning import plan
from fmha_gen.planning.kernel_plan import KernelPlan
from fmha_gen.spec.model import Spec
from fmha_gen.spec.names import contradictions
from fmha_gen.vendoring import contents

ACCEPTED = "softcap: expected none, or a number from 0.001 to 1000000, got"


def text_of(softcap: object, **fields: object) -> str:
    required = {"arch": "sm90", "op": "fmha_fwd", "dtype": "bf16", "head_dim": 128}
    lines = required | fields | {"softcap": softcap}
    return "".join(f"{name}: {value}\n" for name, value in lines.items())


def planned(softcap: object, **fields: object) -> KernelPlan:
    return plan.resolve(support.load_text(text_of(softcap, **fields)))


@pytest.mark.parametrize(
    ("softcap", "told"),
    [
        ("0", f"FG104] {ACCEPTED} 0"),
        ("-30", f"FG104] {ACCEPTED} -30"),
        ("0.0009", f"FG104] {ACCEPTED} 0.0009"),
        ("1000001", f"FG104] {ACCEPTED} 1000001"),
        ("thirty", f'FG104] {ACCEPTED} "thirty"'),
        ("'30'", f'FG104] {ACCEPTED} "30"'),
        ("true", f"FG103] {ACCEPTED} true"),
        ("[30]", f"FG103] {ACCEPTED} [30]"),
        (".nan", "FG024]"),
        (".inf", "FG024]"),
    ],
)
def test_all_else_is_refused(softcap: str, told: str) -> None:
    with pytest.raises(SpecError) as raised:
        support.load_text(text_of(softcap))
    assert told in str(raised.value)


@pytest.mark.parametrize("key", ["logits_soft_cap", "soft_cap", "logit_cap"])
def test_words_of_other_tools_get_an_answer(key: str) -> None:
    with pytest.raises(SpecError, match="write softcap: N"):
        support.load_text(f"{text_of('none')}{key}: 30\n")
    with pytest.raises(SpecError, match="last layer, not attention's"):
        support.load_text(f"{text_of('none')}final_logit_softcapping: 30\n")


@pytest.mark.parametrize(
    ("softcap", "stem", "better"),
    [
        (30, "sm90_cap30", ""),
        (0.5, "sm90_cap0p5", ""),
        (30, "sm90_cap50", "cap30"),
        ("none", "sm90_cap30", "has no"),
    ],
)
def test_a_name_speaks_the_truth(softcap: Any, stem: str, better: str) -> None:
    required = {"arch": "sm90", "op": "fmha_fwd", "dtype": "bf16", "head_dim": 128}
    found = contradictions(stem, Spec.model_validate({**required, "softcap": softcap}))
    assert bool(found) == bool(better)


def test_words() -> None:
    spec = planned(30).spec_file.spec
    assert features.title(spec).endswith("softcap 30, full mask")
    assert features.contract(spec) == [
        "Scores are s = 30 * tanh(softmax_scale * QK^T / 30), before the mask."
    ]


def test_none_is_the_default_and_is_not_in_a_kernel() -> None:
    without, none = (
        support.kernel_text(text)
        for text in (text_of("none").replace("softcap: none\n", ""), text_of("none"))
    )
    assert without == none
    assert "softcap" not in read_constants(none)["SPEC"]
    assert "tanh" not in none


@pytest.mark.parametrize(
    ("softcap", "fields", "bounded"),
    [
        (30, {}, True),
        (50, {}, True),
        (60.3, {}, True),
        (60.4, {}, False),
        (30, {"lse": "true"}, False),
        (30, {"sink": "true"}, False),
        (9.7, {"dtype": "fp16"}, True),
        (30, {"dtype": "fp16"}, False),
        (30, {"arch": "sm100"}, False),
        ("none", {}, False),
    ],
)
def test_whose_rows_need_no_reference(softcap: Any, fields: Any, bounded: bool) -> None:
    made = planned(softcap, **fields)
    assert made.context.get("bounded", False) is bounded
    if softcap != "none" and "arch" not in fields:
        one = any("Rows have no reference" in each for each in made.statements)
        several = any("Rows have references" in each for each in made.statements)
        assert (one, several) == (bounded, not bounded)


def test_the_reference_caps_before_the_mask() -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, n, 1, 4)) * 3 for n in (3, 5, 5))
    scale, cap = 0.5, 2.0
    found = reference.attention(
        q, k, v, scale=scale, mask=MASKS["causal"], score=capped(cap)
    )
    for row in range(3):
        scores = [
            cap * math.tanh(scale * math.fsum(q[0, row, 0] * k[0, key, 0]) / cap)
            for key in range(row + 3)
        ]
        weights = np.exp(scores)
        out = weights @ v[0, : row + 3, 0] / weights.sum()
        np.testing.assert_allclose(found.out[0, row, 0], out, rtol=1e-12)
        np.testing.assert_allclose(found.lse[0, 0, row], math.log(weights.sum()))


def test_a_score_of_minus_infinity_is_one_at_the_cap() -> None:
    q, k = np.ones((1, 1, 1, 2)), np.array([[-np.inf, 0.0], [1.0, 0.0]])[None, :, None]
    bounds = reference.truth(
        *(q, k, np.ones_like(k)),
        **{"scale": 1.0, "mask": MASKS["none"], "dtype": "bf16", "score": capped(3.0)},
    )
    expected = math.log(math.exp(-3.0) + math.exp(3 * math.tanh(1 / 3)))
    np.testing.assert_allclose(bounds.lse, expected, rtol=1e-12)
    assert np.isfinite(bounds.lse_bound).all() and np.isfinite(bounds.out_bound).all()


def test_errors_of_the_tangent_are_in_the_bound_of_scores() -> None:
    """One key: its LSE is the score, off by the tangent's error and little more."""
    q = k = v = np.full((1, 1, 1, 1), 5.0)
    made = reference.truth(
        q, k, v, scale=1.0, mask=MASKS["none"], dtype="bf16", score=capped(50.0)
    )
    score = 50 * math.tanh(0.5)
    (bound,) = made.lse_bound.ravel()
    assert 2.0**-11 * score < bound < 1.02 * 2.0**-11 * score
    (out,) = made.shift.ravel()
    assert out < 1e-4  # all the weight is on it


def test_a_benchmark_and_a_package_know_it_from_a_kernel_without() -> None:
    capped, plain = (
        read_constants(support.kernel_text(text_of(cap, mask="causal")))["SPEC"]
        for cap in (30, "none")
    )
    counts = {"batch": 1, "heads": 2, "q": 128, "kv": 128}
    problem = problem_for(capped, **counts)
    assert problem.spec["softcap"] == 30
    assert problem.family == "d128 bf16 softcap 30 causal"
    assert problem != problem_for(plain, **counts)
    assert "softcap 30" in contents.made_for(capped)
    assert "softcap" not in contents.made_for(plain)
