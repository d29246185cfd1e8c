# SPDX-License-Identifier: Apache-2.0
"""What a kernel can be asked to be: the fields of a spec, their rules, and how specs are loaded.

The model takes only what is generated today. Its validators raise with this package's codes, so
that a diagnostic's text is ours and does not follow Pydantic's releases.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, cast, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema

from . import names, specfile, vocabulary
from . import schema as across_fields
from .arch import ARCHITECTURES
from .errors import Diagnostic, Location, SpecError, Violation, quoted, shown
from .specfile import Document, FieldPath

_HEAD_DIM_WORDS: Final = "a multiple of 16 from 32 to 256"
_CLUSTERS: Final = ((1, 1), (2, 1), (1, 2))
_MAX_SEQLEN: Final = 2**24  # [rows]
_MAX_Q_PER_KV: Final = 128

_CLOSE: Final = 0.7  # difflib's ratio from which a word counts as misspelt
_RULES: Final = "rules"  # type of the one Pydantic error that carries every broken rule


def _choices(source: Any) -> list[object]:
    """Return the values that the `Literal`s in a type name."""
    if get_origin(source) is Literal:
        return list(get_args(source))
    return [choice for part in get_args(source) for choice in _choices(part)]


def _either(words: Iterable[str]) -> str:
    """Return "a", "a or b", "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


@dataclass(frozen=True)
class Accepts:
    """Annotation: whatever the annotated type refuses is one diagnostic that says what is accepted.

    `text` says it in words and `types` are the exact types a value can have; for a `Literal` both
    follow from it. The types are compared here because Pydantic takes `True` for `Literal[1]`.
    `field` is the name by which the vocabulary knows words that it might be given.
    """

    text: str = ""
    types: tuple[type, ...] = ()
    field: str = ""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        choices = _choices(source)
        words = [choice for choice in choices if isinstance(choice, str)]
        text = self.in_words(source)
        types = self.types or tuple({type(choice) for choice in choices})

        def check(value: Any, inner: core_schema.ValidatorFunctionWrapHandler) -> Any:
            if type(value) not in types:
                raise _refusal("FG103", text, value, _unquote_hint(value, types))
            try:
                return inner(value)
            except ValidationError:
                hint = (
                    vocabulary.of_value(self.field, value)
                    or _did_you_mean(value, words)
                    or _unquote_hint(value, types)
                )
                raise _refusal("FG104", text, value, hint) from None

        return core_schema.no_info_wrap_validator_function(check, handler(source))

    def in_words(self, source: Any) -> str:
        """Return what a field of type `source` accepts, for a message."""
        return self.text or _either(str(choice) for choice in _choices(source))


@dataclass(frozen=True)
class Block(Accepts):
    """Annotation of a nested model: takes a mapping, or a value that `expand` turns into one.

    The fields inside report for themselves. `types` are the exact types of such a value, `short`
    is its type as the JSON Schema states it.
    """

    expand: Callable[[Any], dict[str, Any]] | None = None
    short: Any = None
    hint: str = ""  # to who gives something else

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        def check(value: Any) -> Any:
            if isinstance(value, (dict, source)):
                return value
            if self.expand is None or type(value) not in self.types:
                hint = self.hint or _unquote_hint(value, self.types)
                raise _refusal("FG103", self.text, value, hint)
            return self.expand(value)

        model = handler(source)
        if self.short is None:
            return core_schema.no_info_before_validator_function(check, model)
        either = core_schema.union_schema([handler.generate_schema(self.short), model])
        return core_schema.no_info_before_validator_function(
            check, model, json_schema_input_schema=either
        )


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


# A step of an MMA along the head is 16 elements.
_HeadDim = Annotated[int, Field(ge=32, le=256, multiple_of=16)]


class HeadDim(_Model):
    """Elements of one head: `qk` of a row of Q and of K, `v` of a row of V and of O."""

    qk: Annotated[_HeadDim, Accepts(_HEAD_DIM_WORDS, (int,))] = Field(
        description="Of Q and K."
    )
    v: Annotated[_HeadDim, Accepts(_HEAD_DIM_WORDS, (int,))] = Field(
        description="Of V and O."
    )


