# SPDX-License-Identifier: Apache-2.0
"""The tournament: who is tried, who goes on, and who wins.

Everyone first runs alone with the incumbent. Those that come close go on to heats together, fewer
of them and for more rounds each time. Only the rounds of the last heat decide: those that somebody
was selected by favour him. Contenders are body digests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final, Protocol

from ..errors import CheckFailed
from .journal import Heat, Journal, Terms
from .rounds import Played, Score, score

ALONE_ROUNDS: Final = 2
LATER: Final = ((6, 5), (2, 15))  # the most contenders of a heat, and its rounds
CLOSE: Final = 1.02  # time over the incumbent's with which one goes on

Heats = Generator[tuple[str, Heat], None, None]  # by contender


class Arena(Protocol):
    """Where contenders run; tests put a model in its place."""

    def alone(self, incumbent: str, names: Sequence[str], rounds: int) -> Heats:
        """Check each one, then time it beside the incumbent; in the order in which they end.

        Whoever closes this early ends what still runs.
        """

    def together(self, incumbent: str, names: Sequence[str], rounds: int) -> Heat:
        """Time them and the incumbent in the same rounds."""


@dataclass
class Standing:
    """What is known of one contender. rounds: of its last heat; final: that was the last one."""

    rejected: str = ""
    score: Score | None = None
    rounds: int = 0
    final: bool = False


@dataclass
class Standings:
    """Everyone's, by contender; ``played``: the rounds of the incumbent's own first run."""

    played: Played = field(default_factory=dict)
    of: dict[str, Standing] = field(default_factory=dict)
    winner: str | None = None  # None: the incumbent stays


@dataclass(frozen=True)
class Tournament:
    """One search. changed: called whenever the standings have changed."""

    incumbent: str
    arena: Arena
    journal: Journal
    terms: Terms
    changed: Callable[[Standings], object] = lambda standings: None

    def run(self, names: Sequence[str]) -> Standings:
        """Find the fastest of the incumbent and ``names``.

        Raises CheckFailed when the incumbent is wrong or does not run.
        """
        standings = Standings(of={name: Standing() for name in names})
        self.changed(standings)
        for _, heat in self._alone([self.incumbent]):
            standings.played = heat.played
        with closing(self._alone(names)) as heats:
            for name, heat in heats:
                self._enter(standings, [name], heat, ALONE_ROUNDS)
        finalists, _ = LATER[-1]
        for most, rounds in LATER:
            alive = _closest(standings, most)
            final = (most, rounds) == LATER[-1]
            if not final and len(alive) <= finalists:
                continue  # nobody to choose from
            heat = self._together(standings, alive, rounds)
            alive = [name for name in alive if name not in heat.rejected]
            self._enter(standings, alive, heat, rounds, final=final)
        standings.winner = _winner(standings)
        self.changed(standings)
        return standings

    def _alone(self, names: Sequence[str]) -> Heats:
        """First runs: those that the journal knows, then the others as they end."""
        todo = []
        for name in names:
            known = self.journal.heat(self._key([name], ALONE_ROUNDS))
            if known is None:
                todo.append(name)
            else:
                yield name, known
        with closing(self.arena.alone(self.incumbent, todo, ALONE_ROUNDS)) as heats:
            for name, heat in heats:
                self._note([name], ALONE_ROUNDS, heat)
                yield name, heat

    def _together(
        self, standings: Standings, names: Sequence[str], rounds: int
    ) -> Heat:
        """A heat in which nobody was rejected in the end; those that were, are noted."""
        rejected: dict[str, str] = {}
        while alive := [name for name in names if name not in rejected]:
            heat = self.journal.heat(self._key(alive, rounds))
            if heat is None:
                heat = self.arena.together(self.incumbent, alive, rounds)
                self._note(alive, rounds, heat)
            if not heat.rejected:
                return Heat(heat.played, rejected)
            for name, why in heat.rejected.items():
                standings.of[name].rejected = why
            rejected |= heat.rejected
        return Heat({}, rejected)

    def _enter(
        self,
        standings: Standings,
        names: Sequence[str],
        heat: Heat,
        rounds: int,
        *,
        final: bool = False,
    ) -> None:
        for name in names:
            standing = standings.of[name]
            standing.rejected = heat.rejected.get(name, "")
            if not standing.rejected:
                standing.score = score(heat.played, name, self.incumbent)
                standing.rounds, standing.final = rounds, final
        self.changed(standings)

    def _key(self, names: Sequence[str], rounds: int) -> str:
        return self.terms.key(self._contenders(names), rounds)

    def _note(self, names: Sequence[str], rounds: int, heat: Heat) -> None:
        """Into the journal, but for an incumbent that fails: the next run shall try it again."""
        if why := heat.rejected.get(self.incumbent):
            raise CheckFailed(
                f"the spec as it is fails, so nothing can be compared: {why}"
            )
        self.journal.note_heat(self.terms, self._contenders(names), rounds, heat)

    def _contenders(self, names: Sequence[str]) -> list[str]:
        return [self.incumbent, *(name for name in names if name != self.incumbent)]


def _running(standings: Standings) -> Mapping[str, Score]:
    return {
        name: standing.score
        for name, standing in standings.of.items()
        if standing.score is not None and not standing.rejected
    }


def _closest(standings: Standings, most: int) -> list[str]:
    """The best of those that are close to the incumbent, of the last heat when there was one."""
    scores = _running(standings)
    rounds = max((standings.of[name].rounds for name in scores), default=0)
    close = [
        name
        for name, found in scores.items()
        if found.time < CLOSE and standings.of[name].rounds == rounds
    ]
    return sorted(close, key=lambda name: scores[name].time)[:most]


def _winner(standings: Standings) -> str | None:
    """The best finalist if it is proven to be faster than the incumbent."""
    finalists = {
        name: found
        for name, found in _running(standings).items()
        if standings.of[name].final and found.proven
    }
    return min(finalists, key=lambda name: finalists[name].time, default=None)
