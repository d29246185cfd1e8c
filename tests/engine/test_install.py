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
from fmha_gen.evidence import table as evidence

from . import fake

ROOT = Path(__file__).parents[2]
PROJECT = (
    *("pyproject.toml", "README.md", "LICENSE"),
    *("codegen", "templates", "specs", "generated"),
)
SPECS = ("sm90_d64_bf16_full", "sm90_d128_bf16_causal_c2x1_kvmc_lse")


def run(*command: str | Path, cwd: Path) -> str:
    """Stdout of a command that must succeed; nothing leads it to the source tree under test."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["COLUMNS"] = "1000"  # no path is broken
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
        "import fmha_gen, fmha_gen.tune.command, fmha_gen.vendoring.command;"
        " print(fmha_gen.__file__);"
        " from fmha_gen.build import render; print(render.template_folder())"
    )
    package, templates = run(commands / "python", "-c", code, cwd=tmp_path).split()
    assert Path(package).resolve() == (home / "__init__.py").resolve()
    assert (Path(templates) / "sm90" / "forward" / "module.py.j2").is_file()
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


def test_brings_kernels_specs_evidence_and_the_tutorial(
    installed: tuple[Path, Path], tmp_path: Path
) -> None:
    commands, home = installed
    found = json.loads(run(commands / "fmha-gen", "kernels", "--json", cwd=tmp_path))
    here = evidence.load(ROOT / "generated")
    assert {each["kernel"]: each["record"] for each in found} == {
        record["kernel"]: record for record in here
    }
    for each in found:
        for kind, folder in (("file", "generated"), ("spec", "specs")):
            file = Path(each[kind])
            assert not file.resolve().is_relative_to(ROOT)
            assert file.read_text() == (ROOT / folder / file.name).read_text()
    table = run(commands / "fmha-gen", "kernels", cwd=tmp_path).splitlines()
    assert [line.split()[:2] for line in table[1:]] == [
        [record["kernel"], record["rung"]] for record in here
    ]
    tutorial = Path("docs", "tutorial.md")
    assert (home / tutorial).read_text() == (ROOT / "codegen" / tutorial).read_text()
    assert str(tutorial) in run(commands / "fmha-gen", "--help", cwd=tmp_path)


def test_packaged_kernels_go_by_their_names(
    installed: tuple[Path, Path], tmp_path: Path
) -> None:
    """From an empty folder: nothing of a checkout is there to help."""
    commands, home = installed
    fmha_gen = commands / "fmha-gen"
    stem = SPECS[0]
    explained = run(fmha_gen, "explain", stem, cwd=tmp_path)
    assert "NVIDIA H200" in explained
    run(fmha_gen, "vendor", *SPECS, "--into", "attention", cwd=tmp_path)
    lock = (tmp_path / "attention" / "VENDOR.lock").read_text()
    packaged = home.name == "fmha_gen"
    assert (" commit:packaged\n" in lock) == packaged
    for name in SPECS:
        copy = tmp_path / "attention" / f"{name}.py"
        assert copy.read_text() == (ROOT / "generated" / copy.name).read_text()
    update = run(fmha_gen, "vendor", "--update", "attention", cwd=tmp_path)
    assert update == "nothing newer\n"
    looked_at = ("verify", stem, "attention", "--against", "packaged")
    assert run(fmha_gen, *looked_at, cwd=tmp_path) == "7 intact\n"
    run(fmha_gen, "diff", stem, stem, "--no-compile", cwd=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"attention"}


def test_a_build_adopts_what_is_proven_of_its_text(
    installed: tuple[Path, Path], tmp_path: Path
) -> None:
    commands, _ = installed
    (tmp_path / "mine").mkdir()
    shutil.copy(ROOT / "specs" / f"{SPECS[0]}.yaml", tmp_path / "mine")
    own = (tmp_path / "mine" / f"{SPECS[0]}.yaml").read_text()
    (tmp_path / "mine" / "own.yaml").write_text(own)
    run(commands / "fmha-gen", "build", "mine", "--no-compile", cwd=tmp_path)
    built = tmp_path / "generated" / "records"
    shipped = ROOT / "generated" / "records" / f"{SPECS[0]}.json"
    assert (built / shipped.name).read_text() == shipped.read_text()
    # The same spec under another name is another text: no evidence is about that.
    assert json.loads((built / "own.json").read_text())["rung"] == "rendered"
    run(commands / "fmha-gen", "build", SPECS[1], "--no-compile", cwd=tmp_path)
    assert (built / f"{SPECS[1]}.json").is_file()
