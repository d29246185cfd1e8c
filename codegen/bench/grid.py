# SPDX-License-Identifier: Apache-2.0
"""A grid: a CSV file of problems, for runs in which kernels differ in what they are timed at.

Columns, all required: ``dtype``, ``head_dim`` (``128``, or ``192x128`` for qk and v), ``mask``,
``q_per_kv``, ``batch``, ``seqlen`` (queries and keys) and ``best/fa4``: the speed of the best peer
known over FA4's, from another run, for a peer that cannot be installed here; may be empty.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CheckFailed, UsageProblem, quoted
from ..ops import scores
from ..ops.cases import DYNAMIC
from ..ops.masks import word_of
from .problems import Problem, default_heads, problem_for

COLUMNS = ("dtype", "head_dim", "mask", "q_per_kv", "batch", "seqlen", "best/fa4")


@dataclass(frozen=True)
class Row:
    """One problem of a grid. best_over_fa4: see ``best/fa4``, None when empty."""

    dtype: str
    d_qk: int
    d_v: int
    mask: str
    q_per_kv: int
    batch: int
    seqlen: int
    best_over_fa4: float | None

    def problem(self, spec: Mapping[str, Any]) -> Problem | None:
        """The problem as the kernel of a SPEC computes it; None when it computes another."""
        asked = (self.dtype, self.d_qk, self.d_v, self.mask, self.q_per_kv)
        dims = spec["head_dim"]
        made = (spec["dtype"], dims["qk"], dims["v"], word_of(spec), spec["q_per_kv"])
        lengths = spec["seqlen"].values()
        if (
            made != asked
            or scores.word_of(spec)
            or any(n not in (DYNAMIC, self.seqlen) for n in lengths)
        ):
            return None
        if spec.get("sink"):
            return None
        heads, rows = default_heads(spec), self.seqlen
        return problem_for(spec, batch=self.batch, heads=heads, q=rows, kv=rows)

    def __str__(self) -> str:
        dim = f"{self.d_qk}" if self.d_qk == self.d_v else f"{self.d_qk}x{self.d_v}"
        group = f" GQA {self.q_per_kv}" if self.q_per_kv > 1 else ""
        return f"d{dim} {self.dtype} {self.mask}{group} b{self.batch} s{self.seqlen}"


def load(path: Path) -> list[Row]:
    """The rows of a grid file. CheckFailed names file and line, UsageProblem the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(f"{path}: cannot be read: {error}") from error
    lines = csv.reader(text.splitlines(), strict=True)
    rows: list[Row] = []
    seen: dict[Row, int] = {}
    try:
        head = next(lines, [])
        if tuple(head) != COLUMNS:
            raise ValueError(f"the columns must be {','.join(COLUMNS)}")
        for cells in lines:
            rows.append(_row(cells))
            asked = replace(rows[-1], best_over_fa4=None)
            if (first := seen.setdefault(asked, lines.line_num)) != lines.line_num:
                raise ValueError(f"the same as line {first}")
    except (ValueError, csv.Error) as error:
        raise CheckFailed(f"{path}:{max(1, lines.line_num)}: {error}") from error
    if not rows:
        raise CheckFailed(f"{path}: no rows")
    return rows


def _row(cells: list[str]) -> Row:
    if len(cells) != len(COLUMNS):
        raise ValueError(f"{len(cells)} cells instead of {len(COLUMNS)}")
    cell = dict(zip(COLUMNS, cells, strict=True))
    qk, _, v = cell["head_dim"].partition("x")
    d_qk = _count("head_dim", qk)
    return Row(
        dtype=_one_of("dtype", cell["dtype"], "bf16", "fp16"),
        d_qk=d_qk,
        d_v=_count("head_dim", v) if v else d_qk,
        mask=_one_of("mask", cell["mask"], "none", "causal"),
        q_per_kv=_count("q_per_kv", cell["q_per_kv"]),
        batch=_count("batch", cell["batch"]),
        seqlen=_count("seqlen", cell["seqlen"]),
        best_over_fa4=_factor("best/fa4", cell["best/fa4"]),
    )


def _count(column: str, text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise ValueError(f"{column}: {quoted(text)} is no count")
    return int(text)


def _one_of(column: str, text: str, *known: str) -> str:
    if text not in known:
        raise ValueError(f"{column}: {quoted(text)} is none of {', '.join(known)}")
    return text


def _factor(column: str, text: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value < math.inf:
        raise ValueError(f"{column}: {quoted(text)} is no factor of at least 1")
    return value
