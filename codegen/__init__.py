# SPDX-License-Identifier: Apache-2.0
"""fmha-gen: YAML specs in, standalone CuTe DSL attention kernels and their evidence out."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["document_ends", "document_ids", "document_starts", "permute_v"]


def __getattr__(name: str) -> Any:
    """What `__all__` names; it brings NumPy, which most commands do without at first."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    module = ".ops.e4m3" if name == "permute_v" else ".ops.documents"
    return getattr(importlib.import_module(module, __name__), name)
