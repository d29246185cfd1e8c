# SPDX-License-Identifier: Apache-2.0
"""The cases have every axis that the bar asks for, for every shipped kernel and kind of SPEC."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import support
from fmha_gen.arch import ARCHITECTURES
from fmha_gen.build.calls import arguments
from fmha_gen.ops import masks
from fmha_gen.ops.cases import (
    DYNAMIC,
    LONG_TILE,
    MANY_BLOCKS,
    MANY_TILES,
    REPEATS,
    Data,
    Layout,
    Tiles,
    cases_for,
    launches_for,
    residues,
    share_that_runs,
    smallest_ragged,
    walks_for,
    work_tiles,
)
from fmha_gen.ops.forward import FORWARD
from fmha_gen.ops.masks import Lengths
from fmha_gen.ops.paged import PAGED_FORWARD

# Those of the backward pass have problems of their own: see test_backward_cases.py.
FORWARD_KERNELS = support.shipped(FORWARD)
PACKED = [
    stem for stem in FORWARD_KERNELS if support.spec_file(stem).spec.batch != "dense"
]
KERNELS = [stem for stem in FORWARD_KERNELS if stem not in PACKED]
UNPACKED = [stem for stem in support.SHIPPED if stem not in PACKED]
every_operation = pytest.mark.parametrize("stem", UNPACKED)
every_kernel = pytest.mark.parametrize("stem", KERNELS)
every_packed = pytest.mark.parametrize("stem", PACKED)
taken = support.cases_of
MOST_BLOCKS = 1600  # (work tile, KV block) pairs of all emulated cases of a kernel


def emulated(cases):
    return [case for case in cases if case.emulated]


def blocks(tiles, case):
    return math.ceil(case.kv / tiles.kv)


def most_blocks(spec, tiles, case):
    """Of the work tile that has most, row by row; where the mask reads inputs, of any tile."""
    if masks.of_spec(spec).params:
        return math.ceil(case.kv / tiles.kv)
    mask, lengths = masks.of_spec(spec), Lengths(case.q, case.kv)
    first, end = mask.keys(range(case.q), lengths)
    begin, behind = mask.gaps(range(case.q), lengths)
    most = 1
    for tile in range(0, case.q, tiles.cluster_rows):
        rows = slice(tile, tile + tiles.cluster_rows)
        seeing = end[rows] > first[rows]
        if seeing.any():
            low = first[rows][seeing].min() // tiles.kv
            last = math.ceil(end[rows][seeing].max() / tiles.kv) - 1
            in_gap = [
                (begin[rows] <= block * tiles.kv).all()
                and ((block + 1) * tiles.kv <= behind[rows]).all()
                for block in range(low, last)
            ]
            most = max(most, last + 1 - low - sum(in_gap))
    return most


def clusters(case, tiles):
    return case.sm_count // tiles.ctas


def tags(cases):
    return {case.name.rsplit("_b", 1)[0]: case for case in cases}


def is_dynamic(spec):
    return set(spec["seqlen"].values()) == {DYNAMIC}


def is_long(spec, tiles):
    kv = spec["seqlen"]["kv"]
    return kv != DYNAMIC and kv > LONG_TILE * tiles.kv


def test_there_are_kernels():
    assert KERNELS and PACKED and len(UNPACKED) > len(KERNELS)


@every_operation
def test_fixed_lengths_are_kept(stem):
    spec, tiles, cases = taken(stem)
    for case in (*cases, *walks_for(spec, tiles)):
        for side, length in (("q", case.q), ("kv", case.kv)):
            assert spec["seqlen"][side] in (DYNAMIC, length)


@every_operation
def test_names_calls_and_seeds_are_unique_and_stable(stem):
    spec, tiles, cases = taken(stem)
    every = [*cases, *walks_for(spec, tiles)]
    assert len({case.name for case in every}) == len(every)
    assert len({case.seed for case in every}) == len(every)
    assert cases == cases_for(spec, tiles)


@every_kernel
def test_every_kind_of_data_layout_and_scale(stem):
    spec, tiles, cases = taken(stem)
    shown = emulated(cases)
    data = set(get_args(Data)) - {"drift"}  # of the backward pass
    if masks.of_spec(spec).right is None:
        data -= {"future"}
    if "softcap" not in spec:
        data -= {"saturated"}
    if not spec.get("sink"):
        data -= {"sinks"}
    if not spec.get("alibi"):
        data -= {"slopes"}
    if not spec.get("bias"):
        data -= {"biases"}
    if not spec.get("descale"):
        data -= {"descales"}
    if spec["dtype"] == "e4m3":
        data -= {"first_at_minus_inf", "all_at_minus_inf"}
    else:
        data -= {"mean_v"}
    if not is_dynamic(spec):
        data -= {"second_rows", "negative", "normal"}
    if is_long(spec, tiles):
        data -= {"uniform_1e4", "all_1e4", "close", "slope"}
    if spec["seqlen"]["kv"] != DYNAMIC:
        data -= {"negative"}
    assert {case.data for case in shown} >= data
    layouts = set(get_args(Layout)) - {"farther"}
    if spec["seqlen"]["kv"] != DYNAMIC:
        layouts -= {"mixed", "fused"} if spec["seqlen"]["q"] != DYNAMIC else {"mixed"}
    if is_long(spec, tiles):
        layouts -= {"cache"}
    assert {case.layout for case in shown} >= layouts
    scales = {case.scale_factor for case in shown}
    assert {1.0, 30.0} <= scales and (not is_dynamic(spec) or 1.3 in scales)
    assert is_long(spec, tiles) or {2.0**-10, 1e4} <= scales


@every_kernel
def test_every_residue_to_a_kv_tile_below_and_above_a_query_tile(stem):
    """Of kv, and of kv - q where the mask has an edge on the right."""
    spec, tiles, cases = taken(stem)
    if spec["seqlen"]["kv"] != DYNAMIC:
        return
    edges = [case for case in emulated(cases) if case.data == "edges"]
    wanted = set(residues(tiles.kv))
    assert len(wanted) == 6
    assert {case.kv % tiles.kv for case in edges} >= wanted
    fixed = spec["seqlen"]["q"]
    for above in (False, True):
        if fixed != DYNAMIC and (fixed > tiles.positions) != above:
            continue
        some = [case for case in edges if (case.q > tiles.positions) == above]
        moves = bool(masks.of_spec(spec).right_edges)
        of = {(case.kv - case.q * moves) % tiles.kv for case in some}
        assert of >= wanted, above


@every_kernel
def test_three_kv_heads_and_two_batches_at_once(stem):
    """A wrong stride of either, or a head taken for a batch, is seen nowhere else."""
    spec, tiles, cases = taken(stem)
    every = [*emulated(cases), *walks_for(spec, tiles)]
    assert any(case.kv_heads >= 3 and case.batch >= 2 for case in every)
    if is_dynamic(spec):
        some = [c for c in emulated(cases) if c.kv_heads >= 3 and c.batch >= 2]
        assert some and any(case.layout == "mixed" for case in some)
        assert any(c.kv_heads >= 3 and c.batch >= 3 for c in every)


@every_kernel
def test_a_cta_of_a_dynamic_kernel_has_many_tiles(stem):
    spec, tiles, cases = taken(stem)
    if not is_dynamic(spec) or tiles.single:
        return
    assert any(
        work_tiles(case, spec, tiles) >= MANY_TILES * clusters(case, tiles)
        for case in emulated(cases)
    )
    assert MANY_TILES >= 20


@every_kernel
def test_grids_of_every_size(stem):
    spec, tiles, cases = taken(stem)
    shown, walks = emulated(cases), walks_for(spec, tiles)
    assert not is_dynamic(spec) or any(clusters(case, tiles) == 1 for case in shown)
    fewer = [c for c in shown if work_tiles(c, spec, tiles) < clusters(c, tiles)]
    assert fewer or not is_dynamic(spec), "more SMs than work tiles"
    sizes = {case.sm_count for case in walks}
    assert sizes >= {7, 114, 132, ARCHITECTURES[spec["arch"]].sm_count, tiles.ctas}
    if is_dynamic(spec):
        waves = tags(shown)["waves"]
        assert waves.sm_count % 2 == 1, "an SM of the odd number is idle, or is a CTA"
        assert work_tiles(waves, spec, tiles) > clusters(waves, tiles)


@every_kernel
def test_more_work_tiles_than_16_bits_count(stem):
    spec, tiles, _ = taken(stem)
    if not is_long(spec, tiles):
        many = tags(walks_for(spec, tiles))["many_tiles"]
        assert work_tiles(many, spec, tiles) > 2**16
        assert len(many.clusters) < 4, "few of them are walked"
        assert tiles.single or share_that_runs(many, spec, tiles) == 3 / 2**12


@every_operation
def test_more_batches_and_heads_than_16_bits_count(stem):
    spec, tiles, _ = taken(stem)
    launched = launches_for(spec, tiles)
    assert max(case.batch for case in launched) > 2**16
    assert max(case.kv_heads for case in launched) > 2**16
    strides = [
        max(tensor["strides"])
        for case in launched
        for tensor in arguments(spec, case, tiles)["tensors"].values()
    ]
    assert max(strides) > 2**32


@every_operation
def test_pytorch_makes_the_outputs_of_some_case(stem):
    """Whose sizes differ, so that two of them are not exchanged."""
    spec, tiles, cases = taken(stem)
    some = [arguments(spec, case, tiles) for case in emulated(cases)]
    shapes = [each["tensors"]["q"]["shape"][:3] for each in some if each["torch"]]
    assert any(batch != rows != heads for batch, rows, heads in shapes)


@every_kernel
def test_each_kernel_is_seen_with_three_blocks_and_two_waves(stem):
    spec, tiles, cases = taken(stem)
    found = emulated(cases)
    assert any(
        blocks(tiles, case) >= 3
        and work_tiles(case, spec, tiles) >= 2 * clusters(case, tiles)
        for case in found
    ) or (tiles.single and any(work_tiles(c, spec, tiles) >= 2 for c in found))
    kv = spec["seqlen"]["kv"]
    whole = kv != DYNAMIC and kv % tiles.kv == 0  # there is no tail to see
    assert whole or any(case.kv % tiles.kv for case in found)
    assert all(case.sm_count >= tiles.ctas for case in found)


@every_kernel
def test_no_case_costs_more_than_a_model_can_pay(stem):
    spec, tiles, cases = taken(stem)
    for case in emulated(cases):
        work = work_tiles(case, spec, tiles)
        running = work if tiles.single else min(clusters(case, tiles), work)
        each = math.ceil(work / running)
        if case.clusters is None:
            assert case.blocks == work * most_blocks(spec, tiles, case)
            assert case.blocks <= 6 * MANY_BLOCKS
        else:
            assert all(0 <= number < running for number in case.clusters)
            each *= most_blocks(spec, tiles, case)
            assert case.blocks == len(case.clusters) * each
    assert sum(case.blocks for case in emulated(cases)) <= MOST_BLOCKS


@every_kernel
def test_tiles_of_one_block_outnumber_the_arrivals_that_free_the_q_stages(stem):
    """Each leaves one to the next phase of a barrier that counts one too few."""
    spec, tiles, cases = taken(stem)
    arrivals = tiles.q_releases
    assert arrivals >= 1  # with one, no barrier can count one too few
    assert spec["seqlen"]["kv"] != DYNAMIC or any(
        blocks(tiles, case) == 1
        and work_tiles(case, spec, tiles) > arrivals * clusters(case, tiles)
        for case in emulated(cases)
    )


@every_kernel
def test_a_causal_kernel_meets_sections_of_which_the_last_is_smaller(stem):
    spec, tiles, cases = taken(stem)
    uneven = masks.of_spec(spec).uneven and not spec.get("blocks")
    if spec.get("batch"):  # see test_cases_of_packed_sequences_meet_several_levels
        return
    assert (tiles.sms_per_head > 0) == uneven
    found = [case for case in emulated(cases) if case.name.startswith("sections")]
    asked = tiles.sms_per_head > 0 and is_dynamic(spec)
    assert len(found) == asked
    walks = walks_for(spec, tiles)
    more = [case for case in walks if case.name.startswith("three_sections")]
    assert len(more) == (tiles.sms_per_head > 0)
    for case in found + more:
        heads = case.kv_heads * spec["q_per_kv"] // tiles.heads
        section = case.sm_count // tiles.sms_per_head
        assert 0 < heads % section < section < heads
        assert case not in more or heads > 2 * section
        fixed = spec["seqlen"]["q"] != DYNAMIC
        assert fixed or case.q > tiles.cluster_rows, "a head of one tile has no order"
        assert case.clusters is None


@every_kernel
def test_a_head_has_two_query_tiles_in_some_case(stem):
    """Or a wrong slice of Q, or of O, along a wrong dimension cannot be seen."""
    spec, tiles, cases = taken(stem)
    fixed = spec["seqlen"]["q"]
    assert (fixed != DYNAMIC and fixed <= tiles.cluster_rows) or any(
        case.q > tiles.cluster_rows for case in emulated(cases)
    )


@every_kernel
def test_a_causal_kernel_meets_warpgroups_without_rows_in_a_tile_after_another(
    stem,
):
    spec, tiles, cases = taken(stem)
    if not masks.of_spec(spec).edges or not is_dynamic(spec):
        return
    assert any(
        case.kv % tiles.kv == 0  # so that they have no masked block
        and case.q <= tiles.positions // 2
        and work_tiles(case, spec, tiles) >= 2 * clusters(case, tiles)
        for case in emulated(cases)
    )


@every_operation
def test_rows_see_no_key(stem):
    spec, _, cases = taken(stem)
    right = masks.of_spec(spec).right
    if right is not None and spec["seqlen"]["kv"] == DYNAMIC:
        assert any(case.kv + right + 1 < case.q for case in emulated(cases))


@every_kernel
def test_edges_of_a_window_are_at_every_place_of_a_kv_tile(stem):
    """For rows of one tile and of two; some rows of a tile see the first key, others do not."""
    spec, tiles, cases = taken(stem)
    mask = masks.of_spec(spec)
    if mask.left is None or not is_dynamic(spec):
        return
    right = mask.right or 0
    # Of the first row and the last: the first key, and the end.
    keys = {
        case: mask.keys([0, case.q - 1], Lengths(case.q, case.kv))
        for case in emulated(cases)
    }
    assert any(first[0] == 0 < first[1] for first, _ in keys.values())
    assert any(first[1] == 0 for first, _ in keys.values()), "longer than K"
    # Their left edge is inside K, and the right one of some.
    edges = [
        case
        for case, (first, end) in keys.items()
        if first[0] > 0 and end[0] < case.kv and case.data == "edges"
    ]
    assert edges
    if spec["q_per_kv"] // tiles.heads * mask.left / tiles.kv <= 32:
        for which in (0, 1):
            places = {keys[case][which][0] % tiles.kv for case in edges}
            assert len(places) >= 6
        assert {keys[case][0][0] % tiles.kv for case in edges} >= {*residues(tiles.kv)}
        assert {keys[case][0][0] // tiles.kv for case in edges} >= {1, 2, 3}
        assert {case.q - right > tiles.cluster_rows for case in edges} == {False, True}
        # Several tiles, of which each has its own blocks, in every schedule, and both edges move.
        assert any(
            case.timing
            and case.q - right > 2 * tiles.cluster_rows
            and first[1] > 0
            and end[0] + tiles.cluster_rows < case.kv
            for case, (first, end) in keys.items()
        )
    large = [case for case in cases if case.repeats == REPEATS]
    assert any(case.kv > mask.left + case.q // 4 for case in large)


@every_kernel
def test_some_case_fills_a_gpu_more_than_twice_and_repeats(stem):
    spec, tiles, cases = taken(stem)
    sms = ARCHITECTURES[spec["arch"]].sm_count // tiles.ctas
    full = [
        case
        for case in cases
        if not case.emulated and work_tiles(case, spec, tiles) > 2 * sms
    ]
    assert full and max(case.repeats for case in full) == REPEATS
    if is_dynamic(spec):
        rests = {math.ceil(case.q / tiles.cluster_rows) % 2 for case in cases}
        assert rests == {0, 1}, "odd and even numbers of query tiles"
        assert any(case.q > case.kv for case in full), "tiles that see no key"
        differences = {case.q - case.kv for case in cases}
        assert min(differences) < 0 < max(differences) and 0 in differences


def test_kernels_that_store_o_from_registers_are_seen_with_a_ragged_end():
    ragged = []
    for stem in KERNELS:
        kernel = support.shipped_plan(stem)
        numbers = {each.name: each.value for each in (*kernel.chosen, *kernel.derived)}
        # A fixed length of whole tiles has no such end.
        fixed = kernel.spec_file.spec.seqlen.q
        is_ragged = fixed == DYNAMIC or fixed % numbers["TILE_Q"]
        if numbers["Q_STAGES"] == 1 and is_ragged:
            ragged.append(stem)
    assert ragged
    for stem in ragged:
        _, tiles, cases = taken(stem)
        assert any(case.q % tiles.q for case in emulated(cases))


# --- packed sequences ----------------------------------------------------------------------


@every_packed
def test_packed_lengths_of_every_kind(stem):
    spec, tiles, cases = taken(stem)
    shown = emulated(cases)
    every = [lengths for case in shown for lengths in case.lengths]
    assert {q for q, _ in every} >= {0, 1, 2, 63, 64, 65, 127, 128, 129}
    assert {q for q, _ in every if q > tiles.q}
    assert any(q and not kv for q, kv in every) and any(kv and not q for q, kv in every)
    assert any(0 < kv < q for q, kv in every), "rows without keys beside others"
    ends = {
        (kv - q) % tiles.kv
        for case in shown
        if case.data == "edges"
        for q, kv in case.lengths
    }
    assert ends >= {*residues(tiles.kv)}
    counts = {case.batch for case in shown}
    assert counts >= ({1, 31, 32, 33, 70} if spec["q_per_kv"] == 1 else {1, 33})
    outside = [case.q - sum(q for q, _ in case.lengths) for case in shown]
    assert min(outside) < 0 < max(outside) and 0 in outside
    assert all(case.batch == len(case.lengths) for case in cases)
    falls = [case for case in shown if min(case.lengths)[0] < 0]
    assert falls and all(case.lengths[-1][0] > 0 for case in falls)
    # A group of empty ones before the first tile, between two and behind the last.
    assert any(
        [q > 0 for q, _ in case.lengths[::33]].count(False) >= 3 for case in shown
    )


@every_packed
def test_packed_cases_have_tiles_of_several_levels(stem):
    spec, tiles, cases = taken(stem)
    assert (tiles.level > 0) == masks.of_spec(spec).uneven
    for case in emulated(cases):
        if case.name.startswith("levels"):
            levels = [
                -(-kv // tiles.positions // tiles.level) for _, kv in case.lengths
            ]
            assert max(levels) == 3 and levels.count(2) == 1
            return
    assert not tiles.level


@every_packed
def test_packed_cases_have_every_kind_of_data_layout_scale_and_grid(stem):
    spec, tiles, cases = taken(stem)
    shown, walks = emulated(cases), walks_for(spec, tiles)
    data = set(get_args(Data)) - {"saturated", "sinks", "slopes", "biases", "drift"}
    if spec["dtype"] == "e4m3":
        data -= {"first_at_minus_inf", "all_at_minus_inf"}
    else:
        data -= {"mean_v"}
    if not spec.get("descale"):
        data -= {"descales"}
    if masks.of_spec(spec).right is None:
        data -= {"future"}
    assert {case.data for case in shown} >= data
    assert {case.layout for case in shown} == {*get_args(Layout)} - {"farther"}
    assert {case.scale_factor for case in shown} >= {1.0, 1.3, 30.0, 2.0**-10, 1e4}
    ratio = [work_tiles(case, spec, tiles) / case.sm_count for case in shown]
    assert min(ratio) < 1 and max(ratio) >= MANY_TILES
    assert any(c.kv_heads >= 3 and c.layout == "mixed" for c in shown)
    sms = ARCHITECTURES[spec["arch"]].sm_count
    assert {case.sm_count for case in walks} >= {1, 7, 114, 132, sms}
    assert max(work_tiles(case, spec, tiles) for case in walks) > 2**16
    assert max(case.batch for case in walks) == 1000
    assert sum(case.blocks for case in shown) <= MOST_BLOCKS
    full = [case for case in cases if not case.emulated]
    assert max(case.repeats for case in full) == REPEATS
    assert max(case.batch for case in full) == 1024


# --- kinds of SPEC that are not shipped -----------------------------------------------------


def spec(q=DYNAMIC, kv=DYNAMIC, q_per_kv=1, mask="causal", arch="sm90", dtype="bf16"):
    return {
        "arch": arch,
        "dtype": dtype,
        "seqlen": {"q": q, "kv": kv},
        "q_per_kv": q_per_kv,
        "mask": mask,
    }


E4M3 = {
    **{"dtype": "e4m3", "out_dtype": "bf16", "v_layout": "permuted"},
    **{"head_dim": {"qk": 128, "v": 128}, "op": "fmha_fwd", "lse": True},
}


@pytest.mark.parametrize("q_per_kv", [1, 4])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("kv_tile", [96, 128])
def test_cases_of_8_bits(kv_tile, mask, q_per_kv):
    """No infinite keys; sums of one sign that are long; factors, where there are some."""
    tiles = Tiles(128, kv_tile, (1, 1), sms_per_head=4 * (mask == "causal"), slack=0.8)
    plain = {**spec(q_per_kv=q_per_kv, mask=mask), **E4M3}
    cases = cases_for(plain, tiles)
    in_16_bits = tags(cases_for({**plain, "dtype": "bf16"}, tiles))
    found = tags(cases)
    assert {*in_16_bits} - {*found} == {"minus_inf", "all_minus_inf"}
    assert {*found} - {*in_16_bits} == {"mean_v"}
    mean = found["mean_v"]
    assert mean.data == "mean_v" and mean.emulated and mean.kv >= 4096
    assert mean.q > 1 and mean.kv >= 32 * tiles.kv
    assert sum(case.blocks for case in emulated(cases)) <= MOST_BLOCKS
    scaled = tags(cases_for({**plain, "descale": "head"}, tiles))
    assert {*scaled} - {*found} == {"descales"}
    case = scaled["descales"]
    assert (case.batch, case.kv_heads, case.data) == (2, 3, "descales")
    assert case.kv > 2 * tiles.kv and case.emulated


def test_fixed_lengths_of_8_bits_have_no_long_sum():
    tiles = Tiles(128, 128, (1, 1), slack=0.8)
    for q, kv in ((DYNAMIC, 1000), (300, 300)):
        assert "mean_v" not in tags(cases_for({**spec(q, kv), **E4M3}, tiles))
    assert "mean_v" in tags(cases_for({**spec(300, DYNAMIC), **E4M3}, tiles))


@pytest.mark.parametrize("page", [16, 32, 48, 64, 128, 256, 528])
@pytest.mark.parametrize(("q_per_kv", "packed"), [(1, 1), (4, 1), (8, 8)])
def test_paged_cases_have_every_length_and_table(page, q_per_kv, packed):
    paged = {
        **spec(q_per_kv=q_per_kv),
        **{"batch": "varlen", "kv": {"paged": {"page": page}}},
        **{"op": "fmha_fwd", "head_dim": {"qk": 128, "v": 128}, "lse": True},
    }
    tiles = Tiles(128, 128, (1, 1), sms_per_head=4, packed=packed)
    shown = emulated(cases_for(paged, tiles))
    every = [lengths for case in shown for lengths in case.lengths]
    assert {kv for _, kv in every} >= {0, 1, 127, 128, 129, page - 1, page, page + 1}
    assert any(kv > 3 * tiles.kv for _, kv in every)
    assert any(0 < kv < q for q, kv in every) and any(q and not kv for q, kv in every)
    assert any({q for q, _ in case.lengths} == {1} for case in shown)
    assert all(case.kv % page == 0 for case in shown)
    assert sum(case.blocks for case in shown) <= MOST_BLOCKS
    missing, spare, beyond, negative = set(), set(), set(), set()
    for case in shown:
        indices = PAGED_FORWARD.indices(paged, case)
        table, used = indices["block_table"], indices["seqused_k"]
        rows = zip(table, case.lengths, strict=True)
        pages = {at for row, (_, kv) in rows for at in row[: -(-kv // page)].tolist()}
        missing.add(not pages <= {*range(case.kv // page)})
        spare.add(len(pages) < case.kv // page)
        beyond |= {*(used.astype(int) - table.shape[1] * page).tolist()}
        negative |= {*used[used < 0].tolist()}
    assert missing == spare == {False, True}
    assert {0, 1} <= beyond and max(beyond) > 2**30
    assert negative == {-1, -(2**31)}


def test_a_dynamic_kernel_meets_every_kind_of_problem():
    tiles = Tiles(128, 128, (1, 1))
    found = tags(cases_for(spec(), tiles))
    assert found["exact"].q % 128 == found["exact"].kv % 128 == 0
    assert found["one_by_one"].q == found["one_by_one"].kv == 1
    assert found["one_row"].q == 1 and found["one_key"].kv == 1
    assert found["short_kv"].q > found["short_kv"].kv + 1  # rows that see no key
    assert found["ragged"].kv > found["ragged"].q
    assert found["waves"].sm_count == 3
    assert work_tiles(found["waves"], spec(), tiles) == 5
    assert found["fused"].layout == "fused"
    assert "odd_tiles" not in found


def test_a_pair_of_query_tiles_meets_an_odd_number_of_them():
    tiles = Tiles(128, 128, (2, 1))
    found = tags(emulated(cases_for(spec(), tiles)))
    assert math.ceil(found["odd_tiles"].q / 128) % 2 == 1
    assert found["waves"].sm_count == 7, "three pairs, and an SM without a partner"


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1)])
@pytest.mark.parametrize(("q", "heads"), [(64, 8), (128, 8), (192, 12), (128, 128)])
def test_a_packed_kernel_meets_every_kind_of_problem(q, heads, cluster):
    tiles = Tiles(q, 128, cluster, sms_per_head=4, packed=heads)
    packed = spec(q_per_kv=heads)
    found = tags(emulated(cases_for(packed, tiles)))
    positions = q // heads
    assert tiles.positions == positions
    assert tiles.cluster_rows == positions * cluster[0]
    assert found["one_by_one"].q == found["one_row"].q == 1
    assert positions == 1 or found["ragged"].q % positions
    assert work_tiles(found["ragged"], packed, tiles) >= 2  # of the only cluster
    assert work_tiles(found["waves"], packed, tiles) >= 5
    # All rows of a tile see no key, and there is another tile.
    assert found["no_key"].q - found["no_key"].kv > 2 * tiles.cluster_rows
    # The first position of a tile does not see the block that its last begins with.
    for edge, tile in (
        (found["edge"], 1),
        (found["late_edge"], 128 // positions + 2 * cluster[0] - 1),
    ):
        first = tile * positions + 1 + edge.kv - edge.q
        last = first + positions - 1
        assert positions == 1 or -(-first // 128) < -(-last // 128)
    assert found["late_edge"].q > found["late_edge"].kv
    plain = Tiles(q, 128, cluster)
    assert not {"edge", "no_key"} & set(tags(cases_for(packed, plain)))


@pytest.mark.parametrize(("q", "kv"), [(4096, 4096), (1000, DYNAMIC), (4096, 300)])
def test_long_fixed_lengths_run_on_the_first_a_middle_and_the_last_cluster(q, kv):
    tiles = Tiles(128, 128, (1, 1))
    found = emulated(cases_for(spec(q, kv), tiles))
    some = [case for case in found if case.clusters is not None]
    if kv == DYNAMIC:
        assert not some
        return
    ragged = tags(some)["ragged"]
    count = ragged.sm_count
    assert ragged.clusters == (0, (count - 1) // 2, count - 1)
    strided = tags(some)["strided"]
    assert work_tiles(strided, spec(q, kv), tiles) == 2 * strided.sm_count


def test_a_seed_is_the_same_everywhere():
    first = cases_for(spec(), Tiles(128, 128, (1, 1)))[0]
    assert (first.name, first.seed) == ("ragged_b1_hkv1_q197_kv449", 3505353118)


def test_the_case_for_slow_tools_is_small_and_ragged_on_both_sides():
    case = smallest_ragged(cases_for(spec(), Tiles(128, 128, (1, 1))))
    assert min(case.q, case.kv) > 1 and case.work < 2**16 and case.layout != "far"
    fixed = cases_for(spec(1, 1), Tiles(128, 128, (1, 1)))
    assert smallest_ragged(fixed).q == 1
