# SPDX-License-Identifier: Apache-2.0
"""What a git repository holds at a revision, by asking git."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckFailed, EnvironmentProblem


@dataclass(frozen=True)
class Repository:
    """The repository around the current folder."""

    root: Path

    def commit(self, name: str) -> str | None:
        """The full id of the commit that a name stands for; None when it stands for none."""
        if name.startswith("-"):
            return None
        done = _git(
            ["rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"], self.root
        )
        return done.stdout.decode().strip() if done.returncode == 0 else None

    def files(
        self, commit: str, folder: Path, suffixes: tuple[str, ...]
    ) -> dict[str, str]:
        """The texts below a folder at a commit, by path relative to it; empty if it is not there.

        folder: in the working tree, there or not. Raises CheckFailed when it is outside.
        """
        inside = self._inside(folder)
        blobs = {
            path: blob
            for path, blob in self._blobs(commit, inside)
            if path.endswith(suffixes)
        }
        request = "".join(f"{blob}\n" for blob in blobs.values()).encode()
        data = self._answer(["cat-file", "--batch"], request)
        texts = {}
        for path in blobs:
            header, _, data = data.partition(b"\n")
            size = int(header.split()[-1])
            texts[path] = data[:size].decode("utf-8", errors="replace")
            data = data[size + 1 :]
        return texts

    def names(self, commit: str, folder: Path) -> list[str]:
        """The paths below a folder at a commit, relative to it."""
        return [path for path, _ in self._blobs(commit, self._inside(folder))]

    def _inside(self, folder: Path) -> str:
        """The folder as git names it."""
        try:
            return folder.resolve().relative_to(self.root).as_posix()
        except ValueError:
            raise CheckFailed(
                f"{folder}: not inside the repository {self.root}"
            ) from None

    def _blobs(self, commit: str, inside: str) -> list[tuple[str, str]]:
        prefix = "" if inside == "." else f"{inside}/"
        where = ["--", prefix] if prefix else []
        listing = self._answer(["ls-tree", "-r", "-z", "--full-tree", commit, *where])
        found = []
        for line in listing.decode("utf-8", errors="surrogateescape").split("\0"):
            entry, _, path = line.partition("\t")
            kind = entry.split()[1:3]
            if len(kind) == 2 and kind[0] == "blob":
                found.append((path.removeprefix(prefix), kind[1]))
        return found

    def _answer(self, arguments: list[str], request: bytes = b"") -> bytes:
        done = _git(arguments, self.root, request)
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", errors="replace").strip()
            raise EnvironmentProblem(f"git {arguments[0]} failed: {said}")
        return done.stdout


def find() -> Repository:
    """The repository that the current folder is in.

    Raises EnvironmentProblem, in git's words, when it is in none or git is not installed.
    """
    done = _git(["rev-parse", "--show-toplevel"], Path.cwd())
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", errors="replace").strip().splitlines()
        raise EnvironmentProblem(f"git: {said[0] if said else 'failed'}")
    return Repository(Path(os.fsdecode(done.stdout.rstrip(b"\n"))).resolve())


def _git(
    arguments: list[str], folder: Path, request: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["git", *arguments], cwd=folder, input=request, capture_output=True
        )
    except FileNotFoundError as error:
        raise EnvironmentProblem("git is not installed") from error
