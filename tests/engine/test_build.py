# SPDX-License-Identifier: Apache-2.0
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from fmha_gen.build import engine, lint, manifest, records, render, toolchain, tree
from fmha_gen.errors import CheckFailed, EnvironmentProblem, SpecError
from fmha_gen.evidence import evaluation
from fmha_gen.host import cache
from fmha_gen.host.executor import Local

from . import fake

PROMISED = {"MANIFEST.lock", "a.py", "b.py", "records/a.json", "records/b.json"}


@pytest.fixture
def specs(tmp_path) -> Path:
    folder = tmp_path / "specs"
    folder.mkdir()
    (folder / "a.yaml").write_text("64\n")
    (folder / "b.yaml").write_text("128\n")
    return folder


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "generated"


@pytest.fixture
def parts() -> fake.Parts:
    return fake.Parts()


def run(parts, paths, out, **options) -> engine.BuildResult:
    return engine.build(paths, out, engine=parts.engine(), **options)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def kinds(result) -> dict[str, str]:
    return {change.path: change.kind for change in result.changes}


def test_from_nothing(parts, specs, out):
    result = run(parts, [specs], out)
    assert result.ok
    assert fake.contents(out).keys() == PROMISED
    assert sorted(parts.compiled) == ["a", "b"]
    lock = manifest.parse((out / "MANIFEST.lock").read_text())
    for stem in "ab":
        text = (out / f"{stem}.py").read_text()
        assert lint.lint(text) == []
        entry = lock.entries[f"{stem}.py"]
        record = fake.record(out, stem)
        assert records.staleness(record, kernel=stem, body_sha256=entry.body) is None
        assert record["rung"] == "compiled"
        assert record["compiled"]["registers"] == 168
        assert record["compiled"]["shared_bytes"] == 1024


def test_nothing_changed_means_no_work_and_no_write(parts, specs, out):
    run(parts, [specs], out)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    again = fake.Parts()
    result = run(again, [specs], out)
    assert result.ok
    assert (again.compiled, again.formatted, result.compiles, result.changes) == (
        [],
        [],
        0,
        (),
    )
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
    assert {k.state for k in result.kernels} == {"unchanged"}


def test_one_spec_changed_means_one_compile_and_one_diff(parts, specs, out):
    run(parts, [specs], out)
    (specs / "b.yaml").write_text("256\n")
    again = fake.Parts()
    result = run(again, [specs], out)
    assert again.compiled == ["b"]
    assert kinds(result).keys() == {"MANIFEST.lock", "b.py", "records/b.json"}


def test_another_toolchain_compiles_again(parts, specs, out):
    run(parts, [specs], out)
    again = fake.Parts(key="tools-2")
    run(again, [specs], out)
    assert sorted(again.compiled) == ["a", "b"]


def test_check_changes_nothing_trusts_no_cache_and_reports_all(parts, specs, out):
    run(parts, [specs], out)
    assert run(fake.Parts(), [specs], out, check=True).ok
    (out / "a.py").unlink()
    edit(out / "b.py", "TILE = 128", "TILE = 129")
    (specs / "c.yaml").write_text("16\n")
    before = fake.contents(out)
    again = fake.Parts()
    result = run(again, [specs], out, check=True)
    assert not result.ok
    assert sorted(again.compiled) == sorted(again.formatted) == ["a", "b", "c"]
    assert fake.contents(out) == before
    assert kinds(result) == {
        "MANIFEST.lock": "changed",
        "a.py": "missing",
        "b.py": "edited",
        "c.py": "missing",
        "records/c.json": "missing",
    }
    assert "-TILE = 129" in next(c.diff for c in result.changes if c.path == "b.py")


def forget(monkeypatch, tmp_path) -> None:
    """Take an empty cache, as a checkout in CI has."""
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "empty"))


def test_check_formats_nothing_that_is_as_built(
    parts, specs, out, monkeypatch, tmp_path
):
    run(parts, [specs], out)
    forget(monkeypatch, tmp_path)
    again = fake.Parts()
    assert run(again, [specs], out, check=True, compile=False).ok
    assert again.formatted == []


