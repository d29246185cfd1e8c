# SPDX-License-Identifier: Apache-2.0
"""Captures the launches of CuTe DSL kernels: PTX, grids and parameters, with no driver or GPU.

The host function that the DSL compiles to machine code computes the grid and the TMA descriptors
and calls the CUDA runtime through a library that `CUTE_DSL_LIBS` names. A process of our own
(`host_process`) puts a library of ours there, whose functions write down what they are asked.

A generated kernel is called as its users call it, by its public function with DLPack tensors:
`HostProgram.call` of a `call`. A module without ``__all__``, which has none, is launched with
the arguments of its host function: `HostProgram.launch`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from . import elf

# What host modules of the DSL call, as they spell it.
RUNTIME_FUNCTIONS = (
    "_cudaLibraryLoadData",
    "_cudaLibraryGetKernel",
    "_cudaGetDevice",
    "_cudaDeviceGetAttribute",
    "_cuKernelGetAttribute",
    "_cudaFuncSetAttribute",
    "_cudaKernelSetAttributeForDevice",
    "_cudaOccupancyMaxActiveBlocksPerMultiprocessor",
    "_cudaLaunchKernel",
    "_cudaLaunchKernelEx",
    # What they call besides through TVM-FFI.
    "_cudaSetDevice",
    "cuda_dialect_init_library_once",
    "cuda_dialect_unload_library_once",
    "CuteDSLRT_TVMFFISetRaisedCudaError",
)
LIBRARIES = "CUTE_DSL_LIBS"
TIMEOUT = 120.0  # [s] for one answer; a compile takes 2 to 5
LAST_LINES = 8  # of a process that failed, shown

Dim3 = tuple[int, int, int]
Argument = tuple[str, Any]
Call = Mapping[str, Any]  # plain data, made by `call`
TensorAt = Mapping[str, Any]  # plain data, made by `tensor_at`


class CaptureError(Exception):
    """The host program could not be compiled or run; the text says what it printed."""


class NoAnswer(CaptureError):
    """The host program took too long: of a slow machine, not of the kernel."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    params: the parameters one after another, each aligned as PTX says. stream: a raw handle.
    programmatic: it may start before the launch before it is over (PDL).
    """

    kernel: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    smem_bytes: int  # dynamic shared memory of a CTA
    params: bytes
    stream: int = 0
    programmatic: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data that `json` takes."""
        return asdict(self) | {"params": self.params.hex()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Launch:
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError for anything else."""
        dims = {name: tuple(data[name]) for name in ("grid", "block", "cluster")}
        return cls(**{**data, **dims, "params": bytes.fromhex(data["params"])})


@dataclass(frozen=True)
class Called:
    """What one call of a public function did.

    launches: in their order; none where it refused. refusal: what its ValueError says, else empty.
    returned: addresses of the first elements of the tensors it returned, in order. allocated: what
    it had PyTorch make, by name, as `tensor_at` describes it.
    """

    launches: tuple[Launch, ...]
    refusal: str
    returned: tuple[int, ...]
    allocated: Mapping[str, TensorAt]

    @property
    def launched(self) -> tuple[Launch, ...]:
        """The launches; CaptureError where it refused."""
        if not self.launches:
            raise CaptureError(f"the kernel refused: {self.refusal}")
        return self.launches

    def to_json(self) -> dict[str, Any]:
        """Plain data that `json` takes."""
        launches = [launch.to_json() for launch in self.launches]
        return {**asdict(self), "launches": launches}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Called:
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError for anything else."""
        launches = tuple(map(Launch.from_json, data["launches"]))
        returned = tuple(data["returned"])
        return cls(**{**data, "launches": launches, "returned": returned})


def tensor_at(
    dtype: str,
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    *,
    byte_offset: int = 0,
    device: tuple[int, int] | None = None,
) -> TensorAt:
    """A tensor that a call takes, of memory that need not be there.

    dtype: bf16, fp16, fp32, int32, e4m3 or uint8. address, byte_offset: [bytes], as DLPack has
    them. strides: [elements]. device: DLPack's type and number; the call's GPU when None.
    """
    return {
        "dtype": dtype,
        "address": address,
        "shape": list(shape),
        "strides": list(strides),
        "byte_offset": byte_offset,
        "device": device and list(device),
    }


def call(
    tensors: Mapping[str, TensorAt],
    *,
    function: str,
    outputs: Mapping[str, int],
    sm_count: int,
    scratch: Mapping[str, int] | None = None,
    scalars: Mapping[str, float] | None = None,
    stream: int | None = None,
    stream_object: bool = False,
    keywords: Sequence[str] = (),
    torch: Mapping[str, int] | None = None,
) -> Call:
    """A call of a module's public function.

    tensors: the inputs in order, and the outputs and workspaces that are given. outputs: all of
    them, as they are returned, and how many dimensions each has. scratch: workspaces, which have
    one, and how many elements each needs. scalars, stream: left out when None. stream_object:
    the stream comes as an object with the attribute ``cuda_stream``, else as a number. keywords:
    the inputs that come by name. torch: the tensors are those of a stand-in for PyTorch, whose
    current ``stream`` this is, and which makes outputs and workspaces at these addresses where they
    are asked of it.
    """
    return {
        "tensors": dict(tensors),
        "function": function,
        "outputs": dict(outputs),
        "scratch": dict(scratch or {}),
        "sm_count": sm_count,
        "scalars": dict(scalars or {}),
        "stream": stream,
        "stream_object": stream_object,
        "keywords": list(keywords),
        "torch": torch and dict(torch),
    }


def expected_stream(made: Call) -> int:
    """The stream that a call must launch to."""
    if made["stream"] is not None:
        return int(made["stream"])
    return int(made["torch"]["stream"]) if made["torch"] else 0


def pointer(dtype: str, address: int, align: int) -> Argument:
    """A pointer into global memory; dtype as the DSL names it, for instance ``BFloat16``."""
    return "pointer", [dtype, address, align]


def int32(value: int) -> Argument:
    """An ``Int32``."""
    return "int32", value


def int64s(values: Sequence[int]) -> Argument:
    """A tuple of ``Int64``."""
    return "int64s", list(values)


def tensor(address: int, sizes: Sequence[int], strides: Sequence[int]) -> Argument:
    """A tensor that the module's ``arguments()`` describes, by the first three of its modes."""
    return "tensor", [address, *sizes, *strides]


def float32(value: float) -> Argument:
    """A ``Float32``."""
    return "float32", value


def stream(handle: int = 0) -> Argument:
    """A ``CUstream`` by its raw handle; the default one is 0."""
    return "stream", handle


class HostProgram:
    """A compiled kernel module, ready to be launched any number of times with other arguments.

    ptx: of its kernels. parameters: what its host function takes, by name and in order.
    """

    def __init__(self, process: _Process) -> None:
        """See `open_host_program`."""
        self._process = process
        compiled = process.answer()
        self.ptx: str = compiled["ptx"]
        self.parameters: tuple[str, ...] = tuple(compiled["parameters"])

    def call(self, made: Call) -> Called:
        """Call the public function, which must launch, or raise ValueError and launch nothing.

        Raises CaptureError for anything else.
        """
        self._process.send(made)
        return Called.from_json(self._process.answer())

    def launch(self, arguments: Mapping[str, Argument]) -> tuple[Launch, ...]:
        """Run the host function and return its launches; arguments it does not take are left out.

        Raises CaptureError when an argument is missing or when the host program fails.
        """
        missing = [name for name in self.parameters if name not in arguments]
        if missing:
            raise CaptureError(f"no value for {', '.join(missing)}")
        self._process.send([arguments[name] for name in self.parameters])
        launches = self._process.answer()["launches"]
        if not launches:
            raise CaptureError("the host function launched nothing")
        return tuple(map(Launch.from_json, launches))


@contextlib.contextmanager
def open_host_program(
    module: Path,
    *,
    arch: str = "sm_90a",
    timeout: float = TIMEOUT,
    python: str = sys.executable,
    line_info: bool = False,
) -> Iterator[HostProgram]:
    """Compile a module in a process of its own, which ends with this context.

    module: a Python file whose ``compile()`` has ``cute.compile`` make something of a host function
    that launches kernels. timeout: seconds for the compile, and then for each launch. python:
    the interpreter whose DSL compiles; of this package it needs nothing installed. line_info:
    whether the PTX says from which line of the module each instruction comes.
    """
    with (
        tempfile.TemporaryDirectory(prefix="fmha-gen-") as folder,
        tempfile.TemporaryFile() as printed,
    ):
        work = Path(folder)
        library = write_runtime(work)
        # Away from what lies beside the module, which may shadow others.
        copy = work / "module" / module.name
        copy.parent.mkdir()
        shutil.copyfile(module, copy)
        child = subprocess.Popen(
            [
                python,
                "-m",
                f"{__package__}.host_process",
                str(copy),
            ],
            cwd=work,
            env=_environment(arch, library, work)
            | _found_by(python, work)
            | ({"CUTE_DSL_LINEINFO": "1"} if line_info else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            encoding="utf-8",
        )
        try:
            yield HostProgram(_Process(child, printed, timeout))
        finally:
            child.kill()
            child.communicate()


def write_runtime(folder: Path) -> Path:
    """Write the library that stands in for the CUDA runtime; `host_process` fills it in."""
    library = folder / "libcuda_capture.so"
    library.write_bytes(elf.shared_library(RUNTIME_FUNCTIONS))
    return library


def self_test() -> None:
    """Load a library of ours and call through it; raises OSError where that does not work."""
    with tempfile.TemporaryDirectory(prefix="fmha-gen-") as folder:
        path = Path(folder) / "libself_test.so"
        path.write_bytes(elf.shared_library(["answer"]))
        library = ctypes.CDLL(str(path))
        callback = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 42)
        table = (ctypes.c_void_p * 1).in_dll(library, elf.TABLE)
        table[0] = ctypes.cast(callback, ctypes.c_void_p).value
        if library.answer() != 42:
            raise OSError(
                "the library that stands in for the CUDA runtime calls nothing"
            )


class _Process:
    """Requests and answers, a line of JSON each."""

    def __init__(
        self, child: subprocess.Popen[str], printed: IO[bytes], timeout: float
    ) -> None:
        self._child, self._printed, self._timeout = child, printed, timeout

    def send(self, request: Any) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        watch = threading.Timer(self._timeout, self._child.kill)
        watch.start()
        line = self._child.stdout.readline()
        in_time = watch.is_alive()
        watch.cancel()
        if not line.endswith("\n"):
            self._child.wait()
            if not in_time:
                raise NoAnswer(f"no answer in {self._timeout:g} s")
            raise CaptureError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CaptureError(answer["error"])
        return answer

    def _last_words(self) -> str:
        self._printed.seek(0)
        lines = self._printed.read().decode(errors="replace").strip().splitlines()
        ending = f"the host process ended with status {self._child.returncode}"
        return "\n  ".join([ending, *lines[-LAST_LINES:]])


def _found_by(python: str, work: Path) -> dict[str, str]:
    """What lets an interpreter find this package; another one finds nothing else of ours."""
    if python == sys.executable:
        return {}
    name = __name__.partition(".")[0]
    (work / name).symlink_to(Path(__file__).resolve().parents[1])
    return {"PYTHONPATH": str(work), "PYTHONHOME": "", "VIRTUAL_ENV": ""}


def _environment(arch: str, library: Path, dump: Path) -> dict[str, str]:
    """Our environment with only our settings of the DSL."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CUTE_DSL_")
    }
    return kept | {
        LIBRARIES: str(library),
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_DUMP_DIR": str(dump),
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_NO_CACHE": "1",
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
