# SPDX-License-Identifier: Apache-2.0
"""Packaged kernels: who finds them, and what a build takes over from their records."""

from __future__ import annotations

from pathlib import Path

import pytest
from fmha_gen import cli, verify
from fmha_gen.build import engine, records, shipped
from typer.testing import CliRunner

from . import fake

STEM = "sm90_d64_bf16_full"


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packaged kernels, with a kernel `a` that stands on `validated`."""
    specs, folder = tmp_path / "specs", tmp_path / "packaged"
    specs.mkdir()
    (specs / "a.yaml").write_text("64\n")
    engine.build([specs], folder, engine=fake.Parts().engine())
    body = verify.body_digest((folder / "a.py").read_text())
    record = fake.record(folder, "a")
    for rung in ("emulated", "validated"):
        record = records.merge_rung(
            record, kernel="a", body_sha256=body, rung=rung, result={"gpu": "it"}
        )
    write(folder, record)
    monkeypatch.setattr(shipped, "generated", lambda: folder)
    return folder


def write(folder: Path, record: records.Record) -> None:
    (folder / records.path_of("a")).write_text(records.dump(record))


def built(tmp_path: Path, **options: bool) -> records.Record:
    result = engine.build(
        [tmp_path / "specs"], tmp_path / "g", engine=fake.Parts().engine(), **options
    )
    assert result.ok
    record = fake.record(tmp_path / "g", "a")
    assert [kernel.rung for kernel in result.kernels] == [record["rung"]]
    return record


@pytest.mark.parametrize("compile", [False, True])
def test_adopts_what_is_about_the_text(
    packaged: Path, tmp_path: Path, compile: bool
) -> None:
    assert built(tmp_path, compile=compile) == fake.record(packaged, "a")
    assert fake.record(packaged, "a")["rung"] == "validated"
    assert built(tmp_path, compile=compile, check=True)["rung"] == "validated"


def test_adopts_nothing_about_another_text(packaged: Path, tmp_path: Path) -> None:
    (tmp_path / "specs" / "a.yaml").write_text("65\n")
    assert built(tmp_path)["rung"] == "compiled"


def test_adopts_what_is_about_the_code_of_another_text(
    packaged: Path, tmp_path: Path
) -> None:
    """Names or comments are others here; what the kernel compiles to is not."""
    record = fake.record(packaged, "a")
    code = {name: record["compiled"][name] for name in ("ptx_sha256", "dsl")}
    code["launch_sha256"] = "l" * 64
    record["compiled"] |= code
    record["validated"][0] |= code
    write(packaged, record)
    (tmp_path / "specs" / "a.yaml").write_text("65\n")
    assert built(tmp_path, compile=False)["rung"] == "rendered"
    parts = fake.Parts({"a": fake.report(launch_sha256="l" * 64)})
    engine.build([tmp_path / "specs"], tmp_path / "h", engine=parts.engine())
    adopted = fake.record(tmp_path / "h", "a")
    assert adopted["rung"] == "validated"
    assert adopted["validated"] == record["validated"]
    assert (
        "emulated" not in adopted
    )  # of which the record does not say what it is about


def test_trusts_each_rung_by_its_own_digest_and_no_claim(
    packaged: Path, tmp_path: Path
) -> None:
    record = fake.record(packaged, "a")
    record["validated"][0]["body_sha256"] = "0" * 64
    write(packaged, record | {"rung": "benchmarked", "other": "text"})
    adopted = built(tmp_path)
    assert adopted["rung"] == "emulated"
    assert adopted.keys() == {
        *("kernel", "body_sha256", "rung", "compiled", "emulated"),
    }


def test_does_not_bring_back_a_rung_that_was_lost_here(
    packaged: Path, tmp_path: Path
) -> None:
    """As by `validate` on a GPU where the kernel fails: that record knows better."""
    record = built(tmp_path)
    del record["validated"]
    (tmp_path / "g" / records.path_of("a")).write_text(
        records.dump(record | {"rung": "emulated"})
    )
    assert built(tmp_path)["rung"] == "emulated"


def test_where_kernels_come_from(packaged: Path, tmp_path: Path) -> None:
    own = tmp_path / "g"
    assert shipped.source(["a"], own) == packaged
    assert shipped.source(["b"], own) == packaged  # which then says that it has none
    (tmp_path / "specs" / "b.yaml").write_text("128\n")
    engine.build([tmp_path / "specs" / "b.yaml"], own, engine=fake.Parts().engine())
    assert shipped.source(["b"], own) == own
    assert shipped.source(["a"], own) == packaged
    assert shipped.source(["a", "b"], own) == own  # which then says what it lacks
    assert shipped.source(["a", "b"], own, update=True) == own
    assert shipped.source(["a"], own, update=True) == packaged


def test_what_is_here_comes_before_what_is_packaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli._or_packaged(Path(STEM)) == shipped.specs() / f"{STEM}.yaml"
    assert cli._or_packaged(Path("nobody")) == Path("nobody")
    assert cli._or_packaged(Path(f"./{STEM}.yaml")) == Path(f"{STEM}.yaml")
    Path(STEM).mkdir()
    assert cli._or_packaged(Path(STEM)) == Path(STEM)


@pytest.mark.parametrize("name", ["../specs/x", "x/y", "", ".", "/etc/passwd"])
def test_only_names_are_looked_up(name: str) -> None:
    assert shipped.kernel_of(name) is None
    assert shipped.spec_of(name) is None


def test_a_spec_is_not_tuned_inside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["tune", STEM, "--dry-run"])
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr
