# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL, TVM-FFI and NVIDIA's disassemblers: what is supported, and what is installed."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from ..errors import EnvironmentProblem

DSL = "nvidia-cutlass-dsl"
DSL_AT_LEAST = (4, 8, 1)
DSL_BELOW = (4, 9)
DSL_RANGE = ">=4.8.1,<4.9"
FFI = "apache-tvm-ffi"
FFI_RANGE = ">=0.1.11,<0.2"

# Distribution that ships each disassembler.
TOOLS: Mapping[str, str] = {
    "cuobjdump": "nvidia-cuda-cuobjdump",
    "nvdisasm": "nvidia-cuda-nvdisasm",
}


def dsl_distributions() -> dict[str, str]:
    """Every installed distribution of the CuTe DSL: name -> version, by name."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name == DSL or name.startswith(f"{DSL}-"):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def require_dsl() -> str:
    """Return the DSL's version; raise EnvironmentProblem when it is missing or unsupported."""
    version = dsl_distributions().get(DSL)
    if version is None:
        raise EnvironmentProblem(
            f"{DSL} is not installed: pip install '{DSL}{DSL_RANGE}'"
        )
    if not DSL_AT_LEAST <= _release(version) < DSL_BELOW:
        raise EnvironmentProblem(
            f"{DSL} {version} is not supported: pip install '{DSL}{DSL_RANGE}'"
        )
    return version


def require_tool(name: str) -> Path:
    """Return the path of a disassembler, from its wheel or else from PATH."""
    try:
        files = importlib.metadata.files(TOOLS[name]) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.name == name and path.is_file():
            return path
    on_path = shutil.which(name)
    if on_path is None:
        raise EnvironmentProblem(f"{name} is not installed: pip install {TOOLS[name]}")
    return Path(on_path)


def require_ffi() -> str:
    """Return the version of TVM-FFI; raise EnvironmentProblem when it is missing."""
    try:
        return importlib.metadata.version(FFI)
    except importlib.metadata.PackageNotFoundError as error:
        raise EnvironmentProblem(
            f"{FFI} is not installed: pip install '{FFI}{FFI_RANGE}'"
        ) from error


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 4.8.1.dev0 -> (4, 8, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
