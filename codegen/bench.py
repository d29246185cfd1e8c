# SPDX-License-Identifier: Apache-2.0
"""Times kernels beside their peers: one process, one GPU, CUDA graphs, contenders in random order.

Graphs leave the host out, and taking turns exposes everyone to the same heat and power cap. Figures
compare within one run only.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .cases import DYNAMIC
from .errors import CheckFailed, EnvironmentProblem
from .evaluation import DEFAULT_OUT, PLAIN_WIDTH, kernel_files
from .gpu import Gpu, find_gpu
from .validate import require_gpu

OURS = "ours"
PEERS = ("fa4", "cudnn")

DEFAULT_LENGTH = 4096  # of a dynamic side
DEFAULT_TOKENS = 16384  # batch * q
DEFAULT_WIDTH = 2048  # heads * head_dim.v
GRAPH_SECONDS = (
    0.015  # of one graph: long against its launch, short against power control
)
ESTIMATE_LAUNCHES = 5
SEED = 2026
WRONG = 0.02  # relative error beyond which a contender computes something else


@dataclass(frozen=True)
class Shape:
    """One call. heads, kv_heads, q, kv: counts; d_qk, d_v: head dims; causal: bottom-right."""

    batch: int
    heads: int
    kv_heads: int
    q: int
    kv: int
    d_qk: int
    d_v: int
    causal: bool

    @property
    def flops(self) -> float:
        """2 * batch * heads * pairs * (d_qk + d_v), with pairs = q * kv without a mask.

        Causal, counting half of the diagonal: q * kv - q^2 / 2 for q <= kv, else kv^2 / 2.
        """
        pairs: float = self.q * self.kv
        if self.causal:
            pairs = pairs - self.q**2 / 2 if self.q <= self.kv else self.kv**2 / 2
        return 2 * self.batch * self.heads * pairs * (self.d_qk + self.d_v)

    def __str__(self) -> str:
        mask = "causal" if self.causal else "none"
        heads = (
            f"{self.heads}/{self.kv_heads}"
            if self.kv_heads != self.heads
            else f"{self.heads}"
        )
        return f"b{self.batch} h{heads} q{self.q} kv{self.kv} {mask}"


@dataclass
class Timing:
    """One contender. seconds: per launch, one value per round; the clock and power beside it."""

    launches: int  # per graph
    error: float  # relative, against float64, of one head
    seconds: list[float] = field(default_factory=list)
    sm_clock_mhz: list[int | None] = field(default_factory=list)
    power_watts: list[float | None] = field(default_factory=list)

    def tflops(self, shape: Shape) -> float:
        """Of the median round."""
        return shape.flops / statistics.median(self.seconds) / 1e12


@dataclass
class Cell:
    """One kernel at one shape. missing: why a contender has no timing."""

    kernel: str
    shape: Shape
    timings: dict[str, Timing] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def tflops(self, name: str) -> float | None:
        """None for a contender without a timing."""
        return self.timings[name].tflops(self.shape) if name in self.timings else None

    def ratio(self, peer: str) -> float | None:
        """Our speed over the peer's."""
        ours, theirs = self.tflops(OURS), self.tflops(peer)
        return ours / theirs if ours is not None and theirs is not None else None


def run(
    paths: Sequence[str | Path],
    *,
    against: Sequence[str] = PEERS,
    rounds: int = 7,
    json_file: Path | None = None,
    batch: int | None = None,
    heads: int | None = None,
    seqlen: int | None = None,
    out: Path = DEFAULT_OUT,
) -> list[Cell]:
    """Time kernels and print a table; raises CheckFailed when one of ours does not run.

    paths: as for validate. seqlen: of the dynamic sides. json_file: gets every round of everyone.
    """
    if unknown := [name for name in against if name not in PEERS]:
        raise CheckFailed(
            f"--against {','.join(unknown)}: the peers are {', '.join(PEERS)}"
        )
    if rounds < 1:
        raise CheckFailed(f"--rounds {rounds}: at least 1")
    kernels = kernel_files(paths, out)
    require_gpu()
    gpu = find_gpu()
    cells = [
        _time_kernel(
            kernel, gpu, against, rounds, batch=batch, heads=heads, seqlen=seqlen
        )
        for kernel in kernels
    ]
    print_table(cells, against)
    if json_file is not None:
        json_file.write_text(as_json_text(cells, gpu), encoding="utf-8")
    if failed := [
        f"{cell.kernel}: {cell.missing[OURS]}" for cell in cells if OURS in cell.missing
    ]:
        raise CheckFailed("\n".join(failed))
    return cells


