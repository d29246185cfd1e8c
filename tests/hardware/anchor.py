# SPDX-License-Identifier: Apache-2.0
"""Runs the shipped kernels on this machine's GPU with the emulator's inputs, and keeps the outputs.

    python -m tests.hardware.anchor OUT.npz [KERNEL.py ...]

Needs PyTorch and an H100 or H200. OUT.npz holds, per kernel and case, `KERNEL/CASE.out` (bits) and
`KERNEL/CASE.lse` of a sample of the query rows, `KERNEL.body`, the digest of the text, and
`KERNEL.ptx`, the sha256 of what it compiles to. Without KERNELs it takes all of sm90.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fmha_gen.build import captures
from fmha_gen.build.calls import arguments
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.build.render import body_digest
from fmha_gen.evidence.tensors import Problem, Tensor, make_problem
from fmha_gen.ops import operation_of
from fmha_gen.ops.backward import is_backward
from fmha_gen.ops.cases import Case, Data, cases_for, tiles_of
from fmha_gen.ops.inputs import numbers_of
from fmha_gen.verify import sha256

# The tags of cases that every kernel has, with data that stay as they were when they were taken:
# what other cases hold may change without a new capture.
DATA: dict[str, Data] = {"ragged": "normal", "strided": "huge_key"}
ROWS = 48  # of the query rows, kept of each head


def anchor_cases(spec: Any, constants: Any) -> tuple[Case, ...]:
    """The cases that are compared."""
    return tuple(
        replace(case, data=DATA[tag])
        for case in cases_for(spec, tiles_of(constants))
        if (tag := case.name.rpartition("_b")[0]) in DATA
    )


def sampled_rows(q: int) -> slice:
    """Query rows that are kept."""
    return slice(0, q, max(1, q // ROWS))


def on_device(tensor: Tensor, device: str) -> Any:
    """PyTorch's tensor of the same elements, contiguous."""
    import torch
    from fmha_gen.evidence.trial import DTYPES

    signed = np.dtype(f"i{tensor.view.itemsize}")
    bits = np.ascontiguousarray(tensor.view).view(signed)
    return torch.from_numpy(bits).to(device).view(DTYPES[tensor.placed.dtype])


def computed(kernel: Any, case: Case, problem: Problem, device: str) -> dict[str, Any]:
    """The outputs of a kernel for a case, on the device."""
    import torch
    from fmha_gen.evidence.trial import DTYPES

    spec = kernel.SPEC
    operation = operation_of(spec)
    given = {x.name: on_device(problem[x.name], device) for x in operation.inputs(spec)}
    in_order = [given.pop(x.name) for x in operation.reads if not x.when]
    into = {
        x.name: torch.empty(x.view.shape, dtype=DTYPES[x.placed.dtype], device=device)
        for x in problem.outputs
    }
    function = getattr(kernel, operation.function)
    function(*in_order, **given, **numbers_of(spec, case), **into)
    return into


def main() -> None:
    """See the module."""
    import torch
    from fmha_gen.evidence.trial import load_kernel

    generated = Path(__file__).resolve().parents[2] / "generated"
    kernels = [Path(name) for name in sys.argv[2:]] or sorted(
        generated.glob("sm90_*.py")
    )
    found: dict[str, Any] = {"device": np.array(torch.cuda.get_device_name())}
    for path in kernels:
        text = path.read_text(encoding="utf-8")
        constants = read_constants(text)
        spec = constants["SPEC"]
        if is_backward(spec):  # see tests/emulator/test_anchor.py
            continue
        kernel = load_kernel(path)
        found[f"{path.stem}.body"] = np.array(body_digest(text))
        cases = anchor_cases(spec, constants)
        call = arguments(spec, cases[0])
        code, _ = captures.capture(path, [call], arch=spec["arch"])
        found[f"{path.stem}.ptx"] = np.array(sha256(code))
        for case in cases:
            problem = make_problem(spec, tiles_of(constants), case)
            into = computed(kernel, case, problem, "cuda")
            torch.cuda.synchronize()
            rows, name = sampled_rows(case.q), f"{path.stem}/{case.name}"
            bits = into["out"].view(torch.int16).cpu().numpy().view(np.uint16)
            found[f"{name}.out"] = bits[:, rows]
            if spec["lse"]:
                found[f"{name}.lse"] = into["lse"].cpu().numpy()[:, :, rows]
        print(path.stem, flush=True)
    np.savez_compressed(sys.argv[1], **found)


if __name__ == "__main__":
    main()
