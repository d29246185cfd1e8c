# SPDX-License-Identifier: Apache-2.0
"""FMHA forward for sm100: head_dim 256, bf16, causal, 4 query heads per KV head,
a pair of CTAs per MMA.

By hand, as a generated file is to read: the model for the templates of sm100.

q:   [batch, seqlen_q, heads, 256] bf16
k:   [batch, seqlen_kv, heads / 4, 256] bf16
v:   [batch, seqlen_kv, heads / 4, 256] bf16
out: [batch, seqlen_q, heads, 256] bf16
lse: [batch, heads, seqlen_q] fp32, natural log
Query i sees key j when j <= i + seqlen_kv - seqlen_q. A row that sees no key is 0.

A CTA works on a query tile of 128 rows. The 2 CTAs of a cluster work on neighbouring query
tiles of a head, and an MMA on both: each CTA loads half of K's
rows and half of V's columns, and the leader, of rank 0, issues. What the MMA warp waits for is
in the leader and counts both CTAs; what it commits is told to both.
Roles: warps 0 to 3 turn S into P; warps 4 to 7 rescale and normalize O; warp 8 loads by TMA;
warp 9 owns the tensor memory and issues QK and PV; warp 10 stores O.
Pipelines (what fills a stage; what frees it):
  q      load -> mma            Q by TMA                commit, after QK of its last block
  kv     load -> mma            K, K, V, K, V, ... V    commit
  s      mma -> softmax         S of a block, commit    256 threads of softmax: P is in its place
  stats  softmax -> correction  a block's factor of O,  128 threads of correction
                                in the end the sum
  o      mma -> correction      O with a block, commit  256 threads of correction
  out    correction -> store    O in shared memory      the store warp
Shared memory: 231424 bytes per CTA, one CTA per SM. Tensor memory: 512 columns.
"""

import ctypes
import functools
import hashlib
import importlib.util
import math
import pathlib
import struct
import sys
import types
from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, Int64
from cutlass.cute import runtime
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, cpasync, tcgen05

SPEC = {
    "name": "sm100_d256_bf16_causal_gqa4_c2x1_cta2_lse",
    "arch": "sm100",
    "op": "fmha_fwd",
    "dtype": "bf16",
    "head_dim": {"qk": 256, "v": 256},
    "seqlen": {"q": "dynamic", "kv": "dynamic"},
    "q_per_kv": 4,
    "pack_gqa": False,
    "mask": "causal",
    "lse": True,
    "cluster": [2, 1],
    "multicast": "none",
    "cta_group": 2,
}
DTYPE = cutlass.BFloat16

# --- constants: chosen, by the spec or the plan
HEAD_DIM_QK = 256  # [elements]
HEAD_DIM_V = 256  # [elements]
Q_PER_KV = 4  # [query heads per KV head]
TILE_Q = 128  # [rows per CTA]
TILE_KV = 128  # [rows per stage]
KV_STAGES = 3  # [tiles of K or V]
CLUSTER_SIZE = 2  # [CTAs: query tiles of one head]
SMS_PER_HEAD = 4  # [SMs that work on a head at a time]
POLYNOMIAL_COLUMNS = 4  # [of EX2_GROUP: exp2 by FFMA2 where nothing is masked]
SOFTMAX_REGS = 256  # [per thread]
CORRECTION_REGS = 160  # [per thread]
# --- constants: derived
OTHER_REGS = (
    88  # [per thread] = 65536 // 384 // 8 * 8 * 3 - SOFTMAX_REGS - CORRECTION_REGS
)
CORRECTION_WARP = 4  # [the first of four]
LOAD_WARP = 8  # = CORRECTION_WARP + 4
MMA_WARP = 9  # = CORRECTION_WARP + 5
STORE_WARP = 10  # = CORRECTION_WARP + 6
THREADS = 384  # [per CTA]
Q_STAGES = 1  # [tiles]
S_STAGES = 2  # [blocks]
O_STAGES = 1  # [tiles]
MMA_ROWS = 256  # [of both CTAs] = 128 * CLUSTER_SIZE
Q_TX_BYTES = 131072  # [bytes per stage of both CTAs] = MMA_ROWS * HEAD_DIM_QK * 2
KV_TX_BYTES = 65536  # [bytes per stage of both CTAs] = TILE_KV * HEAD_DIM_QK * 2
QK_TILER = (256, 128, 256)  # [M, N, K] = (MMA_ROWS, TILE_KV, HEAD_DIM_QK)
PV_TILER = (256, 256, 128)  # [M, N, K] = (MMA_ROWS, HEAD_DIM_V, TILE_KV)
Q_RELEASES = 1  # [commits that free a stage]
KV_RELEASES = 1  # [commits that free a stage]
S_RELEASES = 256  # [threads: softmax] = 128 * CLUSTER_SIZE
O_RELEASES = 256  # [threads: correction] = 128 * CLUSTER_SIZE
# --- constants: tensor memory [columns of 32 bits]
S_COLUMNS = 128  # = TILE_KV
P_COLUMNS = 64  # [of S, from its first on] = TILE_KV // 2
O_COLUMNS = 256  # = HEAD_DIM_V
O_FIRST = 256  # = S_STAGES * S_COLUMNS
TMEM_COLUMNS = 512  # = 2 ** math.ceil(math.log2(O_FIRST + O_COLUMNS))
COLUMNS_AT_ONCE = 32  # [of a lane: a load or store]
# --- constants: of the architecture
WARP_THREADS = 32
WARPGROUP_THREADS = 128
TMEM_LANE = 65536  # [columns from a lane to the next]
TMEM_THREADS = 288  # [threads: who uses it] = 32 * (MMA_WARP + 1) - 32
TMEM_ALIGN = 16  # [bytes: of an address that tcgen05.alloc writes]
TMEM_BARRIER = 1  # [named barrier]
SMEM_ALIGN = 1024  # [bytes: of a swizzled tile]
VECTOR_BITS = 128  # [of a store to shared memory]
VECTOR = 8  # [elements] = VECTOR_BITS // 16
TMA_ALIGN = 16  # [bytes: of an address]
STRIDE_ELEMENTS = 8  # [elements: TMA strides are multiples] = TMA_ALIGN // 2
COMPUTE_CAPABILITY = 10  # [major]
DLPACK_CUDA = 2  # [DLPack device type]
# --- constants: of the method
RESCALE_SLACK = 8.0  # [log2: P stays below 2^8]
EX2_GROUP = 16  # [columns]
EX2_LEAST = -126.0  # [log2: of what the polynomial takes]
EX2_POLYNOMIAL = (0.05517167, 0.24261113, 0.69326097, 0.99992806)  # [to 8e-5]
TO_INTEGER = 12582912.0  # [added, it rounds to an integer] = 1.5 * 2**23
EXPONENT_BIT = 23  # [of a float, the lowest]
FAR_REFERENCE = 16777216.0  # [log2: fp32 rounds to more than 1 beyond] = 2.0**24
LOG2_E = 1.4426950408889634  # = 1 / math.log(2)
LN_2 = 0.6931471805599453  # = math.log(2)


