# SPDX-License-Identifier: Apache-2.0
"""What differs between two states of one kernel, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from ..build import records
from ..evidence import table
from .kernels import KernelState
from .source import Edit, edits

FAILS, STACK, SERIALISED, REGISTERS, RUNG = range(5)  # severities

Facts = dict[tuple[str, str, str], "Value"]
"""By group, kernel and name."""
Value = int | float | str | None  # None: nobody measured it, or there is no such thing
Kind = Literal["same", "changed", "added", "removed"]
Code = Literal["same", "comments", "code"]

# Opcode classes of the architectures by what they are for; what is in none of them is OTHER.
CLASSES: Final[Mapping[str, tuple[str, ...]]] = {
    "MMA": ("HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA"),
    "exp2": ("MUFU.EX2",),
    "FMA pipe": ("FFMA", "FMUL", "FADD"),
    "max": ("FMNMX",),
    "conversions": ("F2FP",),
    "shuffles": ("SHFL",),
    "tensor memory": ("LDTM", "STTM"),
    "TMA": ("UTMALDG", "UTMASTG"),
    "sync": (
        *("SYNCS", "BAR", "UTCBAR"),
        *("WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR"),
    ),
    "local memory": ("LDL", "STL"),
}
BUILD: Final = "fmha-gen build {path}"
RENEWED_BY: Final[Mapping[str, str]] = {
    "emulated": "fmha-gen emulate {path}",
    "validated": "fmha-gen validate {path}",
    "benchmarked": "fmha-gen bench {path} --record",
}
# Groups of facts, of which a text alone does not say the MEASURED ones.
GROUPS: Final = ("spec", "plan", "barriers", "resources", "loops", "proof")
MEASURED: Final = GROUPS[3:]
OTHER: Final = "other"
TOTAL: Final = "total"
LADDER: Final = tuple(records.RUNGS)


@dataclass(frozen=True)
class Row:
    """One fact before and after. group: one of GROUPS. kernel: which of several it is about."""

    group: str
    kernel: str
    name: str
    before: Value
    after: Value

    @property
    def loop(self) -> str:
        """The loop that it counts instructions of; empty for any other fact."""
        return self.name.partition(": ")[0] if self.group == "loops" else ""

    @property
    def full_name(self) -> str:
        """The name, before it the kernel's where there are several."""
        return f"{self.kernel}: {self.name}" if self.kernel else self.name

    @property
    def label(self) -> str:
        """The name without the loop."""
        return self.name.rpartition(": ")[2]

    @property
    def unknown(self) -> bool:
        """Whether one side was not measured, so that nothing can be said."""
        return self.group in MEASURED and None in (self.before, self.after)

    @property
    def changed(self) -> bool:
        """Whether the two differ; what the text says can be on one side only."""
        return self.before != self.after and not self.unknown


class Regression(NamedTuple):
    """Something that got worse, in words. severity: 0 is the worst; from RUNG on it is no code."""

    severity: int
    text: str


@dataclass(frozen=True)
class Due:
    """Whether this text has to be proven anew, why, and by which commands."""

    due: bool
    reason: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelChange:
    """A kernel before and after. regressions: what got worse, the worst first.

    Nothing is read out of two texts that are equal and known alike: they have no rows.
    """

    stem: str
    before: KernelState | None
    after: KernelState | None
    kind: Kind
    code: Code
    edits: tuple[Edit, ...]
    rows: tuple[Row, ...]
    regressions: tuple[Regression, ...]
    validation: Due

    @property
    def changed_rows(self) -> tuple[Row, ...]:
        """The facts that are not as they were."""
        return tuple(row for row in self.rows if row.changed)

    @property
    def same_ptx(self) -> bool:
        """Whether both sides are compiled, to the same device code."""
        sides = (self.before, self.after)
        found = [s.compiled["ptx_sha256"] for s in sides if s and s.compiled]
        return len(found) == len(sides) and found[0] == found[1]


