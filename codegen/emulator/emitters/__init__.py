# SPDX-License-Identifier: Apache-2.0
"""The Python of each PTX instruction: one emitter per opcode, in a table; a module per concept."""

from . import (  # noqa: F401  importing them fills the table
    arithmetic,
    atomics,
    barriers,
    bulk_copies,
    conversions,
    memory,
    tcgen05,
    warps,
    wgmma,
)
from .emitter import EMITTERS, Emitter, UnsupportedInstruction

__all__ = ["EMITTERS", "Emitter", "UnsupportedInstruction"]
