# SPDX-License-Identifier: Apache-2.0
"""A vendored package and its adapters on a Hopper GPU, beside PyTorch's own attention.

    pytest tests/hardware/test_vendored.py -s

Skipped, with the reason, where such a GPU, PyTorch or transformers is missing. Errors are against
float64, and bounded by twice those of PyTorch's attention in the same dtype.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fmha_gen.errors import EnvironmentProblem
from fmha_gen.evidence import validate
from fmha_gen.vendoring import command

torch = pytest.importorskip("torch", reason="the package's operators need PyTorch")

GENERATED = Path(__file__).resolve().parents[2] / "generated"
STEMS = (
    "sm90_d128_bf16_causal_gqa8_pack_t64x128",
    "sm90_d128_bf16_causal_lse",
    "sm90_d128_bf16_causal_s1024",
    "sm90_d128_bf16_full",
    "sm90_d128_bf16_causal_gqa8_pack_varlen",
    "sm90_d128_bf16_causal_varlen_lse",
    "sm90_d128_bf16_causal_w1023",
    "sm90_d128_e4m3_causal_lse",
    "sm90_d128_fp16_causal_lse_gqa4",
    "sm90_d64_bf16_causal_lse",
)
NAME = "vendored_attention"
WRONG_IN_8_BITS = 0.06  # where P is rounded to e4m3, which alone is 0.026

pytestmark = pytest.mark.hardware


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    try:
        validate.require_gpu()
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernels vendored here are for sm90")
    folder = tmp_path_factory.mktemp("consumer")
    adapters = ("pytorch", "transformers")
    command.vendor(command.Options(folder / NAME, GENERATED, STEMS, True, adapters))
    sys.path.insert(0, str(folder))
    yield importlib.import_module(NAME)
    sys.path.remove(str(folder))


@pytest.fixture
def used(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are chosen from now on."""
    found: list[str] = []
    load = package.load

    def spy(name: str) -> ModuleType:
        found.append(name)
        return load(name)

    monkeypatch.setattr(package, "load", spy)
    return found


def tensors(
    queries: int = 333,
    keys: int = 333,
    *,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 128,
    dtype: Any = torch.bfloat16,
) -> list[Any]:
    """q, k, v: [2, seqlen, heads, head_dim]."""
    generator = torch.Generator("cuda").manual_seed(3)
    shapes = (queries, heads), (keys, kv_heads), (keys, kv_heads)
    return [
        torch.randn(
            2, *shape, head_dim, generator=generator, device="cuda", dtype=dtype
        )
        for shape in shapes
    ]


def exact(q: Any, k: Any, v: Any, causal: bool, scale: float | None = None) -> Any:
    """out and lse in float64; q, k, v as `tensors` gives them."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.mT * (scale or 1 / math.sqrt(q.shape[3]))
    if causal:
        rows, columns = scores.shape[2:]
        seen = torch.ones(rows, columns, dtype=torch.bool, device="cuda")
        scores = scores.masked_fill(~seen.tril(columns - rows), -math.inf)
    out = (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)
    return out, scores.logsumexp(-1)


def sdpa(q: Any, k: Any, v: Any, causal: bool, scale: float | None = None) -> Any:
    """PyTorch's own attention of the same tensors, in the layout of ours."""
    mask = None
    if causal:
        rows, columns = q.shape[1], k.shape[1]
        mask = torch.ones(rows, columns, dtype=torch.bool, device="cuda")
        mask = mask.tril(columns - rows)
    return torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def check(found: Any, usual: Any, truth: Any) -> None:
    """What is found is off by at most twice of what is usual."""
    error, bound = ((x.double() - truth).norm().item() for x in (found, usual))
    print(
        f"error {error / truth.norm().item():.2e}, usual {bound / truth.norm().item():.2e}"
    )
    assert bound > 0 and error <= 2 * bound


