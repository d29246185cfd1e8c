# SPDX-License-Identifier: Apache-2.0
"""What a user can be told: places, diagnostics and their codes, an exception per exit status."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

CODES: dict[str, str] = {
    # The file and its YAML.
    "FG001": "the file or folder cannot be read",
    "FG002": "the folder holds no spec",
    "FG003": "the file is too long for a spec",
    "FG004": "the file is not UTF-8",
    "FG005": "the file starts with a byte order mark",
    "FG006": "a character that has no place in a spec",
    "FG007": "a tab",
    "FG008": "not valid YAML",
    "FG009": "the file is empty",
    "FG010": "more than one YAML document",
    "FG011": "the document is not a mapping",
    "FG012": "nested too deep",
    "FG013": "a YAML anchor",
    "FG014": "a YAML alias",
    "FG015": "a YAML merge key",
    "FG016": "a YAML tag",
    "FG017": "a YAML directive",
    "FG018": "a key given twice",
    "FG019": "a key that is not text",
    "FG020": "a key without a value",
    "FG021": "a truth value other than true and false",
    "FG022": "a whole number that is not plain decimal",
    "FG023": "a number with too many digits",
    "FG024": "a fraction that is not plain decimal, or not finite",
    "FG025": "a YAML type that no field takes",
    "FG026": "specs in a folder inside a folder of specs",
    # One field.
    "FG101": "unknown key",
    "FG102": "a required key is missing",
    "FG103": "a value of the wrong type",
    "FG104": "a value that is not accepted",
    # Fields that do not go together.
    "FG201": "multicast without a cluster of two",
    "FG202": "a cluster whose CTAs do not share a KV head",
    "FG203": "packed query heads, of which a KV head has one",
    "FG204": "a cluster along query heads that are packed",
    "FG205": "a value that is not generated for the architecture",
    # Expressions.
    "FG211": "an expression that is not in the language",
    "FG212": "an unknown name",
    "FG213": "a number where a truth value stands, or the other way round",
    "FG214": "a field that changes nothing, or says again what another says",
    "FG215": "too many alternatives",
    "FG216": "a number that 32 bits do not hold",
    "FG217": "a mask that hides every key",
    "FG218": "an operand or an index that is not accepted",
    "FG219": "a mask or a score that is not generated; a note, where no block is whole",
    # Names.
    "FG301": "the file's stem cannot name a kernel",
    "FG302": "two specs with one name",
    "FG303": "the file's stem is a Python keyword or a module's name",
    "FG304": "a spec whose suffix is not .yaml",
    "FG305": "the name contradicts a field",
    "FG306": "a name that changes how the compiler treats the kernel",
    # What the plan cannot make fit.
    "FG401": "shared memory does not fit",
    "FG402": "registers do not fit",
    "FG403": "a query tile that does not hold whole groups of packed heads",
    "FG404": "O cannot leave with so many Q stages",
    "FG405": "tensor memory does not fit",
    "FG406": "columns of S that are not whole loads of tensor memory",
    "FG407": "stages of K and V that do not begin where a swizzled tile can",
}
"""Every diagnostic's code with its meaning in one line."""

_MOST_SHOWN = 20  # of the diagnostics of one file
_LONGEST_QUOTE = 40  # [characters] of a value or key repeated in a message


@dataclass(frozen=True, order=True)
class Location:
    """A place in a file: the path as the user gave it; line and column, in characters, from 1."""

    path: str
    line: int = 1
    column: int = 1

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


@dataclass(frozen=True, order=True)
class Diagnostic:
    """One thing wrong with one spec. `code` is a key of `CODES`."""

    location: Location
    code: str
    message: str
    hint: str = ""

    def render(self, kind: str = "error") -> str:
        """Return the text a user sees: one line, and a second one if there is a hint."""
        line = f"{self.location}: {kind}[{self.code}] {self.message}"
        return f"{line}\n  hint: {self.hint}" if self.hint else line


class Violation(NamedTuple):
    """A broken rule without a place yet: it gets that of `field`, a path such as ("tile", "kv")."""

    code: str
    field: tuple[str, ...]
    message: str
    hint: str


class FmhaGenError(Exception):
    """A failure for the user to see: `str()` is the whole text, `exit_code` the exit status."""

    exit_code: ClassVar[int] = 1


class CheckFailed(FmhaGenError):
    """Drift, or a check that did not pass."""

    exit_code: ClassVar[int] = 1


class OutOfTime(CheckFailed):
    """A process that had to be ended."""


class SpecError(FmhaGenError):
    """Specs that cannot be built. Holds all diagnostics, sorted by place, each once."""

    exit_code: ClassVar[int] = 2

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(sorted(set(diagnostics)))
        super().__init__(self.diagnostics)  # as `args`, so that it survives pickling

    def __str__(self) -> str:
        lines = []
        by_path = itertools.groupby(self.diagnostics, lambda one: one.location.path)
        for path, group in by_path:
            shown = [diagnostic.render() for diagnostic in group]
            lines += shown[:_MOST_SHOWN]
            if more := len(shown) - _MOST_SHOWN:
                lines += [f"{path}: {more} more"] if more > 0 else []
        return "\n".join(lines)


class UsageProblem(FmhaGenError):
    """Arguments that name nothing, or do not go together."""

    exit_code: ClassVar[int] = 2


class EnvironmentProblem(FmhaGenError):
    """Something this machine lacks (a GPU, the DSL, a tool), in one line."""

    exit_code: ClassVar[int] = 3


def one_line(failure: Exception) -> str:
    """The kind of a failure, and the first line of what it says."""
    text = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {text[0] if text else 'no message'}"


def quoted(text: str) -> str:
    """Return `text` in double quotes, ASCII only, cut to a readable length: safe for a terminal."""
    if len(text) > _LONGEST_QUOTE:
        text = text[:_LONGEST_QUOTE] + "..."
    return json.dumps(text)


def shown(value: object) -> str:
    """Return plain data as a message repeats it, in YAML's spelling."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, (list, tuple)):
        inside = ", ".join(shown(item) for item in value)
        return f"[{inside}]" if len(inside) <= _LONGEST_QUOTE else "a list"
    if isinstance(value, dict):
        return "a mapping"
    return "nothing"
