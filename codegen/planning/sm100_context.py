# SPDX-License-Identifier: Apache-2.0
"""What the sm100 templates read: flags that wrap whole statements, and expressions as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..arch import sm100
from ..spec import SpecFile
from . import traits as shared
from .context import common_context, listed
from .kernel_plan import Number
from .sm100_words import roles


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
    def plain_loop(self) -> bool:
        """Some block may need no mask: K has a whole one."""
        return self.seqlen_kv is None or self.seqlen_kv >= self.sizes.tile_kv

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
    def positions_of_cluster(self) -> str:
        """A constant, where its product would not fit the lines that use it."""
        return "CLUSTER_ROWS" if self.cluster_size > 1 else "TILE_Q"

    @property
    def one_box(self) -> bool:
        """All rows of a head fit one box, and there are others who load or store boxes of it.

        The DSL drops a coordinate that can only be 0 inside the tensor: all would take that one.
        Halves store O, CTAs along it load Q, and those of a cluster a key in slices.
        """
        q, tiles = self.seqlen_q, self.spec.cluster[0]
        rows = self.sizes.tile_q if tiles > 1 else sm100.MMA_ROWS
        is_sliced = self.spec.multicast != "none" or self.spec.cta_group == 2
        return (q is not None and q <= rows) or (self.seqlen_kv == 1 and is_sliced)


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
    qk, v, kv = spec.head_dim.qk, spec.head_dim.v, sizes.tile_kv
    rows = sm100.MMA_ROWS * spec.cta_group
    mma_warp = 4 * sizes.halves + 5
    items = (("'cta_group'", str(spec.cta_group)), ("'schedule'", repr(spec.schedule)))
    (columns,) = (number.value for number in derived if number.name == "TMEM_COLUMNS")
    common = common_context(
        spec_file,
        traits,
        chosen,
        derived,
        roles=tuple(roles(spec, smem_bytes, columns, by_block=traits.by_block)),
        spec_items=items,
    )
    return {
        **common,
        # The DSL finds the arch: an sm_103 GPU takes this file, but no code for sm_100a.
        "names_arch": False,
        "pair": traits.pair,
        "by_block": traits.by_block,
        "first_row": "q_tile * TILE_Q"
        + ("" if traits.by_block else " + half * HALF_ROWS"),
        "cta_group": "TWO" if traits.pair else "ONE",
        "s_stages": "S_STAGES" if traits.by_block else "HALVES",
        "stats": "TILE_Q * S_STAGES" if traits.by_block else "TILE_Q",
        "mma_warp": str(mma_warp),
        "tmem_threads": str(32 * mma_warp),  # all warps before it, but the load warp
        "mma_rows": "MMA_ROWS" if traits.pair else str(rows),
        "qk_tiler": f"({rows}, {kv}, {qk})",
        "pv_tiler": f"({rows}, {v}, {kv})",
        "kv_stage": f"TILE_KV * HEAD_DIM_QK{' // CLUSTER_SIZE' if traits.pair else ''}",
        # A row of O in shared memory is a whole number of swizzled spans.
        "o_stage": "half" if sizes.o_stages > 1 else "0",
        "o_atom": "K_SW128" if v * 2 % 128 == 0 else "K_SW64",
        # Statements of a tile are the body of a loop, or follow each other once.
        "loop_indent": 4 if traits.persistent else 0,
        "softmax_problem": (
            traits.persistent or traits.dynamic_blocks or traits.spec.lse
        ),
        "one_box": traits.one_box,
        "uneven": traits.uneven,
        "multicast": traits.multicast_k,
        "masks": traits.masks,
        "plain_loop": traits.plain_loop,
        **_lengths(traits),
        **_arguments(traits),
    }


def _lengths(traits: Traits) -> dict[str, str]:
    """How sequence lengths and what follows from them are spelt, on the device and before it."""
    fixed_q, fixed_kv = traits.seqlen_q is not None, traits.seqlen_kv is not None
    rank = "cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())"
    if traits.pair:  # of whole clusters, side by side
        rank = "cute.arch.block_idx()[0] % CLUSTER_SIZE"
    return {
        "rank": rank,
        "seqlen_q": "SEQLEN_Q" if fixed_q else "problem.seqlen_q",
        "seqlen_kv": "SEQLEN_KV" if fixed_kv else "problem.seqlen_kv",
        "host_q_tiles": "Q_TILES" if fixed_q else "q_tiles",
        "q_tiles_formula": f"cute.ceil_div(seqlen_q, {traits.positions_of_cluster})",
        "blocks": "blocks" if traits.dynamic_blocks else "KV_BLOCKS",
    }


def _arguments(traits: Traits) -> dict[str, str]:
    """Argument lists that depend on what is known when the kernel is generated."""
    causal = traits.causal
    problem = ["problem"] if traits.needs_problem else []
    typed_problem = ["problem: Problem"] if traits.needs_problem else []
    blocks = "blocks" if traits.dynamic_blocks else "KV_BLOCKS"
    masked = "masked" if traits.dynamic_blocks else "MASKED_BLOCKS"
    # A single tile of a fixed number of blocks is only for those who move Q, K, V and O to know.
    counts = traits.persistent or traits.dynamic_blocks
    k_options = v_options = [", peers"] if traits.multicast_k else []
    if traits.uneven:
        v_options = [*v_options, ", V_TX_BYTES"]
    return {
        "problem_param": ", problem: Problem" if counts else "",
        "problem_arg": ", problem" if counts else "",
        "k_options": "".join(k_options),
        "v_options": "".join(v_options),
        "load_params": listed(
            ["pipe", "state", "atom", "gmem", "smem"],
            ["mask=None"] if traits.multicast_k else [],
            ["tx_bytes=None"] if traits.uneven else [],
        ),
        "tile_names": "q_tile, _, _" if causal else "_, _, _",
        "lse_names": "_, head, batch" if causal else "q_tile, head, batch",
        "masked_blocks": masked,
        "plain_range": listed([masked] if traits.masks else [], [blocks]),
        "plain_number": "2" if traits.masks else "1",
        "masked_args": listed(["first_row", blocks], problem),
        "masked_params": listed(["first_row: Int32", "blocks: Int32"], typed_problem),
        "mask_args": listed(
            ["first_row + lane"] if causal else [], [f"{blocks} - 1 - i"], problem
        ),
        "mask_params": listed(
            ["row: Int32"] if causal else [], ["block: Int32"], typed_problem
        ),
    }
