# SPDX-License-Identifier: Apache-2.0
"""The scores that count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from ..ops import masks
from .feature import Accepts, Feature
from .vocabulary import NOT_YET

if TYPE_CHECKING:
    from ..spec.model import Spec

Mask = Annotated[
    Literal["none", "causal"],
    Accepts(
        "causal: query i sees key j when j <= i + seqlen_kv - seqlen_q",
        words={
            r".*(window|swa|local|band).*": "write window: {left: N, right: N} beside the mask",
            r".*alibi.*": f"ALiBi is {NOT_YET}",
            r".*(prefix|document|block|chunk|sparse|custom|bias|tree).*": (
                f"such a mask is {NOT_YET}"
            ),
            r"full|false|no|off|dense|noncausal|bidirectional": "write none",
            r"(causal_)?(bottom_?right|lower_?right)|true|tril": (
                "write causal, which is aligned at the bottom right"
            ),
            r"(causal_)?(top_?left|upper_?left)": (
                "causal is aligned at the bottom right, and no mask at the top left"
            ),
        },
    ),
]


def keys_of(spec: Spec) -> masks.Mask:
    """Return which keys a query sees, by all fields that have a say in it."""
    return masks.of_spec(spec.model_dump(mode="json"))


def _flags(spec: Spec) -> dict[str, bool]:
    mask = keys_of(spec)
    return {
        "edges": mask.edges,
        "left_edge": mask.left is not None,
        "right_edge": mask.right is not None,
        "right_offset": bool(mask.right),
        "lpt_order": mask.uneven,
    }


def _title(spec: Spec) -> str:
    if spec.mask == "causal":
        return "causal"
    return "" if keys_of(spec).edges else "full mask"


def _contract(spec: Spec) -> str:
    if not (keys := str(keys_of(spec))):
        return ""
    seen = f"Query i, at q = i + seqlen_kv - seqlen_q, sees {keys}."
    return f"{seen} A row that sees no key is 0."


MASK: Final = Feature(
    "mask",
    tokens={
        r"causal|full": lambda spec: ["causal" if spec.mask == "causal" else "full"]
    },
    keys={
        r"(is_)?causal": "write mask: causal",
        r"block_sparse|block_mask|mask_mod": f"masks but causal are {NOT_YET}",
    },
    flags=_flags,
    title=_title,
    contract=_contract,
)
