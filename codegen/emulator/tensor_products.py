# SPDX-License-Identifier: Apache-2.0
"""tcgen05.mma and .commit: issued by single threads, complete when the schedule says so.

What one warp issues completes in the order of issue, commits included. PTX promises that only for
products of the same kind, shape and accumulator, and for a commit after what it tracks: a kernel
that relies on the order of other products is not noticed here. Products of different warps are in
no order but that of their mbarriers.

A product reads and writes tensor memory without a proxy; what another thread did there needs the
fences that `tensor_transfers` tells of, the first of which a commit is. Shared memory it reads by
the asynchronous proxy, as wgmma does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import numerics, tcgen05, wgmma
from .checks import HAPPENED, SENT, Operation
from .lanes import ONE_LANE, RANK_SHIFT, WARP, Lanes, Mask
from .numerics import F32
from .report import Fault, Kind
from .tcgen05 import Form, Layout, Shape
from .tensor_memory import HALF, granules, split_address

if TYPE_CHECKING:
    from .cluster import Cta
    from .warpgroup import Warp, Warpgroup


@dataclass(frozen=True)
class Product:
    """One tcgen05.mma with the values of its operands."""

    form: Form
    shape: Shape
    ctas: Sequence[Cta]
    """The issuing CTA, or the pair: the even one first."""
    a: int
    """Descriptor of wgmma's kind, or a column of tensor memory."""
    b: int
    column: int
    upper: bool
    """Whether it uses the upper half of each warp's lanes (layout F only)."""
    scale: float | None
    """What D is multiplied with before; None overwrites it."""
    operation: Operation | None


