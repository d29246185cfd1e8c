# SPDX-License-Identifier: Apache-2.0
"""An operation that nothing generates: it has what `fmha_fwd` has not, and none of its names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fmha_gen.ops.forward import (
    BATCH,
    FORWARD,
    HEAD_DIM_QK,
    HEAD_DIM_V,
    HEADS,
    HEADS_KV,
    SEQLEN_KV,
    SEQLEN_Q,
)
from fmha_gen.ops.operation import Axis, Scalar, Tensor

PAGES = Axis("pages", "p", "p", lambda spec, sizes: -(-sizes.kv // 16))
MADE_UP = replace(
    FORWARD,
    name="made_up",
    function="turn",
    title="Turning",
    noun="A turn",
    reads=(
        Tensor("x", (BATCH, SEQLEN_Q, HEADS, HEAD_DIM_QK)),
        Tensor("y", (BATCH, SEQLEN_KV, HEADS_KV, HEAD_DIM_V)),
        Tensor("table", (BATCH, PAGES), "int32", tma=False, when="paged"),
    ),
    writes=(
        Tensor("dy", (BATCH, SEQLEN_KV, HEADS_KV, HEAD_DIM_V), words="of y"),
        Tensor(
            "sums", (HEADS,), "fp32", tma=False, about=lambda spec: "receives the sums"
        ),
    ),
    scalars=(Scalar("factor", "1", lambda spec: 1.0),),
)


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "op": "made_up",
        "arch": "sm90",
        "dtype": "fp16",
        "head_dim": {"qk": 64, "v": 32},
        "seqlen": {"q": 48, "kv": "dynamic"},
        "q_per_kv": 2,
        "paged": True,
        **changes,
    }
