# SPDX-License-Identifier: Apache-2.0
"""What a tuning shows: while it runs, at its end, and to machines."""

from __future__ import annotations

import contextlib
import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from .. import evaluation, evidence
from ..bench.problems import Problem
from ..errors import shown
from ..spec import SpecFile
from .candidates import Candidate
from .journal import Terms
from .rounds import MIN_GAIN, seconds
from .search import CLOSE, Standing, Standings
from .space import FIELDS, Point

Columns = dict[str, Literal["left", "right"]]

LIVE_ROWS = 12  # of the best, while it runs
WAITING = "waiting"


@dataclass(frozen=True)
class Tuning:
    """One spec's candidates, the spec as it is first, and how they stand.

    terms, standings: None in a dry run, which has neither GPU nor times.
    """

    spec_file: SpecFile
    candidates: Sequence[Candidate]
    problems: Sequence[Problem]
    terms: Terms | None = None
    standings: Standings | None = None

    @property
    def incumbent(self) -> Candidate:
        """The spec as it is."""
        return self.candidates[0]

    @property
    def winner(self) -> Candidate | None:
        """Who takes the incumbent's place, if anybody."""
        body = self.standings.winner if self.standings else None
        return next((one for one in self.candidates if body and one.body == body), None)

    @property
    def diff(self) -> str:
        """What the winner changes in the spec; empty when the incumbent stays."""
        if self.winner is None:
            return ""
        path = self.spec_file.path
        lines = difflib.unified_diff(
            self.spec_file.text.splitlines(),
            self.winner.text.splitlines(),
            f"a/{path}",
            f"b/{path}",
            lineterm="",
        )
        return "\n".join(lines)

    def standing(self, candidate: Candidate) -> Standing:
        """Of a candidate; an empty one when it has not run."""
        if self.standings is None or candidate.rejection:
            return Standing()
        return self.standings.of.get(candidate.body, Standing())


# --- while it runs ------------------------------------------------------------------------


@contextlib.contextmanager
def live(
    tuning: Callable[[Standings], Tuning],
) -> Iterator[Callable[[Standings], None]]:
    """A table on a terminal's standard error that is drawn anew at each call; elsewhere nothing."""
    console = Console(stderr=True, markup=False)
    if not console.is_terminal:
        yield lambda standings: None
        return
    with Live(console=console, auto_refresh=False, transient=True) as view:

        def show(standings: Standings) -> None:
            view.update(_live_view(tuning(standings)), refresh=True)

        yield show


def _live_view(tuning: Tuning) -> Group:
    rows = _ranked(tuning)
    waiting = [one for one in rows if _verdict(tuning, one) == WAITING]
    shown_rows = [tuning.incumbent, *(one for one in rows if one not in waiting)]
    left = f", {len(waiting)} still to run" if waiting else ""
    title = f"{tuning.spec_file.stem}: {len(rows)} candidates{left}"
    return Group(title, _table(tuning, shown_rows[: LIVE_ROWS + 1], plain=False))


# --- at its end ---------------------------------------------------------------------------


def print_tuning(tuning: Tuning) -> None:
    """Print who ran and how they stand, or in a dry run who would and why the others would not."""
    print(_headline(tuning))
    rows = [tuning.incumbent, *_ranked(tuning)]
    evaluation.print_table(lambda plain: _table(tuning, rows, plain=plain))
    refused = [one for one in tuning.candidates if one.rejection]
    if tuning.standings is None and refused:
        evaluation.print_table(lambda plain: _refusals(refused, plain=plain))
    print(_counts(tuning))
    if tuning.standings is None:
        return
    if tuning.winner is not None:
        evaluation.print_table(lambda plain: _by_problem(tuning, plain=plain))
    print(conclusion(tuning))


def _headline(tuning: Tuning) -> str:
    names = ", ".join(str(problem) for problem in tuning.problems)
    where = "not run"
    if tuning.terms is not None:
        where = f"{tuning.terms.gpu}, driver {tuning.terms.driver}"
    return f"{tuning.spec_file.stem} ({where}): {names}"


