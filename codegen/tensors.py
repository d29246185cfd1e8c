# SPDX-License-Identifier: Apache-2.0
"""The tensors of a rehearsal: bits in NumPy arrays, at addresses that no memory backs.

16-bit values are uint16 and fp32 values uint32, because NumPy has no bf16 and because NaN must
equal itself. Memory that a kernel has no business with is NaN beside inputs, and a pattern beside
outputs that shows when it was written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compare import outside_touched
from .emulator import launch, numerics
from .emulator.memory import GlobalMemory
from .rehearsal_cases import Case

Bits = NDArray[Any]
Place = Callable[[Bits], Bits]

STREAM = 0x5EED_0000_0010  # a raw handle that is not the default stream's
FIRST_ADDRESS = 0x7F00_0000_0000
ADDRESS_STEP = 1 << 32  # between storages: no overrun reaches the next
GUARD = 8  # elements beside the innermost axis: 16 bytes of a 16-bit type, so TMA takes the view
GUARD_BYTE = 0xA5  # as floats: small normal numbers, neither zero nor NaN
NAN16 = 0x7FFF  # in bf16 and fp16
NAN32 = 0x7FC0_0000
HUGE_KEY = 64.0
ROW_GROUP = 8  # rows of a wgmma's accumulator between the two of a thread
# Of `negative` keys, for each seventh of a sequence, of which the last is taken first. 30 makes
# scores near -200: where they rise by that and the reference is not renewed, P overflows.
NEGATIVE_LEVELS = (0.25, 0.5, 60.0, 1.0, 60.0, 60.0, 30.0)

TO_BITS: Mapping[str, Callable[[Any], Any]] = {
    "bf16": numerics.bf16_rn,
    "fp16": numerics.f16_rn,
}
FROM_BITS: Mapping[str, Callable[[Any], Any]] = {
    "bf16": numerics.bf16_to_f32,
    "fp16": numerics.f16_to_f32,
}


@dataclass(frozen=True)
class Storage:
    """Contiguous bits at an address."""

    name: str
    address: int
    bits: Bits


@dataclass(frozen=True)
class Tensor:
    """A view of a storage."""

    name: str
    storage: Storage
    view: Bits

    @property
    def address(self) -> int:
        """Of the view's first element."""
        start, base = (
            int(bits.__array_interface__["data"][0])
            for bits in (self.view, self.storage.bits)
        )
        return self.storage.address + start - base

    @property
    def strides(self) -> tuple[int, ...]:
        """[elements]; a mode of one element is never stepped over, and gets what TMA takes."""
        return tuple(
            GUARD if size == 1 else stride // self.view.itemsize
            for size, stride in zip(self.view.shape, self.view.strides, strict=True)
        )


@dataclass(frozen=True)
class Output(Tensor):
    """A tensor that a kernel fills. place: from its storage, or one like it, to the view."""

    place: Place

    def poison(self) -> None:
        """Guards outside and NaN inside: an element nobody writes is seen."""
        self.storage.bits.view(np.uint8).fill(GUARD_BYTE)
        self.view[...] = NAN16 if self.view.itemsize == 2 else NAN32

    def outside(self) -> str:
        """Finding when a guard was written."""
        inside = np.zeros(self.storage.bits.shape, np.bool_)
        self.place(inside)[...] = True
        pattern = int.from_bytes(bytes([GUARD_BYTE] * self.view.itemsize), "little")
        return outside_touched(self.name, self.storage.bits, inside, pattern)


@dataclass(frozen=True)
class Problem:
    """The tensors of one case. lse is None when the kernel has none."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Output
    lse: Output | None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What is read."""
        return self.q, self.k, self.v

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What is written."""
        return (self.out,) if self.lse is None else (self.out, self.lse)

    def memory(self) -> GlobalMemory:
        """All storages at their addresses; the inputs' cannot be written."""
        memory = GlobalMemory()
        storages = {x.storage.name: x.storage for x in self.inputs}
        for storage in storages.values():
            memory.add(storage.name, storage.address, storage.bits, writable=False)
        for output in self.outputs:
            storage = output.storage
            memory.add(storage.name, storage.address, storage.bits)
        return memory


class _Addresses:
    """Makes storages, far apart."""

    def __init__(self) -> None:
        self._next = FIRST_ADDRESS

    def storage(
        self, name: str, shape: tuple[int, ...], bits: type[Any], fill: int = 0
    ) -> Storage:
        address, self._next = self._next, self._next + ADDRESS_STEP
        return Storage(name, address, np.full(shape, fill, bits))


