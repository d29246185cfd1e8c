# SPDX-License-Identifier: Apache-2.0
"""Every shipped file takes the registers and the shared memory that its plan says; one of each kind
alone: it imports and compiles where only the DSL is installed, and refuses bad calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import support
from fmha_gen.build import engine, toolchain
from fmha_gen.features.params import as_said
from fmha_gen.host import tools
from fmha_gen.host.executor import Local
from fmha_gen.ops.backward import BACKWARD
from support import GENERATED, SHIPPED, SPECS

ALONE = Path(__file__).with_name("alone.py")
SECONDS = 300  # some 3 are usual

each_kernel = pytest.mark.parametrize("stem", SHIPPED)

# --- what the compiler made of it ------------------------------------------------


def recorded(stem: str) -> dict[str, Any]:
    """What a compile said of this very text (tests/golden/test_shipped.py)."""
    record = json.loads((GENERATED / "records" / f"{stem}.json").read_text("utf-8"))
    return record["compiled"]


@each_kernel
def test_compiled_as_planned(stem: str) -> None:
    known, plan = recorded(stem), support.shipped_plan(stem)
    of_record = ("body_sha256", "host_sha256", "shared_bytes")
    said = {name: value for name, value in known.items() if name not in of_record}
    report = toolchain.CompileReport.from_json(said)
    assert toolchain.gate(report) == []
    assert report.arch == plan.compile_arch
    for each in report.kernels:
        assert (each.stack_bytes, each.local_bytes) == (0, 0)
        assert (each.instructions["LDL"], each.instructions["STL"]) == (0, 0)
        assert each.entry.startswith(stem)
    # The one that has roles multiplies; others may be beside it.
    ((roles, made),) = (
        (device.registers, each)
        for device, each in zip(plan.kernels, report.kernels, strict=True)
        if device.registers
    )
    in_16_bits, in_8_bits = plan.architecture.mma_classes
    is_e4m3 = plan.spec_file.spec.dtype == "e4m3"
    used, other = (in_8_bits, in_16_bits) if is_e4m3 else (in_16_bits, in_8_bits)
    assert made.instructions[used] > 0 == made.instructions.get(other, 0)
    assert known["shared_bytes"] == plan.smem_bytes
    assert made.setmaxnreg == tuple(sorted({role.per_thread for role in roles}))
    # What the CTA has at its start is all that setmaxnreg can share out.
    numbers = {number.name: number.value for number in plan.derived}
    asked = 128 * sum(role.warpgroups * role.per_thread for role in roles)
    assert asked <= made.registers * numbers["THREADS"] <= 65536


# Between them they have every operation, mask, cta_group, and LSE or none, on their architecture:
# what decides which imports, arguments and checks a file has.
ONE_OF_EACH = (
    "sm90_d64_bf16_full",
    "sm90_d64_bf16_causal_lse",
    "sm100_d64_fp16_full_s1024",
    "sm100_d128_bf16_causal_gqa4_c2x1_cta2_lse",
    "sm90_d64_bf16_full_bwd",
    "sm100_d64_bf16_causal_det_bwd",
)


@pytest.mark.parametrize("stem", support.picked(SHIPPED, 2))
def test_compiles_to_what_is_recorded(stem: str, tmp_path: Path) -> None:
    """Registers and instructions; others after the next change.

    `make check` asks this of every kernel; that the PTX of one of each structure is the recorded
    one shows tests/emulator/test_shipped_kernels.py.
    """
    result = engine.build([SPECS / f"{stem}.yaml"], tmp_path, executor=Local(1))
    assert result.failures == ()
    (kernel,) = result.kernels
    assert kernel.text == (GENERATED / f"{stem}.py").read_text("utf-8")
    assert kernel.report is not None
    known, expected = recorded(stem), kernel.report.to_json()
    if known["dsl"] == kernel.report.dsl:  # another one may choose other registers
        assert {key: known[key] for key in expected} == expected


# --- alone -----------------------------------------------------------------------


@pytest.fixture(scope="session")
def only_dsl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages folder as `pip install nvidia-cutlass-dsl apache-tvm-ffi` leaves it."""
    folder = tmp_path_factory.mktemp("site-packages")
    support.link_distributions(folder, tools.DSL, tools.FFI)
    return folder


