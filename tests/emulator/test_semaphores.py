# SPDX-License-Identifier: Apache-2.0
"""CTAs that wait for each other through words of global memory."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator import together
from fmha_gen.emulator.emitters import UnsupportedInstruction
from fmha_gen.emulator.lanes import LANES
from fmha_gen.emulator.scheduler import Completion, Order, Schedule

from .kernels import FIRST_INPUT, execute, kinds

EVERY = [
    Schedule(seed, order, completion)
    for seed, (order, completion) in enumerate(
        (order, completion) for order in Order for completion in Completion
    )
]
SOME = [EVERY[0], EVERY[5], EVERY[10], EVERY[13]]
CTAS = 4

# %r2: the CTA, %rd7: the flag, %p1: all threads but the first; `out` is 128 words for all CTAs.
START = f"""
mov.u32 %r2, %ctaid.x; mov.b64 %rd7, {FIRST_INPUT}; setp.ne.u32 %p1, %r1, 0;
mov.b32 %r30, smem; shl.b32 %r31, %r1, 2; add.s32 %r31, %r31, %r30;
"""
LOAD = "ld.acquire.gpu.global.b32"
ACQUIRE = """
@%p1 bra GO; SPIN: ld.acquire.gpu.global.b32 %r3, [%rd7]; setp.ne.u32 %p2, %r3, %r2;
@%p2 bra SPIN; GO: bar.sync 0;
"""
WORK = """
ld.global.b32 %r20, [%rd2]; mad.lo.u32 %r20, %r20, 3, %r2; st.global.b32 [%rd2], %r20;
"""
RELEASE = "bar.sync 0; @%p1 bra DONE; red.release.gpu.global.add.u32 [%rd7], 1; DONE:"


def run(body: str, *, ctas: int = CTAS, flag: int = 0, **options):
    """The output of all CTAs, the flag, and the result."""
    flags = np.full(4, flag, np.uint32)
    out = options.pop("out", np.zeros(LANES, np.uint32))
    _, result = execute(START + body, flags, out=out, grid=ctas, **options)
    return out, flags, result


def found(body: str, **options) -> list[str]:
    return kinds(run(body, **options)[2])


def in_order(ctas: int = CTAS) -> int:
    value = 0
    for cta in range(ctas):
        value = 3 * value + cta
    return value


# -- a chain of CTAs, each of which waits for the one before it


@pytest.mark.parametrize("schedule", EVERY, ids=str)
@pytest.mark.parametrize("resident", [None, 1, 2, CTAS])
def test_ctas_take_turns(resident, schedule):
    out, flags, result = run(
        ACQUIRE + WORK + RELEASE, resident=resident, schedule=schedule
    )
    assert result.findings == ()
    assert (out == in_order()).all() and flags[0] == CTAS


RELEASES = {
    "red": RELEASE,
    "atom": RELEASE.replace("red.", "atom.").replace("add.u32 ", "add.u32 _, "),
    "atom.acq_rel": "bar.sync 0; @%p1 bra DONE; atom.global.acq_rel.add.u32 %r9, [%rd7], 1; "
    "DONE:",
    "store": "bar.sync 0; @%p1 bra DONE; add.u32 %r9, %r2, 1; "
    "st.release.gpu.global.b32 [%rd7], %r9; DONE:",
    "store for the system": "bar.sync 0; @%p1 bra DONE; add.u32 %r9, %r2, 1; "
    "st.release.sys.global.u32 [%rd7], %r9; DONE:",
    "fence and red": "bar.sync 0; @%p1 bra DONE; fence.acq_rel.gpu; "
    "red.relaxed.gpu.global.add.u32 [%rd7], 1; DONE:",
    "each thread's fence": "fence.acq_rel.gpu; bar.sync 0; @%p1 bra DONE; fence.sc.gpu; "
    "red.global.add.u32 [%rd7], 1; DONE:",
    "membar and volatile": "bar.sync 0; @%p1 bra DONE; membar.gl; add.u32 %r9, %r2, 1; "
    "st.volatile.global.u32 [%rd7], %r9; DONE:",
    "membar and relaxed": "bar.sync 0; @%p1 bra DONE; membar.sys; add.u32 %r9, %r2, 1; "
    "st.relaxed.gpu.global.b32 [%rd7], %r9; DONE:",
}
ACQUIRES = {
    "acquire": ACQUIRE,
    "acquire for the system": ACQUIRE.replace(LOAD, "ld.acquire.sys.global.b32"),
    "relaxed and fence": ACQUIRE.replace("acquire", "relaxed").replace(
        "GO:", "fence.acq_rel.gpu; GO:"
    ),
    "volatile and fence": ACQUIRE.replace(LOAD, "ld.volatile.global.u32").replace(
        "GO:", "fence.sc.sys; GO:"
    ),
    "atom": ACQUIRE.replace("ld.acquire.gpu.global.b32 %r3, [%rd7];", "").replace(
        "SPIN:", "SPIN: atom.acquire.gpu.global.add.u32 %r3, [%rd7], 0;"
    ),
    "all threads": ACQUIRE.replace("@%p1 bra GO;", ""),
}


@pytest.mark.parametrize("schedule", SOME, ids=str)
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("acquire", ACQUIRES)
def test_ways_to_hand_over(acquire, release, schedule):
    body = ACQUIRES[acquire] + WORK + RELEASES[release]
    out, _, result = run(body, schedule=schedule, resident=CTAS)
    assert result.findings == ()
    assert (out == in_order()).all()


DAMAGED = {
    "a relaxed load": (ACQUIRE.replace("acquire", "relaxed"), RELEASE),
    "a fence before the load": (
        ACQUIRE.replace("acquire", "relaxed").replace(
            "SPIN:", "fence.acq_rel.gpu; SPIN:"
        ),
        RELEASE,
    ),
    "a relaxed addition": (ACQUIRE, RELEASE.replace("release", "relaxed")),
    "a fence after the addition": (
        ACQUIRE,
        RELEASE.replace("release", "relaxed").replace(
            "DONE:", "fence.acq_rel.gpu; DONE:"
        ),
    ),
    "another thread's fence": (
        ACQUIRE,
        RELEASE.replace("release", "relaxed").replace(
            "bar.sync 0;",
            "bar.sync 0; setp.eq.u32 %p4, %r1, 1; @%p4 fence.acq_rel.gpu;",
        ),
    ),
    "no barrier before the release": (ACQUIRE, RELEASE.replace("bar.sync 0;", "")),
    "no barrier behind the acquisition": (ACQUIRE.replace("bar.sync 0;", ""), RELEASE),
    "a weak store": (
        ACQUIRE,
        "bar.sync 0; @%p1 bra DONE; add.u32 %r9, %r2, 1; st.global.b32 [%rd7], %r9; DONE:",
    ),
}


@pytest.mark.parametrize("schedule", SOME, ids=str)
@pytest.mark.parametrize("name", DAMAGED)
def test_what_hands_nothing_over(name, schedule):
    acquire, release = DAMAGED[name]
    body = acquire + WORK + release
    assert found(body, schedule=schedule, resident=CTAS) == ["race"]


SUM = "mov.b32 %r20, 0f3F800000; red.relaxed.gpu.global.add.f32 [%rd2], %r20;"


@pytest.mark.parametrize("schedule", SOME, ids=str)
def test_sums_are_ordered_by_what_is_handed_over(schedule):
    def seen(body: str, ordered: bool = True) -> list[str]:
        return found(body, schedule=schedule, resident=CTAS, ordered_sums=ordered)

    assert seen(ACQUIRE + SUM + RELEASE) == []
    for name, (acquire, release) in DAMAGED.items():
        if name != "a weak store":
            assert seen(acquire + SUM + release) == ["sum-order"], name
            assert seen(acquire + SUM + release, ordered=False) == [], name


@pytest.mark.parametrize("schedule", SOME, ids=str)
def test_a_plain_load_in_place_of_an_acquisition_is_a_race(schedule):
    """Once with what it waits for, and with the data behind it."""
    plain = ACQUIRE.replace("acquire.gpu.", "")
    _, _, result = run(plain + WORK + RELEASE, schedule=schedule, resident=CTAS)
    assert kinds(result) == ["race"]
    assert any("bytes of input 0" in each.message for each in result.findings)
    assert any("bytes of out" in each.message for each in result.findings)


def test_a_weak_store_to_what_another_cta_loads_strongly():
    body = """@%p1 bra END; setp.eq.u32 %p3, %r2, 0; @%p3 ld.relaxed.gpu.global.b32 %r3, [%rd7];
