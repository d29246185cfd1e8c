# SPDX-License-Identifier: Apache-2.0
"""A GPU and a host of which the tests know how long everything takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

GRAPH_LAUNCH = 20e-6  # [s] of the host for any graph
HOLD = 200e-6
HOT_AFTER = 0.5  # [s] of work without a pause ...
COOL_AFTER = 0.1  # [s] ... this long
HOT = 1.25  # slower


@dataclass
class ModelDevice:
    """Stands in for `CudaDevice`; time passes only where the model says so.

    idles: how long the GPU had been idle at each start. captured: launches of each graph.
    """

    name: str = "cpu"
    multiprocessors: int = 4
    throttles: bool = False
    host: float = 0.0
    gpu: float = 0.0  # when everything launched so far is done
    work_since: float = 0.0
    idles: list[float] = field(default_factory=list)
    captured: list[int] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)
    _recorded: list[tuple[str, float]] | None = None
    _begin: float = 0.0
    _end: float = 0.0

    def spend(self, host: float, gpu: float, who: str = "") -> None:
        """A launch that costs the host and the GPU so many seconds."""
        if self._recorded is not None:
            self._recorded.append((who, gpu))
            return
        self.host += host
        self.log.append(("launch", who))
        self._work(gpu)

    def _cool(self) -> None:
        if self.host - self.gpu > COOL_AFTER:
            self.work_since = self.host

    def _work(self, gpu: float) -> None:
        self._cool()
        begin = max(self.host, self.gpu)
        hot = self.throttles and begin - self.work_since > HOT_AFTER
        self.gpu = begin + gpu * (HOT if hot else 1)

    def kernel(self, gpu: float, *, host: float = 5e-6, who: str = "") -> Any:
        """A launch."""
        return lambda: self.spend(host, gpu, who)

    def capture(
        self, launch: Callable[[], object], launches: int
    ) -> Callable[[], object]:
        self._recorded = recorded = []
        for _ in range(launches):
            launch()
        self._recorded = None
        self.captured.append(launches)

        def replay() -> None:
            self.host += GRAPH_LAUNCH
            self.log.append((f"graph of {launches}", recorded[0][0]))
            for _, gpu in recorded:
                self._work(gpu)

        return replay

    def start(self) -> None:
        self.idles.append(max(0.0, self.host - self.gpu))
        self._begin = max(self.host, self.gpu)

    def stop(self) -> None:
        self._end = max(self.host, self.gpu)

    def finished(self) -> bool:
        return self.host >= self._end

    def elapsed(self) -> float:
        self.host = max(self.host, self._end)
        return self._end - self._begin

    def hold(self) -> None:
        self.idles.append(max(0.0, self.host - self.gpu))
        self._cool()
        self.gpu = max(self.host, self.gpu) + HOLD

    def synchronize(self) -> None:
        self.host = max(self.host, self.gpu)

    def now(self) -> float:
        return self.host

    def sleep(self, seconds: float) -> None:
        self.host += seconds


class ModelGauge:
    """Stands in for `Gpu`."""

    name = "NVIDIA H200"
    driver = "580.1"

    def __init__(self) -> None:
        self.readings = 0

    def sm_clock_mhz(self) -> int | None:
        self.readings += 1
        return 1700 + self.readings % 3

    def power_watts(self) -> float | None:
        return None


def launch_of(name: str, problem: Any, inputs: Any) -> Any:
    """A call of a peer, in the first of its ways."""
    from fmha_gen.bench import contenders

    return next(iter(contenders.PEERS[name].launches(problem, inputs).values()))


def error_of(launch: Callable[[], Any], problem: Any, inputs: Any) -> float:
    """See `contenders.Right`."""
    from fmha_gen.bench import contenders

    return contenders.right_of(problem, inputs).error_of(launch)
