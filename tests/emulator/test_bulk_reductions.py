# SPDX-License-Identifier: Apache-2.0
"""Bulk reductions: what they add, when, in which order, and who knows of it."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator import ptx
from fmha_gen.emulator.emitters import UnsupportedInstruction
from fmha_gen.emulator.lanes import LANES
from fmha_gen.emulator.launch import Launch
from fmha_gen.emulator.scheduler import Completion, Order, Schedule
from fmha_gen.emulator.walk import Extent, prepare, walk

from .kernels import OUT, execute, kinds, tensor_map, text

RNG = np.random.default_rng(9)
NUMBERS = (RNG.standard_normal(LANES) * 10.0 ** RNG.integers(-3, 4, LANES)).astype("f4")
EVERY = [
    Schedule(seed, order, completion)
    for seed, (order, completion) in enumerate(
        (order, completion) for order in Order for completion in Completion
    )
]
LATE = Schedule(3, Order.ROUND_ROBIN, Completion.LATE)
MAP = (tensor_map(OUT, (16, 8), (16, 8)),)  # its type is u32; see `floats`

# Each thread stores its number; one thread of warp 0 adds all of them to `out`.
FILL = """
mov.b32 %r30, smem; shl.b32 %r31, %r1, 2; add.s32 %r31, %r31, %r30;
setp.ne.u32 %p1, %r1, 0; setp.eq.u32 %p3, %r1, 32;
st.shared.b32 [%r31], %r10;
"""
FENCE, SYNC = "fence.proxy.async.shared::cta;", "bar.sync 0;"
RUN = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r30], 512;"
BOX = (
    "mov.b64 %rd5, k_param_2; cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile"
    ".bulk_group [%rd5, {0, 0}], [%r30];"
)
COMMIT = "cp.async.bulk.commit_group;"
READ, WAIT = "cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group 0;"


def floats(raw: bytes) -> bytes:
    """A tensor map with the type f32 in place of u32."""
    words = np.frombuffer(raw, np.uint32).copy()
    words[2] ^= (2 ^ 7) << 7
    return words.tobytes()


def body(
    add: str = RUN, *, fence: str = FENCE, waits: str = WAIT, after: str = ""
) -> str:
    elected = f"@%p1 bra DONE; {add} {COMMIT} {waits} DONE:"
    return f"{FILL} {fence} {SYNC} {elected} {after}"


def run(code: str, *, out: np.ndarray | None = None, **options):
    """The output and the result."""
    out = np.zeros(LANES, np.float32) if out is None else out
    options.setdefault("maps", tuple(map(floats, MAP)))
    _, result = execute(code, NUMBERS.copy(), out=out, **options)
    return out, result


def found(code: str, **options) -> list[str]:
    return kinds(run(code, **options)[1])


# -- what is added


@pytest.mark.parametrize("schedule", EVERY, ids=str)
@pytest.mark.parametrize("waits", [READ, WAIT])
@pytest.mark.parametrize(
    "add",
    [
        RUN,
        RUN.replace("bulk_group.", "bulk_group.L2::cache_hint.").replace(
            "512;", "512, %rd9;"
        ),
        BOX,
        BOX.replace("bulk_group ", "bulk_group.L2::cache_hint ").replace(
            "[%r30];", "[%r30], %rd9;"
        ),
    ],
)
def test_all_of_it_is_added_by_the_end(add, waits, schedule):
    before = RNG.standard_normal(LANES).astype(np.float32)
    out, result = run(body(add, waits=waits), out=before.copy(), schedule=schedule)
    assert result.findings == ()
    np.testing.assert_array_equal(out, before + NUMBERS)


@pytest.mark.parametrize("rank", range(1, 6))
def test_boxes_of_each_rank(rank):
    """128 elements in one corner of a tensor; out of bounds nothing is added."""
    dims, box = (16, 3, 2, 2, 2)[:rank], (16, 2, 2, 2, 1)[:rank]
    corner = (0, 2, 1, 0, 1)[:rank]
    maps = (floats(tensor_map(OUT, dims, box)),)
    count, size = int(np.prod(box)), int(np.prod(dims))
    where = ", ".join(map(str, corner))
    add = BOX.replace(".2d.", f".{rank}d.").replace("{0, 0}", f"{{{where}}}")
    out, result = run(body(add), out=np.zeros(size, np.float32), maps=maps)
    # What of the box is beyond the end of a dimension is dropped.
    expected = np.zeros(dims[::-1], np.float32)
    given = np.resize(NUMBERS, count).reshape(box[::-1])
    inside = [min(b, d - c) for b, d, c in zip(box, dims, corner, strict=True)][::-1]
    target = tuple(slice(c, c + n) for c, n in zip(corner[::-1], inside, strict=True))
    expected[target] = given[tuple(slice(n) for n in inside)]
    np.testing.assert_array_equal(out.reshape(dims[::-1]), expected)
    assert result.findings == ()


def test_boxes_under_a_swizzle():
    """Rows of 128 bytes, of which shared memory has the chunks in another order."""
    maps = (floats(tensor_map(OUT, (32, 4), (32, 4), swizzle=3)),)
    out, result = run(body(BOX), maps=maps)
    assert result.findings == ()
    rows = NUMBERS.reshape(4, 8, 4)
    expected = [rows[row][np.arange(8) ^ row] for row in range(4)]
    np.testing.assert_array_equal(out, np.concatenate(expected).reshape(-1))


def test_tensors_of_other_types():
    assert found(body(BOX), maps=MAP) == ["tma"]


@pytest.mark.parametrize(
    ("add", "problem", "message"),
    [
        (RUN.replace("512", "520"), "misaligned", "a size that is not a multiple"),
        (RUN.replace("[%rd1]", "[%rd1+8]"), "misaligned", "not aligned to 16 bytes"),
        (RUN.replace("[%r30]", "[%r30+8]"), "misaligned", "not aligned to 16 bytes"),
        (RUN.replace("512", "528"), "out-of-bounds", "end of out"),
        (BOX.replace("{0, 0}", "{0, -1}"), "out-of-bounds", "negative coordinates"),
        (BOX.replace("{0, 0}", "{0, 8}"), "out-of-bounds", "wholly outside"),
    ],
)
def test_what_is_wrong_is_found(add, problem, message):
    _, result = run(body(add))
    assert result.findings[0].kind.value == problem
    assert message in result.findings[0].message


def test_who_does_not_elect_adds_several_times():
    """A tensor's reduction is issued once per warp, as a store is; the other by each lane."""
    every = body().replace("@%p1 bra DONE", "setp.gt.u32 %p4, %r1, 31; @%p4 bra DONE")
    (finding,) = run(every)[1].findings
    assert "several lanes of the warp issue the same reduction" in finding.message
    boxes = body(BOX).replace(
        "@%p1 bra DONE", "setp.gt.u32 %p4, %r1, 31; @%p4 bra DONE"
    )
    out, result = run(boxes)
    assert result.findings == () and result.statistics["tensor reductions"] == 1
    np.testing.assert_array_equal(out, NUMBERS)


