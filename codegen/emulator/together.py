# SPDX-License-Identifier: Apache-2.0
"""The clusters of a launch that run at a time, and what it means that none of them can go on."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .cluster import Cluster
from .report import Kind
from .scheduler import Order

if TYPE_CHECKING:
    from .machine import Machine

MOST_POLLS = 10_000
"""Times that everybody waits for a word to change and goes on without: then nobody will."""


class Together:
    """Runs clusters in the order given: so many are there at a time, and others come after them."""

    def __init__(
        self, machine: Machine, waiting: deque[tuple[int, int, int]], resident: int
    ) -> None:
        self._machine = machine
        self._waiting = waiting
        self._resident = resident
        self._of = len(waiting)
        self._there: list[Cluster] = []
        self._victim: Cluster | None = None
        """Who runs only when no other one can, under Order.STARVATION."""
        self._stuck: list[tuple[int, ...]] = []
        """The state in which nobody could go on the last time,"""
        self._polls = 0
        """and how often that was without progress."""

    def run(self) -> None:
        """Until all are over; raises Fault."""
        while self._waiting or self._there:
            while self._waiting and len(self._there) < self._resident:
                self._there.append(Cluster(self._machine, self._waiting.popleft()))
            if not self._advance() and not self._poll_again():
                self._deadlock()
                self._there.clear()
                if self._machine.program.polls:
                    return

    def _advance(self) -> bool:
        """Lets clusters have a turn, all or in a random order some; False when none can go on."""
        moved = False
        clusters, enough = self._arranged()
        for number, cluster in enumerate(clusters):
            if moved and number >= enough:
                break
            cluster.enter()
            moved |= cluster.advance()
            if cluster.over:
                cluster.finish()
                self._there.remove(cluster)
                moved = True
        self._machine.landing.turn()
        return moved

    def _arranged(self) -> tuple[list[Cluster], int]:
        """The order of turns, and after how many of them a round may end."""
        clusters = list(self._there)
        order, rng = self._machine.schedule.order, self._machine.rng
        if order is Order.ROUND_ROBIN or len(clusters) == 1:
            return clusters, len(clusters)
        rng.shuffle(clusters)
        if order is not Order.STARVATION:
            return clusters, rng.randint(1, len(clusters))
        if self._victim not in clusters:
            self._victim = rng.choice(clusters)
        clusters.sort(key=lambda cluster: cluster is self._victim)
        return clusters, len(clusters) - 1

    def _poll_again(self) -> bool:
        """Lets who waits for a word to change load it again; False when that changes nothing."""
        state = [cluster.state() for cluster in self._there]
        known = [each[0] for each in state] == [each[0] for each in self._stuck]
        self._polls = self._polls + 1 if known else 0
        if state == self._stuck or self._polls > MOST_POLLS:
            return False
        self._stuck = state
        return sum(cluster.poll_again() for cluster in self._there) > 0

    def _deadlock(self) -> None:
        """Tells where everybody is."""
        lines = []
        for cluster in self._there:
            whose = f"block {cluster.first}, " if len(self._there) > 1 else ""
            lines += [f"{whose}{line}" for line in cluster.waiting()]
        told = f"nobody can go on under {self._machine.schedule}"
        if self._waiting:
            count = f"{len(self._there)} of {self._of} clusters are there"
            told += f", {count} and {len(self._waiting)} wait for a place"
        text = "\n  ".join([told, *lines])
        self._machine.findings.add(Kind.DEADLOCK, text)
