# SPDX-License-Identifier: Apache-2.0
"""Hardware facts by architecture, each with its source; ARCHITECTURES is where others look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from . import sm90, sm100
from .architecture import Architecture

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    each.name: each for each in (sm90.ARCHITECTURE, sm100.ARCHITECTURE)
}


def compiled_as(compile_arch: str) -> Architecture:
    """The architecture that the DSL says so, such as `sm_90a`."""
    (found,) = (
        each for each in ARCHITECTURES.values() if each.compile_arch == compile_arch
    )
    return found
