# SPDX-License-Identifier: Apache-2.0
"""The package that `vendor --init` writes: its choice, and its operator under PyTorch."""

from __future__ import annotations

import importlib
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fmha_gen.build import export
from fmha_gen.vendoring import command
from support import GENERATED

from .standins import imported, strided, tensors

torch = pytest.importorskip("torch", reason="the package's operators need PyTorch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

STEMS = (
    "sm100_d128_bf16_causal",
    "sm90_d128_bf16_causal",
    "sm90_d128_bf16_causal_lse",
    "sm90_d128_bf16_causal_s1024",
    "sm90_d128_bf16_causal_t64x64",
    "sm90_d128_bf16_full_gqa8",
    "sm90_d192x128_bf16_causal_lse",
    "sm90_d64_bf16_causal_gqa8_sink_lse",
    "sm90_d64_fp16_causal_gqa8",
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleType, list[str]]:
    return imported(tmp_path_factory.mktemp("consumer"), STEMS)


@pytest.fixture
def package(loaded: tuple[ModuleType, list[str]]) -> ModuleType:
    return loaded[0]


@pytest.fixture
def calls(loaded: tuple[ModuleType, list[str]]) -> list[str]:
    loaded[1].clear()
    return loaded[1]


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
        assert made == package.Problem(
            *(spec["arch"], spec["dtype"], *spec["head_dim"].values()),
            *(spec["q_per_kv"], spec.get("batch", "dense"), "none"),
            *(*spec["seqlen"].values(), spec["mask"], "none", "none", "none"),
            *(spec.get("sink", False), spec["lse"], spec["pack_gqa"]),
        )


def test_the_device_decides(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.kernel_for.cache_clear()  # a device's architecture does not change
    monkeypatch.setattr(package, "arch_of", lambda device: "sm100")
    kernel = package.select(*tensors(), causal=True)
    assert kernel.SPEC["name"] == "sm100_d128_bf16_causal"
    package.kernel_for.cache_clear()


def test_a_kernel_with_block_lists_is_chosen_by_no_call(tmp_path: Path) -> None:
    """The package's functions take no lists: without them it would compute something else."""
    package, _ = imported(tmp_path, ("sm90_d128_bf16_full_lists",))
    with pytest.raises(ValueError, match="mask is none, block lists, not none"):
        package.select(*tensors())


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
    for flat in (q[0], q[0, 0, 0, 0]):
        for out in (None, torch.empty_like(q)):
            with pytest.raises(ValueError, match=r"^q: needs 4 dimensions, has [30]"):
                package.fmha(flat, k, v, causal=True, out=out, return_lse=True)


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


@pytest.mark.parametrize("layout", [torch.clone, strided])
@pytest.mark.parametrize("return_lse", [False, True])
def test_out_is_written_and_returned(
    package: ModuleType, calls: list[str], layout: Any, return_lse: bool
) -> None:
    q, k, v = tensors()
    out = layout(torch.full_like(q, math.nan))
    given = {"causal": True, "return_lse": return_lse}
    found = package.fmha(q, k, v, out=out, **given)
    expected = package.fmha(q, k, v, **given)
    name = "sm90_d128_bf16_causal" + "_lse" * return_lse
    assert calls == [name, name]
    if return_lse:
        assert torch.equal(found[1], expected[1])
        found, expected = found[0], expected[0]
    assert found is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 48, 2, 64), r"^out: needs shape \(2, 48, 2, 128\), not \(2, 48, 2, 64\)"),
        ((2, 48, 256), "^out: needs 4 dimensions, has 3"),
    ],
)
def test_an_out_of_another_shape(
    package: ModuleType, shape: tuple[int, ...], message: str
) -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=message):
        package.fmha(q, k, v, causal=True, out=q.new_empty(shape))


