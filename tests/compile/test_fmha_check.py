# SPDX-License-Identifier: Apache-2.0
"""`fmha_check` names argument and sequence of lengths and pages that a kernel would cut."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from support import GENERATED

PACKED = "sm90_d128_bf16_causal_gqa4_varlen"
PAGED = "sm90_d128_bf16_causal_gqa4_page16_varlen_lse"
ROWS, PAGES = 20, 4
Q = np.zeros((ROWS, 8, 128), np.float16)


def kernel(stem: str) -> Any:
    spec = importlib.util.spec_from_file_location(stem, GENERATED / f"{stem}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def packed() -> Any:
    return kernel(PACKED)


@pytest.fixture(scope="module")
def paged() -> Any:
    return kernel(PAGED)


def ints(*numbers: Any) -> Any:
    return np.array(numbers, np.int32)


def test_it_is_public(packed: Any, paged: Any) -> None:
    for module in (packed, paged):
        assert module.__all__ == ["SPEC", "compile", "fmha", "fmha_check"]


RIGHT = {"cu_seqlens_q": ints(2, 5, 5, 20), "cu_seqlens_k": ints(0, 0, 9, 12)}


@pytest.mark.parametrize(
    ("name", "offsets", "told"),
    [
        ("cu_seqlens_q", ints(2, 5, 4, 20), "sequence 1 are 5 and 4"),
        ("cu_seqlens_q", ints(-1, 5, 5, 20), "sequence 0 are -1 and 5"),
        ("cu_seqlens_q", ints(2, 5, 5, 21), "sequence 2 are 5 and 21: there are 20"),
        ("cu_seqlens_k", ints(0, 0, 9, 13), "sequence 2 are 9 and 13: there are 12"),
    ],
)
def test_offsets(packed: Any, name: str, offsets: Any, told: str) -> None:
    k = np.zeros((12, 2, 128), np.float16)
    packed.fmha_check(Q, k, k, **RIGHT, out=None, softmax_scale=None)
    with pytest.raises(ValueError, match=f"^{name}: of {told}"):
        packed.fmha_check(Q, k, k, **{**RIGHT, name: offsets})


USED, TABLE = ints(17, 0, 48), ints([0, 3, -1], [9, 9, 9], [1, 2, 0])


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"seqused_k": ints(49, 0, 48)}, "seqused_k: of sequence 0 is 49: .* 48 keys"),
        ({"seqused_k": ints(17, -1, 48)}, "seqused_k: of sequence 1 is -1"),
        (
            {"seqused_k": ints(33, 0, 48)},
            "block_table: of sequence 0 has page -1 at 2: k has 4 pages",
        ),
        ({"seqused_k": ints(17, 1, 48)}, "block_table: of sequence 1 has page 9 at 0"),
        ({"cu_seqlens_q": ints(0, 1, 3, 2)}, "cu_seqlens_q: of sequence 2 are 3 and 2"),
    ],
)
def test_pages(paged: Any, named: dict[str, Any], told: str) -> None:
    pool = np.zeros((PAGES, 16, 2, 128), np.float16)
    given = {"cu_seqlens_q": ints(0, 1, 2, 20), "seqused_k": USED, "block_table": TABLE}
    paged.fmha_check(Q, pool, pool, **given)
    with pytest.raises(ValueError, match=f"^{told}"):
        paged.fmha_check(Q, pool, pool, **given | named)
