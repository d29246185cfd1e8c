# SPDX-License-Identifier: Apache-2.0
"""First keys that all queries of a batch see beside what the mask shows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

from ..errors import Violation
from ..expressions.language import ExpressionError
from .e4m3 import E4M3
from .feature import Accepts, Feature, Relation
from .mask import keys_of
from .window import Sides

if TYPE_CHECKING:
    from ..spec.model import Spec

Prefix = Annotated[
    bool,
    Accepts("queries see the first keys of their batch, too; how many is an input"),
]


def _refusals(spec: Spec) -> Iterator[Violation]:
    """What makes the first keys and those of the mask two ranges."""
    if not spec.prefix:
        return
    beside = f"mask: {spec.mask}"
    if spec.window != Sides():
        beside = f"window: {{left: {spec.window.left}, right: {spec.window.right}}}"
    else:
        try:
            keys_of(spec)
        except ExpressionError:
            pass
        else:
            return
    message = (
        f"prefix: true is not generated for {beside}: a query sees two ranges of keys"
    )
    yield Violation("FG205", ("prefix",), message, "leave one of them out")


PREFIX: Final = Feature(
    "prefix",
    tokens={r"prefix": lambda spec: ["prefix" if spec.prefix else ""]},
    keys={
        r"prefix_?(lm|len(gth)?s?|causal|mask)": "write prefix: true beside mask: causal"
    },
    relations=[
        Relation(
            [False], {"mask": ["none"]}, "FG214", "hides no key", "set mask: causal"
        ),
        Relation([False], {"documents": [True]}),
        Relation([False], {"blocks": ["lists"]}),
        Relation([False], {"dtype": [E4M3]}),
    ],
    refusals=_refusals,
    title=lambda spec: "prefix" if spec.prefix else "",
)
