# SPDX-License-Identifier: Apache-2.0
"""The device code of a slow backward kernel: one thread for each key, then one for each row.

It stands behind the header, constants and entry that the templates make, and takes their names.
A CTA has a KV head; nothing but the CTA itself adds to its sums of dQ, so there are no atomics.
"""

# ruff: noqa: F821  (constants of the file it is put into)

LOG2_E = 1.4426950408889634


def place_of(x):
    """The block of rows of a CTA, its head and its batch."""
    number, _, _ = cute.arch.block_idx()
    blocks = cute.ceil_div(x.shape[1], TILE_Q)
    head, batch = number // blocks % x.shape[2], number // blocks // x.shape[2]
    return number % blocks, head, batch


@cute.kernel
def stats_kernel(
    dout: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    sums: cute.Tensor,
    stat_s: cute.Tensor,
    stat_d: cute.Tensor,
    softmax_scale: Float32,
):
    thread, _, _ = cute.arch.thread_idx()
    block, head, batch = place_of(dout)
    row, at = block * TILE_Q + thread, batch * dout.shape[2] + head
    of_scores, total = -Float32.inf, Float32(0.0)
    if row < dout.shape[1]:
        found = lse[batch, head, row]
        if found > -Float32.inf:
            of_scores = -found / softmax_scale
        for d in cutlass.range(HEAD_DIM_V, unroll=16):
            total += dout[batch, row, head, d].to(Float32) * out[
                batch, row, head, d
            ].to(Float32)
    stat_s[row, at] = of_scores
    stat_d[row, at] = -total
    for d in cutlass.range(HEAD_DIM_QK, unroll=16):
        sums[d, row, at] = Float32(0.0)


def rounded(x):
    return x.to(DTYPE).to(Float32)


def in_fp32(x, batch, row, head, d):
    return x[batch, row, head, d].to(Float32)


@cute.jit
def dot(
    a: cute.Tensor,
    row: Int32,
    head: Int32,
    b: cute.Tensor,
    key: Int32,
    head_kv: Int32,
    batch: Int32,
    start: Float32,
):
    total = start
    for d in cutlass.range(a.shape[3], unroll=16):
        of_a, of_b = in_fp32(a, batch, row, head, d), in_fp32(b, batch, key, head_kv, d)
        total = total + of_a * of_b
    return total


@cute.kernel
def main_kernel(
    dout: cute.Tensor,
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    sums: cute.Tensor,
    stat_s: cute.Tensor,
    stat_d: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    softmax_scale: Float32,
    heads_kv: Int32,
):
    thread, _, _ = cute.arch.thread_idx()
    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    smem = cutlass.memory.SmemAllocator()
    acc_k, acc_v = [
        smem.allocate_tensor(Float32, cute.make_layout((TILE_KV, width)), TMA_ALIGN)
        for width in (HEAD_DIM_QK, HEAD_DIM_V)
    ]
    for number in cutlass.range(first, k.shape[0] * heads_kv, step, unroll=1):
        batch, head_kv = number // heads_kv, number % heads_kv
        one_head(
            *(dout, q, k, v, sums, stat_s, stat_d, dk, dv, acc_k, acc_v),
            *(softmax_scale, batch, head_kv, heads_kv, thread),
        )


