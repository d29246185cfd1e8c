# SPDX-License-Identifier: Apache-2.0
"""Builds with the real templates: kept from edited files and bad specs (killed: test_kill.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from fmha_gen import cli
from typer.testing import CliRunner

from . import fake

SPEC = "arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: {head_dim}\nlse: {lse}\n"


@pytest.fixture
def specs(tmp_path, monkeypatch) -> Path:
    """Two specs, in a working directory of their own."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "specs"
    folder.mkdir()
    write(folder, "a", head_dim=64)
    write(folder, "b", head_dim=128)
    return folder


def write(folder: Path, stem: str, *, head_dim: int, lse: str = "false") -> None:
    (folder / f"{stem}.yaml").write_text(SPEC.format(head_dim=head_dim, lse=lse))


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["build", "specs/", "--no-compile", *arguments])


def contents(folder: Path) -> dict[str, str]:
    return fake.contents(folder) if folder.exists() else {}


def test_an_edited_kernel_is_kept_until_force(specs, tmp_path):
    assert run().exit_code == 0
    kernel = tmp_path / "generated" / "a.py"
    built = kernel.read_text()
    kernel.write_text(built.replace("1.0 / math.sqrt(HEAD_DIM_QK)", "0.125"))
    assert kernel.read_text() != built
    write(specs, "b", head_dim=96)
    before = contents(tmp_path / "generated")

    result = run()
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "rendering 2 kernels\n" "generated/a.py: edited by hand; --force overwrites it."
    )
    line = "    scale = {} if softmax_scale is None else softmax_scale\n"
    assert f"\n-{line.format('0.125')}" in result.stderr
    assert f"\n+{line.format('1.0 / math.sqrt(HEAD_DIM_QK)')}" in result.stderr
    assert contents(tmp_path / "generated") == before

    checked = run("--check")
    assert checked.exit_code == 1
    assert "edited: a.py\n" in checked.stdout

    assert run("--force").exit_code == 0
    assert kernel.read_text() == built
    assert run("--check").exit_code == 0


def test_a_bad_spec_among_good_ones_stops_all(specs, tmp_path):
    assert run().exit_code == 0
    before = contents(tmp_path / "generated")
    write(specs, "a", head_dim=96)
    (specs / "c.yaml").write_text(
        SPEC.format(head_dim=256, lse="false") + "stages: {kv: 8}\ntile: {kv: 96}\n"
    )
    (specs / "d.yaml").write_text(SPEC.format(head_dim=72, lse="maybe"))
    result = run()
    assert result.exit_code == 2
    lines = [line for line in result.stderr.splitlines() if "error[" in line]
    assert [line.split(" ")[0] for line in lines] == [
        "specs/c.yaml:6:14:",  # the plan's, beside what loading found
        "specs/d.yaml:4:11:",
        "specs/d.yaml:5:6:",
    ]
    assert contents(tmp_path / "generated") == before
