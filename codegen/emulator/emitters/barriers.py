# SPDX-License-Identifier: Apache-2.0
"""Barriers of threads, mbarriers, and fences."""

from __future__ import annotations

from ..checks import FENCED, GLOBAL
from ..ptx import Address, Instruction
from .emitter import Emitter, UnsupportedInstruction, emits


@emits("bar", modifiers="sync arrive warp")
@emits(
    "barrier",
    modifiers="sync arrive aligned cta cluster wait relaxed release acquire",
)
def _barrier(emitter: Emitter, instruction: Instruction) -> None:
    modifiers = instruction.modifiers
    if modifiers[0] == "cluster":
        if modifiers[1] == "arrive":
            relaxed = str(instruction.has("relaxed"))
            emitter.lines.append(
                emitter.call("thread_barriers.cluster_arrive", relaxed)
            )
        else:
            emitter.lines.append(
                f"return {emitter.call('thread_barriers.cluster_wait')}"
            )
        return
    if modifiers[:2] == ("warp", "sync"):
        emitter.check_members(instruction.operands[0])
        emitter.lines.append(emitter.call("thread_barriers.meet"))
        return
    barrier, *count = instruction.operands
    threads = emitter.value(count[0], "u32") if count else "None"
    arguments = emitter.value(barrier, "u32"), threads
    if instruction.has("sync"):
        emitter.lines.append(
            f"return {emitter.call('thread_barriers.sync', *arguments)}"
        )
    else:
        emitter.lines.append(emitter.call("thread_barriers.arrive", *arguments))


@emits(
    "mbarrier",
    modifiers="init inval arrive expect_tx try_wait test_wait parity acquire release relaxed "
    "cta cluster shared shared::cta shared::cluster b64",
)
def _mbarrier(emitter: Emitter, instruction: Instruction) -> None:
    action = instruction.modifiers[0]
    operands = instruction.operands
    if action == "init":
        count = emitter.value(operands[1], "u32")
        emitter.lines.append(
            emitter.call("mbarriers.init", emitter.address(operands[0]), count)
        )
    elif action in ("try_wait", "test_wait"):
        if not instruction.has("parity"):
            raise UnsupportedInstruction(instruction, "a wait on a state")
        if emitter.gate:
            parity = emitter.value(operands[2], "u32")
            polls = str(action == "test_wait")
            call = emitter.call(
                "mbarriers.wait", emitter.address(operands[1]), parity, polls
            )
            emitter.lines.append(f"return {call}")
        else:
            emitter.assign(operands[0], "ctx.mbarriers.phase_complete", "bool")
    elif action in ("arrive", "expect_tx"):
        rest = list(operands)
        if not isinstance(rest[0], Address):
            # The state that arrive returns is opaque; only waits on a state could read it.
            rest.pop(0)
        expects = instruction.has("expect_tx")
        arrives = action == "arrive"
        count = emitter.value(rest[1], "u32") if len(rest) > 1 and not expects else "1"
        transactions = emitter.value(rest[1], "u32") if expects else "0"
        call = emitter.call(
            "mbarriers.arrive",
            emitter.address(rest[0]),
            count if arrives else "0",
            transactions,
            str(instruction.has("shared::cluster")),
        )
        emitter.lines.append(call)
    elif action == "inval":
        emitter.lines.append(
            emitter.call("mbarriers.invalidate", emitter.address(operands[0]))
        )
    else:
        raise UnsupportedInstruction(instruction)


_THREADS = [("acq_rel", "gpu"), ("acq_rel", "sys"), ("sc", "gpu"), ("sc", "sys")]


@emits(
    "fence",
    modifiers="proxy async shared::cta global mbarrier_init release cluster "
    "acq_rel sc gpu sys",
)
def _fence(emitter: Emitter, instruction: Instruction) -> None:
    modifiers = instruction.modifiers
    if modifiers[:2] == ("proxy", "async"):
        spaces = {"shared::cta": FENCED, "global": GLOBAL}
        rows = [row for space, row in spaces.items() if instruction.has(space)]
        # Without a space the fence covers all of them.
        fenced = repr(tuple(rows or spaces.values()))
        emitter.lines.append(emitter.call("transfers.fence_async", fenced))
    elif modifiers in _THREADS:
        emitter.lines.append(emitter.call("atomics.fence"))
    elif modifiers == ("mbarrier_init", "release", "cluster"):
        emitter.lines.append(emitter.call("mbarriers.fence_init"))
    else:
        raise UnsupportedInstruction(instruction)


@emits("membar", modifiers="gl sys")
def _memory_barrier(emitter: Emitter, instruction: Instruction) -> None:
    emitter.lines.append(emitter.call("atomics.fence"))
