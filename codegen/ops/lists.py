# SPDX-License-Identifier: Apache-2.0
"""Block lists: which KV blocks each query tile has, in the form of FlexAttention's BlockMask.

Of a query tile, `kv_indices` begins with the numbers of `kv_num_blocks` partial blocks, to which
the mask of the SPEC applies, and `full_kv_indices` with those of `full_kv_num_blocks` full ones,
all of whose scores count. Numbers behind them are not read. Batches and heads may share lists: the
axis has one element then. Blocks are as large as the tiles of the SPEC.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import masks
from .masks import Lengths, Mask

if TYPE_CHECKING:
    from .operation import Sizes

Bools = NDArray[np.bool_]
I32 = NDArray[np.int32]
Spec = Mapping[str, Any]

AXES: Final = ("bh", "", "h", "b")
"""Along which lists may differ."""
NAMES: Final = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


class Drawn(NamedTuple):
    """The lists of a case. blocks: of `PATTERNS`. axes: of "bh", those along which lists differ."""

    blocks: str
    axes: str


BY_MASK: Final = Drawn("mask", "bh")


@dataclass(frozen=True)
class Lists:
    """partial, full: bool [batch or 1, heads or 1, query tiles, KV blocks]. tile: rows, keys."""

    partial: Bools
    full: Bools
    tile: tuple[int, int]

    def visible(
        self, seen: Bools, batch: int, heads: slice, rows: NDArray[np.int64]
    ) -> Bools:
        """The keys that some rows of some heads see: [heads, rows, kv]; seen: by the mask alone."""
        blocks = np.arange(seen.shape[1]) // self.tile[1]
        partial, full = (
            of_heads(kinds[min(batch, len(kinds) - 1)], heads)[:, rows // self.tile[0]]
            for kinds in (self.partial, self.full)
        )
        return full[..., blocks] | partial[..., blocks] & seen

    def pairs(self, mask: Mask, lengths: Lengths) -> NDArray[np.float64]:
        """Visible (query, key) pairs of each batch and head that has lists of its own."""
        tiles, blocks = self.partial.shape[2:]
        spans = [
            np.minimum(size * np.arange(count + 1), length)
            for size, count, length in zip(
                self.tile, (tiles, blocks), lengths, strict=True
            )
        ]
        whole = np.diff(spans[0])[:, None] * np.diff(spans[1])
        cut = mask.pairs_of_blocks(lengths, *spans)
        found: NDArray[np.float64] = (self.full * whole + self.partial * cut).sum(
            (2, 3)
        )
        return found


def of_heads(kinds: Bools, heads: slice) -> Bools:
    """Those of some heads, which may share them: [heads or 1, ...]."""
    return kinds[heads] if len(kinds) > 1 else kinds


def tile_of(spec: Spec) -> tuple[int, int]:
    """Rows and keys of a SPEC's blocks; any, where it has no lists."""
    tile = spec.get("tile", {"q": 128, "kv": 128})
    return tile["q"], tile["kv"]


