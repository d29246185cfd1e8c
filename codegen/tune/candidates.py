# SPDX-License-Identifier: Apache-2.0
"""Points as kernels: what the plan's formulas and the build's gate leave of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..build import engine as build
from ..build.engine import Engine, Kernel, Progress
from ..errors import CheckFailed, SpecError
from ..host.executor import HERE, Executor
from ..planning import plan
from ..planning.kernel_plan import KernelPlan
from ..spec.model import SpecFile, loads
from .edit import write
from .space import Point, chosen, points


@dataclass(frozen=True)
class Rejection:
    """Why a candidate goes no further. by: spec, plan, build or run; code: of a diagnostic."""

    by: str
    why: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.code} {self.why}" if self.code else self.why


@dataclass(frozen=True)
class Candidate:
    """A point, the spec's text with it, and how far it came.

    plan: None when the plan refused it; kernel: None when it was not built.
    """

    point: Point
    text: str
    plan: KernelPlan | None = None
    kernel: Kernel | None = None
    rejection: Rejection | None = None

    @property
    def body(self) -> str:
        """Digest of its kernel's text; empty when there is none."""
        return self.kernel.entry.body if self.kernel and self.kernel.text else ""


def planned(spec_file: SpecFile, fixed: Mapping[str, Sequence[int]]) -> list[Candidate]:
    """All candidates of a spec, the spec as it is first; those that do not fit are rejected.

    Raises SpecError when the spec itself does not fit.
    """
    incumbent = plan.resolve(spec_file)
    first, *others = points(chosen(incumbent), fixed)
    return [
        Candidate(first, spec_file.text, incumbent),
        *(_planned(spec_file, point) for point in others),
    ]


def _planned(spec_file: SpecFile, point: Point) -> Candidate:
    text = write(spec_file.text, point)
    try:
        candidate = loads(Path(spec_file.path), text)
    except SpecError as error:
        return Candidate(point, text, rejection=_refused("spec", error))
    try:
        return Candidate(point, text, plan.resolve(candidate))
    except SpecError as error:
        return Candidate(point, text, rejection=_refused("plan", error))


def _refused(by: str, error: SpecError) -> Rejection:
    first = error.diagnostics[0]
    return Rejection(by, first.message, first.code)


def built(
    candidates: Sequence[Candidate],
    *,
    executor: Executor = HERE,
    progress: Progress | None,
    engine: Engine | None = None,
) -> list[Candidate]:
    """Render, compile and gate those that the plan let through, as `build` does, in parallel.

    Raises CheckFailed when the first one, the incumbent, does not pass.
    """
    able = [i for i, one in enumerate(candidates) if one.rejection is None]
    plans = [one.plan for one in candidates if one.plan is not None]
    kernels, _ = build.make(
        plans, engine or build.default_engine(), executor=executor, progress=progress
    )
    found = list(candidates)
    first_with: dict[str, Point] = {}
    for i, kernel in zip(able, kernels, strict=True):
        rejection = None
        if kernel.failures:
            rejection = Rejection("build", "; ".join(kernel.failures))
        elif kernel.entry.body in first_with:
            same = in_one_line(first_with[kernel.entry.body])
            rejection = Rejection("build", f"the same kernel as {same}")
        else:
            first_with[kernel.entry.body] = candidates[i].point
        found[i] = replace(candidates[i], kernel=kernel, rejection=rejection)
    if (failed := found[0].rejection) is not None:
        raise CheckFailed(f"the spec as it is does not pass the build: {failed}")
    return found


def in_one_line(point: Point) -> str:
    """A point, for a message."""
    return " ".join(f"{field} {value}" for field, value in point.items())
