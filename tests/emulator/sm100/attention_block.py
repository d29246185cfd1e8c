# SPDX-License-Identifier: Apache-2.0
"""O = softmax(scale Q K^T) V on sm_100a, with P handed over in tensor memory.

Q, O: [planes, seqlen_q, HEAD_DIM]  K, V: [planes, seqlen_kv, HEAD_DIM], dense; a plane is a head
of a batch. seqlen_q is a multiple of Q_TILES tiles and seqlen_kv of a tile. Nothing is masked,
and the reference of the exponentials is 0, not the row's maximum: scores must be small.

Roles: warps 0 to 7, a warpgroup per query tile, turn S into P and store O; warp 8 loads by TMA;
warp 9 owns the tensor memory and issues the MMAs. A CTA takes Q_TILES query tiles at a time.

Pipelines (what fills a stage, and what frees it):
  q[t]   load -> mma      query tile t by TMA        freed by commit, after QK of the last block
  kv[s]  load -> mma      K, V, K, V, ... by TMA     freed by commit, after both query tiles
  s[t]   mma -> softmax   S of query tile t, commit  freed by 128 threads: P is where S was
  o[t]   mma -> softmax   O of query tile t, commit  freed by 128 threads: O is in registers
QK of the next block overwrites P without asking: the tensor core works in order.
"""

import functools
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
HEAD_DIM = 64  # [elements]
TILE_Q = 128  # [rows: M of an MMA]
TILE_KV = 128  # [rows per stage]
Q_TILES = 2  # [query tiles that a CTA works on at a time]
KV_STAGES = 3  # [tiles of K or V]
SOFTMAX_REGS = 208  # [per thread]
OTHER_REGS = 96  # [per thread]
# --- constants: derived
Q_TX_BYTES = 16384  # [bytes] = TILE_Q * HEAD_DIM * 2
KV_TX_BYTES = 16384  # [bytes] = TILE_KV * HEAD_DIM * 2
SOFTMAX_WARPS = 8  # = 4 * Q_TILES
LOAD_WARP = 8  # = SOFTMAX_WARPS
MMA_WARP = 9  # = SOFTMAX_WARPS + 1
THREADS = 384  # = 128 * (Q_TILES + 1)
TMEM_THREADS = 288  # [of the MMA warp and the softmax] = 32 * (SOFTMAX_WARPS + 1)
# --- constants: tensor memory [columns of 32 bits]
S_COLUMNS = 128  # = TILE_KV
P_COLUMNS = 64  # [of S, from its first on] = TILE_KV // 2
O_COLUMNS = 64  # = HEAD_DIM
O_FIRST = 256  # = Q_TILES * S_COLUMNS
TMEM_COLUMNS = 512  # the least power of two from O_FIRST + Q_TILES * O_COLUMNS on
# --- constants: of the architecture
WARPGROUP_THREADS = 128
WARPGROUP_WARPS = 4
WARP_ROWS = 32  # [rows: lanes of a warp's quarter of tensor memory]
TMEM_LANE = 65536  # [columns from a lane to the next]
TMEM_BARRIER = 1  # [named barrier]
SMEM_ALIGN = 1024  # [bytes: of a swizzled tile]
TMA_ALIGN = 16  # [bytes: of an address]
LOG2_E = 1.4426950408889634  # = 1 / math.log(2)


@cute.struct
class SharedStorage:
    """Full and empty barriers, where the tensor memory is, then the tiles."""

    q_mbar: cute.struct.MemRange[Int64, 2 * Q_TILES]
    kv_mbar: cute.struct.MemRange[Int64, 2 * KV_STAGES]
    s_mbar: cute.struct.MemRange[Int64, 2 * Q_TILES]
    o_mbar: cute.struct.MemRange[Int64, 2 * Q_TILES]
    tmem_address: Int32
    sQ: cute.struct.Align[
        cute.struct.MemRange[DTYPE, TILE_Q * HEAD_DIM * Q_TILES], SMEM_ALIGN
    ]
    sKV: cute.struct.Align[
        cute.struct.MemRange[DTYPE, TILE_KV * HEAD_DIM * KV_STAGES], SMEM_ALIGN
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
    sO: cute.Tensor  # (Q_TILES * TILE_Q, HEAD_DIM)


@dataclass(frozen=True)  # not a NamedTuple: the DSL would carry it through loops
class Pipelines:
    """Who hands what to whom."""

    q: pipeline.PipelineTmaUmma
    kv: pipeline.PipelineTmaUmma
    s: pipeline.PipelineUmmaAsync
    o: pipeline.PipelineUmmaAsync


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
        tcgen05.CtaGroup.ONE,
        (TILE_Q, TILE_KV),
    )


