# SPDX-License-Identifier: Apache-2.0
"""What a compile of today adds to a kernel that no record knows."""

from __future__ import annotations

import support
from fmha_gen.build import engine
from fmha_gen.diff import kernels
from fmha_gen.diff.compare import TOTAL, by_class
from fmha_gen.diff.measure import measure
from fmha_gen.host.executor import Local

STEM = "sm100_d128_bf16_causal_gqa4_lse"

# What only one role's loop issues, and how often for both halves of a tile of 128 columns.
ONLY_THERE = {"mma": ("MMA", 32), "load": ("TMA", 4)}


def test_a_compile_counts_the_loops_of_roles() -> None:
    text = (support.GENERATED / f"{STEM}.py").read_text("utf-8")
    state = kernels.of_text(STEM, text, None, origin="", path="")
    assert state.compiled is None and state.loops == {}
    (measured,) = measure([state], engine.default_engine(), executor=Local(1))
    assert measured.compiled is not None
    loops = {name: by_class(counts) for name, counts in measured.loops[""].items()}
    roles = {"softmax", "masked softmax", "correction", "mma", "load"}
    assert loops.keys() == roles
    for name, (kind, count) in ONLY_THERE.items():
        assert {role for role in roles if loops[role][kind]} == {name}
        assert loops[name][kind] == count
    plain, masked = loops["softmax"], loops["masked softmax"]
    assert plain["exp2"] == masked["exp2"] > 64 > loops["correction"]["exp2"]
    assert plain[TOTAL] < masked[TOTAL]


def test_nothing_to_measure_needs_nothing() -> None:
    assert measure([], engine.default_engine()) == []
