# SPDX-License-Identifier: Apache-2.0
"""The table of emitters: what it lists is tested, what it does not list is refused."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fmha_gen.emulator import ptx
from fmha_gen.emulator.emitters import EMITTERS, UnsupportedInstruction
from fmha_gen.emulator.lower import lower

from . import kernels
from .test_tensor_memory import FORMS

# The modules whose tests run kernels and look at what the instructions did.
TESTS = (
    "test_opcodes.py",
    "test_integers.py",
    "test_clusters.py",
    "test_checks.py",
    "test_machine.py",
    "test_atomics.py",
    "test_bf16_pairs.py",
    "test_bulk_loads.py",
    "test_bulk_reductions.py",
    "test_semaphores.py",
    "tensor_kernels.py",
)
# Modifiers that tests take from lists of all of them: test_opcodes the shapes of products,
# test_tensor_memory the shapes of loads and stores (see below), test_tcgen05_checks the hints.
LISTED = {
    "wgmma": r"m64n\d+k\d+",
    "tcgen05": r"\d+x\d+b(x2)?|x\d+|(un)?pack::16b|collector::a::\w+",
}


def strings(tree: ast.AST) -> Iterator[str]:
    """The strings of a module; a hole of an f-string is `{}`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}"
                for part in node.values
            )


@functools.cache
def exercised() -> frozenset[tuple[str, str]]:
    """(opcode, modifier) of every instruction in a string of those modules.

    `cta_group::{}` stands for both groups and `kind::{}` for all kinds, by which its users are
    parametrised.
    """
    found = set()
    for name in TESTS:
        tree = ast.parse(Path(__file__).with_name(name).read_text())
        for opcode, modifiers in re.findall(
            r"\b([a-z]\w*)((?:\.[A-Za-z0-9_:{}]+)+)", " ".join(strings(tree))
        ):
            found |= {(opcode, modifier) for modifier in modifiers[1:].split(".")}
    return frozenset(found)


def is_exercised(opcode: str, modifier: str) -> bool:
    family = re.match(r"(cta_group|kind)::", modifier)
    return any(
        name == modifier or (family and name.startswith(f"{family[0]}{{}}"))
        for known, name in exercised()
        if known == opcode
    )


@pytest.mark.parametrize("opcode", sorted(EMITTERS))
def test_every_modifier_is_tested(opcode):
    """Of each opcode all that its emitter accepts."""
    listed = LISTED.get(opcode, "$")
    assert [
        modifier
        for modifier in sorted(EMITTERS[opcode].modifiers)
        if not re.fullmatch(listed, modifier) and not is_exercised(opcode, modifier)
    ] == []


def test_loads_and_stores_of_tensor_memory_are_tested_in_every_shape():
    tested = {name for shape, count, _ in FORMS for name in (shape, f"x{count}")}
    accepted = EMITTERS["tcgen05"].modifiers
    assert {name for name in accepted if re.match(r"\d+x|x\d", name)} == tested


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("frob.b32 %r1, %r2;", "frob.b32 is not modelled"),
        ("add.rz.f32 %r1, %r2, %r3;", "add.rz.f32 is not modelled: .rz"),
        (
            "ex2.approx.f32 %r1, %r2;",
            "ex2.approx.f32 is not modelled: only .approx.ftz.f32 is",
        ),
        ("tanh.approx.bf16 %r1, %r2;", "tanh.approx.bf16 is not modelled: .bf16"),
        (
            "shfl.sync.idx.b32 %r1, %r2, 0, 31, 255;",
            "shfl.sync.idx.b32 is not modelled: a member mask other than the whole warp",
        ),
        ("add.s64 %r1, %r2, %r3;", "add.s64 is not modelled: %r2 is not 64 bits wide"),
        ("cvt.s32.f32 %r1, %r2;", "cvt.s32.f32 is not modelled"),
        (
            "tcgen05.shift.cta_group::1.down [%r1];",
            "tcgen05.shift.cta_group::1.down is not modelled: .shift",
        ),
    ],
)
def test_other_instructions_name_the_line(instruction, message):
    module = ptx.parse(kernels.text(f"\n{instruction}"))
    with pytest.raises(UnsupportedInstruction) as caught:
        lower(module)
    assert str(caught.value) == f"PTX line {kernels.LINES_BEFORE + 1}: {message}"
