# SPDX-License-Identifier: Apache-2.0
"""Chunks of a sequence: a word for the expression of a mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field

from ..errors import Violation
from .feature import Accepts, Feature, Relation

if TYPE_CHECKING:
    from ..spec.model import Spec

_MOST: Final = 2**24  # no K is longer
_TEXT: Final = "kv <= q and kv // {0} == q // {0}"

Chunk = Annotated[
    Annotated[int, Field(ge=1, le=_MOST)] | Literal["none"],
    Accepts(
        "beside mask: causal, the same as mask: 'kv <= q and kv // N == q // N'",
        f"none, or a whole number from 1 to {_MOST}",
        (int, str),
    ),
]


def spelt_out(data: Any) -> Any:
    """Return the data of a spec with the expression for the word, so that both have one digest."""
    if not isinstance(data, dict) or data.get("mask") != "causal":
        return data
    chunk = data.get("chunk")
    if type(chunk) is not int or not 1 <= chunk <= _MOST:
        return data
    others = {name: said for name, said in data.items() if name != "chunk"}
    return {**others, "mask": _TEXT.format(chunk)}


def _tokens(spec: Spec) -> list[str]:
    size = spec.mask.rpartition(" ")[2]
    return [f"chunk{size}" if spec.mask == _TEXT.format(size) else ""]


def _refusals(spec: Spec) -> Iterator[Violation]:
    """Beside another mask than causal, with which it is spelt out, it says nothing."""
    if spec.chunk != "none" and spec.mask != "none":
        message = f"chunk: {spec.chunk} needs mask: causal, but mask is {spec.mask}"
        yield Violation("FG205", ("chunk",), message, "write it into the expression")


CHUNK: Final = Feature(
    "chunk",
    tokens={r"chunk\d+": _tokens},
    keys={
        r"(attention_)?chunk_size|chunked(_attention)?": "write chunk: N beside mask: causal"
    },
    relations=[
        Relation(
            ["none"],
            {"mask": ["none"]},
            "FG205",
            "needs mask: causal",
            "set mask: causal, or write the expression",
        )
    ],
    refusals=_refusals,
)
