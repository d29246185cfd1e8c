# SPDX-License-Identifier: Apache-2.0
"""The device code of a kernel, known by a digest of its PTX, and which PTX a process compiled."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

_VERSION = re.compile(r"^\.version (\S+)$", re.MULTILINE)
_FIRST_OF_CODE = ".target"


def digest(ptx: str) -> str:
    """The sha256 of PTX from its `.target` on, in hexadecimal.

    What stands before it names who wrote it: the CUDA 12 and 13 libraries of one DSL release write
    `.version 8.8` and `.version 9.4`, and the same after it (decision 0063).
    """
    _header, target, code = ptx.partition(_FIRST_OF_CODE)
    return hashlib.sha256((target + code if target else ptx).encode()).hexdigest()


def keep(folder: Path) -> None:
    """Have the DSL leave the PTX that this process compiles in a folder.

    It reads that from the environment when it is imported, so this comes before.
    """
    os.environ |= {"CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": str(folder)}


def kept(folder: Path) -> dict[str, str]:
    """Of the one module that was compiled: `ptx_sha256`, and `ptx_version`, the ISA's.

    Empty where another number of modules was.
    """
    found = list(folder.glob("*.ptx"))
    if len(found) != 1:
        return {}
    ptx = found[0].read_text(encoding="utf-8")
    version = _VERSION.search(ptx)
    return {"ptx_sha256": digest(ptx)} | (
        {"ptx_version": version[1]} if version else {}
    )
