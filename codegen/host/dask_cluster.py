# SPDX-License-Identifier: Apache-2.0
"""Tasks on a Dask cluster, and what its workers do; see decision 0020.

Dask runs a task again when its worker dies. A worker has the same versions as we do, or its
results would not be ours, and it keeps its own compile cache.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from ..errors import CheckFailed, EnvironmentProblem, one_line
from . import cache, tools
from .executor import Results, Task
from .processes import Children, ending_with

T = TypeVar("T")

GPU = "GPU"  # the resource of `dask worker --resources GPU=1`
CONNECT_SECONDS = 10
LOST_SECONDS = 60  # without a worker: a supervisor may start a new one
POLL_SECONDS = 2
FETCH_SECONDS = 20  # of a result, before we look at the workers again

Versions = Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """See executor.Executor. client: a distributed.Client; gpu_worker: the only one to use."""

    client: Any
    address: str
    gpu_worker: str | None = None

    def run(self, tasks: Sequence[Task[T]], *, gpu: bool = False) -> Results[T]:
        """See Executor; EnvironmentProblem also when there is no worker, or none with a GPU.

        Only as many tasks are submitted as workers can begin at once: when a worker dies, Dask
        suspects all that it holds.
        """
        run = secrets.token_hex(8)
        waiting = list(enumerate(tasks))[::-1]
        pending: dict[Any, int] = {}
        if not self._capacities(gpu):
            raise EnvironmentProblem(self._nobody(gpu))
        try:
            while waiting or pending:
                free = max(0, self._slots(gpu) - len(pending))
                for number, task in [waiting.pop() for _ in waiting[:free]]:
                    pending[self._submit(task, run, number, gpu)] = number
                for future in self._ended(list(pending)):
                    try:
                        result = self._result(future, tasks[pending[future]])
                    except _RunsAgain:
                        continue
                    yield pending.pop(future), result
        finally:
            self._stop(list(pending), run)

    def on_one_gpu(self, most: int) -> Cluster:
        """See Executor; the worker says how many tasks share its GPU, by what it offers."""
        workers = self._capacities(gpu=True)
        if not workers:
            raise EnvironmentProblem(self._nobody(gpu=True))
        return replace(self, gpu_worker=min(workers))

    def jobs_each(self, tasks: int) -> int:
        """See Executor: one, since the workers say how much they run at once."""
        return 1

    def _submit(self, task: Task[Any], run: str, number: int, gpu: bool) -> Any:
        with self._talking():
            return self.client.submit(
                call,
                *(versions(), run, task.function, task.arguments),
                key=f"{task.name}-{run}-{number}",
                resources={GPU: 1} if gpu else None,
                workers=[self.gpu_worker] if gpu and self.gpu_worker else None,
                pure=False,
            )

    def _ended(self, pending: list[Any]) -> list[Any]:
        """Those that have ended; none when that takes long, since workers may come and go."""
        import distributed

        given_up = (distributed.TimeoutError, distributed.CancelledError)
        with (
            self._talking(),
            self.client.as_current(),
            contextlib.suppress(*given_up),
        ):
            distributed.wait(
                pending, timeout=POLL_SECONDS, return_when="FIRST_COMPLETED"
            )
        return [future for future in pending if future.done()]

    def _result(self, future: Any, task: Task[T]) -> T | CheckFailed:
        import distributed

        finished = future.status == "finished"
        try:
            return cast(T, future.result(FETCH_SECONDS if finished else None))
        except distributed.TimeoutError:
            if finished:  # but its worker died before we had the result
                raise _RunsAgain from None
            raise
        except CheckFailed as error:
            return error
        except distributed.KilledWorker as error:
            times = error.allowed_failures + 1
            return CheckFailed(f"{task.name}: {times} workers died while they ran it")
        except distributed.CancelledError as error:
            raise EnvironmentProblem(self._lost()) from error

    def _slots(self, gpu: bool) -> int:
        """How many tasks run at once; waits for a worker, but not for long."""
        end = time.monotonic() + LOST_SECONDS
        while not (capacities := self._capacities(gpu)):
            if time.monotonic() > end:
                raise EnvironmentProblem(self._nobody(gpu))
            time.sleep(POLL_SECONDS)
        return sum(capacities.values())

    def _capacities(self, gpu: bool) -> dict[str, int]:
        """How many tasks each worker that may be used runs at once, by its address."""
        with self._talking():
            known = self.client.scheduler_info(n_workers=-1)
        if "workers" not in known:  # of a client that has given up
            raise EnvironmentProblem(self._lost())
        slots = {
            address: int(worker["resources"].get(GPU, 0) if gpu else worker["nthreads"])
            for address, worker in known["workers"].items()
            if not gpu or self.gpu_worker in (None, address)
        }
        return {address: count for address, count in slots.items() if count}

    def _stop(self, pending: list[Any], run: str) -> None:
        """End what this command still has on the cluster, and nothing of others."""
        with contextlib.suppress(OSError, RuntimeError):
            if pending:
                self.client.cancel(pending)
                self.client.run(stop, run)

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """Around what needs the scheduler; a task that fails does so elsewhere."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise EnvironmentProblem(self._lost()) from error

    def _nobody(self, gpu: bool) -> str:
        if gpu and self.gpu_worker:
            return f"the worker {self.gpu_worker}, whose GPU was used, is gone"
        offer = f" that offers a GPU (dask worker --resources {GPU}=1)" if gpu else ""
        return f"the Dask cluster at {self.address} has no worker{offer}"

    def _lost(self) -> str:
        return f"the Dask scheduler at {self.address} does not answer any more"


