# SPDX-License-Identifier: Apache-2.0
"""Trains a small transformer from scratch on a Hopper GPU, by ours and by others' attention.

    python -m tests.hardware.train [DIR] RUN... [--steps N] [--compile] [--out FILE]
    python -m tests.hardware.train --compare FILE

RUN is ATTENTION:SEED,... of sdpa, ours, ours-deterministic and fa4, as sdpa:0,1,2. Of ours DIR is
a package that `fmha-gen vendor --init` wrote: with a forward kernel that gives an LSE and one of
the backward pass, for bf16, causal, head_dim 128, four query heads per KV head; that of
ours-deterministic says deterministic: true.

The model is a decoder of 102 million parameters (RMSNorm, RoPE, grouped heads, SwiGLU), fp32 under
autocast to bf16; its tokens are bytes of the standard library's sources, in batches of 8 sequences
of 4096, the same for every run. A seed is that of the weights. Each run prints JSON lines, one per
step and one at its end, with the median time of a step by CUDA's events and the sha256 of the
weights; --out appends them to a file, in which runs of several commands come together.

--compare judges: the mean of ours differs from that of sdpa by less than one of them spreads from
seed to seed, in every window of WINDOW steps; runs of ours-deterministic with one seed end in
equal weights. Status 1 when one fails, or there are too few seeds to tell.

--small trains some steps of a tiny model by sdpa on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import itertools
import json
import math
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Read when cuBLAS starts, which sums in a fixed order with it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn
from torch.nn import functional

ATTENTIONS = ("sdpa", "ours", "ours-deterministic", "fa4")
BYTES = 256
WINDOW = 25  # [steps: of which losses are averaged before they are compared]
WARM_UP = 20  # [steps: not timed]
SEEDS = 2  # [at least, of whose losses there is a spread]
Attention = Callable[[Any, Any, Any], Any]
Line = Mapping[str, Any]


class Sizes(NamedTuple):
    """Of the model, of a batch, and how it is trained."""

    layers: int = 9
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    inner: int = 2816  # of SwiGLU
    batch: int = 8
    length: int = 4096
    steps: int = 500
    rate: float = 6e-4
    rising: int = 50  # [steps until the rate is reached]

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.heads * self.head_dim


SMALL = Sizes(
    layers=2, heads=4, kv_heads=2, head_dim=16, inner=64, batch=4, length=64, steps=20
)


# --- the model ----------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm and added to what there was."""

    def __init__(self, sizes: Sizes, attention: Attention) -> None:
        super().__init__()
        self.sizes, self.attention = sizes, attention
        width, of_kv = sizes.width, sizes.kv_heads * sizes.head_dim
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, width + 2 * of_kv, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_and_up = nn.Linear(width, 2 * sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, width, bias=False)

    def forward(self, x: Any, turns: Any) -> Any:
        """x: [batch, seqlen, width]; turns: cosine and sine of RoPE's angles."""
        heads, kv_heads = self.sizes.heads, self.sizes.kv_heads
        rows = self.qkv(self.before(x)).unflatten(-1, (-1, self.sizes.head_dim))
        q, k, v = rows.split((heads, kv_heads, kv_heads), 2)
        found = self.attention(turned(q, turns), turned(k, turns), v)
        x = x + self.out(found.flatten(2))
        gate, up = self.gate_and_up(self.between(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


def turned(x: Any, turns: Any) -> Any:
    """RoPE: pairs of x, half of head_dim apart, turned by their place; in x's own type."""
    (cosine, sine), (one, other) = turns, x.float().chunk(2, -1)
    return torch.cat([one * cosine - other * sine, other * cosine + one * sine], -1).to(
        x.dtype
    )


class Model(nn.Module):
    """Logits of the next byte. Embeddings are those of the output, too."""

    turns: Any

    def __init__(self, sizes: Sizes, attention: Attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, sizes.width)
        self.layers = nn.ModuleList(
            Layer(sizes, attention) for _ in range(sizes.layers)
        )
        self.last = nn.RMSNorm(sizes.width)
        half = sizes.head_dim // 2
        speeds = 10_000.0 ** (-torch.arange(half) / half)
        angles = torch.arange(sizes.length)[:, None, None] * speeds
        turns = torch.stack([angles.cos(), angles.sin()])
        self.register_buffer("turns", turns, persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                deep = name.endswith(("out.weight", "down.weight"))
                scale = 0.02 / math.sqrt(2 * sizes.layers if deep else 1)
                nn.init.normal_(weight, std=scale)

    def forward(self, tokens: Any) -> Any:
        """tokens: [batch, seqlen]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        return functional.linear(self.last(x), self.embedding.weight)


def attention_of(name: str, folder: Path | None = None) -> Attention:
    """Causal attention of q, k and v, [batch, seqlen, heads, head_dim]; folder: the package."""
    if name == "sdpa":
        return sdpa
    if name == "fa4":
        run = importlib.import_module("flash_attn.cute").flash_attn_func

        def fa4(q: Any, k: Any, v: Any) -> Any:
            found = run(q, k, v, causal=True)
            return found[0] if isinstance(found, tuple) else found

        return fa4
    if folder is None:
        raise ValueError(f"{name}: needs DIR, a package that fmha-gen vendor wrote")
    if (parent := str(folder.resolve().parent)) not in sys.path:
        sys.path.insert(0, parent)
    package = importlib.import_module(folder.resolve().name)
    ordered = name == "ours-deterministic"
    return lambda q, k, v: package.fmha(q, k, v, causal=True, deterministic=ordered)


def sdpa(q: Any, k: Any, v: Any) -> Any:
    """PyTorch's."""
    rows = (x.transpose(1, 2) for x in (q, k, v))
    found = functional.scaled_dot_product_attention(
        *rows, is_causal=True, enable_gqa=True
    )
    return found.transpose(1, 2)


# --- the text -----------------------------------------------------------------------------


def text() -> bytes:
    """The sources of Python's standard library, without its tests, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not left_out & {*path.relative_to(root).parts}
    )
    return b"\n".join(path.read_bytes() for path in files)


def batches(data: bytes, sizes: Sizes) -> Iterator[Any]:
    """For ever [batch, seqlen + 1] bytes from places that are drawn, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    inside = torch.arange(sizes.length + 1)
    while True:
        last = len(tokens) - len(inside)
        starts = torch.randint(last + 1, (sizes.batch, 1), generator=generator)
        yield tokens[starts + inside].long()


# --- a run --------------------------------------------------------------------------------


class Run(NamedTuple):
    """What is trained."""

    attention: str
    seed: int


def runs_of(words: Iterable[str]) -> list[Run]:
    """Runs by ATTENTION:SEED,...; raises ValueError."""
    found = []
    for word in words:
        name, _, seeds = word.partition(":")
        if name not in ATTENTIONS:
            raise ValueError(f"{name}: attention is one of {', '.join(ATTENTIONS)}")
        found += [Run(name, int(seed)) for seed in (seeds or "0").split(",")]
    return found


def rate_at(step: int, sizes: Sizes) -> float:
    """It rises in a line, then falls as a cosine to a tenth."""
    if step < sizes.rising:
        return sizes.rate * (step + 1) / sizes.rising
    over = (step - sizes.rising) / max(1, sizes.steps - sizes.rising)
    return sizes.rate * (0.55 + 0.45 * math.cos(math.pi * over))


class Clock:
    """When steps began: by events of CUDA, which wait for nothing, else of the host."""

    def __init__(self, device: str) -> None:
        self.cuda: Any = torch.cuda if device == "cuda" else None
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Now."""
        if self.cuda is None:
            self.marks.append(time.perf_counter())
            return
        event = self.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def milliseconds(self) -> list[float]:
        """Between marks, once all is done."""
        pairs = list(itertools.pairwise(self.marks))
        if self.cuda is None:
            return [1e3 * (end - begin) for begin, end in pairs]
        self.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]


def digest_of(model: Any) -> str:
    """Of all weights' bits."""
    found = hashlib.sha256()
    for _, weight in sorted(model.state_dict().items()):
        found.update(weight.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


@contextlib.contextmanager
def ordered(wanted: bool) -> Iterator[None]:
    """PyTorch sums in a fixed order, where wanted."""
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def train(
    run: Run,
    sizes: Sizes,
    attention: Attention,
    device: str,
    data: bytes,
    whole: bool = False,
) -> Iterator[Line]:
    """Trains, and tells of it line by line. whole: the model as one graph of torch.compile."""
    torch.manual_seed(run.seed)
    model = Model(sizes, attention).to(device)
    step_of: Any = torch.compile(model, fullgraph=True) if whole else model
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    losses, clock = [], Clock(device)
    with ordered(run.attention == "ours-deterministic"):
        clock.mark()
        for step, tokens in zip(range(sizes.steps), batches(data, sizes), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, sizes)
            tokens = tokens.to(device, non_blocking=True)
            with torch.autocast(device, torch.bfloat16):
                logits = step_of(tokens[:, :-1])
            loss = functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
            )
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            clock.mark()
            if step % 50 == 0:
                print(f"{run.attention}:{run.seed} {step} {loss:.4f}", file=sys.stderr)
    times = clock.milliseconds()
    said = {**run._asdict(), "compiled": whole}
    for step, value in enumerate(torch.stack(losses).tolist()):
        yield {**said, "step": step, "loss": value, "ms": round(times[step], 3)}
    timed = times[WARM_UP:] or times
    yield {
        **said,
        "steps": sizes.steps,
        "step_ms": round(statistics.median(timed), 3),
        "tokens": sizes.batch * sizes.length,
        "parameters": sum(x.numel() for x in model.parameters()),
        "text": hashlib.sha256(data).hexdigest(),
        "weights": digest_of(model),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
    }


# --- what runs say together ---------------------------------------------------------------


class Verdict(NamedTuple):
    """What was compared, and whether it holds."""

    holds: bool
    said: str


def curves_of(lines: Iterable[Line], attention: str) -> list[list[float]]:
    """Losses of each seed's first run, averaged by windows; a shorter last one is left out."""
    runs: list[tuple[int, list[float]]] = []
    for line in lines:
        if "loss" in line and line["attention"] == attention:
            if line["step"] == 0:
                runs.append((line["seed"], []))
            runs[-1][1].append(line["loss"])
    # A seed counts once: two runs of it say nothing of how far seeds lie apart.
    return [
        [
            statistics.fmean(x[i : i + WINDOW])
            for i in range(0, len(x) - WINDOW + 1, WINDOW)
        ]
        for x in dict(reversed(runs)).values()
    ]


def compared(lines: Sequence[Line], ours: str, theirs: str = "sdpa") -> Verdict:
    """Whether the means of two attentions differ by less than one of them spreads, in windows."""
    curves = [curves_of(lines, name) for name in (ours, theirs)]
    counts = [len(x) for x in curves]
    lengths = {len(curve) for group in curves for curve in group}
    if min(counts) < SEEDS or len(lengths) != 1 or lengths == {0}:
        return Verdict(
            False, f"{ours}: {counts[0]} seeds, {theirs}: {counts[1]}: too few"
        )
    ratios = []
    for rows in zip(*(zip(*group, strict=True) for group in curves), strict=True):
        gap = abs(statistics.fmean(rows[0]) - statistics.fmean(rows[1]))
        spread = max(max(row) - min(row) for row in rows)
        ratios.append(gap / spread if spread else math.inf if gap else 0.0)
    wrong = [
        window for window, ratio in enumerate(ratios) if not ratio <= 1
    ]  # NaN, too
    where = wrong[0] if wrong else ratios.index(max(ratios))
    ends = [statistics.fmean(curve[-1] for curve in group) for group in curves]
    said = (
        f"{ours} {ends[0]:.4f} and {theirs} {ends[1]:.4f} at the end; in window {where} means"
        f" differ by {ratios[where]:.2f} of the spread between seeds, the most there is"
    )
    if wrong:
        said = f"{said.rpartition(',')[0]}, in {len(wrong)} windows by more than it"
    return Verdict(not wrong, said)


def repeated(lines: Iterable[Line], attention: str) -> Verdict:
    """Whether runs with one seed end in the same weights."""
    weights: dict[int, list[str]] = {}
    for line in lines:
        if "weights" in line and line["attention"] == attention:
            weights.setdefault(line["seed"], []).append(line["weights"])
    twice = {seed: found for seed, found in weights.items() if len(found) > 1}
    if not twice:
        return Verdict(False, f"{attention}: no seed twice")
    differ = [seed for seed, found in twice.items() if len({*found}) > 1]
    if differ:
        return Verdict(False, f"{attention}: other weights with seed {differ[0]}")
    return Verdict(
        True, f"{attention}: equal weights with seed {min(twice)}, bit by bit"
    )


def verdicts(lines: Sequence[Line]) -> list[Verdict]:
    """Of all that there is to compare."""
    there = {line["attention"] for line in lines}
    found = [compared(lines, name) for name in ATTENTIONS[1:3] if name in there]
    if "ours-deterministic" in there:
        found.append(repeated(lines, "ours-deterministic"))
    return found or [Verdict(False, "no run of ours")]


def step_times(lines: Iterable[Line]) -> Iterator[str]:
    """The time of a step by each attention: the median of its runs."""
    times: dict[tuple[str, bool], list[float]] = {}
    for line in lines:
        if "step_ms" in line:
            key = line["attention"], line["compiled"]
            times.setdefault(key, []).append(line["step_ms"])
    for (name, whole), found in times.items():
        how = ", compiled" if whole else ""
        yield f"{name}{how}: {statistics.median(found):.2f} ms a step, {len(found)} runs"


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.hardware.train")
    parser.add_argument("words", nargs="*", metavar="[DIR] RUN...")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.compare:
        lines = [json.loads(line) for line in asked.compare.read_text().splitlines()]
        print(*step_times(lines), sep="\n")
        found = verdicts(lines)
        for verdict in found:
            print("holds:" if verdict.holds else "FAILS:", verdict.said)
        return 0 if all(verdict.holds for verdict in found) else 1
    words = list(asked.words)
    is_run = bool(words) and words[0].partition(":")[0] in ATTENTIONS
    folder = Path(words.pop(0)) if words and not is_run else None
    try:
        runs = runs_of(words or ["sdpa:0"])
    except ValueError as error:
        parser.error(str(error))
    sizes, device = (SMALL, "cpu") if asked.small else (Sizes(), "cuda")
    sizes = sizes._replace(steps=asked.steps or sizes.steps)
    data = text()
    for run in runs:
        attention = attention_of(run.attention, folder)
        for line in train(run, sizes, attention, device, data, asked.compile):
            written = json.dumps(line)
            print(written, flush=True)
            if asked.out:
                with asked.out.open("a") as file:
                    file.write(written + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
