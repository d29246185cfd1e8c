# SPDX-License-Identifier: Apache-2.0
"""What a reader gets to see, as whole texts.

`FMHA_GEN_ACCEPT=1` writes new ones under `expected/`, and prints what changed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import support
from fmha_gen.build import toolchain
from fmha_gen.diff import kernels, report
from fmha_gen.diff.compare import KernelChange, compare

from . import model

EXPECTED = Path(__file__).parent / "expected"
SCREEN = 50  # [lines]


def state(
    stem: str,
    text: str,
    *rungs: str,
    origin: str = "HEAD",
    compiled: toolchain.CompileReport | None = None,
    proven: str = "",
) -> kernels.KernelState:
    """A side. proven: the text that the record speaks for, if it is another one."""
    known = model.record(stem, proven or text, *rungs, compiled=compiled)
    found = kernels.of_text(stem, text, known, origin=origin, path=f"specs/{stem}.yaml")
    if found.compiled is None and compiled is not None:  # measured just now
        made = replace(compiled, ptx_sha256=model.ptx_of(text))
        found = replace(kernels.with_compile(found, made), built=False)
    return found


def one_number() -> list[KernelChange]:
    old, new = model.kernel("a", 2), model.kernel("a", 3)
    before = state("a", old, "emulated", "validated")
    made = model.report(loop=620)
    after = state("a", new, origin="working tree", compiled=made, proven=old)
    return [compare(before, after)]


def comment_only() -> list[KernelChange]:
    old, new = model.kernel("a"), model.kernel("a", comment="Loads one tile.")
    before = state("a", old, "emulated", "validated")
    known = {"origin": "v2", "compiled": model.report(), "proven": old}
    return [compare(before, state("a", new, "emulated", "validated", **known))]


def spill() -> list[KernelChange]:
    """The same text and result by another DSL: what no test of numbers sees."""
    text = model.kernel("a")
    before = state("a", text, "validated")
    spilled = model.report(
        dsl="4.8.2", stack_bytes=112, spills=55, registers=176, loop=722, total=2800
    )
    after = state("a", text, "validated", origin="v2", compiled=spilled)
    return [compare(before, after)]


def not_compiled() -> list[KernelChange]:
    """A kernel that no record speaks for and nobody compiled."""
    old, new = model.kernel("a", 2), model.kernel("a", 3)
    before = state("a", old, "validated")
    return [compare(before, state("a", new, origin="v2", proven=old))]


def template() -> list[KernelChange]:
    """One line in all kernels, another one in two, one that came, one that went."""
    changes = []
    for stem in ("a", "b", "c", "d"):
        old = model.kernel(stem)
        new = model.kernel(
            stem,
            call="copy_all",
            width="WIDTH + 1" if stem in ("b", "c") else "WIDTH",
        )
        made = model.report(loop=600, registers=176 if stem == "c" else 168)
        before = state(stem, old, "validated")
        after = state(stem, new, origin="v2", compiled=made, proven=old)
        changes.append(compare(before, replace(after, built=True)))
    changes.append(compare(None, state("e", model.kernel("e"), origin="v2")))
    changes.append(compare(state("f", model.kernel("f"), "validated"), None))
    same = state("g", model.kernel("g"), "validated")
    return [*changes, compare(same, same)]


CASES = {
    "one_number": one_number,
    "comment_only": comment_only,
    "spill": spill,
    "not_compiled": not_compiled,
    "template": template,
}


@pytest.mark.parametrize("style", ["text", "markdown"])
@pytest.mark.parametrize("case", CASES)
def test_report(case: str, style: report.Style, capsys) -> None:
    text = report.render(CASES[case](), style)
    assert text.isascii()
    ending = "md" if style == "markdown" else "txt"
    support.check_accepted(EXPECTED / f"{case}.{ending}", text, capsys)


@pytest.mark.parametrize("case", ["one_number", "comment_only", "spill"])
def test_one_kernel_fits_a_screen(case: str) -> None:
    assert len(report.render(CASES[case](), "markdown").splitlines()) <= SCREEN


# Every number of the real ones; the compiler is made up, no number of its has more rows.
NUMBERS = {
    "stages": ("head_dim: 64\nstages: {kv: 2}\n", "kv: 2", "kv: 3"),
    "tile": ("head_dim: 64\ntile: {kv: 128}\n", "kv: 128", "kv: 64"),
    "seqlen": ("head_dim: 128\nseqlen: {q: 512, kv: 4096}\n", "4096", "2048"),
    "heads": ("head_dim: 128\nheads: {q_per_kv: 2}\n", "kv: 2", "kv: 8"),
}


@pytest.mark.parametrize("edit", NUMBERS)
def test_a_number_of_a_real_spec_fits_a_screen(edit: str) -> None:
    fields, old, new = NUMBERS[edit]
    base = f"arch: sm90\nop: fmha_fwd\ndtype: bf16\n{fields}"
    assert old in base
    text, changed = (support.kernel_text(t) for t in (base, base.replace(old, new)))
    loops = (  # a causal kernel's two, none of whose counts stays
        toolchain.LoopReport(
            "consumer", {n: 2 * c for n, c in model.LOOP.items()} | {"total": n}, 0
        )
        for n in (2900, 2901)
    )
    made = model.report(total=1, loops=tuple(loops), registers=255)
    change = compare(
        state("candidate", text, "emulated", "validated", "benchmarked"),
        state("candidate", changed, compiled=made, proven=text),
    )
    shown = report.render([change], "markdown")
    assert change.kind == "changed"
    assert len(shown.splitlines()) <= SCREEN, shown


WORSE = {
    "serialised wgmma 0 -> 6 of 40": {
        "wgmma": toolchain.WgmmaReport(40, 5, 1, 40, 5, 1, 6)
    },
    "no wait leaves a wgmma group in flight any more": {
        "wgmma": toolchain.WgmmaReport(40, 5, 1, 40, 5, 0, 0)
    },
    "registers of the hungriest role 240 -> 248": {"setmaxnreg": (24, 248)},
    "registers per thread 168 -> 176": {"registers": 176},
    "spills: 0 -> 3 local loads and stores": {"spills": 3},
    "stack 0 -> 8 B per thread": {"local_bytes": 8},
}


@pytest.mark.parametrize("words", WORSE)
def test_what_compiles_worse_is_said(words: str) -> None:
    text = model.kernel("a")
    good = state("a", text)
    bad = state("a", text, compiled=model.report(**WORSE[words]))
    assert [each.text for each in compare(good, bad).regressions] == [words]
    assert compare(bad, good).regressions == ()  # better is not worse
    assert "a: compiles worse, " in report.render([compare(good, bad)])


def test_a_comment_of_a_pull_request_has_a_limit() -> None:
    """GitHub takes 65,536 characters; a terminal gets everything."""
    old = state("a", model.kernel("a"), "validated")
    many = "".join(f"    tile = copy(tile, {n})\n" for n in range(2000))
    text = old.text.replace('    """Loads a tile."""\n', many)
    new = state("a", text)
    markdown = report.render([compare(old, new)], "markdown")
    assert len(markdown) < 20_000
    assert "more lines: fmha-gen diff shows all" in markdown
    assert "tile = copy(tile, 1999)" in report.render([compare(old, new)], "text")


@pytest.mark.parametrize(
    ("before", "after", "due", "commands"),
    [
        (("emulated",), (), True, ("emulate",)),
        (("emulated",), ("emulated",), False, ()),
        ((), (), True, ("emulate", "validate")),
        ((), ("emulated",), False, ("validate",)),
        (("validated",), (), True, ("validate",)),
        (("emulated", "validated"), ("validated",), False, ("emulate",)),
    ],
)
def test_what_is_due_when_the_code_changed(before, after, due, commands) -> None:
    change = compare(
        state("a", model.kernel("a", 2), *before),
        state("a", model.kernel("a", 3), *after),
    )
    assert change.validation.due is due
    expected = tuple(f"fmha-gen {command} specs/a.yaml" for command in commands)
    assert change.validation.commands == expected


def test_no_difference() -> None:
    same = state("a", model.kernel("a"), "validated")
    assert report.render([compare(same, same)]) == "No difference in 1 kernel.\n"


def test_json_has_both_sides_of_every_number() -> None:
    data = report.to_json(one_number())
    assert data["same"] is False
    (kernel,) = data["kernels"]
    facts = {fact["name"]: (fact["before"], fact["after"]) for fact in kernel["facts"]}
    assert facts["KV_STAGES"] == (2, 3)
    assert facts["mbarriers of kv"] == (4, 6)
    assert facts["shared memory [B]"] == (131072, 163840)
    assert facts["registers per thread"] == (168, 168)
    assert facts["consumer: total"] == (612, 620)
    assert facts["consumer: FMA pipe"] == (270, 270)
    assert facts["rung"] == ("validated", "compiled")
    assert kernel["validation"]["due"] is True
    assert kernel["regressions"] == [
        "rung validated -> compiled: the proof was of another text"
    ]
    assert [
        line
        for edit in kernel["source"]
        for line in (*edit["removed"], *edit["added"])
        if line.startswith("KV_STAGES")
    ] == ["KV_STAGES = 2  # [tiles]", "KV_STAGES = 3  # [tiles]"]
