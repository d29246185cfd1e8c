# SPDX-License-Identifier: Apache-2.0
"""The tournament finds who is fastest, keeps the incumbent when in doubt, and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fmha_gen.errors import CheckFailed
from fmha_gen.tune.journal import Journal
from fmha_gen.tune.search import ALONE_ROUNDS, LATER, Standings, Tournament

from .model import INCUMBENT, TERMS, ModelArena

FIELD = {f"c{i}": 1.0 + 0.01 * i for i in range(-3, 30)}  # c-3 is the fastest


def search(
    arena: ModelArena, folder: Path, names: list[str] | None = None
) -> Standings:
    with Journal(folder / "k.tune.jsonl") as journal:
        tournament = Tournament(INCUMBENT, arena, journal, TERMS)
        return tournament.run(names or [n for n in arena.truth if n != INCUMBENT])


def arena(**options) -> ModelArena:
    return ModelArena({INCUMBENT: 1.0, **FIELD}, **options)


def test_the_fastest_wins(tmp_path: Path) -> None:
    found = search(arena(), tmp_path)
    assert found.winner == "c-3"
    standing = found.of["c-3"]
    assert standing.final and standing.rounds == LATER[-1][1]
    assert standing.score is not None
    assert standing.score.gain == pytest.approx(0.03)


@pytest.mark.parametrize("drift", [1e-3, -1e-4])
def test_a_drifting_and_jittering_card_has_the_same_winner(
    tmp_path: Path, drift: float
) -> None:
    found = search(arena(drift=drift, jitter=0.002), tmp_path)
    assert found.winner == "c-3"
    score = found.of["c-3"].score
    assert score is not None and score.gain == pytest.approx(0.03, abs=0.003)


def test_everyone_runs_and_few_go_on(tmp_path: Path) -> None:
    model = arena()
    search(model, tmp_path)
    alone = [names for names, rounds in model.heats if rounds == ALONE_ROUNDS]
    assert alone[0] == (INCUMBENT,)
    assert {names[1] for names in alone[1:]} == set(FIELD)
    later = [heat for heat in model.heats if heat[1] != ALONE_ROUNDS]
    (first, few), (last, many) = later
    # 1 % to 2 % slower ones may have been unlucky; who is further behind was not.
    assert set(first) == {INCUMBENT, "c-3", "c-2", "c-1", "c0", "c1"}
    assert last == (INCUMBENT, "c-3", "c-2")
    assert (few, many) == (LATER[0][1], LATER[1][1])


def test_ties_keep_the_incumbent(tmp_path: Path) -> None:
    same = ModelArena({INCUMBENT: 1.0, "a": 1.0, "b": 1.0}, jitter=0.003)
    assert search(same, tmp_path).winner is None


def test_a_gain_within_the_spread_keeps_the_incumbent(tmp_path: Path) -> None:
    noisy = ModelArena({INCUMBENT: 1.0, "a": 0.99}, jitter=0.2)
    found = search(noisy, tmp_path)
    assert found.winner is None
    calm = ModelArena({INCUMBENT: 1.0, "a": 0.99}, jitter=0.001)
    assert search(calm, tmp_path / "calm").winner == "a"


def test_slower_ones_keep_the_incumbent(tmp_path: Path) -> None:
    found = search(ModelArena({INCUMBENT: 1.0, "a": 1.01, "b": 1.5}), tmp_path)
    assert found.winner is None
    assert not found.of["b"].final


def test_few_go_to_the_last_heat_at_once(tmp_path: Path) -> None:
    model = ModelArena({INCUMBENT: 1.0, "a": 0.97, "b": 1.01, "c": 1.5})
    assert search(model, tmp_path).winner == "a"
    (last,) = [heat for heat in model.heats if heat[1] != ALONE_ROUNDS]
    assert last == ((INCUMBENT, "a", "b"), LATER[-1][1])


def test_luck_in_an_early_round_takes_nobody_to_the_end(tmp_path: Path) -> None:
    (most, few), (_, many) = LATER
    truth = {INCUMBENT: 1.0, **{f"c{i}": 1.0 + 0.001 * i for i in range(1, most + 1)}}
    # The last one misses the heat of the six; it would be ahead of them in what they show there.
    left = {**truth, "late": 1.008}
    shown = {name: 1.015 for name in truth if name != INCUMBENT}
    model = ModelArena(left, lucky={few: shown})
    assert search(model, tmp_path / "left").winner is None
    assert all("late" not in names for names, rounds in model.heats if rounds == many)
    # The third of the six is not in the last heat; there the others are slower than it was.
    six = {few: {"c1": 0.97, "c2": 0.971, "c3": 0.972}, many: {"c1": 0.99, "c2": 0.98}}
    assert search(ModelArena(truth, lucky=six), tmp_path / "third").winner == "c2"
    six[many] = {"c1": 1.01, "c2": 1.01}
    assert search(ModelArena(truth, lucky=six), tmp_path / "none").winner is None


def test_nobody_else_is_no_search(tmp_path: Path) -> None:
    model = ModelArena({INCUMBENT: 1.0})
    found = search(model, tmp_path, names=[])
    assert (found.winner, model.heats) == (None, [((INCUMBENT,), ALONE_ROUNDS)])


def test_who_is_wrong_or_hangs_is_never_timed(tmp_path: Path) -> None:
    faults = {"c-3": "wrong: plain: error 1", "c-2": "hung: more than 60 s (check)"}
    found = search(arena(faults=faults), tmp_path)
    assert found.winner == "c-1"
    for name, why in faults.items():
        assert found.of[name].rejected == why
        assert found.of[name].score is None


def test_only_who_is_wrong_is_not_tried_again(tmp_path: Path) -> None:
    """A hang may be a short limit, and a lack of memory somebody else's program."""
    faults = {"c-3": "hung: more than 5 s (check)", "c-2": "wrong: plain: error 1"}
    assert search(arena(faults=faults), tmp_path).winner == "c-1"
    noted = (tmp_path / "k.tune.jsonl").read_text()
    assert all(why in noted for why in faults.values())
    again = arena()
    assert search(again, tmp_path).winner == "c-3"
    alone = [names for names, rounds in again.heats if rounds == ALONE_ROUNDS]
    assert alone == [(INCUMBENT, "c-3")]