_Dynamic = Literal["dynamic"]
_Rows = Annotated[int, Field(ge=1, le=_MAX_SEQLEN)]
Length = Annotated[
    _Rows | _Dynamic,
    Accepts(f"a whole number from 1 to {_MAX_SEQLEN}, or dynamic", (int, str)),
]
"""Rows of a sequence: fixed when the kernel is generated, or any number at run time."""


class Seqlen(_Model):
    """Rows of Q and of K and V."""

    q: Length = Field(default="dynamic", description="Rows of Q.")
    kv: Length = Field(default="dynamic", description="Rows of K and V.")


class Heads(_Model):
    """How query heads share KV heads. How many there are is a run-time argument."""

    q_per_kv: Annotated[
        int,
        Field(ge=1, le=_MAX_Q_PER_KV),
        Accepts(f"a whole number from 1 to {_MAX_Q_PER_KV}", (int,)),
    ] = Field(default=1, description="Query heads per KV head: 1 is MHA, more is GQA.")


class Tile(_Model):
    """Rows of one work tile; the plan chooses what is left out."""

    q: Annotated[
        Literal[64, 128, 192, 256] | None,
        Accepts("64, 128, 192 or 256", (int, NoneType)),
    ] = Field(default=None, description="Query rows per CTA.")
    kv: Annotated[
        Annotated[int, Field(ge=16, le=256, multiple_of=16)] | None,
        Accepts("a multiple of 16 from 16 to 256", (int, NoneType)),
    ] = Field(default=None, description="KV rows per pipeline stage.")


class Stages(_Model):
    """Depth of the pipelines through shared memory; the plan chooses what is left out."""

    q: Annotated[Literal[1, 2] | None, Accepts("1 or 2", (int, NoneType))] = Field(
        default=None, description="Q tiles in flight."
    )
    kv: Annotated[
        Annotated[int, Field(ge=2, le=8)] | None,
        Accepts("a whole number from 2 to 8", (int, NoneType)),
    ] = Field(
        default=None,
        description="K tiles, and as many V tiles, in flight; sm100: tiles of K or V.",
    )
    v: Annotated[
        Annotated[int, Field(ge=2, le=8)] | None,
        Accepts("a whole number from 2 to 8", (int, NoneType)),
    ] = Field(default=None, description="V tiles in flight, where not as many as K's.")


def _cluster_from_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _known_cluster(value: tuple[int, int]) -> tuple[int, int]:
    if value not in _CLUSTERS:
        raise ValueError
    return value


