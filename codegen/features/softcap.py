# SPDX-License-Identifier: Apache-2.0
"""Scores that are held between -softcap and softcap by a hyperbolic tangent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from .bias import BIAS_DTYPES
from .e4m3 import E4M3
from .feature import Accepts, Feature, Relation

if TYPE_CHECKING:
    from ..spec.model import Spec

# With both, a cap, its inverse and its product with log2(e) are far within fp32.
_LEAST: Final = 0.001
_MOST: Final = 1_000_000

Softcap = Annotated[
    Annotated[float, Field(ge=_LEAST, le=_MOST)] | Literal["none"],
    Accepts(
        "scores are softcap * tanh(softmax_scale * QK^T / softcap), before the mask",
        f"none, or a number from {_LEAST} to {_MOST}",
        (int, float, str),
    ),
]


def cap_of(spec: Spec) -> float | None:
    """Return what scores are held between, on either side of 0; None where nothing holds them."""
    return None if spec.softcap == "none" else spec.softcap


def _number(spec: Spec) -> str:
    """The cap in the fewest digits; empty without one."""
    cap = cap_of(spec)
    if cap is None:
        return ""
    return str(int(cap)) if cap == int(cap) else repr(cap)


def _token(spec: Spec) -> list[str]:
    cap = _number(spec)
    return [f"cap{cap.replace('.', 'p')}" if cap else ""]


def _title(spec: Spec) -> str:
    cap = _number(spec)
    return f"softcap {cap}" if cap else ""


def _contract(spec: Spec) -> str:
    cap = _number(spec)
    if not cap:
        return ""
    return (
        f"Scores are s = {cap} * tanh(softmax_scale * QK^T / {cap}), before the mask."
    )


SOFTCAP: Final = Feature(
    "softcap",
    tokens={r"cap\d+(p\d+)?": _token},
    keys={
        r"(attn_)?(logits?_)?soft_?cap(ping)?|(attn_)?logits?_cap(ping)?": (
            "write softcap: N"
        ),
        r"final_logit_softcapping": (
            "leave it out: it is about the logits of a model's last layer, not attention's"
        ),
    },
    relations=[
        Relation(["none"], {"bias.dtype": BIAS_DTYPES}),
        Relation(["none"], {"dtype": [E4M3]}),
    ],
    flags=lambda spec: {"capped": cap_of(spec) is not None},
    title=_title,
    contract=_contract,
)
