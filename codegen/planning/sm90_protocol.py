# SPDX-License-Identifier: Apache-2.0
"""Roles, steps and barriers of an sm90 kernel, and what the CTAs of a cluster load."""

from __future__ import annotations

from collections.abc import Iterator

from ..arch import sm90
from ..features.e4m3 import is_e4m3
from ..features.varlen import is_packed
from ..ops.operation import BYTES
from .kernel_plan import WARPGROUP_THREADS
from .protocol import Lane, Load, Phase, Signal, Step, Wait, find_tile, take_tile
from .sm90_context import (
    K_WARPS,
    TRANSPOSE_WARPS,
    Traits,
    register_splits,
    slices_pv,
)

_WARPS = 4  # of a warpgroup


def phases(traits: Traits) -> tuple[Phase, ...]:
    """Return what happens for each KV block, and between two query tiles."""
    warpgroups = range(traits.sizes.tile_q // sm90.WARPGROUP_ROWS)
    split = register_splits(traits.spec, traits.sizes.tile_kv)[len(warpgroups)]

    def lanes(produce: tuple[Step, ...], end: bool) -> Iterator[Lane]:
        packed = end and is_packed(traits.spec)
        taken = (take_tile(1),) if packed else ()
        if traits.page is None:
            yield Lane("producer", "warp 0", split.producer, (*taken, *produce))
        else:
            for number, rings in enumerate(traits.rings_of_loaders):
                own = tuple(
                    x for x in produce if any(_fills(x, ring) for ring in rings)
                )
                name = " and ".join(rings.upper())
                role, warp = f"producer of {name}", f"warp {number}"
                yield Lane(role, warp, split.producer, (*taken, *own))
        if traits.transposes_v:
            warps = f"warps 1 to {TRANSPOSE_WARPS}"
            transposer = tuple(_transposer(traits, end=end))
            yield Lane("transposer", warps, split.producer, transposer)
        if packed:
            yield Lane("scheduler", "warp 3", split.producer, (find_tile(),))
        for index in warpgroups:
            first = _WARPS * (index + 1)
            steps = _Consumer(traits, index)
            yield Lane(
                f"consumer {index}",
                f"warps {first} to {first + _WARPS - 1}",
                split.consumer,
                tuple(steps.tile() if end else steps.block()),
            )

    order = "QK of block n, then PV of block n-1, which runs beside softmax of n"
    if traits.part_overlays_s:
        order = "PV of block n-1, then QK and softmax of block n"
    return (
        Phase(
            f"One KV block: {order}",
            tuple(lanes(tuple(_load_block(traits)), end=False)),
        ),
        Phase(
            "From one query tile to the next",
            tuple(lanes(tuple(_load_tile(traits)), end=True)),
        ),
    )


def loads(traits: Traits) -> Iterator[Load]:
    """Yield what each CTA of a cluster loads of one tile of Q, K and V."""
    spec, ctas = traits.spec, traits.cluster_size
    for tensor, rows, columns, shared in (
        ("Q", traits.sizes.tile_q, spec.head_dim.qk, False),
        ("K", traits.sizes.tile_kv, spec.head_dim.qk, traits.multicast_k),
        ("V", traits.sizes.tile_kv, spec.head_dim.v, traits.multicast_v),
    ):
        count = rows // ctas if shared else rows
        for cta in range(ctas):
            yield Load(
                tensor,
                cta,
                tile=(rows, columns),
                rows=(cta * count if shared else 0, count),
                columns=(0, columns),
                receivers=tuple(range(ctas)) if shared else (cta,),
                nbytes=count * columns * BYTES[spec.dtype],
            )


def _load_block(traits: Traits) -> Iterator[Step]:
    yield _load(traits, "k", "K(n)")
    yield _load(traits, "v", "V(n-1)")
    yield from _load_bias(traits, "bias(n)")


def _load_tile(traits: Traits) -> Iterator[Step]:
    yield _load(traits, "v", "V(last)")
    yield _load(traits, "k", "next K(0)")
    # With one stage, this tile's last QK frees it.
    earlier = traits.sizes.q_stages == 2
    yield _load(traits, "q", "next Q", earlier=earlier)
    yield from _load_bias(traits, "next bias(0)")


def _load(traits: Traits, ring: str, what: str, *, earlier: bool = True) -> Step:
    """A stage of a ring, or a warp's part; all of its bytes, whichever CTAs load them."""
    spec, sizes = traits.spec, traits.sizes
    rows = sizes.tile_q if ring == "q" else sizes.tile_kv
    columns = spec.head_dim.v if ring == "v" else spec.head_dim.qk
    warps = K_WARPS if ring == "k" and traits.split_k else 1
    if ring == "v" and traits.transposes_v:
        ring = "rows"
    full = Signal(
        f"{ring}_full",
        1,
        tx_bytes=rows * columns * BYTES[spec.dtype] // warps,
        ctas=_ctas(traits, ring),
    )
    return Step(
        f"load {'half of ' if warps > 1 else ''}{what}",
        "tma",
        waits=(Wait(f"{ring}_empty", earlier=earlier),),
        signals=(full,),
    )


def _transposer(traits: Traits, *, end: bool) -> Iterator[Step]:
    """Of the warps that transpose V, a block ahead of which they load its pages."""
    paged, warps = traits.page is not None, TRANSPOSE_WARPS
    transpose = Step(
        "transpose V(last)" if end else "transpose V(n-1)",
        "math",
        (Wait("rows_full", earlier=paged), Wait("v_empty", earlier=True)),
        (Signal("v_full", warps), Signal("rows_empty", warps)),
    )
    take = [take_tile(warps)] if end and is_packed(traits.spec) else []
    if not paged:
        yield from (transpose, *take)
        return
    nbytes = traits.sizes.tile_kv * traits.spec.head_dim.v * BYTES[traits.spec.dtype]
    load = Step(
        "load next V(0)" if end else "load V(n)",
        "tma",
        (Wait("rows_empty", earlier=not end),),
        (Signal("rows_full", warps, tx_bytes=nbytes),),
    )
    yield from (transpose, *take, load) if end else (load, transpose)


def _load_bias(traits: Traits, what: str) -> Iterator[Step]:
    """A stage for each warpgroup, free once the one has read what was in it."""
    width = BYTES.get(traits.spec.bias.dtype, 0)
    rows = sm90.WARPGROUP_ROWS if traits.bias_of_rows else 1
    nbytes = rows * traits.sizes.tile_kv * width
    for index in range(
        traits.sizes.tile_q // sm90.WARPGROUP_ROWS if traits.bias else 0
    ):
        of = str(index)
        full = Signal("bias_full", 1, of, tx_bytes=nbytes)
        free = Wait("bias_empty", of, earlier=True)
        yield Step(f"load {what}, warpgroup {index}", "tma", (free,), (full,))


def _fills(step: Step, ring: str) -> bool:
    return any(signal.barrier == f"{ring}_full" for signal in step.signals)


def _ctas(traits: Traits, ring: str) -> int:
    """How many CTAs fill and free a stage of a ring together."""
    shared = {"k": traits.multicast_k, "v": traits.multicast_v}
    return traits.cluster_size if shared.get(ring) else 1


class _Consumer:
    """The steps of one warpgroup."""

    def __init__(self, traits: Traits, index: int) -> None:
        self._traits = traits
        self._index = index
        self._warpgroups = traits.sizes.tile_q // sm90.WARPGROUP_ROWS

    def block(self) -> Iterator[Step]:
        """Steps for a KV block, as the loops have them."""
        if self._traits.part_overlays_s:
            yield from self._one_after_the_other()
            return
        yield self._mma("QK(n)", waits=(Wait("k_full"), *self._turn()))
        yield self._mma("PV(n-1)", waits=(Wait("v_full"),), signals=self._pass_on())
        yield Step("S(n) is there", "wait", (), self._free("k"), retires=("QK(n)",))
        yield from self._bias("S(n)")
        over = Step(
            "PV(n-1) is over", "wait", (), self._free("v"), retires=("PV(n-1)",)
        )
        if self._traits.bounded:
            yield _math("tanh")
            yield over
            yield _math(f"exp2; P(n) = S(n) in {self._bits()} bits")
        elif slices_pv(self._traits.spec):
            yield _math("row 0: max, row 1: max")
            yield _math(f"slices of PV(n-1) to O, each before the next; {self._exp()}")
            yield over
            yield _math(f"P(n) = S(n) in {self._bits()} bits")
        elif self._traits.early_wait:
            yield _math("row 0: max")
            yield over
            yield _math("row 0: exp2, row 1: max, exp2; P(n) = S(n)")
        else:
            first, second = self._softmax()
            yield _math(first)
            yield over
            yield _math(f"{second}; P(n) = S(n) in {self._bits()} bits")

    def _one_after_the_other(self) -> Iterator[Step]:
        first, last = "PV(n-1), first slice", "PV(n-1), last slice"
        ready = (Wait("v_full"), *self._turn())
        yield self._mma(first, waits=ready, signals=self._pass_on())
        yield Step("first slice to O", "wait", (), (), retires=(first,))
        yield self._mma(last, waits=())
        yield Step("last slice to O", "wait", (), (), retires=(last,))
        freed = self._free("v")
        yield self._mma("QK(n)", waits=(Wait("k_full"),), signals=freed)
        yield Step("S(n) is there", "wait", (), self._free("k"), retires=("QK(n)",))
        yield _math(
            f"both rows: max, {self._exp()}; P(n) = S(n) in {self._bits()} bits"
        )

    def tile(self) -> Iterator[Step]:
        """Steps from the last block of a tile to the first of the next."""
        if is_packed(self._traits.spec):
            yield take_tile(_WARPS)
        if self._traits.cross_tile:
            yield from self._across()
        else:
            yield from self._one_q_stage()

    def _across(self) -> Iterator[Step]:
        ready = (Wait("q_full"), Wait("k_full"), *self._turn())
        yield self._mma("next QK(0)", waits=ready)
        yield self._mma("PV(last)", waits=(Wait("v_full"),), signals=self._pass_on())
        yield from self._sums()
        yield Step(
            "S(0), O are there",
            "wait",
            (),
            (*self._free("v"), *self._free("k")),
            retires=("next QK(0)", "PV(last)"),
        )
        where = "to sO" if is_e4m3(self._traits.spec) else "in Q's place"
        yield _math(f"O / sum, {where}")
        store = Wait("store", str(self._index), arrivals=WARPGROUP_THREADS)
        yield Step("store O", "tma", (store,), issues="store O")
        yield from self._bias("S(0)")
        yield _math(f"first softmax; P(0) = S(0) in {self._bits()} bits")
        freed = Signal("q_empty", 1)  # by the first warp
        yield Step("O has left", "wait", (), (freed,), retires=("store O",))

    def _one_q_stage(self) -> Iterator[Step]:
        freed = Signal("q_empty", _WARPS)
        yield Step("last QK is over", "wait", (), (freed,))
        ready = (*self._turn(), Wait("v_full"))
        yield self._mma("PV(last)", waits=ready, signals=self._pass_on())
        yield from self._sums()
        yield Step("O is there", "wait", (), self._free("v"), retires=("PV(last)",))
        yield _math("O / sum; store O from registers")
        first = "next QK(0)"
        ready = (Wait("q_full"), Wait("k_full"), *self._turn(earlier=False))
        yield self._mma(first, waits=ready, signals=self._pass_on())
        yield Step("S(0) is there", "wait", (), self._free("k"), retires=(first,))
        yield from self._bias("S(0)")
        yield _math(f"first softmax; P(0) = S(0) in {self._bits()} bits")

    def _mma(
        self, text: str, waits: tuple[Wait, ...], signals: tuple[Signal, ...] = ()
    ) -> Step:
        return Step(text, "mma", waits, signals, issues=text)

    def _softmax(self) -> tuple[str, str]:
        """What comes before and after the wait for PV(n-1)."""
        before = "tanh; " if self._traits.softcap is not None else ""
        if self._traits.tests_exponents:
            before = "exponents; "
        exp = self._exp()
        return f"{before}row 0: max, {exp}; row 1: max", f"row 1: {exp}"

    def _exp(self) -> str:
        return {"exact": "exp2", "linear": "codes of P"}.get(
            self._traits.spec.exp, "P as fp16"
        )

    def _sums(self) -> Iterator[Step]:
        if not self._traits.bounded and not self._traits.sums_by_mma:
            yield _math(f"sums of rows{self._lse()}")

    def _bias(self, scores: str) -> Iterator[Step]:
        if self._traits.bias:
            of = str(self._index)
            wait, freed = Wait("bias_full", of), Signal("bias_empty", _WARPS, of)
            yield Step(f"{scores} = scale * {scores} + bias", "math", (wait,), (freed,))

    def _free(self, ring: str) -> tuple[Signal, ...]:
        return (Signal(f"{ring}_empty", _WARPS, ctas=_ctas(self._traits, ring)),)

    def _bits(self) -> int:
        """Of an element of P."""
        return 8 * BYTES[self._traits.spec.dtype]

    def _lse(self) -> str:
        return ", LSE" if self._traits.spec.lse else ""

    def _turn(self, *, earlier: bool = True) -> tuple[Wait, ...]:
        """Until the warpgroup before has issued its MMAs; the first one's was passed earlier."""
        if not self._traits.takes_turns:
            return ()
        earlier = earlier and self._index == 0
        return (Wait("order", str(self._index), earlier, WARPGROUP_THREADS),)

    def _pass_on(self) -> tuple[Signal, ...]:
        if not self._traits.takes_turns:
            return ()
        following = (self._index + 1) % self._warpgroups
        return (Signal("order", WARPGROUP_THREADS, str(following)),)


def _math(text: str) -> Step:
    return Step(text, "math")
