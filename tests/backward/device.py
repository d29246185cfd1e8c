# SPDX-License-Identifier: Apache-2.0
"""The device code of a slow backward kernel: one thread for each key, then one for each row.

It stands behind the header, constants and entry that the templates make, and takes their names.
A CTA has a KV head; nothing but the CTA itself adds to its sums of dQ, so there are no atomics.
"""

# ruff: noqa: F821  (constants of the file it is put into)

LOG2_E = 1.4426950408889634


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
    block, head, batch = cute.arch.block_idx()
    _, heads, _ = cute.arch.grid_dim()
    row, at = block * TILE_Q + thread, batch * heads + head
    of_scores, total = -Float32.inf, Float32(0.0)
    if row < dout.shape[1]:
        found = lse[batch, head, row]
        if found > -Float32.inf:
            of_scores = -found / softmax_scale
        for d in cutlass.range_constexpr(HEAD_DIM_V):
            total += dout[batch, row, head, d].to(Float32) * out[
                batch, row, head, d
            ].to(Float32)
    stat_s[row, at] = of_scores
    stat_d[row, at] = -total
    for d in cutlass.range_constexpr(HEAD_DIM_QK):
        sums[d, row, at] = Float32(0.0)


def rows_of(x, batch, row, head, size):
    """A row of a tensor in registers, in fp32."""
    return [x[batch, row, head, d].to(Float32) for d in range(size)]


def dot(a, b, start):
    total = start
    for x, y in zip(a, b, strict=True):
        total = total + x * y
    return total


def rounded(x):
    return x.to(DTYPE).to(Float32)


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
    number, _, _ = cute.arch.block_idx()
    seqlen_q, seqlen_kv = q.shape[1], k.shape[1]
    batch, head_kv = number // heads_kv, number % heads_kv
    scale_log2 = softmax_scale * LOG2_E
    for tile in cutlass.range(cute.ceil_div(seqlen_kv, TILE_KV), unroll=1):
        key = tile * TILE_KV + thread
        acc_k = cute.make_rmem_tensor(HEAD_DIM_QK, Float32)
        acc_v = cute.make_rmem_tensor(HEAD_DIM_V, Float32)
        acc_k.fill(0.0)
        acc_v.fill(0.0)
        if key < seqlen_kv:
            of_k = rows_of(k, batch, key, head_kv, HEAD_DIM_QK)
            of_v = rows_of(v, batch, key, head_kv, HEAD_DIM_V)
            for number_of_head in cutlass.range(Q_PER_KV, unroll=1):
                head = head_kv * Q_PER_KV + number_of_head
                at = batch * (heads_kv * Q_PER_KV) + head
                for row in cutlass.range(seqlen_q, unroll=1):
                    sees = (
                        key <= row + seqlen_kv - seqlen_q if CAUSAL else key < seqlen_kv
                    )
                    if sees:
                        of_q = rows_of(q, batch, row, head, HEAD_DIM_QK)
                        of_o = rows_of(dout, batch, row, head, HEAD_DIM_V)
                        s = dot(of_q, of_k, stat_s[row, at])
                        p = cute.math.exp2(s * scale_log2, fastmath=True)
                        ds = rounded(p * dot(of_o, of_v, stat_d[row, at]))
                        p = rounded(p)
                        for d in cutlass.range_constexpr(HEAD_DIM_QK):
                            acc_k[d] = acc_k[d] + ds * of_q[d]
                        for d in cutlass.range_constexpr(HEAD_DIM_V):
                            acc_v[d] = acc_v[d] + p * of_o[d]
            for d in cutlass.range_constexpr(HEAD_DIM_QK):
                dk[batch, key, head_kv, d] = (acc_k[d] * softmax_scale).to(DTYPE)
            for d in cutlass.range_constexpr(HEAD_DIM_V):
                dv[batch, key, head_kv, d] = acc_v[d].to(DTYPE)
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
                    of_q = rows_of(q, batch, row, head, HEAD_DIM_QK)
                    of_o = rows_of(dout, batch, row, head, HEAD_DIM_V)
                    acc = cute.make_rmem_tensor(HEAD_DIM_QK, Float32)
                    for d in cutlass.range_constexpr(HEAD_DIM_QK):
                        acc[d] = sums[d, row, at]
                    for seen in cutlass.range(first, last, unroll=1):
                        of_k = rows_of(k, batch, seen, head_kv, HEAD_DIM_QK)
                        of_v = rows_of(v, batch, seen, head_kv, HEAD_DIM_V)
                        s = dot(of_q, of_k, stat_s[row, at])
                        p = cute.math.exp2(s * scale_log2, fastmath=True)
                        ds = rounded(p * dot(of_o, of_v, stat_d[row, at]))
                        for d in cutlass.range_constexpr(HEAD_DIM_QK):
                            acc[d] = acc[d] + ds * of_k[d]
                    for d in cutlass.range_constexpr(HEAD_DIM_QK):
                        sums[d, row, at] = acc[d]


@cute.kernel
def finish_kernel(sums: cute.Tensor, dq: cute.Tensor, softmax_scale: Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, head, batch = cute.arch.block_idx()
    _, heads, _ = cute.arch.grid_dim()
    row, at = block * TILE_Q + thread, batch * heads + head
    if row < dq.shape[1]:
        for d in cutlass.range_constexpr(HEAD_DIM_QK):
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
        grid=[blocks, heads, batch], block=[TILE_Q, 1, 1], stream=stream
    )
    main_kernel(
        dout, q, k, v, sums, stat_s, stat_d, dk, dv, softmax_scale, heads_kv
    ).launch(grid=[heads_kv * batch, 1, 1], block=[TILE_KV, 1, 1], stream=stream)
    finish_kernel(sums, dq, softmax_scale).launch(
        grid=[blocks, heads, batch], block=[TILE_Q, 1, 1], stream=stream
    )
