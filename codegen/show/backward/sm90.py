# SPDX-License-Identifier: Apache-2.0
"""Roles, products and steps of an sm90 backward kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from ...arch import sm90
from ...planning.backward import CLUSTER_CTAS
from ...planning.kernel_plan import KernelPlan
from ...planning.protocol import Lane, Phase, Signal, Step, Wait
from ...planning.sm90_backward import (
    K_STEP,
    PASS_WARP,
    SCHEDULER_WARP,
    SEND_WARP,
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
OF_PAIRED: Final = ("S, P and dV", "dP, dS and dK")


def role_rows(plan: KernelPlan) -> Iterator[tuple[str, ...]]:
    """Yield (role, warps, registers, what it does)."""
    kernel = main_of(plan)
    of = {each.role: each.per_thread for each in kernel.registers}
    yield "producer", "0", f"{of['producer']:>9}", "loads by TMA"
    handed, paired = plan.context["hands_turns"], plan.context["paired"]
    if plan.context["watched"]:
        watches = "waits until the first tile has stored dQ of a block, and tells math"
        passes = "tells other CTAs, once both warpgroups have stored"
        if handed:
            watches = (
                "watches for the turns to add dQ of a block, and hands them to math"
            )
            passes = "passes a turn to the next tile, once both warpgroups have added"
        yield "watcher", f"{WATCH_WARP}", f"{of['producer']:>9}", watches
        if not paired:
            yield "passer", f"{PASS_WARP}", f"{of['producer']:>9}", passes
    if paired:
        sends = "copies dS to the other CTA, and tells it that its own has come"
        if handed:
            sends = f"{sends}; passes turns"
        yield "sender", f"{SEND_WARP}", f"{of['producer']:>9}", sends
    order = "the longest of a section first"
    if plan.context["falling_sections"]:
        order = "the last of a head first, of the last section the longest"
    elif handed and plan.context["right_edge"]:
        order = "the last of a head first"
    elif plan.context["in_strips"]:
        order = f"of {numbers(plan)['STRIPS']} strips of the keys in turn"
    tiles = "pairs of KV tiles, in CTA 0" if paired else "KV tiles"
    scheduler = f"draws tickets for {tiles}, {order}"
    if plan.context["clears_ahead"]:
        scheduler = f"{scheduler}; clears sums of dQ of later heads"
    yield "scheduler", f"{SCHEDULER_WARP}", f"{of['producer']:>9}", scheduler
    (math,) = (each for each in kernel.registers if each.role == "math")
    for index in range(math.warpgroups):
        first = WARPS * (index + 1)
        keys = f"keys {64 * index} to {64 * index + 63} of the tile"
        warps = f"{first} to {first + WARPS - 1}"
        does = f"the products of {keys}; half of dQ of each block"
        if paired:
            does = f"{OF_PAIRED[index]} of the tile's keys; {_slice_of(plan, index)}"
        yield f"math {index}", warps, f"{math.per_thread:>9}", does


def _slice_of(plan: KernelPlan, index: int) -> str:
    """The columns of dQ that a warpgroup sums, of each CTA of a pair."""
    known = numbers(plan)
    columns, of_cta = known["SLICE_COLUMNS"], known["DQ_COLUMNS"]
    first = [cta * of_cta + index * columns for cta in range(CLUSTER_CTAS)]
    spans = " or ".join(f"{each}-{each + columns - 1}" for each in first)
    return f"columns {spans} of dQ"


def products(plan: KernelPlan) -> tuple[Product, ...]:
    """The five, in the order of a step."""
    if plan.context["paired"]:
        return _products_of_pair(plan)
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
            *(
                "dP^T = V dO^T",
                _kept(plan, "V", own),
                "sdO",
                "starts at -D, becomes dS^T",
            ),
            *((keys, rows, v), both, 2, _kept_columns(plan, "V")),
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
            *("S^T = K Q^T", _kept(plan, "K", own), "sQ", start),
            *((keys, rows, qk), both, 2, _kept_columns(plan, "K")),
        ),
    )


def _kept_columns(plan: KernelPlan, tensor: str) -> int:
    """Of K or V, which a product reads from registers, where they stay for a tile."""
    return numbers(plan).get(f"{tensor}_STEPS", 0) * K_STEP


def _kept(plan: KernelPlan, tensor: str, rows: str = "") -> str:
    """Where the K of S is, or the V of dP."""
    known, kept = numbers(plan), _kept_columns(plan, tensor)
    if kept == known["HEAD_DIM_QK" if tensor == "K" else "HEAD_DIM_V"]:
        return "registers, for a tile"
    place = f"s{tensor}{', ' if rows else ''}{rows}"
    return f"{place}; {kept} columns in registers" if kept else place


def _start_of_s(plan: KernelPlan) -> str:
    if plan.context["log2_statistic"]:
        return "becomes P^T"
    return f"starts at {statistic(plan)}, becomes P^T"


def places(plan: KernelPlan) -> Places:
    """Where results are in a step."""
    if plan.context["paired"]:
        return Places("registers", "by sdS", "sdS, for both CTAs", "sdS")
    return Places("registers", "P", "sdS, for both warpgroups", "sdS")


def _products_of_pair(plan: KernelPlan) -> tuple[Product, ...]:
    """Those of the first warpgroup, then those of the second; dQ is of both, of both CTAs' keys."""
    known = numbers(plan)
    rows, qk, v = known["TILE_Q"], known["HEAD_DIM_QK"], known["HEAD_DIM_V"]
    keys, columns = known["TILE_KV"], known["SLICE_COLUMNS"]
    start, end = _start_of_s(plan), "until the tile's end"
    of_slice = rows, columns, CLUSTER_CTAS * keys
    to_sums = f"{columns} columns of it, added to the sums"
    return (
        Product(
            *("S^T = K Q^T", _kept(plan, "K"), "sQ", start),
            *((keys, rows, qk), 1, 2, _kept_columns(plan, "K")),
        ),
        Product(
            *("dV += P^T dO", "registers", "sdO, transposed", end),
            *((keys, v, rows), 1, 1),
        ),
        Product(
            *("dP^T = V dO^T", _kept(plan, "V"), "sdO", "starts at -D, becomes dS^T"),
            *((keys, rows, v), 1, 2, _kept_columns(plan, "V")),
        ),
        Product(
            *("dK += dS^T Q", "registers", "sQ, transposed", end),
            *((keys, qk, rows), 1, 1),
        ),
        Product(
            *("dQ = dS K", "sdS, transposed", "sK, transposed", to_sums),
            *(of_slice, known["WARPGROUPS"], 2),
        ),
    )


