# SPDX-License-Identifier: Apache-2.0
"""What a case's tensors hold and where they lie: the same for the emulator and for a GPU.

Values are float32 in NumPy arrays, [batch, seqlen, heads, head_dim], before they are rounded to 16
bits. A layout is data: storages by name and size, and every tensor's offset and strides in one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import masks
from .cases import Case, Tiles
from .masks import Lengths

F32 = NDArray[np.float32]
Dims = dict[str, int]

GUARD = 8  # elements beside the innermost axis: 16 bytes of a 16-bit type, so TMA takes the view
CACHE_SPARE_ROWS = 37
# Of `plain`, before and after a tensor.
DENSE_GUARD = 4096
# Of `far`, more than 32 bits hold, in bytes; of `farther` in elements, too.
FAR = 2**31
FARTHER = 2**33

HUGE_KEY = 64.0
ROW_GROUP = 8  # rows of a wgmma's accumulator between the two of a thread
# Of `negative` keys, for each seventh of a sequence, of which the last is taken first. 30 makes
# scores near -200: where they rise by that and the reference is not renewed, P overflows.
NEGATIVE_LEVELS = (0.25, 0.5, 60.0, 1.0, 60.0, 60.0, 30.0)
LARGE_INPUT = 1e4  # scores of 1e10: rounding the scaled maximum moves exponents by tens
PEAK = 400.0  # of the scores of `peaks`, far more than the others'
COLUMN = 200.0  # a score of `columns`: P overflows where the reference stays
PEAK_STEP = 5  # columns from row to row: odd, so that all columns have their turn
SHARED_DIMS = 4  # of Q and K, where all keys are alike or at a level
SHARED_KEY = 1.5
# Such is every score of a row, of which a key of zeros would have all the weight.
FAR_BELOW = 8.0
FUTURE_STEP = 100.0  # that scores rise by from key to key: exp(-100) is nothing
# Before they are scaled, scores rise by little in all rows: only a slack that is scaled, too, tells
# that from no rise.
CLOSE = 0.1
QUIET = 0.25  # standard deviation of what shall not hide a level
RISES = (0.9, 1.1, 2.0)  # of the slack, per block: of one query head after the other


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies: offset and strides in elements of its storage."""

    name: str
    storage: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """tensors: by name. storages: their sizes in elements. guarded: whether what no tensor covers
    of an output's storage is small enough to be compared."""

    tensors: Mapping[str, Placed]
    storages: Mapping[str, int]
    guarded: bool = True


def place_tensors(spec: Mapping[str, Any], case: Case) -> Layout:
    """Where q, k, v, out and, if the kernel has it, lse lie.

    ``own``, ``bhsd``, ``mixed``: the axes are ordered alike or not, and every tensor has guards
    and strides of its own; lse steps over elements. ``fused``: q, k and v are slices of one
    tensor. ``cache``: k and v are the first rows of longer ones. ``far``: strides and addresses
    are beyond 2^31; ``farther``: beyond 2^33, where nothing runs. ``plain``: contiguous, and fmha
    makes out and lse.
    """
    shapes = _shapes(spec, case)
    if case.layout == "fused":
        return _fused(spec, case, shapes)
    if case.layout in ("far", "farther"):
        return _far(shapes, FAR if case.layout == "far" else FARTHER)
    made = [
        _place(name, dims, number, case.layout)
        for number, (name, dims) in enumerate(shapes.items())
    ]
    return Layout(
        {placed.name: placed for placed, _ in made},
        {placed.storage: size for placed, size in made},
    )


# The order of the axes in memory, the slowest first: of q, k, v, out and lse.
_ORDERS: Mapping[str, tuple[str, ...]] = {
    "own": ("bsh", "bsh", "bsh", "bsh", "bhs"),
    "plain": ("bsh", "bsh", "bsh", "bsh", "bhs"),
    "cache": ("bsh", "bsh", "bsh", "bsh", "bsh"),
    "fused": ("bsh", "bsh", "bsh", "bsh", "bsh"),
    "bhsd": ("bhs", "bhs", "bhs", "bhs", "hbs"),
    "mixed": ("sbh", "bhs", "bsh", "hbs", "shb"),
}


