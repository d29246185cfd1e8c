# SPDX-License-Identifier: Apache-2.0
"""Whole kernels: a grid, a cluster that shares its loads, and what a run returns."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fmha_gen.emulator import ptx
from fmha_gen.emulator.barriers import ClusterBarrier, MBarrier, NamedBarrier
from fmha_gen.emulator.lanes import LANES
from fmha_gen.emulator.lower import lower
from fmha_gen.emulator.report import Fault, Finding, Kind, Report
from fmha_gen.emulator.scheduler import Completion, Order, Schedule

from . import kernels
from .kernels import FIRST_INPUT, execute, kinds, tensor_map

SCHEDULES = [
    Schedule(3, order, done) for order, done in itertools.product(Order, Completion)
]


def test_vector_add_over_a_grid():
    a, b = (
        np.random.default_rng(i).standard_normal(1024).astype(np.float32)
        for i in range(2)
    )
    body = """
mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, 256, %r1; mul.wide.u32 %rd9, %r3, 4;
ld.param.b64 %rd5, [k_param_1]; add.s64 %rd5, %rd5, %rd9; ld.global.b32 %r20, [%rd5];
ld.param.b64 %rd6, [k_param_2]; add.s64 %rd6, %rd6, %rd9; ld.global.b32 %r21, [%rd6];
add.f32 %r22, %r20, %r21; add.s64 %rd7, %rd1, %rd9; st.global.b32 [%rd7], %r22;"""
    out, result = execute(
        body, a, b, out=np.zeros(1024, np.float32), threads=256, grid=4
    )
    assert result.findings == ()
    np.testing.assert_array_equal(out, a + b)
    # 8 warps of 4 CTAs, each instruction once: the header's 4, the body's 12 and ret.
    assert result.steps == 4 * 8 * 17


# Each CTA of a pair loads half of a tile into both; both then read all of it.
MULTICAST = """
mov.b32 %r30, smem; mov.u32 %r40, %cluster_ctarank; setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r30], 1; fence.mbarrier_init.release.cluster;
READY: barrier.cluster.arrive.relaxed; barrier.cluster.wait;
@%p1 bra WAIT;
mov.b64 %rd5, k_param_2;
mbarrier.arrive.expect_tx.shared.b64 _, [%r30], 512;
shl.b32 %r41, %r40, 8; add.s32 %r41, %r41, %r30; shl.b32 %r42, %r40, 2;
mov.b16 %rs1, {mask};
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
  [%r41+1024], [%rd5, {{0, %r42}}], [%r30], %rs1;
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r30], 0; @!%p2 bra WAIT;
shl.b32 %r31, %r1, 2; add.s32 %r31, %r31, %r30; ld.shared.b32 %r20, [%r31+1024];
mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, 128, %r1; mul.wide.u32 %rd9, %r3, 4;
add.s64 %rd9, %rd1, %rd9; st.global.b32 [%rd9], %r20;
barrier.cluster.arrive; barrier.cluster.wait;
"""


def multicast(mask: int, **options):
    data = np.arange(512, dtype=np.uint32)
    maps = (tensor_map(FIRST_INPUT, (16, 32), (16, 4)),)
    out = np.zeros(256, np.uint32)
    body = MULTICAST.format(mask=mask)
    return execute(body, data, out=out, grid=2, cluster=2, maps=maps, **options)


@pytest.mark.parametrize(("place", "found"), [(0, []), (16, ["tma"]), (64, [])])
def test_the_place_of_a_tensor_map(place, found):
    raw = tensor_map(FIRST_INPUT, (16, 32), (16, 4))
    padded = bytes(place) + raw + bytes(128 - place)
    body = MULTICAST.format(mask=3).replace("k_param_2;", f"k_param_2+{place};")
    data, out = np.arange(512, dtype=np.uint32), np.zeros(256, np.uint32)
    maps = (padded[:128], padded[128:])
    _, result = execute(body, data, out=out, grid=2, cluster=2, maps=maps)
    assert kinds(result) == found


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_cluster_shares_its_loads(schedule):
    out, result = multicast(3, schedule=schedule)
    assert result.findings == ()
    np.testing.assert_array_equal(out, np.tile(np.arange(LANES), 2))
    assert result.statistics == {"tensor loads": 2, "load bytes": 512}


def test_multicast_mask_bits():
    assert kinds(multicast(1)[1])[0] in ("deadlock", "barrier")
    assert kinds(multicast(7)[1]) == ["tma"]
    assert kinds(multicast(0)[1]) == ["tma"]


def test_checks_can_be_left_out():
    racy = "mov.b32 %r30, smem; st.shared.b32 [%r30], %r1;"
    assert kinds(execute(racy)[1]) == ["race"]
    assert execute(racy, checks=False)[1].findings == ()


def test_a_program_runs_again():
    module = ptx.parse(kernels.text("st.global.b32 [%rd2], %r1;"))
    program = lower(module)
    assert [block.weight for block in program.blocks] == [6]
    assert "def block(ctx, R, mask):" in program.source(program.blocks[0])
    assert program.whole(program.blocks[0]) is program.whole(program.blocks[0])
    assert program.whole(program.blocks[0]) is not program.masked(program.blocks[0])


def test_timeline_has_every_block_of_the_first_cta():
    timeline = []
    execute("bar.sync 0; st.global.b32 [%rd2], %r1;", grid=2, timeline=timeline)
    assert {event.cta for event in timeline} == {0}
    assert {event.warp for event in timeline} == {0, 1, 2, 3}
    assert all(event.begin < event.end for event in timeline)
    assert any(event.name == "bar.sync" for event in timeline)


# -- barriers by themselves


def test_mbarrier_phases():
    barrier = MBarrier(2, 0, 0, 0)
    assert not barrier.passed(0)
    assert barrier.passed(1)  # the phase before the first is complete
    barrier.arrive(1, 64, None)
    barrier.complete(96, None)  # completions may run ahead of what is expected
    barrier.arrive(1, 32, None)
    assert barrier.passed(0)
    assert not barrier.passed(1)
    assert (barrier.pending, barrier.transactions) == (2, 0)


def test_mbarrier_counts_have_limits():
    with pytest.raises(Fault, match="a count of 0"):
        MBarrier(0, 0, 0, 0)
    with pytest.raises(Fault, match="transaction count of 1048576 bytes"):
        MBarrier(2, 0, 0, 0).arrive(1, 1 << 20, None)


def test_mbarrier_releases_what_earlier_phases_did():
    barrier = MBarrier(1, 0, 0, 0)
    barrier.arrive(1, 0, np.array([[3, 0]]))
    barrier.arrive(1, 0, np.array([[0, 5]]))
    assert barrier.released.tolist() == [[3, 5]]


def test_named_barrier_takes_a_warp_twice():
    barrier = NamedBarrier("barrier 1")
    assert barrier.arrive(64, None, waits=True) == 0
    assert barrier.arrive(64, None, waits=False) == 0
    assert barrier.generation == 1
    with pytest.raises(Fault, match="barrier 1 of 33 threads"):
        barrier.arrive(33, None, waits=True)


def test_cluster_barrier_does_not_wait_for_who_left():
    barrier = ClusterBarrier(3)
    barrier.arrive(0, None)
    with pytest.raises(Fault, match="arrives twice"):
        barrier.arrive(0, None)
    barrier.exit(2)
    assert barrier.generation == 0
    barrier.arrive(1, None)
    assert barrier.generation == 1


def test_report_says_a_thing_once_and_in_order():
    report = Report()
    report.add(Kind.RACE, "first", line=9, where="cta 0 warp 1")
    report.add(Kind.RACE, "again", line=9, where="cta 0 warp 2")
    report.add(Kind.TMA, "other", line=4)
    report.add(Kind.DEADLOCK, "stuck")
    assert list(report) == [
        Finding(0, Kind.DEADLOCK, "stuck"),
        Finding(4, Kind.TMA, "other"),
        Finding(9, Kind.RACE, "first", "cta 0 warp 1"),
    ]
    assert [str(finding) for finding in report] == [
        "deadlock: stuck",
        "tma: PTX line 4: other",
        "race: PTX line 9: first [cta 0 warp 1]",
    ]


def test_lanes_that_wait_apart_let_others_run():
    """Two lanes of a warp wait in two places, for what only another warpgroup does."""
    body = """
mov.b32 %r30, smem; setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY; mbarrier.init.shared.b64 [%r30], 128; mbarrier.init.shared.b64 [%r30+8], 128;
READY: bar.sync 0;
setp.lt.u32 %p2, %r1, 128; @%p2 bra ARRIVE; setp.ne.u32 %p1, %r1, 128; @%p1 bra OTHER;
FIRST: mbarrier.try_wait.parity.shared.b64 %p3, [%r30], 0; @!%p3 bra FIRST; bra DONE;
OTHER: mbarrier.try_wait.parity.shared.b64 %p3, [%r30+8], 0; @!%p3 bra OTHER; bra DONE;
ARRIVE: mbarrier.arrive.shared.b64 _, [%r30]; mbarrier.arrive.shared.b64 _, [%r30+8];
DONE:"""
    for schedule in (Schedule(), *SCHEDULES):
        options = {"schedule": schedule, "max_steps": 10000}
        _, result = execute(body, threads=256, **options)
        assert result.findings == ()
