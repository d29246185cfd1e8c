# SPDX-License-Identifier: Apache-2.0
"""The command line: prints, and maps outcomes to exit statuses; nothing else.

Status: 0 clean, 1 drift or a failed check, 2 bad spec or usage, 3 this machine cannot, 130 ^C.
Modules that a command needs are imported by that command, so that all start fast.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from .errors import FmhaGenError

if TYPE_CHECKING:
    from .build.engine import BuildResult
    from .host.executor import Executor

INTERRUPTED = 130
SPECS, GENERATED = Path("specs"), Path("generated")  # unless an option says otherwise
SAY_SECONDS = 10.0  # between two lines of a log about the same work
PIPE_WIDTH = 200  # columns of a table that no terminal limits

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="YAML specs in, standalone CuTe DSL attention kernels out.",
    epilog=f"A tutorial is in {Path(__file__).parent / 'docs' / 'tutorial.md'}",
)


def _or_packaged(path: Path) -> Path:
    """The packaged spec where nothing else has that name: what is here comes first."""
    from .build import shipped

    return path if path.exists() else shipped.spec_of(path) or path


# A kernel of the package, by name, stands for its spec.
Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH...",
        show_default=False,
        callback=lambda paths: [_or_packaged(path) for path in paths],
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Folder of the generated kernels.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="Parallel compiles; default: all cores."),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--executor",
        metavar="dask://HOST:PORT",
        help="Run on a Dask cluster, whose workers say how much at once.",
    ),
]


def main() -> None:
    """Entry point of `fmha-gen`."""
    try:
        app(prog_name="fmha-gen")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.")
    ] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"fmha-gen {installed('fmha-gen')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def build(
    paths: Paths,
    out: Out = GENERATED,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Change nothing; report what a build would change."
        ),
    ] = False,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Render and lint only.")
    ] = False,
    jobs: Jobs = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Overwrite kernels that were edited by hand."),
    ] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="Delete kernels without a spec, whatever their evidence."
        ),
    ] = False,
    export_to: Annotated[
        Path | None,
        typer.Option(
            "--export", help="Folder for an object and a C header of each kernel."
        ),
    ] = None,
    where: Where = None,
    as_json: Json = False,
) -> None:
    """Make kernels, lock and records from specs.

    A folder of specs is all that OUT is made from: other kernels that a build left there are
    removed with their records, or with --prune only, if these hold evidence above "compiled".
    """
    from .build import engine

    if export_to is not None and (check or no_compile):
        raise typer.BadParameter(
            "needs a build that compiles and writes", param_hint="--export"
        )
    with _reported(), _executor(where, jobs) as executor, _progress() as progress:
        result = engine.build(
            paths,
            out,
            check=check,
            compile=not no_compile,
            executor=executor,
            force=force,
            prune=prune,
            progress=progress,
        )
        if export_to is not None and result.ok:
            _export(result, export_to, executor)
    if as_json:
        _print_json(_build_json(result))
    else:
        _print_build(result)
    for line in (*result.notes, *result.failures):
        print(line, file=sys.stderr)
    raise typer.Exit(0 if result.ok else 1)


@app.command()
def explain(
    spec: Annotated[
        Path,
        typer.Argument(metavar="SPEC", show_default=False, callback=_or_packaged),
    ],
    out: Out = GENERATED,
    svg: Annotated[
        Path | None, typer.Option(help="File for a picture of one kernel.")
    ] = None,
) -> None:
    """Show the plan: every number as given or derived, the budgets and the rung."""
    with _reported():
        from .build import records, shipped
        from .planning import plan
        from .show import explain as report
        from .spec.model import load_specs

        spec_files = load_specs([spec])
        if svg is not None:
            from .show.picture import page

            page.write(spec_files, svg)
        texts = []
        for spec_file in spec_files:
            stem = spec_file.stem
            record = records.load(out / records.path_of(stem))
            record = record or shipped.record_of_spec(stem, spec_file.digest)
            texts.append(report.render(plan.resolve(spec_file), record))
            for note in spec_file.notes:
                print(note, file=sys.stderr)
        print("\n\n".join(texts))


@app.command()
def emulate(
    paths: Paths,
    out: Out = GENERATED,
    schedules: Annotated[
        int,
        typer.Option("--schedules", min=0, help="Random schedules, beside the others."),
    ] = 2,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Parallel kernels.")
    ] = 2,
    timeout: Annotated[float, typer.Option(help="Seconds for one kernel.")] = 900,
    case: Annotated[
        str | None, typer.Option(help="Replay this case and record nothing.")
    ] = None,
    completion: Annotated[
        Literal["eager", "late", "loads_early_mmas_late", "random"] | None,
        typer.Option(help="When asynchronous work completes; default: every way."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the random schedule.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Write a Chrome trace of one CTA's warps, in steps."
            " Replays the first case, or --case, once, and records nothing."
        ),
    ] = None,
    where: Where = None,
    as_json: Json = False,
) -> None:
    """Run kernels on a model of PTX: function and synchronisation; no timing, no silicon."""
    with _reported(), _executor(where, jobs) as executor:
        from .evidence import emulate as model

        model.run(
            paths,
            out=out,
            choice=model.Choice(schedules, case, completion, seed, timeline),
            executor=executor,
            timeout=timeout,
            as_json=as_json,
        )


@app.command()
def validate(
    paths: Paths,
    out: Out = GENERATED,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Parallel compiles.")
    ] = 2,
    timeout: Annotated[float, typer.Option(help="Seconds for one kernel.")] = 300,
    sanitizer: Annotated[
        bool,
        typer.Option("--sanitizer", help="One case under compute-sanitizer as well."),
    ] = False,
    case: Annotated[
        str | None, typer.Option(help="Replay this case and record nothing.")
    ] = None,
    where: Where = None,
    as_json: Json = False,
) -> None:
    """Run kernels on this machine's GPU against a float64 reference, and write the records."""
    if sanitizer and case is not None:
        raise typer.BadParameter("--sanitizer chooses its case; leave --case out")
    with _reported(), _executor(where, jobs) as executor:
        from .evidence import validate as hardware

        hardware.run(
            paths,
            out=out,
            executor=executor,
            timeout=timeout,
            sanitizer=sanitizer,
            case=case,
            as_json=as_json,
        )


