# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from fmha_gen.errors import Location, SpecError
from fmha_gen.spec.model import load_specs
from fmha_gen.spec.specfile import INVALID, MAX_BYTES, MAX_DEPTH, decode, find, parse


def test_data_and_places() -> None:
    text = "# c\narch: sm90\r\ntile: {q: 128,\n  kv: -0}\nlist:\n- true\n- 1.5\n'quoted': \"7\"\n"
    document = parse("a.yaml", text)
    assert document.data == {
        "arch": "sm90",
        "tile": {"q": 128, "kv": 0},
        "list": [True, 1.5],
        "quoted": "7",
    }
    assert document.diagnostics == ()
    assert {
        path: (place.line, place.column) for path, place in document.values.items()
    } == {
        (): (1, 1),
        ("arch",): (2, 7),
        ("tile",): (3, 7),
        ("tile", "q"): (3, 11),
        ("tile", "kv"): (4, 7),
        ("list",): (6, 1),
        ("list", "0"): (6, 3),
        ("list", "1"): (7, 3),
        ("quoted",): (8, 11),
    }
    assert document.keys["tile", "kv"] == Location("a.yaml", 4, 3)


def test_refused_values_do_not_stop_the_parse() -> None:
    document = parse(
        "a.yaml", "a: on\nb: [1, 0x1]\nc: !t {d: 1}\nd: &x 3\ne: *x\nd: 4\n"
    )
    assert document.data == {
        "a": INVALID,
        "b": [1, INVALID],
        "c": INVALID,
        "d": 3,
        "e": INVALID,
    }
    assert document.refused == {("a",), ("b", "1"), ("c",), ("e",)}
    codes = {d.location.line: d.code for d in document.diagnostics}
    assert codes == {
        1: "FG021",
        2: "FG022",
        3: "FG016",
        4: "FG013",
        5: "FG014",
        6: "FG018",
    }


def test_one_anchor_twice_is_two_anchors() -> None:
    document = parse("a.yaml", "a: &x 1\nb: &x 2\n")
    assert document.data == {"a": 1, "b": 2}
    assert [d.code for d in document.diagnostics] == ["FG013", "FG013"]


def test_what_was_noted_is_reported_with_what_ends_the_parse() -> None:
    with pytest.raises(SpecError) as raised:
        parse("a.yaml", "a: &x 1\nb: *x\n---\nc: 1\n")
    assert [d.code for d in raised.value.diagnostics] == ["FG013", "FG014", "FG010"]


@pytest.mark.parametrize(("depth", "fits"), [(MAX_DEPTH - 1, True), (MAX_DEPTH, False)])
def test_depth_limit(depth: int, fits: bool) -> None:
    text = f"a: {'[' * depth}1{']' * depth}"
    if fits:
        assert parse("a.yaml", text).diagnostics == ()
    else:
        with pytest.raises(SpecError, match="FG012"):
            parse("a.yaml", text)


def test_length_limit() -> None:
    assert decode("a.yaml", b"#" * MAX_BYTES)
    with pytest.raises(SpecError, match="FG003"):
        decode("a.yaml", b"#" * (MAX_BYTES + 1))


def test_numbers_up_to_the_digit_limit() -> None:
    assert parse("a.yaml", f"a: {'9' * 18}").data == {"a": 10**18 - 1}
    assert parse("a.yaml", f"a: {'9' * 19}").data == {"a": INVALID}


def test_columns_count_characters() -> None:
    document = parse("a.yaml", "{a: '\u00e9\U0001f600', b: 1}")
    assert document.values["b",].column == 14
    with pytest.raises(SpecError) as raised:
        decode("a.yaml", "a: 1\r\n\u00e9\t".encode())
    assert raised.value.diagnostics[0].location == Location("a.yaml", 2, 2)


def test_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.yaml", "a.yaml", "c.yml", ".hidden.yaml", "notes.md", "sub/d.yaml"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    Path("empty").mkdir()
    files, diagnostics = find(
        ["sub", "a.yaml", str(tmp_path), ".", "empty", "missing.yaml"]
    )
    assert diagnostics[0].code == "FG002"
    assert len(diagnostics) == 1
    names = [file.name for file in files]
    assert sorted(names) == ["a.yaml", "b.yaml", "c.yml", "d.yaml", "missing.yaml"]


@pytest.mark.parametrize(
    "path", ["missing.yaml", "folder.yaml/..", "nul\0.yaml", "/dev/null"]
)
def test_unreadable(path: str) -> None:
    with pytest.raises(SpecError, match="FG001"):
        load_specs([path])
