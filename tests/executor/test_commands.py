# SPDX-License-Identifier: Apache-2.0
"""Commands on a cluster print and write what they do on one machine."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import support
from bench.model import ModelGauge
from engine import fake
from fmha_gen import cli
from fmha_gen.bench.problems import Problem
from fmha_gen.build import engine as build
from fmha_gen.errors import EnvironmentProblem
from fmha_gen.evidence import emulate, validate
from fmha_gen.host.executor import Executor, Local, opened
from fmha_gen.host.processes import Ending
from fmha_gen.tune import command
from fmha_gen.tune.gpu import OneGpu
from typer.testing import CliRunner

from . import work
from .conftest import Processes, running, wait_for

STEMS = ("a", "b", "refused", "z")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMHA_GEN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, own_cache: None) -> None:
    """Specs of fake.py, and a compiler that a worker finds as well."""
    parts = replace(fake.Parts().engine(), compile_kernel=work.slow_compile)
    monkeypatch.setattr(build, "default_engine", lambda: parts)


def write_specs(folder: Path, *stems: str) -> None:
    (folder / "specs").mkdir(parents=True)
    for number, stem in enumerate(stems):
        (folder / "specs" / f"{stem}.yaml").write_text(f"{64 + number}\n")


def run_build(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[int, str, str, dict[str, str]]:
    """Status, both outputs and files of a build of its own."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FMHA_GEN_CACHE", str(folder / "cache"))
    done = CliRunner().invoke(cli.app, ["build", "specs", *options])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    files = fake.contents(folder / "generated") if Path("generated").exists() else {}
    return done.exit_code, done.stdout, done.stderr, files