def compare(before: KernelState | None, after: KernelState | None) -> KernelChange:
    """Compare two states of a kernel; None is a side that does not have it.

    Raises ValueError when neither side has it, CheckFailed when a text is not Python.
    """
    state = after or before
    if state is None:
        raise ValueError("a kernel that neither side has")
    if before is None or after is None:
        kind: Kind = "added" if before is None else "removed"
        rows = tuple(_rows(before, after))
        worse = tuple(_failures(after)) if after is not None else ()
        return KernelChange(
            state.stem,
            before,
            after,
            kind,
            "code",
            (),
            rows,
            worse,
            _due(before, after),
        )
    code = _code(before, after)
    if code == "same" and _known(before) == _known(after):
        due = _due(before, after, code)
        return KernelChange(after.stem, before, after, "same", code, (), (), (), due)
    found = edits(before.lines, after.lines) if code != "same" else ()
    rows = tuple(_rows(before, after))
    worse = tuple(_regressions(before, after))
    # A text that does not compile any more changes no row: there is nothing to compare with.
    same = code == "same" and not worse and not any(row.changed for row in rows)
    return KernelChange(
        after.stem,
        before,
        after,
        "same" if same else "changed",
        code,
        found,
        rows,
        worse,
        _due(before, after, code),
    )


def by_class(counts: Mapping[str, int]) -> dict[str, int]:
    """Instructions of a loop by what they are for, OTHER and TOTAL at the end."""
    found = {
        name: sum(counts.get(opcode, 0) for opcode in opcodes)
        for name, opcodes in CLASSES.items()
    }
    other = counts["total"] - sum(found.values())
    return {**found, OTHER: other, TOTAL: counts["total"]}


def _known(state: KernelState) -> tuple[object, ...]:
    return state.stem, state.record, state.compiled, state.loops, state.failures


def _code(before: KernelState, after: KernelState) -> Code:
    if before.lines == after.lines:
        return "same"
    return "comments" if before.code == after.code else "code"


# --- facts -----------------------------------------------------------------------


def _rows(before: KernelState | None, after: KernelState | None) -> Iterator[Row]:
    """Every fact that either side has."""
    sides = [state for state in (before, after) if state is not None]
    several = any(len(state.kernels) > 1 for state in sides)
    left, right = (
        _facts(state, several) if state is not None else {} for state in (before, after)
    )
    for key in _in_order(left, right):
        yield Row(*key, left.get(key), right.get(key))


def _in_order(left: Facts, right: Facts) -> list[tuple[str, str, str]]:
    """The keys of both, by group, in the order of the right side; what is gone comes last."""
    keys = dict.fromkeys((*right, *left))
    return sorted(keys, key=lambda key: GROUPS.index(key[0]))


def _facts(state: KernelState, several: bool) -> Facts:
    """several: whether kernels of the file are to be told."""
    facts: Facts = {}
    for name, said in _flat(state.spec):
        if name != "name":
            facts["spec", "", name] = said
    for constant, number in state.constants.items():
        facts["plan", "", constant] = number
    rings = state.barriers
    for ring, count in rings.items():
        facts["barriers", "", f"mbarriers of {ring}"] = count
    facts["resources", "", "shared memory [B]"] = state.shared_bytes
    if several and state.kernels:
        names = ", ".join(filter(None, state.kernels)) or "one"
        facts["resources", "", "kernels"] = names
    for kernel, data in state.kernels.items():
        for name, value in _compiled(data):
            facts["resources", kernel, name] = value
    if state.compiled is not None:
        facts["proof", "", "CuTe DSL"] = state.compiled["dsl"]
    for kernel, loops in state.loops.items():
        for loop, counts in loops.items():
            for name, count in by_class(counts).items():
                facts["loops", kernel, f"{loop}: {name}"] = count
    facts["proof", "", "rung"] = state.rung
    facts["proof", "", "worst error over its bound"] = _error(state)
    return facts


def _flat(spec: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for name, value in spec.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, int) else str(value)


