# SPDX-License-Identifier: Apache-2.0
"""Each check of tcgen05 twice: kernels that trigger it, and the same kernels put right."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator import ptx, tcgen05
from fmha_gen.emulator.emitters import UnsupportedInstruction
from fmha_gen.emulator.lower import lower
from fmha_gen.emulator.scheduler import Completion, Order, Schedule

from . import kernels
from .kernels import kinds
from .tensor_kernels import (
    DATA,
    LANES,
    Matrix,
    commit,
    instruction_descriptor,
    mma,
    parts,
    run,
)

EVERY = [
    Schedule(seed, order, completion)
    for seed, (order, completion) in enumerate(
        (order, completion) for order in Order for completion in Completion
    )
]
M, N = 128, 16
A = Matrix(DATA, 2, 128, 16, False, 0)
B = Matrix(DATA + 4096, 2, 16, 16, False, 0)
BYTES = 6144
DESCRIPTOR = instruction_descriptor(M, N, "f16", "f16")
COLUMNS = 64
A_COLUMN = 48


def product(
    *,
    ctas: int = 1,
    d: int = 0,
    a: int | str = A.descriptor(),
    b: int = B.descriptor(),
    descriptor: int | None = None,
    accumulate: bool = False,
    kind: str = "f16",
    suffix: str = "",
) -> str:
    if descriptor is None:
        descriptor = instruction_descriptor(M * ctas, N * ctas, "f16", "f16")
    return mma(ctas, kind, d, a, b, descriptor, accumulate, suffix)


LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r100}, [%r33];"
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r33], {%r1};"
BEFORE = "tcgen05.fence::before_thread_sync;"
AFTER = "tcgen05.fence::after_thread_sync;"
LOADED = "tcgen05.wait::ld.sync.aligned;" + BEFORE
STORED = "tcgen05.wait::st.sync.aligned;" + BEFORE
BARRIER = "bar.sync 0;" + AFTER
# All threads arrive at the second mbarrier; thread 0, who multiplies, waits there.
ARRIVE = "mbarrier.arrive.shared.b64 _, [%r30+16];"
ASK = (
    "ASK: mbarrier.try_wait.parity.shared.b64 %p6, [%r30+16], 0; @!%p6 bra ASK;" + AFTER
)


def elected(steps: str) -> str:
    """Thread 0 of the first CTA does this, then all go on to wait for its commit."""
    return f"@!%p4 bra WAIT; {steps}"


def result_of(steps: str, *, ctas: int = 1, pour: bool = True, **options):
    p = parts(ctas=ctas, columns=COLUMNS, nbytes=BYTES)
    shared = np.zeros((ctas, BYTES), np.uint8)
    tensor = np.zeros((ctas, COLUMNS, LANES), np.uint32)
    poured = p["pour"] + p["sync"] if pour else ""
    body = p["setup"] + poured + steps + "\n" + p["free"]
    return run(body, shared, tensor, ctas=ctas, **options)[1]


def found(steps: str, **options) -> list[str]:
    return kinds(result_of(steps, **options))


def first(steps: str, **options) -> str:
    return str(result_of(steps, **options).findings[0])


WAIT = parts()["wait"]


# --- tensor memory: races ---------------------------------------------------------------------


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_load_waits_for_the_product(schedule):
    multiply = elected(product() + commit())
    assert found(multiply + WAIT + LOAD + LOADED, schedule=schedule) == []
    # The barrier orders the issue, not the product.
    early = multiply + "WAIT: bar.sync 0;" + LOAD + LOADED + WAIT.replace("WAIT", "END")
    assert found(early, schedule=schedule) == ["race"]


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_product_waits_for_the_store(schedule):
    tail = elected(ASK + product(a=f"[%r31+{A_COLUMN}]") + commit()) + WAIT
    store = STORE.replace("%r33", f"%r33+{A_COLUMN}")
    assert found(store + STORED + ARRIVE + tail, schedule=schedule) == []
    assert found(store + ARRIVE + STORED + tail, schedule=schedule) == ["race"]
    assert found(store + ARRIVE + tail + STORED, schedule=schedule) == ["race"]
    no_hand_off = tail.replace(ASK, "")
    assert "race" in found(store + STORED + ARRIVE + no_hand_off, schedule=schedule)


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_product_waits_for_the_load(schedule):
    """What a warp has loaded may be overwritten only after its wait::ld."""
    tail = elected(ASK + product() + commit()) + WAIT
    assert found(LOAD + LOADED + ARRIVE + tail, schedule=schedule) == []
    assert found(LOAD + ARRIVE + LOADED + tail, schedule=schedule) == ["race"]
    used = "add.u32 %r101, %r100, 1;"
    assert found(LOAD + used + ARRIVE + tail + LOADED, schedule=schedule) == ["race"]


def test_who_races_is_named():
    tail = elected(ASK + product() + commit()) + WAIT
    message = first(LOAD + ARRIVE + LOADED + tail)
    assert "D of tcgen05.mma writes tensor memory that cta 0 warp" in message
    assert "'s tcgen05.ld may still be reading" in message
    store = first(STORE + ARRIVE + STORED + tail)
    assert "'s tcgen05.st writes (line" in store and "in no order" in store
    early = elected(product() + commit()) + "WAIT: bar.sync 0;" + LOAD + LOADED
    message = first(early + WAIT.replace("WAIT", "END"))
    assert "cta 0 warp 0's tcgen05.mma writes" in message


def test_a_warp_waits_for_itself():
    assert found(STORE + STORED + LOAD + LOADED) == []
    assert found(STORE + LOAD + LOADED + STORED) == ["race"]
    assert found(LOAD + LOADED + STORE + STORED) == []
    assert found(LOAD + STORE + LOADED + STORED) == ["race"]
    assert found(STORE + STORED + STORE + STORED) == []
    assert found(STORE + STORE + STORED) == ["race"]
    assert found(LOAD + LOAD + LOADED) == []


def test_deallocation_waits_for_everybody():
    """The barrier in front of it hands on only what each warp has waited for."""
    assert found(LOAD + LOADED) == []
    assert found(LOAD) == ["race"]
    assert "tcgen05.dealloc writes tensor memory" in first(LOAD)
    assert found(STORE) == ["race"]
    multiply = elected(product() + commit())
    assert found(multiply + WAIT) == []
    assert "race" in found(multiply + "WAIT: bar.sync 0;")


def test_products_of_one_warp_are_in_order():
    twice = product() + product(accumulate=True) + commit()
    assert found(elected(twice) + WAIT + LOAD + LOADED) == []


def test_products_of_two_warps_are_not():
    both = f"""
