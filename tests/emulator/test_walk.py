# SPDX-License-Identifier: Apache-2.0
"""The schedule of all CTAs, at any size: right for what we ship, and named where it is damaged."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import support
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.emulator import ptx
from fmha_gen.emulator.walk import prepare
from fmha_gen.evidence.coverage import walked
from fmha_gen.evidence.schedule_check import grid_finding, refusal, schedule_findings
from fmha_gen.ops.cases import Case, Tiles, tiles_of, walks_for

from .rehearsals import captured, damaged, tag_of
from .walks import GENERATED, Size, read, walks

SAMPLE = (  # records have the walks of all
    "sm90_d128_bf16_full_c2x1_kvmc",
    "sm90_d128_bf16_causal_gqa8_pack_t64x128",
    "sm100_d128_bf16_causal_gqa4_c2x1_cta2_lse",
    "sm100_d128_bf16_full_q1000_single_lse",
)
SMALL = "sm90_d64_bf16_causal_s512"
SHORT = Size(2, 3, 0, 0, 5)


@pytest.mark.parametrize("stem", SAMPLE)
def test_the_schedule_of_shipped_kernels(stem):
    """On few SMs and on as many as some GPUs have."""
    path = GENERATED / f"{stem}.py"
    constants = read_constants(path.read_text(encoding="utf-8"))
    spec, tiles = constants["SPEC"], tiles_of(constants)
    cases = [x for x in walks_for(spec, tiles) if tag_of(x) in ("sms_7", "sms_132")]
    text, called = captured(path, cases)
    program = prepare(ptx.parse(text))
    for case, each in zip(cases, called, strict=True):
        seen = walked(constants, case, each.launched[0], program)
        assert schedule_findings(seen, tiles, spec, case) == [], case
        assert len(seen.walked) == seen.clusters


def test_a_long_kernel_at_its_full_length():
    """Thousands of KV blocks, all clusters, in seconds; and the first and the last of them."""
    begin = time.process_time()
    path = GENERATED / "sm90_d128_bf16_causal_s4096.py"
    ((seen, found),) = walks(path, [Size(2, 3, 0, 0, 132)])
    assert found == []
    tiles_of_two_warpgroups_in_two_columns = 2 * 3 * 32 * 2 * 2
    assert len(seen.stores["out"]) == tiles_of_two_warpgroups_in_two_columns
    assert time.process_time() - begin < 30
    ((part, found),) = walks(path, [Size(2, 3, 0, 0, 132)], clusters=(0, 131))
    assert found == [] and part.walked == (0, 131)
    assert set(part.stores["out"].cluster.tolist()) == {0, 131}


def test_sixteen_million_rows():
    """A few clusters of a problem whose tensors have 2^31 elements; all of it is refused."""
    path, size = GENERATED / "sm90_d128_bf16_full.py", Size(1, 1, 1 << 24, 100, 4096)
    ((seen, found),) = walks(path, [size], clusters=(0, 2000, 4095))
    assert found == [] and seen.clusters == 4096
    assert int(seen.stores["out"].end[:, 1].max()) == 1 << 24
    spec, tiles = read(path)
    assert "131072 KV blocks" in refusal(tiles, spec, size)
    assert refusal(tiles, spec, size, share=3 / 4096) == ""


DAMAGES = {
    "a wave is left out": (
        ("wave += 1", "wave += 2"),
        "query tile 0 of head 1, batch 0: out is stored by no CTA",
    ),
    "a tile is left out": (
        ("tile < problem.num_tiles", "tile < problem.num_tiles - 1"),
        "query tile 0 of head 2, batch 1: out is stored by no CTA",
    ),
    "a tile is repeated": (
        ("width - 1 - place", "width - 2 - place"),
        "is stored more than once: cluster",
    ),
    "a tile too many": (
        ("tile < problem.num_tiles", "tile <= problem.num_tiles"),
        "is wholly outside the tensor",
    ),
    "a block is left out": (
        (
            "end_key = end_position + SEQLEN_KV - SEQLEN_Q",
            "end_key = end_position + SEQLEN_KV - SEQLEN_Q - TILE_KV",
        ),
        "receives k 0 times, and 1 of its work tiles see it (query tile 0 of head 2)",
    ),
    "V of the wrong block": (
        ("tVgV[None, block + 1]", "tVgV[None, blocks - 1]"),
        "receives v 2 times",
    ),
    "another head's Q": (
        ("tQgQ[None, q_tile]", "tQgQ[None, Q_TILES - 1 - q_tile]"),
        "q is loaded by another CTA than stores out",
    ),
}


@pytest.mark.parametrize("name", support.rotated(DAMAGES, 3))
def test_a_damaged_scheduler_is_named(tmp_path, name):
    (right, wrong), named = DAMAGES[name]
    ((_, found),) = walks(damaged(tmp_path, SMALL, right, wrong, once=False), [SHORT])
    assert any(named in each for each in found), found


@pytest.fixture(scope="module")
def right():
    """A walk without findings, for damages of its own."""
    path = GENERATED / f"{SMALL}.py"
    ((seen, found),) = walks(path, [SHORT])
    assert found == []
    spec, tiles = read(path)
    size = replace(SHORT, q=512, kv=512)
    return seen, lambda walk: schedule_findings(walk, tiles, spec, size)


def without(walk, kind, name, keep):
    """The walk with some boxes of a tensor only."""
    boxes = getattr(walk, kind)
    return replace(
        walk, **{kind: {**boxes, name: boxes[name].where(keep(boxes[name]))}}
    )


def test_a_store_of_half_the_columns_is_named(right):
    seen, judge = right

    def keep(boxes):
        return ~((boxes.begin[:, 1] == 64) & (boxes.begin[:, 2] == 1))

    found = judge(without(seen, "stores", "out", keep))
    assert found == [
        f"query tile 0 of head 1, batch {batch}, rows 64 to 127 (64 of them): out is stored by "
        "no CTA"
        for batch in (0, 1)
    ]


def test_loads_in_another_order_are_named(right):
    seen, judge = right
    boxes = seen.loads["v"]
    mine = np.flatnonzero(boxes.cluster == 2)
    order = np.arange(len(boxes))
    order[mine] = mine[::-1]
    found = judge(without(seen, "loads", "v", lambda _: order))
    assert len(found) == 1
    assert "cta 0 of cluster 2 loads v in another order than Q" in found[0]


def test_a_cluster_that_loads_nothing_is_named(right):
    seen, judge = right
    found = judge(without(seen, "loads", "k", lambda boxes: boxes.cluster != 3))
    assert found == ["cluster 3 stores rows and loads nothing of k"]


def test_nothing_stored(right):
    seen, judge = right
    assert judge(replace(seen, stores={})) == ["no row of out is stored"]


def test_refusal_counts_what_a_causal_kernel_needs():
    spec, tiles = read(GENERATED / "sm90_d128_bf16_causal.py")
    assert refusal(tiles, spec, Size(1, 1, 8192, 8192, 1)) == ""
    assert "not walked" in refusal(tiles, spec, Size(4, 1, 16384, 16384, 1))


@pytest.mark.parametrize(
    ("ctas", "sm_count", "single", "right"),
    [
        (6, 7, False, True),
        (2, 7, False, True),  # in more waves than need be
        (8, 7, False, False),  # the fourth pair has to wait
        (5, 7, False, False),  # half a pair
        (0, 7, False, False),
        (12, 132, False, True),
        (14, 132, False, False),  # a pair without work
        (12, 7, True, True),
        (14, 7, True, False),
    ],
)
def test_a_grid_has_a_place_and_work_for_every_cluster(ctas, sm_count, single, right):
    tiles = Tiles(64, 64, (2, 1), single=single)
    case = Case("x", 1, 3, q=129, kv=5, sm_count=sm_count)  # 6 work tiles
    found = grid_finding((ctas, 1, 1), tiles, {"q_per_kv": 1}, case)
    assert (found == "") == right
