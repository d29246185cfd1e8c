# SPDX-License-Identifier: Apache-2.0
"""O = softmax(scale Q K^T) V on sm_100a by eight roles: attention_block with a moving maximum.

Q, O: [planes, seqlen_q, HEAD_DIM]  K, V: [planes, seqlen_kv, HEAD_DIM], dense; a plane is a head
of a batch. seqlen_q is a multiple of a work tile, seqlen_kv of TILE_KV; nothing is masked.

A work tile is Q_TILES query tiles, and with CTAS = 2 as many of the CTA beside it: the MMAs then
span the pair. Each CTA has its rows of Q, S, P and O, half of K's rows and half of V's columns;
the leader, of even rank, issues the MMAs for both.

Roles: warps 0 to 7, a warpgroup per query tile, turn S into P; warps 8 to 11 rescale O when the
maximum of a row has grown, and normalise it; warp 12 loads by TMA; warp 13 owns the tensor memory
and, in the leader, issues the MMAs; warp 14 stores O by TMA.

Pipelines (what fills a stage, and what frees it; t: query tile):
  q[t]      load -> mma            Q by TMA              freed by commit, after QK of all blocks
  kv[s]     load -> mma            K, V, K, ... by TMA   freed by commit, after both query tiles
  s[t]      mma -> softmax         S, commit             freed by 128 threads each of softmax (P is
                                                         where S was) and correction (O is rescaled)
  stats[t]  softmax -> correction  the factor of O, in   freed by 128 threads of correction
                                   the end the row's sum
  o[t]      mma -> correction      O, commit             freed by 128 threads: O is in registers
  out[t]    correction -> store    O in shared memory    freed by the store warp
What the mma waits for is in the leader and counts both CTAs; what it commits is told to both.
QK of the next block overwrites P without asking, for the tensor core works in order. That is also
why S being there says that PV of the block before is over, and O may be rescaled.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_ptr

DTYPE = cutlass.BFloat16
# --- constants: chosen
CTAS = 1  # [that share an MMA: 1, or 2 for a pair]
HEAD_DIM = 64  # [elements]
TILE_Q = 128  # [rows]
TILE_KV = 128  # [rows per stage]
Q_TILES = 2  # [query tiles that a CTA works on at a time]
KV_STAGES = 3  # [tiles of K or V]
SOFTMAX_REGS = 192  # [per thread]
CORRECTION_REGS = 80  # [per thread]
OTHER_REGS = 48  # [per thread] = 512 - 2 * SOFTMAX_REGS - CORRECTION_REGS
# --- constants: derived
MMA_M = TILE_Q * CTAS  # [rows]
CTA_GROUP = tcgen05.CtaGroup.ONE if CTAS == 1 else tcgen05.CtaGroup.TWO
Q_TX_BYTES = MMA_M * HEAD_DIM * 2  # [bytes of all CTAs]
KV_TX_BYTES = TILE_KV * HEAD_DIM * 2  # [bytes of all CTAs]
SOFTMAX_WARPS = 8  # = 4 * Q_TILES
CORRECTION_WARP = 8  # the first of four = SOFTMAX_WARPS
LOAD_WARP = 12  # = CORRECTION_WARP + 4
MMA_WARP = 13  # = CORRECTION_WARP + 5
STORE_WARP = 14  # = CORRECTION_WARP + 6
THREADS = 512  # = 128 * (Q_TILES + 2)
TMEM_THREADS = 416  # [of softmax, correction and the MMA warp] = 32 * (LOAD_WARP + 1)
# --- constants: tensor memory [columns of 32 bits]
S_COLUMNS = 128  # = TILE_KV
P_COLUMNS = 64  # [of S, from its first on] = TILE_KV // 2
O_COLUMNS = HEAD_DIM
O_PART = 32  # [columns of O that a thread holds at a time]
O_FIRST = 256  # = Q_TILES * S_COLUMNS
TMEM_COLUMNS = 512  # the least power of two from O_FIRST + Q_TILES * O_COLUMNS on
# --- constants: of the architecture
WARPGROUP_THREADS = 128
WARPGROUP_WARPS = 4
TMEM_LANE = 65536  # [columns from a lane to the next]
TMEM_BARRIER = 1  # [named barrier]
SMEM_ALIGN = 1024  # [bytes: of a swizzled tile]
TMA_ALIGN = 16  # [bytes: of an address]
WARP_THREADS = 32
RESCALE_SLACK = 8.0  # [log2: P stays below 2^8]
LOG2_E = 1.4426950408889634  # = 1 / math.log(2)


@cute.struct
class SharedStorage:
    """Full and empty barriers, where the tensor memory is, then the tiles."""

    q_mbar: cute.struct.MemRange[Int64, 2 * Q_TILES]
    kv_mbar: cute.struct.MemRange[Int64, 2 * KV_STAGES]
    s_mbar: cute.struct.MemRange[Int64, 2 * Q_TILES]
    stats_mbar: cute.struct.MemRange[Int64, 2 * Q_TILES]
    o_mbar: cute.struct.MemRange[Int64, 2 * Q_TILES]
    out_mbar: cute.struct.MemRange[Int64, 2 * Q_TILES]
    tmem_address: Int32
    sStats: cute.struct.MemRange[Float32, TILE_Q * Q_TILES]
    sQ: cute.struct.Align[
        cute.struct.MemRange[DTYPE, TILE_Q * HEAD_DIM * Q_TILES], SMEM_ALIGN
    ]
    sKV: cute.struct.Align[
        cute.struct.MemRange[DTYPE, TILE_KV * HEAD_DIM // CTAS * KV_STAGES], SMEM_ALIGN
    ]
    sO: cute.struct.Align[
        cute.struct.MemRange[DTYPE, TILE_Q * HEAD_DIM * Q_TILES], SMEM_ALIGN
    ]


class Tma(NamedTuple):
    """A TMA descriptor and the coordinate tensor it goes with."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Tiles(NamedTuple):
    """Tiles in shared memory; K and V take turns in the stages of one ring."""

    sQ: cute.Tensor  # (MMA, MMA_M, MMA_K, Q_TILES)
    sK: cute.Tensor  # (MMA, MMA_N, MMA_K, KV_STAGES)
    sV: cute.Tensor  # (MMA, MMA_N, MMA_K, KV_STAGES)
    sStats: cute.Tensor  # (TILE_Q, Q_TILES) fp32
    sO: cute.Tensor  # (TILE_Q, HEAD_DIM, Q_TILES)


