# SPDX-License-Identifier: Apache-2.0
import json
import os
from pathlib import Path

import pytest
from fmha_gen.arch import sm90
from fmha_gen.build import sass, toolchain
from fmha_gen.errors import CheckFailed, EnvironmentProblem
from fmha_gen.host import tools

DATA = Path(__file__).parent / "data"
VECTOR_ADD = (DATA / "vector_add.py").read_text()
CHAIN = (DATA / "wgmma_chain.py").read_text()


@pytest.fixture(scope="module")
def vector_add() -> toolchain.CompileReport:
    return toolchain.compile_kernel(VECTOR_ADD, "vector_add")


@pytest.fixture(scope="module")
def chain() -> toolchain.CompileReport:
    return toolchain.compile_kernel(CHAIN, "wgmma_chain")


def changed(old: str, new: str) -> toolchain.CompileReport:
    assert CHAIN.count(old) == 1
    return toolchain.compile_kernel(CHAIN.replace(old, new), "wgmma_chain")


def test_a_small_kernel_is_counted_and_passes(vector_add):
    (kernel,) = vector_add.kernels
    assert kernel.entry == "vector_add_0"
    assert vector_add.arch == "sm_90a"
    assert 0 < kernel.registers < 64
    assert kernel.instructions["FADD"] == 1
    assert kernel.instructions["total"] > 10
    assert kernel.loops == ()
    assert toolchain.gate(vector_add) == []


def test_json_round_trip(chain):
    assert (
        toolchain.CompileReport.from_json(json.loads(json.dumps(chain.to_json())))
        == chain
    )


def test_two_compiles_report_the_same(vector_add):
    assert toolchain.compile_kernel(VECTOR_ADD, "vector_add") == vector_add


def test_the_callers_dsl_settings_change_nothing(vector_add, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    monkeypatch.setenv("CUTE_DSL_KEEP", "ir")
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert toolchain.compile_kernel(VECTOR_ADD, "vector_add") == vector_add
    assert list(tmp_path.iterdir()) == []


def test_overlapping_wgmmas_pass(chain):
    (kernel,) = chain.kernels
    w = kernel.wgmma
    assert (w.mmas, w.groups, w.overlaps) == (
        w.asked_mmas,
        w.asked_groups,
        w.asked_overlaps,
    )
    assert w.overlaps == 1
    assert w.serialised == 0
    (loop,) = kernel.loops
    assert loop.instructions["HGMMA"] == 8
    assert loop.instructions["MUFU.EX2"] == 32
    assert toolchain.gate(chain) == []


def test_p_overwritten_while_in_flight_is_serialised():
    report = changed("DRAIN_BEFORE_P = True", "DRAIN_BEFORE_P = False")
    (kernel,) = report.kernels
    assert kernel.instructions["LDL"] == kernel.stack_bytes == 0
    assert kernel.wgmma.serialised > 0
    assert [f.split(":")[0] for f in toolchain.gate(report)] == ["serialised wgmma"]


def test_a_branch_while_in_flight_is_serialised():
    report = changed("BRANCH_IN_FLIGHT = False", "BRANCH_IN_FLIGHT = True")
    assert report.kernels[0].loops[0].serialised > 0
    assert [f.split(":")[0] for f in toolchain.gate(report)] == ["serialised wgmma"]


def test_a_tile_that_does_not_fit_spills_and_is_serialised():
    report = changed("TILE_KV = 64\nWARPGROUPS = 1", "TILE_KV = 160\nWARPGROUPS = 4")
    failures = "\n".join(toolchain.gate(report))
    assert report.kernels[0].stack_bytes > 0
    assert "of stack" in failures
    assert "spills:" in failures
    assert "serialised wgmma" in failures


def test_the_word_cutlass_in_the_symbol_is_seen():
    text = VECTOR_ADD.replace(
        "remove_cutlass_symbol=True", "remove_cutlass_symbol=False"
    )
    report = toolchain.compile_kernel(text, "vector_add")
    assert [f for f in toolchain.gate(report) if "word cutlass" in f]


def test_a_module_that_fails_shows_its_last_lines():
    text = VECTOR_ADD.replace("a[thread] + b[thread]", "a[thread] + nonsense[thread]")
    with pytest.raises(
        CheckFailed, match=r"vector_add: does not compile\n(.|\n)*nonsense"
    ) as info:
        toolchain.compile_kernel(text, "vector_add")
    assert "\x1b" not in str(info.value)


def test_a_module_without_a_kernel_is_refused():
    with pytest.raises(CheckFailed, match=r"made 0 ptx"):
        toolchain.compile_kernel("def compile():\n    pass\n", "empty")


def test_a_hang_ends():
    with pytest.raises(CheckFailed, match=r"more than 0\.5 s"):
        toolchain.compile_kernel("import time\ntime.sleep(60)\n", "hang", timeout=0.5)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "nvidia-cutlass-dsl is not installed"),
        ({"nvidia-cutlass-dsl": "4.8.0"}, "4.8.0 is not supported"),
        ({"nvidia-cutlass-dsl": "4.9.0"}, "4.9.0 is not supported"),
        ({"nvidia-cutlass-dsl": "4.10"}, "4.10 is not supported"),
    ],
)
def test_wrong_dsl_is_one_line(monkeypatch, installed, message):
    monkeypatch.setattr(tools, "dsl_distributions", lambda: installed)
    with pytest.raises(EnvironmentProblem, match=message) as info:
        toolchain.compile_kernel(VECTOR_ADD, "vector_add")
    assert "\n" not in str(info.value)


