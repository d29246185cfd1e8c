# SPDX-License-Identifier: Apache-2.0
"""Schedules, and the verdict on a run: a machine of ours writes what each test wants."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fmha_gen.build import captures
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.emulator.launch import Launch
from fmha_gen.emulator.lower import UnsupportedInstruction
from fmha_gen.emulator.machine import RunResult
from fmha_gen.emulator.ptx import Instruction
from fmha_gen.emulator.report import Finding, Kind
from fmha_gen.emulator.scheduler import Completion, Order, Schedule
from fmha_gen.emulator.writes import Writer, Writes
from fmha_gen.evidence import tensors
from fmha_gen.evidence.emulate import Choice
from fmha_gen.evidence.rehearsal import (
    MOST_BYTES,
    Rehearsal,
    main,
    name_of,
    plans_of,
    rehearse,
    schedules,
    tiles_of,
    with_roundings,
)
from fmha_gen.ops.cases import Case, Tiles

SPEC = {
    "arch": "sm90",
    "dtype": "bf16",
    "op": "fmha_fwd",
    "q_per_kv": 2,
    "head_dim": {"qk": 64, "v": 64},
    "lse": True,
    "mask": "causal",
}
CASE = Case("some", batch=2, kv_heads=1, q=9, kv=7, sm_count=1)
TILES = Tiles(q=8, kv=4, cluster=(2, 1))
FIRST = Writer(cta=0, warp=4, line=100)
OTHER = Writer(cta=3, warp=5, line=200)


def rehearsal(case=CASE, expected=None):
    problem = tensors.make_problem(SPEC, TILES, case)
    return Rehearsal(SPEC, TILES, {}, case, problem, [], expected=expected)


class Machine:
    """Computes what is right, then lets a test spoil it.

    rows: bool [batch, q, heads] of those that it writes, and notes as written; None for all.
    """

    def __init__(self, made, spoil=lambda made, schedule: None, findings=(), rows=None):
        self.made, self.spoil, self.findings = made, spoil, findings
        shape = made.problem["out"].view.shape[:3]
        self.rows = np.ones(shape, np.bool_) if rows is None else rows
        self.tiles = {}

    def run(self, _program, _launch, memory, *, schedule, tiles, **_options):
        truth, problem = self.made.truth(), self.made.problem
        out = tensors.TO_BITS["bf16"](truth.out.astype(np.float32))
        lse = truth.lse.astype(np.float32).view(np.uint32)
        problem["out"].view[self.rows] = out[self.rows]
        of_lse = self.rows.swapaxes(1, 2)
        problem["lse"].view[of_lse] = lse[of_lse]
        self.spoil(problem, schedule)
        self.tiles = tiles
        writes = Writes()
        note(writes, memory, problem, self.rows, FIRST)
        return RunResult(tuple(self.findings), steps=7, writes=writes)


def note(writes, memory, problem, rows, who):
    """Rows of out and LSE are written by a CTA."""
    for output in problem.outputs:
        places = tensors.view_of(np.arange(output.storage.size), output.placed)
        chosen = rows.swapaxes(1, 2) if output.name == "lse" else rows
        (buffer,) = [each for each in memory.buffers if each.name == output.name]
        words = places[chosen].ravel()
        writes.note(buffer, words, output.view.itemsize, who)


def verdict(spoil=lambda problem, schedule: None, findings=(), rows=None, wanted=None):
    made = rehearsal(expected=wanted)
    machine = Machine(made, spoil, findings, rows)
    return made.run(Schedule(), run=machine.run)


def test_what_is_right_holds():
    found = verdict()
    assert found.findings == []
    assert 0 < found.shown.of_bound < 0.5
    assert found.shown.others["lse"].of_bound < 0.5
    assert (found.case, found.schedule, found.steps) == ("some", "eager", 7)
    assert found.rows == found.of_rows == 2 * 9 * 2


def nothing(problem, _schedule):
    problem["out"].view[1, 2, 1, 3] = tensors.NAN16


def more(problem, _schedule):
    out = tensors.FROM_BITS["bf16"](problem["out"].view[0, 6, 1])
    problem["out"].view[0, 6, 1] = tensors.TO_BITS["bf16"](out * np.float32(1.1))


def lse(problem, _schedule):
    problem["lse"].view[0, 0, 5] = np.float32(9).view(np.uint32)


def outside(problem, _schedule):
    problem["out"].storage[0] = 0


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (nothing, "row 2 of head 1, batch 1 of out: NaN"),
        (more, "row 6 of head 1, batch 0 of out: wrong"),
        (lse, "row 5 of head 0, batch 0 of lse: wrong"),
        (outside, "1 elements outside out were written"),
    ],
)
def test_what_is_wrong_is_found(spoil, expected):
    (text,) = verdict(spoil).findings
    assert text.startswith(expected)


def test_a_wrong_row_says_what_it_looks_like():
    def other(problem, _schedule):
        problem["out"].view[1, 6, 1] = problem["out"].view[0, 8, 0]

    (text,) = verdict(other).findings
    assert "; row 6 of head 1, batch 1 is " in text
    assert text.endswith("what row 8 of head 0, batch 0 should be")


def test_findings_of_the_machine_are_passed_on():
    deadlock = Finding(12, Kind.DEADLOCK, "nobody can go on")
    assert verdict(findings=[deadlock]).findings == [str(deadlock)]


def test_an_unknown_instruction_is_a_finding_with_its_line():
    def refuse(*_arguments, **_options):
        raise UnsupportedInstruction(Instruction("foo", ("bar",), (), None, 17))

    found = rehearsal().run(Schedule(), run=refuse)
    assert found.findings == ["PTX line 17: foo.bar is not modelled"]


# --- who wrote what -------------------------------------------------------------------------


def rows_of(*, q=slice(None), batch=slice(None), head=slice(None)):
    rows = np.zeros((2, 9, 2), np.bool_)
    rows[batch, q, head] = True
    return rows


def test_of_some_clusters_only_the_rows_that_they_store_count():
    some = rows_of(q=slice(4))
    found = verdict(rows=some, wanted=some)
    assert found.findings == []
    assert (found.rows, found.of_rows) == (2 * 4 * 2, 2 * 9 * 2)


def test_rows_that_nobody_writes_are_named():
    most = ~rows_of(q=slice(7, 9), batch=1, head=0)
    found = verdict(rows=most).findings
    for name in ("out", "lse"):
        where = "row 7 of head 0, batch 1 and 1 more (rows 7 to 8 in 1 heads)"
        assert f"{where} of {name}: not written" in found


def test_rows_of_others_are_named():
    some = rows_of(q=slice(4))
    found = verdict(rows=rows_of(q=slice(5)), wanted=some).findings
    where = "row 4 of head 0, batch 0 and 3 more (rows 4 in 4 heads)"
    for name in ("out", "lse"):
        text = f"{where} of {name}: written by a CTA that does not own it"
        assert text in found


def test_clusters_that_store_no_row_show_nothing():
    none = rows_of(q=slice(0))
    found = verdict(rows=none, wanted=none).findings
    assert found == ["the clusters that ran store no row of out"]


def test_a_row_that_is_written_twice_is_named_with_who_wrote_it():
    made = rehearsal()
    twice = rows_of(q=3, batch=1, head=1)

    class Twice(Machine):
        def run(self, program, launch, memory, **options):
            result = super().run(program, launch, memory, **options)
            note(result.writes, memory, self.made.problem, twice, OTHER)
            return result

    found = made.run(Schedule(), run=Twice(made).run).findings
    assert found == [
        f"row 3 of head 1, batch 1 of {name}: written 2 times, "
        "by cta 0, warp 4, line 100, then by cta 3, warp 5, line 200"
        for name in ("out", "lse")
    ]


def test_a_row_that_is_written_in_part_is_named():
    made = rehearsal()

    class Part(Machine):
        def run(self, program, launch, memory, **options):
            result = super().run(program, launch, memory, **options)
            problem = self.made.problem
            out = problem["out"]
            places = tensors.view_of(np.arange(out.storage.size), out.placed)
            (buffer,) = [each for each in memory.buffers if each.name == "out"]
            result.writes.note(buffer, places[0, 5, 0, :8], 2, OTHER)
            return result

    some = ~rows_of(q=5, batch=0, head=0)
    found = made.run(Schedule(), run=Part(made, rows=some).run).findings
    assert "row 5 of head 0, batch 0 of out: not written" in found
    assert "row 5 of head 0, batch 0 of lse: not written" in found


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
    made.run(schedules(0)[0], run=ran.run)
    problem = made.problem
    assert ran.tiles == {
        **{tensor.address: (1, 16) for tensor in (problem["q"], problem["out"])},
        **{tensor.address: (1, 4) for tensor in (problem["k"], problem["v"])},
    }


def test_every_schedule_is_run_and_told():
    plans = with_roundings(schedules(2))
    events = events_of(lambda problem, schedule: None, plans)
    assert [kind for kind, _ in events] == ["start", "run"] * 5
    assert all(data["findings"] == [] for kind, data in events if kind == "run")
    names = ["eager", "late+fused", "loads_early_mmas_late", "random-0+fused", "late-1"]
    assert [data["schedule"] for _, data in events[::2]] == names


def test_a_result_that_depends_on_the_schedule_is_found():
    def spoil(problem, schedule):
        if schedule.completion is Completion.LATE:
            problem["out"].view[0, 8, 0, 0] ^= 1  # one bit, far within the tolerance

    events = events_of(spoil, [(plan, False) for plan in schedules(0)])
    found = {
        data["schedule"]: data["findings"] for kind, data in events if kind == "run"
    }
    (text,) = found.pop("late")
    assert text == "1 of 2304 elements of out differ from the schedule eager"
    assert list(found.values()) == [[], []]


def test_bits_may_depend_on_the_rounding():
    """A compiler may fuse a product and a sum: then all schedules are fused alike."""

    class Rounding(Machine):
        def run(self, program, launch, memory, **options):
            result = super().run(program, launch, memory, **options)
            self.made.problem["out"].view[0, 8, 0, 0] ^= program == "fused"
            return result

    made = replace(rehearsal(), fused="fused")
    events = []
    plans = with_roundings(schedules(2))
    rehearse(made, plans, lambda *told: events.append(told), run=Rounding(made).run)
    assert all(data["findings"] == [] for kind, data in events if kind == "run")


def test_a_case_about_function_alone_runs_once_in_each_rounding():
    plans = with_roundings(schedules(2))
    assert plans_of(replace(CASE, timing=True), 1, plans) == plans
    for number in range(9):
        (_, first), (_, second) = plans_of(CASE, number, plans)
        assert first != second
    assert {plans_of(CASE, number, plans)[0] for number in range(9)} == set(plans[:-1])


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
        'import nothing_there\nSPEC = {"cluster": [2, 1], "q_per_kv": 1}\nTILE_Q = 64\n'
        "TILE_KV = 32\nQ_STAGES = 2\nQ_RELEASES = 3\n"
        "RESCALE_SLACK = 7.5\nDTYPE = nothing_there.Type\nboom()\n"
    )
    found = read_constants(text)
    assert found == {
        "SPEC": {"cluster": [2, 1], "q_per_kv": 1},
        **{"TILE_Q": 64, "TILE_KV": 32, "Q_STAGES": 2, "Q_RELEASES": 3},
        "RESCALE_SLACK": 7.5,
    }
    tiles = tiles_of(found)
    assert (tiles.q, tiles.kv, tiles.cluster, tiles.ctas) == (64, 32, (2, 1), 2)
    assert (tiles.q_releases, tiles.slack) == (6, 7.5)


def test_every_shipped_kernel_says_how_it_cuts_a_problem():
    for path in (Path(__file__).resolve().parents[2] / "generated").glob("*.py"):
        tiles = tiles_of(read_constants(path.read_text(encoding="utf-8")))
        assert tiles.q % 64 == 0 and tiles.ctas in (1, 2)


# --- what is too large ----------------------------------------------------------------------


def test_a_forward_call_is_one_launch(tmp_path, monkeypatch):
    small = Path(__file__).resolve().parents[2] / "generated" / "sm90_d64_bf16_full.py"
    one = Launch("k", (1, 1, 1), (128, 1, 1), (1, 1, 1), 0, b"")

    def checked(_kernel, calls, **_options):
        return "", [(one, one) for _ in calls]

    monkeypatch.setattr(captures, "checked", checked)
    events = tmp_path / "events.jsonl"
    main([str(small), str(events)])
    (event,) = [json.loads(line) for line in events.read_text().splitlines()]
    assert event["event"] == "refused"
    assert event["message"].endswith(": 2 launches, fmha_fwd is one")


def test_a_spec_of_2_24_rows_is_refused_with_a_word(tmp_path):
    """Before anything is compiled: in seconds."""
    small = Path(__file__).resolve().parents[2] / "generated" / "sm90_d64_bf16_full.py"
    text = small.read_text(encoding="utf-8")
    fixed = f'"seqlen": {{"q": {2**24}, "kv": {2**24}}}'
    found = read_constants(text)["SPEC"]["seqlen"]
    assert found == {"q": "dynamic", "kv": "dynamic"}
    kernel, events = tmp_path / small.name, tmp_path / "events.jsonl"
    changed = re.sub(r'"seqlen": \{[^}]*\}', fixed, text)
    assert read_constants(changed)["SPEC"]["seqlen"]["q"] == 2**24
    kernel.write_text(changed, encoding="utf-8")
    begin = time.process_time()
    main([str(kernel), str(events)])
    assert time.process_time() - begin < 10
    (event,) = [json.loads(line) for line in events.read_text().splitlines()]
    assert event["event"] == "refused"
    assert event["message"].startswith(f"seqlen {2**24} x {2**24} is too long")
    assert str(MOST_BYTES) in event["message"]
