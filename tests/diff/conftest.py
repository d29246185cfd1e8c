# SPDX-License-Identifier: Apache-2.0
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fmha_gen.build import engine, lint
from fmha_gen.host import tools

from . import model


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Made-up compiles stay out of the cache of whoever runs the tests."""
    monkeypatch.setenv("FMHA_GEN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def compiler(monkeypatch) -> model.Compiler:
    """The engine of every command; its kernels are too small for the linter."""
    found = model.Compiler()
    monkeypatch.setattr(engine, "default_engine", found.engine)
    monkeypatch.setattr(lint, "lint", lambda text: [])
    monkeypatch.setattr(tools, "dsl_distributions", lambda: {tools.DSL: found.dsl})
    return found


@pytest.fixture
def git(tmp_path, monkeypatch) -> Callable[..., str]:
    """Runs git in an empty repository, which is the current folder; nobody's settings count."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "someone")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "someone@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout

    run("init", "--quiet", "--initial-branch=main")
    return run


@pytest.fixture
def specs(tmp_path, git, compiler) -> Path:
    """A repository with two specs and their validated kernels, committed and tagged `built`."""
    folder = tmp_path / "specs"
    folder.mkdir()
    for stem in ("a", "b"):
        (folder / f"{stem}.yaml").write_text("2\n")
        text = model.of_spec(stem, "2")
        known = model.record(stem, text, "emulated", "validated")
        model.write(tmp_path / "generated", stem, text, known)
    git("add", ".")
    git("commit", "--quiet", "--message=built")
    git("tag", "built")
    return folder
