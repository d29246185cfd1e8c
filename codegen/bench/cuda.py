# SPDX-License-Identifier: Apache-2.0
"""The current CUDA device, through PyTorch, as `timing` needs it."""

from __future__ import annotations

import time
from typing import Any

import torch

from .timing import Launch

cuda: Any = torch.cuda  # its annotations are not complete

HOLD_CYCLES = (
    400_000  # about 0.2 ms of one thread; a graph is launched in a tenth of it
)


class CudaDevice:
    """The current device and stream; one measurement at a time."""

    name = "cuda"

    def __init__(self) -> None:
        self._begin, self._end = (cuda.Event(enable_timing=True) for _ in range(2))

    @property
    def multiprocessors(self) -> int:
        """How many SMs the device has."""
        return int(cuda.get_device_properties("cuda").multi_processor_count)

    def capture(self, launch: Launch, launches: int) -> Launch:
        """See timing.Device. What the launches allocate lives as long as the graph."""
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            for _ in range(launches):
                launch()
        replay: Launch = graph.replay
        return replay

    def start(self) -> None:
        """See timing.Device."""
        self._begin.record()

    def stop(self) -> None:
        """See timing.Device."""
        self._end.record()

    def finished(self) -> bool:
        """See timing.Device."""
        return bool(self._end.query())

    def elapsed(self) -> float:
        """See timing.Device."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3

    def hold(self) -> None:
        """See timing.Device."""
        cuda._sleep(HOLD_CYCLES)

    def synchronize(self) -> None:
        """See timing.Device."""
        cuda.synchronize()

    def now(self) -> float:
        """See timing.Device."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """See timing.Device."""
        time.sleep(seconds)
