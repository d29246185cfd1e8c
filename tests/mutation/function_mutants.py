# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501  (an operator is a line of a table)
"""Generated kernels that compute something else: one place of their source is wrong.

An operator is a pattern of the generated text and what stands there instead. Each match is one
mutant, in device code as in the host's. What an operator damages is told by its class.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from .ptx_mutants import Mutant

Class = Literal[
    "indices",
    "residues",
    "scheduler",
    "strides",
    "widths",
    "scale",
    "magnitudes",
    "order",
    "lanes",
    "rows",
    "host",
    "writes",
]


CLASSES: tuple[str, ...] = get_args(Class)


@dataclass(frozen=True)
class Operator:
    """pattern: of lines (MULTILINE). needs: a pattern without which the damage changes nothing."""

    group: Class
    what: str
    pattern: str
    instead: str
    needs: str = ""


_GROUPS = r"^Q_PER_KV = (?!1\b)"  # several query heads share a KV head


def _of(tensor: str, stride: str) -> str:
    """The tensor with strides that are computed from `stride`, an expression of x."""
    return (
        f"(lambda x: cute.make_tensor(x.iterator, cute.make_layout(x.shape, "
        f"stride={stride})))({tensor})"
    )


# What a wrong host takes for the strides of a tensor [batch, rows, heads, head_dim].
_STRIDES = (
    (
        "batches and heads swapped",
        "(x.stride[2], x.stride[1], x.stride[0], x.stride[3])",
    ),
    (
        "contiguous heads",
        "(x.stride[0], x.stride[1], x.shape[3], x.stride[3])",
    ),
    (
        "contiguous rows",
        "(x.stride[0], x.stride[2] * x.shape[2], x.stride[2], x.stride[3])",
    ),
    (
        "contiguous batches",
        "(x.stride[1] * x.shape[1], x.stride[1], x.stride[2], x.stride[3])",
    ),
)
_NARROW = "tuple(s if isinstance(s, int) else Int64(Int32(s)) for s in x.stride)"


def _strides() -> Iterator[Operator]:
    """Wrong strides of the arguments of `tma` (sm90) and `reorder` (sm100), one at a time."""
    inputs = {"q": "k", "k": "v", "v": "k"}
    for name, other in inputs.items():
        place = rf"(?<=tma\((?:load|share), ){name}(?=,)"
        for what, stride in _STRIDES:
            yield Operator(
                "strides", f"{name}: {what}", place, _of(name, stride), r"tma\(load, q"
            )
        borrowed = f"{other}.stride"
        yield Operator(
            "strides", f"{name} with {other}'s strides", place, _of(name, borrowed)
        )
        yield Operator(
            "widths", f"strides of {name} in 32 bits", place, _of(name, _NARROW)
        )
    store = r"(?<=tma\(store, )out(?=,)"
    for what, stride in _STRIDES:
        yield Operator("strides", f"out: {what}", store, _of("out", stride))
    yield Operator("strides", "out with q's strides", store, _of("out", "q.stride"))
    yield Operator("widths", "strides of out in 32 bits", store, _of("out", _NARROW))
    # sm90 without TMA for O.
    by_registers = r"cute\.select\(out\.layout, mode=\[1, 3, 2, 0\]\)"
    shape = "(out.shape[1], out.shape[3], out.shape[2], out.shape[0])"
    for what, source in (("q's", "q"), ("k's", "k")):
        yield Operator(
            "strides",
            f"out with {what} strides",
            by_registers,
            f"cute.make_layout({shape}, stride=({source}.stride[1], 1, "
            f"{source}.stride[2], {source}.stride[0]))",
        )
    yield Operator(
        "strides",
        "out: batches and heads swapped",
        by_registers,
        f"cute.make_layout({shape}, stride=(out.stride[1], 1, out.stride[0], out.stride[2]))",
    )
    yield Operator(
        "strides",
        "out: contiguous batches",
        by_registers,
        f"cute.make_layout({shape}, stride=(out.stride[1], 1, out.stride[2], "
        "out.stride[1] * out.shape[1]))",
    )
    yield Operator(
        "widths",
        "strides of out in 32 bits",
        by_registers,
        f"cute.make_layout({shape}, stride=(Int32(out.stride[1]), 1, "
        "Int32(out.stride[2]), Int32(out.stride[0])))",
    )
    # sm100
    both = r"mQ, mK, mO = \(reorder\(x, \[1, 3, 2, 0\]\) for x in \(q, k, out\)\)"
    for position, name, other in ((0, "q", "k"), (1, "k", "v"), (2, "out", "q")):

        def with_strides(
            stride: str, position: int = position, name: str = name
        ) -> str:
            given = ["q", "k", "out"]
            given[position] = _of(name, stride)
            return (
                "mQ, mK, mO = (reorder(x, [1, 3, 2, 0]) for x in "
                f"({', '.join(given)}))"
            )

        for what, stride in _STRIDES:
            yield Operator("strides", f"{name}: {what}", both, with_strides(stride))
        yield Operator(
            "strides",
            f"{name} with {other}'s strides",
            both,
            with_strides(f"{other}.stride"),
        )
        yield Operator(
            "widths", f"strides of {name} in 32 bits", both, with_strides(_NARROW)
        )
    mv = r"(?<=mV = reorder\()v(?=, \[3, 1, 2, 0\])"
    for what, stride in _STRIDES:
        yield Operator("strides", f"v: {what}", mv, _of("v", stride))
    yield Operator("strides", "v with k's strides", mv, _of("v", "k.stride"))
    yield Operator("widths", "strides of v in 32 bits", mv, _of("v", _NARROW))
    # LSE [batch, heads, rows]
    lse = r"(?<=^        |logical_divide\()lse(?=,\n        softmax_scale|, \(None)"
    for what, stride in (
        ("contiguous rows", "(x.stride[0], x.stride[1], 1)"),
        ("contiguous heads", "(x.stride[0], x.stride[2] * x.shape[2], x.stride[2])"),
        ("contiguous batches", "(x.stride[1] * x.shape[1], x.stride[1], x.stride[2])"),
        ("contiguous", "(x.shape[1] * x.shape[2], x.shape[2], 1)"),
        ("batches and heads swapped", "(x.stride[1], x.stride[0], x.stride[2])"),
        ("heads and rows swapped", "(x.stride[0], x.stride[2], x.stride[1])"),
    ):
        yield Operator("strides", f"lse: {what}", lse, _of("lse", stride))
    yield Operator("widths", "strides of lse in 32 bits", lse, _of("lse", _NARROW))
    yield Operator(
        "widths",
        "strides of lse in 32 bits, products too",
        lse,
        _of("lse", "tuple(Int32(s) for s in x.stride)"),
    )


_LAST_KEYS = ("1", "2", "TILE_KV // 2", "TILE_KV - 2", "TILE_KV - 1")
# A length decides: sizes of the problem in this kernel, as its host or its device code has them.
_SEQLEN_KV = r"(?:problem\.seqlen_kv|SEQLEN_KV)"


def _residues() -> Iterator[Operator]:
    visible = r"(?<=visible = )(c // 2 \* COLUMN_GROUP \+ c % 2) < seen"
    for what, instead in (
        ("a key too many", r"\1 <= seen"),
        ("a key too few", r"\1 < seen - 1"),
        ("two keys too many", r"\1 < seen + 2"),
        ("half a tile too many", r"\1 < seen + TILE_KV // 2"),
        ("the second half of the tile is never masked", r"(\1 < seen) | (c >= cute.size(S, mode=[1]) // 2)"),
        ("one column is never masked", r"(\1 < seen) | (c == 7)"),
        ("one column is always masked", r"(\1 < seen) & (c != 7)"),
        ("the last column is never masked", r"(\1 < seen) | (c == cute.size(S, mode=[1]) - 1)"),
    ):  # fmt: skip
        yield Operator("residues", what, visible, instead)
    for residue in _LAST_KEYS:
        yield Operator(
            "residues",
            f"no mask where the residue is {residue}",
            r"^( *)(seen = .*problem\.seqlen_kv.*)\n(?=(?: *seen = .*\n)? *for c in)",
            rf"\1\2\n\1seen = cutlass.select_(problem.seqlen_kv % TILE_KV == {residue}, TILE_KV, seen)\n",
        )
        yield Operator(
            "residues",
            f"no diagonal where kv - q leaves {residue}",
            r"^( *)seen = position \+ 1 \+ problem\.seqlen_kv - problem\.seqlen_q - first_key$",
            rf"\g<0>\n\1seen = cutlass.select_((problem.seqlen_kv - problem.seqlen_q + TILE_KV * 4096) % TILE_KV == {residue}, TILE_KV, seen)",
        )
        yield Operator(
            "residues",
            f"no mask where the residue is {residue}",
            r"^( *)seen = (cutlass\.min\(seen, (.*)\)|problem\.seqlen_kv) - block \* TILE_KV$",
            rf"\g<0>\n\1seen = cutlass.select_(problem.seqlen_kv % TILE_KV == {residue}, TILE_KV, seen)",
            r"problem\.seqlen_kv",
        )
        yield Operator(
            "residues",
            f"no mask where kv - q leaves {residue}",
            r"^( *)seen = cutlass\.min\(seen, problem\.seqlen_kv\) - block \* TILE_KV$",
            rf"\g<0>\n\1seen = cutlass.select_((problem.seqlen_kv - problem.seqlen_q + TILE_KV * 4096) % TILE_KV == {residue}, TILE_KV, seen)",
            r"problem\.seqlen_q",
        )
    # The diagonal, in the mask of a block and in what counts blocks.
    for what, instead in (
        ("the diagonal is a key earlier", r"\1 + "),
        ("the diagonal is a key later", r"\1 + 2 + "),
        ("the diagonal is a tile later", r"\1 + 1 + TILE_KV + "),
    ):
        yield Operator(
            "residues",
            what,
            r"(?<=seen = )(row|position) \+ 1 \+ ",
            instead,
        )
        yield Operator(
            "residues",
            f"mask begins: {what}",
            r"(?<=end = )(first_position) \+ 1 \+ ",
            instead,
        )
    yield Operator(
        "residues",
        "the diagonal begins at the first key, not the last",
        rf"(?<=\+ 1) \+ {_SEQLEN_KV} - (?:problem\.seqlen_q|SEQLEN_Q)",
        "",
    )
    for what, instead in (
        ("floor", r"(\1) // TILE_KV"),
        ("a block too many", r"(cute.ceil_div(\1, TILE_KV) + 1)"),
        ("half a tile is no block", r"((\1 + TILE_KV // 2 - 1) // TILE_KV)"),
        ("one key is no block", r"((\1 + TILE_KV - 2) // TILE_KV)"),
        ("a full tile is a block more", r"((\1 + TILE_KV) // TILE_KV)"),
    ):
        counted = r"cute\.ceil_div\((cutlass\.min\([^()]*\)|problem\.seqlen_kv), TILE_KV\)"  # fmt: skip
        yield Operator("residues", f"blocks: {what}", counted, instead)
    yield Operator(
        "residues",
        "blocks: none at all",
        r"return cutlass\.max\(end, 1\)",
        "return end",
    )
    yield Operator(
        "residues",
        "blocks: not beyond the tile's first row",
        r"\((q_tile) \+ 1\) \* (TILE_Q|CLUSTER_ROWS|TILE_POSITIONS)",
        r"(\1 * \2 + 1)",
    )
    masked = r"blocks - (1 - )?(common|problem\.seqlen_kv) // TILE_KV"
    for what, instead in (
        ("one too few", r"blocks - 1 - \1\2 // TILE_KV"),
        ("a key counts too many", r"blocks - \1(\2 + 1) // TILE_KV"),
        ("two keys count too many", r"blocks - \1(\2 + 2) // TILE_KV"),
        ("half a tile counts too many", r"blocks - \1(\2 + TILE_KV // 2) // TILE_KV"),
        ("the last one only", r"cutlass.min(blocks - \1\2 // TILE_KV, 1)"),
        ("two at most", r"cutlass.min(blocks - \1\2 // TILE_KV, 2)"),
    ):
        yield Operator("residues", f"masked: {what}", masked, instead)
    yield Operator(
        "residues",
        "masked: rows beyond a diagonal before the first key",
        r"return cutlass\.max\((cutlass\.min\(.*\)), 0\)$",
        r"return \1",
    )
    # The left edge of a window, and what counts blocks by either edge.
    for what, instead in (
        ("a key too many before the first", ">= unseen - 1"),
        ("the first key is lost", "> unseen"),
        ("half a tile too many before the first", ">= unseen - TILE_KV // 2"),
    ):
        yield Operator("residues", what, r"(?<=c % 2 )>= unseen", instead)
    for what, pattern, instead in (
        ("blocks: the first by the last row", r"(?<=first_key = )first_position", "end_position - 1"),
        ("blocks: the first a key later", r"(?<=first_key = first_position - )WINDOW_LEFT", "WINDOW_LEFT + 1"),
        ("blocks: the last by the first row", r"(?<=end_key = )end_position", "1 + first_position"),
        ("masked: the left edge by the first row", r"\bend_position - 1(?= - WINDOW_LEFT)", "first_position"),
        ("masked: the left edge a key earlier", r"\bend_position - 1(?= - WINDOW_LEFT)", "end_position - 2"),
        ("masked: the right edge by the last row", r"(?<=end = )first_position \+ 1(?= \+ WINDOW_RIGHT)", "end_position"),
        ("masked: the right edge a key later", r"(?<=end = first_position \+ )1(?= \+ WINDOW_RIGHT)", "2"),
    ):  # fmt: skip
        yield Operator("residues", what, pattern, instead)
    # sm100's masks, a bit per column.
    for what, instead in (
        ("a key too many", "seen - first + 1"),
        ("a key too few", "seen - first - 1"),
        ("the first word only", "seen"),
    ):
        yield Operator("residues", what, r"(?<=max\()seen - first(?=, 0\))", instead)
    for what, pattern, instead in (
        ("31 keys at most", r"(?<=0\), )WORD_BITS(?=\))", "WORD_BITS - 1"),
        ("a shift by 32 bits is none", r"Int32\(Int64\(-1\) << in_word\)", "Int32(-1) << in_word"),
        ("the second half is never masked", r"range_constexpr\(0, S_COLUMNS, WORD_BITS\)", "range_constexpr(0, S_COLUMNS // 2, WORD_BITS)"),
        ("the first word is never masked", r"range_constexpr\(0, S_COLUMNS, WORD_BITS\)", "range_constexpr(WORD_BITS, S_COLUMNS, WORD_BITS)"),
        ("a word's last bit is never masked", r"range_constexpr\(WORD_BITS\)", "range_constexpr(WORD_BITS - 1)"),
        ("one column is never masked", r"(?<=is_seen = first \+ bit, )unseen & \(1 << bit\) == 0", "(unseen & (1 << bit) == 0) | (first + bit == 77)"),
        ("one column is always masked", r"unseen & \(1 << bit\) == 0", "(unseen & (1 << bit) == 0) & (first + bit != 77)"),
        ("the clip at the end of K", r"cutlass\.min\(seen, (?:problem\.seqlen_kv|SEQLEN_KV)\) -", "seen -"),
        ("the clip at the end of K", r"^ *seen = cutlass\.min\(seen, .*seqlen_kv - first_key\)\n", ""),
    ):  # fmt: skip
        yield Operator("residues", what, pattern, instead)
    # The last rows, whose stores are not TMA's.
    rows = r"(?<=if )((?:row \+ ROW_STEP \* r|first_row \+ lane) < )((?:problem\.seqlen_q|SEQLEN_Q)(?: \* Q_PER_KV)?)(?=:)"
    for what, instead in (
        ("a row too many", r"\1\2 + 1"),
        ("a row too few", r"\1\2 - 1"),
        ("8 rows too few", r"\1\2 - 8"),
        ("all rows of the tile", "True"),
    ):
        yield Operator("residues", what, rows, instead)


def _indices() -> Iterator[Operator]:
    kv = r"(?<=head_kv = )head // Q_PER_KV"
    for what, instead, needs in (
        ("KV head 0", "Int32(0)", ""),
        ("KV heads 0 and 1 only", "cutlass.min(head // Q_PER_KV, 1)", ""),
        ("the remainder is the KV head", "head % Q_PER_KV", _GROUPS),
        ("a group begins a head early", "(head + 1) // Q_PER_KV", _GROUPS),
        ("groups of twice the size", "head // (2 * Q_PER_KV)", ""),
        ("groups of half the size", "head // (Q_PER_KV // 2)", _GROUPS),
        ("KV heads 1 and 2 are swapped", "cutlass.select_((head // Q_PER_KV == 1) | (head // Q_PER_KV == 2), 3 - head // Q_PER_KV, head // Q_PER_KV)", ""),
    ):  # fmt: skip
        yield Operator("indices", what, kv, instead, needs)
    sm90 = r"(?<=partition_(?:tiles|keys)\()({}, \S+, )(\w+), batch(?=[),])"
    sm100 = r"(?<=^        m{} = {}\.tensor\[None, None, )(\w+), batch(?=\])"
    sm100_single = r"(?<=^    m{} = {}\.tensor\[None, None, )(\w+), batch(?=\])"
    for name, of_tensor in (("q", "Q"), ("k", "K"), ("v", "V"), ("out", "O")):
        for what, head, batch in (
            ("batch 0", "{h}", "Int32(0)"),
            ("batches 0 and 1 only", "{h}", "cutlass.min(batch, 1)"),
            ("head 0", "Int32(0)", "batch"),
            ("the next head", "({h} + 1)", "batch"),
            ("four heads only", "cutlass.min({h}, 3)", "batch"),
            ("the head before from batch 1 on", "({h} - cutlass.min(batch, {h}))", "batch"),
        ):  # fmt: skip
            title = f"{name}: {what}"
            yield Operator(
                "indices",
                title,
                sm90.format(name),
                r"\1" + head.format(h=r"\2") + f", {batch}",
            )
            for pattern in (sm100, sm100_single):
                yield Operator(
                    "indices",
                    title,
                    pattern.format(of_tensor, name),
                    head.format(h=r"\1") + f", {batch}",
                )
    lse = r"(?<=mLSE\[)batch, ([^\]\n]+?), (None|first_row \+ lane)(?=\])"
    for what, instead in (
        ("batch 0", r"0, \1, \2"),
        ("batches 0 and 1 only", r"cutlass.min(batch, 1), \1, \2"),
    ):
        yield Operator("indices", f"lse: {what}", lse, instead)
    for what, instead in (
        ("head 0", r"\g<1>0\2"),
        ("the next head", r"\1(head + 1)\2"),
        ("the KV head", r"\1(head // Q_PER_KV)\2"),
        ("three heads only", r"\1cutlass.min(head, 2)\2"),
    ):
        yield Operator(
            "writes",
            f"lse: {what}",
            r"(mLSE\[batch, (?:\(None, )?)head(\)?,)",
            instead,
            _GROUPS if "KV" in what else "",
        )
    for what, pattern, instead in (
        ("always the first query tile", r"(?<=tQgQ\[None, )q_tile(?=\])", "0 * q_tile"),
        ("three query tiles only", r"(?<=tQgQ\[None, )q_tile(?=\])", "cutlass.min(q_tile, 2)"),
        ("two blocks of K only", r"(?<=tKgK\[None, )block(?=\])", "cutlass.min(block, 1)"),
        ("eight blocks of K only", r"(?<=tKgK\[None, )block(?=\])", "cutlass.min(block, 7)"),
        ("blocks of K in the other order", r"(?<=tKgK\[None, )block(?=\])", "i"),
        ("block 2 of K is block 1", r"(?<=tKgK\[None, )block(?=\])", "cutlass.select_(block == 2, 1, block)"),
        ("eight blocks of V only", r"(?<=tVgV\[None, )(block(?: \+ 1)?)(?=\])", r"cutlass.min(\1, 7)"),
        ("two blocks of V only", r"(?<=tVgV\[None, )(block(?: \+ 1)?)(?=\])", r"cutlass.min(\1, 1)"),
        ("V of the block before", r"(?<=tVgV\[None, )(block(?: \+ 1)?)(?=\])", r"cutlass.max(\1 - 1, 0)"),
        ("a warpgroup's rows twice", r"(?<=q_tile \* WARPGROUPS) \+ mma\.warpgroup_idx", ""),
        ("the tile of the next cluster", r"q_tile \* CLUSTER_SIZE \+ rank", "q_tile * CLUSTER_SIZE + CLUSTER_SIZE - 1 - rank"),
        ("both CTAs have the same tile", r"q_tile \* CLUSTER_SIZE \+ rank", "q_tile * CLUSTER_SIZE"),
        ("both CTAs have the same head", r"head \* CLUSTER_SIZE \+ rank", "head * CLUSTER_SIZE"),
        ("heads of other clusters", r"head \* CLUSTER_SIZE \+ rank", "rank * (problem.heads.divisor) + head"),
        ("batch and head are swapped", r"batch, head = divmod\(pair, problem\.heads\)", "head, batch = divmod(pair, problem.heads)"),
        ("heads before batches", r"heads=divisor\(heads\)", "heads=divisor(batch)"),
        ("as many heads as KV heads", r"heads=divisor\(heads\)", "heads=divisor(k.shape[2])"),
        ("packed: heads and rows swapped", r"\(\(stride\[2\], stride\[1\]\),", "((stride[1], stride[2]),"),
        ("packed: a group's heads are those of the next", r"stride\[2\] \* group, stride\[0\]", "stride[2], stride[0]"),
        ("packed: lse of another head of the group", r"cute\.logical_divide\(lse, \(None, Q_PER_KV\)\)", "cute.logical_divide(lse, (None, cute.make_layout(Q_PER_KV, stride=1 + (lse.shape[1] // Q_PER_KV - 1))))"),
    ):  # fmt: skip
        needs = _GROUPS if "KV heads" in what else ""
        yield Operator("indices", what, pattern, instead, needs)


def _scheduler() -> Iterator[Operator]:
    tile = r"^( *)tile = wave \* width \+ place$"
    for what, instead in (
        ("the third tile of a CTA is skipped", r"\g<0>\n\1tile = tile + cutlass.select_(wave >= 2, width, 0)"),
        ("the seventh tile of a CTA is skipped", r"\g<0>\n\1tile = tile + cutlass.select_(wave >= 6, width, 0)"),
        ("the third tile of a CTA is the second again", r"\1tile = cutlass.select_(wave == 2, 1, wave) * width + place"),
        ("one CTA fewer per wave", r"\1tile = wave * (width - 1) + place"),
        ("one CTA more per wave", r"\1tile = wave * (width + 1) + place"),
        ("the second wave is the first one place on", r"\1tile = cutlass.select_(wave == 1, (place + 1) % width + width, wave * width + place)"),
        ("at 64 tiles it begins again", r"\g<0>\n\1done = tile >= problem.num_tiles\n\1tile = cutlass.select_(done, tile, tile % 64)"),
        ("at 4096 tiles it begins again", r"\g<0>\n\1done = tile >= problem.num_tiles\n\1tile = cutlass.select_(done, tile, tile % 4096)"),
    ):  # fmt: skip
        yield Operator("scheduler", what, tile, instead)
    for what, pattern, instead in (
        ("backwards from beyond the end", r"width - 1 - place", "width - place"),
        ("backwards without the last", r"width - 1 - place", "(width - 2 - place) % width"),
        ("the first tile twice when backwards", r"width - 1 - place", "cutlass.max(width - 2 - place, 0)"),
        ("the third wave goes backwards, too", r"wave % 2 == 0", "wave % 4 == 0"),
        ("no wave goes backwards", r"wave % 2 == 0, place", "wave >= 0, place"),
        ("the last tile is missing", r"tile < problem\.num_tiles", "tile < problem.num_tiles - 1"),
        ("a tile too many", r"tile < problem\.num_tiles", "tile <= problem.num_tiles"),
        ("no section is the last", r"section == problem\.last_section", "section == -1"),
        ("every section is the last", r"section == problem\.last_section", "section >= 0"),
        ("the section before the last is one, too", r"section == problem\.last_section", "section + 1 >= problem.last_section"),
        ("the last section is the second", r"section == problem\.last_section", "section == 1"),
        ("sections begin with head 0", r" \+ section \* problem\.section_heads\.divisor", ""),
        ("the first section is as wide as the last", r"last_back, back\)", "last_back, last_back)"),
        ("tiles of a head from the second-last on", r"q_tiles - 1 - cutlass\.select_", "q_tiles - 2 - cutlass.select_"),
        ("tiles of a head from beyond its end on", r"q_tiles - 1 - cutlass\.select_", "q_tiles - cutlass.select_"),
        ("Q_TILES: the first tile is taken again", r"Q_TILES - 1 - (cutlass\.select_\(last, last_back, back\))", r"cutlass.max(Q_TILES - 2 - \1, 0)"),
        ("neighbours are heads", r"pair, q_tile = divmod\(tile, problem\.q_tiles\)", "q_tile, pair = divmod(tile, problem.heads)"),
        ("a tile of each head is the first", r"(pair, q_tile = divmod\(tile, problem\.q_tiles\))", r"\1\n    q_tile = cutlass.select_(q_tile == 2, 0, q_tile)"),
        ("tiles of one head only", r"num_tiles = (\S+) \* heads \* batch", r"num_tiles = \1 * batch"),
        ("tiles of one batch only", r"num_tiles = (\S+) \* heads \* batch", r"num_tiles = \1 * heads"),
        ("tiles of two batches only", r"num_tiles = (\S+) \* heads \* batch", r"num_tiles = \1 * heads * cutlass.min(batch, 2)"),
        ("one tile too few", r"num_tiles = (\S+ \* heads \* batch)", r"num_tiles = \1 - 1"),
        ("one tile too many", r"num_tiles = (\S+ \* heads \* batch)", r"num_tiles = \1 + 1"),
        ("query tiles: floor", r"q_tiles = cute\.ceil_div\(seqlen_q, ([^)]*)\)", r"q_tiles = cutlass.max(seqlen_q // (\1), 1)"),
        ("query tiles: one row is no tile", r"q_tiles = cute\.ceil_div\(seqlen_q, ([^)]*)\)", r"q_tiles = cutlass.max((seqlen_q + \1 - 2) // (\1), 1)"),
        ("query tiles: half a tile is none", r"q_tiles = cute\.ceil_div\(seqlen_q, ([^)]*)\)", r"q_tiles = cutlass.max((seqlen_q + (\1) // 2 - 1) // (\1), 1)"),
        ("query tiles: a full one is one more", r"q_tiles = cute\.ceil_div\(seqlen_q, ([^)]*)\)", r"q_tiles = seqlen_q // (\1) + 1"),
        ("query tiles: of one CTA's rows", r"(?<=ceil_div\(seqlen_q, )(?:TILE_Q \* CLUSTER_SIZE|CLUSTER_ROWS)", "TILE_Q"),
        ("a query tile too few", r"^Q_TILES = (\d+)", r"Q_TILES = \1 - 1"),
        ("a query tile too many", r"^Q_TILES = (\d+)", r"Q_TILES = \1 + 1"),
        ("a query tile fewer in the device code only", r"(?<=tile // )Q_TILES, tile % Q_TILES", "(Q_TILES - 1), tile % (Q_TILES - 1)"),
        ("the last query tile is the one before", r"(?<=tile // Q_TILES, )tile % Q_TILES", "cutlass.min(tile % Q_TILES, Q_TILES - 2)"),
        ("a middle query tile is the one before", r"(?<=tile // Q_TILES, )tile % Q_TILES", "cutlass.select_(tile % Q_TILES == Q_TILES // 2, Q_TILES // 2 - 1, tile % Q_TILES)"),
        ("a KV block too few", r"^KV_BLOCKS = (\d+)", r"KV_BLOCKS = \1 - 1"),
        ("a KV block too many", r"^KV_BLOCKS = (\d+)", r"KV_BLOCKS = \1 + 1"),
        ("a key fewer", r"^SEQLEN_KV = (\d+)", r"SEQLEN_KV = \1 - 1"),
        ("a row fewer", r"^SEQLEN_Q = (\d+)", r"SEQLEN_Q = \1 - 1"),
        ("as many CTAs as SMs", r"(?<=grid=\[)cutlass\.min\(sm_count, num_tiles\)", "sm_count"),
        ("as many clusters as SMs have", r"(?<=clusters = )cutlass\.min\(sm_count // CLUSTER_SIZE, num_tiles\)", "sm_count // CLUSTER_SIZE"),
        ("an even number of CTAs", r"(?<=grid=\[)cutlass\.min\(sm_count, num_tiles\)", "cutlass.min(sm_count // 2 * 2, num_tiles)"),
        ("at most 131 CTAs, of tiles for 132", r"(?<=grid=\[)cutlass\.min\(sm_count, num_tiles\)", "cutlass.min(cutlass.min(sm_count, num_tiles), 131)"),
        ("a CTA too few for one wave", r"(?<=grid=\[)num_tiles(?=,)", "num_tiles - 1"),
        ("a CTA too many for one wave", r"(?<=grid=\[)num_tiles(?=,)", "num_tiles + 1"),
        ("clusters as if of one CTA", r"(?<=clusters = cutlass\.min\()sm_count // CLUSTER_SIZE", "sm_count"),
        ("few SMs: no section", r"cutlass\.max\(sm_count // SMS_PER_HEAD, 1\)", "(sm_count // SMS_PER_HEAD)"),
        ("sections wider than all heads", r"cutlass\.min\((cutlass\.max\(sm_count // SMS_PER_HEAD, 1\)), heads \* batch\)", r"\1"),
        ("sections of one batch's heads", r"(?<=SMS_PER_HEAD, 1\), )heads \* batch", "heads"),
        ("a section more", r"last_section = \(heads \* batch - 1\) //", "last_section = heads * batch //"),
        ("sections of one batch", r"last_section = \(heads \* batch - 1\) //", "last_section = (heads - 1) //"),
        ("the last section as wide as the others", r"divisor\(heads \* batch - last_section \* section_heads\)", "divisor(section_heads)"),
        ("the last section a head wider", r"divisor\(heads \* batch - last_section \* section_heads\)", "divisor(heads * batch - last_section * section_heads + 1)"),
        ("sections a tile shorter", r"divisor\(section_heads \* (q_tiles|Q_TILES)\)", r"divisor(cutlass.max(section_heads * \1 - 1, 1))"),
    ):  # fmt: skip
        yield Operator("scheduler", what, pattern, instead)


def _scale() -> Iterator[Operator]:
    given = r"softmax_scale \* LOG2_E"
    for what, instead in (
        ("the default whatever is given", "Float32(HEAD_DIM_QK**-0.5) * LOG2_E"),
        ("squared", "softmax_scale * softmax_scale * LOG2_E"),
        ("at most 1", "cutlass.min(softmax_scale, 1.0) * LOG2_E"),
        ("at least 1/16", "cutlass.max(softmax_scale, 0.0625) * LOG2_E"),
        ("negative", "softmax_scale * -LOG2_E"),
        ("without log2(e)", "softmax_scale * 1.0"),
        ("in 16 bits", "softmax_scale.to(DTYPE).to(Float32) * LOG2_E"),
        ("of V's head_dim", "softmax_scale * (HEAD_DIM_QK / HEAD_DIM_V) ** 0.5 * LOG2_E"),
    ):  # fmt: skip
        needs = r'"qk": (\d+), "v": (?!\1\b)' if "V's" in what else ""
        yield Operator("scale", what, given, instead, needs)
    for name, value in (("LOG2_E", "1.4426950408889634"), ("LN_2", "0.6931471805599453")):  # fmt: skip
        needs = "" if name == "LOG2_E" else r'"lse": True'
        for part in ("1e-2", "1e-3", "1e-4", "1e-5"):
            yield Operator(
                "scale",
                f"{name} is wrong by {part}",
                rf"^{name} = {re.escape(value)}",
                f"{name} = {value} * (1 + {part})",
                needs,
            )
    for what, pattern, instead in (
        ("lse without the reference's scale", r"(?<=reference = )stats\.shift\[r\] \* scale_log2", "stats.shift[r]"),
        ("lse without the shift", r"(?<=reference = )stats\.shift\[r\] \* scale_log2 \+ ", ""),
        ("lse without the reference", r"(?<=stats\.shift\[r\] \* scale_log2) \+ stats\.reference\[r\]", ""),
        ("lse in log2", r" \* LN_2", ""),
        ("lse scaled twice", r"(?<=lse = )\(reference \+", "(reference * scale_log2 +"),
        ("lse without its far scale", r"row\.reference \* ratio", "row.reference"),
        ("lse of one thread's sum", r"stats\.sum\[r\] = cute\.arch\.warp_reduction_sum\(share, threads_in_group=QUAD\)", "cute.arch.warp_reduction_sum(share, threads_in_group=QUAD)"),
        ("the sum of two threads of a quad", r"(?<=warp_reduction_sum\(share, threads_in_group=)QUAD", "2"),
        ("the sum of two quads", r"(?<=warp_reduction_sum\(share, threads_in_group=)QUAD", "2 * QUAD"),
        ("O is 2^-10 too large", r"cute\.arch\.rcp_approx\(row_sum\)", "(cute.arch.rcp_approx(row_sum) * (1 + 2.0**-10))"),
        ("O is 2^-8 too large", r"cute\.arch\.rcp_approx\(row_sum\)", "(cute.arch.rcp_approx(row_sum) * (1 + 2.0**-8))"),
        ("a row without a key divides by 0", r"^ *row_sum = cutlass\.select_\(row_sum == 0\.0, .*\n", ""),
        ("masked keys count a little", r"(?<=S\[r, c\], )-Float32\.inf", "Float32(-30.0)"),
        ("masked keys count a little", r"(?<=rS\[column\], )-Float32\.inf", "Float32(-30.0)"),
        ("masked keys have score -1e4", r"(?<=S\[r, c\], )-Float32\.inf", "Float32(-1e4)"),
        ("masked keys have score -1e4", r"(?<=rS\[column\], )-Float32\.inf", "Float32(-1e4)"),
        ("the mask's value is scaled up", r"(?<=S\[r, c\], )-Float32\.inf", "Float32(-3.0e38)"),
        ("the mask's value is scaled up", r"(?<=rS\[column\], )-Float32\.inf", "Float32(-3.0e38)"),
        ("a coefficient of the polynomial", r"0\.242211", "0.26"),
        ("the polynomial rounds down", r"TO_INTEGER, TO_INTEGER\)\)  #", "TO_INTEGER - 1, TO_INTEGER - 1))  #"),
        ("the polynomial has no least exponent", r"^ *pair = tuple\(cute\.arch\.fmax\(x, EX2_LEAST\).*\n", ""),
    ):  # fmt: skip
        yield Operator("scale", what, pattern, instead)


def _magnitudes() -> Iterator[Operator]:
    for factor in ("1.1", "2", "8", "100"):
        yield Operator(
            "magnitudes",
            f"a rise of {factor} times the slack is none",
            r"^RESCALE_SLACK = (\S+)",
            rf"RESCALE_SLACK = \1 * {factor}",
        )
    for what, pattern, instead in (
        ("the slack is not scaled", r"RESCALE_SLACK / scale_log2", "RESCALE_SLACK"),
        ("the slack is scaled the other way", r"RESCALE_SLACK / scale_log2", "RESCALE_SLACK * scale_log2"),
        ("no reference is far", r"(?<=far = ).*", "reference > Float32.inf"),
        ("every reference is far", r"(?<=far = ).*", "reference == reference"),
        ("far above only", r"(?<=far = )\(reference > FAR_REFERENCE\) \| .*", "reference > FAR_REFERENCE"),
        ("far below only", r"(?<=far = )\(reference > FAR_REFERENCE\) \| \((.*)\)", r"\1"),
        ("far is 2^16 further", r"^FAR_REFERENCE = (\S+)", r"FAR_REFERENCE = \1 * 65536"),
        ("far is 2^16 nearer", r"^FAR_REFERENCE = (\S+)", r"FAR_REFERENCE = \1 / 65536"),
        ("far rows keep S as it is", r"^ *S\[r, c\] = S\[r, c\] - stats\.shift\[r\]$", r"        pass"),
        ("far rows are shifted the other way", r"S\[r, c\] - stats\.shift\[r\]", "S[r, c] + stats.shift[r]"),
        ("far rows have a limit", r"(?<=has_limit = )\(limit >= 0\.0\) & .*", "limit >= 0.0"),
        ("negative limits hold", r"(?<=has_limit = )\(limit >= 0\.0\) & ", ""),
        ("no row has a limit", r"^NO_LIMIT = -2147483648", "NO_LIMIT = 2147483647"),
        ("a first block of -inf is its reference", r"cute\.arch\.fmax\(row_max\(acc_S, r\), LEAST_MAX\)", "row_max(acc_S, r)"),
        ("the maximum forgets the blocks before", r"cute\.arch\.fmax\(stats\.max\[r\], row_max\(acc_S, r\)\)", "row_max(acc_S, r)"),
        ("the maximum is the first block's", r"cute\.arch\.fmax\(stats\.max\[r\], row_max\(acc_S, r\)\)", "stats.max[r]"),
        ("the maximum of a thread's own columns", r"return cute\.arch\.warp_reduction_max\(maximum, threads_in_group=QUAD\)", "return maximum"),
        ("the maximum of two threads of a quad", r"(?<=warp_reduction_max\(maximum, threads_in_group=)QUAD", "2"),
        ("the maximum without the last columns", r"(?<=range\(4, )cute\.size\(S, mode=\[1\]\)", "cute.size(S, mode=[1]) - 4"),
        ("the maximum of half a tile", r"(?<=range\(4, )cute\.size\(S, mode=\[1\]\)", "cute.size(S, mode=[1]) // 2"),
        ("a rise in the last columns is not seen", r"(?<=range_constexpr\(1, )cute\.size\(bits, mode=\[1\]\)", "cute.size(bits, mode=[1]) - 2"),
        ("a rise in half a tile is not seen", r"(?<=range_constexpr\(1, )cute\.size\(bits, mode=\[1\]\)", "cute.size(bits, mode=[1]) // 2"),
        ("a rise at the limit counts", r"largest > stats\.limit\[r\]", "largest >= stats.limit[r]"),
        ("a rise that all threads have counts", r"cute\.arch\.vote_any_sync(?=\(largest)", "cute.arch.vote_all_sync"),
        ("the shift's part of a factor", r"(?<=moved = )\(old_shift - stats\.shift\[r\]\) \* scale_log2", "Float32(0.0)"),
        ("the reference's part of a factor", r"^ *moved = moved \+ \(old_reference - stats\.reference\[r\]\)\n", ""),
        ("a factor of at least 2^-6", r"cute\.math\.exp2\(moved, fastmath=True\)", "cute.math.exp2(cute.arch.fmax(moved, Float32(-6.0)), fastmath=True)"),
        # sm100
        ("no reference is far", r"(?<=return )\(reference < FAR_REFERENCE\) & \(reference > -FAR_REFERENCE\)", "reference < Float32.inf"),
        ("far above only", r"(?<=return )\(reference < FAR_REFERENCE\) & \(reference > -FAR_REFERENCE\)", "reference < FAR_REFERENCE"),
        ("every reference is far", r"(?<=return )\(reference < FAR_REFERENCE\) & \(reference > -FAR_REFERENCE\)", "reference != reference"),
        ("the power is that below", r"\(\(exponent \+ 1\) << EXPONENT_BIT\)", "(exponent << EXPONENT_BIT)"),
        ("a row that has seen no key has a factor", r"^ *factor = cutlass\.select_\(row\.reference == NO_REFERENCE, .*\n", ""),
        ("a row begins with a reference of -inf", r"(?<=reference=)Float32\(NO_REFERENCE\)", "-Float32.inf"),
        ("the reference never moves", r"(?<=stays = )largest - reference <= RESCALE_SLACK", "(largest - reference <= RESCALE_SLACK) | (reference > -Float32.inf)"),
        ("the reference falls, too", r"(?<=stays = )largest - reference <= RESCALE_SLACK", "(largest - reference <= RESCALE_SLACK) & (reference - largest <= RESCALE_SLACK)"),
        ("a rise counts as a fall", r"largest - reference <= RESCALE_SLACK", "reference - largest <= RESCALE_SLACK"),
        ("the maximum of half a tile", r"range_constexpr\(4, S_COLUMNS\)", "range_constexpr(4, S_COLUMNS // 2)"),
        ("the maximum without the last column", r"range_constexpr\(4, S_COLUMNS\)", "range_constexpr(4, S_COLUMNS - 1)"),
        ("the maximum of two chains", r"(?<=\[i : i \+ 2\], nan=True\) for i in )\(0, 2\)", "(0, 0)"),
        ("a factor of at least 2^-6", r"cute\.math\.exp2\(row\.reference - reference, fastmath=True\)", "cute.math.exp2(cute.arch.fmax(row.reference - reference, Float32(-6.0)), fastmath=True)"),
        ("largest: near whatever it is", r"cutlass\.select_\(is_near\(near\), near, far\)", "near"),
        ("largest: far whatever it is", r"cutlass\.select_\(is_near\(near\), near, far\)", "far"),
        ("scale: near whatever it is", r"cutlass\.select_\(is_near\(reference\), \*scales\)", "scales[0]"),
    ):  # fmt: skip
        yield Operator("magnitudes", what, pattern, instead)
    # A future key is in the row's maximum, not in its sum.
    yield Operator(
        "magnitudes",
        "unseen keys are in the first maximum",
        r"^( *)(mask_block\(acc_S, .*blocks - 1.*\))\n *first_softmax\(",
        r"\1for r in cutlass.range_constexpr(ROWS_PER_THREAD):"
        r"\n\1    stats.max[r] = row_max(acc_S, r)\n\1\2\n\1first_softmax_of_max(",
    )
    yield Operator(
        "magnitudes",
        "unseen keys are in the maximum",
        r"^( *)mask_row\(rS, (.*)\)\n",
        r"\1unmasked = new_reference(rS, row.reference, scales)\n\g<0>"
        r"\1row = Row(reference=cutlass.select_(row.reference == -Float32.inf, "
        r"unmasked, row.reference), sum=row.sum)\n",
    )


def _order() -> Iterator[Operator]:
    for what, pattern, instead in (
        ("the scale after the reference", r"exponent = S\[r, c\] \* scale_log2 - stats\.reference\[r\]", "exponent = (S[r, c] - stats.reference[r] / scale_log2) * scale_log2"),
        ("scores in 16 bits", r"(?<=exponent = )S\[r, c\] \* scale_log2 - stats\.reference\[r\]", "S[r, c].to(DTYPE).to(Float32) * scale_log2 - stats.reference[r]"),
        ("exponents in 16 bits", r"(?<=exponent = )S\[r, c\] \* scale_log2 - stats\.reference\[r\]", "(S[r, c] * scale_log2).to(DTYPE).to(Float32) - stats.reference[r]"),
        ("the sum is not renewed with the reference", r"^ *stats\.sum\[r\] = stats\.sum\[r\] \* factor\n", ""),
        ("O is not renewed with the reference", r"^        scale_row\(acc_O, r, factor\)\n", ""),
        ("O is renewed twice", r"^        scale_row\(acc_O, r, factor\)\n", r"\g<0>\g<0>"),
        ("the sum grows before P", r"^( *)(S\[r, c\] = cute\.math\.exp2\(exponent, fastmath=True\))\n *(stats\.sum\[r\] = .*)$", r"\1\3\n\1\2"),
        ("the sum begins with the tile before", r"^ *stats\.sum\[r\] = Float32\(0\.0\)\n", ""),
        ("the sum of the second row's exponentials", r"exponentiate\(acc_S, stats, 1, scale_log2\)\n( *)pack_p\(mma, acc_S\)", r"pack_p(mma, acc_S)\n\1exponentiate(acc_S, stats, 1, scale_log2)"),
        ("the reference is renewed after the exponentials", r"^( *)(renew_reference\(acc_S, mma\.acc_O, stats, 0, scale_log2\))\n *(exponentiate\(acc_S, stats, 0, scale_log2\))$", r"\1\3\n\1\2"),
        ("O begins with the tile before", r"Boolean\(i != 0\)", "Boolean(i >= 0)"),
        ("O begins with the second block", r"Boolean\(i != 0\)", "Boolean(i > 1)"),
        ("O is divided before it is complete", r"^( *)normalize\(mma\.acc_O, stats\)\n", r"\1pass\n"),
        ("O is divided twice", r"^( *)normalize\(mma\.acc_O, stats\)\n", r"\g<0>\g<0>"),
        ("the mask after the softmax", r"^( *)(mask_block\(.*\))\n *(first_softmax\(.*\))$", r"\1\3\n\1\2"),
        ("the mask of the block after", r"(?<=, )blocks - (\d)( - i)?(?=, problem\)\n *(?:first_softmax|retire_block|states))", r"blocks - \1 + 1\2"),
        ("the first block is not masked", r"^( *)mask_block\(acc_S, .*blocks - 1.*\)$", r"\1pass"),
        # sm100
        ("the sum is renewed with the block's", r"row\.sum \* factor \+ sum_of\(rS\)", "(row.sum + sum_of(rS)) * factor"),
        ("the sum is not renewed", r"row\.sum \* factor \+ sum_of\(rS\)", "row.sum + sum_of(rS)"),
        ("the sum of the block before", r"row\.sum \* factor \+ sum_of\(rS\)", "row.sum * factor + sum_of(rS) * factor"),
        ("O is rescaled where the first thread asks", r"cute\.arch\.vote_any_sync\(factor != 1\.0\)", "cute.arch.vote_all_sync(factor != 1.0)"),
        ("O of the first half is rescaled", r"rescale\(o_place \+ half \* O_COLUMNS, factor\)", "rescale(o_place, factor)"),
        ("O is rescaled to one less column group", r"range\(0, O_COLUMNS, COLUMNS_AT_ONCE\)", "range(0, O_COLUMNS - COLUMNS_AT_ONCE, COLUMNS_AT_ONCE)"),
        ("a rising factor only", r"vote_any_sync\(factor != 1\.0\)", "vote_any_sync(factor < 0.5)"),
        ("sums of the halves are swapped", r"cutlass\.select_\(half == 0, \*sums\)", "cutlass.select_(half == 1, *sums)"),
        ("the sum of the first half for both", r"cutlass\.select_\(half == 0, \*sums\)", "sums[0]"),
        ("P in 16 bits before its sum", r"^( *)store_lane\(pack\(part\), place \+ first // 2, .*\)$", r"\g<0>\n\1part.store(part.load().to(DTYPE).to(Float32))"),
        ("one step of QK fewer", r"(?<=range_constexpr\()cute\.size\(mma\.tSrQ, mode=\[2\]\)", "cute.size(mma.tSrQ, mode=[2]) - 1"),
        ("one step of QK fewer", r"(?<=for k in range\()cute\.size\(tA\.shape\[2\]\)", "cute.size(tA.shape[2]) - 1"),
        ("one step of PV fewer", r"(?<=for k in cutlass\.range_constexpr\()steps(?=\))", "steps - 1"),
        ("shift and scale, not fused", r"cute\.arch\.fma_packed_f32x2\(\(rS\[column\], rS\[column \+ 1\]\), scales, shifts\)", "cute.arch.add_packed_f32x2(cute.arch.mul_packed_f32x2((rS[column], rS[column + 1]), scales), shifts)"),
    ):  # fmt: skip
        yield Operator("order", what, pattern, instead)


def _lanes() -> Iterator[Operator]:
    for what, pattern, instead in (
        ("one lane fences for its warp", r"^( *)cute\.arch\.fence_proxy\(\"async\.shared\", space=\"cta\"\)$", r"\1if cute.arch.lane_idx() == 0:\n\1    cute.arch.fence_proxy('async.shared', space='cta')"),
        ("one warp fences for its warpgroup", r"^( *)cute\.arch\.fence_proxy\(\"async\.shared\", space=\"cta\"\)$", r"\1if cute.arch.warp_idx() % 4 == 0:\n\1    cute.arch.fence_proxy('async.shared', space='cta')"),
        ("half a warp fences", r"^( *)cute\.arch\.fence_proxy\(\"async\.shared\", space=\"cta\"\)$", r"\1if cute.arch.lane_idx() < 16:\n\1    cute.arch.fence_proxy('async.shared', space='cta')"),
        ("the fence comes before the stores", r"^( *)cute\.copy\(copy, copy\.retile\(rO\), copy\.partition_D\(sO\)\)\n((?: *#.*\n)?) *cute\.arch\.fence_proxy\(\"async\.shared\", space=\"cta\"\)", r"\1cute.arch.fence_proxy('async.shared', space='cta')\n\1cute.copy(copy, copy.retile(rO), copy.partition_D(sO))"),
        ("a thread of each warp writes LSE", r"(?<=if cute\.arch\.lane_idx\(\) )% QUAD == 0", "== 0"),
        ("two threads of a quad write LSE", r"(?<=if cute\.arch\.lane_idx\(\) )% QUAD == 0", "% 2 == 0"),
        ("another thread of the quad writes LSE", r"(?<=if cute\.arch\.lane_idx\(\) )% QUAD == 0", "% QUAD == 3"),
        ("LSE of every other quad", r"(?<=if cute\.arch\.lane_idx\(\) )% QUAD == 0", "% (2 * QUAD) == 0"),
        ("LSE of a warpgroup's first warp", r"if cute\.arch\.lane_idx\(\) % QUAD == 0:", "if (cute.arch.lane_idx() % QUAD == 0) & (cute.arch.warp_idx() % 4 == 0):"),
        ("a thread votes for itself", r"cute\.arch\.vote_any_sync\((largest > stats\.limit\[r\])\)", r"\1"),
        ("a thread rescales for itself", r"cute\.arch\.vote_any_sync\((factor != 1\.0)\)", r"\1"),
        ("lane 0 hands its factor to the warp", r"sStat\[stats_state\.index\] = factor", "sStat[stats_state.index] = cute.arch.shuffle_sync(factor, 0)"),
        ("a quad's columns are a thread's", r"cute\.arch\.lane_idx\(\) % QUAD \* 2  # \+", "cute.arch.lane_idx() % QUAD  # +"),
        ("a quad's first column for all", r"( \+) cute\.arch\.lane_idx\(\) % QUAD \* 2  # \+", r"  # +"),
        ("rows of the next quad", r"(?<=WARP_ROWS \+ )cute\.arch\.lane_idx\(\) // QUAD", "cute.arch.lane_idx() // QUAD + 1"),
        ("rows of the first warp", r"(?<=row = )warp_idx \* WARP_ROWS \+ ", "warp_idx * 0 + "),
        ("every warp issues the store", r"^( *)if warp_idx % WARPGROUP_WARPS == 0:\n(?= *rows =)", r"\1if warp_idx >= 0:\n"),
        ("a transposed quad keeps its upper half", r"cutlass\.select_\(upper, got, low\)", "low"),
        ("the quad's second step is its first", r"for step in \(1, 2\)", "for step in (1, 1)"),
    ):  # fmt: skip
        yield Operator("lanes", what, pattern, instead)


def _rows() -> Iterator[Operator]:
    quad = "cute.arch.lane_idx() // QUAD == 3"
    lane = "cute.arch.thread_idx()[0] % 128 == 77"
    for what, pattern, instead in (
        ("one row loses a key of each block", r"^( *)S\[r, c\] = cute\.math\.exp2\(exponent, fastmath=True\)$", rf"\g<0>\n\1if r == 1 and c == 5:\n\1    S[r, c] = cutlass.select_({quad}, Float32(0.0), S[r, c])"),
        ("one row loses one key of each block", r"^( *)S\[r, c\] = cute\.math\.exp2\(exponent, fastmath=True\)$", r"\g<0>\n\1if r == 0 and c == 2:\n\1    S[r, c] = cutlass.select_(cute.arch.thread_idx()[0] % 128 == 9, Float32(0.0), S[r, c])"),
        ("one row loses its own key", r"(?<=visible = )(c // 2 \* COLUMN_GROUP \+ c % 2) < seen", r"\1 < seen - cutlass.select_(row % TILE_Q == 37, 1, 0)"),
        ("a row of each tile sees a key too many", r"(?<=visible = )(c // 2 \* COLUMN_GROUP \+ c % 2) < seen", r"\1 < seen + cutlass.select_(row % TILE_Q == 37, 1, 0)"),
        ("a row of each warp loses the first key", r"(?<=visible = )(c // 2 \* COLUMN_GROUP \+ c % 2 < seen)", rf"(\1) & ((block > 0) | (first_key + c > 0) | ({quad}))"),
        ("one quad's rows are not rescaled", r"^( *)scale_row\(acc_O, r, factor\)$", rf"\1scale_row(acc_O, r, cutlass.select_({quad}, Float32(1.0), factor))"),
        ("one quad's sums are not rescaled", r"stats\.sum\[r\] \* factor", rf"stats.sum[r] * cutlass.select_({quad}, Float32(1.0), factor)"),
        ("the second row is not rescaled", r"^( *)scale_row\(acc_O, r, factor\)$", r"\1if r == 0:\n\1    scale_row(acc_O, r, factor)"),
        ("the first row is not rescaled", r"^( *)scale_row\(acc_O, r, factor\)$", r"\1if r == 1:\n\1    scale_row(acc_O, r, factor)"),
        ("the second row has the sum of the first", r"(?<=row_sum = )stats\.sum\[r\]", "stats.sum[0]"),
        ("the second row is not normalised", r"^( *)scale_row\(acc_O, r, cute\.arch\.rcp_approx\(row_sum\)\)$", r"\1if r == 0:\n\1    scale_row(acc_O, r, cute.arch.rcp_approx(row_sum))"),
        ("one quad's row is 2^-6 too large", r"cute\.arch\.rcp_approx\(row_sum\)(?=\)$)", rf"cute.arch.rcp_approx(row_sum) * cutlass.select_({quad}, 1 + 2.0**-6, 1.0)"),
        ("LSE of one quad is 2^-6 too large", r"(?<=lse = )(\(reference \+ .*\)) \* LN_2", rf"(\1 + cutlass.select_({quad}, 2.0**-6, 0.0)) * LN_2"),
        ("a last column is not in the sum", r"^( *)stats\.sum\[r\] = stats\.sum\[r\] \+ S\[r, c\]$", r"\1if c < cute.size(S, mode=[1]) - 1:\n\1    stats.sum[r] = stats.sum[r] + S[r, c]"),
        ("the last column stays a score", r"^( *)for c in range\(cute\.size\(S, mode=\[1\]\)\):\n(?= *exponent)", r"\1for c in range(cute.size(S, mode=[1]) - 1):\n"),
        # sm100
        ("one row loses a key of each block", r"^( *)store_lane\(pack\(part\), place \+ first // 2, .*\)$", rf"\1part[5] = cutlass.select_({lane}, Float32(0.0), part[5])\n\g<0>"),
        ("one row's P loses a key, not its sum", r"^( *)store_lane\(pack\(part\), place \+ first // 2, (.*)\)$", rf"\1whole = part[5]\n\1part[5] = cutlass.select_({lane}, Float32(0.0), part[5])\n\g<0>\n\1part[5] = whole"),
        ("one row's sum loses the last column", r"return sums\[0\] \+ sums\[1\]", rf"return sums[0] + sums[1] - cutlass.select_({lane}, rP[S_COLUMNS - 1], Float32(0.0))"),
        ("one row is not rescaled", r"rescale\((o_place\b.*), factor\)(?=\n)", rf"rescale(\1, cutlass.select_({lane}, Float32(1.0), factor))"),
        ("one row's sum is not rescaled", r"row\.sum \* factor \+", rf"row.sum * cutlass.select_({lane}, Float32(1.0), factor) +"),
        ("one row is 2^-6 too large", r"normalize\(place, cute\.arch\.rcp_approx\(row_sum\), sO_row\)", rf"normalize(place, cute.arch.rcp_approx(row_sum) * cutlass.select_({lane}, 1 + 2.0**-6, 1.0), sO_row)"),
        ("one row loses its own key", r"^( *)seen = cutlass\.min\(seen, (?:problem\.seqlen_kv|SEQLEN_KV)\) - block \* TILE_KV$", r"\g<0> - cutlass.select_(row % 128 == 77, 1, 0)"),
        ("one row sees a key too many", r"^( *)seen = cutlass\.min\(seen, (?:problem\.seqlen_kv|SEQLEN_KV)\) - block \* TILE_KV$", r"\g<0> + cutlass.select_(row % 128 == 77, 1, 0)"),
        ("LSE of one row is 2^-6 too large", r"(?<== )lse \* LN_2$", rf"(lse + cutlass.select_({lane}, 2.0**-6, 0.0)) * LN_2"),
        ("a row has the factor of its neighbour", r"(?<=take_over\(tiles\.sStats\[)lane(?=, None\])", "(lane ^ 1)"),
    ):  # fmt: skip
        yield Operator("rows", what, pattern, instead)


def _host() -> Iterator[Operator]:
    for what, pattern, instead in (
        ("the default scale is of V's head_dim", r"(?<=1\.0 / math\.sqrt\()HEAD_DIM_QK", "HEAD_DIM_V"),
        ("the default scale is 1 / head_dim", r"1\.0 / math\.sqrt\(HEAD_DIM_QK\)", "1.0 / HEAD_DIM_QK"),
        ("the default scale is 1", r"1\.0 / math\.sqrt\(HEAD_DIM_QK\)", "1.0"),
        ("the scale that is given is ignored", r"(?<=math\.sqrt\(HEAD_DIM_QK\)) if softmax_scale is None else softmax_scale", ""),
        ("the scale that is given comes on top", r"(?<=is None else )softmax_scale$", "softmax_scale / math.sqrt(HEAD_DIM_QK)"),
        ("k and v are swapped", r"(?<=list\[Any\] = \[)q, k, v", "q, v, k"),
        ("q and out are swapped", r"(?<=list\[Any\] = \[)q, k, v, out", "out, k, v, q"),
        ("k is v, too", r"(?<=list\[Any\] = \[)q, k, v", "q, k, k"),
        ("the out that is given is ignored", r"(?<=HEAD_DIM_V\)) if out is None else out$", ""),
        ("the lse that is given is ignored", r"(?<=dtype=torch\.float32\)) if lse is None else lse$", ""),
        ("out has q's shape", r"q\.new_empty\(b, s, h, HEAD_DIM_V\)", "q.new_empty(b, s, h, HEAD_DIM_QK)"),
        ("lse has rows before heads", r"q\.new_empty\(b, h, s,", "q.new_empty(b, s, h,"),
        ("the stream is ignored", r"(?<=handle = )int\(.*\)$", "0"),
        ("a raw stream is ignored", r"getattr\(stream, \"cuda_stream\", stream\)", "getattr(stream, 'cuda_stream', 0)"),
        ("torch's stream is not asked for", r"if of_torch and stream is None:", "if False:"),
        ("the stream of device 0", r"tvm_ffi\.device\(\"cuda\", device\)", "tvm_ffi.device('cuda', 0)"),
        ("SMs of device 0", r"(?<=float\(scale\), )sm_count\(device\)", "sm_count(0)"),
        ("132 SMs whatever there are", r"(?<=float\(scale\), )sm_count\(device\)", "132"),
        ("one SM more", r"(?<=float\(scale\), )sm_count\(device\)", "sm_count(device) + 1"),
        ("the scale in whole numbers", r"float\(scale\)", "float(round(scale, 1))"),
        ("q is returned", r"^    return out$", "    return q"),
        ("nothing is returned", r"^    return out$", "    return None"),
        ("lse is returned first", r"return \(out, lse\)", "return (lse, out)"),
        ("lse is not returned", r"return \(out, lse\)", "return out"),
        ("nothing is launched", r"^        compile\(\)\(\*tensors, .*\)$", "        compile()"),
        ("it is launched twice", r"^        compile\(\)\(\*tensors, .*\)$", r"\g<0>\n\g<0>"),
        ("as many keys as queries", r"seqlen_kv=k\.shape\[1\]", "seqlen_kv=q.shape[1]"),
        ("as many keys as K has heads", r"seqlen_kv=k\.shape\[1\]", "seqlen_kv=k.shape[2]"),
        ("one key fewer", r"seqlen_kv=k\.shape\[1\]", "seqlen_kv=k.shape[1] - 1"),
        ("queries of K", r"seqlen_q=seqlen_q", "seqlen_q=k.shape[1]"),
        ("the default stream", r"(?<=^        )stream=stream", "stream=cuda.CUstream(0)"),
    ):  # fmt: skip
        needs = ""
        if "V's head_dim" in what or "out has q's shape" in what:
            needs = r'"qk": (\d+), "v": (?!\1\b)'
        yield Operator("host", what, pattern, instead, needs)


def _writes() -> Iterator[Operator]:
    for what, pattern, instead in (
        ("O is stored twice", r"^( *)cute\.copy\(out\.atom, .*\)$", r"\g<0>\n\g<0>"),
        ("O is stored to the tile before, too", r"^( *)cute\.copy\(out\.atom, (\S+), tOgO\[None, (.*)\]\)$", r"\g<0>\n\1cute.copy(out.atom, \2, tOgO[None, cutlass.max(\3 - 1, 0)])"),
        ("O of the last query tile is not stored", r"^( *)(cute\.copy\(out\.atom, .*\))$", r"\1if q_tile < 2:\n\1    \2"),
        ("LSE of the second row is written to the first, too", r"^( *)(gLSE\[row \+ ROW_STEP \* r\] = lse)$", r"\g<0>\n\1gLSE[row] = lse"),
        ("LSE of one row is not written", r"^( *)(gLSE\[row \+ ROW_STEP \* r\] = lse)$", r"\1if row % 64 != 17:\n\1    \2"),
        ("LSE of the second row is not written", r"^( *)(gLSE\[row \+ ROW_STEP \* r\] = lse)$", r"\1if r == 0:\n\1    \2"),
        ("LSE a row on", r"(?<=gLSE\[row \+ ROW_STEP \* r)(?=\] = lse)", " + 1"),
        ("LSE of one row is not written", r"^( *)(mLSE\[batch, head, first_row \+ lane\] = lse \* LN_2)$", r"\1if lane != 17:\n\1    \2"),
        ("LSE a row on", r"(?<=mLSE\[batch, head, first_row \+ lane)(?=\] = lse)", " + 1"),
        ("LSE of rows beyond the first tile is not written", r"^( *)if (row \+ ROW_STEP \* r|first_row \+ lane) < (\S+(?: \* Q_PER_KV)?):$", r"\1if \2 < cutlass.min(\3, TILE_Q):"),
        ("one row of O is not stored", r"^( *)store_row\(gO_row, pairs\)$", r"\1if row % 64 != 17:\n\1    store_row(gO_row, pairs)"),
        ("the second row of O is not stored", r"^( *)store_row\(gO_row, pairs\)$", r"\1if r == 0:\n\1    store_row(gO_row, pairs)"),
        ("the last columns of O are not stored", r"for i, vector in enumerate\(vectors\)", "for i, vector in enumerate(vectors[:-1])"),
        ("O a row on", r"(?<=gO\[row \+ ROW_STEP \* r)(?=, None\])", " + 1"),
        ("the last columns of O are not stored", r"range\(O_COLUMNS // COLUMNS_AT_ONCE\)", "range(O_COLUMNS // COLUMNS_AT_ONCE - 1)"),
        ("the first half is stored twice", r"(?<=tOsO\[None, )half(?=\])", "0"),
    ):  # fmt: skip
        yield Operator("writes", what, pattern, instead)


def _widths() -> Iterator[Operator]:
    for what, pattern, instead in (
        ("4096 heads of all batches", r"(?<=num_tiles = )(.*heads \* batch)$", r"(\1) & 0xFFFF"),
        ("tiles in 16 bits", r"(?<=tile = )wave \* width \+ place$", "(wave * width + place) & 0xFFFF"),
        ("keys in 16 bits", r"seqlen_kv=k\.shape\[1\]", "seqlen_kv=k.shape[1] & 0xFFFF"),
        ("rows in 16 bits", r"seqlen_q=seqlen_q,", "seqlen_q=seqlen_q & 0xFFFF,"),
        ("a stream in 32 bits", r"(?<=handle = )int\(.*\)$", r"\g<0> & 0xFFFFFFFF"),
        ("the row of LSE in 8 bits", r"(?<=gLSE\[)row \+ ROW_STEP \* r(?=\] = lse)", "(row + ROW_STEP * r) & 0xFF"),
        ("the row of LSE in 8 bits", r"(?<=mLSE\[batch, head, )first_row \+ lane(?=\] = lse)", "(first_row + lane) & 0xFF"),
        ("the row of LSE in 12 bits", r"(?<=gLSE\[)row \+ ROW_STEP \* r(?=\] = lse)", "(row + ROW_STEP * r) & 0xFFF"),
        ("the row of LSE in 12 bits", r"(?<=mLSE\[batch, head, )first_row \+ lane(?=\] = lse)", "(first_row + lane) & 0xFFF"),
    ):  # fmt: skip
        yield Operator("widths", what, pattern, instead)


def _e4m3() -> Iterator[Operator]:
    """Of 8 bits: factors, V^T and its transposing, P's code, rows of ones and the flush of O."""
    scores = r"(?<=return )scale_log2 \* descales\.q\[batch, head\] \* descales\.k\[batch, head\]"
    of_v = r"(?<=v_descale = )descales\.v\[(.*), (.*)\]$"
    for group, what, pattern, instead in (
        # Factors.
        ("scale", "without Q's factor", scores, "scale_log2 * descales.k[batch, head]"),
        ("scale", "without K's factor", scores, "scale_log2 * descales.q[batch, head]"),
        ("scale", "Q's factor for K's", scores, "scale_log2 * descales.q[batch, head] * descales.q[batch, head]"),
        ("scale", "V's factor for K's", scores, "scale_log2 * descales.q[batch, head] * descales.v[batch, head]"),
        ("indices", "factors of scores: batch 0", scores, "scale_log2 * descales.q[0, head] * descales.k[0, head]"),
        ("indices", "factors of scores: head 0", scores, "scale_log2 * descales.q[batch, 0] * descales.k[batch, 0]"),
        ("indices", "factors of scores: the first one's after the first tile", r"(?<=cutlass\.select_\(more, )next_(?:head\b.*|batch|problem\.sequence)(?=, Int32\(0\)\))", "Int32(0)"),
        ("scale", "the scale of the tile before", r"^        scale_log2 = next_scale_log2\n", ""),
        ("scale", "without V's factor", of_v, "Float32(1.0)"),
        ("scale", "K's factor for V's", of_v, r"descales.k[\1, \2]"),
        ("scale", "V's factor twice", r"descale \* (?=cute\.arch\.rcp_approx)", "descale * descale * "),
        ("indices", "V's factor: batch 0", of_v, r"descales.v[0, \2]"),
        ("indices", "V's factor: head 0", of_v, r"descales.v[\1, 0]"),
        ("indices", "V's factor of the query head's number", r"(?<=v_descale = descales\.v\[problem\.sequence, )head // Q_PER_KV", "head"),
        ("strides", "q_descale is contiguous", r"(?<=^            )q_descale(?=,$)", _of("q_descale", "(x.shape[1], 1)")),
        ("strides", "v_descale: batches and heads swapped", r"(?<=^            )v_descale(?=,$)", _of("v_descale", "(x.stride[1], x.stride[0])")),
        # V^T in memory.
        ("strides", "v: batches and heads swapped", r"(?<=transposed_tma\(load, )v(?=\))", _of("v", "(x.stride[1], x.stride[0], x.stride[2], x.stride[3])")),
        ("strides", "v: contiguous rows", r"(?<=transposed_tma\(load, )v(?=\))", _of("v", "(x.stride[0], x.stride[1], x.shape[3], x.stride[3])")),
        ("strides", "v: contiguous batches", r"(?<=transposed_tma\(load, )v(?=\))", _of("v", "(x.stride[1] * x.shape[1], x.stride[1], x.stride[2], x.stride[3])")),
        ("widths", "strides of v in 32 bits", r"(?<=transposed_tma\(load, )v(?=\))", _of("v", _NARROW)),
        # V as rows, transposed.
        ("lanes", "the upper lanes take even columns first, too", r"(?<=lower = )lane < WARP // 2", "lane < WARP"),
        ("lanes", "columns of the matrix alone", r"(?<=column = 2 \* row \+ )\(row // 4 \+ matrix\) % 2", "matrix % 2"),
        ("lanes", "keys 16 to 31 before the others", r"matrix // 2 \* KEY_GROUP", "(1 - matrix // 2) * KEY_GROUP"),
        ("lanes", "every matrix has the first keys", r"matrix // 2 \* KEY_GROUP", "matrix * 0"),
        ("lanes", "both warps have the same columns", r"(?<=warp_idx\(\)\) - 1\) \* )SQUARE_COLUMNS", "0"),
        ("lanes", "a warp's columns are side by side", r"(?<=range\(0, HEAD_DIM_V, )TRANSPOSE_WARPS \* SQUARE_COLUMNS", "SQUARE_COLUMNS"),
        ("lanes", "even and odd columns swapped", r"^EVEN_BYTES = 0x6420", "EVEN_BYTES = 0x7531"),
        ("lanes", "pairs of keys in another order", r"^EVEN_BYTES = 0x6420", "EVEN_BYTES = 0x4620"),
        ("lanes", "the last square is not stored", r"^    store_transposed\(squares\[-1\]\[1\], square, even, odd\)\n", ""),
        ("lanes", "a square goes on being the first", r"^        square = following\n", ""),
        ("lanes", "rows of V in half their swizzle", r"^ROWS_SWIZZLE = 128", "ROWS_SWIZZLE = 64"),
        ("lanes", "the squares' keys are one group on", r"(?<=along\(target, )key(?=, V_ROWS)", "(key + 16) % TILE_KV"),
        # P's code.
        ("magnitudes", "P is twice as large", r"^P_OFFSET = 8\.0", "P_OFFSET = 9.0"),
        ("magnitudes", "P's offset is not whole", r"^P_OFFSET = 8\.0", "P_OFFSET = 7.5"),
        ("magnitudes", "P is 2^-6 times as large", r"^P_OFFSET = 8\.0", "P_OFFSET = 2.0"),
        ("magnitudes", "the first block's headroom counts twice", r"RESCALE_SLACK \+ headroom", "RESCALE_SLACK + 2 * headroom"),
        ("magnitudes", "every block's slack is the first one's", r"RESCALE_SLACK \+ headroom", "RESCALE_SLACK + FIRST_HEADROOM"),
        ("magnitudes", "codes are 1 % less steep", r"of_reference = OCTAVE \*", "of_reference = 1.01 * OCTAVE *"),
        ("magnitudes", "the line lies a code lower", r"^AT_1 = 3.316998481750488e-06".replace(".", r"\."), "AT_1 = 3.2573938369750976e-06"),
        ("magnitudes", "codes below 0 stay", r"cvt\.rn\.relu(?=\.f16x2\.f32 low)", "cvt.rn"),
        ("lanes", "keys of a quad of codes in another order", r"(?<=low, high, )0x6420", "0x6240"),
        ("lanes", "the first two keys of a quad are swapped", r"(?<=e4m3x2\.f32 low, )\{\$r1\}, \{\$r0\}", "{$r0}, {$r1}"),
        ("lanes", "the pairs of a quad are swapped", r"\{low, high\}", "{high, low}"),
        # Rows of ones.
        ("rows", "every fourth key is not in the sums", r"^FOUR_ONES = 0x38383838", "FOUR_ONES = 0x38383800"),
        ("rows", "ones are 1.125", r"^FOUR_ONES = 0x38383838", "FOUR_ONES = 0x39393939"),
        ("rows", "ones of the first stage only", r"(?<=for stage in cutlass\.range_constexpr\()V_STAGES", "1"),
        ("rows", "half of the ones", r"thread_idx < of_rows", "thread_idx < of_rows // 2"),
        ("rows", "ones in the last rows of V", r"(?<=\* V_ROWS \+ )HEAD_DIM_V$", "HEAD_DIM_V - ATOM_ROWS"),
        ("rows", "the second row has the sum of the first", r"(?<=rows_and_columns\(acc_O\)\[)r(?=, HEAD_DIM_V // QUAD\])", "0"),
        ("rows", "the last column of O is the sum", r"(?<=rows_and_columns\(acc_O\)\[r, HEAD_DIM_V // QUAD)(?=\])", " - 1"),
        # O in two levels.
        ("order", "parts go on after a flush", r"Boolean\(i % FLUSH_BLOCKS != 0\)", "Boolean(i != 0)"),
        ("order", "every part begins anew", r"Boolean\(i % FLUSH_BLOCKS != 0\)", "Boolean(False)"),
        ("order", "every second flush is left out", r"i % FLUSH_BLOCKS == FLUSH_BLOCKS - 1", "i % (2 * FLUSH_BLOCKS) == FLUSH_BLOCKS - 1"),
        ("order", "a flush after each block", r"i % FLUSH_BLOCKS == FLUSH_BLOCKS - 1", "i >= 0"),
        ("order", "a flush after 8 blocks", r"^FLUSH_BLOCKS = 2", "FLUSH_BLOCKS = 8"),
        ("order", "a flush after 64 blocks", r"^FLUSH_BLOCKS = 2", "FLUSH_BLOCKS = 64"),
        ("order", "the last part is not in O", r"^        add_part\(mma\)\n(?=        (?:if problem|normalize))", ""),
        ("order", "the last part is in O twice", r"^        add_part\(mma\)\n(?=        (?:if problem|normalize))", r"\g<0>\g<0>"),
        ("order", "a part is not in O", r"^    add_part\(mma\)$", "    pass"),
        ("order", "a part is not renewed with the reference", r"^        scale_row\(part_O, r, factor\)\n", ""),
        ("order", "late slices keep the reference", r"^        stats\.late\[r\] = factor\n", ""),
        ("order", "late slices always have the last factor", r"^    stats\.late\[r\] = Float32\(1\.0\)\n", ""),
        ("order", "late slices have the first row's factor", r"stats\.late\[i // 2 % ROWS_PER_THREAD\]", "stats.late[0]"),
        ("order", "the last slice is the one before", r"issue_pv\(mma, v_stage, n \+ 1\)", "issue_pv(mma, v_stage, min(n + 1, 1))"),
        ("order", "O begins with 1", r"acc_O\.fill\(-0\.0\)", "acc_O.fill(1.0)"),
        ("order", "rows of no key keep what they loaded", r"^        if problem\.seqlen_kv == 0:\n.*\n", ""),
        ("host", "k's and v's factors are swapped", r"(?<=, )k_descale, v_descale(?=,? out\b|, lse|,\n *out)", "v_descale, k_descale"),
    ):  # fmt: skip
        yield Operator(group, what, pattern, instead)


