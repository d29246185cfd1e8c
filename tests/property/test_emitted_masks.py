# SPDX-License-Identifier: Apache-2.0
"""The lines of a kernel that say what rows see, run as plain Python, against brute force.

Rows are arrays here, blocks and lengths whole numbers: every row of a problem, every block.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args
from unittest.mock import MagicMock

import numpy as np
import pytest
import support
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.ops.cases import Case, Params, tiles_of
from fmha_gen.ops.inputs import params
from fmha_gen.ops.masks import Lengths, of_spec

LENGTHS = (1, 63, 64, 65, 127, 129, 1000)
SIZES = [*itertools.starmap(Lengths, itertools.product(LENGTHS, LENGTHS))]
EDGES = [Lengths(400, 400 + more) for more in range(290, 354)]  # at each key of a block
SM90 = "arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 64\ntile: {q: 128, kv: 64}\n"
SM100 = "arch: sm100\nop: fmha_fwd\ndtype: bf16\nhead_dim: 64\n"
PACKED = "heads: {q_per_kv: 4}\npack_gqa: true\n"
MASKS = {
    "causal": "mask: causal\n",
    "far": "mask: causal\nwindow: {left: 300}\n",
    "just far": "mask: causal\nwindow: {left: 255}\n",
    "a block": "mask: causal\nwindow: {left: 63}\n",
    "a block and a key": "mask: causal\nwindow: {left: 64}\n",
    "near": "mask: causal\nwindow: {left: 5}\n",
    "two sides": "window: {left: 100, right: 200}\n",
    "left": "window: {left: 70}\n",
    "right": "window: {right: 70}\n",
}
PARAMS = {
    "documents": "mask: causal\ndocuments: true\n",
    "documents, both ends": "documents: true\n",
    "documents, window": "mask: causal\ndocuments: true\nwindow: {left: 70}\n",
    "prefix": "mask: causal\nprefix: true\n",
    "windows of a call": "window: {left: argument, right: argument}\n",
    "declared": (
        "params: {first: {shape: [b, row], dtype: int32, monotone: row}, more: int32}\n"
        "mask: 'kv <= q + more and kv >= first[b, row] // 2 and q - kv <= 300'\n"
    ),
}
KERNELS = {
    **{f"sm90, {name}": SM90 + mask for name, mask in MASKS.items()},
    **{
        f"sm90, packed, {name}": SM90 + PACKED + MASKS[name] for name in ("far", "near")
    },
    **{f"sm100, {name}": SM100 + mask for name, mask in MASKS.items()},
}
WITH_PARAMS = {
    **{f"sm90, {name}": SM90 + mask for name, mask in PARAMS.items()},
    "sm90, packed, documents": SM90 + PACKED + PARAMS["documents"],
    **{f"sm100, {name}": SM100 + mask for name, mask in PARAMS.items()},
}
BATCH = 1  # of two, which every problem has
FAULTY = "sm90, two sides"
FUNCTIONS = {
    *("RowEdges", "keys_before", "keys_from", "load_edges"),
    "Range",
    "key_blocks",
    "common_keys",
    "mask_block",
    "mask_left",
    "mask_row",
}


def problem_of(kernel: Kernel, sizes: Lengths) -> SimpleNamespace:
    """Lengths, and what the mask reads."""
    return SimpleNamespace(
        seqlen_q=sizes.q, seqlen_kv=sizes.kv, **values_of(kernel, sizes)
    )


def values_of(kernel: Kernel, sizes: Lengths) -> dict[str, Any]:
    """What a mask reads: another kind of values for each pair of lengths."""
    spec = kernel.names["SPEC"]
    kind = get_args(Params)[(sizes.q + sizes.kv) % 4]
    case = Case(str(sizes), 2, 1, sizes.q, sizes.kv, params=kind)
    return dict(params(spec, tiles_of(kernel.names), case))


class Kernel:
    """The functions of a generated kernel that are about its mask."""

    def __init__(self, text: str) -> None:
        self.lane = 0
        self.names = self._stubs() | read_constants(text)
        nodes = [
            node
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and node.name in FUNCTIONS
        ]
        future = "from __future__ import annotations\n"
        exec(future + ast.unparse(ast.Module(nodes, [])), self.names)
        self.arch = self.names["SPEC"]["arch"]
        self.mask, self.tile_kv = of_spec(self.names["SPEC"]), self.names["TILE_KV"]

    def _stubs(self) -> dict[str, Any]:
        cute, cutlass = MagicMock(), MagicMock()
        cute.jit = lambda function: function
        cute.ceil_div = lambda a, b: -(-a // b)
        cute.size = lambda S, mode: self.tile_kv // 4
        cute.arch.lane_idx = lambda: self.lane
        cutlass.min, cutlass.max, cutlass.select_ = np.minimum, np.maximum, np.where
        cutlass.range_constexpr = range
        return {
            **{"__name__": "kernel", "cute": cute, "cutlass": cutlass},
            **{"Float32": SimpleNamespace(inf=math.inf), "NamedTuple": NamedTuple},
            **{"Int64": np.int64, "rows_and_columns": lambda S: S},
            "Int32": lambda x: np.asarray(x).astype(np.int32).astype(np.int64),
        }

    def call(self, name: str, **given: Any) -> Any:
        """A function with those of its parameters that this kernel has."""
        function = self.names[name]
        code, given = function.__code__, {**given, "head": 0, "batch": BATCH}
        return function(*(given[x] for x in code.co_varnames[: code.co_argcount]))

    def seen(self, name: str, rows: Any, block: int, problem: SimpleNamespace) -> Any:
        """Bool [rows, keys of the block]: where a masking function leaves a score of 0."""
        kept = np.zeros((len(rows), self.tile_kv), np.bool_)
        given: dict[str, Any] = {"row": rows, "block": block, "problem": problem}
        edges = SimpleNamespace(first_key={}, end_key={})
        if "load_edges" in self.names:
            of_rows = {"edges": edges, "row": rows, "problem": problem}
            edges = self.call("load_edges", **of_rows) or edges
        given["edges"] = edges
        if self.arch == "sm100":
            S: dict[Any, Any] = dict.fromkeys(range(self.tile_kv), 0.0)
            self.call(name, rS=S, **given)
            for column, score in S.items():
                kept[:, column] = score == 0
            return kept
        pairs = [*itertools.product((0, 1), range(self.tile_kv // 4))]
        for self.lane in range(4):
            S = dict.fromkeys(pairs, 0.0)
            self.call(name, acc_S=S, **given)
            for (r, c), score in S.items():
                if r == 0:  # the other row of a thread is the first one of another
                    kept[:, c // 2 * 8 + c % 2 + self.lane * 2] = score == 0
        return kept


def check(kernel: Kernel, lengths: Sequence[Lengths]) -> None:
    """Blocks are the solver's, and those that are not whole are masked as their rows see."""
    names, tile_kv = kernel.names, kernel.tile_kv
    group = names["TILE_Q"] // names.get("TILE_POSITIONS", names["TILE_Q"])
    rows_of_tile = names["TILE_Q"] // group
    own = 128 if kernel.arch == "sm100" else rows_of_tile  # that agree on whole blocks
    masked = "mask_row" if kernel.arch == "sm100" else "mask_block"
    for sizes in lengths:
        problem = problem_of(kernel, sizes)
        mask = kernel.mask.given(values_of(kernel, sizes)).at(BATCH, 0, 0)
        visible = mask.visible(np.arange(sizes.q), sizes)
        # Where rows have edges of their own, those beyond the last one have its.
        stop = sizes.q if mask.reads("row") else 1 << 30
        keys = -(-sizes.kv // tile_kv) * tile_kv
        padded = np.pad(visible, ((0, 0), (0, keys - sizes.kv)))
        for first in range(0, sizes.q, own):
            tile = first // rows_of_tile * rows_of_tile
            rows = np.arange(first, min(first + own, sizes.q))
            ends = {"first_position": tile, "end_position": tile + rows_of_tile}
            blocks = kernel.call("key_blocks", **ends, problem=problem)
            begin, end = blocks if isinstance(blocks, tuple) else (0, blocks)
            solved = mask.key_blocks(
                tile, min(tile + rows_of_tile, stop), sizes, tile_kv
            )
            assert (begin, end) == (solved.first, max(solved.end, solved.first + 1))
            ends = {"first_position": first, "end_position": first + own}
            common = kernel.call("common_keys", **ends, problem=problem)
            low, high = common if isinstance(common, tuple) else (0, common)
            whole = range(-(-low // tile_kv), high // tile_kv)
            solved = mask.key_blocks(first, min(first + own, stop), sizes, tile_kv)
            assert [*whole] == [*range(solved.whole_first, solved.whole_end)]
            for block in range(begin, end):
                place = slice(block * tile_kv, (block + 1) * tile_kv)
                if block in whole:
                    assert padded[rows, place].all()
                    continue
                # An sm90 kernel's first block, the last one, is in no loop.
                last = block == end - 1 and kernel.arch == "sm90"
                on_the_left = "mask_left" in names and block < whole.stop and not last
                function = "mask_left" if on_the_left else masked
                found = kernel.seen(function, rows * group, block, problem)
                expected = padded[rows, place]
                assert (found == expected).all() if expected.size else not found.any()


@pytest.mark.parametrize("name", KERNELS)
def test_emitted_lines_say_what_rows_see(name: str) -> None:
    edges = EDGES if name == FAULTY else []
    check(Kernel(support.kernel_text(KERNELS[name])), [*SIZES, *edges])


@pytest.mark.parametrize("name", WITH_PARAMS)
def test_emitted_lines_read_what_the_mask_reads(name: str) -> None:
    check(Kernel(support.kernel_text(WITH_PARAMS[name])), SIZES)


FAULTS = {
    f"{what}, {fault}": (line, re.sub(r"WINDOW_\w+", rf"(\g<0> + {more})", line))
    for what, line in {
        "first block": "first_key = first_position - WINDOW_LEFT",
        "end block": "end_key = end_position + WINDOW_RIGHT",
        "first common key": "end_position - 1 - WINDOW_LEFT",
        "end of the common keys": "end = first_position + 1 + WINDOW_RIGHT",
        "first key of a row": " position - WINDOW_LEFT",
        "end of a row's keys": " + WINDOW_RIGHT\n",
    }.items()
    for fault, more in {"a key more": "1", "a key less": "-1"}.items()
} | {
    "first block, by the worst row": (
        "first_key = first_position",
        "first_key = end_position - 1",
    ),
    "end block, by the worst row": (
        "end_key = end_position",
        "end_key = 1 + first_position",
    ),
    "first common key, by the best row": (
        "end_position - 1 - WINDOW",
        "first_position - WINDOW",
    ),
    "end of the common keys, by the best row": (
        "end = first_position + 1",
        "end = end_position",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_number_is_noticed(fault: str) -> None:
    text, (right, wrong) = (
        support.kernel_text(KERNELS[FAULTY]),
        FAULTS[fault],
    )
    assert text.count(right) == 1
    with pytest.raises(AssertionError):
        check(Kernel(text.replace(right, wrong)), EDGES)
