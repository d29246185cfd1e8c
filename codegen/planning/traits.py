# SPDX-License-Identifier: Apache-2.0
"""What a kernel must be able to do, as far as its spec does not rule it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from ..features.bias import has_bias
from ..features.blocks import has_lists
from ..features.gqa import heads_of_tile
from ..features.mask import keys_of
from ..features.paged import page_of
from ..features.score import score_of, tests_exponents
from ..features.softcap import cap_of
from ..ops.masks import Lengths, Mask
from ..ops.scores import Score
from ..spec.model import Spec

# log2 of P at most, either way, where rows have no reference, by P's type. bf16: sums over 2^24
# keys of products with V up to 2^16 are finite. fp16: P is normal. Decision 0041.
P_LIMIT: Final[Mapping[str, int]] = {"bf16": 87, "fp16": 14}


@dataclass(frozen=True)
class Sizes:
    """Rows of a CTA's query tile and of a KV block."""

    tile_q: int
    tile_kv: int


class Loops(NamedTuple):
    """Whether a kernel has the loop, in the order in which they run."""

    masked: bool
    whole: bool
    left: bool


@dataclass(frozen=True)
class Traits:
    """What follows from a spec and its tiles on any architecture."""

    spec: Spec
    sizes: Sizes

    @cached_property
    def mask(self) -> Mask:
        """Which keys a query sees."""
        return keys_of(self.spec)

    @property
    def lists(self) -> bool:
        """A call says which KV blocks each query tile has."""
        return has_lists(self.spec)

    @property
    def one_block_of_lists(self) -> bool:
        """K is one block, behind which an empty list has another one."""
        kv = self.seqlen_kv
        return self.lists and kv is not None and kv <= self.sizes.tile_kv

    @property
    def uneven_tiles(self) -> bool:
        """Some query tiles have more KV blocks than others, by the mask: they come first."""
        return self.mask.uneven and not self.lists

    @property
    def softcap(self) -> float | None:
        """What scores are held between, on either side of 0; None where nothing holds them."""
        return cap_of(self.spec)

    @cached_property
    def score(self) -> Score:
        """The score of a query and a key."""
        return score_of(self.spec)

    @property
    def score_factor(self) -> float | None:
        """What s is multiplied by, beside softmax_scale; None for 1."""
        factor = self.score.parts.factor
        return None if factor == 1 else factor

    @property
    def tests_exponents(self) -> bool:
        """Rows are rescaled where exponents are too large."""
        return tests_exponents(self.spec)

    @property
    def page(self) -> int | None:
        """Keys of a page; None where K and V have none."""
        return page_of(self.spec)

    @property
    def bias(self) -> bool:
        """A tensor is added to the scores."""
        return has_bias(self.spec)

    @property
    def bias_of_rows(self) -> bool:
        """The rows of a head have a bias each."""
        return self.spec.bias.shape[2] != 1

    @property
    def bounded(self) -> bool:
        """Rows need no reference, where an architecture makes use of it."""
        return False

    def loops(self, rows: int, taken_by: int, *, first_apart: bool) -> Loops:
        """Which loops over KV blocks run for some query tile, or may where a length is open.

        All for a mask with a gap, and the first alone where each score is tested.

        rows: positions that agree about which blocks are whole. taken_by: those that take the same
        blocks, a multiple. first_apart: the first block is in no loop.
        """
        if self.lists:
            return Loops(self.mask.edges, True, False)
        if self.mask.apart:
            several = self.mask.tests is None
            return Loops(masked=True, whole=several, left=several)
        kv, tile_kv = self.seqlen_kv, self.sizes.tile_kv
        q = self.seqlen_q if self.mask.edges else 1
        left, right = bool(self.mask.left_edges), bool(self.mask.right_edges)
        if kv is None or q is None or self.mask.params:
            several = kv is None or kv > tile_kv
            if first_apart:
                return Loops(several and right, several, several and left)
            return Loops(self.masks, several or kv == tile_kv, left)
        lengths = Lengths(q, kv)
        first = np.arange(0, -(-q // taken_by) * taken_by, rows)
        start = first // taken_by * taken_by
        taken = self.mask.key_blocks(start, start + taken_by, lengths, tile_kv)
        own = self.mask.key_blocks(first, first + rows, lengths, tile_kv)
        end = np.maximum(taken.end, taken.first + 1) - first_apart
        whole_end = np.clip(own.whole_end, taken.first, end)
        whole_first = np.clip(own.whole_first, taken.first, whole_end)
        ranges = (whole_end, end), (whole_first, whole_end), (taken.first, whole_first)
        return Loops(*(bool((low < high).any()) for low, high in ranges))

    def edges_apart(self, rows: int) -> bool:
        """No KV block of so many positions needs a mask for the left edge and for another end.

        Hidden keys before the last of them and behind the first are further apart than a block,
        and so are those before the last one and the end of K.
        """
        left, right = self.mask.left, self.mask.right
        if self.mask.apart:
            return True  # each is masked where it is
        if self.lists or left is None or (right is None and self.mask.right_edges):
            return False
        between = left if right is None else min(left, left + right - rows)
        return between >= self.sizes.tile_kv

    @property
    def persistent(self) -> bool:
        """A CTA works on one tile after the other."""
        return self.spec.schedule == "persistent"

    @property
    def packed(self) -> bool:
        """Rows of a query tile are (position, head of the group), heads fastest."""
        return heads_of_tile(self.spec) > 1

    @property
    def tile_positions(self) -> int:
        """Query positions of a tile: as many as rows, unless heads are rows too."""
        return self.sizes.tile_q // heads_of_tile(self.spec)

    @property
    def tiled_head(self) -> str:
        """Whose rows a query tile has."""
        return "KV head" if self.packed else "head"

    @property
    def seqlen_q(self) -> int | None:
        """Fixed number of query positions, or None."""
        q = self.spec.seqlen.q
        return q if isinstance(q, int) else None

    @property
    def seqlen_kv(self) -> int | None:
        """Fixed number of keys, or None."""
        kv = self.spec.seqlen.kv
        return kv if isinstance(kv, int) else None

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.spec.cluster[0] * self.spec.cluster[1]

    @property
    def multicast_k(self) -> bool:
        """The cluster shares its loads of K."""
        return self.spec.multicast in ("k", "kv")

    @property
    def multicast_v(self) -> bool:
        """The cluster shares its loads of V."""
        return self.spec.multicast in ("v", "kv")

    @property
    def kv_tail(self) -> bool:
        """The last KV block may be partial; a list may be empty, or name a block behind it."""
        return (
            self.lists
            or self.seqlen_kv is None
            or self.seqlen_kv % self.sizes.tile_kv != 0
        )

    @property
    def q_tail(self) -> bool:
        """The last query tile of a cluster may reach beyond the last query."""
        positions = self.tile_positions * self.spec.cluster[0]
        return self.seqlen_q is None or self.seqlen_q % positions != 0

    @property
    def masks(self) -> bool:
        """Some KV block may need a mask, the last in memory first."""
        return self.mask.edges or self.kv_tail

    @property
    def one_block(self) -> bool:
        """Every query tile has one KV block, the first."""
        kv = self.seqlen_kv
        return not self.dynamic_blocks and kv is not None and kv <= self.sizes.tile_kv

    @property
    def dynamic_blocks(self) -> bool:
        """The number of KV blocks is known at run time only, or depends on the query tile."""
        return self.mask.edges or self.seqlen_kv is None or self.lists
