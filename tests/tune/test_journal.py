# SPDX-License-Identifier: Apache-2.0
"""A journal survives its writer's death, and is read only by what it was written by."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import support
from fmha_gen.errors import CheckFailed, EnvironmentProblem
from fmha_gen.tune.journal import opened

from .model import TERMS

ENTRY = {"event": "heat", "key": "k", "rounds": {"short": [[1.0, 0.5]]}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "records" / "k.tune.jsonl"
    with opened(file) as journal:
        journal.note(event="candidate", values={"tile.q": 64})
        journal.note(**ENTRY)
    return file


def test_an_entry_is_there_again_and_noted_once(path: Path) -> None:
    before = path.read_text()
    assert [json.loads(line)["event"] for line in before.splitlines()] == [
        "candidate",
        "heat",
    ]
    with opened(path) as journal:
        assert journal.known("k") == ENTRY
        assert journal.known("another") is None
        journal.note(event="candidate", values={"tile.q": 64})
        assert path.read_text() == before
        journal.note(event="candidate", values={"tile.q": 65})
    assert path.read_text().startswith(before)
    assert len(path.read_text()) > len(before)


def test_a_key_is_of_all_that_a_measurement_depends_on() -> None:
    keys = [
        TERMS.key("heat", "2", "i", "a"),
        TERMS.key("heat", "4", "i", "a"),
        TERMS.key("heat", "2", "a", "i"),  # another incumbent
        TERMS.key("check", "2", "i", "a"),
        *(
            replace(TERMS, **{name: other}).key("heat", "2", "i", "a")
            for name, other in (
                ("gpu", "NVIDIA H100"),
                ("driver", "581"),
                ("dsl", "4.8.2"),
                ("problems", ("short",)),
                ("source", "another"),
            )
        ),
    ]
    assert len(set(keys)) == len(keys)


def test_half_a_line_is_dropped_and_written_over(path: Path) -> None:
    whole = path.read_text()
    path.write_text(whole + '{"event": "heat", "rounds": {"sho')
    with opened(path) as journal:
        assert journal.known("k") == ENTRY
        journal.note(event="result")
    assert path.read_text() == whole + '{"event": "result"}\n'


@pytest.mark.parametrize("text", ["no json\n", "[1]\n", "3\n"])
def test_another_file_is_left_alone(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(CheckFailed, match="not a journal"), opened(path):
        pass
    assert path.read_text() == text


def test_one_writer_at_a_time(path: Path) -> None:
    busy = pytest.raises(CheckFailed, match="another tune is writing it")
    with opened(path), busy, opened(path):
        pass
    with opened(path):
        pass


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = pytest.raises(EnvironmentProblem, match="cannot be written")
    with refused, opened(tmp_path / "file" / "k.jsonl"):
        pass


def test_shipped_journals_are_read_and_not_changed(tmp_path: Path) -> None:
    shipped = sorted((support.GENERATED / "records").glob("*.tune.jsonl"))
    assert shipped
    for path in shipped:
        copy = tmp_path / path.name
        copy.write_bytes(path.read_bytes())
        with opened(copy):
            pass
        assert copy.read_bytes() == path.read_bytes()


WRITER = """
import sys
from pathlib import Path
from fmha_gen.tune.journal import opened
with opened(Path(sys.argv[1])) as journal:
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
    with opened(path) as journal:
        journal.note(event="result")
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    numbers = [entry["number"] for entry in entries[:-1]]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= 20
