# SPDX-License-Identifier: Apache-2.0
"""Which inputs a kernel is validated with: a pure function of its SPEC.

A case is data, so that a failing one can be named, listed and replayed. Lengths are those at which
tiled kernels break: one row; one below, at and above the edge of a box or tile; and one that no
tile divides.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .arch import ARCHITECTURES

Data = Literal["normal", "huge_key", "uniform_1e4", "all_1e4"]
Layout = Literal["bshd", "bhsd", "fused", "cache"]

RAGGED_LENGTHS = (1, 63, 64, 65, 127, 129, 1000)
LARGE_INPUT = (
    1e4  # scores of 1e10, where rounding the scaled maximum moves exponents by tens
)
STEEP = 30.0  # softmax_scale times this: rows close to one-hot
REPEATS = 20
REPEATS_ELSEWHERE = 2

# Query lengths that make an odd number of tiles of 128, 192 and 256 rows, and an even one.
ODD_TILES_LENGTH = 545
EVEN_TILES_LENGTH = 1000

DYNAMIC = "dynamic"

# (q, kv), (batch, kv_heads): each ragged length on both sides, either side the longer one
_RAGGED = (
    ((1, 1), (1, 1)),
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


@dataclass(frozen=True)
class Case:
    """One call of a kernel.

    batch, kv_heads: run-time counts; query heads are ``kv_heads * q_per_kv``.
    q, kv: rows.
    scale_factor: softmax_scale is this over sqrt(head_dim.qk); 1 leaves it to the kernel's default.
    layout: how q, k and v lie in memory. ``bshd``: contiguous; ``bhsd``: transposed views;
      ``fused``: slices of one qkv tensor; ``cache``: the first rows of a longer tensor, NaN after.
    gaps: out has guards between its rows, heads and batches; otherwise it is contiguous.
    repeats: launches that must agree bit for bit.
    """

    name: str
    batch: int
    kv_heads: int
    q: int
    kv: int
    data: Data = "normal"
    layout: Layout = "bshd"
    scale_factor: float = 1.0
    gaps: bool = True
    repeats: int = REPEATS_ELSEWHERE

    @property
    def seed(self) -> int:
        """The same on every machine and in every run, and another one for each case."""
        return zlib.crc32(self.name.encode())

    @property
    def work(self) -> int:
        """Scores per query head of a group: what the case costs, up to a factor of the spec."""
        return self.batch * self.kv_heads * self.q * self.kv


def cases_for(spec: Mapping[str, Any]) -> tuple[Case, ...]:
    """All cases of a SPEC, without duplicates; a fixed length replaces each length on its side."""
    cases: dict[tuple[object, ...], Case] = {}
    for case in _candidates(spec):
        shape = (case.batch, case.kv_heads, case.q, case.kv)
        call = (*shape, case.data, case.layout, case.scale_factor)
        same = cases.setdefault(call, case)
        if case.repeats > same.repeats:  # of two same calls the stricter one stays
            cases[call] = case
    return tuple(cases.values())


def smallest_ragged(cases: tuple[Case, ...]) -> Case:
    """The cheapest ordinary case with several rows on each side, or the cheapest of all."""
    ordinary = [
        case for case in cases if min(case.q, case.kv) > 1 and case.data == "normal"
    ]
    return min(ordinary or cases, key=lambda case: case.work)


def query_tiles(case: Case, spec: Mapping[str, Any], tile: int) -> int:
    """Work tiles of a case for a query tile of that many rows."""
    return case.batch * case.kv_heads * tiles_of_kv_head(case.q, spec, tile)


def tiles_of_kv_head(q: int, spec: Mapping[str, Any], tile: int) -> int:
    """Work tiles of the ``q`` rows of all query heads of a KV head, packed or each for itself."""
    if spec.get("pack_gqa"):
        return math.ceil(q * int(spec["q_per_kv"]) / tile)
    return int(spec["q_per_kv"]) * math.ceil(q / tile)


def _candidates(spec: Mapping[str, Any]) -> Iterator[Case]:
    def case(
        tag: str, q: int, kv: int, batch: int, kv_heads: int, **options: Any
    ) -> Case:
        q, kv = _fixed_or(spec, "q", q), _fixed_or(spec, "kv", kv)
        name = f"{tag}_b{batch}_hkv{kv_heads}_q{q}_kv{kv}"
        return Case(name, batch, kv_heads, q, kv, **options)

    def many(tag: str, q: int, kv: int, **options: Any) -> Case:
        # So many that some CTA of a persistent grid takes a third work tile, for any tile.
        gpu = ARCHITECTURES[spec["arch"]]
        batch, q = 3, _fixed_or(spec, "q", q)
        per_kv_head = batch * tiles_of_kv_head(q, spec, gpu.tallest_tile)
        kv_heads = math.ceil((2 * gpu.sm_count + 1) / per_kv_head)
        return case(tag, q, kv, batch, kv_heads, repeats=REPEATS, **options)

    for (q, kv), (batch, kv_heads) in _RAGGED:
        yield case("plain", q, kv, batch, kv_heads)
    yield case("steep", 129, 1000, 3, 1, scale_factor=STEEP, repeats=REPEATS)
    yield case("steep", 1000, 1000, 1, 2, scale_factor=STEEP)
    yield case("huge_key", 129, 1000, 1, 2, data="huge_key")
    yield case("uniform_1e4", 127, 129, 1, 1, data="uniform_1e4")
    yield case("all_1e4", 65, 127, 1, 2, data="all_1e4")
    yield case("bhsd", 129, 1000, 3, 2, layout="bhsd")
    yield case("fused", 1000, 1000, 1, 3, layout="fused", gaps=False)
    yield case("cache", 65, 129, 3, 2, layout="cache")
    yield many("many_odd", ODD_TILES_LENGTH, 129, gaps=False)
    yield many("many_even", EVEN_TILES_LENGTH, 1000)
    yield many("many_one_block", ODD_TILES_LENGTH, 1)
    yield case("long_kv", 129, 4097, 1, 1)


def _fixed_or(spec: Mapping[str, Any], side: str, length: int) -> int:
    fixed = spec["seqlen"][side]
    return length if fixed == DYNAMIC else int(fixed)
