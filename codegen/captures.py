# SPDX-License-Identifier: Apache-2.0
"""Launches of a generated kernel, captured once: what the same text does again is remembered."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import cache, toolchain
from .arch import ARCHITECTURES
from .emulator import ptx
from .emulator.launch import (
    Argument,
    CaptureError,
    Launch,
    NoAnswer,
    open_host_program,
)
from .errors import EnvironmentProblem
from .toolchain import Compiler

# What decides a capture, apart from the kernel's text and the DSL.
SOURCES = tuple(
    f"emulator/{name}.py" for name in ("elf", "host_process", "launch", "ptx")
)

Call = Mapping[str, Argument]


def capture(
    kernel: Path,
    calls: Sequence[Call],
    *,
    arch: str,
    compiler: Compiler | None = None,
) -> tuple[str, list[Launch]]:
    """Return the kernel's PTX and the launch that each call makes.

    arch: the SPEC's. compiler: whose DSL compiles; ours when None. Raises CaptureError when it does
    not compile or launch, EnvironmentProblem when the DSL is missing or the machine takes too long.
    """
    text = kernel.read_text(encoding="utf-8")
    compiler = compiler or toolchain.own_compiler()
    parts = [text, arch, compiler.dsl, cache.source_digest(*SOURCES)]
    if compiler.python != sys.executable:
        parts.append(compiler.python)  # its version does not tell what was patched
    ptx_key = cache.key("ptx", parts)
    keys = [cache.key("launch", [*parts, json.dumps(call)]) for call in calls]
    code: str | None = cache.get(ptx_key)
    found: list[Any] = [cache.get(key) for key in keys]
    if code is None or None in found:
        try:
            with open_host_program(
                kernel, arch=ARCHITECTURES[arch].compile_arch, python=compiler.python
            ) as program:
                code = program.ptx
                found = [program.launch(call).to_json() for call in calls]
        except NoAnswer as slow:
            raise EnvironmentProblem(f"this machine is too slow: {slow}") from slow
        cache.put(ptx_key, code)
        for key, data in zip(keys, found, strict=True):
            cache.put(key, data)
    return code, [Launch.from_json(data) for data in found]


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