def _shapes(spec: Mapping[str, Any], case: Case) -> dict[str, Dims]:
    """Of each tensor, its axes in the order in which `fmha` takes them."""
    heads, dim = case.kv_heads * spec["q_per_kv"], spec["head_dim"]
    q, kv = {"b": case.batch, "s": case.q}, {"b": case.batch, "s": case.kv}
    shapes = {
        "q": {**q, "h": heads, "d": dim["qk"]},
        "k": {**kv, "h": case.kv_heads, "d": dim["qk"]},
        "v": {**kv, "h": case.kv_heads, "d": dim["v"]},
        "out": {**q, "h": heads, "d": dim["v"]},
    }
    if spec["lse"]:
        shapes["lse"] = {"b": case.batch, "h": heads, "s": case.q}
    return shapes


def _place(name: str, dims: Dims, number: int, layout: str) -> tuple[Placed, int]:
    """One tensor in a storage of its own, and its size; number: makes its strides its own."""
    order = _ORDERS[layout][number]
    if layout == "plain":
        return _stacked(
            name, dims, [(axis, 0, 0) for axis in order], (0, 0), DENSE_GUARD
        )
    spare = CACHE_SPARE_ROWS if layout == "cache" and name in "kv" else 1
    guards = [(axis, 1, spare if axis == "s" else 1) for axis in order]
    if name == "lse":
        return _stacked(name, dims, guards, (0, 0) if layout == "own" else (1, 1), 0)
    return _stacked(name, dims, guards, (GUARD, GUARD * (1 + number)), 0)


def _stacked(
    name: str,
    dims: Dims,
    guards: list[tuple[str, int, int]],
    inner: tuple[int, int],
    ends: int,
) -> tuple[Placed, int]:
    """guards: of each axis, the slowest first, what lies before and after it; inner: elements
    around the innermost axis, or around each element where there is none; ends: around all.
    """
    width = dims.get("d", 1) + sum(inner)
    offset, step, strides = ends + inner[0], width, {"d": 1}
    for axis, before, after in reversed(guards):
        strides[axis] = step
        offset += before * step
        step *= before + dims[axis] + after
    shape, steps = tuple(dims.values()), tuple(strides[axis] for axis in dims)
    return Placed(name, name, shape, offset, steps), step + 2 * ends


def _fused(spec: Mapping[str, Any], case: Case, shapes: dict[str, Dims]) -> Layout:
    groups = [("q", "k", "v")] if case.q == case.kv else [("q",), ("k", "v")]
    tensors: dict[str, Placed] = {}
    storages: dict[str, int] = {}
    for names in groups:
        widths = [shapes[name]["h"] * shapes[name]["d"] for name in names]
        storage, row, start = "".join(names), sum(widths), 0
        rows = shapes[names[0]]["s"]
        for name, width in zip(names, widths, strict=True):
            dims = shapes[name]
            strides = (rows * row, row, dims["d"], 1)
            tensors[name] = Placed(name, storage, tuple(dims.values()), start, strides)
            start += width
        storages[storage] = case.batch * rows * row
    for number, name in enumerate(shapes):
        if name not in tensors:
            tensors[name], storages[name] = _place(name, shapes[name], number, "fused")
    return Layout(tensors, storages)


