# SPDX-License-Identifier: Apache-2.0
"""What the driver says about this machine's GPU, through NVML: no CUDA context, no package."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

from ..errors import EnvironmentProblem

_SM_CLOCK = 1  # NVML_CLOCK_SM
_TEXT_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE, the longest text asked for


@dataclass(frozen=True)
class Gpu:
    """The first GPU that CUDA programs of this process see."""

    name: str
    driver: str
    _nvml: Any
    _handle: Any

    def sm_clock_mhz(self) -> int | None:
        """The SM clock now, or None when the driver does not say."""
        value = ctypes.c_uint()
        status = self._nvml.nvmlDeviceGetClockInfo(
            self._handle, _SM_CLOCK, ctypes.byref(value)
        )
        return value.value if status == 0 else None

    def power_watts(self) -> float | None:
        """The board's power now, or None when the driver does not say."""
        milliwatts = ctypes.c_uint()
        status = self._nvml.nvmlDeviceGetPowerUsage(
            self._handle, ctypes.byref(milliwatts)
        )
        return milliwatts.value / 1000 if status == 0 else None


def visible() -> str:
    """The first device of CUDA_VISIBLE_DEVICES: a number or a UUID."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()


def find_gpu() -> Gpu:
    """Raise EnvironmentProblem, in one line, when there is no NVIDIA GPU or no driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        raise EnvironmentProblem("no NVIDIA GPU: its driver is not installed") from None
    if nvml.nvmlInit_v2() != 0:
        raise EnvironmentProblem("no NVIDIA GPU: the driver does not answer")
    device = visible()
    handle = ctypes.c_void_p()
    if device.isdecimal():
        status = nvml.nvmlDeviceGetHandleByIndex_v2(
            ctypes.c_uint(int(device)), ctypes.byref(handle)
        )
    else:
        status = nvml.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
    if status != 0:
        raise EnvironmentProblem(
            f"no NVIDIA GPU: the driver knows no device {device or '(none)'}"
        )
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName, handle),
        driver=_text(nvml.nvmlSystemGetDriverVersion),
        _nvml=nvml,
        _handle=handle,
    )


def _text(query: Any, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    status = query(*arguments, buffer, ctypes.c_uint(_TEXT_BYTES))
    return buffer.value.decode() if status == 0 else "unknown"
