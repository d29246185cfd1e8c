# SPDX-License-Identifier: Apache-2.0
"""The backward pass: what of a spec it takes, all in one place, and the fields that are its own.

What it does not take is refused by name, whatever the forward pass makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

from ..errors import Violation
from ..ops.backward import BACKWARD_OP, splits_products
from ..ops.forward import FORWARD
from ..ops.params import ARGUMENT
from .feature import Accepts, Feature, Relation

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

TAKES: Final[Mapping[str, Sequence[Any]]] = {
    "arch": ["sm90"],
    "dtype": ["bf16", "fp16"],
    "head_dim": [64, 96, 128, 256, {"qk": 192, "v": 128}],
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
    "tile.q": [None, 64, 128],
    "tile.kv": [None, 64, 128],
    "stages.v": [None],
}
"""By field, all values that op: fmha_bwd goes with; of the fields that are not here, any."""


def _refusals(spec: Spec) -> Iterator[Violation]:
    """A side of a window that a call says, and a KV tile of another size than its head_dim's."""
    for side in ("left", "right"):
        if is_backward(spec) and getattr(spec.window, side) == ARGUMENT:
            message = (
                f"window.{side}: {ARGUMENT} is not generated for op: {BACKWARD_OP}"
            )
            hint = f"set window.{side} to a number, or leave it out"
            yield Violation("FG205", ("window", side), message, hint)
    if is_backward(spec) and spec.tile.kv not in (None, rows := tile_kv(spec)):
        message = f"tile.kv: {spec.tile.kv} is not generated at this head_dim"
        yield Violation("FG205", ("tile", "kv"), message, f"set tile.kv: {rows}")


TAKEN: Final = (
    *(
        Feature(path, relations=[Relation(values, {"op": [BACKWARD_OP]})])
        for path, values in TAKES.items()
    ),
    Feature("op", refusals=_refusals),
)


def splits(spec: Spec) -> bool:
    """See `splits_products`."""
    return splits_products(spec.head_dim.qk, spec.head_dim.v)


def tile_kv(spec: Spec) -> int:
    """Keys of a KV tile: of each of two warpgroups, or of both where they split the products."""
    return 64 if splits(spec) else 128


def is_backward(spec: Spec) -> bool:
    """Return whether a spec is of the backward pass."""
    return spec.op == BACKWARD_OP
