# SPDX-License-Identifier: Apache-2.0
"""Roles, steps and barriers of an sm100 kernel, and what the CTAs of a cluster load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..arch import sm100
from ..features.varlen import is_packed
from ..ops.operation import BYTES
from .kernel_plan import WARPGROUP_THREADS, Registers
from .protocol import Lane, Load, Phase, Signal, Step, Wait, find_tile, take_tile
from .sm100_context import Traits

_WARP_THREADS = 32
_WARPS = 4  # of a warpgroup


def phases(traits: Traits, registers: Sequence[Registers]) -> tuple[Phase, ...]:
    """Return what happens for each KV block, and between two query tiles.

    registers: of softmax, correction, and the warps beside them.
    """
    roles = _RolesByBlock(traits) if traits.by_block else _Roles(traits)
    block, tile = "One KV block", "The ends of a query tile"
    if traits.by_block:
        block += ": QK of block n+1, then PV of block n, beside softmax of n+1"
    else:
        block += ": softmax of a half of block n beside the MMAs of the other half"
    if traits.persistent:
        tile = "From one query tile to the next"
    return (
        Phase(block, tuple(_lanes(roles, registers, end=False))),
        Phase(tile, tuple(_lanes(roles, registers, end=True))),
    )


def loads(traits: Traits) -> Iterator[Load]:
    """Yield what each CTA of a cluster loads of one tile of Q, K and V.

    With multicast a slice of rows for all. In a pair half of K's rows and half of V's columns for
    itself, for an MMA reads both CTAs.
    """
    spec, ctas = traits.spec, traits.cluster_size
    for tensor, rows, columns in (
        ("Q", traits.sizes.tile_q, spec.head_dim.qk),
        ("K", traits.sizes.tile_kv, spec.head_dim.qk),
        ("V", traits.sizes.tile_kv, spec.head_dim.v),
    ):
        of_rows = tensor != "Q" and traits.multicast_k
        of_rows |= tensor == "K" and traits.pair
        of_columns = tensor == "V" and traits.pair
        own_rows = rows // ctas if of_rows else rows
        own_columns = columns // ctas if of_columns else columns
        for cta in range(ctas):
            shared = tensor != "Q" and traits.multicast_k
            yield Load(
                tensor,
                cta,
                tile=(rows, columns),
                rows=(cta * own_rows if of_rows else 0, own_rows),
                columns=(cta * own_columns if of_columns else 0, own_columns),
                receivers=tuple(range(ctas)) if shared else (cta,),
                nbytes=own_rows * own_columns * BYTES[spec.dtype],
            )


def _lanes(
    roles: _Roles, registers: Sequence[Registers], *, end: bool
) -> Iterator[Lane]:
    halves = roles.traits.sizes.halves
    softmax, correction, others = (each.per_thread for each in registers)
    first = 4 * halves  # of the correction warps
    of = "of the leader" if roles.traits.pair else ""
    loading = roles.load_tile() if end else roles.load_block()
    packed = end and is_packed(roles.traits.spec)
    taken = (take_tile(1),) if packed else ()
    taken_by_four = (take_tile(_WARPS),) if packed else ()
    if roles.traits.page is None:
        yield Lane("load", f"warp {first + 4}", others, (*taken, *loading))
    else:
        steps = tuple(loading)
        of_v = tuple(step for step in steps if _is_of_v(step))
        rest = tuple(step for step in steps if not _is_of_v(step))
        yield Lane("load Q and K", f"warp {first + 4}", others, (*taken, *rest))
        yield Lane("load V", f"warp {first + 7}", others, (*taken, *of_v))
    multiplying = roles.multiply_tile() if end else roles.multiply_block()
    warps = f"warp {first + 5} {of}".rstrip()
    yield Lane("mma", warps, others, (*taken, *multiplying))
    for half in range(halves):
        making_p = roles.softmax_tile(half) if end else roles.softmax_block(half)
        name = f"softmax {half}" if halves > 1 else "softmax"
        warps = f"warps {4 * half} to {4 * half + 3}"
        yield Lane(name, warps, softmax, (*taken_by_four, *making_p))
    correcting = roles.correct_tile() if end else roles.correct_block()
    warps = f"warps {first} to {first + 3}"
    yield Lane("correction", warps, correction, (*taken_by_four, *correcting))
    if end:
        found = (find_tile(),) if packed else ()
        storing = (*found, *taken, *roles.store_tile())
        yield Lane("store", f"warp {first + 6}", others, storing)


def _is_of_v(step: Step) -> bool:
    return any(signal.place == "kv_full[V]" for signal in step.signals)


class _Roles:
    """The steps of each role, where the halves of a query tile alternate."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self._halves = range(traits.sizes.halves)
        self._ctas = traits.cluster_size if traits.pair else 1  # that an MMA works for
        self._next = "next " if traits.persistent else ""
        self._element = BYTES[traits.spec.dtype]  # [bytes] of Q, K and V

    def load_block(self) -> Iterator[Step]:
        """K is taken beside V of the block before it."""
        yield self._load("V", "V(n)")
        yield self._load("K", "K(n+1)")
        yield from self._load_bias("bias(n+1)")

    def load_tile(self) -> Iterator[Step]:
        """Q, and the last and the first tile of the ring."""
        if self.traits.persistent:
            yield self._load("V", "V(last)")
            yield from self._load_q(earlier=False)
            yield self._load("K", f"{self._next}K(0)")
            yield from self._load_bias(f"{self._next}bias(0)")
        else:
            yield from self._load_q(earlier=True)
            yield self._load("K", "K(0)")
            yield from self._load_bias("bias(0)")
            yield self._load("V", "V(last)")

    def multiply_block(self) -> Iterator[Step]:
        """PV of each half and QK of its next block, which overwrites P."""
        loaded = (Wait("kv_full", "V"), Wait("kv_full", "K"))
        for half in self._halves:
            free = (self._kv_empty("V"), self._kv_empty("K"))
            last = half == self._halves[-1]
            yield from self._pv("n", half, loaded if half == 0 else (), earlier=False)
            of = self._of(half)
            signals = (Signal("s_full", 1, of), *(free if last else ()))
            yield Step(f"QK(n+1){self._half(half)}", "mma", (), signals)

    def multiply_tile(self) -> Iterator[Step]:
        """The last PV, and the first QK of the next tile."""
        if self.traits.persistent:
            yield from self._last_pv()
            yield from self._first_qk()
        else:
            yield from self._first_qk()
            yield from self._last_pv()

    def softmax_block(self, half: int) -> Iterator[Step]:
        """From S to P, a row per thread; PV may begin before the tail of P is there."""
        of, threads = self._of(half), WARPGROUP_THREADS
        maximum = "max" if self.traits.softcap is None else "tanh, max"
        if self.traits.tests_exponents:
            maximum = "exponents, max"
        ready = Wait("s_full", of, earlier=True)
        if self.traits.bias:
            added = (Wait("bias_full", of, earlier=True),)
            free = (Signal("bias_empty", _WARPS, of),)
            yield Step("S(n) to registers", "math", (ready,))
            yield Step(f"S(n) = scale * S(n) + bias; {maximum}", "math", added, free)
        else:
            yield Step(f"S(n) to registers; {maximum}", "math", (ready,))
        factor = (Signal("stats_full", threads, of),)
        yield Step("factor of O to smem", "math", (), factor)
        yield Step("P(n) over S(n), but its tail", "math", (), (self._s_empty(of),))
        tail = (Signal("tail_full", threads, of, ctas=self._ctas),)
        yield Step("tail of P(n)", "math", (), tail)
        yield Step("sum of P(n)", "math", (self._stats_empty(of),))

    def softmax_tile(self, half: int) -> Iterator[Step]:
        """The sum of a row, and its LSE."""
        of = self._of(half)
        yield Step(
            "sum to smem", "math", (), (Signal("stats_full", WARPGROUP_THREADS, of),)
        )
        if self.traits.spec.lse:
            yield Step("store LSE", "math")
        if self.traits.persistent:
            yield Step("stats is free", "wait", (self._stats_empty(of),))

    def correct_block(self) -> Iterator[Step]:
        """O is rescaled before PV of the block is added."""
        for half in self._halves:
            yield self._take_over("factor", self._of(half))
            freed = self._s_empty(self._of(half))
            yield Step(f"O *= factor, half {half}", "math", (), (freed,))

    def correct_tile(self) -> Iterator[Step]:
        """O leaves tensor memory, normalized."""
        one_stage = self.traits.sizes.o_stages == 1
        for half in self._halves:
            yield self._take_over("sum", self._of(half))
        for half in self._halves:
            of = self._of(half)
            place = "" if one_stage else of
            earlier = half == 0 or not one_stage
            waits = (Wait("out_empty", place, earlier), Wait("o_full", of))
            signals = (
                Signal("o_empty", WARPGROUP_THREADS, of, ctas=self._ctas),
                Signal("out_full", WARPGROUP_THREADS, place),
            )
            yield Step(f"O/sum to sO{self._half(half)}", "math", waits, signals)

    def store_tile(self) -> Iterator[Step]:
        """A half of O each, by TMA."""
        for half in self._halves:
            place = "" if self.traits.sizes.o_stages == 1 else self._of(half)
            freed = Signal("out_empty", _WARP_THREADS, place)
            wait = Wait("out_full", place)
            yield Step(f"store O{self._half(half)}", "tma", (wait,), (freed,))

    def _first_qk(self) -> Iterator[Step]:
        """Into S of each half; O of the tile before must have been read by then."""
        for half in self._halves:
            of, last = self._of(half), half == self._halves[-1]
            loaded = (Wait("kv_full", "K"),) if half == 0 else ()
            waits = (*loaded, Wait("q_full", of))
            freed = (self._kv_empty("K"),) if last else ()
            signals = (Signal("s_full", 1, of), *freed)
            yield Step(f"{self._next}QK(0){self._half(half)}", "mma", waits, signals)
        earlier = not self.traits.persistent
        waits = tuple(Wait("o_empty", self._of(half), earlier) for half in self._halves)
        yield Step("O is free", "wait", waits)

    def _last_pv(self) -> Iterator[Step]:
        freed = tuple(Signal("q_empty", 1, self._of(half)) for half in self._halves)
        yield Step("last QK is issued", "wait", (), freed)
        for half in self._halves:
            last = half == self._halves[-1]
            loaded = (Wait("kv_full", "V"),) if half == 0 else ()
            freed = (self._kv_empty("V"),) if last else ()
            done = (Signal("o_full", 1, self._of(half)), *freed)
            yield from self._pv("last", half, loaded, done, earlier=True)

    def _pv(
        self,
        block: str,
        half: int,
        waits: tuple[Wait, ...],
        signals: tuple[Signal, ...] = (),
        *,
        earlier: bool,
    ) -> Iterator[Step]:
        """PV as P comes: all but its tail, then that."""
        of, name = self._of(half), self._half(half)
        ready = (*waits, Wait("s_empty", of, earlier))
        yield Step(f"PV({block}){name}", "mma", ready)
        tail = (Wait("tail_full", of, earlier),)
        yield Step(f"its tail{name}", "mma", tail, signals)

    def _load(self, tensor: str, text: str) -> Step:
        """A stage of the ring; with all of its bytes, whoever loads them."""
        head_dim = self.traits.spec.head_dim
        columns = head_dim.qk if tensor == "K" else head_dim.v
        full = Signal(
            "kv_full",
            1,
            tensor,
            tx_bytes=self.traits.sizes.tile_kv * columns * self._element,
            ctas=self.traits.cluster_size if self._shares else 1,
        )
        wait = Wait("kv_empty", tensor, earlier=True)
        return Step(f"load {text}", "tma", (wait,), (full,))

    def _load_bias(self, text: str) -> Iterator[Step]:
        """A stage for each half, free once its softmax has read the block before."""
        width = BYTES.get(self.traits.spec.bias.dtype, 0)
        rows = sm100.MMA_ROWS if self.traits.bias_of_rows else 1
        nbytes = rows * self.traits.sizes.tile_kv * width
        for half in self._halves if self.traits.bias else ():
            of = self._of(half)
            full = Signal("bias_full", 1, of, tx_bytes=nbytes)
            free = Wait("bias_empty", of, earlier=True)
            yield Step(f"load {text}{self._half(half)}", "tma", (free,), (full,))

    def _load_q(self, *, earlier: bool) -> Iterator[Step]:
        rows = sm100.MMA_ROWS * self._ctas
        nbytes = rows * self.traits.spec.head_dim.qk * self._element
        for half in self._halves:
            of = self._of(half)
            full = Signal("q_full", 1, of, tx_bytes=nbytes, ctas=self._ctas)
            wait = Wait("q_empty", of, earlier)
            text = f"load {self._next}Q{self._half(half)}"
            yield Step(text, "tma", (wait,), (full,))

    @property
    def _shares(self) -> bool:
        """A stage of K or V has bytes that another CTA loads, or counts them."""
        return self.traits.pair or self.traits.multicast_k

    def _kv_empty(self, tensor: str) -> Signal:
        """A commit, of each CTA whose stage it is: with multicast either reads all of it."""
        ctas = self.traits.cluster_size if self.traits.multicast_k else 1
        return Signal("kv_empty", 1, tensor, ctas=ctas)

    def _s_empty(self, of: str) -> Signal:
        return Signal("s_empty", WARPGROUP_THREADS, of, ctas=self._ctas)

    def _stats_empty(self, of: str) -> Wait:
        """Until the correction warps have taken what was handed over."""
        return Wait("stats_empty", of)

    def _take_over(self, what: str, of: str) -> Step:
        empty = Signal("stats_empty", WARPGROUP_THREADS, of)
        half = f", half {of}" if of else ""
        return Step(f"take {what}{half}", "math", (Wait("stats_full", of),), (empty,))

    def _of(self, half: int) -> str:
        return str(half) if len(self._halves) > 1 else ""

    def _half(self, half: int) -> str:
        return f", half {half}" if len(self._halves) > 1 else ""


