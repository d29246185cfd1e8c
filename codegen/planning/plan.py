# SPDX-License-Identifier: Apache-2.0
"""From a spec to every number and choice of its kernel, each with where it came from.

Pure: the same spec gives the same plan. Templates place what is decided in `planning`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ..ops.backward import BACKWARD_OP
from ..ops.forward import FORWARD
from ..spec.model import SpecFile
from . import sm90, sm90_backward, sm100, sm100_backward
from .kernel_plan import KernelPlan

PLANNERS: Final[Mapping[tuple[str, str], Callable[[SpecFile], KernelPlan]]] = {
    ("sm90", FORWARD.name): sm90.resolve,
    ("sm90", BACKWARD_OP): sm90_backward.resolve,
    ("sm100", FORWARD.name): sm100.resolve,
    ("sm100", BACKWARD_OP): sm100_backward.resolve,
}
"""By architecture and operation."""


def resolve(spec_file: SpecFile) -> KernelPlan:
    """Plan a kernel, or raise SpecError (FG401 and on) with the numbers that do not fit."""
    spec = spec_file.spec
    return PLANNERS[spec.arch, spec.op](spec_file)
