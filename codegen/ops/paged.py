# SPDX-License-Identifier: Apache-2.0
"""An operation over packed queries and a paged cache: K and V of a sequence are in pages of a pool.

Key j of sequence i is row j % page of the page block_table[i, j // page], of one outside the pool
the first or the last. Slots of the pool and entries of the table behind a sequence's last key have
no meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .forward import BATCH, K, V
from .operation import Array, Axis, Given, Operation, Sizes, Spec, Tensor
from .scores import namespace
from .varlen import CU_SEQLENS_K, CU_SEQLENS_Q, PACKED_FORWARD, is_packed

I64 = NDArray[np.int64]
Lengths = Sequence[tuple[int, int]]  # (q, kv) of each sequence

LAST: Final = 2**31 - 1  # of int32
NO_KEYS: Final = (-LAST - 1, -1, 0)  # that seqused_k has for a sequence without any
# More than a table holds, by how much, for a sequence that fills its row of it.
EXCESS: Final = (0, 1, LAST)


def is_paged(spec: Spec) -> bool:
    """Whether K and V of a SPEC's packed sequences are in pages of a pool."""
    return is_packed(spec) and bool(spec.get("kv"))


def page_of(spec: Spec) -> int:
    """Rows of a page."""
    return int(spec["kv"]["paged"]["page"])


def packed(spec: Spec) -> dict[str, Any]:
    """The SPEC of the same sequences with packed K and V."""
    return {name: x for name, x in spec.items() if name != "kv"}


