# SPDX-License-Identifier: Apache-2.0
"""Kernels whose function was damaged, judged by what `fmha-gen emulate` finds of them.

``python -m tests.mutation.function_campaign LOG [--kernel NAME] [--every N] [--first N]``: as
`campaign`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from fmha_gen.arch import ARCHITECTURES
from fmha_gen.build import captures, device_code
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.evidence import emulate

from . import emulation, function_mutants
from .campaign import GENERATED, OF_8_BITS, SAME, command
from .ptx_mutants import Mutant

KIND = "function"
# Every structure, mask, kind of length and way to store of the forward pass. None of the backward
# pass: all cases of such a kernel take `emulate` a minute and more, a schedule of them a fifth of
# that, for each mutant. `campaign` damages these kernels' PTX and source, under few cases.
KERNELS = (
    "sm90_d128_bf16_causal_lse",  # TMA stores O, two loops of blocks
    "sm90_d128_bf16_full_gqa8_pack_lse",  # a tile has rows of 8 heads
    "sm90_d128_bf16_causal_gqa8_pack_t64x128",
    "sm90_d128_fp16_full_c2x1_vmc_kv1000",  # cluster along the queries, multicast of V
    "sm90_d128_bf16_causal_gqa8_c1x2_kvmc",  # cluster along the heads of a KV head
    "sm90_d128_bf16_full_w255x256",  # a window with two edges, each masked by its own loop
    "sm90_d64_bf16_causal_s512",  # fixed lengths
    "sm90_d192x128_bf16_full_q1000",  # O from registers, V smaller than K
    "sm90_d256_bf16_causal_lse",  # O from registers, a warpgroup has blocks of its own
    *OF_8_BITS,
    "sm100_d128_bf16_causal_gqa4_lse",  # roles of their own, tensor memory
    "sm100_d128_fp16_full_c2x1_cta2",  # a pair of CTAs per MMA
    "sm100_d128_bf16_full_q1000_single_lse",  # one work tile per CTA
    "sm100_d192x128_bf16_causal_lse",  # V smaller than K
    "sm100_d256_bf16_causal_gqa4_c2x1_cta2_lse",  # a pair, S of two blocks in turn
    "sm100_d96_fp16_full_kv1000",  # a fixed KV length with a tail
)
TIMEOUT = emulate.DEFAULT_TIMEOUT  # [s] for all cases under one schedule

# What runs on the host: the PTX does not tell whether a damage to these did anything.
HOST = frozenset(
    (
        *("launch", "tma", "reorder", "compile", "arguments", "fmha", "check"),
        *("run", "view_of", "check_tensors", "sm_count"),
    )
)


class FunctionSubject:
    """A kernel whose mutants `emulate` is asked about."""

    def __init__(self, stem: str) -> None:
        """Reads it; it compiles when a mutant of its device code is compared with it."""
        self.path = GENERATED / f"{stem}.py"
        self.source = self.path.read_text(encoding="utf-8")
        self.arch: str = read_constants(self.source)["SPEC"]["arch"]

    def mutants(self, kind: str) -> Iterator[Mutant]:
        """All mutants."""
        assert kind == KIND
        return function_mutants.mutants(self.source)

    def notice(self, kind: str, mutant: Mutant) -> str | None:
        """What shows that a mutant is wrong; None when nothing does. Raises CaptureError."""
        assert kind == KIND
        on_host = function_of(self.source, mutant.line) in ("", *HOST)
        found = emulation.judge(
            mutant.text,
            self.path.stem,
            timeout=TIMEOUT,
            whole=None if on_host else self._ptx_sha256,
        )
        if found.refused:  # when it does not compile, there is nothing to notice
            arch = ARCHITECTURES[self.arch].compile_arch
            emulation.require_compiles(mutant.text, self.path.stem, arch)
        return SAME if found.same else found.noticed

    @functools.cached_property
    def _ptx_sha256(self) -> str:
        ptx, _ = captures.capture(self.path, [], arch=self.arch)
        return device_code.digest(ptx)


def function_of(source: str, line: int) -> str:
    """The function or class of a module that has a line; nothing outside of all."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert node.end_lineno is not None
            if node.lineno <= line <= node.end_lineno:
                return node.name
    return ""


if __name__ == "__main__":
    command("tests.mutation.function_campaign", FunctionSubject, KERNELS, (KIND,))
