# SPDX-License-Identifier: Apache-2.0
"""Products of tiles that TMA loaded, read along either axis, and added to what registers hold.

The same bytes serve as a matrix and as its transpose: `[n][m]` is A of m rows when M-major. The
H200 gave the addresses of such operands (tests/hardware/micro); here is the whole way.
"""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator import numerics
from fmha_gen.emulator.lanes import LANES
from fmha_gen.emulator.scheduler import Completion, Order, Schedule
from fmha_gen.emulator.wgmma import Descriptor

from .kernels import FIRST_INPUT, STEP, execute, tensor_map

RNG = np.random.default_rng(5)
K = 32  # of two instructions
SCHEDULES = [
    Schedule(),
    Schedule(1, Order.RANDOM_WARPS, Completion.RANDOM),
    Schedule(2, Order.STARVATION, Completion.LATE),
]

# %r30: shared memory; the mbarrier is there, A at 1024 (as the swizzle wants it), B after it.
LOADS = """
mov.b32 %r30, smem; setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
mbarrier.init.shared.b64 [%r30], 1; fence.mbarrier_init.release.cluster;
READY: bar.sync 0; @%p1 bra WAIT;
mov.b64 %rd5, k_param_3; mov.b64 %rd6, k_param_4;
mbarrier.arrive.expect_tx.shared.b64 _, [%r30], {bytes};
{loads}
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r30], 0; @!%p2 bra WAIT;
"""
LOAD = """cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
  [%r30+{place}], [%rd{map}, {{{x}, {y}}}], [%r30];
"""


class Operand:
    """Rows of a matrix [rows, K] in global memory, as they are or turned; 128-byte swizzle.

    box: (elements of a box along dimension 0, rows of it).
    """

    def __init__(self, matrix: np.ndarray, turned: bool, start: int) -> None:
        self.rows, self.turned, self.start = len(matrix), turned, start
        stored = matrix.T if turned else matrix
        padding = -stored.shape[1] % 64
        self.stored = np.pad(stored, [(0, 0), (0, padding)])
        self.boxes = self.stored.shape[1] // 64
        self.box_bytes = 128 * len(stored)

    def map(self, address: int) -> bytes:
        rows, columns = self.stored.shape
        return tensor_map(address, (columns, rows), (64, rows), size=2, swizzle=3)

    def loads(self, number: int) -> str:
        return "".join(
            LOAD.format(
                place=self.start + box * self.box_bytes, map=number, x=64 * box, y=0
            )
            for box in range(self.boxes)
        )

    def descriptor(self, step: int) -> int:
        """Of the instruction's 16 columns of K, on an H200's terms, from address 1024 on."""
        along_k = 16 * 128 if self.turned else 32  # [bytes]
        start = 1024 + self.start + step * along_k
        leading = self.box_bytes if self.turned else 16
        return Descriptor(start, leading, 1024, 3).encode()


def product(a: Operand, b: Operand, given: np.ndarray | None, kind: str, schedule):
    """What two instructions leave in the accumulators, [64, N]. given: what was in them."""
    n = b.rows
    names = [f"%r{100 + i}" for i in range(n // 2)]
    lane, i = np.arange(LANES), np.arange(n // 2)[:, None]
    row = lane // 32 * 16 + lane % 32 // 4 + 8 * (i // 2 % 2)
    column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
    held = np.zeros((n // 2, LANES), np.float32)
    if given is not None:
        held = given[row, column]
    body = LOADS.format(
        bytes=a.boxes * a.box_bytes + b.boxes * b.box_bytes,
        loads=a.loads(5) + b.loads(6),
    )
    body += "".join(
        f"ld.global.b32 {name}, [%rd2+{512 * i}];" for i, name in enumerate(names)
    )
    flags = f"1, 1, {int(a.turned)}, {int(b.turned)}"
    body += "wgmma.fence.sync.aligned;"
    for step in range(K // 16):
        add = 1 if given is not None or step else 0
        body += f"""mov.b64 %rd7, {a.descriptor(step)}; mov.b64 %rd8, {b.descriptor(step)};
wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}
  {{{', '.join(names)}}}, %rd7, %rd8, {add}, {flags};"""
    body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    body += "".join(
        f"st.global.b32 [%rd2+{512 * i}], {name};" for i, name in enumerate(names)
    )
    encode = {"bf16": numerics.bf16_rn, "f16": numerics.f16_rn}[kind]
    inputs = [
        encode(np.ascontiguousarray(x.stored, np.float32)).reshape(-1) for x in (a, b)
    ]
    maps = a.map(FIRST_INPUT), b.map(FIRST_INPUT + STEP)
    options = {"smem_bytes": 65536, "maps": maps, "schedule": schedule}
    _, result = execute(body, *inputs, out=held, **options)
    assert result.findings == ()
    found = np.zeros((64, n), np.float32)
    found[row, column] = held
    return found


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("b_turned", [False, True])
@pytest.mark.parametrize("a_turned", [False, True])
def test_either_axis_of_both_operands(a_turned, b_turned, kind, schedule):
    a = RNG.integers(-8, 9, (64, K)).astype(np.float32)
    b = RNG.integers(-8, 9, (128, K)).astype(np.float32)
    given = RNG.integers(-100, 100, (64, 128)).astype(np.float32)
    left = Operand(a, a_turned, 1024)
    right = Operand(b, b_turned, 1024 + 16384)
    for before in (None, given):
        expected = a @ b.T + (0 if before is None else before)
        np.testing.assert_array_equal(
            product(left, right, before, kind, schedule), expected
        )


def test_initial_values_may_be_infinite():
    """A row that is switched off by its statistics stays -inf, whatever is added."""
    a = RNG.integers(-8, 9, (64, K)).astype(np.float32)
    b = RNG.integers(-8, 9, (64, K)).astype(np.float32)
    given = np.zeros((64, 64), np.float32)
    given[:, 5] = -np.inf
    expected = a @ b.T + given
    found = product(
        Operand(a, True, 1024), Operand(b, True, 17408), given, "bf16", Schedule()
    )
    np.testing.assert_array_equal(found, expected)
