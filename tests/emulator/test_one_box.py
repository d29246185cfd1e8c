# SPDX-License-Identifier: Apache-2.0
"""A fixed length that fits the first of several boxes: the others must stay outside the tensor."""

from __future__ import annotations

import pytest
import support
from fmha_gen.build import kernel_text, render
from fmha_gen.ops import cases
from fmha_gen.planning import plan, sm90_context, sm100_context

from .rehearsals import findings, written
from .walks import walks

HEAD = "arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 64\ntile: {q: 128}\n"
PAIR = "arch: sm100\ntile: {}\nhead_dim: 128\ncluster: [2, 1]\n"
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
# The second CTA would load again what the first one has; it stores none of it.
LOADED = {
    "a tile for two CTAs": "head_dim: 240\nseqlen: {q: 77, kv: 77}\ncluster: [2, 1]\n",
    "a whole tile for two CTAs": "seqlen: {q: 128, kv: 200}\ncluster: [2, 1]\n",
    "a packed position for two CTAs": (
        "head_dim: {qk: 256, v: 192}\nseqlen: {q: 1}\nheads: {q_per_kv: 128}\n"
        "pack_gqa: true\ncluster: [2, 1]\nmulticast: k\nlse: true\n"
    ),
    "a key in slices": "seqlen: {kv: 1}\ncluster: [2, 1]\nmulticast: kv\n",
    "a key in slices, beside a group": (
        "seqlen: {kv: 1}\nheads: {q_per_kv: 6}\ncluster: [1, 2]\nmulticast: kv\n"
    ),
    "a key of a pair": PAIR + "seqlen: {q: dynamic, kv: 1}\ncta_group: 2\n",
    "a key of two CTAs": PAIR + "seqlen: {q: dynamic, kv: 1}\nmulticast: kv\n",
    "a tile of a pair": PAIR + "seqlen: {q: 200, kv: 300}\ncta_group: 2\n",
}
SEVERAL = {
    "rows of two warpgroups": "seqlen: {q: 65, kv: 200}\n",
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


def walk_findings(folder, text):
    """Of the walk on 132 SMs."""
    path = written(folder, text)
    constants = kernel_text.read_constants(text)
    every = cases.walks_for(constants["SPEC"], cases.tiles_of(constants))
    (size,) = (case for case in every if case.name.startswith("sms_132_"))
    ((_, found),) = walks(path, [size])
    return found


@pytest.fixture
def several_boxes(monkeypatch):
    """Plans kernels as if all of their boxes were wanted."""
    for module in (sm90_context, sm100_context):
        monkeypatch.setattr(module.Traits, "one_box", property(lambda traits: False))


@pytest.mark.parametrize("what", {**ONE_BOX, **LOADED, **SEVERAL})
def test_the_plan_knows_them(what):
    fields = {**ONE_BOX, **LOADED, **SEVERAL}[what]
    assert kernel(fields).context["one_box"] == (what not in SEVERAL)


@pytest.mark.parametrize(
    "what",
    support.rotated([*ONE_BOX, "rows of two warpgroups", "two packed tiles"], 3),
)
def test_a_box_is_stored_once(what, tmp_path):
    text = render.render_kernel(kernel({**ONE_BOX, **SEVERAL}[what]))
    assert findings(written(tmp_path, text), "ragged") == []


@pytest.mark.parametrize("what", support.rotated(LOADED, 3))
def test_a_box_is_loaded_once(what, tmp_path):
    assert walk_findings(tmp_path, render.render_kernel(kernel(LOADED[what]))) == []


@pytest.mark.parametrize("what", support.rotated(ONE_BOX, 2))
def test_a_box_too_many_is_a_race(what, tmp_path, several_boxes):
    found = findings(
        written(tmp_path, render.render_kernel(kernel(ONE_BOX[what]))), "ragged"
    )
    assert any("TMA store writes bytes of out" in finding for finding in found), found


@pytest.mark.parametrize("what", support.rotated(LOADED, 2))
def test_a_box_too_many_is_loaded_again(what, tmp_path, several_boxes):
    found = walk_findings(tmp_path, render.render_kernel(kernel(LOADED[what])))
    assert any("more than once" in text or "2 times" in text for text in found), found
