# SPDX-License-Identifier: Apache-2.0
"""The adapters that `vendor --adapter` writes, called by PyTorch's and transformers' own code.

Without a GPU each kernel's `fmha` is PyTorch's own attention (standins.py).
"""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from collections.abc import Iterator
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
GROUP: dict[str, Any] = {"q_per_kv": 8, "mask": "causal"}
W3: dict[str, Any] = {"window": {"left": 3, "right": "none"}}
W7: dict[str, Any] = {"window": {"left": 7, "right": "none"}}
PAGES: dict[str, Any] = {"kv": {"paged": {"page": 16}}}
FP16: dict[str, Any] = {"dtype": "fp16"}
PACKED: dict[str, dict[str, Any]] = {
    "fp16_dense": FP16 | GROUP | {"batch": "dense"},
    "fp16_dense_w3": FP16 | GROUP | {"batch": "dense"} | W3,
    "fp16_dense_w3_cap50": FP16 | GROUP | {"batch": "dense", "softcap": 50.0} | W3,
    "fp16_dense_cap50": FP16 | GROUP | {"batch": "dense", "softcap": 50.0},
    "fp16_packed": FP16 | GROUP,
    "fp16_packed_w3": FP16 | GROUP | W3,
    "packed_full": {},
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
    with pytest.raises(
        ValueError, match=r"^q, k or v: requires a gradient, and no back"
    ):
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
    holes = torch.ones_like(ids)
    holes[0, 4:7] = 0
    for message, asked in (
        ("attention_mask: .* between tokens", {"attention_mask": holes}),
        ("attention_mask: ", {"attention_mask": torch.zeros(2, 1, 17, 17)}),
        ("output_attentions: ", {"output_attentions": True}),
    ):
        with pytest.raises(NotImplementedError, match=f"^{message}"):
            ours(ids, **asked)
    left = torch.ones_like(ids)
    left[0, :3] = 0
    with pytest.raises(ValueError, match=r"no kernel takes .*batch varlen"):
        ours(ids, attention_mask=left)  # of kernels for dense batches alone
    with pytest.raises(NotImplementedError, match=r"^(past_key_values|attention_mask)"):
        ours.generate(ids, cache_implementation="static", max_new_tokens=4)
    cache = hub.StaticCache(config=ours.config, max_cache_len=32)
    for part in (ids[:, :16], ids[:, 16:]):
        with pytest.raises(NotImplementedError, match=r"^past_key_values: .* Dynamic"):
            ours(part, past_key_values=cache)
    with pytest.raises(NotImplementedError, match=r"^dropout: .*\(0.1\)"):
        ours.train()(ids)
    window, *_ = models(hub, loaded, "Mistral", **GQA, sliding_window=4)
    with pytest.raises(ValueError, match=r"no kernel takes .*window_left 3"):
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
        ("sinks", torch.zeros(8)),
        ("position_bias", torch.zeros(1, 8, 4, 4)),
        ("block_table", torch.zeros(1, 1)),
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


def padded(ids: Any, side: str) -> Any:
    """A mask of which all rows but the last have padding on a side, the second nothing else."""
    real = torch.ones_like(ids)
    for row, count in enumerate((3, ids.shape[1], 8)):
        real[row, slice(count) if side == "left" else slice(-count, None)] = 0
    return real


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch(hub: ModuleType, packages: Loaded, side: str) -> None:
    package, calls = packages
    adapter(packages, "transformers").register(package.__name__)
    trio = models(hub, packages, "Llama", **GQA)
    ids = token_ids(4)
    real = padded(ids, side)
    real[1] = real[0]
    calls.clear()
    found, sdpa = (
        model(ids, attention_mask=real).logits[real.bool()] for model in trio[:2]
    )
    exact = [trio[2](ids[i : i + 1, real[i].bool()]).logits[0] for i in range(4)]
    check_as_exact_as_sdpa(found, sdpa, torch.cat(exact))
    assert calls == ["fp16_packed"] * 2
    real[1] = 0  # no token at all: its rows mean nothing, and hurt no others
    found = trio[0](ids, attention_mask=real).logits
    real[1] = 1
    assert torch.equal(
        found[[0, 2, 3]], trio[0](ids, attention_mask=real).logits[[0, 2, 3]]
    )


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_padded_batch_generates(hub: ModuleType, packages: Loaded, name: str) -> None:
    """With a cache of all keys, and of those in a window, from which the padding is soon gone."""
    package, calls = packages
    adapter(packages, "transformers").register(package.__name__)
    more = {"sliding_window": 4} if name == "Mistral" else {}
    ours, sdpa, _ = models(
        hub, packages, name, **GQA | {"num_key_value_heads": 1}, **more
    )
    ids = token_ids(4)
    real = padded(ids, "left")
    real[1] = 1
    asked = {"attention_mask": real, "do_sample": False, "max_new_tokens": 6}
    calls.clear()
    found, right = (
        model.generate(ids, pad_token_id=0, **asked) for model in (ours, sdpa)
    )
    assert torch.equal(found, right)
    assert calls[:2] == ["fp16_packed" + "_w3" * bool(more)] * 2


@pytest.fixture
def of_transformers(
    packages: Loaded, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The adapter for what it does by itself; transformers may be missing."""
    if importlib.util.find_spec("transformers") is not None:
        yield adapter(packages, "transformers")
        return
    for name in ("transformers", "transformers.masking_utils"):
        module = ModuleType(name)
        module.__getattr__ = lambda name: None  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, name, module)
    made = adapter(packages, "transformers")
    yield made
    del sys.modules[made.__name__]  # others want the true one


def test_keys_of_a_cache_are_read_in_place(of_transformers: ModuleType) -> None:
    module = of_transformers
    cache = torch.randn(3, 2, 10, 64)
    for keys in (
        cache,
        cache[:, :, 2:9],
        cache.transpose(1, 2).contiguous().transpose(1, 2),
    ):
        rows, pitch = module.as_rows(keys)
        assert rows.data_ptr() == keys.data_ptr()
        for b in range(3):
            found = rows[b * pitch : b * pitch + keys.shape[2]]
            assert torch.equal(found, keys[b].transpose(0, 1))
    rows, pitch = module.as_rows(cache.transpose(2, 3))  # head_dim is not contiguous
    assert pitch == 64 * 2 and rows.stride(-1) == 1
    rows, pitch = module.as_rows(cache[:1])
    assert pitch == 10


@torch.no_grad()
def test_packed_sequences(hub: ModuleType, packages: Loaded) -> None:
    package, calls = packages
    adapter(packages, "transformers").register(package.__name__)
    for name in ("Llama", "Mistral"):
        more = {"sliding_window": 4} if name == "Mistral" else {}
        trio = models(hub, packages, name, **GQA, **more)
        ids = token_ids(2, 17)
        places = torch.tensor([[*range(9), *range(8)], [*range(2), 0, *range(14)]])
        asked: dict[str, Any] = {"position_ids": places, "use_cache": False}
        calls.clear()
        check_as_exact_as_sdpa(*(model(ids, **asked).logits for model in trio))
        assert calls == ["fp16_packed" + "_w3" * bool(more)] * 2
        # What a collator of packed training batches also says.
        starts = torch.tensor([0, 9, 17], dtype=torch.int32)
        more = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        more |= {"max_length_q": 9, "max_length_k": 9}
        found, right = (
            trio[0](ids[:1], position_ids=places[:1], use_cache=False, **each).logits
            for each in (more, {})
        )
        assert torch.equal(found, right)


@torch.no_grad()
def test_windows_and_soft_caps_of_models(hub: ModuleType, packages: Loaded) -> None:
    package, calls = packages
    adapter(packages, "transformers").register(package.__name__)
    window = models(hub, packages, "Mistral", **GQA, sliding_window=4)
    for length, kernel in ((17, "fp16_dense_w3"), (4, "fp16_dense")):
        calls.clear()
        check_as_exact_as_sdpa(
            *(model(token_ids(2, length)).logits for model in window)
        )
        assert calls == [kernel] * 2
    torch._dynamo.reset()
    compiled = torch.compile(window[0], fullgraph=True, backend="aot_eager")
    found, right = (
        model(token_ids(), use_cache=True).logits for model in (compiled, window[0])
    )
    torch.testing.assert_close(found, right, atol=2e-3, rtol=2e-3)
    caches = [
        model(token_ids(2, 9), use_cache=True).past_key_values for model in window
    ]
    steps = [
        model(token_ids(2, 1), past_key_values=cache).logits
        for model, cache in zip(window, caches, strict=True)
    ]
    check_as_exact_as_sdpa(*steps)
    gemma = GQA | {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 50.0}
    found = []
    for attention in (package.__name__, "eager"):
        torch.manual_seed(1)
        config = hub.Gemma2Config(**gemma, sliding_window=4)
        config._attn_implementation = attention
        model = hub.Gemma2ForCausalLM(config).eval().half()
        calls.clear()
        found.append(model(token_ids()).logits.float())
        if attention != "eager":
            assert calls == ["fp16_dense_w3_cap50", "fp16_dense_cap50"]
    torch.testing.assert_close(*found, atol=2e-3, rtol=2e-3)


@pytest.mark.usefixtures("hub")
def test_masks_that_are_none_of_these(packages: Loaded) -> None:
    from transformers import masking_utils as masks

    module = adapter(packages, "transformers")
    q, k, v = (
        x.half().transpose(1, 2)
        for x in tensors(12, 12, heads=8, kv_heads=1, qk=64, v=64)
    )
    sizes = {"q_length": 12, "kv_length": 12, "batch_size": 2}
    layer = SimpleNamespace(is_causal=True)
    window = masks.sliding_window_causal_mask_function(4)
    blocks = masks.or_masks(
        masks.causal_mask_function,
        masks.blockwise_overlay(torch.tensor([[0] * 6 + [1] * 6] * 2)),
    )
    for function, asked in (
        (window, {}),  # which the layer does not name
        (window, {"sliding_window": 5}),
        (blocks, {}),
        (lambda b, h, q, kv: (kv <= q) & (kv > 0), {}),
        (lambda b, h, q, kv: (kv <= q) & (q - kv != 6), {}),
    ):
        tokens = module.mask(mask_function=function, **sizes)
        for _ in range(2):
            with pytest.raises(
                NotImplementedError, match=r"^mask_function: these kernels"
            ):
                module.attention(layer, q, k, v, tokens, **asked)
    with pytest.raises(
        NotImplementedError, match=r"^mask_function: .* none of a model's own"
    ):
        module.mask(mask_function=blocks, use_vmap=True, **sizes)
    known = {"config": SimpleNamespace(sliding_window=4), "allow_is_causal_skip": True}
    for more in ({}, known):
        tokens = module.mask(mask_function=window, local_size=4, **sizes, **more)
        starts = torch.tensor([0, 12, 24])
        with pytest.raises(NotImplementedError, match=r"^mask_function: these kernels"):
            module.attention(
                layer, q, k, v, tokens, cu_seq_lens_q=starts, cu_seq_lens_k=starts
            )
        out, _ = module.attention(layer, q, k, v, tokens, sliding_window=4)
    # Chunks are packed sequences.
    chunks = masks.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.int64))
    tokens = module.mask(mask_function=chunks, **sizes)
    out, _ = module.attention(layer, q, k, v, tokens)
    assert tokens.starts.tolist() == [0, 5, 10, 12, 17, 22, 24]
    rows = {
        name: x.transpose(1, 2).flatten(0, 1)
        for name, x in zip("qkv", (q, k, v), strict=True)
    }
    wanted, _ = expected(
        rows | {"cu_seqlens_q": tokens.starts, "cu_seqlens_k": tokens.starts},
        causal=True,
    )
    torch.testing.assert_close(out.flatten(0, 1).double(), wanted, atol=2e-3, rtol=2e-3)


def test_continuous_batching(hub: ModuleType, packages: Loaded) -> None:
    package, calls = packages
    name = f"flash_{package.__name__}"
    adapter(packages, "transformers").register(name)
    adapter(packages, "transformers").register(package.__name__)
    torch.manual_seed(3)
    ours, sdpa, _ = models(hub, packages, "Llama", **GQA)
    ours.set_attn_implementation(name)
    prompts = [token_ids(1, n)[0].tolist() for n in (5, 11, 3)]
    asked = {
        "do_sample": False,
        "max_new_tokens": 4,
        "eos_token_id": -1,
        "pad_token_id": 0,
    }
    config = hub.GenerationConfig(**asked)
    calls.clear()
    found = ours.generate_batch(prompts, generation_config=config).values()
    assert set(calls) == {"fp16_packed"} and len(found) == 3
    for result in found:
        prompt = result.prompt_ids
        right = sdpa.generate(torch.tensor([prompt]), generation_config=config)
        assert result.generated_tokens == right[0, len(prompt) :].tolist()
