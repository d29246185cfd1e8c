# SPDX-License-Identifier: Apache-2.0
"""One file put in place whole, whoever reads, replaces or kills meanwhile; one opened as it is."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import EnvironmentProblem


def packaged(name: str) -> Path:
    """A folder of data: inside the installed package, or beside the package in a source tree."""
    spec = importlib.util.find_spec(f"fmha_gen.{name}")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(__file__).resolve().parents[2] / name


@contextlib.contextmanager
def writing(place: Path) -> Iterator[None]:
    """Say what the system refuses in a folder or file as a problem of the machine."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{place}: cannot write there: {error.strerror}"
        ) from error


def replace(
    path: Path,
    data: bytes,
    *,
    durable: bool = True,
    follow: bool = True,
    mode: int | None = None,
) -> None:
    """Write a file beside its place and rename it. Raises OSError.

    A process that has the old one loaded keeps it. durable: on disk when this returns, also if the
    machine stops, and what a writer that was killed left beside the place is removed. follow: a
    link is followed, as for a file that the user names; else it is replaced, as in a folder where
    others may have left it. mode: None keeps that of the old file.
    """
    target = path.resolve() if follow else path
    if durable:
        remove_leftovers(target.parent, target.name)
    with _beside(target) as (new, file):
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())
        if mode is None:
            with contextlib.suppress(FileNotFoundError):
                old = target.lstat().st_mode
                mode = stat.S_IMODE(old) if stat.S_ISREG(old) else None
        if mode is not None:
            new.chmod(mode)
        new.replace(target)


def open_plain(path: Path, flags: int) -> int:
    """A descriptor of a file: no link is followed, no pipe waited for. Raises OSError.

    Its `strerror` says what stands in the way. flags: of `os.open`.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a symbolic link", str(path)) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return handle


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file, locked as long as its writer lives, and gone if it fails."""
    while True:
        new = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        with new.open("xb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not os.fstat(file.fileno()).st_nlink:
                continue  # taken for a leftover before it was locked
            try:
                yield new, file
            except BaseException:
                new.unlink(missing_ok=True)
                raise
            return


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what writers of a file of a folder, or of any, left that died: nobody holds its lock.

    Raises OSError.
    """
    of_file = r".+" if name is None else re.escape(name)
    left = re.compile(rf"\.{of_file}\.[0-9a-f]{{16}}")
    for path in folder.iterdir():
        if left.fullmatch(path.name):
            with (
                contextlib.suppress(OSError),
                os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file,
            ):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
