# SPDX-License-Identifier: Apache-2.0
"""An arena whose contenders take a known time on a card that drifts and jitters."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from fmha_gen.tune.journal import Heat, Terms
from fmha_gen.tune.rounds import play

INCUMBENT = "incumbent"
TERMS = Terms("NVIDIA H200", "580", "4.8.1", ("short", "long"), "one")


@dataclass
class ModelArena:
    """truth: seconds of each contender; faults: why one is rejected, when it first runs.

    later_faults: the same, in heats together. lucky: the truth in heats of so many rounds. heats:
    what was asked for, contenders first.
    """

    truth: Mapping[str, float]
    drift: float = 0.0  # of the card's speed, per turn
    jitter: float = 0.0  # of one turn, either way
    faults: Mapping[str, str] = field(default_factory=dict)
    later_faults: Mapping[str, str] = field(default_factory=dict)
    lucky: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    problems: Sequence[str] = TERMS.problems
    heats: list[tuple[tuple[str, ...], int]] = field(default_factory=list)
    dice: random.Random = field(default_factory=lambda: random.Random(7))
    turns: int = 0
    running: bool = False

    def take(self, name: str) -> float:
        self.turns += 1
        noise = 1 + self.dice.uniform(-self.jitter, self.jitter)
        return self.truth[name] * (1 + self.drift * self.turns) * noise

    def _play(
        self, names: Sequence[str], rounds: int, faults: Mapping[str, str]
    ) -> Heat:
        self.heats.append((tuple(names), rounds))
        if failed := [name for name in names if name in faults]:
            why = faults[failed[0]]
            return Heat({}, {failed[0]: why}, lasting=why.startswith("wrong"))
        truth, self.truth = self.truth, {**self.truth, **self.lucky.get(rounds, {})}
        played = {
            problem: list(play(names, self.take, rounds, self.dice))
            for problem in self.problems
        }
        self.truth = truth
        return Heat(played, {})

    def alone(
        self, incumbent: str, names: Sequence[str], rounds: int
    ) -> Generator[tuple[str, Heat], None, None]:
        self.running = True
        try:
            for name in names:
                pair = list(dict.fromkeys([incumbent, name]))
                blamed = self.faults.get(name, "")
                who = incumbent if blamed.startswith("incumbent") else name
                faults = {who: blamed} if blamed else {}
                yield name, self._play(pair, rounds, faults)
        finally:
            self.running = False

    def together(self, incumbent: str, names: Sequence[str], rounds: int) -> Heat:
        return self._play([incumbent, *names], rounds, self.later_faults)
