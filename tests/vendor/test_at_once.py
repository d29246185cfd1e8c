# SPDX-License-Identifier: Apache-2.0
"""Calls like one that was checked: they are launched at once, and whatever differs is checked.

Kernels have their own `fmha` here; their compiled functions compare, and note what they are given.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import pytest

from .standins import DESCALES, SM_COUNT, arguments, compare, imported, packed, tensors

torch = pytest.importorskip("torch", reason="the package's operators need PyTorch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

DENSE = "sm90_d128_bf16_causal_gqa4"
PAGED = "sm90_d128_bf16_causal_gqa4_page16_varlen_lse"
PACKED = "sm90_d128_bf16_causal_gqa4_varlen"
WINDOW = "sm90_d128_bf16_causal_warg"
SINK = "sm90_d64_bf16_causal_gqa8_sink_lse"
E4M3 = "sm90_d128_e4m3_causal_lse"
STEMS = (DENSE, PAGED, PACKED, WINDOW, SINK, E4M3)
Given = dict[str, Any]


class Loaded(NamedTuple):
    """A package, what its calls launched and how many of them were checked."""

    package: ModuleType
    launched: list[tuple[str, tuple[Any, ...]]]
    checked: list[str]

    def call(self, given: Given) -> int:
        """How many checks a call made; it was launched once."""
        before = len(self.checked), len(self.launched)
        self.package.fmha(**arguments(given))
        assert len(self.launched) == before[1] + 1
        return len(self.checked) - before[0]

    def refusal(self, given: Given) -> str:
        """What a call says that launches nothing."""
        before = len(self.launched)
        with pytest.raises(ValueError) as error:
            self.package.fmha(**arguments(given))
        assert len(self.launched) == before
        return str(error.value)


@pytest.fixture(scope="module")
def vendored(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return imported(tmp_path_factory.mktemp("alike"), STEMS, stand_in=False)[0]


@pytest.fixture
def loaded(vendored: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    vendored.alike.cache_clear()
    found = Loaded(vendored, [], [])
    on_cpu = -1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: on_cpu)
    monkeypatch.setattr(vendored, "current_device", lambda: torch.cuda.current_device())
    chosen = vendored.kernel_for

    def kernel_for(*asked: Any) -> str:
        found.checked.append(chosen(*asked))
        return found.checked[-1]

    monkeypatch.setattr(vendored, "kernel_for", kernel_for)
    for name in STEMS:
        kernel = vendored.load(name)

        def function(*given: Any, name: str = name, kernel: Any = kernel) -> None:
            described = kernel.arguments()
            compare(dict(zip(described, given, strict=False)), described)
            found.launched.append((name, given))

        monkeypatch.setattr(kernel, "compile", lambda function=function: function)
        monkeypatch.setattr(kernel, "sm_count", lambda _device: SM_COUNT)
    return found


def dense(**shape: Any) -> Given:
    q, k, v = tensors(**{"heads": 8, **shape})
    return {"q": q, "k": k, "v": v, "out": torch.zeros_like(q), "causal": True}


def rows(page: int | None = None) -> Given:
    given = packed(page=page, heads=8, head_dim=128)
    return given | {"out": torch.zeros_like(given["q"]), "causal": True}


def paged() -> Given:
    return rows(page=16)


def windowed() -> Given:
    return dense(kv_heads=8) | {"window": (5, 0)}


def sunk() -> Given:
    given = dense(heads=16, qk=64, v=64)
    return given | {"sink": torch.zeros(16), "return_lse": True}


def in_8_bits() -> Given:
    """Bytes of e4m3, and factors of each KV head."""
    given = dense(kv_heads=8, dtype=torch.float8_e4m3fn)
    given |= {name: given[name].view(torch.uint8) for name in "qkv"}
    given["out"] = torch.zeros(given["q"].shape, dtype=torch.bfloat16)
    factors = {name: torch.full((2, 8), 0.5 + i) for i, name in enumerate(DESCALES)}
    return given | factors | {"return_lse": True}


LAYOUTS = {
    DENSE: dense,
    PAGED: paged,
    PACKED: rows,
    WINDOW: windowed,
    SINK: sunk,
    E4M3: in_8_bits,
}
each_layout = pytest.mark.parametrize("name", LAYOUTS)


def copied(given: Given) -> Given:
    return {
        name: x.clone() if isinstance(x, torch.Tensor) else x
        for name, x in given.items()
    }


@each_layout
def test_the_second_call_is_launched_at_once(loaded: Loaded, name: str) -> None:
    """With what the first was given, lse of their own but for it."""
    given = LAYOUTS[name]()
    assert loaded.call(given) == 1
    other = copied(given)
    assert loaded.call(other) == 0
    assert loaded.call(other | {"softmax_scale": 0.25}) == 0
    (_, first), (_, second), (_, third) = loaded.launched
    described = list(loaded.package.load(name).arguments())
    for argument, ours, theirs in zip(described, first, second, strict=False):
        if argument in given:
            assert ours.data_ptr() == given[argument].data_ptr()
            assert theirs is other[argument]
        else:
            assert (argument, ours.shape) == ("lse", theirs.shape)
    numbers = len(described)
    assert first[numbers:] == second[numbers:]
    assert third[numbers:] == (0.25, *first[numbers + 1 :])


@each_layout
def test_a_call_without_out_is_too(loaded: Loaded, name: str) -> None:
    """Its outputs are those of the first in all but what is in them."""
    given = LAYOUTS[name]()
    del given["out"]
    assert [loaded.call(given), loaded.call(given)] == [1, 0]
    asked = arguments(given)
    first, second = (loaded.package.fmha(**asked) for _ in range(2))
    loaded.package.alike.cache_clear()
    checked = loaded.package.fmha(**asked)
    for each in (first, second):
        for x, right in zip(*map(outputs, (each, checked)), strict=True):
            assert (x.shape, x.dtype, x.stride()) == (
                right.shape,
                right.dtype,
                right.stride(),
            )


def outputs(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


@each_layout
def test_so_is_a_call_of_the_operator(loaded: Loaded, name: str) -> None:
    """As in the graph of a compiler, which allocates the lse."""
    package, given = loaded.package, LAYOUTS[name]()
    lse = package.new_lse(given["q"]) if name in (PAGED, SINK, E4M3) else None
    window = given.pop("window", (-1, -1))
    given.pop("return_lse", None)
    known = package.Tensors(**{x: given[x] for x in given if x != "causal"}, lse=lse)
    for again in range(2):
        package.OPERATOR(*known, *package.Options(True, *window), None)
        assert (len(loaded.checked), len(loaded.launched)) == (1, again + 1)


def spread(x: Any) -> Any:
    """The same values with other strides."""
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    view = wide[..., : x.shape[-1]] if x.ndim > 1 else wide[::2]
    return view.copy_(x)


def fewer(given: Given, **sizes: int) -> Given:
    return given | {name: given[name][:size] for name, size in sizes.items()}


def others() -> Any:
    """What makes a call another: its name, the call that was checked, and the change."""
    for name, layout in LAYOUTS.items():
        for argument, x in layout().items():
            if isinstance(x, torch.Tensor):
                yield f"{name} {argument}", layout, lambda given, n=argument: given | {
                    n: spread(given[n])
                }
    yield "no out", paged, lambda given: given | {"out": None}
    yield "no factors", in_8_bits, lambda given: given | dict.fromkeys(DESCALES)
    yield "one for all", in_8_bits, lambda given: given | {
        "k_descale": torch.tensor(2.0).expand(2, 8)
    }
    yield "lse", paged, lambda given: given | {"return_lse": True}
    yield "short sequences", rows, lambda given: given | {"max_seqlen_q": 60}
    yield "another window", windowed, lambda given: given | {"window": (6, 0)}
    yield "rows of q", rows, lambda given: fewer(given, q=97, out=97)
    yield "rows of k", rows, lambda given: fewer(given, k=118, v=118)
    yield "batch", dense, lambda given: fewer(given, q=1, k=1, v=1, out=1)
    yield "pages", paged, lambda given: fewer(given, k=8, v=8)
    yield "sequences", paged, lambda given: fewer(
        given, cu_seqlens_q=4, seqused_k=3, block_table=3
    )
    yield "blocks", paged, lambda given: given | {
        "block_table": given["block_table"][:, :-1].contiguous()
    }


OTHERS = {name: each for name, *each in others()}


@pytest.mark.parametrize("what", OTHERS)
def test_what_makes_a_call_another(loaded: Loaded, what: str) -> None:
    layout, change = OTHERS[what]
    given = layout()
    loaded.call(given)
    other = change(given)
    assert [loaded.call(other), loaded.call(other), loaded.call(given)] == [1, 0, 0]


def test_gradients(loaded: Loaded) -> None:
    """Refused where they are recorded, else no matter: as ever."""
    given = sunk()
    loaded.call(given)
    for name in ("q", "k", "v", "out", "sink"):
        wanted = given | {name: given[name].clone().requires_grad_()}
        assert loaded.refusal(wanted).startswith(f"{name}: requires a gradient")
        with torch.no_grad():
            assert loaded.call(wanted) == 0


def test_e4m3_and_its_bytes_are_alike(loaded: Loaded) -> None:
    """So are tensors that require a gradient, where none is recorded."""
    given = in_8_bits()
    loaded.call(given)
    numbers = {name: given[name].view(torch.float8_e4m3fn) for name in "qkv"}
    assert loaded.call(given | numbers) == 0
    for name in ("q", "k", "v", *DESCALES):
        x = (given | numbers)[name].clone().requires_grad_()
        wanted = given | numbers | {name: x}
        assert loaded.refusal(wanted).startswith(f"{name}: requires a gradient")
        with torch.no_grad():
            assert loaded.call(wanted) == 0
    (_, first), *others = loaded.launched
    for _, launched in others:
        for ours, theirs in zip(first[:3], launched, strict=False):
            assert theirs.dtype is torch.uint8 and torch.equal(ours, theirs)


def test_factors_that_nobody_gives(loaded: Loaded) -> None:
    """One number in memory, which is made once."""
    given = in_8_bits() | dict.fromkeys(DESCALES)
    assert [loaded.call(given), loaded.call(given)] == [1, 0]
    (_, first), (_, second) = loaded.launched
    *_, one = loaded.package.CONSTANTS.values()
    for factors in (*first[3:6], *second[3:6]):
        assert factors.tolist() == [[1.0] * 8] * 2 and factors.stride() == (0, 0)
        assert factors.data_ptr() == one.data_ptr()


def shifted(x: Any) -> Any:
    """The same layout, two bytes behind an address that is aligned."""
    memory = x.new_zeros(x.numel() + 1)
    return memory[1:].view(x.shape)


def freed(x: Any) -> Any:
    view = x.clone()
    view.untyped_storage().resize_(0)
    return view


def refused() -> Any:
    """What is wrong with a call: its name, a right call, the change, how the message begins."""

    def put(name: str, edit: Callable[[Any], Any]) -> Callable[[Given], Given]:
        return lambda given: given | {name: edit(given[name])}

    for layout in (dense, paged):
        for name in ("q", "k", "v", "out"):
            for edit in (shifted, freed, torch.Tensor.half, lambda x: x.to("meta")):
                if edit is freed or name != "q":
                    yield layout, put(name, edit), f"{name}: "
            if name != "q":
                blamed = "k" if name == "k" else "out"  # v says how wide out is
                yield layout, put(name, lambda x: x[..., :64]), f"{blamed}: needs shape"
            if name != "out":

                def inside(given: Given, name: str = name) -> Given:
                    size = max(given["out"].numel(), given[name].numel())
                    memory = given["out"].new_zeros(size)
                    views = {
                        x: memory[: given[x].numel()].view(given[x].shape)
                        for x in ("out", name)
                    }
                    return given | views

                yield layout, inside, f"out: shares memory with {name}"
        for scale in (0.0, -1.0, math.inf, math.nan):
            yield layout, lambda given, scale=scale: given | {
                "softmax_scale": scale
            }, "softmax_scale: must be"
    for name in ("cu_seqlens_q", "seqused_k", "block_table"):
        yield paged, put(name, torch.Tensor.long), f"{name}: needs dtype"
        yield paged, put(name, freed), f"{name}: is empty or null"

        def held(given: Given, name: str = name) -> Given:
            x = given[name]
            memory = given["out"].view(torch.int32).flatten()
            return given | {name: memory[: x.numel()].view(x.shape).copy_(x)}

        yield paged, held, f"out: shares memory with {name}"
    yield paged, put("seqused_k", lambda x: x[:3]), "seqused_k: needs shape"
    yield paged, put("cu_seqlens_q", lambda x: x[:4]), "seqused_k: needs shape"
    yield rows, put("cu_seqlens_k", lambda x: x[:4]), "cu_seqlens_k: needs shape"
    yield rows, put("cu_seqlens_k", torch.Tensor.long), "cu_seqlens_k: needs dtype"
    yield rows, put("v", lambda x: x[:-1]), "k: needs shape"  # v says how many
    yield sunk, put("sink", lambda x: x[:8]), "sink: needs shape"
    yield sunk, put("sink", torch.Tensor.half), "sink: needs dtype"
    for name in DESCALES:
        yield in_8_bits, put(name, lambda x: x[:, :7]), f"{name}: needs shape (2, 8)"
        yield in_8_bits, put(name, torch.Tensor.half), f"{name}: needs dtype"
        yield in_8_bits, put(name, freed), f"{name}: is empty or null"
        yield in_8_bits, put(name, lambda x: x.to("meta")), f"{name}: needs device"

        def inside(given: Given, name: str = name) -> Given:
            memory = given["out"].view(torch.float32).flatten()
            return given | {name: memory[:16].view(2, 8)}

        yield in_8_bits, inside, f"out: shares memory with {name}"
    yield in_8_bits, put("out", torch.Tensor.half), "no kernel takes"
    yield in_8_bits, put("out", torch.Tensor.float), "out: needs dtype torch.bfloat16"
    yield in_8_bits, put("k", torch.Tensor.half), "k: needs dtype torch.uint8, as q"
    starts = torch.zeros(5, dtype=torch.int32)
    yield paged, lambda given: given | {"cu_seqlens_k": starts}, "cu_seqlens_q: needs"
    yield dense, lambda given: given | {"cu_seqlens_k": starts}, "cu_seqlens_k: needs"
    yield dense, lambda given: given | {"causal": False}, "no kernel takes"
    yield dense, lambda given: given | {"softcap": 30.0}, "no kernel takes"
    yield dense, lambda given: given | {"sink": torch.zeros(8)}, "no kernel takes"
    yield dense, lambda given: given | {"return_lse": True}, "no kernel takes"
    yield dense, lambda given: given | {
        "k_descale": torch.ones(2, 2)
    }, "no kernel takes"
    yield dense, put("q", lambda x: x[:, :, :7]), "out: needs shape"
    yield windowed, lambda given: given | {"window": (5.0, 0)}, "window_left: must be"


REFUSED = list(refused())


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_refused_after_a_right_call(loaded: Loaded, number: int) -> None:
    """In the words of a first call."""
    layout, change, begin = REFUSED[number]
    wrong = change(layout())
    first = loaded.refusal(wrong)
    assert first.startswith(begin)
    given = layout()
    assert [loaded.call(given), loaded.call(given)] == [1, 0]
    assert loaded.refusal(wrong) == first
    assert loaded.call(given) == 0


def test_outputs_that_share_memory_with_each_other(loaded: Loaded) -> None:
    """Only the operator is given an lse."""
    package, given = loaded.package, paged()
    lse = torch.zeros(8, len(given["q"]))
    known = package.Tensors(**{x: given[x] for x in given if x != "causal"}, lse=lse)
    options = (*package.Options(True), None)
    for _ in range(2):
        package.OPERATOR(*known, *options)
    inside = known.out.view(torch.float32).flatten()[: lse.numel()].view(lse.shape)
    with pytest.raises(ValueError, match=r"^lse: shares memory with out"):
        package.OPERATOR(*known._replace(lse=inside), *options)
    with pytest.raises(ValueError, match=r"^lse: requires a gradient"):
        package.attend(*known._replace(lse=lse.clone().requires_grad_()), *options)
    assert len(loaded.launched) == 2


def test_outputs_between_the_rows_of_an_input(loaded: Loaded) -> None:
    """Apart, which only the full check can see."""
    given = dense()
    both = torch.stack([given["q"], given["out"]], dim=2)
    given |= {"q": both[:, :, 0], "out": both[:, :, 1]}
    assert [loaded.call(given), loaded.call(given)] == [1, 1]


def test_another_device_is_current(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dense()
    loaded.call(given)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert loaded.refusal(given).startswith("q: is on device -1, which is not the")


def test_what_a_driver_says_is_raised(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, calls = dense(), []

    def function(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no GPU")

    monkeypatch.setattr(loaded.package.load(DENSE), "compile", lambda: function)
    loaded.package.fmha(**given)
    with pytest.raises(RuntimeError, match="no GPU"):
        loaded.package.fmha(**given)
    assert len(calls) == 2


def test_a_refused_call_is_not_remembered(loaded: Loaded) -> None:
    given = dense()
    wrong = given | {"out": given["q"]}
    for _ in range(2):
        assert loaded.refusal(wrong) == "out: shares memory with q"
    assert loaded.call(given) == 1


def test_traces_after_a_right_call(loaded: Loaded) -> None:
    package, given = loaded.package, dense()
    names = list(given)[:4]
    loaded.call(given)

    def call(*x: Any) -> Any:
        return package.fmha(**dict(zip(names, x, strict=True)), causal=True)

    values = [given[name] for name in names]
    with FakeTensorMode() as mode:
        call(*map(mode.from_tensor, values))
    call(*(x.to("meta") for x in values))
    assert len(loaded.launched) == 1
    graph = make_fx(call)(*values).graph
    assert package.OPERATOR in [node.target for node in graph.nodes]
    loaded.launched.clear()
    torch._dynamo.reset()
    seen = []

    def backend(module: Any, _: Any) -> Any:
        seen.extend(node.target for node in module.graph.nodes)
        return module.forward

    torch.compile(call, fullgraph=True, backend=backend)(*values)
    assert package.OPERATOR in seen and len(loaded.launched) == 1


class Seen(torch.Tensor):
    """A tensor that looks at what is done with it, and has memory like any other."""

    functions: ClassVar[list[Any]] = []

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.functions.append(function)
        with torch._C._DisableTorchDispatch():
            plain = [
                x.as_subclass(torch.Tensor) if isinstance(x, cls) else x for x in args
            ]
            return function(*plain, **(kwargs or {}))


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_subclasses_after_a_right_call(loaded: Loaded, name: str) -> None:
    given = dense()
    loaded.call(given)
    Seen.functions.clear()
    loaded.call(given | {name: given[name].as_subclass(Seen)})
    assert loaded.package.OPERATOR in Seen.functions


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_functorch_after_a_right_call(loaded: Loaded, name: str) -> None:
    """Its tensors say that they are plain, with the sizes of one of a batch."""
    given = dense()
    loaded.call(given)

    def layer(x: Any) -> Any:
        return loaded.package.fmha(**given | {name: x})

    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.vmap(layer)(torch.stack([given[name]] * 2))
    assert len(loaded.launched) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_traces_after_a_right_call(loaded: Loaded) -> None:
    given = dense()
    del given["out"]
    loaded.call(given)

    def layer(q: Any, k: Any, v: Any) -> Any:
        return loaded.package.fmha(q, k, v, causal=True)

    values = tuple(given[name] for name in "qkv")
    traced = torch.jit.trace(layer, values, check_trace=False)
    assert "::fmha" in str(traced.graph)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_tangents(loaded: Loaded, name: str) -> None:
    """Of forward-mode differentiation, with which gradients have nothing to do."""
    given = dense()
    loaded.call(given)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given[name], given[name].clone())
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                said = loaded.refusal(given | {name: dual})
                assert said.startswith(f"{name}: has a tangent")
        loaded.call(given)

    def layer(x: Any) -> Any:
        return loaded.package.fmha(**given | {name: x})

    with pytest.raises(ValueError, match=f"^{name}: has a tangent"):
        torch.func.jvp(layer, (given[name],), (given[name].clone(),))


def test_strides_that_reach_nothing(loaded: Loaded) -> None:
    """Of axes of one element: a tensor may say any, and is contiguous with them."""
    given = dense()
    given |= {name: given[name][:1] for name in ("q", "k", "v", "out")}
    other = dict(given)
    for name in ("q", "k", "v", "out"):
        x = given[name]
        other[name] = x.as_strided(x.shape, (7, *x.stride()[1:]))
    assert [loaded.call(given), loaded.call(other)] == [1, 0]
    inside = other | {"out": other["q"]}
    assert loaded.refusal(inside).startswith("out: shares memory with q")


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_a_write_of_out_is_counted(loaded: Loaded, no_grad: Any) -> None:
    given = dense()
    with no_grad():
        loaded.call(given)
        before = given["out"]._version
        assert loaded.call(given) == 0
        assert given["out"]._version == before + 1
        assert loaded.call(dense()) == 0


def test_threads(loaded: Loaded) -> None:
    calls = [layout() for layout in LAYOUTS.values()] * 40
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda given: loaded.package.fmha(**arguments(given)), calls))
    assert len(loaded.launched) == len(calls)
    for name, (*_, sm_count) in loaded.launched:
        assert name in STEMS and sm_count == SM_COUNT


def test_what_is_remembered_is_bounded(loaded: Loaded) -> None:
    assert loaded.package.alike.cache_info().maxsize == 4096
