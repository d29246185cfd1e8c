# SPDX-License-Identifier: Apache-2.0
"""The command, from specs to a winner in the spec; compiler and GPU are models."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.model import ModelGauge
from engine import fake
from fmha_gen import cli
from fmha_gen.build import engine as build
from fmha_gen.errors import EnvironmentProblem
from fmha_gen.spec.model import load_specs
from fmha_gen.tune import command, space
from typer.testing import CliRunner

from .model import ModelGpu

SPEC = "arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 128  # of both\n"
# Few candidates: rendering one takes a third of a second.
FEW = (
    *("--fix", "tile.q", "--fix", "stages.q"),
    *("--fix", "stages.kv=2", "--fix", "stages.v"),
)
SIX = (*FEW, "--fix", "tile.kv=48,64,80,96,112,176")

ROOT = Path(__file__).parents[2]

gpus: list[ModelGpu] = []


def model_gpu(**given: Any) -> ModelGpu:
    """Kernels take as long as their TILE_KV is away from 96, on a card that drifts."""
    truth = {}
    for body, text in given["texts"].items():
        found = re.search(r"^TILE_KV = (\d+)", text, re.MULTILINE)
        assert found
        truth[body] = 1e-3 * (1 + abs(int(found[1]) - 96) / 1000)
    problems = [str(problem) for problem in given["problems"]]
    gpus.append(ModelGpu(truth, drift=1e-5, jitter=0.001, problems=problems))
    return gpus[-1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    engine = replace(
        build.default_engine(),
        toolchain_key=lambda: "model",
        compile_kernel=lambda text, stem, arch: fake.report(),
    )
    monkeypatch.setattr(build, "default_engine", lambda: engine)
    monkeypatch.setattr(command, "require_gpu", lambda: "580.1")
    monkeypatch.setattr(command, "find_gpu", ModelGauge)
    monkeypatch.setattr(command, "OneGpu", model_gpu)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "k.yaml").write_text(SPEC)
    gpus.clear()
    return tmp_path


def tune(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["tune", *arguments])


def test_the_winner_is_in_the_spec_and_the_journal(folder: Path) -> None:
    result = tune("specs/k.yaml", *SIX, "--seqlen", "512,1024")
    assert (result.exit_code, result.stderr) == (0, "")
    text = (folder / "specs" / "k.yaml").read_text()
    assert (
        text == SPEC + "tile:\n  q: 128\n  kv: 96\nstages:\n  q: 2\n  kv: 2\n  v: 3\n"
    )
    (spec_file,) = load_specs(["specs"])
    assert (spec_file.spec.tile.kv, spec_file.spec.stages.kv) == (96, 2)
    said = result.stdout
    assert said.startswith("k (NVIDIA H200, driver 580.1): b32 h16 s512 none, b16 h16")
    assert "winner: tile.kv 128 to 96: 3.1% less time than the incumbent" in said
    assert "8 candidates with the incumbent" not in said
    assert "7 candidates with the incumbent, 1 rejected by the plan" in said
    assert "\n+  kv: 96\n" in said
    assert said.endswith("now run: fmha-gen build specs/k.yaml\n")
    journal = folder / "generated" / "records" / "k.tune.jsonl"
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    events = [entry["event"] for entry in entries]
    steps = [*["candidate"] * 7, *["check"] * 6, *["heat"] * 2]
    assert events == [*steps, "result"]
    values = {one["body"]: one["values"]["tile.kv"] for one in entries[:7]}
    first, last = ([values[x] for x in one["contenders"]] for one in entries[-3:-1])
    assert first == [128, 48, 64, 80, 96, 112]
    assert last in ([128, 96, 80], [128, 96, 112])
    refused = [one for one in entries[-1]["candidates"] if one["rejected"]]
    assert [one["values"]["tile.kv"] for one in refused] == [176]
    assert all(one["score"] for one in entries[-1]["candidates"][1:-1])


def test_the_second_time_the_incumbent_stays(folder: Path) -> None:
    assert tune("specs/k.yaml", *SIX, "--seqlen", "512").exit_code == 0
    before = (folder / "specs" / "k.yaml").read_text()
    result = tune("specs/k.yaml", *SIX, "--seqlen", "512")
    assert result.exit_code == 0
    assert "the incumbent stays: the best candidate takes 1.0" in result.stdout
    assert (folder / "specs" / "k.yaml").read_text() == before


def test_json_has_every_candidate(folder: Path) -> None:
    arguments = ("specs/k.yaml", *SIX, "--seqlen", "512", "--json")
    (found,) = json.loads(tune(*arguments).stdout)
    assert found["incumbent"]["tile.kv"] == 128
    assert found["winner"] == {
        **found["incumbent"],
        "tile.kv": 96,
    }
    assert found["machine"]["gpu"] == "NVIDIA H200"
    assert found["problems"] == ["b32 h16 s512 none"]
    by_kv = {one["values"]["tile.kv"]: one for one in found["candidates"]}
    assert set(by_kv) == {128, 48, 64, 80, 96, 112, 176}
    assert by_kv[176]["rejected"]["code"] == "FG401"
    assert by_kv[96]["final"]
    assert by_kv[96]["score"]["time"] == pytest.approx(1 / 1.032, abs=0.002)
    assert by_kv[48]["score"]["time"] == pytest.approx(1.048 / 1.032, abs=0.003)
    assert found["diff"].startswith("--- a/specs/k.yaml\n+++ b/specs/k.yaml\n")


def test_a_dry_run_needs_no_gpu_and_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise EnvironmentProblem("no NVIDIA GPU")

    monkeypatch.setattr(command, "require_gpu", none)
    result = tune("specs/k.yaml", *SIX, "--dry-run")
    assert result.exit_code == 0
    first, title, incumbent, *rows = result.stdout.splitlines()
    assert first.count("b1 h16 s16384 none") == 1
    assert title.split()[:5] == list(space.FIELDS)
    assert incumbent.split()[-1] == "incumbent"
    assert sum(row.rstrip().endswith("to run") for row in rows) == 5
    (refused,) = [row for row in rows if "FG401" in row]
    assert "sm90 allows 232448: barriers" in refused
    assert not (folder / "generated").exists()
    assert not gpus
    data = json.loads(tune("specs/k.yaml", *SIX, "--dry-run", "--json").stdout)
    assert (data[0]["machine"], data[0]["winner"]) == (None, None)
    result = tune("specs/k.yaml")
    assert (result.exit_code, result.stderr) == (3, "no NVIDIA GPU\n")


def test_statuses_and_texts(folder: Path) -> None:
    for option, says in (
        ("tile.x", "tile.x: the fields are tile.q, tile.kv"),
        ("tile.q=x", "tile.q=x: not values such as tile.q=64,128"),
    ):
        result = tune("specs/k.yaml", "--fix", option)
        assert (result.exit_code, says in result.stderr) == (2, True), result.stderr
    result = tune("specs/k.yaml", "--seqlen", "0")
    assert result.exit_code == 2
    (folder / "specs" / "bad.yaml").write_text(SPEC + "tile: {q: 1}\n")
    result = tune("specs")
    assert result.exit_code == 2
    assert "specs/bad.yaml:5:11: error[FG104]" in result.stderr


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (SPEC + "seqlen: 512\n", "nothing to time"),
        (SPEC.replace("sm90", "sm100"), "a: tune knows the numbers of Hopper's"),
        (
            f"{{{SPEC.split('  #')[0].replace(chr(10), ', ')}}}\n",
            "cannot edit this spec",
        ),
    ],
)
def test_a_spec_that_cannot_be_tuned_does_not_stop_the_others(
    folder: Path, bad: str, says: str
) -> None:
    (folder / "specs" / "a.yaml").write_text(bad)
    result = tune("specs", *SIX, "--seqlen", "1024")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"specs/a.yaml: {says}")
    assert "winner: tile.kv 128 to 96" in result.stdout


def test_specs_that_do_not_fit_are_all_told_before_anything_runs(folder: Path) -> None:
    for name in ("x", "y"):
        (folder / "specs" / f"{name}.yaml").write_text(SPEC + "stages: {kv: 8}\n")
    result = tune("specs", *SIX, "--seqlen", "512")
    assert result.exit_code == 2
    assert "specs/x.yaml:5:" in result.stderr and "specs/y.yaml:5:" in result.stderr
    assert not gpus
    assert (folder / "specs" / "k.yaml").read_text() == SPEC


def test_a_machine_that_fails_leaves_the_json_of_what_was_tuned(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "specs" / "l.yaml").write_text(SPEC)

    def once(**given: Any) -> ModelGpu:
        if gpus:
            raise EnvironmentProblem("the GPU is gone")
        return model_gpu(**given)

    monkeypatch.setattr(command, "OneGpu", once)
    result = tune("specs", *SIX, "--seqlen", "512", "--json")
    assert (result.exit_code, result.stderr) == (3, "the GPU is gone\n")
    (found,) = json.loads(result.stdout)
    assert found["winner"]["tile.kv"] == 96


def test_a_spec_that_changed_meanwhile_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "specs" / "k.yaml"

    def and_edit(**given: Any) -> ModelGpu:
        path.write_text(SPEC + "# mine\n")
        return model_gpu(**given)

    monkeypatch.setattr(command, "OneGpu", and_edit)
    result = tune("specs/k.yaml", *SIX, "--seqlen", "512")
    assert result.exit_code == 1
    assert result.stderr == (
        "specs/k.yaml: changed while it was tuned, so the winner is in the journal only\n"
    )
    assert path.read_text() == SPEC + "# mine\n"


def test_another_journal_folder(folder: Path) -> None:
    result = tune(
        "specs/k.yaml", *SIX, "--seqlen", "512", "--journal", "mine", "--jobs", "3"
    )
    assert result.exit_code == 0
    assert (folder / "mine" / "k.tune.jsonl").is_file()
    assert not (folder / "generated").exists()


# --- ^C --------------------------------------------------------------------------------

CHILD = """
import signal, sys, time
sys.path[:0] = {path!r}
# A shell that runs the tests in the background has them ignore ^C, and so all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
from dataclasses import replace
from bench.model import ModelGauge
from engine import fake
from fmha_gen import cli
from fmha_gen.build import engine as build
from fmha_gen.tune import command, gpu
engine = replace(
    build.default_engine(),
    toolchain_key=lambda: "model",
    compile_kernel=lambda text, stem, arch: fake.report(),
)
build.default_engine = lambda: engine
command.require_gpu = lambda: "580.1"
command.find_gpu = ModelGauge
process = lambda given, events, options: [
    sys.executable, "-c", {worker!r}, str(given), str(events)
]
command.OneGpu = lambda **given: gpu.OneGpu(**given, checker=process, worker=process)
cli.main()
"""

# Stands in for checks and heats: all kernels take the same time; after so many one hangs.
WORKER = """
import json, os, sys, time
from pathlib import Path
given, events = map(Path, sys.argv[1:3])
log = Path("LOG")
def note(what):
    with log.open("a") as file:
        file.write(json.dumps(what) + "\\n")
