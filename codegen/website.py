# SPDX-License-Identifier: Apache-2.0
"""A static site about the shipped kernels: their pictures, plans, sources and evidence.

Plain HTML without scripts, and nothing from elsewhere. Pure but for `write`: the same specs,
kernels and records give the same bytes. `SITE.lock` says which files are ours, so that a folder
with anything else in it, or with a page that was edited, is refused.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup

from . import evidence, explain, plan, records, render, tree
from .errors import CheckFailed
from .picture import bench, page
from .picture.svg import STYLE, Panel, document
from .planning.kernel_plan import KernelPlan
from .spec import SpecFile, load_specs
from .verify import SPEC_DIGITS

LOCK: Final = "SITE.lock"
NARROW: Final = 400  # a panel up to this is never wider than a phone

_IN_WORDS: Final = (
    "compiled",
    "validated",
)  # the rungs that have no table of their own

_HEADS: Final = (*evidence.TITLES, "of best peer")

Row = tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """A kernel that the site is about: its plan, its text, and what its record proves."""

    plan: KernelPlan
    text: str
    record: records.Record
    record_text: str

    @property
    def stem(self) -> str:
        """The kernel's name."""
        return self.plan.stem

    @property
    def cells(self) -> Sequence[bench.Cell]:
        """What was timed; empty when nothing was."""
        found: Sequence[bench.Cell] = self.record.get("benchmarked", {}).get(
            "cells", ()
        )
        return found


def write(specs: Sequence[Path], generated: Path, folder: Path) -> int:
    """Make the site in a folder, or bring it up to date; how many files changed.

    Raises SpecError, or CheckFailed for a kernel that is not what its spec says and for a folder
    with files of others.
    """
    desired = files([load(spec, generated) for spec in load_specs(specs)])
    with tree.exclusive(folder):
        tree.recover(folder)
        known = _read_lock(folder)
        _refuse_foreign(folder, known)
        desired[LOCK] = _lock(desired)
        orphans = sorted(known.keys() - desired.keys())
        changes = tree.compare(folder, desired, {}, orphans)
        tree.apply(folder, changes)
    return len(changes)


def load(spec_file: SpecFile, generated: Path) -> Kernel:
    """Read a kernel and its record; its text must be whole, and of this spec and these numbers."""
    kernel = generated / f"{spec_file.stem}.py"
    try:
        text = kernel.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckFailed(f"{kernel}: not there; build it first") from error
    found = plan.resolve(spec_file)
    stated = render.stated_digests(text)
    numbers = [number.line for number in (*found.chosen, *found.derived)]
    if (
        stated is None
        or stated.spec != spec_file.digest[:SPEC_DIGITS]
        or not tree.intact(text, None)
        or not set(numbers) <= set(text.splitlines())
    ):
        raise CheckFailed(f"{kernel}: not what its spec says; build it again")
    path = generated / records.path_of(spec_file.stem)
    record = records.load(path)
    body = render.body_digest(text)
    current = records.current(record, kernel=spec_file.stem, body_sha256=body)
    return Kernel(found, text, current, records.dump(current))


def files(kernels: Sequence[Kernel]) -> dict[str, str]:
    """Return every file of the site but its lock, by path."""
    found = {
        "style.css": _template("style.css.j2", svg_style=STYLE),
        "index.html": _template(
            "index.html.j2",
            groups=_groups(kernels),
            heads=_HEADS,
            speeds=_speeds(kernels),
        ),
    }
    for kernel in kernels:
        place = f"kernels/{kernel.stem}"
        found[f"{place}.html"] = _template("kernel.html.j2", **_context(kernel))
        found[f"{place}.svg"] = page.render(kernel.plan)
        found[f"{place}.py"] = kernel.text
        found[f"{place}.yaml"] = kernel.plan.spec_file.text
        found[f"{place}.json"] = kernel.record_text
    return found