def _table(tuning: Tuning, rows: Iterable[Candidate], *, plain: bool) -> Table:
    """time: over the incumbent's, of all problems; slowest at: the least good of them."""
    columns: Columns = dict.fromkeys((*FIELDS, "shared memory", "registers"), "right")
    if tuning.standings is not None:
        columns |= dict.fromkeys(("rounds", "time", "spread"), "right")
        columns |= {"slowest at": "left"}
    cells = [_row(tuning, one) for one in rows]
    return _wrapping(columns | {"verdict": "left"}, cells, plain=plain)


def _wrapping(columns: Columns, rows: Iterable[Sequence[str]], *, plain: bool) -> Table:
    """A table whose last column takes as many lines as it needs."""
    view = evaluation.table(columns, rows, plain=plain)
    view.columns[-1].no_wrap = False
    return view


def _row(tuning: Tuning, candidate: Candidate) -> tuple[str, ...]:
    return (
        *(shown(candidate.point[field]) for field in FIELDS),
        str(candidate.plan.smem_bytes) if candidate.plan else "-",
        _registers(candidate),
        *_figures(tuning, candidate),
        _verdict(tuning, candidate),
    )


def _figures(tuning: Tuning, candidate: Candidate) -> tuple[str, ...]:
    """rounds, time, spread and slowest at; none at all in a dry run."""
    standing = tuning.standing(candidate)
    score = standing.score
    if tuning.standings is None:
        return ()
    if candidate is tuning.incumbent:
        return ("-", "1.000", "-", "-")
    if score is None:
        return ("-", "-", "-", "-")
    slowest = max(score.problems, key=lambda name: score.problems[name])
    worst = f"{slowest}: {score.problems[slowest]:.3f}"
    return (str(standing.rounds), f"{score.time:.3f}", f"{score.spread:.3f}", worst)


def _registers(candidate: Candidate) -> str:
    report = candidate.kernel.report if candidate.kernel else None
    if report is None:
        return "-"
    return evidence.registers(report.to_json())


def _verdict(tuning: Tuning, candidate: Candidate) -> str:
    standing = tuning.standing(candidate)
    if candidate is tuning.incumbent:
        return "incumbent"
    if candidate is tuning.winner:
        return "winner"
    if candidate.rejection or standing.rejected:
        return f"rejected: {candidate.rejection or standing.rejected}"
    if tuning.standings is None:
        return "to run"
    if standing.score is None:
        return WAITING
    return "final" if standing.final else ""


def _ranked(tuning: Tuning) -> list[Candidate]:
    """Those that the plan and the build let through: who came furthest first, then by time."""

    def rank(candidate: Candidate) -> tuple[bool, bool, int, float]:
        standing = tuning.standing(candidate)
        time = standing.score.time if standing.score else 0.0
        failed = bool(standing.rejected)
        return candidate is not tuning.winner, failed, -standing.rounds, time

    return sorted((one for one in tuning.candidates[1:] if not one.rejection), key=rank)


def _refusals(refused: Sequence[Candidate], *, plain: bool) -> Table:
    """One row for those that are refused for the same reason."""
    groups: dict[str, list[Candidate]] = {}
    for one in refused:
        groups.setdefault(str(one.rejection), []).append(one)
    rows = [
        (*(_any_of(one.point[field] for one in group) for field in FIELDS), why)
        for why, group in groups.items()
    ]
    columns: Columns = dict.fromkeys(FIELDS, "right")
    return _wrapping(columns | {"rejected": "left"}, rows, plain=plain)


def _any_of(values: Iterable[int]) -> str:
    return ",".join(shown(value) for value in sorted(set(values)))


def _counts(tuning: Tuning) -> str:
    """How many there were, and who rejected how many before any run."""
    by = Counter(one.rejection.by for one in tuning.candidates if one.rejection)
    counts = [f"{len(tuning.candidates)} candidates with the incumbent"]
    counts += [f"{count} rejected by the {who}" for who, count in by.items()]
    hint = "" if tuning.standings is None else "; --dry-run lists these"
    return ", ".join(counts) + (hint if by else "")


