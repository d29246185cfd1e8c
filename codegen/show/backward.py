# SPDX-License-Identifier: Apache-2.0
"""What a backward kernel's plan comes to: its kernels and roles, five products, steps and costs.

Lengths are the plan's numbers, rows in elements; clocks are those of an SM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ..arch import sm90
from ..features.backward import is_backward
from ..ops.backward import STATISTICS, TURNS
from ..ops.operation import BYTES
from ..planning.kernel_plan import DevicePlan, KernelPlan
from ..planning.protocol import Lane, Load, Phase, Signal, Step, Wait
from ..planning.sm90_backward import (
    DOES,
    SCHEDULER_WARP,
    SLICE_COLUMNS,
    STATS_THREADS,
)

MAIN: Final = "main"
_WARPS: Final = 4  # of a warpgroup
# Of an SM and a clock.
FLOPS: Final = 4096
SMEM_BYTES: Final = 128
EXPONENTIALS: Final = 16
LAST: Final = "dQ(last)"


class Block(Load):
    """A load of a block of rows: each of many."""

    @property
    def part(self) -> str:
        """What of the tensor it is."""
        return "a block of rows"


@dataclass(frozen=True)
class Product:
    """One of the five. a, b: where operands are. to: what the accumulator is, fp32 in registers.

    shape: (m, n, k) of a warpgroup. times: how many such there are in a step, of all warpgroups.
    in_smem: how many of the operands are read from shared memory.
    """

    name: str
    a: str
    b: str
    to: str
    shape: tuple[int, int, int]
    times: int
    in_smem: int

    @property
    def smem_bytes(self) -> int:
        """Of 16-bit operands that are read in a step."""
        m, n, k = self.shape
        return 2 * self.times * k * (n + m * (self.in_smem == 2))

    @property
    def flops(self) -> int:
        """Of a step."""
        m, n, k = self.shape
        return 2 * self.times * m * n * k


def shown(plan: KernelPlan) -> KernelPlan:
    """The plan with the steps and loads of its main kernel; any other plan as it is."""
    if not is_backward(plan.spec_file.spec):
        return plan
    kernels = [
        (
            replace(each, phases=tuple(phases(plan)), loads=tuple(loads(plan)))
            if each.name == MAIN
            else each
        )
        for each in plan.kernels
    ]
    return replace(plan, kernels=tuple(kernels))


def numbers(plan: KernelPlan) -> Mapping[str, int]:
    """The plan's numbers by name."""
    return {each.name: int(each.value) for each in (*plan.chosen, *plan.derived)}


# --- tables -------------------------------------------------------------------------------


def kernel_rows(plan: KernelPlan) -> Iterator[tuple[str, ...]]:
    """Yield the titles, then (kernel, CTAs, threads, what it does) in the order of the launches."""
    yield "kernel", "CTAs", "threads", "does"
    known, blocks = numbers(plan), "blocks of rows of all query heads"
    ctas = (blocks, "at most one per SM, which draw tiles", blocks)
    threads = (STATS_THREADS, known["THREADS"], known["MATH_THREADS"])
    for each, of, count, does in zip(plan.kernels, ctas, threads, DOES, strict=True):
        yield each.name, of, f"{count:>7}", does


def role_rows(plan: KernelPlan, kernel: DevicePlan) -> Iterator[tuple[str, ...]]:
    """Yield the titles, then (role, warps, registers, what it does); nothing without roles."""
    if not is_backward(plan.spec_file.spec) or kernel.name != MAIN:
        return
    yield "role", "warps", "registers", "does"
    of = {each.role: each.per_thread for each in kernel.registers}
    yield "producer", "0", f"{of['producer']:>9}", "loads by TMA"
    scheduler = "draws tickets for KV tiles, the longest of a section first"
    yield "scheduler", f"{SCHEDULER_WARP}", f"{of['producer']:>9}", scheduler
    (math,) = (each for each in kernel.registers if each.role == "math")
    slices = _slices(plan)
    of_products = (
        f"S, P and dV of all keys of the tile; {_columns(0, slices[0])} of dQ",
        f"dP, dS and dK of all keys of the tile; {_columns(*slices)} of dQ",
    )
    for index in range(math.warpgroups):
        first = _WARPS * (index + 1)
        keys = f"keys {64 * index} to {64 * index + 63} of the tile"
        warps = f"{first} to {first + _WARPS - 1}"
        does = f"the products of {keys}; half of dQ of each block"
        if plan.context["splits_products"]:
            does = of_products[index]
        yield f"math {index}", warps, f"{math.per_thread:>9}", does