@!%p3 {store} [%rd7], 1; END:"""
    for resident in (1, 2):
        for store, problem in (
            ("st.relaxed.gpu.global.b32", []),
            ("st.global.b32", ["race"]),
        ):
            assert found(body.format(store=store), ctas=2, resident=resident) == problem


def test_a_race_names_the_other_cluster():
    body = ACQUIRE.replace("acquire", "relaxed") + WORK + RELEASE
    result = run(body)[2]
    assert any(
        "ld.global reads bytes of out that cta 0 warp 0 of another cluster writes"
        in each.message
        for each in result.findings
    )


def test_knowledge_goes_on_from_cta_to_cta():
    """CTA 0 hands over to 1 and 1 to 2, which never loads what 0 released."""
    body = """
setp.eq.u32 %p3, %r2, 0; @!%p3 bra OTHERS; st.global.b32 [%rd2], 7; bar.sync 0;
@%p1 bra END; st.release.gpu.global.b32 [%rd7], 1; bra END;
OTHERS: setp.eq.u32 %p4, %r2, 1; @!%p4 bra LAST; @%p1 bra END;
FIRST: ld.acquire.gpu.global.b32 %r3, [%rd7]; setp.ne.u32 %p2, %r3, 1; @%p2 bra FIRST;
{order} [%rd7+4], 1; bra END;
LAST: @%p1 bra READ;
SECOND: ld.acquire.gpu.global.b32 %r3, [%rd7+4]; setp.ne.u32 %p2, %r3, 1; @%p2 bra SECOND;
READ: bar.sync 0; ld.global.b32 %r20, [%rd2];
END:"""
    for schedule in EVERY:
        right = body.format(order="st.release.gpu.global.b32")
        assert found(right, ctas=3, schedule=schedule) == []
        wrong = body.format(order="st.relaxed.gpu.global.b32")
        assert found(wrong, ctas=3, schedule=schedule) == ["race"]


def test_what_is_acquired_adds_up():
    """CTA 2 waits for CTA 0 and then for CTA 1, and reads what both of them wrote."""
    body = """
