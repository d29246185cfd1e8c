# SPDX-License-Identifier: Apache-2.0
"""Runs the micro-kernels on this machine's GPU and keeps what it answered.

    python -m tests.hardware.micro.capture OUT.npz [--only GROUP]

Each group of kernels runs in a process of its own with a time limit, since a kernel that hangs
takes its process along. OUT.npz holds `NAME.output` and `NAME.digest`, where there is a tensor also
`NAME.map`, and `NAME.tensor` if the kernel wrote to it; `device` and `driver` say what answered.
When a kernel fails, what the others answered is kept and the exit status is 1.
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

from .driver import Device, DriverError
from .kernels import GROUPS, Micro

TIMEOUT = 60.0  # [s] for a group; they take one to three
MODULE = "tests.hardware.micro.capture"
ROOT = Path(__file__).resolve().parents[3]

Arrays = dict[str, NDArray[Any]]


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


def run_group(name: str, part: Path) -> int:
    """In this process, on this machine's GPU; what came before a failure is kept."""
    results: Arrays = {}
    try:
        device = Device()
        results["device"] = np.array(device.name())
        results["driver"] = np.array(device.version())
        for micro in GROUPS[name]():
            print(micro.name, flush=True)  # the last line names the one that failed
            answer = device.run(micro)
            results[f"{micro.name}.digest"] = np.array(digest(micro))
            results.update(
                {f"{micro.name}.{key}": value for key, value in answer.items()}
            )
    except DriverError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        np.savez(part, **results)  # type: ignore[arg-type]
    return 0


def run_apart(name: str, folder: Path) -> tuple[bool, Arrays]:
    """A group in a process of its own: whether all of it ran, and what it answered."""
    part = folder / f"{name}.npz"
    command = [sys.executable, "-m", MODULE, str(part), "--worker", name]
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err)
        try:
            problem = (
                f"exit status {status}" if (status := process.wait(TIMEOUT)) else ""
            )
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            problem = f"no answer in {TIMEOUT:.0f} s"
    if problem:
        started = (folder / "stdout").read_text().split()
        place = started[-1] if started else "the start"
        reason = (folder / "stderr").read_text()[-2000:].strip()
        print(f"{name} failed at {place}: {problem}: {reason}", file=sys.stderr)
    results: Arrays = {}
    if part.exists():
        with np.load(part) as saved:
            results = dict(saved)
    print(f"{name}: {len(results)} arrays")
    return not problem, results


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="capture", description="See the module's text."
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=GROUPS, action="append")
    parser.add_argument("--worker", choices=GROUPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return run_group(arguments.worker, arguments.out)
    everything: Arrays = {}
    complete = True
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or GROUPS:
            good, results = run_apart(name, Path(folder))
            complete = complete and good
            everything.update(results)
    if "device" not in everything:
        return 1  # nothing ran
    np.savez_compressed(arguments.out, **everything)  # type: ignore[arg-type]
    print(
        f"{arguments.out}: {arguments.out.stat().st_size} bytes from {everything['device']}"
    )
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
