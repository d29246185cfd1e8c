# SPDX-License-Identifier: Apache-2.0
"""Spec files to plain data, with the place of every key and value.

YAML is taken as a notation for mappings, lists and four kinds of scalar. Whatever makes one text
mean two things to two readers (anchors, tags, `yes` as a boolean, octal numbers, ...) is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    ScalarEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.reader import Reader

from ..errors import Diagnostic, Location, SpecError, quoted

SUFFIX: Final = ".yaml"
MAX_BYTES: Final = 65536  # some hundred times the longest sensible spec
MAX_DEPTH: Final = 16  # collections inside each other; a spec needs two
MAX_DIGITS: Final = 18  # a number of this length still fits 64 bits

FieldPath = tuple[str, ...]
"""Where a value stands: ("tile", "kv"); items of lists count as "0", "1", ..."""


class _Invalid:
    """Stands in the data for a value that already has its diagnostic."""

    def __repr__(self) -> str:
        return "INVALID"


INVALID: Final = _Invalid()

_TAG = "tag:yaml.org,2002:"
_REFUSED_TAG = "!refused"  # marks a node that already has its diagnostic
_LINE_BREAK = re.compile(r"\r\n|\r|\n")
# YAML 1.1 also breaks lines at these, editors do not: a line number would have two meanings.
_MISLEADING = re.compile("[\x85\u2028\u2029]")
_OP = re.compile(rb"^op:", re.MULTILINE)
_PLAIN_INT = re.compile(r"-?(?:0|[1-9][0-9]*)")
_PLAIN_FLOAT = re.compile(r"[-+]?[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?")


@dataclass(frozen=True)
class Document:
    """A file's text as plain data.

    `keys` and `values` give the place of each key and value by field path; `values[()]` is the
    start of the file. A value that has its diagnostic already is `INVALID` in `data`, and its path
    is in `refused`.
    """

    path: str
    text: str
    data: Mapping[str, object]
    keys: Mapping[FieldPath, Location]
    values: Mapping[FieldPath, Location]
    refused: frozenset[FieldPath]
    diagnostics: tuple[Diagnostic, ...]

    def inside(self, path: FieldPath, column: int) -> Location:
        """Return the place of a character, from 0, of a text; of the text where YAML folds it."""
        place, value = self.values[path], self._text(path)
        line = self.text.splitlines()[place.line - 1][place.column - 1 :]
        for quote in ("'", '"', ""):
            if line.startswith(quote + value):
                return replace(place, column=place.column + len(quote) + column)
        return place

    def _text(self, path: FieldPath) -> str:
        found: Any = self.data
        for key in path:
            found = found[key]
        return str(found)


def find(paths: Iterable[str | Path]) -> tuple[list[Path], list[Diagnostic]]:
    """Return the spec files that `paths` (files and folders) name, sorted, each once.

    A folder stands for the YAML files directly in it, hidden ones left out. Specs in a folder
    inside it are refused, unless that is named as well: they would be passed over in silence.
    """
    given = {Path(path) for path in paths}
    found: dict[tuple[Path, str], Path] = {}
    diagnostics = []
    for path in sorted(given, key=str):
        try:
            files = [path]
            if path.is_dir():
                files = _in_folder(path)
                diagnostics += _passed_over(path, given)
            for file in files:
                found.setdefault((file.parent.resolve(), file.name), file)
        except (OSError, ValueError) as error:
            diagnostics.append(_unreadable(path, error))
            continue
        if not files:
            message = f"no {SUFFIX} file in this folder"
            diagnostics.append(Diagnostic(Location(str(path)), "FG002", message))
    return sorted(found.values(), key=str), diagnostics


def read(path: Path) -> str:
    """Return the text of a file, or raise `SpecError` when no spec can be in it."""
    return decode(str(path), _read(path))


def decode(path: str, raw: bytes) -> str:
    """Return the text of a file, or raise `SpecError` for bytes and characters that no spec has."""
    if len(raw) > MAX_BYTES:
        raise _fatal(
            Location(path), "FG003", f"longer than {MAX_BYTES} bytes, so not a spec"
        )
    if raw.startswith(b"\xef\xbb\xbf"):
        message = "the file starts with a byte order mark"
        raise _fatal(Location(path), "FG005", message, "save it as UTF-8 without one")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = _place(path, raw[: error.start].decode("utf-8"))
        message = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        raise _fatal(place, "FG004", message, "save the file as UTF-8") from None
    diagnostics = [
        Diagnostic(
            _place(path, text[: match.start()]),
            "FG006",
            f"character U+{ord(match.group()):04X} has no place in a spec",
        )
        for pattern in (Reader.NON_PRINTABLE, _MISLEADING)
        if (match := pattern.search(text))
    ]
    if (tab := text.find("\t")) >= 0:
        place = _place(path, text[:tab])
        diagnostics.append(
            Diagnostic(place, "FG007", "a tab", "use spaces, in the whole file")
        )
    if diagnostics:
        raise SpecError(diagnostics)
    return text


def parse(path: str, text: str) -> Document:
    """Return the data in `text`, as `decode` returned it; `path` is only named in places.

    Raises `SpecError` if no mapping can be had from it. Everything else that is wrong is collected
    in the document's diagnostics, so that the fields can be judged in the same run.
    """
    loader = _Loader(path, text)
    try:
        root = loader.document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark or loader.get_mark()
        why = f"{error.context}: {error.problem}" if error.context else error.problem
        raise loader.fatal(
            loader.place(mark), "FG008", f"not valid YAML, {why}"
        ) from None
    except (ValueError, OverflowError):
        # PyYAML converts the numbers in escapes and directives unchecked.
        message = "not valid YAML, a number in an escape or directive is out of range"
        raise loader.fatal(loader.place(loader.get_mark()), "FG008", message) from None
    finally:
        loader.dispose()
    builder = _Builder(path, loader.diagnostics)
    data = builder.mapping(root, ())
    return Document(
        path=path,
        text=text,
        data=data,
        keys=builder.keys,
        values={(): Location(path), **builder.values},
        refused=frozenset(builder.refused),
        diagnostics=tuple(builder.diagnostics),
    )


def _in_folder(folder: Path) -> list[Path]:
    # `.yml` is listed, so that a spec with that suffix is refused and not passed over in silence.
    return sorted(
        entry
        for entry in folder.iterdir()
        if entry.suffix.lower() in (SUFFIX, ".yml") and not entry.name.startswith(".")
    )


def _passed_over(folder: Path, paths: Iterable[Path]) -> list[Diagnostic]:
    """What is to be said of folders in one that hold specs and are not among the paths."""
    named = {path.resolve() for path in paths}
    return [
        Diagnostic(
            Location(str(entry)),
            "FG026",
            "a folder with specs inside a folder of specs is not looked into",
            f"name it as well: {folder} {entry}",
        )
        for entry in sorted(folder.iterdir())
        if entry.is_dir()
        and not entry.name.startswith(".")
        and entry.resolve() not in named
        and any(map(_looks_like_a_spec, _in_folder(entry)))
    ]


def _looks_like_a_spec(file: Path) -> bool:
    """Whether a YAML file is meant for us; there are many others."""
    try:
        return file.is_file() and _OP.search(file.read_bytes()[:MAX_BYTES]) is not None
    except OSError:
        return False


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise _fatal(
                Location(str(path)), "FG001", "cannot be read: not a regular file"
            )
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise SpecError([_unreadable(path, error)]) from None


def _unreadable(path: Path, error: OSError | ValueError) -> Diagnostic:
    reason = (
        error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    )
    hint = ""
    if isinstance(error, FileNotFoundError) and not path.is_symlink():
        hint = (
            "fmha-gen kernels lists packaged kernels, whose names stand for their specs"
        )
    return Diagnostic(Location(str(path)), "FG001", f"cannot be read: {reason}", hint)


def _place(path: str, before: str) -> Location:
    """Return the place that follows the text `before`."""
    lines = _LINE_BREAK.split(before)
    return Location(path, len(lines), len(lines[-1]) + 1)


def _fatal(location: Location, code: str, message: str, hint: str = "") -> SpecError:
    return SpecError([Diagnostic(location, code, message, hint)])


def _mark(event: Event) -> yaml.Mark:
    mark = event.start_mark
    assert isinstance(mark, yaml.Mark)  # the other kind is libyaml's
    return mark


class _Loader(yaml.SafeLoader):
    """Composes one document, and notes what specs do without before PyYAML acts on it."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(text)
        self.diagnostics: list[Diagnostic] = []
        self._path = path
        self._depth = 0

    def place(self, mark: yaml.Mark) -> Location:
        """Return the place of one of PyYAML's marks, which count from 0."""
        return Location(self._path, mark.line + 1, mark.column + 1)

    def at(self, event: Event) -> Location:
        """Return the place at which an event starts."""
        return self.place(_mark(event))

    def fatal(
        self, location: Location, code: str, message: str, hint: str = ""
    ) -> SpecError:
        """Return the error that ends the parse, with everything noted before it."""
        return SpecError([*self.diagnostics, Diagnostic(location, code, message, hint)])

    def document(self) -> MappingNode:
        """Return the root of the only document, a mapping; `SpecError` for anything else."""
        self._next()  # the start of the stream
        if self.check_event(StreamEndEvent):
            raise self._empty()
        start = self._peek()
        assert isinstance(start, DocumentStartEvent)
        if start.version or start.tags:
            self._note(
                start, "FG017", "YAML directives are not taken", "delete the line"
            )
        root = self.compose_document()
        assert root is not None
        if not self.check_event(StreamEndEvent):
            place = self.at(self._peek())
            message = "a second YAML document starts here"
            raise self.fatal(place, "FG010", message, "one file holds one spec")
        if (
            isinstance(root, ScalarNode)
            and root.value == ""
            and root.tag == f"{_TAG}null"
        ):
            raise self._empty()
        if not isinstance(root, MappingNode) or root.tag == _REFUSED_TAG:
            if self.diagnostics:
                raise SpecError(self.diagnostics)
            kind = "a list" if isinstance(root, SequenceNode) else "a single value"
            message = f"a spec is a mapping of keys to values, not {kind}"
            raise self.fatal(self.place(root.start_mark), "FG011", message)
        return root

    def compose_node(self, parent: Node | None, index: int) -> Node:
        """Compose one node, as PyYAML does, unless it is an alias."""
        event = self._peek()
        if isinstance(event, AliasEvent):
            self._next()
            message = f"the alias {quoted('*' + str(event.anchor))} is not taken"
            self._note(event, "FG014", message, "write the value out")
            return ScalarNode(_REFUSED_TAG, "", _mark(event))
        assert isinstance(event, (ScalarEvent, SequenceStartEvent, MappingStartEvent))
        if event.anchor is not None:
            message = f"the anchor {quoted('&' + event.anchor)} is not taken"
            self._note(
                event, "FG013", message, "delete it, and write repeated values out"
            )
            event.anchor = None  # else PyYAML stops at the second one of that name
        tagged = event.tag is not None
        if tagged:
            message = (
                f"the tag {quoted(str(event.tag).replace(_TAG, '!!'))} is not taken"
            )
            self._note(event, "FG016", message, "delete it: the field decides the type")
        self._depth += 1
        if self._depth > MAX_DEPTH and not isinstance(event, ScalarEvent):
            message = f"nested more than {MAX_DEPTH} deep"
            raise self.fatal(self.at(event), "FG012", message)
        node = super().compose_node(parent, index)
        assert node is not None
        self._depth -= 1
        if tagged:
            node.tag = _REFUSED_TAG
        return node

    def _peek(self) -> Event:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        assert isinstance(event, Event)
        return event

    def _next(self) -> None:
        self.get_event()  # type: ignore[no-untyped-call]

    def _note(self, event: Event, code: str, message: str, hint: str) -> None:
        self.diagnostics.append(Diagnostic(self.at(event), code, message, hint))

    def _empty(self) -> SpecError:
        hint = "a spec needs arch, op, dtype and head_dim"
        return self.fatal(Location(self._path), "FG009", "the file is empty", hint)


