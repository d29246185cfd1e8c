# SPDX-License-Identifier: Apache-2.0
"""A vendored package works, and is verified, where only PyTorch and the DSL are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import support
from fmha_gen.host import tools
from fmha_gen.vendoring import command
from support import GENERATED, ROOT

pytest.importorskip("torch", reason="the package's operators need PyTorch")

ALONE = Path(__file__).with_name("alone.py")
STEM = "sm90_d128_bf16_causal_lse"
SECONDS = 300  # some 15 are usual


def run(*arguments: str | Path, cwd: Path) -> str:
    """What Python says, isolated from all that is installed."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-I", "-S", *arguments],
        cwd=cwd,
        env=kept | {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_NO_CACHE": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_vendored_package_alone(tmp_path: Path) -> None:
    packages, folder = tmp_path / "site-packages", tmp_path / "attention"
    packages.mkdir()
    support.link_distributions(packages, "torch", tools.DSL, tools.FFI)
    command.vendor(command.Options(folder, GENERATED, (STEM,), init=True))

    report = json.loads(run(ALONE, packages, folder, cwd=tmp_path))
    assert report["importable"] == ["torch", "cutlass"]
    assert report["kernels"] == [STEM]
    assert report["imported"] == []  # kernels are, with the first call
    assert report["fake"] == [[2, 100, 3, 128], "cuda:0", [2, 3, 100], "torch.float32"]
    assert f"  {STEM}: arch is sm90, not cpu" in report["refusal"]
    assert f"  {STEM}: mask is causal, not none" in report["traced"]
    assert report["compiled"]

    said = run(ROOT / "codegen" / "verify.py", folder, cwd=tmp_path)
    assert said == "5 intact\n"
