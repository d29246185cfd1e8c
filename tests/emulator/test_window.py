# SPDX-License-Identifier: Apache-2.0
"""A mask with a left edge, which no spec has yet: loops that are masked, whole and masked again."""

from __future__ import annotations

from pathlib import Path

import pytest
from fmha_gen.build import render
from fmha_gen.ops.masks import Mask, window
from fmha_gen.planning import plan
from support import causal_is, load_text

from .test_cases_find import findings

SPEC = (
    "{{arch: {}, op: fmha_fwd, dtype: bf16, head_dim: 64, mask: causal, lse: true{}}}"
)
SPECS = {
    "sm90": SPEC.format("sm90", ", tile: {q: 128, kv: 64}"),
    "sm100": SPEC.format("sm100", ""),
}
# Of `long_kv` some blocks of a tile are whole, and some on either side of them are not.
WINDOWS = {"sm90": window(300, 0), "sm100": window(500, 9)}
NARROW = window(40, 0)
IN_WORD = "in_word = cutlass.min(cutlass.max(begin"
LEFT = "left = "
BLOCKS = "Range(first, cutlass"
FAULTS = {
    "rows see a tile of keys more": (
        "sm90",
        "long_kv",
        "% 2 >= unseen",
        "% 2 >= unseen - 64",
    ),
    "blocks at the left edge are whole": ("sm90", "ragged", LEFT, "left = 0 * "),
    "the first block is left out": (
        "sm100",
        "ragged",
        BLOCKS,
        "Range(first + 1, cutlass",
    ),
    "a key is lost": ("sm100", "ragged", IN_WORD, f"{IN_WORD} + 1"),
    "a key too many": ("sm90", "ragged", "% 2 >= unseen", "% 2 >= unseen - 1"),
}


def found(folder: Path, arch: str, tag: str, mask: Mask, *fault: str) -> list[str]:
    with causal_is(mask):
        text = render.render_kernel(plan.resolve(load_text(SPECS[arch])))
        assert "# 3. blocks that the left edge" in text
        if fault:
            assert text.count(fault[0]) == 1
            text = text.replace(*fault)
        path = folder / "candidate.py"
        path.write_text(text, "utf-8")
        return findings(path, tag)


@pytest.mark.parametrize("arch", SPECS)
@pytest.mark.parametrize("tag", ["long_kv", "ragged"])
def test_a_window_is_what_rows_see(arch: str, tag: str, tmp_path: Path) -> None:
    mask = WINDOWS[arch] if tag == "long_kv" else NARROW
    assert found(tmp_path, arch, tag, mask) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_the_left_edge_is_found(fault: str, tmp_path: Path) -> None:
    arch, tag, *change = FAULTS[fault]
    mask = WINDOWS[arch] if tag == "long_kv" else NARROW
    told = found(tmp_path, arch, tag, mask, *change)
    assert any("of out: wrong" in each for each in told), told