def stored_tiles(plan: KernelPlan) -> int:
    """How many tiles of P's size are stored to shared memory, or read there by other than products,
    in a step: dS.

    In a pair of CTAs five: P is stored and read, dS is stored, and read by the copy to the other
    CTA, whose own dS is written here as well.
    """
    return 5 if plan.context["paired"] else 1


def phases(plan: KernelPlan) -> Iterator[Phase]:
    """What happens for each block of rows, and between two KV tiles."""
    of = {each.role: each for each in main_of(plan).registers}
    beside, math = of["producer"].per_thread, of["math"]

    def lanes(
        produce: tuple[Step, ...], draw: tuple[Step, ...], end: bool
    ) -> Iterator[Lane]:
        yield Lane("producer", "warp 0", beside, produce)
        if plan.context["watched"]:
            watch = tuple(_watch(plan, end=end))
            yield Lane("watcher", f"warp {WATCH_WARP}", beside, watch)
        if plan.context["paired"]:
            send = tuple(_send_tile(plan) if end else _send_block(plan))
            yield Lane("sender", f"warp {SEND_WARP}", beside, send)
        elif plan.context["watched"]:
            passes = tuple(_pass(plan, end=end))
            yield Lane("passer", f"warp {PASS_WARP}", beside, passes)
        if draw:
            yield Lane("scheduler", f"warp {SCHEDULER_WARP}", beside, draw)
        for index in range(math.warpgroups):
            first = WARPS * (index + 1)
            warps = f"warps {first} to {first + WARPS - 1}"
            if plan.context["paired"]:
                of_index = PAIRED_TILE[index] if end else PAIRED_BLOCK[index]
                steps = of_index(plan)
            else:
                steps = _tile(plan) if end else _block(plan)
            yield Lane(f"math {index}", warps, math.per_thread, tuple(steps))

    block = (
        load(plan, "do", "dO(n), -D"),
        load(plan, "q", f"Q(n+1), {statistic(plan)}"),
    )
    title = "One block of rows: dP beside P, dV and dQ of block n-1 beside dS, dK and S of n+1"
    if plan.context["paired"]:
        block = (
            load(plan, "q", f"Q(n+1), {statistic(plan)}"),
            load(plan, "do", "dO(n+1), -D"),
        )
        title = "One block of rows: dQ of block n-1 beside P, its sums beside dV and dK of block n"
    yield Phase(title, tuple(lanes(block, (), end=False)))
    tile = (
        *take_for_loads(_ctas(plan)),
        load(plan, "k", "next K"),
        load(plan, "q", "next Q(0)"),
        load(plan, "v", "next V"),
        load(plan, "do", "next dO(0)"),
    )
    free, full = Wait("ticket_empty", earlier=True), Signal("ticket_full", 1)
    text = "draw a ticket" + (", hand it to both CTAs" if _ctas(plan) > 1 else "")
    draw = (Step(text, "math", (free,), (full,)),)
    yield Phase("From one KV tile to the next", tuple(lanes(tile, draw, end=True)))


