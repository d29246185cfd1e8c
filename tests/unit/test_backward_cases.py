# SPDX-License-Identifier: Apache-2.0
"""The problems that a backward kernel is shown, and what their tensors hold."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import numpy as np
import pytest
import support
from fmha_gen.arch import ARCHITECTURES
from fmha_gen.build.calls import arguments
from fmha_gen.evidence import tensors
from fmha_gen.ops import backward_cases, masks
from fmha_gen.ops.backward import BACKWARD, defined_by, sums_in_fp16
from fmha_gen.ops.case import DYNAMIC, Gradient, residues
from fmha_gen.ops.cases import (
    REPEATS,
    Case,
    Layout,
    Tiles,
    cases_for,
    launches_for,
    smallest_ragged,
    tiles_of,
    walks_for,
)
from fmha_gen.ops.inputs import place_tensors, values
from fmha_gen.ops.masks import MASKS
from fmha_gen.ops.operation import Given
from fmha_gen.ops.reference import attention
from fmha_gen.ops.rounding import rounded
from right_gradients import compute
from right_kernel import rounded as rounded_by_bits

NO_WINDOW = {"left": "none", "right": "none"}


def spec_of(
    mask="causal", group=1, head_dim=64, length="dynamic", dtype="bf16", **changes
):
    return {
        **{"name": "x", "arch": "sm90", "op": "fmha_bwd", "dtype": dtype},
        "head_dim": {"qk": head_dim, "v": head_dim},
        "seqlen": {"q": length, "kv": length},
        **{"q_per_kv": group, "mask": mask, "deterministic": False},
        **changes,
    }


MADE_UP = {
    f"{mask}_gqa{group}_t{rows}_d{dim}_s{length}": (
        spec_of(mask, group, dim, length),
        Tiles(rows, 128, (1, 1)),
    )
    for mask, group, (rows, dim), length in (
        *itertools.product(
            ("none", "causal"), (1, 3, 8), ((64, 128), (128, 64)), ["dynamic"]
        ),
        *(("causal", 1, (64, 128), 300), ("none", 1, (64, 128), 4096)),
    )
}
# Of pairs of CTAs, with two tiles of 64 keys.
MADE_UP |= {
    f"{mask}_gqa{group}_pairs_s{length}": (
        spec_of(mask, group, 256, length),
        Tiles(64, 64, (1, 1), along_keys=2),
    )
    for mask, group, length in (
        *itertools.product(("none", "causal"), (1, 2, 8), ["dynamic"]),
        ("causal", 1, 300),
    )
}
SHIPPED = {
    stem: (support.constants(stem)["SPEC"], tiles_of(support.constants(stem)))
    for stem in support.shipped(BACKWARD)
}
KERNELS = {**MADE_UP, **SHIPPED}
each_kernel = pytest.mark.parametrize(("spec", "tiles"), KERNELS.values(), ids=KERNELS)


def test_there_are_shipped_kernels_of_each_architecture():
    assert {spec["arch"] for spec, _ in SHIPPED.values()} == {*ARCHITECTURES}


@each_kernel
def test_a_case_is_small_enough_for_the_emulator(spec, tiles):
    shown = [case for case in cases_for(spec, tiles) if case.emulated]
    # A window's cases have all its keys: a long one has many tiles. Strips have several each.
    window = math.ceil((masks.of_spec(spec).left or 0) / tiles.keys)
    longest = 3 + max(window, 2 * tiles.strips)
    fixed = {side: x for side, x in spec["seqlen"].items() if x != DYNAMIC}
    group = spec["q_per_kv"]
    limit = backward_cases.MOST_PAIRS
    if len(fixed) == 2:
        limit = backward_cases.MOST_PAIRS_OF_FIXED
    limit *= tiles.along_keys
    for case in shown:
        blocks = math.ceil(case.q / tiles.q) * math.ceil(case.kv / tiles.keys)
        blocks *= tiles.along_keys
        assert case.blocks == case.batch * case.kv_heads * group * blocks
        assert case.blocks <= limit and case.clusters is None
        assert "kv" in fixed or math.ceil(case.kv / tiles.keys) <= longest
        assert "q" in fixed or math.ceil(case.q / tiles.q) <= 5
    assert bool(shown) == (spec["seqlen"]["q"] != 4096)
    most = max(160 * group, 600) * tiles.along_keys
    if fixed and shown:  # each case has whole heads
        most = max(most, 40 * min(case.blocks for case in shown))
    assert sum(case.blocks for case in shown) <= most


@pytest.mark.parametrize(("spec", "tiles"), MADE_UP.values(), ids=MADE_UP)
def test_fixed_lengths_are_kept_and_names_are_unique(spec, tiles):
    """Of shipped kernels test_cases.py says it."""
    cases = cases_for(spec, tiles)
    names = [case.name for case in cases]
    assert len(names) == len(set(names))
    assert all(spec["seqlen"]["q"] in ("dynamic", case.q) for case in cases)


@each_kernel
def test_every_kind_of_problem(spec, tiles):
    cases, length = cases_for(spec, tiles), spec["seqlen"]["q"]
    mask, group = spec["mask"], spec["q_per_kv"]
    shown = [case for case in cases if case.emulated]
    if length == 4096:
        assert {case.gradient for case in cases} >= {"zeros", "one_row", "large"}
        return
    only = set() if sums_in_fp16(spec) else {"outliers"}
    assert {case.gradient for case in shown} == {*get_args(Gradient)} - only
    assert {case.data for case in shown} >= {
        "normal",
        "edges",
        "huge_key",
        "uniform_1e4",
    }
    assert {case.scale_factor for case in shown} >= {1.0, 30.0, 2.0**-10}
    layouts = {*get_args(Layout)} - {"farther"}
    if length != "dynamic":
        layouts -= {"mixed"}
    assert {case.layout for case in shown} >= layouts
    assert any(case.timing for case in shown)
    big = [case for case in cases if not case.emulated]
    assert max(case.repeats for case in big) == REPEATS
    if length != "dynamic":
        return
    m, n = tiles.q, tiles.keys
    assert {case.kv % n for case in shown} >= {*residues(n)}
    assert {case.q % m for case in shown} >= {*residues(m)}
    assert any(case.q < case.kv for case in shown) and any(c.q > c.kv for c in shown)
    assert any(case.q - case.kv > m for case in shown), "blocks of rows without a key"
    assert {(1, 1)} <= {(case.q, case.kv) for case in shown}
    assert any(case.q == 1 and case.kv > n for case in shown)
    assert any(case.kv == 1 and case.q > m for case in shown)
    assert any(case.batch == 2 and case.kv_heads == 3 for case in shown)
    most = max(
        backward_cases.work_tiles(case, tiles) / (case.sm_count // tiles.ctas)
        for case in shown
    )
    assert most >= 6, "a cluster with more tiles than a ring has stages"
    assert any(math.ceil(case.q / m) * group >= 5 for case in shown), "blocks in a row"
    if mask == "causal":
        found = {(case.kv - case.q) % m for case in shown}
        assert found >= {*residues(m)}
        assert {(case.kv - case.q) % n for case in shown} >= {n // 2, n - 2, n - 1}
    clusters = ARCHITECTURES[spec["arch"]].sm_count // tiles.ctas
    many = [x for x in big if backward_cases.work_tiles(x, tiles) > 2 * clusters]
    assert len(many) >= 3


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("mask", "sides"),
    [
        ("none", {"left": 40, "right": 20}),
        ("none", {"left": 200}),
        ("none", {"right": 130}),
        ("causal", {"left": 127}),
        ("causal", {"left": 2047}),
    ],
)
def test_edges_of_windows_are_at_every_place_of_a_block(mask, sides, head_dim):
    tiles = Tiles({64: 128, 128: 64}[head_dim], 128, (1, 1))
    m, n = tiles.q, tiles.kv
    spec = spec_of(mask, head_dim=head_dim, window={**NO_WINDOW, **sides})
    shown = [case for case in cases_for(spec, tiles) if case.emulated]
    assert all(case.blocks <= backward_cases.MOST_PAIRS for case in shown)
    assert sum(case.blocks for case in shown) <= 600
    right = 0 if mask == "causal" else sides.get("right")
    if right is not None:
        places = {(case.kv - case.q + right) % m for case in shown}
        assert places >= {*residues(m)}
        assert any(case.q - case.kv - right > m for case in shown), "rows without keys"
    if (left := sides.get("left")) is not None:
        hidden = {case.kv - case.q - left for case in shown}
        assert max(hidden) > n or left > 4 * n, "tiles that no row sees"
        assert min(hidden) < 0 < max(hidden)
        if left <= 4 * n:
            assert {each % m for each in hidden} >= {*residues(m)}


def test_few_problems_are_launched_alone_and_none_is_walked():
    spec, tiles = spec_of(), Tiles(64, 128, (1, 1))
    assert walks_for(spec, tiles) == ()
    assert {case.layout for case in launches_for(spec, tiles)} == {"own", "farther"}
    assert max(case.batch for case in launches_for(spec, tiles)) > 65535
    small = smallest_ragged(cases_for(spec, tiles))
    assert small.emulated and min(small.q, small.kv) > 1


# --- what tensors hold ----------------------------------------------------------------------

TILES = Tiles(64, 128, (1, 1))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_o_and_lse_are_those_of_what_16_bits_hold(dtype, mask):
    spec, case = spec_of(mask, 2, dtype=dtype), Case("x", 2, 2, 40, 24)
    made = tensors.make_problem(spec, TILES, case)
    q, k, v = (made[name].numbers() for name in "qkv")
    exact = attention(q, k, v, scale=0.125, mask=MASKS[mask])
    wanted = tensors.TO_BITS[dtype](exact.out.astype(np.float32))
    np.testing.assert_array_equal(made["out"].view, wanted)
    found = made["lse"].numbers()
    np.testing.assert_array_equal(found, exact.lse.astype(np.float32))
    assert np.isneginf(found).any() == (mask == "causal")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_that_are_zero_one_row_small_or_large(dtype):
    spec, made = spec_of(dtype=dtype), {}
    for kind in get_args(Gradient):
        case = Case("x", 1, 2, 9, 7, gradient=kind)
        made[kind] = values(spec, TILES, case)["dout"]
    assert (made["zeros"] == 0).all()
    rows = np.flatnonzero(np.abs(made["one_row"]).sum((0, 2, 3)))
    assert rows.tolist() == [4]
    assert 0.8 < made["normal"].std() < 1.2
    assert made["small"].std() < 0.02
    large = {"bf16": 1e4, "fp16": 1e3}[dtype]
    assert 0.8 < made["large"].std() / large < 1.2


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("mask", "own"),
    [
        *(("none", {}), ("causal", {}), ("causal", {"softcap": 30.0})),
        ("none", {"window": {"left": 60, "right": 9}}),
    ],
)
def test_right_kernels_hold_in_every_case_of_the_emulator(dtype, mask, own):
    """No 16-bit P or dS overflows, and no bound is too tight for the data that it is of."""
    spec = spec_of(mask, 2, dtype=dtype, **own)
    for case in cases_for(spec, TILES):
        if not case.emulated or case.layout in ("far", "farther"):
            continue
        made = tensors.make_problem(spec, TILES, case)
        inputs = {x.name: x.numbers() for x in made.inputs}
        call = Given(spec, inputs, 0.125 * case.scale_factor)
        named = [inputs[name] for name in ("q", "k", "v", "dout", "out", "lse")]
        options = {**defined_by(call), "dtype": dtype}
        for name in ("q", "k", "v", "dout"):
            del options[name]
        for packed in (False, True)[: 1 + (dtype == "bf16")]:
            found = compute(*named, **options, packed=packed)
            judged = BACKWARD.judge(call, found, BACKWARD.truth(call), TILES.kv)
            for name, verdict in judged.items():
                assert verdict.finding == "", (case.name, name)


def test_a_workspace_lies_alone_between_guards_at_16_bytes():
    spec = spec_of(group=3)
    for layout in get_args(Layout):
        case = Case("x", 2, 1, 65, 7, layout=layout, sm_count=1)
        placed = place_tensors(spec, case, TILES).tensors["workspace"]
        assert placed.shape == (2 * 3 * 128 * 66 + 1 + 2,) and placed.strides == (1,)
        assert placed.storage == "workspace" and placed.offset * 4 % 16 == 0
        if layout == "farther":
            continue
        made = arguments(spec, case, TILES)
        assert ("workspace" in made["tensors"]) == (layout != "plain")
        assert made["scratch"] == {"workspace": placed.shape[0]}


def test_a_workspace_is_poisoned_and_its_guards_are_watched():
    spec, case = spec_of(), Case("x", 1, 1, 5, 7)
    made = tensors.make_problem(spec, TILES, case)
    (workspace,) = made.scratch
    workspace.poison()
    assert np.isnan(workspace.numbers()).all() and workspace.outside() == ""
    workspace.view[...] = 0
    assert workspace.outside() == ""
    for place in (0, -1):
        workspace.poison()
        workspace.storage[place] = 0
        assert "1 elements outside workspace were written" in workspace.outside()
    (buffer,) = [x for x in made.memory().buffers if x.name == "workspace"]
    assert buffer.address % 16 == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rounding_is_that_of_the_emulator(dtype):
    random = np.random.default_rng(0)
    some = random.standard_normal(4096, np.float32) * np.exp2(
        random.integers(-30, 30, 4096)
    )
    some = np.concatenate(
        (some, [0.0, -0.0, np.inf, -np.inf, 65504, 65520, 1 + 2.0**-8])
    )
    some = some.astype(np.float32)
    np.testing.assert_array_equal(rounded(some, dtype), rounded_by_bits(dtype, some))