@dataclass(frozen=True)  # not a NamedTuple: the DSL would carry it through loops
class Pipelines:
    """Who hands what to whom."""

    q: pipeline.PipelineTmaUmma
    kv: pipeline.PipelineTmaUmma
    s: pipeline.PipelineUmmaAsync
    stats: pipeline.PipelineAsync
    o: pipeline.PipelineUmmaAsync
    out: pipeline.PipelineAsync


class Problem(NamedTuple):
    """Sizes that are known at run time only."""

    per_plane: Int32  # work tiles
    kv_blocks: Int32
    num_tiles: Int32  # work tiles


def qk_mma():
    """S = Q K^T: both operands K-major in shared memory."""
    return sm100.make_trivial_tiled_mma(
        DTYPE,
        DTYPE,
        OperandMajorMode.K,
        OperandMajorMode.K,
        Float32,
        CTA_GROUP,
        (MMA_M, TILE_KV),
    )


def pv_mma():
    """O = P V: P in tensor memory, V N-major in shared memory."""
    return sm100.make_trivial_tiled_mma(
        DTYPE,
        DTYPE,
        OperandMajorMode.K,
        OperandMajorMode.MN,
        Float32,
        CTA_GROUP,
        (MMA_M, HEAD_DIM),
        tcgen05.OperandSource.TMEM,
    )


QK_TILER = (MMA_M, TILE_KV, HEAD_DIM)
PV_TILER = (MMA_M, HEAD_DIM, TILE_KV)


def cta_layout():
    """(V, M, N, K) -> rank in the cluster; V counts the CTAs of one MMA."""
    return cute.make_layout((CTAS, 1, 1, 1))


def o_layout(stages):
    """Swizzled shared-memory layout of O: (TILE_Q, HEAD_DIM, stages)."""
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, DTYPE)
    return cute.tile_to_shape(atom, (TILE_Q, HEAD_DIM, stages), order=(0, 1, 2))