mul.wide.u32 %rd8, %r2, 4; add.s64 %rd9, %rd7, %rd8; add.s64 %rd8, %rd1, %rd8;
@%p1 bra END; setp.eq.u32 %p3, %r2, 2; @%p3 bra READER;
st.global.b32 [%rd8], 7; st.release.gpu.global.b32 [%rd9], 1; bra END;
READER:
FIRST: ld.acquire.gpu.global.b32 %r3, [%rd7]; setp.ne.u32 %p2, %r3, 1; @%p2 bra FIRST;
SECOND: ld.{order}.gpu.global.b32 %r3, [%rd7+4]; setp.ne.u32 %p2, %r3, 1; @%p2 bra SECOND;
ld.global.b32 %r20, [%rd1]; ld.global.b32 %r20, [%rd1+4];
END:"""
    for schedule in EVERY:
        for order, problem in (("acquire", []), ("relaxed", ["race"])):
            code = body.format(order=order)
            assert found(code, ctas=3, schedule=schedule) == problem


def test_who_acquires_a_sum_acquires_of_all_who_added():
    """The last of them is the one that everybody knows."""
    body = """
setp.eq.u32 %p3, %r2, 0; @%p3 bra READER; mul.wide.u32 %rd8, %r2, 4; add.s64 %rd8, %rd1, %rd8;
@%p1 bra END; st.global.b32 [%rd8], %r2; {release}.gpu.global.add.u32 [%rd7], 1; bra END;
READER: @%p1 bra END;
SPIN: ld.acquire.gpu.global.b32 %r3, [%rd7]; setp.ne.u32 %p2, %r3, {count}; @%p2 bra SPIN;
ld.global.b32 %r20, [%rd1+4]; ld.global.b32 %r21, [%rd1+8]; ld.global.b32 %r22, [%rd1+12];
add.u32 %r20, %r20, %r21; add.u32 %r20, %r20, %r22; st.global.b32 [%rd1], %r20;
END:"""
    for schedule in EVERY:
        out, _, result = run(
            body.format(release="red.release", count=3), schedule=schedule
        )
        assert result.findings == () and out[0] == 6
    # One too few: whichever it is that is missing.
    early = [
        found(body.format(release="red.release", count=2), schedule=schedule)
        for schedule in EVERY
    ]
    assert any("race" in each for each in early)
    assert all(set(each) <= {"race", "deadlock"} and each for each in early)
    relaxed = body.format(release="red.relaxed", count=3)
    assert found(relaxed) == ["race"]


# -- reductions in order

ADD = """
cvt.rn.f32.u32 %r10, %r2; fma.rn.f32 %r10, %r10, 0f3DCCCCCD, 0f3F800000;
st.shared.b32 [%r31], %r10; fence.proxy.async.shared::cta; bar.sync 0;
@%p1 bra ADDED; {behind}
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r30], 512;
cp.async.bulk.commit_group; {waits} {release} ADDED:
"""
RIGHT = {
    "behind": "fence.proxy.async.global;",
    "waits": "cp.async.bulk.wait_group 0;",
    "release": "red.release.gpu.global.add.u32 [%rd7], 1;",
}
FENCED = "fence.acq_rel.gpu; red.relaxed.gpu.global.add.s32 [%rd7], 1;"


def sums(
    schedule: Schedule, acquire: str = ACQUIRE, **changes
) -> tuple[bytes, list[str]]:
    body = acquire + ADD.format(**RIGHT | changes)
    out, _, result = run(
        body, ctas=6, out=np.zeros(LANES, np.float32), schedule=schedule
    )
    return out.tobytes(), kinds(result)


@pytest.mark.parametrize("release", [RIGHT["release"], FENCED])
def test_sums_in_order_are_the_same_under_every_schedule(release):
    results = [sums(schedule, release=release) for schedule in EVERY]
    assert {str(problems) for _, problems in results} == {"[]"}
    assert len({bits for bits, _ in results}) == 1


def test_sums_in_no_order_are_not():
    results = [sums(schedule, acquire="bar.sync 0;") for schedule in EVERY]
    assert {str(problems) for _, problems in results} == {"[]"}
    assert len({bits for bits, _ in results}) > 1


@pytest.mark.parametrize("schedule", SOME, ids=str)
def test_a_reduction_in_order_is_fenced_behind_the_acquisition(schedule):
    assert sums(schedule)[1] == []
    for fence in ("", "fence.proxy.async.shared::cta;"):
        assert sums(schedule, behind=fence)[1] == ["proxy-fence"]
    assert sums(schedule, behind="fence.proxy.async;")[1] == []


def test_a_release_waits_for_what_was_added_and_not_for_what_was_read():
    """After a wait for reads additions are still under way: the sums are in some order."""
    read = {"waits": "cp.async.bulk.wait_group.read 0;"}
    results = [sums(schedule, **read) for schedule in EVERY]
    assert len({bits for bits, _ in results}) > 1
    # Who reads the sum afterwards is told so.
    body = (
        ACQUIRE
        + ADD.format(**RIGHT | {"release": ""})
        + "bar.sync 0; "
        + WORK
        + RELEASE
    )
    for schedule in EVERY:
        assert found(body, schedule=schedule) == []
        wrong = body.replace("wait_group 0", "wait_group.read 0")
        assert found(wrong, schedule=schedule) == ["race"]


@pytest.mark.parametrize("schedule", SOME, ids=str)
def test_a_load_by_tma_of_what_another_cta_wrote_is_fenced(schedule):
    """CTA 0 stores and releases, CTA 1 acquires and loads by a copy."""
    body = """
