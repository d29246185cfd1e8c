#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Says of copies of kernels, wherever they lie, whether they are still what fmha-gen wrote.

    python verify.py PATH... [--against DIR] [--json] [--or-none]

This one file is enough: it needs Python and its standard library. What a copy is held against is
the `VENDOR.lock` in its folder, which `fmha-gen vendor` wrote. Without a lock the digest in the
file's own header still tells whether it was touched, but not where. `--against` a checkout of
fmha-gen, or a folder of kernels, also says which copies are out of date.

Neither lock nor header is a signature: who edits a copy can forge both.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import functools
import gc
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

LOCK = "VENDOR.lock"
SPEC_DIGITS = 12  # of the spec's digest: enough to tell, short enough for one line

State = Literal["intact", "reformatted", "edited", "altered", "missing"]
HARMLESS: frozenset[State] = frozenset({"intact", "reformatted"})

_PART_DIGITS = (
    8  # a part's digest only says where; the file's, which is whole, says whether
)
_HEADER_BYTES = 4096  # the digest line stands in them
_README, _VENDORED = "README.md", "Copied by `fmha-gen vendor`"
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
_GENERATED = "generated"  # the folder of kernels in a checkout

_DIGEST_LINE = re.compile(
    rf"^spec sha256:([0-9a-f]{{{SPEC_DIGITS}}})  body sha256:([0-9a-f]{{64}})\r?\n",
    re.MULTILINE,
)
_ENTRY = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)*) ([0-9a-f]{64})((?: \S+:[0-9a-f]{8})+)")

# Strings, comments (group 1), and line ends after which a statement may begin. A string that holds
# others with its own quotes, in an f-string's braces, counts as several. Each alternative begins
# with a plain character: then `re` skips what begins none.
_TOKEN = re.compile(
    r'''"""(?:[^\\]|\\.)*?"""|"(?:[^"\\\n]|\\.)*"'''
    r"""|'''(?:[^\\]|\\.)*?'''|'(?:[^'\\\n]|\\.)*'|#([^\n]*)"""
    r"""|\n(?<!\\\n)(?![\s#)\]}\\]|(?:elif|else|except|finally)\b|\Z)""",
    re.DOTALL,
)
_KEPT_PIECES = 4096
_DOCSTRING, _IMPORTS = "(docstring)", "(imports)"  # parts without a name of their own

# Versions of Python differ in these, and none says what a program does.
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Unverifiable(Exception):
    """What was asked for cannot be looked at; `str()` is the line for the user."""


class NothingThere(Unverifiable):
    """A folder or file that is nothing of ours."""


@dataclass(frozen=True)
class Digests:
    """What a file's header says about itself."""

    spec: str  # first SPEC_DIGITS hex digits
    body: str


class Part(NamedTuple):
    """A function, class, constant or the like of a file; lines from 1, both inclusive."""

    name: str
    digest: str
    first: int
    last: int


class _Statement(NamedTuple):
    """A top-level statement: the name of its part, what it says, its lines with decorators."""

    name: str
    words: str
    first: int
    last: int


class Entry(NamedTuple):
    """A file as it was when it was vendored: the sha256 of its bytes, a digest per part."""

    sha256: str
    parts: tuple[tuple[str, str], ...]  # (name, digest), in the file's order


_GONE = Entry("", ())  # of a file that should be there, whatever it said


@dataclass(frozen=True)
class Lock:
    """`VENDOR.lock`: where the files of a folder came from, and each by its path in there."""

    source: str
    entries: Mapping[str, Entry]


class Edit(NamedTuple):
    """Where a copy differs from what was written; lines of the copy, None where there are none."""

    change: Literal["edited", "added", "removed", "moved", "unreadable"]
    name: str
    first: int | None = None
    last: int | None = None

    def __str__(self) -> str:
        last = "" if self.last == self.first else f"-{self.last}"
        place = "" if self.first is None else f":{self.first}{last}"
        return f"{place} {self.name} {self.change}"


@dataclass(frozen=True)
class Finding:
    """What is so of one file."""

    path: Path
    state: State
    edits: tuple[Edit, ...] = ()
    out_of_date: bool = False

    @property
    def ok(self) -> bool:
        """Whether it does what was written, and nothing newer is there."""
        return self.state in HARMLESS and not self.out_of_date

    @property
    def label(self) -> str:
        """All that is so of it, in words."""
        if not self.out_of_date:
            return self.state
        return (
            "out of date" if self.state == "intact" else f"{self.state} and out of date"
        )


# --- a file's own digests


