# SPDX-License-Identifier: Apache-2.0
"""README and manuals say what is so: the evidence is that of the records, tables are complete.

`FMHA_GEN_ACCEPT=1` writes tables and counts anew, and prints what changed.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import os
import re
from pathlib import Path

import pytest
import support
from fmha_gen import cli
from fmha_gen.build import records, render
from fmha_gen.evidence import table
from fmha_gen.ops.backward import BACKWARD
from fmha_gen.ops.forward import FORWARD
from fmha_gen.show import schema
from fmha_gen.show.picture import page
from fmha_gen.spec.model import load_specs

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SPECS = ROOT / "codegen" / "docs" / "specs.md"
TABLE = ROOT / "generated" / "README.md"
DOCUMENTS = (README, TABLE, ROOT / "CONTRIBUTING.md", *ROOT.glob("codegen/docs/*.md"))
MOST_LINES = 160  # of the README


def between(name: str, file: Path) -> re.Match[str]:
    """The only table of that name: the text before it, the table, and the text after it."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    (found,) = re.finditer(
        rf"\A(.*{begin})(.*)({end}.*)\Z", file.read_text(), re.DOTALL
    )
    return found


def check_table(name: str, file: Path, expected: str) -> None:
    """Assert that a table is the expected one, or write it and print what changed."""
    before, shown, after = between(name, file).groups()
    if shown != expected and os.environ.get("FMHA_GEN_ACCEPT") == "1":
        lines = shown.splitlines(), expected.splitlines()
        print("\n".join(difflib.unified_diff(*lines, "old", "new", lineterm="")))
        file.write_text(before + expected + after)
        return
    assert shown == expected


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.M | re.S)


def first_column(file: Path, title: str) -> list[str]:
    """The names in the first column of the table with that title."""
    lines = iter(file.read_text().splitlines())
    next(line for line in lines if re.match(rf"\| {title} +\|", line))
    next(lines)
    cells = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells.append(line.split("|")[1].strip().strip("`"))
    return cells


def test_evidence_is_that_of_the_records() -> None:
    expected = table.table(table.load(ROOT / "generated"))
    check_table("evidence", TABLE, expected)


def test_the_manual_of_a_spec_is_made_of_the_features() -> None:
    shown = [each.spec for each in load_specs([ROOT / "specs"])]
    check_table("fields", SPECS, schema.fields_table(shown))
    check_table("relations", SPECS, schema.relations_table())


def test_the_first_example_prints_what_it_shows() -> None:
    (shown,) = re.findall(r"^```\n(kernel .*?)^```$", README.read_text(), re.M | re.S)
    stem, *cells = shown.splitlines()[1].split()
    (built,) = re.findall(r"^fmha-gen build (\S+)$", README.read_text(), re.M)
    assert built == f"specs/{stem}.yaml"
    record = records.load(ROOT / "generated" / records.path_of(stem))
    assert record is not None
    compiled = record["compiled"]
    expected = [record["rung"], " / ".join(map(str, compiled["setmaxnreg"]))]
    expected += [f"{compiled['shared_bytes']} B", "unchanged"]
    assert cells == " ".join(expected).split()


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_what_it_links_to_is_there(file: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", file.read_text()):
        if "://" in link:
            continue
        path, _, section = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), link
        if section:
            title = section.replace("-", " ")
            assert re.search(rf"^## {title}$", target.read_text(), re.M | re.I), link


def test_the_readme_is_short_and_every_manual_is_linked() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    links = "".join(file.read_text() for file in DOCUMENTS)
    for file in ROOT.glob("codegen/docs/*.md"):
        assert f"({file.relative_to(ROOT)})" in text or f"({file.name})" in links


@pytest.mark.parametrize(
    "file", sorted(ROOT.glob("codegen/decisions/*.md")), ids=lambda file: file.stem
)
def test_a_decision_begins_with_a_short_summary_and_is_in_the_index(file: Path) -> None:
    title, empty, *lines = file.read_text().splitlines()
    assert re.match(rf"# {file.stem[:4]}: \S", title) and not empty
    summary = list(itertools.takewhile(lambda line: line.startswith("> "), lines))
    assert 1 <= len(summary) <= 3
    index = (ROOT / "codegen" / "docs" / "decisions.md").read_text()
    assert index.count(f"(../decisions/{file.name})") == 1


GROUPS = (
    *(
        (FORWARD, "forward", "sm90", "Hopper"),
        (FORWARD, "forward", "sm100", "Blackwell"),
    ),
    (BACKWARD, "backward", "sm90", "Hopper"),
    (BACKWARD, "backward", "sm100", "Blackwell"),
)
GPUS = {"sm90": "an H100 or H200", "sm100": "a B200"}


