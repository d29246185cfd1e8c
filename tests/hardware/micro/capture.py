# SPDX-License-Identifier: Apache-2.0
"""Runs the micro-kernels on this machine's GPU and keeps what it answered.

    python -m tests.hardware.micro.capture OUT.npz [--only GROUP]

Each group of kernels runs in a process of its own with a time limit, since a kernel that hangs takes
its process along. OUT.npz holds `NAME.output`, and where there is a tensor `NAME.map` and, if the
kernel wrote to it, `NAME.tensor`; `device` and `driver` say what answered. The exit status is 1 when
any group failed; nothing is written then.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kernels import GROUPS, Micro

TIMEOUT = 60.0  # [s] for a group; they take one to three
ROOT = Path(__file__).resolve().parents[3]


def digest(micro: Micro) -> str:
    """Of everything that decides the answer: a capture of another kernel does not count."""
    state = hashlib.sha256(micro.ptx.encode())
    state.update(micro.input.tobytes())
    state.update(repr((micro.grid, micro.cluster, micro.smem_bytes)).encode())
    if micro.tensor is not None:
        tensor = micro.tensor
        described = (tensor.element_type, tensor.dimensions, tensor.strides, tensor.box)
        state.update(repr((*described, tensor.swizzle_bytes)).encode())
        state.update(tensor.content.tobytes())
    return state.hexdigest()[:16]


def run_group(name: str) -> dict[str, NDArray[Any]]:
    """In this process, on this machine's GPU."""
    from .driver import Device

    device = Device()
    results: dict[str, NDArray[Any]] = {
        "device": np.array(device.name()),
        "driver": np.array(device.version()),
    }
    for micro in GROUPS[name]():
        print(micro.name, flush=True)  # the last line names the one that failed
        answer = device.run(micro)
        results[f"{micro.name}.digest"] = np.array(digest(micro))
        results.update({f"{micro.name}.{key}": value for key, value in answer.items()})
    return results


def _run_apart(name: str, folder: Path) -> dict[str, NDArray[Any]] | None:
    """In a process of its own; None, and the reason on standard error, when it failed."""
    part = folder / f"{name}.npz"
    command = [sys.executable, "-m", __spec__.name, str(part), "--worker", name]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        reason = f"exit status {done.returncode}\n{done.stderr[-2000:]}"
        output = done.stdout
    except subprocess.TimeoutExpired as expired:
        reason = f"no answer in {TIMEOUT:.0f} s"
        output = (expired.stdout or b"").decode()
    if part.exists():
        with np.load(part) as saved:
            print(f"{name}: {len(saved.files)} arrays")
            return dict(saved)
    lines = output.split()
    print(
        f"{name} failed at {lines[-1] if lines else 'its start'}: {reason}",
        file=sys.stderr,
    )
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="capture")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=GROUPS, action="append")
    parser.add_argument("--worker", choices=GROUPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        results = run_group(arguments.worker)
        np.savez(arguments.out, **results)  # type: ignore[arg-type]
        return 0
    everything: dict[str, NDArray[Any]] = {}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or GROUPS:
            part = _run_apart(name, Path(folder))
            failed = failed or part is None
            everything.update(part or {})
    if failed:
        return 1
    np.savez_compressed(arguments.out, **everything)  # type: ignore[arg-type]
    print(
        f"{arguments.out}: {arguments.out.stat().st_size} bytes from {everything['device']}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
