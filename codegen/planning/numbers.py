# SPDX-License-Identifier: Apache-2.0
"""Numbers and parts of shared memory from their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..features.feature import said
from ..ops.operation import BYTES
from ..spec.model import Spec
from .kernel_plan import Number, Region
from .traits import Traits


def given(traits: Traits) -> Iterator[Number]:
    """Yield the constants that a spec alone decides, on any architecture."""
    spec = traits.spec
    positions = "positions" if traits.packed else "rows"
    ctas = "query heads of one KV head"
    if spec.cluster[0] > 1:
        ctas = f"query tiles of one {traits.tiled_head}"
    for name, value, unit, path in (
        ("HEAD_DIM_QK", spec.head_dim.qk, "elements", "head_dim.qk"),
        ("HEAD_DIM_V", spec.head_dim.v, "elements", "head_dim.v"),
        ("SEQLEN_Q", traits.seqlen_q, positions, "seqlen.q"),
        ("SEQLEN_KV", traits.seqlen_kv, "rows", "seqlen.kv"),
        ("WINDOW_LEFT", traits.mask.left, "keys before a query's own", "window.left"),
        ("SCORE_FACTOR", traits.score_factor, "of s", "score"),
        ("SOFTCAP", traits.softcap, "natural log: of a score, either way", "softcap"),
        (
            "WINDOW_RIGHT",
            traits.mask.right or None,
            "keys behind a query's own",
            "window.right",
        ),
        ("Q_PER_KV", spec.heads.q_per_kv, "query heads per KV head", "heads.q_per_kv"),
        ("PAGE", traits.page, "keys of a page", "kv.paged.page"),
        ("CLUSTER_SIZE", traits.cluster_size, f"CTAs: {ctas}", "cluster"),
    ):
        if value is not None and (name, value) not in (
            ("Q_PER_KV", 1),
            ("CLUSTER_SIZE", 1),
        ):
            yield Number(name, value, unit, "given", field=path)
    if scalars := [x for x in traits.mask.params.values() if not x.axes]:
        yield Number(
            "ARGUMENT_LIMIT",
            *(
                scalars[0].range[1],
                "of an int that the mask reads, either way",
                "planned",
            ),
            reason="no sequence is longer, and sums with positions fit 32 bits",
        )


def of_scores(traits: Traits) -> Iterator[tuple[str, str, str]]:
    """Yield (name, unit, formula) of what follows from the score."""
    if traits.score_factor is not None:
        yield "SCORE_LOG2", "log2: of s", "SCORE_FACTOR / math.log(2)"
    if traits.softcap is not None:
        yield "CAP_LOG2", "log2: of a score", "SOFTCAP / math.log(2)"


def of_bias(traits: Traits, rows: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, unit, formula) of a bias, of which a stage has so many rows or one for all."""
    yield "BIAS_BYTES", "of an element", str(BYTES[traits.spec.bias.dtype])
    yield "BIAS_STRIDE", "elements: step of TMA strides", "TMA_ALIGN // BIAS_BYTES"
    yield "BIAS_ROWS", "rows per stage", rows if traits.bias_of_rows else "1"
    if traits.spec.bias.dtype == "bf16":
        yield "BIAS_BITS", "of an element", "BYTE * BIAS_BYTES"
    formula = "BIAS_ROWS * TILE_KV * BIAS_BYTES"
    yield "BIAS_TX_BYTES", "bytes per stage", formula
    if not traits.bias_of_rows:
        formula = "-(-BIAS_TX_BYTES // 128) * 128 // BIAS_BYTES"
        yield "BIAS_PITCH", "elements from a stage to the next", formula


def tuned(
    spec: Spec, rows: Iterable[tuple[str, int, str, str]], why: Callable[[str], str]
) -> Iterator[Number]:
    """Yield a constant for each (name, value, unit, field), planned where the spec has no such."""
    for name, value, unit, path in rows:
        if path and said(spec, path) is not None:
            yield Number(name, value, unit, "given", field=path)
        else:
            yield Number(name, value, unit, "planned", reason=why(name))


def derived(
    rows: Iterable[tuple[str, str, str]],
    chosen: Iterable[Number],
    constants: Mapping[str, int],
) -> Iterator[Number]:
    """Yield a constant for each (name, unit, formula), evaluated over those before it.

    constants: the architecture's.
    """
    values: dict[str, int | float] = {**constants}
    values |= {number.name: number.value for number in chosen}
    for name, unit, formula in rows:
        values[name] = eval(formula, {"math": math}, values)
        yield Number(name, values[name], unit, "derived", formula)


def regions(
    rows: Iterable[tuple[str, str, int, str]], numbers: Iterable[Number], align: int
) -> tuple[Region, ...]:
    """Return parts of shared memory from (name, formula, stages, what each of these holds).

    Those that hold something begin at multiples of `align` bytes: padding comes before the first,
    and before others that need it.
    """
    values = {number.name: number.value for number in numbers}
    made: list[Region] = []
    for name, formula, stages, holds in rows:
        padding = -sum(region.nbytes for region in made) % align
        if holds and (padding or not any(region.holds for region in made)):
            made.append(Region("padding", padding, "to a multiple of SMEM_ALIGN"))
        made.append(Region(name, eval(formula, {}, values), formula, stages, holds))
    return tuple(made)