and.b32 %r50, %r1, 31; setp.ne.u32 %p6, %r50, 0; setp.gt.u32 %p5, %r1, 32;
or.pred %p6, %p6, %p5; @%p6 bra WAIT;
{product()} {commit(offset=8)} WAIT: bar.sync 0;"""
    assert "race" in found(both)


def test_products_of_two_warps_complete_in_any_order():
    """Warp 0 adds, warp 1 subtracts; who is last is what D holds."""
    minus = instruction_descriptor(M, N, "f16", "f16", negate=(1, 0))
    both = f"""
and.b32 %r50, %r1, 31; setp.ne.u32 %p6, %r50, 0; setp.gt.u32 %p5, %r1, 32;
or.pred %p6, %p6, %p5; @%p6 bra WAIT; setp.ne.u32 %p6, %r1, 0; @%p6 bra MINUS;
{product()} {commit()} bra WAIT;
MINUS: {product(descriptor=minus)} {commit(offset=24)}
{WAIT} {WAIT.replace("WAIT", "OTHER").replace("+8", "+24")}"""
    setup = "@!%p2 bra READY; mbarrier.init.shared.b64 [%r30+24], 1; READY: " + BARRIER
    shared = np.zeros((1, BYTES), np.uint8)
    A.put(shared[0], np.full((128, 16), 0x3C00, np.uint16))
    B.put(shared[0], np.full((16, 16), 0x3C00, np.uint16))
    tensor = np.zeros((1, COLUMNS, LANES), np.uint32)
    p = parts(columns=COLUMNS, nbytes=BYTES)
    body = p["setup"] + p["pour"] + setup + both + p["dump"] + p["free"]
    last = set()
    for seed in range(8):
        schedule = Schedule(seed, completion=Completion.LATE)
        out, result = run(body, shared, tensor, schedule=schedule)
        assert kinds(result) == ["race"]
        last.add(float(out.view(np.float32)[0, 0, 0]))
    assert last == {16.0, -16.0}


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_halves_of_a_warps_lanes_are_apart(schedule):
    """A product of M = 64 in the upper halves does not touch what warps load of the lower."""
    half = instruction_descriptor(64, N, "f16", "f16")
    multiply = elected(product(d=16 << 16, descriptor=half) + commit())
    load = "tcgen05.ld.sync.aligned.16x64b.x1.b32 {{%r100}}, [%r33+{}]; " + LOADED
    end = WAIT.replace("WAIT", "END")
    lower = multiply + "WAIT: " + load.format(0) + end
    assert found(lower, schedule=schedule) == []
    upper = multiply + "WAIT: bar.sync 0; " + load.format(16 << 16) + end
    assert found(upper, schedule=schedule) == ["race"]


@pytest.mark.parametrize("pour", [True, False])
def test_products_read_what_somebody_wrote(pour):
    accumulate = elected(product(accumulate=True) + commit()) + WAIT
    from_tensor = elected(product(a=f"[%r31+{A_COLUMN}]") + commit()) + WAIT
    want = [] if pour else ["read-before-write"]
    assert found(accumulate, pour=pour) == want
    assert found(from_tensor, pour=pour) == want
    assert found(elected(product() + commit()) + WAIT, pour=pour) == []


# --- shared memory ----------------------------------------------------------------------------

WRITE = "st.shared.b32 [%r30+1024], %r1;"
FENCE = "fence.proxy.async.shared::cta;"


def test_product_needs_a_proxy_fence():
    tail = elected(product() + commit()) + WAIT
    write = f"@%p2 st.shared.b32 [%r30+{DATA - 1024}], %r1;"
    assert found(write + FENCE + BARRIER + tail) == []
    assert found(write + BARRIER + tail) == ["proxy-fence"]


@pytest.mark.parametrize("schedule", EVERY, ids=str)
@pytest.mark.parametrize("place", [0, 4096])
def test_operands_stay_until_the_product_is_over(place, schedule):
    write = f"@%p2 st.shared.b32 [%r30+{DATA - 1024 + place}], %r1;"
    multiply = elected(product() + commit())
    assert found(multiply + WAIT + write, schedule=schedule) == []
    # Together: a warp has one clock, so that all of it knows what one lane has waited for.
    together = "WAIT: bar.warp.sync -1;"
    early = multiply + together + write + WAIT.replace("WAIT", "END")
    assert "race" in found(early, schedule=schedule)


def test_operands_lie_in_shared_memory():
    far = Matrix(DATA + 65536, 2, 128, 16, False, 0)
    multiply = elected(product(a=far.descriptor()) + commit()) + WAIT
    assert found(multiply)[0] == "out-of-bounds"
    assert "beyond shared memory" in first(multiply)


# --- addresses of tensor memory ---------------------------------------------------------------


def test_accumulator_is_allocated():
    assert found(elected(product(d=48) + commit()) + WAIT) == []
    message = first(elected(product(d=56) + commit()) + WAIT)
    assert message.startswith("out-of-bounds")
    assert "D in columns 56 to 71 of tensor memory, which no allocation" in message


def test_a_is_allocated():
    assert found(elected(product(a="[%r31+56]") + commit()) + WAIT) == []
    message = first(elected(product(a="[%r31+57]") + commit()) + WAIT)
    assert "A in columns 57 to 64 of tensor memory, which no allocation" in message


def test_lanes_of_matrices():
    half = instruction_descriptor(64, N, "f16", "f16")
    upper = 16 << 16
    right = product(d=upper, a=f"[%r31+{upper + A_COLUMN}]", descriptor=half)
    assert found(elected(right + commit()) + WAIT) == []
    for wrong, message in [
        (product(d=upper), "D in lanes from 16 on, where M is 128"),
        (product(d=8 << 16, descriptor=half), "D in lanes from 8 on"),
        (
            product(d=upper, a=f"[%r31+{A_COLUMN}]", descriptor=half),
            "A in lane 0, D in 16",
        ),
    ]:
        text = first(elected(wrong + commit()) + WAIT)
        assert text.startswith("tcgen05: ") and message in text


# --- commits ----------------------------------------------------------------------------------


def test_commit_must_be_waited_for():
    unseen = elected(product() + commit() + commit(offset=24)) + WAIT
    setup = "@!%p4 bra READY; mbarrier.init.shared.b64 [%r30+24], 1; READY:"
    assert found(setup + unseen) == ["outstanding"]
    message = first(setup + unseen)
    assert (
        "nothing makes cta 0 stay until cta 0 warp 0's tcgen05.mma has signalled"
        in (message)
    )


def test_products_must_be_committed():
    tail = elected(commit() + product(d=16)) + WAIT
    messages = [str(finding) for finding in result_of(tail).findings]
    assert any(
        "exits with a product that no tcgen05.commit tracks" in message
        for message in messages
    )


def test_commit_signals_at_the_end():
    """Under late completion the commit comes after the product, not before."""
    late = Schedule(3, Order.ROUND_ROBIN, Completion.LATE)
    shared = np.zeros((1, BYTES), np.uint8)
    ones = np.full((128, 16), 0x3C00, np.uint16)
    A.put(shared[0], ones)
    B.put(shared[0], ones[:16])
    tensor = np.zeros((1, COLUMNS, LANES), np.uint32)
    p = parts(columns=COLUMNS, nbytes=BYTES)
    steps = elected(product(accumulate=True) * 3 + commit()) + WAIT
    body = p["setup"] + p["pour"] + p["sync"] + steps + p["dump"] + p["free"]
    out, result = run(body, shared, tensor, schedule=late)
    assert result.findings == ()
    assert (out.view(np.float32)[0, :N] == 48).all()


@pytest.mark.parametrize("mask", [0, 4])
def test_commit_to_nobody(mask):
    both = commit(2).replace("mov.b16 %rs1, 3", f"mov.b16 %rs1, {mask}")
    message = first(elected(product(ctas=2) + both) + WAIT, ctas=2)
    assert f"a multicast mask of {mask:#x} in a cluster of 2" in message
    assert message.startswith("tcgen05")


# --- CTA pairs --------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_both_ctas_of_a_pair_wait(schedule):
    multiply = elected(product(ctas=2) + commit(2))
    assert found(multiply + WAIT + LOAD + LOADED, ctas=2, schedule=schedule) == []
    # The odd CTA goes on without waiting.
    odd = multiply + "WAIT: @!%p3 bra LEAVE; " + WAIT.replace("WAIT", "TRY") + "LEAVE:"
    assert "race" in found(odd + LOAD + LOADED, ctas=2, schedule=schedule)


def test_the_even_cta_issues():
    odd = "not.pred %p3, %p3; and.pred %p4, %p2, %p3;"
    message = first(odd + elected(product(ctas=2) + commit(2)) + WAIT, ctas=2)
    assert "cta 1 issues it, which is the odd one of its pair" in message


LATE = Schedule(3, Order.ROUND_ROBIN, Completion.LATE)


def messages(steps: str, **options) -> list[str]:
    return [str(finding) for finding in result_of(steps, **options).findings]


def test_the_peer_stays_until_the_product_is_issued():
    odd_leaves = """@%p3 bra EVEN; mov.b32 %r50, 0; mapa.shared::cluster.u32 %r51, %r30, %r50;
