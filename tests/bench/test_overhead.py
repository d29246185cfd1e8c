# SPDX-License-Identifier: Apache-2.0
"""The fit finds what a model was made of, and says when it cannot."""

from __future__ import annotations

import random

import pytest
from fmha_gen.bench import overhead
from fmha_gen.bench.overhead import Fit, fit, tiles_and_blocks
from fmha_gen.bench.problems import Problem
from hypothesis import given
from hypothesis import strategies as st

from .test_problems import problem

SMS = 132
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def at(length: int, tokens: int, causal: bool = False) -> Problem:
    return problem(max(1, tokens // length), 16, 16, length, length, causal=causal)


def seconds(one: Problem, tflops: float, blocks: float, launch: float) -> float:
    """The model, written down anew: a tile of 128 rows, blocks of 128 keys, 4 * d FLOPs a pair."""
    row_tiles = one.q // 128
    executed = row_tiles * row_tiles
    if one.mask == "causal":
        executed = row_tiles * (row_tiles + 1) // 2
    pairs = one.batch * one.heads * (executed + row_tiles * blocks) * 128 * 128
    return launch + pairs * 4 * 128 / (tflops * 1e12)


def fitted(points: dict[Problem, float]) -> Fit:
    found = fit("ours", "d128", points, SMS)
    assert found is not None
    return found


constants = st.tuples(
    st.floats(100, 2000), st.floats(0, 8), st.floats(0, 1e-4), st.booleans()
)


@given(constants)
def test_all_three_are_found_when_the_number_of_tiles_varies(
    known: tuple[float, float, float, bool],
) -> None:
    tflops, blocks, launch, causal = known
    problems = [at(n, total, causal) for n in LENGTHS for total in (16384, 65536)]
    found = fitted({p: seconds(p, tflops, blocks, launch) for p in problems})
    assert found.loop_tflops == pytest.approx(tflops, rel=1e-6)
    assert found.tile_blocks == pytest.approx(blocks, abs=1e-5)
    assert found.launch_seconds == pytest.approx(launch, abs=1e-10)
    assert abs(found.worst) < 1e-6
    one_tile = 4 * 128**3 * blocks / (tflops * 1e12 / SMS)
    assert found.tile_seconds == pytest.approx(one_tile, abs=1e-10)


@given(constants)
def test_with_as_many_tiles_everywhere_the_launch_is_part_of_c(
    known: tuple[float, float, float, bool],
) -> None:
    tflops, blocks, launch, causal = known
    problems = [at(n, 16384, causal) for n in LENGTHS]
    found = fitted({p: seconds(p, tflops, blocks, launch) for p in problems})
    assert found.launch_seconds is None
    assert found.loop_tflops == pytest.approx(tflops, rel=1e-6)
    per_tile = launch * tflops * 1e12 / (2048 * 4 * 128**3)  # in blocks
    assert found.tile_blocks == pytest.approx(blocks + per_tile, abs=1e-5)


@given(st.integers(0, 1000))
def test_noise_shows_in_the_residuals_and_hardly_in_the_constants(seed: int) -> None:
    dice = random.Random(seed)
    problems = [at(n, total) for n in LENGTHS for total in (16384, 65536)]
    noise = {p: dice.uniform(0.99, 1.01) for p in problems}
    found = fitted({p: seconds(p, 700, 2, 2e-5) * noise[p] for p in problems})
    assert found.loop_tflops == pytest.approx(700, rel=0.03)
    assert found.tile_blocks == pytest.approx(2, abs=0.4)
    assert found.launch_seconds == pytest.approx(2e-5, abs=1e-5)
    assert 0 < abs(found.worst) < 0.02
    assert found.worst in [point.residual for point in found.points]


def test_what_does_not_fill_the_gpu_is_shown_and_not_fitted() -> None:
    problems = [at(n, 16384) for n in LENGTHS]
    alone = problem(1, 16, 16, 512, 512)  # 64 tiles
    times = {p: seconds(p, 700, 2, 0) for p in problems} | {alone: 1.0}
    found = fitted(times)
    assert found.loop_tflops == pytest.approx(700)
    assert abs(found.worst) < 1e-6
    assert [p.problem for p in found.points if not p.fitted] == [alone]
    assert found.points[-1].residual > 1000


@pytest.mark.parametrize(
    "problems",
    [
        [],
        [at(512, 16384), at(1024, 16384)],  # no residual
        [at(512, 512), at(1024, 1024), at(2048, 2048)],  # nothing fills the GPU
        [at(n, 16384) for n in (4096, 4224, 4352, 4480)],  # A looks like c
    ],
)
def test_too_little_is_no_fit(problems: list[Problem]) -> None:
    times = {p: seconds(p, 700, 2, 0) for p in problems}
    assert fit("ours", "d128", times, SMS) is None


def test_what_the_model_cannot_be_is_no_fit() -> None:
    times = {at(n, 16384): 1 / n for n in LENGTHS}  # the longer, the faster
    assert fit("ours", "d128", times, SMS) is None


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (problem(2, 4, 4, 1024, 1024), (64, 8)),
        (problem(2, 4, 4, 1024, 1024, causal=True), (64, 4.5)),
        (problem(1, 1, 1, 1, 300, causal=True), (1, 3)),
        (problem(1, 1, 1, 256, 512, causal=True), (2, 3.5)),
        (problem(1, 1, 1, 512, 256, causal=True), (4, 1.25)),  # two tiles see nothing
    ],
)
def test_tiles_and_blocks(one: Problem, expected: tuple[int, float]) -> None:
    assert tiles_and_blocks(one) == expected


def test_everyone_along_every_family_is_fitted() -> None:
    full = {at(n, 16384): seconds(at(n, 16384), 700, 2, 0) for n in LENGTHS}
    causal = {at(n, 16384, True): 1.0 for n in LENGTHS[:1]}
    lines = {"none": {"ours": full, "fa4": full}, "causal": {"ours": causal}}
    found = [(one.family, one.contender) for one in overhead.fits(lines, SMS)]
    assert found == [("none", "ours"), ("none", "fa4")]