@cute.jit
def launch(
    q: cute.Pointer,
    k: cute.Pointer,
    v: cute.Pointer,
    out: cute.Pointer,
    planes: Int32,
    seqlen_q: Int32,
    seqlen_kv: Int32,
    softmax_scale: Float32,
    clusters: Int32,
    stream: cuda.CUstream,
):
    """Builds the TMA descriptors and launches persistent clusters of CTAS."""
    mQ = sequence_first(q, planes, seqlen_q)
    mK = sequence_first(k, planes, seqlen_kv)
    mV = cute.make_tensor(
        v, cute.select(sequence_first(v, planes, seqlen_kv).layout, mode=[1, 0, 2])
    )
    mO = sequence_first(out, planes, seqlen_q)
    load = cpasync.CopyBulkTensorTileG2SOp(CTA_GROUP)
    store = cpasync.CopyBulkTensorTileS2GOp()
    q_layout = sm100.make_smem_layout_a(qk_mma(), QK_TILER, DTYPE, 1)
    k_layout = sm100.make_smem_layout_b(qk_mma(), QK_TILER, DTYPE, 1)
    v_layout = sm100.make_smem_layout_b(pv_mma(), PV_TILER, DTYPE, 1)
    tma_a, tma_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
    store_layout = cute.select(o_layout(1), mode=[0, 1])
    per_plane = seqlen_q // (Q_TILES * MMA_M)
    attention_kernel(
        Tma(*tma_a(load, mQ, q_layout, QK_TILER, qk_mma())),
        Tma(*tma_b(load, mK, k_layout, QK_TILER, qk_mma())),
        Tma(*tma_b(load, mV, v_layout, PV_TILER, pv_mma())),
        Tma(*cpasync.make_tiled_tma_atom(store, mO, store_layout, (TILE_Q, HEAD_DIM))),
        softmax_scale,
        Problem(per_plane, seqlen_kv // TILE_KV, per_plane * planes),
    ).launch(
        grid=[clusters * CTAS, 1, 1],
        cluster=[CTAS, 1, 1],
        block=[THREADS, 1, 1],
        min_blocks_per_mp=1,
        stream=stream,
    )


def sequence_first(pointer, planes, seqlen):
    """A dense [planes, seqlen, HEAD_DIM] tensor as (seqlen, HEAD_DIM, planes)."""
    plane = cute.assume(Int64(seqlen) * HEAD_DIM, divby=HEAD_DIM)
    layout = cute.make_layout((seqlen, HEAD_DIM, planes), stride=(HEAD_DIM, 1, plane))
    return cute.make_tensor(pointer, layout)


@cute.kernel
def attention_kernel(
    q: Tma, k: Tma, v: Tma, out: Tma, softmax_scale: Float32, problem: Problem
):
    """Device entry: barriers, then one branch per role."""
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp_idx == LOAD_WARP:
        for operand in (q, k, v, out):
            cpasync.prefetch_descriptor(operand.atom)
    storage = cutlass.memory.SmemAllocator().allocate(SharedStorage)
    q_layout = sm100.make_smem_layout_a(qk_mma(), QK_TILER, DTYPE, Q_TILES)
    k_layout = sm100.make_smem_layout_b(qk_mma(), QK_TILER, DTYPE, KV_STAGES)
    v_layout = sm100.make_smem_layout_b(pv_mma(), PV_TILER, DTYPE, KV_STAGES)
    so_layout = o_layout(Q_TILES)
    tiles = Tiles(
        sQ=storage.sQ.get_tensor(q_layout.outer, swizzle=q_layout.inner),
        sK=storage.sKV.get_tensor(k_layout.outer, swizzle=k_layout.inner),
        sV=storage.sKV.get_tensor(v_layout.outer, swizzle=v_layout.inner),
        sStats=storage.sStats.get_tensor(cute.make_layout((TILE_Q, Q_TILES))),
        sO=storage.sO.get_tensor(so_layout.outer, swizzle=so_layout.inner),
    )
    pipes = Pipelines(
        q=tma_pipeline(storage.q_mbar, Q_TILES, Q_TX_BYTES),
        kv=tma_pipeline(storage.kv_mbar, KV_STAGES, KV_TX_BYTES),
        s=mma_pipeline(storage.s_mbar, 2 * CTAS * WARPGROUP_THREADS),
        stats=thread_pipeline(storage.stats_mbar, WARPGROUP_THREADS),
        o=mma_pipeline(storage.o_mbar, CTAS * WARPGROUP_THREADS),
        out=thread_pipeline(storage.out_mbar, WARP_THREADS),
    )
    pipeline.pipeline_init_arrive(cluster_shape_mn=(CTAS, 1), is_relaxed=True)
    pipeline.pipeline_init_wait(cluster_shape_mn=(CTAS, 1))

    if warp_idx < CORRECTION_WARP:
        cute.arch.setmaxregister_increase(SOFTMAX_REGS)
        softmax(tiles.sStats, pipes, storage.tmem_address, softmax_scale, problem)
    elif warp_idx < LOAD_WARP:
        cute.arch.setmaxregister_decrease(CORRECTION_REGS)
        correct(tiles, pipes, storage.tmem_address, problem)
    else:
        cute.arch.setmaxregister_decrease(OTHER_REGS)
        if warp_idx == LOAD_WARP:
            load_qkv(q, k, v, tiles, pipes, problem)
        if warp_idx == MMA_WARP:
            multiply(tiles, pipes, storage.tmem_address, problem)
        if warp_idx == STORE_WARP:
            store_o(out, tiles.sO, pipes, problem)
    # Nobody signals the other CTA or touches the tensor memory any more.
    if cutlass.const_expr(CTAS > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    if warp_idx == MMA_WARP:
        tmem = address_of(storage.tmem_address)
        cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS, is_two_cta=CTAS > 1)


attention_kernel.set_name_prefix(
    "attention_tile", remove_cutlass_symbol=True, keep_mangled_name=False
)


def tma_pipeline(barriers, stages, tx_bytes):
    """From the load warp to the MMA warp: a stage is freed by one tcgen05.commit."""
    return pipeline.PipelineTmaUmma.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        tx_count=tx_bytes,
        cta_layout_vmnk=cta_layout(),
        defer_sync=True,
    )


