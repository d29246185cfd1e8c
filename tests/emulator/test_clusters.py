# SPDX-License-Identifier: Apache-2.0
"""Instructions that reach another CTA: addresses, memory, mbarriers and copies for CTA pairs."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator.lanes import LANES
from fmha_gen.emulator.scheduler import Completion, Order, Schedule

from .kernels import FIRST_INPUT, execute, kinds, tensor_map

EVERY = [
    Schedule(seed, order, completion)
    for seed, (order, completion) in enumerate(
        (order, completion) for order in Order for completion in Completion
    )
]

# %r2 is the rank, %r31 this thread's word of shared memory, %p1 all threads but the first of a
# CTA; the mbarrier at smem+2048 has a count of 1. %rd2 is this thread's word of its CTA's output.
START = """
mov.u32 %r2, %cluster_ctarank; mul.wide.u32 %rd3, %r2, 512; add.s64 %rd2, %rd2, %rd3;
mov.b32 %r30, smem; shl.b32 %r31, %r1, 2; add.s32 %r31, %r31, %r30;
setp.ne.u32 %p1, %r1, 0; setp.ne.u32 %p2, %r2, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r30+2048], 1;
fence.mbarrier_init.release.cluster;
READY: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
"""
MEET = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"


def run(body: str, *inputs: np.ndarray, ctas: int = 2, **options):
    """The output of each CTA, int64 [ctas, LANES], and the result."""
    out = np.zeros(ctas * LANES, np.uint32)
    _, result = execute(
        START + body, *inputs, out=out, grid=ctas, cluster=ctas, **options
    )
    return out.reshape(ctas, LANES).astype(np.int64), result


def found(body: str, *inputs: np.ndarray, **options) -> list[str]:
    return kinds(run(body, *inputs, **options)[1])


# -- memory

PEER = "xor.b32 %r3, %r2, 1; mapa.shared::cluster.u32 %r32, %r31, %r3;"
OWN = "mul.lo.s32 %r4, %r2, 1000; add.s32 %r4, %r4, %r1;"
LOAD = "ld.shared::cluster.b32 %r20, [%r32];"
STORE = "st.shared::cluster.b32 [%r32], %r4;"
SHOW = "st.global.b32 [%rd2], %r20;"
EXCHANGED = np.arange(LANES) + np.array([[1000], [0]])


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_load_from_another_cta(schedule):
    body = f"{PEER} {OWN} st.shared.b32 [%r31], %r4; {MEET} {LOAD} {SHOW}"
    out, result = run(f"{body} {MEET}", schedule=schedule)
    assert result.findings == ()
    np.testing.assert_array_equal(out, EXCHANGED)
    # Without the second meeting the other CTA may be gone, whether it is or not.
    assert found(body, schedule=schedule)[0] in ("race", "out-of-bounds")


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_store_to_another_cta(schedule):
    read = f"ld.shared::cta.b32 %r20, [%r31]; {SHOW}"
    out, result = run(f"{PEER} {OWN} {STORE} {MEET} {read}", schedule=schedule)
    assert result.findings == ()
    np.testing.assert_array_equal(out, EXCHANGED)
    relaxed = MEET.replace(".release", ".relaxed")
    unordered = found(f"{PEER} {OWN} {STORE} {relaxed} {read}", schedule=schedule)
    assert unordered == ["race"]


def test_lanes_may_access_different_ctas():
    """Odd threads go to the other CTA, even ones stay."""
    ranks = "and.b32 %r5, %r1, 1; xor.b32 %r3, %r2, %r5;"
    body = f"""{ranks} mapa.shared::cluster.u32 %r32, %r31, %r3;
{OWN} {STORE} {MEET} {LOAD} {SHOW} {MEET}"""
    out, result = run(body)
    assert result.findings == ()
    # Who stored there reads it again.
    np.testing.assert_array_equal(out, EXCHANGED[::-1])


def test_generic_addresses_map_too():
    body = f"""{OWN} st.shared.b32 [%r31], %r4; {MEET} xor.b32 %r3, %r2, 1;
