# SPDX-License-Identifier: Apache-2.0
"""`fmha_fwd`: O = softmax(scale Q K^T) V for each head, and the log-sum-exp of each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from . import lists, masks, params, reference, scores
from .compare import Verdict, judge_lse, judge_output
from .likeness import Inputs, ending
from .masks import Lengths, Mask
from .operation import (
    Array,
    Axis,
    Given,
    Number,
    Operation,
    Scalar,
    Sizes,
    Spec,
    Tensor,
)


def _length(side: str, spec: Spec) -> int | None:
    length = spec["seqlen"][side]
    return length if isinstance(length, int) else None


BATCH: Final = Axis("batch", "b", "b", lambda spec, sizes: sizes.batch)
HEADS: Final = Axis(
    "heads", "h", "h", lambda spec, sizes: sizes.kv_heads * int(spec["q_per_kv"])
)
HEADS_KV: Final = Axis(
    *("heads_kv", "g", "h", lambda spec, sizes: sizes.kv_heads),
    part_of="heads",
    ratio=lambda spec: int(spec["q_per_kv"]),
)
SEQLEN_Q: Final = Axis(
    *("seqlen_q", "s", "s", lambda spec, sizes: sizes.q),
    fixed=lambda spec: _length("q", spec),
)
SEQLEN_KV: Final = Axis(
    *("seqlen_kv", "t", "s", lambda spec, sizes: sizes.kv),
    fixed=lambda spec: _length("kv", spec),
    cached=True,
)
HEAD_DIM_QK: Final = Axis(
    *("head_dim_qk", "d", "d", lambda spec, sizes: int(spec["head_dim"]["qk"])),
    fixed=lambda spec: int(spec["head_dim"]["qk"]),
    constant=True,
)
HEAD_DIM_V: Final = Axis(
    *("head_dim_v", "e", "d", lambda spec, sizes: int(spec["head_dim"]["v"])),
    fixed=lambda spec: int(spec["head_dim"]["v"]),
    constant=True,
)


def _bias(spec: Spec) -> Mapping[str, Any]:
    """The bias of a SPEC; a whole one in bf16 where it has none."""
    whole = {"shape": ["b", "h", "q", "kv"], "dtype": "bf16"}
    return scores.bias_of(spec) or whole


def _axis_of_bias(name: str, number: int, axis: Axis) -> Axis:
    """An axis of the bias: as long as that of other tensors, or 1."""

    def of_bias(spec: Spec) -> int | None:
        return 1 if _bias(spec)["shape"][number] == 1 else None

    return Axis(
        *(name, axis.letter, "bhsd"[number]),
        lambda spec, sizes: of_bias(spec) or axis.size(spec, sizes),
        fixed=of_bias,
        part_of=axis.name,
        broadcast=True,
    )


BIAS_AXES: Final = (
    _axis_of_bias("bias_batch", 0, BATCH),
    _axis_of_bias("bias_heads", 1, HEADS),
    _axis_of_bias("bias_rows", 2, SEQLEN_Q),
    _axis_of_bias("bias_keys", 3, SEQLEN_KV),
)

Q: Final = Tensor("q", (BATCH, SEQLEN_Q, HEADS, HEAD_DIM_QK))
K: Final = Tensor("k", (BATCH, SEQLEN_KV, HEADS_KV, HEAD_DIM_QK))
V: Final = Tensor("v", (BATCH, SEQLEN_KV, HEADS_KV, HEAD_DIM_V))
OUT: Final = Tensor("out", (BATCH, SEQLEN_Q, HEADS, HEAD_DIM_V))
SINK: Final = Tensor(
    *("sink", (HEADS,), "fp32"),
    tma=False,
    words="natural log, not scaled",
    when="sink",
    about=lambda spec: "adds exp(sink) to the sum of exponentials of its head's rows",
)
SLOPES: Final = Tensor(
    *("slopes", (HEADS,), "fp32"),
    tma=False,
    words="natural log, per key",
    when="alibi",
    about=lambda spec: "multiplies kv - q in the scores of its head",
)
BIAS: Final = Tensor(
    *("bias", BIAS_AXES, lambda spec: str(_bias(spec)["dtype"])),
    words="not scaled",
    when="bias",
    about=lambda spec: "is added to scores; rows are 16 N bytes apart",
)
LSE: Final = Tensor(
    *("lse", (BATCH, HEADS, SEQLEN_Q), "fp32"),
    tma=False,
    words="natural log",
    when="lse",
    about=lambda spec: (
        f"receives log({'exp(sink) + ' * SINK.is_in(spec)}sum(exp({_said(spec)})))"
    ),
)
LISTS_BATCH: Final = Axis(
    *("lists_batch", "lb", "b", lambda spec, sizes: lists.shape(spec, sizes)[0]),
    told=lambda spec: "batch or 1",
)
LISTS_HEADS: Final = Axis(
    *("lists_heads", "lh", "h", lambda spec, sizes: lists.shape(spec, sizes)[1]),
    told=lambda spec: "heads or 1",
)
Q_TILES: Final = Axis(
    *("query_tiles", "lt", "t", lambda spec, sizes: lists.shape(spec, sizes)[2]),
    told=lambda spec: "query tiles",
)
KV_BLOCKS: Final = Axis(
    *("kv_blocks", "ln", "n", lambda spec, sizes: lists.shape(spec, sizes)[3]),
    told=lambda spec: "KV blocks",
)


def _list(name: str, *of_each: Axis) -> Tensor:
    axes = (LISTS_BATCH, LISTS_HEADS, Q_TILES, *of_each)
    return Tensor(name, axes, "int32", tma=False, when="blocks")


KV_NUM_BLOCKS: Final = _list("kv_num_blocks")
KV_INDICES: Final = _list("kv_indices", KV_BLOCKS)
FULL_KV_NUM_BLOCKS: Final = _list("full_kv_num_blocks")
FULL_KV_INDICES: Final = _list("full_kv_indices", KV_BLOCKS)
LISTS: Final = (KV_NUM_BLOCKS, KV_INDICES, FULL_KV_NUM_BLOCKS, FULL_KV_INDICES)


def defined_by(given: Given) -> dict[str, Any]:
    """Return what defines the results, as functions of `reference` take it."""
    spec = given.spec
    return {
        **{x.name: given.inputs[x.name] for x in (Q, K, V)},
        "sink": given.inputs.get(SINK.name),
        "scale": given.scale,
        "mask": mask_of(given),
        "score": scores.of_spec(spec),
        "tensors": given.inputs,
        "lists": _lists(given),
    }


def _exact(given: Given, wanted: Array | None = None) -> dict[str, Array]:
    found = reference.attention(**defined_by(given), wanted=wanted)
    return {OUT.name: found.out, LSE.name: found.lse}


_AXES: Final = {"b": BATCH, "h": HEADS, "h_kv": HEADS_KV, "row": SEQLEN_Q}


def _params(spec: Spec) -> list[Tensor]:
    """The tensors that expressions read."""
    return [_tensor(x) for x in params.declared(spec) if x.axes]


@cache
def _tensor(x: params.Declared) -> Tensor:
    return Tensor(
        *(x.name, tuple(_AXES[axis] for axis in x.axes), x.dtype),
        tma=False,
        words="rises with the query" if x.monotone else "",
        when=x.field,
        about=lambda spec: x.about,
    )


def _numbers(spec: Spec) -> list[Number]:
    """The numbers that expressions read, those in fp32 first."""
    found = [
        Number(x.name, x.dtype, *x.range, x.about)
        for x in params.declared(spec)
        if not x.axes
    ]
    return sorted(found, key=lambda x: x.dtype != "fp32")


def mask_of(given: Given) -> Mask:
    """The mask of a call."""
    mask = masks.of_spec(given.spec)
    return mask.given({name: _numpy(given.inputs[name]) for name in mask.params})


def _said(spec: Spec) -> str:
    return "scores" if {"score", "alibi"} & spec.keys() else "scaled scores"


def _truth(given: Given, wanted: Array | None = None) -> reference.Truth:
    return reference.truth(
        **defined_by(given),
        dtype=given.spec["dtype"],
        exp_error=_exp_error(given.spec),
        wanted=wanted,
    )


def _exp_error(spec: Mapping[str, Any]) -> float:
    """Of exp2, where a kernel takes some of them from a polynomial."""
    has_polynomial = spec["arch"] == "sm100" or spec.get("softcap") is not None
    return reference.POLYNOMIAL_ERROR if has_polynomial else 0.0


def _lists(given: Given) -> lists.Lists | None:
    """What a call passes."""
    there = {x.name: x for x in LISTS if x.is_in(given.spec)}
    tensors = {name: _numpy(given.inputs[name]).astype(int) for name in there}
    return lists.of_tensors(given.spec, tensors)


def _judge(
    given: Given,
    outputs: Mapping[str, Array],
    truth: reference.Truth,
    tile: int,
    wanted: Array | None = None,
) -> dict[str, Verdict]:
    """Verdicts by output; a finding about a row of O ends with what the row is like."""
    out = outputs[OUT.name]
    verdict = judge_output(out, truth, wanted)
    # With lists a row's keys are no range, which is all that likenesses know.
    if verdict.row is not None and not KV_INDICES.is_in(given.spec):
        q, k, v = (_numpy(given.inputs[x.name]) for x in (Q, K, V))
        mask, score = mask_of(given), scores.of_spec(given.spec)
        sink = given.inputs.get(SINK.name)
        inputs = Inputs(
            *(q, k, v, given.scale, mask, tile, score),
            sink=None if sink is None else _numpy(sink),
            tensors={name: _numpy(given.inputs[name]) for name in score.tensors},
        )
        arrays = map(_numpy, (out, truth.out, truth.out_bound))
        found, right, bound = arrays
        likeness = ending(verdict.row, found, inputs, right, bound)
        verdict = replace(verdict, finding=verdict.finding + likeness)
    verdicts = {OUT.name: verdict}
    if (lse := outputs.get(LSE.name)) is not None:
        of_lse = None if wanted is None else wanted.swapaxes(1, 2)
        verdicts[LSE.name] = judge_lse(lse, truth, of_lse)
    return verdicts


def _numpy(x: Array) -> NDArray[Any]:
    return x.double().cpu().numpy() if hasattr(x, "cpu") else np.asarray(x)


def _flops(
    spec: Spec, sizes: Sizes, inputs: Mapping[str, Array] | None = None
) -> float:
    """2 * batch * heads * pairs * (d_qk + d_v), half of the diagonal counted: `Mask.pairs`.

    inputs: of the call, where the mask reads some; without them it counts as if all keys were seen.
    """
    mask, lengths = masks.of_spec(spec), Lengths(sizes.q, sizes.kv)
    heads, group = HEADS.size(spec, sizes), int(spec["q_per_kv"])
    of_case = lists.of_case(spec, sizes)
    if of_case is not None:  # on average, of those that batches and heads share
        pairs = sizes.batch * heads * float(of_case.pairs(mask, lengths).mean())
    elif not mask.params:
        pairs = sizes.batch * heads * mask.pairs(lengths)
    elif inputs is None:
        pairs = float(sizes.batch * heads * sizes.q * sizes.kv)
    else:
        known = mask.given({name: _numpy(inputs[name]) for name in mask.params})
        several = heads if mask.reads("h", "h_kv") else 1
        pairs = sum(
            known.at(b, h, h // group).pairs(lengths)
            for b in range(sizes.batch)
            for h in range(several)
        ) * (heads // several)
    return float(2 * pairs * sum(spec["head_dim"].values()))


FORWARD: Final = Operation(
    name="fmha_fwd",
    folder="forward",
    function="fmha",
    title="FMHA forward",
    noun="Attention",
    reads=(Q, K, V, SINK, SLOPES, BIAS, *LISTS),
    writes=(OUT, LSE),
    scalars=(
        Scalar(
            *("softmax_scale", "1 / sqrt(head_dim)"),
            value=lambda spec: float(spec["head_dim"]["qk"] ** -0.5),
        ),
    ),
    exact=_exact,
    truth=_truth,
    judge=_judge,
    flops=_flops,
    indices=lists.draw,
    params=_params,
    numbers=_numbers,
)