mbarrier.arrive.shared::cluster.b64 _, [%r51+16]; bra DONE; EVEN: """
    steps = odd_leaves + elected(ASK + product(ctas=2) + commit(2)) + WAIT
    last = messages(steps, ctas=2)[-1]
    assert "its peer, cta 1, has exited" in last and last.startswith("tcgen05")


def test_both_ctas_stay_until_the_product_is_over():
    even_leaves = "WAIT: @%p3 bra DONE; " + WAIT.replace("WAIT", "TRY")
    steps = elected(product(ctas=2) + commit(2)) + even_leaves
    found_ = messages(steps, ctas=2, schedule=LATE)
    assert any("its CTA has exited before it completed" in text for text in found_)


def test_who_is_signalled_stays():
    both = commit(2).replace("cta_group::2", "cta_group::1")
    meet = "barrier.cluster.arrive; barrier.cluster.wait;" + AFTER
    odd_leaves = f"WAIT: {meet} @!%p3 bra OUT; {WAIT.replace('WAIT', 'TRY')} OUT: "
    p = parts(columns=COLUMNS, nbytes=BYTES)
    steps = elected(product() + both) + odd_leaves
    body = p["setup"] + p["pour"] + meet + steps + p["free"]
    shared = np.zeros((2, BYTES), np.uint8)
    tensor = np.zeros((2, COLUMNS, LANES), np.uint32)
    checked, unchecked = (
        run(body, shared, tensor, ctas=2, schedule=LATE, checks=checks)[1].findings
        for checks in (True, False)
    )
    (finding,) = checked
    assert "nothing makes cta 1 stay until cta 0 warp 0's" in str(finding)
    (finding,) = unchecked
    assert "arrives at an mbarrier of cta 1, which has exited" in str(finding)
    assert finding.kind.value == "outstanding"


# --- descriptors ------------------------------------------------------------------------------

REFUSED = [
    ({"descriptor": DESCRIPTOR | 4}, "a sparse product is not modelled"),
    ({"descriptor": DESCRIPTOR | 8}, "has bits that must be 0"),
    ({"descriptor": DESCRIPTOR & ~0x30}, "other than f32 is not modelled"),
    ({"descriptor": DESCRIPTOR | 3 << 7}, "kind::f16 has no element type 3"),
    (
        {"descriptor": DESCRIPTOR | 5 << 10, "kind": "f8f6f4"},
        "element type e2m1 is not modelled",
    ),
    (
        {"descriptor": instruction_descriptor(96, N, "f16", "f16")},
        "no product of cta_group::1 has M = 96",
    ),
    (
        {"descriptor": instruction_descriptor(256, N, "f16", "f16")},
        "no product of cta_group::1 has M = 256",
    ),
    ({"descriptor": DESCRIPTOR & ~(0x3F << 17)}, "N = 0: not a multiple of 8"),
    (
        {"descriptor": instruction_descriptor(M, 264, "f16", "f16")},
        "N = 264: not a multiple of 8 up to 256",
    ),
    (
        {
            "descriptor": instruction_descriptor(M, 24, "f16", "f16"),
            "a": f"[%r31+{A_COLUMN}]",
        },
        "N = 24: not a multiple of 16",
    ),
    (
        {
            "descriptor": instruction_descriptor(M, 24, "e4m3", "e4m3", b_mn=True),
            "kind": "f8f6f4",
        },
        "N = 24: not a multiple of 16",
    ),
    (
        {
            "descriptor": instruction_descriptor(M, N, "f16", "f16", a_mn=True),
            "a": f"[%r31+{A_COLUMN}]",
        },
        "A in tensor memory cannot be MN-major",
    ),
    (
        {
            "descriptor": instruction_descriptor(M, N, "tf32", "tf32", b_mn=True),
            "kind": "tf32",
        },
        "an MN-major tf32 matrix is not modelled",
    ),
    ({"a": A.descriptor() & ~(7 << 46)}, "is not of version 1"),
    ({"b": B.descriptor() & ~(7 << 46)}, "is not of version 1"),
    ({"b": B.descriptor() | 1 << 49}, "has a base offset"),
    ({"a": A.descriptor() | 1 << 52}, "an absolute leading offset is not modelled"),
    ({"a": A.descriptor() | 1 << 61}, "swizzle of 32-byte atoms is not modelled"),
    ({"a": A.descriptor() | 3 << 61}, "no layout is 3"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_refused_descriptors(changed, message):
    text = first(elected(product(**changed) + commit()) + WAIT)
    assert text.startswith("tcgen05: PTX line") and message in text


@pytest.mark.parametrize(
    ("descriptor", "message"),
    [
        (instruction_descriptor(64, 32, "f16", "f16"), "cta_group::2 has M = 64"),
        (instruction_descriptor(256, 24, "f16", "f16"), "not a multiple of 16"),
        (
            instruction_descriptor(256, 48, "e5m2", "e5m2", b_mn=True),
            "not a multiple of 32",
        ),
    ],
)
def test_refused_descriptors_of_pairs(descriptor, message):
    kind = "f8f6f4" if "32" in message else "f16"
    form = tcgen05.Form(kind, 2, False, 0)
    with pytest.raises(tcgen05.DescriptorError, match=message):
        tcgen05.decode(descriptor, form)


# --- the rest of the instruction --------------------------------------------------------------


def values(steps: str, a: int = 1, b: int = 1, d: int = 2) -> np.ndarray:
    """The first column of D [128] for matrices of these numbers."""
    shared = np.zeros((1, BYTES), np.uint8)
    for matrix, value in ((A, a), (B, b)):
        bits = np.full((matrix.rows, 16), np.float16(value).view(np.uint16))
        matrix.put(shared[0], bits)
    tensor = np.full((1, COLUMNS, LANES), np.float32(d).view(np.uint32))
    p = parts(columns=COLUMNS, nbytes=BYTES)
    body = p["setup"] + p["pour"] + p["sync"] + elected(steps + commit()) + WAIT
    out, result = run(body + p["dump"] + p["free"], shared, tensor)
    assert result.findings == ()
    return out.view(np.float32)[0, 0]


@pytest.mark.parametrize(
    ("negate", "sign"), [((0, 0), 1), ((1, 0), -1), ((0, 1), -1), ((1, 1), 1)]
)
def test_negation(negate, sign):
    descriptor = instruction_descriptor(M, N, "f16", "f16", negate=negate)
    got = values(product(descriptor=descriptor, accumulate=True), a=3)
    assert (got == 2 + sign * 48).all()


@pytest.mark.parametrize("accumulate", [False, True])
def test_enable_input_d(accumulate):
    assert (values(product(accumulate=accumulate)) == 16 + 2 * accumulate).all()
    predicate = f"setp.{'eq' if accumulate else 'ne'}.u32 %p7, %r1, 0;"
    text = product().replace("%r60, 0;", "%r60, %p7;")
    assert (values(predicate + text) == 16 + 2 * accumulate).all()


@pytest.mark.parametrize("shift", [0, 1, 15])
def test_scale_input_d(shift):
    text = product(accumulate=True).replace("%r60, 1;", f"%r60, 1, {shift};")
    assert (values(text) == 16 + 2 * 2.0**-shift).all()


@pytest.mark.parametrize("use", ["fill", "use", "lastuse", "discard"])
def test_collector_is_a_hint(use):
    assert (values(product(suffix=f".collector::a::{use}")) == 16).all()


def test_disabled_output_lanes():
    text = product().replace("%r60, 0;", "%r60, {%r61, %r62, %r63, %r64}, 0;")
    zero = "".join(f"mov.b32 %r{i}, 0;" for i in range(61, 65))
    assert (values(zero + text) == 16).all()
    message = first(elected(zero + "mov.b32 %r63, 1;" + text + commit()) + WAIT)
    assert message.startswith("unsupported") and "disabled output lanes" in message


@pytest.mark.parametrize(
    ("instruction", "why"),
    [
        ("tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;", ": .cp"),
        ("tcgen05.shift.cta_group::1.down [%r1];", ": .shift"),
        ("tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, 1;", ": .ws"),
        (
            "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r3], %r2, 1;",
            ": .sp",
        ),
        (
            "tcgen05.mma.cta_group::1.kind::i8 [%r1], %rd1, %rd2, %r2, 1;",
            ": .kind::i8",
        ),
        (
            "tcgen05.mma.cta_group::1.kind::f16.ashift [%r1], [%r3], %rd2, %r2, 1;",
            ": .ashift",
        ),
        (
            "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, {%r3, %r4}, 1;",
            ": its disabled output lanes",
        ),
        (
            "tcgen05.mma.cta_group::1.kind::f8f6f4 [%r1], %rd1, %rd2, %r2, 1, 1;",
            ": its scale-input-d",
        ),
        (
            "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, 1, 16;",
            ": a scale-input-d of 16",
        ),
        (
            "tcgen05.ld.red.sync.aligned.32x32b.x2.min.u32 {%r1, %r2}, %r3, [%r4];",
            ": .red",
        ),
        ("tcgen05.ld.sync.aligned.64x32b.x1.b32 {%r1}, [%r4];", ": .64x32b"),
        (
            "tcgen05.ld.sync.aligned.32x32b.x3.b32 {%r1, %r2, %r3}, [%r4];",
            ": .x3",
        ),
        (
            "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r1}, [%r4], %r5;",
            ": its offset",
        ),
        ("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r1}, [%r4];", ": its offset"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r4], 1;", ": its offset"),
        ("tcgen05.st.sync.aligned.32x32b.x2.b32 [%r4], {%r1};", ": 1 registers"),
        (
            "tcgen05.st.sync.aligned.32x32b.x1.pack::16b.b32 [%r4], {%r1};",
            ": .pack::16b",
        ),
        ("tcgen05.commit.cta_group::1.b64 [%rd1];", ""),
        (
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.multicast::cluster.b64 [%rd1];",
            ": its operands",
        ),
        (
            "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; "
            "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;",
            ": the kernel uses cta_group::1, too",
        ),
    ],
)
def test_refused_instructions(instruction, why):
    module = ptx.parse(kernels.text(f"\n{instruction}", target="sm_100a"))
    with pytest.raises(UnsupportedInstruction) as caught:
        lower(module)
    assert str(caught.value).startswith(
        f"PTX line {kernels.LINES_BEFORE + 1}: tcgen05."
    )
    assert str(caught.value).endswith(f" is not modelled{why}")


# --- tcgen05.fence: PTX ISA 9.7.16.6.4 ----------------------------------------------------------


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_who_hands_tensor_memory_on_fences_before(schedule):
    tail = elected(ASK + product() + commit()) + WAIT
    for done in (LOAD + LOADED, STORE + STORED):
        assert found(done + ARRIVE + tail, schedule=schedule) == []
        bare = done.replace(BEFORE, "")
        assert found(bare + ARRIVE + tail, schedule=schedule) == ["tcgen05"]
        # A fence after the signal, or by another lane than the one that signals, is none.
        assert found(bare + ARRIVE + BEFORE + tail, schedule=schedule) == ["tcgen05"]
    assert "no tcgen05.fence::before_thread_sync" in first(bare + ARRIVE + tail)


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_who_takes_tensor_memory_over_fences_after(schedule):
    tail = elected(ASK + product() + commit()) + WAIT
    good = LOAD + LOADED + ARRIVE + tail
    bare = good.replace(ASK, ASK.replace(AFTER, ""))
    assert found(bare, schedule=schedule) == ["tcgen05"]
    early = bare.replace("ASK:", AFTER + "ASK:")
    assert found(early, schedule=schedule) == ["tcgen05"]
    assert "no tcgen05.fence::after_thread_sync" in first(bare)


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_a_commit_fences_before_and_a_wait_does_not_fence_after(schedule):
    multiply = elected(product() + commit())
    bare = multiply + WAIT.replace(AFTER, "") + LOAD + LOADED
    assert found(bare, schedule=schedule) == ["tcgen05"]
    # Who only passes on what it has heard needs no fence.
    passed = multiply + WAIT.replace(AFTER, "") + BARRIER + LOAD + LOADED
    assert found(passed, schedule=schedule) == []


def test_own_stores_and_loads_need_no_fence():
    assert found(STORE + "tcgen05.wait::st.sync.aligned;" + LOAD + LOADED) == []


def test_products_are_committed_by_the_lane_that_issued_them():
    other = "setp.eq.u32 %p7, %r1, 1; @!%p7 bra WAIT;" + commit()
    apart = f"@!%p4 bra NEXT; {product()} NEXT: {other}"
    assert "tcgen05" in found(apart + WAIT)


def test_operands_begin_where_their_swizzle_does():
    narrow = Matrix(DATA, 2, 128, 16, False, 32)
    for start, kinds_found in ((DATA, []), (DATA + 32, ["tcgen05"])):
        steps = product(a=narrow.at(start).descriptor(), b=B.descriptor())
        assert found(elected(steps + commit()) + WAIT)[:1] == kinds_found
