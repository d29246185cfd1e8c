# SPDX-License-Identifier: Apache-2.0
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fmha_gen import cli
from fmha_gen.build import engine, records
from fmha_gen.errors import EnvironmentProblem
from fmha_gen.host import doctor, tools
from typer.testing import CliRunner

from . import fake

CHILD = """
import signal, sys, time
sys.path[:0] = {path!r}
# A shell that runs the tests in the background has them ignore ^C, and so all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
from engine import fake
from fmha_gen import cli
from fmha_gen.build import engine, toolchain
def hang(text, stem, arch):
    print("compiling", flush=True)
    return toolchain.compile_kernel("import time; time.sleep(60)", stem, arch)
parts = fake.Parts()
parts.compile_kernel = hang
engine.default_engine = parts.engine
cli.main()
"""


@pytest.fixture
def specs(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "default_engine", fake.Parts().engine)
    folder = tmp_path / "specs"
    folder.mkdir()
    (folder / "a.yaml").write_text("64\n")
    return folder


def run(*arguments: str):
    return CliRunner().invoke(cli.app, list(arguments))


def test_build_prints_a_plain_table(specs):
    result = run("build", "specs")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[0].split() == [
        "kernel",
        "rung",
        "registers",
        "shared",
        "memory",
        "state",
    ]
    assert result.stdout.splitlines()[1].split() == [
        *("a", "compiled", "24", "/", "240", "1024", "B", "added")
    ]
    assert result.stdout.isascii()
    assert "\x1b" not in result.stdout
    assert "unchanged" in run("build", "specs").stdout


def test_statuses(specs):
    assert run("build", "specs", "--check").exit_code == 1
    assert run("build", "specs").exit_code == 0
    assert run("build", "specs", "--check").exit_code == 0
    (specs / "b.yaml").write_text("bad\n")
    bad = run("build", "specs")
    assert bad.exit_code == 2
    assert bad.stderr == "b.yaml:1:1: error[FG401] does not fit\n"
    assert run("build", "specs", "--nonsense").exit_code == 2


def test_a_failure_is_text_on_stderr(specs, monkeypatch):
    parts = fake.Parts({"a": fake.report(stack_bytes=8)})
    monkeypatch.setattr(engine, "default_engine", parts.engine)
    result = run("build", "specs")
    assert result.exit_code == 1
    assert result.stderr == "a: uses 8 B of stack and 0 B of local memory\n"
    assert "failed" in result.stdout


def test_missing_environment_is_one_line_and_3(specs, monkeypatch):
    def missing():
        raise EnvironmentProblem("nvidia-cutlass-dsl is not installed")

    parts = fake.Parts()
    parts.compile_kernel = lambda *_: missing()
    monkeypatch.setattr(engine, "default_engine", parts.engine)
    result = run("build", "specs")
    assert (result.exit_code, result.stderr) == (
        3,
        "nvidia-cutlass-dsl is not installed\n",
    )


def test_check_prints_the_diff(specs):
    run("build", "specs")
    (specs / "a.yaml").write_text("65\n")
    result = run("build", "specs", "--check")
    assert "changed: a.py\n--- a/a.py\n+++ b/a.py\n" in result.stdout
    assert "\n-TILE = 64  # [rows]\n+TILE = 65  # [rows]\n" in result.stdout


def rows(output: str) -> dict[str, list[str]]:
    return {words[0]: words for words in map(str.split, output.splitlines()) if words}


def test_what_a_folder_s_build_removes_is_in_the_table(specs):
    (specs / "b.yaml").write_text("32\n")
    run("build", "specs")
    (specs / "b.yaml").unlink()
    checked = run("build", "specs", "--check")
    assert rows(checked.stdout)["b"] == ["b", "compiled", "orphaned"]
    assert "orphaned: b.py\norphaned: records/b.json\n" in checked.stdout
    assert "TILE = 32" not in checked.stdout
    found = json.loads(run("build", "specs", "--check", "--json").stdout)
    assert found["orphans"] == [
        {"kernel": "b", "rung": "compiled", "state": "orphaned"}
    ]
    kinds = {change["path"]: change for change in found["changes"]}
    assert kinds["b.py"] == {"path": "b.py", "kind": "orphaned", "diff": ""}
    result = run("build", "specs")
    assert (result.exit_code, result.stderr) == (0, "")
    assert rows(result.stdout)["b"] == ["b", "compiled", "removed"]
    assert not Path("generated/b.py").exists()
    assert "b" not in rows(run("build", "specs").stdout)