def _blocks(spec: Spec, sizes: Sizes) -> int:
    """Those of the longest sequence; two more where its last one is not filled."""
    page, most = page_of(spec), max((kv for _, kv in sizes.lengths), default=sizes.kv)
    return max(-(-most // page) + 2 * (most % page > 0), 1)


PAGES: Final = Axis(
    "pages", "p", "b", lambda spec, sizes: max(sizes.kv // page_of(spec), 1)
)
PAGE: Final = Axis(
    *("page", "r", "s", lambda spec, sizes: page_of(spec)),
    fixed=page_of,
    constant=True,
    cached=True,
)
BLOCKS: Final = Axis("blocks", "n", "d", _blocks)

SEQUSED_K: Final = Tensor(
    *("seqused_k", (BATCH,), "int32"),
    tma=False,
    when="kv",
    about=lambda spec: (
        "counts the keys of each sequence, cut to what its row of block_table holds"
    ),
)
BLOCK_TABLE: Final = Tensor(
    *("block_table", (BATCH, BLOCKS), "int32"),
    tma=False,
    when="kv",
    about=lambda spec: (
        f"names the page of every {page_of(spec)} keys; one beyond k is its first or last"
    ),
)


class Slots(NamedTuple):
    """Where the keys of a sequence are, one by one: pages, and rows of these."""

    page: I64
    row: I64


def slots_of(spec: Spec, sizes: Sizes) -> list[Slots]:
    """The slots of each sequence of a case."""
    page, table = page_of(spec), pages_of(spec, sizes)
    keys = [np.arange(kv) for _, kv in sizes.lengths]
    each = zip(table, keys, strict=True)
    return [Slots(row[own // page], own % page) for row, own in each]


def pages_of(spec: Spec, sizes: Sizes) -> I64:
    """[batch, blocks]: the page of the pool that each entry of a case's table means."""
    table = _indices(spec, sizes)[BLOCK_TABLE.name].astype(np.int64)
    return np.clip(table, 0, PAGES.size(spec, sizes) - 1)


def _pages(spec: Spec, lengths: Lengths, pages: int) -> list[I64]:
    """The pages of each sequence, in any order in a pool of so many.

    The pool's last one is the last of a sequence, which leaves rows of it unused if any does. Of
    sequences that fill a page the third begins with the page of the second. Where the pool is too
    small for all, those that are missing are outside.
    """
    page, keys = page_of(spec), np.array([kv for _, kv in lengths], np.int64)
    counts = -(-keys // page)
    ends = np.cumsum(counts)
    total = int(counts.sum())
    found = np.random.default_rng(total).permutation(max(pages, total))[:total]
    whole = np.flatnonzero(keys >= page)
    if len(whole) > 2:
        second, third = (ends - counts)[whole[1:3]]
        found[third] = found[second]
    if total:
        ragged = ends[keys % page > 0]
        last = found[(ragged[-1] if len(ragged) else total) - 1]
        exchanged = np.where(found == pages - 1, last, found)
        found = np.where(found == last, pages - 1, exchanged)
    return np.split(found, ends[:-1])


def _indices(spec: Spec, sizes: Sizes) -> dict[str, NDArray[np.int32]]:
    name, indices = CU_SEQLENS_Q.name, PACKED_FORWARD.indices(packed(spec), sizes)
    used, table = (_hostile if sizes.hostile else _served)(spec, sizes)
    return {
        name: indices[name],
        SEQUSED_K.name: used.astype(np.int32),
        BLOCK_TABLE.name: table.astype(np.int32),
    }


def _served(spec: Spec, sizes: Sizes) -> tuple[I64, I64]:
    """seqused_k and block_table as a server has them: pages of the pool in any order, each of one
    sequence, and 0 behind its last one.
    """
    used = np.array([kv for _, kv in sizes.lengths], np.int64)
    counts = -(-used // page_of(spec))
    order = np.random.default_rng(len(used)).permutation(PAGES.size(spec, sizes))
    table = np.zeros((sizes.batch, BLOCKS.size(spec, sizes)), np.int64)
    for row, end, count in zip(table, np.cumsum(counts), counts, strict=True):
        row[:count] = order[end - count : end]
    return used, table


def _hostile(spec: Spec, sizes: Sizes) -> tuple[I64, I64]:
    """As an adversary has them, where they may be anything.

    Entries of the table behind a sequence's last page are outside the pool, page 0, or pages that
    another sequence has, or none; without keys, a sequence begins with those that none has.
    """
    pages, blocks = PAGES.size(spec, sizes), BLOCKS.size(spec, sizes)
    lengths = sizes.lengths or [(0, 0)] * sizes.batch
    owned = _pages(spec, lengths, pages)
    free = np.setdiff1d(np.arange(pages), np.concatenate(owned))[:2]
    outside = np.array([-1, LAST, pages])
    garbage = np.array([*outside, 0, pages - 1, *free])
    table = garbage[np.arange(sizes.batch * blocks) % len(garbage)]
    table = table.reshape(sizes.batch, blocks)
    for row, own in zip(table, owned, strict=True):
        row[: len(own)] = np.where(own < pages, own, outside[own % 3])
        if not len(own):
            row[: len(free)] = free[: len(row)]
    used = np.array([kv for _, kv in lengths], np.int64)
    kinds = np.arange(sizes.batch) % len(NO_KEYS)
    full = used == blocks * page_of(spec)
    used += np.where(full, np.array(EXCESS)[kinds], 0)
    used = np.where(used > 0, np.minimum(used, LAST), np.array(NO_KEYS)[kinds])
    return used, table


def gathered(given: Given) -> Given:
    """The call with packed K and V, and a row of zeros behind them."""
    page = page_of(given.spec)
    table = given.inputs[BLOCK_TABLE.name].tolist()
    parts: dict[str, list[Array]] = {K.name: [], V.name: []}
    counts = []
    for row, used in zip(table, given.inputs[SEQUSED_K.name].tolist(), strict=True):
        counts.append(min(max(used, 0), len(row) * page))
        for name, found in parts.items():
            found.append(_taken(given.inputs[name], row, counts[-1]))
    inputs: dict[str, Array] = {**given.inputs}
    for name, found in parts.items():
        x = given.inputs[name]
        zeros = namespace(x).zeros_like(x[:1, 0])
        inputs[name] = namespace(x).concatenate((*found, zeros))
    inputs[CU_SEQLENS_K.name] = np.cumsum([0, *counts])
    return replace(given, spec=packed(given.spec), inputs=inputs)


def _taken(pool: Array, row: list[int], count: int) -> Array:
    """The first `count` keys of a row of the table."""
    pages, page = pool.shape[:2]
    ids = [min(max(number, 0), pages - 1) for number in row[: -(-count // page)]]
    return pool[ids].reshape(len(ids) * page, *pool.shape[2:])[:count]


def _exact(
    of: Operation, given: Given, wanted: Array | None = None
) -> Mapping[str, Array]:
    return of.exact(gathered(given), wanted)


def _truth(of: Operation, given: Given, wanted: Array | None = None) -> Any:
    return of.truth(gathered(given), wanted)


def _flops(
    spec: Spec, sizes: Sizes, inputs: Mapping[str, Array] | None = None
) -> float:
    return PACKED_FORWARD.flops(packed(spec), sizes)


def paging(of: Operation) -> Operation:
    """An operation over packed sequences whose K and V are in pages."""
    q, k, v, cu_seqlens_q, _, *beside = of.reads
    return replace(
        of,
        noun="Attention in packed sequences with a paged cache",
        reads=(
            q,
            replace(k, axes=(PAGES, PAGE, *k.axes[1:])),
            replace(v, axes=(PAGES, PAGE, *v.axes[1:])),
            cu_seqlens_q,
            SEQUSED_K,
            BLOCK_TABLE,
            *beside,
        ),
        exact=partial(_exact, of),
        truth=partial(_truth, of),
        flops=_flops,
        indices=_indices,
    )


PAGED_FORWARD: Final = paging(PACKED_FORWARD)
