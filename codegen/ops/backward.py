# SPDX-License-Identifier: Apache-2.0
"""`fmha_bwd`: dQ, dK and dV of attention, from dO and what the forward pass read and wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from . import gradients, masks, scores
from .compare import Verdict, judge_rows
from .forward import BATCH, FORWARD, HEAD_DIM_V, HEADS, LSE, OUT, SEQLEN_Q, K, Q, V
from .gradients import Truth
from .masks import Lengths
from .operation import (
    Array,
    Cut,
    Given,
    Operation,
    Sizes,
    Spec,
    Tensor,
    Workspace,
)

BACKWARD_OP: Final = "fmha_bwd"

DOUT: Final = Tensor("dout", (BATCH, SEQLEN_Q, HEADS, HEAD_DIM_V), expands=True)
# Of the forward pass, which always has it then.
GIVEN_LSE: Final = replace(
    LSE,
    when="",
    about=lambda spec: "is that of the forward pass; its strides are free",
)
DQ: Final = replace(Q, name="dq")
DK: Final = replace(K, name="dk")
DV: Final = replace(V, name="dv")
# Rows of two statistics, of S and -D, behind those of the sums of dQ.
STATISTICS: Final = 2
TICKETS: Final = 1
# The field that says what dQ is summed in: how a kernel computes it, not what.
DQ_SUMS: Final = "dq_sums"
# Behind the statistics of S of a block, where dQ is summed in fp16: of its scales, 16 bytes.
EXPONENTS: Final = 4
# Most rows of heads in which the first tile stores dQ and the last one writes it, by head_dim:
# decision 0059.
SHORT_HEADS: Final = {64: 2048, 96: 1024, 128: 2048}
# The same of sums in fp16, whose zeros and last kernel cost half as much: decision 0068.
SHORT_HEADS_OF_HALVES: Final = 1024
# Of a head's KV tiles, which take turns where sums are in fp16 without a mask: decision 0069.
STRIPS: Final = 16


def _elements(spec: Spec, cut: Cut, sizes: Sizes) -> int:
    """Sums of dQ, then the statistics, for whole blocks of rows; then a ticket, turns with each
    block where tiles are counted, and a counter of each KV head whose sums are cleared ahead. In
    fp32, of which two sums in fp16 are one element: then blocks have exponents of scales, too.
    """
    heads = sizes.batch * HEADS.size(spec, sizes)
    blocks = heads * -(-sizes.q // cut.q)
    halves = sums_in_fp16(spec)
    width = int(spec["head_dim"]["qk"]) // (2 if halves else 1) + STATISTICS
    scales = EXPONENTS if halves else 0
    counted = spec["deterministic"] or _first_stores(spec)
    turns = turns_of(spec["arch"], *spec["head_dim"].values()) if counted else 0
    clears = clears_ahead(spec["arch"], spec["head_dim"]["qk"], counted=counted)
    counters = heads // int(spec["q_per_kv"]) if clears else 0
    return blocks * (cut.q * width + scales) + TICKETS + turns * blocks + counters


def _first_stores(spec: Spec) -> bool:
    fixed = (x if isinstance(x, int) else None for x in spec["seqlen"].values())
    halves = sums_in_fp16(spec)
    return first_stores(spec["arch"], *spec["head_dim"].values(), *fixed, halves=halves)


WORKSPACE: Final = Workspace(
    *("workspace", "fp32", (BATCH, SEQLEN_Q, HEADS), _elements),
    about="is the call's own until it is done, and holds nothing before and after it",
)


def splits_products(qk: int, v: int) -> bool:
    """Whether one warpgroup hands P to another one in 16 bits: dK and dV of 64 keys are too large
    for the registers of one. qk, v: head_dim.
    """
    return max(qk, v) > 128


def first_stores(
    arch: str, qk: int, v: int, q: int | None, kv: int | None, *, halves: bool
) -> bool:
    """Whether the first tile that comes to a block of rows stores its dQ, for which others wait,
    and the last one, which waits for all, writes it.

    Short heads are done sooner without zeros and a last kernel; in long ones the wait of each step
    costs more. qk, v: head_dim; q, kv: lengths that are fixed, else None. halves: sums in fp16.
    """
    if arch != "sm90" or q is None or kv is None or splits_products(qk, v):
        return False
    return max(q, kv) <= short_heads(qk, halves=halves)


def short_heads(qk: int, *, halves: bool) -> int:
    """Most rows of heads as `first_stores` has them."""
    return min(SHORT_HEADS[qk], SHORT_HEADS_OF_HALVES) if halves else SHORT_HEADS[qk]


def clears_ahead(arch: str, qk: int, *, counted: bool) -> bool:
    """Whether the main kernel writes the zeros to which it adds dQ of later heads.

    It is faster at head_dim 64 alone (decision 0067). qk: head_dim. counted: tiles take turns.
    """
    return arch == "sm90" and qk <= 64 and not counted


def kernels(spec: Spec) -> tuple[str, ...]:
    """Suffixes of the kernels of a call: statistics of rows, the gradients, dQ of its sums."""
    first = ("_stats", "")
    return first if _first_stores(spec) else (*first, "_finish")


def turns_of(arch: str, qk: int, v: int) -> int:
    """Turns of a block of rows, where sums have an order: one of all that add to it, or one of each
    CTA of a pair, which add columns of their own. qk, v: head_dim.
    """
    return 2 if arch == "sm90" and splits_products(qk, v) else 1


def sums_in_fp16(spec: Spec) -> bool:
    """Whether a SPEC sums dQ in fp16, of which SPECs without the field know nothing."""
    return bool(spec.get(DQ_SUMS, "fp32") == "fp16")


def strips_of(spec: Spec) -> int:
    """How many strips of a head's KV tiles take turns; 1 where tiles come in the order of keys."""
    masked, stores = bool(masks.of_spec(spec).edges), _first_stores(spec)
    return strips(halves=sums_in_fp16(spec), masked=masked, stores=stores)


