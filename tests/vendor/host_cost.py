# SPDX-License-Identifier: Apache-2.0
"""Prints what a call of a vendored package's functions costs the host, all but a kernel's own part.

    python -m tests.vendor.host_cost

Processor time of a thread in microseconds, the least and the median of some repeats. In the place
of a compiled kernel stands a function of TVM-FFI that takes the tensors and does nothing: what is
missing is the kernel's comparison of their types and sizes, and its launch.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import tvm_ffi

from .pairs import GQA, texts
from .standins import imported, packed, source_of_texts, tensors

DENSE = "sm90_d128_bf16_causal_gqa4"
PAGED = "sm90_d128_bf16_causal_gqa4_page16_varlen_lse"
FEW = "sm90_d128_bf16_causal_gqa4_pack_page16_varlen_t64x128"  # gives no LSE
E4M3 = "sm90_d128_e4m3_linear_causal"
STEMS = (DENSE, PAGED, "sm90_d128_bf16_causal_gqa4_varlen", FEW, E4M3)
ADAPTERS = ("flash_attention", "sglang", "vllm")
CALLS, REPEATS = 1000, 25


def costs(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Microseconds of each call, by repeat; they take turns, so that all see a busy machine."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            begin = time.thread_time()
            for _ in range(CALLS):
                call()
            found[name].append((time.thread_time() - begin) / CALLS * 1e6)
    return found


def calls(package: ModuleType, device: str = "cpu") -> dict[str, Callable[[], Any]]:
    """A call of each function of a package that has its adapters, by what it is.

    few: says that sequences have few queries, and so gets a kernel that gives no LSE; those with
    pages but for them have one, asked for or not.
    """
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
    few = {"max_seqlen_q": 60}
    more = few | {"max_seqlen_k": 70, "out": into}
    cache = {**pages, "k_cache": pages["k"], "v_cache": pages["v"], "out": into}
    cache |= {
        "cache_seqlens": cache.pop("seqused_k"),
        "page_table": cache.pop("block_table"),
    }
    del cache["k"], cache["v"]
    queries = {"q": rows["q"][:4, None], "cu_seqlens_q": None, "out": into[:4, None]}
    table = {"cu_seqlens_k": None, "max_seqlen_k": 70}

    def bare(name: str, *given: Any) -> Callable[[], Any]:
        kernel = package.load(name)
        function, numbers = kernel.compile(), (0.1, kernel.sm_count(q.get_device()))
        return lambda: function(*given, *numbers)

    names = ("q", "k", "v", "cu_seqlens_q", "seqused_k", "block_table")
    lse = torch.empty(8, len(into), device=device)
    return {
        "fmha": lambda: package.fmha(**dense),
        "fmha, out": lambda: package.fmha(**dense, out=out),
        "fmha, packed, out": lambda: package.fmha(**rows, out=into),
        "fmha, paged, out": lambda: package.fmha(**pages, out=into),
        "fmha, paged, out, lse": lambda: package.fmha(
            **pages, out=into, return_lse=True
        ),
        "fmha, paged, out, few": lambda: package.fmha(**pages, **few, out=into),
        "flash_attn_func": lambda: flash.flash_attn_func(**dense),
        "varlen_func, out": lambda: flash.flash_attn_varlen_func(**rows, **more),
        "varlen_func, paged, out": lambda: flash.flash_attn_varlen_func(
            **pages, **table, **few, out=into
        ),
        "with_kvcache, out": lambda: flash.flash_attn_with_kvcache(**cache | queries),
        "vLLM's, paged, out, few": lambda: vllm.flash_attn_varlen_func(**pages, **more),
        "SGLang's, out": lambda: sglang.flash_attn_varlen_func(**rows, **more),
        "SGLang's, paged, out": lambda: sglang.flash_attn_with_kvcache(**cache),
        "SGLang's, paged, out, few": lambda: sglang.flash_attn_with_kvcache(
            **cache, **few
        ),
        "bare, out": bare(DENSE, q, k, v, out),
        "bare, paged, out, lse": bare(PAGED, *(pages[name] for name in names), into, lse),
    }  # fmt: skip


def calls_of_e4m3(package: ModuleType) -> dict[str, Callable[[], Any]]:
    """Calls of PyTorch's 8-bit floats, their bytes, and without factors."""
    q, k, v = tensors(heads=8, kv_heads=8, dtype=torch.float8_e4m3fn)
    one = torch.ones(()).expand(2, 8)
    asked = {"causal": True, "out": torch.empty(q.shape, dtype=torch.bfloat16)}
    told = asked | {"descales": (one, one, one)}
    codes = [x.view(torch.uint8) for x in (q, k, v)]
    return {
        "fmha, e4m3, out": lambda: package.fmha(q, k, v, **told),
        "fmha, its bytes, out": lambda: package.fmha(*codes, **told),
        "fmha, e4m3, out, 1": lambda: package.fmha(q, k, v, **asked),
    }


def calls_of_gradients(package: ModuleType) -> dict[str, Callable[[], Any]]:
    """A forward pass whose gradients are recorded, and both passes; without, by the same kernel."""
    q, k, v = tensors(heads=4, qk=64, v=64)
    learned = [x.clone().requires_grad_() for x in (q, k, v)]
    dout = torch.ones_like(q)

    def forward() -> Any:
        with torch.enable_grad():
            return package.fmha(*learned, causal=True)

    return {
        "fmha, lse": lambda: package.fmha_lse(q, k, v, causal=True),
        "fmha, recorded": forward,
        "fmha, both passes": lambda: torch.autograd.grad(forward(), learned, dout),
    }


def checks(package: ModuleType) -> int:
    """How many calls were checked: none of those that are launched at once."""
    seen = package.kernel_for.cache_info()
    return int(seen.hits + seen.misses)


@torch.no_grad()
def main() -> None:
    # CPU tensors are on device -1; what `torch.cuda.current_device` does in Python stays.
    torch.cuda._initialized = True
    torch._C._cuda_getDevice = lambda: -1  # type: ignore[attr-defined]
    nothing = tvm_ffi.get_global_func("testing.nop")
    with tempfile.TemporaryDirectory() as folder:
        package, _ = imported(Path(folder), STEMS, ADAPTERS, stand_in=False)
        pairs = f"{GQA}_lse", f"{GQA}_bwd"
        given = {name: text for name, text in texts().items() if name in pairs}
        source = source_of_texts(Path(folder) / "generated", given)
        trained, _ = imported(Path(folder), pairs, source=source, stand_in=False)
        for each in (package, trained):
            for kernel in map(each.load, each.KERNELS | each.BACKWARD):
                kernel.compile, kernel.sm_count = lambda: nothing, lambda _device: 132
        measured = calls(package) | calls_of_e4m3(package) | calls_of_gradients(trained)
        for call in measured.values():
            call()
        before = checks(package)
        print(f"{'':26}least median")
        for name, found in costs(measured).items():
            print(f"{name:26}{min(found):5.1f}{statistics.median(found):7.1f}")
        assert checks(package) == before, "calls were checked that others were like"


if __name__ == "__main__":
    main()
