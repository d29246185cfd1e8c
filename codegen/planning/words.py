# SPDX-License-Identifier: Apache-2.0
"""What kernels of any architecture do for their shapes, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

NO_MASK: Final = (
    "No mask at all: seqlen_kv is a multiple of TILE_KV. One loop over the blocks."
)


def crossed(has: Mapping[str, Any]) -> str:
    """What KV blocks are masked for, because it runs through them; nothing: no mask."""
    diagonal = ["the diagonal"] if has["causal"] else []
    end = ["the end of K"] if has["kv_tail"] else []
    return " and ".join([*diagonal, *end])


def empty_rows(has: Mapping[str, Any]) -> str:
    """What becomes of rows that see no key, or none whose score is finite."""
    what = "A row that sees no key, or" if has["causal"] else "A row"
    lse = " and its LSE -inf" if has["lse"] else ""
    return f"{what} whose scores are all -inf: its O is 0{lse}."


def tail_of_rows(has: Mapping[str, Any]) -> str:
    """Which rows of a tile are stored."""
    return "rows before the end only" if has["q_tail"] else "unpredicated"


def order_of_tiles(has: Mapping[str, Any], head: str) -> str:
    """In which order CTAs that stay take the tiles of a head."""
    if has["causal"]:
        return "those with most keys first, odd waves backwards"
    return f"query tiles of one {head} side by side"
