# SPDX-License-Identifier: Apache-2.0
"""The kernels that come with the package: their specs, their files and their evidence.

They lie inside the installed package, or beside it in a source tree. Nothing is written there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckFailed
from ..host import files
from . import manifest, records


@functools.cache
def specs() -> Path:
    """The folder of the packaged specs."""
    return files.packaged("specs")


@functools.cache
def generated() -> Path:
    """The folder of the packaged kernels, with their lock and their records."""
    return files.packaged("generated")


def is_installed(folder: Path) -> bool:
    """Whether a folder is that of the packaged kernels inside an installed package."""
    return folder == generated() and folder.parent == Path(__file__).resolve().parents[1]


def spec_of(name: str | Path) -> Path | None:
    """The packaged spec of that name; None where the name is a path, or nobody's."""
    stem = str(name)
    file = specs() / f"{stem}.yaml"
    return file if stem.isidentifier() and file.is_file() else None


def kernel_of(name: str | Path) -> Path | None:
    """The packaged kernel of that name; None where the name is a path, or nobody's."""
    stem = str(name)
    file = generated() / f"{stem}.py"
    return file if stem.isidentifier() and file.is_file() else None


def record(stem: str) -> records.Record | None:
    """The record of the packaged kernel of that name; None where there is none."""
    if kernel_of(stem) is None:
        return None
    return records.load(generated() / records.path_of(stem))


def record_of_spec(stem: str, spec_sha256: str) -> records.Record | None:
    """The record of the packaged kernel of that name, if it was made from a spec like this one."""
    try:
        lock = manifest.load(generated() / manifest.FILE)
    except (OSError, CheckFailed):
        return None
    entry = lock.entries.get(f"{stem}.py")
    if entry is None or entry.spec != spec_sha256:
        return None
    found = records.current(record(stem), kernel=stem, body_sha256=entry.body)
    return found if found.keys() & records.RUNGS.keys() else None


def source(names: Sequence[str], own: Path, *, update: bool = False) -> Path:
    """The folder that kernels of these names come from, unless somebody says which.

    `own`, where a build wrote, if all of them are there (to `update` copies: any of them); else
    the packaged ones, if all are there.
    """
    try:
        entries = manifest.load(own / manifest.FILE).entries
    except OSError:
        return generated()
    known = [f"{name}.py" in entries for name in names]
    packaged = all(kernel_of(name) is not None for name in names)
    is_own = any(known) if update else all(known)
    return own if is_own or not packaged else generated()
