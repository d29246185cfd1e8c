# SPDX-License-Identifier: Apache-2.0
"""What a kernel must be able to do, as far as its spec does not rule it out."""

from __future__ import annotations

from dataclasses import dataclass

from ..features.gqa import heads_of_tile
from ..spec import Spec


@dataclass(frozen=True)
class Sizes:
    """Rows of a CTA's query tile and of a KV block."""

    tile_q: int
    tile_kv: int


@dataclass(frozen=True)
class Traits:
    """What follows from a spec and its tiles on any architecture."""

    spec: Spec
    sizes: Sizes

    @property
    def causal(self) -> bool:
        """The mask is causal."""
        return self.spec.mask == "causal"

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
        """The last KV block may be partial."""
        return self.seqlen_kv is None or self.seqlen_kv % self.sizes.tile_kv != 0

    @property
    def q_tail(self) -> bool:
        """The last query tile of a cluster may reach beyond the last query."""
        positions = self.tile_positions * self.spec.cluster[0]
        return self.seqlen_q is None or self.seqlen_q % positions != 0

    @property
    def masks(self) -> bool:
        """Some KV block may need a mask, the last in memory first."""
        return self.causal or self.kv_tail

    @property
    def dynamic_blocks(self) -> bool:
        """The number of KV blocks is known at run time only, or depends on the query tile."""
        return self.causal or self.seqlen_kv is None
