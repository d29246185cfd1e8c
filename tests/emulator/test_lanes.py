# SPDX-License-Identifier: Apache-2.0
"""What one lane fences, arrives or copies does not cover the other 31, unless they met before."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator.lanes import LANES

from .kernels import FIRST_INPUT, OUT, execute, kinds, tensor_map
from .test_checks import EVERY

STORED = (tensor_map(OUT, (16, 8), (16, 8)),)
LOADED = (tensor_map(FIRST_INPUT, (16, 32), (16, 8)),)
MEET = "bar.warp.sync -1;"
WRITE = "st.shared.b32 [%r31], %r1;"
FENCE = "fence.proxy.async.shared::cta;"
BASE = """
mov.b32 %r30, smem; shl.b32 %r31, %r1, 2; add.s32 %r31, %r31, %r30;
setp.ne.u32 %p1, %r1, 0; and.b32 %r2, %r1, 31; setp.ne.u32 %p2, %r2, 0;
setp.gt.u32 %p3, %r1, 31;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r30+2048], 4; mbarrier.init.shared.b64 [%r30+2056], 1;
fence.mbarrier_init.release.cluster;
READY: bar.sync 0;
"""
# One lane of each warp arrives; all wait.
ARRIVE = "@!%p2 mbarrier.arrive.shared.b64 _, [%r30+2048];"
ALL = "WAIT: mbarrier.try_wait.parity.shared.b64 %p5, [%r30+2048], 0; @!%p5 bra WAIT;"
OTHER = "xor.b32 %r32, %r31, 256; ld.shared.b32 %r20, [%r32];"


def found(body: str, *inputs: np.ndarray, **options) -> list[str]:
    return kinds(execute(BASE + body, *inputs, **options)[1])


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_a_lanes_arrival_covers_the_others_writes_only_after_they_met(schedule):
    good = f"{WRITE} {MEET} {ARRIVE} {ALL} {OTHER}"
    assert found(good, schedule=schedule) == []
    assert "race" in found(good.replace(MEET, ""), schedule=schedule)


@pytest.mark.parametrize(
    "other",
    [
        "shfl.sync.idx.b32 %r9, %r1, 0, 31, -1;",
        "vote.sync.any.pred %p9, %p1, -1;",
        "elect.sync %r9|%p9, -1;",
    ],
)
def test_only_a_barrier_is_a_meeting(other):
    """They bring the lanes together, and order nothing in memory."""
    assert found(f"{WRITE} {other} {ARRIVE} {ALL} {OTHER}") == ["race"]
    assert found(f"{WRITE} bar.sync 1, 128; {ARRIVE} {ALL} {OTHER}") == []


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_a_lanes_arrival_covers_its_own_writes(schedule):
    own = f"@!%p2 {WRITE} {ARRIVE} {ALL} ld.shared.b32 %r20, [%r30+128];"
    assert found(own, schedule=schedule) == []
    # What all wrote together before is another matter.
    both = f"{WRITE} @!%p2 st.shared.b32 [%r31+1024], %r1; {ARRIVE} {ALL}"
    mine = f"{both} ld.shared.b32 %r20, [%r30+1152];"
    assert found(mine, schedule=schedule) == []
    assert found(f"{both} {OTHER}", schedule=schedule) == ["race"]


def test_a_lanes_arrival_covers_the_others_reads_only_after_they_met():
    read, again = "ld.shared.b32 %r20, [%r32];", "st.shared.b32 [%r31], 7;"
    head = f"xor.b32 %r32, %r31, 256; {WRITE} bar.sync 0; {read}"
    assert found(f"{head} {MEET} {ARRIVE} {ALL} {again}") == []
    assert found(f"{head} {ARRIVE} {ALL} {again}") == ["race"]


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_a_lanes_wait_is_not_the_others(schedule):
    arrive = f"{WRITE} {MEET} {ARRIVE}"
    one = f"@%p2 bra ON; {ALL} ON:"
    assert found(f"{arrive} {one} {MEET} {OTHER}", schedule=schedule) == []
    assert "race" in found(f"{arrive} {one} {OTHER}", schedule=schedule)


def test_lanes_that_wait_one_after_the_other_have_all_waited():
    arrive = f"{WRITE} {MEET} {ARRIVE}"
    again = ALL.replace("WAIT", "AGAIN")
    each = f"@%p2 bra REST; {ALL} bra ON; REST: {again} ON: {OTHER}"
    assert found(arrive + each) == []


STORE = """@%p1 bra DONE; mov.b64 %rd5, k_param_1;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd5, {0, 0}], [%r30];
cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; DONE:"""
COPIED = {"maps": STORED, "out": np.zeros(LANES, np.uint32)}


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_a_copy_by_one_lane_of_what_its_warp_wrote(schedule):
    options = COPIED | {"schedule": schedule}
    head = f"@%p3 bra DONE; {WRITE} st.shared.b32 [%r31+128], 0;"
    head += "st.shared.b32 [%r31+256], 0; st.shared.b32 [%r31+384], 0;"
    assert found(f"{head} {FENCE} {MEET} {STORE}", **options) == []
    assert found(f"{head} {MEET} {FENCE} {STORE}", **options) == []
    assert found(f"{head} {FENCE} {STORE}", **options) == ["race"]


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_a_lanes_proxy_fence_covers_what_it_knows(schedule):
    options = COPIED | {"schedule": schedule}
    alone = f"@!%p2 {FENCE}"
    assert found(f"{WRITE} {FENCE} bar.sync 0; {STORE}", **options) == []
    assert found(f"{WRITE} {alone} bar.sync 0; {STORE}", **options) == ["proxy-fence"]
    assert found(f"{WRITE} {MEET} {alone} bar.sync 0; {STORE}", **options) == []


def test_a_lane_waits_for_its_own_bulk_stores():
    head = f"{WRITE} {FENCE} bar.sync 0;"
    after = f"bar.sync 0; {WRITE}"
    assert found(f"{head} {STORE} {after}", **COPIED) == []
    wait = "cp.async.bulk.wait_group.read 0;"
    others = STORE.replace(f" {wait} DONE:", f" DONE: @!%p1 bra OUT; {wait} OUT:")
    assert "race" in found(f"{head} {others} {after}", **COPIED)


@pytest.mark.parametrize("first", ["@%p2", "@!%p2"])
def test_lanes_that_issued_a_bulk_store_together_wait_for_it_apart(first):
    """Who waits first does not wait for the others."""
    wait = "cp.async.bulk.wait_group.read 0;"
    apart = f"{first} bra REST; {wait} bra ON; REST: {wait} ON: {ARRIVE}"
    store = STORE.replace("@%p1", "@%p3").replace(f"{wait} DONE:", f"{apart} DONE:")
    others = f"@!%p3 bra OVER; {ARRIVE} OVER: {ALL} {WRITE}"
    head = f"{WRITE} {FENCE} bar.sync 0;"
    assert found(f"{head} {store} {others}", **COPIED) == []
    left = store.replace(apart, f"@!%p2 bra ON; {wait} ON: {ARRIVE}")
    assert "race" in found(f"{head} {left} {others}", **COPIED)


def test_lanes_of_a_warp_exchange_after_a_meeting():
    near = "xor.b32 %r32, %r31, 4; ld.shared.b32 %r20, [%r32];"
    own = "ld.shared.b32 %r20, [%r31];"
    assert found(f"{WRITE} {MEET} {near}") == []
    assert found(f"{WRITE} {own}") == []
    assert found(f"{WRITE} {near}") == ["race"]


LOAD = """@%p1 bra ON; mov.b64 %rd5, k_param_2;
mbarrier.arrive.expect_tx.shared.b64 _, [%r30+2056], 512;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
 [%r30], [%rd5, {0, 0}], [%r30+2056];