def test_tensors_that_do_not_belong_together(package: ModuleType) -> None:
    q, k, v = tensors()
    for name, arguments, message in (
        ("k", (q, k[:1], v), r"needs shape \(2, 80, 2, 128\), not \(1, 80, 2, 128\)"),
        ("k", (q, k[:, 1:], v), r"needs shape \(2, 80, 2, 128\), not \(2, 79"),
        ("k", (q, k[..., 1:], v), r"needs shape .*, not \(2, 80, 2, 127\)"),
        ("k", (q, k.half(), v), "needs dtype torch.bfloat16, as q, not torch.float16"),
        ("v", (q, k, v.to("meta")), "needs device cpu, as q, not meta"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            package.fmha(*arguments, causal=True)
        assert str(error.value).startswith(f"{name}: ")


@pytest.mark.parametrize("return_lse", [False, True])
def test_sinks_choose_a_kernel_and_reach_it(
    package: ModuleType, calls: list[str], return_lse: bool
) -> None:
    q, k, v = tensors(heads=16, kv_heads=2, qk=64, v=64)
    sink = torch.nn.Parameter(torch.linspace(-2, 6, 16))  # as a model has it
    given: dict[str, Any] = {"causal": True, "sink": sink, "return_lse": return_lse}
    with torch.no_grad():
        found = package.fmha(q, k, v, **given)
    out, lse = found if return_lse else (found, None)
    scores = torch.einsum(
        "bqhd,bkhd->bhqk", q.float(), k.repeat_interleave(8, 2).float()
    )
    seen = torch.ones(48, 80, dtype=torch.bool).tril(32)
    scores = (scores / 8).masked_fill(~seen, -math.inf)
    total = scores.exp().sum(-1) + sink.detach().exp()[:, None]
    values = v.repeat_interleave(8, 2).float()
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.exp() / total[..., None], values)
    torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2)
    if lse is not None:
        torch.testing.assert_close(lse, total.log())
    into = torch.empty_like(out)
    with torch.no_grad():
        package.fmha(q, k, v, **given, out=into)
        assert torch.equal(into, out)
        empty = package.fmha_lse(q, k[:, :0], v[:, :0], causal=True, sink=sink)
    assert torch.equal(empty[1], sink[None, :, None].expand(2, 16, 48))
    assert set(calls) == {"sm90_d64_bf16_causal_gqa8_sink_lse"}
    for wrong in (sink.data.bfloat16(), sink.data[:2], sink.data.to("meta")):
        with pytest.raises(ValueError, match=r"^sink: needs (dtype|shape|device) "):
            package.fmha(q, k, v, causal=True, sink=wrong)
    with pytest.raises(ValueError, match=r"^sink: requires a gradient"):
        package.fmha(q, k, v, **given)
    with pytest.raises(ValueError, match="sink is False, not True"):
        package.fmha(*tensors(), causal=True, sink=sink.data[:2])


@pytest.mark.parametrize("empty", ["q", "kv", "batch"])
@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_problem_is_zeros_and_minus_infinity(
    package: ModuleType, calls: list[str], empty: str, causal: bool
) -> None:
    heads = {} if causal else {"heads": 16}  # there is no other without a mask
    sizes = {"queries": 0} if empty == "q" else {"keys": 0} if empty == "kv" else {}
    q, k, v = (x[: 0 if empty == "batch" else 2] for x in tensors(**sizes, **heads))
    out = package.fmha(q, k, v, causal=causal)
    assert torch.equal(out, torch.zeros_like(q))
    into = torch.full_like(q, math.nan)
    package.fmha(q, k, v, causal=causal, out=into)
    assert torch.equal(into, torch.zeros_like(q))
    if causal:
        into.fill_(math.nan)
        for asked in ({}, {"out": into}):
            out, lse = package.fmha_lse(q, k, v, causal=True, **asked)
            assert torch.equal(out, torch.zeros_like(q))
            batch, queries, count, _ = q.shape
            expected = torch.full((batch, count, queries), -math.inf)
            assert torch.equal(lse, expected) and lse.dtype == torch.float32
    assert calls == []
    with pytest.raises(ValueError, match=r"no kernel takes .* dtype torch\.float32"):
        package.fmha(q.float(), k.float(), v.float(), causal=causal)