def test_missing_disassembler_is_one_line(monkeypatch):
    monkeypatch.setitem(tools.TOOLS, "nvdisasm", "no-such-distribution")
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(EnvironmentProblem, match="nvdisasm is not installed"):
        tools.require_tool("nvdisasm")


LISTING = """
.text.kernel:
        /*0000*/                   MOV R1, R2 ;
.L_x_0:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R30 ;
        /*0040*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/               @P1 BRA `(.L_x_0) ;
        /*0070*/                   EXIT ;
.L_x_2:
        /*0080*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R30 ;
        /*0090*/              @!P0 BRA `(.L_x_2) ;
        /*00a0*/                   BRA `(.L_x_1) ;
.L_x_3:
        /*00b0*/                   BRA `(.L_x_3);
"""


def test_loops_are_natural_loops_and_not_address_ranges():
    kernel = sass.parse(LISTING)
    assert [hex(loop.address) for loop in sass.loops(kernel)] == ["0x10", "0x80"]
    ((_, loop),) = sass.role_loops(kernel, sm90.ARCHITECTURE.role_loops)
    addresses = [hex(i.address) for i in sass.body(kernel, loop)]
    assert addresses == [
        "0x10",
        "0x20",
        "0x30",
        "0x40",
        "0x50",
        "0x60",
        "0x80",
        "0x90",
        "0xa0",
    ]
    assert sass.count(kernel.instructions, {"HGMMA": "HGMMA"})["HGMMA"] == 2


def test_products_of_8_bit_floats_are_wgmmas_too():
    half, quarter = sass.parse(LISTING), sass.parse(LISTING.replace("HGMMA", "QGMMA"))
    assert [i.is_wgmma for i in quarter.instructions] == [
        i.is_wgmma for i in half.instructions
    ]
    assert [i.ends_group for i in quarter.instructions] == [
        i.ends_group for i in half.instructions
    ]
    ((role, loop),) = sass.role_loops(quarter, sm90.ARCHITECTURE.role_loops)
    assert (role.role, hex(loop.address)) == ("consumer", "0x10")
    ways = [
        [i.address for i in sass.iteration(kernel, loop, role.opcode)]
        for kernel in (half, quarter)
    ]
    assert ways[0] == ways[1]


