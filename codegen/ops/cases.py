# SPDX-License-Identifier: Apache-2.0
"""Which problems a kernel is shown, in the emulator and on a GPU: a pure function of its plan.

A case is data, so that a failing one can be named, listed and replayed. Lengths are stated in the
kernel's own tiles, so that each has the tails it is there for. A persistent CTA gets several work
tiles from a small problem when the kernel is told that the GPU has few SMs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, get_args

import numpy as np

from ..arch import ARCHITECTURES
from . import backward_cases, masks
from .backward import is_backward
from .case import DYNAMIC as DYNAMIC
from .case import FLAT as FLAT
from .case import REPEATS as REPEATS
from .case import STEEP as STEEP
from .case import Case as Case
from .case import Data as Data
from .case import Layout as Layout
from .case import Packed, Params
from .case import Tiles as Tiles
from .case import residues as residues
from .lists import AXES, PATTERNS, Drawn
from .masks import Lengths
from .paged import is_paged, page_of

FUSED = "+fused"  # ends the name of a schedule with fused products and sums
WALK = "walk"  # in place of the name of a schedule, where only the schedule runs

LARGE_LOGITS = 1e4  # softmax_scale times this: so large are the scores

BIASES = 5  # of a case whose heads have biases of all kinds
SINKS = 7  # of a case whose heads have sinks of all levels
SLOPES = 7  # of a case whose heads have slopes of all kinds
MEAN_KEYS = 4096  # over which a sum of 13 bits loses a twentieth
FAR_KEYS = 4096  # that a bias of 1 for a key takes beyond what exp2 holds

# More (work tile, KV block) pairs than this are too much for the emulator. Fixed lengths may need
# them: then some clusters run there, and the schedule of all is walked.
MANY_BLOCKS = 48
MANY_TILES = 20  # of a CTA: more than twice the phases of any ring
# Instructions of warps that a run may take before it is held to be one that does not end: a
# constant, and some for each (work tile, KV block) pair, of which right kernels take a tenth.
STEPS, STEPS_OF_BLOCK, STEPS_OF_WALKED_BLOCK = 1_000_000, 300_000, 30_000
# More than 16 bits hold, dealt out to so many clusters that few of them have seen how.
MANY = 2**16 + 1
MANY_CLUSTERS = 2**12
# A work tile of more KV blocks than this is long: few kinds of data are shown to it.
LONG_TILE = 12

# Lengths that make an odd number of tiles of 128, 192 and 256 rows, and an even one.
ODD_TILES_LENGTH = 545
EVEN_TILES_LENGTH = 1000

OUTSIDE = 9  # rows of packed tensors that are before all sequences, or behind
SPARE_PAGES = 2  # of a pool, which no sequence has, or which are missing

# (q, kv), (batch, kv_heads): either side the longer one, by little and by much
_LONGER = (
    ((1, 1000), (3, 2)),
    ((1000, 1), (1, 3)),
    ((63, 64), (3, 1)),
    ((64, 63), (1, 2)),
    ((64, 127), (3, 3)),
    ((65, 64), (1, 1)),
    ((127, 129), (3, 2)),
    ((129, 65), (1, 3)),
    ((127, 127), (3, 1)),
    ((129, 1000), (1, 2)),
    ((1000, 129), (3, 3)),
    ((1000, 1000), (1, 1)),
)


def cases_for(spec: Mapping[str, Any], tiles: Tiles) -> tuple[Case, ...]:
    """All cases of a SPEC, without duplicates; a fixed length replaces each length on its side."""
    cases: dict[tuple[object, ...], Case] = {}
    of = backward_cases.cases if is_backward(spec) else _candidates
    for case in of(spec, tiles):
        same = cases.setdefault(_call(case), case)
        if case.repeats > same.repeats:  # of two same calls the stricter one stays
            cases[_call(case)] = case
    return tuple(cases.values())


def relaunched(case: Case) -> Case:
    """Another case of packed sequences in the same tensors: they come in the opposite order."""
    return replace(case, lengths=case.lengths[::-1])


def tiles_of(constants: Mapping[str, Any]) -> Tiles:
    """How the kernel with these module-level constants cuts a problem."""
    spec = constants["SPEC"]
    return Tiles(
        constants["TILE_Q"],
        constants["TILE_KV"],
        tuple(spec.get("cluster", [1, 1])),
        sms_per_head=constants.get("SMS_PER_HEAD", 0),
        level=constants.get("LEVEL_TILES", 0),
        q_releases=constants["Q_STAGES"] * constants.get("Q_RELEASES", 1),
        packed=constants["TILE_Q"]
        // constants.get("TILE_POSITIONS", constants["TILE_Q"]),
        single=spec.get("schedule") == "single",
        slack=constants.get("RESCALE_SLACK", 0.0),
        along_keys=constants.get("CLUSTER_CTAS", 1),
        section_rows=constants.get("SECTION_BYTES", 0) // constants.get("ROW_BYTES", 1),
        strips=constants.get("STRIPS", 0),
    )


def smallest_ragged(cases: tuple[Case, ...]) -> Case:
    """The cheapest ordinary case with several rows on each side, or the cheapest of all."""
    ordinary = [
        case
        for case in cases
        if min(case.q, case.kv) > 1 and case.data == "normal" and case.layout != "far"
    ]
    return min(ordinary or cases, key=lambda case: case.work)


def work_tiles(case: Case, spec: Mapping[str, Any], tiles: Tiles) -> int:
    """Work tiles of a case: what a cluster works on at a time."""
    heads = case.kv_heads * int(spec["q_per_kv"]) // tiles.heads
    if case.lengths:
        rows = (max(q, 0) for q, _ in case.lengths)
        return heads * sum(math.ceil(q / tiles.cluster_rows) for q in rows)
    return case.batch * heads * math.ceil(case.q / tiles.cluster_rows)


def _candidates(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    if spec.get("batch"):
        yield from _packed(spec, tiles)
        return
    yield from _tiled(spec, tiles)
    yield from _magnitudes(spec, tiles)
    if spec.get("sink"):
        yield from _sinks(spec, tiles)
    if spec.get("descale"):
        rows, kv = min(tiles.positions, 33), 2 * tiles.kv + 5
        yield _fitted(spec, tiles, "descales", rows, kv, 2, 3, data="descales")
    if spec.get("blocks"):
        yield from _lists(spec, tiles)
    if masks.of_spec(spec).params:
        yield from _params(spec, tiles)
    if spec.get("alibi"):
        yield from _slopes(spec, tiles)
    if spec.get("bias"):
        yield from _biases(spec, tiles)
    if spec["seqlen"]["kv"] == DYNAMIC:
        yield from _residues(spec, tiles)
        yield from _window(spec, tiles)
        yield from _steps(spec, tiles)
    yield from _calls(spec, tiles)
    yield from _large(spec, tiles)


def walks_for(spec: Mapping[str, Any], tiles: Tiles) -> tuple[Case, ...]:
    """Problems of which only the schedule runs: on GPUs of any size, and more than 2^16 of things.

    At least two batches and three KV heads; fewer work tiles than SMs, and many more.
    """
    sms, made = ARCHITECTURES[spec["arch"]].sm_count, []
    if is_backward(spec):
        return ()  # the schedule of several kernels is seen where they run
    if spec.get("batch"):
        return tuple(_packed_walks(spec, tiles))

    def walk(tag: str, q: int, kv: int, *counts: int, sm_count: int = sms) -> None:
        case = _fitted(spec, tiles, tag, q, kv, *counts, layout="mixed")
        made.append(replace(case, sm_count=sm_count, clusters=None))

    rows, block, kv = tiles.cluster_rows, tiles.kv, spec["seqlen"]["kv"]
    is_long = kv != DYNAMIC and int(kv) > LONG_TILE * block
    counts = (1, 1) if is_long else (3, 3)
    for sm_count in sorted({tiles.ctas, 7, 114, 132, sms}):
        walk(f"sms_{sm_count}", 3 * rows + 1, block + 1, *counts, sm_count=sm_count)
    walk("whole", 2 * rows, 5 * block, 2, 3)
    if spec.get("blocks"):
        for kind, axes in (("some_tiles", "bh"), ("one", "h"), ("behind", "b")):
            walk(f"lists_{kind}", 2 * rows, 5 * block, 2, 3)
            made.append(replace(made.pop(), lists=Drawn(kind, axes)))
    mask = masks.of_spec(spec)
    if mask.reach is not None or mask.right:
        q = 3 * rows + 1 + (mask.right or 0)
        walk("slides", q, q - rows - 1 + (mask.reach or 0), 2, 3)
    if tiles.sms_per_head:
        kv_heads, clusters = _sections(spec, tiles, 3)
        tail, sm_count = rows + 1, clusters * tiles.ctas
        walk("three_sections", tail, tail, 1, kv_heads, sm_count=sm_count)
    if not is_long:
        few = _fitted(spec, tiles, "", 1, 1, 3, 1)
        kv_heads = math.ceil(MANY / work_tiles(few, spec, tiles))
        walk("many_tiles", 1, 1, 3, kv_heads, sm_count=MANY_CLUSTERS * tiles.ctas)
        some = (0, MANY_CLUSTERS // 2, MANY_CLUSTERS - 1)
        made.append(replace(made.pop(), clusters=some))
    if DYNAMIC in spec["seqlen"].values():
        walk("long_q", 2**16 + rows, 1, 1, 1)
        walk("long_kv", 1, 2**16 + block, 1, 1)
        made.append(replace(made.pop(), clusters=(0,)))  # which loads all of K and V
    return tuple({_call(case): case for case in made}.values())


def launches_for(spec: Mapping[str, Any], tiles: Tiles) -> tuple[Case, ...]:
    """Problems that are launched and not run: more batches, or KV heads, than 16 bits hold, and
    strides that 32 bits do not."""
    made = (
        _fitted(spec, tiles, "many_batches", 2, 2, MANY, 1),
        _fitted(spec, tiles, "many_heads", 2, 2, 1, MANY),
        _fitted(spec, tiles, "farther", 3, 3, 2, 2, layout="farther"),
    )
    sms = ARCHITECTURES[spec["arch"]].sm_count
    return tuple(replace(case, sm_count=sms, clusters=None) for case in made)


def share_that_runs(case: Case, spec: Mapping[str, Any], tiles: Tiles) -> float:
    """Of the clusters of an emulated case's launch, those that run."""
    if case.clusters is None:
        return 1.0
    return len(case.clusters) / most_clusters(case, spec, tiles)


