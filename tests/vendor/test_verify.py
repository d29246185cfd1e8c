# SPDX-License-Identifier: Apache-2.0
"""`verify` tells what happened to a copy, and where; it needs no more than Python."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import black
import pytest
import yaml
from fmha_gen import cli, verify
from fmha_gen.ops import OPERATIONS
from support import GENERATED, ROOT
from typer.testing import CliRunner

STEM = "sm90_d128_bf16_causal_lse"
OTHER = "sm90_d64_bf16_full"
KERNEL, RECORD = f"{STEM}.py", f"records/{STEM}.json"
SOURCE = "fmha-gen==0.1.0 commit:-"
SCRIPT = ROOT / "codegen" / "verify.py"


def text_of(name: str) -> str:
    return (GENERATED / name).read_text("utf-8")


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """A folder with two kernels and a record, and their lock."""
    folder = tmp_path / "attention"
    (folder / "records").mkdir(parents=True)
    entries = {}
    for name in (KERNEL, f"{OTHER}.py", RECORD):
        (folder / name).write_text(text_of(name), "utf-8")
        entries[name] = verify.entry_of(name, text_of(name))
    (folder / verify.LOCK).write_text(verify.dump(verify.Lock(SOURCE, entries)))
    return folder


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text("utf-8")
    assert text.count(old) == 1
    file.write_text(text.replace(old, new), "utf-8")


def restamp(file: Path) -> None:
    """Make the header state the digest of the body that is now there."""
    text = file.read_text("utf-8")
    stated = verify.stated_digests(text)
    assert stated is not None
    file.write_text(text.replace(stated.body, verify.body_digest(text)), "utf-8")


def only(folder: Path, against: Path | None = None) -> verify.Finding:
    """The finding of the only file that is not as it should be."""
    findings = verify.verify([folder], against)
    (finding,) = (finding for finding in findings if finding.label != "intact")
    return finding


def edits(folder: Path) -> list[tuple[str, str]]:
    finding = only(folder)
    assert (finding.state, finding.ok) == ("edited", False)
    return [(edit.change, edit.name) for edit in finding.edits]


def test_copies_are_intact(copies: Path) -> None:
    findings = verify.verify([copies])
    names = [finding.path.relative_to(copies).as_posix() for finding in findings]
    assert names == sorted([RECORD, KERNEL, f"{OTHER}.py"])
    assert {finding.label for finding in findings} == {"intact"}


@pytest.mark.parametrize("length", [40, 79, 120])
@pytest.mark.parametrize("stem", [STEM, "sm100_d128_bf16_causal_gqa4_c2x1_cta2_lse"])
def test_another_line_length_is_reformatted(stem: str, length: int) -> None:
    text = text_of(f"{stem}.py")
    entry = verify.entry_of("x.py", text)
    mode = black.Mode(line_length=length, magic_trailing_comma=False)
    changed = black.format_str(text, mode=mode)
    assert changed != text
    assert verify.state_of("x.py", changed.encode(), entry) == ("reformatted", [])


def test_windows_line_ends_are_reformatted(copies: Path) -> None:
    file = copies / KERNEL
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    lock = copies / verify.LOCK
    lock.write_bytes(lock.read_bytes().replace(b"\n", b"\r\n"))
    assert only(copies).label == "reformatted"
    assert only(copies).ok


def test_other_quotes_and_parentheses_are_reformatted(copies: Path) -> None:
    edit(copies / KERNEL, '"arch": "sm90"', "'arch': ('sm90')")
    edit(
        copies / KERNEL,
        "    if warp_idx == 0:\n        for",
        "    if (warp_idx==0):\n\n        for",
    )
    assert only(copies).label == "reformatted"


def line_of(file: Path, start: str) -> int:
    """The line, from 1, that starts so."""
    lines = file.read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.startswith(start))
    return number


def test_an_edited_constant_is_named_with_its_line(copies: Path) -> None:
    edit(copies / KERNEL, "TILE_KV = 128 ", "TILE_KV = 112 ")
    number = line_of(copies / KERNEL, "TILE_KV = ")
    finding = only(copies)
    assert finding.edits == (verify.Edit("edited", "TILE_KV", number, number),)
    assert str(finding.edits[0]) == f":{number} TILE_KV edited"


def test_every_part_of_a_kernel_is_watched(copies: Path) -> None:
    """A comment put at the end of any part is an edit of that part."""
    text = text_of(KERNEL)
    entry, lines = verify.entry_of(KERNEL, text), text.splitlines(keepends=True)
    watched = [p for p in verify.parts_of(KERNEL, text) if p.name != "(docstring)"]
    assert len(watched) > 60
    for part in watched:
        changed = [*lines]
        changed[part.last - 1] = changed[part.last - 1].rstrip("\n") + "  # x\n"
        state, found = verify.state_of(KERNEL, "".join(changed).encode(), entry)
        assert (state, [e.name for e in found]) == ("edited", [part.name])


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("one persistent CTA", "a CTA", [("edited", "launch")]),
        ("import math\n", "import math\nimport os\n", [("edited", "(imports)")]),
        ("# By hand:", "# Manually:", [("edited", "pack_p")]),
        ("def row_max(", "def max_of_row(", [("added", "max_of_row"), ("removed", "row_max")]),
        ("keep_mangled_name=False", "keep_mangled_name=True", [("edited", "(statements)")]),
        ("@cute.kernel\n", "", [("edited", "fmha_kernel")]),
        ("cvt.rn.bf16x2", "cvt.rz.bf16x2", [("edited", "pack_pair")]),
        ("Apache-2.0\n", "MIT\n", [("edited", "(first-lines)")]),
        ("# --- constants", "# --- numbers", [("edited", "(above-HEAD_DIM_QK)")]),
        ("LN_2 = 0.6931471805599453  # = math.log(2)\n", "", [("removed", "LN_2")]),
        ("WARP_ROWS = 16", "WARP_ROWS = = 16", [("unreadable", "(not Python)")]),
    ],
)  # fmt: skip
def test_edits(
    copies: Path, old: str, new: str, expected: list[tuple[str, str]]
) -> None:
    file = copies / KERNEL
    text = file.read_text()
    file.write_text(text.replace(old, new, 1))
    assert edits(copies) == expected


def test_parts_in_another_order_are_an_edit(copies: Path) -> None:
    file = copies / KERNEL
    lines = file.read_text().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if line.startswith("QUAD = "))
    lines[place : place + 2] = lines[place + 1], lines[place]
    file.write_text("".join(lines))
    assert edits(copies) == [("moved", "ROWS_PER_THREAD")]


def test_an_edit_with_a_new_digest_does_not_deceive_the_lock(copies: Path) -> None:
    edit(copies / KERNEL, "TILE_KV = 128 ", "TILE_KV = 112 ")
    restamp(copies / KERNEL)
    assert edits(copies) == [("edited", "(docstring)"), ("edited", "TILE_KV")]
    (copies / verify.LOCK).unlink()
    assert all(finding.ok for finding in verify.verify([copies]))  # no signature


def test_a_header_without_digests_is_an_edit(copies: Path) -> None:
    file = copies / KERNEL
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if not line.startswith("spec sha")))
    assert edits(copies) == [("edited", "(docstring)")]


def test_a_missing_file(copies: Path) -> None:
    (copies / KERNEL).unlink()
    assert (only(copies).state, only(copies).ok) == ("missing", False)
    (finding,) = verify.verify([copies / KERNEL])
    assert finding.state == "missing"


def test_a_folder_in_a_files_place_is_a_missing_file(copies: Path) -> None:
    (copies / KERNEL).unlink()
    (copies / KERNEL).mkdir()
    assert (only(copies).state, only(copies).ok) == ("missing", False)
    assert verify.main([str(copies)]) == 1


def test_records_are_watched(copies: Path) -> None:
    record = json.loads((copies / RECORD).read_text())
    (copies / RECORD).write_text(json.dumps(record, sort_keys=True))
    assert only(copies).label == "reformatted"
    record["rung"] = "benchmarked"
    (copies / RECORD).write_text(json.dumps(record, sort_keys=True))
    assert edits(copies) == [("edited", "(text)")]


def test_a_file_alone_is_held_against_the_lock_beside_it(copies: Path) -> None:
    edit(copies / KERNEL, "TILE_KV = 128 ", "TILE_KV = 112 ")
    (finding,) = verify.verify([copies / KERNEL])
    assert finding.state == "edited"
    (finding,) = verify.verify([copies / RECORD])
    assert finding.state == "intact"
    assert len(verify.verify([copies / verify.LOCK])) == 3


def test_a_file_without_lock_is_intact_or_altered(copies: Path) -> None:
    (copies / verify.LOCK).unlink()
    assert {f.state for f in verify.verify([copies])} == {"intact"}
    edit(copies / KERNEL, "TILE_KV = 128 ", "TILE_KV = 112 ")
    finding = only(copies)
    assert (finding.state, finding.edits, finding.ok) == ("altered", (), False)
    finding = only(copies, against=GENERATED)
    assert (finding.state, finding.out_of_date) == ("edited", False)
    assert [e.name for e in finding.edits] == ["TILE_KV"]


def test_out_of_date(copies: Path, tmp_path: Path) -> None:
    newer = tmp_path / "checkout" / "generated"
    newer.mkdir(parents=True)
    for name in (KERNEL, f"{OTHER}.py"):
        (newer / name).write_text(text_of(name))
    assert {f.label for f in verify.verify([copies], newer.parent)} == {"intact"}
    edit(newer / KERNEL, "TILE_KV = 128 ", "TILE_KV = 112 ")
    restamp(newer / KERNEL)
    assert (only(copies, newer).label, only(copies, newer).ok) == ("out of date", False)
    edit(copies / KERNEL, "LN_2 = ", "LN_2 = 2 * ")
    assert only(copies, newer.parent).label == "edited and out of date"
    (copies / verify.LOCK).unlink()
    assert only(copies, newer.parent).label == "altered and out of date"
    (newer / KERNEL).unlink()  # no longer generated
    assert only(copies, newer.parent).label == "altered and out of date"


def test_a_checkout_with_windows_line_ends_is_as_new(
    copies: Path, tmp_path: Path
) -> None:
    newer = tmp_path / "generated"
    newer.mkdir()
    for name in (KERNEL, f"{OTHER}.py"):
        (newer / name).write_bytes(text_of(name).replace("\n", "\r\n").encode())
    assert {f.label for f in verify.verify([copies], newer)} == {"intact"}
    edit(copies / KERNEL, "TILE_KV = 128 ", "TILE_KV = 112 ")
    (copies / verify.LOCK).unlink()
    assert [e.name for e in only(copies, newer).edits] == ["TILE_KV"]


def test_statuses_and_json(copies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str | Path) -> tuple[int, str, str]:
        status = verify.main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    assert run(copies) == (0, "3 intact\n", "")
    edit(copies / KERNEL, "TILE_KV = 128 ", "TILE_KV = 112 ")
    file, line = copies / KERNEL, line_of(copies / KERNEL, "TILE_KV = ")
    status, out, _ = run(copies)
    assert status == 1
    assert out.splitlines() == [
        f"{file}: edited",
        f"  {file}:{line} TILE_KV edited",
        "2 intact, 1 edited",
    ]
    status, out, _ = run(copies, "--json", "--against", GENERATED)
    (row,) = (row for row in json.loads(out) if row["state"] != "intact")
    assert (status, row) == (
        1,
        {
            "path": file.as_posix(),
            "state": "edited",
            "out_of_date": False,
            "edits": [
                {"change": "edited", "name": "TILE_KV", "first": line, "last": line}
            ],
        },
    )
    assert CliRunner().invoke(cli.app, ["verify", str(copies)]).exit_code == 1


def test_nothing_to_verify_is_a_usage_error(
    copies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.py").write_text("X = 1\n")
    for name in ("empty", "notes.py", "absent", "absent/absent.py"):
        assert verify.main([str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.startswith(f"{tmp_path / name}: ")
    empty = str(tmp_path / "empty")
    assert verify.main([str(copies), "--against", empty]) == 2


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        f"../outside.py {'0' * 64} X:00000000",
        f"/etc/hosts {'0' * 64} X:00000000",
        f"a/../../b {'0' * 64} X:00000000",
        f"{KERNEL} {'0' * 64} X:00000000",  # a second time
        f"a.py {'0' * 64}",
    ],
)
def test_a_damaged_lock(
    copies: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (copies / verify.LOCK).open("a") as file:
        file.write(f"{line}\n")
    assert verify.main([str(copies)]) == 2
    assert f"{verify.LOCK}:5: not an entry" in capsys.readouterr().err


def test_the_lock_reads_back(copies: Path) -> None:
    text = (copies / verify.LOCK).read_text()
    assert verify.dump(verify.parse(text)) == text


SAMPLE = '''\
"""Doc."""
import os  # why
@d(x := 1)
async def f(a, /, *b: *T, c: int = -1, **e) -> "x":
    """Doc é.

        indented
    """
    match a:
        case {"k": [1, *_], **rest} | None: pass
    with (open(a) as x, y): del x[1:2, ...]
    return f"{a!r:>{c}} {b=}" "é\\n" f"{{" if None else 1e3 * 2j
class C: x: int = 0xFFFF_FFFF_FFFF; y = b"\\xff", u"u", lambda: (yield)
'''


def test_digests_are_the_same_on_every_python() -> None:
    """A lock may come from any version. Here is what they store or parse in ways of their own."""
    text = SAMPLE.replace(": *T", "")  # from 3.11 on
    found = {part.name: part.digest for part in verify.parts_of("x.py", text)}
    assert found == {
        "(docstring)": "bb8f40e3",
        "(imports)": "79be0a4a",
        "f": "f7ba0caf",
        "C": "8fd68e64",
    }


def isolated(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with nothing but the standard library."""
    command = [sys.executable, "-I", "-S", SCRIPT, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_script_alone_is_enough(copies: Path) -> None:
    process = isolated("attention", cwd=copies.parent)
    assert (process.returncode, process.stdout) == (0, "3 intact\n"), process.stderr
    edit(copies / KERNEL, "TILE_KV = 128 ", "TILE_KV = 112 ")
    assert isolated(".", cwd=copies.parent).returncode == 1


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All texts that are parsed from now on: nearly all that a file costs is in proportion."""
    found: list[str] = []
    parse = ast.parse

    def spy(text: str, *rest: Any) -> ast.Module:
        found.append(text)
        return parse(text, *rest)

    monkeypatch.setattr(ast, "parse", spy)
    return found


def test_intact_files_are_not_parsed(copies: Path, parsed: list[str]) -> None:
    assert {finding.state for finding in verify.verify([copies])} == {"intact"}
    assert not parsed


def reformatted(text: str) -> str:
    """As a formatter leaves it that changes every statement which is longer than a line."""
    return re.sub(r"(?<=[({\[])\n(?= )", " \n\n", text)


def test_what_files_have_in_common_is_parsed_once(parsed: list[str]) -> None:
    """Of all shipped kernels, reformatted and then edited by hand, or made unreadable."""
    texts = {path.name: path.read_text("utf-8") for path in GENERATED.glob("*.py")}
    entries = {name: verify.entry_of(name, text) for name, text in texts.items()}
    changed = {name: reformatted(text) for name, text in texts.items()}
    size = sum(map(len, texts.values()))
    functions = "|".join(each.function for each in OPERATIONS.values())

    def look(
        pattern: str = "", replacement: str = ""
    ) -> set[tuple[str, tuple[str, ...]]]:
        verify._statements.cache_clear()
        parsed.clear()
        found = set()
        for name, text in changed.items():
            edited, count = re.subn(pattern, replacement, text, count=1)
            assert count == 1
            data = edited.encode()
            state, edits = verify.state_of(name, data, entries[name])
            found.add((state, tuple(edit.name for edit in edits)))
        assert 0 < sum(map(len, parsed)) < size / 2
        return found

    assert look() == {("reformatted", ())}
    assert look("SCALE_LIMIT = ", "SCALE_LIMIT = 2 * ") == {
        ("edited", ("SCALE_LIMIT",))
    }
    assert look(rf"\ndef ({functions})\(", r"\g<0>(") == {("edited", ("(not Python)",))}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A = 1\nif A:\n    B = 2\nelse:\n    B = 3\n", {"A": 1, "(statements)": 2}),
        ("@d\n@e(\n    1\n)\ndef f(): ...\n@g\nclass C: ...\n", {"f": 1, "C": 6}),
        ('A = """\nB = 1\n"""\nC = 2\n', {"A": 1, "C": 4}),
        ('A = f"{1:\\\n}"\nC = "# \\\nD = 4"\n', {"A": 1, "C": 3}),
        ("A = 1 + \\\n2\nB = (\n3)\nC = [\n]\n", {"A": 1, "B": 3, "C": 5}),
        ('A = 1; B = 2 # \'\nC = 3 # """\nD = 4\n', {"A": 1, "B": 1, "C": 2, "D": 3}),
        ("def f():\n    x = 1\n\\\n    y = 2\nB = 3\n", {"f": 1, "B": 5}),
        ("A = (\n1,\n2)\nB = 3", {"A": 1, "B": 4}),  # cut where it must not be
        ("'x'\n\n'y'\nA = 1\n", {"(docstring)": 1, "(statements)": 3, "A": 4}),
        ("A = 1\rB = 2\r\nC = 3\n", {"A": 1, "B": 2, "C": 3}),
    ],
)
def test_where_statements_begin(text: str, expected: dict[str, int]) -> None:
    assert {p.name: p.first for p in verify.parts_of("x.py", text)} == expected


