# SPDX-License-Identifier: Apache-2.0
"""D = A B^T on sm_100a: a CTA multiplies one tile by itself.

A: [m, k]  B: [n, k]  D: [m, n], all row-major; m, n and k are multiples of the tile, m of
CLUSTER_M tiles.

Roles: warps 0 to 3 convert and store D; warp 4 loads by TMA; warp 5 owns the tensor memory and
issues the MMAs. With CLUSTER_M CTAs along m, each loads a slice of B for all of them.

Barriers (mbarriers in shared memory):
  ab.full[s]   TMA, AB_TX_BYTES      -> MMA        A and B of stage s have landed
  ab.empty[s]  MMA of each CTA       -> TMA        stage s was read wherever a slice of it went
  acc.full     MMA                   -> epilogue   the accumulator is complete
  acc.empty    128 epilogue threads  -> MMA        the accumulator is in registers
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

AB_DTYPE = cutlass.BFloat16
D_DTYPE = cutlass.BFloat16
# --- constants: chosen
TILE_M = 128  # [rows: M of an MMA], 64 or 128
TILE_N = 128  # [columns: N of an MMA]
STAGES = 3  # [tiles each of A and B]
CLUSTER_M = 1  # [CTAs that share a tile of B]
# --- constants: derived
TILE_K = 128 // (AB_DTYPE.width // 8)  # [elements: a row of the 128-byte swizzle]
AB_TX_BYTES = (TILE_M + TILE_N) * 128  # [bytes per stage and CTA]
STORE_N = 128 // (D_DTYPE.width // 8)  # [columns of D in one TMA store]
WARP_ROWS = TILE_M // 4  # [rows of D that an epilogue warp stores]
# M = 64 leaves half of each warp's lanes unused, which only the 16-lane shapes pass over.
LOAD_OP = (
    tcgen05.Ld32x32bOp(tcgen05.Repetition.x32)
    if TILE_M == 128
    else tcgen05.Ld16x256bOp(tcgen05.Repetition.x16)
)
LOAD_COLUMNS = 8 if TILE_M == 128 else 2  # [columns of D that a thread stores at once]
# --- constants: of the kernel
EPILOGUE_WARPS = 4  # warps 0 to 3: a warp reaches lanes 32 * (warp % 4) and on
EPILOGUE_THREADS = 128
LOAD_WARP = 4
MMA_WARP = 5
THREADS = 192
TMEM_BARRIER = 1  # [named barrier] the address of the tensor memory is known
TMEM_THREADS = 160  # the MMA warp and the epilogue
# --- constants: of the architecture
TMA_ALIGN = 16  # [bytes]
SMEM_ALIGN = 1024  # [bytes: of a swizzled tile]


@cute.struct
class SharedStorage:
    """Barriers, where tcgen05.alloc writes its address, then the tiles."""

    ab_mbar: cute.struct.MemRange[Int64, 2 * STAGES]
    acc_mbar: cute.struct.MemRange[Int64, 2]
    tmem_address: Int32
    sA: cute.struct.Align[
        cute.struct.MemRange[AB_DTYPE, TILE_M * TILE_K * STAGES], SMEM_ALIGN
    ]
    sB: cute.struct.Align[
        cute.struct.MemRange[AB_DTYPE, TILE_N * TILE_K * STAGES], SMEM_ALIGN
    ]
    sD: cute.struct.Align[cute.struct.MemRange[D_DTYPE, TILE_M * TILE_N], SMEM_ALIGN]


class Tma(NamedTuple):
    """A TMA descriptor and the coordinate tensor it goes with."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


@dataclass(frozen=True)
class Pipelines:
    """Who hands what to whom."""

    ab: pipeline.PipelineTmaUmma
    acc: pipeline.PipelineUmmaAsync


def make_mma():
    """The tiled MMA, one instruction wide: A and B K-major in shared memory."""
    return sm100.make_trivial_tiled_mma(
        AB_DTYPE,
        AB_DTYPE,
        OperandMajorMode.K,
        OperandMajorMode.K,
        Float32,
        tcgen05.CtaGroup.ONE,
        (TILE_M, TILE_N),
    )


