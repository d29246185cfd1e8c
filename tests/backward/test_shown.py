# SPDX-License-Identifier: Apache-2.0
"""What `explain` and the site say of a backward kernel: roles, products, costs, steps, evidence."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fmha_gen.build import engine, records, render
from fmha_gen.cli import app
from fmha_gen.ops.backward import BACKWARD
from fmha_gen.ops.cases import Case, Tiles
from fmha_gen.planning import plan
from fmha_gen.planning.kernel_plan import KernelPlan
from fmha_gen.planning.protocol import Lane
from fmha_gen.show import backward, explain
from typer.testing import CliRunner

from tests import support

FIELDS = {
    "sm90_d128_bf16_causal_bwd": "head_dim: 128\ndtype: bf16\nmask: causal\n",
    "sm90_d64_bf16_gqa2_bwd": "head_dim: 64\ndtype: bf16\nheads: {q_per_kv: 2}\n",
    "sm90_d96_bf16_causal_bwd": "head_dim: 96\ndtype: bf16\nmask: causal\n",
    "sm90_d64_fp16_bwd": "head_dim: 64\ndtype: fp16\n",
    "sm90_d256_bf16_causal_bwd": "head_dim: 256\ndtype: bf16\nmask: causal\n",
    "sm90_d192x128_bf16_bwd": "head_dim: {qk: 192, v: 128}\ndtype: bf16\n",
    "sm90_d128_bf16_bwd_det": "head_dim: 128\ndtype: bf16\ndeterministic: true\n",
    "sm90_d64_fp16_s512_bwd": "head_dim: 64\ndtype: fp16\nseqlen: 512\n",
    "sm90_d128_bf16_s512_bwd": "head_dim: 128\ndtype: bf16\nseqlen: 512\n",
    "sm90_d192x128_bf16_bwd_det": (
        "head_dim: {qk: 192, v: 128}\ndtype: bf16\ndeterministic: true\n"
    ),
    "sm100_d128_bf16_causal_bwd": "head_dim: 128\ndtype: bf16\nmask: causal\n",
    "sm100_d64_fp16_bwd_det": "head_dim: 64\ndtype: fp16\ndeterministic: true\n",
}
STEM = next(iter(FIELDS))
PAIRED = [stem for stem in FIELDS if stem.startswith(("sm90_d256", "sm90_d192"))]
ON_SM100 = [stem for stem in FIELDS if stem.startswith("sm100")]
ALIKE = [stem for stem in FIELDS if stem not in (*PAIRED, *ON_SM100)]
alike = pytest.mark.parametrize("stem", ALIKE)
each_kernel = pytest.mark.parametrize("stem", FIELDS)


@functools.cache
def planned(stem: str) -> KernelPlan:
    arch = stem.partition("_")[0]
    text = f"arch: {arch}\nop: fmha_bwd\n{FIELDS[stem]}"
    return backward.shown(plan.resolve(support.load_text(text, stem)))


# --- steps --------------------------------------------------------------------------------

CALL = re.compile(
    r"(?:rings|pipes)\.(\w+)\.(consumer_wait|consumer_release|producer_\w+|\w+\.arrive)\("
)
SAID = {
    "producer_acquire": "wait {}_empty",
    "consumer_wait": "wait {}_full",
    "consumer_release": "signal {}_empty",
    "producer_commit": "signal {}_full",
    # Of a copy, whose bytes fill it; of what is told in the other CTA.
    "producer_get_barrier": "signal {}_full",
    "sync_object_empty.arrive": "signal {}_empty",
}
# Functions of a pair of CTAs in which barriers are waited for and signalled.
INNER = re.compile(r"^(issue_slice|release_ds|say_come|pass_on)\(")


def functions(stem: str) -> dict[str, ast.FunctionDef]:
    """Those of a kernel's text, by name."""
    body = ast.parse(render.render_kernel(planned(stem))).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def calls(
    body: Sequence[ast.stmt],
    of_tile: bool,
    of: Mapping[str, ast.FunctionDef] | None = None,
) -> Iterator[str]:
    """Waits and signals in the order of the text; those of a tile's end, or all others.

    of: functions whose own waits and signals are among them, where they are called.
    """
    for node in body:
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            if not of_tile and test in ("is_first", "is_last", "left == 0"):
                continue
            yield from calls(node.body, of_tile, of)
        elif isinstance(node, ast.With):
            yield from calls(node.body, of_tile, of)
        elif "take_work(" in (text := ast.unparse(node)):
            yield from ("wait ticket_full", "signal ticket_empty")
        elif "take_turn(" in text:
            yield "wait turn_full"
        elif "say_added(" in text:
            yield "signal added_full"
        elif of and (inner := INNER.match(text)):
            yield from calls(of[inner[1]].body, of_tile, of)
        else:
            for ring, call in CALL.findall(text):
                yield SAID[call].format(ring)