class TensorProducts:
    """What these instructions do; generated code calls the public methods."""

    def __init__(self, group: Warpgroup) -> None:
        self._group = group
        self._untracked: dict[int, tuple[int, int]] = {}
        """Warp's number in its CTA to the lane and the PTX line of its last product without a
        commit."""

    def untracked(self, warp: Warp) -> int | None:
        """[PTX line] of a product that no commit of the warp tracks."""
        found = self._untracked.get(warp.number)
        return None if found is None else found[1]

    def issue(
        self,
        index: int,
        form: Form,
        d: Lanes,
        d_offset: int,
        a: Lanes,
        a_offset: int,
        b: Lanes,
        instruction: Lanes,
        disabled: Sequence[Lanes],
        accumulate: Mask,
        mask: Mask,
    ) -> None:
        """tcgen05.mma by each lane; `a` is an address or a matrix descriptor, as the form says."""
        for lane in np.flatnonzero(mask).tolist():
            number = lane // WARP
            warp = self._group.warps[number]
            self._group.here(index, number)
            if any(int(lanes[lane]) for lanes in disabled):
                raise Fault(Kind.UNSUPPORTED, "disabled output lanes are not modelled")
            shape = tcgen05.decode(int(instruction[lane]), form)
            ctas = self._ctas(form.ctas)
            d_lane, column = split_address(int(d[lane]) + d_offset)
            _check_lane(shape, d_lane)
            if form.a_in_tensor_memory:
                a_lane, first = split_address(int(a[lane]) + a_offset)
                if a_lane != d_lane:
                    raise Fault(Kind.TCGEN05, f"A in lane {a_lane}, D in {d_lane}")
            else:
                first = tcgen05.shared_matrix(int(a[lane]))
            for cta in ctas:
                memory = cta.tensor_memory
                memory.check_columns(column, shape.columns, "D")
                if form.a_in_tensor_memory:
                    memory.check_columns(first, shape.a_columns, "A")
            product = Product(
                form,
                shape,
                ctas,
                first,
                tcgen05.shared_matrix(int(b[lane])),
                column,
                d_lane == HALF,
                2.0 ** -form.shift_d if accumulate[lane] else None,
                self._start(warp, lane),
            )
            self._untracked[warp.number] = lane % WARP, self._group.line
            self._group.machine.count("products", 1)
            work = self._work(index, number, product)
            self._group.cluster.pending.product(warp.serial, work)

    def _ctas(self, size: int) -> list[Cta]:
        """The CTAs that a product of this group works on."""
        cta = self._group.cta
        pair = self._group.cluster.pair(cta, size)
        if pair[0] is not cta:
            raise Fault(
                Kind.TCGEN05,
                f"cta {cta.rank} issues it, which is the odd one of its pair",
            )
        for other in pair:
            if other.exited:
                raise Fault(Kind.TCGEN05, f"its peer, cta {other.rank}, has exited")
        return pair

    def _start(self, warp: Warp, lane: int) -> Operation | None:
        if warp.agent is None:
            return None
        cluster = self._group.cluster
        component = cluster.components.products(warp.serial)
        acting = self._group.lanes(lane // WARP, ONE_LANE[lane])
        return cluster.streams.start(component, [warp.agent], self._group.line, acting)

    def _work(self, index: int, number: int, product: Product) -> Callable[[], None]:
        def complete() -> None:
            self._group.here(index, number)
            if any(cta.exited for cta in product.ctas):
                raise Fault(Kind.OUTSTANDING, "its CTA has exited before it completed")
            shape = product.shape
            share = shape.n // len(product.ctas)
            parts = [
                self._operand(product, cta, product.b, share, shape.dtype_b, False)
                for cta in product.ctas
            ]
            b = parts[0] if len(parts) == 1 else np.concatenate(parts)
            for cta in product.ctas:
                result = tcgen05.product(shape, self._a(product, cta), b)
                self._note(product, cta)
                tcgen05.accumulate(
                    cta.tensor_memory.floats,
                    shape,
                    product.column,
                    product.upper,
                    result,
                    product.scale,
                )

        return complete

    def _a(self, product: Product, cta: Cta) -> F32:
        shape = product.shape
        if not product.form.a_in_tensor_memory:
            rows = tcgen05.rows_in_cta(shape, product.form)
            return self._operand(product, cta, product.a, rows, shape.dtype_a, True)
        operation, shadow = product.operation, cta.tensor_shadow
        if operation is not None and shadow is not None:
            shadow.read(
                granules(product.a, shape.a_columns, half=_half(product)),
                operation.component,
                operation.epoch,
                operation.clock,
                "A of tcgen05.mma",
            )
        words = cta.tensor_memory.words
        return tcgen05.tensor_operand(words, shape, product.a, product.upper)

    def _operand(
        self, product: Product, cta: Cta, matrix: int, rows: int, dtype: str, is_a: bool
    ) -> F32:
        """A matrix in a CTA's shared memory, [rows, k]; the read is checked."""
        shape = product.shape
        transposed = shape.transpose_a if is_a else shape.transpose_b
        operation, shadow = product.operation, cta.shadow
        if operation is not None and shadow is not None:
            size = numerics.ELEMENT_SIZE[dtype]
            words = wgmma.shared_words(matrix, rows, shape.k, size, transposed)
            if 4 * int(words[-1]) >= cta.shared.size:
                raise Fault(
                    Kind.OUT_OF_BOUNDS, "a matrix that reaches beyond shared memory"
                )
            shadow.read(
                words,
                operation.component,
                operation.epoch,
                operation.clock,
                "tcgen05.mma",
            )
        return wgmma.gather(cta.shared, matrix, rows, shape.k, dtype, transposed)

    def _note(self, product: Product, cta: Cta) -> None:
        """Checks what happens to D."""
        operation, shadow = product.operation, cta.tensor_shadow
        if operation is None or shadow is None:
            return
        place = granules(product.column, product.shape.columns, half=_half(product))
        component, epoch, clock = operation.component, operation.epoch, operation.clock
        if product.scale is not None:
            shadow.read(place, component, epoch, clock, "D of tcgen05.mma")
        shadow.write(place, component, epoch, clock, operation.line, "D of tcgen05.mma")

    def commit(
        self,
        index: int,
        base: Lanes,
        offset: int,
        targets: Lanes | None,
        mask: Mask,
    ) -> None:
        """tcgen05.commit by each lane: arrives once what its warp issued has completed.

        `targets` are bits of the CTAs whose mbarriers at that place it arrives at; None arrives at
        the one that the address names.
        """
        for lane in np.flatnonzero(mask).tolist():
            number = lane // WARP
            warp = self._group.warps[number]
            self._group.here(index, number)
            cluster = self._group.cluster
            owner, place = cluster.locate(int(base[lane]) + offset)
            ranks = [owner.rank]
            if targets is not None:
                ranks = self._group.copies.ranks(int(targets[lane]), Kind.TCGEN05)
            operation = self._start(warp, lane)
            if operation is not None:
                self._fence(warp, operation)
            tracked = self._untracked.pop(warp.number, None)
            if tracked is not None and tracked[0] != lane % WARP:
                # A commit tracks what its own thread issued.
                self._group.machine.report(
                    Kind.TCGEN05,
                    f"the products (line {tracked[1]}) were issued by another lane",
                )
            addresses = [rank << RANK_SHIFT | place for rank in ranks]
            for address in addresses:
                barrier = self._group.mbarriers.find(address, number, ONE_LANE[lane])
                if operation is not None:
                    signal = (operation.epoch, operation.line)
                    barrier.last_signals[operation.component] = signal
            work = self._arrival(index, number, addresses, operation)
            cluster.pending.product(warp.serial, work)

    def _fence(self, warp: Warp, operation: Operation) -> None:
        """A commit is a tcgen05.fence::before_thread_sync of what its thread did."""
        components, clock = self._group.cluster.components, operation.clock
        own = [operation.component, *components.own_tensor(warp.serial)]
        clock[SENT, own] = clock[HAPPENED, own]

    def _arrival(
        self, index: int, number: int, addresses: list[int], operation: Operation | None
    ) -> Callable[[], None]:
        def complete() -> None:
            self._group.here(index, number)
            cluster = self._group.cluster
            for address in addresses:
                owner, _ = cluster.locate(address)
                if owner.exited:
                    raise Fault(
                        Kind.OUTSTANDING,
                        f"it arrives at an mbarrier of cta {owner.rank}, which has exited",
                    )
                clock = operation.clock if operation is not None else None
                cluster.mbarrier(address).arrive(1, 0, clock)
            cluster.progress += 1

        return complete


def _check_lane(shape: Shape, lane: int) -> None:
    """D begins in lane 0; with layout F in lane 16, too."""
    if lane and not (shape.layout is Layout.HALF and lane == HALF):
        raise Fault(Kind.TCGEN05, f"D in lanes from {lane} on, where M is {shape.m}")


def _half(product: Product) -> int | None:
    """The half of each warp's lanes that A and D use; None for both."""
    return int(product.upper) if product.shape.layout is Layout.HALF else None
