# SPDX-License-Identifier: Apache-2.0
"""Checks and heats as processes: their events are understood, however they end."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import support
from bench.test_problems import problem
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.errors import CheckFailed, EnvironmentProblem
from fmha_gen.host.executor import Local
from fmha_gen.host.processes import Ending
from fmha_gen.ops.cases import cases_for, tiles_of
from fmha_gen.tune import gpu
from fmha_gen.tune.gpu import MACHINE, OneGpu, judge

PROBLEM = problem(1, 2, 2, 64, 80, 64)
TURN = {"event": "turn", "who": "a", "doing": "p", "limit": 60}
ROUNDS = {"event": "rounds", "problem": "p", "rounds": [[1.0, 2.0]]}

# Stands in for a check and for a heat: does what the last kernel's file says.
PROCESS = """
import json, os, signal, sys, time
from pathlib import Path
given, events, *options = sys.argv[1:]
file = Path(given)
def report(**event):
    with Path(events).open("a") as log:
        log.write(json.dumps(event) + "\\n")
if file.suffix == ".json":
    asked = json.loads(file.read_text())
    *_, who = names = list(asked["contenders"])
    file = file.with_name(asked["contenders"][who])
    report(event="turn", who=who, doing="p", limit=1)
else:
    report(event="start", case="plain")
script = file.read_text()
if script == "hang":
    signal.alarm(1)
    time.sleep(60)
if script == "sleep":
    time.sleep(60)
if script == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
if given.endswith(".json"):
    rounds = [[1.0] * len(names)] * asked["rounds"]
    report(event="rounds", problem="p", rounds=rounds)
else:
    found = ["too large"] * (script == "wrong")
    report(event="case", case=options[1], of_bound=0.5, lse_of_bound=None,
           absolute=1.0, repeats=1, findings=found)
report(event="end")
"""


def process(given: Path, events: Path, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", PROCESS, str(given), str(events), *options]


def one_gpu(**scripts: str) -> OneGpu:
    return OneGpu(
        texts={"i": "run", **scripts},
        problems=[PROBLEM],
        limit=1,
        executor=Local(2),
        checker=process,
        worker=process,
    )


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "check_cases", lambda text: ["plain", "many"])


def test_one_that_hangs_crashes_or_is_wrong_costs_only_itself(two_cases: None) -> None:
    started = time.monotonic()
    field = one_gpu(good="run", hung="hang", dead="crash", bad="wrong")
    found = dict(field.check(["hung", "dead", "good", "bad"]))
    assert time.monotonic() - started < 30
    assert found["good"] == ""
    assert found["bad"] == "plain: too large"
    assert found["hung"].startswith("plain: died of signal 14")
    assert found["dead"].startswith("plain: died of signal 11")


def test_a_check_has_a_limit(two_cases: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "COMPILE_SECONDS", 0)
    ((_, why),) = one_gpu(slow="sleep").check(["slow"])
    assert why == "plain: did not end within 1 s"


def test_closing_early_ends_all_processes(two_cases: None) -> None:
    checks = one_gpu(good="run", hung="hang", late="hang").check(
        ["good", "hung", "late"]
    )
    assert next(checks)[0] == "good"
    started = time.monotonic()
    checks.close()  # as an exception in the search does
    assert time.monotonic() - started < 0.9


def test_a_heat_is_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    heat = one_gpu(a="run", b="run").race(["i", "a", "b"], 3)
    assert (heat.contenders, heat.rejected) == (["i", "a", "b"], {})
    assert heat.rounds == {"p": [[1.0] * 3] * 3}
    heat = one_gpu(a="run", b="hang").race(["i", "a", "b"], 3)
    assert (heat.rounds, heat.rejected) == ({}, {"b": "p: hung: more than 1 s"})
    heat = one_gpu(a="run", b="crash").race(["i", "a", "b"], 3)
    assert heat.rejected["b"].startswith("p: crashed: died of signal 11")
    assert not list(tmp_path.iterdir())


def judged(*events: dict[str, Any], status: int | None = 0) -> Any:
    return judge(["i", "a"], list(events), Ending(status, "last words", 3600))


def test_the_contender_whose_turn_it_was_is_to_blame() -> None:
    failed = {"event": "failed", "why": "RuntimeError: x"}
    assert judged(TURN, ROUNDS, {"event": "end"}).rounds == {"p": [[1.0, 2.0]]}
    assert judged(TURN, failed).rejected == {"a": "p: RuntimeError: x"}
    hung = {"a": "p: hung: more than 60 s"}
    assert judged(TURN, status=-signal.SIGALRM).rejected == hung
    assert judged(TURN, status=None).rejected == hung
    assert judged(TURN, ROUNDS, status=1).rejected == {
        "a": "p: crashed: ended with status 1: last words"
    }
    assert judged(TURN).rejected == {"a": "p: crashed: stopped early"}


def test_a_failure_in_no_contenders_turn_is_an_error() -> None:
    with pytest.raises(CheckFailed, match="status 1: last words"):
        judged(status=1)
    inputs = {**TURN, "who": MACHINE, "doing": "inputs of p"}
    with pytest.raises(EnvironmentProblem, match=r"^inputs of p: hung: more than 60 s"):
        judged(TURN, inputs, status=-signal.SIGALRM)


@pytest.mark.parametrize(
    "stem",
    ["sm90_d64_bf16_full", "sm90_d64_bf16_full_s512", "sm90_d64_fp16_causal_gqa8"],
)
def test_the_checks_are_a_ragged_case_and_one_of_many_tiles(
    stem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (support.GENERATED / f"{stem}.py").read_text()
    constants = read_constants(text)
    cases = cases_for(constants["SPEC"], tiles_of(constants))
    by_name = {case.name: case for case in cases}
    ragged, many = (by_name[name] for name in gpu.check_cases(text))
    assert ragged.name.startswith("plain") and many.name.startswith("many")
    if constants["SPEC"]["seqlen"]["kv"] == "dynamic":
        assert ragged.kv % 16 and ragged.q % 64
    # They are found by what they are, not by their names.
    renamed = [replace(case, name=f"case {i}") for i, case in enumerate(cases)]
    monkeypatch.setattr(gpu, "cases_for", lambda spec, tiles: renamed)
    positions = [f"case {cases.index(case)}" for case in (ragged, many)]
    assert gpu.check_cases(text) == positions
