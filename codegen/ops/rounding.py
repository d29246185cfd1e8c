# SPDX-License-Identifier: Apache-2.0
"""Values of 16-bit types, as fp32: to nearest, ties to even."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

HALF = 0x7FFF  # of what bf16 drops, but for the last bit that it keeps


def rounded(x: NDArray[Any], dtype: str) -> F32:
    """What bf16 or fp16 makes of finite numbers, or of infinite ones."""
    found = np.asarray(x, np.float32)
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            return found.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(found).view(np.uint32)
    kept = (bits + HALF + (bits >> 16 & 1)) & np.uint32(0xFFFF_0000)
    made: F32 = kept.astype(np.uint32).view(np.float32)
    return made
