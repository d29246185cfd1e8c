# SPDX-License-Identifier: Apache-2.0
"""Rounds find the true ratios on a card whose speed drifts; what is not proven does not win."""

from __future__ import annotations

import math
import random

import pytest
from fmha_gen.tune.rounds import MIN_GAIN, play, score, seconds


class DriftingCard:
    """Times contenders that take ``truth`` seconds, slower by ``drift`` with each turn."""

    def __init__(self, truth: dict[str, float], drift: float) -> None:
        self.truth, self.drift = truth, drift
        self.turns: list[str] = []

    def take(self, name: str) -> float:
        slower = 1 + self.drift * len(self.turns)
        self.turns.append(name)
        return self.truth[name] * slower


def test_everyone_has_two_turns_a_round_mirrored() -> None:
    card = DriftingCard(dict.fromkeys("abc", 1.0), 0.0)
    rounds = list(play("abc", card.take, 4, random.Random(1)))
    assert [set(one) for one in rounds] == [set("abc")] * 4
    orders = [card.turns[i : i + 6] for i in range(0, 24, 6)]
    assert all(order == order[::-1] for order in orders)
    assert len(set(map(tuple, orders))) > 1


@pytest.mark.parametrize("drift", [0.01, 0.1, -0.005])
def test_a_drift_does_not_reach_the_ratios(drift: float) -> None:
    truth = {"incumbent": 1.0, "same": 1.0, "faster": 0.98, "slower": 1.03}
    card = DriftingCard(truth, drift)
    played = {"p": list(play(list(truth), card.take, 5, random.Random(3)))}
    for name, time in truth.items():
        # What is left is of second order: the drift within a round, squared.
        within = (drift * len(truth)) ** 2
        found = score(played, name, "incumbent")
        assert found.time == pytest.approx(time, rel=min(within, 0.009))
    # One after the other, as no round is played, the drift would be the result.
    one_way = card.take("same") / card.take("slower")
    assert one_way != pytest.approx(1 / 1.03, rel=1e-6)


def test_a_score_is_the_median_round_of_the_mean_problem() -> None:
    played = {
        "p": [{"x": 1.0, "i": 2.0}, {"x": 1.0, "i": 2.0}, {"x": 9.0, "i": 2.0}],
        "q": [{"x": 8.0, "i": 1.0}, {"x": 2.0, "i": 1.0}, {"x": 1.0, "i": 1.0}],
    }
    found = score(played, "x", "i")
    assert found.time == pytest.approx(2.0)  # of 2, 1 and sqrt(4.5)
    assert found.problems == {"p": 0.5, "q": 2.0}
    assert found.spread == pytest.approx((2 + math.sqrt(4.5)) / 2 - 1.5)
    assert seconds(played, "i") == {"p": 2.0, "q": 1.0}


def test_a_ratio_is_that_of_its_own_round() -> None:
    played = {"p": [{"x": 0.5, "i": 1.0}, {"x": 5.0, "i": 10.0}]}
    assert score(played, "x", "i").time == 0.5
    assert score(played, "x", "i").spread == 0


def of_rounds(*times: float) -> bool:
    return score({"p": [{"x": one, "i": 1.0} for one in times]}, "x", "i").proven


def test_proven_is_faster_by_more_than_the_spread() -> None:
    assert of_rounds(0.97, 0.97, 0.98, 0.98)
    assert not of_rounds(1.0, 1.0, 1.0)  # a tie
    assert not of_rounds(1.02, 1.03, 1.02)
    assert not of_rounds(0.90, 0.99, 1.05, 0.97, 0.93)  # as wide as it is fast


def test_proven_is_worth_a_review() -> None:
    assert not of_rounds(*[1 - 0.9 * MIN_GAIN] * 5)
    assert of_rounds(*[1 - 1.1 * MIN_GAIN] * 5)