def test_pieces_say_what_the_whole_says() -> None:
    """Also of code that nobody generated, and where a piece is none by itself."""
    paths = [
        *sorted(GENERATED.glob("*.py"))[::20],
        *(ROOT / "codegen" / "build").glob("*.py"),
    ]
    texts = [path.read_text("utf-8") for path in paths]
    dice = random.Random(0)
    for text in [*texts, *(damaged(text, dice) for text in texts)]:
        try:
            whole = [*verify._statements(text)]
        except SyntaxError as error:
            with pytest.raises(SyntaxError) as found:
                verify._read_python(text)
            assert found.value.lineno == error.lineno
        else:
            pieces = [one[1:] for one in verify._read_python(text)[0]]
            assert pieces == [one[1:] for one in whole]


def damaged(text: str, dice: random.Random) -> str:
    place = dice.randrange(len(text) + 1)
    marks = ['"', '"""', "'", "\n", "\\\n", "(", ")", "#", "\nelse:\n", "\n@x\n", "\f"]
    return text[:place] + dice.choice(marks) + text[place:]


def test_the_hook_is_the_script(copies: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    entry, *options = hook["entry"].split()
    assert ROOT / entry == SCRIPT
    assert os.access(SCRIPT, os.X_OK)
    assert hook["language"] == "script" and not hook["pass_filenames"]
    command = [SCRIPT, *options, *hook["args"]]
    assert subprocess.run(command, cwd=copies, check=False).returncode == 0
    # Who adds the hook first has no kernel yet.
    (copies.parent / "empty").mkdir()
    empty = subprocess.run(
        command,
        cwd=copies.parent / "empty",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (empty.returncode, empty.stderr) == (0, "")
    assert empty.stdout == f".: holds no kernel of fmha-gen and no {verify.LOCK}\n"
    edit(copies / KERNEL, "TILE_KV = 128 ", "TILE_KV = 112 ")
    assert subprocess.run(command, cwd=copies, check=False).returncode == 1


def test_a_comment_is_told_where_it_stands(copies: Path) -> None:
    edit(
        copies / KERNEL,
        "# SPDX-License-Identifier: Apache-2.0",
        "# SPDX-License-Identifier: MIT",
    )
    (found,) = only(copies).edits
    assert found == verify.Edit("edited", "(first-lines)", 1, 1)
    (copies / KERNEL).write_text(text_of(KERNEL))
    number = line_of(copies / KERNEL, "# --- constants: chosen")
    edit(copies / KERNEL, "# --- constants: chosen", "# --- numbers: chosen")
    (found,) = only(copies).edits
    assert found == verify.Edit("edited", "(above-HEAD_DIM_QK)", number, number)


def test_imports_one_per_line_and_sorted_are_reformatted() -> None:
    """As isort does with force_single_line and force_sort_within_sections."""
    text = "import b\nfrom a import x, y as z  # why\nfrom . import c, d\nX = 1\n"
    entry = verify.entry_of("x.py", text)
    single = (
        "from . import c\nfrom . import d\nfrom a import x  # why\nfrom a import y as z\n"
        "import b\nX = 1\n"
    )
    assert verify.state_of("x.py", single.encode(), entry) == ("reformatted", [])
    for old, new in (
        ("y as z", "z as y"),
        ("from . ", "from .. "),
        ("import b", "import a"),
    ):
        state, found = verify.state_of("x.py", single.replace(old, new).encode(), entry)
        assert (state, [each.name for each in found]) == ("edited", ["(imports)"])
    # The last one of two that bind a name counts.
    twice = "from a import x\nfrom b import x\n"
    turned = "from b import x\nfrom a import x\n"
    assert (
        verify.state_of("x.py", turned.encode(), verify.entry_of("x.py", twice))[0]
        == "edited"
    )


def test_a_lock_that_was_deleted_is_missed(copies: Path) -> None:
    (copies / "README.md").write_text(
        "# Kernels\n\nCopied by `fmha-gen vendor` from it.\n"
    )
    assert all(finding.ok for finding in verify.verify([copies]))
    (copies / verify.LOCK).unlink()
    finding = only(copies)
    assert (finding.path, finding.state) == (copies / verify.LOCK, "missing")
    assert verify.main([str(copies)]) == 1
