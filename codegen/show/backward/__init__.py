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
from ...planning.backward import STATS_THREADS, what_kernels_do
from ...planning.kernel_plan import DevicePlan, KernelPlan
from ...planning.protocol import Load
from . import sm90, sm100
from .parts import MAIN as MAIN
from .parts import Places, Product, numbers
from .parts import statistic as statistic

# Of an SM and a clock.
SMEM_BYTES: Final = 128
EXPONENTIALS: Final = 16
_BY_ARCH: Final[Mapping[str, ModuleType]] = {"sm90": sm90, "sm100": sm100}


class Block(Load):
    """A load of a block of rows: each of many."""

    @property
    def part(self) -> str:
        """What of the tensor it is."""
        return "a block of rows"


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
    grids = {
        "stats": (blocks, STATS_THREADS),
        MAIN: ("at most one per SM, which draw tiles", known["THREADS"]),
        "finish": (blocks, known["MATH_THREADS"]),
    }
    does = what_kernels_do(
        statistic(plan),
        first_stores=plan.context["first_stores"],
        keyless_blocks=plan.context["keyless_blocks"],
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
    added = BYTES["fp32"] * rows * qk
    yield (
        f"A step adds {added} B of fp32 to the sums of dQ in global memory:"
        f" {added / flops:.2g} B per FLOP, {added / flops * 100:.2g} TB/s at 100 TFLOPS."
    )
    q = known.get("SEQLEN_Q")
    blocks = f"ceil({q or 'seqlen_q'} / {rows})"
    of_row = BYTES["fp32"] * (qk + STATISTICS)
    counted, turns = plan.context["counted"], known.get("TURNS", 0)
    of_turns = f" + {turns} * batch * heads * {blocks}" if counted else ""
    yield (
        f"Workspace: {BYTES['fp32']} * (batch * heads * {blocks} * {rows} * ({qk} + {STATISTICS})"
        f" + 1{of_turns}) B, {of_row} B a row: sums of dQ, {statistic(plan)} and -D of whole"
        f" blocks; a ticket{'; turns' if counted else ''}."
    )


# --- loads --------------------------------------------------------------------------------


def loads(plan: KernelPlan) -> Iterator[Load]:
    """What a CTA loads: K and V of a tile, Q and dO of each block, with their statistics."""
    known = numbers(plan)
    rows, keys = known["TILE_Q"], known["TILE_KV"]
    for kind, tensor, count, width in (
        (Load, "K", keys, "QK"),
        (Load, "V", keys, "V"),
        (Block, "Q", rows, "QK"),
        (Block, "dO", rows, "V"),
    ):
        columns, nbytes = (
            known[f"HEAD_DIM_{width}"],
            known[f"{tensor.upper()}_TX_BYTES"],
        )
        shape = (count, columns)
        yield kind(tensor, 0, shape, (0, count), (0, columns), (0,), nbytes)
