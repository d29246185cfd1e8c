# SPDX-License-Identifier: Apache-2.0
"""The gate: of each class of damage to the function a mutant is noticed, by `emulate` itself."""

from __future__ import annotations

import pytest
import support
from fmha_gen.emulator.launch import CaptureError
from fmha_gen.ops.cases import cases_for, walks_for

from tests.emulator.rehearsals import tag_of
from tests.emulator.walks import read

from . import emulation
from .campaign import SAME
from .function_campaign import KIND, FunctionSubject
from .ptx_mutants import Mutant

SINGLE = "sm100_d128_bf16_full_q1000_single_lse"

# Decision 0027 has more of them. One or two of each class, in turn on sm90 and sm100, with the case
# that is the first to show it.
SAMPLE = (
    ("sm90_d128_bf16_causal_lse", "indices: ", ": k: head 0", "sms_1", "receives k"),
    (SINGLE, "residues: ", ": 31 keys at most", "ragged", "of out"),
    ("sm90_d64_bf16_causal_s512", "scheduler: ", ": the last tile is missing", "sms_1", "no CTA"),
    ("sm90_d128_bf16_causal_lse", "strides: ", "lse: heads and rows swapped", "sms_1", "no tensor"),
    ("sm100_d96_fp16_full_kv1000", "magnitudes: ", ": the reference never moves", "ragged", "NaN"),
    ("sm90_d128_fp16_full_c2x1_vmc_kv1000", "rows: ", "row is not rescaled", "ragged", "wrong"),
    ("sm90_d192x128_bf16_full_q1000", "writes: ", "row of O is not stored", "sms_1", "no CTA"),
    ("sm90_d128_bf16_full_gqa8_pack_lse", "scale: ", ": lse in log2", "ragged", "of lse"),
)  # fmt: skip


@pytest.fixture
def only(monkeypatch):
    """Leaves one case of a kernel to `emulate`."""

    def choose(path, tag):
        about = read(path)
        name = next(
            case.name
            for case in (*cases_for(*about), *walks_for(*about))
            if tag_of(case) == tag
        )
        stages = [(*options, f"--case={name}") for options in emulation.STAGES]
        monkeypatch.setattr(emulation, "STAGES", stages)

    return choose


@pytest.mark.parametrize(
    ("stem", "group", "what", "tag", "finding"), support.rotated(SAMPLE, 3)
)
def test_damage_to_the_function_is_noticed(stem, group, what, tag, finding, only):
    subject = FunctionSubject(stem)
    only(subject.path, tag)
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


def test_a_whole_kernel_is_clean(only):
    """In one case; its record says so of all."""
    subject = FunctionSubject("sm90_d64_bf16_causal_s512")
    only(subject.path, "ragged")
    whole = changed(subject, "import math\n", "import math\n")
    assert subject.notice(KIND, whole) is None
