# SPDX-License-Identifier: Apache-2.0
"""Allocation of tensor memory, and what tcgen05.ld and .st move, thread by thread."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fmha_gen.emulator.lanes import LANES
from fmha_gen.emulator.report import Fault
from fmha_gen.emulator.scheduler import Completion, Order, Schedule
from fmha_gen.emulator.tensor_memory import (
    COLUMNS,
    GRANULES,
    POISON,
    TensorMemory,
    granules,
)

from .kernels import execute, kinds
from .tensor_kernels import parts, run

RNG = np.random.default_rng(5)
NO_SHARED = np.zeros((1, 2048), np.uint8)


def columns_of(count: int) -> int:
    """What an allocation of at least so many columns has."""
    return max(32, 1 << (count - 1).bit_length())


# --- what a thread's registers are ------------------------------------------------------------

REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
WIDTHS = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 1}


def cell(shape: str, thread: int, register: int) -> tuple[int, int]:
    """(lane, column) of one thread's register, in the manual's figures of the fragments.

    The columns are of 32 bits, or pairs of 16-bit elements when packed.
    """
    group, quad = divmod(thread, 4)
    repetition, part = divmod(register, REGISTERS[shape])
    if shape == "32x32b":
        return thread, register
    if shape == "16x32bx2":
        return thread % 16, register
    if shape == "16x64b":
        # Threads 4 g and 4 g + 2 hold the row g, 4 g + 1 and 4 g + 3 the row g + 8.
        return group + (8 if quad in (1, 3) else 0), 2 * repetition + (quad >= 2)
    if shape == "16x128b":
        return group + 8 * part, 4 * repetition + quad
    row = group if part < 2 else group + 8
    return row, 8 * repetition + 2 * quad + (part & 1)


def split_of(shape: str, count: int, packed: bool) -> int:
    """Where the second half of .16x32bx2 begins: not where the first half ends."""
    return (2 * count if packed else count) + 8 if shape == "16x32bx2" else 0


def cells(shape: str, count: int, thread: int, register: int, packed: bool):
    """(lane, column) of each cell that a register is made of, low half first."""
    lane, column = cell(shape, thread, register)
    columns = [2 * column, 2 * column + 1] if packed else [column]
    if shape == "16x32bx2" and thread >= 16:
        columns = [column + split_of(shape, count, packed) for column in columns]
    return [(lane, column) for column in columns]


def span(shape: str, count: int, packed: bool) -> int:
    """[columns] that an access touches."""
    columns = WIDTHS[shape] * count * (2 if packed else 1)
    return columns + split_of(shape, count, packed)


FORMS = [
    (shape, 1 << power, packed)
    for shape in REGISTERS
    for power in range(8)
    for packed in (False, True)
    if REGISTERS[shape] << power <= 128 and span(shape, 1 << power, packed) <= COLUMNS
]
# Nothing but 32x32b touches the upper half of a warp's lanes, unless told to start there.
STARTS = {"32x32b": (0,)}


@pytest.mark.parametrize(("shape", "count", "packed"), FORMS)
def test_load(shape, count, packed):
    columns = columns_of(span(shape, count, packed))
    tensor = RNG.integers(0, 1 << 32, (1, columns, LANES), dtype=np.uint32)
    number = REGISTERS[shape] * count
    p = parts(columns=columns)
    names = ", ".join(f"%r{100 + i}" for i in range(number))
    split = f", {split_of(shape, count, packed)}" if shape == "16x32bx2" else ""
    pack = ".pack::16b" if packed else ""
    stores = "".join(
        f"st.global.b32 [%rd10+{512 * i}], %r{100 + i};\n" for i in range(number)
    )
    for start in STARTS.get(shape, (0, 16)):
        body = f"""{p["setup"]}{p["pour"]}