def body_digest(text: str) -> str:
    """The sha256 of a file's text without its (first) digest line."""
    return sha256(without_digests(text))


def without_digests(text: str, instead: str = "") -> str:
    """A file's text with its (first) digest line replaced; instead: lines with their ends."""
    return _DIGEST_LINE.sub(instead, text, count=1)


def stated_digests(text: str) -> Digests | None:
    """What the file's header says, or None when it has no digest line."""
    match = _DIGEST_LINE.search(text)
    return Digests(*match.groups()) if match else None


def sha256(data: str | bytes) -> str:
    """Hex digest of bytes, or of a text in UTF-8."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


# --- what a file says, whatever its layout


def parts_of(path: str, text: str) -> list[Part]:
    """The parts of a file in their order, with digests that its layout does not change.

    In Python: of each top-level name what its syntax tree and the comments in it say; imports count
    as one part, in any order, as do statements that name nothing, and the comments above each of
    these. Any other file is one part, white space aside.
    Raises SyntaxError where a Python file is none.
    """
    if not path.endswith(".py"):
        return [Part("(text)", _short("".join(text.split())), 1, text.count("\n") + 1)]
    said, lines = _said(text)
    return [
        Part(name, _short("\n".join(words)), *lines[name])
        for name, words in said.items()
    ]


def same_but_layout(text: str, other: str) -> bool:
    """Whether two Python files say the same, comments included, and differ in layout at most.

    The words themselves are compared: digests as short as a part's can be forged.
    """
    try:
        ours, theirs = _said(text)[0], _said(other)[0]
    except (SyntaxError, ValueError):
        return False
    return list(ours.items()) == list(theirs.items())


def _said(text: str) -> tuple[dict[str, list[str]], dict[str, tuple[int, int]]]:
    """What each part of a Python file says, in the file's order, and its lines."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    statements, comments = _read_python(text)
    said: dict[str, list[str]] = {}
    lines: dict[str, tuple[int, int]] = {}

    def add(name: str, words: str, first: int, last: int) -> None:
        said.setdefault(name, []).append(words)
        lines[name] = lines.get(name, (first, last))[0], last

    for name, words, first, last in statements:
        add(name, words, first, last)
    if _IMPORTS in said:
        said[_IMPORTS] = _in_any_order(said[_IMPORTS])
    spans = sorted((last, first, name) for name, _, first, last in statements)
    for line, comment in comments:
        # A comment belongs to what it stands in, else it is a part above what follows.
        place = bisect.bisect_left(spans, (line, 0, ""))
        if place == len(spans):
            add("(end)", f"#{comment}", line, line)
        elif line >= spans[place][1]:
            said[spans[place][2]].append(f"#{comment}")
        else:
            add(_above(spans[place][2]), f"#{comment}", line, line)
    return said, lines


def _above(name: str) -> str:
    """The part of the comments that stand before another part."""
    return "(first-lines)" if name == _DOCSTRING else f"(above-{name.strip('()')})"


def _in_any_order(imports: list[str]) -> list[str]:
    """Names that are imported, sorted: formatters group and order them, which changes nothing.

    Unless two of them bind the same name, of which the last one counts.
    """
    names = [name for words in imports for name in words.split("\n")]
    bound = {name.rpartition(" ")[2] for name in names}
    return sorted(names) if len(bound) == len(names) else names


def _read_python(text: str) -> tuple[list[_Statement], list[tuple[int, str]]]:
    """The top-level statements of a file, and (line, comment) of its comments, both in order.

    Parsing takes longest, and kernels share most of their statements, also after a formatter. So a
    file is read in pieces, and each piece only once. This is safe: what is Python by itself leaves
    nothing open for the next piece to end. From a piece that is none on, all is parsed at once.
    """
    comments, starts = _scan(text)
    ends = [start for start, _ in starts[1:]]
    found: list[_Statement] = []
    for (start, before), end in zip(starts, [*ends, len(text)], strict=True):
        try:
            piece = _statements(text[start:end])
        except (SyntaxError, ValueError):
            # The empty lines are for what an error says of its place.
            found += _statements("\n" * before + text[start:])
            break
        for name, words, first, last in piece:
            found.append(_Statement(name, words, first + before, last + before))
    # Only the first string of a file is its docstring.
    found[1:] = [
        one._replace(name="(statements)") if one.name == _DOCSTRING else one
        for one in found[1:]
    ]
    return found, comments


