# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema refuses across fields what the tool refuses, and takes what it takes."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import yaml
from fmha_gen.arch import ARCHITECTURES
from fmha_gen.features import FEATURES
from fmha_gen.features.feature import Feature, Relation, said
from fmha_gen.show.schema import schema
from fmha_gen.spec.model import Spec
from pydantic import ValidationError
from support import SPECS, rotated

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
SIDES: tuple[dict[str, Any], ...] = (
    *({}, {"left": 5}, {"right": 0}, {"right": 5}, {"right": "none"}),
    *({"left": 5, "right": 5}, {"left": "none", "right": 5}),
)
MASKS: dict[str, tuple[Any, ...]] = {
    "arch": ("sm90", "sm100"),
    "head_dim": (64,),
    "mask": (None, "none", "causal"),
    "window": (None, *SIDES),
    "blocks": (None, "derived", "lists"),
    "cluster": (None, [2, 1]),
    "pack_gqa": (None, True),
}
EDGES: dict[str, tuple[Any, ...]] = {
    "arch": ("sm90", "sm100"),
    "head_dim": (64,),
    "mask": (None, "none", "causal"),
    "documents": (None, True),
    "prefix": (None, True),
}
CHUNKS = {**EDGES, "chunk": (None, "none", 64), "prefix": (None,)}

BIASES: dict[str, tuple[Any, ...]] = {
    "arch": ("sm90", "sm100"),
    "head_dim": (64,),
    "heads": (None, {"q_per_kv": 4}),
    "pack_gqa": (None, True),
    "softcap": (None, "none", 30),
    "bias": (None, "none", "fp32", {}, {"dtype": "none"}, {"dtype": "bf16"}),
}
PACKED: dict[str, tuple[Any, ...]] = {
    **{
        name: MASKS[name]
        for name in ("arch", "head_dim", "blocks", "cluster", "pack_gqa")
    },
    "heads": ({"q_per_kv": 4},),
    "mask": ("causal",),
    "batch": (None, "dense", "varlen"),
    "schedule": (None, "single"),
    "kv": (None, {"paged": {"page": 16}}),
    "documents": (None, True),
    "prefix": (None, True),
    "bias": (None, "fp32"),
}
E4M3: dict[str, tuple[Any, ...]] = {
    **{name: MASKS[name] for name in ("arch", "mask", "blocks", "cluster")},
    "dtype": ("bf16", "e4m3"),
    "head_dim": (64, 96),
    "out_dtype": (None, "none", "fp16"),
    "v_layout": (None, "rows", "permuted"),
    "descale": (None, "head", "block"),
    "tile": (None, {"q": 64, "kv": 48}),
}


BACKWARD: dict[str, tuple[Any, ...]] = {
    "op": ("fmha_fwd", "fmha_bwd"),
    "arch": ("sm90", "sm100"),
    "head_dim": (64, {"qk": 192, "v": 128}, 32),
    "deterministic": (None, True),
    "mask": (None, "causal"),
    "window": (None, {"left": 5}),
    "lse": (None, True),
    "stages": (None, {"do": 2}, {"v": 2}),
    "tile": (None, {"q": 128}, {"q": 192, "kv": 128}, {"kv": 64}),
}


MOST = 6000  # combinations that are tried at a time: each takes 1 ms

# As `pack_gqa: true`, or `cluster is [1, 1]`.
FIELD = re.compile(rf"\b({'|'.join(one.path for one in FEATURES)})(?:: | is )\S")


def holds(rule: Any, data: Any) -> bool:
    """The part of JSON Schema that rules across fields are made of."""
    known = {"if", "then", "allOf", "anyOf", "properties", "required", "enum"}
    assert rule.keys() <= known | {"not", "type"}, rule
    assert rule.get("type", "object") == "object" and rule.get("not", {}) == {}
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
        and ("anyOf" not in rule or any(holds(each, data) for each in rule["anyOf"]))
        and data in rule.get("enum", [data])
        and (isinstance(data, dict) or "type" not in rule)
        and "not" not in rule
    )