OPERATORS = (
    *_indices(),
    *_residues(),
    *_scheduler(),
    *_strides(),
    *_widths(),
    *_scale(),
    *_magnitudes(),
    *_order(),
    *_lanes(),
    *_rows(),
    *_host(),
    *_writes(),
    *_e4m3(),
)

# The unseen keys' maximum needs a softmax that keeps it.
_FIRST_OF_MAX = re.compile(r"^def first_softmax\((?:.*\n)*?(?=^\S)", re.M)


def mutants(source: str) -> Iterator[Mutant]:
    """All mutants of a generated kernel, in the order of their lines."""
    found = []
    for operator in OPERATORS:
        if operator.needs and not re.search(operator.needs, source, re.M):
            continue
        for match in matches(operator.pattern, source):
            start = match.start()
            if source[:start].rpartition("\n")[2].lstrip().startswith("def "):
                continue  # a parameter
            text = source[:start] + match.expand(operator.instead) + source[match.end() :]  # fmt: skip
            if "first_softmax_of_max(" in operator.instead:
                text = _with_first_of_max(text)
            if text == source:
                continue
            line = source.count("\n", 0, start) + 1
            found.append((line, operator, text))
    lines, seen = source.split("\n"), Counter[str]()
    told: set[str] = set()
    for line, operator, text in sorted(found, key=lambda each: each[0]):
        if text in told:
            continue
        told.add(text)
        before = lines[line - 1].strip()
        key = f"{operator.group}: {before}: {operator.what}"
        seen[key] += 1
        number = f" #{seen[key]}" if seen[key] > 1 else ""
        yield Mutant(f"{key}{number}", line, before, text)


