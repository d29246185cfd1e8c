# SPDX-License-Identifier: Apache-2.0
"""The process behind `launch.HostProgram`: compiles a module, runs its host function, tells.

``python -m fmha_gen.emulator.host_process MODULE.py [--files REQUESTS ANSWERS]`` writes a
line of JSON when the module is compiled; then each line read, a call of its public function (see
`launch.call`) or a list of arguments of the host function, is answered by a line with what it
launched. Lines come from standard input and go to standard output, unless files are named. The
environment, `CUTE_DSL_LIBS` above all, is set by the caller.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import json
import os
import re
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO

from . import dlpack, elf
from .launch import LIBRARIES, RUNTIME_FUNCTIONS, Argument, Called, Launch
from .ptx import Module, parse_kernels

SUCCESS = 0  # cudaSuccess
INVALID_VALUE = 1  # cudaErrorInvalidValue
HANDLE = 0x1000  # of the one library; any value but null
CLUSTER_DIMENSION = 4  # cudaLaunchAttributeClusterDimension
PROGRAMMATIC = 6  # cudaLaunchAttributeProgrammaticStreamSerialization

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
_OfLibrary = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_OfLibraryAndDevice = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_RaiseParts = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int
)

# The number of a GPU with n multiprocessors is this + n: host code may remember by number what it
# asked of a device.
FIRST_DEVICE = 1000


class Runtime:
    """The CUDA runtime as host code sees it; it launches nothing and writes down what it would."""

    def __init__(self, library: str, major: int) -> None:
        """Fill in the library; major: of the compute capability it claims."""
        self.launches: list[Launch] = []
        self.problems: list[str] = []
        self.kernels: Mapping[str, Module] = {}  # once they are compiled
        self._names: list[ctypes.Array[ctypes.c_char]] = []
        self.device = 0  # the current one
        self._loaded: list[Any] = []
        self._attributes = DEVICES[major]
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
            "_cudaGetDevice": c_function(self._get_device, _IntOut),
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
            "_cudaSetDevice": c_function(self._set_device, integer),
            "cuda_dialect_init_library_once": c_function(
                self._init_once, _Pointers, _OfLibrary, _OfLibraryAndDevice, address
            ),
            "cuda_dialect_unload_library_once": c_function(self._ignore),
            "CuteDSLRT_TVMFFISetRaisedCudaError": c_function(
                self._raise, _RaiseParts, integer
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

    def attribute(self, attribute: int, device: int) -> int:
        """Of a device, as the driver and the runtime number both."""
        if attribute not in self._attributes:
            raise KeyError(f"the host asked for device attribute {attribute}")
        if attribute == MULTIPROCESSORS and device > FIRST_DEVICE:
            return device - FIRST_DEVICE
        return self._attributes[attribute]

    def _device_attribute(self, value: Any, attribute: int, device: int) -> int:
        value[0] = self.attribute(attribute, device)
        return SUCCESS

    def _get_device(self, value: Any) -> int:
        value[0] = self.device
        return SUCCESS

    def _set_device(self, device: int) -> int:
        if device != self.device:
            raise ValueError(f"the host left device {self.device} for {device}")
        return SUCCESS

    def _init_once(
        self,
        state: Any,
        init: Callable[[int], int],
        load: Callable[[int, int], int],
        _tell: int,
    ) -> int:
        """Load the module at its first launch; `state` is null until then."""
        if not state[0]:
            library = ctypes.c_void_p()
            self._loaded.append(library)
            for status in (
                init(ctypes.addressof(library)),
                load(ctypes.addressof(library), self.device),
            ):
                if status != SUCCESS:
                    raise ValueError(f"the module does not load: {status}")
            state[0] = library.value
        return SUCCESS

    def _raise(self, tell: Callable[..., None], code: int) -> int:
        text = (ctypes.c_char_p * 1)(f"CUDA runtime error {code}".encode())
        tell(b"RuntimeError", text, len(text))
        return SUCCESS

    def _launch_plain(self) -> int:
        raise ValueError(
            "the host launched by cudaLaunchKernel, not cudaLaunchKernelEx"
        )

    def _launch(self, pointer: Any, kernel: int, parameters: Any) -> int:
        config = pointer[0]
        cluster, programmatic = (1, 1, 1), False
        for attribute in config.attributes[: config.attribute_count]:
            if attribute.id == CLUSTER_DIMENSION:
                cluster = tuple(attribute.value[:3])
            elif attribute.id == PROGRAMMATIC:
                programmatic = bool(attribute.value[0])
            elif any(attribute.value[:1]):  # the DSL passes others that are off
                raise ValueError(f"the host set launch attribute {attribute.id}")
        name = ctypes.string_at(kernel).decode()
        module = self.kernels[name]
        params = bytearray(module.param_bytes)
        for index, param in enumerate(module.params):
            held = ctypes.string_at(parameters[index], param.size)
            params[param.offset : param.offset + param.size] = held
        self.launches.append(
            Launch(
                kernel=name,
                grid=tuple(config.grid),
                block=tuple(config.block),
                cluster=cluster,
                smem_bytes=config.smem_bytes,
                params=bytes(params),
                stream=config.stream or 0,
                programmatic=programmatic,
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
        return driver.CUstream(value)
    raise ValueError(f"no such kind of argument: {kind}")


def stand_in_for_the_driver(runtime: Runtime) -> None:
    """What host code asks the driver from Python is answered as the runtime answers it."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    success = driver.CUresult.CUDA_SUCCESS

    def attribute(key: Any, device: Any) -> tuple[Any, int]:
        return success, runtime.attribute(int(key), int(device))

    driver.cuCtxGetDevice = lambda: (success, driver.CUdevice(runtime.device))
    driver.cuDeviceGetAttribute = attribute