def refusals(data: dict[str, Any]) -> list[str]:
    """What the tool says of the fields together; nothing when it takes them."""
    try:
        Spec.model_validate(data)
    except ValidationError as error:
        (only,) = error.errors()
        return [violation.message for violation in only["ctx"]["violations"]]
    return []


@pytest.mark.parametrize(
    "axes",
    [AXES, MASKS, EDGES, CHUNKS, BIASES, PACKED, E4M3, BACKWARD],
    ids=["tiles", "masks", "edges", "chunks", "biases", "packed", "e4m3", "backward"],
)
def test_rules_across_fields_are_the_tools(axes: dict[str, tuple[Any, ...]]) -> None:
    rules = {"allOf": schema()["allOf"]}
    seen = {True: 0, False: 0}
    combinations = list(itertools.product(*axes.values()))
    for values in rotated(combinations, MOST):
        given = dict(zip(axes, values, strict=True))
        data = {key: value for key, value in given.items() if value is not None}
        data = {"op": "fmha_fwd", "dtype": "bf16", **data}
        said = refusals(data)
        assert holds(rules, data) == (not said), data
        seen[not said] += 1
        for message in said:
            assert len(FIELD.findall(message)) >= 2, message
    assert min(seen.values()) > len(axes), seen


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_shipped_specs_hold(arch: str) -> None:
    found = [path for path in SPECS.glob("*.yaml") if path.name.startswith(f"{arch}_")]
    assert found
    for path in found:
        assert holds({"allOf": schema()["allOf"]}, yaml.safe_load(path.read_text()))


def test_has_a_name() -> None:
    assert schema()["$id"] == "urn:fmha-gen:spec"


def test_a_relation_may_be_about_a_field_with_a_short_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a kernel that is generated for one length of Q, and any of K, where it is causal."""
    relation = Relation(["dynamic"], {"seqlen.q": [64], "mask": ["causal"]})
    features = [*FEATURES, Feature("seqlen.kv", relations=[relation])]
    for module in ("fmha_gen.show.schema.FEATURES", "fmha_gen.spec.model.FEATURES"):
        monkeypatch.setattr(module, features)
    rules, seen = {"allOf": schema()["allOf"]}, set()
    lengths = ("dynamic", 64, 7, {"q": 64}, {"kv": 64}, {"q": 64, "kv": 7}, {})
    for seqlen, mask in itertools.product(lengths, ("causal", "none")):
        data = {"arch": "sm90", "op": "fmha_fwd", "dtype": "bf16", "head_dim": 64}
        data |= {"seqlen": seqlen, "mask": mask}
        said = refusals(data)
        assert holds(rules, data) == (not said), data
        seen |= {*said}
    assert seen == {
        f"seqlen.kv: {kv} is not generated for seqlen.q: 64 with mask: causal"
        for kv in (64, 7)
    }


def test_every_field_is_a_feature() -> None:
    """What is a field of the model and no feature has no words, no flag and no relation."""
    features = {feature.path.partition(".")[0] for feature in FEATURES}
    assert features == set(Spec.model_fields)


def test_every_relation_is_about_fields_and_values_that_there_are() -> None:
    """A relation that names another never holds, and refuses nothing."""
    relations = [(one.path, each) for one in FEATURES for each in one.relations]
    assert relations
    for path, relation in relations:
        for name, values in {path: relation.takes, **relation.beside}.items():
            for value in values:
                fields: dict[str, Any] = {}
                if value is not None:
                    inner: Any = value
                    for part in reversed(name.split(".")):
                        inner = fields = {part: inner}
                base = {
                    "arch": "sm90",
                    "op": "fmha_fwd",
                    "dtype": "bf16",
                    "head_dim": 64,
                }
                try:
                    spec = Spec.model_validate(base | fields)
                except ValidationError as error:
                    (only,) = error.errors()
                    assert only["type"] == "rules", (
                        name,
                        value,
                    )  # of the fields together
                else:
                    assert said(spec, name) == value
