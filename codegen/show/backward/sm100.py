# SPDX-License-Identifier: Apache-2.0
"""Roles, products and steps of an sm100 backward kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...planning.kernel_plan import WARPGROUP_THREADS, KernelPlan
from ...planning.protocol import Lane, Phase, Signal, Step, Wait
from .parts import (
    WARPS,
    Places,
    Product,
    load,
    main_of,
    numbers,
    over,
    take,
    take_for_loads,
)

FLOPS: Final = 8192  # of an SM and a clock
ACCUMULATORS: Final = "in tensor memory"


def role_rows(plan: KernelPlan) -> Iterator[tuple[str, ...]]:
    """Yield (role, warps, registers, what it does)."""
    math, add, others = (f"{each.per_thread:>9}" for each in main_of(plan).registers)
    known, first = numbers(plan), _first_warps(plan)
    half = known["PART_COLUMNS"]
    for index in range(known["WARPGROUPS"]):
        rows = f"rows {half * index} to {half * index + half - 1} of a block"
        does = f"P and dS of {rows}, a key per lane; half of dV's and dK's columns"
        yield f"math {index}", _four(WARPS * index), math, does
    yield "add", _four(first["add"]), add, "adds dQ to its sums, a row per lane"
    for role, does in (
        ("load", "loads by TMA"),
        ("mma", "allocates the tensor memory, issues all products"),
        ("scheduler", "draws tickets for KV tiles, the longest of a section first"),
    ):
        yield role, str(first[role]), others, does


def _first_warps(plan: KernelPlan) -> dict[str, int]:
    """The first warp, or the only one, of the roles beside math."""
    known = numbers(plan)
    return {
        role: known[f"{role.upper()}_WARP"]
        for role in ("add", "load", "mma", "scheduler")
    }


def _four(first: int) -> str:
    return f"{first} to {first + WARPS - 1}"


def products(plan: KernelPlan) -> tuple[Product, ...]:
    """The five, in the order of a step."""
    known = numbers(plan)
    rows, keys = known["TILE_Q"], known["TILE_KV"]
    qk, v, end = known["HEAD_DIM_QK"], known["HEAD_DIM_V"], "until the tile's end"
    in_place, added = "which {} in 16 bits replaces", "added to the sums"
    where = "where dP was, " if plan.context["dq_over_dp"] else ""
    return (
        Product(
            *("dV += P^T dO", "tensor memory", "sdO, transposed", end),
            *((keys, v, rows), 1, 1),
        ),
        Product(
            *("dK += dS^T Q", "tensor memory", "sQ, transposed", end),
            *((keys, qk, rows), 1, 1),
        ),
        Product(
            *("S^T = K Q^T", "sK", "sQ", in_place.format("P^T")),
            *((keys, rows, qk), 1, 2),
        ),
        Product(
            *("dQ = dS K", "sdS, transposed", "sK, transposed", f"{where}{added}"),
            *((rows, qk, keys), 1, 2),
        ),
        Product(
            *("dP^T = V dO^T", "sV", "sdO", in_place.format("dS^T")),
            *((keys, rows, v), 1, 2),
        ),
    )


def places(plan: KernelPlan) -> Places:
    """Where results are in a step."""
    return Places("tensor memory", "P", "sdS", "sdS")


def stored_tiles(plan: KernelPlan) -> int:
    """How many tiles of P's size are stored to shared memory in a step: dS."""
    return 1


def phases(plan: KernelPlan) -> Iterator[Phase]:
    """What happens for each block of rows, and between two KV tiles."""
    math, add, others = main_of(plan).registers

    def lanes(end: bool) -> Iterator[Lane]:
        loads, products, of_math, of_sums = (
            (_load_tile, _multiply_tile, _math_tile, _add_tile)
            if end
            else (_load_block, _multiply_block, _math_block, _add_block)
        )
        first = _first_warps(plan)
        warp = {role: f"warp {number}" for role, number in first.items()}
        yield Lane("load", warp["load"], others.per_thread, tuple(loads(plan)))
        yield Lane("mma", warp["mma"], others.per_thread, tuple(products(plan)))
        if end:
            free, full = Wait("ticket_empty", earlier=True), Signal("ticket_full", 1)
            draw = (Step("draw a ticket", "math", (free,), (full,)),)
            yield Lane("scheduler", warp["scheduler"], others.per_thread, draw)
        for index in range(math.warpgroups):
            warps = f"warps {_four(WARPS * index)}"
            yield Lane(f"math {index}", warps, math.per_thread, tuple(of_math(plan)))
        warps = f"warps {_four(first['add'])}"
        yield Lane("add", warps, add.per_thread, tuple(of_sums(plan)))

    title = "One block of rows: dV, dK and dQ of block n beside P of block n+1"
    yield Phase(title, tuple(lanes(end=False)))
    yield Phase("From one KV tile to the next", tuple(lanes(end=True)))


