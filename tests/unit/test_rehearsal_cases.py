# SPDX-License-Identifier: Apache-2.0
"""Whether the emulator's problems are what they claim: waves, tails, empty rows, few clusters."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from fmha_gen.rehearsal import read_constants, tiles_of
from fmha_gen.rehearsal_cases import MANY_BLOCKS, Tiles, cases_for

GENERATED = Path(__file__).resolve().parents[2] / "generated"
KERNELS = {
    path.stem: read_constants(path.read_text(encoding="utf-8"))
    for path in sorted(GENERATED.glob("*.py"))
}
every_kernel = pytest.mark.parametrize("constants", KERNELS.values(), ids=KERNELS)


def spec(q="dynamic", kv="dynamic", q_per_kv=1):
    return {"seqlen": {"q": q, "kv": kv}, "q_per_kv": q_per_kv}


def work_tiles(spec, tiles, case):
    heads = case.kv_heads * spec["q_per_kv"] // tiles.heads
    return case.batch * heads * math.ceil(case.q / tiles.cluster_rows)


def blocks(tiles, case):
    return math.ceil(case.kv / tiles.kv)


def test_there_are_kernels():
    assert KERNELS


@every_kernel
def test_each_kernel_is_seen_with_three_blocks_and_two_waves(constants):
    spec, tiles = constants["SPEC"], tiles_of(constants)
    found = cases_for(spec, tiles)
    assert any(
        blocks(tiles, case) >= 3
        and work_tiles(spec, tiles, case) >= 2 * case.sm_count // tiles.ctas
        for case in found
    )
    kv = spec["seqlen"]["kv"]
    whole = kv != "dynamic" and kv % tiles.kv == 0  # there is no tail to see
    assert whole or any(case.kv % tiles.kv for case in found)
    assert any(case.layout == "bhsd" for case in found)
    assert all(case.sm_count >= tiles.ctas for case in found)


@every_kernel
def test_no_case_costs_more_than_a_model_can_pay(constants):
    spec, tiles = constants["SPEC"], tiles_of(constants)
    for case in cases_for(spec, tiles):
        work = work_tiles(spec, tiles, case)
        clusters = work if tiles.single else min(case.sm_count // tiles.ctas, work)
        if case.clusters is None:
            assert work * blocks(tiles, case) <= MANY_BLOCKS
        else:
            assert all(0 <= number < clusters for number in case.clusters)
            each = math.ceil(work / clusters)
            assert each == 1 if tiles.single else each >= 2
            assert len(case.clusters) * each * blocks(tiles, case) <= 2 * MANY_BLOCKS


@every_kernel
def test_tiles_of_one_block_outnumber_the_arrivals_that_free_the_q_stages(constants):
    """Each leaves one to the next phase of a barrier that counts one too few."""
    spec, tiles = constants["SPEC"], tiles_of(constants)
    arrivals = tiles.q_releases
    assert arrivals >= 1  # with one, no barrier can count one too few
    assert spec["seqlen"]["kv"] != "dynamic" or any(
        blocks(tiles, case) == 1
        and work_tiles(spec, tiles, case) > arrivals * case.sm_count // tiles.ctas
        for case in cases_for(spec, tiles)
    )


@every_kernel
def test_fixed_lengths_are_kept(constants):
    spec, tiles = constants["SPEC"], tiles_of(constants)
    for case in cases_for(spec, tiles):
        for side, length in (("q", case.q), ("kv", case.kv)):
            assert spec["seqlen"][side] in ("dynamic", length)


def test_a_dynamic_kernel_meets_every_kind_of_problem():
    tiles = Tiles(128, 128, (1, 1))
    found = {case.name.rsplit("_b", 1)[0]: case for case in cases_for(spec(), tiles)}
    assert found["exact"].q % 128 == found["exact"].kv % 128 == 0
    assert found["one_by_one"].q == found["one_by_one"].kv == 1
    assert found["one_row"].q == 1 and found["one_key"].kv == 1
    assert found["short_kv"].q > found["short_kv"].kv + 1  # rows that see no key
    assert found["ragged"].kv > found["ragged"].q
    assert found["waves"].sm_count == 2
    assert work_tiles(spec(), tiles, found["waves"]) % 2 == 1
    assert found["fused"].layout == "fused"
    assert "odd_tiles" not in found


def test_a_pair_of_query_tiles_meets_an_odd_number_of_them():
    tiles = Tiles(128, 128, (2, 1))
    found = {case.name.rsplit("_b", 1)[0]: case for case in cases_for(spec(), tiles)}
    assert math.ceil(found["odd_tiles"].q / 128) % 2 == 1
    assert all(case.sm_count % 2 == 0 for case in found.values())


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1)])
@pytest.mark.parametrize(("q", "heads"), [(64, 8), (128, 8), (192, 12), (128, 128)])
def test_a_packed_kernel_meets_every_kind_of_problem(q, heads, cluster):
    tiles = Tiles(q, 128, cluster, sms_per_head=4, packed=heads)
    packed = spec(q_per_kv=heads)
    found = {case.name.rsplit("_b", 1)[0]: case for case in cases_for(packed, tiles)}
    positions = q // heads
    assert tiles.positions == positions
    assert tiles.cluster_rows == positions * cluster[0]
    assert found["one_by_one"].q == found["one_row"].q == 1
    assert positions == 1 or found["ragged"].q % positions
    assert work_tiles(packed, tiles, found["ragged"]) >= 2  # of the only cluster
    assert work_tiles(packed, tiles, found["waves"]) >= 5
    # All rows of a tile see no key, and there is another tile.
    assert found["no_key"].q - found["no_key"].kv > 2 * tiles.cluster_rows
    # The first position of the second tile does not see the block that its last begins with.
    edge = found["edge"]
    first = positions + 1 + edge.kv - edge.q
    last = first + positions - 1
    assert positions == 1 or -(-first // 128) < -(-last // 128)
    assert not {"edge", "no_key"} & {
        case.name.rsplit("_b", 1)[0]
        for case in cases_for(packed, Tiles(q, 128, cluster))
    }


@every_kernel
def test_a_causal_kernel_meets_sections_of_which_the_last_is_smaller(constants):
    spec, tiles = constants["SPEC"], tiles_of(constants)
    assert (tiles.sms_per_head > 0) == (spec["mask"] == "causal")
    found = [case for case in cases_for(spec, tiles) if case.name[:8] == "sections"]
    asked = tiles.sms_per_head > 0 and spec["seqlen"]["kv"] == "dynamic"
    assert len(found) == asked
    for case in found:
        heads = case.kv_heads * spec["q_per_kv"] // tiles.heads
        section = case.sm_count // tiles.sms_per_head
        assert 0 < heads % section < section < heads
        assert (
            case.q > tiles.cluster_rows
        )  # or a head is one tile, whose order is no matter
        assert case.clusters is None


@every_kernel
def test_a_head_has_two_query_tiles_in_some_case(constants):
    """Or a wrong slice of Q, or of O, along a wrong dimension cannot be seen."""
    spec, tiles = constants["SPEC"], tiles_of(constants)
    fixed = spec["seqlen"]["q"]
    assert (fixed != "dynamic" and fixed <= tiles.cluster_rows) or any(
        case.q > tiles.cluster_rows for case in cases_for(spec, tiles)
    )


@every_kernel
def test_a_causal_kernel_meets_warpgroups_without_rows_in_a_tile_after_another(
    constants,
):
    spec, tiles = constants["SPEC"], tiles_of(constants)
    if spec["mask"] != "causal" or set(spec["seqlen"].values()) != {"dynamic"}:
        return
    assert any(
        case.kv % tiles.kv == 0  # so that they have no masked block
        and case.q <= tiles.positions // 2
        and work_tiles(spec, tiles, case) >= 2 * case.sm_count // tiles.ctas
        for case in cases_for(spec, tiles)
    )


def test_kernels_that_store_o_from_registers_are_seen_with_a_ragged_end():
    direct = [one for one in KERNELS.values() if one["Q_STAGES"] == 1]
    # A fixed length of whole tiles has no such end.
    ragged = [one for one in direct if one.get("SEQLEN_Q", 1) % one["TILE_Q"]]
    assert ragged
    for constants in ragged:
        tiles = tiles_of(constants)
        assert any(case.q % tiles.q for case in cases_for(constants["SPEC"], tiles))


def test_names_and_problems_are_unique_and_seeds_differ():
    found = cases_for(spec(q_per_kv=8), Tiles(192, 128, (1, 1)))
    assert len({case.name for case in found}) == len(found)
    assert len({case.seed for case in found}) == len(found)
