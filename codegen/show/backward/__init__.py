# SPDX-License-Identifier: Apache-2.0
"""What a backward kernel's plan comes to: its kernels and roles, five products, steps and costs.

Lengths are the plan's numbers, rows in elements; clocks are those of an SM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Final

from ...features.backward import is_backward
from ...ops.backward import STATISTICS
from ...ops.operation import BYTES
from ...planning.backward import CLUSTER_CTAS, STATS_THREADS, what_kernels_do
from ...planning.kernel_plan import DevicePlan, KernelPlan
from ...planning.protocol import Load
from . import sm90, sm100
from .parts import MAIN as MAIN
from .parts import Places, Product, numbers
from .parts import statistic as statistic

# Of an SM and a clock.
SMEM_BYTES: Final = 128
EXPONENTIALS: Final = 16
PEERS_K: Final = "peer's K"
_BY_ARCH: Final[Mapping[str, ModuleType]] = {"sm90": sm90, "sm100": sm100}


class Block(Load):
    """A load of a block of rows: each of many."""

    @property
    def part(self) -> str:
        """What of the tensor it is."""
        return "a block of rows"


class Own(Load):
    """A load of a CTA's own tile, of a pair that has two."""

    @property
    def part(self) -> str:
        """What of the tensor it is."""
        return "its own tile"


def _own(plan: KernelPlan) -> ModuleType:
    """What its architecture says: roles, products, phases, and numbers of theirs."""
    return _BY_ARCH[plan.arch]


def shown(plan: KernelPlan) -> KernelPlan:
    """The plan with the steps and loads of its main kernel; any other plan as it is."""
    if not is_backward(plan.spec_file.spec):
        return plan
    kernels = [
        (
            replace(
                each, phases=tuple(_own(plan).phases(plan)), loads=tuple(loads(plan))
            )
            if each.name == MAIN
            else each
        )
        for each in plan.kernels
    ]
    return replace(plan, kernels=tuple(kernels))


# --- tables -------------------------------------------------------------------------------


def kernel_rows(plan: KernelPlan) -> Iterator[tuple[str, ...]]:
    """Yield the titles, then (kernel, CTAs, threads, what it does) in the order of the launches."""
    yield "kernel", "CTAs", "threads", "does"
    known, blocks = numbers(plan), "blocks of rows of all query heads"
    pairs = ", in pairs" if plan.context["paired"] else ""
    grids = {
        "stats": (blocks, STATS_THREADS),
        MAIN: (f"at most one per SM{pairs}, which draw tiles", known["THREADS"]),
        "finish": (blocks, known["MATH_THREADS"]),
    }
    does = what_kernels_do(
        statistic(plan),
        first_stores=plan.context["first_stores"],
        keyless_blocks=plan.context["keyless_blocks"],
        clears_ahead=plan.context["clears_ahead"],
    )
    for each, what in zip(plan.kernels, does.values(), strict=True):
        ctas, threads = grids[each.name]
        yield each.name, ctas, f"{threads:>7}", what


def role_rows(plan: KernelPlan, kernel: DevicePlan) -> Iterator[tuple[str, ...]]:
    """Yield the titles, then (role, warps, registers, what it does); nothing without roles."""
    if not is_backward(plan.spec_file.spec) or kernel.name != MAIN:
        return
    yield "role", "warps", "registers", "does"
    yield from _own(plan).role_rows(plan)


def products(plan: KernelPlan) -> tuple[Product, ...]:
    """The five, in the order of a step."""
    found: tuple[Product, ...] = _own(plan).products(plan)
    return found


def places(plan: KernelPlan) -> Places:
    """Where results are in a step."""
    found: Places = _own(plan).places(plan)
    return found


def product_rows(plan: KernelPlan) -> Iterator[tuple[str, ...]]:
    """Yield the titles, then (product, A, B, m x n x k, accumulator)."""
    yield "product", "A", "B", "m x n x k", f"accumulator, fp32 {_own(plan).ACCUMULATORS}"
    for each in products(plan):
        yield each.name, each.a, each.b, " x ".join(map(str, each.shape)), each.to


def step_clocks(plan: KernelPlan) -> dict[str, int]:
    """Of a step, a block of rows with a KV tile: the least that each unit takes, by a model."""
    known = numbers(plan)
    rows, keys = known["TILE_Q"], known["TILE_KV"]
    width = known["HEAD_DIM_QK"] + known["HEAD_DIM_V"]
    read = sum(each.smem_bytes for each in products(plan))
    stored, loaded = 2 * rows * keys * _own(plan).stored_tiles(plan), 2 * rows * width
    return {
        "tensor cores": step_flops(plan) // _own(plan).FLOPS,
        "shared memory": (read + stored + loaded) // SMEM_BYTES,
        "exponentials": rows * keys // EXPONENTIALS,
    }


