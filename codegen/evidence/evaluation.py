# SPDX-License-Identifier: Apache-2.0
"""What the rungs above `compiled` share: which kernels, one process each, the record, the table."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..build import records, tree
from ..build.render import body_digest, stated_digests
from ..errors import CheckFailed, UsageProblem
from ..host.executor import Executor, Task, in_order
from ..host.processes import Event
from ..ops.compare import names_of_others

DEFAULT_OUT = Path("generated")
PLAIN_WIDTH = 10_000  # columns of a piped table: none is cut
MOST_SHOWN = 20  # findings of a kernel


@dataclass(frozen=True)
class Finding:
    """One thing that did not hold. case: its name, or the phase the process was in."""

    case: str
    text: str


def kernel_files(paths: Sequence[str | Path], out: Path = DEFAULT_OUT) -> list[Path]:
    """The kernels that paths stand for, by stem, once each. UsageProblem when there is none."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        for kernel in _kernels_of(path, out):
            if not kernel.is_file():
                made = path.is_file() or path.is_dir()
                hint = f"; run: fmha-gen build {path}" if made else ""
                raise UsageProblem(f"{kernel}: no such kernel{hint}")
            found.setdefault(kernel.resolve(), kernel)
    if not found:
        raise UsageProblem(f"no kernels in {', '.join(map(str, paths))}")
    return sorted(found.values(), key=lambda kernel: (kernel.stem, str(kernel)))


def _kernels_of(path: Path, out: Path) -> Iterator[Path]:
    if path.is_dir():
        for specs in sorted(path.glob("*.yaml")):
            yield out / f"{specs.stem}.py"
        for kernel in sorted(path.glob("*.py")):
            if kernel.is_file() and stated_digests(
                kernel.read_text(encoding="utf-8", errors="replace")
            ):
                yield kernel
    elif path.suffix in (".yaml", ".yml"):
        yield out / f"{path.stem}.py"
    else:
        yield path


class Outcome(Protocol):
    """What one kernel showed. result: the rung's object, None when it was not earned."""

    @property
    def kernel(self) -> Path:
        """The kernel's file."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What did not hold."""

    @property
    def result(self) -> Mapping[str, Any] | None:
        """The rung's object of the record."""


class OutcomeOfErrors(Protocol):
    """What has errors to show."""

    @property
    def worst(self) -> Worst:
        """The largest."""


OutcomeT = TypeVar("OutcomeT", bound=Outcome)
T = TypeVar("T")


def evaluate(
    kernels: Sequence[Path],
    ask: Callable[[str, str], Task[T]],
    judge: Callable[[Path, T | CheckFailed], OutcomeT],
    executor: Executor,
    *,
    gpu: bool,
    rung: str,
    above: Sequence[str],
    recorded: bool,
    progress: Callable[[OutcomeT], object],
) -> list[OutcomeT]:
    """Run a task for every kernel, and write the records.

    ask: the task of a stem and a text; judge: from what it found to a verdict, CheckFailed when it
    could not be run. above: rungs that fall with this one. recorded: whether records are written at
    all. When either raises, no further task is started and all processes end.
    """
    texts = [kernel.read_text(encoding="utf-8") for kernel in kernels]
    tasks = [
        ask(kernel.stem, text) for kernel, text in zip(kernels, texts, strict=True)
    ]
    outcomes: list[OutcomeT] = []
    with contextlib.closing(executor.run(tasks, gpu=gpu)) as results:
        for result in in_order(results):
            number = len(outcomes)
            outcome = judge(kernels[number], result)
            if recorded:
                body = body_digest(texts[number])
                write_record(outcome, body, rung=rung, above=above)
            progress(outcome)
            outcomes.append(outcome)
    return outcomes


def write_record(
    outcome: Outcome, body: str, *, rung: str, above: Sequence[str]
) -> None:
    """Add the rung to the kernel's record; a kernel that failed loses it, and those above it.

    ``body``: the digest of the text that ran.
    """
    root, stem = outcome.kernel.parent, outcome.kernel.stem
    path = records.path_of(stem)
    with tree.exclusive(root, wait=True):
        if body_digest(outcome.kernel.read_text(encoding="utf-8")) != body:
            raise CheckFailed(
                f"{outcome.kernel}: changed while it ran; its record is as it was"
            )
        data = tree.read(root, path)
        record = None if data is None else records.parse(data, str(root / path))
        if outcome.result is not None:
            record = records.merge_rung(
                record, kernel=stem, body_sha256=body, rung=rung, result=outcome.result
            )
        elif record is not None:
            lower = {key: record[key] for key in record if key not in (rung, *above)}
            record = records.current(lower, kernel=stem, body_sha256=body)
        if record is not None:
            tree.apply(root, tree.compare(root, {path: records.dump(record)}, {}))


