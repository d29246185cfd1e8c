# SPDX-License-Identifier: Apache-2.0
"""`generated/` is what the specs say, to the byte and to the file, and its records are current."""

from __future__ import annotations

import time
from pathlib import Path

import black
import pytest
import support
from fmha_gen.arch import ARCHITECTURES
from fmha_gen.build import calls, engine, manifest, records, render
from fmha_gen.host import cache
from fmha_gen.ops import OPERATIONS
from fmha_gen.ops.backward import BACKWARD
from fmha_gen.ops.forward import FORWARD
from fmha_gen.ops.operation import Operation
from support import GENERATED, SHIPPED, SPECS

MODE = black.Mode(target_versions={black.TargetVersion.PY310})


def record_of(stem: str) -> tuple[records.Record | None, str | None]:
    """Return a shipped kernel's record, and why it does not speak for the file (None: it does)."""
    text = (GENERATED / f"{stem}.py").read_text("utf-8")
    record = records.load(GENERATED / records.path_of(stem))
    body = render.body_digest(text)
    return record, records.staleness(record, kernel=stem, body_sha256=body)


def test_generated_is_what_the_specs_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty cache, too: what is formatted already is not formatted anew."""
    some, begin = SHIPPED[::16], time.process_time()
    for stem in some:
        black.format_str((GENERATED / f"{stem}.py").read_text("utf-8"), mode=MODE)
    formatting = (time.process_time() - begin) * len(SHIPPED) / len(some)
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path))
    formatted, format_source = [], render.format_source
    monkeypatch.setattr(
        render,
        "format_source",
        lambda text: formatted.append(text) or format_source(text),
    )
    begin = time.process_time()
    result = engine.build([SPECS], GENERATED, check=True, compile=False)
    took = time.process_time() - begin
    assert result.failures == ()
    changes = [
        f"{change.kind}: {change.path}\n{change.diff}" for change in result.changes
    ]
    assert not changes, "\n".join([*changes, "run: fmha-gen build specs/"])
    assert [kernel.stem for kernel in result.kernels] == SHIPPED
    assert not formatted
    assert took < formatting


@pytest.mark.parametrize("stem", support.rotated(SHIPPED, 8))
def test_formatted_anew_it_is_the_same(stem: str) -> None:
    text = (GENERATED / f"{stem}.py").read_text("utf-8")
    assert render.render_kernel(support.shipped_plan(stem)) == text
    assert black.format_str(text, mode=MODE) == text


def test_generated_holds_nothing_else() -> None:
    found = {
        path.relative_to(GENERATED).as_posix()
        for path in GENERATED.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    kernels = {f"{stem}.py" for stem in SHIPPED}
    journals = {f"{records.FOLDER}/{stem}.tune.jsonl" for stem in SHIPPED}
    needed = kernels | {manifest.FILE, "README.md"} | set(map(records.path_of, SHIPPED))
    assert found - journals == needed


def test_there_are_specs_for_every_axis() -> None:
    specs = [support.shipped_plan(stem).spec_file.spec for stem in SHIPPED]
    assert 16 <= len(specs) <= 200
    assert {spec.op for spec in specs} == {*OPERATIONS}
    assert {spec.deterministic for spec in specs} == {True, False}
    assert {spec.dtype for spec in specs} == {"bf16", "fp16", "e4m3"}
    heads = {(spec.head_dim.qk, spec.head_dim.v) for spec in specs}
    assert heads >= {(n, n) for n in (32, 64, 80, 96, 128, 160, 192, 256)}
    assert (192, 128) in heads
    assert {spec.mask for spec in specs} > {"none", "causal"}  # and expressions
    sides = {
        (spec.window.left == "none", spec.window.right == "none") for spec in specs
    }
    assert sides == {(True, True), (False, True), (False, False)}
    assert {spec.lse for spec in specs} == {True, False}
    assert {spec.sink for spec in specs} == {True, False}
    assert {spec.alibi for spec in specs} == {True, False}
    assert {spec.score == "none" for spec in specs} == {True, False}
    assert {spec.bias.dtype for spec in specs} == {"none", "bf16"}
    assert {spec.cluster for spec in specs} == {(1, 1), (2, 1), (1, 2)}
    assert {spec.multicast for spec in specs} == {"none", "k", "v", "kv"}
    assert {1, 4, 8} <= {spec.heads.q_per_kv for spec in specs}
    assert {spec.pack_gqa for spec in specs} == {True, False}
    assert {spec.tile.q for spec in specs} >= {None, 64, 128, 192}
    assert {spec.schedule for spec in specs} == {"persistent", "single"}
    assert {spec.stages.v is None for spec in specs} == {True, False}
    fixed = {
        (spec.seqlen.q != "dynamic", spec.seqlen.kv != "dynamic") for spec in specs
    }
    assert fixed == {(False, False), (True, False), (False, True), (True, True)}


EMULATED = ("emulated", "run: fmha-gen emulate generated/")
# With this very body, and by which command: sm100 has no GPU at hand.
VALIDATED = ("validated", "run on an H100 or H200: fmha-gen validate generated/")
PROMISED = {
    ("sm90", FORWARD.name): VALIDATED,
    ("sm100", FORWARD.name): EMULATED,
    ("sm90", BACKWARD.name): VALIDATED,
    ("sm100", BACKWARD.name): EMULATED,
}


@pytest.mark.parametrize("stem", SHIPPED)
def test_record_is_current_and_of_the_promised_rung(stem: str) -> None:
    record, stale = record_of(stem)
    spec = support.shipped_plan(stem).spec_file.spec
    rung, how = PROMISED[spec.arch, spec.op]
    assert stale is None, f"{stem} {stale}; {how}"
    assert record is not None
    assert {"compiled", rung} <= record.keys(), f"is only {record['rung']}; {how}"
    order = list(records.RUNGS)
    assert order.index(record["rung"]) >= order.index(rung)


@pytest.mark.parametrize("stem", SHIPPED)
def test_launch_of_a_record_is_that_of_the_calls_of_today(stem: str) -> None:
    record, _ = record_of(stem)
    assert record is not None
    today = calls.probes((GENERATED / f"{stem}.py").read_text("utf-8"))
    assert record["compiled"]["calls_sha256"] == calls.digest(today), "run: make build"


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_are_not_longer_than_a_reviewer_reads(
    arch: str, operation: Operation
) -> None:
    """A mean: no correct kernel is refused for its length."""
    texts = [
        (GENERATED / f"{stem}.py").read_text("utf-8")
        for stem in support.shipped(operation)
        if stem.startswith(f"{arch}_")
    ]
    mean = sum(len(text.splitlines()) for text in texts) / len(texts)
    assert mean <= ARCHITECTURES[arch].mean_lines[operation.name]
