# SPDX-License-Identifier: Apache-2.0
"""tcgen05.mma against numpy: every layout of D, source of A, type, major-ness and swizzle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import support
from fmha_gen.emulator import numerics
from fmha_gen.emulator.scheduler import Completion, Order, Schedule

from .tensor_kernels import (
    DATA,
    KIND_CODES,
    LANES,
    Matrix,
    commit,
    instruction_descriptor,
    mma,
    parts,
    run,
)

ALIGNMENT = 1024
SCHEDULES = [
    Schedule(),
    Schedule(seed=1, order=Order.RANDOM_WARPS, completion=Completion.RANDOM),
    Schedule(seed=2, order=Order.RANDOM, completion=Completion.LATE),
]


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Small integers to bits; exact in every type."""
    floats = values.astype(np.float32)
    if dtype == "tf32":
        # The low 13 bits must not count.
        return floats.view(np.uint32) | np.uint32(0x1ABC)
    if dtype in ("e4m3", "e5m2"):
        narrow = {
            "e4m3": numerics.e4m3_rn_satfinite,
            "e5m2": numerics.e5m2_rn_satfinite,
        }[dtype]
        return narrow(floats).astype(np.uint8)
    return {"f16": numerics.f16_rn, "bf16": numerics.bf16_rn}[dtype](floats)