@pytest.mark.parametrize(
    "instruction",
    [
        RUN.replace(".add.f32", ".add.u32"),
        RUN.replace(".add.f32", ".add.noftz.bf16"),
        RUN.replace(".add.", ".max."),
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        ".add.u32 [%r1], [%r2], 16, [%r3];",
        BOX.replace(".add.", ".min."),
        BOX.replace(".tile.", ".im2col_no_offs."),
    ],
)
def test_what_is_refused(instruction):
    with pytest.raises(UnsupportedInstruction):
        run(instruction)


# -- when


def test_it_is_added_when_the_schedule_says_so():
    """A thread that polls without order sees nothing, a part or all of it; who waits sees all."""
    look = "ld.global.b32 %r20, [%rd2]; st.global.b32 [%rd2+512], %r20;"
    seen = {}
    for schedule in EVERY:
        for waits in (READ, WAIT):
            code = body(waits=waits, after=f"{SYNC} {look}")
            out = np.zeros(2 * LANES, np.float32)
            run(code, out=out, schedule=schedule, checks=False)
            np.testing.assert_array_equal(out[:LANES], NUMBERS)
            seen[schedule, waits] = int((out[LANES:] == NUMBERS).sum())
    assert all(seen[schedule, WAIT] == LANES for schedule in EVERY)
    orderly = {
        x.completion: seen[x, READ] for x in EVERY if x.order is Order.ROUND_ROBIN
    }
    assert orderly[Completion.EAGER] == LANES and orderly[Completion.LATE] == 0
    counts, runs = set(), set()
    code = body(waits=READ, after=f"{SYNC} {look} {SYNC} {look}")
    for seed in range(60):
        schedule = Schedule(seed, Order.RANDOM, Completion.RANDOM)
        out = np.zeros(2 * LANES, np.float32)
        there = run(code, out=out, schedule=schedule, checks=False)[0][LANES:] != 0
        counts.add(int(there.sum()))
        runs.add(int(np.diff(there).sum()))
    assert counts & {0, LANES} and counts - {0, LANES}  # parts of it, too,
    assert max(runs) > 20  # of elements here and there


