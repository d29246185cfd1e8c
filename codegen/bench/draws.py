# SPDX-License-Identifier: Apache-2.0
"""Inputs that a problem's expressions read, drawn from ranges: alike for everyone who computes it.

Documents are drawn by their lengths, all else by the name of the argument. What is drawn follows
from seed, range, name and sizes, so one input stays the same whatever else a kernel reads.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckFailed
from ..expressions.language import MAX_SEQLEN
from ..ops import operation_of
from ..ops.operation import Sizes
from ..ops.paged import BLOCK_TABLE, SEQUSED_K
from ..ops.params import Declared, declared
from ..ops.varlen import CU_SEQLENS_K, CU_SEQLENS_Q
from . import lengths as spelled

if TYPE_CHECKING:
    import torch

    from .problems import Problem

I32 = NDArray[np.int32]
DOCUMENTS: Final = "documents"
Ranges = Mapping[str, Sequence[int]]
"""By name, the least and the greatest value."""

FIELDS: Final = ("ranges", "seed", "sequences", "pool")
"""Of a problem, what its inputs are drawn from, by name in JSON and in the cells of records."""

_USUAL: Final[Ranges] = {
    DOCUMENTS: (512, 4096),
    "window_left": (1023, 1023),
    "window_right": (1023, 1023),
}


def limits_of(spec: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """By name, what a SPEC's mask reads, and the values that it can have."""
    return {
        _name(x): (1, MAX_SEQLEN) if _name(x) == DOCUMENTS else x.range
        for x in declared(spec)
    }


def _name(x: Declared) -> str:
    return DOCUMENTS if x.field == DOCUMENTS else x.name


def option(name: str) -> str:
    """What gives the range of an input on the command line."""
    return f"--{name}" if name == DOCUMENTS else f"--param {name}"


def ranges_of(
    spec: Mapping[str, Any], keys: int, asked: Ranges
) -> dict[str, list[int]]:
    """The range of each input that a SPEC's mask reads: that asked for, or a usual one.

    Raises CheckFailed for one that leaves the input's own.
    """
    found, of_scores = {}, {x.name for x in declared(spec) if x.dtype == "fp32"}
    for name, (least, most) in limits_of(spec).items():
        low, high = asked.get(name) or _usual(name, keys, real=name in of_scores)
        if low < least or high > most:
            message = (
                f"{option(name)}={words_of([low, high])}: it can be {least} to {most}"
            )
            raise CheckFailed(f"{spec.get('name', 'a spec')}: {message}")
        found[name] = [low, high]
    return found


def _usual(name: str, keys: int, *, real: bool) -> Sequence[int]:
    if real:
        return 0, 1
    if name == "prefix":
        return keys // 8, keys // 2
    return _USUAL.get(name, (0, keys))


def words_of(bounds: Sequence[int]) -> str:
    """A range as the command line has it."""
    low, high = bounds
    return f"{low}" if low == high else f"{low}:{high}"


def words(ranges: Ranges, seed: int, sequences: str = "") -> str:
    """What is drawn, and from what, such as ``documents 512:4096 seed 0``; empty for nothing.

    sequences: lengths that the same seed draws, which are said elsewhere.
    """
    said = [f"{name} {words_of(bounds)}" for name, bounds in ranges.items()]
    return " ".join(said + [f"seed {seed}"] * is_random(ranges, sequences))


def is_random(ranges: Ranges, sequences: str = "") -> bool:
    """Whether another seed would draw something else."""
    drawn = any(low < high for low, high in ranges.values())
    return drawn or spelled.is_random(sequences)


def draw(
    spec: Mapping[str, Any], sizes: Sizes, ranges: Ranges, seed: int
) -> dict[str, Any]:
    """The inputs by name, arrays and numbers; `DOCUMENTS` are lengths, by batch.

    Lengths of documents are uniform, but for the last ones of a batch, which fill it. Values of a
    tensor that rises with the query are uniform and then sorted. In fp32 all are uniform.
    """
    found: dict[str, Any] = {}
    tensors = {x.name: x for x in operation_of(spec).params(spec)}
    for x in declared(spec):
        low, high = ranges[_name(x)]
        random = np.random.default_rng([seed, zlib.crc32(_name(x).encode())])
        if x.field == DOCUMENTS:
            if DOCUMENTS not in found:
                found[DOCUMENTS] = [
                    list(_lengths(low, high, sizes.kv, random))
                    for _ in range(sizes.batch)
                ]
            found[x.name] = _edges(x, found[DOCUMENTS], sizes)
        elif x.dtype == "fp32":
            shape = tensors[x.name].shape(spec, sizes) if x.axes else ()
            real = random.uniform(low, high, shape).astype(np.float32)
            found[x.name] = real if x.axes else float(real)
        elif x.axes:
            shape = tensors[x.name].shape(spec, sizes)
            made = random.integers(low, high + 1, shape, np.int32)
            found[x.name] = np.sort(made, x.axes.index("row")) if x.monotone else made
        else:
            found[x.name] = int(random.integers(low, high + 1))
    return found


