# SPDX-License-Identifier: Apache-2.0
"""What is left of a kernel when its data goes: enough for its schedule, and no more."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator import ptx
from fmha_gen.emulator.launch import Launch
from fmha_gen.emulator.memory import GlobalMemory
from fmha_gen.emulator.report import Fault
from fmha_gen.emulator.skeleton import DataDependence, skeleton
from fmha_gen.emulator.walk import Extent, prepare, walk

from .kernels import FIRST_INPUT, OUT, text


def left(body: str) -> list[str]:
    """Names of the instructions that are left of a kernel."""
    return [each.name for each in skeleton(ptx.parse(text(body))).instructions]


def walked(body: str, tensors=None, threads: int = 128, memory=None):
    """The walk of one CTA, of a kernel whose parameter is the output's address."""
    launch = Launch(
        "k",
        *((1, 1, 1), (threads, 1, 1), (1, 1, 1)),
        16384,
        OUT.to_bytes(8, "little"),
    )
    tensors = tensors or [Extent("out", OUT, (threads,), (4,), 4)]
    return walk(prepare(ptx.parse(text(body))), launch, tensors, memory=memory)


LOADED = "mov.b32 %r30, smem; ld.shared.b32 %r20, [%r30];"
STORE = "st.global.b32 [%rd2], %r20;"


def test_arithmetic_on_data_goes():
    names = left(f"{LOADED} mul.lo.u32 %r20, %r20, %r20; {STORE}")
    assert "ld.shared.b32" not in names and "mul.lo.u32" not in names
    assert names[-2:] == ["st.global.b32", "ret"]


def test_a_branch_on_data_that_only_changes_data_goes():
    """The vote for a rescaling: both ways meet, and nothing of the schedule is between."""
    body = f"""{LOADED} setp.eq.u32 %p1, %r20, 7; @%p1 bra SKIP;
    mul.lo.u32 %r20, %r20, %r20; st.shared.b32 [%r30], %r20;
    SKIP: {STORE}"""
    names = left(body)
    assert not {"setp.eq.u32", "bra", "st.shared.b32"} & set(names)
    assert walked(body).findings == ()


@pytest.mark.parametrize(
    "body",
    [
        f"{LOADED} setp.eq.u32 %p1, %r20, 7; @%p1 bra SKIP; {STORE} SKIP:",
        f"{LOADED} setp.eq.u32 %p1, %r20, 7; @%p1 {STORE}",
        f"{LOADED} cvt.u64.u32 %rd5, %r20; add.s64 %rd2, %rd2, %rd5; {STORE}",
        f"{LOADED} setp.eq.u32 %p1, %r20, 7; @%p1 bra SKIP; mov.u32 %r9, 1; bra JOIN;"
        f"SKIP: mov.u32 %r9, 2; JOIN: cvt.u64.u32 %rd5, %r9; add.s64 %rd2, %rd2, %rd5; {STORE}",
    ],
    ids=["branch", "guard", "address", "chosen address"],
)
def test_a_schedule_that_depends_on_data_has_no_skeleton(body):
    with pytest.raises(DataDependence, match=r"depends on the data of ld.shared.b32"):
        left(body)


HANDED_ON = "mov.b32 %r30, smem; st.shared.b32 [%r30], 7; bar.sync 0;"


def test_integers_that_warps_hand_on_in_shared_memory_may_decide_the_schedule():
    """The values that were stored are kept; those that come from data are not."""
    body = f"""{HANDED_ON} ld.shared.b32 %r20, [%r30];
    ld.shared.b32 %r21, [%r30+512]; mul.lo.u32 %r21, %r21, %r21; st.shared.b32 [%r30+512], %r21;
    setp.lt.u32 %p1, %r1, %r20; @%p1 {STORE}"""
    names = left(body)
    assert names.count("st.shared.b32") == 1 and names.count("ld.shared.b32") == 1
    seen = walked(body)
    assert seen.findings == () and len(seen.stores["out"]) == 7


def test_integers_in_global_memory_may_decide_the_schedule():
    """Whoever walks such a kernel gives them; without them there is no way to go."""
    body = f"""add.s64 %rd5, %rd1, {FIRST_INPUT - OUT}; ld.global.b32 %r20, [%rd5];
    setp.lt.u32 %p1, %r1, %r20; @%p1 {STORE}"""
    assert "ld.global.b32" in left(body)
    memory = GlobalMemory()
    memory.add("count", FIRST_INPUT, np.array([7], np.uint32))
    seen = walked(body, memory=memory)
    assert seen.findings == () and len(seen.stores["out"]) == 7
    (finding,) = walked(body).findings
    assert "ld.global.b32: 4 bytes of global memory" in str(finding)


def test_a_loop_that_only_computes_goes_and_one_that_stores_stays():
    loop = """mov.u32 %r5, 0;
    LOOP: {} add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 3; @%p1 bra LOOP;"""
    assert "bra" not in left(f"{loop.format('add.f32 %r7, %r7, %r7;')} {STORE}")
    body = loop.format(f"{STORE} add.s64 %rd2, %rd2, 512;")
    seen = walked(body, [Extent("out", OUT, (3, 128), (512, 4), 4)])
    assert seen.findings == () and len(seen.stores["out"]) == 3 * 128