def restamp(file: Path, old: str, new: str) -> None:
    """Edit a kernel, and forge its header and the lock."""
    text = file.read_text()
    body = render.body_digest(text)
    forged = text.replace(old, new)
    digest = render.body_digest(forged)
    file.write_text(forged.replace(body, digest))
    edit(file.parent / manifest.FILE, body, digest)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("TILE = 128", "TILE = 129", "changed"),
        ("return TILE", "return TILE + 1", "changed"),
        ("# [rows]", "# [columns]", "changed"),
        ("Kernel b.", "Kernel c.", "changed"),
    ],
)
def test_check_believes_no_forged_lock(
    parts, specs, out, monkeypatch, tmp_path, old, new, kind
):
    run(parts, [specs], out)
    restamp(out / "b.py", old, new)
    forget(monkeypatch, tmp_path)
    again = fake.Parts()
    result = run(again, [specs], out, check=True, compile=False)
    assert again.formatted == ["b"]
    assert kinds(result)["b.py"] == kind


def test_other_sources_and_tools_are_formatted(
    parts, specs, out, monkeypatch, tmp_path
):
    run(parts, [specs], out)
    forget(monkeypatch, tmp_path)
    again = fake.Parts()
    # Only the layout differs, which formatting need not undo.
    monkeypatch.setattr(
        fake, "KERNEL", fake.KERNEL.replace("return TILE", "return  TILE")
    )
    assert run(again, [specs], out, check=True, compile=False).changes[0].path == (
        manifest.FILE
    )
    assert again.formatted == ["a", "b"]
    monkeypatch.undo()
    forget(monkeypatch, tmp_path)
    edit(out / manifest.FILE, "black==", "black==1")
    again = fake.Parts()
    run(again, [specs], out, check=True, compile=False)
    assert again.formatted == ["a", "b"]


def test_check_creates_no_folder(parts, specs, out):
    assert not run(parts, [specs], out, check=True).ok
    assert not out.exists()


def test_an_orphan_goes_with_its_record_and_is_told(parts, specs, out):
    run(parts, [specs], out)
    (specs / "a.yaml").unlink()
    checked = run(parts, [specs], out, check=True)
    assert kinds(checked)["a.py"] == "orphaned"
    assert [(o.stem, o.rung, o.state) for o in checked.orphans] == [
        ("a", "compiled", "orphaned")
    ]
    result = run(parts, [specs], out)
    assert result.ok
    assert [(o.stem, o.rung, o.state) for o in result.orphans] == [
        ("a", "compiled", "removed")
    ]
    assert fake.contents(out).keys() == {"MANIFEST.lock", "b.py", "records/b.json"}


def add_rung(out: Path, stem: str, rung: str, **result: object) -> None:
    path = out / "records" / f"{stem}.json"
    record = fake.record(out, stem)
    body = record["body_sha256"]
    record = records.merge_rung(
        record, kernel=stem, body_sha256=body, rung=rung, result={"gpu": "it", **result}
    )
    path.write_text(records.dump(record))


def of_code(report: toolchain.CompileReport) -> dict[str, str]:
    """What an entry says of the code that ran."""
    return {"dsl": report.dsl, "ptx_sha256": report.ptx_sha256}


