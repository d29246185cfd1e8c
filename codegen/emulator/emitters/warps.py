# SPDX-License-Identifier: Apache-2.0
"""What the lanes of a warp do together, and what a warp or a grid asks of the hardware."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..lanes import LANES, WARP
from ..ptx import Immediate, Instruction, Pair
from .dtypes import PTX_TYPES
from .emitter import Emitter, emits


@emits("elect", modifiers="sync")
def _elect(emitter: Emitter, instruction: Instruction) -> None:
    destination, members = instruction.operands
    emitter.check_members(members)
    if not isinstance(destination, Pair):
        raise emitter.unsupported("it needs d|p")
    emitter.lines.append(f"leader, elected = {emitter.call('elect')}")
    emitter.assign(destination.first, "leader", "u32")
    emitter.assign(destination.second, "elected", "bool")


@emits("shfl", modifiers="sync idx bfly up down b32")
def _shuffle(emitter: Emitter, instruction: Instruction) -> None:
    destination, value, lane, clamp, members = instruction.operands
    emitter.check_members(members)
    mode = instruction.modifiers[1]
    if isinstance(lane, Immediate) and isinstance(clamp, Immediate):
        fixed = [np.full(LANES, operand.value, np.int32) for operand in (lane, clamp)]
        name = f"SHUFFLE_{mode}_{lane.value & 31}_{clamp.value & 0x1F1F}"
        sources = emitter.program.bind(name, lambda: shuffle_sources(mode, *fixed))
    else:
        function = emitter.program.bind("shuffle_sources", lambda: shuffle_sources)
        lanes = f"{emitter.value(lane, 'i32')}, {emitter.value(clamp, 'i32')}"
        sources = f"{function}({mode!r}, {lanes})"
    emitter.lines.append(f"source, inside = {sources}")
    first = destination.first if isinstance(destination, Pair) else destination
    home = emitter.home(first)
    held = emitter.value(value, home)
    emitter.lines.append(f"shuffled = {held}[source]")
    if isinstance(destination, Pair):
        emitter.assign(destination.second, "inside", "bool")
    emitter.assign(first, "shuffled", home)


def shuffle_sources(mode: str, lane: Any, clamp: Any) -> tuple[Any, Any]:
    """The lane that each of 128 lanes reads in a `shfl`, and whether it lies in the segment.

    lane and clamp are the PTX operands b and c, int32 [128].
    """
    own = np.arange(LANES, dtype=np.int32) % WARP
    base = np.arange(LANES, dtype=np.int32) - own
    segment, bound = (clamp >> 8) & 31, clamp & 31
    lowest = own & segment
    highest = lowest | (bound & ~segment)
    lane = lane & 31
    if mode == "up":
        source = own - lane
        inside = source >= highest
    else:
        source = {
            "down": own + lane,
            "bfly": own ^ lane,
            "idx": lowest | (lane & ~segment),
        }[mode]
        inside = source <= highest
    return base + np.where(inside, source, own), inside


@emits("vote", modifiers="sync any all ballot pred b32")
def _vote(emitter: Emitter, instruction: Instruction) -> None:
    destination, predicate, members = instruction.operands
    emitter.check_members(members)
    mode, kind = instruction.modifiers[1:]
    value = emitter.value(predicate, "bool")
    emitter.assign(destination, emitter.call(f"vote_{mode}", value), PTX_TYPES[kind])


_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}


@emits("redux", modifiers="sync add min max s32 u32")
def _reduce(emitter: Emitter, instruction: Instruction) -> None:
    destination, value, members = instruction.operands
    emitter.check_members(members)
    mode, kind = instruction.modifiers[1:]
    function = emitter.program.bind(f"reduce_{mode}", lambda: reduction(mode))
    held = emitter.value(value, PTX_TYPES[kind])
    emitter.assign(destination, f"{function}({held})", PTX_TYPES[kind])


def reduction(mode: str) -> Any:
    """What `redux.sync` makes of integers [128]: in each lane, those of its warp together."""
    reduce = _REDUCTIONS[mode].reduce

    def of_warps(values: Any) -> Any:
        by_warp = np.broadcast_to(values, LANES).reshape(-1, WARP)
        return np.repeat(reduce(by_warp, axis=1, dtype=by_warp.dtype), WARP)

    return of_warps


@emits("setmaxnreg", modifiers="dec inc sync aligned u32")
def _set_registers(emitter: Emitter, instruction: Instruction) -> None:
    direction = instruction.modifiers[0]
    count = str(emitter.immediate(instruction.operands[0]))
    if emitter.gate:
        emitter.lines.append(
            f"return {emitter.call('set_max_registers', repr(direction), count)}"
        )


@emits("trap", modifiers="")
def _trap(emitter: Emitter, instruction: Instruction) -> None:
    emitter.lines.append(emitter.call("trap"))


@emits("griddepcontrol", modifiers="wait launch_dependents")
def _grid_dependency(emitter: Emitter, instruction: Instruction) -> None:
    """When the next launch starts is not modelled: `launch_dependents` has no effect."""
    if instruction.has("wait"):
        emitter.lines.append(emitter.call("transfers.wait_for_launches"))
