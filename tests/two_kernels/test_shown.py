# SPDX-License-Identifier: Apache-2.0
"""Records, tables, explain, diff, matrix and pictures have each kernel by itself."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import support
from diff import model
from engine import fake
from fmha_gen.build import records
from fmha_gen.compat import cells
from fmha_gen.diff import compare, kernels, report
from fmha_gen.evidence import table
from fmha_gen.planning.kernel_plan import KernelPlan
from fmha_gen.show import explain
from fmha_gen.show.picture import page

STEM = "k"
SMALL = model.report(setmaxnreg=(), registers=32, loops=())
BOTH = fake.of_two(SMALL, model.report())


def record(**changes: Any) -> records.Record:
    made = BOTH.to_json() | changes
    return records.merge_rung(
        None, kernel=STEM, body_sha256="b" * 64, rung="compiled", result=made
    )


def test_a_record_has_a_list_and_keeps_what_ran() -> None:
    known = record()
    assert [kernel["registers"] for kernel in known["compiled"]["kernels"]] == [32, 168]
    ran = {"gpu": "NVIDIA H200", "dsl": BOTH.dsl, "ptx_sha256": BOTH.ptx_sha256}
    known = records.merge_rung(
        known, kernel=STEM, body_sha256="b" * 64, rung="validated", result=ran
    )
    assert known["rung"] == "validated"
    again = records.merge_rung(
        known,
        kernel=STEM,
        body_sha256="c" * 64,
        rung="compiled",
        result=BOTH.to_json(),
    )
    assert again["rung"] == "validated"
    other = replace(BOTH, ptx_sha256="e" * 64).to_json()
    lost = records.merge_rung(
        known, kernel=STEM, body_sha256="c" * 64, rung="compiled", result=other
    )
    assert lost["rung"] == "compiled"


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        (("k_sums_0", "k_main_1"), ["sums", "main"]),
        (("k_sums_0", "k_sums_1"), ["k_sums_0", "k_sums_1"]),
        (("k_0", "k_main_1"), ["k_0", "k_main_1"]),
    ],
)
def test_kernels_are_named_without_the_files_name(entries, names) -> None:
    both = replace(
        BOTH,
        kernels=tuple(
            replace(kernel, entry=entry)
            for kernel, entry in zip(BOTH.kernels, entries, strict=True)
        ),
    )
    assert [*records.kernels(both.to_json(), STEM)] == names


def test_one_kernel_is_what_it_was() -> None:
    compiled = fake.report().to_json()
    assert "kernels" not in compiled
    assert records.kernels(compiled, STEM) == {"": compiled}
    assert table.registers(compiled) == "24 / 240"
    assert table.registers({}) == table.NOTHING


def test_tables_and_explain_name_each() -> None:
    assert table.registers(BOTH.to_json()) == "32, 24 / 240"
    plan = two_kernels()
    known = {**record(), "kernel": plan.stem}
    first, second = (
        words
        for rung, words in explain.evidence_rows(plan, known, "b" * 64)
        if rung == "compiled"
    )
    assert first.startswith("k_sums for sm_90a")
    assert "32 registers at launch; stack" in first
    assert "168 registers at launch, setmaxnreg 24 and 240; stack" in second


def two_kernels() -> KernelPlan:
    """A shipped plan with a kernel in front that has neither barriers nor shared memory."""
    plan = support.shipped_plan(support.SHIPPED[-1])
    (main,) = plan.kernels
    bare = replace(
        main,
        **dict.fromkeys(
            ("smem", "tmem", "barriers", "phases", "loads", "registers"), ()
        ),
        register_parts={},
        name="sums",
    )
    some = replace(bare, smem=main.smem[:2], name="prepare")
    return replace(plan, kernels=(bare, some, replace(main, name="main")))


def test_explain_and_pictures_have_a_section_for_each() -> None:
    plan = two_kernels()
    one = replace(plan, kernels=(replace(plan.kernels[-1], name=""),))
    titles = [
        block.split("\n")[0] for block in explain.render(plan, None).split("\n\n")
    ]
    alone = [block.split("\n")[0] for block in explain.render(one, None).split("\n\n")]
    own = alone[3:-2]  # beside title, spec, numbers, masks and evidence
    assert titles == [
        *alone[:3],
        "prepare: Shared memory of a CTA",
        *(f"main: {title}" for title in own),
        *alone[-2:],
    ]
    assert plan.smem_bytes == one.smem_bytes

    drawn, of_one = page.page(plan), page.page(one)
    assert drawn.height > of_one.height
    assert drawn.description.endswith(f"main: {of_one.description}")
    for kernel in plan.kernels:
        assert any(f">{kernel.name}<" in part for part in drawn.body)


def state(compiled, text: str = "") -> kernels.KernelState:
    text = text or model.kernel(STEM)
    known = model.record(STEM, text, compiled=compiled)
    return kernels.of_text(STEM, text, known, origin="here", path="k.py")


def test_diff_has_a_section_for_the_kernel_that_changed() -> None:
    spilling = fake.of_two(SMALL, model.report(loop=700, spills=9, stack_bytes=16))
    text = model.kernel(STEM, call="copy_all")
    change = compare.compare(state(BOTH), state(spilling, text))
    assert [each.text for each in change.regressions] == [
        "main: stack 0 -> 16 B per thread",
        "main: spills: 0 -> 9 local loads and stores",
    ]
    changed = {(row.kernel, row.name) for row in change.changed_rows}
    assert ("main", "stack [B]") in changed
    assert not any(kernel == "sums" for kernel, _ in changed)
    shown = report.render([change]).split("\n\n")
    place = shown.index("main")
    assert "stack [B]" in shown[place + 1]
    assert "instructions in the loop" in shown[place + 2]
    assert "sums" not in shown
    assert "sums: registers per thread 32" in " ".join(" ".join(shown).split())
    facts = report.to_json([change])["kernels"][0]["facts"]
    assert {fact["kernel"] for fact in facts} == {"", "sums", "main"}


def test_a_kernel_more_is_a_change() -> None:
    change = compare.compare(state(SMALL), state(BOTH, model.kernel(STEM, call="both")))
    names = {row.kernel for row in change.rows}
    assert names == {"", "sums", "main"}
    assert re.search(r"kernels +one +sums, main\n", report.render([change]))


def test_the_matrix_names_the_kernel_that_differs() -> None:
    recorded = record()["compiled"]

    def judged(first, second) -> cells.Cell:
        found = fake.of_two(first, second)
        return cells.judge(STEM, "4.9.0", recorded, found, timeout=1)

    assert judged(SMALL, model.report()).text == "same"
    assert judged(SMALL, model.report(total=2641)).text == "same, +1 instructions"
    more = judged(SMALL, model.report(registers=176))
    assert more.text == "changed: main: registers 168 -> 176"
    spills = judged(SMALL, model.report(spills=2, stack_bytes=8))
    assert spills.text == "SPILLS 8 bytes (2 loads, 0 stores)"
    alone = cells.judge(STEM, "4.9.0", recorded, SMALL, timeout=1)
    assert alone.text == "changed: kernels sums, main -> one"
