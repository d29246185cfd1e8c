# SPDX-License-Identifier: Apache-2.0
"""Who computes a problem, each called as its own users call it: tensors in, fresh output back.

Tensors are [batch, rows, heads, dim]. FlashAttention-4 writes LSE if our kernel does,
FlashAttention-3 always, cuDNN never. Inputs are random and normal: zeros would run faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from types import ModuleType
from typing import Any, NamedTuple

import cutlass
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..evidence.trial import DTYPES
from ..ops import masks, scores
from ..ops.reference import attention
from . import fa3 as fa3_module
from .problems import Problem
from .timing import SEED, Launch

WRONG = 0.02  # relative error beyond which a contender computes something else
MATMUL_SIZE = 8192  # rows and columns of the product that says how fast a card is
MATMUL_FLOPS = 2 * MATMUL_SIZE**3


class Inputs(NamedTuple):
    """q [batch, q, heads, d_qk], k [batch, kv, kv_heads, d_qk], v [batch, kv, kv_heads, d_v].

    sink: [heads] fp32, of values that bf16 has, for peers take no others.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sink: torch.Tensor | None = None
    slopes: torch.Tensor | None = None

    @property
    def qkv(self) -> tuple[torch.Tensor, ...]:
        """What every problem has."""
        return self[:3]

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        """What our kernels take by name alone."""
        named = {"sink": self.sink, "slopes": self.slopes}
        return {name: x for name, x in named.items() if x is not None}


def make_inputs(problem: Problem, device: str) -> Inputs:
    """The same values whoever asks."""
    generator, spec = torch.Generator(device).manual_seed(SEED), problem.spec
    made = {}
    for x in problem.operation.inputs(spec):
        drawn = torch.randn(x.shape(spec, problem), device=device, generator=generator)
        made[x.name] = drawn.bfloat16() if x.type(spec) == "fp32" else drawn
        made[x.name] = made[x.name].to(DTYPES[x.type(spec)])
    if "slopes" in made:  # those of models with ALiBi
        heads = torch.arange(1, problem.heads + 1, device=device)
        made["slopes"] = torch.exp2(-8.0 * heads / problem.heads)
    return Inputs(**made)


def ours(kernel: ModuleType, inputs: Inputs) -> Launch:
    """A generated kernel's public entry, which allocates its outputs."""
    return lambda: _out(kernel.fmha(*inputs.qkv, **inputs.by_name))


def bare(kernel: ModuleType, inputs: Inputs) -> Launch:
    """What a generated kernel's ``compile()`` returns, given all its tensors."""
    outputs = kernel.fmha(*inputs.qkv, **inputs.by_name)
    tensors = [*inputs.qkv, *inputs.by_name.values()]
    tensors += outputs if isinstance(outputs, tuple) else (outputs,)
    run, scale = kernel.compile(), inputs.q.shape[3] ** -0.5
    processors = kernel.sm_count(inputs.q.get_device())
    return lambda: run(*tensors, scale, processors)


def fa4(problem: Problem, inputs: Inputs) -> Launch:
    """FlashAttention-4."""
    _refuse_scores(problem, "FlashAttention-4")
    function = import_module("flash_attn.cute").flash_attn_func
    given: dict[str, Any] = {"causal": problem.causal, "return_lse": problem.lse}
    if problem.has_window:
        given["window_size"] = (problem.window_left, problem.window_right)
    if problem.softcap is not None:
        given["softcap"] = problem.softcap
    if inputs.sink is not None:
        given["learnable_sink"] = inputs.sink.bfloat16()
    return lambda: _out(function(*inputs.qkv, **given))


def _refuse_scores(problem: Problem, peer: str) -> None:
    """Of a softcap each peer speaks for itself."""
    if problem.alibi or problem.score != "none":
        raise RuntimeError(f"{peer} is not timed with {scores.word_of(problem.spec)}")


def fa3(problem: Problem, inputs: Inputs) -> Launch:
    """FlashAttention-3."""
    _refuse_scores(problem, "FlashAttention-3")
    function = fa3_module.launch(problem, *inputs[:4])
    return lambda: _out(function())


def cudnn(problem: Problem, inputs: Inputs) -> Launch:
    """Attention of cuDNN, as PyTorch offers it."""
    if problem.causal and problem.q != problem.kv:
        raise RuntimeError("PyTorch's cuDNN attention has no bottom-right causal mask")
    if problem.has_window:
        raise RuntimeError("PyTorch's cuDNN attention has no window")
    _refuse_scores(problem, "PyTorch's cuDNN attention")
    if problem.softcap is not None:
        raise RuntimeError("PyTorch's cuDNN attention has no softcap")
    if inputs.sink is not None:
        raise RuntimeError("PyTorch's cuDNN attention has no sinks")
    q, k, v = (x.transpose(1, 2) for x in inputs.qkv)
    grouped = problem.heads != problem.kv_heads

    def launch() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            found = scaled_dot_product_attention(
                q, k, v, is_causal=problem.causal, enable_gqa=grouped
            )
        return found.transpose(1, 2)

    return launch


PEERS: Mapping[str, Callable[[Problem, Inputs], Launch]] = {
    "cudnn": cudnn,
    "fa3": fa3,
    "fa4": fa4,
}


def matmul(device: str) -> Launch:
    """A bf16 product of two `MATMUL_SIZE` squared matrices."""
    generator = torch.Generator(device).manual_seed(SEED)
    a, b = (
        torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, generator=generator).to(
            torch.bfloat16
        )
        for _ in range(2)
    )
    return lambda: a @ b


def error_of(launch: Callable[[], Any], problem: Problem, inputs: Inputs) -> float:
    """Relative error against float64 of the last batch's last head, whoever computes it."""
    last = (slice(-1, None), slice(None), slice(-1, None))
    q, k, v = (x[last] for x in inputs.qkv)
    truth = attention(
        *(q, k, v),
        scale=problem.d_qk**-0.5,
        mask=masks.of_spec(problem.spec),
        score=scores.of_spec(problem.spec),
        tensors={} if inputs.slopes is None else {"slopes": inputs.slopes[-1:]},
        sink=None if inputs.sink is None else inputs.sink[-1:],
    ).out
    error = launch()[last].double() - truth
    return float(error.norm() / truth.norm())


def versions() -> dict[str, str | int | None]:
    """Of everything that takes part; None where it is not installed as a distribution."""
    backends: Any = torch.backends  # its annotations are not complete
    found: dict[str, str | int | None] = {
        "dsl": cutlass.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": backends.cudnn.version(),
    }
    found["fa3"] = fa3_module.version()
    try:
        found["fa4"] = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        found["fa4"] = None
    return found


def _out(found: Any) -> Any:
    """Versions differ in whether LSE comes along."""
    return found[0] if isinstance(found, tuple) else found
