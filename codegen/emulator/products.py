# SPDX-License-Identifier: Apache-2.0
"""Matrix products of a warpgroup: wgmma with its fence, groups and waits.

From its issue to the wait for its group a product owns its accumulators: their registers hold NaN,
and whoever reads one is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import numerics, wgmma
from .accumulation import multiply_add
from .checks import Clock, Operation
from .lanes import IN_FLIGHT, Lanes, Mask, warps_of
from .memory import SharedMemory
from .report import Fault, Kind

if TYPE_CHECKING:
    from .warpgroup import Warpgroup


@dataclass(eq=False)
class Accumulator:
    """Registers that products in flight accumulate into, as a matrix [64, N]."""

    slots: tuple[int, ...]
    matrix: Any
    """A list of registers until the first product has added to it."""


@dataclass(eq=False)
class Product:
    """A matrix product that may still be reading shared memory and registers."""

    accumulator: Accumulator
    operation: Operation | None
    line: int
    done: bool = False


class Products:
    """What `wgmma` instructions do; generated code calls the public methods."""

    def __init__(self, group: Warpgroup) -> None:
        self._group = group
        self._open: list[Product] = []
        """Issued and not committed."""
        self._groups: list[list[Product]] = []
        """Committed and not waited for."""
        self._accumulators: dict[tuple[int, ...], Accumulator] = {}
        self._retired: Clock | None = None
        """What a wait for the products that are over acquires."""
        self._fenced: list[Any] | None = None
        """The registers as they were at the last wgmma.fence."""

    def lines(self) -> list[int]:
        """[PTX lines] of the products that nobody waited for."""
        return [
            product.line for group in [*self._groups, self._open] for product in group
        ]

    def fence(self, index: int, mask: Mask) -> None:
        """wgmma.fence: registers as they are now may be read by products."""
        self._fenced = self._group.registers.copy()

    def issue(self, index: int, a: Any, b: Lanes, scale_d: Mask, mask: Mask) -> None:
        """wgmma.mma_async of the whole warpgroup: issues the product."""
        self._group.here(index, 0)
        mma = self._group.program.mmas[index]
        accumulate = bool(scale_d[0])
        accumulator = self._accumulator(mma, accumulate)
        operation = None
        if self._group.cta.shadow is not None:
            agents = [
                warp.agent for warp in self._group.warps if warp.agent is not None
            ]
            component = self._group.cluster.components.products(self._group.serial)
            operation = self._group.cluster.streams.start(
                component, agents, self._group.line
            )
        product = Product(accumulator, operation, self._group.line)
        self._open.append(product)
        if (not mma.a_registers and (a != a[0]).any()) or (b != b[0]).any():
            raise Fault(Kind.WGMMA, "a matrix descriptor that differs between lanes")
        first = a if mma.a_registers else int(a[0])
        work = self._work(index, mma, first, int(b[0]), accumulate, product)
        self._group.machine.count("products", 1)
        self._group.cluster.pending.product(self._group.serial, work)

    def _accumulator(self, mma: wgmma.Mma, accumulate: bool) -> Accumulator:
        """The accumulator of a product that is being issued; checks its registers' fence."""
        fenced, registers = self._fenced, self._group.registers
        accumulator = self._accumulators.get(mma.accumulators)
        touched = mma.a_registers if accumulator else mma.a_registers + mma.accumulators
        if fenced is None or not self._fence_covers(touched, fenced):
            self._group.machine.report(
                Kind.WGMMA,
                "registers of the product were written after the last wgmma.fence",
            )
        if accumulator is None:
            busy = {slot for other in self._accumulators for slot in other}
            if not busy.isdisjoint(mma.accumulators):
                raise Fault(
                    Kind.WGMMA, "accumulators overlap those of a product in flight"
                )
            values = [registers[slot] for slot in mma.accumulators]
            accumulator = Accumulator(mma.accumulators, values)
            for slot in mma.accumulators:
                registers[slot] = IN_FLIGHT
            self._accumulators[mma.accumulators] = accumulator
        return accumulator

    def _fence_covers(self, touched: tuple[int, ...], fenced: list[Any]) -> bool:
        """Whether a product's registers hold what the last wgmma.fence saw, in any register.

        Compilers put copies between a fence and the product: of undefined registers that it
        overwrites, and of values that several elements of an accumulator start from. A computed
        value is something else, even when nobody reads it.
        """
        registers = self._group.registers
        late = [slot for slot in touched if registers[slot] is not fenced[slot]]
        if not late:
            return True
        known = set(map(_place, fenced))
        return all(_place(registers[slot]) in known for slot in late)

    def _work(
        self,
        index: int,
        mma: wgmma.Mma,
        a: Any,
        b: int,
        accumulate: bool,
        product: Product,
    ) -> Callable[[], None]:
        held = [self._group.registers[slot] for slot in mma.a_registers]

        def complete() -> None:
            self._group.here(index, 0)
            if any(
                self._group.registers[s] is not h
                for s, h in zip(mma.a_registers, held, strict=True)
            ):
                self._group.machine.report(
                    Kind.WGMMA,
                    "A's registers were written while the product was in flight",
                )
            memory = self._group.cta.shared
            if mma.a_registers:
                left = wgmma.fragment_a(a, mma.dtype_a)
            else:
                left = self._operand(
                    memory, a, wgmma.ROWS, mma.dtype_a, mma.transpose_a, mma, product
                )
            right = self._operand(
                memory, b, mma.n, mma.dtype_b, mma.transpose_b, mma, product
            )
            if mma.negate_a != mma.negate_b:
                left = -left
            accumulator = product.accumulator
            if accumulate and isinstance(accumulator.matrix, list):
                accumulator.matrix = wgmma.accumulator_matrix(accumulator.matrix)
            with np.errstate(all="ignore"):
                accumulator.matrix = multiply_add(
                    left,
                    right,
                    accumulator.matrix if accumulate else None,
                    (mma.dtype_a, mma.dtype_b),
                    self._group.machine.accumulation,
                )
            product.done = True
            self._group.cluster.progress += 1

        return complete

    def _operand(
        self,
        memory: SharedMemory,
        descriptor: int,
        rows: int,
        dtype: str,
        transposed: bool,
        mma: wgmma.Mma,
        product: Product,
    ) -> Any:
        """A matrix in shared memory, [rows, k]; the read is checked."""
        wgmma.check_alignment(descriptor)
        operation, shadow = product.operation, self._group.cta.shadow
        if operation is not None and shadow is not None:
            size = numerics.ELEMENT_SIZE[dtype]
            words = wgmma.shared_words(descriptor, rows, mma.k, size, transposed)
            if 4 * int(words[-1]) >= memory.size:
                raise Fault(
                    Kind.OUT_OF_BOUNDS, "a matrix that reaches beyond shared memory"
                )
            shadow.read(
                words, operation.component, operation.epoch, operation.clock, "wgmma"
            )
        return wgmma.gather(memory, descriptor, rows, mma.k, dtype, transposed)

    def read_early(self, index: int, mask: Mask) -> None:
        """An instruction reads an accumulator before the wait for its product."""
        if mask.any():
            self._group.here(index, warps_of(mask)[0])
            self._group.machine.report(
                Kind.WGMMA, "reads an accumulator whose product is in flight"
            )

    def commit(self, index: int, mask: Mask) -> None:
        """wgmma.commit_group."""
        self._groups.append(self._open)
        self._open = []

    def wait(self, index: int, count: int, mask: Mask) -> Mask | None:
        """Gate of wgmma.wait_group: at most `count` groups are in flight.

        A product is of all four warps, so what one warp sees complete is complete for all.
        """
        groups = self._groups
        over = groups[: max(0, len(groups) - count)]
        if not all(product.done for group in over for product in group):
            self._group.hold(lambda: "its matrix products")
            return None
        self._group.here(index, warps_of(mask)[0])
        self._retire(over)
        for number in warps_of(mask):
            agent = self._group.warps[number].agent
            if agent:
                agent.acquire(self._retired, self._group.lanes(number, mask))
        return mask

    def _retire(self, groups: list[list[Product]]) -> None:
        """Gives accumulators of complete products back to the registers."""
        kept = self._groups[len(groups) :]
        running = {
            product.accumulator.slots
            for group in [*kept, self._open]
            for product in group
        }
        over = {product.accumulator.slots for group in groups for product in group}
        for slots in sorted(over - running):
            self._give_back(self._accumulators.pop(slots))
        for group in groups:
            if group and group[-1].operation:
                self._retired = group[-1].operation.clock  # products complete in order
        self._groups = kept

    def _give_back(self, accumulator: Accumulator) -> None:
        registers = self._group.registers
        if any(registers[slot] is not IN_FLIGHT for slot in accumulator.slots):
            self._group.machine.report(
                Kind.WGMMA,
                "accumulators were written while their product was in flight",
            )
        values = wgmma.accumulator_registers(np.ascontiguousarray(accumulator.matrix))
        for slot, value in zip(accumulator.slots, values, strict=True):
            registers[slot] = value.view(np.float32)


def _place(lanes: Lanes) -> int:
    """Where an array's lanes are: a copy of a register shares them, as another type, too."""
    address: int = lanes.__array_interface__["data"][0]
    return address
