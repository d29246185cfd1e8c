# SPDX-License-Identifier: Apache-2.0
"""Mutants that nothing shows to be wrong, and why that is right."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Accepted:
    """Survivors of some kernels. kernels, name: patterns of the whole name."""

    kernels: str
    kind: Literal["ptx", "source"]
    name: str
    verdict: Literal["equivalent", "not modelled"]
    reason: str

    def covers(self, kernel: str, kind: str, name: str) -> bool:
        """Whether this is one of them."""
        return (
            kind == self.kind
            and re.fullmatch(self.kernels, kernel) is not None
            and re.fullmatch(self.name, name) is not None
        )


ACCEPTED: tuple[Accepted, ...] = ()


def reason(kernel: str, kind: str, name: str) -> Accepted | None:
    """Why a mutant may survive; None when it must be noticed."""
    return next((a for a in ACCEPTED if a.covers(kernel, kind, name)), None)