@cute.jit
def one_head(
    dout: cute.Tensor,
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    sums: cute.Tensor,
    stat_s: cute.Tensor,
    stat_d: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    acc_k: cute.Tensor,
    acc_v: cute.Tensor,
    softmax_scale: Float32,
    batch: Int32,
    head_kv: Int32,
    heads_kv: Int32,
    thread: Int32,
):
    seqlen_q, seqlen_kv = q.shape[1], k.shape[1]
    scale_log2 = softmax_scale * LOG2_E
    for tile in cutlass.range(cute.ceil_div(seqlen_kv, TILE_KV), unroll=1):
        key = tile * TILE_KV + thread
        if key < seqlen_kv:
            for d in cutlass.range(HEAD_DIM_QK, unroll=16):
                acc_k[thread, d] = Float32(0.0)
            for d in cutlass.range(HEAD_DIM_V, unroll=16):
                acc_v[thread, d] = Float32(0.0)
            for number_of_head in cutlass.range(Q_PER_KV, unroll=1):
                head = head_kv * Q_PER_KV + number_of_head
                at = batch * (heads_kv * Q_PER_KV) + head
                for row in cutlass.range(seqlen_q, unroll=1):
                    sees = (
                        key <= row + seqlen_kv - seqlen_q if CAUSAL else key < seqlen_kv
                    )
                    if sees:
                        s = dot(q, row, head, k, key, head_kv, batch, stat_s[row, at])
                        dp = dot(
                            dout, row, head, v, key, head_kv, batch, stat_d[row, at]
                        )
                        p = cute.math.exp2(s * scale_log2, fastmath=True)
                        ds, p = rounded(p * dp), rounded(p)
                        for d in cutlass.range(HEAD_DIM_QK, unroll=16):
                            more = ds * in_fp32(q, batch, row, head, d)
                            acc_k[thread, d] = acc_k[thread, d] + more
                        for d in cutlass.range(HEAD_DIM_V, unroll=16):
                            more = p * in_fp32(dout, batch, row, head, d)
                            acc_v[thread, d] = acc_v[thread, d] + more
            for d in cutlass.range(HEAD_DIM_QK, unroll=16):
                dk[batch, key, head_kv, d] = (acc_k[thread, d] * softmax_scale).to(
                    DTYPE
                )
            for d in cutlass.range(HEAD_DIM_V, unroll=16):
                dv[batch, key, head_kv, d] = acc_v[thread, d].to(DTYPE)
        first, end = tile * TILE_KV, cutlass.min((tile + 1) * TILE_KV, seqlen_kv)
        for number_of_head in cutlass.range(Q_PER_KV, unroll=1):
            head = head_kv * Q_PER_KV + number_of_head
            at = batch * (heads_kv * Q_PER_KV) + head
            for block in cutlass.range(cute.ceil_div(seqlen_q, TILE_KV), unroll=1):
                row = block * TILE_KV + thread
                last = end
                if CAUSAL:
                    last = cutlass.min(end, row + seqlen_kv - seqlen_q + 1)
                if row < seqlen_q:
                    for seen in cutlass.range(first, last, unroll=1):
                        s = dot(q, row, head, k, seen, head_kv, batch, stat_s[row, at])
                        dp = dot(
                            dout, row, head, v, seen, head_kv, batch, stat_d[row, at]
                        )
                        p = cute.math.exp2(s * scale_log2, fastmath=True)
                        ds = rounded(p * dp)
                        for d in cutlass.range(HEAD_DIM_QK, unroll=16):
                            more = ds * in_fp32(k, batch, seen, head_kv, d)
                            sums[d, row, at] = sums[d, row, at] + more


@cute.kernel
def finish_kernel(sums: cute.Tensor, dq: cute.Tensor, softmax_scale: Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, head, batch = place_of(dq)
    row, at = block * TILE_Q + thread, batch * dq.shape[2] + head
    if row < dq.shape[1]:
        for d in cutlass.range(HEAD_DIM_QK, unroll=16):
            dq[batch, row, head, d] = (sums[d, row, at] * softmax_scale).to(DTYPE)


stats_kernel.set_name_prefix(
    SPEC["name"] + "_stats", remove_cutlass_symbol=True, keep_mangled_name=False
)
main_kernel.set_name_prefix(
    SPEC["name"], remove_cutlass_symbol=True, keep_mangled_name=False
)
finish_kernel.set_name_prefix(
    SPEC["name"] + "_finish", remove_cutlass_symbol=True, keep_mangled_name=False
)


@cute.jit
def launch(
    dout: cute.Tensor,
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    dq: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    workspace: cute.Tensor,
    softmax_scale: Float32,
    sm_count: Int32,
    stream: cuda.CUstream,
):
    batch, seqlen_q, heads, _ = q.shape
    heads_kv = k.shape[2]
    blocks = cute.ceil_div(seqlen_q, TILE_Q)
    rows, count = blocks * TILE_Q, batch * heads
    all_rows = Int64(rows) * count
    sums = cute.make_tensor(
        workspace.iterator, cute.make_layout((HEAD_DIM_QK, rows, count))
    )
    places = [
        workspace.iterator + all_rows * (HEAD_DIM_QK + number)
        for number in range(STATISTICS)
    ]
    stat_s, stat_d = [
        cute.make_tensor(place, cute.make_layout((rows, count))) for place in places
    ]
    stats_kernel(dout, out, lse, sums, stat_s, stat_d, softmax_scale).launch(
        grid=[blocks * count, 1, 1], block=[TILE_Q, 1, 1], stream=stream
    )
    main_kernel(
        dout, q, k, v, sums, stat_s, stat_d, dk, dv, softmax_scale, heads_kv
    ).launch(
        grid=[cutlass.min(sm_count, heads_kv * batch), 1, 1],
        block=[TILE_KV, 1, 1],
        stream=stream,
    )
    finish_kernel(sums, dq, softmax_scale).launch(
        grid=[blocks * count, 1, 1], block=[TILE_Q, 1, 1], stream=stream
    )
