# SPDX-License-Identifier: Apache-2.0
"""Where a command's independent tasks run: on this machine, or on a cluster (see dask_cluster.py).

A task is a function of a module and its arguments: texts and numbers, no paths, because the
machine that runs it shares no files with this one. Only the command itself writes files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from ..errors import CheckFailed
from .processes import Children, ending_with

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Results = Generator[tuple[int, T | CheckFailed], None, None]

DASK = "dask://"


@dataclass(frozen=True)
class Task(Generic[T_co]):
    """A call that depends on no other one. name: the kernel that it is about."""

    name: str
    function: Callable[..., T_co]
    arguments: tuple[Any, ...]


class Executor(Protocol):
    """Runs tasks side by side."""

    def run(self, tasks: Sequence[Task[T]], *, gpu: bool = False) -> Results[T]:
        """Yield each task's number and result, in the order in which they end.

        gpu: they need one. A CheckFailed of a task is its result; any other exception is raised
        here. Whoever closes this early ends what still runs.
        """
        ...

    def on_one_gpu(self, most: int) -> Executor:
        """One that runs all tasks with a GPU on the same one; ``most`` at a time share it."""
        ...

    def jobs_each(self, tasks: int) -> int:
        """How many processes each of so many tasks may use, so that none is idle."""
        ...


@dataclass(frozen=True)
class Local:
    """Threads that wait, each for a process of its task; ``jobs`` at a time, or one per core."""

    jobs: int | None = None

    def run(self, tasks: Sequence[Task[T]], *, gpu: bool = False) -> Results[T]:
        """See Executor."""
        children = Children()

        def call(task: Task[T]) -> T:
            with ending_with(children):
                return task.function(*task.arguments)

        with ThreadPoolExecutor(self._at_once) as pool:
            futures = {pool.submit(call, task): i for i, task in enumerate(tasks)}
            try:
                for future in as_completed(futures):
                    result: T | CheckFailed
                    try:
                        result = future.result()
                    except CheckFailed as error:
                        result = error
                    yield futures[future], result
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                children.kill()

    def on_one_gpu(self, most: int) -> Local:
        """See Executor."""
        return Local(min(self._at_once, most))

    def jobs_each(self, tasks: int) -> int:
        """See Executor."""
        return max(1, self._at_once // max(1, tasks))

    @property
    def _at_once(self) -> int:
        return max(1, self.jobs or os.cpu_count() or 1)


HERE: Final = Local()


def in_order(results: Iterable[tuple[int, T]]) -> Iterator[T]:
    """Results by the numbers of their tasks, each as soon as those before it are there."""
    waiting: dict[int, T] = {}
    following = 0
    for number, result in results:
        waiting[number] = result
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def opened(where: str | None, jobs: int | None) -> AbstractContextManager[Executor]:
    """The executor that ``--executor`` names; without one, this machine with so many jobs.

    Raises ValueError when it names none; entering it, EnvironmentProblem when the cluster cannot be
    used.
    """
    if where is None:
        return nullcontext(Local(jobs))
    if not where.startswith(DASK) or where == DASK:
        raise ValueError(f"{where!r} is not {DASK}HOST:PORT")
    from .dask_cluster import connected

    return connected(where.removeprefix(DASK))
