# SPDX-License-Identifier: Apache-2.0
"""The command line: prints, and maps outcomes to exit statuses; nothing else.

Status: 0 clean, 1 drift or a failed check, 2 bad spec or usage, 3 this machine cannot, 130 ^C.
Modules that a command needs are imported by that command, so that all start fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from .errors import FmhaGenError

if TYPE_CHECKING:
    from .build import BuildResult

INTERRUPTED = 130
PIPE_WIDTH = 200  # columns of a table that no terminal limits

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="YAML specs in, standalone CuTe DSL attention kernels out.",
)

Paths = Annotated[list[Path], typer.Argument(metavar="PATH...", show_default=False)]
Out = Annotated[Path, typer.Option("--out", help="Folder of the generated kernels.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="Parallel compiles; default: all cores."),
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
    out: Out = Path("generated"),
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
    export_to: Annotated[
        Path | None,
        typer.Option(
            "--export", help="Folder for an object and a C header of each kernel."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make kernels, lock and records from specs."""
    from . import build as engine

    if export_to is not None and (check or no_compile):
        raise typer.BadParameter(
            "needs a build that compiles and writes", param_hint="--export"
        )
    with _reported(), _progress() as progress:
        result = engine.build(
            paths,
            out,
            check=check,
            compile=not no_compile,
            jobs=jobs,
            force=force,
            progress=progress,
        )
        if export_to is not None and result.ok:
            _export(result, export_to, jobs)
    if as_json:
        _print_json(_build_json(result))
    else:
        _print_build(result)
    for failure in result.failures:
        print(failure, file=sys.stderr)
    raise typer.Exit(0 if result.ok else 1)


@app.command()
def explain(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", show_default=False)],
    out: Out = Path("generated"),
) -> None:
    """Show the plan: every number as given or derived, the budgets and the rung."""
    with _reported():
        from . import explain as report
        from . import plan, records
        from .spec import load_specs

        texts = []
        for spec_file in load_specs([spec]):
            record = records.load(out / records.path_of(spec_file.stem))
            texts.append(report.render(plan.resolve(spec_file), record))
        print("\n\n".join(texts))


@app.command()
def emulate(
    paths: Paths,
    out: Out = Path("generated"),
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
        typer.Option(help="Write a Chrome trace of one CTA's warps, in steps."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run kernels on a model of PTX: function and synchronisation; no timing, no silicon."""
    with _reported():
        from . import emulate as model

        model.run(
            paths,
            out=out,
            choice=model.Choice(schedules, case, completion, seed, timeline),
            jobs=jobs,
            timeout=timeout,
            as_json=as_json,
        )


@app.command()
def validate(
    paths: Paths,
    out: Out = Path("generated"),
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
    as_json: Json = False,
) -> None:
    """Run kernels on this machine's GPU against a float64 reference, and write the records."""
    with _reported():
        from . import validate as hardware

        hardware.run(
            paths,
            out=out,
            jobs=jobs,
            timeout=timeout,
            sanitizer=sanitizer,
            case=case,
            as_json=as_json,
        )


@app.command()
def bench(
    paths: Paths,
    out: Out = Path("generated"),
    against: Annotated[
        str | None,
        typer.Option(help="Peers, of cudnn,fa3,fa4; default: all that are installed."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Times each contender is timed.")
    ] = 5,
    seqlen: Annotated[
        str | None, typer.Option(help="Lengths of dynamic sides, such as 512,1024.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="batch * queries, such as 16384,65536.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Whatever --seqlen.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads.")] = None,
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
    lengths, totals = _counts("--seqlen", seqlen), _counts("--tokens", tokens)
    with _reported():
        from .bench import command as race

        race.run(
            paths,
            choice=race.Choice(lengths, totals, batch, heads, grid),
            against=None if against is None else _listed(against),
            rounds=rounds,
            json_file=json_file,
            plot_file=plot_file,
            record=record,
            out=out,
        )


@app.command()
def tune(
    paths: Annotated[list[Path], typer.Argument(metavar="SPEC...", show_default=False)],
    out: Out = Path("generated"),
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
    as_json: Json = False,
) -> None:
    """Find the fastest numbers of specs on this machine's GPU, and write them into the specs."""
    lengths = _counts("--seqlen", seqlen)
    with _reported():
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
            jobs=jobs,
            limit=timeout,
            out=out,
            journals=journal,
        )
        tuner.run(paths, options, dry_run=dry_run, as_json=as_json)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    from . import spec

    _print_json(spec.schema())


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine can do, and what is missing."""
    from . import doctor as examination

    findings = examination.examine()
    if as_json:
        _print_json(examination.to_json(findings))
    else:
        print(examination.to_text(findings))
    raise typer.Exit(0 if examination.can_build(findings) else 3)


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _counts(option: str, text: str | None) -> tuple[int, ...]:
    """The positive whole numbers of a list with commas; none when there is no list."""
    try:
        counts = [int(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        counts = [0]
    if any(count < 1 for count in counts):
        raise typer.BadParameter(
            f"{text!r} is no list such as 512,1024", param_hint=option
        )
    return tuple(dict.fromkeys(counts))


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


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """A bar on a terminal while kernels compile; elsewhere nothing at all."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", visible=False)

        def show(done: int, total: int, stem: str) -> None:
            bar.update(
                task, completed=done, total=total, description=stem, visible=True
            )

        yield show


def _export(result: BuildResult, folder: Path, jobs: int | None) -> None:
    from .export import Source, export

    sources = [
        Source(kernel.stem, kernel.text, kernel.report.arch)
        for kernel in result.kernels
        if kernel.report is not None
    ]
    export(sources, folder, jobs=jobs or os.cpu_count() or 1)


def _print_build(result: BuildResult) -> None:
    if result.checked:
        for change in result.changes:
            print(f"{change.kind}: {change.path}\n{change.diff}", end="")
    table = Table(box=None, pad_edge=False)
    for title in ("kernel", "rung", "registers", "shared memory", "state"):
        table.add_column(title, justify="right" if title in _NUMBERS else "left")
    states = {} if result.checked else {"missing": "added"}
    for kernel in result.kernels:
        report = kernel.report
        table.add_row(
            kernel.stem,
            kernel.rung,
            (
                ""
                if report is None
                else " / ".join(map(str, report.setmaxnreg or [report.registers]))
            ),
            f"{kernel.shared_bytes} B",
            "failed" if kernel.failures else states.get(kernel.state, kernel.state),
        )
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
