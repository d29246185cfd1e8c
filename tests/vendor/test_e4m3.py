# SPDX-License-Identifier: Apache-2.0
"""A package's functions on e4m3: which kernel they take, its factors, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .standins import (
    DESCALES,
    arguments,
    expected,
    imported,
    packed,
    source_of,
    tensors,
)
from .test_dropin import ADAPTERS, FUNCTIONS, call_of, close, function, layouts

torch = pytest.importorskip("torch", reason="the adapters are for PyTorch's tensors")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

E4M3: dict[str, Any] = {"dtype": "e4m3", "out_dtype": "bf16", "q_per_kv": 2}
PLAIN: dict[str, Any] = E4M3 | {"batch": "dense"}
DENSE: dict[str, Any] = PLAIN | {"descale": "head"}
CAUSAL: dict[str, Any] = DENSE | {"mask": "causal"}
VARLEN: dict[str, Any] = E4M3 | {"descale": "head", "mask": "causal", "lse": True}
BF16: dict[str, Any] = {"q_per_kv": 2, "mask": "causal", "lse": True}
LINEAR: dict[str, Any] = {"exp": "linear"}
SPECS: dict[str, dict[str, Any]] = {
    "bf16_dense": BF16 | {"batch": "dense"},
    "bf16_packed": BF16,
    "bf16_paged32": BF16 | {"kv": {"paged": {"page": 32}}},
    "bf16_paged16": BF16 | {"kv": {"paged": {"page": 16}}},
    "dense_linear": CAUSAL | LINEAR | {"seqlen": {"q": 33, "kv": 40}},
    "dense_lse": CAUSAL | {"lse": True},
    "dense_fp16": CAUSAL | {"out_dtype": "fp16"},
    "full_linear": DENSE | LINEAR,
    "full_permuted": DENSE | {"v_layout": "permuted"},
    "full_plain": PLAIN,
    "packed_lse": VARLEN,
    "paged_lse": VARLEN | {"kv": {"paged": {"page": 16}}},
    "w7_plain": PLAIN | {"mask": "causal", "window": {"left": 7, "right": "none"}},
}
FLOAT8 = torch.float8_e4m3fn
Loaded = tuple[ModuleType, list[str]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("e4m3")
    source = source_of(folder / "generated", SPECS)
    return imported(folder, tuple(SPECS), ADAPTERS, source)


@pytest.fixture
def package(loaded: Loaded) -> ModuleType:
    return loaded[0]


@pytest.fixture
def calls(loaded: Loaded) -> list[str]:
    loaded[1].clear()
    return loaded[1]


def dense(queries: int = 33, **shape: Any) -> dict[str, Any]:
    made = tensors(queries, 40, heads=4, qk=64, v=64, dtype=FLOAT8, **shape)
    return dict(zip("qkv", made, strict=True))


def factors(batch: int = 2) -> dict[str, Any]:
    """One for all, one for a sequence, and one for each KV head: strides (0, 0), (1, 0), (1, 3)."""
    found = (
        torch.tensor(0.5).expand(batch, 2),
        torch.linspace(0.25, 2.0, batch)[:, None].expand(batch, 2),
        torch.linspace(0.1, 3.0, 3 * batch).view(3, batch)[:2].T,
    )
    return dict(zip(DESCALES, found, strict=True))


# --- what the functions of others honour -------------------------------------------------


@pytest.mark.parametrize("dtype", [FLOAT8, torch.uint8])
@pytest.mark.parametrize(("adapter", "name"), FUNCTIONS)
def test_factors_reach_the_kernel(
    loaded: Loaded, calls: list[str], adapter: str, name: str, dtype: Any
) -> None:
    run = function(loaded, adapter, name)
    for layout, page in layouts(name):
        asked, given = call_of(adapter, name, page, FLOAT8)
        told = factors(2 if layout == "dense" else 4)
        wanted, _ = expected(given | told, causal=True)
        cut = {x: t.view(dtype) for x, t in asked.items() if is_e4m3(t)}
        asked |= cut | {"causal": True}
        found = run(**asked, **told)
        assert found.dtype is torch.bfloat16
        close(found, wanted)
        out = torch.zeros_like(found)
        for _ in range(2):
            assert run(**asked, **told, out=out.zero_()) is out
            assert torch.equal(out, found)
        assert calls == [f"{layout}_lse"] * 3
        calls.clear()


def is_e4m3(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype is FLOAT8


@pytest.mark.parametrize(("adapter", "name"), FUNCTIONS)
def test_factors_that_are_left_out_are_1(
    loaded: Loaded, adapter: str, name: str
) -> None:
    run = function(loaded, adapter, name)
    for layout, page in layouts(name):
        asked, given = call_of(adapter, name, page, FLOAT8)
        close(run(**asked, causal=True), expected(given, causal=True)[0])
        for left, factor in factors(2 if layout == "dense" else 4).items():
            found = run(**asked, causal=True, **{left: factor})
            close(found, expected(given | {left: factor}, causal=True)[0])


@pytest.mark.parametrize(("adapter", "name"), FUNCTIONS)
def test_factors_of_16_bits_are_ignored(
    loaded: Loaded, calls: list[str], adapter: str, name: str
) -> None:
    """vLLM hands them over with any cache; `fmha` itself is not vLLM's, and refuses them."""
    run = function(loaded, adapter, name)
    for layout, page in layouts(name):
        asked, given = call_of(adapter, name, page)
        found = run(**asked, causal=True, **dict.fromkeys(DESCALES, torch.zeros(1)))
        close(found, expected(given, causal=True)[0])
        assert calls.pop() == f"bf16_{layout}" + "16" * bool(page)
    q, k, v = (x.float().bfloat16() for x in dense().values())
    with pytest.raises(ValueError, match="bf16_dense: descale is none, not head"):
        loaded[0].fmha(q, k, v, causal=True, descales=tuple(factors().values()))