class _RunsAgain(Exception):
    """A result that was there, and is not any more."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[Cluster]:
    """The cluster of a scheduler's HOST:PORT.

    Raises EnvironmentProblem when Dask is missing, nobody answers, or somebody there has other
    versions than we have.
    """
    try:
        import distributed
    except ImportError as error:
        raise EnvironmentProblem(
            "a Dask cluster needs the package distributed: pip install 'fmha-gen[dask]'"
        ) from error
    # What we have to say we say in one line.
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    try:
        client = distributed.Client(
            address, timeout=CONNECT_SECONDS, set_as_default=False
        )
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"no Dask scheduler answers at {address}") from error
    with client:
        for who, found in _everyones_versions(client, address).items():
            if isinstance(found, Exception):
                raise EnvironmentProblem(f"{who}: {one_line(found)}")
            _require_ours(who, versions(), found)
        yield Cluster(client, address)


def _everyones_versions(client: Any, address: str) -> dict[str, Versions | Exception]:
    """Of scheduler and workers; an exception of who cannot tell, such as for want of fmha-gen."""
    found: dict[str, Versions | Exception] = {}
    try:
        found[f"scheduler {address}"] = client.run_on_scheduler(versions)
    except Exception as error:
        found[f"scheduler {address}"] = error
    workers = client.run(versions, on_error="return")
    return found | {f"worker {name}": told for name, told in workers.items()}


# --- on both sides ------------------------------------------------------------------------


@functools.cache
def versions() -> dict[str, str]:
    """What decides a task's result beside its arguments, and a kernel's speed."""
    found = {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "fmha-gen": f"with sources {cache.source_digest()[:12]}",
    }
    for name in (*tools.TOOLS.values(), tools.FFI):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | tools.dsl_distributions()


def _require_ours(who: str, ours: Versions, theirs: Versions) -> None:
    differences = [
        f"{name} {theirs.get(name, 'none')}, here {ours.get(name, 'none')}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if differences:
        raise EnvironmentProblem(f"{who}: {'; '.join(differences)}")


# --- on a worker --------------------------------------------------------------------------

_lock = threading.Lock()
_runs: dict[str, Children] = {}  # by command; a few bytes each


def call(
    ours: Versions, run: str, function: Callable[..., T], arguments: tuple[Any, ...]
) -> T:
    """Run a task of a command whose machine has ``ours``; its processes end with the command."""
    from distributed import get_worker

    _require_ours(f"worker {get_worker().address}", ours, versions())
    with ending_with(_children(run)):
        return function(*arguments)


def stop(run: str) -> None:
    """End all processes of a command."""
    _children(run).kill()


def _children(run: str) -> Children:
    with _lock:
        return _runs.setdefault(run, Children())
