# SPDX-License-Identifier: Apache-2.0
"""A kernel that adds vectors, in two CTAs; scalars beside pointers among its arguments."""

import functools

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_ptr

THREADS = 64


@cute.kernel
def add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, scale: Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * THREADS + thread
    c[index] = a[index] + b[index] * scale


@cute.jit
def launch(
    a: cute.Pointer,
    b: cute.Pointer,
    c: cute.Pointer,
    strides: tuple[Int64, Int64],
    blocks: Int32,
    scale: Float32,
    stream: cuda.CUstream,
):
    layout = cute.make_layout(blocks * THREADS, stride=strides[0])
    tensors = [cute.make_tensor(pointer, layout) for pointer in (a, b, c)]
    add(*tensors, scale).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


@functools.cache
def compile():
    vector = make_ptr(Float32, 0, cute.AddressSpace.gmem, assumed_align=4)
    return cute.compile(
        launch,
        *(vector, vector, vector),
        (Int64(0), Int64(0)),
        Int32(1),
        Float32(1.0),
        cuda.CUstream(0),
    )
