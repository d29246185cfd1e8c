# SPDX-License-Identifier: Apache-2.0
"""Who wrote what: each write to global memory is counted, and says whose it is."""

from __future__ import annotations

import numpy as np
from fmha_gen.emulator.machine import run as original
from fmha_gen.evidence.rehearsal import schedules
from fmha_gen.evidence.tensors import view_of

from .kernels import OUT, execute, tensor_map
from .rehearsals import tagged
from .walks import GENERATED

STORE = "st.global.b32 [%rd2], %r1;"


def test_each_store_is_counted():
    body = f"{STORE} setp.lt.u32 %p1, %r1, 5; @%p1 {STORE}"
    out, ran = execute(body, out=np.zeros(130, np.uint32))
    counts = ran.writes.counts(OUT, out)
    assert counts.tolist() == [2] * 5 + [1] * 123 + [0, 0]


def test_what_two_ctas_write_names_both():
    out, ran = execute(STORE, grid=3)
    assert (ran.writes.counts(OUT, out) == 3).all()
    writers = list(ran.writes.writers(OUT, 4 * 7))
    assert [writer.cta for writer in writers] == [0, 1, 2]
    assert str(writers[1]).startswith("cta 1, warp 0, line ")


def test_nothing_written():
    out, ran = execute("")
    assert (ran.writes.counts(OUT, out) == 0).all()
    assert not list(ran.writes.writers(OUT, 0))


def test_a_tma_store_writes_what_is_in_bounds():
    """A box of 4 rows of 8 words at row 6 of 8, twice."""
    store = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd5, {0, 6}], [%r30];"
    body = f"""mov.b32 %r30, smem; mov.b64 %rd5, k_param_1;
    setp.ne.u32 %p1, %r1, 0; @%p1 bra OVER;
    {store} {store} cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; OVER:"""
    out = np.zeros((8, 8), np.uint32)
    _, ran = execute(body, out=out, maps=(tensor_map(OUT, (8, 8), (8, 4)),))
    counts = ran.writes.counts(OUT, out)
    assert (counts[6:] == 2).all() and not counts[:6].any()


def test_a_shipped_kernel_writes_every_element_once():
    (ready,) = tagged(GENERATED / "sm90_d64_bf16_causal_lse.py", ["ragged"])
    problem = ready.problem
    seen = []

    def run(*arguments, **options):
        seen.append(original(*arguments, **options))
        return seen[0]

    assert ready.run(schedules(0)[0], run=run).findings == []
    for output in problem.outputs:
        first = output.address - output.placed.offset * output.view.itemsize
        counts = seen[0].writes.counts(first, output.storage)
        inside = np.zeros(counts.shape, np.bool_)
        view_of(inside, output.placed)[...] = True
        assert (counts == inside).all()
