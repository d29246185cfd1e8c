# SPDX-License-Identifier: Apache-2.0
"""A tensor that is added to the scores, whole or broadcast along some of its axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BeforeValidator

from ..errors import Violation
from .e4m3 import E4M3
from .feature import Accepts, Block, Feature, Model, Relation

if TYPE_CHECKING:
    from ..spec.model import Spec

_WRITE: Final = (
    "write bias: {shape: [1, h, q, kv], dtype: bf16}; the tensor is an argument of fmha()"
)
_DTYPES: Final = "none, bf16, fp16 or fp32"

_Dtype = Literal["none", "bf16", "fp16", "fp32"]
BIAS_DTYPES: Final = ("bf16", "fp16", "fp32")
"""What `bias.dtype` is where there is a bias."""
_Shape = tuple[Literal["b", 1], Literal["h", 1], Literal["q", 1], Literal["kv"]]


def _from_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class Addend(Model):
    """The tensor's axes, 1 for those that it is broadcast along, and its element type."""

    shape: Annotated[
        _Shape,
        BeforeValidator(_from_list),
        Accepts(
            "its axes; 1: the same values along it",
            "[b, h, q, kv], or with 1 in place of b, h or q",
            (list, tuple),
        ),
    ] = ("b", "h", "q", "kv")
    dtype: Annotated[_Dtype, Accepts("its elements; none: no bias", _DTYPES)] = "none"

    def said(self) -> Any:
        """Return the element type alone where the tensor is not broadcast."""
        whole = Addend(dtype=self.dtype)
        return self.dtype if self == whole else super().said()


Bias = Annotated[
    Addend,
    Block(
        "a tensor added to softmax_scale * QK^T, before the mask",
        f"{_DTYPES}, or a mapping with shape and dtype",
        (str,),
        expand=lambda dtype: {"dtype": dtype},
        short=_Dtype,
        hint=_WRITE,
    ),
]


def has_bias(spec: Spec) -> bool:
    """Return whether a tensor is added to the scores."""
    return spec.bias.dtype != "none"


def _refusals(spec: Spec) -> Iterator[Violation]:
    if spec.bias != Addend() and not has_bias(spec):
        yield Violation(
            "FG205",
            ("bias",),
            "bias.shape: is given, but bias.dtype is none",
            "set bias.dtype: bf16, fp16 or fp32",
        )


def _title(spec: Spec) -> str:
    return f"{spec.bias.dtype} bias" if has_bias(spec) else ""


BIAS: Final = Feature(
    "bias",
    tokens={r"bias": lambda spec: ["bias" if has_bias(spec) else ""]},
    keys={
        r"(attn_|attention_|score_|rel(ative)?_(pos(ition)?_)?|pair_|additive_)?(bias(es)?)"
        r"|(attn|attention|additive|float|key_padding)_mask": _WRITE,
    },
    refusals=_refusals,
    flags=lambda spec: {
        "bias": has_bias(spec),
        "bias_bf16": spec.bias.dtype == "bf16",
        "bias_fp16": spec.bias.dtype == "fp16",
        "bias_of_batches": spec.bias.shape[0] != 1,
        "bias_of_heads": spec.bias.shape[1] != 1,
        "bias_of_rows": spec.bias.shape[2] != 1,
    },
    title=_title,
    contract=lambda spec: (
        "Scores are s = softmax_scale * QK^T + bias, before the mask."
        if has_bias(spec)
        else ""
    ),
)
BIAS_DTYPE: Final = Feature(
    "bias.dtype",
    relations=[
        Relation(["none"], {"pack_gqa": [True]}),
        # Its blocks are loaded from the last one down.
        Relation(["none"], {"blocks": ["lists"]}),
        Relation(["none"], {"dtype": [E4M3]}),
    ],
)