def run_alone(stem: str, site_packages: Path, folder: Path) -> dict[str, Any]:
    """Copy a shipped file into a folder of its own and run it there, isolated.

    The environment does not say which arch to compile for.
    """
    copy = folder / f"{stem}.py"
    copy.write_bytes((GENERATED / copy.name).read_bytes())
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ALONE), str(site_packages), str(copy)],
        cwd=folder,
        env=kept | {"CUTE_DSL_NO_CACHE": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("stem", support.rotated(ONE_OF_EACH, 4))
def test_alone(stem: str, only_dsl: Path, tmp_path: Path) -> None:
    report = run_alone(stem, only_dsl, tmp_path)
    assert {"torch", "fmha_gen", "jinja2"}.isdisjoint(report["modules"])
    assert {"cutlass", "cuda", "tvm_ffi"} <= set(report["modules"])
    assert report["documented"]
    assert report["compiled_once"]
    assert len(report["refusals"]) == report["bad_calls"]
    for argument, message in report["refusals"].values():
        assert message.startswith(f"{argument}: "), message
    assert report["compiled_by_bad_calls"] == 0


@pytest.mark.parametrize("stem", [SHIPPED[0], SHIPPED[-1]])
def test_without_the_dsl_the_traceback_says_what_to_install(stem: str) -> None:
    """Not the package that Python misses: `pip install cuda` gets another one."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(GENERATED / f"{stem}.py")],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert "ModuleNotFoundError: No module named 'cuda'" in done.stderr
    wanted = f"{tools.DSL}{tools.DSL_RANGE}"
    assert f'# pip install "{wanted}"' in done.stderr


# --- what it says of itself ------------------------------------------------------


@each_kernel
def test_spec(stem: str) -> None:
    constants = support.constants(stem)
    plan = support.shipped_plan(stem)
    spec = plan.spec_file.spec
    only_there = {"cta_group": spec.cta_group, "schedule": spec.schedule}
    of_forward = {
        "pack_gqa": spec.pack_gqa,
        "lse": spec.lse,
        "cluster": list(spec.cluster),
        "multicast": spec.multicast,
    }
    of_forward |= only_there if plan.arch == "sm100" else {}
    own = of_forward
    if spec.op == BACKWARD.name:
        own = {"deterministic": spec.deterministic}
        own |= {} if spec.dq_sums == "fp32" else {"dq_sums": spec.dq_sums}
    window = spec.window.model_dump()
    given = {} if window == support.NO_WINDOW else {"window": window}
    given |= {} if spec.softcap == "none" else {"softcap": spec.softcap}
    given |= {"sink": True} if spec.sink else {}
    if spec.blocks == "lists":  # whose size is the tile's
        numbers = {number.name: number.value for number in plan.chosen}
        tile = {"q": numbers["TILE_Q"], "kv": numbers["TILE_KV"]}
        given |= {"blocks": "lists", "tile": tile}
    given |= {} if spec.score == "none" else {"score": spec.score}
    if spec.bias.dtype != "none":
        given["bias"] = {"shape": list(spec.bias.shape), "dtype": spec.bias.dtype}
    if spec.dtype == "e4m3":
        given["out_dtype"] = spec.out_dtype
    given |= {} if spec.v_layout == "rows" else {"v_layout": spec.v_layout}
    given |= {} if spec.exp == "exact" else {"exp": spec.exp}
    given |= {} if spec.descale == "none" else {"descale": spec.descale}
    given |= {} if spec.batch == "dense" else {"batch": spec.batch}
    if spec.kv.paged.page != "none":
        given["kv"] = {"paged": {"page": spec.kv.paged.page}}
    if spec.params:
        given["params"] = as_said(spec.params)
    flags = ("alibi", "documents", "prefix")
    given |= {name: True for name in flags if getattr(spec, name)}
    assert constants["SPEC"] == own | given | {
        "name": stem,
        "arch": spec.arch,
        "op": spec.op,
        "dtype": spec.dtype,
        "head_dim": {"qk": spec.head_dim.qk, "v": spec.head_dim.v},
        "seqlen": {"q": spec.seqlen.q, "kv": spec.seqlen.kv},
        "q_per_kv": spec.heads.q_per_kv,
        "mask": spec.mask,
    }
