# SPDX-License-Identifier: Apache-2.0
"""Hopper (sm_90a) facts that the plan stands on.

Sources: CUDA C++ Programming Guide, compute capabilities 9.0; PTX ISA, wgmma and setmaxnreg; the
register splits are those under which ptxas 12.9 compiles our kernels without a spill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from .architecture import SASS_CLASSES, Architecture, RoleLoop

SMEM_BYTES: Final = 232448  # dynamic shared memory one CTA can have: 227 KiB
SMEM_ALIGN: Final = 1024  # [bytes] of a 128-byte-swizzled tile
WARPGROUP_ROWS: Final = 64  # M of a wgmma
# Those of templates/sm90/forward/constants.py.j2 that formulas of the plan read.
CONSTANTS: Final = {
    "WARPGROUP_THREADS": 128,
    "WARPGROUP_WARPS": 4,
    "WARPGROUP_ROWS": WARPGROUP_ROWS,
    "ELEMENT_BYTES": 2,  # or 1, of e4m3
    "ATOM_ROWS": 8,
    "TRANSPOSE_WARPS": 2,
    "KEY_GROUP": 16,
    "ROWS_PER_THREAD": 2,
    "TMA_ALIGN": 16,
    "BYTE": 8,
}

ARCHITECTURE: Final = Architecture(
    name="sm90",
    compile_arch="sm_90a",
    compute_capability=(9, 0),
    sm_count=132,  # H100 and H200
    tallest_tile=192,
    gpu_family="sm_9x",
    smem_bytes=SMEM_BYTES,
    tmem_columns=0,
    mean_lines={"fmha_fwd": 1002, "fmha_bwd": 1613},
    mma_classes=("HGMMA", "QGMMA"),  # of 16-bit and of 8-bit elements
    sass_classes={
        "HGMMA": "HGMMA",
        "WARPGROUP.ARRIVE": "WARPGROUP.ARRIVE",
        "WARPGROUP.DEPBAR": "WARPGROUP.DEPBAR",
        **SASS_CLASSES,
    },
    role_loops=(RoleLoop("consumer", ("HGMMA", "QGMMA")),),
    decisions=("0007", "0012", "0004"),
    decisions_of_pairs=(),
)


class RegisterSplit(NamedTuple):
    """setmaxnreg values that share the 65536 registers of an SM between the roles."""

    producer: int
    consumer: int


REGISTERS: Final[Mapping[int, RegisterSplit]] = {  # by number of consumer warpgroups
    1: RegisterSplit(producer=24, consumer=256),
    2: RegisterSplit(producer=24, consumer=240),
    3: RegisterSplit(producer=32, consumer=160),
}
"""Per thread: 128 * (producer + warpgroups * consumer) stays within 65536."""
# Where warps of the producer's warpgroup transpose V.
REGISTERS_TRANSPOSING: Final[Mapping[int, RegisterSplit]] = {
    2: RegisterSplit(producer=40, consumer=232),
    3: RegisterSplit(producer=32, consumer=160),
}

# Beside S, P and O: addresses, pipeline states, row statistics. From what compiled unspilled, by
# bytes of an element.
REGISTERS_BESIDE_TILES: Final[Mapping[int, int]] = {2: 30, 1: 24}
