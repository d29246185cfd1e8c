# SPDX-License-Identifier: Apache-2.0
"""Writes per kernel what spares its users the compile: an object and a C header that declares it.

The object holds one TVM-FFI function, named after the sha256 of the kernel's whole file. So a
vendored package loads the object of that very text and of no other, and two versions of a kernel
can be linked into one program. The header says of which text and object it speaks: that
is how a later export knows what is still right.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckFailed
from ..host import files, tools
from ..host.executor import HERE, Executor, Task
from ..ops import operation_of
from . import toolchain
from .kernel_text import read_constants

_HEADER = """\
/* SPDX-License-Identifier: Apache-2.0 */
/* {stem}.o: the kernel of {stem}.py, compiled for {arch} by nvidia-cutlass-dsl {dsl}.
 *
 * text sha256:{text}
 * object sha256:{object}
 *
 * Link it with libtvm_ffi and libcute_dsl_runtime. Where pip installed them, this says:
 *
 *   python -c 'from cutlass.cute import runtime; \
print(*runtime.find_runtime_libraries(enable_tvm_ffi=True))'
 *
 * docs/examples/attention.cpp of fmha-gen is a whole program, with its link line. In C++,
 * tvm::ffi::Function::InvokeExternC(nullptr, {stem}, ...) of <tvm/ffi/function.h>
 * takes DLTensor pointers and numbers as they are, and throws the error.
 *
 * args, {count} of them, each with zero_padding 0 and, in this order:
 *
 *   {tensors}
 *       each kTVMFFIDLTensorPtr with v_ptr, a DLTensor *, or kTVMFFITensor; all on one GPU.
 *   {scalars}
 *       kTVMFFIFloat with v_float64.
 *   {integers}
 *       kTVMFFIInt with v_int64; sm_count: multiprocessors of the GPU, or fewer to leave some to
 *       others.
 *
 * It runs on TVM-FFI's stream of the GPU, the default stream unless
 * TVMFFIEnvSetStream(kDLCUDA, device, stream, NULL) of <tvm/ffi/extra/c_env_api.h> set another.
 *
 * self is NULL, result a TVMFFIAny of kTVMFFINone. Returns 0; or -1, and then
 * TVMFFIErrorMoveFromRaised gives the error, whose kind and message TVMFFIErrorCell holds.
 *
 * What differs from {stem}.py in type, shape, device or alignment is refused. Not checked: no size
 * may be 0, strides{free} must be positive, query heads are as many per KV head as stated,
 * and outputs share no memory with another tensor or within themselves.
 */
#pragma once

#include <tvm/ffi/c_api.h>

#ifdef __cplusplus
extern "C"
#endif
    int __tvm_ffi_{symbol}(
        void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result);

/* The object's function has its text's digest in its name; this is it by the kernel's name. */
static inline int {stem}(
    void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {{
  return __tvm_ffi_{symbol}(
      self, args, num_args, result);
}}
"""


@dataclass(frozen=True)
class Source:
    """A kernel's file. arch: what the DSL compiles it for, such as `sm_90a`."""

    stem: str
    text: str
    arch: str


def symbol_of(source: Source) -> str:
    """Name of the object's function, without the prefix that TVM-FFI gives to all."""
    return f"{source.stem}_{_sha256(source.text.encode())}"


def export(
    sources: Iterable[Source], folder: Path, executor: Executor = HERE
) -> dict[str, bool]:
    """Write ``<stem>.o`` and ``<stem>.h`` of every kernel; whether it was written, by stem.

    A pair that is right already stays as it is. Raises CheckFailed when a kernel does not compile,
    EnvironmentProblem when this machine lacks what a compile needs or the folder cannot be written.
    """
    found = list(sources)
    tools.require_dsl()
    tools.require_ffi()
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    todo = [source for source in found if not _is_right(source, folder)]
    tasks = [
        Task(
            source.stem,
            toolchain.compile_object,
            (source.text, source.stem, source.arch, symbol_of(source)),
        )
        for source in todo
    ]
    with contextlib.closing(executor.run(tasks)) as results:
        for number, compiled in results:
            if isinstance(compiled, CheckFailed):
                raise compiled
            _write(todo[number], folder, compiled)
    return {source.stem: source in todo for source in found}


def header(source: Source, compiled: bytes) -> str:
    """The C header of a kernel's object."""
    spec = read_constants(source.text)["SPEC"]
    operation = operation_of(spec)
    numbers = operation.numbers(spec)
    scalars = [scalar.name for scalar in operation.scalars]
    scalars += [x.name for x in numbers if x.dtype == "fp32"]
    integers = [*(x.name for x in numbers if x.dtype == "int32"), "sm_count"]
    free = [x.name for x in operation.tensors(spec) if not x.tma]
    return _HEADER.format(
        stem=source.stem,
        arch=source.arch,
        dsl=tools.require_dsl(),
        text=_sha256(source.text.encode()),
        object=_sha256(compiled),
        tensors="\n *   ".join(operation.header(spec)),
        scalars=", ".join(scalars),
        integers=", ".join(integers),
        free=f" (but of {', '.join(free)})" if free else "",
        count=len(operation.tensors(spec)) + len(scalars) + len(integers),
        symbol=symbol_of(source),
    )


def _files(source: Source, folder: Path) -> tuple[Path, Path]:
    """Of the object and of its header."""
    return folder / f"{source.stem}.o", folder / f"{source.stem}.h"


def _is_right(source: Source, folder: Path) -> bool:
    object_file, header_file = _files(source, folder)
    with files.writing(folder):
        if not (object_file.exists() and header_file.exists()):
            return False
        stated = header_file.read_text(encoding="utf-8", errors="replace")
        return stated == header(source, object_file.read_bytes())


def _write(source: Source, folder: Path, compiled: bytes) -> None:
    object_file, header_file = _files(source, folder)
    with files.writing(folder):
        # The header is last: one that a crash leaves behind does not fit the object.
        files.replace(object_file, compiled, follow=False)
        text = header(source, compiled).encode()
        files.replace(header_file, text, follow=False)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
