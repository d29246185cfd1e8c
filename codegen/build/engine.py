# SPDX-License-Identifier: Apache-2.0
"""The one engine: specs in, kernels, lock and records out; `build`, `--check` and tests call it.

Everything is worked out in memory first. One failing kernel does not hide the others, but if any
fails nothing is written.

What a build may delete: when at least one PATH is a folder, the PATHs together are the whole set
of specs that the output folder belongs to, and a kernel of the last lock without a spec among
them is an orphan. It is removed with its record, but one with evidence that a build cannot bring
back only when `prune` says so. When all PATHs are files the build is partial: every other kernel,
its lock line and its record stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from .. import verify
from ..errors import CheckFailed, Diagnostic, SpecError
from ..host import cache, tools
from ..host.executor import HERE, Executor, Task
from . import captures, lint, manifest, records, render, shipped, toolchain, tree
from .kernel_text import host_digest

DISTRIBUTION = "fmha-gen"
NOT_WRITTEN = "not written"
JINJA2_RANGE = ">=3.1,<4"
COMPILE_SOURCES = (
    "build/toolchain.py",
    "build/captures.py",
    "build/calls.py",
    "ops/cases.py",
    "ops/inputs.py",
    "ops/operation.py",
    "ops/forward.py",
    *captures.SOURCES,
    "build/sass.py",
    "arch/architecture.py",
    "arch/sm90.py",
    "arch/sm100.py",
)

# What tables say of a file, by the kind of its change: when nothing is written because this is a
# check or something was refused, and when all is written.
CHECKED = {"foreign": "not ours"}
REFUSED = {
    "missing": NOT_WRITTEN,
    "changed": NOT_WRITTEN,
    "foreign": "not ours",
    "orphaned": "not removed",
}
WRITTEN = {"missing": "added", "edited": "overwritten", "foreign": "overwritten"}

# ("rendering" or "compiling", kernels done, kernels to do, the one just done)
Progress = Callable[[str, int, int, str], None]
# The finished text of a plan's source, where it is known.
Formatted = Callable[["Plan", str], str | None]


class SpecFile(Protocol):
    """What a build needs to know of a spec."""

    @property
    def stem(self) -> str:
        """Name of the spec's file without its ending, and of the kernel."""
        ...

    @property
    def digest(self) -> str:
        """The sha256 of what the spec says."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user may not expect, in words."""
        ...


