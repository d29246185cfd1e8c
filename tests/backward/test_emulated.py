# SPDX-License-Identifier: Apache-2.0
"""Backward kernels in the emulator, against the gradient by definition; damages are found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fmha_gen.build import captures
from fmha_gen.build.calls import arguments, scale_of
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.emulator import machine
from fmha_gen.emulator.lower import lower_kernels
from fmha_gen.emulator.scheduler import Schedule
from fmha_gen.evidence import rehearsal
from fmha_gen.evidence.tensors import Problem, make_problem
from fmha_gen.ops.backward import BACKWARD, forward_of
from fmha_gen.ops.cases import Case, tiles_of
from fmha_gen.ops.forward import FORWARD
from fmha_gen.ops.operation import Given
from fmha_gen.planning.backward import BLOCKS_APART, SECTION_BYTES

from tests import support

from . import kernels

D64 = kernels.SMALL + "mask: causal\n"
# By name: what a spec says, and the calls of its kernel.
KERNELS = {
    "sm90_d64_bf16_causal_bwd": (
        D64,
        (Case("ragged", 1, 2, 150, 300, sm_count=2), Case("few_keys", 1, 1, 200, 70)),
    ),
    "sm90_d128_bf16_bwd": (
        "head_dim: 128\ndtype: bf16\n",
        (Case("tails", 2, 1, 70, 200, sm_count=3),),
    ),
    "sm90_d64_bf16_bwd": (
        "head_dim: 64\ndtype: bf16\n",  # blocks of 128
        (Case("tails", 1, 2, 150, 200, sm_count=3),),
    ),
    "sm90_d64_bf16_bwd_w20x10_gqa2": (
        kernels.SMALL + "window: {left: 20, right: 10}\nheads: {q_per_kv: 2}\n",
        # Rows without keys; a tile that no row sees, in front of one that is seen.
        (Case("late", 1, 1, 130, 70, sm_count=1), Case("hidden", 1, 1, 9, 170)),
    ),
    "sm90_d64_bf16_bwd_w70x": (
        kernels.SMALL + "window: {left: 70}\n",
        (Case("left", 1, 1, 80, 140, sm_count=1),),
    ),
    "sm90_d96_bf16_causal_bwd": (
        "head_dim: 96\ndtype: bf16\nmask: causal\n",
        (Case("thin", 1, 1, 70, 60, sm_count=1),),
    ),
    "sm90_d64_bf16_causal_bwd_cap2": (
        D64 + "softcap: 2\n",
        (Case("capped", 1, 1, 70, 60, sm_count=1, scale_factor=5.0),),
    ),
    "sm90_d64_fp16_bwd_w60x_cap30": (
        "head_dim: 64\ndtype: fp16\nwindow: {left: 60}\nsoftcap: 30\n",
        (Case("window", 1, 1, 40, 100, sm_count=1, scale_factor=20.0),),
    ),
    "sm90_d64_fp16_causal_bwd_gqa3": (
        "head_dim: 64\ndtype: fp16\nmask: causal\nheads: {q_per_kv: 3}\n",
        (Case("groups", 1, 2, 90, 140, sm_count=1),),
    ),
    "sm90_d128_bf16_causal_bwd_s256": (
        "head_dim: 128\ndtype: bf16\nmask: causal\nseqlen: 256\n",
        (Case("fixed", 1, 1, 256, 256, sm_count=2),),
    ),
    # Short heads: the first tile stores dQ, the last one writes it. Rows without keys; heads of a
    # group; tiles that no row sees; three groups of columns for each warpgroup.
    "sm90_d64_bf16_causal_bwd_s200x130_gqa2": (
        D64 + "heads: {q_per_kv: 2}\nseqlen: {q: 200, kv: 130}\n",
        (Case("first", 1, 2, 200, 130, sm_count=3),),
    ),
    "sm90_d128_bf16_bwd_w20x10_s70x300": (
        "head_dim: 128\ndtype: bf16\nwindow: {left: 20, right: 10}\n"
        "seqlen: {q: 70, kv: 300}\n",
        (Case("hidden", 1, 1, 70, 300, sm_count=2),),
    ),
    # Two whole blocks whose rows see no key. Four tiles, of which the last comes before the third.
    "sm90_d64_bf16_causal_bwd_s400x130": (
        D64 + "seqlen: {q: 400, kv: 130}\n",
        (Case("keyless", 1, 1, 400, 130, sm_count=2),),
    ),
    "sm90_d128_bf16_causal_bwd_s400": (
        "head_dim: 128\ndtype: bf16\nmask: causal\nseqlen: 400\n",
        (Case("swapped", 1, 1, 400, 400, sm_count=2),),
    ),
    "sm90_d96_fp16_bwd_s100x200": (
        "head_dim: 96\ndtype: fp16\nseqlen: {q: 100, kv: 200}\n",
        (Case("thin", 1, 1, 100, 200, sm_count=2),),
    ),
}
ON_SM100 = "sm100_d128_bf16_causal_bwd"
KERNELS |= {
    ON_SM100: (
        "head_dim: 128\ndtype: bf16\nmask: causal\n",
        (Case("ragged", 1, 2, 200, 300, sm_count=2), Case("few_keys", 1, 1, 200, 70)),
    ),
    "sm100_d64_bf16_bwd": (
        "head_dim: 64\ndtype: bf16\n",
        (Case("tails", 1, 2, 150, 300, sm_count=3),),
    ),
    "sm100_d64_bf16_bwd_w20x10_gqa2": (
        "head_dim: 64\ndtype: bf16\nwindow: {left: 20, right: 10}\nheads: {q_per_kv: 2}\n",
        (Case("late", 1, 1, 260, 140, sm_count=1), Case("hidden", 1, 1, 9, 300)),
    ),
    "sm100_d64_fp16_bwd_w60x_cap30": (
        "head_dim: 64\ndtype: fp16\nwindow: {left: 60}\nsoftcap: 30\n",
        (Case("window", 1, 1, 140, 200, sm_count=1, scale_factor=20.0),),
    ),
    "sm100_d128_fp16_causal_bwd_gqa3_s256": (
        "head_dim: 128\ndtype: fp16\nmask: causal\nheads: {q_per_kv: 3}\nseqlen: 256\n",
        (Case("fixed", 1, 1, 256, 256, sm_count=2),),
    ),
}
PAIRED = "sm90_d192x128_bf16_causal_bwd"
# Pairs of CTAs, that exchange dS, of two KV tiles of 64 keys.
KERNELS |= {
    PAIRED: (
        "head_dim: {qk: 192, v: 128}\ndtype: bf16\nmask: causal\n",
        (Case("tails", 1, 1, 70, 100, sm_count=2),),
    ),
    # Three tiles: the last pair has one behind all keys. One SM of five is left.
    "sm90_d256_bf16_bwd_s70x192": (
        "head_dim: 256\ndtype: bf16\nseqlen: {q: 70, kv: 192}\n",
        (Case("odd", 1, 1, 70, 192, sm_count=5),),
    ),
    "sm90_d256_fp16_bwd_gqa2": (
        "head_dim: 256\ndtype: fp16\nheads: {q_per_kv: 2}\n",
        (
            Case("one_tile", 1, 1, 30, 40, sm_count=2),
            Case("groups", 1, 2, 70, 200, sm_count=2),
        ),
    ),
    "sm90_d192x128_fp16_bwd_w20x10_gqa2": (
        "head_dim: {qk: 192, v: 128}\ndtype: fp16\nwindow: {left: 20, right: 10}\n"
        "heads: {q_per_kv: 2}\n",
        (
            Case("late", 1, 1, 130, 70, sm_count=2),
            Case("hidden", 1, 1, 9, 300, sm_count=4),
        ),
    ),
    "sm90_d256_bf16_bwd_w70x_cap2": (
        "head_dim: 256\ndtype: bf16\nwindow: {left: 70}\nsoftcap: 2\n",
        (Case("capped", 1, 1, 80, 200, sm_count=2, scale_factor=5.0),),
    ),
    "sm90_d256_fp16_causal_bwd_cap30": (
        "head_dim: 256\ndtype: fp16\nmask: causal\nsoftcap: 30\n",
        (Case("capped", 1, 1, 70, 60, sm_count=2, scale_factor=20.0),),
    ),
}
HALVES, OUTLIERS = "dq_sums: fp16\n", {"gradient": "outliers"}
LARGE: Any = {"data": "uniform_1e4", "gradient": "small", "sm_count": 1}
IN_HALVES = "sm90_d64_bf16_causal_bwd_gqa2_dq16"
# Sums of dQ in fp16, of blocks whose dO is of all sizes: dK and dV have one scale, dQ has more.
KERNELS |= {
    IN_HALVES: (
        D64 + "heads: {q_per_kv: 2}\n" + HALVES,
        (
            Case("outliers", 1, 2, 320, 150, sm_count=2, **OUTLIERS),
            Case("large", 1, 1, 70, 130, scale_factor=1e-4, **LARGE),
        ),
    ),
    "sm90_d128_bf16_bwd_w20x10_cap2_dq16": (
        "head_dim: 128\ndtype: bf16\nwindow: {left: 20, right: 10}\nsoftcap: 2\n"
        + HALVES,
        (Case("late", 1, 1, 200, 140, sm_count=1, scale_factor=5.0, **OUTLIERS),),
    ),
    "sm90_d96_bf16_causal_bwd_s200x130_dq16": (
        "head_dim: 96\ndtype: bf16\nmask: causal\nseqlen: {q: 200, kv: 130}\n" + HALVES,
        (Case("first", 1, 2, 200, 130, sm_count=3, **OUTLIERS),),
    ),
}
PAIRED_IN_ORDER = "sm90_d192x128_bf16_bwd_det"
# Of which dQ has the same bits, too: tiles in turn.
ORDERED = {
    "sm90_d64_bf16_causal_bwd_det": (
        D64 + "deterministic: true\n",
        (Case("turns", 1, 1, 100, 300, sm_count=3),),
    ),
    # Turns by falling keys, of several heads, and of tiles that no row sees.
    "sm90_d64_bf16_bwd_w20x10_gqa2_det": (
        kernels.SMALL + "window: {left: 20, right: 10}\nheads: {q_per_kv: 2}\n"
        "deterministic: true\n",
        (
            Case("late", 1, 1, 130, 70, sm_count=1),
            Case("hidden", 1, 1, 9, 300, sm_count=3),
            Case("turns", 1, 1, 200, 300, sm_count=2),
        ),
    ),
    "sm90_d64_bf16_bwd_w70x_det": (
        kernels.SMALL + "window: {left: 70}\ndeterministic: true\n",
        (Case("left", 1, 1, 80, 300, sm_count=2),),
    ),
    "sm90_d64_bf16_causal_bwd_s300_det": (
        D64 + "deterministic: true\nseqlen: 300\n",
        (Case("stored", 1, 1, 300, 300, sm_count=3),),
    ),
    "sm90_d64_bf16_causal_bwd_s300_det_dq16": (
        D64 + "deterministic: true\nseqlen: 300\n" + HALVES,
        (Case("stored", 1, 1, 300, 300, sm_count=3, **OUTLIERS),),
    ),
    "sm90_d96_fp16_bwd_det": (
        "head_dim: 96\ndtype: fp16\ndeterministic: true\n",
        (Case("thin", 1, 2, 70, 200, sm_count=3),),
    ),
    PAIRED_IN_ORDER: (
        "head_dim: {qk: 192, v: 128}\ndtype: bf16\ndeterministic: true\n",
        (Case("turns", 1, 1, 100, 500, sm_count=6),),
    ),
    "sm90_d192x128_bf16_bwd_w40x3_det": (
        "head_dim: {qk: 192, v: 128}\ndtype: bf16\nwindow: {left: 40, right: 3}\n"
        "deterministic: true\n",
        (Case("turns", 1, 1, 130, 300, sm_count=4),),
    ),
    "sm90_d256_bf16_causal_bwd_gqa2_det": (
        "head_dim: 256\ndtype: bf16\nmask: causal\nheads: {q_per_kv: 2}\n"
        "deterministic: true\n",
        (Case("turns", 1, 1, 100, 300, sm_count=6),),
    ),
    "sm90_d256_fp16_bwd_w70x_cap30_s130x192_det": (
        "head_dim: 256\ndtype: fp16\nwindow: {left: 70}\nsoftcap: 30\n"
        "seqlen: {q: 130, kv: 192}\ndeterministic: true\n",
        (Case("turns", 1, 1, 130, 192, sm_count=4, scale_factor=20.0),),
    ),
    "sm100_d64_bf16_causal_bwd_det": (
        "head_dim: 64\ndtype: bf16\nmask: causal\ndeterministic: true\n",
        (Case("turns", 1, 1, 200, 500, sm_count=3),),
    ),
}
KERNELS |= ORDERED
CALLS = {
    f"{stem}-{case.name}": (stem, case)
    for stem, (_, cases) in KERNELS.items()
    for case in cases
}
# Asynchronous work is done late, and at random times beside warps in a random order.
SCHEDULES = [rehearsal.schedules(1)[i] for i in (1, -1)]


class Ran(NamedTuple):
    """The bits of what was written, by output the error over its bound, and all findings."""

    bits: dict[str, bytes]
    of_bound: dict[str, float]
    findings: list[str]


def bits_of(x: Any, dtype: str) -> Any:
    """Rounded to nearest even, as the tensors of a case hold it."""
    x = np.asarray(x, np.float32)
    if dtype == "fp32":
        return x.view(np.uint32)
    if dtype == "fp16":
        return x.astype(np.float16).view(np.uint16)
    wide = np.ascontiguousarray(x).view(np.uint32)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)


def given_by_forward(spec: Any, case: Case, problem: Problem) -> Given:
    """What the kernel is given, with O and LSE of the forward pass written into the tensors."""
    inputs = {x.name: x.numbers() for x in problem.inputs}
    scale = scale_of(spec, case)
    read = {name: inputs[name] for name in ("q", "k", "v")}
    for name, x in FORWARD.exact(Given(forward_of(spec), read, scale)).items():
        view = problem[name].view
        view[...] = bits_of(x, problem[name].placed.dtype).view(view.dtype)
    return Given(spec, {x.name: x.numbers() for x in problem.inputs}, scale)


def run(path: Path, case: Case, schedules: list[Schedule]) -> list[Ran]:
    """A call under each schedule."""
    known = read_constants(path.read_text(encoding="utf-8"))
    spec, tiles = known["SPEC"], tiles_of(known)
    text, (launches,) = captures.checked(
        path, [arguments(spec, case, tiles)], arch=spec["arch"]
    )
    problem, programs = make_problem(spec, tiles, case), lower_kernels(text)
    given = given_by_forward(spec, case, problem)
    truth, ran = BACKWARD.truth(given), []
    ordered = not BACKWARD.unordered(spec)
    for schedule in schedules:
        for written in problem.written:
            written.poison()
        memory = problem.memory()
        found = machine.run(
            programs, launches, memory, schedule=schedule, ordered_sums=ordered
        )
        results = {x.name: x.numbers().astype(np.float64) for x in problem.outputs}
        verdicts = BACKWARD.judge(given, results, truth, tiles.kv)
        findings = [*map(str, found.findings)]
        findings += [x.finding for x in verdicts.values() if x.finding]
        findings += [y for x in problem.written if (y := x.outside())]
        bits = {x.name: x.view.tobytes() for x in problem.written}
        ran.append(
            Ran(bits, {name: x.of_bound for name, x in verdicts.items()}, findings)
        )
    return ran


@pytest.mark.parametrize("call", support.rotated(CALLS, 5))
def test_gradients_are_right_under_every_schedule(call: str, tmp_path: Path) -> None:
    stem, case = CALLS[call]
    fields, _ = KERNELS[stem]
    path = kernels.written(tmp_path, kernels.text_of(fields, stem), stem)
    ran = run(path, case, SCHEDULES)
    assert [each.findings for each in ran] == [[]] * len(SCHEDULES)
    assert max(max(each.of_bound.values()) for each in ran) < 1
    # dQ is summed in any order unless a spec asks for one, dK and dV are not.
    alike = ("workspace", "dq", "dk", "dv") if stem in ORDERED else ("dk", "dv")
    for name in alike:
        assert len({each.bits[name] for each in ran}) == 1


# What a spec says, heads, and CTAs: two sections of a head each, and a last one of what is left.
SECTIONS = {
    "in any order": ("seqlen: 300\n", 3, 2),
    "of any length": ("", 4, 2),
    "of groups": ("heads: {q_per_kv: 2}\n", 4, 2),
    "in a fixed order": ("deterministic: true\n", 3, 2),
    "in a fixed order, the last one of two heads": (
        "deterministic: true\n",
        4,
        BLOCKS_APART,
    ),
}


@pytest.mark.parametrize(("q", "kv", "heads"), [(70, 600, 3), (300, 60, 4)])
def test_sums_are_cleared_whatever_the_share_of_a_ticket(
    q: int, kv: int, heads: int, tmp_path: Path
) -> None:
    """Fewer blocks of rows than tickets, and one ticket for all of them."""
    stem = "sm90_d64_bf16_bwd_shares"
    one_head = {f"SECTION_BYTES = {SECTION_BYTES // 2}": "SECTION_BYTES = 1"}
    text = kernels.damaged(kernels.text_of(kernels.SMALL, stem), one_head)
    case = Case("shares", 1, heads, q, kv, sm_count=2)
    ran = run(kernels.written(tmp_path, text, stem), case, SCHEDULES)
    assert [each.findings for each in ran] == [[]] * len(SCHEDULES)


def of_sections(
    name: str, changes: dict[str, str], schedules: list[Schedule], folder: Path
) -> list[Ran]:
    fields, heads, sm_count = SECTIONS[name]
    stem = "sm90_d64_bf16_causal_bwd_sections"
    one_head = {f"SECTION_BYTES = {SECTION_BYTES}": "SECTION_BYTES = 1", **changes}
    text = kernels.damaged(kernels.text_of(D64 + fields, stem), one_head)
    case = Case("sections", 1, heads, 300, 300, sm_count=sm_count)
    return run(kernels.written(folder, text, stem), case, schedules)


@pytest.mark.parametrize("name", SECTIONS)
def test_tiles_of_sections_fall_and_those_of_the_last_one_rise(
    name: str, tmp_path: Path
) -> None:
    ran = of_sections(name, {}, SCHEDULES, tmp_path)
    assert [each.findings for each in ran] == [[]] * len(SCHEDULES)
    same = ("dq", "dk", "dv") if "fixed" in name else ("dk", "dv")
    assert [len({each.bits[x] for each in ran}) for x in same] == [1] * len(same)


def of_strips(
    fields: str, changes: dict[str, str], schedules: list[Schedule], folder: Path
) -> list[Ran]:
    """Five tiles of two strips, three and two."""
    stem = "sm90_d64_bf16_bwd_strips"
    changes = {"STRIPS = 16": "STRIPS = 2", **changes}
    text = kernels.damaged(
        kernels.text_of(kernels.SMALL + HALVES + fields, stem), changes
    )
    case = Case("strips", 1, 2, 70, 600, sm_count=3)
    return run(kernels.written(folder, text, stem), case, schedules)


@pytest.mark.parametrize("fields", ["", "deterministic: true\n"])
def test_strips_of_tiles_take_turns(fields: str, tmp_path: Path) -> None:
    ran = of_strips(fields, {}, SCHEDULES, tmp_path)
    assert [each.findings for each in ran] == [[]] * len(SCHEDULES)
    same = ("dq", "dk", "dv") if fields else ("dk", "dv")
    assert [len({each.bits[x] for each in ran}) for x in same] == [1] * len(same)


# The tile of a turn, or the turn of a tile.
STRIP_DAMAGES = {
    "the first strips are no longer": (
        "cutlass.min(strip, longer)",
        "0 * longer",
        "dk",
    ),
    "turns in the order of keys": (
        "turn = work.tile_turn",
        "turn = work.kv_tile",
        "deadlock",
    ),
}


@pytest.mark.parametrize("name", STRIP_DAMAGES)
def test_strips_that_do_not_take_turns_are_found(name: str, tmp_path: Path) -> None:
    old, new, words = STRIP_DAMAGES[name]
    fields = "deterministic: true\n"
    (ran,) = of_strips(fields, {old: new}, SCHEDULES[:1], tmp_path)
    assert any(words in each for each in ran.findings)


# Of how the sums of later heads are cleared.
CLEAR_DAMAGES = {
    "a counter begins with what was there": (
        "        mCleared[place] = 0\n",
        "        pass\n",
        "read-before-write",
    ),
    "counted before all lanes have cleared": (
        "        cute.arch.sync_warp()\n        if lane_idx == 0:\n            counter",
        "        if lane_idx == 0:\n            counter",
        "race",
    ),
    "counted without a release": (
        'Int32(1), op="add", dtype="s32", sem="release"',
        'Int32(1), op="add", dtype="s32", sem="relaxed"',
        "race",
    ),
    "awaited without an acquisition": (
        '        cleared = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")\n'
        "        while cleared < shares:\n"
        '            cleared = cute.arch.load(counter, Int32, sem="acquire"',
        '        cleared = cute.arch.load(counter, Int32, sem="relaxed", scope="gpu")\n'
        "        while cleared < shares:\n"
        '            cleared = cute.arch.load(counter, Int32, sem="relaxed"',
        "race",
    ),
    "a head left out": (
        "    head += problem.cleared\n",
        "    head += problem.cleared + 1\n",
        "deadlock",
    ),
    "a block of each share left out": (
        "    begin = share * of_share\n",
        "    begin = share * of_share + 1\n",
        "read-before-write",
    ),
}


@pytest.mark.parametrize("name", support.rotated(CLEAR_DAMAGES, 2))
def test_sums_that_are_not_cleared_in_time_are_found(name: str, tmp_path: Path) -> None:
    old, new, words = CLEAR_DAMAGES[name]
    (ran,) = of_sections("of any length", {old: new}, SCHEDULES[:1], tmp_path)
    assert any(words in each for each in ran.findings)


@pytest.mark.parametrize("rises", ["True", "False"])
def test_a_turn_that_is_counted_from_the_other_end_is_found(
    rises: str, tmp_path: Path
) -> None:
    counted = {"                    work.rises,\n": f"Boolean({rises}),\n"}
    (ran,) = of_sections("in a fixed order", counted, SCHEDULES[:1], tmp_path)
    assert any("deadlock" in each for each in ran.findings)


DAMAGES = {
    "dK without the scale": (
        " * softmax_scale).to(DTYPE)",
        ").to(DTYPE)",
        "of dk: wrong",
    ),
    "a block's sums left out": (
        "    add_dq(scale_dq(acc_dQ, softmax_scale), mSums, place_before, warpgroup_idx)\n"
        "    if warp_idx",
        "    if warp_idx",
        "of dq: wrong",
    ),
    "dQ added where the next block's is": (
        "add_dq(addends, mSums, place_added, ",
        "add_dq(addends, mSums, place_before, ",
        "of dq: wrong",
    ),
    "dQ without the scale": (
        "multiplied(acc_dQ[i], softmax_scale)",
        "multiplied(acc_dQ[i], Float32(1.0))",
        "of dq: wrong",
    ),
    "dS seen by TMA's proxy only by chance": (
        '        cute.arch.fence_proxy("async.shared", space="cta")\n'
        "        cute.arch.sync_warp()",
        "        cute.arch.sync_warp()",
        "fence",
    ),
    "statistics read before they are there": (
        "    cute.arch.griddepcontrol_wait()\n    ticket = Int32(0)",
        "    ticket = Int32(0)",
        "race",
    ),
    "sums read before they are there": (
        "    cute.arch.griddepcontrol_wait()\n    sums =",
        "    sums =",
        "race",
    ),
    "no zeros where dQ is summed": (
        "        cute.autovec_copy(zeros, gSums[None, i * threads + thread])",
        "        pass",
        "read-before-write",
    ),
    "Q given back before dK has read it": (
        "        rings.do.consumer_release(do_state)\n",
        "        rings.do.consumer_release(do_state)\n"
        "        rings.q.consumer_release(q_state)\n",
        "",
    ),
}


@pytest.mark.parametrize("name", support.rotated(DAMAGES, 2))
def test_damage_is_found(name: str, tmp_path: Path) -> None:
    old, new, words = DAMAGES[name]
    stem = "sm90_d64_bf16_causal_bwd"
    text = kernels.text_of(D64, stem)
    assert text.count(old) == 1, name
    path = kernels.written(tmp_path, text.replace(old, new), stem)
    case = Case("damaged", 1, 1, 150, 200, sm_count=1)
    findings = [y for each in run(path, case, SCHEDULES) for y in each.findings]
    assert any(words in each for each in findings), findings[:3]


FIRST_DAMAGES = {
    "a tile adds before the first one has stored": (
        "cutlass.select_(is_last, turn, cutlass.min(turn, 1))",
        "cutlass.select_(is_last, turn, Int32(0))",
        "race",
    ),
    "the last tile waits for the first alone": (
        "cutlass.select_(is_last, turn, cutlass.min(turn, 1))",
        "cutlass.min(turn, 1)",
        "race",
    ),
    "the last tile is taken for one that adds": (
        "cutlass.select_(is_last, Int32(LAST), Int32(0))",
        "Int32(0)",
        "of dq: NaN",
    ),
    "the last tile writes its own alone": (
        "        if turn == LAST:\n",
        "        if turn == FIRST:\n",
        "of dq: wrong",
    ),
    "neighbours keep each other's columns": (
        "    both[0] = cutlass.select_(odd, other, own)\n",
        "    both[0] = cutlass.select_(odd, own, other)\n",
        "of dq: wrong",
    ),
    "stored is told before it is": (
        "    rings.added.consumer_wait(state)\n",
        "",
        "race",
    ),
    "the first tile adds": (
        "cutlass.select_(turn == 0, Int32(FIRST), Int32(0))",
        "Int32(0)",
        "read-before-write",
    ),
    "no zeros where no tile comes": (
        "    if (block + 1) * TILE_Q <= first_row:\n",
        "    if block < 0:\n",
        "of dq: NaN",
    ),
}


@pytest.mark.parametrize("name", support.rotated(FIRST_DAMAGES, 2))
def test_damage_of_the_first_and_the_last_tile_is_found(
    name: str, tmp_path: Path
) -> None:
    old, new, words = FIRST_DAMAGES[name]
    # Three tiles that begin at the same block; with a mask, two, and a block that neither sees.
    q, kv, mask = (260, 190, "causal") if "zeros" in name else (130, 380, "none")
    stem = f"sm90_d64_bf16_{mask}_bwd"
    fields = f"{kernels.SMALL}mask: {mask}\nseqlen: {{q: {q}, kv: {kv}}}\n"
    text = kernels.text_of(fields, stem)
    assert text.count(old) == 1, name
    path = kernels.written(tmp_path, text.replace(old, new), stem)
    case = Case("damaged", 1, 1, q, kv, sm_count=3)
    findings = [y for each in run(path, case, SCHEDULES) for y in each.findings]
    assert any(words in each for each in findings), findings[:3]


# What a pair of CTAs can do wrong: the text that changes, and what must be said then.
PAIR_DAMAGES: dict[str, tuple[dict[str, str], str]] = {
    "P read before it is stored": (
        {
            "            rings.p.consumer_wait(p_state, rings.p.consumer_try_wait(p_state))\n": ""
        },
        "race",
    ),
    "P stored where dS is still read": (
        {"            rings.ds.producer_acquire(p_state)\n": ""},
        "race",
    ),
    "dS stored where P is still read": (
        {"            meet()  # dS comes where P was\n": ""},
        "race",
    ),
    "dS read before it is stored": (
        {
            "        rings.ds.consumer_wait(state, rings.ds.consumer_try_wait(state))\n": (
                "        pass\n"
            )
        },
        "race",
    ),
    "the other CTA's dS read before it has come": (
        {
            "        rings.peer.consumer_wait(state, rings.peer.consumer_try_wait(state))\n": (
                "        pass\n"
            )
        },
        "race",
    ),
    "dS seen by the copy only by chance": (
        {
            '            cute.arch.fence_proxy("async.shared", space="cta")\n'
            "            cute.arch.sync_warp()\n"
            "            with cute.arch.elect_one():\n"
            "                rings.ds.producer_commit(p_state)\n": (
                "            cute.arch.sync_warp()\n"
                "            with cute.arch.elect_one():\n"
                "                rings.ds.producer_commit(p_state)\n"
            )
        },
        "fence",
    ),
    "zeros left out where the first step reads dS": (
        {"        clear_ds(rings)\n": ""},
        "read-before-write",
    ),
    "dK without the scale": (
        {
            "store_rows(dk, mma.acc_dK, softmax_scale,": "store_rows(dk, mma.acc_dK, Float32(1.0),"
        },
        "of dk: wrong",
    ),
    "columns of the neighbour's rows": (
        {
            "shuffle_sync_bfly(cutlass.select_(odd, pairs[0], pairs[1]), 1)": (
                "shuffle_sync_bfly(cutlass.select_(odd, pairs[0], pairs[1]), 4)"
            )
        },
        "wrong",
    ),
    "dS copied before it is stored": (
        {"            rings.ds.consumer_wait(state)\n": ""},
        "race",
    ),
    "dS copied where the other CTA still reads the one before": (
        {"            rings.peer.producer_acquire(state)\n": ""},
        "race",
    ),
    "room for dS told in the CTA that has read it": (
        {"MATH_WARPS, 1 - rank)": "MATH_WARPS, rank)"},
        "race",
    ),
    "room for dS not told": (
        {"        rings.peer.consumer_release(state)\n": ""},
        "deadlock",
    ),
    "dS copied to where that CTA's own is": (
        {"for cta in (OWN, PEERS)": "for cta in (OWN, OWN)"},
        "race",
    ),
    "half of dS's bytes expected": (
        {"expect_tx(barrier, DS_BYTES)": "expect_tx(barrier, DS_BYTES // 2)"},
        "deadlock",
    ),
    "dS said to have come before it has": (
        {"            rings.peer.consumer_wait(state)\n": ""},
        "race",
    ),
    "dS said to have come in the CTA where it is": (
        {"empty.arrive(0, peer)": "empty.arrive(0, 1 - peer)"},
        "race",
    ),
    "dS not said to have come": (
        {
            "            with cute.arch.elect_one():\n"
            "                say_come(rings, peer)\n": ""
        },
        "deadlock",
    ),
    "dS before the first not said to have come": (
        {
            "    with cute.arch.elect_one():\n        say_come(rings, peer)  # of the block"
            " before the first, which there is not\n": ""
        },
        "deadlock",
    ),
    "dS freed by one arrival less": (
        {"MATH_WARPS + 1)": "MATH_WARPS)"},
        "race",
    ),
    "dS freed by the math warps alone": (
        {
            "MATH_WARPS + 1)": "MATH_WARPS)",
            "    rings.ds.sync_object_empty.arrive(0, peer)\n": "    pass\n",
        },
        "race",
    ),
    "tickets handed to one CTA": (
        {"range_constexpr(CLUSTER_CTAS)": "range_constexpr(1)"},
        "deadlock",
    ),
    "the other half of the other CTA's K": (
        {"(peers, rank, half_of_peers": "(peers, 1 - rank, half_of_peers"},
        "of dq: wrong",
    ),
    "K of the tile behind, in both CTAs": (
        {"work.kv_tile + 1 - 2 * rank": "work.kv_tile + 1"},
        "of dq: wrong",
    ),
    "dQ of the other half of the CTA's K": (
        {"half_of_own(k_stage, rank)": "half_of_own(k_stage, 1 - rank)"},
        "of dq: wrong",
    ),
    "the CTA's K beside the other one's dS": (
        {
            "peers = half_of_peers(k_stage)": "peers = half_of_own(k_stage, rank)",
        },
        "of dq: wrong",
    ),
    "a slice of dQ added in another one's place": (
        {
            "    part = cute.arch.block_idx_in_cluster() * WARPGROUPS + 1\n": (
                "    part = cute.arch.block_idx_in_cluster() * WARPGROUPS\n"
            )
        },
        "of dq: wrong",
    ),
    "barriers used before the other CTA has made them": (
        {
            "init_arrive(cluster_shape_mn=(CLUSTER_CTAS, 1), is_relaxed=True)": (
                "init_arrive(is_relaxed=True)"
            ),
            "init_wait(cluster_shape_mn=(CLUSTER_CTAS, 1))": "init_wait()",
        },
        "initialis",
    ),
    "a CTA ends while the other one arrives there": (
        {"    cute.arch.cluster_arrive()\n    cute.arch.cluster_wait()\n": ""},
        "nothing makes cta",
    ),
}


@pytest.mark.parametrize("name", support.rotated(PAIR_DAMAGES, 3))
def test_damage_of_a_pair_of_ctas_is_found(name: str, tmp_path: Path) -> None:
    """Two pairs of tiles, one after the other, the last tile partial; four blocks of rows."""
    fields, _ = KERNELS[PAIRED]
    changes, words = PAIR_DAMAGES[name]
    text = kernels.damaged(kernels.text_of(fields, PAIRED), changes)
    path = kernels.written(tmp_path, text, PAIRED)
    case = Case("damaged", 1, 1, 200, 200, sm_count=2)
    findings = [y for each in run(path, case, SCHEDULES) for y in each.findings]
    assert any(words in each for each in findings), findings[:3]


def test_k_given_back_before_dq_has_read_it_is_found(tmp_path: Path) -> None:
    """At head_dim 256, where K has one stage."""
    stem, fields = "sm90_d256_bf16_bwd", "head_dim: 256\ndtype: bf16\n"
    waits, frees = (
        "        warpgroup.wait_group(0)\n",
        "        rings.k.consumer_release(k_state)\n",
    )
    last = "k_state.index, 0, has_before)\n"
    changes = {last + waits + frees: last + frees + waits}
    text = kernels.damaged(kernels.text_of(fields, stem), changes)
    path = kernels.written(tmp_path, text, stem)
    case = Case("damaged", 1, 1, 100, 300, sm_count=2)
    findings = [y for each in run(path, case, SCHEDULES) for y in each.findings]
    assert any("race" in each for each in findings), findings[:3]


# Of K and V that stay in registers for a tile, at head_dim 96: all of K, most of V.
KEPT_DAMAGES: dict[str, tuple[dict[str, str], str]] = {
    "K of the tile before": (
        {"                keep(mma, rings.sK, mma.rK, k_state.index)\n": ""},
        "wrong",
    ),
    "V of the tile before": (
        {
            "            keep(mma, rings.sV, mma.rV, v_state.index)\n": (
                "            if not has_before:\n"
                "                keep(mma, rings.sV, mma.rV, v_state.index)\n"
            )
        },
        "wrong",
    ),
    "V of the other stage": (
        {"mma.rV, v_state.index)": "mma.rV, 1 - v_state.index)"},
        "",
    ),
    "K loaded before it is there": (
        {
            "                rings.k.consumer_wait(k_state)\n"
            "                keep(mma, rings.sK, mma.rK, k_state.index)\n": (
                "                keep(mma, rings.sK, mma.rK, k_state.index)\n"
                "                rings.k.consumer_wait(k_state)\n"
            )
        },
        "race",
    ),
    "a k-step fewer": (
        {
            "    for k in range(cute.size(kept.shape[2])):\n        cute.copy": (
                "    for k in range(cute.size(kept.shape[2]) - 1):\n        cute.copy"
            )
        },
        "",
    ),
}


@pytest.mark.parametrize("name", support.rotated(KEPT_DAMAGES, 1))
def test_damage_of_operands_in_registers_is_found(name: str, tmp_path: Path) -> None:
    stem, fields = "sm90_d96_bf16_bwd", "head_dim: 96\ndtype: bf16\n"
    changes, words = KEPT_DAMAGES[name]
    text = kernels.damaged(kernels.text_of(fields, stem), changes)
    path = kernels.written(tmp_path, text, stem)
    case = Case("damaged", 1, 1, 150, 400, sm_count=1)
    findings = [y for each in run(path, case, SCHEDULES) for y in each.findings]
    assert findings, name
    assert any(words in each for each in findings), findings[:3]


# Of the scale that sums of dQ in fp16 have, and the factor of a block besides.
HALF_DAMAGES: dict[str, tuple[dict[str, str], str]] = {
    "no factor of a block": (
        {
            "            if cute.arch.make_warp_uniform(shift_before) != 0:\n"
            "                multiply(acc_dQ, power_of_two(shift_before))\n": ""
        },
        "of dq",
    ),
    "the factor of the next block": (
        {
            "                multiply(acc_dQ, power_of_two(shift_before))\n": (
                "                multiply(acc_dQ, power_of_two(shift))\n"
            )
        },
        "of dq",
    ),
    "the last block's without": (
        {
            "    if cute.arch.make_warp_uniform(shift_before) != 0:\n"
            "        multiply(acc_dQ, power_of_two(shift_before))\n"
            "    add_dq": "    add_dq"
        },
        "of dq",
    ),
    "dQ that keeps the factor": (
        {" + exponents[SHIFT_AT, place]": ""},
        "of dq",
    ),
    "P without a scale": ({" * LOG2_E + Float32(exponent)": " * LOG2_E"}, "wrong"),
    "dV that keeps its scale": (
        {"(mma.acc_dV.load() * power_of_two(-exponent))": "mma.acc_dV.load()"},
        "of dv: wrong",
    ),
    "dK that keeps its scale": (
        {"softmax_scale = softmax_scale * power_of_two(-exponent)": "pass"},
        "of dk: wrong",
    ),
    "blocks that are far shorter without a factor": (
        {" and longer >= -MOST_SHORTER": ""},
        "of dq",
    ),
    "blocks that are far longer without a factor": (
        {"longer <= MOST_LONGER and longer": "longer"},
        "of dq",
    ),
    "the factor the other way": ({"Int32(0), -longer)": "Int32(0), longer)"}, "of dq"),
    "K and V that are no samples": (
        {"(of_dout + of_k + of_v + 1)": "(of_dout + 1)"},
        "of dq",
    ),
    "an exponent read when the stage is free": (
        {
            "            exponent = exponents[TILE_Q, q_state.index]\n": "",
            "        rings.q.consumer_release(q_state)\n": (
                "        rings.q.consumer_release(q_state)\n"
                "        exponent = exponents[TILE_Q, q_state.index]\n"
            ),
        },
        "race",
    ),
    "exponents that are not loaded": (
        {"Int32(STAT_BYTES * cute.size(gmem) // TILE_Q)": "Int32(STAT_BYTES)"},
        "",
    ),
}


@pytest.mark.parametrize("name", support.rotated(HALF_DAMAGES, 3))
def test_damage_of_sums_in_fp16_is_found(name: str, tmp_path: Path) -> None:
    fields, cases = KERNELS[IN_HALVES]
    changes, words = HALF_DAMAGES[name]
    text = kernels.damaged(kernels.text_of(fields, IN_HALVES), changes)
    path = kernels.written(tmp_path, text, IN_HALVES)
    ran = [each for case in cases for each in run(path, case, SCHEDULES)]
    findings = [y for each in ran for y in each.findings]
    assert any(words in each for each in findings), findings[:3]


# A wait or a fence between warps is gone, and what must be said then.
SM100_DAMAGES = {
    "dV before P is there": (
        "            pipes.s.producer_acquire(p_state)\n",
        "tensor",
    ),
    "dK before dS is there": ("            pipes.dp.producer_acquire(ds_state)\n", ""),
    "dP over dQ that has not left": (
        "                pipes.dq.producer_acquire(dq_state)\n",
        "",
    ),
    "dV and dK stored before they are complete": (
        "        pipes.dkv.consumer_wait(dkv_state)\n",
        "tensor",
    ),
    "dS seen by the MMA's proxy only by chance": (
        '            cute.arch.fence_proxy("async.shared", space="cta")\n'
        "            before_signal()\n",
        "fence",
    ),
    "statistics before they are there": (
        "            pipes.stats.consumer_wait(stat_state)\n",
        "",
    ),
}


@pytest.mark.parametrize("name", support.rotated(SM100_DAMAGES, 2))
def test_damage_on_sm100_is_found(name: str, tmp_path: Path) -> None:
    fields, _ = KERNELS[ON_SM100]
    gone, words = SM100_DAMAGES[name]
    text = kernels.damaged(kernels.text_of(fields, ON_SM100), {gone: ""})
    path = kernels.written(tmp_path, text, ON_SM100)
    case = Case("damaged", 1, 1, 300, 300, sm_count=1)
    findings = [y for each in run(path, case, SCHEDULES) for y in each.findings]
    assert any(words in each for each in findings), findings[:3]


# Damages of the warps that watch and pass turns, each of which ends in a deadlock.
TURN_DAMAGES = {
    "counted before all have added": "    rings.added.consumer_wait(state)\n",
    "handed over before the stage is free": (
        "            rings.turn.producer_acquire(turn_state)\n"
    ),
    "a stage kept": "        rings.turn.consumer_release(state)\n",
}
PAIRED_TURN_DAMAGES = {
    **TURN_DAMAGES,
    "a tile's last block not passed": (
        "        pass_on(mTurns, rings, turn_state, before)\n        turn_state.advance()\n"
        "        work = take_work"
    ),
}
OF_TURNS = {
    f"{stem}: {name}": (stem, Case("damaged", 1, 1, *lengths, sm_count=sms), gone)
    for stem, lengths, sms, damages in (
        (next(iter(ORDERED)), (330, 300), 2, TURN_DAMAGES),
        (PAIRED_IN_ORDER, (330, 300), 4, PAIRED_TURN_DAMAGES),
    )
    for name, gone in damages.items()
}


@pytest.mark.parametrize("name", support.rotated(OF_TURNS, 2))
def test_damage_of_turns_is_found(name: str, tmp_path: Path) -> None:
    stem, case, gone = OF_TURNS[name]
    left = "        work = take_work" if gone.endswith("take_work") else ""
    text = kernels.damaged(kernels.text_of(ORDERED[stem][0], stem), {gone: left})
    ran = run(kernels.written(tmp_path, text, stem), case, SCHEDULES[:1])
    assert any("deadlock" in each for each in ran[0].findings)


IN_ORDER = next(iter(ORDERED))
OF_CTA = "mTurns[cute.arch.block_idx_in_cluster(), None]"


@pytest.mark.parametrize(
    ("stem", "changes"),
    [
        (IN_ORDER, {"while added < turn:": "while added < 0:"}),
        (
            IN_ORDER,
            {
                "            rings.turn.consumer_wait(dq_state, may_add)\n": "            pass\n"
            },
        ),
        (PAIRED_IN_ORDER, {"while added < turn:": "while added < 0:"}),
        # Of the other CTA's, or of both in one.
        (PAIRED_IN_ORDER, {f"address = {OF_CTA}": "address = mTurns[0, None]"}),
        (
            PAIRED_IN_ORDER,
            {
                f"{x} = {OF_CTA}": f"{x} = mTurns[0, None]"
                for x in ("address", "counter")
            },
        ),
    ],
)
def test_who_does_not_wait_for_a_turn_is_found(
    stem: str, changes: dict[str, str], tmp_path: Path
) -> None:
    fields, (case,) = ORDERED[stem]
    text = kernels.damaged(kernels.text_of(fields, stem), changes)
    path = kernels.written(tmp_path, text, stem)
    (ran,) = run(path, case, SCHEDULES[:1])
    assert any("sum-order" in each for each in ran.findings)


@pytest.mark.parametrize("stem", [IN_ORDER, PAIRED_IN_ORDER])
@pytest.mark.parametrize("order", ["release", "acquire"])
def test_a_turn_that_hands_nothing_over_is_found(
    stem: str, order: str, tmp_path: Path
) -> None:
    """Without a bit that differs: the emulator adds at once."""
    fields, (case,) = ORDERED[stem]
    text = kernels.text_of(fields, stem)
    relaxed = text.replace(f'sem="{order}"', 'sem="relaxed"')
    assert relaxed != text
    path = kernels.written(tmp_path, relaxed, stem)
    (ran,) = run(path, case, SCHEDULES[:1])
    assert any("sum-order" in each for each in ran.findings)


def test_math_warps_of_a_pair_that_wait_for_no_turn_are_found(tmp_path: Path) -> None:
    fields, (case,) = ORDERED[PAIRED_IN_ORDER]
    text = kernels.text_of(fields, PAIRED_IN_ORDER)
    waits = re.compile(r"rings\.turn\.consumer_wait\(turn_state\)")
    text, count = waits.subn("pass", text)
    assert count == 4
    path = kernels.written(tmp_path, text, PAIRED_IN_ORDER)
    (ran,) = run(path, case, SCHEDULES[:1])
    assert any("sum-order" in each for each in ran.findings)
