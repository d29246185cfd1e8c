# SPDX-License-Identifier: Apache-2.0
"""Every shipped file, alone: it imports and compiles where only the DSL is installed, refuses bad
calls, and takes the registers and the shared memory that its plan says.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import support
from fmha_gen import build, toolchain
from fmha_gen.executor import Local
from support import GENERATED, SHIPPED, SPECS

ALONE = Path(__file__).with_name("alone.py")
SECONDS = 300  # some 3 are usual

each_kernel = pytest.mark.parametrize("stem", SHIPPED)

# --- what the compiler made of it ------------------------------------------------


@each_kernel
def test_compiled_as_planned(stem: str, tmp_path: Path) -> None:
    result = build.build([SPECS / f"{stem}.yaml"], tmp_path, executor=Local(1))
    assert result.failures == ()
    (kernel,), plan = result.kernels, support.shipped_plan(stem)
    assert kernel.text == (GENERATED / f"{stem}.py").read_text("utf-8")
    report = kernel.report
    assert report is not None
    assert toolchain.gate(report) == []
    assert (report.stack_bytes, report.local_bytes) == (0, 0)
    assert (report.instructions["LDL"], report.instructions["STL"]) == (0, 0)
    assert report.instructions[plan.architecture.mma_class] > 0
    assert report.arch == plan.compile_arch
    assert report.entry.startswith(stem)
    roles = plan.registers
    assert report.setmaxnreg == tuple(sorted(role.per_thread for role in roles))
    # What the CTA has at its start is all that setmaxnreg can share out.
    numbers = {number.name: number.value for number in plan.derived}
    asked = 128 * sum(role.warpgroups * role.per_thread for role in roles)
    assert asked <= report.registers * numbers["THREADS"] <= 65536

    record = json.loads((GENERATED / "records" / f"{stem}.json").read_text("utf-8"))
    known = record["compiled"]
    assert known["shared_bytes"] == plan.smem_bytes
    if known["dsl"] == report.dsl:  # another version may choose other registers
        expected = report.to_json()
        assert {key: known[key] for key in expected} == expected


# --- alone -----------------------------------------------------------------------


class Launch(NamedTuple):
    """What the host code passes to the driver, as far as it is constant."""

    block: tuple[int, int, int]
    smem_bytes: int


@pytest.fixture(scope="session")
def only_dsl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages folder as `pip install nvidia-cutlass-dsl` alone leaves it."""
    folder = tmp_path_factory.mktemp("site-packages")
    support.link_distributions(folder, toolchain.DSL)
    return folder


def run_alone(stem: str, site_packages: Path, folder: Path) -> dict[str, Any]:
    """Copy a shipped file into a folder of its own and run it there, isolated."""
    copy = folder / f"{stem}.py"
    copy.write_bytes((GENERATED / copy.name).read_bytes())
    compile_arch = support.shipped_plan(stem).compile_arch
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ALONE), str(site_packages), str(copy)],
        cwd=folder,
        env=kept | {"CUTE_DSL_ARCH": compile_arch, "CUTE_DSL_NO_CACHE": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def launch_of(host: str) -> Launch:
    """Read the launch out of the lowered host code: constants stored into the driver's struct.

    Its fields: grid[3], block[3], bytes of dynamic shared memory, stream, attributes, their count.
    """
    (function,) = (
        part for part in host.split("llvm.func ") if "call @_cudaLaunchKernelEx" in part
    )
    constants = dict(
        re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i\d+\)", function)
    )
    stored = {
        pointer: constants[value]
        for value, pointer in re.findall(r"llvm\.store (%\w+), (%\w+) : i", function)
        if value in constants
    }
    struct = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    fields = {
        field: int(stored[pointer])
        for pointer, field in re.findall(
            rf"(%\w+) = llvm\.getelementptr %\w+\[0, ([\d, ]+)\].*{struct}", function
        )
        if pointer in stored
    }
    return Launch((fields["1, 0"], fields["1, 1"], fields["1, 2"]), fields["2"])


@each_kernel
def test_alone(stem: str, only_dsl: Path, tmp_path: Path) -> None:
    report = run_alone(stem, only_dsl, tmp_path)
    assert {"torch", "fmha_gen", "numpy", "jinja2"}.isdisjoint(report["modules"])
    assert {"cutlass", "cuda"} <= set(report["modules"])
    assert report["documented"]
    assert report["compiled_once"]

    plan = support.shipped_plan(stem)
    spec = plan.spec_file.spec
    only_there = {"cta_group": spec.cta_group, "schedule": spec.schedule}
    assert report["spec"] == (only_there if plan.arch == "sm100" else {}) | {
        "name": stem,
        "arch": spec.arch,
        "op": spec.op,
        "dtype": spec.dtype,
        "head_dim": {"qk": spec.head_dim.qk, "v": spec.head_dim.v},
        "seqlen": {"q": spec.seqlen.q, "kv": spec.seqlen.kv},
        "q_per_kv": spec.heads.q_per_kv,
        "pack_gqa": spec.pack_gqa,
        "mask": spec.mask,
        "lse": spec.lse,
        "cluster": list(spec.cluster),
        "multicast": spec.multicast,
    }

    assert len(report["refusals"]) == report["bad_calls"]
    for argument, message in report["refusals"].values():
        assert message.startswith(f"{argument}: "), message
    assert report["compiled_by_bad_calls"] == 0

    numbers = {number.name: number.value for number in plan.derived}
    launch = launch_of((tmp_path / "host.mlir").read_text("utf-8"))
    assert launch == Launch((numbers["THREADS"], 1, 1), plan.smem_bytes)
