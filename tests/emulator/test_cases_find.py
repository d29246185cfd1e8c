# SPDX-License-Identifier: Apache-2.0
"""Each of these faults is what one of the emulator's cases is there for, and that case finds it.

That it finds nothing in the kernel as it is says the kernel's record.
"""

from __future__ import annotations

import pytest
import support

from .rehearsals import damaged, findings

FAULTS = {
    "the last section is cut like the others": (
        "sm90_d64_bf16_causal_lse",
        "sections",
        "last = section == problem.last_section",
        "last = section > problem.last_section",
        "of out: ",
    ),
    "all heads are one section of the last one's size": (
        "sm90_d128_fp16_causal_lse_gqa4",
        "sections",
        "last = section == problem.last_section",
        "last = section >= 0",
        "of out: ",
    ),
    "a limit below 0 is compared by its bits": (
        "sm90_d64_bf16_causal_lse",
        "long_kv",
        "has_limit = (limit >= 0.0) & (reference <= FAR_REFERENCE)",
        "has_limit = reference <= FAR_REFERENCE",
        "of out: ",
    ),
    "a reference falls with S": (
        "sm90_d64_bf16_causal_lse",
        "long_kv",
        "stats.max[r] = cute.arch.fmax(stats.max[r], row_max(acc_S, r))",
        "stats.max[r] = row_max(acc_S, r)",
        "of out: ",
    ),
    "a Q stage is freed by an arrival too few": (
        "sm90_d256_bf16_full",
        "short_kv",
        "Q_RELEASES = 8 ",
        "Q_RELEASES = 7 ",
        "wgmma may still be reading",
    ),
    "rows beyond the end are stored": (
        "sm90_d192x128_bf16_causal_lse",
        "ragged",
        "if row + ROW_STEP * r < problem.seqlen_q:\n            store_row",
        "if row >= 0:\n            store_row",
        "elements outside out were written",
    ),
    "a packed row is taken for its position in the mask": (
        "sm90_d128_bf16_causal_gqa8_pack_t64x128",
        "edge",
        "position = (row + ROW_STEP * r) // Q_PER_KV",
        "position = row + ROW_STEP * r",
        "of out: wrong",
    ),
    "a packed tile is taken for as many positions as rows": (
        "sm90_d128_bf16_causal_gqa8_pack_t64x128",
        "edge",
        "common_keys(q_tile * TILE_POSITIONS,",
        "common_keys(q_tile * TILE_Q,",
        "of out: wrong",
    ),
    "only the first of a group's packed rows get an LSE": (
        "sm90_d128_bf16_full_gqa8_pack_lse",
        "ragged",
        "if row + ROW_STEP * r < problem.seqlen_q * Q_PER_KV:",
        "if row + ROW_STEP * r < problem.seqlen_q:",
        "of lse: not written",
    ),
    "a quad is transposed by half": (
        "sm90_d192x128_bf16_causal_lse",
        "ragged",
        "for step in (1, 2):",
        "for step in (1,):",
        "of out: wrong",
    ),
}


@pytest.mark.parametrize("fault", support.rotated(FAULTS, 4))
def test_a_fault_is_found(fault, tmp_path):
    stem, tag, right, wrong, finding = FAULTS[fault]
    found = findings(damaged(tmp_path, stem, right, wrong), tag)
    assert any(finding in text for text in found), found