def mma_pipeline(barriers, releases):
    """From the MMA warp to threads, of which `releases` free a query tile's stage."""
    return pipeline.PipelineUmmaAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=Q_TILES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, releases),
        cta_layout_vmnk=cta_layout(),
        defer_sync=True,
    )


def thread_pipeline(barriers, releases):
    """From a warpgroup to threads, of which `releases` free a query tile's stage."""
    return pipeline.PipelineAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=Q_TILES,
        producer_group=pipeline.CooperativeGroup(
            pipeline.Agent.Thread, WARPGROUP_THREADS
        ),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, releases),
        defer_sync=True,
    )


def producer_state(stages):
    """A pipeline's state before anything was produced."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages):
    """A pipeline's state before anything was consumed."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


def rank_in_cluster():
    """Which of the CTAS this is; 0 is the leader."""
    return cute.arch.block_idx()[0] % CTAS


def work_tiles(problem):
    """The work tiles of this cluster: (first, end, step)."""
    first = cute.arch.block_idx()[0] // CTAS
    return first, problem.num_tiles, cute.arch.grid_dim()[0] // CTAS


def locate(tile, problem):
    """(where a work tile is in its plane, the plane)"""
    return tile % problem.per_plane, tile // problem.per_plane


@cute.jit
def load_qkv(q: Tma, k: Tma, v: Tma, tiles: Tiles, pipes: Pipelines, problem: Problem):
    """Producer, warp 12: the query tiles, then K and V of each block in turn."""
    rank = rank_in_cluster()
    thr_qk, thr_pv = qk_mma().get_slice(rank), pv_mma().get_slice(rank)
    q_state, kv_state = producer_state(Q_TILES), producer_state(KV_STAGES)
    first, end, step = work_tiles(problem)
    for tile in cutlass.range(first, end, step, unroll=1):
        place, plane = locate(tile, problem)
        mQ, mK, mV = (operand.tensor[None, None, plane] for operand in (q, k, v))
        # The sequence is mode 0 of Q and K, and mode 1 of V, whose mode 0 is N.
        gQ = cute.local_tile(mQ, (MMA_M, HEAD_DIM), (None, 0))
        gK = cute.local_tile(mK, (TILE_KV, HEAD_DIM), (None, 0))
        gV = cute.local_tile(mV, (HEAD_DIM, TILE_KV), (0, None))
        tQsQ, tQgQ = partition(q.atom, tiles.sQ, thr_qk.partition_A(gQ))
        tKsK, tKgK = partition(k.atom, tiles.sK, thr_qk.partition_B(gK))
        tVsV, tVgV = partition(v.atom, tiles.sV, thr_pv.partition_B(gV))
        for t in cutlass.range_constexpr(Q_TILES):
            load_stage(pipes.q, q_state, q.atom, tQgQ[None, place * Q_TILES + t], tQsQ)
            q_state.advance()
        for block in cutlass.range(problem.kv_blocks, unroll=1):
            load_stage(pipes.kv, kv_state, k.atom, tKgK[None, block], tKsK)
            kv_state.advance()
            load_stage(pipes.kv, kv_state, v.atom, tVgV[None, block], tVsV)
            kv_state.advance()
    # The MMAs still signal these barriers: stay until every stage is free.
    pipes.q.producer_tail(q_state)
    pipes.kv.producer_tail(kv_state)


