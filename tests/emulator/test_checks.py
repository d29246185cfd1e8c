# SPDX-License-Identifier: Apache-2.0
"""Each check twice: a kernel that triggers it, and the same kernel put right."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator.checks import Components
from fmha_gen.emulator.lanes import LANES
from fmha_gen.emulator.scheduler import Completion, Order, Schedule

from .kernels import FIRST_INPUT, OUT, execute, kinds, tensor_map

DATA = np.arange(64 * 8, dtype=np.uint32)
LOADED = (tensor_map(FIRST_INPUT, (16, 32), (16, 8)),)
STORED = (tensor_map(OUT, (16, 8), (16, 8)),)

BASE = """
mov.b32 %r30, smem; shl.b32 %r31, %r1, 2; add.s32 %r31, %r31, %r30;
xor.b32 %r32, %r31, 256;
setp.ne.u32 %p1, %r1, 0;
"""
EVERY = [
    Schedule(seed, order, completion)
    for seed, (order, completion) in enumerate(
        (order, completion) for order in Order for completion in Completion
    )
]


def found(body: str, *inputs: np.ndarray, **options) -> list[str]:
    return kinds(execute(BASE + body, *inputs, **options)[1])


def first(body: str, *inputs: np.ndarray, **options) -> str:
    result = execute(BASE + body, *inputs, **options)[1]
    return str(result.findings[0])


# -- conversions to 8-bit floats

NARROW = "cvt.rn.satfinite.{}x2.f32 %rs1, %r10, %r11;"


@pytest.mark.parametrize(("dtype", "edge"), [("e4m3", 464.0), ("e5m2", 61439.0)])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", [0, 1])
def test_a_number_that_is_clipped(dtype, edge, sign, place):
    """One lane of one operand; up to the edge the largest finite number is the nearest."""
    operands = np.ones((2, LANES), np.float32)
    operands[place, 77] = sign * edge
    operands[:, 5] = np.nan
    assert found(NARROW.format(dtype), *operands) == []
    operands[place, 77] = sign * np.float32(edge) * np.float32(1.001)
    assert found(NARROW.format(dtype), *operands) == ["saturation"]
    told = first(NARROW.format(dtype), *operands)
    assert "cta 0 warp 2" in told and f"beyond what {dtype} holds" in told
    operands[place, 77] = sign * np.inf
    assert found(NARROW.format(dtype), *operands) == ["saturation"]


def test_a_number_that_is_clipped_in_lanes_that_do_not_run():
    a = np.ones(LANES, np.float32)
    a[77] = 1e9
    convert = NARROW.format("e4m3")
    guarded = "setp.{}.u32 %p2, %r1, 77; @%p2 " + convert
    assert found(guarded.format("ne"), a, a) == []
    assert found(guarded.format("eq"), a, a) == ["saturation"]
    branch = "setp.{}.u32 %p2, %r1, 77; @%p2 bra OVER; " + convert + " OVER:"
    assert found(branch.format("eq"), a, a) == []
    assert found(branch.format("ne"), a, a) == ["saturation"]


def test_many_conversions_are_checked_each_before_what_overwrites():
    """As unrolled code has them, each of its own registers, which are written again after it."""
    lines = []
    for n in range(8):
        lines.append(f"mul.f32 %r{100 + n}, %r10, 0f{0x43000000 + (n << 20):08X};")
    for n in range(8):
        lines.append(
            f"cvt.rn.satfinite.e4m3x2.f32 %rs{10 + n}, %r{100 + n}, %r{100 + n};"
        )
        lines.append(f"mov.b32 %r{100 + n}, 0f3F800000;")
    a = np.ones(LANES, np.float32)
    _, result = execute("\n".join(lines), a)  # 128, 144, ..., 240
    assert result.findings == ()
    _, result = execute("\n".join(lines), a * 2)
    told = [finding.line for finding in result.findings]
    assert len(told) == 1  # of 256, ..., 448, 480


# -- e4m3 codes in the low bytes of halves

LEAST = np.float32(2.0**-24)  # of fp16
CODES = """cvt.rn.relu.f16x2.f32 %r42, %r11, %r10; mov.b32 %r43, %r42; {}
prmt.b32 %r44, %r43, %r1, {};"""


@pytest.mark.parametrize("place", [0, 1])
def test_a_code_beyond_the_largest(place):
    """One lane of one half: 126.5 rounds to 126, what is above to a NaN's code or a wrong one."""
    operands = np.full((2, LANES), LEAST)
    operands[place, 77] = 126.5 * LEAST
    operands[place, 78] = -np.inf
    operands[:, 5] = np.nan
    body = CODES.format("", "0x5420")
    assert found(body, *operands) == []
    for beyond in (126.6, 127, 200, 255, 256, 300, 1100, 65000, 1e9, np.inf):
        operands[place, 77] = beyond * LEAST
        assert found(body, *operands) == ["saturation"], beyond
    told = first(body, *operands)
    assert "cta 0 warp 2" in told and "no e4m3 number's code" in told
    assert found(CODES.format("", f"0x555{2 * place}"), *operands) == ["saturation"]
    assert found(CODES.format("", f"0x555{2 - 2 * place}"), *operands) == []


