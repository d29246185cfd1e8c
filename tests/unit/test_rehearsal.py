# SPDX-License-Identifier: Apache-2.0
"""Schedules, and the verdict on a run: a machine of ours writes what each test wants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fmha_gen import tensors
from fmha_gen.emulate import Choice
from fmha_gen.emulator.lower import UnsupportedInstruction
from fmha_gen.emulator.machine import RunResult
from fmha_gen.emulator.ptx import Instruction
from fmha_gen.emulator.report import Finding, Kind
from fmha_gen.emulator.scheduler import Completion, Order, Schedule
from fmha_gen.rehearsal import (
    Rehearsal,
    name_of,
    read_constants,
    rehearse,
    schedules,
    tiles_of,
)
from fmha_gen.rehearsal_cases import Case, Tiles

SPEC = {
    "dtype": "bf16",
    "q_per_kv": 2,
    "head_dim": {"qk": 64, "v": 64},
    "lse": True,
    "mask": "causal",
}
CASE = Case("some", batch=2, kv_heads=1, q=9, kv=7, sm_count=1)
TILES = Tiles(q=8, kv=4, cluster=(2, 1))


def rehearsal(case=CASE):
    return Rehearsal(SPEC, TILES, None, case, tensors.make_problem(SPEC, case), None)


class Machine:
    """Computes what is right, then lets a test spoil it."""

    def __init__(self, made, spoil=lambda made, schedule: None, findings=()):
        self.made, self.spoil, self.findings = made, spoil, findings
        self.clusters = []
        self.tiles = {}

    def run(self, _program, _launch, _memory, *, schedule, clusters, timeline, tiles):
        truth, problem = self.made.truth(), self.made.problem
        problem.out.view[...] = tensors.TO_BITS["bf16"](
            truth.rounded.astype(np.float32)
        )
        problem.lse.view[...] = truth.lse.astype(np.float32).view(np.uint32)
        self.spoil(problem, schedule)
        self.clusters.append(clusters)
        self.tiles = tiles
        return RunResult(tuple(self.findings), steps=7)


def verdict(spoil=lambda problem, schedule: None, findings=(), case=CASE):
    made = rehearsal(case)
    machine = Machine(made, spoil, findings)
    return made.run(Schedule(), made.truth(), run=machine.run)


def test_what_is_right_holds():
    found = verdict()
    assert found.findings == []
    assert found.ratio == 1.0 and found.lse_of_tolerance < 0.01
    assert (found.case, found.schedule, found.steps) == ("some", "eager", 7)
    assert found.rows == found.of_rows == 2 * 9 * 2


def nothing(problem, _schedule):
    problem.out.view[1, 2, 1, 3] = tensors.NAN16


def more(problem, _schedule):
    problem.out.view[...] = tensors.TO_BITS["bf16"](
        tensors.FROM_BITS["bf16"](problem.out.view) * np.float32(1.01)
    )


def lse(problem, _schedule):
    problem.lse.view[0, 0, 5] = np.float32(9).view(np.uint32)


def outside(problem, _schedule):
    problem.out.storage.bits[0, 0, 0, 0] = 0


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (nothing, "1 of 2304 elements of out are NaN"),
        (more, "the error in 16 bits"),
        (lse, "lse is off by"),
        (outside, "1 elements outside out were written"),
    ],
)
def test_what_is_wrong_is_found(spoil, expected):
    (text,) = verdict(spoil).findings
    assert expected in text


def test_findings_of_the_machine_are_passed_on():
    deadlock = Finding(12, Kind.DEADLOCK, "nobody can go on")
    assert verdict(findings=[deadlock]).findings == [str(deadlock)]


def test_an_unknown_instruction_is_a_finding_with_its_line():
    def refuse(*_arguments, **_options):
        raise UnsupportedInstruction(Instruction("foo", ("bar",), (), None, 17))

    made = rehearsal()
    found = made.run(Schedule(), made.truth(), run=refuse)
    assert found.findings == ["PTX line 17: foo.bar is not modelled"]


SOME = replace(CASE, clusters=(1,))


def only_some_rows(problem, _schedule):
    problem.out.view[:, 4:] = tensors.NAN16
    problem.lse.view[:, :, 4:] = tensors.NAN32


def test_of_some_clusters_only_the_rows_that_they_wrote_count():
    found = verdict(only_some_rows, case=SOME)
    assert found.findings == []
    assert (found.rows, found.of_rows) == (2 * 4 * 2, 2 * 9 * 2)
    (text,) = [text for text in verdict(only_some_rows).findings if " lse " not in text]
    assert "elements of out are NaN" in text


def test_a_row_that_was_written_in_part_is_found():
    def spoil(problem, schedule):
        only_some_rows(problem, schedule)
        problem.out.view[0, 5, 0, :8] = 0

    assert any("are NaN" in text for text in verdict(spoil, case=SOME).findings)


def test_lse_without_its_row_is_found():
    def spoil(problem, schedule):
        only_some_rows(problem, schedule)
        problem.lse.view[1, 1, 8] = 0

    found = verdict(spoil, case=SOME).findings
    assert found == ["lse was written in rows where out was not"]


def test_a_run_that_writes_nothing_is_found():
    def spoil(problem, _schedule):
        for output in problem.outputs:
            output.poison()

    found = verdict(spoil, case=SOME)
    assert found.findings == ["no row of out was written"]


def events_of(spoil, plans):
    events = []
    made = rehearsal()
    machine = Machine(made, spoil)
    rehearse(
        made, plans, lambda kind, data: events.append((kind, data)), run=machine.run
    )
    return events


def test_the_machine_is_told_how_rows_are_cut():
    made = rehearsal()
    ran = Machine(made)
    made.run(schedules(0)[0], made.truth(), run=ran.run)
    problem = made.problem
    assert ran.tiles == {
        **{tensor.address: (1, 16) for tensor in (problem.q, problem.out)},
        **{tensor.address: (1, 4) for tensor in (problem.k, problem.v)},
    }


def test_every_schedule_is_run_and_told():
    plans = schedules(2)
    events = events_of(lambda problem, schedule: None, plans)
    assert [kind for kind, _ in events] == ["start", "run"] * 5
    assert all(data["findings"] == [] for kind, data in events if kind == "run")
    assert [data["schedule"] for _, data in events[::2]] == list(map(name_of, plans))


def test_a_result_that_depends_on_the_schedule_is_found():
    def spoil(problem, schedule):
        if schedule.completion is Completion.LATE:
            problem.out.view[0, 8, 0, 0] ^= 1  # one bit, far within the tolerance

    events = events_of(spoil, schedules(0))
    found = {
        data["schedule"]: data["findings"] for kind, data in events if kind == "run"
    }
    (text,) = found.pop("late")
    assert text == "1 of 2304 elements of out differ from the schedule eager"
    assert list(found.values()) == [[], []]


# --- schedules ----------------------------------------------------------------------------


def test_the_default_schedules_are_every_completion_and_one_of_each_random_order():
    plans = schedules(Choice().schedules)
    names = ["eager", "late", "loads_early_mmas_late", "random-0", "late-1"]
    assert list(map(name_of, plans)) == names
    assert [plan.order for plan in plans[3:]] == [Order.RANDOM_WARPS, Order.STARVATION]


def test_random_schedules_meet_every_completion():
    plans = schedules(80)[3:]
    for completion in Completion:
        mine = [plan for plan in plans if plan.completion is completion]
        assert len({plan.seed for plan in mine}) == 20
        orders = [plan.order for plan in mine]
        assert orders.count(Order.RANDOM_WARPS) == orders.count(Order.STARVATION) == 10


@pytest.mark.parametrize("plan", schedules(8), ids=name_of)
def test_the_name_of_a_schedule_replays_it(plan):
    completion, _, seed = name_of(plan).partition("-")
    again = schedules(1, completion=completion, seed=int(seed) if seed else None)
    assert again == [plan]


# --- constants ----------------------------------------------------------------------------


def test_constants_are_read_without_running_the_module():
    text = (
        'import nothing_there\nSPEC = {"cluster": [2, 1]}\nTILE_Q = 64\n'
        "TILE_KV = 32\nQ_STAGES = 2\nQ_RELEASES = 3\nDTYPE = nothing_there.Type\nboom()\n"
    )
    found = read_constants(text)
    assert found == {
        "SPEC": {"cluster": [2, 1]},
        **{"TILE_Q": 64, "TILE_KV": 32, "Q_STAGES": 2, "Q_RELEASES": 3},
    }
    tiles = tiles_of(found)
    assert (tiles.q, tiles.kv, tiles.cluster, tiles.ctas) == (64, 32, (2, 1), 2)
    assert tiles.q_releases == 6


def test_every_shipped_kernel_says_how_it_cuts_a_problem():
    for path in (Path(__file__).resolve().parents[2] / "generated").glob("*.py"):
        tiles = tiles_of(read_constants(path.read_text(encoding="utf-8")))
        assert tiles.q % 64 == 0 and tiles.ctas in (1, 2)
