# SPDX-License-Identifier: Apache-2.0
"""Commands that are killed: every file is the old or the new one, and the next run does the rest.

Each command that writes is a line of `COMMANDS`; add a new one there. It is killed at random
moments spread over its run, and just before its file operations, which random moments seldom meet.
Then it runs again, and must leave what it leaves without a kill: the same bytes, no file more.

`FMHA_GEN_KILLS=50` kills each command 50 times in either way; the ordinary run kills less often.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import support
from bench import test_results
from bench.model import ModelGauge
from fmha_gen import cli
from fmha_gen.bench import command as bench
from fmha_gen.bench import plot, results
from fmha_gen.build import engine as build
from fmha_gen.build import manifest, records, toolchain
from fmha_gen.build.render import body_digest
from fmha_gen.compat import cells, document
from fmha_gen.evidence import emulate, validate
from fmha_gen.host import cache, processes, tools
from fmha_gen.tune import command as tune
from tune.model import ModelGpu
from vendor.test_vendor import rebuild

from . import fake

KILLS = int(os.environ.get("FMHA_GEN_KILLS", "3"))
OPERATIONS = {
    *("close", "flush", "fsync", "mkdir", "remove", "rename", "replace"),
    *("rmdir", "truncate", "unlink", "write", "writelines"),
}


@dataclass(frozen=True)
class Command:
    """before: makes the files that it finds; run: the command, in the folder of those."""

    name: str
    before: Callable[[], None]
    run: Callable[[], None]
    real_specs: bool = False  # else those of fake.py


LARGE = "x" * 100_000  # more than a buffer holds

# --- the commands -------------------------------------------------------------------------


def line(*arguments: str) -> Callable[[], None]:
    """A command line that must end with status 0."""

    def run() -> None:
        assert not cli.app(list(arguments), standalone_mode=False)

    return run


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, "utf-8")


def build_here(*stems: str, value: int = 64) -> None:
    for stem in stems:
        write(f"specs/{stem}.yaml", f"{value}\n")
    assert build.build([Path("specs")], Path("generated")).ok


def before_build() -> None:
    """One kernel will change, one go and one come."""
    build_here("changes", "goes")
    write("specs/changes.yaml", "128\n")
    write("specs/comes.yaml", "64\n")
    Path("specs/goes.yaml").unlink()


def before_export() -> None:
    before_build()
    line("build", "specs", "--export", "objects")()
    write("specs/changes.yaml", "256\n")


def before_trials() -> None:
    """Two kernels, of which one has the rungs already."""
    build_here("a", "b")
    path = Path("generated", records.path_of("b"))
    body = body_digest(Path("generated/b.py").read_text("utf-8"))
    for rung in ("emulated", "validated"):
        record = records.merge_rung(
            records.load(path),
            kernel="b",
            body_sha256=body,
            rung=rung,
            result={"gpu": "it"},
        )
        path.write_text(records.dump(record), "utf-8")


def before_bench() -> None:
    before_trials()
    write("run.json", "old\n")
    write("run.png", "old\n")


def before_tune() -> None:
    write("specs/k.yaml", "arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 128\n")


SHIPPED = ("sm90_d64_fp16_causal_gqa8", "sm90_d64_bf16_full")


def before_copies() -> None:
    """Two shipped kernels as a build left them."""
    lock = manifest.parse((support.GENERATED / manifest.FILE).read_text("utf-8"))
    entries = {f"{stem}.py": lock.entries[f"{stem}.py"] for stem in SHIPPED}
    for folder in ("specs", "generated/records"):
        Path(folder).mkdir(parents=True)
    write(
        f"generated/{manifest.FILE}",
        manifest.dump(manifest.Manifest(lock.tools, entries)),
    )
    for stem in SHIPPED:
        shutil.copy(support.SPECS / f"{stem}.yaml", "specs")
        shutil.copy(support.GENERATED / f"{stem}.py", "generated")
        record = records.path_of(stem)
        shutil.copy(support.GENERATED / record, "generated/records")


def before_update() -> None:
    before_copies()
    line("vendor", *SHIPPED, "--into", "copies", "--init")()
    rebuild(Path("generated"), SHIPPED[1])


def before_site() -> None:
    """One kernel was there, another one comes."""
    before_copies()
    line("site", "pages", "--specs", f"specs/{SHIPPED[0]}.yaml")()


def before_picture() -> None:
    before_copies()
    write("plan.svg", "old\n")


def before_matrix() -> None:
    write("table.md", f"text\n{document.BEGIN}old\n{document.END}more\n")


CELLS = [cells.Cell("a", "4.8.1", cells.Kind.HUNG, (LARGE,))]
FEW = ("tile.q", "stages.q", "stages.kv=2", "stages.v", "tile.kv=48,96")
COMMANDS = [
    Command("build", before_build, line("build", "specs")),
    Command(
        "build --export", before_export, line("build", "specs", "--export", "objects")
    ),
    Command("emulate", before_trials, line("emulate", "specs")),
    Command(
        "emulate --timeline",
        before_trials,
        line("emulate", "generated/a.py", "--timeline", "trace.json"),
    ),
    Command("validate", before_trials, line("validate", "specs")),
    Command(
        "bench",
        before_bench,
        line("bench", "specs", "--record", "--json", "run.json", "--plot", "run.png"),
    ),
    Command(
        "tune",
        before_tune,
        line(
            *("tune", "specs/k.yaml", "--seqlen", "512"),
            *(part for field in FEW for part in ("--fix", field)),
        ),
        real_specs=True,
    ),
    Command("vendor", before_copies, line("vendor", *SHIPPED, "--into", "copies")),
    Command("vendor --update", before_update, line("vendor", "--update", "copies")),
    Command("site", before_site, line("site", "pages"), real_specs=True),
    Command(
        "explain --svg",
        before_picture,
        line("explain", f"specs/{SHIPPED[0]}.yaml", "--svg", "plan.svg"),
    ),
    Command(
        "matrix --write",
        before_matrix,
        lambda: document.write(Path("table.md"), CELLS, []),
    ),
    Command(
        "cache",
        lambda: cache.put("x", "old", root=Path("cache")),
        lambda: cache.put("x", LARGE, root=Path("cache")),
    ),
]


# --- what stands in for compiler, emulator and GPU ----------------------------------------

RUNS = [
    {"event": "machine", "gpu": "NVIDIA H200", "dsl": "4.8.1"},
    {
        "event": "kernel",
        "dsl": "4.8.1",
        "ptx_sha256": "d" * 64,
        "not_walked": {},
        "cases": [],
    },
    {"event": "start", "case": "c", "schedule": "eager"},
    {
        **{"event": "run", "case": "c", "schedule": "eager", "absolute": 2e-3},
        **{"of_bound": 0.5, "lse_of_bound": None},
        **{"lse_absolute": None, "rows": 8, "of_rows": 8, "steps": 9, "seconds": 0.5},
        "findings": [],
    },
    {
        **{"event": "case", "case": "c", "absolute": 2e-3},
        **{"of_bound": 0.5, "lse_absolute": None},
        **{"lse_of_bound": None, "repeats": 2, "findings": []},
    },
    {"event": "timeline", "trace": {"traceEvents": [LARGE]}},
    {"event": "end", "schedules": ["eager"]},
]


def events(*given: Any) -> Any:
    """What a kernel's process says; it says it to both, who each read what they know."""
    wanted = given[-1]
    found = [
        one for one in RUNS if one["event"] != "timeline" or "--timeline" in wanted
    ]
    return found, processes.Ending(0, "", 60)