@pytest.mark.parametrize("layout", [torch.clone, strided])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_opcheck(
    package: ModuleType, layout: Any, lse: bool, scale: float | None
) -> None:
    q, k, v = tensors()
    written = layout(torch.zeros_like(q)), torch.zeros(2, 2, 48) if lse else None
    given = (
        layout(q),
        k,
        v,
        *written,
        *[None] * 8,
        *package.Options(causal=True),
        scale,
    )
    torch.library.opcheck(package.OPERATOR, given)
    q, k, v = tensors(heads=16, kv_heads=2, qk=64, v=64)
    written = torch.zeros_like(q), torch.zeros(2, 16, 48) if lse else None
    more = (*[None] * 4, torch.zeros(16), *[None] * 3)
    more = (*more, *package.Options(causal=True), scale)
    torch.library.opcheck(package.OPERATOR, (q, k, v, *written, *more))


UNFIT = [
    ({"dtype": torch.float32}, {"causal": True}),
    ({"qk": 96, "v": 64}, {"causal": True}),
    ({"heads": 3}, {"causal": True}),
    ({"heads": 6}, {"causal": True}),
    ({}, {}),  # no mask
    ({"qk": 64, "v": 64}, {"causal": True, "return_lse": True}),
    ({"kv_heads": 0}, {"causal": True}),
]


@pytest.mark.parametrize(("shape", "choice"), UNFIT)
@pytest.mark.parametrize("given", [False, True])
def test_a_trace_refuses_what_no_kernel_takes(
    package: ModuleType, shape: dict[str, Any], choice: dict[str, bool], given: bool
) -> None:
    """In the words of the call itself."""
    q, k, v = tensors(**shape)

    def call(q: Any, k: Any, v: Any) -> None:
        package.fmha(q, k, v, **choice, out=torch.empty_like(q) if given else None)

    with pytest.raises(ValueError) as real:
        call(q, k, v)
    with FakeTensorMode() as mode, pytest.raises(ValueError) as fake:
        call(*map(mode.from_tensor, (q, k, v)))
    assert str(fake.value) == str(real.value)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError) as compiled:
        torch._dynamo.reset()
        torch.compile(call, fullgraph=True, backend="eager")(q, k, v)
    assert str(real.value).splitlines()[0] in str(compiled.value)


def test_fixed_lengths_are_refused_where_the_trace_knows_them(tmp_path: Path) -> None:
    package, calls = imported(tmp_path, ("sm90_d128_bf16_causal_s1024",))
    with FakeTensorMode(), pytest.raises(ValueError, match="seqlen_q is 1024, not 48"):
        package.fmha(*(torch.empty(2, 48, 2, 128).bfloat16(),) * 3, causal=True)

    def layer(q: Any, k: Any, v: Any) -> Any:
        return package.fmha(q, k, v, causal=True)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    compiled(*tensors(1024, 1024))
    assert calls == ["sm90_d128_bf16_causal_s1024"]
    with pytest.raises(ValueError, match="seqlen_q is 1024, not 1000"):
        compiled(*tensors(1000, 1000))


def test_a_trace_without_gpu_leaves_the_gpu_open(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "arch_of", lambda device: package.UNKNOWN)
    with FakeTensorMode():
        q = torch.empty(2, 48, 2, 128, device="cuda", dtype=torch.bfloat16)
        assert package.fmha(q, q, q, causal=True).shape == q.shape
        with pytest.raises(ValueError) as error:
            package.fmha(q, q, q)
    assert str(error.value).startswith("no kernel takes dtype bf16, head_dim_qk 128,")
    assert "  sm90_d128_bf16_causal: mask is causal, not none" in str(error.value)


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_takes_what_is_written(package: ModuleType, backend: str) -> None:
    def layer(q: Any, k: Any, v: Any, out: Any) -> Any:
        out.add_(1)  # before and after: the write may not move
        before = out * 1
        _, lse = package.fmha(q, k, v, causal=True, out=out, return_lse=True)
        inside = package.fmha(q, k, v, causal=True, out=torch.empty_like(q))
        return before, lse * 2, inside - out

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    q, k, v = tensors()
    outs = torch.zeros_like(q), torch.zeros_like(q)
    for found, expected in zip(
        compiled(q, k, v, outs[0]), layer(q, k, v, outs[1]), strict=True
    ):
        torch.testing.assert_close(found, expected)
    assert torch.equal(*outs)
    assert outs[0].any()


