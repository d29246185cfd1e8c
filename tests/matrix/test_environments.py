# SPDX-License-Identifier: Apache-2.0
"""Environments: made once, found in the cache, refused when they are not what they are said to be.

No network: pip is an interpreter's module that a stub answers for.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from fmha_gen.build import toolchain
from fmha_gen.compat import environments
from fmha_gen.errors import EnvironmentProblem
from fmha_gen.host import tools

HERE = tools.require_dsl()

# Answers as an interpreter does that has venv and pip, and notes what it was asked.
STUB = """#!{python}
import json, pathlib, shutil, sys
arguments, here = sys.argv[1:], pathlib.Path(__file__)
log = pathlib.Path({log!r})
log.write_text(log.read_text() + " ".join(a for a in arguments if "import" not in a) + "\\n")
if "-c" in arguments:
    found = {{"nvidia-cutlass-dsl": {version!r}, "apache-tvm-ffi": "0.1.15"}}
    if "cu13" in str(here):
        found["nvidia-cutlass-dsl-libs-cu12"] = {version!r}
        found["nvidia-cutlass-dsl-libs-cu13"] = {version!r}
    print(json.dumps({{"python": "3.12", "distributions": found}}))
elif "venv" in arguments:
    home = pathlib.Path(arguments[-1]) / "bin"
    home.mkdir(parents=True)
    shutil.copy(here, home / "python")
elif {offline!r}:
    sys.exit("WARNING: retrying\\nERROR: no network")
elif "--report" in arguments:
    print(json.dumps({{"install": [{{"metadata": {{"version": {version!r}}}}}]}}))