def _by_problem(tuning: Tuning, *, plain: bool) -> Table:
    """TFLOPS of the incumbent in its first run, and of the winner by its ratio to it."""
    assert tuning.standings is not None and tuning.winner is not None
    score = tuning.standing(tuning.winner).score
    assert score is not None  # of a winner
    taken = seconds(tuning.standings.played, tuning.incumbent.body)
    rows = []
    for problem in tuning.problems:
        name = str(problem)
        tflops, ratio = problem.flops / taken[name] / 1e12, score.problems[name]
        figures = (f"{tflops:.0f}", f"{tflops / ratio:.0f}", f"{1 / ratio - 1:+.1%}")
        rows.append((name, *figures))
    columns: Columns = {"TFLOPS": "left"}
    columns |= dict.fromkeys(("incumbent", "winner", "faster"), "right")
    return evaluation.table(columns, rows, plain=plain)


def conclusion(tuning: Tuning) -> str:
    """The outcome in words, by the rule of `rounds.Score.proven`."""
    if tuning.winner is not None:
        won = tuning.standing(tuning.winner)
        assert won.score is not None
        changes = ", ".join(_changes(tuning.incumbent.point, tuning.winner.point))
        return (
            f"winner: {changes}: {won.score.gain:.1%} less time than the incumbent, "
            f"spread {won.score.spread:.1%}, {won.rounds} rounds"
        )
    standings = (tuning.standing(one) for one in tuning.candidates)
    finals = [one.score for one in standings if one.final and one.score]
    if not finals:
        return f"the incumbent stays: nobody came within {CLOSE - 1:.0%} of it"
    best = min(finals, key=lambda one: one.time)
    return (
        f"the incumbent stays: the best candidate takes {best.time:.3f} of its time, spread "
        f"{best.spread:.1%}, and has to save more than its spread and {MIN_GAIN:.1%}"
    )


def _changes(old: Point, new: Point) -> Iterator[str]:
    for field in FIELDS:
        if old[field] != new[field]:
            yield f"{field} {shown(old[field])} to {shown(new[field])}"


# --- to machines --------------------------------------------------------------------------


def as_json(tuning: Tuning) -> dict[str, Any]:
    """Plain data: every candidate with its time or the reason of its rejection."""
    return {
        "kernel": tuning.spec_file.stem,
        "spec": tuning.spec_file.path,
        "machine": _machine(tuning.terms),
        "problems": [str(problem) for problem in tuning.problems],
        "candidates": [_candidate_json(tuning, one) for one in tuning.candidates],
        "incumbent": dict(tuning.incumbent.point),
        "winner": dict(tuning.winner.point) if tuning.winner else None,
        "diff": tuning.diff,
        "conclusion": conclusion(tuning) if tuning.standings else None,
    }


def _machine(terms: Terms | None) -> Mapping[str, str] | None:
    if terms is None:
        return None
    return {"gpu": terms.gpu, "driver": terms.driver, "dsl": terms.dsl}


def _candidate_json(tuning: Tuning, candidate: Candidate) -> dict[str, Any]:
    standing = tuning.standing(candidate)
    report = candidate.kernel.report if candidate.kernel else None
    rejected: Mapping[str, str] | None = None
    if candidate.rejection:
        rejected = asdict(candidate.rejection)
    elif standing.rejected:
        rejected = {"by": "run", "why": standing.rejected, "code": ""}
    return {
        "values": dict(candidate.point),
        "body_sha256": candidate.body or None,
        "shared_bytes": candidate.plan.smem_bytes if candidate.plan else None,
        "setmaxnreg": report
        and sorted({n for kernel in report.kernels for n in kernel.setmaxnreg}),
        "rejected": rejected,
        "score": asdict(standing.score) if standing.score else None,
        "rounds": standing.rounds,
        "final": standing.final,
    }
