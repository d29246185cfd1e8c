# SPDX-License-Identifier: Apache-2.0
"""Sequences that hold several documents: a query sees the keys of its own."""

from __future__ import annotations

from typing import Annotated, Final

from .e4m3 import E4M3
from .feature import Accepts, Feature, Relation

Documents = Annotated[
    bool,
    Accepts(
        "a query sees no key of another document than its own; where these begin is an input"
    ),
]
DOCUMENTS: Final = Feature(
    "documents",
    tokens={r"docs": lambda spec: ["docs" if spec.documents else ""]},
    keys={
        r"(document|doc|sequence|seq|segment)_?(mask(ing)?|ids?)?s?|packed_sequences?": (
            "write documents: true; fmha_gen.document_starts makes its input of ids"
        )
    },
    relations=[
        Relation([False], {"blocks": ["lists"]}),
        Relation([False], {"dtype": [E4M3]}),
    ],
    title=lambda spec: "documents" if spec.documents else "",
)
