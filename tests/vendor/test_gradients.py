# SPDX-License-Identifier: Apache-2.0
"""Gradients of a vendored package: which kernels give them, what is refused, what records them.

Kernels are texts of specs that are not shipped; PyTorch computes in the place of what they
compile to (standins.py).
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import support
from fmha_gen.build import render
from fmha_gen.planning import plan
from fmha_gen.vendoring import command

from .pairs import (
    ALONE,
    FIELDS,
    FIXED,
    FULL,
    GQA,
    ORDERED,
    PLAIN,
    WIDE,
    forward_text,
    text_of,
    texts,
)
from .standins import (
    backward,
    imported,
    packed,
    source_of_texts,
    strided,
    tensors,
)

torch = pytest.importorskip("torch", reason="autograd is PyTorch's")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

DEFAULTS = {"heads": 4, "qk": 64, "v": 64}


class Loaded(NamedTuple):
    package: ModuleType
    calls: list[str]


@pytest.fixture(scope="module")
def vendored(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("trained")
    source = source_of_texts(folder / "generated", texts())
    adapters = ("flash_attention", "pytorch", "transformers")
    return Loaded(*imported(folder, tuple(texts()), adapters, source))


@pytest.fixture
def loaded(vendored: Loaded) -> Loaded:
    vendored.calls.clear()
    return vendored


@pytest.fixture
def package(loaded: Loaded) -> ModuleType:
    return loaded.package


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are on device -1, which a kernel asks to be the current one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)


def leaves(*given: Any) -> list[Any]:
    """The same tensors, whose gradients are recorded."""
    return [x.detach().clone().requires_grad_() for x in given]


def sdpa(q: Any, k: Any, v: Any, causal: bool, scale: float | None = None) -> Any:
    """PyTorch's, of tensors [batch, seqlen, heads, head_dim]; causal at the bottom right."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    queries, keys = q.shape[1], k.shape[1]
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=seen if causal else None,
        scale=scale,
    ).transpose(1, 2)


def gradients_of(run: Any, given: Any, dout: Any) -> list[Any]:
    learned = leaves(*given)
    return list(torch.autograd.grad(run(*learned), learned, dout))


def check(found: Any, usual: Any, exact: Any) -> None:
    """What is found is off by at most 1.5 times of what PyTorch's 16 bits are."""
    for ours, theirs, right in zip(found, usual, exact, strict=True):
        error, bound = ((x.double() - right).norm() for x in (ours, theirs))
        assert bound > 0 and error <= 1.5 * bound + 1e-6 * right.norm()


CALLS = {
    "gqa": (GQA, {"kv_heads": 2}, True, torch.bfloat16),
    "other lengths": (GQA, {"queries": 33, "keys": 47}, True, torch.bfloat16),
    "fp16": (FULL, {"kv_heads": 4}, False, torch.float16),
    "d128": (WIDE, {"kv_heads": 4, "qk": 128, "v": 128}, True, torch.bfloat16),
}


def problem(name: str) -> tuple[list[Any], bool]:
    _, shape, causal, dtype = CALLS[name]
    shape = DEFAULTS | {"queries": 50, "keys": 80} | shape
    return list(tensors(dtype=dtype, **shape)), causal


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("layout", [torch.clone, strided])
def test_gradients_are_those_of_sdpa(
    loaded: Loaded, name: str, scale: float | None, layout: Any
) -> None:
    given, causal = problem(name)
    dout = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(2))
    dout = layout(dout.to(given[0].dtype))

    def ours(*x: Any) -> Any:
        q, k, v = map(layout, x)
        return loaded.package.fmha(q, k, v, causal=causal, softmax_scale=scale)

    found = gradients_of(ours, given, dout)
    stem = CALLS[name][0]
    assert loaded.calls == [f"{stem}_lse", f"{stem}_bwd"]
    usual = gradients_of(lambda *x: sdpa(*x, causal, scale), given, dout)
    wide = [x.double() for x in given]
    exact = gradients_of(lambda *x: sdpa(*x, causal, scale), wide, dout.double())
    for x, gradient in zip(given, found, strict=True):
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
    check(found, usual, exact)