def make_problem(spec: Mapping[str, Any], case: Case) -> Problem:
    """Tensors of a case with its inputs' values; the outputs hold nothing yet."""
    addresses = _Addresses()
    inputs = _inputs(spec, case, addresses)
    random = np.random.default_rng(case.seed)
    for name, tensor in inputs.items():
        values = random.standard_normal(tensor.view.shape, np.float32)
        if case.data == "huge_key" and name == "k":
            # Late in the order of the blocks, which are taken from the last one on: what was
            # summed before must be rescaled.
            values[:, case.kv // 4] *= HUGE_KEY
        # Two keys in turn move the reference of each thread's second row, never of its first: what
        # a warp does for the one row alone must not hide behind the other.
        if case.data == "second_rows" and name == "q":
            values = np.abs(values)
            values[:, _rows_of_tiles(spec, values) // ROW_GROUP % 2 == 0] *= -1
        if case.data == "second_rows" and name == "k":
            for key, factor in ((case.kv // 2, 1), (case.kv // 4, 2)):
                values[:, key] = np.abs(values[:, key]) * factor * HUGE_KEY
        if case.data == "negative" and name in ("q", "k"):
            values = np.abs(values)
        if case.data == "negative" and name == "k":
            parts = np.array_split(values, len(NEGATIVE_LEVELS), axis=1)
            for part, level in zip(parts, NEGATIVE_LEVELS, strict=True):
                part *= -level
        tensor.view[...] = TO_BITS[spec["dtype"]](values)
    out, lse = _outputs(spec, case, addresses)
    return Problem(inputs["q"], inputs["k"], inputs["v"], out, lse)


def _rows_of_tiles(spec: Mapping[str, Any], q: NDArray[Any]) -> NDArray[Any]:
    """Where a row (position, head) of Q is in the tiles of its head, or of its packed group."""
    rows, heads = np.arange(q.shape[1])[:, None], np.arange(q.shape[2])
    if not spec.get("pack_gqa"):
        return np.broadcast_to(rows, q.shape[1:3])
    group: int = spec["q_per_kv"]
    return rows * group + heads % group


def _inputs(
    spec: Mapping[str, Any], case: Case, addresses: _Addresses
) -> dict[str, Tensor]:
    heads, dims = case.kv_heads * spec["q_per_kv"], spec["head_dim"]
    shapes = {
        "q": (case.batch, case.q, heads, dims["qk"]),
        "k": (case.batch, case.kv, case.kv_heads, dims["qk"]),
        "v": (case.batch, case.kv, case.kv_heads, dims["v"]),
    }
    inputs: dict[str, Tensor] = {}
    if case.layout == "bhsd":
        for name, (batch, rows, count, dim) in shapes.items():
            shape = (batch, count, rows, dim)
            storage = addresses.storage(name, shape, np.uint16, NAN16)
            inputs[name] = Tensor(name, storage, storage.bits.transpose(0, 2, 1, 3))
        return inputs
    groups: list[tuple[str, ...]] = [("q",), ("k",), ("v",)]
    if case.layout == "fused":
        groups = [("q", "k", "v")] if case.q == case.kv else [("q",), ("k", "v")]
    for names in groups:
        batch, rows, _, _ = shapes[names[0]]
        widths = [math.prod(shapes[name][2:]) for name in names]
        shape3 = (batch, rows, sum(widths))
        storage = addresses.storage("".join(names), shape3, np.uint16, NAN16)
        parts = np.split(storage.bits, np.cumsum(widths)[:-1], axis=-1)
        for name, part in zip(names, parts, strict=True):
            inputs[name] = Tensor(name, storage, part.reshape(shapes[name]))
    return inputs


def _outputs(
    spec: Mapping[str, Any], case: Case, addresses: _Addresses
) -> tuple[Output, Output | None]:
    heads = case.kv_heads * spec["q_per_kv"]
    batches, rows, heads = case.batch + 2, case.q + 2, heads + 2  # with guards
    columns = spec["head_dim"]["v"] + 2 * GUARD

    def output(
        name: str, shape: tuple[int, ...], bits: type[Any], place: Place
    ) -> Output:
        storage = addresses.storage(name, shape, bits)
        return Output(name, storage, place(storage.bits), place)

    if case.layout == "bhsd":
        shape = (batches, heads, rows, columns)
        out = output("out", shape, np.uint16, lambda x: _inner(x).transpose(0, 2, 1, 3))
    else:
        out = output("out", (batches, rows, heads, columns), np.uint16, _inner)
    if not spec["lse"]:
        return out, None
    shape3 = (batches, heads, case.q + 2 * GUARD)
    return out, output("lse", shape3, np.uint32, _inner)


def _inner(storage: Bits) -> Bits:
    """What guards leave: one row on each side of every mode, `GUARD` elements of the last."""
    inner = (*[slice(1, -1)] * (storage.ndim - 1), slice(GUARD, -GUARD))
    return storage[inner]


def arguments(spec: Mapping[str, Any], case: Case, problem: Problem) -> launch.Call:
    """The call of a generated kernel's `fmha` with a case's tensors, to a stream of its own."""
    tensors = {
        tensor.name: launch.tensor_at(
            spec["dtype"] if tensor.view.itemsize == 2 else "fp32",
            tensor.address,
            tensor.view.shape,
            tensor.strides,
        )
        for tensor in (*problem.inputs, *problem.outputs)
    }
    return launch.call(tensors, sm_count=case.sm_count, stream=STREAM)


def scale_of(spec: Mapping[str, Any]) -> float:
    """The softmax scale of a rehearsal: the kernels' default."""
    return float(spec["head_dim"]["qk"] ** -0.5)
