# SPDX-License-Identifier: Apache-2.0
"""The list of cases has every axis that the bar asks for, for every kind of SPEC."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from fmha_gen.arch import ARCHITECTURES
from fmha_gen.cases import (
    RAGGED_LENGTHS,
    Case,
    cases_for,
    query_tiles,
    smallest_ragged,
    tiles_of_kv_head,
)

LENGTHS: tuple[Any, ...] = ("dynamic", 1, 127, 512, 4096)
SPECS = [
    {"arch": arch, "seqlen": {"q": q, "kv": kv}, "q_per_kv": q_per_kv}
    for arch in ARCHITECTURES
    for q, kv, q_per_kv in itertools.product(LENGTHS, LENGTHS, (1, 4, 8))
] + [
    {
        "arch": "sm90",
        "seqlen": {"q": q, "kv": "dynamic"},
        "q_per_kv": q_per_kv,
        "pack_gqa": True,
    }
    for q, q_per_kv in itertools.product(LENGTHS, (2, 8, 12))
]
DYNAMIC = [spec for spec in SPECS if set(spec["seqlen"].values()) == {"dynamic"}]


def label(spec: dict[str, Any]) -> str:
    pack = "-pack" if "pack_gqa" in spec else ""
    lengths = spec["seqlen"]
    return (
        f"{spec['arch']}-q{lengths['q']}-kv{lengths['kv']}-gqa{spec['q_per_kv']}{pack}"
    )


@pytest.mark.parametrize("spec", SPECS, ids=label)
def test_every_spec_gets_every_kind_of_input(spec: dict[str, Any]) -> None:
    cases = cases_for(spec)
    assert {case.data for case in cases} == {
        "normal",
        "huge_key",
        "uniform_1e4",
        "all_1e4",
    }
    assert {case.layout for case in cases} == {"bshd", "bhsd", "fused", "cache"}
    assert {1.0, 30.0} == {case.scale_factor for case in cases}
    assert {case.batch for case in cases} >= {1, 3}
    assert {case.kv_heads for case in cases} >= {1, 2, 3}
    assert {True, False} == {case.gaps for case in cases}
    assert len(cases) <= 26


@pytest.mark.parametrize("spec", SPECS, ids=label)
def test_lengths_are_fixed_or_ragged(spec: dict[str, Any]) -> None:
    cases = cases_for(spec)
    for side in ("q", "kv"):
        lengths = {getattr(case, side) for case in cases}
        fixed = spec["seqlen"][side]
        if fixed == "dynamic":
            assert lengths >= set(RAGGED_LENGTHS)
        else:
            assert lengths == {fixed}


@pytest.mark.parametrize("spec", DYNAMIC, ids=label)
def test_either_side_is_the_longer_one(spec: dict[str, Any]) -> None:
    differences = {case.q - case.kv for case in cases_for(spec)}
    assert min(differences) < 0 < max(differences)
    assert 0 in differences


def filling(spec: dict[str, Any]) -> list[Case]:
    """The cases that give some CTA of a persistent grid a third work tile."""
    gpu = ARCHITECTURES[spec["arch"]]
    return [
        case
        for case in cases_for(spec)
        if query_tiles(case, spec, gpu.tallest_tile) > 2 * gpu.sm_count
    ]


@pytest.mark.parametrize("spec", SPECS, ids=label)
def test_some_case_fills_a_persistent_grid_more_than_twice_and_repeats(
    spec: dict[str, Any],
) -> None:
    full = filling(spec)
    assert full
    assert max(case.repeats for case in full) == 20


@pytest.mark.parametrize("spec", DYNAMIC, ids=label)
@pytest.mark.parametrize("tile", [128, 192, 256])
def test_odd_and_even_numbers_of_query_tiles_in_many_tiles(
    spec: dict[str, Any], tile: int
) -> None:
    full = filling(spec)
    one_head = {
        "q_per_kv": 1
    }  # a packed group has other numbers, of both kinds elsewhere
    assert {tiles_of_kv_head(c.q, one_head, tile) % 2 for c in full} == {0, 1}
    every = {tiles_of_kv_head(case.q, spec, tile) % 2 for case in cases_for(spec)}
    assert "pack_gqa" not in spec or every == {0, 1}
    assert any(
        case.q > case.kv for case in full
    )  # causal: work tiles without any key in between


@pytest.mark.parametrize("spec", SPECS, ids=label)
def test_names_and_inputs_are_unique_and_stable(spec: dict[str, Any]) -> None:
    cases = cases_for(spec)
    assert len({case.name for case in cases}) == len(cases)
    assert len({case.seed for case in cases}) == len(cases)
    assert len(
        {
            (c.batch, c.kv_heads, c.q, c.kv, c.data, c.layout, c.scale_factor)
            for c in cases
        }
    ) == len(cases)
    assert cases == cases_for(spec)


def test_a_seed_is_the_same_everywhere() -> None:
    first = cases_for(DYNAMIC[0])[0]
    assert (first.name, first.seed) == ("plain_b1_hkv1_q1_kv1", 348279657)


def test_the_case_for_slow_tools_is_ragged_on_both_sides() -> None:
    case = smallest_ragged(cases_for(DYNAMIC[0]))
    assert (case.batch, case.kv_heads, case.q, case.kv) == (1, 1, 65, 64)
    assert (
        smallest_ragged(
            cases_for({"arch": "sm90", "seqlen": {"q": 1, "kv": 1}, "q_per_kv": 1})
        ).q
        == 1
    )
