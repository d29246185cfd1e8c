# SPDX-License-Identifier: Apache-2.0
"""Kernels around tcgen05.mma: they fill shared and tensor memory, multiply, and dump the latter.

What these helpers know of layouts is written from the manual's tables, element by element, and
shares nothing with the emulator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from fmha_gen.emulator.scheduler import Schedule

from .kernels import execute

BASE = 1024  # where the kernel's shared memory begins
DATA = 2048  # where the image of shared memory goes, in it
LANES = 128

SETUP = """
mov.b32 %r30, smem; mov.u32 %r32, %cluster_ctarank;
setp.lt.u32 %p1, %r1, 32; setp.eq.u32 %p2, %r1, 0; setp.eq.u32 %p3, %r32, 0;
and.pred %p4, %p2, %p3;
shl.b32 %r35, %r1, 16; and.b32 %r35, %r35, 0x600000;
@!%p2 bra FILL;
mbarrier.init.shared.b64 [%r30+8], 1; mbarrier.init.shared.b64 [%r30+16], 128;
fence.mbarrier_init.release.cluster;
FILL:
ld.param.b64 %rd10, [k_param_1]; shl.b32 %r36, %r1, 4; mad.lo.s32 %r37, %r32, {nbytes}, %r36;
mul.wide.u32 %rd11, %r37, 1; add.s64 %rd10, %rd10, %rd11; add.s32 %r36, %r36, %r30;
mov.b32 %r38, 0;
COPY:
ld.global.v4.b32 {{%r40, %r41, %r42, %r43}}, [%rd10];
st.shared.v4.b32 [%r36+{data}], {{%r40, %r41, %r42, %r43}};
add.s64 %rd10, %rd10, 2048; add.s32 %r36, %r36, 2048; add.s32 %r38, %r38, 2048;
setp.lt.u32 %p5, %r38, {nbytes}; @%p5 bra COPY;
fence.proxy.async.shared::cta;
@!%p1 bra ALLOCATED;
tcgen05.alloc.cta_group::{ctas}.sync.aligned.shared::cta.b32 [%r30], {columns};
tcgen05.relinquish_alloc_permit.cta_group::{ctas}.sync.aligned;
ALLOCATED: bar.sync 0;
ld.shared.b32 %r31, [%r30];
add.s32 %r33, %r31, %r35;
"""
# %r30 shared memory, %r31 tensor memory, %r33 that of this warp's lanes, %p4 thread 0 of CTA 0.

POUR = """
ld.param.b64 %rd10, [k_param_2]; mad.lo.s32 %r37, %r32, {image}, %r1; mul.wide.u32 %rd11, %r37, 4;
add.s64 %rd10, %rd10, %rd11; mov.b32 %r38, 0; mov.b32 %r34, %r33;
POURING:
ld.global.b32 %r40, [%rd10]; ld.global.b32 %r41, [%rd10+512];
ld.global.b32 %r42, [%rd10+1024]; ld.global.b32 %r43, [%rd10+1536];
tcgen05.st.sync.aligned.32x32b.x4.b32 [%r34], {{%r40, %r41, %r42, %r43}};
add.s64 %rd10, %rd10, 2048; add.s32 %r34, %r34, 4; add.s32 %r38, %r38, 4;
setp.lt.u32 %p5, %r38, {columns}; @%p5 bra POURING;
tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;
"""

CLUSTER = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"

WAIT = """
WAIT: mbarrier.try_wait.parity.shared.b64 %p5, [%r30+8], 0; @!%p5 bra WAIT;
tcgen05.fence::after_thread_sync;
"""

DUMP = """
mad.lo.s32 %r37, %r32, {image}, %r1; mul.wide.u32 %rd11, %r37, 4; add.s64 %rd10, %rd1, %rd11;
mov.b32 %r38, 0; mov.b32 %r34, %r33;
DUMPING:
tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r40, %r41, %r42, %r43}}, [%r34];
tcgen05.wait::ld.sync.aligned;
st.global.b32 [%rd10], %r40; st.global.b32 [%rd10+512], %r41;
st.global.b32 [%rd10+1024], %r42; st.global.b32 [%rd10+1536], %r43;
add.s64 %rd10, %rd10, 2048; add.s32 %r34, %r34, 4; add.s32 %r38, %r38, 4;
setp.lt.u32 %p5, %r38, {columns}; @%p5 bra DUMPING;
"""

FREE = """
tcgen05.fence::before_thread_sync; {barrier}
@!%p1 bra DONE;
tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 %r31, {columns};
DONE:
"""


def parts(*, ctas: int = 1, columns: int = 32, nbytes: int = 2048) -> dict[str, str]:
    """The pieces of a kernel: setup, pour, sync, wait, dump, free."""
    values = {
        "ctas": ctas,
        "columns": columns,
        "nbytes": nbytes,
        "image": columns * LANES,
        "data": DATA - BASE,
        "barrier": CLUSTER if ctas == 2 else "bar.sync 0;",
    }
    return {
        "setup": SETUP.format(**values),
        "pour": POUR.format(**values),
        "sync": values["barrier"] + " tcgen05.fence::after_thread_sync;",
        "wait": WAIT,
        "dump": DUMP.format(**values),
        "free": FREE.format(**values),
    }


def commit(ctas: int = 1, offset: int = 8) -> str:
    """A commit to the mbarrier at this offset: in both CTAs of a pair."""
    if ctas == 1:
        return (
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 "
            f"[%r30+{offset}];"
        )
    return (
        "mov.b16 %rs1, 3; tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster."
        f"multicast::cluster.b64 [%r30+{offset}], %rs1;"
    )


def run(
    body: str,
    shared: np.ndarray,
    tensor: np.ndarray,
    *,
    ctas: int = 1,
    schedule: Schedule | None = None,
    **options,
):
    """Runs a body with shared memory [ctas, bytes] and tensor memory [ctas, columns, 128].

    Returns (what it wrote, like `tensor`; the result).
    """
    out, result = execute(
        body,
        np.ascontiguousarray(shared),
        np.ascontiguousarray(tensor),
        out=np.zeros(tensor.size, np.uint32),
        grid=ctas,
        cluster=ctas,
        smem_bytes=DATA - BASE + shared.shape[1],
        target="sm_100a",
        schedule=schedule,
        **options,
    )
    return out.reshape(tensor.shape), result


# --- matrices in shared memory ----------------------------------------------------------------

LAYOUT_CODES = {0: 0, 128: 2, 64: 4, 32: 6}


@dataclass(frozen=True)
class Matrix:
    """Where a matrix [rows, k] of a CTA lies; all numbers in bytes."""

    start: int
    size: int  # of an element
    rows: int
    k: int
    mn_major: bool
    swizzle: int  # 0, 32, 64, 128
    padding: int = 0  # between groups of eight rows (K-major) or k (MN-major)

    @property
    def width(self) -> int:
        """Of one row of what is contiguous."""
        return self.swizzle or 16

    @property
    def stride(self) -> int:
        """From one core matrix to the next along the rows, or along k when MN-major."""
        return 8 * self.width + self.padding

    @property
    def leading(self) -> int:
        """From one block of `width` to the next."""
        groups = (self.k if self.mn_major else self.rows) // 8
        return groups * self.stride

    @property
    def nbytes(self) -> int:
        extent = self.rows if self.mn_major else self.k
        return -(-extent * self.size // self.width) * self.leading

    def address(self, row: int, k: int) -> int:
        """Of an element."""
        across, down = (row, k) if self.mn_major else (k, row)
        block, inside = divmod(across * self.size, self.width)
        group, line = divmod(down, 8)
        address = (
            self.start
            + block * self.leading
            + group * self.stride
            + line * self.width
            + inside
        )
        for bit in range({0: 0, 32: 1, 64: 2, 128: 3}[self.swizzle]):
            address ^= (address >> (7 + bit) & 1) << (4 + bit)
        return address

    def advance(self, k: int) -> int:
        """How far the descriptor's start moves to begin at this k."""
        if self.mn_major:
            return k // 8 * self.stride
        block, inside = divmod(k * self.size, self.width)
        return block * self.leading + inside

    def descriptor(self, k: int = 0) -> int:
        """Of the part that begins at this k."""
        leading, stride = self.leading, self.stride
        if self.mn_major and not self.swizzle:
            leading, stride = stride, leading
        return (
            (self.start + self.advance(k)) >> 4
            | leading >> 4 << 16
            | stride >> 4 << 32
            | 1 << 46
            | LAYOUT_CODES[self.swizzle] << 61
        )

    def put(self, image: np.ndarray, bits: np.ndarray) -> None:
        """Writes elements, [rows, k], into an image that begins at DATA."""
        view = image.view(bits.dtype)
        for (row, k), value in np.ndenumerate(bits):
            view[(self.address(row, k) - DATA) // self.size] = value

    def at(self, start: int) -> Matrix:
        """The same somewhere else."""
        return replace(self, start=start)


KIND_CODES = {
    "f16": ("f16", 0),
    "bf16": ("f16", 1),
    "tf32": ("tf32", 2),
    "e4m3": ("f8f6f4", 0),
    "e5m2": ("f8f6f4", 1),
}


def instruction_descriptor(
    m: int, n: int, a: str, b: str, *, a_mn=False, b_mn=False, negate=(0, 0)
) -> int:
    """With an accumulator of float32."""
    return (
        1 << 4
        | KIND_CODES[a][1] << 7
        | KIND_CODES[b][1] << 10
        | negate[0] << 13
        | negate[1] << 14
        | int(a_mn) << 15
        | int(b_mn) << 16
        | n >> 3 << 17
        | m >> 4 << 24
    )


def mma(
    ctas: int,
    kind: str,
    d: int,
    a: int | str,
    b: int,
    descriptor: int,
    accumulate: bool,
    suffix: str = "",
) -> str:
    """One tcgen05.mma to column d; `a` is a descriptor or `[%r31+column]`."""
    first = a if isinstance(a, str) else "%rd20"
    load = "" if isinstance(a, str) else f"mov.b64 %rd20, {a:#x};"
    return (
        f"{load} mov.b64 %rd21, {b:#x}; mov.b32 %r60, {descriptor:#x};\n"
        f"tcgen05.mma.cta_group::{ctas}.kind::{kind}{suffix} [%r31+{d}], {first}, %rd21, %r60, "
        f"{int(accumulate)};\n"
    )
