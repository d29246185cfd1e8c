# SPDX-License-Identifier: Apache-2.0
"""`fmha-gen vendor`: works out what each file of the folder becomes, then writes all at once."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import verify
from ..build import manifest, records, tree
from ..diff import kernels, report
from ..diff.compare import KernelChange, compare
from ..diff.kernels import KernelState
from ..errors import CheckFailed
from ..verify import Lock
from . import contents, merge
from .merge import Step
from .source import Source, named, open_source


@dataclass(frozen=True)
class Options:
    """What to bring, and where to.

    kernels: names or files to bring in; with `update` there are none, and those that are in the
    folder are renewed. init: also write the package's `__init__.py`, which later calls keep.
    adapters: of `contents.ADAPTERS`, files of the package, which is written with them.
    """

    into: Path
    source: Path
    kernels: tuple[str, ...] = ()
    init: bool = False
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """What became of each file. changes: of kernels that were there, from now to what is newer."""

    steps: tuple[Step, ...]
    changes: tuple[KernelChange, ...]
    diffs: Mapping[str, str]  # of other files that were refused, unreadable kernels too
    gone: tuple[str, ...]  # kernels that are no longer generated, and stay

    @property
    def refused(self) -> list[Step]:
        """The files that were edited and have something newer."""
        return [step for step in self.steps if step.action == "refuse"]


def vendor(options: Options) -> Result:
    """Bring kernels into a folder, all files or none; what was edited there stays.

    Raises CheckFailed when the source or the folder's lock is not in order, EnvironmentProblem
    when the folder cannot be written.
    """
    into = options.into
    folder, wanted = named(options.kernels, options.source)
    source = open_source(folder)
    if not wanted and not (into / verify.LOCK).exists():
        raise CheckFailed(f"{into}: nothing was vendored there: no {verify.LOCK}")
    if (into / manifest.FILE).exists():
        raise CheckFailed(f"{into}: fmha-gen build writes there: take another folder")
    for name in options.adapters:
        if name not in contents.ADAPTERS:
            known = ", ".join(contents.ADAPTERS)
            raise CheckFailed(f"{name}: no adapter is for this, only: {known}")
    for stem in wanted:
        if _stem(f"{stem}.py") is None:
            raise CheckFailed(f"{stem}: a file of the package has this name")
        source.load(stem)  # before the folder is made
    with tree.exclusive(into):
        lock = _read_lock(into)
        work = _Work(into, source, lock)
        for stem in sorted({*filter(None, map(_stem, lock.entries)), *wanted}):
            work.kernel(stem, asked=stem in wanted)
        work.others(options)
        result = work.result()
        tree.apply(into, work.changes_on_disk())
    return result


def stems_in(into: Path) -> list[str]:
    """The kernels that were vendored into a folder; raises CheckFailed for a lock that is none."""
    return sorted(filter(None, map(_stem, _read_lock(into).entries)))


class _Work:
    """The folder file by file; nothing is written before all is known."""

    def __init__(self, into: Path, source: Source, lock: Lock) -> None:
        self.into = into
        self.source = source
        self.lock = lock
        self.steps: list[Step] = []
        self.gone: list[str] = []
        self.kernels: list[tuple[KernelState, bool]] = []  # that stay, whether edited

    def kernel(self, stem: str, *, asked: bool) -> None:
        """Bring or leave one kernel and its record; forget one that was deleted here."""
        path, record = f"{stem}.py", records.path_of(stem)
        base = self.lock.entries.get(path)
        base_record = self.lock.entries.get(record)
        if base is not None and not asked and not (self.into / path).exists():
            self.steps.append(merge.drop(self.into, path, base))
            if base_record is not None:
                self.steps.append(merge.drop(self.into, record, base_record))
            return
        known = stem in self.source.stems()
        if not known and not asked and base is not None:
            self.gone.append(stem)
            step = merge.leave(self.into, path, base)
        else:
            new = self.source.load(stem)
            step = merge.bring(self.into, path, new.text, base)
        self.steps.append(step)
        if step.action == "refuse" or not known:
            if base_record is not None:
                self.steps.append(merge.leave(self.into, record, base_record))
        else:
            text = records.dump(new.record)
            self.steps.append(merge.bring(self.into, record, text, base_record))
        if step.entry is not None:
            self.kernels.append((self._state_after(step), step.edited))

    def others(self, options: Options) -> None:
        """README, licence, package and adapters, which say what the kernels are after this."""
        if not self.kernels:
            raise CheckFailed(f"{self.into}: no kernel would be left")
        self.kernels.sort(key=lambda each: contents.naturally(each[0].stem))
        states = [state for state, _ in self.kernels]
        adapters = [
            name
            for name, file in contents.ADAPTERS.items()
            if name in options.adapters or self._brought(file)
        ]
        init = options.init or bool(adapters) or self._brought(contents.PACKAGE)
        name = self.into.resolve().name
        if init and (not name.isidentifier() or keyword.iskeyword(name)):
            raise CheckFailed(f"{self.into}: a package cannot have this name")
        if "pytorch" in adapters and not any(map(contents.gives_lse, states)):
            raise CheckFailed(
                f"{self.into}: PyTorch's SDPA wants an lse, and no kernel gives one"
            )
        if init and (alone := contents.unpaired(states)):
            raise CheckFailed(
                f"{self.into}: no forward kernel gives the lse that {', '.join(alone)} reads:"
                " vendor one that says lse: true, and is for the same problem, beside it"
            )
        texts = {
            contents.LICENSE: contents.licence(),
            contents.README: contents.readme(
                self.source,
                self._commit(),
                self.kernels,
                name if init else None,
                adapters,
            ),
        }
        if init:
            texts[contents.PACKAGE] = contents.package(states)
        for each in adapters:
            texts[contents.ADAPTERS[each]] = contents.adapter(each, name)
        for path, text in texts.items():
            base = self.lock.entries.get(path)
            self.steps.append(merge.bring(self.into, path, text, base))
        self.steps.append(self._lock())

    def _lock(self) -> Step:
        """The lock of all files so far; it is always ours, and no entry of itself."""
        entries = {s.path: s.entry for s in self.steps if s.entry is not None}
        line = f"fmha-gen=={self.source.version} commit:{self._commit()}"
        text = verify.dump(Lock(line, entries))
        return merge.put(self.into, verify.LOCK, text)

    def _brought(self, path: str) -> bool:
        """Whether a file of ours is in the folder; one that was deleted there stays away."""
        return path in self.lock.entries and (self.into / path).exists()

    def changes_on_disk(self) -> list[tree.Change]:
        """What to write and delete, the lock included."""
        desired = {
            step.path: step.new
            for step in self.steps
            if step.action == "write" and step.new is not None
        }
        orphans = [step.path for step in self.steps if step.action == "delete"]
        return tree.compare(self.into, desired, {}, orphans)

    def result(self) -> Result:
        """What happens, for people."""
        changes = []
        texts = {}
        for step in self.steps:
            if step.new is None or step.action not in ("write", "refuse"):
                continue
            if change := self._compared(step):
                changes.append(change)
            elif step.action == "refuse":
                texts[step.path] = step.new
        return Result(
            steps=tuple(self.steps),
            changes=tuple(changes),
            diffs={c.path: c.diff for c in tree.compare(self.into, texts, {})},
            gone=tuple(self.gone),
        )

    def _compared(self, step: Step) -> KernelChange | None:
        """What something newer changes in a kernel; None if it was none, or is unreadable."""
        if step.local is None or not _stem(step.path):
            return None
        before = self._state(step.path, step.local.decode("utf-8", "replace"))
        after = self.source.load(Path(step.path).stem)
        try:
            return compare(before, after)
        except (CheckFailed, ValueError):
            if not step.edited:
                raise
            return None

    def _state_after(self, step: Step) -> KernelState:
        if step.new is None or step.edited:
            return self._state(step.path, step.text)
        return self.source.load(Path(step.path).stem)

    def _state(self, path: str, text: str) -> KernelState:
        """A kernel as it lies in the folder."""
        file = self.into / path
        try:
            record = records.load(self.into / records.path_of(file.stem))
        except CheckFailed:  # edited to be none
            record = None
        return kernels.of_text(
            file.stem, text, record, origin=str(file), path=str(file)
        )

    def _commit(self) -> str:
        stems = {state.stem for state, _ in self.kernels} - {*self.gone}
        return self.source.commit(stems)


def to_text(result: Result, into: Path) -> str:
    """A line per file that is not simply as it was, then what changes in kernels."""
    lines = []
    for step in sorted(result.steps, key=lambda step: step.path):
        if said := _said(step):
            lines.append(f"{said}: {into / step.path}")
            lines += [f"  {into / step.path}{edit}" for edit in step.edits]
    lines += [f"no longer generated, stays: {into / stem}.py" for stem in result.gone]
    edited = [step for step in result.steps if step.edited]
    if edited:
        stems = " ".join(filter(None, (_stem(step.path) for step in edited)))
        again = f": fmha-gen vendor {stems} --into {into}" if stems else ""
        lines.append(
            "To take our text of a file that was edited, move yours away and vendor it"
            f" again{again}"
        )
    blocks = ["\n".join(lines or ["nothing newer"])]
    if result.changes:
        blocks.append(report.render(result.changes).rstrip())
    return "\n\n".join([*blocks, *(diff.rstrip() for diff in result.diffs.values())])


def _said(step: Step) -> str:
    if step.action == "write":
        added = step.local is None
        layout = " (was reformatted here)" if step.state == "reformatted" else ""
        return "added" if added else f"updated{layout}"
    if step.action == "refuse":
        return "left alone, edited here, though something newer is there"
    if step.action == "delete":
        return "deleted"
    if step.local is None:
        return "left out, deleted here"
    return "stays as it was edited here" if step.edited else ""


def _stem(path: str) -> str | None:
    """The kernel whose file this is; None when it is none's."""
    is_kernel = path.endswith(".py") and path not in contents.CODE
    return path.removesuffix(".py") if is_kernel else None


def _read_lock(into: Path) -> Lock:
    try:
        return verify.read_lock(into) or Lock("", {})
    except verify.Unverifiable as error:
        raise CheckFailed(str(error)) from error
