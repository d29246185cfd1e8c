# SPDX-License-Identifier: Apache-2.0
"""Who runs next, and when asynchronous work completes: everything that a seed replays."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from .additions import Addition
from .lanes import WARP


class Order(str, Enum):
    """How warpgroups take turns."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    """Random warpgroups, for a random number of blocks."""
    RANDOM_WARPS = "random_warps"
    """The same, and often one warp only passes a wait, or stays wherever it is until nobody else
    can go on: the warps of a warpgroup drift apart."""
    STARVATION = "starvation"
    """One victim, a warpgroup or one warp of it, runs only when nobody else can go on."""


class Completion(str, Enum):
    """When TMA copies and matrix products complete."""

    EAGER = "eager"
    """As soon as they are issued."""
    LATE = "late"
    """Only when nobody can go on without them, one at a time."""
    RANDOM = "random"
    LOADS_EARLY_MMAS_LATE = "loads_early_mmas_late"
    """Loads overwrite at once what slow products may still read."""


@dataclass(frozen=True)
class Schedule:
    """One way to run a kernel; the same schedule always gives the same run."""

    seed: int = 0
    order: Order = Order.ROUND_ROBIN
    completion: Completion = Completion.EAGER

    @property
    def leader(self) -> int:
        """The lane that whole warps elect: the first, or in the random orders any."""
        if self.order is Order.ROUND_ROBIN:
            return 0
        return random.Random(f"leader {self.seed}").randrange(WARP)

    def __str__(self) -> str:
        return f"order={self.order.value} completion={self.completion.value} seed={self.seed}"


_RANDOM_COMPLETION = 0.3
"""Chance of each pending operation, each turn, to complete under Completion.RANDOM."""
_PARTS = 4
"""Of the additions of a bulk reduction, which arrive one by one."""
_OVERTAKING = 0.25
"""Chance that a copy that is forced to complete is not the oldest."""
_WHOLE_TURN = 1 << 12
"""[blocks] of a turn that ends when everything is held back: more than lie between two waits, and
who polls for ever does not keep others from what it polls for."""
_LONGEST_TURN = 8  # [blocks] of one warpgroup in the random orders
_LONE_WARP = 0.5  # chance that only one warp of a strand passes a wait
_STAYING = 0.2  # chance that some of a warpgroup stays behind after its turn
_LONE_STAYING = 0.7  # chance that this is one warp
_LONGEST_STARVATION = 400  # [blocks] that a victim runs before there is another one
_STARVED_WARP = 0.3  # chance that the victim is one warp, not a warpgroup


Work = Callable[[], None]


@dataclass
class Landing:
    """Additions of bulk reductions that have read shared memory and are not all there."""

    schedule: Schedule
    rng: random.Random
    under_way: list[Addition] = field(default_factory=list)

    def add(self, addition: Addition) -> None:
        """Begins to add."""
        if self.schedule.completion is Completion.EAGER:
            addition.land(addition.left)
            return
        addition.order = self.rng.sample(range(addition.left), addition.left)
        self.under_way.append(addition)

    def turn(self) -> None:
        """Lets parts of some arrive, when the schedule says so; called once a turn."""
        if self.schedule.completion is not Completion.RANDOM:
            return
        for addition in list(self.under_way):
            if self.rng.random() < _RANDOM_COMPLETION:
                self._land(addition)

    def force(self) -> bool:
        """Lets all of one arrive because somebody waits; False when there is none."""
        if not self.under_way:
            return False
        addition = self.under_way.pop(self.rng.randrange(len(self.under_way)))
        addition.land(addition.left)
        return True

    def settle(self) -> None:
        """Lets all arrive, part by part."""
        while self.under_way:
            self._land(self.rng.choice(self.under_way))

    def _land(self, addition: Addition) -> None:
        """Lets a part arrive: then elements of two sums meet in different orders."""
        addition.land(-(-len(addition.sum.values) // _PARTS))
        if not addition.left:
            self.under_way.remove(addition)


@dataclass
class Pending:
    """Asynchronous work that was issued and is not complete.

    Copies complete in any order. What one issuer of products (a warpgroup, or for tcgen05 a warp)
    issues, commits included, completes in order.
    """

    schedule: Schedule
    rng: random.Random
    copies: list[Work] = field(default_factory=list)
    products: dict[int, deque[Work]] = field(default_factory=dict)
    landing: Landing = field(init=False)

    def __post_init__(self) -> None:
        self.landing = Landing(self.schedule, self.rng)

    def load(self, work: Work) -> None:
        """Issues a load into shared memory."""
        early = (Completion.EAGER, Completion.LOADS_EARLY_MMAS_LATE)
        if self.schedule.completion in early:
            work()
        else:
            self.copies.append(work)

    def store(self, work: Work) -> None:
        """Issues a store from shared memory."""
        if self.schedule.completion is Completion.EAGER:
            work()
        else:
            self.copies.append(work)

    def product(self, issuer: int, work: Work) -> None:
        """Issues a matrix product, or a tcgen05.commit."""
        if self.schedule.completion is Completion.EAGER:
            work()
        else:
            self.products.setdefault(issuer, deque()).append(work)

    def turn(self) -> None:
        """Lets some of it complete, when the schedule says so; called once a turn."""
        if self.schedule.completion is not Completion.RANDOM:
            return
        self.landing.turn()
        for _ in range(len(self.copies)):
            if self.rng.random() < _RANDOM_COMPLETION:
                self.copies.pop(self.rng.randrange(len(self.copies)))()
        for queue in self.products.values():
            while queue and self.rng.random() < 1 - _RANDOM_COMPLETION:
                queue.popleft()()

    def force(self) -> bool:
        """Completes one operation because nobody can go on; False when there is none.

        Products go first and copies mostly in the order of their issue: who looks whether a copy
        has arrived before waiting for it finds that it has not. Additions go last.
        """
        queues = [queue for queue in self.products.values() if queue]
        if queues and self.schedule.completion is not Completion.LOADS_EARLY_MMAS_LATE:
            self.rng.choice(queues).popleft()()
        elif self.copies:
            jumps = self.rng.random() < _OVERTAKING
            self.copies.pop(self.rng.randrange(len(self.copies)) if jumps else 0)()
        elif queues:
            self.rng.choice(queues).popleft()()
        else:
            return self.landing.force()
        return True

    @property
    def outstanding(self) -> int:
        """How many operations are not complete; of reductions those that have not read."""
        return len(self.copies) + sum(map(len, self.products.values()))


@dataclass(frozen=True)
class Victim:
    """Who is starved under Order.STARVATION, and for how long."""

    position: int
    """Of the warpgroup among those that live."""
    warp: int | None
    """Of the warpgroup; None for all."""
    blocks: int
    """That it runs before there is another victim."""


@dataclass
class Turns:
    """Deals out turns: which warpgroup runs, for how many blocks, and whether one warp only."""

    order: Order
    rng: random.Random

    def arrange(self, count: int) -> list[int]:
        """The order of `count` warpgroups in one round."""
        positions = list(range(count))
        if self.order is not Order.ROUND_ROBIN:
            self.rng.shuffle(positions)
        return positions

    def length(self) -> int:
        """[blocks] of one turn; a blocked warpgroup's turn ends anyway."""
        if self.order in (Order.ROUND_ROBIN, Order.STARVATION):
            return _WHOLE_TURN
        return self.rng.randint(1, _LONGEST_TURN)

    def victim(self, count: int, warps: int) -> Victim:
        """The next one to be starved, of `count` warpgroups of `warps` warps."""
        alone = self.rng.random() < _STARVED_WARP
        return Victim(
            self.rng.randrange(count),
            self.rng.randrange(warps) if alone else None,
            self.rng.randint(1, _LONGEST_STARVATION),
        )

    def lone_warp(self, warps: Sequence[int]) -> int | None:
        """The one of these warps that passes a wait, or None for all of them."""
        drifts = self.order is Order.RANDOM_WARPS and len(warps) > 1
        if drifts and self.rng.random() < _LONE_WARP:
            return self.rng.choice(warps)
        return None

    def staying(self, warps: Sequence[int]) -> Sequence[int]:
        """Those of a warpgroup's warps that now stay behind until nobody else can go on."""
        if self.order is not Order.RANDOM_WARPS or self.rng.random() >= _STAYING:
            return []
        alone = self.rng.random() < _LONE_STAYING
        return [self.rng.choice(warps)] if alone else warps

    def pick(self, count: int) -> int:
        """The first of `count` strands to try; the others follow."""
        return 0 if self.order is Order.ROUND_ROBIN else self.rng.randrange(count)
