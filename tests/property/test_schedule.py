# SPDX-License-Identifier: Apache-2.0
"""Every work tile is visited once, by the kernels' own `launch` and `locate` run as plain Python.

What the DSL would trace are whole numbers here; what has no part in it, such as descriptors, is a
mock.
"""

from __future__ import annotations

import ast
import functools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import support
from fmha_gen.build.kernel_text import read_constants
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

HEAD = "arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 128\n"
FIELDS = {
    "causal": "mask: causal\n",
    "causal, narrow heads": "mask: causal\nhead_dim: 64\n",
    "causal, fixed": "mask: causal\nseqlen: 640\n",
    "causal, query tiles": "mask: causal\ncluster: [2, 1]\nlse: true\n",
    "causal, heads": "mask: causal\nheads: {q_per_kv: 4}\ncluster: [1, 2]\n",
    "causal, packed": "mask: causal\nheads: {q_per_kv: 8}\npack_gqa: true\n",
    "full, packed query tiles": (
        "heads: {q_per_kv: 4}\npack_gqa: true\ncluster: [2, 1]\nlse: true\n"
    ),
    "full, packed, fixed": (
        "heads: {q_per_kv: 16}\npack_gqa: true\nseqlen: {q: 640}\n"
    ),
    "full": "lse: true\n",
    "full, fixed": "seqlen: {q: 640}\n",
    "full, query tiles": "cluster: [2, 1]\n",
    "full, heads": "heads: {q_per_kv: 2}\ncluster: [1, 2]\n",
    "sm100, causal": "arch: sm100\nmask: causal\nlse: true\n",
    "sm100, full, query tiles": "arch: sm100\ncluster: [2, 1]\nmulticast: kv\n",
    "sm100, causal, pairs": (
        "arch: sm100\nmask: causal\ncluster: [2, 1]\ncta_group: 2\n"
    ),
    "sm100, full, pairs": "arch: sm100\ncluster: [2, 1]\ncta_group: 2\n",
    "sm100, causal, single": "arch: sm100\nmask: causal\nschedule: single\n",
    "sm100, full, single, fixed": "arch: sm100\nschedule: single\nseqlen: {q: 640}\n",
    "sm100, causal, single query tiles": (
        "arch: sm100\nmask: causal\nschedule: single\ncluster: [2, 1]\n"
    ),
}
NEEDED = {"Problem", "launch", "work_tile"}


# What fails is short as it is.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


class Divisor(int):
    """A number to divide by; the kernels' has its value as an attribute too."""

    @property
    def divisor(self) -> int:
        return int(self)


class Cta(NamedTuple):
    """One of a grid. place: of the cluster, rank: in it."""

    grid: int
    block: int
    rank: int


