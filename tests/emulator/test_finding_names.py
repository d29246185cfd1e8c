# SPDX-License-Identifier: Apache-2.0
"""A finding names the Python line, the role and the pipeline."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import support
from fmha_gen.arch.sm90 import SMEM_ALIGN
from fmha_gen.build import captures
from fmha_gen.emulator import machine
from fmha_gen.emulator.lower import lower_kernels
from fmha_gen.emulator.report import Names
from fmha_gen.evidence import rehearsal
from fmha_gen.evidence.finding_names import names_of

from tests.emulator.rehearsals import emulated_cases, rehearsals

GENERATED = support.ROOT / "generated"
KERNELS = sorted(GENERATED.glob("sm*_*.py"))
SMALL = GENERATED / "sm90_d64_bf16_causal_lse.py"


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_every_barrier_tile_and_role_has_a_name(path: Path):
    text = path.read_text(encoding="utf-8")
    names = names_of(text)
    constants = support.constants(path.stem)
    rings = {name.split()[0] for name in names.barriers.values()}
    assert {"q"} < rings and ("kv" in rings) != ("k" in rings)
    assert len([n for n in names.barriers.values() if n.startswith("q full")]) == (
        constants["Q_STAGES"]
    )
    named = {constants[name]: name for name in constants if name.endswith("_BARRIER")}
    assert named and named.items() <= names.named_barriers.items()
    # Where the last tile ends, rounded up to the storage's alignment, shared memory ends.
    end = max(place.stop for place, _ in names.tiles) - machine.RESERVED
    (said,) = re.findall(r"Shared memory: (\d+) bytes per CTA", text)
    assert -(-end // SMEM_ALIGN) * SMEM_ALIGN == int(said)
    assert names.role(0) and names.role(4) and names.role(4) != " ()"


def test_a_finding_names_them():
    """O is handed to TMA without a proxy fence."""
    text, (ready,) = rehearsals(SMALL, cases=emulated_cases(SMALL)[:1])
    lines = text.split("\n")
    fences = [n for n, line in enumerate(lines) if "fence.proxy.async" in line]
    assert fences
    for number in fences:
        lines[number] = ""
    names = replace(
        names_of(SMALL.read_text(encoding="utf-8")),
        sources=captures.sources(SMALL, text, arch="sm90"),
    )
    programs = lower_kernels("\n".join(lines))
    told = dict.fromkeys(programs, names)
    damaged = replace(ready, programs=programs, names=told)
    result = damaged.run(rehearsal.schedules(0)[0])
    finding = next(text for text in result.findings if text.startswith("proxy-fence"))
    assert "shared memory (sQ)" in finding
    assert "compute QK, softmax and PV and store O" in finding
    assert re.search(rf"{SMALL.name}:\d+\]", finding)


def test_a_named_barrier_that_never_opens_is_named():
    """The stores of O wait for 160 threads, of which 128 come."""
    text, (ready,) = rehearsals(SMALL, cases=emulated_cases(SMALL)[:1])
    waits, count = re.subn(r"(bar(?:rier)?\.sync.*), 128;", r"\1, 160;", text)
    assert count
    damaged = lower_kernels(waits)
    names = dict.fromkeys(damaged, names_of(SMALL.read_text(encoding="utf-8")))
    result = replace(ready, programs=damaged, names=names).run(
        rehearsal.schedules(0)[0]
    )
    assert any("(STORE_BARRIER" in text for text in result.findings), result.findings


def test_a_name_is_of_what_is_there():
    tiles = ((range(2048, 4096), "sK"),)
    names = Names({1024: "k full, stage 0"}, {4: "STORE_BARRIER"}, tiles)
    assert names.named_barrier(4) == "barrier 4 (STORE_BARRIER)"
    assert names.named_barrier(3) == "barrier 3"
    assert names.barrier(1024) == "mbarrier 0x400 (k full, stage 0)"
    assert names.barrier(1032) == "mbarrier 0x408"
    assert (names.tile(2048), names.tile(4096), names.role(3)) == (" (sK)", "", "")