def test_sums_of_several_ctas_depend_on_the_schedule():
    """Element by element: no order of whole CTAs gives all of them."""
    scaled = """mov.u32 %r40, %ctaid.x; cvt.rn.f32.u32 %r41, %r40;
fma.rn.f32 %r10, %r41, 0f3E9D70A4, %r10;"""

    def total(schedule: Schedule, waits: str = READ) -> np.ndarray:
        code = body(waits=waits).replace(FILL, scaled + FILL)
        out, result = run(code, schedule=schedule, grid=5)
        assert result.findings == ()
        return out

    orderly = total(Schedule())
    parts = [
        (np.float64(np.float32(n) * np.float64(np.float32(0.3075))) + NUMBERS).astype(
            "f4"
        )
        for n in range(5)
    ]
    sums = np.zeros(LANES, np.float32)
    for part in parts:
        sums = sums + part
    np.testing.assert_allclose(orderly, sums, rtol=1e-5, atol=1e-6)
    different = [
        total(Schedule(seed, order, completion))
        for seed, order, completion in (
            (1, Order.ROUND_ROBIN, Completion.LATE),
            (2, Order.RANDOM_WARPS, Completion.LATE),
            (3, Order.RANDOM_WARPS, Completion.RANDOM),
            (4, Order.STARVATION, Completion.RANDOM),
        )
    ]
    for each in different:
        assert (each != orderly).any()
        np.testing.assert_allclose(each, sums, rtol=1e-4, atol=1e-5)
    assert len({each.tobytes() for each in different}) == len(different)
    again = total(Schedule(3, Order.RANDOM_WARPS, Completion.RANDOM))
    assert again.tobytes() == different[2].tobytes()
    # Whole CTAs in another order, when each waits for its additions.
    waited = {total(Schedule(seed, Order.RANDOM), WAIT).tobytes() for seed in range(6)}
    assert len(waited) > 1


# -- shared memory


@pytest.mark.parametrize("schedule", EVERY, ids=str)
@pytest.mark.parametrize("add", [RUN, BOX])
def test_what_it_reads_is_fenced(add, schedule):
    def seen(**changes) -> list[str]:
        return found(body(add, **changes), schedule=schedule)

    assert seen() == []
    assert seen(fence="") == ["proxy-fence"]
    assert seen(fence="fence.proxy.async.global;") == ["proxy-fence"]
    # The fence of who issues it does, too, and one before the writes does not.
    own = body(add).replace(f"{FENCE} {SYNC}", f"{SYNC} {FENCE}")
    assert found(own, schedule=schedule) == []
    assert found(FENCE + body(add, fence=""), schedule=schedule) == ["proxy-fence"]


@pytest.mark.parametrize("schedule", EVERY, ids=str)
@pytest.mark.parametrize("waits", [READ, WAIT])
def test_its_source_is_written_again_when_it_has_read(waits, schedule):
    again = f"{SYNC} st.shared.b32 [%r31], 0;"
    out, result = run(body(waits=waits, after=again), schedule=schedule)
    assert result.findings == ()
    np.testing.assert_array_equal(out, NUMBERS)
    # Before the wait, or by a wait for another group, it is a race.
    early = body(waits="", after=f"{again} @%p1 bra END; {waits} END:")
    assert found(early, schedule=schedule) == ["race"]
    other = body(waits=waits.replace("0", "1"), after=again)
    assert set(found(other, schedule=schedule)) & {"race", "outstanding"}


def test_it_must_be_waited_for():
    assert found(body(waits="")) == ["outstanding"]
    assert found(body(waits=READ)) == found(body()) == []
    # Of two groups the second one is not.
    twice = f"{COMMIT} {RUN}"
    assert found(body(f"{RUN} {twice}", waits=READ)) == []
    assert found(body(f"{RUN} {twice}", waits=READ.replace("0", "1"))) == [
        "outstanding"
    ]


