# SPDX-License-Identifier: Apache-2.0
"""The plan of an sm90 kernel: tiles, rings, registers, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from .. import features
from ..arch import sm90
from ..errors import SpecError
from ..features.bias import has_bias
from ..features.e4m3 import has_block_factors, is_e4m3
from ..features.gqa import cut_group, tile_that_cuts_groups
from ..features.mask import keys_of
from ..features.varlen import is_packed
from ..ops.e4m3 import DESCALE_ROWS
from ..ops.operation import BYTES
from ..spec.model import Spec, SpecFile
from ..spec.specfile import FieldPath
from .kernel_plan import (
    Barrier,
    DevicePlan,
    KernelPlan,
    Number,
    Region,
    Registers,
    too_much_smem,
    total,
)
from .numbers import derived, given, of_bias, of_scores, regions, tuned
from .sm90_context import (
    FLUSHED_KEYS,
    K_WARPS,
    TRANSPOSE_WARPS,
    Sizes,
    Traits,
    is_bounded,
    part_overlays_s,
    pv_slices,
    register_splits,
    template_context,
)
from .sm90_protocol import loads, phases
from .sm90_words import statements

KV_TILES: Final = (128, 64, 32, 16)  # tried in this order; they divide usual lengths
# Of e4m3, whose MMAs take half as long: the more keys, the less is paid between blocks.
KV_TILES_OF_8_BITS: Final = (160, 128, 96, 64, 32)
# Stages of K and V, tried in this order. V is freed later than K, so it gains more from a third.
KV_STAGES: Final = ((3, 3), (2, 3), (2, 2))  # d64: 3 and 4 stages ran alike on an H200
SMS_PER_HEAD: Final = (
    4  # K and V of 33 heads stay in the L2 of an H200; of 66 at head_dim 64
)

# Why a number is what it is when the spec leaves it out.
REASONS: Final[Mapping[str, str]] = {
    "TILE_Q": "192 up to head_dim 64, where a third warpgroup has registers enough",
    "TILE_KV": "the largest power of two that registers and two stages in shared memory take",
    "Q_STAGES": "2 where it fits: the next tile's first QK then overlaps this tile's end",
    "K_STAGES": "3 where they fit, else 2; 2 for a single block",
    "V_STAGES": "3 where they fit, else 2; 2 for a single block",
    "POLYNOMIAL_ELEMENTS": "of the MUFU's work, which tanh doubles, so much made loops fastest",
    "SMS_PER_HEAD": "K and V of the heads that run at a time then stay in L2",
    "LEVEL_TILES": "they run at a time, so that K and V of a head come from L2",
    "ROWS_STAGES": "one is transposed while the next one comes",
    "TILE_STAGES": "the next work tile is found while this one is computed",
}
REASON_OF_8_BITS: Final = (
    "the most keys that registers and two stages in shared memory take; without an LSE up to 128,"
    " of which O takes two blocks at a time"
)
REGISTERS_OF_SCORES: Final = 16  # where each is an expression of its own
TILE_STAGES: Final = 2
ROWS_STAGES: Final = 2
STORE_COLUMNS: Final = 32  # of O that a quad of threads stores from registers at once


def resolve(spec_file: SpecFile) -> KernelPlan:
    """Plan a kernel, or raise SpecError (FG401 to FG404) with the numbers that do not fit."""
    spec = spec_file.spec
    sizes = _choose(spec_file)
    traits = Traits(spec, sizes)
    chosen = tuple(_chosen(traits))
    numbers = tuple(derived(_derived(traits), chosen, _constants(spec)))
    smem = _smem(traits)
    barriers = tuple(_barriers(traits))
    context = template_context(spec_file, sizes, chosen, numbers, barriers, total(smem))
    kernel = DevicePlan(
        smem=smem,
        tmem=(),
        barriers=barriers,
        phases=phases(traits),
        loads=tuple(loads(traits)),
        registers=_registers(spec, sizes),
        register_parts=_register_parts(spec, sizes.tile_kv),
    )
    return KernelPlan(
        spec_file=spec_file,
        architecture=sm90.ARCHITECTURE,
        chosen=chosen,
        derived=numbers,
        kernels=(kernel,),
        statements=tuple(statements(traits, context)),
        context=context,
    )


def _choose(spec_file: SpecFile) -> Sizes:
    """Tile and rings: as given, the rest planned for two KV stages, whatever stages.kv says.

    So a change of stages.kv changes nothing else, and what does not fit is refused.
    """
    spec = spec_file.spec
    tile_q = spec.tile.q or _query_rows(spec)
    kv_tiles = _kv_tiles(spec_file)
    if cut_group(spec, tile_q):
        others = _query_tiles(spec, kv_tiles[-1])
        raise tile_that_cuts_groups(spec_file, tile_q, others)
    ways_out = _ways_out(spec_file)
    fitting = [n for n in kv_tiles if tile_q in _query_tiles(spec, n)]
    if not fitting:
        raise _too_many_registers(spec_file, tile_q, kv_tiles[-1])

    def fits(sizes: Sizes) -> bool:
        return total(_smem(Traits(spec, sizes))) <= sm90.SMEM_BYTES

    choices = [
        Sizes(tile_q, tile_kv, q_stages, *KV_STAGES[-1])
        for tile_kv in fitting
        for q_stages in ways_out
    ]
    sizes = next(filter(fits, choices), choices[-1])
    k, v = spec.stages.kv, spec.stages.v or spec.stages.kv
    planned = KV_STAGES[-1:] if Traits(spec, sizes).one_block else KV_STAGES
    depths = [(k or planned_k, v or planned_v) for planned_k, planned_v in planned]
    depths_of = [replace(sizes, k_stages=k, v_stages=v) for k, v in depths]
    sizes = next(filter(fits, depths_of), depths_of[-1])
    if not fits(sizes):
        smem, field = _smem(Traits(spec, sizes)), _largest_given(spec)
        raise too_much_smem(spec_file, sm90.ARCHITECTURE, smem, field)
    return sizes


def _query_rows(spec: Spec) -> int:
    """Rows of a query tile where the spec leaves them out: of three warpgroups where those fit."""
    has = features.flags(spec)
    alone = not (has["by_element"] or has_bias(spec))
    three = spec.head_dim.v <= 64 or (is_bounded(spec) and spec.head_dim.v <= 128)
    return 192 if three and alone and not cut_group(spec, 192) else 128


def _kv_tiles(spec_file: SpecFile) -> list[int]:
    """Rows of a KV tile to try, the better first; their stages begin where a swizzled tile can."""
    spec = spec_file.spec
    widths = (spec.head_dim.qk, spec.head_dim.v)
    tiles = [
        rows
        for rows in ((spec.tile.kv,) if spec.tile.kv else _planned_kv_tiles(spec))
        if all(rows * n * BYTES[spec.dtype] % sm90.SMEM_ALIGN == 0 for n in widths)
    ]
    if spec.tile.kv and not tiles:
        raise _unaligned(spec_file, spec.tile.kv)
    return tiles


def _planned_kv_tiles(spec: Spec) -> Sequence[int]:
    """All of KV_TILES, or without the first: of blocks as wide as a window most keys are hidden."""
    tiles = _kv_tiles_of(spec)
    mask = keys_of(spec)
    if mask.left is None or mask.right is None:
        return tiles
    keys = mask.left + mask.right + 1
    return tiles[1:] if keys <= tiles[0] else tiles


def _kv_tiles_of(spec: Spec) -> Sequence[int]:
    if not is_e4m3(spec):
        return KV_TILES
    # Where S and a part of O share registers a tile has to be asked for: no H200 has timed it.
    tiles = [n for n in KV_TILES_OF_8_BITS if not part_overlays_s(spec, n)]
    if has_block_factors(spec):
        return tuple(n for n in tiles if DESCALE_ROWS % n == 0)
    if spec.lse:
        return tiles
    return tuple(n for n in tiles if 2 * n <= FLUSHED_KEYS)


def _unaligned(spec_file: SpecFile, rows: int) -> SpecError:
    spec = spec_file.spec
    sizes = {"K": spec.head_dim.qk, "V": spec.head_dim.v}
    nbytes = BYTES[spec.dtype]
    stages = [
        f"{rows} * {n} * {nbytes} % {sm90.SMEM_ALIGN} ="
        f" {rows * n * nbytes % sm90.SMEM_ALIGN} ({name})"
        for name, n in sizes.items()
    ]
    message = (
        f"tile.kv: {rows} makes stages that are no multiple of {sm90.SMEM_ALIGN} bytes:"
        f" {', '.join(stages)}"
    )
    hint = "set tile.kv to a multiple of 32, or leave it out"
    return spec_file.refusal("FG407", ("tile", "kv"), message, hint)


def _ways_out(spec_file: SpecFile) -> list[int]:
    """Numbers of Q stages with which O can leave, the better first; raises SpecError if none."""
    spec = spec_file.spec
    asked = (spec.stages.q,) if spec.stages.q else (2, 1)
    against = {q_stages: _against(spec, q_stages) for q_stages in asked}
    ways = [q_stages for q_stages in asked if not against[q_stages]]
    if ways:
        return ways
    message = "; ".join(f"stages.q: {n} {why}" for n, why in against.items())
    field: FieldPath = ("head_dim",)
    hint = "set head_dim.v to a multiple of 32"
    if spec.stages.q and not _against(spec, 3 - spec.stages.q):
        field = ("stages", "q")
        hint = f"set stages: {{q: {3 - spec.stages.q}}}, or leave it out"
    raise spec_file.refusal("FG404", field, message, hint)


def _against(spec: Spec, q_stages: int) -> str:
    """Why O cannot leave: by TMA from a stage of Q if there are two, else from registers."""
    qk, v = spec.head_dim.qk, spec.head_dim.v
    rows = sm90.WARPGROUP_ROWS
    if q_stages == 1 and v % STORE_COLUMNS:
        return (
            f"stores O from registers, {STORE_COLUMNS} columns at a time, but head_dim.v is {v}:"
            f" {v} % {STORE_COLUMNS} = {v % STORE_COLUMNS}"
        )
    if q_stages == 2 and v > qk:
        return (
            f"stores O from the stage of its Q, but head_dim.v {v} > head_dim.qk {qk}"
        )
    if q_stages == 2 and (why := cut_group(spec, rows)):
        return f"stores O by TMA, {rows} rows of a warpgroup at a time, but {why}"
    return ""


def _registers(spec: Spec, sizes: Sizes) -> tuple[Registers, ...]:
    warpgroups = sizes.tile_q // sm90.WARPGROUP_ROWS
    split = register_splits(spec, sizes.tile_kv)[warpgroups]
    return (
        Registers("producer", 1, split.producer),
        Registers("consumer", warpgroups, split.consumer),
    )


def _register_parts(spec: Spec, tile_kv: int) -> dict[str, int]:
    """Registers of a consumer thread: S and O in fp32, P in 16 or 8 bits, and the rest."""
    of_p = tile_kv * BYTES[spec.dtype] // 8
    parts = {"S": tile_kv // 2, "P": of_p, "O": spec.head_dim.v // 2}
    if features.flags(spec)["by_element"]:
        parts["scores"] = REGISTERS_OF_SCORES
    if has_bias(spec):
        # Its rows are as S's; of keys alone a thread has half as many.
        elements = tile_kv // (2 if spec.bias.shape[2] != 1 else 4)
        parts["bias"] = elements * BYTES[spec.bias.dtype] // 4
    if is_e4m3(spec):
        parts["part of O"] = spec.head_dim.v // 2 // pv_slices(spec, tile_kv)
    if part_overlays_s(spec, tile_kv):
        # Row sums are columns of the last slice.
        columns = spec.head_dim.v + (0 if spec.lse else sm90.CONSTANTS["ATOM_ROWS"])
        last = columns - tile_kv * (pv_slices(spec, tile_kv) - 1)
        parts = {
            "S or part of O": max(tile_kv, last) // 2,
            "P": of_p,
            "O": columns // 2,
        }
    return {**parts, "others": sm90.REGISTERS_BESIDE_TILES[BYTES[spec.dtype]]}


def _smem(traits: Traits) -> tuple[Region, ...]:
    sizes, chosen = traits.sizes, tuple(_chosen(traits))
    bias = " + BIAS_STAGES" if traits.bias else ""
    tiles = " + TILE_STAGES" if is_packed(traits.spec) else ""
    of_rows = " + ROWS_STAGES" if traits.transposes_v else ""
    of_v = "TILE_KV * V_ROWS" if traits.sums_by_mma else "V_TX_BYTES"
    rows = [
        (
            "barriers",
            f"2 * 8 * (Q_STAGES + K_STAGES + V_STAGES{bias}{tiles}{of_rows})",
            1,
            "",
        ),
        *(
            [("sTiles", f"4 * {traits.tile_words} * TILE_STAGES", 1, "")]
            if tiles
            else []
        ),
        (
            "sQ",
            "Q_TX_BYTES * Q_STAGES",
            sizes.q_stages,
            "Q, then O" if traits.cross_tile and not is_e4m3(traits.spec) else "Q",
        ),
        ("sK", "K_TX_BYTES * K_STAGES", sizes.k_stages, "K"),
        ("sV", f"{of_v} * V_STAGES", sizes.v_stages, "V"),
    ]
    if traits.transposes_v:
        rows.append(("sRows", "V_TX_BYTES * ROWS_STAGES", ROWS_STAGES, "V"))
    if is_e4m3(traits.spec) and traits.cross_tile:
        rows.append(("sO", "2 * TILE_Q * HEAD_DIM_V", 1, "O"))
    if traits.bounded:
        rows.append(("sOnes", "2 * 8 * 16", 1, "ones"))
        rows.append(("padding", "-(2 * 8 * 16) % 1024", 1, ""))
    if traits.bias:
        of_stage = "BIAS_TX_BYTES" if traits.bias_of_rows else "BIAS_PITCH * BIAS_BYTES"
        stages, formula = (
            sizes.tile_q // sm90.WARPGROUP_ROWS,
            f"{of_stage} * BIAS_STAGES",
        )
        rows.append(("sBias", formula, stages, "the bias"))
    numbers = (*chosen, *derived(_derived(traits), chosen, _constants(traits.spec)))
    return regions(rows, numbers, sm90.SMEM_ALIGN)


def _too_many_registers(spec_file: SpecFile, tile_q: int, tile_kv: int) -> SpecError:
    spec = spec_file.spec
    parts = _register_parts(spec, tile_kv)
    budget = register_splits(spec, tile_kv)[tile_q // sm90.WARPGROUP_ROWS].consumer
    message = (
        f"a consumer thread needs about {sum(parts.values())} registers, "
        f"tile.q leaves {budget}: {' + '.join(f'{k} {n}' for k, n in parts.items())}"
    )
    field = ("tile", "kv") if spec.tile.kv else ("tile", "q")
    ways = ["a smaller tile.kv"] if spec.tile.kv else []
    ways += ["tile.q 128"] if tile_q > 128 else []
    hint = " or ".join(ways)
    return spec_file.refusal("FG402", field, message, hint)


def _largest_given(spec: Spec) -> tuple[str, ...]:
    """The field that shared memory is too small for, as far as the spec gives one."""
    for name in ("v", "kv", "q"):
        if getattr(spec.stages, name):
            return ("stages", name)
    if spec.tile.kv or spec.tile.q:
        return ("tile", "kv" if spec.tile.kv else "q")
    return ("head_dim",)


def _query_tiles(spec: Spec, tile_kv: int) -> list[int]:
    """Rows of the query tiles whose threads have registers for a KV tile."""
    needed = sum(_register_parts(spec, tile_kv).values())
    return [
        warpgroups * sm90.WARPGROUP_ROWS
        for warpgroups, split in register_splits(spec, tile_kv).items()
        if needed <= split.consumer
    ]


def _chosen(traits: Traits) -> Iterator[Number]:
    spec, sizes = traits.spec, traits.sizes
    yield from given(traits)
    per_cta = f"rows per CTA{': positions x heads' if traits.packed else ''}"
    stages_v = "stages.v" if spec.stages.v else "stages.kv"
    rows = [
        ("TILE_Q", sizes.tile_q, per_cta, "tile.q"),
        ("TILE_KV", sizes.tile_kv, "rows per stage", "tile.kv"),
        ("Q_STAGES", sizes.q_stages, "tiles", "stages.q"),
        ("K_STAGES", sizes.k_stages, "tiles", "stages.kv"),
        ("V_STAGES", sizes.v_stages, "tiles", stages_v),
    ]
    if traits.polynomial_elements:
        beside = "EX2_GROUP elements: exp2 on the FMA units"
        rows.append(
            ("POLYNOMIAL_ELEMENTS", traits.polynomial_elements, f"of {beside}", "")
        )
    if traits.transposes_v:
        rows.append(("ROWS_STAGES", ROWS_STAGES, "tiles of V as it comes", ""))
    sms = SMS_PER_HEAD if spec.head_dim.v > 64 else SMS_PER_HEAD // 2
    if is_packed(spec):
        rows.append(("TILE_STAGES", TILE_STAGES, "work tiles", ""))
    if is_packed(spec) and traits.uneven_tiles:
        # The query heads of a KV head share K and V without that.
        tiles = max(sms // (1 if traits.packed else spec.heads.q_per_kv), 1)
        rows.append(("LEVEL_TILES", tiles, "query tiles of a head in a row", ""))
    elif traits.uneven_tiles:
        rows.append(("SMS_PER_HEAD", sms, "SMs that work on a head at a time", ""))
    yield from tuned(spec, rows, partial(_reason, traits))


def _reason(traits: Traits, name: str) -> str:
    """Why a number is what it is, though the spec leaves it out."""
    spec = traits.spec
    if name == "Q_STAGES" and traits.part_overlays_s:
        return "2 where they fit: the next tile's Q is then loaded beside this tile"
    for q_stages in (2, 1) if name == "Q_STAGES" else ():
        if why := _against(spec, q_stages):
            return f"{q_stages} {why}"
    if name == "TILE_KV" and _planned_kv_tiles(spec)[0] != _kv_tiles_of(spec)[0]:
        return "less than the window's keys: the blocks at its edges are masked in part"
    if name == "TILE_KV" and is_e4m3(spec):
        return REASON_OF_8_BITS
    if name == "TILE_Q" and is_bounded(spec):
        return (
            "192 up to head_dim 128: what waits for the MUFU is one warpgroup of three"
        )
    if name == "TILE_Q" and features.flags(spec)["by_element"]:
        return (
            "two warpgroups: expressions of single scores need a third one's registers"
        )
    if name == "TILE_Q" and has_bias(spec):
        return "two warpgroups: a block's bias needs a third one's registers"
    return REASONS[name]


def _derived(traits: Traits) -> Iterator[tuple[str, str, str]]:
    """Yield (name, unit, formula)."""
    yield from of_scores(traits)
    per_thread, per_stage = "per thread: ptxas spills none", "bytes per stage"
    frees = "warps that free it"
    yield "WARPGROUPS", "that compute", "TILE_Q // WARPGROUP_ROWS"
    yield "THREADS", "per CTA", "WARPGROUP_THREADS * (WARPGROUPS + 1)"
    yield "CONSUMER_REGS", per_thread, _by_warpgroups(traits, "consumer")
    yield "PRODUCER_REGS", per_thread, _by_warpgroups(traits, "producer")
    yield "Q_TX_BYTES", per_stage, "TILE_Q * HEAD_DIM_QK * ELEMENT_BYTES"
    yield "K_TX_BYTES", per_stage, "TILE_KV * HEAD_DIM_QK * ELEMENT_BYTES"
    yield "V_TX_BYTES", per_stage, "TILE_KV * HEAD_DIM_V * ELEMENT_BYTES"
    if traits.sums_by_mma:
        yield "V_ROWS", "of a stage of V^T, and of ones", "HEAD_DIM_V + ATOM_ROWS"
        yield "V_SWIZZLE", "bytes of a row of V^T in a swizzle atom", "math.gcd(128, TILE_KV)"
    elif traits.transposes_v or traits.part_overlays_s:
        yield "V_ROWS", "of a stage of V^T", "HEAD_DIM_V"
        yield "V_SWIZZLE", "bytes of a row of V^T in a swizzle atom", "math.gcd(128, TILE_KV)"
    if traits.transposes_v:
        yield "ROWS_SWIZZLE", "bytes of a row of V in an atom", "math.gcd(128, HEAD_DIM_V)"
    slices = pv_slices(traits.spec, traits.sizes.tile_kv)
    if slices > 1:
        yield "PV_SLICES", "of PV's columns, one after the other", str(slices)
    if traits.part_overlays_s:
        yield "PV_COLUMNS", "of a slice but the last", "TILE_KV"
        yield "LAST_COLUMNS", "of the last slice", "V_ROWS - (PV_SLICES - 1) * PV_COLUMNS"
        yield (
            "PART_REGISTERS",
            "of a thread: of S, then of a slice of PV",
            "max(PV_COLUMNS, LAST_COLUMNS) // ROWS_PER_THREAD",
        )
    elif slices > 1:
        columns = "V_ROWS" if traits.sums_by_mma else "HEAD_DIM_V"
        yield "PV_COLUMNS", "of a slice", f"{columns} // PV_SLICES"
    warps = "WARPGROUP_WARPS * WARPGROUPS"
    yield "Q_RELEASES", frees, "WARPGROUPS" if traits.cross_tile else warps
    for name, shared in (("K", traits.multicast_k), ("V", traits.multicast_v)):
        ctas = " * CLUSTER_SIZE" if shared else ""
        yield f"{name}_RELEASES", frees, f"{warps}{ctas}"
    if traits.spec.v_layout == "permuted" and traits.seqlen_kv is not None:
        up = "-(-SEQLEN_KV // KEY_GROUP) * KEY_GROUP"
        yield "SEQLEN_V", "keys of V^T", up
    if has_block_factors(traits.spec):
        for side, fixed in (("Q", traits.seqlen_q), ("KV", traits.seqlen_kv)):
            if fixed is not None:
                up = f"-(-SEQLEN_{side} // DESCALE_ROWS)"
                yield f"BLOCKS_{side}", f"blocks of factors along seqlen_{side.lower()}", up
    if traits.bias:
        yield "BIAS_RELEASES", frees, "WARPGROUP_WARPS"
        yield "BIAS_STAGES", "one for each warpgroup", "WARPGROUPS"
        yield from of_bias(traits, "WARPGROUP_ROWS")
    along_q = traits.spec.cluster[0] > 1
    tile = "(TILE_Q * CLUSTER_SIZE)" if along_q else "TILE_Q"
    if traits.packed:
        tile = "TILE_POSITIONS"
        yield tile, "query positions per CTA", "TILE_Q // Q_PER_KV"
    if traits.packed and along_q:
        tile = "CLUSTER_POSITIONS"
        yield tile, "query positions per cluster", "TILE_POSITIONS * CLUSTER_SIZE"
    if traits.page is not None:
        keys, part = "keys of a box, in one page", ""
        if traits.transposes_v:  # a shorter unit, for the formula is longer: one line
            keys, part = "keys, in one page", " // TRANSPOSE_WARPS"
        yield "BOX_ROWS", keys, f"math.gcd(PAGE, TILE_KV{part})"
        yield "BOXES", "per stage", "TILE_KV // BOX_ROWS"
    loaders = "1" if traits.page is None else "2"
    if traits.transposes_v:
        loaders = "1 + TRANSPOSE_WARPS"
    if traits.transposes_v and traits.page is not None:
        yield "V_BOXES", "per stage and warp", "BOXES // TRANSPOSE_WARPS"
    if traits.split_k:
        loaders = "K_WARPS + 1"
        yield "K_WARPS", "that load K", str(K_WARPS)
        yield "K_BOXES", "per stage and warp", "BOXES // K_WARPS"
    if is_packed(traits.spec):
        of_warps = "warps" if traits.transposes_v else frees  # so short as well
        yield "TILE_RELEASES", of_warps, f"{warps} + {loaders}"
    if traits.seqlen_q is not None:
        head = traits.tiled_head
        unit = f"clusters along a {head}" if along_q else f"per {head}"
        yield "Q_TILES", unit, f"-(-SEQLEN_Q // {tile})"
    if not traits.dynamic_blocks:
        yield "KV_BLOCKS", "per query tile", "-(-SEQLEN_KV // TILE_KV)"


def _constants(spec: Spec) -> dict[str, int]:
    """The numbers of the architecture that formulas read, for the SPEC's element type."""
    own = {"ELEMENT_BYTES": BYTES[spec.dtype], "DESCALE_ROWS": DESCALE_ROWS}
    return {**sm90.CONSTANTS, **own}


