# SPDX-License-Identifier: Apache-2.0
"""red and atom on global memory: what they add, and what they race with."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator.additions import add
from fmha_gen.emulator.emitters import UnsupportedInstruction
from fmha_gen.emulator.lanes import LANES
from fmha_gen.emulator.scheduler import Order, Schedule

from .kernels import FIRST_INPUT, execute, kinds, value

RNG = np.random.default_rng(6)
FLOATS = RNG.standard_normal(LANES).astype(np.float32)
WORDS = RNG.integers(0, 1 << 32, LANES, dtype=np.uint32)
RANDOM = [Schedule(seed, Order.RANDOM) for seed in range(8)]


def ran(body: str, *inputs: np.ndarray, out: np.ndarray, **options) -> np.ndarray:
    """The output after a body that finds nothing."""
    _, result = execute(body, *inputs, out=out, **options)
    assert result.findings == ()
    return out


# -- what is added


@pytest.mark.parametrize(
    "opcode",
    [
        "red.relaxed.gpu.global.add.f32",
        "red.global.add.f32",
        "red.release.sys.global.add.f32",
        "atom.global.add.f32 %r20,",
    ],
)
def test_a_float_is_added(opcode):
    before = RNG.standard_normal(LANES).astype(np.float32)
    out = ran(f"{opcode} [%rd2], %r10;", FLOATS.copy(), out=before.copy())
    np.testing.assert_array_equal(out, before + FLOATS)


@pytest.mark.parametrize(
    "opcode",
    [
        "red.relaxed.gpu.global.add.s32",
        "red.release.gpu.global.add.u32",
        "atom.global.acq_rel.add.u32 %r20,",
        "atom.acquire.gpu.global.add.s32 %r20,",
        "atom.release.gpu.global.add.u32 %r20,",
        "atom.relaxed.sys.global.add.u32 _,",
    ],
)
def test_an_integer_is_added(opcode):
    before = WORDS[::-1].copy()
    out = ran(f"{opcode} [%rd2], %r10;", WORDS.copy(), out=before.copy())
    np.testing.assert_array_equal(out, before + WORDS)
    out = ran(f"{opcode} [%rd2], -3;", out=before.copy())
    np.testing.assert_array_equal(out, before - np.uint32(3))


def test_integers_of_64_bits_are_added():
    wide = RNG.integers(0, 1 << 63, LANES, dtype=np.uint64)
    out = np.full(LANES, np.uint64(1 << 63))
    ran("red.global.add.u64 [%rd2], %rd10;", wide, out=out, width=8)
    np.testing.assert_array_equal(out, wide + np.uint64(1 << 63))


@pytest.mark.parametrize(
    ("opcode", "count"),
    [
        ("red.relaxed.gpu.global.add.v4.f32", 4),
        ("red.relaxed.gpu.global.add.v2.f32", 2),
        ("red.relaxed.gpu.global.add.L2::cache_hint.v4.f32", 4),
    ],
)
def test_vectors_are_added_element_by_element(opcode, count):
    """Of a, b, a, b; all but the last 28 threads take part."""
    hint = ", %rd9" if "hint" in opcode else ""
    given = "{%r10, %r11, %r10, %r11}" if count == 4 else "{%r10, %r11}"
    body = f"""setp.lt.u32 %p1, %r1, 100; mul.wide.u32 %rd6, %r1, {4 * count};