def test_who_fails_among_others_is_dropped_and_the_heat_repeated(
    tmp_path: Path,
) -> None:
    model = arena(later_faults={"c-3": "hung: more than 60 s (p)"})
    found = search(model, tmp_path)
    assert found.winner == "c-2"
    assert found.of["c-3"].rejected.startswith("hung")
    repeated = [names for names, rounds in model.heats if rounds == LATER[0][1]]
    assert "c-3" in repeated[0]
    assert set(repeated[1]) == set(repeated[0]) - {"c-3"}


@pytest.mark.parametrize("when", ["faults", "later_faults"])
def test_an_incumbent_that_fails_ends_it_and_is_tried_again(
    tmp_path: Path, when: str
) -> None:
    with pytest.raises(CheckFailed, match=r"the spec as it is fails, .*: wrong$"):
        search(arena(**{when: {INCUMBENT: "wrong"}}), tmp_path)
    assert search(arena(), tmp_path).winner == "c-3"


def test_processes_end_before_an_error_is_told(tmp_path: Path) -> None:
    model = arena(faults={"c5": "incumbent crashed"})
    with pytest.raises(CheckFailed, match="incumbent crashed") as error:
        search(model, tmp_path)
    assert error.tb  # it still holds the search's frames, and with them its generators
    assert not model.running


def test_processes_end_when_the_display_is_interrupted(tmp_path: Path) -> None:
    model = arena()

    def interrupted(standings: Standings) -> None:
        if standings.of["c5"].rounds:
            raise Killed

    with (
        Journal(tmp_path / "k.tune.jsonl") as journal,
        pytest.raises(Killed) as error,
    ):
        Tournament(INCUMBENT, model, journal, TERMS, changed=interrupted).run([*FIELD])
    assert error.tb
    assert not model.running


class Killed(BaseException):
    """What ^C raises, but not caught by pytest."""


class DyingArena(ModelArena):
    """Dies before the turn ``dies``."""

    dies = 0

    def take(self, name: str) -> float:
        if self.turns == self.dies:
            raise Killed
        return super().take(name)


def test_a_killed_search_resumes_wherever_it_died(tmp_path: Path) -> None:
    truth = {INCUMBENT: 1.0, "a": 0.97, "b": 0.98, "c": 0.99, "d": 1.3}
    whole = ModelArena(truth)
    assert search(whole, tmp_path / "whole").winner == "a"
    assert whole.turns > 100
    for dies in range(0, whole.turns, 29):
        folder = tmp_path / str(dies)
        first = DyingArena(truth)
        first.dies = dies
        with pytest.raises(Killed):
            search(first, folder)
        second = ModelArena(truth)
        assert search(second, folder).winner == "a"
        done = first.heats[:-1]  # the last one died
        assert done + second.heats == whole.heats


def test_a_finished_search_is_not_run_again(tmp_path: Path) -> None:
    search(arena(), tmp_path)
    again = arena()
    assert search(again, tmp_path).winner == "c-3"
    assert again.heats == []


def test_standings_are_told_as_they_change(tmp_path: Path) -> None:
    told = []
    model = ModelArena({INCUMBENT: 1.0, "a": 0.97})
    with Journal(tmp_path / "k.tune.jsonl") as journal:
        Tournament(
            INCUMBENT,
            model,
            journal,
            TERMS,
            changed=lambda standings: told.append(
                (standings.of["a"].rounds, standings.winner)
            ),
        ).run(["a"])
    assert told == [(0, None), (ALONE_ROUNDS, None), (15, None), (15, "a")]
