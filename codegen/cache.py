# SPDX-License-Identifier: Apache-2.0
"""A cache by content: what a key was computed from decides, never a time or a path.

Values are JSON. An entry that cannot be read is a miss, and a cache that cannot be written costs
only time, so nothing here fails a build.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import files

ENVIRONMENT = "FMHA_GEN_CACHE"


def folder() -> Path:
    """`$FMHA_GEN_CACHE`, else `$XDG_CACHE_HOME/fmha-gen`, else `~/.cache/fmha-gen`."""
    if own := os.environ.get(ENVIRONMENT):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "fmha-gen"
    return Path("~/.cache/fmha-gen").expanduser()


def key(kind: str, parts: Iterable[str]) -> str:
    """The key of an entry: its kind, for people who look into the folder, and a digest."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(f"{len(data)}\0".encode() + data)
    return f"{kind}-{digest.hexdigest()}"


def get(name: str, *, root: Path | None = None) -> Any | None:
    """The value of a key, or None when there is none or it is damaged."""
    try:
        entry = json.loads(_path(name, root).read_text(encoding="utf-8"))
        return entry["value"] if entry["key"] == name else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def put(name: str, value: Any, *, root: Path | None = None) -> None:
    """Store a value."""
    path = _path(name, root)
    text = json.dumps({"key": name, "value": value}, sort_keys=True)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, text.encode(), durable=False)


def source_digest(*modules: str) -> str:
    """The sha256 of modules of this package by file name; of all of them when none is named."""
    return _source_digest(modules)


@functools.cache
def _source_digest(modules: tuple[str, ...]) -> str:
    package = Path(__file__).resolve().parent
    paths = [package / name for name in modules] or sorted(package.rglob("*.py"))
    digest = hashlib.sha256()
    for path in paths:
        data = path.read_bytes()
        digest.update(
            f"{path.relative_to(package).as_posix()}\0{len(data)}\0".encode() + data
        )
    return digest.hexdigest()


def _path(name: str, root: Path | None) -> Path:
    return (root or folder()) / f"{name}.json"
