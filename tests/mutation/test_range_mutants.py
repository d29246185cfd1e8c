# SPDX-License-Identifier: Apache-2.0
"""Every number of the ranges that is off by one, and every swap of a tile's ends, is noticed."""

from __future__ import annotations

import pytest
from emitted import Kernel, check
from fmha_gen.ops.masks import Lengths
from support import kernel_text, rotated

from .range_mutants import KERNELS, mutants

# A tile without a key, one of more rows than there are, and each key of a block at the edges.
SIZES = [Lengths(300, 20), Lengths(65, 300)]
SIZES += [Lengths(300, 1300 + more * 37 % 128) for more in range(128)]


@pytest.mark.parametrize("kernel", rotated(KERNELS, 4))
def test_brute_force_kills_every_wrong_number(kernel: str) -> None:
    kinds = [[*mutants(kernel_text(spec))] for spec in KERNELS[kernel]]
    assert len(kinds[0]) >= 10
    left = []
    for same in zip(*kinds, strict=True):
        for mutant in same:
            try:
                check(Kernel(mutant.text), SIZES, numbers_alone=True)
            except AssertionError:
                break
        else:
            left.append(same[0].name)
    assert left == []
