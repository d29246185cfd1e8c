# SPDX-License-Identifier: Apache-2.0
"""The tensors of a rehearsal: bits in NumPy arrays, at addresses that no memory backs.

16-bit values are uint16 and 32-bit values uint32, because NumPy has no bf16 and because NaN must
equal itself. Memory that a kernel has no business with is NaN beside inputs, and a pattern beside
outputs that shows when it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..emulator import launch, numerics
from ..emulator.memory import GlobalMemory
from ..ops import operation_of
from ..ops.cases import Case, Tiles
from ..ops.compare import outside_touched
from ..ops.inputs import GUARD, Layout, Placed, place_tensors, values
from ..ops.operation import BYTES

Bits = NDArray[Any]

STREAM = 0x5EED_0000_0010  # a raw handle that is not the default stream's
DEFAULT_SMS = 132  # of a case that leaves it to the GPU
FIRST_ADDRESS = 0x7F00_0000_0000
ADDRESS_STEP = 1 << 32  # between storages: no overrun reaches the next
FAR_FIRST_ADDRESS = 0x2_0000_0000
FAR_ADDRESS_STEP = 1 << 42
GUARD_BYTE = 0xA5  # as floats: small normal numbers, neither zero nor NaN
NAN16 = 0x7FFF  # in bf16 and fp16
NAN32 = 0x7FC0_0000

TO_BITS: Mapping[str, Callable[[Any], Any]] = {
    "bf16": numerics.bf16_rn,
    "fp16": numerics.f16_rn,
    "fp32": lambda x: np.ascontiguousarray(x, np.float32).view(np.uint32),
    "int32": lambda x: np.asarray(x).astype(np.uint32),
}
FROM_BITS: Mapping[str, Callable[[Any], Any]] = {
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
        found: NDArray[Any] = FROM_BITS[self.placed.dtype](self.view)
        return found

    def poison(self) -> None:
        """Guards outside and NaN inside: an element nobody writes is seen."""
        if self.storage is not None:
            self.storage.view(np.uint8).fill(GUARD_BYTE)
        self.view[...] = NAN16 if self.view.itemsize == 2 else NAN32

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
    """The tensors of one case: what is read, and what is written."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All of them, by name."""
        return {tensor.name: tensor for tensor in (*self.inputs, *self.outputs)}

    def __getitem__(self, name: str) -> Tensor:
        """One of them."""
        return self.tensors[name]

    def memory(self) -> GlobalMemory:
        """All storages at their addresses; inputs cannot be written, outputs hold nothing."""
        memory = GlobalMemory()
        added: set[str] = set()
        for tensor in self.tensors.values():
            output = tensor in self.outputs
            kind = {"writable": output, "uninitialised": output}
            placed, width = tensor.placed, tensor.view.itemsize
            if tensor.storage is None:
                strides = tuple(stride * width for stride in placed.strides)
                memory.add_strided(
                    tensor.name, tensor.address, tensor.view, strides, **kind
                )
            elif placed.storage not in added:
                added.add(placed.storage)
                first = tensor.address - placed.offset * width
                memory.add(placed.storage, first, tensor.storage, **kind)
        return memory


@dataclass(frozen=True)
class Located:
    """A tensor of a case without its memory. address: of its first element."""

    placed: Placed
    address: int

    @property
    def itemsize(self) -> int:
        """[bytes]"""
        return BYTES[self.placed.dtype]

    @property
    def strides(self) -> tuple[int, ...]:
        """[elements]; a mode of one element is never stepped over, and gets what TMA takes."""
        return tuple(
            GUARD if size == 1 else stride
            for size, stride in zip(self.placed.shape, self.placed.strides, strict=True)
        )


def locate(layout: Layout) -> dict[str, Located]:
    """The tensors of a case by name, in their order."""
    far = not layout.guarded
    names = list(layout.tensors if far else layout.storages)
    # Fixed lengths of many batches are longer than a step.
    largest = 4 * max(layout.storages.values())  # [bytes] at most
    step = max(ADDRESS_STEP, 1 << largest.bit_length())
    located = {}
    for name, placed in layout.tensors.items():
        if far:
            address = FAR_FIRST_ADDRESS + names.index(name) * FAR_ADDRESS_STEP
        else:
            address = FIRST_ADDRESS + names.index(placed.storage) * step
            address += placed.offset * BYTES[placed.dtype]
        located[name] = Located(placed, address)
    return located


def make_problem(spec: Mapping[str, Any], tiles: Tiles, case: Case) -> Problem:
    """Tensors of a case with its inputs' values; the outputs hold nothing yet."""
    layout = place_tensors(spec, case)
    storages: dict[str, Bits] = {}
    tensors: dict[str, Tensor] = {}
    for name, located in locate(layout).items():
        kind, nan = (np.uint32, NAN32) if located.itemsize == 4 else (np.uint16, NAN16)
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
    )


def view_of(storage: Bits, placed: Placed) -> Bits:
    """A tensor of its storage, or of an array of the same size."""
    steps = tuple(stride * storage.itemsize for stride in placed.strides)
    return as_strided(storage[placed.offset :], placed.shape, steps)


def arguments(spec: Mapping[str, Any], case: Case) -> launch.Call:
    """The call of a generated kernel's function with a case's tensors.

    It goes to a stream of its own; those with layout ``plain`` are PyTorch's, which makes the
    outputs and has a current stream.
    """
    located, operation = locate(place_tensors(spec, case)), operation_of(spec)
    tensors = {
        name: launch.tensor_at(x.placed.dtype, x.address, x.placed.shape, x.strides)
        for name, x in located.items()
    }
    outputs = {x.name: len(x.axes) for x in operation.outputs(spec)}
    options: dict[str, Any] = {"stream": STREAM}
    # Of one element the two ways of calling pass other strides, which nothing reads.
    if case.layout == "plain" and 1 not in located[next(iter(outputs))].placed.shape:
        made = {name: tensors.pop(name)["address"] for name in outputs}
        options = {"torch": {"stream": STREAM, **made}}
    if case.scale_factor != 1:
        (scalar,) = operation.scalars
        options["scalars"] = {scalar.name: scale_of(spec, case)}
    return launch.call(
        tensors,
        function=operation.function,
        outputs=outputs,
        sm_count=case.sm_count or DEFAULT_SMS,
        keywords=case.layout == "bhsd",
        **options,
    )


def scale_of(spec: Mapping[str, Any], case: Case) -> float:
    """The softmax scale of a case."""
    (scalar,) = operation_of(spec).scalars
    return scalar.value(spec) * case.scale_factor