def call(package: ModuleType, **asked: Any) -> Any:
    """Attention of tensors that a backward kernel takes."""
    return functools.partial(package.fmha, causal=True, **asked)


def test_rows_that_see_no_key(package: ModuleType) -> None:
    """Of more queries than keys the first see none: zeros, and no NaN elsewhere."""
    given = leaves(*tensors(60, 40, **DEFAULTS))
    call(package)(*given).sum().backward()
    assert not given[0].grad[:, :20].any() and given[0].grad[:, 20:].any()
    assert all(x.grad.isfinite().all() for x in given)


@pytest.mark.parametrize(
    "learners", [x for n in (1, 2, 3) for x in itertools.combinations("qkv", n)]
)
def test_gradients_of_what_needs_them(
    loaded: Loaded, learners: tuple[str, ...]
) -> None:
    given = dict(zip("qkv", tensors(**DEFAULTS), strict=True))
    every = dict(zip("qkv", leaves(*given.values()), strict=True))
    call(loaded.package)(*every.values()).sum().backward()
    for name in learners:
        given[name] = given[name].clone().requires_grad_()
    call(loaded.package)(*given.values()).sum().backward()
    assert loaded.calls == [f"{GQA}_lse", f"{GQA}_bwd"] * 2
    for name, x in given.items():
        if name in learners:
            assert torch.equal(x.grad, every[name].grad)
        else:
            assert x.grad is None