class Compiled:
    """Stands in for `cute.compile`, and keeps what that makes."""

    def __init__(self, compile_: Any) -> None:
        """compile_: the DSL's."""
        self._compile = compile_
        self.last: Any = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Compile, as the DSL does."""
        self.last = self._compile(*arguments, **options)
        return self.last

    def __getattr__(self, name: str) -> Any:
        """What else the DSL's has."""
        return getattr(self._compile, name)


def load(path: Path) -> ModuleType:
    """Import a file under its stem."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


class Caller:
    """Calls the public function of a module as a call says."""

    def __init__(self, module: Any, runtime: Runtime) -> None:
        """module: loaded and compiled."""
        self._module, self._runtime = module, runtime

    def __call__(self, made: Mapping[str, Any]) -> Called:
        """What came of it; raises what the function raised, but for ValueError."""
        device = self._runtime.device = FIRST_DEVICE + made["sm_count"]
        function = made["function"]
        outputs = made["outputs"] | dict.fromkeys(made["scratch"], 1)
        allocated: dict[str, Any] = {}

        def allocate(shape: tuple[int, ...], dtype: str) -> Mapping[str, Any]:
            alike = [name for name, rank in outputs.items() if rank == len(shape)]
            name = next((name for name in alike if name not in allocated), None)
            if name is None:
                named = " and ".join(alike) or f"nothing with {len(shape)} dimensions"
                raise RuntimeError(f"{named} was to be allocated, and once more")
            steps = [1]
            for size in reversed(shape[1:]):
                steps.insert(0, steps[0] * size)
            told: dict[str, Any] = {
                "dtype": dtype,
                "address": made["torch"][name],
                "shape": list(shape),
                "strides": steps,
                "byte_offset": 0,
                "device": None,
            }
            allocated[name] = told
            return told

        def tensor(told: Mapping[str, Any]) -> dlpack.Tensor:
            if made["torch"]:
                return dlpack.TorchTensor(told, device, allocate)
            return dlpack.Tensor(told, device)

        tensors = {name: tensor(told) for name, told in made["tensors"].items()}
        inputs = {name: x for name, x in tensors.items() if name not in outputs}
        options: dict[str, Any] = {
            **{name: x for name, x in tensors.items() if name in outputs},
            **made["scalars"],
        }
        stream = made["stream"]
        if stream is not None:
            as_object = made["stream_object"]
            options["stream"] = (
                SimpleNamespace(cuda_stream=stream) if as_object else stream
            )
        options |= {name: inputs.pop(name) for name in made["keywords"]}
        torch = made["torch"] and dlpack.torch_module(device, made["torch"]["stream"])
        refusal, result = "", ()
        with dlpack.replaced(sys.modules, "torch", torch):
            try:
                result = getattr(self._module, function)(*inputs.values(), **options)
            except ValueError as error:
                refusal = str(error)
        launches = tuple(self._runtime.launches)
        if bool(launches) == bool(refusal):
            raise RuntimeError(
                f"{function} launched {'and refused' if refusal else 'nothing'}"
            )
        return Called(
            launches=launches,
            refusal=refusal,
            returned=_addresses(function, result),
            allocated=allocated,
        )


def _addresses(function: str, result: Any) -> tuple[int, ...]:
    """Of what a function returned, one tensor or several."""
    tensors = result if isinstance(result, tuple) else (result,)
    for tensor in tensors:
        if not isinstance(tensor, dlpack.Tensor):
            raise RuntimeError(f"{function} returned {tensor!r}, which is no tensor")
    return tuple(tensor.first for tensor in tensors)


def serve(path: Path, requests: Iterable[str], answers: TextIO) -> None:
    """Compile, then answer each request."""

    def answer(data: dict[str, Any]) -> None:
        answers.write(json.dumps(data) + "\n")
        answers.flush()

    arch = os.environ["CUTE_DSL_ARCH"]
    major = int(re.sub(r"\D", "", arch)) // 10
    # Before anything imports the DSL, which loads the library too.
    runtime = Runtime(os.environ[LIBRARIES], major)
    cute: Any = importlib.import_module("cutlass.cute")
    compiled = cute.compile = Compiled(cute.compile)
    stand_in_for_the_driver(runtime)
    module: Any = load(path)
    module.compile()
    program = compiled.last
    program.num_devices = 1  # it would ask the driver
    ptx = program.artifacts.PTX
    runtime.kernels = parse_kernels(ptx)
    names = list(program.execution_args.signature.parameters)
    tensors = module.arguments() if hasattr(module, "arguments") else {}
    expected = [tensors.get(name) for name in names]
    caller = Caller(module, runtime)
    answer({"ptx": ptx, "parameters": names})
    for line in requests:
        runtime.launches.clear()
        runtime.problems.clear()
        failure, data = "", {}
        request = json.loads(line)
        try:
            if isinstance(request, dict):
                data = caller(request).to_json()
            elif hasattr(module, "__all__"):
                raise TypeError(
                    "the module has a public function, which is to be called"
                )
            else:
                program(*map(to_dsl, request, expected))
                launches = [launch.to_json() for launch in runtime.launches]
                data = {"launches": launches}
        except Exception as error:
            failure = "".join(
                traceback.format_exception_only(type(error), error)
            ).strip()
        if runtime.problems:
            failure = "; ".join(runtime.problems)
        answer({"error": failure} if failure else data)


def main() -> None:
    """See the module; whatever else prints goes to standard error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module", type=Path)
    parser.add_argument("--files", nargs=2, type=Path)
    options = parser.parse_args()
    if options.files:
        requests, answers = options.files
        with requests.open(encoding="utf-8") as lines, answers.open("w") as told:
            serve(options.module, lines, told)
        return
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(options.module, sys.stdin, told)


if __name__ == "__main__":
    main()
