# SPDX-License-Identifier: Apache-2.0
"""A static site about the shipped kernels: their pictures, plans, sources and evidence.

Plain HTML without scripts, and nothing from elsewhere. Pure but for `write`: the same specs,
kernels and records give the same bytes. `SITE.lock` says which files are ours, so that a folder
with anything else in it, or with a page that was edited, is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from ...bench import plot
from ...build import tree
from ...errors import CheckFailed
from ...spec.model import load_specs
from ..picture import page
from ..picture.svg import STYLE
from . import decisions, speed
from .kernels import HEADS, Kernel, context, groups, load, ratio
from .pages import CHART_STYLE, Charts, template

LOCK: Final = "SITE.lock"

_ENTRY = re.compile(r"([0-9a-f]{64})  ((?:[\w-][\w.-]*/)?[\w-][\w.-]*)")


def write(specs: Sequence[Path], generated: Path, folder: Path) -> int:
    """Make the site in a folder, or bring it up to date; how many files changed.

    Raises SpecError, or CheckFailed for a kernel that is not what its spec says and for a folder
    with files of others.
    """
    desired = files([load(spec, generated) for spec in load_specs(specs)])
    with tree.exclusive(folder):
        known = _read_lock(folder)
        _refuse_foreign(folder, known, desired)
        desired[LOCK] = _lock(desired)
        orphans = sorted(known.keys() - desired.keys())
        changes = tree.compare(folder, desired, {}, orphans)
        tree.apply(folder, changes)
    return len(changes)


def files(kernels: Sequence[Kernel]) -> dict[str, str]:
    """Return every file of the site but its lock, by path."""
    timed = {
        kernel.stem: [ratio(cell) for cell in kernel.cells]
        for kernel in kernels
        if kernel.cells
    }
    charts, title = (
        Charts(),
        "Times as fast as the best peer: the pages have the figures",
    )
    if timed:
        plot.require_matplotlib("site")
    found = {
        "style.css": template("style.css.j2", svg_style=STYLE + CHART_STYLE),
        "index.html": template(
            "index.html.j2",
            groups=groups(kernels),
            heads=HEADS,
            speeds=(
                [charts.add("ratios.svg", title, plot.ratios(timed))] if timed else []
            ),
            decision=decisions.link,
        ),
        "decisions.html": template(
            "decisions.html.j2", decisions=list(decisions.shipped().values())
        ),
    }
    if timed:
        found["speed.html"] = template(
            "speed.html.j2",
            machines=speed.sections(kernels, charts),
            decision=decisions.link,
        )
    for decision in decisions.shipped().values():
        found[decision.page] = template(
            "decision.html.j2", title=decision.title, body=decisions.html(decision)
        )
    for kernel in kernels:
        place = f"kernels/{kernel.stem}"
        found[f"{place}.html"] = template("kernel.html.j2", **context(kernel, charts))
        found[f"{place}.svg"] = page.render(kernel.plan)
        found[f"{place}.py"] = kernel.text
        found[f"{place}.yaml"] = kernel.plan.spec_file.text
        found[f"{place}.json"] = kernel.record_text
    return found | charts.files


def _lock(desired: Mapping[str, str]) -> str:
    lines = (f"{_digest(text)}  {path}\n" for path, text in sorted(desired.items()))
    return "".join(lines)


def _read_lock(folder: Path) -> dict[str, str]:
    """Digests by path, of what the site wrote last. CheckFailed when it is no such lock."""
    text = (tree.read(folder, LOCK) or b"").decode("utf-8", errors="replace")
    known = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = _ENTRY.fullmatch(line)
        if entry is None:
            raise CheckFailed(
                f"{folder / LOCK}:{number}: not an entry; choose a new folder"
            )
        known[entry[2]] = entry[1]
    return known


def _refuse_foreign(
    folder: Path, known: Mapping[str, str], desired: Mapping[str, str]
) -> None:
    for path in sorted(_paths(folder)):
        if path == LOCK:
            continue
        digest = hashlib.sha256(tree.read(folder, path) or b"").hexdigest()
        if path in desired and digest == _digest(desired[path]):
            continue  # also where a run was interrupted that had not come to the lock
        if path not in known:
            raise CheckFailed(f"{folder / path}: not of this site; choose a new folder")
        if digest != known[path]:
            raise CheckFailed(f"{folder / path}: edited by hand; delete it first")


def _paths(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
