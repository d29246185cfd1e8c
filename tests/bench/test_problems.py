# SPDX-License-Identifier: Apache-2.0
"""Which problems a kernel is timed at, and how many FLOPs they have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fmha_gen.bench import grid
from fmha_gen.bench.grid import Row
from fmha_gen.bench.problems import Band, Problem, problem_for, problems_for
from fmha_gen.errors import CheckFailed, UsageProblem
from fmha_gen.ops import masks

ROOT = Path(__file__).parents[2]


def spec(
    qk: int = 128,
    v: int | None = None,
    q: Any = "dynamic",
    kv: Any = "dynamic",
    **more: Any,
) -> dict[str, Any]:
    return {
        "name": "x",
        "op": "fmha_fwd",
        "dtype": "bf16",
        "head_dim": {"qk": qk, "v": v or qk},
        "seqlen": {"q": q, "kv": kv},
        "q_per_kv": 1,
        "mask": "none",
        "lse": False,
        **more,
    }


def problem(
    batch: int,
    heads: int,
    kv_heads: int,
    q: int,
    kv: int,
    d_qk: int = 128,
    d_v: int | None = None,
    causal: bool = False,
    lse: bool = False,
    ranges: dict[str, list[int]] | None = None,
    seed: int = 0,
    **more: Any,
) -> Problem:
    plain = {"mask": "causal" if causal else "none", "lse": lse}
    made = spec(d_qk, d_v, **{**plain, "q_per_kv": heads // kv_heads, **more})
    return problem_for(
        made, batch=batch, heads=heads, q=q, kv=kv, ranges=ranges, seed=seed
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (spec(64), problem(4, 32, 32, 4096, 4096, 64)),
        (spec(256, mask="causal"), problem(4, 8, 8, 4096, 4096, 256, causal=True)),
        (spec(192, 128, q_per_kv=8), problem(4, 16, 2, 4096, 4096, 192, 128)),
        (spec(256, q_per_kv=16), problem(4, 16, 1, 4096, 4096, 256)),
        (spec(q=1024, kv=2048), problem(16, 16, 16, 1024, 2048)),
        (spec(q=100_000, lse=True), problem(1, 16, 16, 100_000, 4096, lse=True)),
    ],
)
def test_the_default_problem(given: dict[str, Any], expected: Problem) -> None:
    assert list(problems_for(given)) == [expected]


@pytest.mark.parametrize(
    ("given", "sizes", "expected"),
    [
        (spec(), {"lengths": [512, 8192]}, [(32, 512, 512), (2, 8192, 8192)]),
        (spec(), {"lengths": [512], "batch": 7}, [(7, 512, 512)]),
        (
            spec(),
            {"lengths": [512], "tokens": [1024, 4096]},
            [(2, 512, 512), (8, 512, 512)],
        ),
        (spec(q=1), {"lengths": [64, 65], "batch": 7}, [(7, 1, 64), (7, 1, 65)]),
        (spec(q=512, kv=512), {"lengths": [512, 1024]}, [(32, 512, 512)]),
        (spec(q=4096, kv=512), {"lengths": [512, 1024]}, [(4, 4096, 512)]),
        (spec(q=4096, kv=4096), {"lengths": [512, 1024]}, []),
    ],
)
def test_many_lengths(
    given: dict[str, Any], sizes: dict[str, Any], expected: list[tuple[int, ...]]
) -> None:
    found = problems_for(given, **sizes)
    assert [(one.batch, one.q, one.kv) for one in found] == expected


def test_a_window_is_the_problem_that_its_mask_is() -> None:
    """However the SPEC says it; a grid's rows are of no window."""
    sides = {"left": 1023, "right": "none"}
    (one,) = problems_for(spec(mask="causal", window=sides))
    (same,) = problems_for(spec(window={"left": 1023, "right": 0}))
    assert one == same and one.band == Band(1023, 0)
    assert one.band.window and one.band.causal
    assert one.mask == "q - 1023 <= kv <= q"
    # A row sees 1024 keys once there are so many, but half of its own is not counted.
    pairs = 4096 * 1024 - 1024 * 1023 / 2 - 4096 / 2
    assert one.flops == 4 * one.batch * one.heads * 128 * pairs
    assert one.visible == pairs / 4096**2
    row = Row("bf16", 128, 128, "causal", 1, 4, 4096, None)
    assert row.problem(spec(mask="causal")) is not None
    assert row.problem(spec(mask="causal", window=sides)) is None
    (other,) = problems_for(spec(window={"left": 255, "right": 256}))
    assert other.band == Band(255, 256) and not other.band.causal
    assert other.mask == "q - 255 <= kv <= q + 256"


