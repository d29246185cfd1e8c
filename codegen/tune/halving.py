# SPDX-License-Identifier: Apache-2.0
"""Successive halving: every candidate for a few rounds, the better share for more, until few stay.

Kernels are timed in heats, a process each, with the incumbent in every heat. In a round every
contender of the heat has a turn in random order, and only ratios to the incumbent within a round
are compared: heat and power then slow down all of them alike. The last step alone decides, because
a candidate that earlier rounds selected looks better in those than it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Protocol

from ..errors import CheckFailed
from ..evidence import evaluation
from .journal import Heat, Journal, Terms

ROUNDS: Final = (2, 4, 8, 16)  # of each step
SHARE: Final = 1 / 4  # of the candidates that goes on to the next step
FINALISTS: Final = 2  # at most in the last step, and at least while there are others
HEAT: Final = (
    8  # candidates beside the incumbent: what a process that dies has to repeat
)
MIN_GAIN: Final = 0.005  # of the time; a smaller one is not worth a review


class Gpu(Protocol):
    """Where kernels run; tests put a model in its place. Contenders are body digests."""

    def check(self, names: Sequence[str]) -> Generator[tuple[str, str], None, None]:
        """Hold each against float64 in a process of its own: why it fails, or nothing.

        In the order in which they end; closing this early ends the rest.
        """

    def race(self, names: Sequence[str], rounds: int) -> Heat:
        """Time kernels in turn, the incumbent first."""


@dataclass(frozen=True)
class Score:
    """A contender's time over the incumbent's: below 1 is faster.

    time: median over the rounds of the geometric mean over the problems. spread: the middle half
    of the rounds lies within it. problems: the median of each. seconds: per launch, by problem.
    """

    time: float
    spread: float
    problems: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def gain(self) -> float:
        """Share of the incumbent's time that is saved."""
        return 1 - self.time

    @property
    def proven(self) -> bool:
        """Whether it is faster than the incumbent by more than its spread, and worth it."""
        return self.gain > max(self.spread, MIN_GAIN)


def score(heat: Heat, name: str) -> Score:
    """A contender's score in a heat of two rounds at least."""
    at = heat.contenders.index(name)
    ratios = {
        problem: [one[at] / one[0] for one in rounds]
        for problem, rounds in heat.rounds.items()
    }
    means = [
        statistics.geometric_mean(one) for one in zip(*ratios.values(), strict=True)
    ]
    low, _, high = statistics.quantiles(means, n=4, method="inclusive")
    return Score(
        time=statistics.median(means),
        spread=high - low,
        problems={name: statistics.median(one) for name, one in ratios.items()},
        seconds={
            problem: statistics.median(one[at] for one in rounds)
            for problem, rounds in heat.rounds.items()
        },
    )


@dataclass
class Standing:
    """What is known of a candidate. rounds: of the last step that it took part in."""

    rejected: str = ""
    score: Score | None = None
    rounds: int = 0

    @property
    def final(self) -> bool:
        """Whether it took part in the last step."""
        return not self.rejected and self.rounds == ROUNDS[-1]


Standings = Mapping[str, Standing]  # by contender, without the incumbent


def winner(standings: Standings) -> str | None:
    """The fastest of the last step that are proven; None: the incumbent stays."""
    times = {
        name: one.score.time
        for name, one in standings.items()
        if one.final and one.score and one.score.proven
    }
    return min(times, key=lambda name: times[name], default=None)


@dataclass(frozen=True)
class Search:
    """One search; what the journal knows is not measured again."""

    incumbent: str
    gpu: Gpu
    journal: Journal
    terms: Terms

    def run(self, names: Sequence[str]) -> Standings:
        """Check and time candidates. Raises CheckFailed when the incumbent fails."""
        standings = {name: Standing() for name in names}
        self._check(standings)
        alive = [name for name, one in standings.items() if not one.rejected]
        for rounds in ROUNDS:
            if rounds == ROUNDS[-1]:
                alive = alive[:FINALISTS]
            elif len(alive) <= FINALISTS:
                continue  # no candidate would leave
            alive = self._step(standings, alive, rounds)
            alive = alive[: max(FINALISTS, math.ceil(len(alive) * SHARE))]
        return standings

    def _check(self, standings: Mapping[str, Standing]) -> None:
        names = [self.incumbent, *standings]
        todo = [name for name in names if not self.journal.known(self._passed(name))]
        with (
            evaluation.progress_bar("check", len(todo)) as advance,
            closing(self.gpu.check(todo)) as found,
        ):
            for name, why in found:
                key = None if why else self._passed(name)
                self.journal.note(event="check", key=key, body=name, rejected=why)
                if why:
                    self._reject(standings, name, why)
                advance(name)

    def _passed(self, name: str) -> str:
        return self.terms.key("check", name)

    def _step(
        self, standings: Mapping[str, Standing], names: Sequence[str], rounds: int
    ) -> list[str]:
        """Time candidates; those that did not fail, the fastest first."""
        times = {}
        heats = [names[i : i + HEAT] for i in range(0, len(names), HEAT)]
        with evaluation.progress_bar(f"{rounds} rounds", len(heats)) as advance:
            for some in heats:
                heat = self._heat(standings, some, rounds)
                for name in heat.contenders[1:]:
                    found = score(heat, name)
                    standings[name].score, standings[name].rounds = found, rounds
                    times[name] = found.time
                advance(heat)
        return sorted(times, key=lambda name: times[name])

    def _heat(
        self, standings: Mapping[str, Standing], names: Sequence[str], rounds: int
    ) -> Heat:
        """A complete heat: a candidate that fails leaves it, and the others run again."""
        terms = self.terms
        while names:
            contenders = [self.incumbent, *names]
            key = terms.key("heat", str(rounds), self.incumbent, *sorted(names))
            if known := self.journal.known(key):
                return Heat(known["contenders"], known["rounds"])
            heat = self.gpu.race(contenders, rounds)
            self.journal.note(
                event="heat",
                key=None if heat.rejected else key,
                gpu=terms.gpu,
                driver=terms.driver,
                dsl=terms.dsl,
                contenders=contenders,
                rounds=heat.rounds,
                rejected=heat.rejected,
            )
            if not heat.rejected:
                return heat
            for name, why in heat.rejected.items():
                self._reject(standings, name, why)
            names = [name for name in names if name not in heat.rejected]
        return Heat([self.incumbent])

    def _reject(self, standings: Mapping[str, Standing], name: str, why: str) -> None:
        if name == self.incumbent:
            raise CheckFailed(
                f"the spec as it is fails, so nothing can be compared: {why}"
            )
        standings[name].rejected = why