def _scan(text: str) -> tuple[list[tuple[int, str]], list[tuple[int, int]]]:
    """(line, comment) of all comments, and where pieces start: (place, lines before it).

    Of what is Python. Its own tokenizer takes 20 times longer.
    """
    comments: list[tuple[int, str]] = []
    starts = [(0, 0)]
    line, counted, decorated = 0, 0, text.startswith("@")
    for found in _TOKEN.finditer(text):
        kind, place = text[found.start()], found.end()
        if kind not in "#\n":
            continue
        line += text.count("\n", counted, place)
        counted = place
        if kind == "#":
            comments.append((line + 1, found[1].lstrip("#").strip()))
            continue
        if not decorated:
            starts.append((place, line))
        decorated = text.startswith("@", place)
    return comments, starts


@functools.lru_cache(_KEPT_PIECES)
def _statements(text: str) -> tuple[_Statement, ...]:
    """The top-level statements of a text; lines from 1, within it."""
    return tuple(
        _Statement(
            _name_of(statement),
            "\n".join(_described(statement)),
            min([statement.lineno, *(node.lineno for node in _decorators(statement))]),
            statement.end_lineno or 0,
        )
        for statement in ast.parse(text).body
    )


def _name_of(statement: ast.stmt) -> str:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return statement.name
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return _IMPORTS
    if _docstring([statement]) is not None:
        return _DOCSTRING
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    if len(targets) == 1 and isinstance(targets[0], ast.Name):
        return targets[0].id
    return "(statements)"


def _decorators(statement: ast.stmt) -> Sequence[ast.expr]:
    found: Sequence[ast.expr] = getattr(statement, "decorator_list", ())
    return found


def _described(statement: ast.stmt) -> list[str]:
    docstring = _docstring([statement])
    if docstring is not None:
        return [docstring]
    if isinstance(statement, ast.ImportFrom):
        module = f"from {'.' * statement.level}{statement.module or ''} "
        return [f"{module}{each}" for each in map(_imported, statement.names)]
    if isinstance(statement, ast.Import):
        return [_imported(alias) for alias in statement.names]
    out: list[str] = []
    _append(statement, out)
    return out


def _imported(alias: ast.alias) -> str:
    """A name that is imported, last the one that it binds."""
    if alias.asname is not None:
        return f"import {alias.name} as {alias.asname}"
    return f"import {alias.name} : {alias.name.partition('.')[0]}"


def _append(value: object, out: list[str]) -> None:
    """Add the words of a tree: kinds, fields that are not empty, values; no places."""
    if isinstance(value, ast.AST):
        out.append(f"({type(value).__name__}")
        for name in value._fields:
            field = getattr(value, name, None)
            if isinstance(value, ast.JoinedStr):
                field = [item for item in value.values if not _is_empty(item)]
            if field is None or field == [] or name in _IGNORED_FIELDS:
                continue
            out.append(name)
            if name == "body" and isinstance(value, _WITH_DOCSTRING):
                docstring = _docstring(value.body)
                if docstring is not None:
                    out.append(docstring)
                    field = value.body[1:]
            _append(field, out)
        out.append(")")
    elif isinstance(value, list):
        out.append("[")
        for item in value:
            _append(item, out)
        out.append("]")
    else:
        out.append(f"{type(value).__name__} {value!a}")


def _is_empty(node: ast.expr) -> bool:
    """Whether a piece of an f-string is the empty one that Python 3.12 adds to some."""
    return isinstance(node, ast.Constant) and node.value == ""


def _docstring(body: Sequence[ast.stmt]) -> str | None:
    """The docstring at the start of a body, without what formatters change in it."""
    if not body or not isinstance(body[0], ast.Expr):
        return None
    value = body[0].value
    if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
        return None
    lines = [ascii(line.strip()) for line in value.value.strip().splitlines()]
    return "\n".join(["docstring", *lines])


def _short(text: str) -> str:
    return sha256(text)[:_PART_DIGITS]


# --- the lock


def entry_of(path: str, text: str) -> Entry:
    """What the lock says of a file with this text."""
    parts = parts_of(path, text)
    return Entry(sha256(text), tuple((part.name, part.digest) for part in parts))


def dump(lock: Lock) -> str:
    """The text of a lock: its source, then a line per file, sorted."""
    lines = [
        " ".join([path, entry.sha256, *(f"{n}:{digest}" for n, digest in entry.parts)])
        for path, entry in sorted(lock.entries.items())
    ]
    return "\n".join([lock.source, *lines]) + "\n"