def partition(atom, smem, gmem):
    """TMA views: smem (TMA, stage), gmem (TMA, tile along the sequence)."""
    smem, gmem = cute.group_modes(smem, 0, 3), cute.group_modes(gmem, 0, 3)
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), smem, gmem)


def load_stage(pipe, state, atom, gmem, smem):
    """Waits until a stage is free, arms its full barrier and issues its load."""
    pipe.producer_acquire(state)
    full = pipe.producer_get_barrier(state)
    cute.copy(atom, gmem, smem[None, state.index], tma_bar_ptr=full)


class Operands(NamedTuple):
    """What is multiplied; S, P and O have one tensor per query tile."""

    tSrQ: cute.Tensor  # (MMA, MMA_M, MMA_K, Q_TILES)
    tSrK: cute.Tensor  # (MMA, MMA_N, MMA_K, KV_STAGES)
    tOrV: cute.Tensor  # (MMA, MMA_N, MMA_K, KV_STAGES)
    tStS: tuple[cute.Tensor, ...]  # (MMA, MMA_M, MMA_N)
    tOrP: tuple[cute.Tensor, ...]  # (MMA, MMA_M, MMA_K)
    tOtO: tuple[cute.Tensor, ...]  # (MMA, MMA_M, MMA_N)


def make_operands(tiles, tmem):
    """Descriptors of the tiles and tensors over the tensor memory."""
    qk, pv = qk_mma(), pv_mma()
    s_layout = qk.make_fragment_C(qk.partition_shape_C((MMA_M, TILE_KV))).layout
    o_fragment = pv.make_fragment_C(pv.partition_shape_C((MMA_M, HEAD_DIM)))
    p_layout = sm100.make_smem_layout_a(pv, PV_TILER, DTYPE, 1).outer
    p_fragment = pv.make_fragment_A(cute.make_tensor(tmem, p_layout))
    p_layout = p_fragment[None, None, None, 0].layout
    s_places = [tmem + t * S_COLUMNS for t in range(Q_TILES)]
    p_places = [cute.recast_ptr(place, dtype=DTYPE) for place in s_places]
    o_places = [tmem + O_FIRST + t * O_COLUMNS for t in range(Q_TILES)]
    return Operands(
        tSrQ=qk.make_fragment_A(tiles.sQ),
        tSrK=qk.make_fragment_B(tiles.sK),
        tOrV=pv.make_fragment_B(tiles.sV),
        tStS=tuple(cute.make_tensor(place, s_layout) for place in s_places),
        tOrP=tuple(cute.make_tensor(place, p_layout) for place in p_places),
        tOtO=tuple(cute.make_tensor(place, o_fragment.layout) for place in o_places),
    )


@cute.jit
def multiply(tiles: Tiles, pipes: Pipelines, tmem_address, problem: Problem):
    """Warp 13: allocates the tensor memory; the leader's issues the MMAs."""
    cute.arch.alloc_tmem(TMEM_COLUMNS, tmem_address.ptr, is_two_cta=CTAS > 1)
    cute.arch.relinquish_tmem_alloc_permit(is_two_cta=CTAS > 1)
    mma = make_operands(tiles, tensor_memory(tmem_address))
    if rank_in_cluster() == 0:
        issue(mma, pipes, problem)


@cute.jit
def issue(mma: Operands, pipes: Pipelines, problem: Problem):
    """Issues the MMAs of all work tiles, by one elected thread.

    The query tiles alternate, so that softmax on one runs beside the MMAs of the other.
    """
    q_state, kv_state = consumer_state(Q_TILES), consumer_state(KV_STAGES)
    s_state, o_state = producer_state(Q_TILES), producer_state(Q_TILES)
    p_state = consumer_state(Q_TILES)  # of s: P is what comes back in S's place
    first, end, step = work_tiles(problem)
    for _ in cutlass.range(first, end, step, unroll=1):
        # 1. S of the first block
        pipes.kv.consumer_wait(kv_state)
        q_loaded = q_state.clone()
        for t in cutlass.range_constexpr(Q_TILES):
            pipes.q.consumer_wait(q_loaded)
            q_loaded.advance()
            issue_qk(mma, t, kv_state.index)
            pipes.s.producer_commit(s_state)
            s_state.advance()
        pipes.kv.consumer_release(kv_state)
        kv_state.advance()
        o_free = o_state.clone()
        for _ in cutlass.range_constexpr(Q_TILES):
            pipes.o.producer_acquire(o_free)
            after_wait()
            o_free.advance()
        # 2. PV of each block, then S of the next
        for block in cutlass.range(problem.kv_blocks - 1, unroll=1):
            v_state = kv_state.clone()
            kv_state.advance()
            pipes.kv.consumer_wait(v_state)
            pipes.kv.consumer_wait(kv_state)
            for t in cutlass.range_constexpr(Q_TILES):
                pipes.s.producer_acquire(p_state)
                after_wait()
                p_state.advance()
                issue_pv(mma, t, v_state.index, block > 0)
                issue_qk(mma, t, kv_state.index)
                pipes.s.producer_commit(s_state)
                s_state.advance()
            pipes.kv.consumer_release(v_state)
            pipes.kv.consumer_release(kv_state)
            kv_state.advance()
        for _ in cutlass.range_constexpr(Q_TILES):
            pipes.q.consumer_release(q_state)
            q_state.advance()
        # 3. PV of the last block
        pipes.kv.consumer_wait(kv_state)
        for t in cutlass.range_constexpr(Q_TILES):
            pipes.s.producer_acquire(p_state)
            after_wait()
            p_state.advance()
            issue_pv(mma, t, kv_state.index, problem.kv_blocks > 1)
            pipes.o.producer_commit(o_state)
            o_state.advance()
        pipes.kv.consumer_release(kv_state)
        kv_state.advance()


