# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, and the exit status each kind of failure ends with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Location:
    """A place in a file: the path as the user gave it, line and column from 1."""

    path: str
    line: int
    column: int


@dataclass(frozen=True, order=True)
class Diagnostic:
    """One thing that is wrong with a spec."""

    location: Location
    code: str
    message: str
    hint: str = ""

    def render(self) -> str:
        """Return the text that the user sees: one line, and a second one with the hint."""
        where = self.location
        text = f"{where.path}:{where.line}:{where.column}: error[{self.code}] {self.message}"
        return f"{text}\n  hint: {self.hint}" if self.hint else text


class FmhaGenError(Exception):
    """An error whose text is meant for the user."""

    exit_code: int = 1


class SpecError(FmhaGenError):
    """One or more specs are bad; carries every diagnostic of all of them."""

    exit_code = 2

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(sorted(diagnostics))
        super().__init__("\n".join(d.render() for d in self.diagnostics))


class CheckFailed(FmhaGenError):
    """The input is fine, but something does not hold: drift, a failed gate, an edited file."""

    exit_code = 1


class EnvironmentProblem(FmhaGenError):
    """This machine cannot do it; one line that says what is missing."""

    exit_code = 3
