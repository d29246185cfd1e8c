# SPDX-License-Identifier: Apache-2.0
"""How long a launch takes: what each figure means, and how it is taken.

Four regimes, each in seconds per launch; a figure is the median of its rounds.

``graph``
    Kernel time, back to back: a CUDA graph of as many launches as take `GRAPH_SECONDS`, replayed
    once between two events. The host takes no part.
``eager``
    The same calls from Python, back to back, by the host's clock until the GPU is done: the larger
    of host and kernel time. ``host_seconds`` is what the calls alone took, per call: the host's
    cost, also where the GPU hides it.
``burst``
    Two launches (one graph, between two events) after `IDLE_SECONDS` without work: the clocks are
    still high, whatever the power cap.
``sustained``
    The graph over and over for at least a second between two events: what heat and power leave.
    One round, as it is an average of many launches already.

SM clock and power are read from the driver while the GPU works; in an eager round, right after, as
a query would be counted as host time. The driver averages power over some time itself, so only the
``sustained`` readings are about their own round.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

GRAPH, EAGER, BURST, SUSTAINED = REGIMES = ("graph", "eager", "burst", "sustained")

GRAPH_SECONDS: Final = 0.015  # long against its own launch, short against power control
IDLE_SECONDS: Final = 0.2
SUSTAINED_SECONDS: Final = 1.1  # by the estimate: a second even if that was 9 % slow
READ_EVERY: Final = 0.04  # [s] of a sustained round: 25 readings a second
ESTIMATE_LAUNCHES: Final = 5
BURST_LAUNCHES: Final = 2
MOST_CALLS: Final = 500  # a stream takes about 1000 launches before its host must wait
HOST_CALLS: Final = 100  # of a round that only the host's clock is read for
SEED: Final = 2026
WAY_ROUNDS: Final = 3  # that choose among the ways of a contender

Launch = Callable[[], object]


class Device(Protocol):
    """What timing needs of a GPU and of the host's clock; tests put a model in its place."""

    def capture(self, launch: Launch, launches: int) -> Launch:
        """A graph of that many launches, as its replay."""

    def start(self) -> None:
        """Record the begin of what is launched from now on."""

    def stop(self) -> None:
        """Record the end of what was launched since start."""

    def finished(self) -> bool:
        """Whether the GPU has come to the stop."""

    def elapsed(self) -> float:
        """Wait for the stop; seconds from the start to it by the GPU's clock."""

    def hold(self) -> None:
        """Keep the stream, not the GPU, busy while the host launches a few graphs.

        Else the GPU would come to the start and wait for a graph that is still being launched.
        """

    def synchronize(self) -> None:
        """Wait for everything launched."""

    def now(self) -> float:
        """The host's clock, in seconds."""

    def sleep(self, seconds: float) -> None:
        """Let the host wait."""


class Gauge(Protocol):
    """What the driver says while the GPU works; None when it does not say."""

    def sm_clock_mhz(self) -> int | None:
        """The SM clock."""

    def power_watts(self) -> float | None:
        """The board's power."""


@dataclass(frozen=True)
class Round:
    """One measurement. seconds: per launch. host_seconds: per call, of an eager round.

    sm_clock_mhz, power_watts: every reading.
    """

    seconds: float
    sm_clock_mhz: tuple[int | None, ...]
    power_watts: tuple[float | None, ...]
    host_seconds: float | None = None


@dataclass
class Timing:
    """One contender. error: relative, against float64, of one head; None when nobody looked.

    bare_host_seconds: the host's, per call of what our ``compile()`` returns; None for others.
    way: how it computed the problem, the fastest of several ways; "" where there is one.
    """

    error: float | None
    rounds: dict[str, list[Round]] = field(default_factory=dict)  # by regime
    bare_host_seconds: float | None = None
    way: str = ""

    def seconds(self, regime: str) -> float:
        """Per launch, of the median round."""
        return statistics.median(one.seconds for one in self.rounds[regime])

    def host_seconds(self) -> float | None:
        """Per call, of the median eager round; None without one."""
        return _median(one.host_seconds for one in self.rounds.get(EAGER, ()))

    def sm_clock_mhz(self, regime: str) -> float | None:
        """Median of the readings; None when there is none."""
        return _median(x for one in self.rounds[regime] for x in one.sm_clock_mhz)

    def power_watts(self, regime: str) -> float | None:
        """Median of the readings; None when there is none."""
        return _median(x for one in self.rounds[regime] for x in one.power_watts)


@dataclass(frozen=True)
class Ready:
    """A contender with its graphs. launches: of the long graph, which takes ``seconds`` in all."""

    launch: Launch
    pair: Launch
    graph: Launch
    launches: int
    seconds: float
    calls: int  # of an eager round


def prepare(launch: Launch, device: Device) -> Ready:
    """Warm up, estimate and capture the graphs."""
    launch()
    device.synchronize()
    begin = device.now()
    for _ in range(ESTIMATE_LAUNCHES):
        launch()
    device.synchronize()
    eager = (device.now() - begin) / ESTIMATE_LAUNCHES

    pair = device.capture(launch, BURST_LAUNCHES)
    pair()
    device.hold()
    device.start()
    for _ in range(ESTIMATE_LAUNCHES):
        pair()
    device.stop()
    alone = device.elapsed() / (ESTIMATE_LAUNCHES * BURST_LAUNCHES)

    launches = max(1, round(GRAPH_SECONDS / alone))
    graph = device.capture(launch, launches)
    graph()
    device.hold()
    device.start()
    graph()
    device.stop()
    return Ready(
        launch=launch,
        pair=pair,
        graph=graph,
        launches=launches,
        seconds=device.elapsed(),
        calls=min(MOST_CALLS, max(1, round(GRAPH_SECONDS / eager))),
    )


