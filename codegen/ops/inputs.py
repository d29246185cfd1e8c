# SPDX-License-Identifier: Apache-2.0
"""What a case's tensors hold and where they lie: the same for the emulator and for a GPU.

Values are float32 in NumPy arrays, [batch, seqlen, heads, head_dim], before they are rounded to a
tensor's type. A layout is data: storages by name and size, and each tensor's offset and strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import masks, operation_of, reference, scores
from .backward import DOUT, forward_of, is_backward
from .case import Case, Tiles
from .e4m3 import (
    DESCALE_ROWS,
    LARGEST,
    V_PERMUTED,
    has_block_factors,
    in_16_bits,
    is_e4m3,
    is_permuted,
    permute_v,
)
from .forward import HEADS
from .masks import Lengths, Mask
from .operation import BYTES, Tensor
from .paged import PAGES, is_paged, slots_of
from .params import Declared, declared
from .rounding import rounded
from .varlen import dense, is_packed, rows_of

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
Dims = dict[str, int]
Random = np.random.Generator

# Elements beside the innermost axis: 16 bytes of a 16-bit type, so TMA takes the view. Of an 8-bit
# type it is twice as many, see `guard_of`.
GUARD = 8
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
SATURATED = 12.0  # scores over the cap: fp32 rounds their tangent to 1
LARGEST_INPUT = 6e4  # that fp16 holds
QUIET = 0.25  # standard deviation of what shall not hide a level
SINK_LEAD = 100.0  # of a sink over all scores: exp of it is beyond fp32
SINK_TRAIL = 1000.0  # of scores over a sink
FACTOR = 2.0**-6  # of what scores read: too little to hide what a case is about
SAMPLES = 16  # rows of a head whose sums say how large its sink shall be
MEAN = 2.0  # of V in half of the keys of `mean_v`
DRIFT = 0.5  # mean of K of `drift`, and of V in either half of the keys
BARELY = (0.99, 1.01)  # of the slack: a bias that rises by it from block to block
BIAS = 2.0  # standard deviation of a bias, where scores are random
# Of some keys of `biases`, by head; in all rows or in some.
BIAS_LEVELS = (-np.inf, 1e4, -1e4)
BIAS_STEP = 5  # keys from one of them to the next
# Of `descales`, log2: of Q, K and V, one after the other by batch and head.
DESCALE_LEVELS = ((-10, 0, 10, 3), (9, 1, -11, -2.5), (10, -10, 0, 0.3))
BLOCK_LEVELS = (0, 1.5, -2, 0.7)  # log2: of blocks beside those
SMALL_GRADIENT = 2.0**-6  # beside V of 1e4: fp16 holds P * (dP - D)
# Of `outliers`: rows of dO that are longer than the others, between those that a kernel may take
# samples of, which are so many at most in a head; and rows, of blocks, that are shorter.
FIRST_OUTLIER, OUTLIER_STEP, SAMPLED = 7, 61, 64
SHORT_ROWS, SHORT = slice(128, 256), 2.0**-20
LARGE_GRADIENTS: Mapping[str, float] = {"bf16": 1e4, "fp16": 1e3}
RISES = (0.9, 1.1, 2.0)  # of the slack, per block: of one query head after the other


def guard_of(dtype: str) -> int:
    """[elements] Beside the innermost axis: a multiple of 16 bytes."""
    return 2 * GUARD if BYTES[dtype] == 1 else GUARD


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies: offset and strides in elements of its storage, which has its dtype."""

    name: str
    dtype: str
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


def place_tensors(
    spec: Mapping[str, Any], case: Case, tiles: Tiles | None = None
) -> Layout:
    """Where the tensors of the SPEC's operation lie, and its workspace, which needs the tiles.

    ``own``, ``bhsd``, ``mixed``: the axes are ordered alike or not, and every tensor has guards
    and strides of its own; those that TMA does not move step over elements. ``fused``: inputs with
    as many rows are slices of one tensor. ``cache``: K and V are the first rows of longer ones.
    Of paged K and V, ``fused`` has both in one row of a head, and ``cache`` rows between pages.
    ``far``: strides and addresses are beyond 2^31; ``farther``: beyond 2^33, where nothing runs.
    ``plain``: contiguous, and the kernel's function makes the outputs. A workspace lies alone.
    """
    operation = operation_of(spec)
    layout = _place_all(spec, case)
    placed, storages = dict(layout.tensors), dict(layout.storages)
    for each in operation.workspaces:
        assert tiles is not None, "it has blocks of so many rows"
        size = each.elements(spec, tiles, case)
        guard = DENSE_GUARD if case.layout == "plain" else GUARD
        placed[each.name] = Placed(
            each.name, each.dtype, each.name, (size,), guard, (1,)
        )
        storages[each.name] = size + 2 * guard
    return Layout(placed, storages, layout.guarded)


