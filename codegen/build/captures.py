# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels, captured once: what the same text does again is remembered.

A generated kernel is called by its public function, as its users do (`capture`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..arch import ARCHITECTURES
from ..emulator import ptx
from ..emulator.launch import (
    Argument,
    Call,
    Called,
    CaptureError,
    HostProgram,
    Launch,
    NoAnswer,
    expected_stream,
    open_host_program,
)
from ..emulator.tma import MAP_BYTES
from ..errors import EnvironmentProblem
from ..host import cache
from . import toolchain
from .calls import digest, probes
from .toolchain import Compiler

# What decides a capture, apart from the kernel's text and the DSL.
SOURCES = tuple(
    f"emulator/{name}.py" for name in ("dlpack", "elf", "host_process", "launch", "ptx")
)


def capture(
    kernel: Path,
    calls: Sequence[Call],
    *,
    arch: str,
    compiler: Compiler | None = None,
) -> tuple[str, list[Called]]:
    """Return a generated kernel's PTX and what each call of its public function did.

    arch: the SPEC's. compiler: whose DSL compiles; ours when None. Raises CaptureError when it does
    not compile, or neither launches nor refuses; EnvironmentProblem when the DSL is missing or the
    machine takes too long.
    """
    text, found = _captured(kernel, calls, arch, compiler, "call")
    return text, [Called.from_json(data) for data in found]


def capture_launches(
    kernel: Path,
    calls: Sequence[Mapping[str, Argument]],
    *,
    arch: str,
    compiler: Compiler | None = None,
) -> tuple[str, list[tuple[Launch, ...]]]:
    """The same for a module without ``__all__``: the arguments of its host function, by name."""
    text, found = _captured(kernel, calls, arch, compiler, "launch")
    return text, [tuple(map(Launch.from_json, launches)) for launches in found]


def _captured(
    kernel: Path,
    calls: Sequence[Any],
    arch: str,
    compiler: Compiler | None,
    kind: str,
) -> tuple[str, list[Any]]:
    """PTX and plain data by call. kind: call or launch."""
    text = kernel.read_text(encoding="utf-8")
    compiler = compiler or toolchain.own_compiler()
    parts = [text, arch, compiler.dsl, cache.source_digest(*SOURCES)]
    if compiler.python != sys.executable:
        parts.append(compiler.python)  # its version does not tell what was patched
    ptx_key = cache.key("ptx", parts)
    keys = [cache.key("launch", [*parts, kind, json.dumps(call)]) for call in calls]
    code: str | None = cache.get(ptx_key)
    found: list[Any] = [cache.get(key) for key in keys]
    if code is None or None in found:
        try:
            with open_host_program(
                kernel,
                arch=ARCHITECTURES[arch].compile_arch,
                python=compiler.python,
            ) as program:
                code = program.ptx
                found = [_run(program, kind, call) for call in calls]
        except NoAnswer as slow:
            raise EnvironmentProblem(f"this machine is too slow: {slow}") from slow
        cache.put(ptx_key, code)
        for key, data in zip(keys, found, strict=True):
            cache.put(key, data)
    return code, found


def _run(program: HostProgram, kind: str, call: Any) -> Any:
    if kind == "call":
        return program.call(call).to_json()
    return [launch.to_json() for launch in program.launch(call)]


def checked(
    kernel: Path,
    calls: Sequence[Call],
    *,
    arch: str,
    compiler: Compiler | None = None,
) -> tuple[str, list[tuple[Launch, ...]]]:
    """PTX, and by call the launches, of calls that are right, where the host does nothing wrong.

    Raises CaptureError for what `wrong_host` finds, and as `capture` does.
    """
    text, called = capture(kernel, calls, arch=arch, compiler=compiler)
    found = [
        f"call {number}: {finding}"
        for number, (call, each) in enumerate(zip(calls, called, strict=True))
        for finding in wrong_host(call, each)
    ]
    if found:
        raise CaptureError("; ".join(found))
    return text, [each.launched for each in called]


def wrong_host(call: Call, called: Called) -> Iterator[str]:
    """Findings about what a kernel's run does not show: stream, returned tensors, allocations, and
    the sizes of workspaces among these.

    call: one that is right.
    """
    function = call["function"]
    if not called.launches:
        yield f"{function} refused a call that is right: {called.refusal}"
        return
    stream = expected_stream(call)
    for other in dict.fromkeys(each.stream for each in called.launches):
        if other != stream:
            yield f"launched to stream {other:#x}, not {stream:#x}"
    given = called.allocated | call["tensors"]
    outputs, scratch = [*call["outputs"]], call["scratch"]
    if missing := [name for name in (*outputs, *scratch) if name not in given]:
        yield f"{missing[0]} was neither given nor allocated"
        return
    for name in called.allocated.keys() & call["tensors"].keys():
        yield f"{name} was given, and allocated all the same"
    for name in scratch.keys() & called.allocated.keys():
        shape = called.allocated[name]["shape"]
        if shape != [scratch[name]]:
            yield f"{name} was allocated with shape {shape}, not {[scratch[name]]}"
    wanted = tuple(
        given[name]["address"] + given[name]["byte_offset"] for name in outputs
    )
    if called.returned != wanted:
        names, others = (
            ", ".join(map(hex, each)) for each in (called.returned, wanted)
        )
        yield f"{function} returned tensors at {names}, not {' and '.join(outputs)} at {others}"


def compile_kernel(text: str, stem: str, arch: str) -> toolchain.CompileReport:
    """Compile a generated kernel's text and report on it, and on what its calls launch.

    The latter is not known of texts that are not called like those of today. Raises as
    `toolchain.listing` does.
    """
    compiler = toolchain.own_compiler()
    try:
        calls = probes(text)
    except (KeyError, TypeError, SyntaxError):
        calls = []
    found = toolchain.listing(text, stem, arch, calls=calls)
    report = toolchain.report(
        *(found.ptx, found.usage, found.disassembly),
        **{"stem": stem, "arch": arch, "dsl": compiler.dsl},
    )
    if not found.called:
        return report
    launched = launch_digest(ptx.parse_kernels(found.ptx), found.called)
    return replace(report, launch_sha256=launched, calls_sha256=digest(calls))


def launch_digest(kernels: Mapping[str, ptx.Module], called: Sequence[Called]) -> str:
    """The sha256 of what calls launch kernels with, in their order. kernels: their PTX, by name.

    Of the parameters count the bytes that the kernel loads and what tensor maps mean: the others
    hold whatever lay on the host's stack. A call that is refused counts as one, whatever the words.
    """
    loaded = {name: _loaded(module) for name, module in kernels.items()}
    several = len(kernels) > 1 or any(len(each.launches) > 1 for each in called)

    def words(launch: Launch) -> str:
        params = {}
        for param in kernels[launch.kernel].params:
            held = launch.params[param.offset : param.offset + param.size]
            known = sorted(loaded[launch.kernel].get(param.name, ()))
            if param.size == MAP_BYTES:
                known = [*range(MAP_BYTES // 2)]  # the rest says nothing
            params[param.name] = bytes(held[at] for at in known).hex()
        how = (launch.grid, launch.block, launch.cluster, launch.smem_bytes)
        which = (launch.kernel, launch.stream, launch.programmatic)
        told = which if several or launch.programmatic else ()
        return json.dumps([*told, *how, params])

    said = [" ".join(map(words, each.launches)) or "refused" for each in called]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def _loaded(module: ptx.Module) -> dict[str, set[int]]:
    """By parameter, the offsets of the bytes that some ld.param reads."""
    found: dict[str, set[int]] = {}
    for each in module.instructions:
        if each.opcode != "ld" or not each.has("param"):
            continue
        target, address = each.operands
        assert isinstance(address, ptx.Address)
        assert isinstance(address.base, ptx.Symbol)
        count = len(target.elements) if isinstance(target, ptx.Vector) else 1
        start = address.base.offset + address.offset
        size = count * int(each.modifiers[-1].strip("bfsu")) // 8
        found.setdefault(address.base.name, set()).update(range(start, start + size))
    return found


def sources(kernel: Path, code: str, *, arch: str) -> dict[int, str]:
    """PTX line of a kernel's captured code to `file:line` of its text, for findings.

    It compiles the kernel once more, the code being the same whether or not its lines are named.
    Empty when that does not work: a finding then names the PTX line alone.
    """
    compile_arch = ARCHITECTURES[arch].compile_arch
    found: dict[int, str] = {}
    try:
        with open_host_program(kernel, arch=compile_arch, line_info=True) as program:
            located = ptx.parse_kernels(program.ptx)
        for name, module in ptx.parse_kernels(code).items():
            found |= ptx.sources(module, located[name])
    except (CaptureError, ptx.PtxError, KeyError):
        return {}
    return {line: source.rpartition("/")[2] for line, source in found.items()}
