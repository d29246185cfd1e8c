# SPDX-License-Identifier: Apache-2.0
"""GEMMs by one CTA, by a pair, and with B multicast."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator import launch

from . import harness

K_TILES = 7  # more than two rounds of the ring
CASES = {
    "bf16": ("gemm_one_cta", "bf16", "bf16", {}),
    "f16_m64": ("gemm_one_cta", "f16", "f16", {"TILE_M": "64"}),
    "e4m3": ("gemm_one_cta", "e4m3", "f16", {}),
    "multicast": ("gemm_one_cta", "bf16", "f16", {"CLUSTER_M": "2"}),
    "pair_bf16": ("gemm_two_cta", "bf16", "bf16", {}),
    "pair_e4m3_m128": ("gemm_two_cta", "e4m3", "f16", {"TILE_M": "128"}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(kernel, what D must be, half a unit in the last place of it, relative)"""
    stem, ab, d, constants = CASES[request.param]
    dtypes = {
        "AB_DTYPE": f"cutlass.{harness.DSL_TYPES[ab]}",
        "D_DTYPE": f"cutlass.{harness.DSL_TYPES[d]}",
    }
    folder = tmp_path_factory.mktemp(request.param)
    path = harness.variant(stem, folder, dtypes | constants)
    m, n = 2 * 256 if stem == "gemm_two_cta" else 2 * 128, 2 * 128
    k = K_TILES * 128 // np.dtype(harness.BITS[ab]).itemsize
    rng = np.random.default_rng(len(request.param))
    a, b = rng.integers(-2, 3, (m, k)), rng.integers(-2, 3, (n, k))
    kernel = harness.Kernel(
        path,
        {"a": (ab, a), "b": (ab, b)},
        ("d", d, (m, n)),
        {"m": launch.int32(m), "n": launch.int32(n), "k": launch.int32(k)},
    )
    return kernel, (a @ b.T).astype(np.float64), harness.HALF_ULP[d]


@pytest.mark.parametrize("schedule", harness.SCHEDULES, ids=str)
def test_the_product_is_right_under_every_schedule(case, schedule):
    kernel, want, half_ulp = case
    got, findings = kernel.run(schedule)
    assert findings == ()
    assert (abs(got - want) <= half_ulp * abs(want)).all()
