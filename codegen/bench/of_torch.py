# SPDX-License-Identifier: Apache-2.0
"""Attention of cuDNN and of FlashAttention-2, as PyTorch has them.

The forward pass is `scaled_dot_product_attention`, the backward pass the operator that autograd
would call. Autograd itself would be timed with its engine, which is no part of the computation, and
needs a graph that a forward pass recorded; the operator is the backward pass alone, on the current
stream. What it is given of the forward pass, O, LSE and a state of random numbers, its own forward
operator returns once, before anything is timed. Operators are internal to PyTorch; these are
those of 2.14.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .problems import Problem
from .timing import Launch

if TYPE_CHECKING:
    import torch

CUDNN: Final = "CUDNN_ATTENTION"
FLASH: Final = "FLASH_ATTENTION"


def forward(
    backend: str, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Launch:
    """A call that returns O. backend: of those above. All tensors are [batch, rows, heads, d]."""
    from torch.nn import attention
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal, grouped = _is_causal(problem), problem.heads != problem.kv_heads

    def launch() -> torch.Tensor:
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            found = scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=grouped
            )
        return found.transpose(1, 2)

    return launch


def backward(
    backend: str,
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
) -> Launch:
    """A call that returns (dQ, dK, dV). The forward pass runs here."""
    q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
    make = _cudnn if backend == CUDNN else _flash
    operator, arguments = make(_is_causal(problem), q, k, v, dout)

    def launch() -> tuple[torch.Tensor, ...]:
        return tuple(x.transpose(1, 2) for x in operator(*arguments))

    return launch


def _cudnn(causal: bool, *tensors: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """The operator of cuDNN and its arguments; no bias and no dropout."""
    import torch

    q, k, v, dout = tensors
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *offsets, seed, offset, _ = run(q, k, v, None, True, 0.0, causal)
    of_forward = (out, lse, seed, offset, None, *offsets)
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    return operator, (dout, q, k, v, *of_forward, 0.0, causal)


def _flash(causal: bool, *tensors: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """The operator of FlashAttention-2 and its arguments; no dropout."""
    import torch

    q, k, v, dout = tensors
    run = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *offsets, state, unused, _ = run(q, k, v, 0.0, causal)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_backward
    of_forward = (out, lse, *offsets, 0.0, causal, state, unused)
    return operator, (dout, q, k, v, *of_forward)


def _is_causal(problem: Problem) -> bool:
    return problem.keys.right == 0