def _ctas(plan: KernelPlan) -> int:
    """CTAs that a ticket is for."""
    return CLUSTER_CTAS if plan.context["paired"] else 1


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
    if not plan.context["sums_behind_s"]:
        yield _add(plan, "dQ(n-1)")
    yield mma("S(n+1)", Wait("q_full"))
    yield from _behind_s(plan, "dQ(n-1)")
    freed = Signal("q_empty", WARPS)
    yield over("dK(n), S(n+1) are there", ("dK(n)", "S(n+1)"), freed)


def _tile(plan: KernelPlan) -> Iterator[Step]:
    """From dK of a tile's last block to its dQ, beside the next tile's first block."""
    beside = plan.context["first_stores"]  # dV beside dK
    late = plan.context["frees_v_late"]
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
    yield from _behind_s(plan, "dQ(last-1)")
    freed = Signal("q_empty", WARPS)
    yield over("dK, S(0) are there", ("dK(last)", "next S(0)"), freed)
    if not beside:
        yield from stored
    yield over("dV has left", ("store dV",))
    yield Step("dK * scale in 16 bits, in the same place", "math")
    yield Step("store dK", "tma", issues="store dK")
    if not late:
        yield freed_v
    yield mma("dP(0)", Wait("v_full"), Wait("do_full"))
    yield Step("exp2; P(0) in 16 bits", "math")
    if late:
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
    if plan.context["watched"] and not plan.context["sums_behind_s"]:
        yield _add(plan, LAST)


def _add(plan: KernelPlan, name: str) -> Step:
    """Sums of dQ, in turn, or behind the first tile's, where other warps watch."""
    in_fp16 = " in fp16" if plan.context["half_sums"] else ""
    text = f"add {name}{in_fp16} to its sums"
    if not plan.context["watched"]:
        return Step(text, "math")
    if plan.context["first_stores"]:
        text = f"store {name} or add it; of the last tile at its block, write it"
    added = () if plan.context["arrives_late"] else (Signal("added_full", WARPS),)
    turn = () if plan.context["turn_beside_ds"] else (Wait("turn_full", earlier=True),)
    return Step(text, "math", turn, added)


def _behind_s(plan: KernelPlan, name: str) -> Iterator[Step]:
    """What sums of dQ have beside the next product: all of it, or the news of it alone."""
    if plan.context["sums_behind_s"]:
        yield _add(plan, name)
    elif plan.context["arrives_late"]:
        yield Step(f"{name} is added", "wait", (), (Signal("added_full", WARPS),))


def _early_turn(plan: KernelPlan, name: str) -> Iterator[Step]:
    """The wait for its turn, where it is beside dS."""
    if plan.context["turn_beside_ds"]:
        yield Step(f"{name} may be summed", "wait", (Wait("turn_full", earlier=True),))


def _watch(plan: KernelPlan, *, end: bool) -> Iterator[Step]:
    """Of the warp that watches who adds."""
    handed = "next block 0" if end else "block n"
    free, given = Wait("turn_empty", earlier=True), Signal("turn_full", 1)
    waits = f"{handed}: its sum is free"
    if plan.context["hands_turns"]:
        waits = f"hand over the turn of {handed}"
    if end:
        yield take(1, _ctas(plan))
    yield Step(waits, "wait", (free,), (given,))


def _pass(plan: KernelPlan, *, end: bool) -> Iterator[Step]:
    """Of the warp that says that this tile has added."""
    counts = "say so to all CTAs"
    if plan.context["hands_turns"]:
        counts = "count it, once its sums are in L2"
    if end:
        yield take(1)
    yield _added(LAST if end else "dQ(n-1)")
    yield Step(counts, "math")


def _added(name: str, *, earlier: bool = False) -> Step:
    seen = Wait("added_full", earlier=earlier)
    return Step(f"{name} is added", "wait", (seen,), (Signal("turn_empty", 1),))


# --- of pairs of CTAs, whose warpgroups have products of their own ------------------------


def _send_block(plan: KernelPlan) -> Iterator[Step]:
    """Of the sender, from where it waits for the other CTA's dS of block n-1."""
    come, tell = Wait("peer_full", earlier=True), Signal("ds_empty", 1)
    text = "the other CTA's dS(n-1) is there: tell it"
    yield Step(text, "wait", (come,), (tell,))
    if plan.context["watched"]:
        yield from _pass_on("dQ(n-2)", earlier=True)
    ready, nbytes = (Wait("ds_full"), Wait("peer_empty")), numbers(plan)["DS_BYTES"]
    sent = Signal("peer_full", 1, tx_bytes=nbytes)
    yield Step("copy dS(n) to the other CTA", "tma", ready, (sent,))


