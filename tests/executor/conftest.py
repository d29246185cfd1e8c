# SPDX-License-Identifier: Apache-2.0
"""Dask clusters of real processes on this machine's loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
HERE = Path(__file__).parent
START_SECONDS = 120  # of a process, on a loaded machine
DEATHS = 3  # of its worker that a task is forgiven, less one


@dataclass
class Processes:
    """A scheduler and its workers, by name; each worker has one thread and a cache of its own."""

    folder: Path
    address: str = ""
    scheduler: subprocess.Popen[bytes] | None = None
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """As ``--executor`` takes it."""
        return f"dask://{self.address}"

    def start(self, stack: ExitStack, *arguments: str) -> subprocess.Popen[bytes]:
        path = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        log = stack.enter_context((self.folder / "log").open("ab"))
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *arguments],
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
                "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": str(DEATHS - 1),
                "FMHA_GEN_CACHE": str(self.folder / f"cache-{len(self.workers)}"),
            },
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    def add_worker(self, stack: ExitStack, name: str, *options: str) -> None:
        nanny = () if "--nanny" in options else ("--no-nanny",)
        local = self.folder / f"work-{name}"
        self.workers[name] = self.start(
            *(stack, "worker", f"tcp://{self.address}", "--name", name),
            *("--nthreads", "1", "--no-dashboard", "--local-directory", str(local)),
            *(*nanny, *options),
        )


@contextmanager
def running(
    folder: Path, scheduler_options: tuple[str, ...] = (), **workers: tuple[str, ...]
) -> Iterator[Processes]:
    """A cluster with workers, each with its options; it is there when all have come."""
    distributed = pytest.importorskip(
        "distributed", reason="Dask is missing: pip install 'fmha-gen[dask]'"
    )
    found = Processes(folder)
    with ExitStack() as stack:
        file = folder / "scheduler.json"
        found.scheduler = found.start(
            *(stack, "scheduler", "--host", "127.0.0.1", "--port", "0"),
            *("--no-dashboard", "--scheduler-file", str(file)),
            *scheduler_options,
        )
        wait_for(lambda: file.exists() and bool(file.read_text()))
        found.address = json.loads(file.read_text())["address"].removeprefix("tcp://")
        for name, options in workers.items():
            found.add_worker(stack, name, *options)
        with distributed.Client(found.address, set_as_default=False) as client:
            wait_for(lambda: len(client.scheduler_info()["workers"]) == len(workers))
        yield found


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + START_SECONDS
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


GPU = ("--resources", "GPU=1", "--preload", str(HERE / "gpu_model.py"))


@pytest.fixture(scope="package")  # idle processes of Dask take 5 % of a core
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two workers, of which one has a GPU; for tests that kill none."""
    with running(tmp_path_factory.mktemp("dask"), plain=(), gpu=GPU) as found:
        yield found
