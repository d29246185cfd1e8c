# SPDX-License-Identifier: Apache-2.0
"""The gate: every shipped kernel holds in the emulator, and a damaged one does not."""

from __future__ import annotations

import zlib

import pytest
import support
from fmha_gen.build import captures, device_code, kernel_text, records
from fmha_gen.evidence import emulate, rehearsal
from fmha_gen.host.executor import Local
from fmha_gen.host.processes import of_kind, read_events
from fmha_gen.ops.backward import BACKWARD
from fmha_gen.ops.cases import cases_for, tiles_of
from fmha_gen.ops.forward import FORWARD
from support import GENERATED

from tests.emulator.rehearsals import check_launches, emulated_cases, rehearsals

ARCHES = ("sm90", "sm100")
OF_FORWARD = [stem for arch in ARCHES for stem in support.sample(arch, FORWARD)]
# Three kernels a call, of which all cases are captured at once: some of them take turns.
OF_BACKWARD = [stem for arch in ARCHES for stem in support.sample(arch, BACKWARD)]
KERNELS = [
    GENERATED / f"{stem}.py"
    for stem in (*support.rotated(OF_FORWARD, 16), *support.rotated(OF_BACKWARD, 2))
]
SMALL = GENERATED / "sm90_d64_bf16_causal_lse.py"
SCHEDULES = rehearsal.schedules(4)  # the orderly ones, and a random one per completion
CASES = 3  # of some 20 to 50


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_shipped_kernel_holds(path):
    """Some of its cases, each under a schedule, and others after the next change.

    The record stands for all of them, under five schedules and more, and for this PTX.
    """
    chosen = support.picked((case.name for case in emulated_cases(path)), CASES)
    cases = [case for case in emulated_cases(path) if case.name in chosen]
    text, ready = rehearsals(path, cases=cases)
    record = records.load(GENERATED / records.path_of(path.stem))
    digest = device_code.digest(text)
    assert digest == record["compiled"]["ptx_sha256"]
    check_launches(path.stem, ready)
    for kernel in ready:
        first = zlib.crc32(f"{digest} {kernel.case.name}".encode())
        schedule = SCHEDULES[first % len(SCHEDULES)]
        assert kernel.run(schedule).findings == [], schedule


def test_what_holds_is_recorded(tmp_path):
    """Of one case, which the worker is asked for behind the record's back."""

    def worker(kernel, events, options):
        case = emulated_cases(SMALL)[0].name
        return emulate.worker_command(kernel, events, [*options, f"--case={case}"])

    copy = tmp_path / SMALL.name  # its record goes beside the copy
    copy.write_bytes(SMALL.read_bytes())
    (outcome,) = emulate.emulate([copy], executor=Local(1), worker=worker)
    assert emulate.failures([outcome]) == ""
    assert (outcome.cases, outcome.schedules) == (1, 5)
    record = records.load(tmp_path / records.path_of(SMALL.stem))
    assert record["emulated"]["cases"] == outcome.cases
    assert record["emulated"]["findings"] == []


def rehearse(monkeypatch, folder, damage, *options):
    """Events of one case of a kernel whose PTX was damaged."""

    def damaged(*arguments, **named):
        ptx, launches = original(*arguments, **named)
        return "\n".join(damage(ptx.split("\n"))), launches

    original = captures.capture
    monkeypatch.setattr(captures, "capture", damaged)
    events = folder / "events.jsonl"
    events.unlink(missing_ok=True)
    spec = kernel_text.read_constants(SMALL.read_text(encoding="utf-8"))
    case = cases_for(spec["SPEC"], tiles_of(spec))[0].name
    rehearsal.main([str(SMALL), str(events), "--case", case, *options])
    monkeypatch.setattr(captures, "capture", original)
    return read_events(events)


def findings(events):
    return [text for event in of_kind(events, "run") for text in event["findings"]]


def without(text, which=None):
    """Damage: the lines that hold a text are gone, or only one of them."""

    def damage(lines):
        hits = [number for number, line in enumerate(lines) if text in line]
        assert hits, f"no {text} in the PTX"
        gone = hits if which is None else [hits[which]]
        return ["" if number in gone else line for number, line in enumerate(lines)]

    return damage


def test_a_stage_that_is_never_freed_is_a_deadlock_that_names_who_waits(
    monkeypatch, tmp_path
):
    damage = without("mbarrier.arrive.shared")
    events = rehearse(monkeypatch, tmp_path, damage, "--completion", "eager")
    deadlock = findings(events)[0]
    assert "deadlock" in deadlock and "mbarrier.try_wait" in deadlock


def test_a_missing_proxy_fence_is_found(monkeypatch, tmp_path):
    damage = without("fence.proxy.async")
    events = rehearse(monkeypatch, tmp_path, damage, "--completion", "eager")
    assert any("proxy-fence" in text for text in findings(events))


def test_an_unknown_instruction_is_refused_with_its_line(monkeypatch, tmp_path):
    def damage(lines):
        place = next(n for n, line in enumerate(lines) if "ex2.approx.ftz.f32" in line)
        return [
            *lines[:place],
            lines[place].replace("ex2", "tanh"),
            *lines[place + 1 :],
        ]

    events = rehearse(monkeypatch, tmp_path, damage, "--completion", "eager")
    told = findings(events) + [event["message"] for event in of_kind(events, "refused")]
    assert told and all("tanh.approx.ftz.f32 is not modelled" in text for text in told)


def test_a_seed_replays_a_run_step_by_step(monkeypatch, tmp_path):
    options = ("--completion", "random", "--seed", "11")
    first, again = (
        rehearse(monkeypatch, tmp_path, lambda lines: lines, *options) for _ in range(2)
    )
    steps = [event["steps"] for event in of_kind(first, "run")]
    assert steps == [event["steps"] for event in of_kind(again, "run")]
    assert findings(first) == findings(again) == []


def test_a_timeline_shows_the_warps_of_a_cta(monkeypatch, tmp_path):
    events = rehearse(monkeypatch, tmp_path, lambda lines: lines, "--timeline")
    assert findings(events) == []
    (trace,) = (event["trace"] for event in events if event["event"] == "timeline")
    names = [
        event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    ]
    assert [name for name in names if name.endswith("loads")] == ["warp 00 loads"]
    assert sum(name.endswith("multiplies") for name in names) == 12
    assert "not time" in trace["otherData"]["note"]
