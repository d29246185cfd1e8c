# SPDX-License-Identifier: Apache-2.0
"""From the events of a rehearsal to verdicts, records, tables and replays."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from fmha_gen import cli
from fmha_gen.build import records
from fmha_gen.build.render import body_digest
from fmha_gen.emulator.scheduler import Completion
from fmha_gen.errors import EnvironmentProblem, UsageProblem
from fmha_gen.evidence import emulate
from fmha_gen.evidence.emulate import Choice
from fmha_gen.evidence.evaluation import Finding
from fmha_gen.host.executor import Local
from fmha_gen.host.processes import Ending
from rich.console import Console
from typer.testing import CliRunner

FAKE_PROCESS = Path(__file__).parent / "fake_trial.py"
WELL = Ending(0, "", 300.0)
WHOLE = Choice()
KERNEL = {
    "event": "kernel",
    "dsl": "4.8.1",
    "ptx_sha256": "ab" * 32,
    "not_walked": {"long_q": "too long"},
    "cases": ["a", "b", "c"],
}
END = {"event": "end", "schedules": ["eager", "late", "random-0"]}


def ran(
    case: str, schedule: str = "eager", *findings: str, **changes: Any
) -> dict[str, Any]:
    return {
        "event": "run",
        "case": case,
        "schedule": schedule,
        "of_bound": 0.5,
        "absolute": 2e-3,
        "lse_of_bound": 1e-3,
        "lse_absolute": 1e-6,
        "rows": 10,
        "of_rows": 10,
        "steps": 100,
        "seconds": 0.25,
        "findings": list(findings),
        **changes,
    }


def started(case: str, schedule: str = "eager") -> dict[str, Any]:
    return {"event": "start", "case": case, "schedule": schedule}


WALKED = {"of_bound": math.nan, "absolute": math.nan, "lse_of_bound": None}

GOOD = [
    KERNEL,
    started("w", "walk"),
    ran("w", "walk", **WALKED),
    started("a"),
    ran("a"),
    ran("a", "late"),
    ran("b", "eager", of_bound=0.71234, lse_of_bound=0.5, lse_absolute=5e-4),
    ran("b", "random-0", rows=4),
    END,
]


def verdict(
    events: list[dict[str, Any]], ending: Ending = WELL, choice: Choice = WHOLE
) -> emulate.Outcome:
    return emulate.judge(Path("generated/x.py"), events, ending, choice=choice)


def test_a_kernel_that_held_earns_the_rung() -> None:
    outcome = verdict(GOOD)
    assert outcome.findings == ()
    assert (outcome.cases, outcome.schedules, outcome.steps) == (3, 3, 500)
    assert outcome.result == {
        "dsl": "4.8.1",
        "ptx_sha256": "ab" * 32,
        "cases": 3,
        "walks": 1,
        "not_walked": {"long_q": "too long"},
        "schedules": ["eager", "late", "random-0"],
        "worst": {"case": "b", "of_bound": 0.7123, "absolute": 0.002},
        "lse_worst": {"case": "b", "of_bound": 0.5, "absolute": 0.0005},
        "rows_of_partial_cases": {"b": [4, 10]},
        "findings": [],
    }


def test_a_finding_is_told_once_with_how_often_it_was_seen() -> None:
    outcome = verdict(
        [
            KERNEL,
            ran("a", "eager", "race [cta 0 warp 4]"),
            ran("a", "late"),
            ran("a", "random-0", "race [cta 1 warp 4]"),
            ran("b", "eager", "NaN"),
            ran("b", "late", "race [cta 0 warp 4]"),
            END,
        ]
    )
    assert outcome.result is None
    assert outcome.findings == (
        Finding("a", "race [cta 0 warp 4] (in 2 of 2 cases, 3 of 3 schedules)"),
        Finding("b", "NaN (in 1 of 2 cases, 1 of 3 schedules)"),
    )


@pytest.mark.parametrize(
    ("events", "ending", "expected"),
    [
        (GOOD[:-1], WELL, Finding("a", "stopped before its last case")),
        (GOOD[:4], Ending(-11, "boom", 9), Finding("a", "died of signal 11: boom")),
        ([], Ending(1, "boom", 9), Finding("launch", "ended with status 1: boom")),
        ([{"event": "refused", "message": "no"}], WELL, Finding("launch", "no")),
        (
            [KERNEL, {"event": "refused", "message": "PTX line 3"}],
            WELL,
            Finding("launch", "PTX line 3"),
        ),
    ],
)
def test_whatever_did_not_end_well_is_a_finding(
    events: list[dict[str, Any]], ending: Ending, expected: Finding
) -> None:
    outcome = verdict(events, ending)
    assert outcome.findings == (expected,)
    assert outcome.result is None


def test_what_was_refused_has_no_numbers() -> None:
    none = {"of_bound": math.nan, "rows": 0, "lse_of_bound": None}
    outcome = verdict([KERNEL, ran("a", "eager", "PTX line 3", **none), END])
    assert outcome.worst.first is None and outcome.worst.others == {"lse": None}


@pytest.mark.parametrize(
    "choice",
    [
        Choice(case="a"),
        Choice(completion="late"),
        Choice(seed=3),
        Choice(timeline=Path("x.json")),
        Choice(schedules=0),
    ],
)
def test_a_part_of_the_runs_earns_nothing(choice: Choice) -> None:
    outcome = verdict(GOOD, choice=choice)
    assert outcome.findings == () and outcome.result is None


def test_a_wrong_case_and_a_machine_that_cannot() -> None:
    wrong = [{"event": "unknown_case", "names": ["a", "b"]}]
    with pytest.raises(UsageProblem, match="no case c; there are a, b"):
        verdict(wrong, choice=Choice(case="c"))
    with pytest.raises(EnvironmentProblem, match="no DSL"):
        verdict([{"event": "environment", "message": "no DSL"}])


# --- processes and records ----------------------------------------------------------------


def worker(kernel: Path, events: Path, options: Any) -> list[str]:
    return [sys.executable, str(FAKE_PROCESS), str(kernel), str(events), *options]


def write_kernel(folder: Path, stem: str, events: Any, **script: Any) -> Path:
    kernel = folder / f"{stem}.py"
    text = json.dumps({"events": events, **script})
    kernel.write_text(f"#{text}\n", encoding="utf-8")
    return kernel


def run(*kernels: Path, choice: Choice = WHOLE) -> list[emulate.Outcome]:
    return emulate.emulate(kernels, choice=choice, timeout=60, worker=worker)


WAS = {"was": 1, "gpu": "it"}


def seed_record(folder: Path, kernel: Path, *rungs: str) -> None:
    record: Any = None
    digest = body_digest(kernel.read_text(encoding="utf-8"))
    for rung in rungs:
        record = records.merge_rung(
            record, kernel=kernel.stem, body_sha256=digest, rung=rung, result=WAS
        )
    (folder / "records").mkdir(exist_ok=True)
    path = folder / records.path_of(kernel.stem)
    path.write_text(records.dump(record), encoding="utf-8")


def test_records_are_written_for_those_that_passed(tmp_path: Path) -> None:
    good = write_kernel(tmp_path, "good", GOOD)
    seed_record(tmp_path, good, "compiled")
    bad = write_kernel(tmp_path, "bad", [KERNEL, ran("a", "eager", "race"), END])
    outcomes = run(good, bad)
    assert [bool(outcome.findings) for outcome in outcomes] == [False, True]
    record = records.load(tmp_path / "records/good.json")
    assert record is not None and outcomes[0].result is not None
    digest = body_digest(good.read_text(encoding="utf-8"))
    assert record["rung"] == "emulated"
    assert record["emulated"] == {**outcomes[0].result, "body_sha256": digest}
    assert record["compiled"]["was"] == 1
    assert not (tmp_path / "records/bad.json").exists()


def test_a_failure_takes_back_this_rung_and_not_what_hardware_said(
    tmp_path: Path,
) -> None:
    kernel = write_kernel(tmp_path, "x", [KERNEL, ran("a", "eager", "race"), END])
    seed_record(tmp_path, kernel, "compiled", "emulated", "validated")
    run(kernel)
    left = records.load(tmp_path / "records/x.json")
    assert left is not None and "emulated" not in left
    assert left["rung"] == "validated" and left["validated"][0]["was"] == 1


def test_a_replay_leaves_the_record_alone_and_reaches_the_process(
    tmp_path: Path,
) -> None:
    kernel = write_kernel(tmp_path, "x", [KERNEL, started("a")], status=1)
    choice = Choice(schedules=3, case="a", completion="late", seed=7)
    (outcome,) = run(kernel, choice=choice)
    assert not (tmp_path / "records").exists()
    (finding,) = outcome.findings
    assert "--schedules=3 --case=a --completion=late --seed=7" in finding.text


# --- texts --------------------------------------------------------------------------------


def test_a_failure_says_how_to_see_it_again() -> None:
    outcome = verdict(
        [KERNEL, ran("a", "late-5", "race", "NaN"), ran("b", "eager", "deadlock"), END]
    )
    seen = "(in 1 of 2 cases, 1 of 2 schedules)"
    assert emulate.failures([verdict(GOOD), outcome]).splitlines() == [
        f"generated/x.py: a: race {seen}",
        f"generated/x.py: a: NaN {seen}",
        "  replay: fmha-gen emulate generated/x.py --case a --completion late --seed 5",
        f"generated/x.py: b: deadlock {seen}",
        "  replay: fmha-gen emulate generated/x.py --case b --completion eager",
    ]
    killed = verdict([KERNEL, started("c", "random-9")], Ending(-9, "", 9))
    last = emulate.failures([killed]).splitlines()[-1]
    assert last.endswith("--case c --completion random --seed 9")
    refused = verdict([{"event": "refused", "message": "no"}])
    assert emulate.failures([refused]).endswith(
        "replay: fmha-gen emulate generated/x.py"
    )


def test_of_many_findings_the_first_are_shown() -> None:
    found = verdict([KERNEL, ran("a", "eager", *map(str, range(50))), END])
    *shown, replay, rest = emulate.failures([found]).splitlines()
    assert len(found.findings) == 50 and len(shown) == 20
    assert replay.startswith("  replay: ")
    assert rest == "generated/x.py: 30 more findings: --json has them"


def test_a_slow_machine_is_no_finding() -> None:
    late = Ending(None, "", 9)
    with pytest.raises(EnvironmentProblem, match=r"too slow: .* within 9 s"):
        verdict([KERNEL, started("c", "random-9")], late)
    # What was found until then is one.
    found, _ = verdict([KERNEL, ran("a", "eager", "race")], late).findings
    assert found.text.startswith("race")


def test_the_table_has_a_row_per_kernel() -> None:
    stream = io.StringIO()
    bad = verdict([KERNEL, ran("a", "eager", "race", lse_of_bound=None), END])
    view = emulate.table([verdict(GOOD), bad], plain=True)
    Console(file=stream, width=120).print(view)
    _, good, failed = (line.split() for line in stream.getvalue().splitlines())
    assert good == ["x", "3", "3", "0.71", "b", "0.50", "500", "1.2", "emulated"]
    assert failed == ["x", "1", "1", "0.50", "a", "-", "100", "0.2", "FAILED"]


def test_json_has_no_number_that_json_lacks() -> None:
    bad = verdict(
        [KERNEL, ran("a", "late", "race", of_bound=math.inf, absolute=math.inf), END]
    )
    good, failed = json.loads(emulate.as_json_text([verdict(GOOD), bad]))
    assert good["verdict"] == "emulated" and good["result"]["cases"] == 3
    assert failed["verdict"] == "failed" and failed["worst"]["of_bound"] is None
    (finding,) = failed["findings"]
    assert finding["case"] == "a" and finding["replay"].endswith("--completion late")


def test_a_timeline_is_of_one_kernel(tmp_path: Path) -> None:
    for stem in "ab":
        write_kernel(tmp_path, stem, GOOD)
    kernels = sorted(tmp_path.glob("*.py"))
    with pytest.raises(UsageProblem, match="of one kernel, these are 2"):
        emulate.run(kernels, choice=Choice(timeline=tmp_path / "t.json"))


def test_a_timeline_says_that_it_is_a_replay(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = write_kernel(tmp_path, "x", GOOD)
    monkeypatch.setattr(emulate, "emulate", lambda *_, **__: [verdict(GOOD)])
    trace = tmp_path / "t.json"
    emulate.run([kernel], choice=Choice(timeline=trace))
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == (
        f"{trace}: one case under one schedule, replayed; nothing is recorded"
    )
    emulate.run([kernel], choice=Choice(timeline=trace), as_json=True)
    json.loads(capsys.readouterr().out)
    help_text = (
        CliRunner()
        .invoke(cli.app, ["emulate", "--help"], env={"COLUMNS": "300"})
        .stdout
    )
    assert "records nothing" in help_text


def test_the_command_passes_its_options_on(monkeypatch: Any, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(emulate, "run", lambda paths, **options: found.update(options))
    options = ["--schedules", "4", "--seed", "2", "--completion", "late", "-j", "3"]
    done = CliRunner().invoke(cli.app, ["emulate", str(tmp_path), *options, "--json"])
    assert done.exit_code == 0, done.output
    assert found["choice"] == Choice(schedules=4, completion="late", seed=2)
    assert found["executor"] == Local(3) and found["as_json"] is True


def test_every_completion_is_a_choice_and_nothing_else(monkeypatch: Any) -> None:
    found: list[Choice] = []
    monkeypatch.setattr(
        emulate, "run", lambda _, **options: found.append(options["choice"])
    )
    for how in Completion:
        done = CliRunner().invoke(cli.app, ["emulate", "x", "--completion", how.value])
        assert done.exit_code == 0, done.output
    assert [choice.completion for choice in found] == [how.value for how in Completion]
    assert (
        CliRunner().invoke(cli.app, ["emulate", "x", "--completion", "soon"]).exit_code
        == 2
    )
