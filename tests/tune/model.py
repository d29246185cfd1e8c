# SPDX-License-Identifier: Apache-2.0
"""A GPU whose kernels take a known time, on a card that drifts and jitters."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from fmha_gen.bench.timing import turns
from fmha_gen.tune.journal import Heat, Terms

INCUMBENT = "incumbent"
TERMS = Terms("NVIDIA H200", "580", "4.8.1", ("short", "long"), "one")


@dataclass
class ModelGpu:
    """truth: seconds of each kernel; faults, late_faults: why one fails its check, or a heat.

    lucky: the truth in heats of so many rounds. checked, heats: what was asked for.
    """

    truth: Mapping[str, float]
    drift: float = 0.0  # of the card's speed, per turn
    jitter: float = 0.0  # of one turn, either way
    faults: Mapping[str, str] = field(default_factory=dict)
    late_faults: Mapping[str, str] = field(default_factory=dict)
    lucky: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    problems: Sequence[str] = TERMS.problems
    checked: list[str] = field(default_factory=list)
    heats: list[tuple[tuple[str, ...], int]] = field(default_factory=list)
    dice: random.Random = field(default_factory=lambda: random.Random(7))
    taken: int = 0
    running: bool = False

    def check(self, names: Sequence[str]) -> Generator[tuple[str, str], None, None]:
        self.running = True
        try:
            for name in names:
                self.checked.append(name)
                yield name, self.faults.get(name, "")
        finally:
            self.running = False

    def race(self, names: Sequence[str], rounds: int) -> Heat:
        self.heats.append((tuple(names), rounds))
        for name in names:
            if name in self.late_faults:
                return Heat(names, rejected={name: self.late_faults[name]})
        truth = {**self.truth, **self.lucky.get(rounds, {})}
        found: dict[str, list[list[float]]] = {}
        for problem in self.problems:
            found[problem] = []
            for order in turns(names, rounds, self.dice):
                took = {name: self.take(truth[name]) for name in order}
                found[problem].append([took[name] for name in names])
        return Heat(names, found)

    def take(self, seconds: float) -> float:
        self.taken += 1
        noise = 1 + self.dice.uniform(-self.jitter, self.jitter)
        return seconds * (1 + self.drift * self.taken) * noise
