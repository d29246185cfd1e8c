# SPDX-License-Identifier: Apache-2.0
"""The checks of a trial on backward kernels: three outputs, a workspace, sums without an order."""

from __future__ import annotations

from typing import Any, get_args

import pytest

torch = pytest.importorskip(
    "torch", reason="needs PyTorch (CPU): pip install 'fmha-gen[torch]'"
)

from fake_backward import FakeBackward, spec  # noqa: E402
from fake_kernel import CpuDevice  # noqa: E402
from fmha_gen.evidence import trial  # noqa: E402
from fmha_gen.ops.case import Gradient  # noqa: E402
from fmha_gen.ops.cases import Case  # noqa: E402

CASE = Case("small", batch=2, kv_heads=2, q=33, kv=65)
DENSE = Case("dense", batch=2, kv_heads=2, q=33, kv=65, layout="plain")
MANY = Case("many", batch=1, kv_heads=1, q=9, kv=17, repeats=20)


def findings(fault: str = "", case: Case = CASE, **changes: Any) -> list[str]:
    kernel = FakeBackward(spec(**changes), fault)
    return trial.check_case(kernel, case, CpuDevice()).findings


@pytest.mark.parametrize("layout", ["own", "bhsd", "mixed", "fused", "cache", "plain"])
@pytest.mark.parametrize("kv", [33, 40])
def test_a_right_kernel_holds_in_every_layout(layout: Any, kv: int) -> None:
    case = Case("layout", batch=2, kv_heads=2, q=33, kv=kv, layout=layout)
    assert findings(case=case, q_per_kv=3) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("gradient", get_args(Gradient))
@pytest.mark.parametrize(("q", "kv"), [(40, 40), (17, 65), (65, 17), (1, 1)])
def test_a_right_kernel_holds_with_every_gradient(
    dtype: str, mask: str, gradient: Any, q: int, kv: int
) -> None:
    case = Case("data", batch=1, kv_heads=2, q=q, kv=kv, gradient=gradient)
    assert findings(case=case, dtype=dtype, mask=mask, q_per_kv=2) == []


def test_a_result_has_the_errors_of_each_output() -> None:
    result = trial.check_case(FakeBackward(spec()), MANY, CpuDevice())
    assert result.findings == [] and result.repeats == 20
    told = result.told()
    for name in ("of_bound", "dk_of_bound", "dv_of_bound"):
        assert 0 < told[name] < 1, told
    assert told["case"] == "many"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("leaves D out", "of dq: wrong"),
        ("dK without scale", "of dk: wrong"),
        ("last row of dq unwritten", "of dq: NaN"),
        ("writes behind the workspace", "elements outside workspace were written"),
        ("writes before dk", "elements outside dk were written"),
        ("writes an input", "elements of an input differ after the launches"),
        ("two places of dq differ", "dq differ in launch 2 by more than a last place"),
        ("a last place of dk differs", "1 of 16640 elements of dk differ in launch 2"),
    ],
)
def test_a_fault_is_found(fault: str, expected: str) -> None:
    assert any(expected in text for text in findings(fault)), findings(fault)


def test_a_last_place_of_dq_may_differ_unless_the_order_is_fixed() -> None:
    fault = "a last place of dq differs"
    assert findings(fault) == []
    assert any(
        "3 of 8448 elements of dq differ in launch 2" in text
        for text in findings(fault, deterministic=True)
    )


@pytest.mark.parametrize("seqlen", ["dynamic", 48])
@pytest.mark.parametrize("q_per_kv", [1, 4])
def test_every_misuse_is_refused(seqlen: Any, q_per_kv: int) -> None:
    changes = {"seqlen": {"q": seqlen, "kv": seqlen}, "q_per_kv": q_per_kv}
    found = misuses(**changes)
    assert {name: text for name, text in found.items() if text} == {}
    assert found.keys() >= {
        *(f"workspace: {x}" for x in ("one element less", "bf16", "2 dimensions")),
        *("workspace: misaligned by one element", "workspace: every second element"),
        *("workspace, dq: where dq is", "workspace, dout: where dout is"),
        *("dout: expanded", "lse: bf16", "dk, q: where q is", "softmax_scale: nan"),
    }


def test_a_kernel_that_checks_nothing_is_found() -> None:
    found = misuses("checks nothing")
    assert found["workspace: bf16"] == "accepted"
    assert found["dout: expanded"] == "accepted"


def misuses(fault: str = "", **changes: Any) -> dict[str, str]:
    kernel = FakeBackward(spec(**changes), fault)
    found = trial.events(kernel, CpuDevice(), only=[trial.MISUSE])
    return {
        event["name"]: event["finding"] for event in found if event["event"] == "misuse"
    }
