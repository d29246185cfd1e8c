# SPDX-License-Identifier: Apache-2.0
"""The lines of a kernel that say what rows see, against brute force."""

from __future__ import annotations

import re

import pytest
import support
from emitted import EDGES, SIZES, Kernel, check

SM90 = "arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 64\ntile: {q: 128, kv: 64}\n"
SM100 = "arch: sm100\nop: fmha_fwd\ndtype: bf16\nhead_dim: 64\n"
PACKED = "heads: {q_per_kv: 4}\npack_gqa: true\n"
MASKS = {
    "causal": "mask: causal\n",
    "far": "mask: causal\nwindow: {left: 300}\n",
    "just far": "mask: causal\nwindow: {left: 255}\n",
    "a block": "mask: causal\nwindow: {left: 63}\n",
    "a block and a key": "mask: causal\nwindow: {left: 64}\n",
    "near": "mask: causal\nwindow: {left: 5}\n",
    "two sides": "window: {left: 100, right: 200}\n",
    "left": "window: {left: 70}\n",
    "right": "window: {right: 70}\n",
}
PARAMS = {
    "documents": "mask: causal\ndocuments: true\n",
    "documents, both ends": "documents: true\n",
    "documents, window": "mask: causal\ndocuments: true\nwindow: {left: 70}\n",
    "prefix": "mask: causal\nprefix: true\n",
    "windows of a call": "window: {left: argument, right: argument}\n",
    "declared": (
        "params: {first: {shape: [b, row], dtype: int32, monotone: row}, more: int32}\n"
        "mask: 'kv <= q + more and kv >= first[b, row] // 2 and q - kv <= 300'\n"
    ),
}
EXPRESSIONS = {
    "first keys": "kv <= q and (q - kv < 100 or kv < 4)",
    "many first keys": "kv <= q and (q - kv < 64 or kv < 150)",
    "two moving ranges": "kv <= q + 9 and kv >= 5 and (kv < q // 3 or kv > q - 70)",
    "a far window": "q - kv < 30 or kv < 70 and kv > q - 300",
    "dilated": "kv <= q and q - kv < 200 and (q - kv) % 3 == 1",
    "tests": "kv % 5 < 3 or not row % 2 == 1",
    "tests beside a gap": "(q - kv < 90 or kv < 40) and abs(kv - 7 * q) % 5 > 0",
}
KERNELS = {
    **{f"sm90, {name}": SM90 + mask for name, mask in MASKS.items()},
    **{
        f"sm90, packed, {name}": SM90 + PACKED + MASKS[name] for name in ("far", "near")
    },
    **{f"sm100, {name}": SM100 + mask for name, mask in MASKS.items()},
    **{
        f"{arch}, {name}": f"{head}mask: '{text}'\n"
        for arch, head in {
            "sm90": SM90,
            "sm90, packed": SM90 + PACKED,
            "sm100": SM100,
        }.items()
        for name, text in EXPRESSIONS.items()
    },
}
WITH_PARAMS = {
    **{f"sm90, {name}": SM90 + mask for name, mask in PARAMS.items()},
    "sm90, packed, documents": SM90 + PACKED + PARAMS["documents"],
    **{f"sm100, {name}": SM100 + mask for name, mask in PARAMS.items()},
}
FAULTY = "sm90, two sides"


@pytest.mark.parametrize("name", support.rotated(KERNELS, 14))
def test_emitted_lines_say_what_rows_see(name: str) -> None:
    edges = EDGES if name == FAULTY else []
    check(Kernel(support.kernel_text(KERNELS[name])), [*SIZES, *edges])


@pytest.mark.parametrize("name", support.rotated(WITH_PARAMS, 8))
def test_emitted_lines_read_what_the_mask_reads(name: str) -> None:
    check(Kernel(support.kernel_text(WITH_PARAMS[name])), SIZES)


FAULTS = {
    f"{what}, {fault}": (line, re.sub(r"WINDOW_\w+", rf"(\g<0> + {more})", line))
    for what, line in {
        "first block": "first_key = first_position - WINDOW_LEFT",
        "end block": "end_key = end_position + WINDOW_RIGHT",
        "first common key": "end_position - 1 - WINDOW_LEFT",
        "end of the common keys": "end = first_position + 1 + WINDOW_RIGHT",
        "first key of a row": " position - WINDOW_LEFT",
        "end of a row's keys": " + WINDOW_RIGHT\n",
    }.items()
    for fault, more in {"a key more": "1", "a key less": "-1"}.items()
} | {
    "first block, by the worst row": (
        "first_key = first_position",
        "first_key = end_position - 1",
    ),
    "end block, by the worst row": (
        "end_key = end_position",
        "end_key = 1 + first_position",
    ),
    "first common key, by the best row": (
        "end_position - 1 - WINDOW",
        "first_position - WINDOW",
    ),
    "end of the common keys, by the best row": (
        "end = first_position + 1",
        "end = end_position",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_number_is_noticed(fault: str) -> None:
    text, (right, wrong) = (
        support.kernel_text(KERNELS[FAULTY]),
        FAULTS[fault],
    )
    assert text.count(right) == 1
    with pytest.raises(AssertionError):
        check(Kernel(text.replace(right, wrong)), EDGES)
