# SPDX-License-Identifier: Apache-2.0
"""The skeleton of a kernel: its control flow, barriers, copies and stores, without any arithmetic
on data.

A program slice. What decides the schedule is kept: barriers of every kind, TMA loads and stores,
`st.global`, `red`, and every instruction and branch that their operands, guards and execution
depend on. The rest goes: products, tensor memory, values in shared memory, softmax. A branch on
which nothing that is kept depends, the vote for a rescaling for instance, goes where both of its
ways meet. What `st.global` stores and `red` adds becomes zero.

Integers in global memory may decide the schedule, as lists of blocks do: an `ld.global` on which it
depends is kept, and reads the memory that a walk is given. Warps may hand such integers on through
shared memory: an `ld.shared` on which the schedule depends is kept, and with it every `st.shared`
of what is computed without data; where none of these stored, a walk reads 0. A kernel whose
schedule depends on other data has no skeleton.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from .gates import ALIGNED_NONE, alignment, is_gate
from .ptx import (
    Address,
    Guard,
    Immediate,
    Instruction,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
    Vector,
)

_EXIT = -1
"""Number of the block after every exit."""
_BRANCHES = frozenset(("bra", "ret", "exit"))
_WITHOUT_RESULT = frozenset(
    ("st", "stmatrix", "bar", "barrier", "cp", "fence", "prefetch", "setmaxnreg")
) | frozenset(("griddepcontrol", "red", "trap", *_BRANCHES))
_DATA = frozenset(("wgmma", "tcgen05", "ldmatrix", "mma", "atom"))
"""Opcodes whose results are data; so are those of `ld`, but of `_INTEGERS`."""

_INTEGERS = frozenset(("param", "global", "shared"))
"""State spaces in which a schedule may have its integers."""


class DataDependence(Exception):
    """What the schedule depends on is computed from data; names the lines."""

    def __init__(self, source: Instruction, user: Instruction) -> None:
        super().__init__(
            f"PTX line {user.line}: {user.name} depends on the data of {source.name} in line "
            f"{source.line}"
        )
        self.line = user.line


def skeleton(module: Module) -> Module:
    """The module's skeleton; raises DataDependence when it has none."""
    return _rebuild(module, _Slice(module))


def _is_root(instruction: Instruction) -> bool:
    """Whether it is part of the schedule itself."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if opcode == "tcgen05":
        return modifiers[0] == "commit"
    if opcode == "st":
        return modifiers[0] == "global"
    return opcode in ("mbarrier", "bar", "barrier", "cp", "red", "atom")


def _place(instruction: Instruction) -> int | None:
    """Of an instruction that hands data to others, the operand that says where; else None."""
    if instruction.opcode == "st" and not _is_shared(instruction, "st"):
        return 0
    return {"red": 0, "atom": 1}.get(instruction.opcode)


def _is_data(instruction: Instruction) -> bool:
    """Whether its results are data."""
    if instruction.opcode == "ld":
        return instruction.modifiers[0] not in _INTEGERS
    return instruction.opcode in _DATA


def _is_shared(instruction: Instruction, opcode: str) -> bool:
    return instruction.opcode == opcode and instruction.modifiers[0] == "shared"


def _data_registers(
    instructions: Sequence[Instruction], splits: Sequence[tuple[list[str], list[str]]]
) -> set[str]:
    """Names of the registers whose values are computed from data, or from shared memory at all.

    By iteration to the fixed point.
    """
    found: set[str] = set()
    count = -1
    while count < len(found):
        count = len(found)
        for instruction, (written, read) in zip(instructions, splits, strict=True):
            loads = _is_data(instruction) or _is_shared(instruction, "ld")
            if loads or not found.isdisjoint(read):
                found.update(written)
    return found


def _names(operand: Operand) -> Iterator[str]:
    """Names of the registers in an operand."""
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Negated):
        yield operand.register.name
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from _names(element)
    elif isinstance(operand, Pair):
        yield from _names(operand.first)
        yield from _names(operand.second)
    elif isinstance(operand, Address):
        yield from _names(operand.base)
        for coordinate in operand.coordinates or ():
            yield from _names(coordinate)


def _split(instruction: Instruction) -> tuple[list[str], list[str]]:
    """Names of the registers that it writes, and of those that it reads."""
    written: list[str] = []
    operands = list(instruction.operands)
    if (
        operands
        and instruction.opcode not in _WITHOUT_RESULT
        and not isinstance(operands[0], Address)
        and instruction.name != "mbarrier.inval"
    ):
        written = list(_names(operands.pop(0)))
    read = [name for operand in operands for name in _names(operand)]
    if instruction.guard:
        read.append(instruction.guard.register.name)
    return written, read


@dataclass
class _Block:
    """Instructions `begin` to `end`, the branch at the end included."""

    begin: int
    end: int
    successors: tuple[int, ...] = ()
    """Where it can go, the way of the branch first."""
    join: int = _EXIT
    """The block that every way from here passes first: its immediate post-dominator."""
    depends: set[int] = field(default_factory=set)
    """Indices of the branches that decide whether it runs."""


class _Slice:
    """Which instructions of a module are kept."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.blocks = _blocks(module)
        _find_joins(self.blocks)
        _find_dependences(module, self.blocks)
        self.kept: set[int] = set()
        self._users: dict[str, int] = {}
        """Register that is needed to the index of an instruction that reads it."""
        self._keep()

    def _keep(self) -> None:
        instructions = self.module.instructions
        block_of = {
            index: block
            for block in self.blocks
            for index in range(block.begin, block.end)
        }
        splits = [_split(instruction) for instruction in instructions]
        writers: defaultdict[str, list[int]] = defaultdict(list)
        for index, (written, _) in enumerate(splits):
            for name in written:
                writers[name].append(index)
        of_data = _data_registers(instructions, splits)
        waiting = [i for i, each in enumerate(instructions) if _is_root(each)]
        handed_on = [
            index
            for index, each in enumerate(instructions)
            if _is_shared(each, "st") and of_data.isdisjoint(splits[index][1])
        ]
        while waiting:
            index = waiting.pop()
            if index in self.kept:
                continue
            self.kept.add(index)
            waiting += block_of[index].depends
            if _is_shared(instructions[index], "ld"):
                waiting += handed_on
            for name in self._needed(index, splits[index][1]):
                for writer in writers[name]:
                    one = instructions[writer]
                    if _is_data(one) or (_is_shared(one, "ld") and not handed_on):
                        raise DataDependence(
                            instructions[writer], instructions[self._users[name]]
                        )
                    waiting.append(writer)

    def _needed(self, index: int, read: list[str]) -> Iterator[str]:
        """The registers that a kept instruction reads, those that nobody has asked for before."""
        instruction = self.module.instructions[index]
        place = _place(instruction)
        if place is not None:
            read = list(_names(instruction.operands[place]))
            if instruction.guard:
                read.append(instruction.guard.register.name)
        for name in read:
            if name not in self._users:
                self._users[name] = index
                yield name