def _by_warpgroups(traits: Traits, role: str) -> str:
    """The register split of a role as a formula over WARPGROUPS."""
    splits = register_splits(traits.spec, traits.sizes.tile_kv)
    choices = tuple(getattr(split, role) for split in splits.values())
    return f"{choices}[WARPGROUPS - {min(splits)}]"


def _barriers(traits: Traits) -> Iterator[Barrier]:
    sizes = traits.sizes
    warpgroups = sizes.tile_q // sm90.WARPGROUP_ROWS
    warps = warpgroups
    freed = "a warp of each warpgroup, once O has left the stage"
    if not traits.cross_tile:
        warps, freed = 4 * warpgroups, "every consumer warp, after its last QK"
    yield Barrier("q_full", sizes.q_stages, 1, "1 + Q_TX_BYTES by TMA", "consumers")
    yield Barrier("q_empty", sizes.q_stages, warps, f"{warps}: {freed}", "producer")
    for name, shared in (("k", traits.multicast_k), ("v", traits.multicast_v)):
        ctas = traits.cluster_size if shared else 1
        by_tma = f"by TMA of {ctas} CTAs, a slice each" if shared else "by TMA"
        warps = 4 * warpgroups * ctas
        freed = f"{warps}: every consumer warp" + (f" of {ctas} CTAs" if shared else "")
        full = f"1 + {name.upper()}_TX_BYTES {by_tma}"
        stages = sizes.k_stages if name == "k" else sizes.v_stages
        arrivals = K_WARPS if name == "k" and traits.split_k else 1
        if arrivals > 1:
            full = f"{arrivals} + K_TX_BYTES by TMA of {arrivals} warps"
        by = "producer"
        if name == "v" and traits.transposes_v:
            arrivals, by = TRANSPOSE_WARPS, "transposing warps"
            loaders = 1 if traits.page is None else arrivals
            if loaders > 1:
                full = f"{loaders} + V_TX_BYTES by TMA of {loaders} warps"
            yield Barrier("rows_full", ROWS_STAGES, loaders, full, by)
            freed_rows = f"{arrivals}: every transposing warp"
            filled_by = "producer" if traits.page is None else by
            yield Barrier("rows_empty", ROWS_STAGES, arrivals, freed_rows, filled_by)
            full = freed_rows
        yield Barrier(f"{name}_full", stages, arrivals, full, "consumers")
        yield Barrier(f"{name}_empty", stages, warps, freed, by)
    if traits.bias:
        full = "1 + BIAS_TX_BYTES by TMA"
        yield Barrier("bias_full", warpgroups, 1, full, "the warpgroup")
        freed = "4: every warp of the warpgroup"
        yield Barrier("bias_empty", warpgroups, 4, freed, "producer")
    if is_packed(traits.spec):
        releases = 4 * warpgroups + traits.loaders
        who = "loads, transposes" if traits.transposes_v else "loads"
        freed = f"{releases}: every warp that {who} or computes"
        full = "1: the scheduler"
        yield Barrier("tile_full", TILE_STAGES, 1, full, "loaders, consumers")
        yield Barrier("tile_empty", TILE_STAGES, releases, freed, "scheduler")
    if traits.takes_turns:
        turn = "256 threads: a warpgroup and the one before it"
        yield Barrier("order", warpgroups, 256, turn, "the warpgroup")
    if traits.cross_tile:
        threads = "128 threads: a warpgroup"
        yield Barrier("store", warpgroups, 128, threads, "its first warp")
