# SPDX-License-Identifier: Apache-2.0
"""Masks of expressions in the emulator, with what else a spec may say, and with faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from fmha_gen.evidence.rehearsal import schedules
from support import kernel_text

from .rehearsals import emulated_cases, findings, rehearsals, tag_of, written

HEAD = "op: fmha_fwd\ndtype: bf16\nhead_dim: 64\n"
SM90 = f"arch: sm90\n{HEAD}tile: {{q: 128, kv: 64}}\n"
SM100 = f"arch: sm100\n{HEAD}"
CHUNKS = "mask: 'kv <= q and kv // 96 == q // 96'\n"
KERNELS = {
    "sm90, chunks": (f"{SM90}{CHUNKS}lse: true\n", ("step_95", "step_257", "few_rows")),
    "sm90, chunks seen whole": (
        f"{SM90}mask: 'kv // 200 == q // 200'\ncluster: [2, 1]\nmulticast: kv\n",
        ("step_201", "step_529"),
    ),
    "sm90, packed": (
        f"{SM90}{CHUNKS}heads: {{q_per_kv: 4}}\npack_gqa: true\n",
        ("step_97", "half"),
    ),
    "sm90, several bounds on a side": (
        f"{SM90}mask: 'kv <= q + 7 and kv < 100 and 2 * kv >= q and kv > q - 300'\n",
        ("step_101", "rising"),
    ),
    "sm90, beside a window": (
        f"{SM90}{CHUNKS}window: {{left: 70}}\n",
        ("step_96", "ragged"),
    ),
    "sm100, chunks": (f"{SM100}{CHUNKS}", ("step_97", "few_rows")),
    # Rows beyond the last one would see blocks that it does not.
    "sm100, half, single": (
        f"{SM100}mask: '2 * kv <= q + 40'\nschedule: single\nlse: true\n",
        ("step_209", "step_39"),
    ),
}
FAULTS = {  # kernel, case, what stands there once, what stands there then
    "a chunk too late": (
        *("sm90, chunks", "step_257"),
        *("return 96 * (q // 96)", "return 96 * (q // 96) + 1"),
    ),
    "a chunk too early": (
        *("sm90, chunks", "step_257"),
        *("return 96 * (q // 96)", "return 96 * (q // 96) - 1"),
    ),
    "rounded up": (
        *("sm90, chunks seen whole", "step_529"),
        *("return 200 * (q // 200) + 200", "return 200 * ((q + 1) // 200) + 200"),
    ),
    "the looser bound": (
        *("sm90, several bounds on a side", "rising"),
        *("cutlass.max((q + 1) // 2, q - 299)", "cutlass.min((q + 1) // 2, q - 299)"),
    ),
    "keys before the last position": (
        *("sm100, half, single", "step_39"),
        *("seqlen_q) - 1\n", "seqlen_q)\n"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_mask_is_what_rows_see(kernel: str, tmp_path: Path) -> None:
    spec, tags = KERNELS[kernel]
    path = written(tmp_path, kernel_text(spec))
    cases = [case for case in emulated_cases(path) if tag_of(case) in tags]
    assert {*map(tag_of, cases)} == {*tags}
    for ready in rehearsals(path, cases=cases)[1]:
        assert ready.run(schedules(0)[0]).findings == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_bound_is_found(fault: str, tmp_path: Path) -> None:
    kernel, tag, right, wrong = FAULTS[fault]
    text = kernel_text(KERNELS[kernel][0])
    assert text.count(right) == 1
    assert findings(written(tmp_path, text.replace(right, wrong)), tag)


def test_an_expression_that_means_causal_is_the_causal_kernel() -> None:
    texts = [
        kernel_text(f"{SM90}mask: {mask}\n") for mask in ("causal", "'not q < kv'")
    ]
    assert texts[0] == texts[1]


def test_what_follows_from_a_bound_costs_nothing() -> None:
    """A causal mask's chunks have its right edge."""
    text = kernel_text(SM90 + CHUNKS)
    assert "def keys_before" not in text
    assert "sees 96 * (q // 96) <= kv <= q." in text
