# SPDX-License-Identifier: Apache-2.0
"""What is damaged of the function: every operator fits a kernel, each mutant is Python."""

from __future__ import annotations

import functools

import pytest

from . import function_mutants
from .function_campaign import GENERATED, KERNELS, KIND, function_of
from .function_mutants import CLASSES, OPERATORS, matches
from .function_survivors import ACCEPTED, reason
from .table import classes, table, verdict


@functools.cache
def source_of(stem):
    return (GENERATED / f"{stem}.py").read_text("utf-8")


@functools.cache
def mutants_of(stem):
    return tuple(function_mutants.mutants(source_of(stem)))


@pytest.mark.parametrize("name", CLASSES)
def test_every_operator_fits_a_kernel_of_the_campaign(name):
    """When the templates change and a pattern no longer fits, its mutants would be gone."""
    mine = [operator for operator in OPERATORS if operator.group == name]
    assert len(mine) >= 8
    missing = [
        operator
        for operator in mine
        if not any(
            any(True for _ in matches(operator.pattern, source_of(stem)))
            for stem in KERNELS
        )
    ]
    assert missing == []


@pytest.mark.parametrize("stem", KERNELS)
def test_mutants_are_unlike_each_other_and_of_every_class(stem):
    found = mutants_of(stem)
    assert len({mutant.name for mutant in found}) == len(found)
    texts = {mutant.text for mutant in found} | {source_of(stem)}
    assert len(texts) == len(found) + 1
    assert {mutant.name.partition(":")[0] for mutant in found} == set(CLASSES)
    for mutant in found[::9]:
        compile(mutant.text, stem, "exec")


def test_a_look_behind_may_be_of_any_length():
    found = [
        match.span() for match in matches(r"(?<=a+\(b\)?)c(?=d)", "aa(bcd a(b)cd acd")
    ]
    assert found == [(4, 5), (11, 12)]


def test_every_accepted_survivor_is_a_mutant_of_its_kernels():
    names = [
        (stem, KIND, mutant.name) for stem in KERNELS for mutant in mutants_of(stem)
    ]
    for accepted in ACCEPTED:
        assert any(accepted.covers(*name) for name in names), accepted


def test_host_code_is_told_from_device_code():
    source = source_of(KERNELS[0])
    lines = source.split("\n")
    at = {text: lines.index(text) + 1 for text in lines}
    assert (
        function_of(source, at["    num_tiles = q_tiles * heads * batch"]) == "launch"
    )
    assert function_of(source, at["    tile = wave * width + place"]) == "work_tile"
    assert function_of(source, at["LN_2 = 0.6931471805599453  # = math.log(2)"]) == ""


def test_the_table_counts_by_kernel_and_by_class():
    def row(mutant, noticed):
        what = {"name": mutant.name, "line": mutant.line, "before": mutant.before}
        return {"kernel": KERNELS[0], "kind": KIND, **what, "noticed": noticed}

    def first(part):
        return next(m for m in mutants_of(KERNELS[0]) if m.name.endswith(part))

    rows = [
        row(first("batch 0"), "ragged eager: error 1"),
        row(first("no wave goes backwards"), None),
        row(first("the second wave is the first one place on"), None),
    ]
    assert list(map(verdict, rows)) == ["noticed", "equivalent", "survivors"]
    assert list(table(rows))[-1] == "| all |  | 3 | 0 | 1 | 1 | 1 | 50.0 % |"
    by_class = list(classes(rows))
    assert by_class[2] == "| indices | function | 1 | 0 | 0 | 1 | 0 | 100.0 % |"
    assert by_class[3] == "| scheduler | function | 2 | 0 | 1 | 0 | 1 | 0.0 % |"
    assert reason(KERNELS[0], KIND, rows[1]["name"]) is not None
