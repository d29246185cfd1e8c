# SPDX-License-Identifier: Apache-2.0
"""Reads what ptxas made of a kernel: instruction counts, loops, and wgmmas that run one by one.

Input is the text of `nvdisasm --print-code`. Loops are natural loops of the
control-flow graph, not address ranges: ptxas moves the slow path of every barrier wait to the end
of the kernel, so almost any range that ends in a backward branch would cover half of the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..arch.architecture import RoleLoop

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([\w$]+),", re.MULTILINE)
_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_TABLE = re.compile(r"BRANCH_TARGETS ([\w.,]+)")  # of an indirect branch
_CONVERGENCE = re.compile(r"\bB\d+\b")
_PENDING = re.compile(r"gsb0, 0x([0-9a-f]+)")
WGMMA = ("HGMMA", "QGMMA")
"""How the wgmmas of Hopper start: of 16-bit and of 8-bit floats."""


@dataclass(frozen=True)
class Instruction:
    """One line of SASS."""

    address: int
    predicated: bool
    opcode: str
    operands: str

    @property
    def ends_group(self) -> bool:
        """Whether this wgmma is the last of a group that can be waited for."""
        return self.is_wgmma and self.operands.endswith("gsb0")

    @property
    def is_wgmma(self) -> bool:
        """Whether this is a matrix product of a warpgroup."""
        return self.opcode.startswith(WGMMA)

    @property
    def drains(self) -> bool:
        """Whether this waits until no wgmma of the warpgroup is in flight."""
        return self.pending == 0

    @property
    def pending(self) -> int | None:
        """How many groups may stay in flight behind this wait; None for any other instruction."""
        if not self.opcode.startswith("WARPGROUP.DEPBAR"):
            return None
        match = _PENDING.search(self.operands)
        return int(match.group(1), 16) if match else None

    @property
    def accumulator(self) -> str:
        """The first accumulator register of a wgmma, for example `R24`."""
        return self.operands.split(",", 1)[0]


@dataclass(frozen=True)
class Block:
    """Straight-line code and the indices of the blocks that can follow it."""

    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A natural loop: the address of its head and its blocks, by index, in address order."""

    address: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Kernel:
    """The control-flow graph of one kernel; block 0 is the entry."""

    blocks: tuple[Block, ...]
    instructions: tuple[Instruction, ...] = field(repr=False)


def parse_kernels(text: str) -> dict[str, Kernel]:
    """The control-flow graphs of a disassembly's kernels, by name."""
    _, *pieces = _SECTION.split(text)
    return {
        name: parse(code) for name, code in zip(pieces[::2], pieces[1::2], strict=True)
    }


def parse(text: str) -> Kernel:
    """Build the control-flow graph from the disassembly of exactly one kernel."""
    instructions, labels = _scan(text)
    return Kernel(_blocks(instructions, labels), tuple(instructions))


def count(
    instructions: Iterable[Instruction], classes: Mapping[str, str]
) -> dict[str, int]:
    """Count instructions by class, and all of them under `total`.

    classes: what the opcode must start with, by name in the report.
    """
    counts = dict.fromkeys(classes, 0)
    total = 0
    for instruction in instructions:
        total += 1
        for name, prefix in classes.items():
            if instruction.opcode.startswith(prefix):
                counts[name] += 1
    return {**counts, "total": total}


def serialised(instructions: Sequence[Instruction]) -> int:
    """Count the wgmmas that wait for the previous k-step of their own chain.

    A chain adds into one accumulator; only its last wgmma ends a group. When ptxas gives up (a
    spill, an accumulator or P register touched while in flight, a branch in between), it ends a
    group and drains it after every single wgmma: then two links of a chain have nothing between
    them but a drain, an arrive and address arithmetic.
    """
    found = 0
    previous: Instruction | None = None
    drained = False
    for instruction in instructions:
        if instruction.is_wgmma:
            if (
                previous is not None
                and drained
                and previous.ends_group
                and previous.accumulator == instruction.accumulator
                and _continues(instruction)
            ):
                found += 1
            previous, drained = instruction, False
        elif instruction.drains:
            drained = True
        elif instruction.opcode.startswith(("MUFU", "BRA", "EXIT", "BAR.", "SYNCS")):
            previous = None
    return found


