# SPDX-License-Identifier: Apache-2.0
"""Scores that are expressions: one digest for one meaning, parts, lines, the reference."""

from __future__ import annotations

import numpy as np
import pytest
import support
from fmha_gen.build.spell import lines, names_of_rows
from fmha_gen.errors import SpecError
from fmha_gen.expressions.language import ExpressionError, Param, parse, text_of
from fmha_gen.expressions.scores import parts_of
from fmha_gen.expressions.values import check_range
from fmha_gen.ops import reference, scores
from fmha_gen.ops.masks import MASKS
from fmha_gen.planning import plan

SPEC = "{{arch: {}, op: fmha_fwd, dtype: bf16, head_dim: 64, {}}}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("score: s", "score: none"),
        ("score: '  s + 1 - 1'", "lse: false"),
        ("score: 'softcap(s, 30)'", "softcap: 30"),
        ("score: 'softcap( s , 30.0 )'", "softcap: 30"),
        ("score: 's-0.5*abs( kv-q )'", "score: s - 0.5 * abs(kv - q)"),
    ],
)
def test_what_means_the_same_has_one_digest_and_text(one: str, other: str) -> None:
    specs = [support.load_text(SPEC.format("sm90", each)) for each in (one, other)]
    assert specs[0].digest == specs[1].digest
    texts = [support.kernel_text(SPEC.format("sm90", each)) for each in (one, other)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("text", "how", "factor", "slope", "row"),
    [
        ("s", "scaled", 1, "", ""),
        ("s / 2 + row * 0.5", "scaled", 0.5, "", "0.5 * row"),
        ("s + 0.5 * (kv - q)", "sloped", 1, "0.5", ""),
        ("2 * (s + kv / 4) - 3", "sloped", 2, "0.5", "0.5 * q - 3"),
        ("s + 0.25 * h * kv", "sloped", 1, "0.25 * h", "0.25 * h * q"),
        ("s + 1.0 * h * kv", "sloped", 1, "h", "1.0 * h * q"),  # no product of 40 bits
        ("s + abs(kv - q)", "by_element", 1, "", ""),
        ("s + kv * kv / 1e6", "by_element", 1, "", ""),
        ("tanh(s) + kv", "by_element", 1, "", ""),
        ("s * (1 + h)", "by_element", 1, "", ""),
        ("-s", "by_element", 1, "", ""),
        ("1e9 * s", "by_element", 1, "", ""),
    ],
)
def test_parts(text: str, how: str, factor: float, slope: str, row: str) -> None:
    parts = parts_of(parse(text, type="real"))
    said = [text_of(each) if each else "" for each in (parts.slope, parts.row)]
    assert (parts.how, parts.factor, *said) == (how, factor, slope, row)


@pytest.mark.parametrize(
    ("text", "code", "column"),
    [
        ("s // 2", "FG213", 0),
        ("s / 0", "FG218", 4),
        ("s / kv", "FG218", 4),
        ("softcap(s)", "FG218", 0),
        ("where(s, 1, 2)", "FG213", 6),
        ("s < 3", "FG213", 0),
        ("s * 1e31", "FG216", 4),
        ("s + .5", "FG211", 4),
        ("sin(s)", "FG212", 0),
    ],
)
def test_refusals_name_the_column(text: str, code: str, column: int) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text, type="real")
    assert (caught.value.code, caught.value.column) == (code, column)


PARAMS = {
    "slope": Param(("h",), type="real"),
    "bonus": Param(("b", "row"), type="real"),
    "heat": Param(type="real"),
    "shift": Param(range=(-100, 100)),
}


@pytest.mark.parametrize(
    ("text", "how", "slope", "row"),
    [
        ("s - slope[h] * (q - kv)", "sloped", "slope[h]", ""),
        ("s - heat * (q - kv)", "sloped", "heat", ""),
        ("s + bonus[b, row]", "scaled", "", "bonus[b, row]"),
        ("heat * s", "by_element", "", ""),
        ("s - slope[h] * abs(q - kv + shift)", "by_element", "", ""),
    ],
)
def test_parts_that_a_call_brings(text: str, how: str, slope: str, row: str) -> None:
    parts = parts_of(parse(text, PARAMS, type="real"))
    said = [text_of(each) if each else "" for each in (parts.slope, parts.row)]
    assert (parts.how, *said) == (how, slope, row)