setp.eq.u32 %p3, %r2, 1; @%p3 bra READER; st.global.b32 [%rd2], %r1; {mine} bar.sync 0;
@%p1 bra END; st.release.gpu.global.b32 [%rd7], 1; bra END;
READER: @%p1 bra WAIT; mbarrier.init.shared.b64 [%r30], 1; fence.mbarrier_init.release.cluster;
SPIN: ld.acquire.gpu.global.b32 %r3, [%rd7]; setp.ne.u32 %p2, %r3, 1; @%p2 bra SPIN; {theirs}
mbarrier.arrive.expect_tx.shared.b64 _, [%r30], 512;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r30+1024], [%rd1], 512, [%r30];
WAIT: bar.sync 0;
MORE: mbarrier.try_wait.parity.shared.b64 %p2, [%r30], 0; @!%p2 bra MORE; END:"""
    fence = "fence.proxy.async.global;"
    for mine, theirs, problem in (
        ("", fence, []),
        (fence, "", []),
        ("", "", ["proxy-fence"]),
        ("", "fence.proxy.async.shared::cta;", ["proxy-fence"]),
    ):
        code = body.format(mine=mine, theirs=theirs)
        assert found(code, ctas=2, schedule=schedule) == problem


# -- who spins, and who is there


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_all_who_spin_are_noticed(schedule):
    """The last CTA waits for one that does not come."""
    body = ACQUIRE.replace("%r3, %r2;", "%r3, %r8;") + RELEASE
    wrong = "add.u32 %r8, %r2, 1;" + body
    _, _, result = run(wrong, schedule=schedule)
    (finding,) = result.findings
    assert finding.kind.value == "deadlock"
    assert "byte 0 of input 0 to change, where 0 is" in finding.message
    assert finding.message.count("ld.acquire.gpu.global.b32 waits for") == CTAS
    assert "block (3, 0, 0), cta 0 warp 0 at PTX line" in finding.message
    assert result.steps < 10_000


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_a_chain_needs_its_ctas_to_be_there(schedule):
    """Each waits for the next one: a wave that is too small never ends."""
    backwards = "sub.u32 %r8, 3, %r2;" + ACQUIRE.replace("%r3, %r2;", "%r3, %r8;")
    body = backwards + WORK + RELEASE
    for resident in (None, CTAS, CTAS + 1):
        assert found(body, schedule=schedule, resident=resident) == []
    for resident in (1, 2, 3):
        _, _, result = run(body, schedule=schedule, resident=resident)
        (finding,) = result.findings
        assert finding.kind.value == "deadlock"
        told = (
            f"{resident} of 4 clusters are there and {CTAS - resident} wait for a place"
        )
        assert told in finding.message
    # In the order of their numbers any wave is large enough.
    for resident in (1, 2, 3):
        assert (
            found(ACQUIRE + WORK + RELEASE, schedule=schedule, resident=resident) == []
        )


@pytest.mark.parametrize(
    "write",
    [
        "red.release.gpu.global.add.u32 [%rd7], 1;",
        "st.release.gpu.global.b32 [%rd7], 1;",
        "st.global.b32 [%rd7], 1;",
    ],
)
def test_who_spins_goes_on_when_the_word_changes(write):
    """And not when all others have nothing else to do."""
    body = f"""