class Spec(_Model):
    """One kernel, as its spec file describes it."""

    model_config = ConfigDict(title="fmha-gen spec")

    arch: Annotated[Literal["sm90", "sm100"], Accepts(field="arch")] = Field(
        description="The GPU architecture it is generated for."
    )
    op: Annotated[Literal["fmha_fwd"], Accepts(field="op")] = Field(
        description="What it computes."
    )
    dtype: Annotated[Literal["bf16", "fp16"], Accepts(field="dtype")] = Field(
        description="Element type of Q, K, V and O."
    )
    head_dim: Annotated[
        HeadDim,
        Block(
            f"{_HEAD_DIM_WORDS}, or a mapping with qk and v",
            (int,),
            expand=lambda n: {"qk": n, "v": n},
            short=_HeadDim,
        ),
    ] = Field(description="Elements per head; a number is that of Q, K, V and O.")
    seqlen: Annotated[
        Seqlen,
        Block(
            "a whole number, dynamic, or a mapping with q and kv",
            (int, str),
            expand=lambda n: {"q": n, "kv": n},
            short=_Rows | _Dynamic,
        ),
    ] = Field(
        default=Seqlen(),
        description="Sequence lengths, fixed or dynamic; a single value is that of q and kv.",
    )
    heads: Annotated[
        Heads,
        Block(
            "a mapping with q_per_kv",
            hint="write heads: {q_per_kv: N}, the query heads per KV head; how many heads"
            " there are is known at run time",
        ),
    ] = Field(default=Heads(), description="How query heads share KV heads.")
    pack_gqa: Annotated[bool, Accepts("true or false", (bool,))] = Field(
        default=False,
        description="Rows of a query tile are those of all query heads of a KV head.",
    )
    mask: Annotated[Literal["none", "causal"], Accepts(field="mask")] = Field(
        default="none",
        description="Which scores count; causal is aligned at the bottom right.",
    )
    lse: Annotated[bool, Accepts("true or false", (bool,))] = Field(
        default=False,
        description="Also write each row's log-sum-exp: fp32, natural logarithm.",
    )
    cluster: Annotated[
        tuple[int, int],
        AfterValidator(_known_cluster),
        BeforeValidator(_cluster_from_list),
        Accepts("[1, 1], [2, 1] or [1, 2]", (list, tuple)),
    ] = Field(
        default=(1, 1),
        description="CTAs along [query tiles of one head, query heads of one KV head].",
        json_schema_extra={"enum": [list(cluster) for cluster in _CLUSTERS]},
    )
    multicast: Annotated[Literal["none", "k", "v", "kv"], Accepts()] = Field(
        default="none", description="Which loads the CTAs of a cluster share."
    )
    cta_group: Annotated[Literal[1, 2], Accepts()] = Field(
        default=1, description="CTAs that share one MMA."
    )
    tile: Annotated[Tile, Block("a mapping with q and kv")] = Field(
        default=Tile(), description="Rows of one work tile; planned when left out."
    )
    stages: Annotated[Stages, Block("a mapping with q and kv")] = Field(
        default=Stages(), description="Pipeline depths; planned when left out."
    )
    schedule: Annotated[Literal["persistent", "single"], Accepts(field="schedule")] = (
        Field(
            default="persistent",
            description="How CTAs get their work tiles: one after the other, or a single one.",
        )
    )

    @model_validator(mode="after")
    def _keeps_rules(self, info: ValidationInfo) -> Spec:
        """Check the rules between fields and, given a `stem` as context, those of the name."""
        stem = (info.context or {}).get("stem")
        violations = [
            *_cross_field(self),
            *(names.contradictions(stem, self) if stem else ()),
        ]
        if violations:
            text = "; ".join(violation.message for violation in violations)
            raise PydanticCustomError(
                _RULES, "{text}", {"text": text, "violations": violations}
            )
        return self

    def canonical(self) -> str:
        """Return the spec as JSON that depends on its meaning alone: sorted keys, no defaults.

        Leaving defaults out keeps it, and so the digest, when a later version adds a field.
        """
        data = self.model_dump(mode="json", exclude_defaults=True)
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """The sha256 of the canonical form, in hexadecimal."""
        return hashlib.sha256(self.canonical().encode("ascii")).hexdigest()


@dataclass(frozen=True)
class SpecFile:
    """A valid spec and where it came from.

    `locations` gives the place of each value by field path, `locations[()]` the start of the file;
    fields that take their defaults are not in it.
    """

    path: str
    stem: str
    text: str
    spec: Spec
    locations: Mapping[FieldPath, Location]

    @property
    def digest(self) -> str:
        """The spec's digest, which comments and the order of keys do not change."""
        return self.spec.digest

    def locate(self, *field: str) -> Location:
        """Return the place of a value, as `locate("tile", "kv")`, else of what would hold it."""
        return _nearest(self.locations, field)


def load_specs(paths: Sequence[str | Path]) -> list[SpecFile]:
    """Return the specs in `paths` (files, or folders of them), sorted by stem.

    Raises `SpecError` with the diagnostics of all files if any spec is bad.
    """
    specs, diagnostics = load_all(paths)
    if diagnostics:
        raise SpecError(diagnostics)
    return specs


