# SPDX-License-Identifier: Apache-2.0
"""Where the rows of packed sequences are: in pages, packed, or in dense tensors; the same values.

Shapes are the operations'. Pages are filled by what a case's table says, and read back as the
operation's definition reads them, so nobody is timed with other keys than the kernel of the pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..ops import operation_of
from ..ops.forward import FORWARD, K, Q, V
from ..ops.operation import Given
from ..ops.paged import gathered, is_paged, slots_of
from ..ops.varlen import CU_SEQLENS_K, PACKED_FORWARD, dense, rows_of
from . import lengths as spelled
from .problems import DENSE, PACKED, SERVER, Problem

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]


def in_pages(problem: Problem, packed: Tensors) -> dict[str, torch.Tensor]:
    """Packed K and V, [rows, kv_heads, d], in the pages of the problem's pool; 0 elsewhere."""
    import torch

    spec, k, v = problem.spec, packed[K.name], packed[V.name]
    by_name = {x.name: x for x in operation_of(spec).inputs(spec)}
    shapes = [by_name[name].shape(spec, problem) for name in (K.name, V.name)]
    if problem.pool == SERVER:
        (pages, page, heads, d_qk), (*_, d_v) = shapes
        cache = k.new_zeros(pages, heads, page, d_qk + d_v).transpose(1, 2)
        pool = {K.name: cache[..., :d_qk], V.name: cache[..., d_qk:]}
    else:
        pool = {K.name: k.new_zeros(shapes[0]), V.name: v.new_zeros(shapes[1])}
    slots, sequences = slots_of(spec, problem), rows_of(problem.packed)
    for at, rows in zip(slots, sequences, strict=True):
        place = tuple(torch.from_numpy(x).to(k.device) for x in at)
        for name, x in pool.items():
            x[place] = packed[name][rows.kv]
    return pool


def laid_out(problem: Problem, given: Given, layout: str) -> dict[str, Any]:
    """What a kernel of another layout takes by name, q, k and v first, for the same sequences.

    given: a call of the problem. layout: `PACKED`, or `DENSE` where all lengths are alike:
    [batch, rows, heads, d].
    """
    import torch

    q = given.inputs[Q.name]
    if is_paged(given.spec):
        given = gathered(given)
        offsets = torch.from_numpy(given.inputs[CU_SEQLENS_K.name])
        offsets = offsets.to(q.device, torch.int32)
        given = Given(
            given.spec, {**given.inputs, CU_SEQLENS_K.name: offsets}, given.scale
        )
    spec, operation = given.spec, PACKED_FORWARD
    found = {x.name: given.inputs[x.name] for x in operation.inputs(spec)}
    keys = problem.packed.kv
    found |= {name: found[name][:keys] for name in (K.name, V.name)}
    if layout == PACKED:
        return found
    assert layout == DENSE, layout
    lengths = spelled.alike(problem.lengths)
    assert lengths is not None, "of other lengths"
    for name, rows in {
        Q.name: lengths[0],
        K.name: lengths[1],
        V.name: lengths[1],
    }.items():
        found[name] = found[name].unflatten(0, (problem.batch, rows))
    return {x.name: found[x.name] for x in FORWARD.inputs(dense(spec))}