class Kernel:
    """The functions of a generated kernel that hand out work."""

    def __init__(self, text: str) -> None:
        self.cta = Cta(1, 0, 0)
        self.names = self._stubs() | read_constants(text)
        module = ast.parse(text)
        wanted = [
            node
            for node in module.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in NEEDED
        ]
        assert {node.name for node in wanted} == NEEDED
        future = "from __future__ import annotations\n"
        exec(future + ast.unparse(ast.Module(wanted, [])), self.names)

    def _stubs(self) -> dict[str, Any]:
        cute, cutlass = MagicMock(), MagicMock()
        cute.jit = lambda function: function
        cute.ceil_div = lambda a, b: -(-a // b)
        cute.FastDivmodDivisorV2 = Divisor
        cute.arch.grid_dim = lambda: (self.cta.grid, 1, 1)
        cute.arch.block_idx = lambda: (self.cta.block, 0, 0)
        cute.arch.block_idx_in_cluster = lambda: self.cta.rank
        cute.arch.make_warp_uniform = int
        cutlass.min, cutlass.max = min, max
        cutlass.select_ = lambda condition, a, b: a if condition else b
        plain = {"Int32": int, "Int64": int, "NamedTuple": NamedTuple}
        mocks = ("tma", "cpasync", "fmha_kernel", "Float32")
        # Of sm100 only.
        mocks += ("sm100", "tcgen05", "Tma", "reorder", "cluster_layout")
        mocks += ("qk_mma", "pv_mma", "o_layout", "DTYPE")
        return {
            "__name__": "kernel",
            "cute": cute,
            "cutlass": cutlass,
            **plain,
            **{name: MagicMock() for name in mocks},
        }

    def launch(self, batch: int, q: int, heads: int, sms: int) -> tuple[Any, int, int]:
        """The problem that the device gets, the CTAs of the grid and those of a cluster."""
        entry = MagicMock()
        self.names["fmha_kernel"] = entry
        queries = MagicMock(shape=(batch, q, heads, 1))
        keys = MagicMock(shape=(batch, q, heads // self.names.get("Q_PER_KV", 1), 1))
        count = self.names["launch"].__code__.co_argcount
        tensors = [queries, keys, keys, queries, MagicMock()]  # lse is the last one
        tensors = tensors[: count - 3]  # then come scale, SMs and stream
        self.names["launch"](*tensors, 1.0, sms, None)
        launched = entry.return_value.launch.call_args.kwargs
        cluster = launched.get("cluster", [1, 1, 1])
        return entry.call_args.args[-1], launched["grid"][0], cluster[0]

    @property
    def single(self) -> bool:
        """A CTA has one tile, and asks for no wave."""
        count: int = self.names["work_tile"].__code__.co_argcount
        return count == 1

    def locate(self, cta: Cta, *arguments: Any) -> Any:
        """What a CTA is told."""
        self.cta = cta
        return self.names["work_tile"](*arguments)

    def waves(
        self, problem: Any, grid: int, cluster: int
    ) -> Iterator[list[tuple[int, int, int]]]:
        """(query tile, head, batch) of all CTAs that have one, wave by wave until none has."""
        if self.single:
            yield [
                self.locate(Cta(grid, block, block % cluster), problem)
                for block in range(grid)
            ]
            return
        for wave in range(10**6):
            found = []
            for block in range(grid):
                cta = Cta(grid, block, block % cluster)
                *place, more = self.locate(cta, wave, problem)
                if more:
                    found.append(tuple(place))
            if not found:
                return
            yield found


@functools.cache
def kernel(fields: str) -> tuple[Kernel, dict[str, int]]:
    """With the numbers of its plan."""
    lines = {line.partition(":")[0]: line for line in (HEAD + fields).splitlines()}
    text = "\n".join(lines.values()) + "\n"
    made = Kernel(support.kernel_text(text))
    return made, made.names


def each(fields: dict[str, str]) -> st.SearchStrategy[str]:
    return st.sampled_from(sorted(fields))


@settings(deadline=None, max_examples=200, phases=PHASES)
@given(
    each(FIELDS),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(1, 2500),
    st.integers(2, 40),
)
def test_every_tile_is_visited_once(
    name: str, batch: int, groups: int, q: int, sms: int
) -> None:
    fields = FIELDS[name]
    made, numbers = kernel(fields)
    heads = groups * numbers.get("Q_PER_KV", 1)
    q = 640 if "640" in fields else q
    problem, grid, cluster = made.launch(batch, q, heads, sms)
    assert grid > 0 and grid % cluster == 0
    assert made.single or grid <= sms
    visits: Counter[tuple[int, int, int]] = Counter()
    for wave in made.waves(problem, grid, cluster):
        visits.update(wave)
    tiles = math.ceil(q / numbers.get("TILE_POSITIONS", numbers["TILE_Q"]))
    if "[2, 1]" in fields:  # the second CTA's tile may be beyond the end
        tiles = 2 * math.ceil(tiles / 2)
    assert visits == Counter(
        (tile, head, b)
        for tile in range(tiles)
        for head in range(groups if "pack_gqa" in fields else heads)
        for b in range(batch)
    )


CAUSAL = {name: fields for name, fields in FIELDS.items() if "causal" in fields}


@settings(deadline=None, max_examples=100, phases=PHASES)
@given(
    each(CAUSAL),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(1, 2500),
    st.integers(2, 40),
)
def test_heads_come_in_sections_and_their_longest_tiles_first(
    name: str, batch: int, groups: int, q: int, sms: int
) -> None:
    made, numbers = kernel(CAUSAL[name])
    q = 640 if "640" in CAUSAL[name] else q
    heads = groups * numbers.get("Q_PER_KV", 1)
    problem, grid, cluster = made.launch(batch, q, heads, sms)
    section = max(sms // numbers["SMS_PER_HEAD"], 1)
    share = 2 if "[1, 2]" in CAUSAL[name] else 1  # heads of a cluster
    tiled = groups if "pack_gqa" in CAUSAL[name] else heads
    in_order = [
        place
        for number, wave in enumerate(made.waves(problem, grid, cluster))
        for place in _in_order(wave, number, cluster)
    ]
    sections = [
        (batch_ * (tiled // share) + head // share) // section
        for _, head, batch_ in in_order
    ]
    assert sections == sorted(sections)
    for (tile, *_), (later, *_), here, there in zip(
        in_order, in_order[1:], sections, sections[1:], strict=False
    ):
        assert here < there or later <= tile


def _in_order(
    wave: list[tuple[int, int, int]], number: int, cluster: int
) -> list[tuple[int, int, int]]:
    """The first CTAs of the clusters, as the tiles are numbered: odd waves go backwards."""
    firsts: list[tuple[int, int, int]] = wave[::cluster]
    return firsts[::-1] if number % 2 else firsts