def said(lane: Lane) -> list[str]:
    return [
        call
        for step in lane.steps
        for call in (
            *(f"wait {wait.barrier}" for wait in step.waits),
            *(f"signal {signal.barrier}" for signal in step.signals),
        )
    ]


def lanes(stem: str) -> tuple[dict[str, Lane], dict[str, Lane]]:
    """By role: those of a block, those between two tiles."""
    block, tile = planned(stem).kernels[1].phases
    return {x.role: x for x in block.lanes}, {x.role: x for x in tile.lanes}


def loop_of(function: ast.FunctionDef) -> ast.While:
    """The loop over all tiles."""
    (found,) = (node for node in function.body if isinstance(node, ast.While))
    return found


def split_at(loop: ast.While, kind: type[ast.For | ast.While]) -> tuple[Any, Any, Any]:
    """What is before the loop over blocks in the one over tiles, its body, and what is behind."""
    (place,) = (i for i, node in enumerate(loop.body) if isinstance(node, kind))
    blocks = loop.body[place]
    assert isinstance(blocks, kind)
    return loop.body[:place], blocks.body, loop.body[place + 1 :]


@alike
def test_the_steps_are_those_of_the_loop(stem: str) -> None:
    loop = loop_of(functions(stem)["differentiate"])
    block, tile = lanes(stem)
    of_block, of_tile = list(calls(loop.body, False)), list(calls(loop.body, True))
    # What is shown begins where the next tile is known, with a tile's last block.
    end = of_tile.index("wait ticket_full")
    for role in ("math 0", "math 1"):
        assert said(block[role]) == of_block
        around = of_tile[end:] + of_tile[:end]
        assert said(tile[role]) == around


@pytest.mark.parametrize(
    "stem", ["sm90_d128_bf16_bwd_det", "sm90_d192x128_bf16_bwd_det"]
)
def test_the_steps_of_who_watches_turns_are_those_of_its_loop(stem: str) -> None:
    loop = loop_of(functions(stem)["watch_turns"])
    block, tile = lanes(stem)
    before, blocks, behind = split_at(loop, ast.For)
    assert said(block["watcher"]) == [*calls(blocks, True)]
    # It is shown with the first block of the next tile.
    around = [*behind, *before, *blocks]
    assert said(tile["watcher"]) == [*calls(around, True)]


def test_the_steps_of_who_passes_turns_are_those_of_its_loop() -> None:
    stem = "sm90_d128_bf16_bwd_det"
    found = functions(stem)
    loop = loop_of(found["pass_turns"])
    block, tile = lanes(stem)
    assert not any(isinstance(node, ast.For) for node in loop.body)
    assert said(block["passer"]) == [*calls(loop.body, False, found)]
    assert said(tile["passer"]) == [*calls(loop.body, True, found)]


@pytest.mark.parametrize("stem", PAIRED)
@pytest.mark.parametrize(
    ("role", "name"), [("math 0", "compute_dv"), ("math 1", "compute_dk")]
)
def test_the_steps_of_math_warps_of_a_pair_are_those_of_their_loops(
    stem: str, role: str, name: str
) -> None:
    known = functions(stem)
    before, blocks, behind = split_at(loop_of(known[name]), ast.While)
    block, tile = lanes(stem)
    assert said(block[role]) == [*calls(blocks, True, known)]
    # What is shown begins behind a tile's last block.
    assert said(tile[role]) == [*calls([*behind, *before], True, known)]


@pytest.mark.parametrize("stem", PAIRED)
def test_the_steps_of_the_sender_are_those_of_its_loop(stem: str) -> None:
    known = functions(stem)
    before, blocks, behind = split_at(loop_of(known["send_ds"]), ast.For)
    block, tile = lanes(stem)
    of_block = [*calls(blocks, True, known)]
    # What is shown begins where it waits for the other CTA's dS.
    first = of_block.index("wait peer_full")
    assert said(block["sender"]) == [*of_block[first:], *of_block[:first]]
    assert said(tile["sender"]) == [*calls([*behind, *before], True, known)]


