# SPDX-License-Identifier: Apache-2.0
"""What the sm100 templates read: flags that their tests are folded by, and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..arch import sm100
from ..spec.model import SpecFile
from . import traits as shared
from .context import bias_swizzle, common_context
from .kernel_plan import Number
from .sm100_words import roles
from .traits import Loops


@dataclass(frozen=True)
class Sizes(shared.Sizes):
    """Tile and ring sizes, in rows and stages; K and V share the stages of one ring."""

    kv_stages: int
    o_stages: int  # halves of O in shared memory

    @property
    def halves(self) -> int:
        """Of a query tile: each has warps of its own, P, O and a stage of Q."""
        return self.tile_q // sm100.MMA_ROWS

    @property
    def s_stages(self) -> int:
        """Of S: one for each half, or two that the blocks of a whole tile take in turn."""
        return 2


@dataclass(frozen=True)
class Traits(shared.Traits):
    """What an sm100 kernel must be able to do."""

    sizes: Sizes

    @property
    def block_loops(self) -> Loops:
        """Loops over the KV blocks of a half."""
        along_q = self.sizes.tile_q * self.spec.cluster[0]
        return self.loops(sm100.MMA_ROWS, along_q, first_apart=False)

    @property
    def one_loop(self) -> bool:
        """One loop is for all blocks: each of their scores is tested."""
        return self.mask.tests is not None

    @property
    def uneven(self) -> bool:
        """K and V differ in size, but take turns in the same stages."""
        return self.spec.head_dim.qk != self.spec.head_dim.v

    @property
    def pair(self) -> bool:
        """Two CTAs share each MMA, of twice the rows: half of K and V is in either."""
        return self.spec.cta_group > 1

    @property
    def by_block(self) -> bool:
        """A tile is not in halves: softmax of a block runs beside the MMAs of the next."""
        return self.sizes.halves == 1

    @property
    def one_box(self) -> bool:
        """All rows of a head fit one box, and there are others who load or store boxes of it.

        The DSL drops a coordinate that can only be 0 inside the tensor: all would take that one.
        Halves store O, CTAs along it load Q, and those of a cluster a key in slices.
        """
        q, tiles = self.seqlen_q, self.spec.cluster[0]
        rows = self.sizes.tile_q if tiles > 1 else sm100.MMA_ROWS
        is_sliced = self.spec.multicast != "none" or self.spec.cta_group == 2
        one_key = self.seqlen_kv == 1 and is_sliced
        return (q is not None and q <= rows) or one_key or self.one_block_of_lists


def template_context(
    spec_file: SpecFile,
    sizes: Sizes,
    chosen: Sequence[Number],
    derived: Sequence[Number],
    smem_bytes: int,
) -> dict[str, Any]:
    """Return every name that the templates under sm100/ and common/ read, but the digests."""
    spec = spec_file.spec
    traits = Traits(spec, sizes)
    mma_warp = 4 * sizes.halves + 5
    items = (("cta_group", spec.cta_group), ("schedule", spec.schedule))
    (columns,) = (number.value for number in derived if number.name == "TMEM_COLUMNS")
    common = common_context(
        spec_file,
        traits,
        chosen,
        derived,
        roles=tuple(roles(spec, smem_bytes, int(columns), by_block=traits.by_block)),
        spec_items=items,
    )
    return {
        **common,
        # The DSL finds the arch: an sm_103 GPU takes this file, but no code for sm_100a.
        "names_arch": False,
        "pair": traits.pair,
        "by_block": traits.by_block,
        "mma_warp": mma_warp,
        "tmem_threads": 32 * mma_warp,  # all warps before it, but the load warp
        "mma_m": sm100.MMA_ROWS * spec.cta_group,
        "tile_kv": sizes.tile_kv,
        "bias_swizzle": bias_swizzle(traits),
        "one_box": traits.one_box,
        "uneven": traits.uneven,
        "parts_of_blocks": False,
        "multicast": traits.multicast_k,
        "masks": traits.masks,
        "one_loop": traits.one_loop,
        "whole_loop": traits.block_loops.whole,
        "left_loop": traits.block_loops.left,
        "edges_apart": traits.edges_apart(sm100.MMA_ROWS),
    }