@pytest.mark.parametrize("stems", [("a", "b", "z"), STEMS])
@pytest.mark.usefixtures("engine")
def test_build(
    stems: tuple[str, ...],
    lasting: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for name, options in (("here", []), ("there", ["--executor", lasting.where])):
        write_specs(tmp_path / name, *stems)
        found.append(run_build(tmp_path / name, monkeypatch, *options))
    assert found[0] == found[1]
    status, _, said, files = found[0]
    if "refused" in stems:
        assert status == 1 and said.endswith("refused: does not compile\n  ICE\n")
        assert not files
    else:
        assert status == 0
        assert {"a.py", "records/z.json"} < files.keys()


@pytest.mark.usefixtures("engine")
def test_build_while_a_worker_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stems = [f"k{number}" for number in range(12)]
    for name in ("here", "there"):
        write_specs(tmp_path / name, *stems)
    expected = run_build(tmp_path / "here", monkeypatch)
    dask = tmp_path / "dask"
    dask.mkdir()
    with running(dask, a=(), b=()) as cluster:

        def kill() -> None:
            """As soon as it has compiled one."""
            wait_for(lambda: any((dask / "cache-0").glob("sass-*")))
            os.kill(cluster.workers["a"].pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        options = ("--executor", cluster.where)
        assert run_build(tmp_path / "there", monkeypatch, *options) == expected
        killer.join()
    caches = [len(list((dask / f"cache-{n}").glob("sass-*"))) for n in range(2)]
    assert caches[0] >= 1 and sum(caches) >= len(stems), "each has its own"


def test_a_real_compile(lasting: Processes, tmp_path: Path, own_cache: None) -> None:
    spec = support.SPECS / "sm90_d64_fp16_causal_gqa8.yaml"
    with opened(lasting.where, None) as executor:
        there = build.build([spec], tmp_path / "there", executor=executor)
    assert there.ok and there.compiles == 1
    again = build.build([spec], tmp_path / "here")
    assert again.compiles == 0, "the result is in this machine's cache, too"
    assert fake.contents(tmp_path / "there") == fake.contents(tmp_path / "here")
    assert there.kernels[0].text == (support.GENERATED / f"{spec.stem}.py").read_text()


# --- emulate and validate -----------------------------------------------------------------

RAN = {
    **{"event": "run", "case": "c", "schedule": "eager", "absolute": 2e-3},
    **{"of_bound": 0.5, "lse_of_bound": None},
    **{"lse_absolute": None, "rows": 8, "of_rows": 8, "steps": 9, "seconds": 0.5},
}
TRIED = {
    **{"event": "case", "case": "c", "absolute": 2e-3},
    **{"of_bound": 0.5, "lse_absolute": None},
    **{"lse_of_bound": None, "repeats": 2},
}
KERNEL = {
    "event": "kernel",
    "dsl": "4.8.1",
    "ptx_sha256": "d" * 64,
    "not_walked": {},
    "cases": [],
}
MACHINE = {"event": "machine", "gpu": "NVIDIA H200", "dsl": "4.8.1"}
END = {"event": "end", "schedules": ["eager"]}
START = {"event": "start", "case": "c", "schedule": "eager"}


def script(finding: str = "") -> list[dict[str, Any]]:
    """What a process says to either command."""
    findings = {"findings": [finding] if finding else []}
    return [KERNEL, MACHINE, START, {**RAN, **findings}, {**TRIED, **findings}, END]


def write_kernels(folder: Path) -> list[Path]:
    folder.mkdir()
    scripts = {
        "good": {"events": script()},
        "wrong": {"events": script("error 2 is more than 1")},
        "stops": {"events": [KERNEL, MACHINE, START]},
        "crashes": {"events": [KERNEL, MACHINE, START], "signal": 11},
        "better": {"events": script()},
    }
    for stem, what in scripts.items():
        (folder / f"{stem}.py").write_text(f"#{json.dumps(what)}\n")
    return [folder / f"{stem}.py" for stem in scripts]


def run_both(
    lasting: Processes, tmp_path: Path, run: Any
) -> list[tuple[str, str, dict[str, str]]]:
    """What is printed, what is said of failures, and the records; here, and on a cluster."""
    found = []

    def keep(folder: Path, executor: Executor) -> None:
        kernels = write_kernels(folder)
        outcomes, module = run(kernels, executor)
        printed = module.as_json_text(outcomes)
        failures = module.failures(outcomes).replace(str(folder), "")
        files = fake.contents(folder)
        found.append((printed.replace(str(folder), ""), failures, files))

    keep(tmp_path / "here", Local(2))
    with opened(lasting.where, None) as executor:
        keep(tmp_path / "there", executor)
    return found


def test_emulate(lasting: Processes, tmp_path: Path) -> None:
    def run(kernels: list[Path], executor: Executor) -> Any:
        outcomes = emulate.emulate(
            kernels, executor=executor, timeout=5, worker=work.fake_process
        )
        return outcomes, emulate

    here, there = run_both(lasting, tmp_path, run)
    assert here == there
    _, failures, files = here
    assert "/crashes.py: c: died of signal 11" in failures
    assert {"records/good.json", "records/better.json"} < files.keys()
    assert "records/wrong.json" not in files


def test_validate(
    lasting: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "require_gpu", lambda **_: ModelGauge.driver)

    def run(kernels: list[Path], executor: Executor) -> Any:
        outcomes = validate.validate(
            kernels, executor=executor, timeout=5, worker=work.fake_process
        )
        return outcomes, validate

    here, there = run_both(lasting, tmp_path, run)
    assert here == there
    _, failures, files = here
    assert "/wrong.py: c: error 2 is more than 1" in failures
    record = json.loads(files["records/good.json"])
    assert record["validated"][0]["driver"] == ModelGauge.driver


def test_a_worker_that_only_says_that_it_has_a_gpu(tmp_path: Path) -> None:
    """The resource is an offer; the driver's word counts."""
    kernels = write_kernels(tmp_path / "k")
    offers = ("--resources", "GPU=1")
    with (
        running(tmp_path, offers=offers) as cluster,
        opened(cluster.where, None) as executor,
        pytest.raises(EnvironmentProblem, match="no NVIDIA GPU"),
    ):
        validate.validate(
            kernels, executor=executor, timeout=5, worker=work.fake_process
        )


def test_a_kernel_whose_workers_die_is_that_kernels_failure(tmp_path: Path) -> None:
    class Dead(Local):
        def run(self, tasks: Any, *, gpu: bool = False) -> Any:
            for number, result in super().run(tasks, gpu=gpu):
                died = work.CheckFailed("bad: 3 workers died while they ran it")
                yield number, died if tasks[number].name == "bad" else result

    for stem in ("bad", "good"):
        text = f"#{json.dumps({'events': script()})}\n"
        (tmp_path / f"{stem}.py").write_text(text)
    kernels = sorted(tmp_path.glob("*.py"))
    outcomes = emulate.emulate(kernels, executor=Dead(), worker=work.fake_process)
    assert emulate.failures(outcomes).splitlines()[0] == (
        f"{kernels[0]}: launch: bad: 3 workers died while they ran it"
    )
    assert outcomes[0].result is None and outcomes[1].result is not None
    assert Ending(None, "", 0, lost="x").problem == "x"


# --- tune ---------------------------------------------------------------------------------


def test_tune_takes_one_gpu(lasting: Processes) -> None:
    """Compiles go everywhere (they are the build's); heats to one card, with their texts."""
    what = {"op": "fmha_fwd", "dtype": "bf16", "head_dim": {"qk": 64, "v": 64}}
    what |= {"q_per_kv": 1, "mask": "none", "lse": False}
    problem = Problem(what, batch=1, heads=2, q=64, kv=80)
    with opened(lasting.where, None) as executor:
        machine = command.find_machine(executor)
        assert (machine.gpu, machine.driver) == (ModelGauge.name, ModelGauge.driver)
        gpu = OneGpu(
            texts={name: f"# {name}\n" for name in "iab"},
            problems=[problem],
            limit=5,
            executor=machine.executor,
            worker=work.heat_process,
        )
        heat = gpu.race(["i", "a", "b"], 3)
    pid = lasting.workers["gpu"].pid
    assert heat.rounds == {f"# i|# a|# b on {pid}": [[1.0, 1.0, 1.0]] * 3}
    assert heat.rejected == {}


@pytest.mark.parametrize("name", ["build", "emulate", "validate", "tune"])
def test_what_is_no_executor_is_a_wrong_option(name: str) -> None:
    done = CliRunner().invoke(cli.app, [name, "x.yaml", "--executor", "ray://x"])
    assert done.exit_code == 2
    assert "--executor" in done.stderr
