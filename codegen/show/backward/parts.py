# SPDX-License-Identifier: Apache-2.0
"""What the tables and pictures of a backward kernel are made of, on any architecture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ...planning.backward import statistic_of
from ...planning.kernel_plan import DevicePlan, KernelPlan
from ...planning.protocol import Signal, Step, Wait

MAIN: Final = "main"
WARPS: Final = 4  # of a warpgroup


@dataclass(frozen=True)
class Product:
    """One of the five. a, b: where operands are. to: what the accumulator, in fp32, becomes.

    shape: (m, n, k) of whoever issues it. times: how many such there are in a step.
    in_smem: how many of the operands are read from shared memory. kept: how much of k of A is in
    registers for a whole tile, though A is in shared memory.
    """

    name: str
    a: str
    b: str
    to: str
    shape: tuple[int, int, int]
    times: int
    in_smem: int
    kept: int = 0

    @property
    def smem_bytes(self) -> int:
        """Of 16-bit operands that are read in a step."""
        m, n, k = self.shape
        of_a = m * (k - self.kept) * (self.in_smem == 2)
        return 2 * self.times * (k * n + of_a)

    @property
    def flops(self) -> int:
        """Of a step."""
        m, n, k = self.shape
        return 2 * self.times * m * n * k


@dataclass(frozen=True)
class Places:
    """Where results are in a step. results: S, dP and what they become, dV, dK and dQ.

    p: how P comes to dP. ds: where dS is for dQ. shared: what is in shared memory, by name.
    """

    results: str
    p: str
    ds: str
    shared: str


def numbers(plan: KernelPlan) -> Mapping[str, int]:
    """The plan's numbers by name."""
    return {each.name: int(each.value) for each in (*plan.chosen, *plan.derived)}


def statistic(plan: KernelPlan) -> str:
    """That of a row for S."""
    log2, scaled = plan.context["log2_statistic"], plan.context["half_sums"]
    return statistic_of(log2=log2, scaled=scaled)


def main_of(plan: KernelPlan) -> DevicePlan:
    """The kernel of the three that has the products."""
    return next(each for each in plan.kernels if each.name == MAIN)


def load(plan: KernelPlan, ring: str, what: str) -> Step:
    """A load into a ring's stage, which was freed before."""
    nbytes = numbers(plan)[f"{ring.upper()}_TX_BYTES"]
    full = Signal(f"{ring}_full", 1, tx_bytes=nbytes)
    return Step(f"load {what}", "tma", (Wait(f"{ring}_empty", earlier=True),), (full,))


def take(warps: int, ctas: int = 1) -> Step:
    """So many warps take the next tile, whose ticket was drawn while this one was computed.

    ctas: that a ticket is for, whose warps all take it.
    """
    ready, freed = (
        Wait("ticket_full", earlier=True),
        Signal("ticket_empty", warps, ctas=ctas),
    )
    return Step("take the next KV tile", "wait", (ready,), (freed,))


def take_for_loads(ctas: int = 1) -> Iterator[Step]:
    """The load warp's way to the next tile: it gives a ticket back once its loads are issued."""
    freed = Signal("ticket_empty", 1, ctas=ctas)
    yield Step("all loads of the tile are issued", "wait", (), (freed,))
    yield Step("read the next ticket", "wait", (Wait("ticket_full", earlier=True),))


def mma(name: str, *waits: Wait) -> Step:
    """A product that is issued."""
    return Step(name, "mma", waits, issues=name)


def over(text: str, retires: tuple[str, ...], *freed: Signal) -> Step:
    """A wait for asynchronous work, by name, and what is free then."""
    return Step(text, "wait", (), freed, retires=retires)
