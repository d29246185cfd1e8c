# SPDX-License-Identifier: Apache-2.0
"""The plan of an sm100 backward kernel: rings, tensor memory, registers, and what does not fit.

S^T = K Q^T and dP^T = V dO^T of 128 keys, a lane of the tensor memory each, and 128 query rows. P^T
and dS^T take their places in 16 bits and are operands there. dV and dK stay in the tensor memory
until a tile ends; dQ of each block is loaded from it and added to sums in global memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..arch import sm100
from ..features.backward import tile_kv
from ..ops.operation import BYTES
from ..spec.model import Spec, SpecFile
from . import backward
from .backward import Sizes, Traits
from .kernel_plan import (
    WARPGROUP_THREADS,
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
from .numbers import derived, regions

TILE_Q: Final = 128  # columns of S^T: as many as P^T and dS^T have steps of an MMA for
WARPGROUPS: Final = 2  # that compute P and dS
# By head_dim: of the warps that compute, of those that add; under these ptxas spills none.
REGISTERS: Final = {64: (168, 112), 128: (152, 152)}
WARPS: Final = 4  # of a warpgroup
LAUNCH_REGISTERS: Final = 128  # of a thread: 65536 among the 512 of four warpgroups
STAT_STAGES: Final = 2
# Pipeline states, addresses, statistics: from what compiled unspilled.
REGISTERS_BESIDE: Final = 24
CONSTANTS: Final = {
    **sm100.CONSTANTS,
    **backward.CONSTANTS,
    **{"STAT_STAGES": STAT_STAGES, "WARP_THREADS": 32},
}

REASONS: Final[Mapping[str, str]] = {
    **backward.REASONS,
    "TILE_Q": "128: K and V are read for every block, so larger ones read them less often",
    "TILE_KV": "128: a lane of the tensor memory each",
    "SECTION_BYTES": "32 MiB of the 126 of L2: no GPU was asked",
    "MATH_REGS": "P of half a block's rows and what dS needs, without a spill",
    "ADD_REGS": "a row of dQ, without a spill",
}


def resolve(spec_file: SpecFile) -> KernelPlan:
    """Plan a kernel, or raise SpecError (FG401) with the numbers that do not fit."""
    spec = spec_file.spec
    traits = Traits(spec, _choose(spec_file))
    chosen = tuple(_chosen(traits))
    numbers = tuple(derived(_derived(traits), chosen, _constants(spec)))
    smem, barriers = _smem(traits), tuple(_barriers(traits))
    context = _context(spec_file, traits, chosen, numbers, total(smem))
    math, add = REGISTERS[spec.head_dim.qk]
    others = 4 * LAUNCH_REGISTERS - WARPGROUPS * math - add
    main = DevicePlan(
        smem=smem,
        tmem=tuple(_tmem(spec)),
        barriers=barriers,
        phases=(),
        loads=(),
        registers=(
            Registers("math", WARPGROUPS, math),
            Registers("add", 1, add),
            Registers("load, mma and scheduler", 1, others),
        ),
        register_parts={"dQ": spec.head_dim.qk, "others": REGISTERS_BESIDE},
        name="main",
    )
    architecture, statements = sm100.ARCHITECTURE, _statements(traits)
    return backward.plan_of(
        spec_file, architecture, main, chosen, numbers, statements, context
    )


def _choose(spec_file: SpecFile) -> Sizes:
    """Rings: as given, the rest planned; raises SpecError for what does not fit."""
    spec = spec_file.spec
    choices = list(backward.choices(spec, (TILE_Q, tile_kv(spec)), (2, 1)))
    for sizes in choices:
        if total(_smem(Traits(spec, sizes))) <= sm100.SMEM_BYTES:
            return sizes
    smem, field = _smem(Traits(spec, choices[-1])), backward.largest_given(spec)
    raise too_much_smem(spec_file, sm100.ARCHITECTURE, smem, field, "fewer stages")


def dq_over_dp(spec: Spec) -> bool:
    """dQ has no columns of its own: it takes those of dP, once dS has been read."""
    own = 2 * TILE_Q + spec.head_dim.v + 2 * spec.head_dim.qk
    return own > sm100.TMEM_COLUMNS


def _chosen(traits: Traits) -> Iterator[Number]:
    math, add = REGISTERS[traits.spec.head_dim.qk]
    registers = (
        ("MATH_REGS", math, "per thread", ""),
        ("ADD_REGS", add, "per thread", ""),
    )
    yield from backward.chosen(traits, registers, REASONS.__getitem__)
    yield from backward.sections(traits, REASONS["SECTION_BYTES"])


def _derived(traits: Traits) -> Iterator[tuple[str, str, str]]:
    """Yield (name, unit, formula)."""
    warp, columns = "warp", "columns of tensor memory"
    yield "WARPGROUPS", "that compute", str(WARPGROUPS)
    yield "MATH_WARPS", "that compute", "WARPGROUP_WARPS * WARPGROUPS"
    yield "MATH_THREADS", "that compute", "WARPGROUP_THREADS * WARPGROUPS"
    formula = f"{4 * LAUNCH_REGISTERS} - WARPGROUPS * MATH_REGS - ADD_REGS"
    yield "OTHER_REGS", "per thread", formula
    yield "ADD_WARP", "the first of four", "MATH_WARPS"
    yield "LOAD_WARP", warp, "ADD_WARP + WARPGROUP_WARPS"
    yield "MMA_WARP", warp, "LOAD_WARP + 1"
    yield "SCHEDULER_WARP", warp, "LOAD_WARP + 2"
    yield "THREADS", "per CTA", "WARPGROUP_THREADS * (WARPGROUPS + 2)"
    yield "STAT_BYTES", "of a block's rows, fp32", "4 * TILE_Q"
    yield "STATS_TX_BYTES", "bytes per stage", "2 * STAT_BYTES"
    yield from backward.tx_bytes(traits, with_statistics=False)
    releases = "MATH_WARPS + WARPGROUP_WARPS + 2"
    yield "TICKET_RELEASES", "warps: math, add, load, mma", releases
    yield "PART_COLUMNS", "query rows of a warpgroup", "TILE_Q // WARPGROUPS"
    yield "DP_FIRST", columns, "TILE_Q"
    yield "DV_FIRST", columns, "2 * TILE_Q"
    yield "DK_FIRST", columns, "DV_FIRST + HEAD_DIM_V"
    over = dq_over_dp(traits.spec)
    yield "DQ_FIRST", columns, "DP_FIRST" if over else "DK_FIRST + HEAD_DIM_QK"
    end = "DK_FIRST + HEAD_DIM_QK" if over else "DQ_FIRST + HEAD_DIM_QK"
    yield "TMEM_COLUMNS", "", f"2 ** math.ceil(math.log2({end}))"
    yield "TMEM_THREADS", "math, add, MMA warp", "WARP_THREADS * (LOAD_WARP + 1)"
    yield "DQ_ELEMENTS", "sums of a block", "TILE_Q * HEAD_DIM_QK"
    yield from backward.of_kernels_beside(traits)


def _constants(spec: Spec) -> dict[str, int]:
    return {**CONSTANTS, "ELEMENT_BYTES": BYTES[spec.dtype]}


def _smem(traits: Traits) -> tuple[Region, ...]:
    chosen = tuple(_chosen(traits))
    pairs = f"Q_STAGES + DO_STAGES + 2 * KV_STAGES + {STAT_STAGES} + 4"
    pairs += f" + {backward.TICKET_STAGES}"
    barriers, words = f"2 * 8 * ({pairs})", f"4 * {backward.TICKET_STAGES}"
    before, align = f"{barriers} + {words} + 4", backward.CONSTANTS["STAT_ALIGN"]
    rows = [
        ("barriers", barriers, 1, ""),
        ("sTickets", words, 1, ""),
        ("address", "4", 1, ""),
        ("padding", f"-({before}) % {align}", 1, ""),
        ("sStatS", f"4 * TILE_Q * {STAT_STAGES}", 1, ""),
        ("sStatD", f"4 * TILE_Q * {STAT_STAGES}", 1, ""),
        *backward.tiles(traits),
        ("sdS", "2 * TILE_KV * TILE_Q", 1, "dS; dV, then dK of a tile"),
    ]
    numbers = (*chosen, *derived(_derived(traits), chosen, _constants(traits.spec)))
    return regions(rows, numbers, sm100.SMEM_ALIGN)


def _tmem(spec: Spec) -> Iterator[Columns]:
    qk, v, of_16_bits = spec.head_dim.qk, spec.head_dim.v, TILE_Q // WARPGROUPS // 2
    for name, of, first in (("P", "S", 0), ("dS", "dP", TILE_Q)):
        begin = "DP_FIRST" if first else "0"
        yield Columns(f"{of}^T", first, TILE_Q, f"from {begin} on")
        for part in range(WARPGROUPS):
            place = first + part * (TILE_Q // WARPGROUPS)
            where = f"where its {of}^T was"
            yield Columns(f"{name}^T of part {part}", place, of_16_bits, where)
    yield Columns("dV", 2 * TILE_Q, v, "from DV_FIRST on")
    yield Columns("dK", 2 * TILE_Q + v, qk, "from DK_FIRST on")
    first = TILE_Q if dq_over_dp(spec) else 2 * TILE_Q + v + qk
    yield Columns("dQ", first, qk, "from DQ_FIRST on")


def _barriers(traits: Traits) -> Iterator[Barrier]:
    sizes, math = traits.sizes, WARPGROUP_THREADS * WARPGROUPS
    for name, stages, what, last in (
        ("q", sizes.q_stages, "Q", "dK of the block"),
        ("do", sizes.do_stages, "DO", "dV of the block"),
        ("k", sizes.kv_stages, "K", "dQ of the tile's last block"),
        ("v", sizes.kv_stages, "V", "dQ of the tile's last block"),
    ):
        full = f"1 + {what}_TX_BYTES by TMA"
        yield Barrier(f"{name}_full", stages, 1, full, "mma")
        freed = f"1: commit, after {last}"
        yield Barrier(f"{name}_empty", stages, 1, freed, "load")
    full, warps = "1 + STATS_TX_BYTES by bulk copies", WARPS * WARPGROUPS
    yield Barrier("stats_full", STAT_STAGES, 1, full, "math")
    freed = f"{warps}: every math warp, once its dS is stored"
    yield Barrier("stats_empty", STAT_STAGES, warps, freed, "load")
    for name, what, who, count, freed in (
        ("s", "S", "math", math, "math threads: P is stored"),
        ("dp", "dP", "math", math, "math threads: dS is stored"),
        ("dq", "dQ", "add", WARPGROUP_THREADS, "threads that add: dQ is in registers"),
    ):
        yield Barrier(f"{name}_full", 1, 1, f"1: commit, after {what}", who)
        yield Barrier(f"{name}_empty", 1, count, f"{count}: {freed}", "mma")
    yield Barrier("dkv_full", 1, 1, "1: commit, after a tile's last MMA", "math")
    takers = WARPS * (WARPGROUPS + 1) + 2
    yield from backward.barriers_of_tickets(takers, "math, add, load and mma warps")


def _context(
    spec_file: SpecFile,
    traits: Traits,
    chosen: Sequence[Number],
    numbers: Sequence[Number],
    smem_bytes: int,
) -> dict[str, Any]:
    """Every name that the templates of sm100 backward kernels read, but the digests."""
    sizes, spec = traits.sizes, spec_file.spec
    known = {each.name: each.value for each in numbers}
    add, load, mma, scheduler = (
        known[f"{role}_WARP"] for role in ("ADD", "LOAD", "MMA", "SCHEDULER")
    )
    statistic = backward.statistic_of(log2=True, scaled=False)
    where = "where dP was" if dq_over_dp(spec) else "columns of its own"
    roles = (
        *backward.kernel_lines(traits, statistic),
        "Roles: warps 0 to 7 turn S into P and dP into dS, a key per lane;"
        f" warps {add} to {add + WARPS - 1} add dQ;",
        f"warp {load} loads by TMA; warp {mma} owns the tensor memory and issues all MMAs;",
        f"warp {scheduler} draws tickets for tiles.",
        "Pipelines (what fills a stage; what frees it):",
        *_pipeline_lines(
            (
                "q, do",
                "load -> mma",
                "Q, dO of a block, TMA",
                "commit, after dK; after dV",
            ),
            ("k, v", "load -> mma", "K, V of a tile, TMA", "commit, after its last dQ"),
            ("stats", "load -> math", f"{statistic}, -D", "8 warps, once they have dS"),
            ("s", "mma -> math", "S^T, commit", "256 threads: P^T is in its place"),
            ("dp", "mma -> math", "dP^T, commit", "256 threads: dS^T is in its place"),
            ("dq", "mma -> add", "dQ, commit", "128 threads: it is in registers"),
            ("dkv", "mma -> math", "dV, dK of a tile, commit", "s: P of the next tile"),
        ),
        f"Shared memory: {smem_bytes} bytes per CTA, one CTA per SM. Tensor memory:"
        f" {known['TMEM_COLUMNS']} columns; dQ: {where}.",
    )
    return {
        **backward.context(spec_file, traits, chosen, numbers, roles),
        # The DSL finds the arch: an sm_103 GPU takes this file, but no code for sm_100a.
        "names_arch": False,
        "tensor_memory": True,
        "scheduler_warp": scheduler,
        "mma_warp": mma,
        "statistic": statistic,
        "log2_statistic": True,
        "dq_over_dp": dq_over_dp(spec),
        # Than at launch, when all threads have as many.
        "few_add_regs": REGISTERS[spec.head_dim.qk][1] < LAUNCH_REGISTERS,
        "dq_by_rows": False,
        **{"sums_behind_s": False, "scaled_sums": False},
        "tile_q": sizes.tile_q,
        "tile_kv": sizes.tile_kv,
    }


def _pipeline_lines(*rows: tuple[str, ...]) -> Iterator[str]:
    """The columns of (name, from whom to whom, what fills a stage, what frees it)."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def _statements(traits: Traits) -> Iterator[str]:
    if traits.softcap is None:
        of_s = (
            "P = exp(scale * QK^T - LSE), dS = P * (dP - D). -LSE of rows beyond the last one, and"
            " of rows without keys, is -inf."
        )
    else:
        of_s = (
            "P = exp(SOFTCAP * t - LSE) with t = tanh(scale * QK^T / SOFTCAP), dS = P * (1 - t^2) *"
            " (dP - D). -LSE of rows beyond the last one, and of rows without keys, is -inf."
        )
    yield from backward.statements(traits, of_s)
