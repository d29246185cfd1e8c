# SPDX-License-Identifier: Apache-2.0
"""`fmha-gen tune`: from specs to their fastest numbers, written into the specs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ..bench.command import Choice, cells_for
from ..bench.problems import Problem
from ..build import records, tree
from ..build.kernel_text import read_constants
from ..errors import CheckFailed, Diagnostic, SpecError
from ..evidence import evaluation
from ..evidence.validate import require_gpu
from ..host import cache, tools
from ..host.executor import HERE, Executor, Task
from ..host.gpu import find_gpu
from ..spec.model import SpecFile, load_specs
from . import board
from .board import Tuning
from .candidates import Candidate, built, planned
from .gpu import OneGpu
from .halving import Gpu, Search, Standings
from .journal import Journal, Terms, opened

# The lengths of decision 0013's grid, each with as many sequences as make 16,384 tokens.
GRID_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
DEFAULT_LIMIT = 60  # [s] to check or time a kernel once, which takes one or two
CHECKS = 4  # side by side at most: most of their time is imports and compiling


@dataclass(frozen=True)
class Options:
    """choice: the problems, as in bench. fixed: as `space.fixed_values` returns it.

    limit: seconds to check or time a kernel once. journals: a folder, None means `<out>/records`.
    """

    choice: Choice = field(default_factory=Choice)
    fixed: Mapping[str, Sequence[int]] = field(default_factory=dict)
    limit: int = DEFAULT_LIMIT
    out: Path = evaluation.DEFAULT_OUT
    journals: Path | None = None
    executor: Executor = HERE


class Machine(NamedTuple):
    """One GPU, in the driver's words, and who runs tasks on it."""

    gpu: str
    driver: str
    executor: Executor


def run(
    paths: Sequence[str | Path],
    options: Options,
    *,
    dry_run: bool = False,
    as_json: bool = False,
) -> list[Tuning]:
    """Tune specs one after the other, print how it went and write the winners into them.

    dry_run: stop before the GPU, which is then not needed. Raises SpecError before anything runs;
    EnvironmentProblem; and CheckFailed for specs that cannot be tuned, after the others. as_json:
    print the specs that were tuned, also when another one ends it.
    """
    specs = load_specs(paths)
    candidates = _planned(specs, options.fixed)
    machine = None if dry_run else find_machine(options.executor)
    tunings: list[Tuning] = []
    failures = []
    try:
        for spec_file, able in zip(specs, candidates, strict=True):
            try:
                if isinstance(able, CheckFailed):
                    raise able
                tunings.append(_tune(spec_file, able, options, machine))
            except CheckFailed as error:
                failures.append(f"{spec_file.path}: {error}")
                continue
            if not as_json:
                _print(tunings[-1])
    finally:  # their winners are in the specs
        if as_json:
            print(json.dumps([board.as_json(one) for one in tunings], indent=2))
    if failures:
        raise CheckFailed("\n".join(failures))
    return tunings


def _planned(
    specs: Iterable[SpecFile], fixed: Mapping[str, Sequence[int]]
) -> list[list[Candidate] | CheckFailed]:
    """The candidates of each spec, or why it has none; a SpecError has what is wrong with any."""
    found: list[list[Candidate] | CheckFailed] = []
    wrong: list[Diagnostic] = []
    for spec_file in specs:
        try:
            found.append(planned(spec_file, fixed))
        except CheckFailed as error:
            found.append(error)
        except SpecError as error:
            wrong += error.diagnostics
    if wrong:
        raise SpecError(wrong)
    return found


def _tune(
    spec_file: SpecFile,
    candidates: Sequence[Candidate],
    options: Options,
    machine: Machine | None,
) -> Tuning:
    """Build the candidates and search; the winner is then in the spec, and all in the journal."""
    able = sum(one.rejection is None for one in candidates)
    # Each is rendered, then compiled.
    with evaluation.progress_bar("make", 2 * able) as advance:
        candidates = built(
            candidates,
            executor=options.executor,
            progress=lambda what, done, total, stem: advance(stem),
        )
    tuning = Tuning(spec_file, candidates, problems_of(candidates[0], options.choice))
    if machine is None:
        return tuning
    terms = Terms(
        gpu=machine.gpu,
        driver=machine.driver,
        dsl=str(tools.dsl_distributions()),
        problems=tuple(str(problem) for problem in tuning.problems),
        source=cache.source_digest(),
    )
    name = f"{spec_file.stem}.tune.jsonl"
    if options.journals is None:
        path = tree.place(options.out, f"{records.FOLDER}/{name}")
    else:
        path = options.journals / name
    gpu = OneGpu(
        texts={
            one.body: one.kernel.text
            for one in candidates
            if one.kernel is not None and one.rejection is None
        },
        problems=tuning.problems,
        limit=options.limit,
        executor=machine.executor,
    )
    with opened(path) as journal:
        tuning = replace(tuning, terms=terms)
        tuning = replace(tuning, standings=_search(tuning, gpu, journal))
        journal.note(event="result", **board.as_json(tuning))
    if tuning.winner is not None:
        write_spec(spec_file, tuning.winner.text)
    return tuning


def _search(tuning: Tuning, gpu: Gpu, journal: Journal) -> Standings:
    assert tuning.terms is not None
    for one in tuning.candidates:
        why = vars(one.rejection) if one.rejection else None
        journal.note(event="candidate", values=one.point, body=one.body, rejected=why)
    incumbent, *names = [one.body for one in tuning.candidates if not one.rejection]
    return Search(incumbent, gpu, journal, tuning.terms).run(names)


def find_machine(executor: Executor) -> Machine:
    """The GPU to tune on: all is timed on this one. Raises EnvironmentProblem without one."""
    on_gpu = executor.on_one_gpu(CHECKS)
    with closing(on_gpu.run([Task("GPU", gpu_here, ())], gpu=True)) as results:
        ((_, found),) = results
    if isinstance(found, CheckFailed):
        raise found
    return Machine(*found, on_gpu)


def gpu_here() -> tuple[str, str]:
    """Name and driver of the GPU of the machine that runs this task."""
    driver = require_gpu()
    return find_gpu().name, driver


def problems_of(incumbent: Candidate, choice: Choice) -> list[Problem]:
    """What to time a spec at: as asked for, or `GRID_LENGTHS`. CheckFailed when that is nothing."""
    assert incumbent.kernel is not None
    spec = read_constants(incumbent.kernel.text)["SPEC"]
    lengths = choice.lengths
    if not lengths and "dynamic" in spec["seqlen"].values():
        lengths = GRID_LENGTHS
    cells, _ = cells_for({spec["name"]: spec}, replace(choice, lengths=lengths), None)
    return [cell.problem for cell in cells]


def write_spec(spec_file: SpecFile, text: str) -> None:
    """Replace a spec's text at once. CheckFailed when it was changed meanwhile."""
    path = Path(spec_file.path)
    if path.read_bytes() != spec_file.text.encode():
        raise CheckFailed(
            "changed while it was tuned, so the winner is in the journal only"
        )
    tree.replace(path, text.encode())


def _print(tuning: Tuning) -> None:
    board.print_tuning(tuning)
    if tuning.winner is not None:
        print(f"{tuning.diff}\nnow run: fmha-gen build {tuning.spec_file.path}")
