# SPDX-License-Identifier: Apache-2.0
"""Orders and completions: results do not depend on them, and a seed replays one exactly."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from fmha_gen.emulator import cluster
from fmha_gen.emulator.report import Event
from fmha_gen.emulator.scheduler import Completion, Order, Pending, Schedule, Turns

from .kernels import LINES_BEFORE, execute

SCHEDULES = [
    Schedule(7, order, done) for order, done in itertools.product(Order, Completion)
]

# Warps take turns: warp w waits for named barrier w + 1 and then opens the next one.
RELAY = """
mov.b32 %r30, smem; shr.u32 %r31, %r1, 5; setp.eq.u32 %p1, %r31, 0; @%p1 bra FIRST;
add.s32 %r32, %r31, 1; bar.sync %r32, 64;
ld.shared.b32 %r33, [%r30];
FIRST: @%p1 mov.b32 %r33, 0;
add.s32 %r33, %r33, 1; bar.warp.sync -1;
st.shared.b32 [%r30], %r33; st.global.b32 [%rd2], %r33;
setp.eq.u32 %p2, %r31, 3; @%p2 bra LAST;
add.s32 %r32, %r31, 2; bar.arrive %r32, 64;
LAST:
"""


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_results_do_not_depend_on_the_schedule(schedule):
    out, result = execute(RELAY, schedule=schedule)
    assert result.findings == ()
    np.testing.assert_array_equal(out, np.arange(128) // 32 + 1)


def events(schedule: Schedule) -> list[Event]:
    timeline: list[Event] = []
    execute(
        RELAY,
        threads=256,
        out=np.zeros(256, np.uint32),
        schedule=schedule,
        timeline=timeline,
    )
    return timeline


@pytest.mark.parametrize("order", [Order.RANDOM, Order.RANDOM_WARPS])
def test_a_seed_replays_a_run(order):
    runs = {seed: events(Schedule(seed, order)) for seed in range(4)}
    for seed, run in runs.items():
        assert events(Schedule(seed, order)) == run
    if order is Order.RANDOM_WARPS:
        assert any(run != runs[0] for run in runs.values())


def test_warps_drift_apart_only_when_asked():
    body = """mov.b32 %r30, smem; setp.eq.u32 %p1, %r1, 0;
