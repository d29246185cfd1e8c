# SPDX-License-Identifier: Apache-2.0
"""Two wgmma chains that overlap in a loop: S = Q K^T behind O += P V, with P in registers.

It computes nothing of use; tests compile it as it is, and with one line changed so that ptxas
serialises it (the wait before P is overwritten) or spills (the tile).
"""

import functools

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.memory import SmemAllocator

HEAD_DIM = 64
TILE_KV = 64
WARPGROUPS = 1
DRAIN_BEFORE_P = True
BRANCH_IN_FLIGHT = False

SPEC = {"name": "wgmma_chain", "arch": "sm90"}


def issue(tiled_mma, acc, a, b, accumulate):
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(a.shape[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.kernel
def chain(
    out: cute.Tensor,
    blocks: Int32,
    qk_mma: cute.TiledMma,
    pv_mma: cute.TiledMma,
    q_layout: cute.ComposedLayout,
    kv_layout: cute.ComposedLayout,
):
    thread, _, _ = cute.arch.thread_idx()
    smem = SmemAllocator()
    sQ = smem.allocate_tensor(BFloat16, q_layout.outer, 1024, q_layout.inner)
    sK = smem.allocate_tensor(BFloat16, kv_layout.outer, 1024, kv_layout.inner)
    sV = cute.make_tensor(sK.iterator, cute.select(sK.layout, mode=[1, 0]))
    group = cute.make_layout(WARPGROUPS, stride=128)(
        cute.arch.make_warp_uniform(thread // 128)
    )
    qk, pv = qk_mma.get_slice(group), pv_mma.get_slice(group)
    rQ = qk.make_fragment_A(qk.partition_A(sQ))
    rK = qk.make_fragment_B(qk.partition_B(sK))
    rV = pv.make_fragment_B(pv.partition_B(sV))
    S = cute.make_rmem_tensor(qk.partition_shape_C((64 * WARPGROUPS, TILE_KV)), Float32)
    acc = cute.make_rmem_tensor(
        pv.partition_shape_C((64 * WARPGROUPS, HEAD_DIM)), Float32
    )
    P = pv.make_fragment_A(pv.partition_shape_A((64 * WARPGROUPS, TILE_KV)))
    acc.fill(0.0)
    P.fill(0.0)
    for i in cutlass.range(blocks, unroll=1):
        issue(qk_mma, S, rQ, rK, False)
        if cutlass.const_expr(BRANCH_IN_FLIGHT):
            if i % 3 == 0:
                issue(pv_mma, acc, P, rV, True)
        else:
            issue(pv_mma, acc, P, rV, True)
        warpgroup.wait_group(1)
        for j in cutlass.range_constexpr(cute.size(S)):
            S[j] = cute.math.exp2(S[j], fastmath=True)
        if cutlass.const_expr(DRAIN_BEFORE_P):
            warpgroup.wait_group(0)
        for j in cutlass.range_constexpr(cute.size(S)):
            P[j] = S[j].to(BFloat16)
    warpgroup.wait_group(0)
    for j in cutlass.range_constexpr(cute.size(acc)):
        out[thread + j * 128 * WARPGROUPS] = acc[j]


@cute.jit
def launch(out: cute.Tensor, blocks: Int32):
    rows = (64, TILE_KV)
    k_major = OperandMajorMode.K
    qk_mma = sm90.make_trivial_tiled_mma(
        BFloat16, BFloat16, k_major, k_major, Float32, (WARPGROUPS, 1, 1), rows
    )
    pv_mma = sm90.make_trivial_tiled_mma(
        BFloat16,
        BFloat16,
        k_major,
        OperandMajorMode.MN,
        Float32,
        (WARPGROUPS, 1, 1),
        (64, HEAD_DIM),
        warpgroup.OperandSource.RMEM,
    )
    atom = warpgroup.make_smem_layout_atom(
        warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16
    )
    q_layout = cute.tile_to_shape(atom, (64 * WARPGROUPS, HEAD_DIM), order=(0, 1))
    kv_layout = cute.tile_to_shape(atom, (TILE_KV, HEAD_DIM), order=(0, 1))
    chain.set_name_prefix(
        "wgmma_chain", remove_cutlass_symbol=True, keep_mangled_name=False
    )
    chain(out, blocks, qk_mma, pv_mma, q_layout, kv_layout).launch(
        grid=[1, 1, 1], block=[128 * WARPGROUPS, 1, 1]
    )


@functools.cache
def compile():
    out = make_fake_compact_tensor(
        Float32, (64 * HEAD_DIM * WARPGROUPS,), assumed_align=16
    )
    return cute.compile(launch, out, Int32(4))