def test_lines_read_what_a_call_brings_from_the_problem() -> None:
    tree = parse("heat * s - slope[h] * abs(kv - q + shift)", PARAMS, type="real")
    assert lines(tree) == [
        "part_1 = kv - q + problem.shift",
        "part_2 = problem.slope[h] * Float32(cutlass.max(part_1, -part_1))",
        "return problem.heat * s - part_2",
    ]
    assert names_of_rows(tree) == ["h", "q"]


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ("params: {heat: fp32}, score: s", "FG214", "no expression reads it"),
        ("params: {heat: fp32}, score: s - cold", "FG212", "cold"),
        ("params: {heat: fp32}, mask: kv <= q + heat", "FG212", "heat"),
        ("params: {heat: {shape: [h], dtype: fp32}}, score: s * heat", "FG218", "heat"),
        ("params: {heat: fp32}, score: s // heat", "FG213", "number"),
    ],
)
def test_refusals_of_what_a_call_brings(fields: str, code: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        support.load_text(SPEC.format("sm90", fields))
    (found,) = caught.value.diagnostics
    assert found.code == code and words in found.message


def test_the_reference_reads_what_a_call_brings() -> None:
    random = np.random.default_rng(3)
    q, k, v = (
        random.standard_normal((2, n, h, 4)) for n, h in ((3, 4), (5, 2), (5, 2))
    )
    given = {
        "slope": random.standard_normal(4),
        "bonus": random.standard_normal((2, 3)),
        "heat": 0.75,
        "shift": 2,
    }
    text = "heat * s - slope[h] * abs(q - kv + shift) + bonus[b, row]"
    score = scores.of_text(text, PARAMS)
    assert score.tensors == given.keys()
    options = {"scale": 0.5, "mask": MASKS["none"], "score": score, "tensors": given}
    out, lse = reference.attention(q, k, v, **options)
    for b, head, row in np.ndindex(2, 4, 3):
        s = 0.375 * k[b, :, head // 2] @ q[b, row, head]
        s -= given["slope"][head] * abs(row + 2 - np.arange(5) + 2)
        weights = np.exp(s + given["bonus"][b, row])
        expected = weights @ v[b, :, head // 2] / weights.sum()
        np.testing.assert_allclose(out[b, row, head], expected, rtol=1e-12)
        np.testing.assert_allclose(lse[b, head, row], np.log(weights.sum()), rtol=1e-12)


def test_whole_numbers_in_a_score_have_32_bits() -> None:
    tree = parse("s + kv * q / 2", type="real")
    with pytest.raises(ExpressionError, match="which 32 bits do not hold"):
        check_range(tree, {})
    assert check_range(parse("s + 0.5 * kv * q", type="real"), {}) == (0, 0)


@pytest.mark.parametrize(
    ("text", "spelt"),
    [
        (
            "s - (s - 1) / 4",
            ["part_1 = (s - 1.0) * (1.0 / 4.0)", "return s - part_1"],
        ),
        (
            "min(s, 50, 2 * s)",
            ["return cute.arch.fmin(cute.arch.fmin(s, 50.0), 2.0 * s)"],
        ),
        (
            "where(not (kv < 4 and q > 3), s, 0)",
            [
                "part_1 = (kv >= 4) | (q <= 3)",
                "return cutlass.select_(part_1, s, Float32(0.0))",
            ],
        ),
        (
            "softcap(s, 30) - 0.5 * abs(kv - q)",
            [
                "part_1 = s * (1.0 / 30.0)",
                "part_2 = 30.0 * cute.math.tanh(part_1, fastmath=True)",
                "part_3 = kv - q",
                "part_4 = 0.5 * Float32(cutlass.max(part_3, -part_3))",
                "return part_2 - part_4",
            ],
        ),
    ],
)
def test_lines_of_a_kernel_nest_two_deep(text: str, spelt: list[str]) -> None:
    assert lines(parse(text, type="real")) == spelt


def test_the_reference_reads_head_row_key_and_tensors() -> None:
    random = np.random.default_rng(0)
    q, k, v = (
        random.standard_normal((2, n, h, 4)) for n, h in ((3, 4), (5, 2), (5, 2))
    )
    slopes = np.array([0.0, 1.0, -0.5, 0.25])
    text = "where(kv < 2 or b == 1, s, min(s, 0.5)) * 2 - h_kv * abs(kv - q) / 5"
    options = {"scale": 0.5, "mask": MASKS["none"]}
    alibi = reference.attention(
        q, k, v, **options, score=scores.Score(scores.ALIBI), tensors={"slopes": slopes}
    )
    free = reference.attention(q, k, v, **options, score=scores.of_text(text))
    for b, head, row in np.ndindex(2, 4, 3):
        keys, place = np.arange(5), row + 2
        s = 0.5 * k[b, :, head // 2] @ q[b, row, head]
        capped = np.where((keys < 2) | (b == 1), s, np.minimum(s, 0.5))
        for found, score in (
            (alibi, s + slopes[head] * (keys - place)),
            (free, capped * 2 - head // 2 * abs(keys - place) / 5),
        ):
            weights = np.exp(score)
            out = weights @ v[b, :, head // 2] / weights.sum()
            np.testing.assert_allclose(found.out[b, row, head], out, rtol=1e-12)
            lse = np.log(weights.sum())
            np.testing.assert_allclose(found.lse[b, head, row], lse, rtol=1e-12)


@pytest.mark.parametrize(
    "text", ["s + 0.5 * (kv - q)", "softcap(s, 3) * 2 - tanh(s)", "abs(s)"]
)
def test_bounds_hold_what_fp32_makes_of_a_score(text: str) -> None:
    random = np.random.default_rng(1)
    tree, (q_len, kv_len) = parse(text, type="real"), (6, 40)
    products = random.standard_normal((1, q_len, kv_len)) * 5
    error = np.full_like(products, 1e-3)
    place = scores.Place(
        *(0, np.arange(1), np.arange(q_len), np.arange(kv_len), 1),
        *(scores.Lengths(q_len, kv_len), {}),
    )
    exact, bound = scores.Score(tree).with_error(products, error, place)
    moved = products + random.uniform(-1e-3, 1e-3, products.shape)
    found = scores.Score(tree).value(moved, place)
    assert (np.abs(found - exact) <= bound).all()
    assert (bound < 0.1).all() and (bound >= 1e-6).all()


@pytest.mark.parametrize(
    ("field", "tested"),
    [
        ("alibi: true", "Rows are tested by exponents, because a key"),
        (
            "score: s - 0.5 * abs(kv - q)",
            "Rows are tested by exponents, because a score",
        ),
        ("score: 2 * s", "Rows are tested by products, which order like scores"),
        ("score: s - row / 64", "in its LSE alone: -(0.015625 * row)"),
    ],
)
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_explain_says_by_what_rows_are_tested(
    arch: str, field: str, tested: str
) -> None:
    planned = plan.resolve(support.load_text(SPEC.format(arch, field)))
    assert any(tested in each for each in planned.statements), planned.statements