def _lengths(
    low: int, high: int, total: int, random: np.random.Generator
) -> Iterator[int]:
    """Lengths from low to high that make a total; the last is shorter where none do."""
    while total > 0:
        length = int(random.integers(low, high + 1))
        if total - length < low:  # no document is as short as what this one would leave
            if total <= high:
                length = total
            elif total >= 2 * low:
                length = total - low
        total -= length
        yield length


def _edges(x: Declared, documents: Sequence[Sequence[int]], sizes: Sizes) -> I32:
    """Of each query's document the first key, or the key behind its last: int32 [batch, row]."""
    keys = np.clip(np.arange(sizes.q) + sizes.kv - sizes.q, 0, None)
    made = []
    for lengths in documents:
        ends = np.cumsum(lengths, dtype=np.int32)
        edge = ends if x.name == "document_end" else ends - np.array(lengths, np.int32)
        made.append(np.repeat(edge, lengths)[keys])
    return np.stack(made)


def packed(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    by_name: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of FlashAttention's kernels of packed sequences; no tensor is copied.

    Packed sequences and their pages are those of our kernel, whose tensors `by_name` has. Of dense
    tensors, [batch, rows, heads, dim] and the last query at the last key, documents are sequences,
    or batches where there are none.
    """
    import torch

    if problem.lengths:
        return {"q": q, "k": k, "v": v} | _of_sequences(problem, by_name)
    starts_q, starts_k = edges_of(problem.drawn, problem)
    found = {name: x.flatten(0, 1) for name, x in (("q", q), ("k", k), ("v", v))}
    for name, edges in (("q", starts_q), ("k", starts_k)):
        found[f"cu_seqlens_{name}"] = torch.from_numpy(edges).to(q.device)
        found[f"max_seqlen_{name}"] = int(np.diff(edges).max())
    return found


def _of_sequences(problem: Problem, by_name: Mapping[str, Any]) -> dict[str, Any]:
    """What says where sequences are, as FlashAttention names it."""
    known = {
        "cu_seqlens_q": CU_SEQLENS_Q,
        "cu_seqlens_k": CU_SEQLENS_K,
        "seqused_k": SEQUSED_K,
        "page_table": BLOCK_TABLE,
    }
    most_q, most_k = map(max, zip(*problem.lengths, strict=True))
    return {
        **{name: by_name[x.name] for name, x in known.items() if x.name in by_name},
        **{"max_seqlen_q": most_q, "max_seqlen_k": most_k},
    }


def edges_of(drawn: Mapping[str, Any], sizes: Sizes) -> tuple[I32, I32]:
    """The first row of each sequence of `packed`, and the end of the last one: of Q, and of K."""
    q, kv = [], []
    for batch, lengths in enumerate(drawn.get(DOCUMENTS, [[sizes.kv]] * sizes.batch)):
        first = np.cumsum([0, *lengths[:-1]])
        rows = np.maximum(first + sizes.q - sizes.kv, 0)
        rows[0] = 0  # also where there are more queries than keys
        q += (batch * sizes.q + rows).tolist()
        kv += (batch * sizes.kv + first).tolist()
    edges_q, edges_kv = [*q, sizes.batch * sizes.q], [*kv, sizes.batch * sizes.kv]
    return np.array(edges_q, np.int32), np.array(edges_kv, np.int32)


def drawn_of(problem: Problem) -> dict[str, Any]:
    """What a problem's inputs say and how it came about, as plain data; empty for none."""
    if not problem.ranges and not problem.sequences:
        return {}
    said = {name: getattr(problem, name) for name in FIELDS}
    found = {name: x for name, x in said.items() if x or name in ("ranges", "seed")}
    if problem.lengths:
        found["lengths"] = [list(each) for each in problem.lengths]
    return {**found, "values": values_of(problem.spec, problem.drawn)}


def values_of(spec: Mapping[str, Any], drawn: Mapping[str, Any]) -> dict[str, Any]:
    """What was drawn as plain data, but for tensors by row, which are as long as Q."""
    by_row = {x.name for x in declared(spec) if "row" in x.axes}
    return {
        name: x.tolist() if isinstance(x, np.ndarray) else x
        for name, x in drawn.items()
        if name not in by_row
    }


def summary(problem: Problem) -> str:
    """What was drawn, in short, such as ``7 documents, 512 to 3841``."""
    parts = [spelled.summary(problem.lengths)] if problem.lengths else []
    drawn = problem.drawn
    for name, x in drawn.items():
        if isinstance(x, int | float):
            parts.append(f"{name} {x:.9g}")
        elif not (DOCUMENTS in drawn and name.startswith("document_")):  # else said
            flat = np.concatenate([np.ravel(each) for each in x])
            parts.append(f"{len(flat)} {name}, {flat.min():.9g} to {flat.max():.9g}")
    return "; ".join(parts)
