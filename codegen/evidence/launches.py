# SPDX-License-Identifier: Apache-2.0
"""What a call of an operation launches: which kernels, in which order, with grids of which size."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ..emulator.launch import Launch
from ..ops import backward_cases, operation_of
from ..ops.backward import is_backward
from ..ops.cases import Case, Tiles
from ..ops.operation import Spec
from .schedule_check import grid_finding

# Along the second and the third axis of a grid; along the first there are 2^31 - 1.
MOST_CTAS_OF_AXIS = 65535


def launches_finding(
    launches: Sequence[Launch], tiles: Tiles, spec: Spec, case: Case
) -> str:
    """What is wrong with the launches of a call; empty when nothing is."""
    suffixes = operation_of(spec).kernels(spec)
    if len(launches) != len(suffixes):
        wanted = "one" if len(suffixes) == 1 else f"{len(suffixes)}"
        return f"{len(launches)} launches, {spec['op']} is {wanted}"
    if len(launches) == 1:
        return grid_finding(launches[0].grid, tiles, spec, case)
    for suffix, launch in zip(suffixes, launches, strict=True):
        if not _is_of(launch.kernel, spec, suffix):
            return (
                f"launches {launch.kernel}, where {spec['name']}{suffix} has its turn"
            )
        if max(launch.grid[1:]) > MOST_CTAS_OF_AXIS:
            return (
                f"{launch.kernel} has a grid of {list(launch.grid)} CTAs:"
                f" {MOST_CTAS_OF_AXIS} at most along the second and the third axis"
            )
        if is_backward(spec) and not suffix:
            work, ctas = backward_cases.work_tiles(case, tiles), math.prod(launch.grid)
            assert case.sm_count is not None
            most = min(work, case.sm_count // tiles.ctas) * tiles.ctas
            if not 1 <= ctas <= most or ctas % tiles.ctas:
                of = "a CTA" if tiles.ctas == 1 else f"a cluster of {tiles.ctas} CTAs"
                return (
                    f"{ctas} CTAs for {work} KV tiles: the GPU has {case.sm_count} SMs,"
                    f" and {of} takes one tile after the other"
                )
    return ""


def is_main(kernel: str, spec: Spec) -> bool:
    """Whether a kernel, by its symbol, is the one that the file's header speaks of."""
    suffixes = operation_of(spec).kernels(spec)
    return len(suffixes) == 1 or _is_of(kernel, spec, "")


def _is_of(kernel: str, spec: Spec, suffix: str) -> bool:
    """Whether a symbol is of the kernel with that suffix; the DSL appends a number."""
    name = re.escape(f"{spec['name']}{suffix}")
    return re.fullmatch(rf"{name}(_\d+)?", kernel) is not None