def parse(text: str, name: str = LOCK) -> Lock:
    """Inverse of `dump`. Raises Unverifiable with the line that is not an entry."""
    source, *lines = text.split("\n")
    if not source.startswith("fmha-gen==") or lines[-1:] != [""]:
        raise Unverifiable(f"{name}: not a lock; restore it from version control")
    entries: dict[str, Entry] = {}
    for number, line in enumerate(lines[:-1], start=2):
        match = _ENTRY.fullmatch(line)
        if match is None or match[1] in entries:
            raise Unverifiable(
                f"{name}:{number}: not an entry; restore it from version control"
            )
        parts = (part.rpartition(":") for part in match[3].split())
        entries[match[1]] = Entry(match[2], tuple((n, d) for n, _, d in parts))
    return Lock(source, entries)


def read_lock(folder: Path) -> Lock | None:
    """The lock of a folder, or None when it has none."""
    data = _read(folder / LOCK)
    if data is None:
        return None
    return parse(_text(data).replace("\r\n", "\n"), str(folder / LOCK))


# --- what is so of a file


def state_of(path: str, data: bytes | None, entry: Entry) -> tuple[State, list[Edit]]:
    """How a file is beside its entry; data: its bytes, None when it is not there."""
    if data is None:
        return "missing", []
    if sha256(data) == entry.sha256:
        return "intact", []
    return _compare(path, _text(data), entry.parts)


def _compare(
    path: str, text: str, written: Sequence[tuple[str, str]]
) -> tuple[State, list[Edit]]:
    """Reformatted or edited, and where; written: (name, digest) of the parts as they were."""
    try:
        parts = parts_of(path, text)
    except (SyntaxError, ValueError) as error:  # ValueError: a null character
        line = getattr(error, "lineno", None) or 1
        return "edited", [Edit("unreadable", "(not Python)", line, line)]
    before = dict(written)
    now = {part.name for part in parts}
    edits = []
    for part in parts:
        if before.get(part.name) != part.digest:
            change: Literal["edited", "added"] = (
                "edited" if part.name in before else "added"
            )
            edits.append(Edit(change, part.name, part.first, part.last))
    edits += [Edit("removed", name) for name in before if name not in now]
    if not edits:
        edits = [
            Edit("moved", part.name, part.first, part.last)
            for part, (name, _) in zip(parts, written, strict=True)
            if part.name != name
        ][:1]
    return ("edited" if edits else "reformatted"), edits


def examine(
    path: Path, name: str, entry: Entry | None, kernels: Mapping[str, str] | None
) -> Finding:
    """Look at one file. kernels: text by file name of those that are now generated."""
    if entry is not None and _is_linked(path, name):
        return Finding(path, "edited", (Edit("unreadable", "(a symbolic link)"),))
    data = _read(path)
    text = _text(data or b"")
    stated = stated_digests(text)
    newest = (kernels or {}).get(path.name)
    if entry is not None:
        state, edits = state_of(name, data, entry)
        is_kernel = any(part == "SPEC" for part, _ in entry.parts)
        current = newest is not None and sha256(newest) == entry.sha256
    else:
        is_kernel = stated is not None
        current = stated is not None and stated == stated_digests(newest or "")
        state, edits = "altered", []
        if stated is not None and body_digest(text) == stated.body:
            state = "intact"
        elif current and newest is not None:
            state, edits = _compare(path.name, text, entry_of(path.name, newest).parts)
    stale = kernels is not None and is_kernel and not current
    return Finding(path, state, tuple(edits), stale)


def verify(paths: Sequence[Path], against: Path | None = None) -> list[Finding]:
    """Look at files and at all that folders hold; findings by path.

    against: a checkout of fmha-gen or a folder of kernels. Raises Unverifiable when there is
    nothing to look at, or nothing to hold it against.
    """
    kernels = None if against is None else _generated(against)
    found: dict[Path, tuple[str, Entry | None]] = {}
    for path in paths:
        subjects = dict(_in_folder(path) if path.is_dir() else _single(path))
        if not subjects:
            raise NothingThere(f"{path}: holds no kernel of fmha-gen and no {LOCK}")
        for file, (name, entry) in subjects.items():
            if entry is not None or file not in found:
                found[file] = name, entry
    return [
        examine(path, name, entry, kernels)
        for path, (name, entry) in sorted(found.items())
    ]


def _generated(against: Path) -> dict[str, str]:
    """The kernels of a checkout or a folder: text by file name."""
    inside = against / _GENERATED
    folder = inside if inside.is_dir() else against
    texts = {
        path.name: _text(_read(path) or b"").replace("\r\n", "\n")
        for path in folder.glob("*.py")
    }
    kernels = {name: text for name, text in texts.items() if stated_digests(text)}
    if not kernels:
        raise Unverifiable(f"{against}: holds no kernel of fmha-gen")
    return kernels


