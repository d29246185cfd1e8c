# SPDX-License-Identifier: Apache-2.0
"""The page of a kernel, and its row on the first page."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...arch import ARCHITECTURES
from ...bench import draws, plot
from ...bench.results import OURS
from ...build import records, render, tree
from ...build.kernel_text import read_constants
from ...errors import CheckFailed
from ...evidence import table
from ...features.backward import is_backward, splits
from ...ops.forward import LSE
from ...planning import plan
from ...planning.kernel_plan import DevicePlan, KernelPlan
from ...spec.model import SpecFile
from ...verify import SPEC_DIGITS
from .. import backward, explain
from ..picture import page
from . import decisions
from .pages import Charts, figure

HEADS: Final = (*table.TITLES, "of best peer")

_IN_WORDS: Final = (
    "compiled",
    "validated",
)  # the rungs that have no table of their own

# The backward pass, of each architecture; pairs of CTAs; what adds to global memory in an order.
OF_BACKWARD: Final = {"sm90": ("0059",), "sm100": ("0059", "0062")}
OF_PAIRS: Final = ("0064",)
OF_ORDERED: Final = ("0060",)
OF_HALVES: Final = ("0068",)

_ROOT: Final = "../"  # from a kernel's page

Row = tuple[str, ...]
Cell = Mapping[str, Any]  # of a benchmark, as its record has it


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
    def cells(self) -> Sequence[Cell]:
        """What was timed; empty when nothing was."""
        return [cell for run in self.runs for cell in run["cells"]]

    @property
    def runs(self) -> Sequence[Mapping[str, Any]]:
        """What was timed, on each GPU."""
        found: Sequence[Mapping[str, Any]] = self.record.get("benchmarked", ())
        return found


def load(spec_file: SpecFile, generated: Path) -> Kernel:
    """Read a kernel and its record; its text must be whole, and of this spec and these numbers."""
    kernel = generated / f"{spec_file.stem}.py"
    try:
        text = kernel.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckFailed(f"{kernel}: not there; build it first") from error
    found = plan.resolve(spec_file)
    stated = render.stated_digests(text)
    numbers = {number.name: number.value for number in (*found.chosen, *found.derived)}
    if (
        stated is None
        or stated.spec != spec_file.digest[:SPEC_DIGITS]
        or not tree.intact(text, None)
        or not numbers.items() <= read_constants(text).items()
    ):
        raise CheckFailed(f"{kernel}: not what its spec says; build it again")
    path = generated / records.path_of(spec_file.stem)
    record = records.load(path)
    body = render.body_digest(text)
    current = records.current(record, kernel=spec_file.stem, body_sha256=body)
    return Kernel(found, text, current, records.dump(current))


def groups(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """Rows of the first page by architecture, the oldest first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kernel in kernels:
        found.setdefault(kernel.plan.arch, []).append(_index_row(kernel))
    in_order = sorted(found.items(), key=lambda item: int(item[0].removeprefix("sm")))
    return [{"arch": arch, "rows": rows} for arch, rows in in_order]


def _index_row(kernel: Kernel) -> dict[str, Any]:
    name, *cells = table.row(kernel.record)
    return {
        "stem": name.strip("`"),
        "title": _about(kernel.plan),
        "cells": list(zip(HEADS[1:], [*cells, _speed(kernel.cells)], strict=True)),
    }


def _about(plan: KernelPlan) -> str:
    """Its title but for the architecture, and for the operation where that is the usual one."""
    words = str(plan.context["title"].partition(": ")[2])
    return f"backward, {words}" if is_backward(plan.spec_file.spec) else words


def _speed(cells: Sequence[Cell]) -> str:
    """The least and the most of its best peer, over all cells."""
    if not cells:
        return table.NOTHING
    ratios = sorted(ratio(cell) for cell in cells)
    ends = dict.fromkeys(f"{one:.2f}" for one in (ratios[0], ratios[-1]))
    return " to ".join(ends)


def context(kernel: Kernel, charts: Charts) -> dict[str, Any]:
    """What the template of a kernel's page reads."""
    found = backward.shown(kernel.plan)
    body = render.body_digest(kernel.text)
    return {
        "stem": kernel.stem,
        "decision": functools.partial(decisions.link, root=_ROOT),
        "reasons": decisions.links(_reasons(found), _ROOT),
        "title": found.context["title"],
        "rung": kernel.record["rung"],
        "ran": "validated" in kernel.record,
        "kernels": [_device(found, each) for each in found.kernels],
        **_of_backward(found),
        "numbers": list(explain.number_rows(found)),
        "fields": list(explain.spec_rows(found)),
        "statements": found.statements,
        "spec": found.spec_file.text,
        "evidence": [
            row
            for row in explain.evidence_rows(found, kernel.record, body)
            if row[0] in _IN_WORDS
        ],
        "instructions": _instructions(kernel.record),
        "emulated": _emulated(kernel.record),
        "runs": [
            _run(run, f"kernels/{kernel.stem}.speed{number}.svg", charts)
            for number, run in enumerate(kernel.runs, start=1)
        ],
    }


def _of_backward(found: KernelPlan) -> dict[str, Any]:
    """The kernels, products and costs of a backward kernel; empty for others."""
    told = is_backward(found.spec_file.spec)
    return {
        "backward": told,
        "launched": list(backward.kernel_rows(found)) if told else [],
        "products": list(backward.product_rows(found)) if told else [],
        "costs": list(backward.cost_lines(found)) if told else [],
    }


