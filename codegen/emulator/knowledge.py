# SPDX-License-Identifier: Apache-2.0
"""What clusters know of each other, handed over through words of global memory.

A release to a word hands over what its lanes know: of their own cluster by its clock, of others by
what they were handed. Who acquires the word gains that. A cluster's clocks have a component for
what each of its warps has gained so far, and an epoch for each time: so it goes from warp to warp
as everything does that happened in the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .checks import Clock, Components

Known = Mapping[int, Clock]
"""By the number of a cluster, what is known of it."""
NOTHING: Known = {}


def joined(first: Known, second: Known) -> Known:
    """What who knows both knows."""
    both = dict(first)
    for cluster, clock in second.items():
        held = both.get(cluster)
        both[cluster] = clock if held is None else np.maximum(held, clock)
    return both


class Knowledge:
    """What the warps of all clusters have gained."""

    def __init__(self) -> None:
        self._gained: dict[tuple[int, int], list[Known]] = {}
        """By cluster and warp, what it had gained at each epoch, beginning with 1."""
        self._cache: dict[tuple[int, bytes], Known] = {}

    def gain(self, cluster: int, warp: int, known: Known) -> int:
        """A warp acquires what was handed over; its epoch from then on."""
        epochs = self._gained.setdefault((cluster, warp), [])
        epochs.append(joined(epochs[-1], known) if epochs else known)
        return len(epochs)

    def of(self, cluster: int, components: Components, clock: Clock) -> Known:
        """What who has this clock in a cluster knows of the others.

        clock: from the row on that counts, HAPPENED or, for what was fenced, GLOBAL.
        """
        epochs = clock[0, components.gains]
        if not epochs.any():
            return NOTHING
        key = cluster, epochs.tobytes()
        known = self._cache.get(key)
        if known is None:
            known = NOTHING
            for warp in np.flatnonzero(epochs).tolist():
                held = self._gained[cluster, warp][int(epochs[warp]) - 1]
                known = joined(known, held)
            self._cache[key] = known
        return known
