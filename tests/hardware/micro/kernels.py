# SPDX-License-Identifier: Apache-2.0
"""Micro-kernels for the subtle rules of sm_90a: what the silicon does, one rule at a time.

Each is a PTX module of its own with one kernel, `micro(input, output, map)`: two global pointers
and a tensor map that the driver encodes (zeros where there is no tensor). Inputs come from fixed
seeds, by operations that round alike everywhere, so that only the device's answers need keeping.
The same text runs in the emulator.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

THREADS = 128  # of every CTA: one warpgroup
STEP = 16 * THREADS  # [bytes] that all threads move at once
TILES = 1024  # [bytes] of shared memory that are kept for barriers; what is examined comes after
WARP = 32


@dataclass(frozen=True)
class Tensor:
    """Global memory behind a tensor map; strides in bytes, without that of dimension 0."""

    element_type: str  # a key of driver.TYPES
    dimensions: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int  # 0, 32, 64 or 128
    content: Bytes


@dataclass(frozen=True)
class Micro:
    """One launch: `grid` CTAs of 128 threads, in clusters of `cluster`."""

    name: str
    ptx: str
    input: Bytes
    output_bytes: int
    grid: int = 1
    cluster: int = 1
    smem_bytes: int = 0  # dynamic
    tensor: Tensor | None = None
    settings: dict[str, Any] = field(
        default_factory=dict
    )  # what a test needs to know of it


def as_bytes(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# -- PTX

_HEADER = """\
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry micro(
    .param .u64 input,
    .param .u64 output,
    .param .align 64 .b8 map[128]
)
.reqntid 128, 1, 1
{directives}{{
    .reg .pred %p<16>;
    .reg .b16 %h<8>;
    .reg .b32 %r<64>;
    .reg .b64 %d<16>;
    .reg .f32 %f<8>;
    .reg .b32 %acc<{accumulators}>;
    ld.param.u64 %d1, [input];
    ld.param.u64 %d2, [output];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, smem;
    setp.ne.s32 %p1, %r1, 0;
"""


def module(body: Sequence[str], *, accumulators: int = 1, directives: str = "") -> str:
    """The text around a body, which finds input in %d1, output in %d2, its thread in %r1, the start
    of shared memory in %r2, and %p1 true in all threads but the first."""
    header = _HEADER.format(accumulators=accumulators, directives=directives)
    return header + "".join(f"    {line}\n" for line in body) + "    ret;\n}\n"


def fill(nbytes: int) -> list[str]:
    """Shared memory after the barriers from the input, visible to the asynchronous proxy."""
    assert nbytes % STEP == 0
    lines = [
        "shl.b32 %r3, %r1, 4;",
        "cvt.u64.u32 %d3, %r3;",
        "add.s64 %d4, %d1, %d3;",
        f"add.s32 %r4, %r3, {TILES};",
        "add.s32 %r4, %r4, %r2;",
    ]
    for offset in range(0, nbytes, STEP):
        lines.append(f"ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%d4+{offset}];")
        lines.append(f"st.shared.v4.b32 [%r4+{offset}], {{%r5, %r6, %r7, %r8}};")
    return [*lines, "fence.proxy.async.shared::cta;", "bar.sync 0;"]


def dump(nbytes: int) -> list[str]:
    """The same bytes to the output; %d5 is where."""
    assert nbytes % STEP == 0
    lines = [
        "bar.sync 0;",
        "shl.b32 %r3, %r1, 4;",
        "cvt.u64.u32 %d3, %r3;",
        "add.s64 %d4, %d5, %d3;",
        f"add.s32 %r4, %r3, {TILES};",
        "add.s32 %r4, %r4, %r2;",
    ]
    for offset in range(0, nbytes, STEP):
        lines.append(f"ld.shared.v4.b32 {{%r5, %r6, %r7, %r8}}, [%r4+{offset}];")
        lines.append(f"st.global.v4.b32 [%d4+{offset}], {{%r5, %r6, %r7, %r8}};")
    return lines


def wait(label: str, barrier: str, parity: int) -> list[str]:
    """All threads of the CTA wait for a phase."""
    return [
        f"{label}:",
        f"mbarrier.try_wait.parity.shared.b64 %p2, [{barrier}], {parity};",
        f"@!%p2 bra {label};",
    ]


# -- arithmetic, lane by lane

SAMPLES = 4096
# name -> instruction on %f1, %f2, %f3 (float) or %r11, %r12 (the same bits), and its destination
ARITHMETIC: dict[str, tuple[str, str]] = {
    "bf16x2": ("cvt.rn.bf16x2.f32 {}, %f1, %f2;", "%r20"),
    "f16x2": ("cvt.rn.f16x2.f32 {}, %f1, %f2;", "%r20"),
    "e4m3x2": ("cvt.rn.satfinite.e4m3x2.f32 {}, %f1, %f2;", "%h1"),
    "e5m2x2": ("cvt.rn.satfinite.e5m2x2.f32 {}, %f1, %f2;", "%h1"),
    "rni_s32": ("cvt.rni.s32.f32 {}, %f1;", "%r20"),
    "rzi_u32": ("cvt.rzi.u32.f32 {}, %f1;", "%r20"),
    "fma": ("fma.rn.f32 {}, %f1, %f2, %f3;", "%f4"),
    "max": ("max.f32 {}, %f1, %f2;", "%f4"),
    "min": ("min.f32 {}, %f1, %f2;", "%f4"),
    "ex2": ("ex2.approx.ftz.f32 {}, %f1;", "%f4"),
    "lg2": ("lg2.approx.ftz.f32 {}, %f1;", "%f4"),
    "rcp": ("rcp.approx.ftz.f32 {}, %f1;", "%f4"),
    "div_s32": ("div.s32 {}, %r11, %r12;", "%r20"),
    "rem_s32": ("rem.s32 {}, %r11, %r12;", "%r20"),
    "div_u32": ("div.u32 {}, %r11, %r12;", "%r20"),
    "rem_u32": ("rem.u32 {}, %r11, %r12;", "%r20"),
}
APPROXIMATIONS = ("ex2", "lg2", "rcp")

_EDGES = [
    *(
        0x00000000,
        0x80000000,
        0x00000001,
        0x80000001,
        0x007FFFFF,
        0x00800000,
        0x80800000,
    ),
    *(
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x7F800001,
        0xFFFFFFFF,
        0x7F7FFFFF,
        0xFF7FFFFF,
    ),
    *(
        0x3F800000,
        0xBF800000,
        0x3F000000,
        0x3FC00000,
        0x4F000000,
        0x4F7FFFFF,
        0xCF000001,
    ),
    *(
        0x3F808000,
        0x3F818000,
        0x3F808001,
        0x3F807FFF,
        0x7F7F8000,
        0x7F7F7FFF,
    ),  # bf16 ties
    *(
        0x3F801000,
        0x3F803000,
        0x477FEFFF,
        0x477FF000,
        0x33000000,
        0x33000001,
        0x387FE000,
    ),  # f16
    *(
        0x43E00000,
        0x43E80000,
        0x43E80001,
        0x3A800000,
        0x3A800001,
        0x3B000000,
        0x3B400000,
    ),  # e4m3
    *(0x47600000, 0x47700000, 0x47700001, 0x36800000, 0x37000000, 0x37800000),  # e5m2
    *(
        0xC2FC0000,
        0xC2FD0000,
        0x43000000,
        0x42FFFFFF,
        0x7E800000,
        0x7F000000,
    ),  # ex2 and rcp
]


def _arithmetic_inputs() -> NDArray[np.uint32]:
    """[3, SAMPLES]: edges with each other, floats of all sizes, floats near 1, ties of 16 bits."""
    rng = np.random.default_rng(90)
    edges = np.array(_EDGES, np.uint32)
    pairs = np.stack(np.meshgrid(edges, edges)).reshape(2, -1)[
        :, :: len(edges) ** 2 // 1024
    ]
    pairs = pairs[:, :1024]
    crossed = np.concatenate((pairs, rng.permutation(pairs[0])[None]))
    anything = rng.integers(0, 2**32, (3, 1024), dtype=np.uint32)
    near = rng.uniform(-4, 4, (3, 1024)).astype(np.float32).view(np.uint32)
    ties = anything & np.uint32(0xFFFF0000) | rng.choice(
        np.array([0x7FFF, 0x8000, 0x8001, 0x1000, 0x3000], np.uint32), (3, 1024)
    )
    return np.concatenate((crossed, anything, near, ties), axis=1)


def _approximation_inputs() -> NDArray[np.uint32]:
    """[3, SAMPLES] like `_arithmetic_inputs`, of which only the first row is used."""
    exponents = (np.arange(2048) - 1860) * 0.068  # -126.5 to 12.7
    sizes = np.arange(1536, dtype=np.uint32) * np.uint32(
        0x7EFF_FFFF // 1536
    ) + np.uint32(0x80_0000)
    near_one = 0.5 + np.arange(512) * (1.5 / 512)
    return np.concatenate(
        (
            exponents.astype(np.float32).view(np.uint32),
            sizes,  # normal numbers, evenly spaced by their bits
            near_one.astype(np.float32).view(np.uint32),
        )
    )[None].repeat(3, 0)


def _lanewise(
    name: str, inputs: NDArray[np.uint32], instructions: Sequence[str]
) -> Micro:
    """A kernel that applies instructions to columns of [3, SAMPLES]; [instruction, SAMPLES] out."""
    body = [
        "mov.u32 %r3, %ctaid.x;",
        f"mad.lo.s32 %r4, %r3, {THREADS}, %r1;",
        "mul.wide.u32 %d3, %r4, 4;",
        "add.s64 %d4, %d1, %d3;",
        "add.s64 %d5, %d2, %d3;",
    ]
    for row in range(3):
        body.append(f"ld.global.b32 %r{11 + row}, [%d4+{4 * SAMPLES * row}];")
        body.append(f"mov.b32 %f{1 + row}, %r{11 + row};")
    for row, instruction in enumerate(instructions):
        text, destination = ARITHMETIC[instruction]
        body.append(text.format(destination))
        if destination.startswith("%h"):
            body.append(f"cvt.u32.u16 %r20, {destination};")
        elif destination.startswith("%f"):
            body.append(f"mov.b32 %r20, {destination};")
        body.append(f"st.global.b32 [%d5+{4 * SAMPLES * row}], %r20;")
    return Micro(
        name=name,
        ptx=module(body),
        input=as_bytes(inputs),
        output_bytes=4 * SAMPLES * len(instructions),
        grid=SAMPLES // THREADS,
        settings={"instructions": tuple(instructions)},
    )


def arithmetic() -> list[Micro]:
    return [
        _lanewise("arithmetic", _arithmetic_inputs(), tuple(ARITHMETIC)),
        _lanewise("approximations", _approximation_inputs(), APPROXIMATIONS),
    ]


# -- warps

_ROW, _ROW_BYTES = 8, 16

# mode, lane operand (a number, or %r11, which differs from lane to lane), clamp and segment
SHUFFLES = [
    ("idx", "0", 31),
    ("idx", "%r11", 31),
    ("idx", "5", 0x181F),
    ("idx", "%r11", 0x1C1F),
    ("bfly", "1", 31),
    ("bfly", "16", 31),
    ("bfly", "%r11", 31),
    ("bfly", "12", 0x181F),
    ("up", "1", 0),
    ("up", "3", 0x1800),
    ("up", "%r11", 0),
    ("down", "1", 31),
    ("down", "3", 0x181F),
    ("down", "%r11", 31),
    ("down", "1", 14),
]
VOTES = ("any", "all", "ballot")
VOTE_MASKS = (0x00000000, 0xFFFFFFFF, 0x80000001, 0x7FFFFFFE)


def warps() -> list[Micro]:
    """Shuffles (value and predicate), votes and elect; [row, thread] of 32 bits out.

    The input holds the value and the lane operand of each thread.
    """
    rng = np.random.default_rng(91)
    inputs = rng.integers(0, 2**32, (2, THREADS), dtype=np.uint32)
    inputs[1] &= 31
    body = [
        "mul.wide.u32 %d3, %r1, 4;",
        "add.s64 %d4, %d1, %d3;",
        "add.s64 %d5, %d2, %d3;",
        "ld.global.b32 %r10, [%d4];",
        f"ld.global.b32 %r11, [%d4+{4 * THREADS}];",
    ]
    rows = 0

    def keep(register: str) -> None:
        nonlocal rows
        body.append(f"st.global.b32 [%d5+{4 * THREADS * rows}], {register};")
        rows += 1

    for mode, lane, clamp in SHUFFLES:
        body.append(f"shfl.sync.{mode}.b32 %r20|%p3, %r10, {lane}, {clamp}, -1;")
        body.append("selp.b32 %r21, 1, 0, %p3;")
        keep("%r20")
        keep("%r21")
    body += ["and.b32 %r12, %r1, 31;", "mov.b32 %r14, 1;", "shl.b32 %r14, %r14, %r12;"]
    for mask in VOTE_MASKS:
        body.append(f"and.b32 %r13, %r14, {mask};")
        body.append("setp.ne.b32 %p3, %r13, 0;")
        for vote in VOTES:
            if vote == "ballot":
                body.append("vote.sync.ballot.b32 %r21, %p3, -1;")
            else:
                body.append(f"vote.sync.{vote}.pred %p4, %p3, -1;")
                body.append("selp.b32 %r21, 1, 0, %p4;")
            keep("%r21")
    body += ["elect.sync %r20|%p3, -1;", "selp.b32 %r21, 1, 0, %p3;"]
    keep("%r20")
    keep("%r21")
    shuffled = Micro("warps", module(body), as_bytes(inputs), 4 * THREADS * rows)
    return [shuffled, _stmatrix()]


STMATRIX = [(count, transposed) for transposed in (False, True) for count in (1, 2, 4)]
STMATRIX_BYTES = 4 * 4 * _ROW * _ROW_BYTES  # that the largest of them writes


def stmatrix_inputs() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Registers [4, thread], and per variant each thread's byte offset in that variant's part."""
    rng = np.random.default_rng(92)
    registers = rng.integers(0, 2**32, (4, THREADS), dtype=np.uint32)
    offsets = [16 * rng.permutation(THREADS).astype(np.uint32) for _ in STMATRIX]
    return registers, np.stack(offsets)


def _stmatrix() -> Micro:
    registers, offsets = stmatrix_inputs()
    size = STMATRIX_BYTES * len(STMATRIX)
    sentinel = np.full(size, 0xA5, np.uint8)
    inputs = np.concatenate((sentinel, as_bytes(registers), as_bytes(offsets)))
    body = [*fill(size), "mul.wide.u32 %d3, %r1, 4;", "add.s64 %d4, %d1, %d3;"]
    for i in range(4):
        body.append(f"ld.global.b32 %r{10 + i}, [%d4+{size + 4 * THREADS * i}];")
    for i, (count, transposed) in enumerate(STMATRIX):
        body.append(f"ld.global.b32 %r20, [%d4+{size + 4 * THREADS * (4 + i)}];")
        body.append("add.s32 %r20, %r20, %r2;")
        held = ", ".join(f"%r{10 + j}" for j in range(count))
        trans = ".trans" if transposed else ""
        offset = TILES + STMATRIX_BYTES * i
        body.append(
            f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r20+{offset}], {{{held}}};"
        )
    body += ["mov.b64 %d5, %d2;", *dump(size)]
    return Micro("stmatrix", module(body), inputs, size, smem_bytes=TILES + size)


# -- mbarrier

MBARRIER_STEPS = [
    "init 2",
    "arrive",
    "arrive again: phase 0 completes",
    "arrive twice: phase 1 completes",
    "bytes before they are expected, polled for long",
    "they are expected, and the only arrival",
    "32768 bytes expected, then the only arrival, polled for long",
    "half of the bytes, polled for long",
    "the other half",
]
MBARRIER_POLLS = 4000
_MBARRIER_BOX = 16384


def mbarriers() -> list[Micro]:
    """One thread's barriers: after each step whether phase parity 0 and 1 test as complete.

    Output: per step two words, the tests with parity 0 and 1. A step "polled for long" tests the
    parity that must not be complete thousands of times, and reports whether it ever was.
    """
    body = ["@%p1 bra done;"]
    row = 0

    def tests(barrier: int) -> None:
        nonlocal row
        for parity in range(2):
            body.append(
                f"mbarrier.test_wait.parity.shared.b64 %p3, [%r2+{barrier}], {parity};"
            )
            body.append("selp.b32 %r20, 1, 0, %p3;")
            body.append(f"st.global.b32 [%d2+{8 * row + 4 * parity}], %r20;")
        row += 1

    def polls(barrier: int, parity: int) -> None:
        """Row of (ever complete, 2)."""
        nonlocal row
        body.extend(
            [
                "mov.b32 %r21, 0;",
                "mov.b32 %r22, 0;",
                f"poll{row}:",
                f"mbarrier.test_wait.parity.shared.b64 %p3, [%r2+{barrier}], {parity};",
                "selp.b32 %r20, 1, 0, %p3;",
                "or.b32 %r21, %r21, %r20;",
                "add.s32 %r22, %r22, 1;",
                f"setp.lt.s32 %p4, %r22, {MBARRIER_POLLS};",
                f"@%p4 bra poll{row};",
                f"st.global.b32 [%d2+{8 * row}], %r21;",
                "mov.b32 %r20, 2;",
                f"st.global.b32 [%d2+{8 * row + 4}], %r20;",
            ]
        )
        row += 1

    def copy(barrier: int, offset: int) -> None:
        body.append(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            f"[%r2+{TILES + offset}], [%d7, {{%r30, %r30}}], [%r2+{barrier}];"
        )

    body += ["mov.b32 %r30, 0;", "mov.b64 %d6, map;", "cvta.param.u64 %d7, %d6;"]
    for barrier, count in ((0, 2), (8, 1), (16, 1)):
        body.append(f"mbarrier.init.shared.b64 [%r2+{barrier}], {count};")
    body.append("fence.mbarrier_init.release.cluster;")
    body.append("fence.proxy.async.shared::cta;")
    tests(0)
    body.append("mbarrier.arrive.shared.b64 %d8, [%r2];")
    tests(0)
    body.append("mbarrier.arrive.shared.b64 %d8, [%r2];")
    tests(0)
    body += ["mbarrier.arrive.shared.b64 %d8, [%r2];"] * 2
    tests(0)
    copy(8, 0)
    polls(8, 0)
    body.append(f"mbarrier.arrive.expect_tx.shared.b64 %d8, [%r2+8], {_MBARRIER_BOX};")
    body += wait("expected", "%r2+8", 0)
    tests(8)
    body.append(
        f"mbarrier.arrive.expect_tx.shared.b64 %d8, [%r2+16], {2 * _MBARRIER_BOX};"
    )
    polls(16, 0)
    copy(16, 0)
    polls(16, 0)
    copy(16, _MBARRIER_BOX)
    body += wait("halves", "%r2+16", 0)
    tests(16)
    body.append("done:")
    assert row == len(MBARRIER_STEPS)
    tensor = Tensor(
        "u16", (64, 128), (128,), (64, 128), 128, np.zeros(_MBARRIER_BOX, np.uint8)
    )
    return [
        Micro(
            "mbarrier",
            module(body),
            np.zeros(16, np.uint8),
            8 * row,
            smem_bytes=TILES + 2 * _MBARRIER_BOX,
            tensor=tensor,
        )
    ]


# -- TMA


def _numbered(nbytes: int) -> Bytes:
    """Every 16-bit word differs and none is zero."""
    return as_bytes(np.arange(1, nbytes // 2 + 1, dtype=np.uint16))


def _sentinel(nbytes: int) -> Bytes:
    return np.full(nbytes, 0xA5, np.uint8)


def _tensor_copy_operands(rank: int) -> str:
    return f"[%d7, {{{', '.join(f'%r{30 + i}' for i in range(rank))}}}]"


def _coordinates(rank: int, offset: int) -> list[str]:
    """Loads them from the input and finds the tensor map."""
    return [
        *(f"ld.global.b32 %r{30 + i}, [%d1+{offset + 4 * i}];" for i in range(rank)),
        "mov.b64 %d6, map;",
        "cvta.param.u64 %d7, %d6;",
    ]


def _tma_load(
    name: str,
    tensor: Tensor,
    coordinates: Sequence[int],
    place: int,
    *,
    cluster: int = 1,
) -> Micro:
    """A box to byte `place` after the barriers; the shared memory around it comes out as well.

    In a cluster CTA 0 alone issues the copy, to all.
    """
    rank = len(tensor.dimensions)
    element = 2
    box = int(np.prod(tensor.box)) * element
    size = -(-(place + box) // STEP) * STEP
    inputs = np.concatenate(
        (_sentinel(size), as_bytes(np.array(coordinates, np.int32)))
    )
    body = [
        *fill(size),
        *_coordinates(rank, size),
        "mov.u32 %r40, %cluster_ctarank;",
        "@%p1 bra ready;",
        "mbarrier.init.shared.b64 [%r2], 1;",
        "fence.mbarrier_init.release.cluster;",
        f"mbarrier.arrive.expect_tx.shared.b64 %d8, [%r2], {box};",
        "ready:",
    ]
    multicast, mask = "", ""
    if cluster > 1:
        body += ["barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"]
        body += [f"mov.b16 %h2, {(1 << cluster) - 1};"]
        multicast, mask = ".multicast::cluster", ", %h2"
    else:
        body.append("bar.sync 0;")
    body += [
        "setp.ne.s32 %p5, %r40, 0;",
        "or.pred %p6, %p1, %p5;",
        "@%p6 bra issued;",
        "cp.async.bulk.tensor."
        f"{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{multicast} "
        f"[%r2+{TILES + place}], {_tensor_copy_operands(rank)}, [%r2]{mask};",
        "issued:",
        *wait("landed", "%r2", 0),
        f"mul.lo.s32 %r41, %r40, {size};",
        "cvt.u64.u32 %d9, %r41;",
        "add.s64 %d5, %d2, %d9;",
        *dump(size),
    ]
    directives = f".reqnctapercluster {cluster}, 1, 1\n" if cluster > 1 else ""
    return Micro(
        name,
        module(body, directives=directives),
        inputs,
        size * cluster,
        grid=cluster,
        cluster=cluster,
        smem_bytes=TILES + size,
        tensor=tensor,
        settings={"coordinates": tuple(coordinates), "place": place, "size": size},
    )


def _matrix(
    columns: int, rows: int, pitch: int, box: tuple[int, int], swizzle: int
) -> Tensor:
    """[rows, columns] of 16-bit elements."""
    return Tensor(
        "u16", (columns, rows), (2 * pitch,), box, swizzle, _numbered(2 * pitch * rows)
    )


def _heads(swizzle: int) -> Tensor:
    """(head_dim, seqlen, heads, batch), laid out as [batch, seqlen, heads, head_dim]."""
    dim, length, heads, batch = 64, 21, 3, 2
    strides = (2 * dim * heads, 2 * dim, 2 * dim * heads * length)
    content = _numbered(2 * dim * heads * length * batch)
    return Tensor(
        "u16", (dim, length, heads, batch), strides, (64, 16, 1, 1), swizzle, content
    )


# Coordinates: inside, inside elsewhere, over the lower edges, over the upper edges, out. The first
# is a multiple of 16 bytes: at others the H200 stops with an illegal instruction.
PLACES = (
    (0, 0),
    (8, 3),
    (-8, -2),
    (32, 12),
    (0, 60),
)
# Nor does it store at negative coordinates.
STORE_PLACES = ((0, 0), (8, 3), (32, 12), (0, 15))


def tma_loads() -> list[Micro]:
    cases = []
    for swizzle in (0, 32, 64, 128):
        columns = swizzle // 2 or 24
        tensor = _matrix(40 if columns < 40 else 70, 20, 72, (columns, 10), swizzle)
        for i, coordinates in enumerate(PLACES):
            place = 128 * (3 * i % 8)
            cases.append(
                _tma_load(f"tma_load_{swizzle}_{i}", tensor, coordinates, place)
            )
    for i, coordinates in enumerate(
        [(0, 0, 1, 1), (0, 12, 2, 0), (0, -5, 0, 1), (0, 0, 3, 0)]
    ):
        cases.append(_tma_load(f"tma_load_4d_{i}", _heads(128), coordinates, 1024))
    tensor = _matrix(64, 20, 64, (64, 16), 128)
    cases.append(_tma_load("tma_multicast", tensor, (0, 8), 1024, cluster=2))
    return cases


def _tma_store(
    name: str, tensor: Tensor, coordinates: Sequence[int], place: int
) -> Micro:
    """A box from byte `place` after the barriers; the tensor itself is the result."""
    rank = len(tensor.dimensions)
    box = int(np.prod(tensor.box)) * 2
    size = -(-(place + box) // STEP) * STEP
    content = as_bytes(np.arange(0x8000, 0x8000 + size // 2, dtype=np.uint16))
    inputs = np.concatenate((content, as_bytes(np.array(coordinates, np.int32))))
    body = [
        *fill(size),
        *_coordinates(rank, size),
        "@%p1 bra done;",
        f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group "
        f"{_tensor_copy_operands(rank)}, [%r2+{TILES + place}];",
        "cp.async.bulk.commit_group;",
        "cp.async.bulk.wait_group 0;",
        "done:",
    ]
    settings = {"coordinates": tuple(coordinates), "place": place, "size": size}
    return Micro(
        name,
        module(body),
        inputs,
        16,
        smem_bytes=TILES + size,
        tensor=tensor,
        settings=settings,
    )


def tma_stores() -> list[Micro]:
    cases = []
    for swizzle in (0, 32, 64, 128):
        columns = swizzle // 2 or 24
        tensor = _matrix(40 if columns < 40 else 70, 20, 72, (columns, 10), swizzle)
        for i, coordinates in enumerate(STORE_PLACES):
            place = 128 * (3 * i % 8)
            cases.append(
                _tma_store(f"tma_store_{swizzle}_{i}", tensor, coordinates, place)
            )
    cases.append(_tma_store("tma_store_4d", _heads(128), (0, 12, 2, 1), 1024))
    return cases


# -- wgmma

WGMMA_SMEM = 40960  # [bytes] filled with operands
WGMMA_B = 8192  # [bytes] where B starts; A is before it
_CODE = {0: 0, 128: 1, 64: 2, 32: 3}  # of swizzles, in a matrix descriptor


@dataclass(frozen=True)
class Operand:
    """A matrix descriptor's fields, in bytes, the start relative to the filled part."""

    start: int
    leading: int
    stride: int
    swizzle_bytes: int
    mn_major: bool

    def encode(self) -> int:
        return (
            self.start >> 4
            | (self.leading >> 4) << 16
            | (self.stride >> 4) << 32
            | _CODE[self.swizzle_bytes] << 62
        )


def _k_major(start: int, swizzle: int, k_step: int = 0, spread: int = 1) -> Operand:
    """Groups of eight rows, `spread` times their size apart; k_step: 32-byte steps along k."""
    if swizzle:
        return Operand(start + 32 * k_step, 16, 8 * swizzle * spread, swizzle, False)
    return Operand(
        start, 128, 256, 0, False
    )  # two core matrices along k, then the next rows


def _mn_major(start: int, swizzle: int, rows: int, k_step: int = 0) -> Operand:
    """Blocks as wide as the swizzle, each of 16 k (two groups of eight lines)."""
    if swizzle:
        return Operand(
            start + 16 * swizzle * k_step, 16 * swizzle, 8 * swizzle, swizzle, True
        )
    # Core matrices of 8 by 8: along k all rows come first.
    return Operand(start, 16 * rows, 128, 0, True)


def small_integers(count: int, seed: int) -> NDArray[np.float32]:
    """Exact in every format, and so are sums of their products."""
    return np.random.default_rng(seed).integers(-7, 8, count).astype(np.float32)


def _e4m3() -> NDArray[np.float32]:
    """The value of each code."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    least = mantissa / 8 * 2.0**-6
    values = np.where(exponent, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0), least)
    values[codes & NAN_CODE == NAN_CODE] = np.nan
    return np.where(codes >> 7, -values, values).astype(np.float32)


NAN_CODE = 0x7F
E4M3 = _e4m3()


def encode(values: NDArray[np.float32], dtype: str) -> Bytes:
    """Bits of floats that the format holds exactly (bf16: rounded towards zero)."""
    if dtype == "bf16":
        return as_bytes((values.view(np.uint32) >> 16).astype(np.uint16))
    half = values.astype(np.float16).view(np.uint16)
    if dtype == "f16":
        return as_bytes(half)
    if dtype == "e5m2":
        return as_bytes((half >> 8).astype(np.uint8))
    assert dtype == "e4m3"
    order = np.argsort(E4M3[:NAN_CODE])
    code = order[np.searchsorted(E4M3[order], np.abs(values))]
    assert (E4M3[code] == np.abs(values)).all()
    return as_bytes((code | np.signbit(values) << 7).astype(np.uint8))


def _wgmma(
    name: str,
    n: int,
    b: Operand,
    a: Operand | None = None,
    dtype: str = "bf16",
    *,
    adds: bool = False,
    negates: tuple[int, int] = (1, 1),
    repeats: int = 1,
    values: Callable[[int, int], NDArray[np.float32]] = small_integers,
) -> Micro:
    """One product, or `repeats` that add up; A in registers unless given. [N / 2, thread] out.

    The accumulator starts as the number of the thread; `adds` says whether that counts.
    """
    size = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1}[dtype]
    k = 32 // size
    seed = zlib.crc32(name.encode())
    operands = encode(values(WGMMA_SMEM // size, seed), dtype)
    registers = encode(values(64 * k, seed + 1), dtype)
    words = [
        WGMMA_SMEM,
        WGMMA_SMEM + 4 * 4 * THREADS,
    ]  # where registers and descriptors are
    descriptors = np.array([a.encode() if a else 0, b.encode()], np.uint64)
    inputs = np.concatenate((operands, registers, as_bytes(descriptors)))
    body = [
        *fill(WGMMA_SMEM),
        f"add.s32 %r3, %r2, {TILES};",
        "and.b32 %r3, %r3, 0x3ffff;",
        "shr.u32 %r3, %r3, 4;",
        "cvt.u64.u32 %d3, %r3;",
        f"ld.global.b64 %d4, [%d1+{words[1]}];",
        f"ld.global.b64 %d5, [%d1+{words[1] + 8}];",
        "add.s64 %d4, %d4, %d3;",
        "add.s64 %d5, %d5, %d3;",
        "mul.wide.u32 %d6, %r1, 4;",
        "add.s64 %d7, %d1, %d6;",
        "add.s64 %d8, %d2, %d6;",
        *(
            f"ld.global.b32 %r{10 + i}, [%d7+{words[0] + 4 * THREADS * i}];"
            for i in range(4)
        ),
        "cvt.rn.f32.u32 %f1, %r1;",
        "mov.b32 %r5, %f1;",
        *(f"mov.b32 %acc{i}, %r5;" for i in range(n // 2)),
        f"mov.b32 %r6, {int(adds)};",
        "setp.ne.b32 %p3, %r6, 0;",
        "wgmma.fence.sync.aligned;",
    ]
    held = ", ".join(f"%acc{i}" for i in range(n // 2))
    flags = [str(factor) for factor in negates]
    if size == 2:
        flags += [str(int(a.mn_major))] if a else []
        flags += [str(int(b.mn_major))]
    first = "%d4" if a else "{%r10, %r11, %r12, %r13}"
    for repeat in range(repeats):
        if repeat == 1:
            body.append("setp.eq.b32 %p3, %r1, %r1;")
        body.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{dtype}.{dtype} "
            f"{{{held}}}, {first}, %d5, %p3, {', '.join(flags)};"
        )
    body += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    for i in range(n // 2):
        body.append(f"st.global.b32 [%d8+{4 * THREADS * i}], %acc{i};")
    return Micro(
        name,
        module(body, accumulators=n // 2),
        inputs,
        4 * THREADS * (n // 2),
        smem_bytes=TILES + WGMMA_SMEM,
        settings={
            "n": n,
            "k": k,
            "a": a,
            "b": b,
            "dtype": dtype,
            "adds": adds,
            "negates": negates,
            "repeats": repeats,
        },
    )


def _fractions(count: int, seed: int) -> NDArray[np.float32]:
    """About as normal deviates are spread, with as many bits as a bf16 holds."""
    values = (
        np.random.default_rng(seed).uniform(-1, 1, (3, count)).sum(0).astype(np.float32)
    )
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def wgmma() -> list[Micro]:
    cases = []
    for swizzle in (0, 32, 64, 128):
        a, b = _k_major(0, swizzle), _k_major(WGMMA_B, swizzle)
        cases.append(_wgmma(f"wgmma_k_{swizzle}", 32, b, a))
        a, b = _mn_major(0, swizzle, 64), _mn_major(WGMMA_B, swizzle, 64)
        cases.append(_wgmma(f"wgmma_mn_{swizzle}", 64, b, a))
    a = _k_major(0, 128)
    for n in (8, 16, 96, 256):
        cases.append(_wgmma(f"wgmma_n{n}", n, _k_major(WGMMA_B, 128), a))
    for k_step in (1, 2, 3):
        a, b = _k_major(0, 128, k_step), _k_major(WGMMA_B, 128, k_step, spread=2)
        cases.append(_wgmma(f"wgmma_k_step{k_step}", 32, b, a, "f16"))
    b = _mn_major(WGMMA_B, 128, 128, k_step=1)
    cases.append(_wgmma("wgmma_rs_mn", 128, b))
    cases.append(_wgmma("wgmma_rs_mn_n256", 256, _mn_major(WGMMA_B, 128, 256)))
    cases.append(_wgmma("wgmma_rs_k_f16", 64, _k_major(WGMMA_B, 64), dtype="f16"))
    for dtype in ("e4m3", "e5m2"):
        a, b = _k_major(0, 128, 1), _k_major(WGMMA_B, 128)
        cases.append(_wgmma(f"wgmma_{dtype}", 32, b, a, dtype))
        cases.append(_wgmma(f"wgmma_rs_{dtype}", 32, b, dtype=dtype))
    a, b = _k_major(0, 128), _k_major(WGMMA_B, 128)
    cases.append(_wgmma("wgmma_adds", 16, b, a, adds=True))
    cases.append(_wgmma("wgmma_negates_a", 16, b, a, adds=True, negates=(-1, 1)))
    cases.append(_wgmma("wgmma_negates_b", 16, b, a, adds=True, negates=(1, -1)))
    cases.append(_wgmma("wgmma_rounding", 32, b, a, repeats=8, values=_fractions))
    return cases


# Each group runs in a process of its own.
def _codes(kind: str, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Of e4m3 numbers whose sums show how products are aligned, cut and added."""
    finite = np.flatnonzero(np.isfinite(E4M3))
    if kind == "any":
        return rng.choice(finite, count)
    if kind == "positive":
        return rng.integers(5, 8, count) << 3 | rng.integers(0, 8, count)
    if kind == "sparse":  # few products that are not 0, some of them large
        none = rng.random(count) < 0.85
        return np.where(none, rng.integers(0, 2, count) << 7, rng.choice(finite, count))
    if kind == "zeros":  # which meet large numbers, beside small products
        none, large = rng.random(count) < 0.5, rng.random(count) < 0.2
        some = np.where(large, 0x7E, rng.integers(8, 40, count))
        return np.where(none, 0, some) | rng.integers(0, 2, count) << 7
    sign = rng.integers(0, 2, count) << 7
    if kind == "subnormal":
        return sign | rng.integers(0, 24, count)
    assert kind == "near"  # exponents of normal deviates
    return sign | rng.integers(3, 9, count) << 3 | rng.integers(0, 8, count)


def sums() -> list[Micro]:
    """Products of e4m3 numbers that fp32 does not add exactly, up to 24 on one accumulator."""
    a, b = _k_major(0, 128), _k_major(WGMMA_B, 128)
    micros = []
    for kind in ("near", "positive", "subnormal", "zeros", "sparse", "any"):

        def values(count: int, seed: int, kind: str = kind) -> NDArray[np.float32]:
            return E4M3[_codes(kind, count, np.random.default_rng(seed))]

        name = f"wgmma_sum_{kind}"
        for repeats, adds in ((1, False), (1, True), (2, True), (24, False)):
            more = {"repeats": repeats, "adds": adds, "values": values}
            micros.append(
                _wgmma(f"{name}_{repeats}_{int(adds)}", 64, b, a, "e4m3", **more)
            )
        micros.append(
            _wgmma(f"{name}_rs", 64, b, None, "e4m3", repeats=3, values=values)
        )
    return micros


GROUPS: dict[str, Callable[[], list[Micro]]] = {
    "arithmetic": arithmetic,
    "warps": warps,
    "mbarriers": mbarriers,
    "tma_loads": tma_loads,
    "tma_stores": tma_stores,
    "wgmma": wgmma,
    "sums": sums,
}


def everything() -> list[Micro]:
    return [micro for group in GROUPS.values() for micro in group()]
