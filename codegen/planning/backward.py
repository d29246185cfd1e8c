# SPDX-License-Identifier: Apache-2.0
"""What backward kernels have in common on every architecture: three kernels, rings, statistics.

A CTA has a KV tile; blocks of query rows come one after the other. dK and dV stay on the SM, dQ is
added to sums in global memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..arch.architecture import Architecture
from ..features.backward import splits
from ..ops.backward import clears_ahead, first_stores, short_heads, strips, turns_of
from ..spec.model import Spec, SpecFile
from . import traits as shared
from .context import common_context
from .kernel_plan import Barrier, DevicePlan, KernelPlan, Number
from .numbers import given, of_scores, tuned

# A ticket is drawn once the loads of the tile before are issued.
TICKET_STAGES: Final = 1
# Of the heads whose tiles CTAs work on at a time: what L2 holds beside other data.
SECTION_BYTES: Final = 32 * 2**20
# Where causal kernels beyond head_dim 64 sum in a fixed order (decision 0067).
HEAD_CTAS: Final = 5
# In the last section, where a causal kernel sums in a fixed order (decision 0066).
BLOCKS_APART: Final = 8
STATS_THREADS: Final = 256
FLOATS: Final = 4  # of 16 bytes
CLUSTER_CTAS: Final = 2  # CTAs that exchange dS
CONSTANTS: Final = {
    **{"TICKET_STAGES": TICKET_STAGES, "STAT_ALIGN": 128},
    **{"STATS_THREADS": STATS_THREADS, "FLOATS": FLOATS, "HALVES": 2 * FLOATS},
}

REASONS: Final[Mapping[str, str]] = {
    "Q_STAGES": "2 where it fits: the next block's loads overlap this block's products",
    "DO_STAGES": "2 where it fits: as of Q",
    "KV_STAGES": "2 where it fits: the next tile's K and V are loaded while this one's are in use",
}


@dataclass(frozen=True)
class Sizes(shared.Sizes):
    """Tile and ring sizes, in rows and stages."""

    q_stages: int
    do_stages: int
    kv_stages: int


@dataclass(frozen=True)
class Traits(shared.Traits):
    """What a backward kernel must be able to do."""

    sizes: Sizes

    @property
    def paired(self) -> bool:
        """Two CTAs exchange dS, and the warpgroups of each have the same keys and different
        products: see `splits`.
        """
        return splits(self.spec)

    @property
    def keys_of_cluster(self) -> int:
        """Of the KV tiles that come to a block of rows together."""
        return CLUSTER_CTAS * self.sizes.tile_kv if self.paired else self.sizes.tile_kv

    @property
    def kv_tail(self) -> bool:
        """The last KV tile may be partial; of a cluster one may be behind all keys."""
        return self.seqlen_kv is None or self.seqlen_kv % self.keys_of_cluster != 0

    @property
    def hands_turns(self) -> bool:
        """Two producer warps watch and pass the turns in which math warps add dQ."""
        return self.spec.deterministic and self.spec.arch == "sm90"

    @property
    def first_stores(self) -> bool:
        """The first tile that comes to a block of rows stores its dQ, and the last one writes it:
        nothing is added to zeros, and no kernel follows.
        """
        spec = self.spec
        sides, head_dim = (self.seqlen_q, self.seqlen_kv), spec.head_dim
        dims = head_dim.qk, head_dim.v
        return first_stores(spec.arch, *dims, *sides, halves=self.half_sums)

    @property
    def keyless_blocks(self) -> bool:
        """No row of some block sees a key: no tile comes there, and the first kernel writes dQ."""
        right, rows, keys = self.mask.right, self.seqlen_q, self.seqlen_kv
        if not self.first_stores or right is None or rows is None or keys is None:
            return False
        return rows - keys - right >= self.sizes.tile_q

    @property
    def _longest_first(self) -> bool:
        """Of a head's tiles the first are seen by most rows, as with a causal mask."""
        return bool(self.mask.right_edges) and not self.mask.left_edges

    @property
    def _meets_late(self) -> bool:
        """Tiles of a causal head wait for one another where they come to a block."""
        free = self.first_stores and not self.spec.deterministic
        return free and self._longest_first and self.spec.heads.q_per_kv == 1

    @property
    def falling_sections(self) -> bool:
        """A head's tiles are drawn in falling order, but in the last section (decisions 0059 and
        0066).
        """
        return self.long_last or (self._meets_late and self.spec.head_dim.qk <= 64)

    @property
    def long_last(self) -> bool:
        """The last section may have the heads of two or more: its tiles, the longest first, would
        wait long for their turns if many of a head began at once.
        """
        return self.hands_turns and self._longest_first

    @property
    def caps_heads(self) -> bool:
        """Sections have no more heads than leave several CTAs for each: sooner done beyond
        head_dim 64 where heads are short (decision 0067).
        """
        return self.long_last and self.spec.head_dim.qk > 64

    @property
    def counted(self) -> bool:
        """Tiles take turns where they come to a block of rows."""
        return self.spec.deterministic or self.first_stores

    @property
    def clears_ahead(self) -> bool:
        """Tickets clear sums of dQ of a later section's heads, which the first kernel does not."""
        spec = self.spec
        return clears_ahead(spec.arch, spec.head_dim.qk, counted=self.counted)

    @property
    def half_sums(self) -> bool:
        """dQ is summed in fp16, of P and dS that the longest rows of dO scale (decision 0068)."""
        return self.spec.dq_sums == "fp16"

    @property
    def section_bytes(self) -> int:
        """Of L2, that the heads have whose tiles CTAs work on at a time."""
        return SECTION_BYTES

    @property
    def strips(self) -> int:
        """Of a head's KV tiles, which take turns: sums in fp16 that grow and shrink lose digits.
        1 where they do not: with a mask the longest tiles come first (decision 0069).
        """
        masked, stores = bool(self.mask.edges), self.first_stores
        return strips(halves=self.half_sums, masked=masked, stores=stores)

    @property
    def shortest_early(self) -> bool:
        """Of four tiles the last is drawn before the third (decision 0059)."""
        tiles = -(-(self.seqlen_kv or 0) // self.sizes.tile_kv)
        return self._meets_late and not self.falling_sections and tiles == 4

    @property
    def watched(self) -> bool:
        """Two producer warps watch who adds to a block of rows."""
        return self.hands_turns or self.first_stores

    @property
    def thin(self) -> bool:
        """head_dim is no multiple of the 64 columns that a swizzle of 128 bytes goes over."""
        return self.spec.head_dim.qk % 64 != 0


def choices(
    spec: Spec, tile: tuple[int, int], kv_stages: Sequence[int]
) -> Iterator[Sizes]:
    """Yield the rings to try with a tile of (query rows, keys), the better first.

    kv_stages: of K and V, where the spec leaves them out.
    """
    asked = spec.stages
    # The rings of Q and dO turn with every block, those of K and V with every tile.
    for q_stages, do_stages in ((2, 2), (2, 1), (1, 1)):
        for kv in (asked.kv,) if asked.kv else kv_stages:
            yield Sizes(*tile, asked.q or q_stages, asked.do or do_stages, kv)


def plan_of(
    spec_file: SpecFile,
    architecture: Architecture,
    main: DevicePlan,
    chosen: tuple[Number, ...],
    numbers: tuple[Number, ...],
    statements: Iterable[str],
    context: Mapping[str, Any],
) -> KernelPlan:
    """The plan of the kernels of a call, of which `main` is the second."""
    bare = DevicePlan((), (), (), (), (), (), {})
    last = () if context["first_stores"] else (replace(bare, name="finish"),)
    return KernelPlan(
        spec_file=spec_file,
        architecture=architecture,
        chosen=chosen,
        derived=numbers,
        kernels=(replace(bare, name="stats"), main, *last),
        statements=tuple(statements),
        context=context,
    )


def tiles(traits: Traits) -> Iterator[tuple[str, str, int, str]]:
    """Yield (name, formula, stages, what each holds) of the rings of tiles in shared memory."""
    sizes = traits.sizes
    yield "sQ", "2 * TILE_Q * HEAD_DIM_QK * Q_STAGES", sizes.q_stages, "Q"
    yield "sdO", "2 * TILE_Q * HEAD_DIM_V * DO_STAGES", sizes.do_stages, "dO"
    if traits.paired:
        both = "K, behind it columns of the other CTA's"
        yield "sK", "2 * TILE_KV * K_COLUMNS * KV_STAGES", sizes.kv_stages, both
    else:
        yield "sK", "2 * TILE_KV * HEAD_DIM_QK * KV_STAGES", sizes.kv_stages, "K"
    yield "sV", "2 * TILE_KV * HEAD_DIM_V * KV_STAGES", sizes.kv_stages, "V"


def largest_given(spec: Spec) -> tuple[str, ...]:
    """The field that shared memory is too small for, as far as the spec gives one."""
    for name in ("do", "q", "kv"):
        if getattr(spec.stages, name):
            return ("stages", name)
    return ("tile", "q") if spec.tile.q else ("head_dim",)


def chosen(
    traits: Traits, more: Sequence[tuple[str, int, str, str]], why: Callable[[str], str]
) -> Iterator[Number]:
    """Yield the constants that a spec or the plan chooses; more: rows of an architecture's own."""
    sizes = traits.sizes
    yield from given(traits)
    rows = (
        ("TILE_Q", sizes.tile_q, "rows of a block", "tile.q"),
        ("TILE_KV", sizes.tile_kv, "rows per CTA", "tile.kv"),
        ("Q_STAGES", sizes.q_stages, "blocks", "stages.q"),
        ("DO_STAGES", sizes.do_stages, "blocks", "stages.do"),
        ("KV_STAGES", sizes.kv_stages, "tiles of K, and as many of V", "stages.kv"),
        *more,
    )
    yield from tuned(traits.spec, rows, why)


def sections(traits: Traits, why: str) -> Iterator[Number]:
    """Yield the constants of how many heads a section has."""
    unit = "bytes that the heads of a section have in L2"
    yield Number("SECTION_BYTES", traits.section_bytes, unit, "planned", reason=why)
    if traits.strips > 1:
        unit = "of a head's KV tiles, which take turns"
        why = "partial sums of dQ stay near their share of the whole"
        yield Number("STRIPS", traits.strips, unit, "planned", reason=why)
    if traits.caps_heads:
        unit = "CTAs, or clusters, for each head of a section but the last, at least"
        short = "short heads, of which L2 has many, are done sooner"
        yield Number("HEAD_CTAS", HEAD_CTAS, unit, "planned", reason=short)
    if traits.long_last:
        unit = "blocks within which rising tiles of a head begin"
        why = "a tile that rises waits at its first block for the one before"
        yield Number("BLOCKS_APART", BLOCKS_APART, unit, "planned", reason=why)


def tx_bytes(
    traits: Traits, *, with_statistics: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield (name, unit, formula) of what loads fill a stage with."""
    k = "K_COLUMNS" if traits.paired else "HEAD_DIM_QK"
    per_stage, stat = "bytes per stage", " + STAT_BYTES" if with_statistics else ""
    of_s = f"{stat} + 4 * EXPONENTS" if traits.half_sums else stat
    for name, rows, width, beside in (
        *(("Q", "TILE_Q", "HEAD_DIM_QK", of_s), ("DO", "TILE_Q", "HEAD_DIM_V", stat)),
        *(("K", "TILE_KV", k, ""), ("V", "TILE_KV", "HEAD_DIM_V", "")),
    ):
        formula = f"{rows} * {width} * ELEMENT_BYTES{beside}"
        yield f"{name}_TX_BYTES", per_stage, formula


def of_kernels_beside(traits: Traits) -> Iterator[tuple[str, str, str]]:
    """Yield (name, unit, formula) of the sums, of the first kernel and the last, of sections."""
    of_vector, count = ("HALVES", "eight") if traits.half_sums else ("FLOATS", "four")
    groups = f"DQ_ELEMENTS // MATH_THREADS // {of_vector}"
    yield "DQ_GROUPS", f"of {count} sums, per thread", groups
    yield "DQ_STEP", "bytes between a thread's groups", "4 * FLOATS * WARPGROUP_THREADS"
    if traits.spec.deterministic or traits.first_stores:
        head_dim = traits.spec.head_dim
        turns = turns_of(traits.spec.arch, head_dim.qk, head_dim.v)
        adds = "of all that add" if traits.watched else "of each warpgroup that adds"
        if traits.paired:
            adds = "of each CTA of a pair"
        yield "TURNS", f"of a block of rows: {adds}", str(turns)
    yield from of_scores(traits)
    if not traits.first_stores:
        yield "DQ_ROW", "elements, of which 8 keep banks apart", "HEAD_DIM_QK + HALVES"
    lanes = "HEAD_DIM_V // HALVES"
    if traits.thin:
        yield "ROW_VECTORS", "of a row of dO or of O, per thread", f"{lanes} // 4"
        lanes += " // ROW_VECTORS"
    yield "ROW_LANES", "threads that read a row of dO and of O", lanes
    yield "STATS_ROWS", "that a CTA reads at a time", "STATS_THREADS // ROW_LANES"
    of_sum = 2 if traits.half_sums else 4
    row = f"HEAD_DIM_QK * (ELEMENT_BYTES + {of_sum}) + HEAD_DIM_V * ELEMENT_BYTES"
    row = f"Q_PER_KV * ({row})" if traits.spec.heads.q_per_kv > 1 else row
    yield "ROW_BYTES", "bytes of Q, dO and sums of dQ, per row of a KV head", row
    if traits.seqlen_q is not None:
        yield "Q_BLOCKS", "per head", "-(-SEQLEN_Q // TILE_Q)"


def statistic_of(*, log2: bool, scaled: bool) -> str:
    """A row's statistic for S: what is added to scores of base 2, or what S starts at.

    scaled: P is, by 2^x.
    """
    of_base = "-LSE * log2(e)" if log2 else "-LSE / scale"
    return f"{of_base} + x" if scaled else of_base


def kernel_lines(traits: Traits, statistic: str) -> Iterator[str]:
    """The lines of the header that say what the kernels do. statistic: that of S."""
    yield "Kernels, in their order, by what is behind the file's name in theirs:"
    does = what_kernels_do(
        statistic,
        first_stores=traits.first_stores,
        keyless_blocks=traits.keyless_blocks,
        clears_ahead=traits.clears_ahead,
    )
    width = max(map(len, does))
    for suffix, what in does.items():
        yield f"  {suffix:{width}}  {what}"


def what_kernels_do(
    statistic: str, *, first_stores: bool, keyless_blocks: bool, clears_ahead: bool
) -> dict[str, str]:
    """What each kernel does, by its suffix: `ops.backward.kernels`.

    statistic: that of S. keyless_blocks: no row of some block sees a key. The others: see `Traits`.
    """
    of_rows = f"{statistic} and -D of each row"
    if first_stores:
        zeros = ", and dQ of blocks that see no key" if keyless_blocks else ""
        sums = "a block's first tile stores dQ, its last one adds and writes it"
        return {"_stats": f"{of_rows}{zeros}", "": f"dK and dV; {sums}"}
    of_first = " of the first heads" if clears_ahead else ""
    of_later = ", and clears those of later heads" if clears_ahead else ""
    return {
        "_stats": f"{of_rows}, and zeros where dQ{of_first} is summed",
        "": f"dK and dV; adds to the sums of dQ{of_later}",
        "_finish": "dQ of its sums",
    }


def context(
    spec_file: SpecFile,
    traits: Traits,
    chosen: Sequence[Number],
    numbers: Sequence[Number],
    roles: Sequence[str],
) -> dict[str, Any]:
    """Every name that the templates under common/ and common/backward/ read, but the digests."""
    common = common_context(
        spec_file, traits, chosen, numbers, roles=roles, spec_items=()
    )
    return {
        **common,
        "ordered": spec_file.spec.deterministic,
        "counted": traits.counted,
        "first_stores": traits.first_stores,
        "keyless_blocks": traits.keyless_blocks,
        "falling_sections": traits.falling_sections,
        "long_last": traits.long_last,
        "caps_heads": traits.caps_heads,
        "clears_ahead": traits.clears_ahead,
        "shortest_early": traits.shortest_early,
        "hands_turns": traits.hands_turns,
        "half_sums": traits.half_sums,
        "in_strips": traits.strips > 1,
        "packed_type": "bf16x2" if spec_file.spec.dtype == "bf16" else "f16x2",
        "paired": traits.paired,
        "thin": traits.thin,
        # Apart from the keys before a window, which have a mask of their own.
        "masked": traits.kv_tail or bool(traits.mask.right_edges),
    }


def barriers_of_tickets(takers: int, who: str) -> Iterator[Barrier]:
    """Of the ring of tickets, which so many warps take one from."""
    yield Barrier("ticket_full", TICKET_STAGES, 1, "1: the scheduler", who)
    taken = f"{takers}: every warp that took it"
    yield Barrier("ticket_empty", TICKET_STAGES, takers, taken, "scheduler")


def statements(traits: Traits, of_s: str, *products: str) -> Iterator[str]:
    """What the file does for its shapes. of_s: how S gets its statistic; products: of dS."""
    if traits.first_stores:
        yield "Two kernels: statistics of rows, then dQ, dK and dV."
    else:
        yield "Three kernels: statistics of rows, dK and dV with sums of dQ, dQ of its sums."
    yield (
        "A CTA has a KV tile; the blocks of rows that see it come one after the other, of each"
        " query head of its KV head in turn: dK and dV stay where they are summed."
    )
    if traits.paired:
        yield (
            "A cluster of two CTAs has two KV tiles that follow one another. Each CTA sends its dS"
            " to the other one, and adds half of the columns of dQ, of the keys of both."
        )
    if traits.mask.edges:
        yield f"Query row i, at q = i + seqlen_kv - seqlen_q, sees {traits.mask}."
    yield of_s
    yield from products
    sums = traits.spec.dq_sums
    if traits.spec.deterministic:
        waits = (
            "two warps watch and pass the turns of its blocks"
            if traits.hands_turns
            else "a warpgroup waits for its turn"
        )
        yield (
            f"dQ is summed in {sums} in the workspace, tile by tile in the order of their tickets:"
            f" {waits}, and the same inputs give the same bits."
        )
    else:
        bits = "bits" if traits.half_sums else "bit"
        yield (
            f"dQ is summed in {sums} in the workspace, in any order: its last {bits} may differ"
            " from call to call; dK and dV have the same bits for the same inputs."
        )
    if traits.half_sums:
        yield (
            "fp16 has room for these sums since P and dS of a KV head are scaled by 2^x: by samples"
            " of its rows of dO, K and V, the product of the longest becomes 2^10 to 2^12. dQ of"
            " a block whose dO is much longer or shorter has another power of two besides."
        )
    if traits.strips > 1:
        yield (
            f"A head's KV tiles come from {traits.strips} strips of the keys in turn: partial sums"
            " of dQ stay near their share of the whole where K or V drifts."
        )
    if traits.first_stores:
        most = short_heads(traits.spec.head_dim.qk, halves=traits.half_sums)
        yield (
            f"Lengths are fixed and at most {most}: the first tile"
            " that comes to a block of rows stores its dQ, for which the others wait; the last one"
            " waits for all, adds its own and writes dQ."
        )
    yield "dQ of a row without keys is 0, and so are dK and dV of a key that no row sees."
