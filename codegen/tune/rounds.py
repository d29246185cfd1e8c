# SPDX-License-Identifier: Apache-2.0
"""How rounds are played, and what they prove; pure.

In a round everyone is timed there and back: in a random order, then in its reverse. A card that
gets slower or faster at a constant rate treats all alike, because each one's two turns lie around
the same moment. Whoever is compared was timed within the same rounds as the incumbent, and only
ratios to it are ever compared.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..bench.timing import turns

MIN_GAIN: Final = 0.005  # of the time; a smaller one is not worth a review

Round = Mapping[str, float]  # seconds per launch, by contender
Played = Mapping[str, Sequence[Round]]  # rounds by problem


def play(
    names: Sequence[str], take: Callable[[str], float], rounds: int, dice: random.Random
) -> Iterator[dict[str, float]]:
    """Rounds of one problem; ``take`` times a contender once, in seconds per launch."""
    for order in turns(names, rounds, dice):
        there = {name: take(name) for name in order}
        yield {name: math.sqrt(there[name] * take(name)) for name in reversed(order)}


@dataclass(frozen=True)
class Score:
    """A contender's time over the incumbent's: below 1 is faster.

    time: median over the rounds of the geometric mean over the problems. spread: the middle half
    of the rounds lies within it. problems: the median of each one.
    """

    time: float
    spread: float
    problems: Mapping[str, float]

    @property
    def gain(self) -> float:
        """Share of the incumbent's time that is saved."""
        return 1 - self.time

    @property
    def proven(self) -> bool:
        """Whether it is faster than the incumbent by more than its spread, and worth it."""
        return self.gain > max(self.spread, MIN_GAIN)


def score(played: Played, name: str, incumbent: str) -> Score:
    """What rounds say about one contender."""
    ratios = {
        problem: [one[name] / one[incumbent] for one in rounds]
        for problem, rounds in played.items()
    }
    means = [
        statistics.geometric_mean(one) for one in zip(*ratios.values(), strict=True)
    ]
    return Score(
        time=statistics.median(means),
        spread=_middle_half(means),
        problems={name: statistics.median(one) for name, one in ratios.items()},
    )


def seconds(played: Played, name: str) -> dict[str, float]:
    """Median seconds per launch, by problem."""
    return {
        problem: statistics.median(one[name] for one in rounds)
        for problem, rounds in played.items()
    }


def _middle_half(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low