@app.command()
def bench(
    paths: Paths,
    out: Out = GENERATED,
    against: Annotated[
        str | None,
        typer.Option(
            help="Peers, of cudnn,fa3,fa4,flash,flex; default: all installed but the last two."
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Times each contender is timed.")
    ] = 5,
    regime: Annotated[
        str | None,
        typer.Option(help="Of graph,eager,burst,sustained; default: all."),
    ] = None,
    seqlen: Annotated[
        str | None, typer.Option(help="Lengths of dynamic sides, such as 512,1024.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="batch * queries, such as 16384,65536.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Whatever --seqlen.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTHS,...",
            help="Of packed sequences: 8x2048, 16x128:8192 (drawn), 2048/32768 (queries/keys),"
            " 64x1/8192+2048/8192 (one batch) or zipf.",
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(help="Of paged K and V, vllm,nhd: K beside V, or two tensors."),
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads.")] = None,
    documents: Annotated[
        str | None,
        typer.Option(
            metavar="LOW:HIGH",
            help="Lengths of documents, for masks that read some; default: 512:4096.",
        ),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LOW:HIGH",
            help="Another input of masks, such as window_left=1023 or prefix=0:512.",
        ),
    ] = None,
    seed: Annotated[
        str, typer.Option(help="Of these draws; 0,1,2: a problem for each.")
    ] = "0",
    grid: Annotated[
        Path | None, typer.Option(help="CSV file with a problem per row.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for all rounds.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="File for a picture, .png or .svg.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write the figures into the records.")
    ] = False,
) -> None:
    """Time kernels beside their peers in one run on this machine's GPU."""
    seqlens, totals = _counts("--seqlen", seqlen), _counts("--tokens", tokens)
    ranges = dict(_range("--param", *each.partition("=")[::2]) for each in param or ())
    if documents is not None:
        ranges |= [_range("--documents", "documents", documents)]
    seeds = _counts("--seed", seed, least=0)
    with _reported():
        from .bench import command as race
        from .bench.timing import REGIMES

        race.run(
            paths,
            choice=race.Choice(
                *(seqlens, totals, batch, heads, grid, ranges, seeds),
                sequences=() if lengths is None else _listed(lengths),
                pools=() if pool is None else _listed(pool),
            ),
            against=None if against is None else _listed(against),
            rounds=rounds,
            regimes=REGIMES if regime is None else _listed(regime),
            json_file=json_file,
            plot_file=plot_file,
            record=record,
            out=out,
        )


@app.command()
def tune(
    paths: Annotated[list[Path], typer.Argument(metavar="SPEC...", show_default=False)],
    out: Out = GENERATED,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List the candidates; needs no GPU."),
    ] = False,
    fix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD[=VALUES]", help="Keep a field, or try only these values."
        ),
    ] = None,
    seqlen: Annotated[
        str | None, typer.Option(help="Lengths of dynamic sides, such as 512,1024.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Whatever --seqlen.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads.")] = None,
    jobs: Jobs = None,
    timeout: Annotated[
        int, typer.Option(min=1, help="Seconds to check or time a kernel once.")
    ] = 60,
    journal: Annotated[
        Path | None, typer.Option(help="Folder of journals; default: OUT/records.")
    ] = None,
    where: Where = None,
    as_json: Json = False,
) -> None:
    """Find the fastest numbers of specs on this machine's GPU, and write them into the specs."""
    lengths = _counts("--seqlen", seqlen)
    with _reported(), _executor(where, jobs) as executor:
        from .bench.command import Choice
        from .tune import command as tuner
        from .tune import space

        try:
            fixed = space.fixed_values(fix or ())
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--fix") from error

        options = tuner.Options(
            choice=Choice(lengths, (), batch, heads),
            fixed=fixed,
            limit=timeout,
            out=out,
            journals=journal,
            executor=executor,
        )
        tuner.run(paths, options, dry_run=dry_run, as_json=as_json)