@%p1 bra END; mov.b32 %r9, 0; setp.eq.u32 %p3, %r2, 0; @%p3 bra WAITS;
{write} LONG: add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 30000; @%p2 bra LONG; bra TICKET;
WAITS: ld.acquire.gpu.global.b32 %r3, [%rd7]; setp.ne.u32 %p2, %r3, 1; @%p2 bra WAITS;
TICKET: atom.global.add.u32 %r20, [%rd7+4], 1; mul.wide.u32 %rd8, %r2, 4;
add.s64 %rd8, %rd1, %rd8; st.global.b32 [%rd8], %r20; END:"""
    out, _, _ = run(body, ctas=2)
    assert out[:2].tolist() == [0, 1]


def test_a_word_that_never_changes_may_be_loaded_again_and_again():
    """Work that looks at a word each time is no spin: what it computes changes."""
    body = """
mov.b32 %r20, 0; AGAIN: ld.relaxed.gpu.global.b32 %r3, [%rd7]; add.u32 %r20, %r20, 1;
setp.lt.u32 %p2, %r20, 300; @%p2 bra AGAIN; st.global.b32 [%rd2], %r20;"""
    for schedule in SOME:
        out, _, result = run(body, ctas=1, schedule=schedule)
        assert result.findings == () and (out == 300).all()


def test_who_counts_while_it_spins_is_noticed_in_the_end(monkeypatch):
    monkeypatch.setattr(together, "MOST_POLLS", 50)
    body = """
mov.b32 %r20, 0; AGAIN: ld.acquire.gpu.global.b32 %r3, [%rd7]; add.u32 %r20, %r20, 1;
setp.ne.u32 %p2, %r3, 1; @%p2 bra AGAIN;"""
    for schedule in SOME:
        _, _, result = run(body, ctas=2, schedule=schedule)
        assert kinds(result) == ["deadlock"] and result.steps < 100_000


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_late_copies_arrive_though_somebody_spins(schedule):
    """CTA 1 spins; CTA 0 waits for a load before it releases."""
    body = """
setp.eq.u32 %p3, %r2, 1; @%p3 bra READER; @%p1 bra END;
mbarrier.init.shared.b64 [%r30], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [%r30], 512;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r30+1024], [%rd1], 512, [%r30];
MORE: mbarrier.try_wait.parity.shared.b64 %p2, [%r30], 0; @!%p2 bra MORE;
st.release.gpu.global.b32 [%rd7], 1; bra END;
READER: @%p1 bra END;
SPIN: ld.acquire.gpu.global.b32 %r3, [%rd7]; setp.ne.u32 %p2, %r3, 1; @%p2 bra SPIN; END:"""
    for resident in (None, 2):
        assert found(body, ctas=2, schedule=schedule, resident=resident) == []
    # Behind a CTA that spins there is no place for the one that would end it.
    first = body.replace("setp.eq.u32 %p3, %r2, 1;", "setp.eq.u32 %p3, %r2, 0;")
    assert found(first, ctas=2, schedule=schedule) == []
    assert found(first, ctas=2, schedule=schedule, resident=1) == ["deadlock"]


def test_warps_of_one_cta_may_wait_for_each_other_as_well():
    body = """
