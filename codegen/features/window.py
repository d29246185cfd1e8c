# SPDX-License-Identifier: Apache-2.0
"""A sliding window: how many keys before and behind its own place a query sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from ..errors import Violation
from ..ops.params import ARGUMENT
from .feature import Accepts, Block, Feature, Model, Relation

if TYPE_CHECKING:
    from ..spec.model import Spec

_NONE: Final = "none"
_MAX_KEYS: Final = 2**24  # no K is longer
_KEYS: Final = f"a whole number from 0 to {_MAX_KEYS}, {ARGUMENT} or none"
_WRITE: Final = (
    "write window: {left: N, right: N}: keys before and behind a query's own"
)

_Keys = Annotated[int, Field(ge=0, le=_MAX_KEYS)] | Literal["argument", "none"]


class Sides(Model):
    """Keys that a query sees beside that of its own place."""

    left: Annotated[_Keys, Accepts("keys before it", _KEYS, (int, str))] = "none"
    right: Annotated[_Keys, Accepts("keys behind it", _KEYS, (int, str))] = "none"


Window = Annotated[
    Sides,
    Block(
        "what a query sees of the keys around its place, q; none: all; argument: by window_left= or"
        " window_right= of a call",
        "a mapping with left and right",
        hint=_WRITE,
    ),
]


_IN_NAMES: Final[Mapping[int | str, int | str]] = {_NONE: "", ARGUMENT: "arg"}


def _token(spec: Spec) -> str:
    left, right = (_IN_NAMES.get(n, n) for n in _sides(spec).values())
    if spec.window == Sides():
        return ""
    return f"w{left}" if spec.mask == "causal" else f"w{left}x{right}"


def _title(spec: Spec) -> str:
    known = [f"{side} {n}" for side, n in _sides(spec).items() if n != _NONE]
    return f"window {', '.join(known)}" if known else ""


def _sides(spec: Spec) -> dict[str, int | str]:
    return {"left": spec.window.left, "right": spec.window.right}


def _refusals(spec: Spec) -> Iterator[Violation]:
    """A side that hides no key, because a fixed length is too short for it."""
    lengths = {"left": ("kv", spec.seqlen.kv), "right": ("q", spec.seqlen.q)}
    for side, keys in _sides(spec).items():
        axis, rows = lengths[side]
        if isinstance(keys, int) and isinstance(rows, int) and keys >= rows - 1:
            message = (
                f"window.{side}: {keys} hides no key, because seqlen.{axis} is {rows}: a query"
                f" has {rows - 1} keys on that side at most"
            )
            yield Violation("FG214", ("window", side), message, "leave it out")


WINDOW: Final = Feature(
    "window",
    tokens={r"w(\d+|arg|(\d*|arg)x(\d*|arg))": lambda spec: [_token(spec)]},
    keys={
        r"window_size|(window|local)(_size)?_(left|right)|local(_size)?|band": _WRITE,
        r"(sliding|attn|attention)_?window(_size)?|swa": (
            "write window: {left: N - 1} beside mask: causal, where N counts a query's own key"
        ),
    },
    refusals=_refusals,
    title=_title,
)
WINDOW_RIGHT: Final = Feature(
    "window.right",
    relations=[
        Relation(
            [_NONE],
            {"mask": ["causal"]},
            "FG214",
            "needs a mask without the atom kv <= q, which implies it",
            "leave window.right out, or set mask: none",
        )
    ],
)