@contextlib.contextmanager
def progress_bar(
    title: str, total: int, *, redraws: bool = True
) -> Iterator[Callable[[object], None]]:
    """A bar on a terminal's standard error; what it yields is called once per outcome.

    redraws: also in between, by a thread, which whoever measures the host's time must not have.
    """
    stderr = Console(stderr=True)
    with Progress(
        console=stderr,
        transient=True,
        auto_refresh=redraws,
        disable=not stderr.is_terminal,
    ) as bar:
        task = bar.add_task(title, total=total)
        bar.refresh()

        def advance(_outcome: object) -> None:
            bar.advance(task)
            bar.refresh()

        yield advance


def print_table(draw: Callable[[bool], Table]) -> None:
    """Print what ``draw(plain)`` returns; plain, without colours, when it is not a terminal."""
    console = Console(markup=False)
    if not console.is_terminal:
        console = Console(
            width=PLAIN_WIDTH, no_color=True, highlight=False, markup=False
        )
    console.print(draw(not console.is_terminal))


def table(
    columns: Mapping[str, Literal["left", "right"]],
    rows: Iterable[Sequence[str]],
    *,
    plain: bool,
) -> Table:
    """A table of columns by title, each with its justification."""
    view = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=not plain)
    for title, justify in columns.items():
        view.add_column(title, justify=justify, no_wrap=True)
    for row in rows:
        view.add_row(*row)
    return view


def failures(
    outcomes: Sequence[OutcomeT], replay: Callable[[OutcomeT, Finding], str]
) -> str:
    """Findings with their kernel and case, and how to see them again; empty when all held.

    Of a kernel MOST_SHOWN at most. replay: the command that shows a finding; those that share one
    stand together.
    """
    lines = []
    for outcome in outcomes:
        shown: dict[str, list[Finding]] = {}
        for finding in outcome.findings[:MOST_SHOWN]:
            shown.setdefault(replay(outcome, finding), []).append(finding)
        for command, findings in shown.items():
            lines += [f"{outcome.kernel}: {f.case}: {f.text}" for f in findings]
            lines.append(f"  replay: {command}")
        if (more := len(outcome.findings) - MOST_SHOWN) > 0:
            lines.append(f"{outcome.kernel}: {more} more findings: --json has them")
    return "\n".join(lines)


@dataclass(frozen=True)
class Worst:
    """The largest errors over what they may be, each with its case, or None where none was judged:
    of the first output, and by name of the others.
    """

    first: Mapping[str, Any] | None
    others: Mapping[str, Mapping[str, Any] | None]

    def to_json(self) -> dict[str, Any]:
        """As records have it: the others have their names in front."""
        named = {f"{name}_worst": worst for name, worst in self.others.items()}
        return {"worst": self.first, **named}


def worst_of(events: Sequence[Event]) -> Worst:
    """Of cases, or runs, of one kernel; a NaN was not judged."""
    judged = [event for event in events if not math.isnan(event["of_bound"])]
    names = dict.fromkeys(name for x in events for name in names_of_others(x))

    def worst(prefix: str) -> Mapping[str, Any] | None:
        key = f"{prefix}of_bound"
        known = [event for event in judged if event.get(key) is not None]
        found = max(known, key=lambda event: float(event[key]), default=None)
        return found and _rounded(found, prefix)

    return Worst(worst(""), {name: worst(f"{name}_") for name in names})


def _rounded(event: Event, prefix: str) -> dict[str, Any]:
    """Four significant digits: more would only change from run to run."""
    errors = {key: event[f"{prefix}{key}"] for key in ("of_bound", "absolute")}
    return {
        "case": event["case"],
        **{
            k: float(f"{v:.4g}") if isinstance(v, float) else v
            for k, v in errors.items()
        },
    }


def columns_of_others(
    outcomes: Sequence[OutcomeOfErrors],
) -> dict[str, Literal["left", "right"]]:
    """Columns of a table for the errors of the outputs but the first, by name."""
    names = dict.fromkeys(name for each in outcomes for name in each.worst.others)
    return dict.fromkeys(names, "right")


def cells_of_others(
    outcome: OutcomeOfErrors, outcomes: Sequence[OutcomeOfErrors]
) -> list[str]:
    """A cell for each of these columns: an error over what it may be."""
    found = (outcome.worst.others.get(name) for name in columns_of_others(outcomes))
    return [f"{worst['of_bound']:.2f}" if worst else "-" for worst in found]


def finite(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """JSON knows no infinity and no NaN: they become null."""
    if values is None:
        return None
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