tcgen05.ld.sync.aligned.{shape}.x{count}{pack}.b32 {{{names}}}, [%r33+{start << 16}]{split};
tcgen05.wait::ld.sync.aligned;
mul.wide.u32 %rd11, %r1, 4; add.s64 %rd10, %rd1, %rd11;
{stores}{p["free"]}"""
        out, result = run(body, NO_SHARED, tensor)
        assert result.findings == ()
        want = np.zeros((number, LANES), np.uint32)
        for (register, thread), _ in np.ndenumerate(want):
            warp, lane_of_warp = divmod(thread, 32)
            values = [
                int(tensor[0, column, 32 * warp + start + lane])
                for lane, column in cells(shape, count, lane_of_warp, register, packed)
            ]
            want[register, thread] = (
                values[0] & 0xFFFF | (values[1] & 0xFFFF) << 16 if packed else values[0]
            )
        np.testing.assert_array_equal(out[0, :number], want)


@pytest.mark.parametrize(("shape", "count", "packed"), FORMS)
def test_store(shape, count, packed):
    columns = columns_of(span(shape, count, packed))
    tensor = RNG.integers(0, 1 << 32, (1, columns, LANES), dtype=np.uint32)
    number = REGISTERS[shape] * count
    p = parts(columns=columns)
    names = ", ".join(f"%r{100 + i}" for i in range(number))
    split = f"{split_of(shape, count, packed)}, " if shape == "16x32bx2" else ""
    unpack = ".unpack::16b" if packed else ""
    values = "mul.lo.s32 %r99, %r1, 1000003;\n" + "".join(
        f"add.s32 %r{100 + i}, %r99, {7919 * 65537 * i & 0x7FFFFFFF};\n"
        for i in range(number)
    )
    for start in STARTS.get(shape, (0, 16)):
        body = f"""{p["setup"]}{p["pour"]}{values}
