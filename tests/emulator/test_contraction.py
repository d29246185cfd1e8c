# SPDX-License-Identifier: Apache-2.0
"""Products and sums that a compiler may fuse: each kernel with one rounding and with two."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator import ptx
from fmha_gen.emulator.contraction import contractions

from .kernels import execute, text

X = np.float32(1 + 2.0**-12)  # its square has a last bit that float32 drops
SQUARE = np.float32(X * X)
LOST = np.float32(np.float64(X) * np.float64(X) - np.float64(SQUARE))
HEAD = f"mov.b32 %r2, 0f{X.view(np.uint32):08X}; mov.b32 %r3, 0f{SQUARE.view(np.uint32):08X};"
STORE = "st.global.b32 [%rd2], %r9;"


def both(body: str) -> tuple[float, float]:
    """What lane 0 stores, with two roundings and with one."""
    results = []
    for contract in (False, True):
        out = np.zeros(128, np.float32)
        _, result = execute(HEAD + body + STORE, out=out, contract=contract)
        assert result.findings == ()
        results.append(float(out[0]))
    return results[0], results[1]


@pytest.mark.parametrize(
    ("body", "fused"),
    {
        "mul.f32 %r4, %r2, %r2; sub.f32 %r9, %r4, %r3;": LOST,
        "mul.f32 %r4, %r2, %r2; sub.f32 %r9, %r3, %r4;": -LOST,
        "neg.f32 %r5, %r3; mul.f32 %r4, %r2, %r2; add.f32 %r9, %r5, %r4;": LOST,
        "neg.f32 %r5, %r3; mul.ftz.f32 %r4, %r2, %r2; add.ftz.f32 %r9, %r4, %r5;": LOST,
        # The product has another use, and is in a block before.
        "mul.f32 %r4, %r2, %r2; mov.b32 %r6, %r4; bra NEXT; NEXT: "
        "sub.f32 %r9, %r4, %r3;": LOST,
    }.items(),
)
def test_a_sum_is_fused_with_its_product(body, fused):
    assert both(body) == (0, fused)


@pytest.mark.parametrize(
    "body",
    [
        "mul.rn.f32 %r4, %r2, %r2; sub.f32 %r9, %r4, %r3;",
        "mul.f32 %r4, %r2, %r2; sub.rn.f32 %r9, %r4, %r3;",
        "mul.ftz.f32 %r4, %r2, %r2; sub.f32 %r9, %r4, %r3;",
        # A factor, or the product, is another one by then.
        "mov.b32 %r5, %r2; mul.f32 %r4, %r5, %r5; mov.b32 %r5, 0; sub.f32 %r9, %r4, %r3;",
        "mul.f32 %r4, %r2, %r2; mov.b32 %r4, %r3; sub.f32 %r9, %r4, %r3;",
    ],
)
def test_what_may_not_be_fused(body):
    assert both(body) == (0, 0)


def test_packed_sums_are_fused():
    packed = "mov.b64 %rd5, {%r2, %r2}; mov.b64 %rd6, {%r3, %r3};"
    split = "mov.b64 {%r8, %r9}, %rd8;"
    free = f"{packed} mul.f32x2 %rd7, %rd5, %rd5; sub.f32x2 %rd8, %rd7, %rd6; {split}"
    assert both(free) == (0, LOST)
    assert both(free.replace("mul.", "mul.rn.")) == (0, 0)


def test_packed_sums_of_halves_are_fused():
    """1 + 2 ** -6, whose square loses 2 ** -12 to rounding."""
    halves = (
        "mov.b32 %r4, 0x3C103C10; mov.b32 %r5, 0x3C203C20; mul.f16x2 %r6, %r4, %r4;"
    )
    lost, negative = np.array([0x0C000C00, 0x8C008C00], np.uint32).view(np.float32)
    assert both(f"{halves} sub.f16x2 %r9, %r6, %r5;") == (0, lost)
    assert both(f"{halves} sub.f16x2 %r9, %r5, %r6;") == (0, negative)
    free = f"{halves} xor.b32 %r5, %r5, 0x80008000; add.f16x2 %r9, %r5, %r6;"
    assert both(free) == (0, lost)
    assert both(free.replace("add.", "add.rn.")) == (0, 0)
    assert both(free.replace("mul.", "mul.rn.")) == (0, 0)


def test_the_kernel_says_which():
    body = HEAD + "mul.f32 %r4, %r2, %r2; sub.f32 %r9, %r3, %r4;" + STORE
    module = ptx.parse(text(body))
    (found,) = contractions(module).items()
    names = [module.instructions[i].opcode for i in (found[0], found[1][0])]
    assert names == ["sub", "mul"] and found[1][1] == 1
