# SPDX-License-Identifier: Apache-2.0
"""A mask as a range of keys for every query row, and the KV blocks that follow from it.

A mask is what an expression comes to, solved for ``kv`` (`fmha_gen.expressions`): bounds of it from
below and above, in ``q``, the place of a query among the keys, and the two lengths; a gap, where a
query sees two ranges; and tests of single keys, where these do not say all. ``q`` is a query's row
plus ``seqlen_kv - seqlen_q``, so that the last row is at the last key (bottom-right).
The reference, the count of FLOPs, the loops of a kernel and the cases that it is shown are all read
from the same mask (decisions 0033 and 0039).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from operator import and_
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..expressions.language import (
    ExpressionError,
    Name,
    Node,
    Number,
    Param,
    names_in,
    parse,
    text_of,
    walk,
)
from ..expressions.solve import (
    END_KEY,
    FIRST_KEY,
    NO_GAP,
    Form,
    Gap,
    Piece,
    direction,
    solve,
    strictest,
    tests_of,
    with_gap,
    without_not,
)
from ..expressions.values import Values, check_range, evaluate
from . import params as declarations

I64 = NDArray[np.int64]


class Lengths(NamedTuple):
    """Query rows of a head, and keys."""

    q: int
    kv: int


class KeyBlocks(NamedTuple):
    """KV blocks of some query rows; an integer, or an array with one for each group of rows.

    No row sees a key outside [first, end) or inside [gap_first, gap_end), and every row sees every
    key of [whole_first, whole_end) but for [touched_first, touched_end), where some have their gap.
    A kernel goes from the last block to the first.
    """

    first: I64
    whole_first: I64
    whole_end: I64
    end: I64
    gap_first: I64
    gap_end: I64
    touched_first: I64
    touched_end: I64

    @property
    def total(self) -> I64:
        """Blocks that some row sees: one, which may be masked whole, where none sees any."""
        total: I64 = self.end - self.first - (self.gap_end - self.gap_first)
        return np.maximum(total, 1)

    def taken(self) -> list[int]:
        """Of one group of rows: the blocks that a kernel takes."""
        gap = range(int(self.gap_first), int(self.gap_end))
        end = max(int(self.end), int(self.first) + 1)
        return [x for x in range(int(self.first), end) if x not in gap]

    def whole(self) -> list[int]:
        """Of one group of rows: the blocks of which every row sees every key."""
        touched = range(int(self.touched_first), int(self.touched_end))
        whole = range(int(self.whole_first), int(self.whole_end))
        return [x for x in whole if x not in touched]


@dataclass(frozen=True)
class Mask:
    """Keys from the greatest lower bound up to, not including, the least upper one.

    Of bounds that differ in their constants alone the stricter is there, and none that follows from
    another. What a kernel computes has the bounds of `ALL_KEYS` among its own. Of these keys a row
    does not see those of its gap, nor those for which `tests` is false: None for none.

    params: what the bounds may read beside lengths and the query's place. values: of a call, by
    name; without them a mask that reads some has a structure, but no keys.
    """

    lower: frozenset[Form]
    upper: frozenset[Form]
    gap: Gap = NO_GAP
    tests: Node | None = None
    params: Mapping[str, Param] = field(default_factory=dict, compare=False)
    values: Values = field(default_factory=dict, compare=False)

    def __and__(self, other: Mask) -> Mask:
        """Of two masks, of which one is bounds alone."""
        assert not (self.apart and other.apart)
        return Mask(
            strictest(self.lower | other.lower, "lower"),
            strictest(self.upper | other.upper, "upper"),
            self.gap if other.gap.empty else other.gap,
            self.tests or other.tests,
            {**self.params, **other.params},
        )

    def given(self, values: Values) -> Mask:
        """The mask of a call, in which params have these values: numbers, and arrays."""
        return replace(self, values={x: values[x] for x in self.params})

    def at(self, batch: int, head: int, head_kv: int) -> Mask:
        """The mask of one head of a call."""
        return replace(
            self, values={**self.values, "b": batch, "h": head, "h_kv": head_kv}
        )

    def reads(self, *names: str) -> bool:
        """Whether some bound depends on one of these names, as an index or otherwise."""
        return any({*names} & names_in(x.node()) for x in self.lower | self.upper)

    @property
    def empty(self) -> bool:
        """No query sees any key, whatever the lengths."""
        return Piece(self.lower, self.upper).empty

    @property
    def falls(self) -> bool:
        """Some bound falls where the row rises."""
        bounds = self.lower | self.upper | self.gap.first | self.gap.end
        return any(direction(x.node(), self.params) == -1 for x in bounds)

    @property
    def left_edges(self) -> tuple[Form, ...]:
        """The bounds from below but for the first key."""
        return _sorted(self.lower - {FIRST_KEY})

    @property
    def right_edges(self) -> tuple[Form, ...]:
        """The bounds from above but for the end of K."""
        return _sorted(self.upper - {END_KEY})

    @property
    def gap_edges(self) -> tuple[tuple[Form, ...], tuple[Form, ...]]:
        """The bounds of the gap: of its first key, and of its end."""
        return _sorted(self.gap.first), _sorted(self.gap.end)

    @property
    def left(self) -> int | None:
        """How many keys before its own place a query sees; None for all, and where it varies."""
        offset = _offset(self.left_edges)
        return None if offset is None else -offset

    @property
    def right(self) -> int | None:
        """How many keys behind its own place a query sees; None for all, and where it varies."""
        offset = _offset(self.right_edges)
        return None if offset is None else offset - 1

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers in edges that are no window's, where they may turn."""
        own = [(self.left, self.left_edges), (self.right, self.right_edges)]
        own += [(None, self.gap_edges[0]), (self.reach, self.gap_edges[1])]
        edges = [bound for offset, side in own if offset is None for bound in side]
        found = {
            n.value for x in edges for n in walk(x.node()) if isinstance(n, Number)
        }
        found |= {
            n.value for n in walk(self.tests or Number(0)) if isinstance(n, Number)
        }
        return tuple(sorted(found - {0, 1}))

    @property
    def reach(self) -> int | None:
        """How many keys before its own place a query sees, of a gap those behind it; see `left`."""
        offset = None if self.gap.empty else _offset(self.gap_edges[1])
        return self.left if offset is None else -offset

    @property
    def edges(self) -> bool:
        """Some query does not see all keys."""
        return self != ALL_KEYS

    @property
    def apart(self) -> bool:
        """Some keys inside the bounds are not seen: blocks are masked for each edge by itself."""
        return not self.gap.empty or self.tests is not None

    @property
    def uneven(self) -> bool:
        """Some queries see more keys than others: of a window's, inside, all see as many."""
        left = self.left_edges if self.gap.empty else self.gap_edges[1]
        return self.edges and not all(map(self._slides, (left, self.right_edges)))

    def _slides(self, edges: tuple[Form, ...]) -> bool:
        """Whether the one edge is as far from the query's place for all queries of a call."""
        if len(edges) != 1 or dict(edges[0].terms).get(Name("q")) != 1:
            return False
        scalars = {Name(name) for name, x in self.params.items() if not x.axes}
        return {term for term, _ in edges[0].terms} <= {Name("q"), *scalars}

    def __str__(self) -> str:
        """The edges, such as ``q - 1023 <= kv <= q``, then the gap and the tests."""
        first = [text_of(bound.node()) for bound in self.left_edges]
        last = [text_of(bound.plus(-1).node()) for bound in self.right_edges]
        range_ = _range("kv", first, last)
        if not self.gap.empty:
            first = [text_of(bound.node()) for bound in _sorted(self.gap.first)]
            last = [text_of(bound.plus(-1).node()) for bound in _sorted(self.gap.end)]
            range_ = " and not ".join(
                filter(None, [range_, _range("kv", first, last, "min", "max")])
            )
        return " where ".join(
            filter(None, [range_, text_of(self.tests) if self.tests else ""])
        )

    def keys(self, rows: ArrayLike, lengths: Lengths) -> tuple[I64, I64]:
        """(first, end) of the keys that each of these query rows sees; end is first for none.

        Those that its gap and tests hide are among them.
        """
        first, end = self._bounds(rows, lengths)
        return first.max(0), np.maximum(end.min(0), first.max(0))

    def gaps(self, rows: ArrayLike, lengths: Lengths) -> tuple[I64, I64]:
        """(first, end) of the gap of each of these query rows."""
        first, end = self._bounds(rows, lengths, self.gap.first, self.gap.end)
        return first.min(0, initial=lengths.kv), end.max(0, initial=0)

    def hidden(self, rows: ArrayLike, lengths: Lengths) -> NDArray[np.bool_]:
        """Which keys inside their bounds these query rows do not see: [rows, kv]."""
        keys = np.arange(lengths.kv)
        first, end = (each[:, None] for each in self.gaps(rows, lengths))
        hidden = (first <= keys) & (keys < end)
        if self.tests is not None:
            values = self._names(np.asarray(rows, np.int64)[:, None], lengths)
            hidden = hidden | ~evaluate(self.tests, {**values, "kv": keys})
        return hidden

    def visible(self, rows: ArrayLike, lengths: Lengths) -> NDArray[np.bool_]:
        """Which keys these query rows see: [rows, kv]."""
        first, end = (each[:, None] for each in self.keys(rows, lengths))
        keys = np.arange(lengths.kv)
        seen = (first <= keys) & (keys < end)
        return seen & ~self.hidden(rows, lengths) if self.apart else seen

    def pairs(self, lengths: Lengths) -> float:
        """Visible (query, key) pairs, half of the key that is a row's last by the right edge.

        So TFLOPS of causal attention are counted everywhere: an edge halves what it runs through.
        """
        first, end = self._counted(lengths)
        if not self.apart:
            return float(np.maximum(end - first, 0).sum())
        count, step = 0.0, max(1, _SCORES // lengths.kv)
        for start in range(0, lengths.q, step):
            rows = np.arange(start, min(start + step, lengths.q))
            seen = self.visible(rows, lengths)
            # Of the last key inside the bounds: whether a moving bound ends them.
            last = np.clip(np.ceil(end[rows]).astype(np.int64) - 1, 0, lengths.kv - 1)
            halved = seen[np.arange(len(rows)), last] & (end[rows] % 1 > 0)
            count += float(seen.sum() - halved.sum() / 2)
        return count

    def pairs_of_blocks(
        self, lengths: Lengths, rows: ArrayLike, keys: ArrayLike
    ) -> NDArray[np.float64]:
        """The pairs of `pairs` by block: [tiles, blocks], which begin and end at rows and keys."""
        lower, ends = self._counted(lengths)
        first, end = (np.asarray(keys)[part] for part in (slice(-1), slice(1, None)))
        counts = np.minimum(ends[:, None], end) - np.maximum(lower[:, None], first)
        begin = np.asarray(rows)[:-1]
        found: NDArray[np.float64] = np.add.reduceat(np.maximum(counts, 0), begin)
        return found

    def block_kinds(
        self, lengths: Lengths, tile_q: int, tile_kv: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Of each block of a query tile, whether some row sees a key, and all rows all: [tiles,
        blocks].
        """
        first = np.arange(0, lengths.q, tile_q)[:, None]
        end = np.minimum(first + tile_q, lengths.q)
        of_tile = self.key_blocks(first, end, lengths, tile_kv)
        blocks = np.arange(-(-lengths.kv // tile_kv))
        seen = (of_tile.first <= blocks) & (blocks < of_tile.end)
        seen &= (blocks < of_tile.gap_first) | (of_tile.gap_end <= blocks)
        whole = (of_tile.whole_first <= blocks) & (blocks < of_tile.whole_end)
        whole &= (blocks < of_tile.touched_first) | (of_tile.touched_end <= blocks)
        return seen, whole

    def key_blocks(
        self, first_row: ArrayLike, end_row: ArrayLike, lengths: Lengths, tile_kv: int
    ) -> KeyBlocks:
        """The blocks of ``tile_kv`` keys of rows [first_row, end_row), or of each such group.

        Bounds rise or fall with the row, so they take their extremes at the first row or the last.
        Where all that move do so in the same direction, and every row sees a key, [first, end) is
        as small as can be. The last block is in no gap: a kernel begins with it.
        """
        first, last = np.asarray(first_row, np.int64), np.asarray(end_row, np.int64) - 1
        (least, most), (shortest, longest) = self._extremes(
            first, last, lengths, self.lower, self.upper
        )
        begin = least.max(0) // tile_kv
        end = np.maximum(-(-longest.min(0) // tile_kv), begin)
        whole_end = np.clip(shortest.min(0) // tile_kv, begin, end)
        whole_first = np.clip(-(-most.max(0) // tile_kv), begin, whole_end)
        if self.tests is not None:
            whole_first = whole_end
        if self.gap.empty:
            none = np.zeros_like(begin)
            return KeyBlocks(begin, whole_first, whole_end, end, *[none] * 4)
        (least, most), (shortest, longest) = self._extremes(
            first, last, lengths, self.gap.first, self.gap.end
        )
        gap_first = np.maximum(-(-most.min(0) // tile_kv), begin)
        last_block = np.maximum(end, begin + 1) - 1
        gap_end = np.maximum(
            np.minimum(shortest.max(0) // tile_kv, last_block), gap_first
        )
        touched = least.min(0) // tile_kv, -(-longest.max(0) // tile_kv)
        return KeyBlocks(
            begin, whole_first, whole_end, end, gap_first, gap_end, *touched
        )

    def _counted(self, lengths: Lengths) -> tuple[I64, NDArray[np.float64]]:
        """First key and end of every row, of which half a key is not counted at the right edge."""
        lower, upper = self._bounds(np.arange(lengths.q), lengths)
        halves = ["q" in names_in(bound.node()) for bound in self.upper]
        ends: NDArray[np.float64] = upper - np.array(halves)[:, None] / 2
        return lower.max(0), ends.min(0)

    def _extremes(
        self,
        first: I64,
        last: I64,
        lengths: Lengths,
        lower: Iterable[Form],
        upper: Iterable[Form],
    ) -> list[tuple[I64, I64]]:
        """(least, greatest) of the bounds on either side, between two rows: [bound, ...] each."""
        ends = (self._bounds(rows, lengths, lower, upper) for rows in (first, last))
        return [
            (np.minimum(a, b), np.maximum(a, b)) for a, b in zip(*ends, strict=True)
        ]

    def _names(self, rows: I64, lengths: Lengths) -> Values:
        """The values of what bounds and tests read, but for kv."""
        return {
            **{"q": rows + lengths.kv - lengths.q},
            **{"row": np.minimum(rows, lengths.q - 1)},
            **{"seqlen_q": lengths.q, "seqlen_kv": lengths.kv, **self.values},
        }

    def _bounds(
        self,
        rows: ArrayLike,
        lengths: Lengths,
        lower: Iterable[Form] | None = None,
        upper: Iterable[Form] | None = None,
    ) -> tuple[I64, I64]:
        """Bounds, by default its own, for some query rows: [bound, ...] from below and above."""
        at = np.asarray(rows, np.int64)
        values = self._names(at, lengths)

        def found(side: Iterable[Form]) -> I64:
            made = [np.broadcast_to(evaluate(x.node(), values), at.shape) for x in side]
            return np.array(made, np.int64).reshape(-1, *at.shape)

        return (
            found(self.lower if lower is None else lower),
            found(self.upper if upper is None else upper),
        )


def of_text(text: str, params: Mapping[str, Param] | None = None) -> Mask:
    """The mask of an expression.

    Raises ExpressionError for text that is none, and for a mask that no kernel has: one whose two
    ranges of keys are in no order, or that depends on more than place and params.
    """
    known = params or {}
    tree = parse(text, known)
    check_range(tree, known)
    read = [x for x in walk(tree) if isinstance(x, Name)]
    alone = {"q", "kv", "row", "seqlen_q", "seqlen_kv", *known}
    if more := [x for x in read if x.name not in alone]:
        message = f"a mask that depends on {more[0].name} is not generated"
        raise ExpressionError("FG219", more[0].column, message)
    ranges = solve(tree, known)
    found = with_gap(ranges.pieces)
    if found is None:
        message = (
            "a mask of two ranges of keys, of which neither is the first for every query, is not"
            " generated"
        )
        raise ExpressionError("FG219", tree.column, message)
    piece, gap = found
    tests = tests_of(without_not(tree), ranges, known)
    names = {x.name for x in read}
    own = {x: known[x] for x in known if x in names}
    return Mask(piece.lower, piece.upper, gap, tests, own)


def _sorted(bounds: Iterable[Form]) -> tuple[Form, ...]:
    return tuple(sorted(bounds, key=lambda bound: text_of(bound.node())))


def _offset(edges: tuple[Form, ...]) -> int | None:
    """Of the one edge that is as far from the query's place for all queries."""
    if len(edges) == 1 and edges[0].terms == ((Name("q"), 1),):
        return edges[0].constant
    return None


def _range(name: str, first: list[str], last: list[str], *functions: str) -> str:
    """Bounds around a name; nothing where there are none."""
    outer, inner = functions or ("max", "min")
    parts = [_greatest(outer, first), name, _greatest(inner, last)]
    return " <= ".join(filter(None, parts)) if first or last else ""


def _greatest(function: str, bounds: list[str]) -> str:
    return f"{function}({', '.join(bounds)})" if len(bounds) > 1 else "".join(bounds)


_SCORES: Final = 1 << 24  # of which visible pairs are counted at once
ALL_KEYS: Final = Mask(frozenset({FIRST_KEY}), frozenset({END_KEY}))
MASKS: Final[Mapping[str, Mask]] = {"none": ALL_KEYS, "causal": of_text("kv <= q")}
"""By what a spec says."""


@cache
def _of_text(text: str, params: tuple[tuple[str, Param], ...] = ()) -> Mask:
    return of_text(text, dict(params))


def text_of_word(text: str) -> str:
    """The expression of what a spec says: a word of `MASKS`, or an expression."""
    return {"none": "0 <= kv", "causal": declarations.CAUSAL}.get(text, text)


def window(
    left: int | str | None,
    right: int | str | None,
    params: Mapping[str, Param] | None = None,
) -> Mask:
    """Keys at most ``left`` before the query's place and ``right`` behind it; None: any.

    A side may be the name of one of params.
    """
    known = (*(params or {}).items(),)
    sides = (("q - kv", left), ("kv - q", right))
    given = (_of_text(f"{way} <= {n}", known) for way, n in sides if n is not None)
    return reduce(and_, given, ALL_KEYS)


def of_spec(spec: Mapping[str, Any]) -> Mask:
    """The mask of a SPEC: the conjunction of all fields that hide keys."""
    known = declarations.of_spec(spec)
    text = text_of_word(spec["mask"])
    if spec.get("prefix"):
        text = f"({text}) or kv < prefix[b]"
    texts = [text]
    if "document_start" in known:
        texts.append("document_start[b, row] <= kv")
    if "document_end" in known:
        texts.append("kv < document_end[b, row]")
    sides = {
        side: f"window_{side}" if keys == declarations.ARGUMENT else keys
        for side, keys in (spec.get("window") or {}).items()
        if keys != "none"
    }
    narrow = window(sides.get("left"), sides.get("right"), known)
    return reduce(and_, (_of_text(each, (*known.items(),)) for each in texts), narrow)


def word_of(spec: Mapping[str, Any]) -> str:
    """What the mask of a SPEC is called: as `MASKS` has it, else by its edges."""
    mask = of_spec(spec)
    return _word(mask) or str(mask)


def said(mask: Mask) -> str:
    """What the field `mask` of a SPEC says for a mask: a word of `MASKS`, or an expression."""
    atoms = [f"{text_of(bound.node())} <= kv" for bound in mask.left_edges]
    atoms += [f"kv <= {text_of(bound.plus(-1).node())}" for bound in mask.right_edges]
    if not mask.gap.empty:
        first, end = ([text_of(x.node()) for x in each] for each in mask.gap_edges)
        atoms.append(
            f"(kv < {_greatest('min', first)} or kv >= {_greatest('max', end)})"
        )
    if mask.tests is not None:
        atoms.append(f"({text_of(mask.tests)})")
    return _word(mask) or " and ".join(atoms)


def _word(mask: Mask) -> str:
    return next((word for word, one in MASKS.items() if one == mask), "")