def test_a_code_beyond_the_largest_in_lanes_that_do_not_run():
    a = np.full(LANES, LEAST)
    a[77] *= 200
    guarded = CODES.format("setp.{}.u32 %p2, %r1, 77; @%p2", "0x2020")
    assert found(guarded.format("ne"), a, a) == []
    assert found(guarded.format("eq"), a, a) == ["saturation"]


@pytest.mark.parametrize(
    ("between", "selector"),
    [
        ("", "0x5410"),  # both bytes of each half
        ("", "0x7531"),  # the upper ones
        ("", "0x7676"),  # of the other source
        ("", "0xa8a8"),  # signs
        ("mov.b32 %r45, 0x6420;", "%r45"),
        ("mov.b32 %r43, %r10;", "0x6420"),  # no halves
        ("and.b32 %r43, %r43, -1;", "0x6420"),
    ],
)
def test_bytes_that_are_no_codes_of_halves(between, selector):
    a = np.full(LANES, 200 * LEAST)
    assert found(CODES.format(between, selector), a, a) == []


# -- races of the generic proxy


def test_read_needs_a_barrier_after_another_warps_write():
    write, read = "st.shared.b32 [%r31], %r1;", "ld.shared.b32 %r20, [%r32];"
    assert found(f"{write} bar.sync 0; {read}") == []
    # Warps 0 and 2, 1 and 3 exchange. Warps that run ahead also read what nobody wrote yet.
    drifting = Schedule(1, Order.RANDOM_WARPS)
    assert "race" in found(f"{write} {read}")
    assert set(found(f"{write} {read}", schedule=drifting)) <= {
        "race",
        "read-before-write",
    }
    message = first(f"{write} {read}")
    assert "ld.shared reads shared memory that cta 0 warp 2 writes" in message
    assert "[cta 0 warp 0]" in message


def test_write_needs_a_barrier_after_another_warps_read():
    write, read = "st.shared.b32 [%r31], %r1;", "ld.shared.b32 %r20, [%r32];"
    ordered = f"{write} bar.sync 0; {read} bar.sync 0; {write}"
    assert found(ordered) == []
    assert found(f"{write} bar.sync 0; {read} {write}") == ["race"]
    assert "may still be reading" in first(f"{write} bar.sync 0; {read} {write}")


def test_arrive_and_wait_of_an_mbarrier_order():
    setup = """
@%p1 bra READY; mbarrier.init.shared.b64 [%r30+512], 64; READY: bar.sync 0;
setp.gt.u32 %p2, %r1, 63; @%p2 bra CONSUMER;
st.shared.b32 [%r31], %r1; """
    arrive = "mbarrier.arrive.shared.b64 _, [%r30+512]; "
    consumer = """bra DONE;
CONSUMER: mbarrier.try_wait.parity.shared.b64 %p3, [%r30+512], 0; @!%p3 bra CONSUMER;
ld.shared.b32 %r20, [%r32];
DONE:"""
    store = "st.shared.b32 [%r31], %r1; "
    assert found(setup + arrive + consumer) == []
    assert found(setup + arrive + store + consumer) == ["race"]


def test_relaxed_cluster_arrival_orders_no_data():
    body = """st.shared.b32 [%r31], %r1;
barrier.cluster.arrive{order}; barrier.cluster.wait;
ld.shared.b32 %r20, [%r32];"""
    assert found(body.format(order=".release")) == []
    assert found(body.format(order=".relaxed")) == ["race"]


def test_read_before_write():
    assert found("st.shared.b32 [%r31], 1; ld.shared.b32 %r20, [%r31];") == []
    assert found("ld.shared.b32 %r20, [%r31];") == ["read-before-write"]


# -- races on global memory

OTHERS = """
and.b32 %r40, %r1, 31; shl.b32 %r40, %r40, 2; cvt.u64.u32 %rd6, %r40; add.s64 %rd6, %rd1, %rd6;
setp.gt.u32 %p2, %r1, 31; setp.eq.u32 %p3, %r1, 32;
"""  # %rd6: the place of the lane in warp 0, %p2: not of warp 0


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_global_memory_is_written_and_read_in_order(schedule):
    def seen(body: str) -> list[str]:
        return found(OTHERS + body, schedule=schedule)

    own, theirs = "st.global.b32 [%rd2], %r1;", "@%p3 st.global.b32 [%rd1], 5;"
    read, sync = "@%p2 ld.global.b32 %r20, [%rd6];", "bar.sync 0;"
    assert seen(own) == seen(own + own) == seen(f"{own} {sync} {theirs}") == []
    assert seen(own + theirs) == ["race"]
    assert seen(f"{own} {sync} {read}") == []
    assert seen(own + read) == ["race"]
    assert seen(f"{own} {sync} {read} {sync} {own}") == []
    assert seen(f"{own} {sync} {read} {own}") == ["race"]


