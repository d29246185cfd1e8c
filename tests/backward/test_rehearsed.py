# SPDX-License-Identifier: Apache-2.0
"""Cases of backward kernels, as `emulate` runs and judges them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fmha_gen.emulator.launch import Launch
from fmha_gen.emulator.machine import RunResult
from fmha_gen.emulator.writes import Writer, Writes
from fmha_gen.evidence import emulate, launches, rehearsal, tensors
from fmha_gen.evidence.rehearsal import schedules
from fmha_gen.host.processes import Ending
from fmha_gen.ops import backward_cases
from fmha_gen.ops.cases import Case, Tiles

from . import kernels
from .rehearsals import rehearsals

FIELDS = kernels.SMALL + "mask: causal\nheads: {q_per_kv: 2}\n"
STEM = "sm90_d64_bf16_causal_gqa2_bwd"
TEXT = kernels.text_of(FIELDS, STEM)
# Few rows that see a key, or few keys: a pair of them takes hundreds of instructions.
SMALL = Case("small", 1, 1, 70, 5, sm_count=1, blocks=4, data="edges")
CASES = (
    SMALL,
    Case("two_tiles", 1, 1, 3, 131, sm_count=1, blocks=4),
    Case("mixed", 2, 2, 3, 5, sm_count=3, blocks=8, layout="mixed", scale_factor=30.0),
    Case("plain", 1, 1, 2, 3, sm_count=1, blocks=2, layout="plain", gradient="large"),
    Case("far", 2, 1, 3, 3, sm_count=2, blocks=4, layout="far", gradient="one_row"),
)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kernels.written(tmp_path_factory.mktemp("kernel"), TEXT, STEM)


def test_a_right_kernel_holds(right: Path) -> None:
    for number, ready in enumerate(rehearsals(right, CASES)):
        schedule = schedules(2)[number % 5]
        found = ready.run(schedule)
        assert found.findings == [], ready.case.name
        told = found.told()
        names = ("of_bound", "dk_of_bound", "dv_of_bound")
        assert all(0 <= told[name] < 0.8 for name in names), told
        assert told["rows"] == told["of_rows"] > 0


def test_sums_without_an_order_are_found_where_a_spec_asks_for_one(
    tmp_path: Path,
) -> None:
    fields, stem = kernels.SMALL + "deterministic: true\n", "sm90_d64_bf16_bwd_det"
    text = kernels.text_of(fields, stem)
    case = Case("tiles", 1, 1, 3, 131, sm_count=2, blocks=4)
    for relaxed, found in (("release", set()), ("relaxed", {"sum-order"})):
        changed = text.replace('sem="release"', f'sem="{relaxed}"')
        path = kernels.written(tmp_path, changed, stem)
        (ready,) = rehearsals(path, [case])
        ran = ready.run(schedules(2)[0])
        assert {each.partition(":")[0] for each in ran.findings} == found


def test_a_run_of_the_command_has_the_errors_of_each_output(
    right: Path, tmp_path: Path
) -> None:
    events = tmp_path / "events.jsonl"
    case = "one_by_one_b1_hkv1_q1_kv1"
    rehearsal.main([str(right), str(events), "--schedules", "0", "--case", case])
    found = [json.loads(line) for line in events.read_text().splitlines()]
    assert [each["event"] for each in found] == ["kernel", *["start", "run"] * 2, "end"]
    choice = emulate.Choice(schedules=0)
    outcome = emulate.judge(right, found, Ending(0, "", 9), choice=choice)
    assert outcome.findings == () and outcome.cases == 1
    assert [*outcome.worst.others] == ["dk", "dv"]
    assert outcome.worst.to_json()["dv_worst"]["case"] == case


# --- without a run ----------------------------------------------------------------------------

SPEC: dict[str, Any] = {
    **{"name": "x", "arch": "sm90", "op": "fmha_bwd", "dtype": "bf16"},
    **{"head_dim": {"qk": 64, "v": 64}, "q_per_kv": 1, "mask": "none"},
    **{"seqlen": {"q": "dynamic", "kv": "dynamic"}, "deterministic": False},
}
TILES = Tiles(64, 128, (1, 1))
CASE = Case("some", 2, 3, 70, 300, sm_count=5)


def launched(*changes: tuple[int, dict[str, Any]]) -> list[Launch]:
    """Launches that are right for `CASE`, with some that are not."""
    grids = {"x_stats_0": (12, 1, 1), "x_1": (5, 1, 1), "x_finish_2": (2, 3, 2)}
    made = [
        {"kernel": name, "grid": grid, "block": (128, 1, 1), "cluster": (1, 1, 1)}
        for name, grid in grids.items()
    ]
    for number, changed in changes:
        made[number] |= changed
    return [Launch(**each, smem_bytes=0, params=b"") for each in made]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], ""),
        ([(1, {"grid": (1, 1, 1)})], ""),
        ([(1, {"grid": (6, 1, 1)})], "6 CTAs for 18 KV tiles: the GPU has 5 SMs"),
        ([(0, {"kernel": "x_1"})], "launches x_1, where x_stats has its turn"),
        ([(2, {"kernel": "x_finished_2"})], "launches x_finished_2, where x_finish"),
        ([(2, {"grid": (2, 3, 65536)})], "x_finish_2 has a grid of [2, 3, 65536] CTAs"),
    ],
)
def test_launches_are_those_of_the_operation(changes: Any, expected: str) -> None:
    found = launches.launches_finding(launched(*changes), TILES, SPEC, CASE)
    assert found.startswith(expected) and bool(found) == bool(expected)


@pytest.mark.parametrize(
    ("ctas", "expected"),
    [
        (2, ""),
        (4, ""),
        (3, "3 CTAs for 18 KV tiles: the GPU has 5 SMs, and a cluster of 2 CTAs takes"),
        (5, "5 CTAs for 18 KV tiles"),
        (6, "6 CTAs for 18 KV tiles"),
    ],
)
def test_pairs_of_ctas_are_launched_whole(ctas: int, expected: str) -> None:
    """300 keys are three pairs of tiles of 64 keys, and five SMs have room for two clusters."""
    tiles, grid = Tiles(64, 64, (1, 1), along_keys=2), (ctas, 1, 1)
    calls = launched((1, {"grid": grid, "cluster": (2, 1, 1)}))
    found = launches.launches_finding(calls, tiles, SPEC, CASE)
    assert found.startswith(expected) and bool(found) == bool(expected)


def test_a_launch_too_few_is_a_finding() -> None:
    found = launches.launches_finding(launched()[:2], TILES, SPEC, CASE)
    assert found == "2 launches, fmha_bwd is 3"


def test_names_of_barriers_and_warps_are_those_of_the_main_kernel() -> None:
    assert launches.is_main("x_1", SPEC) and launches.is_main("x", SPEC)
    assert not launches.is_main("x_stats_0", SPEC)
    assert launches.is_main("anything", {**SPEC, "op": "fmha_fwd"})


def test_lengths_that_are_too_long_are_refused_with_a_word(
    right: Path, tmp_path: Path
) -> None:
    fixed = TEXT.replace('"q": "dynamic", "kv": "dynamic"', '"q": 4096, "kv": 4096')
    assert fixed != TEXT
    path, events = kernels.written(tmp_path, fixed, STEM), tmp_path / "events.jsonl"
    rehearsal.main([str(path), str(events)])
    (event,) = [json.loads(line) for line in events.read_text().splitlines()]
    assert event["event"] == "refused"
    assert event["message"] == f"{rehearsal.NONE_SMALL}; nothing was run"


def events_of(output: str, places: int, step: int) -> list[str]:
    """Findings where of the second schedule some elements of an output differ by so many places.

    A machine of ours writes what is right.
    """
    case = Case("some", 1, 2, 33, 40, sm_count=1)
    problem = tensors.make_problem(SPEC, TILES, case)
    ready = rehearsal.Rehearsal(SPEC, TILES, {}, case, problem, [])
    told: list[dict[str, Any]] = []

    def run(_programs: Any, _launches: Any, memory: Any, **_options: Any) -> RunResult:
        truth, writes = ready.truth(), Writes()
        for each in problem.outputs:
            exact = getattr(truth, each.name).exact.astype(np.float32)
            each.view[...] = tensors.TO_BITS["bf16"](exact)
            assert each.storage is not None
            (buffer,) = [x for x in memory.buffers if x.name == each.name]
            words = tensors.view_of(np.arange(each.storage.size), each.placed)
            writes.note(buffer, words.ravel(), 2, Writer(0, 0, 1))
        if told:
            view = problem[output].view
            for row in [*np.ndindex(view.shape[:3])][:places]:
                view[row][0] += step
        return RunResult((), steps=1, writes=writes)

    def tell(kind: str, data: Any) -> None:
        if kind == "run":
            told.append(data)

    plans = [(schedule, False) for schedule in schedules(0)[:2]]
    rehearsal.rehearse(ready, plans, tell, run=run)
    assert told[0]["findings"] == []
    return list(told[1]["findings"])


@pytest.mark.parametrize(
    ("output", "places", "step", "expected"),
    [
        ("dq", 8, 1, []),
        ("dq", 30, 1, ["30 of 4224 elements of dq differ"]),
        ("dq", 1, 3, ["1 elements of dq differ"]),
        ("dk", 1, 1, ["1 of 5120 elements of dk differ"]),
    ],
)
def test_sums_without_order_may_differ_by_a_last_place_and_no_others(
    output: str, places: int, step: int, expected: list[str]
) -> None:
    found = events_of(output, places, step)
    assert len(found) == len(expected)
    for text, words in zip(found, expected, strict=True):
        assert text.startswith(f"{words} from the schedule eager")
        assert text.endswith("by more than a last place") == (step > 1)


def test_pairs_and_tiles_are_counted() -> None:
    assert backward_cases.pairs(CASE, SPEC, TILES) == 2 * 3 * 2 * 3
    assert backward_cases.work_tiles(CASE, TILES) == 18
