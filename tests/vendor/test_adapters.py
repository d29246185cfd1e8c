# SPDX-License-Identifier: Apache-2.0
"""The adapters that `vendor --adapter` writes, called by PyTorch's and transformers' own code.

Without a GPU each kernel's `fmha` is PyTorch's own attention (standins.py).
"""

from __future__ import annotations

import functools
import importlib
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fmha_gen.errors import CheckFailed
from fmha_gen.vendoring import command, contents
from support import GENERATED

from .standins import expected, imported, packed, source_of, strided, tensors

torch = pytest.importorskip("torch", reason="the adapters are for PyTorch's tensors")

STEMS = (
    "sm90_d128_bf16_causal_lse",
    "sm90_d128_bf16_full_gqa8",
    "sm90_d64_bf16_causal",
    "sm90_d64_bf16_causal_gqa8_sink_lse",
    "sm90_d64_bf16_full",
    "sm90_d64_fp16_causal_gqa8",
)
Loaded = tuple[ModuleType, list[str]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("consumer")
    return imported(folder, STEMS, adapters=("transformers", "pytorch"))


LSE: dict[str, Any] = {"q_per_kv": 2, "mask": "causal", "lse": True}
W7: dict[str, Any] = {"window": {"left": 7, "right": "none"}}
PAGES: dict[str, Any] = {"kv": {"paged": {"page": 16}}}
PACKED: dict[str, dict[str, Any]] = {
    "packed_lse": LSE,
    "packed_w7": LSE | W7,
    "paged_lse": LSE | PAGES,
    "paged_w7": LSE | W7 | PAGES,
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A package of stand-ins for packed sequences."""
    folder = tmp_path_factory.mktemp("packed")
    source = source_of(folder / "generated", PACKED)
    return imported(folder, tuple(PACKED), ("transformers", "pytorch"), source)


@pytest.fixture
def calls(loaded: Loaded) -> list[str]:
    loaded[1].clear()
    return loaded[1]


def adapter(loaded: Loaded, name: str) -> ModuleType:
    return importlib.import_module(f"{loaded[0].__name__}.{name}_adapter")


# --- which files are written -------------------------------------------------------------


def test_adapters_come_with_the_package_and_stay(tmp_path: Path) -> None:
    into = tmp_path / "attention"
    options = command.Options(into, GENERATED, STEMS, adapters=("pytorch",))
    command.vendor(options)
    file, other = (
        into / contents.ADAPTERS[name] for name in ("pytorch", "transformers")
    )
    assert (into / contents.PACKAGE).exists() and not other.exists()
    assert "pytorch_adapter" in (into / contents.README).read_text()
    assert "transformers_adapter" not in (into / contents.README).read_text()
    text = file.read_text()
    assert "from attention import pytorch_adapter" in text

    file.write_text(text.replace("num_splits=1", "num_splits=2", 1))
    result = command.vendor(command.Options(into, GENERATED))
    (edited,) = (step for step in result.steps if step.edited)
    assert (edited.path, edited.action) == (file.name, "keep")
    assert edited.edits[0].name == "_flash_attn_fwd"
    file.unlink()
    command.vendor(command.Options(into, GENERATED))
    assert not file.exists() and (into / contents.PACKAGE).exists()
    assert "pytorch_adapter" not in (into / contents.README).read_text()


def test_what_no_adapter_is_for(tmp_path: Path) -> None:
    vendor = functools.partial(command.Options, tmp_path / "attention", GENERATED)
    with pytest.raises(CheckFailed, match=r"^jax: .* only: flash_attention, pytorch, "):
        command.vendor(vendor(STEMS, adapters=("jax",)))
    without = ("sm90_d64_bf16_full",)
    with pytest.raises(CheckFailed, match="wants an lse, and no kernel gives one"):
        command.vendor(vendor(without, adapters=("pytorch",)))
    with pytest.raises(CheckFailed, match="a file of the package has this name"):
        command.vendor(vendor(("pytorch_adapter",)))
    command.vendor(vendor(without, adapters=("transformers",)))


# --- PyTorch -----------------------------------------------------------------------------

pytorch = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"),
    reason="PyTorch has no registry of flash attention before 2.11",
)


@pytest.fixture
def forward(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch's own implementation of SDPA's flash forward, as activated with the adapter."""
    from torch.nn import attention
    from torch.nn.attention import _fa4

    adapter(loaded, "pytorch").register(loaded[0].__name__)
    attention.activate_flash_attention_impl(loaded[0].__name__)
    assert attention.current_flash_attention_impl() == loaded[0].__name__
    # It asks for CUDA tensors and a GPU, which there are not.
    monkeypatch.setattr(_fa4, "_fa4_forward_support_error", lambda *_: None)
    monkeypatch.setattr(_fa4, "_fa4_backward_support_error", lambda *_, **__: None)
    yield _fa4._fa4_scaled_dot_product_flash_attention_forward_impl
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None


@pytorch
@pytest.mark.parametrize("layout", [torch.clone, strided])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("learns", [False, True])
def test_pytorch_calls_the_kernels(
    forward: Any, calls: list[str], layout: Any, scale: float | None, learns: bool
) -> None:
    q, k, v = (layout(x.transpose(1, 2)) for x in tensors(80, 80))
    q.requires_grad_(learns)
    out, lse, _, _, max_q, max_k, *_ = forward(q, k, v, 0.0, True, scale=scale)
    assert calls == ["sm90_d128_bf16_causal_lse"]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.detach().float() for x in (q, k, v)), is_causal=True, scale=scale
    )
    torch.testing.assert_close(out.detach().float(), expected, atol=1e-2, rtol=1e-2)
    assert out.stride() == q.stride()
    scores = q.detach().float() @ k.float().mT * (scale or 1 / math.sqrt(128))
    seen = torch.ones(80, 80, dtype=torch.bool).tril()
    expected = scores.masked_fill(~seen, -math.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected)
    assert (max_q, max_k) == (80, 80)


