# SPDX-License-Identifier: Apache-2.0
"""A cache by content: what a key was computed from decides, never a time or a path.

Values are JSON. An entry that cannot be read is a miss, and a cache that cannot be written costs
only time, so nothing here fails a build. What a cache says is believed, so it has to be ours: a
folder or an entry that somebody else owns or may write is not used.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import files

ENVIRONMENT = "FMHA_GEN_CACHE"

_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


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


def refusal(root: Path | None = None) -> str | None:
    """Why a cache is not to be trusted, in one line; None when it is, or is not there yet."""
    place = (root or folder()).absolute()
    try:
        for path in reversed([place, *place.parents]):
            if path.is_symlink() and path.lstat().st_uid not in (0, os.geteuid()):
                return f"{path}: a link that another user made"
        found = place.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{place}: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{place}: not a folder"
    if found.st_uid != os.geteuid():
        return f"{place}: another user's"
    if found.st_mode & _BY_OTHERS:
        return f"{place}: others may write there; run: chmod go-w {place}"
    return None


def make(root: Path) -> None:
    """Make a folder of a cache that only we may look into, if it is not there. Raises OSError."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)


def get(name: str, *, root: Path | None = None) -> Any | None:
    """The value of a key, or None when there is none, it is damaged, or somebody else's."""
    if _is_refused(root):
        return None
    try:
        handle = files.open_plain(_path(name, root), os.O_RDONLY)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if found.st_uid != os.geteuid() or found.st_mode & _BY_OTHERS:
                return None
            entry = json.loads(file.read())
        return entry["value"] if entry["key"] == name else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def put(name: str, value: Any, *, root: Path | None = None) -> None:
    """Store a value."""
    if _is_refused(root):
        return
    path = _path(name, root)
    text = json.dumps({"key": name, "value": value}, sort_keys=True)
    try:
        make(path.parent)
        _sweep(path.parent)
        files.replace(path, text.encode(), durable=False, follow=False, mode=0o600)
    except OSError as error:
        _say_once(f"{path.parent}: cannot be written: {error.strerror}")


@functools.cache
def _sweep(root: Path) -> None:
    """Once per process: a folder of thousands of entries takes long to list."""
    files.remove_leftovers(root)


def _is_refused(root: Path | None) -> bool:
    why = refusal(root)
    if why is not None:
        _say_once(why)
    return why is not None


@functools.cache
def _say_once(why: str) -> None:
    print(f"the cache is not used: {why}", file=sys.stderr, flush=True)


def source_digest(*modules: str) -> str:
    """The sha256 of modules of fmha_gen by path; of all of them when none is named."""
    return _source_digest(modules)


@functools.cache
def _source_digest(modules: tuple[str, ...]) -> str:
    package = Path(__file__).resolve().parents[1]
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