def graph_round(ready: Ready, device: Device, gauge: Gauge) -> Round:
    """See ``graph``."""
    device.hold()
    device.start()
    ready.graph()
    device.stop()
    device.sleep(GRAPH_SECONDS / 2)  # so that what is read is of the work
    clock, power = gauge.sm_clock_mhz(), gauge.power_watts()
    return Round(device.elapsed() / ready.launches, (clock,), (power,))


def eager_round(ready: Ready, device: Device, gauge: Gauge) -> Round:
    """See ``eager``."""
    device.synchronize()
    begin = device.now()
    for _ in range(ready.calls):
        ready.launch()
    called = device.now()
    device.synchronize()
    ended = device.now()
    clock, power = gauge.sm_clock_mhz(), gauge.power_watts()
    return Round(
        seconds=(ended - begin) / ready.calls,
        sm_clock_mhz=(clock,),
        power_watts=(power,),
        host_seconds=(called - begin) / ready.calls,
    )


def host_seconds(launch: Launch, device: Device, rounds: int) -> float:
    """The host's, per call: the median of rounds that are short enough never to wait."""
    found = []
    for _ in range(rounds):
        device.synchronize()
        begin = device.now()
        for _ in range(HOST_CALLS):
            launch()
        found.append((device.now() - begin) / HOST_CALLS)
    device.synchronize()
    return statistics.median(found)


def burst_round(ready: Ready, device: Device, gauge: Gauge) -> Round:
    """See ``burst``."""
    device.synchronize()
    device.sleep(IDLE_SECONDS)
    device.hold()
    device.start()
    ready.pair()
    device.stop()
    clock, power = gauge.sm_clock_mhz(), gauge.power_watts()
    return Round(device.elapsed() / BURST_LAUNCHES, (clock,), (power,))


def sustained_round(ready: Ready, device: Device, gauge: Gauge) -> Round:
    """See ``sustained``."""
    clocks: list[int | None] = []
    watts: list[float | None] = []
    due = device.now() + READ_EVERY

    def read_when_due() -> None:
        nonlocal due
        if device.now() >= due:
            clocks.append(gauge.sm_clock_mhz())
            watts.append(gauge.power_watts())
            due = device.now() + READ_EVERY

    replays = math.ceil(SUSTAINED_SECONDS / ready.seconds)
    device.start()
    for _ in range(replays):
        ready.graph()
        read_when_due()  # launching waits for the GPU once many graphs are queued
    device.stop()
    while not device.finished():
        device.sleep(READ_EVERY / 4)
        read_when_due()
    seconds = device.elapsed() / (replays * ready.launches)
    return Round(seconds, tuple(clocks), tuple(watts))


TAKE: Final[Mapping[str, Callable[[Ready, Device, Gauge], Round]]] = {
    GRAPH: graph_round,
    EAGER: eager_round,
    BURST: burst_round,
    SUSTAINED: sustained_round,
}


def measure(
    contenders: Mapping[str, Ready],
    device: Device,
    gauge: Gauge,
    *,
    rounds: int,
    dice: random.Random,
    regimes: Sequence[str] = REGIMES,
    turn: Callable[[str], object] = lambda name: None,
) -> dict[str, dict[str, list[Round]]]:
    """All rounds of everyone, by contender and regime; one sustained round, ``rounds`` of the rest.

    Everyone has a turn in each round, in an order of its own, so that all meet the same heat. turn:
    called with the contender before each.
    """
    found: dict[str, dict[str, list[Round]]] = {name: {} for name in contenders}
    for regime in regimes:
        for order in turns(
            list(contenders), 1 if regime == SUSTAINED else rounds, dice
        ):
            for name in order:
                turn(name)
                one = TAKE[regime](contenders[name], device, gauge)
                found[name].setdefault(regime, []).append(one)
    return found


def fastest(
    contenders: Mapping[str, Ready], device: Device, gauge: Gauge, dice: random.Random
) -> str:
    """Of ways to compute one problem, that of the least time as a graph: the median of some rounds.

    These rounds are for the choice alone, so that it favours no one in those that are kept.
    """
    if len(contenders) == 1:
        return next(iter(contenders))
    found = measure(
        *(contenders, device, gauge), rounds=WAY_ROUNDS, dice=dice, regimes=[GRAPH]
    )
    return min(found, key=lambda way: Timing(None, found[way]).seconds(GRAPH))


def turns(
    names: Sequence[str], rounds: int, dice: random.Random
) -> Iterator[list[str]]:
    """Each round everyone once, in another order."""
    for _ in range(rounds):
        yield dice.sample(names, len(names))


def _median(values: Iterator[float | int | None]) -> float | None:
    known = [x for x in values if x is not None]
    return statistics.median(known) if known else None