def report(**event):
    with events.open("a") as file:
        print(json.dumps(event), file=file)
if given.suffix == ".py":
    note("check")
    report(event="case", case="c", of_bound=0.5, lse_of_bound=None, absolute=1.0,
           repeats=1, findings=[])
else:
    asked = json.loads(given.read_text())
    names = list(asked["contenders"])
    note([len(names), asked["rounds"]])
    if len(log.read_text().splitlines()) == int(os.environ["HANGS"]):
        time.sleep(60)
    rounds = [[1.0] * len(names)] * asked["rounds"]
    report(event="rounds", problem="b32 h16 s512 none", rounds=rounds)
report(event="end")
"""


def test_interrupt_is_130_and_the_next_run_resumes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = [str(Path(__file__).parent.parent), *sys.path]
    worker = WORKER.replace("LOG", str(folder / "log"))
    code = CHILD.format(path=path, worker=worker)
    arguments = ["tune", "specs/k.yaml", *SIX, "--seqlen", "512", "--jobs", "1"]
    log, journal = folder / "log", folder / "generated" / "records" / "k.tune.jsonl"

    def start(hangs: int) -> subprocess.Popen[str]:
        monkeypatch.setenv("HANGS", str(hangs))
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with start(hangs=8) as process:  # six checks and the first heat come before it
        while not log.exists() or len(log.read_text().splitlines()) < 8:
            assert process.poll() is None, process.stderr and process.stderr.read()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "interrupted\n")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    found = [one["event"] for one in events]
    assert found == [*["candidate"] * 7, *["check"] * 6, "heat"]
    assert (folder / "specs" / "k.yaml").read_text() == SPEC

    with start(hangs=0) as process:
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert "the incumbent stays" in said
    ran = [json.loads(line) for line in log.read_text().splitlines()]
    # The heat that hung ran again, all before it did not.
    assert ran == [*["check"] * 6, [6, 2], [3, 16], [3, 16]]


def test_the_document_names_what_is_searched() -> None:
    document = (ROOT / "codegen" / "docs" / "tuning.md").read_text()
    first = document.split("also where", 1)[0]
    assert re.findall(r"`([a-z_]+\.[a-z_]+)`", first) == list(space.FIELDS)


def test_the_document_shows_what_is_printed(folder: Path) -> None:
    document = (ROOT / "codegen" / "docs" / "tuning.md").read_text()
    (shown,) = re.findall(r"^\$ fmha-gen tune (.*?)^```$", document, re.M | re.S)
    arguments, _, expected = shown.partition("\n")
    shutil.copytree(ROOT / "specs", folder / "specs", dirs_exist_ok=True)
    result = tune(*arguments.split())
    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert expected.splitlines() == lines