add.s64 %rd6, %rd1, %rd6; @%p1 {opcode} [%rd6], {given}{hint};"""
    before = RNG.standard_normal((LANES, count)).astype(np.float32)
    out = ran(body, FLOATS.copy(), FLOATS[::-1].copy(), out=before.copy())
    pairs = np.stack([FLOATS, FLOATS[::-1]], axis=1)
    pairs[100:] = 0
    np.testing.assert_array_equal(out, before + np.tile(pairs, (1, count // 2)))


def test_pairs_of_fp16_are_added_and_keep_subnormals():
    opcode = "red.relaxed.gpu.global.add.noftz.v4.f16x2"
    body = f"""mul.wide.u32 %rd6, %r1, 16; add.s64 %rd6, %rd1, %rd6;
{opcode} [%rd6], {{%r10, %r11, %r10, %r11}};"""
    sizes = 2.0 ** RNG.integers(-24, 6, (2, LANES, 2))
    given = (RNG.standard_normal((2, LANES, 2)) * sizes).astype(np.float16)
    before = (RNG.standard_normal((LANES, 8)) * 2.0**-12).astype(np.float16)
    inputs = [x.reshape(-1).view(np.uint32) for x in given]
    out = ran(body, *inputs, out=before.view(np.uint32).copy()).view(np.float16)
    added = np.concatenate([given[0], given[1]] * 2, axis=1)
    np.testing.assert_array_equal(out.reshape(LANES, 8), before + added)
    assert (np.abs(out[out != 0]) < 2.0**-14).any()  # subnormals among them


@pytest.mark.parametrize(
    "opcode",
    ["red.relaxed.gpu.global.add.f16x2", "red.relaxed.gpu.global.add.noftz.f32"],
)
def test_which_additions_keep_subnormals_is_said(opcode):
    with pytest.raises(UnsupportedInstruction, match="subnormals"):
        execute(f"{opcode} [%rd1], %r1;")


def test_a_vector_has_to_be_aligned():
    body = "red.relaxed.gpu.global.add.v4.f32 [%rd1+8], {%r1, %r1, %r1, %r1};"
    assert kinds(execute(body)[1]) == ["misaligned"]
    body = body.replace("+8", "+512")
    assert kinds(execute(body)[1]) == ["out-of-bounds"]


def test_inputs_are_not_added_to():
    body = f"mov.b64 %rd6, {FIRST_INPUT}; red.global.add.f32 [%rd6], %r1;"
    data = np.zeros(4, np.float32)
    assert kinds(execute(body, data)[1]) == []
    assert kinds(execute(body, data, read_only=True)[1]) == ["out-of-bounds"]


def test_each_thread_adds_to_one_word_and_gets_what_was_there():
    """Its ticket: every number once, in an order that a schedule draws."""
    body = "atom.relaxed.gpu.global.add.u32 %r20, [%rd1+512], 1; st.global.b32 [%rd2], %r20;"
    tickets = []
    for schedule in (Schedule(), *RANDOM):
        out = ran(body, out=np.zeros(LANES + 1, np.uint32), schedule=schedule)
        assert out[LANES] == LANES
        assert sorted(out[:LANES].tolist()) == list(range(LANES))
        tickets.append(out[:LANES].tolist())
    assert tickets[0] == list(range(LANES))
    assert len(set(map(tuple, tickets))) == len(tickets)


def test_sums_depend_on_the_order_that_a_schedule_draws():
    """128 numbers of all sizes: bitwise the same only under the same schedule."""
    body = "red.relaxed.gpu.global.add.f32 [%rd1], %r10;"
    numbers = (FLOATS * 10.0 ** RNG.integers(-3, 4, LANES)).astype(np.float32)

    def total(schedule: Schedule) -> float:
        out = np.zeros(1, np.float32)
        return float(ran(body, numbers.copy(), out=out, schedule=schedule)[0])

    in_order = np.float32(0)
    for number in numbers:
        in_order += number
    assert total(Schedule()) == in_order
    sums = [total(schedule) for schedule in RANDOM]
    assert sums == [total(schedule) for schedule in RANDOM]
    assert len(set(sums)) > 3
    np.testing.assert_allclose(sums, numbers.astype(np.float64).sum(), rtol=1e-4)


def test_additions_of_floats_flush():
    """Subnormal numbers are zeros of their sign: given, in memory and as sums."""
    tiny = np.float32(1e-40)
    words = np.array([tiny, -tiny, 0, 1, 2e-38, np.nan], np.float32)
    given = np.array([0, -0.0, tiny, tiny, -1.5e-38, 1], np.float32)
    found = add(words, np.arange(6), given)
    assert found[0] == tiny and found[1] == -tiny
    np.testing.assert_array_equal(words, np.float32([0, -0.0, 0, 1, 0, np.nan]))
    assert np.signbit(words[1]) and not np.signbit(words[2])


def test_several_additions_to_one_word_are_one_after_another():
    words = np.float32([1e8, 0])
    places, given = np.array([0, 1, 0, 0]), np.float32([5, 7, -1e8, 3])
    found = add(words, places, given)
    first = np.float32(1e8) + np.float32(5)
    assert found.tolist() == [1e8, 0, first, first - np.float32(1e8)]
    assert words.tolist() == [first - np.float32(1e8) + np.float32(3), 7]


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("red.relaxed.gpu.shared.add.f32 [%r1], %r1;", ".shared"),
        ("red.relaxed.cta.global.add.f32 [%rd1], %r1;", ".cta"),
        ("red.relaxed.gpu.add.f32 [%rd1], %r1;", "no addition to .global"),
        ("red.global.add.v4.u32 [%rd1], {%r1, %r1, %r1, %r1};", "4 values"),
        ("red.global.add.v4.f32 [%rd1], {%r1, %r1};", "2 values"),
        ("red.global.max.u32 [%rd1], %r1;", ".max"),
        ("atom.global.cas.b32 %r2, [%rd1], %r1, %r1;", ".cas"),
        ("red.global.add.f32 [%rd1], %r1, %rd9;", "its operands"),
        ("red.acquire.gpu.global.add.u32 [%rd1], %r1;", ".acquire"),
    ],
)
def test_what_is_refused(instruction, message):
    with pytest.raises(UnsupportedInstruction, match=message):
        execute(instruction)


# -- races

ADD = "red.relaxed.gpu.global.add.f32 [{}], %r10;"
OWN, FIRST_WARP = ADD.format("%rd2"), ADD.format("%rd6")
LANE = """
and.b32 %r40, %r1, 31; mul.wide.u32 %rd6, %r40, 4; add.s64 %rd6, %rd1, %rd6;
setp.gt.u32 %p2, %r1, 31; setp.eq.u32 %p3, %r1, 32;
"""  # %rd6: the place of the lane in warp 0, %p2: not of warp 0


def found(body: str, **options) -> list[str]:
    out = options.pop("out", np.zeros(LANES, np.float32))
    return kinds(execute(LANE + body, FLOATS.copy(), out=out, **options)[1])


@pytest.mark.parametrize("schedule", (Schedule(), *RANDOM[:3]), ids=str)
def test_additions_meet_and_others_wait(schedule):
    def seen(body: str) -> list[str]:
        return found(body, schedule=schedule)

    write, read, sync = (
        "@%p3 st.global.b32 [%rd1], 5;",
        "@%p2 ld.global.b32 %r20, [%rd6];",
        "bar.sync 0;",
    )
    assert seen(FIRST_WARP + FIRST_WARP) == seen(OWN + FIRST_WARP) == []
    for other in (write, read):
        assert seen(FIRST_WARP + other) == ["race"]
        assert seen(other + FIRST_WARP) == ["race"]
        assert seen(FIRST_WARP + sync + other) == []
        assert seen(other + sync + FIRST_WARP) == []


@pytest.mark.parametrize("schedule", (Schedule(), *RANDOM[:3]), ids=str)
def test_where_sums_are_ordered_additions_of_floats_wait_too(schedule):
    def seen(body: str, ordered: bool = True) -> list[str]:
        return found(body, schedule=schedule, ordered_sums=ordered)

    mine, sync = f"@!%p2 {FIRST_WARP}", "bar.sync 0;"
    second = f"shr.u32 %r41, %r1, 5; setp.eq.u32 %p4, %r41, 1; @%p4 {FIRST_WARP}"
    for unordered in (FIRST_WARP, mine + second, second + mine, OWN + second):
        assert seen(unordered) == ["sum-order"]
        assert seen(unordered, ordered=False) == []
        assert seen(unordered.replace("add.f32", "add.u32")) == []
        assert seen(unordered.replace("add.f32", "add.noftz.f16x2")) == ["sum-order"]
    for ordered in (OWN, OWN + OWN, mine + sync + second, second + sync + mine):
        assert seen(ordered) == []
    # Lanes of one instruction have no order either.
    assert seen(ADD.format("%rd1")) == seen(f"@!%p2 {ADD.format('%rd1')}")
    assert seen(f"@!%p2 {ADD.format('%rd1')}") == ["sum-order"]


def test_who_reads_a_sum_must_know_of_each_addition():
    """All warps add; then a reader waits for some of them. Only the last addition is not enough."""
    add = f"{FIRST_WARP} setp.lt.u32 %p4, %r1, 64; setp.eq.u32 %p5, %r1, 127;"
    read = "@%p5 ld.global.b32 %r20, [%rd1];"
    assert found(f"{add} bar.sync 0; {read}") == []
    # Warps 2 and 3 meet, warps 0 and 1 added before or after them.
    assert found(f"{add} @%p4 bra DONE; bar.sync 1, 64; {read} DONE:") == ["race"]
    assert (
        found(f"{add} @%p4 bra DONE; bar.sync 1, 64; {read} DONE:", checks=False) == []
    )


def test_a_reader_in_another_cluster_races():
    body = f"""mov.u32 %r41, %ctaid.x; setp.eq.u32 %p4, %r41, 0; setp.eq.u32 %p5, %r41, {{}};