@pytest.mark.parametrize("stem", ON_SM100)
@pytest.mark.parametrize(
    ("role", "name", "first"),
    [("mma", "multiply", 0), ("math 0", "differentiate", 3), ("add", "add_dqs", 0)],
)
def test_the_steps_of_tensor_memory_are_those_of_their_loops(
    stem: str, role: str, name: str, first: int
) -> None:
    """What is shown of math begins behind P, its first calls."""
    before, blocks, behind = split_at(loop_of(functions(stem)[name]), ast.For)
    block, tile = lanes(stem)
    of_block = [*calls(blocks, True)]
    assert said(block[role]) == [*of_block[first:], *of_block[:first]]
    around = [*calls([*behind, *before], True)]
    # What is shown begins with the last block's dQ, and ends with the first one's P.
    of_dq = [x for x in of_block if x.endswith(("dq_empty", "dq_full"))]
    last = {
        "mma": lambda: of_dq[: of_dq.index("signal dq_full") + 1],
        "add": lambda: of_block,
    }
    of_last = last.get(role, list)()
    assert said(tile[role]) == [*of_last, *around, *of_block[:first]]


@each_kernel
def test_all_arrivals_are_counted(stem: str) -> None:
    main = planned(stem).kernels[1]
    known = {each.name: each for each in main.barriers}
    numbers = backward.numbers(planned(stem))
    shown: set[str] = set()
    for phase in main.phases:
        arrived: Counter[str] = Counter()
        for lane in phase.lanes:
            for step in lane.steps:
                for wait in step.waits:
                    assert wait.barrier in known
                for signal in step.signals:
                    arrived[signal.barrier] += signal.total
                    if signal.tx_bytes:
                        ring = signal.barrier.removesuffix("_full").upper()
                        sent = "DS_BYTES" if ring == "PEER" else f"{ring}_TX_BYTES"
                        assert signal.tx_bytes == numbers[sent]
        for barrier, count in arrived.items():
            assert known[barrier].count == count, barrier
        shown |= arrived.keys()
    assert shown == known.keys()


@each_kernel
def test_what_runs_is_known_to_be_over(stem: str) -> None:
    for phase in planned(stem).kernels[1].phases:
        for lane in phase.lanes:
            issued = [step.issues for step in lane.steps if step.issues]
            retired = [name for step in lane.steps for name in step.retires]
            assert sorted(issued) == sorted(retired)


# --- products and costs -------------------------------------------------------------------


@each_kernel
def test_products_have_the_flops_of_the_operation(stem: str) -> None:
    found = planned(stem)
    numbers = backward.numbers(found)
    rows, keys = numbers["TILE_Q"], numbers["TILE_KV"]
    spec = {**found.context["spec"], "mask": "none", "q_per_kv": 1}
    case = Case("x", 1, 1, rows, keys)
    assert backward.step_flops(found) == BACKWARD.flops(spec, case)


@pytest.mark.parametrize(
    ("stem", "clocks"),
    [
        # Of 64 rows: S, dP 1024 of shared memory, but for 32 of K in registers, dV, dK, dQ 1024, dS
        # 128, loads 256.
        ("sm90_d128_bf16_causal_bwd", (2560, 2400, 512)),
        # Of 128 rows: S, dP 768, but for 96 of K, dV, dK 512, dQ 512, dS 256, loads 256.
        ("sm90_d64_bf16_gqa2_bwd", (2560, 2208, 1024)),
        # Of 64 rows: S, dP 768, but for 192 of K and 160 of V, dV, dK 384, dQ 448, dS 128, loads
        # 192.
        ("sm90_d96_bf16_causal_bwd", (1920, 1568, 512)),
        # As of 256 below, with no K and no V in shared memory: S, dP 320, dV, dK 320, dQ 448, loads
        # 320, dS and P 320.
        ("sm90_d192x128_bf16_bwd_det", (1664, 1728, 256)),
        # Of 64 rows and 64 keys: S, dP 1024, dV, dK 512, dQ 512, loads 512, dS and P 320: stored,
        # P read, dS copied, and the other CTA's written.
        ("sm90_d256_bf16_causal_bwd", (2560, 2880, 256)),
        # Of 128 rows: S, dP 1024, dV, dK 512, dQ 512, dS 256, loads 512.
        ("sm100_d128_bf16_causal_bwd", (2560, 2816, 1024)),
    ],
)
def test_clocks_of_a_step(stem: str, clocks: tuple[int, int, int]) -> None:
    found = backward.step_clocks(planned(stem))
    assert tuple(found.values()) == clocks


