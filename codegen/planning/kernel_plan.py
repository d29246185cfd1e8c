# SPDX-License-Identifier: Apache-2.0
"""What a plan consists of, whichever architecture it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..arch.architecture import Architecture
from ..errors import SpecError
from ..spec.model import SpecFile
from .protocol import Load, Phase

ELEMENT_BYTES: Final = 2  # bf16 and fp16: of sm100, and of O
WARPGROUP_THREADS: Final = 128


@dataclass(frozen=True)
class Number:
    """One constant of the generated file.

    `origin` is "given" (by `field` of the spec), "planned" (chosen here; `reason` says by which
    rule) or "derived" (`formula`, Python over the constants above it, was evaluated).
    """

    name: str
    value: int | float
    unit: str
    origin: str
    formula: str = ""
    reason: str = ""
    field: str = ""


@dataclass(frozen=True)
class Region:
    """A part of the CTA's shared memory: what for, in so many stages of the same size."""

    name: str
    nbytes: int
    formula: str
    stages: int = 1
    holds: str = ""


@dataclass(frozen=True)
class Columns:
    """A part of the SM's tensor memory: `count` columns of 32 bits, all lanes, from `first` on."""

    name: str
    first: int
    count: int
    formula: str


@dataclass(frozen=True)
class Barrier:
    """A row of the synchronisation table: who arrives how often, and who waits.

    count: arrivals that complete a phase, which `arrivals` says in words.
    """

    name: str
    stages: int
    count: int
    arrivals: str
    waiter: str


@dataclass(frozen=True)
class Registers:
    """What setmaxnreg gives each thread of a role, which has so many warpgroups."""

    role: str
    warpgroups: int
    per_thread: int


@dataclass(frozen=True)
class DevicePlan:
    """What a CTA of one `cute.kernel` has and does. name: empty where it is the file's only one."""

    smem: tuple[Region, ...]
    tmem: tuple[Columns, ...]  # parts may overlap; none before sm100
    barriers: tuple[Barrier, ...]
    phases: tuple[Phase, ...]  # what all roles do: for a KV block, between tiles
    loads: tuple[Load, ...]  # of a tile of Q, K and V, by each CTA of a cluster
    registers: tuple[Registers, ...]  # of all warpgroups
    register_parts: Mapping[str, int]  # of a thread of the hungriest role, an estimate
    name: str = ""

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one CTA."""
        return total(self.smem)

    @property
    def registers_needed(self) -> int:
        """What a thread of the hungriest role needs, by estimate."""
        return sum(self.register_parts.values())

    @property
    def hungriest(self) -> Registers:
        """The role whose threads have most registers."""
        return max(self.registers, key=lambda role: role.per_thread)


@dataclass(frozen=True)
class KernelPlan:
    """Everything that the templates and `explain` need to know about one file.

    kernels: those that `launch` launches, in its order.
    """

    spec_file: SpecFile
    architecture: Architecture
    chosen: tuple[Number, ...]
    derived: tuple[Number, ...]
    kernels: tuple[DevicePlan, ...]
    statements: tuple[str, ...]  # what the file does for its shapes
    context: Mapping[str, Any]

    @property
    def stem(self) -> str:
        """The kernel's name."""
        return self.spec_file.stem

    @property
    def arch(self) -> str:
        """The architecture, as the spec says it."""
        return self.architecture.name

    @property
    def compile_arch(self) -> str:
        """The architecture, as the DSL says it."""
        return self.architecture.compile_arch

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one CTA, of the kernel that has most."""
        return max(kernel.smem_bytes for kernel in self.kernels)


def total(regions: tuple[Region, ...]) -> int:
    """Bytes of all parts."""
    return sum(region.nbytes for region in regions)


def too_much_smem(
    spec_file: SpecFile,
    architecture: Architecture,
    regions: tuple[Region, ...],
    field: tuple[str, ...],
    fewer: str = "fewer stages, a smaller tile.kv",
) -> SpecError:
    """FG401 at that field, with the sum. fewer: what would help."""
    parts = " + ".join(f"{region.name} {region.nbytes}" for region in regions)
    message = (
        f"shared memory needs {total(regions)} B, {architecture.name} allows"
        f" {architecture.smem_bytes}: {parts}"
    )
    hint = f"{fewer}, or leave them out to have them planned"
    return spec_file.refusal("FG401", field, message, hint)
