# SPDX-License-Identifier: Apache-2.0
"""Which problems a kernel runs in the emulator: small, and each for something that can go wrong.

A persistent CTA gets several work tiles from a small problem when it is told that the GPU has few
SMs. Lengths are stated in the kernel's own tiles, so that each has the tails it is there for.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .cases import DYNAMIC

Data = Literal["normal", "huge_key", "negative", "second_rows"]
Layout = Literal["bshd", "bhsd", "fused"]

# A fixed length may be too much for a model. More blocks than this, and only one cluster runs, with
# the work tiles that it has on a GPU of as many SMs as give it that many.
MANY_BLOCKS = 48  # (work tile, KV block) pairs
TILES_OF_A_CLUSTER = 2


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts a problem. cluster: CTAs along (query tiles, query heads).

    sms_per_head: a causal kernel finishes as many heads as the GPU has SMs over this before it
    starts the next ones; 0 for other kernels. q_releases: arrivals that free each Q stage once.
    packed: query heads whose rows a tile holds. single: a cluster has one work tile, whatever the
    number of SMs.
    """

    q: int  # [rows]
    kv: int  # [rows]
    cluster: tuple[int, int]
    sms_per_head: int = 0
    q_releases: int = 2
    packed: int = 1
    single: bool = False

    @property
    def ctas(self) -> int:
        """Of a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def positions(self) -> int:
        """Query rows of one head in a tile."""
        return self.q // self.packed

    @property
    def cluster_rows(self) -> int:
        """Query rows of one head that a cluster works on at a time."""
        return self.positions * self.cluster[0]

    @property
    def heads(self) -> int:
        """Query heads that a cluster works on at a time."""
        return self.packed * self.cluster[1]


@dataclass(frozen=True)
class Case:
    """One launch.

    batch, kv_heads: run-time counts; query heads are ``kv_heads * q_per_kv``. q, kv: rows.
    sm_count: what the kernel is told. clusters: those that run, by number; None for all.
    layout: of q, k and v, as in `cases.Case`.
    """

    name: str
    batch: int
    kv_heads: int
    q: int
    kv: int
    sm_count: int
    clusters: tuple[int, ...] | None = None
    data: Data = "normal"
    layout: Layout = "bshd"

    @property
    def seed(self) -> int:
        """The same on every machine and in every run, and another one for each case."""
        return zlib.crc32(self.name.encode())


def cases_for(spec: Mapping[str, Any], tiles: Tiles) -> tuple[Case, ...]:
    """All cases of a SPEC, without duplicates; a fixed length replaces each length on its side."""
    cases: dict[tuple[object, ...], Case] = {}
    for case in _candidates(spec, tiles):
        call = (case.batch, case.kv_heads, case.q, case.kv, case.data, case.layout)
        cases.setdefault(call, case)
    return tuple(cases.values())


def _candidates(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    rows, block = tiles.cluster_rows, tiles.kv
    # Groups of many heads give a cluster its work tiles, a single head must have rows for it.
    work_of_head = spec["q_per_kv"] // tiles.heads
    group = work_of_head > 1
    twice = rows if group else 2 * rows
    ragged = twice - rows // 2 + 5

    def case(tag: str, q: int, kv: int, *counts: int, **options: Any) -> Case:
        return _fitted(spec, tiles, tag, q, kv, *counts, **options)

    fused, strided = ((1, 2), (2, 1)) if group else ((2, 1), (2, 2))
    options: dict[str, Any] = {"layout": "bhsd", "data": "huge_key"}
    yield case("ragged", ragged, 3 * block + block // 2 + 1, 1, 1)
    yield case("strided", 33, 3 * block - 7, *strided, **options)
    if DYNAMIC not in spec["seqlen"].values():
        return
    second: dict[str, Any] = {"data": "second_rows"}
    yield case("exact", twice, 3 * block, 1, 1, **second)
    blocks = 1 if group else 2
    odd = math.ceil(5 / work_of_head)
    yield case(
        "waves", max(rows - 1, 1), blocks * block + 1, 1, odd, clusters=2, **second
    )
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
        few = 5 if group else rows + 5
        yield case("long_kv", few, 14 * block, 1, 1, data="negative")
        # Causal: a warpgroup without a row has no masked block, in a tile after another, either.
        # With a group of heads `long_kv` has such tiles.
        if tiles.sms_per_head and not group:
            yield case("few_rows", max(tiles.positions // 16, 1), 2 * block, 1, 2)
        # Causal: rows of the last block, and one before it that not all rows see whole.
        yield case("half", rows, rows + block + block // 2, 1, 1, **second)
        # Sections of heads, the last one smaller than the others.
        if tiles.sms_per_head:
            kv_heads = math.ceil(3 / work_of_head)
            heads = kv_heads * work_of_head
            section = next(size for size in (2, 3, 5, 7) if heads % size)
            clusters = section * tiles.sms_per_head // tiles.ctas
            tail = rows + 1
            yield case("sections", tail, tail, 1, kv_heads, clusters=clusters)
        # Rows that see no key, with causal. More tiles of one block than there are Q stages: only
        # then does nothing else that the producer waits for imply that a Q stage is free. And more
        # than arrivals free them: a barrier that counts one too few is then a phase ahead.
        q = spec["seqlen"]["q"]
        q_tiles = math.ceil((ragged if q == DYNAMIC else int(q)) / rows)
        batch = math.ceil((tiles.q_releases + 1) / (q_tiles * work_of_head))
        yield case("short_kv", ragged, block // 2 + 3, batch, 1)
        yield case("one_key", ragged, 1, 1, 1)
        if tiles.packed > 1:
            # Few positions make a tile. Of a second one, some that do not reach the block that
            # others begin with; and several tiles that see no key.
            edge = 2 * block - tiles.positions - tiles.positions // 2
            yield case("edge", 2 * rows, 2 * rows + edge, 1, 1, **second)
            yield case("no_key", ragged + block, block // 2 + 3, 1, 1)
        yield case("one_by_one", 1, 1, 1, 1)
    yield case("one_row", 1, 2 * block + 1, 1 if group else 2, 1)
    yield case("fused", block + 9, block + 9, *fused, layout="fused")


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
    **options: Any,
) -> Case:
    """A case with the fixed lengths of the spec, on some clusters when it is long."""
    q, kv = (
        length if fixed == DYNAMIC else int(fixed)
        for length, fixed in ((q, spec["seqlen"]["q"]), (kv, spec["seqlen"]["kv"]))
    )
    heads = kv_heads * spec["q_per_kv"] // tiles.heads
    work = batch * heads * math.ceil(q / tiles.cluster_rows)
    running: tuple[int, ...] | None = None
    if work * math.ceil(kv / tiles.kv) > MANY_BLOCKS:
        clusters = max(clusters, work // TILES_OF_A_CLUSTER)
        # The first one has the longest and the shortest tile of a causal problem.
        running = (0 if tag == "ragged" else clusters - 1,)
        if tiles.single:
            running = (0, work - 1)
    name = f"{tag}_b{batch}_hkv{kv_heads}_q{q}_kv{kv}"
    sm_count = clusters * tiles.ctas
    return Case(name, batch, kv_heads, q, kv, sm_count, running, **options)