def test_neighbouring_bytes_of_global_memory_are_no_race():
    narrow = """cvt.u16.u32 %rs1, %r1; cvt.u64.u32 %rd6, %r1; shl.b64 %rd7, %rd6, {shift};
add.s64 %rd6, %rd1, %rd7; st.global.b{bits} [%rd6], %rs1;"""
    for shift, bits in ((0, 8), (1, 16)):
        assert found(narrow.format(shift=shift, bits=bits)) == []
    # A word of warp 0 and a byte of it, written by warp 1.
    byte = "@%p3 st.global.b8 [%rd1+3], %rs1;"
    assert found(f"{OTHERS} st.global.b32 [%rd2], 1; {byte}") == ["race"]


def test_clusters_run_in_no_order():
    place = """mov.u32 %r40, %ctaid.x; {}
shl.b32 %r40, %r40, 9; cvt.u64.u32 %rd6, %r40; add.s64 %rd6, %rd2, %rd6;"""
    own, first_cta = place.format(""), place.format("mov.u32 %r40, 0;")
    write, read = "st.global.b32 [%rd6], %r1;", "ld.global.b32 %r20, [%rd6];"
    single = "mov.u32 %r41, %ctaid.x; setp.eq.u32 %p4, %r41, 0;"

    def seen(body: str, **options) -> list[str]:
        return found(body, grid=2, out=np.zeros(256, np.uint32), **options)

    assert seen(own + write) == []
    assert seen(first_cta + write) == ["race"]
    assert seen(first_cta + write, checks=False) == []
    assert seen(f"{single} {first_cta} @%p4 {write} @!%p4 {read}") == ["race"]
    assert seen(f"{single} {first_cta} @%p4 {read} @!%p4 {write}") == ["race"]
    assert seen(f"{first_cta} {read}") == []
    message = first(first_cta + write, grid=2)
    assert "that cta 0 warp 0 of another cluster writes (line" in message
    # In one cluster a barrier of the cluster orders them.
    barrier = "barrier.cluster.arrive; barrier.cluster.wait;"
    turns = f"{single} {first_cta} @%p4 {write} {barrier} @!%p4 {write}"
    assert seen(turns, cluster=2) == []
    assert seen(turns.replace(barrier, ""), cluster=2) == ["race"]


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_copies_race_on_global_memory_too(schedule):
    options = {"maps": STORED, "out": np.zeros(LANES, np.uint32), "schedule": schedule}
    fill = "st.shared.b32 [%r31], %r1; fence.proxy.async.shared::cta; bar.sync 0;"
    reads, write = f"{fill} {STORE} {WAIT} DONE:", "st.global.b32 [%rd2], %r1;"
    store = reads.replace(".read", "")
    assert found(store, **options) == found(reads, **options) == []
    assert found(f"{store} bar.sync 0; {write}", **options) == []
    # Who waits until the store has read knows nothing of what it writes.
    assert found(f"{reads} bar.sync 0; {write}", **options) == ["race"]
    assert found(f"{store} {write}", **options) == ["race"]
    # bar.sync lies in between, but a copy needs a fence as well.
    fenced = f"{write} fence.proxy.async.global; {store}"
    assert found(fenced, **options) == []
    assert found(f"{write} {store}", **options) == ["proxy-fence"]
    half = write.replace("[%rd2]", "[%rd2+512]")
    wide = options | {"out": np.zeros(2 * LANES, np.uint32)}
    assert found(f"{store} {half}", **wide) == []
    inputs = np.zeros(512, np.uint32)
    options |= {"maps": LOADED, "out": np.zeros(LANES, np.uint32)}
    into = "add.s64 %rd6, %rd4, 0; @%p3 st.global.b32 [%rd6], 5;"
    source = "ld.param.b64 %rd4, [k_param_1];" + OTHERS.replace("%rd6", "%rd8")
    load = LOAD.format(**RIGHT)
    assert found(f"{source} {load} bar.sync 0; {into}", inputs, **options) == []
    fence = "fence.proxy.async;"
    assert found(f"{source} {into} {fence} {load}", inputs, **options) == []
    assert found(f"{source} {into} {load}", inputs, **options) == ["proxy-fence"]
    early = load.replace("WAIT: ", f"WAIT: {into}")
    assert found(f"{source} {early}", inputs, **options) == ["race"]


# -- the asynchronous proxy

