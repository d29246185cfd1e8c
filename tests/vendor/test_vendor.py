# SPDX-License-Identifier: Apache-2.0
"""`vendor` copies what was built, renews it later, and never loses what was edited there."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import black
import pytest
from fmha_gen import cli, verify
from fmha_gen.build import engine, manifest, records, render, tree
from fmha_gen.errors import CheckFailed
from fmha_gen.vendoring import command, contents
from support import GENERATED, ROOT, SPECS, check_accepted
from typer.testing import CliRunner

A = "sm90_d128_bf16_causal_lse"
B = "sm90_d64_bf16_full"
C = "sm100_d64_fp16_full_s1024"
EXPECTED = Path(__file__).with_name("expected")
FILES = {
    "LICENSE",
    "README.md",
    verify.LOCK,
    *(f"{stem}.py" for stem in (A, B)),
    *(records.path_of(stem) for stem in (A, B)),
}


def write_lock(folder: Path, lock: manifest.Manifest) -> None:
    (folder / manifest.FILE).write_text(manifest.dump(lock))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of three kernels as a build left it."""
    folder = tmp_path / "checkout" / "generated"
    (folder / "records").mkdir(parents=True)
    entries = {}
    for stem in (A, B, C):
        shutil.copy(GENERATED / f"{stem}.py", folder)
        shutil.copy(GENERATED / records.path_of(stem), folder / "records")
        body = render.body_digest((folder / f"{stem}.py").read_text())
        entries[f"{stem}.py"] = manifest.Entry("0" * 64, body, "0" * 64)
    tools = manifest.parse((GENERATED / manifest.FILE).read_text()).tools
    write_lock(folder, manifest.Manifest(tools, entries))
    return folder


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "consumer" / "attention"


def rebuild(
    source: Path, stem: str, old: str = "QUAD = 4 ", new: str = "QUAD = 8 "
) -> None:
    """Leave a newer text of a kernel in the source, as a build would; it has no evidence yet."""
    file = source / f"{stem}.py"
    text = file.read_text()
    stated = render.stated_digests(text)
    assert stated is not None and text.count(old) == 1
    text = text.replace(old, new)
    body = render.body_digest(text)
    file.write_text(text.replace(stated.body, body))
    lock = manifest.parse((source / manifest.FILE).read_text())
    entry = manifest.Entry(
        lock.entries[file.name].spec, body, lock.entries[file.name].rendered
    )
    entries = {**lock.entries, file.name: entry}
    write_lock(source, manifest.Manifest(lock.tools, entries))
    record = records.load(source / records.path_of(stem))
    fresh = records.current(record, kernel=stem, body_sha256=body)
    (source / records.path_of(stem)).write_text(records.dump(fresh))


def prove(source: Path, stem: str, **rungs: dict[str, object]) -> None:
    """Give a kernel a record with this evidence."""
    body = render.body_digest((source / f"{stem}.py").read_text())
    record = None
    for rung, result in rungs.items():
        record = records.merge_rung(
            record,
            kernel=stem,
            body_sha256=body,
            rung=rung,
            result={"dsl": "4.8.1", **result},
        )
    assert record is not None
    (source / records.path_of(stem)).write_text(records.dump(record))


def vendor(
    source: Path,
    into: Path,
    *kernels: str,
    init: bool = False,
    adapters: tuple[str, ...] = (),
) -> command.Result:
    return command.vendor(command.Options(into, source, kernels, init, adapters))


