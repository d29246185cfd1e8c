# SPDX-License-Identifier: Apache-2.0
"""The plan of an sm100 kernel: tiles, the ring, tensor memory, registers, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from ..arch import sm100
from ..errors import SpecError
from ..features.varlen import is_packed
from ..ops.operation import BYTES
from ..spec.model import Spec, SpecFile
from .kernel_plan import (
    Barrier,
    Columns,
    DevicePlan,
    KernelPlan,
    Number,
    Region,
    Registers,
    too_much_smem,
    total,
)
from .numbers import derived, given, of_bias, of_scores, regions, tuned
from .sm100_context import Sizes, Traits, template_context
from .sm100_protocol import loads, phases
from .sm100_words import statements

TILE_Q: Final = 2 * sm100.MMA_ROWS
TILE_KV: Final = 128
# Stages of (K and V, O), tried in this order: with one for O, its halves take turns, which a third
# tile of K or V is worth.
STAGES: Final = ((6, 2), (5, 2), (4, 2), (3, 2), (4, 1), (3, 1), (2, 2), (2, 1))
SMS_PER_HEAD: Final = 4
TILE_STAGES: Final = 2
POLYNOMIAL_COLUMNS: Final = 2
POLYNOMIAL_COLUMNS_CAPPED: Final = (
    12  # 16 have more instructions than the MUFU has time
)
SOFTMAX_REGS: Final = {2: 192, 1: 256}  # by halves of a query tile
# By these and stages of O.
CORRECTION_REGS: Final = {(2, 2): 88, (2, 1): 96, (1, 1): 160}
_WARPGROUPS_BESIDE_SOFTMAX: Final = 2  # correction; load, mma, store and an idle warp

# Why a number is what it is when the spec leaves it out.
REASONS: Final[Mapping[str, str]] = {
    "TILE_Q": "two halves where S and O fit: softmax of one runs beside the MMAs of the other",
    "TILE_KV": "as many columns of S as a softmax thread has registers for",
    "KV_STAGES": "as many as fit beside O, at most 6",
    "O_STAGES": "one for each half where three tiles of K or V fit beside them, else one",
    "LEVEL_TILES": "they run at a time, so that K and V of a head come from L2",
    "TILE_STAGES": "the next work tile is found while this one is computed",
    "SMS_PER_HEAD": "K and V of the heads that run at a time then stay in L2",
    "POLYNOMIAL_COLUMNS": "an eighth of the exponentials beside the MUFU: no GPU was asked",
    "SOFTMAX_REGS": "S of a row and what its exponentials need, without a spill",
    "CORRECTION_REGS": "a part of a row of O, without a spill",
}
CAPPED_REASONS: Final[Mapping[str, str]] = {
    "POLYNOMIAL_COLUMNS": "three quarters of the exponentials beside the MUFU, which the"
    " tangents take as long: no GPU was asked",
}


def resolve(spec_file: SpecFile) -> KernelPlan:
    """Plan a kernel, or raise SpecError (FG401, FG402, FG405, FG406) with what does not fit."""
    spec = spec_file.spec
    sizes = _choose(spec_file)
    traits = Traits(spec, sizes)
    chosen = tuple(_chosen(traits))
    numbers = tuple(derived(_derived(traits), chosen, _constants(spec)))
    smem = _smem(traits)
    context = template_context(spec_file, sizes, chosen, numbers, total(smem))
    kernel = DevicePlan(
        smem=smem,
        tmem=tuple(_tmem(spec, sizes)),
        barriers=tuple(_barriers(traits)),
        phases=phases(traits, _registers(sizes)),
        loads=tuple(loads(traits)),
        registers=_registers(sizes),
        register_parts=_register_parts(sizes.tile_kv),
    )
    return KernelPlan(
        spec_file=spec_file,
        architecture=sm100.ARCHITECTURE,
        chosen=chosen,
        derived=numbers,
        kernels=(kernel,),
        statements=tuple(statements(traits, context)),
        context=context,
    )


def _choose(spec_file: SpecFile) -> Sizes:
    """Tile and ring: as given, the rest planned; what does not fit is refused."""
    spec = spec_file.spec
    sizes = Sizes(
        spec.tile.q or _planned_tile_q(spec), spec.tile.kv or TILE_KV, *STAGES[-1]
    )
    _check_columns(spec_file, sizes)
    if sum(_register_parts(sizes.tile_kv).values()) > SOFTMAX_REGS[sizes.halves]:
        raise _too_many_registers(spec_file, sizes)
    choices = [
        replace(sizes, kv_stages=spec.stages.kv or kv, o_stages=o)
        for kv, o in STAGES
        if o <= sizes.halves
    ]
    for choice in choices:
        if total(_smem(Traits(spec, choice))) <= sm100.SMEM_BYTES:
            return choice
    smem = _smem(Traits(spec, choices[-1]))
    raise too_much_smem(spec_file, sm100.ARCHITECTURE, smem, ("stages", "kv"))


def _planned_tile_q(spec: Spec) -> int:
    """Both halves of a tile, unless their S and O do not fit."""
    fits = 2 * (TILE_KV + spec.head_dim.v) <= sm100.TMEM_COLUMNS
    return TILE_Q if fits else sm100.MMA_ROWS


def _check_columns(spec_file: SpecFile, sizes: Sizes) -> None:
    """S, P and O in tensor memory: whole loads of columns, and no more than there are."""
    spec = spec_file.spec
    kv, v, step = sizes.tile_kv, spec.head_dim.v, sm100.LOAD_COLUMNS
    if kv % step:
        message = (
            f"tile.kv: {kv} makes S of {kv} columns, but tensor memory is loaded {step} columns"
            f" at a time: {kv} % {step} = {kv % step}"
        )
        hint = f"set tile: {{kv: {kv - kv % step or step}}}, or leave it out"
        raise spec_file.refusal("FG406", ("tile", "kv"), message, hint)
    needed = sizes.s_stages * kv + sizes.halves * v
    if needed > sm100.TMEM_COLUMNS:
        message = (
            f"tensor memory needs {needed} columns, sm100 has {sm100.TMEM_COLUMNS}:"
            f" S {sizes.s_stages} * {kv} + O {sizes.halves} * {v}"
        )
        some_kv_fits = sizes.s_stages * step + sizes.halves * v <= sm100.TMEM_COLUMNS
        field, hint = (
            ("kv", "a smaller tile.kv") if some_kv_fits else ("q", "leave tile.q out")
        )
        raise spec_file.refusal("FG405", ("tile", field), message, hint)


def _register_parts(tile_kv: int) -> dict[str, int]:
    """Registers of a softmax thread: a row of S in fp32, of which P is made, and the rest."""
    return {"S": tile_kv, "others": sm100.REGISTERS_BESIDE_S}


def _registers(sizes: Sizes) -> tuple[Registers, ...]:
    softmax = SOFTMAX_REGS[sizes.halves]
    correction = CORRECTION_REGS[sizes.halves, sizes.o_stages]
    others = _registers_at_launch(sizes) - sizes.halves * softmax - correction
    return (
        Registers("softmax", sizes.halves, softmax),
        Registers("correction", 1, correction),
        Registers("load, mma and store", 1, others),
    )


def _registers_at_launch(sizes: Sizes) -> int:
    """Of a thread of each warpgroup, added up: what setmaxnreg deals out again."""
    warpgroups = sizes.halves + _WARPGROUPS_BESIDE_SOFTMAX
    per_thread = sm100.REGISTERS // (sm100.MMA_ROWS * warpgroups)
    return per_thread // 8 * 8 * warpgroups


def _smem(traits: Traits) -> tuple[Region, ...]:
    sizes, chosen = traits.sizes, tuple(_chosen(traits))
    shared = " // CLUSTER_SIZE" if traits.pair else ""
    s_stages = "S_STAGES" if traits.by_block else "HALVES"
    stages = f"2 * HALVES + 3 * {s_stages} + KV_STAGES + O_STAGES"
    stages += " + BIAS_STAGES" if traits.bias else ""
    packed = is_packed(traits.spec)
    stages += " + TILE_STAGES" if packed else ""
    kv, o = sizes.kv_stages, sizes.o_stages
    rows = [
        ("barriers", f"2 * 8 * ({stages})", 1, ""),
        *([("sTiles", "4 * 6 * TILE_STAGES", 1, "")] if packed else []),
        ("address", "4", 1, ""),
        ("stats", f"4 * 128 * {s_stages}", 1, ""),
        ("sQ", f"Q_TX_BYTES{shared} * Q_STAGES", sizes.halves, "Q"),
        ("sKV", f"K_TX_BYTES{shared} * KV_STAGES", kv, "K or V"),
        ("sO", "2 * 128 * HEAD_DIM_V * O_STAGES", o, "O"),
    ]
    if traits.bias:
        of_stage = "BIAS_TX_BYTES" if traits.bias_of_rows else "BIAS_PITCH * BIAS_BYTES"
        formula = f"{of_stage} * BIAS_STAGES"
        rows.append(("sBias", formula, sizes.halves, "the bias"))
    numbers = (*chosen, *derived(_derived(traits), chosen, _constants(traits.spec)))
    return regions(rows, numbers, sm100.SMEM_ALIGN)


def _constants(spec: Spec) -> dict[str, int]:
    """The numbers of the architecture that formulas read, for the SPEC's element type."""
    return {**sm100.CONSTANTS, "ELEMENT_BYTES": BYTES[spec.dtype]}


