# SPDX-License-Identifier: Apache-2.0
"""The templates of kernels are Python: tools read them, every branch of theirs.

A partial parses before it is rendered, with a name in each hole; a module that is rendered and not
specialised is checked by ruff and mypy with all its flags declared.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fmha_gen.arch import ARCHITECTURES
from fmha_gen.build import render, specialise
from test_partials import MODULES, PARTIALS, contexts, source_of

MOST_CHOICES = 10  # of Jinja in a partial
NOT_PYTHON = frozenset({"common/header.py.j2"})  # a docstring's words

# What the specialiser knows beside flags.
WORDS = f"""
{specialise.OMIT}: int = 0
{specialise.ONCE}: int = 0


def {specialise.INLINE}(function):
    return function
"""
# Constants of what templates for both architectures have, and kernels of one.
ELSEWHERE = frozenset({"PAGE", "KEY_GROUP", "DESCALE_ROWS"})
# A field that only some kernels have stands under an `if`.
ALLOWED = re.compile(
    r"Invalid statement in NamedTuple|Invalid type comment or annotation"
    r"|Unexpected keyword argument .* \"(Problem|Tma|Operands|Tiles|RowStats|Row)\""
    r"|Too many arguments for \"Row\""
    r"|\"(Problem|Tma|Operands|Tiles|RowStats|Row)\" has no attribute"
    r"|Missing positional arguments .* in call to \"Descales\""
)


@pytest.mark.parametrize("name", sorted({*PARTIALS} - NOT_PYTHON))
def test_a_partial_is_python(name: str) -> None:
    text = source_of(name).partition("#}\n")[2]
    ast.parse(re.sub(r"\{\{.*?\}\}", "hole", text))
    assert len(re.findall(r"(\{%|^\s*#%) *if", text, re.MULTILINE)) <= MOST_CHOICES


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_linters_read_every_branch(arch: str, tmp_path: Path) -> None:
    text = unfolded(arch)
    file = tmp_path / f"{arch}.py"
    file.write_text(text, "utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated"]
    # Imports and functions may be for other kernels; the DSL takes all of F841's names.
    found = run([*ruff, "--select", "F", "--ignore", "F401", str(file)])
    assert found.returncode == 0, found.stdout
    mypy = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip"]
    options = ["--ignore-missing-imports", f"--cache-dir={tmp_path}"]
    lines = run([*mypy, *options, str(file)]).stdout.splitlines()
    assert lines[-1].startswith(("Found ", "Success"))
    assert [line for line in lines[:-1] if not ALLOWED.search(line)] == []


def unfolded(arch: str) -> str:
    """A module with all branches of its templates, and its flags and constants declared."""
    every = contexts(arch)
    context = every[0]
    operation = context["operation"]
    fields = {x.when for x in (*operation.reads, *operation.writes)} - {""}
    specs = [each["spec"] for each in every]
    there = {name: next(filter(None, (x.get(name) for x in specs))) for name in fields}
    spec = {**context["spec"], **there}
    text = render.render_template(MODULES[arch], {**context, "spec": spec})
    names = {*ELSEWHERE}
    for each in every:
        flags, numbers = render.decided(each)
        names |= flags.keys() | numbers.keys()
    declared = [n for n in sorted(names) if not re.search(rf"^{n} = ", text, re.M)]
    first = ast.parse(text).body[1]  # behind the docstring
    lines = text.splitlines(keepends=True)
    before, after = lines[: first.lineno - 1], lines[first.lineno - 1 :]
    flags_of = "".join(f"{name}: int = 0\n" for name in declared)
    return "".join([*before, flags_of, WORDS, *after])


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_undefined_name_in_a_branch_is_noticed(tmp_path: Path) -> None:
    """That of a kernel that no spec here makes, too."""
    text = unfolded("sm90").replace("def normalize(acc_O, stats, descale):", BROKEN)
    file = tmp_path / "sm90.py"
    file.write_text(text, "utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821"]
    assert "Undefined name `acc_P`" in run([*ruff, str(file)]).stdout


BROKEN = """def normalize(acc_O, stats, descale):
    if LPT_ORDER and STRIPS and TAKES_TURNS:
        acc_O = acc_P"""
