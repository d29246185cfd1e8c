# SPDX-License-Identifier: Apache-2.0
"""`generated/MANIFEST.lock`: which kernels the last build left, and from what.

Line 1 says which tools decide the bytes; then one line per kernel, sorted: file, digest of the
spec, digest of the body, digest of the text that the templates gave before it was formatted, which
takes most of a build's time and is not done again for the same text. Versions live here and not in
the kernels, so that a release that changes no output changes one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckFailed

FILE = "MANIFEST.lock"
_REMEDY = "restore it from version control, or delete it and build again"

_ENTRY = re.compile(
    r"([a-z][a-z0-9_]*\.py) ([0-9a-f]{64}) ([0-9a-f]{64}) ([0-9a-f]{64})"
)


@dataclass(frozen=True)
class Entry:
    """What one kernel was made from; full sha256 hex digests."""

    spec: str
    body: str
    rendered: str


@dataclass(frozen=True)
class Manifest:
    """The tools line and the entry of each file."""

    tools: str
    entries: Mapping[str, Entry]


def tools_line(*, fmha_gen: str, black: str, jinja2: str, dsl: str) -> str:
    """Line 1. `black` is the exact pin; `jinja2` and `dsl` are the ranges that are supported."""
    return f"fmha-gen=={fmha_gen} black=={black} jinja2{jinja2} nvidia-cutlass-dsl{dsl}"


def dump(manifest: Manifest) -> str:
    """The text of the lock."""
    lines = [
        f"{file} {entry.spec} {entry.body} {entry.rendered}"
        for file, entry in sorted(manifest.entries.items())
    ]
    return "\n".join([manifest.tools, *lines]) + "\n"


def load(path: Path) -> Manifest:
    """The lock in a file. Raises OSError, and CheckFailed as `parse` does."""
    # What is no text is no entry either.
    return parse(path.read_text(encoding="utf-8", errors="replace"), str(path))


def parse(text: str, name: str = FILE) -> Manifest:
    """Inverse of `dump`. Raises CheckFailed with the line that is not an entry."""
    tools, *lines = text.split("\n")
    if not tools.startswith("fmha-gen==") or lines[-1:] != [""]:
        raise CheckFailed(f"{name}: not a lock; {_REMEDY}")
    entries: dict[str, Entry] = {}
    for number, line in enumerate(lines[:-1], start=2):
        match = _ENTRY.fullmatch(line)
        if match is None or match.group(1) in entries:
            raise CheckFailed(f"{name}:{number}: not an entry; {_REMEDY}")
        entries[match.group(1)] = Entry(*match.groups()[1:])
    return Manifest(tools, entries)