def load_all(
    paths: Sequence[str | Path],
) -> tuple[list[SpecFile], list[Diagnostic]]:
    """Return the good specs in `paths`, sorted by stem, and what is wrong with the others.

    For callers that have more to say about the good ones before they stop.
    """
    files, diagnostics = specfile.find(paths)
    diagnostics += _clashes(files)
    specs = []
    for file in files:
        try:
            specs.append(_load(file))
        except SpecError as error:
            diagnostics += error.diagnostics
    return sorted(specs, key=lambda spec: spec.stem), diagnostics


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a spec file, for editors."""
    body = Spec.model_json_schema(schema_generator=_SchemaGenerator)
    defaults = {
        name: field.default
        for name, field in Spec.model_fields.items()
        if not field.is_required()
    }
    return {
        "$schema": _SchemaGenerator.schema_dialect,
        "$id": across_fields.ID,
        **body,
        "allOf": across_fields.rules(defaults),
    }


class _SchemaGenerator(GenerateJsonSchema):
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


def loads(file: Path, text: str) -> SpecFile:
    """Return the spec that `file` would hold with this text; raises SpecError as `load_specs`."""
    stem = file.stem
    named = _name_diagnostics(file)
    try:
        document = specfile.parse(str(file), text)
    except SpecError as error:
        raise SpecError([*named, *error.diagnostics]) from None
    diagnostics = [*named, *document.diagnostics]
    try:
        context = {} if named else {"stem": stem}
        spec = Spec.model_validate(document.data, context=context)
    except ValidationError as error:
        for details in error.errors(include_url=False, include_input=False):
            diagnostics += _diagnose(details, document)
    if diagnostics:
        raise SpecError(diagnostics)
    return SpecFile(document.path, stem, document.text, spec, document.values)


def _load(file: Path) -> SpecFile:
    try:
        text = specfile.read(file)
    except SpecError as error:
        named = _name_diagnostics(file) if file.exists() else []
        raise SpecError([*named, *error.diagnostics]) from None
    return loads(file, text)


def _name_diagnostics(file: Path) -> list[Diagnostic]:
    """Return what keeps the file's name from naming a kernel."""
    violations = names.stem_violations(file.stem)
    if file.suffix != specfile.SUFFIX:
        message = f"a spec file's name ends in {specfile.SUFFIX}, not in {quoted(file.suffix)}"
        hint = f"rename it {file.stem.lower()}{specfile.SUFFIX}"
        violations.append(Violation("FG304", (), message, hint))
    return [_placed(violation, {(): Location(str(file))}) for violation in violations]


def _clashes(files: Iterable[Path]) -> list[Diagnostic]:
    by_stem: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        by_stem[file.stem].append(file)
    return [
        Diagnostic(
            Location(str(later)),
            "FG302",
            f"the name {quoted(stem)} is taken by {first}",
            "a kernel is named after its spec file, so rename one of them",
        )
        for stem, (first, *others) in by_stem.items()
        for later in others
    ]


def _refused_by_architecture(spec: Spec) -> Iterator[Violation]:
    architecture = ARCHITECTURES[spec.arch]
    whose: str = spec.arch
    takes = architecture.takes
    if spec.cta_group == 2 and architecture.takes_of_pairs:
        whose = f"{spec.arch} with cta_group: 2"
        takes = {**takes, **architecture.takes_of_pairs}
    for name, taken in takes.items():
        field = tuple(name.split("."))
        value: Any = spec
        for part in field:
            value = getattr(value, part)
        if isinstance(value, HeadDim):
            value = (value.qk, value.v)
        if value in taken:
            continue
        words = [_in_yaml(name, each) for each in taken if each is not None]
        ways = [f"set {name}: {_either(words)}"] if words else []
        ways += ["leave it out"] if None in taken else []
        if spec.cta_group == 1 and value in architecture.takes_of_pairs.get(name, ()):
            ways.append("take cta_group: 2 with cluster: [2, 1]")
        message = f"{name}: {_in_yaml(name, value)} is not generated for {whose}"
        yield Violation("FG205", field, message, ", or ".join(ways))


