# SPDX-License-Identifier: Apache-2.0
"""Attention's clients on a Hopper GPU, served by the kernels of a vendored package.

    python -m tests.hardware.clients DIR [--only PART,...] [--json FILE]

DIR is a folder that `fmha-gen vendor` wrote with the adapters of `ADAPTERS`; where there is no
package, the kernels of `STEMS` are vendored into it first. Each part prints a line: what it found,
and times of ours and of others. A part that fails stops no other. Status 1 when one failed; a part
whose client is not installed says so, and has not passed.

    generate      transformers: a padded batch, greedy; tokens of sdpa
    continuous    transformers: generate_batch of the same prompts; tokens of sdpa
    graphs        the same in CUDA graphs
    packed        transformers: position_ids that restart; logits of sdpa, sequence by sequence
    varlen_attn   PyTorch's, through its registry; errors beside its own kernel
    vllm          vLLM's call with its cache, beside FlashAttention-3; a mixed batch and decoding
    replay        one captured call of vLLM's function, with other lengths and tables each time
    streams       two calls at once
    host          what a call of each function costs the host

Models are Llamas of random weights. Their tokens are compared for prompts whose every step is
decided by more than `MARGIN` under sdpa: near a tie, either token is right. Errors are against
float64, and bounded by twice those of PyTorch's attention in bf16, for each sequence.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

GENERATED = Path(__file__).resolve().parents[2] / "generated"
DENSE = "sm90_d128_bf16_causal_gqa4"
PACKED = f"{DENSE}_varlen"
PAGED = f"{DENSE}_page16_varlen_lse"
DECODING = f"{DENSE}_pack_page16_varlen_t64x128"
WITH_LSE = "sm90_d128_bf16_causal_varlen_lse"
STEMS = (DENSE, PACKED, PAGED, DECODING, WITH_LSE)
ADAPTERS = ("flash_attention", "pytorch", "sglang", "transformers", "vllm")
HEAD_DIM, PAGE = 128, 16
MARGIN = 0.08  # of logits, whose standard deviation is about 1
NAME = "flash_fmha_gen"  # continuous batching wants a name that says flash
FEW_QUERIES = 16  # of a sequence, where heads are packed
Call = Callable[[], Any]


class Sizes(NamedTuple):
    """How large everything is."""

    hidden: int = 4096
    intermediate: int = 14336
    layers: int = 4
    vocabulary: int = 32
    heads: int = 32
    kv_heads: int = 8
    candidates: int = 512  # prompts to choose from
    prompts: int = 8
    longest_prompt: int = 384
    new_tokens: int = 32
    packed: tuple[int, ...] = (2048, 1, 777, 130, 3000, 64, 2173)
    # (queries, keys) of sequences: prompts, chunks of some, decoding, padding.
    mixed: tuple[tuple[int, int], ...] = (
        *((777, 777), (512, 8704), (1, 1), (2048, 2048), (0, 0), (300, 4097)),
        *((1, 17), (1, 8191), (1, 4096), (1, 15), (17, 33), (0, 0), (0, 0)),
    )
    decoding: tuple[int, ...] = (8192,) * 32  # keys
    longest: int = 65536
    rounds: int = 20  # of calls in two streams


class Gpu:
    """What parts need of a device."""

    name = "cuda"

    def graph(self, call: Call) -> Call:
        """The captured call, as its replay."""
        from fmha_gen.bench.cuda import CudaDevice

        return CudaDevice().capture(call, 1)

    def streams(self) -> Sequence[Any]:
        """Two streams, as contexts."""
        return [torch.cuda.stream(torch.cuda.Stream()) for _ in range(2)]

    def synchronize(self) -> None:
        """Wait for everything launched."""
        torch.cuda.synchronize()

    def kernel_seconds(self, call: Call) -> float:
        """Of a call in a graph of many."""
        from fmha_gen.bench import cuda, timing

        ready = timing.prepare(call, cuda.CudaDevice())
        return ready.seconds / ready.launches

    def host_seconds(self, call: Call) -> float:
        """Of a call until it returns: the median of rounds that the stream takes at once."""
        from fmha_gen.bench import cuda, timing

        return timing.host_seconds(call, cuda.CudaDevice(), rounds=9)

    def seconds(self, call: Call) -> float:
        """Of a call until the GPU is done: the median of three."""
        found = []
        for _ in range(3):
            self.synchronize()
            begin = time.perf_counter()
            call()
            self.synchronize()
            found.append(time.perf_counter() - begin)
        return statistics.median(found)


class Absent(Exception):
    """A client that is not installed, or has not got what a part is about."""


class Found(NamedTuple):
    """What a part saw. seconds: by contender."""

    said: str
    seconds: dict[str, float]


def require(truth: bool, said: str) -> None:
    """A part fails unless this holds."""
    if not truth:
        raise AssertionError(said)


class Prompts(NamedTuple):
    """ids and which are real, padded on the left; tokens and logits of sdpa, and the least gap
    between its two best tokens.
    """

    ids: Any
    real: Any
    tokens: Any
    logits: Any
    least: float


def least_gaps(logits: Any) -> Any:
    """By how much the closest token of each prompt is decided."""
    first, second = logits.topk(2).values.unbind(-1)
    return (first - second).amin(1)


@contextlib.contextmanager
def peer(name: str) -> Iterator[None]:
    """What a peer does inside fails no part: it has no time where it is not installed."""
    try:
        yield
    except Exception as error:
        print(f"without {name}: {shortly(error)}", file=sys.stderr)


@dataclass
class Setup:
    """A package, whose kernels are noted as they are chosen, and what parts share."""

    package: ModuleType
    device: Any = field(default_factory=lambda: Gpu())
    sizes: Sizes = field(default_factory=lambda: Sizes())
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        load = self.package.load

        def spy(name: str) -> ModuleType:
            self.used.add(name)
            return load(name)  # type: ignore[no-any-return]

        self.package.load = spy  # type: ignore[attr-defined]
        self.generator = torch.Generator(self.device.name).manual_seed(1)

    def adapter(self, name: str) -> ModuleType:
        """The module of an adapter."""
        return importlib.import_module(f"{self.package.__name__}.{name}_adapter")

    def randn(self, *shape: int) -> Any:
        """bf16."""
        where = {"device": self.device.name, "dtype": torch.bfloat16}
        return torch.randn(*shape, generator=self.generator, **where)

    def indices(self, values: Sequence[int]) -> Any:
        """int32."""
        return torch.tensor(values, dtype=torch.int32, device=self.device.name)

    @contextlib.contextmanager
    def uses(self, kernel: str) -> Iterator[None]:
        """That what runs inside takes this kernel and no other."""
        self.used.clear()
        yield
        taken = ", ".join(sorted(self.used)) or "none"
        require(self.used == {kernel}, f"took {taken}, not {kernel}")

    # --- transformers --------------------------------------------------------------------

    @functools.cached_property
    def hub(self) -> ModuleType:
        """transformers, which knows our kernels."""
        try:
            hub = importlib.import_module("transformers")
        except ImportError as error:
            raise Absent(f"transformers: {error}") from error
        self.adapter("transformers").register(NAME)
        hub.logging.set_verbosity_error()
        return hub

    @functools.cached_property
    def model(self) -> Any:
        """A Llama with random weights that keep variances, and logits in fp32."""
        sizes = self.sizes
        config = self.hub.LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=HEAD_DIM,
            initializer_range=sizes.hidden**-0.5,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
        )
        torch.manual_seed(1)
        with torch.device(self.device.name):
            make = self.hub.AutoModelForCausalLM.from_config
            model = make(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        model.lm_head.float().register_forward_pre_hook(
            lambda head, inputs: (inputs[0].to(head.weight.dtype),)
        )
        return model.eval()

    @functools.cached_property
    def exact(self) -> Any:
        """The model in float64."""
        self.model.set_attn_implementation("eager")
        return copy.deepcopy(self.model).double()

    @functools.cached_property
    def generation(self) -> dict[str, Any]:
        """Greedy, so many tokens."""
        count = self.sizes.new_tokens
        limits = {"max_new_tokens": count, "min_new_tokens": count}
        return {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **limits}

    @functools.cached_property
    def prompts(self) -> Prompts:
        """Those of many whose tokens sdpa decides best."""
        sizes, where = self.sizes, {"device": self.device.name}
        shape = (sizes.candidates, sizes.longest_prompt)
        draw = functools.partial(torch.randint, generator=self.generator, **where)
        ids = draw(1, sizes.vocabulary, shape)
        lengths = draw(sizes.longest_prompt // 16, sizes.longest_prompt + 1, shape[:1])
        places = torch.arange(sizes.longest_prompt, **where)
        real = (places >= sizes.longest_prompt - lengths[:, None]).long()
        gaps = least_gaps(self.generate("sdpa", ids, real)[1])
        best = gaps.topk(sizes.prompts).indices
        ids, real = ids[best], real[best]
        ids, real = (x[:, -int(real.sum(1).max()) :].contiguous() for x in (ids, real))
        tokens, logits = self.generate("sdpa", ids, real)
        least = least_gaps(logits).min().item()
        require(least > MARGIN, f"sdpa's tokens are near ties: a gap of {least:.3f}")
        return Prompts(ids, real, tokens, logits, least)

    def generate(self, name: str, ids: Any, real: Any) -> tuple[Any, Any]:
        """Tokens of an implementation, [prompts, steps], and the logits that they are of."""
        self.model.set_attn_implementation(name)
        more = {"return_dict_in_generate": True, "output_logits": True}
        found = self.model.generate(ids, attention_mask=real, **self.generation, **more)
        return found.sequences[:, ids.shape[1] :], torch.stack(found.logits, 1)

    def times(self, call: Call) -> dict[str, float]:
        """Of a call of the model, ours and sdpa's."""
        return {
            label: self.time(call, name)
            for label, name in (("ours", NAME), ("sdpa", "sdpa"))
        }

    def time(self, call: Call, name: str) -> float:
        """Of a call of the model by an implementation."""
        self.model.set_attn_implementation(name)
        call()
        return self.device.seconds(call)