@pytorch
def test_pytorch_is_refused_what_no_kernel_takes(forward: Any) -> None:
    q, k, v = (x.transpose(1, 2) for x in tensors(80, 80))
    with pytest.raises(ValueError, match="mask is causal, not none"):
        forward(q, k, v)
    with pytest.raises(ValueError, match="_lse: dtype is bf16, not fp16"):
        forward(q.half(), k.half(), v.half(), 0.0, True)


@pytorch
def test_pytorch_s_backward_is_refused(forward: Any) -> None:
    from torch.nn.attention import _fa4

    q, k, v = (x.transpose(1, 2) for x in tensors(80, 80))
    out, lse, *_ = forward(q, k, v, 0.0, True)
    seed = torch.zeros(2, dtype=torch.uint64)
    with pytest.raises(NotImplementedError, match=r"backward pass .* forward only"):
        _fa4._fa4_scaled_dot_product_flash_attention_backward_impl(
            out, q, k, v, out, lse, None, None, 80, 80, 0.0, True, seed, seed
        )


@pytorch
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_seqlen_q", 79),
        ("max_seqlen_k", 79),
        ("seqused_k", torch.zeros(2, dtype=torch.int32)),
        ("softcap", 30.0),  # none that PyTorch passes today
    ],
)
def test_each_argument_of_pytorch_that_is_refused(
    loaded: Loaded, argument: str, value: Any
) -> None:
    run = adapter(loaded, "pytorch")._flash_attn_fwd
    with pytest.raises(NotImplementedError, match=f"^{argument}: "):
        run(*tensors(80, 80), causal=True, **{argument: value})


@pytorch
def test_arguments_of_pytorch_that_ask_for_nothing(loaded: Loaded) -> None:
    run = adapter(loaded, "pytorch")._flash_attn_fwd
    q, k, v = tensors(80, 80)
    idle = {"window_size_left": -1, "window_size_right": -1, "num_splits": 2}
    limits = {"max_seqlen_q": 80, "max_seqlen_k": 96}
    out = torch.empty_like(q)
    found = run(q, k, v, causal=True, out=out, return_lse=False, **idle, **limits)
    assert found[0] is not None and found[1] is None
    expected = loaded[0].fmha(q, k, v, causal=True)
    assert torch.equal(out, expected) and torch.equal(found[0], expected)


