# SPDX-License-Identifier: Apache-2.0
"""What an sm100 kernel does, in words: at the top of its file, and for `explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..features.bias import has_bias
from ..features.paged import page_of
from ..spec.model import Spec
from . import words
from .traits import Traits

_ROLES: Final = """\
A CTA works on a query tile of 256 rows, in halves of 128.
Roles: warps 0 to 3 and 4 to 7 turn S of a half into P; warps 8 to 11 rescale and normalize O;
{others}
Pipelines (what fills a stage; what frees it):
  q      load -> mma            Q of a half, TMA        commit, after QK of its last block
  kv     load -> mma            K, V, K, ... by TMA     {freed}
  s      mma -> softmax         S of a half, commit     {all} threads of softmax: P but its tail,
                                                        {all} of correction: O is rescaled
  tail   softmax -> mma         the rest of P, {all}      QK of the next block: s says so
  stats  softmax -> correction  a block's factor of O,  128 threads of correction
                                in the end the sum
  o      mma -> correction      O of a half, commit     {all} threads of correction
  out    correction -> store    O in shared memory      the store warp"""


_OTHERS: Final = (
    "warp 12 loads by TMA; warp 13 owns the tensor memory and issues QK and PV; warp 14 stores O."
)
_OTHERS_OF_PAGES: Final = """\
warp 12 loads Q and K by TMA, and warp 15 loads V; warp 13 owns the tensor memory and issues QK
and PV; warp 14 stores O."""


_PAIR: Final = """\
A pair of CTAs has neighbouring query tiles of a head, and each MMA has rows of both. Each CTA
loads half of K's rows and half of V's columns; the leader, of rank 0, issues. What its MMA warp
waits for is in the leader and counts both CTAs; what it commits is told to both."""


_ROLES_BY_BLOCK: Final = """\
A CTA works on a query tile of 128 rows.
Roles: warps 0 to 3 turn S into P; warps 4 to 7 rescale and normalize O; warp 8 loads by TMA;
warp 9 owns the tensor memory and issues QK and PV; warp 10 stores O.
Pipelines (what fills a stage; what frees it):
  q      load -> mma            Q by TMA                commit, after QK of its last block
  kv     load -> mma            K, K, V, K, V, ... V    commit
  s      mma -> softmax         S of a block, commit    256 threads of softmax: P but its tail
  tail   softmax -> mma         the rest of P, 256      QK of the block after the next: s says so
  stats  softmax -> correction  a block's factor of O,  128 threads of correction
                                in the end the sum
  o      mma -> correction      O with a block, commit  256 threads of correction
  out    correction -> store    O in shared memory      the store warp"""


def roles(
    spec: Spec, smem_bytes: int, tmem_columns: int, *, by_block: bool
) -> Iterator[str]:
    """Yield the lines of a file's header that say who does what, and what it takes."""
    shared = spec.multicast != "none"
    freed = (
        "commit of each CTA, after both halves"
        if shared
        else "commit, after both halves"
    )
    pair, paged = spec.cta_group > 1, page_of(spec) is not None
    threads = 256 if pair else 128
    others = _OTHERS_OF_PAGES if paged else _OTHERS
    words = _ROLES.format(others=others, freed=freed, all=threads)
    for line in (_ROLES_BY_BLOCK if by_block else words).splitlines():
        if has_bias(spec) and line.startswith("  s "):
            loaded = f"bias of a {'block' if by_block else 'half'}, TMA"
            yield f"  bias   load -> softmax        {loaded:22}  4 warps of softmax"
        yield line
    if pair:
        yield from _PAIR.splitlines()
    if shared:
        yield "A cluster has 2 query tiles of a head; each CTA loads a slice of K and V for both."
    yield (
        f"Shared memory: {smem_bytes} bytes per CTA, one CTA per SM."
        f" Tensor memory: {tmem_columns} columns."
    )
    yield "Its record says whether an emulator or a GPU has run it."


def statements(traits: Traits, has: Mapping[str, Any]) -> Iterator[str]:
    """Yield a statement each from the values that the templates read."""
    yield from _tile_statements(has)
    if traits.mask.edges:
        yield f"Query row i, at q = i + seqlen_kv - seqlen_q, sees {traits.mask}."
    yield from _block_statements(has)
    yield from words.scores(traits.score)
    if traits.softcap is not None:
        yield words.capped(traits.softcap)
    if has["e4m3"]:
        yield (
            "P is rounded to e4m3, four keys to a column; row sums are of P before that."
            " V is not transposed: MMAs of 8 bits take it N-major."
        )
    yield words.empty_rows(has)
    if has["bias"]:
        yield words.bias(has)
    if has["sink"]:
        yield words.sink()
    yield "O leaves through shared memory of its own; TMA drops rows past the end."
    if has["lse"]:
        tail = words.tail_of_rows(has)
        yield f"LSE is stored by the thread that owns the row, {tail}."


def _tile_statements(has: Mapping[str, Any]) -> Iterator[str]:
    owner = "cluster" if has["cluster_size"] > 1 else "CTA"
    if has["persistent"]:
        order = words.order_of_tiles(has, "head")
        yield f"Persistent: each {owner} takes a tile per wave, {order}."
    else:
        order = ", those with most keys first" if has["lpt_order"] else ""
        yield f"A {owner} for each tile{order}."
    if has["lpt_order"] and not has["varlen"]:
        yield "A section of SM count // SMS_PER_HEAD heads is done before the next one starts."
    yield from words.sequences(has, "The store warp")
    if has["cluster_size"] > 1:
        loads = "each loads for itself"
        if has["pair"]:
            loads = "each loads half of K and V, for MMAs over both"
        if has["multicast"]:
            loads = "each loads its slice of K and V for both"
        yield f"A cluster has {has['cluster_q']} query tiles of one head; {loads}."
    if has["by_block"]:
        yield "QK is a block ahead of PV: softmax of one runs beside the MMAs of the other."
    else:
        yield "Halves of a query tile alternate: softmax of one runs beside the MMAs of the other."


def _block_statements(has: Mapping[str, Any]) -> Iterator[str]:
    if has["lists"]:
        yield words.listed(has)
        yield from words.masks_of_lists(has)
        return
    if has["dynamic_blocks"]:
        per = "query tile" if has["edges"] else "launch"
        yield f"KV blocks, last first; how many is counted at run time, per {per}."
    else:
        yield "KV blocks, last first; KV_BLOCKS of them for every query tile."
    yield from words.of_each_block(has)
    if has["one_loop"]:
        return
    crossed = words.crossed(has)
    if not crossed:
        yield f"{words.NO_MASK} One loop over the blocks."
        return
    yield f"Loop 1, masked for {crossed}: blocks that not every row sees whole."
    if has["whole_loop"]:
        rows = "row" if has["by_block"] else "row of the half"
        yield f"Loop 2, without masks: blocks that every {rows} sees whole."
    if has["left_loop"]:
        yield f"Loop 3, masked {words.of_left_edge(has)}."