# --- the package -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "causal", "kernel"),
    [
        ({}, True, "sm90_d128_bf16_causal_lse"),
        ({"queries": 100}, True, "sm90_d128_bf16_causal_lse"),
        ({"queries": 1024, "keys": 1024}, True, "sm90_d128_bf16_causal_s1024"),
        ({"queries": 70, "keys": 500}, False, "sm90_d128_bf16_full"),
        (
            {"heads": 16, "kv_heads": 2},
            True,
            "sm90_d128_bf16_causal_gqa8_pack_t64x128",
        ),
    ],
)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_out(
    package: ModuleType,
    used: list[str],
    shape: dict[str, Any],
    causal: bool,
    kernel: str,
    scale: float | None,
) -> None:
    q, k, v = tensors(**shape)
    out = package.fmha(q, k, v, causal=causal, softmax_scale=scale)
    check(out, sdpa(q, k, v, causal, scale), exact(q, k, v, causal, scale)[0])
    memory = torch.full_like(q.transpose(1, 2), math.nan).contiguous()
    into = memory.transpose(1, 2)  # of another layout
    found = package.fmha(q, k, v, causal=causal, softmax_scale=scale, out=into)
    assert found is into
    assert torch.equal(into, out)
    assert used == [kernel] * 2


def test_lse(package: ModuleType, used: list[str]) -> None:
    q, k, v = tensors(100, 333)
    truth, lse = exact(q, k, v, True)
    for out in (None, torch.empty_like(q)):
        found = package.fmha(q, k, v, causal=True, out=out, return_lse=True)
        check(found[0], sdpa(q, k, v, True), truth)
        torch.testing.assert_close(found[1].double(), lse, atol=1e-4, rtol=1e-4)
    assert used == ["sm90_d128_bf16_causal_lse"] * 2


def test_empty_problems(package: ModuleType) -> None:
    for queries, keys, batch in ((0, 64, 2), (64, 0, 2), (64, 64, 0)):
        q, k, v = (x[:batch] for x in tensors(queries, keys))
        into = torch.full_like(q, math.nan)
        for out in (None, into):
            found, lse = package.fmha_lse(q, k, v, causal=True, out=out)
            assert torch.equal(found, torch.zeros_like(q))
            assert torch.equal(lse, torch.full_like(lse, -math.inf))
            assert lse.shape == (batch, 4, queries)


def test_packed_sequences_and_a_graph_of_any_lengths(
    package: ModuleType, used: list[str]
) -> None:
    q, k, v = (x.flatten(0, 1) for x in tensors(700, 700))
    starts = torch.tensor([0, 333, 333, 1400], dtype=torch.int32, device="cuda")
    out, asked = torch.empty_like(q), {"causal": True, "return_lse": True}
    asked |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "out": out}
    package.fmha(q, k, v, **asked)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = package.fmha(q, k, v, **asked)
    assert used == ["sm90_d128_bf16_causal_varlen_lse"] * 2
    for places in ([0, 333, 333, 1400], [0, 1, 2, 65], [7, 500, 501, 900]):
        starts.copy_(torch.tensor(places, dtype=torch.int32))
        out.fill_(math.nan)
        graph.replay()
        for begin, end in itertools.pairwise(places):
            rows = [x[None, begin:end] for x in (q, k, v)]
            truth, logs = exact(*rows, True)
            if end > begin:
                check(out[None, begin:end], sdpa(*rows, True), truth)
            torch.testing.assert_close(
                lse[:, begin:end].double(), logs[0], atol=1e-4, rtol=1e-4
            )
        assert out[: places[0]].isnan().all() and out[places[-1] :].isnan().all()


@pytest.mark.parametrize("told", [False, True], ids=["left out", "given"])
def test_e4m3_and_a_graph(package: ModuleType, used: list[str], told: bool) -> None:
    """Factors of strides 0, by heads, and by sequences; those that are left out are 1."""
    given = [x.to(torch.float8_e4m3fn) for x in tensors(200, 333)]
    descales = (
        torch.tensor(0.5, device="cuda").expand(2, 4),
        torch.linspace(0.5, 2.0, 4, device="cuda").expand(2, 4),
        torch.tensor([0.25, 4.0], device="cuda")[:, None].expand(2, 4),
    )
    factors = descales if told else [torch.ones(2, 4, device="cuda")] * 3
    numbers = [
        x.double() * factor[:, None, :, None]
        for x, factor in zip(given, factors, strict=True)
    ]
    truth, logs = exact(*numbers, True)
    asked = {"causal": True, "return_lse": True, "descales": descales if told else None}
    out, lse = package.fmha(*given, **asked)  # compiles
    assert out.dtype is torch.bfloat16
    assert (out.double() - truth).norm() <= WRONG_IN_8_BITS * truth.norm()
    torch.testing.assert_close(lse.double(), logs, atol=1e-3, rtol=1e-3)
    graph, into = torch.cuda.CUDAGraph(), torch.zeros_like(out)
    with torch.cuda.graph(graph):
        package.fmha(*given, **asked, out=into)
    graph.replay()
    assert torch.equal(into, out)
    assert set(used) == {"sm90_d128_e4m3_causal_lse"}