"""


def stub(folder: Path, version: str = "4.7.1", *, offline: bool = False) -> str:
    path, log = folder / "python3.12", folder / "log"
    log.touch()
    path.write_text(
        STUB.format(
            python=sys.executable, log=str(log), version=version, offline=offline
        )
    )
    path.chmod(0o755)
    return str(path)


def asked(folder: Path) -> list[str]:
    """What the stub was asked since the last time, but for what it is."""
    log = folder / "log"
    lines = [line for line in log.read_text().splitlines() if line != "-c"]
    log.write_text("")
    return lines


def test_this_interpreter_is_one() -> None:
    found = environments.given(f"{HERE}={sys.executable}")
    assert found.dsl == HERE
    assert found.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert found.distributions == tools.dsl_distributions() | {
        "apache-tvm-ffi": tools.require_ffi()
    }


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (f"4.0.0={sys.executable}", f"holds nvidia-cutlass-dsl {HERE}, not 4.0.0"),
        ("4.8.1=/no/such/python", "/no/such/python: no such interpreter"),
        ("4.8.1", "4.8.1: no such interpreter"),
        (f"4.8.1={os.path.realpath('/bin/true')}", "not a Python that answers"),
        (f"4.8.1={os.path.realpath('/bin/false')}", "false: status 1"),
    ],
)
def test_another_one_is_refused_in_a_line(option: str, message: str) -> None:
    with pytest.raises(EnvironmentProblem, match=message) as info:
        environments.given(option)
    assert "\n" not in str(info.value)


def test_a_version_is_installed_once(tmp_path: Path, own_cache: Path) -> None:
    base = stub(tmp_path)
    first = environments.made("4.7.1", base)
    venv, pip = asked(tmp_path)
    assert venv.startswith("-m venv ")
    assert pip.endswith(f"nvidia-cutlass-dsl==4.7.1 apache-tvm-ffi{tools.FFI_RANGE}")
    place = own_cache / "dsl" / "4.7.1-py3.12" / "bin" / "python"
    assert first.compiler == toolchain.Compiler(str(place), "4.7.1")
    assert environments.made("4.7.1", base) == first
    assert asked(tmp_path) == []


def test_other_cuda_libraries_are_an_environment_of_their_own(
    tmp_path: Path, own_cache: Path
) -> None:
    environments.made("4.8.1", stub(tmp_path, "4.8.1"))
    asked(tmp_path)
    found = environments.made("4.8.1[cu13]", stub(tmp_path, "4.8.1"))
    assert "nvidia-cutlass-dsl[cu13]==4.8.1 " in asked(tmp_path)[1]
    place = own_cache / "dsl" / "4.8.1-cu13-py3.12" / "bin" / "python"
    assert found.compiler == toolchain.Compiler(str(place), "4.8.1[cu13]")
    assert environments.made("4.8.x", stub(tmp_path, offline=True)).dsl == "4.8.1"
    again = environments.made("4.8.x[cu13]", stub(tmp_path, offline=True))
    assert again == found


def test_says_what_it_takes_and_how_to_free_it(
    tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environments.made("4.7.1", stub(tmp_path))
    folder = own_cache / "dsl" / "4.7.1-py3.12"
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"installing nvidia-cutlass-dsl 4.7.1 into {folder}"
    assert re.fullmatch(
        rf"it takes \d+ MB; rm -r {re.escape(str(folder))} frees them", said[1]
    )
    environments.made("4.7.1", stub(tmp_path))
    assert capsys.readouterr().err == ""


def test_the_newest_of_a_minor_is_asked_for(tmp_path: Path, own_cache: Path) -> None:
    found = environments.made("4.7.x", stub(tmp_path))
    assert found.dsl == "4.7.1"
    assert "nvidia-cutlass-dsl==4.7.*" in asked(tmp_path)[0]
    assert (own_cache / "dsl" / "4.7.1-py3.12").is_dir()


def test_without_the_network_the_cache_serves(
    tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("4.7.9", "4.7.10"):
        environments.made(version, stub(tmp_path, version))
    capsys.readouterr()
    assert environments.made("4.7.x", stub(tmp_path, offline=True)).dsl == "4.7.10"
    said = capsys.readouterr().err
    assert said == (
        "nvidia-cutlass-dsl 4.7.x: 4.7.10, of the cache (python3.12: ERROR: no network)\n"
    )
    with pytest.raises(EnvironmentProblem, match=r"4\.6\.x: neither cached nor found"):
        environments.made("4.6.x", stub(tmp_path, offline=True))


def test_a_release_of_the_cache_comes_before_its_previews(
    tmp_path: Path, own_cache: Path
) -> None:
    for version in ("4.8.0.dev0", "4.8.0rc1"):
        environments.made(version, stub(tmp_path, version))
    offline = stub(tmp_path, offline=True)
    assert environments.made("4.8.x", offline).dsl == "4.8.0rc1"
    for version in ("4.8.0", "4.8.0.post1"):
        environments.made(version, stub(tmp_path, version))
        offline = stub(tmp_path, offline=True)
        assert environments.made("4.8.x", offline).dsl == version


def test_a_failed_installation_leaves_nothing(tmp_path: Path, own_cache: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="ERROR: no network"):
        environments.made("4.7.1", stub(tmp_path, offline=True))
    assert list((own_cache / "dsl").iterdir()) == []


@pytest.mark.parametrize(
    "version", ["4", "4.7", "4.x", "4.7.1; rm", "../4.7.1", "", "4.8.1[x]"]
)
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(EnvironmentProblem, match="is no version such as"):
        environments.made(version)


def test_another_interpreter_finds_nothing_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTHONPATH", "PYTHONHOME", "CUTE_DSL_LIBS", "CUTE_DSL_ARCH"):
        monkeypatch.setenv(name, "ours")
    theirs = toolchain.environment_for("/other/python")
    ours = toolchain.environment_for(sys.executable)
    hidden = {"PYTHONPATH", "PYTHONHOME", "CUTE_DSL_LIBS", "CUTE_DSL_ARCH"}
    assert not hidden & theirs.keys()
    assert hidden & ours.keys() == hidden - {"CUTE_DSL_ARCH"}
    assert json.loads(json.dumps(theirs)) == theirs
