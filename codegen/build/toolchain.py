# SPDX-License-Identifier: Apache-2.0
"""Compiles a generated module for its own arch, without a GPU, and reads what came out.

The module is written to a temporary folder (the DSL reads source files) and imported by a fresh
interpreter, so that nothing of one compile reaches the next and a crash or a hang of the compiler
costs one kernel. The DSL dumps PTX and cubin; NVIDIA's disassembler wheels read the cubin.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..arch import compiled_as
from ..emulator import host_process
from ..emulator.launch import LIBRARIES, Call, Called, write_runtime
from ..errors import CheckFailed, EnvironmentProblem, OutOfTime
from ..host import processes, tools
from . import device_code, sass

COMPILE_SECONDS = (
    300  # a kernel takes 2 to 5 s; this is for a hung compiler on a loaded machine
)

# `-c` puts the temporary folder first on sys.path; a path entry of ours would shadow modules there.
_WORKER = """
import importlib.util, sys
path, name, *export = sys.argv[1:]
spec = importlib.util.spec_from_file_location(name, path)
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
made = []
if export:  # compile() returns a function of TVM-FFI, which cannot be exported
    build = module.cute.compile
    module.cute.compile = lambda *args, **options: made.append(build(*args, **options)) or made[0]
module.compile()
for compiled in made:
    compiled.export_to_c(*export)
"""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.MULTILINE)
_SETMAXNREG = re.compile(r"\bsetmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)")
_WAIT = re.compile(r"\bwgmma\.wait_group\.sync\.aligned\s+(\d+)")
_USAGE = re.compile(
    r"\bFunction (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
)


@dataclass(frozen=True)
class LoopReport:
    """A role's loop over KV blocks, once round: every wait succeeds at once, no row is rescaled."""

    role: str  # as the architecture names it
    instructions: Mapping[str, int]  # by class of the architecture, and `total`
    serialised: int  # wgmmas that wait for the k-step before them


@dataclass(frozen=True)
class WgmmaReport:
    """What the source asked for (PTX) beside what ptxas made of it (SASS)."""

    asked_mmas: int
    asked_groups: int
    asked_overlaps: int  # waits that leave a group in flight
    mmas: int
    groups: int
    overlaps: int
    serialised: int


