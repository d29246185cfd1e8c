# SPDX-License-Identifier: Apache-2.0
"""What a kernel is under one version of the DSL, beside what its record says; pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..build import records, toolchain
from ..build.toolchain import CompileReport
from ..errors import CheckFailed, OutOfTime

# Instructions whose number says nothing of the kernel's structure: it may change by a few.
ARITHMETIC = frozenset(
    {"F2FP", "FADD", "FFMA", "FMNMX", "FMUL", "MUFU.EX2", "SHFL", "total"}
)
# Of all instructions: what is not in a loop that the report counts may grow by this much.
MOST_GROWTH = 0.02
MOST_SHOWN = 4  # loops of a role, one by one

Kernels = Mapping[str, Mapping[str, Any]]
"""What a compile says of each kernel, as `records.kernels` has it."""

_FAILURE = re.compile(r"[\w.]*(Error|Exception|Warning)\b")


class Kind(enum.Enum):
    """A verdict on a cell; only the first is a pass."""

    SAME = "same"
    CHANGED = "changed"
    WRONG = "WRONG"  # in the emulator
    UNFIT = "UNFIT"  # for what else the build refuses
    SPILLS = "SPILLS"
    BROKEN = "does not compile"
    HUNG = "hung"


# Between verdict and details.
_JOINTS = {Kind.SAME: ", ", Kind.HUNG: " ", Kind.SPILLS: " "}


@dataclass(frozen=True)
class Cell:
    """A kernel under one version of the DSL.

    details: what is different, the worst first. report: None when it did not compile. emulated:
    how that was held, None when nobody asked or it did not hold.
    """

    kernel: str
    dsl: str
    kind: Kind
    details: tuple[str, ...] = ()
    report: CompileReport | None = None
    emulated: str | None = None

    @property
    def text(self) -> str:
        """The verdict with all details."""
        joint = _JOINTS.get(self.kind, ": ") if self.details else ""
        return f"{self.kind.value}{joint}{', '.join(self.details)}"

    @property
    def brief(self) -> str:
        """The verdict with the first detail, for a table."""
        shown = () if self.kind is Kind.BROKEN else self.details[:1]
        text = replace(self, details=shown).text
        more = len(self.details) - len(shown)
        return f"{text} and {more} more" if shown and more else text

    def to_json(self) -> dict[str, Any]:
        """Plain data that `json` takes."""
        return {
            "kernel": self.kernel,
            "dsl": self.dsl,
            "verdict": self.kind.value,
            "details": list(self.details),
            "compiled": self.report and self.report.to_json(),
            "emulated": self.emulated,
        }


def judge(
    kernel: str,
    dsl: str,
    recorded: Mapping[str, Any],
    found: CompileReport | CheckFailed,
    *,
    timeout: float,
) -> Cell:
    """Compare a compile with the record's; timeout: the seconds that it was given."""
    if isinstance(found, OutOfTime):
        return Cell(kernel, dsl, Kind.HUNG, (f"after {timeout:g} s",))
    if isinstance(found, CheckFailed):
        return Cell(kernel, dsl, Kind.BROKEN, (reason(str(found)),))
    if spill := spilled(found):
        return Cell(kernel, dsl, Kind.SPILLS, (spill,), found)
    if failures := toolchain.gate(found):
        return Cell(kernel, dsl, Kind.UNFIT, tuple(failures), found)
    before, after = (
        records.kernels(each, kernel) for each in (recorded, found.to_json())
    )
    if changes := tuple(differences(before, after)):
        return Cell(kernel, dsl, Kind.CHANGED, changes, found)
    more = sum(map(_total, after.values())) - sum(map(_total, before.values()))
    details = (f"{more:+} instructions",) if more else ()
    return Cell(kernel, dsl, Kind.SAME, details, found)


def reason(text: str) -> str:
    """The line that says why a compile failed: the last exception, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if _FAILURE.match(line)]
    return (named or lines)[-1]


def spilled(found: CompileReport) -> str:
    """What kernels keep in local memory, empty when nothing."""
    size = max(max(kernel.stack_bytes, kernel.local_bytes) for kernel in found.kernels)
    loads, stores = (
        sum(kernel.instructions[opcode] for kernel in found.kernels)
        for opcode in ("LDL", "STL")
    )
    if not (size or loads or stores):
        return ""
    return f"{size} bytes ({loads} loads, {stores} stores)"


def differences(recorded: Kernels, found: Kernels) -> Iterator[str]:
    """What is not as recorded among what a change of speed shows in."""
    if recorded.keys() != found.keys():
        old, new = (
            ", ".join(filter(None, each)) or "one" for each in (recorded, found)
        )
        yield f"kernels {old} -> {new}"
        return
    for kernel, now in found.items():
        for text in _differences(recorded[kernel], now):
            yield f"{kernel}: {text}" if kernel else text


def _differences(
    recorded: Mapping[str, Any], found: Mapping[str, Any]
) -> Iterator[str]:
    """Of one kernel."""
    old, new = _resources(recorded), _resources(found)
    for name in dict.fromkeys([*new, *old]):
        if old.get(name) != new.get(name):
            yield f"{name} {_shown(old.get(name))} -> {_shown(new.get(name))}"
    before, after = _total(recorded), _total(found)
    if after > (1 + MOST_GROWTH) * before:
        yield f"instructions {before} -> {after}"


def _total(compiled: Mapping[str, Any]) -> int:
    return int(compiled["instructions"]["total"])


def _resources(compiled: Mapping[str, Any]) -> dict[str, Any]:
    """By name: resources, how wgmmas are grouped, loops, and instructions that are structure."""
    wgmma = compiled["wgmma"]
    loops: dict[str, list[int]] = {}
    for loop in compiled["loops"]:
        total = loop["instructions"]["total"]
        loops.setdefault(f"{loop['role']} loops", []).append(total)
    return {
        "registers": compiled["registers"],
        "setmaxnreg": compiled["setmaxnreg"],
        "static shared memory": compiled["static_shared_bytes"],
        "wgmma groups": wgmma["groups"],
        "waits with a wgmma group in flight": wgmma["overlaps"],
        **loops,
        **{
            name: count
            for name, count in sorted(compiled["instructions"].items())
            if name not in ARITHMETIC
        },
    }


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list) and len(value) > MOST_SHOWN:
        return f"{sum(value)} in {len(value)}"
    return " / ".join(map(str, value)) if isinstance(value, list) else str(value)
