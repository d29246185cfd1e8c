# SPDX-License-Identifier: Apache-2.0
"""Kernels with one number of the ranges of keys off by one, or taken from the other end of a tile.

The numbers are those that `key_blocks` and `common_keys` compute: first and end of the blocks that
some row of a tile sees, of the keys that all of them see, and of a gap in either.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .ptx_mutants import Mutant

SM90 = "arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 64\ntile: {q: 128, kv: 64}\n"
SM100 = "arch: sm100\nop: fmha_fwd\ndtype: bf16\nhead_dim: 64\n"
CHUNKS = "mask: 'kv <= q and (kv + {0}) // 384 == (q + {0}) // 384'\n"
TWO_RANGES = "mask: 'kv <= q and (q - kv < 400 or kv < {})'\n"
# A bound that does not slide with the query meets a block's edge from one side: then kernels differ
# in it, and one of them has to show a mutant.
MASKS = {
    "causal": ["mask: causal\n"],
    "window": ["mask: causal\nwindow: {left: 400}\n"],
    "two sides": ["window: {left: 400, right: 40}\n"],
    "chunks": [CHUNKS.format(more) for more in (0, 1, 383)],
    "two ranges": [TWO_RANGES.format(keys) for keys in (127, 128, 129)],
    "moving ranges": [
        "mask: 'kv <= q + 9 and kv >= q - 900 and (kv < q // 2 or kv > q - 300)'\n"
    ],
}
KERNELS = {
    f"{arch}, {name}": [head + mask for mask in each]
    for arch, head in (("sm90", SM90), ("sm100", SM100))
    for name, each in MASKS.items()
}
"""Specs of the kernels that are damaged."""

FUNCTIONS = ("key_blocks", "common_keys")
NUMBERS = {"end_key", "end", "first_key", "first", "gap_first", "gap_end"}


def mutants(source: str) -> Iterator[Mutant]:
    """All mutants of a kernel's text, in the order of their places."""
    tree = ast.parse(source)
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    rows = {"key_blocks": "TILE_Q", "common_keys": "TILE_Q"}
    if "HALF_ROWS" in source:
        rows["common_keys"] = "HALF_ROWS"
    for name in FUNCTIONS:
        for node in ast.walk(found[name]):
            for place in _numbers(node):
                for by in ("+ 1", "- 1"):
                    yield _mutant(source, name, place, f"({{}}) {by}")
            if isinstance(node, ast.Name):
                other = {
                    "first_position": f"({{}} + {rows[name]} - 1)",
                    "end_position": f"({{}} - {rows[name]} + 1)",
                }.get(node.id)
                if other:
                    yield _mutant(source, name, node, other)


def _numbers(node: ast.AST) -> Iterator[ast.expr]:
    """What is assigned to a number of a range, or returned as one by a call."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in NUMBERS:
            yield value
        case ast.Return(value=ast.Call(func=ast.Name(id="Range"), args=args)):
            yield from (each for each in args if isinstance(each, ast.Call))
        case ast.Return(value=ast.Call(func=ast.Attribute()) as value):
            yield value


def _mutant(source: str, function: str, node: ast.expr, instead: str) -> Mutant:
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None and node.end_col_offset is not None
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    before = source[begin:end]
    after = instead.format(before)
    name = f"{function}, line {node.lineno}: {' '.join(after.split())}"
    text = source[:begin] + after + source[end:]
    return Mutant(name, node.lineno, before, text)
