# SPDX-License-Identifier: Apache-2.0
"""`fmha-gen matrix`: kernels compiled, and emulated, under several versions of the DSL.

A version can cost a quarter of the speed with the same bits of output: what the record says of
registers, stack, loops and wgmmas has to hold under it, too.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..arch import ARCHITECTURES
from ..build import records, toolchain
from ..build.engine import COMPILE_SOURCES, compile_task
from ..build.kernel_text import read_constants
from ..build.render import body_digest
from ..emulator.scheduler import Completion
from ..errors import CheckFailed
from ..evidence import emulate, evaluation
from ..host import cache
from ..host.executor import Local, Task, in_order
from ..host.processes import run_worker
from . import document, environments
from .cells import Cell, Kind, judge
from .environments import Environment

EMULATE_SECONDS = 1800.0  # for one kernel
# Another compiler's code of the same program: does it compute? Its order of events is what the
# record's schedules were for.
SCHEDULE = emulate.Choice(completion=Completion.RANDOM.value, seed=1)


@dataclass(frozen=True)
class Kernel:
    """A kernel's file and its record."""

    path: Path
    text: str
    record: Mapping[str, Any]

    @property
    def stem(self) -> str:
        """The kernel's name."""
        return self.path.stem


@dataclass(frozen=True)
class Options:
    """How a cell is filled. timeout: seconds for one compile; emulated: whether it runs as well."""

    timeout: float
    emulated: bool


def run(
    paths: Sequence[str | Path],
    *,
    out: Path,
    versions: Sequence[str],
    given: Sequence[str],
    python: str,
    options: Options,
    jobs: int | None,
    write: Path | None,
    as_json: bool,
) -> list[Cell]:
    """Fill the table of kernels by versions, print it and write it.

    versions: such as 4.7.1 or 4.7.x, made by the interpreter `python`; given: VERSION=INTERPRETER.
    Raises CheckFailed with every cell that is not as its kernel's record says.
    """
    if write is not None:
        document.require_place(write)
    kernels = [_kernel(path) for path in evaluation.kernel_files(paths, out)]
    found = _distinct(
        [
            *(environments.made(version, python) for version in versions),
            *(environments.given(option) for option in given),
        ]
    )
    total = len(kernels) * len(found)
    with evaluation.progress_bar("matrix", total) as advance:
        cells = fill(kernels, found, options, jobs, advance)
    if as_json:
        print(json.dumps([cell.to_json() for cell in cells], indent=2, sort_keys=True))
    else:
        document.show(cells)
    if write is not None:
        document.write(write, cells, found)
    if lines := [
        f"{cell.kernel} under {cell.dsl}: {cell.text}"
        for cell in cells
        if cell.kind is not Kind.SAME
    ]:
        raise CheckFailed("\n".join(lines))
    return cells


def _distinct(found: Sequence[Environment]) -> list[Environment]:
    """Each environment once; CheckFailed when two would share a column of the table."""
    columns: dict[str, Environment] = {}
    for environment in found:
        known = columns.setdefault(environment.dsl, environment)
        if known != environment:
            both = f"{known.compiler.python}, {environment.compiler.python}"
            raise CheckFailed(f"{environment.dsl}: two interpreters: {both}")
    return list(columns.values())


def _kernel(path: Path) -> Kernel:
    """A kernel whose record says what it compiles to; CheckFailed without."""
    text = path.read_text(encoding="utf-8")
    known = records.load(path.parent / records.path_of(path.stem))
    body = body_digest(text)
    record = records.current(known, kernel=path.stem, body_sha256=body)
    if "compiled" not in record:
        raise CheckFailed(f"{path}: no record says what it compiles to; build it first")
    return Kernel(path, text, record)


def fill(
    kernels: Sequence[Kernel],
    found: Sequence[Environment],
    options: Options,
    jobs: int | None,
    advance: Callable[[Cell], object],
) -> list[Cell]:
    """Every kernel under every version, by kernel; ``jobs`` at a time (see Local)."""

    def one(kernel: Kernel, environment: Environment) -> Cell:
        cell = compiled(kernel, environment, options.timeout)
        if options.emulated and cell.kind in (Kind.SAME, Kind.CHANGED):
            cell = emulated(kernel, environment, cell)
        advance(cell)
        return cell

    tasks = [Task(k.path.stem, one, (k, e)) for k in kernels for e in found]
    cells = []
    with contextlib.closing(Local(jobs).run(tasks)) as results:
        for cell in in_order(results):
            if isinstance(cell, CheckFailed):
                raise cell
            cells.append(cell)
    return cells


def compiled(kernel: Kernel, environment: Environment, timeout: float) -> Cell:
    """Compile a kernel there, unless the cache knows what that gives."""
    arch = ARCHITECTURES[_arch(kernel)].compile_arch
    name = _key("matrix", [kernel.text, kernel.stem, arch], environment)
    compile_there = functools.partial(
        toolchain.compile_kernel, timeout=timeout, compiler=environment.compiler
    )
    result: toolchain.CompileReport | CheckFailed
    try:
        result = compile_task(compile_there, name, True, kernel.text, kernel.stem, arch)
    except CheckFailed as failure:
        result = failure
    recorded = kernel.record["compiled"]
    return judge(kernel.stem, environment.dsl, recorded, result, timeout=timeout)


def emulated(kernel: Kernel, environment: Environment, cell: Cell) -> Cell:
    """Run what was compiled there in the emulator, unless its PTX is that of the record."""
    assert cell.report is not None  # it compiled
    known = kernel.record.get("emulated", {})
    if known.get("ptx_sha256") == cell.report.ptx_sha256:
        return replace(cell, emulated="as recorded: the same PTX")
    parts = [kernel.text, cell.report.ptx_sha256, cache.source_digest()]
    name = _key("matrix-emulated", parts, environment)
    held = cache.get(name)
    if held is None:
        compiler = environment.compiler
        who = [f"--python={compiler.python}", f"--dsl={compiler.dsl}"]
        events, ending = run_worker(
            emulate.worker_command,
            {kernel.path.name: kernel.text},
            EMULATE_SECONDS,
            [*SCHEDULE.options, *who],
        )
        outcome = emulate.judge(kernel.path, events, ending, choice=SCHEDULE)
        if outcome.findings:
            first = outcome.findings[0]
            return replace(
                cell, kind=Kind.WRONG, details=(f"{first.case}: {first.text}",)
            )
        held = f"{outcome.cases} cases"
        cache.put(name, held)
    return replace(cell, emulated=held)


def _arch(kernel: Kernel) -> str:
    return str(read_constants(kernel.text)["SPEC"]["arch"])


def _key(kind: str, parts: Sequence[str], environment: Environment) -> str:
    """Versions do not tell what was patched by hand: the interpreter's place is part of it."""
    where = f"{environment.compiler.python} {environment.python}"
    code = cache.source_digest(*COMPILE_SOURCES)
    return cache.key(kind, [*parts, where, f"{environment.distributions}", code])
