# SPDX-License-Identifier: Apache-2.0
"""Backward kernels that are ready to run their cases in the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fmha_gen.build import captures
from fmha_gen.build.calls import arguments
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.emulator import lower
from fmha_gen.evidence.rehearsal import Rehearsal
from fmha_gen.evidence.tensors import make_problem
from fmha_gen.ops.cases import Case, tiles_of

# Warp instructions of a run: single threads do what tensor cores would.
STEPS = 100_000_000


def rehearsals(path: Path, cases: Sequence[Case]) -> list[Rehearsal]:
    """Each of some cases of a kernel; one compile captures them all."""
    constants = read_constants(path.read_text(encoding="utf-8"))
    spec, tiles = constants["SPEC"], tiles_of(constants)
    calls = [arguments(spec, case, tiles) for case in cases]
    text, called = captures.checked(path, calls, arch="sm90")
    programs = lower.lower_kernels(text)
    return [
        Rehearsal(
            *(spec, tiles, programs, case, make_problem(spec, tiles, case), launches),
            max_steps=STEPS,
        )
        for case, launches in zip(cases, called, strict=True)
    ]
