# SPDX-License-Identifier: Apache-2.0
"""Texts of forward kernels that give an LSE and of those for their gradients, as built."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import support
from fmha_gen.build import render
from fmha_gen.planning import plan

GQA = "sm90_d64_bf16_causal_gqa2"
FULL = "sm90_d64_fp16_full"
WIDE = "sm90_d128_bf16_causal"
ALONE = "sm90_d64_bf16_full"  # gives an lse, and has no backward kernel
FIXED = "sm90_d64_bf16_causal_gqa2_q40_kv72"
FIELDS = {
    GQA: "dtype: bf16\nhead_dim: 64\nmask: causal\nheads: {q_per_kv: 2}\n",
    FULL: "dtype: fp16\nhead_dim: 64\n",
    WIDE: "dtype: bf16\nhead_dim: 128\nmask: causal\n",
    ALONE: "dtype: bf16\nhead_dim: 64\n",
    FIXED: (
        "dtype: bf16\nhead_dim: 64\nmask: causal\nheads: {q_per_kv: 2}\n"
        "seqlen: {q: 40, kv: 72}\n"
    ),
}
ORDERED = f"{GQA}_bwd_det"
PLAIN = f"{WIDE}_nolse"  # which calls without a gradient take


def text_of(stem: str, fields: str, op: str = "fmha_fwd") -> str:
    """A kernel's text as a build makes it."""
    spec = support.load_text(f"arch: sm90\nop: {op}\n{fields}", stem)
    return render.render_kernel(plan.resolve(spec))


def forward_text(stem: str) -> str:
    return text_of(f"{stem}_lse", f"{FIELDS[stem]}lse: true\n")


def backward_text(stem: str) -> str:
    return text_of(f"{stem}_bwd", FIELDS[stem], "fmha_bwd")


def ordered_text() -> str:
    return text_of(ORDERED, f"{FIELDS[GQA]}deterministic: true\n", "fmha_bwd")


@functools.cache
def texts() -> Mapping[str, str]:
    forward = {f"{x}_lse": forward_text(x) for x in (GQA, FULL, WIDE, ALONE)}
    backward = {f"{x}_bwd": backward_text(x) for x in (GQA, FULL, WIDE, FIXED)}
    plain = {PLAIN: text_of(PLAIN, FIELDS[WIDE])}
    return forward | plain | backward | {ORDERED: ordered_text()}
