# SPDX-License-Identifier: Apache-2.0
"""Kernels for combinations that are not shipped: their whole text, and that they compile.

`FMHA_GEN_ACCEPT=1` writes new texts under `expected/`, and prints what changed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import support
from fmha_gen import build
from fmha_gen.executor import Local

HERE = Path(__file__).parent
SPECS = sorted((HERE / "specs").glob("*.yaml"))

each_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.stem)


@each_spec
def test_text(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = support.kernel_text(spec.read_text("utf-8"), spec.stem)
    support.check_accepted(HERE / "expected" / f"{spec.stem}.py", text, capsys)


@each_spec
def test_compiles_and_passes_the_gate(spec: Path, tmp_path: Path) -> None:
    result = build.build([spec], tmp_path, executor=Local(1))
    assert result.failures == ()
    (kernel,) = result.kernels
    assert kernel.rung == "compiled"


def test_every_text_has_its_spec() -> None:
    expected = {path.stem for path in (HERE / "expected").iterdir()}
    assert expected == {spec.stem for spec in SPECS}
    assert 3 <= len(SPECS) <= 6