def test_a_cache_of_one_row_per_sequence(loaded: Loaded, calls: list[str]) -> None:
    """In pages of a kernel for e4m3, not of the longer ones of bf16."""
    run = function(loaded, "flash_attention", "flash_attn_with_kvcache")
    q, k, v = tensors(3, 64, heads=4, qk=64, v=64, dtype=FLOAT8)
    given = {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": v.flatten(0, 1)}
    given["cu_seqlens_q"] = torch.tensor([0, 3, 6], dtype=torch.int32)
    given["cu_seqlens_k"] = torch.tensor([0, 64, 128], dtype=torch.int32)
    found = run(q, k, v, causal=True, **factors())
    close(found, expected(given | factors(), causal=True)[0])
    assert calls == ["paged_lse"] and found.dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"48 keys, .* for fp16: \[\]"):
        run(*(x.half()[:, :48] for x in (q, k, v)))


# --- which kernel is taken ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("dense_lse", {"causal": True}),  # exact, before one with fewer needless things
        ("dense_lse", {"causal": True, **factors()}),
        ("dense_fp16", {"causal": True, "out": torch.float16}),
        ("full_plain", {}),  # exact, and without factors
        ("full_linear", factors()),  # no exact one has them
        ("w7_plain", {"causal": True, "window": (7, 0)}),
    ],
)
def test_exact_kernels_come_first(
    package: ModuleType, calls: list[str], name: str, asked: dict[str, Any]
) -> None:
    given = dense()
    if "out" in asked:
        out = torch.zeros(given["q"].shape, dtype=asked["out"])
        asked = asked | {"out": out}
    call = arguments(given | asked)
    found = package.fmha(**call)
    assert calls == [name]
    assert package.select(**call).SPEC["name"] == name
    flat = {x: t.flatten(0, 1) for x, t in given.items()}
    flat["cu_seqlens_q"] = torch.tensor([0, 33, 66], dtype=torch.int32)
    flat["cu_seqlens_k"] = torch.tensor([0, 40, 80], dtype=torch.int32)
    told = {x: asked[x] for x in DESCALES if x in asked}
    options = {x: asked[x] for x in ("causal", "window") if x in asked}
    close(found, expected(flat | told, **options)[0])


