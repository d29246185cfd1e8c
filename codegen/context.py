# SPDX-License-Identifier: Apache-2.0
"""What the sm90 templates read: flags that wrap whole statements, and expressions as text.

Templates do no arithmetic and take no decision: each is taken here once, under a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from .spec import Spec, SpecFile

_SMEM_ATOMS: Final = {0: "K_SW128", 32: "K_SW64"}  # by head_dim modulo 64
_DTYPES: Final = {
    "bf16": ("cutlass.BFloat16", "bf16x2"),
    "fp16": ("cutlass.Float16", "f16x2"),
}


@dataclass(frozen=True)
class Sizes:
    """Tile and ring sizes, in rows and stages."""

    tile_q: int
    tile_kv: int
    q_stages: int
    k_stages: int
    v_stages: int


@dataclass(frozen=True)
class Traits:
    """What a kernel must be able to do, as far as its spec does not rule it out."""

    spec: Spec
    sizes: Sizes

    @property
    def causal(self) -> bool:
        """The mask is causal."""
        return self.spec.mask == "causal"

    @property
    def pack_gqa(self) -> bool:
        """Rows of a query tile are (position, head of the group), heads fastest."""
        return self.spec.pack_gqa

    @property
    def tile_positions(self) -> int:
        """Query positions of a tile: as many as rows, unless heads are rows too."""
        heads = self.spec.heads.q_per_kv if self.pack_gqa else 1
        return self.sizes.tile_q // heads

    @property
    def tiled_head(self) -> str:
        """Whose rows a query tile has."""
        return "KV head" if self.pack_gqa else "head"

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
    def one_box(self) -> bool:
        """All rows of O fit one box, and there are warpgroups or CTAs to store others.

        The DSL drops a coordinate that can only be 0 inside the tensor: all would store that one.
        """
        positions = 64 * self.tile_positions // self.sizes.tile_q
        boxes = self.sizes.tile_q * self.spec.cluster[0] // 64
        return self.seqlen_q is not None and self.seqlen_q <= positions and boxes > 1

    @property
    def masks(self) -> bool:
        """The first KV block of a tile, which is its last in memory, needs a mask."""
        return self.causal or self.kv_tail

    @property
    def masked_loop(self) -> bool:
        """Further KV blocks may need a mask: the diagonal may leave the first one."""
        q, kv = self.seqlen_q, self.seqlen_kv
        # Rows that agree about their blocks.
        rows = 64 if self.strips else self.tile_positions
        tile_kv = self.sizes.tile_kv
        inside_first = (
            q is not None
            and kv is not None
            and kv >= q
            and self.spec.cluster[0] == 1
            and tile_kv % rows == 0
            and kv % tile_kv == 0
            and (kv - q) % rows == 0
        )
        return self.causal and not inside_first

    @property
    def hidden_rows(self) -> bool:
        """A row may see no key of the KV blocks so far, so that its maximum is -inf."""
        return self.masked_loop

    @property
    def empty_rows(self) -> bool:
        """A row may see no key at all."""
        q, kv = self.seqlen_q, self.seqlen_kv
        return self.causal and (q is None or kv is None or kv < q)

    @property
    def dynamic_blocks(self) -> bool:
        """The number of KV blocks is known at run time only, or depends on the query tile."""
        return self.causal or self.seqlen_kv is None

    @property
    def strips(self) -> bool:
        """Warpgroups see different numbers of KV blocks: the first ones skip the last.

        The first one takes its turn at the tensor cores once its own first K is there, and the
        others free none before their turns: K of what it skips must fit beside that K. V of what it
        skips is loaded meanwhile, where tiles overlap before it frees V of the tile before.
        A packed tile has too few positions for this to be worth its code.
        """
        rows, block = self.sizes.tile_q - 64, self.sizes.tile_kv
        skipped = -(-rows // block)
        fits = skipped < self.sizes.k_stages and skipped <= self.sizes.v_stages
        alone = self.cluster_size == 1 and not self.pack_gqa
        return self.causal and alone and rows >= block and fits

    @property
    def order_barrier(self) -> bool:
        """Warpgroups take turns at the tensor cores."""
        return self.sizes.tile_q > 64

    @property
    def early_wait(self) -> bool:
        """PV takes longer than the first row's exponentials, so waiting later gains nothing."""
        return self.spec.head_dim.v > 128

    @property
    def cross_tile(self) -> bool:
        """A second Q stage lets the next tile's first QK run beside this tile's end."""
        return self.sizes.q_stages == 2


