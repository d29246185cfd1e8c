# SPDX-License-Identifier: Apache-2.0
"""The lines of a kernel that say what rows see, run as plain Python, against brute force.

Rows are arrays here, blocks and lengths whole numbers: every row of a problem, every block.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args
from unittest.mock import MagicMock

import numpy as np
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.ops.cases import Case, Params, tiles_of
from fmha_gen.ops.inputs import params
from fmha_gen.ops.masks import Lengths, of_spec

LENGTHS = (1, 63, 64, 65, 127, 129, 1000)
SIZES = [*itertools.starmap(Lengths, itertools.product(LENGTHS, LENGTHS))]
EDGES = [Lengths(400, 400 + more) for more in range(290, 354)]  # at each key of a block
MASKS = ("mask_block", "mask_left", "mask_row", "mask_gap", "mask_unseen")
FUNCTIONS = {
    *(
        "Range",
        "Blocks",
        "key_blocks",
        "kv_block",
        "common_keys",
        "mask_scores",
        *MASKS,
    ),
    *("keys_before", "keys_from", "gap_from", "gap_before", "sees"),
    *("RowEdges", "load_edges"),
}


BATCH = 1  # of two, which every problem has


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
        """A function with those of its parameters that this kernel has; None where it is not."""
        if name not in self.names:
            return None
        function = self.names[name]
        code, given = function.__code__, {**given, "head": 0, "batch": BATCH}
        return function(*(given[x] for x in code.co_varnames[: code.co_argcount]))

    def taken(self, blocks: Any) -> list[int]:
        """The numbers of the blocks that `key_blocks` returned, in their order."""
        if "kv_block" in self.names:
            return [
                int(self.call("kv_block", blocks=blocks, i=i))
                for i in range(blocks.count)
            ]
        first, end = blocks if isinstance(blocks, tuple) else (0, blocks)
        return [*range(end - 1, first - 1, -1)]

    def masks(self, block: int, common: Any, problem: SimpleNamespace) -> bool:
        """Whether `mask_scores` masks something of a block."""
        called: list[Any] = []
        own = {name: self.names[name] for name in MASKS if name in self.names}
        self.names |= dict.fromkeys(own, lambda *given: called.append(given))
        nothing = {"acc_S": None, "rS": None, "row": 0}
        given = {**nothing, "block": block, "common": common, "problem": problem}
        self.call("mask_scores", **given)
        self.names |= own
        return bool(called)

    def seen(
        self, name: str, rows: Any, block: int, problem: SimpleNamespace, common: Any
    ) -> Any:
        """Bool [rows, keys of the block]: where a masking function leaves a score of 0."""
        kept = np.zeros((len(rows), self.tile_kv), np.bool_)
        given: dict[str, Any] = {
            **{"row": rows, "block": block, "common": common, "problem": problem}
        }
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


def check(
    kernel: Kernel, lengths: Sequence[Lengths], *, numbers_alone: bool = False
) -> None:
    """Blocks are the solver's, and those that are not whole are masked as their rows see.

    numbers_alone: what the masks do is not looked at.
    """
    names, tile_kv = kernel.names, kernel.tile_kv
    group = names["TILE_Q"] // names.get("TILE_POSITIONS", names["TILE_Q"])
    rows_of_tile = names["TILE_Q"] // group
    own = 128 if kernel.arch == "sm100" else rows_of_tile  # that agree on whole blocks
    masked = "mask_row" if kernel.arch == "sm100" else "mask_block"
    by_edge = "mask_scores" in names
    for sizes in lengths:
        problem = problem_of(kernel, sizes)
        mask = kernel.mask.given(values_of(kernel, sizes)).at(BATCH, 0, 0)
        # Where rows have edges of their own, those beyond the last one have its.
        stop = sizes.q if mask.reads("row") else 1 << 30
        keys = -(-sizes.kv // tile_kv) * tile_kv
        if not numbers_alone:
            visible = mask.visible(np.arange(sizes.q), sizes)
            padded = np.pad(visible, ((0, 0), (0, keys - sizes.kv)))
        for first in range(0, sizes.q, own):
            tile = first // rows_of_tile * rows_of_tile
            rows = np.arange(first, min(first + own, sizes.q))
            ends = {"first_position": tile, "end_position": tile + rows_of_tile}
            taken = kernel.taken(kernel.call("key_blocks", **ends, problem=problem))
            # Rows beyond the last one see what it sees.
            end = min(tile + rows_of_tile, sizes.q)
            solved = mask.key_blocks(tile, end, sizes, tile_kv)
            assert taken == solved.taken()[::-1]
            ends = {"first_position": first, "end_position": first + own}
            common = kernel.call("common_keys", **ends, problem=problem)
            stop_own = min(first + own, stop)
            whole = mask.key_blocks(first, stop_own, sizes, tile_kv).whole()
            if not by_edge:
                low, high = common if isinstance(common, tuple) else (0, common)
                assert whole == [*range(-(-low // tile_kv), high // tile_kv)]
            else:
                whole_of_taken = [*filter(whole.__contains__, taken)]
                found = [x for x in taken if not kernel.masks(x, common, problem)]
                assert found == whole_of_taken
            if numbers_alone:
                continue
            for block in {*range(keys // tile_kv), *taken}:
                expected = padded[rows, block * tile_kv : (block + 1) * tile_kv]
                if block not in taken:
                    assert not expected.any()
                    continue
                if by_edge:
                    function = "mask_scores"
                elif block in whole:
                    assert expected.all()
                    continue
                else:
                    # An sm90 kernel's first block, the last one, is in no loop.
                    last = block == taken[0] and kernel.arch == "sm90"
                    on_the_left = "mask_left" in names and not last
                    on_the_left = on_the_left and block < high // tile_kv
                    function = "mask_left" if on_the_left else masked
                found = kernel.seen(function, rows * group, block, problem, common)
                assert (found == expected).all() if expected.size else not found.any()
