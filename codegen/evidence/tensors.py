# SPDX-License-Identifier: Apache-2.0
"""The tensors of a rehearsal: bits in NumPy arrays, at addresses that no memory backs.

Values of 8, 16 and 32 bits are uint8, uint16 and uint32, because NumPy has no bf16 and no e4m3 and
because NaN must equal itself. Memory that a kernel has no business with is NaN beside inputs, and a
pattern beside outputs that shows when it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..build.calls import locate
from ..emulator import numerics
from ..emulator.memory import GlobalMemory
from ..ops import operation_of
from ..ops.cases import Case, Tiles
from ..ops.compare import outside_touched
from ..ops.inputs import Placed, place_tensors, values

Bits = NDArray[Any]

GUARD_BYTE = 0xA5  # as floats: small normal numbers, neither zero nor NaN
NAN8 = 0x7F  # in e4m3
NAN16 = 0x7FFF  # in bf16 and fp16
NAN32 = 0x7FC0_0000
NANS: Mapping[int, tuple[Any, int]] = {
    1: (np.uint8, NAN8),
    2: (np.uint16, NAN16),
    4: (np.uint32, NAN32),
}
"""By bytes: the type of the bits, and a NaN in each format that is so wide."""

TO_BITS: Mapping[str, Callable[[Any], Any]] = {
    "e4m3": lambda x: numerics.e4m3_rn_satfinite(x).astype(np.uint8),
    "bf16": numerics.bf16_rn,
    "fp16": numerics.f16_rn,
    "fp32": lambda x: np.ascontiguousarray(x, np.float32).view(np.uint32),
    "int32": lambda x: np.asarray(x).astype(np.uint32),
}
FROM_BITS: Mapping[str, Callable[[Any], Any]] = {
    "e4m3": numerics.e4m3_to_f32,
    "bf16": numerics.bf16_to_f32,
    "fp16": numerics.f16_to_f32,
    "fp32": lambda bits: np.ascontiguousarray(bits).view(np.float32),
    "int32": lambda bits: bits.astype(np.int32),
}


@dataclass(frozen=True)
class Tensor:
    """A tensor's elements, where they are in their storage and at which address.

    storage: the bits of the whole storage, None where it is too large to exist: then `view` is all
    there is of it. view: the elements. address: of the first one.
    """

    name: str
    placed: Placed
    storage: Bits | None
    view: Bits
    address: int

    def numbers(self) -> NDArray[Any]:
        """The elements' values, in fp32 or int32."""
        return self.of_bits(self.view)

    def of_bits(self, bits: Bits) -> NDArray[Any]:
        """The values of other elements of its type."""
        found: NDArray[Any] = FROM_BITS[self.placed.dtype](bits)
        return found

    def poison(self) -> None:
        """Guards outside and NaN inside: an element nobody writes is seen."""
        if self.storage is not None:
            self.storage.view(np.uint8).fill(GUARD_BYTE)
        self.view[...] = NANS[self.view.itemsize][1]

    def outside(self) -> str:
        """Finding when a guard was written."""
        if (
            self.storage is None
        ):  # what is outside has no memory, and the emulator says so
            return ""
        inside = np.zeros(self.storage.shape, np.bool_)
        view_of(inside, self.placed)[...] = True
        pattern = int.from_bytes(bytes([GUARD_BYTE] * self.view.itemsize), "little")
        return outside_touched(self.name, self.storage, inside, pattern)


@dataclass(frozen=True)
class Problem:
    """The tensors of one case: what is read, what is written, and workspaces."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    scratch: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All of them, by name."""
        return {tensor.name: tensor for tensor in (*self.inputs, *self.written)}

    @property
    def written(self) -> tuple[Tensor, ...]:
        """Outputs and workspaces: what holds nothing before a run, and has guards."""
        return (*self.outputs, *self.scratch)

    def __getitem__(self, name: str) -> Tensor:
        """One of them."""
        return self.tensors[name]

    def memory(self) -> GlobalMemory:
        """All storages at their addresses; inputs cannot be written, outputs hold nothing.

        Of integers only the elements are there: what is read beside them might go unseen, as a page
        of a table that no key uses.
        """
        memory = GlobalMemory()
        added: set[str] = set()
        for tensor in self.tensors.values():
            output = tensor in self.written
            kind = {"writable": output, "uninitialised": output}
            placed, width = tensor.placed, tensor.view.itemsize
            if tensor.storage is None or placed.dtype == "int32":
                strides = tuple(stride * width for stride in placed.strides)
                elements = np.ascontiguousarray(tensor.view)
                memory.add_strided(
                    tensor.name, tensor.address, elements, strides, **kind
                )
            elif placed.storage not in added:
                added.add(placed.storage)
                first = tensor.address - placed.offset * width
                memory.add(placed.storage, first, tensor.storage, **kind)
        return memory


def make_problem(spec: Mapping[str, Any], tiles: Tiles, case: Case) -> Problem:
    """Tensors of a case with its inputs' values; the outputs hold nothing yet."""
    layout = place_tensors(spec, case, tiles)
    storages: dict[str, Bits] = {}
    tensors: dict[str, Tensor] = {}
    for name, located in locate(layout).items():
        kind, nan = NANS[located.itemsize]
        placed, storage = located.placed, None
        if layout.guarded:
            storage = storages.get(placed.storage)
            if storage is None:
                storage = np.full(layout.storages[placed.storage], nan, kind)
                storages[placed.storage] = storage
            view = view_of(storage, placed)
        else:
            view = np.full(placed.shape, nan, kind)
        tensors[name] = Tensor(name, placed, storage, view, located.address)
    for name, numbers in values(spec, tiles, case).items():
        tensors[name].view[...] = TO_BITS[tensors[name].placed.dtype](numbers)
    operation = operation_of(spec)
    return Problem(
        tuple(tensors[x.name] for x in operation.inputs(spec)),
        tuple(tensors[x.name] for x in operation.outputs(spec)),
        tuple(tensors[x.name] for x in operation.workspaces),
    )


def view_of(storage: Bits, placed: Placed) -> Bits:
    """A tensor of its storage, or of an array of the same size."""
    steps = tuple(stride * storage.itemsize for stride in placed.strides)
    return as_strided(storage[placed.offset :], placed.shape, steps)
