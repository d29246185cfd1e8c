# SPDX-License-Identifier: Apache-2.0
"""From timings to figures: who is best, the tables, the JSON and the record."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fmha_gen.bench import draws, overhead, results, tables
from fmha_gen.bench.problems import Problem
from fmha_gen.bench.results import Cell, Machine, Report
from fmha_gen.bench.timing import REGIMES, Round, Timing
from rich.console import Console

from .test_problems import problem

SHAPE = problem(1, 1, 1, 1000, 1000, 125)  # 0.5 GFLOP: 1 us is 500 TFLOPS
DECISIONS = Path(__file__).parents[2] / "codegen" / "decisions"
MACHINE = Machine("NVIDIA H200", "580.1", 132, {"torch": "2.11", "fa3": None})


def timing(tflops: float, shape: Problem = SHAPE, **slower: float) -> Timing:
    """With that speed as graph; slower: how many times as long another regime takes."""
    seconds = shape.flops / tflops / 1e12
    rounds = {
        regime: [
            Round(seconds * slower.get(regime, 1) * noise, (1700,), (650.0,), 7e-6)
            for noise in ([0.9, 1, 1.5] if regime != "sustained" else [1])
        ]
        for regime in REGIMES
    }
    return Timing(2e-3, rounds)


def cell(**tflops: float) -> Cell:
    """x and y are ours."""
    found = Cell(SHAPE, [name for name in ("x", "y") if name in tflops])
    found.timings = {name: timing(speed) for name, speed in tflops.items()}
    return found


def report(*cells: Cell, peers: tuple[str, ...] = ("cudnn", "fa4")) -> Report:
    found = Report(MACHINE, peers, 5, 1e12, list(cells))
    for when in ("before", "after"):
        found.matmul[when] = timing(790, replace(SHAPE, batch=2000))
    return found


def test_speed_is_that_of_the_median_round() -> None:
    found = cell(x=250, fa4=500)
    assert found.tflops("x") == pytest.approx(250)
    assert found.over_best("x") == pytest.approx(0.5)
    assert found.tflops("cudnn") is None


def test_the_best_peer_is_the_fastest_of_that_regime() -> None:
    found = cell(x=600, fa4=500, cudnn=450)
    found.timings["fa4"] = timing(500, eager=2)
    assert found.best_peer() == ("fa4", pytest.approx(500))
    assert found.best_peer("eager") == ("cudnn", pytest.approx(450))
    assert found.over_best("x", "eager") == pytest.approx(600 / 450)
    alone = cell(x=600)
    assert (alone.best_peer(), alone.over_best("x")) == (None, None)


def test_a_peer_known_from_elsewhere_counts_through_fa4_and_as_graph_only() -> None:
    found = cell(x=600, fa4=500, cudnn=450)
    found.best_over_fa4 = 1.1
    assert found.best_peer() == ("1.1 fa4", pytest.approx(550))
    assert found.best_peer("sustained") == ("fa4", pytest.approx(500))
    found.timings["cudnn"] = timing(560)
    assert found.best_peer() == ("cudnn", pytest.approx(560))
    del found.timings["fa4"]
    assert found.best_peer() == ("cudnn", pytest.approx(560))


def test_the_summary_takes_our_fastest_of_each_cell() -> None:
    first, second = cell(x=500, y=600, fa4=500), cell(x=450, cudnn=500)
    found = results.summary([first, second, cell(x=1), cell(fa4=1)])
    assert found is not None
    assert (found.cells, found.least_at) == (2, second)
    assert found.least == pytest.approx(0.9)
    assert found.mean == pytest.approx((1.2 * 0.9) ** 0.5)
    assert results.summary([cell(x=1), cell(fa4=1)]) is None


def test_lines_join_what_differs_in_lse_only() -> None:
    plain, with_lse = cell(x=500, fa4=450), cell(y=600, fa4=400)
    with_lse.problem = problem(1, 1, 1, 1000, 1000, 125, lse=True)
    found = results.lines([plain, with_lse])
    assert list(found) == ["d125 bf16 none"]
    line = found["d125 bf16 none"]
    assert line["ours"] == {SHAPE: pytest.approx(SHAPE.flops / 600e12)}
    assert line["fa4"] == {SHAPE: pytest.approx(SHAPE.flops / 450e12)}


# --- tables -------------------------------------------------------------------------------


def text(view: Any) -> list[list[str]]:
    stream = io.StringIO()
    Console(file=stream, width=200).print(view)
    assert stream.getvalue().isascii()
    return [line.split() for line in stream.getvalue().splitlines()]


def test_the_table_has_everyone_and_every_regime() -> None:
    first = cell(x=600, fa4=500)
    first.missing["cudnn"] = "RuntimeError: no"
    first.timings["x"] = timing(600, eager=2, burst=0.5, sustained=1.25)
    first.timings["x"].bare_host_seconds = 1.2e-6
    head, row = text(tables.speeds(report(first), plain=True))
    titles = "kernel problem graph cudnn fa4 best peer /best eager eager /best burst"
    titles += " burst /best sustained sustained /best host us MHz W"
    assert head == titles.split()
    figures = "600 - 500 fa4 1.20 300 0.60 1200 2.40 480 0.96 7.0/1.2 1700 650"
    assert row == ["x", "b1", "h1", "s1000", "none", *figures.split()]


def test_a_run_of_one_regime_has_its_figures_alone() -> None:
    found = report(cell(x=600, fa4=500))
    for one in (*found.matmul.values(), *found.cells[0].timings.values()):
        one.rounds = {"graph": one.rounds["graph"]}
    head, row = text(tables.speeds(found, plain=True))
    assert head == [
        "kernel",
        "problem",
        "graph",
        "cudnn",
        "fa4",
        "best",
        "peer",
        "/best",
    ]
    assert row[5:] == ["600", "-", "500", "fa4", "1.20"]
    first = "8192^3 bf16 matrix product before all problems, TFLOPS: graph 790"
    assert list(tables.closing_lines(found))[1] == first
    again = results.from_json(json.loads(json.dumps(results.as_json(found))))
    assert again.regimes == ["graph"] and again.cells == found.cells


def test_a_kernel_that_is_missing_has_a_row_without_figures() -> None:
    first = cell(y=600, fa4=500)
    first.ours = ["x", "y"]
    first.missing["x"] = "ValueError: q"
    _, missing, found = text(tables.speeds(report(first), plain=True))
    assert missing[5:] == ["-", "-", "500", "fa4", *["-"] * 10]
    assert found[0] == "y"


def test_the_table_fits_a_pipe() -> None:
    one = problem(32, 16, 2, 16384, 16384, causal=True)
    found = Cell(one, ["sm90_d192x128_bf16_causal_gqa8_c1x2_kvmc_lse"])
    names = (*found.ours, "cudnn", "fa3", "fa4")
    found.timings = {name: timing(600, one) for name in names}
    found.timings[found.ours[0]].bare_host_seconds = 1.2e-6
    found.best_over_fa4 = 1.31
    view = tables.speeds(report(found, peers=names[1:]), plain=True)
    stream = io.StringIO()
    Console(file=stream, width=200).print(view)
    assert len(stream.getvalue().splitlines()) == 2
    assert "\u2026" not in stream.getvalue()


def test_the_overheads() -> None:
    lengths = [problem(16384 // n, 16, 16, n, n) for n in (512, 2048, 8192)]
    times = {one: one.flops / 5e14 + 4e-5 for one in lengths}
    lines = {"d128 bf16 none": {"ours": times}}
    (found,) = overhead.fits(lines, 132)
    _, row = text(tables.overheads([found], plain=True))
    assert row[:4] == ["d128", "bf16", "none", "ours"]
    assert row[4] == "500" and row[7:9] == ["in", "c"]
    assert row[-3:] == ["3", "of", "3"]
    more = [problem(65536 // n, 16, 16, n, n) for n in (512, 2048)]
    times |= {one: one.flops / 5e14 + 4e-5 for one in more}
    (found,) = overhead.fits(lines, 132)
    assert text(tables.overheads([found], plain=True))[1][7] == "40.0"


def test_what_is_said_at_the_end() -> None:
    first, second, third = (cell(x=600, fa4=500) for _ in range(3))
    for one in (first, third):
        one.missing["cudnn"] = "RuntimeError: no"
    second.missing["cudnn"] = "MemoryError: none left"
    third.problem = problem(2, 1, 1, 512, 512)
    found = report(first, second, third)
    found.notes.append("no fa3: not installed")
    lines = list(tables.closing_lines(found))
    assert lines[0].startswith("fastest of ours over the best peer, 3 problems: ")
    assert lines[0].endswith("least 1.200 at d125 bf16 none b1 h1 s1000 none")
    assert lines[1] == (
        "8192^3 bf16 matrix product before all problems, TFLOPS: "
        "graph 790, eager 790, burst 790, sustained 790"
    )
    assert lines[3:] == [
        "no fa3: not installed",
        "no cudnn for d125 bf16 none b1 h1 s1000 none and 1 more: RuntimeError: no",
        "no cudnn for d125 bf16 none b1 h1 s1000 none: MemoryError: none left",
    ]


def test_all_of_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_report(report(cell(x=600, fa4=500)), [])
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].startswith("kernel")
    assert "geometric mean 1.200" in printed
    assert "model" not in printed
    assert "\x1b" not in printed


# --- JSON and record ----------------------------------------------------------------------


def test_json_keeps_every_round() -> None:
    first = cell(x=600, fa4=500)
    first.missing["cudnn"] = "RuntimeError: no"
    found = json.loads(json.dumps(results.as_json(report(first)), allow_nan=False))
    assert (found["gpu"], found["multiprocessors"]) == ("NVIDIA H200", 132)
    assert found["matmul"]["after"]["regimes"]["burst"]["tflops"] == pytest.approx(790)
    (one,) = found["cells"]
    assert one["missing"] == {"cudnn": "RuntimeError: no"}
    assert one["best_peer"] == {"name": "fa4", "tflops": pytest.approx(500)}
    assert one["over_best"] == {"x": pytest.approx(1.2)}
    graph = one["contenders"]["x"]["regimes"]["graph"]
    assert graph["tflops"] == pytest.approx(600)
    seconds = [entry["seconds"] for entry in graph["rounds"]]
    middle = SHAPE.flops / 600e12
    assert seconds == pytest.approx([0.9 * middle, middle, 1.5 * middle])
    assert graph["rounds"][0]["sm_clock_mhz"] == [1700]
    assert one["problem"]["spec"]["head_dim"]["qk"] == 125


def test_json_says_all_of_a_run() -> None:
    first = cell(x=600, fa4=500)
    first.best_over_fa4 = 1.1
    first.missing["cudnn"] = "RuntimeError: no"
    found = report(first, peers=("cudnn", "fa4"))
    found.notes.append("no fa3")
    found.peers = list(found.peers)
    assert results.from_json(json.loads(json.dumps(results.as_json(found)))) == found


@pytest.mark.parametrize(
    "name", ["0013-bench-run", "0013-bench-d128-fa3", "0041-bench"]
)
def test_runs_of_before_a_problem_had_a_spec_are_still_shown(name: str) -> None:
    found = json.loads((DECISIONS / f"{name}.json").read_text("utf-8"))
    problems = [cell.problem for cell in results.from_json(found).cells]
    assert [one.flops for one in problems] == [c["flops"] for c in found["cells"]]
    if name == "0041-bench":
        words = ["", " softcap 30", " sink", "", " softcap 30"]
        assert [str(one).partition("s8192 ")[2] for one in problems] == [
            ("q - 1023 <= kv <= q" if at == 3 else "causal") + word
            for at, word in enumerate(words)
        ]


def test_the_record_holds_the_figures_of_the_kernels_own_cells() -> None:
    first = cell(x=612.34, fa4=500)
    other = cell(y=700, fa4=500)
    found = results.benchmarked(report(first, other), "x")
    assert found is not None
    figures = {
        "graph_tflops": 612.0,
        "eager_tflops": 612.0,
        "burst_tflops": 612.0,
        "sustained_tflops": 612.0,
        "host_us": 7.0,
    }
    peer = {key: 500.0 if value == 612 else value for key, value in figures.items()}
    assert found == {
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "versions": {"torch": "2.11", "fa3": None},
        "rounds": 5,
        "clocks": {"graph": 1700, "burst": 1700, "sustained": 1700},
        "matmul_graph_tflops": {"before": 790.0, "after": 790.0},
        "cells": [
            {
                "batch": 1,
                "heads": 1,
                "kv_heads": 1,
                "q": 1000,
                "kv": 1000,
                "mask": "none",
                "visible": 1.0,
                **figures,
                "peers": {"fa4": peer},
            }
        ],
    }


def test_json_and_record_keep_what_was_drawn() -> None:
    ranges = {"documents": [9, 70]}
    drawn = problem(
        2, 1, 1, 200, 200, causal=True, documents=True, ranges=ranges, seed=3
    )
    found = report(Cell(drawn, ["x"]), cell(x=600, fa4=500))
    found.cells[0].timings = {name: timing(600, drawn) for name in ("x", "fa4")}
    found.peers = list(found.peers)
    lengths = drawn.drawn["documents"]
    kept = {"ranges": ranges, "seed": 3, "values": {"documents": lengths}}
    record = results.benchmarked(found, "x")
    assert record is not None
    assert [one.get("drawn") for one in record["cells"]] == [kept, None]
    assert record["cells"][0]["mask"] == "causal"
    data = json.loads(json.dumps(results.as_json(found)))
    assert [one.get("drawn") for one in data["cells"]] == [kept, None]
    again = results.from_json(data)
    assert again == found and again.cells[0].problem.drawn["documents"] == lengths
    said = [line for line in tables.closing_lines(found) if line.startswith("drawn")]
    assert said == [f"drawn for {drawn.family} {drawn}: {draws.summary(drawn)}"]
    json.dumps(record)


def test_no_record_without_every_cell_beside_a_peer() -> None:
    beside, alone, failed = cell(x=600, fa4=500), cell(x=600), cell(fa4=500)
    failed.ours = ["x"]
    assert results.benchmarked(report(beside), "x")
    assert results.benchmarked(report(beside, alone), "x") is None
    assert results.benchmarked(report(beside, failed), "x") is None
    assert results.benchmarked(report(beside), "y") is None
