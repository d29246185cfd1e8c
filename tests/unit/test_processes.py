# SPDX-License-Identifier: Apache-2.0
"""Copies of a process that take work in turn."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path

import pytest
from fmha_gen.host.processes import take_in_turn


def note(folder: Path, number: int) -> None:
    (folder / str(number)).write_text(str(os.getpid()))
    time.sleep(0.01)


@pytest.mark.parametrize("jobs", [1, 2, 5, 50])
def test_each_is_done_once(jobs: int, tmp_path: Path) -> None:
    take_in_turn([functools.partial(note, tmp_path, n) for n in range(20)], jobs)
    found = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert sorted(found) == list(range(20))
    assert (str(os.getpid()) in found.values()) == (jobs == 1)


def test_who_fails_takes_the_others_along(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("it broke")

    todo = [fail, *(functools.partial(note, tmp_path, n) for n in range(3))]
    with pytest.raises(SystemExit, match="a process of 2 ended with status 1"):
        take_in_turn(todo, 2)
    with pytest.raises(SystemExit, match="ended with status -9"):
        take_in_turn([lambda: os.kill(os.getpid(), signal.SIGKILL)] * 2, 2)


def test_copies_end_with_the_process(tmp_path: Path) -> None:
    def stay(number: int) -> None:
        note(tmp_path, number)
        time.sleep(60)

    if not (parent := os.fork()):
        take_in_turn([functools.partial(stay, n) for n in range(2)], 2)
        os._exit(0)
    end = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.1)  # until they are written
    copies = [path.read_text() for path in tmp_path.iterdir()]
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    while any(Path("/proc", copy).exists() for copy in copies):
        assert time.monotonic() < end
        time.sleep(0.01)
