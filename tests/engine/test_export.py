# SPDX-License-Identifier: Apache-2.0
"""`build --export`: what is written, when it is written again."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fmha_gen import cli
from fmha_gen.build import export, toolchain
from fmha_gen.errors import EnvironmentProblem
from fmha_gen.evidence import validate
from fmha_gen.host import tools
from support import GENERATED, ROOT, SPECS
from typer.testing import CliRunner

STEM = "sm90_d64_bf16_full"


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


def test_the_header_declares_the_object_s_function(exported: Path) -> None:
    text = (exported / f"{STEM}.py").read_bytes()
    symbol = f"__tvm_ffi_{STEM}_{hashlib.sha256(text).hexdigest()}"
    header = (exported / f"{STEM}.h").read_text("utf-8")
    compiled = (exported / f"{STEM}.o").read_bytes()
    assert f"int {symbol}(\n" in header
    assert "#define" not in header
    assert f"object sha256:{hashlib.sha256(compiled).hexdigest()}\n" in header
    assert " *   q:   [batch, seqlen_q, heads, 64] bf16\n" in header
    assert " *   softmax_scale\n" in header
    assert " * args, 6 of them, " in header
    assert symbol.encode() in compiled


# --- from C and C++ ---------------------------------------------------------------------

EXAMPLE = ROOT / "codegen" / "docs" / "examples" / "attention.cpp"
# As in the example's first lines.
LIBRARIES = """
from cutlass.cute import runtime
for library in runtime.find_runtime_libraries(enable_tvm_ffi=True):
    print(library, "-Wl,-rpath," + library.rpartition("/")[0])
"""
STRICT = ("-Wall", "-Wextra", "-Werror")

needs_gxx = pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("gcc") is None,
    reason="needs gcc and g++",
)


def said_by(*command: str | Path) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=300
    ).stdout


@pytest.fixture(scope="module")
def linking() -> list[str]:
    """What a link needs besides objects."""
    return [*said_by(sys.executable, "-c", LIBRARIES).split(), "-ldl"]


@pytest.fixture(scope="module")
def headers(exported: Path) -> list[str]:
    folder = said_by(sys.executable, "-m", "tvm_ffi.config", "--includedir").strip()
    return [f"-I{exported}", f"-isystem{folder}"]


@pytest.fixture(scope="module")
def example(
    exported: Path,
    headers: list[str],
    linking: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    program = tmp_path_factory.mktemp("example") / "attention"
    compiled = exported / f"{STEM}.o"
    command = ["g++", "-std=c++17", *STRICT, EXAMPLE, compiled, *headers, *linking]
    said_by(*command, "-o", program)
    return program


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@needs_gxx
@pytest.mark.skipif(has_driver(), reason="has a driver: the hardware test runs it")
def test_the_example_links_and_comes_as_far_as_the_driver(example: Path) -> None:
    done = subprocess.run([example], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("RuntimeError: ")
    assert "cudaErrorInsufficientDriver" in done.stderr


@needs_gxx
@pytest.mark.hardware
def test_the_example_is_right_on_the_gpu(example: Path) -> None:
    try:
        validate.require_gpu()
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))
    done = subprocess.run([example], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


CALLER = f"""
#include <stddef.h>
#include <stdio.h>
#include "{STEM}.h"

int main(void) {{
  TVMFFIAny result = {{0}};
  TVMFFISafeCallType call = {STEM};
  TVMFFIObjectHandle error = NULL;
  int status = call(NULL, NULL, 0, &result);
  TVMFFIErrorMoveFromRaised(&error);
  printf("%d %s\\n", status, error == NULL ? "no error" : "an error");
  return TVMFFIObjectDecRef(error);
}}
"""


@needs_gxx
def test_the_header_is_c_as_well(
    exported: Path, headers: list[str], linking: list[str], tmp_path: Path
) -> None:
    caller, program = tmp_path / "caller.c", tmp_path / "caller"
    caller.write_text(CALLER)
    options = ["-std=c99", "-pedantic", *STRICT, *headers]
    said_by(*("gcc", *options, caller, exported / f"{STEM}.o", *linking, "-o", program))
    assert said_by(program) == "-1 an error\n"  # too few arguments


TYPED = f"""
#include <tvm/ffi/tvm_ffi.h>
#include <cstdio>
#include "{STEM}.h"

int main() {{
  int64_t shape[] = {{2, 16, 3, 96}}, strides[] = {{4608, 288, 96, 1}};  // it is made for 64
  DLTensor x{{shape, {{kDLCUDA, 0}}, 4, {{kDLBfloat, 16, 1}}, shape, strides, 0}};
  try {{
    tvm::ffi::Function::InvokeExternC(nullptr, {STEM}, &x, &x, &x, &x, 0.125, 132);
  }} catch (const tvm::ffi::Error &error) {{
    std::printf("%s: %s", error.kind().c_str(), error.message().c_str());
  }}
}}
"""


@needs_gxx
def test_what_the_header_says_of_typed_calls(
    exported: Path, headers: list[str], linking: list[str], tmp_path: Path
) -> None:
    caller, program = tmp_path / "typed.cpp", tmp_path / "typed"
    caller.write_text(TYPED)
    command = ["g++", "-std=c++17", caller, exported / f"{STEM}.o", *headers]
    said_by(*command, *linking, "-o", program)
    assert re.match(r"ValueError: .*\bq\b.*\b64\b", said_by(program), re.DOTALL)


@needs_gxx
def test_the_header_replaces_no_identifier(
    exported: Path, headers: list[str], linking: list[str], tmp_path: Path
) -> None:
    """A member of the kernel's name, defined where the header is not and used where it is."""
    declared = f"struct Choice {{ enum Kind {{ {STEM} = 3 }}; int {STEM}_(); }};\n"
    declared += f"namespace theirs {{ int {STEM}(); }}\n"
    defined, used, program = (tmp_path / name for name in ("a.cpp", "b.cpp", "program"))
    defined.write_text(f"{declared} int theirs::{STEM}() {{ return Choice::{STEM}; }}")
    used.write_text(
        f'#include "{STEM}.h"\n{declared}'
        f"int main() {{ return theirs::{STEM}() + ({STEM} == nullptr); }}"
    )
    options = ["-std=c++17", *headers, defined, used, exported / f"{STEM}.o"]
    said_by("g++", *options, *linking, "-o", program)
    assert subprocess.run([program], timeout=60, check=False).returncode == 3


# --- when it is written again ----------------------------------------------------------

SPEC = {
    **{"op": "fmha_fwd", "dtype": "fp16", "head_dim": {"qk": 64, "v": 64}, "lse": True},
    **{"seqlen": {"q": "dynamic", "kv": 9}, "q_per_kv": 1},
}
SOURCE = export.Source("a", f"{SPEC = }\n", "sm_90a")


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
    header = (folder / "a.h").read_text("utf-8")
    assert " *   lse: [batch, heads, seqlen_q] fp32, natural log\n" in header
    assert " * args, 7 of them, " in header
    assert "strides (but of lse) must be positive" in header


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
    monkeypatch.setattr(tools, "FFI", "no-such-distribution")
    with pytest.raises(toolchain.EnvironmentProblem, match="pip install"):
        export.export([SOURCE], tmp_path)
