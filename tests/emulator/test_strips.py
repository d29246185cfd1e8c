# SPDX-License-Identifier: Apache-2.0
"""Warpgroups skip blocks only where what they skip fits in the rings: else nobody goes on."""

from __future__ import annotations

import pytest
import support
from fmha_gen.build import render
from fmha_gen.planning import plan, sm90_context

from .rehearsals import findings, written

HEAD = "arch: sm90\nop: fmha_fwd\ndtype: bf16\nmask: causal\nhead_dim: 64\n"
# (tile, stages): the last warpgroup sees that many blocks more than the first one.
FITS = {
    "two": ("{q: 128, kv: 32}", "{q: 2, kv: 3, v: 2}"),
    "two of one Q stage": ("{q: 128, kv: 32}", "{q: 1, kv: 3, v: 2}"),
    "four": ("{q: 192, kv: 32}", "{q: 2, kv: 5, v: 4}"),
}
TOO_FEW = {
    "K for two": ("{q: 128, kv: 32}", "{q: 2, kv: 2, v: 3}"),
    "K for two of one Q stage": ("{q: 128, kv: 32}", "{q: 1, kv: 2, v: 2}"),
    "K for four": ("{q: 192, kv: 32}", "{q: 2, kv: 4, v: 4}"),
    "V for four": ("{q: 192, kv: 32}", "{q: 2, kv: 5, v: 3}"),
}


def kernel(tile, stages):
    planned = plan.resolve(support.load_text(f"{HEAD}tile: {tile}\nstages: {stages}\n"))
    return planned.context["strips"], render.render_kernel(planned)


@pytest.mark.parametrize("sizes", FITS.values(), ids=FITS)
def test_what_fits_is_skipped_and_runs(sizes, tmp_path):
    strips, text = kernel(*sizes)
    assert strips and "skip_blocks" in text
    assert findings(written(tmp_path, text), "long_kv") == []


@pytest.mark.parametrize("sizes", TOO_FEW.values(), ids=TOO_FEW)
def test_what_does_not_fit_is_not_skipped(sizes):
    strips, text = kernel(*sizes)
    assert not strips and "skip_blocks" not in text


@pytest.mark.parametrize("what", support.rotated(TOO_FEW, 2))
def test_what_does_not_fit_is_a_deadlock_if_skipped(what, tmp_path, monkeypatch):
    monkeypatch.setattr(sm90_context.Traits, "strips", property(lambda traits: True))
    strips, text = kernel(*TOO_FEW[what])
    assert strips and "skip_blocks" in text
    found = findings(written(tmp_path, text), "long_kv")
    assert any("deadlock" in finding for finding in found), found