@app.command()
def vendor(
    kernels: Annotated[
        list[str] | None, typer.Argument(metavar="KERNEL...", show_default=False)
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help="Folder to copy kernels into.")
    ] = None,
    update: Annotated[
        Path | None, typer.Option(help="Folder whose kernels to renew.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Folder of the generated kernels; default: generated, else the packaged ones.",
        ),
    ] = None,
    init: Annotated[
        bool,
        typer.Option("--init", help="Also a package that chooses among the kernels."),
    ] = False,
    adapter: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Also the package, and how it fits into these: flash_attention, pytorch, sglang,"
            " transformers, vllm.",
        ),
    ] = "",
    jobs: Jobs = None,
) -> None:
    """Copy kernels into another repository, with licence, evidence and a lock.

    KERNEL is a name, a generated file, or a spec or a folder of specs, which are built first.
    """
    folder = update or into
    if folder is None or (kernels is None) == (into is not None) or (into and update):
        raise typer.BadParameter("either KERNEL... --into DIR, or --update DIR")
    with _reported():
        from .build import shipped
        from .vendoring import command as copies

        kernels = _built(kernels, source or GENERATED, jobs) if kernels else None
        names = list(kernels) if kernels else copies.stems_in(folder)
        source = source or shipped.source(names, GENERATED, update=update is not None)
        adapters = tuple(adapter.split(",") if adapter else ())
        options = copies.Options(folder, source, tuple(kernels or ()), init, adapters)
        result = copies.vendor(options)
        print(copies.to_text(result, folder))
    raise typer.Exit(1 if result.refused else 0)


def _built(kernels: list[str], out: Path, jobs: int | None) -> list[str]:
    """KERNELs by name, once those that are specs, or folders of specs, are built."""
    from .build import engine
    from .errors import CheckFailed

    names: list[str] = []
    specs: list[Path] = []
    for kernel in kernels:
        path = Path(kernel)
        found = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
        if not found:
            raise CheckFailed(f"{path}: a folder without specs")
        specs += [file for file in found if file.suffix == ".yaml"]
        names += [x.stem if x.suffix == ".yaml" else kernel for x in found]
    if specs:
        with _executor(None, jobs) as executor, _progress() as progress:
            result = engine.build(specs, out, executor=executor, progress=progress)
        _print_build(result)
        if not result.ok:
            raise CheckFailed("\n".join(result.failures))
    return names


@app.command()
def kernels(as_json: Json = False) -> None:
    """List the kernels of this package, whose names stand for their specs, and their rungs."""
    from .build import shipped
    from .evidence import table as evidence

    with _reported():
        if as_json:
            _print_json(evidence.shipped_kernels())
            return
        table = Table(box=None, pad_edge=False)
        for title in evidence.TITLES:
            table.add_column(title)
        for record in evidence.load(shipped.generated()):
            table.add_row(record["kernel"], *evidence.row(record)[1:])
    _console().print(table)


