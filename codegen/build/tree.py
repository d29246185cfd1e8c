# SPDX-License-Identifier: Apache-2.0
"""The only writer of output folders: what differs from what is wanted, and how it gets there.

`replace` (of host/files.py) is for single files elsewhere.

Apply writes every new file whole into a private folder, and when all are there renames each to its
place, deletes what is not wanted, and renames the lock last. A crash in between leaves old and new
files, each whole, under the old lock; the next build compares again and does the rest. Nothing in
the folder says what to do: no path is read from a file there, and no link there is followed. A lock
on the folder itself keeps builds apart.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import os
import re
import secrets
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from ..errors import CheckFailed, EnvironmentProblem
from ..host.files import open_plain, writing
from ..host.files import replace as replace
from .render import body_digest, stated_digests

LONGEST_DIFF = 40  # [lines] of one file's diff in a message

_PRIVATE = ".fmha-gen-"  # and 16 hex digits: a folder of new files, numbered
_PRIVATE_NAME = re.compile(re.escape(_PRIVATE) + "[0-9a-f]{16}")
_NUMBER = re.compile("[0-9]+")
_LOCK_SUFFIX = ".lock"

_HELD = (signal.SIGINT, signal.SIGTERM)

Kind = Literal["changed", "missing", "edited", "foreign", "orphaned"]


@dataclass(frozen=True)
class Change:
    """One file that is not as it should be.

    kind: `missing` is wanted and not there; `changed` is there with other content that a build
    wrote; `edited` holds content that no build wrote, `foreign` nothing that was ever a kernel;
    `orphaned` is no longer wanted. desired: the text it should have, None when it should not be
    there. diff: from what is there to that; "" where the file would go.
    """

    path: str
    kind: Kind
    desired: str | None
    diff: str


def compare(
    root: Path,
    desired: Mapping[str, str],
    owned: Mapping[str, str],
    orphans: Sequence[str] = (),
) -> list[Change]:
    """Compare the wanted files with those on disk; changes by path.

    desired: path relative to root -> text. owned: path -> body digest that the last build left,
    for files whose content speaks for itself (kernels); they can be `edited`. orphans: paths of
    the last build that are no longer wanted. Raises CheckFailed as `read` does.
    """
    changes = []
    for path, text in desired.items():
        actual = _read_text(root, path)
        if actual == text:
            continue
        kind: Kind = "changed"
        if actual is None:
            kind = "missing"
        elif _is_kernel(path) and not intact(actual, owned.get(path)):
            known = path in owned or stated_digests(actual) is not None
            kind = "edited" if known else "foreign"
        changes.append(Change(path, kind, text, _diff(path, actual or "", text)))
    for path in orphans:
        actual = _read_text(root, path)
        if actual is None or path in desired:
            continue
        edited = _is_kernel(path) and not intact(actual, owned.get(path))
        changes.append(Change(path, "edited" if edited else "orphaned", None, ""))
    return sorted(changes, key=lambda change: change.path)


def intact(text: str, recorded: str | None) -> bool:
    """Whether a kernel is as a build left it: its body is the one it states and the lock has."""
    stated = stated_digests(text)
    body = body_digest(text)
    return stated is not None and stated.body == body and recorded in (None, body)


def shortened(diff: str) -> str:
    """A diff as a message repeats it: its beginning, and how much is left out."""
    lines = diff.splitlines(keepends=True)
    if len(lines) <= LONGEST_DIFF:
        return diff
    left = len(lines) - LONGEST_DIFF
    return "".join(lines[:LONGEST_DIFF]) + f"... {left} more lines; --json has all\n"


def read(root: Path, path: str) -> bytes | None:
    """A file of an output folder; None when it is not there.

    Raises CheckFailed for what no build leaves there: a symbolic link, also one among its folders,
    or something that is not a file.
    """
    file = place(root, path)
    try:
        with os.fdopen(open_plain(file, os.O_RDONLY), "rb") as opened:
            return opened.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckFailed(_link(file)) from error
        raise CheckFailed(f"{file}: cannot be read: {error.strerror}") from error


def place(root: Path, path: str) -> Path:
    """Where a path below the root is; its folders are real ones or not there yet.

    Raises CheckFailed for a folder that is a link or a file, ValueError for a path that does not
    stay below the root, which is a bug of the caller.
    """
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise ValueError(f"not below the output folder: {path}")
    folder = root
    for name in parts.parts[:-1]:
        folder /= name
        try:
            mode = folder.lstat().st_mode
        except FileNotFoundError:
            break
        except OSError as error:
            raise CheckFailed(f"{folder}: cannot be read: {error.strerror}") from error
        if stat.S_ISLNK(mode):
            raise CheckFailed(_link(folder))
        if not stat.S_ISDIR(mode):
            raise CheckFailed(f"{folder}: not a folder")
    return root / parts


@contextlib.contextmanager
def exclusive(root: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the output folder for this process; unless it waits, CheckFailed when another has it.

    What a command that was killed there left behind is removed.
    """
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise CheckFailed(f"{root}: another command is writing there") from error
        try:
            _remove_leftovers(root)
            yield
        finally:
            # A process that another thread is starting may hold the folder open until its exec.
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def apply(
    root: Path, changes: Sequence[Change], *, step: Callable[[str], None] | None = None
) -> None:
    """Carry out changes, locks last. Call it inside `exclusive`.

    step is told the name of each action before it is done; tests die in it. Raises CheckFailed as
    `read` does, EnvironmentProblem when the folder cannot be written; what can fail for want of
    rights or of space fails before the first file is replaced.
    """
    if not changes:
        return
    with writing(root):
        for change in changes:
            _require_writable(root, place(root, change.path))
        _apply(root, changes, step or _no_step)