def test_heads_are_a_multiple_of_the_group() -> None:
    (found,) = problems_for(spec(q_per_kv=4), heads=12)
    assert (found.heads, found.kv_heads) == (12, 3)
    with pytest.raises(CheckFailed, match="--heads 6 is no multiple of q_per_kv = 4"):
        list(problems_for(spec(q_per_kv=4), heads=6))


@pytest.mark.parametrize(
    ("q", "kv", "causal", "pairs"),
    [
        (10, 20, False, 200),
        (20, 20, True, 200),
        (10, 20, True, 150),
        (20, 10, True, 50),
    ],
)
def test_flops(q: int, kv: int, causal: bool, pairs: int) -> None:
    flops = problem(2, 6, 3, q, kv, 192, 128, causal).flops
    assert flops == 2 * 2 * 6 * pairs * (192 + 128)


@pytest.mark.parametrize(("q", "kv"), [(700, 700), (300, 700), (700, 300)])
def test_causal_flops_count_the_visible_pairs(q: int, kv: int) -> None:
    visible = sum(max(0, min(kv, row + kv - q + 1)) for row in range(q))
    counted = problem(1, 1, 1, q, kv, 1, causal=True).flops / 4
    assert counted == pytest.approx(visible, rel=5e-3)  # the diagonal counts half


def test_names() -> None:
    one = problem(4, 16, 2, 512, 512, 192, 128, causal=True)
    assert (one.family, str(one)) == (
        "d192x128 bf16 GQA 8 causal",
        "b4 h16/2 s512 causal",
    )
    one = problem(4, 16, 16, 1, 512)
    assert (one.family, str(one)) == ("d128 bf16 none", "b4 h16 q1 kv512 none")


# --- grids --------------------------------------------------------------------------------

HEAD = "dtype,head_dim,mask,q_per_kv,batch,seqlen,best/fa4\n"


def load(folder: Path, text: str) -> list[Row]:
    file = folder / "grid.csv"
    file.write_text(text, encoding="utf-8")
    return grid.load(file)


def test_a_grid(tmp_path: Path) -> None:
    text = f"{HEAD}bf16,128,causal,8,16,1024,1.31\nfp16,192x128,none,1,1,256,\n"
    gqa, other = load(tmp_path, text)
    assert gqa == Row("bf16", 128, 128, "causal", 8, 16, 1024, 1.31)
    assert other == Row("fp16", 192, 128, "none", 1, 1, 256, None)
    assert str(gqa) == "d128 bf16 causal GQA 8 b16 s1024"
    assert str(other) == "d192x128 fp16 none b1 s256"


def test_a_row_suits_the_kernels_made_for_it() -> None:
    row = Row("bf16", 128, 128, "causal", 8, 16, 1024, None)
    assert row.problem(spec(mask="causal", q_per_kv=8, sink=True)) is None
    suits = spec(mask="causal", q_per_kv=8)
    asked = problem(16, 16, 2, 1024, 1024, causal=True)
    assert row.problem(suits) == asked
    assert row.problem({**suits, "seqlen": {"q": 1024, "kv": 1024}}) == asked
    for wrong in (
        {"dtype": "fp16"},
        {"head_dim": {"qk": 192, "v": 128}},
        {"mask": "none"},
        {"q_per_kv": 1},
        {"seqlen": {"q": 1024, "kv": 512}},
    ):
        assert row.problem({**suits, **wrong}) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r":1: the columns must be dtype,head_dim,"),
        ("dtype\n", r":1: the columns must be dtype,head_dim,"),
        (HEAD, r"grid\.csv: no rows"),
        (f"{HEAD}bf16,128\n", r":2: 2 cells instead of 7"),
        (f"{HEAD}fp8,128,none,1,1,256,\n", r':2: dtype: "fp8" is none of bf16, fp16'),
        (f"{HEAD}bf16,64xx,none,1,1,256,\n", r':2: head_dim: "x" is no count'),
        (f"{HEAD}bf16,64,full,1,1,256,\n", r':2: mask: "full" is none of'),
        (f"{HEAD}bf16,64,none,0,1,256,\n", r':2: q_per_kv: "0" is no count'),
        (f"{HEAD}bf16,64,none,1,1,-1,\n", r':2: seqlen: "-1" is no count'),
        (f"{HEAD}bf16,64,none,1,1,1,0.9\n", r':2: best/fa4: "0.9" is no factor'),
        (f"{HEAD}bf16,64,none,1,1,1,nan\n", r':2: best/fa4: "nan" is no factor'),
        (
            f"{HEAD}bf16,64,none,1,1,1,\nbf16,64,none,1,1,1,2\n",
            r":3: the same as line 2",
        ),
        (f'{HEAD}"bf16,64\n', r":2: unexpected end of data"),
    ],
)
def test_a_bad_grid_is_told_with_its_line(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckFailed, match=message):
        load(tmp_path, text)
    with pytest.raises(UsageProblem, match="cannot be read"):
        grid.load(tmp_path / "none.csv")