def same_tokens(found: Any, right: Any, least: float) -> str:
    """That all are equal, in words."""
    differ = found != right
    if differ.any():
        row = int(differ.any(1).nonzero()[0])
        step = int(differ[row].nonzero()[0])
        raise AssertionError(
            f"{int(differ.any(1).sum())} of {len(differ)} prompts have other tokens, the first at"
            f" step {step} of prompt {row}; sdpa's closest token is decided by {least:.3f}"
        )
    rows, steps = right.shape
    return f"{rows} prompts, {steps} tokens each, equal; the closest decided by {least:.3f}"


def generate(setup: Setup) -> Found:
    """A batch with padding on the left: its tokens, and the logits of each step."""
    ids, real, tokens, usual, least = setup.prompts
    with setup.uses(PACKED):
        found, logits = setup.generate(NAME, ids, real)
    said = same_tokens(found, tokens, least)
    truth = []
    for prompt, mask, more in zip(ids, real, tokens, strict=True):
        whole = torch.cat([prompt[mask.bool()], more])[None]
        truth.append(setup.exact(whole).logits[0, -len(more) - 1 : -1])
    errors = check(logits, usual, truth)
    lengths = real.sum(1)
    said += (
        f"; prompts of {int(lengths.min())} to {int(lengths.max())} tokens, {errors}"
    )
    seconds = setup.times(
        lambda: setup.model.generate(ids, attention_mask=real, **setup.generation)
    )
    return Found(said, seconds)


