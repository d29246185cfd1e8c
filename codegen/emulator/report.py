# SPDX-License-Identifier: Apache-2.0
"""What a run found: each finding once, with the PTX line it is about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Kind(str, Enum):
    """What a finding is about; the value is the word that users and records see."""

    DEADLOCK = "deadlock"
    LIVELOCK = "livelock"
    RACE = "race"
    PROXY_FENCE = "proxy-fence"
    READ_BEFORE_WRITE = "read-before-write"
    OUT_OF_BOUNDS = "out-of-bounds"
    MISALIGNED = "misaligned"
    BARRIER = "barrier"
    TMA = "tma"
    WGMMA = "wgmma"
    TCGEN05 = "tcgen05"
    TENSOR_MEMORY = "tensor-memory"
    REGISTERS = "registers"
    SATURATION = "saturation"
    SUM_ORDER = "sum-order"
    TRAP = "trap"
    OUTSTANDING = "outstanding"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that is wrong with the kernel, said once however often it happened."""

    line: int
    """[PTX line, 1-based] of the instruction that showed it; 0 when no single one did."""
    kind: Kind
    message: str
    where: str = ""
    """Who: `cta 0 warp 5`; before it the kernel, of several; after it the source line, if known."""

    def __str__(self) -> str:
        place = f"PTX line {self.line}: " if self.line else ""
        who = f" [{self.where}]" if self.where else ""
        return f"{self.kind.value}: {place}{self.message}{who}"


class Fault(Exception):
    """A finding after which the run cannot go on: there is no value to continue with."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass
class Report:
    """Collects findings. The same kind at the same line is one finding: the first seen.

    kernel: the one that runs, where there are several to name it among.
    """

    kernel: str = ""
    _findings: dict[tuple[Kind, int, str], Finding] = field(default_factory=dict)

    def add(self, kind: Kind, message: str, *, line: int = 0, where: str = "") -> None:
        """Adds a finding unless its kind was already seen at that line."""
        where = ", ".join(filter(None, (self.kernel, where)))
        # Without a line the message tells two findings apart, and the kernel that they are about.
        key = (kind, line, "" if line else self.kernel + message)
        self._findings.setdefault(key, Finding(line, kind, message, where))

    def __iter__(self) -> Iterator[Finding]:
        return iter(sorted(self._findings.values()))

    def __len__(self) -> int:
        return len(self._findings)


@dataclass(frozen=True)
class Names:
    """What a kernel calls things; places are offsets in a CTA's shared memory."""

    barriers: Mapping[int, str] = field(default_factory=dict)
    """Of each mbarrier: the pipeline, which side, and the stage."""
    named_barriers: Mapping[int, str] = field(default_factory=dict)
    """Of each barrier that `bar` names by a number, from 0 to 15."""
    tiles: Sequence[tuple[range, str]] = ()
    roles: Sequence[tuple[range, str]] = ()
    """Warps and what they do."""
    sources: Mapping[int, str] = field(default_factory=dict)
    """PTX line to `file:line` of the source, for PTX without `.loc`."""

    def barrier(self, place: int) -> str:
        """An mbarrier by its offset, and its name if it has one."""
        name = self.barriers.get(place)
        return f"mbarrier {place:#x} ({name})" if name else f"mbarrier {place:#x}"

    def named_barrier(self, number: int) -> str:
        """A named barrier by its number, and what the source calls it."""
        name = self.named_barriers.get(number)
        return f"barrier {number} ({name})" if name else f"barrier {number}"

    def tile(self, place: int) -> str:
        """` (sK)`, the tile that a byte lies in; empty in none."""
        return next((f" ({name})" for held, name in self.tiles if place in held), "")

    def role(self, warp: int) -> str:
        """` (loads by TMA)`; empty for a warp without a role."""
        return next((f" ({name})" for warps, name in self.roles if warp in warps), "")


NAMELESS = Names()


@dataclass(frozen=True)
class Event:
    """What one warp did without interruption: one bar of the timeline."""

    cta: int
    warp: int
    name: str
    """The opcode that gave the stretch its name: what it waited for or computed."""
    line: int
    begin: int
    """[steps of the scheduler; not time]"""
    end: int
    kernel: str = ""