@app.command()
def verify(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", show_default=False)],
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|packaged",
            help="A checkout, a folder of kernels, or the packaged ones: what is out of date?",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say of copies of kernels whether they are intact, reformatted, edited or out of date."""
    from . import verify as copies
    from .build import shipped

    paths = [p if p.exists() else shipped.kernel_of(p) or p for p in paths]
    if against == Path("packaged") and not against.exists():
        against = shipped.generated()
    raise typer.Exit(copies.run(paths, against=against, as_json=as_json))


@app.command()
def diff(
    sides: Annotated[
        list[str] | None, typer.Argument(metavar="[A] [B] [PATH]...")
    ] = None,
    out: Out = GENERATED,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="For a pull request's comment.")
    ] = False,
    compile: Annotated[
        bool | None,
        typer.Option(
            help="Compile B here whatever its records say, or nothing at all;"
            " default: what no record knows.",
            show_default=False,
        ),
    ] = None,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Show what a change does: source, plan, resources, main loop, rung; status 1 if any.

    A and B are two specs, kernels or folders of either; or two git revisions, the second one the
    working tree if left out, the first one HEAD; then only the kernels of the PATHs.
    """
    with _reported(), _progress() as progress:
        from .build import shipped
        from .diff import command, report

        named = [
            side if Path(side).exists() else str(shipped.kernel_of(side) or side)
            for side in sides or []
        ]
        changes = command.changes(
            named, command.Options(out, compile, jobs), progress=progress
        )
    if as_json:
        _print_json(report.to_json(changes))
    else:
        print(report.render(changes, "markdown" if markdown else "text"), end="")
    raise typer.Exit(int(any(change.kind != "same" for change in changes)))


@app.command()
def site(
    folder: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    specs: Annotated[
        Path | None,
        typer.Option(
            help="A spec or a folder of specs; default: specs, else the packaged ones."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the generated kernels; default: generated, with packaged"
            " specs the packaged ones."
        ),
    ] = None,
) -> None:
    """Make a static site: pictures, plans, sources and evidence of kernels that are built."""
    with _reported():
        from .build import shipped
        from .show.website import command as website

        if specs is None and not SPECS.exists():
            specs, out = shipped.specs(), out or shipped.generated()
        specs, out = specs or SPECS, out or GENERATED
        changed = website.write([specs], out, folder)
        print(f"{folder / 'index.html'}: {changed} files changed")


@app.command()
def matrix(
    paths: Paths,
    dsl: Annotated[
        str | None,
        typer.Option(help="Versions to install, such as 4.6.x,4.7.1,4.8.1[cu13]."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VERSION=PYTHON", help="An interpreter that has this version."
        ),
    ] = None,
    python: Annotated[
        str, typer.Option(help="Interpreter that makes the environments.")
    ] = sys.executable,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Run them in the emulator as well.")
    ] = False,
    out: Out = GENERATED,
    jobs: Jobs = None,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds for one compile.")
    ] = 300,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Markdown file for the table, made if it is not there, else between its marks"
            " <!-- matrix: begin --> and <!-- matrix: end -->; the data goes beside it, as .json."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile kernels under several versions of the DSL, and compare with their records.

    Each version that is installed for it takes some 400 MB in the cache and stays there.
    """
    versions, given = _listed(dsl or ""), env or []
    if not versions and not given:
        raise typer.BadParameter("no version is given", param_hint="--dsl, --env")
    with _reported():
        from .compat import command

        command.run(
            paths,
            out=out,
            versions=versions,
            given=given,
            python=python,
            options=command.Options(timeout, emulate),
            jobs=jobs,
            write=write,
            as_json=as_json,
        )


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    from .show import schema as fields

    _print_json(fields.schema())


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine can do, and what is missing."""
    from .host import doctor as examination

    findings = examination.examine()
    if as_json:
        _print_json(examination.to_json(findings))
    else:
        print(examination.to_text(findings))
    raise typer.Exit(0 if examination.can_build(findings) else 3)


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _counts(option: str, text: str | None, least: int = 1) -> tuple[int, ...]:
    """The whole numbers of a list with commas; none when there is no list."""
    try:
        counts = [int(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        counts = [-1]
    if any(count < least for count in counts):
        raise typer.BadParameter(
            f"{text!r} is no list such as 512,1024", param_hint=option
        )
    return tuple(dict.fromkeys(counts))


def _range(option: str, name: str, text: str) -> tuple[str, list[int]]:
    """A name with the bounds of its range, which are equal for a single number."""
    found = re.fullmatch(r"(-?[0-9]{1,8})(?::(-?[0-9]{1,8}))?", text)
    low, high = map(int, (found[1], found[2] or found[1])) if found else (1, 0)
    if not name or low > high:
        raise typer.BadParameter(
            f"{text!r} is no range such as 512:4096", param_hint=option
        )
    return name, [low, high]


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Turn errors that are meant for the user into text on stderr and an exit status."""
    try:
        yield
    except FmhaGenError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from error


def _executor(
    where: str | None, jobs: int | None
) -> contextlib.AbstractContextManager[Executor]:
    from .host.executor import opened

    try:
        return opened(where, jobs)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--executor") from error


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """A bar on a terminal while kernels are made; in a log a line now and then."""
    if not sys.stderr.isatty():
        yield _Said()
        return
    columns = (
        TextColumn("{task.fields[what]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", visible=False, what="")

        def show(what: str, done: int, total: int, stem: str) -> None:
            bar.update(
                task,
                what=what,
                completed=done,
                total=total,
                description=stem,
                visible=True,
            )

        yield show


class _Said:
    """Says in a log what is done: a line when a part of the work begins, and then now and then."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, what: str, done: int, total: int, stem: str) -> None:
        now = time.monotonic()
        if done == 1 and total > 1:
            self._say(f"{what} {total} kernels", now)
        elif now - self._last >= SAY_SECONDS and 1 < done < total:
            self._say(f"{what} kernels: {done} of {total}", now)

    def _say(self, text: str, now: float) -> None:
        print(text, file=sys.stderr, flush=True)
        self._last = now


def _export(result: BuildResult, folder: Path, executor: Executor) -> None:
    from .build.export import Source, export

    sources = [
        Source(kernel.stem, kernel.text, kernel.report.arch)
        for kernel in result.kernels
        if kernel.report is not None
    ]
    export(sources, folder, executor)


def _print_build(result: BuildResult) -> None:
    from .evidence import table as evidence

    if result.checked:
        from .build.engine import CHECKED
        from .build.tree import shortened

        for change in result.changes:
            kind = CHECKED.get(change.kind, change.kind)
            print(f"{kind}: {change.path}\n{shortened(change.diff)}", end="")
    table = Table(box=None, pad_edge=False)
    for title in ("kernel", "rung", "registers", "shared memory", "state"):
        table.add_column(title, justify="right" if title in _NUMBERS else "left")
    for kernel in result.kernels:
        report = kernel.report
        table.add_row(
            kernel.stem,
            kernel.rung,
            "" if report is None else evidence.registers(report.to_json()),
            f"{kernel.shared_bytes} B",
            "failed" if kernel.failures else kernel.state,
        )
    for orphan in result.orphans:
        table.add_row(orphan.stem, orphan.rung, "", "", orphan.state)
    _console().print(table)


_NUMBERS = frozenset({"registers", "shared memory"})


def _build_json(result: BuildResult) -> dict[str, Any]:
    return {
        "ok": result.ok,
        "checked": result.checked,
        "compiles": result.compiles,
        "failures": list(result.failures),
        "changes": [
            {"path": change.path, "kind": change.kind, "diff": change.diff}
            for change in result.changes
        ],
        "kernels": [
            {
                "kernel": kernel.stem,
                "rung": kernel.rung,
                "state": kernel.state,
                "body_sha256": kernel.entry.body,
                "shared_bytes": kernel.shared_bytes,
                "compiled": kernel.report.to_json() if kernel.report else None,
                "failures": list(kernel.failures),
            }
            for kernel in result.kernels
        ],
        "orphans": [
            {"kernel": orphan.stem, "rung": orphan.rung, "state": orphan.state}
            for orphan in result.orphans
        ],
    }


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, sort_keys=True))


def _console() -> Console:
    """Stdout; without colours and line breaks when it is not a terminal."""
    if sys.stdout.isatty():
        return Console()
    return Console(color_system=None, force_terminal=False, width=PIPE_WIDTH)


if __name__ == "__main__":
    main()
