# SPDX-License-Identifier: Apache-2.0
"""`build --export`: what is written, when it is written again, and that a kernel loads its own."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fmha_gen import cli, export, toolchain
from fmha_gen.errors import EnvironmentProblem
from support import GENERATED, SPECS
from typer.testing import CliRunner

STEM = "sm90_d64_bf16_full"

# Loads a kernel where compiling is impossible; prints how long its compile() took.
LOADER = """
import importlib.util, json, sys, time
import cutlass.cute as cute

def refuse(*_, **__):
    raise AssertionError("compiled")

cute.compile = refuse
spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
begin = time.perf_counter()
run = kernel.compile()
seconds = time.perf_counter() - begin
try:
    run("no", "such", "arguments")
except TypeError as error:
    refusal = str(error)
print(json.dumps({"seconds": seconds, "refusal": refusal}))
"""


def load(kernel: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOADER, str(kernel)],
        env=os.environ | {"CUTE_DSL_ARCH": "sm_90a"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one shipped kernel and what the command line exported of it."""
    folder = tmp_path_factory.mktemp("exported")
    command = ["build", str(SPECS / f"{STEM}.yaml"), "--out", str(folder)]
    done = CliRunner().invoke(cli.app, [*command, "--export", str(folder)])
    assert done.exit_code == 0, done.output
    kernel = folder / f"{STEM}.py"
    assert kernel.read_bytes() == (GENERATED / kernel.name).read_bytes()
    return folder


def test_a_kernel_loads_its_object_and_compiles_nothing(exported: Path) -> None:
    done = load(exported / f"{STEM}.py")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    # It is the function of `launch`: it knows how many arguments that has.
    assert "launch(" in report["refusal"]
    print(f"loaded in {report['seconds'] * 1e3:.1f} ms")


def test_the_object_of_another_text_is_refused(exported: Path, tmp_path: Path) -> None:
    for path in exported.glob(f"{STEM}.*"):
        shutil.copy(path, tmp_path)
    kernel = tmp_path / f"{STEM}.py"
    kernel.write_text(kernel.read_text("utf-8") + "# edited\n", "utf-8")
    done = load(kernel)
    assert done.returncode != 0
    assert f"ImportError: {kernel}: its .o is of another text" in done.stderr
    assert "AssertionError: compiled" not in done.stderr
    (tmp_path / f"{STEM}.o").unlink()
    assert "AssertionError: compiled" in load(kernel).stderr


def test_the_header_declares_the_object_s_function(exported: Path) -> None:
    text = (exported / f"{STEM}.py").read_bytes()
    symbol = f"__tvm_ffi_{STEM}_{hashlib.sha256(text).hexdigest()}"
    header = (exported / f"{STEM}.h").read_text("utf-8")
    compiled = (exported / f"{STEM}.o").read_bytes()
    assert f"#define {STEM} {symbol}\n" in header
    assert f"object sha256:{hashlib.sha256(compiled).hexdigest()}\n" in header
    assert " *   q, k, v, out\n" in header
    assert symbol.encode() in compiled


# --- when it is written again ----------------------------------------------------------

LAUNCH = "def launch(\n    q: cute.Tensor,\n    lse: cute.Tensor,\n    sm_count: Int32,\n):\n"
ELSEWHERE = "def kernel(\n    mLSE: cute.Tensor,\n):\n"
SOURCE = export.Source("a", LAUNCH + ELSEWHERE, "sm_90a")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The symbols that were compiled, by a compiler that numbers its objects."""
    symbols: list[str] = []

    def compile_object(text: str, stem: str, arch: str, symbol: str) -> bytes:
        assert (stem, arch) == ("a", "sm_90a")
        symbols.append(symbol)
        return b"object %d" % len(symbols)

    monkeypatch.setattr(toolchain, "compile_object", compile_object)
    return symbols


def test_what_is_right_stays(tmp_path: Path, compiles: list[str]) -> None:
    folder = tmp_path / "new"
    assert export.export([SOURCE], folder) == {"a": True}
    assert export.export([SOURCE], folder) == {"a": False}
    assert len(compiles) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["a.h", "a.o"]
    assert "q, lse\n" in (folder / "a.h").read_text("utf-8")


@pytest.mark.parametrize("damaged", ["a.o", "a.h"])
@pytest.mark.parametrize("missing", [True, False])
def test_what_is_wrong_is_made_again(
    tmp_path: Path, compiles: list[str], damaged: str, missing: bool
) -> None:
    export.export([SOURCE], tmp_path)
    if missing:
        (tmp_path / damaged).unlink()
    else:
        (tmp_path / damaged).write_bytes(b"\xff")
    assert export.export([SOURCE], tmp_path) == {"a": True}
    assert (tmp_path / "a.o").read_bytes() == b"object 2"
    assert export.export([SOURCE], tmp_path) == {"a": False}


def test_another_text_has_another_symbol(tmp_path: Path, compiles: list[str]) -> None:
    export.export([SOURCE], tmp_path)
    other = export.Source("a", SOURCE.text + "\n", "sm_90a")
    assert export.export([other], tmp_path) == {"a": True}
    assert compiles == [export.symbol_of(SOURCE), export.symbol_of(other)]
    assert compiles[0] != compiles[1]


def test_a_folder_that_cannot_be_written(tmp_path: Path, compiles: list[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match="file: cannot write there"):
        export.export([SOURCE], tmp_path / "file")
    (tmp_path / "a.o").mkdir()
    with pytest.raises(EnvironmentProblem, match="cannot write there: Is a"):
        export.export([SOURCE], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.o", "file"]


def test_a_compiler_without_room_is_not_the_folders_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")

    monkeypatch.setattr(toolchain, "compile_object", full)
    with pytest.raises(OSError, match="No space left on device: '/tmp/x'"):
        export.export([SOURCE], tmp_path)


@pytest.mark.parametrize("option", ["--check", "--no-compile"])
def test_export_needs_a_build_that_compiles(tmp_path: Path, option: str) -> None:
    command = ["build", str(SPECS), "--export", str(tmp_path / "out"), option]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_without_tvm_ffi_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "FFI", "no-such-distribution")
    with pytest.raises(toolchain.EnvironmentProblem, match="pip install"):
        export.export([SOURCE], tmp_path)