def _in_yaml(name: str, value: Any) -> str:
    """A value as a spec has it; a head_dim is (qk, v)."""
    if name == "head_dim":
        qk, v = value
        return str(qk) if qk == v else f"{{qk: {qk}, v: {v}}}"
    if isinstance(value, tuple):
        return str(list(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cross_field(spec: Spec) -> Iterator[Violation]:
    yield from _refused_by_architecture(spec)
    along_heads = spec.cluster[1]
    if spec.multicast != "none" and spec.cluster == (1, 1):
        yield Violation(
            "FG201",
            ("multicast",),
            f"multicast: {spec.multicast} needs a cluster of two CTAs, but cluster is [1, 1]",
            "set cluster: [2, 1] or [1, 2], or multicast: none",
        )
    if spec.heads.q_per_kv % along_heads:
        yield Violation(
            "FG202",
            ("cluster",),
            f"cluster: {list(spec.cluster)} puts {along_heads} query heads of one KV head in a"
            f" cluster, but heads.q_per_kv is {spec.heads.q_per_kv}, not a multiple of"
            f" {along_heads}",
            "set cluster: [2, 1] or [1, 1], or an even heads.q_per_kv",
        )
    if spec.pack_gqa and spec.heads.q_per_kv == 1:
        yield Violation(
            "FG203",
            ("pack_gqa",),
            "pack_gqa: true needs several query heads per KV head, but heads.q_per_kv is 1",
            "set heads: {q_per_kv: N}, or leave pack_gqa out",
        )
    if spec.pack_gqa and along_heads > 1:
        yield Violation(
            "FG204",
            ("cluster",),
            f"cluster: {list(spec.cluster)} gives each CTA a query head of its own, but"
            f" pack_gqa: true puts all {spec.heads.q_per_kv} of a KV head into one CTA",
            "set cluster: [2, 1] or [1, 1], or leave pack_gqa out",
        )


def _diagnose(details: ErrorDetails, document: Document) -> Iterator[Diagnostic]:
    """Yield what one of Pydantic's errors means for the file."""
    kind, context = details["type"], details.get("ctx", {})
    path = tuple(str(part) for part in details["loc"])
    place = _nearest(document.values, path)
    if kind == _RULES:
        for violation in context["violations"]:
            yield _placed(violation, document.values)
    elif kind == "missing":
        hint = f"accepted: {_accepted(path)}"
        yield Diagnostic(place, "FG102", f"the key {'.'.join(path)} is missing", hint)
    elif kind == "extra_forbidden":
        *parents, key = path
        known = sorted(_fields(parents))
        inside = f" in {'.'.join(parents)}" if parents else ""
        meant = vocabulary.of_key(key) or _did_you_mean(key, known)
        end = "" if meant.endswith("?") else ";"
        hints = [f"{meant}{end}" if meant else "", f"accepted: {', '.join(known)}"]
        yield Diagnostic(
            document.keys[path],
            "FG101",
            f"unknown key {quoted(key)}{inside}",
            " ".join(hint for hint in hints if hint),
        )
    elif not any(_related(path, refused) for refused in document.refused):
        # A short form has one value for several fields: name the field that is written.
        field = ".".join(_longest(document.values, path))
        yield Diagnostic(place, kind, f"{field}: {context['message']}", context["hint"])


def _placed(violation: Violation, places: Mapping[FieldPath, Location]) -> Diagnostic:
    code, field, message, hint = violation
    return Diagnostic(_nearest(places, field), code, message, hint)


def _nearest(places: Mapping[FieldPath, Location], field: FieldPath) -> Location:
    return places[_longest(places, field)]


def _longest(places: Mapping[FieldPath, Location], field: FieldPath) -> FieldPath:
    """Return the longest beginning of `field` that is in `places`, which holds ()."""
    return next(field[:n] for n in range(len(field), -1, -1) if field[:n] in places)


def _related(a: FieldPath, b: FieldPath) -> bool:
    shorter = min(len(a), len(b))
    return a[:shorter] == b[:shorter]


def _fields(parents: Sequence[str]) -> Mapping[str, FieldInfo]:
    """Return the fields of the model at a field path."""
    model: type[BaseModel] = Spec
    for name in parents:
        model = cast(type[BaseModel], model.model_fields[name].annotation)
    return model.model_fields


def _accepted(path: FieldPath) -> str:
    field = _fields(path[:-1])[path[-1]]
    accepts = next(item for item in field.metadata if isinstance(item, Accepts))
    return accepts.in_words(field.annotation)


def _did_you_mean(value: object, words: Sequence[str]) -> str:
    if not isinstance(value, str):
        return ""
    close = difflib.get_close_matches(value, words, n=1, cutoff=_CLOSE)
    hints = [f"did you mean {close[0]}?"] if close else []
    return "; ".join([*filter(None, [vocabulary.foreign_letter(value)]), *hints])


def _unquote_hint(value: object, types: tuple[type, ...]) -> str:
    is_number = isinstance(value, str) and value.isascii() and value.isdigit()
    return "write it without quotes" if is_number and int in types else ""


def _refusal(code: str, accepted: str, value: object, hint: str) -> PydanticCustomError:
    return _custom(code, f"expected {accepted}, got {shown(value)}", hint)


def _custom(code: str, message: str, hint: str = "") -> PydanticCustomError:
    # A code as the error's type is how `_diagnose` tells our errors from Pydantic's.
    return PydanticCustomError(
        cast(Any, code), "{message}", {"message": message, "hint": hint}
    )
