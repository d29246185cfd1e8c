# SPDX-License-Identifier: Apache-2.0
"""The process of a heat, on kernels and a card that are models."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip(
    "torch", reason="needs PyTorch (CPU): pip install 'fmha-gen[torch]'"
)

from bench.model import ModelDevice, ModelGauge  # noqa: E402
from bench.test_problems import problem  # noqa: E402
from fmha_gen.bench import contenders  # noqa: E402
from fmha_gen.host.processes import Ending  # noqa: E402
from fmha_gen.tune import worker  # noqa: E402
from fmha_gen.tune.gpu import MACHINE, judge, worker_command  # noqa: E402
from fmha_gen.tune.halving import score  # noqa: E402
from unit.fake_kernel import FakeKernel, spec  # noqa: E402

SMALL, LARGE = (problem(1, 2, 2, rows, rows, 64, lse=True) for rows in (16, 48))
SPEED = {"old": 1.0, "new": 0.9, "bad": 0.5}

# A kernel's file: it takes as long on the model as its name says.
KERNEL = """
from {here} import Timed

kernel = Timed({name!r}, {fault!r})
SPEC, compile, fmha = kernel.SPEC, kernel.compile, kernel.fmha
"""

device = ModelDevice()


class Timed(FakeKernel):
    def __init__(self, name: str, fault: str) -> None:
        super().__init__(spec(), fault)
        self.name = name

    def fmha(self, q: Any, *inputs: Any, **options: Any) -> Any:
        device.spend(5e-6, 1e-3 * SPEED[self.name] * q.shape[1] / 16, self.name)
        out = super().fmha(q, *inputs, **options)
        if self.fault == f"wrong at {q.shape[1]}":
            return out[0] * 1.1 if isinstance(out, tuple) else out * 1.1
        if self.fault == "breaks the GPU":
            raise RuntimeError("an illegal memory access\nwas encountered")
        return out


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    global device
    device = ModelDevice()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for name in SPEED:
        sys.modules.pop(f"kernel_{name}", None)


def heat(folder: Path, *names: str, fault: str = "") -> list[dict[str, Any]]:
    """The events of one heat; the last contender has the fault."""
    for name in names:
        blamed = fault if name == names[-1] else ""
        text = KERNEL.format(here=__name__, name=name, fault=blamed)
        (folder / f"kernel_{name}.py").write_text(text)
    request = {
        "contenders": {name: f"kernel_{name}.py" for name in names},
        "problems": [asdict(SMALL), asdict(LARGE)],
        "rounds": 3,
        "limit": 60,
    }
    found: list[dict[str, Any]] = []
    worker.play(request, folder, device, ModelGauge(), found.append)  # type: ignore[arg-type]
    return json.loads(json.dumps(found))


def judged(names: list[str], found: list[dict[str, Any]]) -> Any:
    return judge(names, found, Ending(0, "", 60))


def test_contenders_are_timed_in_the_same_rounds_by_their_graphs(
    tmp_path: Path,
) -> None:
    found = heat(tmp_path, "old", "new")
    heard = judged(["old", "new"], found)
    assert list(heard.rounds) == [str(SMALL), str(LARGE)]
    assert all(len(rounds) == 3 for rounds in heard.rounds.values())
    assert score(heard, "new").time == pytest.approx(0.9)
    turns = [(e["who"], e["doing"]) for e in found if e["event"] == "turn"]
    assert turns[:3] == [
        ("old", "compile"),
        ("new", "compile"),
        (MACHINE, f"inputs of {SMALL}"),
    ]
    timed = [who for who, doing in turns if doing == str(SMALL)]
    assert timed[:2] == ["old", "new"]  # compared with float64, and prepared
    rounds = [set(timed[i : i + 2]) for i in (2, 4, 6)]
    assert rounds == [{"old", "new"}] * 3


def test_a_heat_has_the_same_orders_each_time(tmp_path: Path) -> None:
    first, again, other = (
        [event.get("who") for event in heat(tmp_path, *names)]
        for names in (("old", "new"), ("old", "new"), ("old", "bad"))
    )
    assert first == again
    assert first != [{"bad": "new"}.get(str(who), who) for who in other]


@pytest.mark.parametrize(
    ("fault", "doing", "why"),
    [
        ("does not compile", "compile", "RuntimeError: ptxas says no"),
        ("breaks the GPU", str(SMALL), "RuntimeError: an illegal memory access"),
        (f"wrong at {LARGE.q}", str(LARGE), "RuntimeError: computes something else"),
    ],
)
def test_a_contender_that_fails_ends_the_heat(
    tmp_path: Path, fault: str, doing: str, why: str
) -> None:
    found = heat(tmp_path, "old", "bad", fault=fault)
    assert found[-1]["event"] == "failed"
    (who, said), *others = judged(["old", "bad"], found).rejected.items()
    assert (who, others) == ("bad", [])
    assert said.startswith(f"{doing}: {why}") and "\n" not in said
    # The GPU may be broken: the next one to use it would be blamed for that.
    turns = [(e["who"], e["doing"]) for e in found if e["event"] == "turn"]
    assert turns.count(("bad", doing)) == 1
    assert turns[-1] == ("bad", doing)


def test_inputs_that_do_not_fit_are_the_machines_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = contenders.make_inputs

    def only_small(problem: Any, name: str) -> Any:
        if problem == LARGE:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB\nof 8")
        return make(problem, name)

    monkeypatch.setattr(contenders, "make_inputs", only_small)
    found = heat(tmp_path, "old", "new")
    said = f"inputs of {LARGE}: OutOfMemoryError: tried to allocate 9 GiB"
    with pytest.raises(Exception, match=said.replace("[", r"\[")):
        judged(["old", "new"], found)


def test_every_turn_has_its_limit_and_none_is_left_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms: list[int] = []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    found = heat(tmp_path, "old", "new")
    limits = [event["limit"] for event in found if event["event"] == "turn"]
    assert alarms == [*limits, 0]
    assert limits[:3] == [worker.COMPILE_SECONDS] * 2 + [60]


def test_the_process_reads_its_request_and_writes_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "CudaDevice", ModelDevice)
    monkeypatch.setattr(worker, "find_gpu", ModelGauge)
    request, events = tmp_path / "request.json", tmp_path / "events"
    asked = {"contenders": {}, "problems": [], "rounds": 1, "limit": 1}
    request.write_text(json.dumps(asked))
    command = worker_command(request, events, [])
    assert command[1:3] == ["-m", worker.__spec__.name]
    worker.main(*command[3:])
    assert events.read_text() == '{"event": "end"}\n'
