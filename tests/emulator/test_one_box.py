# SPDX-License-Identifier: Apache-2.0
"""A fixed length that fits the first of several boxes: the others must stay outside the tensor."""

from __future__ import annotations

import pytest
import support
from fmha_gen import plan, render
from fmha_gen.planning import sm90_context

from .test_cases_find import findings

HEAD = "arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 64\ntile: {q: 128}\n"
ONE_BOX = {
    "a row for two warpgroups": "seqlen: {q: 1, kv: 200}\n",
    "a warpgroup's rows": "seqlen: {q: 64, kv: 200}\nmask: causal\n",
    "a row for two CTAs": "seqlen: {q: 1, kv: 200}\ntile: {q: 64}\ncluster: [2, 1]\n",
    "a packed position": (
        "seqlen: {q: 1, kv: 200}\nheads: {q_per_kv: 8}\npack_gqa: true\nlse: true\n"
    ),
    "packed rows of a warpgroup": (
        "seqlen: {q: 8, kv: 200}\nheads: {q_per_kv: 8}\npack_gqa: true\n"
    ),
    "packed rows for two CTAs": (
        "seqlen: {q: 7, kv: 200}\nheads: {q_per_kv: 8}\npack_gqa: true\n"
        "cluster: [2, 1]\nmulticast: kv\n"
    ),
}
SEVERAL = {
    "rows of two warpgroups": "seqlen: {q: 65, kv: 200}\n",
    "a tile for two CTAs": "seqlen: {q: 128, kv: 200}\ncluster: [2, 1]\n",
    "two packed tiles": (
        "seqlen: {q: 17, kv: 200}\nheads: {q_per_kv: 8}\npack_gqa: true\n"
    ),
    "one warpgroup": "seqlen: {q: 1, kv: 200}\ntile: {q: 64}\n",
    "any length": "seqlen: {kv: 200}\n",
}


def kernel(fields):
    """The last of two lines for one key counts."""
    lines = {line.partition(":")[0]: line for line in (HEAD + fields).splitlines()}
    return plan.resolve(support.load_text("\n".join(lines.values()) + "\n"))


@pytest.mark.parametrize("fields", ONE_BOX.values(), ids=ONE_BOX)
def test_one_box_is_stored_once_or_it_is_a_race(fields, tmp_path, monkeypatch):
    planned = kernel(fields)
    assert planned.context["one_box"]
    text = render.render_kernel(planned)
    assert findings(tmp_path, "candidate", text, "ragged") == []
    monkeypatch.setattr(sm90_context.Traits, "one_box", property(lambda traits: False))
    text = render.render_kernel(kernel(fields))
    found = findings(tmp_path, "candidate", text, "ragged")
    assert any("TMA store writes bytes of out" in finding for finding in found), found


@pytest.mark.parametrize("fields", SEVERAL.values(), ids=SEVERAL)
def test_other_lengths_need_nothing(fields, tmp_path):
    planned = kernel(fields)
    assert not planned.context["one_box"]
    text = render.render_kernel(planned)
    assert findings(tmp_path, "candidate", text, "ragged") == []