@%p1 mbarrier.init.shared.b64 [%r30], 128; bar.sync 0;
mbarrier.test_wait.parity.shared.b64 %p2, [%r30], 1; st.global.b32 [%rd2], %r1;"""

    def together(order: Order, seed: int) -> bool:
        timeline: list[Event] = []
        execute(body, schedule=Schedule(seed, order), timeline=timeline)
        return len({event.begin for event in timeline if event.warp == 0}) == len(
            {event.begin for event in timeline}
        )

    assert all(together(Order.ROUND_ROBIN, seed) for seed in range(10))
    assert all(together(Order.RANDOM, seed) for seed in range(10))
    assert not all(together(Order.RANDOM_WARPS, seed) for seed in range(10))


def pending(completion: Completion) -> tuple[Pending, list[str]]:
    done: list[str] = []
    work = Pending(Schedule(1, completion=completion), random.Random(1))
    work.load(lambda: done.append("load"))
    work.store(lambda: done.append("store"))
    for name in ("first", "second"):
        work.product(0, lambda name=name: done.append(name))
    return work, done


def test_eager_completes_at_once():
    work, done = pending(Completion.EAGER)
    assert done == ["load", "store", "first", "second"]
    assert not work.force()


@pytest.mark.parametrize(
    ("completion", "early"),
    [(Completion.LATE, []), (Completion.LOADS_EARLY_MMAS_LATE, ["load"])],
)
def test_late_work_is_forced_one_at_a_time(completion, early):
    work, done = pending(completion)
    work.turn()
    assert done == early
    while work.outstanding:
        before = len(done)
        assert work.force()
        assert len(done) == before + 1
    assert sorted(done) == ["first", "load", "second", "store"]
    assert done.index("first") < done.index("second")  # products keep their order
    assert not work.force()


def test_orderly_late_work_is_forced_from_the_oldest_on():
    work, done = pending(Completion.LATE)
    work.load(lambda: done.append("another load"))
    while work.force():
        pass
    assert done == ["first", "second", "load", "store", "another load"]
    work, done = pending(Completion.LOADS_EARLY_MMAS_LATE)
    while work.force():
        pass
    assert done == ["load", "store", "first", "second"]


def test_random_completion_comes_by_itself():
    work, done = pending(Completion.RANDOM)
    for _ in range(100):
        work.turn()
    assert sorted(done) == ["first", "load", "second", "store"]
    assert done.index("first") < done.index("second")


def test_turns():
    rng = random.Random(2)
    assert Turns(Order.ROUND_ROBIN, rng).arrange(4) == [0, 1, 2, 3]
    assert Turns(Order.ROUND_ROBIN, rng).lone_warp([0, 1]) is None
    drifting = Turns(Order.RANDOM_WARPS, rng)
    chosen = {drifting.lone_warp([1, 3]) for _ in range(50)}
    assert chosen == {None, 1, 3}
    assert drifting.lone_warp([2]) is None
    assert sorted(drifting.arrange(4)) == [0, 1, 2, 3]
    assert Turns(Order.RANDOM, rng).length() < 1 << 30


def test_a_schedule_says_how_to_replay_it():
    schedule = Schedule(9, Order.RANDOM_WARPS, Completion.LATE)
    assert str(schedule) == "order=random_warps completion=late seed=9"


# Warpgroup 1 waits for a phase that is over once warpgroup 0 has arrived, long after the start.
LATECOMER = """
mov.b32 %r30, smem; setp.ne.u32 %p1, %r1, 0; setp.lt.u32 %p2, %r1, 128; mov.b32 %r31, 0;
@%p1 bra READY; mbarrier.init.shared.b64 [%r30], 128; READY: bar.sync 0;
@%p2 bra WORK;
WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r30], {parity}; @!%p3 bra WAIT;
bra DONE;
WORK: add.s32 %r31, %r31, 1; setp.lt.u32 %p4, %r31, 200; @%p4 bra WORK;
mbarrier.arrive.shared.b64 _, [%r30];
DONE:
"""
TWO_GROUPS = {"threads": 256, "out": np.zeros(256, np.uint32)}


def deadlocks(parity: int, schedule: Schedule) -> bool:
    body = LATECOMER.format(parity=parity)
    _, result = execute(body, schedule=schedule, **TWO_GROUPS)
    return [finding.kind.value for finding in result.findings] == ["deadlock"]


def test_only_starvation_lets_a_warpgroup_come_that_late():
    others = [schedule for schedule in SCHEDULES if schedule.order != Order.STARVATION]
    starving = [Schedule(seed, Order.STARVATION) for seed in range(10)]
    assert not any(deadlocks(1, schedule) for schedule in others)
    late = [deadlocks(1, schedule) for schedule in starving]
    assert any(late) and not all(late)  # not when the other warpgroup is the victim
    assert not any(deadlocks(0, schedule) for schedule in starving)


# Each warpgroup reads what its other warps wrote, and warpgroup 1 comes when 0 is on its way.
MEETING = """
mov.b32 %r30, smem; shl.b32 %r31, %r1, 2; add.s32 %r31, %r31, %r30; setp.lt.u32 %p1, %r1, 128;
@%p1 bra FIRST; bar.sync 1, 256; bra BOTH; FIRST: bar.arrive 1, 256;
BOTH: st.shared.b32 [%r31], %r1; shr.u32 %r32, %r1, {shift}; add.s32 %r32, %r32, 4;
bar.sync %r32, 128; xor.b32 %r33, %r31, 128; ld.shared.b32 %r34, [%r33];
st.global.b32 [%rd2], %r34;
"""


def races(shift: int, schedule: Schedule) -> bool:
    _, result = execute(MEETING.format(shift=shift), schedule=schedule, **TWO_GROUPS)
    kinds = {finding.kind.value for finding in result.findings}
    assert kinds <= {"race", "read-before-write"}
    return bool(kinds)


def test_a_warp_stays_behind_until_another_warpgroup_takes_its_place_at_a_barrier():
    staying = [Schedule(seed, Order.RANDOM_WARPS) for seed in range(40)]
    assert any(races(8, schedule) for schedule in staying)  # one barrier for both
    for schedule in [*staying, *SCHEDULES]:
        assert not races(7, schedule)
    orderly = [one for one in SCHEDULES if one.order is Order.ROUND_ROBIN]
    assert not any(races(8, schedule) for schedule in orderly)


def test_who_stays_behind_is_one_warp_or_the_warpgroup_and_not_often():
    turns = Turns(Order.RANDOM_WARPS, random.Random(5))
    chosen = [tuple(turns.staying([1, 2])) for _ in range(300)]
    assert set(chosen) == {(), (1,), (2,), (1, 2)}
    assert chosen.count(()) > 200
    for order in set(Order) - {Order.RANDOM_WARPS}:
        assert not any(Turns(order, random.Random(5)).staying([0]) for _ in range(100))


def test_the_victim_is_any_warpgroup_or_any_warp_of_one():
    turns = Turns(Order.STARVATION, random.Random(4))
    victims = [turns.victim(3, 4) for _ in range(300)]
    assert {victim.position for victim in victims} == {0, 1, 2}
    assert {victim.warp for victim in victims} == {None, 0, 1, 2, 3}
    assert min(victim.blocks for victim in victims) > 0


def test_a_starved_warp_comes_last():
    body = "bra ONE; ONE: bra TWO; TWO: st.global.b32 [%rd2], %r1;"
    last = set()
    for seed in range(30):
        timeline: list[Event] = []
        execute(body, schedule=Schedule(seed, Order.STARVATION), timeline=timeline)
        begins = {
            warp: [event.begin for event in timeline if event.warp == warp]
            for warp in range(4)
        }
        # Either all of them are starved together, or one of them waits for the other three.
        late = [warp for warp in begins if min(begins[warp]) > 0]
        assert len(late) <= 1
        for warp in late:
            last.add(warp)
            assert min(begins[warp]) > max(max(begins[w]) for w in begins if w != warp)
    assert len(last) > 1


def test_code_that_never_ends_is_found_wherever_it_is(monkeypatch):
    monkeypatch.setattr(cluster, "LONGEST_SILENCE", 5000)
    body = "mov.b32 %r31, 0;\nLOOP: add.s32 %r31, %r31, 1;\nbra LOOP;"
    for schedule in SCHEDULES:
        _, result = execute(body, schedule=schedule)
        (finding,) = result.findings
        assert finding.kind.value == "livelock"
        assert finding.line in (LINES_BEFORE + 2, LINES_BEFORE + 3)
        assert f"nothing but this for 5000 instructions under {schedule}" in str(
            finding
        )
        assert "cta 0 warp" in finding.where
    # Who works as long between two signals is not accused, nor is a long run.
    counted = "setp.lt.u32 %p1, %r31, 100; @%p1 bra LOOP;"
    ends = body.replace("bra LOOP;", f"{counted} bar.sync 0;")
    again = ends.replace("LOOP", "MORE")
    steps = execute(f"{ends}\n{again}")[1].steps
    monkeypatch.setattr(cluster, "LONGEST_SILENCE", steps - steps // 3)
    assert execute(f"{ends}\n{again}")[1].findings == ()
    _, result = execute(f"{ends}\n{again}", max_steps=steps - 1)
    assert [finding.kind.value for finding in result.findings] == ["livelock"]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_who_polls_does_not_keep_others_from_what_it_polls_for(schedule):
    body = LATECOMER.format(parity=0).replace("try_wait", "test_wait")
    _, result = execute(body, schedule=schedule, **TWO_GROUPS)
    assert result.findings == ()
