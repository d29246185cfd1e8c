# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 where it is installed: from its own repository, or as the wheel of vLLM has it.

vLLM's build takes packed sequences alone; sequences of one length are packed without a copy. It is
loaded as a library, so nothing of vLLM is imported. Checked with vLLM 0.33.

Packed sequences it computes in several ways: each in one piece or its keys split as its heuristic
has it, and with the metadata of its scheduler made before, as vLLM does once for all layers, or in
every call. The metadata of a call are of its lengths, so they are no part of what is timed.
"""

from __future__ import annotations

import contextlib
import functools
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
# Of the operators' arguments, those that are not None and not the problem's.
SETTINGS = {
    "is_rotary_interleaved": False,
    "num_splits": 1,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "max_seqlen_k_new": 0,
}
DESCALES = ("q_descale", "k_descale", "v_descale")  # [batch, KV heads], beside e4m3
SPLITS = {"in one piece": 1, "own splits": 0}  # of keys, by `num_splits`


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


def launches(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    by_name: Mapping[str, torch.Tensor],
) -> dict[str, Launch]:
    """Calls of it, by the way that each takes; "" where there is one.

    Tensors are as our kernel takes them; by_name: further inputs.
    """
    band = problem.band
    assert band is not None, "refused"
    sides = (band.left, band.right or None)
    window = tuple(-1 if keys is None else keys for keys in sides)
    packed = draws.packed(problem, q, k, v, by_name)
    shape = (*q.shape[:-1], v.shape[-1])
    with contextlib.suppress(ImportError):
        own = import_module(OWN)
        more: dict[str, Any] = {} if window == (-1, -1) else {"window_size": window}
        more |= {"causal": band.causal, "softcap": problem.softcap or 0.0}
        if DOCUMENTS not in problem.drawn and not problem.lengths:
            return {"": lambda: own.flash_attn_func(q, k, v, **more)}
        return {"": lambda: own.flash_attn_varlen_func(**packed, **more).view(shape)}
    import torch

    torch.ops.load_library(str(library()))
    operators = torch.ops._vllm_fa3_C
    given: dict[str, Any] = packed | SETTINGS
    given |= {"window_size_left": window[0], "window_size_right": window[1]}
    given |= {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": band.causal}
    given |= {"softcap": problem.softcap or 0.0}
    sink = by_name.get("sink")
    given["s_aux"] = None if sink is None else sink.bfloat16()
    given |= {name: by_name[name] for name in DESCALES if name in by_name}

    def way(splits: int, *, prepared: bool = False) -> Launch:
        more = {"num_splits": splits}

        @functools.cache
        def arguments() -> (
            list[Any]
        ):  # in the first call, so that a failure is of this way
            if prepared:
                prepare = operators.get_scheduler_metadata.default
                about = _ordered(prepare, given | _counts(problem, q, given) | more)
                more["scheduler_metadata"] = prepare(*about)
            return _ordered(operators.fwd.default, given | more)

        return lambda: operators.fwd.default(*arguments())[0].view(shape)

    if not problem.lengths:
        return {"": way(SETTINGS["num_splits"])}
    return {
        f"{words}, metadata" if prepared else words: way(splits, prepared=prepared)
        for words, splits in SPLITS.items()
        for prepared in (False, True)
    }


def _counts(
    problem: Problem, q: torch.Tensor, given: Mapping[str, Any]
) -> dict[str, Any]:
    """What the scheduler's metadata are of, beside the arguments of the call itself."""
    paged = "page_table" in given
    used = given["seqused_k"] if paged else given["cu_seqlens_k"].diff()
    return {
        "batch_size": problem.batch,
        "num_heads": problem.heads,
        "num_heads_k": problem.kv_heads,
        "headdim": problem.d_qk,
        "headdim_v": problem.d_v,
        "qkv_dtype": q.dtype,
        "seqused_k": used,
        "cu_seqlens_k": None,  # as vLLM has it: lengths are those used
        "page_size": given["k"].shape[1] if paged else None,
        "has_softcap": problem.softcap is not None,
    }


def _ordered(operator: Any, given: Mapping[str, Any]) -> list[Any]:
    """Arguments by position, None for those that are not there."""
    return [given.get(each.name) for each in operator._schema.arguments]
