# SPDX-License-Identifier: Apache-2.0
"""The table of models says what the specs say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "codegen" / "docs" / "models.md"
# How a kernel computes, and what it writes besides.
HOW = {"pack_gqa", "cluster", "multicast", "tile", "stages", "schedule", "lse"}
ROWS = [
    [cell.strip().strip("`") for cell in line.strip("| \n").split(" | ")]
    for line in TABLE.read_text("utf-8").splitlines()
    if re.match(r"\| \S+.*`sm\d+_", line)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_the_kernel_of_a_layer_is_made_from_what_its_row_says(row: list[str]) -> None:
    _, _, heads, head_dim, fields, stem, *_ = row
    spec: dict[str, Any] = yaml.safe_load((ROOT / f"specs/{stem}.yaml").read_text())
    query, kv = map(int, heads.split("/"))
    assert spec.pop("heads", {"q_per_kv": 1})["q_per_kv"] * kv == query
    assert spec.pop("head_dim") == int(head_dim)
    assert (spec.pop("op"), spec.pop("dtype")) == ("fmha_fwd", "bf16")
    assert stem.startswith(spec.pop("arch"))
    said = {name: value for name, value in spec.items() if name not in HOW}
    assert said == yaml.safe_load(fields)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_windows_chunks_and_caps_are_those_of_the_configuration(row: list[str]) -> None:
    fields, config = yaml.safe_load(row[4]), "".join(row[6:])
    for name, said in (
        ("sliding_window", fields.get("window", {}).get("left", -1) + 1),
        ("attn_logit_softcapping", fields.get("softcap", 0)),
        (
            "attention_chunk_size",
            int((re.findall(r"// (\d+)", fields.get("mask", "")) or "0")[0]),
        ),
    ):
        known = re.search(rf"\b{name}: ([\d.]+)", config)
        assert said == (float(known[1]) if known else 0)


def test_every_model_of_the_table_was_found() -> None:
    lines = TABLE.read_text("utf-8").splitlines()
    assert len(ROWS) == sum(line.startswith("| ") for line in lines) - 2
