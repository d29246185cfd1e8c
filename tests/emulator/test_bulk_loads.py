# SPDX-License-Identifier: Apache-2.0
"""Bulk loads of bytes that no tensor map describes, and the bytes that an mbarrier expects."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator import ptx
from fmha_gen.emulator.emitters import UnsupportedInstruction
from fmha_gen.emulator.lanes import LANES
from fmha_gen.emulator.launch import Launch
from fmha_gen.emulator.scheduler import Completion, Order, Schedule
from fmha_gen.emulator.walk import Extent, prepare, walk

from .kernels import FIRST_INPUT, OUT, execute, kinds, tensor_map, text, value

DATA = np.arange(1024, dtype=np.uint32)
EVERY = [
    Schedule(seed, order, completion)
    for seed, (order, completion) in enumerate(
        (order, completion) for order in Order for completion in Completion
    )
]
OPCODE = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"

# %r30 is the mbarrier's address, the destination 1024 bytes on; %rd5 the input's.
START = """
mov.b32 %r30, smem; setp.ne.u32 %p1, %r1, 0; shl.b32 %r31, %r1, 2; add.s32 %r31, %r31, %r30;
mov.b64 %rd5, {input}; @%p1 bra READY;
mbarrier.init.shared.b64 [%r30], 1; fence.mbarrier_init.release.cluster;
READY: bar.sync 0; @%p1 bra WAIT;
"""
LOAD = """
mbarrier.arrive.expect_tx.shared.b64 _, [%r30], {expected};
{opcode} [%r30+{target}], [%rd5+{source}], {nbytes}, [%r30]{rest};
"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r30], 0; @!%p2 bra WAIT;"
READ = "ld.shared.b32 %r20, [%r31+1024];"
RIGHT = {
    "opcode": OPCODE,
    "expected": 512,
    "target": 1024,
    "source": 64,
    "nbytes": 512,
    "rest": "",
}


def kernel(**changes) -> str:
    body = START.format(input=FIRST_INPUT) + LOAD.format(**RIGHT | changes)
    return body + WAIT + READ


def found(body: str, **options) -> list[str]:
    return kinds(execute(body, DATA, **options)[1])


@pytest.mark.parametrize(
    ("opcode", "rest"),
    [
        (OPCODE, ""),
        (OPCODE.replace("cluster", "cta"), ""),
        (f"{OPCODE}.L2::cache_hint", ", %rd9"),
        (f"{OPCODE}.multicast::cluster", ", 1"),
    ],
)
@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_bytes_arrive(opcode, rest, schedule):
    body = kernel(opcode=opcode, rest=rest)
    np.testing.assert_array_equal(
        value(body, DATA, schedule=schedule), DATA[16 : 16 + LANES]
    )


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_bytes_are_waited_for(schedule):
    early = kernel().replace(WAIT, "WAIT:") + WAIT.replace("WAIT", "AGAIN")
    assert set(found(early, schedule=schedule)) & {"race", "read-before-write"}
    assert found(kernel(), schedule=schedule) == []
    # A write of the destination that need not be over, and one that is, but is not fenced.
    write = "st.shared.b32 [%r31+1024], 7;"
    for before, problem in (("", ["proxy-fence"]), ("fence.proxy.async;", [])):
        body = kernel().replace("bar.sync 0;", f"{write} {before} bar.sync 0;")
        assert found(body, schedule=schedule) == problem
    body = kernel().replace("bar.sync 0;", f"bar.sync 0; {write}")
    assert found(body, schedule=schedule) == ["race"]


def test_a_multicast_reaches_each_cta():
    body = kernel(opcode=f"{OPCODE}.multicast::cluster", rest=", 3")
    body = body.replace(
        "READY: bar.sync 0;",
        "READY: barrier.cluster.arrive.release; barrier.cluster.wait.acquire; "
        "mov.u32 %r2, %cluster_ctarank; setp.ne.u32 %p4, %r2, 0;",
    ).replace("_, [%r30], 512;", "_, [%r30], 512; @%p4 bra WAIT;")
    body += """mul.wide.u32 %rd6, %r2, 512; add.s64 %rd2, %rd2, %rd6;
st.global.b32 [%rd2], %r20; barrier.cluster.arrive; barrier.cluster.wait;"""
    out = np.zeros((2, LANES), np.uint32)
    _, result = execute(body, DATA, out=out, grid=2, cluster=2)
    assert result.findings == ()
    assert result.statistics == {"bulk loads": 1, "load bytes": 512}
    np.testing.assert_array_equal(out, np.tile(DATA[16 : 16 + LANES], (2, 1)))


