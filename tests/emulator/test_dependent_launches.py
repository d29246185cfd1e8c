# SPDX-License-Identifier: Apache-2.0
"""A call of several kernels that add, read and overwrite one workspace, with and without PDL."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from fmha_gen.emulator import machine
from fmha_gen.emulator.launch import Launch
from fmha_gen.emulator.lower import lower_kernels
from fmha_gen.emulator.memory import GlobalMemory
from fmha_gen.emulator.scheduler import Completion, Order, Schedule

from .kernels import OUT, text

SUMS, RESULT = OUT, OUT + (1 << 20)
CTAS = 3
SCHEDULES = [
    Schedule(),
    Schedule(0, Order.ROUND_ROBIN, Completion.LATE),
    *(Schedule(seed, Order.RANDOM_WARPS, Completion.RANDOM) for seed in range(3)),
    Schedule(5, Order.STARVATION, Completion.LATE),
]
WAIT, LAUNCH = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"

# Zeros; then each CTA adds its thread numbers, from registers or from shared memory; then the sums
# are read, stored elsewhere, and zeros are written back.
ZERO = "{before} st.global.b32 [%rd2], 0; {after}"
ADD = "{before} cvt.rn.f32.u32 %r10, %r1; red.relaxed.gpu.global.add.f32 [%rd2], %r10; {after}"
BULK = """{before}
mov.b32 %r30, smem; shl.b32 %r31, %r1, 2; add.s32 %r31, %r31, %r30; cvt.rn.f32.u32 %r10, %r1;
st.shared.b32 [%r31], %r10; fence.proxy.async.shared::cta; bar.sync 0;
setp.ne.u32 %p1, %r1, 0; @%p1 bra DONE;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r30], 512;
cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; DONE: {after}"""
FINISH = """{before} ld.global.b32 %r20, [%rd2]; st.global.b32 [%rd2+1048576], %r20; {after}
st.global.b32 [%rd2], 0;"""


def run(
    kernels: list[tuple[str, str, str]],
    *,
    programmatic: bool = True,
    schedule: Schedule | None = None,
):
    """The results, and the kinds of the findings with the kernels they are of.

    kernels: of each the body, and what comes before and after it.
    """
    programs, launches = {}, []
    for number, (body, before, after) in enumerate(kernels):
        name = f"k{number}"
        source = text(body.format(before=before, after=after))
        programs |= lower_kernels(source.replace(".entry k(", f".entry {name}("))
        grid = CTAS if body in (ADD, BULK) else 1
        launches.append(
            Launch(
                *(name, (grid, 1, 1), (128, 1, 1), (1, 1, 1), 4096),
                struct.pack("<Q", SUMS),
                programmatic=programmatic and number > 0,
            )
        )
    memory = GlobalMemory()
    results = np.full(128, np.nan, np.float32)
    sums = np.full(128, np.nan, np.float32)
    memory.add("sums", SUMS, sums, uninitialised=True)
    memory.add("results", RESULT, results, uninitialised=True)
    done = machine.run(programs, launches, memory, schedule=schedule)
    found = {(f.kind.value, f.where.partition(",")[0]) for f in done.findings}
    return results, sums, found


def call(
    add: str, waits: tuple[str, str] = (WAIT, WAIT), rounds: int = 1
) -> list[tuple[str, str, str]]:
    kernels = [(ZERO, "", LAUNCH)]
    for _ in range(rounds):
        kernels += [(add, waits[0], LAUNCH), (FINISH, waits[1], "")]
    return kernels


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("programmatic", [False, True])
@pytest.mark.parametrize("add", [ADD, BULK])
def test_sums_are_there_when_they_are_read(add, programmatic, schedule):
    """Twice: what reads the sums leaves zeros. The launch's end alone waits for a reduction."""
    results, sums, found = run(
        call(add, rounds=2), programmatic=programmatic, schedule=schedule
    )
    assert found == set()
    np.testing.assert_array_equal(results, CTAS * np.arange(128, dtype=np.float32))
    np.testing.assert_array_equal(sums, 0)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("add", [ADD, BULK])
def test_a_dependent_launch_knows_nothing_before_it_waits(add, schedule):
    *_, found = run(call(add, ("", WAIT)), schedule=schedule)
    assert ("race", "k1") in found
    *_, found = run(call(add, (WAIT, "")), schedule=schedule)
    assert found == {("race", "k2")}
    # In launches one after another there is nothing to wait for.
    *_, found = run(call(add, ("", "")), programmatic=False, schedule=schedule)
    assert found == set()


def test_only_the_wait_orders():
    """Not that the launch before let it start, nor a wait of another warp, or after the fact."""
    one_warp = "setp.gt.u32 %p8, %r1, 31; @%p8 bra OVER; griddepcontrol.wait; OVER:"
    later = FINISH.format(before="", after="{before} {after}")
    for kernels in (
        [(ZERO, "", LAUNCH), (ADD, WAIT, LAUNCH), (FINISH, one_warp, "")],
        [(ZERO, "", LAUNCH), (ADD, WAIT, LAUNCH), (later, WAIT, "")],
        [(ZERO, "", LAUNCH), (ADD, WAIT, ""), (FINISH, LAUNCH, "")],
    ):
        *_, found = run(kernels)
        assert found == {("race", "k2")}
    *_, found = run(
        [
            *((ZERO, "", LAUNCH), (ADD, WAIT, LAUNCH)),
            (FINISH, f"{one_warp} bar.sync 0;", ""),
        ]
    )
    assert found == set()


def test_zeros_written_back_before_the_wait_race_with_who_still_adds():
    early = "st.global.b32 [%rd2], 0;"
    *_, found = run(
        [(ZERO, "", LAUNCH), (BULK, WAIT, LAUNCH), (FINISH, early + WAIT, "")]
    )
    assert found == {("race", "k2")}
