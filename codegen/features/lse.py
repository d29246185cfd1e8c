# SPDX-License-Identifier: Apache-2.0
"""The log-sum-exp of each row, as a second output."""

from __future__ import annotations

from typing import Annotated, Final

from .feature import Accepts, Feature

Lse = Annotated[bool, Accepts("also write log-sum-exp: fp32, natural logarithm")]
LSE: Final = Feature(
    "lse",
    tokens={r"lse|nolse": lambda spec: ["lse" if spec.lse else "nolse"]},
    keys={r"(return_|with_)?(softmax_)?lse|logsumexp": "write lse: true"},
    flags=lambda spec: {"lse": spec.lse},
)