def _groups(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """By architecture, the oldest first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kernel in kernels:
        found.setdefault(kernel.plan.arch, []).append(_index_row(kernel))
    in_order = sorted(found.items(), key=lambda item: int(item[0].removeprefix("sm")))
    return [{"arch": arch, "rows": rows} for arch, rows in in_order]


def _speeds(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """The picture of all that was timed, if anything was."""
    timed = {kernel.stem: kernel.cells for kernel in kernels if kernel.cells}
    return [_figure(bench.speeds(timed))] if timed else []


def _index_row(kernel: Kernel) -> dict[str, Any]:
    name, *cells = evidence.row(kernel.record)
    return {
        "stem": name.strip("`"),
        "title": kernel.plan.context["title"].partition(": ")[2],
        "cells": list(zip(_HEADS[1:], [*cells, _speed(kernel.cells)], strict=True)),
    }


def _speed(cells: Sequence[bench.Cell]) -> str:
    """The least and the most of its best peer, over all cells."""
    if not cells:
        return evidence.NOTHING
    ratios = sorted(bench.ratio(cell) for cell in cells)
    ends = dict.fromkeys(f"{ratio:.2f}" for ratio in (ratios[0], ratios[-1]))
    return " to ".join(ends)


def _context(kernel: Kernel) -> dict[str, Any]:
    """What the template of a kernel's page reads."""
    found = kernel.plan
    body = render.body_digest(kernel.text)
    heads, *barriers = explain.barrier_rows(found)
    return {
        "stem": kernel.stem,
        "title": found.context["title"],
        "rung": kernel.record["rung"],
        "ran": "validated" in kernel.record,
        "memory": [_figure(panel) for panel in page.memory(found)],
        "phases": [_figure(panel) for panel in page.phases(found)],
        "steps": [(each.title, list(explain.step_rows(each))) for each in found.phases],
        "barrier_heads": heads,
        "barriers": barriers,
        "loads": list(explain.load_rows(found)),
        "numbers": list(explain.number_rows(found)),
        "fields": list(explain.spec_rows(found)),
        "registers": explain.register_lines(found),
        "statements": found.statements,
        "spec": found.spec_file.text,
        "evidence": [
            row
            for row in explain.evidence_rows(found, kernel.record, body)
            if row[0] in _IN_WORDS
        ],
        "instructions": _instructions(kernel.record),
        "emulated": _emulated(kernel.record),
        "benchmarked": kernel.record.get("benchmarked"),
        "cells": [_cell(cell) for cell in kernel.cells],
        "bench": [_figure(bench.bench(kernel.cells))] if kernel.cells else [],
        "absent": _absent(kernel.record),
    }


def _instructions(record: records.Record) -> list[Row]:
    counts = record.get("compiled", {}).get("instructions", {})
    return [(name, str(count)) for name, count in sorted(counts.items()) if count]


def _emulated(record: records.Record) -> list[Row]:
    found = record.get("emulated")
    if not found:
        return []
    rows: list[Row] = [
        ("cases", str(found["cases"])),
        ("schedules", ", ".join(found["schedules"])),
        ("findings", str(len(found["findings"]))),
    ]
    if worst := found["worst"]:
        said = (
            f"{worst['error']:.3g}, {worst['ratio']:.2f} times the 16-bit reference's"
        )
        rows.append(("worst error", f"{said}, in {worst['case']}"))
    return rows


def _cell(cell: bench.Cell) -> Row:
    name, _ = bench.best_peer(cell)
    peers = ", ".join(
        f"{peer} {of['graph_tflops']:.0f}" for peer, of in sorted(cell["peers"].items())
    )
    return (
        bench.problem(cell),
        f"{cell['graph_tflops']:.0f}",
        peers,
        f"{bench.ratio(cell):.2f} of {name}",
        f"{cell['eager_tflops']:.0f}",
        f"{cell['burst_tflops']:.0f}",
        f"{cell['sustained_tflops']:.0f}",
        f"{cell['host_us']:.1f}",
    )


def _absent(record: records.Record) -> list[str]:
    """Peers that could not be timed."""
    versions = record.get("benchmarked", {}).get("versions", {})
    return sorted(name for name, version in versions.items() if version is None)


def _figure(panel: Panel) -> dict[str, Any]:
    return {
        "title": panel.title,
        "svg": Markup(document(panel, style=False)),  # our own, escaped
        "narrow": panel.width <= NARROW,
    }


def _template(name: str, **values: object) -> str:
    return render.render_template(f"site/{name}", values, env=_environment())


@functools.cache
def _environment() -> jinja2.Environment:
    """The templates' environment, but for HTML: what a spec says is escaped."""
    return render.environment().overlay(autoescape=True)


def _lock(desired: Mapping[str, str]) -> str:
    lines = (f"{_digest(text)}  {path}\n" for path, text in sorted(desired.items()))
    return "".join(lines)


def _read_lock(folder: Path) -> dict[str, str]:
    """Digests by path, of what the site wrote last."""
    try:
        lines = (folder / LOCK).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    return {
        path: digest for digest, _, path in (line.partition("  ") for line in lines)
    }


def _refuse_foreign(folder: Path, known: Mapping[str, str]) -> None:
    for path in sorted(_paths(folder)):
        if path == LOCK:
            continue
        if path not in known:
            raise CheckFailed(f"{folder / path}: not of this site; choose a new folder")
        text = (folder / path).read_bytes()
        if hashlib.sha256(text).hexdigest() != known[path]:
            raise CheckFailed(f"{folder / path}: edited by hand; delete it first")


def _paths(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
