# SPDX-License-Identifier: Apache-2.0
"""Lines in batches leave every register as the lines one by one do, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fmha_gen.emulator import numerics
from fmha_gen.emulator.batches import batched
from fmha_gen.emulator.lanes import IN_FLIGHT, LANES
from hypothesis import example, given
from hypothesis import strategies as st

FLOATS, WIDE = range(12), range(12, 16)  # slots
HOMES = ["f32"] * len(FLOATS) + ["u64"] * len(WIDE)
CONSTANTS = {f"K{n}": np.full(LANES, n - 1.5, np.float32) for n in range(3)}
SHIFT = {"K3": np.full(LANES, 32, np.uint64)}

floats = st.sampled_from([f"R[{slot}]" for slot in FLOATS])
operands = st.one_of(floats, st.sampled_from(sorted(CONSTANTS)))


def bits(operand: str) -> str:
    return f"{operand}.view(np.uint32)"


def halves(operand: str) -> str:
    return f"{operand}.view(np.float16)"


def lines_of(target: int, first: str, second: str, how: int) -> str:
    """A line of one of a few patterns, as emitters write them."""
    wide = WIDE[target % len(WIDE)]
    word = f"{first}.view(np.uint32).astype(np.uint64)"
    return (
        f"R[{target}] = {first} * {second}",
        f"R[{target}] = {first} + {second}",
        f"R[{target}] = numerics.ex2_approx_ftz({first})",
        f"R[{target}] = where(mask, numerics.max_f32({first}, {second}), R[{target}])",
        f"R[{target}] = numerics.bf16x2_rn({first}, {second}).view(np.float32)",
        f"R[{wide}] = {word} | {second}.view(np.uint32).astype(np.uint64) << K3",
        f"R[{target}] = (R[{wide}] >> K3).astype(np.uint32).view(np.float32)",
        f"R[{target}] = {first}",
        f"ctx.see(R[{target}])",
        f"if R[{target}] is IN_FLIGHT: ctx.see(None)",
        f"if numerics.saturates({first}, 'e4m3').any(): "
        f"ctx.see(numerics.saturates({first}, 'e4m3'))",
        f"R[{target}] = numerics.add_f16({halves(first)}, {halves(second)}).view(np.float32)",
        f"R[{target}] = numerics.prmt_by({bits(first)}, {bits(second)}, {0x6420})"
        ".view(np.float32)",
        f"if numerics.miscoded({bits(first)}, 1).any(): "
        f"ctx.see(numerics.miscoded({bits(first)}, 1))",
        f"if numerics.saturates_f16x2({bits(first)}, 'e4m3').any(): "
        f"ctx.see(numerics.saturates_f16x2({bits(first)}, 'e4m3'))",
    )[how]


line = st.builds(
    lines_of, st.sampled_from(FLOATS), operands, operands, st.integers(0, 14)
)
repeated = st.builds(  # the same to many registers, as unrolled code does
    lambda how, begin, step, second: [
        lines_of(
            (begin + step * n) % len(FLOATS), f"R[{(begin + n) % 12}]", second, how
        )
        for n in range(6)
    ],
    st.integers(0, 6),
    st.sampled_from(FLOATS),
    st.sampled_from((1, 5, 7)),
    operands,
)
blocks = st.lists(st.one_of(repeated, line.map(lambda each: [each])), max_size=8).map(
    lambda parts: [each for part in parts for each in part]
)


class Context:
    """Sees registers at the moment of a call."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def see(self, values: Any) -> None:
        """Keeps what a register holds, or that it is in flight."""
        self.seen.append(None if values is None else values.tobytes())


def execute(lines: list[str], constants: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """What the registers hold after these lines, and what was seen on the way."""
    rng = np.random.default_rng(0)
    registers: list[Any] = [
        rng.standard_normal(LANES).astype(np.float32) for _ in FLOATS
    ]
    registers += [rng.integers(0, 2**63, LANES).astype(np.uint64) for _ in WIDE]
    registers[3] = IN_FLIGHT
    registers[4] *= np.float32(400)
    context = Context()
    names = {"np": np, "numerics": numerics, "where": np.where, "R": registers}
    names |= {"concatenate": np.concatenate, "mask": np.arange(LANES) % 3 > 0}
    names |= {"ctx": context, "IN_FLIGHT": IN_FLIGHT, **CONSTANTS, **SHIFT, **constants}
    with np.errstate(all="ignore"):
        exec("\n".join(lines), names)
    return registers, context.seen


@given(blocks)
@example(
    [lines_of(n, f"R[{n + 1}]", "K0", 0) for n in range(6)]
)  # reads what is overwritten
def test_batches_leave_the_same_registers(lines: list[str]) -> None:
    constants: dict[str, Any] = {}

    def bind(expression: str) -> str:
        name = f"C{len(constants)}"
        constants[name] = eval(expression, {"concatenate": np.concatenate, **CONSTANTS})
        return name

    expected, saw = execute(lines, {})
    found, seen = execute(batched(lines, HOMES, bind), constants)
    assert seen == saw
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == (LANES,)
        assert one.tobytes() == other.tobytes()
    # A copy is the very array: who asks whether a product is in flight compares identities.
    assert [x is IN_FLIGHT for x in found] == [x is IN_FLIGHT for x in expected]


def test_unrolled_lines_become_one():
    lines = [f"R[{n + 6}] = R[{n}] * K1" for n in range(6)]
    lines += [f"R[{n}] = R[{n + 6}] + R[{n}]" for n in range(6)]
    found = batched(lines, HOMES, pytest.fail)
    assert sum("*" in each for each in found) == sum("+" in each for each in found) == 1
    assert (
        sum("concatenate" in each for each in found) == 1
    )  # the second finds both in rows


def test_checks_of_what_lines_compute_wait_for_them():
    lines = []
    for n in range(6):
        lines += [
            f"R[{n}] = R[{n + 6}] * K1",
            f"if numerics.saturates(R[{n}], 'e4m3').any(): ctx.see(R[{n}])",
        ]
    found = batched([*lines, "R[0] = K2"], HOMES, pytest.fail)
    assert sum("*" in each for each in found) == 1
    assert found[-7:] == [*lines[1::2], "R[0] = K2"]