@pytest.mark.parametrize("rung", ["emulated", "validated"])
@pytest.mark.parametrize("kernel_is_there", [True, False])
def test_an_orphan_with_evidence_is_removed_only_on_request(
    parts, specs, out, rung, kernel_is_there
):
    run(parts, [specs], out)
    add_rung(out, "a", rung)
    (specs / "a.yaml").unlink()
    (specs / "c.yaml").write_text("32\n")
    if not kernel_is_there:
        (out / "a.py").unlink()
    before = fake.contents(out)
    for force in (False, True):
        result = run(parts, [specs], out, force=force)
        assert fake.contents(out) == before
        (failure,) = result.failures
        assert failure.startswith(f"{out / 'a.py'}: {rung}, and no spec")
        assert "--prune" in failure
        assert [(o.stem, o.rung, o.state) for o in result.orphans] == [
            ("a", rung, "not removed")
        ]
        assert {k.stem: k.state for k in result.kernels} == {
            "b": "unchanged",
            "c": "not written",
        }
    assert run(parts, [specs / "b.yaml", specs / "c.yaml"], out).ok
    assert (out / "records/a.json").exists()
    result = run(parts, [specs], out, prune=True)
    assert result.ok
    assert [o.state for o in result.orphans] == ["removed"]
    assert "a.py" not in fake.contents(out)
    assert "records/a.json" not in fake.contents(out)


def test_two_folders_of_specs_in_one_output_folder(parts, specs, out, tmp_path):
    run(parts, [specs], out)
    add_rung(out, "b", "validated")
    other = tmp_path / "other"
    other.mkdir()
    (other / "c.yaml").write_text("32\n")
    result = run(parts, [other], out)
    assert not result.ok
    assert {o.stem: o.state for o in result.orphans} == {
        "a": "not removed",
        "b": "not removed",
    }
    assert len(result.failures) == 1
    assert run(parts, [specs, other], out).ok
    assert sorted(p.name for p in out.glob("*.py")) == ["a.py", "b.py", "c.py"]
    assert fake.record(out, "b")["rung"] == "validated"


def test_evidence_for_another_text_is_none(parts, specs, out):
    run(parts, [specs], out)
    path = out / "records/a.json"
    add_rung(out, "a", "emulated")
    record = fake.record(out, "a")
    record["emulated"]["body_sha256"] = "0" * 64
    path.write_text(records.dump(record))
    (specs / "a.yaml").unlink()
    result = run(parts, [specs], out)
    assert [(o.rung, o.state) for o in result.orphans] == [("compiled", "removed")]


def test_a_lock_that_names_what_is_no_kernel_s_deletes_nothing(parts, specs, out):
    run(parts, [specs], out)
    (out / "mine.py").write_text("X = 1\n")
    (out / "records/mine.json").write_text("{}\n")
    lock = (out / "MANIFEST.lock").read_text()
    digest = "0" * 64
    (out / "MANIFEST.lock").write_text(f"{lock}mine.py {digest} {digest} {digest}\n")
    with pytest.raises(CheckFailed, match=r"mine\.json: not a record"):
        run(parts, [specs], out)
    (out / "records/mine.json").unlink()
    assert "mine.py: edited by hand" in run(parts, [specs], out).failures[0]
    assert (out / "mine.py").read_text() == "X = 1\n"


def test_a_rename_leaves_nothing_behind(parts, specs, out):
    run(parts, [specs], out)
    (specs / "a.yaml").rename(specs / "z.yaml")
    run(parts, [specs], out)
    assert sorted(p.name for p in out.glob("*.py")) == ["b.py", "z.py"]


def test_a_partial_build_touches_no_other_kernel(parts, specs, out):
    run(parts, [specs], out)
    before = fake.contents(out)
    (specs / "a.yaml").unlink()
    (specs / "b.yaml").write_text("256\n")
    result = run(parts, [specs / "b.yaml"], out)
    after = fake.contents(out)
    assert kinds(result).keys() == {"MANIFEST.lock", "b.py", "records/b.json"}
    assert after["a.py"] == before["a.py"]
    assert manifest.parse(after["MANIFEST.lock"]).entries.keys() == {"a.py", "b.py"}


def test_files_that_no_build_left_are_not_touched(parts, specs, out):
    out.mkdir()
    (out / "__init__.py").write_text("# mine\n")
    run(parts, [specs], out)
    assert run(parts, [specs], out).ok
    assert (out / "__init__.py").read_text() == "# mine\n"


def states(result) -> dict[str, str]:
    return {kernel.stem: kernel.state for kernel in result.kernels}


