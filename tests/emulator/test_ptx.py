# SPDX-License-Identifier: Apache-2.0
"""The parser: scopes, vectors, guards, parameters and what it refuses."""

from __future__ import annotations

import pytest
from fmha_gen.emulator.ptx import (
    Address,
    Guard,
    Immediate,
    Instruction,
    Negated,
    Pair,
    Param,
    PtxError,
    Register,
    SharedVariable,
    Symbol,
    Vector,
    parse,
    parse_kernels,
)

HEAD = ".version 8.8\n.target sm_90a\n.visible .entry k(\n"


def body(text: str, params: str = "", before: str = "") -> tuple[Instruction, ...]:
    return parse(
        f"{HEAD}{params})\n{before}{{\n.reg .b32 %r<9>; .reg .pred %p<9>;\n{text}\n}}\n"
    ).instructions


def one(text: str) -> Instruction:
    (instruction,) = body(text)
    return instruction


def test_opcode_modifiers_and_line():
    instruction = one(
        "\n\tmbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1+16], %r2, 10000000;"
    )
    assert instruction.opcode == "mbarrier"
    assert instruction.modifiers == ("try_wait", "parity", "shared::cta", "b64")
    assert instruction.name == "mbarrier.try_wait.parity.shared::cta.b64"
    assert instruction.line == 8
    assert instruction.operands == (
        Register("%p1"),
        Address(Register("%r1"), 16),
        Register("%r2"),
        Immediate(10000000),
    )


@pytest.mark.parametrize(
    ("written", "operand"),
    [
        ("%r1", Register("%r1")),
        ("%tid.x", Register("%tid.x")),
        ("_", Register("_")),
        ("-1", Immediate(-1)),
        ("0x1F", Immediate(31)),
        ("0fFF800000", Immediate(0xFF800000, is_float=True)),
        ("name", Symbol("name")),
        ("name+8", Symbol("name", 8)),
        ("!%p1", Negated(Register("%p1"))),
        ("%r1|%p2", Pair(Register("%r1"), Register("%p2"))),
        ("{%r1, _, 3}", Vector((Register("%r1"), Register("_"), Immediate(3)))),
        ("[%r1]", Address(Register("%r1"))),
        ("[%r1 + -4]", Address(Register("%r1"), -4)),
        ("[name+40]", Address(Symbol("name"), 40)),
        (
            "[%rd1, {%r1, 0}]",
            Address(Register("%rd1"), 0, (Register("%r1"), Immediate(0))),
        ),
    ],
)
def test_operand(written, operand):
    assert one(f"mov.b32 %r0, {written};").operands == (Register("%r0"), operand)


@pytest.mark.parametrize(
    ("written", "guard"),
    [
        ("@%p1 bar.sync 0;", Guard(Register("%p1"), False)),
        ("@!%p1 bar.sync 0;", Guard(Register("%p1"), True)),
        ("bar.sync 0;", None),
    ],
)
def test_guard(written, guard):
    assert one(written).guard == guard


ASSEMBLY = """
{
.reg .pred P1;
LOOP:
@P1 bra.uni DONE;
bra.uni LOOP;
DONE:
}
{
.reg .pred P1;
LOOP:
setp.ne.b32 P1, %r1, 0;
@P1 bra LOOP;
bra OUTSIDE;
}
OUTSIDE: ret;
"""


def test_names_of_inline_assembly_are_apart():
    module = parse(f"{HEAD})\n{{\n.reg .b32 %r<9>;{ASSEMBLY}}}\n")
    targets = [i.operands[0].name for i in module.instructions if i.opcode == "bra"]
    assert targets == ["DONE@1", "LOOP@1", "LOOP@2", "OUTSIDE"]
    assert [module.labels[target] for target in targets] == [2, 0, 2, 5]
    guards = [i.guard.register.name for i in module.instructions if i.guard]
    assert guards == ["P1@1", "P1@2"]
    assert module.register_type("P1@2") == "pred"
    assert module.register_type("%r7") == "b32"


