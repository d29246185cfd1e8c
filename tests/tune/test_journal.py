# SPDX-License-Identifier: Apache-2.0
"""A journal survives its writer's death, and knows only what was found in the same place."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fmha_gen.errors import CheckFailed, EnvironmentProblem
from fmha_gen.tune.journal import Heat, Journal

from .model import TERMS

HEAT = Heat({"short": [{"i": 1.0, "a": 0.5}, {"a": 0.25, "i": 2.0}]}, {})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "records" / "k.tune.jsonl"
    with Journal(file) as journal:
        journal.note(event="candidate", values={"tile.q": 64})
        journal.note_heat(TERMS, ["i", "a"], 2, HEAT)
    return file


def test_what_was_noted_is_there_again(path: Path) -> None:
    with Journal(path) as journal:
        assert journal.heat(TERMS.key(["i", "a"], 2)) == HEAT
    first, heat = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["event"], heat["event"]) == ("candidate", "heat")
    assert heat["rounds"] == {"short": [[1.0, 0.5], [2.0, 0.25]]}


def test_the_same_entry_is_noted_once(path: Path) -> None:
    before = path.read_text()
    with Journal(path) as journal:
        journal.note(event="candidate", values={"tile.q": 64})
        assert path.read_text() == before
        journal.note(event="candidate", values={"tile.q": 65})
    assert path.read_text().startswith(before)
    assert len(path.read_text()) > len(before)


def test_a_heat_is_known_by_all_that_it_depends_on() -> None:
    key = TERMS.key(["i", "a", "b"], 2)
    assert key == TERMS.key(["i", "b", "a"], 2)
    others = [
        TERMS.key(["a", "i", "b"], 2),  # another incumbent
        TERMS.key(["i", "a"], 2),
        TERMS.key(["i", "a", "b"], 3),
        replace(TERMS, gpu="NVIDIA H100").key(["i", "a", "b"], 2),
        replace(TERMS, driver="581").key(["i", "a", "b"], 2),
        replace(TERMS, dsl="4.8.2").key(["i", "a", "b"], 2),
        replace(TERMS, problems=("short",)).key(["i", "a", "b"], 2),
        replace(TERMS, method="another").key(["i", "a", "b"], 2),
    ]
    assert len({key, *others}) == len(others) + 1


def test_half_a_line_is_dropped_and_written_over(path: Path) -> None:
    whole = path.read_text()
    path.write_text(whole + '{"event": "heat", "rounds": {"sho')
    with Journal(path) as journal:
        assert journal.heat(TERMS.key(["i", "a"], 2)) == HEAT
        journal.note(event="result")
    assert path.read_text() == whole + '{"event": "result"}\n'


@pytest.mark.parametrize(
    "text",
    [
        "no json\n",
        "[1]\n",
        "3\n",
        '{"event": "heat", "key": "k"}\n',
        '{"key": "k", "contenders": ["i"], "rounds": [], "rejected": {}}\n',
        '{"key": "k", "contenders": ["i"], "rounds": {"p": [[1, 2]]}, "rejected": {}}\n',
        '{"key": [], "contenders": [], "rounds": {}, "rejected": {}}\n',
    ],
)
def test_another_file_is_left_alone(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(CheckFailed, match="not a journal"):
        Journal(path)
    assert path.read_text() == text


def test_one_writer_at_a_time(path: Path) -> None:
    with Journal(path), pytest.raises(CheckFailed, match="another tune is writing it"):
        Journal(path)
    Journal(path).__exit__(None, None, None)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        Journal(tmp_path / "file" / "k.jsonl")


WRITER = """
import sys
from pathlib import Path
from fmha_gen.tune.journal import Journal
journal = Journal(Path(sys.argv[1]))
n = 0
while True:
    journal.note(event="candidate", number=n)
    n += 1
    if n == 20:
        print("many", flush=True)
"""


def test_a_writer_that_is_killed_leaves_whole_entries(tmp_path: Path) -> None:
    path = tmp_path / "k.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "many\n"
        writer.send_signal(signal.SIGKILL)
    with Journal(path) as journal:
        journal.note(event="result")
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    numbers = [entry["number"] for entry in entries[:-1]]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= 20