def pv_mma():
    """O = P V: P in tensor memory, V N-major in shared memory."""
    return sm100.make_trivial_tiled_mma(
        DTYPE,
        DTYPE,
        OperandMajorMode.K,
        OperandMajorMode.MN,
        Float32,
        tcgen05.CtaGroup.ONE,
        (TILE_Q, HEAD_DIM),
        tcgen05.OperandSource.TMEM,
    )


QK_TILER = (TILE_Q, TILE_KV, HEAD_DIM)
PV_TILER = (TILE_Q, HEAD_DIM, TILE_KV)


def o_layout(rows):
    """Swizzled shared-memory layout of rows of O."""
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, DTYPE)
    return cute.tile_to_shape(atom, (rows, HEAD_DIM), order=(0, 1))


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
    """Builds the TMA descriptors and launches persistent CTAs."""
    mQ = sequence_first(q, planes, seqlen_q)
    mK = sequence_first(k, planes, seqlen_kv)
    mV = cute.make_tensor(
        v, cute.select(sequence_first(v, planes, seqlen_kv).layout, mode=[1, 0, 2])
    )
    mO = sequence_first(out, planes, seqlen_q)
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    store = cpasync.CopyBulkTensorTileS2GOp()
    q_layout = sm100.make_smem_layout_a(qk_mma(), QK_TILER, DTYPE, 1)
    k_layout = sm100.make_smem_layout_b(qk_mma(), QK_TILER, DTYPE, 1)
    v_layout = sm100.make_smem_layout_b(pv_mma(), PV_TILER, DTYPE, 1)
    tma_a, tma_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
    per_plane = seqlen_q // (Q_TILES * TILE_Q)
    attention_kernel(
        Tma(*tma_a(load, mQ, q_layout, QK_TILER, qk_mma())),
        Tma(*tma_b(load, mK, k_layout, QK_TILER, qk_mma())),
        Tma(*tma_b(load, mV, v_layout, PV_TILER, pv_mma())),
        Tma(
            *cpasync.make_tiled_tma_atom(
                store, mO, o_layout(WARP_ROWS), (WARP_ROWS, HEAD_DIM)
            )
        ),
        softmax_scale,
        Problem(per_plane, seqlen_kv // TILE_KV, per_plane * planes),
    ).launch(
        grid=[clusters, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
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
    so_layout = o_layout(Q_TILES * TILE_Q)
    tiles = Tiles(
        sQ=storage.sQ.get_tensor(q_layout.outer, swizzle=q_layout.inner),
        sK=storage.sKV.get_tensor(k_layout.outer, swizzle=k_layout.inner),
        sV=storage.sKV.get_tensor(v_layout.outer, swizzle=v_layout.inner),
        sO=storage.sO.get_tensor(so_layout.outer, swizzle=so_layout.inner),
    )
    pipelines = Pipelines(
        q=tma_pipeline(storage.q_mbar, Q_TILES, Q_TX_BYTES),
        kv=tma_pipeline(storage.kv_mbar, KV_STAGES, KV_TX_BYTES),
        s=mma_pipeline(storage.s_mbar),
        o=mma_pipeline(storage.o_mbar),
    )
    pipeline.pipeline_init_arrive()
    pipeline.pipeline_init_wait()

    if warp_idx >= SOFTMAX_WARPS:
        cute.arch.setmaxregister_decrease(OTHER_REGS)
        if warp_idx == LOAD_WARP:
            load_qkv(q, k, v, tiles, pipelines, problem)
        if warp_idx == MMA_WARP:
            multiply(tiles, pipelines, storage.tmem_address, problem)
    else:
        cute.arch.setmaxregister_increase(SOFTMAX_REGS)
        softmax(out, tiles.sO, pipelines, storage.tmem_address, softmax_scale, problem)


attention_kernel.set_name_prefix(
    "attention_block", remove_cutlass_symbol=True, keep_mangled_name=False
)


def tma_pipeline(barriers, stages, tx_bytes):
    """From the load warp to the MMA warp: a stage is freed by one tcgen05.commit."""
    return pipeline.PipelineTmaUmma.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        tx_count=tx_bytes,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        defer_sync=True,
    )


def mma_pipeline(barriers):
    """From the MMA warp to a softmax warpgroup: a stage per query tile."""
    return pipeline.PipelineUmmaAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=Q_TILES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(
            pipeline.Agent.Thread, WARPGROUP_THREADS
        ),
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        defer_sync=True,
    )


def producer_state(stages):
    """A pipeline's state before anything was produced."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages):
    """A pipeline's state before anything was consumed."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


def work_tiles(problem):
    """The work tiles of this CTA: (first, end, step)."""
    return cute.arch.block_idx()[0], problem.num_tiles, cute.arch.grid_dim()[0]


@cute.jit
def load_qkv(q: Tma, k: Tma, v: Tma, tiles: Tiles, pipes: Pipelines, problem: Problem):
    """Producer, warp 8: the query tiles, then K and V of each block in turn."""
    thr_qk, thr_pv = qk_mma().get_slice(0), pv_mma().get_slice(0)
    q_state, kv_state = producer_state(Q_TILES), producer_state(KV_STAGES)
    first, end, step = work_tiles(problem)
    for tile in cutlass.range(first, end, step, unroll=1):
        place, plane = tile % problem.per_plane, tile // problem.per_plane
        mQ, mK, mV = (operand.tensor[None, None, plane] for operand in (q, k, v))
        # The sequence is mode 0 of Q and K, and mode 1 of V, whose mode 0 is N.
        gQ = cute.local_tile(mQ, (TILE_Q, HEAD_DIM), (None, 0))
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
    s_layout = qk.make_fragment_C(qk.partition_shape_C((TILE_Q, TILE_KV))).layout
    o_fragment = pv.make_fragment_C(pv.partition_shape_C((TILE_Q, HEAD_DIM)))
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
    """Warp 9: owns the tensor memory and issues the MMAs, by one elected thread.

    The query tiles alternate, so that softmax on one runs beside the MMAs of the other.
    """
    cute.arch.alloc_tmem(TMEM_COLUMNS, tmem_address.ptr)
    cute.arch.relinquish_tmem_alloc_permit()
    tmem = tensor_memory(tmem_address)
    mma = make_operands(tiles, tmem)
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
    # Nobody reads the tensor memory any more once the last O is in registers.
    for _ in cutlass.range_constexpr(Q_TILES):
        pipes.o.producer_acquire(o_state)
        o_state.advance()
    cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS)