def _send_tile(plan: KernelPlan) -> Iterator[Step]:
    if plan.context["watched"]:
        yield from _pass_on(LAST)
    yield take(1, CLUSTER_CTAS)


def _pass_on(name: str, *, earlier: bool = False) -> Iterator[Step]:
    yield _added(name, earlier=earlier)
    yield Step("count it, once its sums are in L2", "math")


def _issue_slice(name: str) -> Step:
    """A warpgroup's columns of dQ, of this CTA's keys and of the other one's."""
    ready = Wait("ds_full", earlier=True), Wait("peer_full", earlier=True)
    return mma(name, *ready)


def _slice_is_there() -> Step:
    """dS has been read: this CTA's, and the other one's, which that CTA is told."""
    freed = Signal("ds_empty", WARPS), Signal("peer_empty", WARPS)
    return over("dQ(n-1) is there", ("dQ(n-1)",), *freed)


def _add_slice(plan: KernelPlan, name: str) -> Step:
    text = f"add {name} to its sums"
    if not plan.context["watched"]:
        return Step(text, "math")
    turn, added = Wait("turn_full", earlier=True), Signal("added_full", WARPS)
    return Step(text, "math", (turn,), (added,))


def _block_of_dv(plan: KernelPlan) -> Iterator[Step]:
    masks = "masks of S(n); " if plan.context["masked"] else ""
    yield _issue_slice("dQ(n-1)")
    yield Step(f"{masks}exp2; P(n) in 16 bits", "math")
    yield _slice_is_there()
    to_dk = Wait("ds_empty"), Signal("p_full", WARPS)
    yield Step("P(n) to sdS, where dS(n-1) was", "math", to_dk[:1], to_dk[1:])
    yield mma("dV(n)", Wait("do_full", earlier=True))
    yield _add_slice(plan, "dQ(n-1)")
    yield mma("S(n+1)", Wait("q_full"))
    yield over("dV(n) is there", ("dV(n)",), Signal("do_empty", WARPS))
    yield over("S(n+1) is there", ("S(n+1)",), Signal("q_empty", WARPS))


def _block_of_dk(plan: KernelPlan) -> Iterator[Step]:
    yield _issue_slice("dQ(n-1)")
    yield _slice_is_there()
    yield Step("dS(n) = P * dP, to sdS, where P was", "math", (Wait("p_full"),))
    yield mma("dK(n)", Wait("q_full", earlier=True))
    stored = Signal("ds_full", WARPS)
    yield Step("sdS is visible to tensor cores", "wait", (), (stored,))
    yield _add_slice(plan, "dQ(n-1)")
    yield mma("dP(n+1)", Wait("do_full"))
    yield over("dK(n) is there", ("dK(n)",), Signal("q_empty", WARPS))
    yield over("dP(n+1) is there", ("dP(n+1)",), Signal("do_empty", WARPS))


def _last_slice(plan: KernelPlan) -> Iterator[Step]:
    """dQ of a tile's last block; its dS is freed in the next tile's first step."""
    yield _issue_slice(LAST)
    yield over(f"{LAST} is there", (LAST,), Signal("k_empty", WARPS))
    yield _add_slice(plan, LAST)


def _tile_of_dv(plan: KernelPlan) -> Iterator[Step]:
    yield from _last_slice(plan)
    yield Step("store dV in 16 bits, from registers", "math")
    yield take(WARPS, CLUSTER_CTAS)
    yield mma("next S(0)", Wait("k_full"), Wait("q_full"))
    yield over("S(0) is there", ("next S(0)",))


def _tile_of_dk(plan: KernelPlan) -> Iterator[Step]:
    yield Step("the last dP has come", "wait", (), (Signal("v_empty", WARPS),))
    yield from _last_slice(plan)
    yield Step("store dK * scale in 16 bits, from registers", "math")
    yield take(WARPS, CLUSTER_CTAS)
    yield mma("next dP(0)", Wait("v_full"), Wait("do_full"))
    yield Step("K is there for dQ", "wait", (Wait("k_full", earlier=True),))
    yield over("dP(0) is there", ("next dP(0)",))


_Steps = Callable[[KernelPlan], Iterator[Step]]
PAIRED_BLOCK: Final[tuple[_Steps, ...]] = (_block_of_dv, _block_of_dk)
PAIRED_TILE: Final[tuple[_Steps, ...]] = (_tile_of_dv, _tile_of_dk)