STORE = """
setp.gt.u32 %p2, %r1, 31; @%p2 bra DONE;
mov.b64 %rd5, k_param_1;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd5, {0, 0}], [%r30];
cp.async.bulk.commit_group; """
WAIT = "cp.async.bulk.wait_group.read 0;"


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_tensor_store_needs_a_proxy_fence(schedule):
    options = {"maps": STORED, "out": np.zeros(LANES, np.uint32), "schedule": schedule}
    write, fence = "st.shared.b32 [%r31], %r1;", "fence.proxy.async.shared::cta;"
    assert found(f"{write} {fence} bar.sync 0; {STORE} {WAIT} DONE:", **options) == []
    # The fence of who issues the copy, after the barrier, does too.
    assert found(f"{write} bar.sync 0; {fence} {STORE} {WAIT} DONE:", **options) == []
    assert found(f"{write} bar.sync 0; {STORE} {WAIT} DONE:", **options) == [
        "proxy-fence"
    ]
    # A fence before the write fences nothing.
    late = f"{fence} {write} bar.sync 0; {STORE} {WAIT} DONE:"
    assert found(late, **options) == ["proxy-fence"]
    # A fence of another space does not either.
    other = f"{write} fence.proxy.async.global; bar.sync 0; {STORE} {WAIT} DONE:"
    assert found(other, **options) == ["proxy-fence"]


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_writes_after_a_tensor_store(schedule):
    """A wait_group.read by the issuer, then a barrier, let every warp write the source again."""
    options = {"maps": STORED, "out": np.zeros(LANES, np.uint32), "schedule": schedule}
    head = (
        "st.shared.b32 [%r31], %r1; fence.proxy.async.shared::cta; bar.sync 0;" + STORE
    )
    tail = """DONE: bar.sync 0;
stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r33], {%r1};"""
    rows = "shl.b32 %r33, %r1, 4; add.s32 %r33, %r33, %r30; and.b32 %r33, %r33, 0xFFFF1DFF;"
    assert found(rows + head + WAIT + tail, **options) in ([], ["race"])
    # The rows of two warps overlap in this snippet only when they are one warp's.
    own = rows.replace("0xFFFF1DFF", "-1")
    assert found(own + head + WAIT + tail, **options) == []
    assert "race" in found(own + head + tail + WAIT.replace("0", "0"), **options)


def test_bulk_store_must_be_waited_for():
    options = {"maps": STORED, "out": np.zeros(LANES, np.uint32)}
    head = (
        "st.shared.b32 [%r31], %r1; fence.proxy.async.shared::cta; bar.sync 0;" + STORE
    )
    assert found(head + WAIT + "DONE:", **options) == []
    assert found(head + "DONE:", **options) == ["outstanding"]
    assert found(head + WAIT.replace("0", "1") + "DONE:", **options) == ["outstanding"]


LOAD = """
@%p1 bra READY;
mbarrier.init.shared.b64 [%r30], 1; mbarrier.init.shared.b64 [%r30+8], 1;
{fence}
READY: {barrier}
mov.b64 %rd5, k_param_2;
@%p1 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%r30], {bytes};
{load} [%r30+1024], [%rd5, {{0, 0}}], [%r30];
mbarrier.arrive.expect_tx.shared.b64 _, [%r30+8], 512;
{load} [%r30+2048], [%rd5, {{0, 8}}], [%r30+8];
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r30+{waited}], 0, 1000000; @!%p2 bra WAIT;
ld.shared.b32 %r20, [%r31+1024];
FIRST: mbarrier.try_wait.parity.shared.b64 %p2, [%r30], 0; @!%p2 bra FIRST;
SECOND: mbarrier.try_wait.parity.shared.b64 %p2, [%r30+8], 0; @!%p2 bra SECOND;
"""
RIGHT = {
    "load": "cp.async.bulk.tensor.2d.shared::cta.global.tile."
    "mbarrier::complete_tx::bytes",
    "fence": "fence.mbarrier_init.release.cluster;",
    "barrier": "bar.sync 0;",
    "bytes": 512,
    "waited": 0,
}


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_load_is_waited_for_on_its_own_mbarrier(schedule):
    options = {"maps": LOADED, "schedule": schedule}
    assert found(LOAD.format(**RIGHT), DATA, **options) == []
    # The other load was issued later, by the same thread: that says nothing of the first.
    wrong = found(LOAD.format(**RIGHT | {"waited": 8}), DATA, **options)
    assert set(wrong) <= {"race", "read-before-write"} and wrong


@pytest.mark.parametrize("order", Order)
def test_a_late_load_that_is_polled_for_arrives(order):
    polls = LOAD.format(**RIGHT).replace("0, 1000000", "0").replace("try_", "test_")
    late = Schedule(1, order, Completion.LATE)
    assert found(polls, DATA, maps=LOADED, schedule=late) == []


def test_initialisation_must_be_visible():
    no_fence = LOAD.format(**RIGHT | {"fence": ""})
    assert "visible to the copy" in first(no_fence, DATA, maps=LOADED)
    relaxed = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    assert found(LOAD.format(**RIGHT | {"barrier": relaxed}), DATA, maps=LOADED) == []
    unseen = LOAD.format(**RIGHT | {"barrier": relaxed, "fence": ""})
    assert found(unseen, DATA, maps=LOADED) == ["barrier"]


def test_transactions_that_do_not_add_up():
    few = execute(BASE + LOAD.format(**RIGHT | {"bytes": 256}), DATA, maps=LOADED)[1]
    assert kinds(few) == ["deadlock"]
    assert "(0 of 1 arrivals and -256 bytes are missing)" in str(few.findings[0])
    many = execute(BASE + LOAD.format(**RIGHT | {"bytes": 1024}), DATA, maps=LOADED)[1]
    assert kinds(many) == ["deadlock"]
    assert "(0 of 1 arrivals and 512 bytes are missing)" in str(many.findings[0])


# -- barriers


