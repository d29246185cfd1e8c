# SPDX-License-Identifier: Apache-2.0
"""From a spec to every number and choice of its kernel, each with where it came from.

Pure: the same spec gives the same plan. Templates place what is decided in `planning`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ..spec.model import SpecFile
from . import sm90, sm100
from .kernel_plan import KernelPlan

PLANNERS: Final[Mapping[str, Callable[[SpecFile], KernelPlan]]] = {
    "sm90": sm90.resolve,
    "sm100": sm100.resolve,
}


def resolve(spec_file: SpecFile) -> KernelPlan:
    """Plan a kernel, or raise SpecError (FG401 and on) with the numbers that do not fit."""
    return PLANNERS[spec_file.spec.arch](spec_file)
