# SPDX-License-Identifier: Apache-2.0
"""What kernels of any architecture do for their shapes, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

NO_MASK: Final = (
    "No mask at all: seqlen_kv is a multiple of TILE_KV. One loop over the blocks."
)


def crossed(has: Mapping[str, Any]) -> str:
    """What KV blocks are masked for, because it runs through them; nothing: no mask."""
    diagonal = ["the diagonal"] if has["causal"] else []
    end = ["the end of K"] if has["kv_tail"] else []
    return " and ".join([*diagonal, *end])


def empty_rows(has: Mapping[str, Any]) -> Iterator[str]:
    """Yield what becomes of rows that see no key."""
    if has["empty_rows"]:
        lse = " and its LSE -inf" if has["lse"] else ""
        yield f"A row may see no key at all: its O is 0{lse}."
    elif has["causal"]:
        yield "Every row sees a key, because seqlen_kv >= seqlen_q: no code for empty rows."


def tail_of_rows(has: Mapping[str, Any]) -> str:
    """Which rows of a tile are stored."""
    return "rows before the end only" if has["q_tail"] else "unpredicated"


def order_of_tiles(has: Mapping[str, Any], head: str) -> str:
    """In which order CTAs that stay take the tiles of a head."""
    if has["causal"]:
        return "those with most keys first, odd waves backwards"
    return f"query tiles of one {head} side by side"
