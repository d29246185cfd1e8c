# SPDX-License-Identifier: Apache-2.0
"""FlexAttention of PyTorch, told of masks and scores by the expressions that our kernels have.

`flex_attention` is compiled for one problem with its default options, in tens of seconds. The block
mask is made once, before: what remains of it in a call are its lists of blocks, and the test of
scores in blocks that are cut. A sink, which it does not know, is a factor of O by the row's LSE in
the same compiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import add, and_, floordiv, gt, lt, mod, mul, neg, sub
from typing import TYPE_CHECKING, Any, Final

from ..expressions.language import Name, Node, Number, names_in
from ..ops import lists
from .problems import Problem
from .timing import Launch

if TYPE_CHECKING:
    import torch

Names = Mapping[str, Any]  # integers and tensors of them
Mod = Callable[..., "torch.Tensor"]
Function = Callable[..., Any]


def value(node: Node, at: Names, where: Function) -> Any:
    """An integer of an expression: a tensor, or a number where all of its names are."""
    if isinstance(node, Number):
        return node.value
    if isinstance(node, Name):
        found = at[node.name]
        return found[tuple(at[axis] for axis in node.axes)] if node.axes else found
    operands = [value(each, at, where) for each in node.operands]
    if node.operator == "-":
        return neg(*operands) if len(operands) == 1 else sub(*operands)
    if node.operator in _BEFORE:
        return reduce(_picker(_BEFORE[node.operator], where), operands)
    return reduce(_COMPUTE[node.operator], operands)


_COMPUTE: Final = {"+": add, "*": mul, "//": floordiv, "%": mod}
_BEFORE: Final = {"min": lt, "max": gt}


def _picker(before: Function, where: Function) -> Function:
    def picked(a: Any, b: Any) -> Any:
        test = before(a, b)
        if isinstance(test, bool):  # of numbers
            return a if test else b
        return where(test, a, b)

    return picked


def mask_mod(problem: Problem, tensors: Names, where: Function) -> Mod | None:
    """Whether a score counts, of (batch, head, row, key); None where all do.

    tensors: the inputs that a mask may read, by name. where: of the library whose values those are,
    (test, value where it holds, value elsewhere).
    """
    keys, group = problem.keys, problem.heads // problem.kv_heads
    lengths = {"seqlen_q": problem.q, "seqlen_kv": problem.kv}
    first = [bound.node() for bound in keys.left_edges]
    last = [bound.plus(-1).node() for bound in keys.right_edges]
    if not first and not last:
        return None

    def visible(b: Any, h: Any, row: Any, kv: Any) -> torch.Tensor:
        place = row + (problem.kv - problem.q)
        at = {**tensors, **lengths, "b": b, "h": h, "h_kv": h // group}
        at |= {"row": row, "q": place, "kv": kv}
        tests = [value(node, at, where) <= kv for node in first]
        tests += [kv <= value(node, at, where) for node in last]
        found: torch.Tensor = reduce(and_, tests)
        return found

    return visible


def score_mod(problem: Problem) -> Mod | None:
    """What a scaled score becomes, of (score, batch, head, row, key); None where it stays."""
    import torch

    cap = problem.softcap
    if cap is None:
        return None
    return lambda score, b, h, row, kv: cap * torch.tanh(score / cap)


def launch(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    by_name: Mapping[str, torch.Tensor],
) -> Launch:
    """A call of it. Tensors are [batch, rows, heads, dim]; by_name: further inputs."""
    import torch
    from torch.nn.attention import flex_attention as flex

    sink = by_name.get("sink")
    options: dict[str, Any] = {
        "score_mod": score_mod(problem),
        "block_mask": block_mask(problem, by_name, q.device),
        "enable_gqa": problem.heads != problem.kv_heads,
    }
    if problem.lse or sink is not None:
        options["return_aux"] = flex.AuxRequest(lse=True)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if "return_aux" not in options:
            return flex.flex_attention(q, k, v, **options)
        out, aux = flex.flex_attention(q, k, v, **options)
        lse = aux.lse
        if sink is not None:
            share = torch.sigmoid(lse - sink[:, None])
            out = (out * share[..., None]).to(out.dtype)
            lse = torch.logaddexp(lse, sink[:, None])
        return (out, lse) if problem.lse else out

    torch.compiler.reset()  # else another problem is a change of shapes, which stay open
    compiled = torch.compile(attention, dynamic=False, fullgraph=True)
    turned = [x.transpose(1, 2) for x in (q, k, v)]

    def call() -> torch.Tensor:
        found = compiled(*turned)
        out: torch.Tensor = found[0] if problem.lse else found
        return out.transpose(1, 2)

    return call


def block_mask(problem: Problem, tensors: Names, device: torch.device) -> Any:
    """The lists of blocks with a score that counts, or those of a call; None where all do."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    test = mask_mod(problem, tensors, torch.where)
    if "blocks" in problem.spec:
        given = [tensors[name] for name in lists.NAMES]
        size = lists.tile_of(problem.spec)
        return BlockMask.from_kv_blocks(*given, BLOCK_SIZE=size, mask_mod=test)
    if test is None:
        return None
    edges = (*problem.keys.left_edges, *problem.keys.right_edges)
    reads = {name for bound in edges for name in names_in(bound.node())}
    return create_block_mask(
        test,
        B=problem.batch if "b" in reads else None,
        H=problem.heads if reads & {"h", "h_kv"} else None,
        Q_LEN=problem.q,
        KV_LEN=problem.kv,
        device=device,
    )