def _continues(wgmma: Instruction) -> bool:
    """Whether this wgmma adds to its accumulator: one that starts a chain reads RZ or a predicate.

    Operands are `D, A, B, C[, predicate][, gsb0]`; C equals D in a link of a chain.
    """
    operands = [part.strip() for part in wgmma.operands.split(",")]
    tail = (
        [part for part in operands[3:] if part != "gsb0"]
        if len(operands) > 3
        else operands[2:]
    )
    return not any("UP" in part or part == "RZ" for part in tail)


def loops(kernel: Kernel) -> list[Loop]:
    """All natural loops, by address; back edges to one head count as one loop."""
    dominators = _dominators(kernel.blocks)
    bodies: dict[int, set[int]] = {}
    predecessors: list[list[int]] = [[] for _ in kernel.blocks]
    for index, block in enumerate(kernel.blocks):
        for successor in block.successors:
            predecessors[successor].append(index)
    for index, block in enumerate(kernel.blocks):
        for head in block.successors:
            if head in dominators[index]:
                body = bodies.setdefault(head, {head})
                _collect(index, body, predecessors)
    return [
        Loop(kernel.blocks[head].instructions[0].address, tuple(sorted(body)))
        for head, body in sorted(bodies.items())
    ]


def role_loops(
    kernel: Kernel, roles: Sequence[RoleLoop]
) -> list[tuple[RoleLoop, Loop]]:
    """The innermost loops that issue what a role is known by; a loop is of the first that fits."""
    found: list[tuple[RoleLoop, Loop]] = []
    for role in roles:
        holding = [
            loop
            for loop in loops(kernel)
            if sum(i.opcode.startswith(role.opcode) for i in body(kernel, loop))
            >= role.at_least
        ]
        taken = [loop for _, loop in found]
        found += [
            (role, loop)
            for loop in holding
            if loop not in taken
            and not any(set(other.blocks) < set(loop.blocks) for other in holding)
        ]
    return found


def body(kernel: Kernel, loop: Loop) -> list[Instruction]:
    """The instructions of a loop in address order."""
    return [i for index in loop.blocks for i in kernel.blocks[index].instructions]


def iteration(
    kernel: Kernel, loop: Loop, most: str | tuple[str, ...] | None = None
) -> list[Instruction]:
    """What a pass through a loop issues where every wait succeeds at once: the shortest way round.

    most: how an opcode starts, or one of several ways; then it is the shortest of the ways that
    issue it most often.
    """
    (head,) = (
        index
        for index in loop.blocks
        if kernel.blocks[index].instructions[0].address == loop.address
    )
    dominators = _dominators(kernel.blocks)
    ways: dict[int, _Way | None] = {}

    def way(index: int) -> _Way | None:
        """The best one from here to the head; None if there is none."""
        if index not in ways:
            block = kernel.blocks[index]
            onward = set(block.successors) & set(loop.blocks) - dominators[index]
            found = [rest for rest in map(way, onward) if rest is not None]
            if head in block.successors:
                found.append(_Way(0, 0, ()))
            ways[index] = _longer(index, block, max(found), most) if found else None
        return ways[index]

    found = way(head)
    assert found is not None  # a loop comes back to its head
    return [i for index in found.blocks for i in kernel.blocks[index].instructions]


class _Way(NamedTuple):
    """Blocks in a row; the larger one is the better one."""

    wanted: int
    less_instructions: int  # negative
    blocks: tuple[int, ...]


def _longer(
    index: int, block: Block, rest: _Way, most: str | tuple[str, ...] | None
) -> _Way:
    """The way that begins with this block."""
    return _Way(
        rest.wanted
        + sum(
            most is not None and i.opcode.startswith(most) for i in block.instructions
        ),
        rest.less_instructions - len(block.instructions),
        (index, *rest.blocks),
    )


