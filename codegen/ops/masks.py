# SPDX-License-Identifier: Apache-2.0
"""A mask as a range of keys for every query row, and the KV blocks that follow from it.

A mask is what an expression comes to, solved for ``kv`` (`fmha_gen.expressions`): bounds of it from
below and above, in ``q``, the place of a query among the keys, and the two lengths. ``q`` is a
query's row plus ``seqlen_kv - seqlen_q``, so that the last row is at the last key (bottom-right).
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
    Form,
    Piece,
    direction,
    solve,
    strictest,
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

    No row sees a key outside [first, end), and every row sees every key of [whole_first,
    whole_end). A kernel goes from the last block to the first: masked, whole, masked.
    """

    first: I64
    whole_first: I64
    whole_end: I64
    end: I64


@dataclass(frozen=True)
class Mask:
    """Keys from the greatest lower bound up to, not including, the least upper one.

    Of bounds that differ in their constants alone the stricter is there, and none that follows from
    another. What a kernel computes has the bounds of `ALL_KEYS` among its own.

    params: what the bounds may read beside lengths and the query's place. values: of a call, by
    name; without them a mask that reads some has a structure, but no keys.
    """

    lower: frozenset[Form]
    upper: frozenset[Form]
    params: Mapping[str, Param] = field(default_factory=dict, compare=False)
    values: Values = field(default_factory=dict, compare=False)

    def __and__(self, other: Mask) -> Mask:
        return Mask(
            strictest(self.lower | other.lower, "lower"),
            strictest(self.upper | other.upper, "upper"),
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
    def falling(self) -> tuple[Form, ...]:
        """The bounds that fall where the row rises."""
        falls = [
            x for x in self.lower | self.upper if direction(x.node(), self.params) == -1
        ]
        return _sorted(falls)

    @property
    def left_edges(self) -> tuple[Form, ...]:
        """The bounds from below but for the first key."""
        return _sorted(self.lower - {FIRST_KEY})

    @property
    def right_edges(self) -> tuple[Form, ...]:
        """The bounds from above but for the end of K."""
        return _sorted(self.upper - {END_KEY})

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
        edges = [bound for offset, side in own if offset is None for bound in side]
        found = {
            n.value for x in edges for n in walk(x.node()) if isinstance(n, Number)
        }
        return tuple(sorted(found - {0, 1}))

    @property
    def edges(self) -> bool:
        """Some query does not see all keys."""
        return bool(self.left_edges or self.right_edges)

    @property
    def uneven(self) -> bool:
        """Some queries see more keys than others: of a window's, inside, all see as many."""
        return self.edges and not all(
            map(self._slides, (self.left_edges, self.right_edges))
        )

    def _slides(self, edges: tuple[Form, ...]) -> bool:
        """Whether the one edge is as far from the query's place for all queries of a call."""
        if len(edges) != 1 or dict(edges[0].terms).get(Name("q")) != 1:
            return False
        scalars = {Name(name) for name, x in self.params.items() if not x.axes}
        return {term for term, _ in edges[0].terms} <= {Name("q"), *scalars}

    def __str__(self) -> str:
        """The edges, such as ``q - 1023 <= kv <= q``; nothing when there are none."""
        first = [text_of(bound.node()) for bound in self.left_edges]
        last = [text_of(bound.plus(-1).node()) for bound in self.right_edges]
        parts = [_greatest("max", first), "kv", _greatest("min", last)]
        return " <= ".join(filter(None, parts)) if first or last else ""

    def keys(self, rows: ArrayLike, lengths: Lengths) -> tuple[I64, I64]:
        """(first, end) of the keys that each of these query rows sees; end is first for none."""
        first, end = self._bounds(rows, lengths)
        return first.max(0), np.maximum(end.min(0), first.max(0))

    def visible(self, rows: ArrayLike, lengths: Lengths) -> NDArray[np.bool_]:
        """Which keys these query rows see: [rows, kv]."""
        first, end = (each[:, None] for each in self.keys(rows, lengths))
        keys = np.arange(lengths.kv)
        return (first <= keys) & (keys < end)

    def pairs(self, lengths: Lengths) -> float:
        """Visible (query, key) pairs, half of the key that is a row's last by the right edge.

        So TFLOPS of causal attention are counted everywhere: an edge halves what it runs through.
        """
        lower, ends = self._counted(lengths)
        return float(np.maximum(ends - lower, 0).sum())

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
        return seen, (of_tile.whole_first <= blocks) & (blocks < of_tile.whole_end)

    def key_blocks(
        self, first_row: ArrayLike, end_row: ArrayLike, lengths: Lengths, tile_kv: int
    ) -> KeyBlocks:
        """The blocks of ``tile_kv`` keys of rows [first_row, end_row), or of each such group.

        Bounds rise or fall with the row, so they take their extremes at the first row or the last.
        Where all that move do so in the same direction, and every row sees a key, [first, end) is
        as small as can be.
        """
        first, last = np.asarray(first_row, np.int64), np.asarray(end_row, np.int64) - 1
        sides = zip(
            self._bounds(first, lengths), self._bounds(last, lengths), strict=True
        )
        (least, most), (shortest, longest) = (
            (np.minimum(a, b), np.maximum(a, b)) for a, b in sides
        )
        begin = least.max(0) // tile_kv
        end = np.maximum(-(-longest.min(0) // tile_kv), begin)
        whole_end = np.clip(shortest.min(0) // tile_kv, begin, end)
        whole_first = np.clip(-(-most.max(0) // tile_kv), begin, whole_end)
        return KeyBlocks(begin, whole_first, whole_end, end)

    def _counted(self, lengths: Lengths) -> tuple[I64, NDArray[np.float64]]:
        """First key and end of every row, of which half a key is not counted at the right edge."""
        lower, upper = self._bounds(np.arange(lengths.q), lengths)
        halves = ["q" in names_in(bound.node()) for bound in self.upper]
        ends: NDArray[np.float64] = upper - np.array(halves)[:, None] / 2
        return lower.max(0), ends.min(0)

    def _bounds(self, rows: ArrayLike, lengths: Lengths) -> tuple[I64, I64]:
        """All bounds from below and from above of some query rows: [bound, ...] each."""
        at = np.asarray(rows, np.int64)
        values: Values = {
            **{"q": at + lengths.kv - lengths.q, "row": np.minimum(at, lengths.q - 1)},
            **{"seqlen_q": lengths.q, "seqlen_kv": lengths.kv, **self.values},
        }
        lower, upper = (
            np.array(
                [np.broadcast_to(evaluate(x.node(), values), at.shape) for x in side]
            )
            for side in (self.lower, self.upper)
        )
        return lower, upper


def of_text(text: str, params: Mapping[str, Param] | None = None) -> Mask:
    """The mask of an expression.

    Raises ExpressionError for text that is none, and for a mask that no kernel has: one that is
    not a range of keys that rises with the query, or that depends on more than place and params.
    """
    known = params or {}
    tree = parse(text, known)
    check_range(tree, known)
    read = {(x.name, *x.axes) for x in walk(tree) if isinstance(x, Name)}
    alone = {"q", "kv", "row", "seqlen_q", "seqlen_kv", *known}
    if more := {names[0] for names in read} - alone:
        message = f"a mask that depends on {', '.join(sorted(more))} is not generated"
        raise ExpressionError("FG219", tree.column, message)
    ranges = solve(tree, known)
    if not ranges.exact or len(ranges.pieces) > 1:
        message = (
            "a mask that is not one range of keys for every query is not generated"
        )
        raise ExpressionError("FG219", tree.column, message)
    (piece,) = ranges.pieces
    names = {names[0] for names in read}
    return Mask(piece.lower, piece.upper, {x: known[x] for x in known if x in names})


def _sorted(bounds: Iterable[Form]) -> tuple[Form, ...]:
    return tuple(sorted(bounds, key=lambda bound: text_of(bound.node())))


def _offset(edges: tuple[Form, ...]) -> int | None:
    """Of the one edge that is as far from the query's place for all queries."""
    if len(edges) == 1 and edges[0].terms == ((Name("q"), 1),):
        return edges[0].constant
    return None


def _greatest(function: str, bounds: list[str]) -> str:
    return f"{function}({', '.join(bounds)})" if len(bounds) > 1 else "".join(bounds)


ALL_KEYS: Final = of_text("0 <= kv")
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
    return _word(mask) or " and ".join(atoms)


def _word(mask: Mask) -> str:
    return next((word for word, one in MASKS.items() if one == mask), "")
