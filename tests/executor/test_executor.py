# SPDX-License-Identifier: Apache-2.0
"""What every executor does, here and on a cluster; and what only a cluster meets."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from fmha_gen.errors import CheckFailed, EnvironmentProblem
from fmha_gen.host import dask_cluster, processes
from fmha_gen.host.executor import Executor, Local, Task, in_order, opened

from . import work
from .conftest import DEATHS, GPU, HERE, Processes, running, wait_for


@pytest.fixture(params=["local", "dask"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "local":
        yield Local(2)
        return
    with opened(request.getfixturevalue("lasting").where, None) as found:
        yield found


def tasks(function: Any, *arguments: tuple[Any, ...]) -> list[Task[Any]]:
    return [Task(f"k{i}", function, given) for i, given in enumerate(arguments)]


# --- everywhere ---------------------------------------------------------------------------


def test_every_task_has_its_result(executor: Executor) -> None:
    found = dict(executor.run(tasks(work.double, *((n,) for n in range(20)))))
    assert found == {n: 2 * n for n in range(20)}
    assert list(executor.run([])) == []


def test_a_failed_check_is_a_result(executor: Executor) -> None:
    given = [*tasks(work.fail, ("k0: no",)), *tasks(work.double, (1,))]
    failed, good = in_order(executor.run(given))
    assert isinstance(failed, CheckFailed) and str(failed) == "k0: no"
    assert good == 2


def test_what_a_machine_lacks_ends_all(executor: Executor) -> None:
    given = [*tasks(work.lack, ("no DSL",)), *tasks(work.double, (1,))]
    with pytest.raises(EnvironmentProblem, match=r"^no DSL$"):
        list(executor.run(given))


def test_closing_ends_the_processes_of_tasks(
    executor: Executor, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    given = [*tasks(work.double, (1,)), *tasks(work.hang, (str(pid),))]
    with closing(executor.run(given)) as results:
        assert next(results) == (0, 2)
        wait_for(lambda: pid.exists() and bool(pid.read_text()))
    wait_for(lambda: not Path("/proc", pid.read_text()).exists())
    assert next(executor.run(tasks(work.double, (2,)))) == (0, 4)


def test_what_a_process_started_ends_when_it_has_ended(tmp_path: Path) -> None:
    """A program that fails leaves nobody on the GPU."""
    pid = tmp_path / "pid"
    ending = processes.run(
        ["sh", "-c", f"sleep 60 & echo $! > {pid}; exit 1"], timeout=30, env={}
    )
    assert ending.status == 1
    wait_for(lambda: not Path("/proc", pid.read_text().strip()).exists())


def test_in_order_gives_each_as_soon_as_it_can() -> None:
    shuffled = iter([(1, "b"), (0, "a"), (2, "c"), (3, "d")])
    ordered = in_order(shuffled)
    assert next(ordered) == "a"
    assert next(shuffled) == (2, "c")  # not taken yet
    assert list(in_order([(2, "c"), (1, "b"), (0, "a")])) == ["a", "b", "c"]


# --- GPUs ---------------------------------------------------------------------------------


def test_gpu_tasks_go_where_a_gpu_is(lasting: Processes) -> None:
    plain, gpu = (lasting.workers[name].pid for name in ("plain", "gpu"))
    with opened(lasting.where, None) as found:
        pinned = found.on_one_gpu(6)
        for executor in (found, pinned):
            ran = [
                pid for _, pid in executor.run(tasks(work.where, *[()] * 6), gpu=True)
            ]
            assert ran == [gpu] * 6
        slow = tasks(work.logged, *((os.devnull, n, 0.2) for n in range(4)))
        list(found.run(slow))
        ran = [pid for _, pid in pinned.run(tasks(work.where, *[()] * 30))]
        assert set(ran) == {plain, gpu}  # those without a GPU go everywhere


def test_the_gpu_that_was_chosen_goes(tmp_path: Path) -> None:
    with (
        running(tmp_path, gpu=GPU, other=GPU) as here,
        opened(here.where, None) as found,
    ):
        pinned = found.on_one_gpu(6)
        ((_, pid),) = pinned.run(tasks(work.where, ()), gpu=True)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(found.client.scheduler_info()["workers"]) == 1)  # type: ignore[attr-defined]
        with pytest.raises(EnvironmentProblem, match="whose GPU was used, is gone"):
            list(pinned.run(tasks(work.where, ()), gpu=True))
        ((_, other),) = found.run(tasks(work.where, ()), gpu=True)
        assert other != pid


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    with running(tmp_path, plain=()) as here, opened(here.where, None) as found:
        wanted = f"at {here.address} has no worker that offers a GPU .*GPU=1"
        with pytest.raises(EnvironmentProblem, match=wanted):
            list(found.run(tasks(work.double, (1,)), gpu=True))
        with pytest.raises(EnvironmentProblem, match=wanted):
            found.on_one_gpu(6)
        assert list(found.run(tasks(work.double, (1,)))) == [(0, 2)]
        here.workers["plain"].kill()
        here.workers["plain"].wait()
        wait_for(lambda: not found.client.scheduler_info()["workers"])  # type: ignore[attr-defined]
        with pytest.raises(EnvironmentProblem, match=r"has no worker$"):
            list(found.run(tasks(work.double, (1,))))


# --- workers that die ---------------------------------------------------------------------


def test_a_worker_is_killed_in_the_middle(tmp_path: Path) -> None:
    log = tmp_path / "begun"
    count = 10
    given = tasks(work.logged, *((str(log), n, 0.3) for n in range(count)))
    with running(tmp_path, a=(), b=()) as here, opened(here.where, None) as found:
        a, b = (here.workers[name].pid for name in "ab")

        def kill() -> None:
            """The worker of task 4 or 5, as soon as it has begun."""
            wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 4)
            os.kill(int(log.read_text().splitlines()[4].split()[0]), signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        ended = list(found.run(given))
        killer.join()
    assert sorted(ended) == [(n, 2 * n) for n in range(count)]  # each once, none lost
    begun = [line.split() for line in log.read_text().splitlines()]
    assert {int(pid) for pid, _ in begun} == {a, b}
    first: dict[str, str] = {}
    again = [n for pid, n in begun if first.setdefault(n, pid) != pid]
    assert len(first) == count
    # What it was at, and perhaps what it had not handed over yet; nothing that others did.
    assert 1 <= len(again) <= 2 and {first[n] for n in again} == {begun[4][0]}
    assert len(begun) == count + len(again)


def test_no_more_is_submitted_than_can_begin(
    lasting: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask suspects all that a dead worker held."""
    slots, submitted = iter([3]), []
    submit = dask_cluster.Cluster._submit

    def watched(self: Any, task: Any, run: str, number: int, gpu: bool) -> Any:
        submitted.append(number)
        return submit(self, task, run, number, gpu)

    monkeypatch.setattr(dask_cluster.Cluster, "_submit", watched)
    monkeypatch.setattr(dask_cluster.Cluster, "_slots", lambda *_: next(slots, 1))
    given = tasks(work.logged, *((os.devnull, n, 1.0 * (n > 0)) for n in range(6)))
    with (
        opened(lasting.where, None) as found,
        closing(found.run(given)) as results,
    ):
        ended = [next(results), next(results)]  # and two workers have gone
        assert submitted == [0, 1, 2]
        ended += results
    assert sorted(ended) == [(n, 2 * n) for n in range(6)]


