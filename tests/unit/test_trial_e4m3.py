# SPDX-License-Identifier: Apache-2.0
"""A trial of kernels of 8 bits: a right one holds, each wrong one is found, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip(
    "torch", reason="needs PyTorch (CPU): pip install 'fmha-gen[torch]'"
)

from fake_kernel import CpuDevice, FakeKernel, distinct, spec  # noqa: E402
from fmha_gen.evidence import trial  # noqa: E402
from fmha_gen.ops.cases import Case  # noqa: E402
from fmha_gen.ops.e4m3 import natural_v  # noqa: E402
from fmha_gen.ops.reference import in_e4m3  # noqa: E402

FIELDS = {"dtype": "e4m3", "out_dtype": "bf16", "v_layout": "permuted"}
DESCALES = {"descale": "head"}
CASE = Case("small", batch=2, kv_heads=2, q=33, kv=65)
LAYOUTS = ["own", "bhsd", "mixed", "fused", "cache", "plain"]
DATA = ["normal", "edges", "rising", "peaks", "slope", "all_1e4", "uniform_1e4"]


class In8Bits(FakeKernel):
    """P is 2^8 at a row's largest score, rounded to e4m3."""

    def __init__(self, SPEC: dict[str, Any], fault: str = "") -> None:
        super().__init__(SPEC, fault)
        self.RESCALE_SLACK = 0.8

    def fmha(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        softmax_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        **factors: Any,
    ) -> Any:
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self._refuse({"q": q, "k": k, "v": v, **factors, "out": out, "lse": lse}, scale)
        self.launches += 1
        batch, rows, heads, head_dim = q.shape
        if out is None:
            dtype = trial.DTYPES[self.SPEC["out_dtype"]]
            out = torch.empty(batch, rows, heads, head_dim, dtype=dtype)
        if lse is None:
            lse = torch.empty(batch, heads, rows)
        rows_of_v = natural_v(v, k.shape[1])
        if self.fault == "takes natural V^T":
            rows_of_v = v.permute(0, 3, 1, 2)[:, : k.shape[1]]
        parts = []
        for name, x in (("q", q), ("k", k), ("v", rows_of_v)):
            x = x.double()
            if factors and self.fault != f"ignores {name}_descale":
                of_heads = factors[f"{name}_descale"].double()
                group = x.shape[2] // of_heads.shape[1]
                x = x * of_heads.repeat_interleave(group, 1)[:, None, :, None]
            parts.append(x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2))
        found, natural = self._attend(*parts, scale)
        out.copy_(found.transpose(1, 2))
        lse.copy_(natural)
        return out, lse

    def _attend(self, q: Any, k: Any, v: Any, scale: float) -> Any:
        scores = q @ k.mT * scale
        if self.SPEC["mask"] == "causal":
            places = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
            hidden = torch.arange(k.shape[2]) > places
            scores = scores.masked_fill(hidden, -math.inf)
        largest = scores.amax(-1, keepdim=True)
        offset = 0 if self.fault == "has no offset" else 8
        shift = largest.where(largest > -math.inf, torch.zeros(()).double())
        p = (scores - shift).exp() * 2.0**offset
        total = p.sum(-1, keepdim=True)
        lse = largest + (total * 2.0**-offset).log()
        divisor = total.where(total > 0, torch.ones(()).double())
        return in_e4m3(p) @ v / divisor, lse[..., 0]

    def _refuse(self, given: dict[str, Any], scale: float) -> None:
        if self.fault == "checks nothing":
            return

        def check(holds: bool, name: str) -> None:
            if not holds:
                raise ValueError(f"{name} is wrong")

        for name, x in given.items():
            if x is not None:
                check(x.device.type == "cpu" and 0 not in x.shape, name)
        q, k, v = (given[name] for name in "qkv")
        for name, x in (("q", q), ("k", k), ("v", v), ("out", given["out"])):
            if x is None:
                continue
            of_o = name == "out"
            dtype = trial.DTYPES[self.SPEC["out_dtype" if of_o else "dtype"]]
            check(x.dtype == dtype and x.dim() == 4, name)
            steps = [at * x.element_size() for at in x.stride()[:-1]]
            sizes = zip(steps, x.shape, strict=False)
            check(all(at % 16 == 0 for at, n in sizes if n > 1), name)
            check(x.stride(-1) == 1 and x.data_ptr() % 16 == 0, name)
        batch, rows, heads, dim = q.shape
        kv_heads, keys = k.shape[2], k.shape[1]
        check(dim == self.SPEC["head_dim"]["qk"], "q")
        check(heads == kv_heads * self.SPEC["q_per_kv"], "q")
        check(k.shape == (batch, keys, kv_heads, dim), "k")
        padded = -(-keys // 16) * 16
        check(v.shape == (batch, kv_heads, self.SPEC["head_dim"]["v"], padded), "v")
        for name in ("q_descale", "k_descale", "v_descale"):
            check((name in given) == ("descale" in self.SPEC), name)
            if name in given:
                x = given[name]
                check(x.dtype == torch.float32 and x.shape == (batch, kv_heads), name)
        shapes = {"out": (batch, rows, heads, dim), "lse": (batch, heads, rows)}
        used = {x.untyped_storage().data_ptr() for x in (q, k, v)}
        used |= {x.untyped_storage().data_ptr() for n, x in given.items() if "_d" in n}
        for name, shape in shapes.items():
            if (x := given[name]) is not None:
                check(x.shape == shape and distinct(x), name)
                check(name == "out" or x.dtype == torch.float32, name)
                place = x.untyped_storage().data_ptr()
                check(place not in used, name)
                used.add(place)
        check(1e-37 < scale < 1e37, "softmax_scale")


def findings(fault: str = "", case: Case = CASE, **changes: Any) -> list[str]:
    kernel = In8Bits(spec(**{**FIELDS, **DESCALES, "q_per_kv": 2, **changes}), fault)
    return trial.check_case(kernel, case, CpuDevice()).findings


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv", [33, 48])
def test_a_right_kernel_holds_in_every_layout(layout: Any, kv: int) -> None:
    case = Case("layout", batch=2, kv_heads=2, q=33, kv=kv, layout=layout)
    assert findings(case=case) == []


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("data", [*DATA, "descales", "mean_v"])
@pytest.mark.parametrize(("q", "kv"), [(40, 40), (17, 65), (65, 17), (33, 1)])
def test_a_right_kernel_holds_on_every_kind_of_data(
    mask: str, data: Any, q: int, kv: int
) -> None:
    case = Case("data", batch=2, kv_heads=2, q=q, kv=kv, data=data)
    assert findings(case=case, mask=mask) == []
    assert findings(case=case, mask=mask, out_dtype="fp16") == []


def test_a_right_kernel_repeats_and_is_captured() -> None:
    many = Case("many", batch=1, kv_heads=1, q=9, kv=17, repeats=20)
    assert findings(case=many) == []


@pytest.mark.parametrize(
    "fault",
    [
        *(f"ignores {name}_descale" for name in "qkv"),
        *("takes natural V^T", "has no offset"),
    ],
)
def test_a_fault_is_found(fault: str) -> None:
    case = Case("wrong", batch=2, kv_heads=2, q=200, kv=300, scale_factor=3.5)
    found = findings(fault, case)
    assert any("of out: wrong" in x or "mean square error" in x for x in found), found
    assert findings(case=case) == []


def misuse_findings(fault: str = "", **fields: Any) -> dict[str, str]:
    kernel = In8Bits(spec(**{**FIELDS, "q_per_kv": 2, **fields}), fault)
    found = trial.events(kernel, CpuDevice(), only=[trial.MISUSE])
    return {
        event["name"]: event["finding"] for event in found if event["event"] == "misuse"
    }


@pytest.mark.parametrize("fields", [DESCALES, {}], ids=["descales", "plain"])
def test_a_right_kernel_refuses_every_misuse(fields: dict[str, Any]) -> None:
    found = misuse_findings(**fields)
    assert {name: text for name, text in found.items() if text} == {}
    assert {"v: half the seqlen_v", "q: bf16", "v: misaligned by one element"} <= {
        *found
    }
    of_factors = {name for name in found if name.startswith("v_descale: ")}
    if not fields:
        assert of_factors == {"v_descale: not a parameter of this kernel"}
    else:
        assert {"v_descale: fp16", "v_descale: one more of heads_kv"} <= of_factors


def test_a_kernel_that_checks_nothing_is_found() -> None:
    found = misuse_findings("checks nothing", **DESCALES)
    assert found["q: misaligned by one element"] == "accepted"
    assert found["k: stride of seqlen_kv 8 bytes more"] == "accepted"
    assert found["out, q: where q is"] == "accepted"


def test_the_spoiled_strides_are_off_by_8_bytes() -> None:
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        x = torch.zeros(2, 3, 4, 64).to(dtype)
        padded = trial._padded(x, axis=1)
        step = (padded.stride(1) - x.stride(1)) * x.element_size()
        assert step == 8 and padded.stride()[2:] == x.stride()[2:]