def d_layout():
    """Swizzled shared-memory layout of D: (TILE_M, TILE_N), STORE_N columns at a time."""
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, D_DTYPE)
    return cute.tile_to_shape(atom, (TILE_M, TILE_N), order=(0, 1))


def cluster_layout():
    """(V, M, N, K) -> rank in the cluster; V counts the CTAs of one MMA."""
    return cute.make_layout((1, CLUSTER_M, 1, 1))


@cute.jit
def launch(
    a: cute.Pointer,
    b: cute.Pointer,
    d: cute.Pointer,
    m: Int32,
    n: Int32,
    k: Int32,
    stream: cuda.CUstream,
):
    """Builds the TMA descriptors and launches one CTA per tile of D."""
    mma = make_mma()
    tiler = (TILE_M, TILE_N, TILE_K)
    mA, mB, mD = row_major(a, m, k), row_major(b, n, k), row_major(d, m, n)
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    share = cpasync.CopyBulkTensorTileG2SMulticastOp(tcgen05.CtaGroup.ONE)
    a_layout = sm100.make_smem_layout_a(mma, tiler, AB_DTYPE, 1)
    b_layout = sm100.make_smem_layout_b(mma, tiler, AB_DTYPE, 1)
    cluster = cluster_layout().shape
    tma_a = cute.nvgpu.make_tiled_tma_atom_A(load, mA, a_layout, tiler, mma, cluster)
    tma_b = cute.nvgpu.make_tiled_tma_atom_B(
        share if CLUSTER_M > 1 else load, mB, b_layout, tiler, mma, cluster
    )
    store_tile = (WARP_ROWS, STORE_N)
    store_layout = cute.tile_to_shape(
        tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, D_DTYPE),
        store_tile,
        order=(0, 1),
    )
    tma_d = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), mD, store_layout, store_tile
    )
    gemm_kernel(Tma(*tma_a), Tma(*tma_b), Tma(*tma_d), k // TILE_K).launch(
        grid=[m // TILE_M, n // TILE_N, 1],
        cluster=[CLUSTER_M, 1, 1],
        block=[THREADS, 1, 1],
        min_blocks_per_mp=1,
        stream=stream,
    )


def row_major(pointer, rows, columns):
    """A dense row-major matrix whose rows start at multiples of 16 bytes."""
    pitch = cute.assume(Int64(columns), divby=TMA_ALIGN)
    return cute.make_tensor(
        pointer, cute.make_layout((rows, columns), stride=(pitch, 1))
    )


@cute.kernel
def gemm_kernel(a: Tma, b: Tma, d: Tma, k_tiles: Int32):
    """Device entry: barriers, then one branch per role."""
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp_idx == LOAD_WARP:
        for operand in (a, b, d):
            cpasync.prefetch_descriptor(operand.atom)
    storage = cutlass.memory.SmemAllocator().allocate(SharedStorage)
    tiler = (TILE_M, TILE_N, TILE_K)
    a_layout = sm100.make_smem_layout_a(make_mma(), tiler, AB_DTYPE, STAGES)
    b_layout = sm100.make_smem_layout_b(make_mma(), tiler, AB_DTYPE, STAGES)
    sA = storage.sA.get_tensor(a_layout.outer, swizzle=a_layout.inner)
    sB = storage.sB.get_tensor(b_layout.outer, swizzle=b_layout.inner)
    sD = storage.sD.get_tensor(d_layout().outer, swizzle=d_layout().inner)
    threads = functools.partial(pipeline.CooperativeGroup, pipeline.Agent.Thread)
    pipelines = Pipelines(
        ab=pipeline.PipelineTmaUmma.create(
            barrier_storage=storage.ab_mbar.data_ptr(),
            num_stages=STAGES,
            producer_group=threads(),
            consumer_group=threads(CLUSTER_M),
            tx_count=AB_TX_BYTES,
            cta_layout_vmnk=cluster_layout(),
            mcast_mode_mn=(0, 1),
            defer_sync=True,
        ),
        acc=pipeline.PipelineUmmaAsync.create(
            barrier_storage=storage.acc_mbar.data_ptr(),
            num_stages=1,
            producer_group=threads(),
            consumer_group=threads(EPILOGUE_THREADS),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        ),
    )
    pipeline.pipeline_init_arrive(cluster_shape_mn=(CLUSTER_M, 1), is_relaxed=True)
    pipeline.pipeline_init_wait(cluster_shape_mn=(CLUSTER_M, 1))

    if warp_idx == LOAD_WARP:
        load_ab(a, b, sA, sB, pipelines.ab, k_tiles)
    if warp_idx == MMA_WARP:
        multiply(sA, sB, pipelines, storage.tmem_address, k_tiles)
    if warp_idx < EPILOGUE_WARPS:
        store_d(d, sD, pipelines, storage.tmem_address)


@cute.jit
def load_ab(a: Tma, b: Tma, sA, sB, ab, k_tiles: Int32):
    """Producer, one warp: A's tile, and this CTA's slice of B's for the whole cluster."""
    m_tile, n_tile, _ = cute.arch.block_idx()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    thr_mma = make_mma().get_slice(0)
    gA = cute.local_tile(a.tensor, (TILE_M, TILE_K), (m_tile, None))
    gB = cute.local_tile(b.tensor, (TILE_N, TILE_K), (n_tile, None))
    tAsA, tAgA = partition(a.atom, sA, thr_mma.partition_A(gA))
    tBsB, tBgB = partition(b.atom, sB, thr_mma.partition_B(gB), rank, CLUSTER_M)
    peers = None
    if cutlass.const_expr(CLUSTER_M > 1):
        peers = cute.make_layout_image_mask(cluster_layout(), (0, rank, 0, 0), 1)
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
    for k_tile in cutlass.range(k_tiles, unroll=1):
        ab.producer_acquire(state)
        full = ab.producer_get_barrier(state)
        cute.copy(a.atom, tAgA[None, k_tile], tAsA[None, state.index], tma_bar_ptr=full)
        cute.copy(
            b.atom,
            tBgB[None, k_tile],
            tBsB[None, state.index],
            tma_bar_ptr=full,
            mcast_mask=peers,
        )
        state.advance()
    # A peer's MMA still signals these barriers: stay until every stage is free.
    ab.producer_tail(state)


def partition(atom, smem, gmem, rank=0, slices=1):
    """TMA views of tiles (MMA, MMA_MN, MMA_K, ...): smem (TMA, stage), gmem (TMA, tile)."""
    return cpasync.tma_partition(
        atom,
        rank,
        cute.make_layout(slices),
        cute.group_modes(smem, 0, 3),
        cute.group_modes(gmem, 0, 3),
    )


@cute.jit
def multiply(sA, sB, pipelines: Pipelines, tmem_address, k_tiles: Int32):
    """Owns the tensor memory and issues the MMAs, one warp of which one thread is elected."""
    cute.arch.alloc_tmem(TILE_N, tmem_address.ptr)
    cute.arch.relinquish_tmem_alloc_permit()
    tmem = tensor_memory(tmem_address)
    mma = make_mma()
    tCrA = mma.make_fragment_A(sA)
    tCrB = mma.make_fragment_B(sB)
    tCtC = accumulator(tmem)
    ab_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
    acc_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
    pipelines.acc.producer_acquire(acc_state)
    for k_tile in cutlass.range(k_tiles, unroll=1):
        pipelines.ab.consumer_wait(ab_state)
        for k_block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            mma.set(tcgen05.Field.ACCUMULATE, k_tile > 0 if k_block == 0 else True)
            place = (None, None, k_block, ab_state.index)
            cute.gemm(mma, tCtC, tCrA[place], tCrB[place], tCtC)
        pipelines.ab.consumer_release(ab_state)
        ab_state.advance()
    pipelines.acc.producer_commit(acc_state)
    acc_state.advance()
    # The epilogue has read the accumulator: nobody needs the tensor memory any more.
    # (The DSL's producer_tail waits in CTAs of even rank only.)
    pipelines.acc.producer_acquire(acc_state)
    cute.arch.dealloc_tmem(tmem, TILE_N)


def accumulator(tmem):
    """The accumulator as the MMA writes it: (MMA, MMA_M, MMA_N)."""
    mma = make_mma()
    shape = mma.partition_shape_C((TILE_M, TILE_N))
    return cute.make_tensor(tmem, mma.make_fragment_C(shape).layout)


def before_signal():
    """What this thread did to the tensor memory comes before what it signals next."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def after_wait():
    """What this thread does to the tensor memory comes after what it has waited for."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def tensor_memory(tmem_address):
    """The accumulator's address, once its owner has allocated it."""
    cute.arch.barrier(barrier_id=TMEM_BARRIER, number_of_threads=TMEM_THREADS)
    return cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_address.ptr)


