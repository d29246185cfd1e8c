# SPDX-License-Identifier: Apache-2.0
"""What `fmha-gen diff` compares, what it compiles, and its exit statuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fmha_gen import cli
from fmha_gen.errors import CheckFailed, EnvironmentProblem
from typer.testing import CliRunner

from . import model


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["diff", *arguments])


def compared(*arguments: str) -> dict[str, dict[str, Any]]:
    """The kernels that differ, by name, as `--json` has them; the status agrees with them."""
    result = run(*arguments, "--json")
    data = json.loads(result.stdout)
    moved = {k["kernel"]: k for k in data["kernels"] if k["kind"] != "same"}
    assert (result.exit_code, data["same"]) == (bool(moved), not moved), result.stderr
    return moved


def facts(kernel: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {f["name"]: (f["before"], f["after"]) for f in kernel["facts"]}


def refusal(*arguments: str) -> tuple[int, str]:
    """Status and message; nothing else is printed."""
    result = run(*arguments)
    assert result.stdout == ""
    return result.exit_code, result.stderr.strip()


# --- the working tree ------------------------------------------------------------


def test_nothing_changed(specs, compiler) -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (0, "No difference in 2 kernels.\n")
    assert compiler.compiled == []  # the records know


@pytest.mark.parametrize("arguments", [(), ("HEAD",), ("built",), ("specs/a.yaml",)])
def test_a_spec_of_the_working_tree_counts_as_what_it_makes(specs, arguments) -> None:
    (specs / "a.yaml").write_text("3\n")
    (kernel,) = compared(*arguments).values()
    assert kernel["kernel"] == "a"
    name = arguments[0] if arguments and "." not in arguments[0] else "HEAD"
    assert (kernel["before"], kernel["after"]) == (name, "working tree")
    known = facts(kernel)
    assert known["KV_STAGES"] == (2, 3)
    assert known["rung"] == ("validated", "compiled")
    assert kernel["validation"]["commands"] == [
        "fmha-gen build specs/a.yaml",
        "fmha-gen emulate specs/a.yaml",
        "fmha-gen validate specs/a.yaml",
    ]


def test_paths_choose(specs) -> None:
    for stem in ("a", "b"):
        (specs / f"{stem}.yaml").write_text("3\n")
    assert compared().keys() == {"a", "b"}
    assert compared("HEAD", "specs").keys() == {"a", "b"}
    assert compared("HEAD", "specs/b.yaml").keys() == {"b"}
    assert compared("specs/b.yaml").keys() == {"b"}
    # The kernel's file is as it was: nobody has built.
    assert compared("HEAD", "generated/b.py") == {}
    assert compared("HEAD", "generated/") == {}


def test_an_edited_kernel_shows_where_its_path_is_given(specs) -> None:
    path = Path("generated/a.py")
    path.write_text(path.read_text().replace("copy(tile)", "copy(tile, 1)"))
    (kernel,) = compared("HEAD", "generated/a.py").values()
    (edit,) = kernel["source"]
    assert edit["added"] == ["    return copy(tile, 1)"]
    assert compared() == {}  # what the spec makes is as it was


def test_a_kernel_without_its_digest_line_is_not_removed(specs) -> None:
    path = Path("generated/a.py")
    path.write_text(path.read_text().replace("spec sha256:", "digests:"))
    assert refusal("HEAD", "generated/a.py") == (
        1,
        "generated/a.py: not a kernel that fmha-gen made: no digest line",
    )


def test_a_kernel_without_a_spec_is_not_compiled(specs) -> None:
    path = Path("generated/a.py")
    path.write_text(path.read_text().replace("SPEC = {", "OTHER = {"))
    status, message = refusal("HEAD", "generated/a.py")
    assert status == 1
    assert message.endswith(
        "working tree: a cannot be compiled: no SPEC that names its arch;"
        " --no-compile compares without"
    )
    assert compared("HEAD", "generated/a.py", "--no-compile").keys() == {"a"}


def test_what_is_not_utf8_in_the_output_folder_is_not_built(specs) -> None:
    (specs / "a.yaml").write_text("3\n")
    Path("generated/a.py").write_bytes(b"\xff")
    commands = compared()["a"]["validation"]["commands"]
    assert commands[0] == "fmha-gen build specs/a.yaml"


def test_a_repository_that_has_kernels_only(specs, git) -> None:
    git("rm", "-r", "--quiet", "specs")
    git("commit", "--quiet", "--message=vendored")
    path = Path("generated/a.py")
    path.write_text(path.read_text().replace("copy(tile)", "copy(tile, 1)"))
    assert compared("--no-compile").keys() == {"a"}


def test_specs_that_came_and_went(specs) -> None:
    (specs / "a.yaml").unlink()
    (specs / "c.yaml").write_text("4\n")
    kinds = {name: kernel["kind"] for name, kernel in compared().items()}
    assert kinds == {"a": "removed", "c": "added"}
    assert compared("HEAD", "specs/a.yaml").keys() == {"a"}
    added = compared()["c"]
    assert added["validation"]["commands"][0] == "fmha-gen build specs/c.yaml"


def test_a_new_kernel_is_compiled(specs, compiler) -> None:
    (specs / "c.yaml").write_text("4\n")
    compiler.reports["c"] = model.report(spills=55)
    (kernel,) = compared().values()
    assert compiler.compiled == ["c"]
    assert kernel["regressions"] == [
        "does not build: spills: 55 local loads, 0 local stores"
    ]
    assert compared("--no-compile")["c"]["regressions"] == []


def test_from_a_folder_inside_the_repository(specs, monkeypatch) -> None:
    (specs / "a.yaml").write_text("3\n")
    monkeypatch.chdir(specs)
    assert compared("HEAD", ".", "--out", "../generated").keys() == {"a"}


# --- two revisions ---------------------------------------------------------------


def rebuilt(git, stem: str, stages: int, *rungs: str, **changes: Any) -> None:
    """Commit a kernel of another number, with the record of a compile that says so."""
    Path(f"specs/{stem}.yaml").write_text(f"{stages}\n")
    text = model.of_spec(stem, str(stages))
    compiled = model.report(**changes)
    known = model.record(stem, text, *rungs, compiled=compiled)
    model.write(Path("generated"), stem, text, known)
    git("add", ".")
    git("commit", "--quiet", "--message=rebuilt")


def test_two_revisions(specs, git, compiler) -> None:
    rebuilt(git, "a", 3, "emulated", loop=650)
    (specs / "b.yaml").write_text("9\n")  # the working tree does not count
    (kernel,) = compared("built", "HEAD").values()
    assert (kernel["before"], kernel["after"]) == ("built", "HEAD")
    known = facts(kernel)
    assert known["consumer: total"] == (612, 650)
    assert known["rung"] == ("validated", "emulated")
    assert kernel["validation"] == {
        "due": True,
        "reason": "no GPU has run this code",
        "commands": ["fmha-gen validate specs/a.yaml"],
    }
    assert compiler.compiled == []
    assert compared("built", "HEAD", "specs/b.yaml") == {}
    assert compared("HEAD", "built", "generated/a.py").keys() == {"a"}


def test_a_record_alone_can_differ(specs, git) -> None:
    """The compiler was updated, and spills: text and results are as they were."""
    rebuilt(git, "a", 2, "emulated", "validated", dsl="4.8.2", stack_bytes=112)
    (kernel,) = compared("built", "HEAD").values()
    assert (kernel["code"], kernel["source"]) == ("same", [])
    assert kernel["regressions"] == ["stack 0 -> 112 B per thread"]
    assert kernel["validation"]["due"]
    assert "now compiled by 4.8.2" in kernel["validation"]["reason"]


def test_a_stale_record_does_not_count(specs, git, compiler) -> None:
    """The kernel was built again, its record was not committed: that side is compiled."""
    text = model.of_spec("a", "3")
    Path("generated/a.py").write_text(text)
    git("commit", "--quiet", "--all", "--message=no record")
    compiler.reports["a"] = model.report(registers=200)
    (kernel,) = compared("built", "HEAD").values()
    assert facts(kernel)["registers per thread"] == (168, 200)
    assert compiler.compiled == ["a"]
    compared("built", "HEAD")
    assert compiler.compiled == ["a"]  # the cache knows


def test_numbers_of_two_compilers_are_no_difference(specs, compiler) -> None:
    """The DSL was updated and needs more registers: not what the edit of the spec did."""
    (specs / "a.yaml").write_text("3\n")
    compiler.dsl = "4.8.2"
    compiler.reports["a"] = model.report(registers=200)
    (kernel,) = compared().values()
    assert compiler.compiled == ["a", "a"]
    assert facts(kernel)["registers per thread"] == (200, 200)
    assert facts(kernel)["CuTe DSL"] == ("4.8.2", "4.8.2")
    assert not any("registers" in each for each in kernel["regressions"])


def test_what_compiles_on_neither_side_is_no_regression(specs, compiler) -> None:
    """The DSL was updated and refuses both texts."""
    (specs / "a.yaml").write_text("3\n")
    compiler.dsl = "4.8.2"
    compiler.reports["a"] = CheckFailed("a: does not compile\n  no such thing")
    (kernel,) = compared().values()
    assert not any("does not build" in each for each in kernel["regressions"])


def test_equal_texts_without_a_record_are_not_compiled(specs, git, compiler) -> None:
    git("rm", "-r", "--quiet", "generated/records")
    git("commit", "--quiet", "--message=no records")
    assert compared() == {}
    assert compiler.compiled == []


def test_kernels_in_a_folder_below_are_others(specs, git) -> None:
    below = Path("generated/old")
    model.write(below, "a", model.kernel("a", 5), None)
    git("add", ".")
    git("commit", "--quiet", "--message=kept")
    assert compared("built", "HEAD") == {}
    assert compared("built", "HEAD", "generated/old/").keys() == {"a"}


def test_a_comment_is_no_change_of_the_code(specs, compiler) -> None:
    (specs / "a.yaml").write_text("2 Loads one tile.\n")
    (kernel,) = compared().values()
    assert kernel["code"] == "comments"
    assert facts(kernel)["rung"] == ("validated", "validated")
    assert kernel["validation"] == {
        "due": False,
        "reason": "device code and launch are validated: 15 cases on NVIDIA H200",
        "commands": [],
    }
    (kernel,) = compared("--no-compile").values()
    assert not kernel["validation"]["due"]
    assert kernel["validation"]["commands"] == ["fmha-gen build specs/a.yaml"]
    text = run().stdout
    assert "Only comments and docstrings differ. The device code is the same." in text
    assert "No difference in 1 other kernel." in text


def test_another_launch_of_the_same_code_is_due(specs, compiler) -> None:
    (specs / "a.yaml").write_text("2 Loads one tile.\n")
    compiler.reports["a"] = model.report(launch_sha256="2" * 64)
    (kernel,) = compared().values()
    assert facts(kernel)["rung"] == ("validated", "compiled")
    assert kernel["validation"] == {
        "due": True,
        "reason": "no GPU has run this code",
        "commands": [
            f"fmha-gen {command} specs/a.yaml"
            for command in ("build", "emulate", "validate")
        ],
    }


# --- two paths -------------------------------------------------------------------


def test_two_specs_need_no_repository(tmp_path, monkeypatch, compiler) -> None:
    monkeypatch.chdir(tmp_path)
    for stem, stages in (("x", 2), ("y", 3)):
        Path(f"{stem}.yaml").write_text(f"{stages}\n")
    (kernel,) = compared("x.yaml", "y.yaml").values()
    assert (kernel["before"], kernel["after"]) == ("x.yaml", "y.yaml")
    assert facts(kernel)["KV_STAGES"] == (2, 3)
    assert sorted(compiler.compiled) == ["x", "y"]
    assert (
        "`x.yaml` (x) -> `y.yaml` (y)." in run("x.yaml", "y.yaml", "--markdown").stdout
    )


def test_two_folders_of_kernels_with_records(tmp_path, monkeypatch, compiler) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, stages in (("old", 2), ("new", 3)):
        for stem in ("a", "b"):
            text = model.kernel(stem, stages if stem == "a" else 2)
            known = model.record(stem, text, "validated")
            model.write(Path(folder), stem, text, known)
        Path(folder, "__init__.py").write_text("")  # no kernel
    assert compared("old", "new").keys() == {"a"}
    (kernel,) = compared("old/a.py", "new/a.py").values()
    assert facts(kernel)["rung"] == ("validated", "validated")
    assert not kernel["validation"]["due"]
    assert compared("old", "new/b.py").keys() == {"a"}  # new has no a
    assert compiler.compiled == []


# --- compiling -------------------------------------------------------------------


def test_no_compile_says_what_is_not_known(specs, compiler) -> None:
    (specs / "a.yaml").write_text("3\n")
    result = run("--no-compile")
    assert result.exit_code == 1
    assert result.stdout.startswith("a: not compiled, validation due\n")
    assert "Measured on one side: before: " in result.stdout
    assert compiler.compiled == []


def test_compile_shows_what_another_compiler_does(specs, compiler) -> None:
    """No text changed and no record: only the DSL that is installed here."""
    assert compared("--compile") == {}
    assert sorted(compiler.compiled) == ["a", "b"]
    compiler.reports["a"] = model.report(stack_bytes=112, spills=55)
    compiler.dsl = "4.8.2"
    kernel = compared("--compile")["a"]
    assert kernel["regressions"][:2] == [
        "does not build: uses 112 B of stack and 0 B of local memory",
        "does not build: spills: 55 local loads, 0 local stores",
    ]
    assert "stack 0 -> 112 B per thread" in kernel["regressions"]


def test_compile_shows_what_another_compiler_refuses(specs, compiler) -> None:
    assert compared("--compile") == {}
    compiler.reports["a"] = CheckFailed("a: does not compile\n  no such thing")
    compiler.dsl = "4.8.2"
    kernel = compared("--compile")["a"]
    assert (kernel["kind"], kernel["code"]) == ("changed", "same")
    assert kernel["regressions"] == ["does not build: does not compile: no such thing"]
    table = run("--compile").stdout.splitlines()
    assert [line.split() for line in table if line.startswith("  a  ")] == [
        ["a", "does", "not", "build"]
    ]


def test_a_kernel_that_does_not_compile(specs, compiler) -> None:
    (specs / "a.yaml").write_text("3\n")
    compiler.reports["a"] = CheckFailed("a: does not compile\n  no such thing")
    (kernel,) = compared().values()
    assert kernel["regressions"][0] == "does not build: does not compile: no such thing"
    assert facts(kernel)["rung"] == ("validated", "rendered")
    assert run().stdout.startswith("a: compiles worse, validation due\n")


def test_without_a_compiler_the_records_still_speak(specs, compiler) -> None:
    def missing() -> str:
        raise EnvironmentProblem("nvidia-cutlass-dsl is not installed")

    compiler.toolchain_key = missing
    assert compared() == {}
    (specs / "a.yaml").write_text("3\n")
    status, message = refusal()
    assert (status, message.splitlines()[-1]) == (
        3,
        "nvidia-cutlass-dsl is not installed",
    )
    assert compared("--no-compile").keys() == {"a"}


# --- refusals --------------------------------------------------------------------


def test_statuses(specs, tmp_path, monkeypatch) -> None:
    status, text = refusal("nonsense")
    assert (status, text) == (2, "nonsense: neither a revision nor a path")
    status, text = refusal("HEAD", "--out", "/")
    assert (status, text) == (1, f"/: not inside the repository {tmp_path.resolve()}")
    status, text = refusal("specs/a.yaml", "specs/b.yaml", "specs")
    assert status == 2
    assert text.endswith("fmha-gen diff HEAD specs/a.yaml specs/b.yaml specs")
    status, text = refusal("specs/a.yaml", "specs/no.yaml")
    assert (status, text) == (2, "specs/no.yaml: no such file or folder")
    status, text = refusal("HEAD", "specs/no.yaml")
    assert (status, text) == (2, "no kernels on either side: HEAD specs/no.yaml")
    (specs / "a.yaml").write_text("bad\n")
    assert refusal()[0] == 2


def test_a_name_of_both_is_refused(specs, git) -> None:
    git("branch", "specs")
    assert refusal("specs") == (
        2,
        "specs: both a revision and a path; say specs^0 for the revision or ./specs for"
        " the path",
    )
    assert compared("specs^0") == compared("./specs") == {}


def test_outside_a_repository(tmp_path, monkeypatch, compiler) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for arguments in ((), ("HEAD",), ("HEAD", "main")):
        status, text = refusal(*arguments)
        assert status == 3
        assert text.startswith("git: fatal: not a git repository")
        assert text.endswith("two paths can be compared without it")
        assert "\n" not in text


def test_without_git(specs, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert refusal() == (
        3,
        "git is not installed; two paths can be compared without it",
    )
    assert compared("specs/a.yaml", "specs/a.yaml") == {}
