# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4. Its own masks where they say the problem's, else an expression as ``mask_mod``.

With that come the lists of blocks that FlexAttention has: both packages name and order them alike.
Documents are packed sequences. Of these K and V may be in pages. Its backward pass is the function
that its autograd function calls, given O and LSE, which it has as ours are.
Checked with 4.0.0b36.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from . import draws, flex
from .draws import DOCUMENTS
from .problems import Problem

if TYPE_CHECKING:
    import torch

PACKAGE = "flash_attn.cute"


def version() -> str | None:
    """None where it is not installed as a distribution."""
    try:
        return metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return None


def launch(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    by_name: Mapping[str, torch.Tensor],
) -> Callable[[], Any]:
    """A call of it. Tensors are as our kernel takes them; by_name: further inputs."""
    package, band = import_module(PACKAGE), problem.band
    given: dict[str, Any] = {"return_lse": problem.lse}
    if band is None:
        given["mask_mod"] = mask_mod(problem, by_name)
        given["block_sparse_tensors"] = block_lists(problem, by_name, q.device)
    else:
        given["causal"] = band.causal
        if band.window:
            given["window_size"] = (band.left, band.right or None)
    if problem.softcap is not None:
        given["softcap"] = problem.softcap
    if "sink" in by_name:
        given["learnable_sink"] = by_name["sink"].bfloat16()
    if DOCUMENTS not in problem.drawn and not problem.lengths:
        return lambda: package.flash_attn_func(q, k, v, **given)
    given |= draws.packed(problem, q, k, v, by_name)
    shape = (*q.shape[:-1], v.shape[-1])

    def call() -> torch.Tensor:
        found = package.flash_attn_varlen_func(**given)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out.view(shape)

    return call


def backward(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A call that returns (dQ, dK, dV). Tensors are as our kernel takes them."""
    package, band = import_module(f"{PACKAGE}.interface"), problem.band
    assert band is not None, "refused"
    given: dict[str, Any] = {
        "causal": band.causal,
        "deterministic": problem.deterministic,
    }
    if band.window:
        given["window_size_left"] = band.left
        given["window_size_right"] = band.right or None
    if problem.softcap is not None:
        given["softcap"] = problem.softcap

    def call() -> tuple[torch.Tensor, ...]:
        found = package._flash_attn_bwd(q, k, v, out, dout, lse, **given)
        return tuple(found[:3])

    return call


def mask_mod(problem: Problem, numbers: Mapping[str, Any]) -> Callable[..., Any]:
    """The mask as it calls one, with values of CuTe in place of PyTorch's.

    numbers: by name, those that the mask may read; it has them as constants.
    """
    from cutlass import cute

    visible = flex.mask_mod(problem, numbers, cute.where)
    assert visible is not None, "a mask of no edge is a band"

    def mod(b: Any, h: Any, row: Any, kv: Any, lengths: Any, tensors: Any) -> Any:
        return visible(b, h, row, kv)

    group = problem.heads // problem.kv_heads
    # By this it knows the kernels that it has compiled.
    read = {name: x for name, x in numbers.items() if isinstance(x, int)}
    mod.__cute_hash__ = f"{problem.mask} {problem.q} {problem.kv} {group} {read}"  # type: ignore[attr-defined]
    return mod


def block_lists(
    problem: Problem, numbers: Mapping[str, Any], device: torch.device
) -> Any:
    """The blocks in which some score counts, and of these the ones in which all do."""
    lists = flex.block_mask(problem, numbers, device)
    made = import_module(f"{PACKAGE}.block_sparsity").BlockSparseTensorsTorch
    return made(
        *(lists.kv_num_blocks, lists.kv_indices),
        *(lists.full_kv_num_blocks, lists.full_kv_indices),
        block_size=lists.BLOCK_SIZE,
    )