def template_context(
    spec_file: SpecFile,
    sizes: Sizes,
    chosen: Sequence[Any],
    derived: Sequence[Any],
    smem_bytes: int,
) -> dict[str, Any]:
    """Return every name that the templates under sm90/ and common/ read, but the digests."""
    spec = spec_file.spec
    traits = Traits(spec, sizes)
    dtype_class, packed_type = _DTYPES[spec.dtype]
    last_warp = 4 * (sizes.tile_q // 64) + 3
    return {
        "title": _title(spec),
        "spec_path": f"specs/{spec_file.stem}.yaml",
        "dtype": spec.dtype,
        "dtype_class": dtype_class,
        "packed_type": packed_type,
        "head_dim_qk": spec.head_dim.qk,
        "head_dim_v": spec.head_dim.v,
        "q_per_kv": spec.heads.q_per_kv,
        "smem_bytes": smem_bytes,
        "smem_atom": _SMEM_ATOMS[max(spec.head_dim.qk % 64, spec.head_dim.v % 64)],
        "compute_warps": f"4 to {last_warp}",
        "spec_items": _spec_items(spec_file),
        "chosen": chosen,
        "derived": derived,
        "lse": spec.lse,
        "cluster_q": spec.cluster[0],
        "cluster_heads": spec.cluster[1],
        **_flags(traits),
        **_lengths(traits),
        **_arguments(traits),
        **_units(traits),
    }


def _flags(traits: Traits) -> dict[str, bool | int]:
    return {
        "causal": traits.causal,
        "pack_gqa": traits.pack_gqa,
        "one_box": traits.one_box,
        "fixed_q": traits.seqlen_q is not None,
        "fixed_kv": traits.seqlen_kv is not None,
        "kv_tail": traits.kv_tail,
        "masks": traits.masks,
        "masked_loop": traits.masked_loop,
        "hidden_rows": traits.hidden_rows,
        "empty_rows": traits.empty_rows,
        "lse_predicate": traits.q_tail,
        "uses_rows": traits.causal or traits.spec.lse or not traits.cross_tile,
        "dynamic_blocks": traits.dynamic_blocks,
        "cross_tile": traits.cross_tile,
        "order_barrier": traits.order_barrier,
        "strips": traits.strips,
        "early_wait": traits.early_wait,
        "cluster_size": traits.cluster_size,
        "multicast_k": traits.multicast_k,
        "multicast_v": traits.multicast_v,
    }


def _lengths(traits: Traits) -> dict[str, str]:
    """How sequence lengths and what follows from them are spelt, on the device and before it."""
    fixed_q, fixed_kv = traits.seqlen_q is not None, traits.seqlen_kv is not None
    seqlen_q = "SEQLEN_Q" if fixed_q else "problem.seqlen_q"
    return {
        "seqlen_q_text": str(traits.seqlen_q) if fixed_q else "seqlen_q",
        "seqlen_kv_text": str(traits.seqlen_kv) if fixed_kv else "seqlen_kv",
        "seqlen_q": seqlen_q,
        "end_of_rows": f"{seqlen_q} * Q_PER_KV" if traits.pack_gqa else seqlen_q,
        "seqlen_kv": "SEQLEN_KV" if fixed_kv else "problem.seqlen_kv",
        "q_tiles": "Q_TILES" if fixed_q else "problem.q_tiles",
        "host_seqlen_q": "SEQLEN_Q" if fixed_q else "seqlen_q",
        "host_seqlen_kv": "SEQLEN_KV" if fixed_kv else "seqlen_kv",
        "host_q_tiles": "Q_TILES" if fixed_q else "q_tiles",
        "q_tiles_formula": f"cute.ceil_div(seqlen_q, {_positions_of_cluster(traits)})",
        "blocks": "blocks" if traits.dynamic_blocks else "KV_BLOCKS",
    }


def _positions_of_tile(traits: Traits) -> str:
    """Query positions of a CTA at a time, in the words of the kernel."""
    return "TILE_POSITIONS" if traits.pack_gqa else "TILE_Q"


def _positions_of_cluster(traits: Traits) -> str:
    """Query positions of a cluster at a time, or of the CTA that stands for one."""
    if traits.spec.cluster[0] == 1:
        return _positions_of_tile(traits)
    return "CLUSTER_POSITIONS" if traits.pack_gqa else "TILE_Q * CLUSTER_SIZE"


def _arguments(traits: Traits) -> dict[str, str]:
    """Argument lists that depend on what is known when the kernel is generated."""
    fixed_q, fixed_kv = traits.seqlen_q is not None, traits.seqlen_kv is not None
    needs_problem = not fixed_kv or (traits.causal and not fixed_q)
    problem = ["problem"] if needs_problem else []
    typed_problem = ["problem: Problem"] if needs_problem else []
    row = ["q_tile * TILE_Q + row"] if traits.causal else []
    what = "position" if traits.pack_gqa else "row"  # that sees keys
    q_tile = "q_tile // CLUSTER_SIZE" if traits.spec.cluster[0] > 1 else "q_tile"
    end = f"({q_tile} + 1) * {_positions_of_cluster(traits)}"
    first = f"q_tile * {_positions_of_tile(traits)}"
    if traits.strips:
        first += " + strip"
    blocks = "blocks" if traits.dynamic_blocks else "KV_BLOCKS"

    def listed(*parts: list[str]) -> str:
        return ", ".join(item for part in parts for item in part)

    return {
        "head_kv": "head" if traits.pack_gqa else "head_kv",
        "seeing": what,
        "count_args": listed([end] if traits.causal else [], problem),
        "count_params": listed(
            [f"end_{what}: Int32"] if traits.causal else [], typed_problem
        ),
        "own_params": listed(["q_tile: Int32", "strip: Int32"], typed_problem),
        "count_own_args": listed(["q_tile", "strip"], problem),
        "own_args": listed([f"{first} + WARPGROUP_ROWS"], problem),
        "masked_args": listed([first, blocks], problem),
        "masked_params": listed(
            [f"first_{what}: Int32", "blocks: Int32"], typed_problem
        ),
        "mask_params": listed(
            ["row: Int32"] if traits.causal else [], ["block: Int32"], typed_problem
        ),
        "first_mask_args": listed(row, [f"{blocks} - 1"], problem),
        "loop_mask_args": listed(row, [f"{blocks} - 2 - i"], problem),
        "lse_row": "q_tile * TILE_Q + row",
    }


def _units(traits: Traits) -> dict[str, str]:
    """What is counted, where a cluster changes it."""
    clusters = traits.cluster_size > 1
    return {
        "q_tiles_unit": (
            f"clusters along a {traits.tiled_head}"
            if traits.spec.cluster[0] > 1
            else f"per {traits.tiled_head}"
        ),
        "heads_unit": _heads_unit(traits),
        "tiles_unit": "of all clusters" if clusters else "of all CTAs",
    }


def _heads_unit(traits: Traits) -> str:
    if traits.pack_gqa:
        return "KV heads"
    return "pairs of query heads" if traits.spec.cluster[1] > 1 else "query heads"


def _title(spec: Spec) -> str:
    qk, v = spec.head_dim.qk, spec.head_dim.v
    head_dim = str(qk) if qk == v else f"{qk} and {v}"
    parts = [
        f"head_dim {head_dim}",
        spec.dtype,
        "causal" if spec.mask == "causal" else "full mask",
    ]
    if spec.heads.q_per_kv > 1:
        packed = " packed" if spec.pack_gqa else ""
        parts.append(f"GQA {spec.heads.q_per_kv}{packed}")
    if spec.cluster != (1, 1):
        parts.append(f"cluster {spec.cluster[0]}x{spec.cluster[1]}")
        shared = {"none": "no", "k": "K", "v": "V", "kv": "K and V"}[spec.multicast]
        parts.append(f"{shared} multicast")
    return f"FMHA forward for sm90: {', '.join(parts)}"


def _spec_items(spec_file: SpecFile) -> tuple[tuple[str, str], ...]:
    """The SPEC dict of the generated file, as source text."""
    spec = spec_file.spec
    values: dict[str, object] = {
        "name": spec_file.stem,
        "arch": spec.arch,
        "op": spec.op,
        "dtype": spec.dtype,
        "head_dim": {"qk": spec.head_dim.qk, "v": spec.head_dim.v},
        "seqlen": {"q": spec.seqlen.q, "kv": spec.seqlen.kv},
        "q_per_kv": spec.heads.q_per_kv,
        "pack_gqa": spec.pack_gqa,
        "mask": spec.mask,
        "lse": spec.lse,
        "cluster": list(spec.cluster),
        "multicast": spec.multicast,
    }
    return tuple((repr(key), repr(value)) for key, value in values.items())
