# SPDX-License-Identifier: Apache-2.0
"""Lengths of packed sequences in words: what they mean, one spelling for each, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fmha_gen.bench import lengths
from fmha_gen.bench.overhead import tiles_and_blocks
from fmha_gen.bench.problems import Problem, packed_problem_for, problems_for
from fmha_gen.errors import UsageProblem

from .test_problems import problem, spec

TIMES = Path(__file__).parents[2] / "codegen" / "decisions" / "0053-times.json"


def packed(sequences: str, seed: int = 0, heads: int = 4, **more: Any) -> Problem:
    pool = more.pop("pool", "vllm")
    fields = {"mask": "causal", "batch": "varlen", "q_per_kv": 2, **more}
    paged = fields.pop("paged", None)  # the page
    made = spec(fields.pop("qk", 64), fields.pop("v", 32), **fields)
    if paged:
        made["kv"] = {"paged": {"page": paged}}
    return packed_problem_for(
        made, heads=heads, sequences=sequences, seed=seed, pool=pool
    )


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("2048", "2048", [(2048, 2048)]),
        ("3x7", "3x7", [(7, 7)] * 3),
        ("1x07", "7", [(7, 7)]),
        ("5/9", "5/9", [(5, 9)]),
        ("2x1/8+4/8+3x0", "2x1/8+4/8+3x0", [(1, 8)] * 2 + [(4, 8)] + [(0, 0)] * 3),
        ("2x6:6/9:9", "2x6/9", [(6, 9)] * 2),
        ("zipf", "zipf", [(n, n) for n in (16384, 8192, 5461, 2731)]),
    ],
)
def test_words_and_what_they_mean(
    text: str, name: str, expected: list[tuple[int, int]]
) -> None:
    assert lengths.in_words(text) == lengths.in_words(name) == name
    assert not lengths.is_random(name)
    assert [*lengths.draw(name, 0)] == [*lengths.draw(name, 1)] == expected


def test_ranges_are_drawn_by_seed() -> None:
    assert lengths.in_words("128:8192") == "16x128:8192"
    found = [lengths.draw("16x128:8192", seed) for seed in range(200)]
    assert len({*found}) == 200 and found[3] == lengths.draw("16x128:8192", 3)
    flat = [n for each in found for n, keys in each if n == keys]
    assert len(flat) == 3200 and 128 <= min(flat) < 140 and 8180 < max(flat) <= 8192
    assert abs(sum(flat) / len(flat) - 4160) < 150
    queries, keys = zip(*lengths.draw("99x1:4/10:20", 0), strict=True)
    assert ({*queries}, {*keys}) == ({*range(1, 5)}, {*range(10, 21)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", '"" is no length'),
        ("8x", '"8x" is no length such as 8x2048'),
        ("0x5", '"0x5" is no length'),
        ("5+", '"" is no length'),
        ("-5", '"-5" is no length'),
        ("9:5", '"9:5" is no range'),
        ("16777217", '"16777217" is no range'),
        ("65536x1+1", "more than 65536 sequences"),
        ("3x0+5/0", "no sequence has queries and keys"),
    ],
)
def test_what_is_no_length_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageProblem, match=f"--lengths .*{message}"):
        lengths.in_words(text)


def test_summaries() -> None:
    said = lengths.summary(lengths.draw("5+9", 0))
    assert said == "2 sequences of 5 to 9 queries and keys"
    said = lengths.summary(lengths.draw("3x1/8+4/9", 0))
    assert said == "4 sequences of 1 to 4 queries on 8 to 9 keys"


# --- problems -----------------------------------------------------------------------------


def test_counts_of_a_packed_problem() -> None:
    one = packed("3/40+33+0/7")
    assert (one.batch, one.q, one.kv) == (3, 36, 80)
    assert (one.tokens, one.length) == (36, 27)
    assert str(one) == "h4/2 3/40+33+0/7 causal packed"
    assert one.family == "d64x32 bf16 GQA 2 packed causal"
    assert one.packed is one and not one.hostile
    each = [
        problem(1, 4, 2, q, kv, 64, 32, causal=True) for q, kv in [(3, 40), (33, 33)]
    ]
    assert one.flops == sum(x.flops for x in each)
    pairs = 3 * 40 - 3 * 3 / 2 + 33 * 33 / 2
    assert one.visible == pytest.approx(pairs / (3 * 40 + 33 * 33))
    assert one.kv_bytes == 80 * 2 * (64 + 32) * 2


def test_tiles_and_blocks_are_those_of_the_sequences() -> None:
    """Of 128 rows and keys; a block that the diagonal crosses counts whole."""
    one = packed("300+100/500+0/7", heads=4)
    assert tiles_and_blocks(one) == (4 * (3 + 1), (1 + 2 + 3 + 4) / 4)
    equal, batch = packed("3x300"), problem(3, 4, 2, 300, 300, 64, 32, causal=True)
    assert tiles_and_blocks(equal) == tiles_and_blocks(batch)


def test_pages_are_another_problem_of_the_same_work() -> None:
    one, apart = (packed("3/40+33", paged=16, pool=pool) for pool in ("vllm", "nhd"))
    assert one != apart and one.kv == (3 + 3) * 16
    assert str(one) == "h4/2 3/40+33 causal page 16 vllm"
    assert str(apart) == "h4/2 3/40+33 causal page 16 nhd"
    plain = packed("3/40+33")
    assert one.packed == apart.packed == plain
    assert (one.flops, one.kv_bytes, one.visible) == (
        *(plain.flops, plain.kv_bytes, plain.visible),
    )
    other = packed("3/40+33", paged=32)
    assert other.kv == 4 * 32 and other.family != one.family


def test_drawn_lengths_are_a_problem_of_each_seed() -> None:
    one, two = packed("4x9:99", 1), packed("4x9:99", 2)
    assert one != two and one.lengths != two.lengths
    assert str(one).endswith(" causal packed seed 1")
    assert packed("4x9", 1) == packed("4x9", 2)


def test_few_queries_on_many_keys_are_decoding() -> None:
    assert packed("32x1/8192").is_decoding
    assert not packed("64x1/8192+2048/8192").is_decoding
    assert not packed("8x2048").is_decoding
    assert not problem(
        32, 4, 2, 1, 8192, 64, 32
    ).is_decoding  # which has no such figure


def test_a_kernel_of_packed_sequences_has_those_of_one_length_by_default() -> None:
    made = spec(batch="varlen", mask="causal")
    assert [str(x) for x in problems_for(made)] == ["h16 4x4096 causal packed"]
    several = problems_for(made, lengths=[512, 8192], tokens=[4096, 16384])
    names = ["8x512", "32x512", "8192", "2x8192"]
    assert [one.sequences for one in several] == names
    made["kv"] = {"paged": {"page": 16}}
    asked = {"sequences": ["7", "2x4:8"], "seeds": (0, 1), "pools": ("nhd", "vllm")}
    several = problems_for(made, **asked)
    assert [(x.sequences, x.pool, x.seed) for x in dict.fromkeys(several)] == [
        *(("7", "nhd", 0), ("7", "vllm", 0)),
        *(("2x4:8", "nhd", 0), ("2x4:8", "nhd", 1)),
        *(("2x4:8", "vllm", 0), ("2x4:8", "vllm", 1)),
    ]
    assert not [*problems_for(spec(), sequences=["7"])]


ROWS = json.loads(TIMES.read_text("utf-8"))
SHAPES = {"d128": (128, 128), "mla": (192, 128)}
BY_HAND = {
    **{"prefill 8 x 2048": "8x2048", "prefill 4 x 4096": "4x4096"},
    **{"chunk 2048 on 32k": "2048/32768", "decode B32 8k": "32x1/8192"},
    "decode B128 4k": "128x1/4096",
}


@pytest.mark.parametrize("row", ROWS["packed"], ids=lambda row: row["shape"])
def test_rows_that_were_timed_by_hand_are_said(row: dict[str, Any]) -> None:
    """Their FLOPs count the whole diagonal, ours half of it."""
    qk, v = SHAPES[row["shape"]]
    said = "+".join(map(str, row["lengths"]))
    if row["lengths"] == [n for n, _ in lengths.draw("zipf", 0)]:
        said = "zipf"
    one = packed(said, heads=16, qk=qk, v=v, q_per_kv=1)
    diagonal = 2 * 16 * (qk + v) * one.q / 2
    assert one.flops + diagonal == row["flops"]


@pytest.mark.parametrize("row", ROWS["paged"], ids=lambda row: row["name"])
def test_paged_rows_that_were_timed_by_hand_are_said(row: dict[str, Any]) -> None:
    fields = {"heads": 32, "q_per_kv": 4, "qk": 128, "v": 128, "paged": 16}
    one = packed(BY_HAND[row["name"]], **fields)
    assert one.kv_bytes == row["bytes"]
    assert one.flops == pytest.approx(row["flops"], rel=1e-3)
    assert one.is_decoding == row["name"].startswith("decode")