class _Builder:
    """Turns nodes into data, notes places, and adds a diagnostic for each node it refuses."""

    def __init__(self, path: str, diagnostics: Sequence[Diagnostic]) -> None:
        self.keys: dict[FieldPath, Location] = {}
        self.values: dict[FieldPath, Location] = {}
        self.refused: set[FieldPath] = set()
        self.diagnostics = list(diagnostics)
        self._path = path

    def mapping(self, node: MappingNode, path: FieldPath) -> dict[str, object]:
        """Return the mapping's data without refused keys; of two equal keys the first stays."""
        data: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            if key is None:
                continue
            inner = (*path, key)
            if key in data:
                message = f"the key {quoted(key)} is given twice"
                hint = f"it was first given in line {self.keys[inner].line}"
                self._note(key_node, "FG018", message, hint)
                continue
            self.keys[inner] = self._location(key_node)
            data[key] = self._value(value_node, inner)
        return data

    def _key(self, node: Node) -> str | None:
        if node.tag == f"{_TAG}merge":
            self._note(
                node, "FG015", "the merge key << is not taken", "write the keys out"
            )
        elif node.tag == _REFUSED_TAG:
            pass
        elif node.tag != f"{_TAG}str":
            what = (
                quoted(node.value) if isinstance(node, ScalarNode) else "a collection"
            )
            self._note(node, "FG019", f"{what} is not text, so it cannot be a key")
        elif self._is_clean(node):
            return str(node.value)
        return None

    def _value(self, node: Node, path: FieldPath) -> object:
        self.values[path] = self._location(node)
        if node.tag == _REFUSED_TAG:
            value: object = INVALID
        elif isinstance(node, MappingNode):
            value = self.mapping(node, path)
        elif isinstance(node, SequenceNode):
            value = [
                self._value(item, (*path, str(i))) for i, item in enumerate(node.value)
            ]
        else:
            value = self._scalar(node)
        if value is INVALID:
            self.refused.add(path)
        return value

    def _scalar(self, node: Node) -> object:
        text = str(node.value)
        kind = node.tag.removeprefix(_TAG)
        if kind == "str":
            return text if self._is_clean(node) else INVALID
        if kind == "bool":
            return self._bool(node, text)
        if kind == "int":
            return self._int(node, text)
        if kind == "float":
            return self._float(node, text)
        if kind == "null":
            hint = "give a value, or leave the key out to take its default"
            return self._refuse(node, "FG020", "a value is missing", hint)
        what = "a date" if kind == "timestamp" else "a special value"
        hint = "put it in quotes if it is meant as text"
        return self._refuse(node, "FG025", f"YAML reads {quoted(text)} as {what}", hint)

    def _bool(self, node: Node, text: str) -> object:
        if text in ("true", "false"):
            return text == "true"
        meaning = "true" if text.lower() in ("yes", "on", "true") else "false"
        hint = f"write {meaning}, or put the word in quotes if it is meant as text"
        return self._refuse(
            node, "FG021", f"YAML reads {quoted(text)} as a truth value", hint
        )

    def _int(self, node: Node, text: str) -> object:
        if (
            len(text) > MAX_DIGITS
        ):  # before any conversion: Python refuses to convert long ones
            message = f"a number of more than {MAX_DIGITS} digits"
            return self._refuse(node, "FG023", message, "")
        if _PLAIN_INT.fullmatch(text):
            return int(text)
        hint = (
            "write it in decimal, without a sign, leading zeros, underscores or colons"
        )
        message = f"{quoted(text)} is not a plain decimal number, YAML has a reading of its own"
        return self._refuse(node, "FG022", message, hint)

    def _float(self, node: Node, text: str) -> object:
        if _PLAIN_FLOAT.fullmatch(text) and math.isfinite(value := float(text)):
            return value
        message = f"{quoted(text)} is not a plain, finite decimal fraction"
        return self._refuse(node, "FG024", message, "")

    def _is_clean(self, node: Node) -> bool:
        """Note characters that only an escape in quotes can bring in."""
        match = Reader.NON_PRINTABLE.search(node.value)
        if match:
            message = f"character U+{ord(match.group()):04X} has no place in a spec"
            self._note(node, "FG006", message)
        return match is None

    def _refuse(self, node: Node, code: str, message: str, hint: str) -> _Invalid:
        self._note(node, code, message, hint)
        return INVALID

    def _note(self, node: Node, code: str, message: str, hint: str = "") -> None:
        self.diagnostics.append(Diagnostic(self._location(node), code, message, hint))

    def _location(self, node: Node) -> Location:
        return Location(
            self._path, node.start_mark.line + 1, node.start_mark.column + 1
        )
