# SPDX-License-Identifier: Apache-2.0
"""Which launches are over when another one touches what they wrote."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator.checks import HAPPENED, Components
from fmha_gen.emulator.global_shadow import Accessor, GlobalShadow, Place
from fmha_gen.emulator.memory import GlobalMemory
from fmha_gen.emulator.report import Kind

COMPONENTS = Components(warps=1, groups=1, ctas=1)


class Launches:
    """Of one warp each, with a workspace of two words."""

    def __init__(self) -> None:
        self.found: list[tuple[Kind, str]] = []
        self._shadow = GlobalShadow(lambda kind, text: self.found.append((kind, text)))
        workspace = np.zeros(2, np.uint32)
        memory = GlobalMemory()
        self._buffer = memory.add("w", 0x1000, workspace, uninitialised=True)
        self._clock = np.zeros((COMPONENTS.rows, COMPONENTS.count), np.int64)
        self._clock[HAPPENED, 0] = 1  # what the warp did itself

    def launch(self, *, stream=0, programmatic=False, waits=False) -> None:
        self._shadow.launch(stream, programmatic)
        self.cluster()
        self._clock[HAPPENED, COMPONENTS.launches] = waits
        if waits:
            self._shadow.wait()

    def cluster(self) -> None:
        """Another one of the launch acts."""
        self._shadow.begin(COMPONENTS)

    def write(self, word: int) -> None:
        self._touch(self._shadow.write, word, "st.global")

    def read(self, word: int) -> None:
        self._touch(self._shadow.read, word, "ld.global")

    def add(self, word: int) -> None:
        self._touch(self._shadow.reduce, word, "red")

    def _touch(self, note, word: int, what: str) -> None:
        place = Place(self._buffer, np.array([word]), 4)
        note(place, Accessor(0, 1, self._clock, 1, what))

    @property
    def kinds(self) -> list[Kind]:
        return [kind for kind, _ in self.found]


def test_a_stream_runs_its_launches_in_order() -> None:
    run = Launches()
    run.launch()
    run.write(0)
    run.launch()
    run.read(0)
    run.write(0)
    assert run.found == []
    run.read(1)
    assert run.kinds == [Kind.READ_BEFORE_WRITE]


@pytest.mark.parametrize("touch", ["read", "write"])
def test_streams_run_in_no_order(touch: str) -> None:
    run = Launches()
    run.launch(stream=1)
    run.write(0)
    run.launch(stream=2)
    getattr(run, touch)(0)
    assert run.kinds == [Kind.RACE]
    assert "of a launch on another stream" in run.found[0][1]


def test_what_a_launch_still_reads_is_not_overwritten() -> None:
    for waits in (True, False):
        run = Launches()
        run.launch()
        run.write(0)
        run.launch()
        run.read(0)
        run.launch(programmatic=True, waits=waits)
        run.write(0)
        assert bool(run.found) is not waits


@pytest.mark.parametrize("second_waits", [True, False])
@pytest.mark.parametrize("third_waits", [True, False])
def test_who_waits_for_a_launch_that_did_not_wait_knows_of_no_other(
    second_waits: bool, third_waits: bool
) -> None:
    run = Launches()
    run.launch()
    run.write(0)
    run.launch(programmatic=True, waits=second_waits)
    run.write(1)
    run.launch(programmatic=True, waits=third_waits)
    run.read(1)
    assert run.kinds == ([] if third_waits else [Kind.RACE])
    run.found.clear()
    run.read(0)
    assert run.kinds == ([] if second_waits and third_waits else [Kind.RACE])
    run.found.clear()
    run.launch()  # behind all of them
    run.read(0)
    run.read(1)
    assert run.found == []


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("touch", ["read", "write"])
def test_sums_of_an_earlier_launch_are_there_behind_the_wait_alone(
    touch: str, waits: bool
) -> None:
    """Of every CTA that added, whichever was the last one."""
    for programmatic in (False, True):
        run = Launches()
        run.launch()
        run.write(0)
        run.launch()
        for _ in range(3):
            run.cluster()
            run.add(0)
        assert run.found == []
        run.launch(programmatic=programmatic, waits=waits)
        getattr(run, touch)(0)
        assert bool(run.found) is (programmatic and not waits)
        if run.found:
            assert "adds to (line 1)" in run.found[0][1]
            assert "of a launch that may still run" in run.found[0][1]


def test_zeros_of_an_earlier_launch_are_there_behind_the_wait_alone() -> None:
    for waits in (True, False):
        run = Launches()
        run.launch()
        run.write(0)
        run.launch(programmatic=True, waits=waits)
        run.add(0)
        run.cluster()
        run.add(0)
        assert run.kinds == ([] if waits else [Kind.RACE, Kind.RACE])


def test_additions_of_launches_on_two_streams_meet() -> None:
    run = Launches()
    run.launch()
    run.write(0)
    run.launch()
    run.add(0)
    run.launch(stream=1)
    run.add(0)
    assert run.kinds == [Kind.RACE]  # with what zeroed it, not with the additions
    assert "writes (line 1)" in run.found[0][1]


def test_every_read_is_waited_for_and_not_the_last_one_alone() -> None:
    """A dependent launch reads what the one before it reads, and overwrites it before it waits."""
    for waits in (True, False):
        run = Launches()
        run.launch()
        run.write(0)
        run.launch()
        run.read(0)
        run.launch(programmatic=True, waits=waits)
        run.read(0)
        run.write(0)
        assert bool(run.found) is not waits
