# SPDX-License-Identifier: Apache-2.0
"""What a case's tensors hold and where they lie: each kind of data decides what it is there for."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import support
from fmha_gen.ops import operation_of
from fmha_gen.ops.cases import Case, Tiles, residues
from fmha_gen.ops.compare import judge_output
from fmha_gen.ops.forward import LSE
from fmha_gen.ops.inputs import FAR, GUARD, place_tensors, values
from fmha_gen.ops.masks import MASKS, Lengths
from fmha_gen.ops.reference import truth
from right_kernel import rounded

SPEC = {
    "dtype": "bf16",
    "op": "fmha_fwd",
    "q_per_kv": 2,
    "head_dim": {"qk": 64, "v": 32},
    "lse": True,
    "mask": "none",
}
TILES = Tiles(64, 64, (1, 1))
KV_TILES = sorted(
    {
        number.value
        for stem in support.SHIPPED
        for number in support.shipped_plan(stem).chosen
        if number.name == "TILE_KV"
    }
)
LAYOUTS = ("own", "bhsd", "mixed", "fused", "cache", "far", "plain")


# --- a key decides --------------------------------------------------------------------------


def seeing(q, k, v, seen, scale):
    """O of one batch whose rows see those keys: bool [q, kv]."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x[0].astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q[0].astype(np.float64), k) * scale
    scores = np.where(seen, scores, -np.inf)
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    total = weights.sum(-1, keepdims=True)
    weights /= np.where(total > 0, total, 1)
    return np.einsum("hqk,khd->qhd", weights, v)[None]


def up_to(q, k, v, ends, scale):
    """O of rows that see the keys before their end."""
    return seeing(q, k, v, np.arange(k.shape[1]) < ends[:, None], scale)


def with_zeros(x, rows):
    """Keys of zeros beyond the end, as TMA gives them."""
    return np.concatenate([x, np.zeros_like(x[:, :rows])], axis=1)


@pytest.mark.parametrize("kv_tile", KV_TILES)
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_edges_show_a_key_more_and_a_key_less(kv_tile, mask, dtype, head_dim):
    """For every residue: some row's O moves beyond its bound, and a finding names a row."""
    dim = {"qk": head_dim, "v": head_dim}
    spec = {**SPEC, "head_dim": dim, "mask": mask, "dtype": dtype}
    tiles, scale, causal = Tiles(64, kv_tile, (1, 1)), head_dim**-0.5, mask == "causal"
    for residue, q_len in itertools.product(residues(kv_tile), (35, 67)):
        kv_len = kv_tile + residue + (q_len if causal else 0)
        case = Case(f"edges {residue}", 1, 1, q_len, kv_len, data="edges")
        made = values(spec, tiles, case)
        q, k, v = (rounded(dtype, made[name]) for name in "qkv")
        expected = truth(q, k, v, scale=scale, mask=MASKS[mask], dtype=dtype)
        ends = np.minimum(np.arange(q_len) + kv_len - q_len + 1, kv_len)
        if not causal:
            ends = np.full(q_len, kv_len)
        same = up_to(q, k, v, ends, scale)
        assert judge_output(same, expected).finding == "", "the model is right"
        wrongs = {"one key less": up_to(q, k, v, ends - 1, scale)}
        longer = [with_zeros(x, 2) for x in (k, v)]
        wrongs["a key of zeros"] = up_to(q, *longer, ends + (ends == kv_len), scale)
        if causal:
            more = np.minimum(ends + 1, kv_len)
            wrongs["one key more"] = up_to(q, k, v, more, scale)
        for what, wrong in wrongs.items():
            text = judge_output(wrong, expected).finding
            assert "of out: wrong" in text, (what, residue, q_len)