class _RolesByBlock(_Roles):
    """The steps of each role, where blocks take the stages of S in turn."""

    def load_block(self) -> Iterator[Step]:
        """K is a block ahead."""
        yield self._load("K", "K(n+1)")
        yield from self._load_bias("bias(n+1)")
        yield self._load("V", "V(n)")

    def multiply_block(self) -> Iterator[Step]:
        """QK into the stage that P of the block before left."""
        loaded = (Wait("kv_full", "K"),)
        signals = (Signal("s_full", 1), self._kv_empty("K"))
        yield Step("QK(n+1)", "mma", loaded, signals)
        free = (Wait("kv_full", "V"), Wait("o_empty"))
        done = (Signal("o_full", 1), self._kv_empty("V"))
        yield from self._pv("n", 0, free, done, earlier=False)

    def correct_block(self) -> Iterator[Step]:
        """PV of the block before must be over: S of this one does not say so."""
        yield self._take_over("factor", "")
        freed = Signal("o_empty", WARPGROUP_THREADS, ctas=self._ctas)
        wait = Wait("o_full", earlier=True)
        yield Step("O *= factor", "math", (wait,), (freed,))

    def correct_tile(self) -> Iterator[Step]:
        """The first block's factor is taken, but is nothing to O, which its PV overwrites."""
        yield from super().correct_tile()
        yield Step(
            "take next factor(0)",
            "math",
            (Wait("stats_full", earlier=True),),
            (Signal("stats_empty", WARPGROUP_THREADS),),
        )

    def _first_qk(self) -> Iterator[Step]:
        waits = (Wait("q_full"), Wait("kv_full", "K"))
        signals = (Signal("s_full", 1), self._kv_empty("K"))
        yield Step(f"{self._next}QK(0)", "mma", waits, signals)

    def _last_pv(self) -> Iterator[Step]:
        yield Step("last QK is issued", "wait", (), (Signal("q_empty", 1),))
        loaded = (Wait("kv_full", "V"), Wait("o_empty", earlier=True))
        done = (Signal("o_full", 1), self._kv_empty("V"))
        yield from self._pv("last", 0, loaded, done, earlier=True)

    def _stats_empty(self, of: str) -> Wait:
        """Of the stage that the next block takes: what the one before this one handed over."""
        return Wait("stats_empty", of, earlier=True)