class Plan(Protocol):
    """What a build needs to know of a plan."""

    @property
    def stem(self) -> str:
        """Name of the spec's file without its ending, and of the kernel."""
        ...

    @property
    def spec_file(self) -> SpecFile:
        """What it was planned from."""
        ...

    @property
    def compile_arch(self) -> str:
        """What the DSL compiles for, for example `sm_90a`."""
        ...

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one CTA."""
        ...


@dataclass(frozen=True)
class Engine:
    """The parts that a build strings together; tests replace them."""

    load_all: Callable[
        [Sequence[str | Path]], tuple[Sequence[Any], Sequence[Diagnostic]]
    ]
    resolve: Callable[[Any], Plan]
    render_source: Callable[[Any], str]
    format_kernel: Callable[[Any, str], str]  # of a plan and its source
    toolchain_key: Callable[[], str]
    compile_kernel: Callable[[str, str, str], toolchain.CompileReport]


@dataclass(frozen=True)
class Kernel:
    """One kernel as this build made it."""

    stem: str
    text: str
    entry: manifest.Entry
    report: toolchain.CompileReport | None
    shared_bytes: int  # dynamic shared memory that the plan asks for at launch
    rung: str
    state: str  # unchanged, added, changed, overwritten, edited, not ours, missing, not written
    failures: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """Path relative to the output folder."""
        return f"{self.stem}.py"


@dataclass(frozen=True)
class Orphan:
    """A kernel of the last lock that no spec of this build makes.

    rung: as its record says. evidence: the rungs among it that a build cannot bring back.
    """

    stem: str
    rung: str
    state: str  # removed, not removed, orphaned, edited
    evidence: tuple[str, ...]

    @property
    def file(self) -> str:
        """Path relative to the output folder."""
        return f"{self.stem}.py"


@dataclass(frozen=True)
class BuildResult:
    """What a build did, or with `check` what it would do."""

    kernels: tuple[Kernel, ...]
    changes: tuple[tree.Change, ...]
    failures: tuple[str, ...]
    compiles: int  # that really ran, not answered by the cache
    checked: bool
    orphans: tuple[Orphan, ...] = ()
    notes: tuple[str, ...] = ()  # of the specs

    @property
    def ok(self) -> bool:
        """Whether all is as it should be."""
        return not self.failures and not (self.checked and self.changes)


def build(
    paths: Sequence[str | Path],
    out: Path,
    *,
    check: bool = False,
    compile: bool = True,
    executor: Executor = HERE,
    force: bool = False,
    prune: bool = False,
    progress: Progress | None = None,
    engine: Engine | None = None,
) -> BuildResult:
    """Build, or with `check` only compare. Failures are in the result.

    force: overwrite, or delete, what no build wrote. prune: delete kernels of the last build that
    have no spec now, whatever their evidence.

    Raises SpecError with the diagnostics of all specs, EnvironmentProblem when this machine lacks
    what a compile needs, CheckFailed when lock or records cannot be read.
    """
    engine = engine or default_engine()
    plans = plan_all(paths, engine)
    kernels, compiles = make(
        plans,
        engine,
        compile=compile,
        executor=executor,
        progress=progress,
        cached=not check,
        out=out,
    )
    failures = tuple(f"{k.stem}: {failure}" for k in kernels for failure in k.failures)
    if failures:
        left = tuple(replace(kernel, state=NOT_WRITTEN) for kernel in kernels)
        return BuildResult(left, (), failures, compiles, check)

    whole = any(Path(path).is_dir() for path in paths)
    with contextlib.nullcontext() if check else tree.exclusive(out):
        changes, kernels, orphans = _compare(kernels, out, whole)
        if not check:
            failures = _refusals(out, changes, orphans, force=force, prune=prune)
        if not check and not failures:
            tree.apply(out, changes)
    words = CHECKED if check else REFUSED if failures else WRITTEN
    gone = (
        words if words is not WRITTEN else {"orphaned": "removed", "edited": "removed"}
    )
    return BuildResult(
        kernels=tuple(replace(k, state=words.get(k.state, k.state)) for k in kernels),
        changes=tuple(changes),
        failures=failures,
        compiles=compiles,
        checked=check,
        orphans=tuple(replace(o, state=gone.get(o.state, o.state)) for o in orphans),
        notes=tuple(note for plan in plans for note in plan.spec_file.notes),
    )


def make(
    plans: Sequence[Plan],
    engine: Engine,
    *,
    compile: bool = True,
    executor: Executor = HERE,
    progress: Progress | None = None,
    cached: bool = True,
    out: Path | None = None,
) -> tuple[list[Kernel], int]:
    """Render, lint, compile and gate every plan, and write nothing; plans may share a stem.

    out: a folder whose kernels need no formatting where they say just what is rendered now.
    Returns the kernels, what is wrong with each in it, and how many compiles really ran. Raises
    EnvironmentProblem when this machine lacks what a compile needs.
    """
    kernels = []
    formatted = _formatted(out)
    for plan in plans:
        kernels.append(_render(plan, engine, cached=cached, formatted=formatted))
        if progress:
            progress("rendering", len(kernels), len(plans), plan.stem)
    if not compile:
        return kernels, 0
    arches = [plan.compile_arch for plan in plans]
    return compile_all(kernels, arches, engine, executor, progress, cached=cached)


def default_engine() -> Engine:
    """The real parts, imported here so that tests of a build need none of them."""
    from ..planning import plan
    from ..spec import model

    return Engine(
        load_all=model.load_all,
        resolve=plan.resolve,
        render_source=render.render_source,
        format_kernel=lambda resolved, source: render.finish(
            render.format_source(source), resolved.spec_file.digest
        ),
        toolchain_key=toolchain_key,
        compile_kernel=captures.compile_kernel,
    )


def toolchain_key() -> str:
    """Everything that decides a compile beside text and arch; EnvironmentProblem if unsupported."""
    tools.require_dsl()
    disassemblers = {
        name: importlib.metadata.version(name) for name in _installed(tools.TOOLS)
    }
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    code = cache.source_digest(*COMPILE_SOURCES)
    return f"{tools.dsl_distributions()} {disassemblers} {python} {code}"


def tools_line() -> str:
    """Line 1 of the lock, the same on every machine that runs this version."""
    return manifest.tools_line(
        fmha_gen=_version(DISTRIBUTION),
        black=_version("black"),
        jinja2=JINJA2_RANGE,
        dsl=tools.DSL_RANGE,
    )


def plan_all(paths: Sequence[str | Path], engine: Engine) -> list[Plan]:
    """Load and plan every spec; raises one SpecError with the diagnostics of all."""
    specs, found = engine.load_all(paths)
    plans: list[Plan] = []
    diagnostics = list(found)
    for spec in specs:
        try:
            plans.append(engine.resolve(spec))
        except SpecError as error:
            diagnostics.extend(error.diagnostics)
    if diagnostics:
        raise SpecError(diagnostics)
    return plans


def _render(
    plan: Plan, engine: Engine, *, cached: bool, formatted: Formatted
) -> Kernel:
    """Render, format and lint one kernel, or take the latter two from the cache."""
    spec = plan.spec_file.digest
    try:
        source = engine.render_source(plan)
    except CheckFailed as error:
        source, entry = "", _made("", [str(error)])
    else:
        parts = [plan.stem, spec, source, cache.source_digest(), tools_line()]
        name = cache.key("text", parts)
        known = cache.get(name) if cached else None
        if isinstance(known, dict) and known.keys() == {"text", "failures"}:
            entry = known
        else:
            entry = _linted(plan, source, engine, formatted)
            cache.put(name, entry)
    text = entry["text"]
    return Kernel(
        stem=plan.stem,
        text=text,
        entry=manifest.Entry(spec, render.body_digest(text), verify.sha256(source)),
        report=None,
        shared_bytes=plan.smem_bytes,
        rung="rendered",
        state="unchanged",
        failures=tuple(entry["failures"]),
    )


def _linted(
    plan: Plan, source: str, engine: Engine, formatted: Formatted
) -> dict[str, Any]:
    """The text of a kernel, and what is wrong with it."""
    try:
        text = formatted(plan, source) or engine.format_kernel(plan, source)
    except CheckFailed as error:
        return _made("", [str(error)])
    return _made(
        text, [f"line {each.line}: {each.message}" for each in lint.lint(text)]
    )


def _made(text: str, failures: list[str]) -> dict[str, Any]:
    """What the cache keeps of a kernel."""
    return {"text": text, "failures": failures}


def _formatted(out: Path | None) -> Formatted:
    """Finds the text that the last build there made of the same source by the same tools.

    The lock only says that this is so. Whoever can write the file can write the lock, so the text
    also has to say what the source says, comments included.
    """
    lock = None
    if out is not None:
        with contextlib.suppress(CheckFailed):  # told where it is compared
            lock = _read_lock(out)

    def text_of(plan: Plan, source: str) -> str | None:
        entry = lock.entries.get(f"{plan.stem}.py") if lock else None
        spec = plan.spec_file.digest
        if (
            out is None
            or lock is None
            or lock.tools != tools_line()
            or entry is None
            or (entry.spec, entry.rendered) != (spec, verify.sha256(source))
        ):
            return None
        file = out / f"{plan.stem}.py"
        try:
            text = file.read_bytes().decode() if file.is_file() else ""
        except (OSError, UnicodeDecodeError):
            return None
        is_that = entry.body == render.body_digest(text)
        return text if is_that and render.is_formatted(text, source, spec) else None

    return text_of


def compile_all(
    kernels: Sequence[Kernel],
    arches: Sequence[str],
    engine: Engine,
    executor: Executor,
    progress: Progress | None,
    *,
    cached: bool,
) -> tuple[list[Kernel], int]:
    """Compile and gate every kernel that passed so far; the kernels, and how many compiles ran.

    arches: for each kernel what the DSL compiles for, for example `sm_90a`.
    """
    key = engine.toolchain_key()
    done: dict[int, toolchain.CompileReport | CheckFailed] = {}
    names = {}
    todo = {}
    for i, (kernel, arch) in enumerate(zip(kernels, arches, strict=True)):
        if kernel.failures:
            continue
        digest = hashlib.sha256(kernel.text.encode()).hexdigest()
        names[i] = cache.key("sass", [digest, kernel.stem, arch, key])
        report = _cached_report(names[i]) if cached else None
        if report is None:
            source = (kernel.text, kernel.stem, arch)
            arguments = (engine.compile_kernel, names[i], cached, *source)
            todo[i] = Task(kernel.stem, compile_task, arguments)
        else:
            done[i] = report
    numbers = list(todo)
    with contextlib.closing(executor.run(list(todo.values()))) as results:
        for compiled, (number, result) in enumerate(results, start=1):
            i = numbers[number]
            done[i] = result
            if isinstance(result, toolchain.CompileReport):
                cache.put(names[i], result.to_json())
            if progress:
                progress("compiling", compiled, len(todo), kernels[i].stem)
    gated = [_gated(kernel, done.get(i)) for i, kernel in enumerate(kernels)]
    return gated, len(todo)


def compile_task(
    compile_kernel: Callable[[str, str, str], toolchain.CompileReport],
    name: str,
    cached: bool,
    text: str,
    stem: str,
    arch: str,
) -> toolchain.CompileReport:
    """Compile, on a machine that may have a cache of its own. name: of the result in the cache."""
    report = _cached_report(name) if cached else None
    if report is None:
        report = compile_kernel(text, stem, arch)
        cache.put(name, report.to_json())
    return report


def _cached_report(name: str) -> toolchain.CompileReport | None:
    try:
        return toolchain.CompileReport.from_json(cache.get(name) or {})
    except (KeyError, TypeError):
        return None


def _gated(
    kernel: Kernel, result: toolchain.CompileReport | CheckFailed | None
) -> Kernel:
    if result is None:
        return kernel
    if isinstance(result, CheckFailed):
        return replace(kernel, failures=(str(result).removeprefix(f"{kernel.stem}: "),))
    return replace(
        kernel, report=result, rung="compiled", failures=tuple(toolchain.gate(result))
    )


def _compare(
    kernels: Sequence[Kernel], out: Path, whole: bool
) -> tuple[list[tree.Change], list[Kernel], list[Orphan]]:
    """What differs in the output folder; the kernels with the rung they have, and the orphans.

    The state of either is the kind of its file's change.
    """
    lock = _read_lock(out)
    last = lock.entries if lock else {}
    entries = {kernel.file: kernel.entry for kernel in kernels}
    gone = sorted(last.keys() - entries.keys()) if whole else []
    kept = {file: entry for file, entry in last.items() if file not in gone}
    desired = {
        manifest.FILE: manifest.dump(manifest.Manifest(tools_line(), kept | entries))
    }
    rungs = {}
    for kernel in kernels:
        on_disk = _read_record(out, kernel.stem)
        record = _record(kernel, on_disk)
        holds = records.current(
            record, kernel=kernel.stem, body_sha256=kernel.entry.body
        )
        rungs[kernel.stem] = holds["rung"]
        desired[kernel.file] = kernel.text
        if record is not on_disk:
            desired[records.path_of(kernel.stem)] = records.dump(record)
    stems = [Path(file).stem for file in gone]
    unwanted = [*gone, *map(records.path_of, stems)]
    owned = {file: entry.body for file, entry in last.items()}
    changes = tree.compare(out, desired, owned, unwanted)
    kinds = {change.path: change.kind for change in changes}
    known = [
        replace(k, rung=rungs[k.stem], state=kinds.get(k.file, "unchanged"))
        for k in kernels
    ]
    return changes, known, [*_orphans(out, stems, kinds)]


def _orphans(
    out: Path, stems: Sequence[str], kinds: Mapping[str, tree.Kind]
) -> Iterator[Orphan]:
    """Those of the stems that have a file or a record left. kinds: of changes, by path."""
    for stem in stems:
        record = records.path_of(stem)
        kind = kinds.get(f"{stem}.py") or kinds.get(record)
        if kind is not None:
            found = records.evidence(_read_record(out, stem) or {})
            above = tuple(rung for rung in records.ABOVE_BUILD if rung in found)
            yield Orphan(stem, found["rung"], kind, above)


def _read_record(out: Path, stem: str) -> records.Record | None:
    path = records.path_of(stem)
    data = tree.read(out, path)
    return None if data is None else records.parse(data, str(out / path))


def _record(kernel: Kernel, on_disk: records.Record | None) -> records.Record:
    """The record that this build leaves; `on_disk` itself when there is nothing new to say.

    Where there is no evidence for this text, that of the packaged kernel is adopted, as far as it
    is about this text, or about what it compiles to.

    A text that changed and is not compiled leaves the record as it is: only a compile tells whether
    what ran is about the new text, too. Nor is a compile by another version of the DSL than the
    recorded one a reason to write: evidence names the version it was obtained with.
    """
    stem, body = kernel.stem, kernel.entry.body
    fresh = records.current(on_disk, kernel=stem, body_sha256=body)
    known = on_disk
    if not _has_rungs(fresh):
        packaged = shipped.record(stem)
        adopted = records.current(packaged, kernel=stem, body_sha256=body)
        if _has_rungs(adopted):
            fresh = known = adopted
        elif on_disk is None or not _has_rungs(records.evidence(on_disk)):
            known = packaged
    if kernel.report is not None:
        result = kernel.report.to_json() | {
            "shared_bytes": kernel.shared_bytes,
            records.HOST: host_digest(kernel.text),
        }
        if fresh.get("compiled", {}).get("dsl") in (None, kernel.report.dsl):
            fresh = records.merge_rung(
                known, kernel=stem, body_sha256=body, rung="compiled", result=result
            )
    elif on_disk is not None and not _has_rungs(fresh):
        above = records.evidence(on_disk).keys() & set(records.ABOVE_BUILD)
        fresh = on_disk if above else fresh
    return on_disk if on_disk is not None and fresh == on_disk else fresh


def _has_rungs(record: records.Record) -> bool:
    return bool(record.keys() & records.RUNGS.keys())


def _read_lock(out: Path) -> manifest.Manifest | None:
    data = tree.read(out, manifest.FILE)
    if data is None:
        return None
    # What is no text is no entry either.
    text = data.decode("utf-8", errors="replace")
    return manifest.parse(text, str(out / manifest.FILE))


def _refusals(
    out: Path,
    changes: Sequence[tree.Change],
    orphans: Sequence[Orphan],
    *,
    force: bool,
    prune: bool,
) -> tuple[str, ...]:
    """Why nothing is written; empty when nothing would be lost."""
    found = []
    for change in changes:
        if change.kind in ("edited", "foreign") and not force:
            found.append(_refusal(out, change))
    for orphan in orphans:
        if orphan.evidence and not prune:
            rungs = ", ".join(orphan.evidence)
            found.append(
                f"{out / orphan.file}: {rungs}, and no spec of this build makes it;"
                " --prune deletes it with its record (naming spec files instead of a"
                " folder keeps it)"
            )
    return tuple(found)


def _refusal(out: Path, change: tree.Change) -> str:
    whose = "edited by hand"
    if change.kind == "foreign":
        whose = "fmha-gen never wrote it"
    elif tree.intact(
        (tree.read(out, change.path) or b"").decode(errors="replace"), None
    ):
        whose = f"whole, but not the text that {manifest.FILE} has (of another build?)"
    if change.desired is None:
        return f"{out / change.path}: {whose}; --force deletes it"
    return (
        f"{out / change.path}: {whose}; --force overwrites it. The build would do:\n"
        f"{tree.shortened(change.diff).rstrip()}"
    )


def _installed(tools: Mapping[str, str]) -> list[str]:
    """The tools' distributions that are there; a tool may also come from PATH."""
    names = []
    for name in tools.values():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            names.append(name)
    return names


@functools.cache
def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "0"  # run from a source tree that is not installed