@%p4 {OWN} @%p5 ld.global.b32 %r20, [%rd2];"""
    assert found(body.format(1), grid=2) == ["race"]
    assert found(body.format(0), grid=2) == []
    assert found(OWN, grid=2) == []


def test_an_addition_to_what_nobody_wrote():
    """A workspace that is not zeroed, or by another warp in no order."""
    zero = "st.global.b32 [%rd2], 0;"
    assert found(OWN, uninitialised=True) == ["read-before-write"]
    assert found(zero + OWN, uninitialised=True) == []
    assert found(f"{zero} bar.sync 0; {FIRST_WARP}", uninitialised=True) == []
    # The first one to add, warp 0, knows of what it wrote. The others do not.
    assert found(zero + FIRST_WARP, uninitialised=True) == ["race"]


def test_a_race_names_both():
    out = np.zeros(LANES, np.float32)
    body = LANE + FIRST_WARP + "\n@%p3 st.global.b32 [%rd1], 5;"
    (finding,) = execute(body, FLOATS.copy(), out=out)[1].findings
    assert "st.global writes bytes of out that cta 0 warp" in finding.message
    assert "adds to (line 17) in no order" in finding.message
    body = LANE + "@%p3 st.global.b32 [%rd1], 5;\n" + FIRST_WARP
    (finding,) = execute(body, FLOATS.copy(), out=out)[1].findings
    assert "red adds to bytes of out that cta 0 warp 1" in finding.message


def test_a_value_that_an_atomic_returns_is_used():
    expected = value("add.s32 %r20, %r10, 7;", WORDS.copy())
    body = """red.global.add.u32 [%rd2], %r10; red.global.add.u32 [%rd2], 7;
atom.global.add.u32 %r20, [%rd2], 0;"""
    np.testing.assert_array_equal(value(body, WORDS.copy()), expected)