def _apply(root: Path, changes: Sequence[Change], step: Callable[[str], None]) -> None:
    step("make private folder")
    private = root / f"{_PRIVATE}{secrets.token_hex(8)}"
    private.mkdir(0o700)
    try:
        new = {}
        for number, change in enumerate(changes):
            if change.desired is not None:
                step(f"write {change.path}")
                new[change.path] = private / str(number)
                _write(new[change.path], change.desired)
        with _uninterrupted():
            _put_in_place(root, changes, new, step)
    finally:
        _discard(private)


def _put_in_place(
    root: Path,
    changes: Sequence[Change],
    new: Mapping[str, Path],
    step: Callable[[str], None],
) -> None:
    """Rename and delete. Wherever this ends early, the same changes less those done are left."""
    written = [change.path for change in changes if change.desired is not None]
    locks = [path for path in written if path.endswith(_LOCK_SUFFIX)]
    # A kernel before its record: until the end the evidence is that of what was there before.
    others = sorted({*written} - {*locks}, key=_depth)
    deleted = sorted((c.path for c in changes if c.desired is None), key=_depth)
    folders = {(root / change.path).parent for change in changes} | {root}
    step("make folders")
    for folder in sorted(folders):
        folder.mkdir(parents=True, exist_ok=True)
    for path in others:
        step(f"replace {path}")
        new[path].replace(root / path)
    for path in deleted:
        step(f"delete {path}")
        (root / path).unlink(missing_ok=True)
    step("sync")
    for folder in sorted(folders):
        _sync(folder)
    for path in locks:
        step(f"replace {path}")
        new[path].replace(root / path)
        _sync((root / path).parent)
    step("end")


def _depth(path: str) -> tuple[int, str]:
    return path.count("/"), path


def _remove_leftovers(root: Path) -> None:
    """Remove the private folders of commands that died: only who holds the root makes one."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if _PRIVATE_NAME.fullmatch(entry.name) and entry.is_dir(
                follow_symlinks=False
            ):
                _discard(Path(entry.path))


def _discard(private: Path) -> None:
    """Remove a private folder; what somebody else put into it stays, and so does the folder."""
    with contextlib.suppress(OSError):
        for path in private.iterdir():
            if _NUMBER.fullmatch(path.name):
                path.unlink()
        private.rmdir()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold ^C and SIGTERM back: the few renames are finished once they have begun.

    By handlers: a mask is one thread's, and the system gives the signal to another. Python runs
    handlers in the main thread, which alone may set them; no other thread is interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = {which: signal.getsignal(which) for which in _HELD}
    try:
        for which in before:
            signal.signal(which, lambda number, _frame: held.append(number))
        yield
    finally:
        for which in reversed(before):
            signal.signal(which, before[which])
        for number in held[:1]:
            signal.raise_signal(number)


def _require_writable(root: Path, file: Path) -> None:
    """Raise where a file cannot be put, before any other is."""
    if file.is_symlink():
        raise CheckFailed(_link(file))
    if file.is_dir():
        raise CheckFailed(f"{file}: not a file; remove it")
    folder = file.parent
    while not folder.exists() and folder != root:
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"{folder}: cannot write there: Permission denied")


def _link(path: Path) -> str:
    return f"{path}: a symbolic link, which fmha-gen does not write through; remove it"


def _write(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make renames and deletions in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_text(root: Path, path: str) -> str | None:
    data = read(root, path)
    return None if data is None else data.decode("utf-8", errors="replace")


def _is_kernel(path: str) -> bool:
    return path.endswith(".py")


def _diff(path: str, actual: str, desired: str) -> str:
    """What a build would do to the file, as a unified diff."""
    return "".join(
        difflib.unified_diff(
            actual.splitlines(keepends=True),
            desired.splitlines(keepends=True),
            f"a/{path}",
            f"b/{path}",
        )
    )


def _no_step(_name: str) -> None:
    """Nothing to do before this action."""
