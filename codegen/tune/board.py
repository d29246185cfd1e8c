# SPDX-License-Identifier: Apache-2.0
"""How a tuning is shown: as tables and as JSON."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table

from ..bench.problems import Problem
from ..errors import shown
from ..evidence import evaluation, table
from ..spec.model import SpecFile
from .candidates import Candidate
from .halving import MIN_GAIN, Standing, Standings, winner
from .journal import Terms
from .space import FIELDS

Columns = dict[str, Literal["left", "right"]]


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
        """The candidate that takes the incumbent's place; None: the incumbent stays."""
        body = winner(self.standings or {})
        return next((one for one in self.candidates if body and one.body == body), None)

    @property
    def diff(self) -> str:
        """The winner's changes to the spec; empty when the incumbent stays."""
        if self.winner is None:
            return ""
        old, new, path = self.spec_file.text, self.winner.text, self.spec_file.path
        lines = difflib.unified_diff(
            *(old.splitlines(), new.splitlines(), f"a/{path}", f"b/{path}"), lineterm=""
        )
        return "\n".join(lines)

    def standing(self, candidate: Candidate) -> Standing:
        """Of a candidate; an empty one when it has not run."""
        return (self.standings or {}).get(candidate.body, Standing())


def print_tuning(tuning: Tuning) -> None:
    """Print all candidates and how they stand; in a dry run those to run and why others are not."""
    print(_headline(tuning))
    evaluation.print_table(lambda plain: _table(tuning, plain=plain))
    refused = [one for one in tuning.candidates if one.rejection]
    if tuning.standings is None and refused:
        evaluation.print_table(lambda plain: _refusals(refused, plain=plain))
    print(_counts(tuning))
    if tuning.winner is not None:
        evaluation.print_table(lambda plain: _by_problem(tuning, plain=plain))
    if tuning.standings is not None:
        print(conclusion(tuning))


def _headline(tuning: Tuning) -> str:
    names = ", ".join(map(str, tuning.problems))
    terms = tuning.terms
    where = f"{terms.gpu}, driver {terms.driver}" if terms else "not run"
    return f"{tuning.spec_file.stem} ({where}): {names}"


def _table(tuning: Tuning, *, plain: bool) -> Table:
    """time: over the incumbent's, of all problems; the candidates that came furthest first."""

    def rank(candidate: Candidate) -> tuple[bool, bool, int, float]:
        one = tuning.standing(candidate)
        time = one.score.time if one.score else 0.0
        return candidate is not tuning.winner, bool(one.rejected), -one.rounds, time

    columns: Columns = dict.fromkeys((*FIELDS, "shared memory", "registers"), "right")
    if tuning.standings is not None:
        columns |= dict.fromkeys(("rounds", "time", "spread"), "right")
    able = [one for one in tuning.candidates[1:] if not one.rejection]
    rows = [_row(tuning, one) for one in (tuning.incumbent, *sorted(able, key=rank))]
    return _wrapping(columns | {"verdict": "left"}, rows, plain=plain)


def _wrapping(columns: Columns, rows: Iterable[Sequence[str]], *, plain: bool) -> Table:
    """A table whose last column takes as many lines as it needs."""
    view = evaluation.table(columns, rows, plain=plain)
    view.columns[-1].no_wrap = False
    return view