def _scan(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions in order, and for each label the index of the instruction it stands before."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(instructions)
        elif match := _INSTRUCTION.match(line):
            address, predicate, opcode, operands = match.groups()
            instructions.append(
                Instruction(int(address, 16), predicate is not None, opcode, operands)
            )
    return instructions, labels


def _blocks(
    instructions: Sequence[Instruction], labels: Mapping[str, int]
) -> tuple[Block, ...]:
    """Cut at branch targets and behind branches. Labels that nothing jumps to cut nothing."""
    jumps = _jumps(instructions, labels)
    starts = {0}
    for index, instruction in enumerate(instructions):
        if index in jumps or instruction.opcode.startswith(("EXIT", "RET", "BRX")):
            starts.add(index + 1)
            starts.update(jumps.get(index, ()))
    order = sorted(start for start in starts if start < len(instructions))
    number = {start: position for position, start in enumerate(order)}

    result = []
    for position, start in enumerate(order):
        end = order[position + 1] if position + 1 < len(order) else len(instructions)
        last = instructions[end - 1]
        successors = {number[at] for at in jumps.get(end - 1, ()) if at in number}
        stops = (
            last.opcode.startswith(("BRA", "EXIT", "RET", "BRX"))
            and not last.predicated
        )
        # `BRA.DIV` and `BRA.U` with a uniform predicate operand fall through as well.
        conditional = last.opcode.startswith("BRA.DIV") or re.match(
            r"!?U?P\d", last.operands
        )
        if (not stops or conditional) and end in number:
            successors.add(number[end])
        result.append(Block(tuple(instructions[start:end]), tuple(sorted(successors))))
    return tuple(result)


def _jumps(
    instructions: Sequence[Instruction], labels: Mapping[str, int]
) -> dict[int, list[int]]:
    """Where the instructions that may branch go, by index."""
    joins: dict[str, list[int]] = {}
    jumps: dict[int, list[int]] = {}
    for index, instruction in enumerate(instructions):
        target = _TARGET.search(instruction.operands)
        at = labels.get(target.group(1)) if target else None
        register = _CONVERGENCE.search(instruction.operands)
        if instruction.opcode.startswith("BSSY") and at is not None and register:
            joins.setdefault(register.group(), []).append(at)
        elif instruction.opcode.startswith(("BRA", "CALL", "WARPSYNC.COLLECTIVE")):
            jumps[index] = [at] if at is not None else []
        elif table := _TABLE.search(instruction.operands):
            names = table.group(1).split(",")
            jumps[index] = [labels[name] for name in names if name in labels]
    for index, instruction in enumerate(instructions):
        if instruction.opcode.startswith("BSYNC"):
            register = _CONVERGENCE.search(instruction.operands)
            ends = joins.get(register.group(), []) if register else []
            # Regions that reuse a register are told apart by where they end.
            jumps[index] = [index + 1] if index + 1 in ends else ends
    return jumps


def _dominators(blocks: Sequence[Block]) -> list[set[int]]:
    """For each block the blocks that every path from the entry passes; empty if unreachable."""
    reachable = _reachable(blocks)
    dominators = [
        set(reachable) if index in reachable else set() for index in range(len(blocks))
    ]
    if blocks:
        dominators[0] = {0}
    predecessors: list[list[int]] = [[] for _ in blocks]
    for index in reachable:
        for successor in blocks[index].successors:
            predecessors[successor].append(index)
    changed = True
    while changed:
        changed = False
        for index in sorted(reachable - {0}):
            meet = set.intersection(*(dominators[p] for p in predecessors[index])) | {
                index
            }
            if meet != dominators[index]:
                dominators[index] = meet
                changed = True
    return dominators


def _reachable(blocks: Sequence[Block]) -> set[int]:
    seen: set[int] = set()
    todo = [0] if blocks else []
    while todo:
        index = todo.pop()
        if index not in seen:
            seen.add(index)
            todo.extend(blocks[index].successors)
    return seen


def _collect(start: int, body: set[int], predecessors: Sequence[Sequence[int]]) -> None:
    """Add to a loop's body every block that reaches `start` without passing the head."""
    todo = [start]
    while todo:
        index = todo.pop()
        if index not in body:
            body.add(index)
            todo.extend(predecessors[index])