def as_seen(package: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The dout that the backward kernel is handed."""
    seen = []
    kernel = package.load(f"{GQA}_bwd")
    function = kernel.fmha_bwd

    def fmha_bwd(dout: Any, *given: Any, **asked: Any) -> Any:
        seen.append(dout)
        return function(dout, *given, **asked)

    monkeypatch.setattr(kernel, "fmha_bwd", fmha_bwd)
    return seen


def shifted(x: Any) -> Any:
    """The same, two bytes behind an address that is aligned."""
    memory = x.new_empty(x.numel() + 1)
    return memory[1:].view(x.shape).copy_(x)


DOUTS: dict[str, tuple[Any, bool]] = {
    "contiguous": (torch.clone, True),
    "heads before rows": (strided, True),
    "a slice": (lambda x: torch.cat([x, x], -1)[..., :64], True),
    "one number": (lambda x: x.new_full((), 0.5).expand(x.shape), False),
    "one for all heads": (lambda x: x[:, :, :1].expand(x.shape), False),
    "head_dim not contiguous": (lambda x: x.mT.contiguous().mT, False),
    "odd rows": (lambda x: torch.cat([x, x[..., :4]], -1)[..., :64], False),
    "misaligned": (shifted, False),
}


@pytest.mark.parametrize("name", DOUTS)
def test_any_dout_is_taken(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And copied where the kernel could not load it."""
    make, as_it_is = DOUTS[name]
    given = tensors(**DEFAULTS)
    dout = make(torch.randn(given[0].shape).bfloat16())
    right = gradients_of(call(package), given, dout.contiguous().clone())
    seen = as_seen(package, monkeypatch)
    found = gradients_of(call(package), given, dout)
    assert all(map(torch.equal, found, right))
    assert (seen[0].data_ptr() == dout.data_ptr()) == as_it_is


def test_a_call_without_gradients_is_as_ever(loaded: Loaded) -> None:
    """It takes a kernel without an lse, and passes the dispatcher by."""
    given = tensors(kv_heads=4, **DEFAULTS | {"qk": 128, "v": 128})
    call(loaded.package)(*given)
    learned = leaves(*given)
    with torch.no_grad():
        out = call(loaded.package)(*learned)
    assert not out.requires_grad
    assert loaded.calls == [PLAIN, PLAIN]
    call(loaded.package)(*learned)
    assert loaded.calls[2:] == [f"{WIDE}_lse"]


def test_memory_that_changed_meanwhile(package: ModuleType) -> None:
    q, k, v = leaves(*tensors(**DEFAULTS))
    keys = k * 1
    out = call(package)(q, keys, v)
    with torch.no_grad():
        keys.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("empty", ["q", "kv", "batch"])
def test_gradients_of_nothing(loaded: Loaded, empty: str) -> None:
    sizes = {"queries": 0} if empty == "q" else {"keys": 0} if empty == "kv" else {}
    given = [x[: 0 if empty == "batch" else 2] for x in tensors(**DEFAULTS, **sizes)]
    for x in gradients_of(call(loaded.package), given, torch.ones_like(given[0])):
        assert torch.equal(x, torch.zeros_like(x))
    assert loaded.calls == []


def test_checkpoints_and_views(package: ModuleType) -> None:
    """q, k and v of one projection, computed again in the backward pass."""
    x = torch.randn(2, 48, 8 * 64, generator=torch.Generator().manual_seed(3))
    x = x.bfloat16().requires_grad_()

    def layer(x: Any) -> Any:
        q, k, v = x.unflatten(-1, (8, 64)).split((4, 2, 2), 2)
        return call(package)(q, k, v).flatten(2)

    layer(x).square().sum().backward()
    right, x.grad = x.grad, None
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert right.any() and torch.equal(x.grad, right)


# --- which kernels ------------------------------------------------------------------------


def test_the_table_says_what_forward_passes_were_made_for(package: ModuleType) -> None:
    assert package.BACKWARD.keys() == {x for x in texts() if "_bwd" in x}
    assert package.KERNELS.keys() == texts().keys() - package.BACKWARD.keys()
    made = package.KERNELS[f"{GQA}_lse"]
    assert package.BACKWARD[f"{GQA}_bwd"] == made._replace(lse=False)
    ordered = made._replace(lse=False, deterministic=True)
    assert package.BACKWARD[ORDERED] == ordered


def test_lengths_choose(loaded: Loaded) -> None:
    """A kernel for any lengths and one for some are a pair where these are given."""
    for keys, name in ((72, FIXED), (71, GQA)):
        given = tensors(40, keys, **DEFAULTS)
        select = loaded.package.select
        assert select(*given, causal=True, backward=True).SPEC["name"] == f"{name}_bwd"
        loaded.calls.clear()
        gradients_of(call(loaded.package), given, torch.ones_like(given[0]))
        assert loaded.calls == [f"{GQA}_lse", f"{name}_bwd"]


def test_a_fixed_order_of_sums(loaded: Loaded) -> None:
    given = tensors(50, **DEFAULTS)
    dout = torch.ones_like(given[0])
    for asked, everywhere, name in (
        (False, False, f"{GQA}_bwd"),
        (True, False, ORDERED),
        (False, True, ORDERED),
    ):
        loaded.calls.clear()
        torch.use_deterministic_algorithms(everywhere)
        try:
            gradients_of(call(loaded.package, deterministic=asked), given, dout)
        finally:
            torch.use_deterministic_algorithms(False)
        assert loaded.calls == [f"{GQA}_lse", name]
    given = tensors(kv_heads=4, dtype=torch.float16, **DEFAULTS)
    with pytest.raises(ValueError, match="deterministic is False, not True"):
        loaded.package.fmha(*leaves(*given), deterministic=True)
    loaded.package.fmha(*given, deterministic=True)  # where there are no sums of it


def test_what_backward_kernel_is_missing(loaded: Loaded, tmp_path: Path) -> None:
    """The refusal has the spec of the kernel, and once that is vendored the call is taken."""
    given = tensors(kv_heads=4, **DEFAULTS)
    q, k, v = given
    with pytest.raises(ValueError) as error:
        loaded.package.fmha(q, k.clone().requires_grad_(), v)
    said = str(error.value).splitlines()
    assert said[0] == (
        "k: requires a gradient, and no backward kernel takes arch sm90, dtype bf16,"
        " head_dim_qk 64, head_dim_v 64, q_per_kv 1, seqlen_q 48, seqlen_kv 80, mask none; nearest:"
    )
    assert len(said) == 1 + loaded.package.NEAREST + 1 and "_bwd: " in said[1]
    spec = re.search(r"if fmha-gen makes it: \{(.*)\}$", said[-1])
    assert spec and spec[1] == ("arch: sm90, op: fmha_bwd, dtype: bf16, head_dim: 64")
    fields = spec[1].replace(", ", "\n") + "\n"
    made = support.load_text(fields, "sm90_missing_bwd")
    text = render.render_kernel(plan.resolve(made))
    forward = {f"{ALONE}_lse": forward_text(ALONE)}
    source = source_of_texts(
        tmp_path / "generated", forward | {"sm90_missing_bwd": text}
    )
    package, calls = imported(tmp_path, (*forward, "sm90_missing_bwd"), source=source)
    gradients_of(package.fmha, given, torch.ones_like(q))
    assert calls == [f"{ALONE}_lse", "sm90_missing_bwd"]
    assert loaded.calls == []


def test_what_forward_kernel_is_missing(tmp_path: Path) -> None:
    """One that gives no lse serves no gradient."""
    source = source_of_texts(tmp_path / "generated", texts())
    package, _ = imported(tmp_path, (PLAIN,), source=source)
    given = tensors(kv_heads=4, **DEFAULTS | {"qk": 128, "v": 128})
    with pytest.raises(ValueError) as error:
        package.fmha(*leaves(*given), causal=True)
    said = str(error.value)
    assert said.startswith("q: requires a gradient, and no kernel takes ")
    assert f"{PLAIN}: lse is False, not True" in said
    wanted = "{arch: sm90, op: fmha_fwd, dtype: bf16, head_dim: 128, mask: causal, lse: true}"
    assert said.endswith(wanted)


def test_the_spec_that_a_refusal_names(package: ModuleType) -> None:
    q, k, v = leaves(*tensors(kv_heads=1, **DEFAULTS | {"v": 128}))
    with pytest.raises(ValueError) as error:
        package.fmha(
            *(q, k, v), causal=True, window=(7, 0), softcap=30.0, deterministic=True
        )
    assert str(error.value).endswith(
        "{arch: sm90, op: fmha_fwd, dtype: bf16, head_dim: {qk: 64, v: 128},"
        " heads: {q_per_kv: 4}, mask: causal, window: {left: 7}, softcap: 30.0, lse: true}"
    )


def test_packed_sequences_have_no_gradient(package: ModuleType) -> None:
    given = packed(spare=0)
    given["q"].requires_grad_()
    with pytest.raises(
        ValueError, match=r"^q: requires a gradient, and no .*batch varlen"
    ):
        package.fmha(**given, causal=True)


def test_what_is_vendored_and_what_is_said(tmp_path: Path) -> None:
    source = source_of_texts(tmp_path / "generated", texts())
    vendor = functools.partial(command.Options, source=source)
    alone = (f"{GQA}_bwd", f"{FULL}_bwd", f"{FULL}_lse")
    into = tmp_path / "attention"
    with pytest.raises(command.CheckFailed, match=rf"the lse that {GQA}_bwd reads"):
        command.vendor(vendor(into=into, kernels=alone, init=True))
    assert not (into / "__init__.py").exists()
    command.vendor(vendor(into=into, kernels=alone))  # files without a package
    assert "Forward only" not in (into / "README.md").read_text()
    command.vendor(vendor(into=into, kernels=(f"{GQA}_lse",), init=True))
    text = (into / "README.md").read_text()
    assert "2 query heads per KV head, backward |" in text
    assert "fmha(q, k, v, causal=True).backward(dout)" in text
    other = tmp_path / "other"
    command.vendor(vendor(into=other, kernels=alone[:1]))
    text = (other / "README.md").read_text()
    assert f"from {GQA}_bwd import fmha_bwd\n\ndq, dk, dv = fmha_bwd(" in text
    third = tmp_path / "third"
    command.vendor(vendor(into=third, kernels=(f"{GQA}_lse",), init=True))
    text = (third / "README.md").read_text()
    assert "Forward only" in text and "requires a gradient is refused" in text
    # Lengths of which one is fixed are a pair, two that differ are none.
    fixed = texts()[f"{FIXED}_bwd"].replace('"kv": 72}', '"kv": 73}')
    lse = text_of(f"{FIXED}_lse", f"{FIELDS[FIXED]}lse: true\n")
    both = {f"{FIXED}_lse": lse, f"{FIXED}_bwd": fixed}
    source = source_of_texts(tmp_path / "others", both)
    options = vendor(into=tmp_path / "fourth", source=source, init=True)
    with pytest.raises(command.CheckFailed, match="no forward kernel gives the lse"):
        command.vendor(
            command.Options(tmp_path / "fourth", source, tuple(both), options.init)
        )


# --- what is refused ----------------------------------------------------------------------


def test_a_gradient_of_something_else(package: ModuleType) -> None:
    q, k, v = leaves(*tensors(**DEFAULTS))
    run = call(package)
    with pytest.raises(
        ValueError, match=r"^q: requires a gradient, for which out must"
    ):
        run(q, k, v, out=torch.empty_like(q))
    plain = [x.detach() for x in (q, k, v)]
    for name, given in (
        ("out", {"out": torch.empty_like(q, requires_grad=True)}),
        ("sink", {"sink": torch.zeros(4, requires_grad=True)}),
        ("k_descale", {"descales": (None, torch.ones(2, 2, requires_grad=True), None)}),
    ):
        with pytest.raises(ValueError, match=f"^{name}: requires a gradient, and kern"):
            run(*plain, **given)
    with pytest.raises(
        ValueError, match=r"^q: requires a gradient, and no .*sink True"
    ):
        run(q, k, v, sink=torch.zeros(4))


def test_the_lse_has_no_gradient(loaded: Loaded) -> None:
    q, k, v = leaves(*tensors(**DEFAULTS))
    out, lse = loaded.package.fmha_lse(q, k, v, causal=True)
    (out.sum() + lse.detach().square().mean()).backward()
    right, q.grad = q.grad, None
    out, lse = loaded.package.fmha_lse(q, k, v, causal=True)
    with pytest.raises(NotImplementedError, match=r"^lse: a gradient is asked for"):
        (out.sum() + 1e-4 * lse.square().mean()).backward()
    out, lse = loaded.package.fmha_lse(q, k, v, causal=True)
    out.sum().backward()
    assert torch.equal(q.grad, right)


def test_a_gradient_of_a_gradient(package: ModuleType) -> None:
    q, k, v = leaves(*tensors(**DEFAULTS))
    (first,) = torch.autograd.grad(
        call(package)(q, k, v).square().sum(), q, create_graph=True
    )
    out = call(package)(q, k, v)
    assert torch.equal(first, torch.autograd.grad(out, q, 2 * out.detach())[0])
    with pytest.raises(NotImplementedError, match=r"^fmha: a gradient of a gradient"):
        first.sum().backward()


# --- what records and replaces operators --------------------------------------------------

BACKENDS = [
    *("eager", "aot_eager"),
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(
            shutil.which("g++") is None, reason="inductor needs g++ without a GPU"
        ),
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_takes_it_whole(loaded: Loaded, backend: str) -> None:
    weight = torch.ones(64, dtype=torch.bfloat16).requires_grad_()

    def layer(q: Any, k: Any, v: Any) -> Any:
        out, lse = loaded.package.fmha_lse(q * weight, k, v, causal=True)
        return (out * out).float().mean() + 0 * lse.detach().sum()

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for queries in (48, 33):
        given = tensors(queries, **DEFAULTS)
        wanted, found = ([*leaves(*given), weight] for _ in range(2))
        right = torch.autograd.grad(layer(*wanted[:3]), wanted)
        loaded.calls.clear()
        ours = torch.autograd.grad(compiled(*found[:3]), found)
        assert [x.endswith("_bwd") for x in loaded.calls] == [False, True]
        for x, y in zip(ours, right, strict=True):
            torch.testing.assert_close(x, y)
    with torch.no_grad():
        compiled(*given)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_trace_refuses_what_no_backward_kernel_takes(
    package: ModuleType, backend: str
) -> None:
    """In the words of the call itself."""
    given = leaves(*tensors(kv_heads=4, **DEFAULTS))
    with pytest.raises(ValueError) as real:
        package.fmha(*given)
    with FakeTensorMode() as mode, pytest.raises(ValueError) as fake:
        package.fmha(*(mode.from_tensor(x) for x in given))
    assert str(fake.value) == str(real.value)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError) as compiled:
        torch._dynamo.reset()
        torch.compile(package.fmha, fullgraph=True, backend=backend)(*given)
    assert str(real.value).splitlines()[0] in str(compiled.value)


def test_a_compiled_lse_that_is_not_detached(package: ModuleType) -> None:
    """A graph that hands it out asks for its gradient, used or not."""
    torch._dynamo.reset()
    run = torch.compile(package.fmha_lse, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"lse: a gradient is asked for"):
        run(*leaves(*tensors(**DEFAULTS)), causal=True)


def test_both_operators_are_traced(package: ModuleType) -> None:
    def gradients(q: Any, k: Any, v: Any) -> Any:
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(call(package)(*given).sum(), given)

    given = tensors(**DEFAULTS)
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(gradients, tracing_mode=mode)(*given)
        targets = [node.target for node in graph.graph.nodes]
        assert package.ATTENTION in targets and package.ATTENTION_BACKWARD in targets
        assert all(map(torch.equal, graph(*given), gradients(*given)))


def test_where_nothing_looks_on(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call passes the dispatcher by, in both passes; one that a mode looks at does not."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    package = loaded.package
    given = tensors(**DEFAULTS)
    with Mode():
        right = gradients_of(call(package), given, torch.ones_like(given[0]))
    assert package.ATTENTION in seen and package.ATTENTION_BACKWARD in seen

    def refuse(*_: Any) -> None:
        raise AssertionError("an operator was called")

    monkeypatch.setattr(package, "ATTENTION", refuse)
    monkeypatch.setattr(package, "ATTENTION_BACKWARD", refuse)
    found = gradients_of(call(package), given, torch.ones_like(given[0]))
    assert all(map(torch.equal, found, right))


def test_functional_gradients(package: ModuleType) -> None:
    """PyTorch has them of no operator that is registered for autograd in this way."""

    def loss(*x: Any) -> Any:
        return call(package)(*x).float().square().sum()

    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(loss)(*tensors(**DEFAULTS))


@pytest.mark.parametrize("learns", [False, True])
def test_opcheck(package: ModuleType, learns: bool) -> None:
    given = tensors(**DEFAULTS)
    given = leaves(*given) if learns else given
    options = (*package.Options(causal=True)[:-1], False, None)
    # The whole of it asks for gradients of every output, and lse has none.
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    more = () if learns else ("test_aot_dispatch_dynamic",)
    asked = (*given, *[None] * 5, *options)
    torch.library.opcheck(package.ATTENTION, asked, test_utils=(*tests, *more))
    plain = [x.detach() for x in given]
    out, lse = package.fmha_lse(*plain, causal=True)
    asked = (torch.ones_like(out), *plain, out, lse, *options)
    torch.library.opcheck(package.ATTENTION_BACKWARD, asked)


def test_a_graph_that_is_kept(loaded: Loaded) -> None:
    """It gives the same gradients again."""
    q, k, v = leaves(*tensors(**DEFAULTS))
    out = call(loaded.package)(q, k, v)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    second = torch.autograd.grad(out, (q, k, v), dout)
    assert all(map(torch.equal, first, second))
    assert loaded.calls == [f"{GQA}_lse", *[f"{GQA}_bwd"] * 2]


def test_the_stand_in_can_fail(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass that is handed another LSE is seen."""
    given, causal = problem("gqa")
    dout = torch.randn_like(given[0])
    run = call(loaded.package)
    right = gradients_of(run, given, dout)
    kernel = loaded.package.load(f"{GQA}_bwd")
    function = backward(kernel, loaded.calls)

    def other(*tensors: Any) -> None:
        *head, lse = tensors[:6]
        function(*head, lse + math.log(1.1), *tensors[6:])

    monkeypatch.setattr(kernel, "compile", lambda: other)
    wrong = gradients_of(run, given, dout)
    usual = gradients_of(lambda *x: sdpa(*x, causal), given, dout)
    wide = [x.double() for x in given]
    exact = gradients_of(lambda *x: sdpa(*x, causal), wide, dout.double())
    check(right, usual, exact)
    with pytest.raises(AssertionError):
        check(wrong, usual, exact)


# --- others' functions --------------------------------------------------------------------


def adapter(loaded: Loaded, name: str) -> ModuleType:
    return importlib.import_module(f"{loaded.package.__name__}.{name}_adapter")


def test_flash_attention_s_function(loaded: Loaded) -> None:
    run = adapter(loaded, "flash_attention").flash_attn_func
    given, _ = problem("gqa")
    dout = torch.randn_like(given[0])
    wanted = gradients_of(call(loaded.package, softmax_scale=0.3), given, dout)
    for ordered in (False, True):
        loaded.calls.clear()

        def ours(*x: Any, ordered: bool = ordered) -> Any:
            return run(*x, softmax_scale=0.3, causal=True, deterministic=ordered)

        assert all(map(torch.equal, gradients_of(ours, given, dout), wanted))
        assert loaded.calls == [f"{GQA}_lse", ORDERED if ordered else f"{GQA}_bwd"]
    q, k, v = leaves(*given)
    out, lse, _ = run(q, k, v, causal=True, return_attn_probs=True)
    with pytest.raises(NotImplementedError, match=r"^lse: a gradient is asked for"):
        (out.sum() + lse.sum()).backward()
    sinks = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match=r"^sink: requires a gradient"):
        run(*given, causal=True, s_aux=sinks)


def test_flash_attention_s_functions_without_a_backward_kernel(loaded: Loaded) -> None:
    module = adapter(loaded, "flash_attention")
    given = packed(spare=0)
    given["q"].requires_grad_()
    more = {"max_seqlen_q": 60, "max_seqlen_k": 70, "causal": True}
    with pytest.raises(ValueError, match=r"^q: requires a gradient, and no .* varlen"):
        module.flash_attn_varlen_func(**given, **more)
    q, k, v = (x.requires_grad_() for x in tensors(64, 64, **DEFAULTS))
    with pytest.raises(ValueError, match="k_cache: has 64 keys, a multiple of no page"):
        module.flash_attn_with_kvcache(q, k, v, causal=True)


@pytest.fixture
def sdpa_s_parts(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """PyTorch's own implementations of both passes, as activated with the adapter."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("PyTorch has no registry of flash attention before 2.11")
    from torch.nn import attention
    from torch.nn.attention import _fa4

    name = loaded.package.__name__
    adapter(loaded, "pytorch").register(name)
    attention.activate_flash_attention_impl(name)
    # They ask for CUDA tensors and a GPU, which there are not.
    monkeypatch.setattr(_fa4, "_fa4_forward_support_error", lambda *_: None)
    monkeypatch.setattr(_fa4, "_fa4_backward_support_error", lambda *_, **__: None)
    yield _fa4
    attention.restore_flash_attention_impl()


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_sdpa_of_pytorch(
    loaded: Loaded, sdpa_s_parts: Any, expanded: bool, ordered: bool
) -> None:
    given, _ = problem("gqa")
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in given)
    parts, scale = sdpa_s_parts, {"scale": 0.3}
    out, lse, *_ = parts._fa4_scaled_dot_product_flash_attention_forward_impl(
        q, k, v, 0.0, True, **scale
    )
    dout = torch.randn_like(out)
    dout = dout.new_ones(()).expand(out.shape) if expanded else dout
    seed = torch.zeros(2, dtype=torch.uint64)
    lengths = (None, None, q.shape[2], k.shape[2])
    torch.use_deterministic_algorithms(ordered)
    try:
        found = parts._fa4_scaled_dot_product_flash_attention_backward_impl(
            dout, q, k, v, out, lse, *lengths, 0.0, True, seed, seed, **scale
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert loaded.calls == [f"{GQA}_lse", ORDERED if ordered else f"{GQA}_bwd"]
    wanted = gradients_of(
        call(loaded.package, softmax_scale=0.3), given, dout.transpose(1, 2)
    )
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x.transpose(1, 2), y)


@pytest.mark.usefixtures("sdpa_s_parts")
def test_what_pytorch_s_backward_pass_refuses(loaded: Loaded) -> None:
    run = adapter(loaded, "pytorch")._flash_attn_bwd
    q, k, v = tensors(**DEFAULTS)
    out, lse = loaded.package.fmha_lse(q, k, v, causal=True)
    given = (q, k, v, out, out, lse)
    for name, value in (
        ("cu_seqlens_q", torch.zeros(3, dtype=torch.int32)),
        ("cu_seqlens_k", torch.zeros(3, dtype=torch.int32)),
        ("softcap", 30.0),  # none that PyTorch passes today
    ):
        with pytest.raises(NotImplementedError, match=f"^{name}: "):
            run(*given, causal=True, **{name: value})
    with pytest.raises(ValueError, match="window_left is none, not 7"):
        run(*given, causal=True, window_size_left=7)
    idle = {"cu_seqlens_q": None, "cu_seqlens_k": None, "window_size_left": None}
    assert len(run(*given, causal=True, **idle)) == 3


def test_a_model_of_transformers_learns(loaded: Loaded) -> None:
    hub = pytest.importorskip("transformers", reason="the adapter needs transformers")
    name = loaded.package.__name__
    adapter(loaded, "transformers").register(name)
    config = hub.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        dtype=torch.bfloat16,
    )
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(2))
    found: dict[str, Any] = {}
    state: Any = None
    for attention in (name, "sdpa", "eager"):
        torch.manual_seed(1)
        config._attn_implementation = attention
        model = hub.LlamaForCausalLM(config)
        model = model.double() if attention == "eager" else model.bfloat16()
        if state is not None:
            model.load_state_dict(state)
        state = model.state_dict()
        model(ids, labels=ids).loss.backward()
        found[attention] = [x.grad for x in model.parameters()]
    assert [x.endswith("_bwd") for x in loaded.calls] == [False, False, True, True]
    ours, usual, exact = found.values()
    for x, y, z in zip(ours, usual, exact, strict=True):
        assert (x.double() - z).norm() <= 2 * (y.double() - z).norm()


