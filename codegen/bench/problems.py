# SPDX-License-Identifier: Apache-2.0
"""What contenders compute: one attention forward each, and the ones that suit a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckFailed
from ..ops import masks, operation_of, scores
from ..ops.cases import DYNAMIC
from ..ops.operation import Operation

DEFAULT_LENGTH = 4096  # of a dynamic side
DEFAULT_TOKENS = 16384  # batch * q
DEFAULT_WIDTH = 2048  # heads * head_dim.v


@dataclass(frozen=True)
class Problem:
    """One call. batch, heads, kv_heads, q, kv: counts; d_qk, d_v: head dims; causal: bottom-right.

    lse: whether log-sum-exp is written as well. window_left, window_right: how many keys before
    and behind its place a query sees, as `masks.Mask` counts them; None for all. softcap: of the
    scores; None for none. sink: whether each head has one. alibi, score: as a SPEC has them.
    """

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    q: int
    kv: int
    d_qk: int
    d_v: int
    causal: bool
    lse: bool
    window_left: int | None = None
    window_right: int | None = None
    softcap: float | None = None
    sink: bool = False
    alibi: bool = False
    score: str = "none"

    @property
    def flops(self) -> float:
        """Of the operation."""
        return self.operation.flops(self.spec, self)

    @property
    def operation(self) -> Operation:
        """The one that is timed."""
        return operation_of(self.spec)

    @property
    def spec(self) -> dict[str, Any]:
        """The fields of a SPEC that decide what is computed."""
        window = {"left": self.window_left, "right": self.window_right}
        return {
            **{"op": "fmha_fwd", "dtype": self.dtype},
            "mask": "causal" if self.causal else "none",
            "window": {side: "none" if n is None else n for side, n in window.items()},
            "head_dim": {"qk": self.d_qk, "v": self.d_v},
            **{"q_per_kv": self.heads // self.kv_heads, "lse": self.lse},
            **({} if self.softcap is None else {"softcap": self.softcap}),
            **{"sink": self.sink, "alibi": self.alibi, "score": self.score},
        }

    @property
    def mask(self) -> str:
        """What it is called; see `masks.word_of`."""
        return masks.word_of(self.spec)

    @property
    def has_window(self) -> bool:
        """Whether a query sees not all keys before its place, or some behind it alone."""
        return self.window_left is not None or self.window_right is not None

    @property
    def variant(self) -> str:
        """Head dim, dtype, grouping, softcap and sinks, such as ``d128 bf16 GQA 8``."""
        dim = f"d{self.d_qk}" + (f"x{self.d_v}" if self.d_v != self.d_qk else "")
        group = self.heads // self.kv_heads
        group_words = f" GQA {group}" if group > 1 else ""
        return f"{dim} {self.dtype}{group_words}{self._score}{' sinks' * self.sink}"

    @property
    def _score(self) -> str:
        word = scores.word_of(self.spec)
        return word and f" {word}"

    @property
    def family(self) -> str:
        """What stays the same when only counts of rows change, such as ``d128 bf16 causal``."""
        return f"{self.variant} {self.mask}"

    def __str__(self) -> str:
        heads = f"{self.heads}"
        if self.kv_heads != self.heads:
            heads += f"/{self.kv_heads}"
        rows = f"s{self.q}" if self.q == self.kv else f"q{self.q} kv{self.kv}"
        return f"b{self.batch} h{heads} {rows} {self.mask}{self._score}"


def problem_for(
    spec: Mapping[str, Any], *, batch: int, heads: int, q: int, kv: int
) -> Problem:
    """The problem that a SPEC's kernel computes for these counts."""
    mask = masks.of_spec(spec)
    return Problem(
        dtype=spec["dtype"],
        batch=batch,
        heads=heads,
        kv_heads=heads // spec["q_per_kv"],
        q=q,
        kv=kv,
        d_qk=spec["head_dim"]["qk"],
        d_v=spec["head_dim"]["v"],
        causal=mask.right == 0,
        lse=bool(spec["lse"]),
        window_left=mask.left,
        window_right=mask.right or None,
        softcap=spec.get("softcap"),
        sink=bool(spec.get("sink")),
        alibi=bool(spec.get("alibi")),
        score=spec.get("score", "none"),
    )


def problems_for(
    spec: Mapping[str, Any],
    *,
    lengths: Sequence[int] = (),
    tokens: Sequence[int] = (),
    batch: int | None = None,
    heads: int | None = None,
) -> Iterator[Problem]:
    """The problems to time a SPEC at; none when both its lengths are fixed to other ``lengths``.

    lengths: of the dynamic sides. tokens: batch * q, one problem each; not beside ``batch``.
    heads: query heads; raises CheckFailed when they are no multiple of the SPEC's q_per_kv.
    """
    fixed = spec["seqlen"]
    group = spec["q_per_kv"]
    if heads is None:
        heads = default_heads(spec)
    if heads < 1 or heads % group:
        raise CheckFailed(
            f"{spec['name']}: --heads {heads} is no multiple of q_per_kv = {group}"
        )
    if DYNAMIC in fixed.values():
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
