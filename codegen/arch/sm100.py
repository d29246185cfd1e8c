# SPDX-License-Identifier: Apache-2.0
"""Blackwell (sm_100a) facts that the plan stands on.

Sources: CUDA C++ Programming Guide, compute capabilities 10.0; PTX ISA, tcgen05 and setmaxnreg; the
register split is one under which ptxas 12.9 compiles our kernels without a spill.
"""

from __future__ import annotations

from typing import Final

from .architecture import SASS_CLASSES, Architecture, RoleLoop

SMEM_BYTES: Final = 232448  # dynamic shared memory one CTA can have: 227 KiB
SMEM_ALIGN: Final = 1024  # [bytes] of a 128-byte-swizzled tile
MMA_ROWS: Final = 128  # M of a tcgen05.mma of one CTA, and lanes of the tensor memory
TMEM_COLUMNS: Final = 512  # of 32 bits, per lane
LOAD_COLUMNS: Final = 32  # of a lane, by one tcgen05.ld or tcgen05.st of ours
REGISTERS: Final = 65536  # of an SM
# Those of templates/sm100/forward/constants.py.j2 that formulas of the plan read.
CONSTANTS: Final = {
    "COLUMNS_AT_ONCE": LOAD_COLUMNS,
    "HALF_ROWS": MMA_ROWS,
    "WARPGROUP_THREADS": 128,
    "WARPGROUP_WARPS": 4,
    "ELEMENT_BYTES": 2,
    "TMA_ALIGN": 16,
    "VECTOR_BITS": 128,
    "BYTE": 8,
}
# Beside S: P on its way, addresses, row statistics. From what compiled unspilled.
REGISTERS_BESIDE_S: Final = 64

ARCHITECTURE: Final = Architecture(
    name="sm100",
    compile_arch="sm_100a",
    compute_capability=(10, 0),
    sm_count=148,  # B200
    tallest_tile=256,
    gpu_family="sm_10x",
    smem_bytes=SMEM_BYTES,
    tmem_columns=TMEM_COLUMNS,
    mean_lines={"fmha_fwd": 1150, "fmha_bwd": 1500},
    mma_classes=("UTCHMMA", "UTCQMMA"),  # of 16-bit and of 8-bit elements
    sass_classes={
        "UTCHMMA": "UTCHMMA",
        "UTCBAR": "UTCBAR",
        "LDTM": "LDTM",
        "STTM": "STTM",
        **SASS_CLASSES,
    },
    role_loops=(
        RoleLoop("softmax", "MUFU.EX2", at_least=32),
        RoleLoop("correction", "STTM"),
        RoleLoop("mma", ("UTCHMMA", "UTCQMMA")),
        RoleLoop("load", "UTMALDG"),
    ),
    decisions=("0011", "0016", "0019"),
    decisions_of_pairs=("0017", "0011", "0016", "0019"),
)