def _far(shapes: dict[str, Dims], distance: int) -> Layout:
    """Batches of q and v, heads of k and rows of out lie a distance [elements] apart."""
    tensors: dict[str, Placed] = {}
    storages = {"qkv": 0}
    for number, (name, dims) in enumerate(shapes.items()):
        far = {"k": "h", "out": "s"}.get(name, "b")
        # So few rows may be far apart, so many lie as far as that together.
        parts = max(dims[far] - 1, 1) if far == "s" else 1
        step = distance // parts // GUARD * GUARD
        step += GUARD * (number + 1)
        strides, near = {"d": 1, far: step}, dims.get("d", 3) + GUARD * (number + 1)
        for axis in reversed([axis for axis in dims if axis not in ("d", far)]):
            strides[axis], near = near, near * (dims[axis] + 1)
        storage = "qkv" if name in ("q", "k", "v") else name
        offset = storages.get(storage, 0)
        steps = tuple(strides[axis] for axis in dims)
        tensors[name] = Placed(name, storage, tuple(dims.values()), offset, steps)
        storages[storage] = offset + near
    for placed in tensors.values():
        last = sum(
            (n - 1) * s for n, s in zip(placed.shape, placed.strides, strict=True)
        )
        storages[placed.storage] = max(
            storages[placed.storage], placed.offset + last + 1
        )
    return Layout(tensors, storages, guarded=False)