def model_gpu(**given: Any) -> ModelGpu:
    """A TILE_KV of 96 is fastest; without noise, so that a run that is resumed ends alike."""
    truth = {}
    for body, text in given["texts"].items():
        truth[body] = 1e-3 if "\nTILE_KV = 96 " in text else 2e-3
    return ModelGpu(truth, problems=[str(problem) for problem in given["problems"]])


def load(paths: list[Path]) -> list[bench.Kernel]:
    return [
        bench.Kernel(
            path, body_digest(path.read_text("utf-8")), SimpleNamespace(SPEC={})  # type: ignore[arg-type]
        )
        for path in paths
    ]


def race(*_: Any) -> results.Report:
    cell = test_results.cell(x=600, fa4=500)
    cell.ours = ["a", "b"]
    cell.timings["a"] = cell.timings["b"] = cell.timings.pop("x")
    return test_results.report(cell, peers=("fa4",))


class Figure:
    def savefig(self, file: Any, **_: Any) -> None:
        (file.write_bytes if isinstance(file, Path) else file.write)(LARGE.encode())


@pytest.fixture
def models(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake.Parts().engine()
    if command.real_specs:
        engine = changed(
            build.default_engine(),
            toolchain_key=lambda: "model",
            compile_kernel=lambda text, stem, arch: fake.report(),
        )
    monkeypatch.setattr(build, "default_engine", lambda: engine)
    monkeypatch.setattr(tools, "require_dsl", lambda: "4.8.1")
    monkeypatch.setattr(tools, "require_ffi", lambda: "0.1.11")
    compiled = f"object {LARGE}".encode()
    monkeypatch.setattr(
        toolchain, "compile_object", lambda text, *_: text.encode() + compiled
    )
    monkeypatch.setattr(emulate, "run_worker", events)
    monkeypatch.setattr(validate, "run_worker", events)
    for module in (validate, bench, tune):
        monkeypatch.setattr(module, "require_gpu", lambda **_: "580.1")
    for module in (bench, tune):
        monkeypatch.setattr(module, "find_gpu", ModelGauge)
    monkeypatch.setattr(tune, "OneGpu", model_gpu)
    monkeypatch.setattr(bench, "load", load)
    monkeypatch.setattr(bench, "cells_for", lambda *_: ([], []))
    monkeypatch.setattr(bench, "race", race)
    monkeypatch.setattr(plot, "require", lambda file: None)
    monkeypatch.setattr(plot, "figure_of", lambda report: Figure())


# --- killing ------------------------------------------------------------------------------


class Operations:
    """Counts the file operations of a process, and kills it before one of them, from 1."""

    def __init__(self, last: int = 0) -> None:
        self.done, self.last = 0, last
        self._lock = threading.Lock()

    def __call__(self, _frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or function.__name__ not in OPERATIONS:
            return
        own = getattr(function, "__self__", None)
        if not isinstance(own, io.IOBase) and function.__module__ != "posix":
            return  # such as str.replace
        with self._lock:
            self.done += 1
            if self.done == self.last:
                os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)


def start(command: Command, folder: Path, operations: Operations | None = None) -> int:
    """Run it in a copy of this process, which has imported everything; returns its pid."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        cache._sweep.cache_clear()  # a new process has swept no folder
        os.chdir(folder)
        sys.stdout = sys.stderr = io.StringIO()
        if operations:
            operations.watch()
        command.run()
        sys.setprofile(None)
        if operations:
            (folder.parent / "operations").write_text(str(operations.done))
        status = 0
    except BaseException:
        (folder.parent / "error").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def finish(pid: int, folder: Path) -> None:
    """Wait for a process that must end well."""
    _, status = os.waitpid(pid, 0)
    assert status == 0, (folder.parent / "error").read_text()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def is_temporary(name: str) -> bool:
    return any(part.startswith(".") for part in Path(name).parts)


def check_whole(found: dict[str, bytes], before: Any, after: Any) -> None:
    """What must hold at any moment: whole files, and a new lock only beside new ones.

    A journal grows: its last line may be torn, and is cut off.
    """
    for name, data in found.items():
        if name.endswith(".jsonl"):
            for entry in data.split(b"\n")[:-1]:
                json.loads(entry)
        elif not is_temporary(name):
            assert data in (before.get(name), after.get(name)), f"{name} is torn"
    for name in before.keys() & after.keys():
        assert name in found, f"{name} is lost"
    for lock in found:
        if lock.endswith(".lock") and found[lock] != before.get(lock):
            folder = Path(lock).parent
            for name in after.keys() | found.keys():
                if folder in Path(name).parents and not is_temporary(name):
                    assert found.get(name) == after.get(name), f"{name} is later"


def check_finished(found: dict[str, bytes], after: dict[str, bytes]) -> None:
    """What must hold after the next run."""
    assert found.keys() == after.keys()
    for name, data in found.items():
        if name.endswith(".jsonl"):
            assert data.endswith(b"\n")
            for entry in data.splitlines():
                json.loads(entry)
        else:
            assert data == after[name], f"{name} is not what a run leaves"


@dataclass(frozen=True)
class Scene:
    """folder: where the command runs; template: what it finds there."""

    command: Command
    folder: Path
    template: Path

    def set(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.template, self.folder)

    def whole_run(self, operations: Operations | None = None) -> float:
        """Seconds that it takes."""
        self.set()
        begin = time.perf_counter()
        finish(start(self.command, self.folder, operations), self.folder)
        return time.perf_counter() - begin

    def killed_run(self, pid: int, after: dict[str, bytes]) -> bool:
        """Check what a process leaves that is about to be killed; whether it was before its end."""
        _, status = os.waitpid(pid, 0)
        check_whole(contents(self.folder), contents(self.template), after)
        finish(start(self.command, self.folder), self.folder)
        check_finished(contents(self.folder), after)
        return os.WIFSIGNALED(status)


SOME = support.rotated([each.name for each in COMMANDS], 6)


@pytest.fixture
def scene(
    command: Command, models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Scene:
    found = Scene(command, tmp_path / "folder", tmp_path / "template")
    found.template.mkdir()
    monkeypatch.chdir(found.template)
    command.before()
    found.set()
    monkeypatch.chdir(found.folder)
    command.run()  # imports what the copies of this process need, and fills the cache
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.parametrize(
    "command",
    [each for each in COMMANDS if each.name in SOME],
    ids=lambda each: each.name,
)
def test_killed(command: Command, scene: Scene) -> None:
    seconds = scene.whole_run()
    after = contents(scene.folder)
    assert after != contents(scene.template)

    dice = random.Random(command.name)
    for number in range(KILLS):
        scene.set()
        pid = start(command, scene.folder)
        time.sleep((number + dice.random()) / KILLS * seconds)
        os.kill(pid, signal.SIGKILL)
        scene.killed_run(pid, after)

    scene.whole_run(Operations())
    operations = int((scene.folder.parent / "operations").read_text())
    for number in range(KILLS):
        scene.set()
        last = 1 + (number * operations + dice.randrange(operations)) // KILLS
        pid = start(command, scene.folder, Operations(last))
        assert scene.killed_run(pid, after), f"did not reach operation {last}"


CHILD = """
import sys, time
from pathlib import Path
Path(sys.argv[1]).touch()
time.sleep(60)
"""


def test_what_a_killed_command_had_started_ends_with_it(tmp_path: Path) -> None:
    """Else it would compute on the GPU while the next run is timed there."""
    started = tmp_path / "started"
    if not (parent := os.fork()):
        command = [sys.executable, "-c", CHILD, str(started)]
        processes.Children().run(command, timeout=60, env=os.environ)
        os._exit(0)
    wait_for(started.exists)
    (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_for(lambda: not Path("/proc", child).exists())


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)