def _in_folder(root: Path) -> Iterator[tuple[Path, tuple[str, Entry | None]]]:
    """All kernels below a folder, then all files that a lock there names: it knows more."""
    locked = []
    for name, folders, files in os.walk(root):
        folders[:] = sorted(
            below
            for below in folders
            if not below.startswith(".") and below not in _SKIPPED_FOLDERS
        )
        folder = Path(name)
        for file in files:
            if file.endswith(".py") and _is_kernel(folder / file):
                yield folder / file, (file, None)
        if LOCK in files:
            locked.append(folder)
        elif _was_vendored(folder, files):
            yield folder / LOCK, (LOCK, _GONE)
    for folder in locked:
        yield from _locked(folder)


def _was_vendored(folder: Path, files: Sequence[str]) -> bool:
    """Whether a folder's README is that of `fmha-gen vendor`, which never comes without a lock."""
    if _README not in files:
        return False
    return _VENDORED in _text((folder / _README).read_bytes()[:_HEADER_BYTES])


def _locked(folder: Path) -> Iterator[tuple[Path, tuple[str, Entry | None]]]:
    lock = read_lock(folder)
    for name, entry in lock.entries.items() if lock else ():
        yield folder / name, (name, entry)


def _single(path: Path) -> Iterator[tuple[Path, tuple[str, Entry | None]]]:
    """A file, by the lock in its folder or in the one above, else by itself."""
    if path.name == LOCK and path.exists():
        yield from _locked(path.parent)
        return
    for folder in (path.parent, path.parent.parent):
        for file, subject in _locked(folder):
            if file == path:
                yield file, subject
                return
    if not path.exists():
        raise Unverifiable(f"{path}: no such file or folder")
    if _is_kernel(path):
        yield path, (path.name, None)


def _is_linked(path: Path, name: str) -> bool:
    """Whether a file that a lock names, or a folder on the way from the lock, is a link."""
    below = [path, *path.parents][: name.count("/") + 1]
    return any(place.is_symlink() for place in below)


def _is_kernel(path: Path) -> bool:
    if not path.is_file():  # a link that leads nowhere
        return False
    with path.open("rb") as file:
        return stated_digests(_text(file.read(_HEADER_BYTES))) is not None


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


# --- for people and for machines


def run(
    paths: Sequence[Path], *, against: Path | None, as_json: bool, or_none: bool = False
) -> int:
    """Print what is so of the paths. Returns the exit status.

    0: all are as written, reformatted ones included, and none is out of date. 1: some are not. 2:
    there is nothing to look at; or_none: which is as good as if all were as written.
    """
    gc.disable()  # trees have no cycles, and to look for some doubles the time
    try:
        findings = verify(paths, against)
    except NothingThere as error:
        print(error, file=sys.stdout if or_none else sys.stderr)
        return 0 if or_none else 2
    except (Unverifiable, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        gc.enable()
    print(to_json(findings) if as_json else to_text(findings))
    return 0 if all(finding.ok for finding in findings) else 1


def to_json(findings: Sequence[Finding]) -> str:
    """A list with one object per file."""
    rows = [
        {
            "path": finding.path.as_posix(),
            "state": finding.state,
            "out_of_date": finding.out_of_date,
            "edits": [edit._asdict() for edit in finding.edits],
        }
        for finding in findings
    ]
    return json.dumps(rows, indent=2, sort_keys=True)


def to_text(findings: Sequence[Finding]) -> str:
    """A line for each file that is not intact and for each edit in it, then the sum."""
    lines = []
    for finding in findings:
        if finding.label == "intact":
            continue
        lines.append(f"{finding.path}: {finding.label}")
        lines += [f"  {finding.path}{edit}" for edit in finding.edits]
        if finding.state == "altered":
            lines.append(
                f"  no {LOCK} says how; --against a checkout with this version may"
            )
    labels = [finding.label for finding in findings]
    counts = (f"{labels.count(label)} {label}" for label in dict.fromkeys(labels))
    return "\n".join(chain(lines, [", ".join(counts)]))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command without fmha-gen's; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="verify", description="Says of copies of kernels what happened to them."
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path)
    parser.add_argument(
        "--against", metavar="DIR", type=Path, help="a checkout, or a folder of kernels"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--or-none",
        action="store_true",
        help="status 0 where no kernel is: a hook comes before the first one",
    )
    options = parser.parse_args(arguments)
    return run(
        options.paths,
        against=options.against,
        as_json=options.json,
        or_none=options.or_none,
    )


if __name__ == "__main__":
    sys.exit(main())
