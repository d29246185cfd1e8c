# SPDX-License-Identifier: Apache-2.0
"""`pip install .` and `pip install -e .` both give a command that works from anywhere.

The dependencies come from the interpreter that runs the tests, through a `.pth` file, and the
build is not isolated: neither the network nor minutes are needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from . import fake

ROOT = Path(__file__).parents[2]
PROJECT = ("pyproject.toml", "README.md", "LICENSE", "codegen", "templates")
SPECS = ("sm90_d64_bf16_full", "sm90_d128_bf16_causal_c2x1_kvmc_lse")


def run(*command: str | Path, cwd: Path) -> str:
    """Stdout of a command that must succeed; nothing leads it to the source tree under test."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    process = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is installed from: a build leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("source")
    for name in PROJECT:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(
    request: pytest.FixtureRequest,
    source: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path]:
    """The folder of the environment's commands, and where the package should be found."""
    folder = tmp_path_factory.mktemp(request.param) / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=source)
    commands = folder / "bin"
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(commands / "python", "-c", query, cwd=source).strip())
    parents = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "parent.pth").write_text("\n".join(sorted(parents)) + "\n")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    project = ["-e", "."] if request.param == "editable" else ["."]
    pip = [commands / "python", "-m", "pip", "install", "--quiet", *options, *project]
    run(*pip, cwd=source)
    home = source / "codegen" if request.param == "editable" else packages / "fmha_gen"
    return commands, home


def test_the_package_is_the_installed_one(
    installed: tuple[Path, Path], tmp_path: Path
) -> None:
    commands, home = installed
    code = (
        "import fmha_gen, fmha_gen.tune.command, fmha_gen.vendor.command;"
        " print(fmha_gen.__file__);"
        " from fmha_gen import render; print(render.template_folder())"
    )
    package, templates = run(commands / "python", "-c", code, cwd=tmp_path).split()
    assert Path(package).resolve() == (home / "__init__.py").resolve()
    assert (Path(templates) / "sm90" / "module.py.j2").is_file()
    assert not Path(templates).resolve().is_relative_to(ROOT)


def test_version(installed: tuple[Path, Path], tmp_path: Path) -> None:
    commands, _ = installed
    expected = f"fmha-gen {metadata.version('fmha-gen')}\n"
    assert run(commands / "fmha-gen", "--version", cwd=tmp_path) == expected


def test_schema(installed: tuple[Path, Path], tmp_path: Path) -> None:
    commands, _ = installed
    schema = json.loads(run(commands / "fmha-gen", "schema", cwd=tmp_path))
    assert schema["title"] == "fmha-gen spec"


def test_builds_the_same_bytes_as_here(
    installed: tuple[Path, Path], tmp_path: Path
) -> None:
    commands, _ = installed
    specs = [ROOT / "specs" / f"{stem}.yaml" for stem in SPECS]
    build = ["build", *specs, "--no-compile", "--out"]
    run(commands / "fmha-gen", *build, tmp_path / "theirs", cwd=tmp_path)
    here = [sys.executable, "-m", "fmha_gen.cli"]
    subprocess.run([*here, *build, tmp_path / "ours"], check=True, capture_output=True)
    theirs, ours = (fake.contents(tmp_path / name) for name in ("theirs", "ours"))
    assert {f"{stem}.py" for stem in SPECS} <= theirs.keys()
    assert theirs == ours


def test_vendors_with_the_licence(installed: tuple[Path, Path], tmp_path: Path) -> None:
    commands, _ = installed
    kernels = [ROOT / "generated" / f"{stem}.py" for stem in SPECS]
    vendor = ["vendor", *kernels, "--adapter", "transformers"]
    vendor += ["--into", tmp_path / "attention"]
    run(commands / "fmha-gen", *vendor, cwd=tmp_path)
    found = fake.contents(tmp_path / "attention")
    assert found["LICENSE"] == (ROOT / "LICENSE").read_text()
    assert f'KERNELS = {{\n    "{SPECS[0]}": ' in found["__init__.py"]
    assert "def mask(" in found["transformers_adapter.py"]


def test_has_the_example_of_an_export(installed: tuple[Path, Path]) -> None:
    example = "docs/examples/attention.cpp"
    text = (installed[1] / example).read_text("utf-8")
    assert text == (ROOT / "codegen" / example).read_text("utf-8")


def test_the_site_has_the_decisions(
    installed: tuple[Path, Path], tmp_path: Path
) -> None:
    commands, _ = installed
    spec = ROOT / "specs" / f"{SPECS[0]}.yaml"
    site = ["site", "pages", "--specs", spec, "--out", ROOT / "generated"]
    run(commands / "fmha-gen", *site, cwd=tmp_path)
    here = {path.stem for path in (ROOT / "codegen" / "decisions").glob("*.md")}
    there = {path.stem for path in (tmp_path / "pages" / "decisions").glob("*.html")}
    assert there == here != set()