def test_a_warps_arrivals_do_not_fall_into_two_phases():
    """Who waits for the first phase would wait for all lanes but one, and in time for fewer."""
    warp_0 = "setp.lt.u32 %p20, %r1, 32; @%p20 mbarrier.arrive.shared.b64 _, [%r30];"
    for count, message in ((32, ""), (31, "over-arrived: 1 arrivals more")):
        start = f"@%p1 bra READY; mbarrier.init.shared.b64 [%r30], {count}; READY: "
        told = execute(BASE + start + "bar.sync 0;" + warp_0)[1].findings
        assert bool(told) == bool(message)
        assert message in "".join(map(str, told))


def test_mbarrier_misuse():
    start = "@%p1 bra READY; mbarrier.init.shared.b64 [%r30], 2; READY: bar.sync 0;"
    arrive = "@!%p1 mbarrier.arrive.shared.b64 _, [%r30];"
    assert found(f"{start} {arrive} {arrive}") == []
    twice = "@!%p1 mbarrier.arrive.shared.b64 _, [%r30], 3;"
    assert "over-arrived: 1 arrivals more than its count of 2" in first(
        f"{start} {twice}"
    )
    assert "no mbarrier was initialised at 0x408" in first(
        start + "@!%p1 mbarrier.arrive.shared.b64 _, [%r30+8];"
    )
    assert found("mbarrier.init.shared.b64 [%r30+4], 1;") == ["misaligned"]


def test_expect_tx_without_arrival_and_inval():
    start = "@%p1 bra READY; mbarrier.init.shared.b64 [%r30], 2; READY: bar.sync 0;"
    inval = "@!%p1 mbarrier.inval.shared.b64 [%r30];"
    assert found(f"{start} {inval}") == []
    expect = "@!%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r30], 64;"
    assert found(f"{start} {expect}") == ["barrier"]
    assert found(f"{start} {inval} {inval}") == ["barrier"]


def test_use_of_an_mbarrier_before_it_is_visible():
    init = "@%p1 bra READY; mbarrier.init.shared.b64 [%r30], 128; READY:"
    arrive = "mbarrier.arrive.shared.b64 _, [%r30];"
    assert found(f"{init} bar.sync 0; {arrive}") == []
    assert "not be visible to this warp" in first(f"{init} {arrive}")


def test_named_barriers_agree_on_their_threads():
    split = "setp.gt.u32 %p2, %r1, 63; @%p2 bra OTHER; {first} bra DONE; OTHER: {second} DONE:"
    arrive, sync = "bar.arrive 1, 128;", "bar.sync 1, 128;"
    assert found(split.format(first=arrive, second=sync)) == []
    wrong = split.format(first="bar.arrive 1, 96;", second=sync)
    assert "barrier 1 of 96 threads met one of 128" in first(wrong)
    assert found("barrier.sync 16;") == ["barrier"]


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_a_named_barrier_opens_for_somebody(schedule):
    split = """setp.gt.u32 %p2, %r1, 63; @%p2 bra OTHER{0}; {1} bra DONE{0};
OTHER{0}: {2} DONE{0}:
"""
    arrive, sync = "bar.arrive 1, 128;", "bar.sync 1, 128;"
    for first_half, second_half in ((arrive, sync), (sync, arrive)):
        twice = [split.format(n, first_half, second_half) for n in range(2)]
        assert found("bar.sync 0;".join(twice), schedule=schedule) == []
    assert found(split.format(0, arrive, arrive), schedule=schedule) == ["barrier"]
    # Without their wait the arrivals of two rounds open it among themselves.
    halves = "setp.gt.u32 %p2, %r1, 63; @%p2 bra DONE; bar.arrive 1, 128; {} DONE:"
    assert found(halves.format(""), schedule=schedule) == []
    assert found(halves.format(arrive), schedule=schedule) == ["barrier"]
    message = first(halves.format(arrive), schedule=schedule)
    assert "barrier 1 of 128 threads opens by arrivals alone" in message


def test_deadlock_says_who_waits_where_and_for_what():
    body = "@%p1 bra READY; mbarrier.init.shared.b64 [%r30], 3; READY: bar.sync 0;\n"
    body += "WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r30], 0; @!%p2 bra WAIT;"
    _, result = execute(
        BASE + body, schedule=Schedule(5, Order.RANDOM, Completion.LATE)
    )
    assert str(result.findings[0]) == (
        "deadlock: nobody can go on under order=random completion=late seed=5\n"
        "  cta 0 warps 0 to 3 at PTX line 18: mbarrier.try_wait.parity.shared.b64 waits for "
        "mbarrier 0x400 parity 0 (3 of 3 arrivals and 0 bytes are missing)"
    )


def test_deadlock_at_a_named_barrier():
    body = "setp.gt.u32 %p2, %r1, 95; @%p2 bra DONE; bar.sync 3, 128; DONE:"
    assert "warps 0 to 2" in first(body)
    assert "waits for barrier 3 (96 of 128 threads are there)" in first(body)
    assert found(body.replace("3, 128", "3, 96")) == []