def before_signal():
    """What this thread did to the tensor memory comes before what it signals next."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def after_wait():
    """What this thread does to the tensor memory comes after what it has waited for."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def tensor_memory(tmem_address):
    """Where the tensor memory begins, once its owner has allocated it."""
    cute.arch.barrier(barrier_id=TMEM_BARRIER, number_of_threads=TMEM_THREADS)
    return address_of(tmem_address)


def address_of(tmem_address):
    """What tcgen05.alloc wrote, as a pointer."""
    return cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_address.ptr)


@cute.jit
def issue_qk(mma: Operands, t: cutlass.Constexpr, stage: Int32):
    """Issues S = Q K^T of query tile t."""
    qk = qk_mma()
    for k in cutlass.range_constexpr(cute.size(mma.tSrQ, mode=[2])):
        qk.set(tcgen05.Field.ACCUMULATE, k > 0)
        a, b = mma.tSrQ[None, None, k, t], mma.tSrK[None, None, k, stage]
        cute.gemm(qk, mma.tStS[t], a, b, mma.tStS[t])


@cute.jit
def issue_pv(mma: Operands, t: cutlass.Constexpr, stage: Int32, accumulate):
    """Issues O += P V of query tile t, or O = P V."""
    pv = pv_mma()
    for k in cutlass.range_constexpr(cute.size(mma.tOrP[t], mode=[2])):
        pv.set(tcgen05.Field.ACCUMULATE, accumulate if k == 0 else True)
        a, b = mma.tOrP[t][None, None, k], mma.tOrV[None, None, k, stage]
        cute.gemm(pv, mma.tOtO[t], a, b, mma.tOtO[t])


def tmem_copy(op, place, columns):
    """This thread's part of a copy of (lanes, columns): (copy, its view of the memory)."""
    layout = cute.make_layout((TILE_Q, columns), stride=(TMEM_LANE, 1))
    tensor = cute.make_tensor(place, layout)
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), tensor)
    thread = copy.get_slice(cute.arch.thread_idx()[0] % WARPGROUP_THREADS)
    is_load = isinstance(op, tcgen05.Ld32x32bOp)
    view = thread.partition_S(tensor) if is_load else thread.partition_D(tensor)
    return thread, view