def test_stores_say_which_elements_they_cover_and_who_did():
    seen = walked(f"setp.lt.u32 %p1, %r1, 5; @%p1 {STORE}")
    stores = seen.stores["out"]
    assert stores.begin[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert (stores.end == stores.begin + 1).all()
    assert set(stores.cluster.tolist()) == set(stores.cta.tolist()) == {0}


def test_a_store_beside_its_tensor_is_found():
    seen = walked(STORE, [Extent("out", OUT, (64,), (8,), 4)])
    assert "no tensor's" in str(seen.findings[0])


def test_waits_that_nobody_ends_are_a_deadlock():
    wait = "mbarrier.try_wait.parity.shared.b64 %p2, [%r30], 0; @!%p2 bra WAIT;"
    body = f"""mov.b32 %r30, smem; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
    mbarrier.init.shared.b64 [%r30], 1; READY: bar.sync 0; WAIT: {wait} {STORE}"""
    (finding,) = walked(body).findings
    assert "deadlock" in str(finding) and "mbarrier.try_wait" in str(finding)
    arrives = "setp.ne.u32 %p3, %r1, 1; @!%p3 mbarrier.arrive.shared.b64 _, [%r30];"
    assert walked(body.replace("WAIT:", f"{arrives} WAIT:")).findings == ()


def test_a_tensor_beyond_any_memory():
    """2^24 rows, 2^35 bytes apart: nothing is allocated."""
    step = 1 << 35
    body = f"mul.wide.u32 %rd5, %r1, 8; mul.lo.u64 %rd5, %rd5, {step >> 3};"
    body += "add.s64 %rd2, %rd1, %rd5; st.global.b32 [%rd2], %r1;"
    seen = walked(body, [Extent("out", OUT, (1 << 24, 4), (step, 4), 4)])
    assert seen.findings == ()
    rows = seen.stores["out"].begin
    assert (rows == np.stack([np.arange(128), np.zeros(128)], axis=1)).all()


def test_the_axis_of_a_tensor_map_s_stride():
    tensor = Extent("q", FIRST_INPUT, (4, 8, 2, 64), (2048, 128, 16384, 2), 2)
    assert tensor.axis_of(2048, 4) == (0, 1)
    assert tensor.axis_of(256, 4) == (1, 2)
    with pytest.raises(Fault, match="along no axis of q"):
        tensor.axis_of(256, 8)


@pytest.mark.parametrize(
    "instruction",
    [
        "red.global.add.f32 [%rd2], %r20;",
        "red.global.add.u32 [%rd2], %r20;",
        "atom.global.add.u32 %r21, [%rd2], %r20;",
    ],
)
def test_additions_are_kept_without_what_they_add(instruction):
    seen = walked(f"{LOADED} setp.lt.u32 %p1, %r1, 96; @%p1 {instruction}")
    assert seen.findings == () and seen.stores == {}
    boxes = seen.additions["out"]
    assert sorted(boxes.begin[:, 0].tolist()) == list(range(96))
    assert (boxes.end == boxes.begin + 1).all()


def test_additions_of_vectors_cover_all_of_it():
    body = f"""{LOADED} mul.wide.u32 %rd6, %r1, 16; add.s64 %rd6, %rd1, %rd6;
red.global.add.v4.f32 [%rd6], {{%r20, %r20, %r20, %r20}};"""
    seen = walked(body, [Extent("out", OUT, (512,), (4,), 4)])
    boxes = seen.additions["out"]
    assert boxes.begin[:, 0].tolist() == list(range(0, 512, 4))
    assert (boxes.end == boxes.begin + 4).all()
    beyond = walked(body, [Extent("out", OUT, (508,), (4,), 4)])
    assert "no tensor's" in str(beyond.findings[0])


def test_what_an_atomic_returns_is_data():
    body = f"""atom.global.add.u32 %r21, [%rd1], 1; setp.eq.u32 %p1, %r21, 0;
@%p1 {STORE}"""
    with pytest.raises(DataDependence, match="depends on the data of atom"):
        skeleton(ptx.parse(text(body)))


def test_waits_for_other_ctas_go():
    """A walk runs clusters one after another: a chain's order is not what it looks at."""
    body = f"""
SPIN: ld.acquire.gpu.global.b32 %r20, [%rd1]; setp.ne.u32 %p1, %r20, 5; @%p1 bra SPIN;
fence.proxy.async.global; {STORE} fence.acq_rel.gpu; red.release.gpu.global.add.u32 [%rd2], 1;"""
    names = left(body)
    assert not [
        name for name in names if name.startswith(("ld.acquire", "fence", "bra"))
    ]
    seen = walked(body)
    assert seen.findings == ()
    assert len(seen.stores["out"]) == len(seen.additions["out"]) == 128


def test_what_a_cta_does_by_a_word_that_others_write_is_data():
    body = f"ld.acquire.gpu.global.b32 %r20, [%rd1]; setp.ne.u32 %p1, %r20, 5; @%p1 {STORE}"
    with pytest.raises(DataDependence, match=r"depends on the data of ld\.acquire"):
        skeleton(ptx.parse(text(body)))
