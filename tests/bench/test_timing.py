# SPDX-License-Identifier: Apache-2.0
"""Each regime measures what its definition says, on a GPU whose times are known."""

from __future__ import annotations

import random

import pytest
from fmha_gen.bench import timing
from fmha_gen.bench.timing import Ready, Round, Timing

from .model import GRAPH_LAUNCH, HOT, ModelDevice, ModelGauge

SLOW, FAST = 1e-3, 4e-6  # kernels; a call costs the host 5e-6 unless said otherwise


def ready(
    device: ModelDevice, gpu: float = SLOW, host: float = 5e-6, who: str = ""
) -> Ready:
    return timing.prepare(device.kernel(gpu, host=host, who=who), device)


def take(regime: str, device: ModelDevice, one: Ready) -> Round:
    return timing.TAKE[regime](one, device, ModelGauge())


@pytest.mark.parametrize(("gpu", "launches"), [(SLOW, 15), (FAST, 3750), (0.1, 1)])
def test_a_graph_lasts_long_whatever_the_host_costs(gpu: float, launches: int) -> None:
    device = ModelDevice()
    one = ready(device, gpu, host=1e-4)
    assert one.launches == pytest.approx(launches, rel=0.01)
    assert one.seconds == pytest.approx(max(gpu, timing.GRAPH_SECONDS), rel=0.01)
    assert take("graph", device, one).seconds == pytest.approx(gpu)


def test_eager_is_the_larger_of_host_and_kernel_time_and_tells_the_hosts() -> None:
    device = ModelDevice()
    for gpu, host in ((SLOW, 1e-4), (FAST, 1e-4)):
        one = ready(device, gpu, host)
        found = take("eager", device, one)
        assert found.seconds == pytest.approx(max(gpu, host), rel=0.02)
        assert found.host_seconds == pytest.approx(host)


def test_an_eager_round_never_fills_the_stream() -> None:
    assert ready(ModelDevice(), FAST).calls == timing.MOST_CALLS
    assert ready(ModelDevice(), SLOW).calls == 15


def test_a_burst_is_two_launches_after_idling_without_the_launch_itself() -> None:
    device = ModelDevice()
    one = ready(device, FAST)
    device.idles.clear()
    found = take("burst", device, one)
    assert device.log[-1] == ("graph of 2", "")
    assert device.idles[0] >= timing.IDLE_SECONDS
    assert found.seconds == pytest.approx(FAST)
    assert GRAPH_LAUNCH > FAST  # else the launch would hide behind the kernel


def test_sustained_lasts_a_second_and_is_read_all_along() -> None:
    device = ModelDevice()
    one = ready(device)
    begin = device.now()
    found = take("sustained", device, one)
    assert device.now() - begin >= 1
    assert found.seconds == pytest.approx(SLOW, rel=1e-4)
    assert len(found.sm_clock_mhz) == len(found.power_watts) >= 20
    assert found.host_seconds is None


def test_heat_shows_in_sustained_and_not_in_burst() -> None:
    device = ModelDevice(throttles=True)
    one = ready(device)
    burst, sustained = (take(name, device, one) for name in ("burst", "sustained"))
    assert burst.seconds == pytest.approx(SLOW)
    assert SLOW * (1 + HOT) / 2 < sustained.seconds < SLOW * HOT
    assert take("burst", device, one).seconds == pytest.approx(SLOW)


def test_everyone_has_a_turn_in_every_round_of_every_regime() -> None:
    device = ModelDevice()
    contenders = {name: ready(device, who=name) for name in "abc"}
    found = timing.measure(
        contenders, device, ModelGauge(), rounds=6, dice=random.Random(1)
    )
    for name in "abc":
        counts = {regime: len(rounds) for regime, rounds in found[name].items()}
        assert counts == {"graph": 6, "eager": 6, "burst": 6, "sustained": 1}
    bursts = [who for what, who in device.log if what == "graph of 2"]
    orders = [tuple(bursts[i : i + 3]) for i in range(len(bursts) - 18, len(bursts), 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 1


def test_nobody_to_measure_takes_no_time() -> None:
    device = ModelDevice()
    assert not timing.measure({}, device, ModelGauge(), rounds=5, dice=random.Random(1))
    assert device.now() == 0


def test_orders_change_and_are_the_same_in_every_run() -> None:
    orders = list(timing.turns(["a", "b", "c"], 20, random.Random(timing.SEED)))
    assert len(orders) == 20
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(map(tuple, orders))) > 3
    again = timing.turns(["a", "b", "c"], 20, random.Random(timing.SEED))
    assert orders == list(again)


def test_the_host_s_time_leaves_the_gpu_out() -> None:
    device = ModelDevice()
    launch = device.kernel(1e-3, host=3e-6, who="a")
    assert timing.host_seconds(launch, device, 3) == pytest.approx(3e-6)
    assert len(device.log) == 3 * timing.HOST_CALLS
    assert device.now() >= len(device.log) * 1e-3  # it waited between rounds


def test_figures_are_medians_and_unknown_readings_do_not_count() -> None:
    rounds = [
        Round(1e-6, (1700, None), (650.0,), 5e-6),
        Round(2e-6, (1800, 1720), (None,), 7e-6),
        Round(9e-6, (), (), 6e-6),
    ]
    found = Timing(None, {"eager": rounds})
    assert found.seconds("eager") == 2e-6
    assert found.host_seconds() == 6e-6
    assert found.sm_clock_mhz("eager") == 1720
    assert found.power_watts("eager") == 650
    assert Timing(None, {"graph": rounds[2:]}).power_watts("graph") is None
