# SPDX-License-Identifier: Apache-2.0
"""The process behind `launch.HostProgram`: compiles a module, runs its host function, tells.

``python -m fmha_gen.emulator.host_process MODULE.py`` writes a line of JSON when the module is
compiled; then each line read, a list of arguments, is answered by a line with the launches that
the host function made of them. The environment, `CUTE_DSL_LIBS` above all, is set by the caller.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import re
import struct
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from . import elf
from .launch import LIBRARIES, RUNTIME_FUNCTIONS, Argument, Launch
from .ptx import Module, parse

SUCCESS = 0  # cudaSuccess
INVALID_VALUE = 1  # cudaErrorInvalidValue
HANDLE = 0x1000  # of the one library; any value but null
CLUSTER_DIMENSION = 4  # cudaLaunchAttributeClusterDimension

# cudaDeviceAttr -> value on a GPU of each major compute capability; host code asks for few
MULTIPROCESSORS, MAJOR, MINOR, SHARED_PER_BLOCK_OPTIN = 16, 75, 76, 97
DEVICES: dict[int, dict[int, int]] = {
    9: {MULTIPROCESSORS: 132, MAJOR: 9, MINOR: 0, SHARED_PER_BLOCK_OPTIN: 232448},
    10: {MULTIPROCESSORS: 148, MAJOR: 10, MINOR: 0, SHARED_PER_BLOCK_OPTIN: 232448},
}


class _Attribute(ctypes.Structure):
    """cudaLaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("value", ctypes.c_uint32 * 16),
    )


class _Config(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint32),
    )


_Pointers = ctypes.POINTER(ctypes.c_void_p)
_IntOut = ctypes.POINTER(ctypes.c_int)


class Runtime:
    """The CUDA runtime as host code sees it; it launches nothing and writes down what it would."""

    def __init__(self, library: str, major: int) -> None:
        """Fill in the library; major: of the compute capability it claims."""
        self.launches: list[Launch] = []
        self.problems: list[str] = []
        self.module: Module | None = None  # once it is compiled
        self._names: list[ctypes.Array[ctypes.c_char]] = []
        self._device = DEVICES[major]
        self._library = ctypes.CDLL(library)
        table = (ctypes.c_void_p * len(RUNTIME_FUNCTIONS)).in_dll(
            self._library, elf.TABLE
        )
        self._callbacks = self._functions()
        for slot, name in enumerate(RUNTIME_FUNCTIONS):
            table[slot] = ctypes.cast(self._callbacks[name], ctypes.c_void_p).value

    def _functions(self) -> dict[str, Any]:
        integer, address, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t

        def c_function(function: Callable[..., int], *types: Any) -> Any:
            return ctypes.CFUNCTYPE(integer, *types)(self._guarded(function))

        return {
            # Eight arguments; only where the handle goes matters.
            "_cudaLibraryLoadData": c_function(self._load, _Pointers),
            "_cudaLibraryGetKernel": c_function(
                self._get_kernel, _Pointers, address, ctypes.c_char_p
            ),
            "_cudaGetDevice": c_function(self._store_zero, _IntOut),
            "_cudaDeviceGetAttribute": c_function(
                self._device_attribute, _IntOut, integer, integer
            ),
            # Static shared memory above all: the DSL puts everything into dynamic memory.
            "_cuKernelGetAttribute": c_function(
                self._store_zero, _IntOut, integer, address, integer
            ),
            "_cudaFuncSetAttribute": c_function(self._ignore),
            "_cudaKernelSetAttributeForDevice": c_function(self._ignore),
            "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": c_function(
                self._one_block, _IntOut, address, integer, size
            ),
            "_cudaLaunchKernel": c_function(self._launch_plain),
            "_cudaLaunchKernelEx": c_function(
                self._launch, ctypes.POINTER(_Config), address, _Pointers
            ),
        }

    def _guarded(self, function: Callable[..., int]) -> Callable[..., int]:
        """An exception cannot leave a callback: it becomes a status, and a problem to tell."""

        def call(*arguments: Any) -> int:
            try:
                return function(*arguments)
            except Exception as error:
                self.problems.append(str(error))
                return INVALID_VALUE

        return call

    def _load(self, library: Any) -> int:
        library[0] = HANDLE
        return SUCCESS

    def _get_kernel(self, kernel: Any, _library: int, name: bytes) -> int:
        # The handle is where we keep the name.
        self._names.append(ctypes.create_string_buffer(name))
        kernel[0] = ctypes.addressof(self._names[-1])
        return SUCCESS

    def _store_zero(self, value: Any, *_: Any) -> int:
        value[0] = 0
        return SUCCESS

    def _one_block(self, blocks: Any, *_: Any) -> int:
        blocks[0] = 1
        return SUCCESS

    def _ignore(self) -> int:
        return SUCCESS

    def _device_attribute(self, value: Any, attribute: int, _device: int) -> int:
        if attribute not in self._device:
            raise ValueError(f"the host asked for device attribute {attribute}")
        value[0] = self._device[attribute]
        return SUCCESS

    def _launch_plain(self) -> int:
        raise ValueError(
            "the host launched by cudaLaunchKernel, not cudaLaunchKernelEx"
        )

    def _launch(self, pointer: Any, kernel: int, parameters: Any) -> int:
        config = pointer[0]
        cluster = (1, 1, 1)
        for attribute in config.attributes[: config.attribute_count]:
            if attribute.id == CLUSTER_DIMENSION:
                cluster = tuple(attribute.value[:3])
            elif any(attribute.value[:1]):  # the DSL passes others that are off
                raise ValueError(f"the host set launch attribute {attribute.id}")
        assert self.module is not None  # nothing is launched before it is compiled
        params = bytearray(self.module.param_bytes)
        for index, param in enumerate(self.module.params):
            held = ctypes.string_at(parameters[index], param.size)
            params[param.offset : param.offset + param.size] = held
        self.launches.append(
            Launch(
                kernel=ctypes.string_at(kernel).decode(),
                grid=tuple(config.grid),
                block=tuple(config.block),
                cluster=cluster,
                smem_bytes=config.smem_bytes,
                params=bytes(params),
            )
        )
        return SUCCESS


