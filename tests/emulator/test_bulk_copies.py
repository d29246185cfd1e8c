# SPDX-License-Identifier: Apache-2.0
"""Bulk copies from a CTA's shared memory into another one's."""

from __future__ import annotations

import numpy as np
import pytest

from .test_clusters import EVERY, EXCHANGED, MEET, OWN, found, run

# What a CTA has goes 512 bytes behind what the other one has, by its first thread; %r33 and %r34
# are the other CTA's target and mbarrier.
STORE = f"{OWN} st.shared.b32 [%r31], %r4; {{fence}} bar.sync 0;"
FENCE = "fence.proxy.async.shared::cta;"
SEND = """
xor.b32 %r3, %r2, 1; add.s32 %r5, %r30, {target};
mapa.shared::cluster.u32 %r33, %r5, %r3; add.s32 %r6, %r30, 2048;
mapa.shared::cluster.u32 %r34, %r6, {owner};
@%p1 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%r6], 512;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
  [%r33], [{source}], {nbytes}, [%r34];
"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r30+2048], 0; @!%p3 bra WAIT;"
READ = "ld.shared.b32 %r20, [%r31+512]; st.global.b32 [%rd2], %r20;"
RIGHT = {"target": 512, "owner": "%r3", "source": "%r30", "nbytes": 512}


def kernel(fence: str = FENCE, wait: str = WAIT, **changes) -> str:
    body = STORE.format(fence=fence) + SEND.format(**RIGHT | changes)
    return f"{body} {wait} {READ} {MEET}"


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_bytes_arrive_in_the_other_cta(schedule):
    out, result = run(kernel(), schedule=schedule)
    assert result.findings == ()
    assert result.statistics["bulk copies"] == 2
    np.testing.assert_array_equal(out, EXCHANGED)


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_both_ends_are_ordered(schedule):
    assert found(kernel(fence=""), schedule=schedule) == ["proxy-fence"]
    # Who does not wait may read too early.
    early = found(kernel(wait="WAIT:"), schedule=schedule)
    assert set(early) & {"race", "read-before-write"}
    # That the other CTA's copy is here says nothing of this one's, which may still read the source.
    write = "st.shared.b32 [%r31], 7;"
    again = kernel().replace(READ, f"{write} {READ}")
    assert set(found(again, schedule=schedule)) == {"race"}
    told = kernel().replace(READ, f"{READ} {MEET} {write}")
    assert found(told, schedule=schedule) == []


@pytest.mark.parametrize(
    ("change", "problem", "message"),
    [
        ({"nbytes": 504}, "misaligned", "a size that is not a multiple"),
        ({"target": 520}, "misaligned", "not aligned to 16 bytes"),
        ({"target": 16384 - 496}, "out-of-bounds", "shared memory"),
        ({"source": "%r33"}, "tma", "from another CTA's shared memory"),
        ({"owner": "%r2"}, "tma", "that signals an mbarrier of cta"),
        ({"nbytes": 496}, "deadlock", "16 bytes are missing"),
    ],
)
def test_what_is_wrong_is_found(change, problem, message):
    first = run(kernel(**change))[1].findings[0]
    assert first.kind.value == problem and message in first.message
