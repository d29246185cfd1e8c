# SPDX-License-Identifier: Apache-2.0
"""What a contender loses per launch and per tile: a model fitted to its graph times.

    T = t0 + tiles * (n + c) * flops_of_a_block / A

The unit is the same for everyone, whatever its own tiles are: a tile is 128 query rows of one head,
a block is 128 of the keys it sees, and n is how many of them a tile takes on average, those that
the diagonal crosses counted whole. In a backward pass a tile is 128 keys of one query head, and a
block 128 of the rows that see them. So A is the speed of the inner loop (TFLOPS executed), c the
cost of a tile beside its loop (in blocks), t0 the cost of a launch (in seconds).

t0 and c show in the same way unless the number of tiles varies. Where it does not, t0 is left out
and c holds it. Problems that do not fill the GPU are outside the model: they are not fitted, and
their residuals say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..ops.masks import Lengths, Mask
from .problems import Problem
from .results import Lines

ROWS: Final = 128  # of a tile
KEYS: Final = 128  # of a block
FULL_WAVES: Final = 4  # tiles per SM; with fewer, the last wave is a quarter or more
TOLD_APART: Final = 2.0  # times the least of a quantity, for its effect to be seen


@dataclass(frozen=True)
class Point:
    """One problem. seconds: measured. model: what the fit says. fitted: whether it took part."""

    problem: Problem
    seconds: float
    model: float
    fitted: bool

    @property
    def residual(self) -> float:
        """Measured over model, less 1."""
        return self.seconds / self.model - 1


@dataclass(frozen=True)
class Fit:
    """A contender along one family.

    loop_tflops: A. tile_blocks: c. tile_seconds: c as time of one SM. launch_seconds: t0, None when
    it is part of c.
    """

    contender: str
    family: str
    loop_tflops: float
    tile_blocks: float
    tile_seconds: float
    launch_seconds: float | None
    points: tuple[Point, ...]

    @property
    def worst(self) -> float:
        """The largest residual, with its sign, of those that took part."""
        return max((p.residual for p in self.points if p.fitted), key=abs)


def tiles_and_blocks(problem: Problem) -> tuple[int, float]:
    """How many tiles there are in all, and n, the blocks that a tile takes on average."""
    each, copies = [x for x in problem.lengths if x[0]], 1
    if not each:
        each, copies = [(problem.q, problem.kv)], problem.batch
    blocks = [
        np.concatenate([_blocks(keys, q, kv) for q, kv in each])
        for keys in problem.keys_of_heads()
    ]
    tiles, on_average = copies * problem.heads * len(blocks[0]), float(np.mean(blocks))
    if problem.backward:
        by_keys = copies * problem.heads * sum(-(-kv // KEYS) for _, kv in each)
        return by_keys, on_average * tiles / by_keys
    return tiles, on_average


def _blocks(keys: Mask, q: int, kv: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The blocks of each tile of so many rows."""
    rows = np.arange(0, q, ROWS)
    return keys.key_blocks(rows, rows + ROWS, Lengths(q, kv), KEYS).total


def block_flops(problem: Problem) -> float:
    """Of a tile times a block: two products, or five of a backward pass."""
    of_qk, of_v = (3, 2) if problem.backward else (1, 1)
    return 2 * ROWS * KEYS * (of_qk * problem.d_qk + of_v * problem.d_v)


def fits(lines: Lines, multiprocessors: int) -> list[Fit]:
    """Everyone along every family that has enough problems."""
    found = [
        fit(contender, family, seconds, multiprocessors)
        for family, contenders in lines.items()
        for contender, seconds in contenders.items()
    ]
    return [one for one in found if one is not None]


def fit(
    contender: str,
    family: str,
    seconds: Mapping[Problem, float],
    multiprocessors: int,
) -> Fit | None:
    """Least squares of the relative residuals.

    seconds: per launch. None with too few problems for a residual, or too much alike to tell A
    from c, or when the model does not hold at all.
    """
    problems = list(seconds)
    sizes = [tiles_and_blocks(problem) for problem in problems]
    tiles, blocks = np.array(sizes, float).reshape(-1, 2).T
    flops = tiles * np.array([block_flops(problem) for problem in problems])
    times = np.array([seconds[problem] for problem in problems])
    full = tiles >= FULL_WAVES * multiprocessors
    with_launch = _spread(tiles[full]) >= TOLD_APART
    terms = [flops * blocks, flops, *([np.ones_like(times)] if with_launch else [])]
    if full.sum() <= len(terms) or _spread(blocks[full]) < TOLD_APART:
        return None
    design = np.stack(terms, axis=1)
    scale = np.abs(design[full]).max(axis=0)  # else T in seconds drowns in flops
    weighted = design[full] / scale / times[full, None]
    solution = np.linalg.lstsq(weighted, np.ones(int(full.sum())), rcond=None)[0]
    per_flop, tile_per_flop, *launch = (solution / scale).tolist()
    model = design @ np.array([per_flop, tile_per_flop, *launch])
    if per_flop <= 0 or model[full].min() <= 0:
        return None
    loop, tile_blocks = 1 / per_flop, tile_per_flop / per_flop
    return Fit(
        contender=contender,
        family=family,
        loop_tflops=loop / 1e12,
        tile_blocks=tile_blocks,
        tile_seconds=tile_blocks * block_flops(problems[0]) * multiprocessors / loop,
        launch_seconds=launch[0] if launch else None,
        points=tuple(
            Point(*values)
            for values in zip(
                problems, times.tolist(), model.tolist(), full.tolist(), strict=True
            )
        ),
    )


def _spread(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    return float(values.max() / values.min()) if len(values) else 1.0