@pytest.mark.parametrize("kv_tile", KV_TILES)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_edges_show_a_block_that_is_missing_and_each_boundary(kv_tile, mask):
    """A key on either side of a block's boundary, and a whole block, is decisive for some row."""
    spec = {**SPEC, "mask": mask}
    tiles, scale, causal = Tiles(64, kv_tile, (1, 1)), 64**-0.5, mask == "causal"
    for residue in residues(kv_tile):
        kv_len, q_len = 2 * kv_tile + residue + (67 if causal else 0), 67
        case = Case(f"boundary {residue}", 1, 1, q_len, kv_len, data="edges")
        made = values(spec, tiles, case)
        q, k, v = (rounded("bf16", made[name]) for name in "qkv")
        expected = truth(q, k, v, scale=scale, mask=MASKS[mask], dtype="bf16")
        seen = MASKS[mask].visible(range(q_len), Lengths(q_len, kv_len))
        last = np.arange(q_len) + kv_len - q_len if causal else np.full(1, kv_len - 1)
        block = np.bincount(last // kv_tile).argmax() * kv_tile  # the last of most rows
        for keys in ([block - 1], [block], [kv_len - 1], range(block - kv_tile, block)):
            rest = [np.delete(x, list(keys), axis=1) for x in (k, v)]
            kept = np.delete(seen, list(keys), axis=1)
            wrong = seeing(q, *rest, kept, scale)
            assert judge_output(wrong, expected).finding, (residue, keys)


def scores_of(case, head=0, spec=SPEC, tiles=TILES):
    """[log2] of a head, at the default scale, of bf16 values."""
    made = values(spec, tiles, case)
    q = rounded("bf16", made["q"])[0, :, head]
    k = rounded("bf16", made["k"])[0, :, head // spec["q_per_kv"]]
    return q @ k.T * spec["head_dim"]["qk"] ** -0.5 / math.log(2)


def test_each_row_of_peaks_sees_one_key_in_another_column():
    case = Case("x", 1, 1, q=64, kv=256, data="peaks")
    scores = np.sort(scores_of(case), axis=1)
    assert (scores[:, -1] - scores[:, -2] > 100).all()
    columns = scores_of(case).argmax(1) % TILES.kv
    assert len(set(columns.tolist())) == 64


@pytest.mark.parametrize(("head", "times"), [*enumerate((0.9, 1.1, 2.0))])
def test_scores_rise_by_a_part_of_the_slack_from_block_to_block(head, times):
    """In the order in which the blocks are taken: from the last one on."""
    case = Case("x", 1, 3, q=8, kv=5 * 64, data="rising")
    made = values(SPEC, TILES, case)
    q, k = (made[name][0, :, head].astype(np.float64) for name in ("q", "k"))
    scores = q @ k.T * SPEC["head_dim"]["qk"] ** -0.5 / math.log(2)
    largest = scores.reshape(8, 5, 64).max(-1)[:, ::-1]
    steps = np.diff(largest, axis=1)
    assert np.abs(steps.mean() - times * TILES.slack) < 0.5
    far = steps > TILES.slack
    assert far.mean() > 0.9 if times > 1 else far.mean() < 0.3


def test_scores_are_far_above_zero_and_far_below_it():
    case = Case("x", 1, 2, q=8, kv=100, data="all_1e4")
    above, below = (scores_of(case, head) for head in (0, 2))
    assert (above > 1e9).all() and (below < -1e9).all()


def test_each_head_of_columns_has_one_key_that_rises():
    case = Case("x", 1, 2, q=8, kv=2 * 64, data="columns")
    for head, column in enumerate((0, 31, 62, 63)):
        scores = scores_of(case, head)
        assert (scores.argmax(1) == column).all()
        scores[:, column] = 0
        assert (np.abs(scores) < TILES.slack).all()


@pytest.mark.parametrize("factor", [1 - 1e-3, 1 + 1e-3])
def test_a_slope_shows_a_scale_that_is_off_by_a_thousandth(factor):
    case = Case("x", 1, 2, q=33, kv=4 * 64, data="slope")
    made = values(SPEC, TILES, case)
    q, k, v = (rounded("bf16", made[name]) for name in "qkv")
    scale = SPEC["head_dim"]["qk"] ** -0.5
    options = {"mask": MASKS["none"], "dtype": "bf16"}
    right = truth(q, k, v, scale=scale, **options)
    wrong = truth(q, k, v, scale=scale * factor, **options).out
    assert not judge_output(
        rounded("bf16", right.out.astype(np.float32)), right
    ).finding
    assert judge_output(rounded("bf16", wrong.astype(np.float32)), right).finding


def test_close_scores_rise_by_more_than_the_slack_only_once_they_are_scaled():
    """In most rows: then no row of a warp takes a new reference where the slack is not scaled."""
    case = Case("x", 1, 1, q=64, kv=64 + 9, data="close", scale_factor=1e4)
    unscaled = scores_of(case) * math.log(2) / SPEC["head_dim"]["qk"] ** -0.5
    rises = unscaled[:, :64].max(1) - unscaled[:, 64:].max(1)
    assert (rises < TILES.slack).all()
    assert (rises * 1e4 * SPEC["head_dim"]["qk"] ** -0.5 > 2**7).mean() > 0.7


def test_a_future_key_is_far_above_all_that_a_row_sees():
    scores = scores_of(Case("x", 1, 1, q=8, kv=100, data="future"))
    assert (np.diff(scores, axis=1) > 50).all()


def test_the_first_block_that_is_taken_has_no_weight():
    case = Case("x", 1, 1, q=8, kv=100, data="first_at_minus_inf")
    scores = scores_of(case)
    assert (scores[:, 64:] == -np.inf).all() and np.isfinite(scores[:, :64]).all()
    case = Case("x", 1, 1, q=8, kv=100, data="all_at_minus_inf")
    assert (scores_of(case) == -np.inf).all()


def test_a_huge_key_is_the_one_of_its_case():
    keys = values(SPEC, TILES, Case("x", 1, 1, q=8, kv=100, data="huge_key"))["k"]
    largest = np.abs(keys).max(axis=(0, 2, 3))
    assert largest.argmax() == 25 and largest[25] > 5 * np.sort(largest)[-2]


def test_negative_scores_rise_and_fall_by_more_than_p_can_hold():
    """From seventh to seventh, in the order of the blocks, which are taken from the last one on."""
    scores = scores_of(Case("x", 1, 1, q=8, kv=7 * 64, data="negative"))
    assert scores.max() < -0.5
    levels = scores.reshape(8, 7, 64).max(-1).mean(0)[::-1]
    steps = np.diff(levels)
    assert (steps > 128).any() and (steps < -128).any()


def test_only_second_rows_meet_larger_keys():
    """Of 16 rows the last eight; the first see nothing of these keys, nor do they stay negative."""
    scores = scores_of(Case("x", 1, 1, q=32, kv=100, data="second_rows"))
    second = np.arange(32) // 8 % 2 == 1
    others = np.delete(scores, (25, 50), axis=1).max(axis=1)
    assert (scores[second, 50] > others[second] + 8).all()
    assert (scores[second, 25] > scores[second, 50] + 8).all()
    assert (scores[~second][:, (25, 50)] < 0).all() and (others[~second] > 0).all()


def test_second_rows_are_those_of_the_tiles():
    """The first row of a thread has negative queries: rows 0 to 7 of 16."""
    case = Case("x", 1, 2, 9, 40, data="second_rows")
    for heads, packed in ((1, False), (4, False), (4, True), (16, True)):
        tiles = replace(TILES, packed=heads if packed else 1)
        q = values({**SPEC, "q_per_kv": heads}, tiles, case)["q"]
        for row, head in np.ndindex(9, 2 * heads):
            in_tile = row * heads + head % heads if packed else row
            assert ((q[:, row, head] <= 0) == (in_tile % 16 < 8)).all()


def test_values_are_the_same_each_time_and_of_the_case():
    case = Case("x", 1, 1, q=8, kv=100)
    one, again = (values(SPEC, TILES, case) for _ in range(2))
    other = values(SPEC, TILES, Case("y", 1, 1, q=8, kv=100))
    for name in "qkv":
        np.testing.assert_array_equal(one[name], again[name])
        assert (one[name] != other[name]).any()


# --- where tensors lie ----------------------------------------------------------------------


def placed(layout, lse=True, q=5, kv=5, batch=2, kv_heads=3):
    case = Case("x", batch, kv_heads, q, kv, layout=layout)
    return place_tensors({**SPEC, "lse": lse}, case)


def extent(tensor):
    """(first, behind the last) element of a tensor in its storage."""
    steps = zip(tensor.shape, tensor.strides, strict=True)
    return tensor.offset, tensor.offset + sum((n - 1) * s for n, s in steps) + 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [(5, 5), (1, 7), (70, 3)])
def test_tensors_stay_inside_their_storages(layout, lengths):
    found = placed(layout, True, *lengths)
    assert list(found.tensors) == ["q", "k", "v", "out", "lse"]
    for tensor in found.tensors.values():
        first, end = extent(tensor)
        assert 0 <= first < end <= found.storages[tensor.storage]
    outputs = [found.tensors[name].storage for name in ("out", "lse")]
    others = [found.tensors[name].storage for name in "qkv"]
    assert len({*outputs}) == 2 and not {*outputs} & {*others}


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "far"])
@pytest.mark.parametrize("lengths", [(5, 5), (1, 7), (70, 3)])
def test_no_element_is_of_two_tensors(layout, lengths):
    found = placed(layout, True, *lengths)
    counts = {name: np.zeros(size, int) for name, size in found.storages.items()}
    for tensor in found.tensors.values():
        view = np.lib.stride_tricks.as_strided(
            counts[tensor.storage][tensor.offset :],
            tensor.shape,
            [8 * stride for stride in tensor.strides],
        )
        view += 1
    assert max(count.max() for count in counts.values()) == 1