def _device(found: KernelPlan, kernel: DevicePlan) -> dict[str, Any]:
    """What the template reads of one of a plan's kernels."""
    return {
        "name": kernel.name,
        "roles": list(backward.role_rows(found, kernel)),
        "memory": [
            figure(panel)
            for panel in (*page.memory(found, kernel), *page.flow(found, kernel))
        ],
        "phases": [figure(panel) for panel in page.phases(kernel)],
        "steps": [
            (each.title, list(explain.step_rows(each))) for each in kernel.phases
        ],
        "barriers": list(explain.barrier_rows(kernel)),
        "loads": list(explain.load_rows(kernel)),
        "registers": explain.register_lines(kernel),
    }


def _reasons(found: KernelPlan) -> tuple[str, ...]:
    """The decisions that such kernels are as they are by."""
    arch, spec = ARCHITECTURES[found.arch], found.spec_file.spec
    if is_backward(spec):
        of_pairs = OF_PAIRS * splits(spec)
        of_sums = OF_ORDERED * spec.deterministic + OF_HALVES * (spec.dq_sums == "fp16")
        return OF_BACKWARD[found.arch] + of_pairs + of_sums
    return arch.decisions_of_pairs if spec.cta_group == 2 else arch.decisions


def _instructions(record: records.Record) -> list[Row]:
    kernels = records.kernels(record.get("compiled", {}), record["kernel"])
    return [
        (f"{kernel}: {name}" if kernel else name, str(count))
        for kernel, compiled in kernels.items()
        for name, count in sorted(compiled.get("instructions", {}).items())
        if count
    ]


def _emulated(record: records.Record) -> list[Row]:
    found = record.get("emulated")
    if not found:
        return []
    rows: list[Row] = [
        ("cases", str(found["cases"])),
        ("schedules", ", ".join(found["schedules"])),
        ("findings", str(len(found["findings"]))),
    ]
    others = {x: y for x, y in records.others(found).items() if x != LSE.name}
    for name, worst in {"": found["worst"] or {}, **others}.items():
        if "of_bound" in worst:
            said = f"{worst['absolute']:.3g}, {worst['of_bound']:.2f} of its bound"
            title = f"worst error of {name}" if name else "worst error"
            rows.append((title, f"{said}, in {worst['case']}"))
    return rows


def ratio(cell: Cell) -> float:
    """How many times as fast as its best peer the kernel was, by graph."""
    return float(cell["graph_tflops"] / cell["peers"][_best_peer(cell)]["graph_tflops"])


def _best_peer(cell: Cell) -> str:
    """The fastest of the peers that were timed in the same run."""
    peers = cell["peers"]
    return str(max(peers, key=lambda name: peers[name]["graph_tflops"]))


def _contenders(cell: Cell) -> dict[str, float]:
    """TFLOPS by graph, ours first."""
    peers = {name: of["graph_tflops"] for name, of in sorted(cell["peers"].items())}
    return {OURS: cell["graph_tflops"], **peers}


def _problem(cell: Cell) -> str:
    """The problem of a cell, in short."""
    heads, length = str(cell["heads"]), str(cell["q"])
    if cell["kv_heads"] != cell["heads"]:
        heads += f"/{cell['kv_heads']}"
    if cell["q"] != cell["kv"]:
        length += f" x {cell['kv']}"
    found = f"batch {cell['batch']}, heads {heads}, length {length}"
    if drawn := cell.get("drawn"):
        sequences = drawn.get("sequences", "")
        if sequences:
            pool = f", {drawn['pool']} pool" if "pool" in drawn else ""
            found = f"heads {heads}, lengths {sequences}{pool}"
        # A line of its own in a chart, whose labels are narrow.
        words = draws.words(drawn["ranges"], drawn["seed"], sequences)
        found += f",\n{words}" if words else ""
    return found


def _cell(cell: Cell) -> Row:
    peers = ", ".join(
        f"{peer} {of['graph_tflops']:.0f}" for peer, of in sorted(cell["peers"].items())
    )
    return (
        _problem(cell),
        f"{cell['graph_tflops']:.0f}",
        peers,
        f"{ratio(cell):.2f} of {_best_peer(cell)}",
        _of_host(cell, "eager_tflops", ".0f"),
        f"{cell['burst_tflops']:.0f}",
        f"{cell['sustained_tflops']:.0f}",
        _of_host(cell, "host_us", ".1f"),
    )


def _of_host(cell: Cell, name: str, form: str) -> str:
    """A figure that is known while the host section is the one that was timed."""
    return format(cell[name], form) if name in cell else table.NOTHING


def _run(run: Mapping[str, Any], path: str, charts: Charts) -> dict[str, Any]:
    """What was timed on one GPU."""
    versions = run["versions"].items()
    title = "TFLOPS by CUDA graph: the table has the figures"
    timed = {_problem(cell): _contenders(cell) for cell in run["cells"]}
    return {
        "about": run,
        "cells": [_cell(cell) for cell in run["cells"]],
        "bench": [charts.add(path, title, plot.bars(timed), _ROOT)] if timed else [],
        # Peers that could not be timed.
        "absent": sorted(name for name, version in versions if version is None),
    }
