# SPDX-License-Identifier: Apache-2.0
"""Every command that a document shows is run, in order, in a copy of the checkout.

The copy has a kernel and those that the document's commands name; `make build` builds the others.
A spec that a document shows is written where its first line says. A comment `# status N` behind a
command is the status it must end with. What needs a GPU runs where one is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import support
from fmha_gen.build import engine

DOCUMENTS = (
    "README.md",
    "templates/README.md",
    "codegen/docs/building.md",
    "codegen/docs/diff.md",
    "codegen/docs/tutorial.md",
    "codegen/docs/tuning.md",
    "codegen/docs/vendoring.md",
)
GPU = re.compile(r"fmha-gen (validate|bench|tune(?!.*--dry-run))\b")
# Not run: they install into the checkout, the suite has those tests itself, the tutorial emulates
# another kernel, the manual of the tuner lists candidates of another one, and training takes a GPU
# minutes (tests/vendor/test_train_script.py).
NOT_RUN = (
    "python3 -m venv .venv",
    ".venv/bin/pip install --editable .",
    "pytest tests/golden/test_partials.py tests/golden/test_template_python.py",
    "fmha-gen emulate specs/sm90_d96_fp16_full.yaml",
    "fmha-gen tune specs/sm90_d112_bf16_causal.yaml --dry-run --fix tile.q --fix stages.q"
    " --fix stages.kv",
    "python -m tests.hardware.train /tmp/trained/attention sdpa:0,1,2 ours:0,1,2 fa4:0"
    " --out /tmp/trained/runs.jsonl",
    "python -m tests.hardware.train --compare /tmp/trained/runs.jsonl",
)
# Run of one case: tests/emulator/test_shipped_kernels.py emulates a kernel in all of them.
ONE_CASE = "fmha-gen emulate specs/sm90_d112_bf16_causal.yaml"

_BLOCK = re.compile(r"^```(console|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_STATUS = re.compile(r"# status (\d)")


class Command(NamedTuple):
    line: str
    status: int


class Spec(NamedTuple):
    path: str
    text: str


def steps(text: str) -> Iterator[Command | Spec]:
    for language, block in _BLOCK.findall(text):
        if language == "yaml":
            if match := re.match(r"# (specs/[\w/]+\.yaml)\n", block):
                yield Spec(match[1], block)
            continue
        lines = [line for line in block.splitlines() if line.strip()]
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            status = _STATUS.search(line)
            yield Command(
                line.partition("  #")[0].strip(), int(status[1]) if status else 0
            )


def named_kernels(name: str) -> set[str]:
    found = steps((support.ROOT / name).read_text(encoding="utf-8"))
    lines = [step.line for step in found if isinstance(step, Command)]
    return {stem for line in lines for stem in re.findall(r"sm\d+_\w+", line)}


@pytest.fixture
def checkout(name: str, tmp_path: Path) -> Path:
    """A copy of what git knows, and a repository of its own. name: the document."""
    folder = tmp_path / "checkout"
    found = subprocess.run(
        ["git", "ls-files", "-z"], cwd=support.ROOT, capture_output=True, check=True
    )
    left_out = set(support.SHIPPED[1:]) - named_kernels(name)
    for path in filter(None, found.stdout.decode().split("\0")):
        if Path(path).stem in left_out:
            continue
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(support.ROOT / path, target, follow_symlinks=False)
    specs, generated = folder / "specs", folder / "generated"
    assert engine.build([specs], generated, compile=False, prune=True).ok
    for command in (
        ["init", "--quiet"],
        ["add", "--all"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "a"],
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_do_what_the_document_says(
    name: str, checkout: Path, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for program, module in (("fmha-gen", "fmha_gen.cli"), ("pytest", "pytest -n0")):
        script = programs / program
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        script.chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run, left_out = 0, []
    for step in steps((support.ROOT / name).read_text(encoding="utf-8")):
        if isinstance(step, Spec):
            file = checkout / step.path
            file.parent.mkdir(exist_ok=True)
            file.write_text(step.text, encoding="utf-8")
            continue
        if step.line in NOT_RUN or (GPU.match(step.line) and not has_gpu()):
            left_out.append(step.line)
            continue
        begin = time.monotonic()
        done = subprocess.run(
            step.line.replace("/tmp/", f"{elsewhere}/")
            + " --case one_by_one_b1_hkv1_q1_kv1" * (step.line == ONE_CASE),
            shell=True,
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert (
            done.returncode == step.status
        ), f"{step.line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        run += 1
        print(f"{time.monotonic() - begin:6.1f} s  {step.line}")
    print(f"{name}: {run} commands run, not here: {left_out}")
    assert run >= 1


def test_documents_are_all_that_show_commands() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=support.ROOT, capture_output=True, text=True
    ).stdout.split()
    showing = {
        name
        for name in tracked
        if not name.startswith("codegen/decisions/")
        and "```console" in (support.ROOT / name).read_text(encoding="utf-8")
    }
    assert showing == set(DOCUMENTS)
