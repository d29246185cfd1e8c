# SPDX-License-Identifier: Apache-2.0
"""The search finds the fastest candidate, keeps the incumbent when in doubt, and resumes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from fmha_gen.errors import CheckFailed
from fmha_gen.tune.halving import (
    FINALISTS,
    HEAT,
    MIN_GAIN,
    ROUNDS,
    Search,
    Standings,
    score,
    winner,
)
from fmha_gen.tune.journal import Heat, opened

from .model import INCUMBENT, TERMS, ModelGpu

FIELD = {f"c{i}": 1.0 + 0.01 * i for i in range(-3, 30)}  # c-3 is the fastest


def search(gpu: ModelGpu, folder: Path, names: list[str] | None = None) -> Standings:
    with opened(folder / "k.tune.jsonl") as journal:
        others = [name for name in gpu.truth if name != INCUMBENT]
        run = Search(INCUMBENT, gpu, journal, TERMS).run
        return run(others if names is None else names)


def field(**options) -> ModelGpu:
    return ModelGpu({INCUMBENT: 1.0, **FIELD}, **options)


def of(gpu: ModelGpu, folder: Path) -> str | None:
    return winner(search(gpu, folder))


# --- scores -------------------------------------------------------------------------------


def test_a_score_is_the_median_round_of_the_mean_problem() -> None:
    rounds = {
        "p": [[2.0, 1.0], [2.0, 1.0], [2.0, 9.0]],
        "q": [[1.0, 8.0], [1.0, 2.0], [1.0, 1.0]],
    }
    found = score(Heat("ix", rounds), "x")
    assert found.time == pytest.approx(2.0)  # of 2, 1 and sqrt(4.5)
    assert found.problems == {"p": 0.5, "q": 2.0}
    assert found.seconds == {"p": 1.0, "q": 2.0}
    assert found.spread == pytest.approx((2 + math.sqrt(4.5)) / 2 - 1.5)


def test_a_ratio_is_that_of_its_own_round() -> None:
    found = score(Heat("ix", {"p": [[1.0, 0.5], [10.0, 5.0]]}), "x")
    assert (found.time, found.spread) == (0.5, 0)


@pytest.mark.parametrize(
    ("times", "proven"),
    [
        ((0.97, 0.97, 0.98, 0.98), True),
        ((1.0, 1.0, 1.0), False),  # a tie
        ((1.02, 1.03, 1.02), False),
        ((0.90, 0.99, 1.05, 0.97, 0.93), False),  # as wide as it is fast
        ([1 - 0.9 * MIN_GAIN] * 5, False),  # not worth a review
        ([1 - 1.1 * MIN_GAIN] * 5, True),
    ],
)
def test_proven_is_faster_by_more_than_the_spread(times, proven: bool) -> None:
    heat = Heat("ix", {"p": [[1.0, one] for one in times]})
    assert score(heat, "x").proven == proven


# --- steps --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drift", "jitter"), [(0.0, 0.0), (1e-4, 0.002), (-1e-5, 0.002)]
)
def test_the_fastest_wins_whatever_the_card_does(
    tmp_path: Path, drift: float, jitter: float
) -> None:
    found = search(field(drift=drift, jitter=jitter), tmp_path)
    assert winner(found) == "c-3"
    one = found["c-3"]
    assert one.final and one.rounds == ROUNDS[-1] and one.score is not None
    assert one.score.gain == pytest.approx(0.03, abs=1e-9 + 2 * jitter)


def test_every_step_has_more_rounds_and_fewer_candidates(tmp_path: Path) -> None:
    gpu = field()
    search(gpu, tmp_path)
    assert sorted(gpu.checked) == sorted([INCUMBENT, *FIELD])
    assert all(names[0] == INCUMBENT for names, _ in gpu.heats)
    assert all(len(names) <= 1 + HEAT for names, _ in gpu.heats)
    timed = {
        rounds: [x for names, r in gpu.heats if r == rounds for x in names[1:]]
        for rounds in ROUNDS
    }
    assert timed[2] == list(FIELD)
    assert timed[4] == [f"c{i}" for i in range(-3, 6)]  # a quarter of 33
    assert timed[8] == ["c-3", "c-2", "c-1"]
    assert timed[16] == ["c-3", "c-2"]


def test_few_go_to_the_last_step_at_once(tmp_path: Path) -> None:
    gpu = ModelGpu({INCUMBENT: 1.0, "a": 0.97, "b": 1.01})
    assert of(gpu, tmp_path) == "a"
    assert gpu.heats == [((INCUMBENT, "a", "b"), ROUNDS[-1])]


def test_no_other_candidate_is_no_search(tmp_path: Path) -> None:
    gpu = ModelGpu({INCUMBENT: 1.0})
    assert search(gpu, tmp_path, []) == {}
    assert (gpu.checked, gpu.heats) == ([INCUMBENT], [])


@pytest.mark.parametrize(
    ("times", "jitter"),
    [
        ({"a": 1.0, "b": 1.0}, 0.003),  # ties
        ({"a": 0.99}, 0.2),  # a gain within the spread
        ({"a": 1.01, "b": 1.5}, 0.0),
    ],
)
def test_in_doubt_the_incumbent_stays(tmp_path: Path, times, jitter: float) -> None:
    assert of(ModelGpu({INCUMBENT: 1.0, **times}, jitter=jitter), tmp_path) is None


def test_the_last_step_alone_decides(tmp_path: Path) -> None:
    truth = {INCUMBENT: 1.0, **{f"c{i}": 1.0 + 0.001 * i for i in range(1, 7)}}
    early = {ROUNDS[0]: {"c1": 0.97, "c2": 0.971, "c3": 0.972}}
    last = {ROUNDS[-1]: {"c1": 0.99, "c2": 0.98}}
    gpu = ModelGpu(truth, lucky={**early, **last})
    assert of(gpu, tmp_path / "two") == "c2"
    last = {ROUNDS[-1]: {"c1": 1.01, "c2": 1.01}}
    assert of(ModelGpu(truth, lucky={**early, **last}), tmp_path / "none") is None
    assert len([one for one in gpu.heats if one[1] == ROUNDS[-1]]) == 1
    assert len(gpu.heats[-1][0]) == 1 + FINALISTS


# --- failures -----------------------------------------------------------------------------


def test_a_candidate_that_fails_its_check_is_never_timed(tmp_path: Path) -> None:
    faults = {"c-3": "plain: error 1", "c-2": "many: did not end within 60 s"}
    gpu = field(faults=faults)
    found = search(gpu, tmp_path)
    assert winner(found) == "c-1"
    for name, why in faults.items():
        assert (found[name].rejected, found[name].score) == (why, None)
        assert not any(name in names for names, _ in gpu.heats)
        assert why in (tmp_path / "k.tune.jsonl").read_text()


def test_a_failure_is_tried_again_the_next_time(tmp_path: Path) -> None:
    """It may be a short limit, or the memory of another program."""
    faults, late = {"c-3": "hung"}, {"c-2": "hung"}
    assert of(field(faults=faults, late_faults=late), tmp_path) == "c-1"
    again = field()
    assert of(again, tmp_path) == "c-3"
    assert again.checked == ["c-3"]


def test_a_candidate_that_fails_in_a_heat_leaves_it_and_the_others_run_again(
    tmp_path: Path,
) -> None:
    gpu = field(late_faults={"c-3": "b1: hung: more than 60 s"})
    found = search(gpu, tmp_path)
    assert winner(found) == "c-2"
    assert found["c-3"].rejected.startswith("b1: hung")
    (first, _), (again, _) = gpu.heats[:2]
    assert set(first) - set(again) == {"c-3"}
    assert sum("c-3" in names for names, _ in gpu.heats) == 1


def test_candidates_that_all_fail_leave_the_incumbent(tmp_path: Path) -> None:
    late = dict.fromkeys("abc", "crashed")
    gpu = ModelGpu({INCUMBENT: 1.0, "a": 0.9, "b": 0.9, "c": 0.9}, late_faults=late)
    assert of(gpu, tmp_path) is None


@pytest.mark.parametrize("when", ["faults", "late_faults"])
def test_an_incumbent_that_fails_ends_it_and_is_tried_again(
    tmp_path: Path, when: str
) -> None:
    gpu = field(**{when: {INCUMBENT: "wrong"}})
    with pytest.raises(CheckFailed, match=r"the spec as it is fails, .*: wrong$") as it:
        search(gpu, tmp_path)
    assert it.tb and not gpu.running  # its frames live, but processes have ended
    assert of(field(), tmp_path) == "c-3"


# --- resuming -----------------------------------------------------------------------------


class Killed(BaseException):
    """What ^C raises, but not caught by pytest."""


class DyingGpu(ModelGpu):
    """Dies before the turn ``dies``."""

    dies = 0

    def take(self, seconds: float) -> float:
        if self.taken == self.dies:
            raise Killed
        return super().take(seconds)


def test_a_killed_search_resumes_wherever_it_died(tmp_path: Path) -> None:
    truth = {INCUMBENT: 1.0, "a": 0.97, "b": 0.98, "c": 0.99, "d": 1.3}
    whole = ModelGpu(truth)
    assert of(whole, tmp_path / "whole") == "a"
    assert whole.taken > 100
    for dies in range(0, whole.taken, 29):
        first, second = DyingGpu(truth), ModelGpu(truth)
        first.dies = dies
        with pytest.raises(Killed):
            search(first, tmp_path / str(dies))
        assert of(second, tmp_path / str(dies)) == "a"
        done = first.heats[:-1]  # the last one died
        assert done + second.heats == whole.heats
        assert second.checked == []


def test_a_finished_search_is_not_run_again(tmp_path: Path) -> None:
    assert of(field(), tmp_path) == "c-3"
    again = field()
    assert of(again, tmp_path) == "c-3"
    assert (again.checked, again.heats) == ([], [])
