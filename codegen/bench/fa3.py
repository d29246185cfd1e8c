# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 where it is installed: from its own repository, or as the wheel of vLLM has it.

vLLM's build takes packed sequences alone; sequences of one length are packed without a copy. It is
loaded as a library, so nothing of vLLM is imported. Checked with vLLM 0.33.
"""

from __future__ import annotations

import contextlib
import importlib.util
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .problems import Band
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
    band: Band,
    softcap: float | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None = None,
) -> Launch:
    """A call of it. Tensors are [batch, rows, heads, dim]; sink, which vLLM's takes: [heads]."""
    sides = (band.left, band.right or None)
    window = tuple(-1 if keys is None else keys for keys in sides)
    with contextlib.suppress(ImportError):
        function = import_module(OWN).flash_attn_func
        own = {} if window == (-1, -1) else {"window_size": window}
        return lambda: function(
            *(q, k, v), causal=band.causal, softcap=softcap or 0.0, **own
        )
    import torch

    torch.ops.load_library(str(library()))
    operator = torch.ops._vllm_fa3_C.fwd.default
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    given: dict[str, Any] = dict(zip("qkv", packed, strict=True)) | SETTINGS
    given |= {"window_size_left": window[0], "window_size_right": window[1]}
    for name, x in (("q", q), ("k", k)):
        batch, rows = x.shape[:2]
        given[f"cu_seqlens_{name}"] = torch.arange(
            0, batch * rows + 1, rows, device=q.device, dtype=torch.int32
        )
        given[f"max_seqlen_{name}"] = rows
    given |= {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": band.causal}
    given |= {"softcap": softcap or 0.0}
    given["s_aux"] = None if sink is None else sink.bfloat16()
    ordered = [given.get(each.name) for each in operator._schema.arguments]
    shape = (*q.shape[:3], v.shape[-1])
    return lambda: operator(*ordered)[0].view(shape)