setp.gt.u32 %p3, %r1, 31; @%p3 bra OTHERS; st.global.b32 [%rd2], %r1; bar.warp.sync -1;
@%p1 bra END; st.release.gpu.global.b32 [%rd7], 1; bra END;
OTHERS: and.b32 %r8, %r1, 31; mul.wide.u32 %rd8, %r8, 4; add.s64 %rd8, %rd1, %rd8;
SPIN: ld.{order}.gpu.global.b32 %r3, [%rd7]; setp.ne.u32 %p2, %r3, 1; @%p2 bra SPIN;
ld.global.b32 %r20, [%rd8]; END:"""
    for schedule in EVERY:
        right, wrong = body.format(order="acquire"), body.format(order="relaxed")
        assert found(right, ctas=1, schedule=schedule) == []
        assert found(wrong, ctas=1, schedule=schedule) == ["race"]
        assert found(
            right.replace("bar.warp.sync -1;", ""), ctas=1, schedule=schedule
        ) == ["race"]


def test_others_may_run_between_two_atomic_accesses():
    """Though nothing lies between them in the code."""
    seeds = [Schedule(seed, Order.RANDOM) for seed in range(40)]
    tickets = """@%p1 bra END; atom.global.add.u32 %r3, [%rd7], 1;
atom.global.add.u32 %r4, [%rd7], 1; sub.u32 %r4, %r4, %r3; mul.wide.u32 %rd8, %r2, 4;
add.s64 %rd8, %rd1, %rd8; st.global.b32 [%rd8], %r4; END:"""
    apart = {
        tuple(run(tickets, ctas=2, schedule=seed, resident=2)[0][:2].tolist())
        for seed in seeds
    }
    assert (1, 1) in apart and len(apart) > 1
    stores = """@%p1 bra END; setp.eq.u32 %p3, %r2, 0; @%p3 bra READS;
st.relaxed.gpu.global.b32 [%rd7], 1; st.relaxed.gpu.global.b32 [%rd7], 2; bra END;
READS: ld.relaxed.gpu.global.b32 %r3, [%rd7]; st.global.b32 [%rd1], %r3; END:"""
    seen = {int(run(stores, ctas=2, schedule=seed)[0][0]) for seed in seeds}
    assert seen == {0, 1, 2}


def test_tickets_hand_out_work():
    """A CTA takes tiles until there are none; each is done once, by whom the schedule says."""
    body = """
NEXT: @%p1 bra WAIT; atom.global.add.u32 %r3, [%rd7], 1; st.shared.b32 [%r30], %r3;
WAIT: bar.sync 0; ld.shared.b32 %r3, [%r30]; bar.sync 0; setp.gt.u32 %p2, %r3, 9; @%p2 bra END;
mul.wide.u32 %rd8, %r3, 512; add.s64 %rd8, %rd2, %rd8; st.global.b32 [%rd8], %r2; bra NEXT; END:"""
    owners = set()
    for schedule in EVERY:
        out = np.full(10 * LANES, 99, np.uint32)
        _, flags, result = run(body, out=out, schedule=schedule, resident=CTAS)
        assert result.findings == () and flags[0] == 10 + CTAS
        rows = out.reshape(10, LANES)
        assert (rows == rows[:, :1]).all() and (rows < CTAS).all()
        owners.add(rows[:, 0].tobytes())
    assert len(owners) > 1


@pytest.mark.parametrize(
    "instruction",
    [
        "ld.acquire.cta.global.b32 %r3, [%rd7];",
        "ld.acquire.gpu.shared.b32 %r3, [%r30];",
        "ld.acquire.gpu.b32 %r3, [%rd7];",
        "ld.acquire.gpu.global.b16 %rs3, [%rd7];",
        "ld.relaxed.gpu.global.v2.b32 {%r3, %r4}, [%rd7];",
        "st.release.cluster.global.b32 [%rd7], %r1;",
        "fence.acq_rel.cta;",
        "fence.acq_rel.cluster;",
        "membar.cta;",
    ],
)
def test_what_is_refused(instruction):
    with pytest.raises(UnsupportedInstruction):
        run(instruction, ctas=1)