def test_a_window(package: ModuleType, used: list[str]) -> None:
    q, k, v = tensors(1500, 1500)
    out = package.fmha(q, k, v, causal=True, window=(1023, 0))
    assert used == ["sm90_d128_bf16_causal_w1023"]
    last = [q[:, -1:], k[:, -1024:], v[:, -1024:]]
    check(out[:, -1:], sdpa(*last, True), exact(*last, True)[0])


def test_rows_that_see_no_key(package: ModuleType) -> None:
    q, k, v = tensors(200, 64)
    out, lse = package.fmha_lse(q, k, v, causal=True)
    assert not out[:, :136].any() and (lse[..., :136] == -math.inf).all()
    assert out[:, 136:].any() and lse[..., 136:].isfinite().all()


def test_refusals(package: ModuleType) -> None:
    q, k, v = tensors(heads=3, kv_heads=3)
    with pytest.raises(ValueError, match=r"dtype is bf16, not torch\.float32"):
        package.fmha(q.float(), k.float(), v.float(), causal=True)
    with pytest.raises(ValueError, match=r"^k: needs device cuda:0, as q, not cpu"):
        package.fmha(q, k.cpu(), v)
    q.requires_grad_()
    with pytest.raises(ValueError, match=r"^q: requires a gradient"):
        package.fmha(q, k, v)
    with torch.no_grad():
        assert package.fmha(q, k, v).isfinite().all()


def test_compile_takes_it_whole(package: ModuleType) -> None:
    def layer(q: Any, k: Any, v: Any, out: Any) -> Any:
        _, lse = package.fmha(q * 2, k, v, causal=True, out=out, return_lse=True)
        return package.fmha(out, k, v, causal=True) + 1, lse * 2, out - 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for queries in (333, 100):
        q, k, v = tensors(queries)
        outs = torch.zeros_like(q), torch.zeros_like(q)
        for found, expected in zip(
            compiled(q, k, v, outs[0]), layer(q, k, v, outs[1]), strict=True
        ):
            torch.testing.assert_close(found, expected)
        assert torch.equal(*outs) and outs[0].any()
    q, k, v = tensors(heads=6, kv_heads=2)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="no kernel takes"):
        torch._dynamo.reset()
        torch.compile(layer, fullgraph=True)(q, k, v, torch.zeros_like(q))


def test_export(package: ModuleType) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, out: Any) -> Any:
            return package.fmha(q, k, v, causal=True, out=out) + 1

    sizes = {1: torch.export.Dim("length", min=2, max=4096)}
    q, k, v = tensors()
    arguments = (q, k, v, torch.zeros_like(q))
    exported = torch.export.export(Layer(), arguments, dynamic_shapes=(sizes,) * 4)
    for length in (333, 1024):
        q, k, v = tensors(length, length)
        out = torch.zeros_like(q)
        expected = package.fmha(q, k, v, causal=True)
        assert torch.equal(exported.module()(q, k, v, out), expected + 1)
        assert torch.equal(out, expected)


def test_a_graph_replays_into_out(package: ModuleType) -> None:
    q, k, v = tensors()
    out = torch.zeros_like(q)
    package.fmha(q, k, v, causal=True, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        package.fmha(q, k, v, causal=True, out=out)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, package.fmha(q, k, v, causal=True))


# --- PyTorch's SDPA ----------------------------------------------------------------------


@pytest.fixture
def activated(package: ModuleType) -> Iterator[None]:
    attention = torch.nn.attention
    if not hasattr(attention, "activate_flash_attention_impl"):
        pytest.skip("PyTorch has no registry of flash attention before 2.11")
    importlib.import_module(f"{NAME}.pytorch_adapter").register()
    attention.activate_flash_attention_impl("fmha_gen")
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        yield
    attention.restore_flash_attention_impl()


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("learns", [False, True])
def test_sdpa_is_ours(
    package: ModuleType, used: list[str], head_dim: int, scale: float, learns: bool
) -> None:
    q, k, v = tensors(head_dim=head_dim)
    q.requires_grad_(learns)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=scale
    ).transpose(1, 2)
    assert used == [f"sm90_d{head_dim}_bf16_causal_lse"]
    if learns:
        with pytest.raises(ValueError, match="no backward kernel takes"):
            out.sum().backward()
    q, out = q.detach(), out.detach()
    torch.nn.attention.restore_flash_attention_impl()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        usual = sdpa(q, k, v, True, scale)
    assert used == [f"sm90_d{head_dim}_bf16_causal_lse"]
    check(out, usual, exact(q, k, v, True, scale)[0])


