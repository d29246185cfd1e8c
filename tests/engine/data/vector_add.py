# SPDX-License-Identifier: Apache-2.0
"""The smallest module that keeps the generated kernels' contract with the compiler."""

import functools

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_compact_tensor

THREADS = 128

SPEC = {"name": "vector_add", "arch": "sm90"}


@cute.kernel
def add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    c[thread] = a[thread] + b[thread]


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    add.set_name_prefix(
        "vector_add", remove_cutlass_symbol=True, keep_mangled_name=False
    )
    add(a, b, c).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


@functools.cache
def compile():
    vector = make_fake_compact_tensor(Float32, (THREADS,), assumed_align=16)
    return cute.compile(launch, vector, vector, vector)