def test_an_edited_kernel_is_refused_by_name_with_the_diff_until_force(
    parts, specs, out
):
    run(parts, [specs], out)
    edit(out / "a.py", "return TILE", "return TILE + 1")
    (specs / "b.yaml").write_text("256\n")
    (specs / "c.yaml").write_text("16\n")
    before = fake.contents(out)
    result = run(parts, [specs], out)
    assert not result.ok
    (failure,) = result.failures
    assert f"{out / 'a.py'}: edited by hand" in failure
    assert "-    return TILE + 1" in failure
    assert states(result) == {"a": "edited", "b": "not written", "c": "not written"}
    assert fake.contents(out) == before
    result = run(parts, [specs], out, force=True)
    assert result.ok
    assert states(result) == {"a": "overwritten", "b": "changed", "c": "added"}
    assert "TILE + 1" not in (out / "a.py").read_text()
    assert "256" in (out / "b.py").read_text()
    assert states(run(parts, [specs], out)) == dict.fromkeys("abc", "unchanged")


def test_a_file_that_was_never_ours_is_said_to_be_so(parts, specs, out):
    out.mkdir()
    (out / "a.py").write_text("X = 1\n" * 200)
    result = run(parts, [specs], out)
    (failure,) = result.failures
    assert failure.startswith(f"{out / 'a.py'}: fmha-gen never wrote it; --force")
    assert len(failure.splitlines()) == tree.LONGEST_DIFF + 2
    assert failure.endswith("more lines; --json has all")
    assert states(result) == {"a": "not ours", "b": "not written"}
    assert states(run(parts, [specs], out, check=True)) == {
        "a": "not ours",
        "b": "missing",
    }
    assert (out / "a.py").read_text() == "X = 1\n" * 200
    assert states(run(parts, [specs], out, force=True))["a"] == "overwritten"


def test_an_edited_orphan_is_refused_until_force(parts, specs, out):
    run(parts, [specs], out)
    edit(out / "a.py", "return TILE", "return TILE + 1")
    (specs / "a.yaml").unlink()
    result = run(parts, [specs], out)
    assert "--force deletes it" in result.failures[0]
    assert (out / "a.py").exists()
    assert run(parts, [specs], out, force=True).ok
    assert not (out / "a.py").exists()


def test_failures_are_all_told_and_nothing_is_written(parts, specs, out):
    (specs / "c.yaml").write_text("1 + 1\n")  # lint: not a literal
    parts.reports = {
        "a": CheckFailed("a: does not compile\n  why"),
        "b": fake.report(stack_bytes=8),
    }
    result = run(parts, [specs], out)
    assert [f.split(":")[0] for f in result.failures] == ["a", "b", "c"]
    assert result.failures[0] == "a: does not compile\n  why"
    assert "8 B of stack" in result.failures[1]
    assert "TILE is not a literal" in result.failures[2]
    assert sorted(parts.compiled) == ["a", "b"]
    assert states(result) == dict.fromkeys("abc", "not written")
    assert not out.exists()


def test_a_failing_kernel_leaves_the_old_tree(parts, specs, out):
    run(parts, [specs], out)
    before = fake.contents(out)
    (specs / "a.yaml").write_text("65\n")
    (specs / "b.yaml").write_text("129\n")
    assert not run(fake.Parts({"a": fake.report(local_bytes=4)}), [specs], out).ok
    assert fake.contents(out) == before


def test_a_cached_report_passes_the_gate_again(parts, specs, out):
    parts.reports = {"a": fake.report(stack_bytes=8)}
    assert not run(parts, [specs], out).ok
    again = fake.Parts()
    assert not run(again, [specs], out).ok
    assert again.compiled == []


def test_bad_specs_are_reported_together(parts, specs, out):
    (specs / "a.yaml").write_text("bad\n")
    (specs / "b.yaml").write_text("bad\n")
    with pytest.raises(SpecError) as info:
        run(parts, [specs], out)
    assert [d.location.path for d in info.value.diagnostics] == ["a.yaml", "b.yaml"]
    assert not out.exists()