def test_what_is_said_of_shipped_kernels(tmp_path: Path) -> None:
    stems = (
        "sm90_d128_e4m3_causal_lse",
        "sm90_d64_e4m3_linear_full",
        "sm90_d64_e4m3_permuted_linear_causal",
    )
    package, calls = imported(tmp_path, stems)
    made = [package.KERNELS[stem] for stem in stems]
    assert [(x.v_layout, x.descale, x.exp, x.out_dtype) for x in made] == [
        ("rows", "head", "exact", "bf16"),
        ("rows", "none", "linear", "bf16"),
        ("permuted", "head", "linear", "bf16"),
    ]
    text = (Path(package.__file__).parent / "README.md").read_text()
    assert "| sm90 e4m3, head_dim 64, causal, any seqlen, V permuted, descales" in text
    q, k, v = tensors(33, 40, dtype=FLOAT8)
    found = package.fmha(q, k, v, causal=True, descales=tuple(factors().values()))
    assert calls == [stems[0]] and found.dtype is torch.bfloat16


# --- what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"k_descale": torch.ones(2, 4)}, r"^k_descale: .*\(2, 2\), not \(2, 4\)"),
        ({"v_descale": torch.ones(2)}, r"^v_descale: .*\(2, 2\), not \(2,\)"),
        ({"q_descale": torch.ones(1, 1)}, r"^q_descale: .*\(2, 2\), not \(1, 1\)"),
        ({"q_descale": torch.ones(2, 2).half()}, r"^q_descale: .*float32, not .*float16"),
        ({"v_descale": torch.ones(2, 2).double()}, r"^v_descale: .*float32, not"),
        ({"k_descale": torch.ones(2, 2, device="meta")}, "^k_descale: .*device cpu, as q"),
        ({"k_descale": torch.ones(2, 2).requires_grad_()}, "^k_descale: requires a grad"),
        ({"out": torch.zeros(2, 33, 4, 64)}, r"^out: needs dtype torch\.bfloat16, not"),
        ({"out": torch.zeros(2, 33, 4, 64).to(FLOAT8)}, r"^out: needs .*bfloat16, not"),
        ({"k": torch.zeros(2, 40, 2, 64)}, r"^k: needs dtype .*e4m3fn, as q, not .*float32"),
        ({"q": torch.zeros(2, 33, 4, 64).bfloat16()}, r"^k: .*bfloat16, as q, not .*e4m3fn"),
        ({"q": torch.zeros(33, 4, 64).to(FLOAT8)}, "^q: needs 4 dimensions, has 3"),
        ({"k": torch.zeros(8).to(FLOAT8)}, "^k: needs 4 dimensions, has 1"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together(
    package: ModuleType, calls: list[str], edit: dict[str, Any], message: str
) -> None:
    for told in (factors(), {}):
        with pytest.raises(ValueError, match=message):
            package.fmha(**arguments(dense() | told | edit), causal=True)
    assert calls == []


@pytest.mark.parametrize("name", DESCALES)
def test_factors_that_no_kernel_takes(package: ModuleType, name: str) -> None:
    """Not dropped, though a kernel without them fits otherwise."""
    given = dense() | {name: torch.ones(2, 2)}
    with pytest.raises(ValueError) as error:
        package.fmha(**arguments(given), causal=True, window=(7, 0))
    assert "  w7_plain: descale is none, not head" in str(error.value)


def test_kernels_that_are_missing(tmp_path: Path) -> None:
    """Each layout is found by what a SPEC says, and is named where no kernel has it."""
    names = ("dense_fp16", "full_permuted")
    source = source_of(tmp_path / "generated", {name: SPECS[name] for name in names})
    package, calls = imported(tmp_path, names, ADAPTERS, source)
    loaded = package, calls
    missing = {
        "dense": "dense_fp16: out_dtype is fp16, not bf16",
        "packed": "dense_fp16: batch is dense, not varlen; ",
        "paged": "dense_fp16: batch is dense, not varlen; page is none, not 16; ",
    }
    for adapter, name in FUNCTIONS:
        for layout, page in layouts(name):
            asked, _ = call_of(adapter, name, page, FLOAT8)
            told = factors(2 if layout == "dense" else 4)
            with pytest.raises(ValueError) as error:
                function(loaded, adapter, name)(**asked, **told, causal=True)
            said = str(error.value)
            assert said.startswith("no kernel takes arch sm90, dtype e4m3, ")
            assert missing[layout] in said
    q, k, v = dense().values()
    with pytest.raises(ValueError, match=r"_permuted: v_layout is permuted, not rows"):
        package.fmha(q, k, v)
    other = (x.float().to(torch.float8_e5m2) for x in (q, k, v))
    with pytest.raises(ValueError, match=r"dtype is e4m3, not torch\.float8_e5m2"):
        package.fmha(*other)
    assert calls == []


@pytest.mark.parametrize("empty", ["q", "kv"])
def test_an_empty_problem(package: ModuleType, calls: list[str], empty: str) -> None:
    given = dense()
    given |= {x: given[x][:, :0] for x in given if x in empty}
    out, lse = package.fmha_lse(**given, causal=True)
    shape = given["q"].shape
    assert torch.equal(out, torch.zeros(shape, dtype=torch.bfloat16))
    assert lse.shape == (2, 4, shape[1]) and bool((lse == -torch.inf).all())
    assert calls == []


# --- traces ------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [{}, factors(4)], ids=["left out", "given"])
@pytest.mark.parametrize("page", [None, 16])
def test_compile_takes_it_whole(
    package: ModuleType, page: int | None, told: dict[str, Any]
) -> None:
    names = [*packed(page=page), *told]

    def layer(*given: Any) -> Any:
        asked = arguments(dict(zip(names, given, strict=True)))
        out, lse = package.fmha_lse(**asked, causal=True)
        return out + 1, lse * 2

    torch._dynamo.reset()
    kept = dict(package.CONSTANTS)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for queries in ((33, 0, 1, 60), (5, 9, 0, 2)):
        given = packed(queries, page=page, spare=0, dtype=FLOAT8) | told
        found = compiled(*given.values())
        assert kept == package.CONSTANTS  # the graph makes its own
        package.CONSTANTS.clear()
        for x, right in zip(found, layer(*given.values()), strict=True):
            torch.testing.assert_close(x, right)
        kept = dict(package.CONSTANTS)


@pytest.mark.parametrize("edit", [{"window": (7, 0)}, {"k_descale": torch.ones(2, 3)}])
def test_a_trace_refuses_what_no_kernel_takes(
    package: ModuleType, edit: dict[str, Any]
) -> None:
    given = dense() | factors() | edit
    with pytest.raises(ValueError) as real:
        package.fmha(**arguments(given), causal=True)
    with FakeTensorMode() as mode, pytest.raises(ValueError) as fake:
        faked = {
            name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for name, x in given.items()
        }
        package.fmha(**arguments(faked), causal=True)
    assert str(fake.value) == str(real.value)


def test_opcheck(package: ModuleType) -> None:
    given = {x: t.view(torch.uint8) for x, t in dense().items()} | factors()
    out = torch.zeros(given["q"].shape, dtype=torch.bfloat16)
    known = package.Tensors(**given, out=out, lse=torch.zeros(2, 4, 33))
    options = package.Options(causal=True, descale=True)
    torch.library.opcheck(package.OPERATOR, (*known, *options, None))
