# SPDX-License-Identifier: Apache-2.0
"""The fields of a spec and their relations, as a JSON Schema and as tables for the manual."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, Final

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from ..evidence.table import markdown
from ..features import FEATURES
from ..features.feature import (
    Block,
    Model,
    Relation,
    accepts_of,
    choices_of,
    either,
    in_yaml,
    said,
)
from ..features.problem import HeadDims
from ..spec.model import Spec

_ID: Final = "urn:fmha-gen:spec"

_Schema = dict[str, Any]

_DEFAULTS: Final = Spec(
    arch="sm90", op="fmha_fwd", dtype="bf16", head_dim=HeadDims(qk=64, v=64)
)


def schema() -> _Schema:
    """Return the JSON Schema of a spec file, for editors."""
    body = Spec.model_json_schema(schema_generator=_Generator)
    rules = [
        _rule(feature.path, each) for feature in FEATURES for each in feature.relations
    ]
    head = {"$schema": _Generator.schema_dialect, "$id": _ID}
    return {**head, **body, "allOf": rules}


class _Generator(GenerateJsonSchema):
    """Leaves out titles made of field names, and `null`, which no spec file can say."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        if schema.get("default", ...) is None:
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)

    def encode_default(self, dft: Any) -> Any:
        data = super().encode_default(dft)
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _rule(field: str, relation: Relation) -> _Schema:
    beside = [_among(*each) for each in relation.beside.items()]
    return {"if": {"allOf": beside}, "then": _among(field, relation.takes)}


def _among(path: str, values: Sequence[Any]) -> _Schema:
    """Return what holds where a field has one of these values, or is left out and has it so."""
    name, _, inner = path.partition(".")
    field = Spec.model_fields[name]
    accepts = accepts_of(field)
    expand = accepts.expand if isinstance(accepts, Block) else None
    forms = [value for value in values if value is not None]
    if expand and not inner:
        forms += [expand(value) for value in forms if not isinstance(value, dict)]
    among: _Schema = {"enum": forms} if forms else {"not": {}}
    required = field.is_required() or said(_DEFAULTS, path) not in values

    def has(key: str, rule: _Schema) -> _Schema:
        return {"properties": {key: rule}} | ({"required": [key]} if required else {})

    if inner and expand:  # the short form says all of the fields inside
        among = {"anyOf": [among, {"type": "object", **has(inner, among)}]}
    elif inner:
        for part in reversed(inner.split(".")):
            among = has(part, among)
    return has(name, among)


def fields_table(shown: Iterable[Spec]) -> str:
    """Return the fields of a spec as a table of Markdown, with words of the names of some specs."""
    words: dict[str, set[str]] = defaultdict(set)
    for feature, spec in product(FEATURES, shown):
        for pattern, true in feature.tokens.items():
            words[feature.path] |= {
                *filter(re.compile(pattern).fullmatch, true(spec)[:1])
            }
    rows = [
        (
            f"`{path}`",
            accepts_of(field).text or _code(map(in_yaml, choices_of(field.annotation))),
            _default_of(field),
            _code(dict.fromkeys(by_length[:1] + by_length[-1:])),
            accepts_of(field).meaning,
        )
        for path, field in _fields(Spec)
        for by_length in [sorted(words[path], key=lambda word: (len(word), word))]
    ]
    return markdown([("field", "accepted", "default", "in a name", "meaning"), *rows])


def relations_table() -> str:
    """Return which values of fields do not go together, as a table of Markdown."""
    rows = [
        (
            ", ".join(_is_one_of(*each) for each in relation.beside.items()),
            _is_one_of(feature.path, relation.takes),
            relation.code,
        )
        for feature in FEATURES
        for relation in feature.relations
    ]
    return markdown([("where", "only", "else"), *sorted(rows)])


def _fields(model: type[Model], before: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield before + name, field
        if isinstance(field.annotation, type) and issubclass(field.annotation, Model):
            yield from _fields(field.annotation, f"{before}{name}.")


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, Model) or field.default_factory is not None:
        return ""
    return "planned" if field.default is None else f"`{in_yaml(field.default)}`"


def _is_one_of(path: str, values: Sequence[Any]) -> str:
    if isinstance(values, range):
        return f"`{path}` is `{values[0]}`, `{values[1]}`, ... `{values[-1]}`"
    words = [f"`{in_yaml(value)}`" for value in values if value is not None]
    return f"`{path}` is {either([*words, *['left out'] * (None in values)])}"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
