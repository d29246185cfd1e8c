# SPDX-License-Identifier: Apache-2.0
"""Calls of a kernel's function: of a case, and the probes by which its host launch is known.

The digest of a launch is about what the probes launch. They are few enough for every compile, and
unlike one another in all that host code computes with: lengths beside and on the tiles, counts,
strides, offsets, scales and SMs. Nothing runs: no memory is at the addresses of the tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from ..emulator import launch
from ..ops import cases, operation_of
from ..ops.cases import DYNAMIC, Case, Tiles, launches_for, tiles_of
from ..ops.inputs import Layout, Placed, guard_of, numbers_of, place_tensors
from ..ops.lists import AXES, Drawn
from ..ops.operation import BYTES
from .kernel_text import read_constants

STREAM = 0x5EED_0000_0010  # a raw handle that is not the default stream's
DEFAULT_SMS = 132  # of a case that leaves it to the GPU
FIRST_ADDRESS = 0x7F00_0000_0000
ADDRESS_STEP = 1 << 32  # between storages: no overrun reaches the next
FAR_FIRST_ADDRESS = 0x2_0000_0000
FAR_ADDRESS_STEP = 1 << 42

PROBES: Final = 48
AS_BYTES: Final = {"e4m3": "uint8"}  # but where tensors are PyTorch's
TMA_RANK: Final = 4  # of tensors that TMA moves; others have fewer
LAYOUTS: Final[tuple[cases.Layout, ...]] = get_args(cases.Layout)
SCALES: Final = (1.0, 1.3, 2.0**-10, 30.0, 1e4)  # times 1 / sqrt(head_dim)


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
        """[elements]; a mode of one element is never stepped over, and gets what TMA takes: of the
        four of a tensor that it moves the last is contiguous.
        """
        sizes = zip(self.placed.shape, self.placed.strides, strict=True)
        return tuple(
            guard_of(self.placed.dtype) if size == 1 and at < TMA_RANK - 1 else stride
            for at, (size, stride) in enumerate(sizes)
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


def arguments(
    spec: Mapping[str, Any], case: Case, tiles: Tiles | None = None
) -> launch.Call:
    """The call of a generated kernel's function with a case's tensors, and its workspace.

    It goes to a stream of its own; those with layout ``plain`` are PyTorch's, which makes the
    outputs and has a current stream.
    """
    located, operation = locate(place_tensors(spec, case, tiles)), operation_of(spec)
    types = {} if case.layout == "plain" else AS_BYTES
    tensors = {
        name: launch.tensor_at(
            *(types.get(x.placed.dtype, x.placed.dtype), x.address),
            *(x.placed.shape, x.strides),
        )
        for name, x in located.items()
    }
    outputs = {x.name: len(x.axes) for x in operation.outputs(spec)}
    scratch = {x.name: located[x.name].placed.shape[0] for x in operation.workspaces}
    by_name = [
        x.name for x in operation.inputs(spec) if x.when or case.layout == "bhsd"
    ]
    options: dict[str, Any] = {"stream": STREAM}
    # Of one element the two ways of calling pass other strides, which nothing reads.
    if case.layout == "plain" and 1 not in located[next(iter(outputs))].placed.shape:
        made = {name: tensors.pop(name)["address"] for name in (*outputs, *scratch)}
        options = {"torch": {"stream": STREAM, **made}}
    scalars: dict[str, float] = {**numbers_of(spec, case)}
    if case.scale_factor != 1:
        (scalar,) = operation.scalars
        scalars[scalar.name] = scale_of(spec, case)
    return launch.call(
        tensors,
        function=operation.function,
        outputs=outputs,
        scratch=scratch,
        sm_count=case.sm_count or DEFAULT_SMS,
        scalars=scalars,
        keywords=by_name,
        **options,
    )


def scale_of(spec: Mapping[str, Any], case: Case) -> float:
    """The softmax scale of a case."""
    (scalar,) = operation_of(spec).scalars
    return scalar.value(spec) * case.scale_factor


def probes(text: str) -> list[launch.Call]:
    """The calls that tell a kernel's launch, the same ones for every text of a spec and tiles."""
    constants = read_constants(text)
    spec, tiles = constants["SPEC"], tiles_of(constants)
    return [arguments(spec, case, tiles) for case in _probed(spec, tiles)]


def digest(calls: Sequence[launch.Call]) -> str:
    """The sha256 of calls, by which a record names those that its digest of launches is about."""
    return hashlib.sha256(json.dumps(calls).encode()).hexdigest()


def _probed(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    fixed = spec["seqlen"]
    for number in range(PROBES):
        # Whole tiles in every third, and no two alike: the factors are primes.
        q = 1 + number**2 * 37 % 1499 if number % 3 else tiles.q * (1 + number % 7)
        kv = 1 + number**2 * 53 % 2999 if number % 4 else tiles.kv * (1 + number % 5)
        yield Case(
            f"probe_{number}",
            batch=1 + number % 5,
            kv_heads=1 + number * 3 % 7,
            q=q if fixed["q"] == DYNAMIC else int(fixed["q"]),
            kv=kv if fixed["kv"] == DYNAMIC else int(fixed["kv"]),
            sm_count=tiles.ctas * (1 + number * 13 % 71) + number % tiles.ctas,
            layout=LAYOUTS[number % len(LAYOUTS)],
            scale_factor=SCALES[number % len(SCALES)],
            lists=Drawn("mask", AXES[number % len(AXES)]),
        )
    for case in launches_for(spec, tiles):
        yield replace(case, sm_count=case.sm_count or 7 * tiles.ctas)
