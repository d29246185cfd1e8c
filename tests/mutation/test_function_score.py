# SPDX-License-Identifier: Apache-2.0
"""The gate: of each class of damage to the function a mutant is noticed, by `emulate` itself."""

from __future__ import annotations

import pytest
from fmha_gen.emulator.launch import CaptureError

from tests.emulator.rehearsals import emulated_cases

from . import emulation
from .campaign import SAME
from .function_campaign import KIND, FunctionSubject
from .ptx_mutants import Mutant

SINGLE = "sm100_d128_bf16_full_q1000_single_lse"

# Decision 0027 has more of them. One or two of each class, in turn on sm90 and sm100.
SAMPLE = (
    ("sm90_d128_bf16_causal_lse", "indices: ", ": k: head 0", ""),
    (SINGLE, "residues: ", ": 31 keys at most", ""),
    ("sm90_d64_bf16_causal_s512", "scheduler: ", ": the last tile is missing", ""),
    ("sm90_d128_bf16_causal_lse", "strides: ", "lse: heads and rows swapped", ""),
    ("sm100_d96_fp16_full_kv1000", "magnitudes: ", ": the reference never moves", ""),
    ("sm90_d128_fp16_full_c2x1_vmc_kv1000", "rows: ", "the second row is not rescaled", "wrong"),
    ("sm90_d192x128_bf16_full_q1000", "writes: ", ": the second row of O is not stored", ""),
    ("sm90_d128_bf16_full_gqa8_pack_lse", "scale: ", ": lse in log2", "of lse"),
)  # fmt: skip


@pytest.mark.parametrize(("stem", "group", "what", "finding"), SAMPLE)
def test_damage_to_the_function_is_noticed(stem, group, what, finding):
    subject = FunctionSubject(stem)
    found = [
        mutant
        for mutant in subject.mutants(KIND)
        if mutant.name.startswith(group) and mutant.name.endswith(what)
    ]
    assert found
    noticed = subject.notice(KIND, found[0])
    assert noticed is not None and finding in noticed


def changed(subject, before, instead):
    """A mutant by hand."""
    line = subject.source[: subject.source.index(before)].count("\n") + 1
    text = subject.source.replace(before, instead, 1)
    return Mutant("by hand", line, before, text)


def test_what_is_no_other_kernel_is_told():
    subject = FunctionSubject("sm90_d64_bf16_causal_s512")
    same = changed(
        subject, "tile = wave * width + place", "tile = place + wave * width"
    )
    assert subject.notice(KIND, same) == SAME
    broken = changed(subject, "tile = wave * width", "tile = nobody * width")
    with pytest.raises(CaptureError, match="nobody"):
        subject.notice(KIND, broken)


def test_a_whole_kernel_is_clean(monkeypatch):
    """In one case; its record says so of all."""
    subject = FunctionSubject("sm90_d64_bf16_causal_s512")
    case = emulated_cases(subject.path)[0].name
    stages = [(*options, f"--case={case}") for options in emulation.STAGES]
    monkeypatch.setattr(emulation, "STAGES", stages)
    whole = changed(subject, "import math\n", "import math\n")
    assert subject.notice(KIND, whole) is None