def most_clusters(case: Case, spec: Mapping[str, Any], tiles: Tiles) -> int:
    """Of a launch: one for each work tile, but with waves, or of packed sequences, as many as the
    SMs hold.
    """
    assert case.sm_count is not None
    work = work_tiles(case, spec, tiles)
    if spec.get("batch"):  # whose lengths a launch does not know
        return max(case.sm_count // tiles.ctas, 1)
    return work if tiles.single else min(max(case.sm_count // tiles.ctas, 1), work)


def _sections(spec: Mapping[str, Any], tiles: Tiles, sections: int) -> tuple[int, int]:
    """KV heads and clusters for so many sections of heads or more, the last one smaller."""
    work_of_head = spec["q_per_kv"] // tiles.heads
    least = math.ceil((2 * sections - 1) / work_of_head)
    kv_heads, section = next(
        (kv_heads, size)
        for kv_heads in count(least)
        for size in (2, 3, 5, 7)
        if (heads := kv_heads * work_of_head) % size and heads > (sections - 1) * size
    )
    return kv_heads, section * tiles.sms_per_head // tiles.ctas


def _call(case: Case) -> tuple[object, ...]:
    """What makes a call another one."""
    shape = (case.batch, case.kv_heads, case.q, case.kv, case.sm_count)
    call = (case.data, case.params, case.layout, case.scale_factor, case.lists)
    return (*shape, *call, case.lengths, case.gradient)


def _tiled(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """Rings, waves and tails."""
    rows, block = tiles.cluster_rows, tiles.kv
    # Groups of many heads give a cluster its work tiles, a single head must have rows for it.
    work_of_head = spec["q_per_kv"] // tiles.heads
    group = work_of_head > 1
    twice = rows if group else 2 * rows
    ragged = twice - rows // 2 + 5

    def case(tag: str, q: int, kv: int, *counts: int, **options: Any) -> Case:
        return _fitted(spec, tiles, tag, q, kv, *counts, timing=True, **options)

    fused, strided = ((1, 2), (2, 1)) if group else ((2, 1), (2, 2))
    options: dict[str, Any] = {"layout": "bhsd", "data": "huge_key"}
    yield case("ragged", ragged, 3 * block + block // 2 + 1, 1, 1, data="edges")
    yield case("strided", 33, 3 * block - 7, *strided, **options)
    if DYNAMIC not in spec["seqlen"].values():
        return
    second: dict[str, Any] = {"data": "second_rows"}
    yield case("exact", twice, 3 * block, 1, 1, **second)
    blocks = 1 if group else 2
    odd = math.ceil(5 / work_of_head)
    # An odd number of SMs, of which a cluster of two leaves one idle.
    waves: dict[str, Any] = {"clusters": 3, "idle": tiles.ctas - 1, **second}
    yield case("waves", max(rows - 1, 1), blocks * block + 1, 1, odd, **waves)
    if group and not tiles.sms_per_head:
        # Two query tiles of a head, which nothing above has; causal: see `sections`.
        yield case("two_tiles", rows + rows // 2 + 1, block + 1, 1, 1)
    if tiles.cluster[0] > 1:  # a CTA whose rows are all beyond the end
        yield case("odd_tiles", rows + tiles.q, 2 * block, 1, 1)
    if spec["seqlen"]["kv"] == DYNAMIC:
        # More blocks than any ring has stages, and warpgroups without a row: whoever runs ahead by
        # a few blocks must not wait for what the others hold back.
        # Its scores are negative, which is when every block takes a new reference, and change
        # their level from one pair of blocks to the next: `negative` has sevenths.
        few, many = (5, 7) if group else (rows + 5, 14)
        yield case("long_kv", few, many * block, 1, 1, data="negative")
        # Causal: a warpgroup without a row has no masked block, in a tile after another, either.
        # With a group of heads `long_kv` has such tiles.
        if masks.of_spec(spec).edges and not group:
            yield case("few_rows", max(tiles.positions // 16, 1), 2 * block, 1, 2)
        # Causal: rows of the last block, and one before it that not all rows see whole.
        yield case("half", rows, rows + block + block // 2, 1, 1, **second)
        # Sections of heads, the last one smaller than the others.
        if tiles.sms_per_head:
            kv_heads, clusters = _sections(spec, tiles, 2)
            tail = rows + 1
            yield case("sections", tail, tail, 1, kv_heads, clusters=clusters)
        # Rows that see no key, with causal. More tiles of one block than there are Q stages: only
        # then does nothing else that the producer waits for imply that a Q stage is free. And more
        # than arrivals free them: a barrier that counts one too few is then a phase ahead.
        q = spec["seqlen"]["q"]
        q_tiles = math.ceil((ragged if q == DYNAMIC else int(q)) / rows)
        batch = math.ceil((tiles.q_releases + 1) / (q_tiles * work_of_head))
        yield case("short_kv", ragged, block // 2 + 3, batch, 1, data="edges")
        yield case("one_key", ragged, 1, 1, 1)
        # Far more tiles of one CTA than any ring has phases, each of another head or batch.
        few, fixed = max(tiles.positions - 3, 1), spec["seqlen"]["q"]
        q_tiles = 1 if fixed == DYNAMIC else math.ceil(int(fixed) / rows)
        # Of a group a batch less: the walks have three.
        batch = 2 if group else 3
        heads = max(3, math.ceil(MANY_TILES / (batch * q_tiles * work_of_head)))
        yield case("tiles", few, 7, batch, heads, layout="mixed")
        if tiles.packed > 1:
            # Few positions make a tile. Of a second one, some that do not reach the block that
            # others begin with; and several tiles that see no key.
            edge = 2 * block - tiles.positions - tiles.positions // 2
            yield case("edge", 2 * rows, 2 * rows + edge, 1, 1, **second)
            # The same with more queries than keys.
            late, seen = block + 2 * rows, block + tiles.positions // 2
            yield _fitted(spec, tiles, "late_edge", late, seen, 1, 1, data="edges")
            yield case("no_key", ragged + block, block // 2 + 3, 1, 1)
        yield case("one_by_one", 1, 1, 1, 1)
    yield case("one_row", 1, 2 * block + 1, 1 if group else 2, 1, data="edges")
    options = {"layout": "fused", "data": "edges", "scale_factor": 1.3}
    yield case("fused", block + 9, block + 9, *fused, **options)


def _magnitudes(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """Scores that rise, are far from 0 or -inf, and scales."""
    block, few = tiles.kv, min(tiles.positions, 33)

    def case(
        tag: str, kv: int, q: int = few, kv_heads: int = 1, **options: Any
    ) -> Case:
        return _fitted(spec, tiles, tag, q, kv, 1, kv_heads, **options)

    # Heads of three slopes.
    yield case(
        "rising", 4 * block, kv_heads=math.ceil(3 / spec["q_per_kv"]), data="rising"
    )
    # Heads of four columns.
    yield case(
        "columns", 2 * block, kv_heads=math.ceil(4 / spec["q_per_kv"]), data="columns"
    )
    if masks.of_spec(spec).right_edges:
        yield case("future", 2 * block + 5, data="future")
    if spec["dtype"] != "e4m3":  # which has no infinity
        yield case("minus_inf", 2 * block - 5, data="first_at_minus_inf")
        yield case("all_minus_inf", block // 2 + 1, data="all_at_minus_inf")
    elif (
        spec["seqlen"]["kv"] == DYNAMIC
    ):  # sums that the tensor cores alone would cut off
        yield case("mean_v", MEAN_KEYS, min(tiles.positions, 100), data="mean_v")
    yield case("steep", block + 3, scale_factor=STEEP)
    if "softcap" in spec:
        yield case("saturated", 2 * block + 3, data="saturated")
    yield case("peaks", 2 * block, tiles.positions, data="peaks")
    kv = spec["seqlen"]["kv"]
    if kv != DYNAMIC and int(kv) > LONG_TILE * block:
        return
    yield case("flat", block - 3, scale_factor=FLAT)
    yield case("logits_1e4", block + 9, scale_factor=LARGE_LOGITS)
    yield case("uniform_1e4", block + 1, data="uniform_1e4")
    large: dict[str, Any] = {"kv_heads": 2, "data": "all_1e4"}
    yield case("all_1e4", block + 3, **large)
    yield case("all_1e4_steep", block + 3, scale_factor=LARGE_LOGITS, **large)
    yield case("slope", 4 * block, min(tiles.positions, 64), data="slope")
    yield case("close", block + 9, data="close", scale_factor=LARGE_LOGITS)


def _sinks(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """Sinks far above and below the scores, and infinite ones, a head of each."""
    kv_heads, few = math.ceil(SINKS / spec["q_per_kv"]), min(tiles.positions, 33)

    def case(tag: str, kv: int, **options: Any) -> Case:
        return _fitted(spec, tiles, tag, few, kv, 1, kv_heads, data="sinks", **options)

    yield case("sinks", tiles.kv + 5)
    yield case("sinks_steep", tiles.kv - 1, scale_factor=STEEP)
    # Rows that see no key, where the mask has an edge; the least float, scaled, is -inf.
    alone: dict[str, Any] = {"layout": "mixed", "scale_factor": STEEP}
    yield case("sinks_alone", max(few // 2, 1), **alone)


def _lists(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """Block lists of every kind, for several tiles, heads and batches that share some of them."""
    kv_heads = 2 if spec["q_per_kv"] == 1 else 1
    for number, kind in enumerate(PATTERNS):
        options: dict[str, Any] = {
            "lists": Drawn(kind, AXES[number % len(AXES)]),
            "data": "edges" if kind == "all" else "normal",
            "layout": ("own", "bhsd", "mixed", "plain")[number % 4],
            # Roles that count other blocks than one another no longer meet in the rings.
            "timing": kind in ("shuffled", "some_tiles", "one"),
        }
        kv = 4 * tiles.kv - (number + 1) % 3 * (tiles.kv // 2)
        rows, tag = tiles.q + 5, f"lists_{kind}"
        yield _fitted(spec, tiles, tag, rows, kv, 2, kv_heads, **options)


def _params(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """What the mask reads at its ends, and on tiles; batches that differ."""
    rows, group = tiles.cluster_rows, spec["q_per_kv"] // tiles.heads > 1
    for number, kind in enumerate(get_args(Params)):
        # Of the last tile some rows are beyond the end; queries stand behind the first keys.
        q = rows + 5 if group else 2 * rows + 5
        kv = q + tiles.kv + number
        yield _fitted(
            *(spec, tiles, f"params_{kind}", q, kv, 2, 1),
            params=kind,
            data=("edges", "second_rows")[number % 2],
            layout=("own", "mixed", "bhsd", "own")[number],
            timing=kind in ("some", "least"),
        )
        if spec["seqlen"]["kv"] == DYNAMIC:
            yield _fitted(
                *(spec, tiles, f"short_{kind}", q, tiles.kv // 2 + 3, 1, 1),
                params=kind,
                data="edges",
            )


def _slopes(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """Slopes of all kinds, a head of each; none and a steep one over many keys."""
    few = min(tiles.positions, 33)

    def case(tag: str, kv: int, heads: int, **options: Any) -> Case:
        kv_heads = math.ceil(heads / spec["q_per_kv"])
        return _fitted(spec, tiles, tag, few, kv, 1, kv_heads, data="slopes", **options)

    yield case("slopes", 4 * tiles.kv + 1, SLOPES)
    yield case("slopes_steep", tiles.kv + 5, SLOPES, scale_factor=STEEP)
    yield case("slopes_far", FAR_KEYS, 2)


def _biases(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """Biases of -inf, far above and far below all scores, a head of each kind."""
    kv_heads, few = math.ceil(BIASES / spec["q_per_kv"]), min(tiles.positions, 33)
    for tag, kv, layout in (
        ("biases", tiles.kv + 5, "own"),
        ("biases_strided", 2 * tiles.kv - 3, "bhsd"),
    ):
        yield _fitted(
            *(spec, tiles, tag, few, kv, 1, kv_heads), data="biases", layout=layout
        )


def _residues(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """Every residue of kv to a KV tile; of kv - q, too, where the mask has an edge there.

    For less rows than a query tile has, and for more.
    """
    moves = bool(masks.of_spec(spec).right_edges)
    below, above = max(tiles.positions // 2 + 3, 1), tiles.cluster_rows + 3
    kinds = [("below", below, moves), ("above", above, moves)]
    kinds += [("tail", min(5, tiles.positions), False)] * moves
    for tag, rows, of_difference in kinds:
        fixed = spec["seqlen"]["q"]
        q = rows if fixed == DYNAMIC else int(fixed)
        for number, residue in enumerate(residues(tiles.kv)):
            kv = residue + q * of_difference
            if (
                tag == "above"
            ):  # less keys than rows, so that the difference is negative
                kv %= tiles.kv
            kv = kv if kv > tiles.kv // 2 else kv + tiles.kv
            layout = ("own", "mixed", "bhsd")[number % 3]
            name = f"{tag}_{residue}"
            yield _fitted(spec, tiles, name, q, kv, 1, 1, data="edges", layout=layout)


def _steps(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """Of edges that are no window's: each number in them, and its double, among the positions.

    A great one is the first position: rows before it would cost many blocks.
    """
    rows, heads = tiles.cluster_rows + 3, spec["q_per_kv"] // tiles.heads
    for number in masks.of_spec(spec).steps:
        near = [number - 1, number, number + 1]
        near += [number + rows // 2, 2 * number + rows // 2]
        if number * heads > MANY_BLOCKS * tiles.kv:
            near = [number + rows]
        for kv in near:
            yield _fitted(spec, tiles, f"step_{kv}", rows, kv, 1, 1, data="edges")


def _window(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """Of edges that are not the diagonal, and of a gap's end: every residue to a KV tile, inside K.

    A window that is shorter than a tile, or longer than K, is so in other cases, too.
    """
    mask, fixed = masks.of_spec(spec), spec["seqlen"]["q"]
    left, right = mask.reach or 0, mask.right or 0
    if mask.reach is None and not right:
        return
    side = "right" if mask.reach is None else "left" if mask.gap.empty else "gap"
    rows, block = tiles.cluster_rows, tiles.kv

    def case(tag: str, q: int, hidden: int, **options: Any) -> Case:
        """q: rows whose right edge is inside K. hidden: keys before the first row's first one."""
        q = q + right if fixed == DYNAMIC else int(fixed)
        kv = max(q + left + hidden, 1)
        return _fitted(spec, tiles, tag, q, kv, 1, 1, **options)

    below, above = max(tiles.positions // 2 + 3, 1), rows + 3
    # A longer window is another constant in the same instructions, and costs many blocks.
    work_of_head = spec["q_per_kv"] // tiles.heads
    is_short = work_of_head * (left + right) <= MANY_BLOCKS * block
    for number, residue in enumerate(residues(block) if is_short else (1,)):
        q, hidden = (below, above)[number % 2], (1 + number % 3) * block + residue
        layout: Layout = ("own", "mixed", "bhsd")[number % 3]
        yield case(f"{side}_{residue}", q, hidden, data="edges", layout=layout)
    # Some rows of a tile see the first key, or have no gap.
    begins, _ = mask.gaps(np.zeros(1, np.int64), Lengths(1, block))
    begin = 0 if mask.gap.empty else int(begins[0])
    yield case(f"{side}_of_some", below, begin - below // 2, data="edges")
    if is_short:
        # Each tile of a CTA begins and ends with other blocks, through which the rings go on.
        slide = 2 * rows + 5
        yield case("slides", slide, -rows, timing=True, data="second_rows")
    if not mask.gap.empty:
        # The last row of a tile misses the first key of a block, alone, and of all keys it would
        # weigh most: `inputs.values` gives the ninth row from the end the last key of its gap.
        yield case(
            "gap_of_last", rows + 8, 2 * block + (2 - rows) % block, data="edges"
        )
    if right:  # rows that see no key come before those that do
        late = right + rows + 5
        yield _fitted(spec, tiles, "late", late, block // 2 + 3, 1, 1, data="edges")
        # The first row misses the last key of a block, alone, and of all keys it would weigh most:
        # `inputs.values` gives the first of 3, 43, ... rows the key behind its last.
        q = below + -(right + below - 3) % 40
        yield case("end", q, 2 * block - 2 - left - right, data="edges")


def _calls(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """Where tensors lie, and what `fmha` is left to decide."""
    few = max((min(tiles.positions, 17) - 1) | 1, 3)  # odd: heads are even

    def case(tag: Layout, kv: int, *counts: int, **options: Any) -> Case:
        return _fitted(spec, tiles, tag, few, kv, *counts, layout=tag, **options)

    # On a GPU that has more SMs than there are work tiles.
    yield case(
        "far", tiles.kv // 2, 2, 2, clusters=ARCHITECTURES[spec["arch"]].sm_count
    )
    yield case("plain", tiles.kv - 1, 2, 2)
    kv = spec["seqlen"]["kv"]
    if kv == DYNAMIC or int(kv) <= LONG_TILE * tiles.kv:
        yield case("cache", tiles.kv + 2, 1, 1)


def _large(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """As many work tiles as fill a GPU several times, and lengths as users have them."""

    def case(tag: str, q: int, kv: int, *counts: int, **options: Any) -> Case:
        return _fitted(spec, tiles, tag, q, kv, *counts, fill=True, **options)

    def many(tag: str, q: int, kv: int, **options: Any) -> Case:
        # So many that some CTA of a persistent grid takes a third work tile.
        sms = ARCHITECTURES[spec["arch"]].sm_count
        fixed = spec["seqlen"]["q"]
        length = q if fixed == DYNAMIC else int(fixed)
        of_head = 3 * math.ceil(length / tiles.cluster_rows)
        heads = math.ceil((2 * (sms // tiles.ctas) + 1) / of_head)
        kv_heads = math.ceil(heads * tiles.heads / spec["q_per_kv"])
        return case(tag, q, kv, 3, kv_heads, repeats=REPEATS, **options)

    for number, ((q, kv), counts) in enumerate(_LONGER):
        yield case("plain", q, kv, *counts, data=("normal", "edges")[number % 2])
    yield case("steep", 129, 1000, 3, 1, scale_factor=STEEP, repeats=REPEATS)
    yield case("huge_key", 129, 1000, 1, 2, data="huge_key")
    yield case("fused", 1000, 1000, 1, 3, layout="fused")
    yield many("many_odd", ODD_TILES_LENGTH, 129, layout="plain")
    yield many("many_even", EVEN_TILES_LENGTH, 1000, data="edges")
    yield many("many_one_block", ODD_TILES_LENGTH, 1, layout="mixed")
    yield case("long_kv", 129, 4097, 1, 1)
    mask = masks.of_spec(spec)
    if mask.reach is not None or mask.right:
        q = EVEN_TILES_LENGTH + (mask.right or 0)
        yield many("many_slide", q, (mask.reach or 0) + q // 2, data="edges")
    for kind in ("some", "shuffled", "some_tiles") if spec.get("blocks") else ():
        drawn = {"lists": Drawn(kind, "bh"), "layout": "plain"}
        yield many(f"many_lists_{kind}", EVEN_TILES_LENGTH, 4097, **drawn)
    for kind in get_args(Params) if mask.params else ():
        q = EVEN_TILES_LENGTH
        yield many(f"many_{kind}", q, q, params=kind, data="edges")
    for number in mask.steps:
        q = EVEN_TILES_LENGTH
        yield many(f"many_step_{number}", q, number + q // 2, data="edges")


def _fitted(
    spec: Mapping[str, Any],
    tiles: Tiles,
    tag: str,
    q: int,
    kv: int,
    batch: int,
    kv_heads: int,
    *,
    clusters: int = 1,
    idle: int = 0,
    fill: bool = False,
    **options: Any,
) -> Case:
    """A case with the fixed lengths of the spec.

    clusters: of the GPU that the kernel is told of, and idle: its SMs beyond them; the GPU is a
    whole one if the case shall fill it.
    """
    q, kv = (
        length if fixed == DYNAMIC else int(fixed)
        for length, fixed in ((q, spec["seqlen"]["q"]), (kv, spec["seqlen"]["kv"]))
    )
    name = f"{tag}_b{batch}_hkv{kv_heads}_q{q}_kv{kv}"
    made = Case(name, batch, kv_heads, q, kv, **options)
    if fill:
        return made
    work, per_tile = work_tiles(made, spec, tiles), _most_blocks(made, spec, tiles)
    running: tuple[int, ...] | None = None
    if work * per_tile > MANY_BLOCKS and DYNAMIC not in spec["seqlen"].values():
        # Every cluster has a work tile, or one has two; of more clusters the others do not start.
        two = tag == "strided" and not tiles.single
        busy = work // 2 if two else work
        clusters, last = max(clusters, busy), busy - 1
        running = tuple(sorted({0, last // 2, last})) if tag == "ragged" else (last,)
        work = len(running) * (1 + two)
    sm_count = clusters * tiles.ctas + idle
    return replace(made, sm_count=sm_count, clusters=running, blocks=work * per_tile)


def _packed(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """Packed sequences of all lengths, many and few, and offsets that leave the tensors."""
    rows, block, group = tiles.positions, tiles.kv, spec["q_per_kv"] // tiles.heads
    few, in_8_bits = min(rows, 33), spec["dtype"] == "e4m3"  # which has no infinity

    def case(tag: str, lengths: Packed, kv_heads: int = 1, **options: Any) -> Case:
        return _fitted_packed(spec, tiles, tag, lengths, kv_heads, **options)

    mixed = ((5, 7), (0, 33), (rows + 2, 2 * block + 1), (64, 0), (1, 90), (0, 0))
    yield case("mixed", mixed, data="edges", timing=True, clusters=2)
    alike = tuple((q, q) for q, _ in mixed)
    yield case(
        "alike", alike, layout="fused", scale_factor=1.3, clusters=2, timing=True
    )
    tails = (1, 2, 63, 64, 65, 127, 128, 129)
    for number, residue in enumerate(residues(block)):
        lengths = tuple((q, q + residue + block * (n % 2)) for n, q in enumerate(tails))
        yield case(
            f"tails_{residue}",
            lengths[number % 2 :: 2],
            data="edges",
            layout=("own", "mixed", "bhsd")[number % 3],
            clusters=2,
        )
    less = ((rows + 5, 3), (129, 64), (70, 1), (2 * rows + 1, block + 1))
    yield case("few_keys", less, data="edges", timing=True, clusters=2)
    # Groups of sequences that a warp reads at once: less than one, one, more; and among one row
    # each a long sequence, the first of its group or the last.
    counts = ((1, 0), (31, 30), (32, 0), (33, 32), (70, 31))
    for number, long in counts if group == 1 else counts[::3]:
        short = tuple((1, 1 + n % 5) for n in range(number))
        lengths = *short[:long], (rows + 3, block + 5), *short[long + 1 :]
        yield case(f"sequences_{number}", lengths, clusters=3, timing=number > 32)
    padding = ((0, 0),) * 33
    yield case("padded", (*padding, (65, 66), *padding, (2, 9), *padding), clusters=2)
    yield case("idle", ((3, 4), (2, 2)), clusters=2 + 2 * group, timing=True)
    # More tiles of a CTA than any ring has phases, of one block each.
    many = ((few, 7), (0, 1), (1, 1), (few, few)) * math.ceil(MANY_TILES / 9 / group)
    yield case("tiles", many, 3, layout="mixed")
    yield case("long_kv", ((5, 9 * block), (rows + 5, 2 * block)), data="negative")
    if tiles.level:
        # Tiles of one, two and three levels, and more than one sequence of a level.
        level, more = tiles.level * rows, rows // 2 + 1
        several = (
            (rows + 1, 2 * level + 5),
            (level + more, level + more),
            (rows, level),
        )
        yield case("levels", ((1, 3), *several), clusters=3, timing=True)
    # Offsets before the first row and behind the last: sequences are cut.
    out = ((few, 70), (0, 3), (64, few), (few, block))
    yield case("outside", out, outside=-20, layout="bhsd")
    # Offsets fall: the first sequence and the third have no rows, the fourth is before the second.
    back = rows + block + 40
    falling = (-9, -9), (rows + 3, block + 5), (-back, -back), (few, few)
    yield case("falling", falling, outside=4 * back, data="edges")
    for layout in ("far", "plain", "cache"):
        outside = 0 if layout == "plain" else OUTSIDE
        pair = ((few, block // 2), (3, 5))
        yield case(layout, pair, 2, outside=outside, layout=layout)
    kinds: list[Data] = [
        "rising",
        "columns",
        "huge_key",
        "second_rows",
        "peaks",
        "slope",
    ]
    kinds += [] if in_8_bits else ["first_at_minus_inf", "all_at_minus_inf"]
    kinds += ["uniform_1e4", "all_1e4", "close"]
    kinds += ["future"] if masks.of_spec(spec).right_edges else []
    kinds += ["saturated"] if "softcap" in spec else []
    kinds += ["slopes"] if spec.get("alibi") else []
    kinds += ["sinks"] if spec.get("sink") else []
    for data in kinds:
        heads = {"sinks": SINKS, "slopes": SLOPES}.get(data, 3)
        heads = math.ceil(heads / spec["q_per_kv"])
        pair = ((few, 2 * block - 5), (min(rows, 65), block + 3))
        yield case(data, pair, heads, data=data, clusters=2)
    for tag, factor in (("steep", STEEP), ("flat", FLAT), ("logits", LARGE_LOGITS)):
        yield case(tag, ((few, block + 9), (1, 2)), scale_factor=factor)
    if in_8_bits:  # sums that the tensor cores alone would cut off
        yield case("mean_v", ((few, MEAN_KEYS),), data="mean_v")
    if spec.get("descale"):
        three = ((few, block + 3), (3, 9), (rows + 2, block // 2))
        yield case("descales", three, 3, data="descales", clusters=2)
    if is_paged(spec):
        yield from _pages(spec, tiles)
    # On a whole GPU.
    lengths = tuple((n * 37 % 700, n * 53 % 900) for n in range(70))
    yield case("many", lengths, 2, fill=True, repeats=REPEATS)
    ones = ((1, 30),) * 255
    yield case("one_long", (*ones[:99], (2000, 4097), *ones[99:]), 2, fill=True)
    yield case("batch_1024", ((3, 40), (0, 0)) * 512, 1, fill=True, data="edges")


def _pages(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """Keys beside the ends of pages and of tiles, a full table, and one query of each sequence."""
    page, block = page_of(spec), tiles.kv
    ends = sorted({edge + n for edge in (page, block) for n in (-1, 0, 1)})
    ragged = tuple((3 + 5 * n % 11, kv) for n, kv in enumerate((1, *ends)))
    several = (tiles.positions + 2, 3 * block + page // 2 + 1)
    options: dict[str, Any] = {"data": "edges", "clusters": 2}
    yield _fitted_packed(
        *(spec, tiles, "pages", (*ragged, several), 1), timing=True, **options
    )
    filled = -(-2 * block // page) * page
    full = ((5, filled), (min(tiles.positions, 33), filled), (1, filled), (2, 9))
    yield _fitted_packed(spec, tiles, "full", full, 1, layout="cache", **options)
    count = 33 if spec["q_per_kv"] == tiles.heads else 9
    decode = tuple((1, 1 + n * 37 % (2 * block)) for n in range(count))
    yield _fitted_packed(
        *(spec, tiles, "decode", decode, 1), layout="fused", clusters=3, timing=True
    )


def _packed_walks(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    """On GPUs of any size; more sequences than a warp reads at once, and one beside many."""
    rows, block, sms = tiles.positions, tiles.kv, ARCHITECTURES[spec["arch"]].sm_count

    def walk(tag: str, lengths: Packed, kv_heads: int, sm_count: int = sms) -> Case:
        made = _fitted_packed(spec, tiles, tag, lengths, kv_heads, layout="mixed")
        return replace(made, sm_count=sm_count)

    some = ((3 * rows + 1, block + 1), (0, 5), (2 * rows, 0), (1, 1), (rows, 3 * block))
    for sm_count in sorted({1, 7, 114, 132, sms}):
        yield walk(f"sms_{sm_count}", some, 3, sm_count)
    many = tuple((n % 3 * 50, n % 7 * 20) for n in range(1000))
    yield walk("many", many, 1)
    ones = ((1, 1),) * 255
    yield walk("one_long", (*ones, (20 * rows, 9 * block)), 1)
    longest = 5 * max(tiles.level, 1) * rows
    levels = tuple((n * 97 % longest, n * 61 % (2 * longest)) for n in range(40))
    yield walk("levels", levels, 2, 7)
    heads = math.ceil(MANY * tiles.heads / 2 / spec["q_per_kv"])
    few = (0, MANY_CLUSTERS // 2, MANY_CLUSTERS - 1)
    many_tiles = walk("many_tiles", ((1, 1), (0, 9), (2, 2)), heads, MANY_CLUSTERS)
    yield replace(many_tiles, clusters=few)


def _fitted_packed(
    spec: Mapping[str, Any],
    tiles: Tiles,
    tag: str,
    lengths: Packed,
    kv_heads: int,
    *,
    clusters: int = 1,
    outside: int = OUTSIDE,
    fill: bool = False,
    **options: Any,
) -> Case:
    """A case of packed sequences. outside: rows of none; clusters, fill: as of `_fitted`."""
    if is_paged(spec):
        lengths = tuple((q, max(kv, 0)) for q, kv in lengths)
    q, kv = (sum(each) + outside for each in zip(*lengths, strict=True))
    if is_paged(spec):
        page, spare = page_of(spec), SPARE_PAGES * ((outside > 0) - (outside < 0))
        kv = max(sum(-(-kv // page) for _, kv in lengths) + spare, 1) * page
    name = f"{tag}_b{len(lengths)}_hkv{kv_heads}_q{q}_kv{kv}"
    made = Case(name, len(lengths), kv_heads, q, kv, lengths=lengths, **options)
    if fill:
        return made
    apart = [
        replace(made, batch=1, q=q, kv=kv, lengths=()) for q, kv in lengths if q > 0
    ]
    blocks = sum(
        work_tiles(one, spec, tiles) * _most_blocks(one, spec, tiles) for one in apart
    )
    return replace(made, sm_count=clusters, blocks=blocks)


def _most_blocks(case: Case, spec: Mapping[str, Any], tiles: Tiles) -> int:
    """KV blocks of the work tile that has most; with lists or params, all of K at most."""
    if spec.get("blocks") or masks.of_spec(spec).params:
        return math.ceil(case.kv / tiles.kv)
    first = np.arange(0, case.q, tiles.cluster_rows)
    end, lengths = first + tiles.cluster_rows, Lengths(case.q, case.kv)
    blocks = masks.of_spec(spec).key_blocks(first, end, lengths, tiles.kv)
    return int(blocks.total.max())
