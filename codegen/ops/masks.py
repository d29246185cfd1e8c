# SPDX-License-Identifier: Apache-2.0
"""A mask as a range of keys for every query row, and the KV blocks that follow from it.

A mask is a conjunction of atoms, comparisons of forms that are affine in ``q``, ``kv`` and the two
lengths: ``(kv <= q) & (q - kv <= 1023)``. ``kv`` is a key, ``q`` a query's place among the
keys: its row plus ``seqlen_kv - seqlen_q``, so that the last row is at the last key (bottom-right).
An atom, solved for ``kv``, is a bound of it from below or above, and the end of K is a bound like
any other. The reference, the count of FLOPs, the loops of a kernel and the cases that it is shown
are all read from the same mask (decision 0033).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

I64 = NDArray[np.int64]


class Lengths(NamedTuple):
    """Query rows of a head, and keys."""

    q: int
    kv: int


@dataclass(frozen=True)
class Affine:
    """``q * q + kv * kv + ... + constant``, by the coefficient of each."""

    q: int = 0
    kv: int = 0
    seqlen_q: int = 0
    seqlen_kv: int = 0
    constant: int = 0

    def __add__(self, other: Affine | int) -> Affine:
        terms = zip(astuple(self), astuple(_affine(other)), strict=True)
        return Affine(*(a + b for a, b in terms))

    def __neg__(self) -> Affine:
        return Affine(*(-a for a in astuple(self)))

    def __sub__(self, other: Affine | int) -> Affine:
        return self + -_affine(other)

    def __le__(self, other: Affine | int) -> Mask:
        return _atom(_affine(other) - self)

    def __lt__(self, other: Affine | int) -> Mask:
        return self <= _affine(other) - 1

    def __ge__(self, other: Affine | int) -> Mask:
        return _affine(other) <= self

    def __gt__(self, other: Affine | int) -> Mask:
        return _affine(other) < self

    def at(self, rows: I64, lengths: Lengths) -> I64:
        """The value for query rows, of a form without ``kv``."""
        constant = self.seqlen_q * lengths.q + self.seqlen_kv * lengths.kv
        return self.q * (rows + lengths.kv - lengths.q) + constant + self.constant


q, kv = Affine(q=1), Affine(kv=1)
seqlen_q, seqlen_kv = Affine(seqlen_q=1), Affine(seqlen_kv=1)


class KeyBlocks(NamedTuple):
    """KV blocks of some query rows; an integer, or an array with one for each group of rows.

    No row sees a key outside [first, end), and every row sees every key of [whole_first,
    whole_end). A kernel goes from the last block to the first: masked, whole, masked.
    """

    first: I64
    whole_first: I64
    whole_end: I64
    end: I64


@dataclass(frozen=True)
class Mask:
    """Keys that are in no lower bound's way, ``kv >= bound``, and no upper one's, ``kv < bound``.

    Bounds that differ in their constants alone are one, the stricter. What a kernel computes has
    the bounds of `ALL_KEYS` among its own.
    """

    lower: tuple[Affine, ...] = ()
    upper: tuple[Affine, ...] = ()

    def __and__(self, other: Mask) -> Mask:
        return Mask(
            _strictest(self.lower + other.lower, max),
            _strictest(self.upper + other.upper, min),
        )

    @property
    def left(self) -> int | None:
        """How many keys before its own place a query sees, None for all; see `_offset`."""
        offset = _offset(self.lower)
        return None if offset is None else -offset

    @property
    def right(self) -> int | None:
        """How many keys behind its own place a query sees, None for all; see `_offset`."""
        offset = _offset(self.upper)
        return None if offset is None else offset - 1

    @property
    def edges(self) -> bool:
        """Queries see different keys."""
        return self.left is not None or self.right is not None

    @property
    def uneven(self) -> bool:
        """Some queries see more keys than others: of a window's, inside, all see as many."""
        return (self.left is None) != (self.right is None)

    def __str__(self) -> str:
        """The edges, such as ``q - 1023 <= kv <= q``; nothing when there are none."""
        left, right = self.left, self.right
        before = "" if left is None else f"{_place(-left)} <= "
        behind = "" if right is None else f" <= {_place(right)}"
        return f"{before}kv{behind}" if before or behind else ""

    def keys(self, rows: ArrayLike, lengths: Lengths) -> tuple[I64, I64]:
        """(first, end) of the keys that each of these query rows sees; end is first for none."""
        at = np.asarray(rows, np.int64)
        first = np.max([bound.at(at, lengths) for bound in self.lower], axis=0)
        end = np.min([bound.at(at, lengths) for bound in self.upper], axis=0)
        return first, np.maximum(end, first)

    def visible(self, rows: ArrayLike, lengths: Lengths) -> NDArray[np.bool_]:
        """Which keys these query rows see: [rows, kv]."""
        first, end = (each[:, None] for each in self.keys(rows, lengths))
        keys = np.arange(lengths.kv)
        return (first <= keys) & (keys < end)

    def pairs(self, lengths: Lengths) -> float:
        """Visible (query, key) pairs, half of the key that is a row's last by the right edge.

        So TFLOPS of causal attention are counted everywhere: an edge halves what it runs through.
        """
        rows = np.arange(lengths.q)
        first = np.max([bound.at(rows, lengths) for bound in self.lower], axis=0)
        ends = [bound.at(rows, lengths) - bool(bound.q) / 2 for bound in self.upper]
        return float(np.maximum(np.min(ends, axis=0) - first, 0).sum())

    def key_blocks(
        self, first_row: ArrayLike, end_row: ArrayLike, lengths: Lengths, tile_kv: int
    ) -> KeyBlocks:
        """The blocks of ``tile_kv`` keys of rows [first_row, end_row), or of each such group.

        Affine bounds take their extremes at the first row or the last. Where all that move do so
        in the same direction, and every row sees a key, [first, end) is as small as can be.
        """
        ends = [np.asarray(first_row, np.int64), np.asarray(end_row, np.int64) - 1]
        lower = np.array([[x.at(at, lengths) for at in ends] for x in self.lower])
        upper = np.array([[x.at(at, lengths) for at in ends] for x in self.upper])
        first = lower.min(1).max(0) // tile_kv
        end = np.maximum(-(-upper.max(1).min(0) // tile_kv), first)
        whole_end = np.clip(upper.min(1).min(0) // tile_kv, first, end)
        whole_first = np.clip(-(-lower.max(1).max(0) // tile_kv), first, whole_end)
        return KeyBlocks(first, whole_first, whole_end, end)


def window(left: int | None, right: int | None) -> Mask:
    """Keys at most ``left`` before the query's place and ``right`` behind it; None: any."""
    mask = ALL_KEYS
    if left is not None:
        mask &= q - kv <= left
    if right is not None:
        mask &= kv - q <= right
    return mask


def _offset(bounds: Iterable[Affine]) -> int | None:
    """Of the bound that moves with the query, from its place: kernels have windows alone."""
    moving = [bound for bound in bounds if bound.q]
    if not moving:
        return None
    if moving != [replace(q, constant=moving[0].constant)]:
        raise ValueError(f"no window: kv is bound by {moving}")
    return moving[0].constant


def _place(offset: int) -> str:
    return f"q {'-' if offset < 0 else '+'} {abs(offset)}" if offset else "q"


def _affine(value: Affine | int) -> Affine:
    return Affine(constant=value) if isinstance(value, int) else value


def _atom(form: Affine) -> Mask:
    """Where form >= 0. ValueError when that is no bound of kv."""
    rest = replace(form, kv=0)
    if form.kv == 1:
        return Mask(lower=(-rest,))
    if form.kv == -1:
        return Mask(upper=(rest + 1,))
    raise ValueError(f"an atom has kv once, with the coefficient 1 or -1: {form}")


def _strictest(bounds: Iterable[Affine], pick: Any) -> tuple[Affine, ...]:
    found: dict[Affine, int] = {}
    for bound in bounds:
        moving = replace(bound, constant=0)
        found[moving] = pick(found.get(moving, bound.constant), bound.constant)
    made = [replace(moving, constant=constant) for moving, constant in found.items()]
    return tuple(sorted(made, key=astuple))


ALL_KEYS: Final = (kv >= 0) & (kv < seqlen_kv)
MASKS: Final[Mapping[str, Mask]] = {"none": ALL_KEYS, "causal": ALL_KEYS & (kv <= q)}
"""By what a spec says."""


def of_spec(spec: Mapping[str, Any]) -> Mask:
    """The mask of a SPEC: the conjunction of all fields that hide keys."""
    sides = {side: n for side, n in spec.get("window", {}).items() if n != "none"}
    return MASKS[spec["mask"]] & window(sides.get("left"), sides.get("right"))


def word_of(spec: Mapping[str, Any]) -> str:
    """What the mask of a SPEC is called: as `MASKS` has it, else by its edges."""
    mask = of_spec(spec)
    return next((word for word, one in MASKS.items() if one == mask), str(mask))