def rungs(found: dict[str, str]) -> str:
    """How many kernels of each operation and architecture got how far. found: rungs by stem."""
    order, told = list(records.RUNGS), []
    for operation, name, arch, of in GROUPS:
        stems = [x for x in support.shipped(operation) if x.startswith(f"{arch}_")]
        reached = [order.index(found[stem]) for stem in stems]
        emulated, validated, benchmarked = (
            sum(each >= order.index(rung) for each in reached)
            for rung in ("emulated", "validated", "benchmarked")
        )
        words = f"of the {len(stems)} {name} kernels of {of} "
        if validated:
            some = "all" if validated == len(stems) else validated
            words += f"{some} are validated on {GPUS[arch]}"
            timed = "all" if benchmarked == validated else benchmarked
            words += f", {timed} of these benchmarked" if benchmarked else ""
            left = emulated - validated
            words += f", {left} emulated" if left else ""
        else:
            some = "all" if emulated == len(stems) else emulated
            words += f"{some} are emulated"
        told.append(words)
    text = f"{'; '.join(told)}. No GPU has run those that are emulated alone.\n"
    return text.replace("of", "Of", 1)


def test_as_many_kernels_are_on_each_rung_as_it_says() -> None:
    found = {each["kernel"]: each["rung"] for each in table.load(ROOT / "generated")}
    check_table("rungs", README, rungs(found))


def test_as_many_kernels_are_there_as_it_says() -> None:
    text, told = README.read_text(), f"[All {len(support.SHIPPED)} kernels]"
    if told not in text and os.environ.get("FMHA_GEN_ACCEPT") == "1":
        README.write_text(re.sub(r"\[All \d+ kernels\]", told, text))
    assert told in README.read_text()


def test_the_picture_is_of_the_kernel_as_it_is() -> None:
    (shown,) = re.findall(r"\((codegen/docs/pictures/\w+\.svg)\)", README.read_text())
    drawn = page.render(support.shipped_plan(Path(shown).stem))
    if drawn != (ROOT / shown).read_text() and os.environ.get("FMHA_GEN_ACCEPT") == "1":
        (ROOT / shown).write_text(drawn)
    assert (ROOT / shown).read_text() == drawn


def test_every_kernel_is_in_the_evidence() -> None:
    stems = [path.stem for path in sorted((ROOT / "specs").glob("*.yaml"))]
    shown = re.findall(r"^\| `(\w+)`", between("evidence", TABLE)[2], re.MULTILINE)
    assert shown == stems


def test_every_command_is_explained() -> None:
    shown = [cell.split()[1] for cell in first_column(README, "command")]
    registered = {
        command.name or command.callback.__name__
        for command in cli.app.registered_commands
        if command.callback
    }
    assert set(shown) == registered
    assert len(shown) == len(registered)


def test_the_spec_is_the_shipped_one() -> None:
    (block,) = (block for block in blocks("yaml") if block.startswith("# specs/"))
    comment, _, text = block.partition("\n")
    assert (ROOT / comment.removeprefix("# ")).read_text() == text


def test_the_example_calls_a_shipped_kernel() -> None:
    (block,) = blocks("python")
    tree = ast.parse(block)
    assert len([line for line in block.splitlines() if line]) <= 10
    (imported,) = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    (spec_file,) = load_specs([ROOT / "specs" / f"{imported.module}.yaml"])
    assert spec_file.spec.lse
    kernel = ast.parse((ROOT / "generated" / f"{imported.module}.py").read_text())
    (fmha,) = (
        node
        for node in kernel.body
        if isinstance(node, ast.FunctionDef) and node.name == "fmha"
    )
    (call,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "fmha"
    )
    assert len(call.args) == len(fmha.args.args)
    named = {keyword.arg for keyword in call.keywords}
    assert named <= {arg.arg for arg in fmha.args.kwonlyargs}


KERNEL = f'"""K.\n\n{render.DIGEST_PLACEHOLDER}\n"""\n'


@pytest.fixture
def generated(tmp_path: Path) -> Path:
    (tmp_path / "records").mkdir()
    (tmp_path / "a.py").write_text(render.finish(KERNEL, "0" * 64))
    (tmp_path / "notes.py").write_text("")
    return tmp_path


def write_record(generated: Path, body: str) -> None:
    record = None
    for rung, result in (
        ("compiled", {"setmaxnreg": [24, 240], "registers": 168}),
        ("validated", {"gpu": "NVIDIA H200", "worst": {"of_bound": 0.734}}),
    ):
        record = records.merge_rung(
            record, kernel="a", body_sha256=body, rung=rung, result=result
        )
    (generated / "records" / "a.json").write_text(records.dump(record))


def cells(generated: Path) -> list[str]:
    *_, line = table.table(table.load(generated)).splitlines()
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_evidence_without_a_record(generated: Path) -> None:
    assert cells(generated) == ["`a`", "rendered", "-", "-", "-"]


def test_evidence_of_the_text_itself(generated: Path) -> None:
    write_record(generated, render.body_digest((generated / "a.py").read_text()))
    assert cells(generated) == ["`a`", "validated", "NVIDIA H200", "0.73", "24 / 240"]


def test_evidence_of_another_text_does_not_count(generated: Path) -> None:
    write_record(generated, "1" * 64)
    assert cells(generated) == ["`a`", "rendered", "-", "-", "-"]
