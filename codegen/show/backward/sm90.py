# SPDX-License-Identifier: Apache-2.0
"""Roles, products and steps of an sm90 backward kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from ...arch import sm90
from ...planning.kernel_plan import KernelPlan
from ...planning.protocol import Lane, Phase, Signal, Step, Wait
from ...planning.sm90_backward import (
    PASS_WARP,
    SCHEDULER_WARP,
    WATCH_WARP,
)
from .parts import (
    WARPS,
    Places,
    Product,
    load,
    main_of,
    mma,
    numbers,
    over,
    statistic,
    take,
    take_for_loads,
)

FLOPS: Final = 4096  # of an SM and a clock
ACCUMULATORS: Final = "in registers"
LAST: Final = "dQ(last)"


def role_rows(plan: KernelPlan) -> Iterator[tuple[str, ...]]:
    """Yield (role, warps, registers, what it does)."""
    kernel = main_of(plan)
    of = {each.role: each.per_thread for each in kernel.registers}
    yield "producer", "0", f"{of['producer']:>9}", "loads by TMA"
    handed = plan.context["hands_turns"]
    if plan.context["watched"]:
        watches = "waits until the first tile has stored dQ of a block, and tells math"
        passes = "tells other CTAs, once both warpgroups have stored"
        if handed:
            watches = (
                "watches for the turns to add dQ of a block, and hands them to math"
            )
            passes = "passes a turn to the next tile, once both warpgroups have added"
        yield "watcher", f"{WATCH_WARP}", f"{of['producer']:>9}", watches
        yield "passer", f"{PASS_WARP}", f"{of['producer']:>9}", passes
    order = "last" if handed and plan.context["right_edge"] else "longest"
    scheduler = f"draws tickets for KV tiles, the {order} of a section first"
    yield "scheduler", f"{SCHEDULER_WARP}", f"{of['producer']:>9}", scheduler
    (math,) = (each for each in kernel.registers if each.role == "math")
    slices = _slices(plan)
    of_products = (
        f"S, P and dV of all keys of the tile; {_columns(0, slices[0])} of dQ",
        f"dP, dS and dK of all keys of the tile; {_columns(*slices)} of dQ",
    )
    for index in range(math.warpgroups):
        first = WARPS * (index + 1)
        keys = f"keys {64 * index} to {64 * index + 63} of the tile"
        warps = f"{first} to {first + WARPS - 1}"
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
    start, end = _start_of_s(plan), "until the tile's end"
    return (
        Product(
            *("dP^T = V dO^T", f"sV, {own}", "sdO", "starts at -D, becomes dS^T"),
            *((keys, rows, v), both, 2),
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
            "dQ = dS K", "sdS, transposed", "sK, transposed", to_sums, of_ds, both, 2
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


def _start_of_s(plan: KernelPlan) -> str:
    if plan.context["log2_statistic"]:
        return "becomes P^T"
    return f"starts at {statistic(plan)}, becomes P^T"


def places(plan: KernelPlan) -> Places:
    """Where results are in a step."""
    splits, ds = plan.context["splits_products"], "sdS, for both warpgroups"
    if splits:
        return Places("registers", "by sP", ds, "sP and sdS")
    return Places("registers", "P", ds, "sdS")


def _split_products(plan: KernelPlan) -> tuple[Product, ...]:
    """Those of the first warpgroup, then those of the second; dQ is of both."""
    known = numbers(plan)
    rows, qk, v = known["TILE_Q"], known["HEAD_DIM_QK"], known["HEAD_DIM_V"]
    keys, end = known["TILE_KV"], "until the tile's end"
    start = _start_of_s(plan)
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


def stored_tiles(plan: KernelPlan) -> int:
    """How many tiles of P's size are stored to shared memory, or read there by threads, in a step:
    dS; P as well, which is also read, where one warpgroup hands it to the other.
    """
    return 3 if plan.context["splits_products"] else 1


def phases(plan: KernelPlan) -> Iterator[Phase]:
    """What happens for each block of rows, and between two KV tiles."""
    of = {each.role: each for each in main_of(plan).registers}
    beside, math = of["producer"].per_thread, of["math"]

    def lanes(
        produce: tuple[Step, ...], draw: tuple[Step, ...], end: bool
    ) -> Iterator[Lane]:
        yield Lane("producer", "warp 0", beside, produce)
        if plan.context["watched"]:
            of_turns = [*_turns(plan, end=end)]
            yield Lane("watcher", f"warp {WATCH_WARP}", beside, of_turns[0])
            yield Lane("passer", f"warp {PASS_WARP}", beside, of_turns[1])
        if draw:
            yield Lane("scheduler", f"warp {SCHEDULER_WARP}", beside, draw)
        for index in range(math.warpgroups):
            first = WARPS * (index + 1)
            warps = f"warps {first} to {first + WARPS - 1}"
            if plan.context["splits_products"]:
                of_index = SPLIT_TILE[index] if end else SPLIT_BLOCK[index]
                steps = of_index(plan)
            else:
                steps = _tile(plan) if end else _block(plan)
            yield Lane(f"math {index}", warps, math.per_thread, tuple(steps))

    block = (
        load(plan, "do", "dO(n), -D"),
        load(plan, "q", f"Q(n+1), {statistic(plan)}"),
    )
    title = "One block of rows: dP beside P, dV and dQ of block n-1 beside dS, dK and S of n+1"
    if plan.context["splits_products"]:
        block = (
            load(plan, "q", f"Q(n+1), {statistic(plan)}"),
            load(plan, "do", "dO(n+1), -D"),
        )
        title = (
            "One block of rows: P and dV beside dQ of block n-1, dS and dK of block n"
        )
    yield Phase(title, tuple(lanes(block, (), end=False)))
    tile = (
        *take_for_loads(),
        load(plan, "k", "next K"),
        load(plan, "q", "next Q(0)"),
        load(plan, "v", "next V"),
        load(plan, "do", "next dO(0)"),
    )
    free, full = Wait("ticket_empty", earlier=True), Signal("ticket_full", 1)
    draw = (Step("draw a ticket", "math", (free,), (full,)),)
    yield Phase("From one KV tile to the next", tuple(lanes(tile, draw, end=True)))


def _block(plan: KernelPlan) -> Iterator[Step]:
    """Of a math warpgroup, as the loop has them."""
    masks = "masks of S(n); " if plan.context["masked"] else ""
    of_ds = Step("dS(n) = P * dP, also to sdS", "math")
    beside: tuple[str, ...] = ("dV(n)", "dQ(n-1)")
    yield mma("dP(n)", Wait("do_full"))
    yield Step(f"{masks}exp2; P(n) in 16 bits", "math")
    yield mma("dV(n)")
    if plan.context["packed_products"] and not plan.context["capped"]:
        yield mma("dQ(n-1)", Wait("ds_full", earlier=True))
        yield from _early_turn(plan, "dQ(n-1)")
        yield over("dP(n) is there", ("dP(n)",))
        yield of_ds
    else:
        yield Step("dS(n-1) is there", "wait", (Wait("ds_full", earlier=True),))
        if plan.context["capped"]:
            beside = ("dQ(n-1)",)
            yield over("dP(n), dV(n) are there", ("dP(n)", "dV(n)"))
        else:
            yield over("dP(n) is there", ("dP(n)",))
        yield of_ds
        yield mma("dQ(n-1)")
    are = "are" if beside[1:] else "is"
    yield over(f"{', '.join(beside)} {are} there", beside, Signal("do_empty", WARPS))
    yield mma("dK(n)")
    yield Step(
        "sdS is visible to tensor cores", "wait", (), (Signal("ds_full", WARPS),)
    )
    yield _add(plan, "dQ(n-1)")
    yield mma("S(n+1)", Wait("q_full"))
    freed = Signal("q_empty", WARPS)
    yield over("dK(n), S(n+1) are there", ("dK(n)", "S(n+1)"), freed)


def _tile(plan: KernelPlan) -> Iterator[Step]:
    """From dK of a tile's last block to its dQ, beside the next tile's first block."""
    beside = plan.context["first_stores"]  # dV beside dK, the V stage freed behind P
    stored = (
        Step("dV in 16 bits, in its V's place", "math"),
        Step("store dV", "tma", issues="store dV"),
    )
    freed_v = over("dK has left", ("store dK",), Signal("v_empty", 1))
    yield mma("dK(last)")
    if beside:
        yield from stored
    yield take(WARPS)
    yield mma("next S(0)", Wait("k_full"), Wait("q_full"))
    freed = Signal("q_empty", WARPS)
    yield over("dK, S(0) are there", ("dK(last)", "next S(0)"), freed)
    if not beside:
        yield from stored
    yield over("dV has left", ("store dV",))
    yield Step("dK * scale in 16 bits, in the same place", "math")
    yield Step("store dK", "tma", issues="store dK")
    if not beside:
        yield freed_v
    yield mma("dP(0)", Wait("v_full"), Wait("do_full"))
    yield Step("exp2; P(0) in 16 bits", "math")
    if beside:
        yield freed_v
    yield mma("dV(0)")
    yield mma(LAST, Wait("ds_full", earlier=True))
    yield from _early_turn(plan, LAST)
    yield over("dP(0) is there", ("dP(0)",))
    yield Step("dS(0) = P * dP, also to sdS", "math")
    freed = Signal("do_empty", WARPS)
    yield over(f"dV(0), {LAST} are there", ("dV(0)", LAST), freed)
    both = Signal("ds_full", WARPS), Signal("k_empty", WARPS)
    yield Step("sdS is visible to tensor cores", "wait", (), both)
    if plan.context["watched"]:
        yield _add(plan, LAST)


def _add(plan: KernelPlan, name: str) -> Step:
    """Sums of dQ, in turn, or behind the first tile's, where other warps watch."""
    text = f"add {name} to its sums"
    if not plan.context["watched"]:
        return Step(text, "math")
    if plan.context["first_stores"]:
        text = f"store {name} or add it; of the last tile at its block, write it"
    added = Signal("added_full", WARPS)
    turn = () if plan.context["turn_beside_ds"] else (Wait("turn_full", earlier=True),)
    return Step(text, "math", turn, (added,))