@pytest.mark.parametrize(
    ("change", "problem", "message"),
    [
        ({"nbytes": 8, "expected": 8}, "misaligned", "a size that is not a multiple"),
        ({"nbytes": 0, "expected": 0}, "misaligned", "a size that is not a multiple"),
        ({"source": 8}, "misaligned", "not aligned to 16 bytes"),
        ({"target": 1032}, "misaligned", "not aligned to 16 bytes"),
        ({"target": 16384 - 496}, "out-of-bounds", "shared memory"),
        ({"source": 4096 - 496}, "out-of-bounds", "after the end of input 0"),
        ({"expected": 496}, "deadlock", "-16 bytes are missing"),
        ({"expected": 528}, "deadlock", "16 bytes are missing"),
    ],
)
def test_what_is_wrong_is_found(change, problem, message):
    (finding,) = execute(kernel(**change), DATA)[1].findings
    assert finding.kind.value == problem and message in finding.message


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_a_load_races_with_who_writes_the_source(schedule):
    write = f"""mov.b64 %rd6, {FIRST_INPUT}; setp.eq.u32 %p3, %r1, 32;
@%p3 st.global.b32 [%rd6+{{}}], 1;"""
    body = kernel().replace("WAIT:", f"WAIT: {write.format(64)}")
    assert found(body, schedule=schedule) == ["race"]
    body = kernel().replace("WAIT:", f"WAIT: {write.format(60)}")
    assert found(body, schedule=schedule) == []


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 16;", "modelled"),
        (f"{OPCODE} [%r1], [%rd1], 16, [%r3], %rs1;", "its operands"),
        (f"{OPCODE}.multicast::cluster [%r1], [%rd1], 16, [%r3];", "its operands"),
    ],
)
def test_what_is_refused(instruction, message):
    with pytest.raises(UnsupportedInstruction, match=message):
        execute(instruction)


def test_a_walk_writes_loads_down():
    body = kernel() + "st.global.b32 [%rd2], %r20;"
    launch = Launch(
        "k", (1, 1, 1), (128, 1, 1), (1, 1, 1), 16384, OUT.to_bytes(8, "little")
    )
    out = Extent("out", OUT, (LANES,), (4,), 4)
    stats = Extent("stats", FIRST_INPUT, (4, 64), (256, 4), 4)
    program = prepare(ptx.parse(text(body)))
    seen = walk(program, launch, [out, stats])
    assert seen.findings == () and len(seen.stores["out"]) == LANES
    boxes = seen.loads["stats"]
    assert boxes.begin.tolist() == [[0, 16], [1, 0], [2, 0]]
    assert boxes.end.tolist() == [[1, 64], [2, 64], [3, 16]]
    assert kinds(walk(program, launch, [out])) == ["out-of-bounds"]
    apart = Extent("stats", FIRST_INPUT, (4, 64), (512, 4), 4)
    assert kinds(walk(program, launch, [out, apart])) == ["out-of-bounds"]


# -- bytes that are expected beside an arrival

# K rides on the first stage of Q: its bytes are expected on top, before or after Q's.
BOTH = """
{first}
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
  [%r30+1024], [%rd6, {{0, 0}}], [%r30];
{second}
{opcode} [%r30+2048], [%rd5], 256, [%r30];
"""
STAGE = "mbarrier.arrive.expect_tx.shared.b64 _, [%r30], 512;"
MORE = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r30], 256;"


def of_both(first: str, second: str) -> str:
    body = START.format(input=FIRST_INPUT) + "mov.b64 %rd6, k_param_2;"
    body += BOTH.format(first=first, second=second, opcode=OPCODE) + WAIT
    return f"{body} {READ} and.b32 %r32, %r31, 255; add.s32 %r32, %r32, %r30; " + (
        "and.b32 %r33, %r1, 63; shl.b32 %r33, %r33, 2; add.s32 %r33, %r33, %r30; "
        "ld.shared.b32 %r21, [%r33+2048]; add.u32 %r20, %r20, %r21;"
    )


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_an_expectation_without_an_arrival(schedule):
    """It holds a phase open that has all its arrivals, until its bytes are there, too."""
    options = {
        "maps": (tensor_map(FIRST_INPUT, (16, 32), (16, 8)),),
        "schedule": schedule,
    }
    expected = DATA[:LANES] + DATA[np.arange(LANES) % 64]
    result = value(of_both(f"{MORE} {STAGE}", ""), DATA, **options)
    np.testing.assert_array_equal(result, expected)

    def seen(first: str, second: str) -> set[str]:
        return set(found(of_both(first, second), **options))

    # Without it the stage is full before the bytes are all there, and they come too early.
    assert seen(STAGE, "")
    assert seen(STAGE.replace("512", "768"), "") == set()
    assert "deadlock" in seen(f"{MORE} {MORE} {STAGE}", "")
    # It is no arrival.
    assert "deadlock" in seen(f"{MORE} {MORE.replace('256', '512')}", "")


def test_an_expectation_that_comes_after_the_phase():
    """A stage whose own bytes may arrive first: then the phase is over without the others."""
    options = {"maps": (tensor_map(FIRST_INPUT, (16, 32), (16, 8)),)}
    eager = found(of_both(STAGE, MORE), schedule=Schedule(), **options)
    assert eager
    late = Schedule(0, Order.ROUND_ROBIN, Completion.LATE)
    assert found(of_both(STAGE, MORE), schedule=late, **options) == []
