# SPDX-License-Identifier: Apache-2.0
"""Compiles one of these kernels with other constants and runs it in the emulator."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from fmha_gen.build import captures
from fmha_gen.emulator import launch, machine, numerics
from fmha_gen.emulator.lower import lower_kernels
from fmha_gen.emulator.memory import GlobalMemory
from fmha_gen.emulator.scheduler import Completion, Order, Schedule

from tests.hardware.micro import kernels

HERE = Path(__file__).parent
SCHEDULES = [
    Schedule(),
    Schedule(seed=1, order=Order.RANDOM_WARPS, completion=Completion.RANDOM),
    Schedule(seed=2, order=Order.RANDOM, completion=Completion.LATE),
    Schedule(seed=3, order=Order.RANDOM, completion=Completion.LOADS_EARLY_MMAS_LATE),
]
FIRST_ADDRESS, ADDRESS_STEP = 0x7F0000000000, 1 << 24

# The formats' names here, in the DSL, and their rounding error relative to the value.
DSL_TYPES = {"bf16": "BFloat16", "f16": "Float16", "e4m3": "Float8E4M3FN"}
HALF_ULP = {"bf16": 2.0**-8, "f16": 2.0**-11}
BITS = {"bf16": np.uint16, "f16": np.uint16, "e4m3": np.uint8}


def variant(stem: str, folder: Path, constants: Mapping[str, str]) -> Path:
    """The kernel of this stem, written to a folder with other values of its constants."""
    text = (HERE / f"{stem}.py").read_text(encoding="utf-8")
    for name, value in constants.items():
        text, found = re.subn(
            rf"^{name} = [^\n#]*", f"{name} = {value}  ", text, flags=re.MULTILINE
        )
        assert found == 1, f"{name} is set {found} times"
    path = folder / f"{stem}.py"
    path.write_text(text, encoding="utf-8")
    return path


class Kernel:
    """A captured launch, to be run any number of times.

    call: arguments by name. A (format, array) pair is a tensor in global memory, whose values the
    format must hold exactly; None in place of the array's content, an output of that shape.
    """

    def __init__(
        self,
        path: Path,
        inputs: Mapping[str, tuple[str, np.ndarray]],
        output: tuple[str, str, tuple[int, ...]],
        scalars: Mapping[str, launch.Argument],
    ) -> None:
        self.inputs = {
            name: kernels.encode(values.astype(np.float32), dtype)
            for name, (dtype, values) in inputs.items()
        }
        self.output_name, self.output_type, self.output_shape = output
        dtypes = {name: dtype for name, (dtype, _) in inputs.items()}
        dtypes[self.output_name] = self.output_type
        self.addresses = {
            name: FIRST_ADDRESS + ADDRESS_STEP * place
            for place, name in enumerate(dtypes)
        }
        call = {
            name: launch.pointer(DSL_TYPES[dtype], self.addresses[name], 16)
            for name, dtype in dtypes.items()
        }
        call |= {**scalars, "stream": launch.stream()}
        text, (self.launches,) = captures.capture_launches(path, [call], arch="sm100")
        self.programs = lower_kernels(text)

    def run(self, schedule: Schedule) -> tuple[np.ndarray, tuple]:
        """The output, in float64, and the findings."""
        memory = GlobalMemory()
        for name, content in self.inputs.items():
            memory.add(name, self.addresses[name], content, writable=False)
        bits = np.full(self.output_shape, -1, np.int16).view(BITS[self.output_type])
        memory.add(self.output_name, self.addresses[self.output_name], bits)
        result = machine.run(self.programs, self.launches, memory, schedule=schedule)
        values = numerics.TO_F32[self.output_type](bits)
        return values.astype(np.float64), result.findings
