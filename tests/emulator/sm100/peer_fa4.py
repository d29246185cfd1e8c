# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4's sm100 kernel as one of our modules, for a compile without a GPU.

`static_cost` sets the constants. SITE is a folder with the unpacked wheels of flash-attn-4 and
quack-kernels, whose packages import torch and triton, which the kernel does not need.
"""

import importlib
import sys
import types
from unittest import mock

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import runtime

SITE = "?"
SPEC = {}
B200_SMS = 148
# Lengths, heads and batches are dynamic, as in its interface; so are its defaults below.


def import_kernel():
    """The module of the kernel and that of its schedulers, without their packages' __init__."""
    for name in ("torch", "torch._subclasses.fake_tensor", "triton", "tvm_ffi"):
        sys.modules[name] = mock.MagicMock(name=name)
    for name in ("flash_attn", "flash_attn.cute", "quack"):
        package = types.ModuleType(name)
        package.__path__ = [f"{SITE}/{name.replace('.', '/')}"]
        sys.modules[name] = package
    importlib.import_module("quack.dsl")  # adds methods to the DSL's tensors
    kernel = importlib.import_module("flash_attn.cute.flash_fwd_sm100")

    gpu = types.SimpleNamespace(get_device_multiprocessor_count=lambda: B200_SMS)
    cutlass.utils.HardwareInfo = lambda: gpu  # it would ask the driver
    return kernel


def compile():
    """Its forward kernel for SPEC, as its interface would choose it for long sequences."""
    causal, q_per_kv = SPEC["mask"] == "causal", SPEC["q_per_kv"]
    forward = import_kernel().FlashAttentionForwardSm100(
        SPEC["head_dim"]["qk"],
        SPEC["head_dim"]["v"],
        qhead_per_kvhead=q_per_kv,
        pack_gqa=q_per_kv > 1,
        is_causal=causal,
        is_static_persistent=not causal,
        use_2cta_instrs=SPEC["cta_group"] == 2,
    )

    @cute.jit
    def launch(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        softmax_scale: Float32,
        stream: cuda.CUstream,
    ):
        forward(q, k, v, out, lse, softmax_scale, stream=stream)

    @cute.jit
    def launch_without_lse(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        softmax_scale: Float32,
        stream: cuda.CUstream,
    ):
        launch(q, k, v, out, None, softmax_scale, stream)

    entry = launch if SPEC["lse"] else launch_without_lse
    numbers = (Float32(1.0), cuda.CUstream(0))
    return cute.compile(entry, *arguments().values(), *numbers)


def arguments():
    """Its tensors, by name."""
    size, step, fake = cute.sym_int32, cute.sym_int64, runtime.make_fake_tensor
    batch, seqlen_q, seqlen_kv, heads, heads_kv = (size() for _ in range(5))
    dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[SPEC["dtype"]]

    def bshd(*shape):
        return fake(dtype, shape, (step(8), step(8), step(8), 1), assumed_align=16)

    dims = SPEC["head_dim"]
    tensors = {
        "q": bshd(batch, seqlen_q, heads, dims["qk"]),
        "k": bshd(batch, seqlen_kv, heads_kv, dims["qk"]),
        "v": bshd(batch, seqlen_kv, heads_kv, dims["v"]),
        "out": bshd(batch, seqlen_q, heads, dims["v"]),
    }
    if SPEC["lse"]:
        tensors["lse"] = fake(Float32, (batch, heads, seqlen_q), (step(), step(), 1))
    return tensors
