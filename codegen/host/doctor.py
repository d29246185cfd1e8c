# SPDX-License-Identifier: Apache-2.0
"""What this machine can do, and what is missing for the rest."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..emulator import launch
from ..errors import EnvironmentProblem
from . import cache, tools

PYTHON_AT_LEAST = (3, 10)


@dataclass(frozen=True)
class Finding:
    """One thing looked at. Without what is `needed`, builds do not run here."""

    name: str
    ok: bool
    needed: bool
    detail: str


def examine() -> list[Finding]:
    """Look at everything; never raises for what is missing."""
    return [
        _python(),
        _asked("CuTe DSL", _dsl, needed=True),
        *(
            _asked(name, functools.partial(_tool, name), needed=True)
            for name in tools.TOOLS
        ),
        _asked("emulator", _emulator, needed=False),
        _asked("GPU", _gpu, needed=False),
        _asked("PyTorch", _pytorch, needed=False),
        _cache(),
    ]


def can_build(findings: list[Finding]) -> bool:
    """Whether `fmha-gen build` works here."""
    return all(finding.ok for finding in findings if finding.needed)


def to_json(findings: list[Finding]) -> dict[str, Any]:
    """Plain data for `--json`."""
    return {
        "can_build": can_build(findings),
        "findings": {
            f.name: {"ok": f.ok, "needed": f.needed, "detail": f.detail}
            for f in findings
        },
    }


def to_text(findings: list[Finding]) -> str:
    """One aligned line per finding."""
    width = max(len(finding.name) for finding in findings)
    return "\n".join(
        f"{f.name:{width}}  {'ok' if f.ok else 'missing' if f.needed else 'none':7}  {f.detail}"
        for f in findings
    )


def _asked(name: str, question: Callable[[], str], *, needed: bool) -> Finding:
    try:
        return Finding(name, True, needed, question())
    except EnvironmentProblem as problem:
        return Finding(name, False, needed, str(problem))


def _python() -> Finding:
    ok = sys.version_info[:2] >= PYTHON_AT_LEAST
    return Finding(
        "Python", ok, True, f"{platform.python_version()} on {platform.machine()}"
    )


def _dsl() -> str:
    version = tools.require_dsl()
    parts = (f"{name} {number}" for name, number in tools.dsl_distributions().items())
    return f"{version}, supported {tools.DSL_RANGE} ({', '.join(parts)})"


def _tool(name: str) -> str:
    return str(tools.require_tool(name))


def _emulator() -> str:
    """Whether a launch can be captured: the library that we write must load and call back."""
    system = f"{platform.system()} {platform.machine()}"
    if system != "Linux x86_64":
        raise EnvironmentProblem(f"emulate runs on Linux x86_64, this is {system}")
    try:
        launch.self_test()
    except OSError as error:
        raise EnvironmentProblem(f"cannot capture launches: {error}") from error
    return "captures launches without driver or compiler"


def _gpu() -> str:
    """Name, compute capability and newest CUDA of the first GPU, asked of the driver."""
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise EnvironmentProblem(f"cuda.bindings does not import: {error}") from error

    def call(function: str, *arguments: Any) -> Any:
        try:
            status, *values = getattr(driver, function)(*arguments)
        except RuntimeError as error:  # the driver's library is not there
            raise EnvironmentProblem(
                "no NVIDIA driver; validate, bench and tune need one"
            ) from error
        if status != driver.CUresult.CUDA_SUCCESS:
            raise EnvironmentProblem(
                f"no usable GPU ({status.name}); validate, bench and tune need one"
            )
        return values[0] if values else None

    call("cuInit", 0)
    device = call("cuDeviceGet", 0)
    attribute = driver.CUdevice_attribute
    major = call(
        "cuDeviceGetAttribute",
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        device,
    )
    minor = call(
        "cuDeviceGetAttribute",
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        device,
    )
    name = call("cuDeviceGetName", 256, device).split(b"\0")[0].decode()
    newest = call("cuDriverGetVersion")
    return f"{name}, sm_{major}{minor}, CUDA {newest // 1000}.{newest % 1000 // 10}"


def _pytorch() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError as error:
        raise EnvironmentProblem(
            "validate, bench and tune need it: pip install 'fmha-gen[torch]'"
        ) from error


def _cache() -> Finding:
    folder = cache.folder()
    if why := cache.refusal():
        return Finding("cache", False, False, f"not used: {why}")
    nearest = next(path for path in [folder, *folder.parents] if path.exists())
    ok = nearest.is_dir() and os.access(nearest, os.W_OK)
    return Finding("cache", ok, False, f"{folder}{'' if ok else ' cannot be written'}")