def _place_all(spec: Mapping[str, Any], case: Case) -> Layout:
    operation = operation_of(spec)
    tensors = [
        _Sized(x, x.type(spec), x.sizes(spec, case)) for x in operation.tensors(spec)
    ]
    # Of the inputs that TMA moves, those of rows of heads are slices of one storage.
    shared = [x for x in tensors if x.tensor in operation.inputs(spec) and x.has_heads]
    if case.layout == "fused":
        return _fused(tensors, shared)
    if case.layout in ("far", "farther"):
        return _far(tensors, shared, FAR if case.layout == "far" else FARTHER)
    made = [_place(x, number, case.layout) for number, x in enumerate(tensors)]
    return Layout(
        {placed.name: placed for placed, _ in made},
        {placed.storage: size for placed, size in made},
    )


class _Sized(NamedTuple):
    """A tensor of a call. dims: sizes by kind of axis."""

    tensor: Tensor
    dtype: str
    dims: Dims

    @property
    def width(self) -> int:
        """Elements of the innermost axis, up to where TMA can take the next."""
        if "d" not in self.dims:
            return 1
        return -(-self.dims["d"] // self.guard) * self.guard

    @property
    def guard(self) -> int:
        """[elements] Beside the innermost axis."""
        return guard_of(self.dtype)

    @property
    def dims_of_rows(self) -> tuple[int, int]:
        """Batches, or pages, and rows."""
        return self.dims.get("b", 1), self.dims["s"]

    @property
    def has_heads(self) -> bool:
        """Its rows are of a head each."""
        return self.tensor.tma and self.tensor.axes[-1].constant

    def placed(self, storage: str, offset: int, strides: Dims) -> Placed:
        shape, steps = self.dims.values(), (strides[kind] for kind in self.dims)
        name = self.tensor.name
        return Placed(name, self.dtype, storage, (*shape,), offset, (*steps,))


# The order of the axes in memory, the slowest first, of one tensor after the other in turn: of
# those that TMA moves, and of the others. Axes that it does not name are the slowest.
_ORDERS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "own": (("bsh",), ("bhstn",)),
    "plain": (("bsh",), ("bhstn",)),
    "cache": (("bsh",), ("bsh",)),
    "fused": (("bsh",), ("bsh",)),
    "bhsd": (("bhs",), ("hbs",)),
    "mixed": (("sbh", "bhs", "bsh", "hbs"), ("shb",)),
}
_FAR_AXES = "bhbs"  # of one tensor after the other in turn


def _place(x: _Sized, number: int, layout: str) -> tuple[Placed, int]:
    """One tensor in a storage of its own, and its size; number: makes its strides its own."""
    orders = _ORDERS[layout][0 if x.tensor.tma else 1]
    named = orders[number % len(orders)]
    if x.tensor is V_PERMUTED and layout != "mixed":
        named = "bhs"  # its rows are head_dim's
    order = sorted((axis for axis in x.dims if axis != "d"), key=named.find)
    if layout == "plain":
        return _stacked(x, [(axis, 0, 0) for axis in order], (0, 0), DENSE_GUARD)
    spare = CACHE_SPARE_ROWS if layout == "cache" and x.tensor.cached else 1
    guards = [(axis, 1, spare if axis == "s" else 1) for axis in order]
    inner = (x.guard, x.guard * (1 + number))
    if not x.tensor.tma:
        inner = (0, 0) if layout == "own" else (1, 1)
    return _stacked(x, guards, inner, 0)


def _stacked(
    x: _Sized, guards: list[tuple[str, int, int]], inner: tuple[int, int], ends: int
) -> tuple[Placed, int]:
    """guards: of each axis, the slowest first, what lies before and after it; inner: elements
    around the innermost axis, or around each element where there is none; ends: around all.
    """
    width = x.width + sum(inner)
    offset, step, strides = ends + inner[0], width, {"d": 1}
    for axis, before, after in reversed(guards):
        strides[axis] = step
        offset += before * step
        step *= before + x.dims[axis] + after
    return x.placed(x.tensor.name, offset, strides), step + 2 * ends


