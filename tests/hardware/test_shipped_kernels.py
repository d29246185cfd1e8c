# SPDX-License-Identifier: Apache-2.0
"""Every shipped kernel holds on the GPU that it is for; skipped, with the reason, without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from fmha_gen.errors import EnvironmentProblem
from fmha_gen.evidence import validate

GENERATED = Path(__file__).resolve().parents[2] / "generated"
KERNELS = sorted(GENERATED.glob("*.py"))

pytestmark = pytest.mark.hardware


@pytest.fixture(scope="module")
def gpu() -> None:
    try:
        validate.require_gpu()
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))


def test_there_are_kernels() -> None:
    assert KERNELS


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.stem)
@pytest.mark.usefixtures("gpu")
def test_shipped_kernel_holds(kernel: Path, tmp_path: Path) -> None:
    copy = (
        tmp_path / kernel.name
    )  # its record goes beside the copy, not into the repository
    copy.write_bytes(kernel.read_bytes())
    try:
        outcomes = validate.validate([copy], timeout=validate.DEFAULT_TIMEOUT)
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))
    assert validate.failures(outcomes) == ""
    assert outcomes[0].result is not None
