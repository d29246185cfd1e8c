# SPDX-License-Identifier: Apache-2.0
"""Tiny kernels from a few PTX instructions, and how to run them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from fmha_gen.emulator import machine
from fmha_gen.emulator.launch import Launch
from fmha_gen.emulator.lower import lower_kernels
from fmha_gen.emulator.memory import GlobalMemory
from fmha_gen.emulator.scheduler import Schedule

OUT, FIRST_INPUT, STEP = 0x10000000, 0x20000000, 0x1000000
LINES_BEFORE = 13  # the body's first line is the next one

SCALAR, MAP = ".u64 {}", ".align 64 .b8 {}[128]"

HEADER = """.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(
{params}
)
{{
\t.reg .pred %p<64>; .reg .b16 %rs<64>; .reg .b32 %r<512>; .reg .b64 %rd<64>;
\tld.param.b64 %rd1, [k_param_0];
\tmov.u32 %r1, %tid.x;
\tmul.wide.u32 %rd2, %r1, {width};
\tadd.s64 %rd2, %rd1, %rd2;
"""


def text(
    body: str,
    params: Sequence[str] = (SCALAR,),
    width: int = 4,
    target: str = "sm_90a",
) -> str:
    """A kernel with the output's address in %rd1, this thread's place there in %rd2, tid in %r1."""
    declared = ", ".join(
        ".param " + kind.format(f"k_param_{i}") for i, kind in enumerate(params)
    )
    header = HEADER.format(params=declared, width=width, target=target)
    return header + body.strip("\n") + "\n\tret;\n}\n"


def execute(
    body: str,
    *inputs: np.ndarray,
    out: np.ndarray | None = None,
    threads: int = 128,
    grid: int = 1,
    cluster: int = 1,
    smem_bytes: int = 16384,
    maps: tuple[bytes, ...] = (),
    width: int = 4,
    target: str = "sm_90a",
    schedule: Schedule | None = None,
    contract: bool = False,
    uninitialised: bool = False,
    read_only: bool = False,
    **options,
):
    """Runs a body; parameter 0 is `out`, then come the inputs' addresses, then tensor maps.

    uninitialised: `out` is memory without content. read_only: of inputs. Returns (out, result). An
    input of as many elements as threads is in %r10, %r11, ... (or %rd10,
    ... when 64 bits wide) of its thread.
    """
    out = np.zeros(threads, np.uint32) if out is None else out
    memory = GlobalMemory()
    memory.add("out", OUT, out, uninitialised=uninitialised)
    values, declarations, loads = [OUT], [SCALAR], []
    for i, array in enumerate(inputs):
        address = FIRST_INPUT + i * STEP
        memory.add(f"input {i}", address, array, writable=not read_only)
        values.append(address)
        declarations.append(SCALAR)
        if array.size == threads and array.itemsize in (4, 8):
            bits = 8 * array.itemsize
            register = f"%r{10 + i}" if bits == 32 else f"%rd{10 + i}"
            loads.append(
                f"ld.param.b64 %rd4, [k_param_{i + 1}]; mul.wide.u32 %rd3, %r1, {bits // 8}; "
                f"add.s64 %rd3, %rd3, %rd4; ld.global.b{bits} {register}, [%rd3];"
            )
    params = struct.pack(f"<{len(values)}Q", *values)
    for raw in maps:
        params += bytes(-len(params) % 64) + raw
        declarations.append(MAP)
    body = " ".join(loads) + "\n" + body.strip("\n")
    source = text(body, declarations, width, target)
    launch = Launch(
        kernel="k",
        grid=(grid, 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1),
        smem_bytes=smem_bytes,
        params=params,
    )
    programs = lower_kernels(source, contract=contract)
    result = machine.run(programs, [launch], memory, schedule=schedule, **options)
    return out, result


def value(
    body: str, *inputs: np.ndarray, register: str = "%r20", **options
) -> np.ndarray:
    """The lanes of a 32-bit register after a body that finds nothing."""
    out, result = execute(
        f"{body}\nst.global.b32 [%rd2], {register};", *inputs, **options
    )
    assert result.findings == ()
    return out


def kinds(result) -> list[str]:
    """What was found, in order, each kind once."""
    found = []
    for finding in result.findings:
        if finding.kind.value not in found:
            found.append(finding.kind.value)
    return found


def tensor_map(address: int, dims, box, *, size: int = 4, swizzle: int = 0) -> bytes:
    """A tensor map of a dense tensor; dimension 0 is contiguous."""
    kind = {1: 0, 2: 1, 4: 2}[size]
    flags = 2 | (len(dims) - 1) << 4 | kind << 7 | swizzle << 13
    strides, edge = [], size
    for extent in dims[:-1]:
        edge *= extent
        strides.append(edge // 16)
    strides += [0] * (4 - len(strides))
    sizes = [extent - 1 for extent in dims] + [0] * (5 - len(dims))
    boxes = [extent - 1 for extent in box] + [0] * (5 - len(box))
    words = [
        address,
        flags | strides[0] << 32,
        strides[1] | strides[2] << 32,
        strides[3],
        sizes[0] | sizes[1] << 32,
        sizes[2] | sizes[3] << 32,
        sizes[4] | boxes[0] << 56,
        boxes[1] | boxes[2] << 8 | boxes[3] << 16 | boxes[4] << 24,
    ]
    return struct.pack("<8Q", *words) + b"\xa5" * 64
