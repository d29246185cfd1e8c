# SPDX-License-Identifier: Apache-2.0
"""One field of a spec is edited: how many lines of its kernel change, and which for a feature.

A changed line counts twice, as removed and as added, and the digest line counts too. The digests
are left out of the stored diffs, where they would only say again that something changed. The
property tests hold random sm90 specs to the same budgets. `FMHA_GEN_ACCEPT=1` writes new diffs
under `diffs/`, and prints what changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import support

DIFFS = Path(__file__).parent / "diffs"
NUMBER = 12  # changed lines that an edit of a number may cause
FEATURE = 120  # changed lines that turning a feature on or off may cause


class Edit(NamedTuple):
    """Of one field; the others are those of `beside`, bf16 and a head dim of 128."""

    before: str
    after: str
    beside: str = ""
    budget: int = FEATURE
    arch: str = "sm90"

    def text(self, field: str) -> str:
        defaults = {"dtype": "dtype: bf16", "head_dim": "head_dim: 128"}
        chosen = [f"arch: {self.arch}", "op: fmha_fwd", field]
        chosen += self.beside.split("; ") if self.beside else []
        present = {each.partition(":")[0] for each in chosen}
        chosen += [line for name, line in defaults.items() if name not in present]
        return "".join(f"{line}\n" for line in chosen)


GROUP = "heads: {q_per_kv: 8}; mask: causal; lse: true; cluster: [2, 1]; multicast: kv"
FEATURES = {
    "lse": Edit("lse: true", "lse: false", "head_dim: 64; mask: causal"),
    "sink": Edit("sink: false", "sink: true", "head_dim: 64; mask: causal; lse: true"),
    "bias": Edit(
        "bias: none", "bias: {shape: [1, h, q, kv], dtype: bf16}", "lse: true", 280
    ),
    "mask": Edit("mask: none", "mask: causal"),
    "window": Edit("window: {}", "window: {left: 1023}", "mask: causal", 140),
    # Four tensors, and no order of tiles by their length.
    "blocks": Edit("blocks: derived", "blocks: lists", "mask: causal", 3 * FEATURE),
    "documents": Edit("documents: false", "documents: true", "mask: causal", 240),
    "prefix": Edit("prefix: false", "prefix: true", "mask: causal", 160),
    "multicast": Edit("multicast: none", "multicast: kv", "cluster: [2, 1]"),
    "seqlen_fixed": Edit("seqlen: dynamic", "seqlen: 4096"),
    "pack_gqa": Edit("pack_gqa: false", "pack_gqa: true", GROUP),
    "cluster": Edit(
        "cluster: [2, 1]", "cluster: [1, 2]", "heads: {q_per_kv: 2}; multicast: kv"
    ),
    # Without references of rows: what renews them goes.
    "softcap": Edit(
        "softcap: none",
        "softcap: 30",
        "mask: causal; tile: {q: 192, kv: 64}",
        2 * FEATURE,
    ),
    "softcap_50_fp16": Edit("softcap: none", "softcap: 50", "dtype: fp16; lse: true"),
    "sm100_softcap": Edit(
        "softcap: none", "softcap: 30", "mask: causal; lse: true", arch="sm100"
    ),
    "alibi": Edit("alibi: false", "alibi: true", "mask: causal; lse: true", 260),
    "score": Edit("score: none", "score: s - 0.125 * abs(kv - q)", "lse: true", 260),
    "score_scaled": Edit("score: none", "score: 2 * s - row / 64", "lse: true"),
    "sm100_alibi": Edit(
        "alibi: false", "alibi: true", "mask: causal; lse: true", 160, "sm100"
    ),
    "sm100_lse": Edit("lse: true", "lse: false", "mask: causal", arch="sm100"),
    "sm100_bias": Edit("bias: none", "bias: bf16", "mask: causal", 160, "sm100"),
    "sm100_sink": Edit("sink: false", "sink: true", "mask: causal", arch="sm100"),
    "sm100_mask": Edit("mask: none", "mask: causal", "lse: true", arch="sm100"),
    "sm100_window": Edit(
        "window: {}", "window: {left: 255, right: 256}", "lse: true", 140, "sm100"
    ),
    "sm100_blocks": Edit(
        "blocks: derived", "blocks: lists", "lse: true", 3 * FEATURE, "sm100"
    ),
    "sm100_multicast": Edit(
        "multicast: none", "multicast: kv", "cluster: [2, 1]", arch="sm100"
    ),
    "sm100_cta_group": Edit(
        "cta_group: 1", "cta_group: 2", "mask: causal; cluster: [2, 1]", arch="sm100"
    ),
}
OTHERS = [
    Edit("heads: {q_per_kv: 2}", "heads: {q_per_kv: 8}", budget=NUMBER),
    Edit("seqlen: 4096", "seqlen: {q: 4096, kv: 2048}", budget=NUMBER),
    Edit("stages: {kv: 4}", "stages: {kv: 5}", "head_dim: 64", NUMBER, "sm100"),
    # 14 more for the columns of S and P, and the tilers.
    Edit(
        "tile: {kv: 128}",
        "tile: {kv: 64}",
        "head_dim: 64; stages: {kv: 4}",
        NUMBER + 14,
        "sm100",
    ),
    Edit("dtype: bf16", "dtype: fp16", "mask: causal", arch="sm100"),
    Edit("seqlen: dynamic", "seqlen: 4096", arch="sm100"),
    Edit("head_dim: 128", "head_dim: {qk: 192, v: 128}", "mask: causal", arch="sm100"),
]


def difference(edit: Edit) -> str:
    """The diff of both kernels without digest lines; it keeps to the budget with them."""
    texts = [support.kernel_text(edit.text(one)) for one in (edit.before, edit.after)]
    whole = support.unified_diff(*texts, "before", "after")
    changed = sum(map(len, support.changed_lines(whole)))
    assert 0 < changed <= edit.budget, whole
    return support.unified_diff(*map(without_digests, texts), "before", "after")


def without_digests(text: str) -> str:
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("spec sha256:")]
    assert len(lines) == len(kept) + 1
    return "".join(kept)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    support.check_accepted(DIFFS / f"{name}.diff", difference(FEATURES[name]), capsys)


@pytest.mark.parametrize("edit", OTHERS, ids=lambda edit: edit.after)
def test_another_value(edit: Edit) -> None:
    assert difference(edit)


def test_every_diff_has_its_edit() -> None:
    assert {path.stem for path in DIFFS.iterdir()} == FEATURES.keys()