@cute.struct
class SharedStorage:
    """Full and empty barriers, where the tensor memory is, then the tiles."""

    q_mbar: cute.struct.MemRange[Int64, 2 * Q_STAGES]
    kv_mbar: cute.struct.MemRange[Int64, 2 * KV_STAGES]
    s_mbar: cute.struct.MemRange[Int64, 2 * S_STAGES]
    stats_mbar: cute.struct.MemRange[Int64, 2 * S_STAGES]
    o_mbar: cute.struct.MemRange[Int64, 2]
    out_mbar: cute.struct.MemRange[Int64, 2 * O_STAGES]
    tmem_address: Int32
    sStats: cute.struct.MemRange[Float32, TILE_Q * S_STAGES]
    sQ: cute.struct.Align[cute.struct.MemRange[DTYPE, TILE_Q * HEAD_DIM_QK], SMEM_ALIGN]
    sKV: cute.struct.Align[
        cute.struct.MemRange[DTYPE, TILE_KV * HEAD_DIM_QK // CLUSTER_SIZE * KV_STAGES],
        SMEM_ALIGN,
    ]
    sO: cute.struct.Align[cute.struct.MemRange[DTYPE, TILE_Q * HEAD_DIM_V], SMEM_ALIGN]


class Tma(NamedTuple):
    """A TMA descriptor and the coordinate tensor it goes with."""

    atom: cute.CopyAtom
    tensor: cute.Tensor  # (seqlen, head_dim, heads, batch); V: head_dim first


class Tiles(NamedTuple):
    """Tiles in shared memory; K and V take turns in the stages of one ring."""

    sQ: cute.Tensor  # (MMA, MMA_M, MMA_K, Q_STAGES)
    sK: cute.Tensor  # (MMA, MMA_N, MMA_K, KV_STAGES)
    sV: cute.Tensor  # (MMA, MMA_N, MMA_K, KV_STAGES)
    sO: cute.Tensor  # (TILE_Q, HEAD_DIM_V, O_STAGES)
    sStats: cute.Tensor  # (TILE_Q, S_STAGES) fp32


@dataclass(frozen=True)  # not a NamedTuple: the DSL would carry it through loops
class Pipelines:
    """Who hands what to whom: see the top of this file."""

    q: pipeline.PipelineTmaUmma
    kv: pipeline.PipelineTmaUmma
    s: pipeline.PipelineUmmaAsync
    stats: pipeline.PipelineAsync
    o: pipeline.PipelineUmmaAsync
    out: pipeline.PipelineAsync


class Problem(NamedTuple):
    """Sizes that are known at run time only."""

    seqlen_q: Int32
    seqlen_kv: Int32
    q_tiles: Int32  # clusters along a head
    heads: cute.FastDivmodDivisorV2  # query heads
    num_tiles: Int32  # of all clusters
    section_heads: cute.FastDivmodDivisorV2  # of all batches
    section_tiles: cute.FastDivmodDivisorV2
    last_section: Int32
    last_heads: cute.FastDivmodDivisorV2  # that are left for the last section


def qk_mma():
    """S = Q K^T: both operands K-major in shared memory."""
    return sm100.make_trivial_tiled_mma(
        DTYPE,
        DTYPE,
        OperandMajorMode.K,
        OperandMajorMode.K,
        Float32,
        tcgen05.CtaGroup.TWO,
        QK_TILER[:2],
    )


def pv_mma():
    """O = P V: P in tensor memory, V N-major in shared memory."""
    return sm100.make_trivial_tiled_mma(
        DTYPE,
        DTYPE,
        OperandMajorMode.K,
        OperandMajorMode.MN,
        Float32,
        tcgen05.CtaGroup.TWO,
        PV_TILER[:2],
        tcgen05.OperandSource.TMEM,
    )


def cluster_layout():
    """(V, M, N, K) -> rank in the cluster: the CTAs along V share an MMA."""
    return cute.make_layout((CLUSTER_SIZE, 1, 1, 1))


def o_layout(stages):
    """Swizzled shared-memory layout of O: (TILE_Q, HEAD_DIM_V, stages)."""
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, DTYPE)
    return cute.tile_to_shape(atom, (TILE_Q, HEAD_DIM_V, stages), order=(0, 1, 2))


