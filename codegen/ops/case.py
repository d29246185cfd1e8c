# SPDX-License-Identifier: Apache-2.0
"""A case: one call of a kernel that must be right, as data; and how a kernel cuts a problem."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

from .lists import BY_MASK, Drawn

Data = Literal[
    "normal",
    "edges",
    "future",
    "huge_key",
    "peaks",
    "second_rows",
    "negative",
    "rising",
    "first_at_minus_inf",
    "all_at_minus_inf",
    "uniform_1e4",
    "all_1e4",
    "close",
    "slope",
    "columns",
    "saturated",
    "sinks",
    "slopes",
    "biases",
    "descales",
    "mean_v",
    "drift",
]
Gradient = Literal["normal", "zeros", "one_row", "small", "large", "outliers"]
Params = Literal["some", "least", "most", "on_tiles"]
Layout = Literal["own", "bhsd", "mixed", "fused", "cache", "far", "farther", "plain"]

DYNAMIC = "dynamic"
STEEP = 30.0  # softmax_scale times this: rows close to one-hot
FLAT = 2.0**-10  # such that the weights of a row are nearly alike
REPEATS = 20
REPEATS_ELSEWHERE = 2

Packed = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts a problem. cluster: CTAs along (query tiles, query heads).

    sms_per_head: a causal kernel finishes as many heads as the GPU has SMs over this before it
    starts the next ones; 0 for other kernels. level: query tiles of a head that a causal kernel of
    packed sequences takes in a row, which have about as many keys; 0 for other kernels.
    q_releases: arrivals that free each Q stage once. packed: query heads whose rows a tile holds.
    single: a cluster has one work tile, whatever the number of SMs. slack: [log2] by which scores
    may exceed their reference, 0 where that is constant. along_keys: CTAs of a backward pass's
    cluster, whose KV tiles follow one another. section_rows: query rows of the
    KV heads of a backward pass's section together. strips: of a head's keys, whose KV tiles take
    turns in a backward pass; 0 where tiles come one behind the other.
    """

    q: int  # [rows]
    kv: int  # [rows]
    cluster: tuple[int, int]
    sms_per_head: int = 0
    level: int = 0
    q_releases: int = 2
    packed: int = 1
    single: bool = False
    slack: float = 8.0
    along_keys: int = 1
    section_rows: int = 0
    strips: int = 0

    @property
    def ctas(self) -> int:
        """Of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.along_keys

    @property
    def keys(self) -> int:
        """Keys that a cluster of a backward pass works on at a time."""
        return self.kv * self.along_keys

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
    """One call of a kernel.

    batch, kv_heads: run-time counts; query heads are ``kv_heads * q_per_kv``. q, kv: rows.
    sm_count: what the kernel is told; None: what the GPU has. clusters: those that run in the
    emulator, by number; None for all. blocks: (work tile, KV block) pairs of the clusters that run.
    scale_factor: softmax_scale is this over sqrt(head_dim.qk); 1 leaves it to the kernel's default.
    params: what the mask reads, see `inputs.params`. layout: see `inputs.place_tensors`. lists: of
    blocks, if the SPEC has them. lengths: (q, kv) of each packed sequence, of which batch is the
    number, negative where offsets fall; q and kv are then rows of the tensors, more than those of
    all, or less where offsets leave the tensors, and kv those of all pages where K and V have some.
    gradient: what dO is, of operations that read it: zeros, zeros but in one row of each head,
    small, large, or of rows that are far longer and shorter than others. timing: whether its
    schedule matters, because it is about rings, waves and warps without rows. repeats: launches on
    a GPU that must agree.
    """

    name: str
    batch: int
    kv_heads: int
    q: int
    kv: int
    sm_count: int | None = None
    clusters: tuple[int, ...] | None = None
    blocks: int = 1
    data: Data = "normal"
    params: Params = "some"
    layout: Layout = "own"
    scale_factor: float = 1.0
    lists: Drawn = BY_MASK
    lengths: Packed = ()
    gradient: Gradient = "normal"
    timing: bool = False
    repeats: int = REPEATS_ELSEWHERE

    @property
    def seed(self) -> int:
        """The same on every machine and in every run, and another one for each case."""
        return zlib.crc32(self.name.encode())

    @property
    def work(self) -> int:
        """Scores per query head of a group: what the case costs, up to a factor of the spec."""
        return self.batch * self.kv_heads * self.q * self.kv

    @property
    def hostile(self) -> bool:
        """Its lengths and tables are an adversary's."""
        return True

    @property
    def emulated(self) -> bool:
        """Whether the emulator runs it; what fills a GPU it only walks."""
        return self.sm_count is not None


def residues(tile: int) -> tuple[int, ...]:
    """What a length may leave to a tile where masks and tails err."""
    return (0, 1, 2, tile // 2, tile - 2, tile - 1)
