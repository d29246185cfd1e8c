# SPDX-License-Identifier: Apache-2.0
"""From events to verdicts, records and texts; processes that hang or crash. No GPU, no torch."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fmha_gen.build import records
from fmha_gen.build.render import body_digest
from fmha_gen.errors import CheckFailed, EnvironmentProblem, UsageProblem
from fmha_gen.evidence import validate
from fmha_gen.evidence.validate import Ending, Finding, Memcheck, judge
from fmha_gen.host.executor import Local
from rich.console import Console

FAKE_TRIAL = Path(__file__).parent / "fake_trial.py"
WELL = Ending(0, "", 300.0)
MACHINE = {"event": "machine", "gpu": "NVIDIA H200", "dsl": "4.8.1"}
END = {"event": "end"}


def case(
    name: str, of_bound: float = 0.5, lse: float | None = 0.25, **changes: Any
) -> dict[str, Any]:
    return {
        "event": "case",
        "case": name,
        "of_bound": of_bound,
        "absolute": of_bound * 2e-3,
        "lse_of_bound": lse,
        "lse_absolute": None if lse is None else lse * 1e-3,
        "repeats": 2,
        "findings": [],
        **changes,
    }


def misuse(name: str, finding: str = "") -> dict[str, Any]:
    return {"event": "misuse", "name": name, "finding": finding}


def started(name: str) -> dict[str, Any]:
    return {"event": "start", "case": name}


GOOD = [
    MACHINE,
    started("a"),
    case("a", 0.5, 0.5),
    started("b"),
    case("b", 0.73123, 0.25, repeats=20),
    started("misuse"),
    misuse("q: fp32"),
    misuse("k: fp32"),
    END,
]


def verdict(
    events: list[dict[str, Any]], ending: Ending = WELL, **options: Any
) -> validate.Outcome:
    return judge(Path("generated/x.py"), events, ending, driver="580.1", **options)


# --- the verdict --------------------------------------------------------------------------


def test_a_kernel_that_held_earns_the_rung() -> None:
    outcome = verdict(GOOD)
    assert outcome.findings == ()
    assert outcome.result == {
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "dsl": "4.8.1",
        "cases": 2,
        "misuses": 2,
        "worst": {"case": "b", "of_bound": 0.7312, "absolute": 0.001462},
        "lse_worst": {"case": "a", "of_bound": 0.5, "absolute": 0.0005},
        "repeats": 20,
        "sanitizer": None,
    }


def test_an_entry_names_the_code_that_ran() -> None:
    code = {"ptx_sha256": "ab" * 32, "ptx_version": "9.4"}
    with_code = verdict([*GOOD, {"event": "device_code", "found": code}])
    without = verdict(GOOD)
    assert with_code.result == {**(without.result or {}), **code}


def test_a_kernel_without_lse_has_no_lse_numbers() -> None:
    outcome = verdict([MACHINE, case("a", lse=None), END])
    assert outcome.result is not None and outcome.result["lse_worst"] is None


@pytest.mark.parametrize(
    ("events", "ending", "expected"),
    [
        (
            [*GOOD[:2], case("a", 2.0, findings=["error"]), END],
            WELL,
            Finding("a", "error"),
        ),
        (
            [*GOOD[:-2], misuse("k: fp32", "accepted"), END],
            WELL,
            Finding("misuse", "k: fp32: accepted"),
        ),
        (GOOD[:-1], WELL, Finding("misuse", "stopped before its last case")),
        (GOOD[:4], Ending(None, "", 9), Finding("b", "did not end within 9 s")),
        (GOOD[:2], Ending(-11, "boom", 9), Finding("a", "died of signal 11: boom")),
        (
            [],
            Ending(1, "no module", 9),
            Finding("import", "ended with status 1: no module"),
        ),
        (
            GOOD,
            Ending(1, "at exit", 9),
            Finding("misuse", "ended with status 1: at exit"),
        ),
        ([MACHINE, END], WELL, Finding("import", "stopped before its last case")),
    ],
)
def test_a_kernel_that_failed_earns_nothing(
    events: list[dict[str, Any]], ending: Ending, expected: Finding
) -> None:
    outcome = verdict(events, ending)
    assert outcome.findings == (expected,)
    assert outcome.result is None


def test_a_refused_case_has_no_numbers_to_be_the_worst() -> None:
    outcome = verdict(
        [
            MACHINE,
            case("a"),
            case("b", math.nan, math.nan, findings=["refused: q"]),
            END,
        ]
    )
    assert outcome.worst.first is not None and outcome.worst.first["case"] == "a"
    assert outcome.findings == (Finding("b", "refused: q"),)


def test_memcheck_is_part_of_the_verdict() -> None:
    clean = verdict(GOOD, memcheck=Memcheck("a", ""))
    assert clean.result is not None
    assert clean.result["sanitizer"] == {"tool": "memcheck", "case": "a", "errors": 0}
    dirty = verdict(GOOD, memcheck=Memcheck("a", "Invalid write"))
    assert dirty.findings == (Finding("a", "memcheck: Invalid write"),)
    assert dirty.result is None


def test_a_replayed_case_earns_nothing() -> None:
    outcome = verdict([MACHINE, case("a"), END], case="a")
    assert (outcome.findings, outcome.result) == ((), None)
    assert verdict([MACHINE, misuse("q: fp32"), END], case="misuse").findings == ()


def test_a_machine_that_cannot_run_it_is_no_failure_of_the_kernel() -> None:
    with pytest.raises(EnvironmentProblem, match=r"^generated/x.py: H100 is sm80$"):
        verdict([{"event": "environment", "message": "H100 is sm80"}])
    with pytest.raises(UsageProblem, match=r"no case c; there are a, b"):
        verdict([{"event": "unknown_case", "names": ["a", "b"]}], case="c")


LOG = "========= COMPUTE-SANITIZER\n========= {}\n========= ERROR SUMMARY: {} errors\n"


@pytest.mark.parametrize(
    ("events", "ending", "log", "problem"),
    [
        ([started("a"), case("a")], WELL, LOG.format("", 0), ""),
        (
            [started("a"), case("a")],
            Ending(86, "", 9),
            LOG.format("Invalid write", 1),
            "Invalid write | ERROR",
        ),
        ([started("a"), case("a")], WELL, "", "the tool did not say"),
        ([started("a"), case("a")], WELL, LOG.format("", 10), "the tool did not say"),
        ([started("a")], Ending(None, "", 9), "", "did not end within 9 s"),
        ([started("a")], WELL, LOG.format("", 0), "did not run"),
        ([started("a"), case("a", findings=["NaN"])], WELL, LOG.format("", 0), "NaN"),
    ],
)
def test_memcheck_is_clean_only_when_it_says_so(
    events: list[dict[str, Any]], ending: Ending, log: str, problem: str
) -> None:
    found = validate.judge_memcheck(events, ending, log)
    assert found.case == "a"
    assert found.problem.startswith(problem) and bool(found.problem) is bool(problem)


# --- processes and records ----------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "require_gpu", lambda **_: "580.1")


def worker(kernel: Path, events: Path, options: Any) -> list[str]:
    return [sys.executable, str(FAKE_TRIAL), str(kernel), str(events), *options]


def write_kernel(
    folder: Path, stem: str, events: list[dict[str, Any]], **script: Any
) -> Path:
    kernel = folder / f"{stem}.py"
    kernel.write_text(
        "#" + json.dumps({"events": events, **script}) + "\n", encoding="utf-8"
    )
    return kernel


def run(
    *kernels: Path, timeout: float = 60, case: str | None = None
) -> list[validate.Outcome]:
    return validate.validate(
        kernels, executor=Local(2), timeout=timeout, case=case, worker=worker
    )


@pytest.mark.usefixtures("gpu")
def test_records_are_written_for_those_that_passed(tmp_path: Path) -> None:
    good = write_kernel(tmp_path, "good", GOOD)
    also = write_kernel(tmp_path, "also", GOOD)
    bad = write_kernel(tmp_path, "bad", [MACHINE, case("a", findings=["wrong"]), END])
    outcomes = run(good, bad, also)
    assert [bool(outcome.findings) for outcome in outcomes] == [False, True, False]
    record = records.load(tmp_path / "records/good.json")
    assert record is not None and outcomes[0].result is not None
    digest = body_digest(good.read_text(encoding="utf-8"))
    assert record["validated"] == [{**outcomes[0].result, "body_sha256": digest}]
    assert (tmp_path / "records/also.json").exists()
    assert not (tmp_path / "records/bad.json").exists()


@pytest.mark.usefixtures("gpu")
def test_a_kernel_that_changes_while_it_runs_keeps_its_new_record(
    tmp_path: Path,
) -> None:
    kernel = write_kernel(tmp_path, "x", GOOD)

    def changing(copy: Path, events: Path, options: Any) -> list[str]:
        kernel.write_text("another\n", encoding="utf-8")
        return worker(copy, events, options)

    with pytest.raises(CheckFailed, match=r"x\.py: changed while it ran"):
        validate.validate([kernel], executor=Local(1), timeout=60, worker=changing)
    assert not (tmp_path / "records").exists()


@pytest.mark.usefixtures("gpu")
def test_a_failure_takes_back_the_rung_and_those_above_it(tmp_path: Path) -> None:
    kernel = write_kernel(tmp_path, "x", [MACHINE, case("a", findings=["wrong"]), END])
    digest = body_digest(kernel.read_text(encoding="utf-8"))
    record: Any = None
    for rung in ("compiled", "validated", "benchmarked"):
        record = records.merge_rung(
            record, kernel="x", body_sha256=digest, rung=rung, result={"gpu": "it"}
        )
    assert record["rung"] == "benchmarked"
    (tmp_path / "records").mkdir()
    (tmp_path / "records/x.json").write_text(records.dump(record), encoding="utf-8")
    run(kernel)
    left = records.load(tmp_path / "records/x.json")
    assert left is not None
    assert left["rung"] == "compiled"
    assert "validated" not in left and "benchmarked" not in left and "compiled" in left


@pytest.mark.usefixtures("gpu")
def test_a_replayed_case_leaves_the_record_alone(tmp_path: Path) -> None:
    run(
        write_kernel(tmp_path, "x", [MACHINE, case("a", findings=["wrong"]), END]),
        case="a",
    )
    assert not (tmp_path / "records").exists()


@pytest.mark.usefixtures("gpu")
def test_a_hanging_kernel_costs_its_time_limit_and_nothing_else(tmp_path: Path) -> None:
    hangs = write_kernel(tmp_path, "hangs", [MACHINE, started("b")], sleep=60)
    good = write_kernel(tmp_path, "good", GOOD)
    begin = time.monotonic()
    outcomes = run(hangs, good, timeout=3)
    assert time.monotonic() - begin < 30
    assert outcomes[0].findings == (Finding("b", "did not end within 3 s"),)
    assert outcomes[1].findings == ()


@pytest.mark.usefixtures("gpu")
def test_a_crash_is_told_with_the_case_and_the_last_words(tmp_path: Path) -> None:
    kernel = write_kernel(
        tmp_path, "x", [MACHINE, started("b")], signal=11, half_a_line='{"event": "ca'
    )
    (outcome,) = run(kernel, case="b")
    assert outcome.findings == (
        Finding("b", "died of signal 11: options --case b | last words"),
    )


@pytest.mark.usefixtures("gpu")
def test_no_gpu_for_one_kernel_ends_the_rest_at_once(tmp_path: Path) -> None:
    none = write_kernel(
        tmp_path, "none", [{"event": "environment", "message": "no GPU"}]
    )
    hangs = write_kernel(tmp_path, "hangs", [], sleep=60)
    begin = time.monotonic()
    with pytest.raises(EnvironmentProblem, match="no GPU"):
        run(none, hangs, hangs, hangs)
    assert time.monotonic() - begin < 30


# --- paths --------------------------------------------------------------------------------

DIGEST_LINE = f"spec sha256:{'0' * 12}  body sha256:{'0' * 64}\n"


def test_paths_are_kernels_specs_or_folders(tmp_path: Path) -> None:
    out, specs = tmp_path / "generated", tmp_path / "specs"
    for folder in (out, specs):
        folder.mkdir()
    for stem in ("b", "a"):
        (out / f"{stem}.py").write_text(f'"""\n{DIGEST_LINE}"""\n', encoding="utf-8")
        (specs / f"{stem}.yaml").touch()
    (out / "helper.py").write_text("x = 1\n", encoding="utf-8")
    both = [out / "a.py", out / "b.py"]
    assert validate.kernel_files([out], out) == both
    assert validate.kernel_files([specs], out) == both
    assert validate.kernel_files([out / "b.py", specs / "a.yaml", out], out) == both
    assert validate.kernel_files([out / "helper.py"], out) == [out / "helper.py"]
    with pytest.raises(UsageProblem, match="no kernels in"):
        validate.kernel_files([tmp_path], out)
    (specs / "c.yaml").touch()
    with pytest.raises(
        UsageProblem, match=r"c\.py: no such kernel; run: fmha-gen build .*c\.yaml"
    ):
        validate.kernel_files([specs / "c.yaml"], out)
    for nothing in (out / "d.py", specs / "d.yaml"):
        with pytest.raises(UsageProblem, match=r"d\.py: no such kernel$"):
            validate.kernel_files([nothing], out)


# --- what the user sees -------------------------------------------------------------------


def test_failures_name_kernel_case_numbers_and_replay() -> None:
    text = "row 3 of head 0, batch 1 of out: wrong"
    failed = verdict([MACHINE, case("b", 2.0, findings=[text, "lse"]), END])
    assert validate.failures([verdict(GOOD), failed]) == (
        f"generated/x.py: b: {text}\n"
        "generated/x.py: b: lse\n"
        "  replay: fmha-gen validate generated/x.py --case b"
    )
    leaks = verdict(GOOD, memcheck=Memcheck("a", "Invalid write"))
    assert validate.failures([leaks]).endswith(
        "replay: fmha-gen validate generated/x.py --sanitizer"
    )
    crashed = verdict([], Ending(1, "boom", 9))
    assert validate.failures([crashed]).endswith(
        "replay: fmha-gen validate generated/x.py"
    )
    assert validate.failures([verdict(GOOD)]) == ""


def test_a_piped_table_is_plain_text() -> None:
    stream = io.StringIO()
    failed = verdict([MACHINE, case("a", math.inf, None, findings=["wrong"]), END])
    outcomes = [
        verdict(GOOD, memcheck=Memcheck("a", "")),
        failed,
        verdict([], Ending(1, "", 9)),
    ]
    Console(file=stream, width=120).print(validate.table(outcomes, plain=True))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert [line.split() for line in lines] == [
        [
            "kernel",
            "cases",
            "error",
            "worst",
            "case",
            "lse",
            "repeats",
            "memcheck",
            "verdict",
        ],
        ["x", "2", "0.73", "b", "0.50", "20", "clean", "validated"],
        ["x", "1", "inf", "a", "-", "2", "-", "FAILED"],
        ["x", "0", "-", "-", "-", "0", "-", "FAILED"],
    ]
    assert stream.getvalue().isascii()


def test_json_has_no_number_that_json_lacks() -> None:
    failed = verdict([MACHINE, case("a", math.inf, math.inf, findings=["wrong"]), END])
    good, bad = json.loads(validate.as_json_text([verdict(GOOD), failed]))
    assert good["verdict"] == "validated" and good["result"]["cases"] == 2
    assert bad["verdict"] == "failed" and bad["worst"]["of_bound"] is None
    assert bad["findings"] == [{"case": "a", "text": "wrong"}]


def test_no_driver_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_library(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", no_library)
    kernel = write_kernel(tmp_path, "x", GOOD)
    with pytest.raises(EnvironmentProblem) as caught:
        validate.run([kernel])
    assert str(caught.value) == "no NVIDIA GPU: its driver is not installed"
