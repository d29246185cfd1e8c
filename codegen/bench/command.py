# SPDX-License-Identifier: Apache-2.0
"""`fmha-gen bench`: from kernels and problems to a table, JSON, a picture and records."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..build import tree
from ..build.render import body_digest
from ..errors import CheckFailed, EnvironmentProblem, UsageProblem, one_line
from ..evidence import evaluation
from ..evidence.evaluation import DEFAULT_OUT, Finding, kernel_files, progress_bar
from ..evidence.validate import require_gpu
from ..host import tools
from ..host.gpu import Gpu, find_gpu
from . import contenders, draws, grid, overhead, plot, results, tables
from . import lengths as spelled
from .draws import Ranges
from .problems import PAGED, POOLS, Problem, layout_beside, layout_of, problems_for
from .results import Cell, Machine, Report
from .timing import (
    EAGER,
    GRAPH,
    REGIMES,
    SEED,
    Gauge,
    Launch,
    Timing,
    fastest,
    host_seconds,
    measure,
    prepare,
)

if TYPE_CHECKING:
    from .cuda import CudaDevice

RUNG = "benchmarked"
# Timed when asked for by name alone: one compiles for tens of seconds in each problem, the other is
# slower than its successors.
BY_NAME = {"flex", "flash"}
DEFAULT_ROUNDS = 5
RECORD_ROUNDS = 5  # at least, for a record
MATMUL = "matmul"


@dataclass(frozen=True)
class Kernel:
    """A generated kernel, imported. body: the digest of the text that was imported."""

    path: Path
    body: str
    module: ModuleType

    @property
    def stem(self) -> str:
        """The kernel's name."""
        return self.path.stem

    @property
    def spec(self) -> Mapping[str, Any]:
        """Its SPEC."""
        found: Mapping[str, Any] = self.module.SPEC
        return found


@dataclass(frozen=True)
class Choice:
    """What to time kernels at; see `problems_for`, and `grid`, which rules the others out."""

    lengths: Sequence[int] = ()
    tokens: Sequence[int] = ()
    batch: int | None = None
    heads: int | None = None
    grid: Path | None = None
    ranges: Ranges = field(default_factory=dict)
    seeds: Sequence[int] = (0,)
    sequences: Sequence[str] = ()
    pools: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """What one kernel showed, as `evaluation` writes it into a record."""

    kernel: Path
    findings: tuple[Finding, ...]
    result: Mapping[str, Any] | None


def run(
    paths: Sequence[str | Path],
    *,
    choice: Choice = Choice(),
    against: Sequence[str] | None = None,
    rounds: int = DEFAULT_ROUNDS,
    regimes: Sequence[str] = REGIMES,
    json_file: Path | None = None,
    plot_file: Path | None = None,
    record: bool = False,
    out: Path = DEFAULT_OUT,
) -> Report:
    """Time kernels and print tables; raises CheckFailed when one of ours does not run.

    paths: as for validate; or the JSON of a run alone, which is then only shown. against: the
    peers; None means all that are installed, but for those of `BY_NAME`. regimes: of `timing`,
    graphs among them. json_file: gets every round of everyone. plot_file: gets a picture. record:
    write rung 5 into the records.
    """
    check_arguments(choice, against, rounds, regimes, record)
    regimes = [name for name in REGIMES if name in regimes]
    check_files(json_file, plot_file)
    if [Path(path).suffix for path in paths] == [".json"]:
        if record or against is not None or choice != Choice():
            raise UsageProblem(
                f"{paths[0]}: a run is only shown, with --plot and --json"
            )
        report = load_run(Path(paths[0]))
        show(report, json_file, plot_file)
        return report
    rows = grid.load(choice.grid) if choice.grid else None
    files = kernel_files(paths, out)
    require_gpu()
    tools.require_ffi()  # without it calls go another way, and bare ones take no tensors
    gpu = find_gpu()
    peers, notes = choose_peers(against)
    kernels = load(files)
    specs = {kernel.stem: kernel.spec for kernel in kernels}
    cells, unused = cells_for(specs, choice, rows)
    report = race(kernels, cells, peers, rounds, gpu, regimes)
    report.notes += [*notes, *unused]
    show(report, json_file, plot_file)
    conclude(kernels, report, record=record)
    return report


def load_run(file: Path) -> Report:
    """What `--json` wrote. Raises CheckFailed when it is something else."""
    try:
        return results.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckFailed(f"{file}: not the JSON of a run: {error!r}") from error


