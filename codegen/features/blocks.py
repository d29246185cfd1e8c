# SPDX-License-Identifier: Apache-2.0
"""The KV blocks of a query tile: those that follow from the mask, or lists that a call passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from .e4m3 import E4M3
from .feature import Accepts, Feature, Relation
from .mask import keys_of

if TYPE_CHECKING:
    from ..spec.model import Spec

Blocks = Annotated[
    Literal["derived", "lists"],
    Accepts(
        "KV blocks of a query tile: derived from mask and lengths, or lists that a call passes"
    ),
]


def has_lists(spec: Spec) -> bool:
    """Whether a call says which KV blocks each query tile has."""
    return spec.blocks == "lists"


def _contract(spec: Spec) -> str:
    if not has_lists(spec):
        return ""
    lines = (
        "The lists are those of FlexAttention's BlockMask with BLOCK_SIZE=(TILE_Q, TILE_KV):",
        "the rows of a query tile see what the mask leaves of its partial blocks, and all of",
        "its full ones.",
    )
    empty = "" if keys_of(spec).edges else " A row that sees no key is 0."
    return "\n".join(lines) + empty


BLOCKS: Final = Feature(
    "blocks",
    tokens={r"lists?": lambda spec: ["lists" if has_lists(spec) else ""]},
    keys={
        r"block_(sparse|mask|lists?)|(kv_)?lists|sparsity|mask_mod": (
            "write blocks: lists, and the mask of partial blocks as mask; the lists are arguments"
            " of fmha() at run time"
        )
    },
    relations=[
        # A tile then has rows of several query heads, each of which may have lists of its own.
        Relation(["derived"], {"pack_gqa": [True]}),
        # CTAs that share loads or an MMA would have to have one list.
        Relation(["derived"], {"cluster": [[2, 1], [1, 2]]}),
        Relation(["derived"], {"dtype": [E4M3]}),
    ],
    flags=lambda spec: {"lists": has_lists(spec)},
    title=lambda spec: "block lists" if has_lists(spec) else "",
    contract=_contract,
)
