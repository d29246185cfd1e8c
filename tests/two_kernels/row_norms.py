# SPDX-License-Identifier: Apache-2.0
"""Rows divided by their sums of squares, by two kernels: the first one writes the sums to a
workspace, from which the second one reads them.
"""

import functools

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_ptr

COLUMNS = 64
WARP = 32
ROWS_PER_CTA = 4  # one per warp

SPEC = {"name": "row_norms", "arch": "sm90"}


@cute.kernel
def add_squares(x: cute.Tensor, sums: cute.Tensor, rows: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    row = block * ROWS_PER_CTA + thread // WARP
    if row < rows:
        first, second = x[row, thread % WARP], x[row, thread % WARP + WARP]
        total = cute.arch.warp_reduction_sum(first * first + second * second)
        if thread % WARP == 0:
            sums[row] = total


@cute.kernel
def divide(x: cute.Tensor, sums: cute.Tensor, out: cute.Tensor):
    column, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    out[row, column] = x[row, column] / sums[row]


@cute.jit
def launch(
    x: cute.Pointer,
    sums: cute.Pointer,
    out: cute.Pointer,
    rows: Int32,
    stream: cuda.CUstream,
):
    for kernel in (add_squares, divide):
        kernel.set_name_prefix(
            f"row_norms_{kernel.__name__}",
            remove_cutlass_symbol=True,
            keep_mangled_name=False,
        )
    matrix = cute.make_layout((rows, COLUMNS), stride=(COLUMNS, 1))
    x = cute.make_tensor(x, matrix)
    out = cute.make_tensor(out, matrix)
    sums = cute.make_tensor(sums, cute.make_layout(rows))
    add_squares(x, sums, rows).launch(
        grid=[cute.ceil_div(rows, ROWS_PER_CTA), 1, 1],
        block=[ROWS_PER_CTA * WARP, 1, 1],
        stream=stream,
    )
    divide(x, sums, out).launch(grid=[rows, 1, 1], block=[COLUMNS, 1, 1], stream=stream)


@functools.cache
def compile():
    pointer = make_ptr(Float32, 0, cute.AddressSpace.gmem, assumed_align=16)
    return cute.compile(launch, pointer, pointer, pointer, Int32(1), cuda.CUstream(0))
