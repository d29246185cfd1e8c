# SPDX-License-Identifier: Apache-2.0
"""Kernels for combinations that are not shipped: a digest of each one's text, a line each.

With the shipped kernels the specs of `unshipped.txt` have every pair of flags that 3,000 random
ones had. A line without a digest is a spec to add. `FMHA_GEN_ACCEPT=1` compiles the kernels of new
texts, holds them to the gate, and writes their digests; `fmha-gen diff` shows what changed in one.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections import defaultdict
from pathlib import Path

import pytest
import support
import yaml
from fmha_gen.arch import ARCHITECTURES
from fmha_gen.build import engine, render
from fmha_gen.host.executor import Local
from fmha_gen.planning import plan
from fmha_gen.planning.kernel_plan import KernelPlan

TABLE = Path(__file__).with_name("unshipped.txt")
DIGITS = 12  # of SHA-256
# Flags with one value in all kernels: what tells architectures apart, and what one cannot do.
CONSTANT = {
    "sm90": {"NAMES_ARCH", "PERSISTENT", "TENSOR_MEMORY", "UNEVEN"},
    "sm100": {
        *("BLOCK_DESCALE", "DQ_BY_ROWS", "LOG2_STATISTIC", "NAMES_ARCH"),
        *("TENSOR_MEMORY", "THIN"),
        *("FIRST_STORES", "HANDS_TURNS", "PACK_GQA", "PARTS_OF_BLOCKS", "V_PERMUTED"),
        *("KEYLESS_BLOCKS", "FALLING_SECTIONS", "LONG_LAST", "SHORTEST_EARLY"),
        *("CAPS_HEADS", "CLEARS_AHEAD", "HALF_SUMS", "IN_STRIPS", "PAIRED"),
        *("SCALED_SUMS", "SUMS_BEHIND_S"),
    },
}


@functools.cache
def unshipped() -> dict[str, KernelPlan]:
    """The plan of each line's spec, by the spec as the line has it."""
    fields = [line[DIGITS:].strip() for line in TABLE.read_text("utf-8").splitlines()]
    return {each: plan.resolve(support.load_text(text_of(each))) for each in fields}


def text_of(fields: str) -> str:
    return yaml.safe_dump({"op": "fmha_fwd"} | yaml.safe_load(f"{{{fields}}}"))


def test_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = set(TABLE.read_text("utf-8").splitlines())
    lines = [
        f"{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]} {fields}"
        for fields, kernel in unshipped().items()
        for text in [render.render_source(kernel)]
    ]
    new = [line[DIGITS:].strip() for line in lines if line not in known]
    if new and os.environ.get(support.ACCEPT) == "1":
        specs = tmp_path / "specs"
        specs.mkdir()
        for number, fields in enumerate(new):
            (specs / f"unshipped_{number}.yaml").write_text(text_of(fields), "utf-8")
        built = engine.build([specs], tmp_path / "generated", executor=Local(2))
        assert built.failures == ()
        assert {kernel.rung for kernel in built.kernels} == {"compiled"}
    support.check_accepted(TABLE, "\n".join([*lines, ""]), capsys)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_flag_is_on_in_some_text_and_off_in_another(arch: str) -> None:
    shipped = map(support.shipped_plan, support.SHIPPED)
    values = defaultdict(set)
    for kernel in (*shipped, *unshipped().values()):
        if kernel.arch == arch:
            for flag, value in render.decided(kernel.context)[0].items():
                values[flag].add(value)
    assert {flag for flag in values if len(values[flag]) == 1} == CONSTANT[arch]