@dataclass(frozen=True)
class KernelReport:
    """Resources of one kernel."""

    entry: str  # its symbol
    registers: int  # per thread at launch, before setmaxnreg
    setmaxnreg: tuple[int, ...]  # sorted, without repeats
    stack_bytes: int
    local_bytes: int
    static_shared_bytes: (
        int  # includes 1024 B that sm_90 and later reserve for the system
    )
    instructions: Mapping[str, int]  # by class of the architecture, and `total`
    loops: tuple[LoopReport, ...]  # by role and address
    wgmma: WgmmaReport

    def to_json(self) -> dict[str, Any]:
        """Plain data that `json` takes."""
        return asdict(self) | {
            "setmaxnreg": list(self.setmaxnreg),
            "loops": [asdict(loop) for loop in self.loops],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelReport:
        """Inverse of `to_json`; raises KeyError or TypeError when it is something else."""
        return cls(
            **{
                **data,
                "setmaxnreg": tuple(data["setmaxnreg"]),
                "loops": tuple(LoopReport(**loop) for loop in data["loops"]),
                "wgmma": WgmmaReport(**data["wgmma"]),
            }
        )


@dataclass(frozen=True)
class CompileReport:
    """What a module compiles to. kernels: in the order of the PTX, at least one."""

    arch: str
    dsl: str
    kernels: tuple[KernelReport, ...]
    ptx_sha256: str
    launch_sha256: str = ""  # see `captures.launch_digest`; empty where it is not known
    calls_sha256: str = ""  # of the calls that it is about, see `calls.digest`

    def to_json(self) -> dict[str, Any]:
        """Plain data that `json` takes: a list `kernels`, or the fields of the only one."""
        data = {name: value for name, value in vars(self).items() if name != "kernels"}
        kernels = [kernel.to_json() for kernel in self.kernels]
        return data | ({"kernels": kernels} if len(kernels) > 1 else kernels[0])

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CompileReport:
        """Inverse of `to_json`; raises KeyError or TypeError when it is something else."""
        if "kernels" not in data:
            own = {each.name for each in fields(cls)}
            alone = {name: value for name, value in data.items() if name not in own}
            module = {name: value for name, value in data.items() if name in own}
            data = {**module, "kernels": [alone]}
        kernels = tuple(map(KernelReport.from_json, data["kernels"]))
        return cls(**{**data, "kernels": kernels})


@dataclass(frozen=True)
class Compiler:
    """An interpreter and the version of the CuTe DSL that it imports."""

    python: str
    dsl: str


@dataclass(frozen=True)
class Listing:
    """What a compile left, as text: PTX, cuobjdump's resource usage and nvdisasm's code."""

    ptx: str
    usage: str
    disassembly: str
    # What the calls of `fmha` did that were asked for; empty where one of them failed.
    called: tuple[Called, ...] = ()


def own_compiler() -> Compiler:
    """This interpreter; EnvironmentProblem when its DSL is missing or unsupported."""
    return Compiler(sys.executable, tools.require_dsl())


def compile_kernel(
    text: str,
    stem: str,
    arch: str = "sm_90a",
    *,
    timeout: float = COMPILE_SECONDS,
    compiler: Compiler | None = None,
) -> CompileReport:
    """Compile a generated module's text and report on its kernels; raises as `listing` does."""
    compiler = compiler or own_compiler()
    found = listing(text, stem, arch, timeout=timeout, compiler=compiler)
    return report(
        found.ptx,
        found.usage,
        found.disassembly,
        stem=stem,
        arch=arch,
        dsl=compiler.dsl,
    )


def listing(
    text: str,
    stem: str,
    arch: str,
    *,
    timeout: float = COMPILE_SECONDS,
    compiler: Compiler | None = None,
    calls: Sequence[Call] = (),
) -> Listing:
    """Compile a module's text and disassemble its kernels.

    compiler: whose DSL compiles, whatever its version; ours, of a supported version, when None.
    The disassemblers are ours. calls: of its `fmha`, made in the process that compiles it, with a
    stand-in for the driver. Raises EnvironmentProblem when DSL or disassemblers are missing or
    unsupported, OutOfTime when the compile takes longer than that, and CheckFailed when the module
    does not import, does not compile or compiles not exactly one host function.
    """
    compiler = compiler or own_compiler()
    paths = {name: tools.require_tool(name) for name in tools.TOOLS}
    with tempfile.TemporaryDirectory(prefix="fmha-gen-") as folder:
        work = Path(folder)
        called: tuple[Called, ...] = ()
        if calls:
            called = _run_host(work, text, stem, arch, timeout, calls)
        else:
            _run_worker(work, text, stem, arch, timeout, python=compiler.python)
        ptx = _only(work / "dump", "ptx", stem).read_text(encoding="utf-8")
        cubin = str(_only(work / "dump", "cubin", stem))
        return Listing(
            ptx,
            _tool_output([str(paths["cuobjdump"]), "--dump-resource-usage", cubin]),
            _tool_output([str(paths["nvdisasm"]), "--print-code", cubin]),
            called,
        )


def compile_object(
    text: str, stem: str, arch: str, symbol: str, *, timeout: float = COMPILE_SECONDS
) -> bytes:
    """Compile a generated module's text to an object file whose TVM-FFI function is the symbol.

    Raises as `compile_kernel` does, EnvironmentProblem also when TVM-FFI is missing.
    """
    tools.require_dsl()
    tools.require_ffi()
    with tempfile.TemporaryDirectory(prefix="fmha-gen-") as folder:
        work = Path(folder)
        target = work / "exported.o"
        _run_worker(work, text, stem, arch, timeout, [str(target), symbol])
        return target.read_bytes()


def report(
    ptx: str, usage: str, disassembly: str, *, stem: str, arch: str, dsl: str
) -> CompileReport:
    """Build the report from the PTX and the disassemblers' output.

    Raises CheckFailed when these do not hold the same kernels, or none.
    """
    _, *pieces = _ENTRY.split(ptx)
    sources = dict(zip(pieces[::2], pieces[1::2], strict=True))
    resources = {name: tuple(map(int, rest)) for name, *rest in _USAGE.findall(usage)}
    code = sass.parse_kernels(disassembly)
    if not sources or not sources.keys() == resources.keys() == code.keys():
        found = [len(each) for each in (sources, resources, code)]
        raise CheckFailed(
            f"{stem}: the PTX holds {found[0]} kernels, the cubin {found[1]}, "
            f"its disassembly {found[2]}"
        )
    kernels = (
        _kernel_report(name, source, resources[name], code[name], arch)
        for name, source in sources.items()
    )
    return CompileReport(
        arch=arch,
        dsl=dsl,
        kernels=tuple(kernels),
        ptx_sha256=device_code.digest(ptx),
    )


def _kernel_report(
    entry: str, ptx: str, resources: tuple[int, ...], kernel: sass.Kernel, arch: str
) -> KernelReport:
    """ptx: the kernel's part of it. resources: registers, stack, shared and local memory."""
    registers, stack, shared, local = resources
    architecture = compiled_as(arch)
    opcodes = [instruction.opcode for instruction in kernel.instructions]
    classes = architecture.sass_classes | {
        name: name
        for name in architecture.mma_classes
        if any(opcode.startswith(name) for opcode in opcodes)
    }
    waits = [int(pending) for pending in _WAIT.findall(ptx)]
    return KernelReport(
        entry=entry,
        registers=registers,
        setmaxnreg=tuple(sorted({int(n) for n in _SETMAXNREG.findall(ptx)})),
        stack_bytes=stack,
        local_bytes=local,
        static_shared_bytes=shared,
        instructions=sass.count(kernel.instructions, classes),
        loops=tuple(
            LoopReport(
                role.role,
                sass.count(sass.iteration(kernel, loop, role.opcode), classes),
                sass.serialised(sass.body(kernel, loop)),
            )
            for role, loop in sass.role_loops(kernel, architecture.role_loops)
        ),
        wgmma=WgmmaReport(
            asked_mmas=ptx.count("wgmma.mma_async."),
            asked_groups=ptx.count("wgmma.commit_group."),
            asked_overlaps=sum(pending > 0 for pending in waits),
            mmas=sum(i.is_wgmma for i in kernel.instructions),
            groups=sum(i.ends_group for i in kernel.instructions),
            overlaps=sum((i.pending or 0) > 0 for i in kernel.instructions),
            serialised=sass.serialised(kernel.instructions),
        ),
    )


def gate(report: CompileReport) -> list[str]:
    """What makes these kernels unfit to ship; empty when they pass."""
    several = len(report.kernels) > 1
    return [
        f"{kernel.entry}: {failure}" if several else failure
        for kernel in report.kernels
        for failure in _unfit(kernel)
    ]


def _unfit(report: KernelReport) -> list[str]:
    counts, wgmma = report.instructions, report.wgmma
    failures = []
    if report.stack_bytes or report.local_bytes:
        failures.append(
            f"uses {report.stack_bytes} B of stack and {report.local_bytes} B of local memory"
        )
    if counts["LDL"] or counts["STL"]:
        failures.append(
            f"spills: {counts['LDL']} local loads, {counts['STL']} local stores"
        )
    if wgmma.serialised:
        failures.append(
            f"serialised wgmma: {wgmma.serialised} of {wgmma.mmas} wait for the k-step before them"
        )
    elif wgmma.mmas == wgmma.asked_mmas and wgmma.groups > wgmma.asked_groups:
        failures.append(
            f"serialised wgmma: {wgmma.groups} groups, the source asks for {wgmma.asked_groups}"
        )
    elif wgmma.asked_overlaps and not wgmma.overlaps:
        failures.append(
            "serialised wgmma: every wait drains, the source leaves groups in flight"
        )
    if "cutlass" in report.entry.lower():
        failures.append(f"kernel symbol holds the word cutlass: {report.entry}")
    return failures


def _run_worker(
    work: Path,
    text: str,
    stem: str,
    arch: str,
    timeout: float,
    export: Sequence[str] = (),
    python: str = sys.executable,
) -> None:
    """Compile in a fresh interpreter, which leaves PTX and cubin in ``work / "dump"``.

    export: path of an object file to write, and the name of its function.
    """
    module = _written(work, text, stem)
    command = [python, "-c", _WORKER, str(module), stem, *export]
    _run(work, command, stem, timeout, _environment(arch, work / "dump", python))


def _run_host(
    work: Path, text: str, stem: str, arch: str, timeout: float, calls: Sequence[Call]
) -> tuple[Called, ...]:
    """The same, by the process that can call `fmha`, too; what the calls did, if none failed."""
    module, requests, answers = _written(work, text, stem), work / "in", work / "out"
    requests.write_text("".join(json.dumps(call) + "\n" for call in calls))
    command = [sys.executable, "-m", host_process.__name__, str(module)]
    command += ["--files", str(requests), str(answers)]
    environment = _environment(arch, work / "dump", sys.executable)
    environment |= {LIBRARIES: str(write_runtime(work))}
    _run(work, command, stem, timeout, environment)
    _compiled, *found = map(json.loads, answers.read_text().splitlines())
    if any("error" in answer for answer in found):
        return ()
    return tuple(map(Called.from_json, found))


def _written(work: Path, text: str, stem: str) -> Path:
    (work / "dump").mkdir()
    module = work / f"{stem}.py"
    module.write_text(text, encoding="utf-8")
    return module


def _run(
    work: Path,
    command: Sequence[str],
    stem: str,
    timeout: float,
    environment: Mapping[str, str],
) -> None:
    ending = processes.run(command, timeout=timeout, env=environment, cwd=work)
    if ending.status is None:
        raise OutOfTime(f"{stem}: compiling took more than {timeout:g} s")
    if ending.status != 0:
        shown = _last_lines(ending.printed.replace(f"{work}{os.sep}", ""))
        raise CheckFailed(f"{stem}: does not compile\n{shown}")


def environment_for(python: str) -> dict[str, str]:
    """Our environment for an interpreter, without settings of the DSL.

    Ours keeps CUTE_DSL_LIBS: the DSL's own start-up hook finds its run-time library through it.
    Another one must find neither our library nor our modules.
    """
    ours = python == sys.executable
    left_out = () if ours else ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in left_out
        and (not name.startswith("CUTE_DSL_") or (ours and name == "CUTE_DSL_LIBS"))
    }


def _environment(arch: str, dump: Path, python: str) -> dict[str, str]:
    return environment_for(python) | {
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_DUMP_DIR": str(dump),
        "CUTE_DSL_KEEP": "ptx,cubin",
        "CUTE_DSL_NO_CACHE": "1",
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }


def _only(folder: Path, suffix: str, stem: str) -> Path:
    found = sorted(folder.glob(f"*.{suffix}"))
    if len(found) != 1:
        raise CheckFailed(
            f"{stem}: expected one module, compile() made {len(found)} {suffix}"
        )
    return found[0]


def _tool_output(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace"
    )
    if done.returncode != 0:
        tool = Path(command[0]).name
        raise EnvironmentProblem(
            f"{tool} failed: {_last_lines(done.stderr, 1).strip()}"
        )
    return done.stdout


def _last_lines(output: str, lines: int = 12) -> str:
    text = _ANSI.sub("", output).strip().splitlines()
    return "\n".join(f"  {line}" for line in text[-lines:])
