# SPDX-License-Identifier: Apache-2.0
"""Lengths of packed sequences in words, as `--lengths` takes them.

``8x2048``
    8 sequences of 2048 queries on as many keys.
``2048/32768``
    One of 2048 queries on 32,768 keys, of which the last 2048 are its own: a chunk of a prompt.
``16x128:8192``
    16 sequences, each length drawn from 128 to 8192; ``128:8192`` alone are 16, too.
``64x1/8192+2048/8192``
    One batch of both: single queries beside a chunk.
``zipf``
    16384 / i for i = 1, 2, ..., the last one cut to what makes 32,768 in all.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from ..errors import UsageProblem, quoted
from ..expressions.language import MAX_SEQLEN

ZIPF: Final = "zipf"
ZIPF_LONGEST: Final = 16384
ZIPF_TOTAL: Final = 32768
DRAWN: Final = 16  # sequences of a range that says no number
MOST: Final = 2**16  # sequences of a batch

Lengths = tuple[tuple[int, int], ...]
"""Queries and keys of each sequence."""

_SIDE: Final = r"(\d{1,9}(?::\d{1,9})?)"
_TERM: Final = re.compile(rf"(?:([1-9]\d{{0,4}})x)?{_SIDE}(?:/{_SIDE})?")


class _Range(NamedTuple):
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}:{self.high}"


class _Term(NamedTuple):
    """number: of sequences. keys: None for as many as queries."""

    number: int
    queries: _Range
    keys: _Range | None

    def __str__(self) -> str:
        number = f"{self.number}x" if self.number > 1 or self.is_random else ""
        return f"{number}{self.queries}" + (f"/{self.keys}" if self.keys else "")

    @property
    def is_random(self) -> bool:
        return any(side.low < side.high for side in (self.queries, self.keys) if side)

    def draw(self, random: np.random.Generator) -> Iterator[tuple[int, int]]:
        for _ in range(self.number):
            queries = int(random.integers(self.queries.low, self.queries.high + 1))
            keys = queries
            if self.keys:
                keys = int(random.integers(self.keys.low, self.keys.high + 1))
            yield queries, keys


def in_words(text: str) -> str:
    """The same lengths as the name of a problem has them: one spelling for each.

    Raises UsageProblem for what says no lengths, or has no score.
    """
    if text == ZIPF:
        return text
    terms = _terms(text)
    if not any(x.queries.high and (x.keys or x.queries).high for x in terms):
        raise UsageProblem(f"--lengths {text}: no sequence has queries and keys")
    return "+".join(map(str, terms))


def is_random(text: str) -> bool:
    """Whether another seed would draw other lengths."""
    return bool(text) and text != ZIPF and any(x.is_random for x in _terms(text))


@lru_cache(maxsize=64)
def draw(text: str, seed: int) -> Lengths:
    """The lengths, (queries, keys) of each sequence in order; none for no words."""
    if text == ZIPF:
        return tuple((n, n) for n in _zipf())
    random = np.random.default_rng([seed, zlib.crc32(b"lengths")])
    terms = _terms(text) if text else []
    return tuple(each for term in terms for each in term.draw(random))


def alike(lengths: Lengths) -> tuple[int, int] | None:
    """Queries and keys of every sequence; None where they differ."""
    return lengths[0] if len({*lengths}) == 1 else None


def summary(lengths: Lengths) -> str:
    """Such as ``16 sequences of 523 to 7892 queries and keys``."""
    queries, keys = ([*side] for side in zip(*lengths, strict=True))
    said = f"{len(lengths)} sequences of {_Range(min(queries), max(queries))}"
    if queries == keys:
        return f"{said} queries and keys".replace(":", " to ")
    said += f" queries on {_Range(min(keys), max(keys))} keys"
    return said.replace(":", " to ")


def _terms(text: str) -> list[_Term]:
    found = []
    for each in text.split("+"):
        if (match := _TERM.fullmatch(each)) is None:
            raise UsageProblem(
                f"--lengths {text}: {quoted(each)} is no length such as 8x2048, "
                f"16x128:8192, 2048/32768 or {ZIPF}"
            )
        count, queries, keys = match.groups()
        sides = [_range(text, side) for side in (queries, keys) if side]
        is_drawn = any(side.low < side.high for side in sides)
        number = int(count) if count else DRAWN if is_drawn else 1
        found.append(_Term(number, sides[0], sides[1] if keys else None))
    if sum(x.number for x in found) > MOST:
        raise UsageProblem(f"--lengths {text}: more than {MOST} sequences")
    return found


def _range(text: str, side: str) -> _Range:
    low, _, high = side.partition(":")
    found = _Range(int(low), int(high or low))
    if not found.low <= found.high <= MAX_SEQLEN:
        raise UsageProblem(
            f"--lengths {text}: {quoted(side)} is no range within 0:{MAX_SEQLEN}"
        )
    return found


def _zipf() -> Iterator[int]:
    total = 0
    for i in range(1, ZIPF_LONGEST):
        length = min(ZIPF_LONGEST // i, ZIPF_TOTAL - total)
        total += length
        yield length
        if total == ZIPF_TOTAL:
            return