@pytest.mark.usefixtures("activated")
def test_sdpa_with_grouped_heads(package: ModuleType, used: list[str]) -> None:
    q, k, v = tensors(heads=8, kv_heads=2, dtype=torch.float16)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    assert used == ["sm90_d128_fp16_causal_lse_gqa4"]
    torch.nn.attention.restore_flash_attention_impl()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        check(out, sdpa(q, k, v, True), exact(q, k, v, True)[0])


@pytest.mark.usefixtures("activated")
def test_sdpa_s_lse_and_refusals(package: ModuleType) -> None:
    q, k, v = tensors()
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    _, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*rows, 0.0, True)
    expected = exact(q, k, v, True)[1]
    torch.testing.assert_close(lse.double(), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="mask is causal, not none"):
        torch.nn.functional.scaled_dot_product_attention(*rows)
    starts = torch.tensor([0, 333], dtype=torch.int32, device="cuda")
    found, lse, *_ = torch.ops.aten._flash_attention_forward(
        q[0], k[0], v[0], starts, starts, 333, 333, 0.0, True, False
    )
    assert lse.shape == (4, 333)
    check(
        found[None],
        sdpa(q[:1], k[:1], v[:1], True),
        exact(q[:1], k[:1], v[:1], True)[0],
    )


# --- transformers ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(package: ModuleType) -> list[Any]:
    """One small Llama of random weights: by the kernels, by sdpa, and in float64."""
    hub = pytest.importorskip("transformers", reason="the adapter needs transformers")
    importlib.import_module(f"{NAME}.transformers_adapter").register()
    made: list[Any] = []
    for attention in ("fmha_gen", "sdpa", "eager"):
        config = hub.LlamaConfig(
            vocab_size=512,
            hidden_size=512,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=1,
            head_dim=128,
        )
        config._attn_implementation = attention
        made.append(hub.LlamaForCausalLM(config).eval().bfloat16().cuda())
        made[-1].load_state_dict(made[0].state_dict())
        assert made[-1].config._attn_implementation == attention
    made[2].double()
    return made


def token_ids(length: int = 300) -> Any:
    generator = torch.Generator("cuda").manual_seed(4)
    return torch.randint(0, 512, (2, length), generator=generator, device="cuda")


@torch.no_grad()
def test_a_model_of_transformers(models: list[Any], used: list[str]) -> None:
    ids = token_ids()
    check(*(model(ids).logits for model in models))
    assert used == ["sm90_d128_bf16_causal_gqa8_pack_t64x128"] * 4
    caches = [model(ids[:, :200], use_cache=True).past_key_values for model in models]
    for begin, end in ((200, 290), (290, 291), (291, 292)):  # more, then decoding
        steps = []
        for model, cache in zip(models, caches, strict=True):
            steps.append(model(ids[:, begin:end], past_key_values=cache).logits)
        check(*steps)
    used.clear()
    ones = torch.ones_like(ids)
    found = models[0].generate(
        ids, attention_mask=ones, max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    assert found.shape == (2, 305) and len(used) == 5 * 4


@torch.no_grad()
def test_a_compiled_model_of_transformers(models: list[Any], used: list[str]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(models[0], fullgraph=True)
    ids = token_ids()
    check(
        compiled(ids, use_cache=True).logits,
        *(model(ids).logits for model in models[1:]),
    )
    assert used == ["sm90_d128_bf16_causal_gqa8_pack_t64x128"] * 4


@torch.no_grad()
def test_a_padded_batch(models: list[Any], used: list[str]) -> None:
    ids = token_ids()
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    found, usual = (
        model(ids, attention_mask=mask).logits[mask.bool()] for model in models[:2]
    )
    alone = [models[2](ids[i : i + 1, mask[i].bool()]).logits[0] for i in range(2)]
    check(found, usual, torch.cat(alone))
    assert used == ["sm90_d128_bf16_causal_gqa8_pack_varlen"] * 4
    holes = mask.clone()
    holes[0, 20:30] = 0
    with pytest.raises(
        NotImplementedError, match=r"^attention_mask: .* between tokens"
    ):
        models[0](ids, attention_mask=holes)