cvt.u64.u32 %rd5, %r31; cvta.shared::cta.u64 %rd5, %rd5; mapa.u64 %rd6, %rd5, %r3;
cvta.to.shared::cluster.u64 %rd6, %rd6; cvt.u32.u64 %r32, %rd6; {LOAD}
cvta.to.global.u64 %rd2, %rd2; {SHOW} {MEET}"""
    out, result = run(body)
    assert result.findings == ()
    np.testing.assert_array_equal(out, EXCHANGED)


def test_other_ctas_need_the_cluster_space():
    load = f"{OWN} st.shared.b32 [%r31], %r4; {MEET} {PEER} ld.shared.b32 %r20, [%r32]; {MEET}"
    assert found(load) == ["out-of-bounds"]
    beyond = "mov.b32 %r3, 2; mapa.shared::cluster.u32 %r32, %r31, %r3;"
    assert found(beyond) == ["out-of-bounds"]


# -- mbarriers

WAIT = """
WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r30+2048], 0;
@!%p3 bra WAIT;"""


@pytest.mark.parametrize(
    "arrive",
    [
        "mbarrier.arrive.shared::cluster.b64 _, [%r33];",
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r33], 1;",
        "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r33], 0;",
        "mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%r33], 0; "
        "mbarrier.arrive.shared::cluster.b64 _, [%r33];",
    ],
)
@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_arrival_at_another_ctas_mbarrier(arrive, schedule):
    """Each CTA's warp 0 stores into the other and arrives there; its readers wait."""
    body = f"""{PEER} {OWN} setp.gt.u32 %p4, %r1, 31; @%p4 bra READ;
{STORE} bar.warp.sync -1; add.s32 %r33, %r30, 2048;
mapa.shared::cluster.u32 %r33, %r33, %r3; @%p1 bra READ;
{arrive}
READ: mov.b32 %r20, 0; {{wait}} and.b32 %r34, %r31, 127; add.s32 %r34, %r34, %r30;
ld.shared.b32 %r20, [%r34]; {SHOW}"""
    out, result = run(body.format(wait=WAIT), schedule=schedule)
    assert result.findings == ()
    np.testing.assert_array_equal(out, np.tile(EXCHANGED[:, :32], 4))
    # Without the wait words are read before they come, or the CTA leaves before they do.
    early = found(body.format(wait=""), schedule=schedule)
    assert {"race", "read-before-write", "out-of-bounds"} & set(early)


def test_polling_an_mbarrier():
    body = """@%p1 bra WAIT; mbarrier.arrive.shared.b64 _, [%r30+2048];
WAIT: mbarrier.test_wait.parity.shared.b64 %p3, [%r30+2048], 0; @!%p3 bra WAIT;"""
    assert found(body) == []


def test_other_ctas_mbarriers_need_the_cluster_space():
    body = """add.s32 %r33, %r30, 2048; xor.b32 %r3, %r2, 1;
mapa.shared::cluster.u32 %r33, %r33, %r3; @%p1 bra DONE;
mbarrier.arrive{space}.b64 _, [%r33]; DONE: {wait}"""
    assert found(body.format(space=".shared::cluster", wait=WAIT)) == []
    assert found(body.format(space=".shared::cta", wait=WAIT)) == ["barrier"]
    elsewhere = WAIT.replace("[%r30+2048]", "[%r33]")
    assert found(body.format(space=".shared::cluster", wait=elsewhere)) == ["barrier"]


# -- copies for CTA pairs
#
# A box of 128 words per CTA. The even CTA of each pair expects the bytes of both.

