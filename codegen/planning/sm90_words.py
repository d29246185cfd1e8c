# SPDX-License-Identifier: Apache-2.0
"""What an sm90 kernel does for its shapes, in words; what it leaves out is named."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from . import words
from .sm90_context import Traits
from .traits import P_LIMIT


def statements(traits: Traits, has: Mapping[str, Any]) -> Iterator[str]:
    """Yield a statement each from the values that the templates read."""
    yield from _tile_statements(traits, has)
    if traits.mask.edges:
        query = "position" if traits.packed else "row"
        yield f"Query {query} i, at q = i + seqlen_kv - seqlen_q, sees {traits.mask}."
    yield from _block_statements(has)
    yield from words.scores(traits.score)
    if traits.softcap is not None:
        yield words.capped(traits.softcap)
        yield _reference_statement(traits, traits.softcap)
    if has["e4m3"]:
        yield from _sums_of_8_bits(has)
    if not has["bounded"]:
        least = "below any tangent" if has["capped"] else "the least float"
        yield f"A row may have no finite score so far: its maximum is then {least}, and P is 0."
    yield words.empty_rows(has)
    if has["bias"]:
        yield words.bias(has)
    if has["sink"]:
        yield words.sink()
    yield _output_statement(has)
    if has["lse"]:
        yield f"LSE is stored by one thread in four, {words.tail_of_rows(has)}."


def _reference_statement(traits: Traits, cap: float) -> str:
    dtype, log2 = traits.spec.dtype, cap / math.log(2)
    if traits.bounded:
        return (
            "Rows have no reference: P = exp(S), from"
            f" 2^-{log2:.1f} to 2^{log2:.1f}; no maximum is taken, and O is never rescaled."
            " The tensor cores sum P: its product with a column of ones."
        )
    if log2 > P_LIMIT[dtype]:
        why = f"exp(S) would be up to 2^{log2:.1f}, and in {dtype} 2^{P_LIMIT[dtype]} is safe"
    elif traits.spec.lse:
        why = "the LSE needs sums of P before its rounding, O sums of what PV has"
    else:
        why = "a sink may be 2^128 above all of exp(S)"
    return f"Rows have references: {why}."


def _sums_of_8_bits(has: Mapping[str, Any]) -> Iterator[str]:
    blocks = "two blocks" if has["flushes_pairs"] else "a block"
    yield f"The tensor cores keep 13 bits of a sum: they add up PV of {blocks}, O takes it in fp32."
    if has["part_overlays_s"]:
        yield "S and a part of O share registers: QK follows PV of the block before."
    if has["sliced_pv"]:
        yield "PV comes in slices of columns, each added to O before the next is issued."
    if has["sums_by_mma"]:
        yield "Rows of ones below V^T make the row sums of P, as it was rounded, columns of PV."
    if has["half_line"]:
        yield "P as fp16 is a straight line between powers of two: no exponential is taken."
    elif has["linear_exp"]:
        yield "P's code is a straight line between powers of two: no exponential is taken."


def _output_statement(has: Mapping[str, Any]) -> str:
    if has["cross_tile"] and has["e4m3"]:
        return "O goes through a buffer of its own; TMA drops rows past the end."
    if has["cross_tile"]:
        return "O goes through the stage that its Q had; TMA drops rows past the end."
    tail = words.tail_of_rows(has)
    return f"O is stored from registers, 16 bytes a thread, {tail}."


def _tile_statements(traits: Traits, has: Mapping[str, Any]) -> Iterator[str]:
    owner = "cluster" if has["cluster_size"] > 1 else "CTA"
    head = traits.tiled_head
    order = words.order_of_tiles(has, head)
    yield f"Persistent: each {owner} takes a tile per wave, {order}."
    if has["lpt_order"] and not has["varlen"]:
        of = "pairs of heads" if has["cluster_heads"] > 1 else f"{head}s"
        yield f"A section of SM count // SMS_PER_HEAD {of} is done before the next one starts."
    yield from words.sequences(has, "Warp 3")
    if has["split_k"]:
        yield "Two warps load K, whose ring is the shorter one, half of its boxes each."
    if has["transposes_v"] and has["paged"]:
        yield "The two warps that transpose V load it, half of its boxes each, a block ahead."
    if traits.packed:
        yield "Rows of a query tile are (position, head of the group), heads fastest."
    if has["cluster_size"] > 1:
        along = (
            f"{has['cluster_q']} query tiles of one {head}"
            if has["cluster_q"] > 1
            else f"{has['cluster_heads']} query heads of one KV head"
        )
        shared = [name for name in "KV" if has[f"multicast_{name.lower()}"]]
        loads = (
            f"each loads its slice of {' and '.join(shared)} for all"
            if shared
            else "each loads for itself"
        )
        yield f"A cluster has {along}; {loads}."
    if has["cross_tile"]:
        yield "Two Q stages: QK of the next tile's first block overlaps PV of this tile's last."
    elif has["part_overlays_s"] and traits.sizes.q_stages == 2:
        yield "Two Q stages: the next tile's Q is loaded beside this tile."
    else:
        yield "One Q stage: the next tile's Q is loaded once this tile's last QK is done."
    if has["takes_turns"]:
        yield "Warpgroups take turns at the tensor cores: the others' softmax runs meanwhile."


def _block_statements(has: Mapping[str, Any]) -> Iterator[str]:
    if has["lists"]:
        yield words.listed(has)
        yield from words.masks_of_lists(has)
        return
    if has["dynamic_blocks"]:
        per = "query tile" if has["edges"] else "launch"
        per = "warpgroup" if has["strips"] else per
        yield f"KV blocks, last first; how many is counted at run time, per {per}."
        if has["strips"]:
            yield "A warpgroup skips the blocks that only rows of later warpgroups see."
    else:
        yield "KV blocks, last first; KV_BLOCKS of them for every query tile."
    if has["one_loop"]:
        yield from words.of_each_block(has)
        return
    crossed = words.crossed(has)
    if not crossed:
        others = " One loop over the blocks." if has["whole_loop"] else ""
        yield f"{words.NO_MASK}{others}"
        return
    if not has["kv_tail"]:
        yield "No mask for the end of K: seqlen_kv is a multiple of TILE_KV."
    rows = "row of the warpgroup" if has["strips"] else "row"
    loops = {
        f"masked the same way: further blocks that not every {rows} sees whole": "masked_loop",
        f"without masks: blocks that every {rows} sees whole": "whole_loop",
        f"masked {words.of_left_edge(has)}": "left_loop",
    }
    there = [what for what, name in loops.items() if has[name]]
    if there and not has["masked_loop"] and not has["left_loop"]:
        yield f"The first block is masked for {crossed}; one loop without masks takes the others."
        return
    yield f"The first block is masked for {crossed}."
    for number, what in enumerate(there, 1):
        yield f"Loop {number}, {what}."
