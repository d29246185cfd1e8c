# SPDX-License-Identifier: Apache-2.0
"""What is damaged: each mutant differs from the kernel in one place, and has a name of its own."""

from __future__ import annotations

import re

import pytest
from fmha_gen.emulator import lower, ptx

from . import ptx_mutants, source_mutants
from .campaign import BACKWARD, KERNELS, path_of

PTX = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .u32 k_0)
{
	.reg .pred %p<4>;
	.reg .b16 %rs<4>;
	.reg .b32 %r<8>;
	.reg .b64 %rd<4>;
	mov.b32 %r1, smem;
	mov.b32 %r2, 4;
	STATEMENT
	ret;
}
"""


def damages(statement):
    """What is done to a statement and what stands there then; the results are PTX."""
    found = {}
    for mutant in ptx_mutants.mutants(PTX.replace("STATEMENT", statement)):
        lower.lower(ptx.parse(mutant.text))
        assert mutant.before == statement
        name, what = mutant.name.split("#1: ")
        assert statement.split(" ", 1)[-1].startswith(name) or name in statement
        found[what] = mutant.text.split("\n")[mutant.line - 1]
    return found


def test_counts_are_off_by_one_and_the_guard_stays():
    found = damages("@%p1 mbarrier.init.shared.b64 [%r1+8], %r2;")
    assert found.pop("removed") == ""
    assert set(found) == {"count + 1", "count - 1"}
    assert "mov.b32 Given, %r2; add.s32 Damaged, Given, 1;" in found["count + 1"]
    assert "sub.s32 Damaged, Given, 1;" in found["count - 1"]
    for text in found.values():
        assert "@%p1 mbarrier.init.shared.b64 [%r1+8], Damaged;" in text


def test_a_wait_succeeds_or_waits_for_the_other_phase():
    found = damages("mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2, 10000000;")
    assert found["succeeds at once"] == "setp.eq.s32 %p1, 0, 0;"
    assert "xor.b32 Damaged, Given, 1;" in found["the other phase"]
    assert "%p1, [%r1], Damaged, 10000000;" in found["the other phase"]


def test_a_copy_swaps_rows_and_columns():
    load = (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
    )
    found = damages(f"{load}[%r1], [%rd1, {{%r2, %r3}}], [%r4];")
    assert found == {
        "rows and columns swapped": f"{load}[%r1], [%rd1, {{%r3, %r2}}], [%r4];"
    }


def test_more_groups_stay_in_flight():
    found = damages("wgmma.wait_group.sync.aligned 1;")
    assert found == {
        "removed": "",
        "one group more stays in flight": "wgmma.wait_group.sync.aligned 2;",
    }


def test_barriers_without_a_count_keep_having_none():
    assert set(damages("bar.sync 0;")) == {"removed", "another barrier"}
    found = damages("bar.arrive %r2, 256;")
    assert "bar.arrive %r2, Damaged;" in found["128 threads more"]
    assert "sub.s32 Damaged, Given, 32;" in found["32 threads fewer"]


def test_only_a_multicast_loses_bits_of_its_mask():
    load = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        "{} [%r1], [%rd1, {{%r2, %r2}}], [%r1]{};"
    )
    assert damages(load.format("", "")) == {}
    found = damages(load.format(".multicast::cluster", ", %rs1"))
    assert "and.b16 Damaged, Given, 2;" in found["mask bit 0 lost"]
    assert "and.b16 Damaged, Given, 1;" in found["mask bit 1 lost"]


@pytest.mark.parametrize("pattern", [row[1] for row in source_mutants.REPLACEMENTS])
def test_every_replacement_fits_a_kernel(pattern):
    """When the templates change and a pattern no longer fits, its mutants would be gone."""
    sources = [path_of(stem).read_text("utf-8") for stem in KERNELS]
    assert any(re.search(pattern, source, re.M) for source in sources)


@pytest.mark.parametrize("stem", KERNELS)
def test_source_mutants_are_python_and_unlike_each_other(stem):
    source = path_of(stem).read_text(encoding="utf-8")
    found = list(source_mutants.mutants(source))
    assert len(found) > 60
    assert len({mutant.name for mutant in found}) == len(found)
    assert len({mutant.text for mutant in found} | {source}) == len(found) + 1
    for mutant in found[::9]:
        compile(mutant.text, stem, "exec")


# What a backward kernel can do wrong that no forward kernel can, and in how many places.
OF_BACKWARD = {
    r"cute\.arch\.fence_proxy\(.*: dropped": 3,  # before dS is full, and of zeros, and of dK, dV
    r"the other stage of dS": 2,
    r"gives Q back before dK and S are done": 1,
    r"gives dO back before dV and dQ are done": 1,
    r"warpgroup\.wait_group\([12]\): one group more stays in flight": 1,
    r"rows beyond the end count": 1,
    r"rows beyond the end have an LSE": 1,
    r"rows without keys count": 1,
    r"keys beyond the end are seen": 1,
    r"mask_block\(.*: dropped": 1,
    r"sums are not cleared": 1,
    r"tickets are not set back": 1,
    r"griddepcontrol_wait\(\).*: dropped": 2,  # of the main kernel, and of the last one
    r"statistics of the block after": 2,
    r"sums of the block after": 1,
    r"add_dq\(.*: dropped": 2,
    r"clear_ds\(rings\): dropped": 1,
    r"meet\(.*: dropped": 2,
}


@pytest.mark.parametrize("stem", BACKWARD)
def test_backward_kernels_have_damages_of_their_own(stem):
    source = path_of(stem).read_text(encoding="utf-8")
    names = [mutant.name for mutant in source_mutants.mutants(source)]
    found = {x: sum(bool(re.search(x, each)) for each in names) for x in OF_BACKWARD}
    assert found == OF_BACKWARD


def test_what_backward_kernels_add_and_draw_is_damaged():
    assert set(damages("griddepcontrol.wait;")) == {"removed"}
    red = "red.relaxed.gpu.global.add.v4.f32 [%rd1], {%r1, %r2, %r1, %r2};"
    assert damages(red) == {"removed": ""}
    found = damages("atom.relaxed.gpu.global.add.s32 %r1, [%rd1], %r2;")
    assert "add.s32 Damaged, Given, 1;" in found["one more"]
    assert "%r1, [%rd1], Damaged;" in found["one more"]
    load = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    found = damages(f"{load}[%r1], [%rd1], %r2, [%r3];")
    assert "sub.s32 Damaged, Given, 16;" in found["16 bytes fewer"]
    assert "[%r1], [%rd1], Damaged, [%r3];" in found["16 bytes fewer"]
