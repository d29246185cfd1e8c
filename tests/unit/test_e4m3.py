# SPDX-License-Identifier: Apache-2.0
"""Kernels of 8 bits: their fields, V^T in its order, and what the reference holds them to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fmha_gen
import numpy as np
import pytest
from fmha_gen.emulator import numerics
from fmha_gen.errors import SpecError
from fmha_gen.ops import operation_of, reference
from fmha_gen.ops.cases import Case, Tiles
from fmha_gen.ops.e4m3 import natural_v
from fmha_gen.ops.inputs import values
from fmha_gen.ops.operation import Given
from fmha_gen.spec import model

ORDER = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
PLAIN = "arch: sm90\nop: fmha_fwd\ndtype: e4m3\nhead_dim: 64\nv_layout: permuted\n"
SPEC: dict[str, Any] = {
    **{"name": "fake", "arch": "sm90", "op": "fmha_fwd"},
    **{"dtype": "e4m3", "out_dtype": "bf16", "head_dim": {"qk": 64, "v": 64}},
    **{"seqlen": {"q": "dynamic", "kv": "dynamic"}, "q_per_kv": 2, "mask": "causal"},
    **{"lse": True, "v_layout": "permuted", "descale": "head"},
}
TILES = Tiles(192, 96, (1, 1), slack=0.8)
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
        *("batch: varlen", "softcap: 30.0", "blocks: lists", "sink: true"),
        *("alibi: true", "tile.q: 64", "tile.kv: 48", "mask: kv < q"),
        *("documents: true", "prefix: true", "cluster: [2, 1]"),
        *("bias.dtype: fp32", "score: s + kv", "v_layout: rows", "head_dim: 96"),
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


def test_another_architecture_is_refused_by_name() -> None:
    found = refusals(PLAIN.replace("sm90", "sm100"))
    assert found == ["dtype: e4m3 is not generated for arch: sm100"]


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
        o = p8 @ vs / total[:, None] / wrong.get("over", 1.0)
        out[b, :, h] = o * (1 if wrong.get("v_descale") else of["v_descale"][b, g])
        lse[b, h] = reference_of[:, 0] + np.log(total * 2.0 ** -wrong.get("offset", 8))
    return {"out": out, "lse": lse}


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
