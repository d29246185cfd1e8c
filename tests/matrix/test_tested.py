# SPDX-License-Identifier: Apache-2.0
"""What kernels say they are tested under is what decision 0021 shows, and they warn elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import support
from fmha_gen import toolchain
from fmha_gen.arch import TESTED_DSL

DATA = support.ROOT / "codegen" / "decisions" / "0021-dsl-matrix.json"

FINE = ("same", "changed")
KNOWN = {("sm100_d192x128_fp16_full_c2x1_kvmc", "4.7.1")}  # spills 16 bytes

# Imports a kernel twice under a version of the DSL, and prints what was warned of.
IMPORT = """
import importlib, json, sys, warnings
import cutlass
cutlass.__version__ = sys.argv[2] or cutlass.__version__
sys.path.insert(0, sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    importlib.import_module("candidate")
    importlib.import_module("candidate")
print(json.dumps([str(each.message) for each in caught if "candidate" in each.filename]))
"""


@pytest.fixture(scope="module", params=["sm90", "sm100"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    spec = f"arch: {request.param}\nop: fmha_fwd\ndtype: bf16\nhead_dim: 64\n"
    place: Path = tmp_path_factory.mktemp(request.param)
    (place / "candidate.py").write_text(support.kernel_text(spec), "utf-8")
    return place


def warned(folder: Path, version: str) -> list[str]:
    command = [sys.executable, "-c", IMPORT, str(folder), version]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told: list[str] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("version", ["", *(f"{minor}.99" for minor in TESTED_DSL)])
def test_a_tested_dsl_is_silent(folder: Path, version: str) -> None:
    assert warned(folder, version) == []


@pytest.mark.parametrize("version", ["4.9.0", "4.80.1", "4.8.0.dev0", "5.0.0"])
def test_another_one_is_warned_of_once(folder: Path, version: str) -> None:
    assert warned(folder, version) == [
        f"CuTe DSL {version} is untested; tested: {TESTED_DSL}"
    ]


def test_tested_is_what_the_matrix_shows() -> None:
    data = json.loads(DATA.read_text("utf-8"))
    # The records are of the version that we support.
    versions = {*data["environments"], toolchain.require_dsl()}
    assert {version.rpartition(".")[0] for version in versions} == set(TESTED_DSL)
    cells = {(cell["kernel"], cell["dsl"]): cell for cell in data["cells"]}
    kernels = {kernel for kernel, _ in cells}
    assert kernels and kernels <= set(support.SHIPPED)
    assert cells.keys() == {
        (stem, version) for stem in kernels for version in data["environments"]
    }
    failed = {key for key, cell in cells.items() if cell["verdict"] not in FINE}
    assert failed == KNOWN


def test_the_supported_dsl_is_tested() -> None:
    assert toolchain.require_dsl().rpartition(".")[0] in TESTED_DSL
