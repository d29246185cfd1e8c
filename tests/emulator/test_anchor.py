# SPDX-License-Identifier: Apache-2.0
"""The trust anchor: shipped kernels on an H200 and in the emulator, on the same inputs.

The H200's outputs are kept in data/h200_anchor.npz, with the digests of the texts and the PTX that
they are of. A later text is held against them as well: as long as it rounds alike, they agree. On a
machine with that GPU `python -m tests.hardware.anchor tests/emulator/data/h200_anchor.npz` takes
them. The table that results is codegen/decisions/0008-trust-anchor.md, refreshed with
FMHA_GEN_ACCEPT=1.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import support
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.evidence.rehearsal import schedules
from fmha_gen.evidence.tensors import FROM_BITS, make_problem
from fmha_gen.ops import operation_of
from fmha_gen.ops.cases import tiles_of
from fmha_gen.ops.forward import FORWARD

from tests.emulator.rehearsals import rehearsals
from tests.hardware.anchor import anchor_cases, computed, sampled_rows

CAPTURE = Path(__file__).parent / "data" / "h200_anchor.npz"
TABLE = support.ROOT / "codegen" / "decisions" / "0008-trust-anchor.md"
# Of the backward pass no GPU's outputs are kept.
KERNELS = [
    support.GENERATED / f"{stem}.py"
    for stem in support.shipped(FORWARD)
    if stem.startswith("sm90_")
]

# ||emulated - H200|| / ||H200||: of the rounding of O itself, half a unit in the last place. P is
# rounded too, and the approximations of ex2 and rcp differ in their last bits.
ROUNDING = {"bf16": 2.0**-9, "fp16": 2.0**-12}
EAGER = schedules(0)[0]
LSE_LIMIT = 1e-4  # absolute, or relative where |lse| is above 1


@pytest.fixture(scope="module")
def h200():
    with np.load(CAPTURE) as saved:
        return dict(saved)


# Made after the capture.
_WORDS = "sink|alibi|bias|docs|prefix|warg|lists|near|distance|dilated|varlen|e4m3"
_LATER = rf"_(w|cap|chunk|first)\d|_({_WORDS})"
NOT_CAPTURED = {
    *(path.stem for path in KERNELS if re.search(_LATER, path.stem)),
    "sm90_d128_bf16_causal_gqa4",
    "sm90_d128_bf16_causal_gqa5",
    "sm90_d160_fp16_full",
    "sm90_d192_bf16_causal_lse",
    "sm90_d256_bf16_causal_gqa2",
    "sm90_d32_bf16_full_gqa4",
    "sm90_d80_bf16_causal_lse",
}
CAPTURED = [path for path in KERNELS if path.stem not in NOT_CAPTURED]


def test_nothing_else_is_left_out(h200) -> None:
    captured = {name.removesuffix(".body") for name in h200 if name.endswith(".body")}
    assert captured == {path.stem for path in CAPTURED}
    assert {path.stem for path in KERNELS} - captured == NOT_CAPTURED


# The table has all of them.
ALL = os.environ.get(support.ACCEPT) == "1"
SAMPLE = support.sample("sm90", FORWARD)
RUN = [path for path in CAPTURED if ALL or path.stem in SAMPLE]


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_the_emulator_computes_what_the_h200_did(path: Path, h200) -> None:
    rows = [row for row in TABLE.read_text().splitlines() if f"`{path.stem}`" in row]
    found = []
    constants = read_constants(path.read_text(encoding="utf-8"))
    spec = constants["SPEC"]
    _, ready = rehearsals(path, cases=anchor_cases(spec, constants))
    for kernel in ready:
        case, problem = kernel.case, kernel.problem
        ran = kernel.run(EAGER)
        assert not ran.findings
        name, kept = f"{path.stem}/{case.name}", sampled_rows(case.q)
        out = problem["out"].view[:, kept]
        stored = kernel.expected  # of long cases only some tiles run
        written = (
            np.ones(out.shape[:3], np.bool_) if stored is None else stored[:, kept]
        )
        assert written.any()
        ours, theirs = out[written], h200[f"{name}.out"][written]
        dtype = problem["out"].placed.dtype
        emulated = FROM_BITS[dtype](ours).astype(np.float64)
        device = FROM_BITS[dtype](theirs).astype(np.float64)
        error = np.linalg.norm(emulated - device) / np.linalg.norm(device)
        assert error <= ROUNDING[dtype]
        lse_error = None
        if spec["lse"]:
            lse = problem["lse"].view[:, :, kept].view(np.float32)
            lse_error = compare_lse(lse, h200[f"{name}.lse"], written)
        found.append(
            row_of(
                path.stem,
                case.name,
                int(written.sum()),
                (ours == theirs).mean(),
                error,
                lse_error,
            )
        )
    if ALL:
        lines = TABLE.read_text().splitlines()
        lines = [line for line in lines if f"`{path.stem}`" not in line] + found
        TABLE.write_text("\n".join(lines) + "\n")
    else:  # the last digits depend on the processor
        assert [row.split("|")[1:4] for row in rows] == [
            row.split("|")[1:4] for row in found
        ], "refresh with FMHA_GEN_ACCEPT=1 pytest -n0"


@pytest.mark.parametrize(
    "stem",
    [
        *("sm90_d128_bf16_causal_lse", "sm90_d64_fp16_causal_gqa8"),
        *("sm90_d128_e4m3_causal_lse", "sm90_d64_e4m3_permuted_linear_full"),
    ],
)
def test_a_capture_passes_what_the_emulator_has(stem: str) -> None:
    """Each tensor with its type and bits, three in order and the others by name."""
    trial = pytest.importorskip("fmha_gen.evidence.trial")
    constants = support.constants(stem)
    spec, passed = constants["SPEC"], {}
    case = anchor_cases(spec, constants)[0]
    problem = make_problem(spec, tiles_of(constants), case)

    class Kernel:
        SPEC = spec

        @staticmethod
        def fmha(q, k, v, **others) -> None:
            passed.update(q=q, k=k, v=v, **others)

    into = computed(Kernel, case, problem, "cpu")
    tensors = operation_of(spec).tensors(spec)
    assert {*passed} == {x.name for x in tensors}
    assert {*into} == ({"out", "lse"} if spec["lse"] else {"out"})
    for x in tensors:
        found, expected = passed[x.name], problem[x.name]
        assert found.dtype == trial.DTYPES[x.type(spec)]
        assert found.shape == expected.view.shape and found.is_contiguous()
        if x.name not in into:
            bits = trial.bits(found).numpy().view(expected.view.dtype)
            assert np.array_equal(bits, expected.view)
        else:
            assert into[x.name] is found


def compare_lse(emulated, device, written) -> float:
    """The largest error over the written rows, where both are finite; -inf must agree."""
    ours = emulated[written.transpose(0, 2, 1)].astype(np.float64)
    theirs = device[written.transpose(0, 2, 1)].astype(np.float64)
    finite = np.isfinite(theirs)
    assert np.array_equal(ours[~finite], theirs[~finite])
    scale = np.maximum(1, np.abs(theirs[finite]))
    error = float((np.abs(ours[finite] - theirs[finite]) / scale).max(initial=0.0))
    assert error <= LSE_LIMIT
    return error


def row_of(stem, case, rows, same, error, lse_error) -> str:
    """A line of the table."""
    lse = "-" if lse_error is None else f"{lse_error:.0e}"
    return f"| `{stem}` | {case} | {rows} | {100 * same:.1f} % | {error:.0e} | {lse} |"
