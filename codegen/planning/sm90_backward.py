# SPDX-License-Identifier: Apache-2.0
"""The plan of an sm90 backward kernel: tiles, rings, registers, and what does not fit.

S^T = K Q^T and dP^T = V dO^T of a KV tile and a block of query rows. dK and dV stay in registers,
dQ is added to sums in global memory from registers. Up to head_dim 128 each math warpgroup has 64
keys and computes all five products of them; beyond, where the registers of a thread hold dK or dV
of 64 keys, a tile has 64, of which one warpgroup computes S, P and dV, the other one dP, dS and
dK. There two CTAs with tiles that follow one another exchange dS, so that each adds half of dQ's
columns of both tiles' keys: half as many sums go to L2 (decision 0064).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ..arch import sm90
from ..errors import SpecError
from ..features.backward import splits, tile_kv
from ..ops.backward import EXPONENTS
from ..ops.operation import BYTES
from ..spec.model import Spec, SpecFile
from . import backward
from .backward import CLUSTER_CTAS, Sizes
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
from .numbers import derived, regions

WARPGROUPS: Final = 2  # that compute; a third would leave them 160 registers
REGISTERS: Final = sm90.REGISTERS[WARPGROUPS]
DS_STAGES: Final = 2  # dQ of a block is computed while dS of the next one is stored
TURN_STAGES: Final = 2  # a turn is awaited up to two blocks ahead
# Addresses, pipeline states: from what compiled unspilled, with products in 16 bits and in fp32.
REGISTERS_BESIDE: Final = {True: 16, False: 20}
K_STEP: Final = 16  # K of a wgmma of 16-bit elements
# k-steps of S = K Q^T and of dP = V dO^T whose K and V stay in registers for a tile, by head_dim:
# as many as compiled unspilled (decision 0065). They are loaded once per tile, not in each step.
KEPT_STEPS: Final = {
    (64, 64): (3, 0),
    (96, 96): (6, 5),
    (128, 128): (1, 0),
    (192, 128): (12, 8),
}
WATCH_WARP: Final = 1
PASS_WARP: Final = 2
SEND_WARP: Final = 2  # of a pair of CTAs, where it passes turns as well
SCHEDULER_WARP: Final = 3
CONSTANTS: Final = {
    **sm90.CONSTANTS,
    **backward.CONSTANTS,
    "DS_STAGES": DS_STAGES,
    "CLUSTER_CTAS": CLUSTER_CTAS,
    "K_STEP": K_STEP,
}

REASONS: Final[Mapping[str, str]] = {
    **backward.REASONS,
    "TILE_Q": "128 up to head_dim 64 where registers take it, else 64",
    "TILE_KV": "64 for each warpgroup that computes dK and dV of its own keys",
    "SECTION_BYTES": "of the 50 MiB of L2: as many as were fastest",
    "KEPT_STEPS": "as many as registers are left for: shared memory is read less",
}


@dataclass(frozen=True)
class Traits(backward.Traits):
    """What an sm90 backward kernel must be able to do."""

    @property
    def packed_products(self) -> bool:
        """P and dP - D are multiplied in 16 bits, which fp16 would overflow in."""
        return self.spec.dtype == "bf16"

    @property
    def adds_statistic(self) -> bool:
        """Scores of base 2 get -LSE * log2(e) when they are exponentiated.

        Else S starts at -LSE / scale: beside P in fp32 no registers are left for statistics.
        """
        return self.softcap is not None or self.packed_products

    @property
    def kept_steps(self) -> tuple[int, int]:
        """k-steps of S that read K from registers, and of dP that read V from there.

        None where P is in fp32 or scores are capped, which leave fewer registers: not tried.
        """
        head_dim = self.spec.head_dim
        if not self.packed_products or self.softcap is not None:
            return 0, 0
        return KEPT_STEPS.get((head_dim.qk, head_dim.v), (0, 0))

    @property
    def frees_v_late(self) -> bool:
        """dK of a tile is given the time of P to leave the V stage: not at head_dim 128, where
        it is slower unless lengths are short (decision 0059).
        """
        return not self.paired and (self.first_stores or self.spec.head_dim.qk < 128)

    @property
    def section_bytes(self) -> int:
        """Half as much without a mask, unless sums have an order (decision 0066).

        Of sums in fp16 with a mask as many heads as of those in fp32, unless they have an order
        (decision 0068); half as much again without a mask where they have (decision 0069).
        """
        whole, half_sums = backward.SECTION_BYTES, self.half_sums
        if self.mask.edges:
            free = half_sums and not self.spec.deterministic
            return whole * 3 // 4 if free else whole
        if self.spec.deterministic:
            return whole * 3 // 2 if half_sums else whole
        return whole // 2

    @property
    def slice_columns(self) -> int:
        """Of dQ, of a warpgroup of a pair of CTAs."""
        return _slice_columns(self.spec)

    @property
    def narrow_slices(self) -> bool:
        """A slice is no multiple of the 64 columns that a swizzle of 128 bytes goes over."""
        return self.paired and self.slice_columns % 64 != 0


def resolve(spec_file: SpecFile) -> KernelPlan:
    """Plan a kernel, or raise SpecError (FG401, FG402) with the numbers that do not fit."""
    spec = spec_file.spec
    traits = Traits(spec, _choose(spec_file))
    chosen = tuple(_chosen(traits))
    numbers = tuple(derived(_derived(traits), chosen, _constants(spec)))
    smem, barriers = _smem(traits), tuple(_barriers(traits))
    context = _context(spec_file, traits, chosen, numbers, barriers, total(smem))
    main = DevicePlan(
        smem=smem,
        tmem=(),
        barriers=barriers,
        phases=(),
        loads=(),
        registers=(
            Registers("producer", 1, REGISTERS.producer),
            Registers("math", WARPGROUPS, REGISTERS.consumer),
        ),
        register_parts=_register_parts(spec, traits.sizes.tile_q),
        name="main",
    )
    architecture, statements = sm90.ARCHITECTURE, _statements(traits)
    return backward.plan_of(
        spec_file, architecture, main, chosen, numbers, statements, context
    )


def _choose(spec_file: SpecFile) -> Sizes:
    """Tile and rings: as given, the rest planned; raises SpecError for what does not fit."""
    spec = spec_file.spec
    tiles = (spec.tile.q,) if spec.tile.q else _query_tiles(spec)
    fitting = [rows for rows in tiles if _needed(spec, rows) <= REGISTERS.consumer]
    if not fitting:
        raise _too_many_registers(spec_file, tiles[-1])

    def fits(sizes: Sizes) -> bool:
        return total(_smem(Traits(spec, sizes))) <= sm90.SMEM_BYTES

    # A tile's last products and the next one's first ones are in flight together where the
    # warpgroups compute alike: they need two stages of K and V.
    kv_stages = (2, 1) if splits(spec) else (2,)
    choices = [
        sizes
        for tile_q in fitting
        for sizes in backward.choices(spec, (tile_q, tile_kv(spec)), kv_stages)
    ]
    sizes = next(filter(fits, choices), choices[-1])
    if not fits(sizes):
        smem, field = _smem(Traits(spec, sizes)), backward.largest_given(spec)
        fewer = "fewer stages, a smaller tile.q"
        raise too_much_smem(spec_file, sm90.ARCHITECTURE, smem, field, fewer)
    return sizes


def _query_tiles(spec: Spec) -> Sequence[int]:
    """Query rows of a block to try, the better first."""
    return (128, 64) if max(spec.head_dim.qk, spec.head_dim.v) <= 64 else (64,)


def _register_parts(spec: Spec, tile_q: int) -> dict[str, int]:
    """Registers of a math thread: fp32 accumulators, and what is there beside them at the worst
    moment. P and dS are operands of 16 bits; of fp32 products P is there until dP has come.
    """
    if splits(spec):
        return _register_parts_by_product(spec, tile_q)
    of_scores, of_p = tile_q // 2, tile_q * BYTES[spec.dtype] // 8
    of_dq = tile_q * spec.head_dim.qk // (sm90.WARPGROUP_ROWS * 2 * WARPGROUPS)
    packed = Traits(spec, Sizes(tile_q, tile_kv(spec), 0, 0, 0)).packed_products
    if packed and spec.softcap == "none":
        worst = {"dQ": of_dq, "dP": of_scores, "P": of_p}
    elif packed:  # P and P sloped come where S was, dQ when dP has gone
        worst = {"S": of_scores, "dP": of_scores}
    else:
        worst = {"P in fp32": of_scores, "P": of_p, "dP": of_scores}
    kept = {"dK": spec.head_dim.qk // 2, "dV": spec.head_dim.v // 2}
    return {**kept, **worst, "others": REGISTERS_BESIDE[packed]}


def _slice_columns(spec: Spec) -> int:
    return spec.head_dim.qk // (CLUSTER_CTAS * WARPGROUPS)


def _register_parts_by_product(spec: Spec, tile_q: int) -> dict[str, int]:
    """Of the warpgroup that needs more: beside dV a slice of dQ, S and P, beside dK a slice of dQ,
    dP and dS.
    """
    of_scores, of_p = tile_q // 2, tile_q * BYTES[spec.dtype] // 8
    of_slice = tile_q * _slice_columns(spec) // (sm90.WARPGROUP_ROWS * 2)
    others = REGISTERS_BESIDE[spec.dtype == "bf16"]
    beside = {"a slice of dQ": of_slice, "others": others}
    if spec.head_dim.v >= spec.head_dim.qk:
        return {"dV": spec.head_dim.v // 2, "S": of_scores, "P": of_p, **beside}
    return {"dK": spec.head_dim.qk // 2, "dP": of_scores, "dS": of_p, **beside}


def _needed(spec: Spec, tile_q: int) -> int:
    return sum(_register_parts(spec, tile_q).values())


def _too_many_registers(spec_file: SpecFile, tile_q: int) -> SpecError:
    parts = _register_parts(spec_file.spec, tile_q)
    message = (
        f"a math thread needs about {sum(parts.values())} registers at tile.q {tile_q}, it has"
        f" {REGISTERS.consumer}: {' + '.join(f'{k} {n}' for k, n in parts.items())}"
    )
    smaller = tile_q > sm90.WARPGROUP_ROWS
    field = ("tile", "q") if spec_file.spec.tile.q and smaller else ("head_dim",)
    hint = "a smaller tile.q, or leave it out" if smaller else "head_dim: 64, 96 or 128"
    return spec_file.refusal("FG402", field, message, hint)


def _chosen(traits: Traits) -> Iterator[Number]:
    yield from backward.chosen(traits, (), partial(_reason, traits.spec))
    yield from backward.sections(traits, REASONS["SECTION_BYTES"])
    for name, steps, of in zip(
        ("K_STEPS", "V_STEPS"), traits.kept_steps, ("S", "dP"), strict=True
    ):
        if steps:
            unit = f"k-steps of {of} that read {name[0]} from registers"
            yield Number(name, steps, unit, "planned", reason=REASONS["KEPT_STEPS"])


def _reason(spec: Spec, name: str) -> str:
    """Why a number is what it is, though the spec leaves it out."""
    if name == "TILE_Q" and 128 in _query_tiles(spec):
        needed = _needed(spec, 128)
        if needed > REGISTERS.consumer:
            return f"with 128 a thread would need {needed} registers"
    if splits(spec) and name == "TILE_KV":
        return "64: the registers of a warpgroup hold dK, or dV, of no more"
    return REASONS[name]


def _derived(traits: Traits) -> Iterator[tuple[str, str, str]]:
    """Yield (name, unit, formula)."""
    per_thread = "per thread: ptxas spills none"
    of_rows = "TILE_KV // WARPGROUP_ROWS"
    warpgroups = f"2 * {of_rows}" if traits.paired else of_rows
    yield "WARPGROUPS", "that compute", warpgroups
    yield "THREADS", "per CTA", "WARPGROUP_THREADS * (WARPGROUPS + 1)"
    yield "MATH_WARPS", "that compute", "WARPGROUP_WARPS * WARPGROUPS"
    yield "CONSUMER_REGS", per_thread, str(REGISTERS.consumer)
    yield "PRODUCER_REGS", per_thread, str(REGISTERS.producer)
    yield "STAT_BYTES", "of a block's rows, fp32", "4 * TILE_Q"
    if traits.half_sums:
        behind = "behind a block's statistics for S: x, and what dQ has besides, twice"
        yield "EXPONENTS", behind, str(EXPONENTS)
        yield "SHIFT_AT", "of these, behind the statistics", "TILE_Q + 1"
    if traits.paired:
        yield "DQ_COLUMNS", "of dQ, which a CTA sums", "HEAD_DIM_QK // CLUSTER_CTAS"
        yield "SLICE_COLUMNS", "of these, of a warpgroup", "DQ_COLUMNS // WARPGROUPS"
        with_peers = "HEAD_DIM_QK + DQ_COLUMNS"
        yield "K_COLUMNS", "per stage, the other CTA's among them", with_peers
        halves = "(CLUSTER_CTAS + 1) * KV_STAGES"
        yield "K_HALVES", "of DQ_COLUMNS, the other CTA's behind", halves
        of_copy = "TILE_KV * TILE_Q * ELEMENT_BYTES"
        yield "DS_BYTES", "of dS, which a CTA sends", of_copy
    yield from backward.tx_bytes(traits, with_statistics=True)
    if traits.paired:
        beside = "3 + MATH_WARPS" if traits.watched else "2 + MATH_WARPS"
        freed = "warps of both CTAs that free it: load, send, math"
        if traits.watched:
            freed = "warps of both CTAs that free it: load, send, watch, math"
        yield "TICKET_RELEASES", freed, f"CLUSTER_CTAS * ({beside})"
    elif traits.watched:
        freed = "warps that free it: of loads, of turns, of math"
        yield "TICKET_RELEASES", freed, "3 + MATH_WARPS"
    else:
        freed = "warps that free it: of loads, of math"
        yield "TICKET_RELEASES", freed, "1 + MATH_WARPS"
    yield "MATH_THREADS", "of both warpgroups", "WARPGROUP_THREADS * WARPGROUPS"
    yield "DQ_ELEMENTS", "sums of a block", "TILE_Q * HEAD_DIM_QK"
    if traits.paired:
        yield "P_PAIRS", "of P in 16 bits", "TILE_KV * TILE_Q // 2"
    yield from backward.of_kernels_beside(traits)


def _constants(spec: Spec) -> dict[str, int]:
    return {
        **CONSTANTS,
        "ELEMENT_BYTES": BYTES[spec.dtype],
    }


def _smem(traits: Traits) -> tuple[Region, ...]:
    chosen = tuple(_chosen(traits))
    of_ds = 3 if traits.paired else DS_STAGES  # P, dS, the other CTA's dS
    pairs = f"Q_STAGES + DO_STAGES + 2 * KV_STAGES + {of_ds} + {backward.TICKET_STAGES}"
    ds = "sdS", f"2 * TILE_KV * TILE_Q * {DS_STAGES}", DS_STAGES, "dS"
    words = [("sTickets", f"4 * {backward.TICKET_STAGES}", 1, "")]
    if traits.watched:
        pairs = f"{pairs} + 2 * {TURN_STAGES}"
    if traits.first_stores:
        words.append(("sTurns", f"4 * {TURN_STAGES}", 1, ""))
    if traits.paired:
        both = "P, then dS, and the other CTA's dS"
        ds = "sdS", f"2 * TILE_KV * TILE_Q * {CLUSTER_CTAS}", CLUSTER_CTAS, both
    words.insert(0, ("barriers", f"2 * 8 * ({pairs})", 1, ""))
    in_use = " + ".join(formula for _, formula, _, _ in words)
    of_s = "(TILE_Q + EXPONENTS)" if traits.half_sums else "TILE_Q"
    rows = [
        *words,
        ("padding", f"-({in_use}) % {CONSTANTS['STAT_ALIGN']}", 1, ""),
        ("sStatS", f"4 * {of_s} * Q_STAGES", 1, ""),
        ("sStatD", "4 * TILE_Q * DO_STAGES", 1, ""),
        *backward.tiles(traits),
        ds,
    ]
    numbers = (*chosen, *derived(_derived(traits), chosen, _constants(traits.spec)))
    return regions(rows, numbers, sm90.SMEM_ALIGN)


def _barriers(traits: Traits) -> Iterator[Barrier]:
    sizes, warps = traits.sizes, 4 * WARPGROUPS
    every = warps, "every math warp"
    if traits.paired:
        of_k = every
        of_v = 4, "every warp of the second warpgroup"
        stored = "4: every warp of the second warpgroup, once its dS is stored"
    else:
        of_k = every
        of_v = WARPGROUPS, "a warp of each warpgroup, once dK has left it"
        stored = f"{warps}: every math warp, once its dS is stored"
    for name, stages, what, (count, who) in (
        ("q", sizes.q_stages, "Q", every),
        ("do", sizes.do_stages, "DO", every),
        ("k", sizes.kv_stages, "K", of_k),
        ("v", sizes.kv_stages, "V", of_v),
    ):
        full = f"1 + {what}_TX_BYTES by TMA"
        yield Barrier(f"{name}_full", stages, 1, full, "math warpgroups")
        yield Barrier(f"{name}_empty", stages, count, f"{count}: {who}", "producer")
    if traits.paired:
        first = "4: every warp of the first math warpgroup, once its P is stored"
        yield Barrier("p_full", 1, 4, first, "the second math warpgroup")
        yield Barrier("ds_full", 1, 4, stored, "math warpgroups, sender")
        read = (
            f"{warps + 1}: every math warp, and the other CTA's sender, once dS is read"
        )
        yield Barrier("ds_empty", 1, warps + 1, read, "the first math warpgroup")
        sent = "1 + DS_BYTES by the other CTA's sender"
        yield Barrier("peer_full", 1, 1, sent, "math warpgroups, sender")
        read = f"{warps}: every math warp of the other CTA, once it has read dS"
        yield Barrier("peer_empty", 1, warps, read, "sender")
    else:
        yield Barrier("ds_full", DS_STAGES, warps, stored, "math warpgroups")
    takers, who = warps + 1, "load and math warps"
    if traits.watched:
        takers, who = warps + 3, "all but the scheduler"
        watcher, passer = WATCH_WARP, PASS_WARP
        handed = f"1: warp {watcher}, once the first tile, or all others, have added"
        if traits.hands_turns:
            handed = f"1: warp {watcher}, once the tiles before have added"
        yield Barrier("turn_full", TURN_STAGES, 1, handed, "math warpgroups")
        seen = f"1: warp {passer}, once both warpgroups have added"
        yield Barrier("turn_empty", TURN_STAGES, 1, seen, f"warp {watcher}")
        added = f"{warps}: every math warp, once it has added"
        yield Barrier("added_full", TURN_STAGES, warps, added, f"warp {passer}")
    if traits.paired:
        takers = CLUSTER_CTAS * (warps + (3 if traits.watched else 2))
        who = "all that work, of both CTAs"
    yield from backward.barriers_of_tickets(takers, who)


def _context(
    spec_file: SpecFile,
    traits: Traits,
    chosen: Sequence[Number],
    numbers: Sequence[Number],
    barriers: Sequence[Barrier],
    smem_bytes: int,
) -> dict[str, Any]:
    """Every name that the templates of sm90 backward kernels read, but the digests."""
    math = "warps 4 to 11 compute"
    if traits.paired:
        math = "warps 4 to 7 compute P and dV, warps 8 to 11 dS and dK, all of them dQ"
    told = {each.name: each.arrivals for each in barriers}
    head_dim = traits.spec.head_dim
    log2, rows_of_dq = traits.adds_statistic, sm90.WARPGROUP_ROWS * WARPGROUPS
    by_rows = not traits.paired and traits.sizes.tile_q == rows_of_dq
    beside_ds = traits.packed_products and traits.softcap is None
    one_loop = not traits.first_stores and not traits.paired
    tries_turn = one_loop and beside_ds and traits.hands_turns
    # Where it is faster than S behind the sums, which then are in registers of their own: decision
    # 0070.
    sums_behind_s = one_loop and (
        head_dim.qk <= 96
        if traits.half_sums
        else head_dim.qk <= 64 and not traits.hands_turns
    )
    statistic = backward.statistic_of(log2=log2, scaled=traits.half_sums)
    fills = {"q": f"Q and {statistic}", "do": "dO and -D", "k": "K", "v": "V"}
    width = max(map(len, fills.values()))
    roles = (
        *backward.kernel_lines(traits, statistic),
        *_role_lines(traits, math),
        "Pipelines (what TMA fills a stage with; the arrivals that free it):",
        *(
            f"  {name:2}  {fill:{width}}  {told[f'{name}_empty']}"
            for name, fill in fills.items()
        ),
        f"Shared memory: {smem_bytes} bytes per CTA, one CTA per SM.",
    )
    return {
        **backward.context(spec_file, traits, chosen, numbers, roles),
        "names_arch": True,
        "tensor_memory": False,
        "scheduler_warp": SCHEDULER_WARP,
        "statistic": statistic,
        # Else S starts at its statistic, divided by the scale.
        "log2_statistic": log2,
        "watched": traits.watched,
        # Two products are in flight there, and their registers leave room. At head_dim 64 it is
        # slower: decision 0059.
        "turn_beside_ds": traits.first_stores and beside_ds and not by_rows,
        "tries_turn": tries_turn,
        # At head_dim 64 it is not faster: decision 0069.
        "arrives_late": tries_turn and head_dim.qk > 64 and not sums_behind_s,
        "sums_behind_s": sums_behind_s,
        # dQ is scaled on its way to registers that S leaves alone.
        "scaled_sums": sums_behind_s and not traits.half_sums,
        "packed_products": traits.packed_products,
        "keeps_k": traits.kept_steps[0] > 0,
        "keeps_v": traits.kept_steps[1] > 0,
        "keeps_all_k": traits.kept_steps[0] * K_STEP == head_dim.qk,
        "keeps_all_v": traits.kept_steps[1] * K_STEP == head_dim.v,
        "frees_v_late": traits.frees_v_late,
        "narrow_slices": traits.narrow_slices,
        "dq_by_rows": by_rows,
    }


def _role_lines(traits: Traits, math: str) -> Iterator[str]:
    """The lines of the header that say which warp does what."""
    clears = ", and clears sums" if traits.clears_ahead else ""
    draws = f"warp {SCHEDULER_WARP} draws tickets for tiles{clears}"
    if traits.paired:
        yield (
            "Clusters of two CTAs with tiles that follow one another: each sums half of dQ's"
            " columns for both."
        )
        yield (
            f"Roles: warp 0 loads by TMA; warp {SEND_WARP} sends dS to the other CTA; warp"
            f" {SCHEDULER_WARP} of CTA 0 draws tickets;"
        )
        if traits.watched:
            yield (
                f"warp {WATCH_WARP} watches for the turns to add dQ in, and warp"
                f" {SEND_WARP} passes them on;"
            )
        yield f"{math}."
        return
    if not traits.watched:
        yield f"Roles: warp 0 loads by TMA; {draws}; {math}."
        return
    if not traits.hands_turns:
        yield (
            f"Roles: warp 0 loads by TMA; warp {WATCH_WARP} waits until a block's dQ may be stored,"
            f" added or written, warp {PASS_WARP}"
        )
        yield f"says when it is; {draws}; {math}."
        return
    yield (
        f"Roles: warp 0 loads by TMA; warp {WATCH_WARP} watches for the turns to add dQ in,"
        f" warp {PASS_WARP} passes"
    )
    yield f"them on; {draws}; {math}."


def _statements(traits: Traits) -> Iterator[str]:
    if traits.softcap is None:
        of_s = (
            "P = exp(scale * S - LSE). dP starts at -D, in the accumulators: dS = P * dP. -LSE of"
            " rows beyond the last one, and of rows without keys, is -inf."
        )
        if not traits.adds_statistic:
            of_s = (
                "S starts at -LSE / scale and dP at -D, in the accumulators: P = exp(S),"
                " dS = P * dP. Rows beyond the last one, and rows without keys, start at -inf."
            )
    else:
        of_s = (
            "P = exp(SOFTCAP * t - LSE) with t = tanh(scale * QK^T / SOFTCAP). dP starts at -D, in"
            " the accumulators: dS = P * (1 - t^2) * dP. -LSE of rows beyond the last one, and of"
            " rows without keys, is -inf."
        )
    products = []
    if traits.packed_products:
        factor = "P" if traits.softcap is None else "P * (1 - t^2)"
        products = [f"dS is the product of {factor} and dP in 16 bits, rounded."]
    yield from backward.statements(traits, of_s, *products)