def _blocks(module: Module) -> list[_Block]:
    instructions, labels = module.instructions, module.labels
    ends = {i + 1 for i, each in enumerate(instructions) if each.opcode in _BRANCHES}
    bounds = sorted({0, len(instructions), *ends, *labels.values()})
    number = {begin: place for place, begin in enumerate(bounds[:-1])}
    number[len(instructions)] = _EXIT
    blocks = []
    for begin, end in itertools.pairwise(bounds):
        last = instructions[end - 1]
        ways = []
        if last.opcode == "bra":
            (label,) = last.operands
            assert isinstance(label, Symbol)
            ways.append(number[labels[label.name]])
        elif last.opcode in _BRANCHES:
            ways.append(_EXIT)
        if last.opcode not in _BRANCHES or last.guard:
            ways.append(number[end])
        blocks.append(_Block(begin, end, tuple(ways)))
    return blocks


def _find_joins(blocks: list[_Block]) -> None:
    """Immediate post-dominators, by iteration to the fixed point from the last block on."""
    order = _from_the_exit(blocks)
    rank = {place: position for position, place in enumerate(order)}
    joins: dict[int, int] = {_EXIT: _EXIT}

    def common(one: int, other: int) -> int:
        while one != other:
            while rank[one] > rank[other]:
                one = joins[one]
            while rank[other] > rank[one]:
                other = joins[other]
        return one

    changed = True
    while changed:
        changed = False
        for place in order[1:]:
            known = [way for way in blocks[place].successors if way in joins]
            join = known[0]
            for way in known[1:]:
                join = common(join, way)
            if joins.get(place) != join:
                joins[place] = join
                changed = True
    for place, join in joins.items():
        if place != _EXIT:
            blocks[place].join = join


def _from_the_exit(blocks: list[_Block]) -> list[int]:
    """The blocks from which the exit can be reached: each after one of its successors."""
    before: defaultdict[int, list[int]] = defaultdict(list)
    for place, block in enumerate(blocks):
        for way in block.successors:
            before[way].append(place)
    finished: list[int] = []
    seen = {_EXIT}
    stack = [(_EXIT, iter(before[_EXIT]))]
    while stack:
        place, rest = stack[-1]
        following = next((other for other in rest if other not in seen), None)
        if following is None:
            stack.pop()
            finished.append(place)
        else:
            seen.add(following)
            stack.append((following, iter(before[following])))
    return finished[::-1]


def _find_dependences(module: Module, blocks: list[_Block]) -> None:
    for block in blocks:
        if len(block.successors) < 2:
            continue
        for way in block.successors:
            while way not in (block.join, _EXIT):
                blocks[way].depends.add(block.end - 1)
                way = blocks[way].join


