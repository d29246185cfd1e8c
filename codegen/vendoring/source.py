# SPDX-License-Identifier: Apache-2.0
"""Where copies come from: a folder that `fmha-gen build` wrote."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..build import manifest, records, shipped, tree
from ..diff import kernels
from ..diff.kernels import KernelState
from ..errors import CheckFailed

UNKNOWN = "uncommitted"  # where no commit holds the files as they are
PACKAGED = "packaged"  # of an installed package, whose version says which they are

_TOOLS = re.compile(r"fmha-gen==(?P<version>\S+) .* nvidia-cutlass-dsl(?P<dsl>\S+)")


@dataclass(frozen=True)
class Source:
    """A folder of kernels. version: of the generator; dsl: the range of versions they need."""

    folder: Path
    version: str
    dsl: str
    lock: manifest.Manifest

    def stems(self) -> list[str]:
        """The kernels that are there."""
        return sorted(Path(file).stem for file in self.lock.entries)

    def load(self, stem: str) -> KernelState:
        """A kernel with its evidence.

        Raises CheckFailed when it is not there, not as the last build left it, or its record is
        for another text.
        """
        file = self.folder / f"{stem}.py"
        entry = self.lock.entries.get(file.name)
        if entry is None or not file.is_file():
            raise CheckFailed(f"{file}: no such kernel; run: fmha-gen build")
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckFailed(f"{file}: cannot be read: {error}") from error
        if not tree.intact(text, entry.body):
            raise CheckFailed(f"{file}: not as the last build left it; build again")
        known = records.load(self.folder / records.path_of(stem))
        stale = records.staleness(known, kernel=stem, body_sha256=entry.body)
        if known is not None and stale is not None:
            raise CheckFailed(f"{file}: {stale}; run: fmha-gen build")
        return kernels.of_text(stem, text, known, origin=str(file), path=str(file))

    def commit(self, stems: Iterable[str]) -> str:
        """The last commit that touched these kernels, if it holds them and their records."""
        if shipped.is_installed(self.folder):
            return PACKAGED
        names = [name for s in stems for name in (f"{s}.py", records.path_of(s))]
        # What a user's settings show or hide must not matter.
        every = ("--porcelain", "--ignored", "--untracked-files")
        if not names or self._git("status", *every, "--", *names) != "":
            return UNKNOWN
        return self._git("rev-list", "-1", "HEAD", "--", *names) or UNKNOWN

    def _git(self, *arguments: str) -> str | None:
        """What git says in the folder, None when it cannot say anything."""
        command = ["git", "-C", str(self.folder), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None


def open_source(folder: Path) -> Source:
    """The source that a folder is; raises CheckFailed when no build wrote it."""
    file = folder / manifest.FILE
    try:
        lock = manifest.load(file)
    except OSError as error:
        raise CheckFailed(
            f"{folder}: not a folder that fmha-gen build wrote: no {manifest.FILE}"
        ) from error
    tools = _TOOLS.fullmatch(lock.tools)
    if tools is None:
        raise CheckFailed(f"{file}:1: does not say which tools; build again")
    return Source(folder, tools["version"], tools["dsl"], lock)


def named(kernels: Sequence[str], default: Path) -> tuple[Path, list[str]]:
    """The folder and the stems that KERNELs mean: stems there, or paths of files in one folder."""
    paths = [Path(kernel) for kernel in kernels]
    folders = {path.parent if path.suffix == ".py" else default for path in paths}
    if len(folders) > 1:
        shown = ", ".join(sorted(map(str, folders)))
        raise CheckFailed(f"kernels of several folders at once: {shown}")
    for kernel, path in zip(kernels, paths, strict=True):
        if path.suffix != ".py" and len(path.parts) != 1:
            raise CheckFailed(f"{kernel}: neither a kernel's name nor a .py file")
    return next(iter(folders), default), [path.stem for path in paths]
