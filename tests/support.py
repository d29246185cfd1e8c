# SPDX-License-Identifier: Apache-2.0
"""What several folders of tests share: where things are, accepted texts, and a spec's kernel."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import jinja2.meta
import pytest
from fmha_gen.build import render
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.host import cache
from fmha_gen.ops import cases
from fmha_gen.ops.operation import Operation
from fmha_gen.planning import plan
from fmha_gen.planning.kernel_plan import KernelPlan
from fmha_gen.spec.model import SpecFile, load_specs
from packaging.requirements import Requirement

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
SPECS = ROOT / "specs"
GENERATED = ROOT / "generated"
SHIPPED = sorted(path.stem for path in SPECS.glob("*.yaml"))

# One of each structure.
STRUCTURES = (
    "sm90_d128_bf16_full_c2x1_kvmc",  # cluster along the queries, multicast
    "sm90_d128_bf16_causal_lse",  # two loops, and QK of the next tile beside PV of the last
    "sm90_d256_bf16_full",  # one Q stage: tiles do not overlap
    "sm90_d128_bf16_causal_gqa8_c1x2_kvmc",  # cluster along the heads of one KV head
    "sm100_d128_bf16_causal_gqa4_lse",  # roles of their own, tensor memory
    "sm100_d128_bf16_causal_gqa4_c2x1_cta2_lse",  # a pair of CTAs per MMA
    "sm100_d128_bf16_causal_gqa4_c2x1_kvmc_lse",  # multicast over two query tiles
    "sm100_d192x128_bf16_causal_lse",  # V smaller than K, halves take turns to store O
    "sm100_d256_bf16_causal_gqa4_c2x1_cta2_lse",  # a pair, S of two blocks in turn
)

ALL = "FMHA_GEN_ALL"  # `1` runs what `rotated` leaves out as well
ACCEPT = "FMHA_GEN_ACCEPT"  # `1` makes what is now the accepted text, and prints what changed


def check_accepted(golden: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that a text is the accepted one, or accept it and print the difference."""
    known = golden.read_text("utf-8") if golden.exists() else ""
    difference = unified_diff(
        known, text, f"{golden.name} (accepted)", f"{golden.name} (now)"
    )
    if difference and os.environ.get(ACCEPT) == "1":
        with capsys.disabled():
            print(difference)
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text, "utf-8")
        return
    assert not difference, f"{difference}\n{ACCEPT}=1 accepts this"


def unified_diff(old: str, new: str, old_name: str, new_name: str) -> str:
    """Return a unified diff with the usual three lines of context; empty when they are equal."""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), old_name, new_name
    )
    return "".join(lines)