@each_kernel
def test_the_workspace_is_as_large_as_is_said(stem: str) -> None:
    found = planned(stem)
    *_, last = backward.cost_lines(found)
    formula = re.findall(r"Workspace: (.*) B, (\d+) B a row", last)
    ((size, of_row),) = formula
    numbers = backward.numbers(found)
    scope = {"ceil": lambda x: -int(-x // 1), "batch": 3, "heads": 4}
    spec = found.context["spec"]
    q, kv = (
        length if isinstance(length, int) else drawn
        for length, drawn in zip(spec["seqlen"].values(), (300, 7), strict=True)
    )
    case = Case("x", 3, 4 // spec["q_per_kv"], q, kv)
    tiles = Tiles(numbers["TILE_Q"], numbers["TILE_KV"], (1, 1))
    (workspace,) = BACKWARD.workspaces
    assert eval(size, scope | {"seqlen_q": q}) == 4 * workspace.elements(
        spec, tiles, case
    )
    assert int(of_row) == 4 * (numbers["HEAD_DIM_QK"] + 2)


def test_explain_has_kernels_roles_products_and_costs() -> None:
    lines = explain.render(planned(STEM), None).splitlines()
    assert max(map(len, lines)) <= explain.WIDTH
    for line in (
        "Kernels",
        "  finish  blocks of rows of all query heads         256  dQ of its sums",
        "main: Roles",
        f"  scheduler  3{24:>17}  draws tickets for KV tiles, the longest of a section first",
        "main: Products of a step, in their order",
        f"  dK += dS^T Q   registers{'sQ, transposed':>43}   64 x 128 x 64  until the",
        "Costs",
        "  - A step adds 32768 B of fp32 to the sums of dQ in global memory:"
        " 0.0031 B per FLOP, 0.31 TB/s at",
        "  Q    16640 B  CTA 0 loads Q, a block of rows, for CTA 0",
    ):
        assert line in lines, line
    found = plan.resolve(planned(STEM).spec_file)
    assert explain.render(found, None).splitlines() == lines, "whoever has the plan"


def test_sums_that_tickets_clear_are_explained() -> None:
    text = explain.render(planned("sm90_d64_bf16_gqa2_bwd"), None)
    assert max(map(len, text.splitlines())) <= explain.WIDTH
    words = " ".join(text.split())
    for each in (
        "and zeros where dQ of the first heads is summed",
        "adds to the sums of dQ, and clears those of later heads",
        "+ 1 + batch * heads / 2) B",
    ):
        assert each in words, each


def test_other_kernels_are_as_they_were() -> None:
    found = support.shipped_plan("sm90_d128_bf16_causal_lse")
    assert backward.shown(found) is found
    assert "Products" not in explain.render(found, None)


def test_a_pair_of_ctas_is_explained() -> None:
    text = explain.render(planned("sm90_d192x128_bf16_bwd_det"), None)
    assert max(map(len, text.splitlines())) <= explain.WIDTH
    found = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "main at most one per SM, in pairs, which draw tiles 384 dK and dV; adds to the sums of dQ",
        "sender 2 24 copies dS to the other CTA, and tells it that its own has come;",
        "math 1 8 to 11 240 dP, dS and dK of the tile's keys; columns 48-95 or 144-191 of dQ",
        "S^T = K Q^T registers, for a tile sQ 64 x 64 x 192 becomes P^T",
        "dQ = dS K sdS, transposed sK, transposed 64 x 48 x 128 48 columns of it, added to",
        "- A step adds 24576 B of fp32 to the sums of dQ in global memory: 0.0036 B per FLOP,"
        " 0.36 TB/s at",
        "K 24576 B CTA 1 loads K, its own tile, for CTA 1",
        "peer's K 12288 B CTA 1 loads peer's K, columns 96-191, for CTA 1",
    ):
        assert line in found, line


@pytest.mark.parametrize("stem", PAIRED)
def test_loads_of_k_fill_its_stage(stem: str) -> None:
    """Of each CTA of a pair: its own tile, and the columns of the other one's that it needs."""
    found = planned(stem)
    known, of_k = backward.numbers(found), Counter[int]()
    for load in found.kernels[1].loads:
        if load.tensor in ("K", backward.PEERS_K):
            rows, columns = load.rows[1], load.columns[1]
            assert load.nbytes == 2 * rows * columns
            of_k[load.cta] += load.nbytes
    assert of_k == dict.fromkeys(range(2), known["K_TX_BYTES"])


# --- evidence -----------------------------------------------------------------------------

COMPILED = {
    **{"arch": "sm_90a", "dsl": "4.8.1", "ptx_sha256": "1" * 64},
    **{"launch_sha256": "2" * 64, "host_sha256": "3" * 64, "kernels": []},
}
WORST = {"case": "ragged", "of_bound": 0.25, "absolute": 1e-3}
VALIDATED = {
    **{
        "gpu": "NVIDIA H100",
        "driver": "580",
        "dsl": "4.8.1",
        "cases": 30,
        "misuses": 9,
    },
    **{"repeats": 20, "sanitizer": None, "worst": WORST},
    **{"dk_worst": {**WORST, "of_bound": 0.5}, "dv_worst": {**WORST, "of_bound": 0.75}},
}


def cell(length: int) -> dict[str, Any]:
    figures = dict.fromkeys(
        [f"{x}_tflops" for x in ("graph", "eager", "burst", "sustained")], 450.0
    )
    figures["host_us"] = 20.0
    return {
        **{"batch": 4, "heads": 16, "kv_heads": 16, "q": length, "kv": length},
        **{"visible": 0.5, "mask": "causal", **figures},
        "peers": {"fa4": {**figures, "graph_tflops": 500.0}},
    }


BENCHMARKED = {
    **{"gpu": "NVIDIA H100", "driver": "580", "rounds": 5, "clocks": {}},
    "versions": {"dsl": "4.8.1", "fa3": None, "fa4": "4.0"},
    "matmul_graph_tflops": {},
    "cells": [cell(512), cell(4096)],
}


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    """Specs and generated files of a kernel with a record of all rungs."""
    pytest.importorskip("matplotlib")
    specs, generated = tmp_path / "specs", tmp_path / "generated"
    specs.mkdir()
    text = f"arch: sm90\nop: fmha_bwd\n{FIELDS[STEM]}"
    (specs / f"{STEM}.yaml").write_text(text)
    assert engine.build([specs], generated, compile=False).failures == ()
    body = render.body_digest((generated / f"{STEM}.py").read_text())
    record = None
    for rung, result in (
        ("compiled", COMPILED),
        ("validated", VALIDATED),
        ("benchmarked", BENCHMARKED),
    ):
        record = records.merge_rung(
            record, kernel=STEM, body_sha256=body, rung=rung, result=result
        )
    assert record is not None
    (generated / "records").mkdir(exist_ok=True)
    (generated / records.path_of(STEM)).write_text(records.dump(record))
    return tmp_path


def words_of(file: Path) -> str:
    """Without tags and pictures."""
    text = re.sub(r"<svg.*?</svg>", " ", file.read_text("utf-8"), flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def test_evidence_is_of_each_gradient(shown: Path) -> None:
    spec, out = shown / "specs" / f"{STEM}.yaml", shown / "generated"
    result = CliRunner().invoke(app, ["explain", str(spec), "--out", str(out)])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    for words in (
        "worst error of dq 0.001, 0.25 of its bound, in ragged",
        "dk off by at most 0.001, 0.50 of its bound, in ragged",
        "dv off by at most 0.001, 0.75 of its bound, in ragged",
        "alike bit for bit but for a last place of dq",
    ):
        assert words in said, words


def test_the_site_has_its_page_and_its_speed(shown: Path) -> None:
    site, out = shown / "site", str(shown / "generated")
    options = ["--specs", str(shown / "specs"), "--out", out]
    result = CliRunner().invoke(app, ["site", str(site), *options])
    assert result.exit_code == 0, result.output
    page = words_of(site / "kernels" / f"{STEM}.html")
    for words in (
        "Kernels kernel CTAs threads does stats blocks of rows",
        "Products of a step, in their order product A B",
        "main: Roles role warps registers does producer 0 24 loads by TMA",
        "Why such kernels are as they are: decision 0059 .",
        "FLOPs are those of the five products: 2 batch heads scores (3 d_qk + 2 d_v)",
        "0.90 of fa4",
    ):
        assert words in page, words
    assert "stats: Memory" not in page and "finish: Roles" not in page
    speed = words_of(site / "speed.html")
    for words in (
        "backward Problems: 2; times as fast as the best peer: 0.90",
        "Of a backward pass five, however many",
        "b4 h16 s4096 causal backward",
        "50.0%",
    ):
        assert words in speed, words
    index = words_of(site / "index.html")
    assert f"{STEM} backward, head_dim 128, bf16, causal benchmarked" in index
    assert "0.75" in index, "the worst of all gradients"
    # 10 b h s^2 d, half when causal, at 450 TFLOPS.
    flops = 10 * 4 * 16 * 4096**2 * 128 / 2
    assert f" {flops / 450e12 * 1e6:.0f} " in speed
    assert json.loads((site / "kernels" / f"{STEM}.json").read_text())["rung"]
