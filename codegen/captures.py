# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels, captured once: what the same text does again is remembered.

A generated kernel is called by its `fmha`, through TVM-FFI as its users do (`capture`), or through
the `bind` that stands in where TVM-FFI is missing; both must launch the same (`disagreements`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import cache, probes, toolchain
from .arch import ARCHITECTURES
from .emulator import ptx
from .emulator.launch import (
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
from .emulator.tma import MAP_BYTES, TensorMap
from .errors import EnvironmentProblem
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
    ffi: bool = True,
) -> tuple[str, list[Called]]:
    """Return a generated kernel's PTX and what each call of its `fmha` did.

    arch: the SPEC's. compiler: whose DSL compiles; ours when None. ffi: whether the kernel finds
    TVM-FFI. Raises CaptureError when it does not compile, or neither launches nor refuses;
    EnvironmentProblem when the DSL is missing or the machine
    takes too long.
    """
    text, found = _captured(kernel, calls, arch, compiler, "fmha", ffi)
    return text, [Called.from_json(data) for data in found]


def capture_launches(
    kernel: Path,
    calls: Sequence[Mapping[str, Argument]],
    *,
    arch: str,
    compiler: Compiler | None = None,
) -> tuple[str, list[Launch]]:
    """The same for a module without `fmha`: the arguments of its host function, by name."""
    text, found = _captured(kernel, calls, arch, compiler, "launch", ffi=False)
    return text, [Launch.from_json(data) for data in found]


def _captured(
    kernel: Path,
    calls: Sequence[Any],
    arch: str,
    compiler: Compiler | None,
    kind: str,
    ffi: bool,
) -> tuple[str, list[Any]]:
    """PTX and plain data by call. kind: fmha or launch."""
    text = kernel.read_text(encoding="utf-8")
    compiler = compiler or toolchain.own_compiler()
    parts = [text, arch, compiler.dsl, cache.source_digest(*SOURCES)]
    if compiler.python != sys.executable:
        parts.append(compiler.python)  # its version does not tell what was patched
    ptx_key = cache.key("ptx", parts)
    way = [kind, str(ffi)]
    keys = [cache.key("launch", [*parts, *way, json.dumps(call)]) for call in calls]
    code: str | None = cache.get(ptx_key)
    found: list[Any] = [cache.get(key) for key in keys]
    if code is None or None in found:
        try:
            with open_host_program(
                kernel,
                arch=ARCHITECTURES[arch].compile_arch,
                python=compiler.python,
                ffi=ffi,
            ) as program:
                code = program.ptx
                found = [_run(program, kind, call) for call in calls]
        except NoAnswer as slow:
            raise EnvironmentProblem(f"this machine is too slow: {slow}") from slow
        cache.put(ptx_key, code)
        for key, data in zip(keys, found, strict=True):
            cache.put(key, data)
    return code, found


def _run(program: HostProgram, kind: str, call: Any) -> dict[str, Any]:
    if kind == "fmha":
        return program.call(call).to_json()
    return program.launch(call).to_json()


def checked(
    kernel: Path,
    calls: Sequence[Call],
    *,
    arch: str,
    compiler: Compiler | None = None,
) -> tuple[str, list[Launch]]:
    """PTX and launches of calls that are right, where nothing is wrong with `fmha` itself.

    Raises CaptureError for what `wrong_host` and `disagreements` find, and as `capture` does.
    """
    text, called = capture(kernel, calls, arch=arch, compiler=compiler)
    found = [
        f"call {number}: {finding}"
        for number, (call, each) in enumerate(zip(calls, called, strict=True))
        for finding in wrong_host(call, each)
    ]
    found += disagreements(kernel, calls, arch=arch, compiler=compiler)
    if found:
        raise CaptureError("; ".join(found))
    return text, [each.launched for each in called]


def wrong_host(call: Call, called: Called) -> Iterator[str]:
    """Findings about what a kernel's run does not show: stream, returned tensor, allocations.

    call: one that is right, of a kernel whose `fmha` returns out.
    """
    if called.launch is None:
        yield f"fmha refused a call that is right: {called.refusal}"
        return
    stream = expected_stream(call)
    if called.launch.stream != stream:
        yield f"launched to stream {called.launch.stream:#x}, not {stream:#x}"
    given = called.allocated | call["tensors"]
    if "out" not in given:
        yield "out was neither given nor allocated"
        return
    for name in called.allocated.keys() & call["tensors"].keys():
        yield f"{name} was given, and allocated all the same"
    out = given["out"]["address"] + given["out"]["byte_offset"]
    if called.returned != (out,):
        names = ", ".join(map(hex, called.returned))
        yield f"fmha returned tensors at {names}, not out at {out:#x}"


def disagreements(
    kernel: Path,
    calls: Sequence[Call],
    *,
    arch: str,
    compiler: Compiler | None = None,
) -> list[str]:
    """Where calls through TVM-FFI and through `bind` do different things; compiles twice.

    Raises as `capture` does.
    """
    text, by_ffi = capture(kernel, calls, arch=arch, compiler=compiler)
    other, by_bind = capture(kernel, calls, arch=arch, compiler=compiler, ffi=False)
    if other != text:
        return ["the PTX with TVM-FFI is not the one without"]
    module = ptx.parse(text)
    found = []
    for number, (one, two) in enumerate(zip(by_ffi, by_bind, strict=True)):
        if bool(one.refusal) != bool(two.refusal):
            ways = f"{one.refusal or 'runs'} / {two.refusal or 'runs'}"
            found.append(f"call {number}: TVM-FFI / bind: {ways}")
        if (one.returned, one.allocated) != (two.returned, two.allocated):
            found.append(f"call {number}: TVM-FFI and bind return different tensors")
        if one.launch and two.launch:
            found += [
                f"call {number}: TVM-FFI and bind launch with different {what}"
                for what in differences(module, one.launch, two.launch)
            ]
    return found


def differences(module: ptx.Module, one: Launch, two: Launch) -> Iterator[str]:
    """What two launches of one kernel differ in. module: its PTX.

    Of the parameters count the bytes that the kernel loads and what tensor maps mean: the others
    hold whatever lay on the host's stack.
    """
    for name in ("kernel", "grid", "block", "cluster", "smem_bytes", "stream"):
        if getattr(one, name) != getattr(two, name):
            yield f"{name}: {getattr(one, name)} and {getattr(two, name)}"
    loaded = _loaded(module)
    for param in module.params:
        place = slice(param.offset, param.offset + param.size)
        first, second = one.params[place], two.params[place]
        if param.size == MAP_BYTES:
            if TensorMap.decode(first) != TensorMap.decode(second):
                yield f"tensor maps {param.name}"
        elif any(first[at] != second[at] for at in loaded.get(param.name, ())):
            yield f"parameters {param.name}"


def compile_kernel(text: str, stem: str, arch: str) -> toolchain.CompileReport:
    """Compile a generated kernel's text and report on it, and on what its `fmha` launches.

    The latter is not known of texts that are not called like those of today. Raises as
    `toolchain.listing` does.
    """
    compiler = toolchain.own_compiler()
    try:
        calls = probes.calls(text)
    except (KeyError, TypeError, SyntaxError):
        calls = []
    found = toolchain.listing(text, stem, arch, calls=calls)
    report = toolchain.report(
        *(found.ptx, found.usage, found.disassembly),
        **{"stem": stem, "arch": arch, "dsl": compiler.dsl},
    )
    if not found.called:
        return report
    digest = launch_digest(ptx.parse(found.ptx), found.called)
    return replace(report, launch_sha256=digest)


def launch_digest(module: ptx.Module, called: Sequence[Called]) -> str:
    """The sha256 of what calls launch a kernel with. module: its PTX.

    As for `differences`, of the parameters count the bytes that the kernel loads and tensor maps.
    A call that is refused counts as one, whatever the words.
    """
    loaded, said = _loaded(module), []
    for each in called:
        if (launch := each.launch) is None:
            said.append("refused")
            continue
        params = {}
        for param in module.params:
            held = launch.params[param.offset : param.offset + param.size]
            known = sorted(loaded.get(param.name, ()))
            if param.size == MAP_BYTES:
                known = [*range(MAP_BYTES // 2)]  # the rest says nothing
            params[param.name] = bytes(held[at] for at in known).hex()
        how = (launch.grid, launch.block, launch.cluster, launch.smem_bytes)
        said.append(json.dumps([*how, params]))
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
    try:
        with open_host_program(kernel, arch=compile_arch, line_info=True) as program:
            found = ptx.sources(ptx.parse(code), ptx.parse(program.ptx))
    except (CaptureError, ptx.PtxError):
        return {}
    return {line: source.rpartition("/")[2] for line, source in found.items()}
