# SPDX-License-Identifier: Apache-2.0
"""An operation over packed sequences: each is the dense operation on rows of its own.

Tensors are [rows of all sequences, heads, head_dim]; sequence i has the rows from cu_seqlens[i] on,
before cu_seqlens[i + 1]. Rows of no sequence, before the first and after the last, are not read,
and those of the outputs stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compare import Verdict
from .forward import (
    BATCH,
    FORWARD,
    HEAD_DIM_QK,
    HEAD_DIM_V,
    HEADS,
    HEADS_KV,
    LSE,
    OUT,
    SINK,
    SLOPES,
    K,
    Q,
    V,
)
from .lists import BY_MASK, Drawn
from .operation import Array, Axis, Given, Operation, Sizes, Spec, Tensor
from .scores import namespace

TOTAL_Q: Final = Axis("total_q", "s", "s", lambda spec, sizes: sizes.q)
TOTAL_KV: Final = Axis("total_kv", "t", "s", lambda spec, sizes: sizes.kv, cached=True)
BOUNDS: Final = Axis(
    *("batch_plus_1", "c", "b", lambda spec, sizes: sizes.batch + 1),
    told=lambda spec: "batch + 1",
)


def is_packed(spec: Spec) -> bool:
    """Whether a SPEC's tensors hold the rows of all sequences side by side."""
    return bool(spec.get("batch") == "varlen")


def dense(spec: Spec) -> dict[str, Any]:
    """The SPEC of what is computed for each sequence."""
    return {name: x for name, x in spec.items() if name not in ("batch", "kv")}


CU_SEQLENS_Q: Final = Tensor(
    *("cu_seqlens_q", (BOUNDS,), "int32"),
    tma=False,
    when="batch",
    about=lambda spec: "has the row of q where each sequence begins, and the last ends",
)
CU_SEQLENS_K: Final = replace(
    CU_SEQLENS_Q,
    name="cu_seqlens_k",
    about=lambda spec: "alike of k. Both are cut to the rows there are, on the device",
)


@dataclass(frozen=True)
class Rows:
    """Of one sequence, in Q and in K."""

    q: slice
    kv: slice


def rows_of(sizes: Sizes) -> list[Rows]:
    """The rows of each sequence of a case."""
    q, kv = _offsets(sizes)
    return _between(q, kv, sizes.q, sizes.kv)


