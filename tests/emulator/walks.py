# SPDX-License-Identifier: Apache-2.0
"""Launches of generated kernels, walked, over tensors that nothing backs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmha_gen.build import captures
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.emulator import launch, ptx
from fmha_gen.emulator.walk import Extent, Walk, prepare, walk
from fmha_gen.evidence.coverage import tiles_of_tensors
from fmha_gen.evidence.schedule_check import schedule_findings
from fmha_gen.ops import operation_of
from fmha_gen.ops.cases import Tiles, tiles_of
from fmha_gen.ops.operation import BYTES

GENERATED = Path(__file__).resolve().parents[2] / "generated"
FIRST_ADDRESS, STEP = 0x7F00_0000_0000, 1 << 40


@dataclass(frozen=True)
class Size:
    """Of a problem; a fixed length of the kernel replaces it."""

    batch: int
    kv_heads: int
    q: int
    kv: int
    sm_count: int


def fitted(spec: dict[str, Any], size: Size) -> Size:
    """With the kernel's fixed lengths."""
    q, kv = (
        length if spec["seqlen"][side] == "dynamic" else spec["seqlen"][side]
        for side, length in (("q", size.q), ("kv", size.kv))
    )
    return Size(size.batch, size.kv_heads, q, kv, size.sm_count)


def extents(spec: dict[str, Any], size: Size) -> list[Extent]:
    """The kernel's tensors, contiguous and far apart."""
    found = []
    for number, tensor in enumerate(operation_of(spec).tensors(spec)):
        shape, itemsize = tensor.shape(spec, size), BYTES[tensor.type(spec)]
        strides = [itemsize]
        for edge in reversed(shape[1:]):
            strides.insert(0, strides[0] * edge)
        address = FIRST_ADDRESS + number * STEP
        found.append(Extent(tensor.name, address, shape, tuple(strides), itemsize))
    return found


def call(spec: dict[str, Any], size: Size) -> launch.Call:
    """The call of `fmha`."""
    tensors = {
        tensor.name: launch.tensor_at(
            "fp32" if tensor.name == "lse" else spec["dtype"],
            tensor.address,
            tensor.sizes,
            [
                stride // tensor.itemsize if count > 1 else 8
                for stride, count in zip(tensor.strides, tensor.sizes, strict=True)
            ],
        )
        for tensor in extents(spec, size)
    }
    operation = operation_of(spec)
    return launch.call(
        tensors,
        function=operation.function,
        outputs={x.name: len(x.axes) for x in operation.outputs(spec)},
        sm_count=size.sm_count,
    )


def read(path: Path) -> tuple[dict[str, Any], Tiles]:
    """A generated kernel's SPEC and tiles."""
    constants = read_constants(path.read_text(encoding="utf-8"))
    return constants["SPEC"], tiles_of(constants)


def walks(
    path: Path, sizes: Sequence[Size], clusters: Sequence[int] | None = None
) -> list[tuple[Walk, list[str]]]:
    """Of each size: what the CTAs did, and what is wrong with it."""
    spec, tiles = read(path)
    sizes = [fitted(spec, size) for size in sizes]
    calls = [call(spec, size) for size in sizes]
    text, called = captures.capture(path, calls, arch=spec["arch"])
    program = prepare(ptx.parse(text))
    found = []
    for size, each in zip(sizes, called, strict=True):
        (launch,), tensors = each.launched, extents(spec, size)
        addresses = {tensor.name: tensor.address for tensor in tensors}
        cut = tiles_of_tensors(tiles, spec, addresses)
        seen = walk(program, launch, tensors, clusters=clusters, tiles=cut)
        found.append((seen, schedule_findings(seen, tiles, spec, size)))
    return found
