# SPDX-License-Identifier: Apache-2.0
"""The table of emitters: what it lists is tested, what it does not list is refused."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from fmha_gen.emulator import ptx
from fmha_gen.emulator.emitters import EMITTERS, UnsupportedInstruction
from fmha_gen.emulator.lower import lower

from . import kernels

# The modules whose tests run kernels and look at what the instructions did.
TESTS = (
    "test_opcodes.py",
    "test_integers.py",
    "test_clusters.py",
    "test_checks.py",
    "test_machine.py",
)


def exercised() -> set[tuple[str, str]]:
    """(opcode, modifier) of every instruction in a string of those modules."""
    found = set()
    for name in TESTS:
        tree = ast.parse(Path(__file__).with_name(name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for opcode, modifiers in re.findall(
                    r"\b([a-z]\w*)((?:\.[A-Za-z0-9_:]+)+)", node.value
                ):
                    found |= {
                        (opcode, modifier) for modifier in modifiers[1:].split(".")
                    }
    return found


@pytest.mark.parametrize("opcode", sorted(EMITTERS))
def test_every_modifier_is_tested(opcode):
    """Of each opcode all that its emitter accepts; the shapes of products are in `test_wgmma`."""
    accepted = {m for m in EMITTERS[opcode].modifiers if not re.match(r"m64n\d", m)}
    assert accepted <= {modifier for name, modifier in exercised() if name == opcode}


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("frob.b32 %r1, %r2;", "frob.b32 is not modelled"),
        ("add.rz.f32 %r1, %r2, %r3;", "add.rz.f32 is not modelled: .rz"),
        (
            "ex2.approx.f32 %r1, %r2;",
            "ex2.approx.f32 is not modelled: only .approx.ftz.f32 is",
        ),
        (
            "shfl.sync.idx.b32 %r1, %r2, 0, 31, 255;",
            "shfl.sync.idx.b32 is not modelled: a member mask other than the whole warp",
        ),
        ("add.s64 %r1, %r2, %r3;", "add.s64 is not modelled: %r2 is not 64 bits wide"),
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
