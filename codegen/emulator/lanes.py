# SPDX-License-Identifier: Apache-2.0
"""The 128 lanes of a warpgroup, its warps, and addresses in a cluster's shared memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

LANES = 128  # [lanes of a warpgroup]
WARP = 32  # [lanes of a warp]
WARPS = LANES // WARP  # [warps of a warpgroup]

Lanes = NDArray[Any]
Mask = NDArray[np.bool_]

ALL: Mask = np.ones(LANES, np.bool_)
NONE: Mask = np.zeros(LANES, np.bool_)
LEADERS: Mask = np.arange(LANES) % WARP == 0
"""The first lane of each warp."""
WARP_MASKS: list[Mask] = [np.arange(LANES) // WARP == warp for warp in range(WARPS)]

ONE_LANE: list[Mask] = [np.arange(LANES) == lane for lane in range(LANES)]

IN_FLIGHT = np.full(LANES, np.nan, np.float32)
"""What an accumulator's register holds, this very array, from its product to the wait for it."""

RANK_SHIFT = 24
"""Shared addresses carry the CTA's rank in its cluster from this bit on."""
OFFSET_MASK = (1 << RANK_SHIFT) - 1


_NO_LANES = bytes(LANES)
_NO_WARP = bytes(WARP)


def some(mask: Mask) -> bool:
    """Whether a mask of 128 lanes has one: a comparison of bytes is faster than any of numpy's."""
    return mask.tobytes() != _NO_LANES


def warps_of(mask: Mask) -> tuple[int, ...]:
    """The warps, 0 to 3, that have a lane in the mask."""
    return _warps_of(mask.tobytes())


@functools.lru_cache(maxsize=4096)
def _warps_of(lanes: bytes) -> tuple[int, ...]:
    parts = (lanes[WARP * warp : WARP * (warp + 1)] for warp in range(WARPS))
    return tuple(warp for warp, part in enumerate(parts) if part != _NO_WARP)


def spread(per_warp: Any) -> Mask:
    """One value per warp to one per lane."""
    return np.repeat(np.asarray(per_warp, np.bool_), WARP)