ON: WAIT: mbarrier.try_wait.parity.shared.b64 %p5, [%r30+2056], 0; @!%p5 bra WAIT;"""


def test_a_copy_overwrites_what_lanes_read_only_after_they_met():
    data = np.arange(64 * 8, dtype=np.uint32)
    head = f"{WRITE} bar.sync 0; @%p3 bra ON; ld.shared.b32 %r20, [%r31];"
    read = head + "ld.shared.b32 %r20, [%r31+128];"
    assert found(f"{head} {MEET} bar.warp.sync -1; {LOAD}", data, maps=LOADED)[:1] in (
        [],
        ["proxy-fence"],
    )
    assert "race" in found(f"{read} {LOAD}", data, maps=LOADED)


def test_another_lane_may_be_elected():
    """The same one each time; the orderly schedules elect the first."""
    body = "elect.sync %r9|%p9, -1; elect.sync %r20|%p8, -1;"
    body += "setp.eq.u32 %p7, %r9, %r2; xor.pred %p6, %p7, %p9; @%p6 mov.b32 %r20, 99;"
    body = BASE + body + "st.global.b32 [%rd2], %r20;"
    elected = {}
    for schedule in EVERY:
        out, result = execute(body, schedule=schedule)
        assert result.findings == () and len(set(out.tolist())) == 1
        elected.setdefault(schedule.order, set()).add(int(out[0]))
    assert elected[EVERY[0].order] == {0}
    assert all(lane < 32 for lanes in elected.values() for lane in lanes)
    assert len(set().union(*elected.values())) > 3