tcgen05.st.sync.aligned.{shape}.x{count}{unpack}.b32 [%r33+{start << 16}], {split}{{{names}}};
tcgen05.wait::st.sync.aligned;
{p["dump"]}{p["free"]}"""
        out, result = run(body, NO_SHARED, tensor)
        assert result.findings == ()
        want = tensor.copy()
        for register in range(number):
            for thread in range(LANES):
                warp, lane_of_warp = divmod(thread, 32)
                bits = thread * 1000003 + (7919 * 65537 * register & 0x7FFFFFFF)
                halves = [bits & 0xFFFFFFFF]
                if packed:
                    # What the upper half of an unpacked cell holds, nobody says: poison.
                    halves = [
                        bits & 0xFFFF | 0xFFFF0000,
                        bits >> 16 & 0xFFFF | 0xFFFF0000,
                    ]
                touched = cells(shape, count, lane_of_warp, register, packed)
                for (lane, column), half in zip(touched, halves, strict=True):
                    want[0, column, 32 * warp + start + lane] = half
        np.testing.assert_array_equal(out, want)


def test_granules_are_those_of_the_cells():
    """Two cells share a granule exactly when column, warp and half of its lanes agree."""
    seen = {}
    for first, count in ((0, 3), (7, 1), (500, 12)):
        for quadrant in (0, 3, None):
            for half in (0, 1, None):
                place = granules(first, count, quadrant=quadrant, half=half)
                numbers = np.arange(math.prod(GRANULES)).reshape(GRANULES)
                got = numbers[place].reshape(-1)
                cells_ = [
                    (q, column, h)
                    for q in (range(4) if quadrant is None else [quadrant])
                    for column in range(first, first + count)
                    for h in ((0, 1) if half is None else [half])
                ]
                assert len(got) == len(cells_)
                for granule, key in zip(got.tolist(), cells_, strict=True):
                    assert seen.setdefault(key, granule) == granule
    assert len(set(seen.values())) == len(seen)


# --- allocation -------------------------------------------------------------------------------

ALLOC = "tcgen05.alloc.cta_group::{}.sync.aligned.shared::cta.b32 [{}], {};"
FREE = "tcgen05.dealloc.cta_group::{}.sync.aligned.b32 {}, {};"
RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::{}.sync.aligned;"
LOAD = "tcgen05.ld.sync.aligned.{}.b32 {{{}}}, [{}]; tcgen05.wait::ld.sync.aligned;"
STORE = "tcgen05.st.sync.aligned.{}.b32 [{}], {{{}}}; tcgen05.wait::st.sync.aligned;"
WARP_0 = "mov.b32 %r30, smem; setp.lt.u32 %p1, %r1, 32; @!%p1 bra DONE;"
SCHEDULES = [
    Schedule(),
    Schedule(1, Order.RANDOM, Completion.LATE),
    Schedule(2, Order.RANDOM_WARPS, Completion.RANDOM),
]


def found(body: str, **options) -> list[str]:
    result = execute(body, target="sm_100a", **options)[1]
    return [str(finding) for finding in result.findings]


def alone(body: str, **options) -> list[str]:
    """What is found when only warp 0 runs a body."""
    return found(f"{WARP_0}\n{body}\nDONE:", **options)


def test_addresses_of_allocations():
    a, b, c = (ALLOC.format(1, f"%r30+{4 * i}", 64) for i in range(3))
    free = [FREE.format(1, f"%r{40 + i}", 64) for i in range(3)]
    loads = [f"ld.shared.b32 %r{40 + i}, [%r30+{4 * i}];" for i in range(3)]
    body = f"""{WARP_0}
{a} {b} {loads[0]} {loads[1]} {free[0]} {c} {loads[2]} {free[1]} {free[2]}
shl.b32 %r41, %r41, 8; or.b32 %r20, %r41, %r42; st.global.b32 [%rd2], %r20;
DONE:"""
    out, result = execute(body, target="sm_100a")
    assert result.findings == ()
    # The second begins after the first; the third takes the first one's place.
    assert set(out[:32].tolist()) == {64 << 8}


@pytest.mark.parametrize("columns", [32, 64, 128, 256, 512])
def test_sizes(columns):
    allocate, load = ALLOC.format(1, "%r30", columns), "ld.shared.b32 %r31, [%r30];"
    assert alone(f"{allocate} {load} {FREE.format(1, '%r31', columns)}") == []


@pytest.mark.parametrize("columns", [0, 16, 48, 1024])
def test_impossible_sizes(columns):
    (message,) = alone(ALLOC.format(1, "%r30", columns))
    assert "tensor-memory" in message and "not a power of two" in message


def test_sizes_must_not_increase():
    (message,) = alone(ALLOC.format(1, "%r30", 32) + ALLOC.format(1, "%r30", 64))
    assert "allocates 64 columns after 32" in message


def test_allocation_after_relinquishing():
    (message,) = alone(RELINQUISH.format(1) + ALLOC.format(1, "%r30", 32))
    assert "relinquished" in message


def test_leak():
    (message,) = alone("\n\n" + ALLOC.format(1, "%r30", 32))
    assert "exits with 32 columns" in message and "PTX line 17" in message


@pytest.mark.parametrize(
    ("address", "columns", "message"),
    [
        ("0", 64, "deallocates 64 columns at 0, which is no allocation"),
        ("32", 32, "deallocates 32 columns at 32, which is no allocation"),
        ("0x100000", 32, "deallocates from lane 16"),
        ("%r1", 32, "an address that differs between lanes"),
    ],
)
def test_wrong_deallocation(address, columns, message):
    body = f"mov.b32 %r31, {address}; {ALLOC.format(1, '%r30', 32)}"
    (found_,) = alone(body + FREE.format(1, "%r31", columns))
    assert message in found_


def test_twice_deallocated():
    free = FREE.format(1, "%r31", 32)
    body = f"mov.b32 %r31, 0; {ALLOC.format(1, '%r30', 32)} {free} {free}"
    assert "is no allocation" in alone(body)[0]


# Warp 1 asks for columns that warp 0 has, who gives them back when told by an mbarrier.
CONTEND = """
mov.b32 %r30, smem; shr.u32 %r33, %r1, 5; setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY; mbarrier.init.shared.b64 [%r30+16], 32; READY: bar.sync 0;
setp.eq.u32 %p2, %r33, 1; @%p2 bra SECOND;
setp.ne.u32 %p2, %r33, 0; @%p2 bra DONE;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r30], 512;
mbarrier.arrive.shared.b64 _, [%r30+16];
{free}
bra DONE;
SECOND:
TRY: mbarrier.try_wait.parity.shared.b64 %p3, [%r30+16], 0; @!%p3 bra TRY;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r30+4], 32;
ld.shared.b32 %r31, [%r30+4];
{use}
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r31, 32;
DONE:"""


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_allocation_waits_for_columns(schedule):
    free = f"mov.b32 %r31, 0; {FREE.format(1, '%r31', 512)}"
    assert found(CONTEND.format(free=free, use=""), schedule=schedule) == []
    stuck = found(CONTEND.format(free="", use=""), schedule=schedule)
    assert "waits for columns of tensor memory (0 are free)" in stuck[-1] + stuck[0]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_columns_are_new_to_who_gets_them(schedule):
    """Warp 0 has used them, and nothing but the allocation tells warp 1 that it is over."""

    def store(address: str) -> str:
        return STORE.format("32x32b.x1", address, "%r1")

    def load(address: str) -> str:
        return LOAD.format("32x32b.x1", "%r100", address)

    used = store("%r31") + load("%r31")
    free = f"mov.b32 %r31, 0; {used} {FREE.format(1, '%r31', 512)}"
    other = "add.s32 %r32, %r31, 0x200000;"
    writes = CONTEND.format(free=free, use=other + store("%r32"))
    reads = CONTEND.format(free=free, use=other + load("%r32"))
    assert found(writes, schedule=schedule) == []
    (message,) = found(reads, schedule=schedule)
    assert "tcgen05.ld reads tensor memory that nobody wrote" in message


TURNS = """
mov.b32 %r30, smem; shr.u32 %r33, %r1, 5; setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY; mbarrier.init.shared.b64 [%r30+16], 32; READY: bar.sync 0;
setp.gt.u32 %p2, %r33, 2; @%p2 bra DONE;
setp.ne.u32 %p2, %r33, 0; @%p2 bra TRY;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r30], 512;
mbarrier.arrive.shared.b64 _, [%r30+16];
mov.b32 %r31, 0;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r31, 512;
bra DONE;
TRY: mbarrier.try_wait.parity.shared.b64 %p3, [%r30+16], 0; @!%p3 bra TRY;
setp.eq.u32 %p4, %r33, 1; selp.b32 %r35, 64, 32, %p4;
shl.b32 %r36, %r33, 2; add.s32 %r36, %r36, %r30;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r36], %r35;
ld.shared.b32 %r31, [%r36];
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r31, %r35;
DONE:"""


def test_allocations_wait_their_turn():
    """While warp 0 has everything, warp 1 asks for 64 columns and warp 2 for 32."""
    for seed in range(20):
        schedule = Schedule(seed, Order.RANDOM_WARPS)
        messages = found(TURNS, schedule=schedule)
        # Warp 2 may come first; then warp 1 must not ask for more.
        assert all("must not increase" in message for message in messages)


def test_columns_lie_in_one_allocation():
    memory = TensorMemory()
    memory.allocate(32, 32, 1)
    memory.allocate(64, 32, 2)
    memory.check_columns(32, 32, "D")
    memory.check_columns(90, 6, "D")
    for first, count in ((31, 2), (0, 8), (60, 8), (90, 7), (96, 1)):
        with pytest.raises(Fault, match="which no allocation holds"):
            memory.check_columns(first, count, "D")


PAIR = """mov.b32 %r30, smem; mov.u32 %r32, %cluster_ctarank;
barrier.cluster.arrive; barrier.cluster.wait;
setp.lt.u32 %p1, %r1, 32; @!%p1 bra DONE; setp.eq.u32 %p2, %r32, 1;
{first} {second}
DONE: barrier.cluster.arrive; barrier.cluster.wait;"""


def pair(first: str, second: str = "", **options) -> list[str]:
    return found(PAIR.format(first=first, second=second), grid=2, cluster=2, **options)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_pairs_allocate_together(schedule):
    allocate = ALLOC.format(2, "%r30", 64) + "ld.shared.b32 %r31, [%r30];"
    again = ALLOC.format(2, "%r30", 32) + "ld.shared.b32 %r34, [%r30];"
    free = FREE.format(2, "%r31", 64) + FREE.format(2, "%r34", 32)
    assert pair(allocate + again, free + RELINQUISH.format(2), schedule=schedule) == []


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_pairs_need_both(schedule):
    skip = "@%p2 bra DONE;"
    stuck = pair(skip + ALLOC.format(2, "%r30", 64), schedule=schedule)
    assert "or its peer CTA's warp" in stuck[-1] + stuck[0]
    allocate = ALLOC.format(2, "%r30", 64) + "ld.shared.b32 %r31, [%r30];"
    stuck = pair(allocate, skip + FREE.format(2, "%r31", 64), schedule=schedule)
    assert (
        "tcgen05.dealloc.cta_group::2.sync.aligned.b32 waits for its peer"
        in "".join(stuck)
    )


def test_pairs_ask_for_the_same():
    different = "selp.b32 %r33, 64, 32, %p2;" + ALLOC.format(2, "%r30", "%r33")
    (message,) = pair(different)
    assert "do not ask for the same" in message


def test_no_pair_without_a_peer():
    body = f"{WARP_0} {ALLOC.format(2, '%r30', 32)} DONE:"
    (message,) = found(body)
    assert "cta 0 has no peer in its cluster" in message


def test_released_columns_are_poison():
    memory = TensorMemory()
    memory.allocate(32, 32, 1)
    memory.words[32:64] = 7
    memory.words[64:] = 5
    memory.release(32, 32)
    assert (memory.words[32:64] == POISON).all() and (memory.words[64:] == 5).all()
    assert np.isnan(memory.floats[40]).all()


# --- access -----------------------------------------------------------------------------------


def access(steps: str, **options) -> list[str]:
    """What is found when all warps run this with 64 poured columns."""
    p = parts(columns=64)
    tensor = np.zeros((1, 64, LANES), np.uint32)
    body = p["setup"] + p["pour"] + steps + "\n" + p["free"]
    result = run(body, NO_SHARED, tensor, **options)[1]
    return [str(finding) for finding in result.findings]


@pytest.mark.parametrize(
    ("shape", "registers", "offset", "fits"),
    [
        ("32x32b.x2", 2, 62, True),
        ("32x32b.x2", 2, 63, False),
        ("32x32b.x2.pack::16b", 2, 60, True),
        ("32x32b.x2.pack::16b", 2, 61, False),
        ("16x256b.x1", 4, 56, True),
        ("16x256b.x1", 4, 57, False),
    ],
)
def test_columns_are_allocated(shape, registers, offset, fits):
    names = ", ".join(f"%r{100 + i}" for i in range(registers))
    values = "".join(f"mov.b32 %r{100 + i}, 0;" for i in range(registers))
    address = f"%r33+{offset}"
    loaded = access(LOAD.format(shape, names, address))
    stored = access(values + STORE.format(shape.replace(".p", ".unp"), address, names))
    if fits:
        assert loaded == stored == []
    else:
        last = {2: 64, 4: 64}[registers]
        assert f"to {last} of tensor memory, which no allocation holds" in loaded[0]
        assert loaded[0].startswith("out-of-bounds") and "loads" in loaded[0]
        assert stored[0].startswith("out-of-bounds") and "stores" in stored[0]


@pytest.mark.parametrize(
    ("shape", "lane", "right"),
    [
        ("32x32b.x1", 0, True),
        ("32x32b.x1", 16, False),
        ("32x32b.x1", 32, False),
        ("16x64b.x1", 16, True),
        ("16x64b.x1", 8, False),
        ("16x64b.x1", 32, False),
    ],
)
def test_warps_have_their_own_lanes(shape, lane, right):
    address = f"%r33+{lane << 16}"
    loaded = access(LOAD.format(shape, "%r100", address))
    stored = access("mov.b32 %r100, 0;" + STORE.format(shape, address, "%r100"))
    if right:
        assert loaded == stored == []
    else:
        assert "but warp 0 has lanes 0 to 31" in loaded[0]
        assert "but warp 0 has lanes 0 to 31" in stored[0]
        assert loaded[0].startswith("tensor-memory")


def test_one_address_per_warp():
    message, *_ = access(
        "add.s32 %r34, %r33, %r1;" + LOAD.format("32x32b.x1", "%r100", "%r34")
    )
    assert "an address that differs between lanes of a warp" in message


def test_warps_may_load_different_columns():
    """Each warp from a column of its own: what is one access for a warpgroup is four here."""
    columns = 32
    tensor = RNG.integers(0, 1 << 32, (1, columns, LANES), dtype=np.uint32)
    p = parts(columns=columns)
    body = f"""{p["setup"]}{p["pour"]}
shr.u32 %r50, %r1, 5; add.s32 %r34, %r33, %r50;
{LOAD.format("32x32b.x2", "%r100, %r101", "%r34")}
mul.wide.u32 %rd11, %r1, 4; add.s64 %rd10, %rd1, %rd11;
st.global.b32 [%rd10], %r100; st.global.b32 [%rd10+512], %r101;
{p["free"]}"""
    out, result = run(body, NO_SHARED, tensor)
    assert result.findings == ()
    lanes = np.arange(LANES)
    for register in range(2):
        want = tensor[0, lanes // 32 + register, lanes]
        np.testing.assert_array_equal(out[0, register], want)


def test_nobody_has_written_what_is_read():
    p = parts(columns=32)
    tensor = np.zeros((1, 32, LANES), np.uint32)
    body = p["setup"] + LOAD.format("32x32b.x1", "%r100", "%r33") + p["free"]
    result = run(body, NO_SHARED, tensor)[1]
    assert kinds(result) == ["read-before-write"]
    assert "tcgen05.ld reads tensor memory that nobody wrote" in str(result.findings[0])
