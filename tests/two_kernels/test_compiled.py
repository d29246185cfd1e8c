# SPDX-License-Identifier: Apache-2.0
"""Each kernel is counted and gated by itself, and the digests are about all launches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from engine import fake
from fmha_gen.build import captures, toolchain
from fmha_gen.emulator import ptx
from fmha_gen.emulator.launch import Called, Launch
from fmha_gen.errors import CheckFailed

from .test_emulated import FIRST, KERNEL, SECOND, TEXT, captured, replaced

# An array that is indexed at run time lies in local memory.
ON_THE_STACK = replaced(
    "    out[row, column] = x[row, column] / sums[row]\n",
    """    held = cute.make_rmem_tensor((COLUMNS,), Float32)
    for each in range(COLUMNS):
        held[each] = x[row, each]
    out[row, column] = held[column] / sums[row]
""",
)


@pytest.fixture(scope="module")
def report() -> toolchain.CompileReport:
    return toolchain.compile_kernel(TEXT, KERNEL.stem)


def test_each_kernel_is_counted(report: toolchain.CompileReport) -> None:
    first, second = report.kernels
    assert (first.entry, second.entry) == (FIRST, SECOND)
    assert (first.instructions["SHFL"], second.instructions["SHFL"]) == (5, 0)
    for kernel in report.kernels:
        assert 0 < kernel.registers < 64
        assert 10 < kernel.instructions["total"] < 200
    assert toolchain.gate(report) == []


def test_the_list_survives_json(report: toolchain.CompileReport) -> None:
    data = json.loads(json.dumps(report.to_json()))
    assert [kernel["entry"] for kernel in data["kernels"]] == [FIRST, SECOND]
    assert toolchain.CompileReport.from_json(data) == report
    with pytest.raises(TypeError):
        toolchain.CompileReport.from_json(data | {"registers": 8})


def test_the_gate_names_the_kernel_that_fails(report: toolchain.CompileReport) -> None:
    worse = toolchain.compile_kernel(ON_THE_STACK, KERNEL.stem)
    assert worse.kernels[0] == report.kernels[0]
    failures = toolchain.gate(worse)
    assert any("of stack" in failure for failure in failures)
    assert all(failure.startswith(f"{SECOND}: ") for failure in failures), failures

    clean = fake.report()
    serialised = replace(clean.kernels[0].wgmma, serialised=3)
    both = fake.of_two(clean, fake.report(wgmma=serialised))
    assert toolchain.gate(both) == [
        "k_main_1: serialised wgmma: 3 of 8 wait for the k-step before them"
    ]


def test_a_listing_that_lacks_a_kernel_is_refused() -> None:
    found = toolchain.listing(TEXT, KERNEL.stem, "sm_90a")
    about = {"stem": KERNEL.stem, "arch": "sm_90a", "dsl": "4.8.1"}
    lines = found.usage.replace(f"Function {SECOND}:", "Function other:")
    with pytest.raises(CheckFailed, match="the PTX holds 2 kernels, the cubin 2"):
        toolchain.report(found.ptx, lines, found.disassembly, **about)


def test_the_launch_digest_is_about_order_and_stream_of_all_launches() -> None:
    text, launches = captured(KERNEL)
    kernels = ptx.parse_kernels(text)

    def digest(*each: Launch) -> str:
        return captures.launch_digest(kernels, [Called(each, "", (), {})])

    first, second = launches
    known = digest(first, second)
    assert digest(*captured(KERNEL)[1]) == known
    others = (
        (second, first),
        (first,),
        (first, second, second),
        (first, replace(second, stream=0)),
        (first, replace(second, programmatic=True)),
        (first, replace(second, grid=(1, 1, 1))),
    )
    assert len({known, *(digest(*other) for other in others)}) == 1 + len(others)


def test_lines_of_both_kernels_are_named(tmp_path: Path) -> None:
    text, _ = captured(KERNEL)
    named = captures.sources(KERNEL, text, arch="sm90")
    source = TEXT.splitlines()
    for kernel, words in ((FIRST, "warp_reduction_sum"), (SECOND, "/ sums[row]")):
        lines = [each.line for each in ptx.parse_kernels(text)[kernel].instructions]
        told = {named[line] for line in lines if line in named}
        number = next(n for n, line in enumerate(source, 1) if words in line)
        assert f"{KERNEL.name}:{number}" in told
