# SPDX-License-Identifier: Apache-2.0
"""The scores that count."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from ..ops import masks
from .feature import Accepts, Feature
from .vocabulary import NOT_YET

Mask = Annotated[
    Literal["none", "causal"],
    Accepts(
        "causal: query i sees key j when j <= i + seqlen_kv - seqlen_q",
        words={
            r".*(window|swa|local|band).*": f"a sliding window is {NOT_YET}",
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


def _flags(mask: masks.Mask) -> dict[str, bool]:
    return {
        "edges": mask.edges,
        "left_edge": mask.left is not None,
        "right_edge": mask.right is not None,
        "right_offset": bool(mask.right),
        "lpt_order": mask.uneven,
    }


def _contract(keys: str) -> str:
    if not keys:
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
    flags=lambda spec: _flags(masks.MASKS[spec.mask]),
    title=lambda spec: "causal" if spec.mask == "causal" else "full mask",
    contract=lambda spec: _contract(str(masks.MASKS[spec.mask])),
)
