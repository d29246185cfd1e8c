# SPDX-License-Identifier: Apache-2.0
"""Tensor memory and the products that accumulate in it: the tcgen05 instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..ptx import Address, Immediate, Instruction, Operand, Vector
from ..tcgen05 import KINDS, Form
from ..tensor_memory import SHAPES, movement
from .emitter import Emitter, UnsupportedInstruction, elements, emits

_CTA_GROUPS = ("cta_group::1", "cta_group::2")
_COLLECTIVE = ("sync", "aligned", "b32")
_COUNTS = frozenset(f"x{1 << power}" for power in range(8))
_LARGEST_SHIFT = 15
_COLLECTORS = tuple(
    f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard")
)
"""No effect: what the buffer keeps of A is what memory holds, as A must not change meanwhile."""


def check_cta_groups(instructions: Iterable[Instruction]) -> None:
    """Refuses a kernel that mixes the sizes of CTA groups, as ptxas does."""
    seen = ""
    for instruction in instructions:
        if instruction.opcode != "tcgen05":
            continue
        for group in _CTA_GROUPS:
            if instruction.has(group):
                if seen not in ("", group):
                    raise UnsupportedInstruction(
                        instruction, f"the kernel uses {seen}, too"
                    )
                seen = group


def _ctas(instruction: Instruction) -> int:
    group = instruction.modifiers[1]
    if group not in _CTA_GROUPS:
        raise UnsupportedInstruction(instruction, "no .cta_group")
    return int(group[-1])


def _alloc(emitter: Emitter, instruction: Instruction) -> None:
    emitter.only(instruction, ("alloc", *_CTA_GROUPS, *_COLLECTIVE, "shared::cta"))
    destination, columns = instruction.operands
    call = emitter.call(
        "tensor_transfers.alloc",
        str(_ctas(instruction)),
        emitter.address(destination),
        emitter.value(columns, "u32"),
    )
    if emitter.gate:
        emitter.lines.append(f"return {call}")


def _dealloc(emitter: Emitter, instruction: Instruction) -> None:
    emitter.only(instruction, ("dealloc", *_CTA_GROUPS, *_COLLECTIVE))
    values = [emitter.value(operand, "u32") for operand in instruction.operands]
    call = emitter.call("tensor_transfers.dealloc", str(_ctas(instruction)), *values)
    if emitter.gate:
        emitter.lines.append(f"return {call}")


def _relinquish(emitter: Emitter, instruction: Instruction) -> None:
    emitter.only(
        instruction, ("relinquish_alloc_permit", *_CTA_GROUPS, "sync", "aligned")
    )
    emitter.lines.append(emitter.call("tensor_transfers.relinquish"))


def _movement(
    emitter: Emitter, instruction: Instruction, packing: str, offset: list[Operand]
) -> str:
    """The name of the Movement of a load or store, of as many registers as it says.

    `offset` is the distance of the two halves of .16x32bx2, which no other shape has.
    """
    modifiers = instruction.modifiers
    if len(modifiers) < 6 or modifiers[1:3] != ("sync", "aligned"):
        raise UnsupportedInstruction(instruction)  # tcgen05.ld.red, too
    action, shape, count = modifiers[0], modifiers[3], modifiers[4]
    if shape not in SHAPES or count not in _COUNTS:
        raise UnsupportedInstruction(instruction, f".{shape}.{count}")
    emitter.only(instruction, (action, *_COLLECTIVE, shape, count, packing))
    repetitions, packed = int(count[1:]), instruction.has(packing)
    registers = elements(instruction.operands[0 if action == "ld" else -1])
    if len(registers) != SHAPES[shape][0] * repetitions:
        raise emitter.unsupported(f"{len(registers)} registers")
    split = 0
    if shape == "16x32bx2" and len(offset) == 1 and isinstance(offset[0], Immediate):
        split = offset[0].value
    elif shape == "16x32bx2" or offset:
        raise emitter.unsupported("its offset")
    name = f"MOVED_{shape}_{count}_{int(packed)}_{split}".replace("-", "m")
    return emitter.program.bind(
        name, lambda: movement(shape, repetitions, packed, split)
    )


def _load(emitter: Emitter, instruction: Instruction) -> None:
    destination, source, *offset = instruction.operands
    moved = _movement(emitter, instruction, "pack::16b", offset)
    call = emitter.call("tensor_transfers.load", emitter.address(source), moved)
    emitter.lines.append(f"loaded = {call}")
    for number, register in enumerate(elements(destination)):
        emitter.assign(register, f"loaded[{number}]", "u32")


def _store(emitter: Emitter, instruction: Instruction) -> None:
    destination, *offset, source = instruction.operands
    moved = _movement(emitter, instruction, "unpack::16b", offset)
    values = ", ".join(emitter.value(register, "u32") for register in elements(source))
    address = emitter.address(destination)
    emitter.lines.append(
        emitter.call("tensor_transfers.store", address, moved, f"({values},)")
    )


def _wait_loads(emitter: Emitter, instruction: Instruction) -> None:
    emitter.only(instruction, ("wait::ld", "sync", "aligned"))
    emitter.lines.append(emitter.call("tensor_transfers.wait_loads"))


def _wait_stores(emitter: Emitter, instruction: Instruction) -> None:
    emitter.only(instruction, ("wait::st", "sync", "aligned"))
    emitter.lines.append(emitter.call("tensor_transfers.wait_stores"))


def _fence(emitter: Emitter, instruction: Instruction) -> None:
    emitter.only(instruction, (instruction.modifiers[0],))
    side = instruction.modifiers[0].removeprefix("fence::").removesuffix("_thread_sync")
    emitter.lines.append(emitter.call(f"tensor_transfers.fence_{side}"))


def _mma(emitter: Emitter, instruction: Instruction) -> None:
    modifiers = instruction.modifiers
    if len(modifiers) < 3 or not modifiers[2].startswith("kind::"):
        raise UnsupportedInstruction(instruction)
    kind = modifiers[2].removeprefix("kind::")
    emitter.only(instruction, ("mma", *_CTA_GROUPS, modifiers[2], *_COLLECTORS))
    ctas = _ctas(instruction)
    d, a, b, descriptor, *rest = instruction.operands
    disabled: tuple[Operand, ...] = ()
    if isinstance(rest[0], Vector):
        disabled = rest[0].elements
        del rest[0]
        if len(disabled) != 4 * ctas:
            raise emitter.unsupported("its disabled output lanes")
    accumulate, *scale = rest
    shift = _shift(emitter, scale, kind)
    a_in_tensor_memory = isinstance(a, Address)
    form = emitter.program.bind(
        f"MMA_{kind}_{ctas}_{int(a_in_tensor_memory)}_{shift}",
        lambda: Form(kind, ctas, a_in_tensor_memory, shift),
    )
    first = (
        emitter.address(a) if a_in_tensor_memory else f"{emitter.value(a, 'u64')}, 0"
    )
    masks = "".join(f"{emitter.value(operand, 'u32')}, " for operand in disabled)
    emitter.lines.append(
        emitter.call(
            "tensor_products.issue",
            form,
            emitter.address(d),
            first,
            emitter.value(b, "u64"),
            emitter.value(descriptor, "u32"),
            f"({masks})",
            emitter.value(accumulate, "bool"),
        )
    )


def _shift(emitter: Emitter, scale: list[Operand], kind: str) -> int:
    """The optional scale-input-d."""
    if not scale:
        return 0
    (operand,) = scale
    if not isinstance(operand, Immediate) or kind == "f8f6f4":
        raise emitter.unsupported("its scale-input-d")
    if not 0 <= operand.value <= _LARGEST_SHIFT:
        raise emitter.unsupported(f"a scale-input-d of {operand.value}")
    return operand.value


def _commit(emitter: Emitter, instruction: Instruction) -> None:
    multicast = "multicast::cluster"
    emitter.only(
        instruction,
        (
            *("commit", *_CTA_GROUPS, "mbarrier::arrive::one"),
            *("shared::cluster", multicast, "b64"),
        ),
    )
    _ctas(instruction)
    if not instruction.has("mbarrier::arrive::one"):
        raise UnsupportedInstruction(instruction)
    barrier, *targets = instruction.operands
    if instruction.has(multicast) != (len(targets) == 1):
        raise emitter.unsupported("its operands")
    emitter.lines.append(
        emitter.call(
            "tensor_products.commit",
            emitter.address(barrier),
            emitter.value(targets[0], "u16") if targets else "None",
        )
    )


_ACTIONS: dict[str, Callable[[Emitter, Instruction], None]] = {
    "alloc": _alloc,
    "dealloc": _dealloc,
    "relinquish_alloc_permit": _relinquish,
    "ld": _load,
    "st": _store,
    "wait::ld": _wait_loads,
    "wait::st": _wait_stores,
    "fence::before_thread_sync": _fence,
    "fence::after_thread_sync": _fence,
    "mma": _mma,
    "commit": _commit,
}


@emits(
    "tcgen05",
    modifiers=" ".join(
        (
            *_ACTIONS,
            *_CTA_GROUPS,
            *_COLLECTIVE,
            *("shared::cta", "shared::cluster", "multicast::cluster"),
            *("mbarrier::arrive::one", "b64", "pack::16b", "unpack::16b"),
            *SHAPES,
            *_COUNTS,
            *(f"kind::{kind}" for kind in KINDS),
            *_COLLECTORS,
        )
    ),
)
def _tensor(emitter: Emitter, instruction: Instruction) -> None:
    emit = _ACTIONS.get(instruction.modifiers[0])
    if emit is None:
        raise UnsupportedInstruction(instruction)
    emit(emitter, instruction)
