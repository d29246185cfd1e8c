# SPDX-License-Identifier: Apache-2.0
"""What masks read is realistic, the same for everyone, and said."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fmha_gen.bench import draws
from fmha_gen.bench.overhead import tiles_and_blocks
from fmha_gen.bench.problems import Band, Problem
from fmha_gen.errors import CheckFailed
from fmha_gen.ops.documents import document_ends, document_ids, document_starts

from .test_problems import problem

WINDOW = {"left": "argument", "right": "argument"}
READ = {
    "w": "int32",
    "start": {"shape": ["b", "row"], "dtype": "int32", "monotone": "row"},
    "end": {"shape": ["h_kv"], "dtype": "int32"},
}


@pytest.mark.parametrize(
    ("low", "high", "total", "expected"),
    [
        (512, 4096, 16384, None),
        (512, 4096, 4607, None),  # no document of 4096 leaves one of 512
        (1024, 1024, 16384, [1024] * 16),
        (1000, 1000, 2500, [1000, 1000, 500]),  # no lengths of 1000 make it
        (512, 4096, 300, [300]),
        (1, 1, 3, [1, 1, 1]),
    ],
)
def test_documents_fill_a_batch(
    low: int, high: int, total: int, expected: list[int] | None
) -> None:
    several = [
        problem(
            2,
            1,
            1,
            total,
            total,
            documents=True,
            ranges={"documents": [low, high]},
            seed=n,
        )
        for n in range(50)
    ]
    for lengths in (each for one in several for each in one.drawn["documents"]):
        assert sum(lengths) == total
        assert lengths == expected or expected is None
        assert expected or all(low <= n <= high for n in lengths)
    drawn = {str(one.drawn["documents"]) for one in several}
    assert len(drawn) == (1 if expected else 50)


def test_lengths_are_uniform() -> None:
    one = problem(400, 1, 1, 4096, 4096, documents=True, ranges={"documents": [1, 99]})
    lengths = np.concatenate([each[:-2] for each in one.drawn["documents"]])
    assert lengths.min() == 1 and lengths.max() == 99
    assert abs(lengths.mean() - 50) < 1 and abs(lengths.std() - 99 / 12**0.5) < 1


@pytest.mark.parametrize("q", [200, 70, 260])
def test_edges_are_those_of_the_documents(q: int) -> None:
    """The last query is at the last key; queries before the first key are of the first document."""
    one = problem(3, 1, 1, q, 200, documents=True, ranges={"documents": [9, 70]})
    places = np.clip(np.arange(q) + 200 - q, 0, None)
    for batch, lengths in enumerate(one.drawn["documents"]):
        ids = document_ids(np.cumsum([0, *lengths]))
        for name, made in (("start", document_starts), ("end", document_ends)):
            found = one.drawn[f"document_{name}"]
            assert found.dtype == np.int32
            assert found[batch].tolist() == made(ids)[0, places].tolist()


@pytest.mark.parametrize("q", [200, 70, 260])
def test_packed_sequences_begin_where_documents_do(q: int) -> None:
    one = problem(3, 1, 1, q, 200, documents=True, ranges={"documents": [9, 70]})
    of_q, of_kv = (edges.tolist() for edges in draws.edges_of(one.drawn, one))
    lengths = [n for each in one.drawn["documents"] for n in each]
    assert np.diff(of_kv).tolist() == lengths
    starts = one.drawn["document_start"] + np.arange(3)[:, None] * 200
    for first_key, (first, end) in zip(of_kv, pairwise(of_q), strict=False):
        assert set(starts.ravel()[first:end].tolist()) <= {first_key}
    assert (of_q[0], of_q[-1], of_kv[-1]) == (0, 3 * q, 600)
    plain = problem(2, 1, 1, q, 200)
    of_q, of_kv = (edges.tolist() for edges in draws.edges_of(plain.drawn, plain))
    assert (of_q, of_kv) == ([0, q, 2 * q], [0, 200, 400])


def test_numbers_and_tensors_are_of_their_ranges() -> None:
    mask = "kv <= q + w and start[b, row] <= kv and kv < end[h_kv]"
    ranges = {"w": [-7, 9], "start": [3, 20]}
    several = [
        problem(4, 64, 8, 50, 90, mask=mask, params=READ, ranges=ranges, seed=n)
        for n in range(60)
    ]
    assert {one.drawn["w"] for one in several} == {*range(-7, 10)}
    for one in several:
        start, end = one.drawn["start"], one.drawn["end"]
        assert (start.shape, end.shape) == ((4, 50), (8,))
        assert 3 <= start.min() < start.max() <= 20 and (np.diff(start) >= 0).all()
        assert 0 <= end.min() < end.max() <= 90  # the usual range
    assert several[0].drawn["end"].tolist() != several[1].drawn["end"].tolist()


def test_a_draw_depends_on_its_own_range_and_seed_alone() -> None:
    """Not on heads, head_dim and what else is read."""
    ranges = {"documents": [9, 70]}
    one = problem(2, 4, 2, 200, 200, documents=True, ranges=ranges, seed=3)
    causal = problem(
        *(2, 8, 8, 200, 200, 64),
        causal=True,
        documents=True,
        ranges=ranges,
        seed=3,
        window=WINDOW,
    )
    assert causal.drawn["documents"] == one.drawn["documents"]
    assert [*one.drawn] == ["documents", "document_start", "document_end"]
    other = problem(2, 4, 2, 200, 200, documents=True, ranges=ranges, seed=4)
    assert other != one and other.drawn["documents"] != one.drawn["documents"]


def test_a_problem_survives_json() -> None:
    """As `tune` sends it to its processes."""
    one = problem(2, 4, 2, 200, 200, documents=True, seed=3)
    again = Problem(**json.loads(json.dumps(asdict(one))))
    assert again == one and again.drawn["documents"] == one.drawn["documents"]


def test_usual_ranges() -> None:
    one = problem(4, 1, 1, 16384, 16384, causal=True, prefix=True)
    assert one.ranges == {"prefix": [2048, 8192]}
    one = problem(4, 1, 1, 16384, 16384, documents=True, window=WINDOW)
    assert one.ranges == {
        **{"documents": [512, 4096], "window_left": [1023, 1023]},
        "window_right": [1023, 1023],
    }
    assert one.drawn["window_left"] == 1023
    assert problem(1, 1, 1, 64, 64).ranges == {}


def test_ranges_that_an_input_cannot_have() -> None:
    for fields, asked, message in (
        ({"documents": True}, {"documents": [0, 9]}, "--documents=0:9: it can be 1 to"),
        (
            {"window": WINDOW},
            {"window_left": [-1, -1]},
            "--param window_left=-1: it can",
        ),
    ):
        with pytest.raises(CheckFailed, match=message):
            problem(1, 1, 1, 64, 64, ranges=asked, **fields)


def test_names_say_what_is_drawn() -> None:
    ranges = {"documents": [9, 70], "window_left": [33, 33]}
    fields: dict[str, Any] = {"documents": True, "causal": True, "ranges": ranges}
    one = problem(2, 4, 4, 200, 200, seed=5, **fields)
    assert one.family == "d128 bf16 documents causal"
    assert str(one) == "b2 h4 s200 causal documents 9:70 seed 5"
    lengths = [n for each in one.drawn["documents"] for n in each]
    said = f"{len(lengths)} documents, {min(lengths)} to {max(lengths)}"
    assert draws.summary(one) == said
    left = {"left": "argument", "right": "none"}
    one = problem(2, 4, 4, 200, 200, causal=True, window=left, ranges=ranges, seed=5)
    assert one.band == Band(33, 0)
    assert str(one) == "b2 h4 s200 q - 33 <= kv <= q window_left 33"
    assert one == problem(2, 4, 4, 200, 200, causal=True, window=left, ranges=ranges)
    assert one != problem(2, 4, 4, 200, 200, causal=True, window={**left, "left": 33})
    both = problem(2, 4, 4, 200, 200, window={"left": 9, "right": "none"}, **fields)
    assert (both.band, both.mask) == (Band(9, 0), "q - 9 <= kv <= q")


def test_flops_and_tiles_are_of_the_documents() -> None:
    """Half of the diagonal counted; a tile of 128 rows has the blocks of its documents."""
    fields: dict[str, Any] = {"documents": True, "ranges": {"documents": [128, 512]}}
    one = problem(3, 4, 2, 1024, 1024, causal=True, **fields)
    pairs = sum(n * n / 2 for each in one.drawn["documents"] for n in each)
    assert one.flops == 4 * 4 * 128 * pairs
    both_sides = problem(3, 4, 2, 1024, 1024, **fields)
    assert both_sides.flops == 2 * one.flops
    starts = one.drawn["document_start"][:, ::128] // 128
    tiles, blocks = tiles_and_blocks(one)
    assert (tiles, blocks) == (96, float((np.arange(1, 9) - starts).mean()))


def test_what_is_kept_of_a_draw() -> None:
    mask = "kv <= q + w and start[b, row] <= kv and kv < end[h_kv]"
    one = problem(2, 4, 2, 50, 90, mask=mask, params=READ, documents=True)
    kept = draws.values_of(one.spec, one.drawn)
    assert kept == {
        **{"w": one.drawn["w"], "end": one.drawn["end"].tolist()},
        "documents": [[90], [90]],
    }