def test_deadlock_of_lanes_apart():
    body = "{test} @%p2 bra APART; elect.sync %r20|%p3, -1; APART: bar.sync 0;"
    apart = body.format(test="setp.eq.u32 %p2, %r1, 3;")
    assert found(apart) == ["deadlock"]
    assert "waits for the other lanes of its warp" in first(apart)
    assert found(body.format(test="setp.eq.u32 %p2, %r1, 999;")) == []


def test_findings_name_the_source_line():
    located = "\n.loc 1 12 4\nld.shared.b32 %r20, [%r31];"
    assert first(located).endswith("[cta 0 warp 0, 1:12]")
    stuck = "\n.loc 1 30 4\nbar.sync 1, 256;"
    assert "PTX line 19 (1:30): bar.sync waits for barrier 1" in first(stuck)


def test_livelock_ends():
    assert found("FOREVER: bra FOREVER;", max_steps=1000) == ["livelock"]


def test_copies_need_a_cta_that_is_there():
    setup = """
mov.u32 %r40, %cluster_ctarank; setp.eq.u32 %p4, %r40, 1;
@%p1 bra READY; mbarrier.init.shared.b64 [%r30], 1; fence.mbarrier_init.release.cluster;
READY: barrier.cluster.arrive.relaxed; barrier.cluster.wait;
mapa.shared::cluster.u32 %r41, %r30, {rank};
{stay}
@!%p4 ret; @%p1 ret;
mbarrier.arrive.shared::cluster.b64 _, [%r41];"""
    options = {"grid": 2, "cluster": 2}
    together = """@!%p4 bra STAY; bra GO;
STAY: mbarrier.try_wait.parity.shared.b64 %p5, [%r30], 0; @!%p5 bra STAY;
GO:"""
    assert found(setup.format(rank=0, stay=together), **options) == []
    gone = [
        found(setup.format(rank=0, stay=""), schedule=each, **options) for each in EVERY
    ]
    assert ["barrier"] in gone
    assert found(setup.format(rank=2, stay=together), **options) == ["out-of-bounds"]


def test_a_cta_stays_until_it_was_signalled():
    body = """
mov.u32 %r40, %cluster_ctarank; setp.eq.u32 %p4, %r40, 1;
@%p1 bra READY; mbarrier.init.shared.b64 [%r30], 1; fence.mbarrier_init.release.cluster;
READY: barrier.cluster.arrive.relaxed; barrier.cluster.wait;
@%p4 bra SENDER;
{stay}
ret;
SENDER: mapa.shared::cluster.u32 %r41, %r30, 0;
@%p1 ret; mbarrier.arrive.shared::cluster.b64 _, [%r41];"""
    wait = "STAY: mbarrier.try_wait.parity.shared.b64 %p5, [%r30], 0; @!%p5 bra STAY;"
    options = {"grid": 2, "cluster": 2}
    assert found(body.format(stay=wait), **options) == []
    # Whether the arrive comes in time or not: the schedule does not matter.
    for schedule in EVERY:
        assert found(body.format(stay=""), schedule=schedule, **options) == ["barrier"]


def test_a_load_that_nobody_waits_for():
    alone = LOAD.replace(
        "SECOND: mbarrier.try_wait.parity.shared.b64 %p2, [%r30+8], 0; @!%p2 bra SECOND;",
        "",
    )
    assert alone != LOAD
    assert "stay until a TMA load has signalled" in first(
        alone.format(**RIGHT), DATA, maps=LOADED
    )


# -- memory


def test_writes_outside_every_buffer():
    assert found("st.global.b32 [%rd2], 1;") == []
    assert found("st.global.b32 [%rd2+512], 1;") == ["out-of-bounds"]
    assert "128 bytes" not in first("st.global.b32 [%rd2+4], 1;")
    assert found("ld.global.b32 %r20, [%rd2+65536];") == ["out-of-bounds"]
    assert found("st.global.b32 [%rd2+2], 1;") == ["misaligned"]


def test_boxes_wholly_outside_their_tensor():
    def loaded(axis: int, row: int, **options) -> list[str]:
        body = LOAD.format(**RIGHT).replace("{0, 8}", f"{{{axis}, {row}}}")
        return found(body, DATA, maps=LOADED, **options)

    assert loaded(0, 31) == loaded(0, -7) == loaded(12, 24) == []
    # The tensor is 16 x 32, the box 16 x 8. This is what a wrong slice does: zeros, no fault.
    assert loaded(16, 8) == loaded(0, 32) == loaded(0, -8) == ["out-of-bounds"]
    tiles = {FIRST_INPUT: (1, 20)}
    assert loaded(0, 39, tiles=tiles) == []
    assert loaded(0, 40, tiles=tiles) == loaded(16, 8, tiles=tiles) == ["out-of-bounds"]
    wrong = LOAD.format(**RIGHT).replace("{0, 8}", "{0, 40}")
    message = first(wrong, DATA, maps=LOADED, tiles=tiles)
    assert "at (0, 40) is wholly outside the tensor: dimension 1 has 32" in message


