# SPDX-License-Identifier: Apache-2.0
"""`fmha-gen diff`: two sides, the numbers that are missing, the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..build import engine as build
from ..host import tools
from ..host.executor import Local
from .compare import KernelChange, compare
from .kernels import KernelState
from .measure import measure
from .sides import Pair, pairs


@dataclass(frozen=True)
class Options:
    """How to compare.

    compile: True compiles the second side whatever the records say, False compiles nothing, None
    what no record knows, and what that is compared with. jobs: parallel compiles, None for all
    cores.
    """

    out: Path
    compile: bool | None = None
    jobs: int | None = None


def changes(
    arguments: Sequence[str],
    options: Options,
    *,
    progress: build.Progress | None = None,
    engine: build.Engine | None = None,
) -> list[KernelChange]:
    """Compare what the arguments name; raises as `sides.pairs` and `measure.measure` do."""
    engine = engine or build.default_engine()
    found = pairs(arguments, options.out, engine, progress)
    wanted = {id(state): state for state in _to_measure(found, options.compile)}
    measured = measure(
        list(wanted.values()), engine, executor=Local(options.jobs), progress=progress
    )
    known = dict(zip(wanted, measured, strict=True))
    return [compare(*(known.get(id(s), s) for s in pair)) for pair in found]


def _to_measure(found: Sequence[Pair], compile: bool | None) -> Iterator[KernelState]:
    """The states whose numbers a comparison needs and nobody wrote down.

    What is compiled here is compared with numbers of the same compiler, so that an edit is not
    blamed for what an update of the DSL does; `compile` asks for just that and keeps the records.
    """
    if compile is False:
        return
    dsl = tools.dsl_distributions().get(tools.DSL)
    for before, after in found:
        if after is None:
            continue
        if compile or (before is None and after.compiled is None):
            yield after
        if before is None or before.lines == after.lines:
            continue
        if before.loops and after.loops:
            continue
        for state in (before, after):
            made_by = state.compiled["dsl"] if state.compiled and state.loops else None
            if made_by is None or (made_by != dsl and not compile):
                yield state