def before_signal():
    """What this thread did to the tensor memory comes before what it signals next."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def after_wait():
    """What this thread does to the tensor memory comes after what it has waited for."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def tensor_memory(tmem_address):
    """Where the tensor memory begins, once its owner has allocated it."""
    cute.arch.barrier(barrier_id=TMEM_BARRIER, number_of_threads=TMEM_THREADS)
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
    out: Tma,
    sO: cute.Tensor,
    pipes: Pipelines,
    tmem_address,
    softmax_scale: Float32,
    problem: Problem,
):
    """Consumers, warps 0 to 7: a thread owns a row, from S to O."""
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    t = warp_idx // WARPGROUP_WARPS  # the query tile of this warpgroup
    tmem = tensor_memory(tmem_address)
    s_place, o_place = tmem + t * S_COLUMNS, tmem + O_FIRST + t * O_COLUMNS
    load, store = tcgen05.Ld32x32bOp, tcgen05.St32x32bOp
    x32 = tcgen05.Repetition.x32
    load_s, tStS = tmem_copy(load(x32), s_place, S_COLUMNS)
    store_p, tStP = tmem_copy(store(x32), s_place, P_COLUMNS)
    load_o, tOtO = tmem_copy(load(x32), o_place, O_COLUMNS)
    scale_log2 = softmax_scale * LOG2_E
    s_state, o_state = tile_state(t), tile_state(t)
    first, end, step = work_tiles(problem)
    for tile in cutlass.range(first, end, step, unroll=1):
        row_sum = Float32(0.0)
        for _ in cutlass.range(problem.kv_blocks, unroll=1):
            rS = lane_registers(S_COLUMNS)
            pipes.s.consumer_wait(s_state)
            after_wait()
            cute.copy(load_s, tStS, rS)
            cute.arch.fence_view_async_tmem_load()
            row_sum += exponentials(rS, scale_log2)
            rP = lane_registers(P_COLUMNS)
            cute.recast_tensor(rP, DTYPE).store(rS.load().to(DTYPE))
            cute.copy(store_p, rP, tStP)
            cute.arch.fence_view_async_tmem_store()
            before_signal()
            pipes.s.consumer_release(s_state)
            s_state.advance()
            s_state.advance()
        rO = lane_registers(O_COLUMNS)
        pipes.o.consumer_wait(o_state)
        after_wait()
        cute.copy(load_o, tOtO, rO)
        cute.arch.fence_view_async_tmem_load()
        before_signal()
        pipes.o.consumer_release(o_state)
        o_state.advance()
        o_state.advance()
        rO.store(rO.load() * cute.arch.rcp_approx(row_sum))
        place, plane = tile % problem.per_plane, tile // problem.per_plane
        gO = cute.local_tile(
            out.tensor[None, None, plane], (Q_TILES * TILE_Q, HEAD_DIM), (place, 0)
        )
        store_o(out.atom, rO, sO, gO)
    cute.arch.cp_async_bulk_wait_group(
        0, read=True
    )  # TMA still reads this CTA's memory


