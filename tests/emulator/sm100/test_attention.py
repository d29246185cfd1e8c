# SPDX-License-Identifier: Apache-2.0
"""Attention with S, P and O in tensor memory."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator import launch

from . import harness

PLANES, SEQLEN_KV = 3, 3 * 128
CLUSTERS = 2  # for 3 work tiles, so one cluster takes two
SCALE = 0.125
# Of K by plane and block: the maximum of a row stays, grows and shrinks.
STEADY = np.ones((3, 3))
CHANGING = np.array([[1, 1, 1], [1, 8, 64], [64, 8, 1]])
CASES = {  # kernel, its constants, amplitudes
    "block": ("attention_block", {}, STEADY),
    "tile": ("attention_tile", {"HEAD_DIM": "128"}, CHANGING),
    "pair": ("attention_tile", {"CTAS": "2"}, CHANGING),
}


def attention(q, k, v):
    """softmax(SCALE q k^T) v in float64, and how far P in bf16 and O in bf16 may be from it."""
    scores = SCALE * np.einsum("pqd,pkd->pqk", q, k)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out, extent = weights @ v, weights @ abs(v)
    return out, harness.HALF_ULP["bf16"] * (abs(out) + extent)


def make_kernel(path, constants, amplitudes):
    """(kernel, what O must be, how far it may be from it)"""
    rng = np.random.default_rng(7)
    seqlen_q = 256 * int(constants.get("CTAS", 1))
    head_dim = int(constants.get("HEAD_DIM", 64))
    q, k, v = (
        rng.integers(-4, 5, (PLANES, seqlen, head_dim)) / 4
        for seqlen in (seqlen_q, SEQLEN_KV, SEQLEN_KV)
    )
    k *= np.repeat(amplitudes, SEQLEN_KV // 3, axis=1)[..., None]
    kernel = harness.Kernel(
        path,
        {"q": ("bf16", q), "k": ("bf16", k), "v": ("bf16", v)},
        ("out", "bf16", (PLANES, seqlen_q, head_dim)),
        {
            "planes": launch.int32(PLANES),
            "seqlen_q": launch.int32(seqlen_q),
            "seqlen_kv": launch.int32(SEQLEN_KV),
            "softmax_scale": launch.float32(SCALE),
            "clusters": launch.int32(CLUSTERS),
        },
    )
    return kernel, *attention(q, k, v)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    stem, constants, amplitudes = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return make_kernel(harness.variant(stem, folder, constants), constants, amplitudes)


@pytest.mark.parametrize("schedule", harness.SCHEDULES, ids=str)
def test_attention_is_right_under_every_schedule(case, schedule):
    kernel, want, bound = case
    got, findings = kernel.run(schedule)
    assert findings == ()
    assert (abs(got - want) <= bound).all()


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("(TILE_KV, HEAD_DIM), (None, 0)", "(TILE_KV, HEAD_DIM), (0, None)"),
        ("(HEAD_DIM, TILE_KV), (0, None)", "(HEAD_DIM, TILE_KV), (None, 0)"),
    ],
    ids=["k", "v"],
)
def test_a_slice_of_the_wrong_mode_is_noticed(tmp_path, right, wrong):
    """The block's index then walks along head_dim, so that all blocks but one are beyond it."""
    text = (harness.HERE / "attention_block.py").read_text(encoding="utf-8")
    assert text.count(right) == 1
    path = tmp_path / "attention_block.py"
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    kernel, want, bound = make_kernel(path, {}, STEADY)
    got, _ = kernel.run(harness.SCHEDULES[0])
    assert not (abs(got - want) <= bound).all()
