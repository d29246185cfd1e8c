# SPDX-License-Identifier: Apache-2.0
"""The process of a heat, on kernels and a card that are models: checks first, rounds after."""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip(
    "torch", reason="needs PyTorch (CPU): pip install 'fmha-gen[torch]'"
)

from bench.model import ModelDevice, ModelGauge  # noqa: E402
from fmha_gen import compare, reference, trial  # noqa: E402
from fmha_gen.bench import contenders, timing  # noqa: E402
from fmha_gen.bench.cuda import CudaDevice  # noqa: E402
from fmha_gen.bench.problems import Problem  # noqa: E402
from fmha_gen.cases import Case, tiles_of  # noqa: E402
from fmha_gen.inputs import values  # noqa: E402
from fmha_gen.tune import journal, worker  # noqa: E402
from fmha_gen.tune.arena import MACHINE, WHOLE_SECONDS  # noqa: E402
from fmha_gen.tune.rounds import score  # noqa: E402
from unit.fake_kernel import CpuDevice, FakeKernel, spec  # noqa: E402

SMALL, LARGE = (
    Problem("bf16", 1, 2, 2, rows, rows, 64, 64, False, True) for rows in (16, 48)
)
SPEED = {"old": 1.0, "new": 0.9, "bad": 0.5}

# A kernel's file: `new` computes as wrongly as its fault says, and takes so long on the model.
KERNEL = """
from {here} import Timed

kernel = Timed({name!r}, {fault!r})
SPEC, compile, fmha = kernel.SPEC, kernel.compile, kernel.fmha
TILE_Q, TILE_KV, Q_STAGES = kernel.TILE_Q, kernel.TILE_KV, kernel.Q_STAGES
RESCALE_SLACK, sm_count = kernel.RESCALE_SLACK, kernel.sm_count
"""

device = ModelDevice()


class Timed(FakeKernel):
    def __init__(self, name: str, fault: str) -> None:
        super().__init__(spec(), fault)
        self.name = name

    def fmha(self, q: Any, *inputs: Any, **options: Any) -> Any:
        seconds = 1e-3 * SPEED[self.name] * q.shape[1] / 16
        device.spend(5e-6, seconds, self.name)
        if self.fault == f"wrong at {q.shape[1]}":
            return super().fmha(q, *inputs, **options) * 1.1
        if self.fault == "breaks the GPU":
            raise RuntimeError("an illegal memory access\nwas encountered")
        return super().fmha(q, *inputs, **options)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    global device
    device = ModelDevice()
    small = Case("small", batch=1, kv_heads=2, q=9, kv=17)
    monkeypatch.setattr(worker, "check_cases", lambda spec: (small,))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for name in ("kernel_old", "kernel_new", "kernel_bad"):
        sys.modules.pop(name, None)


def heat(
    folder: Path, *names: str, check: tuple[str, ...] = (), fault: str = ""
) -> list[dict[str, Any]]:
    """The events of one heat; the last contender has the fault."""
    files = {}
    for name in names:
        path = folder / f"kernel_{name}.py"
        blamed = fault if name == names[-1] else ""
        path.write_text(KERNEL.format(here=__name__, name=name, fault=blamed))
        files[name] = str(path)
    request = worker.Request(
        arch="sm90",
        contenders=files,
        check=check,
        problems=[asdict(SMALL), asdict(LARGE)],
        rounds=3,
        limit=60,
        lock=str(folder / "lock"),
    )
    gpu = worker.Gpu(CpuDevice(), device, ModelGauge(), "cpu")
    found: list[dict[str, Any]] = []
    worker.Session(request, gpu, found.append).run()
    return json.loads(json.dumps(found))


def kinds(found: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in found if event["event"] != "start"]


def test_a_candidate_is_checked_and_then_timed_beside_the_incumbent(
    tmp_path: Path,
) -> None:
    found = heat(tmp_path, "old", "new", check=("new",))
    assert kinds(found) == ["rounds", "rounds", "end"]
    played = {e["problem"]: e["rounds"] for e in found if e["event"] == "rounds"}
    assert set(played) == {str(SMALL), str(LARGE)}
    assert [len(rounds) for rounds in played.values()] == [3, 3]
    assert score(played, "new", "old").time == pytest.approx(0.9)
    phases = [(e["who"], e["phase"]) for e in found if e["event"] == "start"]
    compiles, waits, checks = phases[:2], phases[2], phases[3]
    assert compiles == [("old", "compile"), ("new", "compile")]
    assert waits == (MACHINE, "wait for the GPU")
    assert checks == ("new", "check")
    assert {phase for who, phase in phases[4:] if who} == {str(SMALL), str(LARGE)}


