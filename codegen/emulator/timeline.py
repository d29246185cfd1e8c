# SPDX-License-Identifier: Apache-2.0
"""A picture of a run: what the warps of one CTA did, as Chrome trace events (Perfetto opens them).

The horizontal axis counts the scheduler's steps. It shows order and waiting under one schedule of
the model; a step is not time, and a long bar says nothing about speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .ptx import Instruction
from .report import Event

NOTE = "the axis counts steps of an emulator's scheduler, not time; lengths say nothing of speed"

# What makes a warp's role: the first of these that one of its instructions starts with.
ROLES: Mapping[str, str] = {
    "wgmma": "multiplies",
    "tcgen05.mma": "multiplies",
    "cp.async.bulk.tensor": "loads",
}


# What says most about what a stretch of code is for: the first of these that is in it.
_TELLING = (
    *("wgmma.mma_async", "tcgen05.mma", "wgmma", "cp", "stmatrix", "ex2"),
    *("tcgen05", "mbarrier", "bar"),
)


def most_telling(instructions: Sequence[Instruction]) -> Instruction:
    """The instruction that a stretch of code is named after."""

    def rank(instruction: Instruction) -> int:
        for number, start in enumerate(_TELLING):
            if instruction.name.startswith(start):
                return number
        return len(_TELLING)

    return min(instructions, key=rank)


def chrome_trace(
    events: Iterable[Event], *, title: str, cta: int = 0
) -> dict[str, Any]:
    """The trace of one CTA as plain data for `json`: a row per warp, a bar per stretch.

    Of several kernels each is a process of its own.
    """
    mine = [event for event in events if event.cta == cta]
    kernels = list(dict.fromkeys(event.kernel for event in mine)) or [""]
    number_of = {kernel: cta + number for number, kernel in enumerate(kernels)}
    trace: list[dict[str, Any]] = []
    for kernel, number in number_of.items():
        which = f"{title}, {kernel}" if len(kernels) > 1 else title
        trace.append(_name("process_name", number, 0, f"{which}, CTA {cta}"))
        ours = [event for event in mine if event.kernel == kernel]
        for warp in sorted({event.warp for event in ours}):
            role = _role({event.name for event in ours if event.warp == warp})
            trace.append(_name("thread_name", number, warp, f"warp {warp:02}{role}"))
    trace += [
        {
            "ph": "X",
            "name": event.name,
            "pid": number_of[event.kernel],
            "tid": event.warp,
            "ts": event.begin,
            "dur": event.end - event.begin,
            "args": {"PTX line": event.line},
        }
        for event in mine
    ]
    return {"traceEvents": trace, "otherData": {"unit": "steps", "note": NOTE}}


def _name(kind: str, number: int, warp: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": number, "tid": warp, "args": {"name": name}}


def _role(names: set[str]) -> str:
    for start, role in ROLES.items():
        if any(name.startswith(start) for name in names):
            return f" {role}"
    return ""