def step_flops(plan: KernelPlan) -> int:
    """Of all five products of a step."""
    return sum(each.flops for each in products(plan))


def cost_lines(plan: KernelPlan) -> Iterator[str]:
    """What a step takes and moves, and the workspace of a call."""
    known, clocks, flops = numbers(plan), step_clocks(plan), step_flops(plan)
    rows, qk = known["TILE_Q"], known["HEAD_DIM_QK"]
    most = max(clocks, key=lambda unit: clocks[unit])
    units = ", ".join(f"{unit} {count}" for unit, count in clocks.items())
    peak = _own(plan).FLOPS
    yield (
        f"A step is {rows} rows with {known['TILE_KV']} keys, {flops} FLOPs. Clocks of it at least:"
        f" {units}; {most} bound it. A model: {peak} FLOPs, {SMEM_BYTES} B and {EXPONENTIALS}"
        " exponentials a clock of an SM; the reads of statistics are not counted."
    )
    # A CTA of a pair adds its columns, of the keys of both.
    kind = plan.spec_file.spec.dq_sums
    added = BYTES[kind] * rows * known.get("DQ_COLUMNS", qk)
    yield (
        f"A step adds {added} B of {kind} to the sums of dQ in global memory:"
        f" {added / flops:.2g} B per FLOP, {added / flops * 100:.2g} TB/s at 100 TFLOPS."
    )
    q = known.get("SEQLEN_Q")
    blocks = f"ceil({q or 'seqlen_q'} / {rows})"
    of_row = BYTES[kind] * qk + BYTES["fp32"] * STATISTICS
    of_block = f"{rows} * ({qk} + {STATISTICS})"
    if exponents := known.get("EXPONENTS"):
        of_block = f"({rows} * ({qk // 2} + {STATISTICS}) + {exponents})"
    counted, turns = plan.context["counted"], known.get("TURNS", 0)
    of_turns = f" + {turns} * batch * heads * {blocks}" if counted else ""
    clears, group = plan.context["clears_ahead"], plan.spec_file.spec.heads.q_per_kv
    of_heads = f" + batch * heads{f' / {group}' if group > 1 else ''}" if clears else ""
    beside = ["a ticket"] + ["turns"] * counted + ["counters of KV heads"] * clears
    yield (
        f"Workspace: {BYTES['fp32']} * (batch * heads * {blocks} * {of_block}"
        f" + 1{of_turns}{of_heads}) B, {of_row} B a row: sums of dQ, {statistic(plan)} and -D of"
        f" whole blocks; {'; '.join(beside)}."
    )


# --- loads --------------------------------------------------------------------------------


def loads(plan: KernelPlan) -> Iterator[Load]:
    """What a CTA loads: K and V of a tile, Q and dO of each block, with their statistics; in a pair
    also the columns of the other CTA's K whose dQ it sums.
    """
    known = numbers(plan)
    rows, keys, paired = known["TILE_Q"], known["TILE_KV"], plan.context["paired"]
    whole = Own if paired else Load
    of_peer = known["K_TX_BYTES"] - BYTES["bf16"] * keys * known["HEAD_DIM_QK"]
    for kind, tensor, count, width in (
        (whole, "K", keys, "QK"),
        *([(Load, PEERS_K, keys, "QK")] if paired else []),
        (whole, "V", keys, "V"),
        (Block, "Q", rows, "QK"),
        (Block, "dO", rows, "V"),
    ):
        for cta in range(CLUSTER_CTAS if paired else 1):
            columns = 0, known[f"HEAD_DIM_{width}"]
            shape = count, columns[1]
            if tensor == PEERS_K:
                columns, nbytes = _columns_of(plan, cta), of_peer
            else:
                nbytes = known[f"{tensor.upper()}_TX_BYTES"]
                nbytes -= of_peer if tensor == "K" else 0
            yield kind(tensor, cta, shape, (0, count), columns, (cta,), nbytes)


def _columns_of(plan: KernelPlan, cta: int) -> tuple[int, int]:
    """(First, count) of the columns of dQ that a CTA of a pair sums."""
    count = numbers(plan)["DQ_COLUMNS"]
    return cta * count, count