@pytorch
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("window", [(-1, 0), (7, 0)])
@pytest.mark.parametrize("given_out", [False, True])
def test_pytorch_s_packed_and_paged_sequences(
    packages: Loaded,
    monkeypatch: pytest.MonkeyPatch,
    page: int | None,
    window: tuple[int, int],
    given_out: bool,
) -> None:
    """By the implementation that PyTorch registers for the operator behind varlen_attn."""
    from torch.nn import attention
    from torch.nn.attention import _fa4

    package, calls = packages
    adapter(packages, "pytorch").register(package.__name__)
    attention.activate_flash_attention_impl(package.__name__)
    monkeypatch.setattr(_fa4, "_fa4_forward_support_error", lambda *_: None)
    given = packed(page=page, spare=0)
    calls.clear()
    rows = [given[name] for name in "qkv"]
    starts = given["cu_seqlens_q"], given.get("cu_seqlens_k")
    sizes: tuple[Any, ...] = (*starts, 60, 70, 0.0, window == (-1, 0), False)
    more = {"window_size_left": window[0], "window_size_right": window[1]}
    more |= {name: given[name] for name in ("seqused_k", "block_table") if page}
    more["scale"] = 0.2
    if given_out:
        found = torch.empty_like(rows[0])
        run = _fa4._fa4_flash_attention_forward_no_dropout_inplace_impl
        lse = run(found, *rows, *sizes, **more)
    else:
        found, lse, *_ = _fa4._fa4_flash_attention_forward_impl(*rows, *sizes, **more)
    attention.restore_flash_attention_impl()
    out, logs = expected(given, causal=True, window=window, scale=0.2)
    torch.testing.assert_close(found.double(), out, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), logs, atol=1e-3, rtol=1e-3)
    layout = "paged" if page else "packed"
    assert calls == [f"{layout}_w7" if window[0] == 7 else f"{layout}_lse"]


# --- transformers ------------------------------------------------------------------------


@pytest.fixture
def hub(loaded: Loaded) -> ModuleType:
    """transformers, which knows the kernels by the name of the package."""
    hub = pytest.importorskip("transformers", reason="the adapter needs transformers")
    adapter(loaded, "transformers").register(loaded[0].__name__)
    return hub


SMALL = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
}
GQA = SMALL | {
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "dtype": torch.float16,
}


def models(hub: ModuleType, loaded: Loaded, name: str, **settings: Any) -> list[Any]:
    """One model of random weights three times: by the kernels, by sdpa, in double precision."""
    kind = getattr(hub, {"Bert": "BertModel"}.get(name, f"{name}ForCausalLM"))
    made = []
    for attention in (loaded[0].__name__, "sdpa", "eager"):
        config = getattr(hub, f"{name}Config")(**settings)
        config._attn_implementation = attention
        made.append(kind(config).eval().to(config.dtype))
        assert made[-1].config._attn_implementation == attention
        made[-1].load_state_dict(made[0].state_dict())
    made[2].double()
    return made


def check_as_exact_as_sdpa(found: Any, sdpa: Any, exact: Any) -> None:
    """What the kernels' model gives is off by at most twice of what sdpa's is."""
    error, usual = ((x.double() - exact).norm() for x in (found, sdpa))
    assert usual > 0
    assert error <= 2 * usual


def token_ids(batch: int = 2, length: int = 17) -> Any:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 64, (batch, length), generator=generator)


@torch.no_grad()
def test_a_causal_model_with_grouped_heads(
    hub: ModuleType, loaded: Loaded, calls: list[str]
) -> None:
    trio = models(hub, loaded, "Llama", **GQA)
    ids = token_ids()
    whole = [model(ids).logits for model in trio]
    check_as_exact_as_sdpa(*whole)
    assert calls == ["sm90_d64_fp16_causal_gqa8"] * 2
    # A prompt, more of it, and one token at a time.
    caches = [model(ids[:, :5], use_cache=True).past_key_values for model in trio]
    for begin, end in ((5, 12), (12, 13), (13, 14)):
        steps = []
        for model, cache in zip(trio, caches, strict=True):
            steps.append(model(ids[:, begin:end], past_key_values=cache).logits)
        check_as_exact_as_sdpa(*steps)
        check_as_exact_as_sdpa(*(x[:, begin:end] for x in whole))


@torch.no_grad()
def test_a_model_with_sinks(hub: ModuleType, loaded: Loaded, calls: list[str]) -> None:
    """gpt-oss with full attention in all layers: its others have a window."""
    settings = GQA | {"dtype": torch.bfloat16, "num_local_experts": 2}
    config = hub.GptOssConfig(
        **settings, num_experts_per_tok=1, layer_types=["full_attention"] * 2
    )
    found = {}
    for attention in (loaded[0].__name__, "eager"):
        torch.manual_seed(1)
        config._attn_implementation = attention
        model = hub.GptOssForCausalLM(config).eval().to(config.dtype)
        for layer in model.model.layers:
            layer.self_attn.sinks.data = torch.linspace(-1, 3, 8).to(config.dtype)
        with torch.no_grad():
            found[attention] = model(token_ids()).logits.float()
    assert calls == ["sm90_d64_bf16_causal_gqa8_sink_lse"] * 2
    ours, eager = found.values()
    torch.testing.assert_close(ours, eager, atol=2e-2, rtol=2e-2)


