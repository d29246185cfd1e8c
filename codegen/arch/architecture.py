# SPDX-License-Identifier: Apache-2.0
"""What the generator needs to know of a GPU architecture, whichever it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SASS_CLASSES: Final = {
    "MUFU.EX2": "MUFU.EX2",
    "FFMA": "FFMA",
    "FMUL": "FMUL",
    "FADD": "FADD",
    "FMNMX": "FMNMX",
    "F2FP": "F2FP",
    "SHFL": "SHFL",
    "BAR": "BAR.",
    "SYNCS": "SYNCS",
    "UTMALDG": "UTMALDG",
    "UTMASTG": "UTMASTG",
    "LDL": "LDL",
    "STL": "STL",
}
"""Counted for every architecture."""


@dataclass(frozen=True)
class RoleLoop:
    """How the loop of a role over KV blocks is known: an opcode, and how often it is there."""

    role: str
    opcode: str | tuple[str, ...]  # what it starts with, or one of these
    at_least: int = 1


@dataclass(frozen=True)
class Architecture:
    """One architecture that kernels are generated for.

    decisions: the numbers of those that say why its kernels are as they are.
    decisions_of_pairs: of those where two CTAs share an MMA.
    """

    name: str  # as a spec says it
    compile_arch: str  # as the DSL and ptxas say it
    # (major, minor) of the GPU that proves its kernels.
    compute_capability: tuple[int, int]
    sm_count: int  # of that GPU
    tallest_tile: int  # [rows] of a CTA's query tile
    gpu_family: str  # the GPUs that a kernel lets through, as its message says it
    smem_bytes: int  # dynamic shared memory that one CTA can have
    tmem_columns: int  # of 32 bits, per lane of an SM
    # That shipped kernels of an operation, by a spec's name of it, may have on average.
    mean_lines: dict[str, int]
    # What its tensor cores execute: a class for each width of elements, the usual one first.
    mma_classes: tuple[str, ...]
    # Counted in a compile's report: what the opcodes of a class start with. The other mma_classes
    # are where a kernel has some, and reports of kernels that have none do not name them.
    sass_classes: dict[str, str]
    role_loops: tuple[RoleLoop, ...]  # whose instructions a compile's report counts
    decisions: tuple[str, ...]
    decisions_of_pairs: tuple[str, ...]