class HostTensor:
    """A tensor argument as compiled host code reads it: address, sizes, strides."""

    def __init__(self, expected: Any, address: int, *numbers: int) -> None:
        """expected: what the module was compiled for. numbers: of the first three modes.

        Sizes have 32 bits; those that are known when the module is compiled are left out.
        """
        sizes, strides = numbers[:3], numbers[3:]
        told = [
            size
            for size, known in zip(sizes, expected.shape, strict=False)
            if not isinstance(known, int)
        ]
        packed = struct.pack(f"P{len(told)}i3q", address, *told, *strides)
        self._memory = ctypes.create_string_buffer(packed)

    def __c_pointers__(self) -> list[int]:
        """What the DSL asks an argument for."""
        return [ctypes.addressof(self._memory)]


def to_dsl(argument: Argument, expected: Any) -> Any:
    """The DSL's value of an argument as `launch` describes it.

    expected: the tensor that the module was compiled for, where the argument is one.
    """
    cutlass: Any = importlib.import_module("cutlass")
    kind, value = argument
    if kind == "pointer":
        dtype, address, align = value
        runtime: Any = importlib.import_module("cutlass.cute.runtime")
        space = cutlass.cute.AddressSpace.gmem
        dsl_type = getattr(cutlass, dtype)
        return runtime.make_ptr(dsl_type, address, space, assumed_align=align)
    if kind == "int32":
        return cutlass.Int32(value)
    if kind == "int64s":
        return tuple(map(cutlass.Int64, value))
    if kind == "tensor":
        return HostTensor(expected, *value)
    if kind == "float32":
        return cutlass.Float32(value)
    if kind == "stream":
        driver: Any = importlib.import_module("cuda.bindings.driver")
        return driver.CUstream(0)
    raise ValueError(f"no such kind of argument: {kind}")


def load(path: Path) -> ModuleType:
    """Import a file under its stem."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


def serve(path: Path, requests: Iterable[str], answers: TextIO) -> None:
    """Compile, then answer each request."""

    def answer(data: dict[str, Any]) -> None:
        answers.write(json.dumps(data) + "\n")
        answers.flush()

    arch = os.environ["CUTE_DSL_ARCH"]
    major = int(re.sub(r"\D", "", arch)) // 10
    # Before anything imports the DSL, which loads the library too.
    runtime = Runtime(os.environ[LIBRARIES], major)
    # TVM-FFI would call the same host code through more of the DSL's library than we stand for.
    sys.modules["tvm_ffi"] = None  # type: ignore[assignment]
    module: Any = load(path)
    compiled = module.compile()
    compiled.num_devices = 1  # it would ask the driver
    ptx = compiled.artifacts.PTX
    runtime.module = parse(ptx)
    names = list(compiled.execution_args.signature.parameters)
    tensors = module.arguments() if hasattr(module, "arguments") else {}
    expected = [tensors.get(name) for name in names]
    answer({"ptx": ptx, "parameters": names})
    for request in requests:
        runtime.launches.clear()
        runtime.problems.clear()
        failure = ""
        try:
            compiled(*map(to_dsl, json.loads(request), expected))
        except Exception as error:
            failure = "".join(
                traceback.format_exception_only(type(error), error)
            ).strip()
        if runtime.problems:
            failure = "; ".join(runtime.problems)
        if failure:
            answer({"error": failure})
        else:
            answer({"launches": [launch.to_json() for launch in runtime.launches]})


def main() -> None:
    """Serve on what were standard input and output; whatever else prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(Path(sys.argv[1]), sys.stdin, answers)


if __name__ == "__main__":
    main()
