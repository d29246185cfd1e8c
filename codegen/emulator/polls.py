# SPDX-License-Identifier: Apache-2.0
"""Loads that are repeated until another CTA writes a word of global memory.

Who loads the same word at the same place again and finds in it what was there the last time is held
back until somebody writes to global memory. So those who spin do not keep others from running, and
a run in which all spin is noticed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .lanes import LANES, Lanes, Mask, warps_of

if TYPE_CHECKING:
    from .warpgroup import Warpgroup


class Polls:
    """What each lane of a warpgroup loaded last, by the block of the load."""

    def __init__(self, group: Warpgroup) -> None:
        self._group = group
        self._last: dict[int, tuple[Lanes, Lanes, Mask]] = {}
        """Addresses, values, and the lanes that have loaded there."""

    def ask(
        self, index: int, base: Lanes, offset: int, width: int, mask: Mask
    ) -> Mask | None:
        """Gate of ld with a scope: warps pass of which some lane finds something else."""
        group = self._group
        group.here(index, warps_of(mask)[0])
        addresses = base.astype(np.int64) + offset
        (values,) = group.machine.memory.load(addresses, width, 1, mask)
        known = self._last.get(group.block)
        if known is None:
            nothing = np.zeros(LANES, np.bool_)
            known = addresses.copy(), values.copy(), nothing
        where, what, loaded = known
        fresh = mask & ~(loaded & (where == addresses) & (what == values))
        passed = group.only(warps_of(fresh), mask)
        if passed is not None:
            self._last[group.block] = (
                np.where(passed, addresses, where),
                np.where(passed, values, what),
                loaded | passed,
            )
        if passed is None or (mask & ~passed).any():
            lane = int((mask if passed is None else mask & ~passed).argmax())
            address, value = int(addresses[lane]), int(values[lane])
            buffer, place = group.machine.memory.find(address, width)
            group.machine.watching.add(group.cluster)
            group.hold(
                lambda: f"byte {place} of {buffer.name} to change, where {value} is"
            )
        return passed

    def forget(self) -> bool:
        """Lets all lanes load once more; False when none has loaded."""
        known = bool(self._last)
        self._last.clear()
        return known
