# SPDX-License-Identifier: Apache-2.0
"""`fmha-gen diff`: two sides, the numbers that are missing, the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import build
from ..executor import Local
from .compare import KernelChange, compare
from .kernels import KernelState
from .measure import measure
from .sides import Pair, pairs


@dataclass(frozen=True)
class Options:
    """How to compare.

    compile: True compiles the second side whatever the records say, False compiles nothing, None
    only what no record knows. jobs: parallel compiles, None for all cores.
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
    """The states whose numbers a comparison needs and nobody wrote down."""
    if compile is False:
        return
    for before, after in found:
        if compile and after is not None:
            yield after
        if before is None or after is None:
            continue
        if before.lines == after.lines:
            continue
        for state in (before, after):
            if state.compiled is None or not state.loops:
                yield state