def load_text(text: str, stem: str = "candidate") -> SpecFile:
    """Return the spec of a file with this text; raises SpecError as `load_specs` does."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{stem}.yaml")
        file.write_text(text, "utf-8")
        (spec,) = load_specs([file])
    return spec


@functools.cache
def spec_file(stem: str) -> SpecFile:
    """Return the spec of a shipped kernel."""
    (spec,) = load_specs([SPECS / f"{stem}.yaml"])
    return spec


@functools.cache
def shipped_plan(stem: str) -> KernelPlan:
    """Return the plan of a shipped kernel."""
    return plan.resolve(spec_file(stem))


@functools.cache
def constants(stem: str) -> dict[str, Any]:
    """Return the module-level constants of a shipped kernel; its text takes 20 ms to parse."""
    return read_constants((GENERATED / f"{stem}.py").read_text("utf-8"))


@functools.cache
def cases_of(stem: str) -> tuple[dict[str, Any], cases.Tiles, tuple[cases.Case, ...]]:
    """The SPEC of a shipped kernel, its tiles and its cases, which take 30 ms to make."""
    known = constants(stem)
    spec, tiles = known["SPEC"], cases.tiles_of(known)
    return spec, tiles, cases.cases_for(spec, tiles)


@functools.cache
def shipped(operation: Operation) -> tuple[str, ...]:
    """The shipped kernels of one operation, for tests about what no other operation has."""
    return tuple(stem for stem in SHIPPED if spec_file(stem).spec.op == operation.name)


@functools.cache
def sample(arch: str, operation: Operation) -> list[str]:
    """Few shipped kernels with every structure, flag, head dim and cluster that the others of the
    operation have.

    For tests that take seconds a kernel, where a record stands for the others. A kernel compiles
    once for all tests that ask for its cases (tests/emulator/rehearsals.py): take them from here.
    """
    of_arch = [stem for stem in shipped(operation) if stem.startswith(f"{arch}_")]
    kernels = {stem: _traits(stem) for stem in of_arch}
    chosen = [stem for stem in STRUCTURES if stem in kernels]
    left = set().union(*kernels.values()).difference(*map(kernels.get, chosen))
    while left:
        chosen.append(max(kernels, key=lambda stem: len(left & kernels[stem])))
        left -= kernels[chosen[-1]]
    return chosen


def picked(names: Iterable[T], count: int) -> list[T]:
    """So many of the names, others after each change of the package or of a generated kernel."""

    places = {
        hashlib.sha256(f"{_state()}{name}".encode()).hexdigest(): name for name in names
    }
    chosen = {*sorted(places)[:count]}
    return [name for place, name in places.items() if place in chosen]


def rotated(table: Collection[T], count: int) -> list[T]:
    """The same of a table whose rows take seconds each; FMHA_GEN_ALL=1 runs all of it."""
    return picked(table, len(table) if os.environ.get(ALL) == "1" else count)


@functools.cache
def _state() -> str:
    return cache.source_digest() + (GENERATED / "MANIFEST.lock").read_text("utf-8")


def _traits(stem: str) -> set[tuple[str, Any]]:
    kernel = shipped_plan(stem)
    spec, numbers = kernel.spec_file.spec, (*kernel.chosen, *kernel.derived)
    fields = ("head_dim", "cluster", "multicast", "cta_group")
    found = {(name, str(getattr(spec, name))) for name in fields}
    found |= {(each.name, each.value) for each in numbers if each.name == "TILE_Q"}
    return found | set(render.decided(kernel.context)[0].items())


@functools.lru_cache(maxsize=64)
def kernel_text(text: str, stem: str = "candidate") -> str:
    """Return the kernel that a spec of this text gives. Rendering takes some 0.3 s."""
    return render.render_kernel(plan.resolve(load_text(text, stem)))


NO_WINDOW = {"left": "none", "right": "none"}


def with_lists_that_fit(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, without block lists where those do not go with the others."""
    fits = fields["cluster"] == [1, 1] and not fields.get("pack_gqa")
    fits &= (
        not {"alibi", "score", "bias"} & fields.keys() or fields.get("score") == FACTOR
    )
    return fields if fits else fields | {"blocks": "derived"}


FACTOR = "0.5 * s"  # orders like s
SCORES: list[dict[str, Any]] = [
    {"alibi": True},
    {"score": "2 * s + (kv - q) / 64"},
    {"score": FACTOR},
    {"score": "where(kv < 4, s, max(s, -8) - 0.125 * abs(kv - q))"},
    {"bias": "bf16"},
    {"bias": {"shape": [1, "h", "q", "kv"], "dtype": "fp32"}},
    {"bias": {"shape": ["b", 1, 1, "kv"], "dtype": "fp16"}},
]
"""Fields that say what scores are, but for a softcap; a spec has one of them."""


def with_scores(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec, with those that `of_scores` has in its place."""
    others = {name: value for name, value in fields.items() if name != "of_scores"}
    return {**others, **fields["of_scores"]}


def hides_keys(fields: dict[str, Any]) -> bool:
    """Whether each side of the window does, by the mask and fixed lengths (FG214)."""
    left, right = fields["window"]["left"], fields["window"]["right"]
    q, kv = fields["seqlen"]["q"], fields["seqlen"]["kv"]
    if right != "none" and fields["mask"] == "causal":
        return False
    return all(
        "none" in (side, length) or length == "dynamic" or side < length - 1
        for side, length in ((left, kv), (right, q))
    )


def link_distributions(folder: Path, *names: str) -> None:
    """Make a folder the site-packages that `pip install` of these alone would leave, by links."""
    for name in set().union(*map(_closure, names)):
        distribution = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or []}
        for top in tops - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))))


def _closure(distribution: str) -> set[str]:
    """Return the distribution and all that pip installs with it."""
    found: set[str] = set()
    todo = [distribution]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return found


def template_closure(name: str) -> set[str]:
    """Return a template and all it includes, imports or extends, at any depth."""
    environment = render.environment()
    assert environment.loader is not None
    found: set[str] = set()
    todo = [name]
    while todo:
        current = todo.pop()
        if current not in found:
            found.add(current)
            text = environment.loader.get_source(environment, current)[0]
            referenced = jinja2.meta.find_referenced_templates(environment.parse(text))
            todo += [each for each in referenced if each is not None]
    return found


def changed_lines(difference: str) -> tuple[list[str], list[str]]:
    """Return (removed, added) lines of a unified diff."""
    lines = [line for line in difference.splitlines() if line[:3] not in ("---", "+++")]
    removed = [line[1:] for line in lines if line.startswith("-")]
    added = [line[1:] for line in lines if line.startswith("+")]
    return removed, added