@pytest.mark.parametrize("layout", ["own", "bhsd", "mixed", "cache", "far"])
def test_every_tensor_has_strides_of_its_own(layout):
    """So that one tensor's stride for another's is seen, in each of the three axes."""
    tensors = placed(layout, q=5, kv=5).tensors
    by_axis = {
        name: dict(zip("bsh" if name != "lse" else "bhs", x.strides, strict=False))
        for name, x in tensors.items()
    }
    for axis in "bsh":
        of_axis = [strides[axis] for strides in by_axis.values()]
        assert len(set(of_axis)) == 5, (axis, of_axis)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tma_takes_what_it_moves(layout):
    """Strides and offsets of 16-bit tensors are multiples of 16 bytes."""
    for name in ("q", "k", "v", "out"):
        tensor = placed(layout).tensors[name]
        assert tensor.strides[-1] == 1
        assert not any(stride % GUARD for stride in tensor.strides[:-1])
        assert tensor.offset % GUARD == 0


@pytest.mark.parametrize("layout", ["own", "bhsd", "mixed", "cache"])
def test_something_lies_before_and_behind_every_row(layout):
    for name in ("q", "k", "v", "out"):
        found = placed(layout)
        tensor = found.tensors[name]
        first, end = extent(tensor)
        assert first >= GUARD and found.storages[tensor.storage] - end >= GUARD
        inner = min(stride for stride in tensor.strides[:-1])
        assert inner >= tensor.shape[-1] + 2 * GUARD