@pytest.mark.parametrize("whose", ["a link", "another user's"])
def test_a_planted_lock_is_neither_followed_nor_believed(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in a folder that everybody may write to."""
    precious = tmp_path / "precious"
    precious.write_text("whole")
    if whose == "a link":
        (tmp_path / "lock").symlink_to(precious)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    *_, last = heat(tmp_path, "old", "new", check=("new",))
    assert last["event"] == "environment"
    assert {"a link": "symbolic link"}.get(whose, whose) in last["message"]
    assert precious.read_text() == "whole"


def test_every_problem_and_heat_has_dice_of_its_own_and_always_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thrown: list[float] = []

    def throw(names: Any, take: Any, rounds: int, dice: Any) -> Any:
        thrown.append(dice.random())
        return iter(())

    monkeypatch.setattr(worker, "play", throw)
    for names in (("old", "new"), ("old", "bad"), ("old", "new")):
        heat(tmp_path, *names)
    first, second, again = thrown[:2], thrown[2:4], thrown[4:]
    assert len({*first, *second}) == 4
    assert again == first


def test_a_heat_together_is_not_checked_again_case_by_case(tmp_path: Path) -> None:
    found = heat(tmp_path, "old", "new", "bad")
    assert kinds(found) == ["rounds", "rounds", "end"]
    assert all(e["phase"] != "check" for e in found if e["event"] == "start")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("last row unwritten", "wrong: small: "),
        ("weights in 4 bits", "wrong: small: row "),
        ("does not compile", "RuntimeError: ptxas says no"),
        ("breaks the GPU", "RuntimeError: an illegal memory access"),
    ],
)
def test_a_bad_candidate_is_rejected_and_never_timed(
    tmp_path: Path, fault: str, why: str
) -> None:
    found = heat(tmp_path, "old", "bad", check=("bad",), fault=fault)
    assert kinds(found) == ["rejected"]
    assert found[-1]["who"] == "bad"
    assert found[-1]["wrong"] == why.startswith("wrong")
    assert found[-1]["why"].startswith(why)
    assert "\n" not in found[-1]["why"]
    assert not any(what.startswith("graph") for what, _ in device.log)


def test_what_is_wrong_only_where_it_is_timed_is_found_there(tmp_path: Path) -> None:
    fault = f"wrong at {LARGE.q}"
    found = heat(tmp_path, "old", "bad", check=("bad",), fault=fault)
    assert kinds(found) == ["rounds", "rejected"]
    assert found[-1]["why"].startswith(f"wrong: {LARGE}: relative error 0.")


def test_inputs_that_do_not_fit_are_nobodys_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = contenders.make_inputs

    def only_small(problem: Problem, name: str) -> Any:
        if problem == LARGE:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB\nof 8")
        return make(problem, name)

    monkeypatch.setattr(contenders, "make_inputs", only_small)
    found = heat(tmp_path, "old", "new", check=("new",))
    assert kinds(found) == ["rounds", "environment"]
    assert found[-2]["phase"] == f"inputs of {LARGE}"
    assert found[-1]["message"] == (
        f"inputs of {LARGE}: OutOfMemoryError: tried to allocate 9 GiB"
    )


def test_every_phase_has_its_limit_and_none_is_left_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms: list[int] = []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    found = heat(tmp_path, "old", "new", check=("new",))
    started = [event["limit"] for event in found if event["event"] == "start"]
    assert [limit for limit in alarms if limit] == started
    assert alarms[1::2] == [0] * len(started)
    assert started[:4] == [worker.COMPILE_SECONDS] * 2 + [WHOLE_SECONDS, 60]


def test_the_checks_are_a_ragged_case_and_one_of_many_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    for known in (spec(), spec(mask="causal", q_per_kv=8)):
        ragged, many = worker.check_cases(FakeKernel(known))
        assert ragged.name.startswith("plain")
        assert ragged.kv % 16 and ragged.q % 64
        assert many.name.startswith("many")
    long = FakeKernel(spec(seqlen={"q": 4096, "kv": 4096}))
    fixed = worker.check_cases(long)
    assert {(case.q, case.kv) for case in fixed} == {(4096, 4096)}


@pytest.mark.parametrize("q", ["dynamic", 1, 1000, 4096])
@pytest.mark.parametrize("kv", ["dynamic", 1, 1000, 4096])
def test_the_checks_do_not_hang_on_the_names_of_cases(
    q: Any, kv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    known = FakeKernel(spec(seqlen={"q": q, "kv": kv}))
    cases = worker.cases_for(known.SPEC, tiles_of(trial.vars_of(known)))
    named = [cases.index(case) for case in worker.check_cases(known)]
    assert [cases[i].name.split("_")[0] for i in named] == ["plain", "many"]
    others = tuple(replace(case, name=f"case {i}") for i, case in enumerate(cases))
    monkeypatch.setattr(worker, "cases_for", lambda spec, tiles: others)
    assert [others.index(case) for case in worker.check_cases(known)] == named


def test_all_that_decides_a_heat_is_in_its_key() -> None:
    deciding: list[Any] = [
        *(worker.check, worker.check_problem, worker.play, trial.check_case),
        *(contenders.error_of, contenders.make_inputs, timing.graph_round),
        *(compare.judge_output, reference.truth, values, Case, Problem, CudaDevice),
    ]
    package = Path(journal.__file__).parents[1]
    files = {
        Path(inspect.getfile(one)).relative_to(package).as_posix() for one in deciding
    }
    assert files == set(journal.SOURCES)


def test_a_machine_that_cannot_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.trial, "environment_problem", lambda arch: f"no {arch}")
    request = tmp_path / "request.json"
    asked = worker.Request("sm90", {}, [], [], 1, 1, lock="")
    request.write_text(json.dumps(asdict(asked)))
    worker.main(str(request), str(tmp_path / "events"))
    (event,) = map(json.loads, (tmp_path / "events").read_text().splitlines())
    assert event == {"event": "environment", "message": "no sm90"}
