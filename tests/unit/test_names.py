# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from fmha_gen.spec.model import Spec
from fmha_gen.spec.names import (
    LONGEST_STEM,
    contradictions,
    stem_violations,
    suggestion,
)

PLAIN: dict[str, Any] = {}
FIXED: dict[str, Any] = {"seqlen": 4096, "mask": "causal", "lse": True}
MIXED: dict[str, Any] = {"seqlen": {"q": 64, "kv": 4096}, "heads": {"q_per_kv": 4}}
SHARED: dict[str, Any] = {
    "cluster": [2, 1],
    "multicast": "kv",
    "tile": {"q": 128, "kv": 64},
}
PACKED: dict[str, Any] = {"heads": {"q_per_kv": 8}, "pack_gqa": True}
BACKWARD: dict[str, Any] = {"op": "fmha_bwd", "seqlen": 4096}
SPLIT: dict[str, Any] = {"head_dim": {"qk": 192, "v": 128}, "seqlen": {"kv": 7}}


def spec(fields: dict[str, Any]) -> Spec:
    required = {"arch": "sm90", "op": "fmha_fwd", "dtype": "bf16", "head_dim": 128}
    return Spec.model_validate(required | fields)


@pytest.mark.parametrize(
    ("fields", "stem"),
    [
        (PLAIN, "sm90_d128_bf16_full_mha_nolse_dyn_c1x1"),
        (PLAIN, "d128x128_gqa1"),
        (FIXED, "sm90_s4096_q4096_kv4096_causal_lse"),
        (MIXED, "q64_kv4096_gqa4"),
        (MIXED, "mqa"),
        (SHARED, "c2x1_mckv_t128x64"),
        (SHARED, "kvmc"),
        (PACKED, "gqa8_pack"),
        (PACKED, "gqa8"),
        (PLAIN, "packed_unpack"),
        (SPLIT, "d192x128_kv7"),
        (PLAIN, "x_fwd"),
        (BACKWARD, "sm90_d128_bf16_full_bwd_s4096"),
        (BACKWARD | {"deterministic": True}, "sm90_d128_bf16_bwd_det"),
        (PLAIN, "anything_else_v2_d_s_mc_dynamic_lse2"),
    ],
)
def test_true_names(fields: dict[str, Any], stem: str) -> None:
    assert contradictions(stem, spec(fields)) == []
    assert suggestion(stem, spec(fields)) == stem


@pytest.mark.parametrize(
    ("fields", "stem", "better"),
    [
        (PLAIN, "sm90a_x", "sm90_x"),
        (PLAIN, "d64_x", "d128_x"),
        (PLAIN, "d0128", "d128"),
        (PLAIN, "fp16_x", "bf16_x"),
        (PLAIN, "x_causal", "x_full"),
        (PLAIN, "x_full_causal", "x_full"),
        (PLAIN, "x_lse", "x_nolse"),
        (PLAIN, "x_gqa4", "x_mha"),
        (PLAIN, "x_mqa", "x_mha"),
        (PLAIN, "x_s4096", "x_dyn"),
        (PLAIN, "x_q4096_kv1", "x"),
        (PLAIN, "x_c2x1_mckv_t128x64", "x"),
        (PLAIN, "c2x1", ""),
        (PLAIN, "c2x1_1", ""),
        (FIXED, "x_dyn_full_nolse", "x_s4096_causal_lse"),
        (FIXED, "x_q1", "x_q4096"),
        (MIXED, "x_s64", "x_q64_kv4096"),
        (MIXED, "x_mha_gqa8", "x_gqa4"),
        (SHARED, "c1x2_mck_t128x128", "c2x1_kvmc_t128x64"),
        (SHARED, "x_kmc", "x_kvmc"),
        (PLAIN, "x_pack", "x"),
        (MIXED, "x_gqa4_pack", "x_gqa4"),
        (PACKED, "mha_pack", "gqa8_pack"),
        (SPLIT, "d192_dyn", "d192x128_kv7"),
        (PLAIN, "x_bwd", "x"),
        (PLAIN, "x_bwd_det", "x"),
        (BACKWARD, "x_fwd", "x_bwd"),
        (BACKWARD, "x_bwd_det", "x_bwd"),
    ],
)
def test_untrue_names(fields: dict[str, Any], stem: str, better: str) -> None:
    violations = contradictions(stem, spec(fields))
    assert violations
    assert all(violation.code == "FG305" for violation in violations)
    assert suggestion(stem, spec(fields)) == better
    assert all((f"{better}.yaml" in v.hint) == bool(better) for v in violations)


@pytest.mark.parametrize(
    ("stem", "code"),
    [
        ("", "FG301"),
        ("_a", "FG301"),
        ("9a", "FG301"),
        ("A", "FG301"),
        ("a-b", "FG301"),
        ("a.b", "FG301"),
        ("a\n", "FG301"),
        ("\u00e4", "FG301"),
        ("d\u0661", "FG301"),
        ("a" * 101, "FG301"),
        ("class", "FG303"),
        ("match", "FG303"),
        ("case", "FG303"),
        ("type", "FG303"),  # from Python 3.12 on, and refused before as well
        ("my_cutlass_kernel", "FG306"),
    ],
)
def test_stems_that_are_no_names(stem: str, code: str) -> None:
    assert [violation.code for violation in stem_violations(stem)] == [code]


def test_plain_stems_are_names() -> None:
    assert (
        stem_violations("sm90_d128")
        == stem_violations("a")
        == stem_violations("a" * 100)
        == []
    )


def test_the_limit_is_stated() -> None:
    (violation,) = stem_violations("k" * 200)
    assert violation.message.endswith("has 200 characters")
    assert violation.hint == "a name has at most 100"


def test_every_token_at_once_is_short_enough() -> None:
    tokens = (
        "sm100_d192x128_bf16_causal_gqa128_pack_nolse_q16777216_kv16777216_c2x1_mckv"
        "_t256x256_persistent_cta2"
    )
    assert len(tokens) <= LONGEST_STEM


OTHERS = ("torch", "cuda", "numpy", "jax", "tvm_ffi", "conftest", "triton", "pytest")
GONE = ("asyncore", "distutils", "imp", "telnetlib")  # in some versions of Python


@pytest.mark.parametrize("stem", ["typing", "struct", "math", *GONE, *OTHERS])
def test_modules_that_a_kernel_would_hide(stem: str) -> None:
    (violation,) = stem_violations(stem)
    assert violation.code == "FG303"
    assert violation.message == f'"{stem}" is a module that Python programs import'
    assert f"beside {stem}.py" in violation.hint
    assert not stem_violations(f"{stem}_2")


def test_no_module_of_this_python_can_be_hidden() -> None:
    free = [stem for stem in sys.stdlib_module_names if not stem_violations(stem)]
    assert free == []


def test_no_module_that_the_dsl_imports_can_be_hidden() -> None:
    code = "import sys, cutlass.cute, cuda.bindings.driver; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    imported = {name.partition(".")[0] for name in done.stdout.split()}
    assert "numpy" in imported
    assert [stem for stem in imported if not stem_violations(stem)] == []
