# SPDX-License-Identifier: Apache-2.0
"""What kernels of any architecture do for their shapes, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..expressions.language import text_of
from ..ops.scores import BIAS, Score

NO_MASK: Final = "No mask at all: seqlen_kv is a multiple of TILE_KV."


LEFT_EDGE: Final = "the left edge of the mask"


def crossed(has: Mapping[str, Any]) -> str:
    """What KV blocks are masked for, because it runs through them; nothing: no mask.

    Where its edges are far apart, the left one is crossed by others.
    """
    edges = {
        "the diagonal": has["diagonal"],
        "the right edge of the mask": has["right_edge"] and not has["diagonal"],
        LEFT_EDGE: has["left_edge"] and (has["one_loop"] or not has["edges_apart"]),
        "the gap": has["gap"],
        "the end of K": has["kv_tail"],
    }
    return " and ".join(name for name, is_there in edges.items() if is_there)


def of_each_block(has: Mapping[str, Any]) -> Iterator[str]:
    """What the blocks of a mask with a gap, or with tests of each score, are masked for."""
    if has["gap"]:
        yield "Blocks in the gap of all rows are skipped."
    if has["one_loop"] and (edges := crossed(has)):
        yield f"One loop: a block is masked for those edges that cross it, of {edges}."
    if has["tests_keys"]:
        yield "Every score is tested: no block is seen whole."


def of_left_edge(has: Mapping[str, Any]) -> str:
    """What the blocks at the left edge are masked for, and which these are."""
    if has["gap"]:
        return "for the edges that cross it: blocks that the gap crosses, and those before it"
    alone = has["edges_apart"] or has["loads_edges"]
    how = "for it alone" if alone else "the same way"
    return f"{how}: blocks that {LEFT_EDGE} crosses"


def capped(cap: float) -> str:
    """What a softcap does to scores."""
    return (
        f"Scores are within -{cap:g} and {cap:g}: a hyperbolic tangent before the mask."
    )


def listed(has: Mapping[str, Any]) -> str:
    """Which KV blocks a query tile has, and in which order."""
    kinds = (
        "partial ones, then full ones"
        if has["edges"]
        else "partial and full ones alike"
    )
    return (
        f"KV blocks as the lists of the query tile have them, {kinds}; the number of each is"
        " read a block ahead. A tile without any has one behind the end of K, which TMA fills"
        " with zeros."
    )


def masks_of_lists(has: Mapping[str, Any]) -> Iterator[str]:
    """What blocks of lists are masked for."""
    if has["edges"]:
        yield f"Loop 1, masked for {crossed(has)}: partial blocks."
        yield "Loop 2, masked for the end of K where a block reaches there: full blocks."
    else:
        yield "One loop, masked for the end of K where a block reaches there."


def scores(score: Score) -> Iterator[str]:
    """What scores are where they are more than s, and how a row is tested for a new reference."""
    parts = score.parts
    if parts.how == "sloped":
        slope = text_of(parts.slope) if parts.slope else ""
        yield (
            f"A score is {parts.factor:g} * s + {slope} * (kv - q), and an exponent two FFMAs."
            " Rows are tested by exponents, because a key of the smaller product may have the"
            " larger score."
        )
    elif parts.how == "by_element" and score.cap is None and score.tree != BIAS:
        yield (
            f"Each score is computed on its own: {text_of(score.tree)}."
            " Rows are tested by exponents, because a score need not rise with the product."
        )
    elif parts.factor != 1:
        yield (
            f"A score is {parts.factor:g} * s, of which the factor is in the scale."
            " Rows are tested by products, which order like scores."
        )
    if parts.row is not None:
        yield f"The same for all keys of a row, so in its LSE alone: {text_of(parts.row)}."


def empty_rows(has: Mapping[str, Any]) -> str:
    """What becomes of rows that see no key, or none whose score is finite."""
    hides = has["edges"] or has["lists"]
    what = "A row that sees no key, or" if hides else "A row"
    lse = f" and its LSE {'its sink' if has['sink'] else '-inf'}" if has["lse"] else ""
    if has["capped"]:
        empty = f"A row that sees no key: its O is 0{lse}."
        return empty if hides else "Every row sees a key, and its scores are finite."
    return f"{what} whose scores are all -inf: its O is 0{lse}."


def bias(has: Mapping[str, Any]) -> str:
    """Where the addend of scores comes from, and how a row is tested."""
    rows = "rows of a query tile" if has["bias_of_rows"] else "keys"
    said = (
        f"The bias of a KV block's {rows} is loaded by TMA and added before the mask."
    )
    tested = " Rows are tested by exponents, whose limit is a constant."
    return said + tested if has["tests_exponents"] else said


def sink() -> str:
    """What a sink is to a row."""
    return "The sink of a head enters the sums of its rows at the end of a tile, in no loop."


def tail_of_rows(has: Mapping[str, Any]) -> str:
    """Which rows of a tile are stored."""
    return "rows before the end only" if has["q_tail"] else "unpredicated"


def sequences(has: Mapping[str, Any], scheduler: str) -> Iterator[str]:
    """How packed sequences are dealt out, and how pages are loaded, where there are such.

    scheduler: the warp that finds work tiles, as the subject of a sentence.
    """
    if has["varlen"]:
        yield (
            f"{scheduler} finds work tiles, 32 sequences a step, and hands them to the others in"
            " shared memory, a tile ahead."
        )
    if has["paged"]:
        yield (
            "A lane reads the page of a box from block_table; TMA clips boxes behind the last key"
            " of a sequence."
        )


def order_of_tiles(has: Mapping[str, Any], head: str) -> str:
    """In which order CTAs that stay take the tiles of a head."""
    if has["lists"]:
        # How long a tile is only the lists know: of two that one CTA takes, places differ most.
        return f"query tiles of one {head} side by side, odd waves backwards"
    if has["lpt_order"] and not has["lengths_known"]:
        return "those of all heads of a section side by side: how long they are is an input"
    if has["varlen"]:
        what = "tiles" if has["lpt_order"] else "sequences"
        return f"of 32 sequences at a time the {what} with most keys first, odd waves backwards"
    if has["lpt_order"]:
        return "those with most keys first, odd waves backwards"
    return f"query tiles of one {head} side by side"