def test_what_transformers_adapter_asks_for(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where transformers is missing, too: gradients, in a fixed order where it says so."""
    if importlib.util.find_spec("transformers") is None:
        for name in ("transformers", "transformers.masking_utils"):
            module = ModuleType(name)
            module.__getattr__ = lambda name: None  # type: ignore[method-assign]
            monkeypatch.setitem(sys.modules, name, module)
        sys.modules.pop(f"{loaded.package.__name__}.transformers_adapter", None)
    run = adapter(loaded, "transformers").attention
    given, _ = problem("gqa")
    dout = torch.randn_like(given[0])
    wanted = gradients_of(call(loaded.package), given, dout)
    layer = SimpleNamespace(is_causal=True)
    for asked, name in (({}, f"{GQA}_bwd"), ({"deterministic": True}, ORDERED)):
        loaded.calls.clear()

        def ours(*x: Any, asked: Any = asked) -> Any:
            return run(layer, *(y.transpose(1, 2) for y in x), None, **asked)[0]

        assert all(map(torch.equal, gradients_of(ours, given, dout), wanted))
        assert loaded.calls == [f"{GQA}_lse", name]
    sinks = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match=r"^sink: requires a gradient"):
        run(layer, *(x.transpose(1, 2) for x in given), None, s_aux=sinks)
