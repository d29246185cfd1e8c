# SPDX-License-Identifier: Apache-2.0
"""The plan of the backward pass: what fits, what the forward's fields are to it, and its SPEC."""

from __future__ import annotations

import re

import pytest
import support
from fmha_gen.arch import sm90
from fmha_gen.errors import SpecError
from fmha_gen.features.backward import TAKES
from fmha_gen.planning import plan, sm90_backward
from fmha_gen.planning.numbers import Number
from fmha_gen.show import explain
from fmha_gen.show.picture import page
from fmha_gen.spec.model import Spec

HEAD = "arch: sm90\nop: fmha_bwd\n"


def planned(text, stem="sm90_bwd"):
    return plan.resolve(support.load_text(HEAD + text, stem))


def numbers(kernel):
    return {each.name: each.value for each in (*kernel.chosen, *kernel.derived)}


@pytest.mark.parametrize(
    ("text", "tiles", "nbytes"),
    [
        ("head_dim: 128\ndtype: bf16", (64, 128, 2, 2, 2), 231424),
        ("head_dim: 128\ndtype: fp16", (64, 128, 2, 2, 2), 231424),
        ("head_dim: 96\ndtype: bf16", (64, 128, 2, 2, 2), 182272),
        ("head_dim: 96\ndtype: fp16\nstages: {do: 3}", (64, 128, 2, 3, 2), 194560),
        ("head_dim: 64\ndtype: bf16", (128, 128, 2, 2, 2), 199680),
        ("head_dim: 64\ndtype: bf16\ntile: {q: 64}", (64, 128, 2, 2, 2), 133120),
        ("head_dim: 64\ndtype: fp16", (64, 128, 2, 2, 2), 133120),
        ("head_dim: 128\ndtype: bf16\nstages: {do: 3}", (64, 128, 1, 3, 2), 231424),
        ("head_dim: 64\ndtype: bf16\nstages: {kv: 3}", (128, 128, 2, 2, 3), 232448),
    ],
)
def test_tiles_stages_and_shared_memory(text, tiles, nbytes):
    """The sums are those of the formula, written out: tiles of 1024 bytes, statistics before."""
    kernel = planned(text)
    found = numbers(kernel)
    names = ("TILE_Q", "TILE_KV", "Q_STAGES", "DO_STAGES", "KV_STAGES")
    assert tuple(found[name] for name in names) == tiles
    q, kv, q_stages, do_stages, kv_stages = tiles
    d = found["HEAD_DIM_QK"]
    barriers = -(-2 * 8 * (q_stages + do_stages + 2 * kv_stages + 2) // 128) * 128
    before = -(-(barriers + 4 * q * (q_stages + do_stages)) // 1024) * 1024
    of_tiles = 2 * q * d * (q_stages + do_stages) + 4 * kv * d * kv_stages
    assert kernel.smem_bytes == before + of_tiles + 2 * 2 * q * kv == nbytes
    assert nbytes <= sm90.SMEM_BYTES
    assert (found["WARPGROUPS"], found["THREADS"]) == (2, 384)
    assert (found["CONSUMER_REGS"], found["PRODUCER_REGS"]) == (240, 24)
    assert found["Q_TX_BYTES"] == 2 * q * d + 4 * q


@pytest.mark.parametrize(
    ("text", "head_dim", "stages", "nbytes"),
    [
        ("head_dim: 256\ndtype: bf16", (256, 256), (2, 2, 1), 231424),
        ("head_dim: 256\ndtype: fp16\nsoftcap: 9", (256, 256), (2, 2, 1), 231424),
        (
            "head_dim: {qk: 192, v: 128}\ndtype: bf16",
            (192, 128),
            (2, 2, 2),
            206848,
        ),
    ],
)
@pytest.mark.parametrize("ordered", [False, True])
def test_a_pair_of_ctas(text, head_dim, stages, nbytes, ordered):
    """Each has a tile of 64 keys, half of the other one's K behind its own, and two tiles of dS."""
    kernel = planned(f"{text}\ndeterministic: {str(ordered).lower()}")
    found = numbers(kernel)
    (qk, v), (q_stages, do_stages, kv_stages) = head_dim, stages
    assert (found["TILE_Q"], found["TILE_KV"]) == (64, 64)
    names = ("Q_STAGES", "DO_STAGES", "KV_STAGES")
    assert tuple(found[name] for name in names) == stages
    columns = (found["DQ_COLUMNS"], found["SLICE_COLUMNS"], found["K_COLUMNS"])
    assert columns == (qk // 2, qk // 4, qk + qk // 2)
    assert found["K_TX_BYTES"] == 2 * 64 * columns[2]
    assert found["DS_BYTES"] == 2 * 64 * 64
    assert found["TICKET_RELEASES"] == 2 * (11 if ordered else 10)
    of_tiles = q_stages * qk + do_stages * v + kv_stages * (columns[2] + v) + 2 * 64
    assert kernel.smem_bytes == 2048 + 2 * 64 * of_tiles == nbytes
    (main,) = (each for each in kernel.kernels if each.barriers)
    told = {each.name: each.count for each in main.barriers}
    assert (told["ds_empty"], told["peer_empty"], told["peer_full"]) == (9, 8, 1)
    assert ("turn_full" in told) == ordered


def test_keys_of_a_pair_are_masked_where_its_second_tile_is_partial_or_beyond():
    for kv, masked in ((128, False), (256, False), (192, True), (200, True)):
        kernel = planned(f"head_dim: 256\ndtype: bf16\nseqlen: {{q: 64, kv: {kv}}}")
        assert kernel.context["masked"] == masked


# What ptxas compiled without a spill, and what it did not: (head_dim, rows, dtype, softcap).
# Products in fp32 are those of fp16.
COMPILED = {
    **{(128, 64, "bf16", False): True, (128, 64, "fp16", False): True},
    **{(128, 80, "fp16", False): False, (128, 96, "bf16", False): False},
    **{(64, 128, "bf16", False): True, (64, 128, "fp16", False): False},
    **{(64, 96, "fp16", False): True, (96, 128, "bf16", False): False},
    **{(96, 64, "bf16", False): True, (96, 64, "fp16", False): True},
    **{(128, 64, "bf16", True): True, (128, 64, "fp16", True): True},
    **{(64, 128, "bf16", True): True, (96, 64, "bf16", True): True},
}


@pytest.mark.parametrize(("head_dim", "rows", "dtype", "capped"), COMPILED)
def test_registers_are_too_many_where_a_compile_spilled(head_dim, rows, dtype, capped):
    cap = "softcap: 50\n" if capped else ""
    text = f"{HEAD}head_dim: {head_dim}\ndtype: {dtype}\n{cap}"
    spec = support.load_text(text).spec
    fits = sm90_backward._needed(spec, rows) <= sm90_backward.REGISTERS.consumer
    assert fits == COMPILED[head_dim, rows, dtype, capped]


def test_all_registers_of_an_sm_and_no_more():
    kernel = planned("head_dim: 128\ndtype: bf16")
    _, main, _ = kernel.kernels
    assert sum(128 * x.warpgroups * x.per_thread for x in main.registers) <= 65536
    assert main.registers_needed <= main.hungriest.per_thread == 240


def test_why_a_planned_number_is_what_it_is():
    kernel = planned("head_dim: 64\ndtype: fp16")
    by_name: dict[str, Number] = {each.name: each for each in kernel.chosen}
    assert by_name["TILE_Q"].reason == "with 128 a thread would need 244 registers"
    given = {
        each.name: each
        for each in planned(
            "head_dim: 64\ndtype: bf16\nstages: {q: 1, do: 1, kv: 2}\ntile: {q: 64, kv: 128}"
        ).chosen
    }
    fields = {name: given[name].field for name in ("TILE_Q", "Q_STAGES", "DO_STAGES")}
    assert fields == {
        "TILE_Q": "tile.q",
        "Q_STAGES": "stages.q",
        "DO_STAGES": "stages.do",
    }


def test_rows_of_96_are_read_by_four_threads():
    found = numbers(planned("head_dim: 96\ndtype: bf16"))
    assert (found["ROW_LANES"], found["ROW_VECTORS"], found["STATS_ROWS"]) == (4, 3, 64)
    assert found["DQ_GROUPS"] == 6


def test_fixed_lengths_are_counted_in_blocks():
    found = numbers(planned("head_dim: 128\ndtype: bf16\nseqlen: {q: 1000, kv: 300}"))
    assert found["Q_BLOCKS"] == 16
    assert "Q_BLOCKS" not in numbers(planned("head_dim: 128\ndtype: bf16"))


def test_three_kernels_are_explained_and_drawn():
    kernel = planned("head_dim: 128\ndtype: bf16\nmask: causal\n", "sm90_causal_bwd")
    assert [each.name for each in kernel.kernels] == ["stats", "main", "finish"]
    text = explain.render(kernel, None)
    for line in (
        "  FMHA backward for sm90: head_dim 128, bf16, causal.",
        "main: Shared memory of a CTA",
        "  math thread: dK 64 + dV 64 + dQ 32 + dP 32 + P 16 + others 16 = 224 of 240, an estimate",
        "  - Query row i, at q = i + seqlen_kv - seqlen_q, sees kv <= q.",
    ):
        assert line in text.splitlines(), line
    drawn = page.page(kernel)
    assert any(">main<" in part for part in drawn.body)


def test_the_spec_of_a_file_has_the_fields_of_the_operation():
    kernel = planned("head_dim: 128\ndtype: bf16\nmask: causal\nheads: {q_per_kv: 8}")
    assert kernel.context["spec"] == {
        **{"name": "sm90_bwd", "arch": "sm90", "op": "fmha_bwd", "dtype": "bf16"},
        "head_dim": {"qk": 128, "v": 128},
        "seqlen": {"q": "dynamic", "kv": "dynamic"},
        **{"q_per_kv": 8, "mask": "causal", "deterministic": False},
    }
    assert (
        kernel.context["title"]
        == "FMHA backward for sm90: head_dim 128, bf16, causal, GQA 8"
    )


def test_a_field_is_taken_refused_or_free():
    """A new field has to say what it is to the backward pass."""
    free = {"arch", "op", "seqlen", "heads", "deterministic", "window", "softcap"}
    by_type = {"out_dtype", "v_layout", "descale", "exp"}  # of e4m3, which is refused
    by_arch, by_dtype = {"cta_group"}, {"dq_sums"}
    unread = {"params"}  # no expression reads any
    named = {path.partition(".")[0] for path in TAKES}
    others = free | by_type | by_arch | by_dtype | unread
    assert named.isdisjoint(others)
    assert named | others == set(Spec.model_fields)


HALVES = "dtype: bf16\ndq_sums: fp16\n"


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_sums_in_fp16_are_half_as_large_and_have_exponents(head_dim):
    of_fp32, of_fp16 = (
        numbers(planned(f"head_dim: {head_dim}\nmask: causal\n{text}"))
        for text in ("dtype: bf16\n", HALVES)
    )
    assert 2 * of_fp16["DQ_GROUPS"] == of_fp32["DQ_GROUPS"]
    assert of_fp32["ROW_BYTES"] - of_fp16["ROW_BYTES"] == 2 * head_dim
    assert of_fp16["Q_TX_BYTES"] == of_fp32["Q_TX_BYTES"] + 4 * of_fp16["EXPONENTS"]
    assert of_fp16["SHIFT_AT"] == of_fp16["TILE_Q"] + 1
    heads = [x["SECTION_BYTES"] // x["ROW_BYTES"] for x in (of_fp32, of_fp16)]
    assert heads[0] == pytest.approx(heads[1], rel=0.01)


@pytest.mark.parametrize(("rows", "count"), [(512, 2), (1024, 2), (1025, 3), (2048, 3)])
def test_sums_in_fp16_are_cleared_where_heads_are_not_as_short(rows, count):
    kernel = planned(f"head_dim: 128\nseqlen: {rows}\n{HALVES}")
    assert len(kernel.kernels) == count


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("arch: sm90\nop: fmha_bwd\ndtype: fp16\nhead_dim: 128\n", "dtype: fp16"),
        ("arch: sm90\nop: fmha_bwd\ndtype: bf16\nhead_dim: 256\n", "head_dim: 256"),
        ("arch: sm100\nop: fmha_bwd\ndtype: bf16\nhead_dim: 128\n", "arch: sm100"),
        ("arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 128\n", "op: fmha_fwd"),
    ],
)
def test_where_sums_in_fp16_are_refused(text, refusal):
    with pytest.raises(SpecError, match=f"dq_sums: fp16 .*{refusal}"):
        plan.resolve(support.load_text(f"{text}dq_sums: fp16\n"))


def test_a_parameter_is_refused_since_no_expression_reads_it():
    with pytest.raises(SpecError, match="FG214"):
        planned("head_dim: 128\ndtype: bf16\nparams: {first: int32}")


ON_SM100 = "arch: sm100\nop: fmha_bwd\ndtype: bf16\n"


@pytest.mark.parametrize(
    ("head_dim", "smem_bytes", "dq", "columns"),
    [(64, 166912, 384, 448), (128, 232448, 128, 512)],
)
def test_a_plan_of_blackwell(
    head_dim: int, smem_bytes: int, dq: int, columns: int
) -> None:
    """dQ has columns of its own as long as there are such."""
    found = plan.resolve(support.load_text(f"{ON_SM100}head_dim: {head_dim}\n"))
    main = found.kernels[1]
    assert main.smem_bytes == smem_bytes
    (part,) = (each for each in main.tmem if each.name == "dQ")
    assert (part.first, part.count) == (dq, head_dim)
    assert max(each.first + each.count for each in main.tmem) == columns
    registers = sum(each.warpgroups * each.per_thread for each in main.registers)
    assert registers <= 512 and main.registers_needed <= main.hungriest.per_thread


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ("head_dim: 96\n", "head_dim: 96 is not generated for op: fmha_bwd"),
        ("head_dim: 256\n", "head_dim: 256 is not generated for op: fmha_bwd"),
        ("head_dim: 64\ntile: {q: 64}\n", "tile.q: 64 is not generated for op"),
        ("head_dim: 64\nschedule: single\n", "schedule: single is not generated"),
        ("head_dim: 128\nstages: {q: 2, do: 3}\n", "shared memory needs"),
    ],
)
def test_what_blackwell_does_not_have_is_refused(fields: str, refusal: str) -> None:
    with pytest.raises(SpecError, match=re.escape(refusal)):
        plan.resolve(support.load_text(ON_SM100 + fields))
