# SPDX-License-Identifier: Apache-2.0
"""What a bulk copy moves: a box of a tensor map, a run of bytes, or one of shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import tma
from .additions import Sum
from .checks import Operation
from .global_shadow import Accessor, Place
from .memory import ALIGNMENT, MemoryFault
from .report import Kind

if TYPE_CHECKING:
    from .cluster import Cta
    from .machine import Machine


@dataclass(frozen=True)
class Box:
    """What a tensor map describes, at some coordinates."""

    tensor_map: tma.TensorMap
    coordinates: tuple[int, ...]

    def load(
        self, machine: Machine, receivers: Sequence[Cta], place: int
    ) -> tuple[int, range]:
        """Moves it to the same place of each CTA: the bytes that each gets, and where."""
        return machine.load_box(self.tensor_map, self.coordinates, receivers, place)

    def store(self, machine: Machine, cta: Cta, place: int) -> range:
        """Moves it from a CTA's shared memory: the bytes read there."""
        return machine.store_box(self.tensor_map, self.coordinates, cta, place)

    def check(self, machine: Machine) -> None:
        """Reports a box wholly outside the tensor, for which no ragged tile is the reason."""
        tiles = machine.tiles.get(self.tensor_map.address, ())
        if astray := self.tensor_map.astray(self.coordinates, tiles):
            machine.report(Kind.OUT_OF_BOUNDS, astray)

    def sum(self, machine: Machine, cta: Cta, place: int) -> tuple[range, Sum | None]:
        """Takes what is added to it from a CTA's shared memory: the bytes read there, and that."""
        return machine.sum_of_box(self.tensor_map, self.coordinates, cta, place)

    def place(self, machine: Machine, *, stored: bool) -> Place | None:
        """The part that is in the tensor, and written when it is stored; None when none is."""
        part = tma.in_bounds(
            self.tensor_map, self.coordinates, machine.memory, stored=stored
        )
        return None if part is None else Place(*part)


@dataclass(frozen=True)
class Run:
    """Bytes one after another."""

    address: int
    nbytes: int

    def __post_init__(self) -> None:
        _check_run("global", self.address, self.nbytes)

    def load(
        self, machine: Machine, receivers: Sequence[Cta], place: int
    ) -> tuple[int, range]:
        """Moves them to the same place of each CTA: the bytes that each gets, and where."""
        for cta in receivers:
            cta.shared.check_region(place, self.nbytes, ALIGNMENT)
        machine.load_run(self.address, self.nbytes, receivers, place)
        return self.nbytes, range(place, place + self.nbytes)

    def sum(self, machine: Machine, cta: Cta, place: int) -> tuple[range, Sum | None]:
        """As of a `Box`."""
        cta.shared.check_region(place, self.nbytes, ALIGNMENT)
        found = machine.sum_of_run(self.address, self.nbytes, cta, place)
        return range(place, place + self.nbytes), found

    def place(self, machine: Machine, *, stored: bool) -> Place | None:
        """All of it."""
        buffer, offset = machine.memory.find(self.address, self.nbytes)
        if offset % ALIGNMENT:  # of a strided buffer
            return Place(buffer, np.arange(offset, offset + self.nbytes), 1)
        first = offset // ALIGNMENT
        words = np.arange(first, first + self.nbytes // ALIGNMENT)
        return Place(buffer, words, ALIGNMENT)


@dataclass(frozen=True)
class SharedRun:
    """Bytes of a CTA's shared memory. reading: what reads them; None when nothing is checked."""

    cta: Cta
    begin: int
    nbytes: int
    reading: Operation | None

    def __post_init__(self) -> None:
        _check_run("shared", self.begin, self.nbytes)

    def load(
        self, machine: Machine, receivers: Sequence[Cta], place: int
    ) -> tuple[int, range]:
        """As of a `Run`."""
        for cta, begin in ((self.cta, self.begin), *((x, place) for x in receivers)):
            cta.shared.check_region(begin, self.nbytes, ALIGNMENT)
        machine.copy_shared(self.cta, self.begin, self.nbytes, receivers, place)
        return self.nbytes, range(place, place + self.nbytes)

    def note(self, what: str) -> None:
        """Tells the shadow of the shared memory that it is read."""
        reading, shadow = self.reading, self.cta.shadow
        if reading is not None and shadow is not None:
            granules = slice(self.begin // 4, -(-(self.begin + self.nbytes) // 4))
            about = reading.component, reading.epoch, reading.clock
            shadow.read(granules, *about, what)


def _check_run(space: str, address: int, nbytes: int) -> None:
    if address % ALIGNMENT:
        reason = f"not aligned to {ALIGNMENT} bytes"
    elif nbytes <= 0 or nbytes % ALIGNMENT:
        reason = f"a size that is not a multiple of {ALIGNMENT} bytes"
    else:
        return
    raise MemoryFault(space, address, nbytes, reason)


Part = Box | Run


def note(
    part: Part,
    machine: Machine,
    operation: Operation,
    component: int,
    action: str,
    what: str,
) -> None:
    """Tells the global shadow what an operation does to a part: read, write or reduce.

    component: of its accesses to global memory.
    """
    shadow = machine.global_shadow
    place = part.place(machine, stored=action != "read") if shadow else None
    if shadow is not None and place is not None:
        when = operation.epoch, operation.clock, operation.line
        getattr(shadow, action)(place, Accessor(component, *when, what))
