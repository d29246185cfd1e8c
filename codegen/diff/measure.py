# SPDX-License-Identifier: Apache-2.0
"""Compiles what no record knows, by way of the build's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..arch import ARCHITECTURES
from ..build import manifest
from ..build.engine import Engine, Kernel, Progress, compile_all
from ..errors import CheckFailed
from ..host.executor import HERE, Executor
from .kernels import KernelState, with_compile


def measure(
    states: Sequence[KernelState],
    engine: Engine,
    *,
    executor: Executor = HERE,
    progress: Progress | None = None,
) -> list[KernelState]:
    """The states with what today's compiler makes of them; the cache answers what it can.

    Raises CheckFailed when a text does not say what to compile it for, EnvironmentProblem when this
    machine lacks what a compile needs, if there is any to do.
    """
    if not states:
        return []
    kernels, _ = compile_all(
        [_as_built(state) for state in states],
        [_compile_arch(state) for state in states],
        engine,
        executor,
        progress,
        cached=True,
    )
    return [
        replace(
            with_compile(state, kernel.report),
            failures=(*state.failures, *kernel.failures),
        )
        for state, kernel in zip(states, kernels, strict=True)
    ]


def _compile_arch(state: KernelState) -> str:
    try:
        return ARCHITECTURES[str(state.spec.get("arch"))].compile_arch
    except KeyError:
        raise CheckFailed(
            f"{state.origin}: {state.stem} cannot be compiled: no SPEC that names its arch;"
            " --no-compile compares without"
        ) from None


def _as_built(state: KernelState) -> Kernel:
    return Kernel(
        stem=state.stem,
        text=state.text,
        entry=manifest.Entry("", state.body, ""),
        report=None,
        shared_bytes=state.shared_bytes or 0,
        rung="rendered",
        state="unchanged",
    )