def _load_block(plan: KernelPlan) -> Iterator[Step]:
    yield load(plan, "q", "Q(n+1)")
    yield _load_statistics(plan, "n+1")
    yield load(plan, "do", "dO(n+1)")


def _load_statistics(plan: KernelPlan, block: str) -> Step:
    full = Signal("stats_full", 1, tx_bytes=numbers(plan)["STATS_TX_BYTES"])
    free = Wait("stats_empty", earlier=True)
    return Step(f"load -LSE * log2(e), -D of {block}", "tma", (free,), (full,))


def _issue(name: str, *waits: Wait, commits: tuple[str, ...]) -> Step:
    """A product that is issued, and the barriers that a commit behind it arrives at."""
    return Step(name, "mma", waits, tuple(Signal(each, 1) for each in commits))


def _multiply_block(plan: KernelPlan) -> Iterator[Step]:
    left = Wait("dq_empty", earlier=not plan.context["dq_over_dp"])
    of_dq, of_dp = ((), (left,)) if plan.context["dq_over_dp"] else ((left,), ())
    yield _issue("dV(n)", Wait("s_empty", earlier=True), commits=("do_empty",))
    yield _issue("dK(n)", Wait("dp_empty"), commits=("q_empty",))
    yield _issue("S(n+1)", Wait("q_full"), commits=("s_full",))
    yield _issue("dQ(n)", *of_dq, commits=("dq_full",))
    yield _issue("dP(n+1)", Wait("do_full"), *of_dp, commits=("dp_full",))


def _math_block(plan: KernelPlan) -> Iterator[Step]:
    masks = "masks of S(n+1); " if plan.context["masked"] else ""
    dp_full = Wait("dp_full", earlier=True)
    freed = Signal("stats_empty", WARPS), Signal("dp_empty", WARPGROUP_THREADS)
    yield Step("dS(n) = P * (dP - D), also to sdS", "math", (dp_full,), freed)
    ready = Wait("s_full"), Wait("stats_full")
    text = f"{masks}exp2; P(n+1) in 16 bits"
    yield Step(text, "math", ready, (Signal("s_empty", WARPGROUP_THREADS),))


def _add_block(plan: KernelPlan) -> Iterator[Step]:
    yield from _add("dQ(n)")


def _add(name: str) -> Iterator[Step]:
    freed = Signal("dq_empty", WARPGROUP_THREADS)
    yield Step(f"load {name}", "math", (Wait("dq_full"),), (freed,))
    yield Step(f"add {name} to its sums", "math")


def _load_tile(plan: KernelPlan) -> Iterator[Step]:
    yield from take_for_loads()
    yield _load_once(plan, "k", "next K")
    yield load(plan, "q", "next Q(0)")
    yield _load_statistics(plan, "block 0")
    yield _load_once(plan, "v", "next V")
    yield load(plan, "do", "next dO(0)")


def _load_once(plan: KernelPlan, ring: str, what: str) -> Step:
    """K or V, which wait for this tile's where they have one stage."""
    known, name = numbers(plan), ring.upper()
    free = Wait(f"{ring}_empty", earlier=known["KV_STAGES"] > 1)
    full = Signal(f"{ring}_full", 1, tx_bytes=known[f"{name}_TX_BYTES"])
    return Step(f"load {what}", "tma", (free,), (full,))


def _multiply_tile(plan: KernelPlan) -> Iterator[Step]:
    last = "dq_full", "dkv_full", "k_empty", "v_empty"
    of_dq, of_dp = (
        ((), (Wait("dq_empty"),))
        if plan.context["dq_over_dp"]
        else ((Wait("dq_empty", earlier=True),), ())
    )
    yield _issue("dQ(last)", *of_dq, commits=last)
    yield take(1)
    yield _issue("next S(0)", Wait("k_full"), Wait("q_full"), commits=("s_full",))
    ready = Wait("v_full"), Wait("do_full"), *of_dp
    yield _issue("next dP(0)", *ready, commits=("dp_full",))


def _math_tile(plan: KernelPlan) -> Iterator[Step]:
    yield Step("dV in 16 bits, in dS's place", "math", (Wait("dkv_full"),))
    yield Step("store dV", "tma", issues="store dV")
    yield over("dV has left", ("store dV",))
    yield Step("dK * scale in 16 bits, in the same place", "math")
    yield Step("store dK", "tma", issues="store dK")
    yield over("dK has left", ("store dK",))
    yield take(WARPS)
    ready = Wait("s_full"), Wait("stats_full")
    text = "exp2; P(0) in 16 bits"
    yield Step(text, "math", ready, (Signal("s_empty", WARPGROUP_THREADS),))


def _add_tile(plan: KernelPlan) -> Iterator[Step]:
    yield from _add("dQ(last)")
    yield take(WARPS)
