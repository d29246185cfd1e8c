# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pickle

import pytest
from fmha_gen.errors import (
    CheckFailed,
    Diagnostic,
    EnvironmentProblem,
    FmhaGenError,
    Location,
    SpecError,
    quoted,
    shown,
)

SECOND = Diagnostic(Location("b.yaml", 1, 2), "FG101", "later file", "a hint")
FIRST = Diagnostic(Location("a.yaml", 10, 1), "FG104", "earlier file, later line")
TEXT = """\
a.yaml:10:1: error[FG104] earlier file, later line
b.yaml:1:2: error[FG101] later file
  hint: a hint"""


def test_spec_error_sorts_and_merges() -> None:
    error = SpecError([SECOND, FIRST, SECOND])
    assert error.diagnostics == (FIRST, SECOND)
    assert str(error) == TEXT


def test_lines_sort_as_numbers() -> None:
    assert Location("a", 9, 1) < Location("a", 10, 1)


def test_spec_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(SpecError([SECOND, FIRST])))
    assert isinstance(error, SpecError)
    assert str(error) == TEXT


def test_exit_codes() -> None:
    errors: list[FmhaGenError] = [
        CheckFailed("x"),
        SpecError([FIRST]),
        EnvironmentProblem("x"),
    ]
    assert [error.exit_code for error in errors] == [1, 2, 3]


def test_quotes_are_short_and_safe() -> None:
    assert quoted("a\x1b[31m\u202e") == '"a\\u001b[31m\\u202e"'
    assert len(quoted("x" * 1000)) < 50


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (1, "1"),
        (1.5, "1.5"),
        ("on", '"on"'),
        ([1, [False]], "[1, [false]]"),
        (list(range(99)), "a list"),
        ({"q": 1}, "a mapping"),
    ],
)
def test_values_are_shown_as_yaml(value: object, text: str) -> None:
    assert shown(value) == text
