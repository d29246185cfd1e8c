# SPDX-License-Identifier: Apache-2.0
"""Isolated environments, one per version of the CuTe DSL: a virtual environment each, made once.

They hold the DSL and TVM-FFI and nothing of ours: what compiles there is a kernel's file alone.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..build.toolchain import Compiler, environment_for
from ..errors import EnvironmentProblem
from ..host import cache
from ..host.tools import DSL, FFI, FFI_RANGE

FOLDER = "dsl"  # in the cache
ANY_PATCH = ".x"  # at the end of a version: the newest of a minor
INSTALL_SECONDS = 1800  # the DSL's wheels have 100 MB
ASK_SECONDS = 120

_VERSION = re.compile(r"(\d+\.\d+\.(?:x|\d+(?:\.?[a-z]+\d+)*))(?:\[(cu\d+)\])?")
_LIBRARIES = f"{DSL}-libs-"
_DEFAULT = "cu12"  # the CUDA libraries, ptxas among them, that every installation has

# Prints what an interpreter is and which distributions decide what it compiles.
_DESCRIBE = f"""
import importlib.metadata, json, sys
found = {{}}
for each in importlib.metadata.distributions():
    name = (each.metadata["Name"] or "").lower().replace("_", "-")
    if name.startswith({DSL!r}) or name == {FFI!r}:
        found[name] = each.version
print(json.dumps({{"python": "%d.%d" % sys.version_info[:2], "distributions": found}}))
"""


@dataclass(frozen=True)
class Environment:
    """An interpreter with one version of the DSL. python: major and minor version."""

    compiler: Compiler
    python: str
    distributions: Mapping[str, str]

    @property
    def dsl(self) -> str:
        """The DSL's version, with the extra that says which CUDA libraries compile, if not 12."""
        return self.compiler.dsl


def existing(interpreter: str) -> Environment:
    """An environment that is there; EnvironmentProblem when it holds no DSL."""
    told = _describe(interpreter)
    dsl = told["distributions"].get(DSL)
    if dsl is None:
        raise EnvironmentProblem(f"{interpreter}: {DSL} is not installed")
    for name in sorted(told["distributions"]):
        extra = name.removeprefix(_LIBRARIES)
        if name.startswith(f"{_LIBRARIES}cu") and extra != _DEFAULT:
            dsl += f"[{extra}]"
    return Environment(
        Compiler(interpreter, dsl), told["python"], dict(told["distributions"])
    )


def given(option: str) -> Environment:
    """The environment of ``VERSION=INTERPRETER``; EnvironmentProblem when it is another version."""
    version, _, interpreter = option.partition("=")
    path = shutil.which(interpreter)
    if path is None:
        raise EnvironmentProblem(f"{interpreter or option}: no such interpreter")
    found = existing(str(Path(path).absolute()))
    if found.dsl != version:
        raise EnvironmentProblem(f"{path}: holds {DSL} {found.dsl}, not {version}")
    return found


def made(version: str, base: str = sys.executable) -> Environment:
    """The environment of a version such as 4.7.1, 4.7.x or 4.8.1[cu13]; the cache may hold it.

    base: the interpreter that makes it. Raises EnvironmentProblem when that fails: without the
    network 4.7.x is the newest of that minor in the cache.
    """
    match = _VERSION.fullmatch(version)
    if not match:
        raise EnvironmentProblem(
            f"{version!r} is no version such as 4.7.1, 4.7.x or 4.8.1[cu13]"
        )
    release, extra = match.groups()
    python = _describe(base)["python"]
    suffix = f"-{extra}-py{python}" if extra else f"-py{python}"
    if release.endswith(ANY_PATCH):
        release = _newest(release.removesuffix(ANY_PATCH), base, suffix)
    folder = _root() / f"{release}{suffix}"
    if not folder.is_dir():
        _make(folder, f"{DSL}[{extra}]" if extra else DSL, release, base)
    return existing(str(folder / "bin" / "python"))


def _root() -> Path:
    """Where environments are; what is there is run, so EnvironmentProblem when it is not ours."""
    root = cache.folder() / FOLDER
    for folder in (cache.folder(), root):
        if why := cache.refusal(folder):
            raise EnvironmentProblem(f"environments are kept in the cache. {why}")
    return root


def _newest(minor: str, base: str, suffix: str) -> str:
    """The newest release of a minor: as the package index says, else of those in the cache."""
    command = [base, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--no-deps", "--quiet", "--disable-pip-version-check", "--report", "-"]
    try:
        report = json.loads(_output([*command, f"{DSL}=={minor}.*"], ASK_SECONDS))
        return str(report["install"][0]["metadata"]["version"])
    except EnvironmentProblem as problem:
        cached = [
            path.name.removesuffix(suffix)
            for path in _root().glob(f"{minor}.*{suffix}")
            if "-" not in path.name.removesuffix(suffix)
        ]
        if not cached:
            raise EnvironmentProblem(
                f"{DSL} {minor}.x: neither cached nor found ({problem})"
            ) from problem
        newest = max(cached, key=_order)
        print(f"{DSL} {minor}.x: {newest}, of the cache ({problem})", file=sys.stderr)
        return newest


def _order(release: str) -> tuple[bool, list[int]]:
    """Sorts releases; those that only preview another come first, as for pip."""
    final = not re.search("[ab]|rc|dev", release)
    return final, [int(number) for number in re.findall(r"\d+", release)]


def _make(folder: Path, dsl: str, version: str, base: str) -> None:
    """Make it beside its place, then rename: nobody finds half an environment."""
    cache.make(folder.parent.parent)
    cache.make(folder.parent)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    print(f"installing {dsl} {version} into {folder}", file=sys.stderr)
    try:
        _output([base, "-m", "venv", str(work)], INSTALL_SECONDS)
        pip = [str(work / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        wanted = [f"{dsl}=={version}", f"{FFI}{FFI_RANGE}"]
        _output([*pip, "--disable-pip-version-check", *wanted], INSTALL_SECONDS)
        if not folder.exists():  # else somebody else was faster
            work.rename(folder)
            megabytes = _bytes_of(folder) / 1e6
            print(
                f"it takes {megabytes:.0f} MB; rm -r {folder} frees them",
                file=sys.stderr,
            )
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _bytes_of(folder: Path) -> int:
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )


def _describe(interpreter: str) -> dict[str, Any]:
    text = _output([interpreter, "-c", _DESCRIBE], ASK_SECONDS)
    try:
        told: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise EnvironmentProblem(f"{interpreter}: not a Python that answers") from error
    return told


def _output(command: Sequence[str], seconds: float) -> str:
    """Stdout; EnvironmentProblem with the last line of stderr when the command fails."""
    try:
        done = subprocess.run(
            command,
            env=environment_for(command[0]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise EnvironmentProblem(f"{Path(command[0]).name}: {words[-1].strip()}")
    return done.stdout
