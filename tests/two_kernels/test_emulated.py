# SPDX-License-Identifier: Apache-2.0
"""The second kernel reads what the first one wrote, and nothing else happens to the workspace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fmha_gen.build import captures
from fmha_gen.emulator import launch, machine, ptx
from fmha_gen.emulator.launch import Launch
from fmha_gen.emulator.lower import lower_kernels
from fmha_gen.emulator.memory import GlobalMemory
from fmha_gen.emulator.report import Event, Finding
from fmha_gen.emulator.scheduler import Schedule
from fmha_gen.emulator.timeline import chrome_trace
from fmha_gen.evidence import rehearsal

KERNEL = Path(__file__).with_name("row_norms.py")
TEXT = KERNEL.read_text(encoding="utf-8")
FIRST, SECOND = "row_norms_add_squares_0", "row_norms_divide_1"
ROWS, COLUMNS = 10, 64  # no whole number of the first kernel's CTAs
ADDRESSES = {"x": 1 << 40, "sums": 2 << 40, "out": 3 << 40}
STREAM = 0x1230
SCHEDULES = rehearsal.schedules(4)
# An element is rounded once for each of 6 sums, for a product and for the quotient.
BOUND = 8 * 2.0**-24

# The second launch may start before the first one is over.
PROGRAMMATIC = "block=[COLUMNS, 1, 1], stream=stream, use_pdl=True"
WAIT = "    cute.arch.griddepcontrol_wait()\n"
ONE_WARP_WAITS = f"    if column < WARP:\n    {WAIT}"
BEGIN, BETWEEN, END = "    add_squares(x,", "    divide(x,", "\n\n@functools.cache"


def swapped() -> str:
    head, rest = TEXT.split(BEGIN)
    first, rest = rest.split(BETWEEN)
    second, tail = rest.split(END)
    return f"{head}{BETWEEN}{second}\n{BEGIN}{first}{END}{tail}"


def replaced(old: str, new: str) -> str:
    assert TEXT.count(old) == 1
    return TEXT.replace(old, new)


def programmatic(wait: str) -> str:
    text = replaced("block=[COLUMNS, 1, 1], stream=stream", PROGRAMMATIC)
    divide = "    out[row, column] ="
    assert text.count(divide) == 1
    return text.replace(divide, wait + divide)


# By name: the text, and what is found in which kernel.
UNWRITTEN = "read-before-write", "reads bytes of sums that no launch wrote", "divide"
OVERTAKEN = "race", "(one lane) of a launch that may still run writes", "divide"
DAMAGE = {
    "launches swapped": (swapped(), *UNWRITTEN),
    "last rows left out": (
        replaced("cute.ceil_div(rows, ROWS_PER_CTA)", "rows // ROWS_PER_CTA"),
        *UNWRITTEN,
    ),
    "second launch on the default stream": (
        replaced("block=[COLUMNS, 1, 1], stream=stream", "block=[COLUMNS, 1, 1]"),
        *("race", "(one lane) of a launch on another stream writes", "divide"),
    ),
    "programmatic, no thread waits": (programmatic(""), *OVERTAKEN),
    "programmatic, one warp waits": (programmatic(ONE_WARP_WAITS), *OVERTAKEN),
    "all warps of a CTA add up one row": (
        replaced("block * ROWS_PER_CTA + thread // WARP", "block * ROWS_PER_CTA"),
        *("race", "writes bytes of sums that cta 0 warp 0 (one lane) writes"),
        "add_squares",
    ),
}


def captured(path: Path) -> tuple[str, tuple[Launch, ...]]:
    arguments = {
        name: launch.pointer("Float32", address, 16)
        for name, address in ADDRESSES.items()
    }
    arguments |= {"rows": launch.int32(ROWS), "stream": launch.stream(STREAM)}
    text, (launches,) = captures.capture_launches(path, [arguments], arch="sm90")
    return text, launches


def run(
    path: Path, schedule: Schedule, timeline: list[Event] | None = None
) -> tuple[np.ndarray, np.ndarray, tuple[Finding, ...]]:
    """x, out and the findings."""
    text, launches = captured(path)
    x = np.random.default_rng(3).standard_normal((ROWS, COLUMNS), np.float32)
    sums, out = (np.full(n, np.nan, np.float32) for n in (ROWS, ROWS * COLUMNS))
    memory = GlobalMemory()
    memory.add("x", ADDRESSES["x"], x, writable=False)
    memory.add("sums", ADDRESSES["sums"], sums, uninitialised=True)
    memory.add("out", ADDRESSES["out"], out, uninitialised=True)
    result = machine.run(
        lower_kernels(text), launches, memory, schedule=schedule, timeline=timeline
    )
    return x, out.reshape(x.shape), result.findings


def test_the_launches_are_what_the_host_function_asks_for_in_its_order() -> None:
    text, launches = captured(KERNEL)
    assert [*ptx.parse_kernels(text)] == [FIRST, SECOND]
    assert [(each.kernel, each.grid, each.block) for each in launches] == [
        (FIRST, (3, 1, 1), (128, 1, 1)),
        (SECOND, (ROWS, 1, 1), (COLUMNS, 1, 1)),
    ]
    assert {each.stream for each in launches} == {STREAM}
    for each in launches:
        params = ptx.parse_kernels(text)[each.kernel].param_bytes
        assert len(each.params) == params
    called = launch.Called(launches, "", (), {})
    assert launch.Called.from_json(json.loads(json.dumps(called.to_json()))) == called


@pytest.mark.parametrize("schedule", SCHEDULES, ids=rehearsal.name_of)
def test_the_second_kernel_reads_what_the_first_one_wrote(schedule: Schedule) -> None:
    x, out, findings = run(KERNEL, schedule)
    assert findings == ()
    wide = x.astype(np.float64)
    expected = wide / (wide**2).sum(axis=1, keepdims=True)
    assert np.abs(out / expected - 1).max() <= BOUND


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_named(name: str, tmp_path: Path) -> None:
    text, kind, words, kernel = DAMAGE[name]
    path = tmp_path / KERNEL.name
    path.write_text(text, encoding="utf-8")
    for schedule in (SCHEDULES[0], SCHEDULES[-1]):
        *_, findings = run(path, schedule)
        assert any(
            found.kind.value == kind
            and words in found.message
            and found.where.startswith(f"row_norms_{kernel}_")
            for found in findings
        ), findings


@pytest.mark.parametrize(
    "wait", [WAIT, f"{ONE_WARP_WAITS}    cute.arch.sync_threads()\n"]
)
def test_a_programmatic_launch_that_waits_is_right(wait: str, tmp_path: Path) -> None:
    path = tmp_path / KERNEL.name
    path.write_text(programmatic(wait), encoding="utf-8")
    assert [each.programmatic for each in captured(path)[1]] == [False, True]
    *_, findings = run(path, SCHEDULES[0])
    assert findings == ()


def test_the_timeline_has_a_process_for_each_kernel() -> None:
    events: list[Event] = []
    run(KERNEL, SCHEDULES[0], events)

    def processes() -> Iterator[str]:
        for event in chrome_trace(events, title="row norms")["traceEvents"]:
            if event["name"] == "process_name":
                yield event["args"]["name"]

    assert [*processes()] == [
        f"row norms, {kernel}, CTA 0" for kernel in (FIRST, SECOND)
    ]
    last = max(event.end for event in events if event.kernel == FIRST)
    assert last <= min(event.begin for event in events if event.kernel == SECOND)