def _tmem(spec: Spec, sizes: Sizes) -> Iterator[Columns]:
    kv, v, halves = sizes.tile_kv, spec.head_dim.v, sizes.halves
    of = "half" if halves > 1 else "stage"
    for stage in range(sizes.s_stages):
        first = f"{stage} * S_COLUMNS"
        yield Columns(f"S of {of} {stage}", stage * kv, kv, f"from {first} on")
        of_p = kv * BYTES[spec.dtype] // 4
        yield Columns(f"P of {of} {stage}", stage * kv, of_p, "where its S was")
    for half in range(halves):
        first = f"O_FIRST + {half} * O_COLUMNS"
        yield Columns(
            f"O of half {half}" if halves > 1 else "O",
            sizes.s_stages * kv + half * v,
            v,
            f"from {first} on",
        )


def _too_many_registers(spec_file: SpecFile, sizes: Sizes) -> SpecError:
    parts = _register_parts(sizes.tile_kv)
    message = (
        f"a softmax thread needs about {sum(parts.values())} registers, sm100 leaves"
        f" {SOFTMAX_REGS[sizes.halves]}: {' + '.join(f'{name} {n}' for name, n in parts.items())}"
    )
    return spec_file.refusal("FG402", ("tile", "kv"), message, "a smaller tile.kv")


