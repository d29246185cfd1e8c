# SPDX-License-Identifier: Apache-2.0
"""Kernels with one synchronisation instruction of their PTX removed or damaged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Damage = tuple[str, str]
"""What was done, and the PTX that stands for the instruction now."""

_STATEMENT = re.compile(r"\s*(@!?\S+\s+)?([a-z][\w.:]*)\s*(.*?);\s*$")
_OPERAND = re.compile(r"\[[^\]]*\]|[^,\s]+")


@dataclass(frozen=True)
class Mutant:
    """One damaged kernel. name: the same for the same damage wherever its line moves to."""

    name: str
    line: int
    before: str
    text: str
    """Of the whole kernel."""


def mutants(text: str) -> Iterator[Mutant]:
    """All mutants of a kernel's PTX, in the order of its lines."""
    lines = text.split("\n")
    seen: Counter[str] = Counter()
    for number, line in enumerate(lines):
        statement = _STATEMENT.match(line)
        if statement is None:
            continue
        guard, opcode, rest = statement.groups()
        family = next((name for name in _DAMAGES if opcode.startswith(name)), None)
        if family is None:
            continue
        seen[family] += 1
        operands = _OPERAND.findall(rest)
        for what, instead in _DAMAGES[family](guard or "", opcode, operands):
            yield Mutant(
                name=f"{family}#{seen[family]}: {what}",
                line=number + 1,
                before=line.strip(),
                text="\n".join([*lines[:number], instead, *lines[number + 1 :]]),
            )


Damages = Callable[[str, str, list[str]], Iterator[Damage]]


def _removed(guard: str, opcode: str, operands: list[str]) -> Iterator[Damage]:
    yield "removed", ""


def _changed(
    what: str, position: int, operation: str, by: int, bits: int = 32
) -> Damages:
    """Damage to one operand, where the instruction has it: `operation` of it and a number."""

    def damages(guard: str, opcode: str, operands: list[str]) -> Iterator[Damage]:
        if position >= len(operands):
            return
        kept = [*operands]
        kept[position] = "Damaged"
        yield what, (
            f"{{ .reg .b{bits} Damaged, Given; "
            f"mov.b{bits} Given, {operands[position]}; "
            f"{operation} Damaged, Given, {by}; "
            f"{guard}{opcode} {', '.join(kept)}; }}"
        )

    return damages


def _more_in_flight(guard: str, opcode: str, operands: list[str]) -> Iterator[Damage]:
    (count,) = operands
    yield "one group more stays in flight", f"{guard}{opcode} {int(count) + 1};"


def _succeeds(guard: str, opcode: str, operands: list[str]) -> Iterator[Damage]:
    yield "succeeds at once", f"{guard}setp.eq.s32 {operands[0]}, 0, 0;"


def _first_cta(guard: str, opcode: str, operands: list[str]) -> Iterator[Damage]:
    yield "always CTA 0", f"{guard}{opcode} {operands[0]}, {operands[1]}, 0;"


def _mask_bits(guard: str, opcode: str, operands: list[str]) -> Iterator[Damage]:
    if "multicast" in opcode:
        for bit in (0, 1):
            change = _changed(f"mask bit {bit} lost", 3, "and.b16", 3 ^ (1 << bit), 16)
            yield from change(guard, opcode, operands)


def _commit_bits(guard: str, opcode: str, operands: list[str]) -> Iterator[Damage]:
    if "multicast" in opcode:
        for bit in (0, 1):
            change = _changed(f"mask bit {bit} lost", 1, "and.b16", 3 ^ (1 << bit), 16)
            yield from change(guard, opcode, operands)


def _swapped_axes(guard: str, opcode: str, operands: list[str]) -> Iterator[Damage]:
    """A wrong slice: the number of a block of rows counts columns."""
    text = f"{guard}{opcode} {', '.join(operands)};"
    swapped = re.sub(r"\{(%?\w+), (%?\w+)", r"{\2, \1", text)
    if swapped != text:
        yield "rows and columns swapped", swapped


def _all(*damages: Damages) -> Damages:
    def together(guard: str, opcode: str, operands: list[str]) -> Iterator[Damage]:
        for damage in damages:
            yield from damage(guard, opcode, operands)

    return together


_BARRIER = (
    _removed,
    _changed("another barrier", 0, "xor.b32", 8),
    _changed("128 threads more", 1, "add.s32", 128),
    _changed("32 threads fewer", 1, "sub.s32", 32),
)
_DAMAGES: dict[str, Damages] = {  # a longer name before its beginning
    "atom": _changed("one more", 2, "add.s32", 1),
    "griddepcontrol.wait": _removed,
    "red.": _removed,
    "cp.async.bulk.shared": _changed("16 bytes fewer", 2, "sub.s32", 16),
    "mbarrier.init": _all(
        _removed,
        _changed("count + 1", 1, "add.s32", 1),
        _changed("count - 1", 1, "sub.s32", 1),
    ),
    "mbarrier.arrive.expect_tx": _all(
        _removed,
        _changed("half the bytes", 2, "shr.u32", 1),
        _changed("16 bytes more", 2, "add.s32", 16),
    ),
    "mbarrier.arrive": _all(_removed, _changed("count + 1", 2, "add.s32", 1)),
    "mbarrier.try_wait": _all(_succeeds, _changed("the other phase", 2, "xor.b32", 1)),
    "mapa": _first_cta,
    "cp.async.bulk.commit_group": _removed,
    "cp.async.bulk.wait_group": _all(_removed, _more_in_flight),
    "cp.async.bulk.tensor": _all(_mask_bits, _swapped_axes),
    "fence.proxy.async": _removed,
    "fence.mbarrier_init": _removed,
    "tcgen05.alloc": _removed,
    "tcgen05.commit": _all(_removed, _commit_bits),
    "tcgen05.dealloc": _removed,
    "tcgen05.relinquish_alloc_permit": _removed,
    "tcgen05.wait::ld": _removed,
    "tcgen05.wait::st": _removed,
    "wgmma.fence": _removed,
    "wgmma.commit_group": _removed,
    "wgmma.wait_group": _all(_removed, _more_in_flight),
    "barrier.cluster": _removed,
    "bar.sync": _all(*_BARRIER),
    "bar.warp.sync": _removed,
    "bar.arrive": _all(*_BARRIER),
}