def test_far_tensors_are_beyond_what_32_bits_hold():
    found = placed("far")
    assert not found.guarded
    for tensor in found.tensors.values():
        first, end = extent(tensor)
        assert end - first > FAR or (tensor.name == "out" and end - first > FAR // 4)
    far = {name: max(x.strides) for name, x in found.tensors.items()}
    assert min(far[name] for name in ("q", "k", "v")) >= FAR
    offsets = [found.tensors[name].offset for name in "qkv"]
    assert len(set(offsets)) == 3


@pytest.mark.parametrize("stem", support.SHIPPED)
def test_no_element_of_far_tensors_is_of_two(stem):
    """Where inputs share a storage, of whatever operation."""
    spec, tiles, cases = support.cases_of(stem)
    for case in (x for x in cases if x.layout == "far"):
        spans: dict[str, list[np.ndarray]] = {}  # of contiguous elements: begin, end
        for x in place_tensors(spec, case, tiles).tensors.values():
            width = x.shape[-1] if x.strides[-1] == 1 else 1
            begin = np.full(1, x.offset)
            for n, step in zip(x.shape, x.strides, strict=True):
                if step != 1 or width == 1:
                    begin = (begin[:, None] + np.arange(n) * step).ravel()
            spans.setdefault(x.storage, []).append(np.stack([begin, begin + width]))
        for of_storage in spans.values():
            begin, end = (found := np.concatenate(of_storage, 1))[:, found[0].argsort()]
            assert (end[:-1] <= begin[1:]).all(), case.name


def test_far_tensors_fit_a_gpu_together():
    """Sinks, and with them the LSE, lie apart along the query's heads, of which there are many."""
    spec = {**SPEC, "q_per_kv": 8, "sink": True}
    found = place_tensors(spec, Case("x", 2, 2, 17, 64, layout="far"))
    assert sum(found.storages.values()) < 16 * FAR


@pytest.mark.parametrize("stem", support.SHIPPED)
def test_every_case_of_a_kernel_places_what_far_and_lse_ask_for(stem):
    spec, tiles, cases = support.cases_of(stem)
    far = [case for case in cases if case.layout == "far"]
    for case in far:
        ends = {
            name: extent(tensor)[1]
            for name, tensor in place_tensors(spec, case, tiles).tensors.items()
        }
        assert max(ends.values()) > 2**31, "beyond 31 bits of elements"
    assert far
    placed = [place_tensors(spec, case, tiles).tensors for case in cases]
    gaps = {each["lse"].strides[-1] != 1 for each in placed if "lse" in each}
    has_lse = LSE.name in {x.name for x in operation_of(spec).tensors(spec)}
    assert gaps == ({True, False} if has_lse else set()), "rows of LSE, some with gaps"