def _chosen(traits: Traits) -> Iterator[Number]:
    spec, sizes = traits.spec, traits.sizes
    yield from given(traits)
    softmax, correction, _ = _registers(sizes)
    packed = is_packed(spec)
    level = max(SMS_PER_HEAD // spec.heads.q_per_kv, 1)
    columns, reasons = POLYNOMIAL_COLUMNS, {**REASONS}
    if traits.softcap is not None:
        columns, reasons = POLYNOMIAL_COLUMNS_CAPPED, {**REASONS, **CAPPED_REASONS}
    rows = [
        ("TILE_Q", sizes.tile_q, "rows per CTA", "tile.q"),
        ("TILE_KV", sizes.tile_kv, "rows per stage", "tile.kv"),
        ("KV_STAGES", sizes.kv_stages, "tiles of K or V", "stages.kv"),
        ("O_STAGES", sizes.o_stages, "tiles" if traits.by_block else "halves", ""),
        (
            ("LEVEL_TILES", level, "query tiles of a head in a row", "")
            if packed
            else ("SMS_PER_HEAD", SMS_PER_HEAD, "SMs that work on a head at a time", "")
        ),
        *([("TILE_STAGES", TILE_STAGES, "work tiles", "")] if packed else []),
        ("POLYNOMIAL_COLUMNS", columns, "of EX2_GROUP: exp2 by FFMA2", ""),
        ("SOFTMAX_REGS", softmax.per_thread, "per thread", ""),
        ("CORRECTION_REGS", correction.per_thread, "per thread", ""),
    ]
    absent = () if traits.uneven_tiles else ("SMS_PER_HEAD", "LEVEL_TILES")
    rows = [row for row in rows if row[0] not in absent]
    yield from tuned(spec, rows, reasons.__getitem__)


def _derived(traits: Traits) -> Iterator[tuple[str, str, str]]:
    """Yield (name, unit, formula)."""
    yield from of_scores(traits)
    sizes, by_block = traits.sizes, traits.by_block
    clusters = traits.cluster_size > 1
    whose = " of both CTAs" if traits.pair else ""
    mma_rows = "MMA_ROWS" if traits.pair else "HALF_ROWS"
    s_stages = "S_STAGES" if by_block else "HALVES"
    per_stage = "bytes of both CTAs" if traits.pair else "bytes per stage"
    columns = "columns of tensor memory"
    yield "HALVES", "of a query tile", "TILE_Q // HALF_ROWS"
    registers = _registers_at_launch(sizes)
    formula = f"{registers} - HALVES * SOFTMAX_REGS - CORRECTION_REGS"
    yield "OTHER_REGS", "per thread", formula
    yield "CORRECTION_WARP", "the first of four", "WARPGROUP_WARPS * HALVES"
    yield "LOAD_WARP", "warp", "CORRECTION_WARP + WARPGROUP_WARPS"
    yield "MMA_WARP", "warp", "LOAD_WARP + 1"
    yield "STORE_WARP", "warp", "LOAD_WARP + 2"
    if traits.page is not None:
        yield "LOAD_V_WARP", "warp", "LOAD_WARP + 3"
    yield "THREADS", "per CTA", "WARPGROUP_THREADS * (HALVES + 2)"
    yield "Q_STAGES", "tiles" if by_block else "halves", "HALVES"
    if by_block:
        yield "S_STAGES", "blocks", f"{sizes.s_stages}"
    if traits.pair:
        yield "MMA_ROWS", "of both CTAs", "HALF_ROWS * CLUSTER_SIZE"
    yield "Q_TX_BYTES", per_stage, f"{mma_rows} * HEAD_DIM_QK * ELEMENT_BYTES"
    yield "K_TX_BYTES", per_stage, "TILE_KV * HEAD_DIM_QK * ELEMENT_BYTES"
    if traits.uneven:
        yield "V_TX_BYTES", per_stage, "TILE_KV * HEAD_DIM_V * ELEMENT_BYTES"
    if traits.page is not None:
        yield "BOX_ROWS", "keys of a box, in one page", "math.gcd(PAGE, TILE_KV)"
        yield "BOXES", "per stage", "TILE_KV // BOX_ROWS"
    if is_packed(traits.spec):
        others = 3 if traits.page is None else 4
        formula = f"WARPGROUP_WARPS * (HALVES + 1) + {others}"
        yield "TILE_RELEASES", "warps that free it", formula
    if traits.multicast_k:
        yield "KV_RELEASES", "commits that free a stage", "CLUSTER_SIZE"
    threads = f"threads{whose}: "
    if by_block:
        yield "S_RELEASES", f"{threads}softmax", mma_rows
    else:
        yield "S_RELEASES", f"{threads}softmax and correction", f"2 * {mma_rows}"
    if traits.pair:
        yield "O_RELEASES", f"{threads}correction", mma_rows
    if traits.bias:
        yield "BIAS_RELEASES", "warps that free it", "WARPGROUP_WARPS"
        yield "BIAS_STAGES", "one for each half", "HALVES"
        yield from of_bias(traits, "HALF_ROWS")
        vector = "VECTOR_BITS // BYTE // BIAS_BYTES"
        yield "BIAS_VECTOR", "elements of a vector load", vector
    tail = "of P: PV begins without them"
    yield "TAIL_COLUMNS", tail, "max(TILE_KV // 4, COLUMNS_AT_ONCE)"
    yield "S_COLUMNS", columns, "TILE_KV"
    yield "O_COLUMNS", columns, "HEAD_DIM_V"
    yield "O_FIRST", columns, f"{s_stages} * S_COLUMNS"
    # With a unit its line would be too long.
    yield "TMEM_COLUMNS", "", "2 ** math.ceil(math.log2(O_FIRST + HALVES * O_COLUMNS))"
    if clusters:
        yield "CLUSTER_ROWS", "rows per cluster", "TILE_Q * CLUSTER_SIZE"
    if traits.seqlen_q is not None:
        unit = "clusters along a head" if clusters else "per head"
        tile = "CLUSTER_ROWS" if clusters else "TILE_Q"
        yield "Q_TILES", unit, f"-(-SEQLEN_Q // {tile})"
    if not traits.dynamic_blocks:
        yield "KV_BLOCKS", "per query tile", "-(-SEQLEN_KV // TILE_KV)"
        if traits.masks:
            unit = "that the end of K crosses"
            yield "MASKED_BLOCKS", unit, "KV_BLOCKS - SEQLEN_KV // TILE_KV"


def _barriers(traits: Traits) -> Iterator[Barrier]:
    sizes, halves = traits.sizes, traits.sizes.halves
    who = "softmax" if traits.by_block else "softmax of the half"
    last = "PV" if traits.by_block else "the last PV"
    kv_full, kv_empty, commits = "by TMA", "1: a commit", 1
    if not traits.by_block:
        kv_empty += ", after both halves"
    if traits.multicast_k:
        kv_full = f"by TMA of {traits.cluster_size} CTAs, a slice each"
        commits = traits.cluster_size
        kv_empty = f"{commits}: a commit of each CTA, after both halves"
    if traits.bias:
        full = "1 + BIAS_TX_BYTES by TMA"
        yield Barrier("bias_full", halves, 1, full, who)
        warps = "4: every warp of softmax"
        yield Barrier("bias_empty", halves, 4, warps, "load")
    if is_packed(traits.spec):
        takers = 4 * (halves + 1) + (3 if traits.page is None else 4)
        freed = f"{takers}: every warp"
        yield Barrier("tile_full", TILE_STAGES, 1, "1: the store warp", "every warp")
        yield Barrier("tile_empty", TILE_STAGES, takers, freed, "store")
    commit, threads = "1: a commit", "128"
    users = 32 * (4 * halves + 5)
    if traits.pair:
        kv_full, threads = "by TMA of 2 CTAs, half of it each", "256, of both CTAs"
    yield Barrier("q_full", halves, 1, "1 + Q_TX_BYTES by TMA", "mma")
    q_empty = f"{commit}, after QK of the last block"
    yield Barrier("q_empty", halves, 1, q_empty, "load")
    full, stages = f"1 + bytes of K or V {kv_full}", sizes.kv_stages
    yield Barrier("kv_full", stages, 1, full, "mma")
    yield Barrier("kv_empty", stages, commits, kv_empty, "load")
    s_empty = f"2 * {threads}: P but its tail (softmax), O rescaled (correction)"
    if traits.by_block:
        s_empty = f"{threads}: P but its tail (softmax)"
    arrivals = 128 * traits.spec.cta_group
    of_s = arrivals if traits.by_block else 2 * arrivals
    yield Barrier("s_full", sizes.s_stages, 1, f"{commit}, after QK", who)
    yield Barrier("s_empty", sizes.s_stages, of_s, s_empty, "mma")
    tail = f"{threads}: P (softmax)"
    yield Barrier("tail_full", sizes.s_stages, arrivals, tail, "mma")
    yield Barrier("stats_full", sizes.s_stages, 128, "128: softmax", "correction")
    yield Barrier("stats_empty", sizes.s_stages, 128, "128: correction", who)
    yield Barrier("o_full", halves, 1, f"{commit}, after {last}", "correction")
    yield Barrier("o_empty", halves, arrivals, f"{threads}: correction", "mma")
    yield Barrier("out_full", sizes.o_stages, 128, "128: correction", "store")
    out_empty = "32: the store warp"
    yield Barrier("out_empty", sizes.o_stages, 32, out_empty, "correction")
    yield Barrier(
        "tmem", 1, users, f"{users} threads: softmax, correction, mma", "all of them"
    )