def test_a_box_wholly_outside_is_read_where_the_map_begins():
    """As the H200 does, with an illegal memory access where there is no memory."""
    early = FIRST_INPUT - 4096
    maps, tiles = (tensor_map(early, (16, 96), (16, 8)),), {early: (1, 200)}
    body = LOAD.format(**RIGHT).replace("{0, 0}", "{0, 64}")
    assert found(body.replace("{0, 8}", "{0, 72}"), DATA, maps=maps, tiles=tiles) == []
    beyond = body.replace("{0, 8}", "{0, 96}")
    assert found(beyond, DATA, maps=maps, tiles=tiles) == ["out-of-bounds"]


def test_stores_wholly_outside_their_tensor():
    options = {"maps": STORED, "out": np.zeros(LANES, np.uint32)}
    head = "st.shared.b32 [%r31], %r1; fence.proxy.async.shared::cta; bar.sync 0;"
    body = head + STORE + WAIT + "DONE:"
    beyond = body.replace("{0, 0}", "{0, 8}")
    assert found(body, **options) == []
    assert found(beyond, **options) == ["out-of-bounds"]
    assert found(beyond, tiles={OUT: (1, 16)}, **options) == []


def test_shared_memory_has_an_end_and_a_reserved_start():
    assert found("st.shared.b32 [%r31], 1;", smem_bytes=512) == []
    assert found("st.shared.b32 [%r31+4], 1;", smem_bytes=512) == ["out-of-bounds"]
    assert found("st.shared.b32 [%r31+-1024], 1;") == ["out-of-bounds"]
    assert "st.shared.b32" in first("st.shared.b32 [%r31+2], 1;")


def test_misaligned_tensor_destination():
    wrong = LOAD.format(**RIGHT).replace("[%r30+1024], [", "[%r30+1040], [")
    assert found(wrong, DATA, maps=LOADED) == ["misaligned"]


# -- registers and products


def test_register_budget():
    # 128 threads start with 255 each: 248 more for all do fit, what is not there never comes.
    less = "setmaxnreg.dec.sync.aligned.u32 40; setmaxnreg.inc.sync.aligned.u32 200;"
    assert found(less, threads=384, out=np.zeros(384, np.uint32)) == ["deadlock"]
    assert found(less) == []
    # 384 threads have 168 each, 64,512: of the SM's other 1,024 none is theirs.
    uneven = (
        "mov.u32 %r50, %tid.x; setp.lt.u32 %p10, %r50, 128; @%p10 bra LESS;"
        " setmaxnreg.inc.sync.aligned.u32 240; ret;"
        " LESS: setmaxnreg.dec.sync.aligned.u32 {};"
    )
    assert found(uneven.format(24), threads=384) == []
    assert found(uneven.format(32), threads=384) == ["deadlock"]
    assert found("setmaxnreg.inc.sync.aligned.u32 40;") == ["registers"]
    assert found("setmaxnreg.dec.sync.aligned.u32 41;") == ["registers"]


def test_a_trap_is_found_where_a_lane_is_left():
    guarded = "setp.eq.u32 %p1, %r1, {}; @%p1 trap;"
    assert found(guarded.format(127)) == ["trap"]
    assert found(guarded.format(128)) == []
    assert found("trap;") == ["trap"]


MATRICES = """
mov.b64 %rd7, 68720001088;
FILL: st.shared.b32 [%r31], 0; st.shared.b32 [%r31+512], 0; st.shared.b32 [%r31+1024], 0;
st.shared.b32 [%r31+1536], 0;
{proxy} bar.sync 0;
mov.b32 %r50, 0; mov.b32 %r51, 0; mov.b32 %r52, 0; mov.b32 %r53, 0;
{fence}
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
  {{%r50, %r51, %r52, %r53}}, %rd7, %rd7, 0, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
{wait}
add.f32 %r54, %r50, %r50; st.global.b32 [%rd2], %r54;
"""
PRODUCT = {
    "proxy": "fence.proxy.async;",
    "fence": "wgmma.fence.sync.aligned;",
    "wait": "wgmma.wait_group.sync.aligned 0;",
}


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_products_need_their_fences_and_waits(schedule):
    out, result = execute(BASE + MATRICES.format(**PRODUCT), schedule=schedule)
    assert result.findings == ()
    assert not out.any()

    def wrong(part: str) -> list[str]:
        return found(MATRICES.format(**PRODUCT | {part: ""}), schedule=schedule)

    assert wrong("proxy") == ["proxy-fence"]
    assert wrong("fence") == ["wgmma"]
    assert "outstanding" in wrong("wait")
    early, _ = execute(
        BASE + MATRICES.format(**PRODUCT | {"wait": ""}), schedule=schedule
    )
    assert np.isnan(early.view(np.float32)).all()  # accumulators in flight are poison


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_accumulators_read_under_a_product_in_flight(schedule):
    def seen(reading: str, wait: str = PRODUCT["wait"]) -> list[str]:
        parts = PRODUCT | {"wait": f"{reading} {wait}"}
        return found(MATRICES.format(**parts), schedule=schedule)

    # Whoever reads them, even if the value goes nowhere; what is no accumulator may be read.
    assert seen("add.f32 %r55, %r60, %r60;") == []
    assert seen("mov.b32 %r55, %r52;") == ["wgmma"]
    assert seen("setp.gt.f32 %p4, %r51, 0f00000000;") == ["wgmma"]
    assert seen("@%p1 add.f32 %r55, %r50, %r50;") == ["wgmma"]
    assert seen("setp.ne.s32 %p4, 0, 0; @%p4 add.f32 %r55, %r50, %r50;") == []
    # A wait that leaves the group in flight is none; nor does one wait help the next product.
    assert seen("", "wgmma.wait_group.sync.aligned 1; " + PRODUCT["wait"]) == []
    late = "wgmma.wait_group.sync.aligned 1; add.f32 %r55, %r50, %r50;"
    assert seen(late) == ["wgmma"]
    again = f"""{PRODUCT["wait"]} add.f32 %r55, %r50, %r50; {PRODUCT["fence"]}
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
  {{%r50, %r51, %r52, %r53}}, %rd7, %rd7, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned; """
    assert seen(again) == []
    assert seen(f"{again} add.f32 %r55, %r50, %r50;") == ["wgmma"]


