# SPDX-License-Identifier: Apache-2.0
"""One kernel on one side of a comparison: its text, and what is known about that very text.

All that a text says is read from the text itself, so that a kernel of another revision, which other
templates made, is read like one of today.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..build import records, toolchain
from ..build.kernel_text import host_digest
from ..build.render import body_digest, stated_digests
from ..errors import CheckFailed

Loops = Mapping[str, Mapping[str, int]]

_SHARED: Final = re.compile(r"^Shared memory: (\d+) bytes per CTA", re.MULTILINE)
_UNIT: Final = re.compile(r"^([A-Z][A-Z0-9_]*) = \S+  # \[([^\]]*)\]", re.MULTILINE)
_DIGEST_LINE: Final = re.compile(r"^spec sha256:.*\n", re.MULTILINE)
_BARRIERS: Final = "_mbar"  # ends the name of a ring's barriers in shared memory


@dataclass(frozen=True)
class KernelState:
    """A kernel as one side has it.

    origin: where the text is from, for people. path: what to give to `fmha-gen validate`. record:
    only what holds for this text. compiled: as `CompileReport.to_json` has it, from the
    record or from a compile of today, None when nobody measured. recorded: all that the record's
    file has. failures: why it cannot ship.
    """

    stem: str
    text: str
    origin: str
    path: str
    record: records.Record
    compiled: Mapping[str, Any] | None = None
    recorded: Mapping[str, Any] | None = None
    failures: tuple[str, ...] = ()
    built: bool = True

    @property
    def kernels(self) -> Mapping[str, Mapping[str, Any]]:
        """What the compile says of each kernel, as `records.kernels` has it; empty without one."""
        return records.kernels(self.compiled, self.stem) if self.compiled else {}

    @property
    def loops(self) -> Mapping[str, Loops]:
        """By kernel and by the name of a loop, its instructions by opcode class and `total`."""
        found = ((name, _named(each["loops"])) for name, each in self.kernels.items())
        return {name: loops for name, loops in found if loops}

    @property
    def body(self) -> str:
        """The sha256 of the text without its digest line."""
        return str(self.record["body_sha256"])

    @property
    def rung(self) -> str:
        """The highest rung that holds for this text; a compile of today counts."""
        rung = str(self.record["rung"])
        compiles = self.compiled is not None and not self.failures
        return "compiled" if rung == "rendered" and compiles else rung

    @property
    def lines(self) -> list[str]:
        """The text's lines without the one that holds the digests, which always changes."""
        return _DIGEST_LINE.sub("", self.text, count=1).splitlines()

    @functools.cached_property
    def code(self) -> str:
        """The syntax tree without docstrings, as text; equal means equal but for comments."""
        tree = self._parsed()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (
                ast.get_docstring(node, clean=False) is not None
            ):
                del node.body[0]
        return ast.dump(tree)

    @property
    def spec(self) -> dict[str, Any]:
        """What the file's SPEC says; empty when it has none, or one that is no literal."""
        for name, value in self._assigned():
            if name == "SPEC":
                try:
                    said = ast.literal_eval(value)
                except (ValueError, TypeError):
                    return {}
                return said if isinstance(said, dict) else {}
        return {}

    @property
    def constants(self) -> dict[str, int | float]:
        """The numbers of the constants block, by name and in the file's order."""
        found: dict[str, int | float] = {}
        for name, value in self._assigned():
            if name.isupper():
                number = _number(value, found)
                if number is not None:
                    found[name] = number
        return found

    @property
    def units(self) -> dict[str, str]:
        """The unit of each constant that states one."""
        return dict(_UNIT.findall(self.text))

    @property
    def barriers(self) -> dict[str, int]:
        """How many mbarriers each ring has in shared memory."""
        numbers = self.constants
        found = {}
        fields = (
            node
            for scope in self._tree.body
            if isinstance(scope, ast.ClassDef)
            for node in scope.body
        )
        for node in fields:
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and node.target.id.endswith(_BARRIERS)
                and isinstance(node.annotation, ast.Subscript)
                and isinstance(node.annotation.slice, ast.Tuple)
            ):
                count = _number(node.annotation.slice.elts[-1], numbers)
                if isinstance(count, int):
                    found[node.target.id.removesuffix(_BARRIERS)] = count
        return found

    @property
    def shared_bytes(self) -> int | None:
        """Dynamic shared memory of a CTA, as the header says it."""
        match = _SHARED.search(self.text)
        return int(match.group(1)) if match else None

    def _assigned(self) -> Iterator[tuple[str, ast.expr]]:
        """The names that the module sets, with or without an annotation."""
        for node in self._tree.body:
            if isinstance(node, ast.Assign):
                target = node.targets[0]
            elif isinstance(node, ast.AnnAssign):
                target = node.target
            else:
                continue
            if isinstance(target, ast.Name) and node.value is not None:
                yield target.id, node.value

    @functools.cached_property
    def _tree(self) -> ast.Module:
        return self._parsed()

    def _parsed(self) -> ast.Module:
        try:
            return ast.parse(self.text)
        except SyntaxError as error:
            raise CheckFailed(
                f"{self.origin}: {self.stem} is not Python: line {error.lineno}: {error.msg}"
            ) from error