def test_the_grid_of_the_bar_has_its_rows() -> None:
    rows = grid.load(ROOT / "codegen/decisions/0013-bench-grid.csv")
    assert len(rows) == 45
    assert all(row.best_over_fa4 for row in rows)
    many = [row for row in rows if row.batch * row.seqlen == 16384]
    assert len({(r.d_qk, r.mask, r.seqlen) for r in many if r.q_per_kv == 1}) == 36
    assert sum(row.q_per_kv == 8 for row in many) == 4
    single = [row for row in rows if row not in many]
    assert [row.seqlen for row in single] == [256, 512, 1024, 2048, 4096]
    assert {(row.d_qk, row.mask, row.batch) for row in single} == {(128, "causal", 1)}


def test_whatever_a_spec_computes_is_the_problem() -> None:
    """Fields that this package's bench has never heard of, too."""
    plain = problem(4, 16, 16, 4096, 4096, causal=True)
    (sinks,) = problems_for(spec(mask="causal", sink=True))
    (capped,) = problems_for(spec(mask="causal", softcap=30.0, rotary={"base": 1e4}))
    assert len({plain, sinks, capped}) == 3
    assert sinks.family == "d128 bf16 sink causal"
    assert str(sinks) == "b4 h16 s4096 causal sink"
    assert capped.family == "d128 bf16 softcap 30 rotary base 10000.0 causal"
    assert capped.further == {"softcap": 30.0, "rotary": {"base": 1e4}}
    how = {"arch": "sm100", "cta_group": 2, "schedule": "persistent"}
    how |= {"pack_gqa": True, "cluster": [2, 1], "multicast": "k"}
    (same,) = problems_for(spec(mask="causal", **how))
    assert same == plain and hash(same) == hash(plain)
    assert replace(plain, q=1024) != plain != sinks
    assert problem(1, 1, 1, 8, 8, lse=True).without_lse == problem(1, 1, 1, 8, 8)


def test_a_bias_is_said_by_its_shape() -> None:
    bias = {"shape": [1, "h", "q", "kv"], "dtype": "bf16"}
    (one,) = problems_for(spec(mask="causal", bias=bias))
    assert str(one) == "b4 h16 s4096 causal bf16 bias [1, h, q, kv]"
    assert one.flops == problem(4, 16, 16, 4096, 4096, causal=True).flops


def test_8_bits_are_a_family_of_their_own() -> None:
    """With the same FLOPs, and half the bytes of K and V."""
    fields = {"dtype": "e4m3", "out_dtype": "bf16", "v_layout": "permuted"}
    wide = problem(2, 4, 2, 1000, 1000, causal=True)
    plain, scaled = (
        problem(2, 4, 2, 1000, 1000, causal=True, **fields, **more)
        for more in ({}, {"descale": "head"})
    )
    assert len({each.family for each in (wide, plain, scaled)}) == 3
    assert plain.shape == "d128 e4m3 GQA 2"
    assert plain.flops == scaled.flops == wide.flops
    assert plain.visible == wide.visible
    assert 2 * plain.kv_bytes == wide.kv_bytes


def test_an_expression_is_no_band() -> None:
    chunks = "kv <= q and kv // 8192 == q // 8192"
    (one,) = problems_for(spec(mask=chunks), lengths=[16384])
    assert one.band is None and one.mask == "8192 * (q // 8192) <= kv <= q"
    causal = problem(1, 16, 16, 8192, 8192, causal=True)
    assert one.flops == pytest.approx(2 * causal.flops)
    windowed = spec(mask=chunks, window={"left": 9, "right": "none"})
    (both,) = problems_for(windowed)
    assert both.spec["mask"] == "8192 * (q // 8192) <= kv and q - 9 <= kv and kv <= q"
    assert both.keys == masks.of_spec(windowed)


def test_lists_of_half_the_blocks_are_another_family() -> None:
    (made,) = problems_for(
        spec(mask="none", blocks="lists", tile={"q": 128, "kv": 64}), lengths=[1024]
    )
    (plain,) = problems_for(spec(mask="none"), lengths=[1024])
    assert made.family == "d128 bf16 blocks lists tile q 128 kv 64 none"
    assert made.flops == plain.flops / 2
    assert (made.visible, plain.visible) == (0.5, 1)
    others = spec(mask="none", blocks="lists", tile={"q": 64, "kv": 64})
    (other,) = problems_for(others, lengths=[1024])
    assert other.family != made.family
    assert made.spec["blocks"] == "lists" and "blocks" not in plain.spec
