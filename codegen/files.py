# SPDX-License-Identifier: Apache-2.0
"""One file put in place whole, whoever reads, replaces or kills meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import EnvironmentProblem


@contextlib.contextmanager
def writing(place: Path) -> Iterator[None]:
    """Say what the system refuses in a folder or file as a problem of the machine."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{place}: cannot write there: {error.strerror}"
        ) from error


def replace(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file beside its place and rename it. Raises OSError.

    A process that has the old one loaded keeps it; its mode stays, and a link to it is followed.
    What a writer that was killed left beside the place is removed. durable: on disk when this
    returns, also if the machine stops.
    """
    target = path.resolve()
    _remove_leftovers(target)
    with _beside(target) as (new, file):
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            new.chmod(target.stat().st_mode)
        new.replace(target)


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


def _remove_leftovers(target: Path) -> None:
    """Remove the files of writers that died: nobody holds their locks."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}")
    for path in target.parent.iterdir():
        if name.fullmatch(path.name):
            with (
                contextlib.suppress(FileNotFoundError, BlockingIOError),
                path.open("rb") as file,
            ):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
