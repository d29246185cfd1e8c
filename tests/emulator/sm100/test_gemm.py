# SPDX-License-Identifier: Apache-2.0
"""GEMMs by hand of what no shipped kernel has: M = 64, e4m3, and fp16 with B multicast."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator import launch

from . import harness

K_TILES = 7  # more than two rounds of the ring
CASES = {
    "f16_m64": ("f16", "f16", {"TILE_M": "64"}),
    "e4m3": ("e4m3", "f16", {}),
    "multicast": ("bf16", "f16", {"CLUSTER_M": "2"}),
}


def make_kernel(path, ab, d):
    """(kernel, what D must be, half a unit in the last place of it, relative)"""
    m, n = 2 * 128, 2 * 128
    k = K_TILES * 128 // np.dtype(harness.BITS[ab]).itemsize
    rng = np.random.default_rng(5)
    a, b = rng.integers(-2, 3, (m, k)), rng.integers(-2, 3, (n, k))
    kernel = harness.Kernel(
        path,
        {"a": (ab, a), "b": (ab, b)},
        ("d", d, (m, n)),
        {"m": launch.int32(m), "n": launch.int32(n), "k": launch.int32(k)},
    )
    return kernel, (a @ b.T).astype(np.float64), harness.HALF_ULP[d]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    ab, d, constants = CASES[request.param]
    dtypes = {
        "AB_DTYPE": f"cutlass.{harness.DSL_TYPES[ab]}",
        "D_DTYPE": f"cutlass.{harness.DSL_TYPES[d]}",
    }
    folder = tmp_path_factory.mktemp(request.param)
    path = harness.variant("gemm_one_cta", folder, dtypes | constants)
    return make_kernel(path, ab, d)


@pytest.mark.parametrize("schedule", harness.SCHEDULES, ids=str)
def test_the_product_is_right_under_every_schedule(case, schedule):
    kernel, want, half_ulp = case
    got, findings = kernel.run(schedule)
    assert findings == ()
    assert (abs(got - want) <= half_ulp * abs(want)).all()


def test_the_tail_of_the_dsl_lets_an_odd_cta_free_what_its_epilogue_reads(tmp_path):
    """PipelineUmmaAsync.producer_tail waits in CTAs of even rank, whatever the CTA group."""
    path = harness.variant("gemm_one_cta", tmp_path, {"CLUSTER_M": "2"})
    text = path.read_text(encoding="utf-8")
    acquire = "pipelines.acc.producer_acquire(acc_state)\n    cute.arch.dealloc"
    assert text.count(acquire) == 1
    path.write_text(text.replace(acquire, acquire.replace("acquire(", "tail(")))
    kernel, _, _ = make_kernel(path, "bf16", "bf16")
    _, findings = kernel.run(harness.SCHEDULES[0])
    assert findings
    assert all("cta 1" in finding.where for finding in findings)
