# SPDX-License-Identifier: Apache-2.0
"""Which CTA of a cluster loads which slice of Q, K, V and dO, and which CTAs receive it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...planning.kernel_plan import DevicePlan
from ...planning.protocol import Load
from ..backward import PEERS_K
from .svg import Panel, arrow, rect, text, width_of

WIDTH: Final = 372.0
_TOP: Final = 58.0
_BAND: Final = 160.0  # of a tensor
_LOAD: Final = 44.0  # the height of what is loaded
_GAP: Final = 50.0  # arrows
_STAGE: Final = 46.0  # the height of a stage in shared memory
_KINDS: Final = {"Q": "q", "K": "k", PEERS_K: "k", "V": "v", "dO": "o"}


def cluster(kernel: DevicePlan, *, pair: bool) -> Panel | None:
    """A band for each tensor: above, what each CTA loads; below, what its stage gets.

    pair: whether two CTAs share an MMA. None where nothing is loaded.
    """
    if not kernel.loads:
        return None
    ctas = len({load.cta for load in kernel.loads})
    title = "What a CTA loads" if ctas == 1 else "Who loads what, and for whom"
    body = [text(0, 16, title, "head")]
    column = (WIDTH - 2 - 12 * (ctas - 1)) / ctas
    for cta in range(ctas):
        name = f"CTA {cta}" if ctas > 1 else "CTA"
        name += " (leader)" if pair and cta == 0 else ""
        middle = cta * (column + 12) + column / 2
        body.append(text(middle, _TOP - 18, name, "strong", "middle"))
    tensors = dict.fromkeys(load.tensor for load in kernel.loads)
    for band, tensor in enumerate(tensors):
        loads = [load for load in kernel.loads if load.tensor == tensor]
        body += _band(loads, _TOP + band * _BAND, column)
    bottom = _TOP + len(tensors) * _BAND
    if pair:
        note = "An MMA of the pair reads K and V of both CTAs."
        body.append(text(0, bottom - 2, note, "muted"))
    words = "; ".join(load.words for load in kernel.loads)
    return Panel(title, f"{words}.", WIDTH, bottom + 8, tuple(body))


def _band(loads: Sequence[Load], y: float, column: float) -> Iterator[str]:
    tensor = loads[0].tensor
    kind = _KINDS[tensor]
    for load in loads:
        x = 1 + load.cta * (column + 12)
        yield rect(x, y, column, _LOAD, f"box {kind}")
        told = f"{tensor}: {load.part}"
        if width_of(told, "strong") > column - 16:
            told = f"{tensor}: {load.span}"
        yield text(x + 8, y + 18, told, "strong")
        yield text(x + 8, y + 35, f"{load.nbytes} B", "mono")
        yield from _stage(load, loads, x, y + _LOAD + _GAP, column)
    for load in loads:
        start = 1 + load.cta * (column + 12) + column / 2
        for receiver in load.receivers:
            sent = [each for each in loads if receiver in each.receivers]
            part, of = sent.index(load), len(sent)
            end = 1 + receiver * (column + 12) + column * (part + 0.5) / of
            points = [(start, y + _LOAD), (end, y + _LOAD + _GAP)]
            yield from arrow(points)


def _stage(
    load: Load, loads: Sequence[Load], x: float, y: float, column: float
) -> Iterator[str]:
    """A stage in the shared memory of a CTA, in the slices that it gets."""
    sent = [each for each in loads if load.cta in each.receivers]
    width = column / len(sent)
    for part, each in enumerate(sent):
        whose = "in its smem" if each.cta == load.cta else f"by CTA {each.cta}"
        yield rect(x + part * width, y, width, _STAGE, f"box {_KINDS[load.tensor]}")
        middle = x + (part + 0.5) * width
        place = each.span if len(sent) > 1 else _extent(each)
        yield text(middle, y + 19, place, "mono", "middle")
        yield text(middle, y + 35, whose, "small muted", "middle")


def _extent(load: Load) -> str:
    return f"{load.rows[1]} x {load.columns[1]}"
