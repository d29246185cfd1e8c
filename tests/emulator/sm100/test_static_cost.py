# SPDX-License-Identifier: Apache-2.0
"""What a KV block costs an sm100 kernel, beside what FlashAttention-4's costs (0019)."""

from __future__ import annotations

import pytest
from fmha_gen import sass, toolchain

from . import static_cost

# Instructions of an iteration of FlashAttention-4's, compiled for the same spec.
PEER = {
    "softmax, masked": 687,
    "softmax, unmasked": 515,
    "correction, no rescale": 20,
    "correction, rescale": 186,
    "mma": 220,
    "load": 51,
}
# Where ours has more, and why, says 0019.
MORE = {"correction, no rescale": 5, "mma": 89, "load": 19}


@pytest.fixture(scope="module")
def loops():
    path = static_cost.OURS
    text = path.read_text(encoding="utf-8")
    found = toolchain.listing(text, path.stem, "sm_100a")
    return list(static_cost.loops(sass.parse(found.disassembly)))


def test_every_role_has_one_loop(loops):
    assert sorted(name for name, _ in loops) == sorted(PEER)


def test_no_loop_is_longer_than_the_peers_without_a_reason(loops):
    allowed = {name: PEER[name] + MORE.get(name, 0) for name in PEER}
    assert {n: i for n, i in loops if len(i) > allowed[n]} == {}


def test_nothing_is_multiplied_loaded_or_exponentiated_twice(loops):
    counts = {name: dict(static_cost.counts(found)) for name, found in loops}
    assert counts["mma"]["MMAs (UTCHMMA)"] == 2 * (8 + 8)  # halves, QK and PV
    assert counts["load"]["TMA loads"] == 2 * 2  # K and V, boxes of 64 columns
    for name in ("softmax, masked", "softmax, unmasked"):
        # A 1 is the factor's; 16 columns are the polynomial's.
        assert counts[name]["exp2 (MUFU.EX2)"] == 128 - 16 + 1