def _early_turn(plan: KernelPlan, name: str) -> Iterator[Step]:
    """The wait for its turn, where it is beside dS."""
    if plan.context["turn_beside_ds"]:
        yield Step(f"{name} may be summed", "wait", (Wait("turn_full", earlier=True),))


def _turns(plan: KernelPlan, *, end: bool) -> Iterator[tuple[Step, ...]]:
    """Of the warp that watches who adds, then of the one that says that this tile has."""
    handed, added = ("next block 0", LAST) if end else ("block n", "dQ(n-1)")
    free, given = Wait("turn_empty", earlier=True), Signal("turn_full", 1)
    taken = (take(1),) if end else ()
    waits, counts = (
        f"{handed}: its sum is free",
        "say so to all CTAs",
    )
    if plan.context["hands_turns"]:
        waits, counts = (
            f"hand over the turn of {handed}",
            "count it, once its sums are in L2",
        )
    yield *taken, Step(waits, "wait", (free,), (given,))
    seen = Step(
        f"{added} is added", "wait", (Wait("added_full"),), (Signal("turn_empty", 1),)
    )
    yield *taken, seen, Step(counts, "math")


# --- of warpgroups that have products of their own ----------------------------------------


def _slice(name: str, number: int, retires: tuple[str, ...]) -> Iterator[Step]:
    yield over(f"{', '.join(retires)} {'are' if retires[1:] else 'is'} there", retires)
    yield Step(f"add slice {number} of {name} to its sums", "math")


