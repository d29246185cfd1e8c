# SPDX-License-Identifier: Apache-2.0
"""The plan of an sm100 kernel: tiles, the ring, tensor memory, registers, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from ..arch import sm100
from ..errors import Diagnostic, SpecError
from ..spec import Spec, SpecFile
from .kernel_plan import (
    ELEMENT_BYTES,
    Barrier,
    Columns,
    KernelPlan,
    Number,
    Region,
    Registers,
    too_much_smem,
    total,
)
from .sm100_context import Sizes, Traits, template_context
from .sm100_protocol import loads, phases
from .sm100_words import statements

TILE_Q: Final = 2 * sm100.MMA_ROWS
TILE_KV: Final = 128
# Stages of (K and V, O), tried in this order: with one for O, its halves take turns, which a third
# tile of K or V is worth.
STAGES: Final = ((6, 2), (5, 2), (4, 2), (3, 2), (4, 1), (3, 1), (2, 2), (2, 1))
SMS_PER_HEAD: Final = 4
POLYNOMIAL_COLUMNS: Final = 2
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
    "SMS_PER_HEAD": "K and V of the heads that run at a time then stay in L2",
    "POLYNOMIAL_COLUMNS": "an eighth of the exponentials beside the MUFU: no GPU was asked",
    "SOFTMAX_REGS": "S of a row and what its exponentials need, without a spill",
    "CORRECTION_REGS": "a part of a row of O, without a spill",
}


def resolve(spec_file: SpecFile) -> KernelPlan:
    """Plan a kernel, or raise SpecError (FG401, FG402, FG405, FG406) with what does not fit."""
    spec = spec_file.spec
    sizes = _choose(spec_file)
    traits = Traits(spec, sizes)
    chosen = tuple(_chosen(traits))
    derived = tuple(_derived(traits))
    smem = _smem(spec, sizes)
    context = template_context(spec_file, sizes, chosen, derived, total(smem))
    return KernelPlan(
        spec_file=spec_file,
        architecture=sm100.ARCHITECTURE,
        chosen=chosen,
        derived=derived,
        smem=smem,
        tmem=tuple(_tmem(spec, sizes)),
        barriers=tuple(_barriers(traits)),
        phases=phases(traits, _registers(sizes)),
        loads=tuple(loads(traits)),
        registers=_registers(sizes),
        register_parts=_register_parts(sizes.tile_kv),
        statements=tuple(statements(context)),
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
        if total(_smem(spec, choice)) <= sm100.SMEM_BYTES:
            return choice
    regions = _smem(spec, choices[-1])
    raise too_much_smem(spec_file, sm100.ARCHITECTURE, regions, ("stages", "kv"))


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
        place = spec_file.locate("tile", "kv")
        raise SpecError([Diagnostic(place, "FG406", message, hint)])
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
        place = spec_file.locate("tile", field)
        raise SpecError([Diagnostic(place, "FG405", message, hint)])


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


def _smem(spec: Spec, sizes: Sizes) -> tuple[Region, ...]:
    qk, v, halves = spec.head_dim.qk, spec.head_dim.v, sizes.halves
    stages = 2 * halves + 3 * sizes.s_stages + sizes.kv_stages + sizes.o_stages
    barriers = 2 * sm100.MBARRIER_BYTES * stages
    address, stats = 4, 4 * sm100.MMA_ROWS * sizes.s_stages
    shared = " // CLUSTER_SIZE" if spec.cta_group > 1 else ""
    s_stages = "HALVES" if halves > 1 else "S_STAGES"
    return (
        Region(
            "barriers",
            barriers,
            f"2 * 8 * (2 * HALVES + 3 * {s_stages} + KV_STAGES + O_STAGES)",
        ),
        Region("address", address, "4"),
        Region("stats", stats, f"4 * 128 * {s_stages}"),
        Region(
            "padding",
            -(barriers + address + stats) % sm100.SMEM_ALIGN,
            "to a multiple of SMEM_ALIGN",
        ),
        Region(
            "sQ",
            sizes.tile_q * qk * ELEMENT_BYTES,
            f"Q_TX_BYTES{shared} * Q_STAGES",
            halves,
            "Q",
        ),
        Region(
            "sKV",
            sizes.tile_kv * qk * ELEMENT_BYTES // spec.cta_group * sizes.kv_stages,
            f"K_TX_BYTES{shared} * KV_STAGES",
            sizes.kv_stages,
            "K or V",
        ),
        Region(
            "sO",
            sm100.MMA_ROWS * v * ELEMENT_BYTES * sizes.o_stages,
            "2 * 128 * HEAD_DIM_V * O_STAGES",
            sizes.o_stages,
            "O",
        ),
    )


def _tmem(spec: Spec, sizes: Sizes) -> Iterator[Columns]:
    kv, v, halves = sizes.tile_kv, spec.head_dim.v, sizes.halves
    of = "half" if halves > 1 else "stage"
    for stage in range(sizes.s_stages):
        first = f"{stage} * S_COLUMNS"
        yield Columns(f"S of {of} {stage}", stage * kv, kv, f"from {first} on")
        yield Columns(f"P of {of} {stage}", stage * kv, kv // 2, "where its S was")
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
    place = spec_file.locate("tile", "kv")
    return SpecError([Diagnostic(place, "FG402", message, "a smaller tile.kv")])


def _chosen(traits: Traits) -> Iterator[Number]:
    spec, sizes = traits.spec, traits.sizes
    yield Number("HEAD_DIM_QK", spec.head_dim.qk, "elements", "given")
    yield Number("HEAD_DIM_V", spec.head_dim.v, "elements", "given")
    if traits.seqlen_q is not None:
        yield Number("SEQLEN_Q", traits.seqlen_q, "rows", "given")
    if traits.seqlen_kv is not None:
        yield Number("SEQLEN_KV", traits.seqlen_kv, "rows", "given")
    yield from traits.window_numbers()
    if spec.heads.q_per_kv > 1:
        yield Number(
            "Q_PER_KV", spec.heads.q_per_kv, "query heads per KV head", "given"
        )
    if traits.cluster_size > 1:
        what = "CTAs: query tiles of one head"
        yield Number("CLUSTER_SIZE", traits.cluster_size, what, "given")
    for name, value, unit, given in (
        ("TILE_Q", sizes.tile_q, "rows per CTA", spec.tile.q),
        ("TILE_KV", sizes.tile_kv, "rows per stage", spec.tile.kv),
        ("KV_STAGES", sizes.kv_stages, "tiles of K or V", spec.stages.kv),
        ("O_STAGES", sizes.o_stages, "tiles" if traits.by_block else "halves", None),
    ):
        origin = "given" if given else "planned"
        yield Number(name, value, unit, origin, reason="" if given else REASONS[name])
    softmax, correction, _ = _registers(sizes)
    planned = [
        ("POLYNOMIAL_COLUMNS", POLYNOMIAL_COLUMNS, "of EX2_GROUP: exp2 by FFMA2"),
        ("SOFTMAX_REGS", softmax.per_thread, "per thread"),
        ("CORRECTION_REGS", correction.per_thread, "per thread"),
    ]
    if traits.lpt_order:
        unit = "SMs that work on a head at a time"
        planned.insert(0, ("SMS_PER_HEAD", SMS_PER_HEAD, unit))
    for name, value, unit in planned:
        yield Number(name, value, unit, "planned", reason=REASONS[name])


def _derived(traits: Traits) -> Iterator[Number]:
    spec, sizes = traits.spec, traits.sizes
    qk, v, kv, halves = spec.head_dim.qk, spec.head_dim.v, sizes.tile_kv, sizes.halves
    *_, others = _registers(sizes)
    first = 4 * halves
    ctas = spec.cta_group
    whose = " of both CTAs" if traits.pair else ""
    mma_rows = "MMA_ROWS" if traits.pair else "128"
    parts = "tiles" if traits.by_block else "halves"
    s_stages = "S_STAGES" if traits.by_block else "HALVES"
    per_stage, commits = f"bytes per stage{whose}", "commits that free a stage"
    columns = "columns of tensor memory"
    rows = [
        ("HALVES", halves, "of a query tile", "TILE_Q // 128"),
        (
            "OTHER_REGS",
            others.per_thread,
            "per thread",
            f"{_registers_at_launch(sizes)} - HALVES * SOFTMAX_REGS - CORRECTION_REGS",
        ),
        ("CORRECTION_WARP", first, "the first of four", "4 * HALVES"),
        ("LOAD_WARP", first + 4, "warp", "CORRECTION_WARP + 4"),
        ("MMA_WARP", first + 5, "warp", "CORRECTION_WARP + 5"),
        ("STORE_WARP", first + 6, "warp", "CORRECTION_WARP + 6"),
        (
            "THREADS",
            128 * (halves + _WARPGROUPS_BESIDE_SOFTMAX),
            "per CTA",
            "128 * (HALVES + 2)",
        ),
        ("Q_STAGES", halves, parts, "HALVES"),
        ("S_STAGES", sizes.s_stages, "blocks", "2"),
        ("MMA_ROWS", 128 * ctas, "of both CTAs", "128 * CLUSTER_SIZE"),
        ("Q_TX_BYTES", 128 * ctas * qk * 2, per_stage, f"{mma_rows} * HEAD_DIM_QK * 2"),
        ("K_TX_BYTES", kv * qk * 2, per_stage, "TILE_KV * HEAD_DIM_QK * 2"),
        ("V_TX_BYTES", kv * v * 2, per_stage, "TILE_KV * HEAD_DIM_V * 2"),
        ("KV_RELEASES", traits.cluster_size, commits, "CLUSTER_SIZE"),
        (
            "S_RELEASES",
            (128 if traits.by_block else 256) * ctas,
            f"threads{whose}: softmax{'' if traits.by_block else ' and correction'}",
            mma_rows if traits.by_block else f"2 * {mma_rows}",
        ),
        ("O_RELEASES", 128 * ctas, f"threads{whose}: correction", mma_rows),
        (
            "TAIL_COLUMNS",
            max(kv // 4, sm100.LOAD_COLUMNS),
            "of P, the last: PV begins without them",
            "max(TILE_KV // 4, 32)",
        ),
        ("S_COLUMNS", kv, columns, "TILE_KV"),
        ("O_COLUMNS", v, columns, "HEAD_DIM_V"),
        ("O_FIRST", sizes.s_stages * kv, columns, f"{s_stages} * S_COLUMNS"),
        (
            "TMEM_COLUMNS",
            _power_of_two(sizes.s_stages * kv + halves * v),
            "",  # or its line would be too long
            "2 ** math.ceil(math.log2(O_FIRST + HALVES * O_COLUMNS))",
        ),
    ]
    absent = set() if traits.uneven else {"V_TX_BYTES"}
    absent |= set() if traits.multicast_k else {"KV_RELEASES"}
    absent |= set() if traits.pair else {"MMA_ROWS", "O_RELEASES"}
    absent |= set() if traits.by_block else {"S_STAGES"}
    rows = [row for row in rows if row[0] not in absent]
    cluster_rows = sizes.tile_q * traits.cluster_size
    if traits.cluster_size > 1:
        unit = "rows per cluster"
        rows.append(("CLUSTER_ROWS", cluster_rows, unit, "TILE_Q * CLUSTER_SIZE"))
    if traits.seqlen_q is not None:
        tiles = -(-traits.seqlen_q // cluster_rows)
        unit = "clusters along a head" if traits.cluster_size > 1 else "per head"
        of_cluster = "CLUSTER_ROWS" if traits.cluster_size > 1 else "TILE_Q"
        formula = f"-(-SEQLEN_Q // {of_cluster})"
        rows.append(("Q_TILES", tiles, unit, formula))
    if traits.seqlen_kv is not None and not traits.edges:
        blocks = -(-traits.seqlen_kv // kv)
        rows.append(("KV_BLOCKS", blocks, "per query tile", "-(-SEQLEN_KV // TILE_KV)"))
        if traits.masks:
            masked, formula = blocks - traits.seqlen_kv // kv, "SEQLEN_KV // TILE_KV"
            unit = "that the end of K crosses"
            rows.append(("MASKED_BLOCKS", masked, unit, f"KV_BLOCKS - {formula}"))
    for name, value, unit, formula in rows:
        yield Number(name, value, unit, "derived", formula)


def _power_of_two(columns: int) -> int:
    """The least that can be allocated and has so many columns."""
    size = sm100.TMEM_LEAST
    while size < columns:
        size *= 2
    return size


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