def strips(*, halves: bool, masked: bool, stores: bool) -> int:
    """The same. halves: sums in fp16. stores: as `first_stores` says."""
    return STRIPS if halves and not masked and not stores else 1


def is_backward(spec: Spec) -> bool:
    """Whether a SPEC is of this operation."""
    return bool(spec.get("op") == BACKWARD_OP)


def forward_of(spec: Spec) -> dict[str, Any]:
    """The SPEC of the forward pass whose O and LSE a kernel is given."""
    own = {"deterministic", DQ_SUMS}
    kept = {name: x for name, x in spec.items() if name not in own}
    return {**kept, "op": FORWARD.name, "lse": True}


def defined_by(given: Given) -> dict[str, Any]:
    """Return what defines the results, as functions of `gradients` take it."""
    inputs = {x.name: given.inputs[x.name] for x in (Q, K, V, DOUT)}
    known = {"mask": masks.of_spec(given.spec), "cap": scores.of_spec(given.spec).cap}
    return {**inputs, "scale": given.scale, **known}


def _exact(given: Given, wanted: Array | None = None) -> dict[str, Array]:
    return gradients.gradients(**defined_by(given), wanted=wanted)._asdict()


def _truth(given: Given, wanted: Array | None = None) -> Truth:
    return gradients.truth(
        **defined_by(given),
        dtype=given.spec["dtype"],
        rounds_p=splits_products(**given.spec["head_dim"]),
        half_sums=sums_in_fp16(given.spec),
        strips=strips_of(given.spec),
        wanted=wanted,
    )


def _judge(
    given: Given,
    outputs: Mapping[str, Array],
    truth: Truth,
    tile: int,
    wanted: Array | None = None,
) -> dict[str, Verdict]:
    """Verdicts by output. wanted: rows of dQ; of dK and dV, KV heads of which some row is."""
    rows = dict.fromkeys(outputs, wanted)
    if wanted is not None:
        batch, _, heads = wanted.shape
        group = heads // outputs[DK.name].shape[2]
        of_heads = wanted.any(1).reshape(batch, 1, heads // group, group).any(-1)
        for name in (DK.name, DV.name):
            rows[name] = of_heads.repeat(outputs[name].shape[1], 1)
    return {
        name: judge_rows(name, x, getattr(truth, name), rows[name], alike=False)
        for name, x in outputs.items()
    }


def _flops(
    spec: Spec, sizes: Sizes, inputs: Mapping[str, Array] | None = None
) -> float:
    """2 * batch * heads * pairs * (3 d_qk + 2 d_v), half of the diagonal counted: `Mask.pairs`."""
    pairs = masks.of_spec(spec).pairs(Lengths(sizes.q, sizes.kv))
    per_pair = 3 * spec["head_dim"]["qk"] + 2 * spec["head_dim"]["v"]
    return float(2 * sizes.batch * HEADS.size(spec, sizes) * pairs * per_pair)


BACKWARD: Final = Operation(
    name=BACKWARD_OP,
    folder="backward",
    function=BACKWARD_OP,
    title="FMHA backward",
    noun="The gradient of attention",
    reads=(DOUT, Q, K, V, OUT, GIVEN_LSE),
    writes=(DQ, DK, DV),
    scalars=FORWARD.scalars,
    exact=_exact,
    truth=_truth,
    judge=_judge,
    flops=_flops,
    workspaces=(WORKSPACE,),
    kernels=kernels,
    unordered=lambda spec: (
        frozenset() if spec["deterministic"] else frozenset({DQ.name})
    ),
)
