# SPDX-License-Identifier: Apache-2.0
"""What a wrong row of O looks like: without a KV block, with a key too many, with another's keys.

A guess that helps whoever reads a finding; the verdict does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .masks import Lengths, Mask
from .scores import PLAIN, Place, Score

F64 = NDArray[np.float64]

BOUNDS = 2.0  # times what a right kernel may be off by
MOST_HEADS = 64  # (batch, KV head) pairs that are tried


@dataclass(frozen=True)
class Inputs:
    """q [batch, q, heads, qk], k [batch, kv, kv_heads, qk], v [batch, kv, kv_heads, v]; scale: of
    scores. tile: keys of a KV block. score, and the tensors it reads. sink: [heads].
    """

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    scale: float
    mask: Mask
    tile: int
    score: Score = PLAIN
    sink: NDArray[Any] | None = None
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def ending(
    place: tuple[int, int, int], out: F64, inputs: Inputs, expected: F64, bound: F64
) -> str:
    """What to add to a finding about a wrong row, (batch, row, head); empty when nothing fits.

    out, expected, bound: O, what it should be, and may be off by, [batch, q, heads, v].
    """
    text = likeness(out[place], place, inputs, expected, bound)
    batch, row, head = place
    return text and f"; row {row} of head {head}, batch {batch} is {text}"


def likeness(
    found: F64, place: tuple[int, int, int], inputs: Inputs, expected: F64, bound: F64
) -> str:
    """What a row of O, ``found`` [v], is like; for the rest see `ending`."""
    tolerance = BOUNDS * bound
    with np.errstate(all="ignore"):
        fits = []
        for candidate, text in _Row(place, inputs).candidates():
            error = float((np.abs(candidate - found) / tolerance[place]).max())
            if error <= 1:  # not so where it is NaN
                fits.append((error, text))
        others = (np.abs(expected - found) <= tolerance).all(-1)
    if fits:
        return min(fits, key=lambda fit: round(fit[0], 3))[1]
    for batch, number, head in np.argwhere(others).tolist():
        if (batch, number, head) != place:
            return f"what row {number} of head {head}, batch {batch} should be"
    return ""


class _Row:
    """A query row and the keys that it sees."""

    def __init__(self, place: tuple[int, int, int], inputs: Inputs) -> None:
        self.inputs = inputs
        self.batch, self.row, self.head = place
        self.q = inputs.q[place].astype(np.float64)
        self.keys = inputs.k.shape[1]
        self.kv_head = self.head * inputs.k.shape[2] // inputs.q.shape[2]
        self.sink = -np.inf if inputs.sink is None else float(inputs.sink[self.head])
        self.lengths = Lengths(inputs.q.shape[1], self.keys)
        mask = inputs.mask.at(self.batch, self.head, self.kv_head)
        (self.first,), (self.end,) = mask.keys([self.row], self.lengths)
        (self.hidden,) = mask.hidden([self.row], self.lengths)

    def candidates(self) -> Iterator[tuple[F64, str]]:
        """What the row would be, and of which error; of those alike the first is meant."""
        yield from self._blocks()
        yield from self._ends()
        yield from self._heads()

    def _weighted(
        self, batch: int, kv_head: int, end: int, score: Score | None = None
    ) -> tuple[F64, F64, np.float64, np.float64]:
        """Of its keys before `end`: exp(score - largest), the products with V, the largest, and
        exp(sink - largest).
        """
        keys = slice(self.first, end)
        k = self.inputs.k[batch, keys, kv_head].astype(np.float64)
        v = self.inputs.v[batch, keys, kv_head].astype(np.float64)
        products = (k @ self.q * self.inputs.scale)[None, None]
        place = Place(
            *(
                self.batch,
                np.array([self.head]),
                np.array([self.row]),
                np.arange(self.first, end),
            ),
            *(
                self.inputs.q.shape[2] // self.inputs.k.shape[2],
                self.lengths,
                self.inputs.tensors,
            ),
        )
        scores = (score or self.inputs.score).value(products, place)[0, 0]
        scores = np.where(self.hidden[keys], -np.inf, scores)
        largest = np.float64(scores.max(initial=-np.inf))
        weights = np.exp(scores - largest)
        return weights, weights[:, None] * v, largest, np.exp(self.sink - largest)

    def _blocks(self) -> Iterator[tuple[F64, str]]:
        weights, products, _, sink = self._weighted(self.batch, self.kv_head, self.end)
        if self.inputs.sink is not None:
            yield products.sum(0) / weights.sum(), "as without its sink"
        if read := self.inputs.score.tensors:
            yield self._of_products(), f"as without its {' and '.join(sorted(read))}"
        tile = self.inputs.tile
        for number in range(self.first // tile, -(-self.end // tile)):
            keys = (number * tile - self.first, (number + 1) * tile - self.first)
            block = slice(max(keys[0], 0), keys[1])
            for times, text in ((-1, "KV block {} missing"), (1, "KV block {} twice")):
                total = sink + weights.sum() + times * weights[block].sum()
                products_of = products.sum(0) + times * products[block].sum(0)
                yield products_of / total, f"as with {text.format(number)}"

    def _of_products(self) -> F64:
        """The row where scores were their products."""
        seen = (self.batch, self.kv_head, self.end)
        weights, products, _, sink = self._weighted(*seen, PLAIN)
        return np.asarray(products.sum(0) / (sink + weights.sum()))

    def _ends(self) -> Iterator[tuple[F64, str]]:
        weights, products, largest, sink = self._weighted(
            self.batch, self.kv_head, self.keys
        )
        totals, sums = sink + weights.cumsum(), products.cumsum(0)
        seen = self.end - self.first
        for keys in range(1, self.keys - self.first + 1):
            if keys != seen:
                text = f"as with {keys} keys, where it sees {seen}"
                yield sums[keys - 1] / totals[keys - 1], text
        for zeros in range(1, self.inputs.tile):
            total = totals[-1] + zeros * np.exp(-largest)
            yield sums[-1] / total, f"as with {zeros} keys of zeros beyond the last"

    def _heads(self) -> Iterator[tuple[F64, str]]:
        batches, _, heads, _ = self.inputs.k.shape
        for number in range(min(batches * heads, MOST_HEADS)):
            batch, head = divmod(number, heads)
            if (batch, head) != (self.batch, self.kv_head):
                weights, products, _, sink = self._weighted(batch, head, self.end)
                text = f"as with K and V of KV head {head}, batch {batch}"
                yield products.sum(0) / (sink + weights.sum()), text
