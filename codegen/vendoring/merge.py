# SPDX-License-Identifier: Apache-2.0
"""One file, three versions: as it was brought, as it lies there, as it would be brought now.

What was edited where it lies is never overwritten or deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .. import verify
from ..build import tree
from ..verify import Edit, Entry, State

Action = Literal["write", "keep", "refuse", "delete"]


@dataclass(frozen=True)
class Step:
    """What happens to one file.

    write: the new text takes its place. keep: it stays, nothing newer is there. refuse: it stays
    though something newer is there, for it was edited. delete: it goes. entry: what the lock says
    of it afterwards, None if nothing. local: its bytes before, None if it was not there.
    """

    path: str
    action: Action
    new: str | None
    local: bytes | None
    entry: Entry | None
    state: State
    edits: tuple[Edit, ...] = ()

    @property
    def edited(self) -> bool:
        """Whether the file has a text of its own, now and afterwards."""
        return self.state == "edited" and self.action in ("keep", "refuse")

    @property
    def text(self) -> str:
        """What the file holds afterwards."""
        if self.action == "write" and self.new is not None:
            return self.new
        return (self.local or b"").decode("utf-8", errors="replace")


def bring(folder: Path, path: str, new: str, base: Entry | None) -> Step:
    """Bring a file; base: as it was brought last, None if it never was."""
    local = tree.read(folder, path)
    entry = verify.entry_of(path, new)
    if local is None or verify.sha256(local) == entry.sha256:
        action: Action = "write" if local is None else "keep"
        return Step(path, action, new, local, entry, "intact")
    state, edits = _state(path, local, base)
    if base is not None and base.sha256 == entry.sha256:
        return Step(path, "keep", new, local, base, state, edits)
    if state == "edited":
        return Step(path, "refuse", new, local, base, state, edits)
    return Step(path, "write", new, local, entry, state, edits)


def put(folder: Path, path: str, new: str) -> Step:
    """Write a file that is ours alone, whatever it holds."""
    local = tree.read(folder, path)
    same = local == new.encode()
    return Step(path, "keep" if same else "write", new, local, None, "intact")


def leave(folder: Path, path: str, base: Entry) -> Step:
    """Leave a file of which nothing newer is known."""
    local = tree.read(folder, path)
    state, edits = _state(path, local, base)
    return Step(path, "keep", None, local, base, state, edits)


def drop(folder: Path, path: str, base: Entry) -> Step:
    """Take a file away that is no longer wanted; one that was edited stays, outside the lock."""
    local = tree.read(folder, path)
    state, edits = _state(path, local, base)
    action: Action = "keep" if local is None or state == "edited" else "delete"
    return Step(path, action, None, local, None, state, edits)


def _state(
    path: str, local: bytes | None, base: Entry | None
) -> tuple[State, tuple[Edit, ...]]:
    """How the file lies there. One that nobody brought counts as edited, unless it is a kernel."""
    if base is not None:
        state, edits = verify.state_of(path, local, base)
        return state, tuple(edits)
    text = (local or b"").decode("utf-8", errors="replace")
    return ("intact" if tree.intact(text, None) else "edited"), ()
