# SPDX-License-Identifier: Apache-2.0
"""Which problems a backward kernel is shown: few tiles, since a pair of them takes five products.

Lengths are stated in the kernel's own tiles: n keys of a cluster, m query rows of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from ..arch import ARCHITECTURES
from . import masks
from .backward import sums_in_fp16
from .case import DYNAMIC, FLAT, REPEATS, STEEP, Case, Tiles, residues

Spec = Mapping[str, Any]

# (KV tile, row block) pairs of all query heads that a case may have in the emulator: 3 x 5 of
# three heads. Of a cluster's two tiles of half the keys as many.
MOST_PAIRS: Final = 48
# The same where both lengths are fixed, which no case can shorten: four heads of 1024 rows in
# blocks of 64, so that batches, rows and heads are told apart.
MOST_PAIRS_OF_FIXED: Final = 512
LONG_WINDOW: Final = 4  # KV tiles
# Scores of inputs of 1e4 times this are near 1e4: of 1e8, whose LSE fp32 rounds to 8, P would be
# off by powers of e, whoever computes it.
OF_LARGE_INPUTS: Final = 1e-4

# On a whole GPU. (q, kv), (batch, kv_heads): either side the longer one, by little and by much.
LENGTHS: Final = (
    ((1, 1000), (3, 2)),
    ((1000, 1), (1, 3)),
    ((63, 64), (3, 1)),
    ((64, 127), (3, 3)),
    ((65, 64), (1, 1)),
    ((127, 129), (3, 2)),
    ((129, 65), (1, 3)),
    ((128, 128), (2, 2)),
    ((129, 1000), (1, 2)),
    ((1000, 129), (3, 3)),
    ((1000, 1000), (1, 1)),
)


def pairs(case: Case, spec: Spec, tiles: Tiles) -> int:
    """(KV tile, row block) pairs of all query heads, as if every row saw every key."""
    of_clusters = math.ceil(case.q / tiles.q) * math.ceil(case.kv / tiles.keys)
    of_head = of_clusters * tiles.along_keys
    return case.batch * case.kv_heads * int(spec["q_per_kv"]) * of_head


def work_tiles(case: Case, tiles: Tiles) -> int:
    """Of all KV heads: the KV tiles that a cluster works on at a time."""
    return case.batch * case.kv_heads * math.ceil(case.kv / tiles.keys)


def cases(spec: Spec, tiles: Tiles) -> Iterator[Case]:
    """All cases of a SPEC; a fixed length replaces each length on its side."""
    made = _Made(spec, tiles)
    yield from _tiled(made)
    yield from _magnitudes(made)
    yield from _layouts(made)
    if spec["seqlen"]["kv"] == DYNAMIC:
        yield from _residues(made)
        yield from _edges(made)
    yield from _large(made)


class _Made:
    """Makes cases of a SPEC."""

    def __init__(self, spec: Spec, tiles: Tiles) -> None:
        self.spec, self.tiles, self.m, self.n = spec, tiles, tiles.q, tiles.keys
        self.mask = masks.of_spec(spec)

    def length(self, side: str, rows: int) -> int:
        """Of one side."""
        fixed = self.spec["seqlen"][side]
        return max(rows, 1) if fixed == DYNAMIC else int(fixed)

    @property
    def most_pairs(self) -> int:
        """Of a case in the emulator."""
        is_dynamic = DYNAMIC in self.spec["seqlen"].values()
        of_clusters = MOST_PAIRS if is_dynamic else MOST_PAIRS_OF_FIXED
        return of_clusters * self.tiles.along_keys

    def case(
        self,
        tag: str,
        q: int,
        kv: int,
        batch: int = 1,
        kv_heads: int = 1,
        *,
        clusters: int = 1,
        **options: Any,
    ) -> Case:
        """One that the emulator runs, unless its fixed lengths are too long; fewer heads, batches
        and then tiles where a group of many heads would make it too much.

        clusters: of the GPU that the kernel is told of, or CTAs, where these have no cluster.
        """
        while True:
            found = self.on_gpu(tag, q, kv, batch, kv_heads, **options)
            count = pairs(found, self.spec, self.tiles)
            if count <= self.most_pairs:
                sms = clusters * self.tiles.ctas
                return replace(found, sm_count=sms, blocks=count)
            if kv_heads > 1:
                kv_heads = 1
            elif batch > 1:
                batch = 1
            elif q > self.m and self.spec["seqlen"]["q"] == DYNAMIC:
                q -= self.m
            elif kv > self.n and self.spec["seqlen"]["kv"] == DYNAMIC:
                kv -= self.n
            else:
                return found

    def on_gpu(
        self, tag: str, q: int, kv: int, batch: int, kv_heads: int, **options: Any
    ) -> Case:
        """One for a whole GPU."""
        q, kv = self.length("q", q), self.length("kv", kv)
        name = f"{tag}_b{batch}_hkv{kv_heads}_q{q}_kv{kv}"
        return Case(name, batch, kv_heads, q, kv, **options)


def _tiled(of: _Made) -> Iterator[Case]:
    """Rings, tiles of a CTA, tails; either side the longer one."""
    m, n, case = of.m, of.n, of.case
    ragged, timing = (2 * m + m // 2 + 5, 2 * n + n // 2 + 1), {"timing": True}
    yield case("ragged", *ragged, data="edges", **timing)
    yield case("exact", 2 * m, 2 * n, **timing)
    # More tiles than clusters, and no multiple of them: one has two, of two heads.
    yield case("waves", m - 1, n + 1, 1, 2, clusters=3, **timing)
    yield case("long_q", 5 * m - 3, n // 2 + 3, clusters=2, data="edges", **timing)
    yield case("long_kv", m // 2 + 1, 3 * n - 7, clusters=2, data="edges", **timing)
    if of.tiles.strips:
        # Some strips have a tile more than others; of a group's heads that is too much.
        strips = case(
            "strips", m // 2 + 1, 2 * of.tiles.strips * n + 3 * n - 7, clusters=2
        )
        if strips.kv > of.tiles.strips * n:
            yield strips
    # With causal, rows and whole blocks of them that see no key come first.
    yield case("few_keys", 3 * m + 9, 5, data="edges")
    yield case("key_of_some", m + m // 2, m // 2 + 3, data="edges")
    yield case("one_key", m + 3, 1)
    yield case("one_row", 1, n + 3, data="edges")
    yield case("one_by_one", 1, 1)
    yield case("tiles", 5, 7, 2, 3, layout="mixed")
    yield case(
        "idle",
        9,
        n // 2,
        2,
        1,
        clusters=ARCHITECTURES[of.spec["arch"]].sm_count // of.tiles.ctas,
    )


def _magnitudes(of: _Made) -> Iterator[Case]:
    """Scores and gradients that are large, small, or 0."""
    m, n, case, few = of.m, of.n, of.case, min(of.m, 33)
    yield case("steep", few, n + 3, scale_factor=STEEP)
    yield case("flat", few, n - 3, scale_factor=FLAT)
    # Rows whose LSE is far below 0: keys beyond the end, where K is 0, would have an infinite P.
    yield case("low", few, 1, scale_factor=10 * STEEP)
    yield case("huge_key", few, n + 9, data="huge_key")
    large: dict[str, Any] = {"data": "uniform_1e4", "gradient": "small"}
    yield case("uniform_1e4", few, n + 1, scale_factor=OF_LARGE_INPUTS, **large)
    yield case("no_gradient", few, n // 2, gradient="zeros")
    yield case("one_gradient", m + 3, n + 5, gradient="one_row", data="edges")
    yield case("large_gradient", few, n + 5, gradient="large")
    if sums_in_fp16(of.spec):
        yield case("outliers", 5 * m - 3, n + 5, 1, 2, gradient="outliers")


def _layouts(of: _Made) -> Iterator[Case]:
    """Where tensors lie: dO with strides of its own, heads before rows, slices of one tensor."""
    n, case, few = of.n, of.case, min(of.m, 17)
    yield case("strided", few, n // 2 + 1, 2, 1, layout="bhsd", scale_factor=1.3)
    yield case("mixed", few, n // 2 + 1, 2, 2, layout="mixed")
    yield case("fused", n + 9, n + 9, layout="fused", data="edges")
    yield case("cache", few, n + 2, layout="cache")
    yield case("far", few, n // 2, 2, 2, layout="far")
    yield case("plain", few, n - 1, 2, 2, layout="plain")


def _residues(of: _Made) -> Iterator[Case]:
    """Every residue of kv to a KV tile, of q to a block of rows, and of kv - q to both."""
    to_tile, to_block = residues(of.n), residues(of.m)
    for number, residue in enumerate(to_tile):
        q = of.m * (number % 2) + to_block[(number + 2) % len(to_block)]
        kv = of.n * ((number + 1) % 2) + residue
        options: dict[str, Any] = {"layout": ("own", "mixed", "bhsd")[number % 3]}
        yield of.case(f"tail_{residue}", q, kv, data="edges", **options)


def _edges(of: _Made) -> Iterator[Case]:
    """Every residue of an edge to a block of rows, and some to a KV tile."""
    m, n, left, right = of.m, of.n, of.mask.left, of.mask.right
    to_block, to_tile = residues(m), residues(n)
    if right is not None:
        for number, residue in enumerate(to_block):
            q, above = m + 7 + number, (residue - right) % m
            yield of.case(f"below_{residue}", q, q + above, data="edges")
            below = (residue + right) % m
            yield of.case(f"above_{residue}", q + below, q, data="edges")
        for residue in to_tile[3:]:
            kv = m + 5 + (residue - right) % n
            yield of.case(f"shift_{residue}", m + 5, kv, data="edges")
    if right:
        # Rows that see no key, and whole blocks of them, come first.
        yield of.case("late", right + 2 * m + 5, n // 2 + 3, data="edges")
    if left is None:
        return
    # Keys that no row sees come first: some, and whole tiles of them. A longer window is another
    # constant in the same instructions, and costs many tiles.
    short = left <= LONG_WINDOW * n
    for number, residue in enumerate(to_block if short else (1,)):
        q, hidden = m * (1 - number % 2) + 7 + number, n * (number % 2) + residue
        yield of.case(f"hidden_{residue}", q, q + left + hidden, data="edges")
    for residue in to_tile[3:] if short else ():
        q = m // 2 + 3
        yield of.case(f"left_{residue}", q, q + left + residue, data="edges")
    yield of.case("left_of_some", m + 3, max(m // 2 + left, 1), data="edges")
    slides: dict[str, Any] = {"timing": True, "clusters": 2}
    yield of.case("slides", 2 * m + 5, 2 * m + 5 + left % n, **slides)


def _large(of: _Made) -> Iterator[Case]:
    """As many tiles as fill a GPU several times, and lengths as users have them."""
    for number, (lengths, counts) in enumerate(LENGTHS):
        data: Any = ("normal", "edges")[number % 2]
        yield of.on_gpu(f"plain_{number}", *lengths, *counts, data=data)
    yield of.on_gpu("large_steep", 129, 1000, 3, 1, scale_factor=STEEP, repeats=REPEATS)
    yield of.on_gpu("large_huge_key", 129, 1000, 1, 2, data="huge_key")
    yield of.on_gpu("large_fused", 1000, 1000, 1, 3, layout="fused")
    if sums_in_fp16(of.spec):
        yield of.on_gpu("large_outliers", 1000, 1000, 2, 2, gradient="outliers")
        yield of.on_gpu("large_drift", 129, 8190, 1, 1, data="drift")
    yield of.on_gpu("large_kv", 129, 4097, 1, 1)
    yield of.on_gpu("large_q", 4097, 129, 1, 1, data="edges")
    # So many that some cluster of a persistent grid takes a third tile.
    sms = ARCHITECTURES[of.spec["arch"]].sm_count
    for tag, q, kv, options in (
        ("many_odd", 545, 545, {"layout": "plain"}),
        ("many_even", 1000, 1000, {"data": "edges"}),
        ("many_short", 129, 1, {"layout": "mixed"}),
    ):
        of_head = 3 * math.ceil(of.length("kv", kv) / of.n)
        heads = math.ceil((2 * sms // of.tiles.ctas + 1) / of_head)
        yield of.on_gpu(tag, q, kv, 3, heads, repeats=REPEATS, **options)
    # So many heads that there are sections of them before the last one, or the last two.
    if rows := of.tiles.section_rows:
        heads = math.ceil(3.5 * rows / of.length("q", 300) / 3)
        yield of.on_gpu("sections", 300, 300, 3, heads, repeats=REPEATS)