@cute.jit
def launch(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    softmax_scale: Float32,
    sm_count: Int32,
    stream: cuda.CUstream,
):
    """Builds the TMA descriptors and launches one persistent CTA per SM."""
    batch, seqlen_q, heads, _ = q.shape
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
    store = cpasync.CopyBulkTensorTileS2GOp()
    tma_a, tma_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
    q_layout = sm100.make_smem_layout_a(qk_mma(), QK_TILER, DTYPE, 1)
    k_layout = sm100.make_smem_layout_b(qk_mma(), QK_TILER, DTYPE, 1)
    v_layout = sm100.make_smem_layout_b(pv_mma(), PV_TILER, DTYPE, 1)
    out_layout = cute.select(o_layout(1), mode=[0, 1])
    tile = (TILE_Q, HEAD_DIM_V)
    mQ, mK, mO = (reorder(x, [1, 3, 2, 0]) for x in (q, k, out))
    mV = reorder(v, [3, 1, 2, 0])
    divisor = cute.FastDivmodDivisorV2
    q_tiles = cute.ceil_div(seqlen_q, TILE_Q * CLUSTER_SIZE)
    num_tiles = q_tiles * heads * batch
    clusters = cutlass.min(sm_count // CLUSTER_SIZE, num_tiles)
    section_heads = cutlass.min(cutlass.max(sm_count // SMS_PER_HEAD, 1), heads * batch)
    last_section = (heads * batch - 1) // section_heads
    fmha_kernel(
        Tma(*tma_a(load, mQ, q_layout, QK_TILER, qk_mma())),
        Tma(*tma_b(load, mK, k_layout, QK_TILER, qk_mma())),
        Tma(*tma_b(load, mV, v_layout, PV_TILER, pv_mma())),
        Tma(*cpasync.make_tiled_tma_atom(store, mO, out_layout, tile)),
        lse,
        softmax_scale,
        Problem(
            seqlen_q=seqlen_q,
            seqlen_kv=k.shape[1],
            q_tiles=q_tiles,
            heads=divisor(heads),
            num_tiles=num_tiles,
            section_heads=divisor(section_heads),
            section_tiles=divisor(section_heads * q_tiles),
            last_section=last_section,
            last_heads=divisor(heads * batch - last_section * section_heads),
        ),
    ).launch(
        grid=[clusters * CLUSTER_SIZE, 1, 1],
        cluster=[CLUSTER_SIZE, 1, 1],
        block=[THREADS, 1, 1],
        min_blocks_per_mp=1,
        stream=stream,
    )


def reorder(tensor, modes):
    """The tensor with its modes in this order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))


@cute.kernel
def fmha_kernel(
    q: Tma,
    k: Tma,
    v: Tma,
    out: Tma,
    mLSE: cute.Tensor,
    softmax_scale: Float32,
    problem: Problem,
):
    """Device entry: barriers, then one branch per role."""
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp_idx == LOAD_WARP:
        for operand in (q, k, v, out):
            cpasync.prefetch_descriptor(operand.atom)
    storage = cutlass.memory.SmemAllocator().allocate(SharedStorage)
    q_layout = sm100.make_smem_layout_a(qk_mma(), QK_TILER, DTYPE, Q_STAGES)
    k_layout = sm100.make_smem_layout_b(qk_mma(), QK_TILER, DTYPE, KV_STAGES)
    v_layout = sm100.make_smem_layout_b(pv_mma(), PV_TILER, DTYPE, KV_STAGES)
    so_layout = o_layout(O_STAGES)
    tiles = Tiles(
        sQ=storage.sQ.get_tensor(q_layout.outer, swizzle=q_layout.inner),
        sK=storage.sKV.get_tensor(k_layout.outer, swizzle=k_layout.inner),
        sV=storage.sKV.get_tensor(v_layout.outer, swizzle=v_layout.inner),
        sO=storage.sO.get_tensor(so_layout.outer, swizzle=so_layout.inner),
        sStats=storage.sStats.get_tensor(cute.make_layout((TILE_Q, S_STAGES))),
    )
    pipes = Pipelines(
        q=tma_to_mma(storage.q_mbar, Q_STAGES, Q_TX_BYTES, Q_RELEASES),
        kv=tma_to_mma(storage.kv_mbar, KV_STAGES, KV_TX_BYTES, KV_RELEASES),
        s=mma_to_threads(storage.s_mbar, S_STAGES, S_RELEASES),
        stats=threads_to_threads(storage.stats_mbar, S_STAGES, WARPGROUP_THREADS),
        o=mma_to_threads(storage.o_mbar, 1, O_RELEASES),
        out=threads_to_threads(storage.out_mbar, O_STAGES, WARP_THREADS),
    )
    pipeline.pipeline_init_arrive(cluster_shape_mn=(CLUSTER_SIZE, 1), is_relaxed=True)
    pipeline.pipeline_init_wait(cluster_shape_mn=(CLUSTER_SIZE, 1))

    tmem_address = storage.tmem_address
    if warp_idx < CORRECTION_WARP:
        cute.arch.setmaxregister_increase(SOFTMAX_REGS)
        scale_log2 = softmax_scale * LOG2_E
        softmax(mLSE, tiles.sStats, pipes, tmem_address, scale_log2, problem)
    elif warp_idx < LOAD_WARP:
        cute.arch.setmaxregister_decrease(CORRECTION_REGS)
        correct(tiles, pipes, tmem_address, problem)
    else:
        cute.arch.setmaxregister_decrease(OTHER_REGS)
        if warp_idx == LOAD_WARP:
            load_qkv(q, k, v, tiles, pipes, problem)
        if warp_idx == MMA_WARP:
            multiply(tiles, pipes, tmem_address, problem)
        if warp_idx == STORE_WARP:
            store_o(out, tiles.sO, pipes, problem)
    # Nobody signals the other CTA or touches the tensor memory any more.
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if warp_idx == MMA_WARP:
        cute.arch.dealloc_tmem(address_of(tmem_address), TMEM_COLUMNS, is_two_cta=True)


fmha_kernel.set_name_prefix(
    SPEC["name"], remove_cutlass_symbol=True, keep_mangled_name=False
)


def tma_to_mma(barriers, stages, tx_bytes, releases):
    """A ring: `tx_bytes` fill a stage, `releases` commits free it."""
    return pipeline.PipelineTmaUmma.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, releases),
        tx_count=tx_bytes,
        cta_layout_vmnk=cluster_layout(),
        defer_sync=True,
    )


def mma_to_threads(barriers, stages, releases):
    """A ring: a commit fills a stage, `releases` threads free it."""
    return pipeline.PipelineUmmaAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, releases),
        cta_layout_vmnk=cluster_layout(),
        defer_sync=True,
    )


def threads_to_threads(barriers, stages, releases):
    """A ring: a warpgroup fills a stage, `releases` threads free it."""
    warpgroup = pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPGROUP_THREADS)
    return pipeline.PipelineAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=stages,
        producer_group=warpgroup,
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, releases),
        defer_sync=True,
    )


def producer_state(stages):
    """A pipeline's state before anything was produced."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages):
    """A pipeline's state before anything was consumed."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


@cute.jit
def load_qkv(q: Tma, k: Tma, v: Tma, tiles: Tiles, pipes: Pipelines, problem: Problem):
    """Producer, warp 8: Q, then K and V in the MMA warp's order: K is a block ahead.

    KV blocks come last first, as the consumers take them.
    """
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    thr_qk, thr_pv = qk_mma().get_slice(rank), pv_mma().get_slice(rank)
    q_state, kv_state = producer_state(Q_STAGES), producer_state(KV_STAGES)
    wave = Int32(0)
    q_tile, head, batch, more = locate(wave, problem)
    while more:
        blocks = count_blocks(
            (q_tile // CLUSTER_SIZE + 1) * TILE_Q * CLUSTER_SIZE, problem
        )
        head_kv = head // Q_PER_KV
        # The coordinate 0 fixes head_dim; the one mode left goes along the sequence.
        mQ = q.tensor[None, None, head, batch]
        mK = k.tensor[None, None, head_kv, batch]
        mV = v.tensor[None, None, head_kv, batch]
        gQ = thr_qk.partition_A(cute.local_tile(mQ, (MMA_ROWS, HEAD_DIM_QK), (None, 0)))
        gK = thr_qk.partition_B(cute.local_tile(mK, (TILE_KV, HEAD_DIM_QK), (None, 0)))
        gV = thr_pv.partition_B(cute.local_tile(mV, (HEAD_DIM_V, TILE_KV), (0, None)))
        tQsQ, tQgQ = partition_tiles(q.atom, tiles.sQ, gQ)
        tKsK, tKgK = partition_tiles(k.atom, tiles.sK, gK)
        tVsV, tVgV = partition_tiles(v.atom, tiles.sV, gV)
        load_stage(pipes.q, q_state, q.atom, tQgQ[None, q_tile // CLUSTER_SIZE], tQsQ)
        q_state.advance()
        for i in cutlass.range(blocks + 1, unroll=1):
            block = blocks - 1 - i
            if block >= 0:
                load_stage(pipes.kv, kv_state, k.atom, tKgK[None, block], tKsK)
                kv_state.advance()
            if i > 0:
                load_stage(pipes.kv, kv_state, v.atom, tVgV[None, block + 1], tVsV)
                kv_state.advance()
        wave += 1
        q_tile, head, batch, more = locate(wave, problem)
    # The MMAs still signal these barriers: stay until every stage is free.
    pipes.q.producer_tail(q_state)
    pipes.kv.producer_tail(kv_state)


def partition_tiles(atom, smem, gmem):
    """TMA views: smem (TMA, stage), gmem (TMA, tile along the sequence)."""
    smem, gmem = cute.group_modes(smem, 0, 3), cute.group_modes(gmem, 0, 3)
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), smem, gmem)


def load_stage(pipe, state, atom, gmem, smem):
    """Waits until a stage is free, arms its full barrier and issues its load."""
    pipe.producer_acquire(state)
    cute.copy(
        atom,
        gmem,
        smem[None, state.index],
        tma_bar_ptr=pipe.producer_get_barrier(state),
    )


class Operands(NamedTuple):
    """What is multiplied."""

    tSrQ: cute.Tensor  # (MMA, MMA_M, MMA_K, Q_STAGES)
    tSrK: cute.Tensor  # (MMA, MMA_N, MMA_K, KV_STAGES)
    tOrV: cute.Tensor  # (MMA, MMA_N, MMA_K, KV_STAGES)
    tStS: cute.Tensor  # (MMA, MMA_M, MMA_N, S_STAGES)
    tOrP: cute.Tensor  # (MMA, MMA_M, MMA_K), of the first stage
    tOtO: cute.Tensor  # (MMA, MMA_M, MMA_N)


def make_operands(tiles, tmem):
    """Descriptors of the tiles and tensors over the tensor memory; P begins where S does."""
    qk, pv = qk_mma(), pv_mma()
    s_layout = qk.make_fragment_C(qk.partition_shape_C(QK_TILER[:2])).layout
    o_layout = pv.make_fragment_C(pv.partition_shape_C(PV_TILER[:2])).layout
    p_smem = sm100.make_smem_layout_a(pv, PV_TILER, DTYPE, 1).outer
    p_fragment = pv.make_fragment_A(cute.make_tensor(tmem, p_smem))
    p_layout = p_fragment[None, None, None, 0].layout
    s_stages = cute.make_layout(S_STAGES, stride=S_COLUMNS)
    return Operands(
        tSrQ=qk.make_fragment_A(tiles.sQ),
        tSrK=qk.make_fragment_B(tiles.sK),
        tOrV=pv.make_fragment_B(tiles.sV),
        tStS=cute.make_tensor(tmem, cute.append(s_layout, s_stages)),
        tOrP=cute.make_tensor(cute.recast_ptr(tmem, dtype=DTYPE), p_layout),
        tOtO=cute.make_tensor(tmem + O_FIRST, o_layout),
    )


@cute.jit
def multiply(tiles: Tiles, pipes: Pipelines, tmem_address, problem: Problem):
    """Warp 9: allocates the tensor memory; the leader's issues QK and PV for both CTAs.

    QK of a block goes before PV of the one before it, so that softmax of one runs beside the MMAs
    of the other. The MMAs execute in order: QK may overwrite P once its PV is issued.
    """
    cute.arch.alloc_tmem(TMEM_COLUMNS, tmem_address.ptr, is_two_cta=True)
    cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
    mma = make_operands(tiles, tensor_memory(tmem_address))
    q_state, kv_state = consumer_state(Q_STAGES), consumer_state(KV_STAGES)
    s_state, o_state = producer_state(S_STAGES), producer_state(1)
    p_state = consumer_state(S_STAGES)  # of s: what comes back is P, in the place of S
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    wave = Int32(0)
    q_tile, _, _, more = locate(wave, problem)
    while more & (rank == 0):
        blocks = count_blocks(
            (q_tile // CLUSTER_SIZE + 1) * TILE_Q * CLUSTER_SIZE, problem
        )
        # 1. QK of the first block
        pipes.q.consumer_wait(q_state)
        pipes.kv.consumer_wait(kv_state)
        issue_qk(mma, s_state.index, kv_state.index)
        pipes.s.producer_commit(s_state)
        s_state.advance()
        pipes.kv.consumer_release(kv_state)
        kv_state.advance()
        # 2. QK of each next block, then PV of the one before it
        for i in cutlass.range(blocks - 1, unroll=1):
            pipes.kv.consumer_wait(kv_state)
            issue_qk(mma, s_state.index, kv_state.index)
            pipes.s.producer_commit(s_state)
            s_state.advance()
            pipes.kv.consumer_release(kv_state)
            kv_state.advance()
            pipes.kv.consumer_wait(kv_state)
            pipes.s.producer_acquire(p_state)
            pipes.o.producer_acquire(o_state)
            issue_pv(mma, p_state.index, kv_state.index, i > 0)
            pipes.o.producer_commit(o_state)
            p_state.advance()
            o_state.advance()
            pipes.kv.consumer_release(kv_state)
            kv_state.advance()
        pipes.q.consumer_release(q_state)
        q_state.advance()
        # 3. PV of the last block
        pipes.kv.consumer_wait(kv_state)
        pipes.s.producer_acquire(p_state)
        pipes.o.producer_acquire(o_state)
        issue_pv(mma, p_state.index, kv_state.index, blocks > 1)
        pipes.o.producer_commit(o_state)
        p_state.advance()
        o_state.advance()
        pipes.kv.consumer_release(kv_state)
        kv_state.advance()
        wave += 1
        q_tile, _, _, more = locate(wave, problem)


@cute.jit
def issue_qk(mma: Operands, s_stage: Int32, stage: Int32):
    """Issues S = Q K^T of a block."""
    qk, tStS = qk_mma(), mma.tStS[None, None, None, s_stage]
    for k in cutlass.range_constexpr(cute.size(mma.tSrQ, mode=[2])):
        qk.set(tcgen05.Field.ACCUMULATE, k > 0)
        a, b = mma.tSrQ[None, None, k, 0], mma.tSrK[None, None, k, stage]
        cute.gemm(qk, tStS, a, b, tStS)


@cute.jit
def issue_pv(mma: Operands, s_stage: Int32, stage: Int32, accumulate):
    """Issues O += P V of a block, or O = P V."""
    pv, place = pv_mma(), mma.tStS[None, None, None, s_stage].iterator
    tOrP = cute.make_tensor(cute.recast_ptr(place, dtype=DTYPE), mma.tOrP.layout)
    for k in cutlass.range_constexpr(cute.size(tOrP, mode=[2])):
        pv.set(tcgen05.Field.ACCUMULATE, accumulate if k == 0 else True)
        a, b = tOrP[None, None, k], mma.tOrV[None, None, k, stage]
        cute.gemm(pv, mma.tOtO, a, b, mma.tOtO)


class Row(NamedTuple):
    """Softmax statistics of a thread's row: P = exp2((S - reference) * scale_log2)."""

    reference: Float32
    sum: Float32  # of P


@cute.jit
def softmax(
    mLSE: cute.Tensor,
    sStats: cute.Tensor,
    pipes: Pipelines,
    tmem_address,
    scale_log2: Float32,
    problem: Problem,
):
    """Warps 0 to 3: a thread owns a row, from S to P."""
    lane = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    sStat = sStats[lane, None]
    tmem = tensor_memory(tmem_address)
    s_state, stats_state = consumer_state(S_STAGES), producer_state(S_STAGES)
    wave = Int32(0)
    q_tile, head, batch, more = locate(wave, problem)
    while more:
        first_row = q_tile * TILE_Q
        blocks = count_blocks(
            (q_tile // CLUSTER_SIZE + 1) * TILE_Q * CLUSTER_SIZE, problem
        )
        masked = count_masked_blocks(first_row, blocks, problem)
        row = Row(reference=-Float32.inf, sum=Float32(0.0))
        # 1. blocks that the diagonal or the end of K crosses
        for i in cutlass.range(masked, unroll=1):
            pipes.s.consumer_wait(s_state)
            place = tmem + s_state.index * S_COLUMNS
            rS = load_lane(tmem_copy(tcgen05.Ld32x32bOp, place, S_COLUMNS), S_COLUMNS)
            mask_row(rS, first_row + lane, blocks - 1 - i, problem)
            row = retire_block(rS, row, sStat, pipes, stats_state, scale_log2, 0)
            store_p = tmem_copy(tcgen05.St32x32bOp, place, P_COLUMNS)
            store_lane(store_p, pack(rS))
            pipes.s.consumer_release(s_state)
            s_state.advance()
            stats_state.advance()
        # 2. blocks that every row sees whole
        for _ in cutlass.range(masked, blocks, unroll=1):
            pipes.s.consumer_wait(s_state)
            place = tmem + s_state.index * S_COLUMNS
            rS = load_lane(tmem_copy(tcgen05.Ld32x32bOp, place, S_COLUMNS), S_COLUMNS)
            row = retire_block(
                rS, row, sStat, pipes, stats_state, scale_log2, POLYNOMIAL_COLUMNS
            )
            store_p = tmem_copy(tcgen05.St32x32bOp, place, P_COLUMNS)
            store_lane(store_p, pack(rS))
            pipes.s.consumer_release(s_state)
            s_state.advance()
            stats_state.advance()
        hand_over(row.sum, sStat, pipes, stats_state)
        stats_state.advance()
        if first_row + lane < problem.seqlen_q:
            lse = row.reference * scale_log2 + cute.math.log2(row.sum, fastmath=True)
            mLSE[batch, head, first_row + lane] = lse * LN_2
        wave += 1
        q_tile, head, batch, more = locate(wave, problem)


@cute.jit
def hand_over(value: Float32, sStat: cute.Tensor, pipes: Pipelines, state):
    """Passes a row's factor or sum to the correction group."""
    pipes.stats.producer_acquire(state)
    sStat[state.index] = value
    pipes.stats.producer_commit(state)


@cute.jit
def retire_block(
    rS: cute.Tensor,
    row: Row,
    sStat: cute.Tensor,
    pipes: Pipelines,
    stats_state,
    scale_log2: Float32,
    polynomial_columns: cutlass.Constexpr,
):
    """S of a block becomes P, in place; returns the row's statistics with this block.

    The correction group has the factor, 1 as a rule, before the exponentials.
    """
    reference = new_reference(rS, row.reference, scale_log2)
    factor = cute.math.exp2((row.reference - reference) * scale_log2, fastmath=True)
    # Both are -inf while the row has seen no key.
    factor = cutlass.select_(row.reference == reference, Float32(1.0), factor)
    hand_over(factor, sStat, pipes, stats_state)
    block_sum = exponentiate(rS, reference, scale_log2, polynomial_columns)
    return Row(reference, row.sum * factor + block_sum)


@cute.jit
def mask_row(rS: cute.Tensor, row: Int32, block: Int32, problem: Problem):
    """S = -inf where the row does not see the key."""
    seen = cutlass.min(
        row + 1 + problem.seqlen_kv - problem.seqlen_q, problem.seqlen_kv
    )
    seen = seen - block * TILE_KV
    for column in cutlass.range_constexpr(S_COLUMNS):
        rS[column] = cutlass.select_(column < seen, rS[column], -Float32.inf)


@cute.jit
def new_reference(rS: cute.Tensor, reference: Float32, scale_log2: Float32):
    """The row's maximum, once it exceeds the reference by RESCALE_SLACK; else the reference.

    Until then P grows up to 2^RESCALE_SLACK and O stays as it is.
    """
    chains = [rS[column] for column in range(4)]
    for column in cutlass.range_constexpr(4, S_COLUMNS):
        chains[column % 4] = cute.arch.fmax(chains[column % 4], rS[column])
    low, high = cute.arch.fmax(*chains[0:2]), cute.arch.fmax(*chains[2:4])
    largest = cute.arch.fmax(low, high)
    exceeds = (largest - reference) * scale_log2 > RESCALE_SLACK
    return cutlass.select_(exceeds, largest, reference)


@cute.jit
def exponentiate(
    rS: cute.Tensor,
    reference: Float32,
    scale_log2: Float32,
    polynomial_columns: cutlass.Constexpr,
):
    """S becomes P = exp2((S - reference) * scale_log2), in place; returns its sum.

    One FFMA2 for two elements, exact while the scaled reference is. Beyond FAR_REFERENCE its
    rounding alone could overflow P: the reference is then subtracted before scaling.
    """
    reference = cutlass.select_(reference == -Float32.inf, Float32(0.0), reference)
    shift = -reference * scale_log2
    if (shift > FAR_REFERENCE) | (shift < -FAR_REFERENCE):
        for column in cutlass.range_constexpr(S_COLUMNS):
            rS[column] = rS[column] - reference
        shift = Float32(0.0)
    scales, shifts = (scale_log2, scale_log2), (shift, shift)
    sums = (Float32(0.0), Float32(0.0))
    for column in cutlass.range_constexpr(0, S_COLUMNS, 2):
        pair = (rS[column], rS[column + 1])
        pair = cute.arch.fma_packed_f32x2(pair, scales, shifts)
        pair = exp2_pair(pair, column % EX2_GROUP < polynomial_columns)
        rS[column], rS[column + 1] = pair
        sums = cute.arch.add_packed_f32x2(sums, pair)
    return sums[0] + sums[1]


def exp2_pair(pair, by_polynomial):
    """2^x of two floats, by the MUFU or by a polynomial: 2^x = 2^integer * 2^fraction.

    The polynomial's least is 2^EX2_LEAST, not 0, which a masked column needs.
    """
    if not by_polynomial:
        return tuple(cute.math.exp2(x, fastmath=True) for x in pair)
    fma, add = cute.arch.fma_packed_f32x2, cute.arch.add_packed_f32x2
    least = Float32(EX2_LEAST)
    pair = tuple(cute.arch.fmax(x, least, nan=True) for x in pair)  # a NaN stays
    rounded = add(pair, (TO_INTEGER, TO_INTEGER))  # the integer is in the low bits
    integers = add(rounded, (-TO_INTEGER, -TO_INTEGER))
    fractions = fma(integers, (-1.0, -1.0), pair)
    powers = (EX2_POLYNOMIAL[0], EX2_POLYNOMIAL[0])
    for coefficient in EX2_POLYNOMIAL[1:]:
        powers = fma(powers, fractions, (coefficient, coefficient))
    return tuple(map(add_to_exponent, powers, rounded))


def add_to_exponent(power, rounded):
    """power * 2^integer."""
    exponent = rounded.bitcast(Int32) << EXPONENT_BIT
    return (power.bitcast(Int32) + exponent).bitcast(Float32)


def pack(rS):
    """P in 16 bits, two to a register."""
    rP = lane_registers(P_COLUMNS)
    cute.recast_tensor(rP, DTYPE).store(rS.load().to(DTYPE))
    return rP


@cute.jit
def correct(tiles: Tiles, pipes: Pipelines, tmem_address, problem: Problem):
    """Warps 4 to 7: O, a row per thread, in the MMA warp's order."""
    lane = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    o_place = tensor_memory(tmem_address) + O_FIRST
    stats_state, o_state = consumer_state(S_STAGES), consumer_state(1)
    out_state = producer_state(O_STAGES)
    wave = Int32(0)
    q_tile, _, _, more = locate(wave, problem)
    while more:
        blocks = count_blocks(
            (q_tile // CLUSTER_SIZE + 1) * TILE_Q * CLUSTER_SIZE, problem
        )
        # 1. PV of the first block overwrites O
        take_over(tiles.sStats[lane, None], pipes, stats_state)
        stats_state.advance()
        # 2. between PV of a block and that of the next
        for _ in cutlass.range(blocks - 1, unroll=1):
            factor = take_over(tiles.sStats[lane, None], pipes, stats_state)
            stats_state.advance()
            pipes.o.consumer_wait(o_state)
            # The lanes of a warp are loaded and stored together.
            if cute.arch.vote_any_sync(factor != 1.0):
                rescale(o_place, factor)
            pipes.o.consumer_release(o_state)
            o_state.advance()
        # 3. O is complete
        row_sum = take_over(tiles.sStats[lane, None], pipes, stats_state)
        stats_state.advance()
        # A row that saw no key has the sum 0 and stays 0.
        row_sum = cutlass.select_(row_sum == 0.0, Float32(1.0), row_sum)
        pipes.out.producer_acquire(out_state)
        pipes.o.consumer_wait(o_state)
        sO_row = tiles.sO[lane, None, out_state.index]
        normalize(o_place, cute.arch.rcp_approx(row_sum), sO_row)
        pipes.o.consumer_release(o_state)
        o_state.advance()
        # The store warp hands these rows to TMA.
        cute.arch.fence_proxy("async.shared", space="cta")
        pipes.out.producer_commit(out_state)
        out_state.advance()
        wave += 1
        q_tile, _, _, more = locate(wave, problem)


@cute.jit
def take_over(sStat: cute.Tensor, pipes: Pipelines, state):
    """A row's factor or sum, from softmax."""
    pipes.stats.consumer_wait(state)
    value = sStat[state.index]
    pipes.stats.consumer_release(state)
    return value


def rescale(o_place, factor):
    """Multiplies this thread's row of O, in tensor memory."""
    for part in range(0, O_COLUMNS, COLUMNS_AT_ONCE):
        rO = load_scaled(o_place + part, factor)
        copy, place = tmem_copy(tcgen05.St32x32bOp, o_place + part, COLUMNS_AT_ONCE)
        cute.copy(copy, rO, place)
    cute.arch.fence_view_async_tmem_store()


def normalize(o_place, factor, sO_row):
    """Multiplies this thread's row of O on its way to shared memory."""
    copy = cute.make_copy_atom(CopyUniversalOp(), DTYPE, num_bits_per_copy=VECTOR_BITS)
    for part in range(O_COLUMNS // COLUMNS_AT_ONCE):
        rO = load_scaled(o_place + part * COLUMNS_AT_ONCE, factor)
        values = cute.make_rmem_tensor(COLUMNS_AT_ONCE, DTYPE)
        values.store(rO.load().reshape(COLUMNS_AT_ONCE).to(DTYPE))
        sO_part = cute.local_tile(sO_row, (COLUMNS_AT_ONCE,), (part,))
        vectors = (cute.zipped_divide(x, (VECTOR,)) for x in (values, sO_part))
        cute.copy(copy, *vectors)


def load_scaled(place, factor):
    """A part of this thread's row of O, multiplied."""
    load = tmem_copy(tcgen05.Ld32x32bOp, place, COLUMNS_AT_ONCE)
    rO = load_lane(load, COLUMNS_AT_ONCE)
    for column in range(0, COLUMNS_AT_ONCE, 2):
        pair = (rO[column], rO[column + 1])
        pair = cute.arch.mul_packed_f32x2(pair, (factor, factor))
        rO[column], rO[column + 1] = pair
    return rO


@cute.jit
def store_o(out: Tma, sO: cute.Tensor, pipes: Pipelines, problem: Problem):
    """Warp 10: O from shared memory; TMA drops rows beyond the end."""
    state = consumer_state(O_STAGES)
    sO = cute.group_modes(sO, 0, 2)
    wave = Int32(0)
    q_tile, head, batch, more = locate(wave, problem)
    while more:
        mO = out.tensor[None, None, head, batch]
        gO = cute.local_tile(mO, (TILE_Q, HEAD_DIM_V), (None, 0))
        gO, one = cute.group_modes(gO, 0, 2), cute.make_layout(1)
        tOsO, tOgO = cpasync.tma_partition(out.atom, 0, one, sO, gO)
        pipes.out.consumer_wait(state)
        cute.copy(out.atom, tOsO[None, state.index], tOgO[None, q_tile])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        pipes.out.consumer_release(state)
        state.advance()
        wave += 1
        q_tile, head, batch, more = locate(wave, problem)


def tensor_memory(tmem_address):
    """Where the tensor memory begins, once warp 9 has allocated it."""
    cute.arch.barrier(barrier_id=TMEM_BARRIER, number_of_threads=TMEM_THREADS)
    return address_of(tmem_address)


def address_of(tmem_address):
    """What tcgen05.alloc wrote, as a pointer."""
    return cute.arch.retrieve_tmem_ptr(Float32, TMEM_ALIGN, tmem_address.ptr)


def tmem_copy(op, place, columns):
    """This thread's lane, from `place` on: (copy, its view of the memory)."""
    layout = cute.make_layout((TILE_Q, columns), stride=(TMEM_LANE, 1))
    tensor = cute.make_tensor(place, layout)
    atom = cute.make_copy_atom(op(tcgen05.Repetition.x32), Float32)
    copy = tcgen05.make_tmem_copy(atom, tensor)
    thread = copy.get_slice(cute.arch.thread_idx()[0] % WARPGROUP_THREADS)
    is_load = op is tcgen05.Ld32x32bOp
    return thread, (thread.partition_S if is_load else thread.partition_D)(tensor)


def lane_registers(columns):
    """Registers for `columns` of a lane, shaped as the copies take them."""
    shape = (((COLUMNS_AT_ONCE, 1), 1), 1, columns // COLUMNS_AT_ONCE)
    return cute.make_rmem_tensor(shape, Float32)


def load_lane(load, columns):
    """Columns of this thread's lane, which are in registers when this returns."""
    copy, place = load
    registers = lane_registers(columns)
    cute.copy(copy, place, registers)
    cute.arch.fence_view_async_tmem_load()
    return registers


def store_lane(store, registers):
    """Columns of this thread's lane, which are in tensor memory when this returns."""
    copy, place = store
    cute.copy(copy, registers, place)
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def locate(wave: Int32, problem: Problem):
    """This CTA's (query tile, query head, batch) of a wave, and whether it has one."""
    width = cute.arch.grid_dim()[0] // CLUSTER_SIZE
    place = cute.arch.block_idx()[0] // CLUSTER_SIZE
    # Odd waves go backwards, so that long and short tiles add up alike.
    place = cutlass.select_(wave % 2 == 0, place, width - 1 - place)
    tile = wave * width + place
    # The heads of a section find K and V in L2; their longest tiles come first.
    section, place = divmod(tile, problem.section_tiles)
    back, pair = divmod(place, problem.section_heads)
    last_back, last_pair = divmod(place, problem.last_heads)
    last = section == problem.last_section
    q_tile = problem.q_tiles - 1 - cutlass.select_(last, last_back, back)
    pair = (
        cutlass.select_(last, last_pair, pair) + section * problem.section_heads.divisor
    )
    batch, head = divmod(pair, problem.heads)
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    q_tile = q_tile * CLUSTER_SIZE + rank
    return q_tile, head, batch, tile < problem.num_tiles


@cute.jit
def count_blocks(end_row: Int32, problem: Problem):
    """KV blocks that the rows before end_row see, at least one."""
    seen = end_row + problem.seqlen_kv - problem.seqlen_q
    return cutlass.max(cute.ceil_div(cutlass.min(problem.seqlen_kv, seen), TILE_KV), 1)


@cute.jit
def count_masked_blocks(first_row: Int32, blocks: Int32, problem: Problem):
    """Of the blocks, those that not all rows from first_row on see whole."""
    seen = first_row + 1 + problem.seqlen_kv - problem.seqlen_q
    seen = cutlass.max(cutlass.min(problem.seqlen_kv, seen), 0)
    return blocks - seen // TILE_KV


HAS_FFI = importlib.util.find_spec("tvm_ffi") is not None  # else calls take longer


@functools.cache
def compile():
    """Builds `launch` once per process; returns the bare callable, for hot paths."""
    path = pathlib.Path(__file__)
    if HAS_FFI and path.with_suffix(".o").exists():
        # `fmha-gen build --export` names the function after the whole text of this file.
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        exported = runtime.load_module(str(path.with_suffix(".o")), enable_tvm_ffi=True)
        try:
            return exported[f"{SPEC['name']}_{digest}"]
        except Exception as error:
            raise ImportError(f"{path}: its .o is of another text") from error
    numbers = (Float32(1.0), Int32(1), cuda.CUstream(0))
    options = "--enable-tvm-ffi" if HAS_FFI else ""
    run = cute.compile(launch, *arguments().values(), *numbers, options=options)
    return run.__tvm_ffi_object__() if HAS_FFI else run  # bare of keywords


@functools.cache
def arguments():
    """The tensors of `launch`, by name: sizes of one symbol are equal."""
    size, step, fake = cute.sym_int32, cute.sym_int64, runtime.make_fake_tensor
    batch, seqlen_q, heads = size(), size(), size()
    seqlen_kv, heads_kv = size(), size()

    def bshd(*shape):
        strides = (*(step(STRIDE_ELEMENTS) for _ in range(3)), 1)
        return fake(DTYPE, shape, strides, assumed_align=TMA_ALIGN)

    return {
        "q": bshd(batch, seqlen_q, heads, HEAD_DIM_QK),
        "k": bshd(batch, seqlen_kv, heads_kv, HEAD_DIM_QK),
        "v": bshd(batch, seqlen_kv, heads_kv, HEAD_DIM_V),
        "out": bshd(batch, seqlen_q, heads, HEAD_DIM_V),
        "lse": fake(Float32, (batch, heads, seqlen_q), (step(), step(), step())),
    }


def fmha(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    out=None,
    lse=None,
    stream=None,
):
    """Attention over DLPack tensors [batch, seqlen, heads, head_dim]; returns out.

    Strides are positive multiples of 8, but 1 along head_dim; addresses of 16 bytes.
    softmax_scale is 1 / sqrt(head_dim) by default. Torch inputs may leave out to us.
    lse, fp32 [batch, heads, seqlen_q], receives log(sum(exp(scaled scores))).
    stream, torch's or a raw handle, is torch's current one, else the default stream.
    Raises ValueError, naming the argument, before anything is launched.
    """
    torch = sys.modules.get("torch")
    torch = torch if torch and isinstance(q, torch.Tensor) else None
    if torch and q.ndim == 4:  # else q is refused
        b, s, h, _ = q.shape
        out = q.new_empty(b, s, h, HEAD_DIM_V) if out is None else out
        lse = q.new_empty(b, h, s, dtype=torch.float32) if lse is None else lse
    tensors = (q, k, v, out)
    tensors += (lse,)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(HEAD_DIM_QK)
    check(0.0 < softmax_scale < math.inf, "softmax_scale", "must be positive, finite")
    bound = tensors if HAS_FFI and torch and is_plain(q, k, tensors) else bind(tensors)
    device = q.get_device() if torch else q.__dlpack_device__()[1]
    current = torch.cuda.current_device() if torch else cuda.cuCtxGetDevice()[1]
    is_current = current is not None and int(current) == device
    check(is_current, "q", "is on device {}, which is not the current one", device)
    if stream is None and torch:  # its public call takes 4 us to make an object
        query = getattr(
            torch._C, "_cuda_getCurrentRawStream", torch.cuda.current_stream
        )
        stream = query(device)
    handle = cuda.CUstream(int(getattr(stream, "cuda_stream", stream or 0)))
    try:
        compile()(*bound, float(softmax_scale), sm_count(device), handle)
    except Exception:
        bind(tensors)  # TVM-FFI refuses by the number of an argument, this by its name
        raise
    return out


def check(holds, name, message, *found):
    """Raises a ValueError that names the argument unless the condition holds."""
    if not holds:
        raise ValueError(f"{name}: {message.format(*found)}")


def is_plain(q, k, tensors):
    """Whether TVM-FFI finds whatever else may be wrong with torch's tensors."""
    try:
        fits = q.numel() and k.numel() and q.shape[2] == k.shape[2] * Q_PER_KV
        return fits and not any(x.requires_grad or 0 in x.stride() for x in tensors)
    except Exception:  # not torch's, or without strides
        return False


def bind(tensors):
    """Refuses by name what `launch` cannot take; returns what it takes."""
    heads, shape_k = arguments()["q"].shape[2], getattr(tensors[1], "shape", ())
    known = {id(heads): shape_k[2] * Q_PER_KV} if len(shape_k) == 4 else {}
    pairs = zip(arguments().items(), tensors)
    bound = [bind_one(*item, tensor, known) for item, tensor in pairs]
    return tensors if HAS_FFI else bound


def bind_one(name, argument, tensor, known):
    """One tensor; known: what the first of a size or device made it, by its symbol."""
    try:
        view, place = runtime.from_dlpack(tensor), tensor.__dlpack_device__()
    except Exception as error:  # each exporter has its own
        raise ValueError(f"{name}: cannot be shared by DLPack: {error}") from error
    shape, strides, address = view.shape, view.stride, view.data_ptr
    sizes = {id(m): n for m, n in zip(argument.shape, shape) if not isinstance(m, int)}
    known |= sizes | known
    expected = tuple(known.get(id(m), m) for m in argument.shape)
    there = (DLPACK_CUDA, known.setdefault("device", place[1]))
    wanted = (argument.element_type.__name__, expected, there)
    found = (view.element_type.__name__, shape, place)
    check(found == wanted, name, "needs type, shape, device {}, not {}", wanted, found)
    steps = [STRIDE_ELEMENTS if n == 1 else s for n, s in zip(shape, strides)][:3]
    fits = address % 4 == 0 and 0 not in shape
    if argument.element_type is DTYPE:  # moved by TMA
        fits = fits and address % TMA_ALIGN == 0 and strides[3] == 1
        fits = fits and min(steps) > 0 and math.gcd(*steps) % STRIDE_ELEMENTS == 0
    check(fits, name, "empty or not aligned: strides {}, {:#x}", strides, address)
    numbers = struct.pack(f"P{len(sizes)}i3q", address, *sizes.values(), *steps)
    memory = ctypes.create_string_buffer(numbers)
    return types.SimpleNamespace(__c_pointers__=lambda: [ctypes.addressof(memory)])


@functools.cache
def sm_count(device):
    """Multiprocessors of a GPU, which must be of this kernel's architecture."""
    query, key = cuda.cuDeviceGetAttribute, cuda.CUdevice_attribute
    _, major = query(key.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    check(major == COMPUTE_CAPABILITY, "q", "is on a GPU of sm_{}x, not sm_10x", major)
    return query(key.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)[1]