def test_an_early_read_names_the_instruction():
    early = PRODUCT | {"wait": "mul.f32 %r55, %r50, %r50;" + PRODUCT["wait"]}
    message = first(MATRICES.format(**early))
    assert "mul.f32: reads an accumulator whose product is in flight" in message


def test_accumulators_written_under_a_product_in_flight():
    early = PRODUCT | {"wait": "mov.b32 %r50, 0;" + PRODUCT["wait"]}
    assert found(MATRICES.format(**early)) == ["wgmma"]
    assert "accumulators were written" in first(MATRICES.format(**early))


def test_a_in_registers_written_under_a_product_in_flight():
    late = Schedule(0, completion=Completion.LATE)
    body = MATRICES.replace("%rd7, %rd7", "{{%r60, %r61, %r62, %r63}}, %rd7").replace(
        ", 0, 0;", ", 0;"
    )
    body = "mov.b32 %r60, 0; mov.b32 %r61, 0; mov.b32 %r62, 0; mov.b32 %r63, 0;" + body
    assert found(body.format(**PRODUCT), schedule=late) == []
    wrong = PRODUCT | {"wait": "mov.b32 %r62, 1;" + PRODUCT["wait"]}
    assert "A's registers were written" in first(body.format(**wrong), schedule=late)


def test_only_copies_of_what_a_fence_saw_come_after_it():
    """As compilers have it where several elements start from one value."""
    product = MATRICES.replace("%rd7, %rd7, 0,", "%rd7, %rd7, {accumulate},")
    product = product.replace("mov.b32 %r53, 0;", "mov.b32 %r53, 5;")
    fences = {
        "copied": "wgmma.fence.sync.aligned; mov.b32 %r52, %r53;",
        "copied from an integer": "mov.b32 %r60, 3; shl.b32 %r60, %r60, 1; "
        "wgmma.fence.sync.aligned; mov.b32 %r52, %r60;",
        "computed": "wgmma.fence.sync.aligned; add.s32 %r52, %r50, 1;",
        "computed and copied": "wgmma.fence.sync.aligned; add.s32 %r61, %r50, 1; "
        "mov.b32 %r52, %r61;",
        "loaded": "wgmma.fence.sync.aligned; ld.shared.b32 %r52, [%r31];",
    }

    def kinds(fence: str, accumulate: int) -> list[str]:
        parts = PRODUCT | {"fence": fences[fence], "accumulate": accumulate}
        return found(product.format(**parts))

    for fence in fences:
        problem = [] if fence.startswith("copied") else ["wgmma"]
        assert kinds(fence, 0) == kinds(fence, 1) == problem, fence


def test_write_under_a_product_in_flight():
    overwrite = "st.shared.b32 [%r31], 1;"
    late = PRODUCT["wait"]
    assert (
        found(MATRICES.format(**PRODUCT | {"wait": late + " bar.sync 0;" + overwrite}))
        == []
    )
    assert "race" in found(MATRICES.format(**PRODUCT | {"wait": overwrite + late}))


# -- launches that a device refuses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smem_bytes": 232449}, "232449 bytes of shared memory, more than 232448"),
        (
            {"grid": 3, "cluster": 2},
            "grid (3, 1, 1) is not a multiple of cluster (2, 1, 1)",
        ),
    ],
)
def test_refused_launch(options, message):
    assert message in first("ret;", **options)


@pytest.mark.parametrize("tensor", [False, True])
def test_each_component_has_a_name_of_its_own(tensor):
    # Without tensor memory there are none for what goes there: their numbers are the arrivals'.
    components = Components(warps=2, groups=1, ctas=2, tensor=tensor, ordered=True)
    assert components.name(components.signals(1)) == "cta 1 warp 0's arrival"
    assert components.name(components.writes(0)) == "cta 0 warp 0's TMA store"
    if tensor:
        stores = components.tensor_stores(1)
        assert components.name(stores) == "cta 1 warp 0's tcgen05.st"
