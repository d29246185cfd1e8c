# SPDX-License-Identifier: Apache-2.0
"""FlexAttention of PyTorch, told of masks and scores by the expressions that our kernels have.

`flex_attention` is compiled for one problem with its default options, in tens of seconds. The block
mask is made once, before: what remains of it in a call are its lists of blocks, and the test of
scores in blocks that are cut. A sink, which it does not know, is a factor of O by the row's LSE in
the same compiled function.

Packed sequences are one batch, of which scores between two sequences do not count; expressions get
lengths and places within the sequence of a query.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import (
    add,
    and_,
    eq,
    floordiv,
    ge,
    gt,
    invert,
    le,
    lt,
    mod,
    mul,
    ne,
    neg,
    or_,
    sub,
    truediv,
)
from typing import TYPE_CHECKING, Any, Final

from ..expressions.language import SCORE, Name, Node, Number, Real, names_in
from ..ops import lists, scores
from ..ops.varlen import CU_SEQLENS_K, CU_SEQLENS_Q
from .problems import Problem
from .timing import Launch

if TYPE_CHECKING:
    import torch

Names = Mapping[str, Any]  # integers and tensors of them
Mod = Callable[..., "torch.Tensor"]
Function = Callable[..., Any]

# Names that no expression has: of tables by row and by key, and whether both are of one sequence.
_OF_ROW, _OF_KEY, _SAME = "sequence of row", "sequence of key", "same sequence"
_OFFSETS: Final = (CU_SEQLENS_Q.name, CU_SEQLENS_K.name)


def value(node: Node, at: Names, where: Function) -> Any:
    """An expression's value: a tensor, or a number where all of its names are."""
    if isinstance(node, Number | Real):
        return node.value
    if isinstance(node, Name):
        found = at[node.name]
        return found[tuple(at[axis] for axis in node.axes)] if node.axes else found
    operands = [value(each, at, where) for each in node.operands]
    if node.operator == "-":
        return neg(*operands) if len(operands) == 1 else sub(*operands)
    if node.operator in _BEFORE:
        return reduce(_picker(_BEFORE[node.operator], where), operands)
    if node.operator == "where":
        return where(*operands)
    if node.operator in _OF_ONE:
        return _OF_ONE[node.operator](*operands)
    return reduce(_COMPUTE[node.operator], operands)


def _tanh(x: Any) -> Any:
    return x.tanh()


def _capped(x: Any, cap: float) -> Any:
    return cap * (x / cap).tanh()


_OF_ONE: Final[Mapping[str, Function]] = {
    **{"abs": abs, "not": invert, "tanh": _tanh},
}
_COMPUTE: Final[Mapping[str, Function]] = {
    **{"+": add, "*": mul, "/": truediv, "//": floordiv, "%": mod, "softcap": _capped},
    **{
        "<": lt,
        "<=": le,
        ">": gt,
        ">=": ge,
        "==": eq,
        "!=": ne,
        "and": and_,
        "or": or_,
    },
}
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
    keys = problem.keys
    first = [bound.node() for bound in keys.left_edges]
    last = [bound.plus(-1).node() for bound in keys.right_edges]
    gap_first, gap_end = ([x.node() for x in side] for side in keys.gap_edges)
    has_gap = not keys.gap.empty  # outside of what torch.compile traces
    if not keys.edges and not problem.sequences:
        return None

    def visible(b: Any, h: Any, row: Any, kv: Any) -> torch.Tensor:
        at = _names(problem, tensors, b, h, row, kv)
        own = [at[_SAME]] if _SAME in at else []
        kv = at["kv"]
        tests = [value(node, at, where) <= kv for node in first]
        tests += [kv <= value(node, at, where) for node in last]
        if has_gap:
            before = [kv < value(node, at, where) for node in gap_first]
            behind = [kv >= value(node, at, where) for node in gap_end]
            tests.append(reduce(and_, before) | reduce(and_, behind))
        if keys.tests is not None:
            tests.append(value(keys.tests, at, where))
        found: torch.Tensor = reduce(and_, [*own, *tests])
        return found

    return visible


