# SPDX-License-Identifier: Apache-2.0
"""These kernels are what a shipped one must be: no stack, no spills, a name of their own."""

from __future__ import annotations

import pytest
from fmha_gen import toolchain

from . import harness

STEMS = ("attention_block", "attention_tile")  # the others hardly use registers


@pytest.mark.parametrize("stem", STEMS)
def test_it_passes_the_gate(stem):
    text = (harness.HERE / f"{stem}.py").read_text(encoding="utf-8")
    report = toolchain.compile_kernel(text, stem, "sm_100a")
    assert toolchain.gate(report) == []
    (kernel,) = report.kernels
    assert kernel.entry.startswith(stem)
