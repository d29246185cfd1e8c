# SPDX-License-Identifier: Apache-2.0
"""A kernel with its record, and interpreters with doctored DSLs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fmha_gen.build import records, toolchain
from fmha_gen.build.render import body_digest
from fmha_gen.host import cache

DOCTORED = Path(__file__).with_name("doctored.py")
CHAIN = Path(__file__).parents[1] / "engine" / "data" / "wgmma_chain.py"


@pytest.fixture(scope="session")
def chain_report() -> toolchain.CompileReport:
    return toolchain.compile_kernel(CHAIN.read_text(), CHAIN.stem)


@pytest.fixture
def kernel(tmp_path: Path, chain_report: toolchain.CompileReport) -> Path:
    """A file whose record says what this machine's DSL makes of it."""
    path = tmp_path / "generated" / CHAIN.name
    path.parent.mkdir()
    path.write_text(CHAIN.read_text())
    record = records.merge_rung(
        None,
        kernel=path.stem,
        body_sha256=body_digest(path.read_text()),
        rung="compiled",
        result=chain_report.to_json(),
    )
    at = path.parent / records.path_of(path.stem)
    at.parent.mkdir()
    at.write_text(records.dump(record))
    return path


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[..., Path]:
    """Makes an interpreter of what `doctored.py` takes before -c."""

    def make(*change: str) -> Path:
        path = tmp_path / "python"
        command = shlex.join([sys.executable, str(DOCTORED), *change])
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o755)
        return path

    return make


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "cache"))
    return tmp_path / "cache"