def _fused(tensors: list[_Sized], shared: list[_Sized]) -> Layout:
    placed: dict[str, Placed] = {}
    storages: dict[str, int] = {}
    for batches, rows in dict.fromkeys(x.dims_of_rows for x in shared):
        group = [x for x in shared if x.dims_of_rows == (batches, rows)]
        storage = "".join(x.tensor.name for x in group)
        # Heads of paged K and V are apart, with a row of V beside each of K.
        paged = group[0].tensor.axes[0] == PAGES
        widths = [x.dims["d"] * (1 if paged else x.dims["h"]) for x in group]
        row, start = sum(widths), 0
        for x, width in zip(group, widths, strict=True):
            step, heads = (rows * row, x.dims["h"]) if paged else (x.dims["d"], 1)
            strides = {"b": rows * row * heads, "s": row, "h": step, "d": 1}
            placed[x.tensor.name] = x.placed(storage, start, strides)
            start += width
        storages[storage] = batches * rows * row * heads
    for number, x in enumerate(tensors):
        if (name := x.tensor.name) not in placed:
            placed[name], storages[name] = _place(x, number, "fused")
    return Layout({x.tensor.name: placed[x.tensor.name] for x in tensors}, storages)


def _far(tensors: list[_Sized], shared: list[_Sized], distance: int) -> Layout:
    """Along one axis of each tensor elements lie a distance [elements] apart, of which all rows
    together make one."""
    placed: dict[str, Placed] = {}
    storages: dict[str, int] = {}
    for number, x in enumerate(tensors):
        dims, far = x.dims, _FAR_AXES[number % len(_FAR_AXES)]
        far = far if far in dims else next(iter(dims))
        # So few rows may be far apart, so many lie as far as that together. So do heads of the
        # query, of which there are many.
        many = far == "s" or (far == "h" and HEADS in x.tensor.axes)
        many |= far == "b" and x.tensor.axes[0] == PAGES
        parts = max(dims[far] - 1, 1) if many else 1
        step = distance // parts // x.guard * x.guard
        step += x.guard * (number + 1)
        beyond = max(step * (dims[far] - 1) - distance, 0) if many else 0
        width = x.width if "d" in dims else 3
        strides, near = {"d": 1, far: step}, width + x.guard * (number + 1)
        for axis in reversed([axis for axis in dims if axis not in ("d", far)]):
            strides[axis], near = near, near * (dims[axis] + 1)
        storage = "".join(y.tensor.name for y in (shared if x in shared else [x]))
        offset = storages.get(storage, 0)
        placed[x.tensor.name] = x.placed(storage, offset, strides)
        storages[storage] = offset + near + beyond
    for made in placed.values():
        last = sum((n - 1) * s for n, s in zip(made.shape, made.strides, strict=True))
        size = max(storages[made.storage], made.offset + last + 1)
        storages[made.storage] = size
    return Layout(placed, storages, guarded=False)


def numbers_of(spec: Mapping[str, Any], case: Case) -> dict[str, float]:
    """The numbers of a case that expressions read, by name; an int where they are whole."""
    return {x.name: _number(x, case) for x in declared(spec) if not x.axes}


def params(spec: Mapping[str, Any], tiles: Tiles, case: Case) -> dict[str, I64]:
    """All integers that expressions of a case read: numbers, and tensors by their axes.

    ``some``: any; documents of one key, of a few, and longer than a block. ``least``: documents of
    one key, no prefix, a window of the query's own key. ``most``: no key is hidden. ``on_tiles``:
    edges are multiples of a KV block.
    """
    found = {
        k: np.asarray(n) for k, n in numbers_of(spec, case).items() if type(n) is int
    }
    random = np.random.default_rng(case.seed + 1)
    tensors = {x.name: x for x in operation_of(spec).params(spec)}
    bounds: list[I64] = []
    for x in declared(spec):
        if not x.axes or x.dtype != "int32":
            continue
        shape = tensors[x.name].shape(spec, case)
        if x.field == "documents":
            # Both tensors are of the same documents.
            bounds = bounds or [
                _documents(tiles, case, random) for _ in range(shape[0])
            ]
            found[x.name] = np.stack([_edges_of(x, each, case) for each in bounds])
        else:
            found[x.name] = _levels_of(x, shape, tiles, case, random)
    return found