def _rebuild(module: Module, kept: _Slice) -> Module:
    """The kept instructions, with branches between what is left of the blocks."""
    blocks = kept.blocks
    bodies = [_body(module, block, kept.kept) for block in blocks]
    ways = [_ways(block, kept.kept) for block in blocks]

    def final(place: int) -> int:
        """Where one gets from a block without instructions."""
        seen = set()
        while (
            place != _EXIT
            and not bodies[place]
            and len(ways[place]) == 1
            and place not in seen
        ):
            seen.add(place)
            (place,) = ways[place]
        return place

    ways = [tuple(dict.fromkeys(map(final, each))) for each in ways]
    start = final(0)
    _guard_short_ways(module, blocks, bodies, ways)
    order = sorted(_reached(start, ways))
    return _join_up(module, blocks, bodies, ways, order, start)


def _reached(start: int, ways: list[tuple[int, ...]]) -> set[int]:
    """The blocks that one gets to from the first one."""
    reached = {start}
    waiting = [start]
    while waiting:
        for way in ways[waiting.pop()]:
            if way != _EXIT and way not in reached:
                reached.add(way)
                waiting.append(way)
    return reached


def _guard_short_ways(
    module: Module,
    blocks: list[_Block],
    bodies: list[list[Instruction]],
    ways: list[tuple[int, ...]],
) -> None:
    """Guards instead of branches around a few instructions: what an elected lane does, mostly.

    A block that a branch only jumps over becomes guarded instructions of the block before it.
    """
    before = Counter(way for each in ways for way in each)
    for place in reversed(range(len(blocks))):
        if len(ways[place]) != 2:
            continue
        over, inner = ways[place]
        guard = module.instructions[blocks[place].end - 1].guard
        assert guard is not None  # it has two ways
        if (
            before[inner] == 1
            and ways[inner] == (over,)
            and inner != place
            and all(_may_be_guarded(each, guard) for each in bodies[inner])
        ):
            runs = Guard(guard.register, not guard.negated)
            bodies[place] += [replace(each, guard=runs) for each in bodies[inner]]
            ways[place] = (over,)
            before[over] -= 1


def _may_be_guarded(instruction: Instruction, guard: Guard) -> bool:
    return (
        instruction.guard is None
        and not is_gate(instruction)
        and alignment(instruction) == ALIGNED_NONE
        and guard.register.name not in _split(instruction)[0]
    )


def _body(module: Module, block: _Block, kept: set[int]) -> list[Instruction]:
    """What is left of a block, its branch excluded."""
    return [
        _without_data(module.instructions[index])
        for index in range(block.begin, block.end)
        if index in kept and module.instructions[index].opcode not in _BRANCHES
    ]


def _ways(block: _Block, kept: set[int]) -> tuple[int, ...]:
    """Where what is left of a block goes: two ways only with a branch that is kept."""
    if len(block.successors) == 1 or block.end - 1 in kept:
        return block.successors
    return (block.join,)


def _without_data(instruction: Instruction) -> Instruction:
    """Values that leave the CTA become zero."""
    place = _place(instruction)
    if place is None:
        return instruction
    *targets, source = instruction.operands[: place + 2]
    zero = Immediate(0, is_float=instruction.modifiers[-1] == "f32")
    count = len(source.elements) if isinstance(source, Vector) else 0
    zeros = Vector((zero,) * count) if count else zero
    hints = instruction.operands[place + 2 :]
    return replace(instruction, operands=(*targets, zeros, *hints))


def _join_up(
    module: Module,
    blocks: list[_Block],
    bodies: list[list[Instruction]],
    ways: list[tuple[int, ...]],
    order: list[int],
    start: int,
) -> Module:
    """One block after another, with labels for those that are jumped to."""
    instructions: list[Instruction] = []
    places: dict[int, int] = {}
    jumped: set[int] = set()

    def jump(way: int, branch: Instruction) -> None:
        if way == _EXIT:
            instructions.append(
                replace(branch, opcode="ret", modifiers=(), operands=())
            )
        else:
            jumped.add(way)
            target = Symbol(f"$block{way}")
            instructions.append(
                replace(branch, opcode="bra", modifiers=(), operands=(target,))
            )

    def leave(way: int, following: int, last: Instruction) -> None:
        if way != following:
            jump(way, replace(last, guard=None))

    if start != (order[0] if order else _EXIT):
        leave(start, order[0] if order else _EXIT, module.instructions[0])
    for position, place in enumerate(order):
        following = order[position + 1] if position + 1 < len(order) else len(blocks)
        places[place] = len(instructions)
        instructions += bodies[place]
        last = module.instructions[blocks[place].end - 1]
        first, *second = ways[place]
        if second and second[0] != first:
            jump(first, last)
            leave(second[0], following, last)
        else:
            leave(first, following, last)
    labels = {f"$block{place}": places[place] for place in jumped}
    return replace(module, instructions=tuple(instructions), labels=labels)