def contents_of(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def labels(folder: Path) -> dict[str, str]:
    """What `verify` says of the files that are not intact."""
    return {
        finding.path.relative_to(folder).as_posix(): finding.label
        for finding in verify.verify([folder])
        if finding.label != "intact"
    }


def test_a_folder_has_kernels_records_licence_readme_and_lock(
    source: Path, into: Path
) -> None:
    vendor(source, into, A, B)
    found = contents_of(into)
    assert found.keys() == FILES
    for stem in (A, B):
        for name in (f"{stem}.py", records.path_of(stem)):
            assert found[name] == (source / name).read_text()
    assert found["LICENSE"] == (ROOT / "LICENSE").read_text()
    assert labels(into) == {}


@pytest.mark.parametrize("init", [False, True])
def test_what_is_written_about_kernels(
    source: Path, into: Path, init: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = {"gpu": "NVIDIA H200", "driver": "580", "worst": {"of_bound": 0.551}}
    prove(source, A, compiled={}, validated=ran)
    prove(source, B, compiled={})
    prove(source, C, compiled={}, emulated={"worst": {"of_bound": 0.45}})
    vendor(source, into, A, B, C, init=init)
    expected = EXPECTED / ("with_package" if init else "without_package")
    for name in ("README.md", contents.PACKAGE) if init else ("README.md",):
        text = (into / name).read_text()
        check_accepted(expected / f"{name}.expected", text, capsys)


def test_vendoring_again_changes_nothing(source: Path, into: Path) -> None:
    vendor(source, into, A, B, init=True)
    before = {path: path.stat().st_mtime_ns for path in into.rglob("*")}
    assert {step.action for step in vendor(source, into).steps} == {"keep"}
    assert {step.action for step in vendor(source, into, A).steps} == {"keep"}
    assert {path: path.stat().st_mtime_ns for path in into.rglob("*")} == before


def test_the_package_and_its_adapters_are_formatted_python(
    source: Path, into: Path
) -> None:
    vendor(source, into, B, init=True)
    assert A not in (into / contents.PACKAGE).read_text()
    vendor(source, into, A, adapters=tuple(contents.ADAPTERS))
    text = (into / contents.PACKAGE).read_text()
    assert A in text and B in text
    names = {n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    assert {"select", "fmha", "fmha_lse"} <= names
    files = [into / name for name in (contents.PACKAGE, *contents.ADAPTERS.values())]
    for file in files:
        text = file.read_text()
        assert black.format_str(text, mode=black.Mode()) == text
    subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--quiet", *files],
        cwd=ROOT,
        check=True,
    )


def test_the_package_knows_no_kernel_whose_spec_nobody_can_read(
    source: Path, into: Path
) -> None:
    vendor(source, into, A, B, init=True)
    edit(into / f"{A}.py", "SPEC = {", "SPEC = dict(x) or {")
    vendor(source, into)
    text = (into / contents.PACKAGE).read_text()
    assert A not in text and B in text


@pytest.mark.parametrize(
    ("stem", "said"),
    [
        ("sm90_d128_bf16_causal_w1023", 'mask="causal", window_left=1023'),
        ("sm90_d128_bf16_causal_warg", 'mask="causal", window_left="argument"'),
        ("sm90_d128_bf16_full_w255x256", "window_left=255, window_right=256"),
        ("sm90_d128_bf16_causal_cap30", 'mask="causal", softcap=30.0'),
        ("sm90_d128_bf16_causal_alibi", 'mask="causal, ALiBi"'),
        ("sm90_d128_bf16_causal_prefix", 'mask="kv <= max(prefix[b], q + 1) - 1"'),
        ("sm90_d128_bf16_gqa5_chunk8192", "q_per_kv=5, mask="),
        ("sm90_d128_bf16_full_lists", 'mask="none, block lists"'),
        ("sm90_d64_bf16_full_varlen", '64, 64, batch="varlen")'),
        ("sm90_d128_bf16_causal_gqa4_page16_varlen_lse", 'batch="varlen", page=16,'),
        ("sm90_d128_bf16_causal_gqa8_pack_varlen", 'mask="causal", pack_gqa=True'),
    ],
)
def test_what_the_package_knows_of_a_kernel(into: Path, stem: str, said: str) -> None:
    vendor(GENERATED, into, stem, init=True)
    text = (into / contents.PACKAGE).read_text()
    made = text.partition("KERNELS = {")[2].partition("\n}")[0]
    made = " ".join(made.split())
    assert f'"{stem}": Problem(' in made
    assert said in made


def test_more_kernels_later(source: Path, into: Path) -> None:
    vendor(source, into, A)
    vendor(source, into, str(source / f"{B}.py"))
    assert contents_of(into).keys() == FILES
    assert (into / "README.md").read_text().count("| [sm90") == 2


def test_newer_kernels_replace_what_is_intact(source: Path, into: Path) -> None:
    vendor(source, into, A, B)
    rebuild(source, A)
    (change,) = vendor(source, into).changes
    moved = [(row.name, row.before, row.after) for row in change.rows if row.changed]
    assert ("QUAD", 4, 8) in moved
    assert (into / f"{A}.py").read_text() == (source / f"{A}.py").read_text()
    assert labels(into) == {}
    assert '"rung": "rendered"' in (into / records.path_of(A)).read_text()
    assert "| rendered " in (into / "README.md").read_text()


def test_what_was_reformatted_is_replaced_only_by_something_newer(
    source: Path, into: Path
) -> None:
    vendor(source, into, A, B)
    for stem in (A, B):
        file = into / f"{stem}.py"
        mode = black.Mode(line_length=120, magic_trailing_comma=False)
        file.write_text(black.format_str(file.read_text(), mode=mode))
    rebuild(source, A)
    vendor(source, into)
    assert labels(into) == {f"{B}.py": "reformatted"}


def test_how_to_have_our_text_back_is_said(source: Path, into: Path) -> None:
    vendor(source, into, A, B)
    assert "move yours away" not in command.to_text(vendor(source, into), into)
    edit(into / f"{A}.py", "TILE_KV = 128 ", "TILE_KV = 96 ")
    text = command.to_text(vendor(source, into), into)
    assert f"vendor it again: fmha-gen vendor {A} --into {into}\n" in f"{text}\n"
    (into / f"{A}.py").unlink()
    vendor(source, into, A)
    assert labels(into) == {}


def test_an_edited_kernel_is_never_overwritten(source: Path, into: Path) -> None:
    vendor(source, into, A, B, init=True)
    edit(into / f"{A}.py", "TILE_KV = 128 ", "TILE_KV = 96 ")
    mine = (into / f"{A}.py").read_text()
    record = (into / records.path_of(A)).read_text()
    assert not vendor(source, into).refused  # nothing newer is there
    assert f"| {contents.EDITED} " in (into / "README.md").read_text()
    for stem in (A, B):
        rebuild(source, stem)
    result = vendor(source, into)
    (step,) = result.refused
    assert (step.path, [edit.name for edit in step.edits]) == (f"{A}.py", ["TILE_KV"])
    assert (into / f"{A}.py").read_text() == mine
    assert (into / records.path_of(A)).read_text() == record
    assert (into / f"{B}.py").read_text() == (source / f"{B}.py").read_text()
    assert labels(into) == {f"{A}.py": "edited"}  # the lock still has what it was
    assert {change.stem for change in result.changes} == {A, B}
    text = command.to_text(result, into)
    assert re.search(rf"^  {into / A}.py:\d+ TILE_KV edited$", text, re.MULTILINE)
    assert "-TILE_KV = 96" in text and "+QUAD = 8" in text

    (into / f"{A}.py").unlink()  # the way out that is told
    vendor(source, into, A)
    assert labels(into) == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\nSPEC = {", "\nSPEC: dict = {"),
        ("\nSPEC = {", "\nSPEC = other = {"),
        ("\nSPEC = {", "\nSPEC = dict() or {"),
        ("\nSPEC = {", "\nOURS = {"),
        ('    "head_dim": {', '    "head_dims": {'),
        ("\nSPEC = {", "\n<<<<<<< ours\nSPEC = {"),
    ],
)
def test_an_edit_that_nobody_can_read_stays_and_the_others_are_renewed(
    source: Path, into: Path, old: str, new: str
) -> None:
    vendor(source, into, A, B, init=True)
    edit(into / f"{A}.py", old, new)
    mine = (into / f"{A}.py").read_text()
    (into / records.path_of(A)).write_text("<<<<<<< ours\n")
    for stem in (A, B):
        rebuild(source, stem)
    result = vendor(source, into)
    assert [step.path for step in result.refused] == [f"{A}.py"]
    assert (into / f"{A}.py").read_text() == mine
    assert (into / f"{B}.py").read_text() == (source / f"{B}.py").read_text()
    text = command.to_text(result, into)
    assert "+QUAD = 8" in text
    assert "-" + new.strip("\n").splitlines()[0] in text
    assert labels(into) == {f"{A}.py": "edited", records.path_of(A): "edited"}


@pytest.mark.parametrize("name", ["README.md", contents.PACKAGE, "LICENSE"])
def test_other_files_that_were_edited_stay(source: Path, into: Path, name: str) -> None:
    vendor(source, into, A, init=True)
    with (into / name).open("a") as file:
        file.write("# Ours.\n")
    mine = (into / name).read_text()
    result = vendor(source, into, B)
    assert (into / name).read_text() == mine
    assert (into / f"{B}.py").exists()
    if name == "LICENSE":  # of which there is nothing newer
        assert not result.refused
    else:
        assert [step.path for step in result.refused] == [name]
        assert "-# Ours." in result.diffs[name]
    assert labels(into) == {name: "edited"}


@pytest.mark.parametrize("name", [contents.PACKAGE, f"{A}.py", "README.md"])
def test_files_that_nobody_vendored_are_not_overwritten(
    source: Path, into: Path, name: str
) -> None:
    into.mkdir(parents=True)
    (into / name).write_text("X = 1\n")
    result = vendor(source, into, A, B, init=True)
    assert [step.path for step in result.refused] == [name]
    assert (into / name).read_text() == "X = 1\n"
    lock = verify.read_lock(into)
    assert lock is not None and name not in lock.entries


def test_a_copy_by_hand_becomes_a_vendored_one(source: Path, into: Path) -> None:
    into.mkdir(parents=True)
    shutil.copy(source / f"{A}.py", into)
    rebuild(source, A)
    assert not vendor(source, into, A).refused
    assert labels(into) == {}


def test_a_kernel_that_was_deleted_is_left_out(source: Path, into: Path) -> None:
    vendor(source, into, A, B, init=True)
    (into / f"{A}.py").unlink()
    vendor(source, into)
    assert contents_of(into).keys() == FILES - {f"{A}.py", records.path_of(A)} | {
        contents.PACKAGE
    }
    assert A not in (into / contents.PACKAGE).read_text()
    assert labels(into) == {}
    (into / contents.PACKAGE).unlink()
    vendor(source, into)
    assert not (into / contents.PACKAGE).exists()
    assert "--init" in (into / "README.md").read_text()
    assert labels(into) == {}
    (into / f"{B}.py").unlink()
    with pytest.raises(CheckFailed, match="no kernel would be left"):
        vendor(source, into)


def test_a_kernel_that_is_no_longer_generated_stays(source: Path, into: Path) -> None:
    vendor(source, into, A, B)
    lock = manifest.parse((source / manifest.FILE).read_text())
    entries = {file: e for file, e in lock.entries.items() if file != f"{A}.py"}
    write_lock(source, manifest.Manifest(lock.tools, entries))
    (source / f"{A}.py").unlink()
    result = vendor(source, into)
    assert result.gone == (A,)
    assert labels(into) == {}
    assert (into / f"{A}.py").exists()
    assert f"| [{A}]({A}.py) " in (into / "README.md").read_text()


def damaged(source: Path) -> None:
    edit(source / f"{A}.py", "QUAD = 4 ", "QUAD = 5 ")


def without_lock(source: Path) -> None:
    (source / manifest.FILE).unlink()


def another_lock(source: Path) -> None:
    (source / manifest.FILE).write_bytes(b"\xff\n")


def stale(source: Path) -> None:
    record = (source / records.path_of(A)).read_text()
    rebuild(source, A)
    (source / records.path_of(A)).write_text(record)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damaged, "not as the last build left it"),
        (without_lock, "no MANIFEST.lock"),
        (another_lock, "not a lock"),
        (stale, "its record is for another body"),
    ],
)
def test_a_source_that_is_not_in_order_is_refused(
    source: Path, into: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(source)
    with pytest.raises(CheckFailed, match=message):
        vendor(source, into, A)
    assert not into.exists()


def test_what_cannot_be_vendored(source: Path, into: Path, tmp_path: Path) -> None:
    for kernels, message in (
        (("sm90_nothing",), "no such kernel"),
        (("x/sm90_nothing",), "neither a kernel's name nor a .py file"),
        ((A, str(GENERATED / f"{B}.py")), "several folders"),
        ((), "nothing was vendored there"),
    ):
        with pytest.raises(CheckFailed, match=message):
            vendor(source, into, *kernels)
        assert not into.exists()
    with pytest.raises(CheckFailed, match="fmha-gen build writes there"):
        vendor(source, source, A)
    for name in ("not-a-name", "lambda"):
        with pytest.raises(CheckFailed, match="cannot have this name"):
            vendor(source, tmp_path / name, A, init=True)
    (into / "README.md").mkdir(parents=True)
    with pytest.raises(CheckFailed, match=r"README.md: cannot be read"):
        vendor(source, into, A)


def git(folder: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    command = ["git", "-C", folder, *settings, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def committed(folder: Path, *options: str) -> str:
    """Commit all that is there; the commit."""
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, *options, "commit", "--quiet", "--message", "x")
    return git(folder, "rev-parse", "HEAD")


def commit_of(into: Path) -> str:
    lock = verify.read_lock(into)
    assert lock is not None
    return lock.source.removeprefix("fmha-gen==0.1.0 commit:")


def test_the_lock_names_the_commit_of_what_it_holds(source: Path, into: Path) -> None:
    vendor(source, into, A)
    assert commit_of(into) == "uncommitted"
    commit = committed(source)
    vendor(source, into)
    assert commit_of(into) == commit
    git(source, "commit", "--quiet", "--allow-empty", "--message", "y")
    vendor(source, into)
    assert commit_of(into) == commit  # it has what we have
    rebuild(source, A)
    vendor(source, into)
    assert commit_of(into) == "uncommitted"


def test_a_record_that_is_not_committed_is_in_no_commit(
    source: Path, into: Path
) -> None:
    committed(source)
    prove(source, A, compiled={})
    vendor(source, into, A)
    assert commit_of(into) == "uncommitted"


GPG = """#!/bin/sh
cat > /dev/null
echo "gpg: a good signature" >&2
printf "\\n[GNUPG:] SIG_CREATED \\n" >&2
printf "%s\\n" "-----BEGIN PGP SIGNATURE-----" "" "x" "-----END PGP SIGNATURE-----"
"""


def test_the_commit_is_the_same_whatever_git_is_told_to_show(
    source: Path, into: Path, tmp_path: Path
) -> None:
    gpg = tmp_path / "gpg"
    gpg.write_text(GPG)
    gpg.chmod(0o755)
    (source / f"{B}.py").rename(tmp_path / "later")
    commit = committed(source, "-c", f"gpg.program={gpg}", "-c", "commit.gpgSign=true")
    (tmp_path / "later").rename(source / f"{B}.py")
    git(source, "config", "gpg.program", str(gpg))
    git(source, "config", "log.showSignature", "true")
    git(source, "config", "status.showUntrackedFiles", "no")
    assert "good signature" in git(source, "log", "-1", "--format=%H")
    vendor(source, into, A)
    assert commit_of(into) == commit
    vendor(source, into, B)
    assert commit_of(into) == "uncommitted"


class Died(BaseException):
    """The end of a process."""


def test_dying_at_any_step_leaves_whole_files(
    source: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor(source, into, A)
    old = contents_of(into)
    rebuild(source, A)
    steps: list[str] = []
    real = tree.apply
    monkeypatch.setattr(tree, "apply", lambda *a: real(*a, step=steps.append))
    trial = into.parent / "trial"
    shutil.copytree(into, trial)
    vendor(source, trial, B)
    new = contents_of(trial)
    assert len(steps) > 10
    for last in range(len(steps)):
        count = iter(range(last))

        def step(_name: str, count=count) -> None:  # type: ignore[no-untyped-def]
            if next(count, None) is None:
                raise Died

        shutil.rmtree(trial)
        shutil.copytree(into, trial)
        monkeypatch.setattr(tree, "apply", lambda *a, step=step: real(*a, step=step))
        with pytest.raises(Died):
            vendor(source, trial, B)
        for name, text in contents_of(trial).items():
            assert text in (old.get(name), new.get(name))
        monkeypatch.setattr(tree, "apply", real)
        vendor(source, trial, B)
        assert contents_of(trial) == new


def test_specs_are_built_first(
    tmp_path: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = functools.partial(engine.build, compile=False)
    monkeypatch.setattr(engine, "build", build)
    specs, made = tmp_path / "specs", tmp_path / "generated"
    specs.mkdir()

    def run(*arguments: str | Path) -> tuple[int, str]:
        asked = ["vendor", *arguments, "--from", made, "--into", into]
        result = CliRunner().invoke(cli.app, [*map(str, asked)])
        return result.exit_code, result.output

    status, text = run(specs)
    assert status == 1 and "a folder without specs" in text
    stems = ("sm90_d64_bf16_full_varlen", "sm90_d32_bf16_full_gqa4")
    for stem in stems:
        shutil.copy(SPECS / f"{stem}.yaml", specs)
    assert run(specs, "--adapter", "vllm")[0] == 0
    assert {f"{stem}.py" for stem in stems} <= {x.name for x in into.iterdir()}
    assert (into / "vllm_adapter.py").exists()
    assert "nothing newer" in run(specs / f"{stems[0]}.yaml", stems[1])[1]
    (specs / f"{stems[1]}.yaml").write_text("arch: sm90\n")
    status, text = run(specs)
    assert status == 2 and "FG102" in text
    assert "nothing newer" in run(*stems)[1]


def test_the_command(source: Path, into: Path) -> None:
    def run(*arguments: str | Path) -> tuple[int, str]:
        result = CliRunner().invoke(cli.app, ["vendor", *map(str, arguments)])
        return result.exit_code, result.stdout

    status, text = run(A, B, "--into", into, "--from", source)
    assert status == 0
    assert set(text.splitlines()) == {f"added: {into / name}" for name in FILES}
    assert run("--update", into, "--from", source) == (0, "nothing newer\n")
    status, text = run(
        *("--update", into, "--from", source, "--adapter", "transformers,pytorch")
    )
    assert status == 0
    assert text.splitlines() == [
        f"updated: {into / 'README.md'}",
        f"updated: {into / verify.LOCK}",
        *(f"added: {into / name}" for name in ("__init__.py", "pytorch_adapter.py")),
        f"added: {into / 'transformers_adapter.py'}",
    ]
    assert run("--update", into, "--from", source, "--adapter", "jax")[0] == 1
    edit(into / f"{A}.py", "TILE_KV = 128 ", "TILE_KV = 96 ")
    rebuild(source, A)
    status, text = run("--update", into, "--from", source)
    assert status == 1
    line = "left alone, edited here, though something newer is there: "
    assert f"{line}{into / A}.py" in text.splitlines()
    for wrong in ((), (A,), ("--into", into), (A, "--update", into)):
        assert run(*wrong)[0] == 2


def test_updating_a_folder_by_another_name_than_its_own(
    source: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor(source, into, A, init=True)
    before = contents_of(into)
    monkeypatch.chdir(into)
    vendor(source, Path())
    assert contents_of(into) == before