def _slices(plan: KernelPlan) -> tuple[int, int]:
    """Slices of dQ's columns of the first warpgroup, and of both, where products are split."""
    known = numbers(plan)
    return known.get("DQ_SLICES_OF_DV", 0), known["HEAD_DIM_QK"] // SLICE_COLUMNS


def _columns(first: int, end: int) -> str:
    return f"columns {first * SLICE_COLUMNS} to {end * SLICE_COLUMNS - 1}"


def products(plan: KernelPlan) -> tuple[Product, ...]:
    """The five, in the order of a step."""
    if plan.context["splits_products"]:
        return _split_products(plan)
    known = numbers(plan)
    rows, qk, v = known["TILE_Q"], known["HEAD_DIM_QK"], known["HEAD_DIM_V"]
    keys, by_rows = sm90.WARPGROUP_ROWS, plan.context["dq_by_rows"]
    half = f"{keys} rows of it" if by_rows else f"{qk // 2} columns of it"
    own, both = f"{keys} rows", known["WARPGROUPS"]
    of_ds = (keys, qk if by_rows else qk // 2, known["TILE_KV"])
    to_sums = f"{half}, added to the sums"
    start, end = "starts at -LSE / scale, becomes P^T", "until the tile's end"
    return (
        Product(
            "dQ = dS K", "sdS, transposed", "sK, transposed", to_sums, of_ds, both, 2
        ),
        Product(
            *(
                "dV += P^T dO",
                "registers",
                "sdO, transposed",
                end,
                (keys, v, rows),
                both,
                1,
            ),
        ),
        Product(
            *("dP^T = V dO^T", f"sV, {own}", "sdO", "starts at -D, becomes dS^T"),
            *((keys, rows, v), both, 2),
        ),
        Product(
            *(
                "dK += dS^T Q",
                "registers",
                "sQ, transposed",
                end,
                (keys, qk, rows),
                both,
                1,
            ),
        ),
        Product(
            *("S^T = K Q^T", f"sK, {own}", "sQ", start, (keys, rows, qk), both, 2),
        ),
    )


def _split_products(plan: KernelPlan) -> tuple[Product, ...]:
    """Those of the first warpgroup, then those of the second; dQ is of both."""
    known = numbers(plan)
    rows, qk, v = known["TILE_Q"], known["HEAD_DIM_QK"], known["HEAD_DIM_V"]
    keys, end = known["TILE_KV"], "until the tile's end"
    start = "starts at -LSE / scale, becomes P^T"
    of_slice, slices = (rows, SLICE_COLUMNS, keys), qk // SLICE_COLUMNS
    to_sums = f"{SLICE_COLUMNS} columns of it at a time, added to the sums"
    return (
        Product("S^T = K Q^T", "sK", "sQ", start, (keys, rows, qk), 1, 2),
        Product(
            *("dV += P^T dO", "registers", "sdO, transposed", end),
            *((keys, v, rows), 1, 1),
        ),
        Product(
            *("dP^T = V dO^T", "sV", "sdO", "starts at -D, becomes dS^T"),
            *((keys, rows, v), 1, 2),
        ),
        Product(
            *("dK += dS^T Q", "registers", "sQ, transposed", end),
            *((keys, qk, rows), 1, 1),
        ),
        Product(
            *("dQ = dS K", "sdS, transposed", "sK, transposed", to_sums),
            *(of_slice, slices, 2),
        ),
    )


def product_rows(plan: KernelPlan) -> Iterator[tuple[str, ...]]:
    """Yield the titles, then (product, A, B, m x n x k of a warpgroup, accumulator)."""
    yield "product", "A", "B", "m x n x k", "accumulator, fp32 in registers"
    for each in products(plan):
        yield each.name, each.a, each.b, " x ".join(map(str, each.shape)), each.to


def step_clocks(plan: KernelPlan) -> dict[str, int]:
    """Of a step, a block of rows with a KV tile: the least that each unit takes, by a model."""
    known = numbers(plan)
    rows, keys = known["TILE_Q"], known["TILE_KV"]
    width = known["HEAD_DIM_QK"] + known["HEAD_DIM_V"]
    read = sum(each.smem_bytes for each in products(plan))
    # P as well, which is also read, where one warpgroup hands it to the other.
    handed = 3 if plan.context["splits_products"] else 1
    stored, loaded = 2 * rows * keys * handed, 2 * rows * width
    return {
        "tensor cores": step_flops(plan) // FLOPS,
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
    yield (
        f"A step is {rows} rows with {known['TILE_KV']} keys, {flops} FLOPs. Clocks of it at least:"
        f" {units}; {most} bound it. A model: {FLOPS} FLOPs, {SMEM_BYTES} B and {EXPONENTIALS}"
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
    ordered = plan.spec_file.spec.deterministic
    of_turns = f" + {TURNS} * batch * heads * {blocks}" if ordered else ""
    yield (
        f"Workspace: {BYTES['fp32']} * (batch * heads * {blocks} * {rows} * ({qk} + {STATISTICS})"
        f" + 1{of_turns}) B, {of_row} B a row: sums of dQ, -LSE / scale and -D of whole blocks; a"
        f" ticket{'; turns of both warpgroups' if ordered else ''}."
    )


# --- steps and loads ----------------------------------------------------------------------


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


def phases(plan: KernelPlan) -> Iterator[Phase]:
    """What happens for each block of rows, and between two KV tiles."""
    main = next(each for each in plan.kernels if each.name == MAIN)
    of = {each.role: each for each in main.registers}
    beside, math = of["producer"].per_thread, of["math"]

    def lanes(
        produce: tuple[Step, ...], draw: tuple[Step, ...], end: bool
    ) -> Iterator[Lane]:
        yield Lane("producer", "warp 0", beside, produce)
        if draw:
            yield Lane("scheduler", f"warp {SCHEDULER_WARP}", beside, draw)
        for index in range(math.warpgroups):
            first = _WARPS * (index + 1)
            warps = f"warps {first} to {first + _WARPS - 1}"
            if plan.context["splits_products"]:
                of_index = SPLIT_TILE[index] if end else SPLIT_BLOCK[index]
                steps = of_index(plan)
            else:
                steps = _tile(plan) if end else _block(plan)
            yield Lane(f"math {index}", warps, math.per_thread, tuple(steps))

    block = (_load(plan, "do", "dO(n), -D"), _load(plan, "q", "Q(n+1), -LSE / scale"))
    title = (
        "One block of rows: dQ of block n-1 beside P of block n, then S of block n+1"
    )
    if plan.context["splits_products"]:
        block = (
            _load(plan, "q", "Q(n+1), -LSE / scale"),
            _load(plan, "do", "dO(n+1), -D"),
        )
        title = (
            "One block of rows: P and dV beside dQ of block n-1, dS and dK of block n"
        )
    yield Phase(title, tuple(lanes(block, (), end=False)))
    tile = (
        _take(1),
        _load(plan, "k", "next K"),
        _load(plan, "q", "next Q(0)"),
        _load(plan, "v", "next V"),
        _load(plan, "do", "next dO(0)"),
    )
    free, full = Wait("tile_empty", earlier=True), Signal("tile_full", 1)
    draw = (Step("draw a ticket", "math", (free,), (full,)),)
    yield Phase("From one KV tile to the next", tuple(lanes(tile, draw, end=True)))


def _load(plan: KernelPlan, ring: str, what: str) -> Step:
    nbytes = numbers(plan)[f"{ring.upper()}_TX_BYTES"]
    full = Signal(f"{ring}_full", 1, tx_bytes=nbytes)
    return Step(f"load {what}", "tma", (Wait(f"{ring}_empty", earlier=True),), (full,))


def _take(warps: int) -> Step:
    """The next tile, of which the ticket was drawn a ring ahead, is taken by so many warps."""
    ready, freed = Wait("tile_full", earlier=True), Signal("tile_empty", warps)
    return Step("take the next KV tile", "wait", (ready,), (freed,))


def _mma(name: str, *waits: Wait) -> Step:
    return Step(name, "mma", waits, issues=name)


def _over(text: str, retires: tuple[str, ...], *freed: Signal) -> Step:
    return Step(text, "wait", (), freed, retires=retires)


def _block(plan: KernelPlan) -> Iterator[Step]:
    """Of a math warpgroup, as the loop has them."""
    packed = plan.context["packed_products"]
    add = Step("add dQ(n-1) to its sums", "math")
    masks = "masks of S(n); " if plan.context["masked"] else ""
    yield _mma("dQ(n-1)", Wait("ds_full", earlier=True))
    yield Step(f"{masks}exp2; P(n) in 16 bits", "math")
    yield _mma("dV(n)", Wait("do_full"))
    yield _over("dQ(n-1) is there", ("dQ(n-1)",))
    if not packed:
        yield add
    yield _mma("dP(n)")
    freed = Signal("do_empty", _WARPS)
    yield _over("dV(n), dP(n) are there", ("dV(n)", "dP(n)"), freed)
    yield Step("dS(n) = P * dP, also to sdS", "math")
    yield _mma("dK(n)")
    yield Step(
        "sdS is visible to tensor cores", "wait", (), (Signal("ds_full", _WARPS),)
    )
    if packed:
        yield add
    yield _mma("S(n+1)", Wait("q_full"))
    freed = Signal("q_empty", _WARPS)
    yield _over("dK(n), S(n+1) are there", ("dK(n)", "S(n+1)"), freed)


def _tile(plan: KernelPlan) -> Iterator[Step]:
    """From dS of a tile's last block to dP of the next one's first."""
    yield _mma("dK(last)")
    yield Step(
        "sdS is visible to tensor cores", "wait", (), (Signal("ds_full", _WARPS),)
    )
    yield _take(_WARPS)
    yield _mma("next S(0)", Wait("k_full"), Wait("q_full"))
    freed = Signal("q_empty", _WARPS)
    yield _over("dK, S(0) are there", ("dK(last)", "next S(0)"), freed)
    yield Step("dV in 16 bits, in its V's place", "math")
    yield Step("store dV", "tma", issues="store dV")
    yield _over("dV has left", ("store dV",))
    yield Step("dK * scale in 16 bits, in the same place", "math")
    yield Step("store dK", "tma", issues="store dK")
    yield _mma(LAST, Wait("ds_full"))
    yield Step("exp2; P(0) in 16 bits", "math")
    yield _mma("dV(0)", Wait("do_full"))
    yield _over(f"{LAST} is there", (LAST,), Signal("k_empty", _WARPS))
    yield _over("dK has left", ("store dK",), Signal("v_empty", 1))
    yield _mma("dP(0)", Wait("v_full"))
    freed = Signal("do_empty", _WARPS)
    yield _over("dV(0), dP(0) are there", ("dV(0)", "dP(0)"), freed)


# --- of warpgroups that have products of their own ----------------------------------------


def _slice(name: str, number: int, retires: tuple[str, ...]) -> Iterator[Step]:
    yield _over(f"{', '.join(retires)} {'are' if retires[1:] else 'is'} there", retires)
    yield Step(f"add slice {number} of {name} to its sums", "math")


def _block_of_dv(plan: KernelPlan) -> Iterator[Step]:
    first, second = "dQ(n-1), slice 0", "dQ(n-1), slice 1"
    masks = "masks of S(n); " if plan.context["masked"] else ""
    yield _mma(first, Wait("ds_full", earlier=True))
    yield Step(f"{masks}exp2; P(n) in 16 bits", "math")
    yield Step("P(n) to the other warpgroup", "math", (), (Signal("p_full", _WARPS),))
    yield _mma("dV(n)", Wait("do_full"))
    yield from _slice("dQ(n-1)", 0, (first,))
    if plan.context["two_slices_of_dv"]:
        yield _mma(second)
    yield _over("dV(n) is there", ("dV(n)",), Signal("do_empty", _WARPS))
    yield _mma("S(n+1)", Wait("q_full"))
    if plan.context["two_slices_of_dv"]:
        yield from _slice("dQ(n-1)", 1, (second,))
    yield _over("S(n+1) is there", ("S(n+1)",), Signal("q_empty", _WARPS))


def _block_of_dk(plan: KernelPlan) -> Iterator[Step]:
    first, _ = _slices(plan)
    one, other = (f"dQ(n), slice {first + i}" for i in range(2))
    yield Step("dS(n) = P * dP, also to sdS", "math", (Wait("p_full"),))
    yield _mma("dK(n)", Wait("q_full", earlier=True))
    yield Step(
        "sdS is visible to tensor cores", "wait", (), (Signal("ds_full", _WARPS),)
    )
    yield _mma(one, Wait("ds_full"))
    yield _mma("dP(n+1)", Wait("do_full"))
    yield _over("dK(n) is there", ("dK(n)",), Signal("q_empty", _WARPS))
    yield from _slice("dQ(n)", first, (one,))
    yield _mma(other)
    freed = Signal("do_empty", _WARPS)
    yield _over(f"dP(n+1), {other} are there", ("dP(n+1)", other), freed)
    yield Step(f"add slice {first + 1} of dQ(n) to its sums", "math")


def _tile_of_dv(plan: KernelPlan) -> Iterator[Step]:
    waits: tuple[Wait, ...] = (Wait("ds_full"),)
    for i in range(_slices(plan)[0]):
        name = f"{LAST}, slice {i}"
        yield _mma(name, *waits)
        yield from _slice(LAST, i, (name,))
        waits = ()
    yield Step("both warpgroups meet", "wait")
    yield Step("dV in 16 bits, in V's place", "math")
    yield Step("store dV", "tma", issues="store dV")
    yield _take(_WARPS)
    yield _over("dV has left", ("store dV",), Signal("v_empty", 1))
    yield _mma("next S(0)", Wait("k_full"), Wait("q_full"))
    yield _over("S(0) is there", ("next S(0)",))


def _tile_of_dk(plan: KernelPlan) -> Iterator[Step]:
    yield Step("both warpgroups meet", "wait")
    yield Step("dK * scale in 16 bits, in K's place", "math")
    yield Step("store dK", "tma", issues="store dK")
    yield _take(_WARPS)
    yield _over("dK has left", ("store dK",), Signal("k_empty", 1))
    yield _mma("next dP(0)", Wait("v_full"), Wait("do_full"))
    yield Step("K is there for dQ", "wait", (Wait("k_full", earlier=True),))
    yield _over("dP(0) is there", ("next dP(0)",))


_Steps = Callable[[KernelPlan], Iterator[Step]]
SPLIT_BLOCK: Final[tuple[_Steps, ...]] = (_block_of_dv, _block_of_dk)
SPLIT_TILE: Final[tuple[_Steps, ...]] = (_tile_of_dv, _tile_of_dk)
