# SPDX-License-Identifier: Apache-2.0
"""What tuning has found out, a JSON object per line, written as it happens.

What was found on a GPU stands under a key made of all that it depends on: the kernels' text, the
GPU, its driver, the DSL, the problems, the number of rounds, and our own code that checks and
times. So a run that was interrupted resumes, and nothing is taken over after any of these has
changed. A rejection is taken over only when the kernel was wrong: who hung, crashed or found no
memory may have the machine to blame, or a short limit, and runs again. Delete the file to start
anew.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from .. import cache, files
from ..errors import CheckFailed, EnvironmentProblem
from .rounds import Played

# What decides who is wrong and how rounds are taken.
SOURCES: Final = (
    *(f"bench/{name}.py" for name in ("contenders", "cuda", "problems", "timing")),
    *(f"{name}.py" for name in ("cases", "compare", "inputs", "reference", "trial")),
    *(f"tune/{name}.py" for name in ("rounds", "worker")),
)


@dataclass(frozen=True)
class Heat:
    """What one process showed: everyone's rounds by problem, and who was rejected, and why.

    The rounds count only when nobody was rejected: they are not complete otherwise. lasting:
    whether it would be so again.
    """

    played: Played
    rejected: Mapping[str, str]
    lasting: bool = True


@dataclass(frozen=True)
class Terms:
    """What a heat depends on beside its contenders: the machine and the problems, in words.

    method: digest of `SOURCES`.
    """

    gpu: str
    driver: str
    dsl: str
    problems: tuple[str, ...]
    method: str

    def key(self, contenders: Sequence[str], rounds: int) -> str:
        """The key of a heat; the incumbent is the first contender."""
        incumbent, *others = contenders
        parts = [self.gpu, self.driver, self.dsl, self.method, str(rounds)]
        return cache.key("heat", [*parts, *self.problems, incumbent, *sorted(others)])


class Journal:
    """A journal file, held by one process at a time; a context manager."""

    def __init__(self, path: Path) -> None:
        """Read what is there. Raises CheckFailed when it is no journal or another tune has it."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = files.open_plain(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            self._file = os.fdopen(handle, "a+", encoding="utf-8")
        except OSError as error:
            raise EnvironmentProblem(f"{path}: cannot be written: {error}") from error
        self._lines: set[str] = set()
        self._heats: dict[str, Heat] = {}
        try:
            for line in self._read():
                self._enter(line)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
        ) as error:
            self._file.close()
            raise CheckFailed(f"{path}: not a journal: {error!r}") from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def _read(self) -> list[str]:
        """The whole lines; half a one at the end is cut off."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckFailed(f"{self.path}: another tune is writing it") from error
        self._file.seek(0)
        *lines, torn = self._file.read().split("\n")
        if torn:  # the writer died in it
            whole = "".join(f"{line}\n" for line in lines)
            os.truncate(self._file.fileno(), len(whole.encode()))
        return lines

    def _enter(self, line: str) -> None:
        entry = {**json.loads(line)}
        self._lines.add(line)
        if entry.get("key") is not None:
            names = entry["contenders"]
            played = {
                problem: [dict(zip(names, one, strict=True)) for one in rounds]
                for problem, rounds in entry["rounds"].items()
            }
            self._heats[entry["key"]] = Heat(played, {**entry["rejected"]})

    def note(self, **entry: Any) -> None:
        """Add an entry, unless the very same one is there; on disk when this returns."""
        line = json.dumps(entry)
        if line in self._lines:
            return
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._enter(line)

    def heat(self, key: str) -> Heat | None:
        """The heat with a key, if it is known."""
        return self._heats.get(key)

    def note_heat(
        self, terms: Terms, contenders: Sequence[str], rounds: int, heat: Heat
    ) -> None:
        """Add a heat; contenders: body digests, the incumbent's first, as in each round.

        One that does not last has no key: it is evidence, and nobody finds it.
        """
        played = {
            problem: [[one[name] for name in contenders] for one in rounds_of]
            for problem, rounds_of in heat.played.items()
        }
        self.note(
            event="heat",
            key=terms.key(contenders, rounds) if heat.lasting else None,
            gpu=terms.gpu,
            driver=terms.driver,
            dsl=terms.dsl,
            method=terms.method,
            contenders=list(contenders),
            rounds=played,
            rejected=heat.rejected,
        )