def _offsets(sizes: Sizes) -> list[NDArray[np.int64]]:
    """Of Q and K: a third of what is outside all sequences comes before them."""
    lengths = np.array(sizes.lengths or [(0, 0)] * sizes.batch, np.int64)
    found = []
    for own, rows in zip(lengths.T, (sizes.q, sizes.kv), strict=True):
        outside = rows - int(
            own.sum()
        )  # negative: offsets leave the tensor on both sides
        found.append(np.cumsum([outside // 3, *own]))
    return found


def _indices(spec: Spec, sizes: Sizes) -> dict[str, NDArray[np.int32]]:
    names = (CU_SEQLENS_Q.name, CU_SEQLENS_K.name)
    found = (each.astype(np.int32) for each in _offsets(sizes))
    return dict(zip(names, found, strict=True))


def _between(q: Array, kv: Array, q_rows: int, kv_rows: int) -> list[Rows]:
    """The rows between offsets that a tensor of so many has."""
    sides = []
    for offsets, rows in ((q, q_rows), (kv, kv_rows)):
        cut = [min(max(each, 0), rows) for each in offsets.tolist()]
        sides.append([slice(a, max(a, b)) for a, b in pairwise(cut)])
    return [Rows(*each) for each in zip(*sides, strict=True)]


class Sequence(NamedTuple):
    """The dense call of one sequence, where its rows are, and what is right for them."""

    call: Given
    rows: Rows
    truth: Any


def _sequences(of: Operation, given: Given) -> Iterator[tuple[Given, Rows]]:
    """The dense call of each sequence that has queries; of one without keys with a row more."""
    bounds = [given.inputs[x.name] for x in (CU_SEQLENS_Q, CU_SEQLENS_K)]
    found = _between(*bounds, *(len(given.inputs[x.name]) for x in (Q, K)))
    for number, rows in enumerate(found):
        if rows.q.start == rows.q.stop:
            continue
        own, spec = {"q": rows.q, "k": rows.kv, "v": rows.kv}, dense(given.spec)
        inputs = {name: given.inputs[name][at] for name, at in own.items()}
        if rows.kv.start == rows.kv.stop:
            # With one key and a row more, all rows but that are before the first that sees it.
            for name, x in inputs.items():
                zeros = namespace(x).zeros_like(given.inputs[name][:1])
                inputs[name] = namespace(x).concatenate((x, zeros))
            spec = {
                name: x for name, x in spec.items() if name not in ("window", "chunk")
            }
            spec["mask"] = "causal"
        batches = {name: x[None] for name, x in inputs.items()}
        for tensor in of.inputs(spec):
            if tensor.axes[0] == BATCH and tensor.name not in own:
                batches[tensor.name] = given.inputs[tensor.name][number][None]
        yield replace(given, spec=spec, inputs={**given.inputs, **batches}), rows


def _exact(
    of: Operation, given: Given, wanted: Array | None = None
) -> dict[str, Array]:
    """NaN in rows of no sequence. wanted: bool [rows, heads], to which it may be limited."""
    q, v = given.inputs[Q.name], given.inputs[V.name]
    options = {"dtype": namespace(q).float64}
    if namespace(q).__name__ == "torch":
        options["device"] = q.device
    out = namespace(q).full((*q.shape[:2], v.shape[-1]), math.nan, **options)
    lse = namespace(q).full((q.shape[1], q.shape[0]), math.nan, **options)
    for call, rows in _sequences(of, given):
        some = None
        if wanted is not None:
            some = wanted[rows.q][None]
        count, found = rows.q.stop - rows.q.start, of.exact(call, some)
        out[rows.q] = found[OUT.name][0, :count]
        lse[:, rows.q] = found[LSE.name][0, :, :count]
    return {OUT.name: out, LSE.name: lse}


def _truth(of: Operation, given: Given, wanted: Array | None = None) -> list[Sequence]:
    found = []
    for call, rows in _sequences(of, given):
        count, truth = rows.q.stop - rows.q.start, of.truth(call)
        cut = (x[:, :count] if x.ndim == 4 else x[..., :count] for x in truth)
        found.append(Sequence(call, rows, type(truth)(*cut)))
    return found


def _judge(
    of: Operation,
    given: Given,
    outputs: Mapping[str, Array],
    truth: list[Sequence],
    tile: int,
    wanted: Array | None = None,
) -> dict[str, Verdict]:
    """The worst verdict of all sequences, by output; rows of none are those that are still NaN."""
    verdicts = {name: Verdict(0.0, 0.0) for name in outputs}
    seen = np.zeros(len(outputs[OUT.name]), np.bool_)
    for number, (call, rows, right) in enumerate(truth):
        seen[rows.q] = True
        written = {OUT.name: outputs[OUT.name][rows.q][None]}
        if LSE.name in outputs:
            written[LSE.name] = outputs[LSE.name][:, rows.q][None]
        for name, found in of.judge(call, written, right, tile).items():
            worst = verdicts[name]
            where = f" (of sequence {number} of {len(truth)} with queries)"
            verdicts[name] = Verdict(
                max(worst.of_bound, found.of_bound),
                max(worst.absolute, found.absolute),
                worst.finding or (found.finding and found.finding + where),
            )
    beyond = outputs[OUT.name][np.flatnonzero(~seen).tolist()]
    if written_rows := int((beyond == beyond).any(-1).sum()):
        text = f"{written_rows} rows of out: of no sequence, and written"
        out = verdicts[OUT.name]
        verdicts[OUT.name] = replace(out, finding=out.finding or text)
    return verdicts


def _flops(
    spec: Spec, sizes: Sizes, inputs: Mapping[str, Array] | None = None
) -> float:
    return sum(FORWARD.flops(dense(spec), one) for one in each_of(sizes))


@dataclass(frozen=True)
class One:
    """The counts of one sequence's dense call."""

    kv_heads: int
    q: int
    kv: int
    batch: int = 1
    lists: Drawn = BY_MASK
    lengths: tuple[tuple[int, int], ...] = ()
    hostile: bool = False


def each_of(sizes: Sizes) -> list[One]:
    """The dense problems of a packed one, where there are scores."""
    return [One(sizes.kv_heads, q, kv) for q, kv in sizes.lengths if q > 0 and kv > 0]


def packing(of: Operation, *beside: Tensor) -> Operation:
    """A dense operation over packed sequences. beside: tensors that it reads beside Q, K and V."""
    out, lse = of.writes
    return replace(
        of,
        noun="Attention in packed sequences",
        shape="rows, heads, head_dim",
        reads=(
            replace(Q, axes=(TOTAL_Q, HEADS, HEAD_DIM_QK)),
            replace(K, axes=(TOTAL_KV, HEADS_KV, HEAD_DIM_QK)),
            replace(V, axes=(TOTAL_KV, HEADS_KV, HEAD_DIM_V)),
            CU_SEQLENS_Q,
            CU_SEQLENS_K,
            *beside,
        ),
        writes=(
            replace(out, axes=(TOTAL_Q, HEADS, HEAD_DIM_V)),
            replace(lse, axes=(HEADS, TOTAL_Q)),
        ),
        exact=partial(_exact, of),
        truth=partial(_truth, of),
        judge=partial(_judge, of),
        flops=_flops,
        indices=_indices,
        params=lambda spec: (),
        numbers=lambda spec: (),
    )


PACKED_FORWARD: Final = packing(FORWARD, SINK, SLOPES)
