# SPDX-License-Identifier: Apache-2.0
"""Kernels that are ready to run their cases in the emulator, in the test's own process."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import support
from fmha_gen import captures
from fmha_gen.emulator import ptx
from fmha_gen.emulator.lower import lower
from fmha_gen.rehearsal import Rehearsal, read_constants, tiles_of
from fmha_gen.rehearsal_cases import cases_for
from fmha_gen.tensors import arguments, make_problem


def rehearsals(path: Path) -> tuple[str, list[Rehearsal]]:
    """The kernel's PTX, and each of its cases: one compile, which tests share by the cache."""
    constants = read_constants(path.read_text(encoding="utf-8"))
    spec, tiles = constants["SPEC"], tiles_of(constants)
    cases = cases_for(spec, tiles)
    problems = [make_problem(spec, case) for case in cases]
    calls = [
        arguments(spec, case, problem)
        for case, problem in zip(cases, problems, strict=True)
    ]
    text, called = captures.capture(path, calls, arch=spec["arch"])
    program = lower(ptx.parse(text))
    ready = [
        Rehearsal(spec, tiles, program, case, problem, each.launched)
        for case, problem, each in zip(cases, problems, called, strict=True)
    ]
    return text, ready


def tagged(path: Path, tags: Iterable[str]) -> list[Rehearsal]:
    """Those of the cases whose names, without the counts, are among the tags."""
    _, ready = rehearsals(path)
    return [each for each in ready if each.case.name.rpartition("_b")[0] in tags]


def check_launches(stem: str, ready: Iterable[Rehearsal]) -> None:
    """Assert that the host code launches what the kernel's plan says."""
    kernel = support.shipped_plan(stem)
    threads = {number.name: number.value for number in kernel.derived}["THREADS"]
    cluster = (*kernel.spec_file.spec.cluster, 1)
    expected = (threads, 1, 1), (math.prod(cluster), 1, 1), kernel.smem_bytes
    for rehearsal in ready:
        launch = rehearsal.launch
        assert (launch.block, launch.cluster, launch.smem_bytes) == expected
