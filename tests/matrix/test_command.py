# SPDX-License-Identifier: Apache-2.0
"""The table as a whole: records, the cache, the emulator's part, what is printed and written."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fmha_gen import cli
from fmha_gen.build import records, toolchain
from fmha_gen.build.render import body_digest
from fmha_gen.compat import document, environments
from fmha_gen.errors import CheckFailed
from fmha_gen.evidence import emulate
from fmha_gen.host import tools
from typer.testing import CliRunner

from tests.engine.fake import COUNTS, report

HERE = tools.require_dsl()
FAKE_PROCESS = Path(__file__).parents[1] / "unit" / "fake_trial.py"
RUN = {
    "event": "run",
    "case": "a",
    "schedule": "eager",
    "of_bound": 0.5,
    "absolute": 2e-3,
    "lse_of_bound": None,
    "lse_absolute": None,
    "rows": 1,
    "of_rows": 1,
    "steps": 1,
    "seconds": 0.1,
    "findings": [],
}
KERNEL = {
    "event": "kernel",
    "dsl": HERE,
    "ptx_sha256": "e" * 64,
    "not_walked": {},
    "cases": [],
}
END = {"event": "end", "schedules": ["eager"]}


def ship(folder: Path, stem: str, *events: Mapping[str, Any], **emulated: Any) -> Path:
    """A kernel with a record. events: of its process, if it is emulated."""
    path = folder / f"{stem}.py"
    script = json.dumps({"events": events})
    path.write_text(f'#{script}\nSPEC = {{"name": "{stem}", "arch": "sm90"}}\n')
    body = body_digest(path.read_text())
    record = None
    for rung, result in (("compiled", report().to_json()), ("emulated", emulated)):
        if result:
            record = records.merge_rung(
                record, kernel=stem, body_sha256=body, rung=rung, result=result
            )
    (folder / "records").mkdir(exist_ok=True)
    (folder / records.path_of(stem)).write_text(records.dump(record or {}))
    return path


class Compiles:
    """Takes the compiler's place: what it says by kernel, and which kernels it was asked for."""

    def __init__(self) -> None:
        self.results: dict[str, toolchain.CompileReport | CheckFailed] = {}
        self.asked: list[str] = []

    def __call__(
        self, text: str, stem: str, arch: str, **how: Any
    ) -> toolchain.CompileReport:
        assert arch == "sm_90a"
        assert how["compiler"] == toolchain.Compiler(sys.executable, HERE)
        self.asked.append(stem)
        result = self.results.get(stem, report())
        if isinstance(result, CheckFailed):
            raise result
        return result


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Compiles:
    found = Compiles()
    monkeypatch.setattr(toolchain, "compile_kernel", found)
    return found


def matrix(*arguments: object) -> Result:
    command = ["matrix", *map(str, arguments), f"--env={HERE}={sys.executable}"]
    return CliRunner().invoke(cli.app, command)


def test_compiles_are_cached_but_failures_are_not(
    tmp_path: Path, compiles: Compiles
) -> None:
    kernels = [ship(tmp_path, stem) for stem in ("good", "wrong")]
    compiles.results["wrong"] = CheckFailed("wrong: does not compile\n  NameError: x")
    assert matrix(*kernels, "-j1").exit_code == 1
    assert matrix(*kernels, "-j1").exit_code == 1
    assert compiles.asked == ["good", "wrong", "wrong"]


def test_a_kernel_without_a_record_is_refused(
    tmp_path: Path, compiles: Compiles
) -> None:
    kernel = ship(tmp_path, "good")
    kernel.write_text(kernel.read_text() + "# edited\n")
    result = matrix(kernel)
    assert result.exit_code == 1
    assert "no record says what it compiles to; build it first" in result.stderr
    assert compiles.asked == []


def test_a_version_that_is_given_twice_is_one_column(
    tmp_path: Path, compiles: Compiles
) -> None:
    kernel = ship(tmp_path, "good")
    again = f"--env={HERE}={sys.executable}"
    result = matrix(kernel, "--json", again)
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)) == 1
    assert compiles.asked == ["good"]


def test_two_interpreters_for_one_version_are_refused(
    tmp_path: Path, compiles: Compiles
) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    result = matrix(ship(tmp_path, "good"), f"--env={HERE}={other}")
    assert result.exit_code == 1
    assert result.stderr == f"{HERE}: two interpreters: {other}, {sys.executable}\n"
    assert compiles.asked == []


