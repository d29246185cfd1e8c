# SPDX-License-Identifier: Apache-2.0
"""What of a run a picture shows."""

from __future__ import annotations

import json

import pytest
from fmha_gen.emulator import ptx
from fmha_gen.emulator.report import Event
from fmha_gen.emulator.timeline import chrome_trace, most_telling

from . import kernels

LOAD = "cp.async.bulk.tensor.4d.shared::cluster.global.tile"
EVENTS = [
    Event(0, 0, LOAD, 10, 0, 4),
    Event(0, 4, "bar.sync", 20, 4, 5),
    Event(1, 0, LOAD, 10, 5, 9),
    Event(0, 4, "wgmma.mma_async.sync.aligned", 30, 9, 12),
    Event(0, 4, "cp.async.bulk.tensor.4d.global.shared::cta", 40, 12, 13),
    Event(0, 11, "ex2.approx.ftz.f32", 50, 13, 20),
]


def test_bars_are_those_of_one_cta():
    trace = chrome_trace(EVENTS, title="a kernel", cta=0)
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(bar["tid"], bar["ts"], bar["dur"]) for bar in bars] == [
        (0, 0, 4),
        (4, 4, 1),
        (4, 9, 3),
        (4, 12, 1),
        (11, 13, 7),
    ]
    assert bars[0]["name"] == LOAD and bars[0]["args"] == {"PTX line": 10}


def test_rows_are_warps_with_their_roles():
    trace = chrome_trace(EVENTS, title="a kernel")
    names = {
        (event["name"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    assert names == {
        ("process_name", 0): "a kernel, CTA 0",
        ("thread_name", 0): "warp 00 loads",
        ("thread_name", 4): "warp 04 multiplies",
        ("thread_name", 11): "warp 11",
    }


@pytest.mark.parametrize(
    ("stretch", "name"),
    [
        (
            "tcgen05.fence::after_thread_sync; mov.b32 %r1, 0; "
            "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;",
            "tcgen05.mma.cta_group::1.kind::f16",
        ),
        (
            "tcgen05.wait::ld.sync.aligned; ex2.approx.ftz.f32 %r1, %r2;",
            "ex2.approx.ftz.f32",
        ),
        ("mov.b32 %r1, 0; bar.sync 0;", "bar.sync"),
        ("mov.b32 %r1, 0; mov.b32 %r2, 0;", "mov.b32"),
    ],
)
def test_a_stretch_is_named_after_what_it_is_for(stretch, name):
    instructions = [
        instruction
        for instruction in ptx.parse(kernels.text(stretch)).instructions
        if instruction.line == kernels.LINES_BEFORE + 1
    ]
    assert most_telling(instructions).name == name


def test_it_says_that_steps_are_not_time():
    trace = json.loads(json.dumps(chrome_trace(EVENTS, title="a kernel")))
    assert trace["otherData"]["unit"] == "steps"
    assert "not time" in trace["otherData"]["note"]
