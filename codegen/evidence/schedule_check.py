# SPDX-License-Identifier: Apache-2.0
"""What the CTAs of a launch must have loaded and stored, compared with what a walk saw.

Independent of how a kernel deals out its work. Every row of every output is stored once; the CTA
that stores a row of out has loaded that row of Q; and a cluster has loaded, for each of its work
tiles and in their order, those KV blocks that one of the tile's rows sees, K and V alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..emulator.walk import Boxes, Extent, Walk
from ..ops import lists, masks, operation_of
from ..ops.cases import Case, Tiles, most_clusters, work_tiles
from ..ops.e4m3 import is_permuted
from ..ops.inputs import params
from ..ops.masks import KeyBlocks, Lengths
from ..ops.operation import Sizes
from ..ops.paged import is_paged, pages_of, slots_of
from ..ops.varlen import is_packed, rows_of

I64 = NDArray[np.int64]

MOST_CTAS = 16  # of a cluster
PAGE_ROWS = 16  # that pages, KV tiles and boxes of pages are multiples of
NOTHING = -1  # in place of a KV block's number: a box that is outside
MOST_FINDINGS = 8  # of each check, that are worded
MOST_BLOCKS = 10_000
"""(work tile, KV block) pairs that are walked in seconds: one takes about a millisecond."""


def extent(
    name: str,
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
) -> Extent:
    """A tensor for `walk`. strides: [elements]"""
    return Extent(
        name, address, tuple(sizes), tuple(s * itemsize for s in strides), itemsize
    )


def blocks_of(tiles: Tiles, spec: Mapping[str, Any], sizes: Sizes) -> int:
    """(Work tile, KV block) pairs of a problem."""
    plan = _plan(tiles, spec, sizes)
    if isinstance(plan, _PackedPlan):
        return plan.all_blocks
    batches = range(sizes.batch if plan.mask.params else 1)
    heads = range(
        0, plan.heads if plan.mask.reads("h", "h_kv") else tiles.heads, tiles.heads
    )
    known = sum(plan.count(batch, head) for batch in batches for head in heads)
    return (
        sizes.batch // len(batches) * (plan.heads // tiles.heads // len(heads)) * known
    )


def refusal(
    tiles: Tiles, spec: Mapping[str, Any], sizes: Sizes, share: float = 1.0
) -> str:
    """Why a problem is not walked; empty when it is. share: of the clusters that would run."""
    blocks = int(blocks_of(tiles, spec, sizes) * share)
    if blocks <= MOST_BLOCKS:
        return ""
    return (
        f"{blocks} KV blocks of all work tiles are not walked: more than {MOST_BLOCKS}"
    )


def grid_finding(
    grid: Sequence[int], tiles: Tiles, spec: Mapping[str, Any], case: Case
) -> str:
    """What is wrong with the size of a launch; empty when nothing is. grid: [CTAs].

    A persistent kernel that launches more CTAs than the GPU holds is right, and takes them in
    turn: nothing else shows it.
    """
    ctas, most = math.prod(grid), most_clusters(case, spec, tiles) * tiles.ctas
    if ctas % tiles.ctas == 0 and tiles.ctas <= ctas <= most:
        return ""
    work = work_tiles(case, spec, tiles)
    return (
        f"{ctas} CTAs, at most {most} in clusters of {tiles.ctas} have a place and one of {work} "
        f"work tiles: the GPU has {case.sm_count} SMs"
    )


def schedule_findings(
    walk: Walk, tiles: Tiles, spec: Mapping[str, Any], sizes: Sizes
) -> list[str]:
    """What is wrong with a launch's schedule, in words; the walk's own findings come first.

    Tensors are called q, k, v, out (batch, row, head, column) and lse (batch, head, row). Of a walk
    of some clusters only what these did is judged: who stores the other rows is not known.
    """
    found = [str(finding) for finding in walk.findings]
    if found:
        return found  # the walk is not whole
    return list(_Check(walk, _plan(tiles, spec, sizes)).findings())


def _plan(tiles: Tiles, spec: Mapping[str, Any], sizes: Sizes) -> _Plan:
    if is_paged(spec):
        return _PagedPlan(tiles, spec, sizes)
    return (_PackedPlan if is_packed(spec) else _Plan)(tiles, spec, sizes)


class _Plan:
    """What must happen, by what the spec and the sizes say."""

    def __init__(self, tiles: Tiles, spec: Mapping[str, Any], sizes: Sizes) -> None:
        self.tiles, self.sizes = tiles, sizes
        self.group = int(spec["q_per_kv"])
        self.lengths, self.mask = Lengths(sizes.q, sizes.kv), masks.of_spec(spec)
        if self.mask.params:
            assert isinstance(sizes, Case)
            self.mask = self.mask.given(params(spec, tiles, sizes))
        operation = operation_of(spec)
        self.outputs = [tensor.name for tensor in operation.outputs(spec)]
        self.dims = {x.name: x.sizes(spec, sizes) for x in operation.tensors(spec)}
        if is_permuted(spec):  # V^T: its rows, of which a box has some, are keys here
            self.dims["v"] = dict(zip("bhds", self.dims["v"].values(), strict=True))
        self.pair = spec.get("cta_group", 1) == 2
        self.lists = lists.draw(spec, sizes)
        self.heads = sizes.kv_heads * self.group

    @property
    def tiles_of_head(self) -> int:
        """Work tiles of a cluster in a head."""
        return -(-self.sizes.q // self.tiles.cluster_rows)

    def count(self, batch: int, head: int) -> int:
        """KV blocks of all work tiles of a head; of lists, those of all heads on average."""
        if not self.lists:
            first = np.arange(0, self.sizes.q, self.tiles.cluster_rows)
            return int(self._key_blocks(batch, head, first).total.sum())
        counts = sum(self.lists[name] for name in lists.NAMES[::2])
        return int((np.maximum(counts, 1).mean((0, 1)).astype(int) + 1).sum())

    def blocks(self, work: _Work) -> Sequence[int]:
        """KV blocks that a cluster's work tile needs; one when its rows see no key."""
        if not self.lists:
            first = np.int64(work.tile * self.tiles.cluster_rows)
            return self._key_blocks(work.batch, work.head, first).taken()
        shape = self.lists["kv_indices"].shape
        place = min(work.batch, shape[0] - 1), min(work.head, shape[1] - 1), work.tile
        found: list[int] = []
        for counts, indices in zip(lists.NAMES[::2], lists.NAMES[1::2], strict=True):
            count = int(self.lists[counts][place])
            found += self.lists[indices][place][:count].tolist()
        return found or [shape[3]]  # which is behind K

    def _key_blocks(self, batch: int, head: int, first: I64) -> KeyBlocks:
        """Of the work tiles of a head that begin at these rows."""
        end = np.minimum(first + self.tiles.cluster_rows, self.sizes.q)
        mask = self.mask.at(batch, head, head // self.group)
        return mask.key_blocks(first, end, self.lengths, self.tiles.kv)

    def shape(self, name: str) -> tuple[int, int, int]:
        """(batch, rows, heads) of a tensor."""
        dims = self.dims[name]
        return dims.get("b", 1), dims["s"], dims["h"]

    def width(self, name: str) -> int:
        """Columns of a tensor."""
        return self.dims[name].get("d", 1)

    @property
    def rows(self) -> NDArray[np.bool_] | None:
        """Rows of outputs that are there to be stored; None for all."""
        return None

    def numbers(self, batch: I64, row: I64, head: I64) -> I64:
        """Numbers of the work tiles of query rows."""
        heads, tiles = self.heads // self.tiles.heads, self.tiles
        place: I64 = (batch * heads + head // tiles.heads) * self.tiles_of_head
        return place + row // tiles.cluster_rows

    def work_of(self, number: int) -> _Work:
        """The work tile of a number."""
        rest, tile = divmod(int(number), self.tiles_of_head)
        batch, head = divmod(rest, self.heads // self.tiles.heads)
        return _Work(batch, head * self.tiles.heads, tile)

    @property
    def spare_queries(self) -> NDArray[np.bool_]:
        """Rows of Q that a CTA may load more often, of [batch, row, head]."""
        return np.zeros((1, 1, 1), np.bool_)

    def query_tile(self, batch: int, row: int) -> tuple[int, int, int]:
        """Of a query row: its batch, its tile in a head, and how many rows that tile has."""
        positions = self.tiles.positions
        tile = row // positions
        return batch, tile, min(positions, self.sizes.q - tile * positions)

    def keys(self, work: _Work, block: int) -> tuple[Any, Any]:
        """Batch and rows of K where a work tile's block is: an index."""
        return work.batch, slice(block * self.tiles.kv, (block + 1) * self.tiles.kv)

    def block_at(self, batch: int, row: int) -> tuple[int, int]:
        """Batch and number of the KV block of a row of K."""
        return batch, row // self.tiles.kv

    def wanted(self, work: _Work) -> list[tuple[int, int]]:
        """As `block_at`, of the blocks of a work tile."""
        return [(work.batch, block) for block in self.blocks(work)]

    def spare(self, work: _Work) -> list[tuple[int, int]]:
        """Batches and rows of what a work tile may receive more often."""
        return []

    def meets(self, found: set[Any], wanted: frozenset[Any]) -> bool:
        """Whether boxes (batch, head, block) are those of a work tile."""
        return found == wanted

    def named(self, batch: int, block: int, head: int) -> str:
        """A KV block for a finding."""
        return f"KV block {block} of KV head {head}, batch {batch}"


class _PackedPlan(_Plan):
    """Of packed sequences: boxes have the batch 0, and a work tile that of its sequence."""

    def __init__(self, tiles: Tiles, spec: Mapping[str, Any], sizes: Sizes) -> None:
        super().__init__(tiles, spec, sizes)
        self._sequences = rows_of(sizes)
        self._keys = [x.kv.stop - x.kv.start for x in self._sequences]
        counts = [
            -(-(x.q.stop - x.q.start) // tiles.positions) for x in self._sequences
        ]
        self._counts = np.array(counts, np.int64)
        self._before = np.cumsum([0, *counts]) * (self.heads // tiles.heads)
        # Where each ends: of those that end there, a row before that is of the first.
        self._ends_q, self._ends_kv = (
            np.array([x.stop for x in each], np.int64)
            for each in zip(*((x.q, x.kv) for x in self._sequences), strict=True)
        )

    @property
    def all_blocks(self) -> int:
        """(Work tile, KV block) pairs."""
        tiles = enumerate(self._counts.tolist())
        works = (_Work(n, 0, tile) for n, count in tiles for tile in range(count))
        pairs = sum(len(self.blocks(work)) for work in works)
        return self.heads // self.tiles.heads * pairs

    @property
    def rows(self) -> NDArray[np.bool_]:
        found = np.zeros((1, self.sizes.q, 1), np.bool_)
        for each in self._sequences:
            found[:, each.q] = True
        return found

    @property
    def spare_queries(self) -> NDArray[np.bool_]:
        """The last of a sequence: what a part of a tile loads that is behind it."""
        found = np.zeros((1, self.sizes.q, 1), np.bool_)
        found[:, [x.q.stop - 1 for x in self._sequences if x.q.stop > x.q.start]] = True
        return found

    def blocks(self, work: _Work) -> Sequence[int]:
        rows = self._sequences[work.batch]
        lengths = Lengths(rows.q.stop - rows.q.start, self._keys[work.batch])
        first = work.tile * self.tiles.positions
        end = min(first + self.tiles.positions, lengths.q)
        return self.mask.key_blocks(first, end, lengths, self.tiles.kv).taken()

    def numbers(self, batch: I64, row: I64, head: I64) -> I64:
        number = np.searchsorted(self._ends_q, row, side="right")
        begins = np.array([x.q.start for x in self._sequences], np.int64)
        place: I64 = self._before[number]
        place = place + head // self.tiles.heads * self._counts[number]
        return place + (row - begins[number]) // self.tiles.positions

    def work_of(self, number: int) -> _Work:
        at = int(np.searchsorted(self._before, number, side="right")) - 1
        head, tile = divmod(int(number - self._before[at]), int(self._counts[at]))
        return _Work(at, head * self.tiles.heads, tile)

    def query_tile(self, batch: int, row: int) -> tuple[int, int, int]:
        positions = self.tiles.positions
        number = int(np.searchsorted(self._ends_q, row, side="right"))
        if number == len(self._sequences):
            return number, 0, positions
        rows = self._sequences[number].q
        tile = (row - rows.start) // positions
        left = rows.stop - rows.start - tile * positions
        return number, tile, min(positions, left)

    def keys(self, work: _Work, block: int) -> tuple[Any, Any]:
        """Of a sequence without keys the row before its end, or the first one."""
        rows = self._sequences[work.batch].kv
        if rows.start == rows.stop:
            end = max(rows.stop, 1)
            return 0, slice(end - 1, end)
        begin = rows.start + block * self.tiles.kv
        return 0, slice(begin, min(begin + self.tiles.kv, rows.stop))

    def block_at(self, batch: int, row: int) -> tuple[int, int]:
        """Of a row behind all sequences a block of the last one, which it has not."""
        number = int(np.searchsorted(self._ends_kv, row, side="right"))
        number = min(number, len(self._sequences) - 1)
        return number, (row - self._sequences[number].kv.start) // self.tiles.kv

    def wanted(self, work: _Work) -> list[tuple[int, int]]:
        """Of a sequence without keys: the block whose row it loads."""
        places = [self.keys(work, block) for block in self.blocks(work)]
        return [self.block_at(batch, rows.start) for batch, rows in places]


class _PagedPlan(_PackedPlan):
    """Of pages: boxes of K and V have one for a batch, and for a block PAGE_ROWS rows of it."""

    def __init__(self, tiles: Tiles, spec: Mapping[str, Any], sizes: Sizes) -> None:
        super().__init__(tiles, spec, sizes)
        self._slots, pages = slots_of(spec, sizes), pages_of(spec, sizes)
        self._keys = [len(x.page) for x in self._slots]
        self._last = [
            (int(x.page[-1]), int(x.row[-1])) if len(x.page) else (int(row[0]), 0)
            for x, row in zip(self._slots, pages, strict=True)
        ]

    def keys(self, work: _Work, block: int) -> tuple[Any, Any]:
        begin = block * self.tiles.kv
        page, row = (x[begin : begin + self.tiles.kv] for x in self._slots[work.batch])
        return page, row

    def spare(self, work: _Work) -> list[tuple[int, int]]:
        """Behind the last key a box may have that key; without keys the row where one would be."""
        return [self._last[work.batch]]

    def block_at(self, batch: int, row: int) -> tuple[int, int]:
        return batch, row // PAGE_ROWS

    def wanted(self, work: _Work) -> list[tuple[int, int]]:
        found = {self.block_at(*self._last[work.batch]): None}
        for block in self.blocks(work):
            page, row = self.keys(work, block)
            found |= dict.fromkeys(map(self.block_at, page.tolist(), row.tolist()))
        return list(found)

    def meets(self, found: set[Any], wanted: frozenset[Any]) -> bool:
        """Boxes may have several blocks, of which the first is in `found`, or nothing."""
        return {each for each in found if each[2] != NOTHING} <= wanted

    def named(self, batch: int, block: int, head: int) -> str:
        first = block * PAGE_ROWS
        return (
            f"rows {first} to {first + PAGE_ROWS - 1} of page {batch}, KV head {head}"
        )


@dataclass(frozen=True)
class _Work:
    """A work tile of a cluster: (batch, the first of its heads, number in the head)."""

    batch: int
    head: int
    tile: int


@dataclass(frozen=True)
class _Rows:
    """Boxes as rows: number of each row in (batch, row, head), and the box that it is of."""

    rows: I64
    box: I64


class _Check:
    """The findings of one walk."""

    def __init__(self, walk: Walk, plan: _Plan) -> None:
        self.walk, self.plan = walk, plan
        self.whole = len(walk.walked) == walk.clusters

    def findings(self) -> Iterator[str]:
        """In the order in which they should be read."""
        stored = self._stored("out")
        if stored is None:
            yield "no row of out is stored"
            return
        before = 0
        for name in self.plan.outputs:
            for text in self._stored_once(name, self._stored(name)):
                before += 1
                yield text
        loads = {name: self._named(self.walk.loads, name) for name in ("q", "k", "v")}
        for name, boxes in loads.items():
            if boxes is None:
                yield f"nothing of {name} is loaded"
                return
        if before:
            return  # what a CTA has to load is what it stores
        yield from islice(self._owned("q", loads["q"], stored), MOST_FINDINGS)
        for name in self.plan.outputs[1:]:
            boxes = self._stored(name)
            yield from islice(self._owned(name, boxes, stored), MOST_FINDINGS)
        problems = list(islice(self._blocks(loads, stored), MOST_FINDINGS))
        yield from problems
        if not problems:
            yield from islice(self._order(loads, stored), MOST_FINDINGS)

    def _named(self, boxes: Mapping[str, Boxes], name: str) -> Boxes | None:
        """Of a tensor as (batch, row, head, column)."""
        found = boxes.get(name)
        order = [*self.plan.dims[name]]
        if found is None or order == [*"bshd"]:
            return found
        # Of an axis that it does not have all is at 0.
        begin, end = (
            np.stack(
                [
                    x[:, order.index(kind)] if kind in order else np.full(len(x), only)
                    for kind in "bshd"
                ],
                axis=1,
            )
            for x, only in ((found.begin, 0), (found.end, 1))
        )
        return Boxes(
            *(found.cluster, found.cta, found.by, found.warp, found.line), begin, end
        )

    def _stored(self, name: str) -> Boxes | None:
        found = self._named(self.walk.stores, name)
        if found is None or self.plan.rows is None:
            return found
        # Behind a sequence's end an empty box is where another sequence may be.
        return found.where(np.flatnonzero((found.begin < found.end).all(axis=1)))

    def _stored_once(self, name: str, boxes: Boxes | None) -> Iterator[str]:
        if boxes is None:
            yield f"no row of {name} is stored"
            return
        least, most = _coverage(boxes, self.plan.shape(name), self.plan.width(name))
        rows = self.plan.rows
        if self.whole:
            missing = least == 0 if rows is None else rows & (least == 0)
            yield from self._worded(name, missing, "is stored by no CTA")
        if rows is not None:
            yield from self._worded(
                name, ~rows & (most > 0), "is of no sequence", boxes
            )
        bad = most > 1
        if bad.any():
            yield from self._worded(name, bad, "is stored more than once", boxes)

    def _worded(
        self, name: str, bad: NDArray[np.bool_], what: str, boxes: Boxes | None = None
    ) -> Iterator[str]:
        """Findings for rows [batch, row, head]; boxes: to say whose they are."""
        by_head = np.argwhere(bad.transpose(0, 2, 1))

        def tile_of(place: NDArray[Any]) -> tuple[int, int, int, int]:
            batch, tile, rows = self.plan.query_tile(int(place[0]), int(place[2]))
            return batch, int(place[1]), tile, rows

        for count, (key, places) in enumerate(groupby(by_head, tile_of)):
            if count == MOST_FINDINGS:
                yield f"... and more of {name}: {len(by_head)} rows in all"
                return
            batch, head, tile, wanted = key
            found = [*places]
            rows = [int(place[2]) for place in found]
            low, high = rows[0], rows[-1]
            text = f"query tile {tile} of head {head}, batch {batch}"
            if len(rows) < wanted:
                text += f", rows {low} to {high} ({len(rows)} of them)"
            text += f": {name} {what}"
            if boxes is not None:
                first = int(found[0][0]), low, head
                text += ": " + ", ".join(_who_covers(boxes, *first))
            yield text

    def _owned(self, name: str, boxes: Boxes | None, stored: Boxes) -> Iterator[str]:
        """Rows of which out is stored by another CTA than the one that has them in `boxes`."""
        assert boxes is not None
        shape = self.plan.shape(name)
        wanted, found = (_owners(each, shape) for each in (stored, boxes))
        verb = "loaded" if name == "q" else "stored"
        least, most = _coverage(boxes, shape, self.plan.width(name))
        there = wanted >= 0
        once = most == 1
        if name == "q":
            once |= (most > 1) & self.plan.spare_queries
        yield from self._worded(name, there & (least == 0), f"is {verb} by no CTA")
        more = there & (most > 1) & ~once
        yield from self._worded(name, more, f"is {verb} more than once", boxes)
        other = there & once & (least >= 1) & (found != wanted)
        what = f"is {verb} by another CTA than stores out"
        yield from self._worded(name, other, what, boxes)

    def _work(self, boxes: Boxes) -> I64:
        """Numbers of the work tiles that boxes of q or out belong to."""
        return self.plan.numbers(*boxes.begin[:, :3].T)

    def _blocks(
        self, loads: Mapping[str, Boxes | None], stored: Boxes
    ) -> Iterator[str]:
        """Each CTA, or pair of CTAs, receives what the rows of its cluster need."""
        work = self._work(stored)
        for name in ("k", "v"):
            boxes = loads[name]
            assert boxes is not None
            unit = boxes.cta // 2 if self.plan.pair else boxes.cta
            order = np.lexsort((unit, boxes.cluster))
            keys = np.stack([boxes.cluster[order], unit[order]], axis=1)
            changes = np.flatnonzero((np.diff(keys, axis=0) != 0).any(axis=1)) + 1
            seen = set()
            for part in np.split(order, changes):
                cluster, rank = int(boxes.cluster[part[0]]), int(unit[part[0]])
                seen.add(cluster)
                mine = np.unique(work[stored.cluster == cluster])
                who = (
                    f"{'pair' if self.plan.pair else 'cta'} {rank} of cluster {cluster}"
                )
                yield from self._received(name, boxes.where(part), mine, who)
            for cluster in sorted({*stored.cluster.tolist()} - seen):
                yield f"cluster {cluster} stores rows and loads nothing of {name}"

    def _received(self, name: str, boxes: Boxes, mine: I64, who: str) -> Iterator[str]:
        """What is not received once for each of the cluster's work tiles that needs it."""
        plan = self.plan
        works = [self.plan.work_of(number) for number in mine.tolist()]
        # Of the heads only those that it has to do with: there may be 2^16 of them.
        spans = zip(boxes.begin[:, 2].tolist(), boxes.end[:, 2].tolist(), strict=True)
        seen_heads = {head for span in {*spans} for head in range(*span)}
        heads = sorted(seen_heads | {work.head // plan.group for work in works})
        boxes = replace(boxes, begin=boxes.begin.copy(), end=boxes.end.copy())
        for side in (boxes.begin, boxes.end):
            side[:, 2] = np.searchsorted(heads, side[:, 2])
        batches, rows, _ = plan.shape(name)
        shape = batches, rows, len(heads)
        least, most = _coverage(boxes, shape, plan.width(name))
        wanted, spare = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
        for work in works:
            head = heads.index(work.head // plan.group)
            for number in plan.blocks(work):
                batch, keys = plan.keys(work, number)
                wanted[batch, keys, head] += 1
            for page, row in plan.spare(work):
                spare[page, row, head] = True
        seen = set()
        bad = (least < wanted) | ((most > wanted) & ~spare)
        for place in map(tuple, np.argwhere(bad).tolist()):
            (batch, number), head = plan.block_at(*place[:2]), heads[place[2]]
            if (batch, head, number) in seen:
                continue
            seen.add((batch, head, number))
            got = int(least[place] if least[place] < wanted[place] else most[place])
            yield (
                f"{plan.named(batch, number, head)}: {who} receives "
                f"{name} {got} times, and {wanted[place]} of its work tiles see it"
                + self._seen_by(mine, batch, head, number)
            )

    def _seen_by(self, mine: I64, batch: int, head: int, block: int) -> str:
        """The first of these work tiles that sees a block, in words."""
        for number in mine.tolist():
            work = self.plan.work_of(number)
            same = work.head // self.plan.group == head
            if same and (batch, block) in self.plan.wanted(work):
                first = work.tile * self.plan.tiles.cluster[0]
                return f" (query tile {first} of head {work.head})"
        return ""

    def _order(self, loads: Mapping[str, Boxes | None], stored: Boxes) -> Iterator[str]:
        """K, V and the stores of each CTA follow the order in which it loads Q.

        By warps: those that load parts of the same blocks need not wait for each other.
        """
        q, k, v = loads["q"], loads["k"], loads["v"]
        assert q is not None and k is not None and v is not None
        work, stored_work = self._work(q), self._work(stored)
        for cluster in np.unique(q.cluster).tolist():
            mine = q.cluster == cluster
            for rank in np.unique(q.cta[mine]).tolist():
                who = f"cta {rank} of cluster {cluster}"
                turns = _without_repeats(work[mine & (q.cta == rank)])
                wanted = self._wanted(turns)
                for name, boxes in (("k", k), ("v", v)):
                    here = (boxes.cluster == cluster) & (boxes.by == rank)
                    here &= boxes.cta == np.min(boxes.cta[here], initial=1 << 30)
                    for warp in np.unique(boxes.warp[here]).tolist():
                        own = boxes.where(here & (boxes.warp == warp))
                        blocks = self._sequence(own)
                        yield from self._compare(name, blocks, wanted, turns, who)
                here = (stored.cluster == cluster) & (stored.cta == rank)
                for warp in np.unique(stored.warp[here]).tolist():
                    order = _without_repeats(stored_work[here & (stored.warp == warp)])
                    places = [turns.index(each) for each in order if each in turns]
                    if places != sorted(set(places)):
                        yield f"warp {warp} of {who} stores its work tiles in another order"

    def _wanted(self, turns: list[int]) -> list[tuple[int, frozenset[Any]]]:
        """Of work tiles in turn: how many blocks, and which (batch, KV head, block)."""
        wanted = []
        for number in turns:
            work = self.plan.work_of(number)
            blocks = self.plan.wanted(work)
            head = work.head // self.plan.group
            each = frozenset((batch, head, block) for batch, block in blocks)
            wanted.append((len(self.plan.blocks(work)), each))
        return wanted

    def _sequence(self, boxes: Boxes) -> list[tuple[int, int, int]]:
        """(batch, KV head, block) of boxes, in order."""
        if isinstance(self.plan, _PackedPlan):
            empty = (boxes.begin == boxes.end).any(axis=1).tolist()
            pages, rows, heads = boxes.begin[:, :3].T.tolist()
            at = [
                (row, NOTHING) if is_empty else self.plan.block_at(page, row)
                for page, row, is_empty in zip(pages, rows, empty, strict=True)
            ]
            return [
                (batch, head, n) for (batch, n), head in zip(at, heads, strict=True)
            ]
        block = boxes.begin[:, 1] // self.plan.tiles.kv
        if self.plan.lists:  # an empty box is behind K
            blocks = -(-self.plan.sizes.kv // self.plan.tiles.kv)
            block[(boxes.begin == boxes.end).any(axis=1)] = blocks
        return list(
            zip(
                boxes.begin[:, 0].tolist(),
                boxes.begin[:, 2].tolist(),
                block.tolist(),
                strict=True,
            )
        )

    def _compare(
        self,
        name: str,
        blocks: list[tuple[int, int, int]],
        wanted: list[tuple[int, frozenset[Any]]],
        turns: list[int],
        who: str,
    ) -> Iterator[str]:
        total = sum(count for count, _ in wanted)
        if not blocks or len(blocks) % total:
            return  # a CTA that loads another part of each block, or none: counted before
        boxes_of_block = len(blocks) // total
        place = 0
        for (count, each), number in zip(wanted, turns, strict=True):
            part = blocks[place : place + count * boxes_of_block]
            place += len(part)
            if not self.plan.meets(set(part), each):
                work = self.plan.work_of(number)
                tile = work.tile * self.plan.tiles.cluster[0]
                yield (
                    f"{who} loads {name} in another order than Q: not the blocks of query tile "
                    f"{tile} of head {work.head}, batch {work.batch}, at its turn"
                )
                return


def _without_repeats(numbers: I64) -> list[int]:
    """Each number once, where it comes first."""
    return list(dict.fromkeys(numbers.tolist()))


def _rows(boxes: Boxes, shape: tuple[int, int, int]) -> _Rows:
    """Every row of every box."""
    extents = boxes.end[:, :3] - boxes.begin[:, :3]
    rows: list[I64] = [np.zeros(0, np.int64)]
    box: list[I64] = [np.zeros(0, np.int64)]
    for kind in np.unique(extents, axis=0):
        if not kind.all():
            continue  # wholly outside the tensor
        chosen = np.flatnonzero((extents == kind).all(axis=1))
        grid = np.stack(np.meshgrid(*map(np.arange, kind), indexing="ij"), axis=-1)
        places = boxes.begin[chosen, None, :3] + grid.reshape(-1, 3)
        rows.append(np.ravel_multi_index(tuple(places.reshape(-1, 3).T), shape))
        box.append(np.repeat(chosen, int(np.prod(kind))))
    return _Rows(np.concatenate(rows), np.concatenate(box))


def _coverage(
    boxes: Boxes, shape: tuple[int, int, int], width: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """How many boxes each row [batch, row, head] is in: (the least, the most) of its columns."""
    found = _rows(boxes, shape)
    begin, end = boxes.begin[found.box, 3], boxes.end[found.box, 3]
    edges = np.unique(
        [0, width, *boxes.begin[:, 3].tolist(), *boxes.end[:, 3].tolist()]
    )
    least = np.full(shape, np.iinfo(np.uint16).max, np.uint16)
    most = np.zeros(shape, np.uint16)
    for low, high in pairwise(edges):
        counts = np.zeros(int(np.prod(shape)), np.uint16)
        np.add.at(counts, found.rows[(begin <= low) & (end >= high)], 1)
        counts_of = counts.reshape(shape)
        np.minimum(least, counts_of, out=least)
        np.maximum(most, counts_of, out=most)
    return least, most


def _owners(boxes: Boxes, shape: tuple[int, int, int]) -> NDArray[np.int32]:
    """The CTA of each row [batch, row, head], a number; -1 where there is none."""
    owners = np.full(int(np.prod(shape)), -1, np.int32)
    found = _rows(boxes, shape)
    owners[found.rows] = (boxes.cluster * MOST_CTAS + boxes.cta)[found.box]
    return owners.reshape(shape)


def _who_covers(boxes: Boxes, batch: int, row: int, head: int) -> list[str]:
    """The CTAs of the boxes that a row is in, in order."""
    place = np.array([batch, row, head])
    inside = (boxes.begin[:, :3] <= place) & (place < boxes.end[:, :3])
    found = boxes.where(np.flatnonzero(inside.all(axis=1)))
    names = [
        f"cluster {cluster} cta {cta}"
        for cluster, cta in zip(found.cluster.tolist(), found.cta.tolist(), strict=True)
    ]
    return list(dict.fromkeys(names))
