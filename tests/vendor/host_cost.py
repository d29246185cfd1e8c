# SPDX-License-Identifier: Apache-2.0
"""Prints what a call of a vendored package's functions costs the host, without the kernel's own.

    python -m tests.vendor.host_cost

Processor time of a thread, the least of some repeats; kernels do nothing.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from .standins import imported, packed, tensors

STEMS = (
    "sm90_d128_bf16_causal_gqa4",
    "sm90_d128_bf16_causal_gqa4_page16_varlen_lse",
    "sm90_d128_bf16_causal_gqa4_varlen",
)
ADAPTERS = ("flash_attention", "sglang", "vllm")
CALLS, REPEATS = 5000, 5


def cost(call: Callable[[], Any]) -> float:
    """Microseconds of a call."""
    found = []
    for _ in range(REPEATS):
        begin = time.thread_time()
        for _ in range(CALLS):
            call()
        found.append(time.thread_time() - begin)
    return min(found) / CALLS * 1e6


def calls(package: ModuleType, device: str = "cpu") -> dict[str, Callable[[], Any]]:
    """A call of each function of a package that has its adapters, by what it is."""
    flash, sglang, vllm = (
        importlib.import_module(f"{package.__name__}.{name}_adapter")
        for name in ADAPTERS
    )

    def there(given: dict[str, Any]) -> dict[str, Any]:
        return {name: x.to(device) for name, x in given.items()} | {"causal": True}

    heads = {"heads": 8, "head_dim": 128}
    q, k, v = (x.to(device) for x in tensors(heads=8, kv_heads=2))
    dense = {"q": q, "k": k, "v": v, "causal": True}
    out = torch.empty_like(q)
    rows, pages = there(packed(**heads)), there(packed(page=16, **heads))
    into = torch.empty_like(rows["q"])
    more = {"max_seqlen_q": 60, "max_seqlen_k": 70, "out": into}
    cache = {**pages, "k_cache": pages["k"], "v_cache": pages["v"], "out": into}
    cache |= {
        "cache_seqlens": cache.pop("seqused_k"),
        "page_table": cache.pop("block_table"),
    }
    del cache["k"], cache["v"]
    return {
        "fmha": lambda: package.fmha(**dense),
        "fmha, out": lambda: package.fmha(**dense, out=out),
        "fmha, packed, out": lambda: package.fmha(**rows, out=into),
        "fmha, paged, out": lambda: package.fmha(**pages, out=into),
        "fmha, paged, out, lse": lambda: package.fmha(
            **pages, out=into, return_lse=True
        ),
        "flash_attn_func": lambda: flash.flash_attn_func(**dense),
        "vLLM's, paged, out": lambda: vllm.flash_attn_varlen_func(**pages, **more),
        "SGLang's, paged, out": lambda: sglang.flash_attn_with_kvcache(**cache),
    }


@torch.no_grad()
def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        package, _ = imported(Path(folder), STEMS, ADAPTERS)
        for name in package.KERNELS:
            package.load(name).fmha = lambda *_, **__: None
        for name, call in calls(package).items():
            print(f"{name:24}{cost(call):5.1f} us")


if __name__ == "__main__":
    main()
