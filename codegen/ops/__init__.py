# SPDX-License-Identifier: Apache-2.0
"""Operations: one file each, found by the `op` of a SPEC."""

from __future__ import annotations

from typing import Final

from .backward import BACKWARD
from .e4m3 import (
    E4M3_FORWARD,
    OF_BLOCKS,
    OF_PERMUTED,
    OF_PERMUTED_BLOCKS,
    PACKED_E4M3,
    PAGED_E4M3,
    has_block_factors,
    is_e4m3,
    is_permuted,
)
from .forward import FORWARD
from .operation import Operation, Spec
from .paged import PAGED_FORWARD, is_paged
from .varlen import PACKED_FORWARD, is_packed

OPERATIONS: Final = {each.name: each for each in (FORWARD, BACKWARD)}
FUNCTIONS: Final = frozenset(each.function for each in OPERATIONS.values())
# Public functions of generated files beside these.
HELPERS: Final = frozenset(
    each.size for operation in OPERATIONS.values() for each in operation.workspaces
)


def operation_of(spec: Spec) -> Operation:
    """Return the operation of a SPEC; raises KeyError for one that is not generated."""
    operation = OPERATIONS[spec["op"]]
    in_8_bits = is_e4m3(spec)
    if is_paged(spec):
        return PAGED_E4M3 if in_8_bits else PAGED_FORWARD
    if is_packed(spec):
        return PACKED_E4M3 if in_8_bits else PACKED_FORWARD
    if in_8_bits:
        if has_block_factors(spec):
            return OF_PERMUTED_BLOCKS if is_permuted(spec) else OF_BLOCKS
        return OF_PERMUTED if is_permuted(spec) else E4M3_FORWARD
    return operation