def places(m: int, n: int, ctas: int, upper: bool = False):
    """(row, column) of D to (cta, lane, column of tensor memory), from the manual's figures."""
    for row, column in itertools.product(range(m), range(n)):
        if (m, ctas) == (64, 1):
            yield row, column, 0, row // 16 * 32 + row % 16 + 16 * upper, column
        elif (m, ctas) == (128, 2):
            fold, rest = divmod(column, n // 2)
            yield row, column, row // 64, row % 64 + 64 * fold, rest
        else:
            yield row, column, row // 128, row % 128, column


def put_a(image: np.ndarray, bits: np.ndarray, ctas: int, column: int, upper: bool):
    """A's rows into tensor memory [ctas, columns, lanes], packed along k; layout B twice."""
    m = len(bits)
    words = np.ascontiguousarray(bits).view(np.uint32)
    for row in range(m):
        if (m, ctas) == (64, 1):
            lanes = [row // 16 * 32 + row % 16 + 16 * upper]
        elif (m, ctas) == (128, 2):
            lanes = [row % 64, row % 64 + 64]
        else:
            lanes = [row % 128]
        cta = row * ctas // m
        for lane in lanes:
            image[cta, column : column + words.shape[1], lane] = words[row]


SHAPES = [(1, 64), (1, 128), (2, 128), (2, 256)]
TYPES = [("f16", "f16"), ("bf16", "bf16"), ("e4m3", "e5m2"), ("tf32", "tf32")]
SWIZZLES = (0, 32, 64, 128)
OPERANDS = [
    *(("shared", a, b, s) for a in (0, 1) for b in (0, 1) for s in SWIZZLES),
    *(("tensor", 0, b, s) for b in (0, 1) for s in SWIZZLES),
]


def multiply(
    ctas, m, n, types, source, a_mn, b_mn, swizzle, *, upper=False, schedule=None
):
    """Two steps of k, the first adds to what is there; returns (got, want, findings)."""
    dtype_a, dtype_b = types
    kind = KIND_CODES[dtype_a][0]
    step = 32 // numerics.ELEMENT_SIZE[dtype_a]
    k = 2 * step
    rng = np.random.default_rng(m + n + swizzle)
    a, b = rng.integers(-4, 5, (m, k)), rng.integers(-4, 5, (n, k))
    # A 128-byte swizzle has rows of 128 bytes; k fills only the first half of them.
    size = numerics.ELEMENT_SIZE[dtype_a]
    padded = max(k, (swizzle or 16) // size)
    rows = -(-(m // ctas) // 64) * 64
    left = Matrix(DATA, size, rows, padded, bool(a_mn), swizzle, padding=0)
    right_at = DATA + -(-left.nbytes // ALIGNMENT) * ALIGNMENT
    share = n // ctas
    padded_n = -(-share // ((swizzle or 16) // size)) * ((swizzle or 16) // size)
    right = Matrix(
        right_at,
        size,
        padded_n if b_mn else share,
        padded,
        bool(b_mn),
        swizzle,
        padding=128 if not swizzle else 0,
    )
    nbytes = right_at - DATA + -(-right.nbytes // 2048) * 2048
    nbytes = -(-nbytes // 2048) * 2048
    shared = np.zeros((ctas, nbytes), np.uint8)
    columns = 128 if n > 32 else 64
    a_column = columns - 16
    start = rng.integers(-9, 10, (ctas, columns, LANES)).astype(np.float32)
    tensor = start.view(np.uint32).copy()
    bits_a, bits_b = encode(a, dtype_a), encode(b, dtype_b)
    for cta in range(ctas):
        mine = slice(cta * m // ctas, (cta + 1) * m // ctas)
        if source == "shared":
            left.put(shared[cta], bits_a[mine])
        right.put(shared[cta], bits_b[cta * share : (cta + 1) * share])
    if source == "tensor":
        put_a(tensor, bits_a, ctas, a_column, upper)
    want = tensor.copy()
    product = a.astype(np.float64) @ b.T
    for row, column, cta, lane, place in places(m, n, ctas, upper):
        sum_ = start[cta, place, lane] + product[row, column]
        want[cta, place, lane] = np.float32(sum_).view(np.uint32)
    descriptor = instruction_descriptor(m, n, dtype_a, dtype_b, a_mn=a_mn, b_mn=b_mn)
    high = 16 << 16 if upper else 0
    steps = ""
    for at in (0, step):
        first = left.descriptor(at)
        if source == "tensor":
            first = f"[%r31+{high + a_column + at * size // 4}]"
        steps += mma(ctas, kind, high, first, right.descriptor(at), descriptor, True)
    p = parts(ctas=ctas, columns=columns, nbytes=nbytes)
    body = (
        p["setup"]
        + p["pour"]
        + p["sync"]
        + f"@!%p4 bra WAIT;\n{steps}{commit(ctas)}"
        + p["wait"]
        + p["dump"]
        + p["free"]
    )
    got, result = run(body, shared, tensor, ctas=ctas, schedule=schedule)
    return got, want, [str(finding) for finding in result.findings]


def combinations():
    for (ctas, m), types, operands in itertools.product(SHAPES, TYPES, OPERANDS):
        if types[0] == "tf32" and (operands[1] or operands[2]):
            continue  # refused: see test_refused_descriptors
        yield ctas, m, types, operands


COMBINATIONS = {str(values).replace(" ", ""): values for values in combinations()}


@pytest.mark.parametrize("name", support.rotated(COMBINATIONS, 60))
def test_products(name):
    ctas, m, types, operands = COMBINATIONS[name]
    got, want, findings = multiply(ctas, m, 32 * ctas, types, *operands)
    assert findings == []
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("ctas", "m"), SHAPES)
@pytest.mark.parametrize("source", ["shared", "tensor"])
def test_products_under_schedules(ctas, m, source, schedule):
    got, want, findings = multiply(
        ctas, m, 32 * ctas, TYPES[0], source, 0, 1, 128, schedule=schedule
    )
    assert findings == []
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("source", ["shared", "tensor"])
def test_upper_half_of_each_warps_lanes(source):
    got, want, findings = multiply(1, 64, 32, TYPES[1], source, 0, 0, 64, upper=True)
    assert findings == []
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("ctas", "m", "n", "source"),
    [
        (1, 64, 8, "shared"),
        (1, 64, 8, "tensor"),
        (1, 64, 24, "shared"),
        (1, 128, 104, "shared"),
        (2, 128, 16, "shared"),
        (2, 256, 80, "shared"),
    ],
)
def test_widths(ctas, m, n, source):
    got, want, findings = multiply(ctas, m, n, TYPES[0], source, 0, 0, 32)
    assert findings == []
    np.testing.assert_array_equal(got, want)
