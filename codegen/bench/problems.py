# SPDX-License-Identifier: Apache-2.0
"""What contenders compute: one pass of attention each, and the ones that suit a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

from ..errors import CheckFailed
from ..ops import masks, operation_of, scores
from ..ops.backward import is_backward
from ..ops.cases import DYNAMIC
from ..ops.lists import Drawn
from ..ops.masks import Mask
from ..ops.operation import BYTES, Operation
from ..ops.paged import is_paged, page_of
from ..ops.paged import packed as with_packed_keys
from ..ops.params import ARGUMENT
from ..ops.varlen import is_packed
from . import draws
from . import lengths as spelled
from .draws import Ranges
from .lengths import Lengths

DEFAULT_LENGTH = 4096  # of a dynamic side
DEFAULT_TOKENS = 16384  # batch * q
DEFAULT_WIDTH = 2048  # heads * head_dim.v
FEW_ROWS = (
    64  # of Q for a KV head; MMAs of more take about as long as loads of its keys
)


# What a SPEC says of how it is computed, or for whom; all else decides what is computed.
_HOW: Final = {"name", "arch", "seqlen", "pack_gqa", "cluster", "multicast"} | {
    *("cta_group", "schedule"),
}
# The fields of every problem; others have a say where they are there.
_PLAIN: Final = {"op", "dtype", "head_dim", "q_per_kv", "mask", "lse"}
# What hides and shows keys around those of the mask, where inputs say so.
_AROUND: Final = ("documents", "prefix")
# Fields that a problem's name says in other words.
_SAID: Final = {"op", "softcap", "score", "alibi", "bias", "params", "window", *_AROUND}
# Where the rows of Q, and of K and V, are.
_LAYOUT: Final = {"batch", "kv"}
PAGED, PACKED, DENSE = LAYOUTS = ("paged", "packed", "dense")
"""Of tensors, from the one that serves most to the one that serves least."""
SERVER, APART = POOLS = ("vllm", "nhd")
"""Of paged K and V: K beside V in the rows of one tensor [pages, heads, page, d_qk + d_v], as vLLM
has its cache, or two tensors [pages, page, heads, d]."""


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
    ranges, seed: of what its mask reads; see `draws`. sequences: the lengths of packed sequences in
    words, drawn by the same seed; see `lengths`. Of these batch is the number, and q and kv are the
    rows of all of them, or of the pages. pool: of paged K and V, one of `POOLS`.
    """

    spec: Mapping[str, Any] = field(hash=False)
    batch: int
    heads: int
    q: int
    kv: int
    ranges: Ranges = field(default_factory=dict, hash=False)
    seed: int = 0
    sequences: str = ""
    pool: str = ""

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
        return bool(self.spec.get("lse"))

    @property
    def backward(self) -> bool:
        """Whether it is the gradient that is computed."""
        return is_backward(self.spec)

    @property
    def deterministic(self) -> bool:
        """Whether two calls must give the same bits, where not every kernel's do."""
        return bool(self.spec.get("deterministic"))

    @property
    def softcap(self) -> float | None:
        """Of the scores; None for none."""
        return self.spec.get("softcap")

    @property
    def flops(self) -> float:
        """Of the operation."""
        return _flops(self)

    @property
    def drawn(self) -> Mapping[str, Any]:
        """What its mask reads; see `draws.draw`."""
        return _drawn(self)

    @property
    def lists(self) -> Drawn:
        """Of kernels that take lists: half of the mask's blocks, alike for all heads."""
        return Drawn("half", "")

    @property
    def lengths(self) -> Lengths:
        """Queries and keys of each packed sequence; none of dense tensors."""
        return spelled.draw(self.sequences, self.seed)

    @property
    def each(self) -> Lengths:
        """Queries and keys of each packed sequence, or of each batch."""
        return self.lengths or ((self.q, self.kv),) * self.batch

    @property
    def tokens(self) -> int:
        """Query rows of all sequences."""
        return sum(q for q, _ in self.each)

    @property
    def length(self) -> int:
        """Keys of a sequence, on average."""
        return round(sum(kv for _, kv in self.each) / len(self.each))

    @property
    def kv_bytes(self) -> int:
        """Of the elements of K and V that sequences have, each once."""
        keys = sum(kv for _, kv in self.each)
        width = BYTES[self.spec["dtype"]]
        return keys * self.kv_heads * (self.d_qk + self.d_v) * width

    @property
    def is_decoding(self) -> bool:
        """Whether so few rows of Q see a key that time is that of loading K and V."""
        most = max((q for q, _ in self.lengths), default=FEW_ROWS)
        return most * int(self.spec["q_per_kv"]) < FEW_ROWS

    @property
    def hostile(self) -> bool:
        """Lengths and tables are as a server has them."""
        return False

    @property
    def packed(self) -> Problem:
        """The same sequences with packed K and V, instead of pages."""
        if not is_paged(self.spec):
            return self
        keys, spec = sum(kv for _, kv in self.lengths), with_packed_keys(self.spec)
        return replace(self, spec=spec, kv=keys, pool="")

    @property
    def operation(self) -> Operation:
        """The one that is timed."""
        return operation_of(self.spec)

    @property
    def keys(self) -> Mask:
        """Which keys a query sees; inputs have no values in it."""
        return masks.of_spec(self.spec)

    def keys_of_heads(self) -> Iterator[Mask]:
        """With values, for each batch and each head whose own it may be."""
        keys = self.keys.given(self.drawn)
        batches = range(self.batch if keys.reads("b") else 1)
        heads = range(self.heads if keys.reads("h", "h_kv") else 1)
        group = self.heads // self.kv_heads
        return (keys.at(b, h, h // group) for b in batches for h in heads)

    @property
    def _base(self) -> Mapping[str, Any]:
        """The SPEC without documents and prefix, and with the window of the call."""
        base = {x: said for x, said in self.spec.items() if x not in _AROUND}
        if "window" in base:
            base["window"] = {
                side: self.drawn[f"window_{side}"] if keys == ARGUMENT else keys
                for side, keys in base["window"].items()
            }
        return base

    @property
    def band(self) -> Band | None:
        """The keys around its place that a query sees, of its document where it has one; None for
        a mask of another form, of which a prefix is no part.
        """
        keys = masks.of_spec(self._base)
        band = Band(keys.left, keys.right)
        return band if masks.window(*band) == keys else None

    @property
    def mask(self) -> str:
        """What it is called, but for documents and prefix; see `masks.word_of`."""
        return masks.word_of(self._base)

    @property
    def shape(self) -> str:
        """Head dim, dtype and grouping, such as ``d128 bf16 GQA 8``."""
        dim = f"d{self.d_qk}" + (f"x{self.d_v}" if self.d_v != self.d_qk else "")
        group = self.spec["q_per_kv"]
        group_words = f" GQA {group}" if group > 1 else ""
        return f"{dim} {self.spec['dtype']}{group_words}"

    @property
    def variant(self) -> str:
        """Its shape, further fields and what is drawn, such as ``d128 bf16 GQA 8 softcap 30``."""
        drawn = "".join(f" {name}" for name in self.ranges)
        return f"{self.shape}{self._further}{drawn}"

    @property
    def further(self) -> dict[str, Any]:
        """The fields that not every problem has, among them the `op` of a backward pass."""
        plain = _PLAIN - {"op"} if self.backward else _PLAIN
        # What is false says nothing.
        return {x: y for x, y in self.spec.items() if x not in plain and y is not False}

    @property
    def _further(self) -> str:
        word = scores.word_of(self.spec)
        words = ["backward"] * self.backward + [word] * bool(word)
        if is_paged(self.spec):
            words.append(f"page {page_of(self.spec)} {self.pool}")
        elif is_packed(self.spec):
            words.append(PACKED)
        words += [
            f"{name} {_value(x)}".rstrip()
            for name, x in self.further.items()
            if name not in _SAID | _LAYOUT
        ]
        return "".join(f" {word}" for word in words)

    @property
    def family(self) -> str:
        """What stays the same when only counts of rows change, such as ``d128 bf16 causal``."""
        return f"{self.variant} {self.mask}"

    @property
    def without_lse(self) -> Problem:
        """The same, writing O alone."""
        if not self.lse:
            return self
        return replace(self, spec={**self.spec, "lse": False})

    @property
    def visible(self) -> float:
        """Of all scores, the share that FLOPs count: a half where the mask is causal."""
        kept = _PLAIN | _LAYOUT
        plain = {name: x for name, x in self.spec.items() if name in kept}
        return self.flops / replace(self, spec={**plain, "mask": "none"}).flops

    def __str__(self) -> str:
        heads = f"{self.heads}"
        if self.kv_heads != self.heads:
            heads += f"/{self.kv_heads}"
        drawn = draws.words(self.ranges, self.seed, self.sequences)
        if self.sequences:
            counts = f"h{heads} {self.sequences}"
        else:
            rows = f"s{self.q}" if self.q == self.kv else f"q{self.q} kv{self.kv}"
            counts = f"b{self.batch} h{heads} {rows}"
        return f"{counts} {self.mask}{self._further} {drawn}".rstrip()


def _value(x: Any) -> str:
    """What a field says beside its name, so that no two values are called the same."""
    if isinstance(x, Mapping):
        return " ".join(f"{name} {_value(each)}".rstrip() for name, each in x.items())
    if isinstance(x, list | tuple):
        return " ".join(map(_value, x))
    return "" if x is True else str(x)


def problem_for(
    spec: Mapping[str, Any],
    *,
    batch: int,
    heads: int,
    q: int,
    kv: int,
    ranges: Ranges | None = None,
    seed: int = 0,
    sequences: str = "",
    pool: str = "",
) -> Problem:
    """The problem that a SPEC's kernel computes for these counts.

    A window becomes part of the mask, so that two ways to say one mask are one problem; but not one
    of a call. ranges: of inputs that its mask may read, where they are not the usual ones. Raises
    CheckFailed for one that the input cannot have. sequences, pool: of packed sequences, whose
    counts are those of `packed_problem_for`.
    """
    what = {name: x for name, x in spec.items() if name not in _HOW}
    if "window" in what and ARGUMENT not in what["window"].values():
        alone = {name: x for name, x in what.items() if name not in _AROUND}
        what["mask"] = masks.said(masks.of_spec(alone))
        del what["window"]
    drawn = draws.ranges_of(spec, kv, ranges or {})
    if not draws.is_random(drawn, sequences):
        seed = 0
    return Problem(what, batch, heads, q, kv, drawn, seed, sequences, pool)


def packed_problem_for(
    spec: Mapping[str, Any],
    *,
    heads: int,
    sequences: str,
    seed: int = 0,
    pool: str = SERVER,
) -> Problem:
    """The problem that the kernel of a SPEC of packed sequences computes for such lengths.

    sequences: as `lengths` has them. pool: of `POOLS`, for paged K and V. Raises UsageProblem for
    words that are no lengths.
    """
    sequences = spelled.in_words(sequences)
    each = spelled.draw(sequences, seed)
    page = page_of(spec) if is_paged(spec) else 1
    return problem_for(
        spec,
        batch=len(each),
        heads=heads,
        q=sum(q for q, _ in each),
        kv=sum(-(-kv // page) for _, kv in each) * page,
        seed=seed,
        sequences=sequences,
        pool=pool if is_paged(spec) else "",
    )


def layout_of(spec: Mapping[str, Any]) -> str:
    """Of `LAYOUTS`, that of the tensors of a SPEC's kernel."""
    if is_paged(spec):
        return PAGED
    return PACKED if is_packed(spec) else DENSE


def layout_beside(problem: Problem, spec: Mapping[str, Any]) -> str:
    """The layout in which a SPEC's kernel does the work of a packed problem, "" if it does not.

    The layout serves less: packed K and V for pages, dense tensors for sequences of one length.
    With and without an LSE it is the same work here.
    """
    layout = layout_of(spec)
    if LAYOUTS.index(layout) <= LAYOUTS.index(layout_of(problem.spec)):
        return ""
    if layout == DENSE:
        lengths = spelled.alike(problem.lengths)
        if lengths is None or any(
            at not in (DYNAMIC, length)
            for at, length in zip(_sides(spec), lengths, strict=True)
        ):
            return ""
    own = problem_for(
        spec, batch=problem.batch, heads=problem.heads, q=problem.q, kv=problem.kv
    )
    return layout if _work(own.spec) == _work(problem.spec) else ""


def _sides(spec: Mapping[str, Any]) -> tuple[Any, Any]:
    return spec["seqlen"]["q"], spec["seqlen"]["kv"]


def _work(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What is computed, wherever rows are, but for the LSE."""
    return {x: said for x, said in spec.items() if x not in _LAYOUT | {"lse"}}


@lru_cache(maxsize=8)
def _drawn(problem: Problem) -> Mapping[str, Any]:
    return draws.draw(problem.spec, problem, problem.ranges, problem.seed)


@lru_cache(maxsize=64)
def _flops(problem: Problem) -> float:
    inputs = problem.drawn or None
    return problem.operation.flops(problem.spec, problem, inputs)


def problems_for(
    spec: Mapping[str, Any],
    *,
    lengths: Sequence[int] = (),
    tokens: Sequence[int] = (),
    batch: int | None = None,
    heads: int | None = None,
    ranges: Ranges | None = None,
    seeds: Sequence[int] = (0,),
    sequences: Sequence[str] = (),
    pools: Sequence[str] = (),
) -> Iterator[Problem]:
    """The problems to time a SPEC at; none when both its lengths are fixed to other ``lengths``,
    or when it has dense tensors and there are ``sequences``.

    lengths: of the dynamic sides. tokens: batch * q, one problem each; not beside ``batch``.
    heads: query heads; raises CheckFailed when they are no multiple of the SPEC's q_per_kv.
    ranges: as of `problem_for`. seeds: one problem each, where something is drawn. sequences: of
    packed sequences, as of `packed_problem_for`; without any, all are as long as ``lengths`` say.
    pools: of paged K and V, one problem each.
    """
    fixed = spec["seqlen"]
    group = spec["q_per_kv"]
    if heads is None:
        heads = default_heads(spec)
    if heads < 1 or heads % group:
        raise CheckFailed(
            f"{spec['name']}: --heads {heads} is no multiple of q_per_kv = {group}"
        )
    if is_packed(spec):
        for said in sequences or _of_one_length(lengths, tokens, batch):
            for pool in pools or (SERVER,):
                for seed in seeds:
                    yield packed_problem_for(
                        spec, heads=heads, sequences=said, seed=seed, pool=pool
                    )
        return
    if sequences:
        return
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
            for seed in seeds:
                yield problem_for(
                    spec,
                    batch=some,
                    heads=heads,
                    q=counts["q"],
                    kv=counts["kv"],
                    ranges=ranges,
                    seed=seed,
                )


def _of_one_length(
    lengths: Sequence[int], tokens: Sequence[int], batch: int | None
) -> Iterator[str]:
    for length in lengths or (DEFAULT_LENGTH,):
        for total in tokens or (DEFAULT_TOKENS,):
            yield f"{batch or max(1, total // length)}x{length}"


def default_heads(spec: Mapping[str, Any]) -> int:
    """Query heads that make heads * head_dim.v = 2048, as a multiple of q_per_kv."""
    group = int(spec["q_per_kv"])
    return max(1, DEFAULT_WIDTH // int(spec["head_dim"]["v"]) // group) * group