DATA = np.arange(4 * LANES, dtype=np.uint32)
MAPS = (tensor_map(FIRST_INPUT, (16, 32), (16, 8)),)
EXPECT = """mov.b64 %rd5, k_param_2; shl.b32 %r6, %r2, 3; add.s32 %r7, %r30, 2048;
and.b32 %r8, %r7, -16777217;
and.b32 %r9, %r2, 1; setp.ne.u32 %p5, %r9, 0;
@%p1 bra WAITING; @%p5 bra ISSUE;
mbarrier.arrive.expect_tx.shared.b64 _, [%r7], {bytes};
ISSUE: """
COPY = """
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2
  [%r30], [%rd5, {0, %r6}], [%r8];
"""
# Leaders tell their peers, by a barrier of the cluster, that all has come.
ARRIVED = f"""
WAITING: @%p5 bra MEETING;
LEADER: mbarrier.try_wait.parity.shared.b64 %p3, [%r7], 0; @!%p3 bra LEADER;
MEETING: {MEET} ld.shared.b32 %r20, [%r31]; {SHOW}"""


@pytest.mark.parametrize("schedule", EVERY, ids=str)
@pytest.mark.parametrize("ctas", [2, 4])
def test_a_pairs_loads_tell_its_leader(ctas, schedule):
    """%r8 is the mbarrier's address with bit 24 cleared: that of the even CTA of the pair."""
    body = EXPECT.format(bytes=1024) + COPY + ARRIVED
    out, result = run(body, DATA, ctas=ctas, maps=MAPS, schedule=schedule)
    assert result.findings == ()
    np.testing.assert_array_equal(out, DATA.reshape(4, LANES)[:ctas])
    # Both CTAs' bytes count.
    half = EXPECT.format(bytes=512) + COPY + ARRIVED
    assert found(half, DATA, ctas=ctas, maps=MAPS, schedule=schedule) != []


MULTICAST = """
mov.b16 %rs1, {mask}; setp.ne.u32 %p6, %r2, {issuer}; @%p6 bra WAITING;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{multicast}
  [%r30], [%rd5, {{0, %r6}}], [%r8], %rs1;
"""
TO_PAIRS = ".multicast::cluster.cta_group::2"


@pytest.mark.parametrize("schedule", EVERY, ids=str)
@pytest.mark.parametrize("issuer", [0, 1, 2])
def test_a_multicast_to_pairs_tells_their_leaders(issuer, schedule):
    """One CTA loads for all four; the two leaders get the bytes of their pairs."""
    copy = MULTICAST.format(mask=15, issuer=issuer, multicast=TO_PAIRS)
    body = EXPECT.format(bytes=1024) + copy + ARRIVED
    out, result = run(body, DATA, ctas=4, maps=MAPS, schedule=schedule)
    assert result.findings == ()
    np.testing.assert_array_equal(out, np.tile(DATA.reshape(4, LANES)[issuer], (4, 1)))


def test_a_multicast_without_pairs_tells_each_cta():
    copy = MULTICAST.format(mask=3, issuer=0, multicast=".multicast::cluster")
    every = EXPECT.format(bytes=512).replace("@%p5 bra ISSUE;", "") + copy
    body = every + ARRIVED.replace("@%p5 bra MEETING;", "")
    out, result = run(body, DATA, maps=MAPS)
    assert result.findings == ()
    np.testing.assert_array_equal(out, np.tile(DATA[:LANES], (2, 1)))


def test_copies_for_pairs_need_pairs():
    body = EXPECT.format(bytes=1024) + COPY + ARRIVED
    (finding,) = run(body, DATA, ctas=1, maps=MAPS)[1].findings
    assert "a copy for CTA pairs in a cluster of 1" in finding.message
    # The mbarrier of another pair: address bit 25 cleared instead.
    other = body.replace("-16777217", "-33554433")
    messages = [f.message for f in run(other, DATA, ctas=4, maps=MAPS)[1].findings]
    assert "a copy into cta 3 that signals an mbarrier of cta 1" in messages[0]
    # And a copy that is not for pairs signals in the CTA that it writes.
    alone = body.replace(".cta_group::2", "")
    messages = [f.message for f in run(alone, DATA, maps=MAPS)[1].findings]
    assert "a copy into cta 1 that signals an mbarrier of cta 0" in messages[0]
