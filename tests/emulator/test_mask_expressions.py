# SPDX-License-Identifier: Apache-2.0
"""Masks of expressions in the emulator, with what else a spec may say, and with faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import support
from fmha_gen.evidence.rehearsal import schedules
from fmha_gen.ops.cases import Case
from support import kernel_text

from .rehearsals import emulated_cases, findings, rehearsals, tag_of, written

HEAD = "op: fmha_fwd\ndtype: bf16\nhead_dim: 64\n"
SM90 = f"arch: sm90\n{HEAD}tile: {{q: 128, kv: 64}}\n"
SM100 = f"arch: sm100\n{HEAD}"
WIDE = HEAD.replace("64", "256")
CHUNKS = "mask: 'kv <= q and kv // 96 == q // 96'\n"
FIRST_KEYS = "mask: 'kv <= q and (q - kv < 100 or kv < 4)'\n"
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
    "sm90, first keys beside a window": (
        f"{SM90}{FIRST_KEYS}lse: true\n",
        ("gap_0", "gap_1", "gap_63", "gap_of_some", "slides", "short_kv", "rising"),
    ),
    "sm90, packed, two ranges": (
        f"{SM90}{FIRST_KEYS}heads: {{q_per_kv: 4}}\npack_gqa: true\n",
        ("gap_2", "slides", "no_key"),
    ),
    "sm90, capped, two ranges": (
        f"{SM90}{FIRST_KEYS}softcap: 30\nsink: true\n",
        ("gap_1", "saturated"),
    ),
    "sm90, two ranges in a cluster": (
        f"{WIDE}arch: sm90\n{FIRST_KEYS}cluster: [2, 1]\nmulticast: kv\n",
        ("gap_1", "slides", "odd_tiles"),
    ),
    "sm90, a range from each side": (
        # The first range moves, the second begins in the middle, and blocks behind a gap are whole.
        f"{SM90}mask: 'kv <= q + 9 and kv >= 5 and (kv < q // 3 or kv > q - 70)'\n",
        ("step_70", "gap_32", "gap_of_some", "slides", "few_rows"),
    ),
    "sm90, dilated": (
        f"{SM90}mask: 'kv <= q and q - kv < 200 and (q - kv) % 3 != 1'\n",
        ("left_1", "left_62", "slides", "short_kv"),
    ),
    "sm90, tests alone": (
        f"{SM90}mask: 'kv % 5 < 3 or not row % 2 == 1'\nlse: true\n",
        ("ragged", "step_5", "strided"),
    ),
    "sm90, tests beside two ranges": (
        f"{SM90}mask: 'kv <= q and (q - kv < 100 or kv < 40) and abs(kv - 7 * q) % 5 > 0'\n",
        ("gap_1", "slides"),
    ),
    "sm100, first keys beside a window": (
        f"{SM100}{FIRST_KEYS}lse: true\n",
        ("gap_0", "gap_1", "gap_127", "gap_of_some", "slides", "few_rows"),
    ),
    "sm100, two ranges, single": (
        f"{SM100}{FIRST_KEYS}schedule: single\n",
        ("gap_1", "gap_126"),
    ),
    "sm100, a pair, two ranges, by block": (
        f"{WIDE}arch: sm100\n{FIRST_KEYS}cluster: [2, 1]\ncta_group: 2\n",
        ("gap_1", "slides"),
    ),
    "sm100, dilated": (
        f"{SM100}mask: 'kv <= q and q - kv < 300 and (q - kv) % 4 == 0'\n",
        ("left_1", "slides"),
    ),
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


@pytest.mark.parametrize("kernel", support.rotated(KERNELS, 5))
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


@pytest.mark.parametrize("head", [SM90, SM100], ids=["sm90", "sm100"])
@pytest.mark.parametrize(
    "mask", ["kv <= q", "not q < kv", "kv < 9 and kv <= q or kv <= q"]
)
def test_an_expression_that_means_causal_is_the_causal_kernel(
    head: str, mask: str
) -> None:
    texts = [kernel_text(f"{head}mask: {each}\n") for each in ("causal", f"'{mask}'")]
    assert texts[0] == texts[1]


def test_what_follows_from_a_bound_costs_nothing() -> None:
    """A causal mask's chunks have its right edge."""
    text = kernel_text(SM90 + CHUNKS)
    assert "def keys_before" not in text
    assert "sees 96 * (q // 96) <= kv <= q." in text


WINDOW = "mask: causal\nwindow: {left: 300}\n"
SAME = {  # as causal, where no K is longer than 300
    "sm90, a window": (SM90, WINDOW),
    "sm100, a window": (SM100, WINDOW),
    "a gap that never begins": (SM90, "mask: 'kv <= q and (q - kv < 9 or kv < 301)'\n"),
    "a gap that never ends": (SM100, "mask: 'kv <= q and (q - kv < 301 or kv < 9)'\n"),
    "a test that all pass": (SM90, "mask: 'kv <= q and kv % 512 < 301'\n"),
}


@pytest.mark.parametrize("name", support.rotated(SAME, 2))
def test_what_hides_nothing_more_is_causal_bit_for_bit(
    name: str, tmp_path: Path
) -> None:
    head, mask = SAME[name]
    found: list[list[Any]] = []
    cases: list[Case] = []
    for text in ("mask: causal\n", mask):
        path = written(tmp_path, kernel_text(f"{head}{text}lse: true\n"))
        cases = cases or [
            case
            for case in emulated_cases(path)
            if case.data == "normal" and case.q > 1 and 65 < case.kv <= 300
        ]
        found.append([])
        small = sorted(cases, key=lambda case: case.work)[:2]
        for ready in rehearsals(path, cases=small)[1]:
            assert ready.run(schedules(0)[0]).findings == []
            found[-1] += [output.numbers() for output in ready.problem.outputs]
    causal, other = found
    assert len(causal) == 4
    for one, same in zip(causal, other, strict=True):
        assert (one == same).all()
