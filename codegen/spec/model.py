# SPDX-License-Identifier: Apache-2.0
"""The fields of a spec, their rules, and how specs are loaded.

The model takes only what is generated today. Its validators raise with this package's codes, so
that a diagnostic's text is ours and does not follow Pydantic's releases.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from ..errors import Diagnostic, Location, SpecError, Violation, quoted
from ..features import FEATURES, vocabulary
from ..features.backward import Deterministic, DqSums
from ..features.bias import Addend, Bias
from ..features.blocks import Blocks
from ..features.chunk import Chunk, spelt_out
from ..features.cluster import Cluster, CtaGroup, Multicast
from ..features.documents import Documents
from ..features.e4m3 import Descale, Exp, OutDtype, VLayout, with_output
from ..features.feature import Model, accepts_of, did_you_mean
from ..features.gqa import Group, Heads, PackGqa
from ..features.lse import Lse
from ..features.mask import Mask
from ..features.paged import Cache, Kv
from ..features.params import Params
from ..features.prefix import Prefix
from ..features.problem import Arch, Dtype, HeadDim, Lengths, Op, Seqlen
from ..features.score import Alibi, Score, in_words
from ..features.sink import Sink
from ..features.softcap import Softcap
from ..features.tiling import Depths, Schedule, Stages, Tile, TileRows
from ..features.varlen import Batch
from ..features.window import Sides, Window
from . import names, specfile
from .specfile import Document, FieldPath

_RULES: Final = "rules"  # type of the one Pydantic error that carries every broken rule


class Spec(Model):
    """One kernel, as its spec file describes it: the fields of all features."""

    model_config = ConfigDict(title="fmha-gen spec")

    arch: Arch
    op: Op
    dtype: Dtype
    out_dtype: OutDtype = "none"
    head_dim: HeadDim
    seqlen: Seqlen = Lengths()
    batch: Batch = "dense"
    kv: Kv = Cache()
    v_layout: VLayout = "rows"
    descale: Descale = "none"
    exp: Exp = "exact"
    heads: Heads = Group()
    pack_gqa: PackGqa = False
    softcap: Softcap = "none"
    bias: Bias = Addend()
    params: Params = Field(default_factory=dict)
    mask: Mask = "none"
    chunk: Chunk = "none"
    window: Window = Sides()
    blocks: Blocks = "derived"
    documents: Documents = False
    prefix: Prefix = False
    lse: Lse = False
    sink: Sink = False
    score: Score = "none"
    alibi: Alibi = False
    deterministic: Deterministic = False
    dq_sums: DqSums = "fp32"
    cluster: Cluster = (1, 1)
    multicast: Multicast = "none"
    cta_group: CtaGroup = 1
    tile: Tile = TileRows()
    stages: Stages = Depths()
    schedule: Schedule = "persistent"

    @model_validator(mode="before")
    @classmethod
    def _says_it_in_words(cls, data: Any) -> Any:
        """Fields that say the same become one, and specs that mean the same have one digest."""
        return (
            in_words(spelt_out(with_output(data))) if isinstance(data, dict) else data
        )

    @model_validator(mode="after")
    def _keeps_rules(self, info: ValidationInfo) -> Spec:
        """Check the rules between fields and, given a `stem` as context, those of the name."""
        stem = (info.context or {}).get("stem")
        violations = [
            violation
            for feature in FEATURES
            for relation in feature.relations
            for violation in relation.broken_by(self, feature.path)
        ]
        violations += [each for feature in FEATURES for each in feature.refusals(self)]
        violations += names.contradictions(stem, self) if stem else ()
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

    @property
    def notes(self) -> tuple[str, ...]:
        """What is generated as the file says, and costs what one may not expect, in words."""
        found = (each for feature in FEATURES for each in feature.notes(self.spec))
        return tuple(_placed(each, self.locations).render("note") for each in found)

    def refusal(
        self, code: str, field: FieldPath, message: str, hint: str
    ) -> SpecError:
        """Return the error at a field that the plan cannot make fit."""
        return SpecError([Diagnostic(self.locate(*field), code, message, hint)])


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
        meant = _answer(key) or did_you_mean(key, known)
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
        given = _longest(document.values, path)
        if "column" in context:
            place = document.inside(given, context["column"])
        message = f"{'.'.join(given)}: {context['message']}"
        yield Diagnostic(place, kind, message, context["hint"])


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
    return accepts_of(field).in_words(field.annotation)


def _answer(key: str) -> str:
    """Return what to say of a key that other tools have; "" when it is none."""
    words = {word: said for each in FEATURES for word, said in each.keys.items()}
    return vocabulary.answer({**words, **vocabulary.KEYS}, key)