def test_generate(hub: ModuleType, loaded: Loaded, calls: list[str]) -> None:
    ours, sdpa, _ = models(hub, loaded, "Llama", **GQA)
    ids = token_ids()
    asked = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    asked |= {"max_new_tokens": 4, "pad_token_id": 0}
    found, expected = (model.generate(ids, **asked) for model in (ours, sdpa))
    assert torch.equal(found, expected)
    assert len(calls) == 4 * 2


@torch.no_grad()
def test_a_bidirectional_model(
    hub: ModuleType, loaded: Loaded, calls: list[str]
) -> None:
    size = SMALL | {"num_attention_heads": 2, "dtype": torch.bfloat16}
    trio = models(hub, loaded, "Bert", **size)
    states = [model(token_ids()).last_hidden_state for model in trio]
    check_as_exact_as_sdpa(*states)
    assert calls == ["sm90_d64_bf16_full"] * 2


@torch.no_grad()
def test_a_whole_model_compiles(hub: ModuleType, loaded: Loaded) -> None:
    ours, _, _ = models(hub, loaded, "Llama", **GQA)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    ids = token_ids()
    found = compiled(ids, use_cache=True).logits
    torch.testing.assert_close(found, ours(ids).logits, atol=2e-3, rtol=2e-3)


@torch.no_grad()
def test_what_models_ask_for_and_no_kernel_has(hub: ModuleType, loaded: Loaded) -> None:
    ours, *_ = models(hub, loaded, "Llama", **GQA, attention_dropout=0.1)
    ids = token_ids()
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    packed = torch.tensor([[*range(9), *range(8)]])
    for message, asked in (
        ("attention_mask: .* padding", {"attention_mask": padded}),
        ("attention_mask: ", {"attention_mask": torch.zeros(2, 1, 17, 17)}),
        ("mask_function: .* packed", {"position_ids": packed, "use_cache": False}),
        ("output_attentions: ", {"output_attentions": True}),
    ):
        with pytest.raises(NotImplementedError, match=f"^{message}"):
            ours(ids, **asked)
    with pytest.raises(NotImplementedError, match=r"^(past_key_values|attention_mask)"):
        ours.generate(ids, cache_implementation="static", max_new_tokens=4)
    cache = hub.StaticCache(config=ours.config, max_cache_len=32)
    for part in (ids[:, :16], ids[:, 16:]):
        with pytest.raises(NotImplementedError, match=r"^past_key_values: .* Dynamic"):
            ours(part, past_key_values=cache)
    with pytest.raises(NotImplementedError, match=r"^dropout: .*\(0.1\)"):
        ours.train()(ids)
    window, *_ = models(hub, loaded, "Mistral", **GQA, sliding_window=4)
    with pytest.raises(NotImplementedError, match=r"^mask_function: .* window"):
        window(ids)
    ours, *_ = models(hub, loaded, "Llama", **GQA | {"dtype": torch.float32})
    with pytest.raises(ValueError, match=r"dtype is fp16, not torch\.float32"):
        ours(ids)


def test_training_is_refused(hub: ModuleType, loaded: Loaded) -> None:
    ours, *_ = models(hub, loaded, "Llama", **GQA)
    with pytest.raises(ValueError, match=r"^q: requires a gradient"):
        ours(token_ids())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sliding_window", 8),
        ("softcap", 50.0),
        ("sinks", torch.zeros(8)),
        ("position_bias", torch.zeros(1, 8, 4, 4)),
        ("cache", object()),
        ("block_table", torch.zeros(1, 1)),
        ("cu_seq_lens_q", torch.zeros(2)),
        ("max_length_k", 4),
        ("indices", torch.zeros(1)),
        ("something_new", "x"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_each_argument_of_transformers_that_is_refused(
    loaded: Loaded, name: str, value: Any
) -> None:
    q, k, v = (x.transpose(1, 2) for x in tensors())
    attention = adapter(loaded, "transformers").attention
    module = SimpleNamespace(is_causal=True)
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        attention(module, q, k, v, None, **{name: value})
    out, weights = attention(module, q, k, v, None, **{name: None}, use_cache=True)
    assert out.shape == (2, 48, 2, 128) and weights is None


@pytest.mark.usefixtures("hub")
def test_the_call_decides_before_the_module(loaded: Loaded, calls: list[str]) -> None:
    q, k, v = (x.transpose(1, 2) for x in tensors(qk=64, v=64))
    attention = adapter(loaded, "transformers").attention
    for module, asked in ((True, False), (False, True)):
        attention(SimpleNamespace(is_causal=module), q, k, v, None, is_causal=asked)
    attention(SimpleNamespace(), q, k, v, None, scaling=0.5)
    names = "sm90_d64_bf16_full", "sm90_d64_bf16_causal", "sm90_d64_bf16_causal"
    assert tuple(calls) == names
