# SPDX-License-Identifier: Apache-2.0
"""What the sm90 templates read: flags that their tests are folded by, and values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..arch.sm90 import (
    CONSTANTS,
    REGISTERS,
    REGISTERS_TRANSPOSING,
    WARPGROUP_ROWS,
    RegisterSplit,
)
from ..features.e4m3 import has_block_factors, is_e4m3, output_type
from ..features.softcap import cap_of
from ..features.varlen import is_packed
from ..ops.e4m3 import DESCALE_ROWS
from ..ops.operation import BYTES
from ..spec.model import Spec, SpecFile
from . import traits as shared
from .context import bias_swizzle, common_context
from .kernel_plan import ELEMENT_BYTES, Barrier, Number
from .traits import P_LIMIT, Loops

K_WARPS: Final = 2  # that load K where its boxes are small
FLUSHED_KEYS: Final = 256  # of e4m3, after which O takes PV: tensor cores keep 13 bits
TRANSPOSE_WARPS: Final = CONSTANTS["TRANSPOSE_WARPS"]
_PACKED_TYPES: Final = {"bf16": "bf16x2", "fp16": "f16x2"}  # of two elements of O


def is_bounded(spec: Spec) -> bool:
    """Whether capped scores span so little that rows need no reference: P = exp(S).

    The tensor cores sum P as PV has it, which is not what the LSE needs, and a sink may be 2^128
    above all of P: neither goes with it.
    """
    cap = cap_of(spec)
    if cap is None or spec.lse or spec.sink:
        return False
    return cap / math.log(2) <= P_LIMIT[spec.dtype]


def slices_pv(spec: Spec) -> bool:
    """Whether O leaves too few registers for a part of all of its columns."""
    return is_e4m3(spec) and spec.head_dim.v > 128


def part_overlays_s(spec: Spec, tile_kv: int) -> bool:
    """Whether S and a part of O share registers: there are none for both, of this many keys.

    QK of a warpgroup is then issued once PV of the block before is in O. S is as large as a slice
    of half of O's columns: where it is smaller, of 96 keys, ptxas serialises the MMAs.
    """
    return slices_pv(spec) and 2 * tile_kv == spec.head_dim.v


def pv_slices(spec: Spec, tile_kv: int) -> int:
    """Of PV's columns, each added to O before the next is issued; 1: a part of all of O fits.

    With ones below V^T, 264 columns are three slices of 88, without four of 64. Those that share
    registers with S are of 128 columns; ones below V^T are beside the last of them, or a slice of
    their own where V is transposed here: of the larger slice ptxas has no registers for most texts.
    """
    if not slices_pv(spec):
        return 1
    if part_overlays_s(spec, tile_kv):
        return 2 if spec.v_layout == "permuted" or spec.lse else 3
    return 4 if spec.lse else 3


def register_splits(spec: Spec, tile_kv: int) -> Mapping[int, RegisterSplit]:
    """Registers of the roles by number of warpgroups that compute.

    O in slices leaves few to the warps that transpose V.
    """
    transposes = is_e4m3(spec) and spec.v_layout == "rows"
    return REGISTERS_TRANSPOSING if transposes and not slices_pv(spec) else REGISTERS


@dataclass(frozen=True)
class Sizes(shared.Sizes):
    """Tile and ring sizes, in rows and stages."""

    q_stages: int
    k_stages: int
    v_stages: int


@dataclass(frozen=True)
class Traits(shared.Traits):
    """What an sm90 kernel must be able to do."""

    sizes: Sizes

    @property
    def one_box(self) -> bool:
        """All rows of a tensor fit one box, and there are others who load or store boxes of it.

        The DSL drops a coordinate that can only be 0 inside the tensor: all would take that one. O
        is stored by warpgroups, Q loaded by the CTAs along it, a key by those that slice K and V.
        """
        q, tiles = self.seqlen_q, self.spec.cluster[0]
        positions = 64 * self.tile_positions // self.sizes.tile_q
        boxes = self.sizes.tile_q * tiles // 64
        one_of_o = q is not None and q <= positions and boxes > 1
        one_of_q = q is not None and q <= self.tile_positions and tiles > 1
        one_key = self.seqlen_kv == 1 and self.spec.multicast != "none"
        return one_of_o or one_of_q or one_key or self.one_block_of_lists

    @property
    def block_loops(self) -> Loops:
        """Loops over the KV blocks after a tile's first, but the one of `one_loop`."""
        if self.one_loop:
            return Loops(masked=False, whole=False, left=False)
        if self.strips:
            return self.loops(WARPGROUP_ROWS, WARPGROUP_ROWS, first_apart=True)
        along_q = self.tile_positions * self.spec.cluster[0]
        return self.loops(self.tile_positions, along_q, first_apart=True)

    @property
    def one_loop(self) -> bool:
        """One loop is for all blocks, which are masked for those edges that are in them.

        With a branch around each mask, a block that needs none takes as many instructions.
        """
        return self.mask.apart

    @property
    def strips(self) -> bool:
        """Warpgroups see different numbers of KV blocks: the first ones skip the last.

        The first one takes its turn at the tensor cores once its own first K is there, and the
        others free none before their turns: K of what it skips must fit beside that K. V of what it
        skips is loaded meanwhile, where tiles overlap before it frees V of the tile before.
        Stages of a bias are too few for this, and a packed tile has too few positions for it to be
        worth its code.
        """
        rows, block = self.sizes.tile_q - 64, self.sizes.tile_kv
        skipped = -(-rows // block)
        fits = skipped < self.sizes.k_stages and skipped <= self.sizes.v_stages
        alone = self.cluster_size == 1 and not self.packed and not self.bias
        one_edge = self.mask.right is not None and not self.mask.left_edges
        one_edge = one_edge and not self.one_loop and not self.lists
        return one_edge and alone and rows >= block and fits

    @property
    def bounded(self) -> bool:
        """Rows need no reference."""
        return is_bounded(self.spec)

    @property
    def sums_by_mma(self) -> bool:
        """V^T has rows of ones, so that sums have P as it was rounded: not for an LSE."""
        return is_e4m3(self.spec) and not self.spec.lse

    @property
    def flushes_pairs(self) -> bool:
        """O takes PV of two blocks at a time, which the tensor cores have added up."""
        of_all_columns = self.sums_by_mma and not slices_pv(self.spec)
        if has_block_factors(self.spec):  # V's differ from a block to the next
            return False
        return of_all_columns and 2 * self.sizes.tile_kv <= FLUSHED_KEYS

    @property
    def part_overlays_s(self) -> bool:
        """S and a part of O share registers."""
        return part_overlays_s(self.spec, self.sizes.tile_kv)

    @property
    def transposes_v(self) -> bool:
        """V comes as rows: MMAs of 8 bits take it as V^T."""
        return is_e4m3(self.spec) and self.spec.v_layout == "rows"

    @property
    def polynomial_elements(self) -> int:
        """Of EX2_GROUP elements, how many exponentials of whole blocks the FMA units take."""
        lists = (
            self.spec.blocks == "lists"
        )  # the last of their blocks is masked anywhere
        if not self.bounded or not self.block_loops.whole or lists:
            return 0
        width = self.spec.head_dim.v
        return 10 if width <= 64 else 2 if width <= 128 else 0

    @property
    def takes_turns(self) -> bool:
        """Warpgroups take turns at the tensor cores."""
        return self.sizes.tile_q > 64

    @property
    def box_rows(self) -> int:
        """Keys of a box: in one page, and where two warps load V of one's half of a block."""
        parts = TRANSPOSE_WARPS if self.transposes_v else 1
        return math.gcd(self.page or 0, self.sizes.tile_kv // parts)

    @property
    def tile_words(self) -> int:
        """Words of a work tile: factors need the number of its sequence, which pages have."""
        return 8 if self.page is None and self.spec.descale != "none" else 6

    @property
    def rings_of_loaders(self) -> tuple[str, ...]:
        """The rings that each warp fills which does nothing but load, by its number."""
        if self.page is None:
            return ("qkv",)
        if self.transposes_v:
            return ("qk",)
        return ("qk", "v", "k") if self.split_k else ("qk", "v")

    @property
    def loaders(self) -> int:
        """Warps that take work tiles beside the consumers: those that load or transpose."""
        return len(self.rings_of_loaders) + TRANSPOSE_WARPS * self.transposes_v

    @property
    def split_k(self) -> bool:
        """Two warps load K: one alone would issue its boxes for as long as a block takes."""
        page = self.page
        return (
            page is not None
            and not self.transposes_v
            and self.sizes.tile_kv // math.gcd(page, self.sizes.tile_kv) > 2
        )

    @property
    def early_wait(self) -> bool:
        """PV takes longer than the first row's exponentials, so waiting later gains nothing."""
        if self.bounded:
            return True  # the other warpgroups' MMAs run meanwhile
        wide = self.spec.head_dim.v > 128 and not is_e4m3(self.spec)
        return wide and self.softcap is None

    @property
    def cross_tile(self) -> bool:
        """A second Q stage lets the next tile's first QK run beside this tile's end.

        Not where its S would need the registers of that end's part of O.
        """
        return self.sizes.q_stages == 2 and not self.part_overlays_s


def template_context(
    spec_file: SpecFile,
    sizes: Sizes,
    chosen: Sequence[Number],
    derived: Sequence[Number],
    barriers: Sequence[Barrier],
    smem_bytes: int,
) -> dict[str, Any]:
    """Return every name that the templates under sm90/ and common/ read, but the digests."""
    spec = spec_file.spec
    traits = Traits(spec, sizes)
    last_warp = 4 * (sizes.tile_q // 64) + 3
    loaders = "warp 0 loads by TMA; "
    if traits.split_k:
        loaders = "warps 0 and 2 load Q and K by TMA, warp 1 V; "
    elif traits.page is not None:
        loaders = "warp 0 loads Q and K by TMA, warp 1 V; "
    if traits.transposes_v and traits.page is not None:
        loaders = (
            "warp 0 loads Q and K by TMA; warps 1 and 2 load V and transpose it;\n"
        )
    elif traits.transposes_v:
        loaders += "warps 1 and 2 transpose V;\n"
    if is_packed(spec):
        loaders += "warp 3 finds work tiles;\n"
    roles = (
        f"Roles: {loaders}warps 4 to {last_warp} compute QK, softmax and PV and store O.",
        *_pipelines(traits, barriers),
        f"Shared memory: {smem_bytes} bytes per CTA, one CTA per SM.",
    )
    common = common_context(
        spec_file, traits, chosen, derived, roles=roles, spec_items=()
    )
    return {
        **common,
        "names_arch": True,
        "packed_type": _PACKED_TYPES[output_type(spec)],
        "scale": "scale_log2" if spec.exp == "exact" else "line_scale",
        "bias_swizzle": bias_swizzle(traits),
        "swizzled_columns": math.gcd(64, spec.head_dim.qk, spec.head_dim.v),
        **_flags(traits),
    }


def _pipelines(traits: Traits, barriers: Sequence[Barrier]) -> Iterator[str]:
    """Lines of the header: each ring of the barrier table, then the named barriers."""
    told = {each.name: each.arrivals for each in barriers}
    sliced = {"q": False, "k": traits.multicast_k, "v": traits.multicast_v}
    by_all = f", a slice by each of {traits.cluster_size} CTAs"
    fills = {
        name: f"{name.upper()} by TMA{by_all if is_sliced else ''}"
        for name, is_sliced in sliced.items()
    }
    if traits.transposes_v:
        fills |= {"v": "V^T by warps 1 and 2", "rows": "V by TMA"}
    if traits.page is not None:
        boxes = traits.sizes.tile_kv // traits.box_rows
        for name in ("k", "rows" if traits.transposes_v else "v"):
            fills[
                name
            ] += f", {boxes} box{'es' * (boxes > 1)} of {traits.box_rows} keys"
    if is_packed(traits.spec):
        fills["tile"] = "a work tile by warp 3"
    if traits.bias:
        fills["bias"] = "bias of a warpgroup's rows by TMA"
    name_width, width = max(map(len, fills)), max(map(len, fills.values()))
    yield "Pipelines (what fills a stage; the arrivals that free it):"
    for name, fill in fills.items():
        yield f"  {name:{name_width}}  {fill:{width}}  {told[f'{name}_empty']}"
    named = [f"  {name}  {told[name]}" for name in ("order", "store") if name in told]
    if named:
        yield from ("Named barriers:", *named)


def _flags(traits: Traits) -> dict[str, bool | int]:
    loops, by_block = traits.block_loops, has_block_factors(traits.spec)
    return {
        "bias_of_16_bits": BYTES.get(traits.spec.bias.dtype) == ELEMENT_BYTES,
        "sums_by_mma": traits.sums_by_mma,
        "sliced_pv": slices_pv(traits.spec),
        "part_overlays_s": traits.part_overlays_s,
        "flushes_pairs": traits.flushes_pairs,
        "linear_exp": traits.spec.exp != "exact",
        "half_line": traits.spec.exp == "linear16",
        "transposes_v": traits.transposes_v,
        "q_tiles_of_factors": traits.sizes.tile_q == DESCALE_ROWS,
        "kv_tiles_of_factors": traits.sizes.tile_kv == DESCALE_ROWS,
        "bounded": traits.bounded,
        "polynomial": traits.polynomial_elements > 0,
        "one_box": traits.one_box,
        "masks": traits.masks,
        "one_loop": traits.one_loop,
        "masked_loop": loops.masked,
        "whole_loop": loops.whole,
        "left_loop": loops.left,
        "edges_apart": traits.edges_apart(traits.tile_positions),
        "uses_rows": traits.mask.edges
        or traits.spec.lse
        or (traits.tests_exponents and not traits.bias and not by_block)
        or (traits.spec.sink and traits.packed)
        or not traits.cross_tile,
        "cross_tile": traits.cross_tile,
        "takes_turns": traits.takes_turns,
        "split_k": traits.split_k,
        "parts_of_blocks": traits.split_k or traits.transposes_v,
        "uneven": False,
        "strips": traits.strips,
        "one_block": traits.one_block,
        "early_wait": traits.early_wait,
        "multicast_k": traits.multicast_k,
        "multicast_v": traits.multicast_v,
    }