def test_a_call_is_an_operator_where_something_looks_on(package: ModuleType) -> None:
    def layer(q: Any, k: Any, v: Any) -> Any:
        return package.fmha(q, k, v, causal=True) + 1

    given = tensors()
    for mode in ("real", "fake"):
        graph = make_fx(layer, tracing_mode=mode)(*given)
        assert package.OPERATOR in [node.target for node in graph.graph.nodes]
        assert torch.equal(graph(*given), layer(*given))
    assert not package.is_traced(*given, None)
    meta = [x.to("meta") for x in given]
    assert package.fmha(*meta, causal=True).is_meta


def test_export_takes_what_is_written(package: ModuleType) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, out: Any) -> Any:
            return package.fmha(q, k, v, causal=True, out=out) + 1

    q, k, v = tensors()
    exported = torch.export.export(Layer(), (q, k, v, torch.zeros_like(q)))
    expected = package.fmha(q, k, v, causal=True)
    for program in (exported, exported.run_decompositions({})):
        out = torch.zeros_like(q)
        assert torch.equal(program.module()(q, k, v, out), expected + 1)
        assert torch.equal(out, expected)


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
    with pytest.raises(ValueError, match=r"^out: requires a gradient"):
        package.fmha(q, q, q, causal=True, out=q.clone().requires_grad_())
    with torch.no_grad():
        out = package.fmha(q, k, v, causal=True)
        assert not out.requires_grad
        assert torch.equal(package.fmha(q, k, v, causal=True, out=out * 0), out)


def test_a_write_of_out_is_seen_by_autograd(package: ModuleType) -> None:
    q, k, v = tensors()
    out = torch.empty_like(q)
    weight = torch.ones((), requires_grad=True)
    product = out * weight  # keeps out for the backward pass
    with torch.no_grad():
        package.fmha(q, k, v, causal=True, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        found = package.fmha(q, k, v, causal=True)
        assert torch.equal(package.fmha(q, k, v, causal=True, out=found * 0), out)


def test_two_packages_in_one_process(package: ModuleType, tmp_path: Path) -> None:
    other, calls = imported(tmp_path, ("sm90_d128_bf16_causal",))
    arguments = tensors()
    with pytest.raises(ValueError, match="_causal: lse is False, not True"):
        other.fmha_lse(*arguments, causal=True)
    assert torch.equal(
        other.fmha(*arguments, causal=True), package.fmha(*arguments, causal=True)
    )
    assert calls == ["sm90_d128_bf16_causal"]
    assert other.OPERATOR.name() != package.OPERATOR.name()


def test_an_object_of_the_text_spares_the_compile(tmp_path: Path) -> None:
    stem, name = "sm90_d64_fp16_causal_gqa8", "exported_attention"
    folder = tmp_path / name
    command.vendor(command.Options(folder, GENERATED, (stem,), True, ()))
    kernel = folder / f"{stem}.py"
    export.export([export.Source(stem, kernel.read_text("utf-8"), "sm_90a")], folder)
    sys.path.insert(0, str(tmp_path))
    try:
        package = importlib.import_module(name)
        with pytest.raises(TypeError, match=r"launch\(q: Tensor\("):
            package.load(stem).compile()()  # the object's function, without arguments
        package.load.cache_clear()
        kernel.write_text(kernel.read_text("utf-8") + "# edited\n", "utf-8")
        with pytest.raises(ImportError, match=r"its \.o is of another text"):
            package.load(stem)
    finally:
        sys.path.remove(str(tmp_path))
