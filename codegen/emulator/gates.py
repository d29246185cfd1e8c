# SPDX-License-Identifier: Apache-2.0
"""Where lanes wait, for whom, and where they let others go on: what splits a kernel into blocks."""

from __future__ import annotations

from .additions import ROUNDED
from .ptx import Instruction

ALIGNED_NONE, ALIGNED_WARP, ALIGNED_GROUP = range(3)
"""Who must execute an instruction together: nobody, a warp's lanes, a warpgroup's."""

_STRONG = frozenset(("acquire", "release", "relaxed", "volatile"))
_ORDERS = frozenset(("acquire", "release", "acq_rel"))
_GROUP_ALIGNED = frozenset(("fence", "mma_async", "commit_group"))  # of wgmma


def alignment(instruction: Instruction) -> int:
    """Which lanes must execute the instruction together."""
    if instruction.opcode == "wgmma" and instruction.modifiers[0] in _GROUP_ALIGNED:
        return ALIGNED_GROUP
    # Barriers count threads; here warps arrive whole, at `barrier` without `.aligned` too: its
    # lanes wait for the others of their warp first, which a deadlock would tell.
    collective = instruction.opcode in (
        "elect",
        "redux",
        "shfl",
        "vote",
        "ldmatrix",
        "stmatrix",
        "setmaxnreg",
    )
    barrier = instruction.opcode in ("bar", "barrier", "wgmma")
    tensor = instruction.opcode == "tcgen05" and instruction.has("sync")
    return ALIGNED_WARP if collective or barrier or tensor else ALIGNED_NONE


def is_gate(instruction: Instruction) -> bool:
    """Whether lanes can be held back at the instruction."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if is_poll(instruction):
        return True
    if opcode == "mbarrier":
        return modifiers[0] in ("try_wait", "test_wait")
    if opcode == "barrier" and modifiers[0] == "cluster":
        return modifiers[1] == "wait"
    if opcode in ("bar", "barrier"):
        return "sync" in modifiers and "warp" not in modifiers
    if opcode == "wgmma":
        return modifiers[0] == "wait_group"
    if opcode == "tcgen05":
        return modifiers[0] in ("alloc", "dealloc")
    return opcode == "setmaxnreg" or (opcode == "cp" and "wait_group" in modifiers)


def is_signal(instruction: Instruction) -> bool:
    """Whether other warps can see that it ran: others may run right after it."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    return (
        (opcode == "mbarrier" and modifiers[0] == "arrive")
        or (opcode in ("bar", "barrier") and "arrive" in modifiers)
        or (opcode == "cp" and not modifiers[2].endswith("_group"))
        or (opcode == "tcgen05" and modifiers[0] == "commit")
        or (opcode in ("red", "atom") and ROUNDED.isdisjoint(modifiers))
        or (opcode == "st" and not _STRONG.isdisjoint(modifiers))
    )


def is_poll(instruction: Instruction) -> bool:
    """Whether it is a load that may be repeated until another CTA writes the word."""
    strong = not _STRONG.isdisjoint(instruction.modifiers)
    return instruction.opcode == "ld" and strong and instruction.guard is None


def orders_global_memory(instruction: Instruction) -> bool:
    """Whether it orders accesses to global memory: of threads, or of the asynchronous proxy."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if opcode == "fence" and "proxy" in modifiers:
        return "async" in modifiers and "shared::cta" not in modifiers
    if opcode in ("fence", "membar"):
        return opcode == "membar" or modifiers[0] in ("acq_rel", "sc")
    return opcode in ("ld", "st", "red", "atom") and not _ORDERS.isdisjoint(modifiers)


def is_addition(instruction: Instruction) -> bool:
    """Whether it adds to memory that other CTAs add to."""
    opcode = instruction.opcode
    return opcode in ("red", "atom") or (opcode == "cp" and instruction.has("reduce"))


def waits_for_writes(instruction: Instruction) -> bool:
    """Whether it waits until bulk stores are visible, and not only for their reads."""
    waits = instruction.opcode == "cp" and instruction.has("wait_group")
    return waits and not instruction.has("read")
