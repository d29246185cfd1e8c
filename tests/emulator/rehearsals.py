# SPDX-License-Identifier: Apache-2.0
"""Kernels that are ready to run their cases in the emulator, in the test's own process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from fmha_gen.build import captures
from fmha_gen.build.calls import arguments
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.emulator import lower, ptx, walk
from fmha_gen.emulator.launch import Called
from fmha_gen.evidence.coverage import rows_stored, walked
from fmha_gen.evidence.rehearsal import Rehearsal, schedules
from fmha_gen.evidence.tensors import make_problem
from fmha_gen.ops import operation_of
from fmha_gen.ops.cases import Case, cases_for, tiles_of, walks_for
from fmha_gen.planning.backward import CLUSTER_CTAS

from tests import support


def emulated_cases(path: Path) -> list[Case]:
    """Those that the emulator runs."""
    constants = read_constants(path.read_text(encoding="utf-8"))
    cases = cases_for(constants["SPEC"], tiles_of(constants))
    return [case for case in cases if case.emulated]


def tag_of(case: Case) -> str:
    """Its name without the counts."""
    return case.name.rpartition("_b")[0]


def captured(path: Path, cases: Sequence[Case]) -> tuple[str, list[Called]]:
    """A kernel's PTX and its launches for some cases.

    Of a shipped one all its cases are captured by the same compile, which tests share by the cache.
    """
    constants = read_constants(path.read_text(encoding="utf-8"))
    spec = constants["SPEC"]
    wanted = [*cases]
    if path.parent == support.GENERATED:
        wanted += [*emulated_cases(path), *walks_for(spec, tiles_of(constants))]
    calls = [arguments(spec, case, tiles_of(constants)) for case in wanted]
    text, called = captures.capture(path, calls, arch=spec["arch"])
    return text, called[: len(cases)]


def rehearsals(
    path: Path,
    tags: Iterable[str] | None = None,
    cases: Sequence[Case] | None = None,
) -> tuple[str, list[Rehearsal]]:
    """The kernel's PTX, and each of its cases.

    tags: of the cases, which are their names without the counts; None for all. cases: others than
    those of `emulate`.
    """
    constants = read_constants(path.read_text(encoding="utf-8"))
    spec, tiles = constants["SPEC"], tiles_of(constants)
    cases = emulated_cases(path) if cases is None else cases
    text, called = captured(path, cases)
    programs = lower.lower_kernels(text)
    ready = []
    for case, each in zip(cases, called, strict=True):
        if tags is not None and tag_of(case) not in tags:
            continue
        stored = None
        if case.clusters is not None:
            (launch,) = each.launched
            seen = walked(constants, case, launch, walk.prepare(ptx.parse(text)))
            stored = rows_stored(seen, spec, case)
        problem = make_problem(spec, tiles, case)
        ready.append(
            Rehearsal(
                *(spec, tiles, programs, case, problem, each.launched), expected=stored
            )
        )
    return text, ready


def tagged(path: Path, tags: Iterable[str]) -> list[Rehearsal]:
    """Those of the cases whose names, without the counts, are among the tags."""
    _, ready = rehearsals(path, list(tags))
    return ready


def damaged(
    folder: Path, stem: str, right: str, wrong: str, *, once: bool = True
) -> Path:
    """A copy of a shipped kernel with another text in one place, or wherever it stands."""
    text = (support.GENERATED / f"{stem}.py").read_text(encoding="utf-8")
    assert right in text and (text.count(right) == 1 or not once), right
    return written(folder, text.replace(right, wrong), stem)


def written(folder: Path, text: str, stem: str = "candidate") -> Path:
    """A kernel's file of this text."""
    path = folder / f"{stem}.py"
    path.write_text(text, encoding="utf-8")
    return path


def findings(path: Path, tag: str, max_steps: int | None = None) -> list[str]:
    """Of one case of a kernel, under the eager schedule, after so many steps at most."""
    (case,) = (each for each in emulated_cases(path) if tag_of(each) == tag)
    _, (kernel,) = rehearsals(path, cases=[case])
    kernel = dataclasses.replace(kernel, max_steps=max_steps)
    return kernel.run(schedules(0)[0]).findings


def check_launches(stem: str, ready: Iterable[Rehearsal]) -> None:
    """Assert that the host code launches what the kernel's plan says."""
    kernel = support.shipped_plan(stem)
    names = operation_of(kernel.context["spec"]).kernels(kernel.context["spec"])
    threads = {number.name: number.value for number in kernel.derived}["THREADS"]
    ctas = math.prod(kernel.spec_file.spec.cluster)
    if kernel.context.get("paired"):  # of a backward pass, for which no field asks
        ctas = CLUSTER_CTAS
    expected = (threads, 1, 1), (ctas, 1, 1), kernel.smem_bytes
    for rehearsal in ready:
        # The one with the file's own name has the barriers and the memory; others may be beside it.
        launched = dict(zip(names, rehearsal.launches, strict=True))
        launch = launched[""]
        assert (launch.block, launch.cluster, launch.smem_bytes) == expected