def tile_state(t):
    """Consumer state of query tile t's stage; it comes round every Q_TILES steps."""
    return pipeline.PipelineState(Q_TILES, Int32(0), t, Int32(0))


@cute.jit
def exponentials(rS: cute.Tensor, scale_log2: Float32):
    """Turns a row of S into exp2(scale_log2 * S), in place; returns its sum."""
    sums = (Float32(0.0), Float32(0.0))
    for j in cutlass.range_constexpr(0, S_COLUMNS, 2):
        scaled = cute.arch.mul_packed_f32x2(
            (rS[j], rS[j + 1]), (scale_log2, scale_log2)
        )
        rS[j] = cute.math.exp2(scaled[0], fastmath=True)
        rS[j + 1] = cute.math.exp2(scaled[1], fastmath=True)
        sums = cute.arch.add_packed_f32x2(sums, (rS[j], rS[j + 1]))
    return sums[0] + sums[1]


@cute.jit
def store_o(atom: cute.CopyAtom, rO: cute.Tensor, sO: cute.Tensor, gO: cute.Tensor):
    """A row of O per thread into shared memory; each warp stores its rows by TMA."""
    thread_idx = cute.arch.thread_idx()[0]
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rows = cute.make_rmem_tensor(HEAD_DIM, DTYPE)
    rows.store(rO.load().reshape(HEAD_DIM).to(DTYPE))
    cute.arch.cp_async_bulk_wait_group(0, read=True)  # the tile before has left
    vectors = (8,)  # [elements: 16 bytes]
    cute.copy(
        cute.make_copy_atom(CopyUniversalOp(), DTYPE, num_bits_per_copy=128),
        cute.zipped_divide(rows, vectors),
        cute.zipped_divide(sO[thread_idx, None], vectors),
    )
    # All lanes make their rows visible to TMA before the warp stores them.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    box = (WARP_ROWS, HEAD_DIM)
    sO_warp = cute.group_modes(cute.local_tile(sO, box, (warp_idx, 0)), 0, 2)
    gO_warp = cute.group_modes(cute.local_tile(gO, box, (warp_idx, 0)), 0, 2)
    tOsO, tOgO = cpasync.tma_partition(atom, 0, cute.make_layout(1), sO_warp, gO_warp)
    cute.copy(atom, tOsO, tOgO)
    cute.arch.cp_async_bulk_commit_group()


@functools.cache
def compile():
    """Compiles `launch`; returns the callable."""
    tensor = make_ptr(DTYPE, 0, cute.AddressSpace.gmem, assumed_align=TMA_ALIGN)
    return cute.compile(
        launch,
        *(tensor, tensor, tensor, tensor),
        *map(Int32, (1, Q_TILES * TILE_Q, TILE_KV)),
        Float32(1.0),
        Int32(1),
        cuda.CUstream(0),
    )