def test_without_a_version_there_is_nothing_to_do(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["matrix", str(tmp_path)])
    assert result.exit_code == 2


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The options of every process of the emulator, which is played by a script."""
    found: list[list[str]] = []

    def command(kernel: Path, events: Path, options: list[str]) -> list[str]:
        found.append(options)
        return [sys.executable, str(FAKE_PROCESS), str(kernel), str(events), *options]

    monkeypatch.setattr(emulate, "worker_command", command)
    return found


def test_other_ptx_is_emulated_once(
    tmp_path: Path, compiles: Compiles, processes: list[list[str]]
) -> None:
    kernel = ship(tmp_path, "k", KERNEL, RUN, END, ptx_sha256="d" * 64)
    compiles.results["k"] = report(ptx_sha256="e" * 64)
    for _ in range(2):
        result = matrix(kernel, "--emulate", "--json")
        assert result.exit_code == 0, result.output
        (cell,) = json.loads(result.stdout)
        assert cell["emulated"] == "1 cases"
    ((*_, python, dsl),) = processes
    assert (python, dsl) == (f"--python={sys.executable}", f"--dsl={HERE}")
    assert matrix(kernel, "--emulate").stdout.splitlines()[1].split() == [
        "k",
        "same;",
        "emulated",
    ]


def test_the_recorded_ptx_is_not_emulated_again(
    tmp_path: Path, compiles: Compiles, processes: list[list[str]]
) -> None:
    kernel = ship(tmp_path, "k", ptx_sha256="d" * 64)
    result = matrix(kernel, "--emulate", "--json")
    assert json.loads(result.stdout)[0]["emulated"] == "as recorded: the same PTX"
    assert processes == []


def test_what_the_emulator_finds_fails_the_cell(
    tmp_path: Path, compiles: Compiles, processes: list[list[str]]
) -> None:
    bad = RUN | {"findings": ["race on sK"]}
    kernel = ship(tmp_path, "k", KERNEL, bad, END)
    result = matrix(kernel, "--emulate")
    assert result.exit_code == 1
    assert f"k under {HERE}: WRONG: a: race on sK" in result.stderr


def test_what_does_not_fit_is_not_emulated(
    tmp_path: Path, compiles: Compiles, processes: list[list[str]]
) -> None:
    kernel = ship(tmp_path, "k", KERNEL, RUN, END)
    compiles.results["k"] = report(stack_bytes=112)
    assert matrix(kernel, "--emulate").exit_code == 1
    assert processes == []


def test_the_table_is_written_between_its_marks(
    tmp_path: Path, compiles: Compiles
) -> None:
    kernels = [ship(tmp_path, stem) for stem in ("a", "b")]
    compiles.results["b"] = report(instructions=COUNTS | {"total": 100})
    page = tmp_path / "0021.md"
    page.write_text(
        "# Before\n\n<!-- matrix: begin -->\nold\n<!-- matrix: end -->\nAfter\n"
    )
    assert matrix(*kernels, f"--write={page}").exit_code == 0
    assert page.read_text() == (
        "# Before\n\n<!-- matrix: begin -->\n"
        f"| kernel | {HERE} |\n| --- | --- |\n"
        "| `a` | same |\n| `b` | same, +1 instructions |\n"
        "<!-- matrix: end -->\nAfter\n"
    )
    data = json.loads(page.with_suffix(".json").read_text())
    assert data["environments"].keys() == {HERE}
    assert [(cell["kernel"], cell["verdict"]) for cell in data["cells"]] == [
        ("a", "same"),
        ("b", "same"),
    ]


def test_a_page_without_marks_is_left_alone(tmp_path: Path, compiles: Compiles) -> None:
    page = tmp_path / "page.md"
    page.write_text("# No place\n")
    result = matrix(ship(tmp_path, "a"), f"--write={page}")
    assert result.exit_code == 1
    assert "no place between" in result.stderr
    assert page.read_text() == "# No place\n"


def test_a_page_that_is_not_there_is_made(tmp_path: Path, compiles: Compiles) -> None:
    page = tmp_path / "new.md"
    kernel = ship(tmp_path, "a")
    for _ in range(2):
        assert matrix(kernel, f"--write={page}").exit_code == 0
        assert page.read_text() == (
            f"<!-- matrix: begin -->\n| kernel | {HERE} |\n| --- | --- |\n"
            "| `a` | same |\n<!-- matrix: end -->\n"
        )


@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("gone/page.md", 2, "no such folder"),
        ("page.json", 2, "name a Markdown file"),
        ("unmarked.md", 1, "no place between"),
        ("folder", 1, "cannot be read"),
    ],
)
def test_a_bad_page_is_refused_before_any_work(
    tmp_path: Path,
    compiles: Compiles,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    status: int,
    why: str,
) -> None:
    (tmp_path / "unmarked.md").write_text("# No place\n")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(environments, "given", lambda option: pytest.fail(option))
    result = matrix(ship(tmp_path, "a"), f"--write={tmp_path / name}")
    assert result.exit_code == status
    assert why in result.stderr


def test_the_data_is_written_where_the_page_lost_its_marks(
    tmp_path: Path, compiles: Compiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody edits it meanwhile."""
    page = tmp_path / "page.md"
    page.write_text("# No place\n")
    monkeypatch.setattr(document, "require_place", lambda file: None)
    assert matrix(ship(tmp_path, "a"), f"--write={page}").exit_code == 1
    assert page.read_text() == "# No place\n"
    assert json.loads(page.with_suffix(".json").read_text())["cells"]