def values(spec: Mapping[str, Any], tiles: Tiles, case: Case) -> dict[str, F32]:
    """q, k and v of a case."""
    random = np.random.default_rng(case.seed)
    shapes = _shapes(spec, case)
    q, k, v = (
        random.standard_normal(tuple(shapes[name].values()), np.float32)
        for name in ("q", "k", "v")
    )
    if case.data == "edges":
        _edges(spec, tiles, q, k, random)
    if case.data == "peaks":
        _peaks(spec, tiles, q, k)
    if case.data == "future":
        _levels(q, k, np.arange(case.kv) * FUTURE_STEP)
    if case.data == "rising":
        blocks = np.arange(case.kv)[::-1] // tiles.kv  # the last one is taken first
        _levels(q, k, 1.0 + tiles.slack * math.log(2) * blocks)
        heads = np.arange(q.shape[2])
        q[..., :SHARED_DIMS] *= np.array(RISES, np.float32)[heads % len(RISES), None]
    if case.data == "huge_key":
        # Late in the order of the blocks, which are taken from the last one on: what was summed
        # before must be rescaled.
        k[:, case.kv // 4] *= HUGE_KEY
    # Two keys in turn move the reference of each thread's second row, never of its first: what a
    # warp does for the one row alone must not hide behind the other.
    if case.data == "second_rows":
        q = np.abs(q)
        q[:, _rows_of_tiles(tiles, q) // ROW_GROUP % 2 == 0] *= -1
        for key, factor in ((case.kv // 2, 1), (case.kv // 4, 2)):
            k[:, key] = np.abs(k[:, key]) * factor * HUGE_KEY
    if case.data == "negative":
        q, k = np.abs(q), np.abs(k)
        parts = np.array_split(k, len(NEGATIVE_LEVELS), axis=1)
        for part, level in zip(parts, NEGATIVE_LEVELS, strict=True):
            part *= -level
    if case.data in ("first_at_minus_inf", "all_at_minus_inf"):
        first = (case.kv - 1) // tiles.kv * tiles.kv
        q[..., 0] = np.abs(q[..., 0]) + 0.5
        k[:, first if case.data == "first_at_minus_inf" else 0 :, :, 0] = -np.inf
    if case.data == "all_1e4":  # scores far above 0, and of every other KV head below
        q, k, v = (np.full_like(x, LARGE_INPUT) for x in (q, k, v))
        k[:, :, 1::2] *= -1
    if case.data == "columns":
        _columns(tiles, q, k)
    if case.data == "slope":
        _slope(q, k, v, random)
    if case.data == "close":
        k *= CLOSE
    if case.data == "uniform_1e4":
        q, k, v = (
            random.uniform(-LARGE_INPUT, LARGE_INPUT, x.shape).astype(np.float32)
            for x in (q, k, v)
        )
    return {"q": q, "k": k, "v": v}


def _edges(
    spec: Mapping[str, Any],
    tiles: Tiles,
    q: F32,
    k: F32,
    random: np.random.Generator,
) -> None:
    """Each row has one key that decides it, where masks and tiles end; some see or miss keys of
    zeros, as TMA fills them in beyond the end."""
    q_len, kv, head_dim = q.shape[1], k.shape[1], q.shape[-1]
    group = spec["q_per_kv"]
    first, end = masks.of_spec(spec).keys(np.arange(q_len)[:, None], Lengths(q_len, kv))
    last = end - 1
    edges = (first, first - 1) if first.any() else ()
    block = np.maximum(last, 0) // tiles.kv * tiles.kv
    targets = np.stack(
        np.broadcast_arrays(
            *(last, last + 1, block - 1, block, kv - 1, *edges),
            *(np.arange(q_len)[:, None] * 7 % kv, block + tiles.kv // 2),
        )
    )
    targets = np.clip(targets, 0, kv - 1)[:, :, 0]
    k[..., :SHARED_DIMS] = SHARED_KEY
    strength = 1.5 if head_dim < 64 else 1.0
    # The last row of the first head sees, causal or not, whatever key of zeros comes after the end.
    rows, heads = np.arange(q_len)[:, None], np.arange(q.shape[2])
    kinds = (q_len - 2 - rows + heads) % (len(targets) + 1)
    for head in range(q.shape[2]):
        for kind in range(len(targets)):
            rows = kinds[:, head] == kind
            chosen = k[:, targets[kind][rows], head // group]
            q[:, rows, head] = strength * chosen + QUIET * q[:, rows, head]
    below = kinds == len(targets)
    q[:, below] *= QUIET
    depth = FAR_BELOW * math.sqrt(head_dim) / (SHARED_DIMS * SHARED_KEY)
    q[:, below, :SHARED_DIMS] = -depth


def _peaks(spec: Mapping[str, Any], tiles: Tiles, q: F32, k: F32) -> None:
    """Each row has a key that is all it sees, row by row in another column of the KV tiles."""
    q_len, kv = q.shape[1], k.shape[1]
    rows, heads = np.arange(q_len)[:, None], np.arange(q.shape[2])
    first, end = masks.of_spec(spec).keys(rows, Lengths(q_len, kv))
    back = (rows * PEAK_STEP + heads) % tiles.kv
    keys = np.clip(end - 1 - back, first, kv - 1)
    for head in heads:
        chosen = k[:, keys[:, head], head // spec["q_per_kv"]]
        q[:, :, head] = PEAK * chosen / np.linalg.norm(chosen, axis=-1, keepdims=True)


def _levels(q: F32, k: F32, levels: NDArray[Any]) -> None:
    """Scores at the default scale are these levels of the keys, and a little more or less."""
    q *= QUIET
    k *= QUIET
    q[..., :SHARED_DIMS] = math.sqrt(q.shape[-1]) / SHARED_DIMS
    k[..., :SHARED_DIMS] = levels[:, None, None]


def _columns(tiles: Tiles, q: F32, k: F32) -> None:
    """One key of the first KV block, which is taken last, is far above what all rows have seen: in
    the first column of a tile, in the middle, or in one of the last two, by query head.
    """
    q *= QUIET
    k *= QUIET
    q[..., :SHARED_DIMS] = k[..., :SHARED_DIMS] = 0
    heads = np.arange(q.shape[2])
    q[:, :, heads, heads % SHARED_DIMS] = math.sqrt(q.shape[-1])
    columns = (0, tiles.kv // 2 - 1, tiles.kv - 2, tiles.kv - 1)
    for dim, column in enumerate(columns):
        k[:, min(column, k.shape[1] - 1), :, dim] = COLUMN


def _slope(q: F32, k: F32, v: F32, random: np.random.Generator) -> None:
    """V grows with the score, about its weighted mean: O is nearly 0, and moves with any factor of
    the scores by what no rounding hides."""
    levels = random.standard_normal((k.shape[1],), np.float32)
    weights = np.exp(levels) / np.exp(levels).sum()
    _levels(q, k, levels)
    v[...] = (levels - weights @ levels)[:, None, None] * v[:, :1]


def _rows_of_tiles(tiles: Tiles, q: F32) -> NDArray[Any]:
    """Where a row (position, head) of Q is in the tiles of its head, or of its packed group."""
    rows, heads = np.arange(q.shape[1])[:, None], np.arange(q.shape[2])
    return rows * tiles.packed + heads % tiles.packed
