# SPDX-License-Identifier: Apache-2.0
"""The source diff in pieces, and what a kernel's text says about itself."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
import support
from fmha_gen.build import render
from fmha_gen.diff import kernels, source
from fmha_gen.errors import CheckFailed
from hypothesis import given, settings
from hypothesis import strategies as st

from . import model

Lines = st.lists(st.sampled_from("abcd"), max_size=12)


@settings(deadline=None)
@given(Lines, Lines)
def test_edits_turn_one_text_into_the_other(
    before: list[str], after: list[str]
) -> None:
    made = list(before)
    for edit in reversed(source.edits(before, after)):
        assert tuple(made[edit.line - 1 : edit.end - 1]) == edit.removed
        made[edit.line - 1 : edit.end - 1] = edit.added
    assert made == after


@settings(deadline=None)
@given(Lines, Lines)
def test_what_is_shown_is_what_difflib_shows(
    before: list[str], after: list[str]
) -> None:
    ours = list(source.shown(source.edits(before, after), before))
    theirs = list(difflib.unified_diff(before, after, n=source.CONTEXT, lineterm=""))
    changed = [line for line in ours if line[0] in "+-"]
    assert changed == [line for line in theirs[2:] if line[0] in "+-"]
    # Never a line of the text twice, and each one that is removed or around a change in order.
    old = [line[1:] for line in ours if line[0] in "- "]
    rest = iter(before)
    assert all(line in rest for line in old)


def test_edits_are_shared_by_all_who_have_them() -> None:
    def of(stem: str, *numbers: int) -> tuple[str, tuple[source.Edit, ...]]:
        lines = [f"name = {stem}", *"abcdefgh"]
        new = [f"{x}!" if n in numbers else x for n, x in enumerate(lines)]
        return stem, source.edits(lines, new)

    found = source.shared([of("k1", 0, 2), of("k10", 0, 2, 6), of("b", 6)])
    assert [(group.stems, [e.line for e in group.edits]) for group in found] == [
        (("b", "k10"), [7]),
        (("k1", "k10"), [1, 3]),  # line 1 holds each one's own name
    ]
    # A name inside of another word is not the name: both of these are different edits.
    assert len(source.shared([of("a", 0), of("k1", 0)])) == 1
    both = [
        ("a", source.edits(["x"], ["abc"])),
        ("k", source.edits(["x"], ["kbc"])),
    ]
    assert len(source.shared(both)) == 2


def test_a_text_speaks_for_itself() -> None:
    text = model.kernel("a", 3, mask="causal")
    state = kernels.of_text("a", text, None, origin="here", path="a.py")
    assert state.spec["mask"] == "causal"
    assert state.constants == {
        "TILE_KV": 128,
        "KV_STAGES": 3,
        "KV_TX_BYTES": 32768,
        "NO_LIMIT": -2147483648,
    }
    assert state.units["KV_STAGES"] == "tiles"
    assert state.barriers == {"q": 2, "kv": 6}
    assert state.shared_bytes == 163840
    assert (state.rung, state.compiled) == ("rendered", None)
    typed = text.replace("SPEC = ", "SPEC: dict = ").replace(
        "KV_STAGES = ", "KV_STAGES: int = "
    )
    edited = kernels.of_text("a", typed, None, origin="here", path="a.py")
    assert (edited.spec, edited.constants) == (state.spec, state.constants)
    called = text.replace("SPEC = {", "SPEC = dict({").replace("\n}\n", "\n})\n", 1)
    assert kernels.of_text("a", called, None, origin="here", path="a.py").spec == {}


@pytest.mark.parametrize("stem", support.SHIPPED[::12])
def test_what_is_read_from_a_kernel_is_its_plan(stem: str) -> None:
    plan = support.shipped_plan(stem)
    text = render.render_kernel(plan)
    state = kernels.of_text(stem, text, None, origin="here", path="")
    numbers = {number.name: number.value for number in (*plan.chosen, *plan.derived)}
    assert {name: state.constants[name] for name in numbers} == numbers
    assert state.shared_bytes == plan.smem_bytes
    # A ring has room for full and empty barriers, also where nobody waits for the empty ones.
    assert state.barriers == {
        row.name.removesuffix("_full"): 2 * row.stages
        for kernel in plan.kernels
        for row in kernel.barriers
        if row.name.endswith("_full")
    }


def test_only_the_record_of_this_text_counts() -> None:
    text, other = model.kernel("a"), model.kernel("a", 3)
    known = model.record("a", other, "validated")
    state = kernels.of_text("a", text, known, origin="here", path="a.py")
    assert (state.rung, state.compiled, state.loops) == ("rendered", None, {})


def test_a_record_of_another_form_does_not_count() -> None:
    text = model.kernel("a")
    known = model.record("a", text)
    del known["compiled"]["wgmma"]
    state = kernels.of_text("a", text, known, origin="here", path="a.py")
    assert (state.rung, state.compiled) == ("compiled", None)


def test_loops_that_were_counted_in_another_way_do_not_count() -> None:
    text = model.kernel("a")
    known = model.record("a", text)
    del known["compiled"]["loops"][0]["role"]
    state = kernels.of_text("a", text, known, origin="here", path="a.py")
    assert state.compiled is not None and state.compiled["registers"] == 168
    assert state.loops == {}


def test_comments_are_not_code() -> None:
    def code(text: str) -> str:
        return kernels.of_text("a", text, None, origin="", path="").code

    text = model.kernel("a")
    assert code(text) == code(model.kernel("a", comment="Another."))
    assert code(text) == code(text.replace("# [tiles]", "# [of K and V]"))
    assert code(text) != code(model.kernel("a", call="copy_all"))


def test_what_is_no_kernel_is_refused(tmp_path: Path) -> None:
    path, record = tmp_path / "a.py", tmp_path / "none.json"
    with pytest.raises(CheckFailed, match=r"a\.py: cannot be read"):
        kernels.load(path, record)
    path.write_text("x = 1\n")
    with pytest.raises(CheckFailed, match="not a kernel that fmha-gen made"):
        kernels.load(path, record)
    path.write_text(model.kernel("a") + "def\n")
    with pytest.raises(CheckFailed, match="a is not Python: line"):
        _ = kernels.load(path, record).constants
