# SPDX-License-Identifier: Apache-2.0
"""How evenly orders of packed sequences' work tiles fill a GPU: `python -m tests.balance`.

A tile costs its KV blocks and 1.5 more: causal self-attention, tiles of 128 by 128, on 132 CTAs.
Printed is what the fullest CTA has, over the mean; 1.00 is a GPU that ends at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

CTAS: Final = 132
TILE: Final = 128
BESIDE: Final = 1.5
"""[KV blocks] that a tile costs beside its own."""
GROUP: Final = 32
SECTION: Final = 33
"""[heads] that are done before the next ones start."""

Costs = list[float]
Order = Callable[[list[int], int], Costs]


def cost(length: int, tile: int) -> float:
    return min(-(-length // TILE), tile + 1) + BESIDE


def tiles_of(length: int) -> int:
    return -(-length // TILE)


def _sections(heads: int) -> list[int]:
    return [min(SECTION, heads - first) for first in range(0, heads, SECTION)]


def longest_first(lengths: list[int], heads: int) -> Costs:
    """Of each sequence by itself."""
    return [
        cost(length, tile)
        for length in lengths
        for count in _sections(heads)
        for tile in reversed(range(tiles_of(length)))
        for _ in range(count)
    ]


def pairs(lengths: list[int], heads: int) -> Costs:
    """Two tiles of a head at a time, the one as far from the last as the other from the first."""
    made = []
    for length in lengths:
        for count in _sections(heads):
            last = tiles_of(length) - 1
            for first in range((last + 2) // 2):
                other = cost(length, first) if first < last - first else 0
                made += [cost(length, last - first) + other] * count
    return made


def levels(together: int) -> Order:
    """Of GROUP sequences at a time, so many tiles of a head together."""

    def order(lengths: list[int], heads: int) -> Costs:
        made = []
        for first in range(0, len(lengths), GROUP):
            group = lengths[first : first + GROUP]
            for level in reversed(range(tiles_of(max(group)) // together + 1)):
                for length in group:
                    end = min((level + 1) * together, tiles_of(length))
                    tiles = range(level * together, end)
                    of_head = [cost(length, tile) for tile in reversed(tiles)]
                    made += of_head * heads
        return made

    return order


def in_waves(costs: Costs, *, backwards: bool) -> float:
    filled = np.zeros(CTAS)
    for wave, first in enumerate(range(0, len(costs), CTAS)):
        some = np.zeros(CTAS)
        some[: len(costs[first : first + CTAS])] = costs[first : first + CTAS]
        filled += some[::-1] if backwards and wave % 2 else some
    return float(filled.max() / filled.mean())


def by_counter(costs: Costs) -> float:
    """Each CTA takes the next tile when it is done."""
    filled = [0.0] * CTAS
    for each in costs:
        heapq.heapreplace(filled, filled[0] + each)
    return max(filled) / (sum(costs) / CTAS)


def draws() -> Iterator[tuple[list[int], int]]:
    random = np.random.default_rng(0)
    for heads in (4, 8, 16, 32, 64):
        some = [[2**n] * batch for n in range(7, 15) for batch in (1, 2, 4, 8, 16, 32)]
        for _ in range(8):
            some.append(random.integers(128, 8193, 16).tolist())
            some.append(random.integers(16, 1025, 64).tolist())
            for batch in (32, 100):
                drawn = random.lognormal(7, 1, batch)
                some.append(np.clip(drawn, 16, 32768).astype(int).tolist())
        some += [harmonic(), harmonic()[::-1]]
        for lengths in some:
            work = sum(map(tiles_of, lengths)) * heads
            if work >= 4 * CTAS and sum(lengths) * heads < 4e6:
                yield lengths, heads


def harmonic() -> list[int]:
    """16384 / i, to 32768 in all."""
    made: list[int] = []
    while sum(made) + 16384 // (len(made) + 1) <= 32768:
        made.append(16384 // (len(made) + 1))
    return made


NAMED: Final = {
    "8 x 2048": [2048] * 8,
    "1 x 16384": [16384],
    "32 x 512": [512] * 32,
    "16 x 1024": [1024] * 16,
    "4 x 4096": [4096] * 4,
    "16384 / i": harmonic(),
}


def main() -> None:
    drawn = list(draws())
    rows: dict[str, Callable[[list[int], int], float]] = {
        "longest first in each, odd waves backwards": lambda lengths, heads: in_waves(
            longest_first(lengths, heads), backwards=True
        ),
        "pairs": lambda lengths, heads: in_waves(
            pairs(lengths, heads), backwards=False
        ),
        "a counter, longest first in each": lambda lengths, heads: by_counter(
            longest_first(lengths, heads)
        ),
    }
    for together in (1, 2, 4):
        rows[f"levels, {together} of a head"] = lambda lengths, heads, n=together: (
            in_waves(levels(n)(lengths, heads), backwards=True)
        )
        rows[f"a counter, levels, {together} of a head"] = (
            lambda lengths, heads, n=together: by_counter(levels(n)(lengths, heads))
        )
    print(f"{len(drawn)} draws; 16 heads:", ", ".join(NAMED))
    for name, measure in rows.items():
        all_of_them = np.array([measure(*each) for each in drawn])
        some = [f"{measure(lengths, 16):.2f}" for lengths in NAMED.values()]
        print(
            f"{name:44} mean {all_of_them.mean():.2f}, 9 in 10 below"
            f" {np.quantile(all_of_them, 0.9):.2f}, worst {all_of_them.max():.2f};",
            " ".join(some),
        )


if __name__ == "__main__":
    main()
