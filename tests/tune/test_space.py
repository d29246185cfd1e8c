# SPDX-License-Identifier: Apache-2.0
"""The space is the spec's planned fields, all of them, with values that a spec may give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import support
from fmha_gen.errors import CheckFailed
from fmha_gen.show import explain
from fmha_gen.spec.model import Spec
from fmha_gen.tune import space

BASE = {"arch": "sm90", "op": "fmha_fwd", "dtype": "bf16", "head_dim": 128}


def planned_fields() -> Iterator[str]:
    """The fields that have no value of their own when a spec leaves them out.

    That of the backward pass is not among them: its plans are not searched.
    """
    spec = Spec.model_validate(BASE)
    names = (name for name, value, _ in explain.fields(spec) if value is None)
    return (name for name in names if name != "stages.do")


def test_every_field_that_the_plan_chooses_is_tuned() -> None:
    assert list(space.FIELDS) == list(planned_fields())


@pytest.mark.parametrize("tunable", space.TUNABLE, ids=lambda tunable: tunable.field)
def test_a_spec_takes_every_value(tunable: space.Tunable) -> None:
    block, _, key = tunable.field.partition(".")
    for value in tunable.values:
        spec = Spec.model_validate({**BASE, block: {key: value}})
        assert getattr(getattr(spec, block), key) == value


def test_the_chosen_point_is_the_plans() -> None:
    plan = support.shipped_plan("sm90_d64_bf16_full")
    constants = {number.name: number.value for number in plan.chosen}
    assert space.chosen(plan) == {
        "tile.q": constants["TILE_Q"],
        "tile.kv": constants["TILE_KV"],
        "stages.q": constants["Q_STAGES"],
        "stages.kv": constants["K_STAGES"],
        "stages.v": constants["V_STAGES"],
    }


def test_a_plan_that_chooses_other_numbers_is_refused() -> None:
    plan = support.shipped_plan("sm100_d128_bf16_full")
    with pytest.raises(CheckFailed, match="of Hopper's forward plans only"):
        space.chosen(plan)


INCUMBENT = {
    "tile.q": 128,
    "tile.kv": 128,
    "stages.q": 2,
    "stages.kv": 2,
    "stages.v": 3,
}


def test_all_points_once_and_the_incumbent_first() -> None:
    found = list(space.points(INCUMBENT, {}))
    assert found[0] == INCUMBENT
    assert len({tuple(point.values()) for point in found}) == len(found)
    sizes = 1
    for tunable in space.TUNABLE:
        sizes *= len(tunable.values)
    assert len(found) == sizes


def test_fixed_fields_keep_the_incumbents_value_or_take_the_given_ones() -> None:
    fixed = space.fixed_values(["tile.q", "tile.kv=16,96", "stages.q=1"])
    found = list(space.points(INCUMBENT, fixed))
    assert found[0] == INCUMBENT  # it is what all are compared with
    others = found[1:]
    assert {point["tile.q"] for point in others} == {128}
    assert {point["tile.kv"] for point in others} == {16, 96}
    assert {point["stages.q"] for point in others} == {1}
    assert {point["stages.kv"] for point in others} == {2, 3, 4}
    assert {point["stages.v"] for point in others} == {2, 3, 4}


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("tile.k", r"the fields are tile\.q, tile\.kv"),
        ("cluster", "the fields are"),
        ("tile.q=", "not values"),
        ("tile.q=64,", "not values"),
        ("tile.q=big", "not values"),
        ("tile.q=1.5", "not values"),
        ("tile.q=[", "not values"),
        ("tile.q=true", "not values"),
        ("tile.kv=0x40", "not values"),
        ("tile.kv=1_6", "not values"),
        ("tile.q=-64", "not values"),
    ],
)
def test_other_fixes_are_refused(option: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        space.fixed_values([option])
