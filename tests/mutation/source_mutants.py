# SPDX-License-Identifier: Apache-2.0
"""Generated kernels with one synchronisation of their source dropped, or one index wrong."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from .ptx_mutants import Mutant

# Statements that are a call of one of these are dropped.
CALLS = frozenset(
    (
        "advance",
        "alloc_tmem",
        "barrier",
        "barrier_arrive",
        "commit_group",
        "consumer_release",
        "consumer_wait",
        "cp_async_bulk_commit_group",
        "cp_async_bulk_wait_group",
        "dealloc_tmem",
        "fence",
        "fence_proxy",
        "fence_view_async_tmem_load",
        "fence_view_async_tmem_store",
        "mask_row",
        "mbarrier_arrive",
        "order_arrive",
        "order_wait",
        "pipeline_init_arrive",
        "pipeline_init_wait",
        "producer_acquire",
        "producer_commit",
        "producer_tail",
        "relinquish_tmem_alloc_permit",
        "rescale",
        "sync_threads",
        "sync_warp",
        "wait",
        "wait_group",
    )
)

# Of backward kernels these as well.
CALLS_OF_BACKWARD = CALLS | {
    *("add_dq", "clear_ds", "griddepcontrol_wait", "mask_block", "meet"),
}

# (what, pattern, instead): each match is one mutant.
REPLACEMENTS = (
    ("release count + 1", r"(?<=_RELEASES = )(\d+)", r"\1 + 1"),
    ("release count - 1", r"(?<=_RELEASES = )(\d+)", r"\1 - 1"),
    ("half the bytes", r"(?<=_TX_BYTES = )(\d+)", r"\1 // 2"),
    ("half the threads", r"(?<=^ORDER_THREADS = )(\d+)", r"\1 // 2"),
    ("a turn for all", r"(?<=ORDER_BARRIER \+ )warpgroup_idx % WARPGROUPS", "1"),
    ("a store barrier for all", r"STORE_BARRIER \+ mma.warpgroup_idx", "STORE_BARRIER"),
    ("one group more stays in flight", r"wait_group\((\d)", r"wait_group(1 + \1"),
    ("always block 0", r"(?<=t[KV]g[KV]\[None, )[^\]]+", "0"),
    ("the block after", r"(?<=t[KV]g[KV]\[None, )([^\]]+)", r"\1 + 1"),
    ("the block before", r"(?<=t[KV]g[KV]\[None, )([^\]]+)", r"\1 - 1"),
    # A wrong slice: the block number counts tiles of the head, of which there is only one.
    ("blocks along the head", r"(?<=tiler, )\(None, 0\)", "(0, None)"),
    ("blocks along the head", r"(?<=HEAD_DIM_QK\), )\(None, 0\)", "(0, None)"),
    ("blocks along the head", r"(?<=TILE_KV\), )\(0, None\)", "(None, 0)"),
    ("always the first half", r"(?<=q_tile \* HALVES) \+ half", ""),
    ("always the first half", r"\bhalf(?= \* (?:[SO]_COLUMNS|HALF_ROWS))", "0"),
    ("always stage 0", r"(?<=smem\[None, )state.index", "0"),
    ("always stage 0", r"(?<=half, )kv_state\.index(?=\))", "Int32(0)"),
    ("accumulates at once", r"(?<=\.index, )(?:i > 0|\w+ > 1)(?=\))", "True"),
    ("never accumulates", r"(?<=\.index, )(?:i > 0|\w+ > 1)(?=\))", "False"),
    ("the same phase again", r"(?<=phase \^)(=? )1", r"\g<1>0"),
    ("a warp fewer", r"(?<=^TMEM_THREADS = )(\d+)", r"\1 - 32"),
    ("always stage 0", r"(?<=, )[qkv]_(?:state.index|stage)(?=[,)\]])", "Int32(0)"),
    ("the next Q stage", r"q_state_done(?=\.index)", "q_state"),
    ("another KV head", r"(?<=head_kv = )head // Q_PER_KV", "Int32(0)"),
    ("a query head's number", r"(?<=head_kv = )head // Q_PER_KV(?#gqa)", "head"),
    ("always batch 0", r"(?<=head_kv, )batch", "Int32(0)"),
    ("the slice of rank 0", r"(?<=batch, )rank(?=, CLUSTER_SIZE)", "0"),
    ("every CTA loads the whole tile", r"(?<=batch), rank, CLUSTER_SIZE", ""),
    ("only CTA 0", r"(?<=, t[KV]s[KV], )peers", "cutlass.Int16(1)"),
    ("only CTA 1", r"(?<=, t[KV]s[KV], )peers", "cutlass.Int16(2)"),
    (
        "frees stages of its own CTA only",
        r"mcast_mode_mn(=|\": )\(0, 1\)",
        r"mcast_mode_mn\g<1>(1, 0)",
    ),
    # V as rows, transposed by two warps.
    (
        "always the first stage of rows",
        r"(?<=transpose_stage\(rings, )rows_state\.index",
        "Int32(0)",
    ),
    ("one warp fills it", r"(?<=warps=)TRANSPOSE_WARPS", "1"),
    (
        "one warp frees it",
        r"TRANSPOSE_WARPS(?=\)?,\n)(?<!// TRANSPOSE_WARPS)(?<!=TRANSPOSE_WARPS)",
        "1",
    ),
    (
        "a third warp transposes",
        r"(?<=warp_idx <= )TRANSPOSE_WARPS",
        "TRANSPOSE_WARPS + 1",
    ),
    (
        "the stage of the block before",
        r"(?<=state_at\(v_user, ROWS_STAGES, before \+ )i",
        "cutlass.max(i - 1, 0)",
    ),
    (
        "the rows of the same block",
        r"(?<=state_at\(rows_user, ROWS_STAGES, before \+ )i - 1",
        "i",
    ),
    ("blocks of earlier tiles are forgotten", r"^        before \+= blocks\n", ""),
    (
        "both warps load the first boxes",
        r"\(cute\.arch\.make_warp_uniform\(cute\.arch\.warp_idx\(\)\) - 1\) \* V_BOXES",
        "Int32(0)",
    ),
    ("no cluster", r"(?<=\(1, )num_multicast(?=, 1, 1\))", "1"),
    # The backward pass.
    ("the other stage of dS", r"(?<=acc_dP, )ds_state\.index", "1 - ds_state.index"),
    ("the other stage of dS", r"(?<=ds_stage = )dq_state\.index", "1 - dq_state.index"),
    (
        "gives Q back before dK and S are done",
        r"^( +warpgroup\.wait_group\(0\)\n)( +rings\.q\.consumer_release\(q_state\)\n)",
        r"\2\1",
    ),
    (
        "gives dO back before dV and dQ are done",
        r"^( +warpgroup\.wait_group\(0\)\n)( +rings\.do\.consumer_release\(do_state\)\n)",
        r"\2\1",
    ),
    ("rows beyond the end count", r"(?<=of_row = )-Float32\.inf", "Float32(0.0)"),
    (
        "rows beyond the end have an LSE",
        r"if first \+ thread < dout\.shape\[1\]:(?=\n +of_row = )",
        "if thread >= 0:",
    ),
    (
        "rows without keys count",
        r"cutlass\.select_\(\s*has_keys, (-of_row \* (?:inverse_scale|LOG2_E)), of_row\s*\)",
        r"\1",
    ),
    (
        "keys beyond the end are seen",
        r"(?<=beyond = )key \+ ROW_STEP \* r >= (?:problem\.seqlen_kv|SEQLEN_KV)",
        "key < 0",
    ),
    ("sums are not cleared", r"cute\.autovec_copy\(zeros, gSums\[[^\n]+\)$", "pass"),
    ("tickets are not set back", r"mTicket\[0\] = 0$", "pass"),
    (
        "statistics of the block after",
        r"(?<=mStat[SD]\[None, )place \+ block",
        r"\g<0> + 1",
    ),
    (
        "sums of the block after",
        r"(?<=, )place \+ block$",
        r"\g<0> + 1",
    ),
)


def mutants(source: str) -> Iterator[Mutant]:
    """All mutants of a generated kernel, in the order of their lines."""
    seen: Counter[str] = Counter()
    found = [*_dropped(source), *_replaced(source)]
    for line, what, text in sorted(found, key=lambda mutant: mutant[0]):
        before = source.split("\n")[line - 1].strip()
        key = f"{before}: {what}"
        seen[key] += 1
        number = f" #{seen[key]}" if seen[key] > 1 else ""
        yield Mutant(f"{before}{number}: {what}", line, before, text)


def _dropped(source: str) -> Iterator[tuple[int, str, str]]:
    lines = source.split("\n")
    calls = CALLS_OF_BACKWARD if "\ndef fmha_bwd(" in source else CALLS
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            continue
        called = node.value.func
        name = called.attr if isinstance(called, ast.Attribute) else None
        name = called.id if isinstance(called, ast.Name) else name
        if name in calls:
            assert node.end_lineno is not None
            indent = " " * node.col_offset
            kept = lines[: node.lineno - 1], lines[node.end_lineno :]
            yield node.lineno, "dropped", "\n".join(
                [*kept[0], f"{indent}pass", *kept[1]]
            )


def _replaced(source: str) -> Iterator[tuple[int, str, str]]:
    for what, pattern, instead in REPLACEMENTS:
        if "#gqa" in pattern and re.search(r"^Q_PER_KV = 1\b", source, re.M):
            continue  # the same number
        for match in re.finditer(pattern, source, re.M):
            if source[: match.start()].rpartition("\n")[2].startswith("def "):
                continue  # a parameter's name
            line = source.count("\n", 0, match.start()) + 1
            changed = match.expand(instead)
            yield line, what, source[: match.start()] + changed + source[match.end() :]
