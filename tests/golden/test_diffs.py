# SPDX-License-Identifier: Apache-2.0
"""One line of a spec is edited: the whole diff of its kernel, and how many lines it may have.

A changed line counts twice, as removed and as added, and the digest line counts too. The digests
are left out of the texts, where they would only say again that something changed.
`FMHA_GEN_ACCEPT=1` writes new texts under `diffs/`, and prints what changed.
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
    base: str  # the spec's fields beyond arch and op
    old: str
    new: str
    budget: int
    arch: str = "sm90"


D64 = "dtype: bf16\nhead_dim: 64\n"
D128 = "dtype: bf16\nhead_dim: 128\n"
CLUSTER = "heads: {q_per_kv: 2}\ncluster: [2, 1]\nmulticast: kv\n"

EDITS = {
    "stages_kv": Edit(D64 + "stages: {kv: 2}\n", "kv: 2", "kv: 3", NUMBER),
    "stages_kv_alone": Edit(
        D128 + "tile: {kv: 64}\nstages: {kv: 2}\n", "s: {kv: 2}", "s: {kv: 3}", NUMBER
    ),
    "tile_kv": Edit(D64 + "tile: {kv: 128}\n", "kv: 128", "kv: 64", NUMBER),
    "q_per_kv": Edit(D128 + "heads: {q_per_kv: 2}\n", "kv: 2", "kv: 8", NUMBER),
    "seqlen_kv": Edit(
        D128 + "seqlen: {q: 4096, kv: 4096}\n", "kv: 4096", "kv: 2048", NUMBER
    ),
    "dtype": Edit(D128 + "mask: causal\n", "bf16", "fp16", FEATURE),
    "mask": Edit(D128 + "mask: none\n", "mask: none", "mask: causal", FEATURE),
    "multicast": Edit(
        D128 + "cluster: [2, 1]\nmulticast: none\n", ": none", ": kv", FEATURE
    ),
    "seqlen_fixed": Edit(D128 + "seqlen: dynamic\n", "dynamic", "4096", FEATURE),
    "pack_gqa": Edit(
        D128
        + "heads: {q_per_kv: 8}\npack_gqa: false\nmask: causal\nlse: true\n"
        + "cluster: [2, 1]\nmulticast: kv\n",
        "pack_gqa: false",
        "pack_gqa: true",
        FEATURE,
    ),
    "cluster": Edit(D128 + CLUSTER, "[2, 1]", "[1, 2]", FEATURE),
    "sm100_stages_kv": Edit(
        D64 + "stages: {kv: 4}\n", "kv: 4", "kv: 5", NUMBER, "sm100"
    ),
    "sm100_tile_kv": Edit(
        D64 + "tile: {kv: 128}\nstages: {kv: 4}\n",
        "{kv: 128}",
        "{kv: 64}",
        NUMBER + 14,  # the columns of S and P, the tilers
        "sm100",
    ),
    "sm100_dtype": Edit(D128 + "mask: causal\n", "bf16", "fp16", FEATURE, "sm100"),
    "sm100_mask": Edit(
        D128 + "lse: true\nmask: none\n", ": none", ": causal", FEATURE, "sm100"
    ),
    "sm100_seqlen_fixed": Edit(
        D128 + "seqlen: dynamic\n", "dynamic", "4096", FEATURE, "sm100"
    ),
    "sm100_multicast": Edit(
        D128 + "cluster: [2, 1]\nmulticast: none\n", ": none", ": kv", FEATURE, "sm100"
    ),
    "sm100_cta_group": Edit(
        D128 + "mask: causal\ncluster: [2, 1]\ncta_group: 1\n",
        "group: 1",
        "group: 2",
        FEATURE,
        "sm100",
    ),
    "sm100_head_dim": Edit(
        D128 + "mask: causal\n", "128", "{qk: 192, v: 128}", FEATURE, "sm100"
    ),
}

# What else the spec says when `lse` is turned off.
LSE = {
    "lse": D64 + "mask: causal\n",
    "lse_full_s4096": D128 + "seqlen: 4096\n",
    "lse_cluster": D128 + CLUSTER + "mask: causal\nseqlen: {q: 1000}\n",
    "lse_pack": D128 + "heads: {q_per_kv: 8}\npack_gqa: true\n",
    "lse_d256": "dtype: fp16\nhead_dim: 256\n",
    "sm100_lse": D128 + "mask: causal\n",
    "sm100_lse_full_q1000": D64 + "seqlen: {q: 1000}\nschedule: single\n",
}


def difference(before: str, after: str, arch: str) -> tuple[str, int]:
    """Return the diff of two specs' kernels without digest lines, and how many lines change."""
    assert before != after
    texts = [
        support.kernel_text(f"arch: {arch}\nop: fmha_fwd\n{fields}")
        for fields in (before, after)
    ]
    whole = support.unified_diff(*texts, "before", "after")
    shown = support.unified_diff(*map(without_digests, texts), "before", "after")
    return shown, sum(map(len, support.changed_lines(whole)))


def without_digests(text: str) -> str:
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("spec sha256:")]
    assert len(lines) == len(kept) + 1
    return "".join(kept)


@pytest.mark.parametrize("name", EDITS)
def test_edit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    edit = EDITS[name]
    assert edit.base.count(edit.old) == 1
    edited = edit.base.replace(edit.old, edit.new)
    shown, changed = difference(edit.base, edited, edit.arch)
    support.check_accepted(DIFFS / f"{name}.diff", shown, capsys)
    assert changed <= edit.budget, shown


@pytest.mark.parametrize("name", LSE)
def test_lse_off_changes_only_what_names_the_outputs(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields, arch = LSE[name], "sm100" if name.startswith("sm100") else "sm90"
    shown, changed = difference(f"{fields}lse: true\n", f"{fields}lse: false\n", arch)
    support.check_accepted(DIFFS / f"{name}.diff", shown, capsys)
    removed, added = support.changed_lines(shown)
    assert added[0] == '    "lse": False,' and all(
        "out" in x or "Tensor" in x for x in added[1:]
    )
    assert '    "lse": True,' in removed
    assert changed <= FEATURE


def test_every_text_has_its_edit() -> None:
    assert {path.stem for path in DIFFS.iterdir()} == EDITS.keys() | LSE.keys()