def test_a_task_that_kills_its_workers_is_given_up(tmp_path: Path) -> None:
    given = [*tasks(work.die, ()), *tasks(work.double, *((n,) for n in range(4)))]
    with running(tmp_path, a=("--nanny",)) as here, opened(here.where, None) as found:
        killed, *others = in_order(found.run(given))
    assert str(killed) == f"k0: {DEATHS} workers died while they ran it"
    assert others == [0, 2, 4, 6]


def test_the_scheduler_dies(tmp_path: Path) -> None:
    log = tmp_path / "begun"
    given = tasks(work.logged, *((str(log), n, 0.5) for n in range(20)))
    with (
        running(tmp_path, a=()) as here,
        opened(here.where, None) as found,
        closing(found.run(given)) as results,
    ):
        next(results)
        assert here.scheduler is not None
        here.scheduler.kill()
        with pytest.raises(EnvironmentProblem, match="does not answer any more"):
            list(results)


# --- clusters that cannot be used ---------------------------------------------------------


def test_a_worker_with_another_version_is_refused(tmp_path: Path) -> None:
    other = ("--preload", str(HERE / "other_version.py"))
    ours = dask_cluster.versions()["nvidia-cutlass-dsl"]
    with (
        running(tmp_path, other=other) as here,
        pytest.raises(
            EnvironmentProblem,
            match=rf"^worker tcp://\S+: .*nvidia-cutlass-dsl 4\.8\.0, here {ours}",
        ),
        opened(here.where, None),
    ):
        pass


def test_a_worker_with_another_version_that_comes_late(tmp_path: Path) -> None:
    other = ("--preload", str(HERE / "other_version.py"))
    with (
        running(tmp_path) as here,
        opened(here.where, None) as found,
        ExitStack() as stack,
    ):
        here.add_worker(stack, "late", *other)
        wait_for(lambda: bool(found.client.scheduler_info()["workers"]))  # type: ignore[attr-defined]
        with pytest.raises(EnvironmentProblem, match=r"^worker .*cutlass-dsl 4\.8\.0"):
            list(found.run(tasks(work.double, (1,))))


def test_a_scheduler_without_fmha_gen_is_refused(tmp_path: Path) -> None:
    """It unpickles what it passes on."""
    missing = (
        "--preload",
        "import sys; sys.modules['fmha_gen.host.dask_cluster'] = None",
    )
    with (
        running(tmp_path, scheduler_options=missing) as here,
        pytest.raises(EnvironmentProblem, match=r"^scheduler 127\S+: ModuleNotFound"),
        opened(here.where, None),
    ):
        pass


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="Dask is missing")
    monkeypatch.setattr(dask_cluster, "CONNECT_SECONDS", 0.5)
    with (
        pytest.raises(EnvironmentProblem, match=r"^no Dask scheduler answers at 127"),
        opened("dask://127.0.0.1:1", None),
    ):
        pass


def test_without_dask_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with (
        pytest.raises(EnvironmentProblem, match=r"pip install 'fmha-gen\[dask\]'"),
        opened("dask://127.0.0.1:1", None),
    ):
        pass


@pytest.mark.parametrize("where", ["dask://", "127.0.0.1:8786", "ray://x:1", ""])
def test_what_is_no_executor(where: str) -> None:
    with pytest.raises(ValueError, match="is not dask://HOST:PORT"):
        opened(where, None)
