# SPDX-License-Identifier: Apache-2.0
"""Heats as processes: what they leave is understood, however they end, and none outlives us."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fmha_gen.bench.problems import Problem
from fmha_gen.errors import CheckFailed, EnvironmentProblem
from fmha_gen.executor import Local
from fmha_gen.processes import Ending
from fmha_gen.tune.arena import MACHINE, GpuArena, Kernel, judge, worker_command

PROBLEM = Problem("bf16", 1, 2, 2, 64, 80, 64, 64, False, False)
START = {"event": "start", "who": "a", "phase": "check", "limit": 60}
END = {"event": "end"}
ROUNDS = {"event": "rounds", "problem": "p", "rounds": [{"i": 1.0, "a": 2.0}]}

# A process that says of its last contender what the contender's file says, and then does it.
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
request, events = sys.argv[1:]
asked = json.loads(Path(request).read_text())
*_, who = asked["contenders"]
script = Path(request).with_name(asked["contenders"][who]).read_text()
with Path(events).open("a") as file:
    def report(**event):
        file.write(json.dumps(event) + "\\n")
        file.flush()
    report(event="start", who=who, phase="check", limit=asked["limit"])
    if script == "hang":
        signal.alarm(asked["limit"])
        time.sleep(60)
    if script == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    rounds = [{name: 1.0 for name in asked["contenders"]}] * asked["rounds"]
    report(event="rounds", problem=str(asked["check"]), rounds=rounds)
    report(event="end")
"""


def worker(request: Path, events: Path, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", WORKER, str(request), str(events)]


def arena(**scripts: str) -> GpuArena:
    everyone = {"i": "run", **scripts}
    return GpuArena(
        arch="sm90",
        kernels={name: Kernel(name, script) for name, script in everyone.items()},
        problems=[PROBLEM],
        limit=1,
        executor=Local(2),
        worker=worker,
    )


def test_one_that_hangs_or_crashes_costs_only_itself() -> None:
    started = time.monotonic()
    field = arena(good="run", hung="hang", dead="crash")
    found = dict(field.alone("i", ["hung", "dead", "good"], 2))
    assert time.monotonic() - started < 30
    assert found["hung"].rejected == {"hung": "hung: more than 1 s (check)"}
    assert found["dead"].rejected["dead"].startswith("crashed: died of signal 11")
    assert found["good"].rejected == {}
    # Only the candidate is checked: the incumbent was, when it ran alone.
    assert found["good"].played == {"['good']": [{"i": 1.0, "good": 1.0}] * 2}


def test_the_incumbent_alone_is_checked_itself() -> None:
    ((name, heat),) = arena().alone("i", ["i"], 1)
    assert (name, heat.played) == ("i", {"['i']": [{"i": 1.0}]})


def test_together_is_one_process_without_checks() -> None:
    heat = arena(a="run", b="run").together("i", ["a", "b"], 3)
    assert heat.played == {"[]": [{"i": 1.0, "a": 1.0, "b": 1.0}] * 3}
    heat = arena(a="run", b="hang").together("i", ["a", "b"], 3)
    assert heat.rejected == {"b": "hung: more than 1 s (check)"}


def test_stopping_early_ends_all_processes() -> None:
    field = arena(good="run", hung="hang", late="hang")
    heats = field.alone("i", ["good", "hung", "late"], 1)
    assert next(heats)[0] == "good"
    started = time.monotonic()
    heats.close()  # as an exception in the search does
    assert time.monotonic() - started < 1


def test_requests_are_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arena(a="run").together("i", ["a"], 1)
    assert not list(tmp_path.iterdir())


def judged(*events: dict[str, Any], status: int | None = 0) -> Any:
    return judge(list(events), Ending(status, "last words", 3600))


def test_verdicts() -> None:
    assert judged(START, ROUNDS, END).played == {"p": ROUNDS["rounds"]}
    wrong = {"event": "rejected", "who": "a", "why": "wrong: x", "wrong": True}
    assert judged(START, wrong).rejected == {"a": "wrong: x"}
    assert judged(START, status=None).rejected == {
        "a": "hung: did not end within 3600 s (check)"
    }
    assert judged(START, ROUNDS, status=1).rejected == {
        "a": "crashed: ended with status 1: last words (check)"
    }
    assert judged(START).rejected == {"a": "crashed: stopped early (check)"}


def test_only_who_is_wrong_will_be_rejected_again() -> None:
    wrong = {"event": "rejected", "who": "a", "why": "wrong: x", "wrong": True}
    memory = {**wrong, "why": "OutOfMemoryError: x", "wrong": False}
    assert judged(START, ROUNDS, END).lasting
    assert judged(START, wrong).lasting
    assert not judged(START, memory).lasting
    assert not judged(START, status=-signal.SIGALRM).lasting
    assert not judged(START, status=-signal.SIGSEGV).lasting


def test_what_is_no_contenders_fault_is_an_error() -> None:
    with pytest.raises(EnvironmentProblem, match="no GPU"):
        judged({"event": "environment", "message": "no GPU"})
    with pytest.raises(CheckFailed, match="status 1: last words"):
        judged(status=1)
    inputs = {**START, "who": MACHINE, "phase": "inputs of p"}
    with pytest.raises(EnvironmentProblem, match=r"hung: more than 60 s \(inputs"):
        judged(START, inputs, status=-signal.SIGALRM)


def test_the_real_process_reads_its_request(tmp_path: Path) -> None:
    """On a machine without a GPU it says so; with one it has nothing to do."""
    pytest.importorskip("torch", reason="PyTorch is missing")
    field = arena()
    real = GpuArena(**{**vars(field), "worker": worker_command, "problems": []})
    try:
        heat = real.together("i", [], 1)
    except EnvironmentProblem as problem:
        assert "GPU" in str(problem) or "needs sm90" in str(problem)
    else:  # the file of the incumbent is no kernel
        assert "i" in heat.rejected
    assert json.dumps(sys.executable) in json.dumps(
        worker_command(tmp_path, tmp_path, [])
    )
