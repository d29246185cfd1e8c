# SPDX-License-Identifier: Apache-2.0
"""Every measurement of a tuning, a JSON object per line, on disk as soon as it is made.

A measurement has a key of all that it depends on: the kernels, the GPU, its driver, the DSL, the
problems, the rounds and this package's own source. A tuning that was interrupted finds by it what
is measured already. A failure has no key and is tried again: a short limit or another program on
the GPU may have caused it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ..errors import CheckFailed, EnvironmentProblem
from ..host import cache, files


@dataclass(frozen=True)
class Heat:
    """Kernels timed in turn in one process.

    contenders: body digests, the incumbent's first. rounds: by problem, in each round the seconds
    per launch of every contender; empty when one failed. rejected: that one, and why.
    """

    contenders: Sequence[str]
    rounds: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    rejected: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Terms:
    """What a measurement depends on beside its kernels. source: digest of this package."""

    gpu: str
    driver: str
    dsl: str
    problems: tuple[str, ...]
    source: str

    def key(self, kind: str, *parts: str) -> str:
        """The key of a measurement under these terms."""
        terms = [self.gpu, self.driver, self.dsl, self.source]
        return cache.key(kind, [*terms, *self.problems, *parts])


@dataclass
class Journal:
    """The entries of a file, which one process at a time writes; see `opened`."""

    _file: TextIO
    _lines: set[str] = field(default_factory=set)
    _by_key: dict[str, dict[str, Any]] = field(default_factory=dict)

    def note(self, **entry: Any) -> None:
        """Add an entry unless the very same one is there; on disk when this returns."""
        line = json.dumps(entry)
        if line in self._lines:
            return
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.enter(line)

    def known(self, key: str) -> Mapping[str, Any] | None:
        """The entry with a key."""
        return self._by_key.get(key)

    def enter(self, line: str) -> None:
        """Take a line of the file. Raises ValueError or TypeError when it is no entry."""
        entry = {**json.loads(line)}
        self._lines.add(line)
        if (key := entry.get("key")) is not None:
            self._by_key[str(key)] = entry


@contextmanager
def opened(path: Path) -> Iterator[Journal]:
    """A journal with the entries that its file has; half a line at the end is cut off.

    Raises CheckFailed for a file that is no journal and while another tuning writes it,
    EnvironmentProblem where none can be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = files.open_plain(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    except OSError as error:
        raise EnvironmentProblem(f"{path}: cannot be written: {error}") from error
    with os.fdopen(handle, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckFailed(f"{path}: another tune is writing it") from error
        journal = Journal(file)
        file.seek(0)
        try:
            *lines, torn = file.read().split("\n")
            for line in lines:
                journal.enter(line)
        except (ValueError, TypeError) as error:
            raise CheckFailed(f"{path}: not a journal: {error!r}") from error
        if torn:
            os.truncate(handle, sum(len(line.encode()) + 1 for line in lines))
        yield journal