def load(file: Path, record: Path) -> KernelState:
    """Read a kernel's file and its record's, if there is one.

    Raises CheckFailed when either cannot be read, or the file is no kernel of ours.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckFailed(f"{file}: cannot be read: {error}") from error
    if stated_digests(text) is None:
        raise CheckFailed(f"{file}: not a kernel that fmha-gen made: no digest line")
    return of_text(
        file.stem, text, records.load(record), origin=str(file), path=str(file)
    )


def of_text(
    stem: str,
    text: str,
    record: Mapping[str, Any] | None,
    *,
    origin: str,
    path: str,
) -> KernelState:
    """A kernel of a text; of the record counts what holds for this text."""
    evidence = records.current(record, kernel=stem, body_sha256=body_digest(text))
    return KernelState(stem, text, origin, path, evidence, _compiled(evidence), record)


def with_compile(
    state: KernelState, report: toolchain.CompileReport | None
) -> KernelState:
    """A state that was compiled today, with what ran of another text as far as that holds.

    A compile by another version of the DSL than the recorded one says nothing about what ran.
    """
    if report is None:
        return replace(state, compiled=None)
    data = report.to_json()
    known = dict((state.recorded or {}).get("compiled", {}))
    if known.get("dsl") != report.dsl:
        return replace(state, compiled=data)
    result = {**data, records.HOST: host_digest(state.text)}
    if "shared_bytes" in known:
        result["shared_bytes"] = state.shared_bytes
    record = records.merge_rung(
        state.recorded,
        kernel=state.stem,
        body_sha256=state.body,
        rung="compiled",
        result=result,
    )
    return replace(state, compiled=data, record=record)


def _compiled(evidence: records.Record) -> Mapping[str, Any] | None:
    """What a record says of a compile; None when it is not said the way it is today."""
    said = dict(evidence.get("compiled", {}))
    for name in ("body_sha256", "shared_bytes", records.HOST):  # the record's own
        said.pop(name, None)
    if any("role" not in loop for loop in said.get("loops", ())):
        said["loops"] = []  # counted in another way, of one kernel: not to be compared
    try:
        return toolchain.CompileReport.from_json(said).to_json()
    except (KeyError, TypeError):
        return None


def _named(loops: Iterable[Mapping[str, Any]]) -> Loops:
    """Name the loops of a compile report by their roles: of two, the shorter has no mask."""
    found: dict[str, Mapping[str, int]] = {}
    for loop in sorted(loops, key=lambda each: int(each["instructions"]["total"])):
        role = loop["role"]
        names = [role, f"masked {role}", *(f"{role} {n}" for n in range(3, 9))]
        free = next(name for name in names if name not in found)
        found[free] = loop["instructions"]
    return found


def _number(node: ast.expr, names: Mapping[str, int | float]) -> int | float | None:
    """The value of a number, a name of one, or a product; None for anything else."""
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
        return None
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand, names)
        return None if value is None else -value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _number(node.left, names), _number(node.right, names)
        return None if left is None or right is None else left * right
    return None