def test_an_environment_problem_is_not_a_failed_kernel(parts, specs, out):
    def missing(*_arguments):
        raise EnvironmentProblem("no DSL")

    parts.compile_kernel = missing
    with pytest.raises(EnvironmentProblem, match="no DSL"):
        run(parts, [specs], out)
    assert not out.exists()


def test_without_compile_a_record_claims_no_more_than_it_can(parts, specs, out):
    result = run(parts, [specs], out, compile=False)
    assert parts.compiled == []
    assert (
        {k.rung for k in result.kernels}
        == {fake.record(out, "a")["rung"]}
        == {"rendered"}
    )


def test_evidence_survives_exactly_as_long_as_the_body(parts, specs, out):
    run(parts, [specs], out)
    for stem in "ab":
        add_rung(out, stem, "validated")
    (specs / "b.yaml").write_text("256\n")
    result = run(parts, [specs], out)
    assert [k.rung for k in result.kernels] == ["validated", "compiled"]
    assert "validated" not in fake.record(out, "b")
    assert run(parts, [specs], out, compile=False).kernels[0].rung == "validated"


def test_what_ran_holds_for_every_text_of_its_code_and_launch(specs, out):
    """Texts differ here, and reports do not, as of a comment."""
    same = fake.Parts(dict.fromkeys("ab", fake.report(launch_sha256="l" * 64)))
    run(same, [specs], out)
    for stem in "ab":
        add_rung(out, stem, "validated", **of_code(fake.report()))
    before = fake.record(out, "a")
    (specs / "a.yaml").write_text("256\n")
    assert run(same, [specs], out, check=True).kernels[0].rung == "validated"
    assert run(same, [specs], out).kernels[0].rung == "validated"
    after = fake.record(out, "a")
    assert after["validated"] == before["validated"]
    assert after["body_sha256"] != before["body_sha256"]
    assert run(same, [specs], out, check=True).changes == ()
    other = fake.Parts({"a": fake.report(launch_sha256="m" * 64)}, "tools-2")
    (specs / "a.yaml").write_text("512\n")
    assert run(other, [specs], out).kernels[0].rung == "compiled"


def test_without_a_compile_what_ran_waits_for_one(specs, out):
    same = fake.Parts(dict.fromkeys("ab", fake.report(launch_sha256="l" * 64)))
    run(same, [specs], out)
    add_rung(out, "a", "validated", **of_code(fake.report()))
    before = fake.record(out, "a")
    (specs / "a.yaml").write_text("256\n")
    result = run(same, [specs], out, compile=False)
    assert result.kernels[0].rung == "rendered"
    assert fake.record(out, "a") == before
    assert run(same, [specs], out, compile=False, check=True).changes == ()
    assert run(same, [specs], out).kernels[0].rung == "validated"
    assert fake.record(out, "a")["validated"] == before["validated"]


def test_a_compile_by_another_dsl_does_not_rewrite_the_record(parts, specs, out):
    run(parts, [specs], out)
    newer = fake.Parts(
        dict.fromkeys("ab", fake.report(dsl="4.8.2", registers=160)), "tools-2"
    )
    assert run(newer, [specs], out).changes == ()
    same = fake.Parts(dict.fromkeys("ab", fake.report(registers=160)), "tools-3")
    assert kinds(run(same, [specs], out)).keys() == {"records/a.json", "records/b.json"}


def test_same_bytes_for_any_order_folder_and_job_count(
    parts, specs, out, tmp_path, monkeypatch
):
    run(parts, [specs], out)
    first = fake.contents(out)
    elsewhere = tmp_path / "else"
    shutil.copytree(specs, elsewhere / "s")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "cache2"))
    run(fake.Parts(), ["s/b.yaml", "s/a.yaml"], Path("g"), executor=Local(7))
    assert fake.contents(elsewhere / "g") == first


