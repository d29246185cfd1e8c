# SPDX-License-Identifier: Apache-2.0
"""The files of a vendored folder that are not copies: README, package, licence."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import evidence, render
from ..diff.kernels import KernelState
from ..errors import CheckFailed, EnvironmentProblem
from .source import Source

README = "README.md"
LICENSE = "LICENSE"
PACKAGE = "__init__.py"

EDITED = "edited here"  # in place of a rung: the evidence is about another text
TITLES = ("kernel", "made for", "rung", "GPU", "driver", "DSL", "error over its bound")

_DISTRIBUTION = "fmha-gen"
_WORDS = re.compile(r"(\D*)(\d*)")


def readme(
    source: Source,
    commit: str,
    kernels: Sequence[tuple[KernelState, bool]],
    package: str | None,
) -> str:
    """The folder's README. kernels: each with whether it was edited; package: name to import."""
    rows = [TITLES, *(_row(state, edited) for state, edited in kernels)]
    values = {
        "version": source.version,
        "commit": commit,
        "dsl": source.dsl,
        "table": evidence.markdown(rows),
        "package": package,
        "stem": kernels[0][0].stem,
    }
    return render.render_template("vendor/readme.md.j2", values)


def package(kernels: Sequence[KernelState]) -> str:
    """The text of `__init__.py`, which chooses among the kernels."""
    values = {
        "stems": [state.stem for state in kernels],
        "lse": any(_summary(state)[1] for state in kernels),
    }
    return render.format_source(render.render_template("vendor/init.py.j2", values))


def licence() -> str:
    """The text of our licence, from the installed package or the checkout."""
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    found = [Path(str(file.locate())) for file in files if file.name == LICENSE]
    for path in (*found, Path(__file__).resolve().parents[2] / LICENSE):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise EnvironmentProblem("the licence of fmha-gen is not installed with it")


def naturally(stem: str) -> list[tuple[str, int]]:
    """Sorts d64 before d128, as formatters of imports do."""
    return [(text, int(digits or 0)) for text, digits in _WORDS.findall(stem)]


def made_for(spec: Mapping[str, Any]) -> str:
    """A kernel's SPEC in words."""
    qk, v = spec["head_dim"]["qk"], spec["head_dim"]["v"]
    lengths = {side: spec["seqlen"][side] for side in ("q", "kv")}
    fixed = [f"{side} {n}" for side, n in lengths.items() if n != "dynamic"]
    words = [
        f"{spec['arch']} {spec['dtype']}",
        f"head_dim {qk}" if qk == v else f"head_dim {qk} with {v}",
        "causal" if spec["mask"] == "causal" else "no mask",
        f"seqlen {', '.join(fixed)}" if fixed else "any seqlen",
    ]
    if spec["q_per_kv"] > 1:
        words.append(f"{spec['q_per_kv']} query heads per KV head")
    return ", ".join([*words, "lse"] if spec["lse"] else words)


def _summary(state: KernelState) -> tuple[str, bool]:
    """What a kernel is made for, and whether it gives an LSE; of a text of any kind."""
    try:
        return made_for(state.spec), bool(state.spec["lse"])
    except (CheckFailed, LookupError, TypeError, ValueError):  # edited by hand
        return evidence.NOTHING, False


def _row(state: KernelState, edited: bool) -> tuple[str, ...]:
    name, words = f"[{state.stem}]({state.stem}.py)", _summary(state)[0]
    if edited:
        return name, words, EDITED, *[evidence.NOTHING] * 4
    record = state.record
    ran = record.get("validated", {})
    proof = ran or record.get("emulated", {})
    known = proof or record.get("compiled", {})
    return (
        name,
        words,
        record["rung"],
        ran.get("gpu", evidence.NOT_RUN if proof else evidence.NOTHING),
        ran.get("driver", evidence.NOTHING),
        known.get("dsl", evidence.NOTHING),
        evidence.over_bound(proof.get("worst")),
    )
