# SPDX-License-Identifier: Apache-2.0
"""The same specs give the same bytes, whatever else differs; and nothing is done twice.

Every build here is a process of its own with an empty cache, unless the cache is what is tested.
Locales and interpreters that this machine lacks are skipped by name.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import fmha_gen
import pytest
import support

from . import fake

ROOT = Path(__file__).parents[2]
FEW = (
    "sm90_d128_bf16_causal_c2x1_kvmc_lse",
    "sm90_d192x128_bf16_full_q1000",
    "sm90_d64_fp16_causal_gqa8",
)
LOCALES = ("C", "C.UTF-8", "tr_TR.UTF-8")  # in Turkish, "I".lower() is not "i"
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13")
DEPENDENCIES = ("black", "jinja2", "pydantic", "rich", "typer", "yaml")
HEAVY = ("black", "cutlass", "torch")  # what a build with nothing to do must not import

# Prints, as the last line on stderr, which of these modules the command imported.
WATCHED = f"""
import atexit, sys
heavy = lambda: {{name.partition(".")[0] for name in sys.modules}} & set({HEAVY})
atexit.register(lambda: print("imported:", *sorted(heavy()), file=sys.stderr))
from fmha_gen import cli
cli.main()
"""


@dataclass(frozen=True)
class Outcome:
    """What a build left, and what it said."""

    files: dict[str, str]
    said: dict
    imported: list[str]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path entry that makes the package under test importable by any interpreter."""
    folder = tmp_path_factory.mktemp("package")
    name, version = "fmha-gen", metadata.version("fmha-gen")
    (folder / "fmha_gen").symlink_to(Path(fmha_gen.__file__).resolve().parent)
    described = folder / f"fmha_gen-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    return folder


@pytest.fixture(scope="module")
def build(
    package: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Outcome]:
    def run(
        specs: Sequence[str | Path],
        *options: str,
        python: str = sys.executable,
        cwd: Path | None = None,
        out: Path | None = None,
        cache: Path | None = None,
        **environment: str,
    ) -> Outcome:
        folder = tmp_path_factory.mktemp("build")
        out = out or folder / "out"
        paths = [
            ROOT / "specs" / f"{spec}.yaml" if isinstance(spec, str) else spec
            for spec in specs
        ]
        process = subprocess.run(
            [python, "-c", WATCHED, "build", *paths, *options, "--json", "--out", out],
            cwd=cwd or folder,
            env={
                **os.environ,
                "FMHA_GEN_CACHE": str(cache or folder / "cache"),
                "PYTHONPATH": str(package),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        imported = process.stderr.splitlines()[-1].split()[1:]
        return Outcome(fake.contents(out), json.loads(process.stdout), imported)

    return run


@pytest.fixture(scope="module")
def expected(build: Callable[..., Outcome]) -> dict[str, str]:
    files = build(FEW, "--no-compile").files
    assert {f"{stem}.py" for stem in FEW} <= files.keys()
    return files


@pytest.mark.parametrize(
    ("folder", "seed"),
    [("/", "0"), (str(ROOT), "1")],
    ids=["at the root", "in the checkout"],
)
def test_working_directory_hash_seed_and_order(build, expected, folder, seed) -> None:
    """All at once: a build takes seconds, and its difference says what differs."""
    found = build(FEW[::-1], "--no-compile", cwd=Path(folder), PYTHONHASHSEED=seed)
    assert found.files == expected


@pytest.mark.parametrize("name", LOCALES)
def test_relative_paths_and_locale(build, expected, name: str) -> None:
    check = f"import locale; locale.setlocale(locale.LC_ALL, {name!r})"
    asked = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, check=False
    )
    if asked.returncode:
        pytest.skip(f"the locale {name} is not installed here")
    specs = [Path(f"{stem}.yaml") for stem in FEW]
    # Without coercion and UTF-8 mode, C is really C.
    other = {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "LC_ALL": name}
    found = build(specs, "--no-compile", cwd=ROOT / "specs", **other)
    assert found.files == expected


@pytest.mark.parametrize("name", PYTHONS)
def test_interpreter(build, expected, name: str) -> None:
    found = shutil.which(name)
    check = f"import {', '.join(DEPENDENCIES)}; from importlib import metadata"
    check += "; print(metadata.version('black'))"
    if found is None:
        pytest.skip(f"no {name} on PATH")
    asked = subprocess.run(
        [found, "-c", check], capture_output=True, text=True, check=False
    )
    if asked.stdout.strip() != metadata.version("black"):
        pytest.skip(f"{found} cannot import what fmha-gen needs")
    print(f"built with {found}")
    assert build(FEW, "--no-compile", python=found).files == expected


def test_specs_with_everything_different(build, tmp_path: Path) -> None:
    """In two parts, in reverse and elsewhere, against all of them at once."""
    stems = support.rotated(support.STRUCTURES, 5)
    together = build(stems, "--no-compile", PYTHONHASHSEED="0", LC_ALL="C")
    out, cache = tmp_path / "out", tmp_path / "cache"
    half = len(stems) // 2
    for some in (stems[half:][::-1], stems[:half][::-1]):
        apart = build(
            some,
            "--no-compile",
            out=out,
            cache=cache,
            cwd=Path("/"),
            PYTHONHASHSEED="1",
        )
    assert apart.files == together.files


def test_jobs_and_builds_with_nothing_to_do(build, tmp_path: Path) -> None:
    specs = ("sm90_d32_bf16_full_gqa4", "sm90_d64_bf16_full")  # compile fast
    out, cache = tmp_path / "out", tmp_path / "cache"
    first = build(specs, "-j", "2", out=out, cache=cache)
    assert (first.said["compiles"], first.imported) == (2, ["black"])
    rungs = [kernel["rung"] for kernel in first.said["kernels"]]
    packaged = (ROOT / f"generated/records/{spec}.json" for spec in specs)
    assert rungs == [json.loads(each.read_text())["rung"] for each in packaged]
    # One at a time: the same kernels, and the same records of what the compiler made of them.
    assert build(specs, "-j", "1").files == first.files
    again = build(specs, out=out, cache=cache)
    assert again.said["compiles"] == 0
    assert {kernel["state"] for kernel in again.said["kernels"]} == {"unchanged"}
    assert again.imported == []
    assert again.files == first.files