@cute.jit
def store_d(d: Tma, sD, pipelines: Pipelines, tmem_address):
    """Consumers: a warp takes its quarter of the accumulator and stores its rows of D."""
    thread_idx, _, _ = cute.arch.thread_idx()
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tCtC = accumulator(tensor_memory(tmem_address))
    load = tcgen05.make_tmem_copy(cute.make_copy_atom(LOAD_OP, Float32), tCtC)
    store = cute.make_tiled_copy_D(
        cute.make_copy_atom(
            CopyUniversalOp(), D_DTYPE, num_bits_per_copy=D_DTYPE.width * LOAD_COLUMNS
        ),
        load,
    )
    thr_load, thr_store = load.get_slice(thread_idx), store.get_slice(thread_idx)
    thr_mma = make_mma().get_slice(0)
    tDtC = thr_load.partition_S(tCtC)
    tCsD = thr_mma.partition_C(sD)
    tDsD = thr_store.partition_D(tCsD)
    shape = thr_load.partition_D(tCsD).shape
    rC = cute.make_rmem_tensor(shape, Float32)
    rD = cute.make_rmem_tensor(shape, D_DTYPE)
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
    pipelines.acc.consumer_wait(state)
    after_wait()
    cute.copy(load, tDtC, rC)
    cute.arch.fence_view_async_tmem_load()
    before_signal()
    pipelines.acc.consumer_release(state)
    rD.store(rC.load().to(D_DTYPE))
    cute.copy(store, thr_store.retile(rD), tDsD)
    # All lanes make their rows visible to TMA before the warp stores them.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    m_tile, n_tile, _ = cute.arch.block_idx()
    box = (WARP_ROWS, STORE_N)
    gD = cute.local_tile(d.tensor, (TILE_M, TILE_N), (m_tile, n_tile))
    tDsD, tDgD = cpasync.tma_partition(
        d.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(cute.local_tile(sD, box, (warp_idx, None)), 0, 2),
        cute.group_modes(cute.local_tile(gD, box, (warp_idx, None)), 0, 2),
    )
    cute.copy(d.atom, tDsD, tDgD)
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)


gemm_kernel.set_name_prefix(
    "gemm_one_cta", remove_cutlass_symbol=True, keep_mangled_name=False
)


@functools.cache
def compile():
    """Compiles `launch`; returns the callable."""
    return cute.compile(
        launch,
        make_ptr(AB_DTYPE, 0, cute.AddressSpace.gmem, assumed_align=TMA_ALIGN),
        make_ptr(AB_DTYPE, 0, cute.AddressSpace.gmem, assumed_align=TMA_ALIGN),
        make_ptr(D_DTYPE, 0, cute.AddressSpace.gmem, assumed_align=TMA_ALIGN),
        *map(Int32, (TILE_M, TILE_N, TILE_K)),
        cuda.CUstream(0),
    )