def lane_registers(columns):
    """Registers for `columns` of a lane, as tcgen05.ld and st of x32 take them."""
    return cute.make_rmem_tensor((((32, 1), 1), 1, columns // 32), Float32)


@cute.jit
def softmax(
    sStats: cute.Tensor,
    pipes: Pipelines,
    tmem_address,
    softmax_scale: Float32,
    problem: Problem,
):
    """Warps 0 to 7: a thread owns a row of its warpgroup's query tile, from S to P."""
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    t = warp_idx // WARPGROUP_WARPS  # the query tile of this warpgroup
    row = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    place = tensor_memory(tmem_address) + t * S_COLUMNS
    load_s = tmem_copy(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), place, S_COLUMNS)
    store_p = tmem_copy(tcgen05.St32x32bOp(tcgen05.Repetition.x32), place, P_COLUMNS)
    scale_log2 = softmax_scale * LOG2_E
    s_state, stats_state = tile_state(t, 0), tile_state(t, 1)
    first, end, step = work_tiles(problem)
    for _ in cutlass.range(first, end, step, unroll=1):
        # 1. the first block: O is overwritten, so there is no factor
        rS = lane_registers(S_COLUMNS)
        pipes.s.consumer_wait(s_state)
        after_wait()
        load_lane(load_s, rS)
        reference = row_max(rS)
        row_sum = exponentials(rS, reference, scale_log2)
        store_lane(store_p, pack(rS))
        before_signal()
        pipes.s.consumer_release(s_state)
        # The stage comes round after the other query tile's.
        s_state.advance()
        s_state.advance()
        # 2. the others
        for _ in cutlass.range(problem.kv_blocks - 1, unroll=1):
            rS = lane_registers(S_COLUMNS)
            pipes.s.consumer_wait(s_state)
            after_wait()
            load_lane(load_s, rS)
            largest = cute.arch.fmax(reference, row_max(rS))
            growth = (largest - reference) * scale_log2
            factor = Float32(1.0)
            if growth > RESCALE_SLACK:
                reference = largest
                factor = cute.math.exp2(-growth, fastmath=True)
            pipes.stats.producer_acquire(stats_state)
            sStats[row, t] = factor
            pipes.stats.producer_commit(stats_state)
            stats_state.advance()
            stats_state.advance()
            row_sum = row_sum * factor + exponentials(rS, reference, scale_log2)
            store_lane(store_p, pack(rS))
            before_signal()
            pipes.s.consumer_release(s_state)
            s_state.advance()
            s_state.advance()
        pipes.stats.producer_acquire(stats_state)
        sStats[row, t] = row_sum
        pipes.stats.producer_commit(stats_state)
        stats_state.advance()
        stats_state.advance()


def tile_state(t, phase):
    """State of query tile t's stage alone: advance it Q_TILES steps at a time."""
    return pipeline.PipelineState(Q_TILES, Int32(0), t, Int32(phase))


@cute.jit
def load_lane(load, registers: cute.Tensor):
    """Columns of this thread's lane, which are in the registers when this returns."""
    copy, place = load
    cute.copy(copy, place, registers)
    cute.arch.fence_view_async_tmem_load()


@cute.jit
def store_lane(store, registers: cute.Tensor):
    """Columns of this thread's lane, which are in tensor memory when this returns."""
    copy, place = store
    cute.copy(copy, registers, place)
    cute.arch.fence_view_async_tmem_store()


def row_max(rS):
    """The largest of a row of S."""
    return rS.load().reduce(cute.ReductionOp.MAX, Float32(-math.inf), 0)


def pack(rS):
    """P in DTYPE, two to a register."""
    rP = lane_registers(P_COLUMNS)
    cute.recast_tensor(rP, DTYPE).store(rS.load().to(DTYPE))
    return rP


@cute.jit
def exponentials(rS: cute.Tensor, reference: Float32, scale_log2: Float32):
    """Turns a row of S into exp2(scale_log2 * (S - reference)), in place; returns its sum."""
    scales, shift = (scale_log2, scale_log2), -reference * scale_log2
    sums = (Float32(0.0), Float32(0.0))
    for j in cutlass.range_constexpr(0, S_COLUMNS, 2):
        pair = cute.arch.fma_packed_f32x2((rS[j], rS[j + 1]), scales, (shift, shift))
        rS[j] = cute.math.exp2(pair[0], fastmath=True)
        rS[j + 1] = cute.math.exp2(pair[1], fastmath=True)
        sums = cute.arch.add_packed_f32x2(sums, (rS[j], rS[j + 1]))
    return sums[0] + sums[1]


@cute.jit
def correct(tiles: Tiles, pipes: Pipelines, tmem_address, problem: Problem):
    """Warps 8 to 11: O of both query tiles, a lane per thread, in the MMA warp's order."""
    row = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    tmem = tensor_memory(tmem_address)
    s_state, stats_state = consumer_state(Q_TILES), consumer_state(Q_TILES)
    o_state, out_state = consumer_state(Q_TILES), producer_state(Q_TILES)
    first, end, step = work_tiles(problem)
    for _ in cutlass.range(first, end, step, unroll=1):
        # 1. the first block overwrites O
        for _ in cutlass.range_constexpr(Q_TILES):
            before_signal()
            pipes.s.consumer_release(s_state)
            s_state.advance()
        # 2. the others add to it
        for _ in cutlass.range(problem.kv_blocks - 1, unroll=1):
            for t in cutlass.range_constexpr(Q_TILES):
                pipes.stats.consumer_wait(stats_state)
                after_wait()
                factor = tiles.sStats[row, t]
                pipes.stats.consumer_release(stats_state)
                stats_state.advance()
                # The lanes of a warp are loaded and stored together.
                if cute.arch.vote_any_sync(factor != 1.0):
                    rescale(o_parts(tmem, t), factor)
                before_signal()
                pipes.s.consumer_release(s_state)
                s_state.advance()
        # 3. O is complete. (Were this loop unrolled, the addresses of the row in sO would be
        # kept in registers from tile to tile, too many of them.)
        for t in cutlass.range(Q_TILES, unroll=1):
            pipes.stats.consumer_wait(stats_state)
            after_wait()
            row_sum = tiles.sStats[row, t]
            pipes.stats.consumer_release(stats_state)
            stats_state.advance()
            pipes.out.producer_acquire(out_state)
            pipes.o.consumer_wait(o_state)
            after_wait()
            factor = cute.arch.rcp_approx(row_sum)
            normalize(o_parts(tmem, t), factor, tiles.sO[row, None, t])
            before_signal()
            pipes.o.consumer_release(o_state)
            o_state.advance()
            # The store warp hands these rows to TMA.
            cute.arch.fence_proxy("async.shared", space="cta")
            pipes.out.producer_commit(out_state)
            out_state.advance()


def o_parts(tmem, t):
    """Where the parts of query tile t's O begin."""
    return [
        tmem + O_FIRST + t * O_COLUMNS + part for part in range(0, O_COLUMNS, O_PART)
    ]


def rescale(parts, factor):
    """Multiplies this thread's row of O, in tensor memory."""
    for place in parts:
        rO = load_scaled(place, factor)
        op = tcgen05.St32x32bOp(tcgen05.Repetition.x32)
        copy, tOtO = tmem_copy(op, place, O_PART)
        cute.copy(copy, rO, tOtO)
    cute.arch.fence_view_async_tmem_store()


def normalize(parts, factor, sO_row):
    """Multiplies this thread's row of O on its way to shared memory."""
    copy = cute.make_copy_atom(CopyUniversalOp(), DTYPE, num_bits_per_copy=128)
    vectors = (8,)  # [elements: 16 bytes]
    for number, place in enumerate(parts):
        rO = load_scaled(place, factor)
        row = cute.make_rmem_tensor(O_PART, DTYPE)
        row.store(rO.load().reshape(O_PART).to(DTYPE))
        sO_part = cute.local_tile(sO_row, (O_PART,), (number,))
        row, sO_part = (cute.zipped_divide(x, vectors) for x in (row, sO_part))
        cute.copy(copy, row, sO_part)


def load_scaled(place, factor):
    """A part of this thread's row of O, multiplied."""
    rO = lane_registers(O_PART)
    load_lane(tmem_copy(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), place, O_PART), rO)
    for j in range(0, O_PART, 2):
        pair = cute.arch.mul_packed_f32x2((rO[j], rO[j + 1]), (factor, factor))
        rO[j], rO[j + 1] = pair
    return rO