def test_inline_assembly_may_declare_for_the_whole_kernel():
    text = ".reg .b64 desc_<2>; .reg .b32 low;\n{ mov.b64 desc_1, {low, 3}; }"
    (move,) = body(text)
    assert move.operands == (
        Register("desc_1"),
        Vector((Register("low"), Immediate(3))),
    )


def test_params_are_laid_out():
    params = (
        ".param .align 64 .b8 a[128],\n.param .u32 b,\n"
        ".param .u64 .ptr .global .align 16 c,\n.param .f32 d"
    )
    module = parse(f"{HEAD}{params}\n)\n{{\nret;\n}}\n")
    assert module.params == (
        Param("a", 128, 64, 0),
        Param("b", 4, 4, 128),
        Param("c", 8, 8, 136),
        Param("d", 4, 4, 144),
    )
    assert module.param_bytes == 148


def test_module_properties():
    text = (
        ".extern .shared .align 1024 .b8 dynamic[];\n.shared .align 8 .b8 fixed[24];\n"
    )
    module = parse(
        f"{text}{HEAD})\n.reqntid 384, 1, 1\n.minnctapersm 1\n"
        "{\nmov.u32 %r1, dynamic;\nmov.u32 %r2, fixed;\nret;\n}\n"
    )
    assert module.name == "k"
    assert module.target == "sm_90a"
    assert module.required_threads == (384, 1, 1)
    assert module.shared == (
        SharedVariable("dynamic", 0, 1024),
        SharedVariable("fixed", 24, 8),
    )


def test_source_lines():
    before = '.file 1 "kernel.py"\n'
    lines = ".loc 1 12 3\nret;\n.loc 1 14 1, function_name x, inlined_at 1 2 3\nexit;\n"
    text = f"{before}{HEAD})\n{{\n{lines}}}\n"
    assert [i.source for i in parse(text).instructions] == [
        "kernel.py:12",
        "kernel.py:14",
    ]


def test_comments_keep_lines():
    first, second = body("/* one\ntwo */ bar.sync 0; // three\nbar.sync 1;")
    assert (first.line, second.line) == (8, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bra NOWHERE;", "PTX line 7: label not found: NOWHERE"),
        ("mov.b32 %r1, #3;", "PTX line 7: operand not understood: #3"),
        ("\n.surface x;", "PTX line 8: directive not understood: .surface x"),
        ("mov.b32 %r1, %r2", "PTX line 7: a statement without its semicolon"),
        ("{ ret;", "PTX line 9: the kernel's closing brace is missing"),
    ],
)
def test_refused(text, message):
    with pytest.raises(PtxError) as caught:
        body(text)
    assert str(caught.value) == message


TWO = f""".shared .align 4 .b8 mine[16];
.shared .align 4 .b8 minefield[32];
{HEAD})
.reqntid 128, 1, 1
{{ .reg .b32 %r<2>; mov.u32 %r1, mine;
L: bra L; }}
.visible .entry other(.param .u64 other_0)
{{ .reg .b64 %r<2>; mov.u32 %r1, minefield;
L: bra L; }}
"""


def test_kernels_of_a_module_are_apart():
    first, other = parse_kernels(TWO).values()
    assert (first.name, other.name) == ("k", "other")
    assert (first.required_threads, other.required_threads) == ((128, 1, 1), None)
    assert (first.param_bytes, other.param_bytes) == (0, 8)
    assert first.shared == (SharedVariable("mine", 16, 4),)
    assert other.shared == (SharedVariable("minefield", 32, 4),)
    assert (first.register_type("%r1"), other.register_type("%r1")) == ("b32", "b64")
    assert [[i.line for i in each.instructions] for each in (first, other)] == [
        [8, 9],
        [11, 12],
    ]
    assert dict(first.labels) == dict(other.labels) == {"L": 1}


def test_one_kernel_only():
    with pytest.raises(PtxError, match="line 11: 2 kernels in the module, not one"):
        parse(TWO)
    with pytest.raises(PtxError, match="no kernel in the module"):
        parse_kernels(".version 8.8\n")
