# SPDX-License-Identifier: Apache-2.0
"""The emulator executes the micro-kernels: what the PTX does is what the data modules predict.

`test_h200` compares the same predictions with the device, so the three agree.
"""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.emulator import machine
from fmha_gen.emulator.launch import Launch
from fmha_gen.emulator.lower import lower_kernels
from fmha_gen.emulator.memory import GlobalMemory
from fmha_gen.emulator.report import Kind
from fmha_gen.emulator.scheduler import Completion, Order, Schedule

from tests.hardware.micro import kernels

from . import predict

INPUT, OUTPUT = 0x7F0000000000, 0x7F0000080000
MICROS = kernels.everything()
SCHEDULES = [
    Schedule(),
    Schedule(seed=1, order=Order.RANDOM_WARPS, completion=Completion.RANDOM),
    Schedule(seed=2, order=Order.RANDOM, completion=Completion.LATE),
]


def emulate(
    micro: kernels.Micro, schedule: Schedule
) -> tuple[dict[str, np.ndarray], tuple]:
    """What the kernel leaves behind, and the findings."""
    memory = GlobalMemory()
    output = np.full(micro.output_bytes, 0xA5, np.uint8)
    memory.add("input", INPUT, micro.input.copy(), writable=False)
    memory.add("output", OUTPUT, output)
    results, raw_map = {"output": output}, bytes(128)
    if micro.tensor is not None:
        results["tensor"] = micro.tensor.content.copy()
        memory.add("tensor", predict.TENSOR_ADDRESS, results["tensor"])
        raw_map = predict.encode(micro.tensor, predict.TENSOR_ADDRESS)
    pointers = np.array([INPUT, OUTPUT], np.uint64).tobytes()
    programs = lower_kernels(micro.ptx)
    (name,) = programs
    launch = Launch(
        kernel=name,
        grid=(micro.grid, 1, 1),
        block=(kernels.THREADS, 1, 1),
        cluster=(micro.cluster, 1, 1),
        smem_bytes=micro.smem_bytes,
        params=pointers.ljust(64, b"\0") + raw_map,
    )
    beyond = {
        predict.TENSOR_ADDRESS: (256,) * 5
    }  # where some of the boxes are meant to lie
    run = machine.run(programs, [launch], memory, schedule=schedule, tiles=beyond)
    return results, run.findings


@pytest.mark.parametrize(
    "schedule", SCHEDULES, ids=lambda schedule: schedule.completion.value
)
@pytest.mark.parametrize("micro", MICROS, ids=lambda micro: micro.name)
def test_the_machine_does_what_the_modules_say(micro, schedule):
    if micro.name == "mbarrier" and schedule.completion is not Completion.EAGER:
        # It polls, and under the others a copy may complete after the polls have ended.
        schedule = Schedule(seed=schedule.seed, order=schedule.order)
    if micro.name == "warps":  # the H200 elects lane 0; elsewhere any lane may be
        schedule = Schedule(seed=schedule.seed, completion=schedule.completion)
    results, findings = emulate(micro, schedule)
    clipped = {f.kind for f in findings} == {Kind.SATURATION}
    assert clipped if micro.name == "arithmetic" else findings == ()
    for key, want in predict.predict(micro).items():
        problem = predict.agree(micro, results[key], want)
        assert not problem, problem
