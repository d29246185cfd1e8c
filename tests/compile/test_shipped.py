# SPDX-License-Identifier: Apache-2.0
"""Every shipped file, alone: it imports and compiles where only the DSL is installed, refuses bad
calls, and takes the registers and the shared memory that its plan says.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import support
from fmha_gen import build, toolchain
from packaging.requirements import Requirement
from support import GENERATED, SHIPPED

HERE = Path(__file__).parent
BARE_SECONDS = 300

each_kernel = pytest.mark.parametrize("stem", SHIPPED)


def closure(distribution: str) -> set[str]:
    """The distribution and all that pip would install with it."""
    found: set[str] = set()
    todo = [distribution]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return found


@pytest.fixture(scope="session")
def only_dsl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages folder as `pip install nvidia-cutlass-dsl` alone would leave it."""
    folder = tmp_path_factory.mktemp("site-packages")
    for name in closure(toolchain.DSL):
        for file in importlib.metadata.files(name) or []:
            top = file.parts[0]
            place = folder / top
            if top != ".." and not place.exists():
                place.symlink_to(Path(str(file.locate())).parents[len(file.parts) - 2])
    return folder
