# SPDX-License-Identifier: Apache-2.0
"""What an e4m3 attention kernel on sm90 is made of, in hand-written PTX, and damages of each part.

An accumulator's thread has, of 16 columns, 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 (t: its lane in the
quad); as bytes of an 8-bit A operand they are at 4 t to 4 t + 3. So V^T has its keys in that order,
ORDER, and P needs no exchange between lanes.
"""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator import numerics, wgmma
from fmha_gen.emulator.lanes import LANES

from .kernels import FIRST_INPUT, STEP, execute, kinds, tensor_map

RNG = np.random.default_rng(8)
SMEM = 1024  # where the kernels' shared memory begins
ORDER = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


def codes(values: np.ndarray) -> np.ndarray:
    return numerics.e4m3_rn_satfinite(values.astype(np.float32)).astype(np.uint8)


def in_order(keys: np.ndarray) -> np.ndarray:
    """Rows in groups of 16, each group in ORDER."""
    groups = keys.reshape(-1, 16, *keys.shape[1:])
    return groups[:, ORDER].reshape(keys.shape)


def element(register: int, lane: int) -> tuple[int, int]:
    """Row and column of register d<i> of an accumulator, as in the manual's figure."""
    row = 16 * (lane // 32) + lane % 32 // 4 + 8 * (register // 2 % 2)
    return row, 8 * (register // 4) + 2 * (lane % 4) + register % 2


def matrix(registers: np.ndarray) -> np.ndarray:
    """[64, N] from an accumulator's registers [N / 2, lane]."""
    found = np.zeros((64, 2 * len(registers)), np.float32)
    for register, lane in np.ndindex(len(registers), LANES):
        found[element(register, lane)] = registers[register, lane]
    return found


# -- tiles of 1-byte elements: TMA writes them with a swizzle, wgmma reads them K-major

PRODUCT = """
mov.b32 %r30, smem; setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r30+15360], 1;
fence.mbarrier_init.release.cluster;
READY: bar.sync 0;
mov.b64 %rd5, k_param_3; mov.b64 %rd6, k_param_4;
@%p1 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%r30+15360], @BYTES@;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
  [%r30], [%rd5, {0, 0}], [%r30+15360];
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
  [%r30+8192], [%rd6, {0, 0}], [%r30+15360];
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r30+15360], 0, 1000000;
@!%p2 bra WAIT;
@CLEAR@
wgmma.fence.sync.aligned;
@PRODUCTS@
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
@STORES@"""
SWIZZLES = {
    32: 1,
    64: 2,
    128: 3,
}  # [bytes], to the bits of a descriptor and a tensor map


def swizzled_product(row_bytes: int, n: int, swizzle: int, stride: int):
    """A times B^T of random small integers, and what the kernel makes of them.

    swizzle, stride: [bytes] that B's descriptor says.
    """
    a = RNG.integers(-4, 5, (64, row_bytes))
    b = RNG.integers(-4, 5, (n, row_bytes))
    maps = tuple(
        tensor_map(
            *(address, (row_bytes, rows), (row_bytes, rows)),
            size=1,
            swizzle=SWIZZLES[row_bytes],
        )
        for address, rows in ((FIRST_INPUT, 64), (FIRST_INPUT + STEP, n))
    )
    registers = [f"%r{100 + i}" for i in range(n // 2)]
    products = []
    for k in range(row_bytes // 32):
        starts = (SMEM + 32 * k, SMEM + 8192 + 32 * k)
        left, right = (
            wgmma.Descriptor(start, 16, step, SWIZZLES[kind]).encode()
            for start, step, kind in zip(
                starts, (8 * row_bytes, stride), (row_bytes, swizzle), strict=True
            )
        )
        products.append(
            f"mov.b64 %rd7, {left}; mov.b64 %rd8, {right};"
            f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 "
            f"{{{', '.join(registers)}}}, %rd7, %rd8, 1, 1, 1;"
        )
    stores = [
        f"st.global.b32 [%rd2+{512 * i}], {name};" for i, name in enumerate(registers)
    ]
    body = PRODUCT
    for mark, lines in {
        "@BYTES@": [str((64 + n) * row_bytes)],
        "@CLEAR@": [f"mov.b32 {name}, 0;" for name in registers],
        "@PRODUCTS@": products,
        "@STORES@": stores,
    }.items():
        body = body.replace(mark, "\n".join(lines))
    out = np.zeros((n // 2, LANES), np.float32)
    _, result = execute(body, codes(a), codes(b), out=out, maps=maps, smem_bytes=16384)
    return a @ b.T, matrix(out), result


@pytest.mark.parametrize("n", [8, 40])
@pytest.mark.parametrize("row_bytes", [32, 64, 128])
def test_swizzled_tiles(row_bytes, n):
    want, got, result = swizzled_product(row_bytes, n, row_bytes, 8 * row_bytes)
    assert result.findings == ()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("row_bytes", [32, 64, 128])
@pytest.mark.parametrize("other", [32, 64, 128])
def test_a_descriptor_of_another_swizzle(row_bytes, other):
    want, got, result = swizzled_product(row_bytes, 40, other, 8 * row_bytes)
    right = np.array_equal(got, want) and not result.findings
    assert right == (other == row_bytes)


def test_groups_of_8_rows_at_another_stride():
    want, got, result = swizzled_product(64, 40, 64, 16 * 64)
    assert kinds(result) == ["read-before-write"] and (got != want).any()


# -- the in-kernel transpose: V [32 keys, 16 columns] of each warp to V^T [16, 32], keys in ORDER

TRANSPOSE = """
ld.param.b64 %rd5, [k_param_1]; mul.wide.u32 %rd6, %r1, 16; add.s64 %rd5, %rd5, %rd6;
ld.global.v4.b32 {%r32, %r33, %r34, %r35}, [%rd5];
mov.b32 %r30, smem; shl.b32 %r31, %r1, 4; add.s32 %r31, %r31, %r30;
st.shared.v4.b32 [%r31], {%r32, %r33, %r34, %r35}; bar.sync 0;
ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r40, %r41, %r42, %r43}, [%r31];
and.b32 %r50, %r1, 31; and.b32 %r51, %r50, 7; shr.u32 %r52, %r50, 3;
setp.lt.u32 %p1, %r50, 16;
selp.b32 %r53, 0x6420, 0x7531, %p1; selp.b32 %r54, 0x7531, 0x6420, %p1;
prmt.b32 %r60, %r40, %r41, %r53; prmt.b32 %r61, %r40, %r41, %r54;
prmt.b32 %r62, %r42, %r43, %r53; prmt.b32 %r63, %r42, %r43, %r54;
shr.u32 %r55, %r51, 2; and.b32 %r56, %r52, 1; xor.b32 %r55, %r55, %r56;
shl.b32 %r57, %r51, 1; add.s32 %r57, %r57, %r55;
shl.b32 %r57, %r57, 5; shr.u32 %r58, %r52, 1; shl.b32 %r58, %r58, 4;
add.s32 %r57, %r57, %r58; shr.u32 %r59, %r1, 5; shl.b32 %r59, %r59, 9;
add.s32 %r57, %r57, %r59; add.s32 %r57, %r57, %r30;
stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r57+2048], {%r60, %r61, %r62, %r63};
bar.sync 0;
ld.shared.v4.b32 {%r32, %r33, %r34, %r35}, [%r31+2048];
mul.wide.u32 %rd6, %r1, 16; add.s64 %rd7, %rd1, %rd6;
st.global.v4.b32 [%rd7], {%r32, %r33, %r34, %r35};
"""


def transposed(body: str) -> bool:
    """Whether it does that, with nothing found; of all codes, NaN too."""
    v = RNG.permutation(np.arange(4 * 32 * 16) % 256).astype(np.uint8)
    v = v.reshape(4, 32, 16)
    out = np.zeros((4, 16, 32), np.uint8)
    _, result = execute(body, v, out=out)
    want = [in_order(tile).T for tile in v]
    return np.array_equal(out, want) and not result.findings


def test_transpose():
    assert transposed(TRANSPOSE)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("0x6420, 0x7531, %p1", "0x7531, 0x6420, %p1"),  # columns 2 p are 2 p + 1
        ("selp.b32 %r53, 0x6420, 0x7531", "selp.b32 %r53, 0x6420, 0x6420"),
        ("0x7531, 0x6420, %p1", "0x5731, 0x6420, %p1"),  # two keys
        ("%r40, %r41, %r53", "%r41, %r40, %r53"),  # eight keys
        ("x4.trans.shared", "x4.shared"),
        ("stmatrix.sync.aligned.m8n8.x4.", "stmatrix.sync.aligned.m8n8.x4.trans."),
        ("xor.b32 %r55, %r55, %r56", "or.b32 %r55, %r55, %r56"),
    ],
)
def test_other_transposes(right, wrong):
    assert right in TRANSPOSE
    assert not transposed(TRANSPOSE.replace(right, wrong, 1))


# -- O = e4m3(Q K^T) V: S from shared memory, P from the registers that S was in

KEYS, COLUMNS = 32, 24  # a step of K, and of V; core matrices of 8 rows and 16 bytes
ATTENTION = """
mov.b32 %r30, smem; shl.b32 %r31, %r1, 4; add.s32 %r31, %r31, %r30;
ld.param.b64 %rd5, [k_param_1]; mul.wide.u32 %rd6, %r1, 16; add.s64 %rd5, %rd5, %rd6;
ld.global.v4.b32 {%r32, %r33, %r34, %r35}, [%rd5];
st.shared.v4.b32 [%r31], {%r32, %r33, %r34, %r35};
setp.gt.u32 %p1, %r1, 111; @%p1 bra READY;
ld.global.v4.b32 {%r32, %r33, %r34, %r35}, [%rd5+2048];
st.shared.v4.b32 [%r31+2048], {%r32, %r33, %r34, %r35};
READY: fence.proxy.async; bar.sync 0;
mov.b64 %rd7, @Q@; mov.b64 %rd8, @K@; mov.b64 %rd9, @V@;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {@S@}, %rd7, %rd8, 0, 1, 1;
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
@PACK@
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n24k32.f32.e4m3.e4m3
  {@O@}, {%r60, %r61, %r62, %r63}, %rd9, 0, 1, 1;
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
@STORES@"""
BYTES = [  # registers of S that are the four bytes of each word of P: (half of k, half of rows)
    [0, 1, 4, 5],
    [2, 3, 6, 7],
    [8, 9, 12, 13],
    [10, 11, 14, 15],
]


CONVERTED = """cvt.rn.satfinite.e4m3x2.f32 %rs1, {1}, {0};
cvt.rn.satfinite.e4m3x2.f32 %rs2, {3}, {2};
mov.b32 {4}, {{%rs1, %rs2}};"""
ROUNDED = """{{ .reg .b32 low, high; .reg .f32 a, b, c, d;
mul.f32 a, {0}, 0f33800000; mul.f32 b, {1}, 0f33800000;
mul.f32 c, {2}, 0f33800000; mul.f32 d, {3}, 0f33800000;
cvt.rn.relu.f16x2.f32 low, b, a; cvt.rn.relu.f16x2.f32 high, d, c;
prmt.b32 {4}, low, high, 0x6420; }}"""
"""Four numbers to a word of P: by their values, and to the codes that they are."""


def attention(
    words: list[list[int]], v_order=in_order, scale: int = 1, word: str = CONVERTED
):
    """What is right, and what a kernel with these words of P computes."""
    q = RNG.integers(-1, 2, (64, KEYS)) * scale
    k, v = RNG.integers(-1, 2, (KEYS, KEYS)), RNG.integers(-2, 3, (KEYS, COLUMNS))
    held = [
        x.reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3).reshape(-1)
        for x in (q, k, v_order(v).T)
    ]
    starts = (SMEM, SMEM + q.size, SMEM + q.size + k.size)
    descriptors = [wgmma.Descriptor(x, 128, 256, 0).encode() for x in starts]
    pack = []
    for number, (a, b, c, d) in enumerate(words):
        registers = [f"%r{100 + part}" for part in (a, b, c, d)]
        pack.append(word.format(*registers, f"%r{60 + number}"))
    o = [f"%r{200 + i}" for i in range(COLUMNS // 2)]
    body = ATTENTION
    for mark, text in {
        "@Q@": str(descriptors[0]),
        "@K@": str(descriptors[1]),
        "@V@": str(descriptors[2]),
        "@S@": ", ".join(f"%r{100 + i}" for i in range(KEYS // 2)),
        "@O@": ", ".join(o),
        "@PACK@": "\n".join(pack),
        "@STORES@": "\n".join(
            f"st.global.b32 [%rd2+{512 * i}], {x};" for i, x in enumerate(o)
        ),
    }.items():
        body = body.replace(mark, text)
    out = np.zeros((COLUMNS // 2, LANES), np.float32)
    _, result = execute(body, codes(np.concatenate(held)), out=out)
    s = q @ k.T
    rounded = np.maximum(s, 0).astype(np.uint8)
    p = numerics.e4m3_to_f32(rounded if word == ROUNDED else codes(s))
    return p @ v, matrix(out), result


def test_attention():
    want, got, result = attention(BYTES)
    assert result.findings == ()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "words",
    [
        [BYTES[1], BYTES[0], BYTES[3], BYTES[2]],  # rows r and r + 8
        [BYTES[2], BYTES[3], BYTES[0], BYTES[1]],  # halves of k
        [BYTES[0], BYTES[2], BYTES[1], BYTES[3]],
        [[a, c, b, d] for a, b, c, d in BYTES],
        [[b, a, c, d] for a, b, c, d in BYTES],
    ],
)
def test_attention_with_another_lane_map(words):
    want, got, result = attention(words)
    assert result.findings == () and (got != want).mean() > 0.5


def test_attention_with_keys_in_their_natural_order():
    want, got, result = attention(BYTES, v_order=lambda v: v)
    assert result.findings == () and (got != want).mean() > 0.5


def test_attention_with_p_rounded_to_codes():
    want, got, result = attention(BYTES, word=ROUNDED)
    assert result.findings == ()
    np.testing.assert_array_equal(got, want)
    _, got, result = attention([[b, a, c, d] for a, b, c, d in BYTES], word=ROUNDED)
    assert result.findings == () and (got != want).mean() > 0.5


def test_attention_whose_rounded_p_overflows():
    """Codes that wrap around are numbers: no NaN tells."""
    _, got, result = attention(BYTES, scale=256, word=ROUNDED)
    assert kinds(result) == ["saturation"] and np.isfinite(got).all()


def test_attention_whose_p_overflows():
    """The sums stay finite and wrong: only the finding tells."""
    _, got, result = attention(BYTES, scale=64)
    assert kinds(result) == ["saturation"] and np.isfinite(got).all()
