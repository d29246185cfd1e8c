# SPDX-License-Identifier: Apache-2.0
"""What wrong rows look like: each error is told by its name, and a right row by none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fmha_gen.ops.compare import judge_output
from fmha_gen.ops.likeness import Inputs, likeness
from fmha_gen.ops.masks import MASKS
from fmha_gen.ops.reference import truth
from fmha_gen.ops.scores import BIAS, Score
from right_kernel import rounded

BATCH, ROWS, KEYS, HEADS, KV_HEADS, DIM, TILE = 2, 40, 150, 4, 2, 32, 64
SCALE = DIM**-0.5


def problem(mask):
    random = np.random.default_rng(5)
    q, k, v = (
        rounded("bf16", random.standard_normal((BATCH, rows, heads, DIM), np.float32))
        for rows, heads in ((ROWS, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS))
    )
    return Inputs(q, k, v, SCALE, MASKS[mask], TILE)


def expected(inputs):
    return truth(
        *(inputs.q, inputs.k, inputs.v),
        scale=SCALE,
        mask=inputs.mask,
        dtype="bf16",
    )


def told(inputs, place, row):
    right = expected(inputs)
    out = right.out.copy()
    out[place] = rounded("bf16", row.astype(np.float32))
    verdict = judge_output(out, right)
    assert verdict.row == place
    return likeness(out[place], place, inputs, right.out, right.out_bound)


def seeing(inputs, place, keys, kv_head=None, batch=None):
    """The row from some of the keys, any of which may come twice."""
    own = place[2] // (HEADS // KV_HEADS)
    head = own if kv_head is None else kv_head
    batch = place[0] if batch is None else batch
    k, v = (x[batch, keys, head].astype(np.float64) for x in (inputs.k, inputs.v))
    weights = np.exp(k @ inputs.q[place].astype(np.float64) * SCALE)
    return weights @ v / weights.sum()


PLACE = (1, 17, 3)
LAST = 17 + 1 + KEYS - ROWS  # keys that its row sees, causal


@pytest.mark.parametrize(("mask", "seen"), [("none", KEYS), ("causal", LAST)])
def test_a_block_that_is_missing_or_comes_twice(mask, seen):
    inputs = problem(mask)
    keys = np.arange(seen)
    for block in range(2):
        some = keys[block * TILE : (block + 1) * TILE]
        for row, text in (
            (np.setdiff1d(keys, some), f"as with KV block {block} missing"),
            (np.concatenate([keys, some]), f"as with KV block {block} twice"),
        ):
            assert told(inputs, PLACE, seeing(inputs, PLACE, row)) == text


@pytest.mark.parametrize("count", [LAST - 5, LAST + 7, KEYS])
def test_a_wrong_number_of_keys(count):
    inputs = problem("causal")
    row = seeing(inputs, PLACE, np.arange(count))
    found = told(inputs, PLACE, row)
    assert found == f"as with {count} keys, where it sees {LAST}"


def test_keys_of_zeros_beyond_the_last():
    inputs = problem("none")
    keys = np.arange(KEYS)
    k = inputs.k[1, :, 1].astype(np.float64)
    total = np.exp(k @ inputs.q[PLACE].astype(np.float64) * SCALE).sum()
    row = seeing(inputs, PLACE, keys) * total / (total + 42)
    assert told(inputs, PLACE, row).endswith("keys of zeros beyond the last")


def test_another_head_and_another_row():
    inputs = problem("none")
    row = seeing(inputs, PLACE, np.arange(KEYS), kv_head=0, batch=0)
    assert told(inputs, PLACE, row) == "as with K and V of KV head 0, batch 0"
    other = expected(inputs).out[0, 5, 2]
    found = told(inputs, PLACE, other)
    assert found == "what row 5 of head 2, batch 0 should be"


def test_what_nothing_explains_has_no_name():
    inputs = problem("causal")
    assert told(inputs, PLACE, np.full(DIM, 9.0)) == ""
    assert told(inputs, PLACE, np.full(DIM, np.inf)) == ""
    assert told(inputs, (0, 3, 0), np.arange(DIM) * 1.0) == ""


def test_a_row_without_its_sink_and_keys_beside_it():
    inputs = replace(problem("none"), sink=np.array([5.0, 4.0, 3.0, 6.0], np.float32))
    right = truth(
        *(inputs.q, inputs.k, inputs.v),
        **{"scale": SCALE, "mask": inputs.mask, "dtype": "bf16", "sink": inputs.sink},
    )
    batch, _, head = PLACE
    k, v = (x[batch, :, head // 2].astype(np.float64) for x in (inputs.k, inputs.v))
    weights = np.exp(k @ inputs.q[PLACE].astype(np.float64) * SCALE)
    kept = np.arange(KEYS) >= TILE
    for total, keys, text in (
        (0.0, kept | True, "as without its sink"),
        (np.exp(6.0), kept, "as with KV block 0 missing"),
    ):
        some = weights * keys
        found = some @ v / (some.sum() + total)
        assert likeness(found, PLACE, inputs, right.out, right.out_bound) == text


def test_a_row_without_its_bias_and_with_another():
    bias = np.random.default_rng(5).standard_normal((1, 4, 1, KEYS)).astype(np.float32)
    read = {"score": Score(BIAS), "tensors": {"bias": 2 * bias}}
    inputs = replace(problem("none"), **read)
    right = truth(
        *(inputs.q, inputs.k, inputs.v),
        **{"scale": SCALE, "mask": inputs.mask, "dtype": "bf16", **read},
    )
    batch, _, head = PLACE
    k, v = (x[batch, :, head // 2].astype(np.float64) for x in (inputs.k, inputs.v))
    scores = k @ inputs.q[PLACE].astype(np.float64) * SCALE
    kept = np.arange(KEYS) >= TILE
    for added, keys, text in (
        (0.0, kept | True, "as without its bias"),
        (2 * bias[0, head, 0], kept, "as with KV block 0 missing"),
    ):
        some = np.exp(scores + added) * keys
        found = some @ v / some.sum()
        assert likeness(found, PLACE, inputs, right.out, right.out_bound) == text