def _block_of_dv(plan: KernelPlan) -> Iterator[Step]:
    first, second = "dQ(n-1), slice 0", "dQ(n-1), slice 1"
    masks = "masks of S(n); " if plan.context["masked"] else ""
    yield mma(first, Wait("ds_full", earlier=True))
    yield Step(f"{masks}exp2; P(n) in 16 bits", "math")
    yield Step("P(n) to the other warpgroup", "math", (), (Signal("p_full", WARPS),))
    yield mma("dV(n)", Wait("do_full"))
    yield from _slice("dQ(n-1)", 0, (first,))
    if plan.context["two_slices_of_dv"]:
        yield mma(second)
    yield over("dV(n) is there", ("dV(n)",), Signal("do_empty", WARPS))
    yield mma("S(n+1)", Wait("q_full"))
    if plan.context["two_slices_of_dv"]:
        yield from _slice("dQ(n-1)", 1, (second,))
    yield over("S(n+1) is there", ("S(n+1)",), Signal("q_empty", WARPS))


def _block_of_dk(plan: KernelPlan) -> Iterator[Step]:
    first, _ = _slices(plan)
    one, other = (f"dQ(n), slice {first + i}" for i in range(2))
    yield Step("dS(n) = P * dP, also to sdS", "math", (Wait("p_full"),))
    yield mma("dK(n)", Wait("q_full", earlier=True))
    yield Step(
        "sdS is visible to tensor cores", "wait", (), (Signal("ds_full", WARPS),)
    )
    yield mma(one, Wait("ds_full"))
    yield mma("dP(n+1)", Wait("do_full"))
    yield over("dK(n) is there", ("dK(n)",), Signal("q_empty", WARPS))
    yield from _slice("dQ(n)", first, (one,))
    yield mma(other)
    freed = Signal("do_empty", WARPS)
    yield over(f"dP(n+1), {other} are there", ("dP(n+1)", other), freed)
    yield Step(f"add slice {first + 1} of dQ(n) to its sums", "math")


def _tile_of_dv(plan: KernelPlan) -> Iterator[Step]:
    waits: tuple[Wait, ...] = (Wait("ds_full", earlier=True),)
    for i in range(_slices(plan)[0]):
        name = f"{LAST}, slice {i}"
        yield mma(name, *waits)
        yield from _slice(LAST, i, (name,))
        waits = ()
    yield Step("both warpgroups meet", "wait")
    yield Step("dV in 16 bits, in V's place", "math")
    yield Step("store dV", "tma", issues="store dV")
    yield take(WARPS)
    yield over("dV has left", ("store dV",), Signal("v_empty", 1))
    yield mma("next S(0)", Wait("k_full"), Wait("q_full"))
    yield over("S(0) is there", ("next S(0)",))


def _tile_of_dk(plan: KernelPlan) -> Iterator[Step]:
    yield Step("both warpgroups meet", "wait")
    yield Step("dK * scale in 16 bits, in K's place", "math")
    yield Step("store dK", "tma", issues="store dK")
    yield take(WARPS)
    yield over("dK has left", ("store dK",), Signal("k_empty", 1))
    yield mma("next dP(0)", Wait("v_full"), Wait("do_full"))
    yield Step("K is there for dQ", "wait", (Wait("k_full", earlier=True),))
    yield over("dP(0) is there", ("next dP(0)",))


_Steps = Callable[[KernelPlan], Iterator[Step]]
SPLIT_BLOCK: Final[tuple[_Steps, ...]] = (_block_of_dv, _block_of_dk)
SPLIT_TILE: Final[tuple[_Steps, ...]] = (_tile_of_dv, _tile_of_dk)