def _compiled(data: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    """Of one kernel."""
    counts, wgmma = data["instructions"], data["wgmma"]
    waits = CLASSES["sync"]
    yield "instructions that synchronise", sum(
        counts.get(opcode, 0) for opcode in waits
    )
    yield "registers per thread", data["registers"]
    yield "registers by role", " / ".join(map(str, data["setmaxnreg"]))
    yield "stack [B]", data["stack_bytes"]
    yield "local memory [B]", data["local_bytes"]
    yield "spills", _spills(data)
    if wgmma["asked_mmas"]:
        yield "serialised wgmma", wgmma["serialised"]
        yield "waits that overlap", wgmma["overlaps"]
    yield "instructions", counts["total"]


def _error(state: KernelState) -> float | None:
    worst = table.proof_of(state.record).get("worst") or {}
    return round(float(worst["of_bound"]), 2) if "of_bound" in worst else None


# --- what got worse --------------------------------------------------------------


def _regressions(before: KernelState, after: KernelState) -> Iterator[Regression]:
    """The worst first."""
    old = set(_failures(before))
    yield from (failure for failure in _failures(after) if failure not in old)
    for kernel in after.kernels:
        if kernel in before.kernels:
            for worse in _worse_code(before.kernels[kernel], after.kernels[kernel]):
                text = f"{kernel}: {worse.text}" if kernel else worse.text
                yield Regression(worse.severity, text)
    if LADDER.index(after.rung) < LADDER.index(before.rung):
        why = "" if before.body == after.body else ": the proof was of another text"
        yield Regression(RUNG, f"rung {before.rung} -> {after.rung}{why}")


def _failures(state: KernelState) -> Iterator[Regression]:
    for failure in state.failures:
        lines = [line.strip() for line in failure.splitlines()]
        said = ": ".join(dict.fromkeys((lines[0], lines[-1])))
        yield Regression(FAILS, f"does not build: {said}")


def _worse_code(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[Regression]:
    stack, new_stack = (
        data["stack_bytes"] + data["local_bytes"] for data in (before, after)
    )
    if new_stack > stack:
        yield Regression(STACK, f"stack {stack} -> {new_stack} B per thread")
    spills, new_spills = (_spills(data) for data in (before, after))
    if new_spills > spills:
        text = f"spills: {spills} -> {new_spills} local loads and stores"
        yield Regression(STACK, text)
    old, new = before["wgmma"], after["wgmma"]
    if new["serialised"] > old["serialised"]:
        count = f"{old['serialised']} -> {new['serialised']} of {new['mmas']}"
        yield Regression(SERIALISED, f"serialised wgmma {count}")
    if old["overlaps"] and new["asked_mmas"] and not new["overlaps"]:
        yield Regression(SERIALISED, "no wait leaves a wgmma group in flight any more")
    if after["registers"] > before["registers"]:
        count = f"{before['registers']} -> {after['registers']}"
        yield Regression(REGISTERS, f"registers per thread {count}")
    most, new_most = (max(data["setmaxnreg"], default=0) for data in (before, after))
    if new_most > most:
        text = f"registers of the hungriest role {most} -> {new_most}"
        yield Regression(REGISTERS, text)


def _spills(compiled: Mapping[str, Any]) -> int:
    counts = compiled["instructions"]
    return int(counts["LDL"] + counts["STL"])


# --- what must be proven anew ----------------------------------------------------


def _due(
    before: KernelState | None, after: KernelState | None, code: Code = "code"
) -> Due:
    if after is None:
        return Due(False, "gone")
    proven = before.record if before is not None else {}
    wanted = [rung for rung in RENEWED_BY if rung in proven]
    if not wanted:  # nothing to renew: what any kernel starts with
        wanted = ["emulated", "validated"]
    lost = [rung for rung in wanted if rung not in after.record]
    first = [BUILD] if lost and not after.built else []
    commands = tuple(
        command.format(path=after.path)
        for command in (*first, *(RENEWED_BY[rung] for rung in lost))
    )
    if "validated" in after.record:
        return _still_valid(after, commands)
    if "validated" in proven:
        if code == "comments" and after.compiled is None:
            reason = (
                "nothing but comments and docstrings differs from the text that was"
                " validated: what ran stays where a build compiles it to the same"
            )
            return Due(False, reason, (BUILD.format(path=after.path),))
        return Due(True, "no GPU has run this code", commands)
    if before is None:
        return Due(bool(commands), "new: no GPU has run it", commands)
    if "emulated" in after.record or code == "same":
        return Due(False, "no GPU ran the text before either", commands)
    reason = (
        "neither a GPU nor the emulator has run this text; no GPU ran the one before"
    )
    return Due(True, reason, commands)


def _still_valid(state: KernelState, commands: tuple[str, ...]) -> Due:
    ran, compiled = (
        records.entry_of(state.record, "validated"),
        state.compiled or {},
    )
    where = f"{ran['cases']} cases on {ran['gpu']}"
    this = "this text is"
    if ran["body_sha256"] != state.body:
        this = "device code and launch are"
    if compiled.get("dsl", ran["dsl"]) == ran["dsl"]:
        return Due(False, f"{this} validated: {where}", commands)
    versions = f"CuTe DSL {ran['dsl']}, and is now compiled by {compiled['dsl']}"
    again = RENEWED_BY["validated"].format(path=state.path)
    return Due(True, f"validated ({where}) with {versions}", (again, *commands))
