# SPDX-License-Identifier: Apache-2.0
"""What DSL upgrades did to others, done to a kernel of ours: each is caught, by name, status 1.

The compiles are real: a doctored interpreter makes ptxas spill, take other registers, or hang.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from fmha_gen import cli
from fmha_gen.host import tools
from typer.testing import CliRunner

HERE = tools.require_dsl()
BLOCK = "block=[128 * WARPGROUPS, 1, 1]"


def matrix(kernel: Path, python: Path, *options: str) -> Result:
    command = ["matrix", str(kernel), f"--env={HERE}={python}", *options]
    return CliRunner().invoke(cli.app, command)


def test_the_same_dsl_is_the_same(
    kernel: Path, interpreter: Callable[..., Path]
) -> None:
    result = matrix(kernel, interpreter())
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["kernel", HERE],
        ["wgmma_chain", "same"],
    ]
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("change", "table", "said"),
    [
        # Fewer registers per thread than the kernel was made for.
        (
            (BLOCK, f"{BLOCK}, max_number_threads=[768, 1, 1]"),
            r"SPILLS \d+ bytes \(\d+ loads, \d+ stores\)",
            r"SPILLS \d+ bytes \(\d+ loads, \d+ stores\)",
        ),
        (
            ("unroll=1)", "unroll=2)"),
            r"changed: registers \d+ -> \d+ and \d more",
            r"changed: registers \d+ -> \d+, .*[a-z]+ loops \d+ -> \d+, .*",
        ),
        # Without the wait ptxas overlaps nothing: no spill, and the same bits of output.
        (
            ("DRAIN_BEFORE_P = True", "DRAIN_BEFORE_P = False"),
            r"UNFIT: serialised wgmma: \d+ of 8 wait for the k-step before them",
            r"UNFIT: serialised wgmma: \d+ of 8 wait for the k-step before them",
        ),
        (
            ("from cutlass.memory", "from cutlass.memories"),
            "does not compile",
            "does not compile: ModuleNotFoundError: No module named 'cutlass.memories'",
        ),
    ],
    ids=["spill", "registers", "serialised", "renamed"],
)
def test_an_upgrade_is_caught(
    kernel: Path,
    interpreter: Callable[..., Path],
    change: tuple[str, str],
    table: str,
    said: str,
) -> None:
    result = matrix(kernel, interpreter(*change))
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    prefix = f"wgmma_chain under {HERE}: "
    assert line.startswith(prefix)
    assert re.fullmatch(said, line.removeprefix(prefix))
    row = result.stdout.splitlines()[1]
    name, shown = row.split(maxsplit=1)
    assert name == "wgmma_chain"
    assert re.fullmatch(table, shown.rstrip())


def test_a_hang_is_caught(kernel: Path, interpreter: Callable[..., Path]) -> None:
    result = matrix(kernel, interpreter("hang"), "--timeout=0.5", "--json")
    assert result.exit_code == 1
    assert result.stderr == f"wgmma_chain under {HERE}: hung after 0.5 s\n"
    (cell,) = json.loads(result.stdout)
    assert (cell["verdict"], cell["compiled"]) == ("hung", None)
