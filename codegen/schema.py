# SPDX-License-Identifier: Apache-2.0
"""What a spec's JSON Schema says across fields: the rules of `spec.py`, as if/then for editors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from .arch import ARCHITECTURES

ID: Final = "urn:fmha-gen:spec"

_Schema = dict[str, Any]


def rules(defaults: Mapping[str, Any]) -> list[_Schema]:
    """The rules between fields; defaults: of the fields that have one, as a spec says it."""
    return [*_of_architectures(defaults), *_between_fields()]


def _of_architectures(defaults: Mapping[str, Any]) -> Iterator[_Schema]:
    for name, architecture in ARCHITECTURES.items():
        alone: _Schema = {"arch": {"const": name}}
        if pairs := architecture.takes_of_pairs:
            takes = {**architecture.takes, **pairs}
            both = {**alone, "cta_group": {"const": 2}}
            yield _when(both, ["arch", "cta_group"], _takes(takes, defaults))
            alone["cta_group"] = {"const": 1}  # or left out
        yield _when(alone, ["arch"], _takes(architecture.takes, defaults))


def _takes(
    takes: Mapping[str, Sequence[Any]], defaults: Mapping[str, Any]
) -> Iterator[_Schema]:
    """A rule for each field that takes some values only; None among them: it is left out."""
    for name, values in takes.items():
        said = [value for value in values if value is not None]
        accepted: Any = {"enum": _in_yaml(name, said)} if said else False
        field, _, inner = name.partition(".")
        rule: _Schema = {
            "properties": {
                field: {"properties": {inner: accepted}} if inner else accepted
            }
        }
        if field in defaults and not inner and defaults[field] not in values:
            rule["required"] = [field]
        yield rule


def _in_yaml(name: str, values: Sequence[Any]) -> list[Any]:
    if name != "head_dim":
        return [list(each) if isinstance(each, tuple) else each for each in values]
    both = [{"qk": qk, "v": v} for qk, v in values]
    return [*(qk for qk, v in values if qk == v), *both]


def _between_fields() -> Iterator[_Schema]:
    some_heads: _Schema = {"required": ["heads"]}
    along_heads: _Schema = {"cluster": {"const": [1, 2]}}
    packed: _Schema = {"pack_gqa": {"const": True}}
    clustered: _Schema = {"properties": {"cluster": {"enum": [[2, 1], [1, 2]]}}}
    yield _when(
        {"multicast": {"enum": ["k", "v", "kv"]}},
        ["multicast"],
        [{**clustered, "required": ["cluster"]}],
    )
    yield _when(
        along_heads, ["cluster"], [some_heads, _heads({"multipleOf": 2, "minimum": 2})]
    )
    yield _when(packed, ["pack_gqa"], [some_heads, _heads({"minimum": 2})])
    yield _when(
        packed,
        ["pack_gqa"],
        [{"properties": {"cluster": {"enum": [[1, 1], [2, 1]]}}}],
    )


def _heads(q_per_kv: _Schema) -> _Schema:
    inner = {"required": ["q_per_kv"], "properties": {"q_per_kv": q_per_kv}}
    return {"properties": {"heads": inner}}


def _when(
    condition: _Schema,
    required: Sequence[str],
    rules: Iterator[_Schema] | list[_Schema],
) -> _Schema:
    return {
        "if": {"properties": condition, "required": list(required)},
        "then": {"allOf": list(rules)},
    }