def mask_of(spec: Mapping[str, Any], tiles: Tiles, case: Case) -> Mask:
    """The mask of a case, for the first head of the first batch."""
    mask = masks.of_spec(spec)
    return mask.given(params(spec, tiles, case)).at(0, 0, 0) if mask.params else mask


def _number(x: Declared, case: Case) -> float:
    if x.dtype == "fp32":
        return FACTOR * (case.seed % 7 + 1)  # a score of -inf stays one
    some = case.seed % (case.kv + 2)
    number = {"some": some, "least": 0, "most": case.kv + 5, "on_tiles": 64}[
        case.params
    ]
    return min(max(number, x.range[0]), x.range[1])


def _levels_of(
    x: Declared, shape: tuple[int, ...], tiles: Tiles, case: Case, random: Random
) -> I64:
    some = random.integers(-3, case.kv + 4, shape)
    made = {
        "some": some,
        "least": np.zeros(shape, np.int64),
        "most": np.full(shape, case.kv + 5),
        "on_tiles": some // tiles.kv * tiles.kv,
    }[case.params]
    return np.sort(made, axis=x.axes.index("row")) if x.monotone else made


def _documents(tiles: Tiles, case: Case, random: Random) -> I64:
    """The first keys of a batch's documents, and the end of the last one."""
    lengths = {
        "some": random.choice([1, 5, tiles.kv // 2 + 1, 2 * tiles.kv + 3], case.kv),
        "least": np.ones(case.kv, np.int64),
        "most": np.full(1, case.kv),
        "on_tiles": random.choice([1, 2], case.kv) * tiles.kv,
    }[case.params]
    starts = np.minimum(np.cumsum([0, *lengths]), case.kv)
    return np.unique(starts)


def _edges_of(x: Declared, bounds: I64, case: Case) -> I64:
    """Of each query's document its first key, or the key behind its last."""
    place = np.clip(np.arange(case.q) + case.kv - case.q, 0, case.kv - 1)
    number = np.searchsorted(bounds, place, side="right") - 1
    return bounds[number + (x.name == "document_end")]


def values(spec: Mapping[str, Any], tiles: Tiles, case: Case) -> dict[str, F32]:
    """The inputs of a case by name; integers as their makers have them, others of them 0."""
    if is_e4m3(spec):
        return _in_8_bits(spec, tiles, case)
    if is_packed(spec):
        return _packed(spec, tiles, case)
    if is_backward(spec):
        return _backward(spec, tiles, case)
    random = np.random.default_rng(case.seed)
    operation = operation_of(spec)
    read = params(spec, tiles, case)
    drawn: dict[str, Any] = {
        x.name: (
            read.get(x.name, np.zeros(x.shape(spec, case), np.int64))
            if x.dtype == "int32"
            else random.standard_normal(x.shape(spec, case), np.float32)
        )
        for x in operation.inputs(spec)
    }
    drawn |= {k: x.copy() for k, x in operation.indices(spec, case).items()}
    for x in operation.params(spec):
        if x.dtype == "fp32":
            drawn[x.name] *= FACTOR
    if "slopes" in drawn:
        drawn["slopes"] = _slopes(tiles, case, random, drawn["slopes"])
    if case.data == "normal" and not {"sink", "bias"} & drawn.keys():
        return drawn
    q, k, v = (drawn[name] for name in "qkv")  # of which all the rest speaks
    if case.data == "edges":
        _edges(spec, tiles, mask_of(spec, tiles, case), q, k, random)
    if case.data == "peaks":
        _peaks(spec, tiles, mask_of(spec, tiles, case), q, k)
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
    if case.data == "saturated":
        _saturated(spec, q, k)
    if case.data == "slope":
        _slope(q, k, v, random)
    if case.data == "mean_v":
        # In the half of the keys that kernels take first: in all of them, what O loses by small
        # sums the row sums would lose as well.
        q *= QUIET
        v[:, case.kv // 2 :] += MEAN
    if case.data == "drift":
        # dS of a row has the sum 0, but neither of the halves: sums of dQ grow and shrink again.
        q *= QUIET
        v[:, : case.kv // 2] -= DRIFT
        v[:, case.kv // 2 :] += DRIFT
        k += DRIFT
    if case.data == "close":
        k *= CLOSE
    if case.data == "uniform_1e4":
        q, k, v = (
            random.uniform(-LARGE_INPUT, LARGE_INPUT, x.shape).astype(np.float32)
            for x in (q, k, v)
        )
    drawn = {**drawn, "q": q, "k": k, "v": v}
    if "bias" in drawn:
        _bias(spec, tiles, case, mask_of(spec, tiles, case), drawn["bias"])
    if "sink" in drawn:
        drawn["sink"] = _sinks(spec, mask_of(spec, tiles, case), case, drawn)
    return drawn


def _in_8_bits(spec: Mapping[str, Any], tiles: Tiles, case: Case) -> dict[str, Any]:
    """The values of 16 bits, cut to what e4m3 has, V^T, and factors by batch and head.

    Those of Q and K leave the scores as they are, but in `descales`.
    """
    drawn: dict[str, Any] = values(in_16_bits(spec), tiles, case)
    random, shape = np.random.default_rng(case.seed + 2), (case.batch, case.kv_heads)
    q, v = (np.exp2(random.uniform(-5, 5, shape)) for _ in range(2))
    k = 1.0 / q
    if case.data == "descales":
        numbers = np.arange(math.prod(shape)).reshape(shape)
        q, k, v = (
            np.exp2(np.array(levels)[(numbers + each) % len(levels)])
            for each, levels in enumerate(DESCALE_LEVELS)
        )
    factors = dict(zip("qkv", (q, k, v), strict=True))
    if has_block_factors(spec):
        for name in "qkv":
            factors[name] = _factors_of_blocks(case, random, name, drawn, factors[name])
    found = drawn | {name: np.clip(drawn[name], -LARGEST, LARGEST) for name in "qkv"}
    if is_permuted(spec):
        found["v"] = permute_v(found["v"])
    if not spec.get("descale"):
        return found
    named = factors.items()
    return found | {f"{name}_descale": x.astype(np.float32) for name, x in named}


def _factors_of_blocks(
    case: Case,
    random: np.random.Generator,
    name: str,
    drawn: dict[str, Any],
    of_heads: Any,
) -> Any:
    """Factors of a tensor by block, from those of its KV heads: [batch, heads, blocks].

    What is drawn is divided by powers of two, as a quantiser would: codes lose nothing by it. In
    `descales` it stays, and scores and values are larger in some blocks than in others.
    """
    batch, rows, heads, _ = drawn[name].shape
    blocks = -(-rows // DESCALE_ROWS)
    wide = np.repeat(of_heads, heads // of_heads.shape[1], axis=1)[..., None]
    if case.data == "descales":
        levels = np.array(BLOCK_LEVELS)[np.arange(blocks) % len(BLOCK_LEVELS)]
        return wide * np.exp2(levels if name != "q" else -levels[::-1])
    powers = np.exp2(random.integers(-2, 3, (batch, heads, blocks)))
    of_rows = powers[:, :, np.arange(rows) // DESCALE_ROWS].swapaxes(1, 2)
    drawn[name] = (drawn[name] / of_rows[..., None]).astype(np.float32)
    return wide * powers


def _backward(spec: Mapping[str, Any], tiles: Tiles, case: Case) -> dict[str, F32]:
    """Q, K and V of the forward pass, dO, and O and LSE of what 16 bits hold of Q, K and V."""
    dtype, (scalar,) = spec["dtype"], operation_of(spec).scalars
    drawn = values(forward_of(spec), tiles, case)
    q, k, v = (rounded(drawn[name], dtype) for name in "qkv")
    random = np.random.default_rng(case.seed + 3)
    dout = random.standard_normal(DOUT.shape(spec, case), np.float32)
    if case.gradient == "zeros":
        dout[...] = 0
    if case.gradient == "one_row":
        dout[:, np.arange(case.q) != case.q // 2] = 0
    if case.gradient == "small":
        dout *= SMALL_GRADIENT
    if case.gradient == "large":
        dout *= LARGE_GRADIENTS[dtype]
    if case.gradient == "outliers":
        sampled = {i * case.q // SAMPLED for i in range(SAMPLED)}
        rows = np.arange(FIRST_OUTLIER, case.q, OUTLIER_STEP)
        for number, row in enumerate(x + (x in sampled) for x in rows.tolist()):
            if not SHORT_ROWS.start <= row < SHORT_ROWS.stop:
                dout[:, row : row + 1] *= 64.0 ** (number % 3 + 1)
        dout[:, SHORT_ROWS] *= SHORT
    scale = scalar.value(spec) * case.scale_factor
    defined: Any = {"mask": masks.of_spec(spec), "score": scores.of_spec(spec)}
    forward = reference.attention(q, k, v, scale=scale, **defined)
    return {
        **{"dout": rounded(dout, dtype), "q": q, "k": k, "v": v},
        "out": forward.out.astype(np.float32),
        "lse": forward.lse.astype(np.float32),
    }


def _packed(spec: Mapping[str, Any], tiles: Tiles, case: Case) -> dict[str, Any]:
    """Sequences with the values of dense problems, of heads those of the first; beside them NaN.

    Of a page that several of them have the last one's.
    """
    operation = operation_of(spec)
    found: dict[str, Any] = {
        x.name: np.full(x.shape(spec, case), np.nan, np.float32)
        for x in operation.inputs(spec)
    }
    of_heads: dict[str, F32] = {}
    packed = rows_of(case)
    keys: list[Any] = [x.kv for x in packed]
    if is_paged(spec):
        keys = [*slots_of(spec, case)]
    for number, (rows, at) in enumerate(zip(packed, keys, strict=True)):
        q, kv = rows.q.stop - rows.q.start, len(found["k"][at])
        # Data is about rows and keys: of none of them a row is drawn and left out.
        name, counts = f"{case.name}_{number}", {"q": max(q, 1), "kv": max(kv, 1)}
        one = replace(case, name=name, batch=1, lengths=(), **counts)
        drawn = values(dense(spec), tiles, one)
        found["q"][rows.q] = drawn["q"][0, :q]
        for tensor in "kv":
            found[tensor][at] = drawn[tensor][0, :kv]
        of_heads = of_heads or {
            name: drawn[name] for name in ("sink", "slopes") if name in drawn
        }
    return {**found, **of_heads, **operation.indices(spec, case)}


def _edges(
    spec: Mapping[str, Any],
    tiles: Tiles,
    mask: Mask,
    q: F32,
    k: F32,
    random: np.random.Generator,
) -> None:
    """Each row has one key that decides it, where masks and tiles end; some see or miss keys of
    zeros, as TMA fills them in beyond the end."""
    q_len, kv, head_dim = q.shape[1], k.shape[1], q.shape[-1]
    group = spec["q_per_kv"]
    at, lengths = np.arange(q_len)[:, None], Lengths(q_len, kv)
    first, end = mask.keys(at, lengths)
    last = end - 1
    edges = [first, first - 1] if first.any() else []
    if not mask.gap.empty:
        begin, behind = mask.gaps(at, lengths)
        edges += [begin - 1, begin, behind - 1, behind]
    if mask.tests is not None:  # keys side by side, by row
        edges += [last - at % 5, last - (at + 1) % 5, first + at % 7]
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


def _peaks(spec: Mapping[str, Any], tiles: Tiles, mask: Mask, q: F32, k: F32) -> None:
    """Each row has a key that is all it sees, row by row in another column of the KV tiles."""
    q_len, kv = q.shape[1], k.shape[1]
    rows, heads = np.arange(q_len)[:, None], np.arange(q.shape[2])
    first, end = mask.keys(rows, Lengths(q_len, kv))
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


def _saturated(spec: Mapping[str, Any], q: F32, k: F32) -> None:
    """Scores are at a softcap: by row all at its upper end, all at the lower one, or key by key."""
    beyond = min(SATURATED * spec["softcap"] * math.sqrt(q.shape[-1]), LARGEST_INPUT)
    q *= QUIET
    k[..., 0], k[..., 1] = 1.0, np.where(np.arange(k.shape[1]) % 2, 1.0, -1.0)[:, None]
    kinds = np.arange(q.shape[1]) % 3
    q[..., :2] = (
        beyond * np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])[kinds][:, None]
    )


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


def _sinks(
    spec: Mapping[str, Any], mask: Mask, case: Case, drawn: Mapping[str, F32]
) -> F32:
    """Near the least log-sum-exp of a head's rows, and of the next head near the median.

    A larger one would hide what is wrong with O. Of `sinks` also, by head: 0, above and below all
    scores by far, as large as they are, none (-inf), and one beside which no key counts.
    """
    (scalar,) = operation_of(spec).scalars
    scale = scalar.value(spec) * case.scale_factor
    rows = np.unique(np.linspace(0, case.q - 1, SAMPLES).astype(int))
    seen = mask.visible(rows, Lengths(case.q, case.kv))
    made = np.empty_like(drawn["sink"])
    for head, near in enumerate(drawn["sink"].tolist()):
        q = drawn["q"][:, rows, head].astype(np.float64)
        k = drawn["k"][:, :, head // spec["q_per_kv"]].astype(np.float64)
        products, score = q @ k.swapaxes(1, 2) * scale, scores.of_spec(spec)
        batches = [
            score.value(of_batch[None], _scored(spec, case, batch, head, rows, drawn))[
                0
            ]
            for batch, of_batch in enumerate(products)
        ]
        sums = np.logaddexp.reduce(np.where(seen, batches, -np.inf), axis=-1)
        sums = sums[sums > -np.inf] if (sums > -np.inf).any() else np.zeros(1)
        near += np.median(sums) if head % 2 else sums.min()
        most = sums.max()
        levels = (near, 0.0, most + SINK_LEAD, most - SINK_TRAIL, most, -np.inf, np.inf)
        made[head] = levels[head % len(levels)] if case.data == "sinks" else near
    return made


def _scored(
    spec: Mapping[str, Any],
    case: Case,
    batch: int,
    head: int,
    rows: NDArray[Any],
    drawn: Mapping[str, F32],
) -> scores.Place:
    """Of some rows of a head and all keys."""
    lengths, group = Lengths(case.q, case.kv), int(spec["q_per_kv"])
    keys = np.arange(case.kv)
    return scores.Place(batch, np.array([head]), rows, keys, group, lengths, drawn)


def _slopes(tiles: Tiles, case: Case, random: np.random.Generator, drawn: F32) -> F32:
    """So little from key to key that no decisive key is hidden.

    Of `slopes`, by head: none, steep, and scores that rise from block to block, of which the last
    is taken first, by about the slack; then those of models with 8 heads.
    """
    if case.data != "slopes":
        return np.exp2(-random.integers(7, 10, drawn.shape)).astype(np.float32)
    rises = [-rise * tiles.slack * math.log(2) / tiles.kv for rise in (*BARELY, 2.0)]
    levels = np.array([0.0, 1.0, *rises, 0.5, 2.0**-8])
    return levels[np.arange(len(drawn)) % len(levels)].astype(np.float32)


def _bias(
    spec: Mapping[str, Any], tiles: Tiles, case: Case, mask: Mask, bias: F32
) -> None:
    """Random where scores are, else too little to hide what a case is about; NaN where no row sees.

    Of `biases`, by head: some keys at -inf, far above all others or far below, all keys of the
    block that is taken first at -inf, all keys of some rows.
    """
    bias *= BIAS if case.data in ("normal", "biases") else QUIET
    if case.data == "biases":
        first = (case.kv - 1) // tiles.kv * tiles.kv
        for head in range(bias.shape[1]):
            kind = head % (len(BIAS_LEVELS) + 2)
            if kind < len(BIAS_LEVELS):
                bias[:, head, :, head % BIAS_STEP :: BIAS_STEP] = BIAS_LEVELS[kind]
            elif kind == len(BIAS_LEVELS):
                bias[:, head, :, first:] = -np.inf
            else:
                bias[:, head, ::3] = -np.inf
    group = int(spec["q_per_kv"])
    heads = case.kv_heads * group
    of_heads = [
        mask.at(batch, head, head // group)
        for batch in range(case.batch if mask.params else 1)
        for head in range(heads if mask.reads("h") else 1)
    ]
    rows, lengths = np.arange(case.q), Lengths(case.q, case.kv)
    seen = np.zeros((case.q, case.kv), np.bool_)
    for each in of_heads:
        seen |= each.visible(rows, lengths)
    hidden = ~seen if bias.shape[2] > 1 else ~seen.any(0, keepdims=True)
    bias[:, :, hidden] = np.nan


def _rows_of_tiles(tiles: Tiles, q: F32) -> NDArray[Any]:
    """Where a row (position, head) of Q is in the tiles of its head, or of its packed group."""
    rows, heads = np.arange(q.shape[1])[:, None], np.arange(q.shape[2])
    return rows * tiles.packed + heads % tiles.packed
