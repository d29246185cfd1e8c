# SPDX-License-Identifier: Apache-2.0
"""What contenders compute: one attention forward each, and the ones that suit a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from ..errors import CheckFailed
from ..ops import masks, operation_of, scores
from ..ops.cases import DYNAMIC
from ..ops.lists import Drawn
from ..ops.masks import Mask
from ..ops.operation import Operation

DEFAULT_LENGTH = 4096  # of a dynamic side
DEFAULT_TOKENS = 16384  # batch * q
DEFAULT_WIDTH = 2048  # heads * head_dim.v


# What a SPEC says of how it is computed, or for whom; all else decides what is computed.
_HOW: Final = {"name", "arch", "seqlen", "pack_gqa", "cluster", "multicast"}
# The fields of every problem; others have a say where they are there.
_PLAIN: Final = {"op", "dtype", "head_dim", "q_per_kv", "mask", "lse"}


class Band(NamedTuple):
    """Keys before and behind its own place that a query sees; None for all of a side."""

    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        """No query sees a key behind its own place."""
        return self.right == 0

    @property
    def window(self) -> bool:
        """Whether a query sees not all keys before its place, or some behind it alone."""
        return self.left is not None or bool(self.right)


@dataclass(frozen=True)
class Problem:
    """One call. batch, heads, q, kv: counts, of query heads, query rows and keys.

    spec: the fields of a SPEC that decide what is computed, whatever they are; see `problem_for`.
    """

    spec: Mapping[str, Any] = field(hash=False)
    batch: int
    heads: int
    q: int
    kv: int

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return self.heads // int(self.spec["q_per_kv"])

    @property
    def d_qk(self) -> int:
        """Elements of a row of Q and of K."""
        return int(self.spec["head_dim"]["qk"])

    @property
    def d_v(self) -> int:
        """Elements of a row of V and of O."""
        return int(self.spec["head_dim"]["v"])

    @property
    def lse(self) -> bool:
        """Whether log-sum-exp is written as well."""
        return bool(self.spec["lse"])

    @property
    def softcap(self) -> float | None:
        """Of the scores; None for none."""
        return self.spec.get("softcap")

    @property
    def flops(self) -> float:
        """Of the operation."""
        return self.operation.flops(self.spec, self)

    @property
    def lists(self) -> Drawn:
        """Of kernels that take lists: half of the mask's blocks, alike for all heads."""
        return Drawn("half", "")

    @property
    def operation(self) -> Operation:
        """The one that is timed."""
        return operation_of(self.spec)

    @property
    def keys(self) -> Mask:
        """Which keys a query sees."""
        return masks.of_spec(self.spec)

    @property
    def band(self) -> Band | None:
        """The keys around its place that a query sees; None for a mask of another form."""
        keys = self.keys
        band = Band(keys.left, keys.right)
        return band if masks.window(*band) == keys else None

    @property
    def mask(self) -> str:
        """What it is called; see `masks.word_of`."""
        return masks.word_of(self.spec)

    @property
    def variant(self) -> str:
        """Head dim, dtype, grouping and further fields, such as ``d128 bf16 GQA 8 softcap 30``."""
        dim = f"d{self.d_qk}" + (f"x{self.d_v}" if self.d_v != self.d_qk else "")
        group = self.spec["q_per_kv"]
        group_words = f" GQA {group}" if group > 1 else ""
        return f"{dim} {self.spec['dtype']}{group_words}{self._further}"

    @property
    def further(self) -> dict[str, Any]:
        """The fields that not every problem has."""
        return {name: x for name, x in self.spec.items() if name not in _PLAIN}

    @property
    def _further(self) -> str:
        word = scores.word_of(self.spec)
        words = [word] if word else []
        words += [
            f"{name} {x}" if isinstance(x, str) else name
            for name, x in self.further.items()
            if name not in ("softcap", "score", "alibi")
        ]
        return "".join(f" {word}" for word in words)

    @property
    def family(self) -> str:
        """What stays the same when only counts of rows change, such as ``d128 bf16 causal``."""
        return f"{self.variant} {self.mask}"

    @property
    def without_lse(self) -> Problem:
        """The same, writing O alone."""
        return replace(self, spec={**self.spec, "lse": False})

    def __str__(self) -> str:
        heads = f"{self.heads}"
        if self.kv_heads != self.heads:
            heads += f"/{self.kv_heads}"
        rows = f"s{self.q}" if self.q == self.kv else f"q{self.q} kv{self.kv}"
        return f"b{self.batch} h{heads} {rows} {self.mask}{self._further}"


def problem_for(
    spec: Mapping[str, Any], *, batch: int, heads: int, q: int, kv: int
) -> Problem:
    """The problem that a SPEC's kernel computes for these counts.

    A window becomes part of the mask, so that two ways to say one mask are one problem.
    """
    what = {name: x for name, x in spec.items() if name not in _HOW}
    if "window" in what:
        what["mask"] = masks.said(masks.of_spec(what))
        del what["window"]
    return Problem(what, batch, heads, q, kv)


def problems_for(
    spec: Mapping[str, Any],
    *,
    lengths: Sequence[int] = (),
    tokens: Sequence[int] = (),
    batch: int | None = None,
    heads: int | None = None,
) -> Iterator[Problem]:
    """The problems to time a SPEC at; none when both its lengths are fixed to other ``lengths``,
    or where it has a bias, with which nothing is timed.

    None either where the mask reads inputs of a call, for which a problem has no values.

    lengths: of the dynamic sides. tokens: batch * q, one problem each; not beside ``batch``.
    heads: query heads; raises CheckFailed when they are no multiple of the SPEC's q_per_kv.
    """
    if masks.of_spec(spec).params:
        return
    fixed = spec["seqlen"]
    group = spec["q_per_kv"]
    if heads is None:
        heads = default_heads(spec)
    if heads < 1 or heads % group:
        raise CheckFailed(
            f"{spec['name']}: --heads {heads} is no multiple of q_per_kv = {group}"
        )
    if spec.get("bias"):
        rows = []
    elif DYNAMIC in fixed.values():
        rows = [
            {side: n if at == DYNAMIC else int(at) for side, at in fixed.items()}
            for n in lengths or (DEFAULT_LENGTH,)
        ]
    elif not lengths or any(int(at) in lengths for at in fixed.values()):
        rows = [{side: int(at) for side, at in fixed.items()}]
    else:
        rows = []
    for counts in rows:
        for total in tokens or (DEFAULT_TOKENS,):
            some = batch or max(1, total // counts["q"])
            yield problem_for(spec, batch=some, heads=heads, **counts)


def default_heads(spec: Mapping[str, Any]) -> int:
    """Query heads that make heads * head_dim.v = 2048, as a multiple of q_per_kv."""
    group = int(spec["q_per_kv"])
    return max(1, DEFAULT_WIDTH // int(spec["head_dim"]["v"]) // group) * group