def matches(pattern: str, source: str) -> Iterator[re.Match[str]]:
    """All places of a pattern, whose look-behind at its beginning may be of any length."""
    before, rest = _split(pattern)
    found = re.compile(rest, re.M)
    for place in re.finditer(f"(?:{before})(?={rest})", source, re.M):
        match = found.match(source, place.end())
        assert match is not None
        yield match


def _split(pattern: str) -> tuple[str, str]:
    """What a look-behind at the beginning of a pattern holds, and what follows."""
    if not pattern.startswith("(?<="):
        return "", pattern
    depth, place = 1, len("(?<=")
    while depth:
        depth += {"(": 1, ")": -1}.get(pattern[place], 0)
        place += 2 if pattern[place] == "\\" else 1
    return pattern[len("(?<=") : place - 1], pattern[place:]


def _with_first_of_max(text: str) -> str:
    """Adds a first_softmax that takes the maximum of before into its own."""
    whole = _FIRST_OF_MAX.search(text)
    assert whole is not None
    added = whole[0].replace("first_softmax(", "first_softmax_of_max(", 1)
    added = added.replace(
        "row_max(acc_S, r)", "cute.arch.fmax(stats.max[r], row_max(acc_S, r))"
    )
    return f"{text[: whole.start()]}{added}@cute.jit\n{text[whole.start() :]}"
