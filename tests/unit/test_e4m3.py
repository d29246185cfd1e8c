# SPDX-License-Identifier: Apache-2.0
"""Kernels of 8 bits: their fields, V^T in its order, and what the reference holds them to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fmha_gen
import numpy as np
import pytest
import support
from fmha_gen.emulator import numerics
from fmha_gen.emulator.accumulation import multiply_add
from fmha_gen.errors import SpecError
from fmha_gen.ops import masks, operation_of, reference
from fmha_gen.ops.cases import Case, Tiles, cases_for
from fmha_gen.ops.e4m3 import natural_v
from fmha_gen.ops.inputs import values
from fmha_gen.ops.operation import Given
from fmha_gen.planning import plan
from fmha_gen.spec import model

ORDER = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
PLAIN = "arch: sm90\nop: fmha_fwd\ndtype: e4m3\nhead_dim: 64\nv_layout: permuted\n"
ON_SM100 = "arch: sm100\nop: fmha_fwd\ndtype: e4m3\nhead_dim: 128\n"
SPEC: dict[str, Any] = {
    **{"name": "fake", "arch": "sm90", "op": "fmha_fwd"},
    **{"dtype": "e4m3", "out_dtype": "bf16", "head_dim": {"qk": 64, "v": 64}},
    **{"seqlen": {"q": "dynamic", "kv": "dynamic"}, "q_per_kv": 2, "mask": "causal"},
    **{"lse": True, "v_layout": "permuted", "descale": "head"},
}
TILES = Tiles(192, 96, (1, 1), slack=0.8)
STEP = 32  # keys of a wgmma
CASE = Case("some", batch=2, kv_heads=2, q=70, kv=75)


# --- fields -------------------------------------------------------------------------------


def refusals(text: str, stem: str = "kernel") -> list[str]:
    with pytest.raises(SpecError) as raised:
        model.loads(Path(f"{stem}.yaml"), text)
    return [each.message for each in raised.value.diagnostics]


def loaded(text: str, stem: str = "kernel") -> model.Spec:
    return model.loads(Path(f"{stem}.yaml"), text).spec


def test_o_has_16_bits() -> None:
    assert loaded(PLAIN).out_dtype == "bf16"
    assert loaded(PLAIN).digest == loaded(PLAIN + "out_dtype: bf16\n").digest
    assert loaded(PLAIN + "out_dtype: fp16\n").out_dtype == "fp16"
    plain = PLAIN.replace("e4m3", "bf16").replace("permuted", "rows")
    assert loaded(plain).out_dtype == "none"
    for field in ("out_dtype: fp16", "descale: head"):
        (message,) = refusals(f"{plain}{field}\n")
        assert message == f"{field} is not generated for dtype: bf16"


def test_names_say_both_types() -> None:
    loaded(PLAIN + "out_dtype: fp16\n", "sm90_d64_e4m3_fp16_full")
    (message,) = refusals(PLAIN, "sm90_d64_e4m3_fp16_full")
    assert "fp16" in message
    assert refusals(PLAIN, "sm90_d64_bf16x_fp16_full")


@pytest.mark.parametrize(
    "other",
    [
        *("softcap: 30.0", "blocks: lists", "sink: true"),
        *("alibi: true", "tile.kv: 48", "mask: kv < q"),
        *("documents: true", "prefix: true", "cluster: [2, 1]"),
        *("bias.dtype: fp32", "score: s + kv", "head_dim: 80"),
    ],
)
def test_what_is_not_built_is_refused_by_name(other: str) -> None:
    field, _, value = other.partition(": ")
    fields = dict(line.split(": ") for line in PLAIN.splitlines())
    outer, _, inner = field.partition(".")
    fields[outer] = f"{{{inner}: {value}}}" if inner else value
    if outer in ("documents", "prefix"):
        fields["mask"] = "causal"
    text = "".join(f"{name}: {said}\n" for name, said in fields.items())
    assert f"{other} is not generated for dtype: e4m3" in refusals(text)


def test_one_warpgroup_has_no_turn_behind_which_o_leaves() -> None:
    assert refusals(PLAIN + "tile: {q: 64}\n") == [
        "tile.q: 64 is not generated for arch: sm90 with dtype: e4m3"
    ]


WIDE = "arch: sm90\nop: fmha_fwd\ndtype: e4m3\nhead_dim: 256\n"
TILE_128 = "tile: {q: 128, kv: 128}\n"


@pytest.mark.parametrize(
    "fields", ["v_layout: permuted\n", "v_layout: permuted\nlse: true\n", ""]
)
def test_128_keys_beside_256_columns_have_to_be_asked_for(fields: str) -> None:
    planned, asked = (
        plan.resolve(support.load_text(WIDE + fields + tile))
        for tile in ("", "lse: true\n" * (fields == "") + TILE_128)
    )
    for each, keys in ((planned, 64), (asked, 128)):
        assert {n.name: n.value for n in each.chosen}["TILE_KV"] == keys
        assert each.context["part_overlays_s"] == (keys == 128)
        assert each.context["cross_tile"] == (keys == 64)


@pytest.mark.parametrize(
    ("layout", "slices", "registers"), [("rows", 3, 64), ("permuted", 2, 68)]
)
def test_sums_of_256_columns_are_a_slice_where_v_is_transposed(
    layout: str, slices: int, registers: int
) -> None:
    """The warps that transpose have 24 registers beside 240 of the consumers."""
    constants = support.read_constants(
        support.kernel_text(f"{WIDE}v_layout: {layout}\n{TILE_128}")
    )
    assert constants["PV_SLICES"] == slices
    assert constants["PART_REGISTERS"] == registers
    assert (constants["PRODUCER_REGS"], constants["CONSUMER_REGS"]) == (24, 240)


@pytest.mark.parametrize("keys", [96, 160])
def test_s_and_a_part_of_o_that_differ_share_no_registers(keys: int) -> None:
    text = f"{WIDE}v_layout: permuted\ntile: {{q: 128, kv: {keys}}}\n"
    with pytest.raises(SpecError, match="a consumer thread needs about"):
        plan.resolve(support.load_text(text))


@pytest.mark.parametrize(
    ("other", "beside"),
    [
        ("pack_gqa: true\nheads: {q_per_kv: 4}", "pack_gqa: true"),
        ("exp: linear", "exp: linear"),
        ("tile: {kv: 96}", "tile.kv: 96"),
        ("batch: varlen", "batch: varlen"),
    ],
)
def test_what_has_no_factors_by_block_is_refused_by_name(
    other: str, beside: str
) -> None:
    plain = PLAIN.replace("permuted", "rows")
    expected = f"descale: block is not generated for {beside}"
    assert expected in refusals(f"{plain}{other}\ndescale: block\n")


@pytest.mark.parametrize("text", [ON_SM100, WIDE], ids=["sm100", "head_dim 256"])
def test_where_factors_by_block_are_not_built(text: str) -> None:
    (refusal,) = refusals(f"{text}descale: block\n")
    assert refusal.startswith("descale: block is not generated for ")


@pytest.mark.parametrize("lse", ["", "lse: true\n"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_a_kv_tile_has_one_factor(head_dim: int, lse: str) -> None:
    text = PLAIN.replace("64", str(head_dim)) + f"{lse}descale: block\n"
    planned = plan.resolve(support.load_text(text))
    assert 128 % {n.name: n.value for n in planned.chosen}["TILE_KV"] == 0
    assert not planned.context["flushes_pairs"]


@pytest.mark.parametrize("other", ["v_layout: permuted", "exp: linear", "tile.q: 128"])
def test_what_sm100_does_not_have_is_refused_by_name(other: str) -> None:
    field, _, value = other.partition(": ")
    outer, _, inner = field.partition(".")
    said = f"{{{inner}: {value}}}" if inner else value
    (refusal,) = refusals(f"{ON_SM100}{outer}: {said}\n")
    assert refusal.startswith(f"{other} is not generated for arch: sm100")


def test_no_pair_of_ctas_takes_8_bits() -> None:
    found = refusals(f"{ON_SM100}cluster: [2, 1]\ncta_group: 2\n")
    assert found == [
        "cluster: [2, 1] is not generated for dtype: e4m3",
        "cta_group: 2 is not generated for dtype: e4m3",
    ]


def test_8_bits_leave_sm100_more_stages_and_columns() -> None:
    wide, narrow = (
        plan.resolve(support.load_text(text))
        for text in (ON_SM100.replace("e4m3", "bf16"), ON_SM100)
    )
    numbers = [
        {n.name: n.value for n in (*p.chosen, *p.derived)} for p in (wide, narrow)
    ]
    assert [each["KV_STAGES"] for each in numbers] == [3, 6]
    assert [each["K_TX_BYTES"] for each in numbers] == [128 * 128 * 2, 128 * 128]
    for element, kernel in ((2, wide.kernels[0]), (1, narrow.kernels[0])):
        of_p = {each.count for each in kernel.tmem if each.name.startswith("P")}
        (of_k,) = (load.nbytes for load in kernel.loads if load.tensor == "K")
        lanes = [lane for phase in kernel.phases for lane in phase.lanes]
        signals = [s for lane in lanes for step in lane.steps for s in step.signals]
        assert (of_p, of_k) == ({128 * element // 4}, 128 * 128 * element)
        assert of_k in {each.tx_bytes for each in signals}
    regions = [{r.name: r.nbytes for r in p.kernels[0].smem} for p in (wide, narrow)]
    assert regions[0]["sO"] == regions[1]["sO"]  # O has 16 bits beside either


def test_packed_sequences_have_v_as_rows() -> None:
    packed = PLAIN + "batch: varlen\n"
    assert refusals(packed) == ["v_layout: permuted is not generated for batch: varlen"]
    for kv in ("", "kv: {paged: {page: 16}}\n"):
        assert loaded(packed.replace("permuted", "rows") + kv).batch == "varlen"


# --- V^T ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen", [1, 15, 16, 17, 75])
def test_keys_of_16_have_their_order(seqlen: int) -> None:
    v = np.arange(1, 2 * seqlen * 3 * 4 + 1).reshape(2, seqlen, 3, 4)
    found = fmha_gen.permute_v(v)
    keys = -(-seqlen // 16) * 16
    assert found.shape == (2, 3, 4, keys) and found.flags.c_contiguous
    padded = np.zeros((2, keys, 3, 4), v.dtype)
    padded[:, :seqlen] = v
    for place in range(keys):
        key = place // 16 * 16 + ORDER[place % 16]
        assert (found[..., place] == padded[:, key]).all()
    assert (natural_v(found, seqlen) == v).all()


def test_pytorchs_8_bits() -> None:
    torch = pytest.importorskip("torch")
    v = torch.randn(2, 21, 3, 8)[..., ::2].to(torch.float8_e4m3fn)
    found = fmha_gen.permute_v(v)
    assert found.dtype == v.dtype and found.is_contiguous()
    expected = fmha_gen.permute_v(v.view(torch.uint8).numpy())
    assert (found.view(torch.uint8).numpy() == expected).all()
    back = natural_v(found, 21)
    assert torch.equal(back.float(), v.float())


# --- reference ----------------------------------------------------------------------------


def test_rounding_is_the_hardwares() -> None:
    random = np.random.default_rng(0)
    x = np.exp2(random.uniform(-14, 8.8, 20000)).astype(np.float32)
    codes = numerics.e4m3_to_f32(np.arange(127, dtype=np.uint8)).astype(np.float64)
    halves = (codes[1:] + codes[:-1]) / 2  # ties
    for each in (x, codes, halves, np.zeros(1)):
        bits = numerics.e4m3_rn_satfinite(each.astype(np.float32)).astype(np.uint8)
        expected = numerics.e4m3_to_f32(bits)
        assert (reference.in_e4m3(each.astype(np.float64)) == expected).all()


def test_pytorch_agrees() -> None:
    torch = pytest.importorskip("torch")
    given = call()
    inputs = {name: torch.from_numpy(x) for name, x in given.inputs.items()}
    operation = operation_of(SPEC)
    ours = operation.truth(given)
    theirs = operation.truth(replace(given, inputs=inputs))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-9, atol=1e-15)


OF_BLOCKS: dict[str, Any] = {**SPEC, "descale": "block", "v_layout": "rows"}


@pytest.mark.parametrize("data", ["normal", "descales"])
def test_factors_by_block_are_of_128_rows_of_a_head(data: Any) -> None:
    case = replace(CASE, q=300, kv=257, data=data)
    inputs = values(OF_BLOCKS, TILES, case)
    shapes = [inputs[f"{name}_descale"].shape for name in "qkv"]
    assert shapes == [(2, 4, 3), (2, 2, 3), (2, 2, 3)]
    whole = {}
    for name in "qkv":
        x, factors = inputs[name].astype(float), inputs[f"{name}_descale"]
        for b, row, h in np.ndindex(x.shape[:3]):
            x[b, row, h] *= factors[b, h, row // 128]
        whole[name] = x
    given = Given(OF_BLOCKS, inputs, 0.125)
    found = operation_of(OF_BLOCKS).exact(given)
    plain = {n: x for n, x in SPEC.items() if n not in ("descale", "v_layout")}
    plain |= {"dtype": "bf16"}
    expected = operation_of(plain).exact(Given(plain, whole, 0.125))
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-9, atol=1e-12)
    assert len(np.unique(inputs["k_descale"][0, 0])) > 1, "blocks of a head differ"
    if data == "normal":  # as a quantiser divides by them, scores stay what they were
        by_head = values({**SPEC, "v_layout": "rows"}, TILES, case)
        heads = by_head["k_descale"][:, None, :, None] * by_head["k"]
        np.testing.assert_allclose(whole["k"], heads, rtol=1e-6)


def rounded(x: np.ndarray) -> np.ndarray:
    bits = numerics.e4m3_rn_satfinite(x.astype(np.float32)).astype(np.uint8)
    return numerics.e4m3_to_f32(bits)


def call(case: Case = CASE) -> Given:
    drawn = values(SPEC, TILES, case)
    inputs = {n: rounded(x) if n in "qkv" else x for n, x in drawn.items()}
    return Given(SPEC, inputs, 64**-0.5 * case.scale_factor)


def computed(given: Given, **wrong: Any) -> dict[str, Any]:
    """O and LSE of a right computation, or of one that is wrong in a named way."""
    of = dict(given.inputs)
    v = natural_v(of["v"], of["k"].shape[1])
    if wrong.get("natural_order"):
        v = of["v"].transpose(0, 3, 1, 2)[:, : of["k"].shape[1]]
    out = np.empty((*of["q"].shape[:3], v.shape[-1]))
    lse = np.empty((of["q"].shape[0], of["q"].shape[2], of["q"].shape[1]))
    for b, h in np.ndindex(out.shape[0], out.shape[2]):
        g = h // SPEC["q_per_kv"]
        q, k, vs = of["q"][b, :, h], of["k"][b, :, g], v[b, :, g]
        factor = of["q_descale"][b, g] * of["k_descale"][b, g]
        if wrong.get("q_descale"):
            factor = of["k_descale"][b, g]
        scores = q.astype(float) @ k.T * (given.scale * factor)
        rows, keys = np.arange(len(q))[:, None], np.arange(len(k))
        scores = np.where(keys <= rows + len(k) - len(q), scores, -np.inf)
        reference_of = scores.max(1, keepdims=True)
        p = 2.0 ** wrong.get("offset", 8) * np.exp(scores - reference_of)
        total = p.sum(1)
        p8 = rounded(np.minimum(p * wrong.get("over", 1.0), wrong.get("most", 448.0)))
        o = added(p8, vs, wrong["every"]) if "every" in wrong else p8 @ vs
        divisor = total[:, None]
        if wrong.get("by_ones"):  # of P as it was rounded, cut off as O is
            divisor = added(p8, np.ones_like(vs[:, :1]), wrong["every"])
        o = o / divisor / wrong.get("over", 1.0)
        out[b, :, h] = o * (1 if wrong.get("v_descale") else of["v_descale"][b, g])
        lse[b, h] = reference_of[:, 0] + np.log(total * 2.0 ** -wrong.get("offset", 8))
    return {"out": out, "lse": lse}


def added(p: np.ndarray, v: np.ndarray, every: int) -> np.ndarray:
    """P V as tensor cores add it; every so many keys it goes on in fp32."""
    total = np.zeros((len(p), v.shape[1]), np.float32)
    for first in range(0, len(v), every):
        part, end = None, min(first + every, len(v))
        for start in range(first, end, STEP):
            some = slice(start, min(start + STEP, end))
            factors = p[:, some], np.ascontiguousarray(v[some].T)
            part = multiply_add(*factors, part, ("e4m3", "e4m3"))
        total += part
    return total


def verdicts(case: Case = CASE, **wrong: Any) -> dict[str, str]:
    given, operation = call(case), operation_of(SPEC)
    found = operation.judge(
        given, computed(given, **wrong), operation.truth(given), TILES.kv
    )
    return {name: each.finding for name, each in found.items()}


@pytest.mark.parametrize("data", ["normal", "edges", "rising", "descales", "peaks"])
def test_a_right_result_holds(data: Any) -> None:
    assert not any(verdicts(replace(CASE, data=data)).values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"natural_order": True},
        {"q_descale": True},
        {"v_descale": True},
        {"offset": 0, "steep": 3.5},  # as of 16 bits: what is below the largest is lost
        {"over": 4.0},  # a slack of two powers: clipped
        {"over": 1.5, "most": 256.0},
    ],
    ids=str,
)
def test_a_wrong_result_does_not(wrong: dict[str, Any]) -> None:
    case = replace(CASE, name="far", q=300, kv=900, batch=1)
    case = replace(case, scale_factor=wrong.get("steep", 1.0))
    assert verdicts(case, **wrong)["out"]
    assert not verdicts(case)["out"]


@pytest.mark.parametrize("stem", [x for x in support.SHIPPED if "_e4m3_" in x])
def test_kernels_have_the_numbers_that_bounds_are_made_of(stem: str) -> None:
    found = support.constants(stem)
    assert found["P_OFFSET"] == reference.P_OFFSET
    assert found["RESCALE_SLACK"] == reference.P_SLACK == max(reference.REFERENCES)
    assert found["FIRST_HEADROOM"] == reference.FIRST_HEADROOM
    if found["SPEC"]["arch"] == "sm100":  # its accumulators are taken for fp32
        assert "FLUSH_BLOCKS" not in found
        return
    flushed = found.get("FLUSH_BLOCKS", 1) * found["TILE_KV"]
    assert flushed <= reference.FLUSHED_KEYS
    pairs = not found["SPEC"]["lse"] and "PV_SLICES" not in found
    pairs = pairs and 2 * found["TILE_KV"] <= reference.FLUSHED_KEYS
    pairs = pairs and found["SPEC"].get("descale") != "block"
    assert ("FLUSH_BLOCKS" in found) == pairs


# --- O by definition ----------------------------------------------------------------------


CODES = numerics.e4m3_to_f32(np.arange(127, dtype=np.uint8)).astype(np.float64)


def nearest(x: np.ndarray) -> np.ndarray:
    """The numbers of e4m3 that are nearest, of two the even one."""
    halves = (CODES[1:] + CODES[:-1]) / 2
    low, high = (np.searchsorted(halves, x, side) for side in ("left", "right"))
    return CODES[np.where(low % 2 == 0, low, high)]


def defined_by_loops(given: Given) -> np.ndarray:
    """Mean square errors of O, row by row: P rounded to the nearest, then O."""
    of, v = given.inputs, natural_v(given.inputs["v"], given.inputs["k"].shape[1])
    made = np.empty((*of["q"].shape[:3], v.shape[-1]))
    for b, row, h in np.ndindex(made.shape[:3]):
        g = h // SPEC["q_per_kv"]
        seen = row + 1 + of["k"].shape[1] - of["q"].shape[1]
        factors = [float(of[f"{name}_descale"][b, g]) for name in "qkv"]
        k, q = of["k"][b, :seen, g].astype(float), of["q"][b, row, h].astype(float)
        scores = (k * factors[1]) @ (q * factors[0]) * given.scale
        values = v[b, :seen, g].astype(float) * factors[2]
        weights = np.exp(scores - scores.max())
        exact = weights @ values / weights.sum()
        squares = np.zeros_like(exact)
        for below in (0.0, 0.2, 0.4, 0.6, 0.8):
            p = weights * 2.0 ** (8 + below)
            squares += (nearest(p) @ values / p.sum() - exact) ** 2 / 5
        made[b, row, h] = squares + (exact * 2.0**-8) ** 2 / 3  # O in bf16
    return made


@pytest.mark.parametrize("data", ["normal", "edges", "descales", "peaks"])
@pytest.mark.parametrize("steep", [1.0, 3.5])
def test_errors_by_definition(data: Any, steep: float) -> None:
    given = call(replace(CASE, q=40, data=data, scale_factor=steep))
    found = operation_of(SPEC).truth(given).defined
    np.testing.assert_allclose(found, defined_by_loops(given), rtol=1e-6, atol=1e-12)


def test_a_single_key_leaves_o_s_rounding() -> None:
    given = call(replace(CASE, q=1, kv=1))
    truth = operation_of(SPEC).truth(given)
    # Where the reference is the row's largest score, P is exact; below it is not.
    p = 2.0 ** (8 + np.array([0.0, 0.2, 0.4, 0.6, 0.8]))
    of_p = np.mean((nearest(p) / p - 1) ** 2)
    expected = truth.out**2 * (of_p + 2.0**-16 / 3)
    np.testing.assert_allclose(truth.defined, expected, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "unit"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_o_is_rounded_to_its_own_type(dtype: str, unit: float) -> None:
    given = call()
    spec = {**SPEC, "out_dtype": dtype}
    truth = operation_of(spec).truth(replace(given, spec=spec))
    of_o = unit**2 / 3 * truth.out**2
    assert (truth.defined >= of_o * (1 - 1e-9)).all()
    other = operation_of(SPEC).truth(given)
    moved = (unit**2 - 2.0**-16) / 3 * truth.out**2
    np.testing.assert_allclose(truth.defined - other.defined, moved, atol=1e-15)


def test_in_16_bits_the_definition_is_what_is_expected() -> None:
    given = call()
    q, k = given.inputs["q"], given.inputs["k"]
    v = natural_v(given.inputs["v"], k.shape[1])
    mask = masks.of_spec(SPEC)
    for dtype in ("bf16", "fp16"):
        truth = reference.truth(q, k, v, scale=0.125, mask=mask, dtype=dtype)
        assert (truth.defined == truth.rms**2).all()


@pytest.mark.parametrize("data", ["normal", "rising", "slope"])
def test_a_right_result_has_the_errors_of_the_definition(data: Any) -> None:
    """But where one key has all the weight: that of the largest score is exact here."""
    case = replace(CASE, name="far", q=600, kv=700, batch=1, data=data)
    given = call(case)
    truth, out = operation_of(SPEC).truth(given), computed(given)["out"]
    ratio = ((out - truth.out) ** 2).sum((1, 3)) / truth.defined.sum((1, 3))
    assert ratio.min() > 0.5 and ratio.max() < 1.5


def test_rows_that_are_not_wanted_have_no_errors() -> None:
    given = call()
    wanted = np.ones(given.inputs["q"].shape[:3], np.bool_)
    wanted[1] = False
    whole, some = (operation_of(SPEC).truth(given, w) for w in (None, wanted))
    assert np.isnan(some.defined[1]).all()
    assert (some.defined[0] == whole.defined[0]).all()


def test_a_row_without_a_key_has_no_error() -> None:
    given = call(replace(CASE, q=80, kv=75))  # five rows before the first key
    truth = operation_of(SPEC).truth(given)
    assert not truth.defined[:, :5].any() and truth.defined[:, 5:].all()


# --- cases of 8 bits ----------------------------------------------------------------------


def case_of(data: str) -> Case:
    (found,) = (case for case in cases_for(SPEC, TILES) if case.data == data)
    return found


def test_v_with_a_mean_has_weights_that_are_nearly_alike() -> None:
    given = call(case_of("mean_v"))
    v = natural_v(given.inputs["v"], given.inputs["k"].shape[1])
    late, early = v[:, : v.shape[1] // 2], v[:, v.shape[1] // 2 :]
    assert abs(early.mean() - 2) < 0.05 and abs(late.mean()) < 0.05
    assert all(0.9 < half.std() < 1.1 for half in (late, early))
    exact = operation_of(SPEC).truth(given).out / given.inputs["v_descale"].item()
    assert abs(exact.mean() - 1) < 0.05 and exact.std() < 0.1


def test_sums_that_are_cut_off_are_noticed() -> None:
    """By V with a mean alone: with a mean of 0 nothing is lost."""
    mean = case_of("mean_v")
    assert not any(verdicts(mean, every=TILES.kv).values())
    assert "out" in verdicts(mean, every=mean.kv)["out"]
    assert not any(verdicts(replace(mean, data="normal"), every=mean.kv).values())


def test_sums_that_are_cut_off_beside_those_of_their_rows_are_noticed() -> None:
    """Rows of ones lose what V of one mean throughout does; of another mean later it shows."""
    mean = case_of("mean_v")
    assert not any(verdicts(mean, every=2 * TILES.kv, by_ones=True).values())
    assert "out" in verdicts(mean, every=mean.kv, by_ones=True)["out"]


def test_factors_of_most_cases_leave_the_scores() -> None:
    given = call().inputs
    product = given["q_descale"] * given["k_descale"]
    np.testing.assert_allclose(product, 1.0, rtol=1e-6)
    for name in "qkv":
        factors = given[f"{name}_descale"]
        assert factors.shape == (2, 2) and factors.dtype == np.float32
        assert len({*factors.flat}) == 4 and (factors > 0).all()


def test_factors_of_their_own_case_differ_by_batch_and_head() -> None:
    case = case_of("descales")
    given = call(case).inputs
    scales = given["q_descale"] * given["k_descale"]
    for factors in (given["q_descale"], given["v_descale"], scales):
        assert factors.shape == (case.batch, case.kv_heads)
        assert len({*factors.flat}) > 2
        assert (factors[0] != factors[1]).any()
        assert all((factors[:, n] != factors[:, n - 1]).any() for n in (1, 2))
    assert len({*given["k_descale"].flat} | {*given["q_descale"].flat}) > 4


@pytest.mark.parametrize("data", ["uniform_1e4", "all_1e4", "huge_key", "descales"])
def test_values_are_those_that_e4m3_has(data: Any) -> None:
    drawn = values(SPEC, TILES, replace(CASE, data=data))
    for name in "qkv":
        assert np.abs(drawn[name]).max() <= 448
    large = np.abs(drawn["q"]).max()
    assert ("1e4" in data) == (large == 448)


def test_p_of_fewer_bits_is_noticed() -> None:
    """By the bar of the definition alone: of single elements the bound is wider."""
    case = replace(CASE, name="far", q=600, kv=700, batch=1, scale_factor=3.5)
    given, operation = call(case), operation_of(SPEC)
    truth = operation.truth(given)
    signs = np.random.default_rng(1).choice([-1.0, 1.0], truth.out.shape)
    out = truth.out + 2.1 * np.sqrt(truth.defined) * signs
    found = operation.judge(given, {"out": out, "lse": truth.lse}, truth, TILES.kv)
    assert "mean square error" in found["out"].finding
    bare = operation.judge(
        *(
            given,
            {"out": out, "lse": truth.lse},
            truth._replace(defined=truth.defined * 100),
        ),
        TILES.kv,
    )
    assert not bare["out"].finding


# --- packed sequences ---------------------------------------------------------------------

PACKED = {name: x for name, x in SPEC.items() if name != "v_layout"} | {
    "batch": "varlen"
}
PAGED = PACKED | {"kv": {"paged": {"page": 16}}}
SEQUENCES = ((5, 40), (0, 7), (33, 0), (70, 100))


def packed_call(spec: dict[str, Any]) -> Given:
    """Of SEQUENCES, with factors of their own."""
    rows = 176 if spec is PAGED else 147  # 11 pages
    case = Case(
        "some", len(SEQUENCES), 2, 108, rows, lengths=SEQUENCES, data="descales"
    )
    drawn = values(spec, TILES, case)
    inputs = {n: rounded(x) if n in "qkv" else x for n, x in drawn.items()}
    return Given(spec, inputs, 64**-0.5)


def test_each_packed_sequence_is_the_dense_call_with_its_factors() -> None:
    given = packed_call(PACKED)
    found, truth = (
        getattr(operation_of(PACKED), name)(given) for name in ("exact", "truth")
    )
    dense = {name: x for name, x in PACKED.items() if name != "batch"}
    q_end = kv_end = 0
    told = iter(truth)
    for number, (q, kv) in enumerate(SEQUENCES):
        at, q_end, kv_end = (q_end, kv_end), q_end + q, kv_end + kv
        if not q:
            continue
        own = next(told)
        if not kv:
            assert (found["out"][at[0] : q_end] == 0).all()
            assert (own.truth.out == 0).all()
            continue
        rows = {"q": slice(at[0], q_end), "k": slice(at[1], kv_end)}
        inputs = {n: given.inputs[n][None, rows.get(n, rows["k"])] for n in "qkv"}
        for name in "qkv":
            factors = given.inputs[f"{name}_descale"]
            inputs[f"{name}_descale"] = factors[number : number + 1]
        alone = replace(given, spec=dense, inputs=inputs)
        right = operation_of(dense)
        assert (found["out"][at[0] : q_end] == right.exact(alone)["out"][0]).all()
        assert (own.truth.out_bound == right.truth(alone).out_bound).all()
        assert (own.truth.defined == right.truth(alone).defined).all()


def test_pages_are_packed_rows() -> None:
    """The same values, but for what is in neither; integers are as their makers have them."""
    of_rows, of_pages = packed_call(PACKED), packed_call(PAGED)
    for name in ("block_table", "seqused_k", "cu_seqlens_q"):
        assert of_pages.inputs[name].dtype == np.int32
    assert of_pages.inputs["seqused_k"].tolist() == [kv for _, kv in SEQUENCES]
    first, second = (
        operation_of(each.spec).exact(each)["out"] for each in (of_rows, of_pages)
    )
    np.testing.assert_array_equal(first, second)
