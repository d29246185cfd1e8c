# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: a learned logit of each query head in the denominator of its softmax."""

from __future__ import annotations

from typing import Annotated, Final

from .e4m3 import E4M3
from .feature import Accepts, Feature, Relation

Sink = Annotated[
    bool, Accepts("one learned logit per query head in the softmax's denominator")
]
SINK: Final = Feature(
    "sink",
    tokens={r"sinks?": lambda spec: ["sink" if spec.sink else ""]},
    keys={
        r"(with_|has_|use_|attention_|attn_|learnable_)?sinks?|s_aux": (
            "write sink: true; the logits are an argument of fmha() at run time"
        )
    },
    relations=[Relation([False], {"dtype": [E4M3]})],
    flags=lambda spec: {"sink": spec.sink},
    title=lambda spec: "sinks" if spec.sink else "",
    contract=lambda spec: (
        "A row's weights are exp(score) / (exp(sink of its head) + sum(exp(scores)))."
        if spec.sink
        else ""
    ),
)
