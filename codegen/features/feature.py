# SPDX-License-Identifier: Apache-2.0
"""The parts of a feature: the type of its field, its relations, its words and its flags."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from ..errors import Violation, shown
from . import vocabulary
from .vocabulary import Words

if TYPE_CHECKING:
    from ..spec.model import Spec

_CLOSE: Final = 0.7  # difflib's ratio from which a word counts as misspelt


class Model(BaseModel):
    """A mapping of a spec file."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    def said(self) -> Any:
        """Return what a file would say, a short form if there is one."""
        return self.model_dump(mode="json")


@dataclass(frozen=True)
class Accepts:
    """Annotation: all that the annotated type refuses is one diagnostic that says what is accepted.

    `meaning` is that of the field. `text` says what is accepted and `types` are the exact types a
    value can have; for a `Literal` both follow from it. The types are compared here because
    Pydantic takes `True` for `Literal[1]`. `words` are answers to values that other tools take.
    """

    meaning: str
    text: str = ""
    types: tuple[type, ...] = ()
    words: Words = field(default_factory=dict)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        choices = choices_of(source)
        names = [choice for choice in choices if isinstance(choice, str)]
        text = self.in_words(source)
        types = self.types or tuple({type(choice) for choice in choices})

        def check(value: Any, inner: core_schema.ValidatorFunctionWrapHandler) -> Any:
            if type(value) not in types:
                raise refusal("FG103", text, value, _unquote_hint(value, types))
            try:
                return inner(value)
            except ValidationError:
                hint = (
                    vocabulary.answer(self.words, value)
                    or did_you_mean(value, names)
                    or _unquote_hint(value, types)
                )
                raise refusal("FG104", text, value, hint) from None

        return core_schema.no_info_wrap_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(schema), "description": self.meaning}

    def in_words(self, source: Any) -> str:
        """Return what a field of type `source` accepts, for a message."""
        return self.text or either(map(in_yaml, choices_of(source)))


@dataclass(frozen=True)
class Block(Accepts):
    """Annotation of a nested model: takes a mapping, or a value that `expand` turns into one.

    The fields inside report for themselves. `types` are the exact types of such a value, `short`
    is its type as the JSON Schema states it, `hint` is for any other value.
    """

    expand: Callable[[Any], dict[str, Any]] | None = None
    short: Any = None
    hint: str = ""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        def check(value: Any) -> Any:
            if isinstance(value, (dict, source)):
                return value
            if self.expand is None or type(value) not in self.types:
                hint = self.hint or _unquote_hint(value, self.types)
                raise refusal("FG103", self.text, value, hint)
            return self.expand(value)

        model = handler(source)
        if self.short is None:
            return core_schema.no_info_before_validator_function(check, model)
        forms = core_schema.union_schema([handler.generate_schema(self.short), model])
        return core_schema.no_info_before_validator_function(
            check, model, json_schema_input_schema=forms
        )


@dataclass(frozen=True)
class Relation:
    """Beside these values of other fields, a field takes some of its own only.

    A value that excludes or needs another one is left out of `takes` beside it. All are as a file
    says them; None stands for a field that is left out. `reason` follows the value in a message,
    before those that it stands beside.
    """

    takes: Sequence[Any]
    beside: Mapping[str, Sequence[Any]]
    code: str = "FG205"
    reason: str = ""
    hint: str = ""

    def broken_by(self, spec: Spec, path: str) -> Iterator[Violation]:
        """Yield what to say where the field at `path` breaks it, with the values of the others."""
        value = said(spec, path)
        others = {name: said(spec, name) for name in self.beside}
        holds = all(other in self.beside[name] for name, other in others.items())
        if not holds or value in self.takes:
            return
        verb, link, opening, joint = " is", self.reason, ", but ", " and "
        if not link:
            verb, link, opening, joint = ":", "is not generated", " for ", " with "
        stated = joint.join(f"{name}{verb} {in_yaml(v)}" for name, v in others.items())
        message = f"{path}: {in_yaml(value)} {link}{opening}{stated}"
        words = [in_yaml(each) for each in self.takes if each is not None]
        ways = [f"set {path}: {either(words)}"] if words else []
        ways += ["leave it out"] if None in self.takes else []
        hint = self.hint or ", or ".join(ways)
        yield Violation(self.code, tuple(path.split(".")), message, hint)


@dataclass(frozen=True)
class Feature:
    """All that is said of a field of the spec, such as `tile.kv`, beside its type.

    tokens: by pattern of a name's words that speak about it, those that are true, the one to
    suggest first; "" suggests none. keys: what other tools call it, and the answer to that.
    refusals: what is wrong with its numbers beside others', which is no relation of values. notes:
    what is generated and costs what one may not expect. flags: what templates test. title: its part
    of a kernel's title. contract: a line of the kernel's docstring. The last two are empty where
    the spec does not have it.
    """

    path: str
    tokens: Mapping[str, Callable[[Spec], Sequence[str]]] = field(default_factory=dict)
    keys: Words = field(default_factory=dict)
    relations: Sequence[Relation] = ()
    refusals: Callable[[Spec], Iterable[Violation]] = lambda spec: ()
    notes: Callable[[Spec], Iterable[Violation]] = lambda spec: ()
    flags: Callable[[Spec], Mapping[str, Any]] = lambda spec: {}
    title: Callable[[Spec], str] = lambda spec: ""
    contract: Callable[[Spec], str] = lambda spec: ""


def said(spec: Model, path: str) -> Any:
    """Return a field's value as a file says it; `path` such as `tile.kv`."""
    found: Any = spec
    for name in path.split("."):
        found = getattr(found, name)
    if isinstance(found, Model):
        return found.said()
    return list(found) if isinstance(found, tuple) else found


def accepts_of(field: FieldInfo) -> Accepts:
    """Return what a field of a model accepts."""
    return next(each for each in field.metadata if isinstance(each, Accepts))


def in_yaml(value: object) -> str:
    """Return a value in YAML's spelling."""
    if isinstance(value, dict):
        items = [f"{key}: {in_yaml(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(in_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def choices_of(source: Any) -> list[object]:
    """Return the values of a truth value, or those that the `Literal`s in a type name."""
    if source is bool:
        return [True, False]
    if get_origin(source) is Literal:
        return list(get_args(source))
    return [choice for part in get_args(source) for choice in choices_of(part)]


def either(words: Iterable[str]) -> str:
    """Return "a", "a or b", "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def did_you_mean(value: object, words: Sequence[str]) -> str:
    """Return a hint at a letter that is not ASCII, or at the word that is spelt alike; or ""."""
    if not isinstance(value, str):
        return ""
    close = difflib.get_close_matches(value, words, n=1, cutoff=_CLOSE)
    hints = [f"did you mean {close[0]}?"] if close else []
    return "; ".join([*filter(None, [vocabulary.foreign_letter(value)]), *hints])


def _unquote_hint(value: object, types: tuple[type, ...]) -> str:
    is_number = isinstance(value, str) and value.isascii() and value.isdigit()
    return "write it without quotes" if is_number and int in types else ""


def refusal(code: str, accepted: str, value: object, hint: str) -> PydanticCustomError:
    """Return the error at a value of a field that accepts something else."""
    # A code as the error's type is how `spec` tells our errors from Pydantic's.
    message = f"expected {accepted}, got {shown(value)}"
    return PydanticCustomError(
        cast(Any, code), "{message}", {"message": message, "hint": hint}
    )
