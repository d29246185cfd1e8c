# SPDX-License-Identifier: Apache-2.0
"""Which problems, peers and files the command takes; no GPU, no torch."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import support
from fmha_gen import cli
from fmha_gen.bench import command, grid
from fmha_gen.bench.command import Choice, cells_for
from fmha_gen.bench.grid import Row
from fmha_gen.errors import CheckFailed, EnvironmentProblem, UsageProblem
from typer.testing import CliRunner

from .test_problems import spec


def entered(*arguments: Any) -> tuple[list[tuple[str, list[str]]], list[str]]:
    cells, notes = cells_for(*arguments)
    return [(str(cell.problem), cell.ours) for cell in cells], notes


def test_kernels_of_the_same_problem_share_a_cell_and_its_peers() -> None:
    specs = {
        "dynamic": spec(),
        "fixed": spec(q=512, kv=512),
        "with_lse": spec(lse=True),
        "other": spec(q=4096, kv=4096),
    }
    cells, notes = entered(specs, Choice(lengths=[512, 1024]), None)
    assert cells == [
        ("b32 h16 s512 none", ["dynamic", "fixed"]),
        ("b16 h16 s1024 none", ["dynamic"]),
        ("b32 h16 s512 none", ["with_lse"]),
        ("b16 h16 s1024 none", ["with_lse"]),
    ]
    assert notes == ["other was not timed: fixed to other lengths"]


def test_the_same_problem_twice_is_one_cell() -> None:
    choice = Choice(lengths=[65536], tokens=[1024, 2048])
    cells, notes = entered({"x": spec(), "y": spec(lse=True)}, choice, None)
    assert cells == [("b1 h16 s65536 none", ["x"]), ("b1 h16 s65536 none", ["y"])]
    assert notes == [
        "b1 h16 s65536 none is one sequence, longer than --tokens asks for"
    ]


@pytest.mark.parametrize("tokens", [[], [512], [600, 1024]])
def test_tokens_that_make_a_sequence_need_no_note(tokens: list[int]) -> None:
    choice = Choice(lengths=[512], tokens=tokens)
    assert entered({"x": spec()}, choice, None)[1] == []


def test_what_masks_read_is_drawn_from_ranges_of_the_call() -> None:
    left = {"left": "argument", "right": "none"}
    specs = {
        "docs": spec(mask="causal", documents=True),
        "too": spec(mask="causal", documents=True, pack_gqa=True),
        "window": spec(mask="causal", window=left),
        "plain": spec(),
    }
    ranges = {"documents": [64, 128], "window_left": [9, 9]}
    choice = Choice(lengths=[512], batch=1, ranges=ranges, seeds=(0, 1))
    cells, notes = entered(specs, choice, None)
    assert cells == [
        ("b1 h16 s512 causal documents 64:128 seed 0", ["docs", "too"]),
        ("b1 h16 s512 causal documents 64:128 seed 1", ["docs", "too"]),
        ("b1 h16 s512 q - 9 <= kv <= q window_left 9", ["window"]),
        ("b1 h16 s512 none", ["plain"]),
    ]
    assert notes == []
    with pytest.raises(UsageProblem, match="--param x: no kernel reads it"):
        cells_for(specs, Choice(ranges={"x": [1, 1], "documents": [1, 9]}), None)


PACKED = {"mask": "causal", "batch": "varlen"}
PAGED = {"paged": {"page": 16}}


def test_kernels_of_other_layouts_are_beside() -> None:
    """Of the same work alone; pages are never beside, as no peer would have them."""
    specs = {
        "paged": {**spec(**PACKED, lse=True), "kv": PAGED},
        "packed": spec(**PACKED),
        "pack_gqa": spec(**PACKED, pack_gqa=True),
        "dense": spec(mask="causal", lse=True),
        "fixed": spec(q=512, kv=512, mask="causal"),
        "full": spec(batch="varlen"),
        "sink": spec(mask="causal", sink=True),
        "fp16": spec(mask="causal", dtype="fp16"),
    }
    choice = Choice(sequences=["2x512", "512/1024", "9+5"], pools=["nhd", "vllm"])
    cells, notes = cells_for(specs, choice, None)
    packed = {"packed": "packed", "pack_gqa": "packed"}
    dense, fixed = {"dense": "dense"}, {"dense": "dense", "fixed": "dense"}
    found = {str(cell.problem): (cell.ours, cell.beside) for cell in cells}
    assert found == {
        "h16 2x512 causal page 16 nhd": (["paged"], packed | fixed),
        "h16 2x512 causal page 16 vllm": (["paged"], packed | fixed),
        "h16 512/1024 causal page 16 nhd": (["paged"], packed | dense),
        "h16 512/1024 causal page 16 vllm": (["paged"], packed | dense),
        "h16 9+5 causal page 16 nhd": (["paged"], packed),
        "h16 9+5 causal page 16 vllm": (["paged"], packed),
        "h16 2x512 causal packed": ([*packed], fixed),
        "h16 512/1024 causal packed": ([*packed], dense),
        "h16 9+5 causal packed": ([*packed], {}),
        **{f"h16 {x} none packed": (["full"], {}) for x in choice.sequences},
    }
    why = "dense tensors, and no sequences of one length that are its work"
    assert notes == [f"{stem} was not timed: {why}" for stem in ("sink", "fp16")]


def test_lengths_and_pools_that_no_kernel_has() -> None:
    with pytest.raises(UsageProblem, match="--pool nhd: no kernel has pages"):
        cells_for({"x": spec(**PACKED)}, Choice(pools=["nhd"]), None)
    with pytest.raises(CheckFailed, match="nothing to time\nx was not timed: dense"):
        cells_for({"x": spec()}, Choice(sequences=["8x512"]), None)


def test_a_grid_says_which_kernels_and_which_factors() -> None:
    rows = [
        Row("bf16", 128, 128, "none", 1, 1, 256, 1.2),
        Row("bf16", 64, 64, "none", 1, 1, 256, None),
    ]
    cells, notes = cells_for({"x": spec(), "y": spec(mask="causal")}, Choice(), rows)
    assert [(cell.ours, cell.best_over_fa4) for cell in cells] == [(["x"], 1.2)]
    assert notes == [
        "no kernel for d64 bf16 none b1 s256",
        "y was not timed: no row of the grid",
    ]


def test_nothing_to_time_is_told_with_the_reasons() -> None:
    with pytest.raises(CheckFailed, match="nothing to time\nx was not timed: fixed"):
        cells_for({"x": spec(q=512, kv=512)}, Choice(lengths=[64]), None)


def test_the_shipped_dynamic_kernels_cover_most_of_the_grid_of_the_bar() -> None:
    rows = grid.load(
        Path(__file__).parents[2] / "codegen/decisions/0013-bench-grid.csv"
    )
    specs = {
        f"{dim}_{mask}_{group}": spec(dim, mask=mask, q_per_kv=group)
        for dim in (64, 128, 256)
        for mask in ("none", "causal")
        for group in (1, 8)
    }
    cells, notes = cells_for(specs, Choice(), rows)
    assert len(cells) == 45
    assert all(len(cell.ours) == 1 for cell in cells)
    assert [note.split()[0] for note in notes] == [
        "64_none_8",
        "64_causal_8",
        "256_none_8",
        "256_causal_8",
    ]


# --- arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"against": ["fa9"]},
            "--against fa9: the peers are cudnn, fa3, fa4, flash, flex",
        ),
        ({"rounds": 0}, "--rounds 0: at least 1"),
        ({"regimes": ["graph", "cold"]}, "--regime cold: the regimes are graph, eager"),
        ({"regimes": ["eager"]}, "--regime: tables and pictures are of graph"),
        ({"regimes": ["graph"], "record": True}, "--record needs every regime"),
        ({"rounds": 4, "record": True}, "--record needs --rounds 5 or more"),
        ({"against": [], "record": True}, "--record needs a peer"),
        ({"choice": Choice(grid=Path("g"), batch=1)}, "--grid says all sizes"),
        ({"choice": Choice(grid=Path("g"), seeds=(1,))}, "--grid says all sizes"),
        ({"choice": Choice(tokens=[1], batch=1)}, "--batch and --tokens exclude"),
        ({"choice": Choice([8], sequences=["8"])}, "--lengths excludes --seqlen"),
        ({"choice": Choice(batch=1, sequences=["8"])}, "--lengths excludes --seqlen"),
        (
            {"choice": Choice(sequences=["8", "8y2"])},
            '--lengths 8y2: "8y2" is no length',
        ),
        ({"choice": Choice(pools=["hnd"])}, "--pool hnd: the pools are vllm, nhd"),
        ({"choice": Choice(grid=Path("g"), pools=["nhd"])}, "--grid says all sizes"),
        ({"choice": Choice(grid=Path("no.csv"))}, "no.csv: cannot be read"),
        ({"json_file": Path("no/x.json")}, "no/x.json: there is no folder no"),
        ({"plot_file": Path("x.gif")}, "--plot x.gif: the name must end in"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageProblem, match=message):
        command.run([Path("x.py")], **options)


def test_peers_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch"}

    def find_spec(name: str) -> Any:
        if "." in name and name.split(".")[0] not in there:
            raise ModuleNotFoundError(name)
        return name if name in there else None

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    assert command.choose_peers(None) == (
        ["cudnn"],
        [
            "no fa3: flash_attn_interface or vllm is not installed",
            "no fa4: flash_attn.cute is not installed",
        ],
    )
    assert command.choose_peers(["cudnn", "cudnn"]) == (["cudnn"], [])
    with pytest.raises(
        EnvironmentProblem, match=r"fa4: flash_attn\.cute is not installed"
    ):
        command.choose_peers(["cudnn", "fa4"])


@pytest.mark.parametrize("text", ["", "a", "512,", "0", "-1", "512,1k"])
def test_lists_of_numbers_on_the_command_line(text: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", "x.py", "--seqlen", text])
    assert result.exit_code == 2
    assert "is no list such as 512,1024" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--documents", "9:5", "'9:5' is no range such as 512:4096"),
        ("--documents", "", "'' is no range"),
        ("--param", "window_left", "'' is no range"),
        ("--param", "=5", "'5' is no range"),
        ("--param", "x=1:2:3", "'1:2:3' is no range"),
        ("--seed", "-1", "is no list such as"),
    ],
)
def test_ranges_on_the_command_line(option: str, text: str, message: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", "x.py", f"{option}={text}"])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("\u2502", " ").split())


def test_ranges_reach_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    choices: list[Choice] = []
    monkeypatch.setattr(command, "run", lambda *_, choice, **__: choices.append(choice))
    options = ["--documents", "512:4096", "--param", "w=-3:4", "--param", "prefix=7"]
    result = CliRunner().invoke(cli.app, ["bench", "x.py", *options, "--seed", "0,5"])
    assert result.exit_code == 0
    ranges = {"documents": [512, 4096], "w": [-3, 4], "prefix": [7, 7]}
    assert choices == [Choice(ranges=ranges, seeds=(0, 5))]


def test_lengths_reach_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    choices: list[Choice] = []
    monkeypatch.setattr(command, "run", lambda *_, choice, **__: choices.append(choice))
    options = ["--lengths", "8x2048,64x1/8192+2048/8192", "--pool", "nhd,vllm"]
    result = CliRunner().invoke(cli.app, ["bench", "x.py", *options])
    assert result.exit_code == 0
    sequences = ["8x2048", "64x1/8192+2048/8192"]
    assert choices == [Choice(sequences=sequences, pools=["nhd", "vllm"])]


def test_the_commands_of_the_docs_time_the_rows_of_the_decisions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each names kernels that there are, and these are beside each other."""
    text = (Path(__file__).parents[2] / "codegen/docs/bench.md").read_text("utf-8")
    block = next(x for x in text.split("```") if x.startswith("sh\nd128="))
    script = 'fmha-gen() { echo "$@"; }\n' + block.removeprefix("sh\n")
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert said.stderr == ""
    runs: list[tuple[Any, Choice]] = []
    monkeypatch.setattr(command, "run", lambda x, choice, **_: runs.append((x, choice)))
    for line in said.stdout.splitlines():
        result = CliRunner().invoke(cli.app, line.split())
        assert result.exit_code == 0, result.output
    found = {}
    for paths, choice in runs:
        command.check_arguments(choice, None, 5, ["graph"], record=False)
        assert all(path.parent.name == "generated" for path in paths)
        specs = {x.stem: support.shipped_plan(x.stem).context["spec"] for x in paths}
        cells, notes = cells_for(specs, choice, None)
        assert notes == []
        for cell in cells:
            layouts = sorted({*cell.beside.values()})
            found[f"{cell.problem.shape} {cell.problem}"] = layouts
    packed = "causal packed"
    assert found == {
        f"d128 bf16 h16 8x2048 {packed}": ["dense"],
        f"d128 bf16 h16 16x128:8192 {packed} seed 0": [],
        f"d128 bf16 h16 zipf {packed}": [],
        f"d128 bf16 h16 128x128 {packed}": ["dense"],
        f"d192x128 bf16 h16 8x2048 {packed}": ["dense"],
        **{
            f"d128 bf16 GQA 4 h32/8 {x} causal page {page} vllm": ["dense", "packed"]
            for x in ("8x2048", "4x4096", "2048/32768")
            for page in (16, 128)
        },
        **{
            f"d128 bf16 GQA 4 h32/8 {x} {packed}": ["dense"]
            for x in ("8x2048", "4x4096", "2048/32768")
        },
        "d128 bf16 GQA 4 h32/8 32x1/8192 causal page 16 vllm": [],
        "d128 bf16 GQA 4 h32/8 128x1/4096 causal page 16 vllm": [],
    }