def continuous(setup: Setup, graphs: bool = False) -> Found:
    """The same prompts without padding, in a paged cache."""
    settings = setup.hub.ContinuousBatchingConfig
    if not hasattr(settings, "auto_switch_to_flash"):
        raise Absent(
            f"transformers {setup.hub.__version__} has continuous batching for its own"
            " implementations alone; 5.23 for any"
        )
    ids, real, tokens, _, least = setup.prompts
    asked = setup.hub.GenerationConfig(**setup.generation | {"eos_token_id": -1})
    prompts = [row[mask.bool()].tolist() for row, mask in zip(ids, real, strict=True)]
    blocks = 2 * len(prompts) * (1 + (ids.shape[1] + setup.sizes.new_tokens) // 256)
    config = settings(
        num_blocks=blocks,
        max_batch_tokens=512,
        max_blocks_per_request=0,
        auto_switch_to_flash=False,
        use_cuda_graph=graphs,
    )

    def call() -> Any:
        return setup.model.generate_batch(
            prompts,
            generation_config=asked,
            continuous_batching_config=copy.deepcopy(config),
        )

    setup.model.set_attn_implementation(NAME)
    with setup.uses(PACKED):
        results = list(call().values())
    require(len(results) == len(prompts), f"{len(results)} answers")
    for result in results:
        require(result.error is None, f"a request failed: {result.error}")
    by_prompt = {tuple(x.prompt_ids): x.generated_tokens for x in results}
    found = torch.tensor([by_prompt[tuple(prompt)] for prompt in prompts])
    said = same_tokens(found, tokens.cpu(), least)
    # Of a call with graphs, most is their capture.
    return Found(said, {} if graphs else setup.times(call))


def packed(setup: Setup) -> Found:
    """A batch as for training: one row of sequences, by position_ids that restart."""
    lengths = setup.sizes.packed
    model, where = setup.model, {"device": setup.device.name}
    draw = functools.partial(torch.randint, generator=setup.generator, **where)
    ids = draw(1, setup.sizes.vocabulary, (1, sum(lengths)))
    places = torch.cat([torch.arange(n, **where) for n in lengths])[None]

    def call() -> Any:
        return model(ids, position_ids=places, use_cache=False).logits[0]

    model.set_attn_implementation(NAME)
    with setup.uses(PACKED):
        found = call().split(lengths)
    alone = ids.split(lengths, 1)
    model.set_attn_implementation("sdpa")
    usual = [model(x, use_cache=False).logits[0] for x in alone]
    truth = [setup.exact(x, use_cache=False).logits[0] for x in alone]
    said = check(found, usual, truth)
    seconds = setup.times(call)
    with peer("FA4"):
        seconds["FA4"] = setup.time(call, "flash_attention_4")
    return Found(f"{sum(lengths)} tokens, {said}", seconds)


# --- attention alone ---------------------------------------------------------------------


def reference(q: Any, k: Any, v: Any, dtype: Any = torch.float64) -> Any:
    """One sequence, causal at the bottom right: out and lse; rows that see no key get zeros."""
    queries, keys = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1).to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    if dtype != torch.float64:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        mask = hidden.tril(keys - queries)
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(q[None], k[None], v[None], attn_mask=mask)[0]
        return out.nan_to_num(0.0).transpose(0, 1), None
    scores = q @ k.mT * q.shape[2] ** -0.5
    rows = torch.arange(queries, device=q.device)[:, None] + keys - queries
    scores.masked_fill_(torch.arange(keys, device=q.device) > rows, -math.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp_().nan_to_num_(0.0) @ v
    return out.transpose(0, 1), lse


def check(found: Sequence[Any], usual: Sequence[Any], truth: Sequence[Any]) -> str:
    """That each sequence is off by at most twice of what is usual; in words."""
    worst = 0.0
    for i, parts in enumerate(zip(found, usual, truth, strict=True)):
        ours, theirs, exact = (x.double() for x in parts)
        require(bool(ours.isfinite().all()), f"sequence {i}: not all numbers")
        error, bound = (ours - exact).norm().item(), (theirs - exact).norm().item()
        size = exact.norm().item() or 1.0
        require(
            error <= 2 * bound,
            f"sequence {i} of {exact.shape[0]} rows: error {error / size:.1e},"
            f" usual {bound / size:.1e}",
        )
        worst = max(worst, error / bound if bound else 0.0)
    return f"{len(truth)} sequences, errors up to {worst:.2f} of the usual"


def varlen_attn(setup: Setup) -> Found:
    """PyTorch's function, which takes as many KV heads as query heads."""
    from torch.nn import attention

    what = f"torch {torch.__version__}"
    try:
        varlen = importlib.import_module("torch.nn.attention.varlen")
    except ImportError as error:
        raise Absent(f"{what} has no varlen_attn") from error
    if not hasattr(attention, "activate_flash_attention_impl"):
        raise Absent(f"{what} has no registry of flash attention")
    lengths = setup.sizes.packed
    q, k, v = (setup.randn(sum(lengths), 16, HEAD_DIM) for _ in range(3))
    starts = setup.indices([0, *itertools.accumulate(lengths)])
    most = max(lengths)

    def call() -> Any:
        return varlen.varlen_attn(
            *(q, k, v, starts, starts, most, most),
            window_size=(-1, 0),
            return_aux=varlen.AuxRequest(lse=True),
        )

    usual, seconds = call()[0], {"PyTorch": setup.device.kernel_seconds(call)}
    setup.adapter("pytorch").register("fmha_gen")
    attention.activate_flash_attention_impl("fmha_gen")
    try:
        with setup.uses(WITH_LSE):
            out, lse = call()
        ours = {"ours": setup.device.kernel_seconds(call)}
    finally:
        attention.restore_flash_attention_impl()
    parts = [x.split(lengths) for x in (q, k, v, out, usual)]
    exact = [reference(*x) for x in zip(*parts[:3], strict=True)]
    said = check(*parts[3:], [x for x, _ in exact])
    logs = torch.cat([x for _, x in exact], 1)
    off = (lse.double() - logs).abs().max().item()
    require(off < 1e-3, f"lse is off by {off:.1e}")
    with peer(
        "FA4"
    ):  # called itself: PyTorch's registration wants two results, and it has more
        packed = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
        given = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True}
        given |= {"max_seqlen_q": most, "max_seqlen_k": most}
        seconds["FA4"] = setup.device.kernel_seconds(lambda: packed(q, k, v, **given))
    return Found(f"{what}: {said}", ours | seconds)