@cute.jit
def store_o(out: Tma, sO: cute.Tensor, pipes: Pipelines, problem: Problem):
    """Warp 14: the query tiles of O from shared memory by TMA."""
    rank = rank_in_cluster()
    state = consumer_state(Q_TILES)
    first, end, step = work_tiles(problem)
    for tile in cutlass.range(first, end, step, unroll=1):
        place, plane = locate(tile, problem)
        mO = out.tensor[None, None, plane]
        gO = cute.local_tile(mO, (TILE_Q, HEAD_DIM), (None, 0))
        one = cute.make_layout(1)
        gO, sO_tiles = cute.group_modes(gO, 0, 2), cute.group_modes(sO, 0, 2)
        tOsO, tOgO = cpasync.tma_partition(out.atom, 0, one, sO_tiles, gO)
        for t in cutlass.range_constexpr(Q_TILES):
            pipes.out.consumer_wait(state)
            cute.copy(
                out.atom, tOsO[None, t], tOgO[None, (place * Q_TILES + t) * CTAS + rank]
            )
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            pipes.out.consumer_release(state)
            state.advance()


@functools.cache
def compile():
    """Compiles `launch`; returns the callable."""
    tensor = make_ptr(DTYPE, 0, cute.AddressSpace.gmem, assumed_align=TMA_ALIGN)
    return cute.compile(
        launch,
        *(tensor, tensor, tensor, tensor),
        *map(Int32, (1, Q_TILES * MMA_M, TILE_KV)),
        Float32(1.0),
        Int32(1),
        cuda.CUstream(0),
    )
