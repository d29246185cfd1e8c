# SPDX-License-Identifier: Apache-2.0
"""Numbers and parts of shared memory from their formulas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from .kernel_plan import Number, Region
from .traits import Traits


def given(traits: Traits) -> Iterator[Number]:
    """Yield the constants that a spec alone decides, on any architecture."""
    spec = traits.spec
    yield Number("HEAD_DIM_QK", spec.head_dim.qk, "elements", "given")
    yield Number("HEAD_DIM_V", spec.head_dim.v, "elements", "given")
    if traits.seqlen_q is not None:
        unit = "positions" if traits.packed else "rows"
        yield Number("SEQLEN_Q", traits.seqlen_q, unit, "given")
    if traits.seqlen_kv is not None:
        yield Number("SEQLEN_KV", traits.seqlen_kv, "rows", "given")
    if (group := spec.heads.q_per_kv) > 1:
        yield Number("Q_PER_KV", group, "query heads per KV head", "given")
    if traits.cluster_size > 1:
        what = f"query tiles of one {traits.tiled_head}"
        if spec.cluster[1] > 1:
            what = "query heads of one KV head"
        yield Number("CLUSTER_SIZE", traits.cluster_size, f"CTAs: {what}", "given")


def derived(
    rows: Iterable[tuple[str, str, str]], chosen: Iterable[Number]
) -> Iterator[Number]:
    """Yield a constant for each (name, unit, formula), evaluated over those before it."""
    values = {number.name: number.value for number in chosen}
    for name, unit, formula in rows:
        values[name] = eval(formula, {"math": math}, values)
        yield Number(name, values[name], unit, "derived", formula)


def regions(
    rows: Iterable[tuple[str, str, int, str]], numbers: Iterable[Number], align: int
) -> tuple[Region, ...]:
    """Return parts of shared memory from (name, formula, stages, what each of these holds).

    Padding to a multiple of `align` bytes comes before the first one that holds something.
    """
    values = {number.name: number.value for number in numbers}
    made: list[Region] = []
    for name, formula, stages, holds in rows:
        if holds and not any(region.holds for region in made):
            padding = -sum(region.nbytes for region in made) % align
            made.append(Region("padding", padding, "to a multiple of SMEM_ALIGN"))
        made.append(Region(name, eval(formula, {}, values), formula, stages, holds))
    return tuple(made)
