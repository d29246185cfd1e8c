# SPDX-License-Identifier: Apache-2.0
"""Conversions to 16 bits are of two numbers: F2F, of one, cost a quarter of a kernel's speed."""

from pathlib import Path

import pytest
from fmha_gen.build import toolchain

GENERATED = Path(__file__).parents[2] / "generated"


@pytest.mark.parametrize("stem", ["sm90_d64_bf16_causal_cap30", "sm90_d64_bf16_causal"])
def test_no_number_is_converted_alone(stem: str) -> None:
    text = (GENERATED / f"{stem}.py").read_text("utf-8")
    disassembly = toolchain.listing(text, stem, "sm_90a").disassembly
    assert "F2FP.BF16" in disassembly
    assert "F2F." not in disassembly
