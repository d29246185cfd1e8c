# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 where it is installed: from its own repository, or as the wheel of vLLM has it.

vLLM's build takes packed sequences alone; sequences of one length are packed without a copy. It is
loaded as a library, so nothing of vLLM is imported. Checked with vLLM 0.33.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import draws
from .draws import DOCUMENTS
from .problems import Problem
from .timing import Launch

if TYPE_CHECKING:
    import torch

OWN = "flash_attn_interface"
VLLM = "vllm"
LIBRARY = Path("vllm_flash_attn", "_vllm_fa3_C.abi3.so")  # in vLLM's folder
# Of the operator's arguments, those that are not None and not the problem's.
SETTINGS = {
    "is_rotary_interleaved": False,
    "num_splits": 1,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


def library() -> Path | None:
    """Where vLLM's wheel has it; None where there is none."""
    found = importlib.util.find_spec(VLLM)
    places = found.submodule_search_locations or [] if found else []
    return next(
        (path for place in places if (path := Path(place, LIBRARY)).exists()), None
    )


def version() -> str | None:
    """Whose it is and its version; None where it is not installed as a distribution."""
    for distribution, whose in (("flash_attn_3", ""), (VLLM, "vLLM ")):
        try:
            return f"{whose}{metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def launch(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    by_name: Mapping[str, torch.Tensor],
) -> Launch:
    """A call of it. Tensors are [batch, rows, heads, dim]; by_name: further inputs."""
    band = problem.band
    assert band is not None, "refused"
    sides = (band.left, band.right or None)
    window = tuple(-1 if keys is None else keys for keys in sides)
    packed = draws.packed(problem, q, k, v)
    shape = (*q.shape[:3], v.shape[-1])
    with contextlib.suppress(ImportError):
        own = import_module(OWN)
        more: dict[str, Any] = {} if window == (-1, -1) else {"window_size": window}
        more |= {"causal": band.causal, "softcap": problem.softcap or 0.0}
        if DOCUMENTS not in problem.drawn:
            return lambda: own.flash_attn_func(q, k, v, **more)
        return lambda: own.flash_attn_varlen_func(**packed, **more).view(shape)
    import torch

    torch.ops.load_library(str(library()))
    operator = torch.ops._vllm_fa3_C.fwd.default
    given: dict[str, Any] = packed | SETTINGS
    given |= {"window_size_left": window[0], "window_size_right": window[1]}
    given |= {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": band.causal}
    given |= {"softcap": problem.softcap or 0.0}
    sink = by_name.get("sink")
    given["s_aux"] = None if sink is None else sink.bfloat16()
    ordered = [given.get(each.name) for each in operator._schema.arguments]
    return lambda: operator(*ordered)[0].view(shape)
