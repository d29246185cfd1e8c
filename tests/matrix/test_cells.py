# SPDX-License-Identifier: Apache-2.0
"""From a compile and a record to a verdict."""

from __future__ import annotations

from typing import Any

import pytest
from fmha_gen.build.toolchain import LoopReport, WgmmaReport
from fmha_gen.compat import cells, document
from fmha_gen.compat.cells import Kind
from fmha_gen.errors import CheckFailed, OutOfTime

from tests.engine.fake import COUNTS, report

RECORDED = report().to_json()


def judged(**changes: Any) -> cells.Cell:
    found = report(**changes)
    return cells.judge("k", "4.9.0", RECORDED, found, timeout=300)


def test_what_is_as_recorded_is_the_same() -> None:
    cell = judged()
    assert (cell.kind, cell.details, cell.text, cell.brief) == (
        *(Kind.SAME, ()),
        *("same", "same"),
    )


@pytest.mark.parametrize(
    ("total", "text"),
    [
        (100, "same, +1 instructions"),
        (90, "same, -9 instructions"),
        (102, "changed: instructions 99 -> 102"),
    ],
)
def test_a_few_instructions_may_differ_and_are_told(total: int, text: str) -> None:
    cell = judged(instructions=COUNTS | {"total": total}, ptx_sha256="e" * 64)
    assert cell.text == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"registers": 160}, "changed: registers 168 -> 160"),
        ({"setmaxnreg": (24, 232)}, "changed: setmaxnreg 24 / 240 -> 24 / 232"),
        (
            {"static_shared_bytes": 2048},
            "changed: static shared memory 1024 -> 2048",
        ),
        (
            {"loops": (LoopReport("consumer", COUNTS | {"total": 101}, 0),)},
            "changed: consumer loops 99 -> 101",
        ),
        (
            {"loops": 5 * (LoopReport("consumer", COUNTS, 0),)},
            "changed: consumer loops 99 -> 495 in 5",
        ),
        ({"loops": ()}, "changed: consumer loops 99 -> none"),
        (
            {"wgmma": WgmmaReport(8, 2, 1, 8, 1, 1, 0)},
            "changed: wgmma groups 2 -> 1",
        ),
        ({"instructions": COUNTS | {"HGMMA": 7}}, "changed: HGMMA 8 -> 7"),
    ],
)
def test_what_speed_shows_in_is_told(changes: dict[str, Any], text: str) -> None:
    cell = judged(**changes)
    assert (cell.kind, cell.text, cell.brief) == (Kind.CHANGED, text, text)


def test_a_table_shows_the_first_change() -> None:
    cell = judged(registers=160, setmaxnreg=(24, 232))
    assert cell.brief == "changed: registers 168 -> 160 and 1 more"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"stack_bytes": 112}, "SPILLS 112 bytes (0 loads, 0 stores)"),
        ({"local_bytes": 8}, "SPILLS 8 bytes (0 loads, 0 stores)"),
        (
            {"instructions": COUNTS | {"LDL": 55, "STL": 73}, "stack_bytes": 112},
            "SPILLS 112 bytes (55 loads, 73 stores)",
        ),
    ],
)
def test_a_spill_is_worse_than_other_registers(
    changes: dict[str, Any], text: str
) -> None:
    cell = judged(registers=255, **changes)
    assert (cell.kind, cell.text) == (Kind.SPILLS, text)


def test_a_serialised_wgmma_is_unfit() -> None:
    cell = judged(wgmma=WgmmaReport(8, 2, 1, 8, 2, 1, 3))
    assert cell.kind is Kind.UNFIT
    assert "3 of 8 wait" in cell.text


def test_what_does_not_compile_says_why_on_one_line() -> None:
    failure = CheckFailed(
        "k: does not compile\n"
        '    storage = memory.Allocator()\n  File "k.py", line 3\n'
        "  AttributeError: module 'cutlass' has no attribute 'memory'\n"
        "  Suggestion: upgrade"
    )
    cell = cells.judge("k", "4.7.1", RECORDED, failure, timeout=300)
    assert (cell.kind, cell.brief) == (Kind.BROKEN, "does not compile")
    assert cell.details == (
        "AttributeError: module 'cutlass' has no attribute 'memory'",
    )


def test_a_failure_without_an_exception_shows_its_last_line() -> None:
    assert cells.reason("k: does not compile\n  ptxas fatal\n  abort\n") == "abort"


def test_a_hang_is_told_with_its_time() -> None:
    cell = cells.judge("k", "4.6.0", RECORDED, OutOfTime("k"), timeout=12.5)
    assert (cell.kind, cell.text) == (Kind.HUNG, "hung after 12.5 s")


def test_a_wide_table_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = "sm100_d128_bf16_causal_gqa4_c2x1_cta2_lse"
    detail = "wgmma groups 2 -> 1 and instructions 1234 -> 5678 of all loops together"
    versions = ("4.6.1", "4.7.1", "4.8.1")
    document.show(
        [
            cells.Cell(kernel, dsl, Kind.CHANGED, (detail, "x"), emulated="1 cases")
            for dsl in versions
        ]
    )
    _, row = capsys.readouterr().out.splitlines()
    assert row.split("  ")[0] == kernel
    assert row.count(f"changed: {detail} and 1 more; emulated") == len(versions)


def test_brackets_of_a_title_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    document.show([cells.Cell("k", "4.8.1[cu13]", Kind.SAME)])
    titles, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (titles, row) == (["kernel", "4.8.1[cu13]"], ["k", "same"])
