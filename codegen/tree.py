# SPDX-License-Identifier: Apache-2.0
"""The only writer of the output tree: what differs from what is wanted, and an atomic apply.

`replace` (of files.py) is for single files elsewhere.

Apply is a journal. Every new file is first written into a stage folder; then one rename makes the
journal valid (the commit); then the files are moved into place. A crash before the commit leaves
a stage that the next run throws away, a crash after it leaves a journal that the next run carries
out: a build never sees half a tree. A lock on the folder itself keeps builds apart.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from .errors import CheckFailed, EnvironmentProblem
from .files import replace as replace
from .files import writing
from .render import body_digest, stated_digests

STAGE = ".fmha-gen-stage"
JOURNAL = "journal.json"

_HELD = (signal.SIGINT, signal.SIGTERM)

Kind = Literal["changed", "missing", "edited", "orphaned"]


@dataclass(frozen=True)
class Change:
    """One file that is not as it should be.

    kind: `missing` is wanted and not there; `changed` is there with other content that a build
    wrote; `edited` holds content that no build wrote; `orphaned` is no longer wanted.
    desired: the text it should have, None when it should not be there.
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
    the last build that are no longer wanted.
    """
    changes = []
    for path, text in desired.items():
        actual = _read(root / path)
        if actual == text:
            continue
        kind: Kind = "changed"
        if actual is None:
            kind = "missing"
        elif _is_kernel(path) and not intact(actual, owned.get(path)):
            kind = "edited"
        changes.append(Change(path, kind, text, _diff(path, actual or "", text)))
    for path in orphans:
        actual = _read(root / path)
        if actual is None or path in desired:
            continue
        edited = _is_kernel(path) and not intact(actual, owned.get(path))
        kind = "edited" if edited else "orphaned"
        changes.append(Change(path, kind, None, _diff(path, actual, "")))
    return sorted(changes, key=lambda change: change.path)


def intact(text: str, recorded: str | None) -> bool:
    """Whether a kernel is as a build left it: its body is the one it states and the lock has."""
    stated = stated_digests(text)
    body = body_digest(text)
    return stated is not None and stated.body == body and recorded in (None, body)


@contextlib.contextmanager
def exclusive(root: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the output folder for this process; unless it waits, CheckFailed when another has it."""
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise CheckFailed(f"{root}: another command is writing there") from error
        try:
            yield
        finally:
            # A process that another thread is starting may hold the folder open until its exec.
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def interrupted(root: Path) -> bool:
    """Whether a build died here after its commit: the tree is only whole after `recover`."""
    return (root / STAGE / JOURNAL).exists()


def recover(root: Path) -> None:
    """Finish what a committed build left to do, or throw an uncommitted stage away.

    Raises EnvironmentProblem when the folder cannot be written; then a later call may.
    """
    with writing(root):
        if interrupted(root):
            _roll_forward(root, _no_step)
        _discard(root / STAGE)


def apply(
    root: Path, changes: Sequence[Change], *, step: Callable[[str], None] | None = None
) -> None:
    """Carry out all changes or none. Call it inside `exclusive`, after `recover`.

    step is told the name of each action before it is done; tests die in it. Raises CheckFailed
    when a file is where a folder belongs, EnvironmentProblem when the folder cannot be written.
    """
    if not changes:
        return
    for change in changes:
        _require_folder(root, (root / _checked(change.path)).parent)
    with writing(root):
        _apply(root, changes, step or _no_step)


def _apply(root: Path, changes: Sequence[Change], step: Callable[[str], None]) -> None:
    stage = root / STAGE
    step("make stage")
    stage.mkdir()
    actions = []
    for number, change in enumerate(changes):
        if change.desired is None:
            actions.append({"path": change.path, "new": None})
            continue
        step(f"stage {change.path}")
        _write(stage / str(number), change.desired)
        actions.append({"path": change.path, "new": str(number)})
    step("write journal")
    _write(stage / "uncommitted", json.dumps(actions))
    _sync(stage)
    _sync(root)
    with _uninterrupted():
        step("commit")
        (stage / "uncommitted").rename(stage / JOURNAL)
        _sync(stage)
        _roll_forward(root, step)
        step("discard stage")
        _discard(stage)


def _roll_forward(root: Path, step: Callable[[str], None]) -> None:
    """Carry out a committed journal; doing it again after a crash anywhere in it is harmless."""
    stage = root / STAGE
    folders = {root}
    for action in json.loads((stage / JOURNAL).read_text(encoding="utf-8")):
        target = root / action["path"]
        if action["new"] is None:
            step(f"delete {action['path']}")
            target.unlink(missing_ok=True)
        elif (stage / action["new"]).exists():
            step(f"replace {action['path']}")
            target.parent.mkdir(parents=True, exist_ok=True)
            (stage / action["new"]).replace(target)
        folders.add(target.parent)
    step("sync")
    for folder in sorted(folders):
        if folder.is_dir():
            _sync(folder)
    step("end journal")
    (stage / JOURNAL).unlink()
    _sync(stage)


def _discard(stage: Path) -> None:
    """Remove a stage without a valid journal."""
    if stage.is_dir():
        shutil.rmtree(stage)
        _sync(stage.parent)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold ^C and SIGTERM back: once committed, the few renames are finished first.

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


def _require_folder(root: Path, folder: Path) -> None:
    """Raise where no file can be put: after the commit it would stay half done."""
    while not os.path.lexists(folder) and folder != root:
        folder = folder.parent
    if not folder.is_dir():
        raise CheckFailed(f"{folder}: not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"{folder}: cannot write there: Permission denied")


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
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


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckFailed(f"{path}: cannot be read: {error.strerror}") from error


def _checked(path: str) -> str:
    """A path that stays below the root; anything else is a bug of the caller."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise ValueError(f"not below the output folder: {path}")
    return path


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