def _row(tuning: Tuning, candidate: Candidate) -> tuple[str, ...]:
    assert (
        candidate.plan and candidate.kernel and candidate.kernel.report
    )  # it was built
    found, figures = tuning.standing(candidate), ["-"] * 3
    if found.score is not None:
        score = found.score
        figures = [str(found.rounds), f"{score.time:.3f}", f"{score.spread:.3f}"]
    verdict = "final" if found.final else ""
    if candidate is tuning.incumbent:
        verdict = "incumbent"
    elif candidate is tuning.winner:
        verdict = "winner"
    elif found.rejected:
        verdict = f"rejected: {found.rejected}"
    elif tuning.standings is None:
        verdict = "to run"
    return (
        *(shown(candidate.point[field]) for field in FIELDS),
        str(candidate.plan.smem_bytes),
        table.registers(candidate.kernel.report.to_json()),
        *(figures if tuning.standings is not None else ()),
        verdict,
    )


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
    """How many there were, and how many of them plan and build rejected."""
    by = Counter(one.rejection.by for one in tuning.candidates if one.rejection)
    counts = [f"{len(tuning.candidates)} candidates with the incumbent"]
    counts += [f"{count} rejected by the {who}" for who, count in by.items()]
    hint = "" if tuning.standings is None else "; --dry-run lists these"
    return ", ".join(counts) + (hint if by else "")


def _by_problem(tuning: Tuning, *, plain: bool) -> Table:
    """TFLOPS of incumbent and winner in the last step."""
    assert tuning.winner is not None
    score = tuning.standing(tuning.winner).score
    assert score is not None  # of a winner
    rows = []
    for problem in tuning.problems:
        name = str(problem)
        tflops = problem.flops / score.seconds[name] / 1e12
        ratio = score.problems[name]
        figures = (f"{tflops * ratio:.0f}", f"{tflops:.0f}", f"{1 / ratio - 1:+.1%}")
        rows.append((name, *figures))
    columns: Columns = {"TFLOPS": "left"}
    columns |= dict.fromkeys(("incumbent", "winner", "faster"), "right")
    return evaluation.table(columns, rows, plain=plain)


def conclusion(tuning: Tuning) -> str:
    """The outcome in words, by the rule of `halving.Score.proven`."""
    if tuning.winner is not None:
        won, old = tuning.standing(tuning.winner), tuning.incumbent.point
        assert won.score is not None
        changes = ", ".join(
            f"{field} {shown(old[field])} to {shown(value)}"
            for field, value in tuning.winner.point.items()
            if old[field] != value
        )
        return (
            f"winner: {changes}: {won.score.gain:.1%} less time than the incumbent, "
            f"spread {won.score.spread:.1%}, {won.rounds} rounds"
        )
    standings = map(tuning.standing, tuning.candidates)
    finals = [one.score for one in standings if one.final and one.score]
    if not finals:
        return "the incumbent stays: no candidate was timed to the end"
    best = min(finals, key=lambda score: score.time)
    return (
        f"the incumbent stays: the best candidate takes {best.time:.3f} of its time, spread "
        f"{best.spread:.1%}, and has to save more than its spread and {MIN_GAIN:.1%}"
    )


def as_json(tuning: Tuning) -> dict[str, Any]:
    """Plain data: every candidate with its time or the reason of its rejection."""
    terms = tuning.terms
    return {
        "kernel": tuning.spec_file.stem,
        "spec": tuning.spec_file.path,
        "machine": terms
        and {"gpu": terms.gpu, "driver": terms.driver, "dsl": terms.dsl},
        "problems": [str(problem) for problem in tuning.problems],
        "candidates": [_candidate_json(tuning, one) for one in tuning.candidates],
        "incumbent": dict(tuning.incumbent.point),
        "winner": dict(tuning.winner.point) if tuning.winner else None,
        "diff": tuning.diff,
        "conclusion": conclusion(tuning) if tuning.standings is not None else None,
    }


def _candidate_json(tuning: Tuning, candidate: Candidate) -> dict[str, Any]:
    found = tuning.standing(candidate)
    rejected: Mapping[str, str] | None = None
    if candidate.rejection:
        rejected = asdict(candidate.rejection)
    elif found.rejected:
        rejected = {"by": "run", "why": found.rejected, "code": ""}
    return {
        "values": dict(candidate.point),
        "body_sha256": candidate.body or None,
        "shared_bytes": candidate.plan.smem_bytes if candidate.plan else None,
        "rejected": rejected,
        "score": asdict(found.score) if found.score else None,
        "rounds": found.rounds,
        "final": found.final,
    }
