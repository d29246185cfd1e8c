# SPDX-License-Identifier: Apache-2.0
"""Atomic operations on global memory as lanes use them: red and atom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .lanes import Lanes, Mask, some, warps_of

if TYPE_CHECKING:
    from .warpgroup import Warpgroup


class Atomics:
    """What these instructions do; generated code calls the public methods."""

    def __init__(self, group: Warpgroup) -> None:
        self._group = group

    def add(
        self,
        index: int,
        base: Lanes,
        offset: int,
        kind: str,
        values: Sequence[Lanes],
        mask: Mask,
    ) -> list[Lanes]:
        """red.add and atom.add: a value of a PTX type per lane to each of neighbouring words.

        Lanes take their turns as the schedule says. Returns what was there before.
        """
        self._group.here(index, warps_of(mask)[0] if some(mask) else 0)
        machine = self._group.machine
        addresses = base.astype(np.int64) + offset
        found = machine.add_lanes(self._group.cta, addresses, kind, values, mask)
        if (shadow := machine.global_shadow) is not None:
            nbytes = values[0].itemsize * len(values)
            what = machine.program.instructions[index].opcode
            self._group.transfers.note_global(
                index, addresses, nbytes, mask, shadow.reduce, what
            )
        return found