def test_evidence_is_pruned_only_on_request(specs):
    (specs / "b.yaml").write_text("32\n")
    run("build", "specs")
    path = Path("generated/records/b.json")
    record = records.load(path)
    assert record is not None
    body = record["body_sha256"]
    record = records.merge_rung(
        record, kernel="b", body_sha256=body, rung="emulated", result={}
    )
    path.write_text(records.dump(record))
    (specs / "b.yaml").rename(specs / "c.yaml")
    result = run("build", "specs")
    assert result.exit_code == 1
    assert "\ngenerated/b.py: emulated, and no spec of this" in f"\n{result.stderr}"
    assert rows(result.stdout)["b"] == ["b", "emulated", "not", "removed"]
    assert rows(result.stdout)["c"][-2:] == ["not", "written"]
    assert Path("generated/b.py").exists() and not Path("generated/c.py").exists()
    result = run("build", "specs", "--prune")
    assert result.exit_code == 0
    assert rows(result.stdout)["b"][-1] == "removed"
    assert not Path("generated/b.py").exists() and Path("generated/c.py").exists()


def test_the_table_says_what_was_not_written_and_what_was_overwritten(specs):
    Path("generated").mkdir()
    foreign = "x = 1\n" * 500
    Path("generated/a.py").write_text(foreign)
    (specs / "b.yaml").write_text("32\n")
    result = run("build", "specs")
    assert result.exit_code == 1
    assert rows(result.stdout)["a"][-2:] == ["not", "ours"]
    assert rows(result.stdout)["b"][-2:] == ["not", "written"]
    assert len(result.stderr.splitlines()) < 45
    checked = run("build", "specs", "--check")
    assert checked.stdout.startswith("missing: MANIFEST.lock\n")
    assert "\nnot ours: a.py\n" in checked.stdout
    assert len(checked.stdout.splitlines()) < 200  # of more than 500
    data = json.loads(run("build", "specs", "--json").stdout)
    diffs = {change["path"]: change["diff"] for change in data["changes"]}
    assert diffs["a.py"].count("\n-x = 1") == 500
    assert rows(run("build", "specs", "--force").stdout)["a"][-1] == "overwritten"


def test_json(specs):
    data = json.loads(run("build", "specs", "--json").stdout)
    assert data["ok"]
    assert data["compiles"] == 1
    (kernel,) = data["kernels"]
    assert (kernel["kernel"], kernel["rung"]) == ("a", "compiled")
    assert kernel["compiled"]["registers"] == 168


def test_interrupt_is_130_with_the_old_tree_and_no_process_left(specs, tmp_path):
    run("build", "specs", "--no-compile")
    before = fake.contents(tmp_path / "generated")
    (specs / "a.yaml").write_text("65\n")
    code = CHILD.format(path=[str(Path(__file__).parent.parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", code, "build", "specs"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    time.sleep(0.5)
    compilers = children(process.pid)
    assert compilers
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - started < 10
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert fake.contents(tmp_path / "generated") == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in compilers)


def children(pid: int) -> list[str]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [
        child for task in tasks for child in (task / "children").read_text().split()
    ]


def test_a_log_is_told_how_far_it_is(specs, monkeypatch):
    for number in range(4):
        (specs / f"b{number}.yaml").write_text(f"{number}\n")
    assert run("build", "specs", "--no-compile").stderr == "rendering 5 kernels\n"
    monkeypatch.setattr(cli, "SAY_SECONDS", 0)
    assert run("build", "specs", "--no-compile").stderr.splitlines() == [
        "rendering 5 kernels",
        *(f"rendering kernels: {done} of 5" for done in (2, 3, 4)),
    ]


def test_doctor(monkeypatch):
    result = run("doctor")
    assert result.exit_code == 0
    assert "CuTe DSL" in result.stdout
    assert json.loads(run("doctor", "--json").stdout)["can_build"] is True
    monkeypatch.setattr(tools, "dsl_distributions", dict)
    result = run("doctor")
    assert result.exit_code == 3
    assert "missing  nvidia-cutlass-dsl is not installed" in result.stdout


def test_doctor_says_what_the_gpu_is_or_why_there_is_none():
    (gpu,) = (f for f in doctor.examine() if f.name == "GPU")
    assert (
        "sm_" in gpu.detail
        if gpu.ok
        else "validate, bench and tune need one" in gpu.detail
    )
    assert not gpu.needed


def test_doctor_says_whether_pytorch_is_there(monkeypatch):
    found = {"torch": "2.11.0"}
    monkeypatch.setattr(doctor.importlib.metadata, "version", found.__getitem__)
    (pytorch,) = (f for f in doctor.examine() if f.name == "PyTorch")
    assert (pytorch.ok, pytorch.needed, pytorch.detail) == (True, False, "2.11.0")


def test_doctor_says_whether_launches_can_be_captured(monkeypatch):
    def emulator():
        (found,) = (f for f in doctor.examine() if f.name == "emulator")
        assert not found.needed
        return found.ok, found.detail

    assert emulator() == (True, "captures launches without driver or compiler")

    def refuse():
        raise OSError("no such thing")

    monkeypatch.setattr(doctor.launch, "self_test", refuse)
    assert emulator() == (False, "cannot capture launches: no such thing")
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    assert emulator() == (
        False,
        "emulate runs on Linux x86_64, this is Linux aarch64",
    )