class Cache:
    """vLLM's cache and what goes with a call: K and V side by side in one buffer.

    What no sequence may read is NaN for us, and entries of the table behind the last page of a
    sequence are no pages; as a server has them, both are 0.
    """

    def __init__(self, setup: Setup, rows: int, batch: int, keys: int, pages: int):
        """rows: of q; keys: of the longest sequence."""
        sizes = setup.sizes
        self.setup, self.pages = setup, pages
        self.memory = setup.randn(pages, sizes.kv_heads, PAGE, 2 * HEAD_DIM)
        rows_of = self.memory.transpose(1, 2)  # [pages, page, kv_heads, K and V]
        self.k, self.v = rows_of.split(HEAD_DIM, -1)
        self.q = setup.randn(rows, sizes.heads, HEAD_DIM)
        self.out = torch.empty_like(self.q)
        self.starts = setup.indices([0] * (batch + 1))
        self.used = setup.indices([0] * batch)
        self.table = self.starts.new_zeros((batch, -(-keys // PAGE)))
        one = torch.ones(1, device=setup.device.name)
        self.descale = one.expand(batch, sizes.kv_heads)

    def fill(self, lengths: Sequence[tuple[int, int]], hostile: bool = True) -> None:
        """Another batch of (queries, keys), on other pages."""
        setup, where = self.setup, {"device": self.setup.device.name}
        self.lengths = lengths
        order = torch.randperm(self.pages, generator=setup.generator, **where)
        self.memory.fill_(math.nan if hostile else 0.0)
        self.table.fill_(-7 if hostile else 0)
        self.q.normal_(generator=setup.generator)
        if hostile:
            self.q[sum(queries for queries, _ in lengths) :] = math.nan
        first = 0
        for i, (_, keys) in enumerate(lengths):
            count = -(-keys // PAGE)
            pages = order[first : first + count]
            first += count
            self.table[i, :count] = pages
            self.memory[pages] = setup.randn(count, *self.memory.shape[1:])
            if hostile and keys % PAGE:
                self.memory[pages[-1], :, keys % PAGE :] = math.nan
        starts = [0, *itertools.accumulate(n for n, _ in lengths)]
        self.starts.copy_(setup.indices(starts))
        self.used.copy_(setup.indices([keys for _, keys in lengths]))

    def arguments(self, most: int | None = None) -> dict[str, Any]:
        """What vLLM passes, by name; most: max_seqlen_q, of the lengths by default."""
        queries, keys = (max(x) for x in zip(*self.lengths, strict=True))
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "out": self.out,
            "cu_seqlens_q": self.starts,
            "max_seqlen_q": most or queries,
            "seqused_k": self.used,
            "max_seqlen_k": keys,
            "softmax_scale": HEAD_DIM**-0.5,
            "causal": True,
            "alibi_slopes": None,
            "window_size": [-1, -1],
            "block_table": self.table,
            "softcap": 0.0,
            "scheduler_metadata": None,
            "fa_version": 3,
            "q_descale": self.descale,
            "k_descale": self.descale,
            "v_descale": self.descale,
            "num_splits": 0,
            "s_aux": None,
        }

    def sequences(self) -> Iterator[tuple[slice, Any, Any, Any]]:
        """Where the rows of each sequence with queries are; its q, k and v."""
        begin = 0
        for i, (queries, keys) in enumerate(self.lengths):
            rows = slice(begin, begin + queries)
            begin += queries
            pages = self.table[i, : -(-keys // PAGE)].long()
            k, v = (x[pages].flatten(0, 1)[:keys] for x in (self.k, self.v))
            if queries:
                yield rows, self.q[rows], k, v

    def check(self, *outs: Any) -> str:
        """That outputs are right in the rows of sequences, and the first untouched elsewhere."""
        end = sum(queries for queries, _ in self.lengths)
        require(bool(outs[0][end:].isnan().all()), "a row of no sequence was written")
        places, said = list(self.sequences()), ""
        truth = [reference(*x)[0] for _, *x in places]
        usual = [reference(*x, dtype=torch.bfloat16)[0] for _, *x in places]
        for out in reversed(outs):
            said = check([out[rows] for rows, *_ in places], usual, truth)
        return said


def fa3(given: dict[str, Any]) -> Call | None:
    """vLLM's own FlashAttention-3 called as vLLM calls it; None where it is not installed."""
    from fmha_gen.bench import fa3 as module

    library = module.library()
    if library is None:
        return None
    torch.ops.load_library(str(library))
    operator = torch.ops._vllm_fa3_C.fwd.default
    left, right = given["window_size"]
    named = module.SETTINGS | given
    named |= {"is_causal": given["causal"], "page_table": given["block_table"]}
    named |= {"window_size_left": left, "window_size_right": right}
    # As its own interface hands them on, but for descales, which are of 8-bit tensors.
    named |= dict.fromkeys(("q_descale", "k_descale", "v_descale"))
    ordered = [named.get(each.name) for each in operator._schema.arguments]
    return lambda: operator(*ordered)


def vllm(setup: Setup) -> Found:
    """One call for a whole batch, as FlashAttentionImpl.forward makes it."""
    function = setup.adapter("vllm").flash_attn_varlen_func
    said, seconds = [], {}
    decoding = tuple((1, keys) for keys in setup.sizes.decoding)
    for label, kernel, lengths in (
        ("mixed", PAGED, setup.sizes.mixed),
        ("decoding", DECODING, decoding),
    ):
        rows, keys = (sum(x) for x in zip(*lengths, strict=True))
        padding = 3  # rows of q behind those of the batch
        pages = keys // PAGE + len(lengths) + 9
        longest = max(n for _, n in lengths)
        cache = Cache(setup, rows + padding, len(lengths), longest, pages)
        state = setup.generator.get_state()
        cache.fill(lengths, hostile=False)
        given = cache.arguments()
        peer, outs = fa3(given), []
        if peer is not None:
            cache.out.fill_(math.nan)
            peer()
            outs = [cache.out.clone()]
            seconds[f"FA3, {label}"] = setup.device.kernel_seconds(peer)
        setup.generator.set_state(state)  # the same keys, with all else NaN
        cache.fill(lengths)
        cache.out.fill_(math.nan)
        with setup.uses(kernel):
            found = function(**given)
        require(found is cache.out, "out is not what was given")
        said.append(f"{label}: {cache.check(cache.out.clone(), *outs)}")
        seconds[f"ours, {label}"] = setup.device.kernel_seconds(
            lambda given=given: function(**given)
        )
    beside = "FA3 agrees" if outs else "FA3 is not installed"
    return Found("; ".join([*said, beside]), seconds)


def replay(setup: Setup) -> Found:
    """A captured call meets lengths 1, the longest, 0, and another table, each time."""
    function = setup.adapter("vllm").flash_attn_varlen_func
    most = setup.sizes.longest
    batches = (
        ((4, 4), (4, 1), (4, 0), (4, 100)),
        ((1, 1), (1, most), (0, 0), (1, 17)),
        ((0, 0), (16, most), (0, 5), (0, 0)),
        ((0, 0), (0, 0), (0, 0), (0, 0)),
        ((1, most - 1), (13, 7), (1, 0), (1, 33)),
    )
    for kernel, bound in ((DECODING, FEW_QUERIES), (PAGED, 4096)):
        cache = Cache(setup, 16, 4, most, most // PAGE + 64)
        cache.fill(batches[0])
        given = cache.arguments(bound) | {"max_seqlen_k": most}
        with setup.uses(kernel):
            function(**given)
            again = setup.device.graph(lambda given=given: function(**given))
        for batch in batches:
            cache.fill(batch)
            cache.out.fill_(math.nan)
            again()
            cache.check(cache.out)
    return Found(f"2 kernels, {len(batches)} replays of each, lengths to {most}", {})


def streams(setup: Setup) -> Found:
    """Two replays at once give what each gives alone."""
    function = setup.adapter("vllm").flash_attn_varlen_func
    lengths, rounds = setup.sizes.mixed, setup.sizes.rounds
    rows, keys = (sum(x) for x in zip(*lengths, strict=True))
    longest = max(n for _, n in lengths)
    caches, calls = [], []
    for few in (False, True):
        each = [(min(n, FEW_QUERIES), m) for n, m in lengths] if few else lengths
        cache = Cache(setup, rows, len(each), longest, keys // PAGE + len(each))
        cache.fill(each)
        given = cache.arguments()
        function(**given)
        caches.append(cache)
        calls.append(setup.device.graph(lambda given=given: function(**given)))
    alone = []
    for cache, call in zip(caches, calls, strict=True):
        cache.out.fill_(math.nan)
        call()
        setup.device.synchronize()
        cache.check(cache.out)
        alone.append(cache.out.clone())
        cache.out.fill_(math.nan)
    setup.device.synchronize()
    contexts = setup.device.streams()
    for _ in range(rounds):
        for context, call in zip(contexts, calls, strict=True):
            with context:
                call()
    setup.device.synchronize()
    for i, (cache, right) in enumerate(zip(caches, alone, strict=True)):
        same = torch.equal(cache.out.nan_to_num(7.0), right.nan_to_num(7.0))
        require(same, f"stream {i} has other results than alone")
    return Found(f"{rounds} calls in each of two streams, bit by bit", {})


def host(setup: Setup) -> Found:
    """Small problems, so that the GPU is done sooner."""
    from tests.vendor.host_cost import calls, checks

    found = {}
    for name, call in calls(setup.package, setup.device.name).items():
        call()
        before = checks(setup.package)
        found[name] = setup.device.host_seconds(call)
        require(checks(setup.package) == before, f"{name}: not launched at once")
    return Found("medians", found)


PARTS: dict[str, Callable[[Setup], Found]] = {
    "generate": generate,
    "continuous": continuous,
    "graphs": functools.partial(continuous, graphs=True),
    "packed": packed,
    "varlen_attn": varlen_attn,
    "vllm": vllm,
    "replay": replay,
    "streams": streams,
    "host": host,
}


class Outcome(NamedTuple):
    """Of a part: passed, failed or absent."""

    name: str
    status: str
    said: str
    seconds: dict[str, float]

    def line(self) -> str:
        """The outcome as it is printed."""
        times = [f"{name} {words(x)}" for name, x in self.seconds.items()]
        head = f"{self.name + ':':13}{self.status}"
        return "; ".join([head, self.said, ", ".join(times)]).rstrip("; ")


def words(seconds: float) -> str:
    """A time with its unit."""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-2 else f"{seconds:.3f} s"


def shortly(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


@torch.no_grad()
def outcome(name: str, setup: Setup) -> Outcome:
    """What becomes of a part."""
    try:
        found = PARTS[name](setup)
    except Absent as absent:
        return Outcome(name, "absent", str(absent), {})
    except Exception as error:
        import traceback

        traceback.print_exc()
        return Outcome(name, "FAILED", shortly(error), {})
    return Outcome(name, "passed", *found)


def imported(folder: Path) -> ModuleType:
    """The package in a folder, made where there is none."""
    if not (folder / "__init__.py").exists():
        from fmha_gen.vendoring import command

        command.vendor(command.Options(folder, GENERATED, STEMS, True, ADAPTERS))
    sys.path.insert(0, str(folder.resolve().parent))
    return importlib.import_module(folder.resolve().name)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.hardware.clients")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args(arguments)
    names = asked.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"{', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    setup, outcomes = Setup(imported(asked.folder)), []
    for name in names:
        outcomes.append(outcome(name, setup))
        print(outcomes[-1].line(), flush=True)
        if asked.json:
            made = [each._asdict() for each in outcomes]
            asked.json.write_text(json.dumps(made, indent=1) + "\n")
    counts = {
        status: sum(each.status == status for each in outcomes)
        for status in ("passed", "FAILED", "absent")
    }
    print(", ".join(f"{n} {status}" for status, n in counts.items()))
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