def show(report: Report, json_file: Path | None, plot_file: Path | None) -> None:
    """Print a run, and write the files that were asked for."""
    fits = overhead.fits(results.lines(report.cells), report.machine.multiprocessors)
    tables.print_report(report, fits)
    if json_file is not None:
        found = results.as_json(report) | {"overhead": [asdict(fit) for fit in fits]}
        text = json.dumps(found, indent=1) + "\n"
        tree.replace(json_file, text.encode())
    if plot_file is not None:
        plot.draw(report, plot_file)


def check_arguments(
    choice: Choice,
    against: Sequence[str] | None,
    rounds: int,
    regimes: Sequence[str],
    record: bool,
) -> None:
    """Raise UsageProblem for what can be refused before anything runs."""
    if unknown := [name for name in against or () if name not in contenders.PEERS]:
        known = ", ".join(contenders.PEERS)
        raise UsageProblem(f"--against {','.join(unknown)}: the peers are {known}")
    if rounds < 1:
        raise UsageProblem(f"--rounds {rounds}: at least 1")
    if unknown := [name for name in regimes if name not in REGIMES]:
        known = ", ".join(REGIMES)
        raise UsageProblem(f"--regime {','.join(unknown)}: the regimes are {known}")
    if GRAPH not in regimes:
        raise UsageProblem("--regime: tables and pictures are of graph; name it, too")
    if record and {*regimes} != {*REGIMES}:
        raise UsageProblem("--record needs every regime: leave --regime out")
    if record and rounds < RECORD_ROUNDS:
        raise UsageProblem(f"--record needs --rounds {RECORD_ROUNDS} or more")
    if record and against is not None and not against:
        raise UsageProblem("--record needs a peer")
    if choice.grid and choice != Choice(grid=choice.grid):
        raise UsageProblem("--grid says all sizes; leave the other options out")
    if choice.batch and choice.tokens:
        raise UsageProblem("--batch and --tokens exclude each other")
    if choice.sequences and (choice.lengths or choice.tokens or choice.batch):
        raise UsageProblem("--lengths excludes --seqlen, --tokens and --batch")
    for said in choice.sequences:
        spelled.in_words(said)
    if unknown := [name for name in choice.pools if name not in POOLS]:
        known = ", ".join(POOLS)
        raise UsageProblem(f"--pool {','.join(unknown)}: the pools are {known}")


def check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """Raise, minutes before they are written, when they cannot be."""
    for file in filter(None, (json_file, plot_file)):
        if not file.parent.is_dir():
            raise UsageProblem(f"{file}: there is no folder {file.parent}")
    if plot_file is not None:
        plot.require(plot_file)


