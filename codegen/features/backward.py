# SPDX-License-Identifier: Apache-2.0
"""The backward pass: what of a spec it takes, all in one place, and the fields that are its own.

What it does not take is refused by name, whatever the forward pass makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from ..errors import Violation
from ..ops.backward import BACKWARD_OP, splits_products
from ..ops.forward import FORWARD
from ..ops.params import ARGUMENT
from .feature import Accepts, Feature, Relation, said

if TYPE_CHECKING:
    from ..spec.model import Spec

Deterministic = Annotated[
    bool,
    Accepts(
        "of fmha_bwd: dQ is summed in a fixed order, so that the same inputs give the same bits"
    ),
]
DETERMINISTIC: Final = Feature(
    "deterministic",
    tokens={r"det": lambda spec: ["det" if spec.deterministic else ""]},
    keys={
        r"(is_|use_)?deterministic(_mode)?|reproducible": "write deterministic: true"
    },
    relations=[
        Relation(
            [False],
            {"op": [FORWARD.name]},
            hint="leave it out: the same inputs give the same bits",
        )
    ],
    title=lambda spec: "deterministic" if spec.deterministic else "",
)

DqSums = Annotated[
    Literal["fp32", "fp16"],
    Accepts(
        "of fmha_bwd: what dQ is summed in, tile by tile: fp16 is faster, and less exact"
    ),
]
_OF_HALVES: Final = (
    "dQ is summed in fp16. P and dS of a KV head are scaled by 2^x for it, which samples of rows of"
    "\ndO, K and V say; dQ of a block whose dO is much longer or shorter has a factor besides."
    "\nWhere rows of K and V are longer than the samples by far, dQ may be inf or NaN."
)
DQ_SUMS: Final = Feature(
    "dq_sums",
    tokens={r"dq16": lambda spec: ["dq16" if spec.dq_sums == "fp16" else ""]},
    keys={r"dq_accum(_dtype|ulator)?|dq_acc(_dtype)?": "write dq_sums: fp16"},
    relations=[
        Relation(["fp32"], {"op": [FORWARD.name]}, hint="it has no dQ: leave it out"),
        Relation(["fp32"], {"arch": ["sm100"]}),
        Relation(
            ["fp32"],
            {"dtype": ["fp16", "e4m3"]},
            hint="leave it out: P in fp16 has no room for a scale",
        ),
        Relation(["fp32"], {"head_dim": [256, {"qk": 192, "v": 128}]}),
    ],
    title=lambda spec: "dQ summed in fp16" if spec.dq_sums == "fp16" else "",
    contract=lambda spec: _OF_HALVES if spec.dq_sums == "fp16" else "",
)

HEAD_DIMS: Final[Mapping[int, Sequence[Any]]] = {
    128: [64, 96, 128],
    64: [256, {"qk": 192, "v": 128}],
}
"""By keys of a KV tile: its head_dims. Warpgroups halve the tile's keys, or split the products."""

TAKES: Final[Mapping[str, Sequence[Any]]] = {
    "dtype": ["bf16", "fp16"],
    "head_dim": [each for head_dims in HEAD_DIMS.values() for each in head_dims],
    "batch": ["dense"],
    "kv.paged.page": ["none"],
    "mask": ["none", "causal"],
    "chunk": ["none"],
    "documents": [False],
    "prefix": [False],
    "blocks": ["derived"],
    "score": ["none"],
    "alibi": [False],
    "bias.dtype": ["none"],
    "sink": [False],
    "lse": [False],
    "pack_gqa": [False],
    "cluster": [[1, 1]],
    "multicast": ["none"],
    "schedule": ["persistent"],
    "tile.q": [None, 64, 128],
    "stages.v": [None],
}
"""By field, all values that op: fmha_bwd goes with; of the fields that are not here, any."""

ON_SM100: Final = {"op": [BACKWARD_OP], "arch": ["sm100"]}
TAKES_ON_SM100: Final[Mapping[str, Sequence[Any]]] = {
    "head_dim": [64, 128],
    "tile.q": [None, 128],
}


def _refusals(spec: Spec) -> Iterator[Violation]:
    """A side of a window that a call says."""
    for side in ("left", "right"):
        if is_backward(spec) and getattr(spec.window, side) == ARGUMENT:
            message = (
                f"window.{side}: {ARGUMENT} is not generated for op: {BACKWARD_OP}"
            )
            hint = f"set window.{side} to a number, or leave it out"
            yield Violation("FG205", ("window", side), message, hint)


TAKEN: Final = (
    *(
        Feature(path, relations=[Relation(values, {"op": [BACKWARD_OP]})])
        for path, values in TAKES.items()
    ),
    *(
        Feature(
            "tile.kv",
            relations=[
                Relation([None, rows], {"op": [BACKWARD_OP], "head_dim": head_dims})
            ],
        )
        for rows, head_dims in HEAD_DIMS.items()
    ),
    *(
        Feature(path, relations=[Relation(values, ON_SM100)])
        for path, values in TAKES_ON_SM100.items()
    ),
    Feature("window", refusals=_refusals),
)


def splits(spec: Spec) -> bool:
    """See `splits_products`."""
    return splits_products(spec.head_dim.qk, spec.head_dim.v)


def tile_kv(spec: Spec) -> int:
    """Keys of a KV tile: see `HEAD_DIMS`."""
    head_dim = said(spec, "head_dim")
    return next(rows for rows, taken in HEAD_DIMS.items() if head_dim in taken)


def is_backward(spec: Spec) -> bool:
    """Return whether a spec is of the backward pass."""
    return spec.op == BACKWARD_OP