def score_mod(problem: Problem, tensors: Names) -> Mod | None:
    """What a scaled score becomes, of (score, batch, head, row, key); None where it stays."""
    import torch

    score = scores.of_spec(problem.spec)
    if score is scores.PLAIN:
        return None

    def changed(s: Any, b: Any, h: Any, row: Any, kv: Any) -> torch.Tensor:
        at = _names(problem, tensors, b, h, row, kv)
        found: torch.Tensor = value(score.tree, {**at, SCORE: s}, torch.where)
        return found

    return changed


def _names(
    problem: Problem, tensors: Names, b: Any, h: Any, row: Any, kv: Any
) -> Names:
    """What expressions read: inputs by name, lengths, and the place of a score."""
    lengths = {"seqlen_q": problem.q, "seqlen_kv": problem.kv}
    heads = {"b": b, "h": h, "h_kv": h // (problem.heads // problem.kv_heads)}
    more = {}
    if problem.sequences:
        number = tensors[_OF_ROW][row]
        more[_SAME] = number == tensors[_OF_KEY][kv]
        first_q, first_kv = (tensors[name][number] for name in _OFFSETS)
        end_q, end_kv = (tensors[name][number + 1] for name in _OFFSETS)
        lengths = {"seqlen_q": end_q - first_q, "seqlen_kv": end_kv - first_kv}
        row, kv = row - first_q, kv - first_kv
    q = row + (lengths["seqlen_kv"] - lengths["seqlen_q"])
    return {**tensors, **lengths, **heads, **more, "row": row, "q": q, "kv": kv}


def numbered(offsets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of each row of packed Q and K, int32 [rows], the number of its sequence.

    offsets: cu_seqlens_q and cu_seqlens_k.
    """
    import torch

    found = {}
    for name, of_rows in zip(_OFFSETS, (_OF_ROW, _OF_KEY), strict=True):
        ends = offsets[name][1:]
        rows = torch.arange(int(ends[-1]), device=ends.device)
        found[of_rows] = torch.searchsorted(ends, rows, right=True).to(torch.int32)
    return found


def launch(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    by_name: Mapping[str, torch.Tensor],
) -> Launch:
    """A call of it. Tensors are as our kernel takes them; by_name: further inputs."""
    import torch
    from torch.nn.attention import flex_attention as flex

    sink = by_name.get("sink")
    if problem.sequences:
        by_name = {**by_name, **numbered(by_name)}
        q, k, v = (x[None] for x in (q, k, v))
    if "bias" in by_name:  # with all elements along axes of which it has one
        whole = (problem.batch, problem.heads, problem.q, problem.kv)
        by_name = {**by_name, "bias": by_name["bias"].expand(whole)}
    options: dict[str, Any] = {
        "score_mod": score_mod(problem, by_name),
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
        out = out.transpose(1, 2)
        return out[0] if problem.sequences else out

    return call


def block_mask(problem: Problem, tensors: Names, device: torch.device) -> Any:
    """The lists of blocks with a score that counts, or those of a call; None where all do."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    test = mask_mod(problem, tensors, torch.where)
    if "blocks" in problem.spec:
        given = [tensors[name] for name in lists.NAMES]
        size = lists.tile_of(problem.spec)
        lengths = (problem.q, problem.kv)
        return BlockMask.from_kv_blocks(
            *given, BLOCK_SIZE=size, mask_mod=test, seq_lengths=lengths
        )
    if test is None:
        return None
    edges = (*problem.keys.left_edges, *problem.keys.right_edges)
    reads = {name for bound in edges for name in names_in(bound.node())}
    return create_block_mask(
        test,
        B=problem.batch if "b" in reads and not problem.sequences else None,
        H=problem.heads if reads & {"h", "h_kv"} else None,
        Q_LEN=problem.q,
        KV_LEN=problem.kv,
        device=device,
    )