def choose_peers(against: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The peers to time, and a note on each that is left out because it is not installed.

    Raises EnvironmentProblem when one that was asked for is not.
    """
    absent = {
        name: f"{' or '.join(peer.packages)} is not installed"
        for name, peer in contenders.PEERS.items()
        if peer.package is None
    }
    if against is None:
        wanted = [name for name in contenders.PEERS if name not in BY_NAME]
        notes = [f"no {name}: {absent[name]}" for name in wanted if name in absent]
        return [name for name in wanted if name not in absent], notes
    for name in against:
        if name in absent:
            raise EnvironmentProblem(f"{name}: {absent[name]}")
    return list(dict.fromkeys(against)), []


def cells_for(
    specs: Mapping[str, Mapping[str, Any]],
    choice: Choice,
    rows: Sequence[grid.Row] | None,
) -> tuple[list[Cell], list[str]]:
    """A cell for every problem, with all the kernels (by stem) that compute it.

    Also notes on kernels without a problem, rows of a grid without a kernel, and problems larger
    than asked for. Kernels of other layouts are beside in cells of packed sequences. Raises
    CheckFailed when there is no cell at all, and UsageProblem for a range of what no kernel reads,
    and for lengths or pools that no kernel has.
    """
    read = {name for spec in specs.values() for name in draws.limits_of(spec)}
    if unread := choice.ranges.keys() - read:
        options = ", ".join(map(draws.option, sorted(unread)))
        raise UsageProblem(f"{options}: no kernel reads it")
    made = {layout_of(spec) for spec in specs.values()}
    if choice.pools and PAGED not in made:
        raise UsageProblem(f"--pool {','.join(choice.pools)}: no kernel has pages")
    cells: dict[Problem, Cell] = {}
    notes = []

    def enter(problem: Problem, stem: str, best_over_fa4: float | None = None) -> None:
        cell = cells.setdefault(problem, Cell(problem, [], best_over_fa4))
        if stem not in cell.ours:
            cell.ours.append(stem)

    if rows is None:
        for stem, spec in specs.items():
            for problem in problems_for(
                spec,
                lengths=choice.lengths,
                tokens=choice.tokens,
                batch=choice.batch,
                heads=choice.heads,
                ranges=choice.ranges,
                seeds=choice.seeds,
                sequences=choice.sequences,
                pools=choice.pools,
            ):
                enter(problem, stem)
                if problem.batch == 1 and problem.q > min(
                    choice.tokens, default=problem.q
                ):
                    notes.append(
                        f"{problem} is one sequence, longer than --tokens asks for"
                    )
    else:
        for row in rows:
            computed = {stem: row.problem(spec) for stem, spec in specs.items()}
            for stem, found in computed.items():
                if found is not None:
                    enter(found, stem, row.best_over_fa4)
            if not any(computed.values()):
                notes.append(f"no kernel for {row}")
    for cell in cells.values():
        layouts = {stem: layout_beside(cell.problem, specs[stem]) for stem in specs}
        cell.beside = {stem: layout for stem, layout in layouts.items() if layout}
    used = {stem for cell in cells.values() for stem in (*cell.ours, *cell.beside)}
    why = "no row of the grid" if rows else "fixed to other lengths"
    if choice.sequences:
        why = "dense tensors, and no sequences of one length that are its work"
    notes += [f"{stem} was not timed: {why}" for stem in specs if stem not in used]
    if not cells:
        raise CheckFailed("\n".join(["nothing to time", *notes]))
    return list(cells.values()), list(dict.fromkeys(notes))


def conclude(kernels: Sequence[Kernel], report: Report, *, record: bool) -> None:
    """Write the records if asked to; raises CheckFailed for kernels that did not run.

    After an error that broke the GPU nothing is written: it would be held against all kernels. Nor
    of a kernel with a problem that nobody was timed at: that may be too large for this GPU.
    """
    failures = []
    if "after" not in report.matmul:
        failures.append("the GPU stopped working" + (", no records" if record else ""))
        record = False
    for kernel in kernels:
        failures += [
            f"{kernel.path}: beside {cell.problem}: {cell.missing[kernel.stem]}"
            for cell in report.cells
            if kernel.stem in cell.beside and kernel.stem in cell.missing
        ]
        cells = [cell for cell in report.cells if kernel.stem in cell.ours]
        if not cells:
            continue  # said in the notes; its record is about other problems
        result = results.benchmarked(report, kernel.stem)
        findings = [
            Finding(str(cell.problem), cell.missing[kernel.stem])
            for cell in cells
            if kernel.stem in cell.missing
        ]
        timed = all(cell.timings for cell in cells)
        if record and timed and (result or findings):
            outcome = Outcome(kernel.path, tuple(findings), result)
            evaluation.write_record(outcome, kernel.body, rung=RUNG, above=())
        elif record:  # no fault of the kernel: what it has stays
            whom = "a problem has no peer" if timed else "nobody was timed at a problem"
            findings.append(Finding(RUNG, f"not recorded: {whom}"))
        failures += [f"{kernel.path}: {one.case}: {one.text}" for one in findings]
    if failures:
        raise CheckFailed("\n".join(failures))


# --- on the GPU ---------------------------------------------------------------------------


def load(files: Sequence[Path]) -> list[Kernel]:
    """Import kernels.

    Raises EnvironmentProblem when this machine cannot run one, CheckFailed for what is none.
    """
    from ..evidence.trial import environment_problem, load_kernel

    kernels: dict[str, Kernel] = {}
    for path in files:
        if path.stem in kernels:
            raise CheckFailed(f"{kernels[path.stem].path} and {path}: the same name")
        if path.stem in contenders.PEERS:
            raise CheckFailed(f"{path}: this is the name of a peer")
        body = body_digest(path.read_text(encoding="utf-8"))
        try:
            kernel = Kernel(path, body, load_kernel(path))
            arch = kernel.spec["arch"]
        except ImportError as failure:
            raise EnvironmentProblem(f"cannot import {path}: {failure}") from failure
        except Exception as failure:  # of whoever edited it
            raise CheckFailed(f"{path}: no kernel: {one_line(failure)}") from failure
        if problem := environment_problem(arch):
            raise EnvironmentProblem(f"{path}: {problem}")
        kernels[path.stem] = kernel
    return list(kernels.values())


def race(
    kernels: Sequence[Kernel],
    cells: Sequence[Cell],
    peers: Sequence[str],
    rounds: int,
    gpu: Gpu,
    regimes: Sequence[str] = REGIMES,
) -> Report:
    """Time everyone in every cell, and the matrix product before and after them."""
    import torch

    from .cuda import CudaDevice

    device = CudaDevice()
    modules = {kernel.stem: kernel.module for kernel in kernels}
    machine = Machine(
        gpu.name, gpu.driver, device.multiprocessors, contenders.versions()
    )
    report = Report(machine, peers, rounds, contenders.MATMUL_FLOPS, list(cells))
    dice = random.Random(SEED)
    with torch.no_grad(), progress_bar("bench", len(cells), redraws=False) as advance:
        report.matmul["before"] = time_matmul(device, gpu, rounds, dice, regimes)
        for cell in report.cells:
            try:
                time_cell(cell, modules, peers, device, gpu, rounds, dice, regimes)
            except Exception as failure:  # it does not say whose it is
                cell.timings.clear()
                everyone = dict.fromkeys((*cell.ours, *peers), one_line(failure))
                cell.missing = everyone | cell.missing
            advance(cell)
        try:
            report.matmul["after"] = time_matmul(device, gpu, rounds, dice, regimes)
        except Exception as failure:  # what was timed before it broke is worth showing
            report.notes.append(f"the GPU stopped working: {one_line(failure)}")
    return report


def time_matmul(
    device: CudaDevice,
    gauge: Gauge,
    rounds: int,
    dice: random.Random,
    regimes: Sequence[str],
) -> Timing:
    """The matrix product alone."""
    ready = {MATMUL: prepare(contenders.matmul(device.name), device)}
    found = measure(ready, device, gauge, rounds=rounds, dice=dice, regimes=regimes)
    return Timing(None, found[MATMUL])


def time_cell(
    cell: Cell,
    modules: Mapping[str, ModuleType],
    peers: Sequence[str],
    device: CudaDevice,
    gauge: Gauge,
    rounds: int,
    dice: random.Random,
    regimes: Sequence[str] = REGIMES,
    turn: Callable[[str], object] = lambda name: None,
) -> None:
    """Fill a cell's timings, and why others are missing. Raises what no contender is to blame for.

    turn: called with the contender before each use of the GPU.
    """
    inputs = contenders.make_inputs(cell.problem, device.name)
    right = contenders.right_of(cell.problem, inputs)

    @cache
    def given(layout: str) -> contenders.Inputs:
        return contenders.beside(cell.problem, inputs, layout) if layout else inputs

    def launches_of(name: str) -> Mapping[str, Launch]:
        if name in modules:
            layout = cell.beside.get(name, "")
            return {"": contenders.ours(modules[name], given(layout))}
        return contenders.PEERS[name].launches(cell.problem, inputs)

    ready = {}
    for name in peers:
        if refusal := contenders.PEERS[name].refusal(cell.problem):
            cell.missing[name] = refusal
    present = [name for name in peers if name not in cell.missing]
    for name in (*cell.ours, *cell.beside, *present):
        turn(name)
        ways, errors = {}, {}
        try:
            launches = launches_of(name)
        except Exception as failure:  # a peer may lack a shape, a package or a GPU
            cell.missing[name] = one_line(failure)
            continue
        for way, launch in launches.items():
            try:
                seen = contenders.as_packed(launch, cell.beside.get(name, ""))
                errors[way] = right.error_of(seen)
                if not errors[way] <= contenders.wrong_from(cell.problem):
                    raise RuntimeError(
                        f"computes something else: relative error {errors[way]:.3g}"
                    )
                ways[way] = prepare(launch, device)
            except Exception as failure:
                cell.missing[f"{name}, {way}" if way else name] = one_line(failure)
        if ways:
            way = fastest(ways, device, gauge, dice)
            ready[name] = ways[way]
            cell.timings[name] = Timing(errors[way], way=way)
    found = measure(
        *(ready, device, gauge),
        rounds=rounds,
        dice=dice,
        regimes=regimes,
        turn=turn,
    )
    for name, by_regime in found.items():
        cell.timings[name].rounds = by_regime
        if name in modules and EAGER in regimes:
            of_layout = given(cell.beside.get(name, ""))
            cell.timings[name].bare_host_seconds = host_seconds(
                contenders.bare(modules[name], of_layout), device, rounds
            )