ROLES = """
.text.kernel:
        /*0000*/                   BRX R4 -0x960     (*"BRANCH_TARGETS .L_x_0,.L_x_1"*);
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R30 ;
        /*0020*/              @!P0 BRA `(.L_x_7) ;
.L_x_6:
        /*0030*/                   BSSY.RECONVERGENT B0, `(.L_x_2) ;
        /*0040*/               @P1 BRA `(.L_x_3) ;
        /*0050*/                   STTM.x32 tmem[UR4], R8 ;
.L_x_3:
        /*0060*/                   BSYNC.RECONVERGENT B0 ;
.L_x_2:
        /*0070*/               @P2 BRA `(.L_x_0) ;
        /*0080*/                   EXIT ;
.L_x_1:
        /*0090*/                   BSSY.RECONVERGENT B0, `(.L_x_4) ;
        /*00a0*/                   BSYNC.RECONVERGENT B0 ;
.L_x_4:
        /*00b0*/               @P2 BRA `(.L_x_1) ;
        /*00c0*/                   EXIT ;
.L_x_7:
        /*00d0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R30 ;
        /*00e0*/              @!P0 BRA `(.L_x_7) ;
        /*00f0*/                   BRA `(.L_x_6) ;
"""


def test_roles_behind_an_indirect_branch_have_loops_of_their_own():
    kernel = sass.parse(ROLES)
    assert [hex(loop.address) for loop in sass.loops(kernel)] == [
        "0x10",
        "0x90",
        "0xd0",
    ]


def test_an_iteration_is_the_shortest_way_round_that_does_most_of_what_is_asked():
    kernel = sass.parse(ROLES)
    loop = sass.loops(kernel)[0]
    short, stores = (
        [hex(i.address) for i in sass.iteration(kernel, loop, most)]
        for most in (None, "STTM")
    )
    assert short == ["0x10", "0x20", "0x30", "0x40", "0x60", "0x70"]
    assert stores == ["0x10", "0x20", "0x30", "0x40", "0x50", "0x60", "0x70"]


def hgmma(accumulator: str, source: str, end: str = "") -> str:
    return f"HGMMA.64x64x16.F32.BF16 {accumulator}, R4, gdesc[UR8], {source}{end}"


DRAIN = ["WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.ARRIVE"]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([hgmma("R24", "R24"), hgmma("R24", "R24", ", gsb0")], 0),
        ([hgmma("R24", "R24", ", gsb0"), *DRAIN, hgmma("R24", "R24", ", gsb0")], 1),
        # another accumulator, a new chain, work in between, a wait that leaves one in flight
        ([hgmma("R24", "R24", ", gsb0"), *DRAIN, hgmma("R88", "R88", ", gsb0")], 0),
        ([hgmma("R24", "R24", ", gsb0"), *DRAIN, hgmma("R24", "RZ, !UPT")], 0),
        ([hgmma("R24", "R24", ", gsb0"), *DRAIN, hgmma("R24", "R24, UP0")], 0),
        (
            [
                hgmma("R24", "R24", ", gsb0"),
                *DRAIN,
                "MUFU.EX2 R1, R1",
                hgmma("R24", "R24"),
            ],
            0,
        ),
        (
            [
                hgmma("R24", "R24", ", gsb0"),
                "WARPGROUP.DEPBAR.LE gsb0, 0x1",
                hgmma("R24", "R24", ", gsb0"),
            ],
            0,
        ),
    ],
)
def test_what_counts_as_serialised(lines, found):
    text = "\n".join(
        f"        /*{16 * n:04x}*/  {line} ;" for n, line in enumerate(lines)
    )
    assert sass.serialised(sass.parse(text).instructions) == found
    of_8_bit_floats = text.replace("HGMMA", "QGMMA")
    assert sass.serialised(sass.parse(of_8_bit_floats).instructions) == found