# -- global memory


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_who_knows_of_what_was_added(schedule):
    def seen(after: str, waits: str = WAIT) -> list[str]:
        code = body(waits=waits, after=after)
        return found(code, schedule=schedule)

    read, write = "ld.global.b32 %r20, [%rd2];", "st.global.b32 [%rd2], 0;"
    add = "red.global.add.f32 [%rd2], %r10;"
    for access in (read, write):
        assert seen(f"{SYNC} {access}") == []
        assert seen(access) == ["race"]
        assert seen(f"{SYNC} {access}", READ) == ["race"]
    # Additions meet in any order, unless sums are ordered.
    assert seen(add) == seen(add, READ) == []

    def in_turn(after: str, waits: str = WAIT) -> list[str]:
        code = body(waits=waits, after=after)
        return found(code, schedule=schedule, ordered_sums=True)

    assert in_turn(f"{SYNC} {add}") == []
    assert in_turn(add) == in_turn(f"{SYNC} {add}", READ) == ["sum-order"]

    # Zeros that are written first, and in no order.
    def zeroed(fence: str) -> list[str]:
        code = body().replace(SYNC, f"{write} {fence} {SYNC}", 1)
        return found(code, schedule=schedule, uninitialised=True)

    assert zeroed("fence.proxy.async.global;") == zeroed("fence.proxy.async;") == []
    assert zeroed("") == zeroed(FENCE) == ["proxy-fence"]
    # The fences of some threads fence nothing of what others write.
    apart = """setp.lt.u32 %p5, %r1, 16; @%p5 fence.proxy.async.shared::cta;
@!%p5 fence.proxy.async.global;"""
    assert zeroed(apart) == ["proxy-fence"]
    astray = body().replace(SYNC, f"{SYNC} {write}", 1)
    assert found(astray, schedule=schedule) == ["race"]


def test_a_full_wait_after_one_for_reads():
    """Groups that have read are still waited for until they have written."""
    read = f"{SYNC} ld.global.b32 %r20, [%rd2];"
    for schedule in EVERY:
        assert found(body(waits=f"{READ} {WAIT}", after=read), schedule=schedule) == []
        # One group may be in flight: it is this one.
        most = f"{READ} {WAIT.replace('0', '1')}"
        assert found(body(waits=most, after=read), schedule=schedule) == ["race"]
        # But not when another one was committed later.
        second = f"{COMMIT} {most}"
        assert found(body(waits=second, after=read), schedule=schedule) == []


def test_a_wait_by_another_lane_waits_for_nothing():
    """Groups are those of the thread that committed them."""
    other = f"DONE: setp.ne.u32 %p5, %r1, 1; @%p5 bra END; {WAIT} END: {SYNC} "
    code = body(waits="").replace("DONE:", other + "ld.global.b32 %r20, [%rd2];")
    assert set(found(code)) == {"race", "outstanding"}


def test_an_addition_without_zeros():
    assert found(body(), uninitialised=True) == ["read-before-write"]


def test_stores_and_reductions_of_one_thread_wait_for_each_other():
    """The first one stores, the next ones add: behind a wait for the write."""
    store = BOX.replace("cp.reduce.", "cp.").replace(".add.tile", ".tile")
    for waits, problem in ((WAIT, []), (READ, ["race"]), ("", ["race"])):
        add = f"{store} {COMMIT} {waits} {BOX}"
        assert found(body(add), uninitialised=True) == problem
        again = f"{store} {COMMIT} {waits} {store}"
        assert found(body(again), uninitialised=True) == problem


def test_a_walk_writes_additions_down():
    launch = Launch(
        "k", (1, 1, 1), (128, 1, 1), (1, 1, 1), 16384, OUT.to_bytes(8, "little")
    )
    code = body().replace("%r10", "%r1").replace(FILL, FILL.replace("%r10", "%r1"))
    seen = walk(
        prepare(ptx.parse(text(code))),
        launch,
        [Extent("out", OUT, (4, 32), (128, 4), 4)],
    )
    assert seen.findings == () and seen.stores == {}
    boxes = seen.additions["out"]
    assert boxes.begin.tolist() == [[row, 0] for row in range(4)]
    assert boxes.end.tolist() == [[row + 1, 32] for row in range(4)]