def shape(spec: Spec, sizes: Sizes) -> tuple[int, int, int, int]:
    """(batch or 1, heads or 1, query tiles, KV blocks) of a call."""
    (rows, keys), axes = tile_of(spec), sizes.lists.axes
    batch = sizes.batch if "b" in axes else 1
    heads = sizes.kv_heads * int(spec["q_per_kv"]) if "h" in axes else 1
    return batch, heads, -(-sizes.q // rows), -(-sizes.kv // keys)


def of_tensors(spec: Spec, tensors: Mapping[str, NDArray[Any]]) -> Lists | None:
    """The lists that a call passes; None where a SPEC has none."""
    if not spec.get("blocks"):
        return None
    kinds = []
    for counts, indices in zip(NAMES[::2], NAMES[1::2], strict=True):
        blocks = tensors[indices].shape[-1]
        listed = np.arange(blocks) < tensors[counts][..., None]
        # One column more, for numbers that are not read, and those of blocks behind K.
        numbers = np.where(listed, np.minimum(tensors[indices], blocks), blocks)
        found = np.zeros((*listed.shape[:-1], blocks + 1), np.bool_)
        np.put_along_axis(found, numbers, True, axis=-1)
        kinds.append(found[..., :-1])
    partial, full = kinds
    return Lists(partial, full, tile_of(spec))


def of_case(spec: Spec, sizes: Sizes) -> Lists | None:
    """The lists of a case; None where a SPEC has none."""
    return of_tensors(spec, draw(spec, sizes))


def draw(spec: Spec, sizes: Sizes) -> Mapping[str, I32]:
    """The four tensors of a case, the same in every run; none where a SPEC has none."""
    if not spec.get("blocks"):
        return {}
    return _draw(
        *(masks.of_spec(spec), tile_of(spec), Lengths(sizes.q, sizes.kv)),
        *(shape(spec, sizes), sizes.lists.blocks),
    )


def of_kinds(
    partial: Bools, full: Bools, key: NDArray[Any] | None = None
) -> dict[str, I32]:
    """The four tensors that list the blocks of two bool arrays [batch, heads, query tiles, blocks].

    key: of the same shape, by which blocks are put in order; None: by their numbers. Others come
    behind the listed ones, as FlexAttention has them.
    """
    made = {}
    key = np.arange(partial.shape[-1]) if key is None else key
    for name, kinds in (("", partial), ("full_", full)):
        order = np.argsort(np.where(kinds, key, np.inf), axis=-1, kind="stable")
        made[f"{name}kv_num_blocks"] = kinds.sum(-1, dtype=np.int32)
        made[f"{name}kv_indices"] = order.astype(np.int32)
    return made


@lru_cache(maxsize=8)
def _draw(
    mask: Mask,
    tile: tuple[int, int],
    lengths: Lengths,
    shape_of_all: tuple[int, int, int, int],
    pattern: str,
) -> Mapping[str, I32]:
    random = np.random.default_rng(zlib.crc32(repr((pattern, shape_of_all)).encode()))
    seen, whole = mask.block_kinds(lengths, *tile)
    chosen, full = PATTERNS[pattern](np.broadcast_to(seen, shape_of_all), random)
    full = np.broadcast_to(whole, shape_of_all) if full is None else full
    key: NDArray[Any] | None = None
    if pattern == "mask":  # the last one first, as data of cases expect
        key = -np.arange(shape_of_all[-1])
    if pattern in ("shuffled", "behind"):
        key = random.random(shape_of_all)
    made = of_kinds(chosen & ~full, chosen & full, key)
    if pattern == "behind":
        beyond = np.array(shape_of_all[-1], np.int32)
        for name in NAMES[1::2]:
            made[name][..., 0] = beyond
    for each in made.values():
        each.flags.writeable = False
    return made


Pattern = Callable[[Bools, np.random.Generator], tuple[Bools, Bools | None]]
"""Of blocks in which the mask leaves a key: those that are listed, and which of all are full ones;
None: those that the mask leaves whole."""


def _some(seen: Bools, random: np.random.Generator) -> tuple[Bools, Bools]:
    """Every other block, of which every other is full, wherever the mask is."""
    return random.random(seen.shape) < 0.5, random.random(seen.shape) < 0.5


def _some_tiles(seen: Bools, random: np.random.Generator) -> tuple[Bools, Bools]:
    """The same, but in every other tile none."""
    chosen, full = _some(seen, random)
    return chosen & (random.random((*seen.shape[:-1], 1)) < 0.5), full


def _one(seen: Bools, random: np.random.Generator) -> tuple[Bools, Bools]:
    number = random.integers(seen.shape[-1], size=(*seen.shape[:-1], 1))
    return np.arange(seen.shape[-1]) == number, random.random(seen.shape) < 0.5


def _half(seen: Bools, random: np.random.Generator) -> tuple[Bools, None]:
    """Of each tile half of the blocks that the mask leaves, as that has them."""
    key = np.where(seen, random.random(seen.shape), np.inf)
    place = np.argsort(np.argsort(key, axis=-1), axis=-1)
    return seen & (2 * place < seen.sum(-1, keepdims=True)), None


PATTERNS: Final[Mapping[str, Pattern]] = {
    "mask": lambda seen, random: (seen, None),
    "half": _half,
    "some": _some,
    "shuffled": _some,
    "behind": _some,
    "some_tiles": _some_tiles,
    "one": _one,
    "partial": lambda seen, random: (_some(seen, random)[0], np.zeros_like(seen)),
    "full": lambda seen, random: (_some(seen, random)[0], np.ones_like(seen)),
    "all": lambda seen, random: (np.ones_like(seen), np.ones_like(seen)),
    "none": lambda seen, random: (np.zeros_like(seen), np.zeros_like(seen)),
}
