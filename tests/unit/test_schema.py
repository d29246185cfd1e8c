# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema refuses across fields what the tool refuses, and takes what it takes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import yaml
from fmha_gen.arch import ARCHITECTURES
from fmha_gen.spec import Spec, schema
from pydantic import ValidationError
from support import SPECS

AXES: dict[str, tuple[Any, ...]] = {
    "arch": ("sm90", "sm100"),
    "head_dim": (64, 256, {"qk": 128, "v": 128}, {"qk": 192, "v": 128}),
    "cluster": (None, [1, 1], [2, 1], [1, 2]),
    "multicast": (None, "none", "k", "kv"),
    "cta_group": (None, 1, 2),
    "schedule": (None, "single"),
    "heads": (None, {}, {"q_per_kv": 1}, {"q_per_kv": 3}, {"q_per_kv": 4}),
    "pack_gqa": (None, True),
    "tile": (None, {"q": 128}, {"q": 256}),
    "stages": (None, {"q": 1, "v": 2}),
}


def holds(rule: Any, data: Any) -> bool:
    """The part of JSON Schema that rules across fields are made of."""
    if isinstance(rule, bool):
        return rule
    known = {"if", "then", "allOf", "properties", "required", "enum", "const"}
    assert rule.keys() <= known | {"minimum", "multipleOf"}, rule
    if "if" in rule and holds(rule["if"], data) and not holds(rule["then"], data):
        return False
    if isinstance(data, dict):
        inner = rule.get("properties", {})
        if not all(holds(inner[key], data[key]) for key in inner.keys() & data.keys()):
            return False
        if not set(rule.get("required", ())) <= data.keys():
            return False
    return (
        all(holds(each, data) for each in rule.get("allOf", ()))
        and data in rule.get("enum", [data])
        and data == rule.get("const", data)
        and ("minimum" not in rule or data >= rule["minimum"])
        and ("multipleOf" not in rule or data % rule["multipleOf"] == 0)
    )


def accepted(data: dict[str, Any]) -> bool:
    try:
        Spec.model_validate(data)
    except ValidationError:
        return False
    return True


def test_rules_across_fields_are_the_tools() -> None:
    rules = {"allOf": schema()["allOf"]}
    seen = {True: 0, False: 0}
    for values in itertools.product(*AXES.values()):
        given = dict(zip(AXES, values, strict=True))
        data = {key: value for key, value in given.items() if value is not None}
        data |= {"op": "fmha_fwd", "dtype": "bf16"}
        verdict = accepted(data)
        assert holds(rules, data) == verdict, data
        seen[verdict] += 1
    assert min(seen.values()) > 100, seen


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_shipped_specs_hold(arch: str) -> None:
    found = [path for path in SPECS.glob("*.yaml") if path.name.startswith(f"{arch}_")]
    assert found
    for path in found:
        assert holds({"allOf": schema()["allOf"]}, yaml.safe_load(path.read_text()))


def test_has_a_name() -> None:
    assert schema()["$id"] == "urn:fmha-gen:spec"
