# SPDX-License-Identifier: Apache-2.0
"""Words that specs of other tools have get an answer, no hint at another word's spelling."""

from __future__ import annotations

from pathlib import Path

import pytest
import support
from fmha_gen.errors import SpecError
from fmha_gen.spec import specfile
from fmha_gen.spec.model import load_specs

VALID = {"arch": "sm90", "op": "fmha_fwd", "dtype": "bf16", "head_dim": "128"}


def told(**fields: str) -> str:
    text = "".join(f"{key}: {value}\n" for key, value in (VALID | fields).items())
    with pytest.raises(SpecError) as raised:
        support.load_text(text)
    return str(raised.value)


@pytest.mark.parametrize(
    ("field", "word", "answer"),
    [
        ("op", "flash_attn_backward", "write fmha_bwd"),
        ("backward", "true", "write op: fmha_bwd"),
        ("is_deterministic", "true", "write deterministic: true"),
        ("op", "flash_attention", "write fmha_fwd"),
        ("op", "fmha_decode", "decoding is not generated"),
        ("arch", "sm120", "Hopper (sm90) and Blackwell (sm100) only"),
        ("arch", "sm_90a", "write sm90"),
        ("arch", "sm103", "write sm100"),
        ("dtype", "float16", "write fp16"),
        ("dtype", "half", "write fp16"),
        ("dtype", "bfloat16", "write bf16"),
        ("dtype", "fp8", "write e4m3"),
        ("dtype", "fp8_e4m3", "write e4m3"),
        ("dtype", "torch.float8_e4m3fn", "write e4m3"),
        ("dtype", "float8_e5m2", "of FP8 there is e4m3: others are not generated"),
        ("dtype", "int8", "of 8 bits there is e4m3: others are not generated"),
        ("dtype", "float32", "have 16 bits"),
        ("fp8", "true", "write dtype: e4m3"),
        ("kv_dtype", "e4m3", "K and V of another type than Q are not generated"),
        ("out_type", "fp16", "write out_dtype: bf16 or fp16"),
        ("v_transposed", "true", "write v_layout: permuted"),
        ("v_layout", "transposed", "write permuted"),
        ("q_descale", "1.0", "write descale: head, or block"),
        ("k_scale", "1.0", "write descale: head, or block"),
        ("descale", "tensor", "one number for all is a tensor with strides of 0"),
        ("descale", "blockwise", "write block"),
        ("descale", "per_token", "write block: others are not generated"),
        ("exp", "schraudolph", "write linear"),
        ("exp", "mufu", "write exact"),
        ("exp2_impl", "linear", "write exp: linear, linear16 or exact, of dtype: e4m3"),
        ("mask", "sliding_window", "write window: {left: N, right: N}"),
        ("mask", "full", "write none"),
        ("mask", "Causal", "did you mean causal?"),
        ("window", "128", "write window: {left: N, right: N}"),
        ("window_size", "[1023, 0]", "write window: {left: N, right: N}"),
        ("sliding_window", "4096", "write window: {left: N - 1}"),
        ("attn_logit_softcapping", "50.0", "write softcap: N"),
        ("sinks", "true", "write sink: true"),
        ("learnable_sink", "true", "write sink: true"),
        ("attention_sink", "true", "write sink: true"),
        ("s_aux", "true", "write sink: true"),
        ("page_size", "16", "write batch: varlen and kv: {paged: {page: 16}}"),
        ("varlen", "true", "write batch: varlen"),
        ("cu_seqlens", "true", "write batch: varlen"),
        ("is_causal", "true", "write mask: causal"),
        ("softmax_scale", "0.1", "an argument of fmha() at run time"),
        ("num_heads", "8", "write heads: {q_per_kv: N}"),
        ("heads", "8", "write heads: {q_per_kv: N}"),
        ("mask", "\u0441ausal", "character 1 is U+0441, which is not ASCII"),
        ("m\u0430sk", "causal", "character 2 is U+0430, which is not ASCII"),
        ("sm100", "true", "accepted: alibi, arch"),
        ("alibi_slopes", "true", "write alibi: true"),
        ("score_mod", "true", "write score: an expression over s"),
        ("mask", "alibi", "write alibi: true beside the mask"),
    ],
)
def test_gets_an_answer(field: str, word: str, answer: str) -> None:
    text = told(**{field: word})
    assert answer in text
    if "did you mean" in text:
        assert "did you mean" in answer or "ASCII" in answer


def test_a_misspelt_word_is_still_guessed() -> None:
    assert "did you mean causal?" in told(mask="casual")
    assert "did you mean dtype? accepted" in told(dtpye="bf16")


def test_pairs_take_what_one_cta_does_not() -> None:
    text = told(arch="sm100", head_dim="256")
    assert "256 is generated for cta_group: 2 with cluster: [2, 1]" in text


def test_a_path_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as raised:
        load_specs(["specs"])
    assert str(raised.value) == (
        "specs:1:1: error[FG001] cannot be read: No such file or directory\n"
        "  hint: fmha-gen kernels lists packaged kernels, whose names stand for their specs"
    )


def test_nothing_is_passed_over_in_silence(tmp_path: Path) -> None:
    text = "".join(f"{key}: {value}\n" for key, value in VALID.items())
    for name in ("a.yaml", "B.YAML", "inner/c.yaml", ".git/d.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / "jobs.yaml").write_text("jobs: []\n")
    with pytest.raises(SpecError) as raised:
        load_specs([tmp_path])
    assert [each.code for each in raised.value.diagnostics] == [
        "FG301",
        "FG304",
        "FG026",
    ]
    assert "rename it b.yaml" in str(raised.value)
    (tmp_path / "B.YAML").unlink()
    found, diagnostics = specfile.find([tmp_path, tmp_path / "inner"])
    assert [path.name for path in found] == ["a.yaml", "c.yaml"]
    assert diagnostics == []


def test_a_file_with_a_hundred_errors_does_not_hide_the_next() -> None:
    aliases = "".join(f"k{number}: *a\n" for number in range(80))
    with pytest.raises(SpecError) as raised:
        support.load_text(f"arch: &a sm90\n{aliases}")
    lines = str(raised.value).splitlines()
    assert len(lines) < 50
    assert lines[-1].endswith(f": {len(raised.value.diagnostics) - 20} more")