def interrupted(parts, specs, out, at: str) -> None:
    """A build that dies before its step of that name."""

    def die(name: str) -> None:
        if name == at:
            raise KeyboardInterrupt

    real = tree.apply
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            tree, "apply", lambda root, changes: real(root, changes, step=die)
        )
        run(parts, [specs], out)


@pytest.mark.parametrize(
    ("at", "left"),
    [
        ("replace c.py", {"MANIFEST.lock", "a.py", "c.py", "b.py"}),
        ("delete b.py", {"MANIFEST.lock", "b.py"}),
        ("delete records/b.json", {"MANIFEST.lock"}),
        ("replace MANIFEST.lock", {"MANIFEST.lock"}),
    ],
)
def test_an_interrupted_build_is_finished_by_the_next(parts, specs, out, at, left):
    """One kernel is another, one is gone and one is new."""
    run(parts, [specs], out)
    (specs / "a.yaml").write_text("32\n")
    (specs / "b.yaml").rename(specs / "c.yaml")
    interrupted(parts, specs, out, at)
    checked = kinds(run(parts, [specs], out, check=True))
    assert not {"edited", "foreign"} & set(checked.values())
    assert {path for path in checked if "/" not in path} == left - (
        {"a.py"} if at == "replace c.py" else set()
    )
    assert run(parts, [specs], out).ok
    assert run(parts, [specs], out, check=True).ok
    assert "TILE = 32" in (out / "a.py").read_text()
    assert {path.name for path in out.iterdir()} == {
        *("MANIFEST.lock", "a.py", "c.py", "records")
    }


def test_a_rung_between_an_interrupted_build_and_the_next_is_of_what_ran(
    parts, specs, out
):
    run(parts, [specs], out)
    add_rung(out, "a", "validated")
    (specs / "a.yaml").write_text("32\n")
    interrupted(parts, specs, out, "replace records/a.json")
    kernel = out / "a.py"
    body = render.body_digest(kernel.read_text())
    assert "TILE = 32" in kernel.read_text()
    assert fake.record(out, "a")["body_sha256"] != body  # still of the old one
    outcome = SimpleNamespace(kernel=kernel, findings=(), result={"n": 1})
    evaluation.write_record(outcome, body, rung="emulated", above=())
    assert run(parts, [specs], out).ok
    record = fake.record(out, "a")
    assert record["body_sha256"] == body
    assert {"compiled", "emulated"} == record.keys() & records.RUNGS.keys()
    assert run(parts, [specs], out, check=True).ok


def test_an_interrupted_build_may_be_taken_back(parts, specs, out):
    """Its kernel is whole and not of the lock: refused, as any kernel that the lock contradicts."""
    run(parts, [specs], out)
    (specs / "a.yaml").write_text("32\n")
    interrupted(parts, specs, out, "replace MANIFEST.lock")
    (specs / "a.yaml").write_text("64\n")
    result = run(parts, [specs], out)
    assert "a.py: whole, but not the text that MANIFEST.lock has" in result.failures[0]
    assert run(parts, [specs], out, force=True).ok
    assert "TILE = 64" in (out / "a.py").read_text()


def test_damaged_lock_and_record_are_named(parts, specs, out):
    run(parts, [specs], out)
    (out / "records/a.json").write_text("{")
    with pytest.raises(CheckFailed, match=r"a\.json: not a record"):
        run(parts, [specs], out)
    (out / "MANIFEST.lock").write_text("<<<<<<< ours\n")
    with pytest.raises(CheckFailed, match=r"MANIFEST\.lock: not a lock; .* delete it"):
        run(parts, [specs], out)
    (out / "records/a.json").unlink()
    (out / "MANIFEST.lock").unlink()
    assert run(parts, [specs], out).ok
    assert fake.contents(out).keys() == PROMISED


def test_progress_counts_what_is_rendered_and_compiled(parts, specs, out):
    seen = []
    run(parts, [specs], out, progress=lambda *event: seen.append(event))
    assert [event[:3] for event in seen] == [
        (what, done, 2) for what in ("rendering", "compiling") for done in (1, 2)
    ]