def shape_for(
    spec: Mapping[str, Any],
    *,
    batch: int | None = None,
    heads: int | None = None,
    seqlen: int | None = None,
) -> Shape:
    """The shape to time a SPEC at. Raises CheckFailed for one that the kernel does not take."""
    lengths = {}
    for side, fixed in spec["seqlen"].items():
        lengths[side] = (seqlen or DEFAULT_LENGTH) if fixed == DYNAMIC else int(fixed)
    if seqlen is not None and seqlen not in lengths.values():
        raise CheckFailed(
            f"{spec['name']}: both lengths are fixed, --seqlen {seqlen} is neither"
        )
    group, d_v = spec["q_per_kv"], spec["head_dim"]["v"]
    if heads is None:
        heads = max(1, DEFAULT_WIDTH // d_v // group) * group
    if heads < 1 or heads % group:
        raise CheckFailed(
            f"{spec['name']}: --heads {heads} is no multiple of q_per_kv = {group}"
        )
    return Shape(
        batch=batch or max(1, DEFAULT_TOKENS // lengths["q"]),
        heads=heads,
        kv_heads=heads // group,
        q=lengths["q"],
        kv=lengths["kv"],
        d_qk=spec["head_dim"]["qk"],
        d_v=d_v,
        causal=spec["mask"] == "causal",
    )


# --- on the GPU ---------------------------------------------------------------------------


def _time_kernel(
    path: Path, gpu: Gpu, against: Sequence[str], rounds: int, **sizes: int | None
) -> Cell:
    import torch

    from .trial import DTYPES, environment_problem, load_kernel

    try:
        kernel = load_kernel(path)
    except ImportError as failure:
        raise EnvironmentProblem(f"cannot import {path}: {failure}") from failure
    spec = kernel.SPEC
    if problem := environment_problem(spec["arch"]):
        raise EnvironmentProblem(f"{path}: {problem}")
    shape = shape_for(spec, **sizes)
    cell = Cell(path.stem, shape)
    torch.manual_seed(SEED)
    q, k, v = (
        torch.randn(shape.batch, rows, count, dim, device="cuda").to(
            DTYPES[spec["dtype"]]
        )
        for rows, count, dim in (
            (shape.q, shape.heads, shape.d_qk),
            (shape.kv, shape.kv_heads, shape.d_qk),
            (shape.kv, shape.kv_heads, shape.d_v),
        )
    )
    graphs = {}
    launches_alive = []  # a graph does not own the outputs that its launches write
    with torch.no_grad():
        for name in (OURS, *against):
            try:
                launch = _contender(name, kernel, shape, q, k, v)
                launches_alive.append(launch)
                error = _error(launch, shape, q, k, v)
                if not error <= WRONG:
                    raise RuntimeError(
                        f"computes something else: relative error {error:.3g}"
                    )
                graphs[name], launches = _graph(launch)
            except Exception as failure:  # a peer may lack a shape, a package or a GPU
                cell.missing[name] = _one_line(failure)
            else:
                cell.timings[name] = Timing(launches, error)
    _take_turns(cell, graphs, gpu, rounds)
    return cell


def _contender(
    name: str, kernel: Any, shape: Shape, q: Any, k: Any, v: Any
) -> Callable[[], Any]:
    """A launch that returns out, [batch, q, heads, d_v]. FA4 writes lse if we do, cuDNN never."""
    if name == OURS:
        return _ours(kernel, shape, q, k, v)
    if name == "fa4":
        from flash_attn.cute import flash_attn_func

        with_lse = bool(kernel.SPEC["lse"])

        def fa4() -> Any:
            found = flash_attn_func(q, k, v, causal=shape.causal, return_lse=with_lse)
            return found[0] if isinstance(found, tuple) else found

        return fa4

    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if shape.causal and shape.q != shape.kv:
        raise RuntimeError("PyTorch's cuDNN attention has no bottom-right causal mask")
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    grouped = shape.heads != shape.kv_heads

    def cudnn() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            found = scaled_dot_product_attention(
                *heads_first, is_causal=shape.causal, enable_gqa=grouped
            )
        return found.transpose(1, 2)

    return cudnn


def _ours(kernel: Any, shape: Shape, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    import torch

    out = torch.empty(
        shape.batch, shape.q, shape.heads, shape.d_v, dtype=q.dtype, device="cuda"
    )
    into = {"out": out}
    if kernel.SPEC["lse"]:
        into["lse"] = torch.empty(shape.batch, shape.heads, shape.q, device="cuda")

    def ours() -> Any:
        kernel.fmha(q, k, v, **into)
        return out

    return ours


def _error(launch: Callable[[], Any], shape: Shape, q: Any, k: Any, v: Any) -> float:
    """Relative error of the last batch's last head; runs the contender for the first time."""
    from .compare import relative_error
    from .reference import attention

    last = (slice(-1, None), slice(None), slice(-1, None))
    truth = attention(
        q[last], k[last], v[last], scale=shape.d_qk**-0.5, causal=shape.causal
    ).out
    return relative_error(launch()[last].double(), truth)


def _graph(launch: Callable[[], Any]) -> tuple[Any, int]:
    """A graph of as many launches as take GRAPH_SECONDS, and that number."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    launch()
    begin.record()
    for _ in range(ESTIMATE_LAUNCHES):
        launch()
    end.record()
    end.synchronize()
    seconds = begin.elapsed_time(end) / 1e3 / ESTIMATE_LAUNCHES
    launches = max(1, round(GRAPH_SECONDS / seconds))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            launch()
    graph.replay()
    torch.cuda.synchronize()
    return graph, launches


def _take_turns(cell: Cell, graphs: Mapping[str, Any], gpu: Gpu, rounds: int) -> None:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for order in turns(list(graphs), rounds):
        for name in order:
            timing = cell.timings[name]
            begin.record()
            graphs[name].replay()
            end.record()
            time.sleep(
                GRAPH_SECONDS / 2
            )  # so that clock and power are those of the work
            timing.sm_clock_mhz.append(gpu.sm_clock_mhz())
            timing.power_watts.append(gpu.power_watts())
            end.synchronize()
            timing.seconds.append(begin.elapsed_time(end) / 1e3 / timing.launches)


def turns(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Each round everyone once, in another order; the same orders in every run."""
    dice = random.Random(SEED)
    for _ in range(rounds):
        yield dice.sample(names, len(names))


def _one_line(failure: Exception) -> str:
    text = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {text[0] if text else 'no message'}"


# --- what the user sees -------------------------------------------------------------------


def print_table(cells: Sequence[Cell], against: Sequence[str]) -> None:
    """TFLOPS of everyone and our speed over each peer's; below it, who is missing and why."""
    console = Console()
    plain = not console.is_terminal
    if plain:
        console = Console(width=PLAIN_WIDTH, no_color=True, highlight=False)
    console.print(table(cells, against, plain=plain))
    for cell in cells:
        for name, reason in cell.missing.items():
            console.print(f"{cell.kernel}: no {name}: {reason}", markup=False)


def table(cells: Sequence[Cell], against: Sequence[str], *, plain: bool) -> Table:
    """One row per kernel."""
    view = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=not plain)
    view.add_column("kernel", no_wrap=True)
    view.add_column("shape", no_wrap=True)
    for name in (f"{OURS} TFLOPS", *against, *(f"/ {peer}" for peer in against)):
        view.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        speeds = [_number(cell.tflops(name), 0) for name in (OURS, *against)]
        ratios = [_number(cell.ratio(peer), 2) for peer in against]
        view.add_row(cell.kernel, str(cell.shape), *speeds, *ratios)
    return view


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def as_json_text(cells: Sequence[Cell], gpu: Gpu) -> str:
    """All rounds of everyone, and the medians that the table shows."""
    objects = [
        {
            "kernel": cell.kernel,
            "shape": asdict(cell.shape),
            "flops": cell.shape.flops,
            "contenders": {
                name: {"tflops": cell.tflops(name), **asdict(timing)}
                for name, timing in cell.timings.items()
            },
            "missing": cell.missing,
        }
        for cell in cells
    ]
    found = {
        "gpu": gpu.name,
        "driver": gpu.driver,
        "versions": _versions(),
        "cells": objects,
    }
    return json.dumps(found, indent=2, sort_keys=True) + "\n"


def _versions() -> dict[str, str | int | None]:
    import cutlass
    import torch

    return {
        "dsl": cutlass.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
