# SPDX-License-Identifier: Apache-2.0
"""The package that `vendor --init` writes: its choice, and its operators under PyTorch.

Without a GPU each kernel's `fmha` is replaced by PyTorch's own attention; all else is as shipped.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fmha_gen.vendor import command
from support import GENERATED

torch = pytest.importorskip("torch", reason="the package's operators need PyTorch")

STEMS = (
    "sm100_d128_bf16_causal",
    "sm90_d128_bf16_causal",
    "sm90_d128_bf16_causal_lse",
    "sm90_d128_bf16_causal_s1024",
    "sm90_d128_bf16_causal_t64x64",
    "sm90_d128_bf16_full_gqa8",
    "sm90_d192x128_bf16_causal_lse",
    "sm90_d64_fp16_causal_gqa8",
)
_names = (f"attention{number}" for number in itertools.count())


def reference(spec: dict[str, Any], calls: list[str]) -> Any:
    """Attention in PyTorch for what a SPEC says, called as a kernel is."""

    def fmha(
        q: Any,
        k: Any,
        v: Any,
        *,
        softmax_scale: Any = None,
        out: Any,
        lse: Any = None,
    ) -> Any:
        assert not any(x.requires_grad for x in (q, k, v, out))
        calls.append(spec["name"])
        assert (lse is not None) <= spec["lse"]
        scale = softmax_scale or 1 / math.sqrt(q.shape[3])
        k, v = (x.repeat_interleave(spec["q_per_kv"], dim=2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
        if spec["mask"] == "causal":
            queries, keys = scores.shape[2:]
            seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            scores = scores.masked_fill(~seen, -math.inf)
        if lse is not None:
            lse.copy_(scores.logsumexp(-1))
        weights = scores.softmax(-1).nan_to_num(0.0)  # of a row that sees no key
        out.copy_(torch.einsum("bhqk,bkhd->bqhd", weights, v.float()))
        return out

    return fmha


def imported(
    folder: Path, stems: tuple[str, ...] = STEMS
) -> tuple[ModuleType, list[str]]:
    """Vendor and import a package; the names of the kernels that it then calls."""
    name = next(_names)
    options = command.Options(folder / name, GENERATED, stems, init=True)
    command.vendor(options)
    sys.path.insert(0, str(folder))
    try:
        package = importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
    calls: list[str] = []
    for kernel in map(package.load, package.KERNELS):
        kernel.fmha = reference(kernel.SPEC, calls)
    package.arch_of = lambda device: "sm90"
    return package, calls


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleType, list[str]]:
    return imported(tmp_path_factory.mktemp("consumer"))


@pytest.fixture
def package(loaded: tuple[ModuleType, list[str]]) -> ModuleType:
    return loaded[0]


@pytest.fixture
def calls(loaded: tuple[ModuleType, list[str]]) -> list[str]:
    loaded[1].clear()
    return loaded[1]


def tensors(
    queries: int = 48,
    keys: int = 80,
    *,
    heads: int = 2,
    kv_heads: int = 2,
    qk: int = 128,
    v: int = 128,
    dtype: Any = torch.bfloat16,
) -> tuple[Any, Any, Any]:
    make = functools.partial(torch.randn, generator=torch.Generator().manual_seed(1))
    shapes = (queries, heads, qk), (keys, kv_heads, qk), (keys, kv_heads, v)
    return tuple(make(2, *shape).to(dtype) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("shape", "choice", "expected"),
    [
        ({}, {"causal": True}, "sm90_d128_bf16_causal"),
        ({}, {"causal": True, "lse": True}, "sm90_d128_bf16_causal_lse"),
        ({"queries": 1024, "keys": 1024}, {"causal": True}, "sm90_d128_bf16_causal_s1024"),
        ({"queries": 1024, "keys": 1023}, {"causal": True}, "sm90_d128_bf16_causal"),
        (
            {"queries": 1024, "keys": 1024},
            {"causal": True, "lse": True},
            "sm90_d128_bf16_causal_lse",
        ),
        ({"heads": 16}, {}, "sm90_d128_bf16_full_gqa8"),
        ({"qk": 192}, {"causal": True}, "sm90_d192x128_bf16_causal_lse"),  # no other has it
        (
            {"qk": 64, "v": 64, "heads": 8, "kv_heads": 1, "dtype": torch.float16},
            {"causal": True},
            "sm90_d64_fp16_causal_gqa8",
        ),
    ],
)  # fmt: skip
def test_the_most_special_kernel_that_fits(
    package: ModuleType, shape: dict[str, Any], choice: dict[str, bool], expected: str
) -> None:
    kernel = package.select(*tensors(**shape), **choice)
    assert kernel.SPEC["name"] == expected
    assert kernel is package.load(expected)


def test_what_is_said_of_kernels_is_in_their_files(package: ModuleType) -> None:
    assert sorted(package.KERNELS) == sorted(STEMS)
    for name, made in package.KERNELS.items():
        spec = package.load(name).SPEC
        assert made == (
            *(spec["arch"], spec["dtype"], *spec["head_dim"].values()),
            *(spec["q_per_kv"], *spec["seqlen"].values(), spec["mask"], spec["lse"]),
        )


def test_the_device_decides(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "arch_of", lambda device: "sm100")
    kernel = package.select(*tensors(), causal=True)
    assert kernel.SPEC["name"] == "sm100_d128_bf16_causal"


def test_where_none_fits_the_nearest_are_named(package: ModuleType) -> None:
    with pytest.raises(ValueError) as error:
        package.select(*tensors(1024, 512, heads=12, kv_heads=4), causal=True, lse=True)
    assert str(error.value) == (
        "no kernel takes arch sm90, dtype bf16, head_dim_qk 128, head_dim_v 128,"
        " q_per_kv 3, seqlen_q 1024, seqlen_kv 512, mask causal, lse True; nearest:\n"
        "  sm90_d128_bf16_causal_lse: q_per_kv is 1, not 3\n"
        "  sm90_d128_bf16_causal: q_per_kv is 1, not 3; lse is False, not True\n"
        "  sm90_d128_bf16_causal_t64x64: q_per_kv is 1, not 3; lse is False, not True"
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"dtype": torch.float32}, "dtype is bf16, not torch.float32"),
        ({"heads": 3, "kv_heads": 2}, "q_per_kv is 1, not 3/2"),
        ({"kv_heads": 0}, "q_per_kv is 1, not 2/0"),
        ({"qk": 96, "v": 64}, "head_dim_qk is 128, not 96; head_dim_v is 128, not 64"),
    ],
)
def test_what_no_kernel_takes(
    package: ModuleType, shape: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f": {message}"):
        package.fmha(*tensors(**shape), causal=True)


def test_a_tensor_of_three_dimensions(package: ModuleType) -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"^k: needs 4 dimensions, has 3"):
        package.fmha(q, k[0], v, causal=True)


def test_results_are_the_kernels(package: ModuleType, calls: list[str]) -> None:
    q, k, v = tensors()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).float() for x in (q, k, v)),
        attn_mask=torch.ones(48, 80, dtype=torch.bool).tril(32),
        scale=0.125,
    ).transpose(1, 2)
    out = package.fmha(q, k, v, causal=True, softmax_scale=0.125)
    torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2)
    again, lse = package.fmha_lse(q, k, v, causal=True, softmax_scale=0.125)
    assert torch.equal(out, again)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * 0.125
    seen = torch.ones(48, 80, dtype=torch.bool).tril(32)
    expected = scores.masked_fill(~seen, -math.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected)
    assert calls == ["sm90_d128_bf16_causal", "sm90_d128_bf16_causal_lse"]


@pytest.mark.parametrize("name", ["fmha_op", "fmha_lse_op"])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_opcheck(package: ModuleType, name: str, scale: float | None) -> None:
    q, k, v = tensors()
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    for query in (q, strided):
        torch.library.opcheck(getattr(package, name), (query, k, v, True, scale))


BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(
            shutil.which("g++") is None, reason="inductor needs g++ without a GPU"
        ),
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_takes_it_whole(package: ModuleType, backend: str) -> None:
    def layer(q: Any, k: Any, v: Any) -> Any:
        out, lse = package.fmha_lse(q * 2, k, v, causal=True)
        return package.fmha(out, k, v, causal=True) + 1, lse * 2

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for queries in (48, 33):
        arguments = tensors(queries)
        for found, expected in zip(
            compiled(*arguments), layer(*arguments), strict=True
        ):
            torch.testing.assert_close(found, expected)


def test_export_of_dynamic_lengths_chooses_when_it_runs(
    package: ModuleType, calls: list[str]
) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return package.fmha(q, k, v, causal=True)

    length, batch = torch.export.Dim("length", min=2, max=4096), torch.export.Dim(
        "batch"
    )
    sizes = {0: batch, 1: length}
    exported = torch.export.export(
        Layer(), tensors(64, 64), dynamic_shapes=(sizes,) * 3
    )
    calls.clear()
    for queries in (96, 1024):
        arguments = tensors(queries, queries)
        found = exported.module()(*arguments)
        assert torch.equal(found, package.fmha(*arguments, causal=True))
    assert calls == ["sm90_d128_bf16_causal"] * 2 + ["sm90_d128_bf16_causal_s1024"] * 2


def test_a_gradient_is_refused(package: ModuleType) -> None:
    q, k, v = tensors()
    k.requires_grad_()
    with pytest.raises(ValueError, match=r"^k: requires a gradient"):
        package.fmha(q, k, v, causal=True)
    with torch.no_grad():
        package.fmha(q, k * 1, v, causal=True)


def test_two_packages_in_one_process(package: ModuleType, tmp_path: Path) -> None:
    other, calls = imported(tmp_path, ("sm90_d128_bf16_causal",))
    assert not hasattr(other, "fmha_lse")  # none of its kernels has it
    arguments = tensors()
    assert torch.equal(
        other.fmha(*arguments, causal=True), package.fmha(*arguments, causal=True)
    )
    assert calls == ["sm90_d128_bf16_causal"]
    assert other.fmha_op._qualname != package.fmha_op._qualname
