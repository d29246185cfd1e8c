# SPDX-License-Identifier: Apache-2.0
"""Only the numbers that are asked for change, whatever the spec's style, and comments survive."""

from __future__ import annotations

import re

import pytest
import support
import yaml
from fmha_gen.errors import CheckFailed
from fmha_gen.tune import edit
from hypothesis import given, settings
from hypothesis import strategies as st

HEAD = "arch: sm90  # Hopper\nop: fmha_fwd\ndtype: bf16\nhead_dim: 128\n"
POINT = {"tile.q": 128, "tile.kv": 112, "stages.q": 2, "stages.kv": 3}
BLOCKS = "tile:\n  q: 128\n  kv: 112\nstages:\n  q: 2\n  kv: 3\n"


def test_a_spec_without_numbers_gets_them_at_its_end() -> None:
    assert edit.write(HEAD, POINT) == HEAD + BLOCKS


def test_what_stands_behind_the_last_field_stays_behind_it() -> None:
    assert edit.write(HEAD + "# end\n", POINT) == HEAD + BLOCKS + "# end\n"
    assert edit.write(HEAD + "...\n", POINT) == HEAD + BLOCKS + "...\n"


def test_no_line_break_at_the_end_stays_none() -> None:
    assert edit.write(HEAD.rstrip("\n"), POINT) == (HEAD + BLOCKS).rstrip("\n")


def test_one_line_per_changed_number_of_a_block() -> None:
    old = HEAD + "tile:  # measured\n  q: 128  # rows\n  # of K\n  kv: 64  # rows\n"
    new = edit.write(old, {"tile.q": 128, "tile.kv": 112})
    removed, added = support.changed_lines(support.unified_diff(old, new, "a", "b"))
    assert (removed, added) == (["  kv: 64  # rows"], ["  kv: 112  # rows"])


def test_a_missing_number_follows_the_others_at_their_indentation() -> None:
    old = HEAD + "stages:\n    kv: 3  # deep\nlse: true\n"
    assert edit.write(old, {"stages.q": 1, "stages.kv": 3}) == (
        HEAD + "stages:\n    kv: 3  # deep\n    q: 1\nlse: true\n"
    )


def test_braces_are_unfolded_to_a_line_per_number() -> None:
    old = HEAD + "tile: {q: 128, kv: 64}  # why\nlse: true\n"
    assert edit.write(old, {"tile.q": 128, "tile.kv": 112}) == (
        HEAD + "tile:  # why\n  q: 128\n  kv: 112\nlse: true\n"
    )


def test_braces_without_a_change_stay() -> None:
    old = HEAD + "tile: {kv: 112, q: 128}  # why\n"
    assert edit.write(old, {"tile.q": 128, "tile.kv": 112}) == old


def test_empty_braces_are_filled() -> None:
    old = HEAD + "tile: {}\n"
    assert edit.write(old, {"tile.q": 128}) == HEAD + "tile:\n  q: 128\n"


@pytest.mark.parametrize(
    "unusual",
    [
        HEAD + "tile: {  # rows\n  q: 192,  # many\n  kv: 64,\n}\n",
        "{arch: sm90, op: fmha_fwd, dtype: bf16, head_dim: 128}\n",
        "{arch: sm90, op: fmha_fwd, dtype: bf16, head_dim: 128, tile: {q: 64, kv: 48}}\n",
    ],
)
def test_braces_around_several_lines_or_all_are_left_to_a_person(unusual: str) -> None:
    by_hand = r"cannot edit this spec; write by hand: tile\.q: 128, tile\.kv: 112$"
    with pytest.raises(CheckFailed, match=by_hand):
        edit.write(unusual, {"tile.q": 128, "tile.kv": 112})


def test_the_line_break_of_the_file_is_used() -> None:
    old = HEAD.replace("\n", "\r\n")
    assert edit.write(old, POINT) == (HEAD + BLOCKS).replace("\n", "\r\n")


# --- any spec --------------------------------------------------------------------------

comments = st.sampled_from(["", "  # why", " # {q: 1} # tile:"])
values = {
    "tile": {"q": st.sampled_from([128, 192]), "kv": st.integers(1, 16)},
    "stages": {"q": st.integers(1, 2), "kv": st.integers(2, 8)},
}


@st.composite
def blocks(draw: st.DrawFn, name: str) -> str:
    """A block with any of its numbers in any style, or nothing."""
    keys = draw(st.permutations(["q", "kv"]))[: draw(st.integers(0, 2))]
    pairs = [f"{key}: {draw(values[name][key])}" for key in keys]
    if not pairs:
        return ""
    if draw(st.booleans()):
        return f"{name}: {{{', '.join(pairs)}}}{draw(comments)}\n"
    indent = " " * draw(st.integers(1, 4))
    before = draw(st.sampled_from(["", f"{indent}# a line\n"]))
    lines = "".join(f"{before}{indent}{pair}{draw(comments)}\n" for pair in pairs)
    return f"{name}:{draw(comments)}\n{lines}"


@st.composite
def texts(draw: st.DrawFn) -> str:
    head = [line + draw(comments) + "\n" for line in HEAD.splitlines()]
    head.append(draw(st.sampled_from(["", "\n", "# alone\n"])))
    parts = [*head, draw(blocks("tile")), draw(blocks("stages"))]
    return "".join(draw(st.permutations(parts)))


points = st.fixed_dictionaries(
    {
        f"{block}.{key}": drawn
        for block, numbers in values.items()
        for key, drawn in numbers.items()
    }
)


@settings(deadline=None, max_examples=300)
@given(texts(), points)
def test_any_spec_says_the_numbers_and_nothing_else_changes(
    text: str, point: dict[str, int]
) -> None:
    new = edit.write(text, point)
    old_data, data = yaml.safe_load(text), yaml.safe_load(new)
    for block in ("tile", "stages"):
        said = {f"{block}.{key}": value for key, value in data.pop(block).items()}
        assert said == {k: v for k, v in point.items() if k.startswith(block)}
        old_data.pop(block, None)
    assert data == old_data
    assert comments_of(new) == comments_of(text)
    kept = [line for line in text.splitlines() if not is_number(line)]
    assert [line for line in new.splitlines() if line in kept] == kept
    assert edit.write(new, point) == new


def comments_of(text: str) -> list[str]:
    return re.findall(r"#.*", text)


def is_number(line: str) -> bool:
    """Whether a line may change: a number's, or the head of a block."""
    return bool(re.match(r"\s*(q|kv|tile|stages):", line))
