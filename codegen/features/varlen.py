# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: the rows of all batches side by side, and where each sequence begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final, Literal

from ..errors import Violation
from ..expressions.language import names_in
from .bias import has_bias
from .feature import Accepts, Feature, Relation
from .paged import page_of
from .problem import DYNAMIC
from .score import score_of

if TYPE_CHECKING:
    from ..spec.model import Spec

Batch = Annotated[
    Literal["dense", "varlen"],
    Accepts(
        "dense: sequences of one length; varlen: packed sequences, of which cu_seqlens_q and"
        " cu_seqlens_k of a call say where each begins"
    ),
]

_WRITE: Final = (
    "write batch: varlen; cu_seqlens_q and cu_seqlens_k are arguments of fmha()"
)


def is_packed(spec: Spec) -> bool:
    """Return whether the rows of all sequences lie side by side."""
    return spec.batch == "varlen"


def _refusals(spec: Spec) -> Iterator[Violation]:
    """What would need the number of a sequence, or inputs by batch, in a kernel or its tests."""
    if not is_packed(spec):
        return
    beside = "is not generated for batch: varlen"
    for side in ("q", "kv"):
        length = getattr(spec.seqlen, side)
        if length != DYNAMIC:
            message = f"seqlen.{side}: {length} {beside}, whose lengths are inputs"
            yield Violation("FG205", ("seqlen", side), message, "leave it out")
    for name in spec.params:
        message = f"params: {name} {beside}"
        yield Violation("FG205", ("params", name), message, "leave one of them out")
    if "argument" in (spec.window.left, spec.window.right):
        message = f"window: an argument of a call {beside}"
        yield Violation("FG205", ("window",), message, "write its keys in the spec")
    if not has_bias(spec) and "b" in names_in(score_of(spec).tree):
        message = f"score: {spec.score} {beside}: it reads b"
        yield Violation("FG205", ("score",), message, "leave b out")


BATCH: Final = Feature(
    "batch",
    tokens={r"varlen": lambda spec: ["varlen" if is_packed(spec) else ""]},
    keys={
        r"var_?len(gth)?s?|packed|ragged|thd|unpad(ded)?|cu_seq_?lens?(_q|_kv?)?": _WRITE
    },
    relations=[
        # How many work tiles there are, the host cannot tell.
        Relation(["dense"], {"schedule": ["single"]}),
        # CTAs of a cluster would have to have tiles of one sequence.
        Relation(["dense"], {"cluster": [[2, 1], [1, 2]]}),
        # Inputs along a batch or a row, of which a call has one length each.
        Relation(["dense"], {"blocks": ["lists"]}),
        Relation(["dense"], {"documents": [True]}),
        Relation(["dense"], {"prefix": [True]}),
        Relation(["dense"], {"bias.dtype": ["bf16", "fp16", "fp32"]}),
    ],
    refusals=_refusals,
    flags=lambda spec: {"varlen": is_packed(spec)},
    title=lambda spec: "packed sequences" if is_packed(spec) else "",
    contract=lambda spec: (
        "Sequence i has the rows from cu_seqlens_q[i] on, before cu_seqlens_q[i + 1], and the\n"
        "keys of cu_seqlens_k alike; positions count from its first, and it sees no other's keys.\n"
        "Rows of no sequence are neither read nor written."
        if is_packed(spec) and page_of(spec) is None
        else ""
    ),
)
