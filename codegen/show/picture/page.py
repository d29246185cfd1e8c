# SPDX-License-Identifier: Apache-2.0
"""One page per kernel: all of its pictures and its barriers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ...errors import UsageProblem
from ...features.backward import is_backward
from ...host.files import replace, writing
from ...planning.kernel_plan import DevicePlan, KernelPlan
from ...planning.plan import resolve
from ...spec.model import SpecFile
from .. import backward
from .cluster import cluster
from .lanes import lanes
from .maps import shared_memory, tensor_memory
from .products import products
from .svg import Panel, document, line, moved, text, width_of

_WIDTH: Final = 1440.0  # that panels are put side by side for
_MARGIN: Final = 24.0
_GAP: Final = 36.0


def render(plan: KernelPlan) -> str:
    """Return the page as an SVG file."""
    return document(page(plan))


def write(spec_files: Sequence[SpecFile], file: Path) -> None:
    """Write a picture of one file; UsageProblem for several, EnvironmentProblem for no place."""
    if len(spec_files) != 1:
        raise UsageProblem(
            f"{file}: a picture is of one kernel, but there are {len(spec_files)} specs"
        )
    text = render(resolve(spec_files[0]))
    with writing(file):
        replace(file, text.encode())


def page(plan: KernelPlan) -> Panel:
    """All panels, as many side by side as a page is wide; of several kernels below one another."""
    plan = backward.shown(plan)
    lines = textwrap.wrap(plan.context["title"], int(_WIDTH / width_of("x", "text")))
    body = [text(_MARGIN, 40, plan.stem, "title")]
    for index, words in enumerate(lines):
        body.append(text(_MARGIN, 62 + 16 * index, words, "muted"))
    y, width = 70.0 + 16 * len(lines), 0.0
    described: list[str] = []
    for panel in kernels(plan):
        body += moved(_MARGIN, y, panel.body)
        width, y = panel.width + 2 * _MARGIN, y + panel.height
        described.append(panel.description)
    for kernel in plan.kernels:
        panels = [*memory(plan, kernel), *phases(kernel), *barriers(kernel)]
        panels += flow(plan, kernel)
        if not panels and is_backward(plan.spec_file.spec):
            continue  # said in the table of kernels
        if kernel.name:
            body.append(text(_MARGIN, y + 18, kernel.name, "title"))
            y += _GAP
            described.append(f"{kernel.name}:")
        for row in _flow(panels):
            x = _MARGIN
            for panel in row:
                body += moved(x, y, panel.body)
                x += panel.width + _GAP
            width = max(width, x - _GAP + _MARGIN)
            y += max(panel.height for panel in row) + _GAP
        described += [panel.description for panel in panels]
    return Panel(plan.stem, " ".join(described), width, y, tuple(body))


def flow(plan: KernelPlan, kernel: DevicePlan) -> list[Panel]:
    """How the products of a backward kernel follow from one another."""
    told = is_backward(plan.spec_file.spec) and kernel.name == backward.MAIN
    return [products(plan)] if told else []


def kernels(plan: KernelPlan) -> list[Panel]:
    """The table of the kernels that a call launches, where these are several."""
    if not is_backward(plan.spec_file.spec):
        return []
    return [_panel("Kernels", list(backward.kernel_rows(plan)))]


def _flow(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Rows of panels, in their order, that fit the page."""
    found: list[list[Panel]] = []
    room = 0.0
    for panel in panels:
        if not found or panel.width > room:
            found.append([])
            room = _WIDTH - 2 * _MARGIN
        found[-1].append(panel)
        room -= panel.width + _GAP
    return found


def memory(plan: KernelPlan, kernel: DevicePlan) -> list[Panel]:
    """Of one of the plan's kernels: shared memory, tensor memory, and who loads what."""
    architecture = plan.architecture
    found = (
        shared_memory(kernel, architecture.smem_bytes),
        tensor_memory(kernel, architecture.tmem_columns),
        cluster(kernel, pair=plan.spec_file.spec.cta_group > 1),
    )
    return [panel for panel in found if panel is not None]


def phases(kernel: DevicePlan) -> list[Panel]:
    """A panel for each phase."""
    return [lanes(phase) for phase in kernel.phases]


def barriers(kernel: DevicePlan) -> list[Panel]:
    """The table of barriers, if there are any."""
    if not kernel.barriers:
        return []
    rows = [("barrier", "stages", "arrivals", "who waits")]
    rows += [(b.name, str(b.stages), b.arrivals, b.waiter) for b in kernel.barriers]
    return [_panel("Barriers", rows)]


def _panel(title: str, rows: Sequence[tuple[str, ...]]) -> Panel:
    """A table."""
    body = [text(0, 16, title, "head"), *_table(rows, 42)]
    width = sum(_widths(rows))
    words = "; ".join(", ".join(row) for row in rows[1:])
    return Panel(title, f"{words}.", width, 44.0 + 18 * len(rows), tuple(body))


def _widths(rows: Sequence[tuple[str, ...]]) -> list[float]:
    return [
        max(width_of(cell, "mono") for cell in c) + 24 for c in zip(*rows, strict=True)
    ]


def _table(rows: Sequence[tuple[str, ...]], y: float) -> Iterator[str]:
    widths = _widths(rows)
    for number, row in enumerate(rows):
        x = 0.0
        for cell, width in zip(row, widths, strict=True):
            yield text(
                x, y + 18 * number, cell, "mono muted" if number == 0 else "mono"
            )
            x += width
    yield line([(0, y + 6), (sum(widths), y + 6)])
