# SPDX-License-Identifier: Apache-2.0
"""Who stores which rows: in a run each exactly once, in a walk by the schedule of all CTAs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..build.calls import Located, locate
from ..emulator import walk
from ..emulator.launch import Launch
from ..emulator.lower import Program
from ..emulator.memory import GlobalMemory
from ..emulator.report import NAMELESS, Names
from ..emulator.writes import Writes
from ..ops import operation_of
from ..ops.cases import (
    STEPS,
    STEPS_OF_WALKED_BLOCK,
    Case,
    Tiles,
    share_that_runs,
    tiles_of,
)
from ..ops.compare import place, rows_named
from ..ops.e4m3 import is_permuted
from ..ops.inputs import params, place_tensors
from ..ops.operation import Spec
from ..ops.varlen import is_packed, rows_of
from .schedule_check import blocks_of, extent
from .tensors import Tensor, view_of

ANYWHERE = 2**31  # [rows] of a tile that no box leaves


def tiles_of_tensors(
    tiles: Tiles, spec: Spec, addresses: Mapping[str, int]
) -> dict[int, tuple[int, ...]]:
    """By address, what a tile takes of dimensions 0 (of a head) and 1 (rows) of a tensor.

    Where heads are packed, those of a group are dimension 1 of the queries, and rows come next.
    The CTAs of a cluster load parts of a KV tile, and work on query tiles beyond the last row
    while another one has rows, and lists may name blocks behind K; nothing else reaches outside.
    """
    group = (1,) if tiles.packed > 1 else ()
    queries, keys = (1, *group, tiles.cluster_rows), (1, tiles.kv)
    if spec.get("blocks"):
        keys = (1, ANYWHERE)
    taken = {
        addresses[tensor.name]: keys if tensor.cached else queries
        for tensor in operation_of(spec).tensors(spec)
        if tensor.tma
    }
    if is_permuted(spec):
        taken[addresses["v"]] = (tiles.kv, 1)
    if "bias" in addresses:
        of_rows = spec["bias"]["shape"][2] != 1
        taken[addresses["bias"]] = (tiles.kv, tiles.cluster_rows if of_rows else 1)
    return taken


def tiles_of_case(tiles: Tiles, spec: Spec, case: Case) -> dict[int, tuple[int, ...]]:
    """As of `tiles_of_tensors`, by what the tensor maps of a case have for addresses.

    Maps of packed sequences begin as many rows early as there are, and of a tile's rows warpgroups
    store some which are all behind its sequence. Each box of K and V has rows of them.
    """
    located = locate(place_tensors(spec, case, tiles))
    addresses = {name: x.address for name, x in located.items()}
    if not is_packed(spec):
        return tiles_of_tensors(tiles, spec, addresses)
    taken: dict[int, tuple[int, ...]] = {}
    group = (1,) if tiles.packed > 1 else ()
    for tensor in operation_of(spec).tensors(spec):
        if tensor.tma and not tensor.cached:
            at = located[tensor.name]
            rows = at.placed.shape[0]
            early = at.address - rows * at.strides[0] * at.itemsize
            taken[early] = (1, *group, rows + tiles.positions)
    return taken


def write_counts(tensor: Tensor, writes: Writes) -> NDArray[np.uint8]:
    """How often each element of a tensor was written."""
    if tensor.storage is None:
        return writes.counts(tensor.address, tensor.view)
    first = tensor.address - tensor.placed.offset * tensor.view.itemsize
    return view_of(writes.counts(first, tensor.storage), tensor.placed)


def written_once(
    tensor: Tensor,
    kinds: str,
    stored: NDArray[np.bool_] | None,
    writes: Writes,
) -> Iterator[str]:
    """Findings about rows [batch, q, heads] that were not written exactly once.

    kinds: of the tensor's axes. stored: the rows that the CTAs that ran store; None for all.
    """
    counts = write_counts(tensor, writes)
    for kind in {*"bd"} - {*kinds}:
        counts, kinds = counts[..., None], f"{kinds}{kind}"
    rows = counts.transpose([kinds.index(kind) for kind in "bshd"])
    most, least = rows.max(-1), rows.min(-1)
    if stored is None:
        stored = np.ones_like(most, np.bool_)
    if (missing := stored & (least == 0)).any():
        yield f"{rows_named(missing)} of {tensor.name}: not written"
    if (foreign := ~stored & (most > 0)).any():
        yield f"{rows_named(foreign)} of {tensor.name}: written by a CTA that does not own it"
    if (twice := most > 1).any():
        b, row, head = place(twice)
        at = {"b": b, "s": row, "h": head, "d": 0}
        index = [at[kind] for kind in kinds][: tensor.view.ndim]
        offset = sum(
            n * step for n, step in zip(index, tensor.placed.strides, strict=True)
        )
        first = tensor.address
        if tensor.storage is not None:
            offset += tensor.placed.offset
            first -= tensor.placed.offset * tensor.view.itemsize
        else:
            offset = int(np.ravel_multi_index(index, tensor.view.shape))
        who = list(writes.writers(first, offset * tensor.view.itemsize))
        told = ", then by ".join(map(str, who[:3]))
        yield f"{rows_named(twice)} of {tensor.name}: written {most.max()} times, by {told}"


def walked(
    constants: Mapping[str, Any],
    case: Case,
    launch: Launch,
    program: Program,
    names: Names = NAMELESS,
) -> walk.Walk:
    """The schedule of all CTAs of a launch, or of those of the case.

    program: of `walk.prepare`. names: for findings.
    """
    spec, cut = constants["SPEC"], tiles_of(constants)
    located = locate(place_tensors(spec, case, cut))
    blocks = blocks_of(cut, spec, case) * share_that_runs(case, spec, cut)
    return walk.walk(
        program,
        launch,
        [
            extent(name, x.address, x.placed.shape, x.strides, x.itemsize)
            for name, x in located.items()
        ],
        clusters=case.clusters,
        tiles=tiles_of_case(cut, spec, case),
        memory=_memory(spec, cut, case, located),
        max_steps=STEPS + int(STEPS_OF_WALKED_BLOCK * blocks),
        names=names,
    )


def _memory(
    spec: Spec, tiles: Tiles, case: Case, located: Mapping[str, Located]
) -> GlobalMemory:
    """The inputs of integers, as they are in a case."""
    memory, operation = GlobalMemory(), operation_of(spec)
    known = dict(operation.indices(spec, case))
    read = params(spec, tiles, case)
    known |= {
        x.name: np.asarray(read[x.name], np.int32)
        for x in operation.params(spec)
        if x.dtype == "int32"
    }
    for name, numbers in known.items():
        at = located[name]
        strides = tuple(stride * at.itemsize for stride in at.placed.strides)
        memory.add_strided(name, at.address, numbers.view(np.uint32), strides)
    return memory


def shape_of_rows(spec: Spec, case: Case) -> tuple[int, int, int]:
    """(batch, rows, heads) of the first output."""
    dims = operation_of(spec).outputs(spec)[0].sizes(spec, case)
    return dims.get("b", 1), dims["s"], dims["h"]


def count_of_rows(spec: Spec, case: Case) -> int:
    """Rows of all heads that a launch stores."""
    rows = rows_to_store(spec, case)
    return math.prod(shape_of_rows(spec, case)) if rows is None else int(rows.sum())


def rows_to_store(spec: Spec, case: Case) -> NDArray[np.bool_] | None:
    """Bool [1, rows, heads]: those of packed sequences; None for all rows there are."""
    if not is_packed(spec):
        return None
    found = np.zeros(shape_of_rows(spec, case), np.bool_)
    for rows in rows_of(case):
        found[:, rows.q] = True
    return found


def rows_stored(seen: walk.Walk, spec: Spec, case: Case) -> NDArray[np.bool_]:
    """Bool [batch, q, heads]: the rows of the first output that a walk stored."""
    rows = np.zeros(shape_of_rows(spec, case), np.bool_)
    boxes = seen.stores[operation_of(spec).outputs(spec)[0].name]
    for begin, end in zip(boxes.begin, boxes.end, strict=True):
        rows[tuple(slice(*span) for span in zip(begin[:3], end[:3], strict=True))] = (
            True
        )
    return rows
